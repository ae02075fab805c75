"""How runs of apps/train_pythia.py end early: signals, faults, and settings that are refused."""

import dataclasses
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import generate
import numpy as np
import pytest
import train_pythia
from harness import ROOT
from small_runs import SMALL, TOKENS, checkpoint_of, flags, lines_of, numbers_of, run_until

import needle as ndl
from needle.checkpoint import Checkpoint, list_checkpoints, step_of
from needle.distributed.group import Group
from needle.training import flags as command_line
from needle.training import log as logs
from needle.training import run as run_parts
from needle.training import settings as run_settings

pytestmark = pytest.mark.slow

# The program with that preset, as a process of its own.
PROGRAM = f"""
import sys
sys.path.insert(0, {str(ROOT / "apps")!r})
import train_pythia
from needle.models import pythia
pythia.PRESETS["tiny"] = {SMALL}
sys.exit(train_pythia.main(sys.argv[1:]))
"""

# ---- signals ----------------------------------------------------------------------------------


def start(argv):
    return subprocess.Popen(
        [sys.executable, "-u", "-c", PROGRAM, *argv],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for_step(tmp_path, name, step, process):
    path = tmp_path / "runs" / name / "metrics.jsonl"
    deadline = time.monotonic() + 60
    while not path.exists() or path.read_text().count("\n") < step:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)


# What a run of one process has.
ALONE = {
    "parallel": SimpleNamespace(group=Group()),
    "model": SimpleNamespace(recompute=False),
    "data": SimpleNamespace(trusted=False),
}


@pytest.mark.parametrize(
    "folder, flags, more",
    [
        ("runs/a", {}, ""),
        ("runs/b c", {}, ""),
        ("more runs/a", {}, " --out 'more runs'"),
        (
            "/runs/a",
            {"tensorboard": True, "wandb": "project"},
            " --out /runs --tensorboard --wandb project",
        ),
        ("runs/a", {"device_name": "cuda:1"}, " --device cuda:1"),
        ("runs/a", {"data": SimpleNamespace(trusted=True)}, " --trust-data"),
        ("runs/a", {"hang_seconds": 7.5}, " --supervise --hang-seconds 7.5"),
    ],
)
def test_the_command_that_goes_on(monkeypatch, folder, flags, more):
    folder = Path(folder)
    monkeypatch.setattr(sys, "argv", ["apps/train_pythia.py", "--steps", "5"])
    monkeypatch.setattr(run_parts, "supervised", lambda: "hang_seconds" in flags)
    fields = {field.name: field.default for field in dataclasses.fields(run_parts.Run)}
    run = SimpleNamespace(**fields | ALONE | flags | {"folder": folder})
    name = shlex.quote(folder.name)
    begins = f"{shlex.quote(sys.executable)} apps/train_pythia.py --resume auto --name {name}"
    assert run_parts.resume_command(run) == begins + more


def test_the_command_that_goes_on_is_read_as_it_is_meant(monkeypatch):
    """Where every value looks like a flag."""
    monkeypatch.setattr(sys, "argv", ["apps/train_pythia.py"])
    fields = {field.name: field.default for field in dataclasses.fields(run_parts.Run)}
    settings = {"schedule": "cosine"}
    more = {"folder": Path("-out/-y"), "wandb": "-project", "settings": settings}
    run = SimpleNamespace(**fields | ALONE | more)
    words = shlex.split(run_parts.resume_command(run))[2:]
    args = command_line.parse(words)
    assert (args.out, args.name, args.wandb) == ("-out", "-y", "-project")
    (word,) = shlex.split(run_parts.longer(run))[-1:]
    assert command_line.parse([word]).init == "-out/-y"


@pytest.mark.parametrize("name", ["lock", "metrics.jsonl"])
@pytest.mark.parametrize("resumed", [False, True])
def test_a_fifo_in_the_folder_is_named(tmp_path, tokens, capsys, name, resumed):
    """Opened for writing it would wait for a reader."""
    path = tmp_path / "runs" / "a" / name
    argv = flags(tmp_path, tokens, "a", "--resume", "auto")
    if resumed:
        assert train_pythia.main(argv) == 0
        path.unlink()
        (path.parent / "sample.txt").unlink()
    path.parent.mkdir(parents=True, exist_ok=True)
    os.mkfifo(path)
    assert train_pythia.main(argv) == 1
    error = capsys.readouterr().err
    assert f"{path}: cannot be" in error and "it is a FIFO, not a regular file" in error


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_finishes_the_step_saves_and_exits_0(tmp_path, tokens, number):
    argv = flags(tmp_path, tokens, "a", "--grad-accum", "3", steps=5000)
    process = start(argv)
    wait_for_step(tmp_path, "a", 3, process)
    process.send_signal(number)
    out, error = process.communicate(timeout=60)
    assert process.returncode == 0, error
    last = lines_of(tmp_path, "a")[-1]["step"]
    assert f"stopped by {number.name} after step {last} of 5000, and saved" in out
    assert "--resume auto --name a" in out and " --device cpu\n" in out
    newest = list_checkpoints(tmp_path / "runs" / "a" / "checkpoints")[0]
    assert Checkpoint(newest).state["step"] == last


def test_kill_9_then_resume_auto(tmp_path, tokens):
    argv = flags(tmp_path, tokens, "a", steps=40)
    process = start(argv)
    wait_for_step(tmp_path, "a", 5, process)
    process.kill()
    process.communicate(timeout=60)
    done = len(lines_of(tmp_path, "a"))
    assert done < 40
    assert train_pythia.main(argv + ["--resume", "auto"]) == 0
    assert train_pythia.main(flags(tmp_path, tokens, "b", steps=40)) == 0
    assert numbers_of(tmp_path, "a") == numbers_of(tmp_path, "b")


# ---- what goes wrong --------------------------------------------------------------------------


def test_a_loss_that_is_not_finite_stops_the_run(tmp_path, tokens, capsys, monkeypatch):
    forward_backward, calls = train_pythia.forward_backward, []

    def breaking(*arguments):
        calls.append(arguments)
        return forward_backward(*arguments) * (float("nan") if len(calls) == 5 else 1.0)

    monkeypatch.setattr(train_pythia, "forward_backward", breaking)
    assert train_pythia.main(flags(tmp_path, tokens, "a")) == 1
    error = capsys.readouterr().err
    assert "step 5: the loss is nan (epoch 0, batch 4)" in error
    good, last = (checkpoint_of(tmp_path, "a", step) for step in (2, 4))
    assert f"the last good checkpoint is {good}: 2 finite steps followed\n" in error
    assert f"the last one is {last}: 0 finite steps followed, and it may have diverged\n" in error
    assert f"--init {good}\n" in error
    assert [line["step"] for line in lines_of(tmp_path, "a")] == [1, 2, 3, 4]
    assert Checkpoint(good).state["step"] == 2 and Checkpoint(last).state["step"] == 4


def test_checkpoint_of_diverged_weights_is_not_called_good(tmp_path, tokens, capsys):
    """The loss of its own step is finite: the update behind it is what diverged."""
    argv = flags(tmp_path, tokens, "a", "--lr", "1e30", "--warmup", "0", "--clip", "0")
    assert train_pythia.main([*argv, "--save-every", "1"]) == 1
    error = capsys.readouterr().err
    last = checkpoint_of(tmp_path, "a", len(lines_of(tmp_path, "a")))
    assert "Stopped." in error and f"the last one is {last}: 0 finite steps" in error
    assert f"the last good checkpoint is {last}" not in error and f"--init {last}" not in error


def test_first_checkpoint_without_a_step_after_it_is_not_called_good(
    tmp_path, tokens, capsys, monkeypatch
):
    forward_backward, calls = train_pythia.forward_backward, []

    def breaking(*arguments):
        calls.append(arguments)
        return forward_backward(*arguments) * (float("nan") if len(calls) == 4 else 1.0)

    monkeypatch.setattr(train_pythia, "forward_backward", breaking)
    argv = flags(tmp_path, tokens, "a")
    assert train_pythia.main(argv) == 1  # step 4; 2 was saved, and 4 was to be
    error = capsys.readouterr().err
    assert "no checkpoint is known to be good\n" in error
    assert f"the last one is {checkpoint_of(tmp_path, 'a', 2)}: 1 finite step followed, " in error
    assert "--init" not in error


def test_stops_shortly_after_each_other_keep_the_proven_checkpoint(tmp_path, tokens, monkeypatch):
    """A run that signals end after each step saves each; those of the last steps prove nothing."""
    queue, left = logs.RunLog.queue, []

    def stopped(*arguments):
        signal.raise_signal(signal.SIGTERM)
        queue(*arguments)

    monkeypatch.setattr(logs.RunLog, "queue", stopped)
    argv = flags(tmp_path, tokens, "a", "--save-every", "3", "--eval-every", "0", steps=12)
    for step in range(1, 12):
        assert train_pythia.main([*argv, *["--resume", "auto"] * (step > 1)]) == 0
        folder = tmp_path / "runs" / "a" / "checkpoints"
        left.append([step_of(path) for path in list_checkpoints(folder)])
    assert left[:4] == [[1], [2, 1], [3, 2, 1], [4, 3, 2, 1]]
    for step, steps in enumerate(left[4:], 5):
        assert steps[:2] == [step, step - 1] and len(steps) <= 4
        assert any(step - 6 <= kept <= step - 3 for kept in steps)


@pytest.mark.parametrize(
    "state, said",
    [
        ({"settings": 3}, "it has no settings"),
        ({"settings": {"model": "tiny"}}, "it has no settings of batch_size, settings of seq_len"),
        ({"step": "six"}, "it has no step"),
        ({"data": None}, "it has no data"),
    ],
)
def test_a_checkpoint_that_says_nothing_of_its_run(tmp_path, tokens, capsys, state, said):
    assert train_pythia.main(flags(tmp_path, tokens, "a")) == 0
    path = checkpoint_of(tmp_path, "a", 6)
    model, optimizer, epoch, loss = Checkpoint(path).restore()
    extra = ("run", "settings", "step", "data", "fingerprint", "schedule")
    kept = {key: Checkpoint(path).state[key] for key in extra}
    ndl.save_checkpoint(model, optimizer, epoch, loss, path, **kept | state)
    capsys.readouterr()
    assert train_pythia.main(flags(tmp_path, tokens, "a", "--resume", "auto")) == 1
    error = capsys.readouterr().err
    assert said in error and str(path) in error and error.count("\n") == 1


def test_a_lost_gpu_exits_75(tmp_path, tokens, monkeypatch, capsys):
    def lost(*_):
        raise ndl.CudaFatalError("attention_fwd: an illegal memory access")

    monkeypatch.setattr(train_pythia, "forward_backward", lost)
    assert train_pythia.main(flags(tmp_path, tokens, "a")) == 75
    assert "--resume auto" in capsys.readouterr().err


def test_a_full_disk_stops_the_run_and_says_so(tmp_path, tokens, monkeypatch, capsys):
    def full(descriptor):
        raise OSError(28, os.strerror(28))

    argv = flags(tmp_path, tokens, "a")
    run_until(monkeypatch, 3, argv)
    monkeypatch.setattr(os, "fsync", full)
    assert train_pythia.main(argv + ["--resume", "auto"]) == 1
    assert "No space left on device" in capsys.readouterr().err
    Checkpoint(checkpoint_of(tmp_path, "a", 2))


@pytest.mark.parametrize(
    "argv, said",
    [
        (["--steps", "0"], "a whole number of 1 or more, not '0'"),
        (["--batch-size", "two"], "a whole number of 1 or more, not 'two'"),
        (["--lr", "-1"], "a number above 0, not '-1'"),
        (["--lr", "nan"], "a number above 0, not 'nan'"),
        (["--clip", "inf"], "a number of 0 or more, not 'inf'"),
        (["--seed", "4294967296"], "argument --seed: must be at most 4294967295"),
        (["--seed", "-1"], "argument --seed: must be a whole number of 0 or more"),
        (["--steps", "1" + "0" * 400], "argument --steps: must be at most 9223372036854775807"),
        (
            ["--data", "caf\udce9.txt"],
            "argument --data: b'caf\\xe9.txt' is a name that is not UTF-8",
        ),
        (["--out", "caf\udce9"], "argument --out: b'caf\\xe9' is a name"),
        (["--name", "caf\udce9"], "argument --name: b'caf\\xe9' is a name"),
        (["--init", "caf\udce9"], "argument --init: b'caf\\xe9' is a name"),
        (["--dtype", "float8"], "'float32', 'bfloat16'"),
        (["--model", "gpt"], "pythia-70m"),
        (["--schedule", "steep"], "cosine"),
        (["--sparse", "dotted"], "mixed"),
        (["--device", "tpu"], "auto, cpu, cuda or cuda:INDEX, not 'tpu'"),
        (["--device", "cuda:" + "1" * 31], "auto, cpu, cuda or cuda:INDEX, not 'cuda:1"),
        (["--name", "a/b"], "a name for a folder"),
        (["--steps", "2", "--tokens", "9"], "not allowed with"),
    ],
)
def test_a_bad_flag_says_what_is_allowed(argv, said, capsys):
    with pytest.raises(SystemExit) as caught:
        train_pythia.main(argv)
    assert caught.value.code == 2
    assert said in capsys.readouterr().err


def test_a_device_that_cannot_be_used_says_why_in_one_line(tmp_path, texts, capsys):
    assert train_pythia.main(flags(tmp_path, texts, "a", steps=1)) == 0
    capsys.readouterr()
    # No machine has this many GPUs.
    why = f"device cuda:63: {ndl.cuda(63).reason()}\n"
    assert train_pythia.main(flags(tmp_path, texts, "b", device="cuda:63")) == 1
    assert capsys.readouterr() == ("", f"train_pythia.py: {why}")
    assert not (tmp_path / "runs" / "b").exists()
    assert generate.main([str(tmp_path / "runs" / "a"), "--device", "cuda:63"]) == 1
    assert capsys.readouterr() == ("", f"generate.py: {why}")


def test_a_window_needs_sparse(tmp_path, tokens, capsys):
    # With nothing to resume, auto begins a new run.
    for more in ([], ["--recipe", "pythia"], ["--resume", "auto"]):
        with pytest.raises(SystemExit) as caught:
            train_pythia.main(flags(tmp_path, tokens, "a", "--window", "70", *more))
        assert caught.value.code == 2
        error = capsys.readouterr().err
        assert error.endswith("train_pythia.py: error: argument --window: needs --sparse\n")
    assert not (tmp_path / "runs").exists()
    argv = flags(tmp_path, tokens, "a", "--window", "70", "--sparse", "local")
    assert train_pythia.main(argv) == 0
    argv = flags(tmp_path, tokens, "a", "--window", "70", "--resume", "auto")
    assert train_pythia.main(argv) == 0  # the checkpoint knows of --sparse


def test_a_warmup_longer_than_the_run(tmp_path, capsys):
    missing = tmp_path / "missing"  # the warmup is refused before the data is looked for
    for steps, length in [(6, []), (3, ["--tokens", "96"])]:
        argv = flags(tmp_path, missing, "a", "--warmup", "7", steps=6)
        if length:
            at = argv.index("--steps")
            argv[at : at + 2] = length
        assert train_pythia.main(argv) == 1
        assert capsys.readouterr() == (
            "",
            f"train_pythia.py: --warmup 7: the run has {steps} steps, and its warmup must be "
            f"0 to {steps} of them\n",
        )
    assert not (tmp_path / "runs").exists()
    assert run_settings.complete({"warmup": 6, "steps": 6}, None, on_gpu=False)["warmup"] == 6
    constant = {"schedule": "constant", "warmup": 7, "steps": 6}
    assert run_settings.complete(constant, None, on_gpu=False)["warmup"] == 7


@pytest.mark.parametrize("value", ["7", "1.01", "0", "-1", "nan", "inf", "x"])
def test_a_bad_share_of_probability_is_a_bad_flag(capsys, value):
    with pytest.raises(SystemExit) as stop:
        generate.main(["nowhere", f"--top-p={value}"])
    said = f"argument --top-p: must be a number above 0 and at most 1, not {value!r}\n"
    assert stop.value.code == 2 and capsys.readouterr().err.endswith(said)
    assert generate.parser().parse_args(["nowhere", "--top-p", "1"]).top_p == 1


# As a user whom permissions bind: capset(2) with the version of its structures and no rights.
POWERLESS = """
import ctypes, sys
header, none = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
if ctypes.CDLL(None).capset(header, none) != 0:
    sys.exit(77)
sys.path.insert(0, sys.argv.pop(1))
import generate, train_pythia
from needle.models import pythia
pythia.PRESETS["tiny"] = eval(sys.argv.pop(1))
sys.exit(globals()[sys.argv.pop(1)].main(sys.argv[1:]))
"""


@pytest.mark.parametrize("more", [None, [], ["--resume", "auto"], ["--resume"]])
def test_a_folder_that_may_not_be_read(tmp_path, tokens, more):
    """`more` flags of a training; None: generate.py."""
    assert train_pythia.main(flags(tmp_path, tokens, "a", steps=1)) == 0
    folder = tmp_path / "runs" / "a"
    argv = ["generate", str(folder)]
    if more is not None:
        more = [*more, str(folder)] if more == ["--resume"] else more
        argv = ["train_pythia", *flags(tmp_path, tokens, "a", *more)]
    folder.chmod(0)
    try:
        command = [sys.executable, "-c", POWERLESS, str(ROOT / "apps"), repr(SMALL), *argv]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    finally:
        folder.chmod(0o755)
    if done.returncode == 77:
        pytest.skip("the system does not let a process give up its rights")
    assert done.returncode == 1
    program, path, *_, reason = done.stderr.split(": ")
    assert program == f"{argv[0]}.py" and Path(path).is_relative_to(folder)
    assert re.fullmatch("Permission denied(; see to its permissions)?\n", reason)


def test_a_name_that_no_file_system_takes(tmp_path, tokens, capsys):
    argv = flags(tmp_path, tokens, "é" * 128)
    with pytest.raises(SystemExit) as stop:
        train_pythia.main(argv)
    said = "argument --name: must have at most 255 bytes, as file systems want it, not 256\n"
    assert stop.value.code == 2 and capsys.readouterr().err.endswith(said)
    for flag in ("--data", "--init", "--tokenizer", "--resume"):
        long = str(tmp_path / ("a" * 300))
        assert train_pythia.main(flags(tmp_path, tokens, "a", flag, long)) == 1
        assert capsys.readouterr().err == f"train_pythia.py: {long}: File name too long\n"


def test_help_names_every_flag_in_groups_with_defaults(capsys):
    with pytest.raises(SystemExit) as caught:
        train_pythia.main(["--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    for flag in (
        "model data tokenizer batch-size seq-len grad-accum steps tokens lr schedule "
        "warmup weight-decay clip dtype device seed sparse window eval-every save-every "
        "out name resume recipe global-batch-size tensorboard wandb supervise hang-seconds"
    ).split():
        assert f"--{flag} " in text, flag
    for group in ("recipe:", "model:", "data:", "training:", "output:", "faults:"):
        assert f"\n{group}" in text
    assert text.count("(default") >= 20


def test_data_that_cannot_be_used(tmp_path, capsys):
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "binary.txt").write_bytes(b"\x00\x01\x02")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    (tmp_path / "odd.bin").write_bytes(b"abc")
    (tmp_path / "bad.npy").write_bytes(b"not an array")
    (tmp_path / "folder").mkdir()
    np.save(tmp_path / "float.npy", np.zeros(99))
    np.save(tmp_path / "short.npy", TOKENS[:20])
    np.save(tmp_path / "large.npy", np.full(430, 5000, np.int32))
    for name, said in [
        ("empty.txt", "an empty file"),
        ("binary.txt", "not text"),
        ("latin.txt", "not text"),
        ("odd.bin", "no whole number of uint16"),
        ("bad.npy", "not a usable .npy"),
        ("folder", "an empty folder"),
        ("missing", "no such file"),
        ("float.npy", "one axis of integers"),
        ("short.npy", "fewer than one batch of 2 x 16"),
        ("large.npy", "outside the vocabulary of 64"),
    ]:
        assert train_pythia.main(flags(tmp_path, tmp_path / name, name)) == 1
        assert said in capsys.readouterr().err, name


def test_a_tokenizer_that_is_none(tmp_path, texts, capsys):
    argv = flags(tmp_path, texts, "a", "--tokenizer", str(texts / "00.txt"))
    assert train_pythia.main(argv) == 1
    assert "not a tokenizer.json" in capsys.readouterr().err
