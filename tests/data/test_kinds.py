"""Kinds of files by their first bytes, documents that are left out, links."""

import gzip
import json
import os
import sys

import numpy as np
import pytest
from harness import naming
from token_files import IDS, TEXTS, json_lines

from needle.data import DataError, __main__, kinds, open_data, open_documents

LINES = json_lines(TEXTS[:30])


def texts_of(data):
    """The documents, those held out last."""
    text = data.tokenizer.decode(
        data.train.tolist() + data.held_out.tolist(), skip_special_tokens=False
    )
    return text.split("<|endoftext|>")[:-1]


def prepare(path, tokenizer, out, *more):
    words = ["prepare", str(path), "--tokenizer", str(tokenizer), "--out", str(out)]
    return __main__.main([*words, *more])


def test_packed_text_is_unpacked_and_named_where_it_is_cut(tmp_path, tokenizer, monkeypatch):
    (tmp_path / "p.txt.gz").write_bytes(gzip.compress(TEXTS[0].encode()))
    assert "packed text" in open_data(tmp_path / "p.txt.gz", tokenizer).source
    (tmp_path / "cut.txt.gz").write_bytes(gzip.compress(TEXTS[0].encode())[:-9])
    with pytest.raises(DataError, match="cut.txt.gz: cannot be unpacked"):
        open_data(tmp_path / "cut.txt.gz", tokenizer)
    path, zstd = tmp_path / "a.jsonl.zst", pytest.importorskip("backports.zstd")
    lines = LINES.splitlines(keepends=True)
    frames = b"".join(zstd.compress(b"".join(lines[i::3])) for i in range(3))
    path.write_bytes(frames)
    assert "30 documents" in open_data(path, tokenizer).source
    path.write_bytes(frames[:-1])
    with pytest.raises(DataError, match="a.jsonl.zst: cannot be unpacked"):
        open_data(path, tokenizer)
    for package in "compression", "backports":
        monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(DataError, match=f"{sys.executable} -m pip install backports.zstd"):
        open_data(path, tokenizer)


def test_json_lines_are_documents_whatever_their_name(tmp_path, tokenizer, monkeypatch):
    (tmp_path / "d").mkdir()
    for name, content in (
        *((name, LINES) for name in ("a.jsonl", "a.JSONL", "a.ndjson", "a.json", "a.txt", "lines")),
        *((name, gzip.compress(LINES)) for name in ("a.jsonl.gz", "a.json.gz", "packed")),
        ("not_packed.gz", LINES),
        ("bom.json", b"\xef\xbb\xbf" + LINES),
        ("blank.json", b"\n \n" + LINES),
        ("null.json", b"null\n" + LINES),
        ("null_text.json", b'{"text": null, "id": 3}\n' + LINES),
        ("other_keys_first.json", b'{"id": 3, "text": ""}\n' + LINES),
    ):
        path = tmp_path / "d" / name
        path.write_bytes(content)
        for given in path, tmp_path / "d", tmp_path / "d" / "*":
            with naming(name, given):
                data = open_data(given, tokenizer)
                assert "JSON lines, 30 documents" in data.source
                assert texts_of(data) == TEXTS[:19] + TEXTS[20:30] + TEXTS[19:20]
        path.unlink()
    (tmp_path / "d" / "a.json.gz").write_bytes(gzip.compress(LINES))
    assert prepare(tmp_path / "d", tokenizer, tmp_path / "out") == 0
    assert len(open_documents(tmp_path / "out").sizes) == 30
    monkeypatch.setattr(kinds, "HEAD", 1000)
    long = "".join(f'{{"text": "{t}"}}\n' for t in ("漢字 " * 500, "three")).encode()
    for name, content in ("a.txt", long), ("b.json.gz", gzip.compress(long)):
        (tmp_path / name).write_bytes(content)
        with naming(name):
            assert "JSON lines, 2 documents" in open_data(tmp_path / name, tokenizer).source
    for name in "a.jsonl", "a.JSONL", "a.ndjson.gz":  # by name from the first line on
        (tmp_path / name).write_bytes(b"{\n{\n")
        with naming(name), pytest.raises(DataError, match="the line at offset 0: no JSON"):
            open_data(tmp_path / name, tokenizer)


OBJECTS = [{"id": 1, "text": "one"}, {"id": 2, "text": "two"}]


def test_other_json_is_refused_where_it_is_named_and_said_to_be_text_in_a_folder(
    tmp_path, tokenizer, capsys
):
    shapes = (
        *(json.dumps(OBJECTS), json.dumps(OBJECTS, indent=1), json.dumps(OBJECTS[0], indent=1)),
        "[\n" + ",\n".join(map(json.dumps, OBJECTS)) + "\n]\n",
        *('{"name": "x", "version": "1"}\n', '{\n "name": "x",\n "text_of": "y"\n}\n'),
        *("[1, 2, 3]\n", '["one", "two"]', '{"data": [{"text": "one"}]}'),
        '{"level": 1}\n{"level": 2}\n',
    )
    (tmp_path / "d").mkdir()
    for number, content in enumerate(shapes):
        path = tmp_path / "d" / f"{number}.txt"
        path.write_text(content)
        with naming(content), pytest.raises(DataError, match="txt: JSON, but not one object a"):
            open_data(path, tokenizer)
        assert (
            prepare(path, tokenizer, tmp_path / "x") == __main__.main(["inspect", str(path)]) == 1
        )
        assert capsys.readouterr().err.count("JSON, but not one object a line") == 2
    (tmp_path / "d" / "a.txt").write_text("one two\n")
    source = " ".join(open_data(tmp_path / "d", tokenizer).source.split())
    assert "text, JSON in 10 file(s) read as text, 11 documents" in source
    for name, content in (
        ("braces.c", b"{ int x = 3; }\n{ }\n"),
        ("deep.json", b"[" * 5000),
        ("list.md", b"[1] Knuth, 1973\n"),
        ("PAR1", b"PAR1 is a gene\n"),
    ):
        (tmp_path / name).write_bytes(content)
        with naming(name):
            data = open_data(tmp_path / name, tokenizer)
            assert ": text, 1 documents" in data.source and texts_of(data) == [content.decode()]


def test_tables_and_shards_are_refused_by_name_not_read_as_what_lies_beside_them(
    tmp_path, tokenizer, capsys
):
    """As in a folder that datasets.save_to_disk writes, beside its dataset_info.json."""
    for name, content, said in (
        ("data-00000-of-00001.arrow", b"\xff\xff\xff\xff\x30\0\0\0", "load_from_disk"),
        ("file.feather", b"ARROW1\0\0", "load_dataset..arrow"),
        ("train.parquet", b"PAR1\x15\x04", "load_dataset..parquet"),
        ("shard.bin", np.array([20240520, 1, 99], "<i4").tobytes(), "llm.c.*fromfile.*512"),
        ("llama.bin", np.array([20240801, 7, 99], "<i4").tobytes(), "llm.c"),
    ):
        place = tmp_path / name.split(".")[0] / "train"
        place.mkdir(parents=True)
        (place / "dataset_info.json").write_text('{\n  "citation": ""\n}')
        (place / name).write_bytes(content)
        for path in place / name, place, place.parent:
            with naming(path), pytest.raises(DataError, match=f"train/{name}: a .*{said}"):
                open_data(path, tokenizer)
            assert __main__.main(["inspect", str(path)]) == 1
            assert prepare(path, tokenizer, tmp_path / "x") == 1
            assert capsys.readouterr().err.count(f"train/{name}: a ") == 2


def test_tokens_are_told_by_their_bytes_and_flat_ones_by_name(tmp_path):
    for start in (b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"\xff\xff\xff\xff", b"PAR1\x15\0"):
        (tmp_path / "x.bin").write_bytes(start + IDS.astype("<u2").tobytes())
        data = open_data(tmp_path / "x.bin")
        assert np.concatenate([data.train, data.held_out]).tobytes().startswith(start)
    (tmp_path / "d").mkdir()
    for name, ids in ("a", IDS[:700]), ("b.bin", IDS[700:]):
        with open(tmp_path / "d" / name, "wb") as file:
            np.save(file, ids)
    (tmp_path / "d" / ".hidden").write_bytes(b"\0")
    for path in tmp_path / "d", tmp_path / "d" / "*":
        data = open_data(path)
        assert ".npy, 2 files" in data.source
        np.testing.assert_array_equal(np.concatenate([data.train, data.held_out]), IDS)
    (tmp_path / "d" / "c.txt").write_text("text")
    with pytest.raises(DataError, match="files of several kinds .a: .npy, b.bin: .npy, c.txt: t"):
        open_data(tmp_path / "d" / "*")


# ---- documents left out --------------------------------------------------------------------------

BAD = [
    ("{", "no JSON"),
    ("[]", "no object with a string as its field `text`"),
    ('"text"', "no object with a string"),
    ('{"text": 3}', "no object with a string"),
    ('{"body": "b", "id": 3}', "strings are in body: `prepare --field`"),
    ("[" * 5000, "no JSON"),
    ('{"text": "\\ud800"}', "half of a surrogate pair"),
    (b"\xff", "no JSON"),
    ('{"text": "' + "x" * 99 + '"}', "has more than 60 bytes"),
]


def test_bad_line_is_named_or_left_out_and_counted(tmp_path, tokenizer, capsys, monkeypatch):
    monkeypatch.setattr("needle.data.text.LONGEST_LINE", 60)
    path, good = tmp_path / "a.jsonl", b'{"text": "good"}\n'
    for line, said in BAD:
        line = line if isinstance(line, bytes) else line.encode()
        path.write_bytes(good + line + b"\n" + good + line)
        with naming(line[:20]):
            with pytest.raises(DataError, match="the line at offset 17: ") as caught:
                open_data(path, tokenizer)
            assert said in str(caught.value) or len(line) > 60
            assert prepare(path, tokenizer, tmp_path / "no") == 1
            error = capsys.readouterr().err
            assert "--skip-bad-lines` leaves such" in error and not list(tmp_path.glob("no.*"))
            assert prepare(path, tokenizer, tmp_path / "x", "--skip-bad-lines") == 0
            error = capsys.readouterr().err
            assert f"left out: 2 bad line(s); the first: {path}: the line at offset 17: " in error
            found = open_documents(tmp_path / "x")
            assert found.sizes.tolist() == [len(found) // 2] * 2
            for made in tmp_path.glob("x.*"):
                made.unlink()


def test_empty_documents_are_left_out_and_counted(tmp_path, tokenizer, capsys):
    (tmp_path / "d").mkdir()
    empty = '{"text": ""}\n{"text": null}\nnull\n\n'
    (tmp_path / "d" / "a.jsonl").write_text(f'{empty}{{"text": "one"}}\n{empty}')
    (tmp_path / "d" / "b.txt").write_text("")
    (tmp_path / "d" / "c.txt").write_text("\ufeff")
    (tmp_path / "d" / "d.txt").write_text("two")
    (tmp_path / "d" / "e.png").write_bytes(b"\x89PNG\0")
    for read in (
        lambda: texts_of(open_data(tmp_path / "d", tokenizer)) == ["one", "two"],
        lambda: __main__.main(["inspect", str(tmp_path / "d" / "*")]) == 0,
        lambda: prepare(tmp_path / "d", tokenizer, tmp_path / "x") == 0,
    ):
        assert read()
        error = capsys.readouterr().err
        first = f"{tmp_path / 'd' / 'a.jsonl'}: the line at offset 0"
        assert f"left out: 8 empty document(s); the first: {first}\n" in error
        assert f"not UTF-8 or hold zero bytes; the first: {tmp_path / 'd' / 'e.png'}\n" in error
    assert open_documents(tmp_path / "x").sizes.size == 2
    for content in (b"\xff\xfe", b"a\0b", b"\xef\xbb\xbf"):
        (tmp_path / "a.dat").write_bytes(content)
        said = "a.dat: not text: empty, not UTF-8, or with zero bytes; token files"
        with naming(content), pytest.raises(DataError, match=said):
            open_data(tmp_path / "a.dat", tokenizer)


def test_linked_files_and_folders_are_read_and_circles_are_named(tmp_path, tokenizer):
    (tmp_path / "d" / "own").mkdir(parents=True)
    (tmp_path / "far" / "sub").mkdir(parents=True)
    (tmp_path / "d" / "a.txt").write_text("one")
    (tmp_path / "far" / "b.txt").write_text("two")
    (tmp_path / "far" / "sub" / "c.txt").write_text("three")
    (tmp_path / "d" / "own" / "link.txt").symlink_to(tmp_path / "far" / "b.txt")
    (tmp_path / "d" / "linked").symlink_to(tmp_path / "far", target_is_directory=True)
    (tmp_path / "top").symlink_to(tmp_path / "d", target_is_directory=True)
    for path in tmp_path / "d", tmp_path / "top":
        assert texts_of(open_data(path, tokenizer)) == ["one", "two", "three", "two"]
    for place, target in (
        ("far/sub/up", ".."),
        ("far/sub/self", "."),
        ("far/to_d", tmp_path / "d"),  # of two links together
        ("far/loop", "loop"),
        ("far/gone", "nowhere"),
    ):
        os.symlink(target, tmp_path / place)
        said = f"{place.split('/')[-1]}: (a circle|ca)"
        with naming(place), pytest.raises(DataError, match=said):
            open_data(tmp_path / "d", tokenizer)
        os.unlink(tmp_path / place)
