"""What files are read as: tables of files and of what open_data, `prepare` and `inspect` find."""

import gzip
import json
import os
import sys

import numpy as np
import pytest
from harness import naming
from token_files import IDS, json_lines

from needle.data import DataError, __main__, kinds, load_tokenizer, open_data, open_documents
from needle.data.readers import open_tokens

TWO = json_lines(["one", "two\n"])
LONG = json_lines(["三 " * 500, "three"])
BOM = "\ufeff".encode()
NULLS = b'null\nnull\n{"text": "one"}\n'
EMPTY = b'{"text": ""}\n{"text": null}\nnull\n\n'
pack = gzip.compress

LINES = [  # whatever their name
    *(({name: TWO}, ["one", "two\n"]) for name in ("a.JSONL", "a.json", "lines", "not_packed.gz")),
    *(({name: pack(TWO)}, ["one", "two\n"]) for name in ("a.jsonl.gz", "packed")),
    *(({"a.json": start + TWO}, ["one", "two\n"]) for start in (BOM, b"\n \n", b"null\n")),
    ({"a.json": b'{"id": 3, "text": null}\n' + TWO}, ["one", "two\n"]),
    *(({name: LONG}, ["三 " * 500, "three"]) for name in ("a.txt", "lines")),
    ({"a.txt": LONG.replace(b'"text":', b'"text" :')}, ["三 " * 500, "three"]),
    ({"nulls.jsonl": NULLS}, ["one"]),
    ({"bom": BOM + json_lines(["one"])}, ["one"]),
    ({"b.json.gz": pack(LONG)}, ["三 " * 500, "three"]),
]
TEXTS = [
    ({"braces.c": b"{ int x = 3; }\n{ }\n"}, ["{ int x = 3; }\n{ }\n"]),
    ({"a.md": b"{} is a dict\n"}, ["{} is a dict\n"]),
    ({"a.py": b"{\n" + b'"text":\n' * 200}, ["{\n" + '"text":\n' * 200]),
    ({"deep.json": b"[" * 5000}, ["[" * 5000]),
    ({"list.md": b"[1] Knuth, 1973\n"}, ["[1] Knuth, 1973\n"]),
    ({"nulls.txt": NULLS}, [NULLS.decode()]),
    ({"PAR1": b"PAR1 is a gene\n"}, ["PAR1 is a gene\n"]),
    ({"a.txt.gz": pack("ünï".encode())}, ["ünï"]),
    ({"bom.txt": BOM + b"one"}, ["one"]),
    # Folders: files before folders, by name; what is left out.
    ({"b.txt": b"three", "a.jsonl": TWO, "0/c.txt": b"4"}, ["one", "two\n", "three", "4"]),
    ({"a.txt": b"one", ".b.txt": b"two", ".c/d.txt": b"three"}, ["one"]),
    ({"a.txt": b"one", "b.json": b'[{"text": "two"}]'}, ["one", '[{"text": "two"}]']),
]
ARRAY, NOT_LINES = (
    [{"id": 1, "text": "one"}, {"id": 2, "text": "two"}],
    "JSON, but not one object a",
)
NOT_TEXT = "a.dat: not text: empty, not UTF-8, or with zero bytes; token files"
SHARDS = [np.array([head, 1, 99], "<i4").tobytes() for head in (20240520, 20240801)]
INFO = {"x/train/dataset_info.json": b'{\n  "citation": ""\n}'}  # of datasets.save_to_disk
REFUSED = [
    *(({"a.txt": text.encode()}, NOT_LINES) for text in (
        json.dumps(ARRAY), json.dumps(ARRAY, indent=1), json.dumps(ARRAY[0], indent=1),
        '{"name": "x", "version": "1"}\n', "[1, 2, 3]\n", '{"data": [{"text": "one"}]}',
        '{"level": 1}\n{"level": 2}\n', json.dumps(ARRAY * (1 << 16), indent=1),
    )),
    ({**INFO, "x/train/0.arrow": b"\xff\xff\xff\xff\x30\0\0\0"}, "0.arrow: a .*load_from_disk"),
    ({**INFO, "x/train/f.feather": b"ARROW1\0\0"}, "f.feather: a .*load_dataset..arrow"),
    ({**INFO, "x/train/t.parquet": b"PAR1\x15\x04"}, "t.parquet: a .*load_dataset..parquet"),
    *(({**INFO, "x/train/shard.bin": head}, "shard.bin: a .*llm.c.*512") for head in SHARDS),
    *(({"a.dat": content}, NOT_TEXT) for content in (b"\xff\xfe", b"a\0b", BOM)),
    ({"a.txt.gz": pack(b"one" * 99)[:-9]}, "a.txt.gz: cannot be unpacked"),
    ({"caf\udce9.txt": b"some text\n"}, r"\\xe9.*a name that is not UTF-8; rename it"),
    *(({f"a.{end}": b"{\n{\n"}, "line 1, at offset 0: no obj") for end in (
        "jsonl", "ndjson.gz", "JSONL", "jsonl.zst",
    )),
]  # fmt: skip
# A line of JSON lines, behind a good one.
BAD_LINES = [
    *(b"{", b"[" * 5000, b"[]", b'"text"', b'{"text": 3}', b'{"text": "\\ud800"}', b"\xff"),
    b'{"body": "b", "id": 3}',
]


@pytest.fixture
def written(tmp_path):
    """written(files) -> the paths by which the files of a row can be given: their folder, and where
    there is one, the file and a pattern."""

    def write(files):
        folder = tmp_path / f"d{len(list(tmp_path.iterdir()))}"
        for name, content in files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        return [folder] if len(files) > 1 else [path, folder, folder / "*"]

    return write


def texts_of(ids, tokenizer):
    text = load_tokenizer(tokenizer).decode(ids, skip_special_tokens=False)
    return text.split("<|endoftext|>")[:-1]


def prepare(path, tokenizer, *more):
    """(exit code, documents)"""
    out = tokenizer.with_name("out")
    words = ["prepare", str(path), "--tokenizer", str(tokenizer), "--out", str(out)]
    code = __main__.main([*words, *more])
    if code:
        assert not list(out.parent.glob("out.*"))
        return code, None
    found = open_documents(out).tolist()
    for path in out.parent.glob("out.*"):
        path.unlink()
    return code, texts_of(found, tokenizer)


def test_documents_are_what_a_file_holds_whatever_its_name(written, tokenizer, monkeypatch, capsys):
    monkeypatch.setattr(kinds, "HEAD", 1000)
    monkeypatch.setattr("needle.data.text.CHUNK", 40)  # so that some documents are several
    for kind, rows in ("JSON lines", LINES), ("text", TEXTS):
        for files, wanted in rows:
            for path in written(files):
                with naming(path, *files):
                    data = open_data(path, tokenizer)
                    ids = data.train.tolist() + data.held_out.tolist()
                    assert texts_of(ids, tokenizer) == wanted
                    assert f"{kind}, " in data.source and f"{len(wanted)} documents" in data.source
                    assert prepare(path, tokenizer) == (0, wanted)
                    assert __main__.main(["inspect", str(path)]) == 0


def test_what_is_no_text_is_refused_by_name(written, tokenizer, capsys):
    """Not read as what lies beside it, and in the same words by each command."""
    for files, said in REFUSED:
        for path in written(files):
            with naming(path, *files):
                with pytest.raises(DataError, match=said) as caught:
                    open_data(path, tokenizer)
                assert __main__.main(["inspect", str(path)]) == prepare(path, tokenizer)[0] == 1
                assert capsys.readouterr().err.count(str(caught.value)) == 2


def test_bad_line_is_named_or_left_out_and_counted(written, tokenizer, capsys):
    good, other = b'{"text": "good"}\n', "no object of JSON with a string as its field `text`"
    for line in BAD_LINES:
        said = r"`text` has \\ud800, half of" if b"ud800" in line else other
        path = written({"a.jsonl": b"\n" + good + line + b"\n" + good + line})[0]
        with naming(line[:20]):
            with pytest.raises(DataError, match=f"line 3, at offset 18: .*{said}"):
                open_data(path, tokenizer)
            assert prepare(path, tokenizer)[0] == 1
            error = capsys.readouterr().err
            assert "--skip-bad-lines` leaves such" in error
            assert ("byte 0xff in position 0" in error) is (line == b"\xff")
            assert ("it has body, id: `prepare --field`" in error) is (b"body" in line)
            assert prepare(path, tokenizer, "--skip-bad-lines") == (0, ["good", "good"])
            error = " ".join(capsys.readouterr().err.split())
            assert f"left out: 2 bad line(s); the first: {path}: line 3, at offset 18: " in error


def test_empty_documents_and_files_that_are_no_text_are_counted(written, tokenizer, capsys):
    files = {"a.jsonl": EMPTY + b'{"text": "one"}\n' + EMPTY, "b.txt": b"", "c.txt": BOM}
    files |= {"d.txt": b"two", "e.png": b"\x89PNG\0", "f.txt.gz": pack(b"\xff\xfe")}
    (folder,) = written(files)
    # Where a tokenizer is trained the folder is read twice.
    for read, *more in (open_data, tokenizer), (open_data,), (prepare, tokenizer):
        read(folder, *more)
        error = capsys.readouterr().err
        assert all(len(line) <= 80 or " " not in line.strip() for line in error.splitlines())
        error, first = " ".join(error.split()), f"{folder / 'a.jsonl'}: line 1, at offset 0"
        assert f"left out: 8 empty document(s); the first: {first} " in error
        said = "2 file(s) that are not UTF-8 or hold zero bytes"
        assert f"{said}; the first: {folder / 'e.png'}" in error
        assert error.count("left out: 8 ") == error.count(said) == 1


def test_field_of_json_lines_may_be_named(written, tokenizer, capsys):
    line = b'{"id": "1", "content": "one"}\n'
    path = written({"p.json.gz": pack(line + line)})[0]
    assert prepare(path, tokenizer)[0] == 1
    assert "string `text`, as needle reads it: jq" in capsys.readouterr().err
    assert prepare(path, tokenizer, "--field", "content") == (0, ["one", "one"])


def test_packed_by_zstandard(written, tokenizer, monkeypatch):
    zstd = pytest.importorskip("backports.zstd")
    frames = b"".join(map(zstd.compress, TWO.splitlines(keepends=True)))
    skipped = b"\x5e\x2a\x4d\x18\x03\0\0\0any"  # a frame that says something else
    packer = zstd.ZstdCompressor(options={zstd.CompressionParameter.window_log: 28})
    wide = packer.compress(TWO) + packer.flush()  # more than is unpacked unasked
    for content in (skipped + frames, wide, frames):
        path = written({"a.jsonl.zst": content})[0]
        assert "2 documents" in open_data(path, tokenizer).source
    path.write_bytes(frames[:-1])
    with pytest.raises(DataError, match="a.jsonl.zst: cannot be unpacked"):
        open_data(path, tokenizer)
    for package in "compression", "backports":
        monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(DataError, match=f"{sys.executable} -m pip install backports.zstd"):
        open_data(path, tokenizer)


def test_tokens_are_told_by_their_bytes_and_flat_ones_by_name(tmp_path):
    for start in (b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"\xff\xff\xff\xff", b"PAR1\x15\0"):
        (tmp_path / "x.BIN").write_bytes(start + IDS.astype("<u2").tobytes())
        data = open_data(tmp_path / "x.BIN")
        assert np.concatenate([data.train, data.held_out]).tobytes().startswith(start)
    (tmp_path / "d").mkdir()
    for name, ids in ("a", IDS[:700]), ("b.bin", IDS[700:]):
        with open(tmp_path / "d" / name, "wb") as file:
            np.save(file, ids)
    (tmp_path / "d" / "notes").mkdir()
    (tmp_path / "d" / "notes" / "a.txt").write_text("text")
    for path in tmp_path / "d", tmp_path / "d" / "*":
        data = open_data(path)
        assert ".npy, 2 files" in data.source
        np.testing.assert_array_equal(np.concatenate([data.train, data.held_out]), IDS)
    (tmp_path / "d" / "c.txt").write_text("text")
    with pytest.raises(DataError, match="files of several kinds: .npy, text"):
        open_data(tmp_path / "d" / "*")
    assert open_tokens(tmp_path / "d") is None  # a folder of texts, which leaves the others out


def test_folder_that_cannot_be_read_is_named(written, tokenizer, monkeypatch):
    folder, scan = written({"a.txt": b"one", "shut/b.txt": b"two"})[0], os.scandir

    def refuse(path):
        if str(path).endswith("shut"):
            raise PermissionError(13, "Permission denied", str(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(DataError, match="shut: cannot be read: Permission denied"):
        open_data(folder, tokenizer)


def test_linked_files_and_folders_are_read_and_circles_are_named(written, tokenizer):
    (far,) = written({"b.txt": b"two", "sub/c.txt": b"three"})
    (folder,) = written({"a.txt": b"one", "own/d.txt": b"four"})
    (folder / "own" / "link.txt").symlink_to(far / "b.txt")
    (folder / "linked").symlink_to(far, target_is_directory=True)
    top = folder.with_name("top")
    top.symlink_to(folder, target_is_directory=True)
    for path in folder, top:
        assert prepare(path, tokenizer) == (0, ["one", "two", "three", "four", "two"])
    for place, target in (
        ("sub/up", ".."),
        ("sub/self", "."),
        ("to_d", folder),  # of two links together
        ("loop", "loop"),
        ("gone", "nowhere"),
    ):
        os.symlink(target, far / place)
        said = f"{place.split('/')[-1]}: (a circle|a link that leads|cannot be read: Too many)"
        with naming(place), pytest.raises(DataError, match=said):
            open_data(folder, tokenizer)
        os.unlink(far / place)
