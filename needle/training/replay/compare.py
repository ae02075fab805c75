"""needle compare RUN RUN...: print as JSON what differs between runs in losses, divergences and
weights, and the effects of a bank's edits, measured and predicted (docs/replay.md)."""

from __future__ import annotations

import argparse
import csv
import io
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from needle import models, nn
from needle.autograd import Tensor, no_grad
from needle.backend_ndarray import Device, NDArray, choose_device, full
from needle.command import Parser, flag_words, path, path_name, reporting, whole
from needle.data import DataError, open_run_data
from needle.data.readers import read_documents
from needle.files import read_json, replace_text
from needle.models.registry import IMPORT, imported
from needle.processes import unwound_by_sigterm
from needle.training.evaluate import load_model, windows
from needle.training.plot import draw_differences, draw_effects, figure
from needle.training.replay.proofs import differing
from needle.training.replay.replays import (
    CONTROL,
    Replay,
    planned,
    read_replay,
    trained,
    whole_steps,
)
from needle.training.saved_run import SavedRun, open_run

LOGITS = 1 << 22  # numbers of logits that are looked at together, in float64
Row = dict[str, Any]

# ---- two models --------------------------------------------------------------------------------


def _log_probabilities(model: models.LanguageModel, hidden: NDArray) -> np.ndarray:
    """Return the log-probabilities of the next tokens, float64 (n, V)."""
    logits = model.embed_out(Tensor.from_ndarray(hidden)).cached_data
    logits = logits.astype("float32").numpy().astype(np.float64)
    logits -= logits.max(1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(1, keepdims=True))


@no_grad()
def losses(
    model: models.LanguageModel, texts: list[np.ndarray], reference: models.LanguageModel
) -> np.ndarray:
    """Return (documents, 4): tokens that are scored, nats of the model and of the reference, and
    KL(reference || model), each the sum over the tokens of a document. The first token of a
    document is not scored; longer ones are read in windows."""
    found, both, length = np.zeros((len(texts), 4)), (model, reference), model.config.max_seq_len
    most = max(1, LOGITS // model.config.vocab_size)
    for row, ids in zip(found, texts):
        for first, last, count in windows(len(ids), length, length):
            hidden = [m.final_hidden(ids[None, first:last]).cached_data for m in both]
            for at in range(last - count, last, most):
                stop = min(at + most, last)
                parts = (x.reshape(x.shape[1:])[at - first : stop - first] for x in hidden)
                own, theirs = (_log_probabilities(m, part) for m, part in zip(both, parts))
                each = np.arange(stop - at), ids[at + 1 : stop + 1]
                kl = (np.exp(theirs) * (theirs - own)).sum()
                row += stop - at, -own[each].sum(), -theirs[each].sum(), kl
    return found


def loss_rows(found: np.ndarray) -> Iterator[Row]:
    """Yield the numbers of `losses` by document, then of all."""
    total = found.sum(0, keepdims=True)
    for document, row in enumerate(np.concatenate([found, total])):
        tokens, own, theirs, kl = row.tolist()
        each = {"loss": own, "difference": own - theirs, "kl": kl}
        name = document if document < len(found) else "all"
        means = {key: value / tokens if tokens else None for key, value in each.items()}
        yield {"document": name, "tokens": int(tokens), **means}


def distances(model: models.LanguageModel, reference: models.LanguageModel) -> Iterator[Row]:
    """Yield the distance of the weights by layer, then of all."""
    sums: dict[str, np.ndarray] = {}
    theirs = dict(reference.named_parameters())
    for name, p in model.named_parameters():
        a, b = (x.numpy().astype(np.float64) for x in (p, theirs[name]))
        part = re.match(r"\w+\.\d+|\w+", name)[0]
        for key in part, "all":
            squares = np.array([((a - b) ** 2).sum(), (b**2).sum()])
            sums[key] = sums.get(key, 0) + squares
    for part in [*(key for key in sums if key != "all"), "all"]:
        distance, norm = np.sqrt(sums[part]).tolist()
        yield {"layer": part, "distance": distance, "relative": distance / norm if norm else None}


# ---- a bank ------------------------------------------------------------------------------------


def effects(bank: Path, probe: Path, device: Device, data_path: str | None = None) -> Iterator[Row]:
    """Yield the effect of each file of edits on each document of a probe, the largest first, then
    the rank correlation of effects and predictions, by document. data_path: where the data of the
    run lie now."""
    facts, base = read_json(bank / "bank.json"), open_run(bank / "runs" / "base")
    texts = read_documents(probe, base.tokenizer, base.config.vocab_size)
    if max(map(len, texts), default=0) < 2:
        raise DataError(f"{probe}: no document has two tokens, and the first is never scored")
    reference, _ = load_model(bank / "retrained" / "base", device)
    rows, predictions = [], predicted(facts, base, texts, device, data_path)
    for number, (name, prediction) in enumerate(zip(facts["files"], predictions)):
        model, _ = load_model(bank / "retrained" / f"subset_{number}", device)
        for row, one in zip(loss_rows(losses(model, texts, reference)), prediction.tolist()):
            rows.append({"kind": "effect", "edits": name, **row, "predicted": one})
    rows = [row for row in rows if row["loss"] is not None]
    yield from sorted(rows, key=lambda row: -row["difference"])
    for document in dict.fromkeys(row["document"] for row in rows):
        own = [row for row in rows if row["document"] == document]
        pair = ([row[key] for row in own] for key in ("difference", "predicted"))
        about = {"kind": "correlation", "document": document, "edits": len(own)}
        yield {**about, "spearman": spearman(*pair)}


def predicted(
    facts: dict,
    base: SavedRun,
    texts: list[np.ndarray],
    device: Device,
    data_path: str | None = None,
) -> Iterator[np.ndarray]:
    """Yield the predicted differences (documents + 1,) of each list of edits, as docs/replay.md has
    them; the last one is of all. Edits of the rate, moments and weights count as none."""
    checkpoint = base.checkpoint(facts["start"])
    model = checkpoint.restore_model(device)
    flat = nn.flatten_parameters(model)

    def gradient(loss: Any, *parts: tuple[np.ndarray, np.ndarray, float]) -> np.ndarray:
        """Return the gradient of the sum of weight x loss(inputs, targets), float32."""
        flat.reset_grad()
        for inputs, targets, weight in parts:
            share = full((), weight, "float32", device)
            loss(inputs, targets).backward(Tensor.from_ndarray(share))
        return flat.grad.numpy()

    length, of_texts = model.config.max_seq_len, []
    for ids in texts:
        parts = []
        for first, last, count in windows(len(ids), length, length):
            targets = ids[first + 1 : last + 1].astype(np.int64)
            targets[:-count] = -1
            parts.append((ids[None, first:last], targets[None], count / (len(ids) - 1)))
        of_texts.append(gradient(model.loss, *parts))
    counts = np.array([max(len(ids) - 1, 0) for ids in texts])
    probes = np.stack([*of_texts, np.average(of_texts, 0, counts)])
    rates = dict(zip(base.metrics["step"].tolist(), base.metrics["lr"].tolist()))
    data, batches, settings = open_run_data(base.folder, data_path)
    every, start = settings["micro_batches"], facts["start"]
    for edits in facts["edits"]:
        replay = Replay("", None, start, start, facts["until"], edits)
        change = np.zeros(probes.shape[1], np.float64)
        own, edited = (batches.copy(checkpoint.state["data"]) for _ in range(2))
        replay.begin(data, edited, every)
        loss = replay.loss(model.loss)
        for step in np.repeat(range(start + 1, facts["until"] + 1), every).tolist():
            pair = [*own.next(), *edited.next()]
            other = ((pair[0] != pair[2]) | (pair[1] != pair[3])).any(1)
            if other.any():
                a, b, c, d = (array[other] for array in pair)
                weight = rates[step] * other.sum() / (len(other) * every)
                change += gradient(loss, (a, b, weight), (c, d, -weight))
        yield probes @ change


def spearman(a: Sequence[float], b: Sequence[float]) -> float | None:
    """Return Spearman's rank correlation, equal values at their mean rank; None of constant ones.

    >>> from needle.training.replay.compare import spearman
    >>> round(spearman([1, 2, 3, 4], [1, 2, 2, 9]), 4)
    0.9487
    """
    ranks = []
    for values in a, b:
        ordered = np.sort(values)
        below, not_above = (np.searchsorted(ordered, values, side) for side in ("left", "right"))
        ranks.append(below + not_above - len(values))  # twice the rank, less its mean
    norm = np.sqrt((ranks[0] ** 2).sum() * (ranks[1] ** 2).sum())
    return float(ranks[0] @ ranks[1] / norm) if norm else None


# ---- runs --------------------------------------------------------------------------------------


def noise_floor(run: SavedRun, flags: Sequence[str]) -> Row:
    """Measure how far a repetition differs: train some steps of a run again, of a replay with edits
    those of its parent. RuntimeError where that fails."""
    replay = read_replay(run.folder)
    if replay is not None and replay.edits:
        run = open_run(replay.parent)
    last = int(max(run.metrics["step"], default=0))
    if last == 0:
        raise DataError(f"{run.folder / 'metrics.jsonl'}: no line of a step: --no-floor")
    start = max(step for step in whole_steps(run.folder) if step == 0 or step + CONTROL <= last)
    again = planned(run.folder, start, min(CONTROL, last - start), [])
    with trained(again, "", flags) as (_, wrong):
        found = [abs(a - b) for facts in wrong.values() for a, b in [facts.get("loss", (0.0, 0.0))]]
    text = f"steps {start + 1} to {again.until} again: "
    text += f"step {min(wrong)} differs" if wrong else "0, equal bits"
    return {"kind": "floor", "run": str(run.folder), "floor": max(found, default=0.0), "text": text}


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
    text = "where the data of the run lie now (default: where they were)"
    add("--data", type=path_name, metavar="PATH", help=text)
    add("--import", dest="own", type=imported, metavar="FILE", help=IMPORT)
    return top


def rows_of(args: argparse.Namespace) -> Iterator[Row]:
    """Yield what is printed of a bank, or of runs, the first of which is the reference."""
    device = choose_device(args.device)
    if args.edits:
        yield from effects(args.edits, args.probe, device, args.data)
        return
    runs = [open_run(run) for run in args.runs]
    for run in runs[1:]:
        if run.config != runs[0].config:
            own, theirs = (one.config.to_dict() for one in (run, runs[0]))
            what = ", ".join(key for key in own if own[key] != theirs.get(key)) or "class"
            raise DataError(f"{run.folder}: its model has another {what} than {runs[0].folder}")
    steps = shared_steps(runs, args.every)
    texts = read_documents(args.probe, runs[0].tokenizer, runs[0].config.vocab_size)
    if not args.no_floor:
        given = {"--import": args.own, "--data": args.data}
        own = [word for k, v in given.items() if v is not None for word in flag_words(k, v)]
        yield noise_floor(runs[0], ["--device", args.device, *own])
    for run in runs[1:]:
        found = differing(runs[0].folder, run.folder)
        step = min(found, default=None)
        what = [*found.get(step, [])]  # of the first step that differs
        yield {"kind": "fork", "run": str(run.folder), "step": step, "differs": what}
    for step in steps:
        reference = runs[0].model(step, device)
        for run in runs:
            model, about = run.model(step, device), {"run": str(run.folder), "step": step}
            for row in loss_rows(losses(model, texts, reference)):
                yield {"kind": "loss", **about, **row}
            for row in distances(model, reference):
                yield {"kind": "weights", **about, **row}


@reporting("needle compare")
@unwound_by_sigterm()
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
