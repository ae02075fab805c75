"""A Markdown extension of the site: the examples of docstrings as code.

Markdown reads the prompt `>>>` as three quotes in each other.
"""

from __future__ import annotations

from markdown import Markdown
from markdown.extensions import Extension
from markdown.preprocessors import Preprocessor


class Fences(Preprocessor):
    def run(self, lines: list[str]) -> list[str]:
        """Put an example, from its prompt to the next empty line, between fences."""
        fenced, inside = [], ""  # an example, or a page's own fence
        for line in [*lines, ""]:
            if inside == ">>>" and not line.strip():
                fenced.append("```")
                inside = ""
            elif line.startswith("```"):
                inside = "" if inside else "```"
            elif not inside and line.startswith(">>> "):
                fenced += ["", "```pycon"]
                inside = ">>>"
            fenced.append(line)
        return fenced


class Examples(Extension):
    def extendMarkdown(self, md: Markdown) -> None:
        md.preprocessors.register(Fences(md), "examples", 100)  # before fences become code


def makeExtension(**options) -> Examples:
    return Examples(**options)
