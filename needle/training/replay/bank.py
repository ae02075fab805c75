"""needle replay RUN --from STEP: a replay of a file of edits, or a bank of them (docs/replay.md).

The models of a bank do not depend on time, place or the number of jobs. A folder appears
under its name when it is whole, so that a bank that was killed goes on where it was.
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
from needle.command import Parser, argument_type, path, reporting, whole, wrapped
from needle.data import DataError
from needle.data.edits import read_edits
from needle.distributed.group import visible_gpus
from needle.files import Lock, printable, read_json, replace_text
from needle.processes import unwound_by_sigterm
from needle.training.folder import check_free, described_config
from needle.training.replay import replays
from needle.training.replay.proofs import differing
from needle.training.replay.replays import (
    CONTROL,
    Replay,
    check,
    finish,
    launcher,
    make_folder,
    planned,
)
from needle.training.saved_run import open_run
from needle.training.settings import parse_beside, run_name

# ---- the files of a bank -----------------------------------------------------------------------


def describe(
    base: Replay, folder: Path, bank: Path, data_path: str | None = None
) -> dict[str, Any]:
    """Return what bank.json holds. base: without edits; data_path: as of `check`. DataError for
    edits that name nothing, and where there is a run, or a bank of another run or of other edits.
    """
    check_free(bank)
    config = described_config(Path(base.parent) / "config.json")
    hf.mapping_of(config.meta_model())  # of models that transformers opens
    files = sorted(folder.glob("*.toml"))
    if not files:
        raise DataError(f"{folder}: there is no file of edits (*.toml) in it")
    facts: dict[str, Any] = {"run": base.parent, "start": base.start, "until": base.until}
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
            edits.append(check(replay, data_path)[0].edits)
        except DataError as error:
            raise DataError(f"{file}: {error}") from error
    return facts | {"edits": edits}


def left_out(edits: list[dict[str, Any]]) -> list[int]:
    """Return the numbers of the documents that edits drop or replace."""
    found: set[int] = set()
    for edit in edits:
        if edit["do"] in ("drop", "replace"):
            for first, last in edit["where"].get("document", []):
                found.update(range(first, last + 1))
    return sorted(found)


# ---- its replays -------------------------------------------------------------------------------


def run(
    bank: Path, base: Replay, edits: list, args: argparse.Namespace, flags: Sequence[str]
) -> None:
    """Train what is missing of a bank. RuntimeError where a training fails or was stopped;
    DataError where the base has other bits than the run."""
    _train(bank, "base", base, [*flags, "--keep", str(base.start), "--keep-optimizer"])
    parent, own, jobs = Path(base.parent), bank / "runs" / "base", args.jobs
    if not args.no_control:
        replays.refuse(base.parent, differing(parent, own))
    fork = planned(own if base.start else parent, base.start, base.until - base.start, [])
    gpus = 0 if any(word.startswith("--device") for word in flags) else visible_gpus()
    idle: queue.Queue[list[str]] = queue.Queue()  # what each job's trainings are told
    for job in range(jobs):
        idle.put(["--device", f"cuda:{job % gpus}"] if gpus and jobs > 1 else [])
    if jobs > 1:
        share = max(len(os.sched_getaffinity(0)) // jobs, 1)
        os.environ.setdefault("OMP_NUM_THREADS", str(share))

    def train(number: int) -> None:
        replay, device = dataclasses.replace(fork, edits=edits[number]), idle.get()
        try:
            _train(bank, f"subset_{number}", replay, [*flags, *device])
        finally:
            idle.put(device)

    first, every = args.part
    with ThreadPoolExecutor(jobs) as pool:
        for _ in (pool.map if jobs > 1 else map)(train, range(first - 1, len(edits), every)):
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
    top = Parser(prog="needle replay", description="Repeat a run from a step on, with edits.")
    top.epilog = "Other flags are those of needle train: --device, --gpus, --supervise ..."
    add = top.add_argument
    add("run", type=path, metavar="RUN", help="the folder of the run")
    text = "the last step without edits"
    add("--from", dest="start", type=whole(0), required=True, metavar="STEP", help=text)
    add("--edit", type=path, metavar="FILE", help="edits (docs/replay.md); none: equal")
    add("--steps", type=whole(1), metavar="N", help="to train (default: to the end)")
    add("--name", type=run_name, help="of the new folder (default: RUN-replay, RUN-bank)")
    add("--out", type=path, help="where it is written (default: beside RUN)")
    add("--launch", type=launcher, default="", metavar="WORDS", help='as "mpirun -n 2", before it')
    add("--dry-run", action="store_true", help="check the edits and print the plan")
    text = f"do not repeat up to {CONTROL} steps without edits first"
    add("--no-control", action="store_true", help=text)
    text = "a bank: a replay for each *.toml in there, and one without edits (docs/replay.md)"
    add("--edits", type=path, metavar="FOLDER", help=text)
    text = "of --edits: every N-th replay from the I-th on, on one of N machines"
    add("--part", type=argument_type(part), metavar="I/N", help=text)
    text = "of --edits: so many at a time, on all GPUs in turn (default: 1)"
    add("--jobs", type=whole(1), metavar="N", help=text)
    return top


def single(
    args: argparse.Namespace, out: Path, flags: Sequence[str], data_path: str | None
) -> None:
    """Make or go on with the replay of a file of edits."""
    edits = [] if args.edit is None else read_edits(args.edit)
    replay, lines = check(planned(args.run, args.start, args.steps, edits), data_path)
    if more := replay.start - replay.base:
        where = f"the checkpoint of step {replay.base}" if replay.base else "the first model"
        lines.append(f"it begins with {where}: {more:,} steps more, which --keep-optimizer saves")
    print(wrapped("\n".join(lines)), flush=True)
    if args.dry_run:
        return
    with unwound_by_sigterm():
        controls = not args.no_control
        folder, text = replays.begun(replay, out, args.name, args.launch, flags, controls)
    print(printable(text), end="\n" * bool(text))
    replays.become_training(folder, args.launch, flags)


@reporting("needle replay")
def main(argv: Sequence[str] | None = None) -> int:
    """Make or go on with a bank, and without --edits a single replay."""
    top = parser()
    args, flags = parse_beside(top, argv)
    others = ("part", "jobs") if args.edits is None else ("edit", "launch")
    if given := [f"--{name}" for name in others if getattr(args, name)]:
        top.error(f"{', '.join(given)}: {'needs' if args.edits is None else 'not with'} --edits")
    data_path = replays.passed_on(flags).data  # --import registers the run's model here too
    place = args.run.resolve()  # "." has no name
    out = args.out or place.parent
    if args.edits is None:
        single(args, out, flags, data_path)
        return 0
    args.part, args.jobs = args.part or (1, 1), args.jobs or 1
    bank = out / (args.name or f"{place.name}-bank")
    base = planned(args.run, args.start, args.steps, [])
    facts = describe(base, args.edits, bank, data_path)
    edits = facts["edits"]
    text = f"{bank}: {len(edits)} replays from step {base.start} to {base.until}"
    print(printable(text), flush=True)
    if args.dry_run:
        return 0
    place = bank / "runs" / ".part-{}-of-{}".format(*args.part)
    place.mkdir(parents=True, exist_ok=True)
    lock = Lock(place)
    try:
        for name, value in ("subsets.json", [*map(left_out, edits)]), ("bank.json", facts):
            replace_text(bank / name, f"{json.dumps(value, indent=1)}\n")
        run(bank, base, edits, args, flags)
    finally:
        lock.release()
    return 0
