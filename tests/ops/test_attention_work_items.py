"""Attention on a GPU with more work items than processors: each item is computed, its result is at
its place, and its bits do not depend on the team that computes it."""

import contextlib
import subprocess
import sys

import numpy as np
import pytest
from harness import ROOT, attended_both_ways, device_of, poison

from needle import _C
from needle.block_mask import BlockMask

pytestmark = pytest.mark.cuda

# More work items than a GPU has processors with four teams each, and at 4 bytes an element of q
# more than 16 MiB: several rounds and, of 131 heads of 64 dims or 65 of 128, several sections.
MANY = (2, 500, 150)  # B T H


def many(d: int, block: int | None, dtype: str, device) -> tuple[list, BlockMask | None, tuple]:
    """(q, k, v, dout as float32 that are of `dtype`, a mask a head, what follows the operands)."""
    B, T, H = MANY
    rng = np.random.default_rng(d)
    given = [rng.standard_normal((B, T, H, d), np.float32) for _ in range(4)]
    given = [_C.array(x, dtype=dtype, device=device).numpy().astype(np.float32) for x in given]
    if block is None:
        return given, None, ()
    n = -(-T // block)
    mask = BlockMask(rng.random((H, n, n)) < 0.3, block, T).causal()
    return given, mask, (*mask.lists(device), block)


def of_a_head(q, k, v, dout, scale: float, see: np.ndarray) -> tuple[np.ndarray, ...]:
    """o, dq, dk, dv of (T, D) in float64."""
    scores = np.where(see, q @ k.T * scale, -np.inf)
    p = np.exp(scores - scores.max(-1, keepdims=True, initial=-1e300))
    p /= np.maximum(p.sum(-1, keepdims=True), 1e-300)  # of nothing seen: 0
    o = p @ v
    ds = p * (dout @ v.T - (dout * o).sum(-1, keepdims=True)) * scale
    return o, ds @ k, ds.T @ q, p.T @ dout


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("block", [None, 64, 128])
@pytest.mark.parametrize("d", [64, 128])
def test_attention_with_more_items_than_processors_is_right(d, block, dtype):
    """Teams take a second item, and heads of a second section. Every head writes all its rows;
    the first, the last and those at both sides of the first section's end are right."""
    device, scale, (B, T, H) = device_of("cuda"), d**-0.5, MANY
    given, mask, lists = many(d, block, dtype, device)
    arrays = [_C.array(x, dtype=dtype, device=device) for x in given]
    poison(device, 4 * B * T * H)
    into = [_C.empty(x.shape, dtype, device) for x in arrays]
    for x in into:
        x.fill(float("nan"))
    lse = attended_both_ways(*arrays, scale, lists=lists, into=into)[1].numpy()
    found = dict(zip(("o", "dq", "dk", "dv"), (x.numpy() for x in into)))
    assert not np.isnan(lse).any()
    for name, got in found.items():
        assert np.isfinite(got).all(), f"{name}: heads {np.argwhere(~np.isfinite(got))[:3]}"
    section, bound = (16 << 20) // (4 * T * d + 1), {"bfloat16": 2e-2, "float32": 1e-4}[dtype]
    for head in (0, section - 1, section, B * H - 1):
        at = head // H, slice(None), head % H
        see = np.tri(T, dtype=bool) & (mask is None or mask.head(head % H).to_dense())
        wanted = of_a_head(*(x[at].astype(np.float64) for x in given), scale, see)
        for (name, got), want in zip(found.items(), wanted):
            error = np.abs(got[at] - want).max()
            assert error <= bound * np.abs(want).max(), f"{name} of head {head}: {error:.3g}"


OTHER_WORK = """
import sys
import needle as ndl
x = ndl.randn(2048, 2048, device=ndl.cuda())
print("ready", flush=True)
while True:
    for _ in range(50):
        x @ x
    ndl.cuda().synchronize()
"""


@pytest.mark.parametrize("block", [None, 64], ids=["dense", "blocks"])
@pytest.mark.parametrize("other_work", [False, True])
def test_attention_repeated_a_thousand_times_gives_equal_bits(other_work, block):
    """A work item goes to any processor that is free, another one from pass to pass, since there
    are more items than processors. The bits do not depend on it."""
    device = device_of("cuda")
    given, _, lists = many(64, block, "bfloat16", device)
    arrays = [_C.array(x, dtype="bfloat16", device=device) for x in given]
    into = [_C.empty(x.shape, "bfloat16", device) for x in arrays]
    command = [sys.executable, "-c", OTHER_WORK]
    with contextlib.ExitStack() as stack:
        if other_work:
            other = stack.enter_context(
                subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
            )
            stack.callback(other.kill)
            assert other.stdout.readline() == "ready\n"
        attended_both_ways(*arrays, 0.125, lists=lists, into=into)
        first = [x.copy() for x in into]
        differ = _C.array(np.zeros((), np.int64), device=device)
        for _ in range(1000):
            for x in into:
                x.fill(float("nan"))
            attended_both_ways(*arrays, 0.125, lists=lists, into=into, checked=False)
            for one, found in zip(first, into):  # on the device: they are 80 MB
                differ = differ + _C.not_equal(*(x.view("uint16") for x in (one, found))).sum()
        assert differ.item() == 0
        assert not other_work or other.poll() is None
