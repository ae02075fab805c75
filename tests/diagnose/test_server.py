"""A kernel service is asked for its health with its token, and not for long."""

import contextlib
import http.client
import re
import socket

import pytest
from harness import in_thread, naming

from needle.diagnose import server

pytestmark = pytest.mark.slow
ENDED = OSError, ValueError, http.client.HTTPException  # no answer, which the diagnosis reports


@contextlib.contextmanager
def service(answer: bytes | None):
    """Its address, and the text of each request. None: it does not answer."""
    seen: list[str] = []

    def serve() -> None:
        with contextlib.suppress(OSError):  # the socket is closed
            while True:
                one, _ = listener.accept()
                with one:
                    seen.append(one.recv(4096).decode())
                    if answer is None:
                        one.recv(1)  # until the other side gives up
                    else:
                        one.sendall(b"HTTP/1.1 " + answer)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        in_thread(serve)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", seen
        listener.shutdown(socket.SHUT_RDWR)


def test_health_is_shown_and_the_token_goes_to_the_address_alone(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    monkeypatch.setenv("NEEDLE_KERNELS_TOKEN_FILE", str(tmp_path / "token"))
    monkeypatch.delenv("NEEDLE_KERNELS_TOKEN", raising=False)
    (tmp_path / "token").write_text("kept\n")
    with service(b'200 -\r\n\r\n{"status": "ok"}') as (url, seen):
        server.examine(url)
        monkeypatch.setenv("NEEDLE_KERNELS_TOKEN", "secret")
        server.examine(url + "/")
        line = f'server         ok: {url}/health answers HTTP 200: {{"status": "ok"}}\n'
        assert capsys.readouterr().out.count(line) == 2
        assert all(text.startswith("GET /health HTTP/1.1") for text in seen)
        server.examine(url + "/kernels")  # behind a proxy
        assert seen.pop().startswith("GET /kernels/health HTTP/1.1")
        found = [re.findall("Authorization: (.*)\r", text) for text in seen]
        assert found == [["Bearer kept"], ["Bearer secret"]]


def test_any_other_answer_is_a_failure(monkeypatch, capsys):
    monkeypatch.setattr(server, "SECONDS", 0.3)
    for answer in (
        b"401 -\r\n\r\n",
        b'503 -\r\n\r\n{"status":\n"device_lost"}',  # which is shown in a line
        b'200 -\r\n\r\n{"status": "ending"}',
        b'302 -\r\nLocation: http://127.0.0.1:1/\r\n\r\n{"status": "ok"}',
    ):
        with naming(answer), service(answer) as (url, seen):
            server.examine(url)
            said = f"FAILED: {url}/health answers HTTP {answer[:3].decode()}: "
            out = capsys.readouterr().out
            assert said in out and "NEEDLE_KERNELS_TOKEN_FILE here to its --token-file" in out
            assert len(seen) == 1 and out.count("\n") == 2
    for answer in b"smtp", b"200 -\r\n\r\n<html>", None:
        with naming(answer), service(answer) as (url, _), pytest.raises(ENDED):
            server.examine(url)
    with pytest.raises(ValueError, match="must begin with http:// or https:// and a host"):
        server.examine("")
