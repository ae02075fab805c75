"""Dilated attention against softmax attention in float64 in which a key counts once for each branch
that holds it, and against index_select with dense attention."""

import numpy as np
import pytest
from gradients import attend_dilated, dilated_weights
from harness import draw, poison

from needle import _C, Tensor, ops
from needle.ops.dilated import views_of
from needle.testing import rounder
from needle.testing.attention import attention_gradients, held

# T, heads, segments, dilations: one branch; the last segment shorter; longer than T; more dilation
# than heads; tokens of no branch; segments that are no multiple of the dilation; more heads than
# that, in views of an offset and of neighbours; several tiles.
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
    branches = tuple(zip(segments, dilations))
    q, k, v, dout = (rounder(dtype)(draw(i, 2, t, heads, 24)) for i in range(4))
    poison(device, 1 << 15)
    leaves = [Tensor(x, device=device, dtype=dtype, requires_grad=True) for x in (q, k, v)]
    o = ops.dilated_attention(*leaves, segments, dilations, causal)
    assert (o.shape, o.dtype) == (q.shape, dtype)
    assert_close(o.numpy(), attend_dilated(q, k, v, branches, causal), dtype, "o")
    o.backward(Tensor(dout, device=device, dtype=dtype))
    wanted = gradients_of(q, k, v, dout, branches, causal)
    for name, leaf, want in zip("qkv", leaves, wanted):
        assert_close(leaf.grad.numpy(), want, dtype, f"d{name}")


@pytest.mark.parametrize("merges", [True, False])
def test_views_hold_each_token_of_a_branch_once(merges):
    rng = np.random.default_rng(0)
    for _ in range(200):
        batch, t, heads = (int(n) for n in rng.integers(1, (4, 40, 12)))
        width, dilation = int(rng.integers(1, t + 1)), int(rng.integers(1, 10))
        times = _C.array(np.zeros((batch, t, heads)))
        for of in views_of(times.shape, width, dilation, merges):
            view = of(times)
            _C.assign(view, view + 1)
        wanted = held(np.array([width]), np.array([dilation]), t, heads)
        said = f"{(batch, t, heads)}, segments of {width}, dilation {dilation}"
        np.testing.assert_array_equal(times.numpy(), np.tile(wanted, (batch, 1, 1)), said)


def test_the_fewest_views():
    """A launch each: all heads and sequences in one where their strides allow it."""

    def count(shape, *branch):
        return len(list(views_of(shape, *branch, True)))

    assert count((2, 64, 8), 16, 1) == 1
    assert count((2, 64, 8), 16, 2) == 2  # heads of an offset
    assert count((2, 64, 8), 16, 8) == 1  # neighbours
    assert count((1, 67, 8), 67, 8) == 2  # of 9 tokens and of 8
    assert count((2, 70, 8), 16, 1) == 3  # each sequence, then what is left of both


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


def test_index_select_and_dense_attention_say_the_same(device):
    """Includes slices of heads and time, whose strides are not those of their shape."""
    segments, dilations = (16, 32), (1, 2)
    whole = [Tensor(draw(i, 2, 70, 6, 16), device=device) for i in range(3)]
    q, k, v = (x[:, 3:67, 1:5, :] for x in whole)
    got = ops.dilated_attention(q, k, v, segments, dilations).numpy()
    numbers = [x.numpy().astype(np.float64) for x in (q, k, v)]
    assert_close(got, attend_dilated(*numbers, tuple(zip(segments, dilations))), "float32", "o")
    # One branch alone, head by head, segment by segment.
    alone = ops.dilated_attention(q, k, v, (32,), (2,)).numpy()
    for head in range(4):
        for start in (0, 32):
            tokens = np.arange(start + head % 2, start + 32, 2)
            one = [x[:, :, head : head + 1, :].index_select(1, tokens) for x in (q, k, v)]
            want = ops.attention(*one).numpy()
            np.testing.assert_allclose(alone[:, tokens, head : head + 1], want, atol=1e-6)
            between = np.arange(start + 1 - head % 2, start + 32, 2)
            assert (alone[:, between, head] == 0).all()


def test_one_branch_of_the_whole_sequence_is_attention(device):
    q, k, v = (Tensor(draw(i, 1, 33, 2, 8), device=device) for i in range(3))
    got = ops.dilated_attention(q, k, v, (100,), (1,), scale=0.3).numpy()
    np.testing.assert_allclose(got, ops.attention(q, k, v, scale=0.3).numpy(), atol=1e-6)


def test_nothing_and_a_query_that_sees_nothing():
    empty = Tensor(np.zeros((2, 0, 3, 4)))
    assert ops.dilated_attention(empty, empty, empty, (4,), (1,)).shape == (2, 0, 3, 4)
    q = Tensor(np.full((1, 4, 1, 2), -np.inf))
    k = Tensor(np.ones((1, 4, 1, 2)))
    assert (ops.dilated_attention(q, k, k, (2, 4), (1, 2)).numpy() == 0).all()


@pytest.mark.parametrize("dilation", [9, 40, 2**31, 2**70])
@pytest.mark.parametrize("t", [3, 40])
def test_dilations_of_any_size(t, dilation, device):
    """Whole numbers of NumPy, too; above T and heads each head has its own token of a segment."""
    q, k, v = (Tensor(draw(i, 2, t, 7, 8), device=device) for i in range(3))
    got = ops.dilated_attention(q, k, v, np.array([30, 2**62]), (1, dilation)).numpy()
    numbers = [x.numpy().astype(np.float64) for x in (q, k, v)]
    branches = ((30, 1), (t, min(dilation, 1000)))
    assert_close(got, attend_dilated(*numbers, branches), "float32", "o")


@pytest.mark.parametrize("given", [4, None, np.int64(4)])
def test_branches_are_sequences(given):
    q = Tensor(np.zeros((1, 8, 2, 4)))
    with pytest.raises(TypeError, match="segments must be a sequence of whole numbers, one a bra"):
        ops.dilated_attention(q, q, q, given, (1,))
    with pytest.raises(TypeError, match="dilations must be a sequence"):
        ops.dilated_attention(q, q, q, (4,), given)


@pytest.mark.parametrize(
    "segments, dilations, said",
    [
        ((4, 8), (1,), "as many, one a branch, but are 2 and 1"),
        ((), (), "are 0 and 0"),
        ((0,), (1,), "segments must be whole numbers above 0, but has 0"),
        ((4,), (1.5,), "dilations must be whole numbers above 0, but has 1.5"),
        ((True,), (1,), "segments must be .* but has True"),
    ],
)
def test_wrong_branches(segments, dilations, said):
    q = Tensor(np.zeros((1, 8, 2, 4)))
    with pytest.raises(ValueError, match=said):
        ops.dilated_attention(q, q, q, segments, dilations)


def test_wrong_shapes():
    q = Tensor(np.zeros((1, 8, 2, 4)))
    with pytest.raises(ValueError, match=r"must have one shape \(B, T, H, D\), but have"):
        ops.dilated_attention(q, q, Tensor(np.zeros((1, 7, 2, 4))), (4,), (1,))
    with pytest.raises(ValueError, match="must have one shape"):
        ops.dilated_attention(*[Tensor(np.zeros((8, 2, 4)))] * 3, (4,), (1,))


def test_only_the_first_call_uploads(device, monkeypatch):
    """Segments and dilations stay on the device: a step of training does not wait for a copy."""
    q = Tensor(np.ones((1, 40, 2, 8), np.float32), device=device)
    ops.dilated_attention(q, q, q, segments=(7, 39), dilations=(1, 3))
    uploads = []
    real = _C.array
    monkeypatch.setattr(_C, "array", lambda *given: uploads.append(given) or real(*given))
    ops.dilated_attention(q, q, q, segments=(7, 39), dilations=(1, 3))
    assert uploads == []
    ops.dilated_attention(q, q, q, segments=(7, 38), dilations=(1, 3))
    assert len(uploads) == 2
