"""Hooks: capture and replace activations by name.

    with model.hooks({"blocks.2.hook_resid_post": lambda x: x * 0.5}):
        logits, loss = model(ids, targets)
    logits = model.run_with_hooks(ids, [(lambda name: name.endswith("hook_z"), ablate)])
    logits, cache = model.run_with_cache(ids, ["blocks.0.attn.hook_pattern"])
    states = model.hidden_states(ids)

A hook is a function f(x) or f(x, hook) of the Tensor at its name; `hook.name` and `hook.layer()`
name the place. Its result replaces the Tensor, None keeps it. Gradients flow through both. A
captured Tensor keeps its own `.grad` if a leaf of the graph is no Parameter, such as `zeros`, a
Tensor of x's shape, in `model.hooks({"hook_embed": lambda x: x + zeros})` around the forward. For
Pythia, names, shapes and order are those of TransformerLens (Nanda and Bloom 2022), version 3 on:

    hook_embed                          (B, T, C)     rows of the embedding
    blocks.I.hook_resid_pre             (B, T, C)     input of layer I
    blocks.I.ln1.hook_scale             (B, T, 1)     float32; sqrt(var + eps), which divides
    blocks.I.ln1.hook_normalized        (B, T, C)     float32; divided, before weight and bias
    blocks.I.ln1.hook_out               (B, T, C)     after both: input of attention
    blocks.I.attn.hook_q, hook_k, hook_v   (B, T, H, D)   before rotary
    blocks.I.attn.hook_rot_q, hook_rot_k   (B, T, H, D)   after rotary
    blocks.I.attn.hook_attn_scores      (B, H, T, T)  float32; scaled, -inf where a key is not seen
    blocks.I.attn.hook_pattern          (B, H, T, T)  float32; its softmax over the last axis
    blocks.I.attn.hook_z                (B, T, H, D)  pattern times values
    blocks.I.attn.hook_result           (B, T, H, C)  float32; output of each head, without the bias
                                                      of `dense`; where that is an nn.Linear itself
    blocks.I.hook_attn_out              (B, T, C)     output of attention
    blocks.I.hook_resid_mid             (B, T, C)     between the two; sequential residual only. A
                                                      replacement continues in the stream
    blocks.I.ln2.hook_scale, hook_normalized, hook_out   the same for the MLP
    blocks.I.mlp.hook_pre, hook_post    (B, T, 4 C)   around GELU
    blocks.I.hook_mlp_out               (B, T, C)     output of the MLP
    blocks.I.hook_resid_post            (B, T, C)     output of layer I
    ln_final.hook_scale, hook_normalized, hook_out       the same for the head

The points stand in the forwards of the modules (`Module.hook`), and each class lists its own
(`Module.hook_points`). A hook changes the forward of its module only where its name needs values
that the fused ops never store. Attention then computes scores and pattern (T x T numbers a head in
float32), rotates q, k and v one by one, or multiplies and adds its heads one by one in float32. A
norm computes step by step in float32 for `hook_scale` and `hook_normalized`. An MLP with a hook
inside multiplies and applies GELU one after the other. A layer with a parallel residual is one
operation (ops.layer); a hook on any name inside it runs its parts instead, which may round
differently. `hook_embed`, `hook_resid_pre`, `hook_resid_post` and `ln_final.hook_out` change no
bit. Generation with hooks reads the whole context for each token.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import inspect
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from needle.autograd import Tensor
from needle.backend_ndarray import NDArray, array
from needle.interp.activations import ActivationCache, absence
from needle.nn import Module

Hook = Callable[..., Tensor | NDArray | np.ndarray | None]
NameFilter = Callable[[str], bool]
Added = Mapping[str, Callable[[Tensor], Tensor]]  # functions by name, of one block or call


@dataclass(frozen=True)
class HookPoint:
    """The place of a hook, its second argument."""

    name: str

    def layer(self) -> int:
        """Return the layer, from 0, of a place in one."""
        return int(self.name.split(".")[1])


def hook_names(of: Any) -> list[str]:
    """Return all names of a model, or of a model of this configuration, in the order of
    computation.

    >>> ndl.hooks.hook_names(ndl.PythiaConfig.preset("70m"))[:2]
    ['hook_embed', 'blocks.0.hook_resid_pre']
    """
    return [name for name, _, _ in _points(of if isinstance(of, Module) else of.meta_model())]


def _points(module: Module, prefix: str = "") -> Iterator[tuple[str, Module, str]]:
    """Yield (name, module, point) for all points of a module and of the modules below it."""
    for name, attribute in module.hook_points.items():
        if attribute is None:
            if module.has_hook_point(name):
                yield prefix + name, module, name
            continue
        below = getattr(module, attribute)
        if isinstance(below, (list, tuple)) and not getattr(below, "hook_points", None):
            for i, one in enumerate(below):
                yield from _points(one, f"{prefix}{name}.{i}.")
        elif below is not None:
            yield from _points(below, f"{prefix}{name}.")


def _checked(name: str, function: Hook) -> Callable[[Tensor], Tensor]:
    """Wrap a hook: return its result as a Tensor of the shape, dtype and device of x."""
    with contextlib.suppress(ValueError):  # of a builtin, whose parameters are not known
        if "hook" in inspect.signature(function).parameters:
            plain, function = function, lambda x: plain(x, hook=HookPoint(name))

    def call(x: Tensor) -> Tensor:
        given: Any = function(x)
        if given is None:
            return x
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

    return call


def chosen_names(of: Module, names: str | NameFilter | Collection[str] | None) -> list[str]:
    """Return the names that a name, several, a function of a name, or None for all stands for."""
    if names is None:
        return hook_names(of)
    if callable(names):
        found = [name for name in hook_names(of) if names(name)]
        if not found:
            raise ValueError("hooks: the function of names is true for no name of this model")
        return found
    return [names] if isinstance(names, str) else list(names)


class Hooked(Module):
    """A module with hook points."""

    _in_force: Sequence[Added] = ()  # in the order in which they came

    @property
    def is_hooked(self) -> bool:
        return any(self._in_force)

    @contextlib.contextmanager
    def hooks(self, functions: Mapping[str, Hook]) -> Iterator[None]:
        """Call functions in each forward inside `with model.hooks({name: function}):`; see the head
        of this file. Blocks nest: the outer function comes first. ValueError for a name that
        the model does not have, and in a module that it has in several places.

        >>> config = ndl.PythiaConfig(vocab_size=50, hidden_size=16, num_layers=1, num_heads=2)
        >>> model = ndl.Pythia(config)
        >>> with model.hooks({"blocks.0.hook_mlp_out": lambda x: x * 0.0}):
        ...     without_mlp, _ = model([[1, 2, 3]])
        >>> bool((without_mlp.numpy() == model([[1, 2, 3]])[0].numpy()).all())
        False
        """
        added = self._add(functions)
        try:
            yield
        finally:  # of the hooks in force now: in the block others may have come, or all have gone
            self._put_in_force([one for one in self._in_force if one is not added])

    def add_hook(self, name: str | NameFilter, hook: Hook) -> None:
        """Hook a function at a name, or at all for which a function of names is true, up to
        reset_hooks()."""
        self._add(dict.fromkeys(chosen_names(self, name), hook))

    def reset_hooks(self) -> None:
        """Remove all hooks."""
        self._put_in_force(())

    def _add(self, functions: Mapping[str, Hook]) -> Added:
        """Put functions in force after those that are; return them as they are called."""
        places = {name: (id(module), point) for name, module, point in _points(self)}
        several = Counter(places.values())
        for name in functions:
            if name not in places:
                why = absence(self, str(name))
                near = [] if why else difflib.get_close_matches(str(name), places, 3)
                hint = f"; there is {', '.join(near)}" if near else why and f": {why}"
                raise ValueError(
                    f"hooks: this model has no {name!r}{hint} (needle.hooks.hook_names lists all)"
                )
            if several[places[name]] > 1:
                same = [other for other in places if places[other] == places[name]]
                raise ValueError(
                    f"hooks: {' and '.join(same)} are one module in several places, in which a "
                    "hook would be called alike"
                )
        added = {name: _checked(name, function) for name, function in functions.items()}
        self._put_in_force([*self._in_force, added])
        return added

    def _put_in_force(self, added: Sequence[Added]) -> None:
        self._in_force = added
        for _, module, _ in _points(self):
            module._hooks = None
        for name, module, point in _points(self):
            if functions := [one[name] for one in added if name in one]:
                module._hooks = {**(module._hooks or {}), point: functions}

    def run_with_hooks(
        self,
        input_ids: Any,
        fwd_hooks: Iterable[tuple[str | NameFilter, Hook]] | Mapping[str | NameFilter, Hook],
        return_type: str | None = "logits",
    ) -> Any:
        """Return the logits of ids (B, T), or text, with pairs (name, function), or those of a
        dict, hooked; instead of a name, a function of names that is true for several. return_type:
        returned instead of the logits, see the call of the model.

        >>> config = ndl.PythiaConfig(vocab_size=50, hidden_size=16, num_layers=2, num_heads=2)
        >>> model = ndl.Pythia(config)
        >>> def ablate(z, hook):
        ...     return z * 0.0 if hook.layer() == 1 else None
        >>> model.run_with_hooks([[1, 2]], [(lambda name: name.endswith("hook_z"), ablate)]).shape
        (1, 2, 50)
        """
        with contextlib.ExitStack() as stack:
            pairs = fwd_hooks.items() if isinstance(fwd_hooks, Mapping) else fwd_hooks
            for name, function in pairs:
                names = chosen_names(self, name)
                stack.enter_context(self.hooks(dict.fromkeys(names, function)))
            if return_type == "logits":
                return self(input_ids)[0]
            return self(input_ids, return_type=return_type)

    def run_with_cache(
        self, input_ids: Any, names_filter: str | NameFilter | Collection[str] | None = None
    ) -> tuple[Tensor, ActivationCache]:
        """Return (logits, ActivationCache) of a forward of ids (B, T), or text. The cache has
        {name: Tensor}, captured after active hooks.

        names_filter: one name, several, or a function of names that is true for several; None for
        all, of which the patterns take T x T numbers a head. The Tensors belong to the graph of the
        forward, except inside `no_grad()`.

        >>> config = ndl.PythiaConfig(vocab_size=50, hidden_size=16, num_layers=1, num_heads=2)
        >>> model = ndl.Pythia(config)
        >>> logits, cache = model.run_with_cache([[1, 2, 3]], "blocks.0.attn.hook_pattern")
        >>> cache["pattern", 0].shape
        (1, 2, 3, 3)
        """
        names = chosen_names(self, names_filter)
        cache: dict[str, Tensor] = {}
        with self.hooks({name: functools.partial(cache.__setitem__, name) for name in names}):
            logits, _ = self(input_ids)
        return logits, ActivationCache(cache, self)
