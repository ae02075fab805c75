"""needle/kernels/compile.py and toolkit.py: names, logs, caches, and the resources of kernels."""

import ctypes
import importlib
import re

import pytest
from harness import naming, python, shared_library
from kernel_sources import SCALES, SOURCE, needs_nvrtc

from needle.kernels import Compiled, CompileError, build, toolkit, worker

compile_module = importlib.import_module("needle.kernels.compile")
PLAIN = "__global__ void f(float *x) { x[0] = 1; }"

FULL = """__global__ void f(int *x) {
    __shared__ int a[1 << 20];
    a[threadIdx.x] = x[0];
    __syncthreads();
    x[1] = a[x[2]];
}"""


def error_of(*arguments, **keywords) -> CompileError:
    with pytest.raises(CompileError) as raised:
        build(*arguments, **keywords)
    return raised.value


DRIVER = """
#include <stdlib.h>
__attribute__((constructor)) static void opened(void) { _Exit(3); }
int cuInit(unsigned flags) { return 0 * (int)flags; }
"""


@needs_nvrtc
def test_compiling_opens_no_driver(tmp_path):
    """Not for NVRTC's cache on the disk either."""
    shared_library(DRIVER, tmp_path / "libcuda.so.1")
    for script, code in (
        (f"from needle.kernels import build; build({PLAIN!r})", 0),
        ("import ctypes; ctypes.CDLL('libcuda.so.1')", 3),
    ):
        done = python(script, LD_LIBRARY_PATH=str(tmp_path))
        assert done.returncode == code, done.stderr


# ---- names ---------------------------------------------------------------------------------------


@needs_nvrtc
def test_kernels_that_are_no_templates_are_found():
    compiled = build(SOURCE)
    named = {
        "plain", "inner::fill", "twice(float*)", "twice(int*)", "numbers", "tile", "bounded",
        "stack", "nothing", "barriers",
    }  # fmt: skip
    assert named <= set(compiled.entries) <= named | {"hidden"}
    assert compiled["plain"].symbol == "plain"
    assert compiled["inner::fill"].symbol == "_ZN5inner4fillEPii"
    assert compiled["twice( int * )"].symbol == "_Z5twicePi"
    assert "no template" not in compiled.log


@needs_nvrtc
def test_entries_are_made_and_found_by_the_name_asked_for():
    compiled = build(SOURCE, [*SCALES, "plain", "inner::fill", "scale< __half >"])
    assert list(compiled.entries) == [*SCALES, "plain", "inner::fill", "scale< __half >"]
    assert compiled["scale<__half>"].symbol == compiled["scale< __half >"].symbol
    assert str(compiled["scale<__nv_bfloat16>"].signature) == (
        "scale<__nv_bfloat16>(__nv_bfloat16 const*, __nv_bfloat16*, float, long long, Affine)"
    )
    assert build(SOURCE, "scale<float>").entries.keys() == {"scale<float>"}
    listed = build(SOURCE, ["scale<float>", "inner::fill"], "90a")
    assert repr(listed) == (
        "<compiled for sm_90a: scale<float>(float const*, float*, float, long long, Affine), "
        "inner::fill(int*, int)>"
    )
    with pytest.raises(KeyError, match=r"no kernel 'scale<double>': there are scale<float>, .*"
                       r"entries=\['scale<double>'\]"):  # fmt: skip
        compiled["scale<double>"]


@needs_nvrtc
def test_a_kernel_with_types_that_are_not_read_spoils_none():
    source = """
    struct P { int a; };
    __global__ void table(float *o, const int y[4][4], float (*z)[8]) {}
    __global__ void odd(float &r, int P::*m, void (*f)(int), long double d) {}
    """
    compiled = build(source + PLAIN)
    assert str(compiled["table"].signature) == "table(float*, int const*, float*)"
    assert {p.kind for p in compiled["odd"].signature.parameters} == {"unknown"}
    odd = compiled["odd"].declared("float*, long, long, double")
    assert [p.kind for p in odd.signature.parameters] == ["array", "int", "int", "float"]
    mixed = build("__global__ void f(int n, float &r) {}")["f"]
    assert [p.kind for p in mixed.declared("int, float*").signature.parameters] == ["int", "array"]
    with pytest.raises(ValueError, match=r"is declared, but the source says f\(int, float&\)"):
        mixed.declared("float, float*")


# ---- what goes wrong -----------------------------------------------------------------------------


@needs_nvrtc
def test_the_log_has_the_lines_of_the_source():
    error = error_of("__global__ void f(float *x) {\n\n    x[0] = missing;\n}\n")
    assert 'kernel.cu(3): error: identifier "missing" is undefined' in error.log
    assert error.log in str(error) and isinstance(error, ValueError)


@needs_nvrtc
def test_sources_that_do_not_compile_are_explained():
    for arguments, said in (
        ((PLAIN, "g<float>"), "g"),
        (("__device__ void g() {}\n" + PLAIN, "g"), "non-__global__.*g"),
        (("__constant__ int k;\n" + PLAIN, "&k"), "'&k' is no kernel"),
        (("template <class T> __global__ void f(T *x) {}",), r'entries=\["scale<float>"\]'),
        (("",), "has no kernel"),
        ((PLAIN + "\0",), "character of value 0"),
        ((PLAIN, (), "29"), r"does not know sm_29, only sm_"),
        ((PLAIN, (), "90a", ["--no-such-option"]), "no-such-option"),
        ((PLAIN, (), "90a", ["-DX", "-dlto"]), "no machine code with the options -DX -dlto: leave"),
        ((FULL,), "too much shared data"),
    ):
        with naming(said):
            assert re.search(said, str(error_of(*arguments)), re.DOTALL)


def test_wrong_arguments_are_named():
    for error, said, arguments, more in (
        (TypeError, "source: must be the text of a program, not bytes", [b""], {}),
        (TypeError, r"options: .* list of texts; write \['-DX'\]", [PLAIN], {"options": "-DX"}),
        (TypeError, "options: .* list of texts, and 1 in it", [PLAIN], {"options": ["-DX", 1]}),
        (TypeError, "options: must be a list of texts, not 1", [PLAIN], {"options": 1}),
        (TypeError, "entries: must be a list of texts, and None", [PLAIN, [None]], {}),
        (ValueError, "arch: 'hopper' is no architecture", [PLAIN], {"arch": "hopper"}),
    ):
        with naming(said), pytest.raises(error, match=said):
            build(*arguments, **more)


def test_missing_nvrtc_names_its_packages(monkeypatch):
    def missing(name):
        raise OSError(name)

    monkeypatch.setattr(toolkit, "toolkit_roots", lambda: [])
    monkeypatch.setattr(toolkit.ctypes, "CDLL", missing)
    with pytest.raises(RuntimeError, match="no NVRTC.*pip install nvidia-cuda-nvrtc"):
        toolkit.find_toolkit.__wrapped__()


STUB = """#include <dlfcn.h>
int nvrtcVersion(int *major, int *minor) {
    *major = *minor = 99;
    return dlopen("libnvrtc-builtins.so.99.0", RTLD_NOW) == 0;
}
const char *nvrtcGetErrorString(int status) { return "no builtins"; }
"""


def test_nvrtc_of_a_package_has_its_builtins(tmp_path):
    """It opens them by name, and no path leads there."""
    for source, name in ((STUB, "libnvrtc.so.99"), ("", "libnvrtc-builtins.so.99.0")):
        shared_library(source, tmp_path / name, f"-Wl,-soname,{name}")
    found = toolkit.Toolkit(tmp_path / "libnvrtc.so.99", ())
    assert compile_module._Nvrtc(found).version() == (99, 99)


def test_the_toolkit_is_found_in_nvidias_pip_packages(monkeypatch, tmp_path):
    """CUDA 12 has a folder for each part, CUDA 13 one for all."""
    for part in ("cuda_nvrtc/lib", "cuda_runtime/include", "cu13/lib", "cu13/include/cccl"):
        (tmp_path / "nvidia" / part).mkdir(parents=True)
    for name in ("cuda_nvrtc/lib/libnvrtc.so.12", "cuda_nvrtc/lib/libnvrtc.alt.so.12",
                 "cu13/lib/libnvrtc.so.13", "cu13/lib/libnvrtc-builtins.so.13.0"):  # fmt: skip
        (tmp_path / "nvidia" / name).touch()
    nvidia = tmp_path.resolve() / "nvidia"
    for home, library, include in (
        ("cuda_nvrtc", "libnvrtc.so.12", "cuda_runtime/include"),
        ("cu13", "libnvrtc.so.13", "cu13/include/cccl"),
    ):
        monkeypatch.setenv("CUDA_HOME", str(nvidia / home))
        found = toolkit.find_toolkit.__wrapped__()
        assert found.nvrtc == nvidia / home / "lib" / library
        assert nvidia / include in found.include


# ---- options, cache, bytes -----------------------------------------------------------------------


@needs_nvrtc
def test_options_reach_the_compiler():
    source = """
    template <class T> concept Any = true;
    __global__ void f(float *x) { __shared__ float y[SIZE]; y[threadIdx.x] = x[0];
                                  __syncthreads(); x[1] = y[SIZE - 1 - threadIdx.x]; }"""
    compiled = build(source, options=["-DSIZE=77", "-std=c++20"])
    assert compiled["f"].shared_bytes == 77 * 4


@needs_nvrtc
def test_one_source_is_compiled_once():
    first = build(SOURCE, SCALES)
    assert build(SOURCE, list(SCALES)) is first
    for other in (build(SOURCE, SCALES[:1]), build(SOURCE, SCALES, "80")):
        assert other is not first and other.cubin != first.cubin


@needs_nvrtc
def test_headers_of_ones_own_are_read_each_time(tmp_path, monkeypatch):
    """Named in an option, or in the source."""
    monkeypatch.chdir(tmp_path)
    header = tmp_path / "mine.h"
    body = "\n__global__ void f(float *x) { __shared__ float y[SIZE]; y[threadIdx.x] = x[0]; " \
           "__syncthreads(); x[1] = y[SIZE - 1 - threadIdx.x]; }"  # fmt: skip
    for include, options in (
        ("#include <mine.h>", [f"-I{tmp_path}"]),
        ("#include <mine.h>", ["-I", str(tmp_path)]),
        ("#include <mine.h>", [f"--include-path={tmp_path}"]),
        ("", ["-include", "mine.h"]),
        ('# include "mine.h"', []),
        (f"#include <{header}>", []),
        ('#define MINE "mine.h"\n#include MINE', []),
    ):
        for size in (64, 96):
            header.write_text(f"#define SIZE {size}\n")
            assert build(include + body, options=options)["f"].shared_bytes == 4 * size, include


@needs_nvrtc
def test_a_process_of_the_pool_compiles_and_loads_what_the_pool_kept():
    class NoGpu(worker.Gpu):
        arch, loaded = lambda self, device: "90a", []
        load = lambda self, code, entry, device: self.loaded.append(code[entry].symbol)

    name, source = "scale<__nv_bfloat16>", {"source": SOURCE}
    job, load = worker.Job(NoGpu(), None, False), {"do": "load", "entry": name}
    answer, (code,) = job.do(load | source, [])
    assert answer == {"status": "ok"} and Compiled.unpack(code) == build(SOURCE, name, "90a")
    assert job.do(load, [code]) == ({"status": "ok"}, [])
    assert NoGpu.loaded == [build(SOURCE, name)[name].symbol] * 2
    answer, found = job.do(load | {"source": "int 5;"}, [])
    assert answer["status"] == "compile_error" and "expected" in answer["message"] and not found
    assert build(worker.PROBE)["probe"].registers > 0


@needs_nvrtc
def test_the_machine_code_names_lines_of_the_source():
    assert b".debug_line" in build(PLAIN).cubin and b"kernel.cu" in build(PLAIN).cubin


# ---- resources -----------------------------------------------------------------------------------


class Affine(ctypes.Structure):
    _fields_ = [("a", ctypes.c_char), ("b", ctypes.c_double)]


class Three(ctypes.Structure):
    _fields_ = [("c", ctypes.c_char * 3)]


class Large(ctypes.Structure):
    _fields_ = [("c", ctypes.c_char * 5000)]


@needs_nvrtc
def test_the_layout_of_parameters_is_that_of_c():
    """Compared with a C struct of the same fields, on each architecture."""
    types = {
        "bool": ctypes.c_bool, "float *": ctypes.c_void_p, "char": ctypes.c_char,
        "short": ctypes.c_short, "Affine": Affine, "int": ctypes.c_int, "Three": Three,
        "double": ctypes.c_double, "float": ctypes.c_float, "long long": ctypes.c_longlong,
        "Large": Large, "int *": ctypes.c_void_p,
    }  # fmt: skip
    source = "struct Affine { char a; double b; }; struct Three { char c[3]; };\n"
    source += "struct Large { char c[5000]; };\n__global__ void k("
    source += ", ".join(f"{name} p{n}" for n, name in enumerate(types)) + ") {}"
    layout = type("Layout", (ctypes.Structure,), {
        "_fields_": [(f"p{n}", kind) for n, kind in enumerate(types.values())]
    })  # fmt: skip
    expected = [
        (getattr(layout, name).offset, ctypes.sizeof(kind)) for name, kind in layout._fields_
    ]
    for arch in ("80", "90a", "120"):
        parameters = build(source, arch=arch)["k"].signature.parameters
        assert [(p.offset, p.size) for p in parameters] == expected, arch
    assert build("__global__ void none() {}")["none"].signature.parameters == ()


@needs_nvrtc
def test_resources_are_those_of_the_source():
    compiled = build(SOURCE)
    assert compiled["stack"].local_bytes >= 4000 and compiled["plain"].local_bytes == 0
    assert compiled["tile"].shared_bytes == 400 and compiled["plain"].shared_bytes == 0
    assert compiled["bounded"].max_threads == 128 and compiled["plain"].max_threads == 1024
    assert all(4 <= entry.registers <= 255 for entry in compiled.entries.values())
    limited = build(SOURCE, options=["--maxrregcount=24"])
    assert max(entry.registers for entry in limited.entries.values()) <= 24
    assert "ptxas info" not in compiled.log
    calls = """
    __device__ __noinline__ int far(int n) {
        volatile int a[100];
        for (int i = 0; i < n; i++) a[i] = n;
        return a[n % 10];
    }
    __global__ void __launch_bounds__(64, 2) far_away(int *p) { p[0] = far(p[0]); }
    __global__ void __cluster_dims__(2, 1, 3) pairs(int *x) { x[0] = 1; }
    __global__ void __block_size__((128, 2, 1)) fixed(int *x) { x[0] = 1; }
    """
    compiled = build(calls)
    assert compiled["far_away"].local_bytes >= 400 and compiled["far_away"].max_threads == 64
    assert compiled["pairs"].cluster == (2, 1, 3) and compiled["pairs"].block is None
    assert compiled["fixed"].block == (128, 2, 1)
    assert Compiled.unpack(compiled.pack()) == compiled


@needs_nvrtc
def test_every_architecture_compiles():
    source = "__global__ void f(float *x, int n) { __shared__ int y[25]; y[threadIdx.x] = n; " \
             "__syncthreads(); x[threadIdx.x] = y[24 - threadIdx.x]; }"  # fmt: skip
    for number in compile_module._nvrtc().archs():
        with naming(number):
            found = build(source, arch=number)["f"]
            assert 0 < found.registers < 40 and found.shared_bytes == 100
            assert found.local_bytes == 0 and found.check(2, 32).shared_bytes == 100
            assert [(p.offset, p.size) for p in found.signature.parameters] == [(0, 8), (8, 4)]
