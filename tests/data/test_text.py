"""Text on its way to ids: chunks, memory, held-out documents, tokenizers unlike Pythia's."""

import gzip
import json
import tracemalloc

import numpy as np
import pytest
from harness import naming

from needle.data import DataError, __main__, open_data, open_documents, text
from needle.data.kinds import text_files
from needle.data.tokenizer import id_limit, load_tokenizer

tokenizers = pytest.importorskip("tokenizers")


def test_long_document_has_the_ids_of_it_as_a_whole(tmp_path, tokenizer, monkeypatch):
    """Of tokenizers that begin a text with a space where it has none, too."""
    whole = "def  one(two):\n\n    return three , [4,\r\n\t 'five'] \n" * 40
    (tmp_path / "a.txt").write_bytes(whole.encode())
    spaced = tokenizers.Tokenizer.from_file(str(tokenizer))
    spaced.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=True)
    pieces = tokenizers.Tokenizer(tokenizers.models.Unigram())
    pieces.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    trainer = {"special_tokens": ["?"], "unk_token": "?", "show_progress": False}
    trainer = tokenizers.trainers.UnigramTrainer(vocab_size=60, **trainer)
    pieces.train_from_iterator([whole], trainer)
    monkeypatch.setattr(text, "CHUNK", 50)
    for made in tokenizers.Tokenizer.from_file(str(tokenizer)), spaced, pieces:
        data = open_data(tmp_path / "a.txt", made)
        end = [data.tokenizer.eos_token_id] * (made is not pieces)
        assert data.train.tolist() + data.held_out.tolist() == made.encode(whole).ids + end


def test_characters_are_not_cut_by_the_blocks_of_a_file(tmp_path, capsys):
    # 3.9 MB: several blocks, each cut within a character. Ends of lines stay as they are.
    whole = "\ufeff" + "\raé漢🙂\r\n" * 300_000
    (tmp_path / "a.txt").write_text(whole, encoding="utf-8")
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(whole.encode(), 1))
    (tmp_path / "bad.txt").write_bytes(whole.encode()[:-3])  # ends within a character
    (tmp_path / "late.txt").write_bytes(whole.encode() + b"\0")
    found = list(text.documents(text_files(tmp_path)))
    assert "".join(part for part, _ in found) == 2 * whole[1:]
    assert sum(last for _, last in found) == 2 and max(len(part) for part, _ in found) <= 1 << 20
    first = f"2 file(s) that are not UTF-8 or hold zero bytes; the first: {tmp_path / 'bad.txt'}"
    assert " ".join(capsys.readouterr().err.split()) == f"needle: left out: {first}"


def test_memory_does_not_grow_with_the_text(tmp_path, tokenizer, monkeypatch):
    """Of Python and NumPy: 4 MB of packed text take as much as 2 MB."""
    monkeypatch.setattr(text, "CHUNK", 1 << 14)
    monkeypatch.setattr(text, "GROUP", 1 << 15)
    peaks, block = [], "one two three four five six seven eight\n" * 800
    for count in 64, 128:
        path = tmp_path / f"{count}.txt.gz"
        path.write_bytes(gzip.compress((block * count).encode(), 1))
        tracemalloc.start()
        open_data(path, tokenizer)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < peaks[0] + (1 << 18), peaks


def test_of_twenty_documents_the_last_is_held_out_and_of_fewer_the_end(
    tmp_path, tokenizer, monkeypatch
):
    """Documents are cut into chunks, and each document ends with its token."""
    monkeypatch.setattr(text, "CHUNK", 40)
    for count in (3, 20, 21, 40):
        texts = [f"one two {number}\n" * (number + 1) for number in range(count)]
        lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
        (tmp_path / "a.jsonl").write_text(lines)
        data, end = open_data(tmp_path / "a.jsonl", tokenizer), "<|endoftext|>"
        held_out, train = (
            data.tokenizer.decode(ids.tolist(), skip_special_tokens=False)
            for ids in (data.held_out, data.train)
        )
        if count < 20:
            assert train + held_out == "".join(text + end for text in texts)
            assert len(data.held_out) == (len(data.train) + len(data.held_out)) // 20 > 0
            continue
        assert held_out == "".join(text + end for text in texts[19::20])
        assert train == "".join(text + end for n, text in enumerate(texts) if n % 20 != 19)


def test_texts_of_the_standard_library_are_its_sources_without_tests(tmp_path, monkeypatch):
    wanted, others = ["os.py", "json/a.py"], ["empty.py", "notes.txt", "json/tests/b.py"]
    for name in *wanted, *others, "test/c.py", "site-packages/d.py", "json/__pycache__/e.py":
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("" if name == "empty.py" else "import os\n")
    monkeypatch.setattr(text.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    assert text.standard_library() == [tmp_path / name for name in wanted]


# ---- tokenizers --------------------------------------------------------------------------------


def word_tokenizer(tmp_path, vocabulary, **more):
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, **more))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "words.json"))
    return tmp_path / "words.json"


def test_tokenizers_unlike_pythias(tmp_path, tokenizer):
    """Without an end of text nothing stands between documents, and one that has no ids is none; the
    type of the ids follows the largest, not how many there are."""
    words = word_tokenizer(tmp_path, {"[UNK]": 0, "one": 1, "two": 70_000}, unk_token="[UNK]")
    lines = "".join(json.dumps({"text": t}) + "\n" for t in ("one two", " \n", "two", "six one"))
    (tmp_path / "a.jsonl").write_text(lines)
    made = __main__.prepare([str(tmp_path / "a.jsonl")], str(words), str(tmp_path / "x"))
    assert made == {"documents": 3, "tokens": 5}
    found = open_documents(tmp_path / "x")
    assert found.tolist() == [1, 70_000, 70_000, 0, 1] and found.sizes.tolist() == [2, 1, 2]
    data = open_data(tmp_path / "a.jsonl", words)
    assert data.train.tolist() == found.tolist()
    assert data.train.dtype == np.int32 and data.vocab_size == 70_001
    (tmp_path / "b.txt").write_text(" \n")
    with pytest.raises(DataError, match="words.json: no token of this tokenizer is in the inputs"):
        __main__.prepare([str(tmp_path / "b.txt")], str(words), str(tmp_path / "y"))
    with naming("a text that it cannot encode"):
        words = word_tokenizer(tmp_path, {"one": 0})
        with pytest.raises(DataError, match="json: the tokenizer cannot encode a text.*'one two'"):
            open_data(tmp_path / "a.jsonl", words)


def test_tokens_that_were_added_count_and_stand_for_no_bytes(tmp_path):
    words = {"a": 0, "bcd": 1, "[UNK]": 2, "\u65e5\u672c": 3, "caf\u00e9": 4}
    made = load_tokenizer(word_tokenizer(tmp_path, words))
    made.add_special_tokens(["<sep>", "<pad>"])
    assert id_limit(made) == 7
    np.testing.assert_array_equal(text.token_bytes(made), [1, 3, 5, 6, 5, 0, 0])


def test_bytes_of_tokens_are_those_of_the_text(tokenizer):
    """Spaces that a decoder drops at a beginning or an end, bytes of a character, and added tokens,
    of which GPT-NeoX's tokenizer has runs of spaces."""
    said, decoders = "the cat  caf\xe9 the", tokenizers.decoders
    names = [*(f"<0x{i:02X}>" for i in range(256)), *"theca", "\u2581", "\u2581t"]
    vocabulary = {name: i for i, name in enumerate(names)}
    merges = [("\u2581", "t")]
    model = tokenizers.models.BPE(vocab=vocabulary, merges=merges, byte_fallback=True)
    pieces = tokenizers.Tokenizer(model)
    pieces.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(prepend_scheme="always")
    strip = decoders.Replace("\u2581", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)
    pieces.decoder = decoders.Sequence([decoders.ByteFallback(), *strip])
    ids = pieces.encode(said).ids
    assert text.token_bytes(pieces)[ids].sum() == len(f" {said}".encode())
    spaces = tokenizers.Tokenizer.from_file(str(tokenizer))
    spaces.add_tokens(["  ", "\xe9"])
    spaces.add_special_tokens(["<sep>"])
    ids = spaces.encode(f"{said}<sep>").ids
    assert spaces.token_to_id("  ") in ids
    assert text.token_bytes(spaces)[ids].sum() == len(said.encode())
    suffix = {"end_of_word_suffix": "</w>"}  # as of GPT-1's tokenizer
    words = tokenizers.Tokenizer(tokenizers.models.BPE(**suffix))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    words.decoder = decoders.BPEDecoder()
    words.train_from_iterator([said], tokenizers.trainers.BpeTrainer(show_progress=False, **suffix))
    ids = words.encode("the cat caf\xe9 the ").ids
    assert text.token_bytes(words)[ids].sum() == len("the cat caf\xe9 the ".encode())
