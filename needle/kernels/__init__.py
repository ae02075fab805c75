"""CUDA kernels of one's own: compiled from a text, checked, launched on needle's arrays.

    module = ndl.kernels.compile(source, entries=["scale<float>"])   # CompileError: the log
    kernel = module["scale<float>"]      # .signature .registers .shared_bytes .local_bytes
    kernel(grid, block, x, y, 2.0)       # in needle's stream; in a Graph too

A mistake in a kernel is a fault of the whole process (docs/kernels.md).
"""

from needle.kernels.compile import Compiled, CompileError, Entry, build
from needle.kernels.limits import LaunchError, LaunchReport

__all__ = ["Compiled", "CompileError", "Entry", "LaunchError", "LaunchReport", "build"]
