"""needle/kernels/signature.py and csrc/python/parameters.c: types read from symbols, and arguments
checked and packed, on the CPU. Needs no GPU and no compiler."""

import ctypes
import gc
import re
import struct
import sys

import numpy as np
import pytest
from harness import naming

import needle as ndl
from needle import _C
from needle.kernels.signature import Signature, demangle, read_type
from needle.testing import rounder

HOST = ndl.cpu()


def parameters(text: str, sizes: list[int] | None = None) -> _C.Parameters:
    """Those of a kernel `f`, each laid out at the next offset that is a multiple of its size."""
    types = text.split(", ") if text else []
    found, end = [], 0
    for one, size in zip(types, [8] * len(types) if sizes is None else sizes):
        unit = min(size & -size, 16)
        found.append(read_type(one, -(-end // unit) * unit, size))
        end = found[-1].offset + size
    return _C.Parameters("f", Signature("f", tuple(found)).plan)


def pack(text: str, sizes: list[int], *arguments) -> bytes:
    return parameters(text, sizes).pack(HOST, arguments)


# ---- types ---------------------------------------------------------------------------------------


def test_symbol_has_the_types_of_its_parameters():
    """Symbols are mangled as by g++ (Itanium C++ ABI)."""
    symbol = "_Z5scaleI13__nv_bfloat16EvPKT_PS1_fx1P"
    assert demangle(symbol) == (
        "void scale<__nv_bfloat16>(__nv_bfloat16 const*, __nv_bfloat16*, float, long long, P)"
    )
    assert demangle("scale") is None and demangle("_Zno") is None
    layout = [(0, 8), (8, 8), (16, 4), (24, 8), (32, 12)]
    signature = Signature.of_symbol(symbol, layout)
    x, y, s, n, p = signature.parameters
    assert (x.kind, x.dtype, x.written, x.alignment) == ("array", "bfloat16", False, 2)
    assert (y.kind, y.dtype, y.written) == ("array", "bfloat16", True)
    assert [s.kind, n.kind, p.kind] == ["float", "int", "bytes"] and p.size == 12
    assert [q.offset for q in signature.parameters] == [at for at, _ in layout]
    assert str(signature).startswith("scale<__nv_bfloat16>(__nv_bfloat16 const*")
    pairs = Signature.of_symbol("_Z1f4PairIPKfiEPS_IS1_iE", [(0, 16), (16, 8)])
    assert str(pairs) == "f(Pair<float const*, int>, Pair<float const*, int>*)"
    assert [q.kind for q in pairs.parameters] == ["bytes", "array"]
    plain = Signature.of_symbol("scale", layout[:3])
    assert str(plain) == "scale(8 bytes, 8 bytes, 4 bytes)"
    looks_mangled = Signature.of_symbol("_Z5scalePKfPfi", layout[:1])  # a name of C
    assert str(looks_mangled) == "scale(8 bytes)"


def test_type_is_unknown_where_it_does_not_fit_its_size_and_const_is_read_alone():
    for text, size, kind, written in (
        ("float*", 4, "unknown", False),
        ("int", 8, "unknown", False),
        ("ns::Pair<int>::Mine", 12, "bytes", False),
        ("float const volatile*", 8, "array", False),
        ("float volatile*", 8, "array", True),
        ("float const (*) [4][8]", 8, "array", False),
    ):
        with naming(text):
            found = read_type(text, 0, size)
            assert (found.kind, found.size, found.written) == (kind, size, written)
            assert found.dtype == ("float32" if kind == "array" else None)


# ---- arguments -----------------------------------------------------------------------------------

CODES = {
    "char": "b", "signed char": "b", "unsigned char": "B", "short": "h", "unsigned short": "H",
    "int": "i", "unsigned int": "I", "long": "q", "unsigned long": "Q", "long long": "q",
    "unsigned long long": "Q",
}  # fmt: skip
DTYPES = {
    "float32": "float", "bfloat16": "__nv_bfloat16", "float16": "__half", "int32": "int",
    "int64": "long", "uint8": "unsigned char", "bool": "bool", "uint16": "unsigned short",
}  # fmt: skip
BASE = _C.array(np.arange(16.0).reshape(4, 4))
TENSOR = ndl.Tensor([[1.0, 2.0], [3.0, 4.0]])
MINE = struct.pack("<iid", 3, 0, 2.5)


class Mine(ctypes.Structure):
    _fields_ = [("a", ctypes.c_int), ("b", ctypes.c_double)]


def address(array, offset: int = 0) -> bytes:
    return struct.pack("<Q", array._handle.ptr() + offset)


def integers():
    """Yield (type, code of struct, least, most)."""
    for name, code in CODES.items():
        bits = 8 * struct.calcsize(code)
        least = -(1 << (bits - 1)) if code.islower() else 0
        yield name, code, least, least + (1 << bits) - 1


def accepted():
    """Yield (type, value, the bytes that are right)."""
    for name, code, least, most in integers():
        for value in (least, least + 1, 0, 1, most - 1, most, True, np.int8(5), np.uint64(7)):
            yield name, value, struct.pack(f"<{code}", int(value))
    for value in (1.5, 3, True, np.float16(0.1), np.int64(-7), float("inf"), 1e300, -0.0):
        with np.errstate(over="ignore"):
            yield "float", value, np.float32(value).tobytes()
        yield "double", value, struct.pack("<d", value)
    yield from (("bool", value, b"\1") for value in (True, np.bool_(True), 1))
    record = np.array([(3, 0, 2.5)], dtype="i4,i4,f8")[0]
    for value in (MINE, bytearray(MINE), memoryview(MINE), Mine(3, 2.5), record):
        yield "Mine", value, MINE
    for dtype, name in DTYPES.items():
        array = _C.array(np.ones(8), dtype=dtype)
        yield from ((f"{to}*", array, address(array)) for to in (name, f"{name} const", "void"))
    yield "float*", TENSOR, address(TENSOR.cached_data)
    yield "float*", BASE[2:], address(BASE, 32)
    yield "float4 const*", BASE[1:], address(BASE, 16)
    raw = _C.array(np.zeros(64), "uint8")
    yield "double4*", raw[16:], address(raw, 16)
    for names, dtype in (
        ("float volatile*|float3*|float4 const*", "float32"),
        ("__half2*|__half (*) [4][8]", "float16"),
        ("unsigned int*|int const (*) [4]|int2*", "int32"),
        ("long long*|unsigned long const*|ulonglong2*", "int64"),
        ("short*|ushort4 const*", "uint16"),
        ("char*|signed char*|uchar2*", "uint8"),
        ("double*|Mine*|Pair<float const*, int>*|float* const*|float const**", "uint8"),
    ):
        array = _C.array(np.zeros(64), dtype)
        yield from ((name, array, address(array)) for name in names.split("|"))
    yield "ns::Mine<float, 4>", MINE, MINE
    yield "Pair<float const*, int>", MINE, MINE
    # Below the middle of 1 + 2^-7 and 1 + 2^-6, where float32 has the middle, which goes up.
    yield "__nv_bfloat16", 1 + 2.0**-7 + 2.0**-8 - 2.0**-40, struct.pack("<H", 0x3F81)
    # Types that are not read, by their sizes.
    yield "long double", np.float64(3), struct.pack("<d", 3)
    yield "float&", BASE, address(BASE)
    yield "float&", np.int64(-1), b"\xff" * 8


def refused():
    """Yield (type, value, error, a part of its message)."""
    for name, _, least, most in integers():
        for value in (least - 1, most + 1, 10**30, -(10**30)):
            yield name, value, OverflowError, f"{value} is out of bounds"
        for value in (1.0, np.float32(1), "1", None, b"1", _C.array([1.0])):
            yield name, value, TypeError, "must be a whole number, not "
    for value in ("1", None, 1j, _C.array([1.0]), ndl.Tensor([1.0]), np.ones(1)):
        yield "float", value, TypeError, r"\(float\): must be a number, not "
    yield "double", 10**400, OverflowError, "too large for a float"
    for value in (2, -1, 1.0, "x", None):
        yield "bool", value, TypeError, "must be True or False, not"
    yield "Mine", MINE[:12], ValueError, r"\(Mine\): has 16 bytes, and 12 were given"
    for value in (3, "x" * 16, None):
        yield "Mine", value, TypeError, r"\(Mine\): must be its 16 bytes"
    for dtype in DTYPES:
        other = next(name for name in DTYPES if name != dtype)
        said = f"the array is {dtype}, and must be {other}; convert"
        yield f"{DTYPES[other]}*", _C.array(np.ones(8), dtype=dtype), TypeError, said
    said = "the array is float32, and must be the bytes of what is pointed to, as uint8"
    yield "double*", BASE, TypeError, said
    for view in (BASE[:, 1:], BASE.permute((1, 0)), BASE[::-1], BASE[0:1].broadcast_to((4, 4))):
        yield "float*", view, ValueError, r"\(float\*\): the array is a view that"
    said = "begins 4 bytes past a multiple of 16, and must lie on"
    yield "float4 const*", BASE.reshape((16,))[1:], ValueError, said
    said = "begins 2 bytes past a multiple of 4"
    yield "__nv_bfloat162*", _C.array(np.ones(4), "bfloat16")[1:], ValueError, said
    for thing in (None, [1.0], np.ones(3, np.float32), 3, "x", ndl.TensorTuple, object()):
        yield "float*", thing, TypeError, "must be an NDArray or a Tensor, not "
    for unread in ("float&", "float _Complex", "void (*)(int)", "float* P::*", "unsigned __int128"):
        for value in (3, 1.5, True):
            yield unread, value, TypeError, "numpy.float32\\(2\\)"
    yield "float&", np.float32(3), ValueError, "has 8 bytes, and 4 were given"
    yield "float&", np.ones(1), TypeError, "lies in the host's memory"
    yield "int&", _C.array([1.0], "bfloat16"), TypeError, "must be its 4 bytes"


def size_of(text: str) -> int:
    sizes = {"float": 4, "double": 8, "bool": 1, "Mine": 16, "__nv_bfloat16": 2, "int&": 4}
    sizes |= {"ns::Mine<float, 4>": 16, "Pair<float const*, int>": 16}
    return struct.calcsize(CODES[text]) if text in CODES else sizes.get(text, 8)


def test_argument_has_the_bytes_of_its_type():
    for text, value, expected in accepted():
        with naming(text, repr(value)):
            assert pack(text, [size_of(text)], value) == expected
    assert np.isnan(np.frombuffer(pack("float", [4], float("nan")), np.float32))
    for kind in ("__half", "__nv_bfloat16"):
        bits = struct.unpack("<H", pack(kind, [2], float("nan")))[0]
        assert bits & 0x7C00 == 0x7C00 and bits & 0x3FF


def test_wrong_argument_is_refused_with_its_place_and_type():
    for text, value, error, said in refused():
        with naming(text, repr(value)), pytest.raises(error) as raised:
            pack(text, [size_of(text)], value)
        assert re.search(said, str(raised.value)), (text, raised.value)
        placed = str(raised.value).startswith("f: parameter 0 (")
        assert placed or "too large" in said, raised.value
    for given in ((), (1, 2)):
        said = f"f takes 1 arguments after grid and block, but {len(given)}"
        with pytest.raises(TypeError, match=said):
            pack("int", [4], *given)
    with pytest.raises(TypeError, match="must be tuple"):
        _C.Parameters("f", []).pack(HOST, [])
    with pytest.raises(RuntimeError, match="no such device"):
        parameters("float*").pack(ndl.cpu(1), (BASE,))
    assert parameters("float*").pack(None, (BASE,))


def test_floats_of_16_bits_are_rounded_once():
    """Halves and bfloat16s, values between two of each, and the edges."""
    halves = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(float)
    brains = (np.arange(0x7F80, dtype=np.uint32) << 16).view(np.float32).astype(float)
    some = [*halves[::7], *brains[::11], *halves[:40], *brains[:40], *halves[-4:], *brains[-4:]]
    some = np.array(some)
    near = [some * f for f in (1, 1 + 2**-11, 1 + 2**-9, 1 + 3 * 2**-11, 1 + 2**-8 + 2**-40)]
    edges = [65519.99, 65520.0, 65504.0, 2.0**-25, 2.0**-24, 2.0**-134, 1e-300, np.inf, 0.0]
    values = np.concatenate([*near, edges])
    values = np.concatenate([values, -values])
    single = values[values == values.astype(np.float32)]  # the harness rounds those once
    with np.errstate(over="ignore"):
        halves = values.astype(np.float16).view(np.uint16)
    brains = rounder("bfloat16")(single).astype(np.float32).view(np.uint32) >> 16
    for kind, given, expected in (("__half", values, halves), ("__nv_bfloat16", single, brains)):
        taken = parameters(kind, [2])
        got = b"".join(taken.pack(HOST, (value,)) for value in given)
        np.testing.assert_array_equal(np.frombuffer(got, np.uint16), expected)


def test_arguments_are_packed_like_a_c_struct():
    """Against the layout of a C structure, filled with a pattern in between: zeros."""
    text = "float const*, bool, short, double, char, Mine, __half"
    got = pack(text, [8, 1, 2, 8, 1, 12, 2], BASE, True, -2, 1.5, 7, b"m" * 12, 1.0)
    want = struct.pack("<Q?xh4xdb3x12s", BASE._handle.ptr(), True, -2, 1.5, 7, b"m" * 12)
    assert got == want + b"\0\x3c" and pack("", []) == b""
    text, sizes = ", ".join(["long"] * 600 + ["Big"]), [8] * 600 + [20000]
    got = pack(text, sizes, *range(600), b"z" * 20000)
    assert got == struct.pack("<600q", *range(600)) + b"z" * 20000


def test_arguments_are_not_kept():
    taken = parameters("float*, float*, int", [8, 8, 4])
    x, t = _C.array([1.0]), ndl.Tensor([1.0])
    before = sys.getrefcount(x), sys.getrefcount(t.cached_data)
    for _ in range(10):
        taken.pack(HOST, (x, t, 3))
        for wrong, error in (("no", TypeError), (2**40, OverflowError)):
            with pytest.raises(error):
                taken.pack(HOST, (x, t, wrong))
    gc.collect()
    assert (sys.getrefcount(x), sys.getrefcount(t.cached_data)) == before


def test_cpu_runs_no_kernels():
    for call in (lambda: _C.Module(HOST, b"code"), HOST.limits):
        with pytest.raises(ValueError, match="the CPU backend runs no kernels"):
            call()
