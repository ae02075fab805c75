"""What commands print: the lines of make and needle, and of benchmarks without torch."""

import re
import runpy
import sys

import pytest
from harness import PACKAGE, ROOT, naming, run

from needle import command

# Runs the benchmarks of a folder in one process, so that needle is imported once.
BENCHMARKS = """
import contextlib, io, runpy, sys
sys.modules["torch"] = None
folder, names, flags = sys.argv[1], sys.argv[2].split(), sys.argv[3:]
sys.path.insert(0, folder)
for name in names:
    sys.argv, code = [f"{folder}/{name}", *flags], 0
    with contextlib.redirect_stdout(io.StringIO()) as out:
        try:
            runpy.run_path(sys.argv[0], run_name="__main__")
        except SystemExit as end:
            code = end.code
    print(name, code, out.getvalue()[:12], flush=True)
"""


def said(*command):
    return run(sys.executable, *command)


def test_the_help_of_make_is_two_columns():
    done = run("make", "-s", "help")
    lines = [line for line in done.stdout.splitlines() if line.startswith("make ")]
    assert len(lines) > 10
    for line in lines:
        assert line[27] == " " != line[28], line
    assert not [line for line in done.stdout.splitlines() if len(line) > 80]


def test_line_is_broken_between_words_and_not_within_a_flag():
    begin, end = "x " * 29 + "needle train", "--no-graph --name a"
    assert command.wrapped(f"{begin} {end}") == f"{begin}\n  {end}"
    assert command.wrapped(f"{begin} {end}", 14) == f"{begin}\n{' ' * 14}{end}"
    path = "/a" * 60
    assert command.wrapped(f"read {path} here") == f"read\n  {path}\n  here"


def test_unknown_flag_is_printed_without_its_escapes_and_with_one_like_it(capsys):
    parser = command.Parser(prog="p", allow_abbrev=False)
    parser.add_argument("--data")
    for word, said in (
        ("--dada=/a/b/c/d/e", "--dada=/a/b/c/d/e; there is --data"),
        ("--\x1bm", r"--\x1bm"),
    ):
        with naming(word), pytest.raises(SystemExit):
            parser.parse_args([word])
        assert capsys.readouterr().err.endswith(f"unrecognized arguments: {said}\n")


def test_command_that_is_interrupted_says_so_in_a_line(capsys):
    @command.reporting("needle paint")
    def main(argv):
        raise KeyboardInterrupt

    assert main() == 130 and capsys.readouterr().err == "needle paint: interrupted\n"


def test_make_names_an_interpreter_that_is_not_there_or_too_old(tmp_path):
    code = "import sys; sys.version_info = (3, 9, 1); exec(sys.argv[1])"
    (tmp_path / "old").write_text(f"#!/bin/sh\nexec {sys.executable} -c '{code}' \"$2\"\n")
    (tmp_path / "old").chmod(0o755)
    for name, words in ("none", "apt install python3"), ("old", "needs Python 3.10 or newer"):
        done = run("make", "-s", "lib", f"PYTHON={tmp_path / name}", "VENV=")
        assert done.returncode != 0 and words in done.stderr.splitlines()[0], done.stderr


def test_lines_of_commands_fit_80_columns(tmp_path, monkeypatch, capfd):
    """Those of a run from text to an export; text of the model alone goes as it is."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NEEDLE_CACHE", str(tmp_path / "cache"))
    (tmp_path / "a.txt").write_text("one two three four five\n" * 400)
    shape = "--device cpu --layers 1 --hidden 32 --heads 2 --seq-len 32 --batch-size 2"
    for words in (
        f"train {shape} --vocab-size 512 --steps 3 --name a --data a.txt",
        "train --device cpu --resume auto --name a",
        "data prepare a.txt --tokenizer runs/a/tokenizer.json --out ids",
        "data inspect ids.bin",
        "data inspect a.txt",
        "data view runs/a --step 2",
        f"train {shape} --vocab-size 512 --steps 2 --name b --data ids.bin",
        "evaluate runs/a --data a.txt",
        "plot runs/a runs/b --out both.png",
        "export runs/a theirs",
        "import theirs ours.safetensors",
    ):
        monkeypatch.setattr(sys, "argv", [str(PACKAGE / "__main__.py"), *words.split()])
        with pytest.raises(SystemExit) as end:
            runpy.run_path(sys.argv[0], run_name="__main__")
        done = capfd.readouterr()
        assert not end.value.code, done.err
        printed = done.out.partition("sample (runs/a/")[0] + done.err
        long = [line for line in re.split("[\n\r]", printed) if len(line) > 80]
        assert not [line for line in long if " " in line.strip()], f"{words}: {long}"


def test_benchmarks_without_torch_show_help():
    folder = ROOT / "benchmarks"
    names = sorted(path.name for path in folder.glob("*.py") if "bench.run(" in path.read_text())
    done = said("-c", BENCHMARKS, str(folder), " ".join(names), "--help")
    assert done.stdout.splitlines() == [f"{name} 0 usage: {name[:5]}" for name in names]
