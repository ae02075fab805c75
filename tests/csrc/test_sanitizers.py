"""`make asan` sees a fault beside, past and after an array of the core, and one in C."""

import os
import shlex
import subprocess

import pytest
from harness import SANITIZED, python

from needle import _C

pytestmark = pytest.mark.skipif(not SANITIZED, reason="only make asan has the sanitizers")

INJECTED = """
import ctypes
from needle import _C
array = _C.empty(({size},), "uint8")
address = array._handle.ptr()
ctypes.memset(address, 0, {size})
{free}
ctypes.memset(address + {at}, 0, 1)
"""


@pytest.mark.parametrize("fault", ["heap-buffer-overflow", "use-after-poison", "use-after-free"])
def test_a_byte_that_is_no_array_s(fault, size=31):
    at = {"heap-buffer-overflow": size, "use-after-poison": -1, "use-after-free": size - 1}[fault]
    free = "del array" if fault == "use-after-free" else ""
    done = python(INJECTED.format(size=size, at=at, free=free))
    assert done.returncode != 0 and fault in done.stderr, done.stderr
    assert python(INJECTED.format(size=size, at=0, free="")).returncode == 0


def test_a_signed_overflow(tmp_path):
    (tmp_path / "next.c").write_text("int next(int x); int next(int x) { return x + 1; }\n")
    command = ["cc", *shlex.split(os.environ["CFLAGS"]), "-shared", "-fPIC", "next.c"]
    subprocess.run([*command, "-o", "next.so"], cwd=tmp_path, check=True)
    done = python(f"import ctypes; ctypes.CDLL('{tmp_path}/next.so').next(2**31 - 1)")
    assert done.returncode != 0 and "signed integer overflow" in done.stderr, done.stderr


def test_products_go_through_the_sanitizers():
    assert _C.build_info()["blas"] == "built-in"
