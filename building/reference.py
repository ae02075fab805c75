"""Write the sources that the reference of the site is made of: python building/reference.py FOLDER

They are those of needle, but the examples of docstrings are fenced code, rows of ops are functions,
and `__all__` of a file of ops names its functions that needle.ops has.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# From a prompt to the next empty line, or to the end of the docstring.
EXAMPLE = re.compile(r'^( *)>>> .*\n(?:(?! *("""|$)).*\n)*', re.MULTILINE)


def fenced(text: str) -> str:
    """Put examples between fences: Markdown reads the prompt `>>>` as three quotations."""
    return EXAMPLE.sub(r"\n\1```pycon\n\g<0>\1```\n", text)


def with_exports(text: str, prefix: str, named: str | None = None) -> str:
    """Return a file with `name = row(kernel, doc, rule, ...)` and `name = composed(name, doc,
    lambda)` as functions, functions of arrays that `differentiable` makes some of Tensors with
    theirs in the signature, and with `__all__`: the rows, and the functions whose name stands in
    `named` after a prefix."""
    lines, exported = text.splitlines(keepends=True), []
    for node in reversed(ast.parse(text).body):
        if isinstance(node, ast.FunctionDef):
            is_named = named is None or f'"{prefix}.{node.name}"' in named
            exported += [node.name] * is_named
            if any("differentiable" in ast.unparse(one) for one in node.decorator_list):
                signature = slice(node.lineno - 1, node.body[0].lineno - 1)
                lines[signature] = [line.replace("NDArray", "Tensor") for line in lines[signature]]
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            maker = ast.unparse(node.value.func)
            if maker not in ("row", "composed"):
                continue
            name, (_, doc, *rules) = node.targets[0].id, node.value.args
            count = len(rules) if maker == "row" else len(rules[0].args.args)
            shown = fenced(inspect.cleandoc(doc.value) + "\n")
            made = f"def {name}({', '.join('ab'[:count])}):\n    {shown!r}\n"
            lines[node.lineno - 1 : node.end_lineno] = [made]
            exported += [name] * (name[0] != "_")
    return "".join(lines) + f"\n__all__ = {exported[::-1]}\n"


if __name__ == "__main__":
    table = (ROOT / "needle/ops/spellings.py").read_text()
    for path in (ROOT / "needle").rglob("*.py"):
        text = path.read_text()
        if path.parent.name == "ops" and path.name != "__init__.py":
            text = with_exports(text, path.stem, table)
        elif path.match("nn/functional.py"):
            text = with_exports(text, path.stem)
        target = Path(sys.argv[1], path.relative_to(ROOT))
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(fenced(text))
