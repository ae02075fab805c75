"""Soak test of trainings, which must lose nothing: kills, fights for a folder, disks that fill or
fail, rights that are taken away, memory that runs out, damaged files, trainings under a supervisor,
long runs.
`make soak` runs it whole, tests/test_soak.py a short form.

    python tests/soak.py [PART...] [--count N] [--seed N]

Each part prints a line: how often it was tried, and the failures. A child is forked from a process
that has imported everything and computed nothing, so that a start costs milliseconds. What must
hold after each fault: the newest checkpoint that was ever reported as saved, or a newer one, can be
read; the run goes on by --resume auto; its end is that of a run that nothing ever hit, bit for bit.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TESTS = ROOT / "tests"
sys.path[:0] = [str(f) for f in (ROOT, ROOT / "apps", TESTS / "apps", TESTS / "distributed")]

import programs  # noqa: E402
from programs import Failure  # noqa: E402

programs.need_pytest()

import nth_allocation  # noqa: E402
import numpy as np  # noqa: E402
import rank_runs  # noqa: E402
import ranks_soak  # noqa: E402
import supervised_soak  # noqa: E402
import train_pythia  # noqa: E402
from small_runs import SMALL, TOKENS, checkpoint_of, flags, numbers_of, tensors_of  # noqa: E402

from needle import cuda, files  # noqa: E402
from needle.checkpoint import Checkpoint, CheckpointError, list_checkpoints  # noqa: E402
from needle.models import pythia  # noqa: E402
from needle.training import run as run_parts  # noqa: E402

with contextlib.suppress(ImportError):  # here, not in each child
    from matplotlib import pyplot, ticker  # noqa: F401

STEPS = 30
pythia.PRESETS["tiny"] = SMALL
run_parts.SAMPLE_TOKENS = 4


def child(argv: list[str], prepare: Callable[[], None] = lambda: None) -> int:
    """The pid of a forked training. `prepare` runs in it first."""
    pid = os.fork()
    if pid:
        return pid
    code = 99
    try:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
        prepare()
        code = train_pythia.main(argv)
    finally:
        os._exit(code)


def wait(pid: int) -> int:
    """The exit code; -9 for a kill."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


class Field:
    """A folder in which runs are hit, beside one that is not."""

    def __init__(self, folder: Path, rng: random.Random) -> None:
        self.folder, self.rng = folder, rng
        os.environ["NEEDLE_CACHE"] = str(folder / "cache")
        np.save(folder / "tokens.npy", TOKENS)
        if wait(child(self.argv("whole"))) != 0:
            raise Failure("the run that nothing hits does not end")
        self.numbers = numbers_of(folder, "whole")
        self.tensors = tensors_of(checkpoint_of(folder, "whole", STEPS))

    def argv(self, name: str) -> list[str]:
        more = ("--grad-accum", "2", "--resume", "auto")
        argv = flags(self.folder, self.folder / "tokens.npy", name, *more, steps=STEPS)
        return [*argv, "--save-every", "1", "--eval-every", "0"]

    def check(self, name: str, saved: int) -> int:
        """The newest step that can be read, which must not be below `saved`."""
        steps = []
        for path in list_checkpoints(self.folder / "runs" / name / "checkpoints"):
            try:
                steps.append(Checkpoint(path).state["step"])
            except CheckpointError:
                pass  # it may be damaged, as long as another is whole
        newest = max(steps, default=0)
        if newest < saved:
            raise Failure(
                f"{name}: step {saved} had been saved, and step {newest} is the newest left"
            )
        return newest

    def check_end(self, name: str) -> None:
        if numbers_of(self.folder, name) != self.numbers:
            raise Failure(f"{name}: its numbers are not those of the run that nothing hit")
        if tensors_of(checkpoint_of(self.folder, name, STEPS)) != self.tensors:
            raise Failure(f"{name}: its last checkpoint differs")
        folder = self.folder / "runs" / name
        left = [path.name for path in folder.rglob("*") if path.name.endswith(".tmp")]
        steps = [path.name for path in list_checkpoints(folder / "checkpoints")]
        # Two are kept; the last save may have been hit before it deleted the third.
        if left or len(steps) not in (2, 3):
            raise Failure(f"{name}: files are left over: {left}, {steps}")
        shutil.rmtree(folder)

    def hit(self, count: int, inject: Callable[[list[str]], None], what: str) -> None:
        """`count` faults in as many runs as that takes; each ends as the whole one."""
        number, saved, name = 0, 0, f"{what}-0"
        for _ in range(count):
            inject(self.argv(name))
            saved = self.check(name, saved)
            if saved == STEPS and wait(child(self.argv(name))) == 0:
                self.check_end(name)
                number, saved = number + 1, 0
                name = f"{what}-{number}"
        if wait(child(self.argv(name))) != 0:
            raise Failure(f"{name}: it does not go on")
        self.check_end(name)


def kills(field: Field, count: int) -> None:
    """SIGKILL at a random moment."""

    def inject(argv: list[str]) -> None:
        pid = child(argv)
        time.sleep(field.rng.random() ** 2 * 0.7)
        os.kill(pid, signal.SIGKILL)
        wait(pid)

    field.hit(count, inject, "kill")


def kills_in_a_save(field: Field, count: int) -> None:
    """SIGKILL between two system calls of a save: before or after an fsync or a rename."""

    def inject(argv: list[str]) -> None:
        at, seen = field.rng.randrange(1, 24), []

        def deadly(function):
            def call(*args, **options):
                for _ in range(2):
                    seen.append(1)
                    if len(seen) == at:
                        os.kill(os.getpid(), signal.SIGKILL)
                    if len(seen) % 2:
                        result = function(*args, **options)
                return result

            return call

        def prepare() -> None:
            files.os.fsync, files.os.replace = deadly(os.fsync), deadly(os.replace)

        wait(child(argv, prepare))

    field.hit(count, inject, "save")


def fights(field: Field, count: int) -> None:
    """Two processes begin in one folder at once: one trains, the other is refused."""
    for number in range(count):
        name = f"fight-{number}"
        codes = [wait(pid) for pid in [child(field.argv(name)), child(field.argv(name))]]
        if 0 not in codes or not set(codes) <= {0, 1}:
            raise Failure(f"{name}: exit codes {codes}")
        field.check_end(name)


def full_disks(field: Field, count: int) -> None:
    """Limit files to a random size: every kind of file meets it, checkpoints first."""
    largest = checkpoint_of(field.folder, "whole", STEPS).stat().st_size

    def inject(argv: list[str]) -> None:
        limit = int(field.rng.random() * 1.1 * largest)

        def prepare() -> None:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

        wait(child(argv, prepare))

    field.hit(count, inject, "disk")


def io_errors(field: Field, count: int) -> None:
    """The n-th of the calls open, listdir, fsync, rename, unlink fails: EIO, EACCES or ENOSPC."""

    def inject(argv: list[str]) -> None:
        at, number = field.rng.randrange(1, 40), field.rng.choice([5, 13, 28])
        seen = []

        def failing(function):
            def call(*args, **options):
                seen.append(1)
                if len(seen) == at:
                    raise OSError(number, os.strerror(number), str(args[0]) if args else None)
                return function(*args, **options)

            return call

        def prepare() -> None:
            for name in ("open", "listdir", "fsync", "replace", "unlink"):
                setattr(os, name, failing(getattr(os, name)))

        wait(child(argv, prepare))

    field.hit(count, inject, "error")


def give_up_rights() -> None:
    """Drop the capabilities of root (capset(2)), so that permissions bind."""
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)  # the version of the structures, this process
    if ctypes.CDLL(None).capset(header, (ctypes.c_uint32 * 6)()) != 0:
        raise OSError("the system does not let a process give up its rights")


def permissions(field: Field, count: int) -> None:
    """Rights on the run's folders and files are taken away at a random moment, and given back when
    the run has ended; before that, half of the times, it is begun once more."""

    def inject(argv: list[str]) -> None:
        folder = Path(argv[argv.index("--out") + 1]) / argv[argv.index("--name") + 1]
        pid = child(argv, give_up_rights)
        time.sleep(field.rng.random() ** 2 * 0.7)
        there = [folder, *sorted(folder.rglob("*"))] if folder.exists() else []
        taken = []
        for path in field.rng.sample(there, min(len(there), field.rng.randrange(1, 3))):
            with contextlib.suppress(FileNotFoundError):  # pruned by now
                before = path.stat().st_mode
                path.chmod(field.rng.choice([0, 0o100, 0o200, 0o400, 0o500]))
                taken.append((path, before))
        codes = [wait(pid)]
        if field.rng.random() < 0.5:
            codes.append(wait(child(argv, give_up_rights)))
        for path, before in taken:
            with contextlib.suppress(FileNotFoundError):
                path.chmod(before)
        if not set(codes) <= {0, 1}:
            raise Failure(f"{folder.name}: exit codes {codes}")

    closed = field.folder / "closed"
    closed.mkdir(mode=0)
    pid = os.fork()
    if pid == 0:
        give_up_rights()
        os._exit(int(os.access(closed, os.R_OK)))
    if wait(pid) != 0:
        raise Failure("permissions do not bind this user: nothing could be tried")
    field.hit(count, inject, "rights")


def allocations(field: Field, count: int) -> None:
    """The n-th allocation of needle's C code fails, or the n-th object of Python that it asks for,
    in any thread; half of the times all after it as well."""
    injector = nth_allocation.Injector()

    def inject(argv: list[str]) -> None:
        kind, most = field.rng.choice([("needle", 9000), ("python", 21000)])
        number = int(field.rng.random() ** 2 * most) + 1
        failing = field.rng.choice([1, nth_allocation.FOREVER]) if kind == "needle" else 1

        def prepare() -> None:
            signal.alarm(300)  # it shall end, and not wait for ever
            injector.functions.arm(nth_allocation.KINDS[kind], number, failing, 1)

        code = wait(child(argv, prepare))
        if code not in (0, 1):
            raise Failure(f"allocation {number} of {kind} fails: exit code {code}")

    field.hit(count, inject, "memory")


def every_allocation(field: Field, count: int) -> None:
    """Fail each allocation of the first `count` operations of nth_allocation.py."""
    ways = [("cpu", "needle"), ("cpu", "python")]
    if cuda().enabled():
        ways += [("cuda", kind) for kind in nth_allocation.KINDS]
    program, names = nth_allocation.__file__, list(nth_allocation.OPERATIONS)[:count]
    for device, kind in ways:
        command = [sys.executable, program, device, kind, *names]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            raise Failure(done.stderr[-2000:])


def damaged_files(field: Field, count: int) -> None:
    """So many damaged files of each kind, checkpoints too (data/test_damaged_files.py)."""
    words = str(TESTS / "data" / "test_damaged_files.py"), "-k", "as_they_are_or_refused"
    seed = f"--hypothesis-seed={field.rng.randrange(2**32)}"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", seed, *words],
        env=os.environ | {"NEEDLE_TEST_EXAMPLES": str(count)},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if done.returncode != 0:
        raise Failure(done.stdout[-2000:] + done.stderr)


def long_run(field: Field, count: int) -> None:
    """`count` steps: memory and files at the end are those of the first tenth."""
    folder = field.folder / "runs" / "long"
    argv = flags(field.folder, field.folder / "tokens.npy", "long", steps=count)
    pid = child([*argv, "--save-every", str(max(count // 100, 1)), "--eval-every", "0"])
    seen, done = [], (0, 0)
    while done == (0, 0):
        time.sleep(0.05)
        done = os.waitpid(pid, os.WNOHANG)
        try:
            resident = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096
            names = [p for p in folder.rglob("*") if not p.name.endswith(".tmp")]
            lines = (folder / "metrics.jsonl").read_bytes().count(b"\n")
            seen.append((lines, resident, len(names)))
        except (OSError, IndexError):
            continue
    if os.waitstatus_to_exitcode(done[1]) != 0:
        raise Failure("the long run does not end")
    early = [entry for entry in seen if 0.05 * count < entry[0] <= 0.3 * count]
    late = [entry for entry in seen if 0.7 * count < entry[0] < count]  # then it plots and samples
    if early and late:
        grown = max(entry[1] for entry in late) - max(entry[1] for entry in early)
        if grown > 8 << 20:
            raise Failure(f"memory grew by {grown >> 20} MiB between a third and the end")
        # For a moment there is a checkpoint more, between a save and the pruning after it.
        if min(entry[2] for entry in late) > max(entry[2] for entry in early):
            raise Failure("files grew in number")
    shutil.rmtree(folder)


def supervised(field: Field, count: int) -> None:
    """Faults in a training under its supervisor, one in 15 steps (supervised_soak.py)."""
    device, seed = "cuda" if cuda().enabled() else "cpu", field.rng.randrange(2**32)
    print(supervised_soak.soak(device, 15 * count, count, seed, hang_seconds=10.0))


def ranks(field: Field, count: int) -> None:
    """Faults in several ranks of one training, by mpirun (distributed/ranks_soak.py)."""
    problem = rank_runs.missing()
    if problem is not None:
        raise Failure(f"not tried: {problem}")
    print(ranks_soak.soak(field.folder, count, field.rng.randrange(2**32)))


# part -> how often in the whole soak test
PARTS = {
    "kills": 900,
    "kills_in_a_save": 100,
    "fights": 100,
    "full_disks": 200,
    "io_errors": 400,
    "permissions": 300,
    "allocations": 1000,
    "every_allocation": 15,
    "damaged_files": 10_000,
    "supervised": 20,
    "ranks": 100,
    "long_run": 10_000,
}


def soak(counts: dict[str, int], seed: int) -> int:
    """Runs the parts and prints the table; 1 on any failure."""
    code = 0
    for name, count in counts.items():
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            try:
                globals()[name](Field(Path(folder), random.Random(seed)), count)
                failures = "0"
            except Failure as error:
                code, failures = 1, str(error)
        took = time.monotonic() - began
        print(f"{name:16} {count:9,} tried, failures: {failures}  ({took:.0f} s)", flush=True)
    return code


def main() -> int:
    top = argparse.ArgumentParser(description=programs.first_paragraph(__doc__))
    top.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}")
    top.add_argument("--count", type=int, metavar="N", help="tries of each part")
    top.add_argument("--seed", type=int, default=0, metavar="N")
    args = top.parse_args()
    unknown = set(args.parts) - PARTS.keys()
    if unknown:
        top.error(f"there is no part {min(unknown)!r}; there are {', '.join(PARTS)}")
    return soak({name: args.count or PARTS[name] for name in args.parts or PARTS}, args.seed)


if __name__ == "__main__":
    sys.exit(main())
