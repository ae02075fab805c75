"""The folder of a run: which name is free, who works in it, and the checkpoint to go on from.

    runs/NAME/lock          held by the one process that trains in it (needle/files.py)
    runs/NAME/checkpoints/  step_N.safetensors
    runs/NAME/config.json   says by `saved` whether there has been a checkpoint; by `id`, which
                            each checkpoint has too, whose checkpoints belong there

A run begins anew only where nothing was ever saved. Checkpoints that are gone or cannot be read,
and folders that cannot be listed, are errors: whoever began anew would overwrite what is left.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shlex
from pathlib import Path

from run_log import read_lines

from needle.checkpoint import (
    Checkpoint,
    CheckpointError,
    checkpoint_path,
    find_checkpoint,
    newest_checkpoint,
    proven_checkpoint,
    step_of,
)
from needle.data import DataError
from needle.files import FileError, Lock, described, reading, remove_leftovers, replacing
from needle.heartbeat import beat


def free_folder(out: Path, name: str | None, model: str, restart: bool) -> Path:
    """The folder of a new run, not made yet. `restart`: a run that died before its first checkpoint
    begins again in its own folder. DataError where there is a run of this name, or has been one
    that saved."""
    given = name or ""
    if name is None:
        names = itertools.chain([model], (f"{model}-{i}" for i in itertools.count(2)))
        name = next(n for n in names if restart or not (out / n).exists())
    folder = out / name
    if restart and has_saved(folder):
        raise DataError(
            f"{folder / 'checkpoints'}: no checkpoint is left there, and this run has saved some: "
            f"put one back to go on, or begin anew under another --name, or remove {folder}"
        )
    if restart:
        print(
            f"--resume auto: no checkpoint in {out / given}: starting from the beginning",
            flush=True,
        )
    if not restart and folder.exists() and any(folder.iterdir()):
        raise DataError(
            f"{folder}: there is a run of this name already; go on with it by "
            f"{shlex.join(again(folder))}, or choose another --name"
        )
    return folder


def has_saved(folder: Path) -> bool:
    """Whether a run ever had a checkpoint. Where its config.json does not say so, as older ones do
    not: whether it has trained."""
    try:
        return bool(read_description(folder)["saved"])
    except (FileError, ValueError, KeyError, TypeError):
        return bool(read_lines(folder / "metrics.jsonl"))


def check_owner(folder: Path, checkpoint: Checkpoint) -> None:
    """CheckpointError for a checkpoint that another run wrote. Where there is no config.json that
    can be read any run may go on."""
    try:
        own = read_description(folder)["id"]
    except (FileError, ValueError, KeyError, TypeError):
        return
    if checkpoint.state.get("run") != own:
        raise CheckpointError(
            f"{checkpoint.path}: is of run {checkpoint.state.get('run')!r:.40}, and {folder} of "
            f"run {own!r:.40}: move it away; a new run starts from its weights: "
            f"{shlex.join(flag('--init', checkpoint.path))}"
        )


def proven(folder: Path, finite: int, saved: int, following: int) -> str:
    """For people, after a loss that is not finite: which checkpoint is good, when the losses up to
    step `finite` were finite, the newest checkpoint is of step `saved`, and `following` finite
    steps prove one."""
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
    """Its first checkpoint is there; config.json says so from now on."""
    with contextlib.suppress(FileError, ValueError, TypeError):  # the training does not need it
        description = read_description(folder)
        if not description.get("saved"):
            write_description(folder, {**description, "saved": True})


def read_description(folder: Path) -> dict:
    with reading(folder / "config.json") as file:
        return json.loads(file.read())


def write_description(folder: Path, description: dict) -> None:
    with replacing(folder / "config.json") as file:
        file.write(json.dumps(description, indent=2).encode() + b"\n")


def flag(name: str, value: str | os.PathLike) -> list[str]:
    """The words that give a flag this value, which may look like a flag itself."""
    text = str(value)
    return [f"{name}={text}"] if text.startswith("-") else [name, text]


def again(folder: Path) -> list[str]:
    """The flags that go on with the run in `folder`."""
    folder = folder if folder.name not in ("", "..") else folder.resolve()
    if folder.name.startswith("."):  # --name takes none such
        return flag("--resume", folder)
    words = ["--resume", "auto", *flag("--name", folder.name)]
    return words if folder.parent == Path("runs") else [*words, *flag("--out", folder.parent)]


def take(folder: Path) -> Lock:
    """Makes a run's folder where there is none, and locks it. What a killed process was writing is
    removed. FileError names the process that works there."""
    beat(run=str(folder), resume=again(folder), watched=False)
    try:
        (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
        lock = Lock(folder)
        if lock.held:
            remove_leftovers(folder)
            remove_leftovers(folder / "checkpoints")
        return lock
    except OSError as error:
        raise FileError(described(error)) from error


def take_new(
    folder: Path, out: Path, name: str | None, model: str, restart: bool
) -> tuple[Path, Lock]:
    """(the folder of a new run, its lock). `folder` is what free_folder gave for the other four.
    Where another start has made it meanwhile a run without a name takes the next, any other is
    refused."""
    chooses = name is None and not restart
    try:
        out.mkdir(parents=True, exist_ok=True)
        while chooses:
            try:
                folder.mkdir()
                break
            except FileExistsError:
                folder = free_folder(out, name, model, restart)
    except OSError as error:
        raise FileError(described(error)) from error
    lock = take(folder)
    if not chooses and (has_saved(folder) if restart else _is_used(folder)):
        lock.release()
        raise DataError(
            f"{folder}: another start has begun this run meanwhile; go on with it by "
            f"{shlex.join(again(folder))}, or choose another --name"
        )
    return folder, lock


def _is_used(folder: Path) -> bool:
    """Whether there is more than `take` makes."""
    made = {"lock", "checkpoints"}
    saved = (folder / "checkpoints").iterdir()
    return bool({path.name for path in folder.iterdir()} - made) or any(saved)


def resume(what: str, out: Path, name: str | None) -> tuple[Path, Lock, Checkpoint] | None:
    """(folder, its lock, checkpoint) that --resume names; None where `auto` finds nothing."""
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
        lock = take(folder)
        found = newest_checkpoint(folder / "checkpoints")
        if found is not None:
            check_owner(folder, found)
            return folder, lock, found
        lock.release()
    return None


def _newest_first(out: Path) -> list[Path]:
    """The runs in a folder, that which saved last first."""
    try:
        found = [
            (os.stat(folder / "checkpoints").st_mtime_ns, folder)
            for folder in out.iterdir()
            if folder.is_dir() and (folder / "checkpoints").is_dir()
        ]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise FileError(f"{error.filename}: cannot be listed: {error.strerror}") from error
    return [folder for _, folder in sorted(found, reverse=True)]
