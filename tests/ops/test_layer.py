"""ops.layer beyond its gradients (tests/test_autograd.py): in models, flat or not, beside the layer
part by part, where something is replaced, operands that do not fit, and memory."""

from __future__ import annotations

import copy

import numpy as np
import pytest
from harness import naming

import needle as ndl
from needle import _C, nn, ops
from needle.autograd import Accumulators
from needle.block_mask import BlockMask
from needle.interp.hooks import hook_names
from needle.models.pythia import MLP, Pythia, PythiaConfig

IDS = np.random.default_rng(3).integers(0, 41, (2, 19))
BY_PARTS = {f"blocks.{i}.attn.hook_z": lambda x: None for i in range(2)}
SPARSE = {"use_sparse_attention": True, "sparse_block": 16, "sparse_window": 16}


def small(device, dtype="float32", flat=False, **changes):
    np.random.seed(5)
    fields = {"vocab_size": 41, "hidden_size": 32, "num_layers": 2, "num_heads": 4} | changes
    model = Pythia(PythiaConfig(**fields, dtype=dtype), device=device)
    for _, p in model.named_parameters():
        if p.ndim < 2:  # biases begin as zeros
            p.data = ndl.Tensor(np.random.standard_normal(p.shape), device, p.dtype)
    if flat:
        nn.flatten_parameters(model)
    return model


def step(model, hooks=None):
    """Logits and gradients, which are added to those that are there."""
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


# ---- beside the parts ----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype, close", [("float32", 2e-5), ("bfloat16", 0.08), ("float16", 0.01)])
@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("change", [{}, SPARSE, {"hidden_act": "gelu"}], ids=str)
def test_a_layer_equals_its_parts(device, dtype, close, flat, change):
    """Also with gradients of two batches added: T is off the block of the mask."""
    results = []
    for hooks in {}, BY_PARTS:
        model = small(device, dtype, flat, **change)
        results.append([numbers(step(model, hooks)) for _ in range(2)])
    for fused, parts in zip(*results):
        near(fused, parts, close)
    if flat:  # the last weights are neighbours in memory, and the second batch was added
        layer = model.layers[0]
        pair = (p.weight.cached_data for p in (layer.attention.dense, layer.mlp.dense_4h_to_h))
        assert next(pair).joined(next(pair)) is not None
        name = "layers.0.attention.dense.weight"
        first, second = (x[name] for x in results[0])
        np.testing.assert_allclose(second, 2 * first, rtol=1e-4, atol=1e-2 * np.abs(first).max())


def test_each_of_two_neighbours_is_written_or_added_by_itself(device):
    model = small(device, flat=True)
    wanted = numbers(step(model))
    last = ("attention.dense.weight", "mlp.dense_4h_to_h.weight")
    for name in (f"layers.0.{name}" for name in last):
        for p in model.parameters():
            p.reset_grad()
        weight = dict(model.named_parameters())[name]
        weight.grad = ndl.ones(weight.shape, device=device)  # that of the other counts as zeros
        found = numbers(step(model))
        found[name] -= 1
        near(found, wanted, 2e-5)


# ---- which layers are one operation --------------------------------------------------------------


class Own(nn.Linear):
    pass


def whole_layers(model):
    """Return for each layer of a model if its result is that of the one operation."""
    x = ndl.ones(1, 4, 32)
    return [type(layer(x, model._rotary).op).__name__ == "ParallelLayer" for layer in model.layers]


def test_what_is_replaced_hooked_or_shared_runs_by_parts():
    """Hooks between layers leave them as they are, and those inside one the other, and none when
    they are gone."""
    model = small(_C.cpu())
    for name in hook_names(model):
        point = name.removeprefix("blocks.0.")
        inside = point != name and point not in ("hook_resid_pre", "hook_resid_post")
        if name[:9] != "blocks.1.":
            with naming(name), model.hooks({name: lambda x: None}):
                assert whole_layers(model) == [not inside, True]
    assert whole_layers(model) == [True, True]
    for part, name, value in (
        ("attention", "__class__", type("Own", (nn.Attention,), {})),
        ("attention.dense", "__class__", Own),
        ("mlp", "__class__", type("Own", (MLP,), {})),
        ("post_attention_layernorm", "eps", 1e-3),
        ("post_attention_layernorm", "weight", None),  # that of the other norm
        ("mlp.dense_h_to_4h", "bias", None),
    ):
        changed = copy.deepcopy(model)
        value = changed.layers[0].input_layernorm.weight if name == "weight" else value
        with naming(part, name):
            setattr(dict(changed.layers[0].named_modules())[part], name, value)
            assert whole_layers(changed) == [False, True]
    for change in {"attention_only": True}, {"use_parallel_residual": False}:
        assert whole_layers(small(_C.cpu(), **change)) == [False, False]
    model.share_sequences(object())
    assert not any(layer.weights_of_one_operation() for layer in model.layers)


# ---- operands that do not fit --------------------------------------------------------------------

SHAPES = {"x": (2, 5, 6), **dict.fromkeys(["norm_w1", "norm_b1", "norm_w2", "norm_b2"], (6,))}
SHAPES |= {"w_qkv": (6, 36), "b_qkv": (36,), "w_o": (12, 6), "b_o": (6,)}
SHAPES |= {"w1": (6, 8), "b1": (8,), "w2": (8, 6), "b2": (6,)}


def operands(**changed):
    made = {name: ndl.ones(*changed.get(name, shape)) for name, shape in SHAPES.items()}
    cos, sin = nn.rotary_tables(5, 2)
    return made | {"heads": 3, "cos": cos, "sin": sin}


@pytest.mark.parametrize(
    "changed, message",
    [
        ({"x": (10, 6)}, r"layer_fwd: x: has 2 axes, must have 3: \(B, T, C\)"),
        ({"norm_w2": (5,)}, r"layer_fwd: norm_w2: axis C is 5, but was 6"),
        *[({name: (1,) * 5}, rf"layer_fwd: {name}: ") for name in SHAPES],
        ({"w_qkv": (6, 35)}, r"layer_fwd: w_qkv: must be \(6, 3 x heads x D\).* 35 columns"),
        ({"b_qkv": (12,)}, r"layer_fwd: b_qkv: must have an element a column of w_qkv"),
        ({"heads": 5}, r"layer_fwd: w_qkv: .* for 5 heads"),
        ({"cos": nn.rotary_tables(4, 2)[0]}, r"layer_fwd: cos: axis T is 4, but was 5"),
        ({"cos": np.ones((5, 3)), "sin": np.ones((5, 3))}, r"layer_fwd: cos: more angles"),
        ({"w_o": (11, 6)}, r"layer_fwd: w_qkv: must be .*36 columns and 11 rows"),
        ({"w2": (1, 6)}, r"layer_fwd: w2: axis M is 1, but was 8"),
        ({"b_o": (1,)}, r"layer_fwd: b_o: must have an element a column of w_o"),
        ({"approximate": "yes"}, "layer: approximate must be 'none' or 'tanh'"),
        ({"mask": BlockMask.local(6, 2, 2)}, "layer: the mask is for 6 queries"),
    ],
)
def test_shapes_that_do_not_fit_are_named(changed, message):
    shapes = {name: value for name, value in changed.items() if name in SHAPES}
    given = {name: value for name, value in changed.items() if name not in SHAPES}
    with pytest.raises(ValueError, match=message):
        ops.layer(**operands(**shapes) | given)
    low = operands()
    low["x"] = low["x"].astype("bfloat16")
    for wrong, said in (
        (low, "layer_fwd: .*: dtype is .* be equal"),
        (operands() | {"w1": None}, "ParallelLayer: operand 9 must be"),
        (operands() | {"heads": 3.0}, "layer_fwd: heads"),
    ):
        with pytest.raises(TypeError, match=said):
            ops.layer(**wrong)


def test_arrays_kept_by_a_forward_of_another_shape_are_refused():
    layers = []
    for batch in (2, 1):
        given = operands(x=(batch, 5, 6))
        given["x"].requires_grad = True
        layers.append(ops.layer(**given))
    large, small = layers
    small.op.saved = large.op.saved
    with pytest.raises(ValueError, match="saved: array 0 is not of a forward with these operands"):
        small.backward()


def test_backward_of_a_wide_mlp_has_memory_for_its_gradient(device):
    """dx, and between the products gradients (B T, C) and (B T, M), M above 4 C."""
    rows, c, m = 32, 16, 256
    shapes = {name: (c,) for name in ("norm_w1", "norm_b1", "norm_w2", "norm_b2", "b_o", "b2")}
    shapes |= {"x": (2, rows // 2, c), "w_qkv": (c, 3 * c), "b_qkv": (3 * c,), "w_o": (c, c)}
    shapes |= {"w1": (c, m), "b1": (m,), "w2": (m, c)}
    given = {name: ndl.ones(*shapes[name], device=device) for name in SHAPES}
    given["x"].requires_grad = True
    y = ops.layer(**given, heads=2, **dict(zip(("cos", "sin"), nn.rotary_tables(rows // 2, 2))))
    dout, into = y.cached_data.copy(), Accumulators(y.inputs)
    device.reset_peak()
    before = device.memory_stats()["live_bytes"]
    y.op.backward(dout, y, into)
    assert device.memory_stats()["peak_bytes"] - before >= 4 * rows * (2 * c + m)


@pytest.mark.cuda
@pytest.mark.parametrize(
    "dtype, heads, fp8",
    [("float32", 4, 0), ("bfloat16", 4, 0), ("bfloat16", 2, 0), ("bfloat16", 2, 1)],
)
def test_sums_that_wait_for_the_end_of_a_layer_have_the_same_bits(dtype, heads, fp8):
    """Those of the bias and norm gradients, beside those that are added by each op; head sizes for
    which attention sums on the way, and not. Each run begins with the smallest scratch."""
    gpu, found = ndl.cuda(), []
    ids = np.random.default_rng(4).integers(0, 48, (2, 3, 200))
    for sync in (True, False):
        model = small(gpu, dtype, vocab_size=48, hidden_size=128, num_heads=heads)
        flat = nn.flatten_parameters(model)
        gpu.empty_cache()
        before = _C.sync_each_op(sync)
        try:
            for _ in range(2):
                hidden = model.hidden(_C.array(ids[0], "int32", gpu), fp8=fp8)
                targets = _C.array(ids[1], "int32", gpu)
                ops.linear_cross_entropy(hidden, model.embed_out.weight, targets).backward()
        finally:
            _C.sync_each_op(before)
        found.append(flat.grad.numpy())
    np.testing.assert_array_equal(*found)


@pytest.mark.cuda
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("fp8", [False, True])
def test_a_recorded_step_has_the_same_bits_after_the_cache_was_emptied(recompute, fp8):
    """A graph owns what its layers keep and what their backwards share."""
    gpu, found = ndl.cuda(), []
    ids = [_C.array(some[:, :16], "int32", gpu) for some in (IDS, IDS[:, 1:])]
    for recorded in (False, True):
        model = small(gpu, "bfloat16", vocab_size=48)
        model.recompute = recompute
        flat = nn.flatten_parameters(model)

        def step(model=model, flat=flat):
            flat.reset_grad()
            for _ in range(2):  # the second is added
                hidden = model.hidden(ids[0], fp8=fp8)
                ops.linear_cross_entropy(hidden, model.embed_out.weight, ids[1]).backward()

        step()
        run_step = _C.Graph(gpu, step).replay if recorded else step
        gpu.empty_cache()
        junk = [_C.empty((1 << 20,), "float32", gpu) for _ in range(4)]
        for one in junk:
            one.fill(float("nan"))
        del junk
        run_step()
        run_step()
        found.append(flat.grad.numpy())
    np.testing.assert_array_equal(*found)
