"""Layers that are computed again in the backward: the same bits with less memory."""

import numpy as np
import pytest
from harness import small_pythia

import needle as ndl
from needle import nn, ops


def small(device, recompute, dtype="float32", **changes):
    shape = {"vocab_size": 96, "hidden_size": 64, "num_layers": 3, "max_seq_len": 128}
    model = small_pythia(device, **shape | changes, dtype=dtype)
    model.recompute = recompute
    return model


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_layers_keep_only_their_inputs_and_give_the_same_bits(device, dtype):
    """Measured between forward and backward; activations are many times a layer's input."""
    held, found = [], []
    for on in (False, True):
        model = small(device, on, dtype, num_layers=8, vocab_size=8)
        flat = nn.flatten_parameters(model)
        ids = np.random.default_rng(1).integers(0, 8, (4, 64))
        model(ids, ids)[1].backward()
        before = model.device.memory_stats()["live_bytes"]
        made = model(ids, ids)
        held.append(model.device.memory_stats()["live_bytes"] - before)
        made[1].backward()
        found.append([made[1].numpy(), flat.grad.numpy()])
        del made
    for one, other in zip(*found):
        np.testing.assert_array_equal(one, other)
    inputs = 9 * 4 * 64 * 64 * (4 if dtype == "float32" else 2)  # of 8 layers and the last norm
    assert held[1] < 2 * inputs < held[0] / 3, held


class Doubled(nn.Module):
    """Counts its calls."""

    calls = 0
    hook_points = {"hook_in": None}

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(5, 5)

    def forward(self, x, factor=2.0):
        self.calls += 1
        return self.linear(self.hook("hook_in", x)) * factor


def test_a_graph_is_needed_and_no_hook():
    layer, x = Doubled(), ndl.ones(4, 5, requires_grad=True)
    with ndl.no_grad():
        assert not nn.recompute(layer, x).requires_grad
    outer = nn.Sequential(nn.Sequential(layer))
    layer._hooks = {"hook_in": [lambda x: x]}
    for module in (layer, outer.modules[0], outer):  # also with the hook in a part of a part
        layer.calls = 0
        nn.recompute(module, x).sum().backward()
        assert layer.calls == 1


def test_invalid_calls_are_refused():
    class Pair(nn.Module):
        def forward(self, x):
            return x, x

    x = ndl.ones(4, 5, requires_grad=True)
    with pytest.raises(TypeError, match="recompute: Pair must give one Tensor, not tuple"):
        nn.recompute(Pair(), x)
    with pytest.raises(TypeError, match="gradients flow through x alone"):
        nn.recompute(Doubled(), x, x)
    with pytest.raises(ValueError, match="recompute: running_mean would be moved"):
        nn.recompute(nn.BatchNorm1d(5), x)
    y = nn.recompute(Doubled(), x)
    (ops.power_scalar(y, 2)).sum().backward()
    with pytest.raises(NotImplementedError, match="cannot be differentiated again"):
        x.grad.sum().backward()


@pytest.mark.parametrize("flat", [False, True])
def test_a_gradient_that_would_be_lost_is_refused(flat):
    """That of a parameter, or of what was computed from one, that a function holds."""
    other = nn.Linear(5, 5)
    if flat:
        nn.flatten_parameters(other)
    for held in (other.weight, other.weight * 2.0):
        layer = Doubled()
        layer.linear.forward = lambda x, held=held: x @ held
        out = nn.recompute(layer, ndl.ones(4, 5, requires_grad=True)).sum()
        with pytest.raises(RuntimeError, match="neither the operand nor a parameter"):
            out.backward()
    with ndl.no_grad():
        held = other.weight * 2.0
    layer.linear.forward = lambda x: x @ held
    x = ndl.ones(4, 5, requires_grad=True)
    nn.recompute(layer, x).sum().backward()
    expected = np.broadcast_to(2 * held.numpy().sum(1), (4, 5))
    np.testing.assert_allclose(x.grad.numpy(), expected, rtol=1e-6)


def test_weights_that_were_written_are_noticed():
    layer, x = Doubled(), ndl.ones(4, 5, requires_grad=True)
    y = nn.recompute(layer, x).sum()
    layer.linear.weight.data = layer.linear.weight.data * 2.0
    with pytest.raises(RuntimeError, match="after the forward"):
        y.backward()


@pytest.mark.parametrize("inside", [True, False])
def test_gradients_reach_what_a_weight_was_computed_from(inside, device):
    """Also where that is no parameter of the module, as of a low-rank addition around it."""
    np.random.seed(3)
    down, up = (nn.Parameter(ndl.randn(*size, device=device)) for size in ((5, 2), (2, 5)))
    layer, rows, found = Doubled().to(device), ndl.randn(4, 5, device=device), []
    weight = layer.linear.weight
    if inside:
        layer.more = [down, up, weight]
    for call in (lambda layer, x: layer(x), nn.recompute):
        x = rows.clone().requires_grad_()
        layer.linear.weight = computed = weight + down @ up
        y = call(layer, call(layer, x))
        y.sum().backward()
        assert layer.linear.weight is computed
        found.append([t.grad.numpy() for t in (x, down, up, weight, layer.linear.bias)])
        for parameter in down, up, weight, layer.linear.bias:
            parameter.reset_grad()
    for one, other in zip(*found):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_the_second_forward_has_the_settings_of_the_first(device):
    """`training` and `p`, and NumPy's generator; those of now come back after it."""
    dropout = lambda module: module.modules[1]
    for change in (
        lambda module: None,
        lambda module: module.eval(),
        lambda module: setattr(dropout(module), "p", 0.1),
        lambda module: (module.eval(), module(ndl.ones(4, 5, device=device)), module.train()),
    ):
        found = []
        for call in (lambda layer, x: layer(x), nn.recompute):
            np.random.seed(0)
            module = nn.Sequential(nn.Linear(5, 5, device=device), nn.Dropout(0.5))
            x = ndl.ones(4, 5, device=device, requires_grad=True)
            y = call(module, call(module, x))  # the parameters are those of both
            change(module)
            now = module.training, dropout(module).p
            y.sum().backward()
            assert now == (module.training, dropout(module).p)
            found.append([y.numpy(), x.grad.numpy(), module[0].weight.grad.numpy()])
            found[-1].append(np.random.rand())
        for one, other in zip(*found):
            np.testing.assert_array_equal(one, other)
