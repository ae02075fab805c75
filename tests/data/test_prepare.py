"""python -m needle data: prepare, inspect, view, as the shell meets them."""

import gzip
import json

import numpy as np
import pytest
import train_pythia
from harness import naming
from token_files import TEXTS

from needle.checkpoint import Checkpoint, list_checkpoints
from needle.data import (
    Batches,
    Prefetch,
    __main__,
    megatron,
    open_data,
    open_documents,
    open_run_data,
)
from needle.data.text import train_tokenizer
from needle.data.tokenizer import load_tokenizer
from needle.models import pythia


@pytest.fixture
def inputs(tmp_path, monkeypatch):
    """Text of every kind: 30 JSON lines, 30 packed ones, 30 files; in that order."""
    pytest.importorskip("tokenizers")
    monkeypatch.setenv("NEEDLE_CACHE", str(tmp_path / "cache"))
    train_tokenizer(iter(TEXTS), 300).save(str(tmp_path / "tokenizer.json"))
    lines = [json.dumps({"text": text}) + "\n" for text in TEXTS]
    (tmp_path / "a.jsonl").write_text("\n" + "".join(lines[:30]))
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress("".join(lines[30:60]).encode()))
    (tmp_path / "texts").mkdir()
    for number, text in enumerate(TEXTS[60:]):
        (tmp_path / "texts" / f"{number:02}.txt").write_text(text)
    return [str(tmp_path / name) for name in ("a.jsonl", "b.jsonl.gz", "texts")]


def run(tmp_path, inputs, out, *more):
    where = ["--tokenizer", str(tmp_path / "tokenizer.json"), "--out", str(tmp_path / out)]
    return __main__.main(["prepare", *inputs, *where, *more])


def content(tmp_path, out):
    return [(tmp_path / f"{out}.{ending}").read_bytes() for ending in ("bin", "idx")]


def test_documents_come_back_in_their_order(tmp_path, inputs, capsys, monkeypatch):
    monkeypatch.setattr("needle.data.text.CHUNK", 40)  # so that most documents are several
    assert run(tmp_path, inputs, "one") == 0
    assert "90 documents" in capsys.readouterr().out
    found = open_documents(tmp_path / "one")
    tokenizer = load_tokenizer(tmp_path / "tokenizer.json")
    ends = np.cumsum(found.sizes)
    end = tokenizer.token_to_id("<|endoftext|>")
    for text, stop, size in zip(TEXTS, ends, found.sizes):
        ids = found[stop - size : stop].tolist()
        assert ids.pop() == end and tokenizer.decode(ids, skip_special_tokens=False) == text


def test_prepare_keeps_files_of_its_name_and_leaves_none_after_an_error(
    tmp_path, inputs, monkeypatch, capsys
):
    assert run(tmp_path, inputs[:1], "new/folders/x") == 0
    (tmp_path / "train.bin").write_bytes(b"nanoGPT's")
    (tmp_path / "blank.txt").write_text("")
    blank, missing = str(tmp_path / "blank.txt"), str(tmp_path / "missing*")
    there = {path: path.is_file() and path.read_bytes() for path in tmp_path.rglob("*")}
    for files, out, error, code, said in (
        (inputs[1:], "new/folders/x", None, 1, "x.idx: exists already; remove it, or choose"),
        (inputs, "train", None, 1, "train.bin: exists already"),
        ([missing], "y", None, 1, "no file matches"),
        ([blank], "y", None, 1, "blank.txt: not text: empty, not UTF-8"),
        (inputs, "y", OSError(28, "No space left on device"), 1, "written: No space left"),
        (inputs, "y", KeyboardInterrupt(), 130, "needle data: interrupted\n"),
    ):
        with naming(said), monkeypatch.context() as patch:
            if error is not None:  # when all is in OUT.bin
                failing = lambda *_, e=error: (_ for _ in ()).throw(e)
                patch.setattr(megatron, "write_index", failing)
            assert run(tmp_path, files, out) == code
            assert said in capsys.readouterr().err
        found = {path: path.is_file() and path.read_bytes() for path in tmp_path.rglob("*")}
        assert found == there


def test_field_of_json_lines_may_be_named(tmp_path, inputs, capsys):
    assert run(tmp_path, inputs[:1], "text") == 0
    lines = [json.dumps({"id": str(i), "content": t}) + "\n" for i, t in enumerate(TEXTS[:30])]
    other = tmp_path / "p.jsonl.gz"
    other.write_bytes(gzip.compress("".join(lines).encode()))
    assert run(tmp_path, [str(other)], "p") == 1
    error = capsys.readouterr().err
    assert "as its field `text`; strings are in id, content: `prepare --field`" in error
    assert run(tmp_path, [str(other)], "p", "--field", "content") == 0
    assert content(tmp_path, "p") == content(tmp_path, "text")
    assert run(tmp_path, inputs[2:], "z", "--field", "content") == 1
    assert "--field content: none of the inputs is a file of JSON lines" in capsys.readouterr().err


def test_name_that_is_not_utf8_is_refused(tmp_path, inputs, capsys):
    folder = tmp_path / "names"
    folder.mkdir()
    (folder / "caf\udce9.txt").write_text("some text\n")
    for path in str(folder), str(folder / "caf\udce9.txt"):
        tokenizer = ["--tokenizer", str(tmp_path / "tokenizer.json")]
        for command in ["inspect", path], ["view", path, "--step", "1", *tokenizer]:
            assert __main__.main(command) == 1
            error = capsys.readouterr().err
            assert "\\xe9" in error and "a name that is not UTF-8; rename it" in error


def test_inspect(tmp_path, inputs, capsys):
    assert run(tmp_path, inputs, "x") == 0
    capsys.readouterr()
    tokenizer = ["--tokenizer", str(tmp_path / "tokenizer.json")]
    assert __main__.main(["inspect", str(tmp_path / "x"), *tokenizer]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "Megatron, 90 documents" in out and "'document 0: " in out and "held out" in out
    assert __main__.main(["inspect", inputs[0]]) == 0
    assert "a.jsonl: JSON lines: 30 documents" in " ".join(capsys.readouterr().out.split())
    (tmp_path / "array.json").write_text('[{"text": "a"}, {"text": "b"}]')
    for name, said in ("nothing", "no such file"), ("array.json", "not one object a line"):
        assert __main__.main(["inspect", str(tmp_path / name)]) == 1
        assert said in capsys.readouterr().err


# ---- view --------------------------------------------------------------------------------------


def shown_ids(out):
    """The ids of each sequence that `view` printed."""
    lines = out.splitlines()
    starts = [i for i, line in enumerate(lines) if line.startswith("---- sequence")]
    return np.array([[int(word) for word in lines[i + 1].split()] for i in starts])


def test_view_of_data(tmp_path, inputs, capsys):
    assert run(tmp_path, inputs, "x") == 0
    capsys.readouterr()
    view = ["view", str(tmp_path / "x")]
    view += "--batch-size 3 --grad-accum 2 --seq-len 16 --seed 5 --steps 40 --step".split()
    batches = Batches(open_data(tmp_path / "x").train, 3, 16, 5, samples=240)
    for step in (1, 2, 3, 30, 40, 41):
        assert __main__.main([*view, str(step)]) == 0
        batches.seek_batch(2 * (step - 1))
        expected = np.concatenate([batches.next_rows(), batches.next_rows()])
        out, error = capsys.readouterr()
        np.testing.assert_array_equal(shown_ids(out), expected)
        assert ("--step 41 is beyond the run, which has 40 steps" in error) is (step == 41)
    save = tmp_path / "rows.npy"
    assert __main__.main([*view, "41", "--save", str(save)]) == 0
    np.testing.assert_array_equal(np.load(save), expected)
    assert f"---- sequence 0\n{' '.join(map(str, expected[0]))}\n" not in capsys.readouterr().out
    assert __main__.main([*view, "41", "--save", "/dev/full"]) == 1
    assert "/dev/full" in capsys.readouterr().err


@pytest.fixture
def trained(tmp_path, monkeypatch):
    """A function that trains a small model, and the micro-batches that training has drawn. It ends
    as one that is killed before it draws more than `most`."""
    monkeypatch.setitem(pythia.PRESETS, "tiny", (1, 32, 2, 384))
    monkeypatch.setattr(megatron, "ROW_LENGTH", 17)
    drawn, draw = [], Prefetch.next

    def watched(self):
        if len(drawn) == train.most:
            raise SystemExit("killed")
        ids, targets = draw(self)
        drawn.append(np.concatenate([ids, targets[:, -1:]], axis=1))
        return ids, targets

    def train(*more):
        where = ["--out", str(tmp_path / "runs"), "--name", "a", "--device", "cpu"]
        assert train_pythia.main([*where, *more]) == 0

    monkeypatch.setattr(Prefetch, "next", watched)
    train.most, train.drawn, train.folder = None, drawn, tmp_path / "runs" / "a"
    return train


def write_data(tmp_path, inputs, kind):
    """Data of about 200 to 400 ids a kind, so that thirty steps walk them several times."""
    ids = np.random.RandomState(3).randint(0, 300, 17 * 20).astype("<u2")
    if kind == "text":
        return tmp_path / "texts"
    if kind == "megatron":
        assert run(tmp_path, inputs[2:], "x") == 0
        return tmp_path / "x"
    if kind == "rows":
        ids.tofile(tmp_path / "rows.bin")
        with open(tmp_path / "rows.idx", "wb") as file:
            megatron.write_index(file, ids.dtype, [17] * 20)
        return tmp_path / "rows"
    ids.tofile(tmp_path / "flat.bin")
    return tmp_path / "flat.bin"


@pytest.mark.parametrize("kind", ["text", "megatron", "rows", "flat"])
def test_view_and_checkpoints_of_a_run_that_was_killed_went_on_and_walked_its_data_again(
    tmp_path, inputs, trained, capsys, kind
):
    """6 steps, killed in the 5th, resumed, then resumed up to 30: a step draws what `view` shows,
    and each checkpoint stands before the batch of the next step."""
    settings = "--model tiny --batch-size 3 --grad-accum 2 --seq-len 16 --steps 6 --eval-every 0"
    settings += " --schedule constant --save-every 1"
    if kind == "text":
        settings += f" --tokenizer {tmp_path / 'tokenizer.json'}"
    trained.most = 9
    with pytest.raises(SystemExit):
        trained("--data", str(write_data(tmp_path, inputs, kind)), *settings.split())
    del trained.drawn[8:]  # of the step that is done again
    trained.most = None
    for more in ([], ["--steps", "30"]):
        paths = list_checkpoints(trained.folder / "checkpoints")
        states = [Checkpoint(path).state for path in paths]
        trained("--resume", "auto", *more)
        _, batches, _ = open_run_data(trained.folder)
        for state in states:
            batches.seek(state["data"])
            np.testing.assert_array_equal(batches.next_rows(), trained.drawn[2 * state["step"]])
    assert len(trained.drawn) == 60
    view = ["view", str(trained.folder), "--step"]
    for step in range(1, 32):
        capsys.readouterr()
        assert __main__.main([*view, str(step)]) == 0
        out, error = capsys.readouterr()
        if step <= 30:
            rows = np.concatenate(trained.drawn[2 * step - 2 : 2 * step])
            np.testing.assert_array_equal(shown_ids(out), rows, err_msg=f"step {step}")
        assert ("--step 31 is beyond the run, which has 30 steps" in error) is (step == 31)
        assert ("three" in out) is (kind == "text")  # the text stands beside the ids
    last = Checkpoint(list_checkpoints(trained.folder / "checkpoints")[0]).state["data"]
    assert last["epoch"] >= (0 if kind == "text" else 2)
    if kind != "text":
        return
    assert __main__.main([*view, "1", "--seed", "3"]) == 1
    assert "a run knows its own --seed" in capsys.readouterr().err
    (tmp_path / "texts" / "00.txt").write_text("something else\n" * 40)
    assert __main__.main([*view, "1"]) == 1
    assert "not the tokens that the run read before" in capsys.readouterr().err
    path = trained.folder / "config.json"
    whole = json.loads(path.read_text())
    damaged = {**whole["settings"], "steps": "six"}
    for config in [], {}, {"data": 3}, {**whole, "data": {}}, {**whole, "settings": damaged}:
        path.write_text(json.dumps(config))
        assert __main__.main([*view, "1"]) == 1
        assert f"needle data: {path}: " in capsys.readouterr().err
