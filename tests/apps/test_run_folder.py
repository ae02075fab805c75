"""A trainer writes only into the folder that it holds, and resumes only checkpoints of its run."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import train_pythia
from harness import naming
from small_runs import (
    arguments,
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
from needle.hf.__main__ import main as hf
from needle.training import folder as folders
from needle.training import session as sessions
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
            assert "--resume with its new path goes on" in said
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
    ],
)
@pytest.mark.filterwarnings("ignore:Pythia. sparse_window")
def test_run_that_never_saved_begins_again_by_its_config(tmp_path, tokens, begun, capsys, more):
    """Its numbers are those of a run that was never stopped."""
    whole, toml = tmp_path / "whole", tmp_path / "c.toml"
    toml.write_text("hidden_size = 16\nnum_layers = 1\nnum_heads = 1\nvocab_size = 60\n")
    if "{init}" in more:
        assert train_pythia.main(words_of(tmp_path / "init", tokens, SHAPE)) == 0
    more = more.format(init=tmp_path / "init" / "runs" / "a", toml=toml)
    assert train_pythia.main(words_of(whole, tokens, more)) == 0
    for name in [], ["--name", "a"]:
        folder, words = begun(tokens, more)
        before = folders.read_description(folder)
        assert train_pythia.main([*words, *name]) == 0
        said = f"no checkpoint in {folder}: starting from the beginning, with the settings of its"
        assert said in " ".join(capsys.readouterr().out.split())
        assert numbers_of(tmp_path, "a") == numbers_of(whole, "a")
        ends = [tensors_of(checkpoint_of(of, "a", 6)) for of in (tmp_path, whole)]
        assert ends[0] == ends[1]
        assert folders.read_description(folder) == {**before, "saved": True}
        shutil.rmtree(folder)


def test_run_that_never_saved_begins_again_with_its_tokenizer(tmp_path, texts, begun):
    """Also when the file of that was another's, and is gone."""
    given = tmp_path / "tokenizer.json"
    train_tokenizer(iter(["def class return " * 9]), 270).save(str(given))
    whole = tmp_path / "whole"
    assert train_pythia.main(words_of(whole, texts, "--tokenizer", given)) == 0
    folder, words = begun(texts, "--tokenizer", given)
    given.unlink()
    assert train_pythia.main(words) == 0
    assert numbers_of(tmp_path, "a") == numbers_of(whole, "a")
    assert ndl.open_run(folder).tokenizer.get_vocab_size() == 270


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


NO_CONFIGS = ["", "{", "[" * 99_999, "[]", "3", "null", '"a"', '{"settings": []}']
NO_CONFIGS += ['{"saved": 0, "settings": 2, "data": 3, "optimizer": {}}']


@pytest.mark.parametrize("lines", [True, False])
def test_config_that_is_none_of_a_run_is_named_or_not_needed(
    tmp_path, tokens, begun, run, capsys, lines
):
    """A run with a checkpoint goes on and writes it again; no other may begin there anew if it has
    lines."""
    folder, words = begun(tokens)
    assert run("saved") == 0
    whole = folders.read_description(folder.with_name("saved"))
    if not lines:
        (folder / "metrics.jsonl").unlink()
    for text in NO_CONFIGS:
        with naming(text[:60]):
            (folder.with_name("saved") / "config.json").write_text(text)
            assert run("saved", "--resume", "auto") == 0
            assert folders.read_description(folder.with_name("saved")) == whole
            (folder / "config.json").write_text(text)
            capsys.readouterr()
            for more in ["--name", "a"], ["--config", folder / "config.json", "--name", "new"]:
                assert train_pythia.main(arguments(*words, "--data", tokens, *more)) == 1
                assert f"needle train: {folder}" in capsys.readouterr().err
            for part in "settings", "config":
                with pytest.raises(FileError, match="a/config.json"):
                    getattr(ndl.open_run(folder), part)


def test_open_run_of_a_run_that_never_saved(tokens, begun):
    folder, _ = begun(tokens, SHAPE)
    run = ndl.open_run(folder)
    assert run.config.hidden_size == 16 and run.config.attention_only
    assert run.settings["hidden"] == 16 and run.steps == []
    with pytest.raises(FileNotFoundError, match="no good checkpoint"):
        run.model()


# ---- which name ---------------------------------------------------------------------------------


def begin(out, name):
    """The folder that a start takes, which has ended."""
    folder, lock = folders.begin(out, name, "tiny")
    lock.release()
    return folder


def describe(folder, saved):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"saved": saved}))


def test_runs_without_a_name_are_numbered(tmp_path):
    for name in ("tiny", "tiny-2", "tiny-3"):
        assert not (tmp_path / name).exists() and begin(tmp_path, None) == tmp_path / name
    assert begin(tmp_path, "tiny") == tmp_path / "tiny"  # nothing was written there
    line = '{"step": 1, "loss": 2.0, "tokens": 9}\n'
    (tmp_path / "tiny" / "metrics.jsonl").write_text(line)
    with pytest.raises(DataError, match="tiny: there is a run of this name already; .*--name tiny"):
        begin(tmp_path, "tiny")
    with pytest.raises(OSError, match="Not a directory.*metrics.jsonl"):
        begin(tmp_path / "tiny" / "metrics.jsonl", None)


def test_folder_is_free_until_a_step_has_finished(tmp_path):
    """A start that wrote its config.json, and came no further, leaves its name."""
    folder = tmp_path / "tiny"
    for file, text in (
        ("tokenizer.json", "{}"),
        ("metrics.jsonl", '{"step": 1'),  # cut off
        ("wandb_id", "1"),
        ("checkpoints/step_0.safetensors", ""),
        ("checkpoints/weights_0.safetensors", ""),
    ):
        describe(folder, False)
        (folder / "checkpoints").mkdir(exist_ok=True)
        (folder / file).write_text(text)
        with naming(file):
            assert begin(tmp_path, "tiny") == folder
            assert not list((folder / "checkpoints").iterdir())
    for file, text in (
        ("metrics.jsonl", '{"step": 1, "loss": 2.0, "tokens": 9}\n'),
        ("checkpoints/step_1.safetensors", ""),
        ("checkpoints/weights_1.safetensors", ""),
        ("config.json", '{"saved": true}'),
        ("config.json", '{"hidden_size": 8}'),
        ("config.json", "[]"),
    ):
        shutil.rmtree(folder)
        describe(folder, False)
        (folder / "checkpoints").mkdir()
        (folder / file).write_text(text)
        with naming(file):
            with pytest.raises(DataError, match="there is a run of this name already"):
                begin(tmp_path, "tiny")
            other = begin(tmp_path, None)
            assert other != folder and (folder / file).read_text() == text
            shutil.rmtree(other)


def test_two_starts_of_one_name_take_two_folders_or_one_is_refused(tmp_path):
    folder, lock = folders.begin(tmp_path, None, "tiny")
    other, second = folders.begin(tmp_path, None, "tiny")
    assert (folder.name, other.name, lock.held, second.held) == ("tiny", "tiny-2", True, True)
    with pytest.raises(FileError, match="is working in this folder"):
        folders.begin(tmp_path, "tiny", "tiny")


def test_damaged_description_of_a_run_that_never_saved_is_named(tmp_path):
    folder = tmp_path / "runs" / "a"
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0, "tokens": 9}\n')
    for text, said in (("[1]", "config.json: must hold a JSON object"), ("{", "config.json: ")):
        (folder / "config.json").write_text(text)
        with pytest.raises(FileError, match=said):
            folders.resume("auto", tmp_path / "runs", "a")
    (folder / "config.json").unlink()
    with pytest.raises(DataError, match="no checkpoint is left there"):
        folders.resume("auto", tmp_path / "runs", "a")


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
        folder = tmp_path / "runs" / "a"
        assert folders.has_saved(folder) is False
        assert run("a", "--resume auto --layers 1") == 1
        assert "or start anew under another --name" in capsys.readouterr().err
    with monkeypatch.context() as patch:  # in the third step
        results = [compute, compute, short]
        patch.setattr(train_pythia, "forward_backward", lambda *args: results.pop(0)(*args))
        assert run("c", "--save-every 5") == 1
    assert run("c") == 1 and "there is a run of this name already" in capsys.readouterr().err
    (folder / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')  # of its text
    assert run("a", "--layers 1") == 0 and train_pythia.main(unnamed) == 0
    assert not (folder / "tokenizer_config.json").exists()
    assert ndl.open_run(folder).config.num_layers == 1
    assert ndl.open_run(folder).steps == [4, 6]
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == [
        "a",
        "c",
        "tiny",
        "tiny-2",
    ]


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
        assert code == 0 or "there is a run of this name already" in said
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
        begins = f"no run {name} under {tmp_path}/runs/{near}: starting from the beginning"
        assert begins in " ".join(capsys.readouterr().out.split())
    (tmp_path / "runs" / "bas").mkdir()
    assert run("bas", "--resume", "auto") == 0
    assert f"no checkpoint in {tmp_path}/runs/bas: starting" in " ".join(
        capsys.readouterr().out.split()
    )


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
