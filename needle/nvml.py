"""State of each GPU by the driver (NVML), through the package nvidia-ml-py, which is imported when
used. A figure that a GPU lacks is None."""

from __future__ import annotations

import ctypes
import types
from pathlib import Path
from typing import Any

# Codes of what this GPU or this driver lacks: no such link, not supported, not permitted, too old.
ABSENT = (2, 3, 4, 13)
UNCORRECTED, SINCE_DRIVER, EVER = 1, 0, 1  # ECC errors and their counters
CLOCKS = {"sm": 1, "memory": 2}
LINKS = 18  # NVLinks that a GPU has at most


class NvmlError(RuntimeError):
    """A call that failed; `code` is its nvmlReturn_t."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code


class Nvml:
    """The library, initialised. OSError without the package or the library, NvmlError where the
    driver refuses."""

    def __init__(self, library: str = "libnvidia-ml.so.1") -> None:
        opened = ctypes.CDLL(library)  # pynvml's own loader leaves out the reason of a failure
        try:
            import pynvml
        except ImportError:
            text = "the package nvidia-ml-py is not installed (pip install nvidia-ml-py)"
            raise OSError(text) from None
        self._nvml: types.ModuleType = pynvml
        pynvml.nvmlLib = opened
        self.call("Init")

    def call(self, function: str, *arguments: Any) -> Any:
        """Call nvml`function`. NvmlError where it fails."""
        try:
            return getattr(self._nvml, f"nvml{function}")(*arguments)
        except self._nvml.NVMLError as error:
            text = self._nvml.nvmlErrorString(error.value)
            raise NvmlError(error.value, str(text)) from None

    def ask(self, function: str, *arguments: Any) -> Any:
        """Call nvml`function`; None where the GPU or the driver lacks it."""
        try:
            return self.call(function, *arguments)
        except NvmlError as error:
            if error.code not in ABSENT:
                raise
            return None

    def count(self) -> int:
        return self.call("DeviceGetCount")

    def handle(self, index: int) -> Any:
        return self.call("DeviceGetHandleByIndex", index)

    def handle_of(self, uuid: str) -> Any:
        return self.call("DeviceGetHandleByUUID", uuid)

    def describe(self, handle: Any) -> dict[str, Any]:
        """name, uuid, pci, memory, holders, utilization, temperature, power, clocks, ecc, rows,
        pcie, nvlinks, modes. Bytes, percent, degrees Celsius, watts, MHz."""

        def get(function: str, *more: Any) -> Any:
            return self.ask(f"DeviceGet{function}", handle, *more)

        def watts(function: str) -> float | None:
            milliwatts = get(function)
            return None if milliwatts is None else milliwatts / 1000

        pci, memory, ecc = get("PciInfo"), get("MemoryInfo"), get("EccMode")
        use, mig, rows = get("UtilizationRates"), get("MigMode"), get("RemappedRows")
        clocks = {name: get("ClockInfo", kind) for name, kind in CLOCKS.items()}
        clocks |= {f"{name}_max": get("MaxClockInfo", kind) for name, kind in CLOCKS.items()}
        replaced = None
        if rows is not None:
            replaced = dict(zip(("correctable", "uncorrectable", "pending", "failed"), rows))
        elif (pending := get("RetiredPagesPendingStatus")) is not None:  # before Ampere
            replaced = {"pending": pending}
        pcie = {}
        for name in ("generation", "width"):
            pcie[name] = get(f"CurrPcieLink{name.title()}")
            pcie[f"{name}_max"] = get(f"MaxPcieLink{name.title()}")
        links = [get("NvLinkState", number) for number in range(LINKS)]
        return {
            "name": get("Name"),
            "uuid": get("UUID"),
            "pci": None if pci is None else text_of(pci.busId).lower(),
            "memory": memory
            and {name: getattr(memory, name) for name in ("total", "free", "used")},
            "utilization": None if use is None else use.gpu,
            "temperature": get("Temperature", 0),
            "power": watts("PowerUsage"),
            "power_limit": watts("EnforcedPowerLimit"),
            "power_default": watts("PowerManagementDefaultLimit"),
            "clocks": clocks | {"reasons": get("CurrentClocksThrottleReasons")},
            "ecc": ecc
            and {
                "on": bool(ecc[0]),
                "uncorrected": get("TotalEccErrors", UNCORRECTED, SINCE_DRIVER),
                "uncorrected_ever": get("TotalEccErrors", UNCORRECTED, EVER),
            },
            "rows": replaced,
            "pcie": pcie,
            "nvlinks": [state for state in links if state is not None],  # 1: up, 0: down
            "modes": {
                "persistence": get("PersistenceMode"),
                "compute": get("ComputeMode"),
                "mig": mig[0] if mig else None,
            },
            "holders": self.holders(handle),
        }

    def holders(self, handle: Any) -> list[dict[str, Any]]:
        """The processes that have a context: pid, name, bytes, mps (true if through MPS)."""
        found: dict[int, dict[str, Any]] = {}
        for kind in ("Compute", "Graphics", "MPSCompute"):
            for process in self.ask(f"DeviceGet{kind}RunningProcesses_v3", handle) or []:
                found[process.pid] = {
                    "pid": process.pid,
                    "name": name_of(process.pid),
                    "bytes": process.usedGpuMemory,
                    "mps": kind == "MPSCompute",
                }
        return list(found.values())


def text_of(value: bytes | str) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def name_of(pid: int) -> str:
    """The command line of a process; empty if it is not visible."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return ""
    return b" ".join(words).decode(errors="replace").strip()[:120]
