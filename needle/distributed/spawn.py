"""Ranks on this machine: a command started once for each GPU, without a launcher.

Each process gets torchrun's variables, NEEDLE_LAUNCH, a word of this start, and NEEDLE_RANKS_KEY,
the secret by which its ranks know each other. Rank 0 writes where this process does. Of the others
only stderr is heard, each line as `rank 3: ...`.

A heartbeat (needle/heartbeat.py) is rank 0's alone: a supervisor above this process hears one
training, whose steps all ranks do together. The others beat into the void, so that they know that
they are supervised, and end their NEEDLE_SYNC at the same step.

SIGINT, SIGTERM and SIGHUP are passed on to each rank, once for each that comes; so is SIGABRT, by
which a supervisor asks who hangs for its stacks. When a rank fails, the others hear of it by the
control channel: they get its deadline to end by themselves, then SIGTERM, then SIGKILL. They die
with this process, however it ends.

The exit code is 0 where all ranks ended so; 75 where one had it, or was killed by a signal that
nobody passed on, since starting again may help; else that of the first that failed.
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

from needle.heartbeat import PIPE
from needle.processes import Child, collecting, signal_name

DEADLINE = 60.0  # of the control channel
MARGIN = 10.0  # seconds more: for a rank to come to its next collective, and after SIGTERM to end
TICK = 0.1  # seconds between two looks at the processes
LONGEST_LINE = 1 << 16  # bytes
EXIT_AGAIN = 75


def run(command: Sequence[str], count: int, deadline: float = DEADLINE) -> int:
    """Starts `command` as `count` ranks and waits for them; returns the exit code. `deadline` is
    that of their control channel, in seconds. 127 and 126, and a message, where the command is not
    there or cannot be run."""
    return _Launch(command, count, deadline).run()


class _Launch:
    def __init__(self, command: Sequence[str], count: int, deadline: float) -> None:
        self.command, self.count, self.deadline = list(command), count, deadline
        self.children: list[Child] = []
        self.running: dict[int, Child] = {}
        self.failed: list[int] = []  # exit codes, in the order in which ranks failed by themselves
        self.patience: float | None = None  # until then the others may end by themselves
        self.signals: list[int] = []  # that have come, and were not passed on yet
        self.passed_on: set[int] = set()
        self.lines: dict[int, bytes] = {}  # of stderr, not whole yet

    def run(self) -> int:
        with (
            collecting(self.signals, signal.SIGINT, signal.SIGTERM, signal.SIGABRT),
            selectors.DefaultSelector() as selector,
        ):
            try:
                for rank, environ in enumerate(environments(self.count)):
                    self._start(rank, environ, selector)
                while self.running:
                    for key, _ in selector.select(TICK):
                        if not self._repeat(key.data, key.fd):
                            selector.unregister(key.fileobj)
                    self._pass_on()
                    self._look()
                for key in selector.get_map().values():  # last words; a child of theirs may hold
                    self._repeat(key.data, key.fd)  # the pipe open
                    self._say_lines(key.data, b"\n")
            except OSError as error:
                say(f"{self.command[0]}: {error.strerror}")
                return 127 if isinstance(error, FileNotFoundError) else 126
            finally:
                for child in self.children:
                    child.close()
                    if child.process.stderr is not None:
                        child.process.stderr.close()
        return EXIT_AGAIN if EXIT_AGAIN in self.failed else self.failed[0] if self.failed else 0

    def _start(self, rank: int, environ: dict[str, str], selector: selectors.BaseSelector) -> None:
        heard = {} if rank == 0 else {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
        child = Child(self.command, environ, **heard)
        self.children.append(child)
        self.running[rank] = child
        if child.process.stderr is not None:
            os.set_blocking(child.process.stderr.fileno(), False)
            selector.register(child.process.stderr, selectors.EVENT_READ, rank)
            self.lines[rank] = b""

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

    def _look(self) -> None:
        ended = [rank for rank, child in self.running.items() if child.poll() is not None]
        codes = {rank: self.running.pop(rank).poll() for rank in ended}
        # Of those that ended since the last look, who has 75 mostly followed another.
        for rank in sorted(ended, key=lambda rank: codes[rank] == EXIT_AGAIN):
            self._ended(rank, codes[rank])
        if self.running and self.patience is not None and time.monotonic() > self.patience:
            self._end_the_rest()

    def _ended(self, rank: int, code: int) -> None:
        if code == 0:
            return
        # The others say themselves why they follow the first, but for one that was killed: its end
        # may be seen behind theirs, while the driver takes its memory back.
        if not self.failed or (code < 0 and -code not in self.passed_on):
            how = f"was killed by {signal_name(-code)}" if code < 0 else f"ended with code {code}"
            say(f"rank {rank} {how}")
        if not self.failed:
            self.patience = time.monotonic() + self.deadline + MARGIN
        if code < 0:
            code = 128 - code if -code in self.passed_on else EXIT_AGAIN
        self.failed.append(code)

    def _end_the_rest(self) -> None:
        for number in (signal.SIGTERM, signal.SIGKILL):
            listed = ", ".join(map(str, self.running))
            say(f"ranks that do not end by themselves ({listed}): {signal_name(number)}")
            self._send(number)
            end = time.monotonic() + MARGIN
            while self.running and time.monotonic() < end:
                time.sleep(TICK / 5)
                for rank, child in list(self.running.items()):
                    if child.poll() is not None:
                        del self.running[rank]
        self.running.clear()  # a process that waits for a driver may stay for ever

    def _repeat(self, rank: int, pipe: int) -> bool:
        """Says what has come of a rank's stderr; whether there may be more."""
        try:
            data = os.read(pipe, 1 << 16)
        except BlockingIOError:
            return True
        self._say_lines(rank, data or b"\n")
        return bool(data)

    def _say_lines(self, rank: int, data: bytes) -> None:
        *whole, rest = (self.lines[rank] + data).split(b"\n")
        if len(rest) > LONGEST_LINE:
            whole, rest = [*whole, rest], b""
        self.lines[rank] = rest
        for line in whole:
            if line:
                say(line.decode(errors="replace"), f"rank {rank}")


def environments(count: int) -> list[dict[str, str]]:
    """Of each rank of a start."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]  # who takes it meanwhile moves rank 0 to the next
    shared = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "NEEDLE_LAUNCH": secrets.token_hex(8),
        "NEEDLE_RANKS_KEY": secrets.token_hex(32),
    }
    # Threads that wait for work spin: of all ranks together no more than there are processors.
    shared.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // count)))
    made = [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(count)]
    for environ in made[1:]:
        if environ.get(PIPE):
            environ[PIPE] = os.devnull
    return made


def say(text: str, who: str = "needle") -> None:
    """A line for people."""
    with contextlib.suppress(OSError):  # nobody reads it any more
        sys.stderr.write(f"{who}: {text}\n")  # in one piece: print() may write the end by itself
        sys.stderr.flush()
