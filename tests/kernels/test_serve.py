"""needle serve over real sockets: jobs, refusals, access, every route, and the program. The pool's
processes have no GPU (fake_pool.py)."""

import asyncio
import base64
import http.client
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import safetensors.numpy
from fake_pool import SECONDS, SOURCE, FakePool
from harness import ROOT, in_thread, naming, run, state_of, wait_for

from needle.kernels import Case, KernelExecResult, Out, Problem, Random, Reference, Result, Timing
from needle.kernels import __main__ as program

web = pytest.importorskip("aiohttp.web", reason="no aiohttp (pip install aiohttp): no service")
from needle.kernels import serve

pytestmark = pytest.mark.slow

TOKEN = "t" * 43
BODY = 1 << 20
X = np.arange(6, dtype=np.float32)
OUT = {"shape": [6], "dtype": "float32", "out": True}
DRAWN = {"shape": [6], "dtype": "float32", "seed": 5}
CASE = {"grid": 1, "block": [32, 1, 1], "args": [{"array": "x"}, OUT, 2.0, 6]}
JOB = {"source": SOURCE, "entry": "scale", "cases": [CASE]}
JUDGED = JOB | {"cases": [CASE | {"args": [DRAWN, OUT, 2.0, 6]}], "trials": 2, "time": False}
JUDGED |= {"language": "cuda"}
REFERENCE = {"source": SOURCE, "entry": "scale"}
BYTES = {"shape": [1], "dtype": "uint8", "out": True}
PROBLEM = {"original_model_src": "a", "custom_model_src": "b"}
MADE = KernelExecResult(True, True, {"hardware": "H"}, 1.5, speedup=2.0)
LAUNCH = {"grid": 1, "block": 1, "args": []}
SIMPLE = {"source": "any", "entry": "k", "cases": [LAUNCH]}


class Client:
    def __init__(self, port, token=TOKEN, service=None):
        self.port, self.token, self.service = port, token, service

    def ask(self, method, path, body=None, **headers):
        """(status, JSON, headers); `_` in names of headers is `-`."""
        sent = {"Authorization": f"Bearer {self.token}"}
        sent |= {name.replace("_", "-"): value for name, value in headers.items()}
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            sent = {name: value for name, value in sent.items() if value}
            connection.request(method, path, body, sent)
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read() or b"null"), answer.headers
        finally:
            connection.close()

    def evaluate(self, job, **arrays):
        body, kind = json.dumps(job).encode(), "application/json"
        if arrays:
            body, kind = multipart(job=body, arrays=safetensors.numpy.save(arrays))
        return self.ask("POST", "/evaluate", body, Content_Type=kind)[:2]


def multipart(**parts: bytes) -> tuple[bytes, str]:
    """(body, its Content-Type), as curl -F writes it."""
    lines = []
    for name, data in parts.items():
        head = f'--edge\r\nContent-Disposition: form-data; name="{name}"; filename="{name}"\r\n\r\n'
        lines += [head.encode(), data, b"\r\n"]
    return b"".join([*lines, b"--edge--\r\n"]), "multipart/form-data; boundary=edge"


@contextmanager
def running(pool):
    made = Future()

    async def work():
        service, stop = serve.Service(pool, TOKEN, BODY, queue=2), asyncio.Event()
        runner = web.AppRunner(service.app, access_log=None)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = site._server.sockets[0].getsockname()[1]
        made.set_result((service, port, asyncio.get_running_loop(), stop))
        await stop.wait()
        await runner.cleanup()

    ended = in_thread(asyncio.run, work())
    service, port, loop, stop = made.result(60)
    try:
        yield Client(port, service=service)
    finally:
        loop.call_soon_threadsafe(stop.set)
        ended.result(60)


@pytest.fixture(scope="session")
def client():
    """A service whose pool is real, and whose kernels are Python functions."""
    with FakePool(devices=[0], timeout=SECONDS) as pool, running(pool) as found:
        yield found


@pytest.fixture
def pool(client):
    return client.service.pool


# ---- jobs ----------------------------------------------------------------------------------------


def test_job_has_its_status_and_its_outputs(client):
    case, inout = LAUNCH, {"array": "x", "inout": True}
    wrong = {"source": SOURCE.replace("= a * x", "= 2.125 * x"), "entry": "scale"}
    timed = {"reference": REFERENCE, "tolerance": [0, 0], "trials": 1, "time": True}
    for job, status, said, outputs in (
        (JOB, "ok", "", [2 * X]),
        (JOB | {"cases": [CASE | {"expected": ["y"]}], "time": False}, "ok", "", [2 * X]),
        (JOB | {"cases": [CASE | {"expected": ["x"]}]}, "wrong_result", "case 0, trial 0", [2 * X]),
        (JUDGED | timed, "ok", "", None),
        (JUDGED | {"reference": wrong}, "wrong_result", "case 0, trial 0", None),
        (JOB | {"source": "def k(:"}, "compile_error", "kernel.py(1)", []),
        (JOB | {"entry": "fails", "cases": [case | {"args": [0]}]}, "illegal_address", "k: cu", []),
        (JOB | {"entry": "copies", "cases": [case | {"args": [BYTES, {"bytes": "0f"}]}]},
         "ok", "", [[15]]),
        (JOB | {"entry": "scale_c", "cases": [CASE | {"args": [inout, inout, 2.0, 6]}]},
         "ok", "", [X, 2 * X]),
    ):  # fmt: skip
        with naming(status, said):
            code, answer = client.evaluate(job | {"outputs": True}, x=X, y=2 * X)
            assert (code, answer["status"]) == (200, status) and said in answer["message"], answer
            assert bool(answer["timing"]) == (status == "ok" and bool(job.get("time")))
            got = safetensors.numpy.load(base64.b64decode(answer["outputs"], validate=True))
            if outputs is not None:
                assert got.keys() == {str(n) for n in range(len(outputs))}
                assert all((got[str(n)] == array).all() for n, array in enumerate(outputs))
    status, answer = client.evaluate(JUDGED | {"reference": REFERENCE | {"entry": "absent"}})
    assert status == 422 and "reference: it fails: compile_error" in answer["error"]["message"]


def test_answer_has_all_fields_of_a_result(client, pool, monkeypatch):
    jobs, given = client.ask("GET", "/statistics")[1]["jobs"], []
    timing = (Timing(1.0, 0.5, float("inf"), 3, float("nan"), 2.0),)
    made = {"outputs": (X, np.array(True)), "resources": {"registers": np.int64(5)}}
    run = lambda *_: time.sleep(0.1) or Result("made", timing=timing, **made)
    monkeypatch.setattr(pool, "run", run)
    monkeypatch.setattr(pool, "evaluate", lambda job: given.append(job) or MADE)
    status, answer = client.evaluate(SIMPLE)
    figures = {"median": 1.0, "lower": 0.5, "upper": None, "calls": 3, "rate": None}
    more = {"device_rate": 2.0, "valid": True, "reason": "", "hints": []}
    assert answer.pop("timing") == [figures | more]
    seconds = answer.pop("seconds")
    assert seconds.keys() == {"queued", "ran"} and seconds["ran"] >= 0.1
    texts = {"status": "made", "message": "", "printed": "", "explanation": ""}
    rest = {"resources": {"registers": 5}, "deterministic": None, "device": -1}
    assert (status, answer) == (200, texts | rest)
    status, answer = client.evaluate(PROBLEM | {"num_correct_trials": 2})
    assert given == [Problem("a", "b", num_correct_trials=2)]
    assert (status, answer["compiled"], answer["correctness"]) == (200, True, True)
    assert (answer["runtime"], answer["metadata"]) == (1.5, {"hardware": "H"})
    after = {"made": 1, "ok": jobs.get("ok", 0) + 1}
    assert client.ask("GET", "/statistics")[1]["jobs"] == jobs | after


def test_cuda_job_without_a_gpu_is_a_wrong_request():
    with FakePool(devices=[]) as pool, running(pool) as client:
        status, answer = client.evaluate(JUDGED | {"reference": REFERENCE})
        assert status == 400 and "there is no GPU here" in answer["error"]["message"]
        _, answer, _ = client.ask("POST", "/reset_gpu/0")
        assert answer["error"] == {"status": 404, "message": "no device 0; there are none"}


# ---- refusals ------------------------------------------------------------------------------------


def with_argument(given) -> dict:
    return JUDGED | {"cases": [CASE | {"args": [given, OUT, 2.0, 6]}]}


def test_wrong_jobs_are_refused(client):
    for job, said in (
        (JUDGED | {"source": 5}, "`$.source`"),
        (JUDGED | {"entry": ""}, "`$.entry`"),
        (JUDGED | {"cases": []}, "`$.cases`"),
        (SIMPLE | {"cases": [LAUNCH] * 65}, "`$.cases`"),
        (JUDGED | {"trials": 51}, "`$.trials`"),
        (JUDGED | {"unknown": 1}, "unknown field `unknown`"),
        (SIMPLE | {"sanitizer": "memcheck --kill"}, "sanitizer: must be one of"),
        (JUDGED | {"cases": [CASE | {"grid": 1.5, "expected": []}]}, "no array 'x'"),
        (SIMPLE | {"cases": [LAUNCH | {"grid": 1.5}]}, "grid: must be a whole number"),
        (SIMPLE | {"cases": [LAUNCH | {"args": [1] * 257}]}, "<= 256 - at `$.cases[0].args`"),
        (SIMPLE | {"cases": [LAUNCH | {"args": 3}]}, "got `int` - at `$.cases[0].args`"),
        (SIMPLE | {"cases": [LAUNCH, {}]}, "missing required field `grid` - at `$.cases[1]`"),
        (SIMPLE | {"cases": [LAUNCH | {"expected": 3}]}, "at `$.cases[0].expected`"),
        (SIMPLE | {"cases": [LAUNCH | {"other": 1}]}, "unknown field `other` - at `$.cases[0]`"),
        (SIMPLE | {"cases": [LAUNCH | {"expected": ["y"]}]}, "no array 'y' in the safetensors: no"),
        (with_argument({}), "exactly one of array, shape, bytes"),
        (with_argument(None), "exactly one of array, shape, bytes"),
        (with_argument({"bytes": "xy"}), "non-hexadecimal"),
        (with_argument({"array": "x", "shape": [1]}), "'array'"),
        (with_argument(OUT | {"dtype": "float8"}), "dtype 'float8'"),
        (with_argument(DRAWN | {"seed": -1}), "seed: must be 0 or more"),
        (SIMPLE | {"cases": [LAUNCH] * 2}, "or one case alone"),
        (SIMPLE | {"cases": [LAUNCH | {"expected": []}, LAUNCH]}, "give expected in each"),
        (PROBLEM | {"trials": 1}, "'trials'"),
        (PROBLEM | {"num_perf_trials": 0}, "1 or more"),
        (PROBLEM | {"num_perf_trials": "9"}, "Expected `int`, got `str` - at `$.num_perf_trials`"),
    ):
        with naming(said):
            status, answer = client.evaluate(job)
            assert status == 400 == answer["error"]["status"], answer
            assert said in answer["error"]["message"], answer


def test_fields_of_a_job_reach_the_pool():
    pool = SimpleNamespace(run=lambda *given: given, evaluate=lambda *given: given)
    do = lambda **more: serve.read_job(json.dumps(SIMPLE | more).encode()).do(pool, {})
    launched = do(cases=[LAUNCH | {"shared": 9}], sanitizer="memcheck", explain=True)
    assert launched == ("any", "k", 1, 1, [], 9, "memcheck", True)
    case, reference = LAUNCH | {"operations": 5.0}, REFERENCE | {"block": 8, "shared": 0}
    options = {"tolerance": [0, 0.5], "trials": 7, "time": False}
    judged = do(cases=[case], reference=reference, **options)
    right = Reference(SOURCE, "scale", block=8, shared=0)
    assert judged == ("any", "k", [Case(1, 1, [], operations=5.0)], right, *options.values())
    most = [LAUNCH | {"args": [1] * 256}]
    assert do(cases=most, trials=50)[4] == [1] * 256  # at the limits
    assert len(serve.read_job(json.dumps(SIMPLE | {"cases": [LAUNCH] * 64}).encode()).cases) == 64
    assert serve.argument({"shape": [6], "out": False}, {}) == Random([6])
    assert serve.argument({"array": "x", "inout": False}, {"x": X}) is X


def test_bodies_that_are_no_job_are_refused(client):
    edge = "multipart/form-data; boundary=edge"
    for body, kind, status in (
        (b"", "application/json", 400),
        (b"[" * 100_000, "application/json", 400),
        (b"{}", "text/plain", 415),
        (b"", edge, 400),
        (*multipart(job=json.dumps(SIMPLE).encode(), other=b"x"), 400),
        (*multipart(job=json.dumps(JOB).encode(), arrays=b"\x80\x04pickle."), 400),
        (b" " * (BODY + 1), "application/json", 413),
        (*multipart(job=b"{}", arrays=bytes(BODY + 1)), 413),
    ):
        with naming(body[:60], kind):
            found, answer, _ = client.ask("POST", "/evaluate", body, Content_Type=kind)
            assert found == status and answer["error"]["message"]
            assert (str(BODY) in answer["error"]["message"]) == (status == 413)
    body, kind = multipart(job=json.dumps(JOB).encode(), arrays=b"x")
    body = body.replace(b'; filename="arrays"', b"")  # curl -F arrays=x
    _, answer, _ = client.ask("POST", "/evaluate", body, Content_Type=kind)
    assert answer["error"] == {
        "status": 400,
        "message": "arrays: must come as a file, as by curl -F arrays=@arrays.safetensors",
    }
    sent = {"Content_Type": "application/json", "Content_Encoding": "gzip"}
    _, answer, _ = client.ask("POST", "/evaluate", b"{}", **sent)
    assert answer["error"]["status"] == 400
    assert answer["error"]["message"].startswith("the body cannot be read: ")
    assert client.service.counts() == {"running": 0, "waiting": 0}


def test_errors_of_the_pool_have_a_status(client, pool, monkeypatch, caplog):
    def fails(error):
        raise error

    lives = RuntimeError("process 7 outlives SIGKILL")
    monkeypatch.setattr(pool, "reset", lambda number: fails(lives))
    status, answer, _ = client.ask("POST", "/reset_gpu/0")
    assert status == 503 and "outlives SIGKILL" in answer["error"]["message"]
    for kind, status in ((TypeError, 400), (MemoryError, 503), (KeyError, 500)):
        monkeypatch.setattr(pool, "run", lambda *_, kind=kind: fails(kind("told so")))
        got, answer = client.evaluate(SIMPLE)
        assert got == status and ("told so" in answer["error"]["message"]) == (status != 500)
    assert "KeyError" in caplog.text
    monkeypatch.setattr(pool, "run", lambda *_: fails(MemoryError()))  # without a text
    assert client.evaluate(SIMPLE)[1] == {"error": {"status": 503, "message": "MemoryError"}}
    assert client.service.counts() == {"running": 0, "waiting": 0}


def test_reference_killed_by_the_end_of_the_service_gives_503(client, pool, monkeypatch):
    def ends(problem):
        monkeypatch.setattr(pool, "closed", True)
        raise ValueError("original_model_src: crashed")

    monkeypatch.setattr(pool, "evaluate", ends)
    assert client.evaluate(PROBLEM)[1] == {"error": {"status": 503, "message": "the service ends"}}
    assert client.service.counts() == {"running": 0, "waiting": 0}


def test_full_queue_refuses_jobs_and_health_answers(client, pool, monkeypatch):
    go = threading.Event()
    monkeypatch.setattr(pool, "run", lambda *_: Result("ok", str(go.wait(60))))
    sent = [in_thread(client.evaluate, SIMPLE) for _ in range(3)]
    wait_for(lambda: client.service.counts() == {"running": 1, "waiting": 2})
    refused = client.ask("GET", "/statistics")[1]["refused"].get("429", 0)
    status, answer, headers = client.ask(
        "POST", "/evaluate", json.dumps(SIMPLE), Content_Type="application/json"
    )
    assert (status, headers["Retry-After"]) == (429, "1")
    assert answer["error"] == {"status": 429, "message": "2 jobs wait, and 2 may (--queue)"}
    status, health, _ = client.ask("GET", "/health")
    assert (status, health["running"], health["waiting"]) == (200, 1, 2)
    _, counts, _ = client.ask("GET", "/statistics")
    queue = {"running": 1, "waiting": 2, "most_running": 1, "most_waiting": 2}
    assert (counts["queue"], counts["refused"]["429"]) == (queue, refused + 1)
    time.sleep(0.3)
    go.set()
    answers = [one.result(60) for one in sent]
    assert [status for status, _ in answers] == [200] * 3
    seconds = sorted((answer["seconds"] for _, answer in answers), key=lambda one: one["queued"])
    assert all(one["ran"] < one["queued"] for one in seconds[1:])
    assert client.evaluate(SIMPLE)[0] == 200


# ---- access, and the other routes ----------------------------------------------------------------

ROUTES = [("GET", "/health"), ("GET", "/statistics"), ("POST", "/evaluate"), ("POST", "/cleanup")]
ROUTES += [("POST", "/reset_gpu/0"), ("GET", "/nowhere"), ("OPTIONS", "*")]


def test_every_route_needs_the_token_and_others_are_refused(client, caplog):
    for method, path in ROUTES:
        for value in (None, "Bearer x", f"Bearer {TOKEN}x", TOKEN, f"Basic {TOKEN}", "Bearer é"):
            with naming(method, path, value):
                status, answer, headers = client.ask(method, path, Authorization=value)
                assert status == 401 and answer["error"]["status"] == 401
                assert headers["WWW-Authenticate"] == "Bearer"
    status, answer, headers = client.ask("PUT", "/evaluate")
    assert (status, headers["Allow"]) == (405, "POST") and answer["error"]["status"] == 405
    for method, path in ("GET", "/../health"), ("POST", "/reset_gpu/x"), ("POST", "/reset_gpu/1"):
        assert client.ask(method, path)[0] == 404, path
    with caplog.at_level("DEBUG"):
        client.ask("GET", f"/health?token={TOKEN}")
        client.ask("GET", "/no%0awhere", Authorization=f"Bearer {TOKEN}x")
    lines = [r.getMessage() for r in caplog.records if r.name == "needle.kernels"]
    assert TOKEN not in caplog.text and lines[-2].startswith("GET '/health' 200, ")
    assert r"'/no\nwhere' 401" in lines[-1]


def test_health_and_statistics_have_each_gpu(client, pool, tmp_path, monkeypatch):
    program = tmp_path / "nvidia-smi"
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    missing = {"name": None, "memory": None, "temperature": None, "load": None}
    memory = {"total": 141 << 30, "free": 138 << 30, "used": 3 << 30}
    there = {"name": "NVIDIA Pretend", "memory": memory, "temperature": 71, "load": None}
    row = "GPU-1, NVIDIA Pretend, 144384, 141312, 3072, 71, [N/A]"
    one = {"device": 0, "facts": {"name": "H", "uuid": "GPU-1"}, "ready": [1], "used": []}
    one |= {"faults": 2, "started": 5, "set_aside": None}
    lost = one | {"device": 1, "set_aside": "why"}
    monkeypatch.setattr(pool, "state", lambda: [one])
    for text, figures in (
        (f"echo GPU-0, other, 1, 1, 1, 1, 1\necho '{row}'", there | {"why": None}),
        ("echo No devices; exit 6", missing | {"why": "nvidia-smi: No devices"}),
    ):
        with naming(text):
            program.write_text(f"#!/bin/sh\n{text}\n")
            program.chmod(0o755)
            status, answer, _ = client.ask("GET", "/health")
            expected = {"device": 0, "set_aside": None, "ready": 1, **figures}
            assert (status, answer["devices"]) == (200, [expected])
    program.write_text("#!/bin/sh\nexec sleep 60\n")
    monkeypatch.setattr(serve, "SMI_SECONDS", 0.3)
    status, answer, _ = client.ask("GET", "/health")
    assert status == 200 and "timed out after 0.3 s" in answer["devices"][0]["why"]
    status, answer, _ = client.ask("GET", "/statistics")
    device = {"device": 0, "name": "H", "faults": 2, "restarts": 5, "set_aside": None}
    assert answer["devices"] == [device] and answer["median_seconds"].keys() == {"queued", "ran"}
    for state, wanted, word in ([lost], 503, "device_lost"), ([lost, one], 200, "ok"):
        monkeypatch.setattr(pool, "state", lambda state=state: state)
        status, answer, _ = client.ask("GET", "/health")
        assert (status, answer["status"], answer["uptime_seconds"] > 0) == (wanted, word, True)


def test_cleanup_and_reset_answer(client):
    assert client.ask("POST", "/cleanup")[1]["freed_bytes"] >= 0
    assert client.ask("POST", "/reset_gpu/0")[:2] == (200, {"status": "ok", "device": 0})


# ---- the program ---------------------------------------------------------------------------------


STARTED = """
import sys
sys.path[:0] = [sys.argv[1] + "/tests/kernels", sys.argv[1] + "/tests", sys.argv[1]]
from fake_pool import FakePool
from needle.kernels import __main__ as program
program.Pool = FakePool
sys.exit(program.main(sys.argv[2:]))
"""


FLAGS = "--devices 0 --queue 0 --max-body-bytes 20000 --spares 2 --memory 4096"


def command(tmp_path, *flags) -> list[str]:
    words = ["--port", "0", "--timeout", "60", "--token-file", str(tmp_path / "token")]
    return [sys.executable, "-W", "error", "-c", STARTED, str(ROOT), *words, *flags]


def test_program_serves_until_sigterm_which_ends_everything(tmp_path):
    words = command(tmp_path, *FLAGS.split())
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(words, **pipes) as process, ExitStack() as failed:
        failed.callback(process.kill)
        said = process.stdout.readline() + process.stdout.readline()
        port = re.search(r"^listening on http://127\.0\.0\.1:(\d+), token in ", said, re.MULTILINE)
        assert "arbitrary code" in said and port
        token = (tmp_path / "token").read_text().strip()
        client = Client(int(port[1]), token)
        assert "20000" in client.evaluate(SIMPLE, x=np.zeros(9999))[1]["error"]["message"]
        large = JOB | {"cases": [LAUNCH | {"args": [OUT | {"shape": [1025]}]}]}
        assert "of 4,096 (memory=)" in client.evaluate(large)[1]["message"]
        wait_for(lambda: client.ask("GET", "/health")[1]["devices"][0]["ready"] == 3)
        hangs = in_thread(client.evaluate, SIMPLE | {"source": SOURCE, "entry": "hangs"})
        wait_for(lambda: client.ask("GET", "/health")[1]["running"])
        assert "and 0 may" in client.evaluate(SIMPLE)[1]["error"]["message"]
        pids = run("pgrep", "-P", process.pid).stdout.split()
        assert pids
        process.send_signal(signal.SIGTERM)
        assert hangs.result(60)[0] == 503
        out, error = process.communicate(timeout=60)
        assert (process.returncode, out) == (0, ""), error
        assert token not in error + said and "'/evaluate' 503" in error
    for pid in pids:
        wait_for(lambda pid=pid: state_of(int(pid)) is None)


def test_program_does_not_start_unsafely(tmp_path):
    (tmp_path / "open").write_text("o" * 40)
    (tmp_path / "open").chmod(0o644)
    for flags, broken, said in (
        (["--host", "0.0.0.0"], "", "lets in other machines"),
        (["--token-file", str(tmp_path / "open")], "", "chmod 600"),
        (["--devices", "0"], str(tmp_path), "3 x + 1 is wrong for 4096"),
    ):
        with naming(*flags):
            done = run(*command(tmp_path, *flags), FAKE_BROKEN=broken)
            assert done.returncode == 1 and done.stderr.startswith("needle: error: ")
            assert said in done.stderr and done.stderr.count("\n") == 1


def test_address_of_ipv6_is_printed_in_brackets_and_flags_reach_the_pool(
    tmp_path, capsys, monkeypatch
):
    pool, made = nullcontext(SimpleNamespace(devices={})), []
    monkeypatch.setattr(program, "Pool", lambda *given: made.append(given) or pool)
    monkeypatch.setattr(serve, "Service", lambda *_: SimpleNamespace(app=None))
    monkeypatch.setattr(web, "run_app", lambda *_, **more: None)
    sockets: list[tuple] = []  # of machines without IPv6, too

    def listening(address, family):
        sockets.append((address[:2], family))
        return nullcontext(SimpleNamespace(getsockname=lambda: address))

    monkeypatch.setattr(program.socket, "create_server", listening)
    words = "--host ::1 --port 9 --devices 0,3 --timeout 2.5 --memory 7 --spares 0"
    assert program.main([*words.split(), "--token-file", str(tmp_path / "token")]) == 0
    assert made == [([0, 3], 2.5, 7, 0)] and sockets == [(("::1", 9), socket.AF_INET6)]
    assert "listening on http://[::1]:9, token in " in capsys.readouterr().out


def test_wrong_flags_are_named(capsys, monkeypatch):
    for flags in "--port 65536|--timeout nan|--queue -1|--devices 0,x|--token-file=".split("|"):
        with naming(flags), pytest.raises(SystemExit):
            program.main(flags.split())
        assert flags.split()[0].rstrip("=") in capsys.readouterr().err
    assert program.parser().parse_args(["--devices", "cpu"]).devices == []
    monkeypatch.setitem(sys.modules, "aiohttp", None)
    assert program.main([]) == 1
    assert "needs aiohttp and msgspec" in capsys.readouterr().err


def test_job_and_unit_of_the_docs(tmp_path):
    """The job is read; the unit's flags exist, and systemd accepts it."""
    page = (ROOT / "docs/kernels.md").read_text()
    job = serve.read_job(re.search(r"```json\n(.*?)```", page, re.DOTALL)[1].encode())
    assert (job.entry, job.trials, job.outputs) == ("scale<float>", 5, True)
    args = [serve.argument(given, {"x": X}) for given in job.cases[0].args]
    assert args[0] is X and args[1:] == [Out(1000), 2.0, 1000]
    text = re.search(r"```ini\n(.*?)```", page, re.DOTALL)[1]
    words = re.search(r"^ExecStart=(.*)$", text.replace("\\\n", ""), re.MULTILINE)[1].split()
    assert words[1] == "serve"
    flags = program.parser().parse_args([*words[2:], "--devices", "cpu"])
    assert (flags.token_file.name, flags.devices) == ("token", [])
    shown = re.search(r"needle serve --host (\S+) --port (\d+)  ", page)
    usual = program.parser().parse_args([])
    assert shown.groups() == (usual.host, str(usual.port))
    unit = tmp_path / "needle-kernels.service"
    unit.write_text(text.replace(words[0], sys.executable))
    if shutil.which("systemd-analyze") is None:
        pytest.skip("no systemd-analyze here")
    done = run("systemd-analyze", "verify", unit)
    said = [line for line in done.stderr.splitlines() if unit.name in line]
    assert (done.returncode, said) == (0, []), done.stderr
