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

import os
from pathlib import Path

from needle.data.batches import Batches
from needle.data.edited import Edits
from needle.data.readers import TokenData, open_data
from needle.data.tokenizer import load_tokenizer
from needle.data.tokens import DataError
from needle.files import read_json


def run_data(
    described: dict, folder: Path | None = None, fingerprint: str | None = None
) -> TokenData:
    """Open the tokens of a run. fingerprint: that of the tokens the run read before; other tokens
    are a DataError, and the tokenizer is that of the run's folder, where there is one."""
    tokenizer, end_of_text = described["tokenizer"], described.get("end_of_text")
    if folder is not None and tokenizer is not None and not Path(tokenizer).exists():
        tokenizer = folder / "tokenizer.json"
    if end_of_text is not None:
        if tokenizer is None:
            raise DataError("--end-of-text: is for a tokenizer that is given: --tokenizer")
        tokenizer = load_tokenizer(tokenizer, end_of_text)
    data = open_data(described["path"], tokenizer, described["vocab_size"])
    if fingerprint is None:
        return data
    if folder is not None and (folder / "tokenizer.json").is_file():
        own = load_tokenizer(folder / "tokenizer.json")
        if data.fingerprint != fingerprint:
            data = open_data(described["path"], own)
        data.tokenizer = own
    if data.fingerprint != fingerprint:
        said = "not the tokens that the run read before: the data or the tokenizer has changed"
        raise DataError(f"{data.source}: {said}: {data.fingerprint}, not {fingerprint}")
    return data


def run_batches(data: TokenData, described: dict, vocab_size: int | None = None) -> Batches:
    """The micro-batches of a run, from its beginning; ids must lie below `vocab_size`."""
    sizes = (described[name] for name in ("batch_size", "seq_len", "seed", "samples"))
    return Batches(data, *sizes, vocab_size)


def open_run_data(
    folder: str | os.PathLike, data_path: str | None = None
) -> tuple[TokenData, Batches, dict]:
    """(data, batches, settings) of the run in `folder`; the settings hold the keys above too. The
    batches of a replay are those with its edits. data_path: where the data lie now (default: where
    they were)."""
    path, replay = Path(folder) / "config.json", Path(folder) / "replay.json"
    config = read_json(path)
    if not (config.get("data") and config.get("settings")):
        raise DataError(f"{path}: not the config.json of a run: it has no data and settings")
    described = config["data"] | ({} if data_path is None else {"path": data_path})
    data = run_data(described, Path(folder), described["fingerprint"])
    batches = run_batches(data, described, described["id_limit"])
    if replay.exists():
        known = read_json(replay)
        if not known.keys() >= {"edits", "start", "until"}:
            raise DataError(f"{replay}: not of a replay: it has {', '.join(known)}")
        span = described["micro_batches"], known["start"] + 1, known["until"]
        batches.edits = Edits(known["edits"], data, batches, *span) or None
    return data, batches, {**config["settings"], **described}
