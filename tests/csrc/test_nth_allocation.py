"""Failing allocations, one after the other: tests/nth_allocation.py, in a process of its own.

Short operations fail at each allocation of needle's C code and of the CUDA driver; long ones, and
Python's objects, at every so many from one that changes from run to run: the soak test takes each
(tests/soak.py, every_allocation).
"""

import os
import random
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from harness import DEVICES, ROOT
from nth_allocation import Injector

from needle import _C

pytestmark = pytest.mark.slow

both = pytest.mark.parametrize("device", DEVICES)
SHORT = ["Forward", "Backward", "Step", "StepOfAList", "Save", "Load", "Calls"]
LONG = ["StepOfAdam", "Fit", "LoadAnew", "Generate", "FromNothing"]


def sweep(device: str, kind: str, names: list[str], every: int = 1) -> dict[str, int]:
    """operation -> how many of its allocations failed."""
    package = Path(_C.__file__).parent.parent  # under the sanitizers a build of its own
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(package)}
    command = [sys.executable, str(ROOT / "tests" / "nth_allocation.py"), device, kind, *names]
    command += ["--every", str(every), "--first", str(random.randint(1, every))]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=900)
    assert done.returncode == 0, (command, done.stdout, done.stderr[-4000:])
    found = re.findall(r"(\w+) +(\w+) (\w+): \d+ calls, (\d+) failures", done.stdout)
    assert [(name, d, k) for name, d, k, _ in found] == [(name, device, kind) for name in names]
    return {name: int(failures) for name, _, _, failures in found}


@both
def test_each_allocation_of_needle(device):
    """The program compares with the number of allocations that the operation makes there."""
    failures = sweep(device, "needle", SHORT)
    # To be saved contiguous arrays are copied by NumPy's memory alone.
    assert all(failures[name] > 0 for name in SHORT if name != "Save")


@both
def test_some_allocations_of_needle(device):
    failures = sweep(device, "needle", LONG, every=97)
    assert failures["Fit"] >= 4 and failures["Generate"] >= 4


@pytest.mark.cuda
def test_each_allocation_of_the_driver():
    failures = sweep("cuda", "driver", [*SHORT, "Generate"])
    assert all(failures[name] > 0 for name in ("Forward", "Generate", "Calls"))


@both
def test_some_objects_of_python(device):
    failures = sweep(device, "python", [*SHORT, *LONG], every=97)
    assert failures["Fit"] >= 2 and failures["Generate"] >= 2


def test_async_copy_can_be_waited_for_again_after_a_failed_wait():
    injector = Injector()
    later = _C.AsyncCopy(_C.array([1.0, 2.0]))
    failed, error = injector.attempt(later.wait, "python", 1, 1)
    assert failed == 1 and error[0] is MemoryError
    assert later.wait().tolist() == [1, 2]


@pytest.mark.parametrize(
    "call",
    [
        lambda: _C.array(1.0, np.float32),
        lambda: _C.empty(range(2, 4)),
        lambda: _C.from_dlpack(np.ones(2, np.float32)),
        lambda: _C.sum(_C.array([1.0, 2.0]), np.int64(1)),
    ],
)
def test_no_memory_for_an_argument_is_no_wrong_argument(call):
    injector, number, failed = Injector(), 0, 1
    while failed:
        number += 1
        failed, error = injector.attempt(call, "python", number, 1)
        assert error is None or (failed and error[0] is MemoryError), error
    assert number > 1
