"""Training from weights: --init, and the advice of a finished run about going on."""

import shutil

import pytest
import train_pythia
from small_runs import arguments, checkpoint_of, flags, lines_of, numbers_of, run_until, without

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
            named = {"init": str(source)} | ({} if dtype is None else {"dtype": dtype})
            model, _ = weights.start(named, None, cpu())
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


def test_weights_that_do_not_fit_are_one_error(
    tmp_path, texts, tokens, trained, capsys, monkeypatch
):
    monkeypatch.chdir(texts)
    capsys.readouterr()
    for more, said in [
        (
            "--model pythia-14m",
            "--model pythia-14m: hidden_size is 32, not 128; --model pythia-14m: "
            "num_heads is 2, not 4; --model pythia-14m: num_layers is 2, not 6",
        ),
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
        said = capsys.readouterr().out.splitlines()[-1]
        longer = train_pythia.main([*argv, "--steps", "8"])
        error = capsys.readouterr().err
        if schedule == "constant":
            assert said.endswith("--steps N") and longer == 0
            assert len(lines_of(tmp_path, schedule)) == 8
        else:
            assert f"--init {folder}" in said and longer == 1
            assert f"--steps is 8, but the run has 6, where its {schedule} schedule ends" in error
            assert f"--init {folder}" in error
