"""python -m needle data: prepare, inspect, view, as the shell meets them."""

import gzip
import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import train_pythia
from harness import ROOT, naming, wait_for
from token_files import TEXTS

from needle.checkpoint import Checkpoint, list_checkpoints
from needle.data import (
    Batches,
    DataError,
    Prefetch,
    __main__,
    megatron,
    open_data,
    open_documents,
    open_run_data,
    prepare,
)
from needle.data.text import train_tokenizer
from needle.data.tokenizer import load_tokenizer
from needle.models import pythia


@pytest.fixture
def inputs(tmp_path, monkeypatch):
    """Text of every kind: 30 JSON lines, 30 packed ones, 30 files; in that order."""
    pytest.importorskip("tokenizers")
    monkeypatch.setenv("NEEDLE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(prepare, "UNIT", 700)
    train_tokenizer(iter(TEXTS), 300).save(str(tmp_path / "tokenizer.json"))
    lines = [json.dumps({"text": text}) + "\n" for text in TEXTS]
    (tmp_path / "a.jsonl").write_text("\n" + "".join(lines[:30]))
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress("".join(lines[30:60]).encode()))
    (tmp_path / "texts").mkdir()
    for number, text in enumerate(TEXTS[60:]):
        (tmp_path / "texts" / f"{number:02}.txt").write_text(text)
    return [str(tmp_path / name) for name in ("a.jsonl", "b.jsonl.gz", "texts")]


def flags(tmp_path, inputs, out, *more):
    where = ["--tokenizer", str(tmp_path / "tokenizer.json"), "--out", str(tmp_path / out)]
    return ["prepare", *inputs, *where, *more]


def run(tmp_path, inputs, out, *more):
    return __main__.main(flags(tmp_path, inputs, out, "--processes", "1", *more))


def started(*words, **pipes):
    """A command in a process group of its own."""
    command = [sys.executable, "-u", *map(str, words)]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(command, env=environ, text=True, start_new_session=True, **pipes)


def wait_for_files(process, folder, pattern, count):
    """Wait until the running process has written so many of these files."""
    wait_for(lambda: process.poll() is not None or len([*folder.glob(pattern)]) >= count)
    assert process.poll() is None


def content(tmp_path, out):
    return [(tmp_path / f"{out}.{ending}").read_bytes() for ending in ("bin", "idx")]


def test_documents_come_back_in_their_order(tmp_path, inputs, capsys, monkeypatch):
    monkeypatch.setattr("needle.data.text.CHUNK", 40)  # so that most documents are several
    assert run(tmp_path, inputs, "one") == 0
    out = capsys.readouterr().out
    assert "90 documents" in out and "0 of " in out
    found = open_documents(tmp_path / "one")
    tokenizer = load_tokenizer(tmp_path / "tokenizer.json")
    ends = np.cumsum(found.sizes)
    end = tokenizer.token_to_id("<|endoftext|>")
    for text, stop, size in zip(TEXTS, ends, found.sizes):
        ids = found[stop - size : stop].tolist()
        assert ids.pop() == end and tokenizer.decode(ids, skip_special_tokens=False) == text
    assert not list(tmp_path.rglob("*.parts"))


def test_several_processes_write_the_files_of_one(tmp_path, inputs):
    assert run(tmp_path, inputs, "one") == 0
    assert __main__.main(flags(tmp_path, inputs, "new/folders/two", "--processes", "2")) == 0
    assert content(tmp_path, "one") == content(tmp_path, "new/folders/two")


def test_the_cut_neither_loses_nor_doubles_a_line(tmp_path, inputs):
    path = Path(inputs[0])
    for size in (1, 7, 100, 10**6):
        units = prepare.cut([path], size)
        assert [text for unit in units for text, _ in unit.chunks()] == TEXTS[:30]


PROGRAM = """
import sys, time
from needle.data import __main__, prepare
if __name__ == "__main__":
    prepare.UNIT = 700
    encode = prepare._encode_unit
    def slow(*arguments):
        time.sleep(0.02)
        return encode(*arguments)
    prepare._encode_unit = slow
    sys.exit(__main__.main(sys.argv[1:]))
"""


def test_killed_and_started_again(tmp_path, inputs, monkeypatch):
    assert run(tmp_path, inputs, "whole") == 0
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    words = flags(tmp_path, inputs, "parts", "--processes", "1")
    process = started(program, *words, stdout=subprocess.DEVNULL)
    wait_for_files(process, tmp_path / "parts.parts", "*.sizes", 3)
    process.kill()
    process.wait(60)
    assert not (tmp_path / "parts.idx").exists()
    done = {path.stem for path in (tmp_path / "parts.parts").glob("*.sizes")}
    encode, made = prepare._encode_unit, []

    def counted(tokenizer, unit, number, *rest):
        made.append(str(number))
        return encode(tokenizer, unit, number, *rest)

    monkeypatch.setattr(prepare, "_encode_unit", counted)
    assert run(tmp_path, inputs, "parts") == 0
    assert made and not done & set(made)
    assert content(tmp_path, "parts") == content(tmp_path, "whole")


def test_other_inputs_do_not_take_old_parts(tmp_path, inputs, monkeypatch):
    def broken(*_):
        raise DataError("stopped here")

    path = tmp_path / "a.txt"
    path.write_text("one two three\n" * 20)
    with monkeypatch.context() as patch:
        patch.setattr(prepare, "_merge", broken)
        assert run(tmp_path, inputs, "x") == run(tmp_path, [str(path)], "y") == 1
        assert run(tmp_path, [str(path)], "z") == 1
    assert run(tmp_path, [str(path)], "z", "--end-of-text", "e") == 0
    end = load_tokenizer(tmp_path / "tokenizer.json").token_to_id("e")
    assert open_documents(tmp_path / "z").tolist()[-1] == end
    assert run(tmp_path, inputs[:1], "x") == 0
    assert len(open_documents(tmp_path / "x").sizes) == 30
    path.write_text("two one three\n" * 20)  # of the same size
    assert run(tmp_path, [str(path)], "y") == 0
    ids = open_documents(tmp_path / "y").tolist()
    assert load_tokenizer(tmp_path / "tokenizer.json").decode(ids) == path.read_text()


def test_two_at_once(tmp_path, inputs, capsys):
    lock = prepare._begin(tmp_path / "x.parts", "")
    assert run(tmp_path, inputs, "x") == 1
    assert f"process {os.getpid()} on" in capsys.readouterr().err
    lock.release()
    assert run(tmp_path, inputs, "x") == 0


@pytest.mark.slow
@pytest.mark.parametrize("delay", [0.0, 0.4, 1.5])
def test_ctrl_c_reaches_all_processes_and_one_line_says_so(tmp_path, inputs, delay):
    """A terminal signals the workers as well, also while they start."""
    Path(inputs[2], "long.txt").write_text("one two three four\n" * 200_000)
    words = flags(tmp_path, [*inputs[:2], *inputs], "x", "--processes", "2")
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = started("-m", "needle.data", *words, **pipes)
    assert "0 of" in process.stdout.readline()  # from now on workers start
    time.sleep(delay)
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=60)
    if "documents" in out:  # it was done before; a Python that ends leaves the signal to the system
        assert process.returncode in (0, -signal.SIGINT)
        assert len(open_documents(tmp_path / "x").sizes) == 151
    else:
        assert process.returncode == 130
        assert err == "needle data: interrupted; the same command goes on\n"


def test_ctrl_c_waits_until_the_pool_is_made(tmp_path, inputs, monkeypatch):
    """Between a semaphore and its finalizer it would leave the semaphore behind."""
    made = []

    def interrupted(*words):
        signal.raise_signal(signal.SIGINT)
        made.append(ProcessPoolExecutor(*words))
        return made[0]

    monkeypatch.setattr(prepare, "ProcessPoolExecutor", interrupted)
    assert run(tmp_path, inputs, "x", "--processes", "2") == 130
    assert made


@pytest.mark.slow
def test_workers_end_with_a_killed_parent(tmp_path, inputs):
    Path(inputs[2], "long.txt").write_text("one two three four\n" * 400_000)
    words = flags(tmp_path, inputs, "x", "--processes", "2")
    nowhere = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = started("-m", "needle.data", *words, **nowhere)
    wait_for_files(process, tmp_path / "x.parts", ".*.bin*", 1)  # a worker writes
    process.kill()
    process.wait()
    deadline = time.monotonic() + 60
    with pytest.raises(ProcessLookupError):  # of the whole group
        while time.monotonic() < deadline:
            os.killpg(process.pid, 0)
            time.sleep(0.05)


def test_existing_files_are_not_overwritten(tmp_path, inputs, monkeypatch, capsys):
    assert run(tmp_path, inputs[:1], "x") == 0
    before = content(tmp_path, "x")
    for files in (inputs[:1], inputs[1:]):
        assert run(tmp_path, files, "x") == 1
        assert "x.idx: exists already; remove it, or choose" in capsys.readouterr().err
    assert content(tmp_path, "x") == before
    (tmp_path / "train.bin").write_bytes(b"nanoGPT's")
    assert run(tmp_path, inputs, "train") == 1
    assert "train.bin: exists already" in capsys.readouterr().err
    assert (tmp_path / "train.bin").read_bytes() == b"nanoGPT's"

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:  # between OUT.bin and OUT.idx
        patch.setattr(megatron, "write_index", full)
        assert run(tmp_path, inputs[:1], "y") == 1
    assert "y.idx: cannot be written: No space left on device" in capsys.readouterr().err
    assert (tmp_path / "y.bin").exists() and not (tmp_path / "y.idx").exists()
    assert run(tmp_path, inputs[1:], "y") == 1  # other inputs: not its own
    assert run(tmp_path, inputs[:1], "y") == 0
    assert content(tmp_path, "y") == before


def test_errors_of_prepare(tmp_path, inputs, capsys):
    with open(inputs[0], "a") as file:
        file.write('{"text": ""}\n')
    assert __main__.main(flags(tmp_path, inputs, "x", "--processes", "2")) == 1
    assert "a.jsonl: the line at offset" in capsys.readouterr().err
    assert run(tmp_path, [str(tmp_path / "missing*")], "x") == 1
    assert "no file matches" in capsys.readouterr().err
    (tmp_path / "blank.txt").write_text("")
    assert run(tmp_path, [str(tmp_path / "blank.txt")], "y") == 1
    assert "no text in the inputs" in capsys.readouterr().err
    assert not (tmp_path / "y.idx").exists()


def test_the_field_of_json_lines_may_be_named(tmp_path, inputs, capsys):
    assert run(tmp_path, inputs[:1], "text") == 0
    lines = [json.dumps({"id": str(i), "content": t}) + "\n" for i, t in enumerate(TEXTS[:30])]
    for name, pack in ("o.jsonl", bytes), ("p.jsonl.gz", gzip.compress):
        other = tmp_path / name
        other.write_bytes(pack("".join(lines).encode()))
        assert run(tmp_path, [str(other)], name[0]) == 1
        error = capsys.readouterr().err
        assert "as its field `text`; strings are in id, content: `prepare --field`" in error
        assert run(tmp_path, [str(other)], name[0], "--field", "content") == 0
        assert content(tmp_path, name[0]) == content(tmp_path, "text")
        assert run(tmp_path, [str(other)], "z", "--field", "body") == 1
        assert "as its field `body`" in capsys.readouterr().err
    assert run(tmp_path, inputs[2:], "z", "--field", "content") == 1
    assert "--field content: none of the inputs is a file of JSON lines" in capsys.readouterr().err


@pytest.mark.parametrize("where", ["folder", "file", "tokens"])
def test_a_name_that_is_not_utf8(tmp_path, inputs, capsys, where):
    folder = tmp_path / "names"
    folder.mkdir()
    name = folder / ("caf\udce9.npy" if where == "tokens" else "caf\udce9.txt")
    np.save(name, np.arange(99)) if where == "tokens" else name.write_text("some text\n")
    path = str(folder if where == "folder" else name)
    for command in (["inspect", path], ["view", path, "--step", "1"]):
        if command[0] == "view" and where != "tokens":
            command += ["--tokenizer", str(tmp_path / "tokenizer.json")]
        assert __main__.main(command) == 1
        error = capsys.readouterr().err
        assert "\\xe9" in error and "a name that is not UTF-8; rename it" in error
    assert run(tmp_path, [path], "x") == 1 or where == "tokens"


def test_inspect(tmp_path, inputs, capsys):
    assert run(tmp_path, inputs, "x") == 0
    capsys.readouterr()
    tokenizer = ["--tokenizer", str(tmp_path / "tokenizer.json")]
    assert __main__.main(["inspect", str(tmp_path / "x"), *tokenizer]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "Megatron, 90 documents" in out and "'document 0: " in out and "held out" in out
    assert __main__.main(["inspect", inputs[0]]) == 0
    assert "a.jsonl: JSON lines: 30 documents" in " ".join(capsys.readouterr().out.split())
    assert __main__.main(["inspect", str(tmp_path / "nothing")]) == 1
    assert "no such file" in capsys.readouterr().err


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


def test_view_of_a_run_on_text_shows_its_samples(tmp_path, inputs, trained, capsys):
    settings = "--model tiny --batch-size 2 --grad-accum 2 --seq-len 16 --steps 6".split()
    tokenizer = str(tmp_path / "tokenizer.json")
    trained("--data", str(tmp_path / "texts"), "--tokenizer", tokenizer, *settings)
    view = ["view", str(trained.folder), "--step"]
    for step in range(1, 7):
        capsys.readouterr()
        assert __main__.main([*view, str(step)]) == 0
        out, rows = capsys.readouterr().out, np.concatenate(trained.drawn[2 * step - 2 : 2 * step])
        np.testing.assert_array_equal(shown_ids(out), rows)
        assert "three" in out  # the text stands beside the ids
    assert __main__.main([*view, "7"]) == 0
    assert "--step 7 is beyond the run, which has 6 steps" in capsys.readouterr().err
    assert __main__.main([*view, "1", "--seed", "3"]) == 1
    assert "a run knows its own --seed" in capsys.readouterr().err
    (tmp_path / "texts" / "00.txt").write_text("something else\n" * 40)
    assert __main__.main([*view, "1"]) == 1
    assert "not the tokens that the run read before" in capsys.readouterr().err


def write_data(tmp_path, inputs, kind):
    """Data of about 200 to 400 ids a kind, so that thirty steps walk them several times."""
    ids = np.random.RandomState(3).randint(0, 300, 17 * 20).astype("<u2")
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


@pytest.mark.parametrize("kind", ["megatron", "rows", "flat"])
def test_view_and_checkpoints_of_a_run_that_was_killed_went_on_and_walked_its_data_again(
    tmp_path, inputs, trained, capsys, kind
):
    """6 steps, killed in the 5th, resumed, then resumed up to 30: a step draws what `view` shows,
    and each checkpoint stands before the batch of the next step."""
    data = write_data(tmp_path, inputs, kind)
    settings = "--model tiny --batch-size 3 --grad-accum 2 --seq-len 16 --steps 6 --eval-every 0"
    settings += " --schedule constant --save-every 1"
    trained.most = 9
    with pytest.raises(SystemExit):
        trained("--data", str(data), *settings.split())
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
    for step in range(1, 31):
        capsys.readouterr()
        assert __main__.main(["view", str(trained.folder), "--step", str(step)]) == 0
        out, error = capsys.readouterr()
        rows = np.concatenate(trained.drawn[2 * step - 2 : 2 * step])
        np.testing.assert_array_equal(shown_ids(out), rows, err_msg=f"step {step}")
        assert "beyond" not in error
    last = Checkpoint(list_checkpoints(trained.folder / "checkpoints")[0]).state["data"]
    assert last["epoch"] >= 2


def test_bad_flags(capsys):
    for argv in (
        ["view", "x"],
        ["view", "x", "--step", "0"],
        ["view", "x", "--step", "1", "--seed", "4294967296"],
        ["prepare", "x"],
        ["view", "x", "--step", "1", "--rows", "two"],
        [],
    ):
        with naming(*argv), pytest.raises(SystemExit) as caught:
            __main__.main(argv)
        assert caught.value.code == 2
