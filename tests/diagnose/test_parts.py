"""A part that dies, hangs or fails is a line that names what it tried."""

import time

import pytest
from harness import naming, wait_until_gone

from needle.diagnose import parts

pytestmark = pytest.mark.slow
BEGIN = "import json, os, signal, time\nprint('... gelu float32')\n"


@pytest.fixture
def run(tmp_path, monkeypatch):
    """run(program) -> (failures, what it told, lines)."""
    monkeypatch.setattr(parts, "CHILD", tmp_path / "child.py")

    def run(program: str, seconds: float = 30, **env: str):
        lines: list[str] = []
        parts.CHILD.write_text(BEGIN + program)
        found = parts.run("cuda()", "device", seconds=seconds, say=lines.append, **env)
        return (*found, lines)

    return run


def test_lines_are_passed_on_and_failures_counted(run):
    """Those of libraries too; a result comes from the part alone."""
    program = "print('GPU 0          FAILED: bad')\nos.write(2, b'a warning\\n')\n"
    program += "print('=== ' + json.dumps([os.environ['ONE']]))\nprint('GPU 1          ok: good')"
    failures, told, lines = run(program, ONE="two")
    assert (failures, told) == (1, ["two"])
    assert lines == ["GPU 0          FAILED: bad", "a warning", "GPU 1          ok: good"]


def test_end_is_named_with_what_was_tried(run):
    for end, said in (
        ("os.kill(os.getpid(), signal.SIGSEGV)", "was killed by SIGSEGV at gelu float32"),
        ("os._exit(7)", "ended with 7 at gelu float32"),
        ("os.write(1, b'half a line'); os._exit(1)", "ended with 1 at gelu float32"),
    ):
        with naming(end):
            failures, told, lines = run(end)
            assert (failures, told) == (1, None)
            assert lines[-1].startswith(f"cuda()         FAILED: its process {said}")
    assert lines[0] == "half a line"


def test_hang_is_killed_at_its_deadline_with_what_it_started(run):
    start = time.monotonic()
    program = "os.fork()\nos.write(1, b'pid %d\\n' % os.getpid())\nsignal.pause()"
    failures, _, lines = run(program, seconds=2)
    assert 2 <= time.monotonic() - start < 20 and failures == 1
    assert "FAILED: gelu float32 hangs: killed after 2 s" in lines[-1]
    assert "nvidia-smi --gpu-reset" in lines[-1] and len(lines) == 3
    for line in lines[:2]:
        wait_until_gone(int(line.split()[1]))
