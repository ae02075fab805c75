"""Examinations in processes of their own, with deadlines: a hang or a crash there is a finding.

An examination is a fresh interpreter that runs a function of this package, by its name, and reports
to its parent (needle/processes.py):

    {"at": "gelu-31x33 float32", "op": "gelu"}     it starts this, which is named if it hangs
    {"fact": ["device", {...}]}                     for the parent
    {"finding": {...}}                              a Finding
    {"detail": "..."}                               for the log alone
    {"end": true}                                   without it the process has crashed
"""

from __future__ import annotations

import json
import os
import selectors
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from needle import _C, processes
from needle.diagnose.finding import Finding
from needle.processes import MessageWriter, signal_name, starved

ROOT = Path(__file__).resolve().parent.parent.parent  # of the needle that runs
LOOK = 0.1  # seconds between two looks at deadlines
END_SECONDS = 2.0  # for a process to end after its last message
KILL_SECONDS = 1.0  # for a killed process to be gone
QUOTED = 300  # characters of a crashed process's output in its finding
FATAL = (
    "a kernel or the GPU itself is broken: look at the Xid and ECC lines, try another GPU, and "
    "NEEDLE_ARCH=80, which takes the kernels for older GPUs"
)
SLOW = "see to its disk or its network; --full waits longer"
HANGS = (
    "if another process computes on the device (`note` lines above), end it; if it hangs again, "
    "`nvidia-smi --gpu-reset`, or start the machine anew; --full waits longer"
)


class Reporter:
    """Report from the process of an examination to its parent. subject: of its findings. until:
    when it should end, by time.monotonic(). is_full: True to include the checks that take long.
    current_check: the check that runs now."""

    def __init__(self, messages: MessageWriter, subject: str, until: float, is_full: bool) -> None:
        self._messages, self.subject, self._until, self.is_full = messages, subject, until, is_full
        self.current_check = "start"
        self.op: str | None = None

    def _write(self, **message: Any) -> None:
        self._messages.write(**message)

    def left(self) -> float:
        """The seconds that are left."""
        return self._until + starved() - time.monotonic()

    def at(self, check: str, op: str | None = None) -> None:
        self.current_check, self.op = check, op
        self._write(at=check, op=op)

    def fact(self, name: str, value: Any) -> None:
        self._write(fact=[name, value])

    def detail(self, text: str) -> None:
        self._write(detail=text)

    def find(self, *findings: Finding) -> None:
        for finding in findings:
            self._write(finding=finding.to_json())

    def ok(self, what: str, text: str) -> None:
        self.find(Finding("ok", self.subject, what, text))

    def note(self, what: str, text: str, remedy: str = "") -> None:
        self.find(Finding("note", self.subject, what, text, remedy))

    def failed(self, what: str, text: str, remedy: str, op: str | None = None) -> None:
        self.find(Finding("failed", self.subject, what, text, remedy, op))

    def end(self) -> None:
        self._write(end=True)


def script(function: str) -> str:
    """Return the program that runs an examination, such as "machine.examine"."""
    return f"""
import sys
sys.path.insert(0, sys.argv.pop(1))
from needle.diagnose import examination, {function.partition(".")[0]}
examination.run({function}, *sys.argv[1:])
"""


def run(
    examine: Callable[..., None], subject: str, until: str, is_full: str, arguments: str
) -> None:
    """Run an examination and end the process; the texts are those that `Examination` gives."""
    reporter = Reporter(MessageWriter.to_parent(), subject, float(until), is_full == "1")
    try:
        examine(reporter, *json.loads(arguments))
    except _C.CudaFatalError as error:
        reporter.failed(reporter.current_check, f"{error}".split("\n")[0], FATAL, reporter.op)
    except (MemoryError, _C.CudaError) as error:
        remedy = "free memory of the device: the lines of its GPU name the processes that hold it"
        reporter.failed(reporter.current_check, f"{error}", remedy, reporter.op)
    except Exception as error:
        reporter.detail(traceback.format_exc())
        text = f"{reporter.current_check}: {type(error).__name__}: {error}"
        remedy = "this is a defect: report it with --log FILE"
        reporter.failed("examination", text, remedy, reporter.op)
    reporter.end()
    sys.stdout.flush()
    os._exit(0)  # destructors take time, and may hang


class Examination(processes.Child):
    """The parent's end. Attributes: subject, facts, findings, current_check and op, ended (None
    while it runs, then "done", "crashed" or "late")."""

    def __init__(
        self,
        subject: str,
        function: str,
        *arguments: Any,
        deadline: float,
        is_full: bool = False,
        env: dict[str, str] | None = None,
        may_crash: bool = False,
    ) -> None:
        """function: of this package, such as "machine.examine"; arguments: of it, as JSON.
        deadline: by time.monotonic(); the process is killed then, and is told to end a second
        earlier. may_crash: a crash is no finding."""
        self.subject, self.current_check, self.may_crash = subject, "start", may_crash
        self.facts: dict[str, Any] = {}
        self.findings: list[Finding] = []
        self.op: str | None = None
        self.ended: str | None = None
        self._has_said_end = False
        words = [str(ROOT), subject, str(deadline - 1), str(int(is_full))]
        words.append(json.dumps(arguments))
        super().__init__(
            [sys.executable, "-c", script(function), *words],
            os.environ | (env or {}),
            deadline,
            messages=True,
            capture=True,
        )

    def receive(self, log: Callable[[str], None]) -> None:
        """Take the messages that have arrived; notice the end."""
        for message in self.messages():
            log(f"{self.subject}: {json.dumps(message)}")
            if "at" in message:
                self.current_check, self.op = message["at"], message["op"]
            elif "fact" in message:
                name, value = message["fact"]
                self.facts[name] = value
            elif "finding" in message:
                self.findings.append(Finding(**message["finding"]))
            elif "end" in message:
                self._has_said_end = True
        if self.at_end:
            self.starved()
            if not self.wait(END_SECONDS):
                self.kill(KILL_SECONDS)
            self.ended = "done" if self._has_said_end else "crashed"

    def expire(self) -> None:
        """Kill it at its deadline, which is a finding."""
        gone = self.kill(KILL_SECONDS)
        self.ended = "late"
        fate = "and was killed"
        if not gone:
            fate = f"and process {self.pid} cannot be killed: it waits inside the driver"
        seconds = time.monotonic() - self.started
        text = f"{self.current_check} hangs: not done {seconds:.1f} s after the start, {fate}"
        remedy = SLOW if self.subject in ("run", "server") else HANGS
        self.findings.append(Finding("failed", self.subject, "deadline", text, remedy, self.op))

    def crash(self) -> Finding:
        """The finding about a process that ended without an end message."""
        code = self.poll()
        how = signal_name(-code) if code is not None and code < 0 else f"exit code {code}"
        text = f"the process that examined it crashed with {how} at {self.current_check}"
        quoted = self.printed()[-QUOTED:].strip().replace("\n", " / ")
        text += f"; its last output: {quoted}" if quoted else ""
        remedy = (
            "build needle again (make clean lib); look for Xid errors and for a killed process in "
            "the kernel's log (dmesg)"
        )
        return Finding("failed", self.subject, "crash", text, remedy, self.op)


class Examinations:
    """The examinations of this process; leaving the context ends them all."""

    def __init__(self, log: Callable[[str], None] = lambda text: None) -> None:
        self._log = log
        self._selector = selectors.DefaultSelector()
        self._all: list[Examination] = []

    def __enter__(self) -> Examinations:
        return self

    def __exit__(self, *exception: object) -> None:
        self._selector.close()
        for one in self._all:
            one.close(KILL_SECONDS)

    def start(self, subject: str, function: str, *arguments: Any, **options: Any) -> Examination:
        started = Examination(subject, function, *arguments, **options)
        self._all.append(started)
        self._selector.register(started, selectors.EVENT_READ, started)
        return started

    def wait(self, wanted: Examination) -> None:
        """Receive the messages of all until the wanted one has ended."""
        while wanted.ended is None:
            for key, _ in self._selector.select(LOOK):
                key.data.receive(self._log)
            for one in [key.data for key in self._selector.get_map().values()]:
                if one.ended is None and one.is_late():
                    one.expire()
                if one.ended is None:
                    continue
                if one.ended == "crashed" and not one.may_crash:
                    one.findings.append(one.crash())
                self._selector.unregister(one)
                if text := one.printed():
                    self._log(f"{one.subject}: printed:\n{text}")
