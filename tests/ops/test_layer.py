"""ops.layer beyond its gradients in float64 (tests/gradients.py): in models, flat or not, whole or
partly frozen, recomputed, beside the layer part by part, and where memory is lacking."""

from __future__ import annotations

import itertools
import sys

import numpy as np
import pytest
from harness import ROOT, naming, run

import needle as ndl
from needle import _C, nn, ops
from needle.block_mask import BlockMask
from needle.models import Pythia, PythiaConfig
from needle.models.pythia import MLP, Layer

IDS = np.random.default_rng(3).integers(0, 41, (2, 19))
BY_PARTS = {f"blocks.{i}.attn.hook_z": lambda x: None for i in range(2)}
SPARSE = {"use_sparse_attention": True, "sparse_block": 16, "sparse_window": 16}
WEIGHTS = ["input_layernorm.weight", "input_layernorm.bias", "post_attention_layernorm.weight"]
WEIGHTS += ["post_attention_layernorm.bias"]
WEIGHTS += [
    f"{module}.{kind}"
    for module in (
        *("attention.query_key_value", "attention.dense"),
        *("mlp.dense_h_to_4h", "mlp.dense_4h_to_h"),
    )
    for kind in ("weight", "bias")
]


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


def same(got, wanted):
    assert got.keys() == wanted.keys()
    for name, values in wanted.items():
        np.testing.assert_array_equal(got[name], values, err_msg=name)


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
    if flat:  # the second batch was added
        name = "layers.0.attention.dense.weight"
        first, second = (x[name] for x in results[0])
        np.testing.assert_allclose(second, 2 * first, rtol=1e-4, atol=1e-2 * np.abs(first).max())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("flat", [False, True])
def test_recomputed_has_the_same_bits(device, dtype, flat):
    found = []
    for recompute in (False, True):
        model = small(device, dtype, flat, **SPARSE)
        model.recompute = recompute
        found.append([numbers(step(model)) for _ in range(2)])
    for kept, again in zip(*found):
        same(again, kept)


def test_flat_or_not_has_the_same_bits(device):
    """Weights that follow each other in memory, alone or with their gradients, and weights that are
    copied."""
    loose, new, flat = small(device), small(device), small(device, flat=True)
    for p in loose.parameters():
        p.cached_data = p.cached_data.copy()
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


# ---- which gradients, and where they go ----------------------------------------------------------


@pytest.mark.parametrize("flat", [False, True])
def test_frozen_parameters_get_no_gradient_and_change_none(device, flat):
    wanted = numbers(step(small(device)))
    groups = [[name] for name in WEIGHTS] + [WEIGHTS, WEIGHTS[:4], WEIGHTS[4:6], WEIGHTS[8:]]
    groups += [[name for name in WEIGHTS if name.endswith("bias")], WEIGHTS[1:]]
    for frozen in groups:
        with naming(frozen):
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


def test_some_in_flat_buffers_and_some_not(device):
    wanted = numbers(step(small(device)))
    for kept in ("weight", "bias", "dense.weight", "layernorm.bias"):
        model = small(device)
        names = [name for name, _ in model.named_parameters() if name.endswith(kept)]
        nn.flatten_parameters(model, only=names)
        near(numbers(step(model)), wanted, 1e-5)


@pytest.mark.parametrize("first", [name for name in WEIGHTS if name.endswith("weight")])
def test_a_gradient_beside_one_that_was_added_to_ignores_the_last_step(device, first):
    """Each weight adds or overwrites by itself: what a buffer held before reset_grad() is junk."""
    wanted, model = numbers(step(small(device))), small(device)
    flat = nn.flatten_parameters(model)
    for buffer in (p.grad_buffer for p in flat.parameters):
        buffer.fill(1e3)
    flat.reset_grad()
    dict(model.layers[0].named_parameters())[first].grad_buffer.fill(1)
    got = numbers(step(model))
    wanted[f"layers.0.{first}"] += 1
    near(got, wanted, 1e-5)


def test_a_second_backward_adds_the_same_bits_and_a_second_derivative_is_refused(device):
    model = small(device)
    _, loss = model(IDS[:, :-1], IDS[:, 1:])
    loss.backward()
    once = {n: p.grad.numpy() for n, p in model.named_parameters()}
    loss.backward()
    for name, p in model.named_parameters():
        np.testing.assert_array_equal(p.grad.numpy(), 2 * once[name], err_msg=name)
    x = ndl.randn(1, 4, 32, device=device, requires_grad=True)
    layer = model.layers[0]
    y = layer(x, tuple(table[:4] for table in model._rotary))
    (slope,) = ndl.autograd.grad(y.sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="ParallelLayer: the gradient of a fused op"):
        slope.sum().backward()


def test_weights_that_changed_since_the_forward_are_refused(device):
    for recompute, name in itertools.product((False, True), WEIGHTS):
        model = small(device)
        model.recompute = recompute
        _, loss = model(IDS[:, :-1], IDS[:, 1:])
        dict(model.layers[1].named_parameters())[name].cached_data.fill(0.5)
        with naming(recompute, name), pytest.raises(RuntimeError, match="ParallelLayer: operand"):
            loss.backward()


# ---- which layers are one operation --------------------------------------------------------------


def traced(change: str, hooks: str = "{}") -> set[str]:
    """The operations of a step of a small model that `change`, a statement, has changed."""
    program = f"""
import numpy as np
from needle import nn
from needle.models.pythia import MLP, Layer, Pythia, PythiaConfig
class Own(nn.Linear): pass
fields = dict(vocab_size=41, hidden_size=32, num_layers=1, num_heads=4)
model = Pythia(PythiaConfig(**fields))
layer = model.layers[0]
{change}
with model.hooks({hooks}):
    _, loss = model(np.ones((1, 4), int), np.ones((1, 4), int))
loss.backward()
"""
    done = run(sys.executable, "-c", program, NEEDLE_TRACE=1)
    assert done.returncode == 0, done.stderr[-2000:]
    return {line.split()[1] for line in done.stderr.splitlines() if line.startswith("needle: ")}


def test_what_is_replaced_hooked_or_shared_runs_by_parts():
    """linear_rotary_fwd is of the one operation alone. Hooks between layers leave it as it is."""
    for change, hooks, one in (
        ("", "{}", True),
        ("", "{'blocks.0.hook_resid_pre': lambda x: None}", True),
        ("", "{'blocks.0.hook_resid_post': lambda x: None}", True),
        ("", "{'blocks.0.hook_mlp_out': lambda x: None}", False),
        ("", "{'blocks.0.ln1.hook_out': lambda x: None}", False),
        ("", "{'blocks.0.attn.hook_z': lambda x: None}", False),
        ("", "{'blocks.0.mlp.hook_post': lambda x: None}", False),
        ("layer.attention.dense.__class__ = Own", "{}", False),
        ("layer.mlp.__class__ = type('Own', (MLP,), {})", "{}", False),
        ("layer.post_attention_layernorm.eps = 1e-3", "{}", False),
        ("layer.post_attention_layernorm.weight = layer.input_layernorm.weight", "{}", False),
        ("layer.mlp.dense_h_to_4h.bias = None", "{}", False),
        ("model = Pythia(PythiaConfig(**fields, attention_only=True))", "{}", False),
        ("model = Pythia(PythiaConfig(**fields, use_parallel_residual=False))", "{}", False),
    ):
        with naming(change, hooks):
            operations = traced(change, hooks)
            assert ("linear_rotary_fwd" in operations) == one
            assert "attention_bwd" in operations
    shared = small(_C.cpu())
    shared.share_sequences(object())
    assert not any(layer.is_one_operation() for layer in shared.layers)


def test_hooks_that_come_or_go_before_the_backward_change_nothing(device):
    wanted = numbers(step(small(device)))
    model = small(device)
    logits, loss = model(IDS[:, :-1], IDS[:, 1:])
    with model.hooks({"blocks.0.mlp.hook_post": lambda x: x * 0}):
        loss.backward()
    same(numbers({"logits": logits} | {n: p.grad for n, p in model.named_parameters()}), wanted)


def test_tied_norms_and_a_subclass_of_a_layer_train(device):
    """Two norms of one parameter add up; a subclass is called as it is."""

    class Own(Layer):
        def forward(self, x, *rest):
            return super().forward(x, *rest) * 1

    wanted, model = numbers(step(small(device))), small(device)
    model.layers[1].__class__ = Own
    near(numbers(step(model)), wanted, 1e-5)
    assert isinstance(model.layers[1].mlp, MLP)


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
        ({"norm_w2": (5,)}, r"layer_fwd: w_n2: axis C is 5, but was 6"),
        ({"w_qkv": (6, 35)}, r"layer_fwd: w_qkv: must be \(6, 3 x heads x D\).* 35 columns"),
        ({"w_qkv": (8, 36)}, r"layer_fwd: w_qkv: axis C is 8, but was 6"),
        ({"b_qkv": (12,)}, r"layer_fwd: b_qkv: must have an element a column of w_qkv"),
        ({"heads": 0}, r"layer_fwd: w_qkv: .* for 0 heads"),
        ({"heads": 5}, r"layer_fwd: w_qkv: .* for 5 heads"),
        ({"cos": nn.rotary_tables(4, 2)[0]}, r"layer_fwd: cos: axis T is 4, but was 5"),
        ({"sin": nn.rotary_tables(5, 4)[0]}, r"layer_fwd: sin: axis R is 2, but was 1"),
        ({"cos": np.ones((5, 3)), "sin": np.ones((5, 3))}, r"layer_fwd: cos: more angles"),
        ({"w_o": (11, 6)}, r"layer_fwd: w_qkv: must be .*36 columns and 11 rows"),
        ({"w2": (1, 6)}, r"layer_fwd: w2: axis M is 1, but was 8"),
        ({"b_o": (1,)}, r"layer_fwd: b_o: must have an element a column of w_o"),
        ({"b1": (1,)}, r"layer_fwd: b1: must have an element a column of w1"),
        ({"b2": (7,)}, r"layer_fwd: b2: must have an element a column of w2"),
        ({"w2": (8, 5)}, r"layer_fwd: w2: axis C is 5, but was 6"),
        ({"approximate": "yes"}, "layer: approximate must be 'none' or 'tanh'"),
        ({"mask": BlockMask.local(6, 2, 2)}, "layer: the mask is for 6 queries"),
    ],
)
def test_shapes_that_do_not_fit_are_named(changed, message):
    shapes = {name: value for name, value in changed.items() if name in SHAPES}
    given = {name: value for name, value in changed.items() if name not in SHAPES}
    with pytest.raises(ValueError, match=message):
        ops.layer(**operands(**shapes) | given)


def test_operands_of_other_kinds_are_named():
    for i, name in enumerate(SHAPES):
        for value in (None, np.ones(3)) if i else ():
            said = f"ParallelLayer: operand {i} must be"
            with naming(name), pytest.raises(TypeError, match=said):
                ops.layer(**operands() | {name: value})
        other = operands()
        other[name] = other[name].astype("bfloat16")
        with naming(name), pytest.raises(TypeError, match="layer_fwd: .*: dtype is .* be equal"):
            ops.layer(**other)
    for heads in (3.0, "3", None):
        with pytest.raises(TypeError, match="layer_fwd: heads"):
            ops.layer(**operands() | {"heads": heads})


def test_what_was_kept_serves_its_own_layer_alone(device):
    """The backward takes it, or None; of other shapes it is refused, and nothing is written."""
    made = {name: value.to(device) for name, value in list(operands().items())[:13]}
    cos, sin = (_C.array(table, "float32", device) for table in nn.rotary_tables(5, 2))

    def settings(rows):
        return (cos[:rows], sin[:rows], *[None] * 6, 0, 3, 1e-5, 0, 0)

    arrays = [value.cached_data for value in made.values()]
    _, saved = _C.layer_fwd(*arrays, *settings(5), 1)
    dw = _C.array(np.full((6, 8), 7.0), "float32", device)
    grads = [None] * 8 + [dw] + [None] * 3
    short = [arrays[0][:, :4].compact(), *arrays[1:]]
    for kept, error in (saved, ValueError), ("x", TypeError), (dw, TypeError):
        with pytest.raises(error, match="layer_bwd: saved"):
            _C.layer_bwd(short[0], *short, *settings(4), kept, 0, *grads)
        assert (dw.numpy() == 7).all()
    dx = [_C.layer_bwd(arrays[0], *arrays, *settings(5), one, 0, *grads) for one in (saved, None)]
    np.testing.assert_array_equal(dx[0].numpy(), dx[1].numpy())
    assert (dw.numpy() != 7).any()


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

        def step(model=model):
            hidden = model.hidden(ids[0], fp8=fp8)
            ops.linear_cross_entropy(hidden, model.embed_out.weight, ids[1]).backward()

        step()
        flat.reset_grad()
        run_step = _C.Graph(gpu, step).replay if recorded else step
        gpu.empty_cache()
        junk = [_C.empty((1 << 20,), "float32", gpu) for _ in range(4)]
        for one in junk:
            one.fill(float("nan"))
        del junk
        flat.reset_grad()
        for matrix in flat.parameters:
            matrix.grad_buffer.fill(0)
        run_step()
        run_step()
        found.append(flat.grad.numpy())
    np.testing.assert_array_equal(*found)


# ---- memory --------------------------------------------------------------------------------------


EACH_FAILS = """
import sys
import numpy as np
from nth_allocation import FOREVER, Injector
import needle as ndl
from needle import _C, nn

fp8, keep = int(sys.argv[1]), int(sys.argv[2])
shapes = [(2, 16, 32), *[(32,)] * 4, (32, 96), (96,), (32, 32), (32,)]
shapes += [(32, 64), (64,), (64, 32), (32,)]
arrays = [_C.array(np.random.standard_normal(shape)) for shape in shapes]
tables = [_C.array(table) for table in nn.rotary_tables(16, 4)]
settings = (*tables, *[None] * 6, 0, 4, 1e-5, 0, fp8)
_, saved = _C.layer_fwd(*arrays, *settings, keep)
grads = [_C.empty(a.shape, "float32", a.device) for a in arrays[1:]]
def call():
    return _C.layer_bwd(arrays[0], *arrays, *settings, saved if keep else None, 15, *grads)
injector, own, before = Injector(), 0, ndl.cpu().memory_stats()["live_bytes"]
for count in (1, FOREVER):
    for number in range(1, 400):
        for grad in grads:
            grad.fill(3)
        failed, error = injector.attempt(call, number, count)
        assert ndl.cpu().memory_stats()["live_bytes"] == before, (number, error)
        if failed == 0:
            break
        if error is None or error[1].count(": ") > 2:  # an op's scratch: it may have begun to add
            continue
        own += 1
        assert error[0] is MemoryError, error
        assert all((grad.numpy() == 3).all() for grad in grads), (number, error)
    assert number > 3 and failed == 0
print(own)
"""


@pytest.mark.parametrize("fp8, keep", [(0, 1), (0, 0), (1, 1), (1, 0)])
def test_where_memory_is_lacking_no_gradient_is_written_and_nothing_is_left(fp8, keep):
    """Each allocation of a backward fails in turn, alone and with all after it."""
    done = run(sys.executable, "-c", EACH_FAILS, fp8, keep, OMP_NUM_THREADS=1,
               PYTHONPATH=f"{ROOT}:{ROOT / 'tests'}")  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert int(done.stdout) >= 5
