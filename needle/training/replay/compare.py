"""needle compare RUN RUN...: print what differs between runs, as JSON (docs/replay.md)."""

from __future__ import annotations

import argparse
import csv
import io
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from needle.backend_ndarray import choose_device
from needle.command import Parser, path, reporting, whole
from needle.data import DataError
from needle.data.readers import read_documents
from needle.files import replace_text
from needle.training.plot import draw_differences, draw_effects, figure
from needle.training.replay.measures import Row, distances, effects, loss_rows, losses
from needle.training.replay.proofs import differing
from needle.training.replay.replays import CONTROL, planned, read_replay, trained, whole_steps
from needle.training.saved_run import SavedRun, open_run

# ---- runs --------------------------------------------------------------------------------------


def last_step(run: SavedRun) -> int:
    return int(max(run.metrics["step"], default=0))


def noise_floor(run: SavedRun, flags: Sequence[str]) -> Row:
    """Measure how far a repetition differs: train some steps of a run again, of a replay with edits
    those of its parent. RuntimeError where that fails."""
    replay = read_replay(run.folder, last_step(run))
    if replay is not None and replay.edits:
        run = open_run(replay.parent)
    last = last_step(run)
    start = max(step for step in whole_steps(run.folder) if step == 0 or step + CONTROL <= last)
    again = planned(run.folder, start, min(CONTROL, last - start), [])
    with trained(again, "", flags) as (_, wrong):
        found = [abs(a - b) for facts in wrong.values() for a, b in [facts.get("loss", (0.0, 0.0))]]
    text = f"steps {start + 1} to {again.until} again: "
    text += f"step {min(wrong)} differs" if wrong else "0, equal bits"
    return {"kind": "floor", "run": str(run.folder), "floor": max(found, default=0.0), "text": text}


def first_difference(run: SavedRun, reference: SavedRun) -> Row:
    """Return the first step whose line differs from the reference's, and the facts that do."""
    steps = range(1, max(last_step(run), last_step(reference)) + 1)
    found = differing(reference.folder, run.folder, steps)
    step = min(found, default=None)
    what = [] if step is None else [*found[step]]
    return {"kind": "fork", "run": str(run.folder), "step": step, "differs": what}


def shared_steps(runs: Sequence[SavedRun], every: int | None) -> list[int]:
    """Return the steps whose weights all runs have: multiples of `every`, by default the last."""
    steps = sorted(set.intersection(*(set(run.steps) for run in runs)))
    chosen = steps[-1:] if every is None else [step for step in steps if step % every == 0]
    if not chosen:
        there = ", ".join(f"{run.folder}: {', '.join(map(str, run.steps))}" for run in runs)
        raise DataError(f"no step whose weights all runs have (--keep): {there}")
    return chosen


# ---- the command -------------------------------------------------------------------------------


def write_csv(rows: list[Row], file: Path) -> None:
    text = io.StringIO(newline="")
    names = list(dict.fromkeys(name for row in rows for name in row))
    table = csv.DictWriter(text, names, lineterminator="\n")
    table.writeheader()
    table.writerows(rows)
    replace_text(file, text.getvalue())


def parser() -> argparse.ArgumentParser:
    top = Parser(prog="needle compare", description="Compare runs in their losses and weights.")
    top.epilog = "Writes a JSON object a line (docs/replay.md). The first RUN is the reference."
    add = top.add_argument
    add("runs", nargs="*", type=path, metavar="RUN", help="the folder of a run")
    text = "in the place of runs, a bank of replays: the effect of each on the probe"
    add("--edits", type=path, metavar="BANK", help=text)
    text = "documents: text, JSON lines or tokens, as needle.data reads them"
    add("--probe", type=path, required=True, metavar="FILE", help=text)
    text = "at the steps that N divides (default: the last whose weights all runs have)"
    add("--every", type=whole(1), metavar="N", help=text)
    add("--csv", type=path, metavar="FILE", help="write the lines as a table, too")
    text = "draw the differences or effects: .png, .svg or .pdf"
    add("--plot", type=figure, metavar="FILE", help=text)
    text = f"do not train {CONTROL} steps of the first RUN again"
    add("--no-floor", action="store_true", help=text)
    add("--device", default="auto", metavar="NAME", help="auto, cpu, cuda or cuda:INDEX")
    return top


def rows_of(args: argparse.Namespace) -> Iterator[Row]:
    """Yield what is printed of a bank, or of runs, the first of which is the reference."""
    device = choose_device(args.device)
    if args.edits:
        yield from effects(args.edits, args.probe, device)
        return
    runs = [open_run(run) for run in args.runs]
    for run in runs[1:]:
        if run.config != runs[0].config:
            raise DataError(f"{run.folder}: its model has another shape than {runs[0].folder}")
    steps = shared_steps(runs, args.every)
    texts = read_documents(args.probe, runs[0].tokenizer, runs[0].config.vocab_size)
    if not args.no_floor:
        yield noise_floor(runs[0], ["--device", args.device])
    for run in runs[1:]:
        yield first_difference(run, runs[0])
    for step in steps:
        reference = runs[0].model(step, device)
        for run in runs:
            model, about = run.model(step, device), {"run": str(run.folder), "step": step}
            for row in loss_rows(losses(model, texts, reference)):
                yield {"kind": "loss", **about, **row}
            for row in distances(model, reference):
                yield {"kind": "weights", **about, **row}


@reporting("needle compare")
def main(argv: Sequence[str] | None = None) -> int:
    top, rows = parser(), []
    args = top.parse_args(argv)
    if bool(args.runs) == bool(args.edits):
        top.error("give the folders of runs, or a bank by --edits")
    if args.edits and (args.every or args.no_floor):
        top.error("--every, --no-floor: not with --edits")
    for row in rows_of(args):
        print(json.dumps(row), flush=True)
        rows.append(row)
    if args.csv is not None:
        write_csv(rows, args.csv)
    if args.plot is not None:
        (draw_effects if args.edits else draw_differences)(rows, args.plot)
    return 0
