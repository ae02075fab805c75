"""A supervised training with random faults, hangs and kills. Its losses and its last checkpoint
must equal those of the same training without faults, bit for bit.

    python tests/supervised_soak.py [--device cuda] [--steps N] [--faults N] [--seed N]

On a GPU a fault is a real one: a kernel reads memory without an owner. tests/apps/
test_supervised_run.py runs a short form. The struck training is this file too:

    python tests/supervised_soak.py child PLAN FLAGS OF TRAIN_PYTHIA ...

PLAN is a JSON list of [step, moment, fault]; each strikes once, one at a
time, in the first attempt that reaches it.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "apps"), str(ROOT / "tests" / "apps")]

import programs  # noqa: E402
from programs import Failure  # noqa: E402

programs.need_pytest()

import numpy as np  # noqa: E402
import train_pythia  # noqa: E402
from harness import Foreign  # noqa: E402
from small_runs import SMALL, TOKENS, checkpoint_of, flags, numbers_of, tensors_of  # noqa: E402

import needle as ndl  # noqa: E402
from needle import _C, files  # noqa: E402
from needle.models import pythia  # noqa: E402
from needle.training import run as run_parts  # noqa: E402
from needle.training.log import RunLog  # noqa: E402

SAVE_EVERY = 10
MOMENTS = ("begin", "middle", "end")  # of a step; where it is saved also "save"
FAULTS = ("fault", "kill", "segv", "exit", "hang", "stop")


# ---- the child ----------------------------------------------------------------------------------


def fault(device: str) -> None:
    """A fatal one; of a training on the CPU only the exception."""
    if device == "cpu":
        raise ndl.CudaFatalError("exp: injected: an illegal memory access")
    array = ndl.NDArray([1.0, 2.0], device=ndl.cuda())
    _C.from_dlpack(Foreign(array)).exp()


def strike(kind: str, device: str) -> None:
    if kind == "fault":
        fault(device)
    elif kind == "exit":
        os._exit(75)
    elif kind == "hang":
        time.sleep(3600)
    else:
        numbers = {"kill": signal.SIGKILL, "segv": signal.SIGSEGV, "stop": signal.SIGSTOP}
        os.kill(os.getpid(), numbers[kind])


def child(plan: Path, argv: list[str]) -> int:
    """train_pythia with the faults of the plan."""
    faults, device = json.loads(plan.read_text()), argv[argv.index("--device") + 1]
    at = 0

    def come_by(moment: str) -> None:
        for number, (step, when, kind) in enumerate(faults):
            if (step, when) == (at, moment):
                try:
                    plan.with_name(f"{plan.name}.{number}").touch(exist_ok=False)
                except FileExistsError:
                    continue
                strike(kind, device)
                return  # a GPU's fault is seen later, and the next one strikes another attempt

    def before(moment: str, function: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            come_by(moment)
            return function(*args, **options)

        return call

    schedule_of = train_pythia.schedule_of

    def counting(settings: dict) -> Any:
        schedule = schedule_of(settings)

        def rate(step: int) -> float:
            nonlocal at
            at = step
            come_by("begin")
            return schedule(step)

        return rate

    train_pythia.schedule_of = counting
    parallel = train_pythia.DataParallel
    parallel.reduce = before("middle", parallel.reduce)
    RunLog.queue = before("end", RunLog.queue)
    files.os.replace = before("save", os.replace)
    pythia.PRESETS["tiny"] = SMALL
    run_parts.SAMPLE_TOKENS = 4
    return train_pythia.main(argv)


# ---- the two runs -------------------------------------------------------------------------------


def command(folder: Path, name: str, steps: int, device: str, plan: list) -> list[str]:
    """The struck training `name`, which begins or goes on."""
    np.save(folder / "tokens.npy", TOKENS)
    dtype = "float32" if device == "cpu" else "bfloat16"
    more = ("--grad-accum", "2", "--save-every", str(SAVE_EVERY), "--eval-every", "25")
    argv = flags(
        folder, folder / "tokens.npy", name, *more, device=device, dtype=dtype, steps=steps
    )
    return child_of(folder, name, plan, argv)


def child_of(folder: Path, name: str, plan: list, argv: list[str]) -> list[str]:
    """The words of a training that the plan strikes."""
    (folder / name).write_text(json.dumps(plan))
    return [sys.executable, "-u", __file__, "child", str(folder / name), *argv]


def start(folder: Path, words: list[str], **options: Any) -> subprocess.Popen:
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "NEEDLE_CACHE": str(folder / "cache")}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(words, env=environment, **{**pipes, **options})


def supervised(words: list[str], hang_seconds: float) -> list[str]:
    hang = f"--hang-seconds={hang_seconds}"
    return [sys.executable, "-m", "needle.supervise", hang, "--", *words]


def faults_of(folder: Path, name: str) -> list[dict]:
    path = folder / "runs" / name / "faults.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def compare(folder: Path, struck: str, whole: str, steps: int) -> None:
    if numbers_of(folder, struck) != numbers_of(folder, whole):
        raise Failure(f"the losses of {struck} are not those of {whole}")
    if tensors_of(checkpoint_of(folder, struck, steps)) != tensors_of(
        checkpoint_of(folder, whole, steps)
    ):
        raise Failure(f"the last checkpoint of {struck} is not that of {whole}")


def random_plan(steps: int, count: int, seed: int) -> list[tuple[int, str, str]]:
    """Draw so many faults, each kind as often as the others, each at a step of its own."""
    rng = random.Random(seed)
    plan = []
    for number, step in enumerate(sorted(rng.sample(range(1, steps + 1), count))):
        moments = MOMENTS + ("save",) * (step % SAVE_EVERY == 0)
        plan.append((step, rng.choice(moments), FAULTS[number % len(FAULTS)]))
    kinds = [kind for _, _, kind in plan]
    rng.shuffle(kinds)
    return [(step, moment, kind) for (step, moment, _), kind in zip(plan, kinds)]


def soak(device: str, steps: int, count: int, seed: int, hang_seconds: float) -> str:
    """Runs both and compares; the line to print. Failure where anything is."""
    plan = random_plan(steps, count, seed)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        whole = start(folder, command(folder, "whole", steps, device, []))
        out, err = whole.communicate()
        if whole.returncode != 0:
            raise Failure(f"the run that nothing strikes does not end: {out}{err}")
        words = supervised(command(folder, "struck", steps, device, plan), hang_seconds)
        struck = start(folder, words)
        out, err = struck.communicate()
        failures = faults_of(folder, "struck")
        if struck.returncode != 0 or len(failures) != count:
            raise Failure(f"exit code {struck.returncode}, {len(failures)} failures: {out}{err}")
        compare(folder, "struck", "whole", steps)
        kinds = Counter(kind for _, _, kind in plan)
        listed = ", ".join(f"{number} {kind}" for kind, number in sorted(kinds.items()))
        return (
            f"{steps} steps on {device}, {count} faults ({listed}): losses and checkpoint "
            f"bit-equal\n{err.splitlines()[-1]}"
        )


def main() -> int:
    if sys.argv[1:2] == ["child"]:
        return child(Path(sys.argv[2]), sys.argv[3:])
    top = argparse.ArgumentParser(description=programs.first_paragraph(__doc__))
    top.add_argument("--device", default="cpu", metavar="NAME", help="cpu or cuda (default: cpu)")
    top.add_argument("--steps", type=int, default=300, metavar="N")
    top.add_argument("--faults", type=int, default=20, metavar="N")
    top.add_argument("--seed", type=int, default=0, metavar="N")
    top.add_argument("--hang-seconds", type=float, default=10.0, metavar="S")
    args = top.parse_args()
    try:
        print(soak(args.device, args.steps, args.faults, args.seed, args.hang_seconds))
    except Failure as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code) if code == os.EX_TEMPFAIL else sys.exit(code)
