"""The identity of data, by which runs go on and cached text is found: which changes it sees."""

import hashlib
import os
import resource
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from harness import ROOT, naming, overwrite
from token_files import IDS, write_megatron

from needle.data import DataError, open_data, readers, tokens


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("NEEDLE_CACHE", str(tmp_path / "cache"))


def write_kind(folder, kind):
    """Data of a kind with 40,000 tokens: (what --data takes, the file of byte 60,001)."""
    ids = np.arange(40_000, dtype="<u2") % 60
    if kind == "npy":
        np.save(folder / "x.npy", ids)
        return folder / "x.npy", folder / "x.npy"
    if kind == "flat":
        ids.tofile(folder / "x.bin")
        return folder / "x.bin", folder / "x.bin"
    if kind == "nanoGPT":
        ids.tofile(folder / "train.bin")
        ids.tofile(folder / "val.bin")
        return folder, folder / "val.bin"
    documents = ids[:34_833].reshape(17, 2049) if kind == "rows" else np.split(ids, [5, 39_000])
    write_megatron(folder / "m", documents)
    return folder / "m", folder / "m.bin"


def test_fingerprint_sees_one_byte_in_place_and_borders_of_documents(tmp_path):
    """One byte, with size, inode and time of modification as they were; not where a file lies."""
    for kind in "npy", "flat", "nanoGPT", "rows", "documents":
        (tmp_path / kind).mkdir()
        path, file = write_kind(tmp_path / kind, kind)
        with naming(kind):
            before, byte = open_data(path).fingerprint, file.read_bytes()[60_001]
            shutil.copytree(tmp_path / kind, tmp_path / f"{kind}2")
            copy = tmp_path / f"{kind}2" / ("" if kind == "nanoGPT" else path.name)
            assert open_data(copy).fingerprint == before
            overwrite(file, 60_001, bytes([byte ^ 1]))
            assert open_data(path).fingerprint != before
    ids = np.arange(40_000, dtype="<u2")
    for dtype in "<u2", ">u2":  # other ids of the same bytes
        np.save(tmp_path / f"{dtype}.npy", ids.view(dtype))
    one, other = (open_data(tmp_path / f"{dtype}.npy").fingerprint for dtype in ("<u2", ">u2"))
    assert one.split("-")[1] == other.split("-")[1] and one != other
    found = set()
    for place in 10_000, 20_000:  # of which another part is held out
        ids[:place].tofile(tmp_path / "train.bin")
        ids[place:].tofile(tmp_path / "val.bin")
        found.add(open_data(tmp_path / "train.bin").fingerprint)
    assert len(found) == 2
    for name, cuts in ("a", [500, 1000]), ("b", [501, 1000]):
        write_megatron(tmp_path / name, np.split(IDS, cuts))
    assert (tmp_path / "a.bin").read_bytes() == (tmp_path / "b.bin").read_bytes()
    assert open_data(tmp_path / "a").fingerprint != open_data(tmp_path / "b").fingerprint


def test_hash_is_of_all_bytes_or_of_blocks_spread_evenly(tmp_path, monkeypatch):
    """Of all bytes in blocks, or above a size of a number of blocks."""
    content, cuts, stretches = os.urandom(2000), [0, 3, 3, 1000, 2000], []
    for number, (low, high) in enumerate(zip(cuts, cuts[1:])):
        path = tmp_path / str(number)
        path.write_bytes(b"head" + content[low:high] + b"tail")
        stretches.append((path, 4, high - low))

    def expected(starts, length):
        blocks = (content[start : start + length] for start in starts)
        digests = b"".join(hashlib.sha256(one).digest() for one in blocks)
        return hashlib.sha256(digests).hexdigest()

    monkeypatch.setattr(tokens, "SAMPLES", 5)
    monkeypatch.setattr(tokens, "SAMPLE", 30)
    for block in 1, 7, 2000, 1 << 26:
        monkeypatch.setattr(tokens, "BLOCK", block)
        monkeypatch.setattr(tokens, "ALL", 2000)
        assert tokens.content_hash(stretches) == expected(range(0, 2000, block), block)
        monkeypatch.setattr(tokens, "ALL", 1999)
        sampled = expected([1970 * number // 4 for number in range(5)], 30)
        assert tokens.content_hash(stretches) == f"sampled-{sampled}"


def test_text_may_be_in_more_files_than_a_process_can_open(tmp_path, tokenizer):
    (tmp_path / "t").mkdir()
    for number in range(300):
        (tmp_path / "t" / f"{number:03}.txt").write_text(f"one {number}\n")
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (200, before[1]))
    try:
        data = open_data(tmp_path / "t", tokenizer)
        assert "300 documents" in data.source and data.fingerprint
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


# ---- the cache of text -------------------------------------------------------------------------

LINE = "one two three four five six\n"


def words(data):
    return data.tokenizer.decode(data.train.tolist() + data.held_out.tolist())


@pytest.fixture
def folder(tmp_path):
    """A folder of three texts."""
    (tmp_path / "t").mkdir()
    for number in range(3):
        (tmp_path / "t" / f"{number}.txt").write_text(LINE * 99)
    return tmp_path / "t"


def test_text_is_tokenised_once_and_again_when_bytes_or_their_order_change(
    tmp_path, tokenizer, folder, monkeypatch, capsys
):
    file, lines = folder / "1.txt", tmp_path / "a.jsonl"
    lines.write_text('{"text": "one two three four"}\n' * 99)

    def said(path):
        found = words(open_data(path, tokenizer))
        return found, "tokenising" in capsys.readouterr().out

    for path, changed in (file, file), (folder, file), (lines, lines):
        with naming(path):
            before, made = said(path)
            assert made and not said(path)[1]
            overwrite(changed, changed.read_bytes().index(b"two", 1000), b"owt")
            after, made = said(path)
            assert made and before != after and "one owt three" in after and not said(path)[1]
    os.utime(file)
    assert not said(folder)[1] and not said(shutil.copytree(folder, tmp_path / "copy"))[1]
    moved = (folder / "0.txt").read_bytes()[-28:]  # a border of documents
    (folder / "1.txt").write_bytes(moved + (folder / "1.txt").read_bytes())
    os.truncate(folder / "0.txt", 98 * 28)
    assert said(folder)[1] and not said(folder)[1]
    monkeypatch.setattr("tokenizers.__version__", "another")
    assert said(folder)[1]


def changing(monkeypatch, change, name="_tokenise"):
    """Have `change` happen while a text is tokenised, or hashed."""
    real = getattr(readers, name)
    monkeypatch.setattr(readers, name, lambda *given: (real(*given), change())[0])


def test_cache_is_whole_or_not_there(tmp_path, tokenizer, folder, monkeypatch):
    """Of a text that changes meanwhile, of two that tokenise one at once, and after a kill."""
    for number, name in enumerate(("_tokenise", "content_hash")):
        with monkeypatch.context() as patch:
            text = f"{number}{LINE[1:]}" * 99
            changing(patch, lambda text=text: (folder / "1.txt").write_text(text), name)
            with pytest.raises(DataError, match="t: changed while it was read"):
                open_data(folder, tokenizer)
        assert not list((tmp_path / "cache").iterdir())
    changing(monkeypatch, lambda: time.sleep(0.3))  # the other is at it too
    with ThreadPoolExecutor(2) as pool:
        found = [*pool.map(lambda _: words(open_data(folder / "0.txt", tokenizer)), range(2))]
    assert found[0] == found[1] == LINE * 99
    (made,) = (tmp_path / "cache").iterdir()
    shutil.rmtree(made)
    code = "import os; from needle.data import readers; readers._tokenise = lambda *_: os._exit(9)"
    code += f"; readers.open_data({str(folder / '0.txt')!r}, {str(tokenizer)!r})"
    killed = subprocess.run([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.DEVNULL)
    assert killed.returncode == 9
    open_data(folder / "0.txt", tokenizer)
    assert [*(tmp_path / "cache").iterdir()] == [made]


@pytest.mark.parametrize("name", ["train.bin", "held_out.bin", "facts.json", "tokenizer.json"])
def test_a_damaged_folder_of_the_cache_is_named_to_be_deleted(tmp_path, folder, name):
    """Its files are missing, cut, as a lack of power leaves them, or of other content."""
    for number in range(readers.HELD_OUT):
        (folder / f"{number}.txt").write_text(LINE * 9)
    open_data(folder, vocab_size=270)
    (made,) = (tmp_path / "cache").iterdir()
    good = (made / name).read_bytes()
    for damaged in (None, b"", good[:-1], good[:-2], b"{}", b'{"documents": 1, "dtype": "x"}'):
        (made / name).unlink() if damaged is None else (made / name).write_bytes(damaged)
        with naming(damaged), pytest.raises(DataError, match=f"{made}: delete this damaged folder"):
            open_data(folder, vocab_size=270)
    shutil.rmtree(made)
    open_data(folder, vocab_size=270)


def test_tokenizer_that_is_trained_has_the_size_that_is_asked_for(folder):
    for size in 270, 264, 270:
        assert open_data(folder, vocab_size=size).vocab_size == size


def test_cache_lies_where_the_environment_says_else_at_home(tmp_path, monkeypatch):
    for name, value, place in (
        ("XDG_CACHE_HOME", str(tmp_path / "xdg"), "cache"),  # NEEDLE_CACHE goes before
        ("NEEDLE_CACHE", "", "xdg/needle"),
        ("XDG_CACHE_HOME", "", ".cache/needle"),
    ):
        monkeypatch.setenv("HOME", str(tmp_path))
        monkeypatch.setenv(name, value)
        assert readers.cache_dir() == tmp_path / place


def test_cache_that_cannot_be_is_named(tmp_path, tokenizer, folder, monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    (tmp_path / "file").touch()
    monkeypatch.setattr("pwd.getpwuid", dict().__getitem__)  # a user that nothing knows
    for settings, said in (
        ({"NEEDLE_CACHE": str(tmp_path / "file" / "x")}, "cannot be written .Not a directory."),
        ({"NEEDLE_CACHE": "", "HOME": None}, "this user has no home: set NEEDLE_CACHE"),
    ):
        for name, value in settings.items():
            monkeypatch.delenv(name) if value is None else monkeypatch.setenv(name, value)
        with naming(settings), pytest.raises(DataError, match=said):
            open_data(folder, tokenizer)
    np.save(tmp_path / "x.npy", IDS)
    assert open_data(tmp_path / "x.npy").fingerprint  # tokens need no cache
