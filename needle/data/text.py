"""Text: the documents in files, and the ids that a tokenizer makes of them.

    files --> chunks (text, True if its document ends here) --> ids, a group of chunks at a time

A document is a file, or a line of a file of JSON lines (its field `text`, or another); .gz and .zst
are unpacked. Each ends with the tokenizer's end of text. A file is never held whole: memory is
bounded by GROUP and LONGEST_LINE, whatever a packed file unpacks to.
"""

from __future__ import annotations

import codecs
import contextlib
import glob
import gzip
import json
import os
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from needle.data.tokenizer import END_OF_TEXT, Tokenizer, tokenizers_package
from needle.data.tokens import DataError
from needle.files import named, printable, reading

CHUNK = 1 << 20  # characters of a document that are tokenised as one
# Characters that are tokenised at a time, by all cores: some 150 bytes of memory for each.
GROUP = 1 << 22
LONGEST_LINE = 1 << 28  # bytes of a line of JSON
Chunk = tuple[str, bool]


# ---- documents --------------------------------------------------------------------------------


def standard_library() -> list[Path]:
    """The sources of the running Python's standard library, sorted, without its tests: text that
    every machine has."""
    root = Path(sysconfig.get_paths()["stdlib"])
    skipped = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}
    files = [path for path in walk(root, skipped) if path.suffix == ".py"]
    if not files:
        raise DataError(
            f"{root}: no sources of the Python standard library here; give text of your own"
        )
    return files


def files_at(path: Path) -> list[Path]:
    """The file, the files below the folder, or those that the pattern matches; none: empty."""
    if path.is_dir():
        found = list(walk(path))
    else:
        names = [path] if path.is_file() else sorted(glob.glob(str(path)))
        found = [Path(name) for name in names if Path(name).is_file()]
    for file in found:
        named(file)
    return found


def walk(root: Path, skipped: set[str] = frozenset()) -> Iterator[Path]:
    """Regular files below root, sorted by path, hidden ones left out."""
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(n for n in folders if n not in skipped and not n.startswith("."))
        for name in sorted(names):
            path = Path(folder, name)
            if not name.startswith(".") and path.is_file():
                yield path


def zstd_module() -> Any:
    """compression.zstd of Python 3.14, or its backport."""
    try:
        from compression import zstd
    except ImportError:
        from backports import zstd
    return zstd


@contextlib.contextmanager
def open_bytes(path: Path) -> Iterator[BinaryIO]:
    """The content of a file, unpacked where its name ends in .gz or .zst. DataError for a file that
    cannot be read, and for one that is damaged or truncated."""
    with reading(path) as file:
        try:
            if path.suffix == ".gz":
                file = gzip.open(file)
            elif path.suffix == ".zst":
                file = zstd_module().open(file)
            yield file
        except ImportError as error:
            raise DataError(
                f"{path}: needs Python 3.14 or the package `backports.zstd`: {sys.executable} -m "
                "pip install backports.zstd (or unpack the file)"
            ) from error
        except Exception as error:  # each library that unpacks has its own
            if isinstance(error, ValueError) or not is_packed(path):
                raise
            raise DataError(
                f"{path}: cannot be unpacked, it is damaged or truncated: {error} (at or after "
                f"offset {file.tell():,} of what it holds)"
            ) from error


def is_packed(path: Path) -> bool:
    return path.suffix in (".gz", ".zst")


def is_json_lines(path: Path) -> bool:
    inner = path.with_suffix("") if is_packed(path) else path
    return inner.suffix in (".jsonl", ".ndjson")


def _decoded(path: Path) -> Iterator[str]:
    """The text of a file, a block after the other; UnicodeDecodeError where it is not UTF-8."""
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    with open_bytes(path) as file:
        while block := file.read(1 << 20):
            yield decoder.decode(block)
    yield decoder.decode(b"", final=True)


def is_text(path: Path) -> bool:
    """True if a file is UTF-8 without zero bytes; all of it is read."""
    try:
        return all("\0" not in text for text in _decoded(path))
    except UnicodeDecodeError:
        return False


def json_text(line: bytes, where: str, field: str) -> str:
    """The text in a line of JSON; where: file and offset, for errors."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: no JSON: {error}") from error
    text = value.get(field) if isinstance(value, dict) else None
    if not isinstance(text, str):
        others = [k for k, v in value.items() if type(v) is str] if type(value) is dict else []
        hint = f"; strings are in {', '.join(others[:5])}: `prepare --field`" if others else ""
        raise DataError(f"{where}: no object with a string as its field `{field}`{hint}")
    if not text:
        raise DataError(f"{where}: an empty document")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"{where}: half of a surrogate pair: {error}") from error
    return text


def warn(text: str) -> None:
    print(printable(f"needle: {text}"), file=sys.stderr, flush=True)


def json_lines(
    path: Path, field: str = "text", start: int = 0, stop: int | None = None
) -> Iterator[str]:
    """Yield the documents in `field` of the lines that begin at offsets [start, stop) of a file of
    JSON lines, without blank lines. Offsets count unpacked bytes."""
    with open_bytes(path) as file:
        if start > 0:
            file.seek(start - 1)
            while not (line := file.readline(1 << 20)).endswith(b"\n") and line:
                start += len(line)  # of the line that began before
            start += len(line) - 1
        while (stop is None or start < stop) and (line := file.readline(LONGEST_LINE + 1)):
            where = f"{path}: the line at offset {start:,}"
            if len(line) > LONGEST_LINE:
                raise DataError(
                    f"{where}: has more than {LONGEST_LINE:,} bytes: cut its document, or give "
                    "it as a file of text"
                )
            if line.strip():
                yield json_text(line, where, field)
            start += len(line)


def chunks(texts: Iterable[str]) -> Iterator[Chunk]:
    """Cut the document that `texts` make together into parts of at most CHUNK characters, after
    the last line break of each, if there is one. An empty document gives nothing."""
    held = ""
    for text in texts:
        held, start = held + text, 0
        while len(held) - start > CHUNK:
            end = held.rfind("\n", start, start + CHUNK) + 1 or start + CHUNK
            yield held[start:end], False
            start = end
        held = held[start:]
    if held:
        yield held, True


def documents(
    files: Sequence[Path], report: Callable[[str], None] | None = None, field: str = "text"
) -> Iterator[Chunk]:
    """Yield the chunks of all documents: each line of a file of JSON lines, each other file. Files
    that are empty or no text are left out; `report` gets one line about the latter."""
    left_out = []
    for path in files:
        if is_json_lines(path):
            for text in json_lines(path, field):
                yield from chunks([text])
        elif is_text(path):
            try:
                yield from chunks(_decoded(path))
            except UnicodeDecodeError as error:
                raise DataError(f"{path}: changed while it was read: {error}") from error
        else:
            left_out.append(str(path))
    if left_out and report is not None:
        more = f" and {len(left_out) - 3:,} more" if len(left_out) > 3 else ""
        report(f"left out, not UTF-8 or with zero bytes: {', '.join(left_out[:3])}{more}")


# ---- tokenizers -------------------------------------------------------------------------------


def train_tokenizer(texts: Iterator[str], vocab_size: int) -> Any:
    """A byte-level BPE tokenizer (Radford et al. 2019) of at most vocab_size tokens; id 0 ends a
    document. The same text gives the same tokenizer."""
    tk = tokenizers_package()
    tokenizer = tk.Tokenizer(tk.models.BPE())
    tokenizer.pre_tokenizer = tk.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tk.decoders.ByteLevel()
    trainer = tk.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        show_progress=False,
        initial_alphabet=tk.pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def encode(
    tokenizer: Tokenizer, parts: Iterable[Chunk], dtype: np.dtype
) -> Iterator[tuple[np.ndarray, bool]]:
    """Yield (ids, True if a document ends with them) of each chunk. The last id of a document is
    the tokenizer's eos_token_id, where it has one."""
    end = tokenizer.eos_token_id
    tail = np.array([] if end is None else [end], dtype)
    # Where the package has it: the same ids without their places in the text, in half the time.
    encode_batch = getattr(tokenizer, "encode_batch_fast", tokenizer.encode_batch)
    for group in _groups(parts):
        try:
            encoded = encode_batch([text for text, _ in group], add_special_tokens=False)
        except Exception as error:  # the package raises bare Exception
            raise DataError(
                f"the tokenizer cannot encode a text, one of {len(group):,} from "
                f"{group[0][0][:60]!r} on: {error}"
            ) from error
        for (_, last), chunk in zip(group, encoded):
            ids = np.array(chunk.ids, dtype)
            yield np.concatenate([ids, tail]) if last else ids, last


def _groups(parts: Iterable[Chunk]) -> Iterator[list[Chunk]]:
    group, held = [], 0
    for chunk in parts:
        group.append(chunk)
        held += len(chunk[0]) + 64  # bytes of an empty one
        if held >= GROUP:
            yield group
            group, held = [], 0
    if group:
        yield group


def token_bytes(tokenizer: Any) -> np.ndarray:
    """int32 (V,): how many bytes of text each id stands for; 0 for special tokens. Bits per byte of
    a text are the sum of its losses over ln 2 and the sum of these."""
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    lengths = np.zeros(max(vocabulary.values()) + 1, np.int32)
    alphabet = set(tokenizers_package().pre_tokenizers.ByteLevel.alphabet())
    is_byte_level = "ByteLevel" in repr(tokenizer.decoder)
    for token, index in vocabulary.items():
        if is_byte_level and alphabet.issuperset(token):
            lengths[index] = len(token)  # in the byte-level alphabet a character is a byte
        else:
            lengths[index] = len(tokenizer.decode([index]).encode())
    for index in tokenizer.get_added_tokens_decoder():
        lengths[index] = 0
    return lengths
