"""Trackers, which get the lines of metrics.jsonl too: TensorBoard and Weights & Biases.

A tracker has `log(line)`, `flush()` (before a checkpoint) and `close()`. TensorBoard's files are
written by the package tensorboard or by tensorboardX. Rejected: torch's writer (loads torch).
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path

from needle.files import reading

TENSORBOARD = ("tensorboard", "tensorboardX")


class TrackerError(ValueError):
    """A tracker that cannot be used."""


def check(args: argparse.Namespace) -> None:
    """Raise TrackerError if a package is not installed."""
    if args.tensorboard and not any(map(_installed, TENSORBOARD)):
        raise TrackerError(
            "--tensorboard needs the package tensorboard or tensorboardX: "
            f"{sys.executable} -m pip install tensorboard"
        )
    if args.wandb is not None and not _installed("wandb"):
        raise TrackerError(
            f"--wandb needs the package wandb: {sys.executable} -m pip install wandb"
        )


def start(args: argparse.Namespace, folder: Path, at: Path, step: int, settings: dict) -> list:
    """Return the trackers of the run in `folder`, after `step` steps. at: the folder by the
    descriptor of its lock, which W&B's own process does not have."""
    trackers: list = []
    try:
        if args.tensorboard:
            trackers.append(TensorBoard(at / "tensorboard", step))
        if args.wandb is not None:
            trackers.append(WeightsAndBiases(folder, at, args.wandb, settings))
    except BaseException:
        for tracker in trackers:
            tracker.close()
        raise
    return trackers


def _installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


class TensorBoard:
    """Write scalars by the names of metrics.jsonl. Later steps than `step`, which a killed run
    wrote, are hidden."""

    def __init__(self, folder: Path, step: int) -> None:
        kind = _own_writer if _installed(TENSORBOARD[0]) else _x_writer
        self._add, self._writer = kind(str(folder), step + 1)

    def log(self, line: dict) -> None:
        for name, value in line.items():
            if name != "step":
                self._add(name, value, line["step"])

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


def _own_writer(folder: str, first: int) -> tuple[Callable, object]:
    from tensorboard.compat.proto.event_pb2 import Event, SessionLog
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    writer = EventFileWriter(folder)
    writer.add_event(
        Event(wall_time=time.time(), step=first, session_log=SessionLog(status=SessionLog.START))
    )

    def add(name: str, value: float, step: int) -> None:
        summary = Summary(value=[Summary.Value(tag=name, simple_value=value)])
        writer.add_event(Event(wall_time=time.time(), step=step, summary=summary))

    return add, writer


def _x_writer(folder: str, first: int) -> tuple[Callable, object]:
    from tensorboardX import SummaryWriter

    writer = SummaryWriter(folder, purge_step=first)
    return writer.add_scalar, writer


class WeightsAndBiases:
    """Send lines to one run of W&B, whose id lies in the folder, through all resumes. Steps that a
    killed run sent are sent again, with the same numbers."""

    def __init__(self, folder: Path, at: Path, project: str, settings: dict) -> None:
        import wandb

        kept = at / "wandb_id"
        if not kept.exists():
            kept.write_text(uuid.uuid4().hex + "\n")
        with reading(kept) as file:
            identity = file.read().decode().strip()
        try:
            self._run = wandb.init(
                project=project,
                name=folder.name,
                dir=str(folder),
                id=identity,
                resume="allow",
                config=settings,
            )
        except Exception as error:  # of many classes: not logged in, no network, a bad name
            raise TrackerError(
                f"--wandb {project}: {error} (WANDB_MODE=offline needs no account and no network)"
            ) from error
        self._run.define_metric("*", step_metric="step")

    def log(self, line: dict) -> None:
        self._run.log(line)

    def flush(self) -> None:
        """W&B's own process has each line already."""

    def close(self) -> None:
        self._run.finish()
