"""Parts of the diagnosis in processes of their own, and the lines that they print: a label and a
text, which begins with `ok`, `note` or `FAILED` if it is the result of a check.

Two kinds of lines are for the parent and not shown: what a part tries now, which the parent names
if the part dies or hangs there, and the result of a part as JSON.
"""

from __future__ import annotations

import json
import os
import pkgutil
import select
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from needle.files import printable
from needle.processes import ends_within, kill, signal_name, start

# `-c` puts the current folder first on the path: that of a checkout takes its place, or none.
ROOT = str(Path(__file__).parents[2])
CODE = (
    f"import sys; sys.path[:1] = [] if {ROOT!r} in sys.path else [{ROOT!r}]; "
    "from needle.diagnose.parts import child; child(*sys.argv[1:])"
)
END_SECONDS = 2.0  # for a process that has closed its output to end
DIED = "look at the lines above, and in the kernel's log (dmesg) for an Xid or a killed process"
EXPECTED = RuntimeError, MemoryError, OSError, ValueError  # whose message says enough
SEE = "see the lines above, and docs/troubleshooting.md"
HANGS = "end other programs on it and run this again; `nvidia-smi --gpu-reset`, or a reboot"
TRYING, RESULT, FAILED = "... ", "=== ", " FAILED: "
current = "its start"  # what this part tries now


def row(label: str, text: str) -> str:
    return f"{label:<14} {printable(' '.join(text.splitlines()))}"


def failure(label: str, text: str, remedy: str) -> str:
    """Return the line of a failed check. remedy: empty if the text names it."""
    mend = f". To mend it: {remedy}" if remedy else ""
    return row(label, f"{FAILED.strip()} {text.rstrip('.')}{mend}")


def show(label: str, text: str) -> None:
    print(row(label, text), flush=True)


def failed(label: str, text: str, remedy: str = "") -> None:
    print(failure(label, text, remedy), flush=True)


def trying(what: str) -> None:
    global current
    current = what
    print(TRYING + what, flush=True)


def tell(result: Any) -> None:
    print(RESULT + json.dumps(result), flush=True)


# ---- processes ----------------------------------------------------------------------------------


def child(label: str, part: str, *words: str) -> None:
    """Run a part in this process, and end it."""
    try:
        pkgutil.resolve_name(f"needle.diagnose.{part}:examine")(*words)
    except Exception as error:
        if not isinstance(error, EXPECTED):
            traceback.print_exc()
        failed(label, f"{current}: {type(error).__name__}: {error}", SEE)
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
