"""benchmarks/attention.py: what it counts, which runs count, what is refused.
It times a GPU, so no run of it is among the tests."""

import argparse

import attention
import numpy as np
import pytest

from needle.block_mask import BlockMask

USUAL = argparse.Namespace(heads=8, head_dim=64, dtype="bfloat16")


def side(*rounds: tuple[float, float], pairs: float = 1.0) -> attention.Side:
    """One whose rounds took so many milliseconds forward and backward."""
    return attention.Side("a side", (), None, pairs, times=tuple(map(list, zip(*rounds))))


@pytest.mark.parametrize("block", [64, 128])
@pytest.mark.parametrize("t", [1, 300, 512])
def test_kept_pairs_are_those_that_a_query_sees(t, block):
    mask = attention.random_mask(t, block, 0.5)
    assert attention.kept_pairs(mask) == pytest.approx(np.tril(mask.to_dense()).sum())
    assert attention.kept_pairs(BlockMask.dense(t, block)) == attention.causal_pairs(t)


def test_speeds_are_medians_of_the_rounds_ratios():
    ours, baseline = side((1, 2), (2, 2), (4, 8)), side((2, 1), (6, 6), (4, 16))
    assert attention.speeds(ours, baseline) == [2, 2]


def test_when_a_run_counts():
    pairs = attention.causal_pairs(8192) * 8 * 8

    def at(share: tuple[float, float], **other) -> list[str]:
        rates = (s * x for s, x in zip(share, attention.CUDNN[8192]))
        took = tuple(n * 64 * pairs / rate / 1e9 for n, rate in zip((4, 10), rates))
        args = argparse.Namespace(**{**vars(USUAL), **other})
        return attention.check(side(took, took, pairs=pairs), 8192, 8, args, "NVIDIA H200")

    assert at((1, 0.951)) == []
    (line,) = at((1.2, 0.949))
    assert line.startswith("THIS RUN DOES NOT COUNT: cuDNN's backward reached 387 of its 408")
    assert len(at((0.9, 0.9))) == 2
    (line,) = at((1, 1), head_dim=128)
    assert "D 128" in line and "says nothing" in line
    (line,) = attention.check(None, 8192, 8, USUAL, "NVIDIA H200")
    assert line.startswith("cuDNN was left out: this run says nothing")


@pytest.mark.parametrize(
    "program, words, message",
    [
        (attention, "--rounds 1", "--rounds: quartiles need 2 samples at least, not 1"),
        (attention, "--densities 0.5 --dilated 4:1", "give one of them"),
    ],
)
def test_arguments_that_are_refused(program, words, message, capsys):
    with pytest.raises(SystemExit) as refused:
        program.read_arguments(words.split())
    assert refused.value.code == 2 and message in capsys.readouterr().err


def test_the_usual_arguments():
    assert attention.read_arguments(["--shapes", "2048x32"]).shapes == [(2048, 32)]
