"""The stubs that the build writes: current, typed, and of every name."""

import ast

import pytest
from harness import ROOT

from building import stubs
from needle import _C, ops
from needle.autograd.operators import Operators

CLASSES = {kind.__name__: kind for kind in vars(_C).values() if isinstance(kind, type)}
CLASSES |= {"Handle": type(_C.array(1)._handle), "Operators": Operators}
NAMES = {
    "_C.pyi": {"Handle", *(name for name in dir(_C) if name[0] != "_")},
    "autograd/operators.pyi": {"Operators", "Size"},
    "ops/__init__.pyi": set(ops.__all__),
}


class Plain:
    """A class has other attributes than one that type() makes: since Python 3.13 its line."""


# Of every class of Python, or of a generic one.
PLAIN = {*vars(Plain), "__orig_bases__", "__parameters__", "__hash__", "__init__"}
PLAIN |= {"__annotations__", "__annotate_func__", "__annotations_cache__"}


def declared(body: list[ast.stmt]) -> dict[str, ast.stmt]:
    """The classes, functions, variables and names imported `as` themselves."""
    made = {node.name: node for node in body if isinstance(node, (ast.ClassDef, ast.FunctionDef))}
    made |= {node.target.id: node for node in body if isinstance(node, ast.AnnAssign)}
    imports = [alias for node in body if isinstance(node, ast.ImportFrom) for alias in node.names]
    return made | {alias.name: alias for alias in imports if alias.asname}


@pytest.mark.parametrize("name", stubs.STUBS)
def test_stub_is_current_typed_and_of_every_name(name):
    text = (ROOT / "needle" / name).read_text()
    assert text == "".join(stubs.STUBS[name]()), "make lib writes it anew"
    names = declared(ast.parse(text).body)
    assert NAMES[name] <= names.keys()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            untyped = [p.arg for p in given if p.annotation is None]
            assert set(untyped) <= {"self", "cls"} and node.returns is not None, node.name
        elif isinstance(node, ast.ClassDef) and node.name in CLASSES.keys() & NAMES[name]:
            kind = CLASSES[node.name]
            members = {n for n, value in vars(kind).items() if value is not None}
            members |= {*getattr(kind, "__annotations__", ())}
            members = {n for n in members if not {n, f"{node.name}.{n}"} & stubs.IMPLIED}
            assert members - PLAIN == declared(node.body).keys() - PLAIN, node.name


def test_stub_of_methods_has_the_words_of_each():
    body = declared(ast.parse("".join(stubs.methods())).body)["Operators"].body
    names = declared(body)
    words = {p.arg for p in [*names["sum"].args.args, *names["sum"].args.kwonlyargs]}
    assert {"self", "axes", "axis", "dim", "keepdims", "keepdim"} <= words
    assert "overload" in ast.unparse(names["gather"])
