"""needle/kernels/signature.py and csrc/python/parameters.c: types read from symbols, and arguments
checked and packed, on the CPU. Needs no GPU and no compiler."""

import ctypes
import gc
import struct
import sys

import numpy as np
import pytest
from harness import naming

import needle as ndl
from needle import _C
from needle.kernels.signature import Signature, demangle, read_type, short_name
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


def test_a_symbol_has_the_types_of_its_parameters():
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
    plain = Signature.of_symbol("scale", layout[:3])
    assert str(plain) == "scale(8 bytes, 8 bytes, 4 bytes)"


def test_types_that_are_not_read_are_checked_by_size():
    """Kernel and module stay usable."""
    members = "int P::*, int (P::*)(float), int P::**"
    for symbol, sizes, kinds, shown in (
        ("_Z2k1PfPA4_Ki", (8, 8), "array array", "k1(float*, int const*)"),
        ("_Z2k3RfRK1PRA4_f", (8, 8, 8), "? ? ?", "k3(float&, P const&, float (&) [4])"),
        ("_Z2k5M1PiMS_FifEPS0_", (8, 16, 8), "? ? array", f"k5({members})"),
        ("_Z2k6PFviEPS0_", (8, 8), "? ?", "k6(void (*)(int), void (**)(int))"),
        ("_Z2k4ePe", (8, 8), "? ?", "k4(long double, long double*)"),
        ("_Z1fN12_GLOBAL__N_11QEPS0_", (12, 8), "bytes array", "f(Q, Q*)"),
        # C's names that look like C++'s, and what no type could tell: sizes alone.
        ("_Z3bar", (8,), "?", "_Z3bar(8 bytes)"),
        ("_Z1fv", (8,), "?", "f(8 bytes)"),
        ("_Z1fi", (8,), "?", "f(int)"),
    ):
        with naming(symbol):
            layout = [(sum(sizes[:i]), size) for i, size in enumerate(sizes)]
            signature = Signature.of_symbol(symbol, layout)
            found = " ".join(p.kind for p in signature.parameters)
            assert (found, str(signature)) == (kinds.replace("?", "unknown"), shown)
            assert [(p.offset, p.size) for p in signature.parameters] == layout
            assert _C.Parameters("f", signature.plan)


UNKNOWN = (
    "float&", "float (&) [4]", "long double*", "float _Complex", "float* P::*", "void (*)(int)",
    "decltype(nullptr)", "unsigned __int128", "run()::{lambda(int)#1}", "int", "",
)  # fmt: skip


def test_short_names():
    for symbol, name in (
        ("_ZN5inner4fillEPii", "inner::fill"),
        ("_ZN12_GLOBAL__N_16hiddenEPi", "hidden"),
        ("_Z1fILi3E1SIfiEEvT0_", "f<3, S<float, int> >"),
        ("_Z1fPFivE", "f"),
        ("plain", "plain"),
    ):
        with naming(symbol):
            assert short_name(symbol) == name


def test_types_are_read():
    for text, size, *expected in (
        ("float const*", 8, "array", "float32", False, 4),
        ("float volatile*", 8, "array", "float32", True, 4),
        ("__half*", 8, "array", "float16", True, 2),
        ("unsigned int*", 8, "array", "int32", True, 4),
        ("float4 const*", 8, "array", "float32", False, 16),
        ("float3*", 8, "array", "float32", True, 4),
        ("ulonglong2*", 8, "array", "int64", True, 16),
        ("__half2*", 8, "array", "float16", True, 4),
        ("double*", 8, "array", "uint8", True, 8),
        ("Mine*", 8, "array", "uint8", True, 1),
        ("Pair<float const*, int>*", 8, "array", "uint8", True, 1),
        ("void const*", 8, "array", None, False, 1),
        ("float* const*", 8, "array", "uint8", False, 1),
        ("float const**", 8, "array", "uint8", True, 1),
        ("int const (*) [4]", 8, "array", "int32", False, 4),
        ("__half (*) [4][8]", 8, "array", "float16", True, 2),
        ("float* const (*) [4]", 8, "array", "uint8", False, 1),
        ("unsigned int", 4, "uint", None, False, 1),
        ("ns::Mine<float, 4>", 24, "bytes", None, False, 1),
        ("Pair<float const*, int>", 16, "bytes", None, False, 1),
        *((text, 8, "unknown", None, False, 1) for text in UNKNOWN),
    ):
        with naming(text):
            p = read_type(text, 0, size)
            assert [p.kind, p.dtype, p.written, p.alignment] == expected


# ---- numbers -------------------------------------------------------------------------------------

CODES = {
    "char": "b", "signed char": "b", "unsigned char": "B", "short": "h", "unsigned short": "H",
    "int": "i", "unsigned int": "I", "long": "q", "unsigned long": "Q", "long long": "q",
    "unsigned long long": "Q",
}  # fmt: skip


def test_integers_out_of_bounds_are_refused():
    for name, code in CODES.items():
        with naming(name):
            size = struct.calcsize(code)
            least = -(1 << (8 * size - 1)) if code.islower() else 0
            most = least + (1 << 8 * size) - 1
            for value in (least, least + 1, 0, 1, most - 1, most, True, np.int8(5), np.uint64(7)):
                assert pack(name, [size], value) == struct.pack(f"<{code}", int(value)), value
            for value in (least - 1, most + 1, 10**30, -(10**30)):
                said = rf"f: parameter 0 \(.*\): {value} is out of bounds"
                with pytest.raises(OverflowError, match=said):
                    pack(name, [size], value)
            for value in (1.0, np.float32(1), "1", None, b"1" * size, _C.array([1.0])):
                with pytest.raises(TypeError, match=r"parameter 0 .*must be a whole number, not "):
                    pack(name, [size], value)


def test_floats():
    for value in (1.5, 3, True, np.float16(0.1), np.int64(-7), float("inf"), 1e300, -0.0):
        with np.errstate(over="ignore"):
            assert pack("float", [4], value) == np.float32(value).tobytes()
        assert pack("double", [8], value) == struct.pack("<d", value)
    assert np.isnan(np.frombuffer(pack("float", [4], float("nan")), np.float32))
    for value in ("1", None, 1j, _C.array([1.0]), ndl.Tensor([1.0]), np.ones(1)):
        with pytest.raises(TypeError, match=r"parameter 0 \(float\): must be a number, not "):
            pack("float", [4], value)
    with pytest.raises(OverflowError, match="too large for a float"):
        pack("double", [8], 10**400)


def values_of_16_bits() -> list[float]:
    """Return all halves and bfloat16s, values between two of each, and the edges."""
    halves = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(float)
    brains = (np.arange(0x7F80, dtype=np.uint32) << 16).view(np.float32).astype(float)
    some = [*halves[::7], *brains[::11], *halves[:40], *brains[:40], *halves[-4:], *brains[-4:]]
    some = np.array(some)
    near = [some * f for f in (1, 1 + 2**-11, 1 + 2**-9, 1 + 3 * 2**-11, 1 + 2**-8 + 2**-40)]
    edges = [65519.99, 65520.0, 65504.0, 2.0**-25, 2.0**-24, 2.0**-134, 1e-300, np.inf, 0.0]
    return [*np.concatenate(near), *edges]


def test_floats_of_16_bits_are_rounded_once():
    values = np.array(values_of_16_bits())
    values = np.concatenate([values, -values])
    with np.errstate(over="ignore"):
        halves = values.astype(np.float16)
    half, brain = (parameters(t, [2]) for t in ("__half", "__nv_bfloat16"))
    got = [half.pack(HOST, (value,)) for value in values]
    np.testing.assert_array_equal(np.frombuffer(b"".join(got), np.float16), halves)
    single = values[values == values.astype(np.float32)]  # the harness rounds those once
    brains = rounder("bfloat16")(single).astype(np.float32).view(np.uint32) >> 16
    got = [brain.pack(HOST, (value,)) for value in single]
    np.testing.assert_array_equal(np.frombuffer(b"".join(got), np.uint16), brains)
    # Just below the middle of 1 + 2^-7 and 1 + 2^-6, where float32 has the middle, which goes up.
    low = pack("__nv_bfloat16", [2], 1 + 2.0**-7 + 2.0**-8 - 2.0**-40)
    assert low == struct.pack("<H", 0x3F81)
    for kind in ("__half", "__nv_bfloat16"):
        bits = struct.unpack("<H", pack(kind, [2], float("nan")))[0]
        assert bits & 0x7C00 == 0x7C00 and bits & 0x3FF


def test_truth_and_structures():
    for value in (True, np.bool_(True), 1):
        assert pack("bool", [1], value) == b"\1"
    for value in (2, -1, 1.0, "x", None):
        with pytest.raises(TypeError, match="must be True or False, not"):
            pack("bool", [1], value)

    class Mine(ctypes.Structure):
        _fields_ = [("a", ctypes.c_int), ("b", ctypes.c_double)]

    want = struct.pack("<iid", 3, 0, 2.5)
    record = np.array([(3, 0, 2.5)], dtype="i4,i4,f8")[0]
    for value in (want, bytearray(want), memoryview(want), Mine(3, 2.5), record):
        assert pack("Mine", [16], value) == want
    with pytest.raises(ValueError, match=r"parameter 0 \(Mine\): has 16 bytes, and 12 were given"):
        pack("Mine", [16], want[:12])
    for value in (3, "x" * 16, None):
        with pytest.raises(TypeError, match=r"\(Mine\): must be its 16 bytes"):
            pack("Mine", [16], value)


# ---- arrays --------------------------------------------------------------------------------------

DTYPES = {
    "float32": "float", "bfloat16": "__nv_bfloat16", "float16": "__half", "int32": "int",
    "int64": "long", "uint8": "unsigned char", "bool": "bool", "uint16": "unsigned short",
}  # fmt: skip


def test_arrays_of_each_dtype():
    for dtype in DTYPES:
        with naming(dtype):
            array = _C.array(np.ones(8), dtype=dtype)
            for text in (f"{DTYPES[dtype]} const*", f"{DTYPES[dtype]}*", "void*"):
                assert pack(text, [8], array) == struct.pack("<Q", array._handle.ptr())
            other = next(name for name in DTYPES if name != dtype)
            said = rf"the array is {dtype}, and must be {other}; convert"
            with pytest.raises(TypeError, match=said):
                pack(f"{DTYPES[other]}*", [8], array)


def test_elements_without_a_dtype_are_passed_as_bytes():
    said = r"the array is float32, and must be the bytes of what is pointed to, as uint8"
    with pytest.raises(TypeError, match=said):
        pack("double*", [8], _C.array(np.ones(8)))


def test_tensors_and_contiguous_views_are_arrays():
    tensor = ndl.Tensor([[1.0, 2.0], [3.0, 4.0]])
    assert pack("float*", [8], tensor) == struct.pack("<Q", tensor.cached_data._handle.ptr())
    base = _C.array(np.arange(16.0).reshape(4, 4))
    assert pack("float*", [8], base[2:]) == struct.pack("<Q", base._handle.ptr() + 32)
    for view in (base[:, 1:], base.permute((1, 0)), base[::-1], base[0:1].broadcast_to((4, 4))):
        with pytest.raises(ValueError, match=r"parameter 0 \(float\*\): the array is a view that"):
            pack("float*", [8], view)
    assert pack("float4 const*", [8], base[1:])
    with pytest.raises(ValueError, match=r"begins 4 bytes past a multiple of 16, and must lie on"):
        pack("float4 const*", [8], base.reshape((16,))[1:])
    for thing in (None, [1.0], np.ones(3, np.float32), 3, "x", ndl.TensorTuple, object()):
        with pytest.raises(TypeError, match="must be an NDArray or a Tensor, not "):
            pack("float*", [8], thing)


def test_an_array_must_be_on_the_kernels_device():
    with pytest.raises(RuntimeError, match="no such device"):
        parameters("float*").pack(ndl.cpu(1), (_C.array([1.0]),))
    assert parameters("float*").pack(None, (_C.array([1.0]),))


def test_the_number_of_arguments_is_checked():
    for given in ((), (1, 2)):
        said = f"f takes 1 arguments after grid and block, but {len(given)}"
        with pytest.raises(TypeError, match=said):
            pack("int", [4], *given)
    with pytest.raises(TypeError, match="must be tuple"):
        _C.Parameters("f", []).pack(HOST, [])


# ---- a symbol without types ----------------------------------------------------------------------


def test_a_symbol_without_types_checks_sizes():
    plan = Signature.of_symbol("plain", [(0, 8), (8, 4), (12, 4), (16, 2)]).plan
    plain = _C.Parameters("plain", plan)
    x = _C.array([1.0, 2.0], dtype="bfloat16")
    got = plain.pack(HOST, (x, np.float32(1.5), np.int32(-1), b"ab"))
    assert got == struct.pack("<Qfi2s", x._handle.ptr(), 1.5, -1, b"ab")
    assert plain.pack(HOST, (np.int64(-1), np.float32(1), np.int32(1), b"ab"))[:8] == b"\xff" * 8
    for value in (3, 1.5, True):
        said = r"plain: parameter 1 \(4 bytes\): .*numpy.float32\(2\)"
        with pytest.raises(TypeError, match=said):
            plain.pack(HOST, (x, value, np.int32(0), b"ab"))
    with pytest.raises(ValueError, match=r"parameter 1 \(4 bytes\): has 4 bytes, and 8 were given"):
        plain.pack(HOST, (x, np.float64(3), np.int32(0), b"ab"))
    assert pack("long double", [8], np.float64(3)) == struct.pack("<d", 3)
    assert pack("float&", [8], x) == struct.pack("<Q", x._handle.ptr())
    with pytest.raises(TypeError, match="lies in the host's memory"):
        plain.pack(HOST, (np.ones(1), np.float32(3), np.int32(0), b"ab"))
    with pytest.raises(TypeError, match=r"parameter 1 \(4 bytes\): must be its 4 bytes"):
        plain.pack(HOST, (x, x, np.int32(0), b"ab"))


# ---- packing -------------------------------------------------------------------------------------


def test_arguments_are_packed_like_a_c_struct():
    """Against the layout of a C structure, filled with a pattern in between: zeros."""
    text = "float const*, bool, short, double, char, Mine, __half"
    sizes = [8, 1, 2, 8, 1, 12, 2]
    x = _C.array([1.0])
    got = pack(text, sizes, x, True, -2, 1.5, 7, b"m" * 12, 1.0)
    want = struct.pack("<Q?xh4xdb3x12s", x._handle.ptr(), True, -2, 1.5, 7, b"m" * 12) + b"\0\x3c"
    assert got == want


def test_many_arguments_are_packed():
    count = 600
    text = ", ".join(["long"] * count + ["Big"])
    got = pack(text, [8] * count + [20000], *range(count), b"z" * 20000)
    assert got == struct.pack(f"<{count}q", *range(count)) + b"z" * 20000
    with pytest.raises(TypeError, match=f"parameter {count - 1} "):
        pack(text, [8] * count + [20000], *range(count - 1), None, b"z" * 20000)


def test_arguments_are_not_kept():
    taken = parameters("float*, float*, int", [8, 8, 4])
    x, t = _C.array([1.0]), ndl.Tensor([1.0])
    before = sys.getrefcount(x), sys.getrefcount(t.cached_data)
    for _ in range(10):
        taken.pack(HOST, (x, t, 3))
        with pytest.raises(TypeError):
            taken.pack(HOST, (x, t, "no"))
        with pytest.raises(OverflowError):
            taken.pack(HOST, (x, t, 2**40))
    gc.collect()
    assert (sys.getrefcount(x), sys.getrefcount(t.cached_data)) == before


def test_the_cpu_runs_no_kernels():
    assert not HOST.runs_kernels
    assert ndl.cuda().runs_kernels == ndl.cuda().enabled()
    with pytest.raises(ValueError, match="the CPU backend runs no kernels"):
        _C.Module(HOST, b"code")
    with pytest.raises(ValueError, match="the CPU backend runs no kernels"):
        HOST.limits()
    with pytest.raises(TypeError):
        _C.Kernel(None, "f", _C.Parameters("f", []))
