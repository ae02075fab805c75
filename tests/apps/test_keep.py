"""Checkpoints that are kept for good, by --keep."""

import numpy as np
import pytest
import train_pythia
from harness import naming
from small_runs import flags, numbers_of, run_until, tensors_of

import needle as ndl
from needle.checkpoint import weights_path
from needle.training.settings import keeps


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
    ):
        with naming(text):
            assert [step for step in range(5001) if keeps(text)(step)] == list(wanted)
            assert keeps(text)(10**15) == text.endswith(("1000,...", "0,500,...", "2000,..."))
    for text in (
        "",
        "a",
        "1,2,",
        "2,1",
        "...",
        "0,...",
        "1,2,4,9,...",
        "-1",
        "1,...,...",
        "1.5",
        "1,2,4,...,3",
    ):
        with naming(repr(text)), pytest.raises(ValueError):
            keeps(text)


def test_kept_weights_are_those_of_their_steps_and_no_step_changes(tmp_path, tokens, monkeypatch):
    every = flags(tmp_path, tokens, "every", "--keep 0,1,... --keep-optimizer", steps=6)
    plain = flags(tmp_path, tokens, "plain", steps=6)
    kept = flags(tmp_path, tokens, "kept", "--keep 0,1,2,4,...", steps=6)
    for argv in every, plain:
        assert train_pythia.main(argv) == 0
    run_until(monkeypatch, 6, kept)  # killed after the weights of step 4
    assert train_pythia.main(["--resume", str(tmp_path / "runs" / "kept")]) == 0

    folders = {
        name: tmp_path / "runs" / name / "checkpoints" for name in ("every", "plain", "kept")
    }
    names = {name: sorted(path.name for path in of.iterdir()) for name, of in folders.items()}
    weights = [f"weights_{step}.safetensors" for step in (0, 1, 2, 4)]
    assert names["kept"] == sorted([*names["plain"], *weights])
    assert names["every"] == [f"step_{step}.safetensors" for step in range(7)]
    assert numbers_of(tmp_path, "kept") == numbers_of(tmp_path, "plain")
    last = "step_6.safetensors"
    assert len({tensors_of(folder / last) for folder in folders.values()}) == 1

    runs = {name: ndl.open_run(folder.parent) for name, folder in folders.items()}
    assert runs["kept"].steps == [0, 1, 2, 4, 6] and runs["every"].steps == list(range(7))
    ids = np.arange(12).reshape(1, 12)
    for step in runs["kept"].steps:
        with naming("step", step):
            wanted = runs["every"].model(step)(ids)[0].numpy()
            assert (runs["kept"].model(step)(ids)[0].numpy() == wanted).all()
    path = weights_path(folders["kept"], 2)
    assert path.stat().st_size < 0.6 * (folders["every"] / "step_2.safetensors").stat().st_size
    model, optimizer, _, loss = ndl.load_checkpoint(path)
    assert optimizer is None and loss == runs["kept"].metrics["loss"][1]
    assert (ndl.Pythia.from_pretrained(path)(ids)[0].numpy() == model(ids)[0].numpy()).all()
    # A run goes on from a whole checkpoint, never from weights.
    for path in folders["kept"].glob("step_*"):
        path.unlink()
    assert train_pythia.main(["--resume", str(tmp_path / "runs" / "kept")]) == 1
    assert train_pythia.main(["--resume", str(weights_path(folders["kept"], 4))]) == 1


def test_wrong_flags_of_keep(tmp_path, tokens, capsys):
    assert train_pythia.main(flags(tmp_path, tokens, "x")) == 0
    capsys.readouterr()
    for more, text in (
        ("--name y --keep 1,x", "'x' is no whole"),
        ("--name y --keep-optimizer", "needs --keep"),
        ("--resume auto --keep-optimizer", "needs --keep"),
    ):
        with naming(more), pytest.raises(SystemExit, match="2"):
            train_pythia.main(flags(tmp_path, tokens, "x", more))
        assert text in capsys.readouterr().err
