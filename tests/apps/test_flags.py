"""Flags of apps/train_pythia.py, the model that they make, and the advice of a run that stops by
itself; refusals, in one line that says why, before a folder is made or changed."""

import json
import re
import shlex
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import generate
import numpy as np
import pytest
import train_pythia
from harness import naming
from small_runs import (
    CPU,
    arguments,
    checkpoint_of,
    contents,
    flags,
    lines_of,
    numbers_of,
    run_until,
    without,
)

import needle as ndl
from needle.checkpoint import Checkpoint
from needle.data import train_tokenizer
from needle.data.__main__ import main as data_main
from needle.distributed.data_parallel import DataParallel
from needle.distributed.environment import Place
from needle.distributed.group import ALONE
from needle.models import gpt_neox
from needle.training import evaluate
from needle.training import folder as folders
from needle.training import run as run_parts
from needle.training import session as sessions
from needle.training.replay import bank, verify
from needle.training.settings import FIELDS, Settings, complete, located, option, parse

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


def test_a_run_sends_gradients_early_where_no_graph_replays_them(tmp_path, tokens, monkeypatch):
    sent = []
    early = lambda parallel: sent.append(parallel.sends_early)
    monkeypatch.setattr(DataParallel, "send_early", early)
    monkeypatch.setattr("needle.training.session.GraphedStep", lambda compute, *_: compute)
    for is_recorded in False, True:
        sent.clear()
        recorded = lambda *_, answer=is_recorded: answer
        monkeypatch.setattr("needle.training.session.worth_recording", recorded)
        argv = flags(tmp_path, tokens, str(is_recorded), "--grad-accum 3", steps=2)
        assert train_pythia.main(argv) == 0 and sent == [not is_recorded] * 6


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
        ("runs/a", "--supervise --hang-seconds 1234567.5"),
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


# ---- a new run --------------------------------------------------------------------------------


def test_bad_flag_names_allowed_values(tmp_path, tokens, monkeypatch, refused):
    monkeypatch.chdir(tmp_path)
    new = f"--data {tokens} --device cpu"
    for words, said in (
        ("--steps 0", "a whole number of 1 or more, not '0'"),
        ("--batch-size two", "a whole number of 1 or more, not 'two'"),
        ("--steps 1" + "0" * 400, "a whole number of at most 9223372036854775807, not"),
        ("--lr nan", "a number above 0, not 'nan'"),
        ("--st\x1b[31m 4", "unrecognized arguments: --st\\x1b[31m 4"),
        ("--clip inf", "a number of 0 or more, not 'inf'"),
        ("--decay-share 1.5", "a number of at most 1, not '1.5'"),
        ("--seed 4294967296", "a whole number of at most 4294967295, not '4294967296'"),
        ("--data caf\udce9.txt", "--data: b'caf\\xe9.txt' is a name that is not UTF-8"),
        ("--dtype float8", "'float32', 'bfloat16'"),
        ("--model gpt", "pythia-70m"),
        ("--stepps 4", "unrecognized arguments: --stepps 4; there is --steps"),
        ("--device tpu", "auto, cpu, cuda or cuda:INDEX, not 'tpu'"),
        *((f"--name {name}", "a name for a folder") for name in ("a/b", ".a", "..")),
        ("--steps 2 --tokens 9", "not allowed with"),
        ("--keep 1,x", "'x' is no whole"),
        *((f"{flag}=", f"argument {flag}: an empty name ('')") for flag in ("--data", "--resume")),
        # With nothing to resume, auto begins a new run.
        (f"{new} --window 70 --resume auto", "argument --window: needs --sparse"),
        (f"{new} --keep-optimizer --recipe pythia", "argument --keep-optimizer: needs --keep"),
        (f"{new} --decay-share 0.5", "argument --decay-share: needs --schedule wsd"),
        (f"{new} --end-of-text e", "argument --end-of-text: needs --tokenizer"),
        (f"{new} --graph --context-parallel 2", "argument --graph: not allowed with argument --co"),
    ):
        refused(train_pythia.main, words.split(), said, 2)
    assert not (tmp_path / "runs").exists()
    said = "argument --top-p: must be a number of at most 1, not '7'\n"
    refused(generate.main, ["nowhere", "--top-p=7"], said, 2)


def test_what_cannot_be_followed_is_one_error(
    tmp_path, texts, tokens, refused, capsys, monkeypatch
):
    """Before text is tokenised."""
    small = tmp_path / "small.json"
    train_tokenizer(iter(["return " * 9]), 262).save(str(small))
    wrong, long = tmp_path / "wrong.toml", "a" * 300
    wrong.write_text("hidden_size = 16\nnum_layer = 3\n")
    (short := tmp_path / "short.toml").write_text("num_heads = 2\nmax_seq_len = 8\n")
    assert train_pythia.main(flags(tmp_path, tokens, "init", steps=1)) == 0
    capsys.readouterr()
    init = f"--init {tmp_path / 'runs' / 'init'}"
    why = ndl.cuda(63).reason()  # no machine has this many GPUs
    for data, more, said in (
        (texts, "--heads 3", "hidden_size 32 is not a multiple of num_heads 3"),
        (texts, f"--config {wrong}", "PythiaConfig: unknown fields num_layer; there are vocab_si"),
        (texts, f"--config {short}", "--seq-len 16: the model of --config reads 8 at most"),
        (texts, f"{init} --seq-len 17", "--seq-len 17: .* reads 16 at most"),
        (texts, init, "no tokenizer.json lies with it, and the data is text: give --t"),
        (tokens, f"{init} --layers 2", "its weights say what --layers would change"),
        (tokens, f"{init} --model pythia-14m", "its weights say what --model pythia-14m would"),
        (tokens, f"{init} --sparse local", "its weights say what --sparse would"),
        (tokens, f"--init {texts}", "neither a run of needle"),
        (tokens, f"--init {tmp_path / long}", "File name too long"),
        (tokens, f"--name {long}", "File name too long"),
        (tokens, "--fp8 --vocab-size 65", "vocabulary 65 must be a multiple of 16, such as 80"),
        (tokens, "--fp8 --hidden 1056 --no-mlp", "width 1056 is more than 1024, and no layer tak"),
        (tokens, "--fp8 --seq-len 12", "--seq-len 12, the tokens of a rank's micro-batch, must be"),
        (tokens, "--context-parallel 2", "1 cannot be cut into such groups"),
        (tokens, "--warmup 7", "--warmup 7: the run has 6 steps, and its warmup must be 0 to 6 of"),
        (tokens, "--schedule wsd --warmup 6", "--warmup 6: with 1 steps of decay .* the run's 6"),
        (tokens, "--recipe pythia --batch-size 3", "--batch-size 3 cannot make the 1,024 sequenc"),
        (tokens, "--device cuda:63", re.escape(f"needle train: device cuda:63: {why}\n")),
    ):
        argv = flags(tmp_path, data, "a", more)
        argv = without(argv, "--model") if {"--config", "--init"} & {*argv} else argv
        argv += ["--model", "pythia-14m"] * ("14m" in more)
        with naming(more), monkeypatch.context() as patch:
            patch.setattr(train_pythia, "run_data", None)
            assert train_pythia.main(argv) == 1
            out, error = capsys.readouterr()
            assert re.search(said, error) and out == "" and error.count("\n") == 1
    for ranks, settings, said in (
        (3, {"grad_accum": 4}, "3 ranks cannot share a step of 4 micro-batches"),
        (2, {"context_parallel": 2, "seq_len": 18}, "18 tokens cannot be shared by 2 ranks"),
        (2, {"context_parallel": 2, "seq_len": 16, "batch_size": 1, "fp8": True},
         "--seq-len 16 / --context-parallel 2, the tokens of a rank's micro-batch, must be"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=said):
            complete(Settings(**settings), False, ranks)
    (tmp_path / "short.txt").write_text("import os\n")
    (tmp_path / "folder").mkdir()
    np.save(tmp_path / "float.npy", np.zeros(99))
    np.save(tmp_path / "large.npy", np.full(430, 5000, np.int32))
    for name, said, *more in (
        ("folder", "or an empty one"),
        ("short.txt", f"needle train: {tmp_path}/short.txt: text, 1 documents, "),
        ("float.npy", "one axis of integers"),
        ("large.npy", "outside the vocabulary of 64"),
        ("texts", "--vocab-size 256: the tokenizer has 257 tokens", "--vocab-size 256"),
        ("texts", "vocabulary is 64, but the tokenizer has 262", f"{init} --tokenizer {small}"),
        ("texts", "not a tokenizer.json", "--tokenizer", texts / "00.txt"),
        (tokens, "--end-of-text: is for a tokenizer that is given", f"{init} --end-of-text e"),
    ):
        argv = flags(tmp_path, tmp_path / name, "a", *more)
        argv = without(argv, "--model") if "--init" in argv else argv
        error = refused(train_pythia.main, argv, said)
        assert "saved" not in error and "--resume" not in error, name
        shutil.rmtree(tmp_path / "runs" / "a", ignore_errors=True)  # of ids that a batch shows


def test_what_a_model_or_its_ranks_cannot_do_is_named(monkeypatch):
    model = SimpleNamespace(recompute=None, shares=False)
    plain = SimpleNamespace(meta_model=lambda device: model)
    for given, said in (
        ({"recompute": True}, "--recompute: a SimpleNamespace cannot compute layers again"),
        ({"context_parallel": 2}, "--context-parallel: sequences of a SimpleNamespace cannot be"),
        ({"graph": True}, r"--graph: cpu\(\) records no graphs: leave it out"),
    ):
        with pytest.raises(ValueError, match=said):
            train_pythia.check(complete(Settings(**given), False, 2), plain, ndl.cpu())
    model.shares, given = True, complete(Settings(graph=True, context_parallel=2), False, 2)
    with pytest.raises(ValueError, match="--graph: not together with --context-parallel"):
        train_pythia.check(given, plain, ndl.cpu())
    given = complete(Settings(sparse="local", seq_len=192, context_parallel=2), False, 2)
    with pytest.raises(ValueError, match="--seq-len 192: with blocks of 64 .* multiple of 256"):
        train_pythia.check(given, run_parts.model_config(given), ndl.cpu())
    rank = Place(1, 2, 1, 2, "mpirun")
    with pytest.raises(ValueError, match="of its own: .*, needle supervise -- mpirun"):
        train_pythia.join(parse(["--supervise"]), [], rank, Path("train.py"))
    monkeypatch.setattr(sessions, "visible_gpus", lambda: 4)
    for words, place, said in (
        ("--gpus 5", None, "--gpus 5: 4 can be used here: give a smaller number"),
        ("--gpus 2 --device cpu", None, "--gpus 2: with --device cpu there is nothing to share"),
        ("--gpus 2 --device cuda:1", None, "--gpus 2: with --device cuda:1 there is nothing to"),
        ("--gpus 2", rank, "--gpus 2: mpirun has started this process as rank 1 of 2: leave"),
    ):
        with pytest.raises(ValueError, match=said):
            train_pythia.starts_ranks(parse(words.split()), place)


# ---- and of a run that goes on ------------------------------------------------------------------


@pytest.fixture
def stopped(tmp_path, tokens, monkeypatch):
    """The folders of a run that has saved steps 2 and 4 of 6, and of one that saved nothing."""
    run_until(monkeypatch, 5, flags(tmp_path, tokens, "saved"))
    run_until(monkeypatch, 2, flags(tmp_path, tokens, "begun", "--save-every 5"))
    return tmp_path / "runs" / "saved", tmp_path / "runs" / "begun"


def test_run_goes_on_with_its_own_settings_and_data_alone(tmp_path, tokens, stopped, refused):
    """It is left as it is; the flags that it has may be repeated."""
    other, alone = tmp_path / "other.npy", tmp_path / "elsewhere" / "kept.safetensors"
    np.save(other, np.load(tokens) + 1)
    alone.parent.mkdir()
    shutil.copy(checkpoint_of(tmp_path, "saved", 4), alone)
    before = contents(tmp_path)
    for folder in stopped:
        auto = arguments("--resume auto --device cpu --name", folder.name, "--out", folder.parent)
        for more, said in (
            ("--lr 0.5 --seed 8", "--lr is 0.5, but the run has 0.003; --seed is 8, but the run h"),
            ("--hidden 16 --layers 1", "--hidden is 16, but the run has 32"),
            ("--no-mlp", "--no-mlp is "),
            ("--init-seed 3", "--init-seed is 3"),
            ("--fp8", "--fp8 is True, but the run is without it"),
            ("--steps 9", "--steps is 9, but the run has 6"),
            ("--global-batch-size 16", "--global-batch-size is 16, but the run has 2"),
            ("--recipe pythia", "--recipe is pythia"),
            ("--end-of-text e", "--end-of-text is e"),
            (f"--data {other}", "not the tokens that the run read before"),
        ):
            refused(train_pythia.main, [*auto, *more.split()], said)
            assert contents(tmp_path) == before, more
        refused(train_pythia.main, [*auto, "--keep-optimizer"], "needs --keep", 2)
    saved = checkpoint_of(tmp_path, "saved", 2)
    for path, said, *more in (
        (alone, f"a new run starts from its weights: --init {alone}"),
        *((path, str(path)) for path in (tokens, tmp_path / "missing", tmp_path)),
        *((path, "own folder, not under --name b;", "--name=b") for path in (saved, stopped[0])),
    ):
        refused(train_pythia.main, ["--resume", path, *more, *CPU], said)
        assert contents(tmp_path) == before
    for folder in stopped:
        argv = without(flags(tmp_path, tokens, folder.name, "--resume auto"), "--steps")
        said = "--steps is 7, but the run has 6, where its cosine"
        refused(train_pythia.main, [*argv, "--tokens", "193"], said)
        argv = argv if folder.name == "saved" else without(argv, "--save-every")
        seed = folders.read_description(folder)["settings"]["seed"]
        more = f"--seed {seed} --init-seed {seed} --data-seed {seed} --hidden 32 --tokens 192"
        assert train_pythia.main([*argv, *more.split()]) == 0


def test_paths_of_a_run_stay_when_it_goes_on_elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    kept = located(parse("--init a --data b/../c --tokenizer d".split()))
    assert (kept.init, kept.data, kept.tokenizer) == tuple(str(tmp_path / name) for name in "acd")


def test_checkpoint_of_another_program_is_named(tmp_path, stopped, refused):
    path = checkpoint_of(tmp_path, "saved", 4)
    model, optimizer, epoch, loss = Checkpoint(path).restore()
    extra = ("settings", "step", "data", "fingerprint")
    kept = {key: Checkpoint(path).state[key] for key in extra}
    for state, said in (
        ({"settings": 3}, "it has no settings"),
        ({"settings": {"model": "tiny"}}, "batch_size is missing, clip is missing"),
        ({"settings": {**kept["settings"], "colour": "red"}}, "colour is unknown"),
    ):
        ndl.save_checkpoint(model, optimizer, epoch, loss, path, **kept | state)
        error = refused(train_pythia.main, ["--resume", path, *CPU], said)
        assert str(path) in error and error.count("\n") == 1


def test_damaged_config_is_named_by_what_reads_it(tmp_path, tokens, stopped, refused):
    """A run with a checkpoint goes on without it."""
    whole = folders.read_description(stopped[0])
    saved, begun = stopped
    auto = arguments("--resume auto --device cpu --out", saved.parent, "--name")
    (begun / "config.json").write_text(json.dumps({**whole, "saved": False, "data": []}))
    refused(train_pythia.main, [*auto, "begun"], "begun/config.json: not of a run")
    for folder in stopped:
        (folder / "config.json").write_text("{")
    for main, words in (
        (train_pythia.main, [*auto, "begun"]),
        (train_pythia.main, flags(tmp_path, tokens, "begun")),
        (data_main, ["view", begun, "--step", "1"]),
        (evaluate.main, [begun, "--data", tokens, "--device", "cpu"]),
    ):
        refused(main, words, f": {begun}")
    assert train_pythia.main([*auto, "saved"]) == 0
    assert len(numbers_of(tmp_path, "saved")) == 6
    view, replay = ["view", str(saved), "--step", "1"], [str(saved), "--from", "2", "--dry-run"]
    for told in {"model_type": "gpt_neox"}, {**whole, "settings": {}}, {**whole, "data": {}}:
        (saved / "config.json").write_text(json.dumps(told))
        for main, words in (data_main, view), (bank.main, replay), (verify.main, [str(saved)]):
            refused(main, words, f"{saved}/config.json: ")
