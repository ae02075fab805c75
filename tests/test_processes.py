"""needle/processes.py: children of a session of their own, and how a command is spelt. (Signals,
and the ends of children: training/test_supervise.py and distributed/test_spawn.py.)"""

import os
import signal
import subprocess
import sys

import pytest
from harness import naming, wait_until_gone

from needle.processes import (
    command_line,
    ends_within,
    kill,
    signal_name,
    start,
    terminal_bar,
    unwound_by_sigterm,
)

pytestmark = pytest.mark.slow


def test_child_has_its_own_session_no_input_and_its_environment():
    code = "import os, sys; print(os.getsid(0) == os.getpid(), sys.stdin.read(), os.environ['A'])"
    with open(__file__) as given:
        before = os.dup(0)
        os.dup2(given.fileno(), 0)  # what a child would read
        with start([sys.executable, "-c", code], env={"A": "7"}, stdout=subprocess.PIPE) as child:
            assert child.stdout.read() == b"True  7\n" and ends_within(child, 30)
        os.dup2(before, 0)
        os.close(before)
    with pytest.raises(FileNotFoundError):
        start(["/no/such/program"])


def test_kill_reaches_what_the_child_started():
    code = "import subprocess, time; print(subprocess.Popen(['sleep', '600']).pid, flush=True); "
    with start([sys.executable, "-c", code + "time.sleep(600)"], stdout=subprocess.PIPE) as child:
        grandchild = int(child.stdout.readline())
        assert not ends_within(child, 0.1)
        kill(child, 30)
        assert child.returncode == -signal.SIGKILL
        wait_until_gone(grandchild)
        kill(child)  # there is none left


def test_signals_between_the_real_time_ones_are_named_by_their_number():
    named = signal.SIGKILL, signal.SIGRTMIN, signal.SIGRTMIN + 1
    assert [*map(signal_name, named)] == ["SIGKILL", "SIGRTMIN", f"signal {signal.SIGRTMIN + 1}"]


def test_sigterm_unwinds_the_block_alone():
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit, match="143"), unwound_by_sigterm():
        signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is before


def test_output_that_is_no_terminal_and_one_without_tqdm_have_no_bar(monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: False)
    assert terminal_bar(total=3) is None
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setitem(sys.modules, "tqdm", None)
    assert terminal_bar(total=3) is None


def test_command_is_spelt_as_it_reaches_this_environment(tmp_path, monkeypatch):
    own, other = tmp_path / "own", tmp_path / "other"
    for folder in own, other:
        folder.mkdir()
        (folder / "needle").touch(0o755)
    monkeypatch.setattr(sys, "executable", str(own / "python"))
    for path, spelt in (
        (f"{own}:{other}", "needle"),
        (f"{other}:{own}", str(own / "needle")),  # where that is another environment's
        (str(tmp_path), str(own / "needle")),
    ):
        monkeypatch.setenv("PATH", path)
        with naming(path):
            assert command_line("data") == [spelt, "data"]
    (own / "needle").unlink()
    assert command_line("data") == [sys.executable, "-m", "needle", "data"]
