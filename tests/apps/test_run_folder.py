"""A trainer writes only into the folder that it holds; the name that a run gets, and the run that
--resume means."""

import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import train_pythia
from harness import naming
from small_runs import (
    arguments,
    assert_same_run,
    checkpoint_of,
    flags,
    lines_of,
    numbers_of,
    run_until,
    tensors_of,
    without,
)

import needle as ndl
from needle.data import DataError, train_tokenizer
from needle.files import FileError
from needle.training import folder as folders
from needle.training import session as sessions
from needle.training.export import main as hf
from needle.training.log import RunLog
from needle.training.settings import parse


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
    """Happens before the first save, in the last step, before a resume's log."""
    queue, open_log, runs = RunLog.queue, sessions.open_log, tmp_path / "runs"
    for when in 1, 6, "log":
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

        with naming(when), monkeypatch.context() as patch:
            more = []
            if when == "log":
                assert run(name) == 0
                checkpoint_of(tmp_path, name, 6).unlink()
                opening = lambda one, strike=strike: strike() or open_log(one)
                patch.setattr(sessions, "open_log", opening)
                more = ["--resume", "auto"]
            else:
                patch.setattr(RunLog, "queue", queueing)
            capsys.readouterr()
            assert run(name, *more) == 1
            said = capsys.readouterr().err
            assert f"{folder}: was removed, renamed or replaced" in said
            assert "--resume with its new path goes on" in said and "Traceback" not in said
            assert contents(folder) == seen["there"] and folder.exists() == anew
            for path, data in contents(moved).items():  # metrics.jsonl is open since the start
                assert path.name == "metrics.jsonl" or data == seen["moved"][path]
            assert contents(moved).keys() == seen["moved"].keys()
        if when == "log" and moved.exists():
            assert train_pythia.main(["--device", "cpu", "--resume", str(moved)]) == 0
            assert checkpoint_of(tmp_path, moved.name, 6).exists()


# ---- a run that never saved ---------------------------------------------------------------------

SHAPE = "--layers 1 --hidden 16 --heads 1 --vocab-size 61 --no-mlp"


def words_of(tmp_path, data, *more):
    argv = flags(tmp_path, data, "a", *more, "--save-every 5")
    return without(argv, "--model") if {"--config", "--init"} & {*argv} else argv


@pytest.fixture
def begun(tmp_path, monkeypatch):
    """begun(data, *flags) -> the folder of a run that was killed before its first save, and the
    words that resume it, which name none of its settings."""

    def begin(data, *more):
        run_until(monkeypatch, 3, words_of(tmp_path, data, *more))
        assert len(lines_of(tmp_path, "a")) == 2 and not any((folder / "checkpoints").iterdir())
        return folder, arguments("--device cpu --resume auto --out", folder.parent)

    folder = tmp_path / "runs" / "a"
    return begin


@pytest.mark.parametrize(
    "more",
    [
        f"{SHAPE} --lr 0.02 --init-seed 9 --data-seed 5 --clip 0.3 --eval-every 2",
        "--global-batch-size 6 --sparse local --window 8",
        "--config {toml} --grad-accum 2",
        "--init {init} --schedule linear --weight-decay 0.2",
        "--tokenizer {json}",
    ],
)
@pytest.mark.filterwarnings("ignore:Pythia. sparse_window")
def test_run_that_never_saved_begins_again_by_its_config(
    tmp_path, tokens, texts, begun, capsys, more
):
    """Its numbers are those of a run that was never stopped; its tokenizer's file is gone."""
    whole, toml, given = tmp_path / "whole", tmp_path / "c.toml", tmp_path / "tokenizer.json"
    toml.write_text("hidden_size = 16\nnum_layers = 1\nnum_heads = 1\nvocab_size = 60\n")
    train_tokenizer(iter(["def class return " * 9]), 270).save(str(given))
    data = texts if "{json}" in more else tokens
    if "{init}" in more:
        assert train_pythia.main(words_of(tmp_path / "init", tokens, SHAPE)) == 0
    more = more.format(init=tmp_path / "init" / "runs" / "a", toml=toml, json=given)
    assert train_pythia.main(words_of(whole, data, more)) == 0
    folder, words = begun(data, more)
    given.unlink()
    before, run = folders.read_description(folder), ndl.open_run(folder)
    assert run.steps == [] and run.settings == before["settings"]
    with pytest.raises(FileNotFoundError, match="no good checkpoint"):
        run.model()
    assert train_pythia.main(words) == 0
    said = f"no checkpoint in {folder}: starting from the beginning, with the settings of its"
    assert said in " ".join(capsys.readouterr().out.split())
    assert numbers_of(tmp_path, "a") == numbers_of(whole, "a")
    ends = [tensors_of(checkpoint_of(of, "a", 6)) for of in (tmp_path, whole)]
    assert ends[0] == ends[1]
    assert folders.read_description(folder) == {**before, "saved": True}


def test_run_that_never_saved_takes_no_other_settings_or_data(tmp_path, tokens, begun, capsys):
    """It is left as it is; the flags that it has may be repeated."""
    folder, words = begun(tokens, SHAPE, "--seed 7")
    before = contents(folder)
    for more, said in (
        ("--hidden 32", "--hidden is 32, but the run has 16. Leave"),
        ("--lr 0.5 --seed 8", "--lr is 0.5, but the run has 0.003; --seed is 8, but the run has 7"),
        ("--steps 7", "--steps is 7, but the run has 6"),
        ("--fp8", "start anew under another --name"),
    ):
        assert train_pythia.main([*words, *more.split()]) == 1
        error = capsys.readouterr().err
        assert said in error and f"{folder}/config.json: this run cannot go on" in error
        assert contents(folder) == before
    np.save(tokens, np.load(tokens)[::-1])
    assert train_pythia.main(words) == 1
    assert "not the tokens that the run read before" in capsys.readouterr().err
    np.save(tokens, np.load(tokens)[::-1])
    assert train_pythia.main([*words, *SHAPE.split(), "--seed", "7"]) == 0
    (folder / "config.json").write_text('{"saved": false, "settings": {"steps": 2}}')
    shutil.rmtree(folder / "checkpoints")
    assert train_pythia.main(words) == 1
    assert f"{folder}/config.json: not of a run of needle train" in capsys.readouterr().err


NO_CONFIGS = ["", "{", "[" * 99_999, "[]", "3", "null", '"a"', "\udcff", '{"settings": []}']
NO_CONFIGS += ['{"saved": 0, "settings": 2, "data": 3, "optimizer": {}}']


@pytest.mark.parametrize("lines", [True, False])
def test_config_that_is_none_of_a_run_is_named_or_written_anew(
    tmp_path, tokens, begun, run, capsys, lines
):
    """A run with a checkpoint goes on and writes it again; no other may begin there anew."""
    folder, words = begun(tokens)
    assert run("saved") == 0
    saved = folder.with_name("saved")
    whole = folders.read_description(saved)
    if not lines:
        (folder / "metrics.jsonl").unlink()
    for text in NO_CONFIGS:
        with naming(text[:60]):
            for path in saved / "config.json", folder / "config.json":
                path.write_bytes(text.encode(errors="surrogateescape"))
            assert run("saved", "--resume", "auto") == 0
            assert folders.read_description(saved) == whole
            capsys.readouterr()
            for more in ["--name", "a"], ["--config", folder / "config.json", "--name", "new"]:
                assert train_pythia.main(arguments(*words, "--data", tokens, *more)) == 1
                assert f"needle train: {folder}" in capsys.readouterr().err
            for part in "settings", "config":
                with pytest.raises(FileError, match="a/config.json"):
                    getattr(ndl.open_run(folder), part)


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
        (True, "wandb_id", "1"),
        (True, "checkpoints/step_0.safetensors", ""),
        (True, "checkpoints/weights_0.safetensors", ""),
        (False, "metrics.jsonl", LINE),
        (False, "checkpoints/step_1.safetensors", ""),
        (False, "checkpoints/weights_1.safetensors", ""),
        (False, "config.json", '{"saved": true}'),
        (False, "config.json", '{"hidden_size": 8}'),
        (False, "config.json", "[]"),
    ):
        shutil.rmtree(folder)
        (folder / "checkpoints").mkdir(parents=True)
        (folder / "config.json").write_text('{"saved": false}')
        (folder / file).write_text(text)
        with naming(file, text):
            if free:
                assert begin(tmp_path, "tiny") == folder
                assert not list((folder / "checkpoints").iterdir())
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
    """The next one may have another shape, and of no name has the next number."""
    compute = train_pythia.forward_backward
    unnamed = without(flags(tmp_path, tokens, "a"), "--name")

    def short(*args):
        raise MemoryError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(train_pythia, "forward_backward", short)
        assert run("a", "--keep log --layers 3") == 1 and train_pythia.main(unnamed) == 1
        assert run("a", "--resume auto --layers 1") == 1
        assert "or start anew under another --name" in capsys.readouterr().err
        results = [compute, compute, short]  # in the third step
        patch.setattr(train_pythia, "forward_backward", lambda *args: results.pop(0)(*args))
        assert run("c", "--save-every 5") == 1
        patch.setattr(train_pythia, "run_data", None)
        assert run("c") == 1  # before the text is read
        assert "there is a run of this name already" in capsys.readouterr().err
    folder = tmp_path / "runs" / "a"
    (folder / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')  # of its text
    assert run("a", "--layers 1") == 0 and train_pythia.main(unnamed) == 0
    assert not (folder / "tokenizer_config.json").exists()
    assert ndl.open_run(folder).config.num_layers == 1
    assert ndl.open_run(folder).steps == [4, 6]
    names = sorted(path.name for path in (tmp_path / "runs").iterdir())
    assert names == ["a", "c", "tiny", "tiny-2"]


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


def test_folders_are_in_the_order_in_which_their_runs_saved(tmp_path):
    """A plot is written after the last save. Without checkpoints the time of the folder counts."""
    for name, saved, written in ("a", 3, 4), ("b", 1, 9), ("c", None, 2), ("d", 5, 5):
        (tmp_path / name).mkdir()
        if saved is not None:
            (tmp_path / name / "checkpoints").mkdir()
            os.utime(tmp_path / name / "checkpoints", (saved, saved))
        os.utime(tmp_path / name, (written, written))
    assert [folder.name for folder in folders.newest_first(tmp_path)] == ["d", "a", "c", "b"]
    assert folders.newest_first(tmp_path / "none") == []


def test_words_that_resume_a_run_are_read_as_they_are_meant(monkeypatch, tmp_path):
    """Includes a name that looks like a flag, and a folder that no --name can mean."""
    auto = ["--resume", "auto", "--name"]
    assert folders.again(Path("runs/a")) == [*auto, "a"]
    for folder in "elsewhere/a", "runs/-y", "runs/--name", "-out/a b", "-out/-y", "a/-b/c":
        args = parse(folders.again(Path(folder)))
        assert Path(args.out) / args.name == Path(folder) and args.resume == "auto", folder
    for folder in "runs/.old", "-out/.old":
        args = parse(folders.again(Path(folder)))
        assert (args.resume, args.name) == (folder, None)
    monkeypatch.chdir(tmp_path)
    assert folders.again(Path(".")) == [*auto, tmp_path.name, "--out", str(tmp_path.parent)]


# ---- export and import --------------------------------------------------------------------------


def test_export_and_import_overwrite_nothing_without_being_asked(tmp_path, run, capsys):
    assert run("a") == 0
    runs, out, file = tmp_path / "runs", tmp_path / "out", tmp_path / "kept" / "m.safetensors"
    (tmp_path / "link").symlink_to(runs / "a" / "checkpoints")
    assert hf(["export", str(runs / "a"), str(out)]) == 0
    (out / "notes.txt").write_text("mine")
    assert hf(["import", str(out), str(file)]) == 0
    of_run, own = "the folder of a run", f"is in {out}, from where it comes"
    for direction, target, reason, asked in (
        *(("export", runs / "a" / part, of_run, 1) for part in ("", "checkpoints")),
        ("export", out, "--overwrite", 0),
        ("import", runs / "a" / "checkpoints" / "step_99.safetensors", of_run, 1),
        ("import", tmp_path / "link" / "step_99.safetensors", of_run, 1),
        ("import", checkpoint_of(tmp_path, "a", 6), of_run, 1),
        ("import", runs / "a" / "config.json", of_run, 1),
        ("import", out / "model.safetensors", own, 1),
        ("import", out / "new" / "m.safetensors", own, 1),
        ("import", file, "--overwrite", 0),
    ):
        source, before = {"export": runs / "a", "import": out}[direction], contents(tmp_path)
        with naming(direction, target):
            for more in [], ["--overwrite"]:
                code = hf([direction, str(source), str(target), *more])
                said = capsys.readouterr().err
                assert code == (asked if more else 1) and (code == 0 or reason in said)
                assert code == 0 or contents(tmp_path) == before
    assert (out / "notes.txt").read_text() == "mine"
