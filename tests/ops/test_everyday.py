"""The operations of NumPy's and PyTorch's names: values on every dtype, layout and shape, item
assignment, grad(), errors. Their gradients are in tests/gradients.py."""

import itertools

import numpy as np
import pytest
from harness import naming

import needle as ndl
from needle import Tensor, nn, ops
from needle.testing.operands import LAYOUTS, laid_out_values, to_ndarray

DTYPES = ("float32", "bfloat16", "float16", "int32", "int64", "uint8", "bool")
PICK = np.array([[0, 1, 1, -5, 2], [2, -3, 0, 1, 0], [1, 0, 2, 2, -1]])


def add_at_places(x, axis, index):
    out = x.copy()
    np.add.at(out, (np.arange(3)[:, None], index), x)
    return out


CASES = [  # needle, NumPy, what both are given, dtypes
    ("square", np.square, (), DTYPES[:6]),
    ("isnan", np.isnan, (), DTYPES),
    ("isfinite", np.isfinite, (), DTYPES),
    ("clip", np.clip, (1, 2), DTYPES[:6]),
    ("any", np.any, (1,), DTYPES),
    ("all", np.all, (1,), DTYPES),
    ("min", np.min, (1,), DTYPES),
    ("prod", np.prod, (1,), ("float32", "int32", "int64")),
    ("var", np.var, (1,), ("float32", "int32")),
    ("std", np.std, (1,), ("float32", "int32")),
    ("argmin", np.argmin, (1,), DTYPES[:6]),
    ("gather", lambda x, axis, index: np.take_along_axis(x, index, 1), (1, PICK), DTYPES),
    ("index_select", lambda x, axis, index: np.take(x, index, axis), (0, [2, -1, -3, 0]), DTYPES),
    ("scatter_add", add_at_places, (1, PICK), ("float32", "int32", "int64")),
    ("unsqueeze", np.expand_dims, (1,), DTYPES),
    ("tile", np.tile, ((2, 1, 3),), DTYPES),
    ("repeat", np.repeat, (2, 1), DTYPES),
    ("roll", np.roll, (-3,), DTYPES),
    ("pad", lambda x, by, to: np.pad(x, by, constant_values=to), (((0, 1), (2, 0)), 1), DTYPES),
    ("tril", np.tril, (), DTYPES),
    ("triu", np.triu, (1,), DTYPES),
]


def drawn(dtype):
    low = 0 if dtype in ("uint8", "bool") else -3
    values = np.random.default_rng(1).integers(low, 2 if dtype == "bool" else 4, (3, 5))
    return values.astype("float32" if "float" in dtype else dtype)


def test_values_are_numpys(device):
    kinds = {"b": "bool", "i": "int", "u": "uint"}
    for name, expected, given, dtypes in CASES:
        for dtype, layout in itertools.product(dtypes, LAYOUTS):
            with naming(name, dtype, layout):
                values = laid_out_values(drawn(dtype), layout)
                x = Tensor.from_ndarray(to_ndarray(values, dtype, device, layout))
                needles = [Tensor(PICK, device, "int64") if a is PICK else a for a in given]
                wanted = expected(values, *given)
                src = (x,) if name == "scatter_add" else ()
                for arguments in (given, needles):
                    got = getattr(ops, name)(x, *arguments, *src)
                    assert got.shape == wanted.shape and got.device == device
                    assert got.dtype.startswith(kinds.get(wanted.dtype.kind, ""))
                    np.testing.assert_allclose(got.numpy(), wanted, rtol=1e-6)


def test_einsum_is_numpys():
    rng = np.random.default_rng(0)
    for text, *shapes in [
        ("ij->ji", (3, 5)), ("ij", (3, 5)), ("ba", (3, 5)), ("ii", (4, 4)), ("iji->j", (3, 5, 3)),
        ("ij,jk", (3, 5), (5, 2)), ("i,i", (7,), (7,)), ("i,j->ij", (3,), (4,)),
        ("b...i,...ij->b...j", (2, 3, 1, 4), (5, 4, 6)), ("...->...", (2, 3)),
        ("ab,bc,cd,d->a", (2, 3), (3, 4), (4, 5), (5,)), ("ij,kl->", (2, 3), (4, 5)),
        ("bhqd,bhkd->bhqk", (2, 3, 5, 4), (2, 3, 7, 4)), ("ij,ij->ij", (3, 1), (3, 5)),
        ("iii->i", (3, 3, 3)),
    ]:  # fmt: skip
        with naming(text):
            arrays = [rng.standard_normal(shape).astype(np.float32) for shape in shapes]
            got = ops.einsum(text, *map(Tensor, arrays))
            wanted = np.einsum(text, *(a.astype(np.float64) for a in arrays))
            assert got.shape == wanted.shape
            np.testing.assert_allclose(got.numpy(), wanted, rtol=1e-4, atol=1e-5)


def test_assignment_is_numpys(device):
    for index in (
        0, (1, 2), slice(None, None, -2), (..., slice(1, 3)), np.arange(15).reshape(3, 5) % 2 == 0,
        ([0, 2], [1, 4]), np.array([True, False, True]), (slice(None), [3, 0]), [2, 0, 2], [1, -2],
        (slice(1, 3), [1, -1, 1, 1]), ([[0, 1], [2, 0]], [[4, 4], [0, 4]]), [],
    ):  # fmt: skip
        for dtype in ("float32", "int32", "bfloat16"):
            with naming(index, dtype):
                wanted = np.arange(15, dtype="float32").reshape(3, 5)
                x = Tensor(wanted, dtype=dtype, device=device, requires_grad=False)
                value = np.arange(50.0, 50 + np.size(wanted[index])).reshape(wanted[index].shape)
                wanted[index] = value  # of places that are named twice the last value stays
                x[index] = Tensor(value, device=device, requires_grad=False)
                np.testing.assert_array_equal(x.numpy(), wanted)
                x[index], wanted[index] = -1, -1
                np.testing.assert_array_equal(x.numpy(), wanted)
                columns = Tensor(wanted.T, dtype=dtype, device=device, requires_grad=False).T
                columns[index], wanted[index] = 9, 9  # of a view
                np.testing.assert_array_equal(columns.numpy(), wanted)
                if isinstance(index, np.ndarray):
                    columns[Tensor(index, dtype="bool", device=device, requires_grad=False)] = 3
                    assert (columns.numpy()[index] == 3).all()


def test_assignment_in_the_graph():
    leaf = Tensor([1.0, 2.0, 3.0])
    with pytest.raises(RuntimeError, match="leaf that requires gradients"):
        leaf[0] = 5
    with ndl.no_grad():
        leaf[0] = 5
    x = leaf * 2
    before = x + 1
    (x * 7).sum().backward()
    assert x.grad is not None
    x[0] = 0
    assert x.grad is None  # of what it was
    leaf.grad = None
    with pytest.raises(RuntimeError, match="was assigned to"):
        before.sum().backward()
    x[1:2] = leaf[2:] * 10
    x.sum().backward()
    np.testing.assert_array_equal(leaf.grad.numpy(), [0, 0, 12])
    y = leaf * 3
    z = y * y
    y[0] = 1
    with pytest.raises(RuntimeError, match="was assigned to"):
        z.sum().backward()
    after = y[1:][1:] + 1
    y[:] = 0
    with pytest.raises(RuntimeError, match="was assigned to"):
        after.sum().backward()
    with pytest.raises(IndexError, match="out of "):
        y[[3]] = 0
    z = leaf * leaf
    z[0] += leaf[0] * 5  # reads the elements that it replaces
    z[[1, 2]] *= 3
    z[1:2] = z[2:] + z[:1]
    leaf.grad = None
    z.sum().backward()  # 2 (a^2 + 5 a) + 6 c^2, with the a and c of leaf
    np.testing.assert_array_equal(leaf.grad.numpy(), [2 * (2 * 5 + 5), 0, 12 * 3])
    w = leaf * leaf
    w[0] = w[1] * w[1]
    with pytest.raises(RuntimeError, match="was written to"):
        w.sum().backward()


def test_grad_leaves_grad_alone():
    x, w = Tensor([1.0, 2.0]), nn.Parameter(Tensor([3.0, 4.0]))
    h = x * w
    dx, dh = ndl.autograd.grad((h * h).sum(), [x, h])
    np.testing.assert_array_equal(dx.numpy(), [18, 64])
    np.testing.assert_array_equal(dh.numpy(), [6, 16])
    assert x.grad is None and w.grad is None and h.grad is None and not dx.requires_grad
    (seeded,) = ndl.autograd.grad(h, w, Tensor([1.0, 0.0]))
    np.testing.assert_array_equal(seeded.numpy(), [1, 0])
    (first,) = ndl.autograd.grad((x**3).sum(), x, create_graph=True)
    np.testing.assert_array_equal(ndl.autograd.grad(first.sum(), x)[0].numpy(), [6, 12])
    other = Tensor([1.0])
    with pytest.raises(RuntimeError, match="allow_unused"):
        ndl.autograd.grad(h.sum(), other)
    assert ndl.autograd.grad(h.sum(), [x, other], allow_unused=True)[1] is None


def test_random_numbers_are_numpys():
    np.random.seed(3)
    drawn = ndl.randint(2, 9, (4, 5)), ndl.randperm(7), ndl.randint(9, (4, 5))
    np.random.seed(3)
    np.testing.assert_array_equal(drawn[0].numpy(), np.random.randint(2, 9, (4, 5)))
    np.testing.assert_array_equal(drawn[1].numpy(), np.random.permutation(7))
    np.testing.assert_array_equal(drawn[2].numpy(), np.random.randint(9, size=(4, 5)))
    picked = ndl.multinomial(Tensor([[0, 1, 1, 0], [1, 0, 0, 1]]), 2).numpy()
    np.testing.assert_array_equal(np.sort(picked), [[1, 2], [0, 3]])
    with pytest.raises(ValueError, match="probabilities"):
        ndl.multinomial(Tensor([1, -1]), 1)


def test_gated_layers():
    swiglu, rng = nn.SwiGLU(3, 5), np.random.default_rng(0)
    v = rng.standard_normal((2, 3))
    gate, up, down = (layer.weight.numpy() for layer in (swiglu.gate, swiglu.up, swiglu.down))
    g = v @ gate
    wanted = (g / (1 + np.exp(-g)) * (v @ up)) @ down
    np.testing.assert_allclose(swiglu(Tensor(v)).numpy(), wanted, rtol=1e-4, atol=1e-5)
    wanted = v / np.sqrt((v**2).mean(-1, keepdims=True))
    of_batch = (v - v.mean(0)) / v.std(0)
    for dtype in ("bfloat16", "float16"):  # whose squares are beyond float16
        for kind, wanted_of in ((nn.RMSNorm, wanted), (nn.BatchNorm1d, of_batch)):
            got = kind(3, dtype=dtype)(Tensor(1000 * v, dtype=dtype))
            assert got.dtype == dtype and kind(2)(ndl.tensor([[3, 4]])).dtype == "float32"
            np.testing.assert_allclose(got.numpy(), wanted_of, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("name", [*"sum mean amax max amin min any all prod var std median".split(),
                                  "count_nonzero", "logsumexp", "argmax", "argmin"])  # fmt: skip
def test_reductions_keep_axes_as_numpy_does(name):
    """Of an array as it lies, and of a view."""
    reference = {"logsumexp": lambda x, **words: np.log(np.sum(np.exp(x), **words))}
    values = np.random.default_rng(0).standard_normal((3, 4, 5)).astype(np.float32)
    views = (Tensor(values), values), (Tensor(values).permute(2, 0, 1), values.transpose(2, 0, 1))
    choices = None, 0, -1, (), (0, 2), (1, -3), (0, 1, 2)
    for (x, host), axes, keepdims in itertools.product(views, choices, (False, True)):
        if name in ("median", "argmax", "argmin") and isinstance(axes, tuple):
            continue
        with naming(name, x.shape, axes, keepdims):
            got = getattr(ops, name)(x, axes, keepdims=keepdims)
            wanted = (reference.get(name) or getattr(np, name))(host, axis=axes, keepdims=keepdims)
            assert got.shape == np.shape(wanted)
            np.testing.assert_allclose(got.numpy(), wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["softmax", "logsoftmax", "logsumexp"])
def test_softmax_of_nothing_is_pytorchs(name):
    """Empty, and the logarithm of an empty sum -inf; without a row, too."""
    for shape, axis in (((3, 0), 1), ((0, 3), 0), ((0, 3), 1), ((0,), -1)):
        x = Tensor(np.ones(shape))
        y = getattr(ops, name)(x, axis)
        y.sum().backward()
        reduced = np.full(np.sum(np.ones(shape), axis).shape, -np.inf)
        wanted = reduced if name == "logsumexp" else np.ones(shape)
        np.testing.assert_array_equal(y.numpy(), wanted)
        assert x.grad.shape == shape


def test_products_of_no_elements_have_gradients():
    for a, b in (
        ((2, 0, 3), (3, 4)), ((0, 2, 3), (3, 4)), ((2, 3, 0), (0, 4)), ((2, 3, 4), (4, 0)),
        ((0, 3), (3, 4)), ((2, 0), (0, 3)), ((0, 2, 3), (0, 3, 4)), ((2, 3, 0), (0,)),
    ):  # fmt: skip
        with naming(a, b):
            x, y = Tensor(np.ones(a)), Tensor(np.ones(b))
            (x @ y).sum().backward()
            np.testing.assert_array_equal(x.grad.numpy(), np.zeros(a))
            np.testing.assert_array_equal(y.grad.numpy(), np.zeros(b))


def test_constructors_share_memory_as_pytorchs_do():
    for make, shares in (
        (ndl.tensor, False), (ndl.array, False), (ndl.as_tensor, True), (ndl.asarray, True),
        (Tensor, True), (nn.Parameter, True),
    ):  # fmt: skip
        with naming(make.__name__):
            given = ndl.zeros(2)
            made = make(given)
            with ndl.no_grad():
                made += 1
            assert given.tolist() == [shares, shares]
            assert make(np.zeros(2)).tolist() == make([0.0, 0.0]).tolist() == [0, 0]
    whole = ndl.as_tensor([1, 2])
    assert whole.dtype == "int64" and ndl.as_tensor(whole, "float32").dtype == "float32"


def test_numbers_of_numpy_serve_as_sizes_axes_and_counts():
    for text in (
        "x.reshape(N(24))", "x.view(N(24))", "ops.reshape(x, N(24))", "x.reshape(N(2), N(12))",
        "x.split(N(1), N(1))[1]", "x.chunk(N(2), N(2))[1]", "x.unbind(N(1))[2]",
        "x[N(1), N(0):N(2)]", "x.sum((N(1), N(2)))", "x.max(dim=N(1))[1]", "x.topk(N(2), N(1))[0]",
        "x.flip(N(1))", "ops.roll(x, N(1))", "ops.roll(x, N(1), N(2))",
        "ops.roll(x, (N(1), N(2)), (N(1), N(2)))", "ops.tile(x, N(2))", "ops.repeat(x, N(2), N(1))",
        "x.unsqueeze(N(0))", "x.flatten(N(0), N(1))", "x.permute(N(2), N(0), N(1))",
        "x.expand(N(2), N(3), N(4))", "ops.tril(x, N(1))", "ops.pad(x, N(1))",
        "ops.tensordot(x, x, (N(1), N(1)))", "ndl.full(N(3), 1)", "ndl.zeros(N(3))",
        "ndl.backend_ndarray.zeros(N(3))", "nn.functional.layer_norm(x, N(4))", "ndl.eye(N(3))",
    ):  # fmt: skip
        with naming(text):
            x = Tensor(np.arange(24.0).reshape(2, 3, 4))
            got, wanted = (
                eval(text, {"N": kind, "x": x, "ops": ops, "ndl": ndl, "nn": nn})
                for kind in (np.int64, int)
            )
            np.testing.assert_array_equal(got.numpy(), wanted.numpy())


def test_integers_are_rounded_to_tens():
    values = [0, 4, 5, 14, 15, 25, 35, 44, 250, 149, 151]
    for dtype in ("int32", "int64", "uint8"):
        x = np.array(values if dtype == "uint8" else [*values, -5, -15, -26, -250], dtype)
        for decimals in (2, 0, -1, -2, -3):
            got = ndl.round(ndl.tensor(x, dtype=dtype), decimals)
            assert got.dtype == dtype
            with naming(dtype, decimals), np.errstate(all="ignore"):
                wanted = np.round(x.astype("int64"), decimals).astype(dtype)
                np.testing.assert_array_equal(got.numpy(), wanted)
    for dtype in ("float16", "bfloat16"):  # in float32, in which their tens do not overflow
        for x, decimals, wanted in ((100, 5, 100), (6e4, 1, 6e4), (44, -1, 40)):
            x, wanted = (ndl.tensor(v, dtype=dtype).item() for v in (x, wanted))
            assert ndl.round(ndl.tensor(x, dtype=dtype), decimals).item() == wanted


@pytest.mark.parametrize("dtype", ["uint8", "uint16"])
def test_differences_of_unsigned_integers_do_not_wrap(dtype):
    x, y = np.array([3, 200, 7], dtype), np.array([5, 190, 7], dtype)
    a, b = (ndl.tensor(v, dtype=dtype) for v in (x, y))
    wide = x.astype(float), y.astype(float)
    for rtol, atol in ((0, 2), (0.05, 0), (0, 10), (0, 1)):
        assert ndl.isclose(a, b, rtol, atol).tolist() == np.isclose(*wide, rtol, atol).tolist()
        assert ndl.allclose(a, y.tolist(), rtol, atol) == np.allclose(*wide, rtol, atol)
    np.testing.assert_allclose(ndl.lerp(a, b, 0.25).numpy(), wide[0] + 0.25 * (wide[1] - wide[0]))
    assert np.isclose(ops.mse_loss(a, b).item(), np.mean((wide[0] - wide[1]) ** 2))
    assert np.isclose(ops.l1_loss(a, b).item(), np.mean(abs(wide[0] - wide[1])))
    got = ops.binary_cross_entropy_with_logits(a, b, "none")
    np.testing.assert_allclose(got.numpy(), np.logaddexp(0, wide[0]) - wide[0] * wide[1], 1e-5)
