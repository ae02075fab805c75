"""No run loses what it has saved, nor more than the steps since: damage, refusals of the system,
two processes, signals, a reader that goes away, data that break off."""

import errno
import json
import os
import signal
import subprocess
import sys

import pytest
import train_pythia
from harness import ROOT
from small_runs import SMALL, flags, numbers_of, tensors_of

from needle.checkpoint import Checkpoint, checkpoint_path, list_checkpoints
from needle.data import DataError, Prefetch
from needle.files import FileError
from needle.training import folder as folders
from needle.training import log as logs
from needle.training import run as run_parts

pytestmark = pytest.mark.slow

# The program with that preset, as a process of its own.
PROGRAM = """
import signal, sys
sys.path.insert(0, {apps!r})
{before}
import train_pythia
from needle.models import pythia
pythia.PRESETS["tiny"] = {small}
sys.exit(train_pythia.main(sys.argv[1:]))
"""


@pytest.fixture
def run(tmp_path, tokens):
    """run(name, *flags) -> exit code of a small run in this process."""
    return lambda name, *more: train_pythia.main(flags(tmp_path, tokens, name, *more))


@pytest.fixture
def process(tmp_path, tokens):
    """process(name, *flags) -> the same as a process of its own; its output is one pipe."""
    started = []

    def start(name, *more, before=""):
        program = PROGRAM.format(apps=str(ROOT / "apps"), before=before, small=SMALL)
        argv = flags(tmp_path, tokens, name, "--eval-every", "0", *more)
        started.append(
            subprocess.Popen(
                [sys.executable, "-u", "-c", program, *argv],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
        )
        return started[-1]

    yield start
    for one in started:
        one.kill()
        one.wait()
        one.stdout.close()


def folder_of(tmp_path, name):
    return tmp_path / "runs" / name / "checkpoints"


def damage(path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_new_checkpoints_survive_damaged_ones_of_later_steps(tmp_path, run):
    """A recipe keeps step 4 for good, and 5 and 6 are damaged. The run that goes on from 4 keeps
    what it writes, though its first has a lower number than the damaged."""
    recipe = ("--recipe", "pythia", "--global-batch-size", "2")
    assert run("whole", "--save-every", "1", *recipe) == 0
    assert run("a", "--save-every", "1", *recipe) == 0
    folder = folder_of(tmp_path, "a")
    for step in (5, 6):
        damage(checkpoint_path(folder, step))
    seen = []
    prune = run_parts.prune_checkpoints

    def pruned(*args, **options):
        prune(*args, **options)
        seen.append({path.name for path in list_checkpoints(folder)})

    run_parts.prune_checkpoints = pruned
    try:
        assert run("a", "--resume", "auto") == 0
    finally:
        run_parts.prune_checkpoints = prune
    assert all("step_5.safetensors" in names for names in seen[:1])
    assert tensors_of(checkpoint_path(folder, 6)) == tensors_of(
        checkpoint_path(folder_of(tmp_path, "whole"), 6)
    )


def test_runs_without_a_name_are_counted(tmp_path):
    for name in ("tiny", "tiny-2", "tiny-3"):
        folder = folders.free_folder(tmp_path, None, "tiny", restart=False)
        assert folder == tmp_path / name and not folder.exists()
        folder.mkdir()
    assert folders.free_folder(tmp_path, None, "tiny", restart=True) == tmp_path / "tiny"
    assert folders.free_folder(tmp_path, "tiny", "tiny", restart=False) == tmp_path / "tiny"
    (tmp_path / "tiny" / "metrics.jsonl").touch()  # it is empty no more
    with pytest.raises(DataError, match="tiny: there is a run of this name already; .*--name tiny"):
        folders.free_folder(tmp_path, "tiny", "tiny", restart=False)


def test_pruning_counts_whole_files_and_never_the_one_just_written(tmp_path, run):
    assert run("a", "--save-every", "0") == 0
    folder = folder_of(tmp_path, "a")
    whole = checkpoint_path(folder, 6).read_bytes()
    for step in (1, 2, 3, 4, 8, 9):
        checkpoint_path(folder, step).write_bytes(whole)
    for step in (4, 8, 9):
        damage(checkpoint_path(folder, step))
    run_parts.prune_checkpoints(folder, 6)
    names = [int(path.stem[5:]) for path in list_checkpoints(folder)]
    assert names == [9, 8, 6, 4, 3]  # 6 and 3 are whole; 4 stands between them


def test_auto_does_not_begin_anew_over_damage(tmp_path, run, capsys):
    assert run("a") == 0
    folder = folder_of(tmp_path, "a")
    for path in list_checkpoints(folder):
        damage(path)
    before = {path: path.read_bytes() for path in list_checkpoints(folder)}
    assert run("a", "--resume", "auto") == 1
    assert "none of its checkpoints is whole; nothing is overwritten" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in list_checkpoints(folder)} == before


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO], ids=["permission", "disk"])
@pytest.mark.parametrize("what", ["file", "folder"])
def test_auto_does_not_begin_anew_over_what_the_system_refuses(
    tmp_path, run, capsys, monkeypatch, what, number
):
    assert run("a") == 0
    folder = folder_of(tmp_path, "a")
    newest = list_checkpoints(folder)[0]
    victim = folder if what == "folder" else newest
    before = sorted(path.name for path in folder.iterdir())

    def refusing(function):
        def call(path, *args, **options):
            if str(path) == str(victim):
                raise OSError(number, os.strerror(number), str(path))
            return function(path, *args, **options)

        return call

    with monkeypatch.context() as patch:
        patch.setattr(os, "listdir", refusing(os.listdir))
        patch.setattr("needle.files.open", refusing(open), raising=False)
        assert run("a", "--resume", "auto") == 1
    err = capsys.readouterr().err
    assert f"{victim}: cannot be" in err and os.strerror(number) in err
    assert before == sorted(path.name for path in folder.iterdir())
    assert Checkpoint(newest).state["step"] == 6


def test_a_run_that_never_saved_begins_anew(tmp_path, run, capsys):
    (folder_of(tmp_path, "a")).mkdir(parents=True)
    (folder_of(tmp_path, "a") / ".step_2.safetensors.7-00000000.tmp").write_text("x")
    assert run("a", "--resume", "auto") == 0
    assert "starting from the beginning" in capsys.readouterr().out
    assert not list((folder_of(tmp_path, "a")).glob(".*"))


@pytest.mark.parametrize("gone", ["files", "folder"])
@pytest.mark.parametrize("older", [False, True])
def test_a_run_that_saved_does_not_begin_anew(tmp_path, run, capsys, gone, older):
    """Its checkpoints were deleted, and its metrics and its model's name are left."""
    assert run("tiny", "--steps", "1") == 0  # stopped before --save-every: by its end
    folder = tmp_path / "runs" / "tiny"
    before = (folder / "metrics.jsonl").read_bytes()
    for path in (folder / "checkpoints").iterdir():
        path.unlink()
    if gone == "folder":
        (folder / "checkpoints").rmdir()
    if older:  # a config.json that does not say whether the run has saved
        config = json.loads((folder / "config.json").read_text())
        assert config.pop("saved") is True
        (folder / "config.json").write_text(json.dumps(config))
    unnamed = flags(tmp_path, tmp_path / "tokens.npy", "tiny", "--resume", "auto")
    unnamed[unnamed.index("--name") : unnamed.index("--name") + 2] = []
    for begin in (lambda: run("tiny", "--resume", "auto"), lambda: train_pythia.main(unnamed)):
        assert begin() == 1
        out, error = capsys.readouterr()
        assert f"{folder / 'checkpoints'}: no checkpoint is left there" in error
        assert f"another --name, or remove {folder}" in error
        assert "starting from the beginning" not in out
        assert (folder / "metrics.jsonl").read_bytes() == before
    assert run("b", "--resume", "auto") == 0


def test_two_processes_on_one_run(tmp_path, process):
    first = process("a", "--steps", "100000")
    assert any(line.startswith("step ") for line in first.stdout)
    second = process("a", "--resume", "auto", "--steps", "100000")
    out, _ = second.communicate()
    assert second.returncode == 1
    assert f"process {first.pid} on" in out and "is working in this folder" in out
    first.send_signal(signal.SIGTERM)
    first.communicate()
    assert first.returncode == 0


def test_two_starts_that_found_one_name_free(tmp_path):
    """Neither works in the other's folder, also when the other has ended."""
    out, shared = tmp_path / "runs", tmp_path / "runs" / "tiny"
    folder, lock = folders.take_new(shared, out, None, "tiny", False)
    assert folder == shared and lock.held
    other, second = folders.take_new(shared, out, None, "tiny", False)
    assert other == out / "tiny-2" and second.held
    with pytest.raises(FileError, match="is working in this folder"):
        folders.take_new(shared, out, "tiny", "tiny", False)
    lock.release()
    folder, lock = folders.take_new(shared, out, "tiny", "tiny", False)  # it wrote nothing
    lock.release()
    (shared / "config.json").write_text('{"saved": true}')
    for name, restart in ("tiny", False), ("tiny", True), (None, True):
        with pytest.raises(DataError, match="another start has begun this run.*--resume auto"):
            folders.take_new(shared, out, name, "tiny", restart)
    folders.Lock(shared).release()  # nobody holds it


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "runs").touch()
    with pytest.raises(FileError, match="runs: File exists"):
        folders.take_new(tmp_path / "runs" / "tiny", tmp_path / "runs", None, "tiny", False)


@pytest.mark.parametrize("name", ["a", None])
def test_another_start_is_faster(tmp_path, run, tokens, monkeypatch, capsys, name):
    """It begins and ends while this one reads its data."""
    run_data, argv = train_pythia.run_data, flags(tmp_path, tokens, "a")
    if name is None:
        argv = argv[: argv.index("--name")] + argv[argv.index("--name") + 2 :]

    def slow(*args, **more):
        monkeypatch.setattr(train_pythia, "run_data", run_data)
        assert train_pythia.main(argv) == 0
        return run_data(*args, **more)

    monkeypatch.setattr(train_pythia, "run_data", slow)
    code = train_pythia.main(argv)
    runs = sorted(path.name for path in (tmp_path / "runs").iterdir())
    if name is None:
        assert code == 0 and runs == ["tiny", "tiny-2"]
        first, second = (
            json.loads((tmp_path / "runs" / run / "config.json").read_text()) for run in runs
        )
        assert first == second  # and one id: they are the same run twice
    else:
        assert code == 1 and runs == ["a"]
        assert "another start has begun this run meanwhile" in capsys.readouterr().err


def test_a_taken_name_is_told_before_the_text_is_read(tmp_path, run, monkeypatch, capsys):
    assert run("a") == 0
    monkeypatch.setattr(train_pythia, "run_data", None)
    assert run("a") == 1
    assert "there is a run of this name already" in capsys.readouterr().err


@pytest.mark.usefixtures("heeds_hangup")
@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGTERM, signal.SIGINT])
def test_signals_save_the_last_step(tmp_path, process, number):
    child = process("a", "--save-every", "0", "--steps", "20000")
    for line in child.stdout:
        if line.startswith("step "):
            break
    child.send_signal(number)
    out, _ = child.communicate()
    assert child.returncode == 0 and f"stopped by {number.name} after step" in out
    step = int(out.split("after step ")[1].split()[0])
    [saved] = list_checkpoints(folder_of(tmp_path, "a"))
    assert Checkpoint(saved).state["step"] == step >= 1
    assert f"{sys.executable} " in out.splitlines()[-1]


def test_an_ignored_hangup_stays_ignored(process):
    ignoring = "signal.signal(signal.SIGHUP, signal.SIG_IGN)"
    child = process("a", "--steps", "20000", "--save-every", "0", before=ignoring)
    lines = iter(child.stdout)
    assert any(line.startswith("step ") for line in lines)
    child.send_signal(signal.SIGHUP)
    assert any(line.startswith("step ") for line in lines)
    child.send_signal(signal.SIGTERM)
    assert "stopped by SIGTERM" in child.communicate()[0]


def test_a_closed_pipe_saves_the_last_step(tmp_path, process):
    child = process("a", "--save-every", "0", "--steps", "20000")
    for line in child.stdout:
        if line.startswith("step "):
            break
    child.stdout.close()
    assert child.wait(60) == 0
    [saved] = list_checkpoints(folder_of(tmp_path, "a"))
    lines = (tmp_path / "runs" / "a" / "metrics.jsonl").read_text().splitlines()
    assert Checkpoint(saved).state["step"] == len(lines) == json.loads(lines[-1])["step"] >= 1


@pytest.mark.parametrize("failing", [4, 7])
def test_data_that_break_off_cost_no_finished_step(tmp_path, run, monkeypatch, capsys, failing):
    """The 4th and the 7th of two micro-batches a step: within a step, and before one."""
    accumulated = ("--grad-accum", "2", "--save-every", "0")
    assert run("whole", *accumulated) == 0
    taken, real = [], Prefetch.next

    def broken(self):
        taken.append(1)
        if len(taken) == failing:
            raise DataError("tokens.npy: shrank while it was read")
        return real(self)

    monkeypatch.setattr(Prefetch, "next", broken)
    assert run("a", *accumulated) == 1
    monkeypatch.undo()
    done = (failing - 1) // 2
    err = capsys.readouterr().err
    assert "tokens.npy: shrank while it was read" in err and f"after step {done} of 6" in err
    assert run("a", *accumulated, "--resume", "auto") == 0
    assert tensors_of(checkpoint_path(folder_of(tmp_path, "a"), 6)) == tensors_of(
        checkpoint_path(folder_of(tmp_path, "whole"), 6)
    )


class RefusedOnce:
    """metrics.jsonl, of which one write is refused."""

    def __init__(self, file, at):
        self.file, self.left = file, at

    def flush(self):
        self.left -= 1
        if self.left == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.file.flush()

    def __getattr__(self, name):
        return getattr(self.file, name)


@pytest.mark.parametrize("more", ["--eval-every 0", "--eval-every 1"])
@pytest.mark.parametrize("at", [1, 3, 5])
def test_a_refused_line_of_metrics_costs_nothing(tmp_path, run, monkeypatch, capsys, at, more):
    """The state that is saved then is that of the last step whose line is written."""
    real = logs.RunLog.__init__

    def refusing(self, *args):
        real(self, *args)
        self._file = RefusedOnce(self._file, at)

    assert run("whole", "--save-every 0", more) == 0
    monkeypatch.setattr(logs.RunLog, "__init__", refusing)
    assert run("a", "--save-every 0", more) == 1
    monkeypatch.undo()
    err = capsys.readouterr().err
    assert "metrics.jsonl" in err and "and saved" in err
    assert run("a", "--save-every 0", more, "--resume auto") == 0
    assert numbers_of(tmp_path, "a") == numbers_of(tmp_path, "whole")
    last = [checkpoint_path(folder_of(tmp_path, name), 6) for name in ("a", "whole")]
    assert tensors_of(last[0]) == tensors_of(last[1])


@pytest.mark.parametrize(
    "bad",
    [b"{half", b"\xff\xfe", b"[]", b"3", b'{"step": "x"}', b"null", b'{"loss": 1}', b"[" * 9999],
)
def test_a_damaged_line_of_metrics_cuts_nothing(tmp_path, run, bad):
    assert run("a", "--save-every", "2") == 0
    path = tmp_path / "runs" / "a" / "metrics.jsonl"
    lines = path.read_bytes().splitlines()
    path.write_bytes(b"\n".join([lines[0], bad, *lines[1:], b""]))
    checkpoint_path(folder_of(tmp_path, "a"), 6).unlink()
    assert run("a", "--resume", "auto") == 0
    steps = [line["step"] for line in logs.read_lines(path)]
    assert steps == [1, 2, 3, 4, 5, 6] and len(path.read_bytes().splitlines()) == 6


def test_memory_that_runs_out_is_said_and_the_run_goes_on(tmp_path, run, monkeypatch, capsys):
    assert run("whole") == 0
    taken, real = [], train_pythia.forward_backward

    def short(*args):
        taken.append(1)
        if len(taken) == 4:
            raise MemoryError("allocate: the system refused 1 bytes")
        return real(*args)

    monkeypatch.setattr(train_pythia, "forward_backward", short)
    assert run("a") == 1
    monkeypatch.undo()
    err = capsys.readouterr().err
    assert "allocate: the system refused 1 bytes" in err and "--batch-size" in err
    assert run("a", "--resume", "auto") == 0
    assert numbers_of(tmp_path, "a") == numbers_of(tmp_path, "whole")
