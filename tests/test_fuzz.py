"""A short form of the fuzz (tests/fuzz.py), in processes of its own, over the core as it is."""

import os
import subprocess
import sys

from harness import ROOT


def fuzz(*more: str, **environment: str) -> subprocess.CompletedProcess:
    command = [sys.executable, str(ROOT / "tests" / "fuzz.py"), "--jobs", "1", *more]
    environment = os.environ | environment
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)


def test_nothing_is_found():
    done = fuzz("--count", "150", "--seed", "0")
    assert done.returncode == 0 and "findings: 0" in done.stdout, done.stdout + done.stderr
