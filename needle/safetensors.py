"""Tensors in files: the one reader and writer of the format safetensors.

    8 bytes   little-endian length of the header
    header    JSON, padded with blanks to a multiple of 8: tensor -> dtype, shape, data_offsets, and
              __metadata__, which maps strings to strings
    data      the tensors, C-contiguous little-endian, without gaps

Nothing of a file is believed before it is checked: a header that is no such JSON, offsets that
contradict shapes or leave gaps, and a file of another length are FileErrors. No pickle is loaded.
The same for bytes that are no file, such as what a client sends: `unpack` and `pack`.
"""

from __future__ import annotations

import io
import json
import math
import mmap
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from needle.backend_ndarray import Device, NDArray, array, cpu
from needle.files import FileError

HEADER_LIMIT = 100_000_000  # bytes; that of the package safetensors
# safetensors' name, ours, the NumPy type that carries the bits
DTYPES = (
    ("F32", "float32", "<f4"),
    ("BF16", "bfloat16", "<u2"),
    ("F16", "float16", "<f2"),
    ("I64", "int64", "<i8"),
    ("I32", "int32", "<i4"),
    ("U16", "uint16", "<u2"),
    ("U8", "uint8", "|u1"),
    ("BOOL", "bool", "|b1"),
)
TO_FILE = {ours: (theirs, np.dtype(bits)) for theirs, ours, bits in DTYPES}
FROM_FILE = {theirs: (ours, np.dtype(bits)) for theirs, ours, bits in DTYPES}
# What needle has no arrays of, and NumPy has.
NUMPY_ONLY = {
    "F64": "float64",
    "I16": "int16",
    "I8": "int8",
    "U32": "uint32",
    "U64": "uint64",
    "C64": "complex64",
}
# The bits of every dtype by safetensors' name, and those names by NumPy's and needle's.
BITS = {theirs: bits for theirs, (_, bits) in FROM_FILE.items()}
BITS |= {theirs: np.dtype(name) for theirs, name in NUMPY_ONLY.items()}
NAMES = {ours: theirs for theirs, ours, _ in DTYPES}
NAMES |= {name: theirs for theirs, name in NUMPY_ONLY.items()}


@dataclass(frozen=True)
class Entry:
    """A tensor in a file: its name there, and where its bytes begin."""

    path: Path
    data: Any  # a mapped file, or bytes
    name: str
    dtype: str  # safetensors' name
    shape: tuple[int, ...]
    offset: int

    def words(self) -> np.ndarray:
        """The elements as they lie there, bfloat16 as uint16."""
        return np.ndarray(self.shape, BITS[self.dtype], self.data, self.offset)

    def read(self, device: Device) -> NDArray:
        dtype, host = FROM_FILE[self.dtype][0], self.words()
        if dtype == "bfloat16":
            return array(host, "uint16", device).view("bfloat16")
        return array(host, dtype, device)


def read_header(file: BinaryIO) -> tuple[dict[str, str], list[Entry]]:
    """(metadata, tensors in the order of their bytes) of a file at its beginning, which is left
    where the data begin. A dtype that needle does not have is left to the caller."""
    size = os.fstat(file.fileno()).st_size
    data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if size else b""
    return _read_header(file, Path(file.name), size, HEADER_LIMIT, data)


def _read_header(
    file: BinaryIO, path: Path, size: int, limit: int, data: Any
) -> tuple[dict[str, str], list[Entry]]:
    start = file.read(8)
    if start[:4] == b"PK\3\4" or (start[:1] == b"\x80" and start[1:2] in b"\2\3\4\5"):
        raise FileError(
            f"{path}: a pickle, or an archive of torch.save, which holds pickles; needle loads "
            "none, because a pickle runs code. Save its tensors anew, as safetensors"
        )
    length = int.from_bytes(start, "little")
    if size < 8 or length > min(size - 8, limit):
        raise FileError(
            f"{path}: {size} bytes long, with a header of {length}: truncated, or no safetensors "
            "file"
        )
    entries, base, position = [], 8 + length, 0
    try:
        header = json.loads(file.read(length))
        metadata = dict(header.pop("__metadata__", {}))
        for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
            (begin, end), shape = entry["data_offsets"], tuple(entry["shape"])
            if not all(type(n) is int and n >= 0 for n in (begin, end, *shape)):
                raise ValueError(f"{name} has no proper shape and offsets")
            bits = BITS.get(entry["dtype"])
            if begin != position or (
                bits is not None and end - begin != math.prod(shape) * bits.itemsize
            ):
                raise ValueError(f"the offsets and the shape of {name} contradict each other")
            entries.append(Entry(path, data, name, entry["dtype"], shape, base + begin))
            position = end
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise FileError(
            f"{path}: the header is damaged, or this is no safetensors file: {error}"
        ) from error
    if base + position != size:
        raise FileError(
            f"{path}: {size} bytes long, but should be {base + position}: truncated or altered"
        )
    return metadata, entries


def misfits(
    entries: Mapping[str, Entry], shapes: Mapping[str, Iterable[int]], dtypes: Iterable[str]
) -> list[str]:
    """Return what is missing, unknown, of another shape than `shapes` says by name, or of another
    dtype than `dtypes`, of which the names are safetensors'."""
    wrong, allowed = [f"{name} is missing" for name in shapes if name not in entries], [*dtypes]
    for name, entry in entries.items():
        wanted = list(shapes.get(name, entry.shape))
        if name not in shapes:
            wrong.append(f"{entry.name} is unknown")
        elif list(entry.shape) != wanted:
            wrong.append(f"{entry.name} has shape {list(entry.shape)}, not {wanted}")
        if entry.dtype not in allowed:
            wrong.append(f"{entry.name} is {entry.dtype}, not {' or '.join(allowed)}")
    return wrong


def _header(described: Iterable[tuple[str, str, Iterable[int], int]], metadata: Mapping) -> bytes:
    """Return the header, after its length. described: (name, safetensors' dtype, shape, bytes) of
    each tensor, in the order of their bytes."""
    header: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for name, dtype, shape, nbytes in described:
        begin, end = end, end + nbytes
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def chunks(tensors: Mapping[str, NDArray], metadata: Mapping[str, str]) -> Iterator[Any]:
    """Yield the bytes of a file in chunks: the header with its length, then each tensor in the
    order given. One tensor at a time is brought to the host."""
    yield _header(
        ((name, TO_FILE[v.dtype][0], v.shape, v.nbytes) for name, v in tensors.items()), metadata
    )
    for value in tensors.values():
        value = value.compact()
        if value.dtype == "bfloat16":
            value = value.view("uint16")
        yield memoryview(np.ascontiguousarray(value.numpy()).reshape(-1).view(np.uint8))


# ---- bytes that are no file ----------------------------------------------------------------------


def unpack(data: bytes | bytearray, what: str, header_limit: int = HEADER_LIMIT) -> dict[str, Any]:
    """name -> NumPy array on the memory of `data`; a bfloat16 one is an NDArray on the host.
    FileErrors begin with `what`; a dtype that neither has is one."""
    head = io.BytesIO(memoryview(data)[: 8 + header_limit])
    found: dict[str, Any] = {}
    for entry in _read_header(head, Path(what), len(data), header_limit, data)[1]:
        if entry.dtype not in BITS:
            raise FileError(
                f"{what}: {entry.name}: dtype {entry.dtype!r}; there are {', '.join(BITS)}"
            )
        try:
            found[entry.name] = entry.read(cpu()) if entry.dtype == "BF16" else entry.words()
        except (ValueError, OverflowError) as error:
            raise FileError(f"{what}: {entry.name}: {error}") from error
    return found


def pack(arrays: Mapping[str, np.ndarray]) -> bytes:
    """The bytes of NumPy arrays; TypeError for a dtype that safetensors does not have."""
    for name, value in arrays.items():
        if value.dtype.name not in NAMES:
            raise TypeError(f"{name}: safetensors has no dtype {value.dtype}")
    head = _header(
        ((name, NAMES[v.dtype.name], v.shape, v.nbytes) for name, v in arrays.items()), {}
    )
    return b"".join([head, *(np.ascontiguousarray(v).tobytes() for v in arrays.values())])
