"""Readers of token files, GPT-NeoX's order of samples, batches made ahead, and damaged files."""

import gc
import gzip
import hashlib
import io
import json
import os
import shutil
import struct
import threading

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import needle as ndl
from needle import _C
from needle.data import Batches, DataError, Documents, Prefetch, megatron, open_data, sample_order
from needle.data.tokens import FlatTokens, Part, to_ids

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]
RANDOM = np.random.RandomState(5)
IDS = RANDOM.randint(0, 60, 1500)


def write_megatron(prefix, documents, dtype="<u2"):
    """Written here as the format is described, not by needle's own writer."""
    code = {"u1": 1, "i1": 2, "<i2": 3, "<i4": 4, "<i8": 5, "<f8": 6, "<f4": 7, "<u2": 8}[dtype]
    item = np.dtype(dtype).itemsize
    with open(f"{prefix}.bin", "wb") as file:
        for document in documents:
            file.write(np.array(document, dtype).tobytes())
    sizes = [len(document) for document in documents]
    starts = [item * sum(sizes[:i]) for i in range(len(sizes))]
    with open(f"{prefix}.idx", "wb") as file:
        file.write(b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, code, len(sizes), len(sizes) + 1))
        file.write(struct.pack(f"<{len(sizes)}i", *sizes))
        file.write(struct.pack(f"<{len(sizes)}q", *starts))
        file.write(struct.pack(f"<{len(sizes) + 1}q", *range(len(sizes) + 1)))


def write_shard(path, ids, magic=20240520, version=1, count=None):
    header = np.zeros(256, "<i4")
    header[:3] = magic, version, len(ids) if count is None else count
    path.write_bytes(header.tobytes() + np.array(ids, "<u2").tobytes())


def documents_of(sizes):
    ends = np.cumsum(sizes)
    return [RANDOM.randint(0, 60, size) for size in sizes], ends


# ---- kinds -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["u1", "i1", "<i2", "<i4", "<i8", "<f8", "<f4", "<u2"])
def test_megatron_of_every_type(tmp_path, dtype):
    documents, _ = documents_of(RANDOM.randint(1, 30, 40))
    write_megatron(tmp_path / "x", documents, dtype)
    for name in ("x", "x.bin", "x.idx", ""):
        data = open_data(tmp_path / name)
        assert "Megatron, 40 documents" in data.source and "GPT-NeoX" in data.source
        np.testing.assert_array_equal(to_ids(data.train[:]), np.concatenate(documents[:39]))
        np.testing.assert_array_equal(to_ids(data.held_out[:]), documents[39])
        np.testing.assert_array_equal(data.train.sizes, [len(d) for d in documents[:39]])
    ids, targets = Batches(data.train, 2, 8).next()
    assert ids.dtype in (np.int32, np.int64) and ids.shape == targets.shape == (2, 8)


def test_type_7_of_eight_bytes_is_read_by_its_size(tmp_path):
    write_megatron(tmp_path / "x", [[1, 2, 3], [4, 5]], "<f8")
    content = bytearray((tmp_path / "x.idx").read_bytes())
    content[17] = 7
    (tmp_path / "x.idx").write_bytes(content)
    np.testing.assert_array_equal(open_data(tmp_path / "x").train[:], [1, 2, 3, 4, 5])


def test_preshuffled_rows_come_in_the_order_of_the_file(tmp_path):
    rows = RANDOM.randint(0, 60, (7, 2049))
    write_megatron(tmp_path / "document", rows)
    data = open_data(tmp_path / "document")
    assert "preshuffled rows of 2,049" in data.source and len(data.held_out) == 0
    batches = Batches(data.train, 2, 2048, seed=9)
    assert len(batches) == 3
    for i in (0, 1, 2, 0):
        ids, targets = batches.next()
        np.testing.assert_array_equal(ids, rows[2 * i:2 * i + 2, :-1])
        np.testing.assert_array_equal(targets, rows[2 * i:2 * i + 2, 1:])
    with pytest.raises(DataError, match="for --seq-len 2048, not 512"):
        Batches(data.train, 2, 512)


def test_llmc_shards_in_a_folder_a_pattern_and_alone(tmp_path):
    for number, part in enumerate(np.split(IDS, 3)):
        write_shard(tmp_path / f"web_train_{number:06}.bin", part)
    for name in ("", "*.bin", "web_train_*.bin"):
        data = open_data(tmp_path / name)
        assert "llm.c, 3 files, 1,500 uint16" in data.source
        np.testing.assert_array_equal(np.concatenate([data.train, data.held_out]), IDS)
    assert len(open_data(tmp_path / "web_train_000001.bin").train) == 475
    # windows cross from one file into the next
    batches = Batches(FlatTokens(data.train.parts), 3, 16)
    assert len(np.unique(np.concatenate([batches.next()[0].ravel() for _ in range(29)]))) == 60
    write_shard(tmp_path / "web_val_000000.bin", IDS[:40])
    data = open_data(tmp_path)
    assert "3 + 1 files" in data.source
    np.testing.assert_array_equal(data.held_out[:], IDS[:40])
    np.testing.assert_array_equal(data.train[:], IDS)


def test_nanogpt(tmp_path):
    IDS.astype("<u2").tofile(tmp_path / "train.bin")
    assert "no val.bin" in open_data(tmp_path).source
    IDS[:100].astype("<u2").tofile(tmp_path / "val.bin")
    for name in ("", "train.bin"):
        data = open_data(tmp_path / name)
        assert "nanoGPT's train.bin and val.bin" in data.source
        np.testing.assert_array_equal(data.train[:], IDS)
        np.testing.assert_array_equal(data.held_out[:], IDS[:100])
    data = open_data(tmp_path / "val.bin")
    assert "flat uint16, 100 uint16 tokens" in data.source and len(data.train) == 95


@pytest.mark.parametrize("dtype", ["u1", "<u2", ">u2", "<i4", ">i8", "<u8"])
def test_npy(tmp_path, dtype):
    np.save(tmp_path / "x.npy", IDS.astype(dtype))
    data = open_data(tmp_path / "x.npy")
    assert ".npy, 1,500" in data.source
    np.testing.assert_array_equal(np.concatenate([data.train, data.held_out]), IDS)
    batch, _ = Batches(data.train, 4, 16, vocab_size=60).next()
    assert batch.dtype.isnative and batch.max() < 60


@pytest.fixture
def tokenizer(tmp_path, monkeypatch):
    tokenizers = pytest.importorskip("tokenizers")
    monkeypatch.setenv("NEEDLE_CACHE", str(tmp_path / "cache"))
    from needle.data import train_tokenizer

    made = train_tokenizer(iter(["one two three four five six seven\n" * 20]), 300)
    made.save(str(tmp_path / "tokenizer.json"))
    assert isinstance(made, tokenizers.Tokenizer)
    return tmp_path / "tokenizer.json"


TEXTS = [f"document {i}: ünïcode\n" + "one two three four " * (i % 7 + 1) for i in range(30)]


def json_lines(texts):
    return "".join(json.dumps({"meta": 1, "text": text}) + "\n" for text in texts).encode()


@pytest.mark.parametrize("name, pack", [("a.jsonl", bytes), ("a.jsonl.gz", gzip.compress)])
def test_json_lines(tmp_path, tokenizer, name, pack):
    (tmp_path / name).write_bytes(pack(json_lines(TEXTS)))
    data = open_data(tmp_path / name, tokenizer)
    assert "JSON lines, 30 documents" in data.source
    held_out = data.tokenizer.decode(data.held_out.tolist())
    assert held_out == TEXTS[19]
    trained = data.tokenizer.decode(data.train.tolist())
    assert trained == "".join(TEXTS[:19] + TEXTS[20:])


def test_zst(tmp_path, tokenizer):
    try:
        import zstandard
    except ImportError:
        (tmp_path / "a.jsonl.zst").write_bytes(b"\x28\xb5\x2f\xfd")
        with pytest.raises(DataError, match="pip install zstandard"):
            open_data(tmp_path / "a.jsonl.zst", tokenizer)
        return
    lines = json_lines(TEXTS).splitlines(keepends=True)
    frames = [zstandard.ZstdCompressor().compress(b"".join(lines[i::3])) for i in range(3)]
    (tmp_path / "a.jsonl.zst").write_bytes(b"".join(frames))
    assert "30 documents" in open_data(tmp_path / "a.jsonl.zst", tokenizer).source
    for cut in (1, len(frames[2]) - 1):
        (tmp_path / "a.jsonl.zst").write_bytes(b"".join(frames)[:-cut])
        with pytest.raises(DataError, match="a.jsonl.zst: cannot be unpacked"):
            open_data(tmp_path / "a.jsonl.zst", tokenizer)


@pytest.mark.parametrize("line, said", [
    ("{", "offset 17: no JSON"), ("[]", "`text`"), ('{"text": 3}', "`text`"), ("[" * 5000, "JSON"),
    ('{"text": ""}', "offset 17: an empty document"), ('{"text": "\\ud800"}', "surrogate")])
def test_a_bad_line_is_named(tmp_path, tokenizer, line, said):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "good"}\n' + line + "\n")
    with pytest.raises(DataError, match="a.jsonl: the line at offset 17") as caught:
        open_data(path, tokenizer)
    assert said in str(caught.value)


def test_text_patterns_and_packed_text(tmp_path, tokenizer):
    for number in range(3):
        (tmp_path / f"{number}.txt").write_text(TEXTS[number])
    assert "3 documents" in open_data(tmp_path / "?.txt", tokenizer).source
    (tmp_path / "p.txt.gz").write_bytes(gzip.compress(TEXTS[0].encode()))
    data = open_data(tmp_path / "p.txt.gz", tokenizer)
    assert "packed text" in data.source
    (tmp_path / "cut.txt.gz").write_bytes(gzip.compress(TEXTS[0].encode())[:-9])
    with pytest.raises(DataError, match="cut.txt.gz: cannot be unpacked"):
        open_data(tmp_path / "cut.txt.gz", tokenizer)


# ---- the order of GPT-NeoX ---------------------------------------------------------------------


@pytest.mark.parametrize("seq_len, seed, samples, passes, digests", [
    (16, 1234, 700, 3, ["f5353d4e31b4ba90", "5ca4c6ff56fec52d", "ffd9dfa54ac1f0d5"]),
    (5, 0, 900, 1, ["672d581510429fc2", "f60923e41e339c6e", "5c1ff92cd2b6795d"])])
def test_the_index_arrays_of_gpt_neox(seq_len, seed, samples, passes, digests):
    """The digests are of what GPT-NeoX's own functions return for these sizes."""
    sizes = (np.arange(97) * 37 % 101 + 1).astype(np.int32)
    assert megatron.passes_for(samples, int(sizes.sum()), seq_len) == passes
    arrays = sample_order(sizes, 0, 97, seq_len, seed, passes)
    assert [array.dtype for array in arrays] == [np.int32, np.int32, np.uint32]
    assert [hashlib.blake2b(a.tobytes(), digest_size=8).hexdigest() for a in arrays] == digests


@given(st.lists(st.integers(0, 40), min_size=1, max_size=40), st.integers(1, 30),
       st.integers(0, 2**32 - 1), st.integers(1, 4))
@settings(max_examples=60, deadline=None)
def test_samples_walk_the_shuffled_documents(sizes, seq_len, seed, passes):
    """Against a walk of one id after the other."""
    sizes = np.array(sizes, np.int32)
    if sizes.sum() * passes < seq_len + 1:
        return
    doc_idx, sample_idx, shuffle_idx = sample_order(sizes, 0, len(sizes), seq_len, seed, passes)
    assert np.array_equal(np.bincount(doc_idx, minlength=len(sizes)), np.full(len(sizes), passes))
    walk = [(place, i) for place, document in enumerate(doc_idx) for i in range(sizes[document])]
    expected = [(0, 0), *walk[seq_len::seq_len]]
    np.testing.assert_array_equal(sample_idx, expected)
    assert sorted(shuffle_idx) == list(range(len(sample_idx) - 1))


@pytest.mark.parametrize("count", [1, 2, 16, 17, 33, 34, 50, 100, 1000, 210_607_728])
def test_the_split_covers_all_documents(count):
    borders = megatron.split_documents(count)
    assert borders[0] == 0 and borders[-1] == count
    assert abs(borders[1] - 0.969 * count) <= 1.5


def test_packed_batches_hold_the_samples_of_the_index(tmp_path):
    documents, _ = documents_of(RANDOM.randint(1, 50, 40))
    write_megatron(tmp_path / "x", documents)
    data = open_data(tmp_path / "x")
    batches = Batches(data.train, 3, 16, seed=7, samples=150)
    sizes = np.array([len(d) for d in documents[:39]], np.int32)
    passes = megatron.passes_for(150, int(sizes.sum()), 16)
    assert passes > 1 and batches.position == {"epoch": 0, "batch": 0, "passes": passes}
    doc_idx, sample_idx, shuffle_idx = sample_order(sizes, 0, 39, 16, 7, passes)
    flat = np.concatenate([documents[i] for i in doc_idx])
    seen = []
    for _ in range(len(batches)):
        ids, targets = batches.next()
        seen += [np.append(i, t[-1]) for i, t in zip(ids, targets)]
    for sample, row in zip(shuffle_idx, seen):
        np.testing.assert_array_equal(row, flat[16 * sample:16 * sample + 17])
    position = {"epoch": 0, "batch": 4, "passes": passes}
    shorter = Batches(data.train, 3, 16, seed=7)  # another number of steps
    shorter.seek(position)
    np.testing.assert_array_equal(shorter.next_rows(), seen[12:15])
    shorter.seek_batch(len(shorter) + 2)
    assert shorter.position == {"epoch": 1, "batch": 2, "passes": passes}


# ---- what is wrong with a file -----------------------------------------------------------------


def damaged_index(tmp_path, offset, values):
    write_megatron(tmp_path / "x", [[1, 2, 3], [4, 5], [6, 7, 8, 9]])
    content = bytearray((tmp_path / "x.idx").read_bytes())
    content[offset:offset + len(values)] = values
    (tmp_path / "x.idx").write_bytes(content)
    with pytest.raises(DataError) as caught:
        open_data(tmp_path / "x")
    return str(caught.value)


@pytest.mark.parametrize("offset, values, said", [
    (0, b"X", "wrong magic at offset 0"), (9, b"\2", "version 2 at offset 9"),
    (17, b"\11", "type 9 at offset 17"), (18, b"\4", "is truncated: its header promises 4"),
    (18, b"\2", "is too long"), (25, b"\x7f", "is truncated"),
    (38, b"\0", "an empty document, number 1, at offset 38"), (41, b"\xff", "a document of -1677"),
    (54, b"\x7f", "begins at byte 127 (offset 54): outside"), (54, b"\2", "not where the one"),
    (42, b"\x40", "is truncated: it ends at offset 18"), (78, b"\x09", "document index"),
    (17, b"\4", "not where the one"), (17, b"\1", "not where the one")])
def test_a_damaged_index_is_named_with_its_offset(tmp_path, offset, values, said):
    message = damaged_index(tmp_path, offset, values)
    assert said in message and str(tmp_path / "x") in message


def test_damaged_shards(tmp_path):
    path = tmp_path / "s.bin"
    for changes, said in [({"magic": 20240521}, "wrong magic at offset 0: 20240521"),
                          ({"magic": 20240801, "version": 7}, "Llama 3"),
                          ({"version": 2}, "version 2 at offset 4"), ({"count": 0}, "offset 8"),
                          ({"count": 101}, "is truncated"), ({"count": 99}, "is long")]:
        write_shard(path, IDS[:100], **changes)
        with pytest.raises(DataError, match="s.bin") as caught:
            open_data(path)
        assert said in str(caught.value)
    write_shard(path, IDS[:100])
    (tmp_path / "t.bin").write_bytes(b"something else altogether")
    with pytest.raises(DataError, match="t.bin: is truncated"):
        open_data(tmp_path)
    path.unlink()
    with pytest.raises(DataError, match="t.bin: wrong magic"):
        open_data(tmp_path)


def test_a_file_that_shrinks_while_mapped(tmp_path):
    path = tmp_path / "x.bin"
    IDS.astype("<u2").tofile(path)
    data = open_data(path)
    batches = Batches(data.train, 2, 16)
    batches.next()
    os.truncate(path, 100)
    with pytest.raises(DataError, match="x.bin: has shrunk since it was opened: the file ends at "
                                        "offset 100"):
        batches.next()
    with pytest.raises(DataError, match="has shrunk"):
        Prefetch(batches).next()
    with pytest.raises(DataError, match="has shrunk"):
        data.held_out[:4]


@pytest.mark.parametrize("kind", ["npy", "megatron", "rows"])
def test_ids_outside_the_vocabulary_are_named_with_file_and_offset(tmp_path, kind):
    wrong = IDS.copy()
    wrong[777] = 61
    if kind == "npy":
        np.save(tmp_path / "x.npy", wrong.astype(np.int32))
        data, start, item = open_data(tmp_path / "x.npy"), 128, 4
    else:
        wrong = np.tile(wrong, 3)[:4098] if kind == "rows" else wrong
        wrong[777] = 61
        documents = np.split(wrong, [2049] if kind == "rows" else range(25, 1500, 25))
        wrong[3000 if kind == "rows" else 0:][:1] = 5
        write_megatron(tmp_path / "x", documents)
        data, start, item = open_data(tmp_path / "x"), 0, 2
    batches = Batches(data.train, 1, 2048 if kind == "rows" else 16, vocab_size=60)
    with pytest.raises(DataError, match="outside the vocabulary of 60") as caught:
        for _ in range(len(batches)):
            batches.next()
    assert f"offset {start + 777 * item:,}: id 61" in str(caught.value)
    negative = Batches(np.array([1, 2, 3, -1, 5], np.int32), 1, 2, vocab_size=60)
    with pytest.raises(DataError, match="token [23]: id -1"):
        for _ in range(2):
            negative.next()


def test_floats_that_are_no_ids():
    for bad in (0.5, np.nan, np.inf, 1e300):
        with pytest.raises(DataError, match="no whole number"):
            to_ids(np.array([1.0, bad]))


def good_files():
    """name: content of a folder, of every kind of token file."""
    import tempfile
    from pathlib import Path

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_megatron(folder / "m", [IDS[:200], IDS[200:300], IDS[300:777]])
        write_megatron(folder / "f", [IDS[:20], IDS[20:300]], "<f4")
        write_shard(folder / "s.bin", IDS)
        np.save(folder / "n.npy", IDS.astype(np.int32))
        IDS.astype("<u2").tofile(folder / "t.bin")
        (folder / "j.jsonl.gz").write_bytes(gzip.compress(json_lines(TEXTS)))
        return {path.name: path.read_bytes() for path in folder.iterdir()}


GOOD = good_files()


def damage(draw, content):
    content = bytearray(content)
    for _ in range(draw(st.integers(1, 4))):
        kind = draw(st.sampled_from(["flip", "cut", "insert", "word"]))
        # the beginnings are where formats are
        place = draw(st.one_of(st.integers(0, min(len(content), 80)),
                               st.integers(0, len(content))))
        if kind == "flip" and place < len(content):
            content[place] ^= 1 << draw(st.integers(0, 7))
        elif kind == "cut":
            del content[place:]
        elif kind == "insert":
            content[place:place] = draw(st.binary(max_size=20))
        elif kind == "word":
            value = draw(st.sampled_from([0, 1, 2**31 - 1, 2**31, 2**62, 2**63, 2**64 - 1]))
            content[place:place + 8] = value.to_bytes(8, "little")
    return bytes(content)


@given(st.data())
@settings(max_examples=300, deadline=None,
          suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
def test_damaged_files_give_errors_and_never_crash(tmp_path, data):
    """Either a DataError that names the file, or ids inside the vocabulary."""
    from needle.data.text import json_lines as read_json_lines

    shutil.rmtree(tmp_path)
    tmp_path.mkdir()
    name = data.draw(st.sampled_from(sorted(GOOD)))
    for other, content in GOOD.items():
        (tmp_path / other).write_bytes(content)
    (tmp_path / name).write_bytes(damage(data.draw, GOOD[name]))
    try:
        if name.endswith(".gz"):
            assert all(read_json_lines(tmp_path / name))
            return
        found = open_data(tmp_path / name)
        assert len(found.train[:]) == len(found.train)
        batches = Batches(found.train, 2, 8, samples=200, vocab_size=60)
        for _ in range(min(len(batches), 40) + 1):
            ids, targets = batches.next()
            assert 0 <= min(ids.min(), targets.min()) and max(ids.max(), targets.max()) < 60
        np.asarray(found.held_out)
    except DataError as error:
        assert str(tmp_path) in str(error) or "fewer than one batch" in str(error)


# ---- reading -----------------------------------------------------------------------------------


def test_tokens_read_like_an_array(tmp_path):
    parts = []
    for number, piece in enumerate(np.split(IDS, [100, 101, 700])):
        (tmp_path / f"{number}").write_bytes(b"head" + piece.astype("<u2").tobytes())
        parts.append(Part(tmp_path / f"{number}", 4, "<u2", len(piece)))
    tokens = FlatTokens(parts)
    assert len(tokens) == tokens.size == 1500 and tokens.shape == (1500,)
    for index in (slice(None), slice(90, 800), slice(99, 102), slice(-5, None), slice(3, 3),
                  slice(10, 2), slice(1, 900, 7), slice(None, None, -3), 0, -1, 100,
                  np.array([[0, 99], [100, -1]])):
        np.testing.assert_array_equal(tokens[index], IDS[index])
    np.testing.assert_array_equal(np.asarray(tokens), IDS)
    assert tokens.tolist() == IDS.tolist() and "4" not in repr(tokens)[:9]
    for low, high in ((0, 1500), (50, 701), (100, 101), (7, 7)):
        np.testing.assert_array_equal(tokens.between(low, high)[:], IDS[low:high])
    np.testing.assert_array_equal(tokens.rows(np.array([98, 0]), 5), [IDS[98:103], IDS[:5]])
    assert tokens.where(100) == (tmp_path / "1", 4)
    assert tokens.where(1499) == (tmp_path / "3", 4 + 2 * 799)
    for bad in (1500, -1501, np.array([0, 1500]), 0.5):
        with pytest.raises(IndexError):
            tokens[bad]
    assert not isinstance(tokens, Documents)


# ---- ahead of time -----------------------------------------------------------------------------


def device_of(name):
    return ndl.cpu() if name == "cpu" else ndl.cuda()


def host(array):
    return array if isinstance(array, np.ndarray) else array.numpy()


@pytest.mark.parametrize("device", DEVICES)
def test_prefetch_draws_the_same_batches_and_knows_its_position(device):
    def fresh():
        return Batches(IDS, 3, 16, seed=4, vocab_size=60)

    plain, ahead = fresh(), Prefetch(fresh(), device_of(device), depth=3)
    assert len(ahead) == len(plain)
    held = []
    for _ in range(2 * len(plain) + 5):
        assert ahead.position == plain.position
        assert (ahead.epoch, ahead.batch) == (plain.epoch, plain.batch)
        held.append((ahead.next(), plain.next()))
    for got, expected in held:  # none was overwritten by a later one
        for a, b in zip(got, expected):
            np.testing.assert_array_equal(host(a), b)
    position = ahead.position
    ahead.close()
    ahead.close()
    assert ahead.position == position
    np.testing.assert_array_equal(host(ahead.next()[0]), plain.next()[0])
    ahead.seek({"epoch": 1, "batch": 2})
    plain.seek({"epoch": 1, "batch": 2})
    np.testing.assert_array_equal(host(ahead.next()[1]), plain.next()[1])
    ahead.close()


def threads():
    return [t for t in threading.enumerate() if t.name == "needle.data.Prefetch"]


def test_a_dropped_prefetch_ends_its_thread():
    ahead = Prefetch(Batches(IDS, 3, 16))
    ahead.next()
    (thread,) = threads()
    del ahead
    gc.collect()
    thread.join(10)
    assert not threads()


def test_an_error_arrives_with_its_batch():
    tokens = np.zeros(161, np.int32)
    tokens[:] = 99
    ahead = Prefetch(Batches(tokens, 2, 16, vocab_size=60))
    for _ in range(2):
        with pytest.raises(DataError, match="id 99 is outside the vocabulary of 60"):
            ahead.next()
    assert ahead.position == {"epoch": 0, "batch": 0}
    ahead.close()


@pytest.mark.cuda
def test_a_gpu_needs_the_vocabulary():
    with pytest.raises(ValueError, match="vocab_size"):
        Prefetch(Batches(IDS, 3, 16), ndl.cuda())


@pytest.mark.parametrize("device", DEVICES)
def test_staging(device):
    where = device_of(device)
    staging = _C.Staging(4 * 24, where)
    memory = np.frombuffer(staging, np.int32)
    assert memory.flags.writeable and len(memory) == 24
    sent = []
    for number in range(50):
        staging.wait()
        memory[:] = np.arange(24) + number
        sent.append(staging.send((2, 3, 4), "int32"))
    for number, array in enumerate(sent):
        assert array.device == where and array.dtype == "int32"
        np.testing.assert_array_equal(array.numpy(), np.arange(24).reshape(2, 3, 4) + number)
    staging.wait()
    assert staging.send((0, 3), "float32").shape == (0, 3)
    np.testing.assert_array_equal(staging.send((5,), "uint8").numpy(), memory.view(np.uint8)[:5])
    staging.wait()
    del staging  # the buffer keeps the memory
    memory[:] = 1
    with pytest.raises(ValueError, match="25"):
        _C.Staging(25, where).send((26,), "uint8")
    for bad in (0, -1):
        with pytest.raises(ValueError, match="1 or more"):
            _C.Staging(bad, where)
    with pytest.raises((MemoryError, RuntimeError)):
        _C.Staging(2**62, where)
    assert io.BytesIO(_C.Staging(3, where)).getbuffer().nbytes == 3
