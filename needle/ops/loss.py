"""Losses: of each element, composed of ops; cross-entropy over a vocabulary, fused: the softmax is
never stored."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from needle import _C
from needle._C import NDArray
from needle.autograd import Accumulators, FusedOp, Tensor, is_grad_enabled
from needle.backend_ndarray import full
from needle.ops.broadcast import as_floats, astype, differentiable, reshape, summation
from needle.ops.common import check_tensors, id_array, rows_of
from needle.ops.elementwise import clip, exp, log, log1p, softplus, where
from needle.ops.fp8 import DEEPEST, quantized, whole_sizes
from needle.ops.indexing import gather
from needle.ops.matmul import weight_grad
from needle.ops.reduce import logsoftmax, mean


def _reduced(op: str, loss: Tensor, reduction: str) -> Tensor:
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"{op}: reduction must be 'mean', 'sum' or 'none', not {reduction!r}")
    return {"mean": mean, "sum": summation, "none": lambda x: x}[reduction](loss)


def _same(op: str, input: Tensor, target: Any) -> tuple[Tensor, Tensor]:
    """Both as Tensors of floats. ValueError where their shapes differ: broadcasting hides
    mistakes."""
    check_tensors(op, input=input)
    target = input._operand(target)
    if target.shape != input.shape:
        raise ValueError(f"{op}: target is {target.shape}, but input {input.shape}")
    return as_floats(input), as_floats(target)


def mse_loss(input: Tensor, target: Any, reduction: str = "mean") -> Tensor:
    """(input - target)^2; reduction: "mean", "sum" or "none".

    >>> print(ndl.ops.mse_loss(ndl.Tensor([1, 2]), [1, 4]))
    2.0
    """
    input, target = _same("mse_loss", input, target)
    off = input - target
    return _reduced("mse_loss", off * off, reduction)


def l1_loss(input: Tensor, target: Any, reduction: str = "mean") -> Tensor:
    """|input - target|; reduction as in mse_loss."""
    input, target = _same("l1_loss", input, target)
    return _reduced("l1_loss", abs(input - target), reduction)


@differentiable(
    "BinaryCrossEntropy",
    lambda g, x, y: g * (x - y) / clip(x * (1 - x), 1e-12),  # the divisor as in PyTorch
    lambda g, x: g * (clip(log1p(-x), -100.0) - clip(log(x), -100.0)),
)
def _binary_cross_entropy(p: NDArray, t: NDArray) -> NDArray:
    """The loss of each element."""
    hit = _C.maximum(_C.log(p), -100.0)
    miss = _C.maximum(_C.log1p(_C.negate(p)), -100.0)
    return _C.subtract(_C.multiply(_C.subtract(t, 1.0), miss), _C.multiply(t, hit))


def binary_cross_entropy(input: Tensor, target: Any, reduction: str = "mean") -> Tensor:
    """-(t log p + (1 - t) log(1 - p)) of probabilities p = `input` and t = `target` in [0, 1];
    logarithms are at least -100, as in PyTorch. reduction as in mse_loss."""
    p, t = _same("binary_cross_entropy", input, target)
    loss = _binary_cross_entropy(astype(p, "float32"), astype(t, "float32"))
    return astype(_reduced("binary_cross_entropy", loss, reduction), p.dtype)


def binary_cross_entropy_with_logits(input: Tensor, target: Any, reduction: str = "mean") -> Tensor:
    """binary_cross_entropy(sigmoid(input), target), without overflow: softplus(x) - x t.

    >>> print(ndl.ops.binary_cross_entropy_with_logits(ndl.Tensor([1e4, -1e4]), [1, 0]))
    0.0
    """
    x, t = _same("binary_cross_entropy_with_logits", input, target)
    return _reduced("binary_cross_entropy_with_logits", softplus(x) - x * t, reduction)


def kl_div(input: Tensor, target: Any, reduction: str = "mean", log_target: bool = False) -> Tensor:
    """t (log t - input) of log-probabilities `input` and probabilities t = `target`, or exp(target)
    with `log_target`; 0 where t is 0. reduction as in mse_loss; "batchmean" divides the sum by the
    size of the first axis, as the divergence of Kullback and Leibler has it."""
    input, target = _same("kl_div", input, target)
    if log_target:
        loss = exp(target) * (target - input)
    else:
        empty = _C.equal(target.cached_data, 0)
        t_log_t = target * log(target + Tensor.from_ndarray(empty))
        loss = t_log_t - target * where(empty, 0.0, input)
    if reduction == "batchmean":
        return summation(loss) / (input.shape[0] if input.ndim else 1)
    return _reduced("kl_div", loss, reduction)


class CrossEntropy(FusedOp):
    """loss = mean over valid rows of lse - logits[target];  dlogits = (softmax - onehot) dloss
    divided by their number."""

    reads_result = False

    def __init__(self, targets: NDArray) -> None:
        self.targets = targets

    def compute(self, logits: NDArray) -> NDArray:
        return _C.cross_entropy_fwd(logits, self.targets)[1]

    def backward(self, dout: NDArray, node: Tensor, into: Accumulators) -> tuple:
        logits = node.operands[0]
        dlogits = logits.copy() if logits.dtype == "float32" else logits.astype("float32")
        _, _, share = _C.cross_entropy_fwd_bwd(dlogits, self.targets)
        dlogits *= share * dout
        return (dlogits.astype(logits.dtype),)  # rounded once


def _target_ids(op: str, targets: Any, rows: int, vocabulary: int, device: _C.Device) -> NDArray:
    ids = id_array(op, targets, device, vocabulary, lowest=None, name="targets")
    if ids.size != rows:
        raise ValueError(f"{op}: {ids.size} targets for {rows} rows of logits")
    return ids


def cross_entropy(
    logits: Tensor, targets: Any, reduction: str = "mean", ignore_index: int = -100
) -> Tensor:
    """The mean of -log softmax(logits)[target] over the rows, a float32 scalar; with reduction
    "sum" their sum, with "none" one a row, 0 for a row that is ignored.

    logits: (N, V), any float dtype; targets: N whole numbers below V, in any shape. A row whose
    target is negative or `ignore_index` is ignored; with no row left the loss is 0. A target of V
    or more raises ValueError while the targets are on the host (on CUDA the loss becomes NaN).

    >>> logits = ndl.Tensor(np.log([[0.5, 0.25, 0.25], [0.1, 0.1, 0.8]]))
    >>> round(ndl.ops.cross_entropy(logits, [0, -1]).item(), 4)  # -log 0.5; the second is ignored
    0.6931
    """
    check_tensors("cross_entropy", logits=logits)
    if len(logits.shape) != 2:
        raise ValueError(f"cross_entropy: logits must be (N, V), but the shape is {logits.shape}")
    if ignore_index >= 0:
        targets = np.asarray(targets)
        targets = np.where(targets == ignore_index, -1, targets)
    ids = _target_ids("cross_entropy", targets, *logits.shape, logits.device)
    if reduction == "mean":
        return CrossEntropy(ids)(logits)
    column = _C.maximum(ids, 0).reshape((ids.size, 1))
    found = reshape(gather(logsoftmax(astype(logits, "float32")), 1, column), (ids.size,))
    return _reduced("cross_entropy", -where(_C.greater_equal(ids, 0), found, 0.0), reduction)


class LinearCrossEntropy(FusedOp):
    """Compute logits = x w and their cross-entropy. Their gradient replaces the logits and is kept
    for both products of the backward, which apply the factor dloss / count.

    More than ROWS rows are computed in runs, so that the logits of one run alone are in memory. The
    forward then adds up the gradients of x and w in float32, run by run, and the backward
    multiplies them by the factor. needs: if x and w need a gradient."""

    reads_result = False
    ROWS = 1 << 15  # enough for products at their full speed: 3 GiB of bfloat16 at Pythia's V

    def __init__(self, targets: NDArray, transposed: bool, needs: tuple[bool, bool]) -> None:
        self.targets, self.transposed, self.needs = targets, transposed, needs
        self.dlogits: NDArray | None = None
        self.dlogits_t: NDArray | None = None  # the transpose, in FP8 alone

    def _oriented(self, w: NDArray) -> NDArray:
        return w.permute((1, 0)) if self.transposed else w

    def compute(self, x: NDArray, w: NDArray) -> NDArray:
        rows = rows_of(x)
        if rows.shape[0] > self.ROWS:
            return self._in_runs(rows, w)
        if not is_grad_enabled():
            return self._losses_alone(rows, w, self.targets)[1]
        _, loss, self.share = self._losses(rows, w, self.targets)
        return loss

    def _losses_alone(self, x: NDArray, w: NDArray, targets: NDArray) -> tuple:
        return _C.cross_entropy_fwd(x @ self._oriented(w), targets)

    def _losses(self, x: NDArray, w: NDArray, targets: NDArray) -> tuple:
        """Return losses, loss and share of these rows, and keep the gradient of their logits."""
        self.dlogits = x @ self._oriented(w)
        return _C.cross_entropy_fwd_bwd(self.dlogits, targets)

    def _input_grad(self, x: NDArray, w: NDArray, scale: NDArray) -> NDArray:
        return _C.matmul(self.dlogits, self._oriented(w).permute((1, 0)), scale)

    def _input_grad_into(self, dx: NDArray, w: NDArray) -> None:
        w_t, dlogits = self._oriented(w).permute((1, 0)), self.dlogits
        dlogits, w_t, dx = (a.reshape((1, *a.shape)) for a in (dlogits, w_t, dx))
        _C.matmul_acc(dlogits, w_t, None, 0, dx)

    def _weight_grad(
        self, x: NDArray, into: tuple[NDArray, int], scale: NDArray | None = None
    ) -> None:
        factors = (self.dlogits, x) if self.transposed else (x, self.dlogits)
        weight_grad(*factors, into, scale)

    def _in_runs(self, x: NDArray, w: NDArray) -> NDArray:
        count = x.shape[0]
        losses = _C.empty((count,), "float32", x.device)
        needs = self.needs if is_grad_enabled() else (False, False)
        self.dx, self.dw = (
            _C.empty(of.shape, "float32", x.device) if need else None
            for of, need in zip((x, w), needs)
        )
        of_run = self._losses if any(needs) else self._losses_alone
        for start in range(0, count, self.ROWS):
            run = slice(start, min(start + self.ROWS, count))
            losses[run] = of_run(x[run], w, self.targets[run])[0]
            if self.dx is not None:
                self._input_grad_into(self.dx[run], w)
            if self.dw is not None:
                self._weight_grad(x[run], (self.dw, start > 0))
            self.dlogits = self.dlogits_t = None  # their memory is the next run's
        valid = (self.targets >= 0).astype("float32").sum()
        self.share = 1.0 / _C.maximum(valid, 1.0)
        return losses.sum() * self.share

    def backward(self, dout: NDArray, node: Tensor, into: Accumulators) -> list[NDArray | None]:
        x, w = node.inputs
        scale = _C.multiply(dout, self.share)
        dx = None
        if self.dlogits is None:
            if x.requires_grad:
                dx = (self.dx * scale).astype(x.dtype).reshape(x.shape)
            if w.requires_grad:
                place, add = into.with_add(1)
                dw = self.dw * scale
                if add:
                    place += dw
                else:
                    _C.assign(place, dw)
            return [dx, None]
        rows = rows_of(x.cached_data)
        if x.requires_grad:
            dx = self._input_grad(rows, w.cached_data, scale).reshape(x.shape)
        if w.requires_grad:
            self._weight_grad(rows, into.with_add(1), scale)
        return [dx, None]


class LinearCrossEntropyFP8(LinearCrossEntropy):
    """Compute LinearCrossEntropy with products in FP8, for sizes that serves() accepts.

    x and w are rounded to e4m3, the gradient of the logits to e5m2, each with a power of two as its
    scale. The scales of w and of each run of x follow from the largest element. That of the
    gradient, whose elements are from -1 to 1, is constant (D_SCALE)."""

    WIDEST = DEEPEST
    D_SCALE = 2.0**-15

    @classmethod
    def serves(cls, c: int, *sizes: int) -> bool:
        """True if products of rows of c elements take FP8. sizes: V, and the number of rows."""
        return whole_sizes(c, *sizes) and c <= cls.WIDEST

    def compute(self, x: NDArray, w: NDArray) -> NDArray:
        *ways, self.w_scale = quantized(w)
        self.w_rows, self.w_columns = ways if self.transposed else reversed(ways)
        return super().compute(x, w)

    def _losses(self, x: NDArray, w: NDArray, targets: NDArray) -> tuple:
        rows, self.x_t, self.x_scale = quantized(x)
        scale = _C.multiply(self.x_scale, self.w_scale)
        *found, self.dlogits, self.dlogits_t = _C.fp8_cross_entropy(
            rows, self.w_rows, scale, targets
        )
        return tuple(found)

    def _input_grad(self, x: NDArray, w: NDArray, scale: NDArray | None = None) -> NDArray:
        dx = _C.empty(x.shape, x.dtype, x.device)
        self._input_grad_into(dx, w, scale)
        return dx

    def _input_grad_into(self, dx: NDArray, w: NDArray, scale: NDArray | None = None) -> None:
        d = (self.dlogits, 1, self._d_scale(dx, scale))
        _C.fp8_matmul(*d, self.w_columns, 0, self.w_scale, None, None, 0, dx)

    def _weight_grad(
        self, x: NDArray, into: tuple[NDArray, int], scale: NDArray | None = None
    ) -> None:
        dw, add = into
        factors = [(self.x_t, 0, self.x_scale), (self.dlogits_t, 1, self._d_scale(x, scale))]
        a, b = reversed(factors) if self.transposed else factors
        _C.fp8_matmul(*a, *b, None, None, add, dw)

    def _d_scale(self, like: NDArray, scale: NDArray | None) -> NDArray:
        if scale is None:
            return full((), self.D_SCALE, "float32", like.device)
        return _C.multiply(scale, self.D_SCALE)


def linear_cross_entropy(
    x: Tensor, w: Tensor, targets: Any, transposed: bool = False, fp8: bool = False
) -> Tensor:
    """cross_entropy(x @ w, targets), for which the logits are stored once, at most 32,768 rows of
    them, and each is read and written once between the products.

    x: (..., C); w: (C, V), or (V, C) with `transposed`, as an embedding lies; targets: a whole
    number below V for each row of x, as in cross_entropy. The gradient of w is float32 in every
    dtype.

    fp8: compute the products in FP8 where a gradient is wanted, and C, V and the number of rows are
    multiples of 16, C at most 1,024: x and w in e4m3, the gradient of the logits in e5m2, each
    times a power of two; no logits are stored. For other calls it has no effect. On a GPU: compute
    capability 9.0 (Hopper).

    >>> x, w = ndl.randn(2, 4), ndl.randn(4, 3)
    >>> both = ndl.ops.linear_cross_entropy(x, w, [0, 2]), ndl.ops.cross_entropy(x @ w, [0, 2])
    >>> abs(both[0].item() - both[1].item()) < 1e-6
    True
    """
    check_tensors("linear_cross_entropy", x=x, w=w)
    transposed = bool(transposed)
    if w.ndim != 2:
        raise ValueError(f"linear_cross_entropy: w must have two axes, but is {w.shape}")
    rows, v = math.prod(x.shape[:-1]), w.shape[not transposed]
    ids = _target_ids("linear_cross_entropy", targets, rows, v, x.device)
    needs = x.requires_grad, w.requires_grad
    op = LinearCrossEntropy
    if fp8 and is_grad_enabled() and any(needs):
        if LinearCrossEntropyFP8.serves(x.shape[-1], v, rows):
            op = LinearCrossEntropyFP8
    return op(ids, transposed, needs)(x, w)
