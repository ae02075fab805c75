"""Processes that end with the one that started them, and how programs of the command line end."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

LOOK = 0.02  # seconds between two looks at a process that is to end
REAP = 30.0  # seconds in which what was killed must be gone

_libc = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1


def die_with(parent: int) -> None:
    """The kernel kills this process when the one that started it ends, however it does; also where
    it has already."""
    _libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def spawn(command: Sequence[str], **options: Any) -> subprocess.Popen:
    """`command` in a session of its own, where a terminal's Ctrl-C does not reach it, with nothing
    to read. It dies with this process."""
    parent = os.getpid()
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=lambda: die_with(parent),
        **options,
    )


def wait(
    process: subprocess.Popen, seconds: float, given_up: Callable[[], bool] = lambda: False
) -> bool:
    """Whether the process ended within so many seconds, or before `given_up`."""
    end = time.monotonic() + seconds
    while process.poll() is None and time.monotonic() < end and not given_up():
        time.sleep(LOOK)
    return process.returncode is not None


def kill(process: subprocess.Popen) -> bool:
    """Kills the process with its group; whether it is gone. A process that waits for a driver may
    stay for ever."""
    with contextlib.suppress(ProcessLookupError, PermissionError):  # all of them are gone
        os.killpg(process.pid, signal.SIGKILL)
    return wait(process, REAP)


@contextlib.contextmanager
def collecting(into: list[int], *numbers: int) -> Iterator[None]:
    """In the block these signals are appended to `into` as they come, and SIGHUP and SIGTSTP too,
    where whoever started this process does not have it ignore them (nohup)."""
    wanted = [*numbers]
    for number in (signal.SIGHUP, signal.SIGTSTP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            wanted.append(number)
    collect = lambda number, frame: into.append(number)
    before = {number: signal.signal(number, collect) for number in wanted}
    try:
        yield
    finally:
        for number, handler in before.items():
            # None is a handler in C, as the fault handler's, which Python cannot put back.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def signal_name(number: int) -> str:
    """Real-time signals between the first and the last have no name, but kill as well."""
    return next((one.name for one in signal.Signals if one == number), f"signal {number}")


# ---- the end of a program -----------------------------------------------------------------------

EXIT_CLOSED_PIPE = 128 + signal.SIGPIPE


def program(main: Callable[[], int | None]) -> int:
    """Runs the `main` of a command-line program. Returns its exit code, or EXIT_CLOSED_PIPE when
    the reader of the output has closed it, as `| head` does: a shell sees the same of any program
    that SIGPIPE ends. `main` must let that BrokenPipeError pass."""
    try:
        try:
            code = main() or 0
        except SystemExit:  # of argparse, after --help
            sys.stdout.flush()
            raise
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        if not _output_is_closed():  # it was another pipe
            raise
        silence()
        return EXIT_CLOSED_PIPE


def _output_is_closed() -> bool:
    poll = select.poll()
    for stream in (sys.stdout, sys.stderr):
        poll.register(stream.fileno(), 0)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))


def silence() -> None:
    """Sends stdout and stderr nowhere, where the reader is gone: they raise nothing any more."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
