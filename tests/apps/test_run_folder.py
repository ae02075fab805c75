"""The name that a run gets, and the run that --resume means."""

import shutil
from pathlib import Path

import pytest
import train_pythia
from harness import naming
from small_runs import assert_same_run, checkpoint_of, contents, flags, without

import needle as ndl
from needle.data import DataError
from needle.files import FileError, Lock
from needle.training import folder as folders
from needle.training import run as runs
from needle.training import session as sessions
from needle.training.export import main as hf

# ---- which name ---------------------------------------------------------------------------------

LINE = '{"step": 1, "loss": 2.0, "tokens": 9}\n'


def begin(out, name):
    """The folder that a start takes, which has ended."""
    folder, lock = folders.begin(out, name, "tiny")
    lock.release()
    return folder


def test_folder_is_free_until_a_step_has_finished(tmp_path):
    """A start that wrote its config.json, and came no further, leaves its name; without one the
    first number is taken that no folder has."""
    for name in ("tiny", "tiny-2", "tiny-3"):
        assert not (tmp_path / name).exists() and begin(tmp_path, None) == tmp_path / name
    folder = tmp_path / "tiny"
    for free, file, text in (
        (True, "tokenizer.json", "{}"),
        (True, "metrics.jsonl", '{"step": 1'),  # cut off
        (True, "checkpoints/step_0.safetensors", ""),
        (True, "checkpoints/weights_0.safetensors", ""),
        (True, "replay.json", "{}"),  # of a replay: its edits are not the new run's
        (False, "metrics.jsonl", LINE),
        (False, "checkpoints/step_1.safetensors", ""),
        (False, "checkpoints/weights_1.safetensors", ""),
        (False, "config.json", '{"saved": true}'),
        (False, "config.json", '{"hidden_size": 8}'),
    ):
        shutil.rmtree(folder)
        (folder / "checkpoints").mkdir(parents=True)
        (folder / "config.json").write_text('{"saved": false}')
        (folder / file).write_text(text)
        with naming(file, text):
            if free:
                assert begin(tmp_path, "tiny") == folder
                assert not list((folder / "checkpoints").iterdir())
                assert not (folder / "replay.json").exists()
                continue
            with pytest.raises(DataError, match="tiny: there is a run of this name already; .*--n"):
                begin(tmp_path, "tiny")
            assert (folder / file).read_text() == text
    _, lock = folders.begin(tmp_path, "new", "tiny")
    with pytest.raises(FileError, match="is working in this folder"):
        folders.begin(tmp_path, "new", "tiny")
    assert lock.held


def test_run_that_failed_before_its_first_step_leaves_its_name(
    tmp_path, run, tokens, monkeypatch, capsys
):
    """The next one may have another shape, and of no name has the next number. Errors are kept, as
    notebooks keep those that they show."""
    named, kept = flags(tmp_path, tokens, "a", "--keep log --layers 3"), []
    unnamed = without(flags(tmp_path, tokens, "a"), "--name")
    for place, part, words in (
        (train_pythia, "read_replay", named),
        (train_pythia, "Run", named),
        (runs, "write_description", named),
        (sessions, "open_log", named),
        (train_pythia, "forward_backward", named),
        (train_pythia, "forward_backward", unnamed),
    ):
        with monkeypatch.context() as patch, pytest.raises(TypeError) as error:
            patch.setattr(place, part, None)
            train_pythia.main(words)
        kept.append(error)
    assert run("a", "--resume auto --layers 1") == 1
    assert "or start anew under another --name" in capsys.readouterr().err
    folder = tmp_path / "runs" / "a"
    (folder / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')  # of its text
    assert run("a", "--layers 1") == 0 and train_pythia.main(unnamed) == 0
    assert not (folder / "tokenizer_config.json").exists()
    assert ndl.open_run(folder).config.num_layers == 1 and ndl.open_run(folder).steps == [4, 6]
    assert sorted(path.name for path in folder.parent.iterdir()) == ["a", "tiny", "tiny-2"]


def test_resume_means_the_run_that_saved_last_or_that_of_a_checkpoint_or_folder(
    tmp_path, run, monkeypatch
):
    """A newer run that has not saved is left to others; a run goes on by the name of its folder."""
    assert run("old") == 0
    old, new = (tmp_path / "runs" / name for name in ("old", "new"))
    (new / "checkpoints").mkdir(parents=True)
    (new / "config.json").write_text('{"saved": false}')
    for place, what, step in (old, "auto", 6), (old / "checkpoints", "step_4.safetensors", 4):
        monkeypatch.chdir(place)
        folder, lock, found = folders.resume(what, old.parent, None)
        assert (folder, lock.path, lock.held) == (old, old / "lock", True)
        assert found.state["step"] == step
        lock.release()
    assert Lock(new).held
    for place, words in (old, "."), (old / "checkpoints", ".."):
        monkeypatch.chdir(place)
        wanted = ["--resume", "auto", "--name", "old", "--out", str(old.parent)]
        assert folders.again(Path(words)) == wanted


def test_resume_of_a_mistyped_name_starts_anew_and_names_the_runs_there_are(tmp_path, run, capsys):
    assert run("base") == 0
    (tmp_path / "runs" / "empty").mkdir()
    for name, said in (
        ("baes", f"no run baes under {tmp_path}/runs/; there is {tmp_path}/runs/base: starting"),
        ("other", f"no run other under {tmp_path}/runs/: starting from the beginning"),
        ("empty", f"no checkpoint in {tmp_path}/runs/empty: starting from the beginning"),
    ):
        assert run(name, "--resume", "auto") == 0
        assert said in " ".join(capsys.readouterr().out.split())
    assert_same_run(tmp_path, "base", "other")


# ---- export and import --------------------------------------------------------------------------


def test_export_and_import_overwrite_nothing_without_being_asked(tmp_path, run, capsys):
    assert run("a") == 0
    runs, out, file = tmp_path / "runs", tmp_path / "out", tmp_path / "kept" / "m.safetensors"
    (tmp_path / "link").symlink_to(runs / "a" / "checkpoints")
    assert hf(["export", str(runs / "a"), str(out)]) == 0
    (out / "notes.txt").write_text("mine")
    assert hf(["import", str(out), str(file)]) == 0
    half = str(tmp_path / "half.safetensors")
    assert hf(["import", str(out), half, "--dtype", "bfloat16"]) == 0
    assert ndl.load_checkpoint(half)[0].config.dtype == "bfloat16"
    of_run, before = "the folder of a run", contents(tmp_path)
    for direction, target, reason in (
        *(("export", runs / "a" / part, of_run) for part in ("", "checkpoints")),
        ("import", tmp_path / "link" / "step_99.safetensors", of_run),
        ("import", checkpoint_of(tmp_path, "a", 6), of_run),
        ("import", runs / "a" / "config.json", of_run),
        ("export", out, "--overwrite"),
        ("import", file, "--overwrite"),
    ):
        words = [direction, {"export": str(runs / "a"), "import": str(out)}[direction], str(target)]
        with naming(direction, target):
            assert hf(words) == 1
            error = capsys.readouterr().err
            assert error.startswith(f"needle {direction}: ") and reason in error
            assert contents(tmp_path) == before
            assert hf([*words, "--overwrite"]) == (reason != "--overwrite")
            capsys.readouterr()
    assert (out / "notes.txt").read_text() == "mine"
