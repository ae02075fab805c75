"""Examinations in processes of their own, with deadlines: what hangs or dies there is a finding.

A child is a fresh interpreter, exec'd and never forked, that ends with its parent. It speaks on a
pipe of its own, so that nothing that a library or a kernel prints can be taken for a word of it, a
JSON object a line:

    {"at": "gelu float32 (31, 33)", "op": "gelu"}    it begins this: named should it hang or die
    {"fact": ["uuid", "GPU-..."]}                     for the parent
    {"finding": {...}}                                a Finding
    {"detail": "..."}                                 for the log alone
    {"end": true}                                     without it the child has died

`Teller` is the child's end, `Child` the parent's, `Crew` all children of a parent. Time in which a
child stands in line for a processor does not count: a machine that is busy is none that hangs.
"""

from __future__ import annotations

import json
import os
import selectors
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from needle import processes
from needle.diagnose.finding import Finding
from needle.processes import MessageWriter, signal_name, starved

BOOT = """
import sys
sys.path.insert(0, sys.argv.pop(1))
from needle.diagnose.roles import serve
serve(*sys.argv[1:])
"""
ROOT = Path(__file__).resolve().parent.parent.parent  # of the needle that runs
LOOK = 0.1  # seconds between two looks at deadlines
END_SECONDS = 2.0  # for what a process does behind its last word
KILL_SECONDS = 1.0  # for a process to be gone that was killed
LAST_WORDS = 300  # characters of a dead child's output that its finding quotes
SLOW = "see to its disk or its network; --full waits longer"
HANGS = (
    "if another process computes on the device (`note` lines above), end it; if it hangs again, "
    "`nvidia-smi --gpu-reset`, or start the machine anew; --full waits longer"
)


# ---- the child's end --------------------------------------------------------------------------


class Teller:
    """What a child says. `where` is the subject of its findings; `until` the moment, by
    time.monotonic(), at which it should have come to its end; `is_full` whether it may be long."""

    def __init__(self, report: MessageWriter, where: str, until: float, is_full: bool) -> None:
        self._report, self.where, self._until, self.is_full = report, where, until, is_full
        self.doing = "start"
        self.op: str | None = None

    def _say(self, **message: Any) -> None:
        self._report.write(**message)

    def left(self) -> float:
        """Seconds."""
        return self._until + starved() - time.monotonic()

    def at(self, doing: str, op: str | None = None) -> None:
        self.doing, self.op = doing, op
        self._say(at=doing, op=op)

    def fact(self, name: str, value: Any) -> None:
        self._say(fact=[name, value])

    def detail(self, text: str) -> None:
        self._say(detail=text)

    def find(self, finding: Finding) -> None:
        self._say(finding=finding.to_json())

    def ok(self, what: str, text: str) -> None:
        self.find(Finding("ok", self.where, what, text))

    def note(self, what: str, text: str, remedy: str = "") -> None:
        self.find(Finding("note", self.where, what, text, remedy))

    def failed(self, what: str, text: str, remedy: str, op: str | None = None) -> None:
        self.find(Finding("failed", self.where, what, text, remedy, op))

    def end(self) -> None:
        self._say(end=True)


# ---- the parent's end -------------------------------------------------------------------------


class Child(processes.Child):
    """An examination that runs. Attributes: where, facts, findings, doing (what it began last) and
    op, ended (None while it runs, then "done", "died" or "late"), exit (as subprocess says it)."""

    def __init__(
        self,
        where: str,
        role: str,
        *arguments: str,
        deadline: float,
        is_full: bool = False,
        env: dict[str, str] | None = None,
        slack: float = 1.0,
        is_doomed: bool = False,
    ) -> None:
        """`deadline` by time.monotonic(): it is killed then; it is told to end `slack` earlier.
        Of one that is doomed it is no finding that it dies."""
        self.where = where
        self.facts: dict[str, Any] = {}
        self.findings: list[Finding] = []
        self.doing, self.is_doomed = "start", is_doomed
        self.op: str | None = None
        self.ended: str | None = None
        self._has_said_end = False
        words = [str(ROOT), where, str(deadline - slack), str(int(is_full)), role, *arguments]
        super().__init__(
            [sys.executable, "-c", BOOT, *words],
            os.environ | (env or {}),
            deadline,
            messages=True,
            capture=True,
        )

    @property
    def exit(self) -> int | None:
        return self.process.returncode

    def hear(self, log: Callable[[str], None]) -> None:
        """Takes what is in the pipe."""
        for message in self.messages():
            log(f"{self.where}: {json.dumps(message)}")
            if "at" in message:
                self.doing, self.op = message["at"], message["op"]
            elif "fact" in message:
                name, value = message["fact"]
                self.facts[name] = value
            elif "finding" in message:
                self.findings.append(Finding(**message["finding"]))
            elif "end" in message:
                self._has_said_end = True
        if self.at_end:
            self.starved()
            if not self.wait(END_SECONDS):  # it has said all, and hangs as it goes
                self.kill(KILL_SECONDS)
            self.ended = "done" if self._has_said_end else "died"

    def expire(self) -> None:
        gone = self.kill(KILL_SECONDS)
        self.ended = "late"
        seconds = time.monotonic() - self.started
        fate = "and was killed" if gone else f"and process {self.process.pid} cannot be killed: "
        fate += "" if gone else "it waits inside the driver"
        self.findings.append(
            Finding(
                "failed",
                self.where,
                "deadline",
                f"{self.doing} hangs: not done {seconds:.1f} s after the start, {fate}",
                SLOW if self.where in ("run", "server") else HANGS,
                self.op,
            )
        )

    def died(self) -> Finding:
        """The finding about a child that ended without having said so."""
        if self.exit is not None and self.exit < 0:
            how = signal_name(-self.exit)
        else:
            how = f"exit code {self.exit}"
        words = self.printed()[-LAST_WORDS:].strip().replace("\n", " / ")
        said = f"; its last words: {words}" if words else ""
        return Finding(
            "failed",
            self.where,
            "death",
            f"the process that examined it died by {how} at {self.doing}{said}",
            "build needle again (make clean lib); look for Xid errors and for a killed process in "
            "the kernel's log (dmesg)",
            self.op,
        )


class Crew:
    """The children of this process; leaving the context ends them all."""

    def __init__(self, log: Callable[[str], None] = lambda text: None) -> None:
        self._log = log
        self._selector = selectors.DefaultSelector()
        self._children: list[Child] = []

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *exception: object) -> None:
        self._selector.close()
        for child in self._children:
            child.close(KILL_SECONDS)

    def start(self, where: str, role: str, *arguments: str, **options: Any) -> Child:
        child = Child(where, role, *arguments, **options)
        self._children.append(child)
        self._selector.register(child, selectors.EVENT_READ, child)
        return child

    def wait(self, *wanted: Child) -> None:
        """Hears all children until the wanted ones have ended."""
        while any(child.ended is None for child in wanted):
            for key, _ in self._selector.select(LOOK):
                child = key.data
                child.hear(self._log)
                if child.ended is not None:
                    if child.ended == "died" and not child.is_doomed:
                        child.findings.append(child.died())
                    self._gone(child)
            for child in self._children:
                if child.ended is None and child.is_late():
                    child.expire()
                    self._gone(child)

    def _gone(self, child: Child) -> None:
        self._selector.unregister(child)
        text = child.printed()
        if text:
            self._log(f"{child.where}: printed:\n{text}")
