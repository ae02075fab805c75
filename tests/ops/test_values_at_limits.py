"""Values and gradients at the limits: zeros, infinities, NaN, the largest numbers and the branch
points of each op, beside NumPy in float64."""

import numpy as np
import pytest
from harness import naming

import needle as ndl
from needle import Tensor, nn, ops
from needle.testing import elementwise

F = nn.functional
inf, nan = np.inf, np.nan
SMALL_AND_LARGE = [0, 1e-20, 0.5, 1, 1.5, 2, 1e20, inf]
PAIRS = [*SMALL_AND_LARGE, *(-x for x in SMALL_AND_LARGE), nan]


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def above(x, at_most):
    """1 above 0 and at NaN, else `at_most`."""
    return np.where(x <= 0, at_most, 1.0)


# of needle | the same in NumPy | its derivative; what is indented goes on
ONE = """
ops.abs(x) | np.abs(x) | np.sign(x)
ops.negate(x) | -x | -1
ops.relu(x) | np.maximum(x, 0) | above(x, 0.0)
ops.exp(x) | np.exp(x) | np.exp(x)
ops.expm1(x) | np.expm1(x) | np.exp(x)
ops.log(x) | np.log(x) | 1 / x
ops.log2(x) | np.log2(x) | 1 / x / np.log(2)
ops.log10(x) | np.log10(x) | 1 / x / np.log(10)
ops.log1p(x) | np.log1p(x) | 1 / (1 + x)
ops.sqrt(x) | np.sqrt(x) | 0.5 / np.sqrt(x)
ops.rsqrt(x) | 1 / np.sqrt(x) | -0.5 / np.sqrt(x) / x
ops.reciprocal(x) | 1 / x | -1 / x / x
ops.square(x) | np.square(x) | 2 * x
ops.tanh(x) | np.tanh(x) | 1 - np.tanh(x) ** 2
ops.sigmoid(x) | sigmoid(x) | sigmoid(x) * (1 - sigmoid(x))
ops.silu(x) | x * sigmoid(x) | sigmoid(x) * (1 + x * (1 - sigmoid(x)))
ops.softplus(x) | np.logaddexp(x, 0) | sigmoid(x)
ops.gelu(x) | elementwise.gelu(x) | elementwise.gelu_grad(x)
ops.gelu(x, "tanh") | elementwise.gelu_tanh(x) | elementwise.gelu_tanh_grad(x)
ops.erf(x) | elementwise.erf(x) | np.exp(-x * x) * 2 / np.sqrt(np.pi)
ops.sin(x) | np.sin(x) | np.cos(x)
ops.cos(x) | np.cos(x) | -np.sin(x)
ops.sign(x) | np.sign(x) | 0
ops.floor(x) | np.floor(x) | 0
ops.ceil(x) | np.ceil(x) | 0
ops.round(x) | np.rint(x) | 0
ops.trunc(x) | np.trunc(x) | 0
ops.nan_to_num(x) | np.nan_to_num(np.float32(x)) | np.isfinite(x)
ops.leaky_relu(x) | np.where(x > 0, x, x * 0.01) | np.where(x > 0, 1, 0.01)
ops.elu(x) | np.where(x > 0, x, np.expm1(x)) | np.where(x > 0, 1, np.where(x <= 0, np.exp(x), 0))
ops.elu(x, 2.0) | np.where(x > 0, x, 2 * np.expm1(x))
    | np.where(x > 0, 1, np.where(x <= 0, 2 * np.exp(x), 0))
ops.clip(x, -1.0, 1.5) | np.clip(x, -1.0, 1.5) | (x >= -1) & (x <= 1.5)
ops.clip(x, None, 1.0) | np.clip(x, None, 1.0) | x <= 1
ops.clip(x, 0.0, None) | np.clip(x, 0.0, None) | x >= 0
ops.clip(x, 0.5, 0.5) | np.clip(x, 0.5, 0.5) | x == 0.5
x**0 | x**0 | 0
x**1 | x | 1
x**2 | x**2 | 2 * x
x**3 | x**3 | 3 * x**2
x**-1 | x**-1.0 | -(x**-2.0)
x**-2 | x**-2.0 | -2 * x**-3.0
0.0**x | 0.0**x | np.where(x >= 0, 0, 0.0**x * -inf)
0.5**x | 0.5**x | 0.5**x * np.log(0.5)
1.0**x | 1.0**x | 1.0**x * np.log(1.0)
2.0**x | 2.0**x | 2.0**x * np.log(2.0)
2 / x | 2 / x | -2 / x / x
x / 0.0 | x / 0.0 | inf
"""


def shared(x, y):
    """1 where x wins over y, a half where they are equal."""
    return np.where(x < y, 0, np.where(x == y, 0.5, 1))


# The derivative for y goes on after a comma.
TWO = """
ops.add(x, y) | x + y | 1, 1
ops.subtract(x, y) | x - y | 1, -1
ops.multiply(x, y) | x * y | y, x
ops.divide(x, y) | x / y | 1 / y, -(1 / y) * (x / y)
ops.power(x, y) | np.power(x, y) | np.where(y == 0, 0, y * x ** (y - 1)),
    np.where((x == 0) & (y >= 0), 0, x**y * np.log(x))
ops.maximum(x, y) | np.maximum(x, y) | shared(x, y), shared(y, x)
ops.minimum(x, y) | np.minimum(x, y) | shared(-x, -y), shared(-y, -x)
ops.remainder(x, y) | np.remainder(x, y) | 1, -np.floor_divide(x, y)
"""


def close(got, wanted, rtol=2e-5, atol=1e-6):
    """Compare float32 with float64, which is rounded first: the largest numbers become inf."""
    with np.errstate(all="ignore"):
        wanted = np.broadcast_to(np.float32(wanted), np.shape(got))
    np.testing.assert_allclose(got, wanted, rtol, atol)


def check(table, device, **operands):
    names = ", ".join(operands)
    for row in table.strip().replace("\n    ", " ").split("\n"):
        with naming(row):
            of = (eval(f"lambda {names}: ({text})") for text in row.split(" | "))
            check_row(*of, *operands.values(), device=device)


def check_row(call, f, slopes, *operands, device):
    tensors = [Tensor(x, device=device) for x in operands]
    arrays = [x.numpy().astype(np.float64) for x in tensors]
    with np.errstate(all="ignore"):
        value, wanted = f(*arrays), slopes(*arrays)
    out = call(*tensors)
    close(out.numpy(), value)
    out.sum().backward()
    for tensor, slope in zip(tensors, wanted if isinstance(wanted, tuple) else (wanted,)):
        close(tensor.grad.numpy(), slope)


def test_functions_of_one_operand_at_their_limits(device):
    check(ONE, device, x=elementwise.LIMITS)


def test_functions_of_two_operands_at_their_limits(device):
    x, y = (a.ravel() for a in np.meshgrid(PAIRS, PAIRS))
    check(TWO, device, x=x, y=y)
    close_ones = ndl.isclose(Tensor(x, device=device), Tensor(y, device=device))
    np.testing.assert_array_equal(close_ones.numpy(), np.isclose(x, y))


def test_no_gradient_reaches_an_element_without_a_part_in_the_result():
    """Not even an infinite one, as log and sqrt have at 0."""
    x = [-3.0, -1.0, 2.0, 5.0]
    for label, call, takes in (
        ("relu", ops.relu, [0, 0, 1, 1]),
        ("clip", lambda x: ops.clip(x, -2, 3), [0, 1, 1, 0]),
        ("maximum", lambda x: ops.maximum(x, 0), [0, 0, 1, 1]),
        ("minimum", lambda x: ops.minimum(0, x), [1, 1, 0, 0]),
        ("where", lambda x: ops.where([True, False, True, False], x, 7), [1, 0, 1, 0]),
        ("masked_fill", lambda x: x.masked_fill(x > 4, 0), [1, 1, 1, 0]),
        ("nan_to_num", lambda x: ops.nan_to_num(x + [0, inf, 0, 0]), [1, 0, 1, 1]),
        ("leaky_relu", lambda x: ops.leaky_relu(x, 0.5), [0.5, 0.5, 1, 1]),
        ("x ** 0", lambda x: x**0, [0, 0, 0, 0]),
        ("floor", ops.floor, [0, 0, 0, 0]),
        ("tril", lambda x: ops.tril(x.reshape(2, 2)).reshape(4), [1, 0, 1, 1]),
    ):
        for incoming in (inf, -inf, nan):
            with naming(label, incoming):
                tensor = Tensor(x)
                call(tensor).backward(Tensor([incoming] * 4, requires_grad=False))
                wanted = [part and part * incoming for part in takes]
                np.testing.assert_array_equal(tensor.grad.numpy(), wanted)
    for composed in (lambda x: ops.log(ops.relu(x)), lambda x: 1 / ops.norm(ops.relu(x))):
        x = Tensor([-1.0, -2.0])
        composed(x).backward(ndl.ones(*composed(x).shape))
        np.testing.assert_array_equal(x.grad.numpy(), [0, 0])


# ---- reductions ----------------------------------------------------------------------------------


def test_norms_and_deviations_of_any_size(device):
    """Squares of these numbers are beyond float32; the gradient where all are 0 is 0."""
    unit = np.array([[3.0, -4, 0.5, 1], [2, 2, 2, 2], [0, 1, -1, 0], [0, 0, 0, 0]])
    for size in (1e-30, 1e-19, 1.0, 1e19, 1e37):
        a = (unit * size).astype(np.float32).astype(np.float64)
        for ord in (0.5, 1, 1.5, 2, 3, -1, -2, inf, -inf):
            x = Tensor(a, device=device)
            norm = x.norm(ord, 1)
            norm.sum().backward()
            with naming("norm", ord, size), np.errstate(all="ignore"):
                wanted = np.linalg.norm(a / size, ord, 1)
                close(norm.numpy() / size, wanted, 1e-5)
                if abs(ord) == inf:
                    continue
                ratio = np.abs(a / size) / wanted[:, None]
                slope = np.where(a == 0, 0, np.sign(a) * ratio ** (ord - 1.0))
                slope[~np.isfinite(slope)] = 0
                close(x.grad.numpy(), slope)
        for correction in (0, 1):
            x = Tensor(a, device=device)
            deviation = ops.std(x, 1, correction=correction)
            deviation.sum().backward()
            with naming("std", correction, size), np.errstate(all="ignore"):
                wanted = (a / size).std(1, ddof=correction)
                close(deviation.numpy() / size, wanted, 1e-5)
                off = a / size - (a / size).mean(1, keepdims=True)
                slope = off / wanted[:, None] / (4 - correction)
                close(x.grad.numpy(), np.where(wanted[:, None] == 0, 0, slope))
    far = Tensor([[1e-25, 1.0, 3.0]], device=device)  # the power of the smallest overflows as well
    close(ops.norm(far, -2, 1).numpy() / 1e-25, [1])
    for call in (ops.norm, ops.std, lambda x: ops.norm(x, 3)):
        assert call(Tensor([1.0, inf])).item() in (inf, pytest.approx(nan, nan_ok=True))
        assert np.isnan(call(Tensor([1.0, nan, inf])).item())


def test_variances_of_no_more_elements_than_their_correction():
    """Divided by 0, never by a negative number: inf, or NaN of equal elements."""
    x = Tensor([[1.0, 3.0, 5.0], [2.0, 2.0, 2.0]])
    for correction in (3, 4, 3.5, 100):
        for call in (ops.var, ops.std, lambda *a, **k: ops.var_mean(*a, **k)[0],
                     lambda *a, **k: ops.std_mean(*a, **k)[0]):  # fmt: skip
            with naming(correction):
                np.testing.assert_array_equal(call(x, 1, correction=correction).numpy(), [inf, nan])
    np.testing.assert_allclose(ops.var(x, 1, correction=2).numpy(), [8, 0])
    assert ops.var(Tensor([1.0]), dim=0).numpy() != 0  # NaN


def test_masked_logits_count_as_absent(device):
    """-inf beside the same row without it: values, and gradients, which are 0 where it is."""
    rng = np.random.default_rng(0)
    a, kept = rng.standard_normal((5, 7)), rng.random((5, 7)) < 0.5
    kept[:, 2], kept[0, :2] = True, False
    masked = np.where(kept, a, -inf)
    weights = rng.standard_normal((5, 7))
    e = np.where(kept, np.exp(a), 0)
    p = e / e.sum(1, keepdims=True)
    lse = np.log(e.sum(1))
    one = np.eye(7)[2]

    def flow(call, out_grad):
        x = Tensor(masked, device=device)
        y = call(x)
        y.backward(Tensor(np.broadcast_to(out_grad, y.shape), device=device))
        return y.numpy(), x.grad.numpy()

    targets = [2] * 5
    summed = (p * weights).sum(1, keepdims=True)
    for label, call, out_grad, value, gradient in (
        ("logsumexp", lambda x: ops.logsumexp(x, 1), 1, lse, p),
        ("softmax", ops.softmax, weights, p, p * (weights - summed)),
        ("log_softmax", lambda x: ops.log_softmax(x)[:, 2], 1, a[:, 2] - lse, one - p),
        ("cross_entropy", lambda x: ops.cross_entropy(x, targets), 1,
         (lse - a[:, 2]).mean(), (p - one) / 5),
        ("cross_entropy none", lambda x: ops.cross_entropy(x, targets, "none"), 1,
         lse - a[:, 2], p - one),
    ):  # fmt: skip
        with naming(label):
            got = flow(call, out_grad)
            close(got[0], value)
            close(got[1], gradient)
            assert (got[1][~kept] == 0).all()
    np.testing.assert_array_equal(ops.log_softmax(Tensor(masked)).numpy()[~kept], -inf)
    functions = ops.softmax, ops.log_softmax, lambda x: ops.logsumexp(x, 1, True)
    for row, wanted in (
        ([-inf] * 3, (0, -inf, -inf)),
        ([inf, 1.0, -inf], (nan, nan, inf)),
        ([nan, 1.0, -inf], (nan, nan, nan)),
        ([inf, inf, 0.0], (nan, nan, inf)),
    ):
        for call, value in zip(functions, wanted):
            np.testing.assert_array_equal(call(Tensor([row])).numpy(), value)


# ---- losses --------------------------------------------------------------------------------------


def test_losses_of_probabilities_at_0_and_1(device):
    """PyTorch's rule: logarithms are -100 at least, p (1 - p) in the divisor 1e-12."""
    p, t = (a.ravel() for a in np.meshgrid([0.0, 0.25, 1.0], [0.0, 0.5, 1.0]))
    with np.errstate(divide="ignore"):
        hit, miss = (np.maximum(np.log(x), -100) for x in (p, 1 - p))
    value = -(t * hit + (1 - t) * miss)
    for reduction, share in (("none", 1), ("sum", 1), ("mean", 1 / 9)):
        for dtype in ("float32", "bfloat16"):
            with naming(reduction, dtype):
                x, y = (Tensor(a, device=device, dtype=dtype) for a in (p, t))
                loss = ops.binary_cross_entropy(x, y, reduction)
                assert loss.dtype == dtype
                loss.backward(ndl.ones(*loss.shape, device=device, dtype=dtype))
                reduced = {"none": value, "sum": value.sum(), "mean": value.mean()}[reduction]
                tolerance = 1e-5 if dtype == "float32" else 1e-2
                np.testing.assert_allclose(loss.numpy(), reduced, tolerance)
                slope = (p - t) / np.maximum(p * (1 - p), 1e-12) * share
                np.testing.assert_allclose(x.grad.numpy(), slope, tolerance)
                np.testing.assert_allclose(y.grad.numpy(), (miss - hit) * share, tolerance)
    x = Tensor([0.0, 1.0], dtype="float16", device=device)
    ops.binary_cross_entropy(x, x.detach()).backward()
    np.testing.assert_array_equal(x.grad.numpy(), [0, 0])
    logits = Tensor([-1e4, 1e4, -200.0, 200.0], device=device)
    ops.binary_cross_entropy(ops.sigmoid(logits), [0, 1, 1, 0]).backward()
    np.testing.assert_array_equal(logits.grad.numpy(), [0, 0, 0, 0])


def test_other_losses_at_their_limits():
    t = Tensor([0.0, 0.0, 1.0, 0.5, 0.0])
    logits = F.binary_cross_entropy_with_logits
    for call, x, loss, slope in (
        (lambda x: ops.kl_div(x, t, "none"), [0, -1, -100, -inf, -inf], [0, 0, 100, inf, 0],
         [0, 0, -1, -0.5, 0]),
        (lambda x: logits(x, [1, 0, 0, 1, 1], "none"), [1e4, -1e4, 1e4, -1e4, 1e38],
         [0, 0, 1e4, 1e4, 0], [0, 0, 1, -1, 0]),
        (lambda x: ops.l1_loss(x, [0, 0, 2], "none"), [0.0, -0.0, 2.0], [0, 0, 0], [0, 0, 0]),
    ):  # fmt: skip
        x = Tensor(x)
        found = call(x)
        np.testing.assert_allclose(found.numpy(), loss, rtol=1e-6)
        found.sum().backward()
        np.testing.assert_array_equal(x.grad.numpy(), slope)


# ---- directions ----------------------------------------------------------------------------------


def test_directions_of_vectors_of_any_size(device):
    """eps is the least divisor of each vector: a product of two norms may be much smaller."""
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((2, 6, 5))
    sizes = np.array([5e-5, 1e-6, 1.0, 1e19, 1e-12, 0.0])[:, None]
    for left, right in ((sizes, sizes), (sizes, 1.0), (1.0, sizes)):
        arrays = [np.float32(v * size).astype(float) for v, size in ((a, left), (b, right))]
        x, y = (Tensor(v, device=device) for v in arrays)
        lengths = [np.maximum(np.linalg.norm(v, axis=1, keepdims=True), 1e-8) for v in arrays]
        u, v = (vector / length for vector, length in zip(arrays, lengths))
        wanted = (u * v).sum(1)
        got = F.cosine_similarity(x, y)
        close(got.numpy(), wanted)
        got.sum().backward()
        for tensor, length, own, other in ((x, lengths[0], u, v), (y, lengths[1], v, u)):
            along = np.where(length > 1e-8, wanted[:, None], 0)  # below eps the divisor is constant
            slope = (other - along * own) / length
            np.testing.assert_allclose(tensor.grad.numpy() * length, slope * length, 1e-4, 1e-5)
    zeros = ndl.zeros(2, 3, dtype="bfloat16", device=device)
    assert not F.normalize(zeros).numpy().any() and not F.cosine_similarity(zeros, zeros).any()
