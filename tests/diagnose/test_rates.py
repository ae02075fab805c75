"""Rates of a GPU against its data sheet, and copies between GPUs."""

import pytest
from harness import naming

from needle.diagnose import peers, rates
from needle.diagnose.peers import Driver

GOOD = {"bfloat16": 650e12, "memory": 4.1e12, "launch": 3e-6}
GOOD |= {"to_device": 50e9, "from_device": 50e9}
GPU = {
    "holders": [],
    "pcie": {"generation": 5, "width": 16},
    "clocks": {"sm": 1980, "sm_max": 1980, "reasons": 0},
    "power": 600.0,
}


def test_slow_gpu_fails_alone_and_is_noted_where_another_process_computes(heard):
    for change, said in (
        ({}, None),
        ({"bfloat16": 300e12}, "300 TFLOP/s are far below the 989 TFLOP/s"),
        ({"memory": 1e12}, "1e+03 GB/s are far below the 4,800 GB/s"),
        ({"to_device": 3e9}, "3 GB/s to the device are far below"),
        ({"from_device": 1e9}, "1 GB/s from the device are far below"),
    ):
        with naming(said):
            heard.findings.clear()
            rates.judge(heard, "NVIDIA H200", GOOD | change, GPU)
            failed = heard.levels()["failed"]
            assert len(failed) == (said is not None) and (said is None or said in failed[0])
            heard.findings.clear()
            rates.judge(heard, "NVIDIA H200", GOOD | change, GPU | {"holders": [{"pid": 1}]})
            assert not heard.levels()["failed"] and len(heard.levels()["note"]) == len(failed)
            heard.findings.clear()
            rates.judge(heard, "NVIDIA Unheard Of", GOOD | change, None)
            assert not heard.findings


def test_throttling_under_load_and_slow_launches_are_reported(heard):
    hot = GPU | {"clocks": GPU["clocks"] | {"reasons": 0x44}}
    rates.judge(heard, "NVIDIA H200", GOOD | {"launch": 1e-3}, hot)
    assert heard.levels()["failed"] == ["it is too hot: the hardware halves its clocks, under load"]
    assert any("a launch takes 1000 us" in text for text in heard.levels()["note"])


@pytest.mark.slow
def test_rates_are_measured_on_a_gpu(examined):
    one = examined("device", "cuda", 0, where="cuda()", injected="reasons=0x40")
    measured = one.facts["rates"]
    assert set(measured) == set(GOOD) and min(measured.values()) > 0
    assert 1e8 < measured["bfloat16"] < 1e14 and 1e7 < measured["memory"] < 1e12
    assert [f.what for f in one.findings if f.has_failed] == ["throttling"]
    assert {f.what for f in one.findings} >= {"product", "rates", "ops", "step"}
    assert one.facts["device"]["uuid"].endswith("00")


@pytest.mark.slow
@pytest.mark.parametrize(
    "injected, least, level, said",
    [
        ("", 0.0, "ok", "copies between 3 GPUs are right"),
        ("peer_wrong=12", 0.0, "failed", "brings 12 wrong bytes of 1,048,576"),
        ("", 1e15, "failed", "far below its link's"),
        ("peer_access=217", 1e15, "note", "goes by the host"),
        ("peer_error=700", 0.0, "failed", "cuMemcpyPeer failed with error 700"),
    ],
)
def test_copies_between_gpus(machine, heard, monkeypatch, injected, least, level, said):
    library = str(machine.folder / "lib/libcuda.so.1")
    monkeypatch.setattr(peers, "Driver", lambda: Driver(library))
    monkeypatch.setattr(peers, "BULK", 2 * peers.PROBE)
    monkeypatch.setenv("NEEDLE_FAKE", injected)
    peers.examine(heard, [0, 1, 2], least)
    texts = heard.levels()[level]
    assert said in texts[0] and ("cuda(0) to cuda(1)" in texts[0]) == (level != "ok")
    assert len(heard.facts.get("peers", {})) == (0 if "wrong" in said or "700" in said else 3)
