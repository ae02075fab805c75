"""The Hopper product with GELU on the CPU (emulated.h), against float64: its logic is tried."""

import ctypes

import numpy as np
import pytest
from cases.elementwise import gelu, gelu_grad, gelu_tanh, gelu_tanh_grad
from words import from_16, poison, to_16

# (rows, depth, columns), on three processors: edges in each direction; blocks of several tiles, of
# parts of two columns of tiles, of none; depths of both files; odd and even shares.
SHAPES = [
    (1, 8, 8),
    (128, 64, 128),
    (130, 72, 136),
    (500, 520, 392),
    (700, 512, 264),
    (1100, 200, 128),
    (260, 1096, 136),
    (64, 8, 1000),
]


def drawn(is_half: int, *shapes_and_stds) -> list[np.ndarray]:
    rng = np.random.default_rng(7)
    return [to_16(rng.standard_normal(shape) * std, is_half) for shape, std in shapes_and_stds]


def call(function, arrays, *numbers) -> None:
    said = function(*(ctypes.c_void_p(array.ctypes.data) for array in arrays), *numbers)
    assert said == b"", said


def close(bits: np.ndarray, want: np.ndarray, is_half: int, what: str) -> np.ndarray:
    """Rounded once to the type, but for what the order of sums in float32 moves."""
    got = from_16(bits, is_half)
    assert np.isfinite(got).all(), f"{what}: {np.argwhere(~np.isfinite(got))[:3]}"
    unit = 2.0**-11 if is_half else 2.0**-8
    off = np.abs(got - want) / (unit * np.abs(want) + 1e-5)
    assert off.max() <= 1.01, (
        f"{what}: {off.max():.3g} at {np.unravel_index(off.argmax(), off.shape)}"
    )
    return got


@pytest.mark.parametrize("is_half", [0, 1], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("tanh", [0, 1], ids=["erf", "tanh"])
@pytest.mark.parametrize("n, k, m", SHAPES)
def test_forward(compiled, n, k, m, tanh, is_half):
    x, w, b = drawn(is_half, ((n, k), 1), ((k, m), k**-0.5), ((m,), 1))
    want = from_16(x, is_half) @ from_16(w, is_half) + from_16(b, is_half)
    beside = 24 if tanh else 0  # columns of somebody else behind each row of y
    pre, y = poison((n, m)), poison((n, m + beside))
    around = y[:, m:].copy()
    numbers = n, k, m, m + beside, tanh, is_half, 1
    call(compiled("linear", "forward"), (x, w, b, pre, y), *numbers)
    rounded = close(pre, want, is_half, "pre")
    close(y[:, :m], (gelu_tanh if tanh else gelu)(rounded), is_half, "y")
    np.testing.assert_array_equal(y[:, m:], around)


@pytest.mark.parametrize("is_half", [0, 1], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("tanh", [0, 1], ids=["erf", "tanh"])
@pytest.mark.parametrize("n, m, k", SHAPES)
def test_backward(compiled, n, m, k, tanh, is_half):
    dy, w, pre = drawn(is_half, ((n, m), 1), ((k, m), m**-0.5), ((n, k), 1))
    dpre, db = poison((n, k)), np.full(k, 3, np.float32)
    call(compiled("linear", "backward"), (dy, w, pre, dpre, db), n, m, k, tanh, is_half, 1)
    product = from_16(dy, is_half) @ from_16(w, is_half).T
    product = from_16(to_16(product, is_half), is_half)
    derivative = (gelu_tanh_grad if tanh else gelu_grad)(from_16(pre, is_half))
    got = from_16(dpre, is_half)
    # Twice rounded; a product near the middle of two numbers may have gone the other way.
    unit = 2.0**-11 if is_half else 2.0**-8
    bound = 2.5 * unit * np.abs(product * derivative) + unit * np.abs(product) + 1e-5
    off = np.abs(got - product * derivative) / bound
    assert np.isfinite(got).all() and off.max() <= 1, np.unravel_index(off.argmax(), off.shape)
    np.testing.assert_allclose(db, 3 + got.sum(0), rtol=1e-5, atol=1e-4)


def test_rows_that_run_backwards_are_left_to_others(compiled):
    x, w, b = drawn(0, ((130, 64), 1), ((64, 72), 0.1), ((72,), 1))
    pre, y = poison((130, 72)), poison((130, 72))
    arrays = (ctypes.c_void_p(array.ctypes.data) for array in (x, w, b, pre, y[-1]))
    assert compiled("linear", "forward")(*arrays, 130, 64, 72, -72, 0, 0, 1) == b"not served"


def gelu_inputs() -> np.ndarray:
    """Every bfloat16 from 2^-10 to 16 and its negative, and what is special."""
    words = np.arange(0x3A80, 0x4181, dtype=np.uint16)
    special = to_16(np.array([0, 17, 300, 1e38, np.inf, np.nan]), 0)
    words = np.concatenate([words, special])
    words = np.concatenate([words, words ^ 0x8000])
    return np.concatenate([words, np.zeros(-len(words) % 8, np.uint16)])


def test_gelu_of_every_number(compiled):
    """Rounded once, but for 2^-18 of it, or 1e-12. Of infinity the limits."""
    b = gelu_inputs()
    x, w = np.zeros((1, 8), np.uint16), np.zeros((8, len(b)), np.uint16)
    pre, y = poison((1, len(b))), poison((1, len(b)))
    call(compiled("linear", "forward"), (x, w, b, pre, y), 1, 8, len(b), len(b), 0, 0, 1)
    at, got = from_16(b, 0), from_16(y[0], 0)
    np.testing.assert_array_equal(from_16(pre[0], 0), at)
    finite = np.isfinite(at)
    want = gelu(at[finite])
    off = np.abs(got[finite] - want) - 2.0**-8 * 1.01 * np.abs(want)
    assert (off <= 1e-12).all(), at[finite][off.argmax()]
    for number, limit in ((np.inf, np.inf), (-np.inf, 0), (np.nan, np.nan)):
        found = got[np.isnan(at) if np.isnan(number) else at == number]
        np.testing.assert_array_equal(found, np.full(found.shape, limit))


def test_gelu_grad_of_every_number(compiled):
    numbers = gelu_inputs()
    dy, w = np.zeros((1, 8), np.uint16), np.zeros((len(numbers), 8), np.uint16)
    dy[0, 0] = w[:, 0] = to_16(np.ones(1), 0)[0]
    dpre, db = poison((1, len(numbers))), np.zeros(len(numbers), np.float32)
    pre = numbers[None].copy()
    call(compiled("linear", "backward"), (dy, w, pre, dpre, db), 1, 8, len(numbers), 0, 0, 1)
    at, got = from_16(numbers, 0), from_16(dpre[0], 0)
    finite = np.isfinite(at)
    want = gelu_grad(at[finite])
    off = np.abs(got[finite] - want) - 2.0**-8 * 1.01 * np.abs(want)
    assert (off <= 1e-6).all(), at[finite][off.argmax()]
    for number, limit in ((np.inf, 1), (-np.inf, 0), (np.nan, np.nan)):
        found = got[np.isnan(at) if np.isnan(number) else at == number]
        np.testing.assert_array_equal(found, np.full(found.shape, limit))


def test_when_threads_run_changes_no_bit(compiled):
    dy, w, pre = drawn(0, ((500, 520), 1), ((392, 520), 0.05), ((500, 392), 1))
    results = []
    for seed in range(4):
        dpre, db = poison((500, 392)), np.zeros(392, np.float32)
        call(compiled("linear", "backward"), (dy, w, pre, dpre, db), 500, 520, 392, 1, 0, seed)
        results.append((dpre.tobytes(), db.tobytes()))
    assert results == results[:1] * 4
