"""needle/kernels/checked.py: kernels compiled with debug=True. The changed source runs on the CPU
by a C++ compiler; NVRTC compiles it for a GPU; the tests at the end run it there."""

import dataclasses
import os
import re
import shutil
import struct
import subprocess
import sys

import numpy as np
import pytest
from harness import ROOT, naming, run
from kernel_sources import SCALES, SOURCE, needs_nvrtc

from needle import _C
from needle.kernels import CompileError, build
from needle.kernels.checked import with_checks
from needle.kernels.signature import CHECKED_BYTES, Signature

# ---- on the CPU ----------------------------------------------------------------------------------

HOST = r"""
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#define __device__
#define __noinline__
#define __global__
#define __launch_bounds__(...)
static struct { unsigned x, y, z; } blockIdx, threadIdx, blockDim = {4, 1, 1};
static unsigned atomicInc(unsigned *at, unsigned) { return (*at)++; }
static void __nanosleep(unsigned) {}
static void __threadfence_system() {}
static void __trap();
struct float4 { float x, y, z, w; };
static void atomicAdd(float *at, float more) { *at += more; }
"""
MAIN = r"""
static needle_fault fault;
static void __trap() {
    printf("%d %lld %lld %u %u\n", fault.parameter, fault.element, fault.bound, fault.block[0],
           fault.thread[0]);
    exit(fault.found - 1);
}
template <class T> static needle::checked<T> given(T *data, int n, int parameter) {
    needle::checked<T> made(data);
    made.low = data, made.high = data + n, made.parameter = parameter;
    return made;
}
int main(int, char **argv) {
    needle_fault_record = &fault;
    static float x[64], y[64];
    for (int i = 0; i < 64; i++) x[i] = (float)i;
    for (blockIdx.x = 0; blockIdx.x < 2; blockIdx.x++)
        for (threadIdx.x = 0; threadIdx.x < 4; threadIdx.x++)
            kernel(given((const float *)x, 8, 0), given(y, 8, 1), atoi(argv[1]));
    for (int i = 0; i < 8; i++) printf("%g ", y[i]);
}
"""
# Each body sees x, y (8 elements each), n and i, which goes from 0 to 7; n is the one from outside.
BODIES = {
    "y[i] = x[i] + n;": {"0": [0, 1, 2, 3, 4, 5, 6, 7]},
    "y[i + n] = x[i];": {"1": (1, 8, 7), "-1": (1, -1, 0)},
    "y[i] = *(x + i - n);": {"0": [0, 1, 2, 3, 4, 5, 6, 7], "1": (0, -1, 0), "-2": (0, 8, 6)},
    "const float *row = x + 4 * n; y[i] = row[i % 4];": {
        "1": [4, 5, 6, 7, 4, 5, 6, 7],
        "2": (0, 8, 0),
    },
    "auto *here = y + i + n; float *a = y, *b = a + 7; *here = b - a;": {
        "0": [7] * 8,
        "1": (1, 8, 7),
    },
    "float4 *wide = (float4 *)y; wide[i / 4 + n].x = 1;": {
        "0": [1, 0, 0, 0, 1, 0, 0, 0],
        "1": (1, 2, 4),
    },
    "y[i] = reinterpret_cast<const float4 *>(x)[n].w;": {"1": [7] * 8, "2": (0, 2, 0)},
    "atomicAdd(&y[n], 1.0f);": {"7": [0] * 7 + [8], "8": (1, 8, 0)},
    "for (float *p = y; p < y + n; p++) *p = (float)(p - y);": {
        "8": [0, 1, 2, 3, 4, 5, 6, 7],
        "9": (1, 8, 0),
    },
    "float a[8]; float *p = a; p[i] = x[i]; y[i] = p[i]; p = nullptr; if (!p) p = y; p[n] = 9;": {
        "7": [0, 1, 2, 3, 4, 5, 6, 9],
        "8": (1, 8, 0),
    },
    "y += n; y[i] = 1; if (y == nullptr) return;": {"0": [1] * 8, "1": (1, 8, 7)},
    "const float *one = n < 8 ? x + n : nullptr; if (one) y[i] = *one; else y[n] = 1;": {
        "7": [7] * 8,
        "8": (1, 8, 0),
    },
}


def test_checked_pointer_computes_the_same_and_finds_accesses_outside(tmp_path):
    compiler = shutil.which("c++") or pytest.skip("no C++ compiler")
    command = [compiler, "-std=c++17", "-w", "-O1", "-o", tmp_path / "run", "-x", "c++", "-"]
    for body, found in BODIES.items():
        source = (
            "__global__ void __launch_bounds__(4) kernel(\n"
            "    const float *__restrict__ x, // in, (8)\n"
            "    float* y /* out */, int n) {\n"
            f"    int i = blockIdx.x * blockDim.x + threadIdx.x; {body}\n}}\n"
        )
        text = HOST + with_checks(source, "kernel.cu") + MAIN
        subprocess.run(command, input=text, text=True, check=True)
        for n, want in found.items():
            with naming(body, n):
                done = subprocess.run([tmp_path / "run", n], capture_output=True, text=True)
                assert done.returncode == 0
                if isinstance(want, tuple):
                    parameter, element, thread = want
                    bound = 2 if "float4" in body else 8
                    want = [parameter, element, bound, thread // 4, thread % 4]
                assert [float(word) for word in done.stdout.split()] == want


def test_texts_of_a_kernel_stay_as_they_are():
    """Parameters that follow them are still changed."""
    for text in (
        '"(float *)x {float *p = %d\\n"',
        '"a \\"(float *)x; float *q = \\\\"',
        '"/* (float *)x"',
        '"reinterpret_cast<float *>(x) __global__ void k(float *x) {"',
        'R"(extern "C" "(float *)x {float *p = \n// no comment)"',
        'LR"--((float *)x )" "(float *)y)--"',
        "(int)'\"', (float)'\\'', \"(float *)x\", u8'\"'",
        "0);\n#error \"12'x'\nsay(0",  # a quote that ends nowhere
        """1'000'000, "(float *)x", 0xA'B, '(' """,
    ):
        with naming(text):
            head = 'extern "C" __global__ void k({}, const char *s = ",") {{\n'
            source = head.format("float *x") + f"say({text}); float *p = (float *)x; }}"
            head = head.replace('"C"', '"C++"').format("needle::checked<float> x")
            head = head.replace("const char *s", "needle::checked<const char> s")
            changed = with_checks(source, "k.cu").partition('#line 1 "k.cu"\n')[2]
            assert changed == head + (
                f"say({text}); needle::checked<float> p = (needle::checked<float>)x; }}"
            )


# ---- compiled ------------------------------------------------------------------------------------


@needs_nvrtc
def test_debug_compile_keeps_names_and_types():
    for entries in ([], SCALES):
        with naming(entries):
            plain, checked = build(SOURCE, entries), build(SOURCE, entries, debug=True)
            assert set(plain.entries) == set(checked.entries)
            for name, entry in checked.entries.items():
                own = plain[name].signature.parameters
                for ours, theirs in zip(own, entry.signature.parameters):
                    # extern "C" is unknown without checks, and C++ with them.
                    same = dataclasses.replace(theirs, size=ours.size, offset=ours.offset)
                    assert ours.kind == "unknown" or ours == same
    checked = build(SOURCE, debug=True)
    assert "kernel.cu: numbers: parameter 18 (void const*) is not checked" in checked.log
    assert "parameter 20" not in checked.log
    assert [p.size for p in checked["twice(int*)"].signature.parameters] == [CHECKED_BYTES]
    declared = checked["plain"].declared("const float*, float* y, float, int")
    assert declared.signature.plan == checked["plain"].signature.plan
    with pytest.raises(ValueError, match="the source says"):
        checked["plain"].declared("float*, float* y, float, int")


@needs_nvrtc
def test_source_that_needs_plain_pointers_says_so():
    source = "template <class T> __device__ T one(const T *p) { return *p; }\n"
    source += "__global__ void f(float *x) { x[0] = one(%s); }"
    with pytest.raises(CompileError, match=r"(?s)debug=True.*write &x\[0\].*kernel\.cu\(2\)"):
        build(source % "x", debug=True)
    assert build(source % "x")["f"].signature.parameters[0].size == 8
    assert build(source % "&x[0]", debug=True).log == ""


@needs_nvrtc
def test_error_of_the_source_itself_is_the_one_reported():
    with pytest.raises(CompileError) as raised:
        build("// a comment\n__global__ void f(float *x) {\n    y = 3;\n}", debug=True)
    assert "debug=True" not in str(raised.value)
    assert re.search(r'kernel\.cu\(3\): error: identifier "y" is undefined', raised.value.log)


# ---- arguments -----------------------------------------------------------------------------------


def test_argument_of_a_checked_pointer_has_its_bounds_and_number():
    layout = [(0, 4), (8, CHECKED_BYTES), (40, CHECKED_BYTES)]
    symbol = "_Z1fiN6needle7checkedIKfEENS0_I13__nv_bfloat16EE"
    signature = Signature.of_symbol(symbol, layout)
    assert str(signature) == "f(int, float const*, __nv_bfloat16*)"
    assert [p.written for p in signature.parameters] == [False, False, True]
    host = _C.cpu()
    x = _C.array(np.arange(12, dtype=np.float32), device=host)
    y = _C.empty((3,), "bfloat16", host)
    part = _C.empty((0,), "bfloat16", host)
    for out, size in ((y, 6), (part, 0)):
        packed = _C.Parameters("f", signature.plan).pack(host, (7, x, out))
        at, to = x._handle.ptr(), out._handle.ptr()
        assert packed == struct.pack("<i4x3Qq3Qq", 7, at, at, at + 48, 1, to, to, to + size, 2)


# ---- on a GPU, each in a process of its own, which a trap ends -----------------------------------

SCALE = """
template <class T> __global__ void scale(const T *x, T *y, float a, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = (T)((float)x[i] * a);
}
"""
PRELUDE = f"""
import numpy as np
import needle as ndl
from needle import _C, kernels
device = ndl.cuda()
x = _C.array(np.arange(1000, dtype=np.float32), device=device)
y = _C.array(np.full(1000, 7, np.float32), device=device)
kernel = kernels.compile({SCALE!r}, "scale<float>", debug=True)["scale<float>"]
"""


def on_gpu(code: str) -> subprocess.CompletedProcess:
    folder = os.environ.get("NEEDLE_TEST_BUILD", str(ROOT))
    return run(sys.executable, "-c", PRELUDE + code, cwd=folder, PYTHONPATH=folder)


@pytest.mark.cuda
@needs_nvrtc
def test_checked_kernel_within_bounds_gives_the_same_values():
    done = on_gpu(f"""
z = _C.array(np.zeros(1000, np.float32), device=device)
kernel(8, 128, x, y, 3.0, 1000)
kernels.compile({SCALE!r}, "scale<float>")["scale<float>"](8, 128, x, z, 3.0, 1000)
assert (y.numpy() == z.numpy()).all() and (y.numpy() == 3 * x.numpy()).all()
""")
    assert done.returncode == 0, done.stderr


@pytest.mark.cuda
@needs_nvrtc
def test_checked_kernel_outside_names_kernel_parameter_element_and_thread():
    where = r"element 99[5-9] is outside of 995 \(block 7,0,0, thread \d+,0,0\)"
    for short, parameter in (("x", 0), ("y", 1)):
        done = on_gpu(f"{short} = {short}[:1000 - 5]\nkernel(8, 128, x, y, 3.0, 1000)\n")
        assert done.returncode == 75, done.stderr
        said = f"CudaFatalError: scale<float>: .*: parameter {parameter}: {where}"
        assert re.search(said, done.stderr), done.stderr


@pytest.mark.cuda
@needs_nvrtc
def test_pool_names_the_element_and_goes_on():
    from needle.kernels import Out, Pool

    x = np.arange(1000, dtype=np.float32)
    with Pool(timeout=60.0) as pool:
        for n, status in ((1000, "ok"), (1001, "assertion"), (1000, "ok")):
            result = pool.run(SCALE, "scale<float>", 8, 128, [x, Out(1000), 2.0, n], debug=True)
            assert result.status == status, result.message
            if status == "ok":
                np.testing.assert_array_equal(result.outputs[0], 2 * x)
            else:
                assert "parameter 0: element 1000 is outside of 1000" in result.message


DEBUG_CALL = """
if not _C.build_info()["debug"]:
    raise SystemExit("no debug build")
ids = _C.array(np.array([1, -0, 60], np.int32), dtype="int32", device=device)
good = _C.array(np.array([1, 0, 49], np.int32), dtype="int32", device=device)
w = _C.array(np.arange(150, dtype=np.float32).reshape(50, 3), device=device)
assert (_C.embedding_fwd(good, w).numpy() == w.numpy()[[1, 0, 49]]).all()
"""


@pytest.mark.cuda
def test_debug_build_names_op_operand_and_element():
    """Run with NEEDLE_TEST_BUILD: the folder of a build made with NEEDLE_DEBUG=1."""
    for call, said in (
        ("_C.embedding_fwd(ids, w)", "embedding_fwd: .*: ids"),
        ("_C.embedding_bwd(ids, y[:9].reshape((3, 3)), w)", "embedding_bwd: .*: ids"),
        ("_C.cross_entropy_fwd(y[:150].reshape((3, 50)), ids)", "cross_entropy_fwd: .*: targets"),
    ):
        with naming(call):
            done = on_gpu(DEBUG_CALL + call)
            if "no debug build" in done.stderr:
                pytest.skip("not a debug build")
            assert done.returncode == 75, done.stderr
            said += r": element 2: index 60 is outside of 50 \(block .*cuda/\w+\.cu:\d+\)"
            assert re.search(f"CudaFatalError: {said}", done.stderr), done.stderr
