"""docs/cuda_memory.md: its examples, on a GPU that computes with the CPU's functions."""

import re
import sys

from harness import ROOT, run


def test_memory_page_examples_hold(machine, tmp_path):
    page = (ROOT / "docs" / "cuda_memory.md").read_text()
    (tmp_path / "page.txt").write_text(re.sub(r"^```.*$", "", page, flags=re.MULTILINE))
    words = (sys.executable, "-m", "doctest", "-o", "ELLIPSIS", "page.txt")
    done = run(*words, cwd=tmp_path, **machine.environment(FAKE_GELU="lose"))
    assert not done.stdout, done.stdout
    assert done.returncode == 75, done.stderr  # its last section ends the process
