"""Layers that are computed again in the backward instead of keeping their activations (Chen et al.
2016, "Training Deep Nets with Sublinear Memory Cost").

    x = nn.recompute(layer, x, rotary, mask)      # as layer(x, rotary, mask)

The forward keeps x alone; the backward runs the layer once more, with the graph, and walks that.
Kernels give the same bits each time, so results and gradients are those without it, for the
time of a second forward.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from needle.autograd import (
    Accumulators,
    FusedOp,
    NDArray,
    Tensor,
    enable_grad,
    is_grad_enabled,
    no_grad,
)
from needle.autograd.tensor import grads_within
from needle.backend_ndarray import commit
from needle.nn.module import Module
from needle.ops.random import drawing, drawing_from

SETTINGS = ("training", "p")  # of modules: those that dropout reads


Place = tuple[dict[str, Any], str]  # of an attribute: those of its module, and its name


class Recomputed(FusedOp):
    """Op whose inputs are x, the Tensors at the places of computed weights, and the parameters of
    the module, so that their gradients flow."""

    reads_result = False

    def __init__(self, module: Module, rest: tuple[Any, ...], places: list[Place]) -> None:
        self.module, self.rest, self.places = module, rest, places
        # Those among the operands, whose changes the backward refuses.
        self.arrays = [x for one in rest for x in (one if isinstance(one, tuple) else (one,))]

    def compute(self, x: NDArray, *weights: NDArray) -> NDArray:
        parts = [vars(part) for _, part in self.module.named_modules()]
        self.settings = [(own, n, own[n]) for own in parts for n in SETTINGS if n in own]
        self.random = np.random.get_state()
        source = drawing.get()
        self.source = source and source.copy()
        with no_grad():
            out = self.module(Tensor.make_const(x), *self.rest)
        if not isinstance(out, Tensor):
            raise TypeError(
                f"recompute: {type(self.module).__name__} must give one Tensor, "
                f"not {type(out).__name__}"
            )
        return out.cached_data

    def backward(self, dout: NDArray, node: Tensor, into: Accumulators) -> list[NDArray | None]:
        count = 1 + len(self.places)
        leaves = [
            Tensor.make_const(one.cached_data, requires_grad=one.requires_grad)
            for one in node.inputs[:count]
        ]
        x, *computed = leaves
        changes = [*self.settings, *((*place, w) for place, w in zip(self.places, computed))]
        found, now = [(own, name, own[name]) for own, name, _ in changes], np.random.get_state()
        np.random.set_state(self.random)  # dropout drops the same
        try:
            commit(changes)
            with enable_grad(), drawing_from(self.source and self.source.copy()):
                out = self.module(x, *self.rest)
        finally:
            commit(found)
            np.random.set_state(now)
        wanted = *leaves, *node.inputs[count:]
        return grads_within(out, Tensor.from_ndarray(dout), wanted, into.buffers)


def _computed(module: Module) -> list[Place]:
    """Return the places of Tensors that were computed, and whose gradients flow on."""
    parts = [vars(part) for _, part in module.named_modules()]
    named = [(own, name, x) for own in parts for name, x in own.items() if isinstance(x, Tensor)]
    return [(own, name) for own, name, x in named if x.op is not None and x.requires_grad]


def recompute(module: Module, x: Tensor, *rest: Any) -> Tensor:
    """module(x, *rest), of which the backward computes everything again but x.

    - Gradients flow through the Tensor x alone. `rest` is passed to the module and must hold no
      Tensor that needs gradients. The module returns one Tensor.
    - This is a plain call if no graph is built, or if a function is hooked into the module, which
      would then run twice.
    - The second forward draws the same numbers of NumPy's global generator, with the `training` and
      the `p` of each part that the first had, so that dropout drops the same elements. Other
      attributes, generators and globals must be what they were; weights that were written to are
      refused, as in every backward.
    - ValueError if the module has buffers (the running statistics of a batch norm), which a second
      forward would update again.
    - TypeError if the module returns anything but a Tensor, or `rest` needs gradients; RuntimeError
      in the backward if the module reads another Tensor that needs them, as a closure could.

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
    places = _computed(module)
    computed = [own[name] for own, name in places]
    return Recomputed(module, rest, places)(x, *computed, *module.distinct_parameters())
