"""loss.png, the loss curve of a run, from its metrics.jsonl."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from needle.files import replacing
from needle.training.log import read_lines

SMOOTHED = 50  # a value is averaged with this share of all values on either side
TRAINING, HELD_OUT = "#0b3d91", "#b22200"  # dark enough to print, and distinct in grey


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
    lines = read_lines(folder / "metrics.jsonl")
    if not lines:
        return "no loss.png: nothing was trained"
    try:
        import matplotlib
    except ImportError:
        return "no loss.png: the package matplotlib is not installed"
    matplotlib.use("Agg")
    from matplotlib import pyplot, ticker

    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    tokens, losses = [e["tokens"] for e in lines], [e["loss"] for e in lines]
    label = "training"
    if len(losses) >= SMOOTHED:
        axes.plot(tokens, losses, color=TRAINING, alpha=0.3, lw=0.8)
        label = "training, smoothed"
    axes.plot(tokens, smoothed(losses), color=TRAINING, lw=1.8, label=label)
    held_out = [e for e in lines if "val_loss" in e]
    if held_out:
        places, values = [e["tokens"] for e in held_out], [e["val_loss"] for e in held_out]
        axes.plot(places, values, "o", color=HELD_OUT, ms=5, label="held out", zorder=3)
    axes.set(xlabel="tokens", ylabel="loss (nats a token)", title=folder.name)
    axes.xaxis.set_major_formatter(ticker.EngFormatter(sep=""))
    axes.grid(alpha=0.5)
    axes.legend()
    with replacing(folder / "loss.png") as file:
        figure.savefig(file, format="png", dpi=120)
    pyplot.close(figure)
    return f"plot: {folder / 'loss.png'}"
