"""tests/conftest.py: a fatal CUDA fault ends the run, and a GPU that must be there is asked for."""

import os
import sys

import pytest
from harness import ROOT, run

INJECTED = """
import needle as ndl

def test_before():
    pass

def test_faulty():
    raise ndl.CudaFatalError("exp: injected")

def test_after():
    pass
"""
REAL = """
import pytest
import needle as ndl
from harness import Foreign

pytestmark = pytest.mark.cuda

def test_before():
    assert ndl.NDArray([1.0, 2.0], device=ndl.cuda()).sum().numpy() == 3

def test_faulty():  # and ends before its kernel does
    ndl._C.from_dlpack(Foreign(ndl.NDArray([1.0, 2.0], device=ndl.cuda()))).exp()

def test_after():
    pass
"""


def pytest_of(folder, code: str, *words: str, **environment) -> tuple[int, str]:
    """(exit code, output) of these tests with the conftest.py of tests/, in the written order."""
    (folder / "test_it.py").write_text(code)
    (folder / "pytest.ini").write_text("[pytest]\nmarkers =\n    cuda\n    parity\n")
    paths = [str(ROOT), str(ROOT / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment |= {"PYTHONPATH": os.pathsep.join(paths), "NEEDLE_TEST_SEED": "off"}
    command = "-m", "pytest", "-p", "conftest", "-p", "no:cacheprovider", *words
    done = run(sys.executable, *command, cwd=folder, **environment)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize(
    "code, outcome",
    [
        (INJECTED, "1 failed, 1 passed"),
        pytest.param(REAL, "2 passed, 1 error", marks=pytest.mark.cuda),
    ],
    ids=["injected", "real"],
)
def test_fatal_fault_ends_the_run(code, outcome, tmp_path):
    returned, out = pytest_of(tmp_path, code)
    assert returned != 0 and outcome in out, out
    assert "test_it.py::test_faulty met a fatal CUDA fault" in out and "CudaFatalError" in out


@pytest.mark.parametrize("words", [(), ("-n", "1")], ids=["one process", "workers"])
def test_missing_gpu_that_is_required_is_named(words, tmp_path):
    if words:
        pytest.importorskip("xdist")
    hidden = {"CUDA_VISIBLE_DEVICES": "", "NEEDLE_REQUIRE_CUDA": "1"}
    code, out = pytest_of(tmp_path, INJECTED, *words, **hidden)
    assert code != 0 and "NEEDLE_REQUIRE_CUDA=1, but " in out
