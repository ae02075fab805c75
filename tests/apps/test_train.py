"""apps/train_pythia.py and apps/generate.py as a person meets them: runs, resumes, stops, errors.

Runs are tiny: the preset `tiny` is made smaller still, at 2 x 16 tokens a micro-batch. Most run in
this process; what needs a process of its own (signals, kill -9) has one.
"""

import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from harness import ROOT

import needle as ndl
from needle.checkpoint import Checkpoint, checkpoint_path, list_checkpoints
from needle.data import Batches, DataError, FlatTokens, open_data
from needle.models import pythia

APPS = ROOT / "apps"
sys.path.insert(0, str(APPS))

import generate  # noqa: E402
import run_log  # noqa: E402
import trackers  # noqa: E402
import train_flags  # noqa: E402
import train_pythia  # noqa: E402

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]
# 25 windows of 16: an epoch is 12 micro-batches of 2.
TOKENS = np.random.RandomState(3).randint(0, 60, 430).astype(np.uint16)


SMALL = (2, 32, 2, 64)  # layers, hidden size, heads, vocabulary
# The program with that preset, as a process of its own.
PROGRAM = f"""
import sys
sys.path.insert(0, {str(APPS)!r})
import train_pythia
from needle.models import pythia
pythia.PRESETS["tiny"] = {SMALL}
sys.exit(train_pythia.main(sys.argv[1:]))
"""


@pytest.fixture(autouse=True)
def small_and_clean(tmp_path, monkeypatch):
    monkeypatch.setenv("NEEDLE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setitem(pythia.PRESETS, "tiny", SMALL)
    monkeypatch.setattr(train_pythia, "SAMPLE_TOKENS", 8)


@pytest.fixture
def tokens(tmp_path):
    path = tmp_path / "tokens.npy"
    np.save(path, TOKENS)
    return path


@pytest.fixture
def text(tmp_path):
    folder = tmp_path / "text"
    folder.mkdir()
    words = "def class import return self value for in range len print".split()
    random = np.random.RandomState(1)
    for number in range(24):
        lines = [" ".join(random.choice(words, 6)) for _ in range(12)]
        (folder / f"{number:02}.txt").write_text("\n".join(lines) + f"\nünïcode {number}\n")
    (folder / "picture.bin").write_bytes(bytes(range(256)))
    return folder


def flags(tmp_path, data, name, *more, device="cpu", dtype="float32", steps=6):
    return [
        "--device",
        device,
        "--dtype",
        dtype,
        "--model",
        "tiny",
        "--data",
        str(data),
        "--batch-size",
        "2",
        "--seq-len",
        "16",
        "--steps",
        str(steps),
        "--save-every",
        "2",
        "--eval-every",
        "3",
        "--out",
        str(tmp_path / "runs"),
        "--name",
        name,
        *more,
    ]


def lines_of(tmp_path, name):
    path = tmp_path / "runs" / name / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


def numbers_of(tmp_path, name):
    """What must be equal, whenever and however often a run was interrupted."""
    timing = ("tokens_per_second", "data_wait_ms", "seconds")
    return [{k: v for k, v in line.items() if k not in timing} for line in lines_of(tmp_path, name)]


def final_bytes(tmp_path, name, step=6):
    """All tensors of the last checkpoint."""
    path = checkpoint_path(tmp_path / "runs" / name / "checkpoints", step)
    content = path.read_bytes()
    return content[8 + int.from_bytes(content[:8], "little") :]


class Killed(BaseException):
    """Nothing catches it, as nothing catches kill -9."""


def run_until(monkeypatch, step, argv):
    """The run, ended without warning while `step` is being logged."""
    queue = run_log.RunLog.queue

    def dying(self, number, *rest):
        queue(self, number, *rest)
        if number == step:
            raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(run_log.RunLog, "queue", dying)
        with pytest.raises(Killed):
            train_pythia.main(argv)


def test_the_wait_for_data_is_that_of_each_step(tmp_path, text, monkeypatch):
    class Slow(train_pythia.Prefetch):
        taken = 0

        def next(self):
            batch = super().next()
            self.taken += 1
            self.waited = 0.1 * self.taken * self.taken
            return batch

    monkeypatch.setattr(train_pythia, "Prefetch", Slow)
    assert train_pythia.main(flags(tmp_path, text, "a", "--grad-accum", "2", steps=3)) == 0
    assert [line["data_wait_ms"] for line in lines_of(tmp_path, "a")] == [400, 1200, 2000]


# ---- a whole run ------------------------------------------------------------------------------


def test_a_run_writes_what_it_promises(tmp_path, text, capsys):
    assert train_pythia.main(flags(tmp_path, text, "a")) == 0
    folder = tmp_path / "runs" / "a"
    assert {path.name for path in folder.iterdir()} == {
        "config.json",
        "metrics.jsonl",
        "loss.png",
        "tokenizer.json",
        "sample.txt",
        "checkpoints",
        "lock",
    }
    lines = lines_of(tmp_path, "a")
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert [line["tokens"] for line in lines] == [32 * n for n in range(1, 7)]
    for line in lines:
        assert {
            "step",
            "tokens",
            "loss",
            "lr",
            "grad_norm",
            "tokens_per_second",
            "data_wait_ms",
            "seconds",
        } <= line.keys()
        assert 0 <= line["data_wait_ms"] < 1e3 * line["seconds"] + 1
        assert ("val_loss" in line) == ("val_bits_per_byte" in line) == (line["step"] in (3, 6))
    assert lines[-1]["loss"] < lines[0]["loss"]
    assert [path.name for path in list_checkpoints(folder / "checkpoints")] == [
        "step_6.safetensors",
        "step_4.safetensors",
    ]
    config = json.loads((folder / "config.json").read_text())
    assert config["settings"]["lr"] == train_flags.TINY["lr"]
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert (folder / "sample.txt").read_text().strip()
    model, optimizer, epoch, loss = train_pythia.load_checkpoint(
        checkpoint_path(folder / "checkpoints", 6)
    )
    assert (epoch, loss) == (
        Checkpoint(checkpoint_path(folder / "checkpoints", 6)).state["epoch"],
        lines[-1]["loss"],
    )
    assert optimizer.state_dict()["step"] == 6
    out = capsys.readouterr().out
    assert "step 6/6" in out and "held-out loss" in out and "sample" in out

    def continuation(*more):
        assert (
            generate.main(
                [str(folder), "--prompt", "def ", "--max-new-tokens", "9", "--device", "cpu", *more]
            )
            == 0
        )
        return capsys.readouterr().out

    assert continuation("--seed", "1") == continuation("--seed", "1")
    assert continuation("--temperature", "0", "--top-k", "5", "--top-p", "0.9").startswith("def ")
    assert "e" not in continuation("--stop", "e", "--repetition-penalty", "1.2", "--seed", "1")[4:]
    there = tmp_path / "there"
    model.save_pretrained(there)
    assert (
        generate.main(
            [
                str(there),
                "--prompt",
                "def ",
                "--seed",
                "1",
                "--max-new-tokens",
                "9",
                "--device",
                "cpu",
            ]
        )
        == 0
    )
    assert capsys.readouterr().out == continuation("--seed", "1")
    more = ndl.data.load_tokenizer(folder)
    more.add_tokens([f"<{i}>" for i in range(500)])
    more.save(str(there / "more.json"))
    assert (
        generate.main(
            [
                str(there),
                "--tokenizer",
                str(there / "more.json"),
                "--device",
                "cpu",
                "--prompt",
                "<499>",
            ]
        )
        == 1
    )
    out, error = capsys.readouterr()
    assert out == "" and "is outside the vocabulary of" in error
    (there / "tokenizer.json").unlink()
    assert generate.main([str(there)]) == 1
    assert "no tokenizer.json lies with it; give --tokenizer" in capsys.readouterr().err


def test_a_name_that_is_taken(tmp_path, tokens, capsys):
    assert train_pythia.main(flags(tmp_path, tokens, "a", steps=1)) == 0
    assert train_pythia.main(flags(tmp_path, tokens, "a", steps=1)) == 1
    assert "already" in capsys.readouterr().err


# ---- resuming ---------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("accumulate", [1, 5])
def test_resumed_equals_uninterrupted(tmp_path, tokens, monkeypatch, dtype, accumulate, device):
    # 5 micro-batches a step and 12 an epoch: epochs end inside steps 3 and 5.
    more = ["--grad-accum", str(accumulate)]
    if accumulate == 1:
        more += ["--batch-size", "9"]  # 2 batches an epoch
    options = dict(device=device, dtype=dtype)
    assert train_pythia.main(flags(tmp_path, tokens, "whole", *more, **options)) == 0
    argv = flags(tmp_path, tokens, "parts", *more, **options)
    run_until(monkeypatch, 4, argv)  # the last checkpoint is of step 2
    assert [line["step"] for line in lines_of(tmp_path, "parts")] == [1, 2, 3]
    np.random.seed(99)  # whatever else the process did
    run_until(monkeypatch, 5, argv + ["--resume", "auto"])
    assert train_pythia.main(argv + ["--resume", "auto"]) == 0
    assert numbers_of(tmp_path, "parts") == numbers_of(tmp_path, "whole")
    assert final_bytes(tmp_path, "parts") == final_bytes(tmp_path, "whole")
    assert lines_of(tmp_path, "whole")[-1]["tokens"] > len(TOKENS)  # an epoch has ended


def test_killed_before_the_first_checkpoint(tmp_path, tokens, monkeypatch, capsys):
    argv = flags(tmp_path, tokens, "a")
    run_until(monkeypatch, 1, argv)
    assert train_pythia.main(argv + ["--resume", "auto"]) == 0
    assert "starting from the beginning" in capsys.readouterr().out
    assert train_pythia.main(flags(tmp_path, tokens, "b")) == 0
    assert numbers_of(tmp_path, "a") == numbers_of(tmp_path, "b")


def test_resume_auto_finds_the_newest_run_and_passes_over_damage(
    tmp_path, tokens, monkeypatch, capsys
):
    assert train_pythia.main(flags(tmp_path, tokens, "older")) == 0
    argv = flags(tmp_path, tokens, "newer")
    run_until(monkeypatch, 5, argv)
    bad = checkpoint_path(tmp_path / "runs" / "newer" / "checkpoints", 4)
    bad.write_bytes(bad.read_bytes()[:-1])
    assert (
        train_pythia.main(["--resume", "auto", "--out", str(tmp_path / "runs"), "--device", "cpu"])
        == 0
    )
    out = capsys.readouterr().out
    assert f"skipped: {bad}" in out and "step_2.safetensors after step 2" in out
    assert numbers_of(tmp_path, "newer") == numbers_of(tmp_path, "older")


def test_resuming_with_other_settings_is_refused(tmp_path, tokens, capsys):
    assert train_pythia.main(flags(tmp_path, tokens, "a")) == 0
    before = (tmp_path / "runs" / "a" / "metrics.jsonl").read_text()
    argv = flags(tmp_path, tokens, "a", "--lr", "0.5", "--resume", "auto", steps=9)
    assert train_pythia.main(argv) == 1
    error = capsys.readouterr().err
    assert "--lr is 0.5, but the run has 0.003" in error
    assert "--steps is 9, but the run has 6" in error
    other = tmp_path / "other.npy"
    np.save(other, TOKENS + 1)
    assert train_pythia.main(flags(tmp_path, other, "a", "--resume", "auto")) == 1
    assert "not the tokens that the run read before" in capsys.readouterr().err
    assert (tmp_path / "runs" / "a" / "metrics.jsonl").read_text() == before
    assert train_pythia.main(flags(tmp_path, tokens, "a", "--resume", "auto")) == 0
    assert "nothing to do" in capsys.readouterr().out


def test_a_constant_rate_may_go_on_for_longer(tmp_path, tokens):
    more = ["--schedule", "constant", "--warmup", "2"]
    assert train_pythia.main(flags(tmp_path, tokens, "a", *more, steps=4)) == 0
    assert train_pythia.main(flags(tmp_path, tokens, "a", *more, "--resume", "auto")) == 0
    assert train_pythia.main(flags(tmp_path, tokens, "b", *more)) == 0
    losses = [[line["loss"] for line in lines_of(tmp_path, name)] for name in "ab"]
    assert losses[0] == losses[1]


def test_resuming_what_is_no_checkpoint(tmp_path, tokens, capsys):
    argv = flags(tmp_path, tokens, "a")
    for wrong in (tokens, tmp_path / "missing.safetensors", tmp_path):
        assert train_pythia.main(argv + ["--resume", str(wrong)]) == 1
        assert str(wrong) in capsys.readouterr().err


# ---- settings ---------------------------------------------------------------------------------


def test_sparse_attention_trains_and_is_remembered(tmp_path, tokens):
    more = ["--sparse", "local", "--window", "70", "--seq-len", "200", "--batch-size", "1"]
    assert train_pythia.main(flags(tmp_path, tokens, "a", *more, steps=2)) == 0
    config = Checkpoint(checkpoint_path(tmp_path / "runs" / "a" / "checkpoints", 2)).state["config"]
    assert config["use_sparse_attention"] and config["sparse_pattern"] == "local"
    assert config["sparse_window"] == 70


def test_defaults_by_device_and_model():
    cpu = train_flags.complete({}, None, on_gpu=False)
    assert (cpu["model"], cpu["dtype"], cpu["warmup"]) == ("tiny", "float32", cpu["steps"] // 10)
    gpu = train_flags.complete({}, None, on_gpu=True)
    assert (gpu["model"], gpu["dtype"], gpu["seq_len"]) == ("pythia-70m", "bfloat16", 2048)
    assert train_flags.complete({"model": "pythia-410m"}, None, on_gpu=True)["lr"] == 3e-4
    named = {"batch_size": 2, "seq_len": 16, "grad_accum": 3, "warmup": 0}
    assert train_flags.complete(named, 97, on_gpu=False)["steps"] == 2


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
    assert "--resume auto --name a" in out
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
    assert "step_4.safetensors" in error
    assert [line["step"] for line in lines_of(tmp_path, "a")] == [1, 2, 3, 4]
    Checkpoint(checkpoint_path(tmp_path / "runs" / "a" / "checkpoints", 4))


def test_a_rate_that_explodes(tmp_path, tokens, capsys):
    argv = flags(tmp_path, tokens, "a", "--lr", "1e30", "--warmup", "0", "--clip", "0")
    assert train_pythia.main(argv) == 1
    assert "Stopped." in capsys.readouterr().err


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
    Checkpoint(checkpoint_path(tmp_path / "runs" / "a" / "checkpoints", 2))


@pytest.mark.parametrize(
    "argv, said",
    [
        (["--steps", "0"], "a whole number of 1 or more, not '0'"),
        (["--batch-size", "two"], "a whole number of 1 or more, not 'two'"),
        (["--lr", "-1"], "a number above 0, not '-1'"),
        (["--lr", "nan"], "a number above 0, not 'nan'"),
        (["--clip", "inf"], "a number of 0 or more, not 'inf'"),
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


def test_a_device_that_cannot_be_used_says_why_in_one_line(tmp_path, text, capsys):
    assert train_pythia.main(flags(tmp_path, text, "a", steps=1)) == 0
    capsys.readouterr()
    # No machine has this many GPUs.
    why = f"device cuda:63: {ndl.cuda(63).reason()}\n"
    assert train_pythia.main(flags(tmp_path, text, "b", device="cuda:63")) == 1
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
    assert train_flags.complete({"warmup": 6, "steps": 6}, None, on_gpu=False)["warmup"] == 6
    constant = {"schedule": "constant", "warmup": 7, "steps": 6}
    assert train_flags.complete(constant, None, on_gpu=False)["warmup"] == 7


def test_bad_sampling_is_refused_before_the_prompt_is_printed(tmp_path, text, capsys):
    assert train_pythia.main(flags(tmp_path, text, "a", steps=1)) == 0
    capsys.readouterr()
    argv = [str(tmp_path / "runs" / "a"), "--device", "cpu", "--top-p", "2"]
    assert generate.main(argv) == 1
    assert capsys.readouterr() == (
        "",
        "generate.py: top_p must be above 0 and at most 1, not 2.0\n",
    )


def test_help_names_every_flag_in_groups_with_defaults(capsys):
    with pytest.raises(SystemExit) as caught:
        train_pythia.main(["--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    for flag in (
        "model data tokenizer batch-size seq-len grad-accum steps tokens lr schedule "
        "warmup weight-decay clip dtype device seed sparse window eval-every save-every "
        "out name resume recipe global-batch-size tensorboard wandb"
    ).split():
        assert f"--{flag} " in text, flag
    for group in ("recipe:", "model:", "data:", "training:", "output:"):
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


def test_a_tokenizer_that_is_none(tmp_path, text, capsys):
    argv = flags(tmp_path, text, "a", "--tokenizer", str(text / "00.txt"))
    assert train_pythia.main(argv) == 1
    assert "not a tokenizer.json" in capsys.readouterr().err


# ---- batches ----------------------------------------------------------------------------------


def test_an_epoch_predicts_each_token_once_and_positions_are_exact():
    tokens = np.arange(16 * 25 + 1, dtype=np.uint16)
    batches = Batches(tokens, 5, 16, seed=2)
    assert len(batches) == 5
    drawn = [batches.next() for _ in range(5)]
    targets = np.sort(np.concatenate([target.ravel() for _, target in drawn]))
    np.testing.assert_array_equal(targets, tokens[1:])
    for ids, target in drawn:
        np.testing.assert_array_equal(ids[:, 1:], target[:, :-1])
    position = batches.position
    assert position == {"epoch": 0, "batch": 5}
    following = [batches.next()[0] for _ in range(7)]
    assert batches.position == {"epoch": 2, "batch": 2}
    again = Batches(tokens, 5, 16, seed=2)
    again.seek(position)
    for expected in following:
        np.testing.assert_array_equal(again.next()[0], expected)
    assert not np.array_equal(drawn[0][0], following[0])
    with pytest.raises(DataError, match="an epoch has 5 batches"):
        again.seek({"epoch": 0, "batch": 6})


def test_text_is_tokenised_once_and_held_out_by_documents(text, capsys):
    first = open_data(text, vocab_size=300)
    assert "once" in capsys.readouterr().out
    second = open_data(text, vocab_size=300)
    assert capsys.readouterr().out == ""
    assert first.fingerprint == second.fingerprint
    assert isinstance(second.train, FlatTokens) and second.train.dtype == np.uint16
    assert first.vocab_size <= 300
    held_out = (text / "19.txt").read_text()
    assert first.tokenizer.decode(first.held_out.tolist()) == held_out
    assert first.tokenizer.decode(first.train.tolist()) == "".join(
        (text / f"{n:02}.txt").read_text() for n in range(24) if n != 19
    )


def test_a_long_line_and_a_single_file(tmp_path, monkeypatch):
    monkeypatch.setattr("needle.data.text.PIECE", 1000)
    path = tmp_path / "long.txt"
    path.write_text("ab " * 4000 + "\nend\n" * 50)
    data = open_data(path, vocab_size=280)
    everything = np.concatenate([data.train, data.held_out])
    assert data.tokenizer.decode(everything.tolist()) == path.read_text()
    assert 0.04 < len(data.held_out) / len(everything) < 0.06


# ---- trackers ---------------------------------------------------------------------------------

# Packages with the calls that apps/trackers.py makes of the real ones; each call becomes a line of
# the file $CALLS.
SPY = """
import json, os

def call(name, *values):
    with open(os.environ["CALLS"], "a") as file:
        file.write(json.dumps([name, *values]) + "\\n")
"""
FAKES = {
    "tensorboardX/__init__.py": SPY
    + """
class SummaryWriter:
    def __init__(self, folder, purge_step):
        call("open", folder, purge_step)
    def add_scalar(self, name, value, step):
        call("scalar", name, value, step)
    def flush(self):
        call("flush")
    def close(self):
        call("close")
""",
    "tensorboard/__init__.py": "",
    "tensorboard/compat/__init__.py": "",
    "tensorboard/compat/proto/__init__.py": "",
    "tensorboard/compat/proto/event_pb2.py": """
class Event(dict):
    def __init__(self, wall_time, **fields):
        super().__init__(fields)
class SessionLog(dict):
    START = "start"
""",
    "tensorboard/compat/proto/summary_pb2.py": """
class Summary(dict):
    Value = dict
""",
    "tensorboard/summary/__init__.py": "",
    "tensorboard/summary/writer/__init__.py": "",
    "tensorboard/summary/writer/event_file_writer.py": SPY
    + """
class EventFileWriter:
    def __init__(self, folder):
        self.folder = folder
    def add_event(self, event):
        if "session_log" in event:
            assert event["session_log"] == {"status": "start"}
            call("open", self.folder, event["step"])
        else:
            [value] = event["summary"]["value"]
            call("scalar", value["tag"], value["simple_value"], event["step"])
    def flush(self):
        call("flush")
    def close(self):
        call("close")
""",
    "wandb/__init__.py": SPY
    + """
class Run:
    def define_metric(self, name, step_metric):
        assert (name, step_metric) == ("*", "step")
    def log(self, line):
        call("log", line)
    def finish(self):
        call("close")

def init(project, name, dir, id, resume, config):
    if project == "forbidden":
        raise RuntimeError("not logged in")
    assert resume == "allow" and os.path.isdir(dir)
    call("open", project, name, id, config["steps"])
    return Run()
""",
}


@pytest.fixture
def fake_trackers(tmp_path, monkeypatch):
    """The folder that calls are written to; the fake packages hide real ones."""
    for name, text in FAKES.items():
        path = tmp_path / "packages" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    for name in list(sys.modules):
        if name.split(".")[0] in ("tensorboard", "tensorboardX", "wandb"):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path / "packages")
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    yield tmp_path / "calls"
    for name in list(sys.modules):
        if name.split(".")[0] in ("tensorboard", "tensorboardX", "wandb"):
            del sys.modules[name]


def calls_in(path):
    calls = [json.loads(line) for line in path.read_text().splitlines()]
    path.unlink()
    return calls


@pytest.mark.parametrize("package", ["tensorboard", "tensorboardX"])
def test_tensorboard_gets_each_line(tmp_path, tokens, monkeypatch, fake_trackers, package):
    monkeypatch.setattr(
        trackers,
        "TENSORBOARD",
        ("tensorboard" if package == "tensorboard" else "absent_package", package),
    )
    argv = flags(tmp_path, tokens, "a", "--tensorboard")
    run_until(monkeypatch, 5, argv)
    first = calls_in(fake_trackers)
    folder = str(tmp_path / "runs" / "a" / "tensorboard")
    assert first[0] == ["open", folder, 1] and first[-1] == ["close"]
    assert first.count(["flush"]) == 2  # with each checkpoint
    assert train_pythia.main(argv + ["--resume", "auto"]) == 0
    second = calls_in(fake_trackers)
    assert second[0] == ["open", folder, 5]  # TensorBoard drops what was written of step 5 on
    scalars = [call[1:] for call in first + second if call[0] == "scalar"]
    assert scalars == [
        [name, value, line["step"]]
        for line in lines_of(tmp_path, "a")
        for name, value in line.items()
        if name != "step"
    ]


def test_wandb_gets_each_line_under_one_id(tmp_path, tokens, monkeypatch, fake_trackers):
    argv = flags(tmp_path, tokens, "a", "--wandb", "pythias")
    run_until(monkeypatch, 5, argv)
    first = calls_in(fake_trackers)
    assert train_pythia.main(argv + ["--resume", "auto"]) == 0
    second = calls_in(fake_trackers)
    assert first[0] == second[0] and first[0][:3] == ["open", "pythias", "a"]
    assert first[-1] == second[-1] == ["close"]
    assert [call[1] for call in first + second if call[0] == "log"] == lines_of(tmp_path, "a")
    assert train_pythia.main(flags(tmp_path, tokens, "b", "--wandb", "pythias")) == 0
    assert calls_in(fake_trackers)[0][3] != first[0][3]


def test_a_tracker_that_refuses(tmp_path, tokens, fake_trackers, capsys):
    assert (
        train_pythia.main(flags(tmp_path, tokens, "a", "--tensorboard", "--wandb", "forbidden"))
        == 1
    )
    assert "--wandb forbidden: not logged in (WANDB_MODE=offline" in capsys.readouterr().err
    assert calls_in(fake_trackers)[-1] == ["close"]  # TensorBoard's


@pytest.mark.parametrize(
    "more, said",
    [
        (
            ["--tensorboard"],
            "--tensorboard needs the package tensorboard or tensorboardX: pip install",
        ),
        (["--wandb", "pythias"], "--wandb needs the package wandb: pip install wandb"),
    ],
)
def test_a_tracker_that_is_not_installed(tmp_path, tokens, monkeypatch, capsys, more, said):
    monkeypatch.setattr(trackers, "_installed", lambda package: False)
    assert train_pythia.main(flags(tmp_path, tokens, "a", *more)) == 1
    assert said in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()  # before anything began


def test_the_command_to_go_on_names_the_trackers(tmp_path):
    run = train_pythia.Run(tmp_path / "a", *[None] * 9, tensorboard=True, wandb="p q")
    assert train_pythia.resume_command(run).endswith("--tensorboard --wandb 'p q'")
