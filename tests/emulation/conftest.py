"""The Hopper kernels as a library for the CPU: emulated.h. Needs a C++ compiler and the toolkit's
headers, and no GPU."""

import ctypes
import fcntl
import functools
import os
import subprocess
from pathlib import Path

import pytest
from harness import ROOT

from building import choices

HERE = Path(__file__).resolve().parent


@pytest.fixture(scope="session")
def compiled(tmp_path_factory):
    """file, function -> the function of that file, built once by all workers of pytest-xdist."""
    toolkit = choices.find_toolkit()
    if isinstance(toolkit, str):
        pytest.skip(f"no CUDA headers: {toolkit}")
    folder = tmp_path_factory.getbasetemp()
    folder = folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder

    @functools.cache
    def library(name: str) -> ctypes.CDLL:
        out = folder / f"{name}.so"
        cxx = choices.compiler("CXX", "c++ g++ clang++", "g++").split()
        # Ubuntu defines it: its longjmp refuses to go from one stack of a fiber to another.
        command = [*cxx, "-std=c++17", "-O1", "-w", "-U_FORTIFY_SOURCE"]
        # Its CUDA is its own, also where torch has loaded the real one for all.
        command += ["-fPIC", "-shared", "-Wl,-Bsymbolic", f"-I{HERE}", "-Icuda", "-Icsrc"]
        command += [f"-I{path}" for path in toolkit.include]
        command += ["-o", str(out), str(HERE / f"{name}.cpp")]
        with open(folder / f"{name}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not out.exists():
                done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
                assert done.returncode == 0, done.stderr
        return ctypes.CDLL(str(out))

    def function(name: str, of: str):
        found = getattr(library(name), of)
        found.restype, found.path = ctypes.c_char_p, library(name)._name
        return found

    return function
