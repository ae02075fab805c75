"""The service with a GPU: right, wrong and endless kernels over HTTP, health meanwhile, reset and
cleanup; and the whole program, whose compiler is confined.
"""

import base64
import signal
import statistics
import sys
import time

import pytest
import safetensors.numpy
from faulty_kernels import GOOD, N, X
from harness import in_thread, wait_for
from serving import running, started
from test_landlock import missing as landlock_missing

from needle.kernels import Pool
from needle.kernels.job import RequestLimits

pytest.importorskip("aiohttp", reason="no aiohttp (pip install aiohttp): no service")
pytestmark = pytest.mark.cuda

TIMEOUT = 2.0
ARGS = [{"array": "x"}, {"shape": [N], "dtype": "float32", "out": True}, 3.0, N]
CASE = {"grid": 8, "block": 128, "args": ARGS}
JOB = {"source": GOOD, "entry": "scale", "cases": [CASE]}
ARRAYS = safetensors.numpy.save({"x": X, "y": 3 * X, "wrong": 4 * X})
ENDLESS = 'extern "C" __global__ void k(volatile int *x) { while (!x[0]) {} }'
READS_NOTHING = 'extern "C" __global__ void k(int *x) { x[1ll << 40] = 1; }'
DRAWN = [{"shape": [1 << 20], "dtype": "bfloat16", "seed": 7}]
DRAWN += [{"shape": [1 << 20], "dtype": "bfloat16", "out": True}, 1 << 20]
HALVED = """
#include <cuda_bf16.h>
template <class T> __global__ void half_of(const T *x, T *y, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = x[i] * T(FACTOR);
}
"""


@pytest.fixture(scope="session")
def service():
    confined = landlock_missing() is None
    with Pool(devices=[0], timeout=TIMEOUT, confined=confined) as pool:
        with running(pool, limits=RequestLimits()) as found:
            yield found


def zeros(source: str) -> dict:
    """A job of a kernel that is to see a zero."""
    args = [{"shape": [4], "dtype": "int32", "seed": 0, "low": 0, "high": 1}]
    return {"source": source, "entry": "k", "cases": [{"grid": 1, "block": 1, "args": args}]}


def assert_good(service):
    status, answer = service.evaluate(JOB | {"outputs": True}, ARRAYS)
    assert (status, answer["status"], answer["message"]) == (200, "ok", "")
    assert (safetensors.numpy.load(base64.b64decode(answer["outputs"]))["0"] == 3 * X).all()


def test_a_good_and_a_wrong_kernel(service):
    assert_good(service)
    right = JOB | {"cases": [CASE | {"expected": ["y"]}], "trials": 2}
    status, answer = service.evaluate(right, ARRAYS)
    assert (status, answer["status"]) == (200, "ok"), answer
    assert answer["timing"][0]["median"] > 1 and answer["resources"]["registers"] > 0
    wrong = JOB | {"cases": [CASE | {"expected": ["wrong"]}]}
    status, answer = service.evaluate(wrong, ARRAYS)
    assert (status, answer["status"]) == (200, "wrong_result") and "expected" in answer["message"]
    assert service.evaluate(JOB | {"source": "no CUDA"}, ARRAYS)[1]["status"] == "compile_error"


@pytest.mark.parametrize("factor, status", [("0.5f", "ok"), ("0.625f", "wrong_result")])
def test_another_kernel_as_reference(service, factor, status):
    """bfloat16, drawn from a seed on both sides."""
    entry = "half_of<__nv_bfloat16>"
    job = {
        "source": HALVED.replace("FACTOR", factor),
        "entry": entry,
        "cases": [{"grid": 4096, "block": 256, "args": DRAWN}],
        "reference": {"source": HALVED.replace("FACTOR", "0.5f"), "entry": entry},
        "trials": 2,
    }
    code, answer = service.evaluate(job)
    assert (code, answer["status"]) == (200, status), answer
    assert bool(answer["timing"]) == (status == "ok")


def test_health_while_a_kernel_loops_and_the_next_is_right(service):
    assert_good(service)
    times, loops = [], in_thread(service.evaluate, zeros(ENDLESS))
    while not loops.done():
        began = time.monotonic()
        assert service.ask("GET", "/health")[0] == 200
        times.append(time.monotonic() - began)
        time.sleep(0.02)
    status, answer = loops.result()
    assert (status, answer["status"]) == (200, "timeout")
    print(
        f"\nhealth during {TIMEOUT} s of a kernel that loops: {len(times)} answers, median", end=" "
    )
    print(f"{statistics.median(times) * 1e3:.1f} ms, slowest {max(times) * 1e3:.1f} ms")
    assert len(times) > 20 and max(times) < 0.1
    assert_good(service)


def test_a_fault_and_a_reset(service):
    status, answer = service.evaluate(zeros(READS_NOTHING))
    assert (status, answer["status"]) == (200, "illegal_address")
    assert_good(service)
    before = {pid for one in service.service.pool.state() for pid in one["ready"]}
    assert service.ask("POST", "/reset_gpu/0")[:2] == (200, {"status": "ok", "device": 0})
    after = {pid for one in service.service.pool.state() for pid in one["ready"] + one["used"]}
    assert after and not after & before
    assert service.ask("POST", "/reset_gpu/99")[0] == 404
    assert_good(service)
    device = service.ask("GET", "/statistics")[1]["devices"][0]
    assert device["name"] and device["faults"] >= 1 and device["restarts"] >= 2


def test_cleanup(service):
    args = [{"shape": [8 << 20], "dtype": "float32", "seed": 1}]
    args += [{"shape": [8 << 20], "dtype": "float32", "out": True}, 1.0, 8 << 20]
    job = JOB | {"cases": [{"grid": 65536, "block": 128, "args": args}]}
    assert service.evaluate(job)[1]["status"] == "ok"
    status, answer, _ = service.ask("POST", "/cleanup")
    assert status == 200 and answer["freed_bytes"] >= 64 << 20
    assert service.ask("POST", "/cleanup")[1]["freed_bytes"] <= 32 << 20
    assert_good(service)


# ---- the program ---------------------------------------------------------------------------------


@pytest.mark.skipif(landlock_missing() is not None, reason=str(landlock_missing()))
def test_the_program(tmp_path):
    """Starts the service as a user does: first kernel, confinement, end while it works."""
    token_file = tmp_path / "token"
    command = [sys.executable, "-m", "needle.kernels", "serve", "--port", "0", "--devices", "0"]
    command += ["--token-file", str(token_file), "--timeout", "60", "--drain-seconds", "0.5"]
    with started(command, token_file) as (process, said, client):
        status, answer = client.evaluate(zeros('#include "/etc/passwd"\n' + ENDLESS))
        assert (status, answer["status"]) == (200, "compile_error")
        assert "cannot open source file" in answer["message"] and "root:" not in answer["message"]
        loops = in_thread(client.evaluate, zeros(ENDLESS))
        wait_for(client.running)
        time.sleep(1.0)
        began = time.monotonic()
        process.send_signal(signal.SIGTERM)
        out, error = process.communicate(timeout=60)
        assert loops.result(60)[0] == 503
        print(f"\nended {time.monotonic() - began:.2f} s after SIGTERM, a kernel in work")
        assert process.returncode == 0, error
        assert client.token not in error + out
