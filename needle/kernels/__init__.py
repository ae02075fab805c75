"""User kernels in CUDA: compiled from a text, checked, launched on needle's arrays.

    module = ndl.kernels.compile(source, entries=["scale<float>"])   # CompileError: the log
    kernel = module["scale<float>"]      # .signature .registers .shared_bytes .local_bytes
    kernel.check(grid, block)            # registers, shared memory, occupancy
    kernel(grid, block, x, y, 2.0)       # in needle's stream; in a Graph too

A fault inside a kernel is the end of the process, unless it runs in one of its own:

    with ndl.kernels.Pool() as pool:
        result = pool.run(source, "scale<float>", grid, block, [x, ndl.kernels.Out(x.shape), 2.0])

docs/kernels.md has both.

toolkit, compile    CUDA's tools; NVRTC; signature: a kernel's parameters
kernel, limits      a kernel on a device; what a launch may have
pool, process       jobs in processes of their own; worker: such a process
cases, timing       arguments, guard bands, comparison; times that no cache flatters
kernelbench         jobs in KernelBench's form; torch_worker: their processes
serve               the service over HTTP; __main__: `needle serve`
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

from needle._C import Device, cuda
from needle.kernels.cases import Case, InOut, Out, Random, Reference
from needle.kernels.compile import Compiled, CompileError, build
from needle.kernels.kernel import Kernel, Module, arch_of, load
from needle.kernels.kernelbench import KernelExecResult, Problem
from needle.kernels.limits import Entry, LaunchError, LaunchReport
from needle.kernels.pool import Pool, Result
from needle.kernels.timing import Timing

__all__ = [
    "Case",
    "Compiled",
    "CompileError",
    "Entry",
    "InOut",
    "Kernel",
    "KernelExecResult",
    "LaunchError",
    "LaunchReport",
    "Module",
    "Out",
    "Pool",
    "Problem",
    "Random",
    "Reference",
    "Result",
    "Timing",
    "build",
    "compile",
    "load",
]


@overload
def compile(
    source: str,
    entries: str | Sequence[str] = ...,
    device: None = ...,
    *,
    arch: str,
    options: Sequence[str] = ...,
) -> Compiled: ...
@overload
def compile(
    source: str,
    entries: str | Sequence[str] = ...,
    device: Device | None = ...,
    arch: str | None = ...,
    options: Sequence[str] = ...,
) -> Module: ...
def compile(
    source: str,
    entries: str | Sequence[str] = (),
    device: Device | None = None,
    arch: str | None = None,
    options: Sequence[str] = (),
) -> Module | Compiled:
    """Compile CUDA C++ and load it on a device, by default cuda().

    source: the text; entries: names of kernels as C++ spells them, needed for templates
    (`scale<__nv_bfloat16>`), none: every kernel that is no template; options: more for NVRTC, such
    as "-DTILE=64", "-I/my/headers". arch: "90a" instead of the device's own; an arch without a
    device needs no GPU: the kernels can be inspected and checked for that architecture, and are
    not loaded. CompileError has the compiler's log, with the lines of `source`.
    """
    if arch is not None and device is None:
        return build(source, entries, arch, options)
    device = cuda() if device is None else device
    return load(build(source, entries, arch or arch_of(device), options), device)
