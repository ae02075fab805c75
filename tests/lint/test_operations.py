"""docs/operations.md lists every function of needle.ops, and names that are not here. Its tables
are written by `python tests/lint/test_operations.py`; the test compares."""

import inspect
import re
from pathlib import Path

from needle import ops
from needle.ops import instead
from needle.ops.spellings import SPELLINGS, Spelling

PAGE = Path(__file__).resolve().parents[2] / "docs" / "operations.md"
NOT_OPS = {"convert_to_block_mask", "ring_chunks"}
UNKNOWN = Spelling("", "", "-", "-", "")


def page() -> str:
    """The page with its tables of functions and of absent names written anew."""
    lines, absent = [], []
    for name in ops.__all__:
        if not inspect.isroutine(getattr(ops, name)) or name in NOT_OPS:
            continue
        spelling = SPELLINGS.get(name, UNKNOWN)
        torch, numpy = (name if x == "=" else x for x in (spelling.torch, spelling.numpy))
        gradient = "no" if "constant" in spelling.where else "yes"
        devices = "CPU, CUDA" + (" (host)" if "host" in spelling.where else "")
        lines.append(f"| `{name}` | {torch} | {numpy} | {gradient} | {devices} |\n")
    for names, hint in instead.INSTEAD.items():
        absent.append(f"| {', '.join(f'`{name}`' for name in names.split())} | {hint} |\n")
    text = PAGE.read_text()
    for head, rows in ("| needle | PyTorch |", lines), ("| PyTorch | instead |", absent):
        table = rf"(^{re.escape(head)}.*\n\|-.*\n)(\|.*\n)*"
        text = re.sub(table, lambda m, rows=rows: m[1] + "".join(rows), text, flags=re.M)
    return text


def test_the_page_of_operations_is_current():
    assert PAGE.read_text() == page(), "write it anew: python tests/lint/test_operations.py"


if __name__ == "__main__":
    PAGE.write_text(page())
