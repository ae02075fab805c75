"""The data of a training run, from its settings: what train_pythia.py reads and `view` shows."""

from __future__ import annotations

import json
import os
from pathlib import Path

from needle.data.batches import Batches
from needle.data.readers import TokenData, open_data
from needle.data.tokens import DataError


def run_data(
    settings: dict, folder: Path | None = None, fingerprint: str | None = None
) -> TokenData:
    """The tokens of a run. With the fingerprint of what it read before: the tokenizer.json that
    lies in its folder is tried as well, and other tokens are a DataError."""
    vocabulary = 4096 if settings["model"] == "tiny" else 50257
    data = open_data(settings["data"], settings["tokenizer"], vocabulary)
    if fingerprint is None or data.fingerprint == fingerprint:
        return data
    if folder is not None and (folder / "tokenizer.json").is_file():
        data = open_data(settings["data"], folder / "tokenizer.json")
    if data.fingerprint != fingerprint:
        raise DataError(
            f"{data.source}: not the tokens that the run read before: the data or the "
            "tokenizer has changed"
        )
    return data


def run_batches(data: TokenData, settings: dict, vocab_size: int | None = None) -> Batches:
    """The micro-batches of a run, from its beginning."""
    samples = settings["steps"] * settings["grad_accum"] * settings["batch_size"]
    return Batches(
        data.train,
        settings["batch_size"],
        settings["seq_len"],
        settings["seed"],
        samples,
        vocab_size,
    )


def open_run(folder: str | os.PathLike) -> tuple[TokenData, Batches, dict]:
    """(data, batches, settings) of the run in `folder`."""
    path = Path(folder) / "config.json"
    try:
        description = json.loads(path.read_text())
        settings = description["settings"]
        data = run_data(settings, Path(folder), description["data"]["fingerprint"])
        return data, run_batches(data, settings, description["model"]["vocab_size"]), settings
    except (OSError, KeyError, TypeError, ValueError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{path}: not the config.json of a run: {error!r}") from error
