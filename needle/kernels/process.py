"""Processes of the pool: both ends of their connection, and `Device`, which keeps some ready.

A message is JSON, then its arrays and bytes as they are. Nothing is pickled or unpickled, so a
process can at most send wrong numbers. A process does one job and is killed. Others wait meanwhile,
with a context and a kernel run, so that the next job need not wait for a start. A start would
disturb what is timed, and so would the end of a context, which holds up the driver for some 25 ms:
processes start while their device is idle, or when there is none, and are gone before something is
timed.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any

from needle.processes import die_with, ends_within, kill, signal_name

Message = dict[str, Any]  # of what JSON has, and bytes or arrays of bytes

MESSAGE_LETTERS = 64 << 10  # characters of an error
PRINTED_BYTES = 64 << 10
START_SECONDS = 60.0
REAP_SECONDS = 5.0  # after SIGKILL, in which a process must be gone
IDLE_SECONDS = 0.05  # after a job, before processes start
# One thread, and memory that a process keeps: what NVRTC frees after a source, and gives back to
# the system, costs a page fault each 4 KiB at the next one.
VARIABLES = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MALLOC_TRIM_THRESHOLD_": str(1 << 30),
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
}


# ---- messages ------------------------------------------------------------------------------------


def send(connection: Connection, message: Message) -> None:
    blocks: list[Any] = []

    def place(block: Any) -> Message:
        blocks.append(block)
        return {"bytes": len(blocks) - 1}

    text = json.dumps(message, default=place).encode()
    connection.send_bytes(b"%d %b" % (len(blocks), text))
    for block in blocks:
        connection.send_bytes(block)


def receive(connection: Connection) -> Message:
    """Wait for a message. EOFError when the other end is closed."""
    count, _, text = connection.recv_bytes().partition(b" ")
    blocks = [connection.recv_bytes() for _ in range(int(count))]
    return json.loads(text, object_hook=lambda o: blocks[o["bytes"]] if "bytes" in o else o)


def failure(status: str, error: BaseException) -> Message:
    text = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
    return {"status": status, "message": (text or type(error).__name__)[:MESSAGE_LETTERS]}


def answer_all(words: Sequence[str], begin: Callable[[], Any]) -> None:
    """Answer the pool, as a process of it whose last two words are FD PARENT. begin: returns an
    object with the `facts` that are sent first, whose `do` answers a message."""
    connection = Connection(int(words[-2]))
    os.set_inheritable(connection.fileno(), False)
    if "apart" not in words:  # its parent is compute-sanitizer then
        die_with(int(words[-1]))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(EOFError, ConnectionError):  # the pool is gone, or wants a report
        try:
            job = begin()
        except (RuntimeError, ValueError, OSError) as error:
            return send(connection, failure("failed", error))
        send(connection, {"status": "ok", "facts": job.facts})
        while True:
            send(connection, job.do(receive(connection)))


# ---- the pool's end ------------------------------------------------------------------------------


class Process:
    """A process in a session of its own, its connection, and its output. It is killed with the
    thread that starts it (needle.processes.die_with). OSError where it does not start. `state`:
    "starting", "spare", "used" by a job, or "dying"."""

    def __init__(
        self, command: Sequence[str], state: str, cwd: str | None, variables: dict
    ) -> None:
        ours, theirs = socket.socketpair()
        self.connection, self.state = Connection(ours.detach()), state
        self.output = os.fdopen(os.memfd_create("needle-output"), "rb")
        with theirs:
            self.process = subprocess.Popen(
                [*command, str(theirs.fileno()), str(os.getpid())],
                env={**os.environ, **variables},
                cwd=cwd,
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=self.output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.pid = self.process.pid

    def ask(self, message: Message | None, seconds: float) -> Message:
        """Send a message (None: wait for the first one of the process). Return its answer, or
        `timeout`, or `crashed` and how it ended."""
        try:
            if message is not None:
                send(self.connection, message)
            if self.connection.poll(seconds):
                return receive(self.connection)
            said = f"no answer after {seconds:g} s: the process was killed"
            return {"status": "timeout", "message": said}
        except (EOFError, OSError):
            return {"status": "crashed", "message": f"the process of the kernel {self.end()}"}

    def runs(self) -> bool:
        return self.process.poll() is None

    def end(self, seconds: float = REAP_SECONDS) -> str:
        """Wait for its end, and describe it."""
        if not ends_within(self.process, seconds):
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
        if self.process.returncode is None:
            kill(self.process, 0.0)


class Device:
    """A GPU with its processes, for one job at a time. `changed` is held for every change here, and
    notified; the devices of a pool share it.

    Attributes: number, visible (its name in CUDA_VISIBLE_DEVICES), lost (why no job runs here
    before a reset, or None), facts (of the GPU, once a process has reported them), busy (a job has
    it), counts that never fall (faults, started), processes.
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
        self.faults = self.started = 0
        self.busy = self.closed = False
        self.keeper = ThreadPoolExecutor(1 + size)  # threads of the spares, which end with them
        self.keeper.submit(self._fill)

    def of(self, state: str) -> list[Process]:
        """Return the processes in that state."""
        return [one for one in self.processes if one.state == state]

    def start(
        self, command: Sequence[str], cwd: str | None = None, state: str = "used", **variables: str
    ) -> Process:
        """Start a process, by default for the job of this thread, which asks for its first
        message."""
        variables["CUDA_VISIBLE_DEVICES"] = self.visible
        process = Process(command, state, cwd, variables)
        with self.changed:
            self.processes.append(process)
        return process

    def _kill(self, *processes: Process) -> None:
        for process in processes:
            process.state = "dying"
            process.kill()
            process.output.close()
            process.connection.close()

    def _fill(self, idle: float = 0.0) -> None:
        """Start the spares that are missing, wait for them, and for the ends of what was killed.
        idle: seconds to wait, after which the device must be idle."""
        time.sleep(idle)
        with self.changed:
            if idle and self.busy:
                return
            self._kill(*[one for one in self.of("spare") if not one.runs()])
            self.processes = [one for one in self.processes if one.state != "dying" or one.runs()]
            missing = self.size - len(self.of("spare")) - len(self.of("starting"))
            started = []
            try:
                for _ in range(0 if self.lost or self.closed else missing):
                    started.append(self.start(self.command, state="starting", **VARIABLES))
                    self.started += 1
            except OSError as error:
                self.lose(f"a process for cuda({self.number}) does not start: {error}")
        for process in started:
            answer = process.ask(None, START_SECONDS)
            with self.changed:
                if answer["status"] == "ok" and not self.closed:
                    process.state, self.facts = "spare", answer["facts"]
                else:
                    why = f"{answer.get('message', '')}\n{process.printed()}".strip()
                    self.lose(f"a process for cuda({self.number}) does not start: {why}")
                    self._kill(process)
                self.changed.notify_all()
        self._await_ends()

    def _await_ends(self) -> None:
        """Wait for the ends of killed processes. One that outlives SIGKILL loses the device."""
        for process in self.of("dying"):
            if not ends_within(process.process, REAP_SECONDS):
                self.lose(f"process {process.pid} outlives SIGKILL on cuda({self.number})")

    # ---- used by the Pool ------------------------------------------------------------------------

    def lose(self, why: str) -> None:
        """Run no job here before a reset."""
        with self.changed:
            if not self.closed:
                self.lost = self.lost or f"{why}: set aside until reset"
            self.changed.notify_all()

    def take(self) -> Process | None:
        """Wait for a process for a job. None if the device is lost or the pool closed."""
        with self.changed:
            while not (self.lost or self.closed):
                for spare in self.of("spare"):
                    if spare.runs():
                        spare.state = "used"
                        return spare
                if not self.of("starting"):
                    self.keeper.submit(self._fill)
                self.changed.wait()
        return None

    def finish(self, process: Process, fault: bool = False) -> None:
        """Kill a process after its job; wait for the end of one with a fault."""
        with self.changed:
            self.faults += fault
            self._kill(process)
        if fault:
            self._await_ends()

    def release(self) -> None:
        """Let the next job have the device."""
        with self.changed:
            self.busy = False
            self.changed.notify_all()
            if not self.closed:
                self.keeper.submit(self._fill, IDLE_SECONDS)

    def settle(self) -> None:
        """Wait until no process starts or ends here, before something is timed. None starts while
        the job has the device."""
        with self.changed:
            self.changed.wait_for(lambda: not self.of("starting"))
        self._await_ends()

    def reset(self) -> None:
        """Replace the spares, and try again if the device was lost. RuntimeError if none gets
        ready."""
        with self.changed:
            self.changed.wait_for(lambda: not self.of("starting"))
            self._kill(*self.of("spare"))
            self.lost = None
        self._await_ends()
        spare = self.take() if self.size else None
        if spare is not None:
            spare.state = "spare"
        if self.lost is not None:
            raise RuntimeError(self.lost)

    def close(self) -> None:
        """Kill all processes, and wait for their ends."""
        with self.changed:
            self.closed = True
            self._kill(*self.of("spare"))
            for process in self.processes:
                process.kill()  # the thread that asks it sees its end
            self.changed.notify_all()
        self.keeper.shutdown()
        self._await_ends()
