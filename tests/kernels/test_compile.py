"""needle/kernels/compile.py and toolkit.py: names, logs, options, and the resources of kernels."""

import ctypes
import json
import re

import pytest
from harness import naming, python, shared_library
from kernel_sources import SCALES, SOURCE, needs_nvrtc

from needle.kernels import Compiled, CompileError, build, toolkit, worker

PLAIN = "__global__ void f(float *x) { x[0] = 1; }"
FULL = "__global__ void f(int *x) { __shared__ int a[1 << 20]; a[threadIdx.x] = x[0]; " \
       "__syncthreads(); x[1] = a[x[2]]; }"  # fmt: skip
SIZED = "__global__ void f(float *x) { __shared__ float y[SIZE]; y[threadIdx.x] = x[0]; " \
        "__syncthreads(); x[1] = y[SIZE - 1 - threadIdx.x]; }"  # fmt: skip
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


# ---- names, errors, options ----------------------------------------------------------------------


@needs_nvrtc
def test_kernels_are_found_by_their_names():
    every = build(SOURCE)
    named = {
        "plain", "inner::fill", "twice(float*)", "twice(int*)", "numbers", "tile", "bounded",
        "stack", "nothing", "barriers",
    }  # fmt: skip
    assert named <= set(every.entries) <= named | {"hidden"}
    assert "no template" not in every.log and "ptxas info" not in every.log
    asked = build(SOURCE, [*SCALES, "plain", "inner::fill", "scale< __half >"])
    assert list(asked.entries) == [*SCALES, "plain", "inner::fill", "scale< __half >"]
    for compiled, name, symbol in (
        (every, "plain", "plain"),
        (every, "inner::fill", "_ZN5inner4fillEPii"),
        (every, "twice(int*)", "_Z5twicePi"),
        (asked, "scale<__half>", asked["scale< __half >"].symbol),
    ):
        assert compiled[name].symbol == symbol
    one = build(SOURCE, "scale<float>")
    assert repr(one) == (
        "<compiled for sm_90a: scale<float>(float const*, float*, float, long long, Affine)>"
    )
    with pytest.raises(KeyError, match=r"no kernel 'scale<double>': there are scale<float>; .*"
                       r"entries=\['scale<double>'\]"):  # fmt: skip
        one["scale<double>"]
    assert list(one) == ["scale<float>"] and "scale<double>" not in one and "tile" in every


@needs_nvrtc
def test_declared_types_are_those_of_c():
    """As they could stand in the source. Types that are not read spoil no other kernel."""
    source = """
    #include <cuda_fp16.h>
    struct P { int a[3]; };
    extern "C" __global__ void plain(const half2 *x, REAL *y, unsigned char n, P p, size_t m) {}
    __global__ void table(float *o, const int y[4][4], float (*z)[8]) {}
    __global__ void odd(float &r, int P::*m, void (*f)(int), long double d) {}
    __global__ void mixed(int n, float &r) {}
    """
    compiled = build(source, options=["-DREAL=float"])
    int_first = r"\(float, float\*\) is declared, .* mixed\(int, float&\)"
    for name, text, kinds in (
        ("plain", None, "unknown unknown unknown unknown unknown"),
        ("plain", "half2 const *x, float y[], const unsigned char, struct P, unsigned long m",
         "array array uint bytes uint"),
        ("table", None, "array array array"),
        ("odd", None, "unknown unknown unknown unknown"),
        ("odd", "float*, long, long, double", "array int int float"),
        ("mixed", "int, float*", "int array"),
        ("mixed", "float, float*", int_first),
        ("plain", "half2*, float*, int, P, size_t", r"is declared, .* says plain\(8 bytes"),
        ("plain", "Missing*", 'kernel.cu.*identifier "Missing" is undefined'),
    ):  # fmt: skip
        with naming(name, text):
            try:
                entry = compiled.declared(name, text) if text else compiled[name]
            except ValueError as error:
                assert re.search(kinds, str(error), re.DOTALL), error
            else:
                assert " ".join(p.kind for p in entry.signature.parameters) == kinds
    x, y, *_ = compiled.declared(
        "plain", "half2 const*, float*, bool, P, long"
    ).signature.parameters
    assert (x.dtype, x.written, x.alignment, y.written) == ("float16", False, 4, True)


@needs_nvrtc
def test_source_that_does_not_compile_is_explained():
    for arguments, said in (
        (("__global__ void f(float *x) {\n\n  x[0] = y;\n}\n",), r'kernel.cu\(3\): error: .* "y"'),
        ((PLAIN, "g<float>"), "g"),
        (("__device__ void g() {}\n" + PLAIN, "g"), "non-__global__.*g"),
        (("__constant__ int k;\n" + PLAIN, "&k"), "'&k' is no kernel"),
        (("template <class T> __global__ void f(T *x) {}",), r'entries=\["scale<float>"\]'),
        (("",), "has no kernel"),
        ((PLAIN, (), "29"), "gpu-architecture"),
        ((PLAIN, (), "90a", ["--no-such-option"]), "no-such-option"),
        ((FULL,), "too much shared data"),
    ):
        with naming(said), pytest.raises(CompileError) as raised:
            build(*arguments)
        assert re.search(said, str(raised.value), re.DOTALL), raised.value
        assert raised.value.log in str(raised.value)
    for error, said, more in (
        (TypeError, r"options: .* list of texts; write \['-DX'\]", {"options": "-DX"}),
        (ValueError, "arch: must be one as", {"arch": "hopper"}),
    ):
        with pytest.raises(error, match=said):
            build(PLAIN, **more)


@needs_nvrtc
def test_source_that_reads_a_texture_compiles():
    source = "__global__ void f(cudaTextureObject_t t, float *y) { y[0] = tex1D<float>(t, 0); }"
    assert str(build(source)["f"].signature) == "f(unsigned long long, float*)"


@needs_nvrtc
def test_options_reach_the_compiler_and_headers_are_read_each_time(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    concept = "template <class T> concept Any = true;\n"
    for before, options in (
        ('# include "mine.h"', []),
        ('#define MINE "mine.h"\n#include MINE', []),
        ("#include <mine.h>", [f"-I{tmp_path}"]),
        ("", ["-include", "mine.h"]),
        (f"{concept}#include <mine.h>", ["-std=c++20", "-I", str(tmp_path)]),
    ):
        for size in (64, 96):
            (tmp_path / "mine.h").write_text(f"#define SIZE {size}\n")
            entry = build(f"{before}\n{SIZED}", options=options)["f"]
            assert entry.shared_bytes == 4 * size, before
    assert build(SOURCE, SCALES) is build(SOURCE, tuple(SCALES)) != build(SOURCE, SCALES[:1])
    compiled = build(SOURCE, options=["--maxrregcount=24"])
    assert max(entry.registers for entry in compiled.entries.values()) <= 24


@needs_nvrtc
def test_process_of_the_pool_compiles_and_loads_what_the_pool_kept(monkeypatch):
    loaded = []
    monkeypatch.setattr(worker, "arch_of", lambda device: "90a")
    monkeypatch.setattr(worker, "load", lambda code, device: loaded.append(code) or code)
    name, source = "scale<__nv_bfloat16>", {"source": SOURCE}
    job, load = worker.Job(None, False), {"do": "load", "entry": name}
    answer = job.do(load | source | {"code": None})
    assert answer["status"] == "ok" and Compiled.unpack(answer["code"]) == build(SOURCE, name)
    assert job.do(load | {"code": answer["code"]}) == {"status": "ok", "code": None}
    assert loaded == [build(SOURCE, name)] * 2
    answer = job.do(load | {"source": "int 5;", "code": None})
    assert answer["status"] == "compile_error" and "expected" in answer["message"]
    assert build(worker.PROBE)["probe"].registers > 0


# ---- resources -----------------------------------------------------------------------------------


def field(name: str, *fields) -> type:
    return type(name, (ctypes.Structure,), {"_fields_": list(fields)})


@needs_nvrtc
def test_layout_of_parameters_is_that_of_c():
    """Compared with a C struct of the same fields, on each architecture."""
    types = {
        "bool": ctypes.c_bool, "float *": ctypes.c_void_p, "char": ctypes.c_char,
        "short": ctypes.c_short, "double": ctypes.c_double, "int": ctypes.c_int,
        "Affine": field("Affine", ("a", ctypes.c_char), ("b", ctypes.c_double)),
        "Three": field("Three", ("c", ctypes.c_char * 3)), "float": ctypes.c_float,
        "long long": ctypes.c_longlong, "Large": field("Large", ("c", ctypes.c_char * 5000)),
        "int *": ctypes.c_void_p,
    }  # fmt: skip
    source = "struct Affine { char a; double b; }; struct Three { char c[3]; };\n"
    source += "struct Large { char c[5000]; };\n__global__ void k("
    source += ", ".join(f"{name} p{n}" for n, name in enumerate(types)) + ") {}"
    layout = field("Layout", *((f"p{n}", kind) for n, kind in enumerate(types.values())))
    expected = [(getattr(layout, name).offset, ctypes.sizeof(kind))
                for name, kind in layout._fields_]  # fmt: skip
    for arch in ("80", "90a", "120"):
        found = build(source, arch=arch)["k"]
        assert [(p.offset, p.size) for p in found.signature.parameters] == expected, arch
    assert build("__global__ void none() {}")["none"].signature.parameters == ()


@needs_nvrtc
def test_resources_are_those_of_the_source():
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
    compiled, more = build(SOURCE), build(calls)
    for entry, least_local, shared, threads, block, cluster in (
        (compiled["plain"], 0, 0, 1024, None, None),
        (compiled["stack"], 4000, 0, 1024, None, None),
        (compiled["tile"], 0, 400, 1024, None, None),
        (compiled["bounded"], 0, 0, 128, None, None),
        (more["far_away"], 400, 0, 64, None, None),
        (more["pairs"], 0, 0, 1024, None, (2, 1, 3)),
        (more["fixed"], 0, 0, 1024, (128, 2, 1), (1, 1, 1)),
    ):
        with naming(entry.name):
            assert entry.local_bytes >= least_local and bool(entry.local_bytes) == bool(least_local)
            assert (entry.shared_bytes, entry.block, entry.cluster) == (shared, block, cluster)
            assert entry.max_threads == threads
            assert 4 <= entry.registers <= 255
    assert Compiled.unpack(more.pack()) == more
    sent = json.loads(json.dumps(more.pack() | {"cubin": ""})) | {"cubin": more.cubin}
    assert Compiled.unpack(sent) == more
    assert Compiled.unpack(sent)["fixed"].check(1, (128, 2)).block == (128, 2, 1)
    for arch in ("80", "90a", "100", "120"):
        assert build(SIZED, arch=arch, options=["-DSIZE=25"])["f"].check(2, 32).shared_bytes == 100
    assert b".debug_line" in compiled.cubin and b"kernel.cu" in compiled.cubin


# ---- the toolkit ---------------------------------------------------------------------------------

STUB = """#include <dlfcn.h>
int nvrtcVersion(int *major, int *minor) {
    *major = *minor = 99;
    return dlopen("libnvrtc-builtins.so.99.0", RTLD_NOW) == 0;
}
const char *nvrtcGetErrorString(int status) { return "no builtins"; }
"""


def test_toolkit_of_nvidias_pip_packages_is_found(monkeypatch, tmp_path):
    """CUDA 12 has a folder for each part, CUDA 13 one for all. NVRTC opens its builtins by name,
    and no path leads there."""
    nvidia = tmp_path.resolve() / "nvidia"
    for part in ("cuda_nvrtc/lib", "cuda_runtime/include", "cu13/lib", "cu13/include/cccl"):
        (nvidia / part).mkdir(parents=True)
    for name in ("cuda_nvrtc/lib/libnvrtc.so.12", "cuda_nvrtc/lib/libnvrtc.alt.so.12"):
        (nvidia / name).touch()
    for source, name in ((STUB, "libnvrtc.so.13"), ("", "libnvrtc-builtins.so.99.0")):
        shared_library(source, nvidia / "cu13/lib" / name, f"-Wl,-soname,{name}")
    for home, library, include in (
        ("cuda_nvrtc", "libnvrtc.so.12", "cuda_runtime/include"),
        ("cu13", "libnvrtc.so.13", "cu13/include/cccl"),
    ):
        monkeypatch.setenv("CUDA_HOME", str(nvidia / home))
        found = toolkit.find_toolkit.__wrapped__()
        assert found.nvrtc == nvidia / home / "lib" / library
        assert nvidia / include in found.include
    monkeypatch.syspath_prepend(str(tmp_path.resolve()))
    roots = [root for _, root in toolkit.toolkit_roots() if nvidia in root.parents]
    assert roots[1:] == [nvidia / "cu13", nvidia / "cuda_nvrtc"]  # after $CUDA_HOME
    script = "from needle.kernels.compile import _version; print(_version())"
    done = python(script, CUDA_HOME=str(nvidia / home))
    assert done.stdout == "(99, 99)\n", done.stderr


def test_toolkit_of_a_variable_goes_first_and_cuda_home_before_cuda_path(monkeypatch):
    monkeypatch.setenv("CUDA_PATH", "/one")
    for home, wanted in ("/two", ["/two", "/one"]), ("", ["/one"]):
        monkeypatch.setenv("CUDA_HOME", home)
        roots = [str(root) for how, root in toolkit.toolkit_roots() if how.startswith("$")]
        first = [str(root) for _, root in toolkit.toolkit_roots()][: len(wanted)]
        assert roots == first == wanted


def test_program_of_the_toolkit_goes_before_that_of_the_path(monkeypatch, tmp_path):
    for folder in "home/bin", "path":
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "tool").touch(0o755)
    monkeypatch.setattr(toolkit, "toolkit_roots", lambda: [("$CUDA_HOME", tmp_path / "home")])
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    assert toolkit.find_tool("tool") == str(tmp_path / "home/bin/tool")
    (tmp_path / "home/bin/tool").unlink()
    assert toolkit.find_tool("tool") == str(tmp_path / "path/tool")
    assert toolkit.find_tool("other") is None


def test_missing_nvrtc_names_its_packages(monkeypatch):
    def missing(name):
        raise OSError(name)

    monkeypatch.setattr(toolkit, "toolkit_roots", lambda: [])
    monkeypatch.setattr(toolkit.ctypes, "CDLL", missing)
    with pytest.raises(RuntimeError, match="no NVRTC.*pip install nvidia-cuda-nvrtc"):
        toolkit.find_toolkit.__wrapped__()
    for only in "libnvrtc.so.13", "libnvrtc.so.12":  # of a system without the developer's link
        there = lambda name, only=only: name == only or missing(name)
        monkeypatch.setattr(toolkit.ctypes, "CDLL", there)
        assert str(toolkit.find_toolkit.__wrapped__().nvrtc) == only
