"""A debug build (cuda/checks.cuh) on a GPU: a fault names op, operand and element, in a process of
its own, which the trap ends. NEEDLE_TEST_BUILD is the folder of a build with NEEDLE_DEBUG=1."""

import os
import re
import subprocess
import sys

import pytest
from harness import ROOT, naming, run

PRELUDE = """
import numpy as np
import needle as ndl
from needle import _C
device = ndl.cuda()
y = _C.array(np.full(1000, 7, np.float32), device=device)
"""


def on_gpu(code: str) -> subprocess.CompletedProcess:
    folder = os.environ.get("NEEDLE_TEST_BUILD", str(ROOT))
    return run(sys.executable, "-c", PRELUDE + code, cwd=folder, PYTHONPATH=folder)


DEBUG_CALL = """
if not _C.build_info()["debug"]:
    raise SystemExit("no debug build")
ids = _C.array(np.array([1, -0, 60], np.int32), dtype="int32", device=device)
good = _C.array(np.array([1, 0, 49], np.int32), dtype="int32", device=device)
w = _C.array(np.arange(150, dtype=np.float32).reshape(50, 3), device=device)
assert (_C.embedding_fwd(good, w).numpy() == w.numpy()[[1, 0, 49]]).all()
"""


@pytest.mark.cuda
def test_debug_build_names_op_operand_and_element():
    for call, said in (
        ("_C.embedding_fwd(ids, w)", "embedding_fwd: .*: ids"),
        ("_C.embedding_bwd(ids, y[:9].reshape((3, 3)), w)", "embedding_bwd: .*: ids"),
        ("_C.cross_entropy_fwd(y[:150].reshape((3, 50)), ids)", "cross_entropy_fwd: .*: targets"),
    ):
        with naming(call):
            done = on_gpu(DEBUG_CALL + call)
            if "no debug build" in done.stderr:
                pytest.skip("not a debug build")
            assert done.returncode == 75, done.stderr
            said += r": element 2: index 60 is outside of 50 \(block .*cuda/\w+\.cu:\d+\)"
            assert re.search(f"CudaFatalError: {said}", done.stderr), done.stderr
