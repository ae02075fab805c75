"""The GPUs as the driver sees them, without opening one: what of their state is wrong, or is to be
known before a number of theirs is believed.

`examine` asks, `judge` says what a GPU's figures (those of `Nvml.describe`) mean.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from needle.diagnose.children import Teller
from needle.diagnose.facts import INSTALL_DRIVER, gigabytes
from needle.diagnose.finding import Finding
from needle.nvml import Nvml, NvmlError

RESET = "end what runs on it, then `nvidia-smi --gpu-reset -i {index}`, or start the machine anew"
REPLACE = "have the GPU replaced; until then `--device` or CUDA_VISIBLE_DEVICES leaves it out"
COOL = (
    "look after its cooling: fans, dust, the temperature of the room; nvidia-smi -q -d TEMPERATURE"
)
POWER = "look after its power supply and cables: nvidia-smi -q -d POWER,PERFORMANCE"
# Errors of NVML that say what is wrong with a GPU or with the driver, and what helps.
ERRORS = {
    9: "load the driver's kernel module: modprobe nvidia; in a container: start it with --gpus all",
    15: "it has fallen off the bus: start the machine anew; if it comes back, see to its seat, "
    "power and cooling",
    16: RESET,
    18: "the driver was updated under a running kernel: start the machine anew",
}
# Bits of nvmlClocksEventReasons: why clocks are below their maximum, and what to do where that is
# no ordinary operation.
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
FREE = 0.1  # of the memory: less is a failure
COMPUTE_MODES = {
    1: "takes one thread's context alone",
    2: "takes no computing at all",
    3: "takes one process alone",
}


def examine(teller: Teller) -> list[dict[str, Any]]:
    """The figures of each GPU, told as the fact `gpus`; findings are about `GPU N`, by NVML's
    number."""
    teller.at("opening NVML (libnvidia-ml.so.1)")
    try:
        nvml = Nvml()
    except OSError as error:
        present = on_the_bus()
        if present:
            text = f"{present} of NVIDIA on the PCI bus, and no driver: {error}"
            teller.note("driver", text, f"{INSTALL_DRIVER}; in a container: --gpus all")
        teller.fact("gpus", [])
        return []
    except NvmlError as error:
        teller.fact("gpus", [])
        remedy = ERRORS.get(error.code, INSTALL_DRIVER)
        teller.failed("driver", f"the driver does not answer: {error}", remedy)
        return []
    teller.fact("release", nvml.text("nvmlSystemGetDriverVersion"))
    gpus = []
    for index in range(nvml.count()):
        teller.at(f"asking the driver about GPU {index}")
        where = f"GPU {index}"
        try:
            gpu = {"index": index, **nvml.describe(nvml.handle(index))}
        except NvmlError as error:
            remedy = ERRORS.get(error.code, RESET).format(index=index)
            text = f"the driver cannot tell its state: {error}"
            teller.find(Finding("failed", where, "state", text, remedy))
            gpus.append({"index": index, "error": str(error)})
            continue
        gpu["holders"] = [one for one in gpu["holders"] if not is_ours(one["pid"])]
        gpus.append(gpu)
        teller.find(Finding("ok", where, "state", in_words(gpu)))
        for finding in judge(gpu):
            teller.find(finding)
    teller.fact("gpus", gpus)
    if gpus and mps_runs():
        text = "MPS is on: a fault of one process ends all that share the GPU through it"
        teller.note("MPS", text)
    return gpus


def compare(teller: Teller, gpus: list[dict[str, Any]], uuids: list[str | None]) -> None:
    """What CUDA counts, with what the driver sees. None: a device that does not tell."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    known = [gpu["uuid"] for gpu in gpus if gpu.get("uuid")]
    lacking = [uuid for uuid in known if uuid not in uuids]
    has_parts = any(gpu.get("modes", {}).get("mig") for gpu in gpus)
    if uuids and None not in uuids and lacking and not has_parts:
        text = f"the driver sees {len(known)} GPUs, CUDA {len(uuids)}"
        if hidden is None:
            teller.failed("count", text, RESET.format(index="N"))
        else:
            teller.note("count", f"{text}: CUDA_VISIBLE_DEVICES={hidden}")


def in_words(gpu: dict[str, Any]) -> str:
    """Name and state in a line; what is not known is left out."""
    memory, clocks = gpu["memory"], gpu["clocks"]
    limit = gpu["power_limit"]
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
    """The findings about one GPU's figures."""
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
        yield note("ECC", f"ECC: {ecc['uncorrected_ever']} uncorrected memory errors in its life")
    if ecc and not ecc["on"]:
        yield note("ECC", "ECC is off: a flipped bit is not seen")
    if rows.get("failed"):
        yield failed(
            "rows", "row remapping has failed: memory is broken beyond its spares", REPLACE
        )
    if rows.get("pending"):
        yield failed("rows", "memory waits to be replaced (row remapping or retirement)", RESET)
    yield from throttling(gpu["clocks"]["reasons"], where)
    yield from held(gpu, where)
    limit, usual = gpu["power_limit"], gpu["power_default"]
    if limit and usual and limit < 0.99 * usual:
        text = f"its power is limited to {limit:.0f} of {usual:.0f} W"
        yield note("power", f"{text}: nvidia-smi -pl {usual:.0f} gives it back")
    pcie = gpu["pcie"]
    if pcie["width"] and pcie["width_max"] and pcie["width"] < pcie["width_max"]:
        yield note(
            "PCIe", f"PCIe x{pcie['width']} instead of x{pcie['width_max']}: see to its seat"
        )
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
    """Of the bits of nvmlClocksEventReasons, those of REASONS. `when`: as in ", under load"."""
    for bit, (text, remedy) in REASONS.items():
        if (reasons or 0) & bit:
            level = "failed" if remedy else "note"
            yield Finding(level, where, "throttling", text + when, remedy)


def held(gpu: dict[str, Any], where: str) -> Iterable[Finding]:
    """Who holds memory; a failure where a tenth of it is not left."""
    memory, holders = gpu["memory"], gpu["holders"]
    who = [
        f"process {one['pid']} ({one['name'] or 'not visible from here'})"
        + (f" holds {gigabytes(one['bytes'])}" if one["bytes"] else "")
        + (" through MPS" if one["mps"] else "")
        for one in sorted(holders, key=lambda one: -(one["bytes"] or 0))
    ]
    if memory and memory["free"] < FREE * memory["total"]:
        text = f"{gigabytes(memory['free'])} of {gigabytes(memory['total'])} are free"
        known = "; ".join(who) or "no process is visible from here (another container?)"
        remedy = "end the processes that hold it, or take another device"
        yield Finding("failed", where, "memory", f"{text}: {known}", remedy)
        return
    for one in who:
        yield Finding("note", where, "memory", one)
    if gpu["utilization"] == 100 and not holders:
        text = (
            "busy 100 %, and no process is visible: one that was killed inside a kernel (a fresh "
            "process clears that), or of another container"
        )
        yield Finding("note", where, "utilization", text)


def is_ours(pid: int) -> bool:
    """Whether a process belongs to this examination."""
    try:
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return False
    return int(words[1]) == os.getppid()


def on_the_bus() -> str:
    """GPUs of NVIDIA that the PCI bus shows, in words; empty where there is none."""
    count = 0
    for device in Path("/sys/bus/pci/devices").glob("*"):
        try:
            maker = (device / "vendor").read_text().strip()
            kind = (device / "class").read_text().strip()
        except OSError:
            continue
        count += maker == "0x10de" and kind.startswith("0x03")
    return "" if count == 0 else "a GPU" if count == 1 else f"{count} GPUs"


def mps_runs() -> bool:
    folder = Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY") or "/tmp/nvidia-mps")
    try:
        pid = int((folder / "nvidia-cuda-mps-control.pid").read_text())
    except (OSError, ValueError):
        return False
    return Path(f"/proc/{pid}").exists()
