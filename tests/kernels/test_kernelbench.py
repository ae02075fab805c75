"""Jobs in KernelBench's form: candidates that are right, wrong, fail and cheat, on a CPU and on a
GPU, each in a process of its own."""

import multiprocessing
import os
import re
from pathlib import Path

import pytest
from fake_pool import SECONDS, children
from harness import ROOT, in_thread, naming
from kernelbench_problems import CPU, GPU, REFERENCE

from needle.kernels import Pool, Problem, kernelbench, process

torch = pytest.importorskip("torch", reason="no torch (pip install torch): no problems")
ALONE = {"right", "right, in C++", "stops the clock", "a crash", "a hang"}  # in processes


def problem(candidate, **more) -> Problem:
    options = {"num_correct_trials": 3, "num_perf_trials": 10, **more}
    return Problem(REFERENCE, candidate, **options)


def check(result, candidate) -> None:
    assert (result.compiled, result.correctness) == (candidate.compiled, candidate.right), result
    assert candidate.said in str(result.metadata.get(candidate.entry, "")), result.metadata
    assert (result.status == "ok") == candidate.right
    if not candidate.right:
        assert (result.runtime, result.speedup, result.runtime_stats) == (-1, -1, {})
        return
    assert result.metadata["correctness_trials"] == "(3 / 3)" and result.metadata["deterministic"]
    for stats in (result.runtime_stats, result.ref_runtime_stats):
        assert 0 < stats["min"] <= stats["mean"] <= stats["max"] and stats["std"] >= 0
        assert stats["num_trials"] == 10 and stats["hardware"] == result.metadata["hardware"]
    assert result.runtime == result.runtime_stats["mean"]
    assert result.speedup == pytest.approx(result.ref_runtime / result.runtime)


@pytest.fixture(scope="session")
def pool():
    with Pool(devices=[], timeout=SECONDS) as made:
        yield made


@pytest.fixture
def fewer_threads(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # tests beside this one have the other processors


class Thread(process.Process):
    """A side in a thread of this process, which has imported torch already."""

    def __init__(self, command, state, cwd, variables) -> None:
        from needle.kernels.torch_worker import Side

        super().__init__(["true"], state, cwd, variables)
        self.connection.close()
        self.connection, theirs = multiprocessing.Pipe()
        in_thread(self.answer, theirs, Side())

    def answer(self, theirs, side) -> None:
        with theirs:
            process.send(theirs, {"status": "ok", "facts": side.facts})
            while True:
                process.send(theirs, side.do(process.receive(theirs)))


@pytest.fixture
def threads(monkeypatch, tmp_path):
    """Sides that change nothing of their process are threads: importing torch takes seconds."""
    monkeypatch.chdir(tmp_path)  # where they write their sources
    monkeypatch.setattr(process, "Process", Thread)


@pytest.mark.parity
@pytest.mark.parametrize("name", CPU)
def test_each_candidate_has_its_result(pool, name, fewer_threads, monkeypatch, request):
    if name not in ALONE:
        request.getfixturevalue("threads")
    if name == "a hang":
        monkeypatch.setattr(pool, "timeout", 0.2)
        monkeypatch.setattr(kernelbench, "FIRST_CALL_SECONDS", 5.0)
    before = children()
    check(pool.evaluate(problem(CPU[name].source)), CPU[name])
    left = children() - before  # but for spares of other tests' pools
    assert all(b"fake_worker" in Path(f"/proc/{pid}/cmdline").read_bytes() for pid in left)


OTHER = """
import torch
class Model(torch.nn.Module):
    def forward(self, x, ids, scale):
        return x[ids] * scale, ids
def get_inputs(): return [torch.randn(8, 3), torch.randint(0, 8, (5,)), 2.5]
def get_init_inputs(): return []
"""


@pytest.mark.parity
def test_values_of_each_kind_travel_in_each_precision(pool, threads):
    """Integers keep their dtype, and other bits of a second run are reported."""
    candidate = OTHER.replace("Model", "ModelNew")
    noisy = candidate.replace("* scale", "* scale + 1e-6 * torch.rand(())")
    for source, more, deterministic in (
        (candidate, {"precision": "bf16"}, True),
        (noisy, {"measure_performance": False}, False),
    ):
        with naming(more):
            result = pool.evaluate(Problem(OTHER, source, num_perf_trials=1, **more))
            assert result.correctness and result.metadata["correctness_trials"] == "(5 / 5)"
            assert result.metadata["deterministic"] is deterministic
            assert (result.runtime > 0) == more.get("measure_performance", True)


@pytest.mark.parity
def test_outputs_that_are_kept_are_found_overwritten(pool, threads):
    """The second one is computed anew for other ids alone, and the first trial runs twice."""
    kept = """
        if not torch.equal(ids, getattr(self, "ids", ids[:0])):
            self.ids, self.kept = ids.clone(), ids + 1
        return x[ids] * scale, self.kept
"""
    reference = OTHER.replace("scale, ids", "scale, ids + 1")
    candidate = reference.replace("Model", "ModelNew")
    candidate = candidate.replace("\n        return x[ids] * scale, ids + 1\n", kept)
    result = pool.evaluate(Problem(reference, candidate, num_perf_trials=1))
    assert result.metadata["correctness_trials"] == "(4 / 5)" and not result.correctness


STATE = """
import torch
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden = torch.randn(4, 8)
        self.register_buffer("places", torch.randn(4, 8))
    def forward(self, x):
        self.hidden = torch.tanh(x + self.hidden)
        return 2 * self.hidden, self.places
def get_inputs(): return [torch.randn(4, 8)]
def get_init_inputs(): return []
"""


@pytest.mark.parity
def test_models_that_keep_a_state_agree(pool, threads):
    """Both are called as often, and a buffer that is an output keeps its values."""
    result = pool.evaluate(Problem(STATE, STATE.replace("Model", "ModelNew"), num_perf_trials=1))
    assert result.correctness and result.metadata["correctness_trials"] == "(5 / 5)"


@pytest.mark.parity
def test_candidates_process_has_nothing_of_the_reference(pool, fewer_threads):
    """Neither its source nor its folder; and its files are gone with it."""
    source = CPU["right"].source + (
        "\nbeside = set(os.listdir()) - {'__pycache__'}"
        "\nraise ValueError(f'{os.getcwd()} {beside} {__file__}')"
    )
    said = pool.evaluate(problem(source)).metadata["compilation_error"]
    assert re.fullmatch(r"(\S+)/candidate {'candidate.py'} \1/candidate/candidate.py", said), said
    assert not os.path.exists(said.split()[0])


@pytest.mark.parity
def test_reference_that_fails_is_a_wrong_call(pool, threads):
    for old, new, said in (
        ("nn.Linear", "Missing", ".*'Missing' is not defined"),
        ("return torch.relu(self.linear(x))", "return {'y': x}", "dict: models take and give"),
    ):
        with pytest.raises(ValueError, match=f"original_model_src: failed: {said}"):
            pool.evaluate(Problem(REFERENCE.replace(old, new), CPU["right"].source))


def test_lost_device_is_a_result():
    with Pool(devices=[]) as pool:
        pool.devices[-1].lose("it is gone")
        result = pool.evaluate(problem(""))
    assert result.status == "device_lost" and "it is gone" in result.metadata["runtime_error"]


def test_wrong_problems_are_named(pool, monkeypatch):
    for more, said in (({"precision": "fp8"}, "precision: must be one of fp32"),
                       ({"num_correct_trials": 0}, "must be 1 or more")):  # fmt: skip
        with pytest.raises(ValueError, match=said):
            problem("", **more)
    monkeypatch.setattr(kernelbench.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="a Problem needs torch: .*pip install torch"):
        pool.evaluate(problem(""))


@pytest.mark.parity
def test_example_of_the_docs(fewer_threads, capsys):
    text = (ROOT / "docs" / "kernels.md").read_text()
    (code,) = (b for b in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "Problem(" in b)
    names = {"reference": REFERENCE, "candidate": CPU["right"].source}
    exec(code.replace("Pool() ", "Pool(devices=[]) "), names)
    assert capsys.readouterr().out.startswith("True True 0.")
    for name in (*Problem.__dataclass_fields__, *kernelbench.KernelExecResult.__dataclass_fields__):
        assert f"`{name}`" in text, name


# ---- on a GPU ------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def gpu():
    if not torch.cuda.is_available():
        pytest.skip("this torch has no CUDA")
    with Pool(devices=[0], timeout=2.0) as made:
        yield made


@pytest.mark.cuda
@pytest.mark.parametrize("name", GPU)
def test_each_candidate_on_a_gpu_has_its_result(gpu, name, monkeypatch):
    pytest.importorskip("ninja")
    if "a hang" in name:
        monkeypatch.setattr(kernelbench, "FIRST_CALL_SECONDS", 10.0)
    before = children()
    result = gpu.evaluate(problem(GPU[name].source))
    print(f"\n{name}: {result.runtime:.4f} ms, reference {result.ref_runtime:.4f}", result.metadata)
    check(result, GPU[name])
    assert len(children() - before) <= 2  # spares of the pool
