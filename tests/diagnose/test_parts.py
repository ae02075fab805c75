"""Which parts a rank runs; one that hangs is killed, and named by what it tried. (One that dies:
test_machine.py.) A kernel service is asked for its health with its token, and not for long."""

import contextlib
import http.client
import os
import re
import socket
import time

import pytest
from harness import in_thread, naming, wait_until_gone

from needle.diagnose import __main__ as program
from needle.diagnose import facts, parts, server
from needle.distributed.environment import Place

pytestmark = pytest.mark.slow
PROGRAM = r"""
import os, signal
print("... gelu float32")
os.fork()
os.write(1, b"pid %d\n" % os.getpid())
signal.pause()
"""


def test_hang_is_killed_at_its_deadline_with_what_it_started(monkeypatch):
    monkeypatch.setattr(parts, "CODE", PROGRAM)
    start, lines = time.monotonic(), []
    failures, told = parts.run("cuda()", "device", seconds=2, say=lines.append)
    assert 2 <= time.monotonic() - start < 20 and (failures, told) == (1, None)
    assert "FAILED: gelu float32 hangs: killed after 2 s" in lines[-1]
    assert "nvidia-smi --gpu-reset" in lines[-1] and len(lines) == 3
    for line in lines[:2]:
        wait_until_gone(int(line.split()[1]))


def test_part_that_ends_with_an_error_is_a_failure(monkeypatch):
    code = "import os; print('... gelu float32'); os.write(1, b'\\xff\\n\\n'); "
    code += "print('half a line', end=''); raise SystemExit(3)"
    monkeypatch.setattr(parts, "CODE", code)
    lines: list[str] = []
    assert parts.run("cuda()", "device", seconds=60, say=lines.append) == (1, None)
    assert lines[:-1] == ["\ufffd", "half a line"]
    assert "FAILED: its process ended with 3 at gelu float32" in lines[-1]


def test_error_of_a_part_is_a_line_and_a_traceback_where_nobody_expects_it():
    for words, said, is_expected in (
        (["server", "ftp://a"], "GET ftp://a/health: ValueError: it must begin", True),
        (["server", "http://127.0.0.1:1"], ":1/health: ConnectionRefusedError: ", True),
        (["folder"], "its start: TypeError: examine() missing", False),
    ):
        with naming(said):
            lines: list[str] = []
            assert parts.run("part", *words, seconds=60, say=lines.append) == (1, None)
            assert said in lines[-1] and (len(lines) == 1) == is_expected
            assert is_expected or lines[0].startswith("Traceback")


def test_parts_follow_the_place_of_a_rank_and_the_flags(monkeypatch):
    """Each rank examines its device, the first of a machine its GPUs, rank 0 a run and a service.
    Facts that fail end nothing and are heard of each rank: nvidia-smi may show GPUs that CUDA does
    not count. Ops are compared as they compute by default, with --full for longer."""
    begun, said = {}, []

    def run(label, part, *words, say, **more):
        begun[part] = label, words[-1:], more
        for line in ("cuda() fine", "cuda() FAILED: lost") if part == "facts" else ():
            say(line)
        return part == "facts", told

    monkeypatch.setattr(program, "run", run)
    monkeypatch.setattr(program.shutil, "which", lambda name: "/bin/nvidia-smi")
    for full, rank, local, told, wanted in (
        ([], 0, 0, {"count": 2, "chosen": ["cuda()"]}, "facts device gpus ranks folder server"),
        (["--full"], 1, 1, {"count": 2, "chosen": ["cuda(1)"]}, "facts device ranks"),
        ([], 2, 0, None, "facts device gpus ranks"),
    ):
        begun.clear(), said.clear()
        words = [*full, "--run", "runs/a", "--server", "http://a"]
        place = Place(rank, 4, local, 2, "torchrun")
        with naming(rank):
            assert program.examine(program.parser().parse_args(words), place, said.append) == 1
            assert [*begun] == wanted.split()
            assert said == ["cuda() fine"] * (rank == 0) + ["cuda() FAILED: lost"]
            deadlines = {label: more["seconds"] for label, _, more in begun.values()}
            assert rank or (deadlines["GPUs"], deadlines["run"]) == (60.0, 600.0)
            label, is_full, more = begun["device"]
            assert (label, is_full[0]) == (told["chosen"][0] if told else "cpu()", str(len(full)))
            seconds = 600.0 if full else 60.0
            assert more == {"NEEDLE_TF32": "0", "NEEDLE_TRACE": "0", "seconds": seconds}


def test_gpu_fails_that_is_wanted_and_missing_or_there_and_unusable(monkeypatch, capsys):
    """A rank whose launcher shows it one GPU takes that; with --device 1 it is a failure, since
    CUDA numbers that GPU 0."""
    missing, lost = "there is no cuda(1): CUDA shows cuda()", "cuda()         FAILED: it is lost"
    for names, built, driver, is_asked, is_required, failed, chosen in (
        (["cuda()"], False, None, "0", "0", None, '["cuda()"]'),
        (["cuda()"], False, None, "1", "0", missing, "[]"),
        ([], True, "13.0", "0", "0", lost, "[]"),
        ([], True, None, "0", "0", None, "[]"),
        ([], False, "13.0", "0", "0", None, "[]"),
        ([], False, None, "1", "0", lost, "[]"),
        ([], False, None, "0", "1", lost, "[]"),
    ):
        monkeypatch.setenv("NEEDLE_REQUIRE_CUDA", is_required)
        found = {"built": built, "driver": driver, "usable": bool(names), "problem": "it is lost"}
        monkeypatch.setattr(facts, "gpus", lambda names=names: names)
        monkeypatch.setattr(facts, "cuda", lambda found=found: found)
        facts.examine("1" if names else "", is_asked)
        told = capsys.readouterr().out
        with naming(names, found):
            assert told.endswith(f'=== {{"count": {len(names)}, "chosen": {chosen}}}\n')
            assert "FAILED" not in told if failed is None else failed in told


def test_settings_and_threads_are_those_of_this_process(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 2, 5})
    for value, told in ("", "3"), ("7", "7 (OMP_NUM_THREADS)"):
        monkeypatch.setenv("OMP_NUM_THREADS", value)
        assert facts.collect()["threads"] == told
    libraries = "NEEDLE", "OPENBLAS", "OMP", "CUDA", "CUBLAS", "CUBLASLT"
    names = [f"{library}_A" for library in libraries]
    for name in *names, "MY_CUDA_A":
        monkeypatch.setenv(name, "1")
    found = facts.collect()
    assert {name for name in found["settings"] if name.endswith("_A")} == {*names}
    for debug in False, True:
        found["build"]["debug"] = debug
        built = dict(facts.rows(found))["built with"]
        assert built.endswith(", a debug build: indices are checked") == debug


def test_launcher_that_contradicts_itself_is_a_bad_call(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(SystemExit, match="2"):
        program.main([])
    assert "RANK=1, but WORLD_SIZE is not set" in capsys.readouterr().err


# ---- a kernel service ----------------------------------------------------------------------------


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
