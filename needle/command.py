"""The command `needle`, also `python -m needle`: each word runs a program of its own.

needle train --model pythia-14m --data texts/       is python apps/train_pythia.py ...
needle data inspect tokens.bin                      is python -m needle.data inspect ...
"""

from __future__ import annotations

import difflib
import pkgutil
import runpy
import sys
from pathlib import Path

from needle._C import build_info
from needle.processes import program

# word: the program, the words that it gets first, and what it does
COMMANDS: dict[str, tuple[str, tuple[str, ...], str]] = {
    "train": ("apps/train_pythia.py", (), "train a model, or resume a run"),
    "generate": ("apps/generate.py", (), "continue a prompt"),
    "evaluate": ("needle.training.evaluate:main", (), "loss, perplexity and bits per byte on text"),
    "lm_eval": ("needle.training.lm_eval:main", (), "the LM evaluation harness on a needle model"),
    "export": ("needle.hf.__main__:main", ("export",), "write a folder that transformers opens"),
    "import": ("needle.hf.__main__:main", ("import",), "read a GPT-NeoX folder of transformers"),
    "data": ("needle.data.__main__:main", (), "prepare text as tokens, inspect and view them"),
    "plot": ("needle.training.plot:main", (), "draw the loss of one run or several"),
    "diagnose": ("needle.diagnose.__main__:main", (), "examine this machine, its GPUs, a run"),
    "serve": ("needle.kernels.__main__:main", ("serve",), "compile, check, time kernels over HTTP"),
    "supervise": ("needle.training.supervise:main", (), "restart a command after faults and hangs"),
}


def find(name: str) -> Path:
    """Return the file of a program of apps/, in the installed package or in the checkout."""
    package = Path(__file__).resolve().parent
    return next(p for p in (package / name, package.parent / name) if p.exists())


def usage() -> str:
    rows = "\n".join(f"  {word:10} {about}" for word, (_, _, about) in COMMANDS.items())
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
        near = difflib.get_close_matches(word, COMMANDS, 2)
        hint = f"; there is {' and '.join(near)}" if near else f"; there are {', '.join(COMMANDS)}"
        print(f"needle: no command {word!r}{hint} (needle --help)", file=sys.stderr)
        return 2
    name, first, _ = COMMANDS[word]
    sys.argv[1:] = [*first, *rest]
    if name.startswith("apps/"):
        sys.argv[0] = str(find(name))
        runpy.run_path(sys.argv[0], run_name="__main__")
        return 0
    try:
        main_of_program = pkgutil.resolve_name(name)
    except ImportError as error:  # a package that it needs, which the message says how to get
        print(f"needle {word}: {error}", file=sys.stderr)
        return 1
    return main_of_program()
