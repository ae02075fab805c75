"""Build needle: needle/_C.<abi>.so from csrc/, and needle/_cuda.so from cuda/ where CUDA is wanted.

building/choices.py decides, building/build.mk compiles what changed, by make and in parallel.

Environment
  NEEDLE_CUDA=auto|1|0   auto (default): build the CUDA backend when both a toolkit and an NVIDIA
                         driver are here, else say what was missing; 1: build it or fail; 0: never
                         look
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
import json
import os
import shlex
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

sys.path.insert(0, str(Path(__file__).resolve().parent))  # pip runs this file without its folder
from building import choices  # noqa: E402
from building.choices import ROOT, Cuda, fail, output_of, rpath, setting  # noqa: E402

WRAPPED = {"subsequent_indent": "  ", "break_long_words": False, "break_on_hyphens": False}


def core_settings(objects: Path, out: Path, version: str, cuda: Cuda | str, stays: bool) -> dict:
    """The variables of build.mk for _C; module.c's own facts go into a header beside them."""
    cc, (march, march_name) = choices.c_compiler(), choices.march_flag()
    blas, blas_flags, blas_link = choices.find_blas(stays)
    choices.notes.append(f"CPU matrix products: {blas}")
    debug, strict = (setting(f"NEEDLE_{name}", "0", "1") == "1" for name in ("DEBUG", "WERROR"))
    # gnu17 rather than c17: POSIX names, and a*b+c may become an FMA. errno and floating-point
    # traps are never looked at here, and stop vectorisation. Integers wrap around, as NumPy's do:
    # what int64 arrays hold may overflow, and so may the strides of an array without elements.
    flags = ["-std=gnu17", *(["-O1", "-g", "-DNEEDLE_DEBUG"] if debug else ["-O3", "-g1"])]
    flags += ["-fPIC -fvisibility=hidden -fopenmp -fwrapv -fno-math-errno -fno-trapping-math"]
    flags += ["-Wall -Wextra", "-Werror" * strict, march, os.environ.get("CFLAGS", "")]
    flags += ["-Icsrc", blas_flags]
    portable = march_name == "portable"
    target = output_of(*shlex.split(cc), "-dumpmachine").startswith("x86_64")
    levels = choices.LEVELS if portable and target else ()
    commit = output_of("git", "rev-parse", "--short=12", "HEAD") if (ROOT / ".git").exists() else ""
    left_out = isinstance(cuda, str)
    facts = {
        "NEEDLE_BUILD_VERSION": version,
        "NEEDLE_BUILD_COMMIT": commit or "unknown",
        "NEEDLE_BUILD_COMPILER": output_of(*shlex.split(cc), "--version").split("\n")[0],
        "NEEDLE_BUILD_MARCH": march_name,
        "NEEDLE_BUILD_BLAS": blas,
        "NEEDLE_BUILD_CUDA": "" if left_out else cuda.version,
        "NEEDLE_BUILD_CUDA_ARCHS": "" if left_out else " ".join(cuda.archs),
        "NEEDLE_LEFT_OUT": f": {cuda} when it was built" if left_out else "",
    }
    lines = [f"#define {name} {json.dumps(text)}" for name, text in facts.items()]
    if levels:  # backends.c chooses among the tables
        tables = {level: "cpu_backend_" + level.replace("-", "_") for level in levels}
        each = " ".join(f'X("{level}", {table})' for level, table in tables.items())
        lines += [f"#define NEEDLE_LEVELS(X) {each}", f"#define cpu_backend {tables[levels[-1]]}"]
    write(objects / "built.h", "\n".join(lines) + "\n")
    return {
        "CORE": relative(out),
        "CC": cc,
        "FLAGS": " ".join(filter(None, flags)),
        "PYTHON_FLAGS": choices.python_includes(),
        "BLAS_LINK": blas_link,
        "LEVELS": " ".join(levels),
        "OBJCOPY": output_of(*shlex.split(cc), "-print-prog-name=objcopy") if levels else "",
        "LDFLAGS": os.environ.get("LDFLAGS", ""),
        "IDENTITY": facts["NEEDLE_BUILD_COMPILER"],  # another compiler compiles all again
    }


def cuda_settings(out: Path, cuda: Cuda, stays: bool) -> dict:
    """The variables of build.mk for _cuda.so. `stays`: it runs on this machine, and may look for
    cuBLASLt where that lies now; else in NVIDIA's pip packages beside needle alone."""
    debug, strict = (setting(f"NEEDLE_{name}", "0", "1") == "1" for name in ("DEBUG", "WERROR"))
    host = ["-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra", *["-Werror"] * strict]
    flags = ["-std=c++17 -O3 -lineinfo -Icsrc -Icuda", *(f"-I{path}" for path in cuda.include)]
    flags += [choices.gencode(cuda.archs), "-Wno-deprecated-gpu-targets"]
    flags += [f"-Xcompiler {','.join(host)}", "-DNEEDLE_DEBUG" * debug]
    flags += ["-DNEEDLE_HOPPER" * ("90a" in cuda.archs), "-Werror all-warnings" * strict]
    flags += [f"-ccbin {os.environ['CXX']}" if os.environ.get("CXX") else ""]
    flags += [os.environ.get("NVCC_FLAGS", "")]
    pip = [f"nvidia/{name}/lib" for name in (f"cu{cuda.version.split('.')[0]}", "cublas")]
    bases = [choices.toolkit.site_folders()[0]] * stays + ["$ORIGIN/.."]
    places = [cuda.cublaslt.parent] * stays + [f"{base}/{path}" for base in bases for path in pip]
    link = [f"-L{path}" for path in cuda.libraries] + ["-lcudart_static", str(cuda.cublaslt)]
    link += ["-lrt -lpthread -ldl", *(rpath(place) for place in dict.fromkeys(places))]
    return {
        "CUDA": relative(out),
        "CXX": choices.compiler("CXX", "c++ g++ clang++", "g++"),
        "NVCC": cuda.nvcc,
        "CUDA_FLAGS": " ".join(filter(None, flags)),
        "CUDA_LINK": " ".join(link),
        "IDENTITY_CUDA": output_of(cuda.nvcc, "--version").split("\n")[-1],
    }


def relative(path: Path) -> str:
    """Return a path from ROOT, so that the objects of a copied tree are current."""
    return os.path.relpath(path, ROOT)


def write(path: Path, text: str) -> None:
    """Write a file where its text changes: what depends on it is made again then."""
    if not path.exists() or path.read_text() != text:
        path.write_text(text)


def make(objects: Path, target: str, out: Path, settings: dict) -> None:
    """Make a shared object by build.mk. SystemExit, after the compiler's words, where it fails."""
    write(objects / f"{target}.mk", "".join(f"{k} := {v}\n" for k, v in settings.items()))
    clean = {k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL")}
    command = ["make", "-f", "building/build.mk", f"O={relative(objects)}", target]
    if subprocess.run([*command, "-q"], cwd=ROOT, env=clean, capture_output=True).returncode == 0:
        return
    while choices.notes:
        print(textwrap.fill(f"needle: {choices.notes.pop(0)}", 80, **WRAPPED), flush=True)
    out.parent.mkdir(parents=True, exist_ok=True)
    jobs = [f"-j{choices.job_count()}", "--output-sync=target", "--no-print-directory"]
    if subprocess.run([*command, *jobs], cwd=ROOT, env=clean).returncode != 0:
        fail(f"{out.name} does not build (the compiler's words are above)")


class BuildExt(build_ext):
    """build_ext that lets make build both shared objects, in place or into build_lib."""

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
            cuda = choices.choose_cuda()
            stays = in_place or choices.march_flag()[1] != "portable"
            version = self.distribution.get_version()
            make(objects, "core", core, core_settings(objects, core, version, cuda, stays))
            if isinstance(cuda, Cuda):
                make(objects, "cuda", backend, cuda_settings(backend, cuda, stays))
            elif backend.exists():
                backend.unlink()
                print(f"needle: removed {backend.name} of an earlier build: it need not fit this")


if __name__ == "__main__":
    if sys.platform != "linux":
        fail(f"needle needs Linux, and this is {sys.platform}: on Windows it builds in WSL 2")
    # The Extension only tells setuptools that the wheel depends on the platform.
    setup(ext_modules=[Extension("needle._C", [])], cmdclass={"build_ext": BuildExt})
