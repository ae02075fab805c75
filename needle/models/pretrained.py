"""Models from places: a checkpoint, a run, a folder of transformers, a name on the hub."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from needle import hf
from needle.backend_ndarray import Device
from needle.command import wrapped
from needle.files import FileError, MissingFileError, named
from needle.hf.hub import snapshot
from needle.models.checkpoint_file import find_checkpoint
from needle.models.registry import class_of_transformers


def pretrained(path: str | os.PathLike, revision: str | None = None) -> Any:
    """Return the Checkpoint of a file or of a run's folder (its newest whole one), or the folder
    (a Path) of a transformers model: one on the disk, else a download of the name OWNER/MODEL from
    the Hugging Face hub. MissingFileError (a FileNotFoundError) if there is none."""
    place = named(path)
    if _is_missing(place) or revision is not None:
        return snapshot(os.fspath(path), revision)
    if not place.is_dir() or (place / "checkpoints").is_dir():
        report = lambda text: print(wrapped(text), file=sys.stderr)
        return find_checkpoint(place, report)
    if not (place / "config.json").exists():
        raise MissingFileError(
            f"{place}: neither a run of needle (no folder checkpoints/) nor a model of "
            "transformers (no config.json)"
        )
    return place


def _is_missing(place: Path) -> bool:
    """True if nothing is at `place`. Another OSError is the caller's: a name that is too long."""
    try:
        os.lstat(place)
    except (FileNotFoundError, NotADirectoryError):
        return True
    return False


def from_pretrained(
    path: str | os.PathLike,
    device: Device | None = None,
    dtype: str | None = None,
    revision: str | None = None,
    cls: Any = None,
) -> Any:
    """Return the model at `path`, in evaluation mode: that of a checkpoint, of a run's folder (its
    newest whole checkpoint), of a folder that transformers saved, or of a name on the Hugging Face
    hub, at `revision` (a branch, a tag or a commit).

    dtype: by default that of the checkpoint; float32 of a model of transformers. cls: its
    class; by default a checkpoint says it, and the model_type of a model of transformers chooses a
    registered one. MissingFileError where nothing is at `path`, FileError that lists all that does
    not fit.
    """
    source = pretrained(path, revision)
    if not isinstance(source, Path):
        return source.restore_model(device, dtype, cls).eval()
    if cls is None:
        config = source / "config.json"
        try:
            cls = class_of_transformers(hf.read_json(config).get("model_type"))
        except ValueError as error:
            raise FileError(f"{config}: {error}") from error
    return hf.load(cls, source, device, dtype or "float32").eval()
