"""Products of panels on the CPU (csrc/cpu/panels.c), by each path that NEEDLE_CPU_PRODUCTS names:
the bits of many products, made in a process of its own for each path by each number of threads, and
float64.

The operands hold their dtype exactly, so that the error is that of float32 sums: K 2^-24 of the sum
of magnitudes at most, in any order, and half a unit of a result that has 16 bits itself.
"""

import ctypes
import itertools
import os
import re
import sys
from functools import cache, partial
from pathlib import Path

import numpy as np
import pytest
from harness import (
    ROOT,
    SANITIZED,
    bits,
    blas_of_core,
    copy_needle,
    core_objects,
    run,
    shared_library,
)

import needle as ndl
from needle import _C
from needle.testing import FLOATS, LAYOUTS, laid_out_values, rounder, to_ndarray
from needle.testing.bounds import EPS32, HALF_ULP, TINY

SIZES = [  # (batch, m, k, n)
    (1, 1, 1, 1),
    (1, 1, 127, 33),
    (2, 31, 2, 1),
    (1, 33, 31, 127),
    (1, 15, 33, 31),
    (1, 14, 512, 32),
    (2, 3, 513, 257),
    (1, 127, 1100, 16),
    (2, 5, 0, 7),
    (1, 300, 200, 300),  # many tiles
]
THREADS = (1, 3) if SANITIZED else (1, 2, 3, 4)
EMULATED = THREADS[: 1 if SANITIZED else 2]  # a thread takes ten times as long as another path's
PATHS = {"blas": "", "avx512": "AVX-512 (float32 too) and "}  # what is said first
PATHS["avx512_bf16"] = "AVX512-BF16 (float32 too) and "
PATHS["avx512_amx"] = PATHS["emulated"] = "AMX-BF16 (float32 too) and "
NEEDED = {"blas": set(), "avx512": {"avx512f", "avx512bw", "avx512vl"}}  # of the processor
NEEDED["avx512_bf16"] = NEEDED["avx512"] | {"avx512_bf16"}
NEEDED["avx512_amx"] = NEEDED["avx512"] | {"amx_tile", "amx_bf16"}
NEEDED["emulated"] = NEEDED["avx512"]  # a core whose tiles are C (tests/emulation/amx_tiles.h)
VIEWS = [(first, second) for first in LAYOUTS for second in {"contiguous", "transposed", first}]
if SANITIZED:  # each operand is packed by itself: other pairs read no other memory
    VIEWS = [(layout, layout) for layout in LAYOUTS]


def operands(size, dtype):
    batch, m, k, n = size
    rng, exact = np.random.default_rng(size), rounder(dtype)
    a, b = exact(rng.standard_normal((batch, m, k))), exact(rng.standard_normal((batch, k, n)))
    c, bias = rng.standard_normal((batch, m, n)).astype(np.float32), exact(rng.standard_normal(n))
    return a, b, c, bias


def products():
    """(name, k, function that returns the result, exact, magnitudes) of every op, dtype, size and
    layout."""
    cpu = ndl.cpu()
    for dtype, size in itertools.product(FLOATS, SIZES):
        a, b, c, bias = operands(size, dtype)
        k = size[2]
        for first, second in VIEWS:
            seen_a, seen_b = laid_out_values(a, first), laid_out_values(b, second)
            left, right = to_ndarray(a, dtype, cpu, first), to_ndarray(b, dtype, cpu, second)
            exact, magnitudes = seen_a @ seen_b, abs(seen_a) @ abs(seen_b)
            name = f"{dtype} {size} {first} {second}"
            yield f"matmul {name}", k, partial(_C.matmul, left, right, None), exact, magnitudes
            added = partial(accumulated, left, right, c)
            yield f"matmul_acc {name}", k, added, c + exact, abs(c) + magnitudes
        x, w, y = (to_ndarray(value, dtype, cpu) for value in (a[0], b[0], bias))
        exact, magnitudes = a[0] @ b[0] + bias, abs(a[0]) @ abs(b[0]) + abs(bias)
        layer = partial(_C.linear_fwd, x, w, y, None)
        yield f"linear_fwd {dtype} {size}", k, layer, exact, magnitudes


def accumulated(left, right, c):
    total = to_ndarray(c, "float32", ndl.cpu())
    _C.matmul_acc(left, right, None, 1, total)
    return total


def special() -> np.ndarray:
    """Infinity; infinity less infinity; infinity times zero; NaN; a denormal operand, whose product
    is not; a product that is denormal."""
    a = [[np.inf, 1], [np.inf, np.inf], [np.inf, 1], [np.nan, 1], [2.0**-130, 0], [2.0**-70, 0]]
    b = [[1, 1], [1, -1], [0, 1], [0, 1], [2.0**120, 0], [2.0**-70, 0]]
    left = to_ndarray(np.reshape(a, (6, 1, 2)), "bfloat16", ndl.cpu())
    right = to_ndarray(np.reshape(b, (6, 2, 1)), "bfloat16", ndl.cpu())
    return accumulated(left, right, np.zeros((6, 1, 1))).numpy().ravel()


def main(folder: str, *numbers: str) -> None:
    """Check every product and write its bits, a file for each number of threads, in a process of
    its own. From few to many, so that none finds more scratch memory than it asks for."""
    checks = list(products())
    for threads in map(int, numbers):
        ctypes.CDLL(_C.__file__).omp_set_num_threads(threads)
        found = {"special": special(), "detail": ndl.cpu().properties()["detail"]}
        for name, k, product, exact, magnitudes in checks:
            result = product()
            rounding = HALF_ULP[result.dtype] * np.maximum(abs(exact), TINY[result.dtype])
            bound = rounding + 1.01 * (k + 2) * EPS32 * magnitudes
            error = abs(result.numpy().astype(float) - exact)
            assert (error <= bound).all(), f"{name}, {threads} threads: {error.max()}"
            found[name] = bits(result)
        np.savez(Path(folder) / str(threads), **found)


def with_emulated_tiles(folder: Path) -> None:
    """Copy the needle that is tested here into a folder, with a core whose tiles are emulated."""
    copied, flags = folder / "needle" / Path(_C.__file__).name, ["-fopenmp", "-lm"]
    built, level = core_objects() / "csrc", "-O3"
    if SANITIZED:
        level = "-O1"  # a seventh of the compiler's time
        built = ROOT / "build" / "asan" / "objects" / "csrc"
        flags += ["-fsanitize=address,undefined"]
    copy_needle(folder)
    objects = [x for x in built.rglob("*.o") if x.name != "panels.o"]
    copied.unlink()
    shared_library(
        f'#include "{ROOT / "csrc/cpu/panels.c"}"',
        copied,
        *[f"-I{ROOT / 'csrc/cpu'}", f"-I{ROOT / 'tests/emulation'}", *flags],
        *['-DNEEDLE_TILES="amx_tiles.h"', "-fvisibility=hidden", level, *objects, *blas_of_core()],
    )


@pytest.fixture(scope="session")
def results(tmp_path_factory):
    """Results of main() by path and number of threads."""

    @cache
    def files(path: str) -> Path:
        folder = tmp_path_factory.mktemp(path)
        numbers = THREADS if path in PATHS else [1]
        needle = Path(_C.__file__).parent.parent  # the one that is tested here
        if path == "emulated":
            needle, numbers = folder, EMULATED
            with_emulated_tiles(folder)
        python_path = os.pathsep.join([str(needle), str(ROOT / "tests")])
        words = "avx512_amx" if path == "emulated" else path
        environment = {"NEEDLE_CPU_PRODUCTS": words, "PYTHONPATH": python_path}
        done = run(sys.executable, __file__, folder, *numbers, **environment)
        assert done.returncode == 0, done.stderr
        return folder

    def found(path: str, threads: int) -> dict[str, np.ndarray]:
        with np.load(files(path) / f"{threads}.npz") as file:
            return dict(file)

    return found


def of_path(results, path):
    """The path must be taken if the processor has the instructions."""
    flags = re.search(r"(?m)^flags\s*:(.*)$", Path("/proc/cpuinfo").read_text())
    missing = NEEDED[path] - set(flags[1].split() if flags else ())
    compiler = _C.build_info()["compiler"]
    if path != "blas" and int(re.search(r"(\d+)\.\d", compiler)[1]) < 10:
        missing = {f"code by {compiler}: a compiler of version 10 makes it"}
    if missing:
        pytest.skip(f"this processor has no {', '.join(sorted(missing))}")
    alone = results(path, 1)
    detail = re.sub(r"^x86-64-v\d, ", "", str(alone["detail"]))  # of a portable build
    assert detail.startswith(PATHS[path]) and (path != "blas" or "AVX" not in detail.split()[0])
    return alone


@pytest.mark.parametrize(
    "path", [pytest.param(p, marks=[pytest.mark.slow] * (p == "emulated")) for p in PATHS]
)
def test_threads_and_layouts_change_no_bit(results, path):
    """The order of the sums depends on k alone, but for few rows of float32, which a BLAS takes."""
    alone = of_path(results, path)
    for threads in (EMULATED if path == "emulated" else THREADS)[1:]:
        others = results(path, threads)
        for name, expected in alone.items():
            if name != "detail":
                np.testing.assert_array_equal(others[name], expected, name)
    for name, result in alone.items() if path != "blas" else ():
        if name.startswith("matmul") and "broadcast" not in name and "float32" not in name:
            plain = name.rsplit(" ", 2)[0] + " contiguous contiguous"
            np.testing.assert_array_equal(result, alone[plain], name)
    # Operands are bfloat16; AVX512-BF16 and AMX take denormals for zeros.
    tiny = [2.0**-10, 2.0**-140] if path in ("blas", "avx512") else [0, 0]
    expected = np.float32([np.inf, np.nan, np.nan, np.nan, *tiny])
    np.testing.assert_array_equal(alone["special"], expected)


@pytest.mark.slow
def test_other_bits_have_another_name(results):
    """Resumed runs and ranks compare this name, to see that products differ."""
    of_path(results, "avx512")  # else there is but one way
    found = {}
    assert results("avx512_other", 1)["detail"] == results("no word of these", 1)["detail"]
    for path in (*PATHS, "no word of these"):
        of = results(path, 1)
        said = str(of.pop("detail"))
        same = found.setdefault(said, of)
        for name, result in of.items():
            np.testing.assert_array_equal(result, same[name], f"{path}, {said}: {name}")
    assert len(found) > 1


if __name__ == "__main__":
    main(*sys.argv[1:])
