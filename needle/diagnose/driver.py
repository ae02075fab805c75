"""The CUDA driver by ctypes, for what needle itself does not ask it: which GPU a device is, and
copies from one GPU to another. Opened when used; functions are those of NVIDIA's "CUDA Driver
API"."""

from __future__ import annotations

import ctypes
import re
from ctypes import byref, c_int, c_size_t, c_uint, c_void_p
from pathlib import Path
from typing import Any

LIBRARY = re.compile(r"/\S*/lib(?:cuda|cudart|cublas|cublasLt|nvrtc|nccl|nvidia-ml)\.so\S*")
PEER_ALREADY_ENABLED, PEER_UNSUPPORTED = 704, 217


class DriverError(RuntimeError):
    """A call of the driver that failed; `code` is its CUresult."""

    def __init__(self, function: str, code: int) -> None:
        super().__init__(f"{function} failed with error {code} of the CUDA driver")
        self.code = code


class Driver:
    """The library, initialised. OSError where there is none, DriverError where it refuses."""

    def __init__(self, library: str = "libcuda.so.1") -> None:
        self._library = ctypes.CDLL(library)
        self.call("cuInit", c_uint(0))

    def call(self, function: str, *arguments: Any) -> None:
        code = getattr(self._library, function)(*arguments)
        if code:
            raise DriverError(function, code)

    def uuid(self, index: int) -> str:
        """GPU-01234567-... of a device, as NVML spells it; of a part of a GPU MIG-...."""
        device, raw = c_int(), (ctypes.c_ubyte * 16)()
        self.call("cuDeviceGet", byref(device), c_int(index))
        try:
            self.call("cuDeviceGetUuid_v2", byref(raw), device)
        except AttributeError:  # a driver before CUDA 11.4
            self.call("cuDeviceGetUuid", byref(raw), device)
        text = bytes(raw).hex()
        cuts = (0, 8, 12, 16, 20, 32)
        return "GPU-" + "-".join(text[a:b] for a, b in zip(cuts, cuts[1:]))

    # ---- memory of several devices; addresses are ints ----------------------------------------

    def context(self, index: int) -> c_void_p:
        """The device's primary context, which the runtime shares."""
        device, context = c_int(), c_void_p()
        self.call("cuDeviceGet", byref(device), c_int(index))
        self.call("cuDevicePrimaryCtxRetain", byref(context), device)
        return context

    def use(self, context: c_void_p) -> None:
        self.call("cuCtxSetCurrent", context)

    def allocate(self, size: int) -> int:
        address = c_void_p()
        self.call("cuMemAlloc_v2", byref(address), c_size_t(size))
        return address.value or 0

    def free(self, address: int) -> None:
        self.call("cuMemFree_v2", c_void_p(address))

    def upload(self, to: int, data: bytes) -> None:
        self.call("cuMemcpyHtoD_v2", c_void_p(to), data, c_size_t(len(data)))

    def download(self, source: int, size: int) -> bytes:
        data = ctypes.create_string_buffer(size)
        self.call("cuMemcpyDtoH_v2", data, c_void_p(source), c_size_t(size))
        return data.raw

    def allow(self, peer: c_void_p) -> bool:
        """Let the current context reach the memory of another directly; whether it can."""
        try:
            self.call("cuCtxEnablePeerAccess", peer, c_uint(0))
        except DriverError as error:
            if error.code == PEER_UNSUPPORTED:
                return False
            if error.code != PEER_ALREADY_ENABLED:
                raise
        return True

    def copy(self, to: int, target: c_void_p, source: int, origin: c_void_p, size: int) -> None:
        """Enqueued in the current context."""
        self.call("cuMemcpyPeer", c_void_p(to), target, c_void_p(source), origin, c_size_t(size))

    def synchronize(self) -> None:
        self.call("cuCtxSynchronize")


def libraries() -> list[str]:
    """NVIDIA's libraries that this process has loaded, as paths; the names carry their versions."""
    return sorted(set(LIBRARY.findall(Path("/proc/self/maps").read_text())))


def uuid(index: int) -> str | None:
    """Of a device; None where the driver does not tell."""
    try:
        return Driver().uuid(index)
    except (OSError, AttributeError, DriverError):
        return None
