"""What the driver says about a GPU becomes findings: each planted defect by name, with its remedy,
and nothing about a healthy one. NVML is the fake of this folder."""

import os
import re

import pytest

from needle.diagnose import gpus, xid
from needle.nvml import Nvml, name_of

pytestmark = pytest.mark.slow


@pytest.fixture
def seen(machine, heard, monkeypatch):
    """seen(what is planted) -> the Heard that was told about the fake GPUs."""
    library = str(machine.folder / "lib/libnvidia-ml.so.1")
    monkeypatch.setattr(gpus, "Nvml", lambda: Nvml(library))

    def look(planted: str = ""):
        monkeypatch.setenv("NEEDLE_FAKE", planted)
        gpus.examine(heard)
        return heard

    return look


HEALTHY = "1.0 GiB of 141.0 GiB in use, busy 0 %, 35 C, 120 of 700 W, 1980 of 1980 MHz, ECC on"


def found(child, level: str) -> list[tuple[str, str, str]]:
    return [(f.where, f.what, f.text) for f in child.findings if f.level == level]


def test_healthy_gpus_are_described_and_nothing_is_wrong(examined):
    child = examined("machine", planted="count=2")
    assert child.ended == "done"
    assert [where for where, _, text in found(child, "ok") if HEALTHY in text] == ["GPU 0", "GPU 1"]
    assert found(child, "failed") == []
    assert {what for _, what, _ in found(child, "note")} <= {"Xid"}
    assert child.facts["driver"] == "13.0" and child.facts["release"] == "580.65.06"
    assert [gpu["uuid"][-2:] for gpu in child.facts["gpus"]] == ["00", "01"]
    assert child.facts["uuids"] == [gpu["uuid"] for gpu in child.facts["gpus"]]
    assert child.facts["cuda"]["usable"] and child.facts["cuda"]["count"] == 2


def test_a_broken_gpu_is_named_with_each_defect(seen):
    """Of two GPUs the second; of its 141 GiB one is left."""
    planted = (
        f"count=2,at=1,ecc=3,pending=1,reasons=0x6c,used={140 << 30},holder={os.getppid()},"
        "links=4,links_up=3"
    )
    child = seen(planted)
    failed = {(where, what): text for where, what, text in found(child, "failed")}
    assert {where for where, _ in failed} == {"GPU 1"}
    assert "3 uncorrected" in failed["GPU 1", "ECC"]
    assert "waits to be replaced" in failed["GPU 1", "rows"]
    assert any("3 of 4 NVLinks are up" in text for _, _, text in found(child, "note"))
    holder = failed["GPU 1", "memory"]
    assert "1.0 GiB of 141.0 GiB are free" in holder
    assert f"process {os.getppid()} ({name_of(os.getppid())}) holds 140.0 GiB" in holder
    slow = [text for _, what, text in found(child, "failed") if what == "throttling"]
    assert len(slow) == 3 and sum("too hot" in text for text in slow) == 2
    assert any("power limit" in text for _, _, text in found(child, "note"))
    for finding in child.findings:
        assert not finding.has_failed or finding.remedy
    assert "nvidia-smi --gpu-reset -i 1" in [f for f in child.findings if f.what == "ECC"][0].remedy


def test_settings_that_are_no_defects_are_notes(seen):
    planted = (
        "reasons=0x2,ecc_on=0,ecc_ever=2,mig=1,persistence=0,compute=3,power_limit=350000,"
        "width=8,busy=100"
    )
    child = seen(planted)
    assert found(child, "failed") == []
    notes = {what: text for _, what, text in found(child, "note") if what != "Xid"}
    assert "limited to 350 of 700 W" in notes["power"] and "x8 instead of x16" in notes["PCIe"]
    assert "set by a user" in notes["throttling"] and "one process alone" in notes["compute mode"]
    assert "no process is visible" in notes["utilization"] and "MIG is on" in notes["MIG"]
    assert {"ECC", "persistence"} <= set(notes)


@pytest.mark.parametrize(
    "planted, said, remedy",
    [
        ("compute=2", "no computing at all", "nvidia-smi -i 0 -c DEFAULT"),
        ("remap_failed=1", "row remapping has failed", "replaced"),
        ("old=1,retired=1", "waits to be replaced", "--gpu-reset -i 0"),
        ("lost=15", "cannot tell its state: a planted error", "fallen off the bus"),
        ("nvml_error=18", "Driver/library version mismatch", "start the machine anew"),
    ],
)
def test_one_defect_is_one_failure(seen, planted, said, remedy):
    (finding,) = [f for f in seen(planted).findings if f.has_failed]
    assert said in finding.text and remedy in finding.remedy


def test_a_driver_that_hangs_is_named(examined):
    child = examined("machine", planted="nvml_hangs=1", seconds=4.0)
    (finding,) = child.findings
    assert child.ended == "late" and "opening NVML (libnvidia-ml.so.1) hangs" in finding.text


def test_gpus_that_cuda_does_not_count_are_a_failure_and_hidden_ones_a_note(heard, monkeypatch):
    both = [{"uuid": "GPU-a"}, {"uuid": "GPU-b"}]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    gpus.compare(heard, both, ["GPU-b"])
    assert heard.levels()["failed"] == ["the driver sees 2 GPUs, CUDA 1"]
    heard.findings.clear()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    gpus.compare(heard, both, ["GPU-b"])
    assert heard.levels()["note"] == ["the driver sees 2 GPUs, CUDA 1: CUDA_VISIBLE_DEVICES=1"]
    assert not heard.levels()["failed"]
    heard.findings.clear()
    gpus.compare(heard, both, ["GPU-b", "GPU-a"])
    gpus.compare(heard, both, [None])
    gpus.compare(heard, [{"uuid": "GPU-a", "modes": {"mig": 1}}], ["GPU-of-a-part"])
    assert not heard.findings


def test_without_a_driver_a_gpu_on_the_bus_is_told(heard, monkeypatch):
    def nothing():
        raise OSError("libnvidia-ml.so.1: cannot open shared object file")

    for present, count in (("a GPU", 1), ("", 0)):
        monkeypatch.setattr(gpus, "on_the_bus", lambda present=present: present)
        monkeypatch.setattr(gpus, "Nvml", nothing)
        heard.findings.clear()
        assert gpus.examine(heard) == []
        assert len(heard.findings) == count
    assert heard.facts == {"gpus": []}


def test_mps_is_seen_by_its_daemon(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    assert not gpus.mps_runs()
    pid = tmp_path / "nvidia-cuda-mps-control.pid"
    pid.write_text(f"{os.getpid()}\n")
    assert gpus.mps_runs()
    pid.write_text(f"{2**22 + 1}\n")
    assert not gpus.mps_runs()


# ---- Xid errors -------------------------------------------------------------------------------

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
    seen = {(f.where, re.match(r"Xid (\d+)", f.text)[1]): f for f in xid.judge(LOG, PLACES)}
    assert set(seen) == {("GPU 0", "79"), ("GPU 1", "31"), ("GPU 1", "999")}
    lost, fault, new = seen.values()
    assert lost.has_failed and "fallen off the bus" in lost.text and "anew" in lost.remedy
    assert fault.level == "note" and "2 times" in fault.text and "pid=78" in fault.text
    assert new.level == "note" and xid.LIST in new.text
    everywhere = [f.where for f in xid.judge(LOG, [{"index": 0, "pci": None}])]
    assert "GPU at 0000:0a:00" in everywhere and len(everywhere) == 4


def test_a_log_that_cannot_be_read_is_a_note(heard, monkeypatch):
    def refuse(path="/dev/kmsg"):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(xid, "read_kmsg", refuse)
    monkeypatch.setattr(xid.shutil, "which", lambda name: None)
    xid.examine(heard, PLACES)
    (finding,) = heard.findings
    assert finding.level == "note" and "Operation not permitted" in finding.text
    assert "dmesg" in finding.text
    heard.findings.clear()
    xid.examine(heard, [])
    assert not heard.findings


@pytest.mark.parametrize("script, known", [(f"cat <<'E'{LOG}E", True), ("exit 1", False)])
def test_the_journal_is_asked_next(tmp_path, monkeypatch, script, known):
    def refuse(path="/dev/kmsg"):
        raise PermissionError(1, "Operation not permitted")

    (tmp_path / "journalctl").write_text(f"#!/bin/sh\n{script}\n")
    (tmp_path / "journalctl").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(xid, "read_kmsg", refuse)
    text, problem = xid.kernel_log()
    assert (text is not None) == known and bool(problem) != known
    assert not known or "Xid" in text


def test_the_ring_is_read_to_its_end(tmp_path):
    (tmp_path / "kmsg").write_text(LOG)
    assert "Xid (PCI:0000:02:00): 999" in xid.read_kmsg(str(tmp_path / "kmsg"))
    with pytest.raises(OSError):
        xid.read_kmsg(str(tmp_path / "none"))
