"""Attention, dense and block-sparse, where the cases do not reach: memory, causality, blocks."""

import numpy as np
import pytest
from gradients import attend
from harness import attended, attended_both_ways, central_differences, device_of, draw

from needle import _C, Tensor, nn, ops
from needle.block_mask import BlockMask
from needle.ops.attention import qkv_parts
from needle.testing import assert_within, rounder, to_ndarray
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
}


def seen_by(mask, t: int) -> np.ndarray:
    """(G, T, T): what the mask and causality let a query see."""
    dense = mask.to_dense()
    return (dense if dense.ndim == 3 else dense[None]) & np.tril(np.ones((t, t), bool))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "d", [1, 2, 3, 8, 15, 16, 24, 33, 40, 64, 72, 96, 100, 128, 160, 200, 255, 256]
)
def test_head_dims(d, dtype, device):
    """Forward and backward of every kind of head dim, one tile and a part of the next."""
    r = rounder(dtype)
    t = 67
    q, k, v, dout = (r(draw(i, 1, t, 2, d)) for i in range(4))
    scale = d**-0.5
    arrays = [_C.array(a, dtype=dtype, device=device) for a in (q, k, v)]
    o, lse = attended(_C.attention_fwd, *arrays, scale, 1)
    see = visible(t, t, True)
    exact, naive = (softmax_attention(f, q, k, v, scale, see) for f in (exactly, r))
    assert_within(o.numpy(), exact["o"], naive["o"], dtype, max(d, t), "o")
    gradients = [_C.empty(q.shape, dtype, device) for _ in range(3)]
    given = (r(exact["o"]), exact["lse"].astype(np.float32).astype(float))
    _C.attention_bwd(
        _C.array(dout, dtype=dtype, device=device),
        *arrays,
        _C.array(given[0], dtype=dtype, device=device),
        _C.array(given[1], device=device),
        scale,
        1,
        None,
        None,
        *gradients,
        None,
        None,
    )
    exact, naive = (
        softmax_attention_bwd(f, dout, q, k, v, *given, scale, see) for f in (exactly, r)
    )
    for name, got in zip(("dq", "dk", "dv"), gradients):
        assert_within(got.numpy(), exact[name], naive[name], dtype, 4 * max(d, t), name)


@pytest.mark.parametrize("t", [1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 200])
def test_lengths(t, device):
    q, k, v = (draw(i, 2, t, 2, 16) for i in range(3))
    o = ops.attention(*(Tensor(a, device=device) for a in (q, k, v)))
    assert_within(o.numpy(), attend(q, k, v), attend(q, k, v), "float32", 4 * t)


def test_attention_reads_packed_views(device):
    """q, k and v as views of one packed array, as the model passes them."""
    packed = draw(0, 2, 9, 3, 3, 8)
    array = _C.array(packed, device=device)
    views = [array[:, :, :, i].reshape((2, 9, 3, 8)) for i in range(3)]
    o, _ = attended(_C.attention_fwd, *views, 8**-0.5, 1)
    expected, _ = attended(_C.attention_fwd, *(view.compact() for view in views), 8**-0.5, 1)
    np.testing.assert_array_equal(o.numpy(), expected.numpy())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("causal", [True, False])
def test_large_scores_stay_finite(causal, dtype, device):
    q, k, v = (1e4 * draw(i, 1, 100, 1, 64) for i in range(3))
    tensors = [Tensor(a, device=device, dtype=dtype) for a in (q, k, v)]
    o = ops.attention(*tensors, causal=causal)
    o.backward()
    assert np.isfinite(o.numpy()).all()
    assert all(np.isfinite(t.grad.numpy()).all() for t in tensors)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("block", [None, 64])
def test_scores_far_below_zero(block, causal, dtype, device):
    """Padding keys must not get score 0: they would outweigh real keys by e^95."""
    t = 100
    mask = None if block is None else BlockMask.dense(t, block)
    arrays = [draw(i, 1, t, 2, 64) for i in range(4)]
    arrays[0][..., 0], arrays[1][..., 0] = -95 * 8, 1

    def run(device, dtype):
        tensors = [Tensor(a, device=device, dtype=dtype) for a in arrays[:3]]
        o = ops.attention(*tensors, causal=causal, mask=mask)
        o.backward(Tensor(arrays[3], device=device, dtype=dtype))
        return [o.numpy(), *(x.grad.numpy() for x in tensors)]

    for name, got, want in zip(("o", "dq", "dk", "dv"), run(device, dtype), run(None, "float32")):
        bound = 2e-2 * np.abs(want).max()
        assert np.abs(got - want).max() <= bound, name  # NaN is not


@pytest.mark.parametrize("pattern", [None, *MASKS])
def test_nothing_flows_from_the_future(pattern, device):
    """Changing token j changes no output before j, bit for bit, and no output before j sends a
    gradient to j."""
    t, block, j = 75, 16, 41
    mask = None if pattern is None else MASKS[pattern](t, block)
    arrays = [draw(i, 1, t, 2, 8) for i in range(3)]

    def run(made):
        tensors = [Tensor(a, device=device) for a in made]
        return ops.attention(*tensors, mask=mask), tensors

    out, tensors = run(arrays)
    changed = [a.copy() for a in arrays]
    for a in changed:
        a[:, j:] = 1e3 * draw(8, *a[:, j:].shape)
    np.testing.assert_array_equal(run(changed)[0].numpy()[:, :j], out.numpy()[:, :j])
    seed = np.zeros(out.shape)
    seed[:, :j] = draw(9, 1, j, 2, 8)
    out.backward(Tensor(seed, device=device))
    for tensor in tensors:
        np.testing.assert_array_equal(tensor.grad.numpy()[:, j:], 0)
        assert np.abs(tensor.grad.numpy()[:, :j]).max() > 0


@pytest.mark.parametrize("t", [31, 64, 75])
@pytest.mark.parametrize("pattern", MASKS)
def test_sparse_attention(pattern, t, device):
    """Against plain softmax over what the mask lets through, and against finite differences."""
    mask = MASKS[pattern](t, 16)
    see = seen_by(mask, t)
    assert see.any(-1).all()  # every query sees itself at least
    arrays = [draw(i, 1, t, 2, 6) for i in range(3)]
    tensors = [Tensor(a, device=device) for a in arrays]
    o = ops.block_sparse_attention(*tensors, mask)
    expected = attend(*arrays, see=see[None])
    assert_within(o.numpy(), expected, expected, "float32", t)
    seed, direction = draw(5, *o.shape), [draw(6 + i, *a.shape) for i, a in enumerate(arrays)]
    o.backward(Tensor(seed, device=device))

    def along(step):
        return (
            attend(*(a + step * d for a, d in zip(arrays, direction)), see=see[None]) * seed
        ).sum()

    numeric = next(central_differences(along, [np.zeros(())]))
    got = sum((x.grad.numpy() * d).sum() for x, d in zip(tensors, direction))
    assert abs(got - numeric) < 2e-4 * max(1, abs(numeric))


def test_a_dense_mask_is_dense_attention(device):
    arrays = [Tensor(draw(i, 2, 75, 2, 16), device=device) for i in range(3)]
    one, other = ops.attention(*arrays), ops.attention(*arrays, mask=BlockMask.dense(75, 16))
    np.testing.assert_allclose(one.numpy(), other.numpy(), atol=2e-6)


def test_unlisted_blocks_are_never_touched(device):
    """NaN in every key and value that no query lists, forward and backward."""
    t, block = 80, 16
    keep = causal_blocks(5, lambda i, j: j in (0, 3))[0]
    keep[1:3, 0] = True
    dense = np.kron(keep, np.ones((block, block), bool)).astype(bool)
    mask = ops.convert_to_block_mask(dense, block)
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


def test_per_head_masks(device):
    blocks = np.concatenate(
        [causal_blocks(5, lambda i, j: i == j), causal_blocks(5, lambda i, j: True)]
    )
    dense = np.stack([np.kron(b, np.ones((16, 16), bool)) for b in blocks]).astype(bool)[
        :, :75, :75
    ]
    mask = ops.convert_to_block_mask(dense, 16)
    arrays = [draw(i, 1, 75, 2, 8) for i in range(3)]
    o = ops.block_sparse_attention(*(Tensor(a, device=device) for a in arrays), mask)
    expected = attend(*arrays, see=(dense & np.tril(np.ones((75, 75), bool)))[None])
    assert_within(o.numpy(), expected, expected, "float32", 75)


class Ordered:
    """Block-sparse attention of 450 queries and 600 keys, causal, a mask a head, in an order of
    work that is given. Gradients that are not written stay 7."""

    T, S, H = 450, 600, 3

    def __init__(self, device, dtype: str, d: int, block: int) -> None:
        self.shape = (self.H, -(-self.T // block), -(-self.S // block))
        kept = np.random.default_rng(block).random(self.shape) < 0.5
        self.mask = BlockMask(kept, block, self.T, self.S).causal()
        self.device, self.dtype, self.d = device, dtype, d
        rows = (self.T, self.S, self.S, self.T)
        self.q, self.k, self.v, self.dout = (
            to_ndarray(draw(i, 1, n, self.H, d), dtype, device) for i, n in enumerate(rows)
        )

    def forward(self, change) -> list[np.ndarray]:
        offsets, columns, order = self.mask.lists(self.device)[:3]
        order = _C.array(change(order.numpy()), "int32", self.device)
        options = (self.mask.block, self.d**-0.5, 1)
        self.device.synchronize()
        made = attended(
            _C.block_sparse_attention_fwd, self.q, self.k, self.v, offsets, columns, order, *options
        )
        o, lse = (x.numpy() for x in made)
        return [o, lse.transpose(0, 2, 1)]

    def backward(self, o, lse, change) -> list[np.ndarray]:
        into = [to_ndarray(np.full(x.shape, 7), self.dtype, self.device) for x in (self.q, self.k)]
        into.append(into[1].copy())
        lists = list(self.mask.lists(self.device))
        for i in (2, 5):
            lists[i] = _C.array(change(lists[i].numpy()), "int32", self.device)
        o = _C.array(o, self.dtype, self.device)
        lse = _C.array(lse.transpose(0, 2, 1), "float32", self.device)
        options = (self.mask.block, self.d**-0.5, 1)
        last = *options, None, None, *into, None, None
        _C.block_sparse_attention_bwd(self.dout, self.q, self.k, self.v, o, lse, *lists, *last)
        return [x.numpy() for x in into]


ORDERED = [  # with lists, kernels for 16 bits choose by head dim and by what divides the block
    ("float32", 16, 31),
    ("float32", 64, 128),
    ("bfloat16", 64, 64),
    ("bfloat16", 64, 128),
    ("bfloat16", 128, 192),
    ("bfloat16", 128, 256),
    ("float16", 40, 7),
]


@pytest.mark.parametrize("dtype, d, block", ORDERED)
def test_any_order_of_work_gives_the_same_bits(dtype, d, block, device):
    of = Ordered(device, dtype, d, block)
    shuffle = np.random.default_rng(0).permuted
    o, lse = of.forward(lambda order: order)
    usual = [o, lse, *of.backward(o, lse, lambda order: order)]
    for change in (lambda order: order[:, ::-1], lambda order: shuffle(order, axis=1)):
        for one, other in zip(usual, [*of.forward(change), *of.backward(o, lse, change)]):
            np.testing.assert_array_equal(one, other)


@pytest.mark.cuda
@pytest.mark.parametrize("named", [[1], [0, 2], [99, 1], [-1, 0], [2**31 - 1, -(2**31)]])
@pytest.mark.parametrize("dtype, d, block", ORDERED)
def test_an_order_that_cuda_cannot_look_at(dtype, d, block, named):
    """Blocks that a wrong order names are right, however often it names them; a number that is no
    block stands for the last; the others are not touched."""
    of = Ordered(device_of("cuda"), dtype, d, block)
    o, lse = of.forward(lambda order: order)
    usual = [o, lse, *of.backward(o, lse, lambda order: order)]

    def wrong(order):
        return np.resize(named, order.shape)

    got = [*of.forward(wrong), *of.backward(o, lse, wrong)]
    of.device.synchronize()
    for i, (one, other) in enumerate(zip(usual, got, strict=True)):
        blocks = -(-one.shape[1] // block)
        met = np.arange(one.shape[1]) // block
        met = np.isin(met, [i if 0 <= i < blocks else blocks - 1 for i in named])
        np.testing.assert_array_equal(one[:, met], other[:, met])
        assert i < 2 or (other[:, ~met] == 7).all()  # o and lse begin as they are


@pytest.mark.parametrize(
    "wrong, message",
    [
        (lambda q, m: ops.attention(q, Tensor(np.ones((1, 32, 2, 9))), q), "attention"),
        (lambda q, m: ops.block_sparse_attention(q, q, q, BlockMask.local(64, 16, 16)), "64|32"),
        (lambda q, m: ops.attention(*[Tensor(np.ones((1, 4, 1, 257)))] * 3), "256"),
    ],
)
def test_errors(wrong, message):
    with pytest.raises(ValueError, match=message):
        wrong(Tensor(np.ones((1, 32, 2, 8))), BlockMask.local(32, 16, 16))


def calls_of_attention(q, qkv, angles, **options) -> dict:
    """Return calls by the op that their errors name, each with a mask of its own or none."""
    return {
        "attention": lambda: ops.attention(q, q, q, **options),
        "block_sparse_attention": lambda: ops.block_sparse_attention(
            q, q, q, **{"mask": BlockMask.dense(32, 16), **options}
        ),
        "qkv_attention": lambda: ops.qkv_attention(qkv, angles, angles, **options),
        "dilated_attention": lambda: ops.dilated_attention(q, q, q, (4,), (1,), **options),
    }


@pytest.mark.parametrize(
    "options, error, message",
    [
        ({"mask": np.ones((32, 32), bool)}, TypeError, "mask must be a BlockMask, not ndarray"),
        ({"mask": BlockMask.local(64, 16, 16)}, ValueError, "the mask is for 64 queries"),
        ({"mask": BlockMask(np.ones((3, 2, 2), bool), 16, 32)}, ValueError, "the mask is for 3 h"),
        ({"scale": "x"}, TypeError, "scale must be a number or None, but is 'x'"),
        ({"scale": np.nan}, ValueError, "scale must be finite in float32, but is nan"),
        ({"scale": -np.inf}, ValueError, "scale must be finite in float32, but is -inf"),
        ({"scale": 1e39}, ValueError, r"scale must be finite in float32, but is 1e\+39"),
        ({"scale": -3e38}, ValueError, r"scale must be finite in float32, but is -3e\+38"),
        ({"causal": "yes"}, TypeError, "causal must be True or False, but is 'yes'"),
        ({"causal": None}, TypeError, "causal must be True or False, but is None"),
    ],
)
def test_errors_of_options_name_the_op(options, error, message):
    q, qkv = Tensor(np.ones((1, 32, 2, 8))), Tensor(np.ones((1, 32, 2, 3, 8)))
    calls = calls_of_attention(q, qkv, np.ones((32, 2), np.float32), **options)
    if "mask" in options:
        del calls["dilated_attention"]
    for name, call in calls.items():
        with pytest.raises(error, match=f"^{name}: {message}"):
            call()


def test_options_of_numpy_are_taken():
    q, qkv = Tensor(draw(0, 1, 32, 2, 8)), Tensor(draw(1, 1, 32, 2, 3, 8))
    given = [(np.bool_(True), np.float32(0.5)), (True, 0.5)]
    made = [
        calls_of_attention(q, qkv, np.ones((32, 2), np.float32), causal=causal, scale=scale)
        for causal, scale in given
    ]
    for one, other in zip(*(calls.values() for calls in made)):
        np.testing.assert_array_equal(one().numpy(), other().numpy())


def test_a_scale_of_zero_weighs_all_keys_alike():
    """Zero is not taken for a missing scale."""
    q, qkv = Tensor(draw(0, 1, 32, 2, 8)), Tensor(draw(1, 1, 32, 2, 3, 8))
    made = [
        calls_of_attention(q, qkv, np.ones((32, 2), np.float32), scale=scale)
        for scale in (0, 0.0, 1e-30, None)
    ]
    for zero, also, tiny, default in zip(*(calls.values() for calls in made)):
        for one in (zero, also):
            np.testing.assert_allclose(one().numpy(), tiny().numpy(), atol=1e-6)
        assert np.abs(default().numpy() - zero().numpy()).max() > 1e-2


def test_the_module_refuses_the_same_masks(monkeypatch):
    """Includes a hook of the pattern, which is computed without the kernels."""
    layer, x = nn.Attention(32, 2), Tensor(draw(0, 1, 16, 32))
    rotary = tuple(_C.array(table) for table in nn.rotary_tables(16, 4))
    for hooks in (None, {"hook_q": ()}, {"hook_pattern": ()}):
        monkeypatch.setattr(layer, "_hooks", hooks)
        with pytest.raises(TypeError, match="ttention: mask must be a BlockMask, not ndarray"):
            layer(x, rotary, np.ones((16, 16), bool))
        with pytest.raises(ValueError, match="ttention: the mask is for 64 queries"):
            layer(x, rotary, BlockMask.local(64, 16, 16))


def test_too_few_keys_for_causal():
    q, k = Tensor(np.ones((1, 8, 1, 4))), Tensor(np.ones((1, 5, 1, 4)))
    with pytest.raises(ValueError, match="attention: causal needs .* 5 for 8; pass causal=False"):
        ops.attention(q, k, k)
    assert ops.attention(q, k, k, causal=False).shape == q.shape


def test_heads_without_dims(device):
    q = Tensor(np.zeros((1, 32, 2, 0)), device=device, requires_grad=True)
    for made in (
        ops.attention(q, q, q),
        ops.attention(q, q, q, mask=BlockMask.dense(32, 16)),
        ops.dilated_attention(q, q, q, (4,), (1,)),
    ):
        assert made.shape == q.shape
        made.sum().backward()
        assert q.grad.shape == q.shape


def test_the_modules_attention_is_the_same_computation():
    """nn.MultiHeadAttention on (B, H, T, D) agrees with ops.attention on (B, T, H, D)."""
    arrays = [draw(i, 2, 20, 3, 8) for i in range(3)]
    fused = ops.attention(*(Tensor(a) for a in arrays)).numpy()
    swapped = [Tensor(a.transpose(0, 2, 1, 3)) for a in arrays]
    result, _ = nn.MultiHeadAttention(dropout=0.0, causal=True)(*swapped)
    np.testing.assert_allclose(result.numpy().transpose(0, 2, 1, 3), fused, atol=2e-6)


def test_a_block_longer_than_the_sequence(device):
    """Whatever its length it is the one block; the CPU's loop over its tiles never ended."""
    results = []
    for block in (40, 2**31, 2**62, 2**63 - 1):
        mask = BlockMask(np.ones((1, 1), bool), block, 40)
        q, k, v = (Tensor(draw(i, 1, 40, 2, 8), device=device) for i in range(3))
        o = ops.block_sparse_attention(q, k, v, mask)
        o.backward()
        results.append([o.numpy(), *(x.grad.numpy() for x in (q, k, v))])
    for other in results[1:]:
        for one, two in zip(results[0], other):
            np.testing.assert_array_equal(one, two)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("keys", [2**45, 2**57, 2**58 - 1])
def test_more_keys_than_memory_could_hold(keys, dtype):
    """An array that repeats one key may have nearly 2^63 bytes; float32 copies of two would pass
    2^64. The backward's results cannot repeat, and are refused as they are."""
    one = _C.array(np.ones((1, 1, 1, 8), np.float32), dtype, device_of("cpu"))
    many = one.as_strided((1, keys if dtype == "bfloat16" else keys // 2, 1, 8), (0, 0, 0, 1))
    with pytest.raises(MemoryError, match="attention_fwd: k: .* keys of 8 dims are too many"):
        attended(_C.attention_fwd, one, many, many, 1.0, 0)
    o, lse = attended(_C.attention_fwd, one, one, one, 1.0, 0)
    with pytest.raises((MemoryError, ValueError), match="attention_bwd"):
        _C.attention_bwd(
            one, one, many, many, o, lse, 1.0, 0, None, None, one.copy(), many, many, None, None
        )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("block", [None, 64])
@pytest.mark.parametrize("half", [3, 8, 16])
def test_gradients_turn_back_where_they_are_written(half, block, dtype, device):
    """Gradients in a packed array, as the model's, equal those of attention without angles and then
    rotary, rounded once."""
    b, t, h, d = 2, 131, 3, 64
    angle = draw(1, t, half)
    cos, sin = (_C.array(x, device=device) for x in (np.cos(angle), np.sin(angle)))
    qkv = [_C.array(draw(i, b, t, h, d), dtype=dtype, device=device) for i in range(3)]
    dout = _C.array(draw(3, b, t, h, d), dtype=dtype, device=device)
    forward, backward, before, after = _C.attention_fwd, _C.attention_bwd, (), ()
    if block is not None:
        lists = BlockMask.local(t, 64, block).causal().lists(device)
        before, after = (*lists[:3], block), (*lists, block)
        forward, backward = _C.block_sparse_attention_fwd, _C.block_sparse_attention_bwd
    o, lse = attended(forward, *qkv, *before, 0.125, 1)
    found = []
    for angles in ((None, None), (cos, sin)):
        packed = _C.array(np.full((b, t, h, 3, d), np.nan), dtype=dtype, device=device)
        largest = _C.array(np.nan, "float32", device)
        last = *angles, *qkv_parts(packed), None, largest
        backward(dout, *qkv, o, lse, *after, 0.125, 1, *last)
        assert largest.item() == np.abs(packed.numpy().astype(np.float32)).max()
        if angles[0] is None:
            _C.rotary(packed, cos, sin, 2, -1.0)
        found.append(packed.numpy().astype(float))
    np.testing.assert_array_equal(found[0][..., 2, :], found[1][..., 2, :])
    bound = 0 if dtype == "float32" else 2**-7 * np.abs(found[0]).max()
    assert np.abs(found[0] - found[1]).max() <= bound


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("keys, at", [(400, 70), (400, 350), (200, 5)])
def test_a_key_of_nan_reaches_queries_from_its_64_on(keys, at, dtype, device):
    """With 200 keys the first 200 queries see none."""
    t = 400
    q, k, v, dout = (draw(i, 1, n, 2, 64) for i, n in enumerate((t, keys, keys, t)))
    k[0, at, 1] = np.nan
    at += t - keys  # the first query that sees it
    arrays = [_C.array(x, dtype=dtype, device=device) for x in (q, k, v, dout)]
    _o, _lse, (dq, _dk, _dv) = attended_both_ways(*arrays, 1 / 8)
    reached = np.isnan(dq.numpy()[0].astype(np.float32)).any(-1)
    assert not reached[:, 0].any() and not reached[: at // 64 * 64, 1].any()
    assert reached[at:, 1].all()


@pytest.mark.parametrize("value", [np.inf, np.nan])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("d", [64, 96])
def test_what_is_not_finite_is_the_largest(d, dtype, value, device):
    t, scale = 200, 1 / 8
    q, k, v, dout = (draw(i, 1, t, 2, d) for i in range(4))
    dout[0, 130, 1, 5] = value
    q, k, v, dout = (_C.array(x, dtype=dtype, device=device) for x in (q, k, v, dout))
    o, lse, gradients = attended_both_ways(q, k, v, dout, scale)
    largest = _C.array(1.0, "float32", device)
    _C.attention_bwd(dout, q, k, v, o, lse, scale, 1, None, None, *gradients, None, largest)
    assert np.isnan(largest.item())  # in dq, of infinity - infinity


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("block", [None, 64, 128])
@pytest.mark.parametrize("d", [64, 128])
def test_backward_of_lse_minus_infinity_adds_nothing(d, block, dtype, device):
    """A query without a key has weights of 0, whatever its scores: as if its dout were 0."""
    t, alone, scale = 200, [3, 70, 199], 1 / 8
    q, k, v, dout = (draw(i, 1, t, 2, d) for i in range(4))
    q, k, v = (_C.array(x, dtype=dtype, device=device) for x in (q, k, v))
    lists = ()
    if block is not None:
        lists = (*BlockMask.local(t, 64, block).causal().lists(device), block)
    found = []
    for rows in (dout, np.where(np.isin(np.arange(t), alone)[:, None, None], 0, dout)):
        rows = _C.array(rows, dtype=dtype, device=device)
        o, lse, gradients = attended_both_ways(q, k, v, rows, scale, lists=lists)
        if not found:
            lse = lse.numpy()
            lse[..., alone] = -np.inf
            last = scale, 1, None, None, *gradients, None, None
            lse = _C.array(lse, device=device)
            backward = _C.block_sparse_attention_bwd if lists else _C.attention_bwd
            backward(rows, q, k, v, o, lse, *lists, *last)
        found.append([x.numpy() for x in gradients])
    for name, got, want in zip(("dq", "dk", "dv"), *found):
        np.testing.assert_array_equal(got, want, name)


@pytest.mark.parametrize("compact", [True, False])
def test_a_projection_may_be_rotated_in_its_place(device, compact):
    """The same bits, gradients too. What is no array of its own is copied all the same."""
    cos, sin = (_C.array(draw(i, 9, 2), device=device) for i in (1, 2))
    values = draw(3, 2, 9, 9, 3, 8).astype(np.float32)  # as many heads as tokens
    found = []
    for overwrite in (False, True):
        leaf = Tensor(values, device=device, requires_grad=True)
        qkv = leaf * 1.0 if compact else ops.permute(leaf * 1.0, (0, 2, 1, 3, 4))
        before = qkv.numpy().copy()
        out = ops.qkv_attention(qkv, cos, sin, overwrite=overwrite)
        out.sum().backward()
        found.append((out.numpy(), leaf.grad.numpy(), qkv.numpy(), before))
    for one, other in zip(found[0][:2], found[1][:2]):
        np.testing.assert_array_equal(one, other)
    np.testing.assert_array_equal(found[0][2], found[0][3])
    assert np.array_equal(found[1][2], found[1][3]) != compact


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("block", [None, 64, 128])
@pytest.mark.parametrize("d", [64, 128])
def test_scores_of_minus_infinity_and_ten_thousand(d, block, dtype, device):
    """Against float64. Keys of -inf weigh nothing (head 0), queries of -inf see nothing (head 1), a
    score of 1e4 takes all (head 2). What is infinite has no gradient; the other gradients are
    right."""
    r, scale, t = rounder(dtype), 1 / 4, 200
    q, k, v, dout = (r(draw(i, 1, t, 3, d)) for i in range(4))
    for x in (q, k):
        x[..., 0] = np.abs(x[..., 0]) + 1  # so that no score is +inf
    rows, far = np.s_[0, 3::7], np.s_[0, 5::50]
    k[(*rows, 0, 0)] = -np.inf
    q[(*rows, 1, 0)] = -np.inf
    q[..., 2, 0], k[..., 2, 0] = 256, 0
    k[(*far, 2, 0)] = 156 - 4 * np.arange(k[(*far, 2, 0)].size)  # the first that is seen takes all
    see = visible(t, t, True)
    lists = ()
    if block is not None:
        mask = BlockMask.local(t, 64, block).causal()
        lists, see = (*mask.lists(device), block), see & mask.to_dense()
    arrays = [_C.array(x, dtype=dtype, device=device) for x in (q, k, v)]
    dout_array = _C.array(dout, dtype=dtype, device=device)
    o, lse, gradients = attended_both_ways(*arrays, dout_array, scale, lists=lists)
    exact, naive = (softmax_attention(f, q, k, v, scale, see) for f in (exactly, r))
    assert_within(o.numpy(), exact["o"], naive["o"], dtype, t, "o")
    assert_within(lse.numpy(), exact["lse"], naive["lse"], "float32", t, "lse")
    np.testing.assert_array_equal(o.numpy()[(*rows, 1)], 0)
    assert np.isneginf(lse.numpy()[0, 1, 3::7]).all()
    given = o.numpy().astype(float), lse.numpy().astype(float)
    with np.errstate(invalid="ignore"):
        exact, naive = (
            softmax_attention_bwd(f, dout, q, k, v, *given, scale, see) for f in (exactly, r)
        )
    dq, dk, dv = (x.numpy() for x in gradients)
    finite = np.isfinite(k[..., 0])  # of a key of -inf no kernel says what its gradients are
    for name, got, sound in (
        ("dq", dq[..., 1:, :], np.s_[..., 1:, :]),
        ("dk", dk[finite][..., 1:], (finite, np.s_[1:])),
        ("dv", dv[finite], finite),
    ):
        # of a score of 1e4 float32 knows 1e4 times less than of 1
        assert_within(got, exact[name][sound], naive[name][sound], dtype, 1e9, name)
