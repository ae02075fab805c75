"""docs/cuda_memory.md: its examples, on a GPU that computes with the CPU's functions."""

import re
import subprocess
import sys

from harness import ROOT


def test_memory_page_examples_hold(machine, tmp_path):
    page = (ROOT / "docs" / "cuda_memory.md").read_text()
    (tmp_path / "page.txt").write_text(re.sub(r"^```.*$", "", page, flags=re.MULTILINE))
    done = subprocess.run(
        [sys.executable, "-m", "doctest", "-o", "ELLIPSIS", "page.txt"],
        cwd=tmp_path,
        env=machine.environment("fatal=gelu"),
        capture_output=True,
        text=True,
    )
    assert not done.stdout, done.stdout
    assert done.returncode == 75, done.stderr  # its last section ends the process
