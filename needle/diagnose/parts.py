"""Parts of the diagnosis in processes of their own: one that dies or hangs costs a line, which says
what it tried last."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from needle.diagnose import report
from needle.diagnose.report import FAILED, RESULT, TRYING, failure
from needle.processes import ends_within, kill, signal_name, start

# `-c` puts the current folder first on the path: that of a checkout takes its place, or none.
ROOT = str(Path(__file__).parents[2])
CODE = (
    f"import sys; sys.path[:1] = [] if {ROOT!r} in sys.path else [{ROOT!r}]; "
    "from needle.diagnose.parts import child; child(*sys.argv[1:])"
)
END_SECONDS = 2.0  # for a process that has closed its output to end
DIED = "look at the lines above, and in the kernel's log (dmesg) for an Xid or a killed process"
HANGS = "end other programs on it and run this again; `nvidia-smi --gpu-reset`, or a reboot"
EXPECTED = RuntimeError, MemoryError, OSError, ValueError  # whose message says enough
SEE = "see the lines above, and docs/troubleshooting.md"


def child(label: str, part: str, *words: str) -> None:
    """Run a part in this process, and end it."""
    from needle.diagnose import device, facts, folder, gpus, ranks, server

    parts = {"device": device, "facts": facts, "folder": folder}
    parts |= {"gpus": gpus, "ranks": ranks, "server": server}
    try:
        parts[part].examine(*words)
    except Exception as error:
        if not isinstance(error, EXPECTED):
            traceback.print_exc()
        report.failed(label, f"{report.current}: {type(error).__name__}: {error}", SEE)
    os._exit(0)  # destructors take time, and may hang


def run(
    label: str, *words: str, seconds: float, say: Callable[[str], object], **env: str
) -> tuple[int, Any]:
    """Run a part to its end or its deadline, and say its lines. Return the number of failures, and
    what the part told (None: nothing).

    label: of the lines about its process; words: the part's name and arguments; env: variables."""
    failures, told, at = 0, None, "its start"
    process = start(
        [sys.executable, "-u", "-c", CODE, label, *words],
        env=os.environ | env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    try:
        for line in lines(process, time.monotonic() + seconds):
            if line.startswith(TRYING):
                at = line.removeprefix(TRYING)
            elif line.startswith(RESULT):
                told = json.loads(line.removeprefix(RESULT))
            else:
                failures += FAILED in line
                say(line)
        ends_within(process, END_SECONDS)
        code = process.returncode
    finally:
        kill(process)
        process.stdout.close()
    if code is None:
        say(failure(label, f"{at} hangs: killed after {seconds:g} s", HANGS))
    elif code:
        how = f"was killed by {signal_name(-code)}" if code < 0 else f"ended with {code}"
        say(failure(label, f"its process {how} at {at}", DIED))
    return failures + (code != 0), told


def lines(process: subprocess.Popen[bytes], end: float) -> Iterator[str]:
    """Yield the lines of a process as they come, until all who write them end, or the deadline."""
    data, rest = b"-", b""
    while data and select.select([process.stdout], [], [], max(0.0, end - time.monotonic()))[0]:
        data = os.read(process.stdout.fileno(), 1 << 16)
        *whole, rest = (rest + data).split(b"\n") if data else (rest, b"")
        yield from (line.decode(errors="replace") for line in whole if line)
