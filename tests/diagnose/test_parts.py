"""A part that hangs is killed, and named by what it tried. (One that dies: test_machine.py.)"""

import time

import pytest
from harness import wait_until_gone

from needle.diagnose import parts

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
