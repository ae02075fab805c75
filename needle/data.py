"""Text to tokens, and tokens to batches.

    text files --BPE tokenizer--> a flat array a split (memory-mapped, in the cache) --> Batches

A document is a file. Each ends with the token <|endoftext|> (id 0, as in GPT-NeoX). Of 20 or more
documents every twentieth is held out for evaluation; of fewer, the last 5 % of all tokens.

`DataLoader` and `NDArrayDataset` of the general API (needle/dataset.py) are found here too.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sysconfig
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from needle.dataset import DataLoader, NDArrayDataset

__all__ = ["Batches", "DataError", "DataLoader", "NDArrayDataset", "TokenData", "cache_dir",
           "load_tokenizer", "open_data", "standard_library", "token_bytes"]

END_OF_TEXT = "<|endoftext|>"
HELD_OUT = 20  # one document, or one token, in so many
PIECE = 1 << 20  # characters of a document that are tokenised at a time
# A change of how text becomes tokens makes caches of other versions invisible.
CACHE_FORMAT = "1"


class DataError(ValueError):
    """Data that cannot be used; the message names it and says what to do."""


def cache_dir() -> Path:
    """$NEEDLE_CACHE, else $XDG_CACHE_HOME/needle, else ~/.cache/needle."""
    own = os.environ.get("NEEDLE_CACHE")
    if own:
        return Path(own)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "needle"


# ---- documents --------------------------------------------------------------------------------


def standard_library() -> tuple[Path, list[Path]]:
    """The sources of the running Python's standard library, without its tests: text that every
    machine has. (folder, files in sorted order)"""
    root = Path(sysconfig.get_paths()["stdlib"])
    skipped = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}
    files = [path for path in _walk(root, skipped) if path.suffix == ".py"]
    if not files:
        raise DataError(f"{root}: no sources of the Python standard library here; give text of "
                        "your own with --data")
    return root, files


def _walk(root: Path, skipped: set[str] = frozenset()) -> Iterator[Path]:
    """Regular files below root, sorted by path, hidden ones left out."""
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(n for n in folders if n not in skipped and not n.startswith("."))
        for name in sorted(names):
            path = Path(folder, name)
            if not name.startswith(".") and path.is_file():
                yield path


def _read_text(path: Path) -> str | None:
    """The text of a file, or None where it is not UTF-8 text."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error
    if b"\0" in content:
        return None
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError:
        return None


def _documents(files: Sequence[Path]) -> Iterator[str]:
    for path in files:
        text = _read_text(path)
        if text:
            yield text


def _pieces(text: str) -> Iterator[str]:
    """A long document in parts of about PIECE characters that end where a line ends."""
    start = 0
    while start < len(text):
        end = start + PIECE
        if end < len(text):
            newline = text.rfind("\n", start, end)
            end = newline + 1 if newline >= start else end
        yield text[start:end]
        start = end


# ---- tokenizers -------------------------------------------------------------------------------


def _tokenizers():
    try:
        import tokenizers
    except ImportError as error:
        raise DataError("text needs the package `tokenizers`: pip install tokenizers "
                        "(or give token files with --data)") from error
    return tokenizers


def load_tokenizer(path: str | os.PathLike):
    """A `tokenizers.Tokenizer` from a tokenizer.json, or from the folder that holds one."""
    path = Path(path)
    if path.is_dir():
        path = path / "tokenizer.json"
    if not path.is_file():
        raise DataError(f"{path}: no such tokenizer file; give a tokenizer.json as the package "
                        "`tokenizers` saves it")
    try:
        return _tokenizers().Tokenizer.from_file(str(path))
    except DataError:
        raise
    except Exception as error:  # the package raises bare Exception
        raise DataError(f"{path}: not a tokenizer.json: {error}") from error


def train_tokenizer(texts: Iterator[str], vocab_size: int):
    """A byte-level BPE tokenizer (Radford et al. 2019) of at most vocab_size tokens; id 0 ends a
    document. The same text gives the same tokenizer."""
    tk = _tokenizers()
    tokenizer = tk.Tokenizer(tk.models.BPE())
    tokenizer.pre_tokenizer = tk.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tk.decoders.ByteLevel()
    trainer = tk.trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[END_OF_TEXT], show_progress=False,
        initial_alphabet=tk.pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def token_bytes(tokenizer) -> np.ndarray:
    """int32 (V,): how many bytes of text each id stands for; 0 for special tokens. Bits per byte of
    a text are the sum of its losses over ln 2 and the sum of these."""
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    lengths = np.zeros(max(vocabulary.values()) + 1, np.int32)
    byte_level = set(_tokenizers().pre_tokenizers.ByteLevel.alphabet())
    for token, index in vocabulary.items():
        if byte_level.issuperset(token):
            lengths[index] = len(token)  # in the byte-level alphabet a character is a byte
        else:
            lengths[index] = len(tokenizer.decode([index]).encode())
    for index in tokenizer.get_added_tokens_decoder():
        lengths[index] = 0
    return lengths


# ---- data -------------------------------------------------------------------------------------


@dataclass
class TokenData:
    """Two flat arrays of token ids (memory-mapped), and what made them."""

    train: np.ndarray
    held_out: np.ndarray
    source: str  # one line for people
    fingerprint: str  # equal for equal tokens: a resumed run must read what the first one read
    tokenizer: object | None = None  # tokenizers.Tokenizer, where there is one

    @property
    def vocab_size(self) -> int | None:
        return None if self.tokenizer is None else self.tokenizer.get_vocab_size()


def open_data(data: str | os.PathLike | None = None, tokenizer: str | os.PathLike | None = None,
              vocab_size: int = 4096) -> TokenData:
    """Tokens from `data`: None for the standard library's sources, a text file, a folder of text
    files, or a token file (.npy of one integer axis; .bin of little-endian uint16).

    Text goes through `tokenizer` (a tokenizer.json), or through one of `vocab_size` tokens that is
    trained on it; the result is cached. Raises DataError."""
    if data is None:
        root, files = standard_library()
        return _open_text(root, files, "sources of the Python standard library", tokenizer,
                          vocab_size)
    path = Path(data)
    if path.is_dir():
        files = list(_walk(path))
        if not files:
            raise DataError(f"{path}: an empty folder; put text files (UTF-8) into it")
        return _open_text(path, files, str(path), tokenizer, vocab_size)
    if not path.is_file():
        raise DataError(f"{path}: no such file or folder; --data takes a text file, a folder of "
                        "text files, or tokens as .npy or .bin")
    if path.stat().st_size == 0:
        raise DataError(f"{path}: an empty file")
    if path.suffix in (".npy", ".bin"):
        return _open_tokens(path, tokenizer)
    if _read_text(path) is None:
        raise DataError(f"{path}: not text: it is not UTF-8, or holds zero bytes; token files end "
                        "in .npy or .bin")
    return _open_text(path.parent, [path], str(path), tokenizer, vocab_size)


def _open_tokens(path: Path, tokenizer: str | os.PathLike | None) -> TokenData:
    if path.suffix == ".npy":
        try:
            tokens = np.load(path, mmap_mode="r", allow_pickle=False)
        except (ValueError, OSError, EOFError) as error:
            raise DataError(f"{path}: not a usable .npy file: {error}") from error
        if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
            raise DataError(f"{path}: must hold one axis of integers, not {tokens.dtype} of shape "
                            f"{tokens.shape}")
    else:
        if path.stat().st_size % 2:
            raise DataError(f"{path}: {path.stat().st_size} bytes are no whole number of uint16 "
                            "tokens: the file is truncated, or of another format")
        tokens = np.memmap(path, dtype="<u2", mode="r")
    kept = len(tokens) - len(tokens) // HELD_OUT
    loaded = None if tokenizer is None else load_tokenizer(tokenizer)
    return TokenData(tokens[:kept], tokens[kept:], f"{path}: {len(tokens):,} {tokens.dtype} tokens",
                     _token_fingerprint(tokens), loaded)


def _token_fingerprint(tokens: np.ndarray) -> str:
    """Of the size and 64 stretches spread over the array: a file of any size takes milliseconds."""
    digest = hashlib.blake2b(f"{tokens.dtype.str} {len(tokens)}".encode(), digest_size=16)
    for start in np.linspace(0, max(len(tokens) - 8192, 0), 64).astype(np.int64):
        digest.update(np.ascontiguousarray(tokens[start:start + 8192]))
    return digest.hexdigest()


def _open_text(root: Path, files: list[Path], source: str, tokenizer: str | os.PathLike | None,
               vocab_size: int) -> TokenData:
    """The cached tokens of these files, made first where they are missing."""
    tk = _tokenizers()
    given = None if tokenizer is None else load_tokenizer(tokenizer)
    made_by = f"{vocab_size}" if given is None else given.to_str()
    digest = hashlib.blake2b(digest_size=16)
    for part in (CACHE_FORMAT, tk.__version__, made_by, str(root)):
        digest.update(part.encode() + b"\0")
    for path in files:
        status = path.stat()
        digest.update(f"{path.relative_to(root)} {status.st_size} {status.st_mtime_ns}\n".encode())
    folder = cache_dir() / f"text-{digest.hexdigest()}"
    if not (folder / "facts.json").is_file():
        _tokenise(files, source, given, vocab_size, folder)
    try:
        facts = json.loads((folder / "facts.json").read_text())
        return TokenData(np.load(folder / "train.npy", mmap_mode="r"),
                         np.load(folder / "held_out.npy", mmap_mode="r"),
                         f"{source}: {facts['documents']:,} documents, {facts['tokens']:,} tokens",
                         facts["fingerprint"], load_tokenizer(folder / "tokenizer.json"))
    except (OSError, ValueError, KeyError) as error:
        raise DataError(f"{folder}: a damaged cache of tokens ({error}); delete that folder, it "
                        "is made again") from error


def _tokenise(files: list[Path], source: str, tokenizer, vocab_size: int, folder: Path) -> None:
    """Writes tokenizer.json, train.npy, held_out.npy and facts.json into a temporary folder beside
    `folder` and renames it: another process sees all of it or nothing."""
    print(f"tokenising {source}: once, then kept in {folder}", flush=True)
    if tokenizer is None:
        tokenizer = train_tokenizer(_documents(files), vocab_size)
    end = tokenizer.token_to_id(END_OF_TEXT)
    dtype = np.uint16 if tokenizer.get_vocab_size() <= 1 << 16 else np.int32
    documents = []
    for text in _documents(files):
        encoded = tokenizer.encode_batch(list(_pieces(text)), add_special_tokens=False)
        ids = [np.array(piece.ids, dtype) for piece in encoded]
        if end is not None:
            ids.append(np.array([end], dtype))
        documents.append(np.concatenate(ids))
    if not documents:
        raise DataError(f"{source}: no text in it: each of its {len(files)} files is empty, not "
                        "UTF-8, or holds zero bytes")
    train, held_out = _split(documents)
    facts = {"source": source, "documents": len(documents), "tokens": len(train) + len(held_out),
             "fingerprint": _token_fingerprint(np.concatenate([train, held_out]))}
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    except OSError as error:
        raise DataError(f"{folder.parent}: the cache cannot be written ({error.strerror}); set "
                        "NEEDLE_CACHE to a folder that can") from error
    try:
        tokenizer.save(str(work / "tokenizer.json"))
        np.save(work / "train.npy", train)
        np.save(work / "held_out.npy", held_out)
        (work / "facts.json").write_text(json.dumps(facts))
        os.rename(work, folder)
    except OSError as error:
        # Another process may have been first: then its folder is as good as this one.
        if not (folder / "facts.json").is_file():
            raise DataError(f"{folder}: the cache cannot be written ({error.strerror}); make room, "
                            "or set NEEDLE_CACHE to another folder") from error
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _split(documents: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    if len(documents) >= HELD_OUT:
        held_out = np.concatenate(documents[HELD_OUT - 1::HELD_OUT])
        del documents[HELD_OUT - 1::HELD_OUT]
        return np.concatenate(documents), held_out
    tokens = np.concatenate(documents)
    kept = len(tokens) - len(tokens) // HELD_OUT
    return tokens[:kept], tokens[kept:]


# ---- batches ----------------------------------------------------------------------------------


class Batches:
    """Batches of non-overlapping windows, in an order drawn anew for each epoch.

    Window i is tokens [i T, i T + T + 1): inputs are its first T tokens, targets its last T, so
    that each token is predicted once an epoch. Windows that fill no whole batch are left out of
    that epoch. The order depends on the seed and the epoch alone: `position` (epoch, batch) is all
    there is to remember, and `seek(position)` goes there exactly.
    """

    def __init__(self, tokens: np.ndarray, batch_size: int, seq_len: int, seed: int = 0) -> None:
        self.windows = max(len(tokens) - 1, 0) // seq_len
        if self.windows < batch_size:
            raise DataError(f"{len(tokens):,} tokens are fewer than one batch of {batch_size} x "
                            f"{seq_len} (+ 1); give more text, or a smaller --batch-size or "
                            "--seq-len")
        self.tokens, self.batch_size, self.seq_len, self.seed = tokens, batch_size, seq_len, seed
        self.epoch = self.batch = 0
        self._order = self._shuffle()

    def __len__(self) -> int:
        """Batches an epoch."""
        return self.windows // self.batch_size

    def _shuffle(self) -> np.ndarray:
        return np.random.Generator(np.random.PCG64([self.seed, self.epoch])).permutation(
            self.windows)

    @property
    def position(self) -> dict[str, int]:
        return {"epoch": self.epoch, "batch": self.batch}

    def seek(self, position: dict[str, int]) -> None:
        epoch, batch = int(position["epoch"]), int(position["batch"])
        if epoch < 0 or not 0 <= batch <= len(self):
            raise DataError(f"no position epoch {epoch}, batch {batch}: an epoch has {len(self)} "
                            "batches")
        self.epoch, self.batch = epoch, batch
        self._order = self._shuffle()

    def next(self) -> tuple[np.ndarray, np.ndarray]:
        """(inputs, targets), integers (batch_size, seq_len); goes on for ever."""
        if self.batch == len(self):
            self.epoch, self.batch = self.epoch + 1, 0
            self._order = self._shuffle()
        chosen = self._order[self.batch * self.batch_size:(self.batch + 1) * self.batch_size]
        self.batch += 1
        return self._windows(chosen)

    def in_order(self, limit: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """At most `limit` batches, evenly spread and always the same: for evaluation."""
        for first in np.linspace(0, len(self) - 1, min(limit, len(self))).astype(int):
            yield self._windows(np.arange(self.batch_size) + first * self.batch_size)

    def _windows(self, chosen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        span = np.arange(self.seq_len + 1)
        rows = self.tokens[chosen[:, None] * self.seq_len + span]
        # Wider types stay wide: a broken id must not wrap into a good one before it is checked.
        rows = rows.astype(np.int32 if rows.dtype in (np.uint16, np.int32) else np.int64)
        return rows[:, :-1], rows[:, 1:]
