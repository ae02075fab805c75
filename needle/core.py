"""Find and load the C core: that of this folder, or, in a checkout that is not built, the installed
one."""

from __future__ import annotations

import atexit
import contextlib
import importlib
import os
import sys
from importlib import machinery
from types import ModuleType


def load() -> None:
    """Import `_C`. OpenBLAS reads the environment once, while it is loaded: it gets one thread
    (matmul.c divides a product among OpenMP's threads) and, on an AMD processor with AVX-512, the
    kernels for it, which it would not pick by itself: half the speed (docs/design.md). They are set
    for needle's own copy of OpenBLAS; the environment is left as it was. OpenMP's threads spin no
    longer than from one op to the next, unless the user said how they should wait."""
    find()
    wanted = {"OPENBLAS_NUM_THREADS": "1"}
    if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & set(os.environ):
        wanted["GOMP_SPINCOUNT"] = "30000"
    core = os.environ.get("NEEDLE_OPENBLAS_CORETYPE") or _amd_core()
    if core:
        wanted["OPENBLAS_CORETYPE"] = core
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        module = importlib.import_module("needle._C")
        atexit.register(_end_after_fatal_fault, module)  # the first to register is the last to run
    except ImportError as error:
        raise ImportError(
            f"needle's C core cannot be loaded: {error}. Build it again: `make clean lib`, or "
            "`pip install .`; in place of a wheel: `pip install --force-reinstall --no-binary "
            "needle-lm needle-lm`"
        ) from error
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _end_after_fatal_fault(core: ModuleType) -> None:
    """End with os.EX_TEMPFAIL if a device was lost: start again from the last checkpoint."""
    if core._fatal_fault():
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):  # a closed stream has nothing to flush
                stream.flush()
        os._exit(os.EX_TEMPFAIL)


def _has_core(folder: str) -> bool:
    return any(os.path.exists(f"{folder}/_C{end}") for end in machinery.EXTENSION_SUFFIXES)


def find() -> None:
    """Use the installed package in place of a checkout that is not built for this Python, if it was
    made from the same sources; else ImportError says how to build."""
    package = sys.modules["needle"]
    own = os.path.abspath(package.__path__[0])
    if _has_core(own):
        return
    others = (os.path.join(path, "needle") for path in map(os.path.abspath, sys.path))
    other = next((path for path in others if path != own and _has_core(path)), None)
    where = os.path.dirname(own)
    unbuilt = f"the needle in {where} is not built for this Python: run `make lib` there"
    if other is None:
        raise ImportError(f"{unbuilt}, or `pip install .`", name="needle")
    file = os.path.join(other, "__init__.py")
    with open(package.__file__, "rb") as ours, open(file, "rb") as theirs:
        if ours.read() != theirs.read():
            raise ImportError(
                f"{unbuilt}, or `pip install .` again: the one in {other} is another version",
                name="needle",
            )
    package.__path__[:] = [other]
    package.__file__ = file


def _amd_core() -> str | None:
    """Return OpenBLAS' name for AVX-512 kernels on an AMD processor that has it, else None."""
    try:
        with open("/proc/cpuinfo") as file:
            info = file.read(8192)
    except OSError:  # not Linux: OpenBLAS decides
        return None
    needed = (" avx512f", " avx512dq", " avx512bw", " avx512vl", " avx512cd")
    return "SKYLAKEX" if "AuthenticAMD" in info and all(n in info for n in needed) else None
