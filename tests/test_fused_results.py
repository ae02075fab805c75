"""Fused ops with several results: arguments of their backward, and norms beside a residual."""

from typing import ClassVar

import numpy as np
import pytest
from harness import assert_same_bits

import needle as ndl
from needle import _C, Tensor, nn, ops
from needle.autograd import FusedTupleOp


class Halves(FusedTupleOp):
    """(x / 2, x, -x); keeps what its backward is given."""

    given: ClassVar[list] = []

    def compute(self, x):
        return _C.multiply(x, 0.5), x, _C.negate(x)

    def backward(self, dout, node, accumulators):
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
    ],
    ids=["the first", "the last", "two", "one twice", "one twice and another"],
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


def test_results_by_index_and_as_a_tuple_share_one_gradient():
    x = Tensor([4, 6])
    Halves.given.clear()
    results = Halves()(x)
    ops.stack([results[0] + results[0], *results], 0).sum().backward()
    assert Halves.given == [[[3, 3], [1, 1], [1, 1]]]


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
        assert [p.grad is None for p in pairs] == [used == 1] * 2 + [used == 0] * 2
    operands = norm_operands(device, dtype)
    (ops.layer_norm_pair(*operands)[2] * 3).backward()
    assert (operands[0].grad.numpy() == 3).all() and operands[1].grad is None


def test_a_residual_adds_its_gradient_in_the_norm(device):
    """One kernel a way, and nothing is added beside it."""
    x, w, b, *_ = norm_operands(device)
    y, same = ops.layer_norm_residual(x, w, b)
    grads = y.inputs[0].op.backward([y.cached_data, same.cached_data], y.inputs[0], [None] * 3)
    alone = y.inputs[0].op.backward([y.cached_data, None], y.inputs[0], [None] * 3)
    wanted = _C.add(alone[0], same.cached_data).numpy()
    np.testing.assert_allclose(grads[0].numpy(), wanted, rtol=0, atol=1e-5)
    for got, without in zip(grads[1:], alone[1:]):
        assert_same_bits(got, without)


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


class Beside(nn.Module):
    def __init__(self, operands):
        super().__init__()
        self.of_norms = operands

    def forward(self, x):
        y1, y2, x = ops.layer_norm_pair(x, *self.of_norms)
        return x + y1 * y2


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_results_of_a_fused_op_are_computed_again(device, dtype):
    found = []
    for run in (lambda module, x: module(x), nn.recompute):
        x, *operands = norm_operands(device, dtype, nn.Parameter)
        run(Beside(operands), x * 2).sum().backward()
        found.append([p.grad.cached_data for p in (x, *operands)])
    for one, other in zip(*found):
        assert_same_bits(one, other)


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
