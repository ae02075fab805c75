"""The facts about this needle: its build, its machine, and why a device cannot be used.

`python -m needle.diagnose` prints the facts and multiplies two matrices on each enabled device.
Its exit code is 0 unless something that should work does not: a wrong product, a CUDA backend that
was built but cannot be used although there is an NVIDIA driver, or NEEDLE_REQUIRE_CUDA=1 without a
usable GPU.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import platform
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from needle import _C

INSTALL_DRIVER = (
    "install NVIDIA's driver (https://www.nvidia.com/drivers); nvidia-smi then shows the GPU"
)
REBUILD = "NEEDLE_CUDA=1 make lib (needs the CUDA toolkit)"
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
    """Why CUDA cannot be used, in the backend's own words; None when it can."""
    if _C.cuda().enabled():
        return None
    try:
        _C.cuda_init()
    except (RuntimeError, ValueError) as error:
        return str(error)
    return "it opens, but shows no device"


def remedy(built: bool, driver: str | None) -> str:
    if driver is None:
        return INSTALL_DRIVER
    if not built:
        return REBUILD
    return "check that nvidia-smi shows the GPU and that CUDA_VISIBLE_DEVICES does not hide it"


def describe(device: Any) -> dict[str, Any]:
    facts = dict(device.properties())
    return {"device": str(device), **facts}


def collect() -> dict[str, Any]:
    """The facts, as plain Python values."""
    build = dict(_C.build_info())
    driver = driver_version()
    built = Path(_C.__file__).with_name("_cuda.so").exists()
    problem = cuda_problem()
    if os.environ.get("OMP_NUM_THREADS"):
        threads = os.environ["OMP_NUM_THREADS"] + " (OMP_NUM_THREADS)"
    else:
        usable = (
            len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        )
        threads = str(usable)
    cuda: dict[str, Any] = {"built": built, "driver": driver, "usable": problem is None}
    if problem is not None:
        cuda["problem"] = problem
        cuda["remedy"] = remedy(built, driver)
    return {
        "needle": build["version"],
        "location": str(Path(_C.__file__).parent),
        "python": f"{platform.python_version()} ({sys.executable})",
        "numpy": np.__version__,
        "platform": platform.platform(),
        "threads": threads,
        "build": build,
        "cuda": cuda,
        "devices": [describe(device) for device in _C.all_devices() if device.enabled()],
        "settings": {k: v for k, v in sorted(os.environ.items()) if k.startswith(SETTINGS)},
    }


def gigabytes(count: int) -> str:
    return f"{count / 2**30:.1f} GiB"


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
            f"{build.get('compiler', 'unknown')}, -march={build.get('march', 'unknown')}",
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
        ("NVIDIA driver", f"speaks CUDA {cuda['driver']}" if cuda["driver"] else "none"),
    ]
    for device in facts["devices"]:
        arch = f", sm_{device['arch']}" if device.get("arch") else ""
        detail = f", {device['detail']}" if device.get("detail") else ""
        shown.append(
            (
                device["device"],
                f"{device.get('name', '?')}, "
                f"{gigabytes(device.get('total_bytes', 0))}, "
                f"{device.get('processors', '?')} processors{arch}{detail}",
            )
        )
    if not cuda["usable"]:
        shown.append(("cuda()", f"not usable: {cuda['problem']}"))
        shown.append(("to mend it", cuda["remedy"]))
    shown += list(facts["settings"].items())
    return shown


def show_config(file: TextIO | None = None) -> dict[str, Any]:
    """Print what needle is built from and runs on, and return it as a dictionary.

    It goes to `file` (default: standard output). Keys: needle, location, python, numpy, platform,
    threads, build, cuda, devices, settings.
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
    error = float(np.abs(got - a.astype(np.float64) @ b.astype(np.float64)).max())
    good = error < 1e-3
    return (
        good,
        f"{'ok' if good else 'WRONG'}: matmul is {error:.1e} off, in {seconds * 1e3:.1f} ms",
    )


def main(argv: Sequence[str] | None = None) -> int:
    argparse.ArgumentParser(
        prog="python -m needle.diagnose",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    ).parse_args(argv)
    facts = show_config()
    broken = facts["cuda"]["built"] and facts["cuda"]["driver"] and not facts["cuda"]["usable"]
    if os.environ.get("NEEDLE_REQUIRE_CUDA", "0") == "1" and not facts["cuda"]["usable"]:
        broken = True
    for device in _C.all_devices():
        if device.enabled():
            good, text = self_test(device)
            broken = broken or not good
            print(f"{'test ' + str(device):<14} {text}")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
