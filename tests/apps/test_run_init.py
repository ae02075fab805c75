"""Training from weights: --init, and the tokenizer that comes with them."""

import json
import shutil

import pytest
import tokenizers
import train_pythia
from small_runs import assert_same_run, checkpoint_of, flags, lines_of, run_until, without

import needle as ndl
from needle import hf
from needle.backend_ndarray import cpu
from needle.checkpoint import Checkpoint
from needle.data import load_tokenizer
from needle.training import export as shell
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
            model, fixed = run_parts.from_weights(given, cpu())
            assert (fixed.model, fixed.seq_len) == ("tiny", 16)  # the most it reads
            assert model.config.dtype == (dtype or "float32")
            assert weights_of(model) == weights_of(before.restore_model(cpu(), dtype))


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
    file, given = place / "tokenizer_config.json", ["--tokenizer", place / "tokenizer.json"]
    for name, data, more, said, count in (
        ("none", texts, [], None, 0),
        ("flag", texts, ["--end-of-text", "<end>"], None, 23),
        ("file", texts, [], {"eos_token": "<end>"}, 23),
        ("tokens", tokens, [], {"eos_token": "<end>"}, None),
    ):
        if said is not None:
            file.write_text(json.dumps(said))
        capsys.readouterr()
        run_until(monkeypatch, 5, flags(tmp_path, data, name, *given, *more))
        first = "no end of text: --end-of-text names" if name == "none" else "'<end>', id 0"
        assert first in capsys.readouterr().out
        assert train_pythia.main(flags(tmp_path, data, f"{name}-whole", *given, *more)) == 0
        file.write_text('{"eos_token": "e"}')
        again = flags(tmp_path, data, name, "--resume", "auto")
        assert train_pythia.main(again) == 0
        file.unlink()
        assert_same_run(tmp_path, name, f"{name}-whole")
        run, stops = tmp_path / "runs" / name, () if name == "none" else (0,)
        ids = ndl.data.open_run_data(run)[0].train.tolist()
        assert count is None or ids.count(0) == count
        # A checkpoint holds its tokenizer, wherever it goes.
        alone = shutil.copy(checkpoint_of(tmp_path, name, 6), tmp_path / "alone.safetensors")
        for found in ndl.open_run(run).tokenizer, ndl.load_checkpoint(alone)[0].tokenizer:
            assert found.stops == stops
        if name == "flag":
            assert train_pythia.main([*again, "--end-of-text", "e"]) == 1
            assert "--end-of-text is e, but the run has <end>" in capsys.readouterr().err
    assert train_pythia.main(flags(tmp_path, texts, "x", "--end-of-text", "e")) == 1
    assert "--end-of-text: is for a tokenizer that is given" in capsys.readouterr().err
