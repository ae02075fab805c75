"""needle/distributed/peers.py and --gpus against a library that has functions of CUDA's driver and
no GPU."""

import sys

import numpy as np
import pytest
from gpu_trainings import *  # noqa: F403
from harness import ROOT, run, shared_library
from struck_runs import GPURuns

from needle import _C
from needle.distributed import peers
from needle.distributed.control import RankError

pytestmark = pytest.mark.slow

# How a rank of a program of the test's begins: `transport` connects it with `size` - 1 others.
BEGIN = f"""
import sys
import numpy as np
sys.path[:0] = [{str(ROOT)!r}]
from needle import _C
from needle.distributed import environment, peers
from needle.distributed.control import Control
place = environment.find()
rank, size = place.rank, place.size
others = [other for other in range(size) if other != rank]
control = Control.join(place, {{}}, deadline=30.0)
peers.NAME, peers.SLOT = sys.argv[1], 4096
transport = peers.connect(rank, size, _C.cpu(), control.gather)
"""


@pytest.fixture(scope="session")
def driver(tmp_path_factory):
    made = tmp_path_factory.mktemp("fake") / "libcuda.so.1"
    shared_library((ROOT / "tests/distributed/fake_driver.c").read_text(), made)
    return made


@pytest.fixture(autouse=True)
def memory(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path_factory.mktemp("memory")))


@pytest.fixture
def ranks(tmp_path, driver):
    """ranks(size, body): what ranks that run the body print."""

    def said(size, body, begin=BEGIN, **environ):
        program = tmp_path / "program.py"
        program.write_text(begin + body + "\ncontrol.close()\n")
        start = "import sys; from needle.distributed import spawn; "
        start += f"sys.exit(spawn.run(sys.argv[1:], {size}))"
        words = [sys.executable, "-c", start, sys.executable, program, driver]
        done = run(*words, PYTHONPATH=ROOT, **environ)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return said


def test_an_exchange_moves_every_byte(ranks):
    """Several arrays between two ranks, in their order, in many messages and of one; bytes that
    none sends stay."""
    body = """
def numbers(sender, receiver, n):
    size = [1, 4096, 3 * 4096 + 5, 300, 257 * 16, 40000][n]
    return np.random.RandomState(100 * sender + 10 * receiver + n).bytes(size)
def array(data):
    return _C.array(np.frombuffer(data, np.uint8), "uint8", _C.cpu())
for round in range(20):
    ns = [n for n in range(6) if (n + round) % 3]
    sends = [(other, array(numbers(rank, other, n))) for n in ns for other in others]
    receives = []
    for n in ns:
        for other in reversed(others):
            whole = _C.empty((len(numbers(other, rank, n)) + 2,), "uint8", _C.cpu())
            whole.fill(7)
            receives.append((other, n, whole))
    # One to the next rank alone, which sends none back, beside a round of all.
    if round % 2:
        sends = [(rank + 1, array(numbers(rank, rank + 1, 5)))] if rank + 1 < size else []
        whole = _C.empty((40002,), "uint8", _C.cpu())
        whole.fill(7)
        receives = [(rank - 1, 5, whole)] if rank else []
    parts = [(other, whole[1:-1]) for other, _, whole in receives]
    work = transport.exchange(sends, parts)
    if work is None:
        assert not sends and not receives
        continue
    work.wait()
    assert work.begun() and work.done() and not work._arrays
    for other, n, whole in receives:
        found = whole.numpy().tobytes()
        assert found == b"\\7" + numbers(other, rank, n) + b"\\7", (round, other, n)
assert transport.exchange([(others[0], array(b""))], []) is None
transport.close()
print("well")
"""
    for size in 2, 3, 5:
        assert ranks(size, body) == "well\n"


@pytest.mark.parametrize(
    "call",
    ["cuMemAlloc_v2", "cuIpcGetMemHandle", "cuIpcOpenMemHandle_v2", "cuStreamWaitValue32_v2"],
)
def test_gpus_that_do_not_reach_each_other_have_no_such_transport(ranks, call):
    """Nor where that is so for one rank alone."""
    body = "print(transport)"
    assert ranks(2, body, FAKE_DRIVER_FAILS=call) == "None\n"
    one = "import os\nif os.environ['RANK'] == '1':\n    os.environ['FAKE_DRIVER_FAILS'] = "
    program = BEGIN.replace("import sys\n", f"import sys\n{one}{call!r}\n", 1)
    assert ranks(2, body, begin=program) == "None\n"


def test_there_is_no_such_transport_without_a_driver(monkeypatch):
    monkeypatch.setattr(peers, "NAME", "libno.so.1")
    assert peers.connect(0, 1, _C.cpu(), lambda name, value: [value]) is None


@pytest.mark.parametrize(
    "call", ["cuEventRecord", "cuStreamWaitValue32_v2", "cuMemcpyDtoDAsync_v2"]
)
def test_an_error_names_the_function(driver, monkeypatch, call):
    monkeypatch.setattr(peers, "NAME", str(driver))
    transport = peers.connect(0, 2, _C.cpu(), lambda name, value: [value, value])
    monkeypatch.setenv("FAKE_DRIVER_FAILS", call)
    words = f"{call}: CUDA_ERROR_NOT_SUPPORTED: the GPUs of this machine cannot exchange arrays"
    with pytest.raises(RankError, match=words):
        transport.exchange([(1, _C.array(np.zeros(3)))], [])


def test_arrays_that_cannot_be_sent(driver, monkeypatch):
    monkeypatch.setattr(peers, "NAME", str(driver))
    transport = peers.connect(0, 2, _C.cpu(), lambda name, value: [value, value])
    array = _C.array(np.zeros((4, 4)))
    with pytest.raises(ValueError, match="rank 1 must be compact, on c"):
        transport.exchange([(1, array.permute((1, 0)))], [])


# ---- trainings -----------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def alone(tmp_path_factory, tokens, driver):
    runs = GPURuns(tmp_path_factory.mktemp("alone"), tokens, FAKE_DRIVER=str(driver))
    said = runs.run("alone", 1)
    assert "4 GPUs are visible, 1 is used: --gpus 4 uses all" not in said  # it is the CPU
    return runs.written("alone")


@pytest.fixture
def runs(tmp_path, tokens, driver):
    return GPURuns(tmp_path, tokens, FAKE_DRIVER=str(driver))


@pytest.mark.parametrize("gpus", [2, 4])
def test_gpus_change_no_byte(runs, alone, gpus):
    said = runs.run("many", gpus)
    assert said.count("loss ") >= 1 and "rank 1:" not in said
    assert runs.written("many") == alone


def test_sequences_are_shared(runs, alone):
    """The same bytes by 2 and by 4, and almost the numbers of one."""
    for name, gpus in ("shared", 2), ("wide", 4):
        runs.run(name, gpus, "--context-parallel", "2")
    checkpoint, lines = runs.written("shared")
    assert runs.written("wide") == (checkpoint, lines)
    for line, wanted in zip(lines, alone[1], strict=True):
        for word in wanted:
            assert line[word] == pytest.approx(wanted[word], rel=1e-4), (line["step"], word)


@pytest.mark.parametrize("gpus", [1, 2])
def test_a_signal_between_two_steps_is_heard(runs, gpus):
    plan = [{"rank": gpus - 1, "step": 5, "what": "meet"}]
    said = runs.run("meet", gpus, plan=plan)
    assert f"stopped by SIGTERM after step 6 of {runs.steps}, and saved" in said, said


def test_error_that_all_ranks_meet_is_said_once(runs):
    said = runs.run("x", 3, code=None)
    assert said.count("3 ranks cannot share a step of 4 micro-batches") == 1
