"""Figures of the driver about a GPU become findings: each injected defect by name, with its remedy,
and nothing about a healthy GPU. NVML is the fake of this folder."""

import os
import re
import sys

import pytest
from harness import naming

from needle.diagnose import machine as driver
from needle.nvml import Nvml, name_of

pytestmark = pytest.mark.slow
HEALTHY = "1.0 GiB of 141.0 GiB in use, busy 0 %, 35 C, 120 of 700 W, 1980 of 1980 MHz, ECC on"


@pytest.fixture
def seen(pynvml, machine, heard, monkeypatch):
    """seen(injected) -> the findings about the fake GPUs."""
    library = str(machine.folder / "lib/libnvidia-ml.so.1")
    monkeypatch.setattr(driver, "Nvml", lambda: Nvml(library))

    def look(injected: str = "") -> list:
        monkeypatch.setenv("NEEDLE_FAKE", injected)
        heard.findings.clear()
        driver.examine_gpus(heard)
        return heard.findings

    return look


def texts(findings, level: str) -> dict[str, str]:
    """The texts by check; those of one check are joined."""
    found: dict[str, str] = {}
    for f in findings:
        if f.level == level:
            found[f.what] = f"{found.get(f.what, '')}; {f.text}"
    return found


def test_healthy_gpus_are_described_and_nothing_is_wrong(pynvml, examined):
    one = examined("machine", injected="count=2")
    assert one.ended == "done" and not texts(one.findings, "failed")
    assert [f.where for f in one.findings if HEALTHY in f.text] == ["GPU 0", "GPU 1"]
    assert set(texts(one.findings, "note")) <= {"Xid"}
    assert one.facts["driver"] == "13.0" and one.facts["release"] == "580.65.06"
    assert [gpu["uuid"][-2:] for gpu in one.facts["gpus"]] == ["00", "01"]
    assert one.facts["uuids"] == [gpu["uuid"] for gpu in one.facts["gpus"]]
    assert one.facts["cuda"]["usable"] and one.facts["cuda"]["count"] == 2


def test_broken_gpu_is_named_with_each_defect(seen):
    """The second of two GPUs is broken; 1 of its 141 GiB is left."""
    parent = os.getppid()
    injected = "count=2,at=1,ecc=3,pending=1,reasons=0x6c,links=4,links_up=3"
    found = seen(f"{injected},used={140 << 30},holder={parent}")
    failed, notes = texts(found, "failed"), texts(found, "note")
    assert {f.where for f in found if f.has_failed} == {"GPU 1"}
    assert "3 uncorrected" in failed["ECC"] and "waits to be replaced" in failed["rows"]
    assert "1.0 GiB of 141.0 GiB are free" in failed["memory"]
    assert f"process {parent} ({name_of(parent)}) holds 140.0 GiB" in failed["memory"]
    assert failed["throttling"].count("too hot") == 2 and "slows" in failed["throttling"]
    assert "3 of 4 NVLinks are up" in notes["NVLink"] and "power limit" in notes["throttling"]
    assert all(f.remedy for f in found if f.has_failed)
    assert "nvidia-smi --gpu-reset -i 1" in [f for f in found if f.what == "ECC"][0].remedy


def test_settings_that_are_no_defects_are_notes(seen):
    found = seen(
        "reasons=0x2,ecc_on=0,ecc_ever=2,mig=1,persistence=0,compute=3,power_limit=350000,"
        "width=8,busy=100"
    )
    notes = texts(found, "note")
    assert not texts(found, "failed")
    assert "limited to 350 of 700 W" in notes["power"] and "x8 instead of x16" in notes["PCIe"]
    assert "set by a user" in notes["throttling"] and "one process alone" in notes["compute mode"]
    assert "no process is visible" in notes["utilization"] and "MIG is on" in notes["MIG"]
    assert {"ECC", "persistence"} <= set(notes)


def test_one_defect_is_one_failure(seen):
    for injected, said, remedy in (
        ("compute=2", "no computing at all", "nvidia-smi -i 0 -c DEFAULT"),
        ("remap_failed=1", "row remapping has failed", "replaced"),
        ("old=1,retired=1", "waits to be replaced", "--gpu-reset -i 0"),
        ("lost=15", "cannot tell its state: an injected error", "fallen off the bus"),
        ("nvml_error=18", "Driver/library version mismatch", "start the machine anew"),
    ):
        with naming(injected):
            (finding,) = [f for f in seen(injected) if f.has_failed]
            assert said in finding.text and remedy in finding.remedy


def test_driver_that_hangs_is_named(pynvml, examined):
    one = examined("machine", injected="nvml_hangs=1", seconds=4.0)
    (finding,) = one.findings
    assert one.ended == "late" and "opening NVML (libnvidia-ml.so.1) hangs" in finding.text


def test_gpus_that_cuda_does_not_count_fail_and_hidden_ones_are_noted(heard, monkeypatch):
    both = [{"uuid": "GPU-a"}, {"uuid": "GPU-b"}]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    driver.compare(heard, both, ["GPU-b"])
    assert heard.levels()["failed"] == ["the driver sees 2 GPUs, CUDA 1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    driver.compare(heard, both, ["GPU-b"])
    assert heard.levels()["note"] == ["the driver sees 2 GPUs, CUDA 1: CUDA_VISIBLE_DEVICES=1"]
    heard.findings.clear()
    driver.compare(heard, both, ["GPU-b", "GPU-a"])
    driver.compare(heard, [{"uuid": "GPU-a", "modes": {"mig": 1}}], ["GPU-of-a-part"])
    assert not heard.findings


def test_gpu_on_the_bus_without_driver_or_package_is_noted(seen, heard, monkeypatch):
    def nothing():
        raise OSError("libnvidia-ml.so.1: cannot open shared object file")

    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setattr(driver, "on_the_bus", lambda: "a GPU")
    (finding,) = seen()
    assert finding.level == "note" and "pip install nvidia-ml-py" in finding.text
    monkeypatch.setattr(driver, "Nvml", nothing)
    (finding,) = seen()
    assert "cannot open shared object" in finding.text and "nvidia.com/drivers" in finding.remedy
    monkeypatch.setattr(driver, "on_the_bus", lambda: "")
    assert seen() == [] and heard.facts == {"gpus": []}


def test_mps_is_seen_by_its_daemon(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    pid = tmp_path / "nvidia-cuda-mps-control.pid"
    for text, runs in ((None, False), (f"{os.getpid()}\n", True), (f"{2**22 + 1}\n", False)):
        if text is not None:
            pid.write_text(text)
        assert driver.mps_runs() == runs


# ---- Xid errors ---------------------------------------------------------------------------------

LOG = """
6,1,10,-;usb 1-1: new device
4,2,20,-;NVRM: Xid (PCI:0000:01:00): 79, pid=1, name=x, GPU has fallen off the bus.
4,3,30,-;NVRM: Xid (PCI:0000:02:00): 31, pid=77, name=python, Ch 00000008, MMU Fault
4,4,40,-;NVRM: Xid (PCI:0000:02:00): 31, pid=78, name=python, Ch 00000009, MMU Fault
4,5,50,-;NVRM: Xid (PCI:0000:0a:00): 48, pid=78, name=python, of a GPU that is not ours
4,6,60,-;NVRM: Xid (PCI:0000:02:00): 999, a number to come
"""
PLACES = [{"index": 0, "pci": "00000000:01:00.0"}, {"index": 1, "pci": "00000000:02:00.0"}]


def test_xid_errors_are_counted_for_each_gpu():
    """Those of the GPU are failures, those of a program are notes."""
    seen = {(f.where, re.match(r"Xid (\d+)", f.text)[1]): f for f in driver.judge_log(LOG, PLACES)}
    assert set(seen) == {("GPU 0", "79"), ("GPU 1", "31"), ("GPU 1", "999")}
    lost, fault, new = seen.values()
    assert lost.has_failed and "fallen off the bus" in lost.text and "anew" in lost.remedy
    assert fault.level == "note" and "2 times" in fault.text and "pid=78" in fault.text
    assert new.level == "note" and driver.XIDS in new.text
    everywhere = [f.where for f in driver.judge_log(LOG, [])]
    assert "GPU at 0000:0a:00" in everywhere and len(everywhere) == 4


def test_log_is_read_by_dmesg_or_the_journal(heard, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    refused, told = "echo not permitted >&2; exit 1", f"cat <<'E'{LOG}E"
    for dmesg, journal in ((told, refused), (refused, told), (refused, "exit 0")):
        for name, script in (("dmesg", dmesg), ("journalctl", journal)):
            (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
            (tmp_path / name).chmod(0o755)
        heard.findings.clear()
        driver.examine_log(heard, PLACES)
        if told in (dmesg, journal):
            assert "Xid 79 once since" in heard.levels()["failed"][0]
            continue
        (finding,) = heard.findings
        assert finding.level == "note" and "as root: dmesg" in finding.text
        assert "dmesg: not permitted; journalctl: it shows nothing" in finding.text
    heard.findings.clear()
    monkeypatch.setattr(driver, "on_the_bus", lambda: "")
    driver.examine_log(heard, [])
    assert not heard.findings
