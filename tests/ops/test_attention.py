"""Attention, dense and block-sparse, where the cases do not reach: head dims, lengths, patterns,
scores far from usual, memory, many work items, and what is refused."""

import numpy as np
import pytest
from harness import attended_both_ways, device_of, draw, poison

from needle import _C, Tensor, ops
from needle.block_mask import BlockMask
from needle.ops.attention import Kernel
from needle.testing import assert_within, rounder
from needle.testing.attention import (
    causal_blocks,
    softmax_attention,
    softmax_attention_bwd,
    visible,
)

exactly = rounder("float64")

MASKS = {
    "local": lambda t, block: BlockMask.local(t, 2 * block, block),
    "strided": lambda t, block: BlockMask.strided(t, 2 * block, block),
    "global": lambda t, block: BlockMask.global_(t, block, block),
    "mixed": lambda t, block: BlockMask.mixed(t, window=block, n_global=block, block=block),
    "dense": lambda t, block: BlockMask.dense(t, block),
    "of heads": lambda t, block: BlockMask(
        np.concatenate([causal_blocks(-(-t // block), keep) for keep in (int.__eq__, int.__ge__)]),
        block,
        t,
    ),
}
HEAD_DIMS = [1, 2, 3, 8, 15, 16, 24, 33, 40, 64, 72, 96, 100, 128, 160, 200, 255, 256]
LENGTHS = [1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 200]
SHAPES = [  # T, D, pattern: one tile and a part of the next, around the ends of tiles, masks
    *((67, d, None) for d in HEAD_DIMS),
    *((t, 16, None) for t in LENGTHS),
    *((t, 6, pattern) for pattern in MASKS for t in (31, 64, 75)),
]


def all_within(found, exact, naive, dtype, terms, sound=lambda name, x: x) -> None:
    for name, got in found.items():
        parts = (sound(name, x) for x in (got, exact[name], naive[name]))
        assert_within(*parts, dtype, terms, name)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("t, d, pattern", SHAPES)
def test_results_and_gradients_are_those_of_softmax(t, d, pattern, dtype, device):
    r, scale = rounder(dtype), d**-0.5
    q, k, v, dout = (r(draw(i, 1, t, 2, d)) for i in range(4))
    see, lists = visible(t, t, True), ()
    if pattern is not None:
        mask = MASKS[pattern](t, 16)
        lists, see = (*mask.lists(device), mask.block), see & mask.to_dense()
    arrays = [_C.array(x, dtype=dtype, device=device) for x in (q, k, v, dout)]
    poison(device)
    o, lse, gradients = attended_both_ways(*arrays, scale, lists=lists)
    exact, naive = (softmax_attention(f, q, k, v, scale, see) for f in (exactly, r))
    all_within({"o": o.numpy()}, exact, naive, dtype, max(d, t))
    all_within({"lse": lse.numpy()}, exact, naive, "float32", max(d, t))
    given = o.numpy().astype(float), lse.numpy().astype(float)
    exact, naive = (
        softmax_attention_bwd(f, dout, q, k, v, *given, scale, see) for f in (exactly, r)
    )
    found = dict(zip(("dq", "dk", "dv"), (x.numpy() for x in gradients)))
    if t == 1:  # dq and dk are differences of equal numbers
        del found["dq"], found["dk"]
    all_within(found, exact, naive, dtype, 4 * max(d, t))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("block", [None, 64, 128])
@pytest.mark.parametrize("d", [64, 128])
def test_scores_of_minus_infinity_and_ten_thousand(d, block, dtype, device):
    """Against float64. Keys of -inf weigh nothing (head 0), queries of -inf see nothing (head 1), a
    score of 1e4 takes all (head 2), and beside scores near -95 no padding key counts as one of 0
    (head 3); each tile of keys may have far larger scores than those before (head 4). What is
    infinite has no gradient; the other gradients are right."""
    r, scale, t = rounder(dtype), 1 / 4, 200
    q, k, v, dout = (r(draw(i, 1, t, 5, d)) for i in range(4))
    for x in (q, k):
        x[..., :3, 0] = np.abs(x[..., :3, 0]) + 1  # so that no score is +inf
    rows, far = np.s_[0, 3::7], np.s_[0, 5::50]
    k[(*rows, 0, 0)] = -np.inf
    q[(*rows, 1, 0)] = -np.inf
    q[..., 2, 0], k[..., 2, 0] = 256, 0
    k[(*far, 2, 0)] = 156 - 4 * np.arange(k[(*far, 2, 0)].size)  # the first that is seen takes all
    q[..., 3, 0], k[..., 3, 0] = -95 * 4, 1
    q[..., 4, 0], k[0, :, 4, 0] = 4, np.arange(t) // 2
    see = visible(t, t, True)
    lists = ()
    if block is not None:
        mask = BlockMask.local(t, 64, block).causal()
        lists, see = (*mask.lists(device), block), see & mask.to_dense()
    arrays = [_C.array(x, dtype=dtype, device=device) for x in (q, k, v)]
    dout_array = _C.array(dout, dtype=dtype, device=device)
    o, lse, gradients = attended_both_ways(*arrays, dout_array, scale, lists=lists)
    exact, naive = (softmax_attention(f, q, k, v, scale, see) for f in (exactly, r))
    all_within({"o": o.numpy()}, exact, naive, dtype, t, lambda name, x: x[..., :3, :])
    # A score of 95 is known 95 times less well than one of 1.
    all_within({"o": o.numpy()}, exact, naive, dtype, 95**2 * t, lambda name, x: x[..., 3:, :])
    all_within({"lse": lse.numpy()}, exact, naive, "float32", t)
    np.testing.assert_array_equal(o.numpy()[(*rows, 1)], 0)
    assert np.isneginf(lse.numpy()[0, 1, 3::7]).all()
    given = o.numpy().astype(float), lse.numpy().astype(float)
    with np.errstate(invalid="ignore"):
        exact, naive = (
            softmax_attention_bwd(f, dout, q, k, v, *given, scale, see) for f in (exactly, r)
        )
    finite = np.isfinite(k[..., 0])  # of a key of -inf no kernel says what its gradients are
    sound = {
        "dq": lambda x: x[..., 1:, :],
        "dk": lambda x: x[finite][..., 1:],
        "dv": lambda x: x[finite],
    }
    found = dict(zip(sound, (x.numpy() for x in gradients)))
    # Of a score of 1e4 float32 knows 1e4 times less than of 1.
    all_within(found, exact, naive, dtype, 1e9, lambda name, x: sound[name](x))


def test_unlisted_blocks_are_never_touched(device):
    """NaN in every key and value that no query lists, forward and backward."""
    t, block = 80, 16
    keep = causal_blocks(5, lambda i, j: j in (0, 3))[0]
    keep[1:3, 0] = True
    mask = BlockMask(keep, block, t)
    arrays = [draw(i, 1, t, 2, 8) for i in range(3)]
    for unlisted in (1, 2, 4):
        for a in arrays[1:]:
            a[:, unlisted * block : (unlisted + 1) * block] = np.nan
    tensors = [Tensor(a, device=device) for a in arrays]
    o = ops.block_sparse_attention(*tensors, mask)
    assert np.isfinite(o.numpy()).all()
    o.backward()
    for tensor in tensors:
        assert np.isfinite(tensor.grad.numpy()).all()
    np.testing.assert_array_equal(tensors[1].grad.numpy()[:, block : 3 * block], 0)


@pytest.mark.parametrize("sparse", [False, True])
def test_no_matrix_of_scores_is_stored(sparse, device):
    """T = 4096 with 8 heads: T x T scores would be 512 MiB; q, k, v, their gradients, o and what
    belongs to them are 1 MiB each."""
    t = 4096 if not (device == device_of("cpu") and not sparse) else 2048
    shape = (1, t, 2, 16)
    mask = BlockMask.local(t, 128, 64) if sparse else None
    tensors = [Tensor(draw(i, *shape), device=device) for i in range(3)]
    before = device.memory_stats()["live_bytes"]
    device.reset_peak()
    o = ops.attention(*tensors, mask=mask)
    o.backward()
    device.synchronize()
    array = np.prod(shape) * 4
    assert device.memory_stats()["peak_bytes"] - before < 16 * array < t * t * 4
    assert np.isfinite(o.numpy()).all()


# ---- more work items than processors -------------------------------------------------------------


def of_a_head(q, k, v, dout, scale: float, see: np.ndarray) -> tuple[np.ndarray, ...]:
    """o, dq, dk, dv of (T, D) in float64."""
    scores = np.where(see, q @ k.T * scale, -np.inf)
    p = np.exp(scores - scores.max(-1, keepdims=True, initial=-1e300))
    p /= np.maximum(p.sum(-1, keepdims=True), 1e-300)  # of nothing seen: 0
    o = p @ v
    ds = p * (dout @ v.T - (dout * o).sum(-1, keepdims=True)) * scale
    return o, ds @ k, ds.T @ q, p.T @ dout


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("block", [None, 64, 128])
@pytest.mark.parametrize("d", [64, 128])
def test_attention_with_more_items_than_processors_is_right(d, block, dtype):
    """A GPU has processors with four teams each; at 4 bytes an element of q more than 16 MiB make
    several sections, of 131 heads of 64 dims or 65 of 128. Every head writes all its rows; the
    first, the last and those at both sides of the first section's end are right. An item goes to
    any team that is free, another one from pass to pass, and the bits do not depend on it."""
    device, scale, (B, T, H), rng = (
        device_of("cuda"),
        d**-0.5,
        (2, 500, 150),
        np.random.default_rng(d),
    )
    given = [rng.standard_normal((B, T, H, d), np.float32) for _ in range(4)]
    arrays = [_C.array(x, dtype=dtype, device=device) for x in given]
    given, mask, lists = [x.numpy().astype(np.float32) for x in arrays], None, ()
    if block is not None:
        n = -(-T // block)
        mask = BlockMask(rng.random((H, n, n)) < 0.3, block, T).causal()
        lists = (*mask.lists(device), block)
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
    if (d, dtype) != (64, "bfloat16") or block == 128:
        return
    first = [x.copy() for x in into]
    differ = _C.array(np.zeros((), np.int64), device=device)
    for _ in range(1000):
        for x in into:
            x.fill(float("nan"))
        attended_both_ways(*arrays, scale, lists=lists, into=into, checked=False)
        for one, again in zip(first, into):  # on the device: they are 80 MB
            differ = differ + _C.not_equal(*(x.view("uint16") for x in (one, again))).sum()
    assert differ.item() == 0


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("t, s, causal", [(384, 400, False), (250, 900, True)])
def test_attention_in_tiles_of_any_size_has_the_same_bits(t, s, causal, dtype):
    """Of 68 heads tiles of 192 queries take two rounds of 132 processors, and those of 128 do; of
    one head both take one. So Hopper's kernel takes smaller tiles for all heads than for one."""
    device, rng = device_of("cuda"), np.random.default_rng(t)
    q, k, v = (
        _C.array(rng.standard_normal((1, n, 68, 64)), dtype=dtype, device=device) for n in (t, s, s)
    )
    poison(device)
    whole = Kernel("attention", None, causal, None).forward(q, k, v).numpy()
    for head in (0, 31, 67):
        own = [x[:, :, head : head + 1].compact() for x in (q, k, v)]
        alone = Kernel("attention", None, causal, None).forward(*own)
        np.testing.assert_array_equal(whole[:, :, head : head + 1], alone.numpy())
        wanted = of_a_head(*(x.numpy()[0, :, 0].astype(np.float64) for x in (*own, own[0])), 0.125,
                           visible(t, s, causal))[0]  # fmt: skip
        assert np.abs(whole[0, :, head] - wanted).max() <= 1e-2 * np.abs(wanted).max()
