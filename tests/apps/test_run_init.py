"""Training from weights: --init, and what a finished run says about going on."""

import shutil

import pytest
import train_pythia
from small_runs import arguments, checkpoint_of, flags, lines_of, numbers_of, run_until

from needle import hf
from needle.backend_ndarray import cpu
from needle.checkpoint import Checkpoint
from needle.data import load_tokenizer
from needle.training import weights


def weights_of(model):
    return {name: p.numpy().tobytes() for name, p in model.named_parameters()}


@pytest.fixture
def trained(tmp_path, texts):
    """The folder of a finished run on text."""
    assert train_pythia.main(flags(tmp_path, texts, "first")) == 0
    return tmp_path / "runs" / "first"


@pytest.mark.parametrize("kind", ["run", "checkpoint", "transformers"])
def test_a_run_starts_from_weights(tmp_path, texts, trained, kind, monkeypatch):
    before = Checkpoint(trained / "checkpoints" / "step_6.safetensors")
    source = {"run": trained, "checkpoint": before.path, "transformers": tmp_path / "exported"}[
        kind
    ]
    hf.save(before.restore_model(cpu()), tmp_path / "exported")
    started = []
    train = train_pythia.train

    def seen(run):
        started.append((weights_of(run.model), run.step, run.optimizer.t, run.position))
        return train(run)

    monkeypatch.setattr(train_pythia, "train", seen)
    argv = flags(tmp_path, texts, "second", "--lr", "1e-5", "--init", source)
    del argv[argv.index("--model") : argv.index("--model") + 2]
    assert train_pythia.main(argv) == 0
    weights, step, updates, position = started[0]
    assert weights == weights_of(before.restore_model(cpu()))
    assert (step, updates, position) == (0, 0, {"epoch": 0, "batch": 0})
    # It goes on where the first ended, with the first's tokenizer.
    last, first = lines_of(tmp_path, "first")[-1]["loss"], lines_of(tmp_path, "second")[0]["loss"]
    assert abs(last - first) < 0.5 < lines_of(tmp_path, "first")[0]["loss"] - first
    own = (tmp_path / "runs" / "second" / "tokenizer.json").read_text()
    assert own == (trained / "tokenizer.json").read_text()
    state = Checkpoint(checkpoint_of(tmp_path, "second", 6)).state
    assert state["settings"]["model"] == "tiny" and state["settings"]["init"] == str(source)


def test_weights_are_taken_in_the_dtype_of_the_run(tmp_path, trained):
    before = Checkpoint(trained / "checkpoints" / "step_6.safetensors")
    hf.save(before.restore_model(cpu()), tmp_path / "exported")
    for source in (trained, before.path, tmp_path / "exported"):
        for dtype in ("bfloat16", None):
            named = {"init": str(source)} | ({} if dtype is None else {"dtype": dtype})
            model, _ = weights.start(named, None, cpu())
            assert model.config.dtype == (dtype or "float32")
            assert weights_of(model) == weights_of(before.restore_model(cpu(), dtype))


def test_it_resumes_bit_for_bit_though_the_weights_are_gone(tmp_path, texts, trained, monkeypatch):
    folder = tmp_path / "exported"
    hf.save(Checkpoint(trained / "checkpoints" / "step_6.safetensors").restore_model(cpu()), folder)
    argv = flags(tmp_path, texts, "a", "--init", folder)
    run_until(monkeypatch, 5, argv)
    assert train_pythia.main(flags(tmp_path, texts, "b", "--init", folder)) == 0
    shutil.rmtree(folder)
    assert train_pythia.main([*argv, "--resume", "auto"]) == 0
    assert numbers_of(tmp_path, "a") == numbers_of(tmp_path, "b")


def test_another_tokenizer_may_be_named(tmp_path, texts, trained):
    tokenizer = load_tokenizer(trained)
    other = tmp_path / "other.json"
    tokenizer.enable_truncation(9)  # says nothing to needle, but is another file
    tokenizer.save(str(other))
    argv = flags(tmp_path, texts, "a", "--init", trained, "--tokenizer", other)
    assert train_pythia.main(argv) == 0
    state = Checkpoint(checkpoint_of(tmp_path, "a", 6)).state
    assert state["settings"]["tokenizer"] == str(other)


@pytest.mark.parametrize(
    "more, said",
    [
        (
            "--model pythia-14m",
            "--model pythia-14m: hidden_size is 32, not 128; --model pythia-14m: "
            "num_heads is 2, not 4; --model pythia-14m: num_layers is 2, not 6",
        ),
        ("--seq-len 17", "--seq-len 17: it reads 16 at most"),
        ("--sparse local --seq-len 32", "it reads 16 at most; --sparse local: its attention"),
        ("--init nowhere", "nowhere: no such file or folder"),
        ("--init .", "neither a run of needle"),
    ],
)
def test_what_does_not_fit_is_one_error(tmp_path, texts, trained, capsys, monkeypatch, more, said):
    monkeypatch.chdir(texts)
    capsys.readouterr()
    argv = flags(tmp_path, texts, "a", "--init", trained, more)
    assert train_pythia.main(argv) == 1
    out, error = capsys.readouterr()
    assert said in error and error.count("\n") == 1 and error.startswith("train_pythia.py: ")
    assert not (tmp_path / "runs" / "a").exists()


def test_a_tokenizer_beyond_the_vocabulary(tmp_path, texts, tokens, trained, capsys):
    assert train_pythia.main(flags(tmp_path, tokens, "small")) == 0  # 64 ids
    capsys.readouterr()
    argv = flags(tmp_path, texts, "a", "--init", tmp_path / "runs/small")
    assert train_pythia.main(argv) == 1
    assert "no tokenizer.json lies with it, and the data is text" in capsys.readouterr().err
    argv += ["--tokenizer", str(trained / "tokenizer.json")]
    assert train_pythia.main(argv) == 1
    error = capsys.readouterr().err
    assert "its vocabulary is 64, but the tokenizer has" in error.splitlines()[-1]
    argv = flags(tmp_path, tokens, "b", "--init", tmp_path / "runs/small")
    assert train_pythia.main(argv) == 0  # tokens need no tokenizer


def test_a_resumed_run_knows_its_weights(tmp_path, tokens, capsys):
    assert train_pythia.main(flags(tmp_path, tokens, "a")) == 0
    argv = flags(tmp_path, tokens, "a", "--resume", "auto", "--init", tmp_path / "runs/a")
    assert train_pythia.main(argv) == 1
    assert "--init is" in capsys.readouterr().err


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant"])
def test_a_finished_run_says_how_to_go_on(tmp_path, tokens, capsys, schedule):
    more = ["--schedule", schedule]
    assert train_pythia.main(flags(tmp_path, tokens, "a", *more)) == 0
    argv = arguments("--resume auto --device cpu --name a --out", tmp_path / "runs")
    capsys.readouterr()
    assert train_pythia.main(argv) == 0
    said = capsys.readouterr().out.splitlines()[-1]
    longer = train_pythia.main([*argv, "--steps", "8"])
    error = capsys.readouterr().err
    if schedule == "constant":
        assert said.endswith("--steps N") and longer == 0 and len(lines_of(tmp_path, "a")) == 8
    else:
        assert f"--init {tmp_path / 'runs' / 'a'}" in said and longer == 1
        assert f"--steps is 8, but the run has 6, where its {schedule} schedule ends" in error
        assert f"--init {tmp_path / 'runs' / 'a'}" in error
