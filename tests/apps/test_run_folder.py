"""A trainer writes only into the folder that it holds, and resumes only checkpoints of its run."""

import json
import shutil
import types

import numpy as np
import pytest
import train_pythia
from small_runs import checkpoint_of, flags, tensors_of

from needle import nn
from needle.hf.__main__ import main as hf
from needle.training import log as logs
from needle.training import session as sessions
from needle.training import state as states


@pytest.fixture
def run(tmp_path, tokens):
    return lambda name, *more: train_pythia.main(flags(tmp_path, tokens, name, *more))


def contents(folder):
    return {
        path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()
    }


def removed(folder, other):
    shutil.rmtree(folder)


def renamed(folder, other):
    folder.rename(folder.with_name("moved"))


def removed_and_begun_anew(folder, other):
    shutil.rmtree(folder)
    other()


def renamed_and_begun_anew(folder, other):
    folder.rename(folder.with_name("moved"))
    other()


MISCHIEF = [removed, renamed, removed_and_begun_anew, renamed_and_begun_anew]


@pytest.mark.parametrize(
    "when", [1, 5, 6]
)  # before the first save, between saves, in the last step
def test_trainer_whose_folder_is_gone_stops_and_writes_nothing(
    tmp_path, tokens, run, monkeypatch, capsys, when
):
    queue, runs = logs.RunLog.queue, tmp_path / "runs"
    for number, happens in enumerate(MISCHIEF):
        name, seen = f"{happens.__name__}-{number}", {}
        folder = runs / name

        def begin_anew(name=name):
            with monkeypatch.context() as patch:
                patch.setattr(logs.RunLog, "queue", queue)
                assert run(name, "--seed", "7") == 0

        def queueing(
            self, step, *rest, happens=happens, folder=folder, other=begin_anew, seen=seen
        ):
            queue(self, step, *rest)
            if step == when:
                happens(folder, other)
                seen["moved"] = contents(folder.with_name("moved"))
                seen["there"] = contents(folder)

        monkeypatch.setattr(logs.RunLog, "queue", queueing)
        capsys.readouterr()
        assert run(name) == 1, name
        said = capsys.readouterr().err
        assert f"{folder}: was removed, renamed or replaced" in said and "Traceback" not in said
        assert "/proc/" not in said
        assert contents(folder) == seen["there"], name
        log = {key for key in seen["moved"] if key.name == "metrics.jsonl"}  # open since the start
        moved = contents(folder.with_name("moved"))
        assert {k: v for k, v in moved.items() if k not in log} == {
            k: v for k, v in seen["moved"].items() if k not in log
        }, name
        assert not folder.exists() or "anew" in name
        shutil.rmtree(folder.with_name("moved"), ignore_errors=True)


@pytest.mark.parametrize("happens", MISCHIEF)
def test_resumed_trainer_whose_folder_is_gone_before_its_log_writes_nothing(
    tmp_path, run, monkeypatch, capsys, happens
):
    assert run("a") == 0
    checkpoint_of(tmp_path, "a", 6).unlink()
    folder, moved, seen = tmp_path / "runs" / "a", tmp_path / "runs" / "moved", {}
    open_log = sessions.open_log

    def opening(one):
        monkeypatch.setattr(sessions, "open_log", open_log)
        happens(folder, lambda: run("a", "--seed", "7"))
        seen.update(there=contents(folder), moved=contents(moved))
        return open_log(one)

    monkeypatch.setattr(sessions, "open_log", opening)
    monkeypatch.setattr(train_pythia.trackers, "TensorBoard", lambda at, step: at.mkdir())
    monkeypatch.setattr(train_pythia.trackers, "check", lambda *_: None)
    assert run("a", "--resume", "auto", "--tensorboard") == 1
    said = capsys.readouterr().err
    assert f"{folder}: was removed, renamed or replaced" in said and "Traceback" not in said
    assert (f"--resume {moved} goes on" in said) == moved.exists() and "/proc/" not in said
    assert seen == {"there": contents(folder), "moved": contents(moved)}
    if moved.exists():
        assert train_pythia.main(["--device", "cpu", "--resume", str(moved)]) == 0
        assert checkpoint_of(tmp_path, "moved", 6).exists()


def test_folder_that_was_moved_between_two_parts_of_a_run_goes_on(tmp_path, run):
    assert run("whole") == 0 and run("a") == 0
    checkpoint_of(tmp_path, "a", 6).unlink()
    shutil.copytree(tmp_path / "runs" / "a", tmp_path / "runs" / "copy")
    (tmp_path / "runs" / "a").rename(tmp_path / "runs" / "b")
    for name in "b", "copy":
        assert run(name, "--resume", "auto") == 0
        assert tensors_of(checkpoint_of(tmp_path, name, 6)) == tensors_of(
            checkpoint_of(tmp_path, "whole", 6)
        )


def test_id_of_a_run_settings_data_or_first_weights_differ():
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
    """It has the same shapes, but another seed and settings than config.json says."""
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
    own.with_name("step_9.safetensors").unlink()
    shutil.copy(foreign, own)
    assert run("a", "--resume", "auto") == 1
    assert run("c", "--init", put if put.exists() else foreign) == 0


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
