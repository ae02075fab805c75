"""Every op is whole: an entry of csrc/ops.def has its functions and its test case, a differentiable
op is exported and has its gradient case. Each message names the file to edit. (The stub of the
table's callables is tests/test_stub.py's.)"""

import importlib
import inspect
import pkgutil
import re

import numpy as np
import pytest
from gradients import GRADIENTS
from harness import naming
from sources import code, files, name

from needle import Tensor, ops
from needle.autograd import Op
from needle.ops.broadcast import Ruled
from needle.ops.spellings import SPELLINGS
from needle.testing import CASES, COMPARISONS, ELEMENTWISE, OPS, REDUCTIONS

# They copy, without arithmetic: tests/csrc/test_ops.py has them between all dtypes and layouts.
COPIES = {"assign", "fill"}
# Gradients are written with them; each gives a Tensor, and none is an op.
# Gradients of FP8 are in tests/ops/test_fp8.py.
ROUNDED = {"AttentionMLPFP8", "LinearCrossEntropyFP8", "NormAttentionMLPFP8"}
HELPERS = {"Ruled", "reduced_to", "spread", "const", "as_floats", "beside", "of_products"}
# Their classes are ops, with gradient cases by ruled(); users call other functions.
HELPERS |= {"keep", "place_item", "select_places", "add_at_places"}


@pytest.mark.parametrize("prefix, folder", [("cpu", "csrc/cpu"), ("cuda", "cuda")])
def test_each_op_of_the_table_has_one_function(prefix, folder):
    """Written out for an OP; for the others it follows from the formula."""
    pattern = re.compile(rf"^[^\n;#]*\b{prefix}_(\w+)\s*\([^;{{]*\)\s*\{{", re.MULTILINE)
    sources = files(f"{folder}/*.c*")
    written = [(op, name(path)) for path in sources for op in pattern.findall(code(path))]
    for op, entry in OPS.items():
        found = [path for defined, path in written if defined == op]
        if entry.kind == "OP":
            assert found, f"{folder}/ lacks {prefix}_{op}: write it in the file of its family"
            assert len(found) == 1, f"{prefix}_{op} is defined more than once: {found}"
        else:
            assert not found, f"csrc/ops.def gives {prefix}_{op}, and {found} has it by hand too"


def test_each_op_of_the_table_has_a_test_case():
    formulas = {*ELEMENTWISE, *COMPARISONS, *REDUCTIONS}
    structured = {case.op for case in CASES}
    for op, entry in OPS.items():
        if op not in COPIES:
            has = structured if entry.kind == "OP" else formulas
            assert op in has, (
                f"needle/testing/ has no inputs and no reference of {op}: {entry.kind}"
            )
    strange = (formulas | structured) - OPS.keys()
    assert not strange, f"csrc/ops.def has no {sorted(strange)}, which needle/testing/ tests"


def defined() -> dict[str, str]:
    """Return {op: file} of the differentiable ops, classes or functions, in needle/ops."""
    found = {}
    for module in pkgutil.iter_modules(ops.__path__, "needle.ops."):
        for op, value in vars(importlib.import_module(module.name)).items():
            if op[0] == "_" or getattr(value, "__module__", "") != module.name or op in HELPERS:
                continue
            result = getattr(value, "__annotations__", {}).get("return")
            is_class = inspect.isclass(value) and issubclass(value, Op)
            if is_class or inspect.isfunction(value) and result in ("Tensor", "TensorTuple"):
                found[op] = module.name.replace(".", "/") + ".py"
    return found


def ruled() -> dict[str, str]:
    """Return {op: file} of the classes that `differentiable` made."""
    kinds = [kind for kind in Ruled.__subclasses__() if "function" in vars(kind)]
    return {kind.__name__: inspect.getsourcefile(kind.function) for kind in kinds}


def test_each_differentiable_op_is_exported():
    for op in defined():
        with naming(op):
            assert op in ops.__all__, (
                f"needle/ops/__init__.py does not export {op} of {defined()[op]}"
            )


def test_each_differentiable_op_has_a_gradient_case():
    """A function is called by one; a class stands in the graph of one, or of its gradient."""
    met = set()

    class Watched:
        def __getattr__(self, op):
            met.add(op)
            return getattr(ops, op)

    def walk(tensor):
        if tensor is not None and tensor.op is not None:
            met.add(type(tensor.op).__name__)
            for operand in tensor.inputs:
                walk(operand)

    for case in GRADIENTS:
        operands = [Tensor(make(np.random.default_rng(0))) for make in case.inputs]
        result = case.op(Watched(), *operands)
        result.backward(Tensor(np.ones(result.shape)))
        for tensor in (result, *(operand.grad for operand in operands)):
            walk(tensor)
    lacking = {op: path for op, path in (defined() | ruled()).items() if op not in met}
    constant = {op for op, spelling in SPELLINGS.items() if "constant" in spelling.where}
    skipped = {*constant, *ROUNDED, "set_item"}
    lacking = {op: path for op, path in lacking.items() if op not in skipped}
    assert not lacking, f"tests/gradients.py has no case of {lacking}"
