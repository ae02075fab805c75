"""The folder of a run: which name is free, which run --resume means, and a run in Python.

    runs/NAME/lock          held by the one process that trains there (needle/files.py)
    runs/NAME/checkpoints/  step_N.safetensors, and weights_N.safetensors of --keep
    runs/NAME/config.json   its settings, and `saved`: whether there has been a checkpoint

A run begins again, by its config.json, only if nothing was ever saved: a new run would overwrite
what checkpoints that are missing or cannot be read belong to. A new run may take the folder of a
run of its --name that has finished no step.
"""

from __future__ import annotations

import functools
import itertools
import os
import shlex
from pathlib import Path
from typing import Any

import numpy as np

from needle import models
from needle.backend_ndarray import Device
from needle.checkpoint import (
    Checkpoint,
    CheckpointError,
    checkpoint_path,
    find_checkpoint,
    list_checkpoints,
    newest_checkpoint,
    proven_checkpoint,
    step_of,
    weights_path,
)
from needle.command import flag_words, wrapped
from needle.data import DataError, Tokenizer, load_tokenizer
from needle.data.tokenizer import TEXT_FILES
from needle.files import (
    FileError,
    Lock,
    MissingFileError,
    named,
    read_json,
    remove_leftovers,
    similar,
)
from needle.models import Config, LanguageModel
from needle.training.heartbeat import note_folder
from needle.training.log import read_lines
from needle.training.settings import read_config

# ---- config.json -------------------------------------------------------------------------------


def read_description(folder: Path) -> dict:
    return read_json(folder / "config.json")


def described_config(path: Path) -> Config:
    """Return the configuration of the model that the config.json of a run describes."""
    fields = read_config(str(path))
    return models.model_class(fields.pop("model")).config_class.from_dict(fields)


def is_described(folder: Path) -> bool:
    """True if the config.json in a folder is one of a run."""
    try:
        return isinstance(read_description(folder).get("settings"), dict)
    except FileError:
        return False


def has_saved(folder: Path) -> bool | None:
    """Return whether the run in a folder ever had a checkpoint; without a readable config.json,
    whether it has trained. None if no run has begun there."""
    try:
        return bool(read_description(folder)["saved"])
    except (FileError, KeyError):
        return bool(read_lines(folder / "metrics.jsonl")) or None


class Begun:
    """A run that has saved nothing, by its config.json, in the place of a Checkpoint of step 0."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "config.json"
        state = read_description(folder)
        data = state["data"] if isinstance(state.get("data"), dict) else {}
        state |= {"fingerprint": data.get("fingerprint")}
        self.state = state | {"step": 0, "data": {"epoch": 0, "batch": 0}}

    def configuration(self) -> Config:
        return described_config(self.path)


def check_state(checkpoint: Checkpoint | Begun) -> None:
    """Raise CheckpointError for the state of another program, which no run can resume."""
    state = checkpoint.state
    kinds = {"settings": dict, "step": int, "data": dict, "fingerprint": str, "optimizer": dict}
    missing = [key for key, kind in kinds.items() if not isinstance(state.get(key), kind)]
    if missing:
        raise CheckpointError(
            f"{checkpoint.path}: not of a run of needle train: it has no {', '.join(missing)}"
        )


# ---- a new run ---------------------------------------------------------------------------------


def check_free(folder: Path) -> None:
    """Raise DataError if a run has finished a step in the folder, or if its config.json is not that
    of a run which never saved."""
    steps = map(step_of, list_checkpoints(folder / "checkpoints", "step|weights"))
    never_saved = has_saved(folder) is False or not (folder / "config.json").exists()
    if not never_saved or any(steps) or read_lines(folder / "metrics.jsonl"):
        raise DataError(
            f"{folder}: there is a run of this name already; go on with it by "
            f"{shlex.join(again(folder))}, or choose another --name"
        )


def take(folder: Path) -> Lock:
    """Make and lock a run's folder, and remove temporary files of a killed process there. BusyError
    names the process that works there."""
    note_folder(folder)
    (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
    lock = Lock(folder)
    if lock.held:
        remove_leftovers(folder)
        remove_leftovers(folder / "checkpoints")
    return lock


def begin(out: Path, name: str | None, model: str) -> tuple[Path, Lock]:
    """Return (folder, lock) of a new run. A run without a name gets the model's, with the first
    number that no folder has. Raise DataError if a folder of this name is not free."""
    folder = out / (name or model)
    for number in itertools.count(2):
        try:
            folder.mkdir(parents=True)
            break
        except FileExistsError:
            if name is not None:
                check_free(folder)
                break
            folder = out / f"{model}-{number}"
    lock = take(folder)
    # Of a run that came no further.
    for path in list_checkpoints(folder / "checkpoints", "step|weights"):
        path.unlink()
    for file in TEXT_FILES:
        (folder / file).unlink(missing_ok=True)
    return folder, lock


# ---- a run that goes on ------------------------------------------------------------------------


def again(folder: Path) -> list[str]:
    """Return the flags that resume the run in `folder`."""
    folder = folder if folder.name not in ("", "..") else folder.resolve()
    if folder.name.startswith("."):  # --name takes none such
        return flag_words("--resume", folder)
    words = ["--resume", "auto", *flag_words("--name", folder.name)]
    return words if folder.parent == Path("runs") else [*words, *flag_words("--out", folder.parent)]


def resume(what: str, out: Path, name: str | None) -> tuple[Path, Lock, Checkpoint | Begun] | None:
    """Return the folder of --resume, its lock, and its checkpoint, or config.json of a run that
    never saved; None where `auto` finds no run. Raise DataError for a run whose checkpoints are
    gone."""
    if what != "auto":
        path = Path(what)
        found = find_checkpoint(path)  # before a folder is made from a mistyped name
        folder = path if path.is_dir() else path.resolve().parent.parent
        if not path.is_dir() and path.resolve().parent.name != "checkpoints":
            raise FileError(
                f"--resume {path}: not in the folder checkpoints/ of a run, where it could go on; "
                f"a new run starts from its weights: {shlex.join(flag_words('--init', path))}"
            )
        return folder, take(folder), found
    folders = [out / name] if name else newest_first(out)
    for folder in folders:
        if (folder / "checkpoints").is_dir():
            lock = take(folder)
            found = newest_checkpoint(folder / "checkpoints")
            if found is not None:
                return folder, lock, found
            lock.release()
    begun = next((folder for folder in folders if has_saved(folder) is not None), None)
    if begun is not None and has_saved(begun):
        if (begun / "config.json").exists():
            read_description(begun)  # FileError of a damaged one, which does not say
        raise DataError(
            f"{begun / 'checkpoints'}: no checkpoint is left there, and this run has saved some: "
            f"put one back to go on, or begin anew under another --name, or remove {begun}"
        )
    reason = f"no checkpoint in {begun or out / (name or '')}: starting from the beginning"
    if name and not folders[0].exists():
        reason = f"no run {name} under {out}/{similar(folders[0])}: starting from the beginning"
    more = "" if begun is None else ", with the settings of its config.json"
    print(wrapped(f"--resume auto: {reason}{more}"), flush=True)
    return begun and (begun, take(begun), Begun(begun))


def newest_first(out: Path) -> list[Path]:
    """Return the folders in a folder, that of the run that saved last first."""
    folders = [path for path in out.iterdir() if path.is_dir()] if out.exists() else []
    saved = lambda folder: folder / "checkpoints" if (folder / "checkpoints").is_dir() else folder
    return sorted(folders, key=lambda folder: os.stat(saved(folder)).st_mtime_ns, reverse=True)


def advice_after_divergence(folder: Path, finite: int, saved: int, following: int) -> str:
    """Return the advice after a loss that is not finite: which checkpoint is good.

    finite: the last step of a finite loss. saved: the step of the newest checkpoint. following: the
    number of finite steps after which a checkpoint counts as good."""
    places, lines = folder / "checkpoints", []
    good, last = proven_checkpoint(places, finite, following), checkpoint_path(places, saved)
    advice = "a lower --lr, a longer --warmup or a smaller --clip may help"
    followed = "finite steps followed"
    if good is not None:
        lines.append(f"the last good checkpoint is {good}: {finite - step_of(good)} {followed}")
        advice += f", in a new run from its weights: {shlex.join(flag_words('--init', good))}"
    if last.exists() and last != good:
        lines.append(
            f"the last one is {last}: {finite - saved} {followed}, and it may have diverged"
        )
    return "\n".join([*lines, advice])


# ---- a run in Python ---------------------------------------------------------------------------


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
        settings = read_description(self.folder).get("settings")
        if not isinstance(settings, dict):
            raise FileError(f"{self.folder / 'config.json'}: it has no settings of a run")
        return settings

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
        lines = {line["step"]: line for line in read_lines(self.folder / "metrics.jsonl")}
        names = dict.fromkeys(name for line in lines.values() for name in line)
        found = {}
        for name in names or ("step", "tokens", "loss"):
            kind = np.int64 if name in ("step", "tokens") else np.float64
            found[name] = np.array([line.get(name, np.nan) for line in lines.values()], kind)
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
