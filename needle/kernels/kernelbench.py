"""Jobs in KernelBench's form (Ouyang et al. 2025, arXiv:2502.10517), where this Python has torch.

A reference in PyTorch (`Model`, `get_inputs`, `get_init_inputs`) is compared with a candidate
(`ModelNew`, with CUDA by `torch.utils.cpp_extension.load_inline`, Triton, or plain PyTorch). Each
has a process of its own (needle.kernels.torch_worker). The reference's draws inputs for every call,
timed ones too, and compares; the candidate's gets the inputs and the seed of the weights, never an
output of the reference.
"""

from __future__ import annotations

import importlib.util
import os
import secrets
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from needle.kernels.process import START_SECONDS, Device, Message, Process
from needle.kernels.timing import SHORTEST, least_time

COMMAND = (sys.executable, str(Path(__file__).with_name("torch_worker.py")))
COMPILE_SECONDS = 600.0  # of a candidate: nvcc reads PyTorch's headers
FIRST_CALL_SECONDS = 60.0  # more than a later one takes: Triton compiles then
TIMED_SECONDS = 20.0  # after which no timed call begins, once there are five
LEAST_TIMED = 5
PRECISIONS = ("fp32", "fp16", "bf16")


@dataclass(frozen=True)
class Problem:
    """A job, by the names of KernelBench's `eval_kernel_against_ref`."""

    original_model_src: str
    custom_model_src: str
    seed_num: int = 42
    num_correct_trials: int = 5
    num_perf_trials: int = 100
    measure_performance: bool = True
    precision: str = "fp32"

    def __post_init__(self) -> None:
        if self.precision not in PRECISIONS:
            raise ValueError(f"precision: must be one of {', '.join(PRECISIONS)}")
        if self.num_correct_trials < 1 or self.num_perf_trials < 1:
            raise ValueError("num_correct_trials and num_perf_trials must be 1 or more")


@dataclass
class KernelExecResult:
    """The outcome, in KernelBench's names. Times are in milliseconds, -1 where there is none:
    `runtime` is the mean of `runtime_stats`, `speedup` is ref_runtime by runtime. `metadata` has
    hardware, device, deterministic, correctness_trials, and of an error its name and text."""

    compiled: bool = False
    correctness: bool = False
    metadata: dict[str, Any] = field(default_factory=dict)
    runtime: float = -1.0
    runtime_stats: dict[str, Any] = field(default_factory=dict)
    ref_runtime: float = -1.0
    ref_runtime_stats: dict[str, Any] = field(default_factory=dict)
    speedup: float = -1.0

    @property
    def status(self) -> str:
        """The word for it among those of a Result."""
        name = self.metadata.get("runtime_error_name")
        if name in ("crashed", "timeout", "device_lost"):
            return name
        return "ok" if self.correctness else "wrong_result" if self.compiled else "compile_error"


class _Fails(Exception):
    """The candidate answered with an error, or not at all. Its argument is the answer."""


def evaluate(problem: Problem, device: Device, timeout: float) -> KernelExecResult:
    """Compile a candidate, compare it with the reference, and time both. ValueError if the
    reference fails, or if there is no torch."""
    if importlib.util.find_spec("torch") is None:
        raise ValueError(f"a Problem needs torch: {sys.executable} -m pip install torch")
    result, fault = KernelExecResult(), False
    if device.lost:
        result.metadata = {"runtime_error_name": "device_lost", "runtime_error": device.lost}
        return result
    processes: dict[str, Process] = {}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        try:
            for role in ("reference", "candidate"):
                own = os.path.join(folder, role)
                os.mkdir(own)
                folders = dict.fromkeys(("TORCH_EXTENSIONS_DIR", "TRITON_CACHE_DIR", "TMPDIR"), own)
                path = f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}"  # ninja
                processes[role] = device.start(COMMAND, own, PATH=path, **folders)
            _Evaluation(problem, processes, timeout, result).run(device)
        except _Fails as error:
            (answer,) = error.args
            fault = answer["status"] in ("crashed", "timeout")
            kind, more = ("runtime", "runtime_error") if result.compiled else ("compilation",) * 2
            result.metadata[f"{kind}_error"] = answer["message"]
            result.metadata[f"{kind}_error_name"] = answer.get("name", answer["status"])
            result.metadata[f"{more}_traceback"] = answer.get("traceback", "")
        finally:
            for role, process in processes.items():
                device.finish(process, fault and role == "candidate")
                process.end()
    return result


@dataclass
class _Evaluation:
    """One job: the two processes, and the result that is filled."""

    problem: Problem
    processes: dict[str, Process]
    timeout: float
    result: KernelExecResult

    def ask(self, role: str, message: Message | None, seconds: float) -> Message:
        """Return the answer of a process. _Fails of the candidate, ValueError of the reference."""
        answer = self.processes[role].ask(message, seconds)
        if answer["status"] == "ok":
            return answer
        if role == "candidate":
            raise _Fails(answer)
        raise ValueError(f"original_model_src: {answer['status']}: {answer['message']}")

    def run(self, device: Device) -> None:
        problem, result = self.problem, self.result
        for role in self.processes:
            result.metadata |= self.ask(role, None, START_SECONDS)["facts"]
        make = {"do": "make", "seed": problem.seed_num, "precision": problem.precision}
        for role, source in (
            ("reference", problem.original_model_src),
            ("candidate", problem.custom_model_src),
        ):
            self.ask(role, {"do": "load", "role": role, "source": source}, COMPILE_SECONDS)
            result.compiled = role == "candidate"
            make["init"] = self.ask(role, make, FIRST_CALL_SECONDS)["init"]
        device.settle()
        passed = sum(self.trial(n == 0) is not None for n in range(problem.num_correct_trials))
        result.metadata["correctness_trials"] = f"({passed} / {problem.num_correct_trials})"
        result.correctness = passed == problem.num_correct_trials
        if result.correctness and problem.measure_performance:
            self.measure()

    def trial(self, first: bool = False) -> tuple[float, float] | None:
        """Run both on new inputs. Return the milliseconds of candidate and reference, or None if
        their outputs differ."""
        seconds = 2 * self.timeout + (FIRST_CALL_SECONDS if first else 0)
        draw = {"do": "draw", "seed": secrets.randbits(32), "twice": first}
        drawn = self.ask("reference", draw, seconds)
        run = {"do": "run", "values": drawn["values"], "twice": first}
        called = self.ask("candidate", run, seconds)
        compare = {"do": "compare", "values": called["values"]}
        compared = self.ask("reference", compare, seconds)
        metadata = self.result.metadata
        if first:
            metadata["deterministic"] = called["deterministic"]
        if not compared["issue"]:
            return called["time"], drawn["time"]
        metadata["correctness_issue"] = compared["issue"]
        for name in ("max_difference", "avg_difference"):
            if name in compared:
                metadata.setdefault(name, []).append(f"{compared[name]:.6f}")
        return None

    def measure(self) -> None:
        """Time calls on new inputs, each of which is compared. A time that the device cannot reach
        is an error."""
        result, both = self.result, []
        end = time.monotonic() + TIMED_SECONDS
        for n in range(self.problem.num_perf_trials):
            if n >= LEAST_TIMED and time.monotonic() > end:
                break
            both.append(self.trial())
            if both[-1] is None:
                result.correctness = False
                return
        times, reference_times = ([pair[side] for pair in both] for side in (0, 1))
        rates = self.ask("reference", {"do": "rates"}, FIRST_CALL_SECONDS)
        written, operations = rates["written"], rates["operations"]
        least = max(least_time(written, operations, rates), SHORTEST) / 1e3
        median = statistics.median(times)
        if median < least:
            result.correctness = False
            result.metadata |= {
                "excessive_speedup": True,
                "correctness_issue": f"{median:.4g} ms for {written:,} bytes of outputs and "
                f"{operations:,} operations of the reference: the device needs {least:.4g} ms",
            }
            return
        result.runtime_stats = self.stats(times)
        result.ref_runtime_stats = self.stats(reference_times)
        result.runtime = result.runtime_stats["mean"]
        result.ref_runtime = result.ref_runtime_stats["mean"]
        result.speedup = result.ref_runtime / result.runtime

    def stats(self, times: list[float]) -> dict[str, Any]:
        found = {"mean": statistics.fmean(times), "std": statistics.pstdev(times)}
        found |= {"min": min(times), "max": max(times), "num_trials": len(times)}
        return found | {name: self.result.metadata[name] for name in ("hardware", "device")}
