"""Activation and attribution patching over heads and positions.

    clean_logits, clean_cache = model.run_with_cache(clean_tokens)
    patched = get_act_patch_attn_head_out_by_pos(model, corrupted_tokens, clean_cache, metric)

Activation patching (Meng et al. 2022, Wang et al. 2023) runs the model on corrupted tokens once for
each head, position or both, with that part of one activation replaced by the one of the clean run,
and returns a metric of the logits. Attribution patching (Nanda 2023) estimates the change of the
metric by its gradient, in one forward and backward. Names and results are those of
`transformer_lens.patching`.

Many patched runs share a forward, which begins at the patched layer. All stays on the device. Axis
letters: B batch, T time, C channels, H heads, V vocabulary, L layers.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from needle import init, ops
from needle.autograd import Tensor, no_grad
from needle.backend_ndarray import array
from needle.interp.activations import ActivationCache, get_act_name
from needle.interp.hooks import Hook
from needle.nn import Module

Metric = Callable[[Tensor], Tensor]


def generic_activation_patch(
    model: Any,
    corrupted_tokens: Any,
    clean_cache: ActivationCache,
    patching_metric: Metric,
    activation_name: str,
    axes: Sequence[int],
    logits_at: int | Sequence[int] | None = None,
    batch: int = 64,
) -> Tensor:
    """Return the metric of each patched run, (L, *sizes of `axes` of the activation) in float32.

    corrupted_tokens: ids (B, T), or text. clean_cache: has the activation of each layer, of a run
    of the same shape. patching_metric: a function of logits (B, T, V) in one number. axes: the axes
    of the activation whose elements are patched one by one, all of the other axes. logits_at: the
    positions that the metric reads, one or several; it is then given logits (B, positions, V),
    which takes much less time. batch: rows of a forward, at least B.
    """
    with no_grad():
        stream = [f"blocks.{layer}.hook_resid_pre" for layer in range(model.config.num_layers)]
        _, corrupted = model.run_with_cache(corrupted_tokens, stream)
        values: list[Tensor] = []
        for layer, start in enumerate(stream):
            name = get_act_name(activation_name, layer)
            clean, x = clean_cache[name], corrupted[start]
            _check_axes(name, clean, axes)
            for mask in _masks(clean.shape, axes, max(batch // len(x), 1)):
                patch = partial(_patch, name=name, clean=clean, mask=mask)
                with _hooked_after(model, start, {name: patch}):
                    hidden = model.hidden_from(ops.tile(x, (len(mask), 1, 1)), layer)
                if logits_at is not None:
                    hidden = hidden[:, np.atleast_1d(logits_at)]
                runs = model.embed_out(hidden).split(len(x))
                values += [_number(patching_metric, logits) for logits in runs]
        return ops.stack(values).reshape((len(stream), *(clean.shape[axis] for axis in axes)))


def generic_attribution_patch(
    model: Any,
    corrupted_tokens: Any,
    clean_cache: ActivationCache,
    patching_metric: Metric,
    activation_name: str,
    axes: Sequence[int],
) -> Tensor:
    """Return the estimated change of the metric by each patch, (L, *sizes of `axes`) in float32:
    the sum over the other axes of (clean - corrupted) times the gradient of the metric. Arguments
    as of `generic_activation_patch`."""
    names = [get_act_name(activation_name, at) for at in range(model.config.num_layers)]
    shift = init.zeros(1, 1, model.config.hidden_size, device=model.device, requires_grad=True)
    with _frozen(model), model.hooks({"hook_embed": lambda x: x + shift.astype(x.dtype)}):
        logits, corrupted = model.run_with_cache(corrupted_tokens, names)
        _number(patching_metric, logits).backward()  # each Tensor keeps its gradient
    found = []
    with no_grad():
        for name, x in corrupted.items():
            clean = clean_cache[name]
            _check_same_run(name, clean, x.shape)
            _check_axes(name, x, axes)
            change = ops.astype(clean, "float32") - ops.astype(x, "float32")
            change = ops.where(clean == x, 0.0, change)  # -inf in both: a key that is not seen
            product = change * ops.astype(x.grad, "float32")
            rest = tuple(axis for axis in range(len(x.shape)) if axis not in axes)
            found.append(ops.summation(product, axes=rest))
        return ops.stack(found)


@contextlib.contextmanager
def _hooked_after(model: Any, start: str, functions: dict[str, Hook]) -> Iterator[None]:
    """Hook functions into a forward of what the hooks in force at `start` have returned."""
    before = model._in_force
    model._put_in_force([{n: f for n, f in one.items() if n != start} for one in before])
    try:
        with model.hooks(functions):
            yield
    finally:
        model._put_in_force(before)


def _patch(x: Tensor, name: str, clean: Tensor, mask: np.ndarray) -> Tensor:
    """Replace in x (patches B, ...) of each patch the part at its mask by that of clean (B, ...).
    The masks are all that is uploaded."""
    _check_same_run(name, clean, (len(x) // len(mask), *x.shape[1:]))
    grouped = x.reshape((len(mask), *clean.shape))
    chosen = ops.where(array(mask, "bool", x.device), clean.reshape((1, *clean.shape)), grouped)
    return chosen.reshape(x.shape)


def _masks(shape: tuple[int, ...], axes: Sequence[int], size: int) -> Iterator[np.ndarray]:
    """Yield (patches, ...) that choose one element along `axes` each, row-major, `size` at once."""
    sizes = [n if axis in axes else 1 for axis, n in enumerate(shape)]
    places = np.arange(math.prod(sizes))
    for start in range(0, len(places), size):
        chosen = places[start : start + size, None] == places
        yield chosen.reshape((len(chosen), *sizes))


def _check_axes(name: str, x: Tensor, axes: Sequence[int]) -> None:
    if not axes or not all(0 < axis < x.ndim for axis in axes) or list(axes) != sorted({*axes}):
        raise ValueError(
            f"patching: axes must be ascending axes of {name} {x.shape} after the first, the "
            f"batch, but are {axes}"
        )


def _check_same_run(name: str, clean: Tensor, corrupted: tuple[int, ...]) -> None:
    if clean.shape != corrupted:
        raise ValueError(
            f"patching: {name} has shape {clean.shape} in the clean run and {corrupted} in the "
            "corrupted one: both need as many texts of as many tokens"
        )


def _number(metric: Metric, logits: Tensor) -> Tensor:
    value: Any = metric(logits) if callable(metric) else metric
    if not isinstance(value, Tensor) or value.size != 1:
        raise TypeError(
            "patching: the metric must return a Tensor of one number, as "
            f"`lambda logits: logits[0, -1, token]`, not {getattr(value, 'shape', value)!r}"
        )
    return ops.astype(value, "float32").reshape(())


@contextlib.contextmanager
def _frozen(model: Module) -> Iterator[None]:
    """Compute no gradients of parameters."""
    trained = [p for p in model.parameters() if p.requires_grad]
    for parameter in trained:
        parameter.requires_grad = False
    try:
        yield
    finally:
        for parameter in trained:
            parameter.requires_grad = True


# ---- by name -------------------------------------------------------------------------------------
# (B, T, C) by position; (B, T, H, D) by position and head, or by head; patterns (B, H, T, T).

_patch_of = partial(partial, generic_activation_patch)
get_act_patch_resid_pre = _patch_of(activation_name="resid_pre", axes=(1,))
get_act_patch_resid_mid = _patch_of(activation_name="resid_mid", axes=(1,))
get_act_patch_attn_out = _patch_of(activation_name="attn_out", axes=(1,))
get_act_patch_mlp_out = _patch_of(activation_name="mlp_out", axes=(1,))
get_act_patch_attn_head_out_by_pos = _patch_of(activation_name="z", axes=(1, 2))
get_act_patch_attn_head_q_by_pos = _patch_of(activation_name="q", axes=(1, 2))
get_act_patch_attn_head_k_by_pos = _patch_of(activation_name="k", axes=(1, 2))
get_act_patch_attn_head_v_by_pos = _patch_of(activation_name="v", axes=(1, 2))
get_act_patch_attn_head_pattern_by_pos = _patch_of(activation_name="pattern", axes=(1, 2))
get_act_patch_attn_head_pattern_dest_src_pos = _patch_of(activation_name="pattern", axes=(1, 2, 3))
get_act_patch_attn_head_out_all_pos = _patch_of(activation_name="z", axes=(2,))
get_act_patch_attn_head_q_all_pos = _patch_of(activation_name="q", axes=(2,))
get_act_patch_attn_head_k_all_pos = _patch_of(activation_name="k", axes=(2,))
get_act_patch_attn_head_v_all_pos = _patch_of(activation_name="v", axes=(2,))
get_act_patch_attn_head_pattern_all_pos = _patch_of(activation_name="pattern", axes=(1,))


def _patch_every(*functions: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def patch_every(*given: Any, **options: Any) -> Tensor:
        """Return the results of several functions, which take the same arguments, stacked."""
        return ops.stack([function(*given, **options) for function in functions])

    return patch_every


# (3, L, T), (5, L, H) and (5, L, T, H)
get_act_patch_block_every = _patch_every(
    get_act_patch_resid_pre, get_act_patch_attn_out, get_act_patch_mlp_out
)
get_act_patch_attn_head_all_pos_every = _patch_every(
    get_act_patch_attn_head_out_all_pos,
    get_act_patch_attn_head_q_all_pos,
    get_act_patch_attn_head_k_all_pos,
    get_act_patch_attn_head_v_all_pos,
    get_act_patch_attn_head_pattern_all_pos,
)
get_act_patch_attn_head_by_pos_every = _patch_every(
    get_act_patch_attn_head_out_by_pos,
    get_act_patch_attn_head_q_by_pos,
    get_act_patch_attn_head_k_by_pos,
    get_act_patch_attn_head_v_by_pos,
    lambda *given, **options: get_act_patch_attn_head_pattern_by_pos(*given, **options).transpose(),
)
