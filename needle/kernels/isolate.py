"""Kernels in processes of their own, where a fault costs one kernel: `Pool`.

    with Pool() as pool:
        result = pool.run(source, "scale", grid, block, [x, Out(x.shape), 2.0, x.size])
        if result.status == "ok":
            y = result.outputs[0]

The pool opens no GPU. One process compiles, another runs (needle.kernels.worker); the arrays lie in
memory that they share, with guard bands (needle.kernels.arena). Whatever the kernel does is an
answer: a Result with one of needle.kernels.frames.STATUSES. Exceptions are for calls that are wrong
in themselves.

Compiling and running CUDA is running arbitrary code. The processes keep faults apart; against a
person who means harm they are no wall.
"""

from __future__ import annotations

import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from needle._C import NDArray
from needle.kernels import landlock
from needle.kernels.asked import (
    device_numbers,
    encoded,
    evaluation,
    pool_numbers,
    sendable,
    visible_devices,
)
from needle.kernels.crew import START_SECONDS, Crew, Ended, Late, Lost, Worker
from needle.kernels.frames import CLEANED, COMPILED, COUNTED, RAN, RUNNER_READY, TIMED, fitting
from needle.kernels.launch import Code, Image, Launch
from needle.kernels.measure import FLUSH_BYTES, LEAST_CALLS, WARM_UP, Timing
from needle.kernels.sanitizer import (
    TOOLS,
    Finding,
    find_sanitizer,
    read_report,
    sanitizer_command,
    status_of,
)
from needle.kernels.values import Case, Size, Tolerance, difference, draw

# What is repeated under compute-sanitizer to be explained, and by which of its tools.
EXPLAINED_BY = {
    "out_of_bounds": "memcheck",
    "illegal_address": "memcheck",
    "misaligned_address": "memcheck",
    "assertion": "memcheck",
    "launch_failure": "memcheck",
    "timeout": "synccheck",
}
NO_SANITIZER = "there is no compute-sanitizer here; it comes with the CUDA toolkit (CUDA_HOME)"
SLOWER = 10  # times as long as a plain run may take below compute-sanitizer
COMPILE_SECONDS = 60.0
TIMED_BYTES = 2 << 30  # of inputs that a timing holds in several sets
MOST_SETS = LEAST_CALLS  # of them, so that the shortest timing calls each
HOST_COPIES = 3  # of an arena, at the most, while a job runs
LEAST_TIMED_CALLS = 2 * (WARM_UP + LEAST_CALLS)  # each of which may take the whole timeout


@dataclass(frozen=True)
class Result:
    """What became of a kernel. `outputs`: the arrays that came back, in the order of the arguments,
    also where they are wrong. `resources`: registers, shared_bytes, local_bytes, max_threads, and
    of a launch that fits occupancy, limiter, blocks_per_sm. `timing`: one for each case of
    `evaluate`. `explanation`: what compute-sanitizer found. `device` is the number of the GPU, -1
    for none."""

    status: str
    message: str = ""
    outputs: tuple[np.ndarray, ...] = ()
    printed: str = ""
    resources: dict[str, Any] = field(default_factory=dict)
    timing: tuple[Timing, ...] = ()
    explanation: tuple[Finding, ...] = ()
    device: int = -1


def mps() -> Path | None:
    """The pipe of a control daemon of MPS that CUDA programs of this environment would join."""
    pipe = Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY") or "/tmp/nvidia-mps") / "control"
    return pipe if pipe.exists() else None


def available() -> int:
    """Bytes of host memory that can be had without swapping."""
    with open("/proc/meminfo") as file:
        kib = next(line.split()[1] for line in file if line.startswith("MemAvailable:"))
    return int(kib) << 10


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
    confined: sources may be a stranger's: what compiles them reads the toolkit's headers and no
    other file, and writes none (needle.kernels.landlock).

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
        pool_numbers(timeout, memory, spares)
        pipe = mps()
        if pipe is not None:
            raise RuntimeError(
                f"MPS is on ({pipe}): under it a fault ends the work of all its clients, so "
                "kernels cannot be kept apart. End it: echo quit | nvidia-cuda-mps-control; where "
                "no daemon runs any more, remove that file"
            )
        if confined:
            landlock.version()
        self.timeout, self.memory, self.fresh = float(timeout), memory, fresh
        self.changed = threading.Condition()
        self.closed = False
        numbers = list(range(self._count_devices())) if devices is None else device_numbers(devices)
        self.crews = {
            n: Crew(f"cuda({n})", self._starter("runner", n), 1 + spares, 1, True, self.changed)
            for n in numbers
        }
        compilers = min(len(self.crews), os.cpu_count() or 1)
        self.compilers = Crew(
            "compiling",
            self._starter("confined" if confined else "compiler"),
            compilers,
            compilers,
            False,
            self.changed,
        )

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends all processes. Jobs of other threads are answered `crashed`."""
        self.closed = True
        for crew in (*self.crews.values(), self.compilers):
            crew.close()

    # ---- processes -------------------------------------------------------------------------------

    def _environment(self, device: int | None) -> dict[str, str]:
        """Of a process: it finds this needle, sees one GPU, and starts no threads to compute."""
        root = str(Path(__file__).resolve().parent.parent.parent)
        paths = [os.path.abspath(p) for p in os.environ.get("PYTHONPATH", "").split(":") if p]
        found = {
            **os.environ,
            "PYTHONPATH": ":".join([root, *paths]),
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
        }
        if device is not None:
            visible = visible_devices()
            found["CUDA_VISIBLE_DEVICES"] = str(device) if visible is None else visible[device]
        return found

    def _starter(self, role: str, device: int | None = None) -> Callable[[], Worker]:
        return lambda: Worker([*self.worker, role], self._environment(device))

    def _count_devices(self) -> int:
        worker = self._starter("devices")()
        try:
            return worker.greet(START_SECONDS, COUNTED)["devices"]
        except (Late, Ended) as error:
            raise RuntimeError(f"no GPU to run kernels on: {str(error) or 'no answer'}") from None
        finally:
            worker.kill()
            worker.end()
            worker.close()

    @contextmanager
    def _crew(self) -> Iterator[tuple[int, Crew]]:
        """A device that no other job has, one with a process ready before others. Lost when all are
        set aside."""
        with self.changed:
            while True:
                if self.closed:
                    raise RuntimeError("this Pool is closed")
                free = [(n, crew) for n, crew in self.crews.items() if crew.free()]
                if free:
                    number, crew = max(free, key=lambda pair: len(pair[1].ready))
                    crew.taken += 1
                    break
                if all(crew.lost is not None for crew in self.crews.values()):
                    raise Lost("; ".join(str(crew.lost) for crew in self.crews.values()))
                self.changed.wait(1.0)
        try:
            yield number, crew
        finally:
            with self.changed:
                crew.taken -= 1
                self.changed.notify_all()

    # ---- compiling -------------------------------------------------------------------------------

    def _compile(self, source: str, entry: str, debug: bool = False) -> Code | Result:
        text = encoded("source", source)
        encoded("entry", entry)
        try:
            job = {"entry": entry, "arch": self._facts()["arch"], "debug": debug}
        except Lost as lost:
            return Result("device_lost", str(lost))
        try:
            fitting(job, text)
        except ValueError as error:
            raise ValueError(f"source and entry are too long to be sent: {error}") from None
        with self.changed:
            while self.compilers.taken >= self.compilers.parallel:
                self.changed.wait(1.0)
            self.compilers.taken += 1
        try:
            try:
                worker = self.compilers.take()
            except Lost as lost:
                return Result("device_lost", f"{lost}: nothing compiles before a reset")
            keep = False
            try:
                answer, block = worker.ask(job, text, (), COMPILE_SECONDS, COMPILED)
                keep = True
            except Late:
                return Result("timeout", f"compiling took longer than {COMPILE_SECONDS:g} s")
            except Ended as error:
                said = f"the compiler: {worker.how_ended(error)}"
                return Result("crashed", said, printed=worker.text_printed())
            finally:
                self.compilers.give_back(worker, keep)
        finally:
            with self.changed:
                self.compilers.taken -= 1
                self.changed.notify_all()
        if answer.get("status") != "ok":
            return _result(answer)
        return Code(entry, block, answer["parameters"], answer["resources"], answer["allocates"])

    def _facts(self) -> dict[str, Any]:
        """Of a GPU; those of a pool are of one kind. Waits for the first process. Lost."""
        with self.changed:
            while True:
                for crew in self.crews.values():
                    for worker in (*crew.ready, *crew.used):
                        if worker.facts:
                            return worker.facts
                if all(crew.lost is not None for crew in self.crews.values()):
                    raise Lost("; ".join(str(crew.lost) for crew in self.crews.values()))
                if self.closed:
                    raise RuntimeError("this Pool is closed")
                self.changed.wait(1.0)

    # ---- running ---------------------------------------------------------------------------------

    def _do(
        self, do: str, launch: Launch, images: list[Image], seconds: float, **more: Any
    ) -> Result:
        """One job for a runner, and its answer; the images hold what came back. `more` goes into
        its header."""
        header = sendable(launch, do, **more)
        while True:
            try:
                with self._crew() as (number, crew):
                    try:
                        worker = crew.take()
                    except Lost:
                        continue  # set aside just now: another device, if there is one
                    if do == "time":
                        crew.still()
                        with crew.quiet:
                            result = self._ask(crew, worker, header, launch, images, seconds)
                    else:
                        result = self._ask(crew, worker, header, launch, images, seconds)
                    return replace(result, device=number)
            except Lost as lost:
                return Result("device_lost", str(lost), resources=launch.code.resources)

    def _ask(
        self,
        crew: Crew,
        worker: Worker,
        header: dict[str, Any],
        launch: Launch,
        images: list[Image],
        seconds: float,
    ) -> Result:
        keep, fault, holds = False, True, True
        answer: dict[str, Any] = {}
        try:
            files = [image.file for image in images]
            form = TIMED if header["do"] == "time" else RAN
            answer, _ = worker.ask(header, launch.code.block, files, seconds, form)
            fault = holds = bool(answer.get("faulted"))
            keep = not fault and self.fresh == "fault" and not launch.code.allocates
            # A process that answered a fault has ended its kernel: the next need not wait for it.
            holds = False
        except Late:
            stopped = "; its process stood still (SIGSTOP)" if worker.stopped() else ""
            answer = {
                "status": "timeout",
                "message": f"no answer after {seconds:g} s: the process was killed{stopped}",
            }
        except Ended as error:
            said = f"the process of the kernel: {worker.how_ended(error)}"
            answer = {"status": "crashed", "message": said}
        finally:
            crew.give_back(worker, keep, fault, holds, _lost(crew, answer))
        printed = worker.text_printed()
        result = _result(answer, printed, launch.code.resources)
        if result.status == "assertion":
            said = [line for line in printed.splitlines() if "Assertion `" in line]
            result = replace(result, message="\n".join([*said[:1], result.message]))
        return result

    def _too_large(self, launch: Launch, on_device: int, on_host: int) -> Result | None:
        """The answer to a job whose arrays find no place, before any memory is taken for them."""
        try:
            whole = int(self._facts()["total_bytes"])
        except Lost as lost:
            return Result("device_lost", str(lost), resources=launch.code.resources)
        said = None
        if self.memory is not None and on_device > self.memory:
            said = f"device memory, and this Pool allows {self.memory:,} (memory=)"
        elif on_device > whole:
            said = f"device memory, and the device has {whole:,}"
        elif on_host > available():
            said = f"device memory, and {on_host:,} of the host's, which has {available():,} left"
        if said is None:
            return None
        message = f"the arrays need {on_device:,} bytes (guard bands included) of {said}"
        return Result("out_of_memory", message, resources=launch.code.resources)

    def _run(self, launch: Launch, seconds: float) -> Result:
        too_large = self._too_large(launch, launch.size, HOST_COPIES * launch.size)
        if too_large is not None:
            return too_large
        image = Image(launch.size)
        try:
            launch.fill(image.memory)
            result = self._do("run", launch, [image], seconds)
            if result.status in ("ok", "wrong_result", "out_of_bounds"):
                result = replace(result, outputs=launch.read(image.memory))
            return result
        finally:
            image.close()

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
        is as if it were InOut; `extern "C"` kernels show nothing. Only Out and InOut come back.

        sanitizer: run below compute-sanitizer, "memcheck", "racecheck", "synccheck" or "initcheck".
        explain: repeat a fault below it, so that message and explanation have line, thread, block.
        debug: check the bounds of arrays in each access, as `compile` does; an element outside is
        an `assertion`, whose message names parameter and element.
        ValueError and TypeError for what cannot be run, a sanitizer that is not installed among it.
        """
        if sanitizer is not None and sanitizer not in TOOLS:
            raise ValueError(f"sanitizer: must be one of {', '.join(TOOLS)}, not {sanitizer!r}")
        program = find_sanitizer() if sanitizer is not None or explain else None
        if sanitizer is not None and program is None:
            raise ValueError(f"sanitizer: {NO_SANITIZER}")
        code = self._compile(source, entry, debug)
        if isinstance(code, Result):
            return code
        launch = Launch(code, draw(Case(grid, block, args, shared), 0))
        if sanitizer is not None and program is not None:
            return self._sanitized(launch, sanitizer, program)
        result = self._run(launch, self.timeout)
        if explain and result.status in EXPLAINED_BY:
            tool = EXPLAINED_BY[result.status]
            if program is None:
                return replace(result, message=f"{result.message}\n{tool}: {NO_SANITIZER}")
            again = self._sanitized(launch, tool, program)
            found = "\n".join(str(finding) for finding in again.explanation)
            told = found or f"{again.status}: {again.message}"
            return replace(
                result, message=f"{result.message}\n{tool}: {told}", explanation=again.explanation
            )
        return result

    def _sanitized(self, launch: Launch, tool: str, program: str) -> Result:
        """A run in a process of its own below compute-sanitizer."""
        header = sendable(launch, "run")
        too_large = self._too_large(launch, launch.size, HOST_COPIES * launch.size)
        if too_large is not None:
            return too_large
        image = Image(launch.size)
        try:
            launch.fill(image.memory)
            with (
                self._crew() as (number, crew),
                tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,
            ):
                report = Path(folder) / "report"
                command = [*sanitizer_command(program, tool, report), *self.worker, "traced"]
                worker = Worker(command, self._environment(number))
                result = self._below(crew, worker, tool, header, launch, image)
                text = report.read_text(errors="replace") if report.exists() else ""
            found = tuple(read_report(text))
            status = status_of(found)
            if status is not None:
                message = "\n".join(str(finding) for finding in found)
                result = replace(result, status=status, message=message, explanation=found)
            elif result.status == "ok":
                result = replace(result, outputs=launch.read(image.memory))
            return replace(result, device=number)
        except Lost as lost:
            return Result("device_lost", str(lost), resources=launch.code.resources)
        finally:
            image.close()

    def _below(
        self,
        crew: Crew,
        worker: Worker,
        tool: str,
        header: dict[str, Any],
        launch: Launch,
        image: Image,
    ) -> Result:
        seconds, fault = SLOWER * self.timeout, True
        answer: dict[str, Any] = {}
        try:
            worker.greet(START_SECONDS, RUNNER_READY)
            answer, _ = worker.ask(header, launch.code.block, [image.file], seconds, RAN)
            fault = bool(answer.get("faulted"))
            worker.channel.send({"do": "end"})  # and compute-sanitizer completes its report
            worker.end(START_SECONDS)
        except Late:
            answer = {"status": "timeout", "message": f"no answer after {seconds:g} s ({tool})"}
        except Ended as error:
            answer = {"status": "crashed", "message": f"{tool}: {worker.how_ended(error)}: {error}"}
        except OSError as error:
            answer = {"status": "crashed", "message": f"{tool}: {worker.end()}: {error}"}
        finally:
            worker.kill()
            worker.end()
            crew.follow(worker, fault, _lost(crew, answer))
        return _result(answer, worker.text_printed(), launch.code.resources)

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
        """Compile a kernel, compare what it computes with a reference, and time it.

        cases: `Case(grid, block, args, shared=0)`; a `Random` among its args is drawn anew for each
        of `trials`. reference: a function of the arguments but Out (arrays as NumPy arrays,
        bfloat16 as float32) that returns the outputs, or for each case its outputs. tolerance:
        (absolute, relative), a number for both, or None for the dtype's own: 1e-4 for float32, 1e-2
        for float16 and bfloat16 (KernelBench's), 1e-8 for float64, 0 for all others; an element is
        right where |got - expected| <= absolute + relative |expected|, NaN where NaN is expected.

        The first failure ends it. A timed call that is not possible is `wrong_result` too.
        """
        cases = evaluation(cases, reference, tolerance, trials)
        code = self._compile(source, entry)
        if isinstance(code, Result):
            return code
        result, timings = Result("ok", resources=code.resources), []
        for number, case in enumerate(cases):
            expected = reference if callable(reference) else reference[number]
            launches = []
            for trial in range(trials):
                launch = Launch(code, draw(case, trial))
                wanted = _expected(launch, expected)
                result = self._run(launch, self.timeout)
                if result.status == "ok":
                    result = _compared(result, result.outputs, wanted, launch, tolerance)
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
        """One timing over all sets of inputs, and what the last call of each left, compared."""
        first, sets = launches[0][0], len(launches)
        turns = zip(launches, [*launches[1:], launches[0]])
        warm = sets > 1 and not any(one.shares_with(next_one) for (one, _), (next_one, _) in turns)
        on_device = first.size * (sets + 1) + FLUSH_BYTES
        too_large = self._too_large(first, on_device, (HOST_COPIES + sets) * first.size)
        if too_large is not None:
            return too_large
        images: list[Image] = []
        try:
            for launch, _ in launches:
                images.append(Image(launch.size))
                launch.fill(images[-1].memory)
            seconds = self.timeout * LEAST_TIMED_CALLS
            result = self._do("time", first, images, seconds, warm=warm)
            for image, (launch, wanted) in zip(images, launches):
                if result.status == "ok":
                    outputs = launch.read(image.memory)
                    result = _compared(result, outputs, wanted, launch, tolerance)
            impossible = [timing.reason for timing in result.timing if not timing.valid]
            if result.status == "ok" and impossible:
                result = replace(result, status="wrong_result", message=impossible[0])
            return result
        finally:
            for image in images:
                image.close()

    # ---- looking after it ------------------------------------------------------------------------

    def state(self) -> list[dict[str, Any]]:
        """Of each device: number, facts (name, arch, ...), the processes that are ready, used and
        starting, faults and processes started so far, and why it was set aside (None: it was
        not). `compilers`: the same of the processes that compile, for all devices."""
        with self.changed:
            compilers = self.compilers.state()
            found = []
            for number, crew in self.crews.items():
                workers = (*crew.ready, *crew.used)
                facts = next((w.facts for w in workers if w.facts), {})
                found.append(
                    {"device": number, "facts": facts, **crew.state(), "compilers": compilers}
                )
        return found

    def cleanup(self) -> int:
        """Bytes of device memory that the waiting processes gave back to the system."""
        freed = 0
        for crew in self.crews.values():
            with self.changed:
                idle, crew.ready = crew.ready, []
                crew.used += idle
            for worker in idle:
                keep = False
                try:
                    answer, _ = worker.ask({"do": "clean"}, b"", (), self.timeout, CLEANED)
                    freed, keep = freed + answer["freed"], True
                except (Late, Ended):
                    pass  # it is replaced, which gives back all it had
                finally:
                    crew.give_back(worker, keep)
        return freed

    def reset(self, device: int) -> None:
        """A new process on a device, which proves it; also where the device was set aside. Where no
        process compiles any more, new ones for that too. RuntimeError, with the reason, where that
        fails; KeyError for a device that is not the pool's."""
        crew = self.crews[device]
        for one in (self.compilers, crew) if self.compilers.lost is not None else (crew,):
            with self.changed:
                while one.taken:
                    self.changed.wait(1.0)
                one.taken += 1
            try:
                one.reset()
                one.give_back(one.take(), keep=True)
            except Lost as lost:
                raise RuntimeError(str(lost)) from None
            finally:
                with self.changed:
                    one.taken -= 1
                    self.changed.notify_all()


def _lost(crew: Crew, answer: dict[str, Any]) -> str | None:
    """Why a device is set aside after an answer: the driver said that it is lost."""
    if answer.get("status") != "device_lost":
        return None
    return f"{crew.name}: {answer.get('message')}: set aside until reset"


def _result(
    answer: dict[str, Any], printed: str = "", resources: dict[str, Any] | None = None
) -> Result:
    """A Result of an answer, which has its form."""
    timing = (Timing.from_json(answer["timing"]),) if "timing" in answer else ()
    return Result(
        answer["status"],
        answer.get("message", ""),
        printed=printed,
        resources={**(resources or {}), **answer.get("occupancy", {})},
        timing=timing,
    )


def _expected(launch: Launch, reference: Any) -> list[np.ndarray]:
    """What the outputs should be, one for each."""
    if callable(reference):
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
    result: Result,
    outputs: Sequence[np.ndarray],
    wanted: list[np.ndarray],
    launch: Launch,
    tolerance: Tolerance,
) -> Result:
    for place, got, expected in zip(launch.outputs, outputs, wanted):
        wrong = difference(got, expected, place.dtype, tolerance)
        if wrong is not None:
            return replace(result, status="wrong_result", message=f"{place.name}: {wrong}")
    return result
