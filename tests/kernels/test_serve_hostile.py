"""needle/kernels/serve.py against its clients: every limit, the queue, bodies and connections of
any content. Each is a 4xx, and the service goes on.
"""

import json
import socket
import statistics
import time

import pytest
import safetensors.numpy
from fake_pool import SOURCE
from harness import naming, wait_for
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from serving import ARGS, JOB, LIMITS, SIMPLE, X, head, multipart, waiting
from test_job import FULL, jobs

pytest.importorskip("aiohttp", reason="no aiohttp (pip install aiohttp): no service")

from needle.kernels import serve

pytestmark = pytest.mark.slow

JSON = "Content-Type: application/json"
ANYTHING = settings(
    deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)  # the service stays from example to example


# ---- limits --------------------------------------------------------------------------------------


def test_bodies_that_are_too_large_are_refused(client):
    """A length is refused at once; without one the bytes are counted."""
    arrays, parts = multipart(job=b"{}", arrays=b"x" * (LIMITS.body_bytes + 1))
    source, part = multipart(job=b"x" * (LIMITS.json_bytes + 1))
    for body, kind, most in (
        (b" " * (9 * 65536), "application/json", LIMITS.json_bytes),
        (arrays, parts, LIMITS.body_bytes),
        (source, part, LIMITS.json_bytes),
    ):
        for sent in (body, iter([body[i : i + 65536] for i in range(0, len(body), 65536)])):
            status, answer, _ = client.ask("POST", "/evaluate", sent, Content_Type=kind)
            assert (status, answer["error"]["limit"]) == (413, most)
    length = "Content-Length: 9999999999999"
    assert b" 413 " in client.raw(head("POST /evaluate", JSON, length))
    assert client.alive()


def test_a_body_that_does_not_arrive_is_refused(client, monkeypatch):
    monkeypatch.setattr(serve, "BODY_SECONDS", 0.2)
    answer = client.raw(head("POST /evaluate", JSON, "Content-Length: 10") + b"{")
    assert b" 408 " in answer and b'"limit":0.2' in answer
    assert client.service.held == 0


def test_a_full_queue_refuses_jobs(client):
    with waiting(client, 3) as answers:  # one runs, two wait
        status, answer, headers = client.ask(
            "POST", "/evaluate", json.dumps(SIMPLE), Content_Type="application/json"
        )
        assert (status, answer["error"]["limit"]) == (429, 2) and int(headers["Retry-After"]) >= 1
        assert client.ask("GET", "/statistics")[1]["queue"]["waiting"] == 2
        assert len(client.service.pool.calls) == 1
    assert [status for status, _ in answers] == [200] * 3 and client.service.held == 0
    assert client.evaluate(SIMPLE)[0] == 200


def test_health_answers_at_once_with_a_full_queue(client):
    with waiting(client, 3):
        times = []
        for _ in range(15):
            began = time.monotonic()
            assert client.alive()
            times.append(time.monotonic() - began)
    assert statistics.median(times) < 0.1, times


def test_a_client_that_leaves_loses_its_turn(client, made_up):
    with waiting(client, 1):
        body = json.dumps(SIMPLE).encode()
        with socket.create_connection(("127.0.0.1", client.port), timeout=60) as sock:
            sock.sendall(head("POST /evaluate", JSON, f"Content-Length: {len(body)}") + body)
            wait_for(lambda: client.service.waiting == 1)
        time.sleep(0.1)
    assert client.evaluate(SIMPLE)[0] == 200
    assert len(made_up.calls) == 2  # the first, and the last
    assert client.service.held == client.service.running == 0


# ---- any content ---------------------------------------------------------------------------------


def test_other_kinds_of_bodies_are_refused(client):
    for kind in (None, "text/plain", "application/octet-stream", "multipart/mixed; boundary=x"):
        status, answer, _ = client.ask("POST", "/evaluate", b"{}", Content_Type=kind)
        assert status == 415 and "application/json" in answer["error"]["message"]
    for encoding in ("gzip", "deflate", "nonsense"):
        headers = {"Content_Type": "application/json", "Content_Encoding": encoding}
        assert client.ask("POST", "/evaluate", b"\x1f\x8b", **headers)[0] == 415


def test_wrong_parts_are_refused(client):
    edge = "multipart/form-data; boundary=edge"
    job = multipart(job=b"{}")[0]
    for body, kind in (
        (b"", edge),
        (b"no edge", edge),
        (b"--edge\r\n", edge),
        (b"--edge--\r\n", edge),
        (b"--edge\r\n\r\nx\r\n--edge--\r\n", edge),
        (b"--edge\r\nContent-Disposition: \r\n\r\nx\r\n--edge--\r\n", edge),
        (b"--edge\r\n" + b"x" * 70000, edge),
        (
            b"--edge\r\nContent-Type: multipart/mixed; boundary=in\r\n\r\n"
            b"--in\r\n\r\nx\r\n--in--\r\n--edge--\r\n",
            edge,
        ),
        (b"x", "multipart/form-data"),
        (b"x", "multipart/form-data; boundary=" + "e" * 100),
        multipart(arrays=b"x"),
        multipart(job=b"{}", other=b"x"),
        multipart(job=b""),
        multipart(job=b"{}", arrays=b"garbage"),
        (job.replace(b"--edge--\r\n", b"") + job, edge),
    ):
        with naming(body[:80], kind):
            status, answer, _ = client.ask("POST", "/evaluate", body, Content_Type=kind)
            assert status == 400 and answer["error"]["message"]
    assert client.alive()


def test_expect_100_continue_is_answered(fake):
    """curl sends it with a body of more than a megabyte."""
    body, kind = multipart(job=json.dumps(JOB).encode(), arrays=safetensors.numpy.save({"x": X}))
    lines = f"Content-Type: {kind}", f"Content-Length: {len(body)}", "Expect: 100-continue"
    with socket.create_connection(("127.0.0.1", fake.port), timeout=60) as sock:
        sock.sendall(head("POST /evaluate", *lines, "Connection: close"))
        assert sock.recv(1000) == b"HTTP/1.1 100 Continue\r\n\r\n"
        sock.sendall(body)
        assert sock.recv(1000).startswith(b"HTTP/1.1 200 OK")


def test_text_that_is_no_http_is_refused(client):
    for data in (
        b"\0\1\2\3\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET /" + b"x" * 70000 + b" HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 5000 + b"\r\n",
        b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nx",
        b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\nContent-Length: 2\r\n\r\nx",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200),
        b"GET http://evil.example/health HTTP/1.1\r\nHost: evil.example\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n",
    ):
        with naming(data[:60]):
            answer = client.raw(data)
            assert answer == b"" or b" 4" in answer.split(b"\r\n")[0]
    assert client.alive()


def test_a_chunk_that_is_none(client, monkeypatch):
    monkeypatch.setattr(serve, "BODY_SECONDS", 0.3)
    chunked = head("POST /evaluate", JSON, "Transfer-Encoding: chunked")
    for body in ("zz\r\n", "5\r\n{}", "-5\r\n{}", "fffffffffffffffffff\r\n{}"):
        answer = client.raw(chunked + body.encode())
        assert answer == b"" or answer.split()[1] in (b"400", b"408")
    assert client.alive() and client.service.held == 0


@settings(ANYTHING, max_examples=60)
@given(
    job=jobs(
        FULL
        | {
            "source": SOURCE,
            "entry": "scale",
            "reference": None,
            "tolerance": None,
            "trials": None,
            "time": None,
            "cases": [{"grid": 1, "block": [32, 1, 1], "shared": 0, "args": ARGS}],
        }
    )
)
def test_jobs_with_anything_in_them(fake, job):
    """Jobs pass the whole service and the pool: an answer or a 4xx."""
    status, answer = fake.evaluate(job, safetensors.numpy.save({"x": X}))
    assert status == 200 and answer["status"] or 400 <= status < 500, (status, answer)


@settings(ANYTHING, max_examples=30)
@given(
    kind=st.sampled_from(["application/json", "multipart/form-data; boundary=edge"]),
    head=st.sampled_from(
        [b"", b"--edge\r\n", b'--edge\r\nContent-Disposition: form-data; name="job"\r\n\r\n']
    ),
    body=st.binary(max_size=300),
    tail=st.sampled_from([b"", b"\r\n--edge--\r\n"]),
)
def test_bodies_of_anything(fake, kind, head, body, tail):
    status, answer, _ = fake.ask("POST", "/evaluate", head + body + tail, Content_Type=kind)
    assert 400 <= status < 500 and answer["error"]["message"]


@settings(ANYTHING, max_examples=30)
@given(
    data=st.binary(max_size=200),
    method=st.sampled_from([b"", b"GET ", b"POST /evaluate HTTP/1.1\r\n"]),
)
def test_connections_of_anything(fake, data, method):
    answer = fake.raw(method + data + b"\r\n\r\n")
    assert answer == b"" or b" 4" in answer.split(b"\r\n")[0]
