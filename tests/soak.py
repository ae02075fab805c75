"""Soak test of a training that is killed and whose disk is full: nothing that was saved is lost.

    python tests/soak.py [PART...] [--count N] [--seed N]

Each part prints a line: how often it was tried, and the failures. What must hold after each fault:
the newest checkpoint that was ever reported as saved, or a newer one, can be read; the run goes on
by --resume auto; its end is that of a run that nothing ever hit, bit for bit. `make soak` runs it
whole, tests/test_soak.py a short form. A child is forked from a process that has imported
everything and computed nothing, so that a start costs milliseconds.
"""

from __future__ import annotations

import argparse
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(folder) for folder in (ROOT, ROOT / "apps", ROOT / "tests" / "apps")]

import numpy as np  # noqa: E402
import train_pythia  # noqa: E402
from small_runs import SMALL, TOKENS, checkpoint_of, flags, numbers_of, tensors_of  # noqa: E402

from needle.checkpoint import Checkpoint, CheckpointError, list_checkpoints  # noqa: E402
from needle.models import pythia  # noqa: E402

STEPS = 30


class Failure(AssertionError):
    """Something that had been saved is gone, or a run hung, ended otherwise than it should, or went
    another way."""


pythia.PRESETS["tiny"] = SMALL


def child(argv: list[str], prepare: Callable[[], None] = lambda: None) -> int:
    """Fork a training, in which `prepare` runs first. Returns its pid."""
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
    """Return the exit code; -9 for a kill."""
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
        """Return the newest step that can be read, which must not be below `saved`."""
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
        left = [path.name for path in (self.folder / "runs" / name).rglob("*.tmp")]
        if left:
            raise Failure(f"{name}: files are left over: {left}")
        shutil.rmtree(self.folder / "runs" / name)

    def hit(self, count: int, fault: Callable[[list[str]], None], what: str) -> None:
        """Cause `count` faults, in as many runs as that takes; each ends as the whole one."""
        number, saved, name = 0, 0, f"{what}-0"
        for _ in range(count):
            fault(self.argv(name))
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

    def fault(argv: list[str]) -> None:
        pid = child(argv)
        time.sleep(field.rng.random() ** 2 * 0.7)
        os.kill(pid, signal.SIGKILL)
        wait(pid)

    field.hit(count, fault, "kill")


def full_disks(field: Field, count: int) -> None:
    """Limit files to a random size: every kind of file meets it, checkpoints first."""
    largest = checkpoint_of(field.folder, "whole", STEPS).stat().st_size

    def fault(argv: list[str]) -> None:
        limit = int(field.rng.random() * 1.1 * largest)

        def prepare() -> None:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

        wait(child(argv, prepare))

    field.hit(count, fault, "disk")


PARTS = {"kills": (kills, 900), "full_disks": (full_disks, 200)}


def main() -> int:
    top = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    top.add_argument(
        "parts", nargs="*", choices=[[], *PARTS], metavar="PART", help=", ".join(PARTS)
    )
    top.add_argument("--count", type=int, metavar="N", help="tries of each part")
    top.add_argument("--seed", type=int, default=0, metavar="N")
    args = top.parse_args()
    code = 0
    for name in args.parts or PARTS:
        part, count = PARTS[name]
        count, began = args.count or count, time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            try:
                part(Field(Path(folder), random.Random(args.seed)), count)
                failures = "0"
            except Failure as error:
                code, failures = 1, str(error)
        took = time.monotonic() - began
        print(f"{name:12} {count:9,} tried, failures: {failures}  ({took:.0f} s)", flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
