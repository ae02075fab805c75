"""Hooks against a float64 forward of the model in NumPy that keeps every intermediate: what is
captured, what a replacement changes, and gradients through it by finite differences. (Which hooks
leave a layer one operation: tests/ops/test_layer.py.)"""

import math
from functools import partial

import numpy as np
import pytest
from harness import small_pythia

import needle as ndl
from needle import Tensor, hooks, nn
from needle.models.pythia import Pythia
from needle.nn.attention import PATTERNS, PROJECTIONS, RESULT
from needle.testing.elementwise import gelu, gelu_tanh

IDS = np.random.default_rng(5).integers(0, 29, (2, 9))
PATTERN = "blocks.1.attn.hook_pattern"
GELUS = {"gelu": gelu, "gelu_new": gelu_tanh}
EPS = 2e-3  # no default, nor is the base of the angles
NORM = ("hook_scale", "hook_normalized")  # what the fused norm never stores
# Where a fused MLP does not stop, and what the product that computes it adds to the stream; a
# layer with a parallel residual does all of it, and the products after attention, in one op.
BETWEEN = ("hook_embed", "hook_resid_pre", "hook_resid_post", "ln_final.hook_out")
INSIDE = ("hook_z", "hook_pre", "hook_post", "hook_attn_out", "hook_mlp_out")


def gradients_of(model, loss) -> dict[str, np.ndarray]:
    """The gradients of this loss alone, by name."""
    for p in model.parameters():
        p.grad = None
    loss.backward()
    return {name: p.grad.numpy().copy() for name, p in model.named_parameters()}


def small(device=None, dtype="float32", **changes) -> Pythia:
    fields = dict(vocab_size=29, hidden_size=24, num_heads=3, max_seq_len=16, dtype=dtype)
    form = "gelu" if changes.get("use_parallel_residual", True) else "gelu_new"
    fields |= dict(hidden_act=form, layer_norm_eps=EPS, rotary_base=50)
    fields |= dict(rotary_pct=0.75)  # with one pair of dims no base would count
    model = small_pythia(device, 7, **fields | changes)
    for parameter in model.parameters():  # far from the start: norms and biases count too
        noise = 0.3 * np.random.standard_normal(parameter.shape)
        parameter.data = Tensor(parameter.numpy() + noise, device=model.device, dtype=dtype)
    return model


# ---- the reference -------------------------------------------------------------------------------


def norm(x, layer, at, name):
    scale = at(name + "hook_scale", np.sqrt(x.var(-1, keepdims=True) + EPS))
    x = at(name + "hook_normalized", (x - x.mean(-1, keepdims=True)) / scale)
    return at(name + "hook_out", x * f8(layer.weight) + f8(layer.bias))


def f8(parameter) -> np.ndarray:
    return parameter.numpy().astype(np.float64)


def linear(x, layer):
    return x @ f8(layer.weight) + f8(layer.bias)


def turned(x, config):
    """(B, T, H, D)"""
    r = round(config.head_dim * config.rotary_pct) // 2
    angles = np.arange(x.shape[1])[:, None, None] * config.rotary_base ** (-np.arange(r) / r)
    a, b, rest = x[..., :r], x[..., r : 2 * r], x[..., 2 * r :]
    cos, sin = np.cos(angles), np.sin(angles)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin, rest], axis=-1)


def forward(model, ids, replaced=None, mask=None) -> dict[str, np.ndarray]:
    """Everything by name, and "logits". replaced: functions of the arrays."""
    config, seen, replaced = model.config, {}, replaced or {}

    def at(name, x):
        x = replaced.get(name, lambda same: same)(x)
        seen[name] = x
        return x

    batch, time = ids.shape
    x = at("hook_embed", f8(model.embed_in.weight)[ids])
    for i, layer in enumerate(model.layers):
        at_layer = lambda name, value, i=i: at(f"blocks.{i}.{name}", value)
        x = at_layer("hook_resid_pre", x)
        qkv = linear(
            norm(x, layer.input_layernorm, at_layer, "ln1."), layer.attention.query_key_value
        )
        qkv = qkv.reshape(batch, time, config.num_heads, 3, config.head_dim)
        q, k, v = (at_layer(f"attn.hook_{n}", qkv[:, :, :, j]) for j, n in enumerate("qkv"))
        q = at_layer("attn.hook_rot_q", turned(q, config))
        k = at_layer("attn.hook_rot_k", turned(k, config))
        scores = np.einsum("bthd,bshd->bhts", q, k) / math.sqrt(config.head_dim)
        visible = np.tri(time, dtype=bool) if mask is None else np.tri(time, dtype=bool) & mask
        scores = at_layer("attn.hook_attn_scores", np.where(visible, scores, -np.inf))
        e = np.exp(scores - scores.max(-1, keepdims=True))
        pattern = at_layer("attn.hook_pattern", e / e.sum(-1, keepdims=True))
        z = at_layer("attn.hook_z", np.einsum("bhts,bshd->bthd", pattern, v))
        heads = f8(layer.attention.dense.weight).reshape(config.num_heads, config.head_dim, -1)
        result = at_layer("attn.hook_result", np.einsum("bthd,hdc->bthc", z, heads))
        added = at_layer("hook_attn_out", result.sum(2) + f8(layer.attention.dense.bias))
        if layer.mlp is None:
            x = at_layer("hook_resid_post", x + added)
            continue
        if not config.use_parallel_residual:
            x = at_layer("hook_resid_mid", x + added)
        pre = linear(
            norm(x, layer.post_attention_layernorm, at_layer, "ln2."), layer.mlp.dense_h_to_4h
        )
        post = at_layer("mlp.hook_post", GELUS[config.hidden_act](at_layer("mlp.hook_pre", pre)))
        written = at_layer("hook_mlp_out", linear(post, layer.mlp.dense_4h_to_h))
        x = at_layer(
            "hook_resid_post", x + added + written if config.use_parallel_residual else x + written
        )
    x = norm(x, model.final_layer_norm, at, "ln_final.")
    seen["logits"] = x @ f8(model.embed_out.weight)
    return seen


def near(got, wanted, tolerance=2e-5):
    got, wanted = (x.numpy() if isinstance(x, Tensor) else np.asarray(x) for x in (got, wanted))
    assert got.shape == wanted.shape
    finite = np.isfinite(wanted)
    np.testing.assert_array_equal(np.isfinite(got), finite)
    scale = np.abs(wanted[finite]).max()
    np.testing.assert_allclose(got[finite], wanted[finite], rtol=0, atol=tolerance * scale)


# ---- capturing -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"use_parallel_residual": False, "rotary_pct": 1},
        {"attention_only": True, "rotary_pct": 0},
    ],
    ids=str,
)
def test_everything_is_captured(device, changes):
    model = small(device, **changes)
    logits, cache = model.run_with_cache(IDS)
    wanted = forward(model, IDS)
    for found in logits, model(IDS)[0]:
        near(found, wanted["logits"])
    del wanted["logits"]
    assert list(cache) == hooks.hook_names(model.config) and set(cache) == set(wanted)
    for name, value in wanted.items():
        assert cache[name].shape == value.shape, name
        near(cache[name].numpy(), value)
    parts, labels = cache.decompose_resid(return_labels=True)
    kinds = ("attn_out",) if model.config.attention_only else ("attn_out", "mlp_out")
    assert labels == ["embed", *(f"{i}_{kind}" for i in (0, 1) for kind in kinds)]
    near(parts.sum(0), wanted["blocks.1.hook_resid_post"])
    states = [cache[name] for name in ("hook_embed", "blocks.0.hook_resid_post")]
    for state, same in zip(model.hidden_states(IDS), [*states, cache["ln_final.hook_out"]]):
        near(state, same)
    with ndl.no_grad():
        _, cache = model.run_with_cache(IDS)
    assert not any(value.requires_grad for value in cache.values())


@pytest.mark.parametrize("parallel", [True, False])
def test_block_sparse_patterns(parallel):
    sizes = dict(sparse_pattern="local", sparse_window=3, sparse_block=2)
    model = small(use_sparse_attention=True, use_parallel_residual=parallel, **sizes)
    mask = model.block_mask(9).to_dense()
    wanted = forward(model, IDS, mask=mask)
    fused = model(IDS)[0].numpy()
    logits, cache = model.run_with_cache(IDS, [PATTERN, "blocks.0.attn.hook_v"])
    near(fused, wanted["logits"])
    near(logits.numpy(), wanted["logits"])
    near(cache[PATTERN].numpy(), wanted[PATTERN])
    assert (cache[PATTERN].numpy()[:, :, ~(mask & np.tri(9, dtype=bool))] == 0).all()


# ---- replacing -----------------------------------------------------------------------------------


@pytest.mark.parametrize("parallel", [True, False])
def test_each_name_can_be_replaced(device, parallel):
    model = small(device, use_parallel_residual=parallel)
    for name in hooks.hook_names(model.config):
        with model.hooks({name: lambda x: x * 0.5}):
            got = model(IDS)[0].numpy()
        wanted = forward(model, IDS, {name: lambda x: x * 0.5})["logits"]
        near(got, wanted, 3e-5)
    np.testing.assert_array_equal(
        model(IDS)[0].numpy(), small(device, use_parallel_residual=parallel)(IDS)[0].numpy()
    )


# ---- gradients -----------------------------------------------------------------------------------


@pytest.mark.parametrize("parallel", [True, False])
def test_captured_tensors_keep_their_gradients(device, parallel):
    """Compares every name at once with finite differences in float64 along a random direction; two
    hooks replace what passes."""
    model = small(device, use_parallel_residual=parallel)
    random = np.random.default_rng(3)
    weight = random.standard_normal((2, 9, 29))
    zeros = Tensor(np.zeros((2, 9, 24)), device=model.device)
    scaled = {"blocks.0.hook_resid_post": lambda x: x * 0.7}
    with model.hooks({"hook_embed": lambda x: x + zeros} | scaled):
        logits, cache = model.run_with_cache(IDS)
    (logits * Tensor(weight, device=model.device, requires_grad=False)).sum().backward()
    near(zeros.grad, cache["hook_embed"].grad)
    for name, x in cache.items():
        direction = random.standard_normal(x.shape)
        if name.endswith(PATTERNS):
            direction *= np.tri(9)

        def loss_of(h, name=name, direction=direction):
            before = scaled.get(name, lambda y: y)
            moved = scaled | {name: lambda y: before(y) + h * direction}
            return (forward(model, IDS, moved)["logits"] * weight).sum()

        h = 1e-5
        wanted = (loss_of(h) - loss_of(-h)) / (2 * h)
        grad = np.where(np.isfinite(x.numpy()), x.grad.numpy(), 0)
        bound = 1e-4 * np.linalg.norm(grad) * np.linalg.norm(direction) / math.sqrt(grad.size)
        assert abs((grad * direction).sum() - wanted) < bound, name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("parallel", [True, False])
def test_names_alone_change_no_bit_of_gradients_and_norms(device, dtype, parallel):
    """Those that need nothing but what the fused ops have: the logits, every gradient, and what the
    norms give, which is what each gives alone."""
    model = small(device, dtype, use_parallel_residual=parallel)
    plain = (*PROJECTIONS, *PATTERNS, RESULT, *NORM)
    # A fused MLP keeps GELU's derivative, rounded to the dtype, and on a GPU adds up otherwise.
    same_inside = model.device.is_host and dtype == "float32"
    plain += () if same_inside else INSIDE
    names = [name for name in hooks.hook_names(model.config) if not name.endswith(plain)]
    if parallel:  # hooks inside end a layer's one operation, which rounds otherwise
        names = [name for name in names if name.endswith(BETWEEN)]
    seen, found = {}, []
    for functions in ({}, {name: partial(seen.__setitem__, name) for name in names}):
        with model.hooks(functions):
            logits, loss = model(IDS[:, :-1], IDS[:, 1:])
        found.append([logits.numpy(), *gradients_of(model, loss).values()])
    for one, other in zip(*found, strict=True):
        np.testing.assert_array_equal(one, other)
    assert list(seen) == names
    for name in (PATTERN, "blocks.0.ln1.hook_scale", "blocks.0.attn.hook_result"):
        assert model.run_with_cache(IDS, name)[1][name].dtype == "float32"
    for i, layer in enumerate([] if parallel else model.layers):
        for norm, point, read in (
            (layer.input_layernorm, "ln1", "hook_resid_pre"),
            (layer.post_attention_layernorm, "ln2", "hook_resid_mid"),
        ):
            got = seen[f"blocks.{i}.{point}.hook_out"]
            wanted = norm(seen[f"blocks.{i}.{read}"])
            np.testing.assert_array_equal(got.numpy(), wanted.numpy())


def test_a_block_takes_away_its_own_hooks_alone():
    """Those added inside stay until reset_hooks(), also that one."""
    model, heard = small(), []
    with model.hooks({"hook_embed": lambda x: heard.append("block")}):
        model.add_hook("hook_embed", lambda x: heard.append("added"))
        model(IDS)
        assert model.is_hooked
    model(IDS)
    assert heard == ["block", "added", "added"]
    with model.hooks({"blocks.1.hook_resid_post": lambda x: heard.append("block")}):
        model.reset_hooks()
        model(IDS)
    model(IDS)
    assert not model.is_hooked and len(heard) == 3


# ---- what is wrong -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, function, kind, message",
    [
        ("blocks.1.attn.pattern", None, ValueError, "blocks.1.attn.hook_pattern"),
        ("blocks.2.hook_resid_pre", None, ValueError, "blocks.1.hook_resid_pre"),
        ("blocks.0.hook_resid_mid", None, ValueError, "with a parallel residual nothing"),
        (3, None, ValueError, "hook_names"),
        ("hook_embed", 3, TypeError, "not a callable object"),
        ("hook_embed", lambda x: 3, TypeError, "hook_embed: a hook must return"),
        ("hook_embed", lambda x: x.sum(), ValueError, r"must be float32 \(2, 9, 24\)"),
        ("hook_embed", lambda x: x.astype("bfloat16"), ValueError, "must be float32"),
        ("hook_embed", lambda x: 1 / 0, ZeroDivisionError, None),
    ],
)
def test_wrong_hooks_say_why_and_are_gone(name, function, kind, message):
    model = small()
    if function is None:
        with pytest.raises(kind, match=message):
            model.run_with_cache(IDS, [name])
    with pytest.raises(kind, match=message), model.hooks({name: function or (lambda x: None)}):
        model(IDS)
        raise AssertionError("nothing was refused")
    assert not model.is_hooked
    model(IDS)


def test_hooks_in_a_layer_in_two_places_are_refused():
    """A function would replace, and a cache capture, in both by the name of one."""
    model = small()
    model.layers[1] = model.layers[0]
    message = "blocks.0.attn.hook_z and blocks.1.attn.hook_z are one module in several places"
    with pytest.raises(ValueError, match=message):
        model.run_with_hooks(IDS, {"blocks.1.attn.hook_z": lambda x: x * 0.0})
    _, cache = model.run_with_cache(IDS, ["hook_embed", "ln_final.hook_out"])
    close = np.testing.assert_allclose
    close(model.embed_out(cache["ln_final.hook_out"]).numpy(), model(IDS)[0].numpy(), atol=1e-6)


def test_results_of_heads_are_of_a_plain_projection():
    """A low-rank addition to the projection back (Hu et al. 2021) is not in its weight."""

    class LowRank(nn.Linear):
        def forward(self, x):
            return super().forward(x) + x @ self.down @ self.up

    model = small()
    dense = LowRank(24, 24)
    dense.down, dense.up = nn.Parameter(ndl.randn(24, 2)), nn.Parameter(ndl.randn(2, 24))
    model.layers[1].attention.dense = dense
    logits, cache = model.run_with_cache(IDS)
    np.testing.assert_allclose(logits.numpy(), model(IDS)[0].numpy(), rtol=0, atol=1e-4)
    names = [name for name in cache if name.endswith("hook_result")]
    assert names == ["blocks.0.attn.hook_result"]
    with pytest.raises(ValueError, match="no 'blocks.1.attn.hook_result'"):
        model.run_with_cache(IDS, "blocks.1.attn.hook_result")
    with pytest.raises(KeyError, match="blocks.1.attn.hook_result is not in this cache"):
        cache.stack_head_results()


def test_a_part_that_was_taken_away_has_no_names():
    model = small()
    with model.hooks({"blocks.1.hook_mlp_out": lambda x: x * 0.0}):
        wanted = model(IDS)[0].numpy()
    model.layers[1].mlp = None
    logits, cache = model.run_with_cache(IDS)
    np.testing.assert_allclose(logits.numpy(), wanted, rtol=0, atol=1e-5)
    assert "blocks.0.mlp.hook_pre" in cache and "blocks.1.mlp.hook_pre" not in cache
