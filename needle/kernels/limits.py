"""The check of a launch against the kernel and its GPU, with both numbers and a remedy.

Registers and shared memory of a kernel come from ptxas' report, so the check needs no GPU. On one
the limits are the device's own, and resident blocks are counted by the driver.
"""

from __future__ import annotations

import contextlib
import math
import operator
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from needle._C import CudaError
from needle.kernels.signature import Signature

Size = int | Sequence[int]  # of a grid, block or cluster: x, (x,), (x, y) or (x, y, z)

WARP = 32
BLOCK_THREADS, BLOCK_SIZES = 1024, (1024, 1024, 64)
GRID_SIZES = (2**31 - 1, 65535, 65535)
CLUSTER_BLOCKS = 8  # of every GPU that has clusters; more needs a promise that needle does not ask
CLUSTER_ARCH = 90
OPEN_LOCAL = 1024  # bytes of local memory a thread that each context holds from the start
REGISTER_UNIT, PARTITIONS = 256, 4  # registers of a warp; warps in fours


class LaunchError(CudaError):
    """A launch exceeds a limit of the kernel or the GPU. Nothing was launched, and the GPU is as it
    was."""


@dataclass(frozen=True)
class Entry:
    """A compiled kernel: its name as it was asked for, its symbol, the architecture that it is
    compiled for, its signature and its needs. registers, local_bytes (stack and spilled registers):
    of a thread; shared_bytes (static), max_threads (__launch_bounds__): of a block; block, cluster:
    sizes that the source fixes."""

    name: str
    symbol: str
    arch: str
    signature: Signature
    registers: int = 0
    shared_bytes: int = 0
    local_bytes: int = 0
    max_threads: int = BLOCK_THREADS
    block: tuple[int, int, int] | None = None
    cluster: tuple[int, int, int] | None = None

    def check(
        self,
        grid: Size,
        block: Size,
        shared: int = 0,
        cluster: Size | None = None,
        cooperative: bool = False,
    ) -> LaunchReport:
        """Check a launch by what holds on every GPU of the code's architecture. LaunchError names
        the limit."""
        return check(self, of_arch(self.arch), grid, block, shared, cluster, cooperative)


@dataclass(frozen=True)
class Limits:
    """Limits of one GPU, as `device.limits()` has them; of an architecture alone, those that hold
    for every GPU."""

    where: str
    arch: int  # 90 for compute capability 9.0
    processors: int = 0
    sm_threads: int = 0  # of a multiprocessor
    block_registers: int = 65536
    block_shared: int | None = None
    free_bytes: int = 0


@dataclass(frozen=True)
class LaunchReport:
    """A launch that fits. shared_bytes: of a block, static and dynamic; registers, local_bytes: of
    a thread. On a device blocks_per_sm: blocks that a multiprocessor holds at once, by the driver;
    occupancy: their threads, in warps, of all that it could hold; resident: blocks on the whole
    device. None without one."""

    kernel: str
    where: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    threads: int
    registers: int
    shared_bytes: int
    local_bytes: int
    cluster: tuple[int, int, int] | None = None
    cooperative: bool = False
    blocks_per_sm: int | None = None
    occupancy: float | None = None
    resident: int | None = None

    def __str__(self) -> str:
        more = f", cluster {self.cluster}" if self.cluster else ""
        more += ", cooperative" if self.cooperative else ""
        if self.occupancy is not None:
            more += f"\n  {self.blocks_per_sm} blocks a multiprocessor, {self.resident:,} on the "
            more += f"device: occupancy {self.occupancy:.0%}"
        return (
            f"{self.kernel} on {self.where}: grid {self.grid}, block {self.block}{more}\n"
            f"  {self.registers} registers and {self.local_bytes:,} bytes of local memory a "
            f"thread, {self.shared_bytes:,} bytes of shared memory a block"
        )


def of_arch(arch: str) -> Limits:
    """Return those that hold for every GPU of an architecture, "90a" as NVRTC names it after sm_.
    ValueError."""
    if not isinstance(arch, str) or not re.fullmatch(r"\d{2,3}[af]?", arch):
        raise ValueError(f'arch: must be one as "90a" or "80", not {arch!r}')
    return Limits(f"sm_{arch}", int(arch.rstrip("af")))


def whole_numbers(what: str, size: Size) -> tuple[int, ...]:
    """Return a size as one to three of Python's numbers. TypeError, ValueError."""
    with contextlib.suppress(TypeError):  # an array of NumPy's has __index__, and refuses
        return (operator.index(size),)  # type: ignore[arg-type]
    said = f"{what}: must be a whole number or a tuple of up to three, not"
    try:
        sizes = tuple(map(operator.index, size))  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"{said} {size!r}") from None
    if not 1 <= len(sizes) <= 3:
        raise ValueError(f"{said} of {len(sizes):,}")
    return sizes


def triple(what: str, size: Size, most: Sequence[int], remedy: str) -> tuple[int, int, int]:
    """Return a size as three numbers, each from 1 to its limit. LaunchError, TypeError or
    ValueError."""
    sizes = whole_numbers(what, size)
    sizes += (1,) * (3 - len(sizes))
    for axis, n, limit in zip("xyz", sizes, most):
        if n < 1:
            raise LaunchError(f"{what}.{axis} is {n:,}, and must be 1 or more")
        if n > limit:
            raise LaunchError(f"{what}.{axis} is {n:,}, and at most {limit:,} are allowed{remedy}")
    return sizes[0], sizes[1], sizes[2]


def check(
    kernel: Entry,
    limits: Limits,
    grid: Size,
    block: Size,
    shared: int = 0,
    cluster: Size | None = None,
    cooperative: bool = False,
    count_blocks: Callable[[int, int], int] | None = None,
    held_local: int = OPEN_LOCAL,
) -> LaunchReport:
    """Check a launch. shared: bytes of dynamic shared memory a block; count_blocks: of (threads,
    shared), blocks that a multiprocessor of the device holds; held_local: bytes of local memory a
    thread that its context holds already. LaunchError names the limit, with both numbers and the
    remedy; TypeError and ValueError a wrong size."""
    try:
        grid = triple("grid", grid, GRID_SIZES, "; put the largest number into x")
        block = triple("block", block, BLOCK_SIZES, "; use smaller blocks and more of them")
        if cluster is not None:
            cluster = triple("cluster", cluster, GRID_SIZES, "")
        try:
            shared = operator.index(shared)
        except TypeError:
            raise TypeError(f"shared: must be a whole number of bytes, not {shared!r}") from None
        shape, threads = cluster or kernel.cluster, math.prod(block)
        refusals = [
            *_of_block(kernel, limits, block, threads),
            *_of_memory(kernel, limits, shared, held_local),
            *_of_cluster(kernel, limits, grid, shape),
        ]
        if refusals:
            raise LaunchError(refusals[0])
        fits = occupancy = resident = None
        if count_blocks is not None:
            fits = count_blocks(threads, shared)
            occupancy = fits * _up(threads, WARP) / limits.sm_threads
            resident = fits * limits.processors
            if cooperative and math.prod(grid) > resident:
                raise LaunchError(
                    f"a cooperative grid of {math.prod(grid):,} blocks, and {limits.where} holds "
                    f"{resident:,} at once ({fits} on each of {limits.processors} "
                    "multiprocessors), and all must run; use at most that many, each in a loop "
                    "over its share"
                )
    except (LaunchError, TypeError, ValueError) as error:
        raise type(error)(f"{kernel.name}: {error}") from None
    return LaunchReport(
        kernel.name,
        limits.where,
        grid,
        block,
        threads,
        kernel.registers,
        kernel.shared_bytes + shared,
        kernel.local_bytes,
        shape,
        bool(cooperative),
        fits,
        occupancy,
        resident,
    )


def _up(number: int, unit: int) -> int:
    return -(-number // unit) * unit


def _of_block(
    kernel: Entry, limits: Limits, block: tuple[int, int, int], threads: int
) -> Iterator[str]:
    if threads > BLOCK_THREADS:
        yield (
            f"block {block} has {threads:,} threads, and {limits.where} allows {BLOCK_THREADS:,} a "
            "block; use smaller blocks and more of them"
        )
    if kernel.block not in (None, block):
        yield f"block is {block}, and the source fixes it at {kernel.block} (__block_size__)"
    if threads > kernel.max_threads:
        yield (
            f"block {block} has {threads:,} threads, and the source promises at most "
            f"{kernel.max_threads:,} (__launch_bounds__); use smaller blocks, or raise the promise"
        )
    a_warp = _up(kernel.registers * WARP, REGISTER_UNIT)
    needed = a_warp * _up(_up(threads, WARP) // WARP, PARTITIONS)
    if needed > limits.block_registers:
        most = limits.block_registers // a_warp // PARTITIONS * PARTITIONS * WARP
        yield (
            f"block {block} of {threads:,} threads needs {needed:,} registers "
            f"({kernel.registers} a thread), and {limits.where} has {limits.block_registers:,} a "
            f"block; use at most {most:,} threads, or compile with "
            f"__launch_bounds__({_up(threads, WARP)})"
        )


def _of_memory(kernel: Entry, limits: Limits, shared: int, held_local: int) -> Iterator[str]:
    if shared < 0:
        yield f"shared is {shared:,} bytes, and must be 0 or more"
    whole = kernel.shared_bytes + shared
    if limits.block_shared is not None and whole > limits.block_shared:
        yield (
            f"{whole:,} bytes of shared memory a block ({kernel.shared_bytes:,} static, {shared:,} "
            f"dynamic), and {limits.where} has {limits.block_shared:,}; use smaller tiles or types"
        )
    # The driver keeps local memory for every thread that can be resident, for any grid.
    threads = limits.processors * limits.sm_threads
    needed, free = threads * kernel.local_bytes, limits.free_bytes + threads * held_local
    if needed > free:
        yield (
            f"{kernel.local_bytes:,} bytes of local memory a thread, {needed / 2**30:.2f} GiB for "
            f"the {threads:,} threads that {limits.where} can hold, and {free / 2**30:.2f} GiB are "
            "free; make arrays in the kernel smaller, or free memory (device.empty_cache())"
        )


def _of_cluster(
    kernel: Entry, limits: Limits, grid: tuple[int, int, int], shape: tuple[int, int, int] | None
) -> Iterator[str]:
    if shape is None:
        return
    if kernel.cluster not in (None, shape):
        yield f"cluster is {shape}, and the source fixes it at {kernel.cluster} (__cluster_dims__)"
    if limits.arch < CLUSTER_ARCH and shape != (1, 1, 1):
        yield (
            f"cluster {shape} needs compute capability 9.0, and {limits.where} has "
            f"{limits.arch / 10:.1f}; launch without clusters"
        )
    if math.prod(shape) > CLUSTER_BLOCKS:
        yield (
            f"cluster {shape} has {math.prod(shape):,} blocks, and at most {CLUSTER_BLOCKS} are "
            "allowed; use smaller clusters"
        )
    for axis, whole, part in zip("xyz", grid, shape):
        if whole % part:
            yield (
                f"grid.{axis} is {whole:,}, which is no multiple of cluster.{axis} = {part}; round "
                "it up, and let the blocks beyond the end do nothing"
            )
