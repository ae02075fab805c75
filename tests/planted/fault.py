"""A fault: a text of one file, which stands there once, and what it becomes."""

from dataclasses import dataclass
from pathlib import Path


class ListError(Exception):
    """The list of faults does not fit the tree any more."""


@dataclass(frozen=True)
class Fault:
    """`text`, which stands once in `file`, becomes `into`. `tests` are pytest's words: those that
    see it. `lives` says why none does, where none does."""

    file: str
    text: str
    into: str
    tests: str
    lives: str = ""

    def plant(self, root: Path) -> int:
        """The line where it was planted."""
        path = root / self.file
        source = path.read_text()
        if source.count(self.text) != 1:
            raise ListError(
                f"{self.file} holds {source.count(self.text)} times, not once, the text\n"
                f"{self.text}\nof a planted fault: put another in tests/planted/"
            )
        path.write_text(source.replace(self.text, self.into))
        return source[: source.index(self.text)].count("\n") + 1
