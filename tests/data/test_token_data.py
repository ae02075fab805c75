"""Readers of token files, GPT-NeoX's order of samples, and damaged files."""

import contextlib
import ctypes
import gzip
import hashlib
import io
import json
import mmap
import os
import re
import shutil
import struct
import sys
import tempfile
import warnings
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from needle.data import (
    Batches,
    DataError,
    Documents,
    Prefetch,
    __main__,
    megatron,
    open_data,
    sample_order,
    text,
)
from needle.data.tokens import FlatTokens, Part, to_ids

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
        np.testing.assert_array_equal(ids, rows[2 * i : 2 * i + 2, :-1])
        np.testing.assert_array_equal(targets, rows[2 * i : 2 * i + 2, 1:])
    with pytest.raises(DataError, match="for --seq-len 2048, not 512"):
        Batches(data.train, 2, 512)


@pytest.mark.parametrize("last", [2, 3])
def test_published_shards_need_not_be_joined(tmp_path, last):
    """EleutherAI counts 00000-of-00002 to 00002-of-00002, others to 00001-of-00002; rows cross from
    one shard into the next."""
    rows = RANDOM.randint(0, 60, (7, 2049))
    write_megatron(tmp_path / "document", rows)
    content = (tmp_path / "document.bin").read_bytes()
    expected = open_data(tmp_path / "document")
    (tmp_path / "document.bin").unlink()
    cuts = [0, 10_002, 20_000, len(content)]
    files = [tmp_path / f"document-{i:05}-of-{last:05}.bin" for i in range(3)]
    for path, low, high in zip(files, cuts, cuts[1:]):
        path.write_bytes(content[low:high])
    (tmp_path / "document-notes.bin").write_bytes(b"other")
    for name in ("document", "document.idx", files[0].name, files[2].name, ""):
        data = open_data(tmp_path / name)
        assert data.fingerprint == expected.fingerprint and "preshuffled rows" in data.source
        ids, _ = Batches(data.train, 7, 2048).next()
        np.testing.assert_array_equal(ids, rows[:, :-1])
    assert data.train.where(5001) == (files[1], 0)

    files[1].write_bytes(content[10_002:20_001])
    files[2].write_bytes(content[20_001:])
    with pytest.raises(DataError, match="00001-of-.*9,999 bytes are no whole number of uint16"):
        open_data(tmp_path / "document")
    files[2].write_bytes(content[20_001:-1])
    with pytest.raises(DataError, match=r"document-\*.bin: is truncated: it ends at offset 28,685"):
        open_data(tmp_path / "document")
    files[1].unlink()
    with pytest.raises(DataError, match=f"00001-of-0000{last}.bin: no such file, and document-000"):
        open_data(tmp_path / "document")
    files[2].unlink()
    with pytest.raises(DataError, match=f"00001-of-0000{last}.bin: no such file, and those before"):
        open_data(tmp_path / "document")
    files[0].unlink()
    with pytest.raises(DataError, match="document.bin: no such file"):
        open_data(tmp_path / "document")


@pytest.mark.parametrize("block", [1, 3, 1000])
def test_an_index_is_checked_in_blocks(tmp_path, block, monkeypatch):
    monkeypatch.setattr(megatron, "BLOCK", block)
    documents, ends = documents_of(RANDOM.randint(1, 30, 10))
    write_megatron(tmp_path / "x", documents)
    good = (tmp_path / "x.idx").read_bytes()
    np.testing.assert_array_equal(open_data(tmp_path / "x").train.sizes, np.diff(ends, prepend=0))
    for offset, value, kind, message in [
        (34 + 4 * 7, 0, "<i4", "an empty document, number 7, at offset 62"),
        (
            34 + 40 + 8 * 6,
            5,
            "<i8",
            rf"document 6 begins at byte 5 \(offset 122\): not where .* "
            f"ends, {2 * ends[5]}",
        ),
        (34 + 120 + 8 * 4, 11, "<i8", "entry 4 of the document index, at offset 186"),
        (34 + 120 + 8 * 9, 2, "<i8", "entry 9 of the document index, at offset 226"),
    ]:
        content = bytearray(good)
        content[offset : offset + int(kind[-1])] = np.array(value, kind).tobytes()
        (tmp_path / "x.idx").write_bytes(content)
        with pytest.raises(DataError, match=message):
            open_data(tmp_path / "x")


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


@pytest.mark.parametrize("shape", [b"-150, ", b"True, ", b"2, 750"])
def test_npy_of_a_shape_that_is_none(tmp_path, shape):
    np.save(tmp_path / "x.npy", IDS)
    content = (tmp_path / "x.npy").read_bytes()
    (tmp_path / "x.npy").write_bytes(content.replace(b"1500,)", shape[:5] + b")"))
    with pytest.raises(DataError, match="x.npy: (not a usable .npy file.*offset 0|must hold one)"):
        open_data(tmp_path / "x.npy")


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


def test_zst_without_its_package(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setitem(sys.modules, "zstandard", None)
    (tmp_path / "a.jsonl.zst").write_bytes(b"\x28\xb5\x2f\xfd")
    with pytest.raises(DataError, match="pip install zstandard"):
        open_data(tmp_path / "a.jsonl.zst", tokenizer)


@pytest.mark.parity  # where lm_eval is, which needs zstandard
def test_zst(tmp_path, tokenizer):
    zstandard = pytest.importorskip("zstandard")
    lines = json_lines(TEXTS).splitlines(keepends=True)
    frames = [zstandard.ZstdCompressor().compress(b"".join(lines[i::3])) for i in range(3)]
    (tmp_path / "a.jsonl.zst").write_bytes(b"".join(frames))
    assert "30 documents" in open_data(tmp_path / "a.jsonl.zst", tokenizer).source
    for cut in (1, len(frames[2]) - 1):
        (tmp_path / "a.jsonl.zst").write_bytes(b"".join(frames)[:-cut])
        with pytest.raises(DataError, match="a.jsonl.zst: cannot be unpacked"):
            open_data(tmp_path / "a.jsonl.zst", tokenizer)


@pytest.mark.parametrize(
    "line, said",
    [
        ("{", "offset 17: no JSON"),
        ("[]", "`text`"),
        ('{"text": 3}', "`text`"),
        ("[" * 5000, "JSON"),
        ('{"text": ""}', "offset 17: an empty document"),
        ('{"text": "\\ud800"}', "surrogate"),
    ],
)
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


@pytest.mark.parametrize(
    "seq_len, seed, samples, passes, digests",
    [
        (16, 1234, 700, 3, ["f5353d4e31b4ba90", "5ca4c6ff56fec52d", "ffd9dfa54ac1f0d5"]),
        (5, 0, 900, 1, ["672d581510429fc2", "f60923e41e339c6e", "5c1ff92cd2b6795d"]),
    ],
)
def test_the_index_arrays_of_gpt_neox(seq_len, seed, samples, passes, digests):
    """The digests are of what GPT-NeoX's own functions return for these sizes."""
    sizes = (np.arange(97) * 37 % 101 + 1).astype(np.int32)
    assert megatron.passes_for(samples, int(sizes.sum()), seq_len) == passes
    arrays = sample_order(sizes, 0, 97, seq_len, seed, passes)
    assert [array.dtype for array in arrays] == [np.int32, np.int32, np.uint32]
    assert [hashlib.blake2b(a.tobytes(), digest_size=8).hexdigest() for a in arrays] == digests


@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=40),
    st.integers(1, 30),
    st.integers(0, 2**32 - 1),
    st.integers(1, 4),
)
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
        np.testing.assert_array_equal(row, flat[16 * sample : 16 * sample + 17])
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
    content[offset : offset + len(values)] = values
    (tmp_path / "x.idx").write_bytes(content)
    with pytest.raises(DataError) as caught:
        open_data(tmp_path / "x")
    return str(caught.value)


@pytest.mark.parametrize(
    "offset, values, said",
    [
        (0, b"X", "wrong magic at offset 0"),
        (9, b"\2", "version 2 at offset 9"),
        (17, b"\11", "type 9 at offset 17"),
        (18, b"\4", "is truncated: its header promises 4"),
        (18, b"\2", "is too long"),
        (25, b"\x7f", "is truncated"),
        (38, b"\0", "an empty document, number 1, at offset 38"),
        (41, b"\xff", "a document of -1677"),
        (54, b"\x7f", "begins at byte 127 (offset 54): outside"),
        (54, b"\2", "not where the one"),
        (42, b"\x40", "is truncated: it ends at offset 18"),
        (78, b"\x09", "document index"),
        (17, b"\4", "not where the one"),
        (17, b"\1", "not where the one"),
    ],
)
def test_a_damaged_index_is_named_with_its_offset(tmp_path, offset, values, said):
    message = damaged_index(tmp_path, offset, values)
    assert said in message and str(tmp_path / "x") in message


def test_damaged_shards(tmp_path):
    path = tmp_path / "s.bin"
    for changes, said in [
        ({"magic": 20240521}, "wrong magic at offset 0: 20240521"),
        ({"magic": 20240801, "version": 7}, "Llama 3"),
        ({"version": 2}, "version 2 at offset 4"),
        ({"count": 0}, "offset 8"),
        ({"count": 101}, "is truncated"),
        ({"count": 99}, "is long"),
    ]:
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
    with pytest.raises(
        DataError, match="x.bin: has shrunk since it was opened: the file ends at offset 100"
    ):
        batches.next()
    with pytest.raises(DataError, match="has shrunk"):
        Prefetch(batches).next()
    with pytest.raises(DataError, match="has shrunk"):
        data.held_out[:4]


@pytest.mark.parametrize("kind", ["npy", "megatron", "rows"])
def test_ids_outside_the_vocabulary_are_named_with_file_and_offset(tmp_path, kind):
    wrong = IDS.copy()
    wrong[777] = 60
    if kind == "npy":
        np.save(tmp_path / "x.npy", wrong.astype(np.int32))
        data, start, item = open_data(tmp_path / "x.npy"), 128, 4
    else:
        wrong = np.tile(wrong, 3)[:4098] if kind == "rows" else wrong
        wrong[777] = 60
        documents = np.split(wrong, [2049] if kind == "rows" else range(25, 1500, 25))
        wrong[3000 if kind == "rows" else 0 :][:1] = 5
        write_megatron(tmp_path / "x", documents)
        data, start, item = open_data(tmp_path / "x"), 0, 2
    batches = Batches(data.train, 1, 2048 if kind == "rows" else 16, vocab_size=60)
    with pytest.raises(DataError, match="outside the vocabulary of 60") as caught:
        for _ in range(len(batches)):
            batches.next()
    assert f"offset {start + 777 * item:,}: id 60" in str(caught.value)
    negative = Batches(np.array([1, 2, 3, -1, 5], np.int32), 1, 2, vocab_size=60)
    with pytest.raises(DataError, match="token [23]: id -1"):
        for _ in range(2):
            negative.next()


def test_floats_that_are_no_ids():
    for bad in (0.5, np.nan, np.inf, 1e300):
        with pytest.raises(DataError, match="no whole number"):
            to_ids(np.array([1.0, bad]))


def good_files():
    """name: content of a folder, of every kind of file."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_megatron(folder / "m", [IDS[:200], IDS[200:300], IDS[300:777]])
        write_megatron(folder / "f", [IDS[:20], IDS[20:300]], "<f4")
        write_shard(folder / "s.bin", IDS)
        np.save(folder / "n.npy", IDS.astype(np.int32))
        IDS.astype("<u2").tofile(folder / "t.bin")
        (folder / "j.jsonl").write_bytes(json_lines(TEXTS[:3]))
        (folder / "z.jsonl.gz").write_bytes(gzip.compress(json_lines(TEXTS)))
        return {path.name: path.read_bytes() for path in folder.iterdir()}


GOOD = good_files()
# Where numbers stand: (offset, bytes)
FIELDS = {
    "m.idx": [(0, 8), (8, 1), (9, 8), (17, 1), (18, 8), (26, 8)]
    + [(34 + 4 * i, 4) for i in range(3)]
    + [(46 + 8 * i, 8) for i in range(7)],
    "f.idx": [(9, 8), (17, 1), (18, 8), (26, 8), (34, 4), (38, 4), (42, 8), (50, 8)],
    "f.bin": [(4 * i, 4) for i in range(9)],
    "s.bin": [(4 * i, 4) for i in range(5)],
    "n.npy": [(6, 1), (7, 1), (8, 2)],
}


def damage(draw, name, content):
    content = bytearray(content)
    for _ in range(draw(st.integers(1, 3))):
        kind = draw(st.sampled_from(["field", "field", "flip", "cut", "insert", "text", "end"]))
        place = draw(
            st.one_of(
                st.integers(0, min(len(content), 80)),  # where formats are
                st.integers(0, len(content)),
            )
        )
        if kind == "field":
            at, width = draw(st.sampled_from(FIELDS.get(name, [(0, 4), (4, 4)])))
            old = int.from_bytes(content[at : at + width], "little")
            value = draw(
                st.sampled_from(
                    [old + step for step in (-3, -2, -1, 1, 2, 3, 4)]
                    + [0, 1, 60, 2**31 - 1, 2**31, 2**62, 2**63, 2**64 - 1]
                )
            )
            if at < len(content):
                content[at : at + width] = (value % 2 ** (8 * width)).to_bytes(width, "little")
        elif kind == "flip" and place < len(content):
            content[place] ^= 1 << draw(st.integers(0, 7))
        elif kind == "cut":
            del content[place:]
        elif kind == "insert":
            content[place:place] = draw(st.binary(max_size=20))
        elif kind == "text":
            word = draw(
                st.sampled_from(
                    [
                        b"\n",
                        b'""',
                        b"{",
                        b"<f4",
                        b"True",
                        b"\xff",
                        b"(2, 750)",
                        b"60",
                        b"-1",
                        b"1e99",
                        b"null",
                        b'{"text": ""}\n',
                    ]
                )
            )
            content[place : place + len(word)] = word
        elif kind == "end":
            content += draw(st.binary(min_size=1, max_size=5))
    return bytes(content)


def megatron_says(idx, data):
    """(ids) that an index and its .bin hold by the format's description, or None: to be refused."""
    if len(idx) < 34 or idx[:9] != b"MMIDIDX\0\0":
        return None
    version, code, count, entries = struct.unpack("<QBQQ", idx[9:34])
    if version != 1 or not 1 <= code <= 8 or count < 1 or len(idx) != 34 + 12 * count + 8 * entries:
        return None
    sizes = struct.unpack(f"<{count}i", idx[34 : 34 + 4 * count])
    starts = struct.unpack(f"<{count}q", idx[34 + 4 * count : 34 + 12 * count])
    borders = struct.unpack(f"<{entries}q", idx[34 + 12 * count :])
    if (
        min(sizes) < 1
        or list(borders) != sorted(borders)
        or any(not 0 <= border <= count for border in borders)
    ):
        return None
    for dtype in {6: ("<f8", "<f4"), 7: ("<f4", "<f8")}.get(
        code, ({1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}.get(code),)
    ):
        item = np.dtype(dtype).itemsize
        if [item * sum(sizes[:i]) for i in range(count)] == list(starts) and len(
            data
        ) == item * sum(sizes):
            return np.frombuffer(data, dtype)
    return None


def shard_says(content):
    head = np.frombuffer(content[:1024], "<i4") if len(content) >= 1024 else None
    whole = head is not None and head[2] > 0 and len(content) == 1024 + 2 * int(head[2])
    if head is not None and head[0] == 20240520:
        return np.frombuffer(content[1024:], "<u2") if whole and head[1] == 1 else None
    if whole and head[1] in (1, 7) and not head[3:].any():
        return None  # only the magic is wrong
    return np.frombuffer(content, "<u2") if len(content) % 2 == 0 and content else None


def npy_says(content):
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = np.load(io.BytesIO(content))
        return found if found.ndim == 1 and found.dtype.kind in "iu" else None
    except Exception:
        return None


def lines_say(content, name):
    """The documents, or None."""
    try:
        lines = (gzip.decompress(content) if name.endswith(".gz") else content).split(b"\n")
        texts = [json.loads(line)["text"] for line in lines if line.strip()]
        return texts if all(isinstance(t, str) and t.encode() for t in texts) else None
    except Exception:
        return None


@pytest.mark.parametrize("name", sorted(GOOD))
@given(data=st.data())
@settings(
    max_examples=200,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_damaged_files_are_read_as_they_are_or_refused(tmp_path, name, data):
    """Against readers of their own, strict and slow: what these refuse gives a DataError that names
    the file, else the same ids come, and no id outside the vocabulary comes in a batch."""
    shutil.rmtree(tmp_path)
    tmp_path.mkdir()
    files = {**GOOD, name: damage(data.draw, name, GOOD[name])}
    for other in [name, *[n for n in GOOD if n[:2] == name[:2]]]:
        (tmp_path / other).write_bytes(files[other])
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        shown = __main__.main(["inspect", str(tmp_path / name)])
    if "jsonl" in name:
        check_lines(tmp_path / name, lines_say(files[name], name))
        return
    if name[0] in "mf":
        expected = megatron_says(files[f"{name[0]}.idx"], files[f"{name[0]}.bin"])
    else:
        says = {"s.bin": shard_says, "t.bin": shard_says, "n.npy": npy_says}[name]
        expected = says(files[name])
    if expected is None:
        with pytest.raises(DataError) as caught:
            open_data(tmp_path / name)
        assert str(tmp_path / name[:1]) in str(caught.value)
        assert re.search("offset|bytes|empty file|one axis", str(caught.value))
        assert shown == 1 and str(tmp_path) in said.getvalue()
        return
    found = open_data(tmp_path / name)
    np.testing.assert_array_equal(np.concatenate([found.train, found.held_out]), expected)
    if len(found.train) < 9:
        with pytest.raises(DataError, match=f"{tmp_path / name[:1]}.*fewer than one batch"):
            Batches(found.train, 1, 8, samples=200)
        return
    batches = Batches(found.train, 1, 8, samples=200, vocab_size=60)
    # Of windows the last few ids make no whole one; documents are walked several times.
    drawn = expected[: len(found.train) if name[0] in "mf" else 8 * len(batches) + 1]
    with np.errstate(all="ignore"):
        good = ((drawn >= 0) & (drawn < 60) & (drawn == np.floor(drawn))).all()
    with (
        contextlib.nullcontext()
        if good
        else pytest.raises(DataError, match=f"{tmp_path / name[:1]}.*: offset ")
    ):
        for _ in range(len(batches)):
            ids, targets = batches.next()
            assert 0 <= min(ids.min(), targets.min()) and max(ids.max(), targets.max()) < 60


def check_lines(path, expected):
    def read():
        return "".join(piece + "|" * last for piece, last in text.documents([path]))

    if expected is None:
        with pytest.raises(DataError, match="offset") as caught:
            read()
        assert str(path) in str(caught.value)
    else:
        assert read() == "".join(document + "|" for document in expected)


@given(st.sampled_from(["m", "s.bin", "n.npy", "t.bin"]), st.floats(0, 0.999))
@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_files_that_shrink_while_mapped(tmp_path, name, share):
    """Cut anywhere: an error that names file and offset, and no signal that ends the process."""
    for other, content in GOOD.items():
        (tmp_path / other).write_bytes(content)
    batches = Batches(open_data(tmp_path / name).train, 2, 8)
    path = tmp_path / ("m.bin" if name == "m" else name)
    end = int(share * len(GOOD[path.name]) * 0.9)
    os.truncate(path, end)
    with pytest.raises(
        DataError, match=f"has shrunk since it was opened: the file ends at offset {end:,}"
    ) as caught:
        batches.next()
    assert str(path) in str(caught.value)


# ---- reading -----------------------------------------------------------------------------------


def resident(part):
    """How many pages of the second half of a part's map are in memory."""
    libc, page = ctypes.CDLL(None, use_errno=True), mmap.PAGESIZE
    address = part._ids.ctypes.data - part.offset
    pages = (ctypes.c_ubyte * -(-part.end // page))()
    assert libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(part.end), pages) == 0
    return sum(page & 1 for page in pages[len(pages) // 2 :])


@pytest.mark.parametrize("kind", ["flat", "megatron"])
def test_samples_bring_in_their_own_pages_and_no_others(tmp_path, kind):
    """A sample costs no readahead, and those of a batch are announced before the first is read."""
    sizes = [1 << 20] * 64
    write_megatron(tmp_path / "x", [[]] if kind == "flat" else [[0]])
    if kind == "megatron":
        with open(tmp_path / "x.idx", "wb") as file:
            megatron.write_index(file, np.dtype("<u2"), sizes)
    else:
        (tmp_path / "x.idx").unlink()
    os.truncate(tmp_path / "x.bin", 2 * sum(sizes))  # a hole: it is read as zeros
    batches = Batches(open_data(tmp_path / "x.bin").train, 32, 1000, samples=10)
    (part,) = batches.tokens.parts
    log = []
    tokens = batches.tokens
    for name in ("announce", "read"):

        def note(*stretch, name=name, call=getattr(tokens, name)):  # noqa: B008
            log.append((name, stretch))
            return call(*stretch)

        setattr(tokens, name, note)
    assert not batches.next_rows().any()
    # Of all 16,384: samples of 2 pages at most, and 64 stretches of 16 KiB, which are looked at to
    # tell these data from others.
    assert resident(part) <= 32 * 2 + 64 * 5
    half = len(log) // 2
    assert [name for name, _ in log] == ["announce"] * half + ["read"] * half
    assert [stretch for _, stretch in log[:half]] == [stretch for _, stretch in log[half:]]


def test_tokens_read_like_an_array(tmp_path):
    parts = []
    for number, piece in enumerate(np.split(IDS, [100, 101, 700])):
        (tmp_path / f"{number}").write_bytes(b"head" + piece.astype("<u2").tobytes())
        parts.append(Part(tmp_path / f"{number}", 4, "<u2", len(piece)))
    tokens = FlatTokens(parts)
    assert len(tokens) == tokens.size == 1500 and tokens.shape == (1500,)
    for index in (
        slice(None),
        slice(90, 800),
        slice(99, 102),
        slice(-5, None),
        slice(3, 3),
        slice(10, 2),
        slice(1, 900, 7),
        slice(None, None, -3),
        0,
        -1,
        100,
        np.array([[0, 99], [100, -1]]),
    ):
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
