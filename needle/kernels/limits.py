"""The check of a launch against the kernel and its GPU, with both numbers and a remedy.

Registers and shared memory of a kernel come from ptxas' report, so the check needs no GPU. On one
the limits are the device's own, and resident blocks are counted by the driver.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from needle._C import CudaError
from needle.kernels.signature import Signature

Size = int | Sequence[int]  # of a grid, block or cluster: x, (x,), (x, y) or (x, y, z)

WARP = 32
BLOCK_THREADS = 1024
CLUSTER_BLOCKS = 8  # of every GPU that has clusters; more needs a promise that needle does not ask
CLUSTER_ARCH = 90
OPEN_LOCAL = 1024  # bytes of local memory a thread that each context holds from the start
REGISTER_UNIT, PARTITIONS = 256, 4  # registers of a warp; warps in fours


class LaunchError(CudaError):
    """A launch exceeds a limit of the kernel or the GPU. Nothing was launched, and the GPU is as it
    was."""


@dataclass(frozen=True)
class Limits:
    """Limits of one GPU, as `device.limits()` has them; of an architecture alone, those that hold
    for every GPU. held_local: bytes of local memory a thread that the context holds already;
    count_blocks: returns how many blocks of (threads, dynamic shared memory) a multiprocessor
    holds."""

    where: str
    arch: int  # 90 for compute capability 9.0
    processors: int = 0
    sm_threads: int = 0  # of a multiprocessor
    block_registers: int = 65536
    block_shared: float = math.inf
    free_bytes: int = 0
    held_local: int = OPEN_LOCAL
    count_blocks: Callable[[int, int], int] | None = None


@dataclass(frozen=True)
class LaunchReport:
    """A launch that fits. shared_bytes: of a block, static and dynamic; registers, local_bytes: of
    a thread. On a device blocks_per_sm: blocks that a multiprocessor holds at once, by the driver;
    occupancy: their threads, in warps, of all that it could hold; resident: blocks on the whole
    device. None without one."""

    kernel: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    registers: int
    shared_bytes: int
    local_bytes: int
    cluster: tuple[int, int, int] | None = None
    cooperative: bool = False
    blocks_per_sm: int | None = None
    occupancy: float | None = None
    resident: int | None = None

    @property
    def threads(self) -> int:
        return math.prod(self.block)


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
        limits: Limits | None = None,
    ) -> LaunchReport:
        """Check a launch. shared: bytes of dynamic shared memory a block; limits: of a device, by
        default what holds on every GPU of the code's architecture. LaunchError names the limit,
        with both numbers and the remedy; TypeError and ValueError a wrong size."""
        try:
            sizes = triple("grid", grid), triple("block", block)
            shared = whole("shared", shared, 0)
            needs = self.registers, self.shared_bytes + shared, self.local_bytes
            shape = self.cluster if cluster is None else triple("cluster", cluster)
            report = LaunchReport(self.name, *sizes, *needs, shape, bool(cooperative))
            limits = limits or of_arch(self.arch)
            for said in _refusals(self, limits, report):
                raise LaunchError(said)
            if limits.count_blocks is None:
                return report
            fits = limits.count_blocks(report.threads, shared)
            blocks, resident = math.prod(report.grid), fits * limits.processors
            if cooperative and blocks > resident:
                raise LaunchError(
                    f"a cooperative grid of {blocks:,} blocks, and {limits.where} holds "
                    f"{resident:,} at once ({fits} on each of {limits.processors} "
                    "multiprocessors), and all must run; use at most that many, each in a loop "
                    "over its share"
                )
        except (LaunchError, TypeError, ValueError) as error:
            raise type(error)(f"{self.name}: {error}") from None
        occupancy = fits * _up(report.threads, WARP) / limits.sm_threads
        return replace(report, blocks_per_sm=fits, occupancy=occupancy, resident=resident)


def of_arch(arch: str) -> Limits:
    """Return those that hold for every GPU of an architecture, "90a" as NVRTC names it after sm_.
    ValueError."""
    if not isinstance(arch, str) or not re.fullmatch(r"\d{2,3}[af]?", arch):
        raise ValueError(f'arch: must be one as "90a" or "80", not {arch!r}')
    return Limits(f"sm_{arch}", int(arch.rstrip("af")))


def whole(what: str, value: Any, least: int) -> int:
    """Return a whole number of at least `least`. TypeError, ValueError."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{what}: must be a whole number, not {value!r}")
    if value < least:
        raise ValueError(f"{what}: must be {least} or more, not {value}")
    return value.__index__()


def triple(what: str, size: Size) -> tuple[int, int, int]:
    """Return a size as three of Python's numbers. TypeError, ValueError."""
    said = f"{what}: must be a whole number or a tuple of up to three, not {size!r}"
    try:
        sizes = [operator.index(n) for n in (size if isinstance(size, Iterable) else (size,))]
    except TypeError:
        raise TypeError(said) from None
    if not 1 <= len(sizes) <= 3:
        raise ValueError(said)
    x, y, z = (*sizes, 1, 1)[:3]
    return x, y, z


def _up(number: int, unit: int) -> int:
    return -(-number // unit) * unit


def _refusals(kernel: Entry, limits: Limits, launch: LaunchReport) -> Iterator[str]:
    """Describe what does not fit: sizes that are not those of the source, or not positive, and what
    is beyond a limit."""
    cluster = launch.cluster or (1, 1, 1)
    for what, size, fixed in (
        ("grid", launch.grid, None),
        ("block", launch.block, kernel.block),
        ("cluster", cluster, kernel.cluster),
    ):
        if fixed not in (None, size):
            yield f"{what} is {size}, and the source fixes it at {fixed}"
        if min(size) < 1:
            yield f"{what} is {size}, and must be 1 or more"
    for axis, blocks, part in zip("xyz", launch.grid, cluster):
        if blocks % part:
            yield (
                f"grid.{axis} is {blocks:,}, which is no multiple of cluster.{axis} = {part}; "
                "round it up, and let the blocks beyond the end do nothing"
            )
    warps = _up(launch.threads, WARP) // WARP
    a_warp = _up(kernel.registers * WARP, REGISTER_UNIT)
    fitting = limits.block_registers // max(a_warp, 1) // PARTITIONS * PARTITIONS * WARP
    # The driver keeps local memory for every thread that can be resident, for any grid.
    residents = limits.processors * limits.sm_threads
    free = limits.free_bytes + residents * limits.held_local
    registers = f"registers a block ({kernel.registers} a thread)"
    static = f"bytes of shared memory a block ({kernel.shared_bytes:,} of them static)"
    local = f"bytes of local memory ({kernel.local_bytes:,} for each of {residents:,} threads that "
    local += "it can hold)"
    clusters, most = 1, "clusters need compute capability 9.0"
    if limits.arch >= CLUSTER_ARCH:
        clusters, most = CLUSTER_BLOCKS, "use smaller clusters"
    fewer, smaller = "put the largest number into x", "use smaller blocks and more of them"
    allowed = f"{smaller}, and __launch_bounds__ that allow them, if the source has any"
    bounds = f"use at most {fitting:,} threads, or compile with __launch_bounds__({warps * WARP})"
    less = "make arrays in the kernel smaller, or free memory (device.empty_cache())"
    for what, needed, limit, remedy in (
        ("grid.x", launch.grid[0], 2**31 - 1, "let a block do more"),
        ("grid.y", launch.grid[1], 65535, fewer),
        ("grid.z", launch.grid[2], 65535, fewer),
        ("block.z", launch.block[2], 64, smaller),
        ("threads a block", launch.threads, min(kernel.max_threads, BLOCK_THREADS), allowed),
        (registers, a_warp * _up(warps, PARTITIONS), limits.block_registers, bounds),
        (static, launch.shared_bytes, limits.block_shared, "use smaller tiles or types"),
        (local, residents * kernel.local_bytes, free, less),
        ("blocks a cluster", math.prod(cluster), clusters, most),
    ):
        if needed > limit:
            yield f"{what}: {needed:,}, and {limits.where} allows {limit:,}; {remedy}"
