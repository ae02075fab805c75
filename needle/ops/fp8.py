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


def quantized(x: NDArray) -> tuple[NDArray, NDArray, NDArray]:
    """Return x (N, C) in e4m3, its transpose, and the scale: x is that times the first, rounded."""
    nothing = (None, 0, None, None, None, 0.0, None)
    return _C.fp8_quantize(x, 0, *nothing)
