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
"""

from __future__ import annotations

import functools
import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from needle.data import megatron
from needle.data.cache import cached_text, hold_out_end
from needle.data.identity import content_hash
from needle.data.kinds import FLAT, JSON, NPY, files_at, kind_of
from needle.data.text import standard_library, text_kind
from needle.data.tokenizer import Tokenizer, id_limit, load_tokenizer
from needle.data.tokens import DataError, Documents, FlatTokens, Part, map_part
from needle.files import named


@dataclass
class TokenData:
    """Two flat arrays of token ids in files, and what made them."""

    train: FlatTokens
    held_out: FlatTokens
    source: str  # one line for people: where from, and which kind it was taken for
    tokenizer: Tokenizer | None = None  # where there is one

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

    def __repr__(self) -> str:  # a tokenizer prints all that it knows
        known = "no tokenizer" if self.tokenizer is None else f"a tokenizer of {self.vocab_size:,}"
        return (
            f"TokenData({self.source}; {len(self.train):,} to train on, "
            f"{len(self.held_out):,} held out, {known})"
        )


def open_data(
    data: str | os.PathLike | None = None, tokenizer: Any = None, vocab_size: int = 4096
) -> TokenData:
    """Tokens from `data`, see the head of this file; None: the standard library's sources.

    Text goes through `tokenizer` (as load_tokenizer takes it), or through one of `vocab_size`
    tokens that is trained on it; the result is cached. Raises DataError."""
    if data is not None and (found := open_tokens(data)) is not None:
        found.tokenizer = None if tokenizer is None else load_tokenizer(tokenizer)
        return found
    if data is None:
        source, files = "sources of the Python standard library", standard_library()
    else:
        source, files = os.fspath(data), text_files(Path(data))
    given = None if tokenizer is None else load_tokenizer(tokenizer)
    train, held_out, tokenizer, count = cached_text(files, source, given, vocab_size)
    counts = f"{count:,} documents, {len(train) + len(held_out):,} tokens"
    return TokenData(train, held_out, f"{source}: {text_kind(files)}, {counts}", tokenizer)


def text_files(path: Path, field: str = "text") -> list[Path]:
    """The files of text at `path`. DataError for a file of JSON that was named itself and is not
    one object a line. Among others such a file is a text."""
    files = files_at(path)
    if len(files) == 1 and kind_of(files[0], field) == JSON:
        raise DataError(
            f"{files[0]}: JSON, but not one object a line with a string `{field}`, as needle reads "
            "it: jq -c '.[]' of an array, or jq -c . of objects, writes lines, and `needle data "
            "prepare --field` names another string"
        )
    return files


def open_tokens(data: str | os.PathLike) -> TokenData | None:
    """Files of token ids; None where `data` is text."""
    path = named(data)
    is_folder = path.is_dir()
    indexes = sorted(path.glob("[!.]*.idx")) if is_folder else [path]
    if len(indexes) > 1:
        raise DataError(
            f"{path}: {len(indexes)} Megatron files are in it; name one of them, such as "
            f"{indexes[0]}"
        )
    prefix = megatron.prefix_of(indexes[0]) if indexes else None
    if prefix is not None:
        return _open_megatron(prefix)
    if (path / "train.bin").is_file():
        return open_tokens(path / "train.bin")
    files = files_at(path)
    if is_folder:  # in which tokens lie at the top
        files = [file for file in files if file.parent == path]
    kinds = {kind_of(file) for file in files}
    if not kinds & {NPY, FLAT} or (is_folder and len(kinds) > 1):
        return None
    if len(kinds) > 1:
        raise DataError(f"{path}: files of several kinds: {', '.join(sorted(kinds))}")
    val, source = files[0].with_name("val.bin"), f"{path}: {kinds.pop()}"
    source += f", {len(files):,} files" if len(files) > 1 else ""
    tokens, end = FlatTokens([_part(file) for file in files]), None
    if [file.name for file in files] == ["train.bin"] and val.is_file():
        source, end = f"{path.parent}: nanoGPT's train.bin and val.bin", FlatTokens([_part(val)])
    else:
        tokens, end = hold_out_end(tokens)
    return TokenData(tokens, end, f"{source}, {len(tokens) + len(end):,} {tokens.dtype} tokens")


def _part(path: Path) -> Part:
    """The ids of a .npy of one axis of integers, or uint16."""
    if kind_of(path) == FLAT:
        return map_part(path, "<u2")
    try:
        mapped = np.lib.format.open_memmap(path, mode="r")
    except Exception as error:  # a damaged header makes NumPy raise almost anything
        raise DataError(f"{path}: not a usable .npy file: {error}") from error
    if mapped.ndim != 1 or mapped.dtype.kind not in "iu":
        found = f"{mapped.dtype} of shape {mapped.shape}"
        raise DataError(f"{path}: must hold one axis of integers, not {found}")
    return Part(path, mapped.offset, np.asarray(mapped))


def _open_megatron(prefix: Path) -> TokenData:
    tokens = megatron.open_documents(prefix)
    count, ends = len(tokens.sizes), np.cumsum(tokens.sizes, dtype=np.int64)
    facts = f"{count:,} documents, {len(tokens):,} {tokens.dtype} tokens"
    if tokens.row_length:
        source = f"{prefix}: Megatron, preshuffled rows of {tokens.row_length:,} tokens, {facts}"
        return TokenData(tokens, tokens.between(0, 0), source)
    _, train_end, held_out_end, _ = megatron.split_documents(count)
    if train_end == 0 or held_out_end < train_end:
        train_end = held_out_end = count
    borders = [int(ends[train_end - 1]), int(ends[held_out_end - 1])]
    train = Documents(tokens.between(0, borders[0]).parts, tokens.sizes[:train_end])
    source = (
        f"{prefix}: Megatron, {facts}; {train_end:,} to train on in GPT-NeoX's order, "
        f"{held_out_end - train_end:,} held out"
    )
    return TokenData(train, tokens.between(*borders), source)
