"""needle/kernels/compile.py and cubin.py: names, logs, caches, and what is read from machine code,
against ptxas' own account and the PTX."""

import ctypes
import importlib
import os
import re
import shutil
import subprocess
import sys
import time

import pytest
from harness import ROOT
from kernel_sources import SCALES, SOURCE, needs_nvrtc

from needle.kernels import Compiled, CompileError, build, cubin
from needle.kernels import limits as limits_of

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
#include <stdio.h>
__attribute__((constructor)) static void opened(void) {
    puts("the driver is opened");
    fflush(stdout);
}
int cuInit(unsigned flags) { return 0 * (int)flags; }
"""


@needs_nvrtc
def test_compiling_opens_no_driver(tmp_path):
    """Not for NVRTC's cache on the disk either: a confined compiler is to have neither a thread nor
    a device file of a GPU."""
    library = tmp_path / "libcuda.so.1"
    (tmp_path / "driver.c").write_text(DRIVER)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, tmp_path / "driver.c"], check=True)
    environment = os.environ | {"LD_LIBRARY_PATH": str(tmp_path), "PYTHONPATH": str(ROOT)}
    for script, said in (
        (f"from needle.kernels import build; print(len(build({PLAIN!r}).entries))", "1"),
        ("import ctypes; ctypes.CDLL('libcuda.so.1')", "the driver is opened"),
    ):
        command = [sys.executable, "-c", script]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert (done.stdout.strip(), done.returncode) == (said, 0), done.stderr


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
    assert mixed.declared("int, float*").signature.known
    with pytest.raises(ValueError, match=r"is declared, but the source says f\(int, float&\)"):
        mixed.declared("float, float*")


# ---- what goes wrong -----------------------------------------------------------------------------


@needs_nvrtc
def test_the_log_has_the_lines_of_the_source():
    error = error_of("__global__ void f(float *x) {\n\n    x[0] = missing;\n}\n")
    assert 'kernel.cu(3): error: identifier "missing" is undefined' in error.log
    assert error.log in str(error) and isinstance(error, ValueError)
    error = error_of("#error not for this\n", options=["-DX"])
    assert "kernel.cu(1)" in error.log and "not for this" in error.log


@needs_nvrtc
@pytest.mark.parametrize(
    "arguments, said",
    [
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
    ],
)
def test_what_does_not_compile(arguments, said):
    assert re.search(said, str(error_of(*arguments)), re.DOTALL)


def test_what_is_no_source_and_no_architecture():
    with pytest.raises(TypeError, match="source: must be the text of a program, not bytes"):
        build(b"")
    with pytest.raises(TypeError, match=r"options: must be a list of texts; write \['-DX'\]"):
        build(PLAIN, options="-DX")
    with pytest.raises(TypeError, match="options: must be a list of texts, and 1 in it is none"):
        build(PLAIN, options=["-DX", 1])
    with pytest.raises(TypeError, match="options: must be a list of texts, not 1"):
        build(PLAIN, options=1)
    with pytest.raises(TypeError, match="entries: must be a list of texts, and None in it is none"):
        build(PLAIN, [None])
    with pytest.raises(ValueError, match="arch: 'hopper' is no architecture"):
        build(PLAIN, arch="hopper")


def test_a_machine_without_nvrtc_is_told_what_to_install(monkeypatch):
    def missing(name):
        raise OSError(name)

    monkeypatch.setattr(compile_module, "_roots", lambda: [])
    monkeypatch.setattr(compile_module.ctypes, "CDLL", missing)
    with pytest.raises(RuntimeError, match="no NVRTC.*pip install nvidia-cuda-nvrtc"):
        compile_module.find_toolkit.__wrapped__()


def test_the_toolkit_is_found_in_nvidias_pip_packages(monkeypatch, tmp_path):
    """Each part in a folder of its own, as for CUDA 12, and all in one, as for CUDA 13."""
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
        found = compile_module.find_toolkit.__wrapped__()
        assert found.nvrtc == nvidia / home / "lib" / library
        assert nvidia / include in found.include
    monkeypatch.delenv("CUDA_HOME")
    monkeypatch.delenv("CUDA_PATH", raising=False)
    monkeypatch.setattr(compile_module.sys, "path", [str(tmp_path)])
    roots = list(compile_module._roots())
    assert roots[-2:] == [nvidia.parent / "nvidia" / name for name in ("cu13", "cuda_nvrtc")]


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
    start = time.perf_counter()
    assert build(SOURCE, list(SCALES)) is first
    assert time.perf_counter() - start < 2e-3
    for other in (build(SOURCE, SCALES[:1]), build(SOURCE, SCALES, "80")):
        assert other is not first and other.cubin != first.cubin


@needs_nvrtc
def test_headers_of_ones_own_are_read_each_time(tmp_path, monkeypatch):
    """Wherever they are named: in an option, or in the source."""
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
def test_it_travels_as_bytes():
    compiled = build(SOURCE)
    data = compiled.pack()
    again = Compiled.unpack(data)
    assert again == compiled and again is not compiled
    assert again["numbers"].signature == compiled["numbers"].signature
    for bad in (b"", data[1:], b"\x80\x04K\x01.", compiled.cubin):
        with pytest.raises(ValueError, match=r"do not come from Compiled.pack\(\)"):
            Compiled.unpack(bad)


@needs_nvrtc
def test_the_machine_code_names_lines_of_the_source():
    assert b".debug_line" in build(PLAIN).cubin and b"kernel.cu" in build(PLAIN).cubin


# ---- what is read from the machine code ----------------------------------------------------------


def ptx_of(source: str) -> str:
    """By NVRTC, called by hand."""
    library = ctypes.CDLL(str(compile_module.find_toolkit().nvrtc))
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    done = library.nvrtcCreateProgram(
        ctypes.byref(program), source.encode(), b"kernel.cu", 0, None, None
    )
    flags = ["--gpu-architecture=compute_90a", "-std=c++17"]
    flags += [f"-I{folder}" for folder in compile_module.find_toolkit().include]
    given = (ctypes.c_char_p * len(flags))(*(flag.encode() for flag in flags))
    done = done or library.nvrtcCompileProgram(program, len(flags), given)
    done = done or library.nvrtcGetPTXSize(program, ctypes.byref(size))
    text = ctypes.create_string_buffer(size.value)
    done = done or library.nvrtcGetPTX(program, text)
    assert done == 0
    library.nvrtcDestroyProgram(ctypes.byref(program))
    return text.value.decode()


LARGE = "struct Large { char c[5000]; };\n__global__ void large(Large a, float *y, Large b) {}\n"
SIZES = {"b8": 1, "u8": 1, "s8": 1, "b16": 2, "u16": 2, "s16": 2, "b32": 4, "u32": 4, "s32": 4,
         "f32": 4, "b64": 8, "u64": 8, "s64": 8, "f64": 8}  # fmt: skip


@needs_nvrtc
def test_parameters_are_those_of_the_ptx():
    """PTX declares each with its type, and arrays of bytes with their alignment."""
    seen = 0
    for source in (SOURCE, LARGE):
        found = cubin.kernels(build(source).cubin)
        for match in re.finditer(r"\.entry (\w+)\(([^)]*)\)", ptx_of(source)):
            layout, end = [], 0
            for align, kind, count in re.findall(
                r"\.param (?:\.align (\d+) )?\.(\w+)(?: \.ptr[^,\n]*?)? "
                r"\w+_param_\d+(?:\[(\d+)\])?",
                match[2],
            ):
                size = SIZES[kind]
                end = -(-end // int(align or size)) * int(align or size)
                layout.append((end, size * int(count or 1)))
                end += size * int(count or 1)
            assert found[match[1]].parameters == layout, match[1]
            seen += len(layout)
    assert seen > 40


def ptxas_of_this_release() -> str | None:
    """The assembler beside NVRTC, or another of its release."""
    beside = compile_module.find_toolkit().nvrtc.parent.parent / "bin" / "ptxas"
    found = next((f for f in (beside, "/usr/local/cuda/bin/ptxas", "ptxas") if shutil.which(f)), "")
    numbers = ctypes.c_int(), ctypes.c_int()
    library = ctypes.CDLL(str(compile_module.find_toolkit().nvrtc))
    library.nvrtcVersion(*map(ctypes.byref, numbers))
    release = f"release {numbers[0].value}.{numbers[1].value},"
    told = found and subprocess.run([found, "--version"], capture_output=True, text=True).stdout
    return str(found) if release in told else None


@needs_nvrtc
def test_resources_are_those_that_ptxas_tells(tmp_path):
    ptxas = ptxas_of_this_release()
    if ptxas is None:
        pytest.skip("needle: no ptxas of NVRTC's release to compare with")
    (tmp_path / "kernel.ptx").write_text(ptx_of(SOURCE))
    command = [ptxas, "-v", "-arch=sm_90a", "kernel.ptx", "-o", "kernel.cubin"]
    done = subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True)
    found = cubin.kernels((tmp_path / "kernel.cubin").read_bytes())
    told = re.findall(
        r"Compiling entry function '(\w+)'.*?(\d+) bytes stack frame.*?Used (\d+) registers"
        r"(.*?)\n(?:ptxas|$)",
        done.stdout + done.stderr + "\nptxas",
        re.DOTALL,
    )
    assert len(told) >= 9
    for symbol, frame, registers, rest in told:
        kernel = found[symbol]
        shared, barriers = (re.search(rf"(\d+) {what}", rest) for what in ("bytes smem", "barrier"))
        assert kernel.registers == int(registers), symbol
        assert kernel.local_bytes == int(frame), symbol
        assert kernel.shared_bytes == (int(shared[1]) if shared else 0), symbol
        assert kernel.barriers == (int(barriers[1]) if barriers else 0), symbol
    assert found["_Z5stackPfi"].local_bytes >= 4000 and found["_Z4tilePf"].shared_bytes == 400
    assert found["_Z7boundedPf"].max_threads == 128
    assert found["plain"].barriers == 0 and found["_Z8barriersPi"].barriers == 6


@needs_nvrtc
def test_sizes_that_the_source_fixes():
    source = """
    __global__ void __cluster_dims__(2, 1, 1) pairs(int *x) { x[0] = 1; }
    __global__ void __block_size__((128, 2, 1)) fixed(int *x) { x[0] = 1; }
    """
    compiled = build(source)
    assert compiled["pairs"].cluster == (2, 1, 1) and compiled["pairs"].block is None
    assert compiled["fixed"].block == (128, 2, 1)


@needs_nvrtc
@pytest.mark.parametrize("arch", [str(number) for number in limits_of.ARCHS])
def test_every_architecture_of_the_table(arch):
    source = "__global__ void f(float *x, int n) { __shared__ int y[25]; y[threadIdx.x] = n; " \
             "__syncthreads(); x[threadIdx.x] = y[24 - threadIdx.x]; }"  # fmt: skip
    if int(arch) not in compile_module._nvrtc().archs():
        pytest.skip(f"the NVRTC that is here does not know sm_{arch}")
    found = build(source, arch=arch)["f"]
    assert 0 < found.registers < 40 and found.shared_bytes == 100 and found.local_bytes == 0
    assert found.check(2, 32).occupancy > 0
    assert [(p.offset, p.size) for p in found.signature.parameters] == [(0, 8), (8, 4)]


@needs_nvrtc
def test_what_can_be_compiled_can_be_checked():
    known = [number for number in compile_module._nvrtc().archs() if number >= min(limits_of.ARCHS)]
    assert {number for number in known if number <= max(limits_of.ARCHS)} <= limits_of.ARCHS.keys()


@needs_nvrtc
def test_what_is_no_cubin():
    good = build(PLAIN).cubin
    for bad in (b"", b"\x7fELF", good[:50], good[:200], good[: len(good) // 2], b"\0" * 1000):
        with pytest.raises(ValueError, match="cubin"):
            cubin.kernels(bad)
