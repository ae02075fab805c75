"""The rooms of docs/design.md, and the habits of the tree, read from the sources themselves. (Who
may use whom among the files of a room is tests/lint/test_floors.py's.)"""

import re
from pathlib import Path

from harness import ROOT, naming
from sources import C_FILES, PY_FILES, code, files, name

# The files of cuda/ that are no ops: what they fill of the vtable needs the device and the graphs.
FILL_VTABLE = {"device.cpp", "memory.cpp", "transfer.cpp", "event.cpp", "graph.cpp", "module.cpp"}
FILL_VTABLE |= {"backend.cu", "checks.cu", "column_sums.cu"}


def included(path: Path) -> list[tuple[str, str]]:
    """(delimiter, file name) of each include."""
    return re.findall(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]', code(path), re.MULTILINE)


def is_python_side(path: Path) -> bool:
    return name(path.parent) == "csrc/python"


# ---- C: who includes whom ------------------------------------------------------------------------


COMPOSITES = {"csrc/composite.h", "csrc/layer.h"}  # above the ops, below Python
SHARED = {
    "csrc/blake2s.h", "csrc/block_lists.h", "csrc/decode.h", "csrc/fp8.h", "csrc/philox.h",
    "csrc/sort_key.h",
}  # fmt: skip  # by both backends


def allowed_includes(path: Path) -> set[str]:
    """The project's own files that this one may include, as paths from the root."""
    spine = {"csrc/needle.h", "csrc/backend.h", "csrc/ops.def"}
    room = {name(p) for p in path.parent.iterdir() if p.suffix in (".h", ".cuh")}
    if name(path) in ("csrc/needle.h", "csrc/formula.h", "csrc/ops.def"):
        return set()
    if name(path) in SHARED:
        return {"csrc/formula.h", "csrc/needle.h"}
    if path.stem.startswith(("composite", "layer")) and path.parent.name == "csrc":
        return spine | COMPOSITES
    if path.parent.name == "csrc":
        return spine
    if is_python_side(path):  # of the backends, it links one
        return spine | room | {"csrc/composite.h"}
    if path.name not in FILL_VTABLE:
        room -= {"cuda/device.cuh", "cuda/graph.cuh"}  # of those that fill the rest of the vtable
    if path.name == "algorithms.cuh":
        room.add("cuda/algorithms.def")
    return spine | {"csrc/formula.h"} | SHARED | room


def test_includes_follow_the_arrows():
    for path in C_FILES:
        with naming(name(path)):
            allowed = allowed_includes(path)
            for kind, target in included(path):
                if kind == "<":
                    python = target == "Python.h" or target.startswith("numpy/")
                    assert not python or is_python_side(path), f"{name(path)} includes <{target}>"
                    continue
                places = [path.parent / target, ROOT / "csrc" / target, ROOT / "cuda" / target]
                found = next((p.resolve() for p in places if p.exists()), None)
                if found is None:  # a header of the system, written with quotes
                    assert not target.endswith((".cpp", ".cu", ".c")), (
                        f"{name(path)} includes {target}"
                    )
                    continue
                assert name(found) in allowed, f"{name(path)} may not include {name(found)}"


def test_no_cuda_in_the_core():
    for path in C_FILES:
        if path.parent.name != "cuda":
            assert not re.search(r"<cuda|<cublas|\bcudaMalloc\b", code(path)), name(path)


# ---- what the rooms may do -----------------------------------------------------------------------


FORBIDDEN = (
    r"v?f?printf|f?put[sc]|putchar|perror|fwrite|_?_?exit|_Exit|abort|assert|Py_\w+|Py[A-Z]\w+"
)


def test_backends_do_no_python_and_do_not_exit():
    for path in C_FILES:
        if is_python_side(path):
            continue
        found = re.findall(rf"\b(?:{FORBIDDEN})\s*\(", code(path))
        assert not found, f"{name(path)} calls {found}"


# Whatever adds in memory in the order in which threads arrive: CUDA's functions and classes, and
# PTX. A flag of the host, std::atomic<bool>, adds nothing. Headers of kernels may hide some, or add
# in an order of their own: of those that are used one sorts integers, and one adds them up. Those
# of a block add in a fixed order. atomicInc, and atomicAdd of 1u, count whole numbers; atomicMax
# finds the same in any order. bulk_add of hopper.cuh may follow a ticket, which says whose turn it
# is; box_add adds a box of a gradient, each of which a launch stores once; named_barrier_any adds
# nothing, but tells threads at a barrier whether one of them says so.
ATOMIC = (
    r"cuda::(?:std::)?atomic|\b(?:atom|red)\.[a-z]"
    r"|(?<!std::)(?<!<)\b(?!atomic(?:Inc|Max)\b)\w*atomic\w*"
    r"|reduce\.async|\b(?:bulk|box)_add\b"
)
ORDERED = (
    r"\batomicAdd\([^;]*, 1u\);|\bawait_ticket\([^;]*;\s*bulk_add\b|(?s:\bvoid bulk_add\(.*?\n\})"
    r"|\bif \(p\.joins\) \{\s*box_add\b|(?s:\bvoid box_add\(.*?\n\})"
    r"|(?s:\bbool named_barrier_any\(.*?\n\})"
)
KERNELS = r"<((?:cub|thrust|cuda|cooperative_groups|cute?|cutlass)\b[^_>][^>]*)>"


def test_no_atomics():
    """Floats would add up to other bits in each run."""
    for path in files("cuda/*.c*"):
        with naming(name(path)):
            found = re.findall(ATOMIC, re.sub(ORDERED, "", code(path)))
            assert not found, (
                f"{name(path)}: {found}: the sum depends on who comes first; use a tree"
            )
            hidden = set(re.findall(KERNELS, code(path)))
            hidden -= {"cub/device/device_radix_sort.cuh", "cub/device/device_scan.cuh"}
            hidden = {h for h in hidden if not re.fullmatch(r"cub/block/block_\w+\.cuh", h)}
            hidden -= {"cuda.h"}  # has no kernels
            assert not hidden, (
                f"{name(path)} includes {hidden}: do its kernels add floats atomically?"
            )


# ---- habits --------------------------------------------------------------------------------------


TEXTS = [*C_FILES, *PY_FILES]
TEXTS += files("*.md", "*/*.md", "Makefile", "pyproject.toml", ".ci/run")


def test_files_open_with_their_contract():
    for path in C_FILES:
        first = path.read_text().splitlines()[0]
        assert first.startswith(f"/* {path.name} - "), f"{name(path)} opens with {first!r}"
    for path in PY_FILES:
        assert re.match(r'(#.*\n)*"""\S', path.read_text()), f"{name(path)} has no docstring"


def test_nothing_unfinished():
    words = re.compile(
        "|".join(
            rf"\b{a}{b}\b" for a, b in (("TO", "DO"), ("FIX", "ME"), ("XX", "X"), ("HA", "CK"))
        )
    )
    silent = re.compile(r"except[^\n]*:\s*pass\b(?!\s*#)")
    for path in TEXTS:
        text = path.read_text()
        assert not words.search(text), f"{name(path)}: {words.search(text).group()}"
        found = silent.search(text) if path.suffix == ".py" else None
        assert not found, f"{name(path)} swallows an error without a reason: {found.group()!r}"


def test_no_file_is_too_long_for_one_idea():
    lines = {name(path): len(path.read_text().splitlines()) for path in TEXTS}
    long = {path: count for path, count in lines.items() if count > 700}
    assert not long, f"more than 700 lines: {long}: split by subject"


def test_versions_agree():
    import needle

    declared = re.search(
        r'^version = "([^"]+)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE
    )
    assert needle.__version__ == declared.group(1)
