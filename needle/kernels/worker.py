"""The processes of a pool: `needle/kernels/start.py ROLE FD`, started by it alone.

    devices     reports the number of GPUs, and ends
    compiler    source in, machine code out; never opens a GPU
    confined    a compiler that reads the toolkit's headers alone (needle.kernels.landlock)
    runner      opens one GPU, checks its health, then runs one job after another
    traced      a runner under compute-sanitizer

FD is an inherited socket (needle.kernels.ipc). A process ends when its parent dies, by a signal of
the system, and when the other end of the socket closes. After a fault a runner answers and ends:
its device gives no right answers any more (docs/design.md).
"""

from __future__ import annotations

import ctypes
import dataclasses
import mmap
import os
import re
import resource
import select
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from needle import _C
from needle._C import CudaError, CudaFatalError, Device, NDArray
from needle.kernels import guard, landlock, timing
from needle.kernels.compile import Compiled, build, find_toolkit
from needle.kernels.guard import Place
from needle.kernels.ipc import Channel
from needle.kernels.kernel import arch_of, load
from needle.processes import MessageWriter

KEPT_BYTES = 256 << 20  # bytes of device memory that a runner keeps between jobs
MESSAGE_LETTERS = 64 << 10  # characters of a message
# Why a file cannot be read, which tells whether it is there.
REASON = re.compile(r'(?<=cannot open source file )(".*"): .*')
COMPILER_BYTES = 16 << 30  # bytes of address space; on a smaller host half of its memory
COMPILER_FILE_BYTES = 64 << 20  # bytes of each file that it writes, unless confined
COMPILER_SECONDS = 120  # seconds of processor time; after half of it, no new source is taken

# The status of a result by the end of CUDA's name of an error, cudaErrorIllegalAddress or
# CUDA_ERROR_ILLEGAL_ADDRESS.
STATUS = {
    "illegaladdress": "illegal_address",
    "misalignedaddress": "misaligned_address",
    "assert": "assertion",
    "launchtimeout": "timeout",
    "memoryallocation": "out_of_memory",
    "outofmemory": "out_of_memory",
    "invalidvalue": "invalid_launch",
    "invalidconfiguration": "invalid_launch",
    "invaliddevicefunction": "invalid_launch",
    "launchoutofresources": "invalid_launch",
    "cooperativelaunchtoolarge": "invalid_launch",
    "eccuncorrectable": "device_lost",
    "nvlinkuncorrectable": "device_lost",
    "contained": "device_lost",
    "devicesunavailable": "device_lost",
    "deviceunavailable": "device_lost",
    "nodevice": "device_lost",
}
# The dtype of the array that a kernel gets for elements that needle has no dtype for.
PASSED_AS = {
    "int8": "uint8",
    "int16": "uint16",
    "uint32": "int32",
    "uint64": "int64",
    "float64": "uint8",
    "complex64": "uint8",
    "complex128": "uint8",
}


class Needle:
    """The parts of needle that touch a GPU or NVRTC. Tests replace them."""

    flush_bytes = timing.FLUSH_BYTES

    def devices(self) -> int:
        _C.cuda_init()
        return sum(device.name == "cuda" and device.enabled() for device in _C.all_devices())

    def build(self, source: str, entry: str, arch: str, debug: bool) -> Compiled:
        return build(source, (entry,), arch, debug=debug)

    def confine(self) -> None:
        """Give up all files but the toolkit's headers. Compile once before, which loads NVRTC's
        libraries and Python's modules."""
        build("template <class T> __global__ void first(T *x) {}", "first<float>")
        toolkit = find_toolkit()
        landlock.confine(toolkit.include)
        root = Path(os.path.commonpath(toolkit.include or ["/"]))
        if landlock.enter(root):
            toolkit.include = tuple("/" / folder.relative_to(root) for folder in toolkit.include)

    def open(self) -> Device:
        """Return the device, with a context."""
        device = _C.cuda()
        device.synchronize()
        return device

    def arch(self, device: Device) -> str:
        return arch_of(device)

    def load(self, compiled: bytes, entry: str, device: Device) -> Any:
        return load(Compiled.unpack(compiled), device)[entry]

    def check(self, device: Device) -> None:
        """Run a kernel of needle's with a known answer. RuntimeError."""
        x = np.arange(4096, dtype=np.float32)
        got = (_C.array(x, "float32", device) * 3 + 1).numpy()
        wrong = np.flatnonzero(got != x * 3 + 1)
        if wrong.size:
            raise RuntimeError(
                f"the device computes wrongly: 3 x + 1 is wrong for {wrong.size} of {x.size} "
                f"numbers, {x[wrong[0]]} first: {got[wrong[0]]}"
            )


# ---- the process ---------------------------------------------------------------------------------


def end_with_socket(sock: socket.socket) -> None:
    """Start a thread that ends this process when the other end closes. Under compute-sanitizer no
    signal does: the parent is then the tool."""

    def watch() -> None:
        hung_up = select.poll()
        hung_up.register(sock, select.POLLRDHUP)
        hung_up.poll()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def restrict(confined: bool) -> None:
    """Limit a compiler's memory, processor time and files; a confined one writes no file and starts
    no process. Processor time by the hard limit, because NVRTC lifts the soft one (13.5)."""
    host_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limits = {
        "AS": min(COMPILER_BYTES, host_bytes // 2),
        "FSIZE": 0 if confined else COMPILER_FILE_BYTES,
        "CPU": COMPILER_SECONDS,
    }
    limits |= {"NPROC": 0} if confined else {}
    for name, most in limits.items():
        kind = getattr(resource, f"RLIMIT_{name}")
        hard = resource.getrlimit(kind)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (most, most))


def status_of(error: BaseException) -> str:
    """Return the status of a result for an error of a load or a launch."""
    name = re.search(r"\b(?:cudaError|CUDA_ERROR_)(\w+)", str(error))
    if isinstance(error, CudaError):
        if " is outside of " in str(error):  # a check of debug=True, which traps
            return "assertion"
        known = STATUS.get(name[1].replace("_", "").lower()) if name else None
        if known is not None:
            return known
        if "out of memory" in str(error):
            return "out_of_memory"
        return "launch_failure" if isinstance(error, CudaFatalError) else "invalid_launch"
    return "out_of_memory" if isinstance(error, MemoryError) else "invalid_launch"


def failure(status: str, error: BaseException) -> dict[str, Any]:
    text = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
    return {"status": status, "message": (text or type(error).__name__)[:MESSAGE_LETTERS]}


def next_job(channel: Channel) -> tuple[dict[str, Any], bytes, list[int]]:
    """Return the next job. Answer the question whether this process is there."""
    while True:
        message, block, files = channel.receive()
        if message.get("do") != "answer":
            return message, block, files
        channel.send({})


# ---- the compiler --------------------------------------------------------------------------------


def compile_source(needle: Needle, job: dict[str, Any], source: bytes) -> tuple[dict, bytes]:
    """Return (answer, Compiled.pack())."""
    entry = job["entry"]
    try:
        compiled = needle.build(source.decode(), entry, job["arch"], job["debug"])
        compiled[entry]  # KeyError
    except (ValueError, KeyError) as error:  # CompileError is a ValueError, and has the log
        return failure("compile_error", error), b""
    return {"status": "ok"}, compiled.pack()


def compiler(needle: Needle, channel: Channel, confined: bool) -> None:
    """Compile until half of the processor time is used: the pool starts another."""
    restrict(confined)
    channel.send({"ready": True})
    while time.process_time() < COMPILER_SECONDS / 2:
        job, source, _ = next_job(channel)
        answer, code = compile_source(needle, job, source)
        if confined and "message" in answer:
            answer["message"] = REASON.sub(r"\1", answer["message"])
        channel.send(answer, code)


# ---- the runner ----------------------------------------------------------------------------------


class Arrays:
    """The arrays of a job on the device: slices of one copy of the guarded buffer or, under
    compute-sanitizer, an allocation each, so that it sees where each ends."""

    def __init__(self, places: list[Place], image: np.ndarray, device: Device, apart: bool) -> None:
        self.places, self.device = places, device
        self.whole = None if apart else _C.array(image, "uint8", device)
        self.each = [self._alone(place, image) for place in places] if apart else []

    def _alone(self, place: Place, image: np.ndarray) -> NDArray:
        if place.role == "out":  # uninitialised to initcheck
            return _C.empty((place.nbytes,), "uint8", self.device)
        return _C.array(place.bytes_of(image), "uint8", self.device)

    def arguments(self) -> list[NDArray]:
        found = []
        for number, place in enumerate(self.places):
            memory, start = (self.each[number], 0) if self.each else (self.whole, place.start)
            dtype = PASSED_AS.get(place.dtype, place.dtype)
            unit = 1 if dtype == "uint8" else place.itemsize
            # Elements that are passed as bytes add an axis.
            shape = (*place.shape, place.itemsize) if unit < place.itemsize else place.shape
            offset = start // unit
            found.append(NDArray.make(shape, handle=memory._handle, offset=offset, dtype=dtype))
        return found

    def image(self, before: np.ndarray) -> np.ndarray:
        """Return the guarded buffer as it is now."""
        if self.whole is not None:
            return self.whole.numpy()
        after = before.copy()
        for place, memory in zip(self.places, self.each):
            place.bytes_of(after)[:] = memory.numpy()
        return after


def plain(value: dict[str, Any]) -> bool | int | float | bytes | np.generic:
    """Return an argument that is no array: a number, NumPy's if it was, or the bytes of a
    struct."""
    if "bytes" in value:
        return bytes.fromhex(value["bytes"])
    if "dtype" in value:
        return np.dtype(value["dtype"]).type(value["number"])
    return value["number"]


class Run:
    """A run that the pool asks for: the message, machine code, and the guarded buffers, one for
    each open file."""

    def __init__(
        self, needle: Needle, message: dict[str, Any], compiled: bytes, files: list[int]
    ) -> None:
        self.needle, self.message, self.compiled = needle, message, compiled
        self.places = [
            Place(**{**place, "shape": tuple(place["shape"])}) for place in message["places"]
        ]
        self.images = [np.frombuffer(mmap.mmap(file, 0), np.uint8) for file in files]
        for file in files:
            os.close(file)

    def load(self, device: Device) -> Any:
        return self.needle.load(self.compiled, self.message["entry"], device)

    def call(self, kernel: Any, arrays: list[NDArray]) -> None:
        left, job = iter(arrays), self.message
        arguments = [next(left) if value is None else plain(value) for value in job["arguments"]]
        kernel(tuple(job["grid"]), tuple(job["block"]), *arguments, shared=job["shared"])

    def give(self, number: int, after: np.ndarray) -> None:
        """Return the outputs of a run with image `number` to the pool."""
        for place in self.places:
            if place.returned:
                place.bytes_of(self.images[number])[:] = place.bytes_of(after)

    def launch(self, kernel: Any, device: Device, apart: bool) -> dict[str, Any]:
        """Launch once, and again if an output seems unwritten. Return the answer."""
        places, before = self.places, self.images[0]

        def left_by(image: np.ndarray) -> np.ndarray:
            arrays = Arrays(places, image, device, apart)
            self.call(kernel, arrays.arguments())
            device.synchronize()
            return arrays.image(image)

        after = left_by(before)
        outside = guard.written_outside(before, after, places)
        suspects = {} if apart else guard.suspects(before, after, places)
        missing = None
        if suspects and outside is None:
            other = guard.complement(before, places)
            again = guard.suspects(other, left_by(other), places)
            missing = guard.unwritten(suspects, again, places)
        self.give(0, after)
        if outside is not None:
            return {"status": "out_of_bounds", "message": outside}
        if missing is not None:
            return {"status": "wrong_result", "message": missing}
        return {"status": "ok"}

    def time(self, device: Device) -> dict[str, Any]:
        """Time calls over all images; each image then holds the outputs of its last call."""
        arrays = Arrays(self.places, self.images[0], device, apart=False)
        given = arrays.arguments()
        pristine = [_C.array(image, "uint8", device) for image in self.images]
        outside: list[str] = []

        def keep(number: int) -> None:
            after = arrays.image(self.images[number])
            found = guard.written_outside(self.images[number], after, self.places)
            outside.extend([found] if found else [])
            self.give(number, after)

        def load_anew() -> Callable[[], None]:
            kernel = self.load(device)
            return lambda: self.call(kernel, given)

        warm = self.message["warm"]
        times, nothing, device_rate = timing.measure(
            load_anew,
            lambda number: _C.assign(arrays.whole, pristine[number]),
            keep,
            len(self.images),
            warm,
            device,
            self.needle.flush_bytes,
        )
        if outside:
            return {"status": "out_of_bounds", "message": outside[0]}
        judged = timing.judge(
            times,
            nothing,
            device_rate,
            sum(place.nbytes for place in self.places if place.role == "out"),
            sum(place.nbytes for place in self.places),
            self.message["local_bytes"],
            warm,
        )
        return {"status": "ok", "timing": dataclasses.asdict(judged)}

    def answer(self, device: Device, apart: bool) -> dict[str, Any]:
        """Return the answer. After a fault (`faulted`) the process ends."""
        try:
            if self.message["do"] == "time":
                answer, kernel = self.time(device), self.load(device)
            else:
                kernel = self.load(device)
                answer = self.launch(kernel, device, apart)
            job = self.message
            report = kernel.check(tuple(job["grid"]), tuple(job["block"]), job["shared"])
            answer["occupancy"] = {
                name: getattr(report, name) for name in ("occupancy", "limiter", "blocks_per_sm")
            }
            return answer
        except CudaFatalError as error:
            return {**failure(status_of(error), error), "faulted": True}
        except (CudaError, MemoryError, TypeError, ValueError, OverflowError, KeyError) as error:
            return failure(status_of(error), error)


def give_memory_back(device: Device, kept: int) -> int:
    """Return unused device memory to the system if it is more than `kept`. Return its bytes."""
    before = device.memory_stats()["reserved_bytes"]
    if before <= kept:
        return 0
    device.empty_cache()
    return before - device.memory_stats()["reserved_bytes"]


def runner(needle: Needle, channel: Channel, apart: bool) -> None:
    device = needle.open()
    needle.check(device)
    facts = {**device.properties(), "arch": needle.arch(device)}
    channel.send({"ready": True, "facts": facts})
    while True:
        message, block, files = next_job(channel)
        if message["do"] == "check":
            needle.check(device)
            channel.send({"ready": True})
        elif message["do"] == "clean":
            channel.send({"freed": give_memory_back(device, 0)})
        elif message["do"] == "end":
            return
        else:
            answer = Run(needle, message, block, files).answer(device, apart)
            ctypes.CDLL(None).fflush(None)  # output of kernels
            if not answer.get("faulted"):
                give_memory_back(device, KEPT_BYTES)
            channel.send(answer)
            if answer.get("faulted") and not apart:  # compute-sanitizer reports at a proper end
                os._exit(os.EX_TEMPFAIL)


def main(argv: list[str], needle: Needle | None = None) -> NoReturn:
    role, sock = argv[0], socket.socket(fileno=int(argv[1]))
    sock.set_inheritable(False)  # the pool takes another holder for this process
    if role != "traced":  # its parent is compute-sanitizer
        MessageWriter.to_parent()  # so that it ends with the pool's process
    needle, channel = needle or Needle(), Channel(sock)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        if role == "confined":
            needle.confine()  # while this process has one thread
        end_with_socket(sock)
        if role == "devices":
            channel.send({"ready": True, "facts": {"devices": needle.devices()}})
        elif role in ("compiler", "confined"):
            compiler(needle, channel, role == "confined")
        else:
            runner(needle, channel, apart=role == "traced")
    except (EOFError, ConnectionError):
        pass  # the pool is gone
    except Exception as error:
        known = isinstance(error, (RuntimeError, ValueError, OSError))
        said = str(error) if known else repr(error)
        channel.send({"ready": False, "message": said[:MESSAGE_LETTERS]})
        sys.exit(1)
    sys.exit(0)
