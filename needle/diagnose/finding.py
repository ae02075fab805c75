"""A finding: what one check saw, for people and as JSON."""

from __future__ import annotations

import dataclasses
from typing import Any

LEVELS = ("ok", "note", "failed")


@dataclasses.dataclass(frozen=True)
class Finding:
    """level: ok; note, of something to know that needs no mending; failed. where: cuda(1), GPU 0,
    run, ... what: the check. remedy: what to do about a failure. op: the op of ops.def that it
    happened in, where there is one."""

    level: str
    where: str
    what: str
    text: str
    remedy: str = ""
    op: str | None = None

    @property
    def has_failed(self) -> bool:
        return self.level == "failed"

    def sentence(self) -> str:
        """FAILED: op gelu: ... To mend it: ..."""
        word = self.level.upper() if self.has_failed else self.level
        is_named = self.op is None or self.op in self.text
        op = "" if is_named or not self.has_failed else f"op {self.op}: "
        mend = f". To mend it: {self.remedy}" if self.remedy else ""
        return f"{word}: {op}{self.text}{mend}"

    def line(self) -> str:
        label = f"test {self.where}" if self.where.endswith(")") else self.where
        return f"{label:<14} {self.sentence()}"

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)
