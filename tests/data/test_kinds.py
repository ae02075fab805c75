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


def test_zst(tmp_path, tokenizer, monkeypatch):
    path, zstd = tmp_path / "a.jsonl.zst", pytest.importorskip("backports.zstd")
    lines = json_lines(TEXTS[:30]).splitlines(keepends=True)
    frames = [zstd.compress(b"".join(lines[i::3])) for i in range(3)]
    path.write_bytes(b"".join(frames))
    assert "30 documents" in open_data(path, tokenizer).source
    for cut in (1, len(frames[2]) - 1):
        path.write_bytes(b"".join(frames)[:-cut])
        with pytest.raises(DataError, match="a.jsonl.zst: cannot be unpacked"):
            open_data(path, tokenizer)
    monkeypatch.setitem(sys.modules, "compression", None)
    monkeypatch.setitem(sys.modules, "backports", None)
    with pytest.raises(DataError, match=f"{sys.executable} -m pip install backports.zstd"):
        open_data(path, tokenizer)


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


@pytest.mark.parametrize(
    "name, content",
    [
        ("a.jsonl", LINES),
        ("a.JSONL", LINES),
        ("a.ndjson", LINES),
        ("a.json", LINES),
        ("a.txt", LINES),
        ("lines", LINES),
        ("a.jsonl.gz", gzip.compress(LINES)),
        ("a.json.gz", gzip.compress(LINES)),
        ("packed", gzip.compress(LINES)),
        ("not_packed.gz", LINES),
        ("bom.json", b"\xef\xbb\xbf" + LINES),
        ("blank.json", b"\n \n" + LINES),
        ("null.json", b"null\n" + LINES),
        ("null_text.json", b'{"text": null, "id": 3}\n' + LINES),
        ("other_keys_first.json", b'{"id": 3, "text": ""}\n' + LINES),
    ],
)
def test_json_lines_are_documents_whatever_their_name(tmp_path, tokenizer, name, content):
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / name).write_bytes(content)
    for path in tmp_path / "d" / name, tmp_path / "d", tmp_path / "d" / "*":
        data = open_data(path, tokenizer)
        assert "JSON lines, 30 documents" in data.source
        assert texts_of(data) == TEXTS[:19] + TEXTS[20:30] + TEXTS[19:20]
    out = tmp_path / "out"
    words = ["prepare", str(tmp_path / "d"), "--tokenizer", str(tokenizer), "--out", str(out)]
    assert __main__.main(words) == 0 and len(open_documents(out).sizes) == 30


@pytest.mark.parametrize("name", ["a.json", "a.txt", "a.json.gz"])
def test_json_lines_longer_than_the_head_are_documents(tmp_path, tokenizer, monkeypatch, name):
    monkeypatch.setattr(kinds, "HEAD", 1000)
    long = "".join(f'{{"text": "{t}"}}\n' for t in ("漢字 " * 500, "three")).encode()
    (tmp_path / name).write_bytes(gzip.compress(long) if name.endswith("gz") else long)
    assert "JSON lines, 2 documents" in open_data(tmp_path / name, tokenizer).source


@pytest.mark.parametrize(
    "name, content",
    [
        ("package.json", b'{"name": "x", "version": "1"}\n'),
        ("pretty.json", b'{\n "name": "x",\n "text_of": "y"\n}\n'),
        ("braces.c", b"{ int x = 3; }\n{ }\n"),
        ("list.json", b"[1, 2, 3]\n"),
        ("log.txt", b'{"level": 1}\n{"level": 2}\n'),
        ("deep.json", b"[" * 5000),
        ("PAR1", b"PAR1 is a gene\n"),
    ],
)
def test_text_with_braces_is_text(tmp_path, tokenizer, name, content):
    (tmp_path / name).write_bytes(content)
    data = open_data(tmp_path / name, tokenizer)
    assert "text, 1 documents" in data.source and texts_of(data) == [content.decode()]


def test_other_json_with_documents_is_refused_where_it_is_named_and_text_in_a_folder(
    tmp_path, tokenizer
):
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "a.txt").write_text("one two\n")
    objects = [{"id": 1, "text": "one"}, {"id": 2, "text": "two"}]
    for number, content in enumerate(
        [
            json.dumps(objects),
            json.dumps(objects, indent=1),
            "[\n" + ",\n".join(map(json.dumps, objects)) + "\n]\n",
            json.dumps(objects[0], indent=1),
        ]
    ):
        path = tmp_path / "d" / f"{number}.json"
        path.write_text(content)
        with naming(content), pytest.raises(DataError, match="json: JSON, but not one object a"):
            open_data(path, tokenizer)
    assert "text, 5 documents" in open_data(tmp_path / "d", tokenizer).source


@pytest.mark.parametrize(
    "name, content, said",
    [
        ("data-00000-of-00001.arrow", b"\xff\xff\xff\xff\x30\0\0\0", "load_from_disk"),
        ("file.feather", b"ARROW1\0\0", "load_dataset..arrow"),
        ("train.parquet", b"PAR1\x15\x04", "load_dataset..parquet"),
        ("shard", b"PAR1\x15\x04", "load_dataset..parquet"),
        ("shard.bin", np.array([20240520, 1, 99], "<i4").tobytes(), "llm.c.*fromfile.*512"),
        ("llama.bin", np.array([20240801, 7, 99], "<i4").tobytes(), "llm.c"),
    ],
)
def test_tables_and_shards_are_refused_by_name_not_read_as_what_lies_beside_them(
    tmp_path, tokenizer, capsys, name, content, said
):
    """As in a folder that datasets.save_to_disk writes, beside its dataset_info.json."""
    (tmp_path / "d" / "train").mkdir(parents=True)
    (tmp_path / "d" / "train" / "dataset_info.json").write_text('{\n  "citation": ""\n}')
    (tmp_path / "d" / "train" / name).write_bytes(content)
    for path in tmp_path / "d" / "train" / name, tmp_path / "d" / "train", tmp_path / "d":
        with naming(path), pytest.raises(DataError, match=f"train/{name}: a .*{said}"):
            open_data(path, tokenizer)
        words = ["--tokenizer", str(tokenizer), "--out", str(tmp_path / "x")]
        for command in ["inspect", str(path)], ["prepare", str(path), *words]:
            assert __main__.main(command) == 1
            assert f"train/{name}: a " in capsys.readouterr().err


def test_tables_become_json_lines_by_the_call_of_their_error(tmp_path, tokenizer, monkeypatch):
    datasets = pytest.importorskip("datasets", reason="datasets not installed")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")
    made, out = datasets.Dataset.from_dict({"text": TEXTS[:3]}), str(tmp_path / "texts.jsonl")
    made.save_to_disk(tmp_path / "saved")
    made.to_parquet(tmp_path / "x.parquet")
    for path in tmp_path / "saved", tmp_path / "x.parquet":
        with pytest.raises(DataError, match="a table") as caught:
            open_data(path, tokenizer)
        call = str(caught.value).partition("the package datasets: ")[2]
        place = {"FOLDER": str(path), "FILES": str(path)}
        eval(call.replace("texts.jsonl", out), vars(datasets) | place)
        assert texts_of(open_data(out, tokenizer)) == TEXTS[:3]


def test_flat_tokens_may_begin_as_other_kinds_do(tmp_path):
    for start in (b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"\xff\xff\xff\xff", b"PAR1\x15\0"):
        (tmp_path / "x.bin").write_bytes(start + IDS.astype("<u2").tobytes())
        data = open_data(tmp_path / "x.bin")
        assert np.concatenate([data.train, data.held_out]).tobytes().startswith(start)


def test_npy_whatever_its_name_and_a_folder_of_them(tmp_path):
    (tmp_path / "d").mkdir()
    for name, ids in ("a", IDS[:700]), ("b.bin", IDS[700:]):
        with open(tmp_path / "d" / name, "wb") as file:
            np.save(file, ids)
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
    (b'{"text": "\xff"}', "no JSON"),
    ('{"text": "' + "x" * 99 + '"}', "has more than 60 bytes"),
]


def test_a_bad_line_is_named_or_left_out_and_counted(tmp_path, tokenizer, capsys, monkeypatch):
    monkeypatch.setattr("needle.data.text.LONGEST_LINE", 60)
    path, good = tmp_path / "a.jsonl", b'{"text": "good"}\n'
    for line, said in BAD:
        line = line if isinstance(line, bytes) else line.encode()
        path.write_bytes(good + line + b"\n" + good + line)
        with naming(line[:20]):
            with pytest.raises(DataError, match="the line at offset 17: ") as caught:
                open_data(path, tokenizer)
            assert said in str(caught.value) or len(line) > 60
            words = ["prepare", str(path), "--tokenizer", str(tokenizer)]
            assert __main__.main([*words, "--out", str(tmp_path / "no")]) == 1
            error = capsys.readouterr().err
            assert "--skip-bad-lines` leaves such" in error and not list(tmp_path.glob("no.*"))
            out = tmp_path / "x"
            assert __main__.main([*words, "--out", str(out), "--skip-bad-lines"]) == 0
            error = capsys.readouterr().err
            assert f"left out: 2 bad line(s); the first: {path}: the line at offset 17: " in error
            found = open_documents(out)
            assert found.sizes.tolist() == [len(found) // 2] * 2
            for made in tmp_path.glob("x.*"):
                made.unlink()


def test_json_lines_by_name_are_so_from_their_first_line(tmp_path, tokenizer):
    for name in "a.jsonl", "a.JSONL", "a.ndjson.gz":
        (tmp_path / name).write_bytes(b"{\n{\n")
        with naming(name), pytest.raises(DataError, match="the line at offset 0: no JSON"):
            open_data(tmp_path / name, tokenizer)


def test_empty_documents_are_left_out_and_counted(tmp_path, tokenizer, capsys):
    (tmp_path / "d").mkdir()
    empty = '{"text": ""}\n{"text": null}\nnull\n\n'
    (tmp_path / "d" / "a.jsonl").write_text(f'{empty}{{"text": "one"}}\n{empty}')
    (tmp_path / "d" / "b.txt").write_text("")
    (tmp_path / "d" / "c.txt").write_text("\ufeff")
    (tmp_path / "d" / "d.txt").write_text("two")
    (tmp_path / "d" / "e.png").write_bytes(b"\x89PNG\0")
    every = tmp_path / "d" / "*"
    words = ["--tokenizer", str(tokenizer), "--out", str(tmp_path / "x")]
    for read in (
        lambda: texts_of(open_data(tmp_path / "d", tokenizer)) == ["one", "two"],
        lambda: __main__.main(["inspect", str(every)]) == 0,
        lambda: __main__.main(["inspect", str(tmp_path / "d")]) == 0,
        lambda: __main__.main(["prepare", str(tmp_path / "d"), *words]) == 0,
    ):
        assert read()
        error = capsys.readouterr().err
        first = f"{tmp_path / 'd' / 'a.jsonl'}: the line at offset 0"
        assert f"left out: 8 empty document(s); the first: {first}\n" in error
        assert f"not UTF-8 or hold zero bytes; the first: {tmp_path / 'd' / 'e.png'}\n" in error
    assert open_documents(tmp_path / "x").sizes.size == 2


# ---- links -------------------------------------------------------------------------------------


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
        with (
            naming(place),
            pytest.raises(DataError, match=f"{place.split('/')[-1]}: (a circle|ca)"),
        ):
            open_data(tmp_path / "d", tokenizer)
        os.unlink(tmp_path / place)
