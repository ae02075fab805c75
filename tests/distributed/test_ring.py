"""Attention over a sequence that ranks share, plain, of blocks and dilated: float64's numbers, one
device's errors, all ranks."""

import re
import sys

import numpy as np
import pytest
import struck_runs
from gradients import dilated_weights
from harness import ROOT
from ring import B, D, assert_as_near, attended, distances, operands, shared, tokens_of
from together import together

import needle as ndl
from needle import _C, BlockMask
from needle.distributed.group import Group
from needle.ops import (
    attention,
    dilated_attention,
    ring_attention,
    ring_chunks,
    ring_dilated_attention,
)
from needle.testing.attention import (
    attention_gradients,
    pair_products,
    softmax_attention,
    visible,
    weighted,
)

H = 2
BOTH = [
    (ring_attention, attention, ()),
    (ring_dilated_attention, dilated_attention, ((6, 24), (1, 2))),
]


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """Fill new memory with NaN, which shows unwritten elements."""
    real = _C.empty

    def empty(shape, dtype, device):
        made = real(shape, dtype, device)
        if dtype in ("float32", "bfloat16"):
            made.fill(float("nan"))
        return made

    monkeypatch.setattr(_C, "empty", empty)


# ---- plain --------------------------------------------------------------------------------------


def reference(arrays, see, scale=D**-0.5):
    """The result, and the gradients of q, k and v, in float64."""
    q, k, v, dout = arrays
    scores = np.where(see, pair_products(q, k) * scale, -np.inf)
    top = np.where(see.any(-1), scores.max(-1), 0)[..., None]
    p = np.exp(scores - top)
    p /= np.maximum(p.sum(-1, keepdims=True), 1e-300)
    out = weighted(p, v)
    np.testing.assert_allclose(
        out, softmax_attention(np.asarray, q, k, v, scale, see)["o"], atol=1e-12
    )
    return out, *attention_gradients(p, q, k, v, dout, scale)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("ranks, time", [(1, 31), (2, 124), (3, 186), (4, 8)])
def test_ring_attention_is_attention(ranks, time, causal, layout, dtype):
    """Against float64, with errors no larger than those of one device."""
    arrays = operands(time, H, dtype)
    wanted = reference(arrays, visible(time, time, causal))
    alone = attended(lambda q, k, v: attention(q, k, v, causal), arrays, dtype)
    found = shared(ring_attention, arrays, ranks, dtype, causal=causal, layout=layout)
    assert_as_near(found, alone, wanted)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    "mask",
    [
        BlockMask.local(96, 20, 8),
        BlockMask.random(96, 3, 8, seed=1),
        BlockMask(np.random.RandomState(2).rand(H, 12, 12) < 0.5, 8, 96),  # one a head; empty rows
    ],
    ids=["local", "random", "heads"],
)
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_ring_attention_of_blocks_is_attention(ranks, mask, causal):
    arrays = operands(96, H, "float32")
    see = mask.to_dense() & visible(96, 96, causal)
    wanted = reference(arrays, np.broadcast_to(see, (B, H, 96, 96)), 0.2)
    options = {"causal": causal, "scale": 0.2, "mask": mask}
    found = shared(ring_attention, arrays, ranks, "float32", **options)
    assert max(distances(found, wanted)) < 1e-6


def test_chunks_cover_a_sequence():
    assert ring_chunks(24, 0, 3) == [slice(0, 4), slice(20, 24)]
    assert ring_chunks(24, 1, 3, "contiguous") == [slice(8, 16)]
    assert ring_chunks(7, 0, 1) == [slice(0, 7)]
    with pytest.raises(ValueError, match="7 tokens cannot be shared by 2 ranks: a multiple of 4"):
        ring_chunks(7, 0, 2)
    with pytest.raises(ValueError, match="layout must be one of"):
        ring_chunks(8, 0, 2, "striped")


# ---- dilated ------------------------------------------------------------------------------------

# T, heads, segments, dilations; runs of T / 2, T / 4 and T / 8 tokens: they hold whole segments;
# lie in one, at multiples of the dilation and not; are cut by segments, at the same and at others;
# the last segment is shorter; segments longer than T; more dilation than heads, and fewer; tokens
# of no branch.
BRANCHES = [
    (64, 3, (8,), (1,)),
    (64, 4, (4, 16, 64), (1, 2, 4)),
    (64, 8, (16, 64), (1, 8)),
    (48, 3, (12, 48), (1, 4)),
    (40, 3, (8, 24, 100), (1, 3, 7)),
    (56, 5, (11, 30), (2, 3)),
    (24, 7, (5, 9, 24), (4, 2, 5)),
    (72, 3, (50,), (1,)),
]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("ranks, layout", [(1, "zigzag"), (2, "zigzag"), (4, "zigzag"),
                                           (2, "contiguous"), (4, "contiguous")])  # fmt: skip
@pytest.mark.parametrize("time, heads, segments, dilations", BRANCHES)
def test_ring_dilated_is_dilated_attention(
    time, heads, segments, dilations, ranks, layout, causal, dtype
):
    """Against float64, with errors no larger than those of one device."""
    arrays, branches = operands(time, heads, dtype), tuple(zip(segments, dilations))
    q, k, v, dout = arrays
    p = dilated_weights(q, k, branches, causal)
    wanted = weighted(p, v), *attention_gradients(p, q, k, v, dout, D**-0.5)
    alone = attended(
        lambda q, k, v: dilated_attention(q, k, v, segments, dilations, causal), arrays, dtype
    )
    options = {"causal": causal, "layout": layout}
    found = shared(ring_dilated_attention, arrays, ranks, dtype, segments, dilations, **options)
    assert_as_near(found, alone, wanted)


def test_ring_dilated_scale_is_that_of_one_device():
    arrays, branches = operands(24, 7, "float32"), ((5, 9, 24), (4, 2, 5))
    wanted = attended(lambda *qkv: dilated_attention(*qkv, *branches, scale=0.2), arrays, "float32")
    found = shared(ring_dilated_attention, arrays, 2, "float32", *branches, scale=0.2)
    assert max(distances(found, wanted)) < 1e-6


# ---- both ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("op, _, more", BOTH)
def test_two_runs_give_the_same_bits(op, _, more):
    first, second = (shared(op, operands(64, 3, "bfloat16"), 4, "bfloat16", *more) for _ in "12")
    for x, y in zip(first, second):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("op, alone, more", BOTH)
def test_one_rank_has_the_bits_of_one_device(op, alone, more):
    q, k, v = (ndl.Tensor(x) for x in operands(40, 3, "float32")[:3])
    np.testing.assert_array_equal(
        op(q, k, v, Group(), *more).numpy(), alone(q, k, v, *more).numpy()
    )


@pytest.mark.parametrize("op, alone, more", BOTH)
def test_views_as_operands_get_gradients(op, alone, more):
    """Every second head of those from the second on."""
    packed = np.random.RandomState(0).standard_normal((3, B, 24, 5, D)).astype(np.float32)
    wide = np.repeat(packed, 2, axis=3)

    def attend(parts, op, *given):
        x = [ndl.Tensor(part) for part in parts]
        views = [y[:, :, 1:9:2, :] for y in x]
        assert not views[0].cached_data.is_compact()
        out = op(*views, *given)
        out.sum().backward()
        return [y.numpy() for y in (out, *(y.grad for y in x))]

    own = [tokens_of(rank, 2, 24) for rank in range(2)]
    found = together(2, lambda g: attend([x[:, own[g.rank]] for x in wide], op, g, *more))
    for i, right in enumerate(attend(wide, alone, *more)):
        for rank in range(2):
            np.testing.assert_allclose(found[rank][i], right[:, own[rank]], atol=2e-6)


@pytest.mark.parametrize("op, _, more", BOTH)
def test_unwanted_gradients_are_not_computed(op, _, more):
    q, k, v = (ndl.Tensor(np.ones((1, 4, 1, 4))) for _ in range(3))
    k.requires_grad = False
    op(q, k, v, Group(), *more).sum().backward()
    assert k.grad is None and v.grad is not None


EIGHT = [(1, 8, 2, 4)] * 3
UNLIKE = [(1, 4, 2, 4), (1, 8, 2, 4), (1, 8, 2, 4)]


@pytest.mark.parametrize(
    "op, shapes, options, words",
    [
        (ring_attention, UNLIKE, {}, "alike"),
        (ring_attention, [(4, 2, 4)] * 3, {}, "alike"),
        (ring_attention, [(1, 3, 2, 4)] * 3, {}, "6 tokens cannot be shared by 2 ranks"),
        (ring_attention, EIGHT, {"mask": BlockMask.dense(8, 4)}, "but there are 16 tokens in all"),
        (ring_attention, EIGHT, {"mask": BlockMask.dense(16, 8)}, "cut by blocks of 8"),
        (ring_attention, EIGHT, {"scale": "x"}, "scale must be a number"),
        (ring_dilated_attention, UNLIKE, {}, "must have one shape"),
        (ring_dilated_attention, [(4, 2, 4)] * 3, {}, "must have one shape"),
        (ring_dilated_attention, [(1, 3, 2, 4)] * 3, {}, "6 tokens cannot be shared by 2 ranks"),
        (
            ring_dilated_attention,
            EIGHT,
            {"segments": (4, 8)},
            "ring_dilated_attention: segments and",
        ),
        (ring_dilated_attention, EIGHT, {"dilations": 1}, "dilations must be a seq"),
        (ring_dilated_attention, EIGHT, {"layout": "striped"}, "layout must be one of"),
        (ring_dilated_attention, EIGHT, {"scale": "x"}, "scale must be a number"),
    ],
)
def test_invalid_arguments_are_refused(op, shapes, options, words):
    def work(group):
        branches = {} if op is ring_attention else {"segments": (4,), "dilations": (1,)}
        op(*(ndl.zeros(*shape) for shape in shapes), group, **branches | options)

    with pytest.raises((ValueError, TypeError), match=words):
        together(2, work)


@pytest.mark.skipif(struck_runs.missing() is not None, reason=str(struck_runs.missing()))
def test_benchmark_uses_the_ranks_that_it_is_given(tmp_path):
    """Rank 0 prints; the others compute with it."""

    def run(length):
        words = sys.executable, ROOT / "benchmarks/ring_attention.py", "--lengths", length
        return struck_runs.ended("-n", "3", *words, "--head-dims", "16", cwd=tmp_path)

    done = run("96")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("3 x ") and done.stdout.count("T 96, head dim 16") == 1
    for side in ("needle, 1 GPU", "needle, 3 GPUs"):  # and perhaps that it was too fast
        assert len(re.findall(rf"^  {side} +[\d.]+ ms", done.stdout, re.MULTILINE)) == 1
    assert "3 ranks share multiples of 6 tokens" in run("64").stderr
