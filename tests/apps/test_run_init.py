"""Training from weights: --init, and the tokenizer that comes with them."""

import json
import shutil

import generate
import pytest
import tokenizers
import train_pythia
from small_runs import checkpoint_of, flags, run_until, without

import needle as ndl
from needle import hf
from needle.backend_ndarray import cpu
from needle.checkpoint import Checkpoint
from needle.data import load_tokenizer
from needle.data.__main__ import main as data
from needle.training import evaluate
from needle.training import export as shell


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
        # Its length is the most that the weights read.
        assert train_pythia.main(without(without(argv, "--model"), "--seq-len")) == 0
        model, step, updates, position = started.pop()
        assert model == weights_of(before.restore_model(cpu())), source
        assert (step, updates, position) == (0, 0, {"epoch": 0, "batch": 0})
        own = (tmp_path / "runs" / name / "tokenizer.json").read_text()
        assert own == (trained / "tokenizer.json").read_text()
        state = Checkpoint(checkpoint_of(tmp_path, name, 6)).state
        fixed = [state["settings"][name] for name in ("model", "seq_len", "init")]
        assert fixed == ["tiny", 16, str(before.path if source == trained else source)]
        assert train_pythia.main([*argv, "--resume", "auto"]) == 0  # flags repeat the settings


def test_given_tokenizer_takes_the_place_of_that_which_came(tmp_path, texts, trained, capsys):
    """Its a is the other's e."""
    other, out = tmp_path / "other.json", tmp_path / "out"
    fields = json.loads(load_tokenizer(trained).to_str())
    vocabulary = fields["model"]["vocab"]
    vocabulary["a"], vocabulary["e"] = vocabulary["e"], vocabulary["a"]
    other.write_text(json.dumps(fields))
    given = ["--tokenizer", str(other)]
    for main, *words in (
        (generate.main, trained, "--seed", 1, "--device", "cpu"),
        (evaluate.main, trained, "--data", texts, "--json", "--device", "cpu"),
        (data, "view", trained, "--step", 1),
    ):
        words, said = [str(word) for word in words], []
        for more in [], given:
            assert main([*words, *more]) == 0
            said.append(capsys.readouterr().out)
        assert said[0] != said[1], words
    assert shell.main(["export", str(trained), str(out), *given]) == 0
    assert train_pythia.main(flags(tmp_path, texts, "b", "--init", trained, *given)) == 0
    for folder in out, tmp_path / "runs" / "b":
        assert load_tokenizer(folder).to_str() == load_tokenizer(other).to_str()


def test_run_keeps_the_tokenizer_and_the_end_of_text_of_its_start(
    tmp_path, texts, trained, monkeypatch, capsys
):
    """The end is named by the flag, by a file beside the tokenizer, which then names another, or in
    an imported checkpoint, which is gone."""
    place, folder, imported = (tmp_path / name for name in ("tokenizer", "a", "b/c.safetensors"))
    place.mkdir()
    model = ndl.Pythia.from_pretrained(trained)
    text = model.tokenizer.to_str().replace("<|endoftext|>", "<end>")
    (place / "tokenizer.json").write_text(text)
    file, given = place / "tokenizer_config.json", ["--tokenizer", place / "tokenizer.json"]
    model.save_pretrained(folder, tokenizers.Tokenizer.from_str(text))
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": [0, 7]}))
    (folder / "tokenizer_config.json").unlink()
    assert shell.main(["import", str(folder), str(imported)]) == 0
    for name, more, content, stops in (
        ("none", given, "{}", ()),
        ("flag", [*given, "--end-of-text", "<end>"], "{}", (0,)),
        ("file", given, '{"eos_token": "<end>"}', (0,)),
        ("init", ["--init", imported], "{}", (0, 7)),
    ):
        file.write_text(content)
        capsys.readouterr()
        run_until(monkeypatch, 5, flags(tmp_path, texts, name, *more))
        said = "'<end>', id 0" if stops else "no end of text: --end-of-text names"
        assert said in capsys.readouterr().out
        file.write_text('{"eos_token": "e"}')
        if name == "init":
            imported.unlink()
        assert train_pythia.main(flags(tmp_path, texts, name, "--resume", "auto")) == 0
        run = tmp_path / "runs" / name
        ids = ndl.data.open_run_data(run)[0].train.tolist()
        assert ids.count(0) == 23 * bool(stops)  # one of 24 documents is held out
        # A checkpoint holds its tokenizer, wherever it goes.
        alone = shutil.copy(checkpoint_of(tmp_path, name, 6), tmp_path / "alone.safetensors")
        for found in (
            ndl.open_run(run).tokenizer,
            ndl.open_run(run).model().tokenizer,
            ndl.Pythia.from_pretrained(run).tokenizer,
            ndl.load_checkpoint(alone)[0].tokenizer,
            load_tokenizer(run),
        ):
            assert type(found) is ndl.data.Tokenizer and found.stops == stops
            assert found.to_str() == load_tokenizer(tokenizers.Tokenizer.from_str(text)).to_str()
