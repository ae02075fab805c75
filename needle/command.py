"""The command line: the programs of the command `needle`, types of arguments, lines that fit.

needle train --model pythia-14m --data texts/       is python apps/train_pythia.py ...
needle data inspect tokens.bin                      is python -m needle.data inspect ...
"""

from __future__ import annotations

import argparse
import difflib
import functools
import math
import pkgutil
import re
import runpy
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from needle._C import build_info
from needle.files import described, named, printable
from needle.processes import program

MOST = 2**63 - 1
COLUMNS = 80  # of a line


def wrapped(text: str, indent: int = 2) -> str:
    """Break lines between words, so that they fit a terminal; a path stays whole, and control
    characters of text from outside are written as escapes. indent: of what follows a break."""
    whole_words = {"break_long_words": False, "break_on_hyphens": False}
    fill = textwrap.TextWrapper(COLUMNS, subsequent_indent=" " * indent, **whole_words).fill
    return "\n".join(map(fill, printable(text).split("\n")))


def argument_type(read: Callable[[str], Any]) -> Callable[[str], Any]:
    """The type of values that `read` takes; its ValueError is the message."""

    def parse(text: str) -> Any:
        try:
            return read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parse


path = argument_type(named)  # of files and folders


def path_name(text: str) -> str:
    """The type of paths that are kept as they are written, as in config.json."""
    path(text)
    return text


def whole(low: int, high: int = MOST) -> Callable[[str], int]:
    """The type of whole numbers from `low` to `high`."""
    return _between(int, "a whole number", low, high, False)


def number(low: float, high: float = math.inf, above: bool = False) -> Callable[[str], float]:
    """The type of finite numbers from `low`, or `above` it, to `high`."""
    return _between(float, "a number", low, high, above)


def _between(read: Callable[[str], Any], noun: str, low: float, high: float, above: bool) -> Any:
    least = f"above {low}" if above else f"of {low} or more"

    def parse(text: str) -> Any:
        try:
            value = read(text)
        except ValueError:
            value = math.nan
        if not low <= value <= high or value == math.inf or (above and value == low):
            limit = f"of at most {high}" if value > high else least
            raise argparse.ArgumentTypeError(f"must be {noun} {limit}, not {text!r}")
        return value

    return parse


def flag_words(name: str, value: object) -> list[str]:
    """Return the words of a flag and its value, which may look like a flag itself."""
    text = str(value)
    return [f"{name}={text}"] if text.startswith("-") else [name, text]


def reporting(name: str) -> Callable[[Callable[[Any], int]], Callable[..., int]]:
    """Have a `main` say its errors that users meet in a line, and return the exit code: 1, and 130
    after a Ctrl-C. name: of the command."""

    def decorate(main: Callable[[Any], int]) -> Callable[..., int]:
        @functools.wraps(main)
        def run(argv: Sequence[str] | None = None) -> int:
            try:
                return main(argv)
            except BrokenPipeError:  # which ends a program, see processes.program
                raise
            except (ValueError, OSError, RuntimeError) as error:
                print(f"{name}: {described(error)}", file=sys.stderr)
                return 1
            except KeyboardInterrupt:
                print(f"{name}: interrupted", file=sys.stderr)
                return 130

        return run

    return decorate


class Parser(argparse.ArgumentParser):
    """A parser whose errors, which quote the command line, can be printed, and name the flag that
    is like an unknown one."""

    def error(self, message: str) -> NoReturn:
        unknown = re.match("unrecognized arguments: (--[^ =]+)", message)
        known = self._option_string_actions if unknown else ()
        near = difflib.get_close_matches(unknown[1], known, 1) if unknown else []
        super().error(printable(f"{message}; there is {near[0]}" if near else message))


# ---- the command needle --------------------------------------------------------------------------

# word: the program, and what it does
COMMANDS: dict[str, tuple[str, str]] = {
    "train": ("apps/train_pythia.py", "train a model, or resume a run"),
    "replay": ("needle.training.replay.bank:main", "repeat a run from a step on, with edits"),
    "verify": ("needle.training.replay.verify:main", "repeat steps of a run, compare the bits"),
    "suite": ("needle.training.replay.suite:main", "train a list of models, to be checked"),
    "compare": ("needle.training.replay.compare:main", "differences of losses and weights"),
    "generate": ("apps/generate.py", "continue a prompt"),
    "evaluate": ("needle.training.evaluate:main", "loss, perplexity and bits per byte on text"),
    "lm_eval": ("needle.training.lm_eval:main", "the LM evaluation harness on a needle model"),
    "export": ("needle.training.export:main", "write a folder that transformers opens"),
    "import": ("needle.training.export:main", "read a GPT-NeoX folder of transformers"),
    "data": ("needle.data.__main__:main", "prepare text as tokens, inspect and view them"),
    "plot": ("needle.training.plot:main", "draw the loss of one run or several"),
    "diagnose": ("needle.diagnose.__main__:main", "examine this machine, its GPUs, a run"),
    "serve": ("needle.kernels.__main__:main", "compile, check, time kernels over HTTP"),
    "supervise": ("needle.training.supervise:main", "restart a command after faults and hangs"),
}
SAME_WORD = "export", "import"  # whose program reads it too


def find(name: str) -> Path:
    """Return the file of a program of apps/, in the installed package or in the checkout."""
    package = Path(__file__).resolve().parent
    return next(p for p in (package / name, package.parent / name) if p.exists())


def usage() -> str:
    rows = "\n".join(f"  {word:10} {about}" for word, (_, about) in COMMANDS.items())
    return (
        f"needle {build_info()['version']}: train Pythia language models\n\n"
        f"  needle COMMAND [--help] ...\n\n{rows}"
    )


def main(argv: list[str] | None = None) -> int:
    """Run `needle`. Return its exit code."""
    return program(lambda: run(argv))


def run(argv: list[str] | None) -> int:
    """Run the program of the first word with the words after it. Programs exit by themselves."""
    word, *rest = (sys.argv[1:] if argv is None else argv) or ["--help"]
    if word in ("-h", "--help", "help"):
        print(usage())
        return 0
    if word in ("-V", "--version"):
        print(f"needle {build_info()['version']}")
        return 0
    if word not in COMMANDS:
        near = ", ".join(difflib.get_close_matches(word, COMMANDS, 2) or COMMANDS)
        print(f"needle: no command {word!r}; there is {near} (needle --help)", file=sys.stderr)
        return 2
    name, about = COMMANDS[word]
    sys.argv[1:] = [word, *rest] if word in SAME_WORD else rest
    if name.startswith("apps/"):
        sys.argv[0] = str(find(name))
        runpy.run_path(sys.argv[0], run_name="__main__")
        return 0
    try:
        main_of_program = pkgutil.resolve_name(name)
    except ImportError as error:  # a package that it needs, which the message says how to get
        print(f"needle {word}, {about}: {error}", file=sys.stderr)
        return 1
    return main_of_program()
