"""The folder of a run: which name is free, and which run --resume means.

    runs/NAME/lock          held by the one process that trains there (needle/files.py)
    runs/NAME/checkpoints/  step_N.safetensors, and weights_N.safetensors of --keep
    runs/NAME/config.json   its settings, and `saved`: whether there has been a checkpoint

A run begins again, by its config.json, only if nothing was ever saved: a new run would overwrite
what checkpoints that are missing or cannot be read belong to. A new run may take the folder of a
run of its --name that has finished no step.
"""

from __future__ import annotations

import itertools
import os
import shlex
from pathlib import Path
from typing import Any

from needle import models
from needle.checkpoint import (
    Checkpoint,
    CheckpointError,
    find_checkpoint,
    list_checkpoints,
    newest_checkpoint,
    step_of,
)
from needle.command import flag_words, wrapped
from needle.data import DataError
from needle.data.tokenizer import TEXT_FILES
from needle.files import FileError, Lock, read_json, remove_leftovers, similar
from needle.models import Config
from needle.training.heartbeat import note_folder
from needle.training.replay.proofs import Log
from needle.training.settings import read_config

# ---- config.json -------------------------------------------------------------------------------


def read_description(folder: Path) -> dict:
    return read_json(folder / "config.json")


def read_settings(folder: Path) -> dict[str, Any]:
    """Return the settings that config.json holds. FileError where it has none."""
    settings = read_description(folder).get("settings")
    if not isinstance(settings, dict) or not settings:
        raise FileError(f"{folder / 'config.json'}: it has no settings of a run")
    return settings


def described_config(path: Path) -> Config:
    """Return the configuration of the model that the config.json of a run describes. FileError for
    a file of no run."""
    if not isinstance(read_json(path).get("model"), dict):
        raise FileError(f"{path}: not the config.json of a run: it describes no model")
    fields = read_config(str(path))
    return models.model_class(fields.pop("model")).config_class.from_dict(fields)


def has_saved(folder: Path) -> bool | None:
    """Return whether the run in a folder ever had a checkpoint; without a readable config.json,
    whether it has trained. None if no run has begun there."""
    try:
        return bool(read_description(folder)["saved"])
    except (FileError, KeyError):
        return bool(Log(folder / "metrics.jsonl").steps) or None


class Begun:
    """A run that has saved nothing, by its config.json, in the place of a Checkpoint of step 0."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "config.json"
        self.state = read_description(folder)
        data = self.state.get("data")
        self.state["fingerprint"] = data.get("fingerprint") if isinstance(data, dict) else None
        self.state |= {"step": 0, "data": {"epoch": 0, "batch": 0}}

    def configuration(self) -> Config:
        return described_config(self.path)


def check_state(checkpoint: Checkpoint | Begun) -> None:
    """Raise CheckpointError for the state of another program, which no run can resume."""
    kinds = {"settings": dict, "data": dict, "fingerprint": str, "optimizer": dict}
    missing = [key for key in kinds if not isinstance(checkpoint.state.get(key), kinds[key])]
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
    if not never_saved or any(steps) or Log(folder / "metrics.jsonl").steps:
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
    for file in (*TEXT_FILES, "replay.json"):
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
        wrong = None
        if not path.is_dir() and path.resolve().parent.name != "checkpoints":
            wrong = "not in the folder checkpoints/ of a run, where it could go on"
        elif name not in (None, os.path.basename(os.path.abspath(folder))):
            wrong = f"goes on in its own folder, not under --name {name}"
        if wrong is not None:
            anew = f"a new run starts from its weights: {shlex.join(flag_words('--init', path))}"
            raise FileError(f"--resume {path}: {wrong}; {anew}")
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
