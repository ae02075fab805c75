"""Training from weights: --init, and the advice of a finished run about going on."""

import json
import shutil

import pytest
import tokenizers
import train_pythia
from small_runs import arguments, checkpoint_of, flags, lines_of, numbers_of, run_until, without

import needle as ndl
from needle import hf
from needle.backend_ndarray import cpu
from needle.checkpoint import Checkpoint
from needle.data import load_tokenizer
from needle.hf import __main__ as shell
from needle.training import run as run_parts
from needle.training.settings import Settings


def weights_of(model):
    return {name: p.numpy().tobytes() for name, p in model.named_parameters()}


@pytest.fixture
def trained(tmp_path, texts):
    """The folder of a finished run on text."""
    assert train_pythia.main(flags(tmp_path, texts, "first")) == 0
    return tmp_path / "runs" / "first"


def test_run_starts_from_weights_of_each_kind(tmp_path, texts, trained, monkeypatch):
    before = Checkpoint(trained / "checkpoints" / "step_6.safetensors")
    exported = tmp_path / "exported"
    hf.save(before.restore_model(cpu()), exported)
    train, started = train_pythia.train, []

    def seen(run):
        started.append((weights_of(run.model), run.step, run.optimizer.t, run.position))
        return train(run)

    monkeypatch.setattr(train_pythia, "train", seen)
    for name, source in ("b", trained), ("c", before.path), ("d", exported):
        argv = flags(tmp_path, texts, name, "--lr", "1e-5", "--init", source)
        assert train_pythia.main(without(argv, "--model")) == 0
        model, step, updates, position = started.pop()
        assert model == weights_of(before.restore_model(cpu())), source
        assert (step, updates, position) == (0, 0, {"epoch": 0, "batch": 0})
        # It goes on from the end of the first, with the first's tokenizer.
        last, first = lines_of(tmp_path, "first")[-1]["loss"], lines_of(tmp_path, name)[0]["loss"]
        assert abs(last - first) < 0.5 < lines_of(tmp_path, "first")[0]["loss"] - first
        own = (tmp_path / "runs" / name / "tokenizer.json").read_text()
        assert own == (trained / "tokenizer.json").read_text()
        state = Checkpoint(checkpoint_of(tmp_path, name, 6)).state
        assert state["settings"]["model"] == "tiny" and state["settings"]["init"] == str(source)
        for dtype in "bfloat16", None:
            given = Settings(init=str(source), dtype=dtype, context_parallel=2)
            model, _ = run_parts.from_weights(given, cpu())
            assert model.config.dtype == (dtype or "float32")
            assert weights_of(model) == weights_of(before.restore_model(cpu(), dtype))


def test_run_resumes_though_its_first_weights_are_gone(tmp_path, texts, trained, monkeypatch):
    folder, other = tmp_path / "exported", tmp_path / "other.json"
    hf.save(Checkpoint(trained / "checkpoints" / "step_6.safetensors").restore_model(cpu()), folder)
    tokenizer = load_tokenizer(trained)
    tokenizer.enable_truncation(9)  # another file of the same tokens
    tokenizer.save(str(other))
    more = "--init", folder, "--tokenizer", other
    argv = flags(tmp_path, texts, "a", *more)
    run_until(monkeypatch, 5, argv)
    assert train_pythia.main(flags(tmp_path, texts, "b", *more)) == 0
    shutil.rmtree(folder)
    assert train_pythia.main([*argv, "--resume", "auto"]) == 0
    assert numbers_of(tmp_path, "a") == numbers_of(tmp_path, "b")
    state = Checkpoint(checkpoint_of(tmp_path, "a", 6)).state
    assert state["settings"]["tokenizer"] == str(other)


def test_run_from_an_imported_checkpoint_takes_its_tokenizer_and_end(
    tmp_path, texts, trained, monkeypatch, capsys
):
    """They are in the checkpoint; the run keeps them when it is gone."""
    model = ndl.Pythia.from_pretrained(trained)
    text = model.tokenizer.to_str().replace("<|endoftext|>", "<end>")
    folder, checkpoint = tmp_path / "a", tmp_path / "b" / "model.safetensors"
    model.save_pretrained(folder, tokenizers.Tokenizer.from_str(text))
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": [0, 7]}))
    (folder / "tokenizer_config.json").unlink()
    assert shell.main(["import", str(folder), str(checkpoint)]) == 0
    argv = flags(tmp_path, texts, "x", "--init", checkpoint)
    run_until(monkeypatch, 5, argv)
    assert "end of text '<end>', id 0" in capsys.readouterr().out
    shutil.rmtree(folder), shutil.rmtree(checkpoint.parent)
    assert train_pythia.main([*argv, "--resume", "auto"]) == 0
    run = tmp_path / "runs" / "x"
    ids = ndl.data.open_run_data(run)[0].train.tolist()
    assert ids.count(0) == 23  # one of 24 documents is held out
    for found in (
        ndl.open_run(run).tokenizer,
        ndl.open_run(run).model().tokenizer,
        ndl.Pythia.from_pretrained(run).tokenizer,
        ndl.load_checkpoint(checkpoint_of(tmp_path, "x", 6))[0].tokenizer,
        load_tokenizer(run),
    ):
        assert type(found) is ndl.data.Tokenizer and found.stops == (0, 7)
        assert found.to_str() == load_tokenizer(tokenizers.Tokenizer.from_str(text)).to_str()
    assert shell.main(["export", str(run), str(tmp_path / "back")]) == 0
    fields = json.loads((tmp_path / "back" / "config.json").read_text())
    assert fields["eos_token_id"] == [0, 7]


def test_run_keeps_the_end_of_text_of_its_start(
    tmp_path, texts, tokens, trained, monkeypatch, capsys
):
    """Said by the flag or by a file beside the tokenizer, which then names another."""
    place = tmp_path / "tokenizer"
    place.mkdir()
    text = load_tokenizer(trained).to_str().replace("<|endoftext|>", "<end>")
    (place / "tokenizer.json").write_text(text)
    given, counts = ["--tokenizer", place / "tokenizer.json"], {}
    for name, data, more, said in (
        ("none", texts, [], None),
        ("flag", texts, ["--end-of-text", "<end>"], None),
        ("file", texts, [], {"eos_token": "<end>"}),
        ("tokens", tokens, [], {"eos_token": "<end>"}),
    ):
        file = place / "tokenizer_config.json"
        if said is not None:
            file.write_text(json.dumps(said))
        capsys.readouterr()
        argv = flags(tmp_path, data, name, *given, *more)
        run_until(monkeypatch, 5, argv)
        first = "no end of text: --end-of-text names" if name == "none" else "'<end>', id 0"
        assert first in capsys.readouterr().out
        assert train_pythia.main(flags(tmp_path, data, f"{name}-whole", *given, *more)) == 0
        file.write_text('{"eos_token": "e"}')
        again = flags(tmp_path, data, name, "--resume", "auto")
        assert train_pythia.main(again) == 0
        file.unlink()
        assert numbers_of(tmp_path, name) == numbers_of(tmp_path, f"{name}-whole")
        run = tmp_path / "runs" / name
        counts[name] = ndl.data.open_run_data(run)[0].train.tolist().count(0)
        assert ndl.open_run(run).tokenizer.stops == (() if name == "none" else (0,))
        for one in name, f"{name}-whole":  # a checkpoint holds its tokenizer, wherever it goes
            alone = shutil.copy(checkpoint_of(tmp_path, one, 6), tmp_path / "alone.safetensors")
            found = ndl.load_checkpoint(alone)[0].tokenizer
            assert found.stops == (() if name == "none" else (0,))
        if name == "flag":
            assert train_pythia.main([*again, "--end-of-text", "e"]) == 1
            assert "--end-of-text is e, but the run has <end>" in capsys.readouterr().err
    del counts["tokens"]
    assert counts == {"none": 0, "flag": 23, "file": 23}
    assert train_pythia.main(flags(tmp_path, texts, "x", "--end-of-text", "e")) == 1
    assert "--end-of-text: is for a tokenizer that is given" in capsys.readouterr().err


def test_weights_that_do_not_fit_are_one_error(
    tmp_path, texts, tokens, trained, capsys, monkeypatch
):
    monkeypatch.chdir(texts)
    capsys.readouterr()
    for more, said in [
        ("--model pythia-14m", "--model pythia-14m: its weights are of a tiny"),
        ("--seq-len 17", "--seq-len 17: it reads 16 at most"),
        ("--sparse local --seq-len 32", "it reads 16 at most; --sparse local: its attention"),
        ("--init nowhere", "nowhere: no such file or folder"),
        ("--init .", "neither a run of needle"),
    ]:
        assert train_pythia.main(flags(tmp_path, texts, "a", "--init", trained, more)) == 1
        out, error = capsys.readouterr()
        assert said in error and error.count("\n") == 1, more
        assert error.startswith("needle train: ")
    assert train_pythia.main(flags(tmp_path, tokens, "small")) == 0  # 64 ids, no tokenizer
    capsys.readouterr()
    argv = flags(tmp_path, texts, "a", "--init", tmp_path / "runs/small")
    assert train_pythia.main(argv) == 1
    assert "no tokenizer.json lies with it, and the data is text" in capsys.readouterr().err
    assert train_pythia.main([*argv, "--tokenizer", str(trained / "tokenizer.json")]) == 1
    error = capsys.readouterr().err
    assert "its vocabulary is 64, but the tokenizer has" in error.splitlines()[-1]
    assert not (tmp_path / "runs" / "a").exists()
    argv = flags(tmp_path, tokens, "b", "--init", tmp_path / "runs/small")
    assert train_pythia.main(argv) == 0  # tokens need no tokenizer
    assert train_pythia.main([*argv, "--resume", "auto", "--init", str(trained)]) == 1
    assert "--init is" in capsys.readouterr().err


def test_finished_run_tells_how_to_go_on(tmp_path, tokens, capsys):
    for schedule in "cosine", "constant":
        folder = tmp_path / "runs" / schedule
        argv = flags(tmp_path, tokens, schedule, "--schedule", schedule)
        assert train_pythia.main(argv) == 0
        argv = arguments("--resume auto --device cpu --name", schedule, "--out", folder.parent)
        capsys.readouterr()
        assert train_pythia.main(argv) == 0
        said = " ".join(capsys.readouterr().out.split())
        longer = train_pythia.main([*argv, "--steps", "8"])
        error = capsys.readouterr().err
        if schedule == "constant":
            assert said.endswith("--steps N") and longer == 0
            assert len(lines_of(tmp_path, schedule)) == 8
        else:
            assert f"--init {folder}" in said and longer == 1
            assert f"--steps is 8, but the run has 6, where its {schedule} schedule ends" in error
            assert f"--init {folder}" in error
