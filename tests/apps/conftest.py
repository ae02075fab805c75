"""Small runs, in a cache of their own."""

import functools

import numpy as np
import pytest
import train_pythia
from harness import naming
from small_runs import EVERY, SMALL, TOKENS, flags

import needle as ndl
from needle.data import megatron
from needle.models import pythia
from needle.training import run as run_parts
from needle.training.folder import again
from needle.training.replay import proofs, replays

commit = functools.cache(proofs.commit)  # git takes as long as some steps


@pytest.fixture(autouse=True)
def small(tmp_path, monkeypatch):
    monkeypatch.setenv("NEEDLE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setitem(pythia.PRESETS, "tiny", SMALL)
    monkeypatch.setattr(run_parts, "SAMPLE_TOKENS", 8)
    monkeypatch.setattr(proofs, "commit", commit)
    monkeypatch.setattr(run_parts, "plot", lambda folder: "no plot")  # one takes as long as a run


@pytest.fixture
def tokens(tmp_path):
    path = tmp_path / "tokens.npy"
    np.save(path, TOKENS)
    return path


@pytest.fixture
def here(monkeypatch):
    """Replays train in this process."""

    def train(folder, launch, flags, quiet=True):
        return train_pythia.main([*flags, *again(folder)])

    def become_training(folder, launch, flags):
        raise SystemExit(train(folder, launch, flags))

    monkeypatch.setattr(replays, "train", train)
    monkeypatch.setattr(replays, "become_training", become_training)


@pytest.fixture
def parent(tmp_path, tokens, here):
    """A run of 6 steps with the checkpoints 0, 2, 4 and 6; each step is proven."""
    assert train_pythia.main(flags(tmp_path, tokens, "a", EVERY)) == 0
    return ndl.open_run(tmp_path / "runs" / "a")


@pytest.fixture
def documents(tmp_path):
    """A function that writes documents of these sizes as Megatron's files, and returns the path and
    the ids of each."""

    def write(name, sizes, seed=5):
        random = np.random.default_rng(seed)
        texts = [random.integers(0, 60, size).astype("<u2") for size in sizes]
        (tmp_path / f"{name}.bin").write_bytes(np.concatenate(texts).tobytes())
        with open(tmp_path / f"{name}.idx", "wb") as file:
            megatron.write_index(file, np.dtype("<u2"), sizes)
        return tmp_path / f"{name}.idx", texts

    return write


@pytest.fixture
def run(tmp_path, tokens):
    """run(name, *flags) -> exit code of a small run in this process."""
    return lambda name, *more: train_pythia.main(flags(tmp_path, tokens, name, *more))


@pytest.fixture
def refused(capsys):
    """refused(main, words, says, code=1) -> the error of a command that ends so and says this."""

    def ends(main, words, says, code=1):
        capsys.readouterr()
        with naming(*words):
            try:
                found = main([*map(str, words)])
            except SystemExit as end:
                found = end.code
            error = capsys.readouterr().err
            assert found == code and says in error, error
        return error

    return ends
