"""The signature of a kernel: its parameters, read from its compiled symbol.

C++ writes the types of a function's parameters into its symbol, and the C++ runtime reads them back
(`__cxa_demangle`, Itanium C++ ABI, section 5.1): `_Z5scalePKfPfi` is
`scale(float const*, float*, int)`. A pointer to `const` is only read, any other is written. A
symbol that is not mangled (`extern "C"`) has no types: then only the sizes are known. Sizes and
offsets come from the PTX. Other types (references, pointers to functions and to members, `long
double`) are unknown as well.

Arguments by the kind of the parameter (csrc/python/parameters.c checks and packs):

    array    an NDArray or Tensor of `dtype` (None: of any), contiguous, aligned
    int uint a whole number that the type holds
    float    a number, rounded to the type
    bool     True or False
    bytes    `size` bytes: a struct by value
    unknown  `size` bytes: an array, a NumPy number, bytes
"""

from __future__ import annotations

import ctypes
import dataclasses
import re
from collections.abc import Sequence
from dataclasses import dataclass

Layout = Sequence[tuple[int, int]]  # (offset, size) of each parameter, in bytes

# How C++ spells the types of numbers once demangled: kind, bytes, and the dtype of arrays of it.
# Where needle has no dtype of that sign, the one of the same bits serves.
NUMBERS: dict[str, tuple[str, int, str | None]] = {
    "float": ("float", 4, "float32"),
    "double": ("float", 8, None),
    "__half": ("float", 2, "float16"),
    "__nv_bfloat16": ("float", 2, "bfloat16"),
    "bool": ("bool", 1, "bool"),
    "char": ("int", 1, "uint8"),
    "signed char": ("int", 1, "uint8"),
    "unsigned char": ("uint", 1, "uint8"),
    "short": ("int", 2, "uint16"),
    "unsigned short": ("uint", 2, "uint16"),
    "int": ("int", 4, "int32"),
    "unsigned int": ("uint", 4, "int32"),
    "long": ("int", 8, "int64"),
    "unsigned long": ("uint", 8, "int64"),
    "long long": ("int", 8, "int64"),
    "unsigned long long": ("uint", 8, "int64"),
}
POINTER_BYTES = 8
ANY_BYTES = "uint8"  # the dtype of arrays of types that needle has no dtype for: structs, double
# The dtype of arrays of each type, and their alignment. float4 lies on 16 bytes, float3 on 4.
ELEMENTS: dict[str, tuple[str | None, int]] = {
    name: (dtype or ANY_BYTES, size) for name, (_, size, dtype) in NUMBERS.items()
}
for vector in "char uchar short ushort int uint long ulong longlong ulonglong float double".split():
    dtype, size = ELEMENTS[vector.lstrip("u").replace("longlong", "long long")]  # of either sign
    ELEMENTS |= {f"{vector}{lanes}": (dtype, min(size * lanes, 16)) for lanes in (1, 2, 4)}
    ELEMENTS[f"{vector}3"] = dtype, size
ELEMENTS |= {"void": (None, 1), "__half2": ("float16", 4), "__nv_bfloat162": ("bfloat16", 4)}
TYPE = re.compile(r"[\w:]+(<.*>[\w:]*)?")  # of a struct
POINTER = re.compile(r"(.+?)((?: const| volatile)*)\*")
ARRAY = re.compile(r" \(\*\) (\[\d*\])+$")  # of `int x[4][8]`, which is the address of an int


@dataclass(frozen=True)
class Parameter:
    """One parameter: its type as C++ spells it ("" when unknown), its kind (see this module), its
    place in the packed arguments in bytes, and for an array its dtype, use and alignment."""

    type: str
    kind: str
    size: int
    offset: int
    dtype: str | None = None
    written: bool = False
    alignment: int = 1

    def __str__(self) -> str:
        return self.type or f"{self.size} bytes"


@dataclass(frozen=True)
class Signature:
    """`str()` gives `scale<float>(float const*, float*, int)`."""

    name: str
    parameters: tuple[Parameter, ...]

    def __str__(self) -> str:
        return f"{self.name}({', '.join(map(str, self.parameters))})"

    @property
    def plan(self) -> list[tuple]:
        """Return the argument of _C.Parameters."""
        return [(str(p), *dataclasses.astuple(p)[1:]) for p in self.parameters]

    @staticmethod
    def of_symbol(symbol: str, layout: Layout) -> Signature:
        """Read the compiled symbol. A type that does not fit the layout is unknown."""
        name, types = read_symbol(symbol)
        types = types if len(types) == len(layout) else [""] * len(layout)
        found = [read_type(text, offset, size) for text, (offset, size) in zip(types, layout)]
        return Signature(name, tuple(found))


# ---- reading symbols and types -------------------------------------------------------------------


def demangle(symbol: str) -> str | None:
    """The C++ spelling of a symbol; None for one that is not mangled.

    >>> from needle.kernels.signature import demangle
    >>> demangle("_Z5scalePKfPfi")
    'scale(float const*, float*, int)'
    """
    if not symbol.startswith("_Z"):
        return None
    function = ctypes.CDLL("libstdc++.so.6")["__cxa_demangle"]
    function.restype = ctypes.c_void_p
    memory = function(symbol.encode(), None, None, None)
    text = ctypes.string_at(memory).decode() if memory else None
    ctypes.CDLL(None).free(ctypes.c_void_p(memory))
    return text


def read_symbol(symbol: str) -> tuple[str, list[str]]:
    """Return the name of a kernel in the source and the types of its parameters; the symbol and
    none for one that is not mangled, also for a name of C that looks mangled.

    >>> from needle.kernels.signature import read_symbol
    >>> read_symbol("_Z5scaleIfEvPKT_PS0_"), read_symbol("plain")
    (('scale<float>', ['float const*', 'float*']), ('plain', []))
    """
    plain = (demangle(symbol) or "").replace("(anonymous namespace)::", "")
    types, depth, angles, end = [], 0, 0, len(plain) - 1
    for at in reversed(range(len(plain) if plain.endswith(")") else 0)):
        depth += (plain[at] == ")") - (plain[at] == "(")
        if depth == 1:  # else > may be an operator
            angles += (plain[at] == ">") - (plain[at] == "<")
        if depth == 0 or (plain[at] == "," and depth == 1 and angles == 0):
            types.insert(0, plain[at + 1 : end].strip())
            end = at
        if depth == 0:  # a template has the type that it returns
            return plain[:at].removeprefix("void "), [] if types in ([""], ["void"]) else types
    return symbol, []


def read_type(text: str, offset: int, size: int) -> Parameter:
    """Return the parameter of a type in C++'s demangled spelling."""
    plain = ARRAY.sub("*", text)
    pointer = POINTER.fullmatch(plain)
    if pointer and size == POINTER_BYTES:
        pointee, qualifiers = pointer.groups()
        if pointee in NUMBERS or pointee.endswith("*") or TYPE.fullmatch(pointee):
            dtype, alignment = ELEMENTS.get(pointee, (ANY_BYTES, 1))
            written = "const" not in qualifiers
            return Parameter(plain, "array", size, offset, dtype, written, alignment)
    kind, own_size, _ = NUMBERS.get(text, ("bytes", size, None))
    known = own_size == size and (text in NUMBERS or TYPE.fullmatch(text))
    return Parameter(text, kind if known else "unknown", size, offset)
