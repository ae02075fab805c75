"""A kernel service is asked politely, with its token, and not for long."""

import contextlib
import http.server
import json
import threading
import time

import pytest

from needle.diagnose import server

pytestmark = pytest.mark.slow

ANSWERS = {
    "/health": (200, {"status": "ok", "queue": 3}),
    "/statistics": (200, {"jobs": 7, "faults": {"timeout": 1}}),
}


@contextlib.contextmanager
def service(answers, wait: float = 0):
    """Its address, and the Authorization of each request."""
    seen = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            seen.append((self.path, self.headers.get("Authorization")))
            time.sleep(wait)
            status, body = answers[self.path]
            with contextlib.suppress(OSError):
                self.send_response(status)
                if status == 302:
                    self.send_header("Location", body)
                self.end_headers()
                text = body if isinstance(body, str) else json.dumps(body)
                self.wfile.write(text.encode())

        def log_message(self, *words):
            """Silent."""

    one = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    one.daemon_threads = True
    thread = threading.Thread(target=one.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{one.server_port}", seen
    finally:
        one.shutdown()
        thread.join()
        one.server_close()


@pytest.fixture(autouse=True)
def no_token(monkeypatch):
    monkeypatch.delenv("NEEDLE_KERNELS_TOKEN", raising=False)
    monkeypatch.delenv("NEEDLE_KERNELS_TOKEN_FILE", raising=False)


def test_what_it_tells_is_printed_as_it_comes(heard, monkeypatch):
    monkeypatch.setenv("NEEDLE_KERNELS_TOKEN", "secret")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    with service(ANSWERS) as (url, seen):
        server.examine(heard, url + "/")
    assert heard.levels()["failed"] == []
    assert '/health: status "ok", queue 3' in heard.levels()["ok"]
    assert heard.facts == {"health": ANSWERS["/health"][1], "statistics": ANSWERS["/statistics"][1]}
    assert seen == [("/health", "Bearer secret"), ("/statistics", "Bearer secret")]


def test_the_token_may_be_in_a_file(heard, monkeypatch, tmp_path):
    (tmp_path / "token").write_text("kept\n")
    monkeypatch.setenv("NEEDLE_KERNELS_TOKEN_FILE", str(tmp_path / "token"))
    with service(ANSWERS) as (url, seen):
        server.examine(heard, url)
    assert {token for _, token in seen} == {"Bearer kept"}
    monkeypatch.setenv("NEEDLE_KERNELS_TOKEN_FILE", str(tmp_path / "none"))
    server.examine(heard, url)
    assert "No such file" in heard.levels()["failed"][0]


@pytest.mark.parametrize(
    "answer, said",
    [
        ((401, ""), "refuses the token (HTTP 401)"),
        ((500, "broken"), "answers HTTP 500: broken"),
        ((200, "no JSON"), "answers HTTP 200: no JSON"),
        ((200, "[1]"), "answers HTTP 200: [1]"),
        ((302, "http://127.0.0.1:1/elsewhere"), "answers HTTP 302"),
    ],
)
def test_other_answers_are_failures(heard, answer, said):
    with service({"/health": answer}) as (url, seen):
        server.examine(heard, url)
    (finding,) = heard.findings
    assert finding.has_failed and said in finding.text and finding.remedy and len(seen) == 1


def test_one_that_does_not_answer(heard, monkeypatch):
    monkeypatch.setattr(server, "SECONDS", 0.3)
    with service(ANSWERS, wait=1) as (url, _):
        start = time.monotonic()
        server.examine(heard, url)
        assert "does not answer: timed out" in heard.levels()["failed"][0]
        assert time.monotonic() - start < 0.9
    heard.findings.clear()
    server.examine(heard, url)
    server.examine(heard, "nonsense")
    refused, nonsense = heard.levels()["failed"]
    assert "refused" in refused and "unknown url type" in nonsense


def test_a_slow_health_is_told(heard, monkeypatch):
    monkeypatch.setattr(server, "SLOW", 0.0)
    with service(ANSWERS) as (url, _):
        server.examine(heard, url)
    assert "/health took" in heard.levels()["note"][0]
