"""Kernels in processes of their own, where a fault costs one kernel: `Pool`.

    with Pool() as pool:
        result = pool.run(source, "scale", grid, block, [x, Out(x.shape), 2.0, x.size])
        if result.status == "ok":
            y = result.outputs[0]

The pool opens no GPU. One process compiles, another runs (needle.kernels.worker). The arrays lie in
a guarded buffer in memory that they share (needle.kernels.guard). A fault of a kernel is a Result
with another status; exceptions are for wrong calls.

Compiling and running CUDA is running arbitrary code. The processes keep faults apart; they do not
stop a person who means harm.
"""

from __future__ import annotations

import math
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from needle._C import NDArray
from needle.kernels import landlock
from needle.kernels.guard import SharedBuffer
from needle.kernels.launch import Code, Launch
from needle.kernels.limits import Size
from needle.kernels.sanitizer import TOOLS, Finding, read_report, sanitizer_command, status_of
from needle.kernels.timing import FLUSH_BYTES, LEAST_CALLS, WARM_UP, Timing
from needle.kernels.toolkit import find_tool
from needle.kernels.values import Case, Tolerance, both, difference, whole
from needle.kernels.workers import START_SECONDS, Ended, SetAside, Worker, WorkerPool

# The tool of compute-sanitizer that explains a fault.
EXPLAINED_BY = {
    "out_of_bounds": "memcheck",
    "illegal_address": "memcheck",
    "misaligned_address": "memcheck",
    "assertion": "memcheck",
    "launch_failure": "memcheck",
    "timeout": "synccheck",
}
NO_SANITIZER = "there is no compute-sanitizer here; it comes with the CUDA toolkit (CUDA_HOME)"
SLOWER = 10  # times as long as a plain run may take under compute-sanitizer
COMPILE_SECONDS = 60.0
TIMED_BYTES = 2 << 30  # of inputs that a timing holds in several sets
MOST_SETS = LEAST_CALLS  # of them, so that the shortest timing calls each
HOST_COPIES = 3  # of a guarded buffer, at most, while a job runs
LEAST_TIMED_CALLS = 2 * (WARM_UP + LEAST_CALLS)  # each of which may take the whole timeout


@dataclass(frozen=True)
class Result:
    """The outcome of a kernel. `outputs`: arrays in the order of the arguments, also wrong ones.
    `resources`: registers, shared_bytes, local_bytes, max_threads, and of a launch that fits
    occupancy, limiter, blocks_per_sm. `timing`: one for each case of `evaluate`. `explanation`:
    findings of compute-sanitizer. `device`: the number of the GPU, -1 for none."""

    status: str
    message: str = ""
    outputs: tuple[np.ndarray, ...] = ()
    printed: str = ""
    resources: dict[str, Any] = field(default_factory=dict)
    timing: tuple[Timing, ...] = ()
    explanation: tuple[Finding, ...] = ()
    device: int = -1

    @staticmethod
    def of(
        answer: dict[str, Any], printed: str = "", resources: dict[str, Any] | None = None
    ) -> Result:
        """Make one of a process's answer."""
        timing = answer.get("timing")
        return Result(
            answer["status"],
            answer.get("message", ""),
            printed=printed,
            resources={**(resources or {}), **answer.get("occupancy", {})},
            timing=(Timing(**{**timing, "hints": tuple(timing["hints"])}),) if timing else (),
        )


class NoRoom(Exception):
    """The arrays of a job do not fit into memory; the text says which."""


class Pool:
    """Processes that compile and run kernels, for any number of threads at once.

    devices: numbers as of `needle.cuda(i)`; None: all that there are.
    timeout: seconds that a run may take, with the copies of its arrays, before its process is
    killed.
    memory: bytes of device memory that the arrays of a job may take, guard bands included; None: as
    many as there are.
    fresh: a new process after each "fault", or after each "job".
    spares: how many more processes are kept ready on each device, so that the next job after a
    fault finds one; each holds a CUDA context of some 500 MB.
    confined: sources may be a stranger's: their compiler reads the toolkit's headers and no other
    file, and writes none (needle.kernels.landlock).

    RuntimeError where there is no GPU, where MPS shares it, and faults with it, and where this
    system cannot confine.
    """

    worker = (sys.executable, str(Path(__file__).with_name("start.py")))

    def __init__(
        self,
        devices: Sequence[int] | None = None,
        timeout: float = 10.0,
        memory: int | None = None,
        fresh: str = "fault",
        spares: int = 1,
        confined: bool = False,
    ) -> None:
        if fresh not in ("fault", "job"):
            raise ValueError(f'fresh: must be "fault" or "job", not {fresh!r}')
        if isinstance(timeout, bool) or not isinstance(timeout, (int, float, np.number)):
            raise TypeError(f"timeout: must be a number of seconds, not {timeout!r}")
        if not 0 < timeout < math.inf:
            raise ValueError(f"timeout: must be above 0 and finite, not {timeout}")
        if memory is not None:
            whole("memory", memory, 1)
        whole("spares", spares, 0)
        _refuse_mps()
        if confined:
            landlock.version()
        self.timeout, self.memory, self.fresh = float(timeout), memory, fresh
        self.changed = threading.Condition()
        self.closed = False
        numbers = list(range(self._count_devices())) if devices is None else _numbers(devices)
        self.runners = {
            n: WorkerPool(n, self._starter("runner", n), 1 + spares, 1, self.changed)
            for n in numbers
        }
        count = min(len(self.runners), os.cpu_count() or 1)
        start = self._starter("confined" if confined else "compiler")
        self.compilers = WorkerPool(None, start, count, count, self.changed)

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """End all processes. Jobs of other threads get the status `crashed`."""
        self.closed = True
        for workers in (*self.runners.values(), self.compilers):
            workers.close()

    # ---- processes -------------------------------------------------------------------------------

    def _environment(self, device: int | None) -> dict[str, str]:
        """Return the environment of a process, which finds this needle, sees one GPU, and computes
        on one thread."""
        root = str(Path(__file__).resolve().parent.parent.parent)
        paths = [os.path.abspath(p) for p in os.environ.get("PYTHONPATH", "").split(":") if p]
        found = {
            **os.environ,
            "PYTHONPATH": ":".join([root, *paths]),
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
        }
        if device is not None:
            visible = _visible_devices()
            found["CUDA_VISIBLE_DEVICES"] = str(device) if visible is None else visible[device]
        return found

    def _starter(self, role: str, device: int | None = None) -> Callable[[], Worker]:
        return lambda: Worker([*self.worker, role], self._environment(device))

    def _count_devices(self) -> int:
        with self._starter("devices")() as worker:
            try:
                return worker.greet(START_SECONDS)["devices"]
            except (TimeoutError, Ended) as error:
                said = str(error) or "no answer"
                raise RuntimeError(f"no GPU to run kernels on: {said}") from None

    def _check_usable(self) -> None:
        """RuntimeError if the pool is closed, SetAside if all devices are set aside. Call it with
        `changed` held."""
        if self.closed:
            raise RuntimeError("this Pool is closed")
        reasons = [workers.set_aside for workers in self.runners.values()]
        if None not in reasons:
            raise SetAside("; ".join(map(str, reasons)))

    @contextmanager
    def _reserved(self, choose: Callable[[], WorkerPool | None]) -> Iterator[WorkerPool]:
        """Reserve a worker of those that `choose` returns, once it returns some; it is called with
        `changed` held."""
        with self.changed:
            workers = self.changed.wait_for(choose)
            workers.reserved += 1
        try:
            yield workers
        finally:
            with self.changed:
                workers.reserved -= 1
                self.changed.notify_all()

    def _free_device(self) -> WorkerPool | None:
        """Return the workers of a device without a job, preferably with one ready. Raise SetAside
        if no device can be used."""
        self._check_usable()
        free = [workers for workers in self.runners.values() if workers.free()]
        return max(free, key=lambda workers: len(workers.ready), default=None)

    def _facts(self) -> dict[str, Any]:
        """Return the facts of a GPU (a pool's GPUs are of one kind), once the first process has
        reported them. Raise SetAside if no device can be used."""
        known = lambda: next((w.facts for w in self.runners.values() if w.facts), None)
        with self.changed:
            return self.changed.wait_for(lambda: known() or self._check_usable())

    # ---- compiling -------------------------------------------------------------------------------

    def _compile(self, source: str, entry: str, debug: bool = False) -> Code | Result:
        for name, text in (("source", source), ("entry", entry)):
            if not isinstance(text, str):
                raise TypeError(f"source and entry must be text; {name} is {type(text).__name__}")
        source_bytes = source.encode()
        try:
            job = {"entry": entry, "arch": self._facts()["arch"], "debug": debug}
            with self._reserved(self._free_compiler) as compilers:
                worker = compilers.take()
                keep = False
                try:
                    answer, block = worker.ask(job, COMPILE_SECONDS, source_bytes)
                    keep = True
                except TimeoutError:
                    return Result("timeout", f"compiling took longer than {COMPILE_SECONDS:g} s")
                except Ended as error:
                    return Result("crashed", f"the compiler: {error}", printed=worker.printed())
                finally:
                    compilers.give_back(worker, keep)
        except SetAside as error:
            return Result("device_lost", str(error))
        if answer["status"] != "ok":
            return Result.of(answer)
        return Code.unpack(entry, block)

    def _free_compiler(self) -> WorkerPool | None:
        return self.compilers if self.compilers.reserved < self.compilers.parallel else None

    # ---- running ---------------------------------------------------------------------------------

    def _do(
        self, do: str, launch: Launch, buffers: list[SharedBuffer], seconds: float, **more: Any
    ) -> Result:
        """Run a job on a device; the buffers then hold the outputs. more: fields of the message to
        the worker. Raise SetAside if no device can be used."""
        message = {"do": do, **launch.message, **more}
        while True:
            with (
                self._reserved(self._free_device) as workers,
                suppress(SetAside),  # it was set aside just now: take another device
            ):
                worker = workers.take()
                with workers.quiet() if do == "time" else nullcontext():
                    return self._ask(workers, worker, message, launch, buffers, seconds)

    def _ask(
        self,
        workers: WorkerPool,
        worker: Worker,
        message: dict[str, Any],
        launch: Launch,
        buffers: list[SharedBuffer],
        seconds: float,
        tool: str | None = None,
    ) -> Result:
        """Have a worker do a job, and give it back. tool: of compute-sanitizer, under which it was
        started for this job."""
        keep, fault, holds = False, True, True
        answer: dict[str, Any] = {}
        try:
            if tool is not None:
                worker.greet(START_SECONDS)
            files = [buffer.file for buffer in buffers]
            answer, _ = worker.ask(message, seconds, launch.code.block, files)
            fault = bool(answer.get("faulted"))
            if tool is not None:
                worker.channel.send({"do": "end"})  # and compute-sanitizer completes its report
                worker.end(START_SECONDS)
            else:
                keep = not fault and self.fresh == "fault" and not launch.code.allocates
                holds = False  # a process that reports a fault has ended its kernel
        except TimeoutError:
            end = ": the process was killed" if tool is None else f" ({tool})"
            answer = {"status": "timeout", "message": f"no answer after {seconds:g} s{end}"}
        except (Ended, OSError) as error:
            said = f"{tool or 'the process of the kernel'}: {error}"
            answer = {"status": "crashed", "message": said}
        finally:
            printed = worker.printed()
            lost = answer.get("status") == "device_lost"  # as the driver reports
            why = f"{workers.name}: {answer['message']}: set aside until reset" if lost else None
            workers.give_back(worker, keep, fault, holds, why)
        result = Result.of(answer, printed, launch.code.resources)
        if result.status == "assertion":
            failed = [line for line in printed.splitlines() if "Assertion `" in line]
            result = replace(result, message="\n".join([*failed[:1], result.message]))
        return replace(result, device=workers.device)

    def _sanitized(
        self, launch: Launch, buffers: list[SharedBuffer], tool: str, program: str
    ) -> Result:
        """Run in a process of its own under compute-sanitizer. SetAside."""
        with (
            self._reserved(self._free_device) as workers,
            tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,
        ):
            report = Path(folder) / "report"
            command = [*sanitizer_command(program, tool, report), *self.worker, "traced"]
            worker = Worker(command, self._environment(workers.device))
            message, seconds = {"do": "run", **launch.message}, SLOWER * self.timeout
            result = self._ask(workers, worker, message, launch, buffers, seconds, tool)
            text = report.read_text(errors="replace") if report.exists() else ""
        found = tuple(read_report(text))
        status = status_of(found)
        if status is None:
            return result
        said = "\n".join(map(str, found))
        return replace(result, status=status, message=said, explanation=found)

    def _check_room(self, on_device: int, on_host: int) -> None:
        """NoRoom, before memory is taken, if the arrays of a job do not fit. SetAside."""
        total = int(self._facts()["total_bytes"])
        if self.memory is not None and on_device > self.memory:
            said = f"device memory, and this Pool allows {self.memory:,} (memory=)"
        elif on_device > total:
            said = f"device memory, and the device has {total:,}"
        elif on_host > available():
            said = f"device memory, and {on_host:,} of the host's, which has {available():,} left"
        else:
            return
        raise NoRoom(f"the arrays need {on_device:,} bytes (guard bands included) of {said}")

    def _in_buffers(
        self,
        launches: list[Launch],
        more_sets: int,
        more_bytes: int,
        do: Callable[[list[SharedBuffer]], Result],
    ) -> Result:
        """Return do(buffers), which hold the arrays of the launches, of equal sizes. more_sets and
        more_bytes: of device memory, besides one such buffer."""
        size, resources = launches[0].size, launches[0].code.resources
        try:
            self._check_room(size * (1 + more_sets) + more_bytes, (HOST_COPIES + more_sets) * size)
            with ExitStack() as stack:
                buffers = [stack.enter_context(SharedBuffer(size)) for _ in launches]
                for launch, buffer in zip(launches, buffers):
                    launch.fill(buffer.memory)
                return do(buffers)
        except SetAside as error:
            return Result("device_lost", str(error), resources=resources)
        except NoRoom as error:
            return Result("out_of_memory", str(error), resources=resources)

    def _run(self, launch: Launch, tool: str | None = None, program: str = "") -> Result:
        """Launch once, or under a tool of compute-sanitizer."""

        def do(buffers: list[SharedBuffer]) -> Result:
            if tool is not None:
                result = self._sanitized(launch, buffers, tool, program)
            else:
                result = self._do("run", launch, buffers, self.timeout)
            if result.status in ("ok", "wrong_result", "out_of_bounds") and not result.explanation:
                result = replace(result, outputs=launch.read(buffers[0].memory))
            return result

        return self._in_buffers([launch], 0, 0, do)

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
        debug: bool = False,
    ) -> Result:
        """Compile a kernel and launch it once.

        entry: its name as C++ spells it, `scale<__nv_bfloat16>`. args: for each parameter an array
        (NumPy, or an NDArray on the host, which may be bfloat16), `Out(shape, dtype)` for one that
        the kernel writes all of, `InOut(array)`, `Random(shape, dtype, seed)`, a number, or the
        bytes of a struct. An array for a parameter that the signature shows as written (`float*`)
        is as if it were InOut; `extern "C"` kernels show nothing. Out and InOut are returned.

        sanitizer: run under compute-sanitizer: "memcheck", "racecheck", "synccheck" or "initcheck".
        explain: repeat a fault under it, so that message and explanation have line, thread, block.
        debug: check the bounds of arrays in each access, as `compile` does; an element outside is
        an `assertion`, whose message names parameter and element.
        ValueError and TypeError for wrong calls, also for a sanitizer that is not installed.
        """
        if sanitizer is not None and sanitizer not in TOOLS:
            raise ValueError(f"sanitizer: must be one of {', '.join(TOOLS)}, not {sanitizer!r}")
        program = find_tool("compute-sanitizer") if sanitizer is not None or explain else None
        if sanitizer is not None and program is None:
            raise ValueError(f"sanitizer: {NO_SANITIZER}")
        code = self._compile(source, entry, debug)
        if isinstance(code, Result):
            return code
        launch = Launch(code, Case(grid, block, args, shared).drawn(0))
        result = self._run(launch, sanitizer, program or "")
        tool = EXPLAINED_BY.get(result.status)
        if sanitizer is not None or not explain or tool is None:
            return result
        if program is None:
            return replace(result, message=f"{result.message}\n{tool}: {NO_SANITIZER}")
        again = self._run(launch, tool, program)
        found = "\n".join(map(str, again.explanation)) or f"{again.status}: {again.message}"
        message = f"{result.message}\n{tool}: {found}"
        return replace(result, message=message, explanation=again.explanation)

    # ---- evaluating ------------------------------------------------------------------------------

    def evaluate(
        self,
        source: str,
        entry: str,
        cases: Sequence[Case],
        reference: Callable[..., Any] | Sequence[Any],
        tolerance: Tolerance = None,
        trials: int = 5,
        time: bool = True,
    ) -> Result:
        """Compile a kernel, compare its outputs with a reference, and time it.

        cases: `Case(grid, block, args, shared=0)`; a `Random` among its args is drawn anew for each
        of `trials`. reference: a function of the arguments without Out (arrays as NumPy arrays,
        bfloat16 as float32) that returns the outputs, or for each case its outputs. tolerance:
        (absolute, relative), a number for both, or None for the dtype's own: 1e-4 for float32, 1e-2
        for float16 and bfloat16 (KernelBench's), 1e-8 for float64, 0 for all others; an element is
        right where |got - expected| <= absolute + relative |expected|, NaN where NaN is expected.

        The first failure ends it. A timed call that is not possible is `wrong_result` too.
        """
        cases = _cases(cases, reference)
        whole("trials", trials, 1)
        both(tolerance)
        code = self._compile(source, entry)
        if isinstance(code, Result):
            return code
        result, timings = Result("ok", resources=code.resources), []
        for number, case in enumerate(cases):
            expected = reference if callable(reference) else reference[number]
            launches = []
            for trial in range(trials):
                launch = Launch(code, case.drawn(trial))
                wanted = _expected(launch, expected)
                result = _compared(self._run(launch), wanted, launch, tolerance)
                if result.status != "ok":
                    where = f"case {number}, trial {trial}: {result.message}"
                    return replace(result, message=where, timing=tuple(timings))
                if len(launches) < MOST_SETS and len(launches) * launch.size < TIMED_BYTES:
                    launches.append((launch, wanted))
            if time:
                timed = self._timed(launches, tolerance)
                timings += timed.timing
                if timed.status != "ok":
                    where = f"case {number}, timed: {timed.message}"
                    return replace(timed, message=where, timing=tuple(timings))
        return replace(result, timing=tuple(timings))

    def _timed(
        self, launches: list[tuple[Launch, list[np.ndarray]]], tolerance: Tolerance
    ) -> Result:
        """Time one case over all sets of inputs; compare the outputs of each set's last call."""
        sets, turns = len(launches), zip(launches, [*launches[1:], launches[0]])
        warm = sets > 1 and not any(one.shares_with(next_one) for (one, _), (next_one, _) in turns)

        def do(buffers: list[SharedBuffer]) -> Result:
            seconds = self.timeout * LEAST_TIMED_CALLS
            result = self._do("time", launches[0][0], buffers, seconds, warm=warm)
            for buffer, (launch, wanted) in zip(buffers, launches):
                outputs = launch.read(buffer.memory) if result.status == "ok" else ()
                result = _compared(replace(result, outputs=outputs), wanted, launch, tolerance)
            impossible = [timing.reason for timing in result.timing if not timing.valid]
            if result.status == "ok" and impossible:
                result = replace(result, status="wrong_result", message=impossible[0])
            return replace(result, outputs=())

        return self._in_buffers([launch for launch, _ in launches], sets, FLUSH_BYTES, do)

    # ---- health, cleanup, reset ------------------------------------------------------------------

    def state(self) -> list[dict[str, Any]]:
        """Return of each device: number, facts (name, arch, ...), the processes that are ready,
        used and starting, faults and processes started so far, and why it was set aside (None: it
        was not). `compilers`: the same of the processes that compile, for all devices."""
        with self.changed:
            compilers = self.compilers.state()
            return [
                {"device": number, "facts": workers.facts, "compilers": compilers} | workers.state()
                for number, workers in self.runners.items()
            ]

    def cleanup(self) -> int:
        """Return the bytes of device memory that the idle processes gave back to the system."""
        freed = 0
        for workers in self.runners.values():
            for worker in workers.take_ready():
                keep = False
                with suppress(TimeoutError, Ended):  # it is replaced, which gives back all it had
                    freed += worker.ask({"do": "clean"}, self.timeout)[0]["freed"]
                    keep = True
                workers.give_back(worker, keep)
        return freed

    def reset(self, device: int) -> None:
        """Replace the processes of a device and check its health, also if it was set aside. If no
        process compiles any more, replace those too. RuntimeError, with the reason, if that fails;
        KeyError for a device that is not the pool's."""
        runners = self.runners[device]
        broken = (self.compilers,) if self.compilers.set_aside is not None else ()
        try:
            for workers in (*broken, runners):
                with self._reserved(lambda its=workers: None if its.reserved else its):
                    workers.reset()
                    workers.give_back(workers.take(), keep=True)
        except SetAside as error:
            raise RuntimeError(str(error)) from None


def available() -> int:
    """Return the bytes of host memory that can be had without swapping."""
    with open("/proc/meminfo") as file:
        kib = next(line.split()[1] for line in file if line.startswith("MemAvailable:"))
    return int(kib) << 10


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


def _visible_devices() -> list[str] | None:
    """Return the names of the devices that CUDA programs of this environment see; None: all."""
    said = os.environ.get("CUDA_VISIBLE_DEVICES")
    return None if said is None else [name for name in said.split(",") if name]


def _numbers(devices: Any) -> list[int]:
    if isinstance(devices, str) or not isinstance(devices, Iterable):
        raise TypeError(f"devices: must be a list of numbers, not {devices!r}")
    numbers, visible = [whole("devices", device, 0) for device in devices], _visible_devices()
    for number in numbers:
        if visible is not None and number >= len(visible):
            raise ValueError(
                f"devices: there is no {number}, since CUDA_VISIBLE_DEVICES={','.join(visible)} "
                f"shows {len(visible) or 'none'}"
            )
        if numbers.count(number) > 1:
            raise ValueError(f"devices: {number} is there twice")
    if not numbers:
        raise ValueError("devices: there must be one at least")
    return numbers


def _cases(cases: Any, reference: Any) -> list[Case]:
    if not isinstance(cases, Iterable):
        raise TypeError(f"cases: must be a list of Case, not {type(cases).__name__}")
    found = list(cases)
    for number, case in enumerate(found):
        if not isinstance(case, Case):
            raise TypeError(f"cases[{number}]: must be a Case, not {type(case).__name__}")
    if not found:
        raise ValueError("cases: there must be one at least")
    if not callable(reference) and not hasattr(reference, "__len__"):
        raise TypeError(
            "reference: must be a function, or a list with the outputs of each case, not "
            f"{type(reference).__name__}"
        )
    if not callable(reference) and len(reference) != len(found):
        raise ValueError(f"reference: {len(reference)} for {len(found)} cases; give one each")
    return found


def _expected(launch: Launch, reference: Any) -> list[np.ndarray]:
    """Return the right outputs of a launch. of_case: a method that takes the case, with its arrays
    drawn (needle.kernels.job)."""
    if hasattr(reference, "of_case"):
        reference = reference.of_case(launch.case)
    elif callable(reference):
        reference = reference(*launch.inputs())
    single = isinstance(reference, (np.ndarray, np.generic, NDArray))
    if not single and not isinstance(reference, Iterable):
        raise TypeError(
            "reference: must give an array, or several, one for each output, not "
            f"{type(reference).__name__}"
        )
    found = [reference] if single else list(reference)
    if len(found) != len(launch.outputs):
        raise ValueError(
            f"reference: gave {len(found)} outputs, and the kernel has {len(launch.outputs)}: "
            f"{', '.join(place.name for place in launch.outputs) or 'none'}"
        )
    return [np.asarray(array) for array in found]


def _compared(
    result: Result, wanted: list[np.ndarray], launch: Launch, tolerance: Tolerance
) -> Result:
    """Return the result, with the first difference if it was ok."""
    if result.status != "ok":
        return result
    for place, got, expected in zip(launch.outputs, result.outputs, wanted):
        wrong = difference(got, expected, place.dtype, tolerance)
        if wrong is not None:
            return replace(result, status="wrong_result", message=f"{place.name}: {wrong}")
    return result
