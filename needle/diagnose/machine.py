"""The GPUs by their driver, without opening one: the figures of `Nvml.describe` that are wrong or
explain others, and the Xid errors in the kernel's log. Numbers of errors, of reasons for clocks and
of Xids are those of NVIDIA's documents."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from needle import _C
from needle.diagnose.examination import Reporter
from needle.diagnose.facts import INSTALL_DRIVER, ask_cuda, driver_version, gigabytes
from needle.diagnose.finding import Finding
from needle.nvml import Nvml, NvmlError

RESET = "end what runs on it, then `nvidia-smi --gpu-reset -i {index}`, or start the machine anew"
REPLACE = "have the GPU replaced; until then `--device` or CUDA_VISIBLE_DEVICES leaves it out"
COOL = (
    "look after its cooling: fans, dust, the temperature of the room; nvidia-smi -q -d TEMPERATURE"
)
POWER = "look after its power supply and cables: nvidia-smi -q -d POWER,PERFORMANCE"
# Errors of NVML and their remedies.
ERRORS = {
    9: "load the driver's kernel module: modprobe nvidia; in a container: start it with --gpus all",
    15: "it has fallen off the bus: start the machine anew; if it comes back, see to its seat, "
    "power and cooling",
    16: RESET,
    18: "the driver was updated under a running kernel: start the machine anew",
}
# Bits of nvmlClocksEventReasons: why clocks are below their maximum, and the remedy of a fault.
REASONS = {
    0x2: ("its clocks are set by a user (nvidia-smi -rac, -rgc give them back)", ""),
    0x4: ("it runs at its power limit", ""),
    0x8: ("the hardware slows its clocks down", POWER),
    0x10: ("its clocks follow a group's slowest", ""),
    0x20: ("it is too hot: the driver slows its clocks down", COOL),
    0x40: ("it is too hot: the hardware halves its clocks", COOL),
    0x80: ("the power supply asks for less: the hardware halves its clocks", POWER),
    0x100: ("its clocks are limited by the display's", ""),
}
COMPUTE_MODES = {1: "takes one thread's context alone", 3: "takes one process alone"}
FREE = 0.1  # of the memory: less is a failure

XID = re.compile(r"NVRM: Xid \(PCI:([0-9a-fA-F:.]+)\): (\d+), ?(.*)")
XIDS = "https://docs.nvidia.com/deploy/xid-errors"
# Xid errors that programs cause.
PROGRAMS = {
    13: "a kernel's illegal instruction or access",
    31: "a kernel's access to memory that is not allocated",
    43: "a process whose fault the GPU stopped",
    45: "a process that was ended while it used the GPU",
    69: "a kernel's illegal command",
    109: "a kernel that would not give the GPU up",
}
# Xid errors of the GPU, its links or its firmware, and their remedies.
HARDWARE = {
    48: ("an uncorrected memory error", RESET),
    62: ("a stop of its own processor", RESET),
    63: ("memory that waits to be replaced", RESET),
    64: ("memory that could not be replaced", REPLACE),
    74: ("an error of an NVLink", RESET),
    79: ("it has fallen off the bus", "start the machine anew; see to its power, seat, cooling"),
    92: ("many corrected memory errors", REPLACE),
    94: ("a memory error that ended one program", RESET),
    95: ("a memory error that may have reached every program", RESET),
    119: ("its firmware did not answer", RESET),
    120: ("an error of its firmware", RESET),
    140: ("an unrecovered memory error", RESET),
    143: ("it could not be started", REPLACE),
    149: ("an error of an NVLink", RESET),
}


def examine(reporter: Reporter) -> None:
    """The driver, each GPU that it sees, the kernel's log, and the devices that CUDA counts."""
    reporter.at("asking which CUDA the driver speaks")
    reporter.fact("driver", driver_version())
    gpus = examine_gpus(reporter)
    examine_log(reporter, gpus)
    reporter.at("counting the GPUs by CUDA")
    cuda = ask_cuda()
    devices = [device for device in _C.all_devices() if device.enabled() and not device.is_host]
    reporter.fact("cuda", cuda | {"count": len(devices)})
    uuids = [device.properties()["uuid"] for device in devices]
    reporter.fact("uuids", uuids)
    compare(reporter, gpus, uuids)


def examine_gpus(reporter: Reporter) -> list[dict[str, Any]]:
    """The figures of each GPU, reported as the fact `gpus`. Findings name `GPU N` by NVML's
    number."""
    reporter.at("opening NVML (libnvidia-ml.so.1)")
    gpus: list[dict[str, Any]] = []
    try:
        nvml = Nvml()
        reporter.fact("release", nvml.ask("SystemGetDriverVersion"))
        for index in range(nvml.count()):
            reporter.at(f"asking the driver about GPU {index}")
            gpus.append(state_of(reporter, nvml, index))
    except OSError as error:
        if present := on_the_bus():
            text = f"{present} of NVIDIA on the PCI bus, whose state is not known: {error}"
            remedy = "" if driver_version() else f"{INSTALL_DRIVER}; in a container: --gpus all"
            reporter.note("driver", text, remedy)
    except NvmlError as error:
        remedy = ERRORS.get(error.code, INSTALL_DRIVER)
        reporter.failed("driver", f"the driver does not answer: {error}", remedy)
    reporter.fact("gpus", gpus)
    if gpus and mps_runs():
        text = "MPS is on: a fault of one process ends all that share the GPU through it"
        reporter.note("MPS", text)
    return gpus


def state_of(reporter: Reporter, nvml: Nvml, index: int) -> dict[str, Any]:
    """The figures of a GPU, with their findings."""
    where = f"GPU {index}"
    try:
        gpu = {"index": index, **nvml.describe(nvml.handle(index))}
    except NvmlError as error:
        remedy = ERRORS.get(error.code, RESET).format(index=index)
        text = f"the driver cannot tell its state: {error}"
        reporter.find(Finding("failed", where, "state", text, remedy))
        return {"index": index, "error": str(error)}
    gpu["holders"] = [one for one in gpu["holders"] if not is_ours(one["pid"])]
    reporter.find(Finding("ok", where, "state", in_words(gpu)), *judge(gpu))
    return gpu


def compare(reporter: Reporter, gpus: list[dict[str, Any]], uuids: list[str]) -> None:
    """Compare the devices that CUDA counts with the GPUs of the driver."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    known = [gpu["uuid"] for gpu in gpus if gpu.get("uuid")]
    has_parts = any(gpu.get("modes", {}).get("mig") for gpu in gpus)
    if uuids and not has_parts and not set(known) <= set(uuids):
        text = f"the driver sees {len(known)} GPUs, CUDA {len(uuids)}"
        if hidden is None:
            reporter.failed("count", text, RESET.format(index="N"))
        else:
            reporter.note("count", f"{text}: CUDA_VISIBLE_DEVICES={hidden}")


def in_words(gpu: dict[str, Any]) -> str:
    """Name and state in a line, without unknown figures."""
    memory, clocks, limit = gpu["memory"], gpu["clocks"], gpu["power_limit"]
    parts = [gpu["name"]]
    if memory:
        parts.append(f"{gigabytes(memory['used'])} of {gigabytes(memory['total'])} in use")
    if gpu["utilization"] is not None:
        parts.append(f"busy {gpu['utilization']} %")
    if gpu["temperature"] is not None:
        parts.append(f"{gpu['temperature']} C")
    if gpu["power"] is not None:
        parts.append(f"{gpu['power']:.0f}" + (f" of {limit:.0f}" if limit else "") + " W")
    if clocks["sm"] is not None:
        parts.append(f"{clocks['sm']} of {clocks['sm_max']} MHz")
    if gpu["ecc"]:
        parts.append("ECC on" if gpu["ecc"]["on"] else "ECC off")
    if gpu["nvlinks"]:
        parts.append(f"{sum(gpu['nvlinks'])} NVLinks")
    if gpu["pcie"]["generation_max"]:
        parts.append(f"PCIe {gpu['pcie']['generation_max']} x{gpu['pcie']['width_max']}")
    return ", ".join(part for part in parts if part)


def judge(gpu: dict[str, Any]) -> Iterable[Finding]:
    """The findings about the figures of one GPU."""
    where, index = f"GPU {gpu['index']}", gpu["index"]

    def failed(what: str, text: str, remedy: str) -> Finding:
        return Finding("failed", where, what, text, remedy.format(index=index))

    def note(what: str, text: str) -> Finding:
        return Finding("note", where, what, text)

    ecc, rows = gpu["ecc"] or {}, gpu["rows"] or {}
    if ecc.get("uncorrected"):
        text = f"ECC: {ecc['uncorrected']} uncorrected memory errors since the driver was loaded"
        yield failed("ECC", f"{text}: results on it may be wrong", RESET)
    elif ecc.get("uncorrected_ever"):
        yield note("ECC", f"ECC: {ecc['uncorrected_ever']} uncorrected memory errors so far")
    if ecc and not ecc["on"]:
        yield note("ECC", "ECC is off: a flipped bit is not seen")
    if rows.get("failed"):
        text = "row remapping has failed: memory is broken beyond its spares"
        yield failed("rows", text, REPLACE)
    if rows.get("pending"):
        yield failed("rows", "memory waits to be replaced (row remapping or retirement)", RESET)
    yield from throttling(gpu["clocks"]["reasons"], where)
    yield from holders(gpu, where)
    limit, usual = gpu["power_limit"], gpu["power_default"]
    if limit and usual and limit < 0.99 * usual:
        text = f"its power is limited to {limit:.0f} of {usual:.0f} W"
        yield note("power", f"{text}: nvidia-smi -pl {usual:.0f} gives it back")
    pcie = gpu["pcie"]
    if pcie["width"] and pcie["width_max"] and pcie["width"] < pcie["width_max"]:
        text = f"PCIe x{pcie['width']} instead of x{pcie['width_max']}: see to its seat"
        yield note("PCIe", text)
    if 0 in gpu["nvlinks"] and 1 in gpu["nvlinks"]:
        up = f"{sum(gpu['nvlinks'])} of {len(gpu['nvlinks'])}"
        yield note("NVLink", f"{up} NVLinks are up: right where not all of them are connected")
    modes = gpu["modes"]
    if modes["mig"]:
        yield note("MIG", "MIG is on: CUDA sees one part of the GPU")
    if modes["persistence"] == 0:
        yield note("persistence", "persistence mode is off: each first use waits for the driver")
    if modes["compute"] == 2:
        text = "its compute mode takes no computing at all"
        yield failed("compute mode", text, "nvidia-smi -i {index} -c DEFAULT")
    elif modes["compute"]:
        yield note("compute mode", f"its compute mode {COMPUTE_MODES[modes['compute']]}")


def throttling(reasons: int | None, where: str, when: str = "") -> Iterable[Finding]:
    """The findings about the bits of nvmlClocksEventReasons. when: as in ", under load"."""
    for bit, (text, remedy) in REASONS.items():
        if (reasons or 0) & bit:
            level = "failed" if remedy else "note"
            yield Finding(level, where, "throttling", text + when, remedy)


def holders(gpu: dict[str, Any], where: str) -> Iterable[Finding]:
    """The processes that hold memory: a failure where less than a tenth of it is free."""
    memory = gpu["memory"]
    named = [
        f"process {one['pid']} ({one['name'] or 'not visible from here'})"
        + (f" holds {gigabytes(one['bytes'])}" if one["bytes"] else "")
        + (" through MPS" if one["mps"] else "")
        for one in sorted(gpu["holders"], key=lambda one: -(one["bytes"] or 0))
    ]
    if memory and memory["free"] < FREE * memory["total"]:
        text = f"{gigabytes(memory['free'])} of {gigabytes(memory['total'])} are free"
        known = "; ".join(named) or "no process is visible from here (another container?)"
        remedy = "end the processes that hold it, or take another device"
        yield Finding("failed", where, "memory", f"{text}: {known}", remedy)
        return
    for text in named:
        yield Finding("note", where, "memory", text)
    if gpu["utilization"] == 100 and not named:
        text = (
            "busy 100 %, and no process is visible: one that was killed inside a kernel (a fresh "
            "process clears that), or of another container"
        )
        yield Finding("note", where, "utilization", text)


def is_ours(pid: int) -> bool:
    """True if a process belongs to this diagnosis."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return False
    return int(fields[1]) == os.getppid()


def on_the_bus() -> str:
    """The number of NVIDIA's GPUs on the PCI bus in words; empty for none."""
    count = 0
    for device in Path("/sys/bus/pci/devices").glob("*"):
        try:
            maker, kind = (device / "vendor").read_text(), (device / "class").read_text()
        except OSError:
            continue
        count += maker.strip() == "0x10de" and kind.startswith("0x03")
    return "" if count == 0 else "a GPU" if count == 1 else f"{count} GPUs"


def mps_runs() -> bool:
    folder = Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY") or "/tmp/nvidia-mps")
    try:
        pid = int((folder / "nvidia-cuda-mps-control.pid").read_text())
    except (OSError, ValueError):
        return False
    return Path(f"/proc/{pid}").exists()


# ---- Xid errors ---------------------------------------------------------------------------------


def examine_log(reporter: Reporter, gpus: list[dict[str, Any]]) -> None:
    """Findings about the Xid errors of these GPUs (of all, if they are not known) since the machine
    started."""
    if not gpus and not on_the_bus():
        return
    reporter.at("reading the kernel's log for Xid errors")
    log, problem = kernel_log()
    if log is None:
        text = f"Xid errors are not known: {problem}; as root: dmesg | grep Xid"
        reporter.note("Xid", text)
        return
    reporter.find(*judge_log(log, gpus))


def kernel_log() -> tuple[str | None, str]:
    """(the kernel's messages, ""), or (None, why they cannot be read)."""
    problems = []
    for command in (["dmesg"], ["journalctl", "-k", "-b", "--no-pager", "-o", "cat"]):
        try:
            done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=2)
        except (OSError, subprocess.TimeoutExpired) as error:
            problems.append(f"{command[0]}: {error}")
            continue
        if done.returncode == 0 and done.stdout.strip():
            return done.stdout.decode(errors="replace"), ""
        said = done.stderr.decode(errors="replace").strip() or "it shows nothing"
        problems.append(f"{command[0]}: {said[:100]}")
    return None, "; ".join(problems)


def judge_log(log: str, gpus: list[dict[str, Any]]) -> Iterable[Finding]:
    """A finding for each Xid number of each GPU: how often it came, and its last message."""

    def place(pci: str) -> str:
        """NVML's 00000000:3b:00.0 and the log's 0000:3b:00 as one."""
        domain, _, rest = pci.lower().partition(":")
        return f"{int(domain or '0', 16):x}:{rest.partition('.')[0]}"

    names = {place(gpu["pci"]): f"GPU {gpu['index']}" for gpu in gpus if gpu.get("pci")}
    seen: dict[tuple[str, int], list[str]] = {}
    for pci, number, message in XID.findall(log):
        where = names.get(place(pci)) if names else f"GPU at {pci}"
        if where:
            seen.setdefault((where, int(number)), []).append(message.strip())
    for (where, number), messages in seen.items():
        times = "once" if len(messages) == 1 else f"{len(messages)} times"
        cause, remedy = HARDWARE.get(number, (PROGRAMS.get(number, f"see {XIDS}"), ""))
        text = f"Xid {number} {times} since the machine started: {cause}"
        text += f" (last: {messages[-1][:120]})"
        level = "failed" if remedy else "note"
        remedy = remedy.format(index=where.removeprefix("GPU "))
        yield Finding(level, where, "Xid", text, remedy)
