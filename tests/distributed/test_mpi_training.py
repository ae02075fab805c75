"""apps/train_pythia.py by mpirun: the same bytes whatever the number of ranks, and ends that are
told.

Real processes, on the CPU; `struck_program.py` is what each of them runs.
"""

import re
import signal
import sys
from pathlib import Path

import numpy as np
import pytest
from struck_runs import PROGRAM, Runs, ended, missing

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))


SLOW = [{"what": "slow", "seconds": 0.1}]  # a run that lasts until it is stopped


@pytest.fixture(scope="session")
def alone(tmp_path_factory, tokens):
    """Files that one process without mpirun writes."""
    runs = Runs(tmp_path_factory.mktemp("alone"), tokens)
    runs.run("a", 0)
    return runs.written("a")


@pytest.fixture
def runs(tmp_path, tokens):
    return Runs(tmp_path, tokens)


IN_PARTS = pytest.param(2, {"MOST": "1000"}, marks=pytest.mark.slow)


@pytest.mark.parametrize("ranks, more", [(1, {}), (2, {}), (4, {}), IN_PARTS])
def test_ranks_change_no_byte(runs, alone, ranks, more):
    """Counts of MPI are 32 bits: an array longer than MOST goes as several messages."""
    runs.run("a", ranks, **more)
    assert runs.written("a") == alone


def test_operands_of_unlike_shapes_are_named():
    """By the rank that has less room; MPI ends the other."""
    code = """
import sys, needle as ndl
from needle.distributed import control, environment, group
place = environment.find()
ranks = group.Group(place, control.Control.join(place, {}))
ranks.connect(ndl.cpu())
x = ndl.ones(1, 8, 2 + 2 * place.rank, 4)
try:
    ndl.ops.ring_attention(x, x, x, ranks)
except ValueError as error:
    ranks.close(str(error), 3)
    sys.exit(f"rank {place.rank}: {error}")
"""
    done = ended("-n", "2", sys.executable, "-c", code)
    said = r"rank 0: MPI_ERR.*: all ranks .*rank 0 receives arrays of float32 \(1, 4, 2, 4\)"
    assert done.returncode and re.search(said, done.stderr), done.stderr


@pytest.mark.slow
def test_ranks_drop_the_same_elements(runs):
    """Masks follow from the seed, the step and the micro-batch; so also after a resume."""
    model = ["--import", str(Path(__file__).with_name("dropping.py")), "--model", "dropping"]
    runs.run("one", 0, *model)
    runs.run("two", 2, *model)
    plan = [{"rank": 1, "step": 25, "what": "term"}]
    runs.run("cut", 2, *model, plan=plan)
    found = runs.written("one")
    assert runs.written("two") == runs.resumed("cut", 4, *model) == found
    runs.run("seed", 0, *model, "--seed", "7", "--init-seed", "1234", "--data-seed", "1234")
    first, other = (lines[0] for lines in (found[1], runs.written("seed")[1]))
    assert first["loss"] != other["loss"]


@pytest.mark.slow
def test_ranks_train_in_bfloat16(runs):
    runs.steps = 3
    for name, ranks in ("one", 0), ("two", 2):
        runs.run(name, ranks, "--dtype", "bfloat16")
    assert runs.written("two") == runs.written("one")


@pytest.mark.slow
def test_a_signal_to_mpirun(runs, alone):
    """mpirun passes SIGUSR1 on; after any other signal it sends SIGKILL."""
    process = runs.start("a", 2, plan=SLOW)
    runs.until_step(process, "a", 3)
    process.send_signal(signal.SIGUSR1)
    said = process.communicate(timeout=60)[0]
    assert process.returncode == 0, said
    assert "stopped by SIGUSR1 after step" in said and "and saved. Go on with\n    mpirun" in said
    assert runs.resumed("a", 4) == alone


@pytest.mark.slow
def test_other_data_are_refused(tmp_path):
    """The same flags may name other data on another machine."""
    words = []
    for number in range(2):
        (tmp_path / str(number)).mkdir()
        (np.arange(2000) % 250 + number).astype("<u2").tofile(tmp_path / str(number) / "t.bin")
        one = [sys.executable, PROGRAM, "--device", "cpu", "--model", "tiny", "--data", "t.bin"]
        words.append(["-n", "1", "--wdir", tmp_path / str(number), *one, "--out", tmp_path / "o"])
    done = ended(*words[0], ":", *words[1])
    assert done.returncode == 1 and "rank 1: the data differ from rank 0's" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("what", ["data", "second data"])
def test_data_that_one_rank_cannot_read(runs, alone, what):
    said = runs.run("a", 2, plan=[{"rank": 1, "step": 23, "what": what}], code=1)
    assert "needle train: rank 1: tokens.npy: a page cannot be read" in said
    assert "after step 22 of 60, and saved" in said
    assert runs.resumed("a", 4) == alone


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_loss_that_is_none_stops_all(runs, rank):
    said = runs.run("a", 2, plan=[{"rank": rank, "step": 43, "what": "nan"}], code=1)
    assert re.search(
        rf"step 43: the loss is nan \(epoch \d+, batch \d+, micro-batch {2 * rank} of the 4", said
    )
    assert said.count("the last good checkpoint is") == 1
    assert "step_20.safetensors: 22 finite steps followed\n" in said


@pytest.mark.slow
def test_ranks_that_were_told_otherwise(tmp_path, tokens):
    one = ["-n", "1", sys.executable, PROGRAM, "--device", "cpu", "--model", "tiny"]
    one += ["--data", tokens, "--out", tmp_path]
    done = ended(*one, "--lr", "1e-3", ":", *one, "--lr", "2e-3")
    assert done.returncode == 1
    assert re.search("rank 1: flags is '.*--lr 2e-3.*', at rank 0 '.*--lr 1e-3", done.stderr)
