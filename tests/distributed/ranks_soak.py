"""Faults in trainings of several ranks: kills, stops, signals, wrong bits. Each run then goes on
with another number of ranks, and ends as one that nothing hit."""

from __future__ import annotations

import random
import subprocess
import threading
import time
from pathlib import Path

from programs import Failure
from rank_runs import MPIRuns, write_tokens

from needle.checkpoint import list_checkpoints, step_of

STEPS = MPIRuns.steps
DEADLINE = 4.0  # seconds, of the ranks of a soak test
MARGIN = 20.0  # for mpirun to start them, and to see that they have ended
EXIT = {"term": 0, "data": 1, "nan": 1, "full": 1, "bit": 75, "kill": None, "stop": None}


def plan_of(rng: random.Random, ranks: int, done: int) -> dict:
    """A fault to come after step `done`."""
    # One rank alone is verified by no other, and no other ends it when it is stopped.
    what = rng.choice([w for w in EXIT if w not in ("bit", "stop") or ranks > 1])
    rank, step = rng.randrange(ranks), rng.randrange(done + 1, STEPS)
    if what == "full":  # where rank 0 saves
        rank, step = 0, -(-step // 20) * 20
    elif what == "bit":  # a micro-batch that is verified: number step % 4, its rank's first
        fitting = [s for s in range(done + 1, STEPS) if s % 4 == rank * (4 // ranks)]
        step = rng.choice(fitting)
    return {"what": what, "rank": rank, "step": step, "deadline": DEADLINE}


def next_step(log: Path, begun: float, found: list[float]) -> None:
    """Wait until the log has its next line."""
    size = log.stat().st_size
    while time.monotonic() < begun + 100:
        now = log.stat().st_size if log.exists() else 0
        if now > size:
            found.append(time.monotonic() - begun)
            return
        size = min(size, now)
        time.sleep(0.02)


def soak(folder: Path, faults: int, seed: int) -> str:
    rng, runs = random.Random(seed), MPIRuns(folder, write_tokens(folder / "tokens.npy"))
    runs.run("whole", 0)
    whole, given, ends, waits, number = runs.written("whole"), 0, [], [], 0
    while given < faults:
        number += 1
        name, done = f"run_{number}", 0
        log, mark = folder / name / "metrics.jsonl", folder / f"{name}.mark"
        for _ in range(min(rng.randrange(1, 5), faults - given)):
            saved = list_checkpoints(folder / name / "checkpoints")
            done = step_of(saved[0]) if saved else 0
            if done >= STEPS - 5:
                break
            ranks = rng.choice([1, 2, 4])
            plan = plan_of(rng, ranks, done)
            mark.unlink(missing_ok=True)
            more = ["--resume", "auto", *(["--verify", "1"] if plan["what"] == "bit" else [])]
            process = runs.start(name, ranks, *more, plan={**plan, "mark": str(mark)})
            threading.Thread(target=process.wait, daemon=True).start()
            while process.poll() is None and not mark.exists():
                time.sleep(0.01)
            struck = time.monotonic()
            try:
                said = process.communicate(timeout=DEADLINE + MARGIN)[0]
            except subprocess.TimeoutExpired as error:
                process.kill()
                raise Failure(f"{plan} of {ranks}: nothing ended it") from error
            if not mark.exists():
                raise Failure(f"{plan} of {ranks}: it never came there: {said}")
            wanted = EXIT[plan["what"]]
            if (process.returncode == 0) != (wanted == 0) or wanted not in (
                None,
                process.returncode,
            ):
                raise Failure(f"{plan} of {ranks}: exit code {process.returncode}: {said}")
            if plan["what"] == "bit" and f": rank {plan['rank']} (" not in said:
                raise Failure(f"{plan} of {ranks}: not named: {said}")
            ends.append(time.monotonic() - struck)
            given += 1
        found: list[float] = []
        begun = time.monotonic()
        if log.exists():
            threading.Thread(target=next_step, args=(log, begun, found), daemon=True).start()
        end = runs.resumed(name, rng.choice([0, 1, 2, 4]))
        waits += found
        if end != whole:
            raise Failure(f"run {number}: its end is not that of the run that nothing hit")
    return (
        f"{given} faults in {number} runs; from a fault to the end of all ranks at most "
        f"{max(ends):.1f} s (deadline {DEADLINE:g} s), from a start to the next step at most "
        f"{max(waits):.1f} s"
    )
