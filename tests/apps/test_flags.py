"""Flags of apps/train_pythia.py, the model that they make, refusals, and the advice of a run that
stops by itself."""

import json
import re
import shlex
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import train_pythia
from small_runs import checkpoint_of, flags, lines_of, without

import needle as ndl
from needle.distributed.environment import Place
from needle.distributed.group import ALONE
from needle.models import gpt_neox
from needle.training import run as run_parts
from needle.training.settings import FIELDS, complete, located, option, parse

# ---- flags ------------------------------------------------------------------------------------


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


def test_shape_flags_and_files_make_the_model(tmp_path, tokens, capsys):
    toml, ours, theirs = (tmp_path / name for name in ("c.toml", "c.json", "config.json"))
    toml.write_text("hidden_size = 16\nnum_layers = 3\nnum_heads = 1\nvocab_size = 60\n")
    fields = {"model": "pythia", "hidden_size": 16, "tie_word_embeddings": True}
    ours.write_text(json.dumps(fields | {"num_heads": 2, "vocab_size": 60, "max_seq_len": 16}))
    config = ndl.PythiaConfig(vocab_size=62, hidden_size=32, num_layers=2, num_heads=4)
    theirs.write_text(json.dumps(gpt_neox.config_to_hf(config)))
    given = "--layers 1 --hidden 48 --heads 3 --vocab-size 61 --no-mlp"
    for name, more, shape in (
        ("flags", given, (1, 48, 3, 61, True)),
        ("preset", "--layers 3", (3, 32, 2, 64, False)),
        ("toml", f"--config {toml} --heads 2", (3, 16, 2, 60, False)),
        ("json", f"--config {ours}", (6, 16, 2, 60, False)),
        ("hf", f"--config {theirs}", (2, 32, 4, 62, False)),
        ("run", f"--config {tmp_path / 'runs' / 'flags' / 'config.json'}", (1, 48, 3, 61, True)),
    ):
        argv = flags(tmp_path, tokens, name, more, steps=1)
        assert train_pythia.main(without(argv, "--model") if "--config" in more else argv) == 0
        c = ndl.open_run(tmp_path / "runs" / name).config
        own = c.num_layers, c.hidden_size, c.num_heads, c.vocab_size, c.attention_only
        assert own == shape and c.tie_word_embeddings == (name == "json"), name
    shown = [line for line in capsys.readouterr().out.split("\n") if "Pythia(" in line]
    assert shown and max(map(len, shown)) <= 80
    dense = parse(f"{more} --sparse local".split())
    assert run_parts.model_config(complete(located(dense), False)).sparse_window == 64
    with pytest.raises(SystemExit, match="2"):
        train_pythia.main(flags(tmp_path, tokens, "wrong", f"--config {ours}"))


def test_seeds_of_weights_and_of_data_are_apart(tmp_path, tokens):
    def first(name, more):
        """The weights of step 1 after a step with no rate, and the batches of the run."""
        assert train_pythia.main(flags(tmp_path, tokens, name, more, "--warmup 0", steps=1)) == 0
        run = ndl.open_run(tmp_path / "runs" / name)
        _, batches, _ = ndl.data.open_run_data(run.folder)
        return run.metrics["loss"][0], batches.next()[0].tolist()

    plain, same = first("a", "--seed 0"), first("b", "--seed 9 --init-seed 0 --data-seed 0")
    assert plain == same
    weights, data = first("c", "--seed 0 --init-seed 6"), first("d", "--seed 0 --data-seed 6")
    assert weights[1] == plain[1] and weights[0] != plain[0]
    assert data[1] != plain[1] and data[0] != plain[0]


# ---- the command that goes on -----------------------------------------------------------------


def run_of(folder, words="", place=ALONE):
    """A run of this command line, in so far as its command needs it."""
    parallel = SimpleNamespace(group=SimpleNamespace(place=place))
    return SimpleNamespace(
        settings=parse(shlex.split(words)), parallel=parallel, folder=Path(folder), replay=None
    )


def test_command_that_goes_on_has_the_flags_that_no_checkpoint_holds(monkeypatch, tmp_path):
    """It is read as it is meant, also where a value looks like a flag."""
    monkeypatch.setattr(sys, "executable", str(tmp_path / "my python"))  # no command beside it
    begins = [sys.executable, "-m", "needle", "train", "--resume", "auto", "--name"]
    own = tmp_path / "own.py"
    own.touch()
    for folder, more in (
        ("runs/a", ""),
        ("more runs/b c", "--out 'more runs'"),
        ("/runs/a", "--out /runs --tensorboard --wandb 'p q'"),
        ("runs/a", f"--device cuda:1 --no-graph --recompute --import {own}"),
        ("runs/a", "--supervise --hang-seconds 7.5"),
    ):
        run = run_of(folder, more)
        monkeypatch.setattr(run_parts, "supervised", lambda run=run: run.settings.supervise)
        wanted = [*begins, Path(folder).name, *shlex.split(more)]
        assert shlex.split(run_parts.resume_command(run)) == wanted
    for folder in "-out/-y", "runs/--name", "a/-b/c", "-out/.old":
        run = run_of(folder, "--wandb=-project --schedule cosine")
        args = parse(shlex.split(run_parts.resume_command(run))[4:])
        named = args.resume if args.name is None else f"{args.out}/{args.name}"
        assert (named, args.wandb) == (folder, "-project")
        assert f"--init={folder}" in run_parts.advice_to_go_on(run) or folder[0] != "-"


def test_command_that_goes_on_starts_as_many_ranks(monkeypatch):
    monkeypatch.setattr(run_parts, "command_line", lambda word: ["needle", word])
    train, own = "needle train --resume auto --name a", "--supervise --hang-seconds 7.5"
    for launcher, plain, watched in (
        ("needle", f"{train} --gpus 4", f"{train} --gpus 4 {own}"),
        ("mpirun", f"mpirun -n 4 {train}", f"needle supervise -- mpirun -n 4 {train}"),
        ("torchrun", f"torchrun {train}", f"needle supervise -- torchrun {train}"),
    ):
        run = run_of("runs/a", "--hang-seconds 7.5", Place(0, 4, 0, 4, launcher))
        for supervised, wanted in (False, plain), (True, watched):
            monkeypatch.setattr(run_parts, "supervised", lambda is_so=supervised: is_so)
            assert run_parts.resume_command(run) == wanted


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
    good = checkpoint_of(tmp_path, "a", 2)
    assert f"the last good checkpoint is {good}: 2 finite steps followed\n" in error
    assert f"--init {good}\n" in error
    # The loss of the last checkpoint's own step is finite: the update after it diverged.
    argv = flags(tmp_path, tokens, "c", "--lr 1e30 --warmup 0 --clip 0 --save-every 1")
    assert train_pythia.main(argv) == 1
    error = capsys.readouterr().err
    last = checkpoint_of(tmp_path, "c", len(lines_of(tmp_path, "c")))
    assert last.exists() and "Stopped." in error and str(last) not in error
