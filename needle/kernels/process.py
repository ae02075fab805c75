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

import numpy as np

from needle.processes import die_with, ends_within, kill, signal_name

Message = dict[str, Any]  # of what JSON has, bytes and NumPy arrays

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

    def place(value: bytes | np.ndarray) -> Message:
        blocks.append(value)
        if isinstance(value, bytes):
            return {"bytes": len(blocks) - 1}
        blocks[-1] = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
        return {"bytes": len(blocks) - 1, "dtype": value.dtype.name, "shape": value.shape}

    text = json.dumps(message, default=place).encode()
    connection.send_bytes(b"%d %b" % (len(blocks), text))
    for block in blocks:
        connection.send_bytes(block)


def receive(connection: Connection) -> Message:
    """Wait for a message. EOFError when the other end is closed."""
    count, _, text = connection.recv_bytes().partition(b" ")
    blocks = [connection.recv_bytes() for _ in range(int(count))]

    def value(given: Message) -> Any:
        if "bytes" not in given:
            return given
        block = blocks[given["bytes"]]
        if "dtype" not in given:
            return block
        return np.frombuffer(block, given["dtype"]).reshape(given["shape"])

    return json.loads(text, object_hook=value)


def failure(status: str, error: BaseException) -> Message:
    text = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
    return {"status": status, "message": (text or type(error).__name__)[:MESSAGE_LETTERS]}


def answer_all(
    words: Sequence[str], begin: Callable[[], tuple[Message, Callable[[Message], Message]]]
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
            send(connection, do(receive(connection)))


# ---- the pool's end ------------------------------------------------------------------------------


class Process:
    """A process in a session of its own, its connection, and its output. It is killed with the
    thread that starts it (needle.processes.die_with). OSError where it does not start."""

    def __init__(
        self, command: Sequence[str], environment: dict[str, str], cwd: str | None = None
    ) -> None:
        ours, theirs = socket.socketpair()
        self.connection = Connection(ours.detach())
        self.output = os.fdopen(os.memfd_create("needle-output"), "rb")
        self.reported = False  # its first message was read
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

    def is_ready(self) -> bool:
        """Return whether it runs, and has sent its first message."""
        return self.process.poll() is None and (self.reported or self.connection.poll())

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

    def close(self) -> None:
        self.output.close()
        self.connection.close()


class Device:
    """A GPU with its processes, for one job at a time. `changed` is held for every change here, and
    notified; the devices of a pool share it.

    Attributes: number, visible (its name in CUDA_VISIBLE_DEVICES), lost (why no job runs here
    before a reset, or None), facts (of the GPU, once a process has reported them), busy (a job has
    it), counts that never fall (faults, started), and processes: spares, used (of the job), dying.
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
        self.spares: list[Process] = []
        self.used: list[Process] = []
        self.dying: list[Process] = []
        self.lost: str | None = None
        self.facts: dict[str, Any] = {}
        self.faults = self.started = 0
        self.busy = self.closed = False
        self.keeper = ThreadPoolExecutor(1)  # the thread of all spares, with which they end
        self.keeper.submit(self._fill)

    def _fill(self, idle: float = 0.0) -> None:
        """Reap what was killed, and start the spares that are missing. idle: seconds to wait, after
        which the device must be idle."""
        time.sleep(idle)
        with self.changed:
            if idle and self.busy:
                return
            self._kill(*[spare for spare in self.spares if spare.process.poll() is not None])
            self.dying = [one for one in self.dying if one.process.poll() is None]
            try:
                while not (self.lost or self.closed) and len(self.spares) < self.size:
                    self.spares.append(self._new(self.command, None, **VARIABLES))
                    self.started += 1
            except OSError as error:
                self.lose(f"a process for cuda({self.number}) does not start: {error}")
            self.changed.notify_all()

    def _new(self, command: Sequence[str], cwd: str | None, **variables: str) -> Process:
        variables["CUDA_VISIBLE_DEVICES"] = self.visible
        return Process(command, {**os.environ, **variables}, cwd)

    def _kill(self, *processes: Process) -> None:
        for process in processes:
            (self.spares if process in self.spares else self.used).remove(process)
            self.dying.append(process)
            process.kill()
            process.close()

    def _await_ends(self) -> None:
        """Wait for the ends of killed processes. One that outlives SIGKILL loses the device."""
        for process in [*self.dying]:
            if not ends_within(process.process, REAP_SECONDS):
                self.lose(f"process {process.pid} outlives SIGKILL on cuda({self.number})")
        with self.changed:
            self.dying = [one for one in self.dying if one.process.poll() is None]

    def _starts(self, spare: Process) -> bool:
        """Wait for its first message. One that fails loses the device."""
        if not spare.reported:
            answer = spare.ask(None, START_SECONDS)
            spare.reported = answer["status"] == "ok"
            self.facts = answer.get("facts", self.facts)
            if not spare.reported and not self.closed:
                why = f"{answer.get('message', '')}\n{spare.printed()}".strip()
                self.lose(f"a process for cuda({self.number}) does not start: {why}")
        return spare.reported and spare.is_ready()

    # ---- used by the Pool ------------------------------------------------------------------------

    def lose(self, why: str) -> None:
        """Run no job here before a reset."""
        with self.changed:
            self.lost = self.lost or f"{why}: set aside until reset"
            self.changed.notify_all()

    def ready(self) -> Process | None:
        """Wait for a spare that is ready. None if the device is lost or the pool closed."""
        while True:
            with self.changed:
                if not (self.spares or self.closed):
                    self.keeper.submit(self._fill)
                self.changed.wait_for(lambda: self.spares or self.lost or self.closed)
                if self.lost or self.closed:
                    return None
                spare = max(self.spares, key=Process.is_ready)
            if self._starts(spare):
                return spare
            with self.changed:
                if spare in self.spares:
                    self._kill(spare)

    def take(self) -> Process | None:
        """Wait for a process for a job. None if the device is lost or the pool closed."""
        spare = self.ready()
        with self.changed:
            if spare not in self.spares:  # the pool was closed just now
                return None
            self.spares.remove(spare)
            self.used.append(spare)
            return spare

    def start(self, command: Sequence[str], cwd: str | None = None, **variables: str) -> Process:
        """Start a process for the job of this thread, which asks for its first message."""
        process = self._new(command, cwd, **variables)
        with self.changed:
            self.used.append(process)
        return process

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
        for spare in [*self.spares]:
            self._starts(spare)
        self._await_ends()

    def reset(self) -> None:
        """Replace the spares, and try again if the device was lost. RuntimeError if none gets
        ready."""
        with self.changed:
            self._kill(*self.spares)
            self.lost = None
        self._await_ends()
        if self.size:
            self.ready()
        if self.lost is not None:
            raise RuntimeError(self.lost)

    def close(self) -> None:
        """Kill all processes, and wait for their ends."""
        with self.changed:
            self.closed = True
            self._kill(*self.spares)
            for process in self.used:
                process.kill()  # the thread of its job sees its end
            self.changed.notify_all()
        self.keeper.shutdown()
        self._await_ends()
