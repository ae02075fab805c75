"""Start a command as ranks on this machine, one for each GPU, without a launcher.

Each process gets torchrun's variables, NEEDLE_LAUNCH, which names this start, and NEEDLE_RANKS_KEY,
the secret of its ranks. Rank 0 writes where this process does. Of the others only stderr is
printed, each line as `rank 3: ...`.

Only rank 0 has the heartbeat of a supervisor above this process (needle/heartbeat.py), since all
ranks do the steps together.

SIGINT, SIGTERM, SIGHUP and SIGABRT (a supervisor's request for stacks) are passed on to each rank.
After one rank has failed, the others learn of it by the control channel and have its deadline to
end by themselves; then they get SIGTERM, then SIGKILL. All end with this process.

The exit code is 0 if all ranks end with 0; 75 (os.EX_TEMPFAIL) if one exits with it, or is killed
by a signal that was not passed on, since a restart may help; else that of the first that failed.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence

from needle.files import printable
from needle.heartbeat import FILE
from needle.processes import Child, collecting, signal_name

DEADLINE = 60.0  # of the control channel
MARGIN = 10.0  # seconds more: for a rank to reach its next collective, and to end after SIGTERM
TICK = 0.1  # seconds between two looks at the processes
LONGEST_LINE = 1 << 16  # bytes


def run(command: Sequence[str], count: int, deadline: float = DEADLINE) -> int:
    """Start `command` as `count` ranks, wait for them, and return the exit code. `deadline`: of
    their control channel, in seconds. 127 and 126, and a message, if the command is missing or
    cannot be run."""
    return _Launch(command, deadline).run(count)


class _Launch:
    def __init__(self, command: Sequence[str], deadline: float) -> None:
        self.command, self.deadline = list(command), deadline
        self.running: dict[int, Child] = {}
        self.failed: list[int] = []  # exit codes, in the order of the failures
        self.patience: float | None = None  # until then the others may end by themselves
        self.signals: list[int] = []  # received and not passed on yet
        self.passed_on: set[int] = set()
        self.lines: dict[int, bytes] = {}  # unfinished lines of stderr, by rank

    def run(self, count: int) -> int:
        with (
            collecting(self.signals, signal.SIGINT, signal.SIGTERM, signal.SIGABRT),
            selectors.DefaultSelector() as selector,
            contextlib.ExitStack() as stack,
        ):
            try:
                for rank, environ in enumerate(environments(count)):
                    heard = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
                    child = Child(self.command, environ, **(heard if rank else {}))
                    stack.enter_context(child)
                    self.running[rank] = child
                    if rank:
                        stderr = stack.enter_context(child.process.stderr)
                        os.set_blocking(stderr.fileno(), False)
                        selector.register(stderr, selectors.EVENT_READ, rank)
            except OSError as error:
                say(f"{self.command[0]}: {error.strerror}")
                return 127 if isinstance(error, FileNotFoundError) else 126
            while self.running:
                for key, _ in selector.select(TICK):
                    if not self._print_from(key.data, key.fd):
                        selector.unregister(key.fileobj)
                self._pass_on()
                self._look()
            for key in selector.get_map().values():  # a grandchild may hold the pipe open
                self._print_from(key.data, key.fd)
                self._print_lines(key.data, b"\n")
        if os.EX_TEMPFAIL in self.failed:
            return os.EX_TEMPFAIL
        return self.failed[0] if self.failed else 0

    def _pass_on(self) -> None:
        while self.signals:
            number = self.signals.pop(0)
            if number == signal.SIGTSTP:  # Ctrl-Z, until fg or bg
                self._send(signal.SIGSTOP)
                os.kill(os.getpid(), signal.SIGSTOP)
                self._send(signal.SIGCONT)
            else:
                self.passed_on.add(number)
                self._send(number)

    def _send(self, number: int) -> None:
        for child in self.running.values():
            child.signal(number)

    def _take_ended(self) -> dict[int, int]:
        """Remove the ranks that have ended. Return their exit codes."""
        codes = {rank: child.poll() for rank, child in self.running.items()}
        ended = {rank: code for rank, code in codes.items() if code is not None}
        for rank in ended:
            del self.running[rank]
        return ended

    def _look(self) -> None:
        codes = self._take_ended()
        # Of those that ended since the last look, one with os.EX_TEMPFAIL mostly followed another.
        for rank in sorted(codes, key=lambda rank: codes[rank] == os.EX_TEMPFAIL):
            self._ended(rank, codes[rank])
        if self.running and self.patience is not None and time.monotonic() > self.patience:
            self._end_the_rest()

    def _ended(self, rank: int, code: int) -> None:
        if code == 0:
            return
        # The first end is printed. Other ranks print their own reason, so only a kill is reported
        # here; it may be seen late, while the driver frees the memory of the killed process.
        was_killed = code < 0 and -code not in self.passed_on
        if not self.failed or was_killed:
            how = f"was killed by {signal_name(-code)}" if code < 0 else f"ended with code {code}"
            say(f"rank {rank} {how}")
        if not self.failed:
            self.patience = time.monotonic() + self.deadline + MARGIN
        self.failed.append(os.EX_TEMPFAIL if was_killed else 128 - code if code < 0 else code)

    def _end_the_rest(self) -> None:
        for number in (signal.SIGTERM, signal.SIGKILL):
            listed = ", ".join(map(str, self.running))
            say(f"ranks that do not end by themselves ({listed}): {signal_name(number)}")
            self._send(number)
            end = time.monotonic() + MARGIN
            while self.running and time.monotonic() < end:
                time.sleep(TICK / 5)
                self._take_ended()
            if not self.running:
                return
        self.running.clear()  # a process that waits inside a driver may stay for ever

    def _print_from(self, rank: int, pipe: int) -> bool:
        """Print what has arrived of a rank's stderr. Return whether there may be more."""
        try:
            data = os.read(pipe, 1 << 16)
        except BlockingIOError:
            return True
        self._print_lines(rank, data or b"\n")
        return bool(data)

    def _print_lines(self, rank: int, data: bytes) -> None:
        *whole, rest = (self.lines.get(rank, b"") + data).split(b"\n")
        if len(rest) > LONGEST_LINE:
            whole, rest = [*whole, rest], b""
        self.lines[rank] = rest
        for line in whole:
            if line:
                say(line.decode(errors="replace"), f"rank {rank}")


def environments(count: int) -> list[dict[str, str]]:
    """Return the environment of each rank of a start."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]  # if it is taken meanwhile, rank 0 tries the next ones
    shared = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "NEEDLE_LAUNCH": secrets.token_hex(8),
        "NEEDLE_RANKS_KEY": secrets.token_hex(32),
    }
    # Waiting threads spin: all ranks together have no more threads than there are processors.
    shared.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // count)))
    made = [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(count)]
    for environ in made[1:]:
        environ.pop(FILE, None)
    return made


def say(text: str, prefix: str = "needle") -> None:
    """Print a line for people."""
    with contextlib.suppress(OSError):  # the reader is gone
        # One write: print() may write the end separately.
        sys.stderr.write(printable(f"{prefix}: {text}\n"))
        sys.stderr.flush()
