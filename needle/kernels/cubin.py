"""Machine code of NVIDIA's GPUs (a cubin): which kernels it has, and what each one needs.

A cubin is an ELF file (System V ABI). A kernel is a global function symbol that is marked as an
entry; what it needs stands in the sections `.nv.info` (of the whole file) and `.nv.info.NAME`:
records of two bytes, a format and an attribute, and a value. NVIDIA documents neither, but prints
both (`cuobjdump -elf`); the codes below are those that it prints. The driver reads the same records
when it loads the file, so nothing here needs a GPU.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field

MACHINE_CUDA = 190  # e_machine
SECTION_SYMBOLS = 2
SYMBOL_FUNCTION = 2
ENTRY = 0x10  # of st_other: this function is a kernel
# Attributes of .nv.info. A record is a byte of format, a byte of attribute, then two bytes that are
# the value or, where the format is SIZED, the number of bytes that follow.
SIZED = 4
MAX_THREADS = 0x05  # __launch_bounds__: three sizes
REQUIRED_THREADS = 0x10  # __block_size__: three sizes
FRAME_SIZE = 0x11  # symbol, bytes: its own stack frame
MIN_STACK_SIZE = 0x12  # symbol, bytes: with what it calls
PARAMETER = 0x17  # index (4), ordinal (2), offset (2), packed (4) with the size from bit 18 on
REGISTERS = 0x2F  # symbol, count
CLUSTER = 0x3D  # __cluster_dims__: three sizes
PARAMETER_LARGE = 0x45  # index (4), ordinal (2), offset (2), size (4): lists of more than 4 KiB
BARRIERS = 0x4C
# Where this section is (from 9.0 on), the system's own shared memory lies before each kernel's.
KEPT_SECTION, KEPT_SHARED = ".nv.shared.reserved.0", 1024


@dataclass
class Resources:
    """What a kernel needs. registers: of a thread; shared_bytes: of a block, static; local_bytes:
    of a thread, its stack and spilled registers; max_threads: of a block, by __launch_bounds__;
    block, cluster: sizes that the source fixes; barriers: of a block; parameters: (offset, size).
    """

    registers: int = 0
    shared_bytes: int = 0
    local_bytes: int = 0
    max_threads: int = 1024
    block: tuple[int, int, int] | None = None
    cluster: tuple[int, int, int] | None = None
    barriers: int = 0
    parameters: list[tuple[int, int]] = field(default_factory=list)


def kernels(cubin: bytes) -> dict[str, Resources]:
    """symbol -> what it needs, in the order of the symbols. ValueError for what is no cubin."""
    try:
        return _kernels(cubin)
    except (struct.error, IndexError, KeyError, UnicodeDecodeError) as error:
        raise ValueError(f"this is no whole cubin: {error}") from error


@dataclass
class _Section:
    name: str
    type: int
    data: bytes
    size: int
    link: int
    info: int


def _kernels(cubin: bytes) -> dict[str, Resources]:
    sections = _sections(cubin)
    found: dict[str, Resources] = {}
    names: dict[int, str] = {}  # index of the symbol -> name
    for table in sections:
        if table.type != SECTION_SYMBOLS:
            continue
        strings = sections[table.link].data
        for index in range(len(table.data) // 24):
            at, kind, other = struct.unpack_from("<IBB", table.data, index * 24)
            name = strings[at : strings.index(b"\0", at)].decode()
            names[index] = name
            if kind & 15 == SYMBOL_FUNCTION and other & ENTRY:
                found[name] = Resources()
    kept = KEPT_SHARED if any(section.name == KEPT_SECTION for section in sections) else 0
    for section in sections:
        prefix, _, kernel = section.name.partition(".nv.info.")
        if section.name == ".nv.info":
            for attribute, value in _records(section.data):
                _take_shared(found, names, attribute, value)
        elif prefix == "" and kernel in found:
            for attribute, value in _records(section.data):
                _take(found[kernel], attribute, value)
        elif section.name.startswith(".nv.shared."):
            kernel = section.name.removeprefix(".nv.shared.")
            if kernel in found:
                found[kernel].shared_bytes = max(section.size - kept, 0)
    for resources in found.values():
        resources.parameters.sort()
    return found


def _sections(cubin: bytes) -> list[_Section]:
    if cubin[:6] != b"\x7fELF\x02\x01" or struct.unpack_from("<H", cubin, 18) != (MACHINE_CUDA,):
        raise ValueError("this is no cubin: not an ELF file for NVIDIA's GPUs")
    (table,) = struct.unpack_from("<Q", cubin, 40)
    size, count, names_at = struct.unpack_from("<HHH", cubin, 58)
    sections = []
    for i in range(count):
        name, kind, _, _, offset, length, link, info = struct.unpack_from(
            "<IIQQQQII", cubin, table + i * size
        )
        held = b"" if kind == 8 else cubin[offset : offset + length]  # 8: no bytes in the file
        sections.append(_Section(str(name), kind, held, length, link, info))
    strings = sections[names_at].data
    for section in sections:
        at = int(section.name)
        section.name = strings[at : strings.index(b"\0", at)].decode()
    return sections


def _records(data: bytes) -> Iterator[tuple[int, bytes]]:
    at = 0
    while at + 4 <= len(data):
        form, attribute, size = struct.unpack_from("<BBH", data, at)
        at += 4
        if form == SIZED:
            yield attribute, data[at : at + size]
            at += size
        else:
            yield attribute, size.to_bytes(2, "little")


def _take_shared(
    found: dict[str, Resources], names: dict[int, str], attribute: int, value: bytes
) -> None:
    """A record of the whole file, about one function of it."""
    if attribute not in (REGISTERS, FRAME_SIZE, MIN_STACK_SIZE):
        return
    index, number = struct.unpack("<II", value)
    resources = found.get(names[index])
    if resources is None:
        return  # a function that kernels call
    if attribute == REGISTERS:
        resources.registers = number
    else:
        resources.local_bytes = max(resources.local_bytes, number)


def _take(resources: Resources, attribute: int, value: bytes) -> None:
    if attribute in (MAX_THREADS, REQUIRED_THREADS, CLUSTER):
        x, y, z = struct.unpack("<III", value)
        if attribute == MAX_THREADS:
            resources.max_threads = x * y * z
        elif attribute == REQUIRED_THREADS:
            resources.block = (x, y, z)
        else:
            resources.cluster = (x, y, z)
    elif attribute == PARAMETER:
        _, _, offset, packed = struct.unpack("<IHHI", value)
        resources.parameters.append((offset, packed >> 18))
    elif attribute == PARAMETER_LARGE:
        _, _, offset, size = struct.unpack("<IHHI", value)
        resources.parameters.append((offset, size))
    elif attribute == BARRIERS:
        resources.barriers = value[0]
