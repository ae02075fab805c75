"""Tensor.backward(on_final=...): when it is said that a leaf's gradient is final."""

import numpy as np
import pytest

import needle as ndl
from needle import nn


def finals(result, leaves, *more):
    """The names of the leaves in the order in which their gradients were final, with those then."""
    told = []

    def on_final(leaf):
        (name,) = [name for name, one in leaves.items() if one is leaf]
        told.append((name, None if leaf.grad is None else leaf.grad.numpy().tolist()))

    result.backward(*more, on_final=on_final)
    for name, grad in told:
        assert grad == (None if leaves[name].grad is None else leaves[name].grad.numpy().tolist())
    return [name for name, _ in told]


@pytest.mark.parametrize("kind", [ndl.Tensor, nn.Parameter])
def test_leaves_are_final_in_the_order_of_the_backward(kind):
    x = ndl.Tensor([[1.0, 2.0]], requires_grad=False)
    a, b, c = (kind(np.eye(2) * n) for n in (1, 2, 3))
    leaves = {"a": a, "b": b, "c": c}
    assert finals(((x @ a) @ b @ c).sum(), leaves) == ["c", "b", "a"]
    assert finals(((x @ a) @ b @ c).sum(), leaves, ndl.Tensor(2.0)) == ["c", "b", "a"]


def test_a_leaf_used_twice_is_final_behind_its_first_use():
    x = ndl.Tensor([[1.0, 2.0]], requires_grad=False)
    a, b = (nn.Parameter(np.eye(2) * n) for n in (1, 2))
    assert finals(((x @ a) @ b @ a).sum(), {"a": a, "b": b}) == ["b", "a"]
    assert finals((a * a).sum(), {"a": a}) == ["a"]
    assert finals((a.sum() + b.sum()) + a.sum(), {"a": a, "b": b}) == ["b", "a"]


def test_gradients_in_buffers_are_final_too():
    """Ops add those themselves."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4))
    flat = nn.flatten_parameters(model)
    flat.forget_grad()
    leaves = dict(zip(flat.names, flat.parameters))
    x = ndl.Tensor(np.ones((2, 3)), requires_grad=False)
    names = finals(model(x).sum(), leaves)
    layers = [name.split(".")[1] for name in names]
    assert sorted(names) == sorted(leaves) and layers == ["1", "1", "0", "0"]


def test_a_leaf_without_a_gradient_is_final_too():
    class First(ndl.autograd.TensorOp):
        def compute(self, a, b):
            return a * 2

        def gradient(self, out_grad, node):
            return out_grad * 2, None

    a, b, other = nn.Parameter([1.0]), nn.Parameter([2.0]), nn.Parameter([3.0])
    assert finals(First()(a, b), {"a": a, "b": b, "other": other}) == ["b", "a"]
    assert b.grad is None and a.grad.numpy() == [2]
    frozen = ndl.Tensor([1.0], requires_grad=False)
    assert finals(frozen * a, {"a": a}) == ["a"]
    assert finals(a, {"a": a}) == ["a"]  # nothing was computed from it


def test_layers_that_are_computed_again_say_it_once():
    layer = nn.Linear(3, 3)
    x = ndl.Tensor(np.ones((2, 3)))
    leaves = {"x": x, "weight": layer.weight, "bias": layer.bias}
    names = finals(nn.recompute(layer, nn.recompute(layer, x)).sum(), leaves)
    assert sorted(names) == ["bias", "weight", "x"]


def test_an_error_of_on_final_ends_the_walk():
    a, b = (nn.Parameter([1.0]) for _ in range(2))
    loss = (a * 2) * b

    def fail(leaf):
        raise ValueError("enough")

    with pytest.raises(ValueError, match="enough"):
        loss.backward(on_final=fail)
    assert b.grad.numpy() == [2] and a.grad is None
    loss.backward()
    assert a.grad.numpy() == [2]
    assert ndl.autograd.is_grad_enabled()
