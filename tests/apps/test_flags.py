"""Flags of apps/train_pythia.py, the model that they make, refusals, and the advice of a run that
stops by itself."""

import json
import re
import shlex
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import generate
import numpy as np
import pytest
import train_pythia
from harness import naming
from small_runs import checkpoint_of, flags, lines_of, numbers_of, tensors_of, without

import needle as ndl
from needle.checkpoint import Checkpoint, list_checkpoints, step_of
from needle.data import train_tokenizer
from needle.distributed.group import Group
from needle.models import gpt_neox
from needle.training import evaluate
from needle.training import log as logs
from needle.training import run as run_parts
from needle.training.settings import FIELDS, Settings, complete, option, parse, read_config

# ---- flags ------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:Pythia. sparse_window")
def test_bad_flag_names_allowed_values(tmp_path, tokens, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    cases = [
        ("--steps 0", "a whole number of 1 or more, not '0'"),
        ("--batch-size two", "a whole number of 1 or more, not 'two'"),
        ("--lr -1", "a number above 0, not '-1'"),
        ("--lr nan", "a number above 0, not 'nan'"),
        ("--clip inf", "a number of 0 or more, not 'inf'"),
        ("--seed 4294967296", "argument --seed: must be a whole number from 0 to 4294967295"),
        ("--steps 1" + "0" * 400, "must be a whole number from 1 to 9223372036854775807"),
        ("--data caf\udce9.txt", "--data: b'caf\\xe9.txt' is a name that is not UTF-8"),
        ("--dtype float8", "'float32', 'bfloat16'"),
        ("--model gpt", "pythia-70m"),
        ("--device tpu", "auto, cpu, cuda or cuda:INDEX, not 'tpu'"),
        ("--device cuda:" + "1" * 31, "auto, cpu, cuda or cuda:INDEX, not 'cuda:1"),
        ("--name a/b", "a name for a folder"),
        ("--steps 2 --tokens 9", "not allowed with"),
        ("--keep 1,x", "'x' is no whole"),
    ]
    for flag in "--data", "--tokenizer", "--init", "--out", "--resume":
        cases.append((f"{flag}=", f"argument {flag}: an empty name ('')"))
    # With nothing to resume, auto begins a new run, whose --window needs --sparse.
    new = ["--data", str(tokens), "--device", "cpu"]
    for more in [], ["--recipe", "pythia"], ["--resume", "auto"]:
        cases.append(([*new, "--window", "70", *more], "argument --window: needs --sparse"))
        cases.append(([*new, "--keep-optimizer", *more], "argument --keep-optimizer: needs --keep"))
    for words, said in cases:
        with naming(words):
            with pytest.raises(SystemExit) as caught:
                train_pythia.main(words.split() if isinstance(words, str) else words)
            assert caught.value.code == 2
            assert said in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()
    argv = flags(tmp_path, tokens, "a", "--window 70")
    assert train_pythia.main([*argv, "--sparse", "local"]) == 0
    assert train_pythia.main([*argv, "--resume", "auto"]) == 0  # the checkpoint has --sparse
    for text in ["7", "0", "nan", "x"]:
        with pytest.raises(SystemExit, match="2"):
            generate.main(["nowhere", f"--top-p={text}"])
        said = f"argument --top-p: must be a number above 0 and at most 1, not {text!r}\n"
        assert capsys.readouterr().err.endswith(said)


def test_what_cannot_be_followed_is_one_error(tmp_path, texts, tokens, capsys, monkeypatch):
    """Before text is tokenised, and before a folder is made."""
    small, config = tmp_path / "small.json", tmp_path / "c.json"
    train_tokenizer(iter(["return " * 9]), 262).save(str(small))
    config.write_text('{"max_seq_len": 8}')
    wrong, listed, long = tmp_path / "wrong.toml", tmp_path / "listed.json", "a" * 300
    wrong.write_text("hidden_size = 16\nnum_layer = 3\n")
    listed.write_text('{"model": {"hidden_size": 8}, "settings": {"model": "3"}}')
    assert train_pythia.main(flags(tmp_path, tokens, "init", steps=1)) == 0
    capsys.readouterr()
    monkeypatch.setattr(train_pythia, "run_data", None)
    init = tmp_path / "runs" / "init"
    why = ndl.cuda(63).reason()  # no machine has this many GPUs
    for data, more, said in (
        (texts, "--heads 3", "hidden_size 32 is not a multiple of num_heads 3"),
        (texts, "--hidden 608 --heads 2", "--heads: 304 dimensions a head, but .* 256"),
        (texts, "--hidden 24 --heads 2", "rotates 3 of 12 dimensions"),
        (texts, f"--config {config}", "max_seq_len of --config is 8"),
        (texts, f"--config {wrong}", "PythiaConfig: unknown fields num_layer; there are vocab_si"),
        (texts, f"--config {listed}", "listed.json: no model '3' is registered"),
        (texts, "--vocab-size 256", "--vocab-size 256: the tokenizer has 257 tokens"),
        (texts, f"--vocab-size 261 --tokenizer {small}", "the tokenizer has 262 tokens"),
        (tokens, f"--vocab-size 261 --tokenizer {small}", "the tokenizer has 262 tokens"),
        (texts, f"--init {init} --tokenizer {small}", "vocabulary is 64, but .* has 262 tokens"),
        (texts, f"--init {init} --seq-len 17", "--seq-len 17: it reads 16 at most"),
        (texts, f"--init {init}", "no tokenizer.json lies with it, and the data is text: give --t"),
        (tokens, f"--init {init} --layers 2", "--layers: its shape is what its weights have"),
        (tokens, f"--init {init} --model pythia-14m", "--model pythia-14m: its weights are of a t"),
        (tokens, f"--init {init} --sparse local", "--sparse local: its attention is what it was"),
        (tokens, "--init nowhere", "nowhere: no such file or folder"),
        (tokens, f"--init {texts}", "neither a run of needle"),
        (tokens, "--fp8 --vocab-size 63", "vocabulary 63 must be a multiple of 16"),
        (tokens, "--fp8 --hidden 24 --heads 3", "width 24 must be a multiple of 16"),
        (tokens, "--fp8 --seq-len 12", "--seq-len 12, the tokens of a rank's micro-batch, must be"),
        (tokens, "--graph", "--graph: cpu.. records no graphs"),
        (tokens, "--context-parallel 2", "1 cannot be cut into such groups"),
        (tokens, "--warmup 7", "--warmup 7: the run has 6 steps, and its warmup must be 0 to 6 of"),
        (tokens, "--device cuda:63", re.escape(f"needle train: device cuda:63: {why}\n")),
        *(
            (tokens, f"{flag} {tmp_path / long}", "File name too long")
            for flag in ("--init", "--resume")
        ),
        (tokens, f"--name {long}", "File name too long"),
    ):
        argv = flags(tmp_path, data, "a", more)
        argv = without(argv, "--model") if {"--config", "--init"} & {*argv} else argv
        argv += ["--model", "pythia-14m"] * ("14m" in more)
        with naming(more):
            assert train_pythia.main(argv) == 1
            out, error = capsys.readouterr()
            assert re.search(said, error) and out == "" and error.count("\n") == 1
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["init"]
    with monkeypatch.context() as patch:
        patch.setattr(ndl.Pythia, "recompute", None)
        assert train_pythia.main(flags(tmp_path, tokens, "b", "--recompute")) == 1
        assert "--recompute: a Pythia cannot compute layers again" in capsys.readouterr().err
    assert generate.main([str(init), "--device", "cuda:63"]) == 1
    assert capsys.readouterr() == ("", f"needle generate: device cuda:63: {why}\n")
    for ranks, settings, said in (
        (3, {"grad_accum": 4}, "3 ranks cannot share a step of 4 micro-batches"),
        (2, {"context_parallel": 2, "seq_len": 18}, "18 tokens cannot be shared by 2 ranks"),
    ):
        with pytest.raises(ValueError, match=said):
            complete(Settings(**settings), False, ranks)
    constant = Settings(schedule="constant", warmup=7, steps=6)
    assert complete(constant, on_gpu=False).warmup == 7


def test_help_is_a_screen_of_flags_and_help_all_has_every_one_with_defaults(capsys):
    shown = {}
    for words in ["--help"], ["-h"], ["--help", "all"]:
        with pytest.raises(SystemExit, match="0"):
            train_pythia.main(words)
        shown[words[-1]] = capsys.readouterr().out
    screen, every = shown["--help"], shown["all"]
    assert shown["-h"] == screen
    assert len(screen.splitlines()) <= 48 and max(map(len, screen.splitlines())) <= 80
    common = set(re.findall(r"--[a-z][a-z0-9-]*", screen))
    assert {"--help", "--model", "--data", "--steps", "--resume", "--layers", "--keep"} <= common
    assert all(f"\n  {flag} " in every or flag == "--help" for flag in common)
    for name in FIELDS:
        assert re.search(rf"\n  {option(name)}[ ,\n]", every), name
    for topic in "model", "data", "training", "output":
        assert f"\n{topic}:\n" in screen and f"\n{topic}:\n" in every
    assert every.count("(default") >= 20 and "sequences a micro-batch (default: tiny 16" in every


# ---- shapes and seeds -------------------------------------------------------------------------


def test_shape_flags_and_files_make_the_model_and_resume(tmp_path, tokens, capsys):
    given = "--layers 1 --hidden 48 --heads 3 --vocab-size 61 --no-mlp"
    toml, ours, theirs = (tmp_path / name for name in ("c.toml", "c.json", "config.json"))
    toml.write_text("hidden_size = 16\nnum_layers = 3\nnum_heads = 1\nvocab_size = 60\n")
    fields = {"model": "pythia", "hidden_size": 16, "tie_word_embeddings": True}
    ours.write_text(json.dumps(fields | {"num_heads": 2, "vocab_size": 60, "max_seq_len": 16}))
    config = ndl.PythiaConfig(vocab_size=62, hidden_size=32, num_layers=2, num_heads=4)
    theirs.write_text(json.dumps(gpt_neox.config_to_hf(config)))
    for name, more, shape in (
        ("flags", given, (1, 48, 3, 61, True)),
        ("preset", "--layers 3", (3, 32, 2, 64, False)),
        ("toml", f"--config {toml} --heads 2", (3, 16, 2, 60, False)),
        ("json", f"--config {ours}", (6, 16, 2, 60, False)),
        ("hf", f"--config {theirs}", (2, 32, 4, 62, False)),
    ):
        argv = flags(tmp_path, tokens, name, more)
        argv = without(argv, "--model") if "--config" in more else argv
        with naming(name):
            assert train_pythia.main(argv) == 0
            run = ndl.open_run(tmp_path / "runs" / name)
            c = run.config
            own = c.num_layers, c.hidden_size, c.num_heads, c.vocab_size, c.attention_only
            assert own == shape and c.tie_word_embeddings == (name == "json")
            end = checkpoint_of(tmp_path, name, 6)
            whole, numbers = tensors_of(end), numbers_of(tmp_path, name)
            end.unlink()
            again = ["--resume", str(run.folder), "--device", "cpu", *more.split()]
            assert train_pythia.main(again) == 0
            assert (numbers_of(tmp_path, name), tensors_of(end)) == (numbers, whole)
        made = run.folder / "config.json"
        wanted = {"model": "pythia", **json.loads(made.read_text())["model"]}
        assert read_config(str(made)) == wanted
    shown = [line for line in capsys.readouterr().out.split("\n") if "Pythia(" in line]
    assert shown and max(map(len, shown)) <= 80
    folder = str(tmp_path / "runs" / "preset")
    repeated = "--hidden 32 --heads 2 --vocab-size 64"  # which the preset gave
    assert train_pythia.main(["--resume", folder, "--device", "cpu", *repeated.split()]) == 0
    for more in ("--layers 2", "--hidden 16", "--no-mlp", f"--config {toml}", "--init-seed 3"):
        with naming(more):
            assert train_pythia.main(["--resume", folder, *more.split()]) == 1
            assert f"{more.split()[0]} is " in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        train_pythia.main(flags(tmp_path, tokens, "wrong", f"--config {ours}"))


def test_seeds_of_weights_and_of_data_are_apart(tmp_path, tokens):
    def first(name, more):
        """The weights of step 1 after a step with no rate, and the batches of the run."""
        assert train_pythia.main(flags(tmp_path, tokens, name, more, "--warmup 0", steps=1)) == 0
        run = ndl.open_run(tmp_path / "runs" / name)
        _, batches, _ = ndl.data.open_run_data(run.folder)
        return run.metrics["loss"][0], batches.next()[0].tolist()

    plain, same = first("a", "--seed 5"), first("b", "--seed 9 --init-seed 5 --data-seed 5")
    assert plain == same
    weights, data = first("c", "--seed 5 --init-seed 6"), first("d", "--seed 5 --data-seed 6")
    assert weights[1] == plain[1] and weights[0] != plain[0]
    assert data[1] != plain[1] and data[0] != plain[0]


# ---- data and folders -------------------------------------------------------------------------


@pytest.mark.usefixtures("plots")
def test_data_that_cannot_be_used_and_a_user_without_a_home(tmp_path, texts, monkeypatch, capsys):
    """HOME=~ is what Python gives for a user whom /etc/passwd lacks."""
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "folder").mkdir()
    np.save(tmp_path / "float.npy", np.zeros(99))
    np.save(tmp_path / "large.npy", np.full(430, 5000, np.int32))
    for name, said, *more in [
        ("empty.txt", "an empty file"),
        ("folder", "an empty folder"),
        ("float.npy", "one axis of integers"),
        ("large.npy", "outside the vocabulary of 64"),
        ("texts", "not a tokenizer.json", "--tokenizer", texts / "00.txt"),
    ]:
        assert train_pythia.main(flags(tmp_path, tmp_path / name, name, *more)) == 1
        assert said in capsys.readouterr().err, name
    argv = flags(tmp_path, texts, "a", steps=2)
    monkeypatch.setenv("HOME", "~")
    for name in "XDG_CONFIG_HOME", "XDG_CACHE_HOME":
        monkeypatch.delenv(name, raising=False)
    assert train_pythia.main(argv) == 0 and "plot: " in capsys.readouterr().out
    monkeypatch.delenv("NEEDLE_CACHE")
    run, more = str(tmp_path / "runs" / "a"), ["--data", str(texts), "--device", "cpu"]
    for main, words in (train_pythia.main, [*argv, "--name", "b"]), (evaluate.main, [run, *more]):
        assert main(words) == 1
        assert "no home; set NEEDLE_CACHE to a folder" in capsys.readouterr().err
    assert not (tmp_path / "runs" / "b").exists()


# ---- the command that goes on -----------------------------------------------------------------


def run_of(folder, words=""):
    """A run of one process and this command line, in so far as its command needs it."""
    parallel = SimpleNamespace(group=Group())
    return SimpleNamespace(
        settings=parse(shlex.split(words)), parallel=parallel, folder=Path(folder)
    )


def test_command_that_goes_on_has_the_flags_that_no_checkpoint_holds(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "argv", ["apps/train_pythia.py", "--steps", "5"])
    monkeypatch.setattr(sys, "executable", str(tmp_path / "my python"))  # no command beside it
    for folder, more in [
        ("runs/a", ""),
        ("runs/b c", ""),
        ("more runs/a", "--out 'more runs'"),
        ("/runs/a", "--out /runs --tensorboard --wandb 'p q'"),
        ("runs/a", "--device cuda:1 --no-graph --recompute"),
        ("runs/a", "--supervise --hang-seconds 7.5"),
    ]:
        run = run_of(folder, more)
        monkeypatch.setattr(run_parts, "supervised", lambda run=run: run.settings.supervise)
        name = shlex.quote(Path(folder).name)
        begins = f"{shlex.quote(sys.executable)} apps/train_pythia.py --resume auto --name {name}"
        assert run_parts.resume_command(run) == f"{begins} {more}".rstrip()
    monkeypatch.setattr(run_parts, "supervised", lambda: False)
    script = tmp_path / "needle"
    script.write_text("#!/bin/sh")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", "/usr/bin")
    words = shlex.split(run_parts.resume_command(run_of("runs/a")))
    assert words[:2] == [str(script), "train"]
    monkeypatch.setenv("PATH", str(tmp_path))
    assert run_parts.resume_command(run_of("runs/a")) == "needle train --resume auto --name a"
    # Where every value looks like a flag.
    run = run_of("-out/-y", "--wandb=-project --schedule cosine")
    args = parse(shlex.split(run_parts.resume_command(run))[2:])
    assert (args.out, args.name, args.wandb) == ("-out", "-y", "-project")
    (word,) = shlex.split(run_parts.longer(run))[-1:]
    assert parse([word]).init == "-out/-y"


# ---- losses that are not finite ---------------------------------------------------------------


def breaking(monkeypatch, at):
    """The loss of the micro-batch `at` is none."""
    forward_backward, calls = train_pythia.forward_backward, []

    def compute(*arguments):
        calls.append(arguments)
        return forward_backward(*arguments) * (float("nan") if len(calls) == at else 1.0)

    monkeypatch.setattr(train_pythia, "forward_backward", compute)


def test_loss_that_is_not_finite_names_the_good_checkpoint(tmp_path, tokens, capsys, monkeypatch):
    with monkeypatch.context() as patch:
        breaking(patch, 5)
        assert train_pythia.main(flags(tmp_path, tokens, "a")) == 1
    error = capsys.readouterr().err
    assert "step 5: the loss is nan (epoch 0, batch 4)" in error
    good, last = (checkpoint_of(tmp_path, "a", step) for step in (2, 4))
    assert f"the last good checkpoint is {good}: 2 finite steps followed\n" in error
    assert f"the last one is {last}: 0 finite steps followed, and it may have diverged\n" in error
    assert f"--init {good}\n" in error
    assert [line["step"] for line in lines_of(tmp_path, "a")] == [1, 2, 3, 4]
    assert Checkpoint(good).state["step"] == 2 and Checkpoint(last).state["step"] == 4
    with monkeypatch.context() as patch:
        breaking(patch, 4)  # 2 was saved, and 4 was to be
        assert train_pythia.main(flags(tmp_path, tokens, "b")) == 1
    error, last = capsys.readouterr().err, checkpoint_of(tmp_path, "b", 2)
    assert f"the last one is {last}: 1 finite steps" in error and "--init" not in error
    # The loss of the last checkpoint's own step is finite: the update after it diverged.
    argv = flags(tmp_path, tokens, "c", "--lr 1e30 --warmup 0 --clip 0 --save-every 1")
    assert train_pythia.main(argv) == 1
    error = capsys.readouterr().err
    last = checkpoint_of(tmp_path, "c", len(lines_of(tmp_path, "c")))
    assert "Stopped." in error and f"the last one is {last}: 0 finite" in error
    assert f"the last good checkpoint is {last}" not in error and f"--init {last}" not in error


def test_stops_shortly_after_each_other_keep_the_proven_checkpoint(tmp_path, tokens, monkeypatch):
    """A run that signals end after each step saves each; those of the last steps prove nothing."""
    queue, left = logs.RunLog.queue, []

    def stopped(*arguments):
        signal.raise_signal(signal.SIGTERM)
        queue(*arguments)

    monkeypatch.setattr(logs.RunLog, "queue", stopped)
    argv = flags(tmp_path, tokens, "a", "--save-every 3 --eval-every 0", steps=12)
    for step in range(1, 12):
        assert train_pythia.main([*argv, *["--resume", "auto"] * (step > 1)]) == 0
        folder = tmp_path / "runs" / "a" / "checkpoints"
        left.append([step_of(path) for path in list_checkpoints(folder)])
    assert left[:4] == [[1], [2, 1], [3, 2, 1], [4, 3, 2, 1]]
    for step, steps in enumerate(left[4:], 5):
        assert steps[:2] == [step, step - 1] and len(steps) <= 4
        assert any(step - 6 <= kept <= step - 3 for kept in steps)
