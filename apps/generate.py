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

from needle.backend_ndarray import FLOAT_DTYPES, check_device_name, choose_device
from needle.command import Parser, argument_type, number, path_name, reporting, whole
from needle.data import load_tokenizer
from needle.files import printable
from needle.generation import stream_text
from needle.models.registry import IMPORT, imported
from needle.processes import program
from needle.training.evaluate import load_model

share, positive = number(0, 1, above=True), number(0, above=True)
# Flag: its value, the value's type, default and help.
FLAGS = {
    "prompt": ("PROMPT", str, "import ", "'-' reads it from standard input"),
    "max-new-tokens": ("N", whole(1), 200, "tokens to write at most; the end of a text is earlier"),
    "temperature": ("X", number(0), 0.8, "0: always the likeliest token; above 1: bolder"),
    "top-k": ("K", whole(1), None, "choose among the K likeliest tokens only"),
    "top-p": ("P", share, None, "choose among the likeliest that have probability P together"),
    "repetition-penalty": ("X", positive, 1.0, "above 1: tokens that are there come less readily"),
    "seed": ("N", whole(0, 2**32 - 1), None, "the same seed writes the same text"),
    "tokenizer": ("PATH", path_name, None, "a tokenizer.json, where none came with the model"),
    "end-of-text": ("TOKEN", str, None, "at which to end; by default as its files name it"),
    "device": ("NAME", argument_type(check_device_name), "auto", "auto, cpu, cuda or cuda:INDEX"),
    "import": ("FILE", imported, None, IMPORT),
}


def parser() -> Parser:
    top = Parser(prog="needle generate", description="Continues a prompt.")
    add = top.add_argument
    text = "a checkpoint, the folder of a run, or a folder that transformers saved"
    add("model", type=path_name, metavar="CHECKPOINT_OR_FOLDER", help=text)
    for name, (metavar, read, default, help) in FLAGS.items():
        shown = "" if default is None else " (default: %(default)s)"
        add(f"--{name}", metavar=metavar, type=read, default=default, help=help + shown)
    text = "end before this text; may be given several times"
    add("--stop", action="append", default=[], metavar="TEXT", help=text)
    text = "of weights and activations; by default that of the checkpoint, and of a folder of "
    add("--dtype", choices=FLOAT_DTYPES, help=f"{text}transformers float32")
    return top


@reporting("needle generate")
def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
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


if __name__ == "__main__":
    sys.exit(program(main))
