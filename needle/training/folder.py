"""The folder of a run: which name is free, which process owns it, which checkpoint to resume.

    runs/NAME/lock          held by the one process that trains there (needle/files.py)
    runs/NAME/checkpoints/  step_N.safetensors
    runs/NAME/config.json   `saved`: whether there has been a checkpoint; `id`: of the run, which
                            each of its checkpoints has too

A run begins again, by its config.json, only if nothing was ever saved. Missing or unreadable
checkpoints, and folders that cannot be listed, are errors, since a new run would overwrite the
rest. A new run may take the folder of a run of its --name that has finished no step.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shlex
from pathlib import Path

from needle.arguments import wrapped
from needle.checkpoint import (
    Checkpoint,
    CheckpointError,
    checkpoint_path,
    find_checkpoint,
    list_checkpoints,
    newest_checkpoint,
    proven_checkpoint,
    step_of,
)
from needle.data import DataError
from needle.data.tokenizer import TEXT_FILES
from needle.files import FileError, Lock, described, read_json, remove_leftovers, replacing, similar
from needle.training.heartbeat import note_folder
from needle.training.log import read_lines


def is_free(folder: Path) -> bool:
    """True if no run has finished a step in the folder. Without a config.json of a run that never
    saved, nothing else may lie there."""
    if has_saved(folder) is False:
        steps = map(step_of, list_checkpoints(folder / "checkpoints", "step|weights"))
        return not any(steps) and not read_lines(folder / "metrics.jsonl")
    entries = {path.name for path in folder.iterdir()} if folder.exists() else set()
    return entries <= {"lock", "checkpoints"} and not any(folder.glob("checkpoints/*"))


def check_free(folder: Path) -> None:
    """Raise DataError if the folder is not free for a new run."""
    if not is_free(folder):
        raise DataError(
            f"{folder}: there is a run of this name already; go on with it by "
            f"{shlex.join(again(folder))}, or choose another --name"
        )


def has_saved(folder: Path) -> bool | None:
    """Return whether the run in a folder ever had a checkpoint; without a readable config.json,
    whether it has trained. None if no run has begun there."""
    try:
        return bool(read_description(folder)["saved"])
    except (FileError, KeyError):
        return bool(read_lines(folder / "metrics.jsonl")) or None


def check_owner(folder: Path, checkpoint: Checkpoint) -> None:
    """Raise CheckpointError for a checkpoint of another run. Without a readable config.json any run
    may resume."""
    try:
        own = read_description(folder)["id"]
    except (FileError, KeyError):
        return
    if checkpoint.state.get("run") != own:
        raise CheckpointError(
            f"{checkpoint.path}: is of run {checkpoint.state.get('run')!r:.40}, and {folder} of "
            f"run {own!r:.40}: move it away; a new run starts from its weights: "
            f"{shlex.join(flag('--init', checkpoint.path))}"
        )


def advice_after_divergence(folder: Path, finite: int, saved: int, following: int) -> str:
    """Return the advice after a loss that is not finite: which checkpoint is good.

    finite: the last step of a finite loss. saved: the step of the newest checkpoint. following: the
    number of finite steps after which a checkpoint counts as good."""
    last, lines = checkpoint_path(folder / "checkpoints", saved), []
    good = proven_checkpoint(folder / "checkpoints", finite, following)
    advice = "a lower --lr, a longer --warmup or a smaller --clip may help"
    if good is not None:
        lines.append(f"the last good checkpoint is {good}: {_followed(finite - step_of(good))}")
        advice += f", in a new run from its weights: {shlex.join(flag('--init', good))}"
    elif last.exists():
        lines.append("no checkpoint is known to be good")
    else:
        lines.append("no checkpoint was written before it")
    if last.exists() and last != good:
        followed = _followed(finite - saved)
        lines.append(f"the last one is {last}: {followed}, and it may have diverged")
    return "\n".join([*lines, advice])


def _followed(steps: int) -> str:
    return f"{steps} finite step{'s' * (steps != 1)} followed"


def note_saved(folder: Path) -> None:
    """Write into config.json that the run has a checkpoint."""
    with contextlib.suppress(FileError):  # training goes on without it
        description = read_description(folder)
        if not description.get("saved"):
            write_description(folder, {**description, "saved": True})


def read_description(folder: Path) -> dict:
    return read_json(folder / "config.json")


def write_description(folder: Path, description: dict) -> None:
    with replacing(folder / "config.json") as file:
        file.write(json.dumps(description, indent=2).encode() + b"\n")


def flag(name: str, value: str | os.PathLike) -> list[str]:
    """Return the words of a flag and its value, which may look like a flag itself."""
    text = str(value)
    return [f"{name}={text}"] if text.startswith("-") else [name, text]


def again(folder: Path) -> list[str]:
    """Return the flags that resume the run in `folder`."""
    folder = folder if folder.name not in ("", "..") else folder.resolve()
    if folder.name.startswith("."):  # --name takes none such
        return flag("--resume", folder)
    words = ["--resume", "auto", *flag("--name", folder.name)]
    return words if folder.parent == Path("runs") else [*words, *flag("--out", folder.parent)]


def take(folder: Path) -> Lock:
    """Make and lock a run's folder, and remove temporary files of a killed process there. Raise
    FileError, which names the process that works there."""
    note_folder(folder)
    try:
        (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
        lock = Lock(folder)
        if lock.held:
            remove_leftovers(folder)
            remove_leftovers(folder / "checkpoints")
        return lock
    except OSError as error:
        raise FileError(described(error)) from error


def begin(out: Path, name: str | None, model: str) -> tuple[Path, Lock]:
    """Return (folder, lock) of a new run. A run without a name gets the model's, with the first
    number that no folder has. Raise DataError if a folder of this name is not free."""
    if name is not None:
        folder = out / name
        check_free(folder)
    else:
        folder = _make_first(out, model)
    lock = take(folder)
    # Of a run that came no further.
    for path in list_checkpoints(folder / "checkpoints", "step|weights"):
        path.unlink()
    for name in TEXT_FILES:
        (folder / name).unlink(missing_ok=True)
    return folder, lock


def _make_first(out: Path, model: str) -> Path:
    try:
        for number in itertools.count(1):
            folder = out / (model if number == 1 else f"{model}-{number}")
            with contextlib.suppress(FileExistsError):
                folder.mkdir(parents=True)
                return folder
    except OSError as error:
        raise FileError(described(error)) from error


def resume(what: str, out: Path, name: str | None) -> tuple[Path, Lock, Checkpoint | None] | None:
    """Return (folder, lock, checkpoint) of --resume. The checkpoint is None for a run that begins
    again, since it never saved; the result is None where `auto` finds no run. Raise DataError for a
    run whose checkpoints are gone."""
    if what != "auto":
        path = Path(what)
        found = find_checkpoint(path)  # before a folder is made from a mistyped name
        folder = path if path.is_dir() else path.resolve().parent.parent
        if not path.is_dir() and path.resolve().parent.name != "checkpoints":
            raise FileError(
                f"--resume {path}: not in the folder checkpoints/ of a run, where it could go on; "
                f"a new run starts from its weights: {shlex.join(flag('--init', path))}"
            )
        check_owner(folder, found)
        return folder, take(folder), found
    folders = [out / name] if name else _newest_first(out)
    for folder in folders:
        if not (folder / "checkpoints").is_dir():
            continue
        with contextlib.ExitStack() as ends:
            lock = take(folder)
            ends.callback(lock.release)
            found = newest_checkpoint(folder / "checkpoints")
            if found is not None:
                check_owner(folder, found)
                ends.pop_all()
                return folder, lock, found
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
    return begun and (begun, take(begun), None)


def _newest_first(out: Path) -> list[Path]:
    """Return the folders in a folder, that of the run that saved last first."""
    try:
        places = {folder: folder / "checkpoints" for folder in out.iterdir() if folder.is_dir()}
        found = [
            (os.stat(place if place.is_dir() else folder).st_mtime_ns, folder)
            for folder, place in places.items()
        ]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise FileError(f"{error.filename}: cannot be listed: {error.strerror}") from error
    return [folder for _, folder in sorted(found, reverse=True)]
