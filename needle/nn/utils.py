"""The norm of gradients and their clipping, under needle's names and those of torch.nn.utils."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from needle import _C, ops
from needle._C import NDArray
from needle.autograd import Tensor
from needle.nn.flat import FlatParameters

NORM_CHUNK = 16384  # elements of a flat gradient whose norm is one part of the whole
NORM_ROW = 1024  # of these; as long as a row may be that one warp adds up (cuda/reduce.cu)


def grad_norm(flat: FlatParameters, max_norm: float = 0.0) -> tuple[NDArray, NDArray]:
    """(norm, scale) of all gradients together, float32 scalars on the device, without waiting.

    scale = min(1, max_norm / (norm + 1e-6)), or 1 when max_norm is 0: what AdamW.step takes. A norm
    from 1.8e19 on, whose square is beyond float32, counts as inf, for which the scale is NaN.

    >>> flat = nn.flatten_parameters(nn.Linear(3, 2))
    >>> flat.grad.fill(2)  # the gaps between parameters count as well: they are 0 after backward()
    >>> norm, scale = optim.grad_norm(flat, max_norm=1.0)
    >>> round(norm.item(), 3), round(scale.item(), 3)
    (22.627, 0.044)
    """
    grad = flat.grad
    norms = _C.empty((-(-grad.size // NORM_CHUNK),), "float32", grad.device)
    chunk_norms(grad, norms)
    return _C.grad_norm(norms, max_norm)


def chunk_norms(grad: NDArray, norms: NDArray) -> None:
    """Write the norms of each NORM_CHUNK elements of a flat gradient, and of the rest at its end,
    into `norms`. The norm of all is made of these, on any number of ranks.

    Sums take two steps: a GPU adds longer rows in an order that depends on their number, and then
    bits would depend on the number of ranks."""
    rows = grad.size // NORM_CHUNK
    end = rows * NORM_CHUNK
    if rows:
        squares = _C.sumsq(grad[:end].reshape((end // NORM_ROW, NORM_ROW)), 1)
        squares = _C.sum(squares.reshape((rows, NORM_CHUNK // NORM_ROW)), 1)
        _C.assign(norms[:rows], _C.sqrt(squares))
    if end < grad.size:
        _C.assign(norms[rows:], _C.grad_norm(grad[end:], 0.0)[0].reshape((1,)))


def clip_grad_norm(params: FlatParameters | Sequence[Tensor], max_norm: float) -> float:
    """Scale the gradients down so that their norm together is max_norm at most; returns the norm
    before. It waits for the device; `grad_norm` does not.

    >>> w = nn.Parameter([1.0, 1.0])
    >>> (w * ndl.Tensor([3, 4])).sum().backward()
    >>> optim.clip_grad_norm([w], 1.0)
    5.0
    >>> print(w.grad.numpy().round(3))
    [0.6 0.8]
    """
    if max_norm <= 0:
        raise ValueError(f"clip_grad_norm: max_norm must be above 0, but is {max_norm}")
    flat = isinstance(params, FlatParameters)
    with_grad = [] if flat else _with_grad(params)
    grads = [params.grad] if flat else [p.grad.cached_data for p in with_grad]
    total = math.hypot(*map(_norm, grads))
    factor = max_norm / (total + 1e-6)
    if factor >= 1:
        return total
    clipped = [_C.multiply(g, factor) for g in grads]  # NaN too: the gradients shall show it
    if flat:
        _C.assign(params.grad, clipped[0])
    for p, grad in zip(with_grad, clipped):
        p.grad = Tensor.from_ndarray(grad)
    return total


def _norm(grad: NDArray) -> float:
    """The 2-norm of an array, also where squares are beyond float32."""
    wide = grad.astype("float32")
    square, top = _C.sumsq(wide, wide.ndim).item(), 1.0
    if math.isinf(square):
        top = min(_C.absolute(wide).max().item(), 2.0**127)  # of inf the norm is inf
        square = _C.sumsq(wide / top, wide.ndim).item()
    return math.sqrt(square) * top


def _with_grad(parameters: Tensor | Iterable[Tensor]) -> list[Tensor]:
    listed = [parameters] if isinstance(parameters, Tensor) else parameters
    return [p for p in listed if p.grad is not None]


def clip_grad_norm_(parameters: Tensor | Iterable[Tensor], max_norm: float) -> Tensor:
    """clip_grad_norm of one parameter or several; the norm before, as a Tensor.

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
