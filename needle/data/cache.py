"""The cache of text: a folder for the tokens of each text and tokenizer, found by their hash.

A folder text-HASH holds train.bin, held_out.bin, facts.json and, where it was trained on the text,
tokenizer.json. It appears whole, by a rename; of processes that make one at once the first gives
its folder, and the others' work is dropped.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from needle.command import wrapped
from needle.data.identity import content_hash
from needle.data.kinds import kind_of
from needle.data.text import documents, encode, shown, train_tokenizer
from needle.data.tokenizer import Tokenizer, id_limit, load_tokenizer, tokenizers_package
from needle.data.tokens import DataError, FlatTokens, map_part

HELD_OUT = 20  # one document, or one token, in so many
# A change of how text becomes tokens makes caches of other versions invisible.
FORMAT = "5"


def cache_dir() -> Path:
    """$NEEDLE_CACHE, else $XDG_CACHE_HOME/needle, else ~/.cache/needle. DataError for a user
    without a home."""
    own = os.environ.get("NEEDLE_CACHE")
    if own:
        return Path(own)
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    if base.startswith("~"):
        raise DataError(
            "no folder for the cache of tokens: this user has no home; set NEEDLE_CACHE to a folder"
        )
    return Path(base) / "needle"


def cached_text(
    files: Sequence[Path], source: str, tokenizer: Tokenizer | None, vocab_size: int
) -> tuple[FlatTokens, FlatTokens, Tokenizer, int]:
    """The tokens of these files to train on and held out, their tokenizer, and the number of
    documents. They are made where the cache has none. tokenizer: None trains one of `vocab_size`
    tokens."""
    made_by = f"{vocab_size}" if tokenizer is None else [tokenizer.to_str(), tokenizer.eos_token_id]
    states = _states(files)
    kinds = [[kind_of(file), size] for file, (size, _) in zip(files, states)]
    content = content_hash([(file, 0, size) for file, (size, _) in zip(files, states)])
    known = [FORMAT, tokenizers_package().__version__, made_by, kinds, content]
    name = f"text-{hashlib.sha256(json.dumps(known).encode()).hexdigest()[:32]}"
    folder = cache_dir() / name
    if not folder.is_dir():
        print(wrapped(f"tokenising {source}: once, then kept in\n  {folder}"), flush=True)
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix=f"{name}-", dir=folder.parent) as made:
                work = Path(made) / "text"
                work.mkdir()
                _tokenise(files, tokenizer, vocab_size, work)
                if _states(files) != states:
                    raise DataError(f"{source}: changed while it was read: start again")
                try:
                    os.rename(work, folder)
                except OSError:
                    if not folder.is_dir():  # another process was faster
                        raise
        except OSError as error:
            raise DataError(
                f"{folder}: the cache cannot be written ({error.strerror}); set NEEDLE_CACHE to a "
                "folder that can be written"
            ) from error
    facts = json.loads((folder / "facts.json").read_bytes())
    found = tokenizer or load_tokenizer(folder / "tokenizer.json")
    parts = (map_part(folder / f"{name}.bin", facts["dtype"]) for name in ("train", "held_out"))
    train, held_out = (FlatTokens([part]) for part in parts)
    if facts["documents"] < HELD_OUT:
        train, held_out = hold_out_end(train)
    return train, held_out, found, facts["documents"]


def hold_out_end(tokens: FlatTokens) -> tuple[FlatTokens, FlatTokens]:
    """Tokens to train on, and the last of them, held out."""
    kept = len(tokens) - len(tokens) // HELD_OUT
    return tokens.between(0, kept), tokens.between(kept, len(tokens))


def _states(files: Sequence[Path]) -> list[tuple[int, int]]:
    """The size of each file, and when it was written."""
    return [(status.st_size, status.st_mtime_ns) for status in map(os.stat, files)]


def _tokenise(
    files: Sequence[Path], tokenizer: Tokenizer | None, vocab_size: int, folder: Path
) -> None:
    """Write what a folder of the cache holds."""
    if tokenizer is None:
        read = shown(documents(files, reports=False), "training a tokenizer")
        tokenizer = load_tokenizer(train_tokenizer((text for text, _ in read), vocab_size))
        tokenizer.save(str(folder / "tokenizer.json"))
    dtype = np.dtype("<u2" if id_limit(tokenizer) <= 1 << 16 else "<i4")
    count = 0
    with open(folder / "train.bin", "xb") as train, open(folder / "held_out.bin", "xb") as end:
        read = shown(documents(files), "tokenising")
        for ids, last in encode(tokenizer, read, dtype):
            (end if count % HELD_OUT == HELD_OUT - 1 else train).write(ids)
            count += last
    (folder / "facts.json").write_text(json.dumps({"documents": count, "dtype": dtype.str}))
