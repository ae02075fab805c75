"""benchmarks/train_step.py: a run of each mode, what a run must be to count, and whether a profile
sees all of a step."""

import argparse
import re
import sys
from types import SimpleNamespace

import profile_step
import pytest
import train_step
from harness import ROOT, run

from needle import _C

PROGRAM = str(ROOT / "benchmarks" / "train_step.py")
SMALL = "--device cpu --model tiny --batch-size 2 --seq-len 16 --load 0 --blocks 2 --steps 2"
NUMBER = r"[\d.,]+"
SPREAD = rf"{NUMBER} \({NUMBER} to {NUMBER}\)"
# Counts the trace's lines of one step and what a Recorder saw of it, with the FLOP of its products.
WATCHED = """
import os, sys
sys.path.insert(0, sys.argv[1])
import train_step, profile_step
from train_step import *
device, shape = ndl.cpu(), (2, 16)
config = models.preset("tiny", max_seq_len=16, dtype=sys.argv[2])
tokens = np.random.default_rng(0).integers(0, config.vocab_size, 32 * 32 + 1, np.uint16)
side = NeedleSide(config, device, tokens, shape)
block(side, 1)
recorder = profile_step.Recorder(device)
with recorder.recording():
    print("watched", file=sys.stderr, flush=True)
    block(side, 1)
    print("over", file=sys.stderr, flush=True)
rows = recorder.operations()
products = sum(row.calls * row.flop for row in rows if not row.name.startswith("attention"))
wanted = 6 * 32 * sum(linear.weight.size for linear in side.model._modules(nn.Linear))
print(sum(row.calls for row in rows), products / wanted, *(row.name.split()[0] for row in rows))
"""


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


@pytest.mark.parametrize(
    "flags, says",
    [
        ("--load -1", "--load must be 0 seconds or more, not -1"),
        ("--load nan", "--load must be 0 seconds or more, not nan"),
        ("--load inf", "--load must be 0 seconds or more, not inf"),
        ("--seq-len 0", "--seq-len must be 1 or more"),
        ("--batch-size 4 0", "--batch-size and --seq-len must be 1 or more"),
        ("--steps 0", "--blocks, --steps, --batch-size"),
    ],
)
def test_unmeasurable_settings_are_refused(flags, says, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["train_step.py", "--device", "cpu", *flags.split()])
    with pytest.raises(SystemExit):
        train_step.main()
    assert says in capsys.readouterr().err


@pytest.mark.parity
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_beside_torch(dtype):
    out = said(PROGRAM, *SMALL.split(), "--baseline", "eager", "--dtype", dtype).stdout
    assert re.search(rf"(?m)^  torch \S+, eager +{SPREAD} ms, {SPREAD} tokens/s", out), out
    assert re.search(rf"(?m)^  needle's speed over the baseline's: {SPREAD}$", out), out


def test_the_rows_of_a_profile_add_up():
    out = said(PROGRAM, *SMALL.split(), "--profile", "--dtype", "bfloat16").stdout
    found = re.findall(r"(?m)^(\w.*?) +([\d.]+) +([\d.]+) +([\d.]+)% +([\d.]+) +([\d.]+) +-$", out)
    names, calls, ms, shares, *_ = zip(*found)
    assert names[-2:] == ("between operations", "the step")
    assert {"linear_fwd", "adamw", "fill", "attention_bwd"} <= {name.split()[0] for name in names}
    for numbers in (calls, ms, shares):
        *parts, whole = map(float, numbers)
        assert abs(sum(parts) - whole) < 0.06 * len(parts) * (numbers is shares) + 0.02
    assert re.search(rf"without events the step takes {NUMBER} ms: the rows are [+-]", out)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_profile_sees_every_op_of_a_step(dtype):
    done = said("-c", WATCHED, str(ROOT / "benchmarks"), dtype, NEEDLE_TRACE="1")
    traced = done.stderr.partition("watched\n")[2].partition("over\n")[0].splitlines()
    traced = [line.split()[1] for line in traced if line.startswith("needle: ")]
    calls, products, *names = done.stdout.split()
    assert (int(calls), float(products)) == (len(traced), 1.0)
    assert set(names) == set(traced)


def test_a_recorder_leaves_no_trace():
    before = [_C.add, _C.NDArray.fill, _C.NDArray.__matmul__]
    recorder = profile_step.Recorder(_C.cpu())
    with pytest.raises(ZeroDivisionError), recorder.recording():
        assert _C.add is not before[0]
        _C.add(_C.array([1.0]), _C.array([2.0]))
        1 / 0
    assert [_C.add, _C.NDArray.fill, _C.NDArray.__matmul__] == before
    (row,) = recorder.operations()
    assert (row.name, row.calls, row.bytes, row.flop) == ("add  1", 1, 12, 0)


def test_counts_name_ops_of_the_table():
    table = _C.table()
    named = {**profile_step.WRITTEN, **{op: (name,) for op, name in profile_step.GATHERED.items()}}
    for op, operands in named.items():
        assert {*operands} <= {name for how, name, *_ in table[op][1] if how != "OUT"}, op
    for op, (_, letters) in profile_step.FLOP.items():
        assert {*letters} <= set("".join(axes for _, _, axes, _ in table[op][1])), op


def test_bytes_flop_and_floor_of_the_counted_table():
    """The figures of docs/measurements.md: an H200, 16 x 2048 tokens of Pythia-70m."""
    rows, width, vocabulary = (32768,), 512, 50304
    x, ids = ((*rows, width), 2), (rows, 4)
    head, embedding = ((width, vocabulary), 2), ((vocabulary, width), 2)
    packed = ((16, 2048, 8, 64), 2)
    rates = profile_step.RATES["H200"]
    for op, given, results, moved, microseconds in (
        ("linear_fwd", (x, head, None), (32768 * vocabulary * 2,), None, 2453),
        ("embedding_fwd", (ids, embedding), (2**25,), 67e6, 16),
        ("adamw", (*[((70426624,), 4)] * 4, ((70426624,), 2)), (), 30 * 70426624, 503),
        ("attention_fwd", (*[packed] * 3, None, True, packed), (2**20,), None, 100),
    ):
        row = profile_step.described(op, given, results)
        assert moved is None or abs(row.bytes / moved - 1) < 0.01, op
        assert abs(1e3 * row.floor(rates) - microseconds) < 0.5, op


@pytest.mark.parametrize("apart, counts", [(1.02, True), (0.98, True), (1.04, False), (0.9, False)])
def test_a_profile_far_from_the_step_does_not_count(apart, counts, capsys):
    rows = [profile_step.Operation("add  3", 4200, 0.0, 2, 6.0)]
    profile_step.report(rows, 1, 10 * apart, 10.0, (4.2e12, 688e12))
    assert ("THIS PROFILE DOES NOT COUNT" not in capsys.readouterr().out) == counts


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


@pytest.mark.parametrize(
    "tokens, graph, wanted", [(8192, None, True), (32768, None, False), (32768, True, True)]
)
def test_baseline_has_cuda_graphs_where_needle_has(tokens, graph, wanted, monkeypatch):
    """Includes --no-graph, which keeps needle alone from them."""
    torch_training = SimpleNamespace(
        modes=lambda dtype, graphs: [bool(graphs)], fastest=lambda names, make, step_ms: names
    )
    monkeypatch.setitem(sys.modules, "torch_training", torch_training)
    monkeypatch.setattr(train_step.bench, "has", lambda name: True)
    monkeypatch.setattr(train_step, "worth_recording", lambda device, tokens: tokens < 32768)
    for asked in {graph, graph or False}:
        args = argparse.Namespace(alone=False, baseline=None, dtype="bfloat16", graph=asked)
        made = train_step.torch_baseline(None, None, None, (tokens // 2048, 2048), args)
        assert made == [wanted]


@pytest.mark.parity
def test_modes_of_the_baseline():
    import torch_training

    plain = ["compile", "graphs"]
    assert torch_training.modes("float32", True) == plain
    assert torch_training.modes("bfloat16", True) == [*plain, "compile-bf16", "graphs-bf16"]
    assert torch_training.modes("bfloat16", False) == ["compile", "compile-bf16"]
