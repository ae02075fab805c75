"""Child processes that end with their parent, signals that are passed on to them, and the exit of
programs."""

from __future__ import annotations

import contextlib
import ctypes
import io
import os
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

_prctl = ctypes.CDLL(None).prctl  # looked up here: a forked child must not wait for a lock
_PR_SET_PDEATHSIG = 1
HEARTBEAT = "NEEDLE_HEARTBEAT"  # names the file of a supervisor, needle/training/heartbeat.py


def die_with(parent: int) -> None:
    """Have the kernel kill this process when the thread that started it ends. Exit if its process
    has ended already."""
    _prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def start(command: Sequence[str], **options: Any) -> subprocess.Popen:
    """Start a program in a session of its own, where Ctrl-C of a terminal does not reach it. By
    default it reads nothing. The kernel kills it when the thread that calls this ends. options: as
    of subprocess.Popen. OSError where it cannot be started."""
    parent = os.getpid()
    options = {"stdin": subprocess.DEVNULL, "start_new_session": True, **options}
    return subprocess.Popen(command, preexec_fn=lambda: die_with(parent), **options)


def ends_within(child: subprocess.Popen, seconds: float) -> bool:
    """Wait for the end of a process, at most so long. Return whether it has ended."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(seconds)
    return child.returncode is not None


def kill(child: subprocess.Popen, seconds: float = 2.0) -> None:
    """Kill what `start` started, with its children, as far as they still run, and wait for its end
    at most so long: it may be held in a driver."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    ends_within(child, seconds)


# ---- signals ------------------------------------------------------------------------------------


def pass_on(
    signals: list[int], children: Iterable[subprocess.Popen], instead: int | None = None
) -> int:
    """Send the collected signals to children, `instead` in the place of each. Return the last one,
    or 0."""
    last = 0
    while signals:
        last = signals.pop(0)
        for child in children:
            child.send_signal(instead or last)
    return last


@contextlib.contextmanager
def handling(handle: Callable[[int], object], *numbers: int) -> Iterator[None]:
    """Call `handle` with each of these signals that arrives in the block."""
    before = {one: signal.signal(one, lambda number, frame: handle(number)) for one in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            # None is a handler in C, as the fault handler's, which Python cannot restore.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def collecting(into: list[int], *numbers: int) -> contextlib.AbstractContextManager[None]:
    """Append these signals to `into` as they arrive in the block, and SIGHUP unless it is ignored
    (nohup)."""
    ignores = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return handling(into.append, *numbers, *[signal.SIGHUP] * (not ignores))


def unwound_by_sigterm() -> contextlib.AbstractContextManager[None]:
    """Raise SystemExit at SIGTERM in the block, so that what it made for a while is removed."""
    return handling(lambda number: sys.exit(128 + number), signal.SIGTERM)


def signal_name(number: int) -> str:
    """Return SIGKILL for 9. Real-time signals between the first and the last have no name."""
    return next((one.name for one in signal.Signals if one == number), f"signal {number}")


# ---- the exit of a program ----------------------------------------------------------------------

EXIT_CLOSED_PIPE = 128 + signal.SIGPIPE
EXIT_INTERRUPTED = 128 + signal.SIGINT


def program(main: Callable[[], int | None]) -> int:
    """Run the `main` of a command-line program and return its exit code. Return EXIT_CLOSED_PIPE
    where the reader of its output has closed it, as `| head` does: a shell sees the same of any
    program that SIGPIPE ends. `main` must let that BrokenPipeError pass. Return EXIT_INTERRUPTED
    after a Ctrl-C that `main` does not catch. Print characters that the encoding of stdout lacks
    as escapes."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        try:
            code = main() or 0
        except SystemExit:  # of argparse, after --help
            sys.stdout.flush()
            raise
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        if not _output_is_closed():  # it was another pipe
            raise
        silence()
        return EXIT_CLOSED_PIPE


def command_line(word: str) -> list[str]:
    """Return how this environment spells `needle WORD`."""
    script = Path(sys.executable).with_name("needle")
    if not script.exists():
        return [sys.executable, "-m", "needle", word]
    return ["needle" if shutil.which("needle") == str(script) else str(script), word]


def _output_is_closed() -> bool:
    poll = select.poll()
    for stream in (sys.stdout, sys.stderr):
        poll.register(stream.fileno(), 0)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))


def terminal_bar(**options: Any) -> Any | None:
    """Return tqdm's bar if standard error is a terminal and tqdm is installed, else None."""
    if not sys.stderr.isatty():
        return None
    try:
        from tqdm import tqdm
    except ImportError:
        return None
    return tqdm(dynamic_ncols=True, **options)


def silence() -> None:
    """Send stdout and stderr to /dev/null, so that they raise nothing after the reader is gone."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
