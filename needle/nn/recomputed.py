"""Layers that are computed again in the backward instead of keeping what they computed (Chen et al.
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
    FusedOp,
    NDArray,
    Sinks,
    Tensor,
    compute_gradient_of_variables,
    enable_grad,
    is_grad_enabled,
    no_grad,
)
from needle.nn.module import Module


class Recomputed(FusedOp):
    """Of x and the parameters of the module, which are inputs so that their gradients flow."""

    reads_result = False

    def __init__(self, module: Module, rest: tuple[Any, ...]) -> None:
        self.module, self.rest = module, rest

    def compute(self, x: NDArray, *parameters: NDArray) -> NDArray:
        self.random = np.random.get_state()
        with no_grad():
            out = self.module(Tensor.make_const(x), *self.rest)
        if not isinstance(out, Tensor):
            raise TypeError(
                f"recompute: {type(self.module).__name__} must give one Tensor, "
                f"not {type(out).__name__}"
            )
        return out.cached_data

    def backward(self, dout: NDArray, node: Tensor, sinks: Sinks) -> list[NDArray | None]:
        first, *parameters = node.inputs
        x = Tensor.make_const(first.cached_data, requires_grad=first.requires_grad)
        now = np.random.get_state()
        np.random.set_state(self.random)  # dropout drops the same
        try:
            with enable_grad():
                out = self.module(x, *self.rest)
        finally:
            np.random.set_state(now)
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

    x: the Tensor that gradients flow through; `rest` is handed on and must hold none that needs
    gradients. The module gives one Tensor. Where no graph is built, or a function is hooked into
    the module, which would then run twice, this is a plain call.
    TypeError for other results and for such a `rest`; ValueError where the module has buffers (the
    running statistics of a batch norm), which a second forward would move again.

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
