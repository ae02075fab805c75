"""Command-line programs whose reader has closed the pipe, as `| head -1` does."""

import os
import re
import subprocess
import sys

import numpy as np
import pytest
from harness import ROOT, naming, run

from needle.processes import EXIT_CLOSED_PIPE, program

pytestmark = pytest.mark.slow

PROGRAMS = [*(ROOT / "needle" / "training").glob("*.py")]
PROGRAMS += [*(ROOT / "needle").glob("*/__main__.py")]
PROGRAMS += [*(ROOT / "apps").glob("*.py"), *(ROOT / "benchmarks").glob("*.py")]
PROGRAMS += [*(ROOT / "examples").glob("*.py")]


def end_of(words, folder):
    """(exit code, what was said on stderr) of a program whose stdout is closed at once."""
    reader, writer = os.pipe()
    os.close(reader)
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path, "NEEDLE_CACHE": str(folder / "cache")}
    environment["PYTHONUNBUFFERED"] = ""  # argparse passes over what it cannot write at once
    try:
        done = subprocess.run(
            [sys.executable, *map(str, words)],
            stdout=writer,
            stderr=subprocess.PIPE,
            cwd=folder,
            env=environment,
            text=True,
            timeout=120,
        )
    finally:
        os.close(writer)
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    "words",
    [
        ["-m", "needle", "--help"],
        ["-m", "needle", "--version"],
        ["-m", "needle.diagnose"],
        ["-m", "needle.data", "inspect", "t.npy"],
        ["-u", "-m", "needle.data", "inspect", "t.npy"],  # each line is written at once
        ["-m", "needle.data", "view", "t.npy", *"--step 1 --batch-size 2 --seq-len 8".split()],
        ["-m", "needle", "evaluate", "--help"],
        ["-m", "needle.training.export", "--help"],
        ["-m", "needle.kernels", "serve", "--help"],
        ["-m", "needle", "supervise", "--help"],
        [ROOT / "apps" / "generate.py", "--help"],
        [ROOT / "apps" / "train_pythia.py", *"--data t.npy --seq-len 8 --device cpu".split()],
        [ROOT / "benchmarks" / "kernels.py", "--help"],
    ],
    ids=lambda words: " ".join(map(str, words[:3])).replace(str(ROOT), ""),
)
def test_program_whose_output_is_closed_ends_as_by_sigpipe(tmp_path, words):
    np.save(tmp_path / "t.npy", np.arange(4000, dtype=np.uint16) % 90)
    code, said = end_of(words, tmp_path)
    assert (code, said) == (EXIT_CLOSED_PIPE, "") == (141, "")


def test_program_without_an_output_runs(tmp_path):
    np.save(tmp_path / "t.npy", np.arange(4000, dtype=np.uint16) % 90)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    for words in "data inspect t.npy", "supervise -- true":
        for closed in ">&-", "<&- >&- 2>&-":
            command = f"{sys.executable} -m needle {words} {closed}"
            with naming(command):
                done = subprocess.run(command, shell=True, cwd=tmp_path, env=environment)
                assert done.returncode == 0


@pytest.mark.parametrize("words", ["--help", "train --help all", "diagnose", "data inspect t.npy"])
def test_program_whose_output_is_on_a_full_disk_says_so(tmp_path, words):
    np.save(tmp_path / "t.npy", np.arange(4000, dtype=np.uint16) % 90)
    command = f"{sys.executable} -m needle {words} >/dev/full"
    done = run("sh", "-c", command, cwd=tmp_path, PYTHONPATH=ROOT)
    assert done.returncode == 1 and done.stderr.endswith("[Errno 28] No space left on device\n")
    assert done.stderr.count("\n") == 1, done.stderr


def test_program_whose_output_lacks_a_character_prints_its_escape(tmp_path):
    (tmp_path / "\u00fc.txt").write_text("\u20ac")
    command = "from needle.command import main; main('data inspect \u00fc.txt'.split())"
    done = run(
        *(sys.executable, "-c", f"# -*- coding: utf-8 -*-\n{command}"),
        cwd=tmp_path,
        PYTHONPATH=ROOT,
        PYTHONIOENCODING="ascii",
    )
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.startswith("\\xfc.txt: text")


def test_every_program_ends_by_one_rule():
    runs = {
        path: path.read_text().partition('if __name__ == "__main__":\n')[2] for path in PROGRAMS
    }
    assert len([path for path, lines in runs.items() if lines]) >= 20
    for path, lines in runs.items():
        assert not lines or re.search(r"\b(program|bench\.run)\(.*main\)", lines), path


def test_another_closed_pipe_is_an_error(tmp_path):
    code = "import os, sys\nfrom needle.processes import program\n"
    code += "def main():\n    r, w = os.pipe(); os.close(r); os.write(w, b'x')\n"
    reader = run(sys.executable, "-c", code + "sys.exit(program(main))")
    assert reader.returncode == 1 and "BrokenPipeError" in reader.stderr


@pytest.mark.parametrize("code, wanted", [(None, 0), (0, 0), (3, 3)])
def test_exit_code_of_main_is_that_of_the_program(code, wanted):
    assert program(lambda: code) == wanted
