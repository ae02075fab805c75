"""CUDA C++ to machine code by NVRTC, NVIDIA's compiler as a library. Needs no GPU.

NVRTC and the toolkit's headers are looked for when the first source is compiled, where the build
looks for the toolkit: $CUDA_HOME, $CUDA_PATH, nvcc on the PATH, /usr/local/cuda, NVIDIA's pip
packages; then where the system finds libraries. What a kernel needs, and what its parameters are,
is read from the machine code (needle.kernels.cubin, needle.kernels.signature), which carries the
lines of the source for compute-sanitizer.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import json
import os
import platform
import re
import shutil
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from needle.kernels import checked, limits
from needle.kernels import cubin as machine_code
from needle.kernels.limits import LaunchReport, Size
from needle.kernels.signature import POINTER_BYTES, Parameter, Signature, demangle, short_name

SOURCE = "kernel.cu"  # the file that messages and compute-sanitizer name
COMPILATION, BAD_OPTION = 6, 5  # of nvrtcResult
MAGIC = b"needle cubin 1\n"
# What makes NVRTC read other files than the toolkit's headers: options, and lines of a source.
READING_OPTION = re.compile(r"-I|--?(pre-)?include|--?(use-)?pch")
READING_LINE = re.compile(r"#\s*include\s*(?!\s|<[^/])")


class CompileError(ValueError):
    """The source does not compile. `log`: what the compiler says, with the lines of the source."""

    def __init__(self, message: str, log: str = "") -> None:
        super().__init__(f"{message}\n{log}".rstrip())
        self.log = log


# ---- the toolkit ---------------------------------------------------------------------------------


@dataclass
class Toolkit:
    """NVRTC's library, and the folders of the toolkit's headers (cuda_bf16.h among them)."""

    nvrtc: Path
    include: tuple[Path, ...]


def _roots() -> Iterable[Path]:
    """Folders that hold lib and include, in the order to try them."""
    for name in ("CUDA_HOME", "CUDA_PATH"):
        if os.environ.get(name):
            yield Path(os.environ[name])
    nvcc = shutil.which("nvcc")
    if nvcc:
        yield Path(nvcc).resolve().parent.parent
    yield Path("/usr/local/cuda")
    for folder in dict.fromkeys(sys.path):
        for pattern in ("nvidia/cu[0-9]*", "nvidia/cuda_nvrtc"):
            yield from sorted(Path(folder).glob(pattern), reverse=True)


def _include(root: Path) -> tuple[Path, ...]:
    parts = [root, *(root / f"targets/{m}-linux" for m in (platform.machine(), "sbsa"))]
    if root.parent.name == "nvidia":  # pip: nvidia/cuda_runtime and nvidia/cuda_cccl lie beside it
        parts += sorted(root.parent.iterdir())
    folders = [part / name for part in parts for name in ("include", "include/cccl")]
    return tuple(dict.fromkeys(folder.resolve() for folder in folders if folder.is_dir()))


@functools.cache
def find_toolkit() -> Toolkit:
    """NVRTC and its headers. RuntimeError, with the remedy, where there is none."""
    looked = []
    for root in _roots():
        for folder in (root / "lib64", root / "lib"):
            looked.append(str(folder))
            libraries = sorted(folder.glob("libnvrtc.so*"))
            if libraries:
                return Toolkit(libraries[0], _include(root))
    for name in ("libnvrtc.so", "libnvrtc.so.13", "libnvrtc.so.12"):
        try:
            ctypes.CDLL(name)
        except OSError:
            continue
        return Toolkit(Path(name), _include(Path("/usr")))
    raise RuntimeError(
        f"no NVRTC, which compiles kernels (libnvrtc.so; looked in {', '.join(looked)}): install "
        f"the CUDA toolkit and set CUDA_HOME, or: {sys.executable} -m pip install "
        "nvidia-cuda-nvrtc nvidia-cuda-runtime nvidia-cuda-crt nvidia-cuda-cccl"
    )


class _Nvrtc:
    """The library's functions; each raises where the library reports an error."""

    def __init__(self, toolkit: Toolkit) -> None:
        self.functions = ctypes.CDLL(str(toolkit.nvrtc))
        self.functions.nvrtcGetErrorString.restype = ctypes.c_char_p

    def check(self, function: str, status: int) -> None:
        if status:
            text = self.functions.nvrtcGetErrorString(status).decode()
            raise RuntimeError(f"{function}: {text}")

    def call(self, function: str, *arguments: Any) -> None:
        self.check(function, self.functions[function](*arguments))

    def data(self, what: str, program: ctypes.c_void_p) -> bytes:
        """nvrtcGetWHAT, of as many bytes as nvrtcGetWHATSize says."""
        size = ctypes.c_size_t()
        self.call(f"nvrtcGet{what}Size", program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        self.call(f"nvrtcGet{what}", program, buffer)
        return buffer.raw

    def version(self) -> tuple[int, int]:
        major, minor = ctypes.c_int(), ctypes.c_int()
        self.call("nvrtcVersion", ctypes.byref(major), ctypes.byref(minor))
        return major.value, minor.value

    def archs(self) -> list[int]:
        count = ctypes.c_int()
        self.call("nvrtcGetNumSupportedArchs", ctypes.byref(count))
        archs = (ctypes.c_int * count.value)()
        self.call("nvrtcGetSupportedArchs", archs)
        return list(archs)


@functools.cache
def _nvrtc() -> _Nvrtc:
    return _Nvrtc(find_toolkit())


# ---- what comes out ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Entry:
    """A compiled kernel: its name as it was asked for, its symbol, its signature, and what it needs
    (needle.kernels.cubin.Resources): registers and local_bytes of a thread, static shared_bytes,
    max_threads and barriers of a block, and block and cluster where the source fixes them."""

    name: str
    symbol: str
    arch: str
    signature: Signature
    registers: int
    shared_bytes: int
    local_bytes: int
    max_threads: int
    block: tuple[int, int, int] | None
    cluster: tuple[int, int, int] | None
    barriers: int

    def declared(self, signature: str) -> Entry:
        """With the types of a declaration, "const float*, int", for a kernel that is `extern "C"`.
        ValueError where the count or a size differs, or a type that the symbol says itself."""
        own = self.signature.parameters
        layout = [(p.offset, POINTER_BYTES if p.kind == "array" else p.size) for p in own]
        new = Signature.declared(self.signature.name, signature, layout)
        both = [
            (ours, dataclasses.replace(theirs, size=ours.size))
            for ours, theirs in zip(own, new.parameters)
        ]
        for ours, theirs in both:
            if ours.kind != "unknown" and dataclasses.replace(ours, type=theirs.type) != theirs:
                raise ValueError(f"{new} is declared, but the source says {self.signature}")
        new = Signature(new.name, tuple(theirs for _, theirs in both))
        return dataclasses.replace(self, signature=new)

    def check(
        self,
        grid: Size,
        block: Size,
        shared: int = 0,
        cluster: Size | None = None,
        cooperative: bool = False,
    ) -> LaunchReport:
        """Whether a GPU of the architecture that this was compiled for can launch it so, and how
        many blocks a multiprocessor then holds. LaunchError says what does not fit."""
        where = limits.of_arch(self.arch)
        return limits.check(self, where, grid, block, shared, cluster, cooperative)


@dataclass(frozen=True)
class Compiled:
    """Machine code for one architecture ("90a"), its kernels by name, the compiler's remarks."""

    arch: str
    cubin: bytes
    log: str
    entries: dict[str, Entry]

    def __getitem__(self, name: str) -> Entry:
        """The kernel of a name, spaces aside. KeyError lists those that there are."""
        wanted = _spelling(name)
        for known, entry in self.entries.items():
            if _spelling(known) == wanted:
                return entry
        raise KeyError(
            f"no kernel {name!r}: there are {', '.join(self.entries)}; a template is compiled when "
            f"it is asked for: compile(source, entries=[{name!r}])"
        )

    def pack(self) -> bytes:
        """As bytes, for another process: a line of JSON, then the machine code."""
        head = {"arch": self.arch, "log": self.log, "entries": self.entries}
        text = json.dumps(head, default=dataclasses.asdict).encode()
        return MAGIC + text + b"\n" + self.cubin

    @staticmethod
    def unpack(data: bytes) -> Compiled:
        """What pack() gave. ValueError for anything else."""
        if not data.startswith(MAGIC):
            raise ValueError("Compiled.unpack: these bytes do not come from Compiled.pack()")
        head, _, cubin = data[len(MAGIC) :].partition(b"\n")
        facts = json.loads(head)
        entries = {name: _entry_from(entry) for name, entry in facts["entries"].items()}
        return Compiled(facts["arch"], cubin, facts["log"], entries)


def _entry_from(facts: dict[str, Any]) -> Entry:
    parameters = (Parameter(**p) for p in facts["signature"]["parameters"])
    facts["signature"] = Signature(facts["signature"]["name"], tuple(parameters))
    for name in ("block", "cluster"):
        facts[name] = tuple(facts[name]) if facts[name] is not None else None
    return Entry(**facts)


def _spelling(name: str) -> str:
    return re.sub(r"\s+", "", name)


# ---- compiling -----------------------------------------------------------------------------------


def build(
    source: str,
    entries: str | Sequence[str] = (),
    arch: str | int = "90a",
    options: Sequence[str] = (),
    debug: bool = False,
) -> Compiled:
    """Compile CUDA C++ for an architecture.

    source: the text; it may include the toolkit's headers. entries: names of kernels as C++ spells
    them, `scale<__nv_bfloat16>` makes the template so; none: every kernel that is no template.
    options: more for NVRTC, such as "-DTILE=64", "-I/my/headers", "--maxrregcount=64". The same
    source, entries, arch and options are compiled once a process, unless they read other headers
    than the toolkit's (-I, #include "mine.h"), which may have changed. debug: check the bounds of
    arrays (needle.kernels.checked); the log names the pointers that are not checked.
    CompileError has the log, with the lines of `source`; RuntimeError: there is no NVRTC.
    """
    if not isinstance(source, str):
        raise TypeError(f"source: must be the text of a program, not {type(source).__name__}")
    names = (entries,) if isinstance(entries, str) else _texts("entries", entries)
    if isinstance(options, str):
        raise TypeError(f"options: must be a list of texts; write [{options!r}]")
    more = _texts("options", options)
    reads = READING_LINE.search(source) or any(map(READING_OPTION.match, more))
    make = _build if reads else _build_once
    if not debug:
        return make(source, names, limits.parse_arch(arch), more)
    try:
        made = make(checked.with_checks(source, SOURCE), names, limits.parse_arch(arch), more)
    except CompileError as error:
        make(source, names, limits.parse_arch(arch), more)  # its own errors, if it has some
        raise CompileError(f"{SOURCE} {checked.HINT}:", error.log) from None
    return dataclasses.replace(made, log=f"{made.log}\n{_unchecked(made)}".strip())


def _unchecked(made: Compiled) -> str:
    return "\n".join(
        f"{SOURCE}: {name}: parameter {number} ({parameter}) is not checked"
        for name, entry in made.entries.items()
        for number, parameter in enumerate(entry.signature.parameters)
        if parameter.kind == "array" and parameter.size == POINTER_BYTES
    )


def _texts(what: str, given: Sequence[str]) -> tuple[str, ...]:
    if not isinstance(given, Iterable):
        raise TypeError(f"{what}: must be a list of texts, not {given!r}")
    texts = tuple(given)
    for text in texts:
        if not isinstance(text, str):
            raise TypeError(f"{what}: must be a list of texts, and {text!r} in it is none")
    return texts


def _build(source: str, names: tuple[str, ...], arch: str, options: tuple[str, ...]) -> Compiled:
    code, log, symbols = _compile(source, names, arch, options)
    if not code.startswith(b"\x7fELF"):
        raise CompileError(
            f"{SOURCE}: the compiler makes no machine code with the options {' '.join(options)}: "
            "leave out the one that asks for another form, such as -dlto",
            log,
        )
    found = machine_code.kernels(code)
    if not names:
        symbols = _own_names(found)
        if not symbols:
            raise CompileError(
                f"{SOURCE} has no kernel: it needs a __global__ function, and a template is "
                'compiled when it is asked for: entries=["scale<float>"]',
                log,
            )
    made = {name: _entry(name, symbol, arch, found) for name, symbol in symbols.items()}
    return Compiled(arch, code, log, made)


_build_once = functools.lru_cache(maxsize=256)(_build)


def _compile(
    source: str, names: tuple[str, ...], arch: str, options: tuple[str, ...]
) -> tuple[bytes, str, dict[str, str]]:
    """(the cubin, the log, the symbol of each name)."""
    nvrtc, include = _nvrtc(), find_toolkit().include
    flags = [f"--gpu-architecture=sm_{arch}", "-lineinfo", *(f"-I{folder}" for folder in include)]
    flags += [] if any("-std" in option for option in options) else ["-std=c++17"]
    # Since 12.9 NVRTC keeps what it compiled on the disk, and opens the driver for that: threads,
    # memory and device files in a process that is to have no GPU.
    flags += ["--no-cache"] if nvrtc.version() >= (12, 9) else []
    flags += options
    program = ctypes.c_void_p()
    text = source.encode()
    if b"\0" in text:
        raise CompileError(f"{SOURCE} has a character of value 0, where its text would end")
    nvrtc.call("nvrtcCreateProgram", ctypes.byref(program), text, SOURCE.encode(), 0, None, None)
    try:
        for name in names:
            nvrtc.call("nvrtcAddNameExpression", program, name.encode())
        given = (ctypes.c_char_p * len(flags))(*(flag.encode() for flag in flags))
        status = nvrtc.functions.nvrtcCompileProgram(program, len(flags), given)
        log = nvrtc.data("ProgramLog", program).rstrip(b"\0\n").decode(errors="replace")
        if status in (COMPILATION, BAD_OPTION):
            raise CompileError(_why(nvrtc, arch, include, log), log)
        nvrtc.check("nvrtcCompileProgram", status)
        symbols = {name: _lowered(nvrtc, program, name, log) for name in names}
        return nvrtc.data("CUBIN", program), log, symbols
    finally:
        nvrtc.call("nvrtcDestroyProgram", ctypes.byref(program))


def _why(nvrtc: _Nvrtc, arch: str, include: tuple[Path, ...], log: str) -> str:
    known = nvrtc.archs()
    if int(arch.rstrip("af")) not in known:
        return (
            f"{SOURCE}: this NVRTC ({find_toolkit().nvrtc}) does not know sm_{arch}, only "
            f"{', '.join(f'sm_{n}' for n in known)}: take another arch, or a newer toolkit"
        )
    if not any((folder / "cuda_fp16.h").exists() for folder in include):
        return (
            f"{SOURCE} does not compile, and the toolkit's headers were not found beside "
            f"{find_toolkit().nvrtc}: {sys.executable} -m pip install nvidia-cuda-runtime "
            "nvidia-cuda-crt nvidia-cuda-cccl"
        )
    return f"{SOURCE} does not compile (sm_{arch}):"


def _lowered(nvrtc: _Nvrtc, program: ctypes.c_void_p, name: str, log: str) -> str:
    lowered = ctypes.c_char_p()
    status = nvrtc.functions.nvrtcGetLoweredName(program, name.encode(), ctypes.byref(lowered))
    if status or lowered.value is None:
        raise CompileError(f"entries: {name!r} is no kernel of {SOURCE}", log)
    return lowered.value.decode()


def _own_names(found: Iterable[str]) -> dict[str, str]:
    """name -> symbol, for all kernels; those of one name are called by their whole signature."""
    names: dict[str, list[str]] = {}
    for symbol in found:
        names.setdefault(short_name(symbol), []).append(symbol)
    whole = {}
    for name, symbols in names.items():
        for symbol in symbols:
            spelled = checked.NAME.sub(r"\1*", str(demangle(symbol)))
            whole[name if len(symbols) == 1 else spelled] = symbol
    return whole


def _entry(name: str, symbol: str, arch: str, found: dict[str, machine_code.Resources]) -> Entry:
    if symbol not in found:
        raise CompileError(
            f"entries: {name!r} is no kernel: the machine code has no __global__ function {symbol}"
        )
    needs = found[symbol]
    return Entry(
        name=name,
        symbol=symbol,
        arch=arch,
        signature=Signature.of_symbol(symbol, needs.parameters),
        registers=needs.registers,
        shared_bytes=needs.shared_bytes,
        local_bytes=needs.local_bytes,
        max_threads=needs.max_threads,
        block=needs.block,
        cluster=needs.cluster,
        barriers=needs.barriers,
    )
