"""Readers of data: each kind from a file, a folder, a pattern, whatever its name."""

import numpy as np
import pytest
from harness import naming, overwrite
from token_files import IDS, RANDOM, documents_of, write_megatron

from needle.data import Batches, DataError, Documents, open_data
from needle.data.tokens import FlatTokens, map_part, to_ids

# ---- kinds -------------------------------------------------------------------------------------


def test_megatron_of_every_type(tmp_path):
    documents = documents_of(RANDOM.randint(1, 30, 40))
    for dtype in ("u1", "i1", "<i2", "<i4", "<i8", "<u2"):
        write_megatron(tmp_path / "x.1", documents, dtype)
        write_megatron(tmp_path / ".hidden", documents, dtype)
        for name in ("x.1", "x.1.bin", "x.1.idx", "x.*.bin", ""):
            with naming(dtype, name):
                data = open_data(tmp_path / name)
                assert "Megatron, 40 documents" in data.source
                np.testing.assert_array_equal(to_ids(data.train[:]), np.concatenate(documents[:39]))
                np.testing.assert_array_equal(to_ids(data.held_out[:]), documents[39])
                np.testing.assert_array_equal(data.train.sizes, [len(d) for d in documents[:39]])
        ids, targets = Batches(data.train, 2, 8).next()
        assert ids.dtype in (np.int32, np.int64) and ids.shape == targets.shape == (2, 8)
    write_megatron(tmp_path / "y", documents)
    for name in "", "*.bin":
        with pytest.raises(DataError, match="2 Megatron files are in it; name one of them"):
            open_data(tmp_path / name)
    write_megatron(tmp_path / "y", [[1, 2], [], [3]])
    with pytest.raises(DataError, match="y.idx: document 1 .offset 38. is empty"):
        open_data(tmp_path / "y")
    write_megatron(tmp_path / "y", [])
    with pytest.raises(DataError, match="y.idx: 42 bytes, .* and one sequence at least"):
        open_data(tmp_path / "y")
    overwrite(tmp_path / "y.idx", 9, b"\2")
    with pytest.raises(DataError, match="y.idx: its first 34 bytes are no index of version 1"):
        open_data(tmp_path / "y")


def test_megatron_is_split_as_gpt_neox_does(tmp_path):
    """Its last part, of 1 in 1,000, is neither trained on nor held out."""
    documents = [[number % 60, 60] for number in range(1500)]
    write_megatron(tmp_path / "x", documents)
    data = open_data(tmp_path / "x")
    np.testing.assert_array_equal(data.train[:], np.concatenate(documents[:1453]))
    np.testing.assert_array_equal(data.held_out[:], np.concatenate(documents[1453:1498]))


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
    write_megatron(tmp_path / "doc[1]", rows)
    content = (tmp_path / "doc[1].bin").read_bytes()
    expected = open_data(tmp_path / "doc[1]").fingerprint
    (tmp_path / "doc[1].bin").unlink()
    cuts = [0, 10_002, 20_000, len(content)]
    files = [tmp_path / f"doc[1]-{i:05}-of-{last:05}.bin" for i in range(3)]
    for path, low, high in zip(files, cuts, cuts[1:]):
        path.write_bytes(content[low:high])
    (tmp_path / "doc[1]-notes.bin").write_bytes(b"other")
    for name in ("doc[1]", "doc[1].idx", files[0].name, files[2].name, "doc*-of-*", ""):
        data = open_data(tmp_path / name)
        assert data.fingerprint == expected and "preshuffled rows" in data.source
        ids, _ = Batches(data.train, 7, 2048).next()
        np.testing.assert_array_equal(ids, rows[:, :-1])
    files[2].write_bytes(content[20_000:-2])
    with pytest.raises(DataError, match=r"doc\[1\]-\*.bin: ends at offset 28,684, .* truncated"):
        open_data(tmp_path / "doc[1]")
    files[1].unlink()
    with pytest.raises(DataError, match=r"doc\[1\]-\*.bin: ends at .*, or a shard is missing"):
        open_data(tmp_path / "doc[1]")


def test_nanogpt(tmp_path):
    IDS.astype("<u2").tofile(tmp_path / "train.bin")
    assert len(open_data(tmp_path).held_out) == 75
    IDS[:100].astype("<u2").tofile(tmp_path / "val.bin")
    for name in ("", "train.bin"):
        data = open_data(tmp_path / name)
        assert "nanoGPT's train.bin and val.bin" in data.source
        np.testing.assert_array_equal(data.train[:], IDS)
        np.testing.assert_array_equal(data.held_out[:], IDS[:100])
    (tmp_path / "odd.bin").write_bytes(b"three")
    with pytest.raises(DataError, match="odd.bin: 5 bytes are no whole number of uint16 tokens"):
        open_data(tmp_path / "odd.bin")
    data = open_data(tmp_path / "val.bin")
    assert "flat uint16, 100 uint16 tokens" in data.source and len(data.train) == 95


def test_npy(tmp_path):
    path = tmp_path / "x.npy"
    for dtype in ("u1", "<u2", ">u2", "<i4", ">i8", "<u8"):
        np.save(path, IDS.astype(dtype))
        data = open_data(path)
        with naming(dtype):
            assert ".npy, 1,500" in data.source
            np.testing.assert_array_equal(np.concatenate([data.train, data.held_out]), IDS)
            assert len(data.held_out) == 1500 // 20
            batch, _ = Batches(data.train, 4, 16, vocab_size=60).next()
            assert batch.dtype.isnative and batch.max() < 60
    (tmp_path / "two").mkdir()
    for name, dtype in ("a", "<u2"), ("b", "<i4"):
        np.save(tmp_path / "two" / f"{name}.npy", IDS.astype(dtype))
    with pytest.raises(DataError, match="files of several types .*a.npy: uint16, .*b.npy: int32"):
        open_data(tmp_path / "two")
    np.save(path, IDS)
    content = path.read_bytes()
    for shape in (b"-150,", b"9999,", b"2, 75"):
        path.write_bytes(content.replace(b"1500,)", shape + b")"))
        with pytest.raises(DataError, match="x.npy: (not a usable .npy|must hold one axis)"):
            open_data(path)
    for damaged in (b"", b"text\n" * 9, content[:9], content[:100], b"PK\3\4"):
        path.write_bytes(damaged)
        with pytest.raises(DataError, match="x.npy: not a usable .npy"):
            open_data(path)


# ---- reading -----------------------------------------------------------------------------------


def test_tokens_read_like_an_array(tmp_path):
    parts = []
    for number, part in enumerate(np.split(IDS, [100, 101, 700])):
        (tmp_path / f"{number}").write_bytes(b"head" + part.astype("<u2").tobytes())
        parts.append(map_part(tmp_path / f"{number}", "<u2", 4, len(part)))
    tokens = FlatTokens(parts)
    assert len(tokens) == 1500 and tokens.shape == (1500,)
    slices = (None,), (90, 800), (-5, None), (3, 3), (10, 2), (1, 900, 7), (None, None, -3)
    for index in *(slice(*ends) for ends in slices), 0, -1, 100, np.array([[0, 99], [100, -1]]):
        np.testing.assert_array_equal(tokens[index], IDS[index])
    np.testing.assert_array_equal(np.asarray(tokens), IDS)
    assert tokens.tolist() == IDS.tolist() and "4" not in repr(tokens)[:9]
    for low, high in ((0, 1500), (50, 701), (100, 101), (7, 7)):
        np.testing.assert_array_equal(tokens.between(low, high)[:], IDS[low:high])
    np.testing.assert_array_equal(tokens.read((98, 102), (7, 8)), [*IDS[98:102], IDS[7]])
    for bad in (1500, -1501, np.array([0, 1500]), 0.5):
        with pytest.raises(IndexError):
            tokens[bad]
    assert not isinstance(tokens, Documents)
