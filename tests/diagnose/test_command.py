"""The program as a user runs it on a machine of fake GPUs: lines, JSON object, exit code; each
injected defect is a line with its remedy."""

import json
import os
import socket
import subprocess
import sys
import time

import numpy as np
import pytest
from harness import ROOT, naming, run, shared_library

from needle.diagnose import command, examination, recovery
from needle.diagnose.command import FULL, QUICK, Report, Times
from needle.diagnose.finding import Finding
from needle.distributed.environment import Place

pytestmark = pytest.mark.slow

STUB = "int injected_library(void) { return 0; }"
BACKEND = """
int injected_library(void);
const void *needle_backend(void) { injected_library(); return 0; }
"""


def failures(told: dict) -> list[tuple[str, str]]:
    return [(finding["where"], finding["op"] or finding["what"]) for finding in told["failures"]]


def test_deadlines_are_those_that_are_promised():
    for times, most in ((QUICK, 10), (FULL, 120)):
        assert times.driver < times.devices < times.peers < times.all < most


def test_healthy_machine(pynvml, machine, tmp_path):
    """Two GPUs, a run's folder and a log: one JSON object without secrets, exit code 0."""
    run, log = tmp_path / "run", tmp_path / "log"
    (run / "checkpoints").mkdir(parents=True)
    words = ("--log", str(log), "--run", str(run))
    code, told = machine.told(*words, injected="count=2", NEEDLE_KERNELS_TOKEN="unspeakable")
    assert (code, told["ok"], told["failures"]) == (0, True, [])
    assert [device["device"] for device in told["devices"]] == ["cpu()", "cuda()", "cuda(1)"]
    assert told["devices"][1]["rates"]["bfloat16"] > 0 and len(told["gpus"]) == 2
    assert told["cuda"]["usable"] and told["seconds"] > 0 and set(told["peers"]) == {"0-1", "1-0"}
    where = {finding["where"] for finding in told["findings"]}
    assert where >= {"GPU 1", "run", "cuda(1)", "cpu()"}
    said = [f["text"] for f in told["findings"] if f["what"] == "libraries"]
    assert len(said) == 2 and str(machine.folder / "lib/libnvidia-ml.so.1") in said[0]
    text = log.read_text()
    assert "gelu-31x33 float32 stepped" in text
    assert told["settings"]["NEEDLE_KERNELS_TOKEN"] == "(hidden)"
    assert "unspeakable" not in json.dumps(told) + text


def test_defect_is_a_line_with_its_remedy(pynvml, machine):
    done = machine.run("--device", "1", injected="count=2,at=1,ecc=3,wrong=layernorm_fwd")
    assert done.returncode == 1 and done.stderr == ""
    lines = done.stdout.splitlines()
    ecc, op, last = [line for line in lines if "FAILED" in line]
    assert ecc.startswith("GPU 1          FAILED: ECC: 3 uncorrected memory errors")
    point = "layernorm_fwd-31x257 float32 contiguous"
    assert op.startswith(f"test cuda(1)   FAILED: {point}: layernorm_fwd: y: 1 of 7967 elements")
    assert "To mend it: " in ecc and "To mend it: " in op and last == lines[-1]
    assert last.startswith("in short       FAILED: 2, above (")
    assert any(line.startswith("cuda(1)        NVIDIA Pretend") for line in lines)
    assert any(line.startswith("test cuda(1)   ok: matmul is") for line in lines)
    assert not any(line.startswith(("GPU 0", "test cpu()")) for line in lines)


def test_gpu_that_hangs_costs_its_deadline_alone(here, monkeypatch, capsys):
    """The hanging op is named, and the other checks are done."""
    monkeypatch.setattr(command, "QUICK", Times(30, 4, 5, 6))
    here("hang=embedding_bwd")
    start = time.monotonic()
    assert command.main(["--json", "--device", "0"]) == 1
    assert time.monotonic() - start < 60
    told = json.loads(capsys.readouterr().out)
    assert failures(told) == [("cuda()", "embedding_bwd")]
    assert "float32 contiguous hangs" in told["failures"][0]["text"]
    assert {"product", "rates"} <= {f["what"] for f in told["findings"] if f["where"] == "cuda()"}


def test_device_that_breaks_is_one_failure(examined):
    for injected, op, said in (
        ("die=linear_fwd", "linear_fwd", "crashed with SIGSEGV at linear_fwd-31x257x31 float32"),
        ("fatal=sum", "sum", "sum: an injected fault: the CUDA context is lost"),
        ("open_fails=0", None, "out of memory"),
        ("wrong=matmul", "matmul", "matmul is 1.0e+03 off"),
    ):
        with naming(injected):
            one = examined("device", "cuda", 0, where="cuda()", injected=injected)
            (finding,) = [f for f in one.findings if f.has_failed]
            assert said in finding.text and finding.op == op and finding.remedy


def test_library_that_is_missing_is_named(tmp_path, machine, examined, monkeypatch):
    """libcublasLt may be missing where _cuda.so is there."""
    package = tmp_path / "needle"
    package.mkdir()
    for path in (machine.folder / "needle").iterdir():
        if path.name.startswith("_C."):
            (package / path.name).write_bytes(path.read_bytes())  # finds _cuda.so beside itself
        elif path.name != "_cuda.so":
            (package / path.name).symlink_to(path)
    lacking = tmp_path / "libcublasLt.so.13.99"
    shared_library(STUB, lacking, f"-Wl,-soname,{lacking.name}")
    shared_library(BACKEND, package / "_cuda.so", lacking)
    lacking.unlink()
    monkeypatch.setattr(examination, "ROOT", tmp_path)
    child = examined("machine")
    chosen, (failure,) = command.choose(None, child.facts["cuda"])
    assert chosen == [] and failure.has_failed and failure.where == "cuda()"
    assert "libcublasLt.so.13.99" in failure.text and "LD_LIBRARY_PATH" in failure.remedy
    assert "pip install 'needle-lm[cuda13]'" in failure.text


def test_driver_that_hangs_is_a_failure_of_cuda(examined, monkeypatch):
    """Matters only for a build with CUDA."""
    child = examined("machine", injected="nvml_hangs=1", seconds=1.5)
    monkeypatch.setattr(command.known, "is_built", lambda: True)
    chosen, (failure,) = command.choose(None, command.silent(child))
    assert chosen == [] and "stopped at opening NVML" in failure.text


@pytest.fixture
def torchrun(machine, tmp_path):
    """torchrun(size, injected) -> (exit code, lines) of each rank, on the fake machine with a fake
    NCCL; `of` are variables of one rank alone."""
    (tmp_path / "nvidia/nccl/lib").mkdir(parents=True)
    for package in ("nvidia", "nvidia/nccl"):  # stands before an installed one
        (tmp_path / package / "__init__.py").touch()
    source = f'#include "{ROOT}/tests/distributed/fake_nccl.c"'
    shared_library(source, tmp_path / "nvidia/nccl/lib/libnccl.so.2")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]

    def run(size, injected, of=None):
        variables = {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
        variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        variables["TMPDIR"] = str(tmp_path)
        environ = machine.environment(injected, **variables)
        environ["PYTHONPATH"] += f":{tmp_path}"
        ranks = [
            subprocess.Popen(
                [sys.executable, "-m", "needle.diagnose"],
                cwd=machine.folder,
                env=environ | {"RANK": str(r), "LOCAL_RANK": str(r)} | (of or {}).get(r, {}),
                stdout=subprocess.PIPE,
                text=True,
            )
            for r in range(size)
        ]
        said = [rank.communicate(timeout=120)[0].splitlines() for rank in ranks]
        return [(rank.returncode, lines) for rank, lines in zip(ranks, said)]

    return run


def test_under_torchrun_each_rank_says_a_line_about_its_own_device(torchrun):
    (code, lines), (other, (line,)) = torchrun(2, "count=2,at=0,ecc=3")
    assert (code, other) == (1, 0), lines  # the defect is the other rank's
    assert line.startswith("rank 1 of 2: cuda(1) ok: matmul is") and "TFLOP/s" in line
    assert line.endswith("all_gather, all_reduce, ring attention of 2 ranks agree with NumPy")


def test_rank_without_a_gpu_tells_the_others(torchrun):
    ended = torchrun(3, "count=2")
    assert [code for code, _ in ended] == [1, 1, 1]
    assert "there is no cuda(2): this machine shows 2" in ended[2][1][0]
    assert "nproc-per-node" in ended[2][1][0] and len(ended[2][1]) == 2
    for _, (line, _) in ended[:2]:
        assert "FAILED" in line and "rank 2 stopped at step 0: there is no cuda(2)" in line


def test_rank_whose_nccl_fails_is_named_with_its_gpu(torchrun):
    (code, lines), (other, _) = torchrun(2, "count=2", {1: {"FAKE_NCCL_FAILS": "ncclSend"}})
    assert (code, other) == (1, 1)
    assert "rank 1 stopped at step 0: NCCL: ncclSend: unhandled system error" in lines[0]
    assert f"rank 1 is {os.uname().nodename}, cuda(1), GPU-0" in lines[0]


def test_failures_of_a_rank_carry_its_number(capsys):
    report = Report(False, Place(1, 2, 1, 2, "torchrun"), None)
    report.facts["devices"] = [{"device": "cpu()"}, {"device": "cuda(1)"}]
    report.add(Finding("ok", "cuda(1)", "ops", "all is well"))
    report.add(Finding("ok", "cuda()", "ops", "of another"))
    report.add(Finding("failed", "GPU 1", "rows", "memory waits", "reset it"))
    assert report.end(1.0) == 1
    failed, line = capsys.readouterr().out.splitlines()
    assert failed == "rank 1 of 2: GPU 1          FAILED: memory waits. To mend it: reset it"
    assert line == "rank 1 of 2: cuda(1) FAILED: 1, above: all is well"


def test_devices_and_logs_that_cannot_be_are_refused(tmp_path, capsys):
    for words, said in (
        (["--device", "-1"], "0 or more"),
        (["--log", str(tmp_path / "none/log")], "none/log cannot be written: No such file"),
        (["--log", ""], "argument --log: an empty name ('')"),
        (["--run", ""], "argument --run: an empty name ('')"),
    ):
        with pytest.raises(SystemExit) as caught:
            command.main(words)
        assert caught.value.code == 2 and said in capsys.readouterr().err


def test_empty_address_of_a_service_is_a_failure(capsys):
    assert command.main(["--server", ""]) == 1
    assert "it must begin with http:// or https:// and a host" in capsys.readouterr().out


def test_full_disk_ends_the_log_alone(capsys):
    report = Report(False, None, open("/dev/full", "w"))
    for _ in range(2):
        report.describe("one", "fact")
    assert report.end(1.0) == 1
    said = capsys.readouterr().out
    assert said.count("one            fact") == 2
    assert said.count("/dev/full cannot be written: No space left on device") == 1
    report.close()


# ---- an injected fault ---------------------------------------------------------------------------


def test_recovery_from_an_injected_fault(here):
    for injected, has_failed, said in (
        ("", False, "ended its process alone; a fresh one was right"),
        ("numb=1", True, "was not reported: the process that examined it crashed with"),
        ("wrong=matmul", True, "a fresh process is wrong: WRONG: matmul"),
    ):
        with naming(injected), examination.Examinations() as examinations:
            here(injected)
            (finding,) = recovery.examine(examinations, "cuda()", 0, time.monotonic() + 60)
            assert finding.has_failed == has_failed
            assert "an injected fault" in finding.text and said in finding.text


# ---- on a GPU ---------------------------------------------------------------------------------


def diagnose(*words: str) -> tuple[int, dict, float]:
    start = time.monotonic()
    done = run(sys.executable, "-m", "needle.diagnose", "--json", *words)
    assert done.stderr == "", done.stderr
    return done.returncode, json.loads(done.stdout), time.monotonic() - start


@pytest.mark.cuda
def test_gpu_is_right_within_ten_seconds():
    code, told, seconds = diagnose()
    assert code == 0, told["failures"]
    whats = {finding["what"] for finding in told["findings"] if finding["where"] == "cuda()"}
    assert whats >= {"product", "rates", "ops", "step"} and seconds < 10
    assert told["devices"][1]["rates"]["bfloat16"] > 1e13


@pytest.mark.cuda
@pytest.mark.slow
def test_gpu_is_right_at_every_point_within_two_minutes():
    code, told, seconds = diagnose("--full")
    assert code == 0, told["failures"]
    assert seconds < 120 and any(finding["what"] == "recovery" for finding in told["findings"])
    assert not any("the time was up" in finding["text"] for finding in told["findings"])


HOLD = """
import sys, time
import numpy as np, needle as ndl
from needle import _C
device = ndl.cuda()
held = _C.empty((int(sys.argv[1]),), "uint8", device)
held.fill(1)
device.synchronize()
print("holds", flush=True)
a = _C.array(np.ones((8192, 8192), np.float32), "float32", device)
while True:
    for _ in range(50):
        _C.matmul(a, a, None)
    device.synchronize()
"""


@pytest.mark.cuda
def test_gpu_that_another_process_holds_and_keeps_busy(pynvml):
    """The holder is named, and all is done in time; too little memory is a failure."""
    total = diagnose("--device", "0")[1]["devices"][1]["total_bytes"]
    for size, code in ((1 << 30, 0), (int(0.93 * total), 1)):
        words = [sys.executable, "-c", HOLD, str(size)]
        with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, text=True) as other:
            try:
                assert other.stdout.readline() == "holds\n"
                got, told, seconds = diagnose()
            finally:
                other.kill()
        said = " ".join(finding["text"] for finding in told["findings"])
        assert got == code and seconds < 10, told["failures"]
        assert "GiB" in said and ("are free" in said) == (code == 1)
        assert not np.isnan(seconds)
