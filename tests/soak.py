"""Soak test of a training that is killed: nothing that was saved is lost.

    python tests/soak.py [--count N] [--seed N]

It prints how often it killed, and the failure. What must hold after each kill: the newest
checkpoint that was ever reported as saved, or a newer one, can be read; the run goes on by
--resume auto; its end is that of a run that nothing ever hit, bit for bit. `make soak` runs it
whole, tests/test_soak.py a short form. A child is forked from a process that has imported
everything and computed nothing, so that a start costs milliseconds.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(folder) for folder in (ROOT, ROOT / "apps", ROOT / "tests" / "apps")]

import programs  # noqa: E402
from programs import Failure  # noqa: E402

programs.need_pytest()

import numpy as np  # noqa: E402
import train_pythia  # noqa: E402
from small_runs import SMALL, TOKENS, checkpoint_of, flags, numbers_of, tensors_of  # noqa: E402

from needle.checkpoint import Checkpoint, CheckpointError, list_checkpoints  # noqa: E402
from needle.models import pythia  # noqa: E402

STEPS = 30
pythia.PRESETS["tiny"] = SMALL


def child(argv: list[str]) -> int:
    """Fork a training. Returns its pid."""
    pid = os.fork()
    if pid:
        return pid
    code = 99
    try:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
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

    def kill(self, count: int) -> None:
        """Kill `count` times at a random moment, in as many runs as that takes; each ends as the
        whole one."""
        number, saved, name = 0, 0, "killed-0"
        for _ in range(count):
            pid = child(self.argv(name))
            time.sleep(self.rng.random() ** 2 * 0.7)
            os.kill(pid, signal.SIGKILL)
            wait(pid)
            saved = self.check(name, saved)
            if saved == STEPS and wait(child(self.argv(name))) == 0:
                self.check_end(name)
                number, saved = number + 1, 0
                name = f"killed-{number}"
        if wait(child(self.argv(name))) != 0:
            raise Failure(f"{name}: it does not go on")
        self.check_end(name)


def main() -> int:
    top = argparse.ArgumentParser(description=programs.first_paragraph(__doc__))
    top.add_argument("--count", type=int, default=900, metavar="N", help="kills")
    top.add_argument("--seed", type=int, default=0, metavar="N")
    args = top.parse_args()
    began, failures = time.monotonic(), "0"
    with tempfile.TemporaryDirectory() as folder:
        try:
            Field(Path(folder), random.Random(args.seed)).kill(args.count)
        except Failure as error:
            failures = str(error)
    took = time.monotonic() - began
    print(f"{args.count:,} kills, failures: {failures}  ({took:.0f} s)")
    return int(failures != "0")


if __name__ == "__main__":
    sys.exit(main())
