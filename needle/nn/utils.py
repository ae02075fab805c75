"""PyTorch's torch.nn.utils: gradients clipped in place."""

from __future__ import annotations

from collections.abc import Iterable

from needle import ops
from needle.autograd import Tensor
from needle.optim import clip_grad_norm


def _with_grad(parameters: Tensor | Iterable[Tensor]) -> list[Tensor]:
    listed = [parameters] if isinstance(parameters, Tensor) else parameters
    return [p for p in listed if p.grad is not None]


def clip_grad_norm_(parameters: Tensor | Iterable[Tensor], max_norm: float) -> Tensor:
    """optim.clip_grad_norm of one parameter or several; the norm before, as a Tensor.

    >>> w = nn.Parameter([1.0, 1.0])
    >>> (w * ndl.Tensor([3, 4])).sum().backward()
    >>> print(nn.utils.clip_grad_norm_([w], 1.0), w.grad.numpy().round(3))
    5.0 [0.6 0.8]
    """
    return Tensor(clip_grad_norm(_with_grad(parameters), max_norm), requires_grad=False)


def clip_grad_value_(parameters: Tensor | Iterable[Tensor], clip_value: float) -> None:
    """Limit each element of the gradients to [-clip_value, clip_value]."""
    for p in _with_grad(parameters):
        p.grad = ops.clip(p.grad, -clip_value, clip_value).detach()
