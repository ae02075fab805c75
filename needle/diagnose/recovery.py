"""Recovery from an injected fault: a kernel reads memory without an owner, which ends the context
of its process. A fresh process must then find the device as good as before."""

from __future__ import annotations

import ctypes
import os
import time
from typing import Any

from needle import _C
from needle.diagnose import facts
from needle.diagnose.examination import Examination, Examinations, Reporter
from needle.diagnose.finding import Finding
from needle.diagnose.machine import RESET

NOWHERE = 0x10  # an address


class Foreign:
    """An array whose DLPack export has the address NOWHERE."""

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


def fault(reporter: Reporter, index: int) -> None:
    """Inject the fault; this process ends."""
    device = _C.cuda(index)
    reporter.at("a kernel that reads memory without an owner", "exp")
    array = _C.array([1.0, 2.0], device=device)
    wild = _C.from_dlpack(Foreign(array))
    try:
        _C.exp(wild)
        device.synchronize()
    except _C.CudaFatalError as error:
        reporter.fact("fault", str(error).split("\n")[0])
        reporter.end()
        raise SystemExit from None  # needle makes it os.EX_TEMPFAIL


def alive(reporter: Reporter, index: int) -> None:
    """Multiply in a fresh process; the facts `good` and `text`."""
    reporter.at("a product in a fresh process", "matmul")
    good, text = facts.self_test(_C.cuda(index))
    reporter.fact("good", good)
    reporter.fact("text", text)


def examine(examinations: Examinations, where: str, index: int, deadline: float) -> list[Finding]:
    """Inject the fault, then try the device from a fresh process."""
    faulty = examinations.start(
        where, "recovery.fault", index, deadline=deadline, env={"NEEDLE_SYNC": "1"}, may_crash=True
    )
    examinations.wait(faulty)
    if faulty.ended == "late":
        return faulty.findings
    if "fault" not in faulty.facts:
        said = faulty.findings or [faulty.crash()]
        remedy = "this is a defect: report it with --log FILE"
        text = f"an injected fault was not reported: {said[0].text}"
        return [Finding("failed", where, "recovery", text, remedy, "exp")]
    start = time.monotonic()
    fresh: Examination = examinations.start(where, "recovery.alive", index, deadline=deadline)
    examinations.wait(fresh)
    took = time.monotonic() - start
    if fresh.findings:
        return fresh.findings
    if not fresh.facts.get("good"):
        text = f"after an injected fault a fresh process is wrong: {fresh.facts.get('text')}"
        return [Finding("failed", where, "recovery", text, RESET.format(index=index), "matmul")]
    findings = []
    if faulty.poll() != os.EX_TEMPFAIL:
        text = f"a process that met a fault ended with {faulty.poll()}, not {os.EX_TEMPFAIL}"
        findings.append(Finding("note", where, "recovery", text))
    text = f"an injected fault ended its process alone; a fresh one was right {took:.1f} s later"
    return [*findings, Finding("ok", where, "recovery", text)]
