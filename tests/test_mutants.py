"""tests/mutants.py: mutants that change a program, and which test caught each."""

import random
import sys
from pathlib import Path

import mutants
import pytest

SOURCE = "def double(x: int) -> int:\n    return 2 * x if x > 0 else 0\n"
TESTS = "from double import double\n\n\ndef test_double():\n    assert double(3) == 6\n"


@pytest.fixture
def small(tmp_path, monkeypatch):
    """A checkout of one function with a test of positive numbers alone."""
    (tmp_path / "double.py").write_text(SOURCE)
    (tmp_path / "test_double.py").write_text(TESTS)
    monkeypatch.setattr(mutants, "ROOT", tmp_path)
    return tmp_path


def test_caught_by_names_the_test_and_none_for_a_survivor(small):
    file = small / "double.py"
    assert mutants.caught_by(small, "test_double.py") is None
    file.write_text(SOURCE.replace("else 0", "else 1"))
    assert mutants.caught_by(small, "test_double.py") is None
    file.write_text(SOURCE.replace("2 * x", "3 * x"))
    assert mutants.caught_by(small, "test_double.py") == "test_double.py::test_double"
    with pytest.raises(SystemExit, match="selects no test"):
        mutants.caught_by(small, "test_double.py -k nothing")


def test_test_mutant_runs_wider_tests_and_leaves_the_checkout_alone(small):
    (small / "test_nothing.py").write_text("def test_nothing():\n    pass\n")
    (small / "tests").mkdir()
    (small / "test_double.py").rename(small / "tests" / "test_double.py")
    for into, caught in (("x * 2", None), ("3 * x", "tests/test_double.py::test_double")):
        mutant = SOURCE.replace("2 * x", into)
        assert mutants.test_mutant("double.py", mutant, "test_nothing.py") == caught
    assert (small / "double.py").read_text() == SOURCE


def test_meaning_ignores_annotations_docstrings_and_comments():
    same = SOURCE.replace("x: int", "x").replace("    return", '    "Twice."\n    return')
    assert mutants.meaning("a.py", same).replace("Pass(), ", "") == mutants.meaning("a.py", SOURCE)
    assert mutants.meaning("a.py", SOURCE.replace("2", "3")) != mutants.meaning("a.py", SOURCE)
    assert mutants.meaning("a.py", "return (") is None
    assert mutants.meaning("a.c", "a = 1; // one") == mutants.meaning("a.c", "a  = 1;")


def test_mutants_of_are_drawn_by_the_seed(small):
    pytest.importorskip("universalmutator")
    first, again = (list(mutants.mutants_of("double.py", random.Random(1))) for _ in range(2))
    assert first == again and len(set(first)) > 3 and SOURCE not in first


def test_run_ends_a_test_that_hangs(small):
    (small / "test_double.py").write_text("import time\ntime.sleep(100)\n")
    assert mutants.caught_by(small, "test_double.py", seconds=1) == "no end after 1 s"
    assert mutants.run([sys.executable, "-c", "print(5)"], small, False, 60) == (0, "5\n")
    assert Path(mutants.ROOT) == small
