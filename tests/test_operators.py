"""Operators of a Tensor under NumPy's names. Indexing: tests/ops/test_indexing.py; gradients:
tests/gradients.py."""

import contextlib
import itertools
import operator

import numpy as np
import pytest
from harness import naming

import needle as ndl
from needle import Tensor, nn, ops
from needle import backend_ndarray as nd

X = np.random.default_rng(0).standard_normal((3, 4)).astype(np.float32)


# ---- dtypes --------------------------------------------------------------------------------------

INTEGERS = ("int32", "int64", "uint8", "uint16")
FLOATS = ("float32", "bfloat16", "float16")
SIGNS = {"add": "+", "sub": "-", "mul": "*", "truediv": "/", "floordiv": "//", "mod": "%"}
SIGNS |= {"pow": "**", "and_": "&", "or_": "|", "xor": "^"}
COMPARED = ("eq", "ne", "lt", "le", "gt", "ge")
BITS = ("and_", "or_", "xor")


def rank(dtype):
    return 2 if dtype in FLOATS else int(dtype != "bool")


def result_dtype(name, one, other):
    """The rule of docs/operations.md; None: TypeError."""
    if name in COMPARED:
        return "bool"
    if rank(one) == rank(other) == 2:
        dtype = one if one == other else "float32"
    elif 2 in (rank(one), rank(other)):
        dtype = one if rank(one) == 2 else other
    else:
        dtype = str(np.result_type(one, other))
    if name in BITS:
        return None if dtype in FLOATS else dtype
    if name == "truediv" and dtype not in FLOATS:
        return "float32"
    return "int32" if dtype == "bool" else dtype


def drawn(dtype, low=0):
    values = np.random.default_rng(3).integers(low, 2 if dtype == "bool" else 5, 31)
    return values.astype("float32" if dtype == "bfloat16" else dtype)


def expected(name, x, y, dtype):
    """In float64, or in the integers of the result, as NumPy has it."""
    wide = "float64" if dtype in FLOATS else dtype
    if name in COMPARED:
        wide = np.result_type(x, y, "int64")
    with np.errstate(all="ignore"):
        return getattr(operator, name)(x.astype(wide), y.astype(wide))


def close(got, wanted, dtype):
    bound = {"float32": 1e-6, "bfloat16": 8e-3, "float16": 1e-3}.get(dtype, 0)
    np.testing.assert_allclose(got.numpy(), wanted, rtol=bound)


def check(apply, operands, dtype, wanted, *case):
    """dtype: None where bits are asked for of floats."""
    with naming(apply.__name__, *case, *(type(z).__name__ for z in operands)):
        if dtype is None:
            with pytest.raises(TypeError, match="needs integers or bool"):
                apply(*operands)
        else:
            got = apply(*operands)
            assert got.dtype == dtype and got.shape == wanted.shape
            close(got, wanted, dtype)


@pytest.mark.parametrize("name", [*SIGNS, *COMPARED])
def test_dtypes_of_two_operands_are_those_of_the_table(name, device):
    """Of arrays and of Tensors, which may be a NumPy array or a list on either side."""
    apply = getattr(operator, name)
    for one, other in itertools.product((*FLOATS, *INTEGERS, "bool"), repeat=2):
        x, y = drawn(one), drawn(other, 1)
        dtype = result_dtype(name, one, other)
        arrays = [nd.array(v, d, device) for v, d in ((x, one), (y, other))]
        tensors = [Tensor.from_ndarray(a) for a in arrays]
        pairs = [arrays, tensors]
        for a, b in (arrays, tensors):
            pairs += [(a, y)] * (other != "bfloat16") + [(x, b)] * (one != "bfloat16")
            pairs += [(a, y.tolist())] * (other in ("float32", "int64", "bool"))
            pairs += [(x.tolist(), b)] * (one in ("float32", "int64", "bool"))
        wanted = dtype and expected(name, x, y, dtype)
        for pair in pairs:
            check(apply, pair, dtype, wanted, one, other)


@pytest.mark.parametrize("own, wide", [("int8", "int32"), ("int16", "int32"), ("uint32", "int64")])
def test_numpy_operands_of_other_integers_keep_their_numbers(own, wide, device):
    y = np.array([np.iinfo(own).min, np.iinfo(own).max], own)
    zeros = nd.zeros(2, "uint8", device)
    for a in (zeros, Tensor.from_ndarray(zeros)):
        for got in (a + y, y + a):
            assert got.dtype == wide
            np.testing.assert_array_equal(got.numpy(), y)


@pytest.mark.parametrize("name", [*SIGNS, *COMPARED])
def test_dtypes_beside_numbers_are_those_of_the_table(name, device):
    """A number of Python or NumPy changes the dtype where it is of a higher kind alone."""
    apply = getattr(operator, name)
    numbers = [True, 2, 2.5, np.True_, np.int64(2), np.uint8(2), np.float32(2.5), np.float64(2.5)]
    for one, number in itertools.product((*FLOATS, *INTEGERS, "bool"), numbers):
        x, kind = drawn(one, 1), np.asarray(number).dtype.kind
        like = {"b": "bool", "i": "int32", "u": "int32", "f": "float32"}[kind]
        dtype = one if rank(like) <= rank(one) else like
        dtype = result_dtype(name, dtype, dtype)
        y = np.asarray(number)
        for wrap in (lambda a: a, Tensor.from_ndarray):
            a = wrap(nd.array(x, one, device))
            for pair, values in (((a, number), (x, y)), ((number, a), (y, x))):
                check(apply, pair, dtype, dtype and expected(name, *values, dtype), one, number)


@pytest.mark.parametrize("name", ["maximum", "minimum"])
def test_extremes_have_the_dtype_of_a_sum_but_of_bool_bool(name, device):
    for one, other in itertools.product((*FLOATS, *INTEGERS, "bool"), repeat=2):
        x, y = drawn(one), drawn(other, 1)
        wanted = "bool" if one == other == "bool" else result_dtype("add", one, other)
        a, b = (nd.array(v, d, device) for v, d in ((x, one), (y, other)))
        tensors = [Tensor.from_ndarray(z) for z in (a, b)]
        for apply, pair in (getattr(nd.NDArray, name), (a, b)), (getattr(ops, name), tensors):
            check(apply, pair, wanted, getattr(np, name)(x, y), one, other)


@pytest.mark.parametrize("name", ["neg", "pos", "abs", "invert"])
def test_dtypes_of_one_operand(name, device):
    apply = getattr(operator, name)
    for dtype in (*FLOATS, *INTEGERS, "bool"):
        x = drawn(dtype)
        array = nd.array(x, dtype, device)
        x = x.astype("int32") if dtype == "bool" and name == "neg" else x
        refused = name == "invert" and dtype in FLOATS
        wanted = None if refused else x if name == "pos" else apply(x)
        made = None if refused else "int32" if dtype == "bool" and name == "neg" else dtype
        for a in (array, Tensor.from_ndarray(array)):
            check(apply, (a,), made, wanted, dtype)


@pytest.mark.parametrize("dtype", FLOATS)
def test_products_take_array_likes_of_whole_numbers(dtype):
    x, y = drawn(dtype)[:4].reshape(2, 2), np.array([[1, 2], [3, 4]])
    array = nd.array(x, dtype)
    for a in (array, Tensor.from_ndarray(array)):
        for beside in (y, y.tolist(), y.astype("uint8")):
            for got, wanted in ((a @ beside, x @ y), (beside @ a, y @ x)):
                assert got.dtype == dtype and got.shape == wanted.shape
                close(got, wanted, dtype)
        if dtype != "float32":
            with pytest.raises(TypeError, match="matmul"):
                a @ y.astype("float32")
        with pytest.raises(TypeError):
            a @ "a"


@pytest.mark.parametrize("name", SIGNS)
def test_dtypes_in_place_stay_or_the_assignment_is_refused(name, device):
    apply = getattr(operator, "i" + name.removesuffix("_"))
    for one, other in itertools.product((*FLOATS, *INTEGERS, "bool"), repeat=2):
        x, y = drawn(one), drawn(other, 1)
        dtype = result_dtype(name, one, other)
        highest = 3 if dtype is None else max(rank(one), rank(other), 2 * (dtype in FLOATS))
        for wrap in (lambda a: a, Tensor.from_ndarray):
            a, b = (wrap(nd.array(v, d, device)) for v, d in ((x, one), (y, other)))
            for beside in (b, y) if other != "bfloat16" else (b,):
                with naming(name, one, other, type(a).__name__, type(beside).__name__):
                    row = wrap(nd.array(np.stack([x, x]), one, device))
                    view = row[1:]
                    if highest > rank(one):
                        with pytest.raises(TypeError, match="cannot hold|needs integers or bool"):
                            apply(view, beside)
                        np.testing.assert_array_equal(row.numpy()[1], x)
                        continue
                    with np.errstate(invalid="ignore"):
                        wanted = expected(name, x, y, dtype).astype(row.numpy().dtype)
                    assert apply(view, beside) is view and view.dtype == one
                    close(row[0:1], x[None], one)
                    close(row[1:2], wanted[None], one)


# ---- in place ------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["frozen", "no_grad", "of no_grad"])
@pytest.mark.parametrize("name", [*SIGNS, "matmul"])
def test_augmented_assignment_writes_in_place_where_no_gradient_flows(name, how):
    dtype = "int32" if name in BITS else "float32"
    x = np.array([[5, 2], [3, 4]], dtype)
    tensor = Tensor(x, dtype=dtype, requires_grad=how == "no_grad")
    with ndl.no_grad():
        tensor = tensor * 1 if how == "of no_grad" else tensor
    apply, view = getattr(operator, "i" + name.removesuffix("_")), tensor.detach().T
    with ndl.no_grad() if how == "no_grad" else contextlib.nullcontext():
        same = apply(tensor, Tensor(x, dtype=dtype, requires_grad=False))
        row = tensor[1]
        row *= 2
    wanted = getattr(operator, name)(x, x)
    wanted[1] *= 2
    assert same is tensor and tensor.op is None
    np.testing.assert_allclose(tensor.numpy(), wanted, rtol=1e-6)
    np.testing.assert_array_equal(view.numpy(), tensor.numpy().T)


@pytest.mark.parametrize("dtype", ["int32", "int64", "uint8", "uint16", "bool"])
def test_values_of_no_float_dtype_need_no_gradient_and_change_in_place(dtype):
    x = Tensor([1, 0, 1], dtype=dtype)
    assert not x.requires_grad and Tensor([1.0], dtype="bfloat16").requires_grad
    same = x
    same &= Tensor([1, 1, 0], dtype=dtype)
    x[2] = 1
    assert same is x and x.numpy().tolist() == [1, 0, 1]


STEPS = {  # what an augmented assignment of h gives, and its derivatives
    "add": (lambda h, y: h + y, lambda h, y: 1, lambda h, y: 1),
    "sub": (lambda h, y: h - y, lambda h, y: 1, lambda h, y: -1),
    "mul": (lambda h, y: h * y, lambda h, y: y, lambda h, y: h),
    "truediv": (lambda h, y: h / y, lambda h, y: 1 / y, lambda h, y: -h / y**2),
    "pow": (lambda h, y: h**y, lambda h, y: y * h ** (y - 1), lambda h, y: h**y * np.log(h)),
    "mod": (lambda h, y: h % y, lambda h, y: 1, lambda h, y: -(h // y)),
    "floordiv": (lambda h, y: h // y, lambda h, y: 0, lambda h, y: 0),
}
VIEWS = {
    "itself": (lambda h: h, np.s_[:]),
    "a row": (lambda h: h[1], np.s_[1]),
    "a row of a block": (lambda h: h[1:][0], np.s_[1]),
    "columns": (lambda h: h.T[::-2], np.s_[:, ::-2]),
    "flat": (lambda h: h.reshape(-1), np.s_[:]),
    "of a tuple": (lambda h: ops.split(h, 0)[2], np.s_[2]),
    "reversed": (lambda h: h.flip(0)[:1], np.s_[-1:]),
    "a diagonal": (lambda h: ops.diagonal(h, 1), np.s_[[0, 1, 2], [1, 2, 3]]),
    "an axis more": (lambda h: h.unsqueeze(0).transpose(0, 1)[0], np.s_[0]),
}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("name", STEPS)
def test_augmented_assignment_in_the_graph_has_its_gradient(name, view):
    """Beside a number, a constant and a leaf; seen by all that is computed later."""
    of, place = VIEWS[view]
    start, weights = np.arange(1.0, 13).reshape(3, 4), np.arange(12.0).reshape(3, 4) - 4
    forward, slope, slope_of_y = STEPS[name]
    for y in 2.5, Tensor(2.5, requires_grad=False), Tensor(2.5):
        leaf = Tensor(start)
        h = leaf * 3
        part = of(h)
        after = getattr(operator, f"i{name}")(part, y)
        assert after is part
        wanted, slopes = start * 3, np.full(start.shape, 3.0)
        slopes[place] = 3 * slope(wanted[place], 2.5)
        of_y = np.sum(weights[place] * slope_of_y(wanted[place], 2.5))
        wanted[place] = forward(wanted[place], 2.5)
        np.testing.assert_allclose(h.numpy(), wanted, rtol=1e-6)
        (h * Tensor(weights, requires_grad=False)).sum().backward()
        np.testing.assert_allclose(leaf.grad.numpy(), slopes * weights, rtol=1e-5)
        if isinstance(y, Tensor) and y.requires_grad:
            np.testing.assert_allclose(0 if y.grad is None else y.grad.numpy(), of_y, rtol=1e-5)
        leaf.grad = None
        (part * part).sum().backward()
        slopes = slopes * (2 * wanted)
        rest = np.ones(start.shape, bool)
        rest[place] = False
        slopes[rest] = 0
        np.testing.assert_allclose(leaf.grad.numpy(), slopes, rtol=1e-5)


def test_augmented_assignment_of_a_sum_gives_both_their_gradients():
    a, b = Tensor([1.0, 2.0]), Tensor([3.0])
    total = ndl.zeros(2)
    for i in range(3):
        total += a * (i + 1)
        total[0] -= (b * 4)[0]
    h = total * 1
    h += h * 2  # reads no element that it replaces
    h.sum().backward()
    np.testing.assert_array_equal(a.grad.numpy(), [18, 18])
    np.testing.assert_array_equal(b.grad.numpy(), [-36])
    h = a * 1
    h *= a * 2  # the gradient of the factor reads h as it was
    h **= 2
    h *= h
    h.clamp_(0, 100)
    a.grad = None
    h.sum().backward()  # 16 a^8, of 2 beyond the limit
    np.testing.assert_array_equal(a.grad.numpy(), [128, 0])


def test_writes_to_no_elements_are_of_their_own_tensor():
    """The memory of empty arrays has one address."""
    for write in (
        lambda h: operator.iadd(h, 1), lambda h: h.__setitem__(..., h * 2), lambda h: h.fill_(2),
    ):  # fmt: skip
        leaf = Tensor(np.ones((0, 2)))
        h = leaf * 2
        write(h)
        h.sum().backward()
        assert leaf.grad is None or leaf.grad.shape == (0, 2)


def test_assignment_to_a_leaf_and_its_views_is_refused():
    for write in (
        lambda x: operator.iadd(x, 1), lambda x: operator.imul(x[0], 2), lambda x: x.T.zero_(),
        lambda x: x.add_(1), lambda x: x[1:][0].fill_(3), lambda x: x[0].clamp_(0, 1),
    ):  # fmt: skip
        x = Tensor([[1.0, 2.0], [3.0, 4.0]])
        with pytest.raises(RuntimeError, match="leaf that requires gradients"):
            write(x)
        np.testing.assert_array_equal(x.numpy(), [[1, 2], [3, 4]])
    for text, error in (
        ("x += y", ValueError), ("i += 0.5", TypeError), ("i.div_(2)", TypeError),
        ("m += 1", TypeError), ("x @= y[:, :1]", ValueError), ("i.mul_(g)", TypeError),
    ):  # fmt: skip
        names = {"x": ndl.ones(2), "y": ndl.ones(2, 2), "i": ndl.tensor([1, 2])}
        names |= {"m": ndl.tensor([True]), "g": Tensor([1.0, 2.0])}
        with naming(text), pytest.raises(error):
            exec(text, names)


@pytest.mark.parametrize("name", [*SIGNS, "matmul"])
def test_augmented_assignment_of_what_is_no_operand_is_refused(name):
    apply, leaf = getattr(operator, "i" + name.removesuffix("_")), Tensor([1.0])
    for tensor in (ndl.ones(1), leaf * 1):
        for other in ("a", None, object()):
            with naming(other), pytest.raises(TypeError):
                apply(tensor, other)
            with naming(other), pytest.raises(TypeError):
                tensor.mul_(other)
            assert tensor.tolist() == [1]


def test_views_of_a_constant_follow_it_into_the_graph():
    for write in (
        lambda x, row, other, y: operator.iadd(row, y),
        lambda x, row, other, y: x.__setitem__(0, y),
        lambda x, row, other, y: operator.iadd(other.T.T, y),
    ):
        w, x = Tensor([1.0, 2.0]), ndl.ones(2, 2)
        row, other = x[0], x.reshape(4)[:2]
        write(x, row, other, w * 2)
        for seen, wanted in ((x, [[3, 5]] * 2), (row, [3, 5]), (other, [3, 5])):
            w.grad = None
            (seen * Tensor(wanted, requires_grad=False)).sum().backward()
            np.testing.assert_array_equal(w.grad.numpy(), [6, 10])


@pytest.mark.parametrize("view", VIEWS)
def test_writes_through_a_view_that_followed_are_of_the_graph(view):
    """The view is of a constant that gets gradients after it was taken."""
    of, place = VIEWS[view]
    for write, slope in (
        (lambda part, leaf: operator.imul(part, 5), 5),
        (lambda part, leaf: part.__setitem__(..., 7.0), 0),
        (lambda part, leaf: part.fill_(0), 0),
        (lambda part, leaf: operator.iadd(part[..., :], leaf.sum() * 0), 1),
    ):
        leaf, x = Tensor(np.ones((3, 4))), ndl.ones(3, 4)
        part = of(x)
        assert not part.requires_grad
        x += leaf * 2
        assert part.requires_grad
        write(part, leaf)
        assert part.requires_grad and not part.is_leaf()
        x.sum().backward()
        wanted = np.full((3, 4), 2.0)
        wanted[place] *= slope
        np.testing.assert_array_equal(leaf.grad.numpy(), wanted)


def test_views_of_what_zero_made_a_constant_are_written_in_place():
    w = Tensor([1.0, 2.0])
    h = w * 2
    part = h[:1]
    h.zero_()
    part.fill_(3)
    part[0] = 4
    assert h.tolist() == [4, 0] and h.is_leaf() and not h.requires_grad
    h += w * 4
    h.sum().backward()
    np.testing.assert_array_equal(w.grad.numpy(), [4, 4])


# ---- a Tensor as an object of Python -------------------------------------------------------------


def test_a_tensor_is_a_value_of_python():
    x, a, b = Tensor(X), Tensor([1, 2]), Tensor([1, 2])
    held = {a: "a", b: "b"}  # found by its identity
    assert held[a] == "a" and held[b] == "b" and a in held and len({a, b, a}) == 2
    weight = nn.Linear(2, 2).weight
    assert hash(weight) == object.__hash__(weight) and {weight: 1}[weight] == 1
    assert (x == None) is False and (x != None) is True and (x == "x") is False  # noqa: E711
    assert Tensor([[2]]) and not Tensor(0)
    assert int(Tensor([[3.7]])) == 3 and type(int(Tensor(3))) is int
    assert int(Tensor([-2], dtype="int64")) == -2 and float(Tensor([[1.5]])) == 1.5
    loss = (Tensor([1.25]) * 2).sum()
    assert f"{loss:.3f}" == "2.500" and f"{loss}" == str(loss) and float(loss) == 2.5
    assert f"{Tensor([3], dtype='int32'):04d}" == "0003"
    assert len(x) == 3 and [row.shape for row in x] == [(4,)] * 3
    first, _, last = x
    (first * 2 + last).sum().backward()
    np.testing.assert_array_equal(x.grad.numpy(), np.array([[2], [0], [1]]) * np.ones((3, 4)))
    for use, error, said in (
        (lambda: x < None, TypeError, "'<' not supported"),
        (lambda: bool(a == b), ValueError, "only an array with one element"),
        (lambda: int(a), ValueError, r"size must be 1, but the shape is \(2,\)"),
        (lambda: float(a), ValueError, r"size must be 1, but the shape is \(2,\)"),
        (lambda: f"{a:.3f}", ValueError, "size must be 1"),
        (lambda: len(loss), TypeError, None),
        (lambda: iter(loss), TypeError, None),
    ):
        with pytest.raises(error, match=said):
            use()


def test_to_takes_names_and_gradients_come_back():
    x = Tensor(X)
    for name in ("cpu", "float32", "bfloat16", "int64"):
        y = x.to(name)
        assert (y.device, y.dtype) == (ndl.cpu(), "float32" if name == "cpu" else name)
    packed = x.T.contiguous()
    assert x.contiguous() is x and not x.T.is_contiguous() and packed.is_contiguous()
    (packed.to("bfloat16") * 3).to(ndl.cpu()).sum().backward()
    assert x.grad.dtype == "float32"
    np.testing.assert_array_equal(x.grad.numpy(), np.full((3, 4), 3))
    for wrong in ("gpu", "float64"):
        with pytest.raises(ValueError, match=f"must name a device .cpu.*dtype .*not '{wrong}'"):
            x.to(wrong)
    with pytest.raises(ValueError, match="device cuda:63: "):
        x.to("cuda:63")


@pytest.mark.cuda
def test_gradients_come_back_to_their_device():
    x = Tensor(X, device=ndl.cpu())
    y = x.to(ndl.cuda())
    assert y.device == ndl.cuda()
    (y * y).sum().backward()
    assert x.grad.device == ndl.cpu()
    np.testing.assert_allclose(x.grad.numpy(), 2 * X, rtol=1e-6)


# ---- where, mean ---------------------------------------------------------------------------------


def test_where_condition_of_any_dtype_holds_where_it_is_not_zero():
    values = np.array([-1, 0, 3, -0.25, 0.5, -0.0])
    for dtype, of in itertools.product((*FLOATS, "int32", "int64"), (*FLOATS, *INTEGERS, "bool")):
        condition, a = nd.array(values, dtype=dtype), Tensor([1, 0, 3, 4, 5, 6], dtype=of)
        for given in (condition, Tensor.from_ndarray(condition), condition.numpy().tolist()):
            got = ndl.where(given, a, 0)
            with naming(dtype, of, type(given)):
                assert got.dtype == of
                np.testing.assert_array_equal(got, np.where(condition.numpy(), a.numpy(), 0))


def test_where_ignores_elements_that_are_not_chosen():
    """Neither infinities nor NaN, forward or backward, and -0 keeps its sign."""
    x = Tensor([4.0, -np.inf, np.nan, -0.0])
    y = ndl.where(x == 4, x + x, ndl.where(x == 0, x, 1.0))
    np.testing.assert_array_equal(y.numpy(), [8, 1, 1, -0.0])
    assert np.signbit(y.numpy()[3])
    y.backward(Tensor([1, np.inf, 1, 1]))
    np.testing.assert_array_equal(x.grad.numpy()[[0, 1, 3]], [2, 0, 1])
    assert ndl.where([True, False], 1, 2).tolist() == [1, 2]
    assert ndl.where([True, False], Tensor([1, 2], dtype="int32"), 0.25).tolist() == [1, 0.25]


def test_mean_of_16_bits_sums_in_float32_and_that_of_nothing_is_nan():
    for dtype in "float16", "bfloat16":
        x = Tensor(np.full((1000, 3), 100.0), dtype=dtype)
        for got in ops.mean(x), ops.mean(x, 0), x.mean(1):
            assert got.dtype == dtype and (got.numpy() == 100).all()
        ops.mean(x, 0).backward()
        np.testing.assert_allclose(x.grad.numpy(), 1e-3, rtol=2e-2 if dtype == "bfloat16" else 1e-3)
        x = Tensor(np.zeros((0, 3)), dtype=dtype)
        for axes, shape in (None, ()), (0, (3,)), ((0, 1), ()), (1, (0,)):
            for got in ops.mean(x, axes), x.mean(axes), x.cached_data.mean(axis=axes):
                assert got.shape == shape and np.isnan(got.numpy()).all()
