"""Loss curves of runs, from their metrics.jsonl: loss.png of a run, and `needle plot RUN...`; the
figure of `needle compare`."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from needle.command import Parser, argument_type, path, reporting
from needle.files import described, named, printable, replacing
from needle.training.replay.proofs import Log

SMOOTHED = 50  # a value is averaged with this share of all values on either side
FORMATS = (".png", ".svg", ".pdf")
TRAINING, HELD_OUT = "#0b3d91", "#b22200"  # dark enough to print, and distinct in grey


@argument_type
def figure(text: str) -> Path:
    """The type of files of figures, whose ending is the format."""
    file = named(text)
    if file.suffix not in FORMATS:
        raise ValueError(f"must end in {', '.join(FORMATS)}, not {text!r}")
    return file


def smoothed(values: Sequence[float]) -> np.ndarray:
    """Return the mean of each value and its neighbours, 1 / SMOOTHED of all on either side; fewer
    at both ends, so that the first descent stays where it is. Fewer than SMOOTHED values stay."""
    at = np.arange(len(values))
    reach = np.minimum(at, len(values) // SMOOTHED)
    stop = np.minimum(at + reach + 1, len(values))
    sums = np.concatenate([[0], np.cumsum(values, dtype=np.float64)])
    return (sums[stop] - sums[at - reach]) / (stop - (at - reach))


def plot(folder: Path) -> str:
    """Draw loss.png from metrics.jsonl, and return a line that says so, or why not."""
    lines = [*Log(folder / "metrics.jsonl").steps.values()]
    if not lines:
        return "no loss.png: nothing was trained"
    try:
        draw({folder.resolve().name: lines}, folder / "loss.png")
    except Exception as error:  # all steps are saved
        return f"no loss.png: {described(error)}"
    return f"plot: {folder / 'loss.png'}"


@contextlib.contextmanager
def figure_in(out: Path, columns: int = 1) -> Iterator[Any]:
    """Give the axes of a figure, of several columns an array of them, and write it to a file, whose
    ending is the format. RuntimeError without matplotlib."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        raise RuntimeError("needs matplotlib: pip install matplotlib") from None
    size = 8 if columns == 1 else 6 * columns
    with pyplot.rc_context({"text.parse_math": False}):  # a name may contain $
        figure, axes = pyplot.subplots(ncols=columns, figsize=(size, 5), layout="constrained")
        yield axes
        with replacing(out) as file:
            figure.savefig(file, format=out.suffix[1:], dpi=120)
    pyplot.close(figure)


def draw(runs: dict[str, list[dict[str, Any]]], out: Path) -> None:
    """Draw the losses of {name: lines of metrics.jsonl} over tokens; the ending of `out` is the
    format. RuntimeError without matplotlib."""
    with figure_in(out) as axes:
        from matplotlib import ticker

        alone = len(runs) == 1
        for number, (name, lines) in enumerate(runs.items()):
            color = TRAINING if alone else f"C{number}"
            tokens, losses = [e["tokens"] for e in lines], [e["loss"] for e in lines]
            label = "training" if alone else printable(name)
            if len(losses) >= SMOOTHED:
                axes.plot(tokens, losses, color=color, alpha=0.3, lw=0.8)
                label += ", smoothed" if alone else ""
            axes.plot(tokens, smoothed(losses), color=color, lw=1.8, label=label)
            held_out = [(e["tokens"], e["val_loss"]) for e in lines if "val_loss" in e]
            if held_out:
                of = {"color": HELD_OUT, "label": "held out"} if alone else {"color": color}
                axes.plot(*zip(*held_out), "o", ms=5, zorder=3, **of)
        axes.set(xlabel="tokens", ylabel="loss (nats a token)")
        axes.set_title(printable(", ".join(runs)))
        axes.xaxis.set_major_formatter(ticker.EngFormatter(sep=""))
        axes.grid(alpha=0.5)
        axes.legend()


def draw_differences(rows: list[dict[str, Any]], file: Path) -> None:
    """Draw, of the rows of `needle compare`, the difference of the loss of all over steps, and that
    of each document at the last one. RuntimeError without matplotlib."""
    losses = [row for row in rows if row["kind"] == "loss"]
    with figure_in(file, 2) as (left, right):
        for number, run in enumerate(dict.fromkeys(row["run"] for row in losses)):
            own, style = [r for r in losses if r["run"] == run], {"color": f"C{number}"}
            label = printable(Path(run).name)
            at = [(r["step"], r["difference"]) for r in own if r["document"] == "all"]
            left.plot(*zip(*at), "o-", label=label, **style)
            of = [(r["document"], r["difference"]) for r in own if r["step"] == at[-1][0]][:-1]
            right.plot(*zip(*of), ".", label=label, **style)
        left.set(xlabel="step", ylabel="difference of the loss (nats a token)", title="all")
        right.set(xlabel="document", title=f"step {at[-1][0]}")
        left.legend()


def draw_effects(rows: list[dict[str, Any]], file: Path) -> None:
    """Draw, of the rows of `needle compare --edits`, the measured effects over the predicted ones.
    RuntimeError without matplotlib."""
    with figure_in(file) as axes:
        for label, size, is_all in ("each document", 3, False), ("all documents", 6, True):
            own = [r for r in rows if r["kind"] == "effect" and (r["document"] == "all") == is_all]
            pair = ([row[key] for row in own] for key in ("predicted", "difference"))
            axes.plot(*pair, "o", ms=size, label=label)
        axes.set(xlabel="predicted difference (nats a token)", ylabel="difference of the loss")
        axes.grid(alpha=0.5)
        axes.legend()


def parser() -> argparse.ArgumentParser:
    top = Parser(
        prog="needle plot",
        description="Draws the loss of one run or of several, running or stopped, in one figure. "
        "Dots are the held-out loss.",
    )
    top.add_argument("runs", nargs="+", type=path, metavar="RUN", help="the folder of a run")
    top.add_argument(
        "--out",
        type=figure,
        metavar="FILE",
        help="the .png, .svg or .pdf to write (default: loss.png, of one run in its folder, of "
        "several here)",
    )
    return top


@reporting("needle plot")
def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    out = args.out or (args.runs[0] if len(args.runs) == 1 else Path()) / "loss.png"
    found = {}
    for run in args.runs:
        lines = [*Log(run / "metrics.jsonl").steps.values()]
        if not lines:
            raise ValueError(f"{run}: no step yet, or not a run")
        name = run.resolve().name
        found[str(run) if name in found else name] = lines
    draw(found, out)
    print(printable(str(out)))
    return 0
