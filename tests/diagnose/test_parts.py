"""Which parts a rank runs; one that hangs is killed, and named by what it tried. (One that dies:
test_machine.py.)"""

import time

import pytest
from harness import wait_until_gone

from needle.diagnose import __main__ as program
from needle.diagnose import parts
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
    monkeypatch.setattr(parts, "CODE", "print('... gelu float32'); raise SystemExit(3)")
    lines: list[str] = []
    assert parts.run("cuda()", "device", seconds=60, say=lines.append) == (1, None)
    assert "FAILED: its process ended with 3 at gelu float32" in lines[0]


def test_parts_of_a_rank_follow_its_place(monkeypatch):
    """Each examines its device, the first of a machine its GPUs, rank 0 a run and a service."""
    args = program.parser().parse_args(["--run", "runs/a", "--server", "http://a"])
    begun, told = [], {"count": 2, "chosen": ["cuda()"]}
    run = lambda label, part, *words, **more: begun.append(part) or (0, told)
    monkeypatch.setattr(program, "run", run)
    for rank, local, wanted in (
        (0, 0, "facts device gpus ranks folder server"),
        (1, 1, "facts device ranks"),
        (2, 0, "facts device gpus ranks"),
    ):
        begun.clear()
        assert program.examine(args, Place(rank, 4, local, 2, "torchrun"), print) == 0
        assert begun == wanted.split()
