"""CUDA kernels of one's own: compiled from a text, checked, launched on needle's arrays.

    module = ndl.kernels.compile(source, entries=["scale<float>"])   # CompileError: the log
    kernel = module["scale<float>"]      # .signature .registers .shared_bytes .local_bytes
    kernel.check(grid, block)            # occupancy, and what limits it
    kernel(grid, block, x, y, 2.0)       # in needle's stream; in a Graph too

A fault inside a kernel is the end of the process (docs/kernels.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

from needle._C import Device, cuda
from needle.kernels.compile import Compiled, CompileError, Entry, build
from needle.kernels.limits import LaunchError, LaunchReport
from needle.kernels.module import Kernel, Module, arch_of, load

__all__ = [
    "Compiled",
    "CompileError",
    "Entry",
    "Kernel",
    "LaunchError",
    "LaunchReport",
    "Module",
    "build",
    "compile",
    "load",
]


@overload
def compile(
    source: str,
    entries: str | Sequence[str] = ...,
    device: Device | None = ...,
    arch: None = ...,
    options: Sequence[str] = ...,
) -> Module: ...
@overload
def compile(
    source: str,
    entries: str | Sequence[str] = ...,
    *,
    device: Device,
    arch: str,
    options: Sequence[str] = ...,
) -> Module: ...
@overload
def compile(
    source: str,
    entries: str | Sequence[str] = ...,
    device: None = ...,
    *,
    arch: str,
    options: Sequence[str] = ...,
) -> Compiled: ...
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
    device asks for no GPU: the kernels can be looked at and checked for that architecture, and are
    not loaded. CompileError has the compiler's log, with the lines of `source`.
    """
    if arch is not None and device is None:
        return build(source, entries, arch, options)
    device = cuda() if device is None else device
    return load(build(source, entries, arch or arch_of(device), options), device)
