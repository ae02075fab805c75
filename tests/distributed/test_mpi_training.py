"""apps/train_pythia.py by mpirun: the same bytes whatever the number of ranks, and ends that are
told.

Real processes, on the CPU; `rank_program.py` is what each of them runs.
"""

import os
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from mpi_runs import AS_ROOT, PROGRAM, STEPS, missing, mpirun, run, start, write_tokens, written

from needle.checkpoint import checkpoint_path

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))


SLOW = {"rank": 0, "step": 0, "what": "slow"}  # a run that lasts until it is stopped


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    return write_tokens(tmp_path_factory.mktemp("tokens") / "tokens.npy")


@pytest.fixture(scope="module")
def alone(tmp_path_factory, tokens):
    """Files that one process without mpirun writes."""
    out = tmp_path_factory.mktemp("alone")
    run(out, tokens, 0)
    return written(out)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_ranks_change_no_byte(tmp_path, tokens, alone, ranks):
    run(tmp_path, tokens, ranks)
    assert written(tmp_path) == alone


@pytest.mark.slow
def test_a_run_goes_on_with_other_numbers_of_ranks(tmp_path, tokens, alone):
    for ranks, step in (4, 17), (1, 31), (2, 44):
        plan = {"rank": ranks - 1, "step": step, "what": "term"}
        said = run(tmp_path, tokens, ranks, "--resume", "auto", plan=plan)
        assert f"stopped by SIGTERM after step {step} of {STEPS}, and saved" in said
        assert said.count("and saved") == 1  # rank 0 speaks for all
    run(tmp_path, tokens, 0, "--resume", "auto")
    assert written(tmp_path) == alone


@pytest.mark.slow
def test_ranks_share_sequences(tmp_path, tokens, alone):
    """2 and 4 ranks, two to a sequence: the same bytes, and almost the numbers of one process."""
    for ranks in 2, 4:
        run(tmp_path / str(ranks), tokens, ranks, "--context-parallel", "2")
    plan = {"rank": 1, "step": 25, "what": "term"}
    run(tmp_path / "cut", tokens, 4, "--context-parallel", "2", plan=plan)
    run(tmp_path / "cut", tokens, 2, "--resume", "auto")
    checkpoint, lines = written(tmp_path / "2")
    assert written(tmp_path / "4") == (checkpoint, lines)
    assert written(tmp_path / "cut") == (checkpoint, lines)
    for line, wanted in zip(lines, alone[1], strict=True):
        assert line.keys() == wanted.keys()
        for name in line:
            assert line[name] == pytest.approx(wanted[name], rel=1e-4), (line["step"], name)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 2])
def test_a_killed_rank_ends_the_others_that_name_it(tmp_path, tokens, alone, rank):
    said = run(tmp_path, tokens, 4, plan={"rank": rank, "step": 25, "what": "kill"}, code=None)
    assert f"at step 25: rank {rank} is gone" in said
    run(tmp_path, tokens, 2, "--resume", "auto")
    assert written(tmp_path) == alone


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_may_take_its_time_for_its_data(tmp_path, tokens, alone, rank):
    """Two machines without a common cache tokenise both."""
    plan = {"rank": rank, "step": 0, "what": "late", "deadline": 5.0}
    run(tmp_path, tokens, 2, plan=plan)
    assert written(tmp_path) == alone


def until_it_trains(process, out):
    log = out / "a" / "metrics.jsonl"
    while not log.exists() or log.read_bytes().count(b"\n") < 3:
        assert process.poll() is None
        time.sleep(0.01)


@pytest.mark.slow
def test_messages_above_the_limit_are_sent_in_parts(tmp_path, tokens, alone):
    """Counts of MPI are 32 bits: a longer array goes as several messages."""
    run(tmp_path, tokens, 2, plan={"rank": 0, "step": 0, "what": None, "most": 1000})
    assert written(tmp_path) == alone


@pytest.mark.slow
def test_a_signal_to_mpirun(tmp_path, tokens, alone):
    """mpirun passes SIGUSR1 on; after any other signal it sends SIGKILL."""
    process = start(tmp_path, tokens, 2, plan=SLOW)
    until_it_trains(process, tmp_path)
    process.send_signal(signal.SIGUSR1)
    said = process.communicate(timeout=60)[0]
    assert process.returncode == 0, said
    assert "stopped by SIGUSR1 after step" in said and "and saved. Go on with\n    mpirun" in said
    run(tmp_path, tokens, 4, "--resume", "auto")
    assert written(tmp_path) == alone


@pytest.mark.slow
def test_the_supervisor_of_mpirun_lets_its_ranks_save(tmp_path, tokens, alone):
    process = start(tmp_path, tokens, 2, plan=SLOW, supervised=True)
    until_it_trains(process, tmp_path)
    process.send_signal(signal.SIGTERM)
    said = process.communicate(timeout=60)[0]
    assert "stopped by SIGUSR1 after step" in said and "supervise -- mpirun -n 2" in said
    run(tmp_path, tokens, 0, "--resume", "auto")
    assert written(tmp_path) == alone


@pytest.mark.slow
def test_a_rank_that_is_stopped_at_the_end_is_not_waited_for(tmp_path, tokens, alone):
    plan = {"rank": 1, "step": STEPS, "what": "end", "deadline": 5.0}
    said = run(tmp_path, tokens, 2, plan=plan, code=75)
    assert "rank 1 has not come and does not answer" in said
    assert written(tmp_path) == alone


@pytest.mark.slow
def test_other_data_are_refused(tmp_path, tokens):
    """The same flags may name other data on another machine."""
    folders = [tmp_path / "a", tmp_path / "b"]
    for number, folder in enumerate(folders):
        folder.mkdir()
        np.save(folder / "t.npy", np.random.RandomState(number).randint(0, 250, 9000, np.uint16))
    one = [sys.executable, PROGRAM, "--device", "cpu", "--model", "tiny", "--out", tmp_path / "o"]
    one += ["--data", "t.npy", "--seq-len", "32", "--steps", "3"]
    words = [["-n", "1", "--wdir", folder, *one] for folder in folders]
    done = subprocess.run(
        [mpirun(), "--map-by", ":OVERSUBSCRIBE", *words[0], ":", *words[1]],
        env={**os.environ, **AS_ROOT},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 1 and "rank 1: the data differ from rank 0's" in done.stderr


@pytest.mark.slow
def test_other_data_of_one_head_and_tail_are_refused(tmp_path):
    """One of rank 1's 5 million tokens differs."""
    ids = np.random.RandomState(0).randint(0, 250, 5_000_000).astype("<u2")
    folders = [tmp_path / "a", tmp_path / "b"]
    for number, folder in enumerate(folders):
        folder.mkdir()
        ids[2_485_000] ^= number
        ids.tofile(folder / "t.bin")
        os.utime(folder / "t.bin", (10**9, 10**9))
    one = [sys.executable, PROGRAM, "--device", "cpu", "--model", "tiny", "--out", tmp_path / "o"]
    one += ["--data", "t.bin", "--seq-len", "32", "--steps", "3"]
    words = [["-n", "1", "--wdir", folder, *one] for folder in folders]

    def start(*flags):
        return subprocess.run(
            [mpirun(), "--map-by", ":OVERSUBSCRIBE", *words[0], *flags, ":", *words[1], *flags],
            env={**os.environ, **AS_ROOT},
            capture_output=True,
            text=True,
            timeout=100,
        )

    done = start()
    assert done.returncode == 1 and "rank 1: the data differ from rank 0's" in done.stderr
    done = start("--trust-data")
    assert done.returncode == 0 and "trusted: not hashed" in done.stdout, done.stderr


@pytest.mark.slow
def test_data_that_one_rank_cannot_read(tmp_path, tokens, alone):
    said = run(tmp_path, tokens, 2, plan={"rank": 1, "step": 23, "what": "data"}, code=1)
    assert "needle train: rank 1: tokens.npy: a page cannot be read" in said
    assert "after step 22 of 60, and saved" in said
    run(tmp_path, tokens, 4, "--resume", "auto")
    assert written(tmp_path) == alone


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_loss_that_is_none_stops_all(tmp_path, tokens, rank):
    said = run(tmp_path, tokens, 2, plan={"rank": rank, "step": 43, "what": "nan"}, code=1)
    assert re.search(
        rf"step 43: the loss is nan \(epoch \d+, batch \d+, micro-batch {2 * rank} of the 4", said
    )
    assert said.count("the last good checkpoint is") == 1
    assert "step_20.safetensors: 22 finite steps followed\n" in said
    assert "step_40.safetensors: 2 finite steps followed, and it may have diverged\n" in said


@pytest.mark.slow
def test_a_disk_that_is_full(tmp_path, tokens, alone):
    said = run(tmp_path, tokens, 2, plan={"rank": 0, "step": 40, "what": "full"}, code=1)
    assert "No space left on device" in said and "rank 1:" not in said
    run(tmp_path, tokens, 4, "--resume", "auto")
    assert written(tmp_path) == alone


@pytest.mark.slow
def test_a_wrong_device_is_named_and_saves_nothing(tmp_path, tokens, alone):
    said = run(
        tmp_path, tokens, 4, "--verify", "5", code=75,
        plan={"rank": 3, "step": 35, "what": "bit"},  # the seventh, of micro-batch 3
    )  # fmt: skip
    assert re.search(r"step 35: .*micro-batch 3 differs in 1 of [\d,]+ .*: rank 3 \(", said), said
    assert not checkpoint_path(tmp_path / "a" / "checkpoints", 35).exists()
    run(tmp_path, tokens, 2, "--resume", "auto", "--verify", "5")
    assert written(tmp_path) == alone


@pytest.mark.slow
@pytest.mark.parametrize(
    "ranks, more, words",
    [
        (3, [], "3 ranks cannot share a step of 4 micro-batches"),
        (2, ["--supervise"], "supervise -- mpirun"),
        (1, ["--verify", "3"], "there is only this one"),
        (2, ["--verify", "3", "--context-parallel", "2"], "that several share"),
        (1, ["--context-parallel", "2"], "start a multiple of 2"),
        (2, ["--context-parallel", "2", "--seq-len", "30"], "30 tokens cannot be shared by 2"),
    ],
)
def test_contradictions_are_refused(tmp_path, tokens, ranks, more, words):
    assert words in run(tmp_path, tokens, ranks, *more, code=1)


@pytest.mark.slow
def test_ranks_that_were_told_otherwise(tmp_path, tokens):
    one = ["-n", "1", sys.executable, PROGRAM, "--device", "cpu", "--model", "tiny"]
    one += ["--data", tokens, "--out", tmp_path]
    done = subprocess.run(
        [mpirun(), "--map-by", ":OVERSUBSCRIBE", *one, "--lr", "1e-3", ":", *one, "--lr", "2e-3"],
        env={**os.environ, **AS_ROOT},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 1
    assert re.search("rank 1: flags is '.*--lr 2e-3.*', at rank 0 '.*--lr 1e-3", done.stderr)
