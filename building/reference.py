"""An extension of Griffe, which reads the docstrings for docs/api.md: of needle/ops the functions
that needle exports, a file a family, and of nn.functional those that are its own."""

from __future__ import annotations

import griffe


def functions(module: griffe.Module) -> list[str]:
    """Name those that the file defines."""
    return [name for name, member in module.members.items() if type(member) is griffe.Function]


class Calls(griffe.Extension):
    def on_package(self, *, pkg: griffe.Module, **kwargs) -> None:
        for module in pkg["ops"].modules.values():
            module.exports = [n for n in functions(module) if n in pkg["ops"].exports]
        pkg["nn.functional"].exports = functions(pkg["nn.functional"])
