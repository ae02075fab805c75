"""needle compare: the noise floor, the fork, losses and KL by document, distances by layer."""

import csv
import json

import numpy as np
import pytest
import train_pythia
from harness import log_probabilities, naming
from small_runs import CPU, EVERY, flags, retell

import needle as ndl
from needle.data.readers import read_documents
from needle.training.replay import compare

SIZES = [20, 1, 5, 16, 17, 40]  # of documents; windows have 16 tokens


@pytest.fixture
def probe(documents):
    return documents("probe", SIZES)


@pytest.fixture
def runs(parent):
    """A run of 6 steps, and its replay from step 2 without a sequence of step 4."""
    edit = {"do": "drop", "where": {"step": 4, "row": 1}}
    return parent, parent.replay(2, [edit], name="b", flags=[*CPU, *EVERY.split()])


def compared(capsys, *words):
    """The rows that the command prints, by their kind."""
    capsys.readouterr()
    assert compare.main([*map(str, words), *CPU]) == 0
    lines = [x for x in capsys.readouterr().out.splitlines() if x.startswith('{"kind"')]
    found = {}
    for row in map(json.loads, lines):
        found.setdefault(row.pop("kind"), []).append(row)
    return found


def scored(models, text):
    """(tokens, nats of each model, KL), a token by the longest context that its window has."""
    sums = np.zeros(4)
    for at in range(1, len(text)):
        end = min(-(-at // 16) * 16, len(text) - 1)  # of the window
        own, theirs = (log_probabilities(m, text[max(end - 16, 0) : at])[-1] for m in models)
        sums += 1, -own[text[at]], -theirs[text[at]], (np.exp(theirs) * (theirs - own)).sum()
    return sums


def parts_of(name):
    """The layer, or the part that is none, of a parameter."""
    return ".".join(name.split(".")[:2]), name.split(".")[0]


def test_compare_gives_losses_kl_and_distances(tmp_path, runs, probe, capsys):
    file, texts = probe
    words = *(run.folder for run in runs), "--probe", file, "--every", 2
    files = "--csv", tmp_path / "rows.csv", "--plot", tmp_path / "both.svg"
    found = compared(capsys, *words, *files)
    assert (tmp_path / "both.svg").read_text().count('id="axes_') == 2
    assert found["floor"] == [
        {"run": str(runs[0].folder), "floor": 0.0, "text": "steps 1 to 6 again: 0, equal bits"}
    ]
    assert [(row["run"], row["step"]) for row in found["fork"]] == [(str(runs[1].folder), 4)]
    assert {"batch", "loss", "digest of weights"} <= {*found["fork"][0]["differs"]}
    places = {(r["run"], r["step"], r["document"]): r for r in found["loss"]}
    assert {step for _, step, _ in places} == {2, 4, 6} and len(places) == 2 * 3 * 7
    for step in 2, 4, 6:
        models = [run.model(step) for run in runs]
        rows = [places[str(runs[1].folder), step, i] for i in [*range(6), "all"]]
        totals = np.zeros(4)
        for row, text in zip(rows, texts):
            tokens, own, theirs, kl = sums = scored(models[::-1], text)
            totals += sums
            assert row["tokens"] == tokens == len(text) - 1
            if tokens == 0:
                assert row["loss"] is row["kl"] is None
                continue
            with naming(step, row):
                wanted = np.array([own, own - theirs, kl]) / tokens
                given = [row[key] for key in ("loss", "difference", "kl")]
                assert given == pytest.approx(wanted, rel=1e-5, abs=1e-6)
        mean = totals / totals[0]
        assert rows[-1]["difference"] == pytest.approx(mean[1] - mean[2], rel=1e-4, abs=1e-7)
        assert places[str(runs[0].folder), step, "all"]["kl"] == 0
        assert (rows[-1]["difference"] != 0) == (rows[-1]["kl"] > 1e-9) == (step > 2)
    weights = {(r["step"], r["layer"]): r for r in found["weights"] if r["run"].endswith("b")}
    layers = {layer for _, layer in weights}
    assert {"layers.0", "layers.1", "all", "embed_in"} <= layers
    for layer in layers:
        one, other = (dict(run.model(6).named_parameters()) for run in runs)
        names = [n for n in one if layer in ("all", *parts_of(n))]
        pairs = [(one[n].numpy(), other[n].numpy()) for n in names]
        distance = np.sqrt(sum(((a - b) ** 2).sum(dtype=np.float64) for a, b in pairs))
        norm = np.sqrt(sum((a**2).sum(dtype=np.float64) for a, _ in pairs))
        assert weights[6, layer]["distance"] == pytest.approx(distance, rel=1e-5)
        assert weights[6, layer]["relative"] == pytest.approx(distance / norm, rel=1e-5)
        assert weights[2, layer]["distance"] == 0
    with open(tmp_path / "rows.csv", newline="") as table:
        rows = list(csv.DictReader(table))
    assert [row["kind"] for row in rows] == [k for k in found for _ in found[k]][:2] + [
        kind for _ in range(6) for kind in ["loss"] * 7 + ["weights"] * (len(layers))
    ]
    assert float(rows[-1]["distance"]) == weights[6, "all"]["distance"]


def test_floor_is_of_the_last_steps_that_a_checkpoint_precedes(
    tmp_path, tokens, runs, probe, capsys, monkeypatch
):
    """The data were moved, and are named by a flag."""
    monkeypatch.setattr(compare, "CONTROL", 2)
    moved = tokens.rename(tmp_path / "moved.npy")
    found = compared(capsys, runs[0].folder, "--probe", probe[0], "--data", moved)
    assert found["floor"][0]["text"] == "steps 5 to 6 again: 0, equal bits"


def test_floor_is_that_of_a_run_which_does_not_repeat(runs, probe, capsys):
    retell(runs[0].folder, 3, loss=runs[0].metrics["loss"][2] - 0.5)
    found = compared(capsys, runs[1].folder, runs[0].folder, "--probe", probe[0])
    assert found["floor"][0]["run"] == str(runs[0].folder)  # the replay's parent
    assert found["floor"][0]["floor"] == pytest.approx(0.5)
    assert found["floor"][0]["text"] == "steps 1 to 6 again: step 3 differs"
    assert {row["step"] for row in found["loss"]} == {6}
    words = runs[1].folder, runs[0].folder, "--probe", probe[0], "--no-floor"
    assert "floor" not in compared(capsys, *words)
    a = str(runs[0].folder)
    found = compared(capsys, a, a, "--probe", probe[0], "--no-floor")
    assert found["fork"] == [{"run": a, "step": None, "differs": []}]


def test_probe_of_text_and_tokens_is_cut_into_documents(tmp_path, tokens):
    tokenizer = ndl.data.load_tokenizer(ndl.data.text.train_tokenizer(iter(["ab cd ef"]), 260))
    end = tokenizer.eos_token_id
    (tmp_path / "x.jsonl").write_text('{"text": "ab"}\n{"text": "cd ef"}\n')
    texts = [tokenizer.encode(text).ids + [end] for text in ("ab", "cd ef")]
    assert [x.tolist() for x in read_documents(tmp_path / "x.jsonl", tokenizer, 300)] == texts
    flat = np.array(sum(texts, []), np.uint16)
    np.save(tmp_path / "x.npy", flat)
    assert [x.tolist() for x in read_documents(tmp_path / "x.npy", tokenizer, 300)] == texts
    assert [x.tolist() for x in read_documents(tmp_path / "x.npy", None, 300)] == [flat.tolist()]
    for name in "train", "val":  # nanoGPT's, of which both are the probe
        (tmp_path / "n").mkdir(exist_ok=True)
        flat.tofile(tmp_path / "n" / f"{name}.bin")
    assert [x.tolist() for x in read_documents(tmp_path / "n", tokenizer, 300)] == 2 * texts
    for path, given, limit, says in (
        ("x.jsonl", None, 300, "is text, and the run has no tokenizer"),
        ("x.npy", tokenizer, 4, "x.npy: offset .*is outside the vocabulary of 4"),
        ("none", tokenizer, 300, "none: no such file"),
    ):
        with naming(path), pytest.raises(ndl.data.DataError, match=says):
            read_documents(tmp_path / path, given, limit)


def test_runs_that_cannot_be_compared_are_named(tmp_path, tokens, runs, probe, refused):
    other = flags(tmp_path, tokens, "c", "--hidden 16")
    assert train_pythia.main(other) == 0
    a, b, c = (tmp_path / "runs" / name for name in "abc")
    (c / "metrics.jsonl").unlink()
    for words, code, says in (
        ([a, c], 1, "c: its model has another hidden_size, intermediate_size than"),
        ([c], 1, "c/metrics.jsonl: no line of a step: --no-floor"),
        ([a, b, "--every", 5], 1, "no step whose weights all runs have"),
        ([tmp_path / "none"], 1, "none: no run"),
        ([], 2, "give the folders of runs, or a bank by --edits"),
        ([a, "--edits", b], 2, "give the folders of runs, or a bank by --edits"),
        (["--edits", b, "--every", 2], 2, "--every, --no-floor: not with --edits"),
        ([a, b, "--plot", "both.txt"], 2, "--plot: must end in .png, .svg, .pdf, not 'both.txt'"),
    ):
        refused(compare.main, [*words, "--probe", probe[0], *CPU], says, code)
