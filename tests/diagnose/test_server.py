"""A kernel service is asked with its token, and not for long."""

import contextlib
import http.server
import json
import threading
import time

import pytest
from harness import naming

from needle.diagnose import server

pytestmark = pytest.mark.slow

ANSWERS = {
    "/health": (200, {"status": "ok", "queue": 3}),
    "/statistics": (200, {"jobs": 7, "faults": {"timeout": 1}}),
}


@contextlib.contextmanager
def service(answers, wait: float = 0):
    """Its address, and (path, Authorization) of each request."""
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


def test_answers_are_reported_and_the_token_goes_to_the_address_alone(heard, monkeypatch, tmp_path):
    monkeypatch.setenv("NEEDLE_KERNELS_TOKEN", "secret")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    with service(ANSWERS) as (url, seen):
        server.examine(heard, url + "/")
        assert heard.levels()["failed"] == []
        assert '/health: status "ok", queue 3' in heard.levels()["ok"]
        assert heard.facts == {name[1:]: answer for name, (_, answer) in ANSWERS.items()}
        assert seen == [("/health", "Bearer secret"), ("/statistics", "Bearer secret")]
        monkeypatch.delenv("NEEDLE_KERNELS_TOKEN")
        (tmp_path / "token").write_text("kept\n")
        monkeypatch.setenv("NEEDLE_KERNELS_TOKEN_FILE", str(tmp_path / "token"))
        server.examine(heard, url)
        assert {token for _, token in seen[2:]} == {"Bearer kept"}
        monkeypatch.setenv("NEEDLE_KERNELS_TOKEN_FILE", str(tmp_path / "none"))
        server.examine(heard, url)
        assert "No such file" in heard.levels()["failed"][0] and len(seen) == 4


def test_other_answers_are_failures(heard):
    for answer, said in (
        ((401, ""), "refuses the token (HTTP 401)"),
        ((500, "broken"), "answers HTTP 500: broken"),
        ((200, "no JSON"), "answers HTTP 200: no JSON"),
        ((200, "[1]"), "answers HTTP 200: [1]"),
        ((302, "http://127.0.0.1:1/elsewhere"), "answers HTTP 302"),
    ):
        with naming(said), service({"/health": answer}) as (url, seen):
            heard.findings.clear()
            server.examine(heard, url)
            (finding,) = heard.findings
            assert finding.has_failed and said in finding.text and finding.remedy
            assert len(seen) == 1


def test_service_that_is_slow_or_silent_is_reported(heard, monkeypatch):
    with service(ANSWERS) as (url, _):
        monkeypatch.setattr(server, "SLOW", 0.0)
        server.examine(heard, url)
        assert "/health took" in heard.levels()["note"][0]
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
    assert "refused" in refused and "it must begin with http" in nonsense
