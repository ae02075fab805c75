"""The name that a run gets, and the run that --resume means. A training that is killed and goes on
is the one that nothing stopped, whatever its flags."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import train_pythia
from harness import naming
from small_runs import (
    TOKENS,
    arguments,
    assert_same_run,
    checkpoint_of,
    contents,
    flags,
    lines_of,
    numbers_of,
    proofs_of,
    run_until,
    tensors_of,
    without,
)

import needle as ndl
from needle.checkpoint import Checkpoint, find_checkpoint
from needle.data import DataError, train_tokenizer
from needle.files import Lock
from needle.models import pythia
from needle.training import folder as folders
from needle.training import open_run
from needle.training import run as runs
from needle.training import session as sessions
from needle.training.export import main as hf
from needle.training.replay.proofs import Log

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
        (sessions, "RunLog", named),
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


def test_export_and_import_overwrite_nothing_without_being_asked(tmp_path, run, refused):
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
            assert refused(hf, words, reason).startswith(f"needle {direction}: ")
            assert contents(tmp_path) == before
            assert hf([*words, "--overwrite"]) == (reason != "--overwrite")
    assert (out / "notes.txt").read_text() == "mine"


# ---- a run that was killed -----------------------------------------------------------------------


SHAPE = "--layers 1 --hidden 48 --heads 3 --vocab-size 61 --no-mlp"
# 5 micro-batches a step and 12 an epoch: epochs end inside steps 3 and 5.
RUNS = {
    "one micro-batch": "--batch-size 9",  # 2 an epoch
    "accumulated": "--grad-accum 5",
    "bfloat16": "--dtype bfloat16 --grad-accum 5",
    "seeds": "--prove 1 --lr 0.02 --seed 3 --init-seed 9 --data-seed 5 --clip 0.3 --eval-every 2",
    "shape": f"{SHAPE} --global-batch-size 6 --schedule linear --weight-decay 0.2 --init-seed 4",
    "toml": "--config {toml} --heads 2 --sparse local --window 8",
    "weights": "--init {init} --lr 1e-4",
    "text": "--data {texts} --tokenizer {tokenizer} --end-of-text <end>",
    "own tokenizer": "--data {texts} --vocab-size 300 --keep 0,1,2,4,...",
    "recipe": "--recipe pythia --global-batch-size 8 --warmup 1",
    "kept whole": "--keep 0,1,2,4,... --keep-optimizer",
    "FP8 head": "--fp8 --grad-accum 2",
    "FP8": "--fp8 --grad-accum 2",
}


@pytest.fixture
def given(tmp_path, tokens, texts):
    """What flags name: a run, and files that are gone when the run goes on."""
    folder = tmp_path / "given"
    folder.mkdir()
    paths = {name: folder / f"c.{name}" for name in ("toml", "tokenizer")}
    shape = "hidden_size = 16\nnum_layers = 3\nnum_heads = 1\nvocab_size = 60\n"
    paths["toml"].write_text(shape)
    made = train_tokenizer(iter(["def class return " * 9]), 270)
    text = made.to_str().replace("<|endoftext|>", "<end>")
    paths["tokenizer"].write_text(text)
    return {**paths, "init": tmp_path / "runs" / "first", "texts": texts}


ON_GPU = ("one micro-batch", "accumulated", "bfloat16", "recipe")


@pytest.mark.parametrize(
    "device, name",
    [
        *(("cpu", name) for name in RUNS),
        *(pytest.param("cuda", name, marks=pytest.mark.cuda) for name in ON_GPU),
    ],
)
@pytest.mark.filterwarnings("ignore:Pythia. sparse_window")
def test_resumed_run_equals_an_uninterrupted_one(
    tmp_path, tokens, given, monkeypatch, capsys, device, name
):
    """Killed before its first checkpoint, and after it; then its newest checkpoint is damaged."""
    if name == "FP8":
        monkeypatch.setattr(pythia, "FP8_LAYERS_FROM", 32)
    more, whole = RUNS[name].format(**given), tmp_path / "runs" / "whole"

    if name == "weights":
        assert train_pythia.main(flags(tmp_path, tokens, "first", SHAPE, steps=1)) == 0

    def words(run):
        argv = flags(tmp_path, tokens, run, more, device=device)
        return without(argv, "--model") if {"--config", "--init"} & {*argv} else argv

    assert train_pythia.main(words("whole")) == 0
    run_until(monkeypatch, 1, words("parts"))
    folder, saved = tmp_path / "runs" / "parts", name in ("kept whole", "recipe")
    described = folders.read_description(folder)
    newest = arguments(f"--resume auto --device {device} --out", tmp_path / "runs")
    again = [*newest, "--name", "parts"]
    shutil.move(tmp_path / "given", tmp_path / "gone")
    capsys.readouterr()
    np.random.seed(99)  # whatever else the process did
    run_until(monkeypatch, 4, again)  # the last checkpoint is of step 2
    said = " ".join(capsys.readouterr().out.split())
    assert ("starting from the beginning, with the settings of its config.json" in said) != saved
    assert [line["step"] for line in lines_of(tmp_path, "parts")] == [1, 2, 3]
    run_until(monkeypatch, 5, [*again, "--recompute"])  # the flag changes no bit
    bad = checkpoint_of(tmp_path, "parts", 4)
    bad.write_bytes(bad.read_bytes()[:-1])
    (whole / "notes.txt").touch()  # the newest run is that which saved last
    assert train_pythia.main(newest) == 0
    out = capsys.readouterr().out
    assert f"skipped: {bad}" in out and "step_2.safetensors after step 2" in out
    assert "bits may differ" not in out
    assert numbers_of(tmp_path, "parts") == numbers_of(tmp_path, "whole")
    assert proofs_of(tmp_path, "parts") == proofs_of(tmp_path, "whole") != {}
    assert Log(folder / "metrics.jsonl").broken == []
    kept = sorted(path.name for path in (whole / "checkpoints").iterdir())
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == kept
    for file in kept:  # the state of NumPy's generator too
        paths = [run / "checkpoints" / file for run in (folder, whole)]
        assert tensors_of(paths[0]) == tensors_of(paths[1]), file
        states = [Checkpoint(path).state for path in paths]
        assert states[0] == states[1], file
    assert folders.read_description(folder) == {**described, "saved": True}
    assert name != "accumulated" or lines_of(tmp_path, "whole")[-1]["tokens"] > len(TOKENS)


def test_run_that_went_back_to_a_checkpoint_goes_on_from_there(
    tmp_path, tokens, monkeypatch, capsys
):
    """Its later checkpoints are of the steps that are computed again."""
    argv = flags(tmp_path, tokens, "a", "--keep 2 --keep-optimizer")
    assert train_pythia.main(argv) == 0
    before = numbers_of(tmp_path, "a")
    for what in "auto", tmp_path / "runs" / "a":
        run_until(monkeypatch, 3, [*argv, "--resume", str(checkpoint_of(tmp_path, "a", 2))])
        run = tmp_path / "runs" / "a"
        assert open_run(run).checkpoint().state["step"] == find_checkpoint(run).state["step"] == 2
        capsys.readouterr()
        assert train_pythia.main([*argv, "--resume", str(what)]) == 0
        assert "step_2.safetensors after step 2" in capsys.readouterr().out
        assert numbers_of(tmp_path, "a") == before
