"""Faults planted on purpose, one at a time: does a test see each?

    python tests/mutants.py c|cuda|python [N...] [--jobs J]        after `make lib`; N: those alone

C and CUDA faults are lists (tests/planted/c.py, cuda.py), Python's are a sample that cosmic-ray
makes, the same each time for the same sources (tests/planted/python.py). Each is planted in a copy
of the checkout, with what was built there: only what changed is compiled, then the tests run that
the list names for the fault, then, where these pass, the wider ones. Each selection must pass
without a fault first. Where no GPU is, a CUDA fault only has to compile. A line a fault tells which
test caught it, a table the count by folder; the exit code is 1 where one lives that the list does
not say lives, and why.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import contextlib
import dataclasses
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import programs
from planted.fault import Fault, ListError

ROOT = Path(__file__).resolve().parent.parent
LEFT_OUT = {".git", "runs", "asan", ".pytest_cache", ".hypothesis", ".ruff_cache"}
WIDER_SECONDS = 3600  # that most of the suite may take
# setup.py builds what is not current, and what is current depends on the folder's name: here an
# object that is younger than its sources is.
BUILD = """
import runpy, sys
sys.path.insert(0, ".")
from building import steps
steps.Step.digest = lambda step: step.stamp.read_text() if step.stamp.exists() else ""
sys.argv = ["setup.py", "-q", "build_ext", "--inplace"]
runpy.run_path("setup.py", run_name="__main__")
"""


@dataclasses.dataclass(frozen=True)
class Kind:
    """What a language needs: its faults, how long a selection of tests may take, the tests for what
    the fault's own do not see, what else pytest is told."""

    faults: Callable[[], list[Fault]]
    seconds: int
    wider: Callable[[str], str] = lambda file: ""
    options: tuple[str, ...] = ()
    builds: bool = True
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)


def c_faults() -> list[Fault]:
    from planted import c

    return c.FAULTS


def cuda_faults() -> list[Fault]:
    from planted import cuda

    return cuda.FAULTS


def python_faults() -> list[Fault]:
    from planted import python

    return python.sample(ROOT)


def wider_python(file: str) -> str:
    from planted import python

    return python.wider(file)


CPU = ("-m", "not cuda and not parity")
KINDS = {
    "c": Kind(c_faults, 300, options=CPU, environment={"NEEDLE_CUDA": "0"}),
    "cuda": Kind(
        cuda_faults,
        90,
        options=("-m", "cuda"),
        environment={"NEEDLE_CUDA": "1", "NEEDLE_REQUIRE_CUDA": "1"},
    ),
    "python": Kind(python_faults, 300, wider_python, CPU, builds=False),
}


# ---- a copy of the checkout ----------------------------------------------------------------------


def left_out(folder: str, names: list[str]) -> list[str]:
    """Histories, runs and virtual environments. Compiled Python goes along: it is what makes the
    start of the tests quick."""
    venvs = {name for name in names if Path(folder, name, "pyvenv.cfg").exists()}
    return [name for name in names if name in LEFT_OUT | venvs]


@contextlib.contextmanager
def copy_of_the_tree():
    with tempfile.TemporaryDirectory(prefix="needle-mutant-") as folder:
        tree = Path(folder, "needle")
        shutil.copytree(ROOT, tree, ignore=left_out, symlinks=True)
        yield tree


def run(command: list[str], tree: Path, kind: Kind, seconds: float) -> tuple[int | None, str]:
    """(exit code, or None after so many seconds; what it printed)."""
    path = os.pathsep.join([str(tree), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    environment = os.environ | {"PYTHONPATH": path, "NEEDLE_TEST_SEED": "off"} | kind.environment
    with tempfile.TemporaryFile("w+") as output:  # no pipe: a grandchild may hold it open
        child = subprocess.Popen(
            command,
            cwd=tree,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = child.wait(seconds)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)  # and whatever a test has left running
            child.wait()
        output.seek(0)
        return code, output.read()


def build(tree: Path, kind: Kind) -> None:
    code, said = run([sys.executable, "-W", "ignore", "-c", BUILD], tree, kind, 1800)
    if code != 0:
        raise ListError(f"the planted fault does not compile:\n{said[-3000:]}")


def caught_by(tree: Path, kind: Kind, tests: str, seconds: int) -> str | None:
    """The first test that fails, or how all of them ended; None where all pass."""
    command = [sys.executable, "-W", "error", "-m", "pytest", "-q", "-x"]
    command += ["-p", "no:cacheprovider", *kind.options, *shlex.split(tests)]
    code, said = run(command, tree, kind, seconds)
    if code == 0:
        return None
    if code == 5:
        raise ListError(f"`pytest {tests}` selects no test")
    found = re.search(r"^(?:FAILED|ERROR) (\S+)", said, re.MULTILINE)
    if found:
        return found[1]
    if code is None:
        return f"no end after {seconds} s"
    if code < 0:
        name = next((one.name for one in signal.Signals if one == -code), f"signal {-code}")
        return f"the end of the process by {name}"
    last = said.strip().splitlines()[-1:] or ["nothing"]
    return f"exit code {code} of pytest, which said {last[0]}"


# ---- one fault -----------------------------------------------------------------------------------


@dataclasses.dataclass
class Verdict:
    number: int
    fault: Fault
    line: int
    tested: bool
    caught: str | None
    seconds: float

    def __str__(self) -> str:
        what = f"caught by {self.caught}" if self.caught else "LIVES" if self.tested else "compiles"
        if self.tested and not self.caught:
            before, after = (" ".join(t.split())[:160] for t in (self.fault.text, self.fault.into))
            what += f"\n      - {before}\n      + {after}"
            what += f"\n      because {self.fault.lives}" if self.fault.lives else ""
        return f"{self.number:4} {self.fault.file}:{self.line} {what} ({self.seconds:.0f} s)"


def judge(number: int, fault: Fault, kind: Kind, tested: bool) -> Verdict:
    started = time.monotonic()
    with copy_of_the_tree() as tree:
        line = fault.plant(tree)
        if kind.builds:
            build(tree, kind)
        caught = None
        if tested:
            caught = caught_by(tree, kind, fault.tests, kind.seconds)
            wider = kind.wider(fault.file) if caught is None and not fault.lives else ""
            caught = caught_by(tree, kind, wider, WIDER_SECONDS) if wider else caught
    return Verdict(number, fault, line, tested, caught, time.monotonic() - started)


def passes_without(tests: str, kind: Kind) -> None:
    with copy_of_the_tree() as tree:
        if kind.builds:
            build(tree, kind)
        failed = caught_by(tree, kind, tests, kind.seconds)
    if failed:
        raise ListError(f"without any fault, `pytest {tests}` does not pass: {failed}")


def folder_of(file: str) -> str:
    return str(Path(file).parent) if "/" in file else "the root"


def table(verdicts: Iterable[Verdict]) -> str:
    """Planted, caught and living faults by folder."""
    rows: dict[str, collections.Counter] = collections.defaultdict(collections.Counter)
    for verdict in verdicts:
        said = "lives, as listed" if verdict.fault.lives else "lives"
        for row in (folder_of(verdict.fault.file), "all"):
            rows[row].update(["planted", "caught" if verdict.caught else said])
    columns = ("planted", "caught", "lives", "lives, as listed")
    lines = ["| folder | " + " | ".join(columns) + " |", "|---|" + "---|" * len(columns)]
    for row in sorted(rows, key=lambda row: (row == "all", row)):
        lines.append(f"| {row} | " + " | ".join(str(rows[row][c]) for c in columns) + " |")
    return "\n".join(lines)


def has_gpu() -> bool:
    code = "import needle; raise SystemExit(not needle.cuda().enabled())"
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("numbers", nargs="*", type=int, metavar="N", help="these alone, from 1")
    parser.add_argument("--jobs", type=int, default=1, help="so many at a time (default: 1)")
    arguments = parser.parse_args()
    programs.need_pytest()  # which would fail for every fault, as if a test had caught it
    kind = KINDS[arguments.kind]
    faults = dict(enumerate(kind.faults(), 1))
    if unknown := set(arguments.numbers) - set(faults):
        parser.error(f"there are faults 1 to {len(faults)}, and none of {sorted(unknown)}")
    if not list((ROOT / "needle").glob("_C.*.so")):
        parser.error(f"{ROOT} is not built: make lib")
    chosen = {n: faults[n] for n in arguments.numbers or faults}
    tested = arguments.kind != "cuda" or has_gpu()
    verdicts = []
    with concurrent.futures.ThreadPoolExecutor(arguments.jobs) as pool:
        try:
            work = [pool.submit(judge, n, fault, kind, tested) for n, fault in chosen.items()]
            selections = dict.fromkeys(fault.tests for fault in chosen.values() if tested)
            work += [pool.submit(passes_without, tests, kind) for tests in selections]
            for done in concurrent.futures.as_completed(work):
                if verdict := done.result():
                    verdicts.append(verdict)
                    print(verdict, flush=True)
        except ListError as error:
            pool.shutdown(cancel_futures=True)
            print(f"needle: error: {error}", file=sys.stderr)
            return 2
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    if not tested:
        print(f"{len(verdicts)} faults compile; no GPU to test them on")
        return 0
    print(table(verdicts))
    wrong = [v for v in verdicts if bool(v.caught) == bool(v.fault.lives)]
    for verdict in wrong:
        if verdict.caught:
            print(f"{verdict.number} is listed as living, and was caught: take `lives` away")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
