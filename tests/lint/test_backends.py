"""The core and its backends: one table of ops, no function of it missing, devices by question."""

import re
import shutil
import sys
from pathlib import Path

import pytest
from harness import ROOT, build_copy, copy_needle, copy_of_the_tree, run

from needle import _C

pytestmark = pytest.mark.slow

STUB = """
#include "backend.h"
static nd_status count(int *devices) { *devices = 0; return ND_OK; }
const nd_backend *needle_backend(void) {
    static nd_backend backend;
    backend.abi = nd_abi();
    backend.device_count = count;
    return &backend;
}
"""


@pytest.mark.parametrize(
    "change, said",
    [
        ((b"", b""), ["CUDA found no device"]),
        ((b"x * y)", b"y * x)"), ["_cuda.so", "another csrc/ops.def", "make lib"]),
        ((b'IN(targets, "N", i4)', b'IN(targets, "N", i8)'), ["_cuda.so", "another csrc/ops.def"]),
    ],
    ids=["same table", "other formula", "other operand"],
)
def test_a_backend_of_another_table_is_refused_by_name(tmp_path, change, said):
    copy_needle(tmp_path)
    for header in ("needle.h", "backend.h", "ops.def"):
        shutil.copy(ROOT / "csrc" / header, tmp_path)
    table = (tmp_path / "ops.def").read_bytes()
    assert change[0] in table
    (tmp_path / "ops.def").write_bytes(table.replace(*change) if change[0] else table)
    (tmp_path / "stub.c").write_text(STUB)
    library = tmp_path / "needle/_cuda.so"
    made = run("cc", "-std=gnu17", "-shared", "-fPIC", "stub.c", "-o", library, cwd=tmp_path)
    assert made.returncode == 0, made.stderr
    code = "import needle; print(needle.cuda().reason())"
    done = run(sys.executable, "-c", code, cwd=tmp_path, PYTHONPATH=tmp_path)
    assert done.returncode == 0, done.stderr
    for part in said:
        assert part in done.stdout


def test_cuda_that_is_not_there_says_how_to_ask_for_it(tmp_path):
    copy_needle(tmp_path)
    code = "import needle; print(needle.cuda().reason())"
    done = run(sys.executable, "-c", code, cwd=tmp_path, PYTHONPATH=tmp_path)
    where = f"(there is no {tmp_path}/needle/_cuda.so)"
    assert done.stdout.startswith(f"needle was built without CUDA {where}"), done.stderr
    assert "a CUDA toolkit without a driver is enough for: NEEDLE_CUDA=1 pip" in done.stdout
    assert (" when it was built;" in done.stdout) == (not _C.build_info()["cuda"])


def test_a_function_that_the_cpu_lacks_fails_the_build_by_name(monkeypatch):
    monkeypatch.setenv("CFLAGS", "-O0")  # the copy is compiled, all of it
    with copy_of_the_tree() as tree:
        for made in (tree / "needle").glob("_C*.so"):
            made.unlink()
        source = tree / "csrc/cpu/copy.c"
        source.write_text(source.read_text().replace(" cpu_fill(", " cpu_absent("))
        built = build_copy(tree)
        said = built.stdout + built.stderr
        assert built.returncode != 0 and "cpu_fill" in said
        assert said.strip().splitlines()[-1].startswith("needle: error: needle does not"), said
        assert not list((tree / "needle").glob("_C*.so"))


def test_devices_have_capabilities():
    """Python asks a device; it compares no text of one."""
    host = _C.cpu()
    assert (host.name, host.index, host.is_host, host.records_graphs) == ("cpu", 0, True, False)
    assert not _C.cuda().is_host and _C.cuda().records_graphs == _C.cuda().enabled()
    assert not host.runs_kernels and _C.cuda().runs_kernels == _C.cuda().enabled()
    other = _C.cpu(1)
    assert str(other) == "cpu(1)" and other != host and not other.enabled()
    with pytest.raises(RuntimeError, match=r"cpu\(1\): no such device"):
        _C.empty((2,), device=other)
    for folder in ("needle", "apps", "benchmarks"):
        for path in Path(ROOT, folder).rglob("*.py"):
            assert '"cpu()"' not in path.read_text(), path


def test_every_kernel_waits_for_the_work_before_it():
    """A launch may come onto the GPU before that work is done (cuda_launch). With `ahead` it reads
    first what the work before does not write."""
    for path in sorted((ROOT / "cuda").glob("*.cu")):
        text = path.read_text()
        bodies = re.findall(r"__global__[^;{]*\{\s*([^;]*;)", text)
        assert len(bodies) == text.count("__global__"), path.name
        late = [body for body in bodies if re.fullmatch(r"await_previous\((s\.)?ahead\);", body)]
        assert set(bodies) - set(late) <= {"await_previous();"}, path.name
        again = re.findall(r"if \((?:s\.)?ahead\) \{\s+await_previous\(\);", text)
        assert len(again) == len(late), path.name
