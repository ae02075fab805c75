"""Choices of a build: compilers, processor, matrix products, CUDA and its architectures."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import platform
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
# By its path: needle is not built yet.
toolkit = SimpleNamespace(**runpy.run_path(str(ROOT / "needle/kernels/toolkit.py")))
# Those of other minor versions run what is built for a lower one.
ALL_ARCHS = ("80", "89", "90a", "100", "120")
NO_DRIVER = "no NVIDIA driver (libcuda.so.1 does not load)"
notes: list[str] = []  # lines about the choices, which are printed where something is built


def fail(text: str):
    """End the build with one line."""
    raise SystemExit(f"needle: error: {text}")


def setting(name: str, *allowed: str) -> str:
    """Return an environment variable that is one of `allowed`, by default the first."""
    value = os.environ.get(name, "").strip().lower() or allowed[0]
    if value not in allowed:
        fail(f"{name}={value!r} is not one of {', '.join(allowed)}")
    return value


def flags() -> dict[str, str]:
    """Return the variables of build.mk that the core and the CUDA backend share."""
    return {
        "DEBUG": "1" if setting("NEEDLE_DEBUG", "0", "1") == "1" else "",
        "WERROR": "-Werror" if setting("NEEDLE_WERROR", "0", "1") == "1" else "",
        "LDFLAGS": os.environ.get("LDFLAGS", ""),
    }


def output_of(*command: object) -> str:
    """Return what a command prints; empty when it cannot run or fails."""
    words = [str(word) for word in command]
    try:
        done = subprocess.run(words, cwd=ROOT, capture_output=True, timeout=60)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.decode(errors="replace").rstrip() if done.returncode == 0 else ""


def compiler(variable: str, names: str, package: str) -> str:
    """Return the command of $CC or $CXX, else the first of `names` on the PATH."""
    for name in [os.environ.get(variable), *names.split()]:
        if name and shutil.which(shlex.split(name)[0]):
            return name
    fail(f"none of {names} is here: apt install {package}, or set {variable}")


def rpath(folder: object) -> str:
    """Return the flag that makes the loader look in a folder, quoted for a makefile."""
    return shlex.quote(f"-Wl,-rpath,{folder}").replace("$", "$$")


# ---- the core ------------------------------------------------------------------------------------


def for_core(stays: bool) -> dict[str, str]:
    """Return the variables of build.mk for _C. `stays`: needle runs on this machine, and may look
    for libraries where they lie now."""
    march, march_name = march_flag()
    blas, blas_flags, blas_link = find_blas(stays)
    notes.append(f"CPU matrix products: {blas}")
    return {
        "CC": c_compiler(),
        "COMPILER": output_of(*shlex.split(c_compiler()), "--version").split("\n")[0],
        "CFLAGS": os.environ.get("CFLAGS", ""),
        "MARCH": march,
        "MARCH_NAME": march_name,
        "PORTABLE": "1" if portable() else "",
        "PYTHON_FLAGS": python_includes(),
        "BLAS": blas,
        "BLAS_FLAGS": blas_flags,
        "BLAS_LINK": blas_link,
        **flags(),
    }


def c_compiler() -> str:
    configured = (sysconfig.get_config_var("CC") or "").split(" ")[0]
    return compiler("CC", f"{configured} cc gcc clang", "gcc (Fedora: dnf install gcc)")


def portable() -> bool:
    return os.environ.get("NEEDLE_MARCH", "").strip() == "portable"


def march_flag() -> tuple[str, str]:
    """Return the -march= of NEEDLE_MARCH, and its name in build_info()."""
    wanted = os.environ.get("NEEDLE_MARCH", "").strip() or "native"
    if wanted in ("portable", "none"):
        return "", {"none": "baseline"}.get(wanted, wanted)
    probe = (*shlex.split(c_compiler()), f"-march={wanted}", "-dM", "-E", "-x", "c", os.devnull)
    if output_of(*probe):
        return f"-march={wanted}", wanted
    if wanted != "native":
        fail(f"NEEDLE_MARCH={wanted}: {c_compiler()} knows no such processor")
    notes.append("the compiler knows no -march=native: code for the baseline processor")
    return "", "baseline"


def find_blas(stays: bool = True) -> tuple[str, str, str]:
    """Return the source of matrix products: a name, flags to compile with, flags to link with."""
    wanted = setting("NEEDLE_BLAS", "auto", "scipy", "system", "builtin")
    spec = importlib.util.find_spec("scipy_openblas32")
    if wanted in ("auto", "scipy") and spec and spec.origin:
        # An isolated build finds it in a folder that will be gone when needle runs: it is looked
        # for beside the installed needle first, and in this environment's own folder as well.
        folder, own = Path(spec.origin).parent, Path(sysconfig.get_path("platlib"))
        places = [folder, own / "scipy_openblas32"] if stays else []
        link = [f"-L{folder / 'lib'}", "-lscipy_openblas"]
        link += [rpath(f"{place}/lib") for place in ("$ORIGIN/../scipy_openblas32", *places)]
        defined = f"-DNEEDLE_BLAS_SCIPY=1 -I{folder / 'include'}"
        return "scipy-openblas32", defined, " ".join(dict.fromkeys(link))
    if wanted == "scipy":
        remedy = f"{sys.executable} -m pip install scipy-openblas32"
        fail(f"NEEDLE_BLAS=scipy, but there is no such package: {remedy}")
    # The others may be Netlib's reference, which is slower than the built-in product.
    names = {"auto": ["openblas"], "system": ["openblas", "cblas", "blas"]}.get(wanted, [])
    for name in names:
        if links(f"-l{name}"):
            return f"system lib{name}", "-DNEEDLE_BLAS_SYSTEM=1", f"-l{name}"
    if wanted == "system":
        fail("NEEDLE_BLAS=system, but none of -lopenblas, -lcblas and -lblas gives cblas")
    return "built-in", "", ""


def links(library: str) -> bool:
    """True if a library has cblas, by prototype: where cblas.h lies differs between systems."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "probe.c")
        source.write_text("int cblas_sdot(void); int main(void) { return cblas_sdot(); }\n")
        command = [*shlex.split(c_compiler()), source, "-o", Path(folder, "probe"), library]
        return subprocess.run(command, capture_output=True).returncode == 0


def python_includes() -> str:
    folder = sysconfig.get_path("include")
    if not Path(folder, "Python.h").exists():
        version = f"{sys.version_info[0]}.{sys.version_info[1]}"
        package = f"python{version}-dev (Fedora: dnf install python3-devel)"
        fail(f"Python.h of Python {version} is missing: apt install {package}")
    import numpy

    return f"-I{folder} -I{numpy.get_include()}"


# ---- CUDA ----------------------------------------------------------------------------------------


class Cuda(NamedTuple):
    """A toolkit that can build the backend, and for which architectures."""

    nvcc: Path
    version: str
    include: list[Path]
    libraries: list[Path]
    cublaslt: Path
    archs: list[str] = []


def for_cuda(cuda: Cuda, stays: bool) -> dict[str, str]:
    """Return the variables of build.mk for _cuda.so. What does not stay on this machine looks for
    cuBLASLt in NVIDIA's pip packages beside needle alone."""
    cxx = os.environ.get("CXX")
    pip = [f"nvidia/{name}/lib" for name in (f"cu{cuda.version.split('.')[0]}", "cublas")]
    bases = [toolkit.site_folders()[0]] * stays + ["$ORIGIN/.."]
    places = [cuda.cublaslt.parent] * stays + [f"{base}/{path}" for base in bases for path in pip]
    link = [f"-L{path}" for path in cuda.libraries] + ["-lcudart_static", str(cuda.cublaslt)]
    link += ["-lrt -lpthread -ldl", *(rpath(place) for place in dict.fromkeys(places))]
    return {
        "CXX": compiler("CXX", "c++ g++ clang++", "g++"),
        "NVCC": f"{cuda.nvcc} -ccbin {cxx}" if cxx else str(cuda.nvcc),
        "NVCC_VERSION": output_of(cuda.nvcc, "--version").split("\n")[-1],
        "NVCC_FLAGS": os.environ.get("NVCC_FLAGS", ""),
        "GENCODE": gencode(cuda.archs),
        "CUDA_INCLUDE": " ".join(f"-I{path}" for path in cuda.include),
        "CUDA_LINK": " ".join(link),
        **flags(),
    }


def parse_archs(text: str) -> list[str]:
    """ "8.0; sm_90, 120" -> ["80", "90a", "120"]. 90 always means 90a: wgmma and TMA need it."""
    archs = []
    for word in re.split(r"[\s,;]+", text.strip().lower()):
        match = re.fullmatch(r"(?:sm_|compute_)?(\d{1,2})\.?(\d)(a|f)?", word)
        if match:
            arch = "".join(part or "" for part in match.groups())
            archs.append("90a" if arch == "90" else arch)
        elif word == "all":
            archs += ALL_ARCHS
        elif word:
            fail(f'NEEDLE_CUDA_ARCHS: {word!r} is no architecture; write e.g. "80 90a" or "all"')
    return sorted(set(archs), key=lambda a: (int(a.rstrip("af")), a))


def gencode(archs: list[str]) -> str:
    """Return nvcc's flags. The code of 86 and 89 comes from compute_80's PTX, where that is made,
    that of 120 and 121 from compute_100's: their own would be the same, at twice the time."""
    like = {"86": "80", "89": "80", "120": "100", "121": "100"}
    virtual = {arch: like[arch] if like.get(arch) in archs else arch for arch in archs}
    return " ".join(f"-gencode=arch=compute_{virtual[arch]},code=sm_{arch}" for arch in archs)


def find_toolkit() -> Cuda | str:
    """Return the first complete toolkit, or why there is none."""
    reasons = []
    for how, root in toolkit.toolkit_roots():
        nvcc = root / "bin" / "nvcc"
        release = re.search(r"release (\d+\.\d+)", output_of(nvcc, "--version"))
        if not release:
            reasons += [f"{how}={root} has no working bin/nvcc"] * how.startswith("$")
            continue
        parts = toolkit.parts(root)
        include = [part / "include" for part in parts if (part / "include").is_dir()]
        libraries = [part / lib for part in parts for lib in ("lib64", "lib")]
        libraries += [Path(f"/usr/lib/{platform.machine()}-linux-gnu"), Path("/usr/lib64")]
        libraries = [path for path in libraries if path.is_dir()]
        cublaslt = [f for path in libraries for f in sorted(path.glob("libcublasLt.so*"))]
        lacking = [("libcublasLt.so", "nvidia-cublas")] * (not cublaslt)
        if not any((path / "libcudart_static.a").exists() for path in libraries):
            lacking.append(("libcudart_static.a", "nvidia-cuda-runtime"))
        if not lacking:
            notes.append(f"CUDA toolkit {release[1]}: {root} (from {how})")
            return Cuda(nvcc, release[1], include, libraries, cublaslt[0])
        name, package = lacking[0]
        remedy = f"{sys.executable} -m pip install {package}"
        reasons.append(f"{nvcc} has no {name} beside it ({remedy})")
    looked = "CUDA_HOME, CUDA_PATH, nvcc on the PATH, /usr/local/cuda, NVIDIA's pip packages"
    return "; ".join(reasons) or f"no CUDA toolkit (looked at {looked})"


def missing_gpu() -> str | None:
    """Return the reason that the driver gives why no GPU can be used here, or None."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return NO_DRIVER
    count = ctypes.c_int()
    code = driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count))
    if code == 0 and count.value > 0:
        return None
    said = f"error {code}" if code else "none"
    return f"the NVIDIA driver shows no GPU ({said}): see nvidia-smi and CUDA_VISIBLE_DEVICES"


def choose_cuda() -> Cuda | str:
    """Return the toolkit and architectures that NEEDLE_CUDA asks for, or why CUDA is left out."""
    wanted = setting("NEEDLE_CUDA", "auto", "1", "0")
    if wanted == "0":
        return "NEEDLE_CUDA=0"
    no_driver = missing_gpu() == NO_DRIVER
    found = NO_DRIVER if no_driver and wanted == "auto" else find_toolkit()
    if isinstance(found, str):
        if wanted == "1":
            fail(f"NEEDLE_CUDA=1, but {found}")
        remedy = "NEEDLE_CUDA=1 builds for GPUs without a driver too"
        notes.append(f"for the CPU alone: {found}; {remedy}")
        return found
    asked = parse_archs(os.environ.get("NEEDLE_CUDA_ARCHS", ""))
    query = ("nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader")
    present = [] if asked or no_driver else parse_archs(output_of(*query))
    archs = asked or present or list(ALL_ARCHS)
    known = set(re.findall(r"sm_(\d+)", output_of(found.nvcc, "--list-gpu-code")))
    kept = [arch for arch in archs if arch.rstrip("af") in known]
    dropped = ", ".join(f"sm_{arch}" for arch in archs if arch not in kept)
    if not kept:
        remedy = "install a newer CUDA toolkit, or set NEEDLE_CUDA=0"
        fail(f"nvcc {found.version} ({found.nvcc}) knows none of {dropped}: {remedy}")
    if dropped:
        notes.append(f"nvcc {found.version} does not know {dropped}: left out")
    notes.append(f"CUDA architectures: {' '.join(kept)}")
    return found._replace(archs=kept)
