"""Command-line programs whose output is a pipe that its reader has closed, as `| head -1` does, or
lacks a character."""

import os
import re
import subprocess
import sys

import numpy as np
import pytest
from harness import ROOT, run

from needle.processes import EXIT_CLOSED_PIPE

pytestmark = pytest.mark.slow

PROGRAMS = [*(ROOT / "needle" / "training").rglob("*.py")]
PROGRAMS += [*(ROOT / "needle").glob("*/__main__.py")]
PROGRAMS += [*(ROOT / "apps").glob("*.py"), *(ROOT / "benchmarks").glob("*.py")]
PROGRAMS += [*(ROOT / "examples").glob("*.py")]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """The current folder, which has tokens."""
    np.save(tmp_path / "t.npy", np.arange(4000, dtype=np.uint16) % 90)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NEEDLE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{os.environ.get('PYTHONPATH', '')}")
    return tmp_path


@pytest.fixture
def closed():
    """A file whose reader is gone."""
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as file:
        yield file


def test_every_program_ends_by_one_rule():
    runs = {
        path: path.read_text().partition('if __name__ == "__main__":\n')[2] for path in PROGRAMS
    }
    assert len([path for path, lines in runs.items() if lines]) >= 16
    for path, lines in runs.items():
        assert not lines or re.search(r"\b(program|bench\.run)\(.*main\)", lines), path


@pytest.mark.parametrize(
    "words",
    [
        "-m needle --help",
        "-m needle.diagnose",
        "-u -m needle.data inspect t.npy",  # each line is written at once
        f"{ROOT}/apps/train_pythia.py --data t.npy --seq-len 8 --device cpu",
        f"{ROOT}/benchmarks/kernels.py --help",
    ],
)
def test_program_whose_output_is_closed_ends_as_by_sigpipe(monkeypatch, closed, words):
    monkeypatch.setenv("PYTHONUNBUFFERED", "")  # argparse passes over what it cannot write at once
    command = [sys.executable, *words.split()]
    done = subprocess.run(command, stdout=closed, stderr=subprocess.PIPE, timeout=120)
    assert (done.returncode, done.stderr) == (EXIT_CLOSED_PIPE, b"") == (141, b"")


def test_program_whose_errors_are_not_read_ends_as_by_sigpipe(closed):
    command = [sys.executable, "-m", "needle", "trian"]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=closed, timeout=120)
    assert (done.returncode, done.stdout) == (EXIT_CLOSED_PIPE, b"")


def test_program_whose_other_pipe_breaks_says_so():
    code = """
import os, sys
from needle.processes import program
def main():
    read, write = os.pipe()
    os.close(read)
    os.write(write, b"x")
sys.exit(program(main))"""
    done = run(sys.executable, "-c", code)
    assert done.returncode == 1 and "BrokenPipeError" in done.stderr


def test_program_whose_output_lacks_a_character_prints_its_escape(folder):
    (folder / "\u00fc.txt").write_text("\u20ac")
    code = "from needle.command import main; main('data inspect \\u00fc.txt'.split())"
    done = run(sys.executable, "-c", code, cwd=folder, PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.startswith("\\xfc.txt: text")
