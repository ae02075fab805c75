"""The processes of a pool: `needle/kernels/start.py ROLE FD`, started by it alone.

    devices     answers how many GPUs there are, and ends
    compiler    source in, machine code out; never opens a GPU
    confined    a compiler that sees the toolkit's headers alone (needle.kernels.landlock)
    runner      opens one GPU, proves it, then runs one job after another
    traced      a runner below compute-sanitizer

FD is an inherited socket (needle.kernels.frames). What a kernel prints goes to standard output, and
is no answer. A process ends with the pool: by the signal that the system sends when the parent
dies, and when the other end of the socket is gone. After a fault a runner answers and ends, since
nothing can be trusted on its device (docs/design.md).
"""

from __future__ import annotations

import ctypes
import dataclasses
import mmap
import os
import re
import resource
import select
import signal
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from needle import _C
from needle._C import CudaError, CudaFatalError, Device, NDArray
from needle.kernels import arena, landlock, measure
from needle.kernels.arena import Place
from needle.kernels.compile import Compiled, build, find_toolkit
from needle.kernels.frames import Channel
from needle.kernels.module import arch_of, load

PR_SET_PDEATHSIG = 1
FAULTED = 75  # the exit code of needle after a fatal fault
KEPT_BYTES = 256 << 20  # of device memory that a runner keeps between jobs
MESSAGE_LETTERS = 64 << 10
# Why a file cannot be read, which tells whether it is there.
REASON = re.compile(r'(?<=cannot open source file )(".*"): .*')
COMPILER_BYTES = 16 << 30  # of address space, or half of a smaller host's memory
COMPILER_FILE_BYTES = 64 << 20
COMPILER_SECONDS = 120  # of a processor, in a life; after half of it no further source is taken

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
# How an element that needle has no dtype for is handed to a kernel (needle.kernels.signature).
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
    """What a worker uses of needle. The tests bring one of their own, which needs no GPU."""

    flush_bytes = measure.FLUSH_BYTES

    def devices(self) -> int:
        _C.cuda_init()
        return sum(device.name == "cuda" and device.enabled() for device in _C.all_devices())

    def build(self, source: str, entry: str, arch: str, debug: bool) -> Any:
        return build(source, (entry,), arch, debug=debug)

    def confine(self) -> None:
        """Give up all files but the toolkit's headers. Whatever else compiling reads, NVRTC's
        libraries and Python's modules, is loaded before, because something is compiled."""
        build("template <class T> __global__ void first(T *x) {}", "first<float>")
        toolkit = find_toolkit()
        landlock.confine(toolkit.include)
        root = Path(os.path.commonpath(toolkit.include or ["/"]))
        if landlock.enter(root):
            toolkit.include = tuple("/" / folder.relative_to(root) for folder in toolkit.include)

    def open(self) -> Device:
        """The device, with a context."""
        device = _C.cuda()
        device.synchronize()
        return device

    def arch(self, device: Device) -> str:
        return arch_of(device)

    def load(self, compiled: bytes, entry: str, device: Device) -> Any:
        return load(Compiled.unpack(compiled), device)[entry]

    def prove(self, device: Device) -> None:
        """A kernel of needle's own with a known answer. RuntimeError."""
        x = np.arange(4096, dtype=np.float32)
        got = (_C.array(x, "float32", device) * 3 + 1).numpy()
        wrong = np.flatnonzero(got != x * 3 + 1)
        if wrong.size:
            raise RuntimeError(
                f"the device computes wrongly: 3 x + 1 is wrong for {wrong.size} of {x.size} "
                f"numbers, {x[wrong[0]]} first: {got[wrong[0]]}"
            )


# ---- the process ---------------------------------------------------------------------------------


def end_with_parent() -> None:
    """SIGKILL from the system when the thread that started this process ends (prctl(2))."""
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")


def end_with_socket(sock: socket.socket) -> None:
    """A thread that ends this process when the other end is gone: also of a parent that died
    before `end_with_parent`, and of one whose child is not this process but compute-sanitizer."""

    def watch() -> None:
        hung_up = select.poll()
        hung_up.register(sock, select.POLLRDHUP)
        hung_up.poll()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def restrict(confined: bool) -> None:
    """What a compiler gives up before it reads a source: memory and time without end, and large
    files; a confined one any file, and processes of its own (from which the system spares root).
    Time by the hard limit, because NVRTC lifts the soft one (seen in 13.5)."""
    file_bytes = 0 if confined else COMPILER_FILE_BYTES
    host_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limits = {
        "AS": min(COMPILER_BYTES, host_bytes // 2),
        "FSIZE": file_bytes,
        "CPU": COMPILER_SECONDS,
    }
    limits |= {"NPROC": 0} if confined else {}
    for name, most in limits.items():
        kind = getattr(resource, f"RLIMIT_{name}")
        hard = resource.getrlimit(kind)[1]  # someone may have set less
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (most, most))


def flush_printed() -> None:
    """What kernels printed lies in C's buffer: to the pipe with it, before the answer."""
    ctypes.CDLL(None).fflush(None)


def status_of(error: BaseException) -> str:
    """The status of a result for what a load or a launch raised."""
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


# ---- the compiler --------------------------------------------------------------------------------


def compile_source(needle: Needle, job: dict[str, Any], source: bytes) -> tuple[dict, bytes]:
    """(answer, machine code)."""
    entry = job["entry"]
    try:
        compiled = needle.build(source.decode(), entry, job["arch"], job.get("debug", False))
        facts = compiled[entry]
    except (ValueError, KeyError) as error:  # CompileError is a ValueError, and has the log
        return failure("compile_error", error), b""
    answer = {
        "status": "ok",
        "log": compiled.log[:MESSAGE_LETTERS],
        "resources": {
            name: getattr(facts, name)
            for name in ("registers", "shared_bytes", "local_bytes", "max_threads")
        },
        "parameters": [
            {
                "type": parameter.type,
                "const": None if parameter.kind == "unknown" else not parameter.written,
            }
            for parameter in facts.signature.parameters
        ],
        # Device code that allocates may leave the context's heap full.
        "allocates": b"\0malloc\0" in compiled.cubin,
    }
    return answer, compiled.pack()


def next_job(channel: Channel) -> tuple[dict[str, Any], bytes, list[int]]:
    """What the pool wants next; in between it asks whether this process still is there."""
    while True:
        header, block, files = channel.receive()
        if header.get("do") != "answer":
            return header, block, files
        channel.send({})


def compiler(needle: Needle, channel: Channel, confined: bool) -> None:
    """Until much of its time is used: the pool starts another."""
    restrict(confined)
    channel.send({"ready": True})
    while used_seconds() < COMPILER_SECONDS / 2:
        job, source, _ = next_job(channel)
        answer, code = compile_source(needle, job, source)
        if confined and "message" in answer:
            answer["message"] = REASON.sub(r"\1", answer["message"])
        channel.send(answer, code)


def used_seconds() -> float:
    """Of processors, since this process began."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


# ---- the runner ----------------------------------------------------------------------------------


class Arrays:
    """The arrays of a job on the device: slices of one copy of the arena, or, below
    compute-sanitizer, an allocation each, so that it sees where each ends."""

    def __init__(self, places: list[Place], image: np.ndarray, device: Device, apart: bool) -> None:
        self.places, self.device = places, device
        self.whole: NDArray | None = None
        if apart:
            self.each = [self._alone(place, image) for place in places]
        else:
            self.whole = _C.array(image, "uint8", device)

    def _alone(self, place: Place, image: np.ndarray) -> NDArray:
        if place.role == "out":  # initcheck takes what nobody wrote for uninitialised
            return _C.empty((place.nbytes,), "uint8", self.device)
        return _C.array(place.bytes_of(image), "uint8", self.device)

    def arguments(self) -> list[NDArray]:
        found = []
        for number, place in enumerate(self.places):
            memory, start = (
                (self.whole, place.start) if self.whole is not None else (self.each[number], 0)
            )
            dtype, shape = passed_as(place)
            step = place.itemsize if dtype != "uint8" else 1
            found.append(
                NDArray.make(shape, handle=memory._handle, offset=start // step, dtype=dtype)
            )
        return found

    def restore(self, image: NDArray) -> None:
        """From an image of the arena that lies on the device."""
        assert self.whole is not None
        _C.assign(self.whole, image)

    def image(self, before: np.ndarray) -> np.ndarray:
        """The arena as it is now; where arrays lie apart, between the bands of `before`."""
        if self.whole is not None:
            return self.whole.numpy()
        after = before.copy()
        for place, memory in zip(self.places, self.each):
            place.bytes_of(after)[:] = memory.numpy()
        return after


def passed_as(place: Place) -> tuple[str, tuple[int, ...]]:
    """(dtype, shape) of the array that the kernel gets; elements that go as bytes are one axis
    more."""
    dtype = PASSED_AS.get(place.dtype, place.dtype)
    as_bytes = dtype == "uint8" and place.itemsize > 1
    return dtype, (*place.shape, place.itemsize) if as_bytes else place.shape


def plain(value: dict[str, Any]) -> bool | int | float | bytes | np.generic:
    """An argument that is no array: a number, NumPy's where it was, or the bytes of a struct."""
    if "bytes" in value:
        return bytes.fromhex(value["bytes"])
    if "dtype" in value:
        return np.dtype(value["dtype"]).type(value["number"])
    return value["number"]


class Job:
    """A run as the pool asks for it: machine code, launch, arguments, and one image of the arena
    for each open file, in shared memory that only the pool has made."""

    def __init__(self, header: dict[str, Any], compiled: bytes, files: list[int]) -> None:
        self.header, self.compiled = header, compiled
        self.grid, self.block = tuple(header["grid"]), tuple(header["block"])
        self.shared = header["shared"]
        self.places = [Place.from_json(place) for place in header["places"]]
        self.images = [np.frombuffer(mmap.mmap(file, 0), np.uint8) for file in files]
        for file in files:
            os.close(file)

    def call(self, kernel: Any, arrays: list[NDArray]) -> None:
        left = iter(arrays)
        arguments = [
            next(left) if value is None else plain(value) for value in self.header["arguments"]
        ]
        kernel(self.grid, self.block, *arguments, shared=self.shared)

    def give(self, number: int, after: np.ndarray) -> None:
        """What the kernel left of image `number` to the pool: the arrays that come back."""
        for place in self.places:
            if place.role in ("inout", "out"):
                place.bytes_of(self.images[number])[:] = place.bytes_of(after)


def run(needle: Needle, job: Job, kernel: Any, device: Device, apart: bool) -> dict[str, Any]:
    """One launch, and what it left; a second one where an output seems not to be written."""
    places, before = job.places, job.images[0]

    def launch(image: np.ndarray) -> np.ndarray:
        arrays = Arrays(places, image, device, apart)
        job.call(kernel, arrays.arguments())
        device.synchronize()
        return arrays.image(image)

    after = launch(before)
    outside = arena.written_outside(before, after, places)
    left = {} if apart else arena.suspects(before, after, places)
    missing = None
    if left and outside is None:
        other = arena.complement(before, places)
        missing = arena.unwritten(left, arena.suspects(other, launch(other), places), places)
    job.give(0, after)
    if outside is not None:
        return {"status": "out_of_bounds", "message": outside}
    if missing is not None:
        return {"status": "wrong_result", "message": missing}
    return {"status": "ok"}


def time(needle: Needle, job: Job, load: Callable[[], Any], device: Device) -> dict[str, Any]:
    """Timed calls over all images; each is left with what its last call wrote."""
    arrays = Arrays(job.places, job.images[0], device, apart=False)
    given = arrays.arguments()
    pristine = [_C.array(image, "uint8", device) for image in job.images]
    outside: list[str] = []

    def keep(number: int) -> None:
        after = arrays.image(job.images[number])
        found = arena.written_outside(job.images[number], after, job.places)
        outside.extend([found] if found else [])
        job.give(number, after)

    def load_anew() -> Callable[[], None]:
        kernel = load()
        return lambda: job.call(kernel, given)

    warm = job.header["warm"]
    times, nothing, device_rate = measure.measure(
        load_anew,
        lambda number: arrays.restore(pristine[number]),
        keep,
        len(job.images),
        warm,
        device,
        needle.flush_bytes,
    )
    if outside:
        return {"status": "out_of_bounds", "message": outside[0]}
    sizes = [(place.nbytes, place.role == "out") for place in job.places]
    timing = measure.judge(
        times,
        nothing,
        device_rate,
        sum(size for size, is_out in sizes if is_out),
        sum(size for size, _ in sizes),
        job.header["local_bytes"],
        warm,
    )
    return {"status": "ok", "timing": dataclasses.asdict(timing)}


def attempt(needle: Needle, job: Job, device: Device, apart: bool) -> dict[str, Any]:
    """The answer to a job, whatever it does to the device. Whoever asks ends the process after a
    fault (`faulted`)."""

    def load() -> Any:
        return needle.load(job.compiled, job.header["entry"], device)

    try:
        if job.header["do"] == "time":
            answer, kernel = time(needle, job, load, device), load()
        else:
            kernel = load()
            answer = run(needle, job, kernel, device, apart)
        report = kernel.check(job.grid, job.block, job.shared)
        answer["occupancy"] = {
            name: getattr(report, name) for name in ("occupancy", "limiter", "blocks_per_sm")
        }
        return answer
    except CudaFatalError as error:
        return {**failure(status_of(error), error), "faulted": True}
    except (CudaError, MemoryError, TypeError, ValueError, OverflowError, KeyError) as error:
        return failure(status_of(error), error)


def give_memory_back(device: Device, kept: int) -> int:
    """Bytes that went back to the system: all that no array uses, where it is more than `kept`."""
    before = device.memory_stats()["reserved_bytes"]
    if before <= kept:
        return 0
    device.empty_cache()
    return before - device.memory_stats()["reserved_bytes"]


def runner(needle: Needle, channel: Channel, apart: bool) -> None:
    try:
        device = needle.open()
        needle.prove(device)
    except Exception as error:
        channel.send({"ready": False, "message": str(error)[:MESSAGE_LETTERS]})
        return
    facts = {**device.properties(), "arch": needle.arch(device)}
    channel.send({"ready": True, "facts": facts})
    while True:
        header, block, files = next_job(channel)
        if header["do"] == "prove":
            try:
                needle.prove(device)
            except Exception as error:
                channel.send({"ready": False, "message": str(error)[:MESSAGE_LETTERS]})
                return
            channel.send({"ready": True})
        elif header["do"] == "clean":
            channel.send({"freed": give_memory_back(device, 0)})
        elif header["do"] == "end":
            return
        else:
            answer = attempt(needle, Job(header, block, files), device, apart)
            flush_printed()
            if not answer.get("faulted"):
                give_memory_back(device, KEPT_BYTES)
            channel.send(answer)
            if answer.get("faulted") and not apart:  # compute-sanitizer reports at a proper end
                os._exit(FAULTED)


def main(argv: list[str], needle: Needle | None = None) -> NoReturn:
    role, sock = argv[0], socket.socket(fileno=int(argv[1]))
    sock.set_inheritable(False)  # who holds it counts as this process (needle.kernels.crew)
    needle = needle or Needle()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if role != "traced":  # its parent is compute-sanitizer, whose threads come and go
        end_with_parent()
    channel = Channel(sock)
    if role == "confined":
        try:
            needle.confine()  # while this process has one thread
        except (RuntimeError, ValueError, OSError) as error:
            channel.send({"ready": False, "message": str(error)[:MESSAGE_LETTERS]})
            sys.exit(1)
    end_with_socket(sock)
    try:
        if role == "devices":
            try:
                channel.send({"ready": True, "devices": needle.devices()})
            except (RuntimeError, ValueError) as error:
                channel.send({"ready": False, "message": str(error)[:MESSAGE_LETTERS]})
        elif role in ("compiler", "confined"):
            compiler(needle, channel, role == "confined")
        else:
            runner(needle, channel, apart=role == "traced")
    except (EOFError, ConnectionError):
        sys.exit(0)  # the pool is gone
    sys.exit(0)
