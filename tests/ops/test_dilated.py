"""Dilated attention against softmax attention in float64 in which a key counts once for each branch
that holds it."""

import re
import sys

import numpy as np
import pytest
from gradients import attend_dilated, dilated_weights
from harness import bits, draw, poison, run

from needle import _C, Tensor, ops
from needle.testing import rounder
from needle.testing.attention import attention_gradients

# T, heads, segments, dilations: one branch; the last segment shorter; longer than T; more dilation
# than heads; tokens of no branch; segments that are no multiple of the dilation; more heads than
# that, in views of an offset and of neighbours; several tiles; more dilation than tokens.
BRANCHES = [
    (64, 3, (16,), (1,)),
    (64, 3, (16, 64), (1, 4)),
    (67, 3, (16, 32, 200), (1, 2, 8)),
    (67, 3, (10, 25), (1, 3)),
    (40, 3, (8, 20), (4, 5)),
    (1, 3, (4, 8), (1, 2)),
    (48, 7, (12, 24), (1, 2)),
    (45, 7, (15, 24), (1, 4)),
    (610, 6, (256, 610), (1, 3)),
    (33, 2, (100,), (1,)),
    (40, 7, (30, 2**62), (1, 40)),
    (3, 7, (2, 3), (1, 5)),
]
BOUND = {"float32": 2e-6, "bfloat16": 2e-2, "float16": 3e-3}


def gradients_of(q, k, v, dout, branches, causal):
    """dq, dk, dv in float64."""
    p = dilated_weights(q, k, branches, causal)
    return attention_gradients(p, q, k, v, dout, q.shape[-1] ** -0.5)


def assert_close(got, want, dtype, what):
    off = np.abs(got - want).max(initial=0)
    assert off <= BOUND[dtype] * max(1, np.abs(want).max(initial=0)), f"{what}: {off:.2g} off"


@pytest.mark.parametrize("dtype", BOUND)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("t, heads, segments, dilations", BRANCHES)
def test_forward_and_gradients(t, heads, segments, dilations, causal, dtype, device):
    check((2, t, heads, 24), segments, dilations, causal, dtype, device)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("size", [3, 65, 100])
def test_rows_of_no_whole_chunks_leave_their_neighbours(size, dtype, device):
    """16 bytes are 8 numbers: the last ones of a row lie beside the next head's, and the strides of
    a branch are multiples of 16 bytes all the same."""
    for t, heads, segments, dilations in [
        (1, 8, (1, 1, 1), (1, 4, 8)),
        (2, 8, (33, 3, 16), (1, 2, 1)),
        (63, 5, (8, 33, 1), (8, 8, 3)),
        (64, 1, (33, 2000, 3), (8, 8, 3)),
    ]:
        check((1, t, heads, size), segments, dilations, True, dtype, device)


def check(shape, segments, dilations, causal, dtype, device):
    """Compare the output and the gradients, in dirty memory."""
    branches = tuple(zip(segments, dilations))
    q, k, v, dout = (rounder(dtype)(draw(i, *shape)) for i in range(4))
    poison(device, 1 << 15)
    leaves = [Tensor(x, device=device, dtype=dtype, requires_grad=True) for x in (q, k, v)]
    o = ops.dilated_attention(*leaves, segments, dilations, causal)
    assert (o.shape, o.dtype) == (q.shape, dtype)
    assert_close(o.numpy(), attend_dilated(q, k, v, branches, causal), dtype, "o")
    o.backward(Tensor(dout, device=device, dtype=dtype))
    wanted = gradients_of(q, k, v, dout, branches, causal)
    for name, leaf, want in zip("qkv", leaves, wanted):
        assert_close(leaf.grad.numpy(), want, dtype, f"d{name}")


def test_bits_are_those_of_every_run(device):
    """Tiles of several branches and a token that none but the first holds, in dirty memory."""
    q, k, v, dout = (draw(i, 2, 610, 8, 64) for i in range(4))
    runs = []
    for _ in range(2 if device == _C.cpu() else 20):
        poison(device, 1 << 21)
        leaves = [Tensor(x, device=device, dtype="bfloat16", requires_grad=True) for x in (q, k, v)]
        o = ops.dilated_attention(*leaves, (256, 610, 610), (1, 3, 16))
        o.backward(Tensor(dout, device=device, dtype="bfloat16"))
        runs.append([bits(x.cached_data) for x in (o, *(leaf.grad for leaf in leaves))])
    for later in runs[1:]:
        for one, other in zip(runs[0], later):
            np.testing.assert_array_equal(one, other)


CALLS = """
import sys
import types
import needle as ndl
from needle.ops.dilated import DilatedAttention

node = types.SimpleNamespace(inputs=[ndl.randn(2, 64, 8, 4, requires_grad=True) for _ in "qkv"])
op = DilatedAttention([(16, 1), (32, 4), (64, 8)], 0.5, True)
dout = ndl.ones(2, 64, 8, 4).cached_data
for call in (lambda: op.compute(*(x.cached_data for x in node.inputs)),
             lambda: op.backward(dout, node, ())):
    print("a way", file=sys.stderr, flush=True)
    call()
"""


def test_calls_are_a_kernel_a_view_and_no_copy():
    """Views: the first branch one, the second one each of heads 0-3 and 4-7, the third one."""
    done = run(sys.executable, "-c", CALLS, NEEDLE_TRACE=1)
    assert done.returncode == 0, done.stderr[-2000:]
    ways = [re.findall(r"^needle: (\w+)", way, re.M) for way in done.stderr.split("a way\n")[1:]]
    assert ways == [["attention_part_fwd"] * 4, ["attention_part_bwd"] * 4]


def test_gradients_of_slices(device):
    """Slices, whose batch and time do not merge: all operands, and each beside whole ones."""
    segments, dilations = (8, 32), (1, 2)
    numbers = [rounder("float32")(draw(i, 2, 40, 6, 16)) for i in range(4)]
    part = (slice(None), slice(3, 35), slice(1, 5))
    wanted = gradients_of(*(x[part] for x in numbers), tuple(zip(segments, dilations)), True)
    for sliced in ("qkv", "q", "k", "v", "kv"):
        leaves = [
            Tensor(x if name in sliced else x[part], device=device)
            for name, x in zip("qkv", numbers)
        ]
        operands = [x[part] if name in sliced else x for name, x in zip("qkv", leaves)]
        out = ops.dilated_attention(*operands, segments, dilations)
        out.backward(Tensor(numbers[3][part], device=device))
        for name, leaf, want in zip("qkv", leaves, wanted):
            got = leaf.grad.numpy()[part] if name in sliced else leaf.grad.numpy()
            assert_close(got, want, "float32", f"d{name} beside slices of {sliced}")
