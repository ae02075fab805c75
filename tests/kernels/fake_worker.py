"""A worker whose device is none: its "kernels" are Python functions on the host's memory.

    python tests/kernels/fake_worker.py FD PARENT

Everything but the device is needle.kernels.worker's own. A parameter's annotation is its C++ type;
the arrays of a function are NumPy arrays on the memory that the job gave. FAKE_LOG names a file
that gets a line for each compilation, and FAKE_BROKEN one whose presence makes the first kernel
fail.
"""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
if __name__ == "__main__":
    sys.path[:] = [str(HERE.parents[1]), *(p for p in sys.path if p != str(HERE))]

import ctypes
import inspect
import os
import time
import types

import numpy as np

from needle import _C
from needle.kernels import timing, worker
from needle.kernels.compile import Compiled
from needle.kernels.limits import Entry
from needle.kernels.signature import Parameter, Signature


def function_of(source: str, entry: str):
    space = {"np": np, "os": os, "time": time, "ctypes": ctypes, "_C": _C}
    exec(compile(source.replace("\0", ""), "kernel.py", "exec"), space)
    return space[entry]


def compiled(source: str, entry: str) -> Compiled:
    parameters = []
    for parameter in list(inspect.signature(function_of(source, entry)).parameters.values())[2:]:
        known = isinstance(parameter.annotation, str)
        text = parameter.annotation if known else ""
        kind = "unknown" if not known else "array" if text.endswith("*") else "int"
        parameters.append(Parameter(text, kind, 8, 0, None, known and "const" not in text))
    made = Entry(
        name=entry,
        symbol=entry,
        arch="90a",
        signature=Signature(entry, tuple(parameters)),
        registers=16,
        local_bytes=8 if "spills" in entry else 0,
    )
    return Compiled("90a", source.encode(), "a remark", {entry: made})


def memory_of(array: _C.NDArray) -> np.ndarray:
    if array.dtype == "bfloat16":
        array = array.view("uint16")
    raw = np.ctypeslib.as_array((ctypes.c_uint8 * array.nbytes).from_address(array.data_ptr))
    return raw.view(array.dtype).reshape(array.shape)


class Kernel:
    def __init__(self, function) -> None:
        self.function = function

    def __call__(self, grid, block, *args, shared=0) -> None:
        arrays = [memory_of(a) if isinstance(a, _C.NDArray) else a for a in args]
        self.function(grid, block, *arrays)

    def check(self, grid, block, shared):
        return types.SimpleNamespace(occupancy=0.5, blocks_per_sm=2)


def open_device():
    if os.path.exists(os.environ.get("FAKE_BROKEN", "")):
        worker.PROBE = worker.PROBE.replace("+ 1", "+ 2")
    return _C.cpu()


def build(source, entries, arch):
    if "hang the compiler" in source:
        time.sleep(1000)
    if "kill the compiler" in source:
        os.kill(os.getpid(), 11)
    (entry,) = entries
    if "FAKE_LOG" in os.environ:
        with open(os.environ["FAKE_LOG"], "a") as log:
            log.write(f"{entry}\n")
    try:
        return compiled(source, entry)
    except SyntaxError as error:
        raise ValueError(f"kernel.py({error.lineno}): error: {error.msg}") from error


def load(code, device):
    return {entry: Kernel(function_of(code.cubin.decode(), entry)) for entry in code.entries}


if __name__ == "__main__":
    sys.stdout.reconfigure(line_buffering=True)  # printf of a kernel leaves no text behind, either
    timing.FLUSH_BYTES = 1 << 16
    worker.PRODUCT_SIZE = 64
    worker.PROBE = 'def probe(grid, block, x: "float const*", y: "float*"): y[:] = 3 * x + 1'
    worker.open_device, worker.build, worker.load = open_device, build, load
    worker.arch_of = lambda device: "80" if os.environ["CUDA_VISIBLE_DEVICES"] == "1" else "90a"
    worker.main(sys.argv[1:])
