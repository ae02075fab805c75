"""needle.kernels.Pool and its service on a GPU: every way in which a kernel can go wrong or cheat
has its status and its message, and the next job is right. (Without a GPU: test_pool.py.)"""

import re

import numpy as np
import pytest
from harness import ROOT
from isolation import FAULTS, GOOD, N, X, good, inject

from needle.kernels import Case, Out, Pool, Random
from needle.kernels.toolkit import find_tool

pytestmark = pytest.mark.cuda
TIMEOUT = 2.0
needs_sanitizer = pytest.mark.skipif(
    find_tool("compute-sanitizer") is None, reason="no compute-sanitizer here"
)


@pytest.fixture(scope="module")
def pool():
    with Pool(devices=[0], timeout=TIMEOUT) as made:
        good(made)
        yield made


@pytest.mark.parametrize("name", FAULTS)
def test_fault_has_its_name_and_the_next_job_is_right(pool, name):
    result = inject(pool, name)
    good(pool)
    if name == "printf flood":
        assert result.printed.startswith("line ") and "were printed and cut off" in result.printed
    if name == "forged result":
        assert result.printed.startswith('{"status": "illegal_address"}')
    if name == "assert":
        assert "Assertion `threadIdx.x < 3` failed" in result.printed


def test_timing_of_a_kernel_that_is_bound_by_memory(pool):
    """64 MiB in and out: between half of the device's rate and all of it."""
    n = 16 << 20
    case = Case(n // 1024, 256, [Random(n), Out(n), 3.0, n])
    source = """
    __global__ void scale(const float4* x, float4* y, float a, int n) {
        int i = blockIdx.x * blockDim.x + threadIdx.x;
        float4 v = x[i];
        y[i] = make_float4(a * v.x, a * v.y, a * v.z, a * v.w);
    }
    """
    result = pool.evaluate(source, "scale", [case], lambda x, a, n: np.float32(a) * x, trials=2)
    assert (result.status, result.message) == ("ok", "")
    (timing,) = result.timing
    assert timing.valid and 0.4 * timing.device_rate < timing.rate < 1.25 * timing.device_rate
    assert timing.lower <= timing.median <= timing.upper and timing.calls >= 2


REMEMBERS = """
__device__ float kept[64][256], keys[64];
__device__ int count;
__global__ void k(const float* x, float* y) {
    __shared__ int found;
    int i = threadIdx.x;
    if (i == 0) {
        found = -1;
        for (int j = 0; j < count; j++)
            if (keys[j] == x[0]) found = j;
    }
    __syncthreads();
    if (found >= 0) {
        y[i] = kept[found][i];
        return;
    }
    for (long long end = clock64() + 2000000; clock64() < end;) {}
    y[i] = kept[count][i] = 2 * x[i];
    __syncthreads();
    if (i == 0) keys[count++] = x[0];
}
"""


@pytest.mark.parametrize("x", [Random(256), X[:256]], ids=["drawn", "given"])
def test_kernel_that_remembers_gains_nothing(pool, x):
    """A millisecond for each set of inputs that it does not know yet: for each timed call."""
    result = pool.evaluate(REMEMBERS, "k", [Case(1, 256, [x, Out(256)])], lambda x: 2 * x)
    assert (result.status, result.message) == ("ok", "")
    (timing,) = result.timing
    assert timing.lower > 500 and timing.upper < 10_000
    assert any("the first of its code" in hint for hint in timing.hints) != isinstance(x, Random)


RACE = """
__global__ void k(const float* x, float* y) {
    __shared__ float s[64];
    s[threadIdx.x] = x[threadIdx.x];
    y[threadIdx.x] = s[63 - threadIdx.x];
}
"""


@needs_sanitizer
@pytest.mark.parametrize(
    "tool, source, said",
    [
        ("memcheck", FAULTS["written past the end"].source, "Invalid __global__ write"),
        ("racecheck", RACE, "kernel.cu"),
    ],
)
def test_each_tool_reports_and_a_right_kernel_is_right_below_it(pool, tool, source, said):
    n, block = (31, 32) if tool == "memcheck" else (64, 64)
    result = pool.run(source, "k", 1, block, [X[:64], Out(n)], sanitizer=tool)
    assert result.status != "ok" and said in result.explanation, result
    result = pool.run(GOOD, "scale", 8, 128, [X, Out(N), 3.0, N], sanitizer=tool)
    assert (result.status, result.message) == ("ok", "")
    assert (result.outputs[0] == 3 * X).all()


def test_example_of_the_docs(capsys):
    text = (ROOT / "docs" / "kernels.md").read_text()
    (code,) = (b for b in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "Random(" in b)
    exec(code, {})
    assert capsys.readouterr().out.count("ok") == 2
