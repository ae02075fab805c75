"""Mutation testing: insert small faults in source files, one at a time, and see which tests fail.

    python tests/mutants.py FILE... [--count N] [--seed N] [--tests ARGS]     after `make lib`

universalmutator (https://github.com/agroce/universalmutator) makes the mutants of a file by
patterns; --count of them are drawn. Each goes into a copy of the checkout with its builds: only
a changed file is compiled, and mutants that do not compile, or that change only annotations and
docstrings, are drawn again. First the tests of the file run (TESTS, or --tests), then, where these
pass, all of `make test`; a CUDA file needs a GPU. One line a mutant names the test that caught it.
Survivors are printed as a diff, since some change nothing that is promised: judge them by reading.
The exit code is 1 where a mutant survives.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import difflib
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import programs

ROOT = Path(__file__).resolve().parent.parent
LEFT_OUT = {".git", "runs", ".pytest_cache", ".hypothesis", ".ruff_cache"}
LEFT_OUT |= {"asan", "arm64", "check", "ci"}  # of build/, where others may write now
SECONDS = 1200  # that a selection of tests may take
LANGUAGES = {".py": "python", ".c": "c", ".h": "c", ".cpp": "cpp", ".cu": "cpp", ".cuh": "cpp"}
# The tests that see most mutants of a file; its longest prefix counts.
TESTS = {
    "": "tests/lint",
    "apps/": "tests/apps",
    "csrc/": "tests/csrc tests/ops",
    "cuda/": "tests/csrc tests/ops tests/kernels",
    "needle/autograd.py": "tests/test_autograd.py tests/test_changed_data.py",
    "needle/checkpoint.py": "tests/test_checkpoint.py",
    "needle/data/": "tests/data",
    "needle/diagnose/": "tests/diagnose tests/test_diagnose.py",
    "needle/distributed/": "tests/distributed",
    "needle/evaluate.py": "tests/test_evaluate.py",
    "needle/generation.py": "tests/test_generate.py",
    "needle/hf/": "tests/test_hf.py",
    "needle/kernels/": "tests/kernels",
    "needle/models/": "tests/models tests/test_checkpoint.py",
    "needle/nn/": "tests/nn tests/test_hooks.py",
    "needle/ops/": "tests/test_autograd.py tests/test_changed_data.py tests/ops tests/nn",
    "needle/optim.py": "tests/test_optim.py tests/test_training.py",
    "needle/sampling.py": "tests/test_generate.py",
    "needle/supervise.py": "tests/test_supervise.py",
    "needle/training/": "tests/test_training.py tests/apps",
}
# setup.py compiles what is not current by a digest of commands, which name the folder: in a copy
# only files that are younger than their objects are compiled.
BUILD = """
import runpy, sys
sys.path.insert(0, ".")
from building import steps
steps.Step.digest = lambda step: step.stamp.read_text() if step.stamp.exists() else ""
sys.argv = ["setup.py", "-q", "build_ext", "--inplace"]
runpy.run_path("setup.py", run_name="__main__")
"""


# ---- a copy of the checkout ----------------------------------------------------------------------


def left_out(folder: str, names: list[str]) -> list[str]:
    """Name histories, runs and virtual environments."""
    venvs = {name for name in names if Path(folder, name, "pyvenv.cfg").exists()}
    return [name for name in names if name in LEFT_OUT | venvs]


@contextlib.contextmanager
def copy_of_the_tree() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="needle-mutant-") as folder:
        tree = Path(folder, "needle")
        shutil.copytree(ROOT, tree, ignore=left_out, symlinks=True)
        yield tree


def run(command: list[str], tree: Path, cuda: bool, seconds: float) -> tuple[int | None, str]:
    """Run a command in a copy. Returns its exit code, None after so many seconds, and output."""
    path = os.pathsep.join(filter(None, [str(tree), os.environ.get("PYTHONPATH")]))
    chosen = {"PYTHONPATH": path, "NEEDLE_CUDA": str(int(cuda)), "NEEDLE_TEST_SEED": "off"}
    with tempfile.TemporaryFile("w+") as output:  # a grandchild may hold a pipe open
        child = subprocess.Popen(
            command,
            cwd=tree,
            env=os.environ | chosen,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = child.wait(seconds)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)  # and the children that a test has left
            child.wait()
        output.seek(0)
        return code, output.read()


def build(tree: Path, cuda: bool = False) -> str:
    """Compile changed files in a copy. Returns the compiler's output where that failed, else ""."""
    code, output = run([sys.executable, "-W", "ignore", "-c", BUILD], tree, cuda, SECONDS)
    return "" if code == 0 else output


def caught_by(tree: Path, tests: str, cuda: bool = False, seconds: float = SECONDS) -> str | None:
    """Return the first failed test, or the process's end where there is none; None if all pass."""
    tier = "cuda and not parity" if cuda else "not slow and not cuda and not parity"
    # Without .pyc files, which a file of the same size and second would not renew.
    command = [sys.executable, "-B", "-W", "error", "-m", "pytest", "-q", "-x"]
    command += ["-p", "no:cacheprovider"]
    code, output = run([*command, "-m", tier, *shlex.split(tests)], tree, cuda, seconds)
    if code == 0:
        return None
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", output, re.MULTILINE)
    if failed:
        return failed[1]
    if code in (4, 5):
        raise SystemExit(f"needle: error: `pytest {tests}` selects no test")
    if code is None:
        return f"no end after {seconds:.0f} s"
    return f"exit code {code}: {(output.strip().splitlines() or ['no output'])[-1]}"


# ---- mutants -------------------------------------------------------------------------------------


class _Plain(ast.NodeTransformer):
    """Remove annotations and docstrings, which no test runs."""

    def visit_arg(self, node: ast.arg) -> ast.arg:
        node.annotation = None
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        node.annotation = ast.Constant(None)
        return self.generic_visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.returns = None
        return self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        is_text = isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        return ast.Pass() if is_text else self.generic_visit(node)


def meaning(file: str, source: str) -> str | None:
    """Return a form that is equal for equal programs, None for a program that does not parse."""
    if not file.endswith(".py"):
        return " ".join(re.sub(r"//.*", "", source).split())
    try:
        return ast.dump(_Plain().visit(ast.parse(source)))
    except SyntaxError:
        return None


def mutants_of(file: str, rng: random.Random) -> Iterator[str]:
    """Yield the sources of all mutants of a file, in random order."""
    mutate = [str(Path(sys.executable).with_name("mutate")), str(ROOT / file)]
    source = (ROOT / file).read_text()
    with tempfile.TemporaryDirectory() as folder:
        options = [LANGUAGES[Path(file).suffix], "--noCheck", "--mutantDir", folder]
        try:
            subprocess.run([*mutate, *options], check=True, stdout=subprocess.DEVNULL)
        except FileNotFoundError:
            raise SystemExit("needle: error: no `mutate`: `make mutants` installs it") from None
        paths = sorted(Path(folder).iterdir())
        for path in rng.sample(paths, len(paths)):
            mutant = path.read_text()
            if meaning(file, mutant) not in (None, meaning(file, source)):
                yield mutant


def test_mutant(file: str, mutant: str, tests: str) -> str | None:
    """Return the test that caught it, "" where it does not compile, None where it survived."""
    cuda = file.startswith("cuda/")
    with copy_of_the_tree() as tree:
        (tree / file).write_text(mutant)
        if not file.endswith(".py") and build(tree, cuda):
            return ""
        return caught_by(tree, tests, cuda) or caught_by(tree, "tests", cuda)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="+", metavar="FILE", help="of csrc, cuda, needle or apps")
    parser.add_argument("--count", type=int, default=5, help="mutants of each file (default: 5)")
    parser.add_argument("--seed", type=int, default=0, help="of the draw (default: 0)")
    parser.add_argument("--tests", help="pytest's arguments, instead of the tests of the file")
    arguments = parser.parse_args()
    programs.need_pytest()  # without it each mutant would seem to be caught
    counts = {"caught": 0, "survived": 0}
    for file in arguments.files:
        tests = arguments.tests or TESTS[max((p for p in TESTS if file.startswith(p)), key=len)]
        with copy_of_the_tree() as tree:
            if failed := caught_by(tree, tests, file.startswith("cuda/")):
                parser.error(f"{file}: without a mutant `pytest {tests}` does not pass: {failed}")
        drawn = mutants_of(file, random.Random(f"{arguments.seed} {file}"))
        done = 0
        while done < arguments.count and (mutant := next(drawn, None)) is not None:
            started = time.monotonic()
            caught = test_mutant(file, mutant, tests)
            if caught == "":
                continue
            done += 1
            counts["caught" if caught else "survived"] += 1
            before, after = (ROOT / file).read_text().splitlines(), mutant.splitlines()
            diff = list(difflib.unified_diff(before, after, file, file, lineterm="", n=1))
            line = re.search(r"@@ -(\d+)", diff[2])[1]
            how = f"caught by {caught}" if caught else "survived\n    " + "\n    ".join(diff[2:])
            print(f"{file}:{line} {how} ({time.monotonic() - started:.0f} s)", flush=True)
    print(f"{counts['caught']} caught, {counts['survived']} survived")
    return 1 if counts["survived"] else 0


if __name__ == "__main__":
    sys.exit(main())
