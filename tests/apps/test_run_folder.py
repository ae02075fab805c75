"""A trainer writes only into the folder that it holds, and resumes only checkpoints of its run."""

import json
import shutil
import types
from pathlib import Path

import numpy as np
import pytest
import train_pythia
from harness import naming
from small_runs import checkpoint_of, flags, without

from needle import nn
from needle.data import DataError
from needle.files import FileError, Lock
from needle.hf.__main__ import main as hf
from needle.training import flags as command_line
from needle.training import folder as folders
from needle.training import session as sessions
from needle.training import state as states
from needle.training.log import RunLog


def contents(folder):
    return {
        path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()
    }


# ---- a folder that goes while a run trains ------------------------------------------------------


@pytest.mark.parametrize("happens", ["removed", "renamed"])
@pytest.mark.parametrize("anew", [False, True])
def test_trainer_whose_folder_is_gone_stops_and_writes_nothing(
    tmp_path, run, monkeypatch, capsys, happens, anew
):
    """Happens before the first save, between saves, in the last step, before a resume's log."""
    queue, open_log, runs = RunLog.queue, sessions.open_log, tmp_path / "runs"
    for when in 1, 5, 6, "log":
        name, seen = f"a{when}", {}
        folder, moved = runs / name, runs / f"moved{when}"

        def strike(name=name, seen=seen, folder=folder, moved=moved):
            shutil.rmtree(folder) if happens == "removed" else folder.rename(moved)
            with monkeypatch.context() as patch:
                patch.setattr(RunLog, "queue", queue)
                patch.setattr(sessions, "open_log", open_log)
                assert not anew or run(name, "--seed", "7") == 0
            seen.update(there=contents(folder), moved=contents(moved))

        def queueing(self, step, *rest, when=when, strike=strike):
            queue(self, step, *rest)
            if step == when:
                strike()

        def opening(one, strike=strike):
            strike()
            return open_log(one)

        with naming(when), monkeypatch.context() as patch:
            more = []
            if when == "log":
                assert run(name) == 0
                checkpoint_of(tmp_path, name, 6).unlink()
                patch.setattr(sessions, "open_log", opening)
                more = ["--resume", "auto"]
            else:
                patch.setattr(RunLog, "queue", queueing)
            capsys.readouterr()
            assert run(name, *more) == 1
            said = capsys.readouterr().err
            assert f"{folder}: was removed, renamed or replaced" in said
            assert "Traceback" not in said and "/proc/" not in said
            assert (f"--resume {moved} goes on" in said) == moved.exists()
            assert contents(folder) == seen["there"] and folder.exists() == anew
            for path, data in contents(moved).items():  # metrics.jsonl is open since the start
                assert path.name == "metrics.jsonl" or data == seen["moved"][path]
            assert contents(moved).keys() == seen["moved"].keys()
        if when == "log" and moved.exists():
            assert train_pythia.main(["--device", "cpu", "--resume", str(moved)]) == 0
            assert checkpoint_of(tmp_path, moved.name, 6).exists()


# ---- which run ----------------------------------------------------------------------------------


def test_id_of_a_run_differs_with_settings_data_or_first_weights():
    np.random.seed(0)
    weights = [nn.flatten_parameters(nn.Linear(3, 2)) for _ in range(2)]
    facts = [
        ({"init": init, "seed": seed}, types.SimpleNamespace(fingerprint=tokens), flat)
        for init in (None, "a")
        for seed in (1, 2)
        for tokens in ("x", "y")
        for flat in weights[: 1 if init is None else 2]
    ]
    ids = [states.id_of(*of) for of in facts]
    assert len({*ids}) == len(ids) == 12 and ids == [states.id_of(*of) for of in facts]


def test_checkpoint_of_another_run_is_not_resumed(tmp_path, run, capsys):
    """Shapes are the same; seed and settings differ from config.json."""
    assert run("a", "--seed", "1") == 0 and run("b", "--seed", "2", "--steps", "9") == 0
    own, foreign = checkpoint_of(tmp_path, "a", 6), checkpoint_of(tmp_path, "b", 9)
    ids = [
        json.loads((tmp_path / "runs" / name / "config.json").read_text())["id"] for name in "ab"
    ]
    put = shutil.copy(foreign, own.with_name("step_9.safetensors"))
    before = contents(tmp_path / "runs" / "a")
    for words in (["auto"], [put], [tmp_path / "runs" / "a"]):
        capsys.readouterr()
        assert run("a", "--resume", *words) == 1
        said = capsys.readouterr().err
        assert f"{put}: is of run '{ids[1]}'" in said and ids[0] in said and "--init" in said
        assert contents(tmp_path / "runs" / "a") == before
    assert run("c", "--init", put) == 0


# ---- which name ---------------------------------------------------------------------------------


def test_runs_without_a_name_are_numbered(tmp_path):
    for name in ("tiny", "tiny-2", "tiny-3"):
        folder = folders.free_folder(tmp_path, None, "tiny", restart=False)
        assert folder == tmp_path / name and not folder.exists()
        folder.mkdir()
    assert folders.free_folder(tmp_path, None, "tiny", restart=True) == tmp_path / "tiny"
    assert folders.free_folder(tmp_path, "tiny", "tiny", restart=False) == tmp_path / "tiny"
    (tmp_path / "tiny" / "metrics.jsonl").touch()  # no longer empty
    with pytest.raises(DataError, match="tiny: there is a run of this name already; .*--name tiny"):
        folders.free_folder(tmp_path, "tiny", "tiny", restart=False)
    with pytest.raises(FileError, match="metrics.jsonl: File exists"):
        out = tmp_path / "tiny" / "metrics.jsonl"
        folders.take_new(out / "tiny", out, None, "tiny", False)


def test_two_starts_that_found_one_name_free_take_two_folders(tmp_path):
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
    Lock(shared).release()  # no process holds it


def test_run_that_another_start_begins_meanwhile(tmp_path, run, tokens, monkeypatch, capsys):
    """The other begins and ends while this one reads its data."""
    run_data = train_pythia.run_data
    named = flags(tmp_path, tokens, "a")
    for argv, code in (named, 1), (without(named, "--name"), 0):

        def slow(*args, argv=argv, **more):
            monkeypatch.setattr(train_pythia, "run_data", run_data)
            assert train_pythia.main(argv) == 0
            return run_data(*args, **more)

        monkeypatch.setattr(train_pythia, "run_data", slow)
        assert train_pythia.main(argv) == code
        said = capsys.readouterr().err
        assert code == 0 or "another start has begun this run meanwhile" in said
    runs = sorted(path.name for path in (tmp_path / "runs").iterdir())
    assert runs == ["a", "tiny", "tiny-2"]
    descriptions = [folders.read_description(tmp_path / "runs" / name) for name in runs]
    assert descriptions[1] == descriptions[2]  # and one id: they are the same run twice
    monkeypatch.setattr(train_pythia, "run_data", None)
    assert run("a") == 1  # before the text is read
    assert "there is a run of this name already" in capsys.readouterr().err


def test_resume_of_a_mistyped_name_starts_anew_and_names_the_runs_there_are(tmp_path, run, capsys):
    assert run("base") == 0
    for name, near in ("baes", f"; there is {tmp_path}/runs/base"), ("other", ""):
        assert run(name, "--resume", "auto") == 0
        begins = f"no run {name} under {tmp_path}/runs/{near}: starting from the beginning\n"
        assert begins in capsys.readouterr().out
    (tmp_path / "runs" / "bas").mkdir()
    assert run("bas", "--resume", "auto") == 0
    assert f"no checkpoint in {tmp_path}/runs/bas: starting" in capsys.readouterr().out


def test_words_that_resume_a_run_are_read_as_they_are_meant(monkeypatch, tmp_path):
    """Includes a name that looks like a flag, and a folder that no --name can mean."""
    auto = ["--resume", "auto", "--name"]
    assert folders.again(Path("runs/a")) == [*auto, "a"]
    for folder in "elsewhere/a", "runs/-y", "runs/--name", "-out/a b", "-out/-y", "a/-b/c":
        args = command_line.parse(folders.again(Path(folder)))
        assert Path(args.out) / args.name == Path(folder) and args.resume == "auto", folder
    for folder in "runs/.old", "-out/.old":
        args = command_line.parse(folders.again(Path(folder)))
        assert (args.resume, args.name) == (folder, None)
    monkeypatch.chdir(tmp_path)
    assert folders.again(Path(".")) == [*auto, tmp_path.name, "--out", str(tmp_path.parent)]


# ---- export and import --------------------------------------------------------------------------


def test_export_and_import_overwrite_nothing_without_being_asked(tmp_path, run, capsys):
    assert run("a") == 0 and run("b") == 0
    runs, out = tmp_path / "runs", tmp_path / "out"
    for target in runs / "a", runs / "b", runs / "a" / "checkpoints":
        before = contents(runs)
        for more in [], ["--overwrite"]:
            assert hf(["export", str(runs / "a"), str(target), *more]) == 1
            assert "the folder of a run" in capsys.readouterr().err
        assert contents(runs) == before
    assert hf(["export", str(runs / "a"), str(out)]) == 0
    (out / "notes.txt").write_text("mine")
    before = contents(out)
    assert hf(["export", str(runs / "b"), str(out)]) == 1
    assert "--overwrite" in capsys.readouterr().err and contents(out) == before
    assert hf(["export", str(runs / "b"), str(out), "--overwrite"]) == 0
    assert (out / "notes.txt").read_text() == "mine"
    (tmp_path / "link").symlink_to(runs / "a" / "checkpoints")
    for target, reason in [
        (runs / "a" / "checkpoints" / "step_99.safetensors", "the folder of a run"),
        (tmp_path / "link" / "step_99.safetensors", "the folder of a run"),
        (checkpoint_of(tmp_path, "a", 6), "the folder of a run"),
        (runs / "a" / "config.json", "the folder of a run"),
        (out / "model.safetensors", f"is in {out}, from where it comes"),
        (out / "new" / "m.safetensors", f"is in {out}, from where it comes"),
    ]:
        before = contents(runs), contents(out)
        for more in [], ["--overwrite"]:
            assert hf(["import", str(out), str(target), *more]) == 1
            assert reason in capsys.readouterr().err
        assert (contents(runs), contents(out)) == before
    file = tmp_path / "kept" / "m.safetensors"
    assert hf(["import", str(out), str(file)]) == 0
    before = file.read_bytes()
    assert hf(["import", str(out), str(file)]) == 1
    assert "--overwrite" in capsys.readouterr().err and file.read_bytes() == before
    assert hf(["import", str(out), str(file), "--overwrite"]) == 0
