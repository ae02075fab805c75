"""Tokenizers, and the special tokens of a model: the one place that knows where a text ends.

A Tokenizer is the text of the files that `transformers` writes beside weights:

    tokenizer.json            text to ids and back
    tokenizer_config.json     eos_token, bos_token and pad_token: the end of a text, its beginning,
    special_tokens_map.json       and padding, as tokens
    generation_config.json    eos_token_id, bos_token_id and pad_token_id: the same as ids, of which
    config.json                   eos_token_id may be a list

The first file in this order that names a special token decides. Where none does, it is the special
token of tokenizer.json that is called as NAMES has it. Truncation and padding in tokenizer.json,
which a call of transformers may have left there, are turned off.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from needle.data.tokens import DataError
from needle.files import FileError, named, read_json, reading
from needle.safetensors import read_header

END_OF_TEXT = "<|endoftext|>"
NAMES = {
    "eos": (END_OF_TEXT, "</s>", "<|end_of_text|>", "<eos>", "[EOS]"),
    "bos": ("<s>", "<|begin_of_text|>", "<bos>", "[BOS]"),
    "pad": ("<|padding|>", "<pad>", "[PAD]"),
}
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
TEXT_FILES = (*TOKENIZER_FILES, "generation_config.json")  # beside weights, with config.json
NAMING = (*TEXT_FILES[1:], "config.json")


def tokenizers_package() -> Any:
    try:
        import tokenizers
    except ImportError as error:
        raise DataError(
            f"text needs the package `tokenizers`: {sys.executable} -m pip install tokenizers "
            "(or give files of tokens)"
        ) from error
    return tokenizers


class Tokenizer:
    """Text to ids and back, without truncation and padding, and special tokens.

    It has the methods of a `tokenizers.Tokenizer`: encode(text).ids, decode(ids), token_to_id ...
    files: name -> text of the files at the head of this module; of config.json the ids alone.
    source: the path from which load_tokenizer reads it again. Without a tokenizer.json, as of a
    model that came without one, it has neither methods nor special tokens.

    >>> made = ndl.data.train_tokenizer(iter(["the cat sat on the mat "] * 9), 280)
    >>> tokenizer = ndl.data.load_tokenizer(made)
    >>> tokenizer.decode(tokenizer.encode("the cat").ids), tokenizer.eos_token_id
    ('the cat', 0)
    """

    def __init__(self, files: Mapping[str, str], source: str = "the tokenizer") -> None:
        self.files, self.source = dict(files), source

    @functools.cached_property
    def _opened(self) -> Any:
        package = tokenizers_package()
        if "tokenizer.json" not in self.files:  # as of slow tokenizers of transformers
            raise DataError(f"{self.source}: holds no tokenizer: give a tokenizer.json")
        try:
            opened = package.Tokenizer.from_str(self.files["tokenizer.json"])
        except Exception as error:  # the package raises bare Exception
            raise DataError(f"{self.source}: not a tokenizer.json: {error}") from error
        opened.no_truncation()
        opened.no_padding()
        return opened

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # as copy and pickle look for
            raise AttributeError(name)
        return getattr(self._opened, name)

    def __repr__(self) -> str:
        end = self.eos_token_id
        said = "no end of text: --end-of-text names one"
        if end is not None:
            said = f"end of text {self.id_to_token(end)!r}, id {end}"
        return f"Tokenizer({self.get_vocab_size():,} tokens, {said})"

    @functools.cached_property
    def _special(self) -> dict[str, list[int]]:
        """eos, bos and pad -> their ids, those that decide first."""
        limit, found = id_limit(self._opened), {}
        special = {t.content for t in self.get_added_tokens_decoder().values() if t.special}
        for role, names in NAMES.items():
            ids: list[Any] = []
            for fields in (json.loads(self.files.get(file, "{}")) for file in NAMING):
                token, given = fields.get(f"{role}_token"), fields.get(f"{role}_token_id")
                token = token.get("content") if isinstance(token, dict) else token
                ids += [self.token_to_id(token)] if isinstance(token, str) else []
                ids += given if isinstance(given, list) else [given]
            ids = [i for i in ids if type(i) is int and 0 <= i < limit]
            if not ids:
                known = [name for name in names if name in special or name == END_OF_TEXT]
                ids = [i for i in map(self.token_to_id, known) if i is not None][:1]
            found[role] = list(dict.fromkeys(ids))
        if not found["bos"] and "tokenizer_config.json" not in self.files:
            found["bos"] = found["eos"][:1]  # as GPT-NeoX has it
        return found

    @property
    def stops(self) -> tuple[int, ...]:
        """The ids at which generation ends: eos_token_id, and all others that a file names."""
        return tuple(self._special["eos"])

    @property
    def eos_token_id(self) -> int | None:
        """The id that ends a text; None where none is known."""
        return next(iter(self._special["eos"]), None)

    @property
    def bos_token_id(self) -> int | None:
        """The id that begins a text; None where none is known."""
        return next(iter(self._special["bos"]), None)

    @property
    def pad_token_id(self) -> int | None:
        """The id that fills up shorter texts; None where none is known."""
        return next(iter(self._special["pad"]), None)

    def ending(self, token: str) -> Tokenizer:
        """The same tokenizer, whose files name this token as the end of a text."""
        index = self.token_to_id(token)
        if index is None:
            raise DataError(f"--end-of-text {token}: {self.source} has no such token")
        files = {"config.json": "{}", **self.files}
        for name in files.keys() & {*NAMING}:
            said = {"eos_token": token} if name in TOKENIZER_FILES else {"eos_token_id": index}
            files[name] = json_text({**json.loads(files[name]), **said})
        return Tokenizer(files, self.source)


def id_limit(tokenizer: Any) -> int:
    """One more than the largest id: more than the number of tokens where ids are left out."""
    return max(tokenizer.get_vocab(with_added_tokens=True).values(), default=0) + 1


def json_text(value: Mapping[str, Any]) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"


def files_in(folder: Path, tokenizer: str = "tokenizer.json") -> dict[str, str]:
    """Return `files` of a Tokenizer, those that are in a folder. tokenizer: the name that its
    tokenizer.json has there. FileError names one that cannot be used."""
    found = {}
    for name in TOKENIZER_FILES[0], *NAMING[:-1]:
        path = folder / (tokenizer if name == "tokenizer.json" else name)
        if not path.exists():
            continue
        with reading(path) as file:  # bytes that are no UTF-8 make it none to what parses it
            found[name] = file.read().decode(errors="surrogateescape")
        if name in NAMING:
            read_json(path)
    with contextlib.suppress(FileError):  # a file of this name may be anyone's
        ids = {f"{role}_token_id" for role in NAMES}
        said = {k: v for k, v in read_json(folder / "config.json").items() if k in ids}
        found |= {"config.json": json_text(said)} if said else {}
    return found


def load_tokenizer(source: Any, end_of_text: str | None = None) -> Tokenizer:
    """A Tokenizer from a tokenizer.json with the files beside it, from the folder that holds one,
    or from a checkpoint; also, in the place of a path, from a `tokenizers.Tokenizer` or a tokenizer
    of transformers, which are copied. end_of_text: the token that ends a text, whatever the files
    name."""
    if isinstance(source, Tokenizer):
        found = source
    elif hasattr(source, "save_pretrained"):
        with tempfile.TemporaryDirectory() as folder:
            source.save_pretrained(folder)
            found = Tokenizer(files_in(Path(folder)))
    elif hasattr(source, "to_str"):
        found = Tokenizer({"tokenizer.json": source.to_str()})
    elif isinstance(source, (str, os.PathLike)):
        found = _read(named(source))
    else:
        raise TypeError(
            "a tokenizer must be a tokenizers.Tokenizer, a tokenizer of transformers, or the "
            f"path of a tokenizer.json, not {source!r:.60}"
        )
    found.get_vocab_size()  # opens it
    return found if end_of_text is None else found.ending(end_of_text)


def _read(path: Path) -> Tokenizer:
    if path.is_dir():
        path = path / "tokenizer.json"
    if not path.is_file():
        raise DataError(f"{path}: no such tokenizer file; give a tokenizer.json")
    with reading(path) as file:
        is_checkpoint = file.read(9)[8:] == b"{"  # after the length of a safetensors header
        file.seek(0)
        state = json.loads(read_header(file)[0].get("state", "{}")) if is_checkpoint else {}
    files = state.get("text_files", {}) if is_checkpoint else files_in(path.parent, path.name)
    return Tokenizer(files, str(path))
