"""The state of the GPUs by nvidia-smi, which makes no context there. Fields are those of
`nvidia-smi --help-query-gpu`."""

from __future__ import annotations

import os
import re

from needle.diagnose.parts import failed, show, trying
from needle.kernels.toolkit import nvidia_smi

RESET = (
    "end what runs on it, then `nvidia-smi --gpu-reset`, or a reboot; `dmesg | grep Xid` has more"
)
REPLACE = "have the GPU replaced; until then `--device` or CUDA_VISIBLE_DEVICES leaves it out"
COOL = "see to its cooling: fans, dust, the temperature of the room (nvidia-smi -q -d TEMPERATURE)"
POWER = "see to its power supply and cables (nvidia-smi -q -d POWER,PERFORMANCE)"
FREE = 0.1  # of the memory: less is a failure
STATE = (
    "%(name)s, %(memory.used)s of %(memory.total)s MiB in use, busy %(utilization.gpu)s %%, "
    "%(temperature.gpu)s C, %(power.draw)s of %(power.limit)s W, %(clocks.sm)s of "
    "%(clocks.max.sm)s MHz"
)
# Fields that are set, or counters above 0, where a GPU is broken: the text and the remedy.
BROKEN = {
    "ecc.errors.uncorrected.volatile.total": ("memory errors: its results may be wrong", RESET),
    "retired_pages.pending": ("memory waits to be retired", RESET),
    "remapped_rows.pending": ("memory waits to be remapped", RESET),
    "remapped_rows.failure": ("its memory is broken beyond its spares", REPLACE),
    "clocks_event_reasons.sw_thermal_slowdown": ("it is too hot, and slowed down", COOL),
    "clocks_event_reasons.hw_thermal_slowdown": ("it is too hot, and slowed down by half", COOL),
    "clocks_event_reasons.hw_power_brake_slowdown": ("its power supply slows it down", POWER),
}
NOTED = {
    ("ecc.mode.current", "Disabled"): "ECC is off: a flipped bit is not seen",
    ("mig.mode.current", "Enabled"): "MIG is on: CUDA sees one part of the GPU",
    ("persistence_mode", "Disabled"): "persistence mode is off: each first use waits",
    ("compute_mode", "Exclusive_Process"): "its compute mode takes one process alone",
    ("compute_mode", "Prohibited"): "its compute mode takes no process at all",
}
FIELDS = ["index", "uuid", "memory.free", *re.findall(r"%\((.+?)\)", STATE), *BROKEN]
FIELDS += dict.fromkeys(field for field, _ in NOTED)
HOLDERS = ["gpu_uuid", "pid", "used_memory", "process_name"]


def holders(uuid: str) -> list[str]:
    """Return the processes with a context on a GPU, as far as they are visible from here."""
    rows = [row for row in nvidia_smi("compute-apps", HOLDERS) if row["gpu_uuid"] == uuid]
    return [f"process {r['pid']} ({r['process_name']}): {r['used_memory']} MiB" for r in rows]


def examine(count: str, wanted: str) -> None:
    """count: of the GPUs that CUDA counts. wanted: the UUID of the only one to examine; empty:
    all."""
    trying("nvidia-smi")
    rows = nvidia_smi("gpu", FIELDS)
    if not rows:
        show("GPUs", "note: their state is not known: nvidia-smi is not there, or shows none")
    for row in rows:
        if wanted in ("", row["uuid"]):
            examine_gpu(row)
    has_parts = any(row.get("mig.mode.current") == "Enabled" for row in rows)
    if len(rows) > int(count) > 0 and not has_parts and "CUDA_VISIBLE_DEVICES" not in os.environ:
        failed("GPUs", f"nvidia-smi shows {len(rows)} GPUs, CUDA {count}", RESET)


def examine_gpu(row: dict[str, str]) -> None:
    """Show the state of a GPU and what is wrong with it."""
    label, free, total = f"GPU {row['index']}", row["memory.free"], row["memory.total"]
    show(label, f"ok: {STATE % row}")
    for field, (text, remedy) in BROKEN.items():
        value = row.get(field, "")
        if value in ("Yes", "Active") or (value.isdigit() and int(value) > 0):
            failed(label, f"{text} ({field}: {value})", remedy)
    for (field, value), text in NOTED.items():
        if row.get(field) == value:
            show(label, f"note: {text}")
    held = holders(row["uuid"])
    if free.isdigit() and int(free) < FREE * int(total):
        known = "; ".join(held) or "no process is visible from here (another container?)"
        text = f"{free} of {total} MiB are free: {known}"
        failed(label, text, "end the processes that hold it, or take another device")
    for one in held:
        show(label, f"note: {one}")
