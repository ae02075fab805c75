"""open_data: tokens from a path. The kind of the files is found out; `source` says which it was.

    a .bin with its .idx, or their common name   Megatron; if all have 2,049 ids: preshuffled rows;
                                                 the .bin may lie in shards, as published
    a folder with train.bin, or that file        nanoGPT: flat uint16, val.bin beside it is held out
    .npy, any other .bin                         one flat array; .bin is uint16
    JSON lines, text, folders of either          through the tokenizer, once, then from the cache;
                                                 packed by gzip or Zstandard too

Several files are given by a pattern ("shards/*.bin") or their folder. Data without a held-out part
of their own give their last 5 % of tokens; text of 20 or more documents every twentieth; Megatron's
documents are split as GPT-NeoX does by default (969 : 30 : 1); preshuffled rows are all trained on.

The cache has a folder text-HASH for each text and tokenizer: train.bin, held_out.bin, facts.json
and, where it was trained on the text, tokenizer.json. It appears whole, by a rename; of processes
that make one at once the first gives its folder, and the others' work is dropped.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from needle.command import wrapped
from needle.data import megatron
from needle.data.kinds import FLAT, NPY, TextFile, files_at, kind_of, text_files, text_kind
from needle.data.text import documents, shown, standard_library, tokenise, train_tokenizer
from needle.data.tokenizer import Tokenizer, id_limit, load_tokenizer, tokenizers_package
from needle.data.tokens import (
    DataError,
    Documents,
    FlatTokens,
    Part,
    borders_of,
    content_hash,
    map_part,
    to_ids,
)
from needle.files import beside, named, read_json, user_folder

HELD_OUT = 20  # one document, or one token, in so many
# A change of how text becomes tokens makes caches of other versions invisible.
FORMAT = "7"


@dataclass
class TokenData:
    """Flat arrays of token ids in files, and what made them."""

    train: FlatTokens
    held_out: FlatTokens
    source: str  # one line for people: where from, and which kind it was taken for
    tokenizer: Tokenizer | None = field(default=None, repr=False)  # where there is one
    test: FlatTokens | None = field(default=None, repr=False)  # which GPT-NeoX keeps for a test

    @functools.cached_property
    def fingerprint(self) -> str:
        """Equal for equal tokens, however files are cut: a hash of type, numbers and documents,
        then the hash of the tokens, which is made at the first use."""
        known = f"{self.train.dtype.str} {len(self.train)} {len(self.held_out)}"
        shape = hashlib.sha256(known.encode())
        if isinstance(self.train, Documents):
            shape.update(self.train.sizes)
        parts = self.train.parts + self.held_out.parts
        content = content_hash([(part.path, part.offset, part.ids.nbytes) for part in parts])
        return f"{shape.hexdigest()[:16]}-{content}"

    @property
    def vocab_size(self) -> int | None:
        return None if self.tokenizer is None else id_limit(self.tokenizer)


def open_data(
    data: str | os.PathLike | None = None, tokenizer: Any = None, vocab_size: int = 4096
) -> TokenData:
    """Tokens from `data`, see the head of this file; None: the standard library's sources.

    Text goes through `tokenizer` (as load_tokenizer takes it), or through one of `vocab_size`
    tokens that is trained on it; the result is cached. Raises DataError."""
    given = None if tokenizer is None else load_tokenizer(tokenizer)
    if data is not None and (found := open_tokens(data)) is not None:
        found.tokenizer = given
        return found
    if data is None:
        source = "sources of the Python standard library"
        files = [TextFile(path, kind_of(path)) for path in standard_library()]
    else:
        source, files = os.fspath(data), text_files(Path(data))
    folder = cached_text(files, source, given, vocab_size)
    try:
        facts = read_json(folder / "facts.json")
        names = ("train", "held_out")
        parts = (map_part(folder / f"{n}.bin", facts["dtype"], 0, facts[n]) for n in names)
        train, held_out = (FlatTokens([part]) for part in parts)
        if facts["documents"] < HELD_OUT:
            train, held_out = hold_out_end(train)
        counts = f"{facts['documents']:,} documents, {len(train) + len(held_out):,} tokens"
        found = given or load_tokenizer(folder / "tokenizer.json")
    except (LookupError, TypeError, ValueError) as error:
        raise DataError(f"{folder}: delete this damaged folder of the cache: {error}") from error
    return TokenData(train, held_out, f"{source}: {text_kind(files)}, {counts}", found)


# ---- tokens ------------------------------------------------------------------------------------


def open_tokens(data: str | os.PathLike) -> TokenData | None:
    """Files of token ids; None where `data` is text."""
    found = tokens_at(named(data))
    if found is None:
        return None
    tokens, held_out, source = found
    source += f", {len(tokens) + len(held_out or ()):,} {tokens.dtype} tokens"
    if held_out is None and isinstance(tokens, Documents):
        return _split_documents(tokens, source)
    if held_out is None:
        tokens, held_out = hold_out_end(tokens)
    return TokenData(tokens, held_out, source)


def tokens_at(path: Path) -> tuple[FlatTokens, FlatTokens | None, str] | None:
    """(tokens, those held out in a file of their own, which kind they are) of files of token ids;
    None for text."""
    is_folder = path.is_dir()
    if is_folder:
        found = [*path.glob("[!.]*.idx")]
    else:
        found = [path] if megatron.prefix_of(path) else files_at(path)
    prefixes = {prefix for prefix in map(megatron.prefix_of, found) if prefix}
    if len(prefixes) > 1:
        raise DataError(f"{path}: {len(prefixes)} Megatron files are in it; name one of them")
    for prefix in prefixes:  # one at most
        tokens = megatron.open_documents(prefix)
        rows = f", preshuffled rows of {tokens.row_length:,} tokens" if tokens.row_length else ""
        return tokens, None, f"{prefix}: Megatron{rows}, {len(tokens.sizes):,} documents"
    if (path / "train.bin").is_file():
        return tokens_at(path / "train.bin")
    files = files_at(path)
    if is_folder:  # in which tokens lie at the top
        files = [file for file in files if file.parent == path]
    kinds = {kind_of(file) for file in files}
    if not kinds & {NPY, FLAT} or (is_folder and len(kinds) > 1):
        return None
    if len(kinds) > 1:
        raise DataError(f"{path}: files of several kinds: {', '.join(sorted(kinds))}")
    (kind,), val = kinds, files[0].with_name("val.bin")
    tokens = FlatTokens([_part(file, kind) for file in files])
    if [file.name for file in files] == ["train.bin"] and val.is_file():
        source = f"{path.parent}: nanoGPT's train.bin and val.bin"
        return tokens, FlatTokens([_part(val, kind_of(val))]), source
    more = f", {len(files):,} files" if len(files) > 1 else ""
    return tokens, None, f"{path}: {kind}{more}"


def _part(path: Path, kind: str) -> Part:
    """The ids of a .npy of one axis of integers, or uint16."""
    if kind == FLAT:
        return map_part(path, "<u2")
    try:
        mapped = np.lib.format.open_memmap(path, mode="r")
    except Exception as error:  # a damaged header makes NumPy raise almost anything
        raise DataError(f"{path}: not a usable .npy file: {error}") from error
    if mapped.ndim != 1 or mapped.dtype.kind not in "iu":
        found = f"{mapped.dtype} of shape {mapped.shape}"
        raise DataError(f"{path}: must hold one axis of integers, not {found}")
    return Part(path, mapped.offset, np.asarray(mapped))


def _split_documents(tokens: Documents, source: str) -> TokenData:
    """All rows of a preshuffled set to train on, other documents as GPT-NeoX splits them."""
    if tokens.row_length:
        return TokenData(tokens, tokens.between(0, 0), source)
    end, stop, _ = megatron.split_documents(len(tokens.sizes)).tolist()
    first, last = tokens.borders[[end, stop]].tolist()
    train = Documents(tokens.between(0, first).parts, tokens.sizes[:end])
    source += f"; {end:,} to train on in GPT-NeoX's order, {stop - end:,} held out"
    test = tokens.between(last, len(tokens))
    return TokenData(train, tokens.between(first, last), source, test=test)


def hold_out_end(tokens: FlatTokens) -> tuple[FlatTokens, FlatTokens]:
    """Tokens to train on, and the last of them, held out."""
    kept = len(tokens) - len(tokens) // HELD_OUT
    return tokens.between(0, kept), tokens.between(kept, len(tokens))


def read_documents(path: Path, tokenizer: Tokenizer | None, vocab_size: int) -> list[np.ndarray]:
    """Return the ids of each document, integers (N,), in the order of the files. Documents of flat
    tokens end with the tokenizer's end of text; without one all are one document. DataError for
    text without a tokenizer, and for ids outside the vocabulary."""
    found = tokens_at(path)
    if found is not None:
        tokens, held_out, _ = found
        if held_out is not None:
            tokens = FlatTokens(tokens.parts + held_out.parts)
        borders = borders_of(tokens, getattr(tokenizer, "eos_token_id", None)).tolist()
        pairs = zip(borders[:-1], borders[1:])
        return [to_ids(tokens.read(pair, vocab_size=vocab_size)) for pair in pairs]
    if tokenizer is None:
        raise DataError(f"{path}: is text, and the run has no tokenizer: give files of tokens")
    texts: list[list[np.ndarray]] = [[]]
    for ids, last in tokenise(text_files(path), tokenizer, np.dtype("<i4")):
        texts[-1].append(ids)
        texts += [[]] if last else []
    return [np.concatenate(parts) for parts in texts[:-1]]


# ---- the cache of text -------------------------------------------------------------------------


def cache_dir() -> Path:
    """$NEEDLE_CACHE, else $XDG_CACHE_HOME/needle, else ~/.cache/needle. DataError for a user
    without a home."""
    own = os.environ.get("NEEDLE_CACHE")
    noun = "the cache of tokens"
    return Path(own) if own else user_folder("XDG_CACHE_HOME", ".cache", noun, "NEEDLE_CACHE")


def cached_text(
    files: Sequence[TextFile], source: str, tokenizer: Tokenizer | None, vocab_size: int
) -> Path:
    """The folder with the tokens of these files, which are made where the cache has none.
    tokenizer: None trains one of `vocab_size` tokens."""
    made_by = f"{vocab_size}" if tokenizer is None else [tokenizer.to_str(), tokenizer.eos_token_id]
    states = _states(files)
    folder = _folder(files, [size for size, _ in states], made_by)
    if folder.is_dir():
        return folder
    print(wrapped(f"tokenising {source}: once, then kept in\n  {folder}"), flush=True)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with beside(folder) as made:
            work = made / "text"
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
        said = f"the cache cannot be written ({error.strerror}): set NEEDLE_CACHE to another folder"
        raise DataError(f"{folder}: {said}") from error
    return folder


def _states(files: Sequence[TextFile]) -> list[tuple[int, int]]:
    """The size of each file, and when it was written."""
    return [(found.st_size, found.st_mtime_ns) for found in (file.path.stat() for file in files)]


def _folder(files: Sequence[TextFile], sizes: list[int], made_by: Any) -> Path:
    """The folder of the cache for the bytes of these files, and what makes them tokens."""
    kinds = [[file.kind, size] for file, size in zip(files, sizes)]
    content = content_hash([(file.path, 0, size) for file, size in zip(files, sizes)])
    known = [FORMAT, tokenizers_package().__version__, made_by, kinds, content]
    return cache_dir() / f"text-{hashlib.sha256(json.dumps(known).encode()).hexdigest()[:32]}"


def _tokenise(
    files: Sequence[TextFile], tokenizer: Tokenizer | None, vocab_size: int, folder: Path
) -> None:
    """Write what a folder of the cache holds."""
    if tokenizer is None:
        read = shown(documents(files, reports=False), "training a tokenizer")
        tokenizer = load_tokenizer(train_tokenizer((text for text, _ in read), vocab_size))
        tokenizer.save(str(folder / "tokenizer.json"))
    dtype = np.dtype("<u2" if id_limit(tokenizer) <= 1 << 16 else "<i4")
    count = 0
    with open(folder / "train.bin", "xb") as train, open(folder / "held_out.bin", "xb") as end:
        for ids, last in tokenise(files, tokenizer, dtype):
            (end if count % HELD_OUT == HELD_OUT - 1 else train).write(ids)
            count += last
        sizes = {"train": train.tell() // dtype.itemsize, "held_out": end.tell() // dtype.itemsize}
    facts = {"documents": count, "dtype": dtype.str, **sizes}
    (folder / "facts.json").write_text(json.dumps(facts))
