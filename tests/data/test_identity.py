"""The identity of data: which changes it sees, and which runs of earlier versions go on."""

import hashlib
import os
import shutil
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from harness import naming, overwrite
from token_files import IDS, write_megatron

from needle.data import DataError, cache, identity, open_data
from needle.data.runs import run_data


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


KINDS = ("npy", "flat", "nanoGPT", "rows", "documents")


def test_fingerprint_one_byte_in_place_differs(tmp_path):
    """One byte anywhere, with size, inode and time of modification as they were."""
    for kind in KINDS:
        (tmp_path / kind).mkdir()
        path, file = write_kind(tmp_path / kind, kind)
        with naming(kind):
            before, byte = open_data(path).fingerprint, file.read_bytes()[60_001]
            assert open_data(path).fingerprint == before
            overwrite(file, 60_001, bytes([byte ^ 1]))
            assert open_data(path).fingerprint != before
            overwrite(file, 60_001, bytes([byte]))
            assert open_data(path).fingerprint == before


def test_fingerprint_borders_of_documents_differ(tmp_path):
    for name, cuts in ("a", [500, 1000]), ("b", [501, 1000]):
        write_megatron(tmp_path / name, np.split(IDS, cuts))
    assert (tmp_path / "a.bin").read_bytes() == (tmp_path / "b.bin").read_bytes()
    assert open_data(tmp_path / "a").fingerprint != open_data(tmp_path / "b").fingerprint


def test_fingerprint_same_bytes_elsewhere_are_the_same(tmp_path):
    for number in (0, 1):
        np.save(tmp_path / f"{number}.npy", IDS + number)
    (tmp_path / "link.npy").symlink_to(tmp_path / "1.npy")
    found = [open_data(tmp_path / f"{name}.npy").fingerprint for name in ("0", "1", "link")]
    assert found[0] != found[1] == found[2]


def test_hash_is_that_of_blocks_whatever_files_hold_them(tmp_path, monkeypatch):
    """Of all bytes, or above a size of blocks spread evenly; `every` asks for all again."""
    for block, size in ((1, 2000), (7, 2000), (4096, 80_000), (80_000, 80_000), (1 << 26, 80_000)):
        content = os.urandom(size)
        cuts, stretches = [0, 3, 3, size // 2, size], []
        for number, (low, high) in enumerate(zip(cuts, cuts[1:])):
            path = tmp_path / str(number)
            path.write_bytes(b"head" + content[low:high] + b"tail")
            stretches.append((path, 4, high - low))

        def expected(starts, length, content=content):
            blocks = (content[start : start + length] for start in starts)
            digests = b"".join(hashlib.sha256(one).digest() for one in blocks)
            return hashlib.sha256(digests).hexdigest()

        monkeypatch.setattr(identity, "BLOCK", block)
        monkeypatch.setattr(identity, "SAMPLES", 5)
        monkeypatch.setattr(identity, "SAMPLE", 30)
        with naming(block):
            whole = expected(range(0, size, block), block)
            monkeypatch.setattr(identity, "ALL", size)
            assert identity.content_hash(stretches) == whole
            monkeypatch.setattr(identity, "ALL", size - 1)
            starts = [(size - 30) * number // 4 for number in range(5)]
            sampled = identity.content_hash(stretches)
            assert sampled == "sampled-" + expected(starts, 30)
            assert identity.content_hash(stretches, every=True) == whole


def test_hash_of_a_file_that_shrinks_meanwhile_is_an_error(tmp_path):
    path, _ = write_kind(tmp_path, "flat")
    data = open_data(path)
    os.truncate(path, 70_000)
    with pytest.raises(DataError, match="x.bin: has shrunk while it was read"):
        _ = data.fingerprint


def test_runs_of_earlier_versions_go_on(tmp_path, monkeypatch):
    """Their fingerprints have a hash of all bytes, whatever their size, or `trusted` instead."""
    path, file = write_kind(tmp_path, "flat")
    described = {"path": str(path), "tokenizer": None, "vocab_size": 0}
    whole = run_data(described).fingerprint
    shape = hashlib.sha256(b"<u2 38000 2000").hexdigest()[:16]
    blocks = hashlib.sha256(hashlib.sha256(file.read_bytes()).digest()).hexdigest()
    assert whole == f"{shape}-{blocks}"
    monkeypatch.setattr(identity, "ALL", 70_000)
    monkeypatch.setattr(identity, "SAMPLE", 100)
    sampled = run_data(described).fingerprint
    assert sampled.startswith(f"{shape}-sampled-")
    for before in whole, sampled, f"{shape}-trusted":
        assert run_data(described, fingerprint=before).fingerprint == sampled
    for before in whole[:-1] + "x", sampled[:-1] + "x", f"{shape[:-1]}x-trusted":
        with pytest.raises(DataError, match="not the tokens that the run read before"):
            run_data(described, fingerprint=before)


# ---- the cache of text -------------------------------------------------------------------------


def words(data):
    return data.tokenizer.decode(data.train.tolist() + data.held_out.tolist())


def write_texts(tmp_path, kind):
    (tmp_path / "t").mkdir()
    paths = [tmp_path / "t" / f"{n}.{'jsonl' if kind == 'lines' else 'txt'}" for n in range(3)]
    for path in paths:
        line = "one two three four five six\n"
        path.write_text('{"text": "one two three four"}\n' * 99 if kind == "lines" else line * 99)
    return (paths[1] if kind == "file" else tmp_path / "t"), paths[1]


def test_text_that_changed_in_place_is_tokenised_again(tmp_path, tokenizer, capsys):
    for kind in ("file", "folder", "lines"):
        (tmp_path / kind).mkdir()
        path, file = write_texts(tmp_path / kind, kind)
        with naming(kind):
            assert "owt" not in words(open_data(path, tokenizer))
            overwrite(file, file.read_bytes().index(b"two", 1000), b"owt")
            assert "one owt three" in words(open_data(path, tokenizer))
            capsys.readouterr()
            assert "one owt three" in words(open_data(path, tokenizer))
            assert "tokenising" not in capsys.readouterr().out


def test_text_of_the_same_bytes_elsewhere_is_in_the_cache(tmp_path, tokenizer, capsys):
    path, file = write_texts(tmp_path, "folder")
    (path / "0.txt").write_text("six five\n" * 99)
    open_data(path, tokenizer)
    shutil.copytree(path, tmp_path / "copy")
    os.utime(file)
    capsys.readouterr()
    for one in path, tmp_path / "copy":
        assert "one two three" in words(open_data(one, tokenizer))
    assert "tokenising" not in capsys.readouterr().out
    (path / "0.txt").rename(path / "4.txt")  # the order of the documents
    open_data(path, tokenizer)
    assert "tokenising" in capsys.readouterr().out


def test_text_whose_files_are_cut_elsewhere_is_other_text(tmp_path, tokenizer):
    path, _ = write_texts(tmp_path, "folder")
    first, second, ends = path / "0.txt", path / "1.txt", []
    for _ in range(2):
        found = open_data(path, tokenizer)
        end = found.tokenizer.token_to_id("<|endoftext|>")
        ends.append(found.train.tolist().index(end))
        moved = first.read_bytes()[-28:]
        second.write_bytes(moved + second.read_bytes())
        os.truncate(first, first.stat().st_size - len(moved))
    assert ends[1] < ends[0]


def changing(monkeypatch, change):
    """Have `change` happen while a text is tokenised."""
    real = cache._tokenise
    monkeypatch.setattr(cache, "_tokenise", lambda *given: (real(*given), change()))


def test_text_that_changes_while_it_is_tokenised_is_an_error(tmp_path, tokenizer, monkeypatch):
    path, file = write_texts(tmp_path, "folder")
    changing(monkeypatch, lambda: file.write_text("other"))
    with pytest.raises(DataError, match="t: changed while it was read"):
        open_data(path, tokenizer)
    assert not list((tmp_path / "cache").iterdir())


def test_cache_of_two_that_tokenise_one_text_is_whole(tmp_path, tokenizer, monkeypatch):
    path, _ = write_texts(tmp_path, "file")
    changing(monkeypatch, lambda: time.sleep(0.3))  # the other is at it too
    with ThreadPoolExecutor(2) as pool:
        found = [*pool.map(lambda _: words(open_data(path, tokenizer)), range(2))]
    assert found[0] == found[1] == "one two three four five six\n" * 99
    assert len(list((tmp_path / "cache").iterdir())) == 1


def test_cache_that_cannot_be_is_named(tmp_path, tokenizer, monkeypatch):
    path, _ = write_texts(tmp_path, "file")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    (tmp_path / "file").touch()
    for settings, said in (
        ({"NEEDLE_CACHE": str(tmp_path / "file" / "x")}, "cannot be written .Not a directory."),
        ({"NEEDLE_CACHE": "", "HOME": str(tmp_path / "file")}, "cannot be written .Not a dir"),
        ({"NEEDLE_CACHE": "", "HOME": None}, "this user has no home; set NEEDLE_CACHE"),
    ):
        for name, value in settings.items():
            monkeypatch.delenv(name) if value is None else monkeypatch.setenv(name, value)
        monkeypatch.setattr("pwd.getpwuid", dict().__getitem__)  # a user that nothing knows
        with naming(settings), pytest.raises(DataError, match=said):
            open_data(path, tokenizer)
    np.save(tmp_path / "x.npy", IDS)
    assert open_data(tmp_path / "x.npy").fingerprint  # tokens need no cache
