"""What the driver says about each GPU, by NVML (libnvidia-ml.so.1), through ctypes: opened when
used. A GPU that does not have a figure has None there. Functions, structs and numbers are those of
NVIDIA's "NVML API Reference Guide"."""

from __future__ import annotations

import ctypes
from ctypes import byref, c_char, c_uint, c_ulonglong, c_void_p
from pathlib import Path
from typing import Any

# Not a link of this GPU, not supported by it, not permitted, not in this version of the library.
ABSENT = (2, 3, 4, 13)
INSUFFICIENT_SIZE = 7
UNCORRECTED, VOLATILE, AGGREGATE = 1, 0, 1
CLOCK_SM, CLOCK_MEMORY = 1, 2
MEMORY = ("total", "free", "used")
LINKS = 18  # NVLinks that a GPU has at most


class NvmlError(RuntimeError):
    """A call that failed; `code` is its nvmlReturn_t."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code


class Pci(ctypes.Structure):
    _fields_ = [
        ("legacy", c_char * 16),
        *((name, c_uint) for name in ("domain", "bus", "device", "pci_id", "subsystem")),
        ("bus_id", c_char * 32),
    ]


class Memory(ctypes.Structure):
    _fields_ = [(name, c_ulonglong) for name in MEMORY]


class Utilization(ctypes.Structure):
    _fields_ = [("gpu", c_uint), ("memory", c_uint)]


class Process(ctypes.Structure):
    _fields_ = [
        ("pid", c_uint),
        ("bytes", c_ulonglong),
        ("gpu_instance", c_uint),
        ("compute_instance", c_uint),
    ]


class Nvml:
    """The library, initialised. OSError where there is none, NvmlError where it refuses."""

    def __init__(self, library: str = "libnvidia-ml.so.1") -> None:
        self._library = ctypes.CDLL(library)
        self._library.nvmlErrorString.restype = ctypes.c_char_p
        self._check(self._library.nvmlInit_v2())

    def _check(self, code: int) -> None:
        if code:
            text = self._library.nvmlErrorString(code) or b"unknown error"
            raise NvmlError(code, text.decode(errors="replace"))

    def ask(self, function: str, *arguments: Any) -> bool:
        """Whether the GPU and the library have it; `arguments` are then filled."""
        try:
            called = getattr(self._library, function)
        except AttributeError:
            return False
        code = called(*arguments)
        if code in ABSENT:
            return False
        self._check(code)
        return True

    def number(self, function: str, *before: Any, kind: Any = c_uint) -> int | None:
        value = kind()
        return value.value if self.ask(function, *before, byref(value)) else None

    def numbers(self, function: str, handle: c_void_p, count: int) -> list[int] | None:
        values = [c_uint() for _ in range(count)]
        asked = self.ask(function, handle, *map(byref, values))
        return [value.value for value in values] if asked else None

    def text(self, function: str, *before: Any) -> str | None:
        value = ctypes.create_string_buffer(96)
        asked = self.ask(function, *before, value, c_uint(len(value)))
        return value.value.decode(errors="replace") if asked else None

    def count(self) -> int:
        return self.number("nvmlDeviceGetCount_v2") or 0

    def handle(self, index: int) -> c_void_p:
        found = c_void_p()
        self._check(self._library.nvmlDeviceGetHandleByIndex_v2(c_uint(index), byref(found)))
        return found

    def handle_of(self, uuid: str) -> c_void_p:
        found = c_void_p()
        self._check(self._library.nvmlDeviceGetHandleByUUID(uuid.encode(), byref(found)))
        return found

    # ---- a GPU --------------------------------------------------------------------------------

    def describe(self, handle: c_void_p) -> dict[str, Any]:
        """name, uuid, pci, memory, holders, utilization, temperature, power, clocks, ecc, rows,
        pcie, nvlinks, modes. Bytes, percent, degrees Celsius, watts, MHz."""
        pci, memory, use = Pci(), Memory(), Utilization()
        has_pci = self.ask("nvmlDeviceGetPciInfo_v3", handle, byref(pci))
        has_memory = self.ask("nvmlDeviceGetMemoryInfo", handle, byref(memory))
        has_use = self.ask("nvmlDeviceGetUtilizationRates", handle, byref(use))
        mig = self.numbers("nvmlDeviceGetMigMode", handle, 2)
        modes = {
            "persistence": self.number("nvmlDeviceGetPersistenceMode", handle),
            "compute": self.number("nvmlDeviceGetComputeMode", handle),
            "mig": mig[0] if mig else None,
        }
        return {
            "name": self.text("nvmlDeviceGetName", handle),
            "uuid": self.text("nvmlDeviceGetUUID", handle),
            "pci": pci.bus_id.decode(errors="replace").lower() if has_pci else None,
            "memory": {n: getattr(memory, n) for n in MEMORY} if has_memory else None,
            "utilization": use.gpu if has_use else None,
            "temperature": self.number("nvmlDeviceGetTemperature", handle, c_uint(0)),
            "power": self._watts("nvmlDeviceGetPowerUsage", handle),
            "power_limit": self._watts("nvmlDeviceGetEnforcedPowerLimit", handle),
            "power_default": self._watts("nvmlDeviceGetPowerManagementDefaultLimit", handle),
            "clocks": self.clocks(handle),
            "ecc": self._ecc(handle),
            "rows": self._rows(handle),
            "pcie": self._pcie(handle),
            "nvlinks": self._links(handle),
            "modes": modes,
            "holders": self.holders(handle),
        }

    def _watts(self, function: str, handle: c_void_p) -> float | None:
        milliwatts = self.number(function, handle)
        return None if milliwatts is None else milliwatts / 1000

    def clocks(self, handle: c_void_p) -> dict[str, Any]:
        """Now and at most, and why not more: the bits of nvmlClocksEventReasons."""
        asked = {"sm": CLOCK_SM, "memory": CLOCK_MEMORY}
        found: dict[str, Any] = {
            name: self.number("nvmlDeviceGetClockInfo", handle, c_uint(kind))
            for name, kind in asked.items()
        }
        for name, kind in asked.items():
            found[f"{name}_max"] = self.number("nvmlDeviceGetMaxClockInfo", handle, c_uint(kind))
        found["reasons"] = self.number(
            "nvmlDeviceGetCurrentClocksThrottleReasons", handle, kind=c_ulonglong
        )
        return found

    def _ecc(self, handle: c_void_p) -> dict[str, Any] | None:
        modes = self.numbers("nvmlDeviceGetEccMode", handle, 2)
        if modes is None:
            return None
        errors = {
            name: self.number(
                "nvmlDeviceGetTotalEccErrors",
                handle,
                c_uint(UNCORRECTED),
                c_uint(counter),
                kind=c_ulonglong,
            )
            for name, counter in (("uncorrected", VOLATILE), ("uncorrected_ever", AGGREGATE))
        }
        return {"on": bool(modes[0]), "on_after_reboot": bool(modes[1]), **errors}

    def _rows(self, handle: c_void_p) -> dict[str, Any] | None:
        """Rows of memory that were replaced, or pages that were given up (before Ampere)."""
        rows = self.numbers("nvmlDeviceGetRemappedRows", handle, 4)
        if rows is not None:
            return dict(zip(("correctable", "uncorrectable", "pending", "failed"), rows))
        pending = self.number("nvmlDeviceGetRetiredPagesPendingStatus", handle)
        return None if pending is None else {"pending": pending}

    def _pcie(self, handle: c_void_p) -> dict[str, int | None]:
        asked = {"generation": "PcieLinkGeneration", "width": "PcieLinkWidth"}
        found = {}
        for name, function in asked.items():
            found[name] = self.number(f"nvmlDeviceGetCurr{function}", handle)
            found[f"{name}_max"] = self.number(f"nvmlDeviceGetMax{function}", handle)
        return found

    def _links(self, handle: c_void_p) -> list[int]:
        """1 for each NVLink that is up, 0 for one that is down."""
        states = [self.number("nvmlDeviceGetNvLinkState", handle, c_uint(n)) for n in range(LINKS)]
        return [state for state in states if state is not None]

    def holders(self, handle: c_void_p) -> list[dict[str, Any]]:
        """Who has a context: pid, name, bytes, and whether through MPS."""
        found: dict[int, dict[str, Any]] = {}
        for kind in ("Compute", "Graphics", "MPSCompute"):
            function = f"nvmlDeviceGet{kind}RunningProcesses_v3"
            for process in self._processes(function, handle):
                known = process.bytes != 2**64 - 1  # NVML_VALUE_NOT_AVAILABLE
                found[process.pid] = {
                    "pid": process.pid,
                    "name": name_of(process.pid),
                    "bytes": process.bytes if known else None,
                    "mps": kind == "MPSCompute",
                }
        return list(found.values())

    def _processes(self, function: str, handle: c_void_p) -> list[Process]:
        room = 64
        while True:
            count, processes = c_uint(room), (Process * room)()
            try:
                asked = self.ask(function, handle, byref(count), processes)
                return list(processes[: count.value]) if asked else []
            except NvmlError as error:
                if error.code != INSUFFICIENT_SIZE:
                    raise
                room = 2 * max(room, count.value)


def name_of(pid: int) -> str:
    """The command line of a process; empty where it is not to be seen from here."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return ""
    return b" ".join(words).decode(errors="replace").strip()[:120]
