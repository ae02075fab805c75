"""CUDA C++ to machine code by NVRTC, NVIDIA's compiler as a library. Needs no GPU.

NVRTC is loaded when the first source is compiled (needle.kernels.toolkit finds it). What a kernel
needs is read from the report of NVRTC's assembler (`ptxas -v`), and the layout of its parameters
from its PTX; their types from its symbol (needle.kernels.signature). The machine code carries the
lines of the source for compute-sanitizer.
"""

from __future__ import annotations

import ctypes
import functools
import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from needle.kernels import limits
from needle.kernels.limits import Entry
from needle.kernels.signature import Layout, Parameter, Signature, demangle
from needle.kernels.toolkit import find_toolkit

SOURCE = "kernel.cu"  # the file that messages and compute-sanitizer name
DECLARED = "needle_declared"  # a kernel with the types that a user declares
USERS_ERRORS = (5, 6)  # of nvrtcResult: of an option, of the source
# A line that makes NVRTC read other files than the toolkit's headers.
READING_LINE = re.compile(r"#\s*include\s*(?!\s|<[^/])")


class CompileError(ValueError):
    """The source does not compile. `log`: the compiler's messages, with the lines of the source."""

    def __init__(self, message: str, log: str = "") -> None:
        super().__init__(f"{message}\n{log}".rstrip())
        self.log = log


# ---- NVRTC ---------------------------------------------------------------------------------------


@functools.cache
def _library() -> ctypes.CDLL:
    """Return NVRTC. RuntimeError if there is none."""
    path = find_toolkit().nvrtc
    if path.is_absolute():  # that of NVIDIA's package does not look beside itself
        for builtins in path.parent.glob("libnvrtc-builtins.so*"):
            ctypes.CDLL(str(builtins))
    library = ctypes.CDLL(str(path))
    library.nvrtcGetErrorString.restype = ctypes.c_char_p
    return library


def _call(function: str, *arguments: Any) -> int:
    """Call a function of NVRTC, and return its status. RuntimeError for an error that is not the
    user's."""
    status = _library()[function](*arguments)
    if status and status not in USERS_ERRORS:
        raise RuntimeError(f"{function}: {_library().nvrtcGetErrorString(status).decode()}")
    return status


def _data(what: str, program: ctypes.c_void_p) -> bytes:
    """Return the bytes of nvrtcGetWHAT."""
    size = ctypes.c_size_t()
    _call(f"nvrtcGet{what}Size", program, ctypes.byref(size))
    buffer = ctypes.create_string_buffer(size.value)
    _call(f"nvrtcGet{what}", program, buffer)
    return buffer.raw


def _version() -> tuple[int, int]:
    major, minor = ctypes.c_int(), ctypes.c_int()
    _call("nvrtcVersion", ctypes.byref(major), ctypes.byref(minor))
    return major.value, minor.value


# ---- compiled kernels ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Compiled:
    """Machine code for one architecture ("90a"), its kernels by name, the compiler's remarks, and
    what it is compiled from."""

    arch: str
    cubin: bytes
    log: str
    entries: dict[str, Entry]
    source: str = field(default="", compare=False)
    options: tuple[str, ...] = field(default=(), compare=False)

    def __getitem__(self, name: str) -> Entry:
        """Return the kernel of a name. KeyError lists the names."""
        if name not in self.entries:
            raise KeyError(
                f"no kernel {name!r}: there are {', '.join(self.entries)}; a template is compiled "
                f"when it is asked for: compile(source, entries=[{name!r}])"
            )
        return self.entries[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def declared(self, name: str, types: str) -> Entry:
        """Return a kernel with the types of a declaration, "const float*, int", for one that is
        `extern "C"`: the compiler reads them as if they stood at the end of the source. ValueError
        if a size or a type of the symbol differs."""
        entry = self[name]
        text = f"{self.source}\n__global__ void {DECLARED}({types}) {{}}"
        new = build(text, DECLARED, self.arch, self.options)[DECLARED].signature
        ours, theirs = entry.signature.parameters, new.parameters
        sizes = [[(p.offset, p.size) for p in parameters] for parameters in (ours, theirs)]
        differ = any(a.kind != "unknown" and a != b for a, b in zip(ours, theirs))
        if sizes[0] != sizes[1] or differ:
            raise ValueError(
                f"{name}: ({types}) is declared, but the source says {entry.signature}"
            )
        return replace(entry, signature=Signature(entry.signature.name, theirs))

    def __repr__(self) -> str:
        kernels = ", ".join(str(entry.signature) for entry in self.entries.values())
        return f"<compiled for sm_{self.arch}: {kernels}>"

    def pack(self) -> dict[str, Any]:
        """Return it for another process, without its source."""
        return asdict(self) | {"source": "", "options": ()}

    @staticmethod
    def unpack(facts: dict[str, Any]) -> Compiled:
        """Read what pack() returns, also after JSON."""
        entries = {name: _entry_from(entry) for name, entry in facts["entries"].items()}
        return Compiled(**{**facts, "entries": entries, "options": ()})


def _entry_from(facts: dict[str, Any]) -> Entry:
    signature = facts["signature"]
    parameters = tuple(Parameter(**parameter) for parameter in signature["parameters"])
    sizes = {name: facts[name] and tuple(facts[name]) for name in ("block", "cluster")}
    return Entry(**{**facts, **sizes, "signature": Signature(signature["name"], parameters)})


# ---- compiling -----------------------------------------------------------------------------------


def build(
    source: str, entries: str | Sequence[str] = (), arch: str = "90a", options: Sequence[str] = ()
) -> Compiled:
    """Compile CUDA C++ for an architecture.

    source: the text; it may include the toolkit's headers. entries: names of kernels as C++ spells
    them, `scale<__nv_bfloat16>` makes the template so; none: every kernel that is no template.
    options: more for NVRTC, such as "-DTILE=64", "-I/my/headers", "--maxrregcount=64". The same
    source, entries and arch are compiled once a process, but not with options, nor with headers of
    one's own (#include "mine.h"), which may have changed.
    CompileError has the log, with the lines of `source`; RuntimeError: there is no NVRTC.
    """
    if isinstance(options, str):
        raise TypeError(f"options: must be a list of texts; write [{options!r}]")
    limits.of_arch(arch)  # ValueError
    names = (entries,) if isinstance(entries, str) else tuple(entries)
    make = _build.__wrapped__ if options or reads_files(source) else _build
    return make(source, names, arch, tuple(options))


def reads_files(source: str) -> bool:
    """True if other files than the toolkit's headers may be read."""
    return bool(READING_LINE.search(source))


@functools.lru_cache(maxsize=256)
def _build(source: str, names: tuple[str, ...], arch: str, options: tuple[str, ...]) -> Compiled:
    code, ptx, log, symbols = _compile(source, names, arch, options)
    found = _kernels(ptx, log, arch)
    if not names:
        known = Counter(entry.name for entry in found.values())
        for symbol, entry in found.items():  # those of one name by their whole signature
            symbols[entry.name if known[entry.name] == 1 else str(demangle(symbol))] = symbol
        if not symbols:
            raise CompileError(
                f"{SOURCE} has no kernel: it needs a __global__ function, and a template is "
                'compiled when it is asked for: entries=["scale<float>"]',
                log,
            )
    made = {}
    for name, symbol in symbols.items():
        if symbol not in found:
            raise CompileError(
                f"entries: {name!r} is no kernel: there is no __global__ function {symbol}"
            )
        made[name] = replace(found[symbol], name=name)
    log = PTXAS_INFO.sub("", log).strip()
    return Compiled(arch, code, log, made, source, options)


def _compile(
    source: str, names: tuple[str, ...], arch: str, options: tuple[str, ...], whole: bool = False
) -> tuple[bytes, str, str, dict[str, str]]:
    """Return (cubin, PTX, log, the symbol of each name). whole: also of a source without headers,
    which takes a fifth less time without textures and the device's runtime, where it needs none.
    """
    flags = [f"--gpu-architecture=sm_{arch}", "-lineinfo", "--ptxas-options=-v"]
    flags += [f"-I{folder}" for folder in find_toolkit().include]
    flags += [] if any("-std" in option for option in options) else ["-std=c++17"]
    # Since 12.9 NVRTC caches its results on the disk, and opens the driver for that.
    flags += ["--no-cache"] if _version() >= (12, 9) else []
    whole = whole or "#include" in source
    flags += [*options] if whole else [*options, "--minimal"]
    program = ctypes.c_void_p()
    text, name = source.encode(), SOURCE.encode()
    _call("nvrtcCreateProgram", ctypes.byref(program), text, name, 0, None, None)
    try:
        for entry in names:
            _call("nvrtcAddNameExpression", program, entry.encode())
        given = (ctypes.c_char_p * len(flags))(*(flag.encode() for flag in flags))
        failed = _call("nvrtcCompileProgram", program, len(flags), given)
        if failed and not whole:
            return _compile(source, names, arch, options, whole=True)
        log = _data("ProgramLog", program).rstrip(b"\0\n").decode(errors="replace")
        if failed:
            raise CompileError(f"{SOURCE} does not compile (sm_{arch}):", log)
        symbols = {}
        for entry in names:
            symbol = ctypes.c_char_p()
            _call("nvrtcGetLoweredName", program, entry.encode(), ctypes.byref(symbol))
            symbols[entry] = symbol.value.decode()
        ptx = _data("PTX", program).decode(errors="replace")
        return _data("CUBIN", program), ptx, log, symbols
    finally:
        _call("nvrtcDestroyProgram", ctypes.byref(program))


# ---- resources of a kernel -----------------------------------------------------------------------

PTXAS_INFO = re.compile(r"^ptxas (info |        \.).*\n?", re.MULTILINE)
# A kernel in PTX: name, parameters, and directives such as `.maxntid 256, 1, 1`.
PTX_ENTRY = re.compile(r"\.entry\s+([\w$]+)\s*\(([^)]*)\)([^{]*)\{")
PTX_PARAMETER = re.compile(r"\.param\s+(?:\.align (\d+)\s+)?\.[a-z](\d+)[^,\[]*(?:\[(\d+)\])?")


def _kernels(ptx: str, log: str, arch: str) -> dict[str, Entry]:
    """Return all kernels by their symbols, each with the name of its function."""
    reports = dict(re.findall(r"Compiling entry function '(\S+)'((?:.|\n(?!.*Compiling))*)", log))
    found = {}
    for symbol, parameters, directives in PTX_ENTRY.findall(ptx):

        def reported(what: str, report: str = reports.get(symbol, "")) -> int:
            match = re.search(rf"(\d+) {what}|{what} (\d+)", report)
            return int(match[1] or match[2]) if match else 0

        def sizes(name: str, directives: str = directives) -> tuple[int, int, int] | None:
            match = re.search(rf"\.{name}\s+([\d, ]+)", directives)
            return limits.triple(name, [int(n) for n in match[1].split(",")]) if match else None

        signature = Signature.of_symbol(symbol, _layout(parameters))
        found[symbol] = Entry(
            name=signature.name,
            symbol=symbol,
            arch=arch,
            signature=signature,
            registers=reported("registers"),
            shared_bytes=reported("bytes smem"),
            local_bytes=max(reported("bytes stack frame"), reported("bytes cumulative stack size")),
            max_threads=math.prod(sizes("maxntid") or [limits.BLOCK_THREADS]),
            block=sizes("reqntid"),
            cluster=sizes("reqnctapercluster"),
        )
    return found


def _layout(parameters: str) -> Layout:
    """Return (offset, size) of each parameter of a kernel in PTX: a number `.param .u64 name`, or
    bytes `.param .align 8 .b8 name[24]`."""
    layout, end = [], 0
    for alignment, bits, count in PTX_PARAMETER.findall(parameters):
        size = int(bits) // 8 * int(count or 1)
        align = int(alignment or int(bits) // 8)
        layout.append((-(-end // align) * align, size))
        end = sum(layout[-1])
    return layout
