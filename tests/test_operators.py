"""Operators of a Tensor under NumPy's names. Indexing: tests/ops/test_indexing.py; gradients:
tests/gradients.py."""

import operator

import numpy as np
import pytest

import needle as ndl
from needle import Tensor, nn, ops
from needle import backend_ndarray as nd

X = np.random.default_rng(0).standard_normal((3, 4)).astype(np.float32)


@pytest.mark.parametrize("name", ["eq", "ne", "lt", "le", "gt", "ge"])
def test_comparisons_are_elementwise(device, name):
    compare = getattr(operator, name)
    x, other = Tensor(X, device=device), X[::-1].copy()
    beside = [other, Tensor(other, device=device), Tensor(other, device=device).cached_data]
    for y in [*beside, other.tolist(), float(X[0, 0]), X[1, 1]]:
        got = compare(x, y)
        expected = compare(X, np.asarray(y, dtype=np.float32))
        assert got.dtype == "bool" and not got.requires_grad and got.op is None
        np.testing.assert_array_equal(got.numpy(), expected)
    np.testing.assert_array_equal(compare(other, x).numpy(), compare(other, X))
    np.testing.assert_array_equal(compare(0, x).numpy(), compare(0, X))


def test_values_that_are_no_operands_are_not_equal():
    x = Tensor(X)
    assert (x == None) is False and (x != None) is True and (x == "x") is False  # noqa: E711
    with pytest.raises(TypeError, match="'<' not supported"):
        x < None  # noqa: B015


def test_a_tensor_is_found_by_its_identity():
    a, b = Tensor([1, 2]), Tensor([1, 2])
    held = {a: "a", b: "b"}
    assert held[a] == "a" and held[b] == "b" and a in held and len({a, b, a}) == 2
    assert Tensor([1, 2]) not in held
    weight = nn.Linear(2, 2).weight
    assert hash(weight) == object.__hash__(weight) and {weight: 1}[weight] == 1


def test_truth():
    assert Tensor([[2]]) and not Tensor(0)
    with pytest.raises(ValueError, match="only an array with one element"):
        bool(Tensor([1, 2]) == Tensor([1, 2]))


def test_methods_are_numpys(device):
    x = Tensor(X, device=device)
    positive = np.abs(X) + 1
    for name in ("exp", "log", "sqrt"):
        got = getattr(Tensor(positive, device=device), name)()
        np.testing.assert_allclose(got.numpy(), getattr(np, name)(positive), rtol=1e-5)
    for name in ("sum", "mean", "max"):
        for axes in (None, 0, (0, 1), -1):
            for keepdims in (False, True):
                got = getattr(x, name)(axes, keepdims=keepdims)
                expected = getattr(X, name)(axis=axes, keepdims=keepdims)
                assert got.shape == expected.shape and got.requires_grad
                np.testing.assert_allclose(got.numpy(), expected, rtol=1e-5, atol=1e-6)
                for word in ("axes", "axis"):
                    again = getattr(x, name)(**{word: axes}, keepdims=keepdims)
                    np.testing.assert_array_equal(again.numpy(), got.numpy())
    for axis in (None, 0, -1):
        for keepdims in (False, True):
            got = x.argmax(axis, keepdims)
            assert got.dtype == "int64" and not got.requires_grad
            np.testing.assert_array_equal(got.numpy(), X.argmax(axis, keepdims=keepdims))
            for word in ("axes", "axis"):
                again = x.argmax(**{word: axis}, keepdims=keepdims)
                np.testing.assert_array_equal(again.numpy(), got.numpy())
    for name in ("sum", "mean", "max", "argmax"):
        assert getattr(x, name)(0).shape == (4,) and getattr(x, name)().shape == ()
        with pytest.raises(TypeError, match=f"{name}: axes and axis are the same: give one"):
            getattr(x, name)(axes=0, axis=1)
    cube = Tensor(np.zeros((2, 3, 4)))
    assert cube.T.shape == (4, 3, 2) and Tensor(1).T.shape == ()
    np.testing.assert_array_equal(x.T.numpy(), X.T)
    np.testing.assert_array_equal(x.index_select(1, [3, 0]).numpy(), X[:, [3, 0]])


def test_length_and_iteration():
    x = Tensor(X)
    assert len(x) == 3 and [row.shape for row in x] == [(4,)] * 3
    first, _, last = x
    (first * 2 + last).sum().backward()
    np.testing.assert_array_equal(x.grad.numpy(), np.array([[2], [0], [1]]) * np.ones((3, 4)))
    for use in (len, iter):
        with pytest.raises(TypeError):
            next(use(Tensor(1)))


def test_format():
    loss = (Tensor([1.25]) * 2).sum()
    assert f"{loss:.3f}" == "2.500" and f"{loss}" == str(loss) and float(loss) == 2.5
    assert f"{Tensor([3], dtype='int32'):04d}" == "0003"
    with pytest.raises(ValueError, match="size must be 1"):
        f"{Tensor([1, 2]):.3f}"


def test_contiguous_and_to():
    x = Tensor(X)
    turned = x.T
    assert x.is_contiguous() and x.contiguous() is x and not turned.is_contiguous()
    packed = turned.contiguous()
    assert (
        packed.is_contiguous() and packed.cached_data._handle.ptr() != x.cached_data._handle.ptr()
    )
    (packed * 3).to(ndl.cpu()).sum().backward()
    np.testing.assert_array_equal(x.grad.numpy(), np.full((3, 4), 3))


def test_to_takes_names():
    x = Tensor(X)
    for name in ("cpu", "float32", "bfloat16", "int64"):
        y = x.to(name)
        assert (y.device, y.dtype) == (ndl.cpu(), "float32" if name == "cpu" else name)
    x.to("bfloat16").sum().backward()
    assert x.grad.dtype == "float32"
    assert [nd.empty(1, dtype=dtype).dtype for dtype in nd.DTYPES] == list(nd.DTYPES)
    for wrong in ("gpu", "float64"):
        with pytest.raises(ValueError, match=f"must name a device .cpu.*dtype .*not '{wrong}'"):
            x.to(wrong)
    with pytest.raises(ValueError, match="device cuda:63: "):
        x.to("cuda:63")


def test_one_element_is_a_number():
    assert int(Tensor([[3.7]])) == 3 and type(int(Tensor(3))) is int
    assert int(Tensor([-2], dtype="int64")) == -2 and float(Tensor([[1.5]])) == 1.5
    for number in (int, float):
        with pytest.raises(ValueError, match=r"size must be 1, but the shape is \(2,\)"):
            number(Tensor([1, 2]))


@pytest.mark.cuda
def test_gradients_come_back_to_their_device():
    x = Tensor(X, device=ndl.cpu())
    y = x.to(ndl.cuda())
    assert y.device == ndl.cuda()
    (y * y).sum().backward()
    assert x.grad.device == ndl.cpu()
    np.testing.assert_allclose(x.grad.numpy(), 2 * X, rtol=1e-6)


@pytest.mark.parametrize(
    "dtype", ["float32", "bfloat16", "float16", "int32", "int64", "uint8", "bool"]
)
def test_where_chooses_bits(dtype):
    condition = np.array([[True], [False]])
    a, b = Tensor([1, 0, 3], dtype=dtype), Tensor([[0, 1, 1]], dtype=dtype)
    got = ndl.where(condition, a, b)
    assert got.dtype == dtype
    np.testing.assert_array_equal(got.numpy(), np.where(condition, a.numpy(), b.numpy()))
    number = ndl.where(Tensor([1, 0, 2]), a, 0)
    assert number.dtype == dtype
    np.testing.assert_array_equal(number.numpy(), np.where([1, 0, 1], a.numpy(), 0))


def test_where_condition_of_any_dtype_holds_where_it_is_not_zero():
    values, a = np.array([-1, 0, 3, -0.25, 0.5, -0.0]), Tensor([1, 2, 3, 4, 5, 6])
    for dtype in ("float32", "bfloat16", "float16", "int32", "int64"):
        condition = nd.array(values, dtype=dtype)
        expected = np.where(condition.numpy(), a.numpy(), 9)
        for given in (condition, Tensor.from_ndarray(condition), condition.numpy().tolist()):
            got = ndl.where(given, a, 9).numpy()
            np.testing.assert_array_equal(got, expected, err_msg=f"{dtype}, {type(given)}")


def test_where_ignores_elements_that_are_not_chosen():
    """Neither infinities nor NaN, forward or backward, and -0 keeps its sign."""
    x = Tensor([4.0, -np.inf, np.nan, -0.0])
    y = ndl.where(x == 4, x + x, ndl.where(x == 0, x, 1.0))
    np.testing.assert_array_equal(y.numpy(), [8, 1, 1, -0.0])
    assert np.signbit(y.numpy()[3])
    y.backward(Tensor([1, np.inf, 1, 1]))
    np.testing.assert_array_equal(x.grad.numpy()[[0, 1, 3]], [2, 0, 1])
    assert ndl.where([True, False], 1, 2).tolist() == [1, 2]


def test_where_of_two_dtypes():
    got = ndl.where([True, False], Tensor([1, 2], dtype="int32"), Tensor([0.5, 0.25]))
    assert got.dtype == "float32"
    np.testing.assert_array_equal(got.numpy(), [1, 0.25])


def test_arange():
    for args in [(5,), (1, 4), (4, 1, -1), (0, 1, 0.25), (3.0,), (2, 2)]:
        got, expected = ndl.arange(*args), np.arange(*args)
        assert got.dtype == ("int64" if expected.dtype.kind == "i" else "float32")
        np.testing.assert_array_equal(got.numpy(), expected.astype(got.dtype))
    assert ndl.arange(3, dtype="bfloat16").dtype == "bfloat16"
    np.testing.assert_array_equal(Tensor(X)[ndl.arange(3), ndl.arange(3)].numpy(), X.diagonal())


def test_concatenate_refuses_shapes_that_do_not_fit():
    with pytest.raises(ValueError, match="may differ in axis 1 alone"):
        ndl.concatenate([Tensor(X), Tensor(X[:2])], 1)
    with pytest.raises(TypeError, match="Tensor 1 is int32, but the first is float32"):
        ndl.concatenate([Tensor(X), Tensor(X, dtype="int32")])
    with pytest.raises(ValueError, match="one Tensor or more"):
        ndl.concatenate([])
    with pytest.raises(ValueError, match="axis 2 does not exist"):
        ndl.concatenate([Tensor(X)], 2)


def test_mean_of_16_bits_sums_in_float32():
    for dtype in "float16", "bfloat16":
        x = Tensor(np.full((1000, 3), 100.0), dtype=dtype)
        for got in ops.mean(x), ops.mean(x, 0), x.mean(1):
            assert got.dtype == dtype and (got.numpy() == 100).all()
        ops.mean(x, 0).backward()
        np.testing.assert_allclose(x.grad.numpy(), 1e-3, rtol=2e-2 if dtype == "bfloat16" else 1e-3)


def test_mean_of_nothing_is_nan():
    for dtype in "float32", "bfloat16":
        x = Tensor(np.zeros((0, 3)), dtype=dtype)
        for axes, shape in (None, ()), (0, (3,)), ((0, 1), ()), (1, (0,)):
            for got in ops.mean(x, axes), x.mean(axes), x.cached_data.mean(axis=axes):
                assert got.shape == shape and np.isnan(got.numpy()).all()
            assert ops.mean(x, axes).dtype == dtype
    y = ops.mean(x)
    y.backward()
    assert x.grad.shape == (0, 3)
