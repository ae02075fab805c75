"""Build needle: needle/_C.<abi>.so from csrc/, and needle/_cuda.so from cuda/ where CUDA is wanted.

Imports nothing but the standard library, setuptools and numpy. Compiles by itself rather than
through setuptools: C and CUDA files in parallel, only what changed (header dependencies come from
the compilers, changed flags count as a change). Objects lie under build/.

Environment
  NEEDLE_CUDA=auto|1|0   auto (default): build the CUDA backend when both a toolkit and an NVIDIA
                         driver are here, else say in one line what was missing; 1: build it or
                         fail; 0: never look
  NEEDLE_CUDA_ARCHS      e.g. "80 90a" or "all"; default: the GPUs present, else all
  NEEDLE_BLAS=auto|scipy|system|builtin   where the CPU's matrix products come from
  NEEDLE_MARCH=native    what -march= gets; "none" leaves it out
  NEEDLE_JOBS            compilers at a time; default: the cores this process may use
  NEEDLE_WERROR=1        warnings are errors
  CC CXX CFLAGS LDFLAGS NVCC_FLAGS CUDA_HOME CUDA_PATH   as usual
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import ctypes
import dataclasses
import fcntl
import functools
import glob
import hashlib
import importlib.util
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
ALL_ARCHS = ("80", "86", "89", "90a", "100", "120", "121")
NVIDIA_PIP = (
    "pip install nvidia-cuda-nvcc nvidia-nvvm nvidia-cuda-crt nvidia-cuda-cccl "
    "nvidia-cuda-runtime nvidia-cublas"
)


def say(text: str) -> None:
    print(f"needle: {text}", flush=True)


def fail(text: str):
    """End the build with one line."""
    raise SystemExit(f"needle: error: {text}")


def setting(name: str, default: str, allowed: tuple[str, ...]) -> str:
    value = os.environ.get(name, "").strip().lower() or default
    if value not in allowed:
        fail(f"{name}={value!r} is not one of {', '.join(allowed)}")
    return value


def output_of(command: list[str]) -> str | None:
    """What the command prints, or None when it cannot run or fails."""
    try:
        done = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            timeout=60,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.decode(errors="replace")


@functools.cache
def version_line(compiler: str) -> str:
    text = output_of([*shlex.split(compiler), "--version"]) or ""
    return text.splitlines()[0].strip() if text else "unknown"


def job_count() -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    wanted = os.environ.get("NEEDLE_JOBS", "").strip()
    if wanted and not (wanted.isdigit() and int(wanted) > 0):
        fail(f"NEEDLE_JOBS={wanted!r} is not a positive whole number")
    return int(wanted) if wanted else max(1, cores or 1)


def commit() -> str:
    if not (ROOT / ".git").exists():
        return "unknown"
    text = output_of(["git", "-C", str(ROOT), "rev-parse", "--short=12", "HEAD"])
    return text.strip() if text else "unknown"


# ---- what to compile, and only when it changed ---------------------------------------------------


@dataclasses.dataclass
class Compile:
    """One source into one object. `command` lacks the source, the output and the depfile."""

    source: Path
    object: Path
    command: list[str]
    identity: str  # of the compiler: a new version recompiles

    @property
    def digest(self) -> str:
        text = "\0".join([*self.command, self.identity])
        return hashlib.sha256(text.encode()).hexdigest()

    def is_current(self) -> bool:
        """True when the object is newer than all that it was made from, by the same command."""
        stamp = self.object.with_suffix(".cmd")
        try:
            made = self.object.stat().st_mtime_ns
            if stamp.read_text() != self.digest:
                return False
            return all(os.stat(path).st_mtime_ns <= made for path in self.dependencies())
        except OSError:
            return False

    def dependencies(self) -> list[str]:
        text = self.object.with_suffix(".d").read_text().replace("\\\n", " ")
        names = re.split(r"(?<!\\)\s+", text.split(":", 1)[1].strip())
        return [str(self.source), *(str(ROOT / n.replace("\\ ", " ")) for n in names if n)]

    def run(self) -> str:
        """Compile, atomically; returns the compiler's messages; raises SystemExit on failure."""
        self.object.parent.mkdir(parents=True, exist_ok=True)
        self.object.with_suffix(".cmd").unlink(missing_ok=True)
        partial = self.object.with_suffix(".partial.o")
        started = time.time_ns()
        command = [
            *self.command,
            "-MMD",
            "-MF",
            str(self.object.with_suffix(".d")),
            "-c",
            str(self.source.relative_to(ROOT)),
            "-o",
            str(partial),
        ]
        done = subprocess.run(
            command,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
        )
        text = done.stdout.decode(errors="replace")
        # ptxas says by a C75xx remark that it serialised wgmma or ignored setmaxnreg: a kernel
        # that still gives right numbers, slowly. Nobody would see it go by.
        advised = strict() and re.search(r"\(C75\d\d\)", text)
        if done.returncode or advised:
            partial.unlink(missing_ok=True)
            print(shlex.join(command), text, sep="\n", file=sys.stderr, flush=True)
            fail(
                f"{self.source.relative_to(ROOT)} does not compile (the compiler's words are above)"
            )
        os.utime(partial, ns=(started, started))  # a source saved meanwhile is newer
        os.replace(partial, self.object)
        self.object.with_suffix(".cmd").write_text(self.digest)
        return text


def compile_all(jobs: list[Compile]) -> int:
    """Compile those that are not current, in parallel; returns how many were."""
    stale = [job for job in jobs if not job.is_current()]
    with concurrent.futures.ThreadPoolExecutor(job_count()) as pool:
        running = {}
        for job in stale:
            running[pool.submit(job.run)] = job
        try:
            for number, done in enumerate(concurrent.futures.as_completed(running), 1):
                text = done.result()
                say(f"[{number}/{len(stale)}] {running[done].source.relative_to(ROOT)}")
                if text.strip():
                    print(text.rstrip(), flush=True)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return len(stale)


def link(command: list[str], objects: list[Path], out: Path, stamps: Path) -> bool:
    """Link when the output is older than an object or was made by another command."""
    stamp = stamps / (hashlib.sha256(str(out).encode()).hexdigest()[:16] + ".link")
    digest = hashlib.sha256("\0".join([*command, *map(str, objects)]).encode()).hexdigest()
    try:
        made = out.stat().st_mtime_ns
        if stamp.read_text() == digest and all(o.stat().st_mtime_ns <= made for o in objects):
            return False
    except OSError:
        pass  # no output or no stamp yet: link
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_name(f".{out.name}.partial")
    # Objects come before the libraries that they need.
    full = [command[0], *command[1:2], *map(str, objects), *command[2:], "-o", str(partial)]
    done = subprocess.run(full, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    text = done.stdout.decode(errors="replace")
    if done.returncode:
        partial.unlink(missing_ok=True)
        print(shlex.join(full), text, sep="\n", file=sys.stderr, flush=True)
        fail(f"{out.name} does not link (the linker's words are above)")
    if text.strip():
        print(text.rstrip(), flush=True)
    os.replace(partial, out)  # never written in place: a running process may have it mapped
    stamp.write_text(digest)
    return True


def strict() -> bool:
    return setting("NEEDLE_WERROR", "0", ("0", "1")) == "1"


# ---- the C core ----------------------------------------------------------------------------------


@functools.cache
def c_compiler() -> str:
    configured = (sysconfig.get_config_var("CC") or "").split()
    for name in (os.environ.get("CC"), configured[0] if configured else None, "cc", "gcc", "clang"):
        if name and shutil.which(shlex.split(name)[0]):
            return name
    fail("no C compiler: apt install gcc (Fedora: dnf install gcc), or set CC")


@functools.cache
def cxx_compiler() -> str:
    for name in (os.environ.get("CXX"), "c++", "g++", "clang++"):
        if name and shutil.which(shlex.split(name)[0]):
            return name
    fail("no C++ compiler, which nvcc needs: apt install g++ (Fedora: dnf install gcc-c++)")


def accepts(
    flags: list[str],
    source: str = "int main(void) { return 0; }\n",
    libraries: list[str] | None = None,
) -> bool:
    """Does the C compiler build this program with these flags?"""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "probe.c")
        path.write_text(source)
        command = [
            *shlex.split(c_compiler()),
            *flags,
            str(path),
            "-o",
            str(path.with_suffix("")),
            *(libraries or []),
        ]
        return output_of(command) is not None


def march_flags() -> tuple[list[str], str]:
    """-march (or -mcpu) for NEEDLE_MARCH, and how to call it in build_info()."""
    wanted = os.environ.get("NEEDLE_MARCH", "").strip() or "native"
    if wanted == "none":
        return [], "baseline"
    for flag in (f"-march={wanted}", f"-mcpu={wanted}"):
        if accepts([flag, "-Werror"]):
            return [flag], wanted
    if wanted != "native":
        fail(f"NEEDLE_MARCH={wanted}: {version_line(c_compiler())} knows no such processor")
    say(f"{version_line(c_compiler())} knows no -march=native: code for the baseline processor")
    return [], "baseline"


def warning_flags() -> list[str]:
    return ["-Wall", "-Wextra", *(["-Werror"] if strict() else [])]


def own_site() -> Path:
    """This environment's package folder. (An isolated build also has a temporary one on sys.path,
    which will be gone at run time: no rpath may count on that.)"""
    return Path(sysconfig.get_path("platlib"))


def site_folders() -> list[Path]:
    """Where this interpreter finds packages now, its own environment's folder first."""
    return list(dict.fromkeys([own_site(), *(Path(p) for p in sys.path if p)]))


@dataclasses.dataclass
class Blas:
    name: str
    compile: list[str]
    link: list[str]


def find_blas() -> Blas:
    wanted = setting("NEEDLE_BLAS", "auto", ("auto", "scipy", "system", "builtin"))
    if wanted in ("auto", "scipy"):
        spec = importlib.util.find_spec("scipy_openblas32")
        if spec and spec.origin:
            folder = Path(spec.origin).parent
            places = [folder, own_site() / "scipy_openblas32"]
            rpaths = [
                "$ORIGIN/../scipy_openblas32/lib",
                *dict.fromkeys(str(place / "lib") for place in places),
            ]
            return Blas(
                "scipy-openblas32",
                ["-DNEEDLE_BLAS_SCIPY=1", f"-I{folder / 'include'}"],
                [
                    f"-L{folder / 'lib'}",
                    "-lscipy_openblas",
                    *(f"-Wl,-rpath,{path}" for path in rpaths),
                ],
            )
        if wanted == "scipy":
            fail(
                "NEEDLE_BLAS=scipy, but this Python has no scipy-openblas32: "
                "pip install scipy-openblas32"
            )
    if wanted in ("auto", "system"):
        # By prototype, not by header: where cblas.h lies differs from system to system.
        source = (
            "float cblas_sdot(int, const float *, int, const float *, int);\n"
            "int main(void) { float x = 1; return cblas_sdot(1, &x, 1, &x, 1) != 1; }\n"
        )
        for library in ("openblas", "cblas", "blas"):
            if accepts([], source, [f"-l{library}"]):
                return Blas(f"system lib{library}", ["-DNEEDLE_BLAS_SYSTEM=1"], [f"-l{library}"])
        if wanted == "system":
            fail(
                "NEEDLE_BLAS=system, but none of -lopenblas, -lcblas and -lblas gives cblas: "
                "apt install libopenblas-dev"
            )
    return Blas("built-in", [], [])


def core_flags() -> list[str]:
    """Flags of every C file. gnu17 rather than c17: POSIX names, and a*b+c may become an FMA.
    errno and floating-point traps are never looked at here, and stop vectorisation."""
    openmp = ["-fopenmp"] if accepts(["-fopenmp"]) else []
    if not openmp:
        say(f"{version_line(c_compiler())} has no OpenMP: the CPU backend will use one core")
    return [
        "-std=gnu17",
        "-O3",
        "-g1",
        "-fPIC",
        "-fvisibility=hidden",
        "-fno-math-errno",
        "-fno-trapping-math",
        *openmp,
        *warning_flags(),
    ]


def python_include() -> str:
    for key in ("include", "platinclude"):
        folder = sysconfig.get_path(key)
        if folder and Path(folder, "Python.h").exists():
            return folder
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    fail(
        f"Python.h of Python {version} is missing: apt install python{version}-dev "
        "(Fedora: dnf install python3-devel)"
    )


def quoted(name: str, value: str) -> str:
    text = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'-D{name}="{text}"'


def build_core(objects: Path, out: Path, cuda: Cuda | None) -> tuple[int, bool]:
    """Compile and link needle._C; returns (files compiled, was linked)."""
    numpy = importlib.util.find_spec("numpy")
    if numpy is None:
        fail(f"numpy is missing: {sys.executable} -m pip install numpy")
    import numpy

    python = python_include()
    blas = find_blas()
    say(
        f"CPU matrix products: {blas.name}"
        + ("" if "scipy" in blas.name else " (pip install scipy-openblas32 for the fastest)")
    )
    march, march_name = march_flags()
    extra = shlex.split(os.environ.get("CFLAGS", ""))
    flags = [*core_flags(), *march, *extra, "-Icsrc"]
    compiler = c_compiler()
    identity = version_line(compiler) + (processor() if march_name == "native" else "")
    info = [
        quoted("NEEDLE_BUILD_VERSION", version()),
        quoted("NEEDLE_BUILD_COMMIT", commit()),
        quoted("NEEDLE_BUILD_COMPILER", version_line(compiler)),
        quoted("NEEDLE_BUILD_MARCH", march_name),
        quoted("NEEDLE_BUILD_BLAS", blas.name),
        quoted("NEEDLE_BUILD_CUDA", cuda.version if cuda else ""),
        quoted("NEEDLE_BUILD_CUDA_ARCHS", " ".join(cuda.archs) if cuda else ""),
    ]
    jobs = []
    for source in sorted(ROOT.glob("csrc/**/*.c")):
        command = [*shlex.split(compiler), *flags, *blas.compile]
        if source.parent.name == "python":
            command += [f"-I{python}", f"-I{numpy.get_include()}"]
        if source.name == "module.c":  # alone, so that a new commit recompiles one file
            command += info
        jobs.append(Compile(source, object_of(objects, source), command, identity))
    count = compile_all(jobs)
    # Python's own symbols stay open until import, so -z,defs cannot be asked for here; the
    # prototypes that ops.def expands to have hidden visibility instead, which is as strict.
    shared = (
        ["-dynamiclib", "-undefined", "dynamic_lookup"] if sys.platform == "darwin" else ["-shared"]
    )
    openmp = [f for f in flags if f == "-fopenmp"]
    command = [
        *shlex.split(compiler)[:1],
        shared[0],
        *shlex.split(compiler)[1:],
        *shared[1:],
        *openmp,
        *blas.link,
        "-lm",
        *shlex.split(os.environ.get("LDFLAGS", "")),
    ]
    return count, link(command, [job.object for job in jobs], out, objects)


def object_of(objects: Path, source: Path) -> Path:
    return objects / source.relative_to(ROOT).with_suffix(".o")


def processor() -> str:
    """What -march=native means here, so that a tree on a shared disk recompiles elsewhere."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor()
    lines = [
        line
        for line in text.splitlines()
        if line.startswith(("model name", "flags", "Features", "CPU part"))
    ]
    return "\n".join(dict.fromkeys(lines))


def version() -> str:
    text = (ROOT / "pyproject.toml").read_text()
    return re.search(r'^version = "([^"]+)"', text, re.MULTILINE).group(1)


# ---- the CUDA backend ----------------------------------------------------------------------------


@dataclasses.dataclass
class Cuda:
    """A toolkit that can build the backend, and for which architectures."""

    nvcc: Path
    version: str
    include: list[Path]
    libraries: list[Path]
    cublaslt: Path
    archs: list[str] = dataclasses.field(default_factory=list)

    def knows(self) -> set[str]:
        text = output_of([str(self.nvcc), "--list-gpu-code"]) or ""
        known = set(re.findall(r"sm_(\d+[a-z]?)", text))
        return known | ({"90a"} if "90" in known else set())


def parse_archs(text: str) -> list[str]:
    """ "8.0; sm_90, 120" -> ["80", "90a", "120"]. 90 always means 90a: wgmma and TMA need it."""
    archs = []
    for word in re.split(r"[\s,;]+", text.strip()):
        if not word:
            continue
        if word.lower() == "all":
            archs += ALL_ARCHS
            continue
        match = re.fullmatch(r"(?:sm_|compute_)?(\d{1,2})\.?(\d)(a|f)?", word.lower())
        if not match:
            fail(f'NEEDLE_CUDA_ARCHS: {word!r} is no architecture; write e.g. "80 90a" or "all"')
        arch = "".join(part or "" for part in match.groups())
        archs.append("90a" if arch == "90" else arch)
    return sorted(set(archs), key=lambda a: (int(a.rstrip("af")), a))


def gencode(archs: list[str]) -> list[str]:
    return [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in archs]


def toolkit_roots() -> list[tuple[str, Path]]:
    """(how it was found, folder that holds bin/nvcc), in the order to try them."""
    roots = [
        (f"${name}", Path(os.environ[name]))
        for name in ("CUDA_HOME", "CUDA_PATH")
        if os.environ.get(name)
    ]
    on_path = shutil.which("nvcc")
    if on_path:
        roots.append(("nvcc on the PATH", Path(os.path.realpath(on_path)).parent.parent))
    roots.append(("/usr/local/cuda", Path("/usr/local/cuda")))
    for folder in site_folders():
        for pattern in ("nvidia/cu[0-9]*", "nvidia/cuda_nvcc"):
            roots += [
                ("NVIDIA's pip packages", Path(p))
                for p in sorted(glob.glob(str(folder / pattern)), reverse=True)
            ]
    return roots


def find_toolkit() -> Cuda | str:
    """The first complete toolkit, or why there is none."""
    reasons = []
    for how, root in toolkit_roots():
        nvcc = root / "bin" / "nvcc"
        text = output_of([str(nvcc), "--version"]) if nvcc.exists() else None
        match = re.search(r"release (\d+\.\d+)", text or "")
        if not match:
            if how.startswith("$"):
                reasons.append(f"{how}={root} has no working bin/nvcc")
            continue
        machine = {"arm64": "aarch64"}.get(platform.machine(), platform.machine())
        targets = [
            f"targets/{machine}-linux",
            f"targets/{'sbsa' if machine == 'aarch64' else machine}-linux",
        ]
        packages = root.parent  # of pip's layout: nvidia/cuda_runtime, nvidia/cublas beside it
        include = [root / "include", *(root / t / "include" for t in targets)]
        libraries = [root / "lib64", root / "lib", *(root / t / "lib" for t in targets)]
        if packages.name == "nvidia":
            include += sorted(packages.glob("*/include"))
            libraries += sorted(packages.glob("*/lib"))
        libraries += [Path(f"/usr/lib/{machine}-linux-gnu"), Path("/usr/lib64")]
        include = [
            p
            for p in dict.fromkeys(include)
            if (p / "cuda_runtime_api.h").exists() or (p / "cublasLt.h").exists()
        ]
        libraries = [p for p in dict.fromkeys(libraries) if p.is_dir()]
        cublaslt = next(
            (
                Path(f)
                for p in libraries
                for f in sorted(glob.glob(str(p / "libcublasLt.so*")), key=len)
            ),
            None,
        )
        if cublaslt is None:
            reasons.append(f"{nvcc} has no libcublasLt.so beside it (pip install nvidia-cublas)")
        elif not any((p / "libcudart_static.a").exists() for p in libraries):
            reasons.append(
                f"{nvcc} has no libcudart_static.a beside it (pip install nvidia-cuda-runtime)"
            )
        else:
            say(f"CUDA toolkit {match.group(1)}: {root} (from {how})")
            return Cuda(nvcc, match.group(1), include, libraries, cublaslt)
    return "; ".join(reasons) or (
        "no CUDA toolkit (looked at CUDA_HOME, CUDA_PATH, nvcc on the "
        f"PATH, /usr/local/cuda, NVIDIA's pip packages: {NVIDIA_PIP})"
    )


def find_gpus() -> tuple[list[str], str | None]:
    """(architectures of the GPUs here, None), or ([], why there is no NVIDIA driver)."""
    text = output_of(["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"])
    found = re.findall(r"^\s*(\d+\.\d)\s*$", text or "", re.MULTILINE)
    if found:
        return parse_archs(" ".join(found)), None
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return [], "no NVIDIA driver (libcuda.so.1 does not load, nvidia-smi shows no GPU)"
    count = ctypes.c_int()
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return [], None
    for index in range(count.value):
        device, major, minor = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
        driver.cuDeviceGet(ctypes.byref(device), index)
        driver.cuDeviceGetAttribute(ctypes.byref(major), 75, device)
        driver.cuDeviceGetAttribute(ctypes.byref(minor), 76, device)
        found.append(f"{major.value}.{minor.value}")
    return parse_archs(" ".join(found)), None


def choose_cuda() -> Cuda | None:
    """What NEEDLE_CUDA asks for: a toolkit with its architectures, or None."""
    wanted = setting("NEEDLE_CUDA", "auto", ("auto", "1", "0"))
    if wanted == "0":
        return None
    present, no_driver = find_gpus()
    toolkit = find_toolkit() if wanted == "1" or not no_driver else no_driver
    if isinstance(toolkit, str):
        if wanted == "1":
            fail(f"NEEDLE_CUDA=1, but {toolkit}")
        say(
            f"*** THE CUDA BACKEND IS NOT BUILT: {toolkit}. "
            "NEEDLE_CUDA=1 forces it, NEEDLE_CUDA=0 stops looking. ***"
        )
        return None
    listed = os.environ.get("NEEDLE_CUDA_ARCHS", "").strip()
    archs = parse_archs(listed) if listed else present or list(ALL_ARCHS)
    known = toolkit.knows()
    toolkit.archs = [
        arch for arch in archs if arch.rstrip("f") in known or arch.rstrip("af") in known
    ]
    dropped = [arch for arch in archs if arch not in toolkit.archs]
    if not toolkit.archs:
        fail(
            f"nvcc {toolkit.version} ({toolkit.nvcc}) knows none of sm_{', sm_'.join(dropped)}: "
            "install a newer CUDA toolkit, or set NEEDLE_CUDA=0"
        )
    if dropped:
        say(f"nvcc {toolkit.version} does not know sm_{', sm_'.join(dropped)}: left out")
    say(f"CUDA architectures: {' '.join(toolkit.archs)}")
    return toolkit


def build_cuda(objects: Path, out: Path, cuda: Cuda) -> tuple[int, bool]:
    """Compile and link needle/_cuda.so; returns (files compiled, was linked)."""
    host = ["-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra", *(["-Werror"] if strict() else [])]
    flags = [
        "-std=c++17",
        "-O3",
        "-lineinfo",
        "-Icsrc",
        "-Icuda",
        *(f"-I{path}" for path in cuda.include),
        *gencode(cuda.archs),
        "-Wno-deprecated-gpu-targets",
        *(["-Werror", "all-warnings"] if strict() else []),
        *(["-ccbin", os.environ["CXX"]] if os.environ.get("CXX") else []),
        "-Xcompiler",
        ",".join(host),
        *shlex.split(os.environ.get("NVCC_FLAGS", "")),
    ]
    cxx = cxx_compiler()
    identity = f"{cuda.nvcc} {output_of([str(cuda.nvcc), '--version'])} {version_line(cxx)}"
    jobs = [
        Compile(source, object_of(objects, source), [str(cuda.nvcc), *flags], identity)
        for source in sorted(ROOT.glob("cuda/*.cu"))
    ]
    if not jobs:
        fail("there is no cuda/*.cu to build the CUDA backend from")
    # status.c and array.c are in both shared objects: each has its own copy, nothing is exported.
    plain = [
        *shlex.split(c_compiler()),
        "-std=gnu17",
        "-O3",
        "-fPIC",
        "-fvisibility=hidden",
        *warning_flags(),
        "-Icsrc",
    ]
    jobs += [
        Compile(
            source, objects / "cuda" / f"shared_{source.stem}.o", plain, version_line(c_compiler())
        )
        for source in (ROOT / "csrc" / "status.c", ROOT / "csrc" / "array.c")
    ]
    count = compile_all(jobs)
    # The places where cuBLASLt may lie at run time: where it was found now, then NVIDIA's pip
    # packages beside needle, wherever the wheel got installed.
    pip = (f"cu{cuda.version.split('.')[0]}", "cublas")
    folders = [cuda.cublaslt.parent, *(own_site() / "nvidia" / name / "lib" for name in pip)]
    rpaths = [*map(str, folders), *(f"$ORIGIN/../nvidia/{name}/lib" for name in pip)]
    command = [
        *shlex.split(cxx)[:1],
        "-shared",
        *shlex.split(cxx)[1:],
        "-Wl,-z,defs",
        "-Wl,--exclude-libs,ALL",
        *(f"-L{path}" for path in cuda.libraries),
        "-lcudart_static",
        str(cuda.cublaslt),
        "-lrt",
        "-lpthread",
        "-ldl",
        *(f"-Wl,-rpath,{path}" for path in dict.fromkeys(rpaths)),
        *shlex.split(os.environ.get("LDFLAGS", "")),
    ]
    return count, link(command, [job.object for job in jobs], out, objects)


# ---- setuptools ----------------------------------------------------------------------------------


@contextlib.contextmanager
def only_one(folder: Path):
    """Two builds in one tree take turns."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


class BuildExt(build_ext):
    """build_ext that builds both shared objects itself, in place or into build_lib."""

    def run(self) -> None:
        in_place = self.inplace or getattr(self, "editable_mode", False)
        package = ROOT / "needle" if in_place else Path(self.build_lib).resolve() / "needle"
        core = package / Path(self.get_ext_filename("needle._C")).name
        objects = ROOT / "build" / f"{sysconfig.get_platform()}-{sys.implementation.cache_tag}"
        with only_one(objects):
            if self.force:
                shutil.rmtree(objects, ignore_errors=True)
                objects.mkdir(parents=True)
            cuda = choose_cuda()
            compiled, linked = build_core(objects, core, cuda)
            backend = package / "_cuda.so"
            if cuda:
                more, also = build_cuda(objects, backend, cuda)
                compiled, linked = compiled + more, linked or also
            elif backend.exists():
                backend.unlink()
                say(f"removed {backend.name} of an earlier build: it need not fit this one")
        if compiled or linked:
            say(f"compiled {compiled} file(s) into {core.name}" + (" and _cuda.so" if cuda else ""))
        else:
            say("nothing to compile: all is up to date")
        self.add_harness_hook()

    def add_harness_hook(self) -> None:
        """A .pth file works in site-packages only: it goes there with the package, or, from an
        editable install, which leaves the package in its place, without."""
        if getattr(self, "editable_mode", False):
            site = self.get_finalized_command("install").install_lib
        elif self.inplace:
            return  # nothing is installed
        else:
            site = self.build_lib
        for name in ("_needle_lm_eval.py", "needle_lm_eval.pth"):
            self.copy_file(str(ROOT / "packaging" / name), site)


if __name__ == "__main__":
    # The Extension only tells setuptools that the wheel depends on the platform.
    setup(ext_modules=[Extension("needle._C", [])], cmdclass={"build_ext": BuildExt})
