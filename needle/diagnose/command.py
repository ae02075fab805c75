"""Diagnose this machine, this installation of needle, a run or a kernel service.

It prints the facts (versions, build, devices). It examines each device in a
process of its own with a deadline, so that a device that hangs does not hang
the command: the state of each GPU by its driver (ECC, Xid errors, throttling,
temperature, power, memory and its holders, MIG, MPS), rates, every op against a
float64 reference, on contiguous operands and on views, a training step of a
tiny Pythia, and copies between GPUs. It multiplies two matrices on each device
and compares with NumPy. That takes less than 10 s if a processor is free. With
--full it tries every op in each dtype, size and layout, each pair of GPUs, and
recovery from an injected fault, in less than 2 minutes.

Under torchrun, mpirun or srun each rank examines its own device. Then all ranks
together make an all_gather, an all_reduce and a step of ring attention, which
are compared with NumPy. Each rank prints a line; a rank that is wrong, late,
stopped or gone is named with its device, within 30 s more.

The exit code is 0 if all is right, and 1 after a failure: a line with FAILED,
the op if it is an op's, and the remedy. A machine without a GPU is right,
except with --device or NEEDLE_REQUIRE_CUDA=1, or where the CUDA backend was
built and there is an NVIDIA driver. The token of a kernel service is in
NEEDLE_KERNELS_TOKEN, or in the file that NEEDLE_KERNELS_TOKEN_FILE names.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import time
from collections.abc import Sequence
from typing import Any, TextIO

from needle import _C
from needle.arguments import Parser, path, whole
from needle.diagnose import facts as known
from needle.diagnose import ranks, recovery
from needle.diagnose.examination import Examination, Examinations
from needle.diagnose.finding import Finding
from needle.distributed import environment
from needle.distributed.environment import Place
from needle.files import printable
from needle.peaks import peak

LINKED, UNLINKED = 40e9, 2e9  # bytes/s between GPUs, with NVLinks and without, at the very least
# Ops are compared as they compute by default, and nothing floods the log.
PLAIN = {"NEEDLE_TF32": "0", "NEEDLE_TRACE": "0"}


@dataclasses.dataclass(frozen=True)
class Times:
    """Deadlines, in seconds after the start: of the driver's answers, of each device, of copies
    between them, of all but what ranks do together."""

    driver: float
    devices: float
    peers: float
    all: float


QUICK = Times(4.5, 8.0, 8.7, 9.2)
FULL = Times(20, 80, 100, 115)
MEET, TOGETHER = 10.0, 20.0  # seconds: for all ranks to come, and then for their collectives


def parser() -> argparse.ArgumentParser:
    made = Parser(
        prog="needle diagnose",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    made.add_argument("--full", action="store_true", help="all checks, within 2 minutes")
    made.add_argument("--json", action="store_true", help="print one JSON object")
    made.add_argument("--device", type=whole(0), metavar="N", help="examine cuda(N) alone")
    made.add_argument("--log", type=path, metavar="FILE", help="write every detail there")
    made.add_argument(
        "--run", type=path, metavar="FOLDER", help="examine a run's folder: runs/NAME"
    )
    made.add_argument(
        "--server", metavar="URL", help="ask a kernel service: http://127.0.0.1:18188"
    )
    return made


class Report:
    """Findings and facts, printed as they come: as lines, of a rank with its number; as JSON at the
    end."""

    def __init__(self, is_json: bool, place: Place | None, log: TextIO | None) -> None:
        self.is_json, self.place, self._log = is_json, place, log
        self.facts: dict[str, Any] = {}
        self.findings: list[Finding] = []

    def say(self, text: str) -> None:
        if not self.is_json:
            who = f"rank {self.place.rank} of {self.place.size}: " if self.place else ""
            print(printable(who + text), flush=True)

    def log(self, text: str) -> None:
        if self._log is None:
            return
        try:
            print(f"{time.time():.3f} {text}", file=self._log, flush=True)
        except OSError as error:  # such as a full disk
            path = self._log.name
            self.close()
            text = f"{path} cannot be written: {error.strerror or error}"
            self.add(Finding("failed", "log", "log", text, "give --log a path on a disk with room"))

    def describe(self, name: str, text: str) -> None:
        """A line of facts, which a rank leaves out."""
        self.log(f"{name}: {text}")
        if self.place is None:
            self.say(f"{name:<14} {text}")

    def add(self, *findings: Finding) -> None:
        for finding in findings:
            self.findings.append(finding)
            self.log(finding.line())
            if self.place is None or finding.has_failed:
                self.say(finding.line())

    def close(self) -> None:
        log, self._log = self._log, None
        if log is not None:
            with contextlib.suppress(OSError):  # it writes once more what it could not
                log.close()

    @property
    def failures(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.has_failed]

    def end(self, seconds: float) -> int:
        """Print the last line. Return the exit code."""
        count = len(self.failures)
        verdict = f"FAILED: {count}, above" if count else "nothing is wrong"
        if self.is_json:
            found = [finding.to_json() for finding in self.findings]
            failed = [finding.to_json() for finding in self.failures]
            ends = {"ok": not count, "failures": failed, "findings": found, "seconds": seconds}
            place = self.place
            ranked = {} if place is None else {"rank": place.rank, "ranks": place.size}
            print(json.dumps(ranked | self.facts | ends), flush=True)
        elif self.place is None:
            self.describe("in short", f"{verdict} ({seconds:.1f} s)")
        else:
            self.say(self.summary(verdict if count else "ok"))
        return 1 if count else 0

    def summary(self, verdict: str) -> str:
        """The last line of a rank: its device, and the checks that it passed."""
        devices = [device["device"] for device in self.facts.get("devices", [])]
        which = devices[-1] if devices else "no device"
        own = [f for f in self.findings if f.level == "ok" and f.where == which]
        own = [f for f in own if f.what in ("product", "rates", "ops", "step")]
        own += [f for f in self.findings if f.where == "ranks" and not f.has_failed]
        return f"{which} {verdict}: " + "; ".join(finding.text for finding in own)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program. Return its exit code."""
    start, made = time.monotonic(), parser()
    args = made.parse_args(argv)
    try:
        place = environment.find()
    except ValueError as error:
        made.error(str(error))
    try:
        log = open(args.log, "w", encoding="utf-8") if args.log else None
    except OSError as error:
        made.error(f"--log: {args.log} cannot be written: {error.strerror}")
    report = Report(args.json, place, log)
    try:
        with Examinations(report.log) as examinations:
            examine(args, report, examinations, start)
        return report.end(round(time.monotonic() - start, 1))
    except KeyboardInterrupt:  # the examinations have ended
        return 130
    finally:
        report.close()


def examine(
    args: argparse.Namespace, report: Report, examinations: Examinations, start: float
) -> None:
    """Examine everything, in the order in which it is printed."""
    place, times, env = report.place, FULL if args.full else QUICK, dict(PLAIN)

    def begin(until: float, where: str, module: str, *arguments: Any) -> Examination:
        options = {"deadline": start + until, "is_full": args.full, "env": env}
        return examinations.start(where, f"{module}.examine", *arguments, **options)

    def begin_cpu() -> Examination:
        return begin(times.devices, str(_C.cpu()), "device", "cpu", 0)

    def finish(one: Examination) -> None:
        examinations.wait(one)
        show(report, one)

    wanted = place.local_rank if place and args.device is None else args.device
    machine = begin(times.driver, "machine", "machine")
    cpu = begin_cpu() if wanted is None else None
    folder = begin(times.all, "run", "folder", str(args.run)) if args.run else None
    server = (
        begin(times.peers, "server", "server", args.server) if args.server is not None else None
    )

    examinations.wait(machine)
    start += machine.starved()
    cuda = machine.facts.get("cuda") or silent(machine)
    report.facts |= known.here() | {"cuda": cuda, "gpus": machine.facts.get("gpus", [])}
    for name, text in known.lines(report.facts):
        report.describe(name, text)
    if place and args.device is None and cuda.get("count") == 1:
        wanted = 0  # the launcher lets each rank see its own
    chosen, told = choose(wanted, cuda, is_asked=args.device is not None)
    if cpu is None and not chosen and not cuda["usable"]:
        cpu = begin_cpu()  # there is nothing else
    if "OMP_NUM_THREADS" not in os.environ:  # each device has a share of the cores
        sharing = place.local_size if place else max(1, len(chosen))
        env["OMP_NUM_THREADS"] = str(max(1, len(os.sched_getaffinity(0)) // sharing))
    devices = [begin(times.devices, name, "device", "cuda", i) for i, name in chosen]
    report.add(*of_these(machine, chosen, wanted), *told)
    for one in ([] if cpu is None else [cpu]) + devices:
        finish(one)
    start += max((one.starved() for one in devices), default=0.0)
    if not cuda["usable"]:
        report.describe("GPU", "none that can be used: the CPU alone was examined")
    if len(chosen) > 1 and all(one.ended == "done" for one in devices):
        indices, least = [index for index, _ in chosen], slowest_link(report.facts)
        finish(begin(times.peers, "cuda()", "peers", indices, least))
    if place and place.size > 1:
        together(examinations, report, chosen, start + times.devices + MEET, env)
    if args.full:
        for (index, name), one in zip(chosen, devices):
            if one.ended == "done":
                report.add(*recovery.examine(examinations, name, index, start + times.all))
    for one in filter(None, (folder, server)):
        finish(one)
        report.facts[one.subject] = one.facts


def together(
    examinations: Examinations,
    report: Report,
    chosen: list[tuple[int, str]],
    meet: float,
    env: dict[str, str],
) -> None:
    """Add the findings of the collectives. If the own device has failed, the other ranks learn
    it."""
    device = ("cuda", chosen[0][0]) if chosen else ("cpu", 0)
    failed = [finding.text for finding in report.failures if finding.where.endswith(")")]
    problem = failed[0][:300] if failed else ""
    options = {"deadline": meet + TOGETHER, "env": env, "may_crash": True}
    one = examinations.start("ranks", "ranks.examine", *device, meet, problem, **options)
    examinations.wait(one)
    report.facts["members"] = one.facts.get("members", [])
    found = ranks.findings(one)
    report.add(*found)
    if one.ended == "late" or any(finding.what == "crash" for finding in found):
        # A launcher ends all ranks when one ends: the others name this one first.
        time.sleep(max(0.0, one.deadline - time.monotonic()))


def silent(machine: Examination) -> dict[str, Any]:
    """The facts about CUDA if the driver has not answered."""
    return {
        "built": known.is_built(),
        "driver": machine.facts.get("driver"),
        "usable": False,
        "problem": f"asking the driver did not end: it stopped at {machine.current_check}",
        "remedy": "`nvidia-smi` will hang or fail as well: start the machine anew",
    }


def choose(
    wanted: int | None, cuda: dict[str, Any], is_asked: bool = False
) -> tuple[list[tuple[int, str]], list[Finding]]:
    """The devices to examine, (index, name), and the findings about a wanted one. is_asked: by
    --device, which requires a GPU; torchrun numbers ranks without a GPU too."""
    count = cuda.get("count", 0)
    names = [(i, f"cuda({i or ''})") for i in range(count)]
    is_required = is_asked or os.environ.get("NEEDLE_REQUIRE_CUDA", "0") == "1"
    if not cuda["usable"]:
        if (cuda["built"] and cuda["driver"]) or is_required:
            where = f"cuda({wanted or ''})"
            return [], [Finding("failed", where, "usable", cuda["problem"], cuda["remedy"])]
        return [], []
    if wanted is None:
        return names, []
    if wanted < count:
        return [names[wanted]], []
    text = f"there is no cuda({wanted}): this machine shows {count}, cuda() to cuda({count - 1})"
    remedy = "--device, torchrun's --nproc-per-node and CUDA_VISIBLE_DEVICES must fit together"
    return [], [Finding("failed", f"cuda({wanted})", "count", text, remedy)]


def of_these(
    machine: Examination, chosen: list[tuple[int, str]], wanted: int | None
) -> list[Finding]:
    """The driver's findings; without those about other GPUs if one device is wanted."""
    uuids = machine.facts.get("uuids", [])
    if wanted is None or not chosen or len(uuids) <= chosen[0][0]:
        return machine.findings
    gpus = machine.facts.get("gpus", [])
    others = {f"GPU {g['index']}" for g in gpus if g.get("uuid") != uuids[chosen[0][0]]}
    return [finding for finding in machine.findings if finding.where not in others]


def slowest_link(facts: dict[str, Any]) -> float:
    """Bytes/s that a direct copy between two GPUs makes at least; 0 for unknown kinds of GPUs."""
    if not all(peak(device["name"], "memory") for device in facts["devices"][1:]):
        return 0.0
    return LINKED if any(any(gpu.get("nvlinks") or []) for gpu in facts["gpus"]) else UNLINKED


def show(report: Report, one: Examination) -> None:
    """Add the facts and findings of an examination that has ended."""
    device, listed = one.facts.get("device"), report.facts["devices"]
    if device is not None and device["device"] not in [other["device"] for other in listed]:
        listed.append(device | {"rates": one.facts.get("rates")})
        numbers = [g["index"] for g in report.facts["gpus"] if g.get("uuid") == device["uuid"]]
        number = f", GPU {numbers[0]}" if numbers else ""
        report.describe(device["device"], known.in_words(device) + number)
    if "peers" in one.facts:
        report.facts["peers"] = one.facts["peers"]
    report.add(*one.findings)
