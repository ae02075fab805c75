"""The examples in needle's docstrings run and print what they say."""

import doctest
import importlib
from pathlib import Path

import numpy as np
import pytest

import needle as ndl
from needle import backend_ndarray, nn, optim

PACKAGE = Path(ndl.__file__).resolve().parent
# Three are for packages that may not be there; __main__.py is no module to import.
NOT_HERE = "__main__.py", "lm_eval.py", "mpi.py", "torch_worker.py"
FILES = [p for p in sorted(PACKAGE.rglob("*.py")) if p.name not in NOT_HERE]


def module_of(path: Path):
    names = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return importlib.import_module(".".join(names).removesuffix(".__init__"))


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.relative_to(PACKAGE).as_posix())
def test_examples(path, tmp_path):
    """Examples see ndl, nd, nn, optim, np, and an empty `folder`."""
    names = {"ndl": ndl, "nd": backend_ndarray, "nn": nn, "optim": optim, "np": np}
    module = module_of(path)
    before = np.random.get_state()
    try:
        for test in doctest.DocTestFinder(exclude_empty=True).find(module, globs={}):
            test.globs = {**names, "folder": tmp_path}
            report: list[str] = []
            failed, _ = doctest.DocTestRunner(verbose=False).run(test, out=report.append)
            assert not failed, "".join(report)
    finally:
        np.random.set_state(before)
