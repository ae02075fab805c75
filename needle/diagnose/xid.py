"""Xid errors: what the NVIDIA driver wrote into the kernel's log about faults of its GPUs. Numbers
as in NVIDIA's "Xid Errors" document."""

from __future__ import annotations

import errno
import os
import re
import shutil
import subprocess
from collections.abc import Iterable
from typing import Any

from needle.diagnose.children import Teller
from needle.diagnose.finding import Finding
from needle.diagnose.gpus import REPLACE, RESET

LINE = re.compile(r"NVRM: Xid \(PCI:([0-9a-fA-F:.]+)\): (\d+), ?(.*)")
# Faults of the programs that ran: a bad kernel, a process that was killed.
PROGRAMS = {
    13: "a kernel's illegal instruction or access",
    31: "a kernel's access to memory that nobody owns",
    43: "a process whose fault the GPU stopped",
    45: "a process that was ended while it used the GPU",
    69: "a kernel's illegal command",
    109: "a kernel that would not give the GPU up",
}
# Faults of the GPU, its links or its firmware, and what helps.
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
LIST = "https://docs.nvidia.com/deploy/xid-errors"


def examine(teller: Teller, gpus: list[dict[str, Any]]) -> None:
    """Findings about the Xid errors of these GPUs (of all, where their places are not known) since
    the machine started."""
    if not gpus:
        return
    teller.at("reading the kernel's log for Xid errors")
    text, problem = kernel_log()
    if text is None:
        teller.note("Xid", f"Xid errors are not known: {problem}; as root: dmesg | grep Xid")
        return
    for finding in judge(text, gpus):
        teller.find(finding)


def kernel_log() -> tuple[str | None, str]:
    """(the kernel's messages, ""), or (None, why they cannot be read)."""
    try:
        return read_kmsg(), ""
    except OSError as error:
        problem = f"/dev/kmsg: {error.strerror}"
    journal = shutil.which("journalctl")
    if journal is None:
        return None, problem
    try:
        done = subprocess.run(
            [journal, "-k", "-b", "--no-pager", "-o", "cat"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=2,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return None, f"{problem}; journalctl: {error}"
    if done.returncode or not done.stdout.strip():  # it is silent about what it may not show
        return None, f"{problem}; journalctl shows nothing"
    return done.stdout.decode(errors="replace"), ""


def read_kmsg(path: str = "/dev/kmsg") -> str:
    """All that is in the kernel's ring, a record a read. OSError where it may not be read."""
    records = []
    file = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        while True:
            try:
                record = os.read(file, 1 << 14)
            except BlockingIOError:
                break
            except OSError as error:
                if error.errno != errno.EPIPE:  # that record was overwritten meanwhile
                    raise
                continue
            if not record:
                break
            records.append(record)
    finally:
        os.close(file)
    return b"\n".join(records).decode(errors="replace")


def place(pci: str) -> str:
    """NVML's 00000000:3b:00.0 and the log's 0000:3b:00 as one."""
    domain, _, rest = pci.lower().partition(":")
    return f"{int(domain or '0', 16):x}:{rest.partition('.')[0]}"


def judge(text: str, gpus: list[dict[str, Any]]) -> Iterable[Finding]:
    """A finding for each number that came, of each GPU: how often, and its last message."""
    names = {place(gpu["pci"]): f"GPU {gpu['index']}" for gpu in gpus if gpu.get("pci")}
    seen: dict[tuple[str, int], list[str]] = {}
    for pci, number, words in LINE.findall(text):
        where = names.get(place(pci)) if names else f"GPU at {pci}"
        if where:
            seen.setdefault((where, int(number)), []).append(words.strip())
    for (where, number), messages in seen.items():
        times = "once" if len(messages) == 1 else f"{len(messages)} times"
        told = f"Xid {number} {times} since the machine started: "
        last = f" (last: {messages[-1][:120]})"
        if number in HARDWARE:
            cause, remedy = HARDWARE[number]
            remedy = remedy.format(index=where.removeprefix("GPU "))
            yield Finding("failed", where, "Xid", told + cause + last, remedy)
        else:
            cause = PROGRAMS.get(number, f"see {LIST}")
            yield Finding("note", where, "Xid", told + cause + last)
