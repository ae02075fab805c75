"""python -m needle data: prepare, inspect, view, as the shell meets them."""

import os
import re
import signal

import numpy as np
import pytest
import train_pythia
from harness import naming
from token_files import TEXTS, json_lines, write_megatron

from needle.checkpoint import Checkpoint, list_checkpoints
from needle.data import Prefetch, __main__, load_tokenizer, megatron, open_run_data
from needle.data.text import train_tokenizer
from needle.models import pythia


@pytest.fixture
def inputs(tmp_path, monkeypatch):
    """A file of 30 JSON lines, and a folder of 30 texts."""
    monkeypatch.setenv("NEEDLE_CACHE", str(tmp_path / "cache"))
    train_tokenizer(iter(TEXTS), 300).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "a.jsonl").write_bytes(json_lines(TEXTS[:30]))
    (tmp_path / "texts").mkdir()
    for number, text in enumerate(TEXTS[60:]):
        (tmp_path / "texts" / f"{number:02}.txt").write_text(text)
    return [str(tmp_path / name) for name in ("a.jsonl", "texts")]


def run(tmp_path, inputs, out):
    where = ["--tokenizer", str(tmp_path / "tokenizer.json"), "--out", f"{tmp_path}/{out}"]
    return __main__.main(["prepare", *inputs, *where])


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
        (inputs, "texts/", None, 1, "texts/: a name of files must end it, as "),
        (inputs, "texts/.bin", None, 1, "/texts/tokens"),
        (inputs, "texts/..", None, 1, "/texts/../tokens"),
        ([missing], "y", None, 1, "no such file or folder"),
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
    monkeypatch.setattr(megatron, "write_index", lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(SystemExit, match="143"):
        run(tmp_path, inputs, "y")
    monkeypatch.setattr(megatron, "LONGEST", 9)
    assert run(tmp_path, inputs, "y") == 1
    assert "y.idx: cannot hold a document of more than 9 tokens" in capsys.readouterr().err
    assert {*tmp_path.rglob("*")} == {*there}


def test_inspect(tmp_path, inputs, capsys):
    assert run(tmp_path, inputs[:1], "y.idx") == 0 and (tmp_path / "y.bin").exists()
    capsys.readouterr()
    assert run(tmp_path, inputs, "x.bin") == 0
    assert re.search(r"x.bin: 60 documents, \d,\d+ tokens\n", capsys.readouterr().out)
    tokenizer = ["--tokenizer", str(tmp_path / "tokenizer.json")]
    assert __main__.main(["inspect", str(tmp_path / "x"), *tokenizer]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "Megatron, 60 documents" in out and "'document 0: " in out and "held out" in out
    assert __main__.main(["inspect", inputs[0]]) == 0
    size = sum(len(text.encode()) for text in TEXTS[:30])
    said = f"a.jsonl: JSON lines: 30 documents, {size:,} bytes of UTF-8 in 1 file(s)"
    assert said in " ".join(capsys.readouterr().out.split())
    assert __main__.main(["inspect", inputs[0], *tokenizer]) == 0
    out = capsys.readouterr().out
    assert re.search(r"\nbegins: (\d+\s+)+'document 0: ", out), out
    ids = [int(word) for word in re.search(r"begins: ([\d\s]+)", out)[1].split()]
    assert ids == load_tokenizer(tokenizer[1]).encode(TEXTS[0]).ids[:32]
    np.save(tmp_path / "other.npy", [5, -100, 300])
    for file, more, said in (
        ("nothing", [], "no such file"),
        ("a.jsonl", ["--tokenizer", "nothing.json"], "nothing.json: no such tokenizer file"),
        ("other.npy", tokenizer, "offset 136: id -100 is outside the vocabulary of 300"),
    ):
        assert __main__.main(["inspect", str(tmp_path / file), *more]) == 1
        assert said in capsys.readouterr().err


def test_inspect_tells_the_range_of_ids_and_the_sizes_of_documents(tmp_path, monkeypatch, capsys):
    """Of all ids, and of many in stretches spread evenly."""
    ids = np.zeros(100_000, np.uint16)
    ids[[94_999, -1]] = 7, 9
    np.save(tmp_path / "x.npy", ids)
    write_megatron(tmp_path / "m", [[1] * size for size in (3, 9, 6)])
    for name, *wanted in (
        ("x.npy", "train on: 95,000 tokens ids: 0 to 7", "held out: 5,000 tokens ids: 0 to 9"),
        ("m", "documents: 3, of 3 to 9 tokens, 6.0 on average ids: 1 to 1"),
    ):
        assert __main__.main(["inspect", str(tmp_path / name)]) == 0
        said = " ".join(capsys.readouterr().out.split())
        assert all(words in said for words in wanted), said
    monkeypatch.setattr(__main__, "SCANNED", 640)
    assert __main__.main(["inspect", str(tmp_path / "x.npy")]) == 0
    assert "ids: 0 to 7 (in 640 of them)" in capsys.readouterr().out


# ---- view --------------------------------------------------------------------------------------


def shown_ids(out):
    """The ids of each sequence that `view` printed."""
    lines = out.splitlines()
    starts = [i for i, line in enumerate(lines) if line.startswith("---- sequence")]
    return np.array([[int(word) for word in lines[i + 1].split()] for i in starts])


@pytest.mark.parametrize("kind", ["text", "megatron"])
def test_view_shows_each_step_of_a_run_that_was_killed_and_went_on(
    tmp_path, inputs, monkeypatch, capsys, kind
):
    """6 steps, killed in the 5th, resumed, then resumed up to 30, over several epochs."""
    monkeypatch.setitem(pythia.PRESETS, "tiny", (1, 32, 2, 384))
    drawn, draw, folder = [], Prefetch.next, tmp_path / "runs" / "a"

    def watched(self):
        if len(drawn) == most:
            raise SystemExit("killed")
        ids, targets = draw(self)
        drawn.append(np.concatenate([ids, targets[:, -1:]], axis=1))
        return ids, targets

    monkeypatch.setattr(Prefetch, "next", watched)
    data = tmp_path / "texts"
    if kind == "megatron":
        assert run(tmp_path, inputs[1:], "x") == 0
        data = tmp_path / "x"
    where = ["--out", str(folder.parent), "--name", "a", "--device", "cpu"]
    settings = "--model tiny --batch-size 3 --grad-accum 2 --seq-len 16 --steps 6 --eval-every 0 "
    settings += f"--schedule constant --save-every 1 --tokenizer {tmp_path / 'tokenizer.json'}"
    most = 9
    with pytest.raises(SystemExit):
        train_pythia.main([*where, "--data", str(data), *settings.split()])
    del drawn[8:]  # of the step that is done again
    most = None
    for more in [], ["--steps", "30"]:
        assert train_pythia.main([*where, "--resume", "auto", *more]) == 0
    view, epoch = ["view", str(folder), "--step"], len(open_run_data(folder)[1])
    for step in range(1, 31):
        capsys.readouterr()
        assert __main__.main([*view, str(step)]) == 0
        out = capsys.readouterr().out
        rows = np.concatenate(drawn[2 * step - 2 : 2 * step])
        np.testing.assert_array_equal(shown_ids(out), rows, err_msg=f"step {step}")
        assert "three" in out  # the text stands beside the ids
        at, said = divmod(2 * step - 2, epoch), " ".join(out.split())
        assert f"step {step} (batch {step - 1} counted from 0): 6 sequences of 16 tokens" in said
        assert "epoch {}, micro-batch {} ".format(*at) in said
    last = Checkpoint(list_checkpoints(folder / "checkpoints")[0]).state["data"]
    assert last["epoch"] >= (0 if kind == "text" else 2)
    capsys.readouterr()
    assert __main__.main([*view, "30", "--rows", "2"]) == 0
    np.testing.assert_array_equal(shown_ids(capsys.readouterr().out), rows[:2])
    train_tokenizer(iter(["z"]), 300).save(str(tmp_path / "other.json"))
    assert __main__.main([*view, "30", "--tokenizer", str(tmp_path / "other.json")]) == 0
    assert "three" not in capsys.readouterr().out
    assert __main__.main([*view, "30", "--save", str(tmp_path / "rows")]) == 0
    np.testing.assert_array_equal(np.load(tmp_path / "rows"), rows)
    assert __main__.main([*view, "30", "--rows", "2", "--save", str(tmp_path / "rows")]) == 0
    np.testing.assert_array_equal(np.load(tmp_path / "rows"), rows[:2])
    config = folder / "config.json"
    config.write_text(config.read_text().replace('"id_limit": 384', '"id_limit": 2'))
    assert __main__.main([*view, "30"]) == 1
    assert "is outside the vocabulary of 2\n" in capsys.readouterr().err
