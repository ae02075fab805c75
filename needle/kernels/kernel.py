"""Compiled kernels on a device: loaded, checked against that device, launched in its stream.

A launch costs what CUDA's own does: arguments are checked and packed in C each time
(csrc/python/parameters.c), the rest once for each way to launch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from needle import _C
from needle._C import Device
from needle.backend_ndarray import given_device
from needle.kernels.compile import Compiled
from needle.kernels.limits import OPEN_LOCAL, Entry, LaunchReport, Limits, Size

# Bytes of local memory a thread that launches so far have made the driver keep on each device.
_held_local: dict[Device, int] = defaultdict(lambda: OPEN_LOCAL)


class Kernel(_C.Kernel):
    """A kernel on a device.

        kernel(grid, block, *arguments, shared=0, cluster=None, cooperative=False)

    enqueues a launch: grid blocks (x, or up to three sizes) of block threads, with `shared` bytes
    of dynamic shared memory a block. An array is an NDArray or a Tensor on the device, contiguous,
    of the pointer's dtype; None is no array. One that the kernel writes counts as written. A struct
    is given as its bytes. TypeError, ValueError and OverflowError name the parameter, LaunchError
    (a CudaError) the limit; then nothing was launched. A fault inside the kernel is
    CudaFatalError, and the end of the process.

    registers, local_bytes (stack and spilled registers): of a thread; shared_bytes: static, of a
    block.
    """

    def __new__(cls, module: Module, entry: Entry) -> Kernel:
        parameters = _C.Parameters(entry.name, entry.signature.plan)
        return super().__new__(cls, module.code, entry.symbol, parameters)

    def __init__(self, module: Module, entry: Entry) -> None:
        self.entry, self.device = entry, module.device
        self.name, self.signature, self.registers = entry.name, entry.signature, entry.registers
        self.shared_bytes, self.local_bytes = entry.shared_bytes, entry.local_bytes

    def check(
        self,
        grid: Size,
        block: Size,
        shared: int = 0,
        cluster: Size | None = None,
        cooperative: bool = False,
    ) -> LaunchReport:
        """Check a launch against this device. Return its occupancy. LaunchError names the limit,
        with both numbers and the remedy."""
        known = {"held_local": _held_local[self.device], "count_blocks": self.blocks}
        where = Limits(str(self.device), **self.device.limits(), **known)
        return self.entry.check(grid, block, shared, cluster, cooperative, where)

    def admit(
        self, grid: Size, block: Size, shared: int, cluster: Size | None, cooperative: bool
    ) -> tuple[Any, ...]:
        """Check a launch for _C.Kernel, before the first of its kind."""
        report = self.check(grid, block, shared, cluster, cooperative)
        _held_local[self.device] = max(_held_local[self.device], self.entry.local_bytes)
        dynamic = report.shared_bytes - self.entry.shared_bytes
        given = report.cluster if self.entry.cluster is None else None  # else the code has it
        return report.grid, report.block, dynamic, given, report.cooperative


class Module:
    """The kernels of one compiled source on a device, by name: `module["scale<float>"]`. They stay
    there as long as the module, a kernel of it, or a recorded Graph that launches one."""

    def __init__(self, compiled: Compiled, device: Device) -> None:
        self.compiled, self.device = compiled, device
        self.code = _C.Module(device, compiled.cubin)
        self._kernels: dict[tuple[str, str | None], Kernel] = {}

    def kernel(self, name: str, signature: str | None = None) -> Kernel:
        """Return the kernel of a name; for one that is `extern "C"` with the types of its
        parameters, "const float*, float* y, int n". KeyError lists the names."""
        key, made = (name, signature), self.compiled
        if key not in self._kernels:
            entry = made[name] if signature is None else made.declared(name, signature)
            self._kernels[key] = Kernel(self, entry)
        return self._kernels[key]

    def __getitem__(self, name: str) -> Kernel:
        return self.kernel(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.compiled)


def arch_of(device: Device) -> str:
    """Return the architecture to compile for: "90a" on an H200. ValueError where the device runs no
    user kernels."""
    number = given_device(device).limits()["arch"]
    return f"{number}a" if number >= 90 else str(number)  # "a": with features of this one alone


def load(compiled: Compiled, device: Device) -> Module:
    """Load machine code on a device. CudaError if it is for another architecture."""
    return Module(compiled, device)
