"""open_data: tokens from a path. The kind of the files is found out; `source` says which it was.

    a .bin with its .idx, or their common name   Megatron; if all have 2,049 ids: preshuffled rows;
                                                 the .bin may lie in shards, as published
    a folder with train.bin, or that file        nanoGPT: flat uint16, val.bin beside it is held out
    .bin that begin with 20240520                llm.c shards; those with `val` in the name are held
                                                 out
    .npy, any other .bin                         one flat array; .bin is uint16
    .jsonl (.gz, .zst), text, folders of text    through the tokenizer, once, then from the cache

Several files are given by a pattern ("shards/*.bin") or their folder. Data without a held-out part
of their own give their last 5 % of tokens; text of 20 or more documents every twentieth; Megatron's
documents are split as GPT-NeoX does by default (969 : 30 : 1); preshuffled rows are all trained on.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from needle.arguments import wrapped
from needle.data import megatron
from needle.data.identity import (
    cache_dir,
    check_unchanged,
    content_hash,
    hash_bytes,
    remembered,
    whole,
)
from needle.data.text import (
    Chunk,
    documents,
    encode,
    files_at,
    is_json_lines,
    is_packed,
    standard_library,
    train_tokenizer,
    walk,
    warn,
)
from needle.data.tokenizer import Tokenizer, id_limit, load_tokenizer, tokenizers_package
from needle.data.tokens import DataError, Documents, FlatTokens, Part, absent, whole_file
from needle.files import MissingFileError, named
from needle.processes import terminal_bar

HELD_OUT = 20  # one document, or one token, in so many
# A change of how text becomes tokens makes caches of other versions invisible.
CACHE_FORMAT = "3"
TRUSTED = "trusted"  # in a fingerprint, in place of a hash
LLMC_MAGIC, LLAMA_MAGIC, LLMC_HEADER = 20240520, 20240801, 1024
TAKES = (
    "data are text, JSON lines, a folder of either, Megatron's .bin/.idx, llm.c's shards, "
    "nanoGPT's train.bin, or .npy"
)


@dataclass
class TokenData:
    """Two flat arrays of token ids in files, and what made them."""

    train: FlatTokens
    held_out: FlatTokens
    source: str  # one line for people: where from, and which kind it was taken for
    tokenizer: Tokenizer | None = None  # where there is one
    trusted: bool = False  # the fingerprint leaves out the hash of the tokens

    @functools.cached_property
    def fingerprint(self) -> str:
        """Equal for equal tokens, however files are cut: a hash of type, numbers and documents,
        then the hash of all tokens, which is made at the first use."""
        shape = hashlib.sha256(
            f"{self.train.dtype.str} {len(self.train)} {len(self.held_out)}".encode()
        )
        if isinstance(self.train, Documents):
            shape.update(self.train.sizes)
        content = TRUSTED if self.trusted else content_hash(self.train.parts + self.held_out.parts)
        return f"{shape.hexdigest()[:16]}-{content}"

    @property
    def vocab_size(self) -> int | None:
        return None if self.tokenizer is None else id_limit(self.tokenizer)

    def __repr__(self) -> str:  # a tokenizer prints all that it knows
        known = "no tokenizer" if self.tokenizer is None else f"a tokenizer of {self.vocab_size:,}"
        return (
            f"TokenData({self.source}; {len(self.train):,} to train on, "
            f"{len(self.held_out):,} held out, {known})"
        )


def open_data(
    data: str | os.PathLike | None = None,
    tokenizer: Any = None,
    vocab_size: int = 4096,
    trust: bool = False,
) -> TokenData:
    """Tokens from `data`, see the head of this file; None: the standard library's sources.

    Text goes through `tokenizer` (as load_tokenizer takes it), or through one of `vocab_size`
    tokens that is trained on it; the result is cached. trust: nothing is hashed; the states of the
    files alone tell other text. Raises DataError."""
    if data is None:
        source = "sources of the Python standard library"
        found = _open_text(standard_library(), source, tokenizer, vocab_size, trust)
    elif (found := open_tokens(data)) is not None:
        found.tokenizer = None if tokenizer is None else load_tokenizer(tokenizer)
    else:
        files = matching(Path(data))
        found = _open_text(files, os.fspath(data), tokenizer, vocab_size, trust)
    if trust:
        found.trusted, found.source = True, f"{found.source}, trusted: not hashed"
    return found


def matching(path: Path) -> list[Path]:
    """The files at `path`: DataError where there are none, or one that was named is empty."""
    files = files_at(path)
    if not files:
        kind = DataError if os.path.lexists(path) else MissingFileError
        raise kind(f"{path}: {absent(path, 'file or folder')}; {TAKES}")
    for file in files:
        if not path.is_dir() and file.stat().st_size == 0:
            raise DataError(f"{file}: an empty file")
    return files


def open_tokens(data: str | os.PathLike) -> TokenData | None:
    """Files of token ids; None where `data` is text."""
    path = named(data)
    if path.is_dir():
        return _open_folder(path)
    prefix = megatron.prefix_of(path)
    if prefix is not None:
        return _open_megatron(prefix)
    files = matching(path)
    kinds = [_kind(file) for file in files]
    if len({*kinds}) > 1:
        listed = ", ".join(f"{file.name}: {kind}" for file, kind in zip(files[:4], kinds))
        raise DataError(f"{path}: files of several kinds ({listed}); give those of one kind")
    if kinds[0] == "text":
        return None
    if kinds[0] == "llm.c":
        return _open_shards(path, files)
    if kinds[0] == "npy":
        return _open_flat(path, ".npy", npy_part, files)
    val = files[0].with_name("val.bin")
    if [file.name for file in files] == ["train.bin"] and val.is_file():
        return _open_flat(path.parent, "nanoGPT's train.bin and val.bin", uint16_part, files, [val])
    return _open_flat(path, "flat uint16", uint16_part, files)


def _kind(file: Path) -> str:
    if file.suffix == ".npy":
        return "npy"
    if file.suffix != ".bin":
        return "text"
    magic = np.fromfile(file, "<i4", 1)
    return "llm.c" if magic.size and magic[0] in (LLMC_MAGIC, LLAMA_MAGIC) else "flat uint16"


def _open_folder(folder: Path) -> TokenData | None:
    if not any(True for _ in walk(folder)):
        raise DataError(f"{folder}: an empty folder; {TAKES}")
    entries = sorted(folder.iterdir())
    files = [path for path in entries if path.is_file() and not path.name.startswith(".")]
    indexes = [path for path in files if path.suffix == ".idx"]
    bins = [path for path in files if path.suffix == ".bin"]
    if len(indexes) > 1:
        raise DataError(
            f"{folder}: {len(indexes)} Megatron files are in it; name one of them, "
            f"such as {indexes[0]}"
        )
    if indexes:
        return _open_megatron(indexes[0].with_suffix(""))
    if folder / "train.bin" in bins:
        return open_tokens(folder / "train.bin")
    if any(_kind(path) == "llm.c" for path in bins):
        return _open_shards(folder, bins)
    if bins and bins == files:
        raise DataError(
            f"{bins[0]}: no magic {LLMC_MAGIC} of llm.c's shards at offset 0; flat uint16 tokens "
            "are given as files, or as train.bin and val.bin in a folder"
        )
    return None


def _open_flat(
    path: Path,
    kind: str,
    part: Callable[[Path], Part],
    train: Sequence[Path],
    held_out: Sequence[Path] = (),
) -> TokenData:
    """The tokens of files, each read by `part`. Without files to hold out, the last 5 % are."""
    tokens = FlatTokens([part(file) for file in train])
    if held_out:
        end = FlatTokens([part(file) for file in held_out])
        files = f"{len(train):,} + {len(held_out):,} files"
        counts = f"{len(tokens):,} + {len(end):,} {tokens.dtype} tokens"
        return TokenData(tokens, end, f"{path}: {kind}, {files}, {counts}")
    kept = len(tokens) - len(tokens) // HELD_OUT
    files = f", {len(train):,} files" if len(train) > 1 else ""
    return TokenData(
        tokens.between(0, kept),
        tokens.between(kept, len(tokens)),
        f"{path}: {kind}{files}, {len(tokens):,} {tokens.dtype} tokens",
    )


def _open_shards(path: Path, files: list[Path]) -> TokenData:
    held_out = [file for file in files if "val" in file.stem]
    train = [file for file in files if file not in held_out]
    if not train:
        train, held_out = held_out, []
    return _open_flat(path, "llm.c", shard_part, train, held_out)


def uint16_part(path: Path) -> Part:
    return whole_file(path, np.dtype("<u2"))


def npy_part(path: Path) -> Part:
    """A .npy of one axis of integers."""
    try:
        with open(path, "rb") as file:
            read = {(1, 0): "read_array_header_1_0", (2, 0): "read_array_header_2_0"}
            version = np.lib.format.read_magic(file)
            shape, _, dtype = getattr(np.lib.format, read[version])(file)
            offset = file.tell()
            if any(type(size) is not int or size < 0 for size in shape):
                raise ValueError(f"a shape of {shape}")
    except Exception as error:  # a damaged header makes NumPy raise almost anything
        raise DataError(f"{path}: not a usable .npy file: {error!r} at offset 0") from error
    if len(shape) != 1 or dtype.kind not in "iu":
        raise DataError(f"{path}: must hold one axis of integers, not {dtype} of shape {shape}")
    return Part(path, offset, dtype, shape[0])


def shard_part(path: Path) -> Part:
    """llm.c: 256 int32 (magic, version, count, zeros), then `count` uint16."""
    size = path.stat().st_size
    if size < LLMC_HEADER:
        raise DataError(
            f"{path}: is truncated: {size} bytes, and its header alone has {LLMC_HEADER}"
        )
    magic, version, count = np.fromfile(path, "<i4", 3).tolist()
    if magic != LLMC_MAGIC:
        llama = "the 32-bit tokens of Llama 3, which Pythia's vocabulary does not need"
        what = llama if magic == LLAMA_MAGIC else f"not {LLMC_MAGIC} as llm.c writes it"
        raise DataError(f"{path}: wrong magic at offset 0: {magic}: {what}")
    if version != 1:
        raise DataError(f"{path}: version {version} at offset 4; only 1 is known")
    end = LLMC_HEADER + 2 * count
    if count <= 0 or size != end:
        problem = "is truncated" if size < end else "is too long"
        raise DataError(
            f"{path}: {problem}: the header at offset 8 promises {count:,} tokens, to offset "
            f"{end:,}, and the file ends at {size:,}"
        )
    return Part(path, LLMC_HEADER, "<u2", count)


def _open_megatron(prefix: Path) -> TokenData:
    tokens = megatron.open_documents(prefix)
    count, ends = len(tokens.sizes), np.cumsum(tokens.sizes, dtype=np.int64)
    facts = f"{count:,} documents, {len(tokens):,} {tokens.dtype} tokens"
    if tokens.row_length:
        source = f"{prefix}: Megatron, preshuffled rows of {tokens.row_length:,} tokens, {facts}"
        return TokenData(tokens, tokens.between(0, 0), source)
    _, train_end, held_out_end, _ = megatron.split_documents(count)
    if train_end == 0 or held_out_end < train_end:
        train_end = held_out_end = count
    borders = [int(ends[train_end - 1]), int(ends[held_out_end - 1])]
    train = Documents(tokens.between(0, borders[0]).parts, tokens.sizes[:train_end])
    source = (
        f"{prefix}: Megatron, {facts}; {train_end:,} to train on in GPT-NeoX's order, "
        f"{held_out_end - train_end:,} held out"
    )
    return TokenData(train, tokens.between(*borders), source)


# ---- text --------------------------------------------------------------------------------------


def _open_text(
    files: list[Path], source: str, tokenizer: Any, vocab_size: int, trust: bool
) -> TokenData:
    """The cached tokens of these files, made first where they are missing."""
    given = None if tokenizer is None else load_tokenizer(tokenizer)
    made_by = f"{vocab_size}" if given is None else [given.to_str(), given.eos_token_id]
    texts = [whole(path) for path in files]
    kinds = [[is_json_lines(text.path), is_packed(text.path), text.end] for text in texts]
    content = [text.state for text in texts] if trust else content_hash(texts)
    version = [CACHE_FORMAT, tokenizers_package().__version__]
    digest = hashlib.sha256(json.dumps([*version, made_by, kinds, content]).encode())
    folder = cache_dir() / f"text-{digest.hexdigest()[:32]}"

    def make() -> dict:
        print(wrapped(f"tokenising {source}: once, then kept in\n  {folder}"), flush=True)
        try:
            for old in folder.glob("*.bin"):  # a process may read them
                old.unlink()
            facts = _tokenise(files, source, given, vocab_size, folder)
            check_unchanged(texts)
            return facts
        except OSError as error:
            shutil.rmtree(folder, ignore_errors=True)
            raise DataError(
                f"{folder}: the cache cannot be written ({error.strerror}); free some space, "
                "or set NEEDLE_CACHE to a folder that can be written"
            ) from error
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise

    facts = remembered(folder / "facts.json", make, lambda kept: "hash" in kept)
    try:
        train, held_out = _cached(folder, facts)
        found = TokenData(
            FlatTokens([train]),
            FlatTokens([held_out]),
            f"{source}: {text_kind(files)}, {facts['documents']:,} documents, "
            f"{facts['tokens']:,} tokens",
            given or load_tokenizer(folder / "tokenizer.json"),
        )
        if not trust and not found.fingerprint.endswith(facts["hash"]):
            raise ValueError("its tokens have changed")
        return found
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{folder}: a damaged cache of tokens ({error}); delete that folder, it is made again"
        ) from error


def text_kind(files: list[Path]) -> str:
    return (
        "JSON lines"
        if all(map(is_json_lines, files))
        else "packed text"
        if all(map(is_packed, files))
        else "text"
    )


def no_text(source: str, files: list[Path]) -> DataError:
    if len(files) == 1:
        return DataError(
            f"{source}: not text: it is empty, not UTF-8, or holds zero bytes; token "
            "files end in .npy or .bin"
        )
    return DataError(
        f"{source}: no text in it: each of its {len(files)} files is empty, not "
        "UTF-8, or holds zero bytes"
    )


def _cached(folder: Path, facts: dict) -> list[Part]:
    return [
        Part(folder / f"{name}.bin", 0, np.dtype(facts["dtype"]), facts[name])
        for name in ("train", "held_out")
    ]


def _shown(chunks: Iterator[Chunk], text: str, files: Sequence[Path]) -> Iterator[Chunk]:
    """Yield `chunks`, and show on a terminal how many characters were read. Without a total where
    files are packed or JSON, of which the text is a part."""
    plain = not any(is_packed(path) or is_json_lines(path) for path in files)
    total = sum(path.stat().st_size for path in files) if plain else None
    bar = terminal_bar(desc=text, total=total, unit="B", unit_scale=True, leave=False)
    for chunk in chunks:
        yield chunk
        if bar is not None:
            bar.update(len(chunk[0]))
    if bar is not None:
        bar.close()


def _tokenise(
    files: list[Path], source: str, tokenizer: Tokenizer | None, vocab_size: int, folder: Path
) -> dict[str, Any]:
    """Writes train.bin and held_out.bin into `folder`, and the tokenizer.json that it trains where
    none is given; returns what they hold."""
    if tokenizer is None:
        read = _shown(documents(files), "training a tokenizer", files)
        tokenizer = load_tokenizer(train_tokenizer((text for text, _ in read), vocab_size))
        tokenizer.save(str(folder / "tokenizer.json"))
    dtype = np.dtype("<u2" if id_limit(tokenizer) <= 1 << 16 else "<i4")
    count = 0
    names = folder / "train.bin", folder / "held_out.bin"
    with open(names[0], "xb+") as train, open(names[1], "xb") as held_out:
        read = _shown(documents(files, warn), "tokenising", files)
        for ids, last in encode(tokenizer, read, dtype):
            (held_out if count % HELD_OUT == HELD_OUT - 1 else train).write(ids)
            count += last
        if count == 0:
            raise no_text(source, files)
        if count < HELD_OUT:  # nothing is held out yet
            total = train.tell() // dtype.itemsize
            end = (total - total // HELD_OUT) * dtype.itemsize
            train.seek(end)
            shutil.copyfileobj(train, held_out)
            train.truncate(end)
        train.seek(0, os.SEEK_END)
        counts = [file.tell() // dtype.itemsize for file in (train, held_out)]
    facts = {"documents": count, "tokens": sum(counts), "dtype": dtype.str}
    facts |= {"train": counts[0], "held_out": counts[1], "source": source}
    return {**facts, "hash": hash_bytes(_cached(folder, facts))}
