"""Kernels in processes of their own, where a fault costs one kernel: `Pool`.

    with Pool() as pool:
        result = pool.run(source, "scale", grid, block, [x, Out(x.shape), 2.0, x.size])
        if result.status == "ok":
            y = result.outputs[0]

Each job has a process of its own, with a clean CUDA context, which is killed after it
(needle.kernels.worker); the pool computes references and compares. A fault of a kernel is a Result
with another status; exceptions are for wrong calls.

Compiling and running CUDA is running arbitrary code. The processes keep faults apart; they do not
stop a person who means harm.
"""

from __future__ import annotations

import hashlib
import math
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, overload

import numpy as np

from needle import _C
from needle.kernels import kernelbench
from needle.kernels.cases import Case, Launch, Reference, Tolerance, both
from needle.kernels.compile import Compiled, reads_files
from needle.kernels.kernelbench import KernelExecResult, Problem
from needle.kernels.limits import Size, whole
from needle.kernels.process import START_SECONDS, Device, Message, Process
from needle.kernels.timing import Timing, judge
from needle.kernels.toolkit import find_tool

TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")  # of compute-sanitizer
NO_SANITIZER = "there is no compute-sanitizer here; it comes with the CUDA toolkit (CUDA_HOME)"
ERRORS_FOUND = "exited with code 99"  # its end
FAULTS = "illegal_address misaligned_address assertion launch_failure timeout crashed".split()
SLOWER = 10  # times as long as a plain run may take under compute-sanitizer
COMPILE_SECONDS = 60.0
TIME_SECONDS = 0.5  # that the timed calls of a case take
KEPT_CODES = 256  # compiled kernels that the pool keeps
NO_GPU = -1  # the number of the device that is none
RESOURCES = ("registers", "shared_bytes", "local_bytes", "max_threads")

Right = Callable[..., Any] | Sequence[Any]


class ReferenceFails(ValueError):
    """The kernel that is to give the right outputs does not."""


@dataclass(frozen=True)
class Result:
    """The outcome of a kernel. `outputs`: arrays in the order of the arguments, also wrong ones.
    `resources`: registers, shared_bytes, local_bytes, max_threads, and of a launch that fits
    occupancy and blocks_per_sm. `timing`: one for each case of `evaluate`. `deterministic`: two
    runs with the same inputs gave the same bits; None if there were none. `explanation`: the report
    of compute-sanitizer. `device`: the number of the GPU, -1 for none."""

    status: str
    message: str = ""
    outputs: tuple[np.ndarray, ...] = ()
    printed: str = ""
    resources: dict[str, Any] = field(default_factory=dict)
    timing: tuple[Timing, ...] = ()
    deterministic: bool | None = None
    explanation: str = ""
    device: int = -1


class Job:
    """A process of a device with the kernel that it has loaded. A step returns whether it went
    well. `result`: so far; `answer`: the last one of the process."""

    def __init__(self, pool: Pool, device: Device, process: Process) -> None:
        self.pool, self.device, self.process = pool, device, process
        self.timeout = pool.timeout
        self.result = Result("", device=device.number)

    def tell(self, status: str, message: str, **more: Any) -> bool:
        self.result = replace(self.result, status=status, message=message, **more)
        return status == "ok"

    def ask(self, message: Message, seconds: float) -> bool:
        self.answer = self.process.ask(message, seconds)
        status, said = self.answer["status"], self.answer.get("message", "")
        if status == "device_lost":  # as the driver reports
            self.device.lose(f"cuda({self.device.number}): {said}")
        self.result.resources.update(self.answer.get("resources", {}))
        return self.tell(status, said)

    def load(self, source: str, entry: str) -> bool:
        """Compile and load, from the pool's code if it has some."""
        codes, arch = self.pool.codes, self.device.facts.get("arch")
        key = hashlib.sha256(f"{arch}\0{entry}\0{source}".encode()).digest()
        code = codes.get(key)
        message = {"do": "load", "entry": entry, "source": source, "code": code}
        if not self.ask(message, COMPILE_SECONDS):
            return False
        code = code or self.answer["code"]
        self.entry = Compiled.unpack(code)[entry]
        self.result.resources.update({name: getattr(self.entry, name) for name in RESOURCES})
        if not reads_files(source):
            codes[key] = code
        if len(codes) > KEPT_CODES:
            codes.pop(next(iter(codes)), None)
        return True

    def run(self, launch: Launch) -> bool:
        """Launch once."""
        total = int(self.device.facts["total_bytes"])
        most = min(self.pool.memory or total, total)
        if launch.nbytes > most:
            said = f"the arrays need {launch.nbytes:,} bytes, of {most:,} (memory=)"
            return self.tell("out_of_memory", said, outputs=())
        launch.bind(self.entry)
        return self._launch(launch, {"do": "run", **launch.message}, self.timeout)

    def _launch(self, launch: Launch, message: Message, seconds: float) -> bool:
        """Take the outputs of a step, and compare them where the right ones are known."""
        is_good, outputs = self.ask(message, seconds), launch.read(self.answer)
        self.result = replace(self.result, outputs=outputs)
        wrong = launch.wrong(outputs) if is_good else ""
        return self.tell("wrong_result", wrong) if wrong else is_good

    def evaluate(
        self, case: Case, right: Any, tolerance: Tolerance, trials: int, time: bool
    ) -> str:
        """Run the trials of a case, the first one twice, and time all but that, or it alone. Return
        where it failed, "" for nowhere."""
        times: list[float] = []
        for trial in range(trials):
            launch = Launch(case, trial)
            launch.bind(self.entry)
            launch.expect(right, tolerance)
            is_good = self.run(launch)
            if trial == 0 and is_good:
                first, is_good = self.result.outputs, self.run(launch)
                pairs = zip(first, self.result.outputs)
                same = all(a.tobytes() == b.tobytes() for a, b in pairs)
                same = same and self.result.deterministic is not False
                self.result = replace(self.result, deterministic=same)
            if not is_good:
                return f"trial {trial}"
            if time and (trial > 0 or trials == 1):
                warm, seconds = trial > 0 and not launch.given, TIME_SECONDS / max(trials - 1, 1)
                message = {"do": "time", "warm": warm, "seconds": seconds}
                message["operations"] = case.operations
                self.device.settle()
                if not self._launch(launch, message, seconds + 4 * self.timeout):
                    return "timed"
                times += self.answer["times"]
        if times:
            figures = launch.written, launch.nbytes, self.entry.local_bytes, warm, case.operations
            timing = judge(times, self.answer["clock"], *figures)
            self.result = replace(self.result, timing=(*self.result.timing, timing))
            if not timing.valid:
                self.tell("wrong_result", timing.reason)
                return "timed"
        return ""


class Pool:
    """Processes that run kernels, for any number of threads at once.

    devices: numbers as of `needle.cuda(i)`; None: all that there are; []: none, for problems of
    KernelBench on the CPU.
    timeout: seconds that a run may take, with the copies of its arrays, before its process is
    killed.
    memory: bytes of device memory that the arrays of a launch may take; None: as many as there are.
    spares: how many more processes are kept ready on each device, so that the next job need not
    wait for a start (0.5 s); each holds a CUDA context of some 500 MB.

    RuntimeError where there is no GPU, and where MPS shares it, and faults with it.
    """

    worker = (sys.executable, str(Path(__file__).with_name("worker.py")))

    def __init__(
        self,
        devices: Sequence[int] | None = None,
        timeout: float = 10.0,
        memory: int | None = None,
        spares: int = 1,
    ) -> None:
        if not isinstance(timeout, (int, float)) or not 0 < timeout < math.inf:
            raise ValueError(f"timeout: must be a number of seconds above 0, not {timeout!r}")
        if memory is not None:
            whole("memory", memory, 1)
        whole("spares", spares, 0)
        _refuse_mps()
        self.timeout, self.memory = float(timeout), memory
        self.changed = threading.Condition()
        self.closed = False
        self.codes: dict[bytes, Message] = {}  # machine code by the hash of its source
        self.devices = {
            number: Device(
                number, name, 0 if number == NO_GPU else 1 + spares, self.worker, self.changed
            )
            for number, name in _names(devices).items()
        }

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """End all processes. Jobs of other threads get the status `crashed`."""
        self.closed = True
        for device in self.devices.values():
            device.close()

    # ---- processes -------------------------------------------------------------------------------

    @contextmanager
    def _reserved(self, number: int | None = None) -> Iterator[Device]:
        """Wait for a device without a job, or for that of a number; a lost one where all are."""

        def free() -> list[Device]:
            devices = [d for d in self.devices.values() if number in (None, d.number)]
            usable = [d for d in devices if not d.lost] or devices
            return [d for d in usable if not d.busy]

        with self.changed:
            self.changed.wait_for(lambda: self.closed or free())
            if self.closed:
                raise RuntimeError("this Pool is closed")
            device = max(free(), key=lambda d: len(d.of("spare")))
            device.busy = True
        try:
            yield device
        finally:
            device.release()

    def _job(
        self, source: str, entry: str, do: Callable[[Job], object], command: Sequence[str] = ()
    ) -> Result:
        """Load a kernel in a process, and do the job. command: of a process for this job."""
        for name, text in (("source", source), ("entry", entry)):
            if not isinstance(text, str):
                raise TypeError(f"source and entry must be text; {name} is {type(text).__name__}")
        source.encode()  # UnicodeEncodeError, a ValueError
        if NO_GPU in self.devices:
            raise ValueError("there is no GPU here (devices=[], --devices cpu): Problems alone run")
        while True:
            with self._reserved() as device:
                if device.lost:
                    return Result("device_lost", device.lost)
                process = device.start(command) if command else device.take()
                if process is None:  # the device was lost just now, or the pool closed
                    continue
                job = Job(self, device, process)
                try:
                    if command:
                        device.facts = process.ask(None, START_SECONDS).get("facts", device.facts)
                    if job.load(source, entry):
                        do(job)
                    return replace(job.result, printed=process.printed())
                finally:
                    device.finish(process, job.result.status in FAULTS)

    # ---- running ---------------------------------------------------------------------------------

    def run(
        self,
        source: str,
        entry: str,
        grid: Size,
        block: Size,
        args: Sequence[Any],
        shared: int = 0,
        sanitizer: str | None = None,
        explain: bool = False,
    ) -> Result:
        """Compile a kernel and launch it once.

        entry: its name as C++ spells it, `scale<__nv_bfloat16>`. args: for each parameter an array
        (NumPy, or an NDArray on the host, which may be bfloat16), `Out(shape, dtype)` for one that
        the kernel writes all of, `InOut(array)`, `Random(shape, dtype, seed)`, a number, or the
        bytes of a struct. An array for a parameter that the signature shows as written (`float*`)
        is as if it were InOut; `extern "C"` kernels show nothing. Out and InOut are returned.

        sanitizer: run under compute-sanitizer: "memcheck", "racecheck", "synccheck" or "initcheck".
        explain: repeat a fault under it. `explanation` has its report then.
        ValueError and TypeError for wrong calls, also for a sanitizer that is not installed.
        """
        if sanitizer is not None and sanitizer not in TOOLS:
            raise ValueError(f"sanitizer: must be one of {', '.join(TOOLS)}, not {sanitizer!r}")
        program = find_tool("compute-sanitizer") if sanitizer is not None or explain else None
        if sanitizer is not None and program is None:
            raise ValueError(f"sanitizer: {NO_SANITIZER}")
        launch = Launch(Case(grid, block, args, shared))
        if sanitizer is not None:
            return self._sanitized(source, entry, launch, sanitizer, str(program))
        result = self._job(source, entry, lambda job: job.run(launch))
        if not explain or result.status not in (*FAULTS, "out_of_bounds"):
            return result
        if program is None:
            return replace(result, explanation=NO_SANITIZER)
        tool = "synccheck" if result.status == "timeout" else "memcheck"
        again = self._sanitized(source, entry, launch, tool, program)
        return replace(result, explanation=again.explanation)

    def _sanitized(
        self, source: str, entry: str, launch: Launch, tool: str, program: str
    ) -> Result:
        """Run in a process of its own under compute-sanitizer."""
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            report = Path(folder) / "report"
            command = [program, "--tool", tool, "--log-file", str(report), "--print-limit", "32"]
            command += ["--report-api-errors", "no", "--show-backtrace", "no"]
            command += ["--error-exitcode", "99", *self.worker, "apart"]

            def do(job: Job) -> None:
                job.timeout *= SLOWER
                is_good = job.run(launch)
                job.process.connection.close()  # it ends, and the tool completes its report
                if job.process.end(START_SECONDS) == ERRORS_FOUND and is_good:
                    job.tell("wrong_result", f"{tool} reports errors")

            result = self._job(source, entry, do, command)
            text = report.read_text(errors="replace") if report.exists() else ""
        return replace(result, explanation=text)

    # ---- evaluating ------------------------------------------------------------------------------

    @overload
    def evaluate(self, source: Problem) -> KernelExecResult: ...
    @overload
    def evaluate(
        self,
        source: str,
        entry: str,
        cases: Sequence[Case],
        reference: Right | Reference,
        tolerance: Tolerance = ...,
        trials: int = ...,
        time: bool = ...,
    ) -> Result: ...
    def evaluate(
        self,
        source: str | Problem,
        entry: str = "",
        cases: Sequence[Case] = (),
        reference: Right | Reference = (),
        tolerance: Tolerance = None,
        trials: int = 5,
        time: bool = True,
    ) -> Result | KernelExecResult:
        """Compile a kernel, compare its outputs with a reference, and time it.

        source: CUDA, or a Problem of KernelBench's form, which stands alone.
        cases: `Case(grid, block, args, shared=0)`; a `Random` among its args is drawn anew for each
        of `trials`. reference: a function of the arguments without Out (arrays as NumPy arrays,
        bfloat16 as float32) that returns the outputs, or for each case its outputs, or a Reference:
        a kernel that is right. tolerance: (absolute, relative), a number for both, or None for the
        dtype's own: 1e-4 for float32, 1e-2 for float16 and bfloat16 (KernelBench's), 1e-8 for
        float64, 0 for all others; an element is right where |got - expected| <= absolute + relative
        |expected|, NaN where NaN is expected.

        The first trial of each case is run twice, and both are compared: `deterministic` says
        whether their bits are equal. The first failure ends it. A timed call that is not possible
        is `wrong_result` too.
        """
        if isinstance(source, Problem):
            with self._reserved() as device:
                return kernelbench.evaluate(source, device, self.timeout)
        for case in cases:
            Launch(case)  # TypeError, ValueError
        if not cases:
            raise ValueError("cases: there must be one at least")
        fixed = not isinstance(reference, Reference) and not callable(reference)
        if fixed and len(reference) != len(cases):
            said = f"reference: {len(reference)} for {len(cases)} cases; give one each"
            raise ValueError(said)
        whole("trials", trials, 1)
        both(tolerance)
        if isinstance(reference, Reference):
            found, reference = self._outputs(reference, cases, trials)
            if found.status == "device_lost":
                return found
            if found.status != "ok":
                raise ReferenceFails(f"reference: it fails: {found.status}: {found.message}")

        def do(job: Job) -> None:
            for number, case in enumerate(cases):
                right = reference if callable(reference) else reference[number]
                where = job.evaluate(case, right, tolerance, trials, time)
                if where:
                    told = job.result
                    job.tell(told.status, f"case {number}, {where}: {told.message}")
                    break

        return self._job(source, entry, do)

    def _outputs(
        self, kernel: Reference, cases: Sequence[Case], trials: int
    ) -> tuple[Result, Callable[..., Any]]:
        """Run the kernel that is right on all cases and trials. Return the last result, and a
        function that gives its outputs, in this order."""
        found: list[tuple[np.ndarray, ...]] = []

        def do(job: Job) -> None:
            for case in cases:
                for trial in range(trials):
                    if not job.run(Launch(kernel.of(case), trial)):
                        return
                    found.append(job.result.outputs)

        result, right = self._job(kernel.source, kernel.entry, do), iter(found)
        return result, lambda *inputs: next(right)

    # ---- health, cleanup, reset ------------------------------------------------------------------

    def state(self) -> list[dict[str, Any]]:
        """Return of each device: number, facts (name, arch, ...), the processes that are ready and
        used, faults and processes started so far, and why it was set aside (None: it was not)."""
        with self.changed:
            return [
                {
                    "device": number,
                    "facts": device.facts,
                    "ready": [spare.pid for spare in device.of("spare") if spare.runs()],
                    "used": [process.pid for process in device.of("used")],
                    "faults": device.faults,
                    "started": device.started,
                    "set_aside": device.lost,
                }
                for number, device in self.devices.items()
            ]

    def cleanup(self) -> int:
        """Return the bytes of device memory that the idle processes gave back to the system."""
        freed = 0
        for number in self.devices:
            with self._reserved(number) as device:
                device.settle()
                for process in device.of("spare"):
                    freed += process.ask({"do": "clean"}, self.timeout).get("freed", 0)
        return freed

    def reset(self, device: int) -> None:
        """Replace the processes of a device, each of which runs a kernel with a known answer, also
        if it was set aside. RuntimeError, with the reason, if that fails; KeyError for a device
        that is not the pool's."""
        self.devices[device]  # KeyError
        with self._reserved(device) as reserved:
            reserved.reset()


# ---- validation ----------------------------------------------------------------------------------


def _refuse_mps() -> None:
    """RuntimeError where CUDA programs of this environment would join a control daemon of MPS."""
    pipe = Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY") or "/tmp/nvidia-mps") / "control"
    if pipe.exists():
        raise RuntimeError(
            f"MPS is on ({pipe}): under it a fault ends the work of all its clients, so kernels "
            "cannot be kept apart. End it: echo quit | nvidia-cuda-mps-control; where no daemon "
            "runs any more, remove that file"
        )


def _names(devices: Sequence[int] | None) -> dict[int, str]:
    """Return the name of each device as CUDA_VISIBLE_DEVICES has it. No context is made on any.
    RuntimeError if there is no GPU, ValueError for a number that is none."""
    if devices is None:
        devices = [d.index for d in _C.all_devices() if d.name == "cuda" and d.enabled()]
        if not devices:
            why = f"no GPU to run kernels on: {_C.cuda().reason()}"
            raise RuntimeError(f"{why}; devices=[], of the service --devices cpu, has none")
    names = {whole("devices", number, 0): str(number) for number in devices}
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        shown = dict(enumerate(name for name in visible.split(",") if name))
        for number in names:
            if number not in shown:
                raise ValueError(f"devices: there is no {number}: CUDA_VISIBLE_DEVICES={visible}")
            names[number] = shown[number]
    return names or {NO_GPU: ""}
