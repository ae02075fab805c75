"""What is wrong with this machine, this needle, a run or a kernel service?

It prints the facts (versions, build, devices), and examines each device in a process of its own
with a deadline, so that one that hangs cannot hang this: what the driver says about each GPU (ECC,
Xid errors, throttling, temperature, power, memory and who holds it, MIG, MPS), what it makes, every
op against the CPU, on contiguous operands and on views, a training step of a tiny Pythia, and
copies between GPUs. It multiplies two matrices on each device and compares with NumPy. That takes
less than 10 s where a processor is free. With --full it tries every op in each dtype, size and
layout, each pair of GPUs, and recovery from a fault that is planted, in less than 2 minutes.

Under torchrun, mpirun or srun each rank examines its own device, then all ranks together an
all_gather, an all_reduce and a step of ring attention, which are compared with NumPy. Each rank
prints a line; a rank that is wrong, late, stopped or gone is named with its device, within 30 s
more.

The exit code is 0 when all is right and 1 when something that should work does not: each failure is
a line with FAILED, the op where it is one's, and the remedy. A machine without a GPU is right, but
with --device or NEEDLE_REQUIRE_CUDA=1, or where the CUDA backend was built and there is an NVIDIA
driver. The token of a kernel service is in NEEDLE_KERNELS_TOKEN, or in the file that
NEEDLE_KERNELS_TOKEN_FILE names.
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
from needle.diagnose import facts as known
from needle.diagnose import ranks, recovery
from needle.diagnose.children import Child, Crew
from needle.diagnose.finding import Finding
from needle.distributed import environment
from needle.distributed.environment import Place
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
    made = argparse.ArgumentParser(
        prog="python -m needle.diagnose",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    made.add_argument("--full", action="store_true", help="all checks, within 2 minutes")
    made.add_argument("--json", action="store_true", help="print one JSON object")
    made.add_argument("--device", type=int, metavar="N", help="examine cuda(N) alone")
    made.add_argument("--log", metavar="FILE", help="write every detail there")
    made.add_argument("--run", metavar="FOLDER", help="examine a run's folder: runs/NAME")
    made.add_argument(
        "--server", metavar="URL", help="ask a kernel service: http://127.0.0.1:18188"
    )
    return made


class Report:
    """Findings and facts, printed as they come: as lines, of a rank as a line with its number, as
    JSON when all is done."""

    def __init__(self, is_json: bool, place: Place | None, log: TextIO | None) -> None:
        self.is_json, self.place, self._log = is_json, place, log
        self.facts: dict[str, Any] = {}
        self.findings: list[Finding] = []

    def say(self, text: str) -> None:
        if not self.is_json:
            print(text, flush=True)

    def log(self, text: str) -> None:
        if self._log is None:
            return
        try:
            self._log.write(f"{time.time():.3f} {text}\n")
            self._log.flush()
        except OSError as error:  # a full disk, say
            refused, self._log = self._log, None
            with contextlib.suppress(OSError):  # it tries what it could not write once more
                refused.close()
            self.add(log_refused(refused.name, error))

    def describe(self, name: str, text: str) -> None:
        """A line of facts."""
        self.log(f"{name}: {text}")
        if self.place is None:
            self.say(f"{name:<14} {text}")

    def add(self, *findings: Finding) -> None:
        for finding in findings:
            self.findings.append(finding)
            self.log(finding.line())
            if self.place is None:
                self.say(finding.line())
            elif finding.has_failed:
                self.say(f"{self.who}: {finding.line()}")

    def close(self) -> None:
        if self._log is not None:
            self._log.close()

    @property
    def who(self) -> str:
        return f"rank {self.place.rank} of {self.place.size}"

    @property
    def failures(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.has_failed]

    def end(self, seconds: float) -> int:
        """The last line; the exit code."""
        count = len(self.failures)
        if self.is_json:
            found = [finding.to_json() for finding in self.findings]
            failed = [finding.to_json() for finding in self.failures]
            ends = {"ok": not count, "failures": failed, "findings": found, "seconds": seconds}
            place = self.place
            ranked = {} if place is None else {"rank": place.rank, "ranks": place.size}
            print(json.dumps(ranked | self.facts | ends), flush=True)
        elif self.place is not None:
            self.say(f"{self.who}: {self.summary()}")
        else:
            verdict = f"FAILED: {count}, above" if count else "nothing is wrong"
            self.describe("in short", f"{verdict} ({seconds:.1f} s)")
        return 1 if count else 0

    def summary(self) -> str:
        """The rank's own line: its devices, and what was right about them."""
        devices = [device["device"] for device in self.facts.get("devices", [])]
        which = devices[-1] if devices else "no device"
        verdict = f"FAILED: {len(self.failures)}, above" if self.failures else "ok"
        kinds = ("product", "rates", "ops", "step")
        right = [f for f in self.findings if f.level == "ok" and f.where == which]
        right += [f for f in self.findings if f.where == "ranks" and not f.has_failed]
        about = [finding.text for finding in right if finding.what in (*kinds, "ranks")]
        return f"{which} {verdict}: " + "; ".join(about)


def log_refused(path: str, error: OSError) -> Finding:
    text = f"{path} cannot be written: {error.strerror or error}"
    return Finding("failed", "log", "log", text, "give --log a path on a disk with room")


def main(argv: Sequence[str] | None = None) -> int:
    """The program; its exit code."""
    start, made = time.monotonic(), parser()
    args = made.parse_args(argv)
    if args.device is not None and args.device < 0:
        made.error(f"--device must be 0 or more, not {args.device}")
    try:
        place = environment.find()
    except ValueError as error:
        made.error(str(error))
    log, refused = None, []
    if args.log:
        try:
            log = open(args.log, "w", encoding="utf-8")
        except OSError as error:
            refused = [log_refused(args.log, error)]
    report = Report(args.json, place, log)
    report.add(*refused)
    try:
        with Crew(report.log) as crew:
            examine(args, report, crew, start)
        return report.end(round(time.monotonic() - start, 1))
    except KeyboardInterrupt:  # the children are gone
        return 130
    finally:
        report.close()


def examine(args: argparse.Namespace, report: Report, crew: Crew, start: float) -> None:
    """Everything, in the order in which it is printed."""
    place, times, env = report.place, FULL if args.full else QUICK, dict(PLAIN)

    def begin(until: float, where: str, role: str, *words: str) -> Child:
        deadline = start + until
        return crew.start(where, role, *words, deadline=deadline, is_full=args.full, env=env)

    wanted = place.local_rank if place and args.device is None else args.device
    machine = begin(times.driver, "machine", "machine")
    cpu = begin(times.devices, str(_C.cpu()), "device", "cpu", "0") if wanted is None else None
    folder = begin(times.all, "run", "run", args.run) if args.run else None
    server = begin(times.peers, "server", "server", args.server) if args.server else None

    crew.wait(machine)
    start += machine.starved()
    cuda = machine.facts.get("cuda") or silent(machine)
    report.facts |= known.here() | {"cuda": cuda, "gpus": machine.facts.get("gpus", [])}
    for name, text in known.lines(report.facts):
        report.describe(name, text)
    if place and args.device is None and cuda.get("count") == 1:
        wanted = 0  # the launcher lets each rank see its own
    chosen, told = choose(wanted, machine, cuda, is_asked=args.device is not None)
    if wanted is not None and not chosen and not cuda["usable"]:
        cpu = begin(times.devices, str(_C.cpu()), "device", "cpu", "0")  # there is nothing else
    sharing = place.local_size if place else max(1, len(chosen))
    cores = len(os.sched_getaffinity(0)) // sharing
    if "OMP_NUM_THREADS" not in os.environ:  # each compares with the CPU
        env["OMP_NUM_THREADS"] = str(max(1, cores))
    children = [begin(times.devices, name, "device", "cuda", str(i)) for i, name in chosen]
    report.add(*of_these(machine, chosen, wanted), *told)
    for child in ([] if cpu is None else [cpu]) + children:
        crew.wait(child)
        show(report, child)
    start += max((child.starved() for child in children), default=0.0)
    if not cuda["usable"]:
        report.describe("GPU", "none that can be used: the CPU alone was examined")
    if len(chosen) > 1 and all(child.ended == "done" for child in children):
        indices = [str(index) for index, _ in chosen]
        copies = begin(times.peers, "cuda()", "peers", str(slowest_link(report.facts)), *indices)
        crew.wait(copies)
        show(report, copies)
    if place and place.size > 1:
        together(crew, report, chosen, start + times.devices + MEET, env)
    if args.full:
        for (index, name), child in zip(chosen, children):
            if child.ended == "done":
                report.add(*recovery.examine(crew, name, index, start + times.all))
    for asked in (folder, server):
        if asked is not None:
            crew.wait(asked)
            show(report, asked)
            report.facts[asked.where] = asked.facts


def together(
    crew: Crew, report: Report, chosen: list[tuple[int, str]], meet: float, env: dict[str, str]
) -> None:
    """Adds what the ranks do together; where the own device has failed, the others are told so."""
    device = ("cuda", str(chosen[0][0])) if chosen else ("cpu", "0")
    failed = [finding.text for finding in report.failures if finding.where.endswith(")")]
    problem = failed[0][:300] if failed else ""
    options = {"deadline": meet + TOGETHER, "env": env, "is_doomed": True}
    child = crew.start("ranks", "ranks", *device, str(meet), problem, **options)
    crew.wait(child)
    report.facts["members"] = child.facts.get("members", [])
    found = ranks.findings(child)
    report.add(*found)
    if child.ended == "late" or any(finding.what == "death" for finding in found):
        # A launcher ends all ranks when one ends: the others name this one first.
        time.sleep(max(0.0, child.deadline - time.monotonic()))


def silent(machine: Child) -> dict[str, Any]:
    """The facts about CUDA where the driver did not come to tell them."""
    problem = f"asking the driver did not end: it stopped at {machine.doing}"
    driver = machine.facts.get("driver")
    remedy = "`nvidia-smi` will hang or fail as well: start the machine anew"
    return {
        "built": known.is_built(),
        "driver": driver,
        "usable": False,
        "problem": problem,
        "remedy": remedy,
    }


def choose(
    wanted: int | None, machine: Child, cuda: dict[str, Any], is_asked: bool = False
) -> tuple[list[tuple[int, str]], list[Finding]]:
    """The devices to examine, (index, name), and what is wrong with what was asked for: by a person
    (`is_asked`), who wants a GPU, or by torchrun, which counts ranks where there is none too."""
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


def of_these(machine: Child, chosen: list[tuple[int, str]], wanted: int | None) -> list[Finding]:
    """What the driver said: where one device was asked for, about its GPU and all in general."""
    uuids = machine.facts.get("uuids", [])
    if wanted is None or not chosen or len(uuids) <= chosen[0][0]:
        return machine.findings
    gpus = machine.facts.get("gpus", [])
    others = {f"GPU {g['index']}" for g in gpus if g.get("uuid") != uuids[chosen[0][0]]}
    return [finding for finding in machine.findings if finding.where not in others]


def slowest_link(facts: dict[str, Any]) -> float:
    """Bytes/s that a direct copy between two GPUs makes at least; 0 where the kind of GPU is not
    known."""
    if not all(peak(device["name"], "memory") for device in facts["devices"][1:]):
        return 0.0
    return LINKED if any(any(gpu.get("nvlinks") or []) for gpu in facts["gpus"]) else UNLINKED


def show(report: Report, child: Child) -> None:
    device, uuid = child.facts.get("device"), child.facts.get("uuid")
    if device is not None and not any(
        device["device"] == one["device"] for one in report.facts["devices"]
    ):
        report.facts["devices"].append(device | {"rates": child.facts.get("rates")})
        number = next((g["index"] for g in report.facts["gpus"] if g.get("uuid") == uuid), None)
        also = "" if number is None or uuid is None else f", GPU {number}"
        report.describe(device["device"], known.in_words(device) + also)
    if "peers" in child.facts:
        report.facts["peers"] = child.facts["peers"]
    report.add(*child.findings)
