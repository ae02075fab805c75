"""needle/kernels/serve.py over real sockets: jobs, access, every route, the log. The pool is made
up, or one whose workers have no GPU (fake_pool.py).
"""

import base64
import functools
import json
import logging
import re
import threading
import time

import numpy as np
import pytest
import safetensors.numpy
from fake_pool import SOURCE, FakePool
from harness import ROOT, in_thread, naming, shared_library
from serving import ARGS, JOB, SIMPLE, TOKEN, X, running
from test_job import bfloat16

pytest.importorskip("aiohttp", reason="no aiohttp (pip install aiohttp): no service")

from needle.kernels import serve
from needle.kernels.serve import CHUNK, Lines
from needle.nvml import Nvml

pytestmark = pytest.mark.slow

# ---- jobs ----------------------------------------------------------------------------------------


def test_a_right_kernel_returns_its_outputs(fake):
    for x in (X, np.random.default_rng(0).random(100_000, np.float32)):
        args = [{"array": "x"}, {"shape": [x.size], "dtype": "float32", "out": True}, 2.0, x.size]
        job = JOB | {"outputs": True, "cases": [{"grid": 1, "block": 1, "args": args}]}
        status, answer = fake.evaluate(job, safetensors.numpy.save({"x": x}))
        assert (status, answer["status"], answer["message"], answer["device"]) == (200, "ok", "", 0)
        got = safetensors.numpy.load(base64.b64decode(answer["outputs"]))
        assert got.keys() == {"0"} and (got["0"] == 2 * x).all()
        assert answer["resources"]["registers"] == 16 and 0 <= answer["seconds"]["ran"] < 60
    assert x.nbytes > CHUNK
    args = [{"array": "x"}, {"shape": [2], "dtype": "bfloat16", "out": True}, 1.0, 0]
    job = JOB | {"outputs": True, "cases": [{"grid": 1, "block": 1, "args": args}]}
    status, answer = fake.evaluate(job, bfloat16("x", [1.5, 2.0]))
    assert status == 200 and "outputs" in answer


def test_a_wrong_kernel_is_an_answer(fake):
    arrays = safetensors.numpy.save({"x": X, "y": 3 * X})
    case = JOB["cases"][0] | {"expected": ["y"]}
    status, answer = fake.evaluate(JOB | {"cases": [case], "time": False}, arrays)
    assert (status, answer["status"]) == (200, "wrong_result")
    assert "case 0, trial 0" in answer["message"]
    fails = SIMPLE | {"source": SOURCE, "entry": "fails"}
    for job, expected in (
        (JOB | {"source": "def k(:"}, "compile_error"),
        (fails | {"cases": [{"grid": 1, "block": 1, "args": [0]}]}, "illegal_address"),
        (fails | {"cases": [{"grid": 1, "block": 1, "args": [6]}]}, "invalid_launch"),
        (JOB, "ok"),
    ):
        status, answer = fake.evaluate(job, arrays)
        assert (status, answer["status"]) == (200, expected)


def test_a_reference_kernel_is_compared(fake):
    args = [{"shape": [6], "dtype": "float32", "seed": 5}, *ARGS[1:]]
    job = JOB | {"cases": [{"grid": 1, "block": 1, "args": args}], "trials": 3, "time": False}
    good = job | {"reference": {"source": SOURCE, "entry": "scale"}}
    assert fake.evaluate(good)[1]["status"] == "ok"
    wrong = SOURCE.replace("= a * x", "= 2.125 * x")
    assert wrong != SOURCE
    bad = job | {"reference": {"source": wrong, "entry": "scale"}}
    assert fake.evaluate(bad)[1]["status"] == "wrong_result"
    status, answer = fake.evaluate(job | {"reference": {"source": "def k(:", "entry": "scale"}})
    assert status == 422 and "compile_error" in answer["error"]["message"]


def test_errors_of_the_pool_have_a_status(client, caplog):
    for entry, status in (("type", 400), ("memory", 503)):
        got, answer = client.evaluate(SIMPLE | {"source": "fail", "entry": entry})
        assert (got, "told so" in answer["error"]["message"]) == (status, True)
    with caplog.at_level(logging.ERROR, "needle.kernels"):
        status, answer = client.evaluate(SIMPLE | {"source": "fail", "entry": "defect"})
    assert status == 500 and "told so" not in json.dumps(answer)
    assert "KeyError" in caplog.text and client.alive()


# ---- access --------------------------------------------------------------------------------------

ROUTES = [
    ("GET", "/health"),
    ("GET", "/statistics"),
    ("POST", "/evaluate"),
    ("POST", "/cleanup"),
    ("POST", "/reset_gpu/0"),
    ("GET", "/nowhere"),
    ("OPTIONS", "*"),
]


def test_every_route_needs_the_token_and_a_name_of_the_service(client):
    for method, path in ROUTES:
        with naming(method, path):
            for value in (None, "Bearer x", f"Bearer {TOKEN}x", TOKEN, f"Basic {TOKEN}"):
                status, answer, headers = client.ask(method, path, Authorization=value)
                assert status == 401 and answer["error"]["status"] == 401
                assert headers["WWW-Authenticate"] == "Bearer"
            for host in ("evil.example", "127.0.0.1.evil.example", "[::2]"):
                status, answer, _ = client.ask(method, path, Host=host)
                assert status == 421 and "--allow-host" in answer["error"]["message"]
    assert client.service.pool.calls == []
    for host in (f"localhost:{client.port}", "LOCALHOST", "[::1]:1", "127.0.0.1"):
        assert client.ask("GET", "/health", Host=host)[0] == 200
    head = f"Authorization: Bearer {TOKEN}\r\nConnection: close\r\n"
    for hosts in ("", "Host: localhost\r\nHost: evil.example\r\n"):
        answer = client.raw(f"GET /health HTTP/1.1\r\n{hosts}{head}\r\n".encode())
        assert answer.split()[1] in (b"400", b"421")
    assert client.raw(f"GET /health HTTP/1.0\r\n{head}\r\n".encode()).split()[1] == b"421"


def test_other_paths_and_methods_are_refused(client):
    for path, allowed in (("/evaluate", "POST"), ("/health", "GET")):
        for method in {"GET", "POST", "PUT", "DELETE", "OPTIONS", "TRACE"} - {allowed}:
            status, answer, headers = client.ask(method, path)
            assert (status, headers["Allow"]) == (405, allowed)
    for path in ("/", "/evaluate/", "//evaluate", "/EVALUATE", "/../health"):
        status, answer, _ = client.ask("GET", path)
        assert status == 404 and "/reset_gpu/{id}" in answer["error"]["message"]


# ---- health, statistics, cleanup, reset ----------------------------------------------------------


def test_health_and_statistics(client):
    status, answer, headers = client.ask("GET", "/health")
    assert status == 200 and headers["Content-Type"].startswith("application/json")
    assert (answer["status"], answer["running"], answer["waiting"]) == ("ok", 0, 0)
    assert answer["devices"][1].items() >= {"device": 3, "set_aside": None, "ready": 1}.items()
    for _ in range(3):
        client.evaluate(SIMPLE)
    client.ask("GET", "/nowhere")
    status, answer, _ = client.ask("GET", "/statistics")
    assert status == 200 and answer["jobs"] == {"illegal_address": 3}
    assert answer["refused"] == {"404": 1} and answer["uptime_seconds"] > 0
    assert answer["queue"] == {"running": 0, "waiting": 0, "most_running": 1, "most_waiting": 2}
    assert answer["median_seconds"]["ran"] >= 0 and answer["median_seconds"]["queued"] >= 0
    expected = {"device": 0, "name": "H", "faults": 2, "restarts": 4, "set_aside": None}
    assert answer["devices"][0] == expected


@pytest.fixture
def fake_nvml(tmp_path, monkeypatch):
    """NVML of a machine with made-up GPUs; NEEDLE_FAKE sets their figures and errors."""
    pytest.importorskip("pynvml", reason="no pynvml (pip install nvidia-ml-py)")
    library = tmp_path / "libnvidia-ml.so.1"
    shared_library(f'#include "{ROOT}/tests/diagnose/fake_nvml.c"', library)
    monkeypatch.setattr(serve, "open_nvml", functools.cache(lambda: Nvml(str(library))))
    monkeypatch.setattr(serve, "NVML_SECONDS", 5.0)


def test_health_has_the_figures_of_each_gpu(client, made_up, fake_nvml, monkeypatch):
    monkeypatch.setenv("NEEDLE_FAKE", "at=1,used=3221225472,busy=40,temperature=71")
    device = client.ask("GET", "/health")[1]["devices"][1]
    assert (device["device"], device["name"]) == (3, "NVIDIA Pretend")
    assert (device["memory"]["used"], device["memory"]["total"]) == (3 << 30, 141 << 30)
    assert (device["temperature"], device["load"], device["why"]) == (71, 40, None)
    monkeypatch.setenv("NEEDLE_FAKE", "at=1,lost=15")
    device = client.ask("GET", "/health")[1]["devices"][0]
    assert device["name"] is device["memory"] is device["load"] is None
    assert device["why"] == "NVML: an injected error"


def test_health_says_why_figures_are_missing(client, made_up, monkeypatch):
    monkeypatch.setattr(serve, "NVML_SECONDS", 5.0)
    uuid, made_up.uuid = made_up.uuid, ""
    device = client.ask("GET", "/health")[1]["devices"][0]
    assert device["name"] is None and "no process" in device["why"]
    made_up.uuid = uuid

    def fails():
        raise KeyError("wrong")

    def hangs():
        go.wait(60)
        return Nvml("nowhere")

    go = threading.Event()
    for opened, why in (
        (lambda: Nvml("libnvidia-ml.so.none"), "NVML: libnvidia-ml.so.none: cannot"),
        (fails, "the figures of the GPUs cannot be read: KeyError('wrong')"),
        (hangs, "the figures of the GPUs cannot be read"),
    ):
        with monkeypatch.context() as patched:
            patched.setattr(serve, "open_nvml", opened)
            if opened is hangs:
                patched.setattr(serve, "NVML_SECONDS", 0.05)
            began = time.monotonic()
            status, answer, _ = client.ask("GET", "/health")
            assert (status, answer["status"]) == (200, "ok") and time.monotonic() - began < 5
            for device in answer["devices"]:
                assert device["name"] is device["memory"] is device["load"] is None
                assert device["why"].startswith(why)
    go.set()


def test_health_is_503_if_no_job_can_run(client, made_up):
    assert client.ask("GET", "/health")[1]["compilers"] == {"set_aside": None, "ready": 2}
    made_up.set_aside = "set aside"
    status, answer, _ = client.ask("GET", "/health")
    assert (status, answer["status"]) == (503, "device_lost")
    assert answer["devices"][0]["set_aside"] == "set aside"
    made_up.set_aside, made_up.compilers_set_aside = None, "cannot be started"
    status, answer, _ = client.ask("GET", "/health")
    assert (status, answer["status"]) == (503, "compilers_lost")
    assert answer["compilers"]["set_aside"] == "cannot be started"


def test_cleanup_and_reset(client, made_up):
    cleaned = in_thread(client.ask, "POST", "/cleanup")
    assert made_up.begun.acquire(timeout=60)
    status, _, headers = client.ask("POST", "/reset_gpu/0")  # one at a time
    assert status == 429 and int(headers["Retry-After"]) >= 1
    made_up.go.set()
    assert cleaned.result(60)[:2] == (200, {"freed_bytes": 12345})
    assert client.ask("POST", "/reset_gpu/0")[:2] == (200, {"status": "ok", "device": 0})
    status, answer, _ = client.ask("POST", "/reset_gpu/3")
    assert status == 503 and "still does not end" in answer["error"]["message"]
    assert made_up.calls == [0, 3]
    for name in ("1", "", "-1", "0x0", "00000000", "0/0", "%31", "9" * 5000, "%D9%A0"):
        assert client.ask("POST", f"/reset_gpu/{name}")[0] in (400, 404)
    assert made_up.calls == [0, 3]


# ---- the log -------------------------------------------------------------------------------------


def test_the_log_has_no_token(client, caplog):
    with caplog.at_level(logging.DEBUG):
        client.ask("GET", f"/health?token={TOKEN}")
        client.ask("GET", "/no%0awhere", Authorization=f"Bearer {TOKEN}x")
        client.raw(f"GET / HTTP/1.1\r\nAuthorization: Bearer {TOKEN}\x01\r\n\r\n".encode())
    lines = [r.getMessage() for r in caplog.records if r.name.startswith("needle.kernels")]
    assert TOKEN not in caplog.text and "Traceback" not in caplog.text
    assert "no HTTP (BadHttpMessage)" in lines
    assert any(line.startswith("127.0.0.1 GET '/health' 200, ") for line in lines)
    assert any("'/no%0awhere' 401" in line for line in lines)


def test_the_log_has_jobs_refusals_and_processes(caplog):
    with caplog.at_level(logging.INFO, "needle.kernels"):
        with FakePool(devices=[0], spares=0) as pool, running(pool) as client:
            client.evaluate(JOB, safetensors.numpy.save({"x": X}))
            job = SIMPLE | {"source": SOURCE, "entry": "signals"}
            client.evaluate(job | {"cases": [{"grid": 1, "block": 1, "args": [9]}]})
            client.evaluate(SIMPLE | {"entry": "k\n2026-01-01 forged"})
            client.evaluate(SIMPLE | {"trials": 0})
            client.ask("GET", "/health", Authorization=None)
    text = "\n".join(record.getMessage() for record in caplog.records)
    for line in (
        r"^cuda\(0\): process \d+ is ready$",
        r"^compiling: process \d+ is ready$",
        r"^127.0.0.1 POST '/evaluate' 200, .* s: job scale: ok on device 0, queued .* s, ran .* s$",
        r"^127.0.0.1 POST '/evaluate' 200, .* s: job signals: crashed on device 0, ",
        r"^cuda\(0\): process \d+ is gone: it was ended by SIGKILL$",
        r"^127.0.0.1 POST '/evaluate' 400, .* s: job.trials: ",
        r"^127.0.0.1 GET '/health' 401, .* s: Authorization: Bearer TOKEN is missing",
    ):
        assert len(re.findall(line, text, re.MULTILINE)) >= 1, (line, text)
    assert "\n2026-01-01 forged" not in text


def test_a_log_whose_writer_blocks_stops_nothing():
    go, written = threading.Event(), []

    class Blocked(logging.Handler):
        def emit(self, record):
            go.wait(60)
            written.append(record)

    lines, logger = Lines(Blocked()), logging.Logger("test")
    logger.addHandler(lines)
    began = time.monotonic()
    for _ in range(3000):
        logger.info("a line")
    assert time.monotonic() - began < 10
    lines.flush_within(0.01)
    go.set()
    lines.flush_within(20)
    assert serve.LOG_LINES <= len(written) < 3000
