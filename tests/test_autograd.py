"""The engine: gradients of every op against central differences, and its bookkeeping."""

import gc
import itertools
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from gradients import GRADIENTS, inputs_of
from harness import central_differences, close, naming

import needle as ndl
from needle import Tensor, autograd, nn, ops, optim
from needle.autograd.graph import shares_memory


def weights_of(result) -> np.ndarray:
    """The gradient that a backward begins with."""
    return np.random.default_rng(0).standard_normal(np.shape(result))


@pytest.mark.parametrize("case", GRADIENTS, ids=str)
def test_gradients(case, device):
    arrays = inputs_of(case)
    tensors = [Tensor(a, device=device) for a in arrays]
    result = case.op(ops, *tensors)
    expected = case.f(*arrays)
    close(result.numpy(), expected, 2e-6)
    weights = weights_of(expected)
    result.backward(Tensor(weights, device=device))
    for tensor, numeric in zip(
        tensors, central_differences(lambda *a: (case.f(*a) * weights).sum(), arrays)
    ):
        assert tensor.grad.shape == tensor.shape and tensor.grad.device == device
        close(tensor.grad.numpy(), numeric, 2e-5)


@pytest.mark.parametrize("case", GRADIENTS, ids=str)
def test_gradients_in_16_bits(case, device):
    """Those of float32 at the same numbers, within the roundings of some steps."""

    def gradients(arrays, dtype):
        tensors = [Tensor(a, device=device, dtype=dtype) for a in arrays]
        result = case.op(ops, *tensors)
        result.backward(Tensor(weights_of(result), device=device, dtype=result.dtype))
        return [tensor.grad for tensor in tensors]

    for dtype, rounding in ("float16", 2**-11), ("bfloat16", 2**-8):
        arrays = [Tensor(a, dtype=dtype).numpy().astype(np.float32) for a in inputs_of(case)]
        for got, wanted in zip(gradients(arrays, dtype), gradients(arrays, "float32")):
            with naming(dtype):
                assert got.shape == wanted.shape
                assert got.dtype == dtype or not case.twice  # of weights in fused ops: float32
                close(got.numpy(), wanted.numpy(), 16 * rounding)


def test_operands_without_gradient_change_no_other(device):
    """Each operand alone needs a gradient, and all others do."""
    for case in GRADIENTS:
        with naming(case):
            arrays, found = inputs_of(case), {}
            every = set(range(len(arrays)))
            for wanted in [every, *({i} for i in every), *(every - {i} for i in every)]:
                if wanted:
                    tensors = [
                        Tensor(a, device, requires_grad=i in wanted) for i, a in enumerate(arrays)
                    ]
                    result = case.op(ops, *tensors)
                    result.backward(Tensor(weights_of(result), device=device))
                    assert {i for i in every if tensors[i].grad is not None} == wanted
                    for i in wanted:
                        grad = found.setdefault(i, tensors[i].grad.numpy())
                        close(tensors[i].grad.numpy(), grad, 1e-5)


@pytest.mark.parametrize("dtype, tolerance", [("float32", 1e-5), ("bfloat16", 2e-2)])
def test_flat_parameters_get_the_same_gradients(dtype, tolerance, device):
    """Some are flat, or all: what a buffer held before reset_grad() is gone, also beside one that
    was written to since. Gradients of a second backward, and of two uses, are added."""
    for case in GRADIENTS:
        with naming(case):
            arrays = inputs_of(case)
            plain = [nn.Parameter(a, device=device, dtype=dtype) for a in arrays]
            result = case.op(ops, *plain)
            seed = Tensor(weights_of(result), device=device, dtype=result.dtype)
            result.backward(seed)
            names = [f"operands.{i}" for i in range(len(arrays))]
            for first, flat in itertools.product(range(len(arrays)), (False, True)):
                module = nn.Module()
                module.operands = [nn.Parameter(a, device=device, dtype=dtype) for a in arrays]
                buffers = nn.flatten_parameters(module, only=None if flat else [names[first]])
                for p in buffers.parameters:
                    p.grad_buffer.fill(np.nan)
                buffers.reset_grad()
                module.operands[first].grad_buffer.fill(1)
                once, *both = (case.op(ops, *module.operands) for _ in range(3))
                for times, result in ((1, once), (2, once), (4, both[0] + both[1])):
                    result.backward(seed)
                    for i, (p, one) in enumerate(zip(module.operands, plain)):
                        assert p.grad_buffer is None or p.grad_buffer.dtype == "float32"
                        close(p.grad.numpy(), times * one.grad.numpy() + (i == first), tolerance)


@pytest.mark.parametrize("case", [case for case in GRADIENTS if case.twice], ids=str)
def test_gradients_of_gradients(case, device):
    """d/dx of <direction, gradient of <weights, f(x)>>, against mixed second differences."""
    arrays = inputs_of(case)
    rng = np.random.default_rng(1)
    weights = rng.standard_normal(np.shape(case.f(*arrays)))
    directions = [rng.standard_normal(a.shape) for a in arrays]
    tensors = [Tensor(a, device=device) for a in arrays]
    case.op(ops, *tensors).backward(Tensor(weights, device=device, requires_grad=False))
    gradients = [tensor.grad for tensor in tensors]
    total = None
    for gradient, direction in zip(gradients, directions):
        term = ops.summation(gradient * Tensor(direction, device=device, requires_grad=False))
        total = term if total is None else total + term

    def along(*at):
        step = 1e-3
        above = case.f(*(a + step * d for a, d in zip(at, directions)))
        below = case.f(*(a - step * d for a, d in zip(at, directions)))
        return ((above - below) * weights).sum() / (2 * step)

    close(total.numpy(), along(*arrays), 1e-4)
    if not total.requires_grad:  # a linear op: its gradient does not depend on its input
        assert all(np.abs(n).max() < 1e-5 for n in central_differences(along, arrays, 1e-3))
        return
    for tensor in tensors:
        tensor.grad = None
    total.backward()
    for tensor, numeric in zip(tensors, central_differences(along, arrays, 1e-3)):
        close(np.zeros(tensor.shape) if tensor.grad is None else tensor.grad.numpy(), numeric, 1e-3)


@pytest.mark.parametrize("case", [case for case in GRADIENTS if not case.twice], ids=str)
def test_second_derivatives_of_fused_ops_are_refused(case):
    tensors = [Tensor(a) for a in inputs_of(case)]
    case.op(ops, *tensors).sum().backward()
    for tensor in tensors:
        grad, tensor.grad = tensor.grad, None
        with pytest.raises(NotImplementedError, match="fused op cannot be differentiated again"):
            (grad * grad).sum().backward()


def test_a_buffer_that_no_gradient_reaches_reads_as_zeros(device):
    """Also in the norm, and in what an optimizer resets."""
    model = nn.Sequential(nn.Embedding(7, 6, device=device), nn.Linear(6, 6, device=device))
    flat = nn.flatten_parameters(model)
    for reset in flat.reset_grad, ndl.optim.AdamW(flat, lr=0.1).reset_grad:
        for p in model.parameters():
            p.grad_buffer.fill(np.nan)
        reset()
        model[0]([0, 3, 3]).sum().backward()
        assert float(ndl.optim.grad_norm(flat)[0].numpy()) == pytest.approx(np.sqrt(6 + 4 * 6))
        assert model[0].weight.grad.numpy()[3].tolist() == [2] * 6
        assert not any(p.grad.numpy().any() for p in model[1].parameters())


# ---- bookkeeping ---------------------------------------------------------------------------------


def test_tensor():
    t = Tensor([[1, 2], [3, 4]])
    assert (t.shape, t.dtype, t.device) == ((2, 2), "float32", ndl.cpu())
    assert t.requires_grad is True and t.grad is None
    assert t.op is None and len(t.inputs) == 0
    u = t * 2 + t
    assert u.op is not None and u.inputs[1] is t
    np.testing.assert_array_equal(u.realize_cached_data().numpy(), [[3, 6], [9, 12]])
    for cut in (u.detach(), u.data):
        assert cut.op is None and not cut.requires_grad
        assert cut.cached_data._handle.ptr() == u.cached_data._handle.ptr()
    t.data = Tensor([[0, 0], [0, 0]])
    assert t.numpy().sum() == 0
    wrapped = Tensor.from_ndarray(ndl.NDArray(np.ones((2, 3))))
    assert wrapped.shape == (2, 3) and not wrapped.requires_grad


def test_backward():
    x = Tensor([1.0, 2.0])
    y = x * x
    y.backward()  # seeded with ones
    np.testing.assert_array_equal(x.grad.numpy(), [2, 4])
    x.grad = None
    z = x + x * x + ops.exp(x) * 0  # used three times
    z.backward()
    np.testing.assert_array_equal(x.grad.numpy(), [3, 5])
    constant = Tensor([1.0, 1.0], requires_grad=False)
    (x * constant).backward()
    assert constant.grad is None
    with pytest.raises((ValueError, RuntimeError, TypeError)):
        (x * 2).backward(Tensor([1.0, 2.0, 3.0]))
    with pytest.raises(TypeError, match="must be a Tensor, not ndarray"):
        (x * 2).backward(np.ones(2))


def test_backward_adds_to_gradients():
    for make in Tensor, nn.Parameter:
        x = make([1.0, 2.0])
        y = x * x
        y.backward()
        first = x.grad
        y.backward()
        (x * 3).backward()
        np.testing.assert_array_equal(x.grad.numpy(), [7, 11])
        np.testing.assert_array_equal(first.numpy(), [2, 4])
        x.grad = Tensor([1.0, 1.0])
        (x * 3).backward()
        np.testing.assert_array_equal(x.grad.numpy(), [4, 4])
    layer = nn.Linear(2, 2)
    adam = optim.Adam(layer.parameters())
    for times in 1, 2, 1:
        if times == 1:
            adam.reset_grad()
        layer(ndl.ones(1, 2)).sum().backward()
        np.testing.assert_array_equal(layer.weight.grad.numpy(), np.full((2, 2), times))


def test_backward_of_a_gradient_starts_anew():
    """The course's tests expect this; parameters add, flattened or not."""
    x, y, w = Tensor([6.0]), Tensor([0.0]), nn.Parameter([1.0])
    (x * x * w + x * y).backward()
    first = x.grad
    np.testing.assert_array_equal(first.numpy(), [12])
    first.backward()
    assert [t.grad.item() for t in (x, y, w)] == [2, 1, 36 + 12]


class Same(autograd.TensorOp):
    """x, whose gradients are its inputs, or both one array."""

    def __init__(self, mask):
        self.mask = mask

    def compute(self, x, y):
        return x.copy()

    def gradient(self, out_grad, node):
        return node.inputs if self.mask is None else (self.mask, self.mask)


def assert_own_memory(grads, others):
    for i, grad in enumerate(grads):
        assert not shares_memory(grad, *grads[:i], *others)
        assert grad.size == 1 or 0 not in grad.cached_data.strides


@pytest.mark.parametrize("make", [Tensor, nn.Parameter])
def test_each_leaf_has_a_gradient_of_its_own(make):
    """It shares memory with no other, nor with operands and the gradient that backward() is given;
    also where leaves are added to what is computed, and are results themselves."""
    for case in GRADIENTS:
        with naming(case):
            for wrap in (lambda x: x), (lambda x: x * 1 + x):
                leaves = [make(a) for a in inputs_of(case)]
                result = case.op(ops, *map(wrap, leaves))
                for y in (result, *leaves):
                    seed = Tensor(weights_of(y))
                    y.backward(seed)
                    assert_own_memory(
                        [x.grad for x in leaves if x.grad is not None], [seed, y, *leaves]
                    )


def test_gradients_that_are_operands_or_attributes_are_copied():
    mask = Tensor(np.full((2, 2), 3.0))
    for make, given in itertools.product((Tensor, nn.Parameter), (None, mask)):
        leaves = [make(np.ones((2, 2))) for _ in range(2)]
        Same(given)(*leaves).backward()
        assert_own_memory([x.grad for x in leaves], [mask, *leaves])
    seed, a, b = (Tensor([1.0]) for _ in range(3))
    (a + b).backward(seed)
    a.grad.backward(Tensor([5.0]))  # through the copy
    np.testing.assert_array_equal(seed.grad.numpy(), [5])


def test_a_deep_graph():
    x = Tensor([1.0])
    y = x
    for _ in range(5000):
        y = y + 1
    y.backward()
    np.testing.assert_array_equal(x.grad.numpy(), [1])
    del y
    gc.collect()


def test_no_grad():
    """It nests, also one object, as a decorated function that calls itself does."""
    x, quiet = Tensor([1.0]), ndl.no_grad()

    @quiet
    def results(depth):
        return [*(results(depth - 1) if depth else []), x * 2]

    assert not any(result.requires_grad for result in results(2))
    with quiet:
        y = x * 2
        assert not any(result.requires_grad for result in results(1))
        with ndl.no_grad():
            pass
        z = x * 2
        with ndl.enable_grad():
            assert (x * 2).requires_grad
    assert not y.requires_grad and y.op is None and len(y.inputs) == 0 and z.op is None
    assert (x * 2).op is not None
    with pytest.raises(ZeroDivisionError), ndl.no_grad():
        raise ZeroDivisionError
    with ndl.set_grad_enabled(False):
        assert not (x * 2).requires_grad and not ndl.is_grad_enabled()
    for enabled in (False, True):
        ndl.set_grad_enabled(enabled)
        assert (x * 2).requires_grad == enabled
    with ndl.no_grad():
        with ndl.set_grad_enabled(True):
            assert (x * 2).requires_grad
        assert not ndl.is_grad_enabled()


def test_no_grad_of_a_generator_concerns_its_body_alone():
    x = Tensor([1.0])

    @ndl.no_grad()
    def steps(count):
        for _ in range(count):
            yield (x * 2).requires_grad

    seen = [(inside, (x * 2).requires_grad) for inside in steps(2)]
    assert seen == [(False, True), (False, True)]


def test_no_grad_concerns_the_calling_thread_alone():
    with ndl.no_grad(), ThreadPoolExecutor(1) as pool:
        assert pool.submit(autograd.is_grad_enabled).result(60)
        assert not autograd.is_grad_enabled()


def test_tuples():
    x = Tensor(np.arange(6.0).reshape(2, 3))
    parts = ops.split(x, 1)
    assert len(parts) == 3 and parts[0].shape == (2,)
    back = ops.stack(list(parts), 1)
    np.testing.assert_array_equal(back.numpy(), x.numpy())
    (parts[0] + parts[2]).backward()
    np.testing.assert_array_equal(x.grad.numpy(), [[1, 0, 1], [1, 0, 1]])
    assert isinstance(ops.make_tuple(x, x), ndl.TensorTuple)
    x.grad, parts = None, ops.split(x, 1)
    (parts[-1] * 2).backward()
    assert isinstance(parts.grad, ndl.TensorTuple)
    np.testing.assert_array_equal(parts.grad.numpy(), [[0, 0], [0, 0], [2, 2]])
    np.testing.assert_array_equal(x.grad.numpy(), [[0, 0, 2], [0, 0, 2]])


def test_tensors_leave_for_numpy_and_print():
    x = Tensor([[1, 2], [3, 4]])
    np.testing.assert_array_equal(np.asarray(x), [[1, 2], [3, 4]])
    assert np.asarray(x).dtype == np.float32
    assert np.array(x, dtype=int).dtype == int
    assert np.asarray(Tensor([1.5], dtype="bfloat16"))[0] == 1.5
    assert float(x.sum()) == 10.0
    with pytest.raises(ValueError, match="size must be 1"):
        float(x)
    assert repr(x) == (
        "Tensor([[1., 2.],\n        [3., 4.]], dtype=float32, device=cpu(), requires_grad=True)"
    )
    assert repr(x.data).endswith("[3., 4.]], dtype=float32, device=cpu())")
    assert repr(x @ x).endswith("device=cpu(), op=MatMul)")
    assert repr(nn.Parameter([1, 2])) == "Parameter([1., 2.], dtype=float32, device=cpu())"
    assert repr(ops.split(x, 0)).startswith("TensorTuple(Tensor([1., 2.], ")


@pytest.mark.parametrize("shape", [(3,), (2, 3)])
@pytest.mark.parametrize("low", ["bfloat16", "float16"])
def test_a_gradient_has_the_dtype_of_its_operand(low, shape):
    """Includes operands of two dtypes that were promoted and broadcast."""
    a, b = Tensor(np.ones((2, 3)), dtype="float32"), Tensor(np.ones(shape), dtype=low)
    product = a * b
    product.sum().backward()
    assert product.dtype == "float32"
    assert (a.grad.dtype, b.grad.dtype) == ("float32", low)
    np.testing.assert_array_equal(b.grad.numpy().astype(np.float32), np.full(shape, 6 / b.size))


class Unlucky(autograd.FusedOp):
    """A product whose backward fails when it has begun to write."""

    def compute(self, x, w):
        return x * w

    def backward(self, dout, node, into):
        into.with_add(1)[0].fill(7)
        raise MemoryError("no room")


def test_a_backward_that_fails_leaves_no_old_gradient():
    """The op got the buffer with add 0, and it still holds the gradient of the step before."""
    model = nn.Linear(3, 4, bias=False)
    flat = nn.flatten_parameters(model)
    model(ndl.ones(2, 3)).sum().backward()
    flat.reset_grad()
    with pytest.raises(MemoryError, match="no room"):
        Unlucky()(ndl.ones(3, 4), model.weight).sum().backward()
    assert not flat.grad.numpy().any()


@pytest.mark.parametrize("given", [lambda axes: axes, iter], ids=["list", "iterator"])
def test_gradient_has_the_axes_of_the_forward(given):
    """A caller may change its list later."""
    axes = [1, 2, 0]
    x = ndl.Tensor(np.arange(24.0).reshape(2, 3, 4), requires_grad=True)
    y = ops.permute(x, given(axes))
    axes[:] = [0, 1, 2]
    (y * np.arange(24.0).reshape(y.shape)).sum().backward()
    wanted = np.arange(24.0).reshape(3, 4, 2).transpose(2, 0, 1)
    np.testing.assert_array_equal(x.grad.numpy(), wanted)


def test_equal_extremes_share_the_gradient_of_their_row():
    numbers = np.array([[1.0, 5, 5], [2, 2, 2], [3, 1, 0]])
    for name, sign in (("max", 1), ("amax", 1), ("min", -1), ("amin", -1)):
        x = Tensor(sign * numbers)
        (getattr(ops, name)(x, axes=1) * Tensor([6.0, 12, 18])).sum().backward()
        np.testing.assert_array_equal(x.grad.numpy(), [[0, 3, 3], [4, 4, 4], [18, 0, 0]], name)


@pytest.mark.parametrize("make", [Tensor, nn.Parameter])
def test_ops_of_ones_own_that_return_something_else_are_named(make):
    class Double(ndl.autograd.TensorOp):
        def __init__(self, result=lambda a: a * 2, of=lambda g: g * 2):
            self.result, self.of = result, of

        def compute(self, a):
            return self.result(a)

        def gradient(self, out_grad, node):
            return self.of(out_grad)

    x = make(np.ones((3, 2)))
    with pytest.raises(TypeError, match="Double.compute: must return NDArray, not ndarray"):
        Double(lambda a: a.numpy())(x)
    for of, error, words in (
        (lambda g: g.sum(0), ValueError, r"of input 0: the shape must be \(3, 2\), but is \(2,\)"),
        (lambda g: g.numpy(), TypeError, "of input 0: must be a Tensor, not ndarray"),
        (lambda g: g.cached_data, TypeError, "of input 0: must be a Tensor, not NDArray"),
    ):
        with pytest.raises(error, match=f"backward: Double.gradient: {words}"):
            Double(of=of)(x).sum().backward()
        assert x.grad is None
    with pytest.raises(ValueError, match="Double.gradient returned 0 gradients for 1 inputs"):
        Double(of=lambda g: ())(x).sum().backward()
    Double()(x).sum().backward()
    close(x.grad.numpy(), np.full((3, 2), 2))
