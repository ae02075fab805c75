"""The arrows of csrc/DESIGN.md, and the habits of the tree, read from the sources themselves."""

import ast
import functools
import re
from pathlib import Path

import cases
import pytest
from harness import ROOT

C_KINDS = {".c", ".h", ".cu", ".cuh", ".def"}


# Of cuda/: the files that fill the vtable beside its ops, and may know a device's state.
FILL_VTABLE = {"device.cu", "memory.cu", "transfer.cu", "event.cu", "graph.cu", "backend.cu"}


def files(*patterns: str) -> list[Path]:
    return sorted(path for pattern in patterns for path in ROOT.glob(pattern))


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


C_FILES = [p for p in files("csrc/*", "csrc/*/*", "cuda/*") if p.suffix in C_KINDS]
PY_FILES = files("setup.py", "needle/**/*.py", "apps/*.py", "benchmarks/*.py", "tests/**/*.py")


@functools.cache
def code(path: Path) -> str:
    """The text of a C file without its comments."""
    text = re.sub(r"/\*.*?\*/", " ", path.read_text(), flags=re.DOTALL)
    return re.sub(r"//[^\n]*", "", text)


def included(path: Path) -> list[tuple[str, str]]:
    """(delimiter, file name) of each include."""
    found = re.findall(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]', code(path), re.MULTILINE)
    return [(kind, target) for kind, target in found]


def is_python_side(path: Path) -> bool:
    return name(path.parent) == "csrc/python"


# ---- C: who includes whom ------------------------------------------------------------------------


def allowed_includes(path: Path) -> set[str]:
    """The project's own files that this one may include, as paths from the root."""
    spine = {"csrc/needle.h", "csrc/backend.h", "csrc/ops.def"}
    where = name(path)
    if where == "csrc/needle.h" or where == "csrc/formula.h" or where == "csrc/ops.def":
        return set()
    if where == "csrc/backend.h":
        return {"csrc/needle.h", "csrc/ops.def"}
    if where in ("csrc/status.c", "csrc/array.c"):
        return {"csrc/needle.h", "csrc/backend.h"}
    if is_python_side(path):
        built_in = {"csrc/cpu/cpu.h"} if path.name == "backends.c" else set()
        return spine | built_in | {name(p) for p in files("csrc/python/*.h")}
    if path.parent.name == "cpu":
        return spine | {"csrc/formula.h"} | {name(p) for p in files("csrc/cpu/*.h")}
    frame = {"cuda/device.cuh", "cuda/graph.cuh"}
    headers = {name(p) for p in files("cuda/*.cuh")}
    fills_vtable = path.name in FILL_VTABLE
    return spine | {"csrc/formula.h"} | (headers if fills_vtable else headers - frame)


@pytest.mark.parametrize("path", C_FILES, ids=name)
def test_includes_follow_the_arrows(path):
    allowed = allowed_includes(path)
    for kind, target in included(path):
        if kind == "<":
            python = target == "Python.h" or target.startswith("numpy/")
            assert not python or is_python_side(path), f"{name(path)} includes <{target}>"
            continue
        places = [path.parent / target, ROOT / "csrc" / target, ROOT / "cuda" / target]
        found = next((p.resolve() for p in places if p.exists()), None)
        if found is None:  # a header of the system, written with quotes
            assert not target.endswith((".cu", ".c")), f"{name(path)} includes {target}"
            continue
        assert name(found) in allowed, f"{name(path)} may not include {name(found)}"


def test_no_cuda_in_the_core():
    for path in C_FILES:
        if path.parent.name != "cuda":
            assert not re.search(r"<cuda|<cublas|\bcudaMalloc\b", code(path)), name(path)


# ---- ops.def: one token, everywhere --------------------------------------------------------------


def ops() -> dict[str, str]:
    found = re.findall(
        r"^(EW1|EW2|CMP|RED|ARG|OP)\((\w+),", code(ROOT / "csrc/ops.def"), re.MULTILINE
    )
    return {op: kind for kind, op in found}


def definitions(prefix: str, op: str, sources: list[Path]) -> list[str]:
    """Files that define prefix_op in so many words."""
    pattern = re.compile(rf"^[^\n;#]*\b{prefix}_{op}\s*\([^;{{]*\)\s*\{{", re.MULTILINE)
    return [name(p) for p in sources for _ in pattern.findall(code(p))]


@pytest.mark.parametrize(
    "prefix, sources",
    [("cpu", files("csrc/cpu/*.c")), ("cuda", files("cuda/*.cu"))],
    ids=["cpu", "cuda"],
)
def test_each_op_has_one_function(prefix, sources):
    expanded = [p for p in sources if re.search(r'#\s*include\s*"[./]*(csrc/)?ops\.def"', code(p))]
    assert expanded, f"nothing expands ops.def for {prefix}"
    for op, kind in ops().items():
        found = definitions(prefix, op, sources)
        if kind == "OP":
            assert len(found) == 1, f"{prefix}_{op} is defined in {found or 'no file'}"
        else:  # expanded from the op's own formula
            assert not found, f"{prefix}_{op} is also written by hand in {found}"


def test_each_op_has_a_test_case():
    tested = {
        *cases.ELEMENTWISE,
        *cases.COMPARISONS,
        *cases.REDUCTIONS,
        *(case.op for case in cases.CASES),
    }
    # Copies have no arithmetic: tests/csrc/test_ndarray.py covers them through views and dtypes.
    missing = ops().keys() - tested - {"assign", "fill"}
    assert not missing, f"no test case in tests/cases.py for {sorted(missing)}"
    assert not tested - ops().keys(), f"no op for {sorted(tested - ops().keys())}"


def test_backends_do_no_python_and_do_not_exit():
    for path in C_FILES:
        if is_python_side(path):
            continue
        found = re.findall(r"\b(?:printf|puts|exit|abort|Py_\w+|Py[A-Z]\w+)\s*\(", code(path))
        assert not found, f"{name(path)} calls {found}"


def test_no_floating_point_atomics():
    for path in files("cuda/*.cu", "cuda/*.cuh"):
        for call in re.findall(r"\batomicAdd\s*\(([^;]*);", code(path)):
            assert "float" not in call and "double" not in call, f"{name(path)}: atomicAdd({call}"


# ---- Python: who imports whom --------------------------------------------------------------------

# apps -> models, data, optim, checkpoint, ... -> nn -> ops -> autograd -> _C. A module may import
# from its own floor and those below.
FLOORS = {
    "needle._C": 0,
    "needle.backend_ndarray": 1,
    "needle.block_mask": 1,
    "needle.autograd": 1,
    "needle.init": 2,
    "needle.ops": 2,
    "needle.nn": 3,
    "needle": 4,  # models, optim, data, checkpoint, hf, sampling, distributed, ...
}


def floor(module: str) -> int:
    while module not in FLOORS:
        module = module.rpartition(".")[0]
    return FLOORS[module]


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path: Path) -> list[str]:
    """Modules of needle that the file imports, anywhere in it, as absolute names."""
    package = module_name(path).split(".")
    if path.name != "__init__.py":
        package = package[:-1]
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                full = f"{module}.{alias.name}"
                as_path = ROOT.joinpath(*full.split("."))
                is_module = as_path.with_suffix(".py").exists() or as_path.is_dir()
                found.append(full if is_module or full == "needle._C" else module)
    return [module for module in found if module.split(".")[0] == "needle"]


@pytest.mark.parametrize("path", files("needle/**/*.py"), ids=name)
def test_imports_follow_the_arrows(path):
    if name(path) in ("needle/__init__.py", "needle/diagnose.py"):
        return  # the first re-exports the house, the second reports on it
    module = module_name(path)
    for target in imports(path):
        assert floor(target) <= floor(module), f"{name(path)} may not import {target}"


def test_nothing_below_the_apps_imports_them():
    for path in files("needle/**/*.py"):
        text = path.read_text()
        assert not re.search(
            r"^\s*(from|import) (apps|tests|train_pythia|torch|transformers)\b", text, re.MULTILINE
        ), name(path)


# ---- habits --------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", C_FILES, ids=name)
def test_c_files_open_with_their_contract(path):
    first = path.read_text().splitlines()[0]
    assert first.startswith(f"/* {path.name} - "), f"{name(path)} opens with {first!r}"


@pytest.mark.parametrize("path", PY_FILES, ids=name)
def test_python_files_open_with_a_docstring(path):
    assert ast.get_docstring(ast.parse(path.read_text())), f"{name(path)} has no docstring"


def test_nothing_unfinished():
    words = re.compile(
        "|".join(
            rf"\b{a}{b}\b" for a, b in (("TO", "DO"), ("FIX", "ME"), ("XX", "X"), ("HA", "CK"))
        )
    )
    silent = re.compile(r"except[^\n]*:\s*pass\b(?!\s*#)")
    for path in [*C_FILES, *PY_FILES, *files("tests/c/*", "*.md", "Makefile", ".ci/run")]:
        text = path.read_text()
        assert not words.search(text), f"{name(path)}: {words.search(text).group()}"
        found = silent.search(text) if path.suffix == ".py" else None
        assert not found, f"{name(path)} swallows an error without a reason: {found.group()!r}"


def test_versions_agree():
    import needle

    declared = re.search(
        r'^version = "([^"]+)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE
    )
    assert needle.__version__ == declared.group(1)
