"""docs/eight_gpus.md: the tables that stand behind its code are what the code prints."""

import contextlib
import io
import re

from harness import ROOT

PAGE = ROOT / "docs" / "eight_gpus.md"
SHOWN = re.compile(r"```python\n(.*?)```\n\nIt prints:\n\n```\n(.*?)```\n", re.DOTALL)


def printed():
    """(what a block of the page says that it prints, what it prints); a block sees those before."""
    names: dict = {}
    for code, said in SHOWN.findall(PAGE.read_text()):
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(code, names)
        yield said, out.getvalue()


def test_the_tables_are_what_the_code_prints():
    found = list(printed())
    assert len(found) == PAGE.read_text().count("```python") > 0
    for said, prints in found:
        assert said == prints


def test_the_memory_is_the_formula():
    size = 1_414_647_808
    rows = re.findall(r"\| (\d+) \| ([\d.]+) N \| ([\d.]+) \| ([\d.]+) \|", PAGE.read_text())
    assert len(rows) == 6
    for row in rows:
        ranks, factor, one, four = map(float, row)
        assert factor == 2 + 4 + 4 * (ranks - 1) / ranks + 12 / ranks
        assert one == round(factor * size / 2**30, 1)
        assert four == round((factor + 2 * 4) * size / 2**30, 1)
