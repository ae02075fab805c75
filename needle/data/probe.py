"""The documents of a probe, one by one: of text, JSON lines or tokens."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from needle.data import megatron
from needle.data.readers import open_tokens, text_files
from needle.data.text import documents, encode
from needle.data.tokenizer import Tokenizer
from needle.data.tokens import DataError, FlatTokens, borders_of, to_ids


def read_probe(path: Path, tokenizer: Tokenizer | None, vocab_size: int) -> list[np.ndarray]:
    """Return the ids of each document, integers (N,), in the order of the files. Documents of flat
    tokens end with the tokenizer's end of text; without one all are one document. DataError for
    text without a tokenizer, and for ids outside the vocabulary."""
    found = open_tokens(path)
    if found is None:
        return _read_text(path, tokenizer)
    prefix = megatron.prefix_of(next(path.glob("*.idx"), path))
    flat = FlatTokens(found.train.parts + found.held_out.parts)
    tokens = flat if prefix is None else megatron.open_documents(prefix)
    borders = borders_of(tokens, getattr(tokenizer, "eos_token_id", None))
    texts = []
    for start, stop in zip(borders[:-1].tolist(), borders[1:].tolist()):
        texts.append(to_ids(tokens.read((start, stop), vocab_size=vocab_size)))
    return texts


def _read_text(path: Path, tokenizer: Tokenizer | None) -> list[np.ndarray]:
    if tokenizer is None:
        raise DataError(f"{path}: is text, and the run has no tokenizer: give files of tokens")
    texts, parts = [], []
    for ids, last in encode(tokenizer, documents(text_files(path)), np.dtype("<i4")):
        parts.append(ids)
        if last:
            texts.append(np.concatenate(parts))
            parts = []
    return texts
