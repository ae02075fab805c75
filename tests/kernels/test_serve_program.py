"""needle serve: its start, its flags, and its end."""

import logging
import os
import re
import shutil
import signal
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from fake_pool import SOURCE, children
from harness import ROOT, in_thread, naming, run, wait_for
from serving import SIMPLE, MadeUpPool, running, started, waiting

from needle.kernels import __main__ as program
from needle.kernels.access import LOOPBACK_NAMES
from needle.kernels.job import RequestLimits
from needle.kernels.pool import Result
from needle.kernels.serve import log

pytestmark = pytest.mark.slow

pytest.importorskip("aiohttp", reason="no aiohttp (pip install aiohttp): no service")


def test_the_end_refuses_waiting_jobs_and_ends_running_ones(made_up):
    with running(made_up) as client, waiting(client, 3) as answers:
        client.stop()
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


def command(tmp_path, *flags) -> list[str]:
    words = ["serve", "--port", "0", "--timeout", "60", "--token-file", str(tmp_path / "token")]
    return [sys.executable, "-W", "error", "-c", STARTED, str(ROOT), *words, *flags]


def descendants(pid: int) -> set[int]:
    own = children(pid)
    return own.union(*map(descendants, own))


def test_sigterm_ends_everything(tmp_path):
    """The whole program: its messages, its token, a running job, and no process or file is left."""
    log_file, token_file = tmp_path / "log", tmp_path / "token"
    flags = ["--devices", "0", "--drain-seconds", "0.2", "--log", str(log_file)]
    with started(command(tmp_path, *flags), token_file) as (process, said, client):
        assert client.token not in said
        hangs = in_thread(client.evaluate, SIMPLE | {"source": SOURCE, "entry": "hangs"})
        wait_for(client.running)
        left = descendants(process.pid)
        assert left
        process.send_signal(signal.SIGTERM)
        out, error = process.communicate(timeout=60)
        assert (process.returncode, out) == (0, ""), error
        assert hangs.result(60)[0] == 503
        assert client.token not in error and "'/evaluate' 503" in error
        assert log_file.read_text() == error
        wait_for(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in left))


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
            done = run(*command(tmp_path, *flags))
            error = done.stderr
            assert (done.returncode, done.stdout) == (1, ""), error
            assert error.startswith("needle: error: ") and said in error
            assert error.count("\n") == 1 and not (tmp_path / "token").exists()


def test_wrong_flags_are_named(capsys, monkeypatch):
    wrong = "--port 65536|--port x|--timeout 0|--timeout nan|--queue -1|--max-body-bytes 0"
    wrong += "|--max-array-bytes 1.5|--devices 0,x|--fresh never|--log=|--token-file=|--nonsense"
    for flags in wrong.split("|"):
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
    done = run("systemd-analyze", "verify", unit)
    said = [line for line in done.stderr.splitlines() if unit.name in line]
    assert (done.returncode, said) == (0, []), done.stderr


def test_it_does_not_start_if_a_first_kernel_fails():
    for result in (Result("crashed", "no Landlock"), Result("ok", outputs=([2.0],))):
        pool = SimpleNamespace(run=lambda *args, result=result: result)
        with pytest.raises(RuntimeError, match="a first kernel does not run"):
            program.check(pool)
