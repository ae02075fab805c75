"""needle data: prepare (text to .bin/.idx), inspect (what a file holds), view (the batch
of a training step, as ids and text)."""

from __future__ import annotations

import argparse
import os
import sys
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from needle.command import Parser, reporting, whole, wrapped
from needle.data import megatron
from needle.data.kinds import text_files, text_kind
from needle.data.readers import open_tokens
from needle.data.runs import open_run_data
from needle.data.text import documents, encode_texts, tokenise
from needle.data.tokenizer import Tokenizer, id_limit, load_tokenizer
from needle.data.tokens import DataError, Documents, to_ids
from needle.files import named, naming, printable, replacing
from needle.processes import program, unwound_by_sigterm

SCANNED = 1 << 22  # ids that `inspect` looks at, in 64 stretches spread over the file
FIRST = 32  # ids that it shows


def parser() -> argparse.ArgumentParser:
    top = Parser(prog="needle data", description=__doc__)
    commands = top.add_subparsers(dest="command", required=True)
    count = {"type": whole(1), "metavar": "N"}

    add = commands.add_parser("prepare", help="text to Megatron's .bin/.idx").add_argument
    text = "text, JSON lines, either packed by gzip or Zstandard, folders, patterns"
    add("inputs", nargs="+", metavar="INPUT", help=text)
    add("--tokenizer", required=True, metavar="PATH", help="a tokenizer.json")
    text = "the token that ends a document (default: as the tokenizer's files name it)"
    add("--end-of-text", metavar="TOKEN", help=text)
    add("--out", required=True, metavar="NAME", help="writes NAME.bin and NAME.idx")
    text = "of JSON lines, with the text (default: text)"
    add("--field", default="text", metavar="NAME", help=text)
    text = "leave out, and count, lines of JSON without such a text, instead of ending there"
    add("--skip-bad-lines", action="store_true", help=text)

    text = "what a file holds: kind, tokens, documents, range of the ids, the first of them"
    add = commands.add_parser("inspect", help=text).add_argument
    add("file", metavar="FILE", help="whatever --data of needle train takes")
    add("--tokenizer", metavar="PATH", help="show the beginning as ids and as text")

    add = commands.add_parser("view", help="the exact batch of a training step").add_argument
    add("run", metavar="RUN", help="the folder of a run")
    text = "counted as in metrics.jsonl: the first is 1 (Pythia's batch 0)"
    add("--step", required=True, **count, help=text)
    text = "a tokenizer.json, to show text too (default: the run's own)"
    add("--tokenizer", metavar="PATH", help=text)
    add("--data", metavar="PATH", help="where its data lie now (default: where they were)")
    add("--rows", **count, help="the first N sequences alone (default: all)")
    text = "write the ids there as .npy, (sequences, seq_len + 1), instead"
    add("--save", metavar="FILE", help=text)
    return top


# ---- prepare -----------------------------------------------------------------------------------


def prepare(
    inputs: Sequence[str],
    tokenizer: Any,
    out: str,
    field: str = "text",
    skip_bad_lines: bool = False,
) -> dict[str, int]:
    """Write OUT.bin and OUT.idx, of which the .idx appears last. Return their numbers of documents
    and tokens.

    tokenizer: as load_tokenizer takes it; its end of text ends each document. field: of JSON lines,
    which holds a document's text. skip_bad_lines: of JSON, instead of raising their errors.
    DataError, also where OUT is there already, or names a folder, as "data/" does."""
    name = out[:-4] if out.endswith((".bin", ".idx")) else out
    if out and os.path.basename(name) in ("", ".", ".."):
        raise DataError(f"{out}: a name of files must end it, as {os.path.join(name, 'tokens')}")
    prefix = named(name)
    model = load_tokenizer(tokenizer)
    files = [file for name in inputs for file in text_files(named(name), field)]
    for made in (Path(f"{prefix}.idx"), Path(f"{prefix}.bin")):
        if made.exists():
            raise DataError(f"{made}: exists already; remove it, or choose another --out")
    dtype = megatron.best_dtype(id_limit(model))
    sizes, size = array("i"), 0
    with replacing(Path(f"{prefix}.idx")) as index, replacing(Path(f"{prefix}.bin")) as file:
        for ids, last in tokenise(files, model, dtype, field, skip_bad_lines):
            file.write(ids)
            size += len(ids)
            if size > megatron.LONGEST:
                raise DataError(
                    f"{prefix}.idx: cannot hold a document of more than {megatron.LONGEST:,} "
                    "tokens: cut its file, or train on the text itself"
                )
            if last and size:  # of a text that has no ids there is nothing to say
                sizes.append(size)
            size = 0 if last else size
        if not sizes:
            raise DataError(f"{model.source}: no token of this tokenizer is in the inputs")
        megatron.write_index(index, dtype, sizes)
    return {"documents": len(sizes), "tokens": sum(sizes)}


# ---- inspect -----------------------------------------------------------------------------------


def show_file(file: str, tokenizer: str | None) -> None:
    data = open_tokens(file)
    model = None if tokenizer is None else load_tokenizer(tokenizer)
    if data is None:
        show_text(Path(file), model)
        return
    print(wrapped(data.source))
    for name, tokens in (("to train on", data.train), ("held out", data.held_out)):
        if len(tokens) == 0:
            continue
        print(f"{name}: {len(tokens):,} tokens")
        if isinstance(tokens, Documents):
            sizes = tokens.sizes
            print(
                f"    documents: {len(sizes):,}, of {sizes.min():,} to {sizes.max():,} tokens, "
                f"{sizes.mean():,.1f} on average"
            )
        length = min(SCANNED // 64, len(tokens))
        starts = np.linspace(0, len(tokens) - length, 64).astype(np.int64).tolist()
        ids = to_ids(tokens.read(*[(start, start + length) for start in starts]))
        of = f" (in {SCANNED:,} of them)" if len(tokens) > SCANNED else ""
        print(f"    ids: {ids.min():,} to {ids.max():,}{of}")
    known = None if model is None else id_limit(model)
    first = data.train.read((0, min(FIRST, len(data.train))), vocab_size=known)
    show_beginning(first.tolist(), model)


def show_text(path: Path, model: Tokenizer | None) -> None:
    files, count, size, begins = text_files(path), 0, 0, ""
    for text, last in documents(files):
        begins = begins or text[:1000]
        count, size = count + last, size + len(text.encode())
    text = (
        f"{path}: {text_kind(files)}: {count:,} documents, {size:,} bytes of UTF-8 in "
        f"{len(files):,} file(s)"
    )
    print(wrapped(text))
    if model is not None:
        show_beginning(encode_texts(model, [begins])[0].ids[:FIRST], model)


def show_beginning(ids: list[int], model: Tokenizer | None) -> None:
    print(wrapped(f"begins: {' '.join(map(str, ids))}"))
    if model is not None:
        print(repr(model.decode(ids, skip_special_tokens=False)))


# ---- view --------------------------------------------------------------------------------------


def show_step(args: argparse.Namespace) -> None:
    data, batches, settings = open_run_data(named(args.run), args.data)
    if args.tokenizer is not None:
        data.tokenizer = load_tokenizer(args.tokenizer)
    accumulate = settings["micro_batches"]
    first = (args.step - 1) * accumulate
    batches.seek_batch(first)
    epoch, batch = divmod(first, len(batches))
    rows = np.concatenate([batches.next_rows() for _ in range(accumulate)])
    text = (
        f"{data.source}\nstep {args.step} (batch {args.step - 1} counted from 0): {len(rows):,} "
        f"sequences of {batches.seq_len:,} tokens and the one that follows; epoch {epoch}, "
        f"micro-batch {batch}"
    )
    print(wrapped(text))
    if batches.edits is not None:
        print("of a replay, with its edits: a target without a loss is written as -1 - id")
    rows = rows[: args.rows]
    if args.save is not None:
        with naming(args.save), open(args.save, "wb") as file:
            np.save(file, rows)
        print(printable(f"written to {args.save}: {rows.dtype} {rows.shape}"))
        return
    for number, row in enumerate(rows):
        print(wrapped(f"---- sequence {number}\n{' '.join(map(str, row))}"))
        if data.tokenizer is not None:
            ids = np.maximum(row, ~row).tolist()
            print(printable(data.tokenizer.decode(ids, skip_special_tokens=False)))


@reporting("needle data")
@unwound_by_sigterm()
def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    if args.command == "prepare":
        tokenizer = load_tokenizer(args.tokenizer, args.end_of_text)
        made = prepare(args.inputs, tokenizer, args.out, args.field, args.skip_bad_lines)
        text = f"{args.out}: {made['documents']:,} documents, {made['tokens']:,} tokens"
        print(printable(f"{text}\n{tokenizer}"))
    elif args.command == "inspect":
        show_file(args.file, args.tokenizer)
    else:
        show_step(args)
    return 0


if __name__ == "__main__":
    sys.exit(program(main))
