"""Processes of the pool, seen from the pool: one of them, and a crew that is kept ready.

A `Worker` is a process that was exec'd, its socket, and its standard output, which is drained while
the pool waits for anything. Whatever does not answer before its deadline is killed.

A `Crew` is a thread that keeps so many workers of one kind started and proven. The thread lives as
long as the crew, because the system ends a process with the thread that started it. It follows what
was killed to its end: a process that outlives SIGKILL holds its device, which is then set aside.
"""

from __future__ import annotations

import errno
import logging
import os
import select
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from needle.kernels.frames import READY, RUNNER_READY, THERE, Channel, FrameError, fits

PRINTED_BYTES = 64 << 10
START_SECONDS = 60.0
PROVE_SECONDS = 10.0
ANSWER_LETTERS = 200  # that are shown of one that is none
ANSWER_SECONDS = 1.0  # in which a process that waits says that it is there
REAP_SECONDS = 5.0  # a process that is still there so long after SIGKILL is given up
STARTS = 2  # that may fail one after the other before a device is set aside
# What the host may lack for a moment, open files, processes or memory, is no fault of a device.
SHORTAGES = (errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM)
SHORTAGE_SECONDS = 60.0  # after which it counts as a failure
RETRY_SECONDS = 0.2
LONGEST_POLL = 3600.0  # poll(2) takes no more than 2^31 ms
TICK = 0.002

log = logging.getLogger("needle.kernels")


class Late(Exception):
    """No answer before the deadline."""


class Ended(Exception):
    """The process ended without an answer."""


class Unreadable(Ended):
    """The process gave an answer that is none; the text shows it."""


class Lost(Exception):
    """The device is set aside; the text says why."""


class Worker:
    """A process, its socket and what it prints. One thread at a time."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                self.process = subprocess.Popen(
                    [*command, str(theirs.fileno())],
                    bufsize=0,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    pass_fds=(theirs.fileno(),),
                    start_new_session=True,  # Ctrl-C is the pool's matter; and one group to kill
                    env=environment,
                    cwd="/",
                )
        except BaseException:
            ours.close()
            raise
        assert self.process.stdout is not None
        self.output = self.process.stdout
        os.set_blocking(self.output.fileno(), False)
        self.channel = Channel(ours, self._wait)
        self.facts: dict[str, Any] = {}
        self.proven = -1  # after how many faults of its crew it was proven
        self.deadline = 0.0
        self.printed, self.printed_bytes = bytearray(), 0

    @property
    def pid(self) -> int:
        return self.process.pid

    def ask(
        self, header: dict[str, Any], block: bytes, files: Sequence[int], seconds: float, form: Any
    ) -> tuple[dict[str, Any], bytes]:
        """(answer, block); the answer has the form (needle.kernels.frames.fits). Late or Ended;
        `text_printed` has what it printed meanwhile."""
        self._drain()
        self.printed, self.printed_bytes = bytearray(), 0
        self.deadline = time.monotonic() + seconds
        try:
            self.channel.send(header, block, files)
            return self._answer(form)
        except OSError as error:  # it is gone before all was sent
            raise Ended(str(error)) from error

    def greet(self, seconds: float, form: Any) -> dict[str, Any]:
        """What a process says of itself once it is ready. Late or Ended."""
        self.deadline = time.monotonic() + seconds
        greeting, _ = self._answer(form)
        if greeting.get("ready") is not True:
            raise Ended(str(greeting.get("message", "it is not ready")))
        return greeting

    def _answer(self, form: Any) -> tuple[dict[str, Any], bytes]:
        try:
            header, block, files = self.channel.receive()
        except FrameError as error:
            raise Unreadable(f"gave an answer that cannot be read: {error}") from error
        except (EOFError, OSError) as error:
            raise Ended(str(error)) from error
        finally:
            self._drain()
        for file in files:  # nobody asked for any
            os.close(file)
        if not fits(header, form):
            raise Unreadable(f"gave an answer of another form: {str(header)[:ANSWER_LETTERS]}")
        return header, block

    def how_ended(self, error: Ended) -> str:
        """Why there is no answer."""
        return f"it {error}" if isinstance(error, Unreadable) else self.end()

    def _wait(self, sock: socket.socket, events: int) -> None:
        ready = select.poll()
        ready.register(sock, events)
        output_open = not self.output.closed
        if output_open:
            ready.register(self.output, select.POLLIN)
        while True:
            left = self.deadline - time.monotonic()
            if left <= 0:
                raise Late
            found = dict(ready.poll(min(left, LONGEST_POLL) * 1000 + 1))
            if output_open and self.output.fileno() in found:
                if not self._drain():
                    ready.unregister(self.output)
                    output_open = False
            if sock.fileno() in found:
                return

    def _drain(self) -> bool:
        """Takes what was printed; False once nothing more can come. Not for ever: what writes
        faster than this reads must not outlast a deadline."""
        for _ in range(16):
            try:
                data = self.output.read(1 << 16)
            except (OSError, ValueError):
                return False
            if data is None:
                return True
            if not data:
                return False
            self.printed += data[: PRINTED_BYTES - len(self.printed)]
            self.printed_bytes += len(data)
        return True

    def text_printed(self) -> str:
        text = self.printed.decode(errors="replace")
        cut = self.printed_bytes - len(self.printed)
        return f"{text}\n[{cut:,} more bytes were printed and cut off]\n" if cut else text

    def stopped(self) -> bool:
        """Does it stand still, by SIGSTOP?"""
        try:
            with open(f"/proc/{self.pid}/stat") as file:
                return file.read().rpartition(")")[2].split()[0] in "tT"
        except (OSError, IndexError):
            return False

    def ended(self) -> bool:
        """Whether it is gone, and whatever it started with its socket too: below compute-sanitizer
        it is a child that holds the device."""
        if self.process.poll() is None:
            return False
        if self.channel.sock.fileno() < 0:
            return True
        hung_up = select.poll()
        hung_up.register(self.channel.sock, 0)
        return bool(hung_up.poll(0))

    def answers(self) -> bool:
        """Whether a process that waits is there. One that was killed is listed for up to 0.1 s,
        in which the driver takes its memory back; one that was stopped, for ever."""
        try:
            self.ask({"do": "answer"}, b"", (), ANSWER_SECONDS, THERE)
        except (Late, Ended):
            return False
        return True

    def end(self, seconds: float | None = None) -> str:
        """How it ended: wait for it a moment, since its socket closes before it is gone."""
        try:
            code = self.process.wait(REAP_SECONDS if seconds is None else seconds)
        except subprocess.TimeoutExpired:
            return "it closed its socket"
        if code >= 0:
            return f"it ended with exit code {code}"
        try:
            return f"it was ended by {signal.Signals(-code).name}"
        except ValueError:
            return f"it was ended by signal {-code}"

    def kill(self) -> None:
        """SIGKILL for it and its children; `ended` tells when it is gone."""
        if not self.ended():
            try:
                os.killpg(self.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass  # it ended just now

    def close(self) -> None:
        self.channel.close()
        self.output.close()


class Crew:
    """Keeps `size` workers of one kind ready, of which `parallel` may be in use at once.

    `start()` makes a Worker; it is ready once it has greeted. With `prove`, a worker that became
    ready before the last fault is asked to prove its device before it is given out. `changed` may
    be shared among crews: it is notified whenever something became ready, free or lost.
    """

    def __init__(
        self,
        name: str,
        start: Callable[[], Worker],
        size: int,
        parallel: int,
        prove: bool,
        changed: threading.Condition,
    ) -> None:
        self.name, self.start_worker = name, start
        self.size, self.parallel, self.prove = size, parallel, prove
        self.changed = changed
        self.ready: list[Worker] = []
        self.used: list[Worker] = []
        self.starting: Worker | None = None
        self.dying: list[tuple[Worker, float, bool]] = []  # give it up at, does it hold the device
        self.taken = 0
        self.faults = 0
        self.failures = 0  # starts and proofs that failed, one after the other
        self.short_since: float | None = None
        self.retry_at = 0.0
        self.started = 0
        self.lost: str | None = None
        self.closing = False
        self.quiet = threading.Lock()  # held while a worker starts, and while one is timed
        self.thread = threading.Thread(target=self._keep, name=f"needle {name}", daemon=True)
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
            with self.quiet:
                self._start_one()

    def _lacking(self) -> bool:
        """Should one be started? Where another is ready, not before what was killed is gone from
        the device: the driver would be busy with both while the next job waits."""
        if self.lost is not None or (self.ready and self._held()):
            return False
        return len(self.ready) + len(self.used) < self.size

    def _held(self) -> bool:
        """Does what was killed still hold the device?"""
        return any(holds for _, _, holds in self.dying)

    def _start_one(self) -> None:
        try:
            worker = self.start_worker()
        except OSError as error:
            with self.changed:
                if error.errno in SHORTAGES and self._may_wait():
                    self.retry_at = time.monotonic() + RETRY_SECONDS
                else:
                    self._failed(f"a process for {self.name} cannot be started: {error}")
            return
        except Exception as error:  # a defect: this thread must live, or jobs wait for ever
            with self.changed:
                self.failures = STARTS
                self._failed(f"a process for {self.name} cannot be started: {error!r}")
            return
        with self.changed:
            self.starting = worker
            worker.proven = self.faults
            self.started += 1
            if self.closing:
                worker.kill()
        try:
            form = RUNNER_READY if self.prove else READY
            worker.facts = worker.greet(START_SECONDS, form).get("facts", {})
        except (Late, Ended) as error:
            why = str(error) or f"it was not ready after {START_SECONDS:.0f} s"
            said = worker.text_printed().strip()
            with self.changed:
                self.starting = None
                self._drop(worker, holds=False)
                self._failed(f"a process for {self.name} does not start: {why}\n{said}".strip())
            return
        with self.changed:
            self.failures, self.short_since, self.starting = 0, None, None
            log.info("%s: process %d is ready", self.name, worker.pid)
            if self.closing:
                self._drop(worker, holds=False)
            else:
                self.ready.insert(0, worker)  # the last one: who ran before runs on
            self.changed.notify_all()

    def _may_wait(self) -> bool:
        """Has this host lacked what a process takes for a short while only?"""
        now = time.monotonic()
        if self.short_since is None:
            self.short_since = now
        return now - self.short_since < SHORTAGE_SECONDS

    def _failed(self, why: str) -> None:
        if not self.closing:
            log.info("%s", why)
        self.failures += 1
        if self.failures >= STARTS:
            self.lost = why
        self.changed.notify_all()

    def _drop(self, worker: Worker, holds: bool) -> None:
        worker.kill()
        self.dying.append((worker, time.monotonic() + REAP_SECONDS, holds))

    def _reap(self) -> None:
        """Call it with `changed` held."""
        left = []
        for worker, give_up, holds in self.dying:
            if worker.ended():
                log.info("%s: process %d is gone: %s", self.name, worker.pid, worker.end(0))
                worker.close()
                self.changed.notify_all()
            elif time.monotonic() > give_up and self.lost is None:
                self.lost = (
                    f"process {worker.pid} is still there {REAP_SECONDS:.0f} s after SIGKILL and "
                    f"holds {self.name}: set aside until reset"
                )
                log.info("%s", self.lost)
                self.changed.notify_all()
                left.append((worker, give_up, holds))
            else:
                left.append((worker, give_up, holds))
        self.dying = left

    # ---- what the pool does ----------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Its processes, by their ids, and why it was set aside. Call it with `changed` held."""
        return {
            "ready": [worker.pid for worker in self.ready],
            "used": [worker.pid for worker in self.used],
            "starting": [self.starting.pid] if self.starting else [],
            "faults": self.faults,
            "started": self.started,
            "lost": self.lost,
        }

    def free(self) -> bool:
        """Could a job have this? Call it with `changed` held."""
        return self.lost is None and self.taken < self.parallel

    def take(self) -> Worker:
        """A proven worker; waits for one. Lost, or RuntimeError when the pool is closed. The caller
        has counted itself in `taken`."""
        while True:
            with self.changed:
                while True:
                    self._check_usable()
                    self._reap()
                    if self.ready and not self._held():
                        break
                    self.changed.wait(TICK if self.dying else 1.0)
                worker = self.ready.pop()
                self.used.append(worker)
                faults = self.faults
            if not worker.answers():
                self.give_back(worker, keep=False)
            elif not self.prove or worker.proven == faults or self._proves(worker, faults):
                return worker

    def _check_usable(self) -> None:
        if self.closing:
            raise RuntimeError("this Pool is closed")
        if self.lost is not None:
            raise Lost(self.lost)

    def _proves(self, worker: Worker, faults: int) -> bool:
        try:
            answer, _ = worker.ask({"do": "prove"}, b"", (), PROVE_SECONDS, READY)
        except (Late, Ended) as error:
            answer = {"message": str(error) or f"no answer within {PROVE_SECONDS:.0f} s"}
        if answer.get("ready") is True:
            worker.proven = faults
            return True
        with self.changed:
            self._failed(f"{self.name} does not prove itself: {answer.get('message')}")
        self.give_back(worker, keep=False, fault=True)
        return False

    def give_back(
        self,
        worker: Worker,
        keep: bool,
        fault: bool = False,
        holds: bool = False,
        lost: str | None = None,
    ) -> None:
        """What was taken: to be kept, or to be killed. After a fault the others prove themselves
        anew. `holds`: it may hold the device, so nothing runs there before it is gone. `lost`: why
        nothing runs there before a reset."""
        with self.changed:
            self.used.remove(worker)
            self.faults += fault
            self.lost = self.lost or lost
            if keep and not self.closing:
                self.ready.append(worker)
            else:
                self._drop(worker, holds)
            self.changed.notify_all()

    def follow(self, worker: Worker, fault: bool, lost: str | None = None) -> None:
        """To its end, one that was started beside the crew and held the device. `fault` and `lost`
        as of `give_back`."""
        with self.changed:
            self.faults += fault
            self.lost = self.lost or lost
            self._drop(worker, holds=True)
            self.changed.notify_all()

    def still(self) -> None:
        """Wait until nothing ends on this device, for a job that is timed."""
        with self.changed:
            while self.dying and self.lost is None:
                self._reap()
                self.changed.wait(TICK)

    def reset(self) -> None:
        """New processes for those that wait, and another try where the device was set aside. Lost
        while a process that was given up is still there."""
        with self.changed:
            self._reap()
            for worker, give_up, _ in self.dying:
                if time.monotonic() > give_up:
                    raise Lost(f"{self.name}: process {worker.pid} still does not end")
            for worker in self.ready:
                self._drop(worker, holds=True)
            self.ready.clear()
            self.lost, self.failures, self.short_since = None, 0, None
            self.changed.notify_all()

    def close(self) -> None:
        """Ends all processes and waits for them, as long as for any that was killed."""
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
