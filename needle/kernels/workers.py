"""Worker processes, seen from the pool: `Worker` is one of them, `WorkerPool` keeps some ready.

A WorkerPool has a thread that starts its workers and stays as long as they may: the system ends a
process with the thread that started it. A worker that does not answer before its deadline is killed
and followed to its end. One that outlives SIGKILL holds its device, which is then set aside.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from needle.kernels.ipc import Channel
from needle.processes import Child, signal_name

PRINTED_BYTES = 64 << 10
START_SECONDS = 60.0
CHECK_SECONDS = 10.0  # for a health check
ANSWER_SECONDS = 1.0  # in which an idle process answers
REAP_SECONDS = 5.0  # after SIGKILL, in which a process must be gone
STARTS = 2  # consecutive failures before a device is set aside
# Open files, processes or memory that the host lacks for a moment are no fault of a device.
SHORTAGES = (errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM)
SHORTAGE_STARTS = 300
RETRY_SECONDS = 0.2
TICK = 0.002

log = logging.getLogger("needle.kernels")


class Ended(Exception):
    """The process ended without an answer."""


class SetAside(Exception):
    """The device is set aside; the text says why."""


class Worker(Child):
    """A process, its socket, and its output. For one thread at a time."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self.checked = -1  # faults of its WorkerPool at its last health check
        ours, theirs = socket.socketpair()
        self.channel = Channel(ours)
        try:
            with theirs:
                super().__init__(
                    [*command, str(theirs.fileno())],
                    environment,
                    messages=True,  # it ends with this process by itself, without a fork
                    capture=True,
                    pass_fds=(theirs.fileno(),),
                    cwd="/",
                )
        except BaseException:
            self.channel.close()
            raise

    def ask(
        self, message: dict[str, Any], seconds: float, block: bytes = b"", files: Sequence[int] = ()
    ) -> tuple[dict[str, Any], bytes]:
        """Return (answer, block). TimeoutError or Ended; `printed()` has its output since."""
        self.forget_printed()
        return self._receive(
            seconds, "it failed: ", lambda: self.channel.send(message, block, files)
        )

    def greet(self, seconds: float) -> dict[str, Any]:
        """Wait for the first message of a process, its facts. TimeoutError or Ended."""
        return self._receive(seconds, "", lambda: None)[0].get("facts", {})

    def _receive(
        self, seconds: float, failed: str, send: Callable[[], None]
    ) -> tuple[dict[str, Any], bytes]:
        self.channel.deadline = time.monotonic() + seconds
        try:
            send()
            answer, block, _ = self.channel.receive()
        except TimeoutError:
            raise
        except (EOFError, OSError):
            raise Ended(f"it {self.end()}") from None
        except (ValueError, KeyError) as error:
            raise Ended(f"its answer cannot be read: {error!r}") from error
        if answer.get("ready") is False:
            raise Ended(failed + answer["message"])
        return answer, block

    def printed(self, most: int = PRINTED_BYTES) -> str:
        """Return its output since the last `ask`, cut after `most` bytes."""
        return super().printed(most)

    def ended(self) -> bool:
        """True if it is gone, and so is each child that has its socket: under compute-sanitizer a
        child holds the device."""
        if self.poll() is None:
            return False
        if self.channel.sock.fileno() < 0:
            return True
        hung_up = select.poll()
        hung_up.register(self.channel.sock, 0)
        return bool(hung_up.poll(0))

    def answers(self) -> bool:
        """True if an idle process is there. A killed one is listed for up to 0.1 s, in which the
        driver takes its memory back; a stopped one, for ever."""
        try:
            self.ask({"do": "answer"}, ANSWER_SECONDS)
        except (TimeoutError, Ended):
            return False
        return True

    def end(self, seconds: float | None = None) -> str:
        """Wait for its end, a moment by default, and describe it."""
        self.wait(REAP_SECONDS if seconds is None else seconds)
        code = self.poll()
        if code is None:
            return "closed its socket"
        return f"ended with exit code {code}" if code >= 0 else f"was ended by {signal_name(-code)}"

    def kill(self, seconds: float = 0.0) -> bool:
        """Send SIGKILL to it and its children; `ended` tells when they are gone."""
        return self.ended() or super().kill(seconds)

    def close(self, seconds: float = REAP_SECONDS) -> None:
        """Release the files of a process that has ended; kill one that has not."""
        super().close(seconds)
        self.channel.close()


class WorkerPool:
    """Keeps `size` workers of one kind ready, of which `parallel` may be in use at once.

    device: number of the GPU on which they run; None: they compile. On a GPU, check the device of a
    worker that became ready before the last fault, before it is used. `start()` makes a Worker.
    `changed` is notified when a worker became ready, free or was set aside; pools may share it.
    """

    def __init__(
        self,
        device: int | None,
        start: Callable[[], Worker],
        size: int,
        parallel: int,
        changed: threading.Condition,
    ) -> None:
        self.device, self.start_worker = device, start
        self.name = "compiling" if device is None else f"cuda({device})"
        self.size, self.parallel, self.changed = size, parallel, changed
        self.ready: list[Worker] = []
        self.used: list[Worker] = []
        self.starting: Worker | None = None
        # What was killed: when to give up on it, and whether it may hold the device.
        self.dying: list[tuple[Worker, float, bool]] = []
        self.facts: dict[str, Any] = {}  # of the device, since a worker became ready
        self.reserved = 0
        self.faults = 0
        self.failures = 0  # consecutive starts and health checks that failed
        self.retry_at = 0.0
        self.started = 0
        self.set_aside: str | None = None
        self.closing = False
        self.busy = threading.Lock()  # held while a worker starts, and while one is timed
        self.thread = threading.Thread(target=self._keep, name=f"needle {self.name}", daemon=True)
        self.thread.start()

    # ---- the thread ------------------------------------------------------------------------------

    def _keep(self) -> None:
        while True:
            with self.changed:
                while not self.closing:
                    pause = self.retry_at - time.monotonic()
                    if self._lacking() and pause <= 0:
                        break
                    self._reap()
                    waits = max(pause, TICK) if self._lacking() else None
                    self.changed.wait(TICK * 5 if self.dying else waits)
                if self.closing:
                    return
            with self.busy:
                self._start_one()

    def _lacking(self) -> bool:
        """True if a worker should start. While another is ready, wait until the killed ones have
        left the device: the driver would be busy with both while the next job waits."""
        if self.set_aside is not None or (self.ready and self._held()):
            return False
        return len(self.ready) + len(self.used) < self.size

    def _held(self) -> bool:
        """True while a killed process holds the device."""
        return any(holds for _, _, holds in self.dying)

    def _start_one(self) -> None:
        worker, why, starts = None, None, STARTS
        try:
            worker = self.start_worker()
            with self.changed:
                self.starting, worker.checked = worker, self.faults
                self.started += 1
                if self.closing:
                    worker.kill()
            facts = worker.greet(START_SECONDS)
        except TimeoutError:
            why = f"does not start: it was not ready after {START_SECONDS:.0f} s"
        except Ended as error:
            why = f"does not start: {error}"
        except OSError as error:
            why = f"cannot be started: {error}"
            starts = SHORTAGE_STARTS if error.errno in SHORTAGES else STARTS
        except Exception as error:  # a defect: without this thread jobs would wait for ever
            why = f"cannot be started: {error!r}"
        with self.changed:
            self.starting = None
            if why is None and worker is not None and not self.closing:
                self.failures, self.facts = 0, facts
                self.ready.insert(0, worker)  # the last to be used: the pool reuses the newest
                log.info("%s: process %d is ready", self.name, worker.pid)
            elif worker is not None:
                self._drop(worker, holds=False)
            if why is not None:
                said = worker.printed().strip() if worker is not None else ""
                self.retry_at = time.monotonic() + RETRY_SECONDS
                self._failed(f"a process for {self.name} {why}\n{said}".strip(), starts)
            self.changed.notify_all()

    def _failed(self, why: str, starts: int = STARTS) -> None:
        if not self.closing:
            log.info("%s", why)
        self.failures += 1
        if self.failures >= starts:
            self.set_aside = why
            if self.device is None:
                self.set_aside += ": nothing compiles before a reset"

    def _drop(self, worker: Worker, holds: bool) -> None:
        worker.kill()
        self.dying.append((worker, time.monotonic() + REAP_SECONDS, holds))

    def _reap(self) -> None:
        """Remove the killed processes that have ended. Call it with `changed` held."""
        left = []
        for worker, give_up, holds in self.dying:
            if worker.ended():
                log.info("%s: process %d is gone: it %s", self.name, worker.pid, worker.end(0))
                worker.close()
                self.changed.notify_all()
                continue
            left.append((worker, give_up, holds))
            if time.monotonic() > give_up and self.set_aside is None:
                self.set_aside = (
                    f"process {worker.pid} is still there {REAP_SECONDS:.0f} s after SIGKILL and "
                    f"holds {self.name}: set aside until reset"
                )
                log.info("%s", self.set_aside)
                self.changed.notify_all()
        self.dying = left

    # ---- used by the Pool ------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Return its processes by id, and why it was set aside. Call it with `changed` held."""
        return {
            "ready": [worker.pid for worker in self.ready],
            "used": [worker.pid for worker in self.used],
            "starting": [self.starting.pid] if self.starting else [],
            "faults": self.faults,
            "started": self.started,
            "set_aside": self.set_aside,
        }

    def free(self) -> bool:
        """True if a job may reserve it. Call it with `changed` held."""
        return self.set_aside is None and self.reserved < self.parallel

    def take(self) -> Worker:
        """Wait for a healthy worker, which the caller has reserved. SetAside, or RuntimeError if
        the pool is closed."""
        while True:
            with self.changed:
                while True:
                    if self.closing:
                        raise RuntimeError("this Pool is closed")
                    if self.set_aside is not None:
                        raise SetAside(self.set_aside)
                    self._reap()
                    if self.ready and not self._held():
                        break
                    self.changed.wait(TICK if self.dying else 1.0)
                worker = self.ready.pop()
                self.used.append(worker)
                faults = self.faults
            if not worker.answers():
                self.give_back(worker, keep=False)
            elif self.device is None or worker.checked == faults or self._check(worker, faults):
                return worker

    def _check(self, worker: Worker, faults: int) -> bool:
        try:
            worker.ask({"do": "check"}, CHECK_SECONDS)
            worker.checked = faults
            return True
        except (TimeoutError, Ended) as error:
            why = str(error) or f"no answer within {CHECK_SECONDS:.0f} s"
        with self.changed:
            self._failed(f"{self.name} fails its health check: {why}")
        self.give_back(worker, keep=False, fault=True)
        return False

    def give_back(
        self,
        worker: Worker,
        keep: bool,
        fault: bool = False,
        holds: bool = False,
        set_aside: str | None = None,
    ) -> None:
        """Keep or kill a worker. fault: check the health of the others. holds: it may hold the
        device, so nothing runs there before it is gone. set_aside: why nothing runs there before
        a reset."""
        with self.changed:
            if worker in self.used:  # not one under compute-sanitizer
                self.used.remove(worker)
            self.faults += fault
            self.set_aside = self.set_aside or set_aside
            if keep and not self.closing:
                self.ready.append(worker)
            else:
                self._drop(worker, holds)
            self.changed.notify_all()

    @contextlib.contextmanager
    def quiet(self) -> Iterator[None]:
        """Wait until no process ends on this device, and start none within, for a job that is
        timed."""
        with self.changed:
            while self.dying and self.set_aside is None:
                self._reap()
                self.changed.wait(TICK)
        with self.busy:
            yield

    def take_ready(self) -> list[Worker]:
        """Take all workers that are ready, to be given back."""
        with self.changed:
            taken, self.ready = self.ready, []
            self.used += taken
        return taken

    def reset(self) -> None:
        """Replace the ready processes, and try again if the device was set aside. SetAside while a
        process that outlived SIGKILL is still there."""
        with self.changed:
            self._reap()
            for worker, give_up, _ in self.dying:
                if time.monotonic() > give_up:
                    raise SetAside(f"{self.name}: process {worker.pid} still does not end")
            for worker in self.ready:
                self._drop(worker, holds=True)
            self.ready.clear()
            self.set_aside, self.failures, self.retry_at = None, 0, 0.0
            self.changed.notify_all()

    def close(self) -> None:
        """End all processes and wait for them, up to REAP_SECONDS."""
        with self.changed:
            self.closing = True
            for worker in self.ready:
                self._drop(worker, holds=False)
            self.ready.clear()
            for worker in self.used:  # it has a job of another thread, which sees it end
                worker.kill()
            if self.starting is not None:
                self.starting.kill()
            self.changed.notify_all()
        self.thread.join(START_SECONDS)
        end = time.monotonic() + REAP_SECONDS
        with self.changed:
            while (self.dying or self.used) and time.monotonic() < end:
                self._reap()
                self.changed.wait(TICK)
