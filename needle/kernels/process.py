"""Processes of the pool as it sees them: `Process` is one, `Device` keeps some ready on a GPU.

A process does one job and is killed. Others wait meanwhile, with a context and a kernel run, so
that the next job need not wait for a start. A start would disturb what is timed: processes start
while their device is idle, or when none is ready.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from needle.kernels import messages
from needle.kernels.messages import Message
from needle.processes import signal_name

PRINTED_BYTES = 64 << 10
START_SECONDS = 60.0
STALL_SECONDS = 10  # in which a message that has begun goes on
REAP_SECONDS = 5.0  # after SIGKILL, in which a process must be gone
IDLE_SECONDS = 0.05  # after a job, before processes start
STARTS = 2  # that fail in a row before a device is set aside


class Process:
    """A process in a session of its own, its connection, and its output. It is killed with the
    thread that made it (needle.processes.die_with)."""

    def __init__(
        self, command: Sequence[str], environment: dict[str, str], cwd: str | None = None
    ) -> None:
        ours, theirs = socket.socketpair()
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            ours.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", STALL_SECONDS, 0))
        self.output = os.fdopen(os.memfd_create("needle-output"), "rb")
        self.connection = Connection(ours.detach())
        try:
            with theirs:
                self.process = subprocess.Popen(
                    [*command, str(theirs.fileno()), str(os.getpid())],
                    env=environment,
                    cwd=cwd,
                    pass_fds=(theirs.fileno(),),
                    stdin=subprocess.DEVNULL,
                    stdout=self.output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
        except BaseException:
            self.close()
            raise
        self.pid, self.gone = self.process.pid, False

    def ask(
        self, message: Message | None, arrays: Sequence[bytes | np.ndarray], seconds: float
    ) -> tuple[Message, list[bytes]]:
        """Send a message (None: wait for the first one of the process). Return its answer, or
        `timeout`, or `crashed` and how it ended."""
        try:
            if message is not None:
                messages.send(self.connection, message, arrays)
            if self.connection.poll(seconds):
                return messages.receive(self.connection)
            said = f"no answer after {seconds:g} s: the process was killed"
            return {"status": "timeout", "message": said}, []
        except (EOFError, OSError):
            return {"status": "crashed", "message": f"the process of the kernel {self.end()}"}, []

    def end(self, seconds: float = REAP_SECONDS) -> str:
        """Wait for its end, and describe it."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self.process.wait(seconds)
            return f"exited with code {code}" if code >= 0 else f"was ended by {signal_name(-code)}"
        return "closed its connection"

    def printed(self) -> str:
        size = os.fstat(self.output.fileno()).st_size
        text = os.pread(self.output.fileno(), PRINTED_BYTES, 0).decode(errors="replace")
        cut = size - PRINTED_BYTES
        return f"{text}\n[{cut:,} more bytes were printed and cut off]\n" if cut > 0 else text

    def kill(self) -> None:
        """Kill it and its children."""
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    def close(self) -> None:
        self.connection.close()
        self.output.close()


class Device:
    """A GPU with its processes, for one job at a time. `changed` is held for every change here, and
    notified; the devices of a pool share it. Each process has a thread as long as it lives.

    Attributes: number, lost (why no job runs here before a reset, or None), facts (of the GPU, once
    a process has reported them), busy (a job has it), and counts that never fall: faults, started.
    """

    def __init__(
        self, number: int, spares: int, start: Callable[[], Process], changed: threading.Condition
    ) -> None:
        self.number, self.size, self.start, self.changed = number, 1 + spares, start, changed
        self.ready: list[Process] = []
        self.used: list[Process] = []
        self.starting = 0
        self.dying: dict[Process, float] = {}  # since when
        self.lost: str | None = None
        self.facts: dict[str, Any] = {}
        self.faults = self.started = self.failures = 0
        self.busy = self.closed = False
        self.fill()

    def fill(self) -> None:
        """Start the processes that are missing."""
        with self.changed:
            there = self.starting + len(self.ready) + len(self.used)
            missing = 0 if self.lost or self.closed else self.size - there
            for _ in range(missing):
                self.starting += 1
                threading.Thread(target=self._live, daemon=True).start()

    def _fill_when_idle(self) -> None:
        with self.changed:
            if not self.busy:  # else the end of that job asks again
                self.fill()

    def _live(self) -> None:
        """Start a process, and follow it to its end."""
        process = None
        try:
            process = self.start()
            answer, _ = process.ask(None, (), START_SECONDS)
        except OSError as error:
            answer = {"status": "failed", "message": str(error)}
        with self.changed:
            self.starting -= 1
            self.started += 1
            if answer["status"] == "ready" and not self.closed:
                self.failures, self.facts = 0, answer["facts"]
                self.ready.append(process)
            else:
                self._failed(answer.get("message", ""), process)
            self.changed.notify_all()
        if process is not None:
            self._follow(process)

    def _follow(self, process: Process) -> None:
        """Wait for the end of a process."""
        process.process.wait()
        with self.changed:
            process.gone = True
            self.dying.pop(process, None)
            if process in self.ready:
                self.ready.remove(process)
                self.fill()
            if process not in self.used:
                process.close()
            self.changed.notify_all()

    def _failed(self, why: str, process: Process | None) -> None:
        if process is not None:
            why += f"\n{process.printed()}"
            self._kill(process)
        self.failures += 1
        if self.failures >= STARTS:
            self.lose(f"a process for cuda({self.number}) does not start: {why.strip()}")
        self.fill()

    def _kill(self, process: Process) -> None:
        if process.gone:
            process.close()
        else:
            process.kill()
            self.dying[process] = time.monotonic()

    # ---- used by the Pool ------------------------------------------------------------------------

    def lose(self, why: str) -> None:
        """Run no job here before a reset."""
        with self.changed:
            self.lost = self.lost or f"{why}: set aside until reset"
            self.changed.notify_all()

    def take(self) -> Process | None:
        """Wait for a process that is ready. None if the device is lost or the pool closed."""
        with self.changed:
            self._check_ends()
            if not self.ready:
                self.fill()
            self.changed.wait_for(lambda: self.ready or self.lost or self.closed)
            if self.lost or self.closed:
                return None
            self.used.append(self.ready.pop(0))
            return self.used[-1]

    def adopt(self, process: Process) -> None:
        """Take a process that a job has started itself."""
        with self.changed:
            self.used.append(process)
        threading.Thread(target=self._follow, args=(process,), daemon=True).start()

    def finish(self, process: Process, fault: bool = False) -> None:
        """Kill a process after its job."""
        with self.changed:
            self.used.remove(process)
            self.faults += fault
            self._kill(process)
        timer = threading.Timer(IDLE_SECONDS, self._fill_when_idle)
        timer.daemon = True
        timer.start()

    def settle(self) -> None:
        """Wait until no process starts or ends here, before something is timed. None starts while
        the job has the device."""
        with self.changed:
            self.changed.wait_for(lambda: not (self.starting or self.dying), REAP_SECONDS)
            self._check_ends()

    def _check_ends(self) -> None:
        for process, since in self.dying.items():
            if time.monotonic() - since > REAP_SECONDS:
                self.lose(f"process {process.pid} outlives SIGKILL on cuda({self.number})")

    def reset(self) -> None:
        """Replace the processes that are ready, and try again if the device was lost. RuntimeError
        if none gets ready."""
        with self.changed:
            for process in self.ready:
                self._kill(process)
            self.ready.clear()
            self.lost, self.failures = None, 0
            self._check_ends()
            self.fill()
            self.changed.wait_for(lambda: self.ready or self.lost or self.closed or not self.size)
            if self.lost is not None:
                raise RuntimeError(self.lost)

    def close(self) -> None:
        """Kill all processes, and wait for their ends."""
        with self.changed:
            self.closed = True
            for process in (*self.ready, *self.used):  # the thread of a job sees its process end
                self._kill(process)
            self.ready.clear()
            self.changed.notify_all()
            ended = lambda: not (self.starting or self.dying)
            self.changed.wait_for(ended, REAP_SECONDS)
