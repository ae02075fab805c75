"""Megatron's indexed files, and the order in which GPT-NeoX draws samples from them.

NAME.bin holds the ids of all documents, little-endian, one after the other. NAME.idx:

    0   9 bytes   "MMIDIDX\\0\\0"
    9   uint64    version 1
    17  uint8     type of the ids: see TYPES
    18  uint64    number of sequences N
    26  uint64    number of entries D of the document index
    34  int32 N   length of each sequence in ids
        int64 N   where it begins in NAME.bin, in bytes
        int64 D   the document index: 0, ..., N

NAME.bin may lie in shards, as the Pythias' data are published: NAME-00000-of-00020.bin, ... A
sequence is what GPT-NeoX calls a document. Its sample order (megatron/data/gpt2_dataset.py of
EleutherAI/gpt-neox, "packed") is followed to the byte: see `sample_order`.
"""

from __future__ import annotations

import glob
import os
import re
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

import numpy as np

from needle.data.tokens import DataError, Documents, map_part
from needle.files import reading

MAGIC = b"MMIDIDX\0\0"
HEADER = struct.Struct("<9sQBQQ")
TYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
ROW_LENGTH = 2049  # Pythia's preshuffled rows
SHARD = re.compile(r"-([0-9]{5})-of-([0-9]{5})$")  # after NAME
BLOCK = 1 << 22  # samples at a time: intermediate arrays stay small
LONGEST = 2**31 - 1  # ids of a sequence
SPLIT = (969, 30, 1)  # training, validation, test: GPT-NeoX's default, in thousandths


def open_documents(prefix: Path) -> Documents:
    """NAME.idx and NAME.bin, or the shards of NAME.bin, checked against each other. DataError names
    file and offset."""
    idx = Path(f"{prefix}.idx")
    with reading(idx) as file:
        size, head = os.fstat(file.fileno()).st_size, file.read(HEADER.size)
    files = data_files(prefix)
    known = len(head) == HEADER.size and head.startswith(MAGIC)
    _, version, code, count, entries = HEADER.unpack(head) if known else [None] * 5
    if version != 1 or code not in TYPES:
        raise DataError(f"{idx}: its first {HEADER.size} bytes are no index of version 1: {head!r}")
    needed = HEADER.size + 12 * count + 8 * entries
    if size != needed or count == 0:
        raise DataError(
            f"{idx}: {size:,} bytes, but for the {count:,} sequences and {entries:,} entries of "
            f"its header {needed:,} are needed, and one sequence at least"
        )
    dtype, data_size = np.dtype(TYPES[code]), sum(file.stat().st_size for file in files)
    sizes = map_part(idx, "<i4", HEADER.size, count).ids.copy()
    starts = map_part(idx, "<i8", HEADER.size + 4 * count, count).ids
    expected = np.cumsum(sizes, dtype=np.int64)
    total = int(expected[-1]) * dtype.itemsize
    expected -= sizes  # in place: an index of the Pile has 200 million entries
    expected *= dtype.itemsize
    wrong = (sizes <= 0) | (starts != expected)
    if wrong.any():
        bad = int(np.argmax(wrong))
        raise DataError(
            f"{idx}: document {bad:,} (offset {HEADER.size + 4 * bad:,}) is empty, or does not "
            "begin where the one before it ends"
        )
    if data_size != total:
        data = files[0] if len(files) == 1 else f"{prefix}-*.bin"
        raise DataError(
            f"{data}: ends at offset {data_size:,}, and its index at {total:,}: it is truncated, "
            "or another file's, or a shard is missing"
        )
    parts = [map_part(file, dtype) for file in files]
    preshuffled = bool((sizes == ROW_LENGTH).all()) and count > 1
    return Documents(parts, sizes, ROW_LENGTH if preshuffled else None)


def data_files(prefix: Path) -> list[Path]:
    """NAME.bin; or, where it has not been put together, NAME-00000-of-00020.bin and so on, the
    shards in which the Pythias' data are published (there the last one is 00020), in order."""
    whole = Path(f"{prefix}.bin")
    if whole.is_file():
        return [whole]
    names = prefix.parent.glob(f"{glob.escape(prefix.name)}-*.bin")
    shards = sorted(path for path in names if SHARD.search(path.stem))
    if not shards:
        raise DataError(f"{whole}: no such file, nor {prefix.name}-00000-of-N.bin, beside the .idx")
    return shards


# ---- the order of GPT-NeoX ---------------------------------------------------------------------


def split_documents(count: int) -> np.ndarray:
    """Where the documents of training, of validation and of the test end, as GPT-NeoX rounds it."""
    ends = np.cumsum([round(weight / sum(SPLIT) * count) for weight in SPLIT])
    return ends + count - ends[-1]


def passes_for(samples: int, tokens: int, seq_len: int) -> int:
    """Count the epochs over all documents that give so many samples of seq_len ids and one more,
    which two samples share."""
    # The smallest e >= 1 with (e tokens - 1) // seq_len >= samples.
    return max(-(-(samples * seq_len + 1) // tokens), 1)


def shuffled(
    sizes: np.ndarray, first: int, last: int, seq_len: int, seed: int, passes: int
) -> tuple[np.ndarray, np.ndarray]:
    """(doc_idx, shuffle_idx) of `sample_order`."""
    random = np.random.RandomState(seed)
    doc_idx = np.tile(np.arange(first, last, dtype=np.int32), passes)
    random.shuffle(doc_idx)
    count = (int(sizes[first:last].sum(dtype=np.int64)) * passes - 1) // seq_len
    dtype = np.uint32 if count < np.iinfo(np.uint32).max - 1 else np.int64
    shuffle_idx = np.arange(count, dtype=dtype)
    random.shuffle(shuffle_idx)
    return doc_idx, shuffle_idx


def sample_order(
    sizes: np.ndarray, first: int, last: int, seq_len: int, seed: int, passes: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(doc_idx, sample_idx, shuffle_idx) of documents [first, last).

    doc_idx, int32 (passes x documents): the documents of all passes, shuffled together.
    sample_idx, int32 (S + 1, 2), int64 from 2^30 samples on: sample i begins in document
    doc_idx[sample_idx[i, 0]] at id sample_idx[i, 1]; its last id is the first of sample i + 1.
    shuffle_idx, uint32 (S), int64 where that is too narrow: which sample is drawn i-th.

    >>> from needle.data import sample_order
    >>> sizes = np.array([5, 2, 9], np.int32)
    >>> doc_idx, sample_idx, shuffle_idx = sample_order(sizes, 0, 3, seq_len=4, seed=0, passes=1)
    >>> doc_idx, shuffle_idx
    (array([2, 1, 0], dtype=int32), array([2, 0, 1], dtype=uint32))
    >>> sample_idx.tolist()
    [[0, 0], [0, 4], [0, 8], [2, 1]]
    """
    doc_idx, shuffle_idx = shuffled(sizes, first, last, seq_len, seed, passes)
    ends, count = np.cumsum(sizes[doc_idx], dtype=np.int64), len(shuffle_idx)
    wide = 2 * (count + 1) >= np.iinfo(np.int32).max
    sample_idx = np.zeros((count + 1, 2), np.int64 if wide else np.int32)
    for low in range(1, count + 1, BLOCK):
        starts = np.arange(low, min(low + BLOCK, count + 1), dtype=np.int64) * seq_len
        document = np.searchsorted(ends, starts, side="right")
        sample_idx[low : low + BLOCK, 0] = document
        sample_idx[low : low + BLOCK, 1] = starts - (ends[document] - sizes[doc_idx[document]])
    return doc_idx, sample_idx, shuffle_idx


# ---- writing -----------------------------------------------------------------------------------


def best_dtype(vocab_size: int) -> np.dtype:
    """GPT-NeoX's choice."""
    return np.dtype("<u2" if vocab_size < 65500 else "<i4")


def write_index(file: BinaryIO, dtype: np.dtype, sizes: Iterable[int]) -> None:
    """The .idx of documents that lie one after the other in a .bin of `dtype`."""
    code = {np.dtype(name): number for number, name in TYPES.items()}[np.dtype(dtype)]
    sizes = np.asarray(sizes, "<i4")
    ends = np.cumsum(sizes, dtype="<i8") * np.dtype(dtype).itemsize
    file.write(HEADER.pack(MAGIC, 1, code, len(sizes), len(sizes) + 1))
    file.write(sizes.tobytes())
    file.write(np.concatenate([[0], ends[:-1]]).astype("<i8").tobytes())
    file.write(np.arange(len(sizes) + 1, dtype="<i8").tobytes())


def prefix_of(path: str | os.PathLike) -> Path | None:
    """The NAME of NAME, NAME.idx, NAME.bin or a shard of it where an index lies there; else
    None."""
    path = Path(path)
    prefix = path.with_suffix("") if path.suffix in (".idx", ".bin") else path
    for name in (prefix, prefix.with_name(SHARD.sub("", prefix.name) or prefix.name)):
        if Path(f"{name}.idx").exists():
            return name
    return None
