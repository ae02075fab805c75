"""needle/_cuda.so: whether to build it, with which toolkit, for which architectures."""

from __future__ import annotations

import ctypes
import dataclasses
import importlib.util
import os
import platform
import re
import sys
from pathlib import Path
from types import ModuleType

from building import steps
from building.steps import fail, note, output_of

# Those of other minor versions run what is built for a lower one.
ALL_ARCHS = ("80", "89", "90a", "100", "120")
NO_DRIVER = "no NVIDIA driver (libcuda.so.1 does not load)"
NVIDIA_PIP = (
    f"{sys.executable} -m pip install nvidia-cuda-nvcc nvidia-nvvm nvidia-cuda-crt "
    "nvidia-cuda-cccl nvidia-cuda-runtime nvidia-cublas"
)


@dataclasses.dataclass
class Cuda:
    """A toolkit that can build the backend, and for which architectures."""

    nvcc: Path
    version: str
    include: list[Path]
    libraries: list[Path]
    cublaslt: Path
    archs: list[str] = dataclasses.field(default_factory=list)


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


def gencode(archs: list[str]) -> list[str]:
    """The code of 86 and 89 comes from compute_80's PTX, where that is made, that of 120 and 121
    from compute_100's: their own would be the same, and making it is half of the compiler's
    time."""
    like = {"86": "80", "89": "80", "120": "100", "121": "100"}
    virtual = {arch: like[arch] if like.get(arch) in archs else arch for arch in archs}
    return [f"-gencode=arch=compute_{virtual[arch]},code=sm_{arch}" for arch in archs]


def _load_toolkit() -> ModuleType:
    """Load needle/kernels/toolkit.py by its path: needle is not built yet."""
    path = Path(__file__).resolve().parent.parent / "needle" / "kernels" / "toolkit.py"
    spec = importlib.util.spec_from_file_location("needle_toolkit", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


toolkit = _load_toolkit()
toolkit_roots = toolkit.toolkit_roots


def find_toolkit() -> Cuda | str:
    """The first complete toolkit, or why there is none."""
    reasons = []
    for how, root in toolkit_roots():
        nvcc = root / "bin" / "nvcc"
        release = re.search(r"release (\d+\.\d+)", output_of(nvcc, "--version"))
        if not release:
            if how.startswith("$"):
                reasons.append(f"{how}={root} has no working bin/nvcc")
            continue
        parts = toolkit.parts(root)
        include = [part / "include" for part in parts if (part / "include").is_dir()]
        libraries = [part / lib for part in parts for lib in ("lib64", "lib")]
        libraries += [Path(f"/usr/lib/{platform.machine()}-linux-gnu"), Path("/usr/lib64")]
        libraries = [path for path in libraries if path.is_dir()]
        cublaslt = [f for path in libraries for f in sorted(path.glob("libcublasLt.so*"))]
        cudart = [path for path in libraries if (path / "libcudart_static.a").exists()]
        if cublaslt and cudart:
            note(f"CUDA toolkit {release[1]}: {root} (from {how})")
            return Cuda(nvcc, release[1], include, libraries, cublaslt[0])
        name, package = "libcudart_static.a", "nvidia-cuda-runtime"
        if not cublaslt:
            name, package = "libcublasLt.so", "nvidia-cublas"
        reasons.append(
            f"{nvcc} has no {name} beside it ({sys.executable} -m pip install {package})"
        )
    return "; ".join(reasons) or (
        "no CUDA toolkit (looked at CUDA_HOME, CUDA_PATH, nvcc on the PATH, /usr/local/cuda, "
        f"NVIDIA's pip packages: {NVIDIA_PIP})"
    )


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


def find_gpus() -> tuple[list[str], str | None]:
    """(architectures of the GPUs here, None), or ([], why there is no NVIDIA driver)."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return [], NO_DRIVER
    text = output_of("nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader")
    return parse_archs(" ".join(re.findall(r"\d+\.\d", text))), None


def choose_cuda() -> Cuda | None:
    """The toolkit and architectures that NEEDLE_CUDA asks for, or None."""
    wanted = steps.setting("NEEDLE_CUDA", "auto", "1", "0")
    if wanted == "0":
        return None
    present, no_driver = find_gpus()
    toolkit = find_toolkit() if wanted == "1" or not no_driver else no_driver
    if isinstance(toolkit, str):
        if wanted == "1":
            fail(f"NEEDLE_CUDA=1, but {toolkit}")
        note(
            f"*** THE CUDA BACKEND IS NOT BUILT: {toolkit}. "
            "NEEDLE_CUDA=1 forces it, NEEDLE_CUDA=0 stops looking. ***"
        )
        return None
    archs = parse_archs(os.environ.get("NEEDLE_CUDA_ARCHS", "")) or present or list(ALL_ARCHS)
    known = set(re.findall(r"sm_(\d+)", output_of(toolkit.nvcc, "--list-gpu-code")))
    toolkit.archs = [arch for arch in archs if arch.rstrip("af") in known]
    dropped = ", ".join(f"sm_{arch}" for arch in archs if arch not in toolkit.archs)
    if not toolkit.archs:
        fail(
            f"nvcc {toolkit.version} ({toolkit.nvcc}) knows none of {dropped}: "
            "install a newer CUDA toolkit, or set NEEDLE_CUDA=0"
        )
    if dropped:
        note(f"nvcc {toolkit.version} does not know {dropped}: left out")
    note(f"CUDA architectures: {' '.join(toolkit.archs)}")
    return toolkit


def build_cuda(objects: Path, out: Path, cuda: Cuda, stays: bool) -> None:
    """Compile and link _cuda.so. status.c and array.c, which _C
    has compiled already, are in both shared objects: each has its own, nothing is exported.
    `stays`: it runs on this machine, and may look for cuBLASLt where that lies now."""
    cxx = steps.find_compiler("CXX", "c++ g++ clang++", "g++")
    host = ["-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra", *steps.strict()]
    command = [str(cuda.nvcc), "-std=c++17", "-O3", "-lineinfo", "-Icsrc", "-Icuda"]
    command += [f"-I{path}" for path in cuda.include]
    command += [*gencode(cuda.archs), "-Wno-deprecated-gpu-targets", "-Xcompiler", ",".join(host)]
    command += ["-DNEEDLE_DEBUG"] if steps.is_debug() else []
    command += ["-DNEEDLE_HOPPER"] if "90a" in cuda.archs else []
    command += ["-Werror", "all-warnings"] if steps.strict() else []
    command += ["-ccbin", os.environ["CXX"]] if os.environ.get("CXX") else []
    command += steps.flags_from("NVCC_FLAGS")
    identity = output_of(cuda.nvcc, "--version") + output_of(*cxx, "--version")
    sources = [p for p in sorted(steps.ROOT.glob("cuda/*")) if p.suffix in (".cpp", ".cu")]
    compiles = [steps.compile_step(source, objects, command, identity) for source in sources]
    inputs = [objects / "csrc" / name for name in ("status.o", "array.o")]
    inputs += [step.output for step in compiles]
    exports = steps.ROOT / "cuda/exports.map"
    # The places where cuBLASLt may lie at run time: where it was found now, then NVIDIA's pip
    # packages beside needle, wherever the wheel got installed.
    pip = [f"nvidia/{name}/lib" for name in (f"cu{cuda.version.split('.')[0]}", "cublas")]
    rpaths = [str(cuda.cublaslt.parent)] if stays else []
    bases = [toolkit.site_folders()[0]] * stays + ["$ORIGIN/.."]
    rpaths += [f"{base}/{path}" for base in bases for path in pip]
    command = [*cxx, "-shared", *map(str, inputs), "-Wl,-z,defs"]
    command += [f"-Wl,--version-script={exports}"]
    command += [f"-L{path}" for path in cuda.libraries]
    command += ["-lcudart_static", str(cuda.cublaslt), "-lrt", "-lpthread", "-ldl"]
    command += [f"-Wl,-rpath,{path}" for path in dict.fromkeys(rpaths)]
    command += steps.flags_from("LDFLAGS")
    link = steps.Step("link", command, [*inputs, exports], out, objects / "_cuda.link")
    steps.build(compiles, link)
