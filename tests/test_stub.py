"""needle/_C.pyi says of the C core what is so: every name, every parameter, every attribute.

`python tests/test_stub.py` writes the part of the stub that comes from csrc/ops.def.
"""

import ast
import inspect

import pytest
from harness import ROOT

from needle import _C
from needle.testing.table import OPS, Op, Operand

STUB = ROOT / "needle" / "_C.pyi"
LINE = "# ---- ops ----\n"
TYPES = {"F64": "float", "I64": "int", "OPT": "NDArray | None", "IO_OPT": "NDArray | None"}


def parameter(op: Op, operand: Operand) -> str:
    kind = "Operand" if op.kind in ("EW2", "CMP") else TYPES.get(operand.mode, "NDArray")
    return f"{operand.name}: {kind}"


def declaration(op: Op) -> str:
    """`def exp(x: NDArray) -> NDArray: ...`, as ruff formats it."""
    parameters = [parameter(op, operand) for operand in op.inputs]
    outputs = len(op.outputs)
    result = ["None", "NDArray"][outputs] if outputs < 2 else ", ".join(["NDArray"] * outputs)
    result = f"tuple[{result}]" if outputs > 1 else result
    if len(result) > 80:
        result = "tuple[\n" + "    NDArray,\n" * outputs + "]"
    joined = ", ".join(parameters)
    layouts = (joined, f"\n    {joined}\n", "\n    " + ",\n    ".join(parameters) + ",\n")
    written = [f"def {op.name}({text}) -> {result}: ..." for text in layouts]
    fits = [text for text in written if max(map(len, text.split("\n"))) <= 100]
    return (fits or written[-1:])[0]


def ops_part() -> str:
    return "".join(f"{declaration(op)}\n" for op in OPS.values())


def tree() -> ast.Module:
    return ast.parse(STUB.read_text())


def declared(body: list[ast.stmt]) -> dict[str, ast.stmt]:
    kinds = (ast.ClassDef, ast.FunctionDef)
    return {node.name: node for node in body if isinstance(node, kinds)}


def parameters_of(function: ast.FunctionDef) -> list[tuple[str, str, object]]:
    """(name, kind, default), without self and cls."""
    a = function.args
    plain = [(p.arg, "positional") for p in a.posonlyargs] + [(p.arg, "plain") for p in a.args]
    defaults = [None] * (len(plain) - len(a.defaults)) + [[ast.literal_eval(d)] for d in a.defaults]
    found = [(n, kind, default) for (n, kind), default in zip(plain, defaults)]
    for p, default in zip(a.kwonlyargs, a.kw_defaults):
        found.append((p.arg, "keyword", None if default is None else [ast.literal_eval(default)]))
    return [entry for entry in found if entry[0] not in ("self", "cls")]


def parameters_of_object(function) -> list[tuple[str, str, object]]:
    kinds = {
        inspect.Parameter.POSITIONAL_ONLY: "positional",
        inspect.Parameter.POSITIONAL_OR_KEYWORD: "plain",
        inspect.Parameter.KEYWORD_ONLY: "keyword",
    }
    return [
        (p.name, kinds[p.kind], None if p.default is p.empty else [p.default])
        for p in inspect.signature(function).parameters.values()
        if p.name not in ("self", "module", "type")
    ]


def test_ops_are_those_of_ops_def():
    written = STUB.read_text().partition(LINE)[2]
    assert written == ops_part(), "write it anew: python tests/test_stub.py"


def test_every_name_of_the_module_is_declared():
    stub = {name for name in declared(tree().body) if name != "Handle"}
    assert stub == {name for name in dir(_C) if not name.startswith("_")}


def test_functions():
    names = [n for n in dir(_C) if not n.startswith("_") and not inspect.isclass(getattr(_C, n))]
    stub = declared(tree().body)
    for name in names:
        function = getattr(_C, name)
        assert parameters_of(stub[name]) == parameters_of_object(function), name
        assert function.__doc__, name


# Python gives each type these, or they serve copying and pickling.
IMPLIED = {
    "__new__", "__init__", "__repr__", "__str__", "__doc__", "__module__", "__hash__",
    "__copy__", "__deepcopy__", "__reduce__", "__delitem__", "__array_ufunc__", "__weakref__",
    "__buffer__", "__release_buffer__",  # seen from Python 3.12 on
}  # fmt: skip
NO_ORDER = {"__lt__", "__le__", "__gt__", "__ge__", "__ne__"}  # Device has == alone


SUBCLASSABLE = 1 << 10  # Py_TPFLAGS_BASETYPE
CLASSES = [n for n in dir(_C) if not n.startswith("_") and inspect.isclass(getattr(_C, n))]


@pytest.mark.parametrize("name", [*CLASSES, "Handle"])
def test_classes(name):
    kind = type(_C.array(1)._handle) if name == "Handle" else getattr(_C, name)
    node = declared(tree().body)[name]
    is_final = any(getattr(d, "id", "") == "final" for d in node.decorator_list)
    assert is_final == (not kind.__flags__ & SUBCLASSABLE)
    stub = declared(node.body)
    own = set(vars(kind)) - IMPLIED - (NO_ORDER if name == "Device" else set())
    assert set(stub) - IMPLIED == own
    if "__init__" in stub:
        assert parameters_of(stub["__init__"]) == parameters_of_object(kind)
    for member in own:
        value, node = vars(kind)[member], stub[member]
        is_property = any(getattr(d, "id", "") == "property" for d in node.decorator_list)
        assert is_property == inspect.isdatadescriptor(value), member
        if inspect.isroutine(value) or isinstance(value, classmethod):
            if type(value).__name__ == "wrapper_descriptor":
                continue  # Python's own signature of an operator
            assert parameters_of(node) == parameters_of_object(getattr(kind, member)), member


if __name__ == "__main__":
    head, line, _ = STUB.read_text().partition(LINE)
    STUB.write_text(head + line + ops_part())
