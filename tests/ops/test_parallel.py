"""attention_mlp beyond its gradients (tests/gradients.py): in models, flat or not, whole or partly
frozen, beside the layer's own steps."""

from __future__ import annotations

import numpy as np
import pytest
from harness import DEVICES, device_of

import needle as ndl
from needle import nn, ops
from needle.models import Pythia, PythiaConfig

both = pytest.mark.parametrize("device", DEVICES)
IDS = np.random.default_rng(3).integers(0, 41, (2, 19))
SEPARATE = {"blocks.0.attn.hook_z": lambda x: None, "blocks.1.attn.hook_z": lambda x: None}


def small(device, dtype="float32", **changes):
    np.random.seed(5)
    fields = dict(vocab_size=41, hidden_size=32, num_layers=2, num_heads=4, dtype=dtype, **changes)
    model = Pythia(PythiaConfig(**fields), device=device)
    for _, p in model.named_parameters():
        if p.ndim < 2:  # biases begin as zeros
            p.data = ndl.Tensor(np.random.standard_normal(p.shape), device, p.dtype)
    return model


def step(model, hooks=None):
    """Logits and gradients in float64, of two batches added where the model is flat."""
    with model.hooks(hooks or {}):
        logits, loss = model(IDS[:, :-1], IDS[:, 1:])
    loss.backward()
    grads = {n: p.grad for n, p in model.named_parameters() if p.requires_grad}
    return {"logits": logits, **grads}


def numbers(results):
    return {name: x.numpy().astype(np.float64) for name, x in results.items()}


def near(got, wanted, close):
    assert got.keys() == wanted.keys()
    for name, values in wanted.items():
        error = np.abs(got[name] - values).max() / np.abs(values).max()
        assert error < close, (name, error)


@both
@pytest.mark.parametrize("dtype, close", [("float32", 2e-5), ("bfloat16", 0.08)])
@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("sparse", [False, True])
def test_a_layer_is_what_its_steps_are(device, dtype, close, flat, sparse):
    changes = (
        {"use_sparse_attention": sparse, "sparse_block": 16, "sparse_window": 16} if sparse else {}
    )
    device = device_of(device)
    results = []
    for hooks in {}, SEPARATE:
        model = small(device, dtype, **changes)
        if flat:
            nn.flatten_parameters(model)
        results.append([numbers(step(model, hooks)) for _ in range(2)])
    for fused, steps in zip(*results):
        near(fused, steps, close)
    if flat:  # the second batch was added
        name = "layers.0.attention.dense.weight"
        first, second = (x[name] for x in results[0])
        np.testing.assert_allclose(second, 2 * first, rtol=1e-4, atol=1e-5 * np.abs(first).max())


@both
def test_flat_or_not_has_the_same_bits(device):
    """Whether the weights follow each other in memory or are copied."""
    loose, flat = small(device_of(device)), small(device_of(device))
    nn.flatten_parameters(flat)
    for layer, joined in (loose.layers[0], False), (flat.layers[0], True):
        pair = layer.attention.dense.weight, layer.mlp.dense_4h_to_h.weight
        whole = pair[0].cached_data.joined(pair[1].cached_data)
        assert (whole is not None) == joined
        grads = (p.grad_buffer for p in pair)
        assert not joined or next(grads).joined(next(grads)).shape == whole.shape == (160, 32)
    one, other = numbers(step(loose)), numbers(step(flat))
    np.testing.assert_array_equal(one["logits"], other["logits"])
    near(other, one, 1e-5)


FROZEN = ["attention.dense.weight", "mlp.dense_4h_to_h.weight", "attention.dense.bias"]
FROZEN += ["mlp.dense_4h_to_h.bias", "mlp.dense_h_to_4h.weight", "attention.query_key_value.weight"]


@both
@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("frozen", [*[[name] for name in FROZEN], FROZEN[:2], FROZEN[2:4], FROZEN])
def test_what_is_frozen_gets_no_gradient_and_changes_none(device, frozen, flat):
    device = device_of(device)
    wanted = numbers(step(small(device)))
    model = small(device)
    names = [f"layers.0.{name}" for name in frozen]
    for name, p in model.named_parameters():
        p.requires_grad = name not in names
    if flat:
        nn.flatten_parameters(model)
    got = numbers(step(model))
    near(got, {name: x for name, x in wanted.items() if name not in names}, 1e-5)
    for name, p in model.named_parameters():
        assert (p.grad is None) == (name in names)


@both
def test_gradients_are_claimed_apart_where_one_has_been_added_to(device):
    """The first product of a step writes, but not what somebody has added to before."""
    device = device_of(device)
    wanted, model = numbers(step(small(device))), small(device)
    nn.flatten_parameters(model)
    weight = model.layers[0].attention.dense.weight
    weight.grad_buffer.fill(1)  # its neighbour's still counts as zeros
    got = numbers(step(model))
    wanted["layers.0.attention.dense.weight"] += 1
    near(got, wanted, 1e-5)


@pytest.mark.parametrize(
    "changed, message",
    [
        ({"qkv": (2, 5, 3, 2, 4)}, r"attention_mlp: qkv must be \(B, T, H, 3, D\)"),
        ({"w_o": (11, 6)}, r"w_o must be \(12, C\).*\(11, 6\)"),
        ({"x": (2, 4, 7)}, r"x \(2, 5, K\).*\(2, 4, 7\)"),
        ({"w2": (8, 5)}, r"w_o \(12, 6\) and w2 \(8, 5\) must have one width"),
        ({"residual": (2, 5, 5)}, r"residual must be \(2, 5, 6\)"),
        ({"approximate": "yes"}, "approximate must be 'none' or 'tanh'"),
    ],
)
def test_what_does_not_fit_is_named(changed, message):
    shapes = {
        "qkv": (2, 5, 3, 3, 4),
        "w_o": (12, 6),
        "b_o": (6,),
        "x": (2, 5, 7),
        "w1": (7, 8),
        "b1": (8,),
        "w2": (8, 6),
        "b2": (6,),
        "residual": (2, 5, 6),
    }
    more = {name: value for name, value in changed.items() if name not in shapes}
    made = {name: ndl.ones(*changed.get(name, shape)) for name, shape in shapes.items()}
    cos, sin = nn.rotary_tables(5, 2)
    with pytest.raises(ValueError, match=message):
        ops.attention_mlp(cos=cos, sin=sin, **made, **more)
