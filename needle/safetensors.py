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

from needle.backend_ndarray import DTYPES, Device, NDArray, array, cpu
from needle.files import FileError

HEADER_LIMIT = 100_000_000  # bytes; that of the package safetensors
# The names of dtypes in a file, by needle's and NumPy's; needle has no arrays of the last six.
DTYPE_NAMES = {
    "float32": "F32",
    "bfloat16": "BF16",
    "float16": "F16",
    "int64": "I64",
    "int32": "I32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
    "float64": "F64",
    "int16": "I16",
    "int8": "I8",
    "uint32": "U32",
    "uint64": "U64",
    "complex64": "C64",
}
BITS = {theirs: np.dtype(ours.replace("bfloat", "uint")) for ours, theirs in DTYPE_NAMES.items()}
FROM_FILE = {theirs: ours for ours, theirs in DTYPE_NAMES.items() if ours in DTYPES}


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
        dtype, host = FROM_FILE[self.dtype], self.words()
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
    length = int.from_bytes(start, "little")
    if size < 8 or length > min(size - 8, limit):
        # A whole file may begin as a pickle does: \x80\2 are the lengths 640 and 66,176.
        if start[:4] == b"PK\3\4" or (start[:1] == b"\x80" and start[1:2] in b"\2\3\4\5"):
            raise FileError(
                f"{path}: a pickle, or an archive of torch.save, which holds pickles; needle loads "
                "none, because a pickle runs code. Save its tensors anew, as safetensors"
            )
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


def chunks(tensors: Mapping[str, Any], metadata: Mapping[str, str]) -> Iterator[Any]:
    """Yield the bytes of a file of NDArrays or NumPy arrays in chunks: the header with its length,
    then each tensor in the order given. One tensor at a time is brought to the host."""
    header: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for name, value in tensors.items():
        begin, end = end, end + value.nbytes
        about = {"dtype": DTYPE_NAMES[str(value.dtype)], "shape": list(value.shape)}
        header[name] = {**about, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for value in tensors.values():
        if isinstance(value, NDArray):
            value = value.compact()
            value = (value.view("uint16") if value.dtype == "bfloat16" else value).numpy()
        yield memoryview(np.ascontiguousarray(value).reshape(-1).view(np.uint8))


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
        if str(value.dtype) not in DTYPE_NAMES:
            raise TypeError(f"{name}: safetensors has no dtype {value.dtype}")
    return b"".join(chunks(arrays, {}))
