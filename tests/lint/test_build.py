"""The build: what it chooses, what it says, what it compiles again.

The incremental tests build a tree of a few small files with the real setup.py, and stand a shell
script in for nvcc, so that they run anywhere and take seconds.
"""

import contextlib
import importlib.util
import os
import platform
import re
import runpy
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from harness import ROOT, run

pytestmark = pytest.mark.slow


@pytest.fixture
def build(monkeypatch):
    """building/choices.py as a module, with a clean environment."""
    for name in list(os.environ):
        if name.startswith("NEEDLE_") or name in ("CUDA_HOME", "CUDA_PATH", "CFLAGS", "LDFLAGS"):
            monkeypatch.delenv(name)
    from building import choices

    monkeypatch.setattr(choices, "notes", [])
    return choices


@contextlib.contextmanager
def error_of_one_line(*said: str):
    """The block ends the build with an error that has these words."""
    with pytest.raises(SystemExit) as error:
        yield
    text = str(error.value)
    assert "\n" not in text and text.startswith("needle: error: ")
    for word in said:
        assert word in text


# ---- choices -------------------------------------------------------------------------------------


def test_archs_are_parsed(build):
    for text, archs in (
        ("9.0", ["90a"]),
        ("sm_90a, 8.6;compute_120 12.1", ["86", "90a", "120", "121"]),
        ("10.3 90 90a", ["90a", "103"]),
        ("100f", ["100f"]),
        ("all", ["80", "89", "90a", "100", "120"]),
        ("", []),
    ):
        assert build.parse_archs(text) == archs
    for text in ("hopper", "9", "sm90a!", "80 ninety"):
        with error_of_one_line("NEEDLE_CUDA_ARCHS"):
            build.parse_archs(text)


def test_compiler_is_the_variables_with_its_flags_else_the_first_found(build, monkeypatch):
    for value, found in ((f"{sys.executable} -m64", f"{sys.executable} -m64"), ("", "sh")):
        monkeypatch.setenv("CC", value)
        assert build.compiler("CC", "no-such-compiler sh", "gcc") == found
    with error_of_one_line("none of no-such-compiler is here", "apt install gcc", "set CC"):
        build.compiler("CC", "no-such-compiler", "gcc")


@pytest.mark.parametrize("target", ["test-cuda", "memcheck"])
def test_targets_that_need_a_gpu_ask_before_building(target):
    words = "-s", target, f"PYTHON={sys.executable}", "VENV="
    done = run("make", *words, CUDA_VISIBLE_DEVICES="")
    assert done.returncode != 0 and done.stdout == ""
    assert done.stderr.startswith("needle: error: these tests run on a GPU: ")
    planned = run("make", "-n", *words[1:]).stdout.replace("\\\n", "")
    (tests,) = [line for line in planned.splitlines() if "-m pytest" in line]
    assert tests.startswith("NEEDLE_REQUIRE_CUDA=1 ")  # a test that finds no GPU fails


def test_gencode_is_exact(build):
    assert build.gencode(["80", "90a"]).split() == [
        "-gencode=arch=compute_80,code=sm_80",
        "-gencode=arch=compute_90a,code=sm_90a",
    ]
    for archs, last in (
        (["80", "89"], "compute_80,code=sm_89"),
        (["86", "89"], "compute_89,code=sm_89"),
        (["80", "100", "120"], "compute_100,code=sm_120"),
        (["80", "120"], "compute_120,code=sm_120"),
    ):
        assert build.gencode(archs).endswith(f"-gencode=arch={last}")


def test_bad_settings_are_named(build, monkeypatch):
    for name, value, choose in (
        ("NEEDLE_CUDA", "yes", "choose_cuda"),
        ("NEEDLE_BLAS", "mkl", "find_blas"),
        ("NEEDLE_MARCH", "abacus", "march_flag"),
        ("NEEDLE_DEBUG", "yes", "flags"),
    ):
        monkeypatch.setenv(name, value)
        with error_of_one_line(name, value):
            getattr(build, choose)()
    for value, choice in ("", "auto"), (" Builtin ", "builtin"):
        monkeypatch.setenv("NEEDLE_BLAS", value)
        assert build.setting("NEEDLE_BLAS", "auto", "builtin") == choice
    for value, name in ("none", "baseline"), ("portable", "portable"):
        monkeypatch.setenv("NEEDLE_MARCH", value)
        assert build.march_flag() == ("", name)


def test_a_blas_that_may_be_slow_is_taken_only_when_asked_for(build, monkeypatch):
    """-lblas may be Netlib's reference: 1.6 GFLOP/s where the built-in product makes 97."""
    monkeypatch.setattr(build.importlib.util, "find_spec", lambda name: None)
    for wanted, here, chosen in (
        ("auto", "openblas", "system libopenblas"),
        ("auto", "blas", "built-in"),
        ("system", "blas", "system libblas"),
    ):
        monkeypatch.setenv("NEEDLE_BLAS", wanted)
        monkeypatch.setattr(build, "links", lambda library, here=here: library == f"-l{here}")
        assert build.find_blas()[0] == chosen
    spec = SimpleNamespace(origin="/site-packages/scipy_openblas32/__init__.py")
    monkeypatch.setattr(build.importlib.util, "find_spec", lambda name: spec)
    for wanted, chosen in ("auto", "scipy-openblas32"), ("builtin", "built-in"):
        monkeypatch.setenv("NEEDLE_BLAS", wanted)
        assert build.find_blas()[0] == chosen
    # What stays on this machine looks where the package lies now, too.
    monkeypatch.setenv("NEEDLE_BLAS", "scipy")
    for stays in True, False:
        assert ("rpath,/site-packages/scipy_openblas32/lib" in build.find_blas(stays)[2]) == stays


def test_library_has_cblas_if_a_probe_links(build, monkeypatch):
    assert not build.links("-lm")
    for command, found in ("true -m64", True), ("false", False):
        monkeypatch.setenv("CC", command)
        assert build.links("-lm") == found


def test_reason_of_the_driver_why_no_gpu_can_be_used(build, monkeypatch):
    for error, count, said in (
        (100, 0, "shows no GPU (error 100): see nvidia-smi"),
        (0, 0, "shows no GPU (none): see nvidia-smi"),
        (0, 2, None),
    ):
        driver = SimpleNamespace(cuInit=lambda flags, error=error: error)
        driver.cuDeviceGetCount = lambda place, n=count: setattr(place._obj, "value", n) or 0
        monkeypatch.setattr(build.ctypes, "CDLL", lambda name, driver=driver: driver)
        why = build.missing_gpu()
        assert why is None if said is None else said in why


def test_machine_that_cannot_build_is_named(build, monkeypatch, tmp_path):
    monkeypatch.setattr(build.sysconfig, "get_path", lambda name: str(tmp_path))
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    with error_of_one_line(f"Python.h of Python {version} is missing: apt install python{version}"):
        build.python_includes()
    build.sysconfig.get_config_vars()  # from a module that sys.platform names
    monkeypatch.setattr(sys, "platform", "win32")
    with error_of_one_line("needle needs Linux, and this is win32: on Windows it builds in WSL 2"):
        runpy.run_path(str(ROOT / "setup.py"), run_name="__main__")


def test_cuda_is_found_demanded_or_left_out(build, monkeypatch, tmp_path):
    """By itself it says what is missing and how to ask; demanded, an error; 0 does not look."""
    for driver in None, "no NVIDIA driver":
        monkeypatch.setattr(build, "notes", [])
        monkeypatch.setattr(build, "missing_gpu", lambda driver=driver: driver and build.NO_DRIVER)
        monkeypatch.setattr(build.toolkit, "toolkit_roots", lambda: [])
        why = build.choose_cuda()
        assert why.startswith(driver or "no CUDA toolkit")
        for_gpus = "NEEDLE_CUDA=1 builds for GPUs without a driver too"
        assert build.notes == [f"for the CPU alone: {why}; {for_gpus}"]
    monkeypatch.setenv("NEEDLE_CUDA", "1")
    for roots, said in (([], "no CUDA toolkit"), ([("$CUDA_HOME", tmp_path)], str(tmp_path))):
        monkeypatch.setattr(build.toolkit, "toolkit_roots", lambda roots=roots: roots)
        with error_of_one_line(said):
            build.choose_cuda()
    monkeypatch.setattr(build, "missing_gpu", None)
    monkeypatch.setattr(build, "find_toolkit", None)
    monkeypatch.setattr(build, "notes", [])
    monkeypatch.setenv("NEEDLE_CUDA", "0")
    assert build.choose_cuda() == "NEEDLE_CUDA=0" and build.notes == []


def test_core_is_told_how_it_was_built(build, monkeypatch):
    monkeypatch.setattr(build, "output_of", lambda *words: "")  # without git
    facts = runpy.run_path(str(ROOT / "setup.py"), run_name="setup")["facts"]
    core = {"COMPILER": "gcc 1", "MARCH_NAME": "native", "BLAS": "built-in"}
    cuda = SimpleNamespace(version="13.0", archs=["80", "90a"])
    for given, *wanted in (
        ("NEEDLE_CUDA=0", 'CUDA ""', 'LEFT_OUT ": NEEDLE_CUDA=0 when it was built"'),
        (cuda, 'CUDA "13.0"', 'CUDA_ARCHS "80 90a"', 'LEFT_OUT ""'),
    ):
        text = facts("0.1", core, given)
        assert 'NEEDLE_BUILD_MARCH "native"' in text and 'COMMIT "unknown"' in text
        assert all(word in text for word in wanted)


# ---- a stand-in toolkit --------------------------------------------------------------------------

NVCC = """#!/bin/sh
# Knows sm_80 and sm_90; compiles as plain C++, without the flags that only nvcc has.
for word; do
    case "$word" in
    --version) echo "Cuda compilation tools, release 13.0, V13.0.88"; exit 0 ;;
    --list-gpu-code) echo sm_80; echo sm_90; exit 0 ;;
    esac
done
out= dep= target= src=
while [ $# -gt 0 ]; do
    case "$1" in
    -o) out=$2; shift ;;
    -MF) dep=$2; shift ;;
    -MT) target=$2; shift ;;
    -Xcompiler | -ccbin | -Werror) shift ;;
    *.cpp | *.cu) src=$1 ;;
    esac
    shift
done
! grep -q KILL "$src" || kill -INT 0 # Ctrl-C, for the whole build
exec c++ -x c++ -fPIC -Icsrc -Icuda -MMD -MF "$dep" -MT "$target" -c "$src" -o "$out"
"""


@pytest.fixture
def toolkit(tmp_path):
    root = tmp_path / "toolkit"
    (root / "bin").mkdir(parents=True)
    (root / "bin/nvcc").write_text(NVCC)
    (root / "bin/nvcc").chmod(0o755)
    for header in ("cuda_runtime_api.h", "cublasLt.h"):
        (root / "include").mkdir(exist_ok=True)
        (root / "include" / header).write_text("")
    (root / "lib").mkdir()
    (root / "lib/lt.c").write_text(
        "int cublasLtCreate(void); int cublasLtCreate(void) { return 0; }"
    )
    shared = "-shared", "-fPIC", "lt.c", "-Wl,-soname,libcublasLt.so.13"
    for command in (("ar", "rc", "libcudart_static.a"), ("cc", *shared, "-o", "libcublasLt.so.13")):
        done = run(*command, cwd=root / "lib")
        assert done.returncode == 0, done.stderr
    return root


@pytest.fixture
def demanded(build, monkeypatch, toolkit):
    """The toolkit is that of $CUDA_HOME, and must be used."""
    monkeypatch.setenv("NEEDLE_CUDA", "1")
    monkeypatch.setenv("CUDA_HOME", str(toolkit))
    return toolkit


def test_archs_the_toolkit_does_not_know_are_dropped(build, monkeypatch, demanded):
    monkeypatch.setenv("NEEDLE_CUDA_ARCHS", "120")
    with error_of_one_line("sm_120"):
        build.choose_cuda()
    monkeypatch.setenv("NEEDLE_CUDA_ARCHS", "80 90 120")
    cuda = build.choose_cuda()
    assert cuda.archs == ["80", "90a"] and cuda.version == "13.0"
    assert f"CUDA toolkit 13.0: {demanded} (from $CUDA_HOME)" in build.notes
    assert "nvcc 13.0 does not know sm_120: left out" in build.notes


def test_archs_are_those_that_nvidia_smi_shows(build, monkeypatch, demanded):
    """What one that fails prints names none: the code is for all."""
    smi = demanded / "bin/nvidia-smi"
    monkeypatch.setattr(build, "missing_gpu", lambda: None)
    monkeypatch.setenv("PATH", f"{smi.parent}:{os.environ['PATH']}")
    for code, said, archs in (0, "9.0", ["90a"]), (9, "NVIDIA-SMI has failed", ["80", "90a"]):
        smi.write_text(f"#!/bin/sh\necho '{said}'; exit {code}\n")
        smi.chmod(0o755)
        assert build.choose_cuda().archs == archs
    smi.write_text("#!/bin/sh\necho 9.0\n")
    monkeypatch.setenv("NEEDLE_CUDA_ARCHS", "80")
    assert build.choose_cuda().archs == ["80"]


def test_first_complete_toolkit_is_taken_and_what_lacks_is_named(
    build, monkeypatch, demanded, tmp_path
):
    roots = [("$CUDA_PATH", tmp_path / "none"), ("/usr/local/cuda", demanded)]
    monkeypatch.setattr(build.toolkit, "toolkit_roots", lambda: roots)
    assert build.choose_cuda().nvcc == demanded / "bin/nvcc"
    for file, package in (
        ("libcudart_static.a", "nvidia-cuda-runtime"),
        ("libcublasLt.so.13", "nvidia-cublas"),
    ):
        (demanded / "lib" / file).unlink()
        with error_of_one_line(f"has no {file.removesuffix('.13')} ", f"pip install {package}"):
            build.choose_cuda()


def test_flags_of_compilers_reach_the_makefile(build, monkeypatch, demanded):
    given = {"LDFLAGS": "-Lx", "NVCC_FLAGS": "-lineinfo", "CXX": "c++", "NEEDLE_WERROR": "1"}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    made = build.for_cuda(build.choose_cuda(), stays=True)
    assert made["NVCC"] == f"{demanded}/bin/nvcc -ccbin c++" and made["WERROR"] == "-Werror"
    assert [made[name] for name in ("LDFLAGS", "NVCC_FLAGS")] == ["-Lx", "-lineinfo"]


# ---- what is compiled, and when ------------------------------------------------------------------

MODULE = """#include <Python.h>
#include "needle.h"
int cpu_answer(void);
static PyObject *answer(PyObject *self, PyObject *unused) {
    (void)self, (void)unused;
    return PyLong_FromLong(cpu_answer());
}
static PyMethodDef methods[] = {{"answer", answer, METH_NOARGS, NULL}, {NULL, NULL, 0, NULL}};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_C", NEEDLE_BUILD_BLAS, -1, methods,
                                    NULL, NULL, NULL, NULL};
PyMODINIT_FUNC PyInit__C(void);
__attribute__((visibility("default"))) PyMODINIT_FUNC PyInit__C(void) {
    return PyModule_Create(&module);
}
"""


DEBUG_ANSWER = """#ifdef NEEDLE_DEBUG
#define ANSWER 44
#else
#define ANSWER 43
#endif
"""


class Tree:
    """A small copy of the project, built by the real setup.py."""

    def __init__(self, root: Path):
        self.root = root
        for folder in ("csrc/cpu", "csrc/python", "cuda", "needle/kernels"):
            (root / folder).mkdir(parents=True)
        shutil.copytree(ROOT / "building", root / "building")
        for file in ("setup.py", "pyproject.toml", "cuda/exports.map", "needle/kernels/toolkit.py"):
            shutil.copy(ROOT / file, root / file)
        (root / "README.md").write_text("small")
        self.write("needle/__init__.py", "")
        self.write("csrc/needle.h", "#define ANSWER 42\n")
        self.write("csrc/python/module.c", MODULE)
        for name in ("status", "array"):
            function = f"int nd_{name}_unused(void)"
            self.write(f"csrc/{name}.c", f"{function}; {function} {{ return 0; }}\n")
        self.write(
            "csrc/cpu/answer.c",
            '#include "needle.h"\nint cpu_answer(void); int cpu_answer(void) { return ANSWER; }\n',
        )
        self.write("cuda/shared.cuh", "#define PART 1\n")
        self.write("cuda/one.cu", '#include "shared.cuh"\nint one() { return PART; }\n')
        self.write(
            "cuda/two.cpp",
            'extern "C" int cublasLtCreate();\n#pragma GCC visibility push(default)\n'
            'extern "C" int needle_backend() { return cublasLtCreate(); }\n'
            "int as_in_std() { return 0; }\n",
        )

    def write(self, path: str, text: str) -> None:
        (self.root / path).write_text(text)

    def build(self, place: str = "--inplace", **env: str) -> tuple[int, str]:
        clean = {name: None for name in os.environ if name.startswith(("NEEDLE_", "CUDA_"))}
        clean |= {"NEEDLE_CUDA": "0", "NEEDLE_BLAS": "builtin", "NEEDLE_MARCH": "none", **env}
        words = "-W", "ignore", "setup.py", "-q", "build_ext", place
        done = run("setsid", "--wait", sys.executable, *words, cwd=self.root, **clean)
        return done.returncode, done.stdout + done.stderr

    def compiled(self, **env: str) -> list[str]:
        status, text = self.build(**env)
        assert status == 0, text
        return sorted(re.findall(r"^needle: (\S+[.](?:c|cu|cpp))$", text, re.MULTILINE))

    def answer(self) -> int:
        script = "from needle import _C; print(_C.answer())"
        return int(run(sys.executable, "-c", script, cwd=self.root).stdout)


@pytest.fixture
def tree(tmp_path):
    return Tree(tmp_path / "tree")


def search_path(library: Path) -> list[str]:
    """Where the loader looks for the libraries of another."""
    dynamic = run("readelf", "-d", library).stdout
    return re.search(r"R(?:UN)?PATH.*\[(.*)\]", dynamic)[1].split(":")


def test_only_changed_files_are_compiled(tree):
    sources = ["csrc/array.c", "csrc/cpu/answer.c", "csrc/python/module.c", "csrc/status.c"]
    assert tree.compiled(MAKEFLAGS="n") == sources  # of another make, above this one
    assert tree.answer() == 42
    assert tree.build() == (0, "")
    assert f"needle: {sources[0]}\n" in tree.build("-fi")[1]
    assert tree.compiled() == []
    tree.write("csrc/needle.h", DEBUG_ANSWER)
    assert tree.compiled() == ["csrc/cpu/answer.c", "csrc/python/module.c"]
    assert tree.answer() == 43
    (tree.root / "csrc/needle.h").rename(tree.root / "csrc/answer.h")
    for path in ("csrc/cpu/answer.c", "csrc/python/module.c"):
        tree.write(path, (tree.root / path).read_text().replace("needle.h", "answer.h"))
    assert tree.compiled() == ["csrc/cpu/answer.c", "csrc/python/module.c"]
    assert tree.compiled(NEEDLE_DEBUG="1") == sources
    assert tree.answer() == 44
    assert tree.compiled(NEEDLE_DEBUG="1") == [] and tree.compiled(CFLAGS="-DOTHER") == sources
    assert tree.compiled(CFLAGS="-DOTHER") == [] and tree.answer() == 43


def test_number_of_jobs_reaches_make(tree):
    status, said = tree.build(NEEDLE_JOBS="many")  # which make refuses
    assert status != 0 and "needle does not build" in said


def test_editable_install_builds_into_the_checkout(tree):
    """As pip does: it tells the command after its options."""
    code = """import runpy
from setuptools.command.build_ext import build_ext
options = build_ext.finalize_options
build_ext.finalize_options = lambda self: (options(self), setattr(self, "editable_mode", True))
runpy.run_path("setup.py", run_name="__main__")
"""
    env = {"NEEDLE_CUDA": "0", "NEEDLE_BLAS": "builtin", "NEEDLE_MARCH": "none"}
    built = run(sys.executable, "-W", "ignore", "-c", code, "-q", "build_ext", cwd=tree.root, **env)
    assert built.returncode == 0 and tree.answer() == 42, built.stderr


@pytest.mark.parametrize(
    "file, text, said",
    [
        ("csrc/cpu/answer.c", "int cpu_answer(void) { return }\n", "csrc/cpu/answer.c:1"),
        ("cuda/one.cu", "int absent(); int one() { return absent(); }\n", "absent"),
        ("cuda/one.cu", "#error KILL\n", ""),
    ],
)
def test_a_build_that_ends_early_leaves_the_old_one(tree, toolkit, file, text, said):
    """A file does not compile, a function is missing, or the build is interrupted: a core that
    needs the other library waits for it."""
    settings = {"NEEDLE_CUDA": "1", "NEEDLE_CUDA_ARCHS": "80", "CUDA_HOME": str(toolkit)}
    tree.compiled(**settings)
    before, backend = (tree.root / file).read_text(), (tree.root / "needle/_cuda.so").read_bytes()
    tree.write("csrc/needle.h", "#define ANSWER 43\n")
    tree.write(file, text)
    status, shown = tree.build(**settings)
    assert status != 0 and said in shown and "Traceback" not in shown
    if said:
        assert shown.splitlines()[-1].startswith("needle: error: needle does not build")
    assert tree.answer() == 42 and (tree.root / "needle/_cuda.so").read_bytes() == backend
    tree.write(file, before)
    tree.compiled(**settings)
    assert tree.answer() == 43


def test_cuda_files_are_compiled_incrementally(tree, toolkit):
    env = {"NEEDLE_CUDA": "1", "NEEDLE_CUDA_ARCHS": "80 90", "CUDA_HOME": str(toolkit)}
    assert "cuda/one.cu" in tree.compiled(**env)
    library = tree.root / "needle/_cuda.so"
    assert library.exists()
    assert tree.compiled(**env) == []
    tree.write("cuda/shared.cuh", "#define PART 5\n")
    assert tree.compiled(**env) == ["cuda/one.cu"]
    changed = tree.compiled(**{**env, "NEEDLE_CUDA_ARCHS": "80"})
    # module.c tells the archs
    assert changed == ["csrc/python/module.c", "cuda/one.cu", "cuda/two.cpp"]
    dynamic = run("readelf", "-d", library).stdout
    assert "libcublasLt.so.13" in dynamic and str(toolkit / "lib") in dynamic
    assert "libcudart" not in dynamic
    symbols = run("nm", "-D", "--defined-only", library).stdout
    assert [line.split()[-1] for line in symbols.splitlines()] == ["needle_backend"]
    # What is for other machines looks for cuBLASLt beside itself alone.
    status, text = tree.build("--build-lib=out", **env, NEEDLE_MARCH="portable")
    assert status == 0, text
    paths = search_path(tree.root / "out/needle/_cuda.so")
    assert all(path.startswith("$ORIGIN/") for path in paths)
    # A build without CUDA does not keep an older backend, which may not fit it.
    tree.compiled()
    assert not library.exists()


# ---- a build for other machines ------------------------------------------------------------------

CHECKED = """
import needle as ndl
from needle.testing import CASES, call, check, prepare
for case in CASES * %d:
    values = prepare(case, "float32")
    check(case, values, call(case, values, "float32", ndl.cpu()), "float32")
print(ndl.cpu().properties()["products"])
"""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="one level on this processor")
def test_portable_build_chooses_kernels_by_the_processor(tmp_path):
    """Each level against the references, then on processors without AVX-512 and without AVX2."""
    base = Path(os.environ.get("PORTABLE_BUILD") or tmp_path)  # .ci/run has one
    if base == tmp_path:
        words = ["-W", "ignore", "setup.py", "-q", "build", "--build-base", base]
        made = run(sys.executable, *words, NEEDLE_CUDA="0", NEEDLE_MARCH="portable")
        assert made.returncode == 0, made.stderr
    (lib,), (objects,) = base.glob("lib.*"), base.glob("temp.*")
    blas = importlib.util.find_spec("scipy_openblas32")
    if blas:  # beside needle, as pip installs it
        (lib / "scipy_openblas32").symlink_to(Path(blas.origin).parent)
        (core,) = (lib / "needle").glob("_C.*.so")
        assert search_path(core) == ["$ORIGIN/../scipy_openblas32/lib"]
    for level, vector in (("x86-64-v3", "%ymm"), ("x86-64-v4", "%zmm")):
        code = objects / level / "csrc/cpu/attention_fwd.o"
        code = run("objdump", "-d", code).stdout
        assert vector in code and ("%zmm" in code) == (vector == "%zmm")

    def said_by(times: int, *emulator: str, **environment: str) -> str:
        command = *emulator, sys.executable, "-c", CHECKED % times
        done = run(*command, cwd=tmp_path, PYTHONPATH=lib, **environment)
        return (done.stdout or done.stderr).splitlines()[-1]

    flags = re.search(r"(?m)^flags\s*:(.*)", Path("/proc/cpuinfo").read_text())[1].split()
    best = 4 if {"avx512bw", "avx512cd", "avx512dq", "avx512vl"} <= set(flags) else 3
    assert said_by(1).startswith(f"x86-64-v{best}, ")
    assert said_by(1, NEEDLE_CPU_LEVEL="x86-64-v3").startswith("x86-64-v3, ")
    said = "ImportError: .*this processor lacks x87; needle is built for x86-64-v4 x86-64-v3"
    assert re.match(said, said_by(0, NEEDLE_CPU_LEVEL="x87"))
    if shutil.which("qemu-x86_64"):
        for model, said in (("Haswell", "x86-64-v3, "), ("Nehalem", "ImportError: .* lacks AVX2")):
            emulator = ("qemu-x86_64", "-cpu", model)
            shown = said_by(0, *emulator, NEEDLE_OPENBLAS_CORETYPE=model)
            assert re.match(said, shown), model
