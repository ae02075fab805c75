"""Hooks: what a Pythia computes inside, captured and replaced by name.

    with model.hooks({"blocks.2.hook_resid_post": lambda x: x * 0.5}):
        logits, loss = model(ids, targets)
    logits, cache = model.run_with_cache(ids, ["blocks.0.attn.hook_pattern"])
    states = model.hidden_states(ids)

A hook is a function of the Tensor at its name; what it returns takes the Tensor's place, None
leaves it. Gradients flow through both; a captured Tensor keeps its own `.grad` where the graph has
a leaf that is no Parameter: `model.hooks({"hook_embed": lambda x: x + zeros})`, with `zeros` a
Tensor of x's shape, around the forward. Names, shapes and order are those of TransformerLens (Nanda
and Bloom 2022):

    hook_embed                          (B, T, C)     rows of the embedding
    blocks.I.hook_resid_pre             (B, T, C)     what layer I reads
    blocks.I.ln1.hook_scale             (B, T, 1)     float32; sqrt(var + eps), which divides
    blocks.I.ln1.hook_normalized        (B, T, C)     what attention reads, with weight and bias
    blocks.I.attn.hook_q, hook_k, hook_v   (B, T, H, D)   before rotary
    blocks.I.attn.hook_rot_q, hook_rot_k   (B, T, H, D)   behind it
    blocks.I.attn.hook_attn_scores      (B, H, T, T)  float32; scaled, -inf where a key is not seen
    blocks.I.attn.hook_pattern          (B, H, T, T)  float32; its softmax over the last axis
    blocks.I.attn.hook_z                (B, T, H, D)  what the heads have gathered
    blocks.I.attn.hook_result           (B, T, H, C)  float32; what each head adds; without the bias
    blocks.I.hook_attn_out              (B, T, C)     what attention adds
    blocks.I.hook_resid_mid             (B, T, C)     in between; sequential residual only
    blocks.I.ln2.hook_scale, hook_normalized          the same of what the MLP reads
    blocks.I.mlp.hook_pre, hook_post    (B, T, 4 C)   around GELU
    blocks.I.hook_mlp_out               (B, T, C)     what the MLP adds
    blocks.I.hook_resid_post            (B, T, C)     what layer I leaves
    ln_final.hook_scale, hook_normalized              the same of what the head multiplies

A model without hooks runs its own forward, which knows nothing of them. Generation with hooks reads
the whole context for each token. With hooks the forward is the one below: the same ops in the same
order, and so the same bits, except where a name needs what the fused ops never store. In a layer
whose scores or pattern are asked for, attention is computed in the plain way, T x T numbers a head
in float32; where its q, k or v are, they are rotated one by one; where its result is, the heads are
multiplied and added one by one in float32; and a norm whose scale is, is computed step by step in
float32.
"""

from __future__ import annotations

import contextlib
import difflib
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from needle import ops
from needle.autograd import Tensor
from needle.backend_ndarray import NDArray, array
from needle.block_mask import BlockMask

if TYPE_CHECKING:
    from needle.models.pythia import Attention, Layer, LayerNorm, Linear, Pythia, PythiaConfig

Hook = Callable[[Tensor], Tensor | NDArray | np.ndarray | None]

PROJECTIONS = ("attn.hook_q", "attn.hook_k", "attn.hook_v", "attn.hook_rot_q", "attn.hook_rot_k")
PATTERNS = ("attn.hook_attn_scores", "attn.hook_pattern")
RESULT = ("attn.hook_result",)
SCALE = ("hook_scale",)


def hook_names(config: PythiaConfig) -> list[str]:
    """Every name that a model of this configuration has, in the order of computation."""
    layer = [
        "hook_resid_pre",
        "ln1.hook_scale",
        "ln1.hook_normalized",
        *PROJECTIONS,
        *PATTERNS,
        "attn.hook_z",
        *RESULT,
        "hook_attn_out",
        "hook_resid_mid",
        "ln2.hook_scale",
        "ln2.hook_normalized",
        "mlp.hook_pre",
        "mlp.hook_post",
        "hook_mlp_out",
        "hook_resid_post",
    ]
    if config.use_parallel_residual:
        layer.remove("hook_resid_mid")
    blocks = [f"blocks.{i}.{name}" for i in range(config.num_layers) for name in layer]
    return ["hook_embed", *blocks, "ln_final.hook_scale", "ln_final.hook_normalized"]


class Hooks:
    """The functions that are in force, by name, in the order in which they were added."""

    def __init__(self, functions: Mapping[str, tuple[Hook, ...]]) -> None:
        self.functions = functions

    def __repr__(self) -> str:
        return f"Hooks({', '.join(self.functions)})"

    def with_more(self, added: Mapping[str, Hook]) -> Hooks:
        functions = dict(self.functions)
        for name, function in added.items():
            functions[name] = (*functions.get(name, ()), function)
        return Hooks(functions)

    def any_of(self, prefix: str, names: Collection[str]) -> bool:
        return any(prefix + name in self.functions for name in names)

    def __call__(self, name: str, x: Tensor) -> Tensor:
        for function in self.functions.get(name, ()):
            given = function(x)
            if given is not None:
                x = _replacement(name, given, x)
        return x


def _replacement(name: str, given: Any, x: Tensor) -> Tensor:
    """What a hook returned, as a Tensor that fits where x was."""
    if isinstance(given, np.ndarray):
        given = array(given, x.dtype, x.device)
    if isinstance(given, NDArray):
        given = Tensor.from_ndarray(given)
    if not isinstance(given, Tensor):
        raise TypeError(
            f"{name}: a hook must return a Tensor, an array or None, not {type(given).__name__}"
        )
    if (given.shape, given.dtype, given.device) != (x.shape, x.dtype, x.device):
        raise ValueError(
            f"{name}: the hook returned {given.dtype} {given.shape} on "
            f"{given.device}; it must be {x.dtype} {x.shape} on {x.device}"
        )
    return given


# ---- the forward with hooks ---------------------------------------------------------------------


def hidden(
    model: Pythia,
    embedded: Tensor,
    rotary: tuple[NDArray, NDArray],
    mask: BlockMask | None,
    at: Hooks,
) -> Tensor:
    """What the head reads, (B, T, C), from the embedded tokens."""
    x = at("hook_embed", embedded)
    for i, layer in enumerate(model.layers):
        x = _layer(layer, x, rotary, mask, at, f"blocks.{i}.")
    return _norm(model.final_layer_norm, x, at, "ln_final.")


def _layer(
    layer: Layer,
    x: Tensor,
    rotary: tuple[NDArray, NDArray],
    mask: BlockMask | None,
    at: Hooks,
    name: str,
) -> Tensor:
    x = at(name + "hook_resid_pre", x)
    normed = _norm(layer.input_layernorm, x, at, name + "ln1.")
    attended = at(
        name + "hook_attn_out", _attention(layer.attention, normed, rotary, mask, at, name)
    )
    before = x
    x = x + attended
    if not layer.parallel:
        before = x = at(name + "hook_resid_mid", x)
    normed = _norm(layer.post_attention_layernorm, before, at, name + "ln2.")
    inner = at(name + "mlp.hook_pre", layer.mlp.dense_h_to_4h(normed))
    inner = at(name + "mlp.hook_post", ops.gelu(inner, layer.mlp.approximate))
    written = at(name + "hook_mlp_out", layer.mlp.dense_4h_to_h(inner))
    return at(name + "hook_resid_post", x + written)


def _norm(norm: LayerNorm, x: Tensor, at: Hooks, name: str) -> Tensor:
    if not at.any_of(name, SCALE):
        return at(name + "hook_normalized", norm(x))
    wide, column = ops.astype(x, "float32"), (*x.shape[:-1], 1)
    centred = wide - ops.mean(wide, -1).reshape(column)
    scale = ops.sqrt(ops.mean(centred * centred, -1).reshape(column) + norm.eps)
    scale = at(name + "hook_scale", scale)
    weight, bias = (ops.astype(p, "float32") for p in (norm.weight, norm.bias))
    return at(name + "hook_normalized", ops.astype(centred / scale * weight + bias, x.dtype))


def _attention(
    attention: Attention,
    x: Tensor,
    rotary: tuple[NDArray, NDArray],
    mask: BlockMask | None,
    at: Hooks,
    name: str,
) -> Tensor:
    batch, time, width = x.shape
    qkv = attention.query_key_value(x)
    qkv = qkv.reshape((batch, time, attention.heads, 3, attention.head_dim))
    plain = at.any_of(name, PATTERNS)
    if plain or at.any_of(name, PROJECTIONS):
        q, k, v = ops.split(qkv, 3)
        q, k = at(name + "attn.hook_q", q), at(name + "attn.hook_k", k)
        v = at(name + "attn.hook_v", v)
        q = at(name + "attn.hook_rot_q", _rotated(q, rotary))
        k = at(name + "attn.hook_rot_k", _rotated(k, rotary))
        seen = (
            _plain(q, k, v, mask, at, name)
            if plain
            else ops.attention(q, k, v, causal=True, mask=mask)
        )
    else:
        seen = ops.qkv_attention(qkv, *rotary, causal=True, mask=mask)
    seen = at(name + "attn.hook_z", seen)
    if at.any_of(name, RESULT):
        return _by_head(attention.dense, seen, at, name)
    return attention.dense(seen.reshape((batch, time, width)))


def _by_head(dense: Linear, seen: Tensor, at: Hooks, name: str) -> Tensor:
    """The projection of (B, T, H, D) by `dense`, head by head."""
    heads, size = seen.shape[2:]
    weight = ops.astype(dense.weight, "float32").reshape((heads, size, dense.weight.shape[1]))
    wide = ops.transpose(ops.astype(seen, "float32"), (1, 2))
    result = at(name + RESULT[0], ops.transpose(ops.matmul(wide, weight), (1, 2)))
    return ops.astype(result.sum(2) + ops.astype(dense.bias, "float32"), seen.dtype)


def _rotated(x: Tensor, rotary: tuple[NDArray, NDArray]) -> Tensor:
    """(B, T, H, D) turned by position."""
    batch, time, heads, size = x.shape
    return ops.rotary(x.reshape((batch, time, heads, 1, size)), *rotary, 1).reshape(x.shape)


def _plain(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask | None, at: Hooks, name: str) -> Tensor:
    """Causal attention of (B, T, H, D) with all its probabilities, in float32."""
    time, heads, size = q.shape[1:]
    visible = np.tri(time, dtype=bool)[None]
    if mask is not None:
        visible = visible & mask.to_dense().reshape((-1, time, time))
    hidden_keys = np.where(visible, np.float32(0), -np.float32(np.inf))
    q, k, wide = (ops.transpose(ops.astype(x, "float32"), (1, 2)) for x in (q, k, v))
    scores = ops.matmul(q, ops.transpose(k)) / math.sqrt(size)
    scores = scores + Tensor.from_ndarray(array(hidden_keys[None], "float32", q.device))
    scores = at(name + "attn.hook_attn_scores", scores)
    pattern = at(name + "attn.hook_pattern", ops.softmax(scores))
    return ops.astype(ops.transpose(ops.matmul(pattern, wide), (1, 2)), v.dtype)


# ---- what a model gets --------------------------------------------------------------------------


class Hooked:
    """The part of Pythia that people with hooks call."""

    config: PythiaConfig
    _hooks: Hooks | None = None  # None: the forward that knows nothing of hooks

    @property
    def is_hooked(self) -> bool:
        return self._hooks is not None

    @contextlib.contextmanager
    def hooks(self, functions: Mapping[str, Hook]) -> Iterator[None]:
        """Inside `with model.hooks({name: function}):` each forward of the model calls the
        functions; see the head of needle/hooks.py. Blocks nest: the outer function comes first.
        ValueError names what the model does not have, TypeError what is no function.

        >>> config = ndl.PythiaConfig(vocab_size=50, hidden_size=16, num_layers=1, num_heads=2)
        >>> model = ndl.Pythia(config)
        >>> with model.hooks({"blocks.0.hook_mlp_out": lambda x: x * 0.0}):
        ...     without_mlp, _ = model([[1, 2, 3]])
        >>> bool((without_mlp.numpy() == model([[1, 2, 3]])[0].numpy()).all())
        False
        """
        self._check_names(functions)
        for name, function in functions.items():
            if not callable(function):
                raise TypeError(
                    f"hooks: {name}: a hook must be a function of the Tensor there, "
                    f"not {type(function).__name__}"
                )
        before = self._hooks
        self._hooks = (before or Hooks({})).with_more(functions)
        try:
            yield
        finally:
            self._hooks = before

    def run_with_cache(
        self, input_ids: Any, names: str | Collection[str] | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """(logits, {name: Tensor}) of a forward of ids (B, T), captured behind the hooks in force.

        names: one name or several, None for all, of which the patterns take T x T numbers a head.
        The Tensors belong to the graph: `backward()` fills in the gradients of what led to them;
        inside `no_grad()` they are plain values.

        >>> config = ndl.PythiaConfig(vocab_size=50, hidden_size=16, num_layers=1, num_heads=2)
        >>> model = ndl.Pythia(config)
        >>> logits, cache = model.run_with_cache([[1, 2, 3]], "blocks.0.attn.hook_pattern")
        >>> cache["blocks.0.attn.hook_pattern"].shape
        (1, 2, 3, 3)
        """
        if names is None:
            names = hook_names(self.config)
        names = [names] if isinstance(names, str) else list(names)
        cache: dict[str, Tensor] = {}

        def keep(name: str) -> Hook:
            return lambda x: cache.__setitem__(name, x)

        with self.hooks({name: keep(name) for name in names}):
            logits, _ = self(input_ids)
        return logits, cache

    def hidden_states(self, input_ids: Any) -> tuple[Tensor, ...]:
        """The residual stream of ids (B, T), as `output_hidden_states` of transformers: L + 1
        Tensors (B, T, C), what each layer reads, and what the head reads behind the final norm.

        >>> config = ndl.PythiaConfig(vocab_size=50, hidden_size=16, num_layers=1, num_heads=2)
        >>> model = ndl.Pythia(config)
        >>> [state.shape for state in model.hidden_states([[1, 2, 3]])]
        [(1, 3, 16), (1, 3, 16)]
        """
        names = [f"blocks.{i}.hook_resid_pre" for i in range(self.config.num_layers)]
        names.append("ln_final.hook_normalized")
        _, cache = self.run_with_cache(input_ids, names)
        return tuple(cache[name] for name in names)

    def _check_names(self, names: Collection[str]) -> None:
        known = hook_names(self.config)
        for name in names:
            if name not in known:
                near = difflib.get_close_matches(str(name), known, 3)
                hint = f"; there is {', '.join(near)}" if near else ""
                raise ValueError(
                    f"hooks: this model has no {name!r}{hint} (needle.hooks.hook_names lists all)"
                )
