"""A kernel service is asked for its health with its token, and not for long."""

import contextlib
import json
import re
import socket
import time

import pytest
from harness import in_thread, naming

from needle.diagnose import server

pytestmark = pytest.mark.slow


@contextlib.contextmanager
def service(status: int, body: str, wait: float = 0):
    """Its address, and the text of each request."""
    seen: list[str] = []
    answer = f"HTTP/1.1 {status} -\r\nLocation: http://127.0.0.1:1/\r\n\r\n{body}"

    def serve() -> None:
        with contextlib.suppress(OSError):  # the socket is closed
            while True:
                one, _ = listener.accept()
                with one:
                    seen.append(one.recv(4096).decode())
                    time.sleep(wait)
                    one.sendall(answer.encode())

    with socket.create_server(("127.0.0.1", 0)) as listener:
        in_thread(serve)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", seen
        listener.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def ask(capsys, monkeypatch):
    """ask(url) -> the line about the service."""
    for name in "NEEDLE_KERNELS_TOKEN", "NEEDLE_KERNELS_TOKEN_FILE":
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")

    def examine(url: str) -> str:
        server.examine(url)
        return capsys.readouterr().out.splitlines()[-1]

    return examine


def test_health_is_shown_and_the_token_goes_to_the_address_alone(ask, monkeypatch, tmp_path):
    healthy = json.dumps({"status": "ok", "waiting": 3})
    (tmp_path / "token").write_text("kept\n")
    with service(200, healthy) as (url, seen):
        assert ask(url) == f"server         ok: {url}/health answers HTTP 200: {healthy}"
        monkeypatch.setenv("NEEDLE_KERNELS_TOKEN_FILE", str(tmp_path / "token"))
        ask(url + "/")
        (tmp_path / "token").unlink()
        assert "FAILED: the token's file: " in ask(url)
        monkeypatch.setenv("NEEDLE_KERNELS_TOKEN", "secret")
        ask(url)
        assert all(text.startswith("GET /health HTTP/1.1") for text in seen)
        found = [re.findall("Authorization: (.*)\r", text) for text in seen]
        assert found == [[], ["Bearer kept"], ["Bearer secret"]]


def test_any_other_answer_is_a_failure(ask, monkeypatch):
    for status, body, remedy in (
        (401, "", "NEEDLE_KERNELS_TOKEN"),
        (503, '{"status": "device_lost"}', "needle serve"),
        (200, '{"status": "ending"}', "needle serve"),
        (200, "[1]", "needle serve"),
        (302, '{"status": "ok"}', "needle serve"),
    ):
        with naming(status, body), service(status, body) as (url, seen):
            line = ask(url)
            assert f"FAILED: {url}/health answers HTTP {status}: {body}" in line
            assert remedy in line and len(seen) == 1
    assert "refused" in ask(url)
    assert "it must begin with http:// or https:// and a host" in ask("")
    monkeypatch.setattr(server, "SECONDS", 0.3)
    with service(200, "{}", wait=1) as (url, _):
        start = time.monotonic()
        assert "does not answer: timed out" in ask(url) and time.monotonic() - start < 0.9
