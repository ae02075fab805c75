"""Copies from one GPU to another by the driver, as NCCL makes them: right to the last byte, and how
fast. A machine whose IOMMU or PCIe bridges come between GPUs may deliver other bytes, or none."""

from __future__ import annotations

import itertools
import os
import time
from ctypes import c_void_p
from typing import Any

import numpy as np

from needle.diagnose.children import Teller
from needle.diagnose.driver import Driver, DriverError
from needle.diagnose.gpus import RESET

PROBE = 1 << 20  # bytes that are compared
BULK, COPIES = 1 << 26, 4  # bytes that are timed
WRONG = (
    "switch off ACS on the PCIe bridges or the IOMMU's translation (iommu=pt); meanwhile "
    "NCCL_P2P_DISABLE=1 copies through the host"
)


def examine(teller: Teller, devices: list[int], least: float) -> None:
    """Each GPU to the next; with --full every pair. `least`: bytes/s of a copy that is direct."""
    teller.at("opening the GPUs for copies between them")
    driver = Driver()
    contexts = {index: driver.context(index) for index in devices}
    around = list(zip(devices, devices[1:] + devices[:1]))
    pairs = list(itertools.permutations(devices, 2)) if teller.is_full else around
    rates: dict[str, float] = {}
    for source, target in dict.fromkeys(pairs):
        if teller.left() < 0:
            teller.note("peers", f"the time was up after {len(rates)} of {len(pairs)} pairs")
            break
        what = f"a copy from cuda({source}) to cuda({target})"
        teller.at(what)
        try:
            is_direct, wrong, rate = copy(driver, contexts[source], contexts[target])
        except DriverError as error:
            teller.failed("peers", f"{what}: {error}", RESET.format(index=target))
            return
        if wrong:
            teller.failed("peers", f"{what} brings {wrong:,} wrong bytes of {PROBE:,}", WRONG)
            continue
        rates[f"{source}-{target}"] = rate
        if not is_direct:
            teller.note("peers", f"{what} goes by the host: {rate / 1e9:.1f} GB/s")
        elif rate < least:
            text = f"{what} makes {rate / 1e9:.1f} GB/s, far below its link's"
            teller.failed("peers", text, "see nvidia-smi topo -m, and nvidia-smi nvlink -s")
    teller.fact("peers", rates)
    if rates:
        slowest, fastest = min(rates.values()) / 1e9, max(rates.values()) / 1e9
        text = f"copies between {len(devices)} GPUs are right, {slowest:.0f} to {fastest:.0f} GB/s"
        teller.ok("peers", text)


def copy(driver: Driver, origin: c_void_p, target: c_void_p) -> tuple[bool, int, float]:
    """(whether without the host, wrong bytes, bytes/s)."""
    held: list[tuple[Any, int]] = []
    try:
        driver.use(target)
        to = driver.allocate(BULK)
        held.append((target, to))
        driver.upload(to, bytes(PROBE))
        driver.allow(origin)
        driver.use(origin)
        source = driver.allocate(BULK)
        held.append((origin, source))
        sent = os.urandom(PROBE)
        driver.upload(source, sent)
        is_direct = driver.allow(target)
        driver.copy(to, target, source, origin, PROBE)
        driver.synchronize()
        start = time.perf_counter()
        for _ in range(COPIES):
            driver.copy(to, target, source, origin, BULK)
        driver.synchronize()
        rate = COPIES * BULK / max(time.perf_counter() - start, 1e-9)
        driver.use(target)
        driver.synchronize()
        got = driver.download(to, PROBE)
    finally:
        for context, address in held:
            driver.use(context)
            driver.free(address)
    wrong = np.frombuffer(sent, np.uint8) != np.frombuffer(got, np.uint8)
    return is_direct, int(wrong.sum()), rate
