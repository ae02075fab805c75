"""Products in FP8 (csrc/fp8.h): operands in e4m3, gradients in e5m2, each array times one power of
two."""

from __future__ import annotations

from needle import _C
from needle._C import NDArray

MULTIPLE = 16  # of the sizes of products on CUDA
DEEPEST = 1024  # the depth that cuda/linear_fp8_hopper.cuh has room for


def whole_sizes(*sizes: int) -> bool:
    """True if products of these sizes take FP8."""
    return all(size > 0 and size % MULTIPLE == 0 for size in sizes)


class Quantized:
    """Rows x (N, C) in e4m3: x is `scale` times `rows`, rounded; `columns` is their transpose."""

    def __init__(self, x: NDArray) -> None:
        nothing = (None, 0, None, None, None, 0.0, None)
        self.rows, self.columns, self.scale = _C.fp8_quantize(x, 0, *nothing)
