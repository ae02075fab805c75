"""Arrows go down: the order of floors, among Python modules and among C objects.

`pytest -s tests/lint/test_floors.py` prints it. An arrow goes from a file to one that it uses: to
a module that it imports, wherever the import stands, or to the object that defines a symbol it
leaves open. A floor is the longest way down, so files in a circle have none.

From the ground up the order is the tree of docs/walk.md: the block under `## The tree`, in which
nothing uses what stands on a later line. A line is paths, then a sentence that names no file:

    needle/files.py safetensors.py     the second lies beside the first
    needle/ops/                        a folder: all that is in it and has no line of its own
"""

import ast
import re
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest
from harness import ROOT, core_objects, run

FACE = "needle/__init__.py"  # it re-exports all names: its own imports are not counted
TORCH = "needle/kernels/torch_worker.py"
CORE = "needle/_C"
WALK = ROOT / "docs" / "walk.md"
HIDDEN = "a module whose name is computed"
OUTSIDE = ("apps", "examples", "benchmarks", "tests")
Arrows = dict[str, dict[str, list[str]]]  # file -> file that it uses -> by which lines or symbols


# ---- Python: what imports what -------------------------------------------------------------------


@cache
def imported(path: Path) -> list[tuple[int, str, str]]:
    """(line, module, name or "") of each import in a file, those inside functions, those for type
    checkers and those by importlib included."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name, "") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}:{node.lineno}: write the import with its absolute name"
            found += [(node.lineno, node.module, alias.name) for alias in node.names]
        elif isinstance(node, ast.Call) and node.args:
            called = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if called in ("import_module", "__import__"):
                known = isinstance(node.args[0], ast.Constant)
                found.append((node.lineno, node.args[0].value if known else HIDDEN, ""))
    return found


@cache
def homes(root: Path, folder: Path, module: str, name: str) -> list[str]:
    """The files of this tree that an import in a folder reaches: the one that it means, and the
    packages around it, which Python runs first. A package is not around its own modules."""
    if f"{module}.{name}.".startswith("needle._C."):
        return [CORE]
    beside = [folder, *(root / name for name in OUTSIDE)]
    own = folder, *folder.parents
    for place in [root] if module.split(".")[0] == "needle" else beside:
        base = place.joinpath(*module.split("."))
        for stem in (base / name, base) if name else (base,):
            for file in (stem / "__init__.py", stem.with_suffix(".py")):
                if file.exists():
                    packages = [p for p in file.parents if root / "needle" in p.parents]
                    around = [p / "__init__.py" for p in packages if p not in own]
                    return [p.relative_to(root).as_posix() for p in dict.fromkeys([file, *around])]
    return []


@cache
def python_arrows(root: Path = ROOT) -> Arrows:
    folders = [root / "needle", *(root / folder for folder in OUTSIDE)]
    files = sorted(path for folder in folders for path in folder.rglob("*.py"))
    arrows: Arrows = {CORE: {}}
    for path in files:
        where = path.relative_to(root).as_posix()
        used = arrows[where] = defaultdict(list)
        if where == FACE:
            continue
        for line, module, name in imported(path):
            for target in homes(root, path.parent, module, name):
                if target != where:
                    used[target].append(f"line {line}: {name or module}")
    return arrows


# ---- C: what calls what --------------------------------------------------------------------------


@cache
def open_and_defined() -> dict[str, tuple[set[str], set[str]]]:
    """Symbols that each C file defines and leaves open, from the object that `make lib` left."""
    built, objects = core_objects(), {}
    for source in sorted(ROOT.glob("csrc/**/*.c")):
        where = source.relative_to(ROOT)
        made = built / where.with_suffix(".o")
        fresh = made.exists() and made.stat().st_mtime_ns >= source.stat().st_mtime_ns
        assert fresh, f"{made.relative_to(ROOT)} is older than {where}, or is not there: make lib"
        objects[str(made)] = where.as_posix()
    found: dict[str, tuple[set[str], set[str]]] = defaultdict(lambda: (set(), set()))
    for line in run("nm", "-g", "-P", "-A", *objects).stdout.splitlines():
        made, _, symbol = line.partition(": ")
        name, kind, *_ = symbol.split()
        found[objects[made]][kind in "Uvw"].add(name)
    assert len(found) == len(objects), f"no symbols: {set(objects.values()) - found.keys()}"
    return found


def c_arrows() -> Arrows:
    objects = open_and_defined()
    home = {symbol: where for where, (defined, _) in objects.items() for symbol in defined}
    arrows: Arrows = {where: defaultdict(list) for where in objects}
    for where, (_, undefined) in objects.items():
        for symbol in sorted(undefined & home.keys()):
            arrows[where][home[symbol]].append(symbol)
    return arrows


# ---- floors --------------------------------------------------------------------------------------


def said(arrows: Arrows, pairs: list[tuple[str, str]]) -> str:
    return "".join(f"\n    {a} uses {b} ({'; '.join(arrows[a][b])})" for a, b in pairs)


def circles(arrows: Arrows) -> list[list[tuple[str, str]]]:
    """The arrows of each circle."""

    def above(start: str) -> set[str]:
        seen, left = set(), [start]
        while left:
            new = arrows[left.pop()].keys() - seen
            seen |= new
            left += new
        return seen

    reach = {file: above(file) for file in arrows}
    tied = {frozenset(b for b in reach[a] if a in reach[b]) for a in arrows if a in reach[a]}
    return [[(a, b) for a in sorted(ring) for b in arrows[a] if b in ring] for ring in tied]


def floors(arrows: Arrows) -> dict[str, int]:
    """The longest way down from each file."""

    @cache
    def floor(file: str) -> int:
        return 1 + max((floor(used) for used in arrows[file]), default=-1)

    return {file: floor(file) for file in arrows}


# ---- the tree -----------------------------------------------------------------------------------


def read_tree(text: str) -> dict[str, int]:
    """path -> its line, from the ground up; folders end in a slash."""
    block = re.search(r"^## The tree\n.*?^```\w*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert block, "docs/walk.md has no fenced block under `## The tree`"
    places: dict[str, int] = {}
    for number, line in enumerate(block[1].splitlines()):
        folder = ROOT
        for word in re.findall(r"[\w./]+", line):
            there = (p for p in (ROOT / word, folder / word) if p.exists())
            path = next((p for p in there if p.is_file() or word[-1] == "/"), None)
            if path is None and word != CORE:
                looks = re.fullmatch(r"[\w./]+(\.(py|c|h|def|cpp|cu|cuh)|/)", word)
                assert not looks, f"docs/walk.md, The tree: {word} is not there: {line}"
                break
            path = ROOT / word if path is None else path
            folder = path if path.is_dir() else path.parent
            name = path.relative_to(ROOT).as_posix() + "/" * path.is_dir()
            assert places.setdefault(name, number) == number, f"docs/walk.md: {name}, twice"
    return places


def place(file: str, tree: dict[str, int]) -> int:
    """The line of the tree on which a file stands, or its nearest folder."""
    found = max((p for p in tree if file == p or file.startswith(p) and p[-1] == "/"), key=len)
    return tree[found]


# ---- the tests -----------------------------------------------------------------------------------


@pytest.fixture(params=[python_arrows, c_arrows], ids=["python", "c"])
def arrows(request) -> Arrows:
    return request.param()


def test_there_is_no_circle(arrows):
    rings = circles(arrows)
    if rings:
        pytest.fail("a circle:" + "\n  and another:".join(said(arrows, ring) for ring in rings))


def test_the_tree_places_every_file(arrows):
    tree = read_tree(WALK.read_text())
    lost = [f for f in arrows if not any(f == p or f.startswith(p) and p[-1] == "/" for p in tree)]
    assert not lost, f"docs/walk.md, The tree, has no line for {lost}"


def test_no_arrow_goes_up(arrows):
    """The order, printed, is that of docs/walk.md, and within a line the floors'."""
    tree = read_tree(WALK.read_text())
    line = {file: place(file, tree) for file in arrows}
    up = [(a, b) for a in arrows for b in arrows[a] if b != FACE and line[b] > line[a]]
    if up:
        pytest.fail("upwards in the tree of docs/walk.md:" + said(arrows, up))
    if circles(arrows):
        pytest.skip("there is a circle, and no order to print")
    of = floors(arrows)
    print("\nfloor  file  uses")
    for file in sorted(of, key=lambda f: (line[f], of[f], f)):
        if file != FACE and not file.startswith("tests/"):
            print(f"{of[file]:5}  {file:32}", *sorted(arrows[file], key=of.get, reverse=True))


def test_only_tools_see_the_face():
    """`import needle`, and names of needle that are no modules: the face holds everything, so
    a used module that uses it closes a circle. A name comes from the file that it is
    defined in; only a tool, which no module imports, may be as lazy as a user."""
    arrows = python_arrows()
    used = {b for a in arrows for b in arrows[a] if a.startswith("needle/")}
    seen = [(a, FACE) for a in arrows if FACE in arrows[a] and a in used]
    assert not seen, "import from the module that defines the name:" + said(arrows, seen)


def test_needle_imports_neither_apps_nor_torch():
    """Neither programs on top of needle nor the libraries that it is compared with, which users may
    lack; but for the program that runs sources in PyTorch, which only tests import."""
    arrows = python_arrows()
    assert not [a for a in arrows if TORCH in arrows[a] and not a.startswith("tests/")]
    up = [(a, b) for a in arrows for b in arrows[a] if a[:6] == "needle" != b[:6]]
    assert not up, "needle imports what stands on it:" + said(arrows, up)
    for path in ROOT.glob("needle/**/*.py"):
        allowed = {ROOT / FACE: {HIDDEN}, ROOT / TORCH: {"torch"}}.get(path, set())
        refused = {"torch", "transformers", HIDDEN} - allowed
        found = [(line, name) for line, name, _ in imported(path) if name.split(".")[0] in refused]
        assert not found, f"{path.relative_to(ROOT)} imports {found}"
