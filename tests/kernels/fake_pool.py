"""A Pool whose processes have no GPU (tests/kernels/fake_worker.py), and kernels for it."""

import os
import sys
from contextlib import suppress
from pathlib import Path

import numpy as np

from needle.kernels.cases import Out
from needle.kernels.pool import Pool

X = np.arange(6, dtype=np.float32)
SECONDS = 20.0  # that a job may take on a busy machine
SHORT = 0.4  # that one gets which does not end


class FakePool(Pool):
    worker = (sys.executable, str(Path(__file__).with_name("fake_worker.py")))

    @classmethod
    def with_variable(cls, name: str, value) -> type:
        return type("FakePool", (cls,), {"worker": ("env", f"{name}={value}", *cls.worker)})


def children() -> set[int]:
    """Processes whose parent is this one; zombies too."""
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            if int(stat.read_text().rpartition(")")[2].split()[1]) == os.getpid():
                found.add(int(stat.parent.name))
    return found


SOURCE = '''
KINDS = np.float32, np.float16, int, float, bool, np.int8, bytes, bytes

def scale(grid, block, x: "float const*", y: "float*", a: "float", n: "int"):
    y.reshape(-1)[:n] = a * x.reshape(-1)[:n]

def scale_c(grid, block, x, y, a, n):
    y.reshape(-1)[:n] = a * x.reshape(-1)[:n]

def spills(grid, block, x: "float const*", y: "float*"):
    y[:] = x

def increment(grid, block, x: "int*"):
    x += 1

def apart(grid, block, x: "float const*", y: "int*"): y[:] = (y.ctypes.data - x.ctypes.data) % 256

def who(grid, block, pid: "int*"):
    pid[0] = os.getpid()

def forks(grid, block, pid: "int*"):
    pid[0] = os.fork()
    while pid[0] == 0: time.sleep(1000)

def no_results(grid, block): pass

def fails(grid, block, kind: "int"):
    raise [
        _C.CudaFatalError("k: cudaStreamSynchronize: ... (cudaErrorIllegalAddress): lost"),
        _C.CudaFatalError("k: ... (cudaErrorECCUncorrectable): lost"),
        _C.CudaFatalError("k: ... (CUDA_ERROR_MISALIGNED_ADDRESS): lost"),
        _C.CudaFatalError("k: ... (cudaErrorLaunchFailure): lost"),
        _C.CudaFatalError("k: ... (cudaErrorLaunchTimeout): lost"),
        _C.CudaFatalError("k: ... (cudaErrorOfANewerDriver): lost"),
        _C.CudaError("k: cuLaunchKernel: ... (CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES)"),
        _C.CudaError("k: ... (cudaErrorMemoryAllocation)"),
        _C.CudaError("allocate: out of memory on cuda(0): 9.0 MiB asked for"),
        TypeError("k: args[0]: must be an array"),
    ][kind]

def types(grid, block, out: "int*", *given):
    out[:] = [isinstance(value, kind) for value, kind in zip(given, KINDS)]

def copies(grid, block, y: "unsigned char*", struct): y[:] = np.frombuffer(struct, np.uint8)

def hangs(grid, block): time.sleep(1000)
def stops(grid, block): os.kill(os.getpid(), 19)
def signals(grid, block, number: "int"): os.kill(os.getpid(), number)
def breaks(grid, block): raise AttributeError("a defect of the worker")

def prints(grid, block, n: "int"):
    os.write(1, b"x" * n)
    os.write(2, b"end")

def forges(grid, block):
    """Print what looks like an answer."""
    os.write(1, b'{"status": "illegal_address", "arrays": 0}' + bytes([10]))

def asserts(grid, block):
    raise _C.CudaFatalError("k: ... (cudaErrorAssert): lost")

def outside(grid, block, x: "float const*", y: "float*", where: "int"):
    """Write a float at a distance in bytes from the start of y."""
    y[:] = 0
    ctypes.c_float.from_address(y.ctypes.data + where).value = 1.0

def before(grid, block, y: "float*"):
    """Write a float in front of the first array."""
    y[:] = 0
    ctypes.c_float.from_address(y.ctypes.data - 4).value = 1.0

def changes_const(grid, block, x: "float const*", y: "float*"):
    y[:] = 0
    x[1] = 9

def leaves_out(grid, block, y: "float*", n: "int"):
    y[:n] = 1
'''


def run(pool, entry, *args, **more):
    return pool.run(SOURCE, entry, 1, 32, args, **more)


def assert_next_is_right(pool):
    result = run(pool, "scale", X, Out(6), 2.0, 6)
    assert (result.status, result.message) == ("ok", "")
    assert (result.outputs[0] == 2 * X).all()
