"""Cross-entropy over a vocabulary, fused: the softmax is never stored."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from needle import _C
from needle._C import NDArray
from needle.autograd import FusedOp, Tensor
from needle.ops.common import id_array


class CrossEntropy(FusedOp):
    """loss = mean over valid rows of lse - logits[target];  dlogits = (softmax - onehot) /
    count."""

    reads_result = False

    def __init__(self, targets: NDArray) -> None:
        self.targets = targets

    def compute(self, logits: NDArray) -> NDArray:
        _, self.lse, loss, self.count = _C.cross_entropy_fwd(logits, self.targets)
        return loss

    def backward(self, dout: NDArray, node: Tensor, sinks: Sequence[NDArray | None]) -> tuple:
        logits = node.inputs[0].cached_data
        return (_C.cross_entropy_bwd(logits, self.targets, self.lse, self.count, dout),)


def cross_entropy(logits: Tensor, targets: Any) -> Tensor:
    """The mean of -log softmax(logits)[target] over the rows, a float32 scalar.

    logits: (N, V), any float dtype; targets: N whole numbers below V, in any shape. A row whose
    target is negative is ignored; with no row left the loss is 0. A target of V or more raises
    ValueError while the targets are on the host (on CUDA the loss becomes NaN).

    >>> logits = ndl.Tensor(np.log([[0.5, 0.25, 0.25], [0.1, 0.1, 0.8]]))
    >>> round(ndl.ops.cross_entropy(logits, [0, -1]).item(), 4)  # -log 0.5; the second is ignored
    0.6931
    """
    if len(logits.shape) != 2:
        raise ValueError(f"cross_entropy: logits must be (N, V), but the shape is {logits.shape}")
    ids = id_array("cross_entropy", targets, logits.device, logits.shape[1], lowest=None)
    if ids.size != logits.shape[0]:
        raise ValueError(f"cross_entropy: {ids.size} targets for {logits.shape[0]} rows of logits")
    return CrossEntropy(ids)(logits)
