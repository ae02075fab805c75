"""Parts of the diagnosis in processes of their own (child.py): one that dies or hangs costs a line,
which says what it tried last."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from needle.diagnose.report import FAILED, RESULT, TRYING, failure
from needle.processes import signal_name

CHILD = Path(__file__).with_name("child.py")
KILL_SECONDS = 2.0  # for a process to be gone
DIED = "look at the lines above, and in the kernel's log (dmesg) for an Xid or a killed process"
HANGS = "end other programs on it and run this again; `nvidia-smi --gpu-reset`, or a reboot"


def run(
    label: str, *words: str, seconds: float, say: Callable[[str], object], **env: str
) -> tuple[int, Any]:
    """Run a part to its end or its deadline, and say its lines. Return the number of failures, and
    what the part told (None: nothing).

    label: of the lines about its process; words: the part's name and arguments; env: variables."""
    failures, told, at = 0, None, "its start"
    process = subprocess.Popen(
        [sys.executable, "-u", str(CHILD), str(os.getpid()), label, *words],
        env=os.environ | env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
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
        code = process.poll()
    finally:
        with contextlib.suppress(ProcessLookupError):  # it and those that it has started
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):  # it waits inside a driver
            process.wait(KILL_SECONDS)
        process.stdout.close()
    if code is None:
        say(failure(label, f"{at} hangs: killed after {seconds:g} s", HANGS))
    elif code:
        how = f"was killed by {signal_name(-code)}" if code < 0 else f"ended with {code}"
        say(failure(label, f"its process {how} at {at}", DIED))
    return failures + (code != 0), told


def lines(process: subprocess.Popen[bytes], end: float) -> Iterator[str]:
    """Yield the lines of a process as they come, until it has ended or the deadline."""
    output, rest = process.stdout.fileno(), b""
    while select.select([output], [], [], max(0.0, end - time.monotonic()))[0]:
        data = os.read(output, 1 << 16)
        *whole, rest = (rest + data).split(b"\n")
        if not data:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(KILL_SECONDS)
            whole.append(rest)
        yield from (line.decode(errors="replace") for line in whole if line)
        if not data:
            return
