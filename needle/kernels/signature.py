"""The signature of a kernel: its parameters, read from its compiled symbol or from a text.

C++ writes the types of a function's parameters into its symbol, and the C++ runtime reads them back
(`__cxa_demangle`, Itanium C++ ABI, section 5.1): `_Z5scalePKfPfi` is
`scale(float const*, float*, int)`. A pointer to `const` is only read, any other is written. A
symbol that is not mangled (`extern "C"`) has no types: then only the sizes are known, unless a text
declares the types. Sizes and offsets come from the PTX. Other types (references, pointers to
functions and to members, `long double`) are unknown as well.

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
import functools
import re
from collections.abc import Callable, Sequence
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
# Other names for these in a declaration.
ALIASES = {
    "half": "__half",
    "nv_bfloat16": "__nv_bfloat16",
    "half2": "__half2",
    "nv_bfloat162": "__nv_bfloat162",
    "int8_t": "signed char",
    "uint8_t": "unsigned char",
    "int16_t": "short",
    "uint16_t": "unsigned short",
    "int32_t": "int",
    "uint32_t": "unsigned int",
    "int64_t": "long",
    "uint64_t": "unsigned long",
    "size_t": "unsigned long",
}
# CUDA's vector types: float4 lies on 16 bytes. In C++ `uchar` is `unsigned char`, and so on.
VECTOR = re.compile(r"(u?)(char|short|int|long|longlong)([1-4])|(float|double)([1-4])")
VECTORS_OF_TWO = {"__half2": "__half", "__nv_bfloat162": "__nv_bfloat16"}
INTEGER_WORDS = {"signed", "unsigned", "char", "short", "int", "long"}
QUALIFIERS = {"const", "volatile", "__restrict__", "__restrict", "restrict", "__grid_constant__"}
QUALIFIERS |= {"struct", "class", "union", "enum"}
TYPE = r"[\w:]+(?:<.*>[\w:]*)?"
# The name of a parameter in a declaration: no word that could belong to its type.
NAME = re.compile(r"(?!(?:__|_[A-Z])|(?:void|bool|float|double)$)[A-Za-z_]\w*")
# C++ takes `float x[4][8]` as `float (*x)[8]`; to the machine both are the address of a float.
ARRAY = re.compile(r"(.*?)(?:\(\s*\*[^()*&:]*\))?\s*(?:\[[^][]*\]\s*)+")
POINTER_BYTES = 8
ANY_BYTES = "uint8"  # the dtype of arrays of types that needle has no dtype for: structs, double


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
        parts = _function_parts(symbol)
        types = [] if parts is None else _split(parts[1])
        found = _parameters(types if len(types) == len(layout) else [""] * len(layout), layout)
        return Signature(short_name(symbol), found)

    @staticmethod
    def declared(name: str, text: str, layout: Layout) -> Signature:
        """Read a declaration such as "const float*, float* out, int n". ValueError where the count
        or a size is not that of the machine code."""
        types = _split(text)
        if len(types) != len(layout):
            raise ValueError(
                f"{name}: {len(types)} parameters are declared ({', '.join(types) or 'none'}), and "
                f"the machine code has {len(layout)}, of "
                f"{', '.join(str(s) for _, s in layout) or 'no'} bytes"
            )
        return Signature(name, _parameters(types, layout, declared_by=name))


@functools.cache
def _demangler() -> Callable[..., int | None]:
    for library in ("libstdc++.so.6", "libc++abi.so.1"):
        try:
            function = ctypes.CDLL(library)["__cxa_demangle"]
        except OSError:
            continue
        function.restype = ctypes.c_void_p
        function.argtypes = [ctypes.c_char_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]
        return function
    raise RuntimeError(
        "the C++ runtime (libstdc++.so.6) is not there, which reads the types of a kernel's "
        "parameters: apt install libstdc++6"
    )


def demangle(symbol: str) -> str | None:
    """The C++ spelling of a symbol; None for one that is not mangled.

    >>> from needle.kernels.signature import demangle
    >>> demangle("_Z5scalePKfPfi")
    'scale(float const*, float*, int)'
    """
    if not symbol.startswith("_Z"):
        return None
    status = ctypes.c_int()
    memory = _demangler()(symbol.encode(), None, None, ctypes.addressof(status))
    if not memory:
        return None
    try:
        return ctypes.string_at(memory).decode()
    finally:
        free = ctypes.CDLL(None).free
        free.argtypes = [ctypes.c_void_p]
        free(memory)


def short_name(symbol: str) -> str:
    """Return the name of a kernel in the source, `scale` or `ns::scale<float>`.

    >>> from needle.kernels.signature import short_name
    >>> short_name("_Z5scaleIfEvPKT_PS0_"), short_name("plain")
    ('scale<float>', 'plain')
    """
    parts = _function_parts(symbol)
    if parts is None:
        return symbol
    head, _ = parts
    spaces = _top_level(head, " ")
    return head[spaces[-1] + 1 :] if spaces else head  # a template's result stands before its name


# ---- reading types -------------------------------------------------------------------------------


def _function_parts(symbol: str) -> tuple[str, str] | None:
    """Return (the text before the parameters of a C++ function, the text in their parentheses).
    None for a symbol that is not mangled, also for a name of C that looks mangled."""
    plain = (demangle(symbol) or "").replace("(anonymous namespace)::", "")
    if not plain.endswith(")"):
        return None
    start, depth = len(plain), 0
    while start == len(plain) or depth:
        start -= 1
        depth += (plain[start] == ")") - (plain[start] == "(")
    return plain[:start], plain[start + 1 : -1]


def _top_level(text: str, sought: str) -> list[int]:
    """Return the places of a letter outside of all brackets."""
    found, depth = [], 0
    for i, letter in enumerate(text):
        depth += (letter in "<([{") - (letter in ">)]}")
        if letter == sought and depth == 0:
            found.append(i)
    return found


def split_commas(text: str) -> list[str]:
    """Split a text at the commas outside of all brackets."""
    ends = [*_top_level(text, ","), len(text)]
    starts = [0, *(end + 1 for end in ends[:-1])]
    return [text[start:end] for start, end in zip(starts, ends)]


def _split(text: str) -> list[str]:
    parts = [part.strip() for part in split_commas(text)]
    return [] if parts in ([""], ["void"]) else parts


def _parameters(types: list[str], layout: Layout, declared_by: str = "") -> tuple[Parameter, ...]:
    """Read the types. One that does not fit the layout is unknown, or a ValueError if a kernel of
    that name is declared so."""
    found = []
    for i, (text, (offset, size)) in enumerate(zip(types, layout)):
        parameter, own_size = _read(text, offset, size)
        if own_size not in (None, size):
            if declared_by:
                raise ValueError(
                    f"{declared_by}: parameter {i} is declared as {text} ({own_size} bytes), and "
                    f"the machine code has {size} bytes there"
                )
            parameter = Parameter(text, "unknown", size, offset)
        found.append(parameter)
    return tuple(found)


def _read(text: str, offset: int, size: int) -> tuple[Parameter, int | None]:
    """Return (the parameter, the bytes of its type if known)."""
    unknown = Parameter(text, "unknown", size, offset), None
    plain = ARRAY.sub(r"\1*", text) if ARRAY.fullmatch(text) else text
    stars = _top_level(plain, "*")
    if not stars:
        spelled, _ = _plain_type(plain)
        kind, own_size, _ = NUMBERS.get(spelled, ("bytes", None, None))
        return (Parameter(spelled, kind, size, offset), own_size) if spelled else unknown
    pointee, (name, _) = plain[: stars[-1]].strip(), _words(plain[stars[-1] + 1 :])
    deeper = _top_level(pointee, "*")
    if deeper:
        words, is_const = _words(pointee[deeper[-1] + 1 :])  # const there is the pointee's own
        spelled = "" if words else pointee.replace(" const", "").replace("const ", "")
    else:
        spelled, is_const = _plain_type(pointee)
    if not spelled or not _may_be_name(name):
        return unknown
    dtype, alignment = _element(spelled)
    shown = f"{spelled} const*" if is_const else f"{spelled}*"
    return Parameter(shown, "array", size, offset, dtype, not is_const, alignment), POINTER_BYTES


def _words(text: str) -> tuple[list[str], bool]:
    """Return (the words of a type without its qualifiers, whether it is const)."""
    words = re.findall(TYPE + r"|\S+", text)
    return [word for word in words if word not in QUALIFIERS], "const" in words


def _may_be_name(words: list[str]) -> bool:
    """True if the words after a type are the name of the parameter, or none."""
    return words == [] or (len(words) == 1 and NAME.fullmatch(words[0]) is not None)


def _plain_type(text: str) -> tuple[str, bool]:
    """Return (a type in C++'s demangled spelling, without qualifiers and without the name that a
    declaration may give, "" where it is none that is read here; is it const)."""
    words, is_const = _words(text)
    integer = [word for word in words if word in INTEGER_WORDS]
    if integer:
        more = [word for word in words if word not in INTEGER_WORDS]  # 128-bit ones, long double
        sign = "unsigned " * ("unsigned" in integer)
        length = "short" if "short" in integer else " ".join(["long"] * integer.count("long"))
        spelled = f"{sign}{length or 'int'}"
        if "char" in integer:
            spelled = "signed char" if "signed" in integer else f"{sign}char"
    else:
        first, more = "".join(words[:1]), words[1:]
        spelled = ALIASES.get(first, first) if re.fullmatch(TYPE, first) else ""
    return spelled if _may_be_name(more) else "", is_const


def _element(spelled: str) -> tuple[str | None, int]:
    """Return (the dtype of arrays for a pointer to this, their alignment in bytes)."""
    if spelled == "void":
        return None, 1
    if spelled in NUMBERS:
        _, size, dtype = NUMBERS[spelled]
        return dtype or ANY_BYTES, size
    scalar, lanes = VECTORS_OF_TWO.get(spelled), 2
    match = VECTOR.fullmatch(spelled)
    if match:
        unsigned, integer, count, floating, float_count = match.groups()
        scalar = floating or "unsigned " * bool(unsigned) + integer.replace("longlong", "long long")
        lanes = int(count or float_count)
    if scalar is None:
        return ANY_BYTES, 1
    _, size, dtype = NUMBERS[scalar]
    return dtype or ANY_BYTES, min(size * (lanes if lanes != 3 else 1), 16)
