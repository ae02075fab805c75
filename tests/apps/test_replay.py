"""needle replay: the null edit, edits and their effects, errors by name."""

import errno
import hashlib
import json
import os
import re
import resource
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import Mock

import numpy as np
import pytest
import train_pythia
from harness import ROOT, naming, wait_for, wait_until_gone
from small_runs import (
    CPU,
    EVERY,
    assert_same_run,
    chain,
    checkpoint_of,
    flags,
    numbers_of,
    proofs_of,
    read_tensors,
    retell,
    rewrite,
    run_until,
)

import needle as ndl
from needle.data import DataError
from needle.data import __main__ as data_main
from needle.optim import Constant
from needle.training.replay import bank, compare, replays, verify
from needle.training.replay.proofs import Log


def command(*words):
    """The exit code of `needle replay` in this process."""
    try:
        return bank.main([*words])
    except SystemExit as end:  # of the training that takes its place
        return end.code


def digests_of(tmp_path, name):
    return {step: proof["digest"] for step, proof in proofs_of(tmp_path, name).items()}


@pytest.mark.parametrize("start, is_killed", [(0, False), (2, True), (3, False)])
def test_null_edit_gives_equal_bits(tmp_path, parent, monkeypatch, start, is_killed):
    if is_killed:  # which then goes on
        begun = replays.planned(parent.folder, start, None, [])
        folder = replays.make_folder(begun, tmp_path / "runs", "again")
        run_until(monkeypatch, 5, ["--resume", str(folder), *CPU])
    again = parent.replay(np.int64(start), name="again", flags=CPU)
    assert_same_run(tmp_path, "again", "a")
    assert proofs_of(tmp_path, "again") == proofs_of(tmp_path, "a")
    assert Log(again.folder / "metrics.jsonl").broken == []
    told = json.loads((again.folder / "replay.json").read_text())
    manifest = hashlib.sha256((parent.folder / "manifest.json").read_bytes()).hexdigest()
    assert told == {"parent": str(parent.folder), "manifest": manifest, "base": start // 2 * 2,
                    "start": start, "until": 6, "edits": [], "stop": None}  # fmt: skip
    assert json.loads((again.folder / "manifest.json").read_text())["replay"] == told


ROW = {"step": 4, "row": 1}
EDITS = {
    "mask": ({"do": "drop", "where": ROW}, 4),
    "reserve": ({"do": "drop", "where": ROW, "fill": "reserve", "seed": 7}, 4),
    "another text": ({"do": "replace", "where": ROW, "with_ids": [1, 2, 3]}, 4),
    "swap": ({"do": "swap", "where": ROW, "to": {"step": 6, "row": 0}}, 4),
    "order": ({"do": "reorder", "where": {"step": "3:6"}, "seed": 1}, 3),
    "a rate": ({"do": "rate", "steps": [5, 6], "value": 1e-4}, 5),
    "moments": ({"do": "moments", "to": "zero"}, 3),
    "a part of the moments": ({"do": "moments", "to": "zero", "parts": "layers.0.*"}, 3),
    "weights": ({"do": "weights", "from": "a/checkpoints/step_4.safetensors",
                 "parts": "embed_*"}, 3),
}  # fmt: skip


@pytest.mark.parametrize("edit", EDITS)
def test_edit_changes_each_digest_from_its_step_on_and_none_before(
    tmp_path, parent, monkeypatch, edit
):
    """Of two replays, of which one is killed and goes on."""
    monkeypatch.chdir(tmp_path / "runs")  # to which paths are relative
    (edit, first), train = EDITS[edit], replays.train

    def killed(folder, *rest):
        if folder.name == "two":
            run_until(monkeypatch, 5, ["--resume", str(folder), *CPU])
        return train(folder, *rest)

    monkeypatch.setattr(replays, "train", killed)
    for name in "one", "two":
        assert parent.replay(2, [edit], name=name, flags=CPU).steps[-1] == 6
    own, before = digests_of(tmp_path, "one"), digests_of(tmp_path, "a")
    assert [step for step in own if own[step]["weights"] == before[step]["weights"]] == [
        step for step in own if step < first
    ]
    assert {step: own[step] for step in range(1, first)} == {
        step: before[step] for step in range(1, first)
    }
    assert proofs_of(tmp_path, "two") == proofs_of(tmp_path, "one")
    assert_same_run(tmp_path, "two", "one")


def test_view_shows_the_rows_that_the_replay_is_trained_on(tmp_path, parent, capsys):
    edits = [
        {"do": "drop", "where": {"step": 4, "row": 1}},
        {"do": "replace", "where": {"step": 5, "row": 0}, "with_ids": [1, 2, 3]},
        {"do": "rate", "steps": [4, 4], "factor": 0.5},
    ]
    parent.replay(2, edits, name="b", flags=CPU)
    seen = lambda name, step: viewed(tmp_path, name, step)
    for step, proof in proofs_of(tmp_path, "b").items():
        rows, found = seen("b", step), hashlib.sha256()
        for ids in np.where(rows < 0, ~rows, rows)[:, :-1], rows[:, 1:]:
            found.update(ids.astype("<i4").tobytes())
        assert found.hexdigest() == proof["batch"], step
        own = {4: [[False] * 17, [True] * 17], 5: [[False] * 3 + [True] * 14, [False] * 17]}
        assert ((rows < 0) == own.get(step, False)).all(), step
    assert seen("b", 5)[0, :3].tolist() == [1, 2, 3]
    assert (seen("b", 4)[1] == ~seen("a", 4)[1]).all()
    folder = tmp_path / "runs" / "b"
    assert ndl.data.open_run_data(folder)[1].edits.first == 3  # documents are edited from there
    capsys.readouterr()
    words = ["view", str(folder), "--step", "4", "--rows", "1"]
    assert data_main.main(words) == 0
    said = capsys.readouterr().out
    assert "of a replay, with its edits: a target without a loss is written as -1 - id" in said
    (folder / "replay.json").write_text("{}")
    assert data_main.main(words) == 1
    assert "replay.json: not of a replay" in capsys.readouterr().err


def test_loss_of_a_step_without_a_row_is_the_part_of_the_other(tmp_path, parent):
    rate = {"do": "rate", "steps": [5, 5], "value": 0.0}
    for row in 0, 1:
        drop = {"do": "drop", "where": {"step": 4, "row": row}}
        parent.replay(2, [drop, rate], name=f"without{row}", flags=CPU)
    names = "a", "without0", "without1"
    whole, *parts = (numbers_of(tmp_path, name)[3]["loss"] for name in names)
    assert sum(parts) == pytest.approx(whole, rel=1e-6)


def viewed(tmp_path, name, step):
    """The rows that `needle data view` saves."""
    words = tmp_path / "runs" / name, "--step", step, "--save", tmp_path / "rows.npy"
    assert data_main.main(["view", *map(str, words)]) == 0
    return np.load(tmp_path / "rows.npy")


def test_rate_follows_the_edit(tmp_path, parent):
    rates = [line["lr"] for line in numbers_of(tmp_path, "a")]
    down = 0.25 * rates[2] - rates[2]
    for number, (edit, wanted) in enumerate((
        ({"steps": [4, 5], "value": 1e-4}, [1e-4, 1e-4, rates[5]]),
        ({"steps": [4, 6], "factor": 0.5}, [rate * 0.5 for rate in rates[3:]]),
        ({"steps": [4, 6], "to": 0.25}, [rates[2] + down * (i / 3) for i in (1, 2, 3)]),
    )):  # fmt: skip
        parent.replay(2, [{"do": "rate", **edit}], name=f"r{number}", flags=CPU)
        found = [line["lr"] for line in numbers_of(tmp_path, f"r{number}")]
        with naming(edit):
            assert found == rates[:3] + wanted
    edits = [{"do": "rate", "steps": steps, "factor": 0.5} for steps in ([2, 4], [3, 5])]
    several = replays.Replay("", None, 0, 0, 6, edits).rates(lambda step: 1.0)
    assert [several(step) for step in range(1, 7)] == [1, 0.5, 0.25, 0.25, 0.5, 1]
    edits = [{"do": "rate", "steps": [1, 4], "to": 0.5}]  # of a warmup, which is 0 at step 0
    first = replays.Replay("", None, 0, 0, 4, edits).rates(Constant(1.0, 2))
    assert [first(step) for step in range(1, 5)] == [0.4375, 0.375, 0.3125, 0.25]


def test_decay_of_a_stable_run_gives_the_bits_of_wsd(tmp_path, tokens, here):
    for name, more in ("wsd", "wsd --decay-share 0.5"), ("stable", "constant"):
        words = EVERY, "--warmup 1 --schedule", more
        assert train_pythia.main(flags(tmp_path, tokens, name, *words, steps=8)) == 0
    wsd, stable = (proofs_of(tmp_path, name) for name in ("wsd", "stable"))
    assert wsd[4] == stable[4] and wsd[5]["digest"] != stable[5]["digest"]
    edit = {"do": "rate", "steps": [5, 8], "to": 0.1}
    ndl.open_run(tmp_path / "runs" / "stable").replay(4, [edit], name="decayed", flags=CPU)
    assert_same_run(tmp_path, "decayed", "wsd", step=8)
    assert proofs_of(tmp_path, "decayed") == wsd
    rates = [line["lr"] for line in numbers_of(tmp_path, "wsd")]
    assert rates[3] == max(rates) and rates[7] < rates[6] < rates[4] < rates[3]


def test_replay_of_a_constant_run_goes_on_behind_its_end(tmp_path, tokens, here, capsys):
    for name, steps in ("a", 6), ("long", 8):
        words = EVERY, "--schedule constant --warmup 0"
        assert train_pythia.main(flags(tmp_path, tokens, name, *words, steps=steps)) == 0
    run = ndl.open_run(tmp_path / "runs" / "a")
    run.replay(6, steps=np.int64(2), name="b", flags=CPU)
    assert_same_run(tmp_path, "b", "long", step=8)
    capsys.readouterr()
    assert train_pythia.main(["--resume", str(tmp_path / "runs" / "b"), "--steps", "9", *CPU]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "all 8 steps are done. The replay ends there; a new run goes on from its wei" in said
    with pytest.raises(DataError, match="--from 6: .* take one of 0 to 5"):
        run.replay(6)
    with pytest.raises(DataError, match="--from 7: .* take one of 0 to 6"):
        run.replay(7, steps=1)
    assert train_pythia.main(["--resume", str(run.folder), "--steps", "8", *CPU]) == 0
    run.replay(7, name="c", flags=CPU)
    assert_same_run(tmp_path, "c", "long", step=8)


def test_data_that_were_moved_are_named_by_a_flag(tmp_path, tokens, parent, capsys):
    moved = str(tokens.rename(tmp_path / "moved.npy"))
    drop = [{"do": "drop", "where": {"step": 3, "row": 0}}]
    with pytest.raises(DataError, match="tokens.npy: no such file"):
        parent.replay(2, drop, name="b", flags=CPU)
    with pytest.raises(DataError, match="flags: --name c: not of needle train, or not here"):
        parent.replay(2, drop, flags=["--name", "c"])
    run = parent.replay(2, drop, steps=1, name="b", flags=[*CPU, "--data", moved])
    assert run.steps == [2, 3]
    assert command(str(parent.folder), "--from", "2", "--data", moved, "--dry-run") == 0
    capsys.readouterr()
    assert data_main.main(["view", str(run.folder), "--step", "3", "--data", moved]) == 0
    rows, _ = capsys.readouterr().out.split("---- sequence 1")
    assert all(int(word) < 0 for word in rows.split("---- sequence 0\n")[1].split()[1:])


def test_replay_has_the_name_and_the_tokenizer_of_its_parent(tmp_path, texts, here, monkeypatch):
    assert train_pythia.main(flags(tmp_path, texts, "a", EVERY)) == 0
    runs, text = tmp_path / "runs", (tmp_path / "runs" / "a" / "tokenizer.json").read_text()
    for name in "a-replay", "a-replay-2":
        folder = replays.make_folder(replays.planned(runs / "a", 2, None, []), runs, None)
        assert folder == runs / name and (folder / "tokenizer.json").read_text() == text
        own, theirs = (checkpoint_of(tmp_path, one, 2).read_bytes() for one in (name, "a"))
        assert own == theirs
        refuse = OSError(errno.EXDEV, "Invalid cross-device link")  # the second is on another disk
        monkeypatch.setattr(os, "link", Mock(side_effect=refuse))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(own) - 1, limits[1]))
    try:  # the third is on one that is full
        with pytest.raises(DataError, match="full/checkpoints/step_2.safetensors: cannot be"):
            replays.make_folder(replays.planned(runs / "a", 2, None, []), runs, "full")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [*(runs / "full" / "checkpoints").iterdir()] == []


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_moments_and_weights_are_those_that_the_edit_names(tmp_path, tokens, here, dtype):
    """A checkpoint that is changed by hand goes on to the same bits."""
    for name in "a", "by_hand":
        assert train_pythia.main(flags(tmp_path, tokens, name, EVERY, dtype=dtype)) == 0
    other, words = checkpoint_of(tmp_path, "a", 6), {}
    for name, x in read_tensors(other)[1].items():
        slot, own = ("weights", name) if name[:10] != "optimizer." else name[10:].split(".", 1)
        if slot in ("m", "v") and own.startswith("layers.1."):
            words[name] = (), 0
        if own.startswith("final_" if slot in ("m", "v") else "embed_"):
            words[name] = (), x
    rewrite(checkpoint_of(tmp_path, "by_hand", 2), words=words)
    assert train_pythia.main(["--resume", str(checkpoint_of(tmp_path, "by_hand", 2))]) == 0
    edits = [
        {"do": "moments", "to": "zero", "parts": "layers.1.*"},
        {"do": "moments", "from": str(other), "parts": "final_*"},
        {"do": "weights", "from": str(other), "parts": "embed_*"},
    ]
    ndl.open_run(tmp_path / "runs" / "a").replay(2, edits, name="b", flags=CPU)
    assert_same_run(tmp_path, "b", "by_hand")
    assert len(words) == 24 + 4 + 2 * (1 + (dtype == "bfloat16"))


def test_weights_before_the_first_step_are_those_that_a_run_has_then(tmp_path, parent):
    file = checkpoint_of(tmp_path, "other", 1)
    ndl.save_checkpoint(parent.model(4), None, 0, 1.0, file)
    edit = {"do": "weights", "from": str(file.parent.parent), "parts": "*"}
    run = parent.replay(0, [edit], steps=1, name="b", flags=CPU)
    assert replays.read_replay(run.folder).edits == [{**edit, "from": str(file)}]
    inputs, targets = ndl.data.open_run_data(parent.folder)[1].next()
    assert run.metrics["loss"][0] == pytest.approx(
        parent.model(4)(inputs, targets)[1].item(), rel=1e-6
    )


def test_errors_are_named_and_leave_nothing(tmp_path, parent):
    (tmp_path / "bad.toml").write_text("[[edit]]\ndo = 'lose'\n")
    weights = str(ndl.save_checkpoint(parent.model(), None, 0, 1.0, tmp_path / "w.safetensors"))
    drop = lambda **where: [{"do": "drop", "where": where}]
    there = {path.name for path in (tmp_path / "runs").iterdir()}
    for arguments, says in (
        ((2, drop(document=3)), "edit 1 .drop.: .*need a tokenizer"),
        ((2, drop(step=9)), "step 9 is not there: there are 3 to 6"),
        ((2, drop(step=2)), "step 2 is not there: there are 3 to 6"),
        ((2, drop(step=np.int64(4), row=np.array([2]))), "row 2 is not there: there are 0 to 1"),
        ((2, [{"do": "rate", "steps": [5, 9], "factor": 2}]), "steps .5, 9.: there are 3 to 6"),
        ((2, [{"do": "moments", "to": "zero", "parts": "x*"}]), "'x.' names no parameter"),
        ((2, [{"do": "weights", "parts": "*", "from": "none"}]), "none: no such file"),
        ((2, [{"do": "moments", "from": weights}]), "w.safetensors has no such moments of"),
        ((2, [3]), "edits: edit 1 is no table: 3"),
        ((2, tmp_path / "bad.toml"), "bad.toml: edit 1, do: must be one of drop,"),
        ((2, tmp_path / "none.toml"), "none.toml: cannot be read: No such file"),
        ((6,), "--from 6: .*a has the steps 0 to 6: take one of 0 to 5"),
        ((9, [], 1), "--from 9: .*a has the steps 0 to 6: take one of 0 to 5"),
        ((-1,), "--from -1: "),
        ((2, [], 0), "--steps 0: must be 1 or more"),
        ((2, [], -1), "--steps -1: must be 1 or more"),
        ((2, [], 9), "the cosine schedule of .* ends at step 6: give 4 or less"),
        ((2, [], 1, "a"), "there is a run of this name already"),
    ):
        with naming(arguments), pytest.raises(DataError, match=says):
            parent.replay(*arguments, flags=CPU)
    with pytest.raises(TypeError, match="'float' object cannot be interpreted as an integer"):
        parent.replay(2, [], 1.5)
    edited = parent.replay(2, [EDITS["a rate"][0]], name="edited", flags=CPU)
    with pytest.raises(DataError, match="edited: a replay with edits: replay .*/a, with all edits"):
        edited.replay(4)
    assert {path.name for path in (tmp_path / "runs").iterdir()} - {"edited"} == there
    with pytest.raises(RuntimeError, match="b: ended before step 6, with exit code 1"):
        parent.replay(2, [], name="b", flags=[*CPU, "--lr", "1"])


def test_control_finds_a_parent_that_does_not_repeat(tmp_path, parent):
    retell(parent.folder, 3, loss=9.0)
    with pytest.raises(DataError, match="a replay differs from .*: step 3: loss is"):
        parent.replay(2, [EDITS["a rate"][0]], name="b", flags=CPU)
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["a"]
    words = ["--from", "2", "--steps", "1", "--name", "b", *CPU]
    file = tmp_path / "e.toml"
    file.write_text("[[edit]]\ndo = 'rate'\nsteps = [3, 3]\nvalue = 0.0\n")
    assert command(str(parent.folder), *words, "--edit", str(file)) == 1
    assert command(str(parent.folder), *words, "--edit", str(file), "--no-control") == 0
    assert [line["lr"] for line in numbers_of(tmp_path, "b")][2:] == [0.0]


def test_control_ends_at_its_limit_and_with_the_steps_of_the_parent(parent, monkeypatch):
    retell(parent.folder, 6, loss=9.0)
    cut = lambda lines: [line for line in lines if line["step"] <= 5]  # it was stopped there
    for start, change, said in (
        (3, lambda lines: lines, "control: 2 steps without edits have equal bits"),
        (4, cut, "control: 1 steps without"),
        (5, cut, "no control: .* no step after 5"),
    ):
        chain(parent.folder, change)
        monkeypatch.setattr(replays, "CONTROL", 2)
        replay = replays.planned(parent.folder, start, None, [EDITS["a rate"][0]])
        _, told = replays.begun(replay, parent.folder.parent, f"from-{start}", flags=CPU)
        assert re.match(said, told), told


def test_control_and_training_are_in_the_folder_and_by_the_words_of_the_flags(
    tmp_path, parent, monkeypatch
):
    """The folder of another user's run may be read alone."""
    (tmp_path / "e.toml").write_text("[[edit]]\ndo = 'rate'\nsteps = [3, 3]\nvalue = 0.0\n")
    train, told, launch, out = replays.train, [], "mpirun -n 2", tmp_path / "mine" / "runs"

    def watched(folder, *rest):
        told.append((folder.parent.parent, *rest[:2]))
        return train(folder, *rest)

    monkeypatch.setattr(replays, "train", watched)
    monkeypatch.setattr(replays, "become_training", lambda *given: told.append(given))
    words = ["--edit", str(tmp_path / "e.toml"), "--out", str(out), "--name", "c"]
    assert command(str(parent.folder), "--from", "2", *words, "--launch", launch, *CPU) == 0
    assert told == [(out, launch, CPU), (out / "c", launch, CPU)] and [*out.iterdir()] == [
        out / "c"
    ]
    words = replays.training(tmp_path / "b", launch, CPU)
    assert words[:3] == ["mpirun", "-n", "2"] and words[5:7] == CPU


def test_replay_without_its_first_checkpoint_does_not_begin_anew(tmp_path, tokens, parent, capsys):
    begun = replays.planned(parent.folder, 3, None, [EDITS["a rate"][0]])
    folder = replays.make_folder(begun, tmp_path / "runs", "b")
    checkpoint_of(tmp_path, "b", 2).unlink()
    argv = flags(tmp_path, tokens, "b", EVERY, "--resume auto")
    assert train_pythia.main(argv) == 1
    assert "no checkpoint is left" in capsys.readouterr().err
    with pytest.raises(DataError, match="lacks its first checkpoint: remove it, begin again"):
        replays.read_replay(folder, 0)


def test_command_prints_its_plan_and_a_dry_run_trains_nothing(
    tmp_path, parent, monkeypatch, capsys
):
    file = tmp_path / "e.toml"
    file.write_text("[[edit]]\ndo = 'drop'\nwhere = { step = 5, row = 0 }\n")
    words = [str(parent.folder), "--from", "3", "--edit", str(file), "--name", "b", *CPU]
    assert command(*words) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "1 edit(s) reach 1 sequences, 17 tokens, in 1 of the steps 4 to 6" in said
    assert "edits act on steps 5 to 5; weights can differ from there" in said
    assert "begins with the checkpoint of step 2: 1 steps more, which --keep-optimizer" in said
    assert "control: 3 steps without edits have equal bits" in said
    assert command(*words) == 0  # the same again goes on: it is done
    assert "b: this replay was begun before, and goes on" in capsys.readouterr().out
    file.write_text("[[edit]]\ndo = 'rate'\nsteps = [5, 6]\nfactor = 2.0\n\n"
                    "[[edit]]\ndo = 'moments'\nto = 'zero'\nparts = 'layers.0.*'\n")  # fmt: skip
    assert command(*words) == 1
    told = capsys.readouterr()
    assert (
        "edits act on steps 4 to 6; weights can differ from there every batch is byte-equal rate: "
        "steps [5, 6], factor 2.0 moments: to zero, parts layers.0.*, 12 parameters, before step 4"
        in " ".join(told.out.split())
    )
    assert "there is a run of this name already" in told.err
    monkeypatch.setattr(replays, "train", lambda *_, **__: pytest.fail("it trains"))
    (tmp_path / "null.toml").write_text("")
    words = [str(parent.folder), "--from", "2", "--edit", str(tmp_path / "null.toml")]
    assert command(*words, "--dry-run") == 0
    assert "no edit: every batch is byte-equal" in capsys.readouterr().out
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {"a", "b"}


def test_sigterm_while_steps_are_repeated_leaves_no_folder(tmp_path, tokens, parent, monkeypatch):
    (tmp_path / "e.toml").write_text("[[edit]]\ndo = 'rate'\nsteps = [5, 6]\nfactor = 2.0\n")
    monkeypatch.setattr(replays, "train", lambda *_: signal.raise_signal(signal.SIGTERM))
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)  # ends no test that fails
    for main, *words in (
        (bank.main, "--from", "2", "--edit", tmp_path / "e.toml"),
        (compare.main, "--probe", tokens),
        (verify.main,),
    ):
        with naming(main.__module__), pytest.raises(SystemExit, match="143"):
            main([str(parent.folder), *map(str, words), *CPU])
        assert [path.name for path in parent.folder.parent.iterdir()] == ["a"]
    signal.signal(signal.SIGTERM, before)


@pytest.mark.slow
@pytest.mark.parametrize("call", ["train(place, '', [], True)", "become_training(place, '', [])"])
def test_training_of_a_command_that_is_killed_dies_with_it(tmp_path, call):
    code = f"""
from needle.training.replay import replays
place = None
replays.training = lambda *given: ["sh", "-c", "echo $$ >part; mv part pid; exec sleep 600"]
replays.{call}
"""
    environ = os.environ | {"PYTHONPATH": str(ROOT)}
    child = subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path, env=environ)
    wait_for((tmp_path / "pid").exists)
    child.kill()
    child.wait()
    wait_until_gone(int((tmp_path / "pid").read_text()))


def test_folders_that_killed_processes_left_are_removed_and_those_at_work_stay(tmp_path):
    for name in "a", "a[1]*":
        (tmp_path / f".{name}-again-x" / "again").mkdir(parents=True)
        with replays.beside(tmp_path / name) as one, replays.beside(tmp_path / name) as other:
            assert {*tmp_path.iterdir()} == {one, other}

    def enter(_):
        with replays.beside(tmp_path / "a") as made:
            return (made / "lock").exists()

    with ThreadPoolExecutor(4) as pool:  # which begin at once
        assert all(pool.map(enter, range(400)))
    assert [*tmp_path.iterdir()] == []
