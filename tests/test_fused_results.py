"""Fused ops: arguments of their backward, several results, and norms beside a residual."""

from typing import ClassVar

import numpy as np
import pytest
from harness import assert_same_bits, close

import needle as ndl
from needle import _C, Tensor, nn, ops
from needle.autograd import FusedOp, FusedTupleOp, grad


class Halves(FusedTupleOp):
    """(x / 2, x, -x); keeps what its backward is given."""

    given: ClassVar[list] = []

    def compute(self, x):
        return _C.multiply(x, 0.5), x, _C.negate(x)

    def backward(self, dout, node, into):
        self.given.append([None if d is None else d.numpy().tolist() for d in dout])
        half, same, minus = (
            _C.multiply(node.inputs[0].cached_data, 0) if d is None else d for d in dout
        )
        return [_C.subtract(_C.add(_C.multiply(half, 0.5), same), minus)]


@pytest.mark.parametrize(
    "use, given, wanted",
    [
        (lambda half, same, minus: half, [[1, 1], None, None], 0.5),
        (lambda half, same, minus: minus, [None, None, [1, 1]], -1),
        (lambda half, same, minus: half + same * 3, [[1, 1], [3, 3], None], 3.5),
        (lambda half, same, minus: same + same, [None, [2, 2], None], 2),
        (lambda half, same, minus: half + half * 2 + minus, [[3, 3], None, [1, 1]], 0.5),
        (lambda *all: ops.stack([all[0] + all[0], *all], 0).sum(), [[3, 3], [1, 1], [1, 1]], 1.5),
    ],
    ids=["the first", "the last", "two", "one twice", "one twice and another", "all"],
)
def test_a_fused_op_of_several_results_is_told_which_were_used(use, given, wanted):
    for is_kept in (True, False):  # gradients in between, with a leaf that is no Parameter
        x = (Tensor if is_kept else nn.Parameter)(np.float32([4, 6]))
        Halves.given.clear()
        results = Halves()(x)
        use(*results).backward()
        assert Halves.given == [given]
        np.testing.assert_array_equal(x.grad.numpy(), [wanted, wanted])
        assert results.tuple()[1].cached_data is x.cached_data


class Scaled(FusedOp):
    """x a b of rows x: adds the gradients of the rows a and b, and returns half of that of b."""

    def compute(self, x, a, b):
        return x * a * b

    def backward(self, dout, node, into):
        x, a, b = node.operands
        array, add = into.with_add(1)
        db = (dout * x * a).astype("float32").sum(0, keepdims=True) * 0.5
        into[2][...] = into[2] + db
        da = (dout * x * b).astype("float32").sum(0, keepdims=True)
        _C.assign(array, array + da if add else da)
        return dout * a * b, None, db


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("flat", ["both", "a", "none"])
@pytest.mark.parametrize("same", [False, True], ids=["two", "one twice"])
def test_backward_adds_into_buffers_and_own_arrays(dtype, flat, same):
    """The gradients are those of x * a * b, whatever has a buffer, in the first step and after
    others; of autograd.grad alike, which leaves the buffers."""

    def run(op):
        rng = np.random.default_rng(0)
        module = nn.Module()
        x = Tensor(rng.standard_normal((3, 4)), dtype=dtype)
        module.a = nn.Parameter(rng.standard_normal((1, 4)), dtype=dtype)
        module.b = module.a if same else nn.Parameter(rng.standard_normal((1, 4)), dtype=dtype)
        if flat != "none":
            buffers = nn.flatten_parameters(module, only=None if flat == "both" else ["a"])
        dy = Tensor(rng.standard_normal((3, 4)), dtype=dtype)
        given = grad(op(x, module.a, module.b), (x, module.a, module.b), dy)
        assert module.a.grad is None or not module.a.grad.numpy().any()
        if flat != "none":
            module.a.grad_buffer.fill(7)
            buffers.reset_grad()
        for _ in range(2):
            op(x, module.a, module.b).backward(dy)
        left = [t.grad.numpy() for t in (x, module.a, module.b)]
        return [*(t.numpy() for t in given), *left]

    wanted = run(lambda x, a, b: x * a * b)
    for got, expected in zip(run(lambda *operands: Scaled()(*operands)), wanted, strict=True):
        close(got, expected, 1e-6 if dtype == "float32" else 2e-2)


def test_a_parameter_frozen_in_its_buffer_gets_no_gradient():
    module = nn.Module()
    module.a, module.b = nn.Parameter(np.ones((1, 4))), nn.Parameter(np.ones((1, 4)))
    nn.flatten_parameters(module)
    module.b.requires_grad = False
    Scaled()(ndl.ones(3, 4), module.a, module.b).sum().backward()
    assert (module.a.grad.numpy() == 3).all() and not module.b.grad.numpy().any()


def test_grad_of_a_recomputed_module_leaves_the_buffers():
    layer = nn.Linear(3, 2)
    x = ndl.ones(4, 3, requires_grad=True)
    flat = nn.flatten_parameters(layer)
    wanted = grad((layer(x) * layer(x)).sum(), (x, layer.weight, layer.bias))
    y = nn.recompute(layer, x)
    found = grad((y * y).sum(), (x, layer.weight, layer.bias))
    for one, other in zip(found, wanted, strict=True):
        close(one.numpy(), other.numpy(), 1e-6)
    assert not flat.grad.numpy().any()


def test_grad_of_a_computed_weight_has_its_dtype():
    """As `.grad` of that weight after backward()."""
    x, w = ndl.ones(4, 3, dtype="bfloat16"), Tensor(np.eye(3), dtype="bfloat16")
    doubled = w * 2
    loss = ops.linear(x, doubled).sum()
    (found,) = grad(loss, doubled)
    loss.backward()
    assert found.dtype == doubled.grad.dtype == "bfloat16"


def norm_operands(device, dtype="float32", kind=Tensor):
    rng = np.random.default_rng(11)
    shapes = [(3, 5, 16), *[(16,)] * 4]
    return [kind(rng.standard_normal(shape), device=device, dtype=dtype) for shape in shapes]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_unused_norm_of_a_pair(device, dtype):
    """The gradients are those of the other alone, and of x alone what came."""
    for used in (0, 1):
        operands = norm_operands(device, dtype)
        results = ops.layer_norm_pair(*operands)
        (results[used] * results[2]).sum().backward()
        x, *pairs = norm_operands(device, dtype)
        w, b = pairs[2 * used : 2 * used + 2]
        y, same = ops.layer_norm_residual(x, w, b)
        (y * same).sum().backward()
        for got, wanted in zip(operands, (x, *pairs)):
            assert (got.grad is None) == (wanted.grad is None)
            if wanted.grad is not None:
                assert_same_bits(got.grad.cached_data, wanted.grad.cached_data)
    operands = norm_operands(device, dtype)
    (ops.layer_norm_pair(*operands)[2] * 3).backward()
    assert (operands[0].grad.numpy() == 3).all() and operands[1].grad is None


def test_a_norm_that_a_pair_has_twice(device):
    x, w, b, *_ = norm_operands(device, kind=nn.Parameter)
    module = nn.Sequential()
    module.parts = [x, w, b]
    nn.flatten_parameters(module)
    y, z, _ = ops.layer_norm_pair(x, w, b, w, b)
    (y + z * 2).sum().backward()
    got = [p.grad.numpy() for p in (x, w, b)]
    x, w, b, *_ = norm_operands(device)
    (ops.layer_norm(x, w, b) * 3).sum().backward()
    for one, other in zip(got, (x, w, b)):
        np.testing.assert_allclose(one, other.grad.numpy(), rtol=0, atol=1e-4)


def test_results_of_a_fused_op_without_a_graph():
    operands = norm_operands(ndl.cpu())
    with ndl.no_grad():
        results = ops.layer_norm_pair(*operands)
    *_, same = results
    assert not any(t.requires_grad for t in (results, *results))
    assert same.cached_data is operands[0].cached_data


def test_a_write_into_a_passed_through_input_is_refused():
    x, w, b, *_ = norm_operands(ndl.cpu())
    y, same = ops.layer_norm_residual(x * 1, w, b)
    same.cached_data[0] = 0
    with pytest.raises(RuntimeError, match="LayerNormResidual: operand 0 was written to"):
        (y + same).sum().backward()
