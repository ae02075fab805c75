"""benchmarks/train_step.py: a run of each mode, and what a run must be to count."""

import argparse
import re
import sys

import bench
import pytest
import train_step
from harness import ROOT, run

PROGRAM = str(ROOT / "benchmarks" / "train_step.py")
SMALL = "--device cpu --model tiny --batch-size 2 --seq-len 16 --load 0 --blocks 2 --steps 2"
NUMBER = r"[\d.,]+"
SPREAD = rf"{NUMBER} \({NUMBER} to {NUMBER}\)"


def said(*command, **environment):
    done = run(sys.executable, *command, **environment)
    assert done.returncode == 0, done.stderr
    return done


def test_needle_alone():
    lines = said(PROGRAM, *SMALL.split(), "--alone").stdout.splitlines()
    assert re.fullmatch(rf"tiny, T 16, float32; {NUMBER} MFLOP a token", lines[1])
    assert lines[2] == "B 2: 2 blocks of 2 steps a side, in turns"
    row = rf"  needle +{SPREAD} ms, {SPREAD} tokens/s, \S+ TFLOP/s, loss {NUMBER}"
    assert re.fullmatch(row, lines[3]), lines[3]
    reasons = [line.partition("COUNT: ")[2] for line in lines[4:]]
    assert reasons == ["2 blocks a side, and not 5", "0 s of load, and not 10"]


@pytest.mark.parity
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_beside_torch(dtype):
    out = said(PROGRAM, *SMALL.split(), "--baseline", "eager", "--dtype", dtype).stdout
    assert re.search(rf"(?m)^  torch \S+, eager +{SPREAD} ms, {SPREAD} tokens/s", out), out
    assert re.search(rf"(?m)^  needle's speed over the baseline's: {SPREAD}$", out), out


def test_sides_take_turns_and_are_told_by_their_median():
    told: list[str] = []
    sides = {name: lambda name=name: told.append(name) or len(told) for name in "ab"}
    assert bench.in_turns(sides, 2) == {"a": [1, 3], "b": [2, 4]}
    assert bench.spread([3, 1, 8], ".1f") == "3.0 (1.0 to 8.0)"


def test_discarded_rounds():
    args = argparse.Namespace(
        blocks=5, load=10.0, model="pythia-70m", seq_len=2048, dtype="bfloat16"
    )

    def reasons(device, batch_size, rate, **changes):
        changed = argparse.Namespace(**{**vars(args), **changes})
        return train_step.reasons_not_to_count(changed, device, batch_size, rate)

    for (model, batch_size), known in train_step.BASELINE.items():
        assert reasons("NVIDIA H200", batch_size, 0.951e6 * known, model=model) == []
        (reason,) = reasons("NVIDIA H200", batch_size, 0.949e6 * known, model=model)
        assert f"of its {known * 1e6:,.0f} tokens/s at B {batch_size}" in reason
    assert reasons("NVIDIA H200", 16, None) == ["the baseline was not timed"]
    assert reasons("NVIDIA H200", 8, 1.0) == reasons("AMD EPYC", 16, 1.0) == []
    assert reasons("NVIDIA H200", 16, 1.0, model="pythia-14m") == []
    assert len(reasons("NVIDIA H200", 16, 1.0, blocks=4, load=9.0)) == 3
