"""An extension of Griffe, which reads the docstrings for docs/api.md: of needle/ops the functions
that the table of names has, a file a family, and of nn.functional those that are its own."""

from __future__ import annotations

import ast

import griffe


def named(tables: griffe.Module) -> set[str]:
    """Return the functions that the table of needle/ops/spellings.py names, as FILE.FUNCTION."""
    return {row[1] for row in ast.literal_eval(str(tables["TABLE"].value))}


def functions(module: griffe.Module) -> list[str]:
    """Name those that the file defines."""
    return [name for name, member in module.members.items() if type(member) is griffe.Function]


def of_row(name: str, member: griffe.Object | griffe.Alias) -> griffe.Function | None:
    """Return the function that `name = row(kernel, doc, rule, ...)` makes, None for other names."""
    value = member.value if type(member) is griffe.Attribute else None
    if not isinstance(value, griffe.ExprCall) or str(value.function) != "row":
        return None
    _, doc, *rules = value.arguments
    kind = griffe.ParameterKind.positional_or_keyword
    operands = [griffe.Parameter(operand, kind=kind) for operand in "ab"[: len(rules)]]
    text = griffe.Docstring(ast.literal_eval(str(doc)))
    return griffe.Function(name, parameters=griffe.Parameters(*operands), docstring=text)


class Calls(griffe.Extension):
    def on_package(self, *, pkg: griffe.Module, **kwargs) -> None:
        meant = named(pkg["ops.spellings"])
        for module in pkg["ops"].members.values():
            if type(module) is not griffe.Module:
                continue
            for name, member in [*module.members.items()]:
                made = of_row(name, member)
                if made is not None and name[0] != "_":
                    module.set_member(name, made)
                    meant.add(f"{module.name}.{name}")
            module.exports = [n for n in functions(module) if f"{module.name}.{n}" in meant]
        pkg["nn.functional"].exports = functions(pkg["nn.functional"])
