"""tests/lost_device.py: which tests a fatal fault fails, in one process and under pytest-xdist."""

import importlib.util
import os
import re
import sys

import pytest
from harness import ROOT, run

# As in a process that is lost, all later calls fail with the same fault.
TESTS = """
import os, signal
import pytest
import needle as ndl

lost = False

def use():
    if lost:
        raise ndl.CudaFatalError("exp: injected")

def fault():
    global lost
    lost = True
    use()

@pytest.fixture
def dying():
    yield
    fault()

@pytest.mark.parametrize("number", range(4))
def test_before(number):
    use()

def test_faulty():
    fault()

def test_in_its_wake():
    try:
        fault()
    finally:
        raise ValueError("another")

def test_teardown(dying):
    pass

def test_that_fails():
    assert not "this way"

def test_that_is_skipped():
    pytest.skip("no reason")

@pytest.mark.parametrize("number", range(4))
def test_after(number):
    use()
"""
WORKERS = "-p", "xdist", "-n"
CRASH = "\ndef test_crash():\n    os.kill(os.getpid(), signal.SIGKILL)\n"


def python_m_pytest(folder, *words, code=TESTS, **environment):
    """The tests of `code`, with the whole conftest.py of these tests, and no plugin beside it that
    `words` do not name: each worker would import them."""
    (folder / "test_it.py").write_text(code)
    (folder / "pytest.ini").write_text(
        "[pytest]\naddopts = -rfE\nmarkers =\n    cuda\n    parity\n"
    )
    paths = [str(ROOT), str(ROOT / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])]
    command = sys.executable, "-m", "pytest", "-p", "conftest", "-p", "no:cacheprovider", *words
    environment |= {"PYTHONPATH": os.pathsep.join(paths), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = run(*command, cwd=folder, **environment)
    return done.returncode, done.stdout + done.stderr


def counts(out):
    """{"failed": 2, ...} of pytest's closing line."""
    closing = re.findall(r"^=+ (.*) in [\d.:s() ]+=+$", out, re.MULTILINE)
    assert closing, out
    return {word: int(number) for number, word in re.findall(r"(\d+) (\w+)", closing[-1])}


needs_xdist = pytest.mark.skipif(
    importlib.util.find_spec("xdist") is None, reason="pytest-xdist not installed"
)


@needs_xdist
def test_a_fault_fails_its_test_alone(tmp_path):
    """Runs on two workers, which must take the same order; a crash is reported as one."""
    code, out = python_m_pytest(
        tmp_path, *WORKERS, "2", "--max-worker-restart=9", code=TESTS + CRASH
    )
    assert code == 1
    assert counts(out) == {"failed": 4, "passed": 9, "skipped": 1, "error": 1}, out
    assert out.count("replacing crashed worker") == 4 and "CudaFatalError: exp: injected" in out
    summary = sorted(line for line in out.splitlines() if line.startswith(("FAILED", "ERROR ")))
    assert [line.split(" - ")[0] for line in summary] == [
        "ERROR test_it.py::test_teardown",
        "FAILED test_it.py::test_crash",
        "FAILED test_it.py::test_faulty",
        "FAILED test_it.py::test_in_its_wake",
        "FAILED test_it.py::test_that_fails",
    ]
    crashes = re.findall(r"worker 'gw\d+' crashed while running '(.*)'", out)
    assert set(crashes) == {"test_it.py::test_crash"}
    assert "1 skipped: no reason" in out


def test_in_one_process_all_after_it_fail(tmp_path):
    code, out = python_m_pytest(tmp_path, NEEDLE_TEST_SEED="off")
    assert code == 1
    assert counts(out) == {"failed": 7, "passed": 5, "skipped": 1, "error": 1}, out


@needs_xdist
def test_a_missing_gpu_is_said_under_xdist_too(tmp_path):
    hidden = {"CUDA_VISIBLE_DEVICES": "", "NEEDLE_REQUIRE_CUDA": "1"}
    code, out = python_m_pytest(tmp_path, *WORKERS, "1", **hidden)
    assert code != 0 and "NEEDLE_REQUIRE_CUDA=1, but " in out


FAULTS = """
import pytest
import needle as ndl
from harness import Foreign

pytestmark = pytest.mark.cuda

def fault():
    ndl._C.from_dlpack(Foreign(ndl.NDArray([1.0, 2.0], device=ndl.cuda()))).exp()

@pytest.mark.parametrize("number", range(3))
def test_good(number):
    assert ndl.NDArray([1.0, 2.0], device=ndl.cuda()).sum().numpy() == 3

def test_that_meets_it():
    fault()
    ndl.cuda().synchronize()

def test_that_meets_nothing():
    fault()
"""


@needs_xdist
@pytest.mark.cuda
def test_a_real_fault_fails_its_test_alone(tmp_path):
    """Includes a test that ended before its kernel did."""
    code, out = python_m_pytest(tmp_path, *WORKERS, "1", "--max-worker-restart=9", code=FAULTS)
    assert code == 1
    assert counts(out) == {"failed": 1, "passed": 4, "error": 1}, out
    assert "ERROR test_it.py::test_that_meets_nothing" in out


@pytest.mark.cuda
def test_a_real_fault_in_one_process(tmp_path):
    code, out = python_m_pytest(tmp_path, code=FAULTS, NEEDLE_TEST_SEED="off")
    assert code == 75 and "CudaFatalError" in out
