#!/usr/bin/env python3
"""Continues a prompt from a checkpoint or a folder of transformers, word by word.

needle generate runs/tiny --prompt "import os" --temperature 0.8 --top-k 50
"""

from __future__ import annotations

import sys
from pathlib import Path

if (Path(__file__).resolve().parent.parent / "checkout.py").exists():
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    import checkout

    checkout.choose()

from needle.arguments import Defaults, Parser, rows
from needle.backend_ndarray import FLOAT_DTYPES, choose_device
from needle.data import load_tokenizer
from needle.files import described, printable
from needle.generation import stream_text
from needle.models.registry import IMPORT, imported
from needle.processes import program
from needle.training import flags
from needle.training.evaluate import load_model

TABLE = """
--prompt PROMPT  '-' reads it from standard input
--max-new-tokens N  tokens to write at most; the end of a text ends it earlier
--temperature X  0: always the likeliest token; above 1: bolder
--top-k K  choose among the K likeliest tokens only
--top-p P  choose among the likeliest tokens that have probability P together
--repetition-penalty X  above 1: tokens that are there already come less readily
--stop TEXT  end before this text; may be given several times
--seed N  the same seed writes the same text
--tokenizer PATH  a tokenizer.json, where none came with the model
--end-of-text TOKEN  at which to end; by default as the tokenizer's files name it
--dtype  of weights and activations; by default that of the checkpoint, and of a folder of
    transformers float32
--device NAME  auto, cpu, cuda or cuda:INDEX
"""
KINDS = {
    "N": flags.count,
    "K": flags.count,
    "X": flags.positive,
    "P": flags.share,
    "PATH": flags.path_name,
}
OPTIONS = {
    "prompt": {"default": "import "},
    "max-new-tokens": {"default": 200},
    "temperature": {"type": flags.not_negative, "default": 0.8},
    "repetition-penalty": {"default": 1.0},
    "stop": {"action": "append", "default": []},
    "seed": {"type": flags.seed},
    "dtype": {"choices": FLOAT_DTYPES},
    "device": {"type": flags.device_name, "default": "auto"},
}


def parser() -> Parser:
    top = Parser(
        prog="needle generate", description="Continues a prompt.", formatter_class=Defaults
    )
    text = "a checkpoint, the folder of a run, or a folder that transformers saved"
    top.add_argument("model", type=flags.path_name, metavar="CHECKPOINT_OR_FOLDER", help=text)
    for name, text, more in rows(TABLE, KINDS, OPTIONS):
        top.add_argument(f"--{name}", help=text, **more)
    top.add_argument("--import", type=imported, metavar="FILE", help=IMPORT)
    return top


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    try:
        model, beside = load_model(args.model, choose_device(args.device), args.dtype)
        if args.tokenizer is None and beside is None:
            raise ValueError(f"{args.model}: no tokenizer.json lies with it; give --tokenizer")
        tokenizer = load_tokenizer(args.tokenizer or beside, args.end_of_text)
        prompt = sys.stdin.read() if args.prompt == "-" else args.prompt
        chunks = stream_text(
            model,
            tokenizer,
            prompt,
            args.max_new_tokens,
            stop_strings=args.stop,
            temperature=args.temperature,
            top_k=args.top_k,
            top_p=args.top_p,
            seed=args.seed,
            repetition_penalty=args.repetition_penalty,
        )
        first = next(chunks)  # an error of the prompt shows here
        print(printable(prompt + first), end="", flush=True)
        for chunk in chunks:
            print(printable(chunk), end="", flush=True)
        print()
        return 0
    except BrokenPipeError:
        raise
    except (ValueError, OSError, RuntimeError) as error:
        print(f"needle generate: {described(error)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print()
        return 130


if __name__ == "__main__":
    sys.exit(program(main))
