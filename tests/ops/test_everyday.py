"""The operations of NumPy's and PyTorch's names: values on every dtype, layout and shape, item
assignment, grad(), errors. Their gradients are in tests/gradients.py."""

import numpy as np
import pytest
from harness import naming

import needle as ndl
from needle import _C, Tensor, nn, ops
from needle.testing.operands import LAYOUTS, laid_out_values, to_ndarray

DTYPES = ("float32", "bfloat16", "float16", "int32", "int64", "uint8", "bool")
INTEGERS = ("int32", "int64", "uint8")
PICK = np.array([[0, 1, 1, 0, 2], [2, 2, 0, 1, 0], [1, 0, 2, 2, 1]])
CASES = [  # needle, NumPy, dtypes
    ("abs", np.abs, DTYPES[:6]),
    ("sign", np.sign, DTYPES[:6]),
    ("floor", np.floor, DTYPES[:6]),
    ("square", np.square, DTYPES[:6]),
    ("isnan", np.isnan, DTYPES),
    ("isfinite", np.isfinite, DTYPES),
    ("clip", lambda x: np.clip(x, 1, 2), DTYPES[:6]),
    ("maximum", lambda x: np.maximum(x, 1), DTYPES[:6]),
    ("remainder", lambda x: np.remainder(x, 2), DTYPES[:6]),
    ("floor_divide", lambda x: np.floor_divide(x, 2), DTYPES[:6]),
    ("any", lambda x: x.any(1), DTYPES),
    ("all", lambda x: x.all(1), DTYPES),
    ("min", lambda x: x.min(1), DTYPES),
    ("prod", lambda x: x.prod(1), ("float32", "int32", "int64")),
    ("var", lambda x: x.var(1), ("float32", "int32")),
    ("std", lambda x: x.std(1), ("float32", "int32")),
    ("argmin", lambda x: x.argmin(1), DTYPES[:6]),
    ("gather", lambda x: np.take_along_axis(x, PICK, 1), DTYPES),
    ("scatter_add", None, ("float32", "int32", "int64")),
    ("unsqueeze", lambda x: x[:, None], DTYPES),
    ("tile", lambda x: np.tile(x, (2, 1, 3)), DTYPES),
    ("repeat", lambda x: np.repeat(x, 2, 1), DTYPES),
    ("roll", lambda x: np.roll(x, -3), DTYPES),
    ("pad", lambda x: np.pad(x, ((0, 1), (2, 0)), constant_values=1), DTYPES),
    ("tril", np.tril, DTYPES),
    ("triu", lambda x: np.triu(x, 1), DTYPES),
]
ARGUMENTS = {
    "clip": (1, 2), "maximum": (1,), "remainder": (2,), "floor_divide": (2,), "any": (1,),
    "all": (1,), "min": (1,), "prod": (1,), "var": (1,), "std": (1,), "argmin": (1,),
    "gather": (1, PICK), "unsqueeze": (1,), "tile": ((2, 1, 3),), "repeat": (2, 1), "roll": (-3,),
    "pad": (((0, 1), (2, 0)), 1), "triu": (1,),
}  # fmt: skip


def drawn(dtype):
    low = 0 if dtype in ("uint8", "bool") else -3
    values = np.random.default_rng(1).integers(low, 2 if dtype == "bool" else 4, (3, 5))
    return values.astype("float32" if "float" in dtype else dtype)


def test_values_are_numpys():
    for name, expected, dtypes in CASES:
        for dtype in dtypes:
            for layout in LAYOUTS:
                with naming(name, dtype, layout):
                    values = laid_out_values(drawn(dtype), layout)
                    x = Tensor.from_ndarray(to_ndarray(values, dtype, ndl.cpu(), layout))
                    if name == "scatter_add":
                        got = ops.scatter_add(x, 1, PICK, x)
                        wanted = values.copy()
                        np.add.at(wanted, (np.arange(3)[:, None], PICK), values)
                    else:
                        got = getattr(ops, name)(x, *ARGUMENTS.get(name, ()))
                        wanted = expected(values)
                    assert got.shape == wanted.shape
                    kinds = {"b": "bool", "i": "int", "u": "uint"}
                    if wanted.dtype.kind in kinds:
                        assert got.dtype.startswith(kinds[wanted.dtype.kind])
                    np.testing.assert_allclose(got.numpy(), wanted, rtol=1e-6)


def test_operators_of_integers_and_bool_are_numpys():
    x, y = np.array([7, -7, 0, 5], np.int32), np.array([2, 2, 0, -3], np.int32)
    p, q = x > 0, y > 0
    operators = ["x & y", "x | y", "x ^ y", "~x", "x % y", "x // y", "x & 3", "3 | x", "9 % y"]
    operators += ["9 // y", "p & q", "p | q", "p ^ q", "~p", "p & True"]
    wrapped = [lambda a: Tensor(a, dtype=str(a.dtype)), lambda a: _C.array(a, str(a.dtype))]
    for text in operators:
        for wrap in wrapped:
            with naming(text, wrap):
                got = eval(text, {name: wrap(a) for name, a in zip("xypq", (x, y, p, q))})
                with np.errstate(all="ignore"):
                    wanted = eval(text, {"x": x, "y": y, "p": p, "q": q})
                assert got.dtype == str(wanted.dtype)
                np.testing.assert_array_equal(got.numpy(), wanted)
    assert (~_C.array([1], "uint8")).item() == 254
    for one in (Tensor([1.0]), _C.array([1.0])):
        for text in ("x & 1", "x | x", "~x", "2 ^ x"):
            with pytest.raises(TypeError, match="integers or bool"):
                eval(text, {"x": one})


def test_empty_and_0d_arrays():
    empty, number = ndl.zeros(0, 3), Tensor(2.0)
    assert not ops.any(empty).item() and ops.all(empty).item() and ops.prod(empty).item() == 1
    assert ops.tile(empty, (2, 1)).shape == (0, 3) and ops.roll(empty, 1).shape == (0, 3)
    assert ops.pad(empty, 1, 5).numpy().tolist() == [[5.0] * 5] * 2
    assert ops.norm(empty).item() == 0 and len(ops.chunk(empty, 2)) == 1
    assert (
        ops.nonzero(empty)[0].shape == (0,)
        and ops.gather(empty, 0, np.zeros((0, 3), int)).size == 0
    )
    assert ops.flatten(number).shape == (1,) and ops.unsqueeze(number, 0).shape == (1,)
    assert ops.clip(number, 3).item() == 3 and ops.std(number).item() == 0
    assert ops.repeat(number, 3).shape == (3,) and ops.einsum(",->", number, number).item() == 4


def test_einsum_is_numpys():
    rng = np.random.default_rng(0)
    for text, *shapes in [
        ("ij->ji", (3, 5)), ("ij", (3, 5)), ("ba", (3, 5)), ("ii", (4, 4)), ("iji->j", (3, 5, 3)),
        ("ij,jk", (3, 5), (5, 2)), ("i,i", (7,), (7,)), ("i,j->ij", (3,), (4,)),
        ("b...i,...ij->b...j", (2, 3, 1, 4), (5, 4, 6)), ("...->...", (2, 3)),
        ("ab,bc,cd,d->a", (2, 3), (3, 4), (4, 5), (5,)), ("ij,kl->", (2, 3), (4, 5)),
        ("bhqd,bhkd->bhqk", (2, 3, 5, 4), (2, 3, 7, 4)), ("ij,ij->ij", (3, 1), (3, 5)),
    ]:  # fmt: skip
        with naming(text):
            arrays = [rng.standard_normal(shape).astype(np.float32) for shape in shapes]
            got = ops.einsum(text, *map(Tensor, arrays))
            wanted = np.einsum(text, *(a.astype(np.float64) for a in arrays))
            assert got.shape == wanted.shape
            np.testing.assert_allclose(got.numpy(), wanted, rtol=1e-4, atol=1e-5)
    for text in ("ij,jk", "ijk", "ij->ik", "ij->ii", "i?"):
        with naming(text), pytest.raises(ValueError, match="einsum"):
            ops.einsum(text, ndl.ones(2, 3))


def test_assignment_is_numpys(device):
    for index in (
        0, (1, 2), slice(None, None, -2), (..., slice(1, 3)), np.arange(15).reshape(3, 5) % 2 == 0,
        ([0, 2], [1, 4]), np.array([True, False, True]), (slice(None), [3, 0]), [2, 0, 2],
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


def test_assignment_of_values_that_broadcast_and_their_gradients():
    every = slice(None)
    for shape in ((3, 3, 2), (2, 2, 2), (3, 4, 2)):
        for index in (
            (every, every, 1),
            (every, 1),
            (0,),
            (every, [0, 1], 1),
            ([1, 0], every, [0, 1]),
        ):
            place = np.zeros(shape)[index].shape
            for ones in np.ndindex(*[2] * len(place)):
                of = tuple(1 if one else size for one, size in zip(ones, place))
                with naming(shape, index, of):
                    wanted = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
                    weights = Tensor(wanted + 1, requires_grad=False)
                    start = Tensor(wanted)
                    x, value = start * 1, Tensor(np.arange(100.0, 100 + np.prod(of)).reshape(of))
                    x[index] = value
                    wanted[index] = value.numpy()
                    np.testing.assert_array_equal(x.numpy(), wanted)
                    (x * weights).sum().backward()
                    kept = weights.numpy().copy()
                    kept[index] = 0
                    np.testing.assert_array_equal(start.grad.numpy(), kept)
                    axes = tuple(np.flatnonzero(ones))
                    part = weights.numpy()[index].sum(axes, keepdims=True)
                    np.testing.assert_array_equal(value.grad.numpy(), part)


@pytest.mark.parametrize(
    "write",
    [
        lambda x: x.__setitem__(0, 5),
        lambda x: x.__setitem__(np.array([True, False, False]), 5),
        lambda x: x.__setitem__(slice(0, 1), x[1:2] * 2),
        lambda x: x.masked_fill_(Tensor([1, 0, 0], dtype="bool"), 5),
        lambda x: x.scatter_(0, [0], 5.0),
        lambda x: x.mul_(1),
    ],
)
def test_assignment_keeps_no_state_of_before(write):
    leaf = Tensor([1.0, 2.0, 3.0])
    x = leaf * 1
    (x * 7).sum().backward()
    assert x.grad is not None
    write(x)
    assert x.grad is None
    (x * 2).sum().backward()
    np.testing.assert_array_equal(x.grad.numpy(), [2, 2, 2])


def test_assignment_of_what_was_computed_before_an_earlier_one_is_refused():
    for write in (lambda y: y.__setitem__(0, 1), lambda y: y.mul_(2)):
        leaf = Tensor([1.0, 2.0, 3.0])
        y = leaf * 3
        before = y * 1  # does not read y again, but its gradient would go through the assignment
        write(y)
        y[1:2] = before[:1]
        with pytest.raises(RuntimeError, match="was assigned to"):
            y.sum().backward()


def test_assignment_in_the_graph():
    leaf = Tensor([1.0, 2.0, 3.0])
    with pytest.raises(RuntimeError, match="leaf that requires gradients"):
        leaf[0] = 5
    with ndl.no_grad():
        leaf[0] = 5
    x = leaf * 2
    before = x + 1
    x[0] = 0
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


def test_updates_under_no_grad_are_in_place():
    w = Tensor([1.0, 2.0])
    same = w
    for _ in range(2):
        (w * w).sum().backward()
        with ndl.no_grad():
            w -= 0.25 * w.grad
            w *= 2
        w.grad.zero_()
        assert w.grad.op is None
    assert w is same and w.is_leaf() and w.requires_grad
    np.testing.assert_array_equal(w.numpy(), [1, 2])
    np.testing.assert_array_equal(w.grad.numpy(), [0, 0])
    with pytest.raises(RuntimeError, match="leaf that requires gradients"):
        w += 1
    z = w * 1
    after = z + 1
    z.zero_()
    with pytest.raises(RuntimeError, match="was assigned to"):
        after.sum().backward()
    with pytest.raises(RuntimeError, match="leaf that requires gradients"):
        w.zero_()


def test_the_graph_is_recorded_where_it_is_enabled():
    x = Tensor([1.0])
    with ndl.set_grad_enabled(False):
        assert not (x * 2).requires_grad and not ndl.is_grad_enabled()
    assert (x * 2).requires_grad
    ndl.set_grad_enabled(False)
    assert not (x * 2).requires_grad
    ndl.set_grad_enabled(True)
    assert (x * 2).requires_grad and ndl.is_tensor(x) and not ndl.is_tensor(x.cached_data)


def test_memory_of_a_tensor_is_described_as_pytorch_does():
    x = Tensor(np.zeros((2, 3)), dtype="bfloat16").T
    assert x.element_size() == 2 and x.stride() == (1, 3) and x.stride(-1) == 3
    assert x.data_ptr() == x.cached_data.data_ptr


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
    drawn = ndl.randint(2, 9, (4, 5)), ndl.randperm(7), ndl.init.rand(2)
    np.random.seed(3)
    np.testing.assert_array_equal(drawn[0].numpy(), np.random.randint(2, 9, (4, 5)))
    np.testing.assert_array_equal(drawn[1].numpy(), np.random.permutation(7))
    picked = ndl.multinomial(Tensor([[0, 1, 1, 0], [1, 0, 0, 1]]), 2).numpy()
    np.testing.assert_array_equal(np.sort(picked), [[1, 2], [0, 3]])
    with pytest.raises(ValueError, match="multinomial: probs"):
        ndl.multinomial(Tensor([1, -1]), 1)


def test_losses_and_layers():
    x, t = Tensor([[100.0, -100.0, 0.5]]), Tensor([[1.0, 0.0, 0.25]])
    assert ops.binary_cross_entropy(Tensor([0.0, 1.0]), [0.0, 1.0]).item() == 0
    assert np.isfinite(nn.BCEWithLogitsLoss("none")(x, t).numpy()).all()
    assert ops.kl_div(Tensor([-1.0, -2.0]), Tensor([0.0, 1.0]), "sum").item() == 2
    with pytest.raises(ValueError, match="mse_loss: target is"):
        nn.MSELoss()(x, Tensor([1.0]))
    with pytest.raises(ValueError, match="reduction must be"):
        nn.L1Loss("meen")(x, t)
    swiglu, rng = nn.SwiGLU(3, 5), np.random.default_rng(0)
    v = rng.standard_normal((2, 3))
    gate, up, down = (layer.weight.numpy() for layer in (swiglu.gate, swiglu.up, swiglu.down))
    g = v @ gate
    wanted = (g / (1 + np.exp(-g)) * (v @ up)) @ down
    np.testing.assert_allclose(swiglu(Tensor(v)).numpy(), wanted, rtol=1e-4, atol=1e-5)
    for dtype, bound in (("float32", 1e-6), ("bfloat16", 1e-2)):
        got = nn.RMSNorm(3, dtype=dtype)(Tensor(v, dtype=dtype))
        assert got.dtype == dtype
        wanted = v / np.sqrt((v**2).mean(-1, keepdims=True) + 1e-6)
        np.testing.assert_allclose(got.numpy(), wanted, rtol=bound, atol=bound)


def test_errors_say_what_to_do():
    x = ndl.ones(2, 3)
    for error, match, call in [
        (IndexError, "gather: index 3 is out of range for axis 1", lambda: ops.gather(x, 1, [[3]])),
        (ValueError, "gather: index has 1 axes", lambda: ops.gather(x, 1, [0])),
        (TypeError, "must hold whole numbers", lambda: ops.gather(x, 1, [[0.5]])),
        (ValueError, "scatter_add: src", lambda: ops.scatter_add(x, 0, [[0, 1]], x[:, :1])),
        (ValueError, "index_add: source must be", lambda: ops.index_add(x, 0, [0], x)),
        (ValueError, "not all of size 1", lambda: ops.squeeze(x, 0)),
        (ValueError, "chunks must be 1", lambda: ops.chunk(x, 0)),
        (ValueError, "widths must be 0", lambda: ops.pad(x, -1)),
        (ValueError, "dot: at most 2 axes", lambda: ops.dot(x[None], x)),
        (ValueError, "need an axis", lambda: x @ Tensor(1.0)),
        (TypeError, "are the same: give one", lambda: ops.sum(x, axes=0, dim=0)),
    ]:
        with naming(match), pytest.raises(error, match=match):
            call()


def test_vectors_in_products_of_arrays():
    rng = np.random.default_rng(0)
    for a, b in [((5,), (5,)), ((5,), (2, 5, 3)), ((2, 3, 5), (5,)), ((0,), (0,)), ((7, 5), (5,))]:
        with naming(a, b):
            x, y = rng.standard_normal(a).astype("f"), rng.standard_normal(b).astype("f")
            got = _C.array(x) @ _C.array(y)
            assert got.shape == (x @ y).shape
            np.testing.assert_allclose(got.numpy(), x @ y, rtol=1e-5, atol=1e-6)
    stepped = _C.array(rng.standard_normal(10).astype("f"))[::2]
    wide = rng.standard_normal((5, 4)).astype("f")
    np.testing.assert_allclose(
        (stepped @ _C.array(wide)).numpy(), stepped.numpy() @ wide, rtol=1e-5
    )


def test_index_select_of_arrays():
    x = np.arange(24).reshape(2, 3, 4)
    for dtype in ("float32", "bfloat16", "int32", "bool"):
        for axis, ids in ((1, [2, 0, 2]), (-1, [-1]), (0, [])):
            with naming(dtype, axis, ids):
                a = to_ndarray(x, dtype, ndl.cpu(), "transposed")
                got = a.index_select(axis, ids).numpy()
                np.testing.assert_array_equal(got, np.take(a.numpy(), np.array(ids, int), axis))
    with pytest.raises(IndexError, match="out of range"):
        _C.array(x).index_select(0, [2])


@pytest.mark.parametrize(
    "name", "sum mean amax max amin min any all prod var std median count_nonzero logsumexp".split()
)
def test_reductions_keep_axes_as_numpy_does(name):
    reference = {"logsumexp": lambda x, **words: np.log(np.sum(np.exp(x), **words))}
    x = np.random.default_rng(0).standard_normal((3, 4, 5)).astype(np.float32)
    for axes in (None, 0, -1, (0, 2), (1, -3), (0, 1, 2)):
        for keepdims in (False, True):
            if name == "median" and isinstance(axes, tuple):
                continue
            with naming(name, axes, keepdims):
                got = getattr(ops, name)(Tensor(x), axes, keepdims)
                wanted = (reference.get(name) or getattr(np, name))(x, axis=axes, keepdims=keepdims)
                assert got.shape == np.shape(wanted)
                np.testing.assert_allclose(got.numpy(), wanted, rtol=1e-5, atol=1e-6)


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


@pytest.mark.parametrize("dtype", ["uint8", "uint16"])
def test_differences_of_unsigned_integers_do_not_wrap(dtype):
    x, y = np.array([3, 200, 7], dtype), np.array([5, 190, 7], dtype)
    a, b = (ndl.tensor(v, dtype=dtype) for v in (x, y))
    wide = x.astype(float), y.astype(float)
    for rtol, atol in ((0, 2), (0.05, 0), (0, 10), (0, 1)):
        assert ndl.isclose(a, b, rtol, atol).tolist() == np.isclose(*wide, rtol, atol).tolist()
        assert ndl.allclose(a, y.tolist(), rtol, atol) == np.allclose(*wide, rtol, atol)
    assert ndl.allclose(a, 7, 0, 200) and not ndl.allclose(a, 7.5, 0, 190)
    assert not ndl.allclose(ndl.tensor([2**24 + 1]), ndl.tensor([2**24]), 0, 0)
    np.testing.assert_allclose(ndl.lerp(a, b, 0.25).numpy(), wide[0] + 0.25 * (wide[1] - wide[0]))
    assert np.isclose(ops.mse_loss(a, b).item(), np.mean((wide[0] - wide[1]) ** 2))
    assert np.isclose(ops.l1_loss(a, b).item(), np.mean(abs(wide[0] - wide[1])))
    p, t = ndl.tensor([1, 0, 1], dtype=dtype), ndl.tensor([200, 0, 1], dtype=dtype)
    loss = np.log1p(np.exp([1.0, 0, 1])) - np.array([200.0, 0, 1])
    got = ops.binary_cross_entropy_with_logits(p, t, "none")
    np.testing.assert_allclose(got.numpy(), loss, rtol=1e-5)
    assert ops.binary_cross_entropy(p, [1, 0, 1]).item() == 0
