"""needle/kernels/serve.py over real sockets: jobs, who may ask, every route, the log. The pool is
made up, or one whose workers have no GPU (fake_pool.py).
"""

import asyncio
import base64
import functools
import json
import logging
import os
import re
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import safetensors.numpy
from fake_pool import SOURCE, FakePool
from harness import ROOT
from serving import ARGS, JOB, SIMPLE, TOKEN, X, running
from test_landlock import needs_landlock, needs_nvrtc
from test_wire import bfloat16

pytest.importorskip("aiohttp", reason="no aiohttp (pip install aiohttp): no service")

from needle.kernels import serve
from needle.kernels.crew import Worker
from needle.kernels.isolate import Pool
from needle.kernels.serve import PIECE, Lines, Stderr, load_aiohttp
from needle.nvml import Nvml

pytestmark = pytest.mark.slow

# ---- jobs ----------------------------------------------------------------------------------------


def test_a_kernel_that_is_right(fake):
    status, answer = fake.evaluate(JOB | {"outputs": True}, safetensors.numpy.save({"x": X}))
    assert (status, answer["status"], answer["message"], answer["device"]) == (200, "ok", "", 0)
    got = safetensors.numpy.load(base64.b64decode(answer["outputs"]))
    assert got.keys() == {"0"} and (got["0"] == 2 * X).all()
    assert answer["resources"]["registers"] == 16 and 0 <= answer["seconds"]["ran"] < 60


def test_an_answer_of_many_pieces(fake):
    x = np.random.default_rng(0).random(100_000, np.float32)
    args = [{"array": "x"}, {"shape": [x.size], "dtype": "float32", "out": True}, 2.0, x.size]
    job = JOB | {"outputs": True, "cases": [{"grid": 1, "block": 1, "args": args}]}
    status, answer = fake.evaluate(job, safetensors.numpy.save({"x": x}))
    assert (status, answer["status"]) == (200, "ok") and x.nbytes > PIECE
    assert (safetensors.numpy.load(base64.b64decode(answer["outputs"]))["0"] == 2 * x).all()


def test_kernels_that_are_wrong_are_answers(fake):
    arrays = safetensors.numpy.save({"x": X, "y": 3 * X})
    case = JOB["cases"][0] | {"expected": ["y"]}
    status, answer = fake.evaluate(JOB | {"cases": [case], "time": False}, arrays)
    assert (status, answer["status"]) == (200, "wrong_result")
    assert "case 0, trial 0" in answer["message"]
    status, answer = fake.evaluate(JOB | {"source": "def k(:"}, arrays)
    assert (status, answer["status"]) == (200, "compile_error")
    job = SIMPLE | {"source": SOURCE, "entry": "fails"}
    job["cases"] = [{"grid": 1, "block": 1, "args": [0]}]
    status, answer = fake.evaluate(job)
    assert (status, answer["status"]) == (200, "illegal_address")
    status, answer = fake.evaluate(job | {"cases": [{"grid": 1, "block": 1, "args": [6]}]})
    assert (status, answer["status"]) == (200, "invalid_launch")
    assert fake.evaluate(JOB, arrays)[1]["status"] == "ok"


def test_a_reference_kernel(fake):
    """Seeds on both sides, drawn anew in each trial."""
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


def test_bfloat16(fake):
    job = JOB | {"outputs": True, "entry": "scale"}
    args = [{"array": "x"}, {"shape": [2], "dtype": "bfloat16", "out": True}, 1.0, 0]
    status, answer = fake.evaluate(
        job | {"cases": [{"grid": 1, "block": 1, "args": args}]}, bfloat16("x", [1.5, 2.0])
    )
    assert status == 200 and "outputs" in answer


def test_what_pools_refuse_is_the_clients_mistake(client):
    for entry, status in (("type", 400), ("memory", 503)):
        got, answer = client.evaluate(SIMPLE | {"source": "fail", "entry": entry})
        assert (got, "told so" in answer["error"]["message"]) == (status, True)


def test_a_defect_is_said_without_its_traceback(client, caplog):
    with caplog.at_level(logging.ERROR, "needle.kernels"):
        status, answer = client.evaluate(SIMPLE | {"source": "fail", "entry": "defect"})
    assert status == 500 and "told so" not in json.dumps(answer)
    assert "KeyError" in caplog.text
    assert client.alive()


@needs_landlock
@needs_nvrtc
def test_a_source_reads_no_file():
    """The service's own compiler, NVRTC below Landlock; the device is made up."""

    class Confined(FakePool):
        def _starter(self, role, device=None):
            if role != "confined":
                return super()._starter(role, device)
            return lambda: Worker([*Pool.worker, role], self._environment(device))

    job = SIMPLE | {"source": '#include "/etc/passwd"\n__global__ void k() {}'}
    with Confined(devices=[0], spares=0, confined=True) as pool, running(pool) as client:
        status, answer = client.evaluate(job)
    assert (status, answer["status"]) == (200, "compile_error")
    assert "cannot open source file" in answer["message"] and "root:" not in answer["message"]


# ---- who may ask ---------------------------------------------------------------------------------

ROUTES = [
    ("GET", "/health"),
    ("GET", "/statistics"),
    ("POST", "/evaluate"),
    ("POST", "/cleanup"),
    ("POST", "/reset_gpu/0"),
    ("GET", "/nowhere"),
    ("OPTIONS", "*"),
]


@pytest.mark.parametrize("method, path", ROUTES)
def test_without_the_token_nothing(client, method, path):
    for value in (None, "Bearer x", f"Bearer {TOKEN}x", TOKEN, f"Basic {TOKEN}"):
        status, answer, headers = client.ask(method, path, Authorization=value)
        assert status == 401 and answer["error"]["status"] == 401
        assert headers["WWW-Authenticate"] == "Bearer"
    assert client.service.pool.calls == []


@pytest.mark.parametrize("method, path", ROUTES)
def test_a_foreign_name_is_refused(client, method, path):
    """Also with the right token: a page that was made to call us has none, but nobody knows."""
    for host in ("evil.example", f"evil.example:{client.port}", "127.0.0.1.evil.example", "[::2]"):
        status, answer, _ = client.ask(method, path, Host=host)
        assert status == 421 and "--allow-host" in answer["error"]["message"]
    assert client.service.pool.calls == []


def test_its_own_names(client):
    for host in (f"localhost:{client.port}", "LOCALHOST", "[::1]:1", "127.0.0.1"):
        assert client.ask("GET", "/health", Host=host)[0] == 200


def test_two_hosts_and_none(client):
    head = f"Authorization: Bearer {TOKEN}\r\nConnection: close\r\n"
    for hosts in ("", "Host: localhost\r\nHost: evil.example\r\n"):
        answer = client.raw(f"GET /health HTTP/1.1\r\n{hosts}{head}\r\n".encode())
        assert answer.split()[1] in (b"400", b"421")
    assert client.raw(f"GET /health HTTP/1.0\r\n{head}\r\n".encode()).split()[1] == b"421"


# ---- routes --------------------------------------------------------------------------------------


def test_health_and_statistics(client):
    status, answer, headers = client.ask("GET", "/health")
    assert status == 200 and headers["Content-Type"].startswith("application/json")
    assert (answer["status"], answer["running"], answer["waiting"]) == ("ok", 0, 0)
    assert answer["devices"][1].items() >= {"device": 3, "lost": None, "ready": 1}.items()
    for _ in range(3):
        client.evaluate(SIMPLE)
    client.ask("GET", "/nowhere")
    status, answer, _ = client.ask("GET", "/statistics")
    assert status == 200 and answer["jobs"] == {"illegal_address": 3}
    assert answer["refused"] == {"404": 1} and answer["uptime_seconds"] > 0
    assert answer["queue"] == {"running": 0, "waiting": 0, "most_running": 1, "most_waiting": 2}
    assert answer["median_seconds"]["ran"] >= 0 and answer["median_seconds"]["queued"] >= 0
    assert answer["devices"][0] == {
        "device": 0,
        "name": "H",
        "faults": 2,
        "restarts": 4,
        "lost": None,
    }


@pytest.fixture
def fake_nvml(tmp_path, monkeypatch):
    """NVML of a machine of GPUs that are none; NEEDLE_FAKE says what is wrong with them."""
    library = tmp_path / "libnvidia-ml.so.1"
    source = ROOT / "tests/diagnose/fake_nvml.c"
    command = ["cc", "-std=gnu17", "-shared", "-fPIC", f"-I{ROOT}/csrc", source, "-o", library]
    subprocess.run(command, check=True)
    opened = functools.cache(lambda: Nvml(str(library)))
    monkeypatch.setattr(serve, "open_nvml", opened)
    monkeypatch.setattr(serve, "STATE_SECONDS", 5.0)


def test_health_tells_of_each_gpu(client, made_up, fake_nvml, monkeypatch):
    monkeypatch.setenv("NEEDLE_FAKE", "at=1,used=3221225472,busy=40,temperature=71")
    device = client.ask("GET", "/health")[1]["devices"][1]
    assert (device["device"], device["name"]) == (3, "NVIDIA Pretend")
    assert (device["memory"]["used"], device["memory"]["total"]) == (3 << 30, 141 << 30)
    assert (device["temperature"], device["load"], device["why"]) == (71, 40, None)
    monkeypatch.setenv("NEEDLE_FAKE", "at=1,lost=15")
    device = client.ask("GET", "/health")[1]["devices"][0]
    assert device["name"] is device["memory"] is device["load"] is None
    assert device["why"] == "NVML: a planted error"


def test_health_without_nvml(client, monkeypatch):
    monkeypatch.setattr(serve, "open_nvml", lambda: Nvml("libnvidia-ml.so.none"))
    monkeypatch.setattr(serve, "STATE_SECONDS", 5.0)
    status, answer, _ = client.ask("GET", "/health")
    for device in answer["devices"]:
        assert [device[name] for name in ("name", "memory", "temperature", "load")] == [None] * 4
        assert device["why"].startswith("NVML: libnvidia-ml.so.none: cannot open shared object")
    assert (status, answer["status"]) == (200, "ok")


def test_health_while_nvml_hangs(client, monkeypatch):
    go = threading.Event()
    monkeypatch.setattr(serve, "open_nvml", lambda: go.wait(60) and Nvml("nowhere"))
    for _ in range(2):
        began = time.monotonic()
        status, answer, _ = client.ask("GET", "/health")
        assert status == 200 and time.monotonic() - began < 5
        assert answer["devices"][0]["why"] == "NVML has not answered yet"
    go.set()


def test_health_of_a_device_that_never_was_ready(client, made_up):
    made_up.uuid = ""
    device = client.ask("GET", "/health")[1]["devices"][0]
    assert device["name"] is None and "no process" in device["why"]


def test_health_of_a_device_whose_processes_start_anew(client, made_up, fake_nvml, monkeypatch):
    monkeypatch.setenv("NEEDLE_FAKE", "at=1,temperature=71")
    for uuid in (made_up.uuid, None):
        made_up.uuid = uuid
        device = client.ask("GET", "/health")[1]["devices"][1]
        assert (device["name"], device["temperature"]) == ("NVIDIA Pretend", 71)


def test_health_without_a_device(client, made_up):
    made_up.lost = "set aside"
    status, answer, _ = client.ask("GET", "/health")
    assert (status, answer["status"]) == (503, "device_lost")
    assert answer["devices"][0]["lost"] == "set aside"


def test_health_without_a_compiler(client, made_up):
    assert client.ask("GET", "/health")[1]["compilers"] == {"lost": None, "ready": 2}
    made_up.compilers_lost = "cannot be started"
    status, answer, _ = client.ask("GET", "/health")
    assert (status, answer["status"]) == (503, "compilers_lost")
    assert answer["compilers"]["lost"] == "cannot be started"


def test_health_does_not_wait_for_the_pool(client, made_up):
    assert client.alive()
    made_up.state_waits.clear()
    began = time.monotonic()
    assert client.alive() and client.alive()
    assert time.monotonic() - began < 5
    made_up.state_waits.set()


def test_health_of_a_pool_whose_state_cannot_be_read(client, made_up, monkeypatch, caplog):
    """After it could be, and before it can be again; also while the next call hangs."""
    monkeypatch.setattr(serve, "STATE_SECONDS", 5.0)
    assert client.alive()

    def fails():
        raise KeyError("planted")

    with monkeypatch.context() as planted:
        planted.setattr(client.service.state, "call", fails)
        for _ in range(2):
            status, answer, headers = client.ask("GET", "/health")
            assert (status, answer["status"], answer["devices"]) == (503, "state_unknown", [])
            assert answer["why"] == "the state of the pool cannot be read: KeyError: 'planted'"
        for method, path in (("GET", "/statistics"), ("POST", "/reset_gpu/0")):
            status, refused, _ = client.ask(method, path)
            assert (status, refused["error"]["message"]) == (503, answer["why"])
        assert made_up.calls == []
    told = [record for record in caplog.records if record.exc_info]
    assert len(told) == 4 and told[0].exc_info[0] is KeyError
    monkeypatch.setattr(serve, "STATE_SECONDS", 0.05)
    made_up.state_waits.clear()
    assert client.ask("GET", "/health")[1]["status"] == "state_unknown"
    monkeypatch.setattr(serve, "STATE_SECONDS", 5.0)
    made_up.state_waits.set()
    status, answer, _ = client.ask("GET", "/health")
    assert (status, answer["status"], answer["why"]) == (200, "ok", None)


def test_health_of_gpus_whose_figures_cannot_be_read(client, fake_nvml, monkeypatch):
    """The figures of before are not told as those of now."""
    monkeypatch.setenv("NEEDLE_FAKE", "at=1,temperature=71")
    assert client.ask("GET", "/health")[1]["devices"][0]["temperature"] == 71

    def fails(uuid):
        raise KeyError("planted")

    with monkeypatch.context() as planted:
        planted.setattr(serve, "gpu_figures", fails)
        status, answer, _ = client.ask("GET", "/health")
        why = "the figures of the GPUs cannot be read: KeyError: 'planted'"
        assert [(one["temperature"], one["why"]) for one in answer["devices"]] == [(None, why)] * 2
        assert (status, answer["status"]) == (200, "ok")
    assert client.ask("GET", "/health")[1]["devices"][0]["temperature"] == 71


def test_health_after_a_thread_that_could_not_start(client, monkeypatch):
    assert client.alive()
    with monkeypatch.context() as planted:
        planted.setattr(serve.threading.Thread, "start", lambda self: {}["planted"])
        with pytest.raises(KeyError):
            asyncio.run_coroutine_threadsafe(client.service.state.get(), client.loop).result(60)
    assert client.service.state.asked.done() and client.alive()


def test_cleanup_and_reset(client, made_up):
    made_up.go.set()
    assert client.ask("POST", "/cleanup")[:2] == (200, {"freed_bytes": 12345})
    assert client.ask("POST", "/reset_gpu/0")[:2] == (200, {"status": "ok", "device": 0})
    status, answer, _ = client.ask("POST", "/reset_gpu/3")
    assert status == 503 and "still does not end" in answer["error"]["message"]
    assert made_up.calls == [0, 3]
    for name in ("1", "", "-1", "0x0", "00000000", "0/0", "%31", "9" * 5000, "%D9%A0"):
        status, answer, _ = client.ask("POST", f"/reset_gpu/{name}")
        assert status in (400, 404)
    assert made_up.calls == [0, 3]


def test_one_cleanup_at_a_time(client, made_up):
    answers = []
    thread = threading.Thread(target=lambda: answers.append(client.ask("POST", "/cleanup")[0]))
    thread.start()
    assert made_up.begun.acquire(timeout=60)
    status, _, headers = client.ask("POST", "/reset_gpu/0")
    assert status == 429 and int(headers["Retry-After"]) >= 1
    made_up.go.set()
    thread.join(60)
    assert answers == [200]


@pytest.mark.parametrize("path, allowed", [("/evaluate", "POST"), ("/health", "GET")])
def test_methods(client, path, allowed):
    for method in {"GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"} - {allowed}:
        status, answer, headers = client.ask(method, path)
        assert (status, headers["Allow"]) == (405, allowed)


@pytest.mark.parametrize("path", ["/", "/evaluate/", "//evaluate", "/EVALUATE", "/../health"])
def test_paths(client, path):
    status, answer, _ = client.ask("GET", path)
    assert status == 404 and "/reset_gpu/{id}" in answer["error"]["message"]


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


def test_the_log_tells_jobs_refusals_and_processes(caplog):
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


def test_a_log_that_nobody_reads_stops_nothing():
    reader, writer = os.pipe()
    saved = os.dup(2)
    try:
        os.dup2(writer, 2)
        lines = Lines(Stderr())
        logger = logging.Logger("test")
        logger.addHandler(lines)
        began = time.monotonic()
        for _ in range(3000):
            logger.info("x" * 1000)  # the pipe holds 64 KiB
        assert time.monotonic() - began < 10 and lines.dropped > 1000
        lines.flush_within(0.01)
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        threading.Thread(target=_drain, args=(reader,), daemon=True).start()
        lines.flush_within(20)
        os.close(writer)


def _drain(reader):
    while os.read(reader, 1 << 16):
        pass
    os.close(reader)


def test_without_aiohttp_one_clear_error(monkeypatch):
    monkeypatch.setitem(sys.modules, "aiohttp.web", None)
    with pytest.raises(RuntimeError, match=r"needs aiohttp .*pip install aiohttp"):
        load_aiohttp()
