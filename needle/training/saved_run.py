"""A run in Python: open_run, and what its folder holds by names; replays of it."""

from __future__ import annotations

import functools
import operator
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from needle.backend_ndarray import Device
from needle.checkpoint import (
    Checkpoint,
    checkpoint_path,
    find_checkpoint,
    list_checkpoints,
    step_of,
    weights_path,
)
from needle.data import DataError, Tokenizer, load_tokenizer
from needle.data.edits import check_edits, read_edits
from needle.files import MissingFileError, named
from needle.models import Config, LanguageModel
from needle.training.folder import described_config, read_settings
from needle.training.replay.proofs import Log
from needle.training.replay.replays import begun, check, finish, passed_on, planned


class SavedRun:
    """The folder of a run, finished, stopped or under way; nothing is written into it.

    folder     a Path
    settings   of the training, by name: what config.json holds under `settings`
    config     the configuration of the model
    tokenizer  as that of a model that is loaded, or None for data that are tokens
    metrics    the numbers of metrics.jsonl by name, see there
    steps      the steps of the checkpoints and of weights that --keep left, ascending

    Each is read when it is first asked for; a new SavedRun sees what a run under way has added.
    """

    def __init__(self, folder: str | os.PathLike) -> None:
        self.folder = named(folder)
        if not (self.folder / "config.json").is_file():
            raise MissingFileError(f"{self.folder}: no run: there is no file config.json in it")

    def __repr__(self) -> str:
        last = f"to step {self.steps[-1]}" if self.steps else "none"
        return f"SavedRun({self.folder}; checkpoints {last})"

    @functools.cached_property
    def settings(self) -> dict[str, Any]:
        return read_settings(self.folder)

    @functools.cached_property
    def config(self) -> Config:
        return described_config(self.folder / "config.json")

    @functools.cached_property
    def tokenizer(self) -> Tokenizer | None:
        path = self.folder / "tokenizer.json"
        return load_tokenizer(path) if path.exists() else None

    @functools.cached_property
    def metrics(self) -> dict[str, np.ndarray]:
        """Arrays (N,) of the N steps that were logged: `step` and `tokens` as int64, the others as
        float64, NaN where a step has no such number (val_loss without an evaluation)."""
        lines = Log(self.folder / "metrics.jsonl").steps.values()
        names = dict.fromkeys(name for line in lines for name in line)
        found = {}
        for name in names or ("step", "tokens", "loss"):
            kind = np.int64 if name in ("step", "tokens") else np.float64
            found[name] = np.array([line.get(name, np.nan) for line in lines], kind)
        return found

    @functools.cached_property
    def steps(self) -> list[int]:
        paths = list_checkpoints(self.folder / "checkpoints", "step|weights")
        return sorted({step_of(path) for path in paths})

    def checkpoint(self, step: int | None = None) -> Checkpoint:
        """Return the checkpoint of a step, or its weights alone where --keep left these; by default
        the newest whole one. MissingFileError where there is none."""
        if step is None:
            return find_checkpoint(self.folder)
        if not isinstance(step, (int, np.integer)) or isinstance(step, bool):
            raise TypeError(f"{self.folder}: step must be a whole number, not {step!r}")
        if step not in self.steps:
            there = ", ".join(map(str, self.steps)) or "none"
            raise MissingFileError(
                f"{self.folder}: no checkpoint of step {step}; there are {there}"
            )
        place = self.folder / "checkpoints"
        whole = checkpoint_path(place, step)
        return Checkpoint(whole if whole.exists() else weights_path(place, step))

    def model(
        self, step: int | None = None, device: Device | None = None, dtype: str | None = None
    ) -> LanguageModel:
        """Return the model of a step (default: the newest whole checkpoint), in evaluation mode.
        dtype: by default that of the run."""
        model = self.checkpoint(step).restore_model(device, dtype)
        model.eval()
        return model

    def replay(
        self,
        step: int,
        edit: str | os.PathLike | Sequence[dict[str, Any]] = (),
        steps: int | None = None,
        name: str | None = None,
        flags: Sequence[str] = (),
    ) -> SavedRun:
        """Repeat the run from a step on, as `needle replay` does, and return the new run.

        edit: a file of edits, or a list of them (docs/replay.md), whose paths are then relative to
        the current folder; none: the same bits. steps: to train, by default to the end. name: of
        the new run's folder; one of the same replay goes on. flags: of `needle train`, as
        ["--device", "cpu"]. DataError for edits that name nothing, for bad flags, and where up to
        20 steps without edits differ; RuntimeError where the training fails, whose message is on
        standard error."""
        if isinstance(edit, (str, os.PathLike)):
            edits = read_edits(edit)
        else:
            edits = check_edits(edit, Path.cwd())
        try:
            given = passed_on(flags)
        except SystemExit:  # after its message
            raise DataError(f"flags: {' '.join(flags)}: not of needle train, or not here") from None
        replay, _ = check(planned(self.folder, operator.index(step), steps, edits), given.data)
        out = self.folder.resolve().parent
        folder, _ = begun(replay, out, name, flags=flags)
        finish(folder, replay.until, flags=flags)
        return SavedRun(folder)


def open_run(folder: str | os.PathLike) -> SavedRun:
    """Open the folder of a run. MissingFileError, a FileNotFoundError, where there is no run.

    >>> config = ndl.PythiaConfig(vocab_size=50, hidden_size=16, num_layers=1, num_heads=2)
    >>> file = folder / "checkpoints" / "step_2.safetensors"
    >>> _ = ndl.save_checkpoint(ndl.Pythia(config), None, 0, 3.9, file)
    >>> import json
    >>> described = {"settings": {"steps": 2}, "model": config.to_dict()}
    >>> _ = (folder / "config.json").write_text(json.dumps(described))
    >>> run = ndl.open_run(folder)
    >>> run.steps, run.settings["steps"], run.config.num_heads, run.checkpoint(2).state["loss"]
    ([2], 2, 2, 3.9)
    >>> logits, _ = run.model(step=2)([[1, 2, 3]])
    """
    return SavedRun(folder)
