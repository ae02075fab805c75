"""needle replay RUN --edits FOLDER: a bank of replays from one step (docs/replay.md).

Nothing in them depends on time, place or the number of jobs. A folder appears under its name when
it is whole, so that a bank that was killed goes on where it was.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import os
import queue
import re
import shutil
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from needle import hf
from needle.backend_ndarray import cpu
from needle.command import path, reporting, told, whole
from needle.data import DataError
from needle.data.edits import read_edits
from needle.distributed.group import visible_gpus
from needle.files import Lock, printable, read_json, replace_text
from needle.training.replay import replays
from needle.training.replay.replays import Replay, check, finish, make_folder, planned, same
from needle.training.saved_run import open_run

# ---- the list of edits -------------------------------------------------------------------------


def describe(parent: Path, start: int, steps: int | None, folder: Path, bank: Path) -> dict:
    """Return what bank.json holds. DataError for edits that name nothing, and where there is a bank
    of another run or of other edits."""
    files = sorted(folder.glob("*.toml"))
    if not files:
        raise DataError(f"{folder}: there is no file of edits (*.toml) in it")
    base = planned(parent, start, steps, [])
    facts: dict[str, Any] = {"run": base.parent, "start": start, "until": base.until}
    facts["files"] = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}
    if (bank / "bank.json").exists():
        known = read_json(bank / "bank.json")
        if {key: known.get(key) for key in facts} != facts:
            raise DataError(f"{bank}: a bank of another run, other steps or other edits")
        return known
    edits = []
    for file in files:
        replay = dataclasses.replace(base, edits=read_edits(file))
        try:
            edits.append(check(replay)[0].edits)
        except DataError as error:
            raise DataError(f"{file}: {error}") from error
    return facts | {"edits": edits}


def left_out(edits: list[dict[str, Any]]) -> list[int]:
    """Return the numbers of the documents that edits drop or replace."""
    pairs = [
        pair
        for edit in edits
        if edit["do"] in ("drop", "replace")
        for pair in edit["where"].get("document", [])
    ]
    return sorted({number for first, last in pairs for number in range(first, last + 1)})


# ---- the replays -------------------------------------------------------------------------------


def run(bank: Path, facts: dict, args: argparse.Namespace, flags: Sequence[str]) -> None:
    """Train what is missing of a bank. RuntimeError where a training fails or was stopped;
    DataError where the base has other bits than the run."""
    parent, start, until = Path(facts["run"]), facts["start"], facts["until"]
    (first, every), jobs = args.part, args.jobs
    keep = ["--keep", str(start), "--keep-optimizer"]
    base = planned(parent, start, until - start, [])
    _train(bank, "base", base, [*flags, *keep])
    own = bank / "runs" / "base"
    steps = range(base.base + 1, until + 1)
    if not args.no_control:
        same(parent, own, steps)
    fork = planned(own if start else parent, start, until - start, [])
    slots: queue.Queue[list[str]] = queue.Queue()
    gpus = 0 if any(word.startswith("--device") for word in flags) else visible_gpus()
    for job in range(jobs):
        slots.put(["--device", f"cuda:{job % gpus}"] if gpus and jobs > 1 else [])
    if jobs > 1:
        cores = len(os.sched_getaffinity(0))
        os.environ.setdefault("OMP_NUM_THREADS", str(max(cores // jobs, 1)))

    def one(number: int) -> None:
        slot = slots.get()
        try:
            replay = dataclasses.replace(fork, edits=facts["edits"][number])
            _train(bank, f"subset_{number}", replay, [*flags, *slot])
        finally:
            slots.put(slot)

    with ThreadPoolExecutor(jobs) as pool:
        numbers = range(first - 1, len(facts["edits"]), every)
        for _ in (pool.map if jobs > 1 else map)(one, numbers):
            pass


def _train(bank: Path, name: str, replay: Replay, flags: Sequence[str]) -> None:
    """Train a replay of a bank, or go on with it, and write its model, unless it is there."""
    runs, out = bank / "runs", bank / "retrained" / name
    if not (out / "config.json").exists():
        if not (runs / name).exists():
            making = runs / f".{name}"
            shutil.rmtree(making, ignore_errors=True)
            os.rename(make_folder(replay, runs, making.name), runs / name)
        finish(runs / name, replay.until, flags=flags)
        hf.save(open_run(runs / name).model(replay.until, cpu()), out)
        print(f"{name}: steps {replay.start + 1} to {replay.until}", flush=True)
    if name != "base":
        shutil.rmtree(runs / name / "checkpoints", ignore_errors=True)


# ---- the command -------------------------------------------------------------------------------


def part(text: str) -> tuple[int, int]:
    """Return (i, n) of the text i/n."""
    found = re.fullmatch(r"([1-9]\d{0,5})/([1-9]\d{0,5})", text)
    if found is None or int(found[1]) > int(found[2]):
        raise ValueError(f"must be I/N with 1 <= I <= N, not {text!r}")
    return int(found[1]), int(found[2])


def parser() -> argparse.ArgumentParser:
    top = replays.parser()
    text = "a bank: a replay for each *.toml in there, and one without edits (docs/replay.md)"
    top.add_argument("--edits", type=path, metavar="FOLDER", help=text)
    text = "of --edits: every N-th replay from the I-th on, on one of N machines"
    top.add_argument("--part", type=told(part), metavar="I/N", help=text)
    text = "of --edits: so many at a time, on all GPUs in turn (default: 1)"
    top.add_argument("--jobs", type=whole(1), metavar="N", help=text)
    return top


@reporting("needle replay")
def main(argv: Sequence[str] | None = None) -> int:
    """Make or go on with a bank, and without --edits a single replay."""
    top = parser()
    args, flags = top.parse_known_args(argv)
    others = ("part", "jobs") if args.edits is None else ("edit", "launch")
    if given := [f"--{name}" for name in others if getattr(args, name)]:
        top.error(f"{', '.join(given)}: {'needs' if args.edits is None else 'not with'} --edits")
    if args.edits is None:
        return replays.single(args, flags)
    args.part, args.jobs = args.part or (1, 1), args.jobs or 1
    bank = (args.out or args.run.resolve().parent) / (args.name or f"{args.run.name}-bank")
    facts = describe(args.run, args.start, args.steps, args.edits, bank)
    count = f"{len(facts['edits'])} replays from step {args.start} to {facts['until']}"
    print(printable(f"{bank}: {count}"), flush=True)
    if args.dry_run:
        return 0
    place = bank / "runs" / ".part-{}-of-{}".format(*args.part)
    place.mkdir(parents=True, exist_ok=True)
    lock = Lock(place)
    try:
        left = [left_out(edits) for edits in facts["edits"]]
        for name, value in (("subsets.json", left), ("bank.json", facts)):
            replace_text(bank / name, f"{json.dumps(value, indent=1)}\n")
        run(bank, facts, args, flags)
    finally:
        lock.release()
    return 0
