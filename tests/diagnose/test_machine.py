"""The diagnosis of a machine of fake GPUs: each injected defect is a line that names the GPU, what
fails there and the remedy; the exit code is 1."""

import os
import re
import signal
import subprocess
import sys

import pytest
from harness import ROOT, naming, run, wait_until_gone

from needle.diagnose import gpus
from needle.testing import OPS

pytestmark = pytest.mark.slow


def failures(done) -> list[str]:
    return [line for line in done.stdout.splitlines()[:-1] if "FAILED" in line]


def test_healthy_gpus_are_described_and_right(machine):
    """A part of a GPU has no data sheet, from which the rates here are far."""
    done = machine.diagnose(FAKE_NAME="H200 MIG 1g.18gb")
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    assert "NVIDIA driver  speaks CUDA 12.8\n" in done.stdout
    state = "ok: NVIDIA Pretend, 1024 of 144384 MiB in use, busy 0 %, 35 C, 120.10 of 700.00 W"
    for name, gpu in ("cuda()", 0), ("cuda(1)", 1):
        words = f"NVIDIA H200 MIG 1g.18gb, 141.0 GiB, 132 processors, sm_90, GPU-{gpu}"
        for text in words, "ok: bfloat16: ", "ok: memory: ", f"ok: {len(OPS)} ops agree":
            assert f"\n{name:<14} {text}" in done.stdout
        assert f"\nGPU {gpu}          {state}" in done.stdout


@pytest.mark.parametrize(
    "more, said",
    [
        ({"FAKE_GELU": "wrong"}, "gelu-31x33 float32 contiguous: gelu: out: 1 of 1023 elements"),
        ({"FAKE_GELU": "die"}, "its process was killed by SIGABRT at gelu-31x33 float32"),
        ({"FAKE_GELU": "lose"}, "gelu-31x33 float32 contiguous: CudaFatalError: gelu: the CUDA"),
        ({"FAKE_CLOSED": 1}, "opening the device: CudaError: cuda(1): out of memory"),
    ],
)
def test_gpu_that_is_broken_is_named_with_what_fails(machine, smi, more, said):
    state = smi({"remapped_rows.failure": "Yes"}, {"ecc.errors.uncorrected.volatile.total": "3"})
    done = machine.diagnose("--device", "1", SMI=state, **more)
    found = failures(done)
    assert found[0].startswith(f"cuda(1)        FAILED: {said}") and done.returncode == 1
    assert any(line.startswith("GPU 1          FAILED: memory errors") for line in found)
    assert all("To mend it: " in line for line in found)
    assert f"in short       FAILED: {len(found)}, above" in done.stdout
    assert "\ncuda() " not in done.stdout


def test_other_gpus_are_examined_and_rates_of_a_shared_one_are_no_failure(machine, smi):
    shared = smi({}, {}, holders=((0, "train"), (0, "diagnose")))
    done = machine.diagnose(FAKE_GELU="lose", FAKE_NAME="H200", SMI=shared)
    for rate in "TFLOP/s, the data sheet has 989", "GB/s, the data sheet has 4,800":
        first, second = [line for line in done.stdout.splitlines() if rate in line]
        assert first.startswith("cuda()         note: ") and "another process" in first
        assert second.startswith("cuda(1)        FAILED: ")
    assert len(failures(done)) == 4  # and gelu on both
    done = machine.diagnose("--device", "0", SMI=smi({}, {}))
    assert "\ncuda()         ok: " in done.stdout and "\ncuda(1) " not in done.stdout


@pytest.mark.usefixtures("heeds_signals")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_part_that_hangs_ends_with_the_diagnosis(machine, number):
    environ = os.environ | machine.environment(FAKE_GELU="hang")
    words = [sys.executable, "-m", "needle.diagnose", "--device", "0"]
    with subprocess.Popen(words, cwd=machine.folder, env=environ, stdout=subprocess.PIPE) as parent:
        while not parent.stdout.readline().startswith(b"it hangs"):
            assert parent.poll() is None
        with open(f"/proc/{parent.pid}/task/{parent.pid}/children") as file:
            child = int(file.read())
        parent.send_signal(number)
        parent.wait()
    wait_until_gone(child)
    assert parent.returncode == (130 if number == signal.SIGINT else -number)


# ---- nvidia-smi ---------------------------------------------------------------------------------


@pytest.fixture
def seen(machine, monkeypatch, capsys):
    """seen(SMI) -> the lines about the GPUs."""

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def look(state: str, count: str = "2", uuid: str = "") -> list[str]:
        for name, value in machine.environment(SMI=state).items():
            monkeypatch.setenv(name, value)
        gpus.examine(count, uuid)
        return capsys.readouterr().out.splitlines()[1:]  # without the one that says what is tried

    return look


def test_each_state_that_is_wrong_is_named(seen, smi):
    slowdown = "clocks_event_reasons.{}_slowdown"
    for field, value, kind, said in (
        ("ecc.errors.uncorrected.volatile.total", "3", "FAILED", "memory errors.*gpu-reset"),
        ("retired_pages.pending", "Yes", "FAILED", "waits to be retired.*gpu-reset"),
        ("remapped_rows.pending", "1", "FAILED", "waits to be remapped.*gpu-reset"),
        ("remapped_rows.failure", "Yes", "FAILED", "beyond its spares.*replaced"),
        (slowdown.format("hw_thermal"), "Active", "FAILED", "it is too hot.*cooling"),
        (slowdown.format("sw_thermal"), "Active", "FAILED", "it is too hot.*cooling"),
        (slowdown.format("hw_power_brake"), "Active", "FAILED", "power supply.*cables"),
        ("memory.free", "9000", "FAILED", "9000 of 144384 MiB are free: no process.*end the"),
        ("ecc.mode.current", "Disabled", "note", "ECC is off"),
        ("mig.mode.current", "Enabled", "note", "MIG is on"),
        ("persistence_mode", "Disabled", "note", "persistence mode is off"),
        ("compute_mode", "Exclusive_Process", "note", "one process alone"),
        ("compute_mode", "Prohibited", "note", "no process at all"),
    ):
        with naming(field):
            first, second, line = seen(smi({}, {field: value}))
            assert first.startswith("GPU 0          ok: ") and second.startswith(
                "GPU 1          ok"
            )
            assert re.match(f"GPU 1          {kind}: .*{said}", line)


def test_processes_that_hold_memory_are_named(seen, smi):
    _, note, _, failed, _ = seen(smi({}, {"memory.free": "1"}, holders=((0, "a, b"), (1, "b"))))
    assert note == "GPU 0          note: process 71 (a, b): 512 MiB"
    assert "1 of 144384 MiB are free: process 71 (b): 512 MiB" in failed


def test_gpus_that_cuda_does_not_count_fail_unless_parts_or_hidden_on_purpose(
    seen, smi, monkeypatch
):
    assert "GPUs           FAILED: nvidia-smi shows 2 GPUs, CUDA 1." in seen(smi({}, {}), "1")[-1]
    parts = seen(smi({}, {"mig.mode.current": "Enabled"}), "1")
    unusable = seen(smi({}, {}), "0")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert not any("FAILED" in line for line in parts + unusable + seen(smi({}, {}), "1"))


def test_gpu_that_is_wanted_is_shown_alone_and_fields_may_be_unknown(seen, smi):
    """A GPU that shares the host's memory tells none of its own; old drivers know fewer fields."""
    unknown = dict.fromkeys(("memory.free", "memory.total", "memory.used"), "[N/A]")
    unknown |= {"remapped_rows.pending": None, "clocks_event_reasons.hw_thermal_slowdown": None}
    line, broken = seen(smi({}, unknown | {"remapped_rows.failure": "Yes"}), uuid="GPU-1")
    assert line.startswith("GPU 1          ok: NVIDIA Pretend, [N/A] of [N/A] MiB")
    assert "beyond its spares" in broken
    (line,) = seen('{"gpu": [], "compute-apps": []}')
    assert line.startswith("GPUs           note: their state is not known")
    error = "Unable to determine the device handle for GPU0000:3B:00.0: GPU is lost"
    with pytest.raises(RuntimeError, match=f"^nvidia-smi: {error}"):
        seen(f'{{"error": "{error}"}}')


# ---- docs/cuda_memory.md -------------------------------------------------------------------------


def test_memory_page_examples_hold(machine, tmp_path):
    page = (ROOT / "docs" / "cuda_memory.md").read_text()
    (tmp_path / "page.txt").write_text(re.sub(r"^```.*$", "", page, flags=re.MULTILINE))
    words = (sys.executable, "-m", "doctest", "-o", "ELLIPSIS", "page.txt")
    done = run(*words, cwd=tmp_path, **machine.environment(FAKE_GELU="lose"))
    assert not done.stdout, done.stdout
    assert done.returncode == 75, done.stderr  # its last section ends the process
