"""The facts about this needle: its build, its machine, and why a device cannot be used.

`collect` asks the driver and opens each device; `here` does neither and cannot hang.
"""

from __future__ import annotations

import ctypes
import os
import platform
import re
import sys
import time
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from needle import _C
from needle.kernels.compile import find_toolkit

INSTALL_DRIVER = (
    "install NVIDIA's driver (https://www.nvidia.com/drivers); nvidia-smi then shows the GPU"
)
REBUILD = "NEEDLE_CUDA=1 make lib (needs the CUDA toolkit)"
FIND_LIBRARY = "install the library, or name its folder in LD_LIBRARY_PATH; else " + REBUILD
# Variables that change what needle and its libraries do.
SETTINGS = ("NEEDLE_", "OPENBLAS_", "OMP_", "CUDA_", "CUBLAS")


def driver_version() -> str | None:
    """The newest CUDA that the NVIDIA driver here speaks, such as "13.0"; None without a driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    number = ctypes.c_int()
    if driver.cuDriverGetVersion(ctypes.byref(number)):
        return None
    return f"{number.value // 1000}.{number.value % 1000 // 10}"


def cuda_problem() -> str | None:
    """Return the backend's reason why CUDA cannot be used, or None."""
    if _C.cuda().enabled():
        return None
    try:
        _C.cuda_init()
    except (RuntimeError, ValueError) as error:
        return str(error)
    return "it opens, but shows no device"


def remedy(built: bool, driver: str | None, problem: str = "") -> str:
    if driver is None:
        return INSTALL_DRIVER
    if not built:
        return REBUILD
    if "shared object" in problem:  # the loader's words for a library that it lacks
        return FIND_LIBRARY
    return "check that nvidia-smi shows the GPU and that CUDA_VISIBLE_DEVICES does not hide it"


def describe(device: Any) -> dict[str, Any]:
    facts = dict(device.properties())
    return {"device": str(device), **facts}


def is_built() -> bool:
    """True if a CUDA backend was built beside the core."""
    return Path(_C.__file__).with_name("_cuda.so").exists()


def ask_cuda() -> dict[str, Any]:
    """built, driver, usable; where it is not usable problem and remedy. Asks the driver."""
    driver, problem = driver_version(), cuda_problem()
    found: dict[str, Any] = {"built": is_built(), "driver": driver, "usable": problem is None}
    if problem is not None:
        found["problem"] = problem
        found["remedy"] = remedy(is_built(), driver, problem)
    return found


def nvrtc() -> dict[str, str]:
    """The library that compiles a user's own kernels, as `path`; where there is none `problem`."""
    try:
        return {"path": str(find_toolkit().nvrtc)}
    except RuntimeError as error:
        return {"problem": str(error)}


def here() -> dict[str, Any]:
    """Return the facts of this process, the build and the CPU: all but those of CUDA."""
    build = dict(_C.build_info())
    if os.environ.get("OMP_NUM_THREADS"):
        threads = os.environ["OMP_NUM_THREADS"] + " (OMP_NUM_THREADS)"
    else:
        threads = str(len(os.sched_getaffinity(0)))
    return {
        "needle": build["version"],
        "location": str(Path(_C.__file__).parent),
        "python": f"{platform.python_version()} ({sys.executable})",
        "numpy": np.__version__,
        "platform": platform.platform(),
        "threads": threads,
        "build": build,
        "nvrtc": nvrtc(),
        "devices": [describe(_C.cpu())],
        "settings": {
            name: "(hidden)" if re.search("TOKEN|KEY", name) else value
            for name, value in sorted(os.environ.items())
            if name.startswith(SETTINGS)
        },
    }


def collect() -> dict[str, Any]:
    """The facts, as plain Python values."""
    facts = here() | {"cuda": ask_cuda()}
    facts["devices"] = [describe(device) for device in _C.all_devices() if device.enabled()]
    return facts


def gigabytes(count: int) -> str:
    return f"{count / 2**30:.1f} GiB"


def in_words(device: dict[str, Any]) -> str:
    """A device's name, memory, processors and versions, as `describe` gave them."""
    arch = f", sm_{device['arch']}" if device.get("arch") else ""
    detail = f", {device['detail']}" if device.get("detail") else ""
    memory = gigabytes(device.get("total_bytes", 0))
    processors = f"{device.get('processors', '?')} processors"
    return f"{device.get('name', '?')}, {memory}, {processors}{arch}{detail}"


def lines(facts: dict[str, Any]) -> list[tuple[str, str]]:
    build, cuda = facts["build"], facts["cuda"]
    shown = [
        (
            "needle",
            f"{facts['needle']}, commit {build.get('commit', 'unknown')}, in {facts['location']}",
        ),
        ("Python", facts["python"]),
        ("NumPy", facts["numpy"]),
        ("platform", facts["platform"]),
        (
            "built with",
            f"{build.get('compiler', 'unknown')}, -march={build.get('march', 'unknown')}"
            + ", a debug build: indices are checked" * bool(build.get("debug")),
        ),
        ("BLAS", build.get("blas", "unknown")),
        ("threads", facts["threads"]),
        (
            "CUDA backend",
            "not built"
            if not cuda["built"]
            else f"built with CUDA {build.get('cuda') or '?'} for sm_"
            + ", sm_".join((build.get("cuda_archs") or "?").split()),
        ),
        ("own kernels", facts["nvrtc"].get("path") or facts["nvrtc"]["problem"]),
        ("NVIDIA driver", f"speaks CUDA {cuda['driver']}" if cuda["driver"] else "none"),
    ]
    shown += [(device["device"], in_words(device)) for device in facts["devices"]]
    if not cuda["usable"]:
        shown.append(("cuda()", f"not usable: {cuda['problem']}"))
        shown.append(("to mend it", cuda["remedy"]))
    shown += list(facts["settings"].items())
    return shown


def show_config(file: TextIO | None = None) -> dict[str, Any]:
    """Print what needle is built from and runs on, and return it as a dictionary.

    It goes to `file` (default: standard output). Keys: needle, location, python, numpy, platform,
    threads, build, nvrtc, cuda, devices, settings.
    """
    facts = collect()
    for name, value in lines(facts):
        print(f"{name:<14} {value}", file=file)
    return facts


def self_test(device: Any) -> tuple[bool, str]:
    """Multiply two 256 x 256 matrices on the device and compare with NumPy."""
    generator = np.random.default_rng(0)
    a, b = (generator.standard_normal((256, 256)).astype(np.float32) for _ in range(2))
    start = time.perf_counter()
    try:
        got = (_C.array(a, device=device) @ _C.array(b, device=device)).numpy()
    except (RuntimeError, MemoryError) as error:
        return False, f"FAILED: {error}"
    seconds = time.perf_counter() - start
    off = float(np.abs(got - a.astype(np.float64) @ b.astype(np.float64)).max())
    good = off < 1e-3
    return (
        good,
        f"{'ok' if good else 'WRONG'}: matmul is {off:.1e} off, in {seconds * 1e3:.1f} ms",
    )
