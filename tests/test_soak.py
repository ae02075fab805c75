"""A short form of the soak test (tests/soak.py), in a process of its own: it forks."""

import sys

import pytest
from harness import ROOT, run

pytestmark = pytest.mark.slow

# part -> how many of its tries
SHORT = {"kills": 6, "full_disks": 4}


@pytest.mark.parametrize("part", SHORT)
def test_each_part_has_no_failure(part):
    done = run(sys.executable, ROOT / "tests" / "soak.py", part, "--count", SHORT[part])
    assert done.returncode == 0 and "failures: 0" in done.stdout, done.stdout + done.stderr
