"""The CUDA toolkit: where it may be installed, where NVRTC, the headers and tools are; nvidia-smi.

The build (building/choices.py) loads this file by its path before needle is built: it imports the
standard library alone.
"""

from __future__ import annotations

import ctypes
import functools
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass
class Toolkit:
    """NVRTC's library, and the folders of the toolkit's headers (cuda_bf16.h among them)."""

    nvrtc: Path
    include: tuple[Path, ...]


def site_folders() -> list[Path]:
    """Return where this interpreter finds packages, its own environment's folder first."""
    folders = [sysconfig.get_path("platlib"), *sys.path]
    return [Path(p) for p in dict.fromkeys(folders) if p]


def toolkit_roots() -> list[tuple[str, Path]]:
    """Return (how it was found, folder that holds bin, lib and include), in the order to try."""
    names = [name for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    roots = [(f"${name}", Path(os.environ[name])) for name in names]
    nvcc = shutil.which("nvcc")
    if nvcc:
        roots.append(("nvcc on the PATH", Path(nvcc).resolve().parent.parent))
    roots.append(("/usr/local/cuda", Path("/usr/local/cuda")))
    for folder in site_folders():
        for pattern in ("nvidia/cu[0-9]*", "nvidia/cuda_nvcc", "nvidia/cuda_nvrtc"):
            found = sorted(folder.glob(pattern), reverse=True)
            roots += [("NVIDIA's pip packages", path) for path in found]
    return roots


def parts(root: Path) -> list[Path]:
    """Return the folders of a toolkit that have include and lib."""
    found = [root, *(root / f"targets/{m}-linux" for m in (platform.machine(), "sbsa"))]
    if root.parent.name == "nvidia":  # pip: nvidia/cuda_runtime, nvidia/cublas lie beside it
        found += sorted(root.parent.iterdir())
    return found


def _include(root: Path) -> tuple[Path, ...]:
    folders = [part / name for part in parts(root) for name in ("include", "include/cccl")]
    return tuple(dict.fromkeys(folder.resolve() for folder in folders if folder.is_dir()))


@functools.cache
def find_toolkit() -> Toolkit:
    """Find NVRTC and its headers. RuntimeError, with the remedy, if there is none."""
    looked = []
    for _, root in toolkit_roots():
        for folder in (root / "lib64", root / "lib"):
            looked.append(str(folder))
            libraries = sorted(folder.glob("libnvrtc.so*"))
            if libraries:
                return Toolkit(libraries[0], _include(root))
    for name in ("libnvrtc.so", "libnvrtc.so.13", "libnvrtc.so.12"):
        try:
            ctypes.CDLL(name)
        except OSError:
            continue
        return Toolkit(Path(name), _include(Path("/usr")))
    raise RuntimeError(
        f"no NVRTC, which compiles kernels (libnvrtc.so; looked in {', '.join(looked)}): install "
        f"the CUDA toolkit and set CUDA_HOME, or: {sys.executable} -m pip install "
        "nvidia-cuda-nvrtc nvidia-cuda-runtime nvidia-cuda-crt nvidia-cuda-cccl"
    )


def find_tool(name: str) -> str | None:
    """Return the path of a program of the toolkit, such as compute-sanitizer; None without it."""
    folders = [str(root / "bin") for _, root in toolkit_roots()]
    return shutil.which(name, path=os.pathsep.join([*folders, os.environ.get("PATH", "")]))


def nvidia_smi(
    what: str, fields: Sequence[str], seconds: float | None = None
) -> list[dict[str, str]]:
    """Return the rows of a query, without the fields that this driver does not know; none without
    nvidia-smi. The last field alone may hold commas. RuntimeError where it fails, or takes
    longer."""
    if shutil.which("nvidia-smi") is None:
        return []
    command = ["nvidia-smi", f"--query-{what}={','.join(fields)}", "--format=csv,noheader,nounits"]
    options: dict = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True}
    try:
        done = subprocess.run(command, timeout=seconds, **options)
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"nvidia-smi: {error}") from None
    said = (done.stdout + done.stderr).strip()
    unknown = re.search(r'Field "(.*?)" is not a valid field', said)
    if unknown and unknown[1] in fields:
        return nvidia_smi(what, [field for field in fields if field != unknown[1]], seconds)
    if done.returncode:
        raise RuntimeError(f"nvidia-smi: {said}")
    rows = [line.split(", ", len(fields) - 1) for line in done.stdout.splitlines()]
    return [dict(zip(fields, row)) for row in rows]
