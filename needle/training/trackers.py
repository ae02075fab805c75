"""Trackers, which get the lines of metrics.jsonl too: TensorBoard and Weights & Biases, by their
packages."""

from __future__ import annotations

import importlib.util
import sys
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from needle.training.settings import Settings


class TrackerError(ValueError):
    """A tracker that cannot be used."""


class Tracker(NamedTuple):
    log: Callable[[dict[str, float]], Any]  # a line of metrics.jsonl
    flush: Callable[[], Any]  # before a checkpoint
    close: Callable[[], Any]


def check(settings: Settings) -> None:
    """Raise TrackerError if a package is not installed."""
    for flag, is_given, package in (
        ("--tensorboard", settings.tensorboard, "tensorboardX"),
        ("--wandb", settings.wandb is not None, "wandb"),
    ):
        if is_given and importlib.util.find_spec(package) is None:
            raise TrackerError(
                f"{flag} needs the package {package}: {sys.executable} -m pip install {package}"
            )


def start(settings: Settings, folder: Path, step: int) -> list[Tracker]:
    """Return the trackers of the run in `folder`, after `step` steps.

    TensorBoard hides the later steps that a killed run wrote. A run is one of W&B through all
    resumes, by the id in its file wandb_id, and steps that a killed run sent are sent again.
    """
    trackers = []
    if settings.tensorboard:
        import tensorboardX

        writer = tensorboardX.SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1)

        def add(line: dict[str, float]) -> None:
            for name, value in line.items():
                if name != "step":
                    writer.add_scalar(name, value, line["step"])

        trackers.append(Tracker(add, writer.flush, writer.close))
    if settings.wandb is not None:
        kept = folder / "wandb_id"
        if not kept.exists():
            kept.write_text(uuid.uuid4().hex + "\n")
        try:
            import wandb

            run = wandb.init(
                project=settings.wandb,
                name=folder.name,
                dir=str(folder),
                id=kept.read_text().strip(),
                resume="allow",
                config=settings.to_json(),
            )
            run.define_metric("*", step_metric="step")
        except Exception as error:  # of many classes: not logged in, no network, a bad name
            for tracker in trackers:
                tracker.close()
            raise TrackerError(
                f"--wandb {settings.wandb}: {error} (WANDB_MODE=offline needs no account and no "
                "network)"
            ) from error
        trackers.append(Tracker(run.log, lambda: None, run.finish))
    return trackers
