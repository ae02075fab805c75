"""A small tokenizer, in a cache of its own."""

import pytest

from needle.data import text


@pytest.fixture
def tokenizer(tmp_path, monkeypatch):
    """The file of a small byte-level tokenizer; the cache lies beside it."""
    monkeypatch.setenv("NEEDLE_CACHE", str(tmp_path / "cache"))
    text.train_tokenizer(iter(["one two three four five\n" * 20]), 300).save(
        str(tmp_path / "tokenizer.json")
    )
    return tmp_path / "tokenizer.json"
