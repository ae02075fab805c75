"""A fault that is planted: a process reads memory that nobody owns through a kernel, which ends its
context. A fresh process must then find the device as good as before: the process is what recovers.
"""

from __future__ import annotations

import ctypes
import time
from typing import Any

from needle import _C
from needle.diagnose.children import Child, Crew, Teller
from needle.diagnose.finding import Finding
from needle.diagnose.gpus import RESET

EXIT_FATAL = 75
NOWHERE = 0x10  # an address


class Foreign:
    """An array whose owner says that it lies at NOWHERE."""

    def __init__(self, array: Any) -> None:
        self._array = array

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._array.__dlpack_device__()

    def __dlpack__(self, **options: Any) -> Any:
        capsule = self._array.__dlpack__()
        get = ctypes.pythonapi.PyCapsule_GetPointer
        get.restype, get.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
        ctypes.c_void_p.from_address(get(capsule, b"dltensor")).value = NOWHERE  # its data
        return capsule


def fault(teller: Teller, device: Any) -> None:
    """The doomed process."""
    teller.at("a kernel that reads memory that nobody owns", "exp")
    array = _C.array([1.0, 2.0], device=device)
    wild = _C.from_dlpack(Foreign(array))
    try:
        _C.exp(wild)
        device.synchronize()
    except _C.CudaFatalError as error:
        teller.fact("fault", str(error).split("\n")[0])
        teller.end()
        raise SystemExit from None  # needle makes the exit code 75


def examine(crew: Crew, where: str, index: int, deadline: float) -> list[Finding]:
    """Plants the fault, and tries the device from a fresh process."""
    doomed = crew.start(
        where, "fault", str(index), deadline=deadline, env={"NEEDLE_SYNC": "1"}, is_doomed=True
    )
    crew.wait(doomed)
    if doomed.ended == "late":
        return doomed.findings
    if "fault" not in doomed.facts:
        said = doomed.findings or [doomed.died()]
        remedy = "this is a defect: report it with --log FILE"
        text = f"a planted fault was not told: {said[0].text}"
        return [Finding("failed", where, "recovery", text, remedy, "exp")]
    start = time.monotonic()
    fresh: Child = crew.start(where, "alive", str(index), deadline=deadline)
    crew.wait(fresh)
    took = time.monotonic() - start
    if fresh.findings:
        return fresh.findings
    if not fresh.facts.get("good"):
        text = f"behind a planted fault a fresh process is wrong: {fresh.facts.get('text')}"
        return [Finding("failed", where, "recovery", text, RESET.format(index=index), "matmul")]
    findings = []
    if doomed.exit != EXIT_FATAL:
        text = f"a process that met a fault ended with {doomed.exit}, not {EXIT_FATAL}"
        findings.append(Finding("note", where, "recovery", text))
    text = f"a planted fault ended its process alone; a fresh one was right {took:.1f} s later"
    return [*findings, Finding("ok", where, "recovery", text)]
