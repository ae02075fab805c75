"""Runs of apps/train_pythia.py that stop by themselves: losses that are not finite, a lost GPU, and
flags, data and folders that are refused."""

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
from harness import ROOT, naming, run
from small_runs import SMALL, checkpoint_of, flags, lines_of, without

import needle as ndl
from needle.checkpoint import Checkpoint, list_checkpoints, step_of
from needle.distributed.group import Group
from needle.training import evaluate
from needle.training import log as logs
from needle.training import run as run_parts
from needle.training.settings import FIELDS, Settings, complete, option, parse

pytestmark = pytest.mark.slow

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
    assert f"the last good checkpoint is {good} (finite steps after it: 2)\n" in error
    assert f"the last one is {last}: it may have diverged\n" in error
    assert f"--init {good}\n" in error
    assert [line["step"] for line in lines_of(tmp_path, "a")] == [1, 2, 3, 4]
    assert Checkpoint(good).state["step"] == 2 and Checkpoint(last).state["step"] == 4
    with monkeypatch.context() as patch:
        breaking(patch, 4)  # 2 was saved, and 4 was to be
        assert train_pythia.main(flags(tmp_path, tokens, "b")) == 1
    error, last = capsys.readouterr().err, checkpoint_of(tmp_path, "b", 2)
    assert f"the last one is {last}: it may have diverged\n" in error and "--init" not in error
    # The loss of the last checkpoint's own step is finite: the update after it diverged.
    argv = flags(tmp_path, tokens, "c", "--lr 1e30 --warmup 0 --clip 0 --save-every 1")
    assert train_pythia.main(argv) == 1
    error = capsys.readouterr().err
    last = checkpoint_of(tmp_path, "c", len(lines_of(tmp_path, "c")))
    assert "Stopped." in error and f"the last one is {last}: it may" in error
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
        ("--seed -1", "argument --seed: must be a whole number from 0 to 4294967295"),
        (
            "--steps 1" + "0" * 400,
            "argument --steps: must be a whole number from 1 to 9223372036854775807",
        ),
        ("--data caf\udce9.txt", "--data: b'caf\\xe9.txt' is a name that is not UTF-8"),
        ("--dtype float8", "'float32', 'bfloat16'"),
        ("--model gpt", "pythia-70m"),
        ("--schedule steep", "cosine"),
        ("--sparse dotted", "mixed"),
        ("--device tpu", "auto, cpu, cuda or cuda:INDEX, not 'tpu'"),
        ("--device cuda:" + "1" * 31, "auto, cpu, cuda or cuda:INDEX, not 'cuda:1"),
        ("--name a/b", "a name for a folder"),
        ("--steps 2 --tokens 9", "not allowed with"),
        ("--supervise --hang-seconds 0", "argument --hang-seconds: must be a number above"),
    ]
    for flag in "--out", "--name", "--init":
        cases.append((f"{flag} caf\udce9", f"argument {flag}: b'caf\\xe9' is a name"))
    for flag in "--data", "--tokenizer", "--init", "--out", "--resume":
        cases.append((f"{flag}=", f"argument {flag}: an empty name ('')"))
    # With nothing to resume, auto begins a new run, whose --window needs --sparse.
    window = ["--data", str(tokens), "--device", "cpu", "--window", "70"]
    for more in [], ["--recipe", "pythia"], ["--resume", "auto"]:
        cases.append(([*window, *more], "needle train: error: argument --window: needs --sparse"))
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
    for value in ["7", "1.01", "0", "-1", "nan", "inf", "x"]:
        with pytest.raises(SystemExit) as stop:
            generate.main(["nowhere", f"--top-p={value}"])
        said = f"argument --top-p: must be a number above 0 and at most 1, not {value!r}\n"
        assert stop.value.code == 2 and capsys.readouterr().err.endswith(said)
    assert generate.parser().parse_args(["nowhere", "--top-p", "1"]).top_p == 1


def test_flags_that_cannot_be_followed_are_one_error(tmp_path, tokens, capsys, monkeypatch):
    for flag in "--data", "--init", "--tokenizer", "--resume", "--name":
        long = "a" * 300 if flag == "--name" else str(tmp_path / ("a" * 300))
        assert train_pythia.main(flags(tmp_path, tokens, "a", flag, long)) == 1
        assert capsys.readouterr().err.endswith(f"{long}: File name too long\n")
    assert train_pythia.main(flags(tmp_path, tokens, "a", "--graph")) == 1
    assert "--graph: cpu() records no graphs" in capsys.readouterr().err
    monkeypatch.setattr(ndl.Pythia, "recompute", None)
    assert train_pythia.main(flags(tmp_path, tokens, "b", "--recompute")) == 1
    assert "--recompute: a Pythia cannot compute layers again" in capsys.readouterr().err


def test_warmup_longer_than_the_run_is_refused(tmp_path, capsys):
    missing = tmp_path / "missing"  # the warmup is refused before the data is looked for
    for steps, length in [(6, []), (3, ["--tokens", "96"])]:
        argv = flags(tmp_path, missing, "a", "--warmup", "7", steps=6)
        argv = [*without(argv, "--steps"), *length] if length else argv
        assert train_pythia.main(argv) == 1
        assert capsys.readouterr() == (
            "",
            f"needle train: --warmup 7: the run has {steps} steps, and its warmup must be "
            f"0 to {steps} of them\n",
        )
    assert not (tmp_path / "runs").exists()
    assert complete(Settings(warmup=6, steps=6), on_gpu=False).warmup == 6
    constant = Settings(schedule="constant", warmup=7, steps=6)
    assert complete(constant, on_gpu=False).warmup == 7


def test_help_is_a_screen_of_flags_that_exist(capsys):
    texts = {}
    for words in ["--help"], ["-h"], ["--help", "all"]:
        with pytest.raises(SystemExit, match="0"):
            train_pythia.main(words)
        texts[words[-1]] = capsys.readouterr().out
    screen, every = texts["--help"], texts["all"]
    assert texts["-h"] == screen
    assert len(screen.splitlines()) <= 48 and max(map(len, screen.splitlines())) <= 80
    shown = set(re.findall(r"--[a-z][a-z0-9-]*", screen))
    assert {"--help", "--model", "--data", "--steps", "--resume", "--layers", "--keep"} <= shown
    assert all(f"\n  {flag} " in every or flag == "--help" for flag in shown)
    for topic in "model", "data", "training", "output":
        assert f"\n{topic}:\n" in screen
    with pytest.raises(SystemExit, match="2"):
        train_pythia.main(["--nonsense"])
    assert len(capsys.readouterr().err.splitlines()) == 2


def test_help_names_every_flag_in_groups_with_defaults(capsys):
    with pytest.raises(SystemExit) as caught:
        train_pythia.main(["--help", "all"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    for name in FIELDS:
        assert re.search(rf"\n  {option(name)}[ ,\n]", text), name
    for group in ("model:", "data:", "training:", "output:"):
        assert f"\n{group}" in text
    assert text.count("(default") >= 20 and "sequences a micro-batch (default: tiny 16" in text


# ---- devices, data, folders -------------------------------------------------------------------


def test_device_that_cannot_be_used_says_why_in_one_line(tmp_path, texts, capsys):
    assert train_pythia.main(flags(tmp_path, texts, "a", steps=1)) == 0
    capsys.readouterr()
    # No machine has this many GPUs.
    why = f"device cuda:63: {ndl.cuda(63).reason()}\n"
    assert train_pythia.main(flags(tmp_path, texts, "b", device="cuda:63")) == 1
    assert capsys.readouterr() == ("", f"needle train: {why}")
    assert not (tmp_path / "runs" / "b").exists()
    assert generate.main([str(tmp_path / "runs" / "a"), "--device", "cuda:63"]) == 1
    assert capsys.readouterr() == ("", f"needle generate: {why}")


def test_data_that_cannot_be_used(tmp_path, texts, capsys):
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "folder").mkdir()
    np.save(tmp_path / "float.npy", np.zeros(99))
    np.save(tmp_path / "large.npy", np.full(430, 5000, np.int32))
    for name, said in [
        ("empty.txt", "an empty file"),
        ("folder", "an empty folder"),
        ("float.npy", "one axis of integers"),
        ("large.npy", "outside the vocabulary of 64"),
    ]:
        assert train_pythia.main(flags(tmp_path, tmp_path / name, name)) == 1
        assert said in capsys.readouterr().err, name
    argv = flags(tmp_path, texts, "a", "--tokenizer", str(texts / "00.txt"))
    assert train_pythia.main(argv) == 1
    assert "not a tokenizer.json" in capsys.readouterr().err


@pytest.mark.usefixtures("plots")
def test_user_without_a_home_is_told_what_to_set(tmp_path, texts, monkeypatch, capsys):
    """HOME=~ is what Python gives for a user whom /etc/passwd lacks."""
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


# As a user whom permissions bind: capset(2) with the version of its structures and no rights. Runs
# commands, and prints the exit code of each.
POWERLESS = """
import ctypes, json, sys
header, none = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
if ctypes.CDLL(None).capset(header, none) != 0:
    sys.exit(77)
sys.path.insert(0, sys.argv[1])
import generate, train_pythia as train
from needle.models import pythia
pythia.PRESETS["tiny"] = eval(sys.argv[2])
for name, *words in json.loads(sys.argv[3]):
    print(globals()[name].main(words), file=sys.stderr)
"""


def test_folder_that_may_not_be_read_is_named(tmp_path, tokens):
    assert train_pythia.main(flags(tmp_path, tokens, "a", steps=1)) == 0
    folder = tmp_path / "runs" / "a"
    argv = ["train", *flags(tmp_path, tokens, "a")]
    resumes = ["--resume", "auto"], ["--resume", str(folder)]
    commands = [["generate", str(folder)], argv, *([*argv, *more] for more in resumes)]
    folder.chmod(0)
    try:
        words = ROOT / "apps", repr(SMALL), json.dumps(commands)
        done = run(sys.executable, "-c", POWERLESS, *words)
    finally:
        folder.chmod(0o755)
    if done.returncode == 77:
        pytest.skip("the system does not let a process give up its rights")
    lines = done.stderr.splitlines()
    assert len(lines) == 8 and lines[1::2] == ["1"] * 4
    for (name, *_), line in zip(commands, lines[::2]):
        program, path, *_, reason = line.split(": ")
        assert program == f"needle {name}" and Path(path).is_relative_to(folder)
        assert re.fullmatch("Permission denied(; see to its permissions)?", reason)
