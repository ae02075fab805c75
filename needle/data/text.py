"""Text: the documents in files, and the ids that a tokenizer makes of them.

    files --> chunks (text, True if its document ends here) --> ids, a group of chunks at a time

A document is a file, or a line of a file of JSON lines (its field `text`, or another); packed files
are unpacked. Each ends with the tokenizer's end of text. A file is never held whole: memory is
bounded by GROUP and the longest line of JSON, whatever a packed file unpacks to.
"""

from __future__ import annotations

import io
import itertools
import json
import re
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from needle.command import wrapped
from needle.data.kinds import LINES, TextFile, open_bytes, walk
from needle.data.tokenizer import END_OF_TEXT, Tokenizer, tokenizers_package
from needle.data.tokens import DataError
from needle.processes import terminal_bar

CHUNK = 1 << 20  # characters of a document that are tokenised as one
# Characters that are tokenised at a time, by all cores: some 150 bytes of memory for each.
GROUP = 1 << 22
# Up to a space between two characters that are none, where the usual pre-tokenizers cut too.
WORDS = re.compile(r".*\S(?= \S)", re.DOTALL)
SKIP = "`needle data prepare --skip-bad-lines` leaves such lines out"
# What a document is that has no text.
EMPTY, BAD_LINE = "empty document(s)", "bad line(s)"
BINARY = "file(s) that are not UTF-8 or hold zero bytes"
Chunk = tuple[str, bool]


# ---- documents --------------------------------------------------------------------------------


def standard_library() -> list[Path]:
    """The sources of the running Python's standard library, sorted, without its tests: text that
    every machine has."""
    root = Path(sysconfig.get_paths()["stdlib"])
    skipped = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}
    files = [path for path in walk(root, skipped) if path.suffix == ".py" and path.stat().st_size]
    if not files:
        raise DataError(f"{root}: no sources of Python's standard library; name data of your own")
    return files


def _blocks(path: Path) -> Iterator[str]:
    """The text of a file, a block after the other; UnicodeDecodeError where it is not UTF-8."""
    with open_bytes(path) as file:
        text = io.TextIOWrapper(file, "utf-8-sig", newline="")
        while block := text.read(CHUNK):
            yield block


def is_text(path: Path) -> bool:
    """True if a file is UTF-8 without zero bytes; all of it is read."""
    try:
        return all("\0" not in text for text in _blocks(path))
    except UnicodeDecodeError:
        return False


def json_text(line: bytes, where: str, field: str) -> str:
    """The text in a line of JSON, empty where it is null; where: file and line, for errors."""
    value = None
    try:
        value = json.loads(line)
        text = "" if value is None or value[field] is None else value[field]
        text.encode()
        return text
    except UnicodeEncodeError as error:
        half = f"\\u{ord(text[error.start]):04x}"
        raise DataError(f"{where}: `{field}` has {half}, half of a surrogate pair") from error
    except (ValueError, RecursionError, TypeError, KeyError, AttributeError) as error:
        has = f"; it has {', '.join(value)}: `prepare --field`" if isinstance(value, dict) else ""
        said = f"{where}: no object of JSON with a string as its field `{field}`{has}"
        raise DataError(f"{said} ({type(error).__name__}: {error})") from error


def documents_in(file: TextFile, field: str) -> Iterator[tuple[str, Any, Iterable[str]]]:
    """Yield of each document of a file what it is if it has no text, where it is, and its text, in
    parts. Blank lines of JSON are left out; offsets count unpacked bytes."""
    if file.kind != LINES:
        good = is_text(file.path)
        yield (EMPTY if good else BINARY), file.path, (_blocks(file.path) if good else ())
        return
    with open_bytes(file.path) as lines:
        end = 0
        for number, line in enumerate(lines, 1):
            where = f"{file.path}: line {number:,}, at offset {end:,}"
            end += len(line)
            if not line.strip():
                continue
            try:
                texts = [json_text(line, where, field)]
            except DataError as error:
                yield BAD_LINE, error, ()
            else:
                yield EMPTY, where, texts


def chunks(texts: Iterable[str]) -> Iterator[Chunk]:
    """Cut the document that `texts` make together into parts of at most CHUNK characters: before
    the last word, else after the last line break, else anywhere. An empty document gives
    nothing."""
    held = ""
    for text in texts:
        held, start = held + text, 0
        while len(held) - start > CHUNK:
            words = WORDS.match(held, start, start + CHUNK)
            end = words.end() if words else held.rfind("\n", start, start + CHUNK) + 1
            end = end or start + CHUNK
            yield held[start:end], False
            start = end
        held = held[start:]
    if held:
        yield held, True


def documents(
    files: Sequence[TextFile],
    field: str = "text",
    skip_bad_lines: bool = False,
    reports: bool = True,
) -> Iterator[Chunk]:
    """Yield the chunks of all documents: each line of a file of JSON lines, each other file. Empty
    documents, files that are no text and, with skip_bad_lines, bad lines are left out, and at the
    end reported. DataError for another bad line, and where there is no document."""
    left_out, some = {}, False
    for file in files:
        for kind, where, texts in documents_in(file, field):
            if kind == BAD_LINE and not skip_bad_lines:
                raise DataError(f"{where}; {SKIP}")
            last = False
            for text, last in chunks(texts):
                yield text, last
            some = some or last
            if not last:
                count, first = left_out.get(kind, (0, where))
                left_out[kind] = count + 1, first
    for kind, (count, first) in left_out.items() if reports else ():
        said = f"needle: left out: {count:,} {kind}; the first: {first}"
        print(wrapped(said), file=sys.stderr, flush=True)
    if not some:
        others = f" and {len(files) - 1:,} other files" if len(files) > 1 else ""
        why = "not text: empty, not UTF-8, or with zero bytes; token files end in .npy or .bin"
        if any(file.kind == LINES for file in files):
            why = f"no document is left: no line has a text in its field {field!r} (--field)"
        raise DataError(f"{files[0].path}{others}: {why}")


def shown(chunks: Iterable[Chunk], doing: str) -> Iterator[Chunk]:
    """Yield chunks, and show on a terminal how many characters were read."""
    bar = terminal_bar(desc=doing, unit="B", unit_scale=True, leave=False)
    for chunk in chunks:
        yield chunk
        if bar is not None:
            bar.update(len(chunk[0]))
    if bar is not None:
        bar.close()


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


def encode_texts(tokenizer: Tokenizer, texts: list[str]) -> list[Any]:
    """Return the encoding of each text, without special tokens. DataError where there is none."""
    # Where the package has it: the same ids without their places in the text, in half the time.
    encode_batch = getattr(tokenizer, "encode_batch_fast", tokenizer.encode_batch)
    try:
        return encode_batch(texts, add_special_tokens=False)
    except Exception as error:  # the package raises bare Exception
        raise DataError(
            f"{tokenizer.source}: the tokenizer cannot encode a text, one of {len(texts):,} from "
            f"{texts[0][:60]!r} on: {error}"
        ) from error


def tokenise(
    files: Sequence[TextFile],
    tokenizer: Tokenizer,
    dtype: np.dtype,
    field: str = "text",
    skip_bad_lines: bool = False,
) -> Iterator[tuple[np.ndarray, bool]]:
    """Yield (ids, True if a document ends with them) of each chunk of `documents`. The last id of
    a document is the tokenizer's eos_token_id, where it has one."""
    end = tokenizer.eos_token_id
    tail = np.array([] if end is None else [end], dtype)
    for group in _groups(shown(documents(files, field, skip_bad_lines), "tokenising")):
        encoded = encode_texts(tokenizer, [text for text, _ in group])
        for (_, last), found in zip(group, encoded):
            ids = np.array(found.ids, dtype)
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
    vocabulary, added = tokenizer.get_vocab(), tokenizer.get_added_tokens_decoder()
    lengths = np.zeros(max(vocabulary.values()) + 1, np.int32)
    alphabet = set(tokenizers_package().pre_tokenizers.ByteLevel.alphabet())
    decoder = repr(tokenizer.decoder)
    size = lambda ids: len(tokenizer.decode(ids).encode())
    # Decoders drop spaces at the ends of a text: a token is decoded between two others.
    plain = (i for i in sorted(vocabulary.values()) if tokenizer.decode([i]).isalnum())
    other = [] if tokenizer.decoder is None else [*itertools.islice(plain, 1)]
    for token, index in vocabulary.items():
        if index in added:
            lengths[index] = 0 if added[index].special else len(token.encode())
        elif "ByteLevel" in decoder and alphabet.issuperset(token):
            lengths[index] = len(token)  # in the byte-level alphabet a character is a byte
        elif "ByteFallback" in decoder and re.fullmatch("<0x[0-9A-F]{2}>", token):
            lengths[index] = 1
        else:
            lengths[index] = size([*other, index, *other]) - size(other + other)
    return lengths
