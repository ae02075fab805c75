"""The needle that is imported: a checkout's own if it is built, else the installed one. Nothing
of needle runs when Python starts."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from harness import PACKAGE, ROOT, run
from test_build import Tree

pytestmark = pytest.mark.slow

SCRIPT = """import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import checkout

checkout.choose()
from needle import _C

print(_C.__file__)
"""

COMMAND = """import os, sys

def main():
    print(sys.argv[1:] or os.getpid())
    return 3
"""


@pytest.fixture
def tree(tmp_path):
    """A small project with a Makefile, an app, and a .venv that has nothing, not built."""
    made = Tree(tmp_path / "tree")
    listed = (made.root / "pyproject.toml").read_text().split("packages = [")[1].split("]")[0]
    for package in re.findall(r'"(needle\.[\w.]+)"', listed):
        (made.root / package.replace(".", "/")).mkdir(parents=True, exist_ok=True)
    (made.root / "apps").mkdir()
    made.write("apps/show.py", SCRIPT)
    made.write("needle/__init__.py", "from needle import core\n\ncore.find()\ncore.load()\n")
    made.write("needle/command.py", COMMAND)
    shutil.copy(ROOT / "needle/core.py", made.root / "needle/core.py")
    for file in ("Makefile", "checkout.py"):
        shutil.copy(ROOT / file, made.root)
    run(sys.executable, "-m", "venv", "--without-pip", made.root / ".venv")
    return made


def run_clean(*command, cwd: Path, **environment: str) -> subprocess.CompletedProcess:
    """Run a command without this process's settings of Python and needle."""
    clean = {name: None for name in os.environ if name.startswith(("NEEDLE_", "PYTHON"))}
    return run(*command, cwd=cwd, **clean | environment)


def purelib(python: Path) -> Path:
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    return Path(run_clean(python, "-c", code, cwd=ROOT).stdout.strip())


def shown(root: Path, python: Path) -> Path:
    """The folder whose needle apps/show.py of `root` imports."""
    done = run_clean(python, root / "apps/show.py", cwd=root.parent)
    assert done.returncode == 0, done.stderr
    return Path(done.stdout.strip()).parent.parent


def test_a_copied_checkout_imports_itself(tree, tmp_path):
    quiet = {"NEEDLE_CUDA": "0", "NEEDLE_BLAS": "builtin", "NEEDLE_MARCH": "none"}
    packages = {"PYTHONPATH": sysconfig.get_path("purelib")}  # setuptools and numpy
    command = ["make", "-s", "lib", "VENV=.venv"]  # whatever the make of these tests was told
    made = run(*command, cwd=tree.root, **quiet, **packages)
    assert made.returncode == 0, made.stderr
    own = {p for p in (tree.root / ".venv").rglob("*") if "needle" in p.name}
    assert own == {tree.root / ".venv/.needle", tree.root / ".venv/bin/needle"}
    assert not [*tree.root.rglob("*.pth")]
    other = tmp_path / "other"
    shutil.copytree(tree.root, other, symlinks=True)
    for root in (tree.root, other):
        python = root / ".venv/bin/python"
        assert shown(root, python) == root
        done = run_clean(python, "-c", "from needle import _C; print(_C.__file__)", cwd=root)
        assert done.stdout.startswith(str(root)), done.stderr
        words = ["generate", "--prompt", "import os", ""]
        (link := tmp_path / f"{root.name}-needle").symlink_to(root / ".venv/bin/needle")
        for program in root / ".venv/bin/needle", link:
            done = run_clean(program, *words, cwd=tmp_path)
            assert (done.stdout, done.returncode) == (f"{words}\n", 3), done.stderr
            with subprocess.Popen([program], stdout=subprocess.PIPE, text=True) as child:
                assert child.stdout.read() == f"{child.pid}\n"  # it gets the signals
        done = run_clean(python, "-c", "import needle", cwd=tmp_path)
        assert "ModuleNotFoundError" in done.stderr


def test_clean_removes_what_was_built_alone(tree):
    kept = [".venv/lib/__pycache__/a.pyc", "runs/a/config.json", "needle/core.py"]
    gone = ["build/a.o", "dist/a.whl", "needle/_C.so", "needle/_C.pyi", "needle/ops/__init__.pyi"]
    for name in *kept, *gone, "needle/__pycache__/b.pyc":
        (tree.root / name).parent.mkdir(parents=True, exist_ok=True)
        (tree.root / name).touch()
    assert run("make", "-s", "clean", "VENV=.venv", cwd=tree.root).returncode == 0
    assert all((tree.root / name).exists() for name in kept)
    assert not [name for name in (*gone, "needle/__pycache__") if (tree.root / name).exists()]


def test_bench_ends_with_the_first_benchmark_that_fails(tree):
    (tree.root / "benchmarks").mkdir()
    tree.write("benchmarks/a.py", "import sys; sys.exit(len(sys.argv) == 2)  # __main__\n")
    tree.write("benchmarks/b.py", "print('b')  # __main__\n")
    tree.write("benchmarks/c.py", "print('c')\n")
    words = ["make", "-s", "-o", "lib", "-o", ".venv/.needle/train", "bench", "VENV=.venv"]
    for more, code, said in ([], 0, "b\n"), (["ARGS=x"], 2, ""):
        done = run(*words, *more, cwd=tree.root)
        assert (done.returncode, done.stdout) == (code, said), done.stderr


def test_an_offline_machine_builds_and_trains(tree):
    """An interpreter with NumPy and setuptools alone, and a pip that reaches no index."""
    python = tree.root / ".venv/bin/python"
    site = purelib(python)
    tree.write("apps/train_pythia.py", SCRIPT)
    settings = {"PIP_NO_INDEX": "1", "NEEDLE_CUDA": "0", "NEEDLE_MARCH": "none"}
    words = ["make", "-s", "train", f"PYTHON={python}", "VENV="]
    for start in ("pip", "setuptools", "pkg_resources", "_distutils_hack", "numpy"):
        if start == "numpy":
            for _ in range(2):
                done = run_clean(*words, cwd=tree.root, **settings)
                assert done.returncode != 0 and "could not install numpy into" in done.stderr
        for found in Path(sysconfig.get_path("purelib")).glob(f"{start}*"):
            (site / found.name).symlink_to(found)
    for first in (True, False):
        done = run_clean(*words, cwd=tree.root, **settings)
        assert done.returncode == 0, done.stderr
        lines = done.stdout.splitlines()
        assert lines[-1].startswith(str(tree.root / "needle/_C"))
        without = [line for line in lines if "going on without" in line]
        assert len(without) == 2 * first
        if first:
            assert "without scipy-openblas32, which pip could not install" in without[0]
            log = re.search(r"\((\S+) says why\)", without[1])[1]
            assert "No matching distribution" in (tree.root / log).read_text()
            assert re.search("CPU matrix products: (system lib|built-in)", done.stdout)


def test_a_checkout_that_is_not_built_uses_the_installed_needle(tree, tmp_path):
    python = tree.root / ".venv/bin/python"
    done = run_clean(python, tree.root / "apps/show.py", cwd=tmp_path)
    assert done.returncode != 0 and "Traceback" not in done.stderr
    assert "make lib" in done.stderr and "pip install ." in done.stderr
    site = purelib(python)
    source = tmp_path / "source"
    shutil.copytree(tree.root, source, ignore=shutil.ignore_patterns(".venv"))
    words = ["-W", "ignore", "setup.py", "-q", "build", "--build-lib", site]
    done = run(sys.executable, *words, cwd=source, NEEDLE_CUDA="0", NEEDLE_BLAS="builtin")
    assert done.returncode == 0, done.stderr
    assert not [path for path in site.iterdir() if path.name != "needle"]  # a wheel's files
    assert shown(tree.root, python) == site
    assert not tree.build()[0]
    assert shown(tree.root, python) == tree.root


@pytest.mark.skipif(
    PACKAGE.parent != ROOT,
    reason="an unbuilt checkout uses the needle that is installed in this Python",
)
def test_an_unbuilt_needle_names_the_command(tmp_path):
    """As of `python -m needle.x` in the checkout's root, also where NumPy is missing."""
    unbuilt = tmp_path / "unbuilt"
    shutil.copytree(ROOT / "needle", unbuilt / "needle", ignore=shutil.ignore_patterns("*.so"))
    bare = "import sys; sys.modules['numpy'] = None; import needle"
    for words in (["-m", "needle.diagnose"], ["-c", bare]):
        done = run_clean(sys.executable, *words, cwd=unbuilt)
        text = " ".join((done.stdout + done.stderr).split())
        assert done.returncode != 0 and f"the needle in {unbuilt} is not built" in text
        assert "make lib" in text and "pip install ." in text
