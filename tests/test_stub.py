"""The stubs that the build writes: current, and of every name with its types."""

import ast
import inspect

import pytest
from harness import ROOT

from building import stubs
from needle import _C, Tensor, ops


def declared(body: list[ast.stmt]) -> dict[str, ast.stmt]:
    return {node.name: node for node in body if isinstance(node, (ast.ClassDef, ast.FunctionDef))}


@pytest.mark.parametrize("name", stubs.STUBS)
def test_stubs_are_current(name):
    text = (ROOT / "needle" / name).read_text()
    assert text == "".join(stubs.STUBS[name]()), "make lib writes it anew"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            untyped = [p.arg for p in given if p.annotation is None]
            assert set(untyped) <= {"self", "cls"} and node.returns is not None, node.name


def test_stub_of_the_core_has_every_name():
    names = declared(ast.parse("".join(stubs.core())).body)
    assert names.keys() - {"Handle"} == {name for name in dir(_C) if name[0] != "_"}
    for name, node in names.items():
        kind = type(_C.array(1)._handle) if name == "Handle" else getattr(_C, name)
        if inspect.isclass(kind) and not issubclass(kind, Exception):
            own = {n for n, value in vars(kind).items() if value is not None}
            own = {n for n in own if not {n, f"{name}.{n}"} & stubs.IMPLIED}
            assert declared(node.body).keys() - {"__init__"} == own - {"__init__"}, name


def test_stub_of_methods_has_every_method_and_its_words():
    body = declared(ast.parse("".join(stubs.methods())).body)["Operators"].body
    names = declared(body)
    assert {n for n in dir(Tensor) if n in vars(Tensor.__mro__[2])} - names.keys() <= {
        "__doc__", "__module__", "__parameters__", "__orig_bases__", "__dict__", "__weakref__",
        "__annotations__", "__hash__", *Tensor.__mro__[2].__annotations__,
    }  # fmt: skip
    words = {p.arg for p in [*names["sum"].args.args, *names["sum"].args.kwonlyargs]}
    assert {"self", "axes", "axis", "dim", "keepdims", "keepdim"} <= words
    assert "overload" in ast.unparse(names["gather"])


def test_stub_of_functions_has_every_name():
    tree = ast.parse("".join(stubs.functions()))
    imported = {a.name for n in tree.body if isinstance(n, ast.ImportFrom) for a in n.names}
    assert set(ops.__all__) <= {*declared(tree.body), *imported}
