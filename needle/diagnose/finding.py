"""A finding: the result of one check, as a line and as JSON."""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class Finding:
    """level: ok; note, which needs no repair; failed. where: cuda(1), GPU 0, run, ... what: the
    check. remedy: the repair of a failure. op: the op of ops.def in which it failed, if any."""

    level: str
    where: str
    what: str
    text: str
    remedy: str = ""
    op: str | None = None

    @property
    def has_failed(self) -> bool:
        return self.level == "failed"

    def line(self) -> str:
        """test cuda()    FAILED: op gelu: ... To mend it: ..."""
        label = f"test {self.where}" if self.where.endswith(")") else self.where
        level = self.level.upper() if self.has_failed else self.level
        is_named = self.op is None or self.op in self.text
        op = f"op {self.op}: " if self.has_failed and not is_named else ""
        mend = f". To mend it: {self.remedy}" if self.remedy else ""
        return f"{label:<14} {level}: {op}{self.text}{mend}"

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)
