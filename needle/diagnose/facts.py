"""The facts about this needle: its versions, its build, its machine, and why a device cannot be
used."""

from __future__ import annotations

import ctypes
import os
import platform
import re
import sys
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from needle import _C
from needle.diagnose.parts import failed, row, show, tell, trying
from needle.kernels.compile import find_toolkit

# Variables that change what needle and its libraries do.
SETTINGS = ("NEEDLE_", "OPENBLAS_", "OMP_", "CUDA_", "CUBLAS")
FIT = "--device, torchrun's --nproc-per-node and CUDA_VISIBLE_DEVICES must fit together"


def collect() -> dict[str, Any]:
    """Return the facts of this process, the build, CUDA and the CPU."""
    build = dict(_C.build_info())
    if threads := os.environ.get("OMP_NUM_THREADS", ""):
        threads += " (OMP_NUM_THREADS)"
    return {
        "needle": build["version"],
        "location": str(Path(_C.__file__).parent),
        "python": f"{platform.python_version()} ({sys.executable})",
        "numpy": np.__version__,
        "platform": platform.platform(),
        "threads": threads or str(len(os.sched_getaffinity(0))),
        "build": build,
        "nvrtc": nvrtc(),
        "cuda": cuda(),
        "devices": [describe(_C.cpu())],
        "settings": {
            name: "(hidden)" if re.search("TOKEN|KEY", name) else value
            for name, value in sorted(os.environ.items())
            if name.startswith(SETTINGS)
        },
    }


def nvrtc() -> dict[str, str]:
    """The library that compiles a user's own kernels, as `path`; where there is none `problem`."""
    try:
        return {"path": str(find_toolkit().nvrtc)}
    except RuntimeError as error:
        return {"problem": str(error)}


def describe(device: _C.Device) -> dict[str, Any]:
    return {"device": str(device), **device.properties()}


def cuda() -> dict[str, Any]:
    """Return built, driver (the newest CUDA that it speaks, None without one) and usable; where it
    is not usable, problem."""
    problem = _C.cuda().reason()
    built = Path(_C.__file__).with_name("_cuda.so").exists()
    found = {"built": built, "driver": driver_version(), "usable": problem is None}
    return found if problem is None else found | {"problem": problem}


def gpus() -> list[_C.Device]:
    """Return the GPUs that CUDA counts, without opening one."""
    return [device for device in _C.all_devices() if device.enabled() and not device.is_host]


def driver_version() -> str | None:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    number = ctypes.c_int()
    if driver.cuDriverGetVersion(ctypes.byref(number)):
        return None
    return f"{number.value // 1000}.{number.value % 1000 // 10}"


def in_words(device: dict[str, Any]) -> str:
    """A device's name, memory, processors, versions and UUID, as `describe` gave them."""
    parts = [device["name"], f"{device['total_bytes'] / 2**30:.1f} GiB"]
    parts += [f"{device['processors']} processors", f"sm_{device['arch']}" * bool(device["arch"])]
    return ", ".join(filter(None, [*parts, device["detail"], device["uuid"]]))


def rows(facts: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the label and the text of each line about them."""
    build, cuda = facts["build"], facts["cuda"]
    debug = ", a debug build: indices are checked" * bool(build["debug"])
    archs = ", ".join(f"sm_{arch}" for arch in build["cuda_archs"].split())
    backend = f"built with CUDA {build['cuda']} for {archs}" if cuda["built"] else "not built"
    shown = [
        ("needle", f"{facts['needle']}, commit {build['commit']}, in {facts['location']}"),
        ("Python", facts["python"]),
        ("NumPy", facts["numpy"]),
        ("platform", facts["platform"]),
        ("built with", f"{build['compiler']}, -march={build['march']}{debug}"),
        ("BLAS", build["blas"]),
        ("threads", facts["threads"]),
        ("CUDA backend", backend),
        ("own kernels", facts["nvrtc"].get("path") or facts["nvrtc"]["problem"]),
        ("NVIDIA driver", f"speaks CUDA {cuda['driver']}" if cuda["driver"] else "none"),
    ]
    shown += [(device["device"], in_words(device)) for device in facts["devices"]]
    if not cuda["usable"]:
        shown.append(("cuda()", f"not usable: {cuda['problem']}"))
    return shown + list(facts["settings"].items())


def show_config(file: TextIO | None = None) -> dict[str, Any]:
    """Print what needle is built from and runs on, and return it as a dictionary.

    It goes to `file` (default: standard output). Keys: needle, location, python, numpy, platform,
    threads, build, nvrtc, cuda, devices, settings.
    """
    facts = collect()
    facts["devices"] += [describe(device) for device in gpus()]
    for label, text in rows(facts):
        print(row(label, text), file=file)
    return facts


def examine(wanted: str, is_asked: str) -> None:
    """Show the facts without those of GPUs, and tell `count`, the GPUs that CUDA counts, and
    `chosen`, the names of those to examine.

    wanted: the number of the one to examine; empty: all. is_asked: "1" where --device wants it, "0"
    for the GPU of a rank, which may see no other GPU, and needs none."""
    trying("asking the CUDA driver")
    facts = collect()
    for label, text in rows(facts):
        show(label, text)
    cuda, names = facts["cuda"], [str(device) for device in gpus()]
    if is_asked == "0" and len(names) == 1:
        wanted = "0" * bool(wanted)
    name = "cuda()" if wanted in ("", "0") else f"cuda({wanted})"
    is_required = is_asked == "1" or os.environ.get("NEEDLE_REQUIRE_CUDA", "0") == "1"
    if not cuda["usable"]:  # a machine without a GPU is right
        if is_required or (cuda["built"] and cuda["driver"]):
            failed(name, cuda["problem"])
    elif wanted and name not in names:
        failed(name, f"there is no {name}: CUDA shows {', '.join(names)}", FIT)
    tell({"count": len(names), "chosen": [one for one in names if one == name or not wanted]})
