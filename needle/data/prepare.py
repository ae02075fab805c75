"""Text to Megatron's .bin/.idx. OUT.idx appears last: where it exists, all is whole."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from needle.data import megatron
from needle.data.readers import text_files
from needle.data.text import documents, encode, shown
from needle.data.tokenizer import id_limit, load_tokenizer
from needle.data.tokens import DataError
from needle.files import named, replacing


def prepare(
    inputs: Sequence[str],
    tokenizer: Any,
    out: str,
    field: str = "text",
    skip_bad_lines: bool = False,
) -> dict[str, int]:
    """Writes OUT.bin and OUT.idx; returns their numbers of documents and tokens.

    tokenizer: as load_tokenizer takes it; its end of text ends each document. field: of JSON lines,
    which holds a document's text. skip_bad_lines: of JSON, instead of raising their errors. Raises
    DataError, also where OUT is there already."""
    prefix = named(out[:-4] if out.endswith((".bin", ".idx")) else out)
    model = load_tokenizer(tokenizer)
    files = [file for name in inputs for file in text_files(named(name), field)]
    for made in (Path(f"{prefix}.idx"), Path(f"{prefix}.bin")):
        if made.exists():
            raise DataError(f"{made}: exists already; remove it, or choose another --out")
    dtype = megatron.best_dtype(id_limit(model))
    sizes, size = array("i"), 0
    with replacing(Path(f"{prefix}.idx")) as index, replacing(Path(f"{prefix}.bin")) as file:
        read = shown(documents(files, field, skip_bad_lines), "tokenising")
        for ids, last in encode(model, read, dtype):
            file.write(ids)
            size += len(ids)
            if last and size:  # of a text that has no ids there is nothing to say
                sizes.append(size)
            size = 0 if last else size
        if not sizes:
            raise DataError(f"{model.source}: no token of this tokenizer is in the inputs")
        megatron.write_index(index, dtype, sizes)
    return {"documents": len(sizes), "tokens": sum(sizes)}
