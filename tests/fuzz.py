"""The fuzz of the C extension: every callable of needle._C, with hostile objects that change what
is being worked on. `make fuzz` runs it over the core built with the address and
undefined-behaviour sanitizers, tests/test_fuzz.py a short form over the core as it is.

    python tests/fuzz.py [--seconds N] [--count N] [--seed N] [--jobs N]

A case is a seed: some lines of Python, drawn one by one (tests/fuzzing/) and run. Children run
cases, so that a crash ends a child and not the fuzz. Each of these is a finding, printed with its
seed and with the lines, which can be pasted:

    a crash, a report of a sanitizer, a case that takes more than a minute
    SystemError, or any exception that neither the core's contract nor a hostile object has
    an array changed that is only read
    memory, arrays or references that are there when the case's names are gone, or that grow when
    its lines are run again and again

A finding with the first words of an earlier one is only counted. `--count 1 --seed N` repeats a
case. The exit code is 1 when anything was found.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import faulthandler
import gc
import os
import random
import re
import resource
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "csrc")]
sys.path.append(str(ROOT))  # last: the sanitized needle is on PYTHONPATH

import programs  # noqa: E402

programs.need_pytest()

A_LIFE = 400  # cases of a child, whose memory then goes back whole
PATIENCE = 60  # seconds for a case
HEAD = """import contextlib, sys
sys.path[:0] = ["tests", "tests/csrc"]
from fuzzing.hostile import *
from fuzzing.lines import TYPES, _C
go_on = contextlib.suppress(*ALLOWED)
def drop(name): globals().pop(name, None)"""
SANITIZED = hasattr(ctypes.CDLL(None), "__asan_init")


# ---- a child: cases, one after the other ---------------------------------------------------------
class Found(Exception):
    """What is a finding."""


def bits_of(names: dict) -> dict:
    """The bits of each array that lines can name: label -> (array, address of its memory, bits)."""
    from needle import _C

    array = _C.NDArray
    seen = {}
    for name, value in list(names.items()):
        inner = value.items() if type(value) is dict and name[0] == "v" else ()
        for label, x in [(name, value)] + [(f"{name}[{key!r}]", x) for key, x in inner]:
            if issubclass(type(x), array) and array.size.__get__(x) <= 5000:
                word = {1: "uint8", 2: "uint16", 4: "int32", 8: "int64"}[
                    array.nbytes.__get__(x) // max(array.size.__get__(x), 1) or 1
                ]
                if array.size.__get__(x):
                    bits = array.view(x, word).numpy().tobytes()
                    seen[label] = x, array._handle.__get__(x).ptr(), bits
    return seen


def check_unchanged(before: dict, names: dict, writes: tuple) -> None:
    written = {before[label][1] for label in writes if label in before}
    for label, (x, address, bits) in bits_of(names).items():
        known = before.get(label)
        if known and known[0] is x and address not in written and bits != known[2]:
            raise Found(f"an array that is only read has changed: {label}")


class Meter:
    """What must be back where it was: bytes in arrays, hostile objects, references."""

    def __init__(self) -> None:
        import numpy as np
        from fuzzing import hostile, lines

        self.hostile, self.cpu = hostile, lines._C.cpu()
        dtypes = {f"dtype {name}": np.dtype(name) for name in ("float32", "int64", "object")}
        singles = {"None": None, "True": True, "NotImplemented": NotImplemented, "...": ...}
        self.known = {"_C": lines._C, "cpu()": self.cpu, **lines.TYPES, **dtypes, **singles}
        self.allocated = None
        if SANITIZED:
            self.allocated = ctypes.CDLL(None)["__sanitizer_get_current_allocated_bytes"]
            self.allocated.restype = ctypes.c_size_t

    def at_rest(self) -> dict[str, int]:
        """After a case, exactly."""
        gc.collect()
        types = {f"references to {n}": sys.getrefcount(x) for n, x in self.known.items()
                 if isinstance(x, type)}  # fmt: skip
        return {
            "bytes in arrays": self.cpu.memory_stats()["live_bytes"],
            "hostile objects": sum(
                issubclass(type(x), self.hostile.Hostile) for x in gc.get_objects()
            ),
        } | types

    def growing(self) -> dict[str, int]:
        """What a few cases may grow, but not each."""
        gc.collect()
        sys._clear_type_cache()  # of up to 4,096 names that C has looked up
        more = self.allocated() // 16 if self.allocated else sys.getallocatedblocks()
        return {f"references to {n}": sys.getrefcount(x) for n, x in self.known.items()} | {
            "memory": more
        }


def run(text: str, names: dict, faults: list) -> None:
    try:
        exec(text, names)
    except BaseException as error:
        raise Found(f"{type(error).__name__}: {str(error)[:300]}") from None
    if faults:
        raise Found(faults[0])


def check_growth(meter: Meter, texts: list[str], times: int = 5) -> None:
    """Runs the lines again and again: what grows each time by as much leaks."""
    codes = [compile(text, "<line>", "exec") for text in texts]
    leaks, last = set(), {}
    for turn in range(6):
        for _ in range(times):
            names = fresh_names()
            for code in codes:
                with contextlib.suppress(BaseException):
                    exec(code, names)
            names.clear()
            rest(meter)
        now = meter.growing()
        grown = {name for name, n in now.items() if n - last.get(name, n) >= times}
        leaks, last = grown if turn < 3 else leaks & grown, now  # caches fill first
    if leaks:
        raise Found(f"leaks when it is repeated: {', '.join(sorted(leaks))}")


def rest(meter: Meter) -> None:
    gc.set_threshold(700, 10, 10)
    gc.collect()
    meter.hostile.LENT.clear()
    meter.hostile.KEPT.clear()


NAMES: dict = {}


def fresh_names() -> dict:
    names = dict(NAMES)
    exec(HEAD.splitlines()[-1], names)
    return names


def trim(names: dict, largest: int = 20_000) -> None:
    """Forgets what is so large that lines would take long."""
    import numpy as np

    from needle import _C

    gc.disable()  # what is collected may drop names
    there = list(names.items())
    gc.enable()
    for name, value in there:
        if issubclass(type(value), _C.NDArray):  # a proxy's isinstance asks what is gone
            shape = _C.NDArray.shape.__get__(value)
            if _C.NDArray.size.__get__(value) > largest or max(shape, default=0) > largest:
                names.pop(name, None)
        elif issubclass(type(value), np.ndarray) and value.nbytes > 16 * largest:
            names.pop(name, None)


def case(seed: int, meter: Meter, journal, reached: set) -> None:
    from fuzzing import grammar, hostile, lines

    rng = random.Random(seed)
    names = fresh_names()
    writer = lines.Lines(rng, names, reached)
    before, texts, repeats = meter.at_rest(), [], True
    journal.begin(seed)
    for _ in range(rng.randrange(3, 14)):
        drawn, writes = writer.draw()
        repeats = repeats and not any(w in t for t in drawn for w in grammar.NEVER_THE_SAME)
        for number, text in enumerate(drawn):
            texts.append(f"with go_on: {text}")
            journal.line(texts[-1])
            look = writes is not None and number == len(drawn) - 1
            bits = bits_of(names) if look else {}
            run(texts[-1], names, hostile.FAULTS)
            if look:
                check_unchanged(bits, names, writes)
            trim(names)
    names.clear()
    del writer, bits
    rest(meter)
    journal.line("# the end: the names go")
    if hostile.FAULTS:
        raise Found(hostile.FAULTS[0])
    after = meter.at_rest()
    grown = {name: after[name] - n for name, n in before.items() if after[name] != n}
    if grown and repeats:
        raise Found(f"left behind: {grown}")
    if repeats and seed % 16 == 0:
        journal.line("# again and again")
        check_growth(meter, texts)


class Journal:
    """What a child does, for whoever finds it dead."""

    def __init__(self, path: str) -> None:
        self.file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        self.lines = 0

    def begin(self, seed: int) -> None:
        os.ftruncate(self.file, 0)
        os.lseek(self.file, 0, os.SEEK_SET)
        self.line(f"# seed {seed}")

    def line(self, text: str) -> None:
        os.write(self.file, text.encode("utf-8", "backslashreplace") + b"\n")
        self.lines += 1


def child(seed: int, step: int, count: int, seconds: float, path: str) -> int:
    """Runs the cases of `seed`, `seed` + `step`, ...; its journal ends with what it has done."""
    if not SANITIZED:
        limit = (2 << 30) + int(Path("/proc/self/statm").read_text().split()[0]) * 4096
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        faulthandler.enable()  # the sanitizers say more
    import numpy as np

    warnings.simplefilter("ignore")
    np.seterr(all="ignore")
    exec(HEAD, NAMES)
    sys.setswitchinterval(1e-5)
    meter, journal, reached = Meter(), Journal(path), set()
    for index in range(64):  # made once
        NAMES["_C"].cpu(index), NAMES["_C"].cuda(index)
    gc.collect()
    gc.freeze()
    ends, done = time.monotonic() + seconds, 0
    while done < count and time.monotonic() < ends:
        faulthandler.dump_traceback_later(PATIENCE, exit=True)
        try:
            case(seed + done * step, meter, journal, reached)
        except Found as found:
            sys.stderr.write(f"FOUND {found}\n")
            sys.stderr.flush()
            os._exit(3)
        done += 1
    faulthandler.cancel_dump_traceback_later()
    journal.begin(seed)
    journal.line(f"done {done} {journal.lines} {' '.join(sorted(reached))}")
    return 0


# ---- the master ----------------------------------------------------------------------------------
def environment() -> dict[str, str]:
    bounds = "max_allocation_size_mb=64:hard_rss_limit_mb=2048:quarantine_size_mb=64"
    options = ":".join(filter(None, (os.environ.get("ASAN_OPTIONS"), bounds)))
    return os.environ | {"ASAN_OPTIONS": options, "OMP_NUM_THREADS": "1"}


def reason_of(code: int, stderr: str) -> str:
    """The first words of a finding."""
    for pattern in (r"^FOUND (.*)", r".*(runtime error: .*)", r"^(SUMMARY: .*)", r"^(Timeout .*)"):
        seen = re.search(pattern, stderr, re.MULTILINE)
        if seen:
            place = re.search(r"csrc/[\w/.]+:\d+", stderr) if "FOUND" not in pattern else None
            return seen[1] + (f" at {place[0]}" if place else "")
    return f"the child ended with {code}" + (" (killed)" if code < 0 else "")


class Job:
    """A child after the other, on seeds of its own."""

    def __init__(self, seed: int, step: int, folder: Path) -> None:
        self.seed, self.step = seed, step
        self.path, self.stderr = folder / f"{seed}.journal", folder / f"{seed}.stderr"
        self.process: subprocess.Popen | None = None

    def start(self, count: int, seconds: float) -> None:
        command = [sys.executable, __file__, "--child", str(self.path), "--step", str(self.step)]
        command += ["--seed", str(self.seed), "--count", str(count), "--seconds", str(seconds)]
        with open(self.stderr, "wb") as stderr:
            self.process = subprocess.Popen(
                command, env=environment(), stderr=stderr, stdin=subprocess.DEVNULL
            )


def fuzz(seconds: float, count: int, seed: int, jobs: int) -> int:
    ends, left = time.monotonic() + seconds, count
    findings, reached, cases, lines = Counter(), set(), 0, 0
    with tempfile.TemporaryDirectory() as folder:
        running = [Job(seed + j, jobs, Path(folder)) for j in range(jobs)]
        while running:
            for job in list(running):
                if job.process is not None:
                    try:
                        code = job.process.wait(0.2)
                    except subprocess.TimeoutExpired:
                        continue
                    journal = job.path.read_text() if job.path.exists() else ""
                    stderr = job.stderr.read_text(errors="replace")
                    done = re.search(r"^done (\d+) (\d+) (.*)$", journal, re.MULTILINE)
                    if code == 0 and done:
                        ran = int(done[1])
                        lines += int(done[2])
                        reached |= set(done[3].split())
                    else:
                        at = re.search(r"# seed (\d+)", journal)
                        if at is None:
                            raise SystemExit(f"fuzz: error: a child does not start:\n{stderr}")
                        ran = (int(at[1]) - job.seed) // job.step + 1
                        lines += journal.count("\n")
                        report(findings, code, journal, stderr)
                    job.seed += ran * job.step
                    cases, left = cases + ran, left - ran
                share = min(A_LIFE, -(-left // len(running)))
                if left <= 0 or time.monotonic() >= ends or sum(findings.values()) >= 500:
                    running.remove(job)
                else:
                    job.start(share, ends - time.monotonic())
    from fuzzing.lines import CALLABLES

    missed = sorted(set(CALLABLES) - reached)
    print(f"{cases:,} cases from seed {seed}, {lines:,} lines, "
          f"{len(CALLABLES) - len(missed)} of {len(CALLABLES)} callables reached")  # fmt: skip
    if missed:
        print(f"not reached: {' '.join(missed)}")
    for reason, times in findings.most_common():
        print(f"found {times} times: {reason}")
    print(f"findings: {len(findings)}", flush=True)
    return 1 if findings else 0


def report(findings: Counter, code: int, journal: str, stderr: str) -> None:
    stderr = re.sub(r"==\d+==WARNING: AddressSanitizer failed to allocate.*\n", "", stderr)
    reason = reason_of(code, stderr)
    findings[reason] += 1
    if findings[reason] == 1:
        print(f"---- found: {reason}\n{HEAD}\n{journal}---- stderr\n{stderr[-6000:]}", flush=True)


def main() -> int:
    top = argparse.ArgumentParser(description=programs.first_paragraph(__doc__))
    top.add_argument("--seconds", type=float, default=3600, metavar="N", help="3600 if not given")
    top.add_argument("--count", type=int, default=10**9, metavar="N", help="cases at most")
    top.add_argument("--seed", type=int, default=0, metavar="N", help="that of the first case")
    top.add_argument("--jobs", type=int, default=os.cpu_count(), metavar="N", help="children")
    top.add_argument("--child", help=argparse.SUPPRESS)
    top.add_argument("--step", type=int, help=argparse.SUPPRESS)
    args = top.parse_args()
    if args.child:
        return child(args.seed, args.step, args.count, args.seconds, args.child)
    return fuzz(args.seconds, args.count, args.seed, min(args.jobs, args.count))


if __name__ == "__main__":
    sys.exit(main())
