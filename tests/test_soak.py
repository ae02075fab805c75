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


SEEN = """
import random, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import soak
field = soak.Field(Path(sys.argv[2]), random.Random(0))

def failure(call, *arguments):
    try:
        call(*arguments)
    except soak.Failure as error:
        print(error)

paths = soak.list_checkpoints(field.folder / "runs" / "whole" / "checkpoints")
assert field.check("whole", soak.STEPS) == soak.STEPS
paths[0].write_bytes(paths[1].read_bytes())
failure(field.check_end, "whole")
paths[0].write_bytes(b"damaged")
failure(field.check, "whole", soak.STEPS)
field.numbers = field.numbers[1:]
failure(field.check_end, "whole")
"""


def test_each_failure_is_reported(tmp_path):
    done = run(sys.executable, "-c", SEEN, ROOT / "tests", tmp_path)
    assert done.stdout.splitlines() == [
        "whole: its last checkpoint differs",
        "whole: step 30 had been saved, and step 29 is the newest left",
        "whole: its numbers are not those of the run that nothing hit",
    ], done.stderr
