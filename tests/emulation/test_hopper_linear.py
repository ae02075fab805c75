"""The Hopper product with GELU on the CPU (emulated.h), against float64: its logic is tried."""

import numpy as np
import pytest
from words import answer, call, from_16, poison, to_16

from needle.testing.attention import rotary
from needle.testing.elementwise import gelu, gelu_grad, gelu_tanh, gelu_tanh_grad

pytestmark = pytest.mark.slow

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


both_types = pytest.mark.parametrize("is_half", [0, 1], ids=["bfloat16", "float16"])
both_forms = pytest.mark.parametrize("tanh", [0, 1], ids=["erf", "tanh"])


@both_types
@both_forms
@pytest.mark.parametrize("n, k, m", SHAPES)
def test_forward(compiled, n, k, m, tanh, is_half):
    x, w, b = drawn(is_half, ((n, k), 1), ((k, m), k**-0.5), ((m,), 1))
    pre = from_16(x, is_half) @ from_16(w, is_half) + from_16(b, is_half)
    beside = 24 if tanh else 0  # foreign columns after each row of y
    dgelu, y = poison((n, m)), poison((n, m + beside))
    around = y[:, m:].copy()
    numbers = n, k, m, m + beside, tanh, is_half, 1
    call(compiled("linear", "forward"), x, w, b, dgelu, y, *numbers)
    close(y[:, :m], (gelu_tanh if tanh else gelu)(pre), is_half, "y")
    close(dgelu, (gelu_tanh_grad if tanh else gelu_grad)(pre), is_half, "dgelu")
    np.testing.assert_array_equal(y[:, m:], around)


@both_types
@pytest.mark.parametrize("n, m, k", SHAPES)
def test_backward(compiled, n, m, k, is_half):
    dy, w, dgelu = drawn(is_half, ((n, m), 1), ((k, m), m**-0.5), ((n, k), 1))
    dpre, db = poison((n, k)), np.full(k, 3, np.float32)
    call(compiled("linear", "backward"), dy, w, dgelu, dpre, db, n, m, k, is_half, 1)
    want = from_16(dy, is_half) @ from_16(w, is_half).T * from_16(dgelu, is_half)
    got = close(dpre, want, is_half, "dpre")
    np.testing.assert_allclose(db, 3 + got.sum(0), rtol=1e-5, atol=1e-4)


def test_rows_that_run_backwards_are_left_to_others(compiled):
    x, w, b = drawn(0, ((130, 64), 1), ((64, 72), 0.1), ((72,), 1))
    dgelu, y = poison((130, 72)), poison((130, 72))
    given = x, w, b, dgelu, y[-1], 130, 64, 72, -72, 0, 0, 1
    assert answer(compiled("linear", "forward"), *given) == b"not served"


def gelu_inputs(is_half: int) -> np.ndarray:
    """Every bfloat16 from 2^-10 to 16, or each fifth float16, of both signs, and special ones."""
    ends = to_16(np.array([2.0**-10, 16]), is_half)
    words = np.arange(ends[0], ends[1] + 1, 5 if is_half else 1, dtype=np.uint16)
    with np.errstate(over="ignore"):
        special = to_16(np.array([0, 17, 300, 1e38, np.inf, np.nan]), is_half)
    words = np.concatenate([words, special])
    words = np.concatenate([words, words ^ 0x8000])
    return np.concatenate([words, np.zeros(-len(words) % 8, np.uint16)])


@both_types
@both_forms
def test_gelu_of_every_number(compiled, tanh, is_half):
    """Rounded once, but for a hundredth of that or what float32 leaves of 1. Infinity: limits."""
    b = gelu_inputs(is_half)
    x, w = np.zeros((1, 8), np.uint16), np.zeros((8, len(b)), np.uint16)
    dgelu, y = poison((1, len(b))), poison((1, len(b)))
    call(compiled("linear", "forward"), x, w, b, dgelu, y, 1, 8, len(b), len(b), tanh, is_half, 1)
    at = from_16(b, is_half)
    finite = np.isfinite(at)
    unit, smallest = (2.0**-11, 2.0**-25) if is_half else (2.0**-8, 0)
    of_value, of_dgelu = (gelu_tanh, gelu_tanh_grad) if tanh else (gelu, gelu_grad)
    for bits, f, limit, near in ((y, of_value, np.inf, 1e-12), (dgelu, of_dgelu, 1, 1e-6)):
        got, want = from_16(bits[0], is_half), f(at[finite])
        off = np.abs(got[finite] - want) - unit * 1.01 * np.abs(want)
        assert (off <= near + smallest).all(), at[finite][off.argmax()]
        for number, wanted in ((np.inf, limit), (-np.inf, 0), (np.nan, np.nan)):
            found = got[np.isnan(at) if np.isnan(number) else at == number]
            wanted = np.full(found.shape, wanted)
            np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-35 if tanh else 0)


def test_when_threads_run_changes_no_bit(compiled):
    dy, w, dgelu = drawn(0, ((500, 520), 1), ((392, 520), 0.05), ((500, 392), 1))
    results = []
    for seed in range(4):
        dpre, db = poison((500, 392)), np.zeros(392, np.float32)
        call(compiled("linear", "backward"), dy, w, dgelu, dpre, db, 500, 520, 392, 0, seed)
        results.append((dpre.tobytes(), db.tobytes()))
    assert results == results[:1] * 4


@both_types
@pytest.mark.parametrize(
    "b, t, k, heads, dim, parts",
    [
        (1, 1, 8, 1, 64, 2),
        (2, 130, 72, 2, 64, 2),
        (3, 200, 512, 1, 128, 1),
        (40, 7, 64, 1, 64, 3),
        (1, 700, 136, 1, 64, 0),
    ],
)
def test_rotary(compiled, b, t, k, heads, dim, parts, is_half):
    columns, r = 3 * heads * dim, 8
    x, w, bias = drawn(is_half, ((b * t, k), 1), ((k, columns), k**-0.5), ((columns,), 1))
    angles = np.random.default_rng(3).uniform(-4, 4, (t, r))
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    for with_bias in (True, False):
        want = from_16(x, is_half) @ from_16(w, is_half)
        want = (want + with_bias * from_16(bias, is_half)).reshape((b, t, heads, 3, dim))
        want = rotary(np.asarray, want, cos, sin, parts, 1.0)["x"]
        y = poison((b * t, columns))
        arrays = x, w, bias if with_bias else None, cos, sin, y
        call(compiled("linear", "rotary"), *arrays, b, t, k, heads, dim, r, parts, is_half, 1)
        close(y, want.reshape(y.shape), is_half, "y")
