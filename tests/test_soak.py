"""A short form of the soak test (tests/soak.py), in a process of its own: it forks."""

import sys

import pytest
from harness import ROOT, run

pytestmark = pytest.mark.slow


def test_killed_runs_lose_nothing():
    done = run(sys.executable, ROOT / "tests" / "soak.py", "--count", 6)
    assert done.returncode == 0 and "failures: 0" in done.stdout, done.stdout + done.stderr
