"""The Hopper attention kernels on the CPU (emulated.h), against softmax attention in float64. Needs
a C++ compiler and the toolkit's headers, and no GPU: these tests check their logic."""

import ctypes
import itertools
import math

import numpy as np
import pytest
from words import call, from_16, poison, to_16

import needle as ndl
from needle.block_mask import BlockMask
from needle.testing.attention import (
    by_heads,
    rotated_back,
    softmax_attention,
    softmax_attention_bwd,
    visible,
)

pytestmark = pytest.mark.slow
NOTHING, NO_LSE = 0x7FC1, 12345  # what stands where nothing is written


class Given(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("shape", ctypes.c_int64 * 4),
        ("strides", ctypes.c_int64 * 4),
    ]

    @staticmethod
    def of(array: np.ndarray) -> "Given":
        strides = [step // array.itemsize for step in array.strides]
        return Given(
            array.ctypes.data, (ctypes.c_int64 * 4)(*array.shape), (ctypes.c_int64 * 4)(*strides)
        )


class Lists(ctypes.Structure):
    _fields_ = [(name, ctypes.c_void_p) for name in ("offsets", "entries", "order")]
    _fields_ += [(name, ctypes.c_int64) for name in ("groups", "points", "count", "block")]


def lists_of(mask: BlockMask | None, transposed: bool, change=None) -> tuple[Lists, object]:
    """(for C, what must live as long); `change` makes another order of the mask's."""
    if mask is None:
        return Lists(), None
    lists = [a.numpy() for a in mask.lists(ndl.cpu())][3 if transposed else 0 :][:3]
    if change is not None:
        lists[2] = np.ascontiguousarray(change(lists[2]), np.int32)
    offsets, entries, _ = lists
    pointers = [a.ctypes.data for a in lists]
    return Lists(*pointers, *offsets.shape, entries.size, mask.block), lists


# ---- operands ------------------------------------------------------------------------------------


class Problem:
    """Random operands of `sizes` (B, T, S, H, D); block: of the mask, 0 for none, of as many
    `masks`. `packed`: q, k and v lie in one array, as in the model. `rise`: how many powers of two
    heavier a key weighs 64 keys on; queries and keys then differ less. `low`: how far below zero
    all scores lie, about. `half`: as many angles a position rotate dq and dk back. `infinite`: some
    keys of head 0 and some queries of head 1 are -inf, and all their scores."""

    def __init__(
        self, sizes, causal, block=0, masks=1, is_half=False, packed=False, seed=0, rise=None,
        low=0, half=None, infinite=False,
    ):  # fmt: skip
        B, T, S, H, D = sizes
        rng = np.random.default_rng(seed)
        self.causal, self.is_half, self.mask = causal, is_half, None
        if block:
            shape = (masks, -(-T // block), -(-S // block))
            self.mask = BlockMask(rng.random(shape) < 0.5, block, T, S)
        self.scale = D**-0.5
        draw = lambda *shape: to_16(rng.standard_normal(shape), is_half)
        whole = draw(B, T, H, 3, D) if packed else None
        self.q, self.k, self.v = (
            whole[:, :, :, i] if packed else draw(B, n, H, D) for i, n in enumerate((T, S, S))
        )
        self.dout = draw(B, T, H, D)
        q, k, v, dout = (from_16(x, is_half) for x in (self.q, self.k, self.v, self.dout))
        if rise is not None:
            q, k = q / 4, k / 4
            q[..., 0] = 8
            ramp = np.arange(S)[None, :, None] - S // 2
            k[..., 0] = (rise / 64 * math.log(2) / self.scale / 8) * ramp
        if low:
            q[..., 0], k[..., 0] = -low / self.scale, 1  # dS sums to 0: times k it stays small
        if infinite:
            q[..., 0], k[..., 0] = abs(q[..., 0]) + 1, abs(k[..., 0]) + 1
            k[:, 3::7, 0, 0] = q[:, 3::7, 1, 0] = -np.inf
        if rise is not None or low or infinite:
            self.q, self.k = to_16(q, is_half), to_16(k, is_half)
            q, k = from_16(self.q, is_half), from_16(self.k, is_half)
        see = visible(T, S, causal)
        if block:
            see = see & self.mask.to_dense().reshape(-1, T, S)
        exactly = lambda x: x
        with np.errstate(invalid="ignore"):  # infinities times weights of 0
            found = softmax_attention(exactly, q, k, v, self.scale, see)
            self.o, self.lse = found["o"], found["lse"]
            gradients = softmax_attention_bwd(
                exactly, dout, q, k, v, self.o, self.lse, self.scale, see
            )
        self.delta = by_heads(dout * self.o).sum(-1)
        self.half, self.angles = half, (None, None)
        if half is not None:
            angle = rng.uniform(-3, 3, (T, half))
            self.angles = np.float32(np.cos(angle)), np.float32(np.sin(angle))
        gradients = rotated_back(exactly, gradients, *self.angles)
        self.dq, self.dk, self.dv = (gradients[name] for name in ("dq", "dk", "dv"))

    def rotation(self) -> tuple:
        """cos, sin and half for C."""
        return *self.angles, self.half or 0

    def blocks(self, transposed: bool, change=None):
        mask = self.mask.causal() if self.mask is not None and self.causal else self.mask
        return lists_of(mask, transposed, change)

    def stats(self) -> np.ndarray:
        """Return them as attention_stats_kernel writes them."""
        lse = np.where(np.isinf(self.lse), np.inf, self.lse / math.log(2))
        return np.float32(np.stack((lse, self.delta), -1))

    def close(self, bits: np.ndarray, want: np.ndarray, what: str) -> None:
        got = from_16(bits, self.is_half)
        assert np.isfinite(got).all(), f"{what}: {np.argwhere(~np.isfinite(got))[:3]}"
        bound = (2e-3 if self.is_half else 1.6e-2) * max(1.0, np.abs(want).max())
        off = np.abs(got - want)
        assert off.max() <= bound, (
            f"{what}: {off.max():.3g} off at {np.unravel_index(off.argmax(), off.shape)}"
        )


DENSE = [  # sizes, causal
    ((1, 200, 200, 1, 64), True),
    ((1, 500, 500, 2, 64), True),
    ((2, 31, 31, 2, 64), True),
    ((1, 1, 1, 1, 64), False),
    ((1, 193, 400, 2, 48), True),
    ((1, 300, 257, 1, 64), False),
    ((1, 3, 20, 1, 64), False),
    ((1, 330, 150, 2, 64), True),  # queries without keys
    ((1, 400, 400, 1, 8), True),
    ((1, 300, 300, 1, 128), True),
    ((2, 130, 300, 1, 96), False),
    ((1, 200, 200, 5, 64), True),  # sections of 2, 2 and 1 heads
    ((3, 150, 150, 1, 128), False),
    ((1, 384, 400, 2, 64), False),  # tiles of two consumers, since those of three would idle
    ((1, 250, 900, 2, 64), True),
]
SPARSE = [  # queries, keys, block, causal
    (512, 512, 128, True),
    (450, 450, 128, True),
    (450, 700, 256, False),
    (450, 450, 64, True),
    (400, 400, 192, True),
]
PROBLEMS = [dict(sizes=sizes, causal=causal, seed=i) for i, (sizes, causal) in enumerate(DENSE)]
PROBLEMS += [
    dict(sizes=(1, T, S, 2, D), causal=causal, seed=i, block=block, masks=1 + i % 2)
    for i, (T, S, block, causal) in enumerate(SPARSE)
    for D in (64, 128)
]
PROBLEMS += [
    dict(sizes=(1, 200, 200, 5, D), causal=True, block=block, masks=5)
    for block, D in itertools.product((64, 128), (64, 128))
]
PROBLEMS += [dict(sizes=(2, 130, 130, 3, 64), causal=True, packed=True)]
# Pairs of dims (i, i + 8) and (i, i + 16), the last positions in the middle of a tile.
ROTATED = [
    dict(sizes=(2, T, T, 2, D), causal=causal, half=half, packed=True)
    for half in (8, 16)
    for T, D in ((1, 64), (150, 64), (257, 40), (200, 128), (130, 96))
    for causal in (False, True)
]
ROTATED += [
    dict(sizes=(1, 450, 450, 2, D), causal=True, half=half, is_half=True, block=block, masks=2)
    for half, block, D in itertools.product((8, 16), (64, 128), (64, 128))
]
# The forward's weights follow scores 2^15 above them: never (the first two), seldom, in each tile
# of keys, and from weights that are infinite.
RISING = [
    dict(sizes=(1, T, T, 1, D), causal=True, is_half=is_half, rise=rise, block=block)
    for T, D, rise in (
        (450, 64, -5.0),
        (450, 64, 1.5),
        (450, 128, 5.0),
        (450, 64, 30.0),
        (200, 128, 135.0),
    )
    for is_half, block in itertools.product((False, True), (0, 64, 128))
]
# Rows beyond the last key have score 0, which would weigh e^low.
LOW = [
    dict(sizes=(1, 100, 100, 1, 64), causal=causal, is_half=is_half, low=low, block=block)
    for is_half, low in ((False, 15), (False, 95), (True, 15))
    for block, causal in itertools.product((0, 64, 128), (False, True))
]
INFINITE = [
    dict(sizes=(1, 200, 200, 2, D), causal=causal, is_half=D == 128, infinite=True, block=block)
    for block, D, causal in itertools.product((0, 64, 128), (64, 128), (False, True))
]


def name_of(given: dict) -> str:
    return "-".join(f"{name}{value}".replace(", ", "x") for name, value in given.items())


# ---- the kernels ---------------------------------------------------------------------------------


def forward(compiled, p: Problem, change=None, o=None, lse=None) -> tuple[np.ndarray, np.ndarray]:
    """o and lse. o: where it shall lie. lse: of other keys, whose result o is."""
    joins = lse is not None
    o = poison(p.dout.shape) if o is None else o
    lse = np.full(p.lse.shape, NO_LSE, np.float32) if lse is None else lse
    lists, _kept = p.blocks(False, change)
    call(
        compiled("forward", "forward"),
        *(ctypes.byref(Given.of(x)) for x in (p.q, p.k, p.v, o)), lse,
        ctypes.byref(lists), int(p.causal), int(joins), ctypes.c_double(p.scale), int(p.is_half), 1,
    )  # fmt: skip
    return o, lse


def backward(
    compiled, p: Problem, change=None, sums=None, largest=None, into=None, joins=False
) -> list[np.ndarray]:
    """dq, dk, dv; and `sums` of 64 rows each and the bits of the `largest` magnitude, where those
    are given. into: where they shall lie, or `joins`: be added to."""
    gradients = into or [poison(x.shape) for x in (p.q, p.k, p.v)]
    lists, _kept = p.blocks(False, change)
    transposed, _kept_too = p.blocks(True, change)
    call(
        compiled("backward", "backward"),
        *(ctypes.byref(Given.of(x)) for x in (p.q, p.k, p.v, p.dout, *gradients)),
        p.stats(), ctypes.byref(lists), ctypes.byref(transposed), *p.rotation(), sums, largest,
        int(p.causal), int(joins), ctypes.c_double(p.scale), int(p.is_half), 1,
    )  # fmt: skip
    return gradients


@pytest.mark.parametrize("given", PROBLEMS + RISING + LOW + INFINITE, ids=name_of)
def test_forward(compiled, given):
    p = Problem(**given)
    o, lse = forward(compiled, p)
    p.close(o, p.o, "o")
    np.testing.assert_allclose(lse, p.lse, atol=1e-4)


def test_rows_that_end_within_16_bytes_are_for_other_kernels(compiled):
    """The copy engine would write the beginning of what lies behind them."""
    p = Problem(sizes=(1, 70, 70, 2, 100), causal=True)
    for name in ("q", "k", "v"):
        rows = getattr(p, name)
        wide = np.zeros((*rows.shape[:3], 104), np.uint16)
        wide[..., :100] = rows
        setattr(p, name, wide[..., :100])
    with pytest.raises(AssertionError, match="not served"):
        forward(compiled, p, o=np.zeros((1, 70, 2, 104), np.uint16)[..., :100])


@pytest.mark.parametrize("given", PROBLEMS + LOW + ROTATED, ids=name_of)
def test_backward(compiled, given):
    """Sums over 64 rows of a head are taken before rounding: compared with sums of rounded rows."""
    p = Problem(**given)
    b, t, h, d = p.q.shape
    tiles, has_sums = -(-t // 64), p.k.shape[1] == t
    sums = np.full((b, tiles, h, 3, d), np.nan, np.float32) if has_sums else None
    largest = np.zeros(1, np.uint32)
    gradients = backward(compiled, p, None, sums, largest)
    for name, got in zip(("dq", "dk", "dv"), gradients):
        p.close(got, getattr(p, name), name)
    magnitudes = [np.abs(from_16(got, p.is_half)).max() for got in gradients]
    assert largest.view(np.float32)[0] == max(magnitudes)
    for i, got in enumerate(gradients if has_sums else ()):
        rows = np.zeros((b, 64 * tiles, h, d))
        rows[:, :t] = from_16(got, p.is_half)
        rows = rows.reshape((b, tiles, 64, h, d))
        rounding = np.abs(rows).sum(2) * 2.0 ** (-11 if p.is_half else -8) + 1e-6
        assert (np.abs(sums[:, :, :, i] - rows.sum(2)) <= rounding).all()


JOINED = [i for i, given in enumerate(PROBLEMS) if "block" not in given]


@pytest.mark.parametrize("is_half", [False, True])
@pytest.mark.parametrize("i", JOINED, ids=lambda i: name_of(PROBLEMS[i]))
def test_results_of_other_keys_are_joined(compiled, i, is_half):
    """Every seventh query saw no key before; o is no number there. Gradients are added to."""
    p, rng = Problem(**{**PROBLEMS[i], "is_half": is_half}), np.random.default_rng(i)
    before = rng.standard_normal(p.lse.shape).astype(np.float32) + 4
    before[:, :, 3::7] = -np.inf
    o = to_16(rng.standard_normal(p.o.shape), is_half)
    with np.errstate(invalid="ignore"):  # no key at all
        total = np.logaddexp(before, p.lse)
        shares = [by_heads(np.exp(x - total)[..., None]) for x in (before, p.lse)]
    wanted = sum(np.nan_to_num(s) * x for s, x in zip(shares, (from_16(o, is_half), p.o)))
    o[:, 3::7] = NOTHING
    forward(compiled, p, o=o, lse=before)
    p.close(o, wanted, "o")
    np.testing.assert_allclose(before, total, atol=1e-4)
    into = [to_16(rng.standard_normal(x.shape), is_half) for x in (p.q, p.k, p.v)]
    wanted = [from_16(x, is_half) + getattr(p, n) for x, n in zip(into, ("dq", "dk", "dv"))]
    for name, got, want in zip(
        ("dq", "dk", "dv"), backward(compiled, p, None, None, None, into, True), wanted
    ):
        p.close(got, want, name)


def test_a_key_of_nan_and_queries_without_keys(compiled):
    p = Problem((1, 330, 150, 2, 64), True)  # the first 180 queries see no key
    p.k[0, 5] = poison(p.k[0, 5].shape)
    dq = from_16(backward(compiled, p)[0], False)
    assert (dq[:, :128] == 0).all() and np.isnan(dq[:, 192:]).all()


def neighbours(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(an array, its view with these values): as in dilated attention each head begins a token
    after the one before, and has every H-th."""
    B, T, H, D = values.shape
    whole = np.full((B, T * H, H, D), NOTHING, np.uint16)
    batch, time, head, last = whole.strides
    strides = (batch, H * time, time + head, last)
    view = np.lib.stride_tricks.as_strided(whole, values.shape, strides)
    view[...] = values
    return whole, view


@pytest.mark.parametrize("D", [48, 64, 128])
def test_views_of_neighbouring_heads(compiled, D):
    """Operands and results; memory between the rows is not touched."""
    p = Problem((2, 150, 150, 3, D), True)
    p.q, p.k, p.v, p.dout = (neighbours(x)[1] for x in (p.q, p.k, p.v, p.dout))
    written = {name: neighbours(poison(p.q.shape)) for name in ("o", "dq", "dk", "dv")}
    o, *gradients = (view for _, view in written.values())
    forward(compiled, p, o=o)
    backward(compiled, p, into=gradients)
    for name, (whole, view) in written.items():
        p.close(view, getattr(p, name), name)
        view[...] = NOTHING
        assert (whole == NOTHING).all(), f"{name}: more was written than its rows"


def written(compiled, p: Problem, way: str, change=None) -> list[np.ndarray]:
    """Results of a kernel, (B, rows, ...) of its own rows."""
    if way == "forward":
        o, lse = forward(compiled, p, change)
        return [o, lse.transpose(0, 2, 1)]
    dq, dk, dv = backward(compiled, p, change)
    return [dk, dv] if way == "dkdv" else [dq]


@pytest.mark.parametrize("block, heads", [(64, 2), (128, 1), (192, 3)])
@pytest.mark.parametrize("way", ["forward", "dq", "dkdv"])
def test_the_order_of_work(compiled, way, block, heads):
    """Any order gives the same bits. Of a wrong one the blocks that it names are right, however
    often it names them; what is no block stands for the last; the others are not touched."""
    p = Problem((1, 700, 700, heads, 64), True, block, heads, seed=5)
    blocks = -(-700 // block)
    shuffle = np.random.default_rng(6).permuted
    usual = written(compiled, p, way)
    for change in (lambda order: order[:, ::-1], lambda order: shuffle(order, axis=1)):
        for one, other in zip(usual, written(compiled, p, way, change)):
            np.testing.assert_array_equal(one, other)
    for named in ([1], [0, 2], [99, 1], [-1, 0], [2**31 - 1, -(2**31)]):
        wrong = np.resize(named, (heads, blocks))
        rows = np.arange(700) // block
        met = np.isin(rows, [i if 0 <= i < blocks else blocks - 1 for i in named])
        for one, other in zip(usual, written(compiled, p, way, lambda _, wrong=wrong: wrong)):
            np.testing.assert_array_equal(one[:, met], other[:, met])
            assert (other[:, ~met] == (NO_LSE if other.dtype == np.float32 else NOTHING)).all()
