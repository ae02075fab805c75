"""needle export RUN_OR_CHECKPOINT FOLDER | needle import FOLDER CHECKPOINT"""

from __future__ import annotations

import argparse
import math
import os
import sys
from pathlib import Path

from needle import hf, models
from needle.backend_ndarray import FLOAT_DTYPES, cpu
from needle.checkpoint import find_checkpoint, save_checkpoint
from needle.command import Parser, reporting, wrapped
from needle.files import FileError, named, printable
from needle.models.registry import IMPORT, imported


def export_checkpoint(
    source: str | os.PathLike,
    folder: str | os.PathLike,
    tokenizer: str | os.PathLike | None = None,
    overwrite: bool = False,
) -> list[Path]:
    """Writes a checkpoint, or the newest one of a run's folder, to `folder`; returns the files. The
    tokenizer of the checkpoint, of its run, or the one beside it comes along unless another is
    given. FileError where files lie in the folder already, unless `overwrite`, and for a folder of
    a run."""
    folder = named(folder)
    hf.refuse_run(folder)
    if folder.exists() and not overwrite and any(folder.iterdir()):
        raise FileError(f"{folder}: is not empty: --overwrite replaces what an export writes")
    checkpoint = find_checkpoint(source, lambda text: print(wrapped(text), file=sys.stderr))
    return hf.save(checkpoint.restore_model(cpu()), folder, tokenizer)


def import_folder(
    folder: str | os.PathLike,
    checkpoint: str | os.PathLike,
    dtype: str = "float32",
    overwrite: bool = False,
) -> list[Path]:
    """Writes the model of `folder` as a checkpoint without an optimizer, with its tokenizer and
    special tokens in it; returns the files. The loss it records is NaN. FileError where the
    checkpoint is there already, unless `overwrite`, and for a place in the folder of a run."""
    folder, target = named(folder), named(checkpoint)
    hf.refuse_run(target.parent)
    if target.exists() and not overwrite:
        raise FileError(f"{checkpoint}: is there already: --overwrite replaces it")
    model = models.from_pretrained(folder, cpu(), dtype)
    return [save_checkpoint(model, None, 0, math.nan, target)]


def parser() -> argparse.ArgumentParser:
    top = Parser(
        prog="needle",
        description="Models in and out of the folders of Hugging Face's transformers.",
    )
    commands = top.add_subparsers(dest="command", required=True)
    out = commands.add_parser("export", help="from a run or a checkpoint to a folder")
    into = commands.add_parser("import", help="from a folder to a checkpoint")
    text = "a checkpoint, or the folder of a run: its newest one"
    out.add_argument("source", metavar="RUN_OR_CHECKPOINT", help=text)
    out.add_argument("folder", metavar="FOLDER", help="what transformers will open")
    text = "a tokenizer.json, in the place of the one that came with the model"
    out.add_argument("--tokenizer", metavar="PATH", help=text)
    into.add_argument("folder", metavar="FOLDER", help="what save_pretrained of transformers wrote")
    into.add_argument("checkpoint", metavar="CHECKPOINT", help="the file to write")
    text = "of the parameters (default: float32, which holds all others)"
    into.add_argument("--dtype", choices=FLOAT_DTYPES, default="float32", help=text)
    for command in out, into:
        command.add_argument("--import", type=imported, metavar="FILE", help=IMPORT)
        text = "replace files that are there"
        command.add_argument("--overwrite", action="store_true", help=text)
    return top


def convert(args: argparse.Namespace) -> int:
    if args.command == "export":
        written = export_checkpoint(args.source, args.folder, args.tokenizer, args.overwrite)
    else:
        written = import_folder(args.folder, args.checkpoint, args.dtype, args.overwrite)
    for path in written:
        print(printable(str(path)))
    return 0


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    return reporting(f"needle {args.command}")(convert)(args)
