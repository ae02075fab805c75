"""Layers that are computed again in the backward instead of keeping their activations (Chen et al.
2016, "Training Deep Nets with Sublinear Memory Cost").

    x = nn.recompute(layer, x, rotary, mask)      # as layer(x, rotary, mask)

The forward keeps x alone; the backward runs the layer once more, with the graph, and walks that.
Kernels give the same bits each time, so results and gradients are those without it, for the
time of a second forward.
"""

from __future__ import annotations

import dataclasses
import functools
import random
import types
from typing import Any

import numpy as np

from needle.autograd import (
    Accumulators,
    FusedOp,
    NDArray,
    Tensor,
    compute_gradient_of_variables,
    enable_grad,
    is_grad_enabled,
    no_grad,
)
from needle.nn.module import Module, Parameter, contents

PLAIN = (int, float, complex, str, bytes, np.generic)
AS_THEY_ARE = (*PLAIN, type(None), Parameter)
GENERATORS = (np.random.Generator, np.random.RandomState, random.Random)
Settings = dict[str, Any]  # by their place, as "dropout.p"


@functools.cache
def _defaults(kind: type) -> list[str]:
    """The data in a class, which an attribute of the instance may take the place of."""
    members = [item for base in kind.__mro__[:-1] for item in vars(base).items()]
    names = [n for n, v in members if n[:2] != "__" and not hasattr(type(v), "__get__")]
    return [n for n in names if n not in ("hook_points", "neighbours")]  # no forward reads these


def _settings_of(value: Any, place: str, found: Settings, seen: set[int]) -> Settings:
    """Add to `found` what a forward may read below `value`: each object once, in `seen`."""
    parts: dict[Any, Any] = {}
    setting = value
    if isinstance(value, Module):
        parts = {name: getattr(value, name) for name in _defaults(type(value))}
        parts |= contents(value)
    elif isinstance(value, dict):
        parts, setting = value, type(value)
    elif isinstance(value, (list, tuple)):
        parts, setting = dict(enumerate(value)), (type(value), len(value))
    elif isinstance(value, np.ndarray):
        setting = value.dtype.str, value.shape, hash(value.tobytes())
    elif isinstance(value, Tensor):
        setting = value.cached_data
    elif isinstance(value, (set, frozenset)):
        setting = type(value), frozenset(value)
    elif isinstance(value, types.SimpleNamespace):
        parts = vars(value)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    found[place] = setting
    if id(value) not in seen:
        seen.add(id(value))
        for key, item in parts.items():
            if isinstance(item, AS_THEY_ARE):
                found[f"{place}.{key}"] = item
            else:
                _settings_of(item, f"{place}.{key}", found, seen)
    return found


def _changed(before: Settings, now: Settings) -> list[str]:
    """Return the places whose value was replaced or removed."""
    return [
        place
        for place, a in before.items()
        if (b := now.get(place, before)) is not a
        and not (type(a) is type(b) and isinstance(a, (*PLAIN, tuple)) and a == b)
    ]


def _state_of(generator: Any) -> Any:
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    named = isinstance(generator, np.random.RandomState)
    return generator.get_state() if named else generator.getstate()


def _set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(state)
    else:
        generator.setstate(state)


class Recomputed(FusedOp):
    """Op whose inputs are x and the parameters of the module, so that their gradients flow."""

    reads_result = False

    def __init__(self, module: Module, rest: tuple[Any, ...]) -> None:
        self.module, self.rest = module, rest

    def _settings(self) -> Settings:
        seen: set[int] = set()
        found = _settings_of(self.module, type(self.module).__name__, {}, seen)
        return _settings_of(self.rest, "operands", found, seen)

    def _random_states(self) -> list[Any]:
        """Return the states of the generators of NumPy, of Python and of the module."""
        return [np.random.get_state(), random.getstate(), *map(_state_of, self.generators)]

    def _set_random_states(self, states: list[Any]) -> None:
        np.random.set_state(states[0])
        random.setstate(states[1])
        for generator, state in zip(self.generators, states[2:]):
            _set_state(generator, state)

    def compute(self, x: NDArray, *parameters: NDArray) -> NDArray:
        settings = self._settings()
        self.generators = [v for v in settings.values() if isinstance(v, GENERATORS)]
        self.random = self._random_states()
        with no_grad():
            out = self.module(Tensor.make_const(x), *self.rest)
        for place in _changed(settings, self._settings()):
            del settings[place]  # by the forward itself: a counter, tables that it made
        self.settings = settings
        self.arrays = [v for v in settings.values() if isinstance(v, NDArray)]
        if not isinstance(out, Tensor):
            raise TypeError(
                f"recompute: {type(self.module).__name__} must give one Tensor, "
                f"not {type(out).__name__}"
            )
        return out.cached_data

    def check_unchanged(self) -> None:
        now = self._settings()
        for place in _changed(self.settings, now):
            raise RuntimeError(
                f"backward: recompute: {place} was {self.settings[place]!r:.40} in the forward and "
                f"is {now.get(place)!r:.40}: set it back, or compute the forward again"
            )

    def backward(
        self, dout: NDArray, node: Tensor, accumulators: Accumulators
    ) -> list[NDArray | None]:
        first, *parameters = node.inputs
        x = Tensor.make_const(first.cached_data, requires_grad=first.requires_grad)
        now = self._random_states()
        self._set_random_states(self.random)  # dropout drops the same
        try:
            with enable_grad():
                out = self.module(x, *self.rest)
        finally:
            self._set_random_states(now)
        # Parameters without a buffer get their .grad at the end of the whole backward, not here.
        before = [(p, p.grad) for p in parameters if not p.has_grad_buffer]
        for p, _ in before:
            p.grad = None
        try:
            compute_gradient_of_variables(out, Tensor.from_ndarray(dout), inner=True)
            found = [None if p.has_grad_buffer else p.grad for p in (x, *parameters)]
        finally:
            for p, grad in before:
                p.grad = grad
        return [None if grad is None else grad.cached_data for grad in found]


def recompute(module: Module, x: Tensor, *rest: Any) -> Tensor:
    """module(x, *rest), of which the backward computes everything again but x.

    - Gradients flow through the Tensor x alone. `rest` is passed to the module and must hold no
      Tensor that needs gradients. The module returns one Tensor.
    - This is a plain call if no graph is built, or if a function is hooked into the module, which
      would then run twice.
    - The second forward draws the same random numbers, so dropout drops the same elements.
    - RuntimeError in the backward if attributes of the module have changed since the forward:
      `training`, a dropout's `p`, also inside lists, sets, dictionaries, dataclasses and
      namespaces.
    - Other state is not checked: globals, objects of other classes, a counter that the forward
      itself changes.
    - ValueError if the module has buffers (the running statistics of a batch norm), which a second
      forward would update again.
    - TypeError if the module returns anything but a Tensor, or `rest` needs gradients.

    >>> layer = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    >>> x = ndl.ones(2, 4, requires_grad=True)
    >>> bool((nn.recompute(layer, x).numpy() == layer(x).numpy()).all())
    True
    """
    if not is_grad_enabled() or any(part._hooks is not None for _, part in module.named_modules()):
        return module(x, *rest)
    if any(isinstance(value, Tensor) and value.requires_grad for value in rest):
        raise TypeError("recompute: gradients flow through x alone, but another operand needs one")
    for name, _ in module.named_buffers():
        raise ValueError(
            f"recompute: {name} would be moved by each of two forwards: call this module as it is"
        )
    return Recomputed(module, rest)(x, *module.distinct_parameters())
