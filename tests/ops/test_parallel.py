"""attention_mlp beyond its gradients (tests/gradients.py): in models, flat or not, whole or partly
frozen, beside the layer's own steps."""

from __future__ import annotations

import numpy as np
import pytest

import needle as ndl
from needle import _C, nn, ops
from needle.models import Pythia, PythiaConfig

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


@pytest.mark.parametrize("dtype, close", [("float32", 2e-5), ("bfloat16", 0.08)])
@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("sparse", [False, True])
def test_a_layer_equals_its_steps(device, dtype, close, flat, sparse):
    changes = (
        {"use_sparse_attention": sparse, "sparse_block": 16, "sparse_window": 16} if sparse else {}
    )
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


def test_flat_or_not_has_the_same_bits(device):
    """Weights that follow each other in memory, alone or with their gradients, and weights that are
    copied."""
    loose, new, flat = small(device), small(device), small(device)
    for p in loose.parameters():
        p.cached_data = p.cached_data.copy()
    nn.flatten_parameters(flat)
    for model, joined in (loose, False), (new, True), (flat, True):
        layer = model.layers[0]
        pair = layer.attention.dense.weight, layer.mlp.dense_4h_to_h.weight
        whole = pair[0].cached_data.joined(pair[1].cached_data)
        assert (whole is not None) == joined
        grads = [p.grad_buffer for p in pair]
        assert model is not flat or grads[0].joined(grads[1]).shape == whole.shape == (160, 32)
    one, *others = (numbers(step(model)) for model in (loose, new, flat))
    for other in others:
        np.testing.assert_array_equal(one["logits"], other["logits"])
        near(other, one, 1e-5)


def test_a_model_that_was_read_keeps_its_neighbours(device, tmp_path):
    model = small(device)
    model.save_pretrained(tmp_path / "folder")
    ndl.save(model, None, tmp_path / "file")
    for path in tmp_path / "folder", tmp_path / "file":
        for layer in Pythia.from_pretrained(path, device).layers:
            last = layer.mlp.dense_4h_to_h.weight.cached_data
            assert layer.attention.dense.weight.cached_data.joined(last) is not None


def test_neighbours_of_other_sizes_stay_where_they_are():
    """A second that would not begin on a boundary of vectors, one that is not there, and views."""
    module = nn.Module()
    module.odd, module.even, module.view = (nn.Parameter(np.ones((2, n))) for n in (3, 32, 32))
    module.view.cached_data = _C.array([[5.0]]).broadcast_to((2, 32))
    module.neighbours = [("odd", "even"), ("view", "odd"), ("even", "none")]
    before = [p.cached_data for p in module.parameters()]
    nn.place_neighbours(module)
    assert all(p.cached_data is data for p, data in zip(module.parameters(), before))


FROZEN = ["attention.dense.weight", "mlp.dense_4h_to_h.weight", "attention.dense.bias"]
FROZEN += ["mlp.dense_4h_to_h.bias", "mlp.dense_h_to_4h.weight"]
PROJECTION = ["attention.query_key_value.weight", "attention.query_key_value.bias"]
FROZEN += PROJECTION


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize(
    "frozen", [*[[name] for name in FROZEN], FROZEN[:2], FROZEN[2:4], PROJECTION, FROZEN]
)
def test_frozen_parameters_get_no_gradient_and_change_none(device, frozen, flat):
    wanted = numbers(step(small(device)))
    model = small(device)
    names = [f"layers.0.{name}" for name in frozen]
    for name, p in model.named_parameters():
        p.requires_grad = name not in names
    if flat:
        trained = {name for name, p in model.named_parameters() if p.requires_grad}
        assert set(nn.flatten_parameters(model).names) == trained
    got = numbers(step(model))
    near(got, {name: x for name, x in wanted.items() if name not in names}, 1e-5)
    for name, p in model.named_parameters():
        assert (p.grad is None) == (name in names)


@pytest.mark.parametrize("first", ["attention.dense.weight", "mlp.dense_4h_to_h.weight"])
def test_gradient_beside_one_that_was_added_to_ignores_the_last_step(device, first):
    """One of the joined pair adds, the other overwrites the rubbish of the step before."""
    wanted, model = numbers(step(small(device))), small(device)
    flat = nn.flatten_parameters(model)
    for buffer in (p.grad_buffer for p in flat.parameters):
        buffer.fill(1e3)
    flat.reset_grad()
    dict(model.layers[0].named_parameters())[first].grad_buffer.fill(1)
    got = numbers(step(model))
    wanted[f"layers.0.{first}"] += 1
    near(got, wanted, 1e-5)


SHAPES = {
    "x1": (2, 5, 9),
    "w_qkv": (9, 36),
    "b_qkv": (36,),
    "w_o": (12, 6),
    "b_o": (6,),
    "x2": (2, 5, 7),
    "w1": (7, 8),
    "b1": (8,),
    "w2": (8, 6),
    "b2": (6,),
    "residual": (2, 5, 6),
}


@pytest.mark.parametrize("dtype, close", [("float32", 1e-5), ("bfloat16", 0.05)])
@pytest.mark.parametrize("wanted", [["x1"], ["w_qkv"], ["b_qkv"], ["w1"], list(SHAPES)])
def test_a_gradient_does_not_depend_on_the_others(wanted, dtype, close, device):
    """Compared with linear, qkv_attention and gelu_mlp one after the other."""
    rng = np.random.default_rng(7)
    values = {name: rng.standard_normal(shape) * 0.5 for name, shape in SHAPES.items()}
    tables = nn.rotary_tables(5, 2)

    def fused(x1, w_qkv, b_qkv, *rest):
        return ops.attention_mlp(x1, w_qkv, b_qkv, 3, *tables, *rest)

    def steps(x1, w_qkv, b_qkv, w_o, b_o, x2, w1, b1, w2, b2, residual):
        qkv = ops.linear(x1, w_qkv, b_qkv).reshape((2, 5, 3, 3, 4))
        seen = ops.qkv_attention(qkv, *tables).reshape((2, 5, 12))
        x = ops.linear(seen, w_o, b_o, residual=residual)
        return ops.gelu_mlp(x2, w1, b1, w2, b2, residual=x)

    found = []
    for f in fused, steps:
        made = {
            name: ndl.Tensor(value, device, dtype, requires_grad=name in wanted)
            for name, value in values.items()
        }
        y = f(*made.values())
        y.backward()
        found.append(numbers({"y": y} | {name: made[name].grad for name in wanted}))
        assert all(x.grad is None for name, x in made.items() if name not in wanted)
    near(*found, close)


@pytest.mark.parametrize(
    "changed, message",
    [
        ({"x1": (10, 9)}, r"attention_mlp: x1 must be \(B, T, K1\), but is \(10, 9\)"),
        ({"w_qkv": (9, 35)}, r"3 heads w_qkv must be \(9, 3 x 3 x D\), but is \(9, 35\)"),
        ({"w_qkv": (8, 36)}, r"for x1 \(2, 5, 9\) .* w_qkv must be \(9, .*\(8, 36\)"),
        ({"b_qkv": (12,)}, r"b_qkv must have 36 elements.* but is \(12,\)"),
        ({"heads": 0}, r"heads must be an int of 1 or more, not 0"),
        ({"heads": 5}, r"for x1 .* and 5 heads w_qkv must be \(9, 3 x 5 x D\)"),
        ({"heads": 3.0}, r"heads must be an int of 1 or more, not 3.0"),
        ({"cos": 4}, r"attention_mlp: cos and sin must be \(5, R\) .*, but cos is \(4, 1\)"),
        ({"sin": 4}, r"attention_mlp: cos and sin must be \(5, R\) .*, but sin is \(4, 1\)"),
        ({"cos": 5, "sin": 5, "half": 3}, r"linear_rotary_fwd: cos: .* but a head has 4"),
        ({"w_o": (11, 6)}, r"w_o must be \(12, C\).*\(11, 6\)"),
        ({"x2": (2, 4, 7)}, r"x2 \(2, 5, K2\).*\(2, 4, 7\)"),
        ({"w2": (1, 6)}, r"w1 \(K2, M\) and w2 \(M, C\), but they are .*\(1, 6\)"),
        ({"w1": (6, 8)}, r"x2 \(2, 5, K2\), w1 \(K2, M\).*\(6, 8\)"),
        ({"b_o": (1,)}, r"b_o must have 6 elements, as w_o \(12, 6\) has columns.* \(1,\)"),
        ({"b1": (1,)}, r"b1 must have 8 elements, as w1 \(7, 8\) has columns.* \(1,\)"),
        ({"b2": (7,)}, r"b2 must have 6 elements, as w2 \(8, 6\) has columns.* \(7,\)"),
        ({"w2": (8, 5)}, r"w_o \(12, 6\) and w2 \(8, 5\) must have one width"),
        ({"residual": (2, 5, 5)}, r"residual must be \(2, 5, 6\)"),
        ({"approximate": "yes"}, "approximate must be 'none' or 'tanh'"),
    ],
)
def test_shapes_that_do_not_fit_are_named(changed, message):
    tables = {"cos": 5, "sin": 5, "half": 1}
    given = {name: value for name, value in changed.items() if name not in {*SHAPES, *tables}}
    made = {name: ndl.ones(*changed.get(name, shape)) for name, shape in SHAPES.items()}
    times = tables | {name: changed[name] for name in tables.keys() & changed}
    for name in ("cos", "sin"):
        made[name] = nn.rotary_tables(times[name], 2 * times["half"])[name == "sin"]
    with pytest.raises(ValueError, match=message):
        ops.attention_mlp(**({"heads": 3} | made | given))


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("value", [None, np.ones(3)])
def test_operands_that_are_no_tensors_are_named(name, value):
    made = {each: ndl.ones(*shape) for each, shape in SHAPES.items()} | {name: value}
    kind = type(value).__name__
    with pytest.raises(TypeError, match=f"^attention_mlp: {name} must be a Tensor, but is {kind}"):
        ops.attention_mlp(**made, heads=3, cos=np.ones((5, 1)), sin=np.ones((5, 1)))


@pytest.mark.parametrize("name", ["cos", "sin"])
def test_angles_that_are_none_are_named(name):
    made = {each: ndl.ones(*shape) for each, shape in SHAPES.items()}
    tables = {"cos": np.ones((5, 1)), "sin": np.ones((5, 1))} | {name: None}
    with pytest.raises((TypeError, ValueError), match=f"^attention_mlp: .*{name}"):
        ops.attention_mlp(**made, heads=3, **tables)
    tables = {"cos": np.ones((5, 1)), "sin": np.ones((5, 1))} | {name: np.ones((5, 2))}
    r = tables["sin"].shape[1]
    with pytest.raises(ValueError, match=rf"^attention_mlp: cos and .* but sin is \(5, {r}\)"):
        ops.attention_mlp(**made, heads=3, **tables)


@pytest.mark.parametrize("name", [name for name in SHAPES if name != "x1"])
def test_one_dtype(name):
    made = {each: ndl.ones(*shape) for each, shape in SHAPES.items()}
    made[name] = made[name].astype("bfloat16")
    cos, sin = nn.rotary_tables(5, 2)
    with pytest.raises(TypeError, match=f"^attention_mlp: {name}: dtype is bfloat16, but x1 is f"):
        ops.attention_mlp(**made, heads=3, cos=cos, sin=sin)
