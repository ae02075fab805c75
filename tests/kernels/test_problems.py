"""needle/kernels/kernelbench.py without torch: what it asks the two processes of a problem, which
are scripts here, and what it makes of their answers. (Real ones: test_kernelbench.py.)"""

from types import SimpleNamespace

import pytest
from harness import naming

from needle.kernels import KernelExecResult, Problem, kernelbench

FIRST, TIMEOUT = 60.0, 10.0  # seconds that a first call may take more than twice the timeout
RATES = {"written": 0, "operations": 0, "fill_rate": 1e9, "product_rate": 1e9}
ANSWERS = {
    "facts": {"facts": {"hardware": "H", "device": "cpu"}},
    "load": {},
    "make": {"init": "[3]"},
    "draw": {"values": ["x"], "time": 6.0},
    "run": {"values": ["y"], "time": 2.0, "deterministic": True},
    "compare": {"issue": ""},
    "rates": RATES,
}


class Device:
    """A device whose processes answer by `scripted`: {(role, step): answer, or one for each}."""

    lost = None
    settle = int

    def __init__(self, scripted) -> None:
        self.scripted, self.asked, self.faults = scripted, [], {}

    def start(self, command, folder, **variables):
        role = folder.rpartition("/")[2]
        ask = lambda message, seconds: self.answer(role, message or {"do": "facts"}, seconds)
        return SimpleNamespace(role=role, ask=ask, end=int)

    def answer(self, role, message, seconds):
        step = message["do"]
        self.asked.append((role, step, message, seconds))
        given = self.scripted.get((role, step), ANSWERS[step])
        return {"status": "ok", **(given.pop(0) if isinstance(given, list) else given)}

    def finish(self, process, fault):
        self.faults[process.role] = fault


@pytest.fixture
def judged(monkeypatch):
    """judged({(role, step): answer}, fields of the Problem) -> (result, the device)."""
    monkeypatch.setattr(kernelbench.importlib.util, "find_spec", lambda name: name)

    def judge(scripted=(), **more):
        device, counts = Device(dict(scripted)), {"num_correct_trials": 2, "num_perf_trials": 6}
        problem = Problem("the reference", "the candidate", **counts | more)
        return kernelbench.evaluate(problem, device, TIMEOUT), device

    return judge


def test_candidate_has_the_seed_the_weights_and_the_inputs_of_the_reference(judged):
    result, device = judged(seed_num=7, precision="bf16", num_perf_trials=1)
    asked = {(role, step): message for role, step, message, _ in device.asked}
    made = {"do": "make", "seed": 7, "precision": "bf16"}
    assert asked["reference", "make"].items() >= made.items()
    assert asked["candidate", "make"] == made | {"init": "[3]"}
    assert asked["candidate", "load"]["source"] == "the candidate"
    assert asked["candidate", "run"]["values"] == ["x"]
    assert asked["reference", "compare"]["values"] == ["y"]
    seeds = [message["seed"] for _, step, message, _ in device.asked if step == "draw"]
    assert len(set(seeds)) == 3  # new inputs for each trial and each timed call
    runs = [(m["twice"], s) for _, step, m, s in device.asked if step == "run"]
    assert runs == [(True, 2 * TIMEOUT + FIRST), *[(False, 2 * TIMEOUT)] * 2]
    assert (result.status, result.metadata["correctness_trials"]) == ("ok", "(2 / 2)")
    assert device.faults == {"reference": False, "candidate": False}


def test_times_are_means_and_their_quotient(judged, monkeypatch):
    runs = [ANSWERS["run"] | {"time": time} for time in (9.0, 9.0, 1.0, 2.0, 3.0, 4.0, 5.0, 3.0)]
    result, _ = judged({("candidate", "run"): runs})
    assert (result.runtime, result.ref_runtime, result.speedup) == (3.0, 6.0, 2.0)
    stats = {"min": 1.0, "max": 5.0, "num_trials": 6, "hardware": "H", "device": "cpu"}
    assert result.runtime_stats.items() >= stats.items()
    monkeypatch.setattr(kernelbench, "TIMED_SECONDS", 0.0)
    assert judged(num_perf_trials=50)[0].runtime_stats["num_trials"] == 5
    for result, _ in (
        judged(measure_performance=False),
        judged({("reference", "rates"): RATES | {"operations": 1e8}}),  # 25 ms at four times 1e9
        judged({("candidate", "run"): ANSWERS["run"] | {"time": 1e-4}}),  # no launch is shorter
    ):
        assert (result.runtime, result.speedup, result.runtime_stats) == (-1, -1, {})
        assert result.correctness != result.metadata.get("excessive_speedup", False)


def test_failure_is_named_by_when_it_came(judged):
    ended = {"status": "crashed", "message": "was ended by SIGSEGV"}
    raised = {"status": "failed", "message": "no", "name": "builtins.ValueError", "traceback": "at"}
    wrong = {"issue": "Output mismatch", "max_difference": 2.0, "avg_difference": 0.5}
    for step, answer, status, facts in (
        ("load", ended, "compile_error", {"compilation_error_name": "crashed"}),
        ("load", raised, "compile_error", {"compilation_traceback": "at"}),
        ("make", raised, "wrong_result", {"runtime_error_name": "builtins.ValueError"}),
        ("run", ended, "crashed", {"runtime_error": "was ended by SIGSEGV"}),
        ("run", raised, "wrong_result", {"runtime_error_traceback": "at"}),
        ("compare", [ANSWERS["compare"], wrong], "wrong_result",
         {"correctness_trials": "(1 / 2)", "max_difference": ["2.000000"]}),
        ("compare", [ANSWERS["compare"]] * 3 + [wrong], "wrong_result",
         {"correctness_trials": "(2 / 2)", "correctness_issue": "Output mismatch"}),
    ):  # fmt: skip
        with naming(step, answer):
            role = "reference" if step == "compare" else "candidate"
            result, device = judged({(role, step): answer})
            assert result.status == status and result.metadata.items() >= facts.items()
            assert result.compiled == (step != "load") and not result.correctness
            assert device.faults == {"reference": False, "candidate": answer is ended}
    with pytest.raises(ValueError, match="original_model_src: failed: no"):
        judged({("reference", "make"): raised})
    lost = KernelExecResult(metadata={"runtime_error_name": "device_lost"})
    assert lost.status == "device_lost"
