"""Tensors in files: the one reader and writer of the format safetensors.

    8 bytes   little-endian length of the header
    header    JSON, padded with blanks to a multiple of 8: tensor -> dtype, shape, data_offsets, and
              __metadata__, which maps strings to strings
    data      the tensors, C-contiguous little-endian, without gaps

Nothing of a file is believed before it is checked: a header that is no such JSON, offsets that
contradict shapes or leave gaps, and a file of another length are FileErrors. No pickle is loaded.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from needle.backend_ndarray import Device, NDArray, array
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


@dataclass(frozen=True)
class Entry:
    """A tensor in a file: its name there, and where its bytes begin."""

    path: Path
    name: str
    dtype: str  # safetensors' name
    shape: tuple[int, ...]
    offset: int

    def read(self, device: Device) -> NDArray:
        dtype, bits = FROM_FILE[self.dtype]
        count = math.prod(self.shape)
        host = np.fromfile(self.path, bits, count, offset=self.offset)
        if host.size != count:
            raise FileError(f"{self.path}: {self.name}: the file has been cut while it was read")
        host = host.reshape(self.shape)
        if dtype == "bfloat16":
            return array(host, "uint16", device).view("bfloat16")
        return array(host, dtype, device)


def read_header(file: BinaryIO) -> tuple[dict[str, str], list[Entry]]:
    """(metadata, tensors in the order of their bytes) of a file at its beginning, which is left
    where the data begin. A dtype that needle does not have is left to the caller."""
    path, size = Path(file.name), os.fstat(file.fileno()).st_size
    start = file.read(8)
    if start[:1] == b"\x80" and start[1:2] in (b"\2", b"\3", b"\4", b"\5"):
        raise FileError(
            f"{path}: a pickle; needle never loads one, because a pickle runs code. Save its "
            "tensors anew, as safetensors"
        )
    if start[:4] == b"PK\3\4":
        raise FileError(
            f"{path}: a zip archive, such as torch.save writes; it holds pickles and is not loaded"
        )
    length = int.from_bytes(start, "little")
    if size < 8 or length > min(size - 8, HEADER_LIMIT):
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
            _, bits = FROM_FILE.get(entry["dtype"], (None, None))
            if begin != position or (
                bits is not None and end - begin != math.prod(shape) * bits.itemsize
            ):
                raise ValueError(f"the offsets and the shape of {name} contradict each other")
            entries.append(Entry(path, name, entry["dtype"], shape, base + begin))
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


def pieces(tensors: Mapping[str, NDArray], metadata: Mapping[str, str]) -> Iterator[Any]:
    """The bytes of a file, piece by piece: the header with its length, then each tensor in the
    order given. One tensor at a time is brought to the host."""
    header: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for name, value in tensors.items():
        begin, end = end, end + value.nbytes
        header[name] = {
            "dtype": TO_FILE[value.dtype][0],
            "shape": list(value.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for value in tensors.values():
        value = value.compact()
        if value.dtype == "bfloat16":
            value = value.view("uint16")
        yield memoryview(np.ascontiguousarray(value.numpy()).reshape(-1).view(np.uint8))
