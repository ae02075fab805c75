"""The data of a training run, for the trainer and for `needle data view`.

A run describes its data by a dictionary of JSON values, which its config.json holds under `data`:

    path           as open_data takes it; null: the sources of Python's standard library
    tokenizer      a tokenizer.json; null: one that is trained on the text
    end_of_text    the token that ends a text; null: the one that the tokenizer's files name
    vocab_size     tokens of a tokenizer that is trained
    id_limit       every id is below it; null: nothing is checked
    batch_size     sequences a micro-batch
    micro_batches  a step
    seq_len        tokens a sequence
    seed           of the order
    samples        sequences that the whole run draws
    fingerprint    of the tokens: their shape and their hash (TokenData)
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from needle.data.batches import Batches
from needle.data.readers import TRUSTED, TokenData, open_data
from needle.data.tokenizer import load_tokenizer
from needle.data.tokens import DataError
from needle.files import FileError, reading


def run_data(
    described: dict, folder: Path | None = None, fingerprint: str | None = None, trust: bool = False
) -> TokenData:
    """Open the tokens of a run. fingerprint: that of the tokens the run read before; other tokens
    are a DataError. The text is read with the tokenizer in the run's folder if the one described is
    gone or the text gives another one. trust: compare only type and numbers of the tokens."""
    tokenizer, end_of_text = described["tokenizer"], described.get("end_of_text")
    if folder is not None and tokenizer is not None and not Path(tokenizer).exists():
        tokenizer = folder / "tokenizer.json"
    if end_of_text is not None:
        if tokenizer is None:
            raise DataError("--end-of-text: is for a tokenizer that is given: --tokenizer")
        tokenizer = load_tokenizer(tokenizer, end_of_text)
    data = open_data(described["path"], tokenizer, described["vocab_size"], trust)
    if fingerprint is None:
        return data
    own = None if folder is None else folder / "tokenizer.json"
    if own is not None and own.is_file() and not (_same(data, fingerprint) and _is(data, own)):
        data = open_data(described["path"], own, trust=trust)
    if not _same(data, fingerprint):
        raise DataError(
            f"{data.source}: not the tokens that the run read before: the data or the "
            "tokenizer has changed"
        )
    return data


def _is(data: TokenData, tokenizer: Path) -> bool:
    """True if the tokenizer of the data is the one in this file, with its special tokens. Equal ids
    do not prove it: two tokenizers, trained on texts with other words, may give them the same
    numbers."""
    given, own = data.tokenizer, load_tokenizer(tokenizer)
    return given is not None and (given.to_str(), given.stops) == (own.to_str(), own.stops)


def _same(data: TokenData, fingerprint: str) -> bool:
    """True if data may have this fingerprint. Trusted data take it over, with its hash."""
    (shape, own), (before, content) = (
        text.partition("-")[::2] for text in (data.fingerprint, fingerprint)
    )
    if shape != before or (own != content and TRUSTED not in (own, content)):
        return False
    if data.trusted:
        data.fingerprint = fingerprint
    return True


def run_batches(data: TokenData, described: dict, vocab_size: int | None = None) -> Batches:
    """The micro-batches of a run, from its beginning; ids must lie below `vocab_size`."""
    sizes = (described[name] for name in ("batch_size", "seq_len", "seed", "samples"))
    return Batches(data.train, *sizes, vocab_size)


def open_run_data(folder: str | os.PathLike) -> tuple[TokenData, Batches, dict]:
    """(data, batches, settings) of the run in `folder`; the settings hold the keys above too."""
    path = Path(folder) / "config.json"
    try:
        with reading(path) as file:
            config = json.loads(file.read())
        described = config["data"]
        settings, fingerprint = {**config["settings"], **described}, described["fingerprint"]
        _check(settings)
        data = run_data(described, Path(folder), fingerprint, fingerprint.endswith(TRUSTED))
        return data, run_batches(data, described, described["id_limit"]), settings
    except (OSError, KeyError, TypeError, ValueError) as error:
        if isinstance(error, (DataError, FileError)):
            raise
        raise DataError(f"{path}: not the config.json of a run: {error!r}") from error


def _check(settings: dict) -> None:
    """ValueError for numbers that no run has, and for a path or a fingerprint that is no text."""
    least = {"steps": 1, "batch_size": 1, "micro_batches": 1, "seq_len": 1, "samples": 1, "seed": 0}
    if settings["id_limit"] is not None:
        least["id_limit"] = 1
    for name, low in least.items():
        value = settings[name]
        if type(value) is not int or not low <= value < 2**63:
            raise ValueError(f"{name} is {value!r:.40}")
    for name, kinds in {"path": (str, type(None)), "fingerprint": str}.items():
        if not isinstance(settings[name], kinds):
            raise ValueError(f"{name} is {settings[name]!r:.40}")
    if settings["micro_batches"] * settings["batch_size"] > settings["samples"]:
        raise ValueError("a step has more samples than the run")
