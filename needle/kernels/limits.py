"""Limits of a GPU, and the check of a launch against them, with both numbers and a remedy.

The limits of a named architecture are those of the CUDA programming guide (compute capabilities,
technical specifications); a device has its own. The number of resident blocks is
computed as by NVIDIA's `cuda_occupancy.h`: threads in warps of 32; registers by the warp in units
of 256, in four partitions; shared memory in units of 128 bytes, with what the system keeps of each
block; barriers; and blocks. So compiling and checking need no GPU.
"""

from __future__ import annotations

import contextlib
import operator
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from needle._C import CudaError, Device

Size = int | Sequence[int]  # of a grid, block or cluster: x, (x,), (x, y) or (x, y, z)

WARP = 32
BLOCK_THREADS, BLOCK_SIZES = 1024, (1024, 1024, 64)
GRID_SIZES = (2**31 - 1, 65535, 65535)
CLUSTER_BLOCKS = 8  # of every GPU that has clusters; more needs a promise that needle does not ask
CLUSTER_ARCH = 90
REGISTERS = 65536  # of a block, and of a multiprocessor
REGISTER_UNIT, PARTITIONS = 256, 4
KEPT_SHARED = 1024  # of each block, the system's own, from 8.0 on
OPEN_LOCAL = 1024  # bytes of local memory a thread that each context holds from the start


@dataclass(frozen=True)
class Arch:
    """A row of the guide's table; shared memory in KiB."""

    blocks: int  # resident on a multiprocessor
    threads: int
    shared: int  # of a multiprocessor
    block_shared: int  # of a block, opted in
    barriers: int  # of a multiprocessor, for each block that it can hold; 0: no limit


ARCHS = {
    75: Arch(16, 1024, 64, 64, 0),
    80: Arch(32, 2048, 164, 163, 0),
    86: Arch(16, 1536, 100, 99, 0),
    87: Arch(16, 1536, 164, 163, 0),
    88: Arch(16, 1536, 100, 99, 0),  # not in the guide: of cuda_occupancy.h, and as ptxas counts
    89: Arch(24, 1536, 100, 99, 0),
    90: Arch(32, 2048, 228, 227, 2),
    100: Arch(32, 2048, 228, 227, 2),
    103: Arch(32, 2048, 228, 227, 1),  # barriers of CUDA 13.5's cuda_occupancy.h; 13.0's had 2
    110: Arch(24, 1536, 228, 227, 1),
    120: Arch(24, 1536, 100, 99, 1),
    121: Arch(24, 1536, 100, 99, 1),
}


class LaunchError(CudaError):
    """A launch exceeds a limit of the kernel or the GPU. Nothing was launched, and the GPU is as it
    was."""


@dataclass(frozen=True)
class Resources:
    """Needs of a kernel. registers, local_bytes (stack and spilled registers): of a thread;
    shared_bytes (static), max_threads (__launch_bounds__), barriers: of a block; block, cluster:
    sizes that the source fixes."""

    name: str
    registers: int = 0
    shared_bytes: int = 0
    local_bytes: int = 0
    max_threads: int = BLOCK_THREADS
    block: tuple[int, int, int] | None = None
    cluster: tuple[int, int, int] | None = None
    barriers: int = 0


@dataclass(frozen=True)
class Limits:
    """Limits of one GPU, or of every GPU of an architecture: bytes, and numbers a multiprocessor
    (`sm_`) or a block. processors and free_bytes: None for an architecture."""

    where: str
    arch: int  # 90 for compute capability 9.0
    sm_threads: int
    sm_blocks: int
    sm_registers: int
    sm_shared: int
    block_registers: int
    block_shared: int
    kept_shared: int
    sm_barriers: int
    processors: int | None = None
    free_bytes: int | None = None


@dataclass(frozen=True)
class LaunchReport:
    """A launch that fits. blocks_per_sm: resident blocks of a multiprocessor, the least of
    `allowed`, the number by each resource; limiter: that resource; occupancy: resident threads, in
    warps, of all that it could hold; resident: blocks on the whole device, None without one.
    shared_bytes: of a block, static and dynamic; local_bytes and registers: of a thread."""

    kernel: str
    where: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    threads: int
    blocks_per_sm: int
    occupancy: float
    limiter: str
    allowed: dict[str, int]
    registers: int
    shared_bytes: int
    local_bytes: int
    cluster: tuple[int, int, int] | None = None
    cooperative: bool = False
    resident: int | None = None

    def __str__(self) -> str:
        by = ", ".join(f"{name} {count:,}" for name, count in self.allowed.items())
        whole = f", {self.resident:,} on the device" if self.resident is not None else ""
        more = f", cluster {self.cluster}" if self.cluster else ""
        more += ", cooperative" if self.cooperative else ""
        return (
            f"{self.kernel} on {self.where}: grid {self.grid}, block {self.block}{more}\n"
            f"  {self.blocks_per_sm} blocks a multiprocessor{whole}: occupancy "
            f"{self.occupancy:.0%}, limited by {self.limiter}\n"
            f"  blocks by {by}\n"
            f"  {self.registers} registers and {self.local_bytes:,} bytes of local memory a "
            f"thread, {self.shared_bytes:,} bytes of shared memory a block"
        )


# ---- where the limits come from ------------------------------------------------------------------


def parse_arch(arch: str | int) -> str:
    """ "sm_90a", "9.0", 90 -> "90a", "90", "90": how NVRTC names it after `sm_`. ValueError;
    TypeError for a float, where 90.0 could be 9.0."""
    if not isinstance(arch, str) and not hasattr(arch, "__index__"):
        raise TypeError(f'arch: must be a text such as "90a" or a number such as 90, not {arch!r}')
    match = re.fullmatch(r"(?:sm_|compute_)?(\d{1,2})\.?(\d)([af]?)", str(arch).strip().lower())
    if not match:
        raise ValueError(f'arch: {arch!r} is no architecture; write e.g. "90a" or "8.6"')
    return "".join(match.groups())


def of_arch(arch: str | int) -> Limits:
    """Return those of every GPU of an architecture. ValueError for one that the table lacks."""
    name = parse_arch(arch)
    number = int(name.rstrip("af"))
    if number not in ARCHS:
        known = ", ".join(map(str, ARCHS))
        raise ValueError(f"arch: the limits of sm_{name} are not known here, those of {known} are")
    row = ARCHS[number]
    return Limits(
        where=f"sm_{name}",
        arch=number,
        sm_threads=row.threads,
        sm_blocks=row.blocks,
        sm_registers=REGISTERS,
        sm_shared=row.shared * 1024,
        block_registers=REGISTERS,
        block_shared=row.block_shared * 1024,
        kept_shared=KEPT_SHARED if number >= 80 else 0,
        sm_barriers=row.barriers * row.blocks,
    )


def of_device(device: Device) -> Limits:
    """Return those of a device, which is opened. ValueError if it runs no user kernels."""
    facts: dict[str, Any] = device.limits()
    row = ARCHS.get(facts["arch"])
    return Limits(
        where=str(device), sm_barriers=facts["sm_blocks"] * (row.barriers if row else 2), **facts
    )


# ---- the check -----------------------------------------------------------------------------------


def whole_numbers(what: str, size: Size) -> tuple[int, ...]:
    """Return a size as Python's numbers. TypeError."""
    with contextlib.suppress(TypeError):  # an array of NumPy's has __index__, and refuses
        return (operator.index(size),)  # type: ignore[arg-type]
    with contextlib.suppress(TypeError):
        return tuple(map(operator.index, size))  # type: ignore[arg-type]
    raise TypeError(f"{what}: must be a whole number or a tuple of up to three, not {size!r}")


def triple(what: str, size: Size, most: Sequence[int], remedy: str) -> tuple[int, int, int]:
    """Return a size as three numbers, each from 1 to its limit. LaunchError, TypeError or
    ValueError."""
    sizes = whole_numbers(what, size)
    if not 1 <= len(sizes) <= 3:
        raise ValueError(f"{what}: {len(sizes)} sizes; there are x, y and z")
    sizes += (1,) * (3 - len(sizes))
    for axis, n, limit in zip("xyz", sizes, most):
        if n < 1:
            raise LaunchError(f"{what}.{axis} is {n:,}, and must be 1 or more")
        if n > limit:
            raise LaunchError(f"{what}.{axis} is {n:,}, and at most {limit:,} are allowed{remedy}")
    return sizes[0], sizes[1], sizes[2]


def check(
    kernel: Resources,
    limits: Limits,
    grid: Size,
    block: Size,
    shared: int = 0,
    cluster: Size | None = None,
    cooperative: bool = False,
    held_local: int = OPEN_LOCAL,
) -> LaunchReport:
    """Check a launch. shared: bytes of dynamic shared memory a block; held_local: bytes of local
    memory a thread that the context holds already. LaunchError names the limit, with both numbers
    and the remedy; TypeError and ValueError a wrong size."""
    try:
        grid = triple("grid", grid, GRID_SIZES, "; put the largest number into x")
        block = triple("block", block, BLOCK_SIZES, "; use smaller blocks and more of them")
        threads = block[0] * block[1] * block[2]
        _check_threads(kernel, limits, block, threads)
        shared_bytes = _check_shared(kernel, limits, shared)
        cluster = _check_cluster(kernel, limits, grid, cluster)
        allowed = _blocks(kernel, limits, threads, shared_bytes)
        limiter = min(allowed, key=lambda name: allowed[name])
        fits = allowed[limiter]
        resident = fits * limits.processors if limits.processors is not None else None
        if cooperative:
            _check_cooperative(limits, grid, fits, resident)
        _check_local(kernel, limits, held_local)
    except (LaunchError, TypeError, ValueError) as error:
        raise type(error)(f"{kernel.name}: {error}") from None
    return LaunchReport(
        kernel=kernel.name,
        where=limits.where,
        grid=grid,
        block=block,
        threads=threads,
        blocks_per_sm=fits,
        occupancy=fits * _up(threads, WARP) / limits.sm_threads,
        limiter=limiter,
        allowed=allowed,
        registers=kernel.registers,
        shared_bytes=shared_bytes,
        local_bytes=kernel.local_bytes,
        cluster=cluster,
        cooperative=bool(cooperative),
        resident=resident,
    )


def _up(number: int, unit: int) -> int:
    return -(-number // unit) * unit


def _blocks(kernel: Resources, limits: Limits, threads: int, shared_bytes: int) -> dict[str, int]:
    """Return the resident blocks of a multiprocessor by resource, for a block that fits."""
    warps = _up(threads, WARP) // WARP
    allowed = {"threads": limits.sm_threads // WARP // warps}
    if kernel.registers:
        partition = limits.sm_registers // PARTITIONS // _warp_registers(kernel)
        allowed["registers"] = partition * PARTITIONS // warps
    unit = 128 if limits.arch >= 80 else 256
    taken = _up(shared_bytes + limits.kept_shared, unit)
    if taken:
        allowed["shared memory"] = limits.sm_shared // taken
    if kernel.barriers and limits.sm_barriers:
        allowed["barriers"] = limits.sm_barriers // kernel.barriers
    allowed["blocks"] = limits.sm_blocks
    return allowed


def _warp_registers(kernel: Resources) -> int:
    return _up(kernel.registers * WARP, REGISTER_UNIT)


def _check_threads(
    kernel: Resources, limits: Limits, block: tuple[int, int, int], threads: int
) -> None:
    if threads > BLOCK_THREADS:
        raise LaunchError(
            f"block {block} has {threads:,} threads, and {limits.where} allows {BLOCK_THREADS:,} a "
            "block; use smaller blocks and more of them"
        )
    if kernel.block is not None and block != kernel.block:
        raise LaunchError(
            f"block is {block}, and the source fixes it at {kernel.block} (__block_size__)"
        )
    if threads > kernel.max_threads:
        raise LaunchError(
            f"block {block} has {threads:,} threads, and the source promises at most "
            f"{kernel.max_threads:,} (__launch_bounds__); use smaller blocks, or raise the promise"
        )
    # All four partitions get the same number of registers: warps count in fours.
    a_warp = _warp_registers(kernel)
    needed = a_warp * _up(_up(threads, WARP) // WARP, PARTITIONS)
    if needed > limits.block_registers:
        most = limits.block_registers // a_warp // PARTITIONS * PARTITIONS * WARP
        raise LaunchError(
            f"block {block} of {threads:,} threads needs {needed:,} registers "
            f"({kernel.registers} a thread), and {limits.where} has {limits.block_registers:,} a "
            f"block; use at most {most:,} threads, or compile with "
            f"__launch_bounds__({_up(threads, WARP)})"
        )


def _check_shared(kernel: Resources, limits: Limits, shared: int) -> int:
    try:
        shared = operator.index(shared)
    except TypeError:
        raise TypeError(f"shared: must be a whole number of bytes, not {shared!r}") from None
    whole = kernel.shared_bytes + shared
    if shared < 0:
        raise LaunchError(f"shared is {shared:,} bytes, and must be 0 or more")
    if whole > limits.block_shared:
        raise LaunchError(
            f"{whole:,} bytes of shared memory a block ({kernel.shared_bytes:,} static, {shared:,} "
            f"dynamic), and {limits.where} has {limits.block_shared:,}; use smaller tiles or types"
        )
    return whole


def _check_cluster(
    kernel: Resources, limits: Limits, grid: tuple[int, int, int], cluster: Size | None
) -> tuple[int, int, int] | None:
    if cluster is None and kernel.cluster is None:
        return None
    shape = kernel.cluster if cluster is None else triple("cluster", cluster, GRID_SIZES, "")
    assert shape is not None
    if kernel.cluster is not None and shape != kernel.cluster:
        raise LaunchError(
            f"cluster is {shape}, and the source fixes it at {kernel.cluster} (__cluster_dims__)"
        )
    if limits.arch < CLUSTER_ARCH and shape != (1, 1, 1):
        raise LaunchError(
            f"cluster {shape} needs compute capability 9.0, and {limits.where} has "
            f"{limits.arch / 10:.1f}; launch without clusters"
        )
    blocks = shape[0] * shape[1] * shape[2]
    if blocks > CLUSTER_BLOCKS:
        raise LaunchError(
            f"cluster {shape} has {blocks:,} blocks, and at most {CLUSTER_BLOCKS} are allowed; use "
            "smaller clusters"
        )
    for axis, whole, part in zip("xyz", grid, shape):
        if whole % part:
            raise LaunchError(
                f"grid.{axis} is {whole:,}, which is no multiple of cluster.{axis} = {part}; round "
                "it up, and let the blocks beyond the end do nothing"
            )
    return shape


def _check_cooperative(
    limits: Limits, grid: tuple[int, int, int], fits: int, resident: int | None
) -> None:
    blocks = grid[0] * grid[1] * grid[2]
    if resident is not None and blocks > resident:
        raise LaunchError(
            f"a cooperative grid of {blocks:,} blocks, and {limits.where} holds {resident:,} at "
            f"once ({fits} on each of {limits.processors} multiprocessors), and all must run; use "
            "at most that many, each in a loop over its share"
        )


def _check_local(kernel: Resources, limits: Limits, held_local: int) -> None:
    """The driver keeps local memory for every thread that can be resident, for any grid."""
    if limits.processors is None or limits.free_bytes is None:
        return
    threads = limits.processors * limits.sm_threads
    needed, free = threads * kernel.local_bytes, limits.free_bytes + threads * held_local
    if needed > free:
        raise LaunchError(
            f"{kernel.local_bytes:,} bytes of local memory a thread, {needed / 2**30:.2f} GiB for "
            f"the {threads:,} threads that {limits.where} can hold, and {free / 2**30:.2f} GiB are "
            "free; make arrays in the kernel smaller, or free memory (device.empty_cache())"
        )
