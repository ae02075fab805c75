"""Fused ops: arguments of their backward, and norms beside a residual."""

import numpy as np
import pytest
from harness import assert_same_bits, close

import needle as ndl
from needle import _C, Tensor, nn, ops
from needle.autograd import FusedOp, grad


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


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_norm_adds_the_gradient_that_its_operand_has(device, dtype):
    """In its kernel, rounded once; also where the operand is a leaf or its gradient is wanted."""
    rng = np.random.default_rng(11)
    given, seed = rng.standard_normal((15, 16)), rng.standard_normal((15, 16))
    x, dy = Tensor(given, device, dtype), Tensor(seed, device, dtype)
    w, b = Tensor(rng.standard_normal(16), device, dtype), ndl.zeros(16, device=device, dtype=dtype)
    y, mean, rstd = _C.layernorm_fwd(*(t.cached_data for t in (x, w, b)), 1e-5)
    into = [_C.array(np.zeros(16), device=device) for _ in "wb"]
    three = (dy * 3).cached_data
    operands = dy.cached_data, x.cached_data, w.cached_data, mean, rstd, three, *into
    wanted = _C.layernorm_bwd(*operands)
    for of in (lambda x: x, lambda x: x * 1):
        x.grad = None
        h = of(x)
        out = ops.layer_norm(h, w, b) + h * 3
        (found,) = grad(out, h, dy)
        assert_same_bits(found.cached_data, wanted)
        out.backward(dy)
        assert_same_bits(x.grad.cached_data, wanted)
    both = (ops.layer_norm(x, w, b) + ops.layer_norm(x, w, b)).detach() + x  # of x alone
    np.testing.assert_array_equal(grad(both, x, dy)[0].numpy(), dy.numpy())
