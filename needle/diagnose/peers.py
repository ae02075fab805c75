"""Copies from one GPU to another by the driver, as NCCL makes them: right to the last byte, and how
fast. An IOMMU or PCIe bridges between GPUs may change the bytes. Functions are those of NVIDIA's
"CUDA Driver API"; addresses are ints."""

from __future__ import annotations

import ctypes
import itertools
import os
import time
from ctypes import byref, c_int, c_size_t, c_uint, c_void_p
from typing import Any

import numpy as np

from needle.diagnose.examination import Reporter
from needle.diagnose.machine import RESET

PROBE = 1 << 20  # bytes that are compared
BULK, COPIES = 1 << 26, 4  # bytes that are timed
PEER_ALREADY_ENABLED, PEER_UNSUPPORTED = 704, 217
WRONG = (
    "switch off ACS on the PCIe bridges or the IOMMU's translation (iommu=pt); meanwhile "
    "NCCL_P2P_DISABLE=1 copies through the host"
)


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

    def context(self, index: int) -> c_void_p:
        """The device's primary context, which the runtime shares."""
        device, context = c_int(), c_void_p()
        self.call("cuDeviceGet", byref(device), c_int(index))
        self.call("cuDevicePrimaryCtxRetain", byref(context), device)
        return context

    def allocate(self, context: c_void_p, data: bytes) -> c_void_p:
        """BULK bytes of memory that begin with `data`."""
        address = c_void_p()
        self.call("cuCtxSetCurrent", context)
        self.call("cuMemAlloc_v2", byref(address), c_size_t(BULK))
        self.call("cuMemcpyHtoD_v2", address, data, c_size_t(len(data)))
        return address

    def allow(self, peer: c_void_p) -> bool:
        """Let the current context reach the memory of another directly. Return whether it can."""
        try:
            self.call("cuCtxEnablePeerAccess", peer, c_uint(0))
        except DriverError as error:
            if error.code not in (PEER_ALREADY_ENABLED, PEER_UNSUPPORTED):
                raise
            return error.code == PEER_ALREADY_ENABLED
        return True

    def copy(self, origin: c_void_p, target: c_void_p) -> tuple[bool, int, float]:
        """Copy from one context to another: (whether without the host, wrong bytes, bytes/s)."""
        sent, got = os.urandom(PROBE), ctypes.create_string_buffer(PROBE)
        to = self.allocate(target, bytes(PROBE))
        self.allow(origin)
        source = self.allocate(origin, sent)
        try:
            is_direct = self.allow(target)
            self.call("cuMemcpyPeer", to, target, source, origin, c_size_t(PROBE))
            self.call("cuCtxSynchronize")
            start = time.perf_counter()
            for _ in range(COPIES):
                self.call("cuMemcpyPeer", to, target, source, origin, c_size_t(BULK))
            self.call("cuCtxSynchronize")
            rate = COPIES * BULK / max(time.perf_counter() - start, 1e-9)
            self.call("cuCtxSetCurrent", target)
            self.call("cuCtxSynchronize")
            self.call("cuMemcpyDtoH_v2", got, to, c_size_t(PROBE))
        finally:
            for context, address in ((target, to), (origin, source)):
                self.call("cuCtxSetCurrent", context)
                self.call("cuMemFree_v2", address)
        wrong = np.frombuffer(sent, np.uint8) != np.frombuffer(got.raw, np.uint8)
        return is_direct, int(wrong.sum()), rate


def examine(reporter: Reporter, devices: list[int], least: float) -> None:
    """Copy from each GPU to the next; with --full between every pair. least: bytes/s of a direct
    copy, below which it has failed."""
    reporter.at("opening the GPUs for copies between them")
    driver = Driver()
    contexts = {index: driver.context(index) for index in devices}
    pairs = list(zip(devices, devices[1:] + devices[:1]))
    if reporter.is_full:
        pairs = list(itertools.permutations(devices, 2))
    rates: dict[str, float] = {}
    for source, target in dict.fromkeys(pairs):
        if reporter.left() < 0:
            text = f"the time was up after {len(rates)} of {len(pairs)} pairs"
            reporter.note("peers", text)
            break
        what = f"a copy from cuda({source}) to cuda({target})"
        reporter.at(what)
        try:
            is_direct, wrong, rate = driver.copy(contexts[source], contexts[target])
        except DriverError as error:
            reporter.failed("peers", f"{what}: {error}", RESET.format(index=target))
            return
        if wrong:
            reporter.failed("peers", f"{what} brings {wrong:,} wrong bytes of {PROBE:,}", WRONG)
            continue
        rates[f"{source}-{target}"] = rate
        if not is_direct:
            reporter.note("peers", f"{what} goes by the host: {rate / 1e9:.1f} GB/s")
        elif rate < least:
            text = f"{what} makes {rate / 1e9:.1f} GB/s, far below its link's"
            reporter.failed("peers", text, "see nvidia-smi topo -m, and nvidia-smi nvlink -s")
    reporter.fact("peers", rates)
    if rates:
        slowest, fastest = min(rates.values()) / 1e9, max(rates.values()) / 1e9
        text = f"copies between {len(devices)} GPUs are right, {slowest:.0f} to {fastest:.0f} GB/s"
        reporter.ok("peers", text)
