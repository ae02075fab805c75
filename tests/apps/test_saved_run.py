"""Runs in Python: open_run, folders of runs where a model is asked for, models of one's own, and
training from weights."""

import json
import re
import shutil
import sys
from functools import partial

import generate
import numpy as np
import pytest
import tokenizers
import train_pythia
from harness import ROOT, WITHOUT_PLOTS, naming, python
from harness import run as run_program
from small_runs import checkpoint_of, flags, lines_of, numbers_of, run_until, without

import needle as ndl
from needle import hf
from needle.backend_ndarray import cpu
from needle.checkpoint import Checkpoint
from needle.data import load_tokenizer, open_data
from needle.data.__main__ import main as data
from needle.training import evaluate
from needle.training import export as shell


def test_open_run_gives_what_the_run_wrote(tmp_path, tokens):
    assert train_pythia.main(flags(tmp_path, tokens, "x", "--keep", "0")) == 0
    folder = tmp_path / "runs" / "x"
    run = ndl.open_run(folder)
    files = sorted((folder / "checkpoints").iterdir(), key=lambda p: int(p.stem.split("_")[1]))
    assert run.steps == [int(path.stem.split("_")[1]) for path in files]
    assert run.steps[-1] == 6 and run.tokenizer is None
    assert run.settings["seq_len"] == 16 and run.config.hidden_size == 32
    lines = lines_of(tmp_path, "x")
    assert run.metrics["step"].dtype == np.int64 and run.metrics["loss"].dtype == np.float64
    for name in lines[2]:
        wanted = [line.get(name, np.nan) for line in lines]
        np.testing.assert_array_equal(run.metrics[name], wanted, err_msg=name)
    ids = np.arange(12).reshape(1, 12)
    for step, path in zip(run.steps, files):
        with naming("step", step):
            wanted = ndl.load_checkpoint(path)[0](ids)[0].numpy()
            assert (run.model(step)(ids)[0].numpy() == wanted).all()
            assert run.checkpoint(step).state["step"] == step and not run.model(step).training
    for load in (
        lambda: ndl.load_checkpoint(folder)[0],
        lambda: ndl.load(folder)[0],
        lambda: ndl.Pythia.from_pretrained(str(folder)),
        lambda: ndl.models.from_pretrained(files[-1]),
        run.model,
    ):
        assert (load()(ids)[0].numpy() == wanted).all()
    for load in partial(ndl.Pythia.from_pretrained, folder), run.model:
        assert load(dtype="bfloat16").config.dtype == "bfloat16"

    files[-1].write_bytes(files[-1].read_bytes()[:-1])  # the one before is the newest whole one
    assert ndl.load_checkpoint(folder)[2:] == ndl.load_checkpoint(files[-2])[2:]
    with pytest.raises(FileNotFoundError, match="no checkpoint of step 3; there are "):
        run.model(3)
    for step in "6", True, 6.0:
        with pytest.raises(TypeError, match=f"x: step must be a whole number, not {step!r}"):
            run.model(step)
    assert run.checkpoint(np.int64(run.steps[0])).path == files[0]


def test_missing_paths_are_file_not_found_errors(tmp_path):
    missing, empty = tmp_path / "no" / "run", tmp_path / "empty"
    empty.mkdir()
    (empty / "checkpoints").mkdir()
    from_pretrained = ndl.Pythia.from_pretrained, ndl.models.from_pretrained
    for function in (ndl.open_run, ndl.load_checkpoint, ndl.load, *from_pretrained):
        for path in missing, empty:
            with naming(function, path), pytest.raises(FileNotFoundError, match=str(path)):
                function(path)
    with pytest.raises(FileNotFoundError, match="no such file or folder"):
        open_data(missing)
    (tmp_path / "typo").mkdir()
    for revision, path, says in (
        (None, tmp_path / "tyop", f"^{tmp_path}/tyop: no such .* here .*a run.*is {tmp_path}/typo"),
        ("main", tmp_path / "typo", f"^{tmp_path}/typo: a folder here has no revision"),
    ):
        with pytest.raises(FileNotFoundError, match=says):
            ndl.models.from_pretrained(path, revision=revision)


COMMANDS = """
import json, sys
sys.path.insert(0, sys.argv[1])
import importlib
for module, words in json.loads(sys.argv[2]):
    print(importlib.import_module(module).main(words), file=sys.stderr)
"""


def test_model_of_ones_own_by_import_in_every_command(tmp_path, tokens, refused):
    """In processes of their own: one has not registered the model."""
    run, file = str(tmp_path / "runs" / "x"), tmp_path / "models" / "mine.py"
    file.parent.mkdir()
    (file.parent / "helper.py").write_text("WIDTH = 24\n")  # lies beside the file
    code = (ROOT / "tests" / "distributed" / "dropping.py").read_text()
    code = code.replace("size: int = 32", "size: int = WIDTH").replace(
        "from dataclasses", "from helper import WIDTH\nfrom dataclasses"
    )
    file.write_text(code)
    argv = [word if word != "tiny" else "dropping" for word in flags(tmp_path, tokens, "x")]

    def commands(given, *several):
        """The exit codes, and what was said."""
        words = [[module, [*map(str, [*words, *given])]] for module, words in several]
        environment = {"PYTHONPATH": f"{WITHOUT_PLOTS}{ROOT}", "PYTHONWARNINGS": "ignore"}
        done = run_program(
            *(sys.executable, "-c", COMMANDS, ROOT / "apps", json.dumps(words)), **environment
        )
        return "".join(re.findall(r"^(\d)$", done.stderr, re.M)), done.stdout + done.stderr

    evaluation = "needle.training.evaluate", [run, "--data", tokens]
    codes, text = commands(
        ["--import", file],
        ("train_pythia", [*argv, "--steps", "5", "--schedule", "constant"]),
        ("train_pythia", ["--resume", run, "--steps", "6"]),
        evaluation,
        ("needle.training.export", ["export", run, tmp_path / "out"]),
        ("train_pythia", [*argv, "--name", "y", "--recompute"]),
        ("needle.training.replay.bank", [run, "--from", "4", "--dry-run"]),
        ("needle.training.replay.compare", [run, "--probe", tokens, "--device", "cpu"]),
    )
    assert "--recompute: a Dropping cannot compute layers again" in " ".join(text.split())
    assert "steps 1 to 6 again: 0, equal bits" in text and '"kind": "weights"' in text
    assert codes == "0001100" and "perplexity" in text and "Traceback" not in text, text
    assert "a Dropping has no weight_mapping" in text and len(numbers_of(tmp_path, "x")) == 6
    codes, text = commands([], ("train_pythia", ["--resume", run]), evaluation)
    assert codes == "11" and f"--import {file}" in text
    assert "no model 'dropping-family' is registered" in text
    for main, words in (train_pythia.main, argv), (generate.main, [run]):
        refused(main, [*words, "--import", tmp_path / "none.py"], "none.py: cannot be read", 2)


def test_models_of_the_hub_by_name_from_its_cache(tmp_path, monkeypatch):
    config = ndl.PythiaConfig(vocab_size=50, hidden_size=16, num_layers=1, num_heads=2)
    repository, models = tmp_path / "hub" / "models--EleutherAI--pythia-70m", {}
    for revision, commit in ("main", "a" * 40), ("step1000", "b" * 40):
        models[revision] = ndl.Pythia(config)
        models[revision].save_pretrained(repository / "snapshots" / commit)
        (repository / "refs").mkdir(exist_ok=True)
        (repository / "refs" / revision).write_text(commit)
    ids = [[1, 2, 3]]
    wanted = {name: model(ids)[0].numpy().tolist() for name, model in models.items()}
    code = f"""
import json, needle as ndl
name, found = "EleutherAI/pythia-70m", {{}}
for revision in "main", "step1000":
    for load in ndl.Pythia.from_pretrained, ndl.models.from_pretrained:
        found[revision] = load(name, revision=revision)({ids})[0].numpy().tolist()
assert ndl.Pythia.from_pretrained(name)({ids})[0].numpy().tolist() == found["main"]
print(json.dumps(found), flush=True)
ndl.Pythia.from_pretrained(name, revision="step7")
"""
    hub = {"HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(tmp_path / "hub")}
    pytest.importorskip("huggingface_hub")
    done = python(code, **hub)
    assert json.loads(done.stdout) == wanted, done.stderr
    assert re.search("FileNotFoundError|MissingFileError", done.stderr)
    assert "revision step7" in done.stderr
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    said = r"EleutherAI/pythia-70m: no such file.*pip install 'needle-lm\[hf\]'"
    with pytest.raises(FileNotFoundError, match=said):
        ndl.Pythia.from_pretrained("EleutherAI/pythia-70m")


def test_config_of_no_run_is_named_and_without_a_step_metrics_are_empty(tmp_path):
    for text in "{}", '{"settings": 3}', '{"settings": {}, "model": []}':
        (tmp_path / "config.json").write_text(text)
        said = "config.json: not the config.json of a run: it"
        with naming(text), pytest.raises(ndl.data.DataError, match=said):
            _ = ndl.open_run(tmp_path).config
    shapes = {name: x.shape for name, x in ndl.open_run(tmp_path).metrics.items()}
    assert shapes == dict.fromkeys(("step", "tokens", "loss"), (0,))


# ---- --init, and the tokenizer that comes with weights -------------------------------------------


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
