#!/usr/bin/env python3
"""Continues a prompt from a checkpoint or a folder of transformers, word by word.

needle generate runs/tiny --prompt "import os" --temperature 0.8 --top-k 50
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

if (Path(__file__).resolve().parent.parent / "checkout.py").exists():
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    import checkout

    checkout.choose()

from needle.backend_ndarray import FLOAT_DTYPES, choose_device
from needle.data import END_OF_TEXT, load_tokenizer
from needle.evaluate import load_model
from needle.files import described
from needle.generation import stream_text
from needle.models.registry import IMPORT, imported
from needle.processes import program
from needle.training import flags


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="needle generate",
        description="Continues a prompt.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    top.add_argument(
        "model",
        type=flags.path_name,
        metavar="CHECKPOINT_OR_FOLDER",
        help="a checkpoint, the folder of a run, or a folder that transformers saved",
    )
    top.add_argument("--prompt", default="import ", help="'-' reads it from standard input")
    top.add_argument(
        "--max-new-tokens",
        type=flags.count,
        default=200,
        metavar="N",
        help="tokens to write at most; the end of a text ends it earlier",
    )
    top.add_argument(
        "--temperature",
        type=flags.not_negative,
        default=0.8,
        metavar="X",
        help="0: always the likeliest token; above 1: bolder",
    )
    top.add_argument(
        "--top-k", type=flags.count, metavar="K", help="choose among the K likeliest tokens only"
    )
    top.add_argument(
        "--top-p",
        type=flags.share,
        metavar="P",
        help="choose among the likeliest tokens that have probability P together",
    )
    top.add_argument(
        "--repetition-penalty",
        type=flags.positive,
        default=1.0,
        metavar="X",
        help="above 1: tokens that are there already come less readily",
    )
    top.add_argument(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="end before this text; may be given several times",
    )
    top.add_argument(
        "--seed", type=flags.seed, metavar="N", help="the same seed writes the same text"
    )
    top.add_argument(
        "--tokenizer",
        type=flags.path_name,
        metavar="PATH",
        help="a tokenizer.json, where none lies with the model",
    )
    top.add_argument(
        "--dtype",
        choices=FLOAT_DTYPES,
        help="of weights and activations; by default that of the checkpoint, and of a folder of "
        "transformers float32",
    )
    top.add_argument(
        "--device",
        type=flags.device_name,
        default="auto",
        metavar="NAME",
        help="auto, cpu, cuda or cuda:INDEX",
    )
    top.add_argument("--import", type=imported, metavar="FILE", help=IMPORT)
    return top


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    try:
        model, beside = load_model(args.model, choose_device(args.device), args.dtype)
        if args.tokenizer is None and beside is None:
            raise ValueError(f"{args.model}: no tokenizer.json lies with it; give --tokenizer")
        tokenizer = load_tokenizer(args.tokenizer or beside)
        prompt = sys.stdin.read() if args.prompt == "-" else args.prompt
        chunks = stream_text(
            model,
            tokenizer,
            prompt,
            args.max_new_tokens,
            stop_strings=args.stop,
            end=tokenizer.token_to_id(END_OF_TEXT),
            temperature=args.temperature,
            top_k=args.top_k,
            top_p=args.top_p,
            seed=args.seed,
            repetition_penalty=args.repetition_penalty,
        )
        first = next(chunks)  # an error of the prompt shows here
        print(prompt + first, end="", flush=True)
        for chunk in chunks:
            print(chunk, end="", flush=True)
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
