"""The identity of data: every byte counts, hashes are kept, and files are read again only where
their states changed."""

import contextlib
import errno
import fcntl
import functools
import hashlib
import itertools
import json
import os
import resource
import shutil
import time
import types

import numpy as np
import pytest
from harness import naming, overwrite
from token_files import IDS, of_two, write_megatron, write_shard

from needle.data import DataError, identity, open_data, prepare
from needle.data.runs import run_data


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """Files of a tenth of a second ago count as settled."""
    monkeypatch.setenv("NEEDLE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(identity, "SETTLED", 100_000_000)


@pytest.fixture
def read(monkeypatch):
    """The paths of which bytes were hashed, a list of theirs for each time."""
    calls, real = [], identity.hash_bytes

    def counted(stretches):
        calls.append([stretch.path.name for stretch in stretches])
        return real(stretches)

    monkeypatch.setattr(identity, "hash_bytes", counted)
    return calls


def settle():
    time.sleep(0.15)


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
    if kind == "shards":
        for number in range(3):
            write_shard(folder / f"s_{number}.bin", ids)
        return folder / "s_*.bin", folder / "s_1.bin"
    documents = ids[:34_833].reshape(17, 2049) if kind == "rows" else np.split(ids, [5, 39_000])
    write_megatron(folder / "m", documents)
    return folder / "m", folder / "m.bin"


def test_fingerprint_one_byte_in_place_differs(tmp_path, read):
    """One byte anywhere, with size, inode and time of modification as they were."""
    for kind in ("npy", "flat", "nanoGPT", "shards", "rows", "documents"):
        (tmp_path / kind).mkdir()
        path, file = write_kind(tmp_path / kind, kind)
        settle()
        read.clear()
        with naming(kind):
            before = open_data(path).fingerprint
            assert open_data(path).fingerprint == before and len(read) == 1
            byte = file.read_bytes()[60_001]
            overwrite(file, 60_001, bytes([byte ^ 1]))
            assert open_data(path).fingerprint != before and len(read) == 2
            overwrite(file, 60_001, bytes([byte]))
            assert open_data(path).fingerprint == before


def test_fingerprint_borders_of_documents_differ(tmp_path):
    for name, cuts in ("a", [500, 1000]), ("b", [501, 1000]):
        write_megatron(tmp_path / name, np.split(IDS, cuts))
    assert (tmp_path / "a.bin").read_bytes() == (tmp_path / "b.bin").read_bytes()
    assert open_data(tmp_path / "a").fingerprint != open_data(tmp_path / "b").fingerprint


def test_fingerprint_same_bytes_in_another_inode_are_the_same(tmp_path, read):
    path, _ = write_kind(tmp_path, "npy")
    settle()
    before = open_data(path).fingerprint
    shutil.copyfile(path, tmp_path / "y.npy")
    os.replace(tmp_path / "y.npy", path)
    settle()
    for _ in range(2):
        assert open_data(path).fingerprint == before
    assert len(read) == 2
    (tmp_path / "b").mkdir()
    moved = path.rename(tmp_path / "b" / "z.npy")
    assert open_data(moved).fingerprint == before and len(read) == 3


def test_fingerprint_of_a_link_is_that_of_the_file_it_leads_to(tmp_path):
    for number in (0, 1):
        np.save(tmp_path / f"{number}.npy", IDS + number)
    settle()
    found = []
    for number in (0, 1):
        (tmp_path / "link.npy").unlink(missing_ok=True)
        (tmp_path / "link.npy").symlink_to(tmp_path / f"{number}.npy")
        found.append(open_data(tmp_path / "link.npy").fingerprint)
    assert found[0] != found[1] == open_data(tmp_path / "1.npy").fingerprint


def test_hash_is_that_of_blocks_whatever_files_hold_them(tmp_path, monkeypatch):
    for block in (1, 7, 4096, 80_000, 1 << 26):
        monkeypatch.setattr(identity, "BLOCK", block)
        content = os.urandom(500 if block < 8 else 20_000) * 4
        digests = b"".join(
            hashlib.sha256(content[low : low + block]).digest()
            for low in range(0, len(content), block)
        )
        cuts, stretches = [0, 3, 3, len(content) // 2, len(content)], []
        for number, (low, high) in enumerate(zip(cuts, cuts[1:])):
            path = tmp_path / str(number)
            path.write_bytes(b"head" + content[low:high] + b"tail")
            stretches.append(identity.whole(path)._replace(offset=4, end=4 + high - low))
        with naming(block):
            assert identity.hash_bytes(stretches) == hashlib.sha256(digests).hexdigest()


def test_hash_of_a_file_that_was_just_written_is_made_again(tmp_path, monkeypatch, read):
    """Its clock may not have moved on: a second write could leave the same state."""
    monkeypatch.setattr(identity, "SETTLED", 3600 * 10**9)
    paths = [tmp_path / "old", tmp_path / "new"]
    for path in paths:
        path.write_bytes(b"bytes")
        time.sleep(0.02)
    settled = paths[1].stat().st_ctime_ns + identity.SETTLED
    for now, times in ((settled, 2), (settled + 1, 3)):
        clock = types.SimpleNamespace(time_ns=functools.partial(int, now))
        monkeypatch.setattr(identity, "time", clock)
        for _ in range(2):
            identity.content_hash([*map(identity.whole, paths)])
        assert len(read) == times


def test_hash_a_file_that_changes_meanwhile_is_an_error(tmp_path, monkeypatch):
    path, _ = write_kind(tmp_path, "flat")
    settle()
    real, kept = identity._hash_block, path.read_bytes()
    for change in (
        lambda: overwrite(path, 9, b"other"),
        lambda: path.open("ab").close() or os.truncate(path, 70_000),
        lambda: path.unlink(),
    ):
        path.write_bytes(kept)
        data = open_data(path)
        with monkeypatch.context() as patch:
            patch.setattr(identity, "_hash_block", lambda block, c=change: (real(block), c())[0])
            with pytest.raises(DataError, match="x.bin: changed while it was read: start again"):
                _ = data.fingerprint
    path.write_bytes(kept)
    data = open_data(path)
    shutil.copyfile(path, tmp_path / "y")
    os.replace(tmp_path / "y", path)  # its map shows the file that is gone
    with pytest.raises(DataError, match="x.bin: changed while it was read"):
        _ = data.fingerprint


def test_record_that_is_damaged_is_made_again(tmp_path, read):
    path, _ = write_kind(tmp_path, "npy")
    settle()
    before = open_data(path).fingerprint
    (record,) = (tmp_path / "cache" / "hashes").iterdir()
    for content in (b"", b"{", b"[]", b'{"states": 3}', b"\xff", b"\0" * 90):
        record.write_bytes(content)
        read.clear()
        with naming(content):
            assert open_data(path).fingerprint == before and len(read) == 1
            assert json.loads(record.read_bytes())["hash"] in before


def test_cache_that_cannot_be_written_is_said(tmp_path, monkeypatch, read, capsys):
    path, _ = write_kind(tmp_path, "npy")
    settle()
    (tmp_path / "file").touch()
    monkeypatch.setenv("NEEDLE_CACHE", str(tmp_path / "file" / "cache"))
    assert open_data(path).fingerprint == open_data(path).fingerprint
    assert len(read) == 2
    assert "Not a directory: its content is made again at each start" in capsys.readouterr().err


def test_full_disk_keeps_no_hash(tmp_path, read):
    path, _ = write_kind(tmp_path, "npy")
    settle()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        assert open_data(path).fingerprint == open_data(path).fingerprint and len(read) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_processes_that_want_one_hash_read_the_data_once(tmp_path, monkeypatch, read):
    """Ranks of a machine do so: the second waits for the first, and takes its result."""
    path, _ = write_kind(tmp_path, "npy")
    settle()
    found = of_two(lambda: open_data(path).fingerprint, monkeypatch, identity, "_hash_block")
    assert found[0] == found[1] and len(read) == 1


def test_without_locks_the_hash_is_made(tmp_path, monkeypatch):
    path, _ = write_kind(tmp_path, "npy")

    def none(*args):
        raise OSError(errno.ENOLCK, "No locks available")

    before = open_data(path).fingerprint
    monkeypatch.setattr(fcntl, "flock", none)
    assert open_data(path).fingerprint == before


# ---- text --------------------------------------------------------------------------------------


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
    for kind, trust in itertools.product(("file", "folder", "lines"), (False, True)):
        (tmp_path / f"{kind}{trust}").mkdir()
        path, file = write_texts(tmp_path / f"{kind}{trust}", kind)
        settle()
        with naming(kind, trust):
            assert "owt" not in words(open_data(path, tokenizer, trust=trust))
            overwrite(file, file.read_bytes().index(b"two", 1000), b"owt")
            assert "one owt three" in words(open_data(path, tokenizer, trust=trust))
            capsys.readouterr()
            assert "one owt three" in words(open_data(path, tokenizer, trust=trust))
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


def test_text_that_changes_while_it_is_tokenised_is_an_error(tmp_path, tokenizer, monkeypatch):
    from needle.data import readers

    path, file = write_texts(tmp_path, "folder")
    real = readers._tokenise

    def changing(*args):
        facts = real(*args)
        overwrite(file, 9, b"owt")
        return facts

    monkeypatch.setattr(readers, "_tokenise", changing)
    with pytest.raises(DataError, match="1.txt: changed while it was read"):
        open_data(path, tokenizer)
    assert not list((tmp_path / "cache").glob("*text-*"))


def test_prepare_goes_on_only_with_the_same_bytes(tmp_path, tokenizer, monkeypatch):
    path, file = write_texts(tmp_path, "lines")
    monkeypatch.setattr(prepare, "UNIT", 1000)
    real, done = prepare._encode_unit, []

    def counted(*args):
        done.append(args[2])
        return real(*args)

    def dying(*args):
        if len(done) == 2:
            raise KeyboardInterrupt
        return counted(*args)

    call = [str(path)], str(tokenizer), str(tmp_path / "x"), 1
    settle()
    for change, again in ((None, False), ("touched", False), ("changed", True)):
        done.clear()
        shutil.rmtree(tmp_path / "x.parts", ignore_errors=True)
        with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
            patch.setattr(prepare, "_encode_unit", dying)
            prepare.prepare(*call)
        assert done == [0, 1]
        if change == "touched":
            os.utime(file)
        elif change == "changed":
            overwrite(path / "0.jsonl", 15, b"owt")
        with monkeypatch.context() as patch:
            patch.setattr(prepare, "_encode_unit", counted)
            prepare.prepare(*call)
        assert done[2] == (0 if again else 2)
        for made in "x.bin", "x.idx":
            (tmp_path / made).unlink()


def test_prepare_inputs_that_change_meanwhile_are_an_error(tmp_path, tokenizer, monkeypatch):
    path, file = write_texts(tmp_path, "lines")
    real = prepare._encode_unit

    def changing(*args):
        found = real(*args)
        overwrite(file, 15, b"owt")
        return found

    monkeypatch.setattr(prepare, "_encode_unit", changing)
    with pytest.raises(DataError, match="1.jsonl: changed while it was read"):
        prepare.prepare([str(path)], str(tokenizer), str(tmp_path / "x"), 1)
    assert not list(tmp_path.glob("x*"))


# ---- trusted data ------------------------------------------------------------------------------


def test_trusted_data_are_not_hashed(tmp_path, read):
    path, _ = write_kind(tmp_path, "flat")
    trusted = open_data(path, trust=True)
    assert trusted.fingerprint.endswith("-trusted") and read == []
    assert trusted.source.endswith("40,000 uint16 tokens, trusted: not hashed")
    described = {"path": str(path), "tokenizer": None, "vocab_size": 0}
    hashed = run_data(described).fingerprint
    changed = hashed[:-1] + ("1" if hashed[-1] == "0" else "0")
    with pytest.raises(DataError, match="not the tokens that the run read before"):
        run_data(described, fingerprint=changed)
    assert run_data(described, fingerprint=trusted.fingerprint).fingerprint == hashed
    # A hash that was made before is kept for later starts.
    assert run_data(described, fingerprint=changed, trust=True).fingerprint == changed
    os.truncate(path, 79_998)
    for before in hashed, trusted.fingerprint:
        with pytest.raises(DataError, match="not the tokens that the run read before"):
            run_data(described, fingerprint=before, trust=True)
