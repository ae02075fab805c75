"""needle serve: its start, its flags, and its end."""

import json
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
from fake_pool import SOURCE
from harness import ROOT, naming
from serving import SIMPLE, Client, MadeUpPool, running

from needle.kernels import __main__ as program
from needle.kernels.access import LOOPBACK_NAMES
from needle.kernels.job import RequestLimits
from needle.kernels.pool import Result
from needle.kernels.serve import log

pytestmark = pytest.mark.slow

pytest.importorskip("aiohttp", reason="no aiohttp (pip install aiohttp): no service")


def test_the_end_refuses_waiting_jobs_and_ends_running_ones(made_up):
    answers = []
    with running(made_up) as client:
        threads = [
            threading.Thread(
                target=lambda: answers.append(client.evaluate(SIMPLE | {"source": "wait"}))
            )
            for _ in range(3)
        ]
        for thread in threads:
            thread.start()
        assert made_up.begun.acquire(timeout=60)
        deadline = time.monotonic() + 60
        while client.service.waiting < 2 and time.monotonic() < deadline:
            time.sleep(0.005)
    for thread in threads:
        thread.join(60)
    assert made_up.closed and made_up.calls == ["k"]
    assert [status for status, _ in answers] == [503] * 3
    with pytest.raises(OSError):
        client.connect().request("GET", "/health")


STARTED = """
import sys
sys.path[:0] = [sys.argv[1] + "/tests/kernels", sys.argv[1] + "/tests"]
from fake_pool import FakePool
from needle.kernels import __main__ as program

class Pool(FakePool):
    def __init__(self, *args, confined, **more):
        assert confined
        super().__init__(*args, **more)

program.Pool = Pool
program.FIRST_KERNEL = 'def one(grid, block, x: "float*"): x[0] = 1'
if "--no-landlock" in sys.argv:
    sys.argv.remove("--no-landlock")
    program.landlock.CREATE_RULESET = 9999  # no system call
else:
    program.landlock.version = lambda: 7
sys.exit(program.main(sys.argv[2:]))
"""


def start(tmp_path, *flags) -> subprocess.Popen:
    return subprocess.Popen(
        [
            sys.executable,
            "-W",
            "error",
            "-c",
            STARTED,
            str(ROOT),
            "serve",
            "--port",
            "0",
            "--token-file",
            str(tmp_path / "token"),
            "--timeout",
            "60",
            *flags,
        ],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def descendants(pid: int) -> set[int]:
    found, new = set(), {pid}
    while new:
        found |= new
        new = set()
        for one in [int(name) for name in os.listdir("/proc") if name.isdigit()]:
            try:
                with open(f"/proc/{one}/stat") as file:
                    parent = int(file.read().rpartition(")")[2].split()[1])
            except OSError:
                continue
            if parent in found and one not in found:
                new.add(one)
    return found - {pid}


def test_sigterm_ends_everything(tmp_path):
    """The whole program: its messages, its token, a running job, and no process or file is left."""
    log_file = tmp_path / "log"
    flags = ["--devices", "0", "--drain-seconds", "0.2", "--log", str(log_file)]
    started = start(tmp_path, *flags)
    try:
        first, second = started.stdout.readline(), started.stdout.readline()
        assert "arbitrary code" in first
        assert second.startswith("listening on http://127.0.0.1:") and str(tmp_path) in second
        token = (tmp_path / "token").read_text().strip()
        assert token not in first + second
        client = Client(None, None, int(second.split(",")[0].rpartition(":")[2]))
        ask = lambda: client.ask(
            "POST",
            "/evaluate",
            json.dumps(SIMPLE | {"source": SOURCE, "entry": "hangs"}),
            Authorization=f"Bearer {token}",
            Content_Type="application/json",
        )
        answers = []
        thread = threading.Thread(target=lambda: answers.append(ask()))
        thread.start()
        deadline, running = time.monotonic() + 60, 0
        while not running and time.monotonic() < deadline:
            _, health, _ = client.ask("GET", "/health", Authorization=f"Bearer {token}")
            running = health["running"]
        assert running == 1
        left = descendants(started.pid)
        assert left
        started.send_signal(signal.SIGTERM)
        out, error = started.communicate(timeout=60)
        thread.join(60)
        assert (started.returncode, out) == (0, ""), error
        assert answers[0][0] == 503
        assert token not in error and "'/evaluate' 503" in error
        assert log_file.read_text() == error
        deadline = time.monotonic() + 20
        while left and time.monotonic() < deadline:
            left = {pid for pid in left if os.path.exists(f"/proc/{pid}")}
        assert not left
    finally:
        started.kill()
        started.communicate()


def test_it_does_not_start_without_landlock_or_unsafely(tmp_path):
    (tmp_path / "open").write_text("o" * 40)
    (tmp_path / "open").chmod(0o644)
    for flags, said in (
        (["--no-landlock"], "has no Landlock (Function not implemented)"),
        (["--host", "0.0.0.0"], "lets in other machines"),
        (["--token-file", str(tmp_path / "open")], "chmod 600"),
        (["--log", "/nowhere/log"], "--log /nowhere/log: No such file"),
    ):
        with naming(*flags):
            started = start(tmp_path, *flags)
            out, error = started.communicate(timeout=120)
            assert (started.returncode, out) == (1, ""), error
            assert error.startswith("needle: error: ") and said in error
            assert error.count("\n") == 1 and not (tmp_path / "token").exists()


def test_wrong_flags_are_named(capsys, monkeypatch):
    for flags in (
        "--port 65536",
        "--port x",
        "--timeout 0",
        "--timeout nan",
        "--queue -1",
        "--max-body-bytes 0",
        "--max-array-bytes 1.5",
        "--devices 0,x",
        "--fresh never",
        "--log=",
        "--token-file=",
        "--nonsense",
    ):
        with naming(flags):
            with pytest.raises(SystemExit) as caught:
                program.main(["serve", *flags.split()])
            flag = flags.split()[0].rstrip("=")
            assert caught.value.code == 2 and flag in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "aiohttp", None)
    monkeypatch.delitem(sys.modules, "needle.kernels.serve")
    assert program.main(["serve"]) == 1
    assert "needs aiohttp and msgspec" in capsys.readouterr().err


def test_flags_reach_the_pool_and_the_service(tmp_path, monkeypatch):
    made = {}

    class NoPool(MadeUpPool):
        def __init__(self, devices, timeout, memory, fresh, confined):
            super().__init__()
            made["pool"] = (devices, timeout, memory, fresh, confined)

        def __enter__(self):
            return self

        def __exit__(self, *exception):
            self.close()

        def run(self, source, entry, grid, block, args):
            made["first"] = source
            return Result("ok", outputs=(np.float32([1]),))

    async def serve(service, sock, drain_seconds, ready):
        made["service"] = (service.limits, service.queue, service.names, service.parallel)
        made["drain"] = drain_seconds
        ready()

    monkeypatch.setattr(program, "Pool", NoPool)
    monkeypatch.setattr("needle.kernels.serve.serve", serve)
    monkeypatch.setattr(program.landlock, "version", lambda: 1)
    flags = "--port 0 --devices 2,0 --timeout 3 --memory 4096 --fresh job --queue 5 --job-seconds 6"
    flags += " --max-body-bytes 7 --max-source-bytes 8 --max-array-bytes 9 --drain-seconds 1.5"
    flags += f" --allow-host GPU.lab --allow-host b --token-file {tmp_path}/token"
    names, level = [logging.getLogger(n) for n in ("needle.kernels", "asyncio")], log.level
    before = [(logger, logger.handlers[:]) for logger in names]
    try:
        assert program.main(["serve", *flags.split()]) == 0
    finally:
        log.setLevel(level)
        for logger, handlers in before:
            logger.handlers[:] = handlers
    assert made["pool"] == ([2, 0], 3.0, 4096, "job", True)
    assert made["service"] == (RequestLimits(7, 8, 9, 6.0), 5, LOOPBACK_NAMES | {"gpu.lab", "b"}, 2)
    assert (made["drain"], made["first"]) == (1.5, program.FIRST_KERNEL)


def test_the_unit_of_the_docs(tmp_path):
    """Its flags exist, and systemd accepts it."""
    text = re.search(r"```ini\n(.*?)```", (ROOT / "docs/kernels.md").read_text(), re.DOTALL)[1]
    command = re.search(r"^ExecStart=(.*)$", text.replace("\\\n", ""), re.MULTILINE)[1].split()
    assert command[1] == "serve"
    args = program.parser().parse_args(command[1:])
    assert args.token_file.name == "token" and args.log.name == "kernels.log"
    unit = tmp_path / "needle-kernels.service"
    unit.write_text(text.replace(command[0], sys.executable))
    if shutil.which("systemd-analyze") is None:
        pytest.skip("no systemd-analyze here")
    done = subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True)
    said = [line for line in done.stderr.splitlines() if unit.name in line]
    assert (done.returncode, said) == (0, []), done.stderr


def test_it_does_not_start_if_a_first_kernel_fails():
    for result in (Result("crashed", "no Landlock"), Result("ok", outputs=([2.0],))):
        pool = SimpleNamespace(run=lambda *args, result=result: result)
        with pytest.raises(RuntimeError, match="a first kernel does not run"):
            program.check(pool)
