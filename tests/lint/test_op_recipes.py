"""The recipes for ops in docs/extending.md work: both are applied to a copy of the tree, in which
the commands that they name then pass."""

import re
import shlex
from pathlib import Path

import harness
import pytest
from harness import ROOT

from building import choices

SECTION = r"^## (An elementwise op|A structured op)\n(.*?)(?=^## )"
BLOCK = r"^```(\w+)\n(.*?)^```\n"
PLACE = r"(New file|At the end of|In) `([^`]+)`(?:, (after|before) `([^`]+)`)?:\n\n\Z"


def add(file: Path, text: str, how: str, where: str | None, anchor: str | None) -> None:
    """Put a block where the line above it says."""
    assert file.exists() == (how != "New file"), f"{how}: {file}"
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    index = len(lines)
    if anchor:
        found = [i for i, line in enumerate(lines) if line.strip().startswith(anchor)]
        assert len(found) == 1, f"{file} has {len(found)} lines that begin with {anchor!r}"
        index = found[0] + (where == "after")
    file.write_text("".join([*lines[:index], text, *lines[index:]]))
    if file.suffix == ".py":
        compile(file.read_text(), file, "exec")


def follow(section: str, tree: Path) -> list[str]:
    """Apply the blocks of a recipe; the commands that it ends with."""
    commands, end = [], 0
    for block in re.finditer(BLOCK, section, re.M | re.S):
        language, text = block.groups()
        if language == "sh":
            commands += text.splitlines()
        else:
            place = re.search(PLACE, section[end : block.start()])
            assert place, f"no place is named above the block\n{text}"
            how, path, where, anchor = place.groups()
            add(tree / path, text, how, where, anchor)
        end = block.end()
    return commands


def run(command: str, tree: Path) -> None:
    if command == "make lib":  # by the objects of the copied tree
        built = harness.build_copy(tree)
        assert built.returncode == 0, (built.stdout + built.stderr)[-3000:]
        return
    words = shlex.split(command.removeprefix("PYTHONPATH=. "))
    assert words[0] == "python", command
    options = ["-m", "not cuda and not parity"] if "pytest" in words else []
    done = harness.run_in_copy(tree, *words[1:], *options)
    assert done.returncode == 0, f"{command}\n{(done.stdout + done.stderr)[-3000:]}"


@pytest.mark.slow
def test_recipes_pass_their_tests(tmp_path, monkeypatch):
    monkeypatch.setenv("CFLAGS", "-O0")  # ops.def is in nearly every file of the core
    page = (ROOT / "docs" / "extending.md").read_text()
    recipes = re.findall(SECTION, page, re.M | re.S)
    assert len(recipes) == 2
    with harness.copy_of_the_tree() as tree:
        commands = [command for _, text in recipes for command in follow(text, tree)]
        for command in dict.fromkeys(commands):
            run(command, tree)
        toolkit = choices.find_toolkit()
        if isinstance(toolkit, str):  # without a compiler the CUDA block is only looked for
            return
        command = [toolkit.nvcc, "-std=c++17", "-arch=sm_80", "-Werror", "all-warnings", "-Icsrc"]
        command += ["-Icuda", "-c", "cuda/scale_rows.cu", "-o", tmp_path / "scale_rows.o"]
        compiled = harness.run(*command, cwd=tree)
        assert compiled.returncode == 0, compiled.stderr
