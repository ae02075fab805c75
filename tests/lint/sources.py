"""The project's own files, as the lint tests read them."""

import functools
import re
from pathlib import Path

from harness import ROOT

C_KINDS = {".c", ".h", ".cpp", ".cu", ".cuh", ".def"}


def files(*patterns: str) -> list[Path]:
    return sorted(path for pattern in patterns for path in ROOT.glob(pattern))


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@functools.cache
def code(path: Path) -> str:
    """The text of a C file without its comments."""
    text = re.sub(r"/\*.*?\*/", " ", path.read_text(), flags=re.DOTALL)
    return re.sub(r"//[^\n]*", "", text)


C_FILES = [path for path in files("csrc/**/*", "cuda/*") if path.suffix in C_KINDS]
FOLDERS = ("building", "needle", "apps", "examples", "benchmarks", "tests")
PY_FILES = files("*.py", *(f"{folder}/**/*.py" for folder in FOLDERS))
