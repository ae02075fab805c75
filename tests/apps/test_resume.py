"""A training that is killed and goes on is the one that nothing stopped, whatever its flags."""

import shutil

import numpy as np
import pytest
import train_pythia
from small_runs import (
    TOKENS,
    arguments,
    checkpoint_of,
    flags,
    lines_of,
    numbers_of,
    proofs_of,
    run_until,
    tensors_of,
    without,
)

from needle.checkpoint import Checkpoint, find_checkpoint
from needle.data import train_tokenizer
from needle.models import pythia
from needle.training import folder as folders
from needle.training import open_run
from needle.training.replay.proofs import Log

SHAPE = "--layers 1 --hidden 48 --heads 3 --vocab-size 61 --no-mlp"
# 5 micro-batches a step and 12 an epoch: epochs end inside steps 3 and 5.
RUNS = {
    "one micro-batch": "--batch-size 9",  # 2 an epoch
    "accumulated": "--grad-accum 5",
    "bfloat16": "--dtype bfloat16 --grad-accum 5",
    "seeds": "--prove 1 --lr 0.02 --seed 3 --init-seed 9 --data-seed 5 --clip 0.3 --eval-every 2",
    "schedule": "--schedule linear --weight-decay 0.2 --init-seed 4",
    "shape": f"{SHAPE} --global-batch-size 6",
    "sparse": "--sparse local --window 8",
    "toml": "--config {toml} --heads 2",
    "weights": "--init {init} --lr 1e-4",
    "text": "--data {texts} --tokenizer {tokenizer} --end-of-text <end>",
    "own tokenizer": "--data {texts} --vocab-size 300",
    "recipe": "--recipe pythia --global-batch-size 8 --warmup 1",
    "kept": "--keep 0,1,2,4,...",
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
    assert train_pythia.main(flags(tmp_path, tokens, "first", SHAPE, steps=1)) == 0
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
