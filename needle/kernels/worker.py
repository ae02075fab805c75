"""A process of the pool, run by its path: `worker.py [apart] FD PARENT`.

It opens the one GPU that it sees, compiles and runs a kernel with a known answer, says so, and does
one job, in steps that the pool asks for: "load", then "run" or "time" any number of times. The pool
kills it after the job. `apart`: it runs under compute-sanitizer, with an allocation for each array.
"""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
if __name__ == "__main__":  # this folder's modules are none of Python's, and needle is beside it
    sys.path[:] = [str(HERE.parents[1]), *(p for p in sys.path if p != str(HERE))]

import ctypes
import threading


def make_context() -> None:
    """Make the device's primary context, while Python imports needle, which uses it later."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        if driver.cuInit(0) == 0:
            driver.cuDevicePrimaryCtxRetain(ctypes.byref(ctypes.c_void_p()), 0)
    except OSError:
        pass  # needle reports the error, also of calls that failed


if __name__ == "__main__":
    threading.Thread(target=make_context, daemon=True).start()

import re
from typing import Any

import numpy as np

from needle import _C
from needle._C import CudaError, CudaFatalError, Device, NDArray
from needle.kernels import cases, timing
from needle.kernels.compile import Compiled, build
from needle.kernels.kernel import arch_of, load
from needle.kernels.process import Message, answer_all, failure

# The status of a result by the end of CUDA's name of an error, cudaErrorIllegalAddress or
# CUDA_ERROR_ILLEGAL_ADDRESS.
STATUS = {
    "illegaladdress": "illegal_address",
    "misalignedaddress": "misaligned_address",
    "assert": "assertion",
    "launchtimeout": "timeout",
    "memoryallocation": "out_of_memory",
    "outofmemory": "out_of_memory",
    "eccuncorrectable": "device_lost",
    "nvlinkuncorrectable": "device_lost",
    "contained": "device_lost",
    "devicesunavailable": "device_lost",
    "deviceunavailable": "device_lost",
    "nodevice": "device_lost",
}
PRODUCT_SIZE = 4096  # of the matrices whose product shows the rate of operations
PROBE = """
__global__ void probe(const float *x, float *y) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    y[i] = 3 * x[i] + 1;
}
"""


def status_of(error: BaseException) -> str:
    """Return the status of a result for an error of a load or a launch."""
    name = re.search(r"\b(?:cudaError|CUDA_ERROR_)(\w+)", str(error))
    known = STATUS.get(name[1].replace("_", "").lower()) if name else None
    if isinstance(error, CudaError) and known is not None:
        return known
    if isinstance(error, MemoryError) or "out of memory" in str(error):
        return "out_of_memory"
    return "launch_failure" if isinstance(error, CudaFatalError) else "invalid_launch"


def open_device() -> Device:
    """Return the device, with a context."""
    device = _C.cuda()
    device.synchronize()
    return device


class Launch:
    """A launch as the pool sends it, with its arrays on the device: slices of one copy of the
    guarded buffer or, `apart`, an allocation each, so that compute-sanitizer sees where each
    ends."""

    def __init__(self, job: Message, device: Device, apart: bool) -> None:
        self.sizes, self.apart = (tuple(job["grid"]), tuple(job["block"]), job["shared"]), apart
        self.arrays = [cases.Array(**one) for one in job["arrays"]]
        self.image = np.empty(self.arrays[-1].end if self.arrays else cases.ALIGN, np.uint8)
        cases.fill(self.image)
        for array in self.arrays:
            if array.role != "out":
                array.bytes_of(self.image)[:] = np.frombuffer(array.elements, np.uint8)
        self.whole = None if apart else _C.array(self.image, "uint8", device)
        self.memory: list[NDArray] = []  # of each array, `apart`
        self.pristine: NDArray | None = None
        arrays, self.arguments = iter(self.arrays), list(job["arguments"])
        for number, value in enumerate(self.arguments):
            if value is None:
                self.arguments[number] = self._argument(next(arrays), device)
            elif isinstance(value, dict):  # a number of NumPy's
                self.arguments[number] = np.frombuffer(value["number"], value["dtype"])[0]

    def _argument(self, array: cases.Array, device: Device) -> NDArray:
        """Return an array as the kernel gets it: elements that are passed as bytes add an axis."""
        memory, start = self.whole, array.start
        if self.apart:
            memory, start = _C.empty((array.stop - array.start,), "uint8", device), 0
            if array.role != "out":  # which is uninitialised to initcheck
                memory = _C.array(array.bytes_of(self.image), "uint8", device)
            self.memory.append(memory)
        dtype = cases.DTYPES[array.dtype]
        unit = 1 if dtype == "uint8" else array.itemsize
        shape = (*array.shape, array.itemsize) if unit < array.itemsize else array.shape
        return NDArray.make(shape, handle=memory._handle, offset=start // unit, dtype=dtype)

    def call(self, kernel: Any) -> None:
        grid, block, shared = self.sizes
        kernel(grid, block, *self.arguments, shared=shared)

    def restore(self) -> None:
        """Bring inputs, outputs and bands back to what they were."""
        if self.pristine is None:
            self.pristine = _C.array(self.image, "uint8", self.whole.device)
        _C.assign(self.whole, self.pristine)

    def result(self) -> Message:
        """Return status and message of what was written, and the outputs."""
        after = self.image.copy() if self.apart else self.whole.numpy()
        for array, memory in zip(self.arrays, self.memory):
            array.bytes_of(after)[:] = memory.numpy()
        outside, missing = cases.compare(self.image, after, self.arrays)
        missing = "" if self.apart else missing
        status = "out_of_bounds" if outside else "wrong_result" if missing else "ok"
        outputs = [array.bytes_of(after) for array in self.arrays if array.is_returned]
        return {"status": status, "message": outside or missing, "outputs": outputs}


class Job:
    """The steps of one job: each returns a message. facts: of the device."""

    facts: Message

    def __init__(self, device: Device, apart: bool) -> None:
        self.device, self.apart = device, apart
        self.launch: Launch | None = None
        self.before: Launch | None = None  # the one that was launched before
        self.clock: timing.Clock | None = None

    def load(self, job: Message) -> Message:
        """Take machine code, or compile the source. Return the machine code."""
        self.entry = job["entry"]
        try:
            if job["code"] is not None:
                self.code = Compiled.unpack(job["code"])
            else:
                self.code = build(job["source"], (self.entry,), arch_of(self.device))
            self.code[self.entry]  # KeyError
        except (ValueError, KeyError) as error:  # CompileError is a ValueError, and has the log
            return failure("compile_error", error)
        self.kernel = load(self.code, self.device)[self.entry]
        return {"status": "ok", "code": None if job["code"] else self.code.pack()}

    def run(self, job: Message) -> Message:
        """Launch once."""
        launch = Launch(job, self.device, self.apart)
        self.before, self.launch = self.launch, launch
        launch.call(self.kernel)
        self.device.synchronize()
        report = self.kernel.check(tuple(job["grid"]), tuple(job["block"]), job["shared"])
        found = {"occupancy": report.occupancy, "blocks_per_sm": report.blocks_per_sm}
        return {**launch.result(), "resources": found}

    def time(self, job: Message) -> Message:
        """Time calls of the last launch, each of code that is new, and warmed up with the launch
        before it if `warm`. Return the outputs of the last call."""
        if self.clock is None:
            self.clock = timing.Clock(self.device)
        clock, launch, before = self.clock, self.launch, self.before

        def prepare() -> Any:
            kernel = load(self.code, self.device)[self.entry]
            if job["warm"]:
                before.restore()
                before.call(kernel)
            launch.restore()
            return lambda: launch.call(kernel)

        times = clock.measure(prepare, job["seconds"])
        rate = clock.product_rate(PRODUCT_SIZE) if job["operations"] else 1.0
        found = {"nothing": clock.nothing, "fill_rate": clock.fill_rate, "product_rate": rate}
        return {**launch.result(), "times": times, "clock": found}

    def clean(self, job: Message) -> Message:
        """Return unused device memory to the system."""
        before = self.device.memory_stats()["reserved_bytes"]
        self.device.empty_cache()
        return {"freed": before - self.device.memory_stats()["reserved_bytes"]}

    def do(self, job: Message) -> Message:
        try:
            answer = getattr(self, job["do"])(job)
        except (CudaError, MemoryError, TypeError, ValueError, OverflowError, KeyError) as error:
            answer = failure(status_of(error), error)
        ctypes.CDLL(None).fflush(None)  # output of kernels
        return answer


def checked(job: Job) -> Job:
    """Compile and run a kernel with a known answer, as a job does. RuntimeError."""
    x = np.arange(4096, dtype=np.float32)
    launch = cases.Launch(cases.Case(16, 256, [x, cases.Out(x.shape)]))
    answer = job.do({"do": "load", "entry": "probe", "source": PROBE, "code": None})
    if answer["status"] == "ok":
        answer = job.do({"do": "run", **launch.message})
    if answer["status"] != "ok":
        raise RuntimeError(f"a first kernel does not run: {answer['message']}")
    (y,) = launch.read(answer)
    wrong = np.count_nonzero(y != 3 * x + 1)
    if wrong:
        raise RuntimeError(f"the device computes wrongly: 3 x + 1 is wrong for {wrong} of {x.size}")
    job.facts = {**job.device.properties(), "arch": arch_of(job.device)}
    return job


def main(words: list[str]) -> None:
    answer_all(words, lambda: checked(Job(open_device(), "apart" in words)))


if __name__ == "__main__":
    main(sys.argv[1:])
