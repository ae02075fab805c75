"""Failing allocations, one after the other: tests/nth_allocation.py, in a process of its own.

Short operations fail at each allocation of needle's C code; long ones at every so many from one
that changes from run to run.
"""

import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
from harness import DEVICES, ROOT

from needle import _C

pytestmark = pytest.mark.slow

both = pytest.mark.parametrize("device", DEVICES)
SHORT = ["Forward", "Backward", "Step", "StepOfAList", "Save", "Load", "Calls"]
LONG = ["StepOfAdam", "Fit", "LoadAnew", "Generate", "FromNothing"]


def sweep(device: str, names: list[str], every: int = 1) -> dict[str, int]:
    """operation -> how many of its allocations failed."""
    package = Path(_C.__file__).parent.parent  # under the sanitizers a build of its own
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(package)}
    command = [sys.executable, str(ROOT / "tests" / "nth_allocation.py"), device, *names]
    command += ["--every", str(every), "--first", str(random.randint(1, every))]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=900)
    assert done.returncode == 0, (command, done.stdout, done.stderr[-4000:])
    found = re.findall(r"(\w+) +(\w+): \d+ calls, (\d+) failures", done.stdout)
    assert [(name, d) for name, d, _ in found] == [(name, device) for name in names]
    return {name: int(failures) for name, _, failures in found}


@both
def test_each_allocation_of_needle(device):
    """The program compares with the number of allocations that the operation makes there."""
    failures = sweep(device, SHORT)
    # To be saved contiguous arrays are copied by NumPy's memory alone.
    assert all(failures[name] > 0 for name in SHORT if name != "Save")


@both
def test_some_allocations_of_needle(device):
    failures = sweep(device, LONG, every=97)
    assert failures["Fit"] >= 4 and failures["Generate"] >= 4
