"""tests/mutants.py: its faults fit the tree, and it tells who is caught from who lives."""

import glob
import shlex
import sys
from pathlib import Path

import mutants
import pytest
from harness import ROOT
from planted import c, cuda
from planted.fault import Fault, ListError


@pytest.mark.parametrize("faults, pattern", [(c.FAULTS, "csrc/**/*.c"), (cuda.FAULTS, "cuda/*.cu")])
def test_the_lists_fit_the_tree(faults, pattern, tmp_path):
    for fault in faults:
        copy = tmp_path / fault.file
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text((ROOT / fault.file).read_text())
        fault.plant(tmp_path)
        assert copy.read_text() != (ROOT / fault.file).read_text(), fault
        files = [word for word in shlex.split(fault.tests) if word.startswith("tests/")]
        assert files and all((ROOT / file).exists() for file in files), fault
    lacking = set(glob.glob(pattern, root_dir=ROOT, recursive=True)) - {f.file for f in faults}
    assert not lacking, f"no fault is planted in {lacking}"


@pytest.mark.parametrize("text", ["return b", "return a"])  # not there, and there twice
def test_a_text_that_does_not_stand_once_is_refused(text, tmp_path):
    (tmp_path / "a.py").write_text("return a\nreturn a\n")
    with pytest.raises(ListError, match="not once"):
        Fault("a.py", text, "return 1", "tests").plant(tmp_path)


@pytest.fixture
def small(tmp_path, monkeypatch):
    """A checkout with one function, whose test does not look at negative numbers."""
    (tmp_path / "double.py").write_text("def double(x):\n    return 2 * x if x > 0 else 0\n")
    (tmp_path / "test_double.py").write_text(
        "from double import double\n\n\ndef test_double():\n    assert double(3) == 6\n"
    )
    monkeypatch.setattr(mutants, "ROOT", tmp_path)
    return mutants.Kind(list, 60, builds=False)


@pytest.mark.parametrize(
    "text, into, caught",
    [("2 * x", "3 * x", "test_double.py::test_double"), ("else 0", "else 1", None)],
)
def test_a_fault_is_caught_or_lives(small, text, into, caught):
    verdict = mutants.judge(7, Fault("double.py", text, into, "test_double.py"), small, True)
    assert (verdict.caught, verdict.line) == (caught, 2)
    assert str(verdict).split()[:2] == ["7", "double.py:2"]
    assert f"{'caught by' if caught else 'LIVES'}" in str(verdict)
    assert (
        mutants.table([verdict]).splitlines()[-1].startswith(f"| all | 1 | {int(bool(caught))} |")
    )
    assert "2 * x if x > 0 else 0" in Path(mutants.ROOT, "double.py").read_text()


def test_tests_must_pass_without_a_fault(small, monkeypatch):
    Path(mutants.ROOT, "double.py").write_text("def double(x):\n    return x\n")
    with pytest.raises(ListError, match="does not pass: test_double.py::test_double"):
        mutants.passes_without("test_double.py", small)
    with pytest.raises(ListError, match="`pytest test_double.py -k nothing` selects no test"):
        mutants.passes_without("test_double.py -k nothing", small)


def test_what_does_not_end_is_ended(small):
    root = Path(mutants.ROOT)
    (root / "test_double.py").write_text("import time\ntime.sleep(100)\n")
    assert mutants.caught_by(root, small, "test_double.py", 1) == "no end after 1 s"
    code, said = mutants.run([sys.executable, "-c", "print(5)"], root, small, 60)
    assert (code, said) == (0, "5\n")
