"""Attention over a sequence that ranks share: float64's numbers, one device's errors, all ranks."""

import sys

import numpy as np
import pytest
import struck_runs
from harness import ROOT
from ring import B, D, assert_as_near, attended, distances, operands, shared
from together import together

import needle as ndl
from needle import BlockMask
from needle.distributed.group import Group
from needle.ops import attention, ring_attention, ring_chunks
from needle.ops.attention import qkv_parts
from needle.testing.attention import (
    attention_gradients,
    pair_products,
    softmax_attention,
    visible,
    weighted,
)

H = 2


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
def test_it_is_attention(ranks, time, causal, layout, dtype):
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
def test_blocks(ranks, mask, causal):
    arrays = operands(96, H, "float32")
    see = mask.to_dense() & visible(96, 96, causal)
    wanted = reference(arrays, np.broadcast_to(see, (B, H, 96, 96)), 0.2)
    options = {"causal": causal, "scale": 0.2, "mask": mask}
    found = shared(ring_attention, arrays, ranks, "float32", **options)
    assert max(distances(found, wanted)) < 1e-6


def test_two_runs_give_the_same_bits():
    arrays = operands(64, H, "bfloat16")
    first, second = (shared(ring_attention, arrays, 4, "bfloat16") for _ in range(2))
    for x, y in zip(first, second):
        np.testing.assert_array_equal(x, y)


def test_views_as_operands():
    """Views are those of a packed projection."""
    packed = np.random.RandomState(0).standard_normal((B, 24, H, 3, D)).astype(np.float32)
    x = ndl.Tensor(packed)
    views = [ndl.Tensor.from_ndarray(part) for part in qkv_parts(x.cached_data)]
    assert not views[0].cached_data.is_compact()
    found = ring_attention(*views, Group()).numpy()
    np.testing.assert_array_equal(found, attention(*views).numpy())


def test_unwanted_gradients_are_not_computed():
    q, k, v = (ndl.Tensor(np.ones((1, 4, 1, 4))) for _ in range(3))
    k.requires_grad = False
    ring_attention(q, k, v, Group()).sum().backward()
    assert k.grad is None and v.grad is not None


def test_chunks():
    assert ring_chunks(24, 0, 3) == [slice(0, 4), slice(20, 24)]
    assert ring_chunks(24, 1, 3, "contiguous") == [slice(8, 16)]
    assert ring_chunks(7, 0, 1) == [slice(0, 7)]
    with pytest.raises(ValueError, match="7 tokens cannot be shared by 2 ranks: a multiple of 4"):
        ring_chunks(7, 0, 2)
    with pytest.raises(ValueError, match="layout must be one of"):
        ring_chunks(8, 0, 2, "striped")


@pytest.mark.parametrize(
    "shapes, options, words",
    [
        ([(1, 4, 2, 4), (1, 8, 2, 4), (1, 8, 2, 4)], {}, "alike"),
        ([(4, 2, 4)] * 3, {}, "alike"),
        ([(1, 3, 2, 4)] * 3, {}, "6 tokens cannot be shared by 2 ranks"),
        ([(1, 8, 2, 4)] * 3, {"mask": BlockMask.dense(8, 4)}, "but there are 16 tokens in all"),
        ([(1, 8, 2, 4)] * 3, {"mask": BlockMask.dense(16, 8)}, "cut by blocks of 8"),
        ([(1, 8, 2, 4)] * 3, {"scale": "x"}, "scale must be a number"),
    ],
)
def test_invalid_arguments_are_refused(shapes, options, words):
    def work(group):
        ring_attention(*(ndl.zeros(*shape) for shape in shapes), group, **options)

    with pytest.raises((ValueError, TypeError), match=words):
        together(2, work)


@pytest.mark.skipif(struck_runs.missing() is not None, reason=str(struck_runs.missing()))
def test_the_benchmark_uses_the_ranks_that_it_is_given(tmp_path):
    """Rank 0 prints; the others compute with it."""

    def run(length):
        words = sys.executable, ROOT / "benchmarks/ring_attention.py", "--lengths", length
        return struck_runs.ended("-n", "3", *words, "--head-dims", "16", cwd=tmp_path)

    done = run("96")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("3 x ") and done.stdout.count("T 96, head dim 16") == 1
    assert done.stdout.count("needle, 3 GPUs") == done.stdout.count("needle, 1 GPU ") == 1
    assert "3 ranks share multiples of 6 tokens" in run("64").stderr
