"""Processes of the pool: both ends of their connection, and `Device`, which keeps some ready.

A message is JSON, then arrays as raw bytes. Nothing is pickled or unpickled, so a process can at
most send wrong numbers. A process does one job and is killed. Others wait meanwhile, with a context
and a kernel run, so that the next job need not wait for a start. A start would disturb what is
timed: processes start while their device is idle, or when none is ready. The end of a context holds
up the driver for some 25 ms, and with it the next job: a process that answered with a fault waits
until the device is idle, and one that had to be killed is gone before its job ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from needle.processes import die_with, ends_within, signal_group, signal_name

Message = dict[str, Any]
Arrays = Sequence[bytes | np.ndarray]
Answer = tuple[Message, Arrays]

MESSAGE_LETTERS = 64 << 10  # characters of an error
PRINTED_BYTES = 64 << 10
START_SECONDS = 60.0
REAP_SECONDS = 5.0  # after SIGKILL, in which a process must be gone
IDLE_SECONDS = 0.05  # after a job, before processes start
STARTS = 2  # that fail in a row before a device is set aside
# One thread, and memory that a process keeps: what NVRTC frees after a source, and gives back to
# the system, costs a page fault each 4 KiB at the next one.
VARIABLES = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MALLOC_TRIM_THRESHOLD_": str(1 << 30),
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
}


# ---- messages ------------------------------------------------------------------------------------


def send(connection: Connection, message: Message, arrays: Arrays = ()) -> None:
    connection.send_bytes(json.dumps({**message, "arrays": len(arrays)}).encode())
    for array in arrays:
        if isinstance(array, np.ndarray):
            array = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        connection.send_bytes(array)


def receive(connection: Connection) -> tuple[Message, list[bytes]]:
    """Wait for a message. EOFError when the other end is closed."""
    message = json.loads(connection.recv_bytes())
    return message, [connection.recv_bytes() for _ in range(message.pop("arrays"))]


def failure(status: str, error: BaseException) -> Message:
    text = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
    return {"status": status, "message": (text or type(error).__name__)[:MESSAGE_LETTERS]}


def answer_all(
    words: Sequence[str],
    begin: Callable[[], tuple[Message, Callable[[Message, list[bytes]], Answer]]],
) -> None:
    """Answer the pool, as a process of it whose last two words are FD PARENT. begin: returns the
    facts that are sent first, and the function that answers a message."""
    connection = Connection(int(words[-2]))
    os.set_inheritable(connection.fileno(), False)
    if "apart" not in words:  # its parent is compute-sanitizer then
        die_with(int(words[-1]))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(EOFError, ConnectionError):  # the pool is gone, or wants a report
        try:
            facts, do = begin()
        except (RuntimeError, ValueError, OSError) as error:
            return send(connection, failure("failed", error))
        send(connection, {"status": "ok", "facts": facts})
        while True:
            send(connection, *do(*receive(connection)))


# ---- the pool's end ------------------------------------------------------------------------------


class Process:
    """A process in a session of its own, its connection, and its output. It is killed with the
    thread that starts it (needle.processes.die_with). state: starting, ready, used, done (to be
    killed later) or dying."""

    def __init__(
        self, command: Sequence[str], environment: dict[str, str], cwd: str | None = None
    ) -> None:
        self.command, self.environment, self.cwd = command, environment, cwd
        self.state = "starting"
        self.process: subprocess.Popen | None = None
        ours, self.theirs = socket.socketpair()
        self.connection = Connection(ours.detach())
        self.output = os.fdopen(os.memfd_create("needle-output"), "rb")

    def start(self) -> None:
        with self.theirs:
            self.process = subprocess.Popen(
                [*self.command, str(self.theirs.fileno()), str(os.getpid())],
                env=self.environment,
                cwd=self.cwd,
                pass_fds=(self.theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=self.output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self.process.pid if self.process else 0

    def ask(
        self, message: Message | None, arrays: Arrays, seconds: float
    ) -> tuple[Message, list[bytes]]:
        """Send a message (None: wait for the first one of the process). Return its answer, or
        `timeout`, or `crashed` and how it ended."""
        try:
            if message is not None:
                send(self.connection, message, arrays)
            if self.connection.poll(seconds):
                return receive(self.connection)
            said = f"no answer after {seconds:g} s: the process was killed"
            return {"status": "timeout", "message": said}, []
        except (EOFError, OSError):
            return {"status": "crashed", "message": f"the process of the kernel {self.end()}"}, []

    def end(self, seconds: float = REAP_SECONDS) -> str:
        """Wait for its end, and describe it."""
        if self.process is None or not ends_within(self.process, seconds):
            return "closed its connection"
        code = self.process.returncode
        return f"exited with code {code}" if code >= 0 else f"was ended by {signal_name(-code)}"

    def printed(self) -> str:
        size = os.fstat(self.output.fileno()).st_size
        text = os.pread(self.output.fileno(), PRINTED_BYTES, 0).decode(errors="replace")
        cut = size - PRINTED_BYTES
        return f"{text}\n[{cut:,} more bytes were printed and cut off]\n" if cut > 0 else text

    def kill(self) -> None:
        """Kill it and its children."""
        if self.process is not None and self.process.returncode is None:
            signal_group(self.process, signal.SIGKILL)

    def close(self) -> None:
        self.output.close()
        self.connection.close()


class Device:
    """A GPU with its processes, for one job at a time. `changed` is held for every change here, and
    notified; the devices of a pool share it. Each process has a thread as long as it lives.

    Attributes: number, visible (its name in CUDA_VISIBLE_DEVICES), lost (why no job runs here
    before a reset, or None), facts (of the GPU, once a process has reported them), busy (a job has
    it), and counts that never fall: faults, started.
    """

    def __init__(
        self,
        number: int,
        visible: str,
        size: int,
        command: Sequence[str],
        changed: threading.Condition,
    ) -> None:
        self.number, self.visible, self.size = number, visible, size
        self.command, self.changed = command, changed
        self.processes: list[Process] = []
        self.lost: str | None = None
        self.facts: dict[str, Any] = {}
        self.faults = self.started = self.failures = 0
        self.busy = self.closed = False
        self.fill()

    def those(self, *states: str) -> list[Process]:
        """Return its processes in these states."""
        return [process for process in self.processes if process.state in states]

    def fill(self) -> None:
        """Kill the processes that are done, and start those that are missing."""
        with self.changed:
            self._kill(*self.those("done"))
            there = len(self.those("starting", "ready", "used"))
            for _ in range(0 if self.lost or self.closed else self.size - there):
                new = self._new(self.command, None, **VARIABLES)
                self.processes.append(new)
                threading.Thread(target=self._live, args=(new,), daemon=True).start()

    def _new(self, command: Sequence[str], cwd: str | None, **variables: str) -> Process:
        variables["CUDA_VISIBLE_DEVICES"] = self.visible
        return Process(command, {**os.environ, **variables}, cwd)

    def _live(self, process: Process) -> None:
        """Start a process, and follow it to its end."""
        try:
            process.start()
            answer, _ = process.ask(None, (), START_SECONDS)
        except OSError as error:
            answer = {"status": "failed", "message": str(error)}
        with self.changed:
            self.started += 1
            if answer["status"] == "ok" and not self.closed:
                self.failures, self.facts, process.state = 0, answer["facts"], "ready"
            else:
                self.failures += 1
                if self.failures >= STARTS:
                    why = f"{answer.get('message', '')}\n{process.printed()}".strip()
                    self.lose(f"a process for cuda({self.number}) does not start: {why}")
                self._kill(process)
                self.fill()
            self.changed.notify_all()
        self._follow(process)

    def _follow(self, process: Process) -> None:
        """Wait for the end of a process."""
        if process.process is not None:
            process.process.wait()
        with self.changed:
            self.processes.remove(process)
            if process.state != "used":  # else its job closes it
                process.close()
            if process.state == "ready":
                self._fill_when_idle()
            self.changed.notify_all()

    def _fill_when_idle(self) -> None:
        with self.changed:
            if not self.those("used"):  # else the end of that job asks again
                self.fill()

    def _kill(self, *processes: Process) -> None:
        for process in processes:
            process.state = "dying"
            process.kill()

    # ---- used by the Pool ------------------------------------------------------------------------

    def lose(self, why: str) -> None:
        """Run no job here before a reset."""
        with self.changed:
            self.lost = self.lost or f"{why}: set aside until reset"
            self.changed.notify_all()

    def take(self) -> Process | None:
        """Wait for a process that is ready. None if the device is lost or the pool closed."""
        with self.changed:
            if not self.those("ready"):
                self.fill()
            self.changed.wait_for(lambda: self.those("ready") or self.lost or self.closed)
            if self.lost or self.closed:
                return None
            process = self.those("ready")[0]
            process.state = "used"
            return process

    def start(self, command: Sequence[str], cwd: str | None = None, **variables: str) -> Process:
        """Start a process for the job of this thread, which asks for its first message."""
        process = self._new(command, cwd, **variables)
        process.start()
        with self.changed:
            process.state = "used"
            self.processes.append(process)
        threading.Thread(target=self._follow, args=(process,), daemon=True).start()
        return process

    def finish(self, process: Process, fault: bool = False, later: bool = False) -> None:
        """Kill a process after its job, or `later`; wait for the end of one with a fault."""
        with self.changed:
            self.faults += fault
            if later and process in self.processes:
                process.state = "done"
                return
            self._kill(process)
            process.close()
            if fault:
                self._await_ends()

    def release(self) -> None:
        """Let the next job have the device."""
        with self.changed:
            self.busy = False
            self.changed.notify_all()
        timer = threading.Timer(IDLE_SECONDS, self._fill_when_idle)
        timer.daemon = True
        timer.start()

    def settle(self) -> None:
        """Wait until no process starts or ends here, before something is timed. None starts while
        the job has the device."""
        with self.changed:
            self._kill(*self.those("done"))
            self.changed.wait_for(lambda: not self.those("starting"), REAP_SECONDS)
            self._await_ends()

    def _await_ends(self) -> None:
        """Wait for the ends of killed processes. One that outlives SIGKILL loses the device."""
        dying = self.those("dying")
        gone = lambda: not set(dying) & set(self.processes)
        if not self.changed.wait_for(gone, REAP_SECONDS):
            pids = ", ".join(str(process.pid) for process in dying if process in self.processes)
            self.lose(f"process {pids} outlives SIGKILL on cuda({self.number})")

    def reset(self) -> None:
        """Replace the processes that are ready, and try again if the device was lost. RuntimeError
        if none gets ready."""
        with self.changed:
            self._kill(*self.those("ready"))
            self.lost, self.failures = None, 0
            self._await_ends()
            self.fill()
            ended = lambda: self.those("ready") or self.lost or self.closed or not self.size
            self.changed.wait_for(ended)
            if self.lost is not None:
                raise RuntimeError(self.lost)

    def close(self) -> None:
        """Kill all processes, and wait for their ends."""
        with self.changed:
            self.closed = True
            self._kill(*self.those("starting", "ready", "done"))
            for process in self.those("used"):
                process.kill()  # the thread of its job sees its end
            self.changed.notify_all()
            self.changed.wait_for(lambda: not self.those("starting", "dying"), REAP_SECONDS)
