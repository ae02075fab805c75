"""Checkpoints that are kept for good, by --keep."""

import numpy as np
import pytest
import train_pythia
from harness import naming
from small_runs import checkpoint_of

import needle as ndl
from needle.checkpoint import weights_path
from needle.training.keep import keeps
from needle.training.run import is_kept, keeps_weights
from needle.training.settings import complete, parse


def test_steps_follow_the_pattern_before_the_dots():
    for text, wanted in (
        ("1,2,4,...,512,1000,...", [*(2**i for i in range(10)), *range(1000, 5001, 1000)]),
        ("log", [0, *(2**i for i in range(13))]),
        ("0,1,2,4,...,8", [0, 1, 2, 4, 8]),
        ("5", [5]),
        ("3,9,27,...", [3, 9, 27, 81, 243, 729, 2187]),
        ("10,20,...,45", [10, 20, 30, 40, 45]),
        ("0,500,...", range(0, 5001, 500)),
        ("7,10,13,...,22,2000,...", [7, 10, 13, 16, 19, 22, 2000, 4000]),
        ("1,5,6", [1, 5, 6]),
        ("5,1000,2000,3000,...", [5, *range(1000, 5001, 1000)]),
    ):
        with naming(text):
            assert [step for step in range(5001) if keeps(text)(step)] == list(wanted)
            assert keeps(text)(10**15) == text.endswith(("000,...", "0,500,..."))
    wrong = ["", "a", "1,2,", "2,1", "2,2", "...", "0,...", "1,2,4,9,...", "4,6,9,...", "-1"]
    for text in *wrong, "1,...,...", "1.5":
        with naming(repr(text)), pytest.raises(ValueError):
            keeps(text)


def test_recipe_keeps_whole_checkpoints_and_keep_the_weights_of_others():
    for more, third in ("", (False, True)), ("--keep-optimizer", (True, False)):
        settings = complete(parse(f"--recipe pythia --keep 2,3 {more}".split()), False)
        found = [(is_kept(settings, step), keeps_weights(settings, step)) for step in (2, 3, 5)]
        assert found == [(True, False), third, (False, False)]


def test_kept_weights_are_those_of_their_steps(tmp_path, run):
    for name, more in ("every", "--keep 0,1,... --keep-optimizer"), ("kept", "--keep 0,1,2,4,..."):
        assert run(name, more) == 0
    every, kept = (ndl.open_run(tmp_path / "runs" / name) for name in ("every", "kept"))
    assert kept.steps == [0, 1, 2, 4, 6] and every.steps == list(range(7))
    ids, folder = np.arange(12).reshape(1, 12), kept.folder / "checkpoints"
    for step in kept.steps:
        wanted = every.model(step)(ids)[0].numpy()
        assert (kept.model(step)(ids)[0].numpy() == wanted).all(), step
    path = weights_path(folder, 2)
    assert path.stat().st_size < 0.6 * checkpoint_of(tmp_path, "every", 2).stat().st_size
    model, optimizer, _, loss = ndl.load_checkpoint(path)
    assert optimizer is None and loss == kept.metrics["loss"][1]
    assert (ndl.Pythia.from_pretrained(path)(ids)[0].numpy() == model(ids)[0].numpy()).all()
    # A run goes on from a whole checkpoint, never from weights.
    for path in folder.glob("step_*"):
        path.unlink()
    for place in kept.folder, weights_path(folder, 4):
        assert train_pythia.main(["--resume", str(place)]) == 1
