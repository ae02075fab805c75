"""tests/conftest.py: a GPU that must be there is asked for."""

import os
import sys

import pytest
from harness import ROOT, run


@pytest.mark.parametrize("words", [(), ("-n", "1")], ids=["one process", "workers"])
def test_missing_gpu_that_is_required_is_named(words, tmp_path):
    """In one process and by workers, with the conftest.py of tests/."""
    if words:
        pytest.importorskip("xdist")
    (tmp_path / "test_it.py").write_text("def test_it():\n    pass\n")
    paths = [str(ROOT), str(ROOT / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])]
    hidden = {"CUDA_VISIBLE_DEVICES": "", "NEEDLE_REQUIRE_CUDA": "1"}
    command = sys.executable, "-m", "pytest", "-p", "conftest", "-p", "no:cacheprovider", *words
    done = run(*command, cwd=tmp_path, PYTHONPATH=os.pathsep.join(paths), **hidden)
    assert done.returncode != 0 and "NEEDLE_REQUIRE_CUDA=1, but " in done.stdout + done.stderr
