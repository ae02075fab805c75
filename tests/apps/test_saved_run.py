"""Runs in Python: open_run, folders of runs where a model is asked for, models of one's own."""

import json
import re
import sys
from functools import partial

import generate
import numpy as np
import pytest
import train_pythia
from harness import ROOT, WITHOUT_PLOTS, naming, python
from harness import run as run_program
from small_runs import flags, lines_of, numbers_of

import needle as ndl
from needle.data import open_data


def test_open_run_gives_what_the_run_wrote(tmp_path, tokens):
    assert train_pythia.main(flags(tmp_path, tokens, "x")) == 0
    folder = tmp_path / "runs" / "x"
    run = ndl.open_run(folder)
    files = sorted((folder / "checkpoints").iterdir(), key=lambda p: int(p.stem.split("_")[1]))
    assert run.steps == [int(path.stem.split("_")[1]) for path in files]
    assert run.steps[-1] == 6 and run.tokenizer is None
    assert run.settings["seq_len"] == 16 and run.config.hidden_size == 32
    lines = lines_of(tmp_path, "x")
    assert run.metrics["step"].tolist() == [1, 2, 3, 4, 5, 6]
    assert run.metrics["step"].dtype == np.int64 and run.metrics["loss"].dtype == np.float64
    for name in lines[2]:
        wanted = [line.get(name, np.nan) for line in lines]
        np.testing.assert_array_equal(run.metrics[name], wanted, err_msg=name)
    assert (
        np.isnan(run.metrics["val_loss"][0]) and np.isfinite(run.metrics["val_loss"][[2, 5]]).all()
    )

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
    functions = (
        ndl.load_checkpoint,
        ndl.load,
        ndl.Pythia.from_pretrained,
        ndl.models.from_pretrained,
    )
    for function in (ndl.open_run, *functions):
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


def test_model_of_ones_own_by_import_in_every_command(tmp_path, tokens, capsys):
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
        with pytest.raises(SystemExit, match="2"):
            main([*words, "--import", str(tmp_path / "none.py")])
        assert "none.py: cannot be read" in capsys.readouterr().err


def test_models_of_the_hub_by_name_from_its_cache(tmp_path):
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
    done = python("import sys; sys.modules['huggingface_hub'] = None\n" + code, **hub)
    said = r"EleutherAI/pythia-70m: no such file.*pip install 'needle-lm\[hf\]'"
    assert re.search(said, done.stderr)


def test_config_of_no_run_is_named_and_without_a_step_metrics_are_empty(tmp_path):
    for text in "{}", '{"settings": 3}', '{"settings": {}, "model": []}':
        (tmp_path / "config.json").write_text(text)
        said = "config.json: not the config.json of a run: it"
        with naming(text), pytest.raises(ndl.data.DataError, match=said):
            _ = ndl.open_run(tmp_path).config
    shapes = {name: x.shape for name, x in ndl.open_run(tmp_path).metrics.items()}
    assert shapes == dict.fromkeys(("step", "tokens", "loss"), (0,))
