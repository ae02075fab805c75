"""The products of a step of generation on the CPU (emulated.h), against float64."""

import numpy as np
import pytest
from test_hopper_linear import both_forms, both_types, close, drawn
from words import call, from_16, poison

from needle.testing.elementwise import gelu, gelu_tanh

pytestmark = pytest.mark.slow


@both_types
@pytest.mark.parametrize(
    "n, k, m",
    [(1, 8, 8), (2, 264, 72), (3, 512, 24), (4, 1288, 16)]
    + [(1, 8, 384), (2, 200, 1000), (4, 72, 520)]  # several tiles a block
    + [(1, 7288, 24), (4, 7688, 16)],  # more of w than shared memory has room for
)
def test_output(compiled, n, k, m, is_half):
    x, w, b, r = drawn(is_half, ((n, k), 1), ((k, m), k**-0.5), ((m,), 1), ((n, m), 1))
    wanted = from_16(x, is_half) @ from_16(w, is_half) + from_16(b, is_half) + from_16(r, is_half)
    for seed in 1, 4:  # of the warps that are slow
        y = poison((n, m))
        call(compiled("few", "output"), x, w, b, r, y, n, k, m, is_half, seed)
        close(y, wanted, is_half, "y")


@both_types
@pytest.mark.parametrize("n, k, m", [(1, 8, 384), (2, 200, 1000), (3, 72, 520), (4, 64, 4000)])
def test_output_greedy(compiled, n, k, m, is_half):
    """The first largest of what is stored, among many that are."""
    one = np.float16(1).view(np.uint16) if is_half else np.uint16(0x3F80)
    rows = np.random.default_rng(1).permutation(k)[:n]
    x, w = np.zeros((n, k), np.uint16), np.full((k, m), one)
    x[np.arange(n), rows] = one
    first = np.array([m - 1, m // 2, 0, m // 3])[:n]
    for row, column in zip(rows, first):
        w[row, :column] = one ^ 0x8000  # -1
    y, tokens, positions = poison((n, m)), np.full(n, 7, np.int32), np.arange(n, dtype=np.int32)
    call(compiled("few", "greedy"), x, w, y, tokens, positions, n, k, m, is_half, 3)
    np.testing.assert_array_equal(y, w[rows])
    assert tokens.tolist() == first.tolist() and positions.tolist() == [*range(1, n + 1)]


@both_types
@both_forms
@pytest.mark.parametrize(
    "n, c, p, m",
    [(1, 136, 24, 8), (4, 264, 8, 40), (5, 8, 24, 8), (8, 512, 8, 72), (16, 136, 48, 40)]
    + [(17, 776, 8, 8), (31, 1024, 24, 64)],
)
def test_projections(compiled, n, c, p, m, tanh, is_half):
    x, norms = drawn(is_half, ((n, c), 1), ((4, c), 1))
    w_qkv, b_qkv = drawn(is_half, ((c, p), c**-0.5), ((p,), 1))
    w1, b1 = drawn(is_half, ((c, m), c**-0.5), ((m,), 1))
    packed, g = poison((n, p)), poison((n, m))
    numbers = n, c, p, m, tanh, is_half, 1
    call(compiled("few", "projections"), x, norms, w_qkv, b_qkv, w1, b1, packed, g, *numbers)
    v, scales = from_16(x, is_half), from_16(norms, is_half)
    h = (v - v.mean(1, keepdims=True)) / np.sqrt(v.var(1, keepdims=True) + 1e-5)
    y1, y2 = (h * scales[i] + scales[i + 1] for i in (0, 2))
    pre = y1 @ from_16(w_qkv, is_half) + from_16(b_qkv, is_half)
    up = y2 @ from_16(w1, is_half) + from_16(b1, is_half)
    unit = 2.0**-11 if is_half else 2.0**-8  # norms are rounded, too
    for got, wanted in (packed, pre), (g, (gelu_tanh if tanh else gelu)(up)):
        off = np.abs(from_16(got, is_half) - wanted) / (unit * (1 + np.abs(wanted)))
        assert off.max() < 3, (off.max(), np.unravel_index(off.argmax(), off.shape))
