"""Text on its way to ids: chunks, bounded memory, the cache, tokenizers unlike Pythia's."""

import gzip
import json
import shutil

import numpy as np
import pytest
from harness import naming, python
from hypothesis import given, settings
from hypothesis import strategies as st

from needle.data import DataError, __main__, open_data, open_documents, prepare, text
from needle.data.tokenizer import id_limit, load_tokenizer

tokenizers = pytest.importorskip("tokenizers")


# ---- chunks ------------------------------------------------------------------------------------


def cut_whole(whole, size):
    """The cut of a text that is held whole."""
    parts = []
    while len(whole) > size:
        end = whole[:size].rfind("\n") + 1 or size
        parts, whole = [*parts, whole[:end]], whole[end:]
    return parts + ([whole] if whole else [])


@given(st.lists(st.text("ab\né", max_size=30), max_size=8), st.integers(1, 20))
@settings(max_examples=200, deadline=None)
def test_the_cut_does_not_depend_on_how_a_file_is_read(blocks, size):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text, "CHUNK", size)
        found = list(text.chunks(blocks))
    assert [part for part, _ in found] == cut_whole("".join(blocks), size)
    assert [last for _, last in found] == [False] * (len(found) - 1) + [True] * bool(found)


def test_characters_are_not_cut_by_the_blocks_of_a_file(tmp_path, capsys):
    whole = "\ufeff" + "aé漢🙂\n" * 300_000  # 3.3 MB: several blocks, each cut within a character
    (tmp_path / "a.txt").write_text(whole, encoding="utf-8")
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(whole.encode(), 1))
    (tmp_path / "bad.txt").write_bytes(whole.encode()[:-2])  # ends within a character
    (tmp_path / "late.txt").write_bytes(whole.encode() + b"\0")
    files = [tmp_path / name for name in ("a.txt", "bad.txt", "b.txt.gz", "late.txt")]
    found = list(text.documents(files, left_out=text.LeftOut()))
    assert "".join(part for part, _ in found) == 2 * whole[1:]
    assert sum(last for _, last in found) == 2 and max(len(part) for part, _ in found) <= 1 << 20
    first = f"2 file(s) that are not UTF-8 or hold zero bytes; the first: {tmp_path / 'bad.txt'}\n"
    assert capsys.readouterr().err == f"needle: left out: {first}"


# ---- memory ------------------------------------------------------------------------------------

CHILD = """
import sys
from needle.data import open_data, prepare, text
text.CHUNK, text.GROUP = 1 << 16, 1 << 17
def peak():  # of this program: ru_maxrss begins with that of the process it was forked from
    (line,) = [line for line in open("/proc/self/status") if line.startswith("VmHWM")]
    return int(line.split()[1]) << 10
if __name__ == "__main__":
    way, small, large, tokenizer, out = sys.argv[1:]
    def run(path, out):
        if way == "prepare":
            prepare.prepare([path], tokenizer, out)
        else:
            open_data(path, tokenizer)
    run(small, out + "0")
    before = peak()
    run(large, out + "1")
    print(peak() - before)
"""


def run(code, *words, **variables):
    """Output of a program."""
    found = python(f"import sys; sys.argv[1:] = {[*map(str, words)]!r}\n{code}", **variables)
    assert found.returncode == 0, found.stderr[-2000:]
    return found.stdout


@pytest.mark.parametrize(
    "way, kind", [("open_data", "txt.gz"), ("open_data", "folder"), ("prepare", "txt")]
)
def test_memory_does_not_grow_with_the_text(tmp_path, tokenizer, way, kind):
    """8 MB of text may take 12 MB more than 2 MB of it (1 to 5 were seen; 22 where the ids of all
    are held, 420 where a text is)."""
    paths = []
    for lines in (1 << 6, 1 << 8):
        path = tmp_path / f"{lines}.{kind}"
        block = "one two three four five six seven eight\n" * 800
        if kind == "folder":
            path.mkdir()
            for number in range(lines):
                (path / f"{number}.txt").write_text(block)
        else:
            content = (block * lines).encode()
            path.write_bytes(gzip.compress(content, 1) if kind == "txt.gz" else content)
        paths.append(path)
    words = way, *paths, tokenizer, tmp_path / "out"
    said = run(CHILD, *words, RAYON_NUM_THREADS="1", MALLOC_ARENA_MAX="1")
    assert int(said.split()[-1]) < 12 << 20


@pytest.mark.slow
@pytest.mark.parametrize("name", ["a.txt.zst", "a.txt.gz", "a.jsonl.zst", "a.jsonl.gz"])
def test_small_files_that_unpack_to_much_need_little_memory(tmp_path, name):
    """Text is read to its end; a line of JSON that is longer than lines may be is named."""
    path, block = tmp_path / name, b"a" * (1 << 20)
    if name.endswith(".zst"):
        packer = pytest.importorskip("backports.zstd").ZstdCompressor()
        path.write_bytes(b"".join(packer.compress(block) for _ in range(600)) + packer.flush())
    else:
        path.write_bytes(gzip.compress(block, 9) * 600)
    program = f"""
import resource
from pathlib import Path
from needle.data import DataError, text
text.LONGEST_LINE = 1 << 25
resource.setrlimit(resource.RLIMIT_DATA, (400 << 20,) * 2)
try:
    print(sum(len(piece) for piece, _ in text.documents([Path({str(path)!r})])))
except DataError as error:
    print(error)
"""
    said = run(program, OMP_NUM_THREADS="1")
    if "jsonl" in name:
        assert said.startswith(f"{path}: the line at offset 0: has more than 33,554,432 ")
    else:
        assert int(said) == 600 << 20


# ---- the cache ---------------------------------------------------------------------------------


def test_few_documents_hold_out_their_end(tmp_path, tokenizer):
    for number in range(3):
        (tmp_path / f"{number}.txt").write_text("one two three four five\n" * 50)
    data = open_data(tmp_path / "?.txt", tokenizer)
    end = data.tokenizer.token_to_id("<|endoftext|>")
    every = data.train.tolist() + data.held_out.tolist()
    assert len(data.held_out) == len(every) // 20 and every.count(end) == 3 and every[-1] == end
    assert open_data(tmp_path / "?.txt", tokenizer).fingerprint == data.fingerprint
    np.save(tmp_path / "every.npy", np.array(every, "<u2"))
    assert open_data(tmp_path / "every.npy").fingerprint == data.fingerprint


def test_of_twenty_documents_the_last_is_held_out_alone(tmp_path, tokenizer, monkeypatch):
    """Documents are cut into chunks, and each document ends with its token."""
    monkeypatch.setattr(text, "CHUNK", 40)
    for count in (20, 21, 40):
        texts = [f"one two {number}\n" * (number + 1) for number in range(count)]
        lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
        (tmp_path / "a.jsonl").write_text(lines)
        data, end = open_data(tmp_path / "a.jsonl", tokenizer), "<|endoftext|>"
        held_out = data.tokenizer.decode(data.held_out.tolist(), skip_special_tokens=False)
        assert held_out == "".join(text + end for text in texts[19::20])
        train = data.tokenizer.decode(data.train.tolist(), skip_special_tokens=False)
        assert train == "".join(text + end for n, text in enumerate(texts) if n % 20 != 19)


def test_a_tokenizer_itself_gives_the_tokens_and_the_cache_of_its_path(tmp_path, tokenizer, capsys):
    (tmp_path / "a.txt").write_text("the cat sat on the mat\n" * 40)
    wanted = open_data(tmp_path / "a.txt", tokenizer)
    capsys.readouterr()
    found = open_data(tmp_path / "a.txt", tokenizers.Tokenizer.from_file(str(tokenizer)))
    assert found.fingerprint == wanted.fingerprint and "tokenising" not in capsys.readouterr().out
    with pytest.raises(TypeError, match="a tokenizer must be .* not 300"):
        open_data(tmp_path / "a.txt", 300)


def test_a_damaged_cache_is_named(tmp_path, tokenizer):
    (tmp_path / "a.txt").write_text("one two three\n" * 50)
    open_data(tmp_path / "a.txt", tokenizer)
    (folder,) = (tmp_path / "cache").glob("text-*")
    for name, content in [
        ("train.bin", b""),
        ("facts.json", b""),
        ("facts.json", b"[]"),
        ("facts.json", b'{"dtype": 3, "train": "x"}'),
    ]:
        good = (folder / name).read_bytes()
        (folder / name).write_bytes(content)
        with naming(name), pytest.raises(DataError, match="a damaged cache of tokens .*; delete"):
            open_data(tmp_path / "a.txt", tokenizer)
        (folder / name).write_bytes(good)
    open_data(tmp_path / "a.txt", vocab_size=300)
    (trained,) = {*(tmp_path / "cache").glob("text-*")} - {folder}
    (trained / "tokenizer.json").write_bytes(b"")
    with pytest.raises(DataError, match="a damaged cache of tokens .*; delete"):
        open_data(tmp_path / "a.txt", vocab_size=300)


def test_files_without_text_are_refused(tmp_path, tokenizer, capsys):
    for content in (b"\xff\xfe", b"a\0b", b"\xef\xbb\xbf"):
        (tmp_path / "a.dat").write_bytes(content)
        said = "a.dat: not text: empty, not UTF-8, or with zero bytes; token files"
        with naming(content), pytest.raises(DataError, match=said):
            open_data(tmp_path / "a.dat", tokenizer)
        assert __main__.main(["inspect", str(tmp_path / "a.dat")]) == 1
        assert "a.dat: not text" in capsys.readouterr().err
        assert not [*(tmp_path / "cache").iterdir()]


def test_empty_name_is_not_the_current_folder(tmp_path, tokenizer, monkeypatch, capsys):
    """An unset variable of a shell gives it: --data "$DATA"."""
    path = tmp_path / "t"
    path.mkdir()
    (path / "0.txt").write_text("one two three\n" * 50)
    shutil.copy(tokenizer, path / "tokenizer.json")
    monkeypatch.chdir(path)
    message = r"an empty name \(''\) of a file or folder: the current folder is '.'"
    for names in ("", tokenizer), (".", ""):
        with pytest.raises(DataError, match=message):
            open_data(*names)
    out = str(tmp_path / "x")
    for argv in (
        ["inspect", ""],
        ["view", "", "--step", "1"],
        ["prepare", "0.txt", "", "--tokenizer", str(tokenizer), "--out", out],
        ["prepare", "0.txt", "--tokenizer", str(tokenizer), "--out", ""],
    ):
        assert __main__.main(argv) == 1
        assert "needle data: an empty name ('')" in capsys.readouterr().err, argv
    assert not list(tmp_path.glob("**/*.bin"))


# ---- tokenizers --------------------------------------------------------------------------------


def word_tokenizer(tmp_path, vocabulary, **more):
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, **more))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "words.json"))
    return tmp_path / "words.json"


def test_a_tokenizer_without_end_of_text(tmp_path, tokenizer):
    """Nothing stands between documents, and one that has no ids is none."""
    words = word_tokenizer(tmp_path, {"[UNK]": 0, "one": 1, "two": 2}, unk_token="[UNK]")
    lines = "".join(json.dumps({"text": t}) + "\n" for t in ("one two", " \n", "two", "six one"))
    (tmp_path / "a.jsonl").write_text(lines)
    made = prepare.prepare([str(tmp_path / "a.jsonl")], str(words), str(tmp_path / "x"))
    assert made == {"documents": 3, "tokens": 5}
    found = open_documents(tmp_path / "x")
    assert found.tolist() == [1, 2, 2, 0, 1] and found.sizes.tolist() == [2, 1, 2]
    assert open_data(tmp_path / "a.jsonl", words).train.tolist() == [1, 2, 2, 0, 1]


def test_a_tokenizer_that_leaves_ids_out(tmp_path, tokenizer):
    """The type of the ids follows the largest, not how many there are."""
    words = word_tokenizer(tmp_path, {"[UNK]": 0, "one": 70_000}, unk_token="[UNK]")
    (tmp_path / "a.txt").write_text("one " * 30)
    data = open_data(tmp_path / "a.txt", words)
    assert data.train.dtype == np.int32 and data.vocab_size == 70_001
    assert data.train.tolist() == [70_000] * 29
    prepare.prepare([str(tmp_path / "a.txt")], str(words), str(tmp_path / "x"))
    assert open_documents(tmp_path / "x").tolist() == [70_000] * 30


def test_tokens_that_were_added_count_and_stand_for_no_bytes(tmp_path):
    words = {"a": 0, "bcd": 1, "[UNK]": 2, "\u65e5\u672c": 3, "caf\u00e9": 4}
    path = word_tokenizer(tmp_path, words)
    made = load_tokenizer(path)
    made.add_special_tokens(["<sep>", "<pad>"])
    assert id_limit(made) == 7
    np.testing.assert_array_equal(text.token_bytes(made), [1, 3, 5, 6, 5, 0, 0])


def test_a_text_that_the_tokenizer_cannot_encode(tmp_path, tokenizer):
    words = word_tokenizer(tmp_path, {"one": 0})
    (tmp_path / "a.txt").write_text("one two three")
    with pytest.raises(DataError, match="the tokenizer cannot encode a text, .*'one two three'"):
        open_data(tmp_path / "a.txt", words)


def test_a_document_that_an_index_cannot_say(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setattr(prepare, "LONGEST", 40)
    (tmp_path / "a.txt").write_text("one two three four five\n" * 50)
    with pytest.raises(DataError, match="document 0, .* has more than 40 tokens"):
        prepare.prepare([str(tmp_path / "a.txt")], str(tokenizer), str(tmp_path / "x"))


def test_the_standard_library_has_no_empty_files():
    """Which are left out of other texts with a line that says so."""
    assert min(path.stat().st_size for path in text.standard_library()) > 0
