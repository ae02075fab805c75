"""Build needle: needle/_C.<abi>.so from csrc/, and needle/_cuda.so from cuda/ where CUDA is wanted.

Imports nothing but the standard library, setuptools and numpy, and compiles by itself rather than
through setuptools: C and CUDA files in parallel, only what changed (building/steps.py).

Environment
  NEEDLE_CUDA=auto|1|0   auto (default): build the CUDA backend when both a toolkit and an NVIDIA
                         driver are here, else say in one line what was missing; 1: build it or
                         fail; 0: never look
  NEEDLE_CUDA_ARCHS      e.g. "80 90a" or "all"; default: the GPUs present, else all
  NEEDLE_BLAS=auto|scipy|system|builtin   where the CPU's matrix products come from
  NEEDLE_MARCH=native    what -march= gets; "none" leaves it out; "portable", for wheels: the
                         CPU's kernels once for each of LEVELS, chosen when needle is imported
  NEEDLE_JOBS            compilers at a time; default: the cores this process may use
  NEEDLE_WERROR=1        warnings are errors
  NEEDLE_DEBUG=1         check indices in CUDA kernels, wait after each operation; the core -O1 -g
  CC CXX CFLAGS LDFLAGS NVCC_FLAGS CUDA_HOME CUDA_PATH   as usual
"""

from __future__ import annotations

import fcntl
import importlib.util
import json
import os
import shutil
import sys
import sysconfig
import tempfile
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
LEVELS = ("x86-64-v4", "x86-64-v3")  # the best first, by __builtin_cpu_supports' names
sys.path.insert(0, str(ROOT))  # pip runs this file without its folder on the path
from building import cuda, steps  # noqa: E402
from building.steps import fail, flags_from, note, say, say_notes, setting  # noqa: E402


def c_compiler() -> list[str]:
    configured = (sysconfig.get_config_var("CC") or "").split(" ")[0]
    return steps.find_compiler("CC", f"{configured} cc gcc clang", "gcc (Fedora: dnf install gcc)")


def macros(*command: str) -> str:
    """The compiler with its flags, as it describes itself: version and processor."""
    return steps.output_of(*command, "-dM", "-E", "-x", "c", os.devnull)


def march_flags() -> tuple[list[str], str]:
    """-march for NEEDLE_MARCH, and how to call it in build_info()."""
    wanted = os.environ.get("NEEDLE_MARCH", "").strip() or "native"
    if wanted == "portable":
        return [], wanted
    if wanted == "none":
        return [], "baseline"
    if macros(*c_compiler(), f"-march={wanted}"):
        return [f"-march={wanted}"], wanted
    if wanted != "native":
        fail(f"NEEDLE_MARCH={wanted}: {' '.join(c_compiler())} knows no such processor")
    note("the compiler knows no -march=native: code for the baseline processor")
    return [], "baseline"


def find_blas(stays: bool = True) -> tuple[str, list[str], list[str]]:
    """Source of matrix products: a name, flags to compile with, flags to link with.
    `stays`: needle runs on this machine, and may look for the BLAS where that lies now."""
    wanted = setting("NEEDLE_BLAS", "auto", "scipy", "system", "builtin")
    spec = importlib.util.find_spec("scipy_openblas32")
    if wanted in ("auto", "scipy") and spec and spec.origin:
        # An isolated build finds it in a folder that will be gone when needle runs: it is looked
        # for beside the installed needle first, and in this environment's own folder as well.
        folder = Path(spec.origin).parent
        own = Path(sysconfig.get_path("platlib"), "scipy_openblas32")
        rpaths = ["$ORIGIN/../scipy_openblas32"]
        rpaths += dict.fromkeys([str(folder), str(own)]) if stays else []
        link = [f"-L{folder / 'lib'}", "-lscipy_openblas"]
        link += [f"-Wl,-rpath,{path}/lib" for path in rpaths]
        return "scipy-openblas32", ["-DNEEDLE_BLAS_SCIPY=1", f"-I{folder / 'include'}"], link
    if wanted == "scipy":
        fail(
            "NEEDLE_BLAS=scipy, but there is no such package: "
            f"{sys.executable} -m pip install scipy-openblas32"
        )
    if wanted in ("auto", "system"):
        with tempfile.TemporaryDirectory() as folder:
            # By prototype, not by header: where cblas.h lies differs from system to system.
            source = Path(folder, "probe.c")
            source.write_text("int cblas_sdot(void); int main(void) { return cblas_sdot(); }\n")
            # The others may be Netlib's reference, which is slower than the built-in product.
            for name in ("openblas",) if wanted == "auto" else ("openblas", "cblas", "blas"):
                command = [*c_compiler(), source, "-o", Path(folder, "probe"), f"-l{name}"]
                if steps.run(command)[0]:
                    return f"system lib{name}", ["-DNEEDLE_BLAS_SYSTEM=1"], [f"-l{name}"]
    if wanted == "system":
        fail(
            "NEEDLE_BLAS=system, but none of -lopenblas, -lcblas and -lblas gives cblas: "
            "apt install libopenblas-dev"
        )
    return "built-in", [], []


def python_includes() -> list[str]:
    folder = sysconfig.get_path("include")
    if not Path(folder, "Python.h").exists():
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        fail(
            f"Python.h of Python {version} is missing: apt install python{version}-dev "
            "(Fedora: dnf install python3-devel)"
        )
    import numpy

    return [f"-I{folder}", f"-I{numpy.get_include()}"]


def build_level(level: str, table: str, command: list[str], objects: Path) -> Path:
    """Compile csrc/cpu for one of LEVELS into an object that shows nothing but its table."""
    command = [*command, f"-march={level}", f"-Dcpu_backend={table}", f'-DNEEDLE_LEVEL="{level}, "']
    sources, out = sorted(ROOT.glob("csrc/cpu/*.c")), objects / level / "cpu.o"
    identity = macros(*c_compiler())
    compiles = [steps.compile_step(source, out.parent, command, identity) for source in sources]
    inputs = [step.output for step in compiles]
    objcopy = steps.output_of(*c_compiler(), "-print-prog-name=objcopy")
    edit = [objcopy, f"--keep-global-symbol={table}"]
    command = [*c_compiler(), "-r", "-nostdlib", *map(str, inputs)]
    stamp = out.with_suffix(".link")
    steps.build(compiles, steps.Step("link", command, inputs, out, stamp, edit=edit))
    return out


def build_core(
    objects: Path, out: Path, version: str, toolkit: cuda.Cuda | None, stays: bool
) -> None:
    """Compile and link needle._C."""
    compiler, (march, march_name) = c_compiler(), march_flags()
    blas, blas_compile, blas_link = find_blas(stays)
    advice = (
        ""
        if "scipy" in blas
        else f" ({sys.executable} -m pip install scipy-openblas32 is the fastest)"
    )
    note(f"CPU matrix products: {blas}{advice}")
    debug = steps.is_debug()
    if debug:
        note("a debug build: indices are checked, and each operation is waited for")
    # gnu17 rather than c17: POSIX names, and a*b+c may become an FMA. errno and floating-point
    # traps are never looked at here, and stop vectorisation. Integers wrap around, as NumPy's do:
    # what int64 arrays hold may overflow, and so may the strides of an array without elements.
    command = [
        *compiler,
        "-std=gnu17",
        *(["-O1", "-g", "-DNEEDLE_DEBUG"] if debug else ["-O3", "-g1"]),
    ]
    command += ["-fPIC", "-fvisibility=hidden", "-fopenmp", "-fwrapv"]
    command += ["-fno-math-errno", "-fno-trapping-math", "-Wall", "-Wextra", *steps.strict()]
    command += [*march, *flags_from("CFLAGS"), "-Icsrc", *blas_compile]
    has_history = (ROOT / ".git").exists()
    commit = steps.output_of("git", "rev-parse", "--short=12", "HEAD") if has_history else ""
    built = {
        "VERSION": version,
        "COMMIT": commit or "unknown",
        "COMPILER": steps.output_of(*compiler, "--version").split("\n")[0] or "unknown",
        "MARCH": march_name,
        "BLAS": blas,
        "CUDA": toolkit.version if toolkit else "",
        "CUDA_ARCHS": " ".join(toolkit.archs) if toolkit else "",
    }
    python, identity, compiles = python_includes(), macros(*compiler, *march), []
    levels = LEVELS if march_name == "portable" and "__x86_64__ 1" in identity else ()
    tables = {level: "cpu_backend_" + level.replace("-", "_") for level in levels}
    for source in sorted(ROOT.glob("csrc/**/*.c")):
        if levels and source.parent.name == "cpu":
            continue
        extra = []
        if source.parent.name == "python":
            extra += python
        if source.name == "module.c":  # alone, so that a new commit recompiles one file
            extra += [f"-DNEEDLE_BUILD_{name}={json.dumps(text)}" for name, text in built.items()]
        if levels and source.name == "backends.c":  # it chooses among the tables
            each = "".join(f'X("{level}", {table})' for level, table in tables.items())
            extra += [f"-DNEEDLE_LEVELS(X)={each}", f"-Dcpu_backend={tables[levels[-1]]}"]
        compiles.append(steps.compile_step(source, objects, [*command, *extra], identity))
    # Python's own symbols stay open until import, so -z,defs cannot be asked for here; the
    # prototypes that ops.def expands to have hidden visibility instead, which is as strict.
    inputs = [step.output for step in compiles]
    inputs += [build_level(level, table, command, objects) for level, table in tables.items()]
    command = [*compiler, "-shared", "-fopenmp", *map(str, inputs), *blas_link, "-lm"]
    command += flags_from("LDFLAGS")
    steps.build(compiles, steps.Step("link", command, inputs, out, objects / "_C.link"))


class BuildExt(build_ext):
    """build_ext that builds both shared objects itself, in place or into build_lib."""

    def run(self) -> None:
        in_place = self.inplace or getattr(self, "editable_mode", False)
        package = (ROOT if in_place else Path(self.build_lib).resolve()) / "needle"
        core, backend = package / self.get_ext_filename("_C"), package / "_cuda.so"
        objects = ROOT / self.build_temp
        if self.force:
            shutil.rmtree(objects, ignore_errors=True)
        objects.mkdir(parents=True, exist_ok=True)
        with open(objects / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # two builds in one tree take turns
            toolkit = cuda.choose_cuda()
            stays = in_place or march_flags()[1] != "portable"
            build_core(objects, core, self.distribution.get_version(), toolkit, stays)
            if toolkit:
                cuda.build_cuda(objects, backend, toolkit, stays)
            elif backend.exists():
                backend.unlink()
                say_notes()
                say(f"removed {backend.name} of an earlier build: it need not fit this one")


if __name__ == "__main__":
    if sys.platform != "linux":
        fail(f"needle needs Linux, and this is {sys.platform}: on Windows it builds in WSL 2")
    # The Extension only tells setuptools that the wheel depends on the platform.
    setup(ext_modules=[Extension("needle._C", [])], cmdclass={"build_ext": BuildExt})
