"""compute-sanitizer: the command that runs a process under it, and its report.

A report is blocks of lines that begin with `=========`: an error, its place in the source, its
thread and block, and details of the address.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
MOST_FINDINGS = 8
WHERE = re.compile(r"\bat (?P<where>.+?)[+:]0x[0-9a-f]+(?: in (?P<file>[^\s:]+):(?P<line>\d+))?")
THREAD = re.compile(
    r"(?:by thread|Thread) \((?P<thread>\d+,\d+,\d+)\) in block \((?P<block>\d+,\d+,\d+)\)"
)
# First lines of blocks about the tool, calls of the host, or consequences of a fault.
NO_FINDING = re.compile(
    r"COMPUTE-SANITIZER|(ERROR|RACECHECK|LEAK) SUMMARY|Program hit|Target application|"
    r"Saved host backtrace|Host API|Internal|Warning:"
)


@dataclass(frozen=True)
class Finding:
    """An error that compute-sanitizer reports. `line` is 0, `thread` and `block` are () if they are
    missing in the report."""

    what: str
    where: str = ""
    line: int = 0
    thread: tuple[int, ...] = ()
    block: tuple[int, ...] = ()
    detail: str = ""

    def __str__(self) -> str:
        at = f" in {self.where}" if self.where else ""
        line = f", line {self.line}" if self.line else ""
        thread = f", thread {self.thread} of block {self.block}" if self.thread else ""
        detail = f": {self.detail}" if self.detail else ""
        return f"{self.what}{at}{line}{thread}{detail}"


def sanitizer_command(program: str, tool: str, report: Path) -> list[str]:
    """Return the words before the command of a process that runs under `tool`. Errors of the host
    are handled by the process, and a backtrace of the host would be Python's."""
    return [
        program,
        "--tool",
        tool,
        "--log-file",
        str(report),
        "--report-api-errors",
        "no",
        "--show-backtrace",
        "no",
        "--print-limit",
        str(4 * MOST_FINDINGS),
    ]


def read_report(report: str) -> list[Finding]:
    """Return the findings of a report, equal places once."""
    blocks: list[list[str]] = []
    open_block = False
    for line in report.splitlines():
        if not line.startswith("========="):
            continue
        text = line.removeprefix("=========")
        if not text.strip():
            open_block = False
        elif text.startswith("     ") and open_block:
            blocks[-1].append(text.strip())
        else:
            open_block = not NO_FINDING.search(text)
            if open_block:
                blocks.append([text.strip()])
    findings: list[Finding] = []
    seen = set()
    for block in blocks:
        finding = _finding(block)
        place = (finding.what, finding.where, finding.line)
        if place not in seen:
            seen.add(place)
            findings.append(finding)
    return findings[:MOST_FINDINGS]


def _finding(block: Sequence[str]) -> Finding:
    text = "\n".join(block)
    where, by = WHERE.search(text), THREAD.search(text)
    what = re.sub(r"\s+at .+?[+:]0x[0-9a-f]+(?: in \S+)?", "", block[0]).strip()
    detail = [
        line
        for line in block[1:]
        if not re.match(r"(at |by thread |Thread |Saved |Host |Device |#)", line)
    ]
    return Finding(
        what.removeprefix("Error: ").rstrip(":"),
        where["where"].strip() if where else "",
        int(where["line"]) if where and where["line"] else 0,
        _triple(by["thread"]) if by else (),
        _triple(by["block"]) if by else (),
        "; ".join(detail)[:500],
    )


def _triple(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def status_of(findings: Sequence[Finding]) -> str | None:
    """Return the status of a result with these findings; None if there are none."""
    for finding in findings:
        text = f"{finding.what} {finding.detail}".lower()
        if "misaligned" in text:
            return "misaligned_address"
        if "invalid __" in text or "out of bounds" in text:
            return "out_of_bounds"
        if "barrier error" in text or "divergent" in text:
            return "launch_failure"
    return "wrong_result" if findings else None
