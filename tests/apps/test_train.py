"""apps/train_pythia.py and apps/generate.py as a person meets them: runs, and how they go on."""

import json
import sys
import warnings
from types import SimpleNamespace

import generate
import numpy as np
import pytest
import train_pythia
from harness import DEVICES, ROOT
from harness import run as run_program
from small_runs import (
    TOKENS,
    arguments,
    checkpoint_of,
    flags,
    lines_of,
    numbers_of,
    run_until,
    without,
)

import needle as ndl
from needle.checkpoint import Checkpoint, CheckpointError, list_checkpoints
from needle.data.__main__ import main as data
from needle.files import printable
from needle.training import evaluate
from needle.training import folder as folders
from needle.training import plot as plots
from needle.training import run as run_parts
from needle.training.export import main as hf
from needle.training.settings import Settings, complete, from_json

# ---- a whole run ------------------------------------------------------------------------------


@pytest.mark.usefixtures("plots")
def test_run_writes_its_files_and_is_continued_by_generate(tmp_path, texts, capsys):
    assert train_pythia.main(flags(tmp_path, texts, "a")) == 0
    folder = tmp_path / "runs" / "a"
    files = "config.json manifest.json metrics.jsonl loss.png tokenizer.json sample.txt lock "
    files += "checkpoints"
    assert {path.name for path in folder.iterdir()} == set(files.split())
    lines = lines_of(tmp_path, "a")
    assert [(line["step"], line["tokens"]) for line in lines] == [(n, 32 * n) for n in range(1, 7)]
    for line in lines:
        assert {*"loss lr grad_norm tokens_per_second seconds".split()} <= line.keys()
        assert ("val_loss" in line) == ("val_bits_per_byte" in line) == (line["step"] in (3, 6))
    assert lines[-1]["loss"] < lines[0]["loss"]
    steps = [path.stem for path in list_checkpoints(folder / "checkpoints")]
    assert steps == ["step_6", "step_4"]
    config = json.loads((folder / "config.json").read_text())
    assert config["settings"]["lr"] == 3e-3 and config["saved"]
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")
    last = checkpoint_of(tmp_path, "a", 6)
    model, optimizer, epoch, loss = train_pythia.load_checkpoint(last)
    assert (epoch, loss) == (Checkpoint(last).state["epoch"], lines[-1]["loss"])
    assert optimizer.state_dict()["step"] == 6
    out = capsys.readouterr().out
    assert "step 6/6" in out and "held-out loss" in out
    assert printable((folder / "sample.txt").read_text()) in out
    held_out = ndl.data.run_data(config["data"]).held_out
    rows = min((len(held_out) - 1) // 16, 2 * 32) // 2 * 2  # of 16 tokens, in batches of 2
    ids = np.asarray(held_out[: 16 * rows + 1], np.int64)
    inputs, targets = ids[:-1].reshape(rows, 16), ids[1:].reshape(rows, 16)
    assert lines[-1]["val_loss"] == pytest.approx(model(inputs, targets)[1].item(), rel=1e-5)

    def continuation(where, *more, code=0):
        fixed = "--max-new-tokens 9 --device cpu".split()
        assert generate.main([str(where), "--prompt", "def ", *fixed, *map(str, more)]) == code
        out, error = capsys.readouterr()
        return error if code else out

    seeded = continuation(folder, "--seed", "1")
    assert continuation(folder, "--seed", "1") == seeded
    greedy = continuation(folder, "--temperature", "0", "--top-k", "5", "--top-p", "0.9")
    assert greedy.startswith("def ")
    stopped = continuation(folder, "--stop", "e", "--repetition-penalty", "1.2", "--seed", "1")
    assert "e" not in stopped[4:]
    there = tmp_path / "there"
    model.save_pretrained(there)
    assert continuation(there, "--seed", "1") == seeded
    more = ndl.data.load_tokenizer(folder)
    more.add_tokens([f"<{i}>" for i in range(500)])
    more.save(str(there / "more.json"))
    unknown = "--prompt", "<499>", "--tokenizer", there / "more.json"
    assert "is outside the vocabulary of" in continuation(there, *unknown, code=1)
    (there / "tokenizer.json").unlink()
    assert "no tokenizer.json lies with it; give --tokenizer" in continuation(there, code=1)


@pytest.mark.usefixtures("plots")
def test_finished_run_is_refused_or_finished_again_and_says_how_to_go_on(tmp_path, tokens, capsys):
    for schedule in "cosine", "constant":
        argv = flags(tmp_path, tokens, schedule, "--warmup 0 --schedule", schedule, steps=3)
        assert train_pythia.main(argv) == 0 and train_pythia.main(argv) == 1
        assert "there is a run of this name already" in capsys.readouterr().err
        folder = tmp_path / "runs" / schedule
        for file in "loss.png", "sample.txt":  # of a kill before the end
            (folder / file).unlink()
        assert train_pythia.main([*argv, "--resume", "auto"]) == 0
        said = " ".join(capsys.readouterr().out.split())
        assert "plot: " in said and "sample (" in said and "nothing to do" in said
        assert (folder / "sample.txt").read_text() and (folder / "loss.png").stat().st_size
        longer = train_pythia.main([*argv, "--resume", "auto", "--steps", "5"])
        error = capsys.readouterr().err
        if schedule == "cosine":
            assert said.endswith(f"--init {folder}") and longer == 1
            assert "--steps is 5, but the run has 3, where its cosine schedule ends" in error
            assert f"--init {folder}" in error
    assert said.endswith("--steps N") and longer == 0
    assert (
        train_pythia.main(flags(tmp_path, tokens, "b", "--schedule constant --warmup 0", steps=5))
        == 0
    )
    losses = [[line["loss"] for line in lines_of(tmp_path, name)] for name in ("constant", "b")]
    assert losses[0] == losses[1]


EVIL = "\x1b]0;title\x07"


@pytest.mark.filterwarnings("error:Glyph")  # which has the character
def test_escape_sequences_from_outside_are_not_printed_raw(tmp_path, texts, monkeypatch, capsys):
    """In names of runs, folders and files, keys of JSON, names of tensors, and what a model writes,
    which its file keeps."""

    def said(main, *words, code=0):
        try:
            assert main([*map(str, words)]) == code
        except SystemExit as end:
            assert end.code == code
        shown = "".join(capsys.readouterr())
        assert "\x1b" not in shown and "\x07" not in shown and "\\x1b]0;title\\x07" in shown, shown
        return shown

    texts = texts.rename(tmp_path / f"texts{EVIL}")
    (texts / f"{EVIL}.dat").write_bytes(b"\xff\xfe")
    lines, config = tmp_path / "lines.jsonl", tmp_path / "c.json"
    for path in lines, config:
        path.write_text(json.dumps({EVIL: "text"}) + "\n")
    monkeypatch.setattr(run_parts, "sample_text", lambda run: f"sample{EVIL}")
    monkeypatch.setattr(generate, "stream_text", lambda *args, **more: iter(["one ", EVIL]))
    argv, folder = flags(tmp_path, texts, f"a{EVIL}"), tmp_path / "runs" / f"a{EVIL}"
    shown = said(train_pythia.main, *argv)
    for text in "run: ", "checkpoint: ", "tokenising ", "are not UTF-8", " sample":
        assert text in " ".join(shown.split())
    assert (folder / "sample.txt").read_text() == f"sample{EVIL}"
    checkpoint_of(tmp_path, f"a{EVIL}", 6).unlink()
    none, out = tmp_path / f"none{EVIL}", tmp_path / f"out{EVIL}"
    for main, code, *words in (
        (train_pythia.main, 1, *argv),
        (train_pythia.main, 0, *argv, "--resume", "auto"),
        (train_pythia.main, 0, *argv, "--resume", "auto", "--name", f"b{EVIL}"),
        (
            train_pythia.main,
            1,
            *without(flags(tmp_path, lines, "c", "--config", config), "--model"),
        ),
        (train_pythia.main, 1, *flags(tmp_path, lines, "c")),
        (generate.main, 0, folder, "--prompt", f"x{EVIL}"),
        (generate.main, 1, none),
        (evaluate.main, 0, folder, "--data", texts, "--limit", "50"),
        (evaluate.main, 1, folder, "--data", none),
        (plots.main, 0, folder, "--out", tmp_path / f"a{EVIL}.svg"),
        (plots.main, 1, none),
        (data, 0, "view", folder, "--step", "1"),
        (data, 0, "inspect", texts),
        (hf, 0, "export", folder, out),
        (hf, 1, "export", folder, out),
        *((one, 2, "x", f"--{EVIL}") for one in (train_pythia.main, generate.main, plots.main)),
    ):
        said(main, *words, code=code)
    model = ndl.nn.Linear(2, 2)
    model.stray = {EVIL: ndl.nn.Parameter(np.ones(2))}
    path = ndl.save(model, None, tmp_path / "m.safetensors")
    with pytest.raises(ValueError) as caught:
        ndl.load(path, ndl.nn.Linear(2, 2))
    assert "\x1b" not in str(caught.value) and "\\x1b]0;title\\x07 is unknown" in str(caught.value)


# ---- after the last step ----------------------------------------------------------------------

CHILD = """
import os, sys
sys.path.insert(0, sys.argv.pop(1))
import train_pythia
from needle.models import pythia
from needle.processes import program
from needle.training import run as run_parts
from needle.training.session import Session
pythia.PRESETS["tiny"], run_parts.SAMPLE_TOKENS = (2, 32, 2, 64), 20
if "auto" in sys.argv:  # whose reader goes after the last step
    reader, writer = os.pipe()
    os.dup2(writer, 1)
    os.close(writer)
    finish_again = run_parts.finish_again
    run_parts.finish_again = lambda run: os.close(reader) or finish_again(run)
sys.exit(program(train_pythia.main))
"""


def test_environment_does_not_decide_the_end_of_a_run(tmp_path, texts):
    """Notebooks name a backend of matplotlib, $ begins a formula there, an output may take ASCII
    alone, and its reader go after the last step."""
    name = "a$b_{$\\"
    folder = tmp_path / "runs" / name
    environ = {"MPLBACKEND": "module://not_installed.backend", "LC_ALL": "C", "PYTHONUTF8": "0"}
    for more in [], ["--resume", "auto"]:
        words = [ROOT / "apps", *flags(tmp_path, texts, name, *more, steps=2)]
        done = run_program(
            *(sys.executable, "-c", CHILD, *words),
            PYTHONPATH=ROOT,
            PYTHONCOERCECLOCALE="0",
            **environ,
        )
        assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
        assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")
        sample = (folder / "sample.txt").read_text()
        if not more:
            assert f"plot: {folder}/loss.png" in done.stdout and not sample.isascii()
            shown = printable(sample).encode("ascii", "backslashreplace").decode()
            assert shown in done.stdout
        (folder / "sample.txt").unlink(), (folder / "loss.png").unlink()


@pytest.mark.usefixtures("plots")
def test_plot_and_sample_that_fail_are_reported(tmp_path, tokens, monkeypatch, capsys):
    def failing(*args):
        raise RuntimeError("it fails here")

    argv, folder = flags(tmp_path, tokens, "a", steps=2), tmp_path / "runs" / "a"
    for module, part, file in (plots, "draw", "loss.png"), (run_parts, "sample_text", "sample.txt"):
        with monkeypatch.context() as patch:
            patch.setattr(module, part, failing)
            assert train_pythia.main(argv) == 0
        said, argv = capsys.readouterr().out, [*argv, "--resume", "auto"]
        assert f"no {file}: it fails here\n" in said and f"checkpoint: {folder}" in said
        for file in "loss.png", "sample.txt":  # neither can be written
            (folder / file).unlink(missing_ok=True)
            (folder / file).mkdir()
        assert train_pythia.main([*argv, "--resume", "auto"]) == 0
        said = capsys.readouterr().out
        for file in "loss.png", "sample.txt":
            assert f"no {file}: {folder}/{file}: cannot be written" in said
            (folder / file).rmdir()


# ---- resuming ---------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("accumulate", [1, 5])
def test_resumed_run_equals_an_uninterrupted_one(
    tmp_path, tokens, monkeypatch, dtype, accumulate, device, capsys
):
    # 5 micro-batches a step and 12 an epoch: epochs end inside steps 3 and 5.
    more = ["--grad-accum", str(accumulate)]
    if accumulate == 1:
        more += ["--batch-size", "9"]  # 2 batches an epoch
    options = dict(device=device, dtype=dtype)
    assert train_pythia.main(flags(tmp_path, tokens, "whole", *more, **options)) == 0
    argv = flags(tmp_path, tokens, "parts", *more, "--resume", "auto", **options)
    run_until(monkeypatch, 1, argv)  # before the first checkpoint
    run_until(monkeypatch, 4, argv)  # the last checkpoint is of step 2
    assert " ".join(capsys.readouterr().out.split()).count("starting from the beginning") == 2
    assert [line["step"] for line in lines_of(tmp_path, "parts")] == [1, 2, 3]
    np.random.seed(99)  # whatever else the process did
    run_until(monkeypatch, 5, [*argv, "--recompute"])  # the flag changes no bit
    bad = checkpoint_of(tmp_path, "parts", 4)
    bad.write_bytes(bad.read_bytes()[:-1])
    capsys.readouterr()
    short = arguments(f"--resume auto --device {device} --out", tmp_path / "runs")
    assert train_pythia.main(short) == 0  # the newest run
    out = capsys.readouterr().out
    assert f"skipped: {bad}" in out and "step_2.safetensors after step 2" in out
    assert numbers_of(tmp_path, "parts") == numbers_of(tmp_path, "whole")
    ends = [checkpoint_of(tmp_path, name, 6).read_bytes() for name in ("parts", "whole")]
    assert ends[0] == ends[1]  # the state of NumPy's generator too
    assert lines_of(tmp_path, "whole")[-1]["tokens"] > len(TOKENS)  # an epoch has ended


def test_resuming_with_other_settings_data_or_files_is_refused(tmp_path, tokens, capsys):
    assert train_pythia.main(flags(tmp_path, tokens, "a")) == 0
    before = (tmp_path / "runs" / "a" / "metrics.jsonl").read_text()
    length = without(flags(tmp_path, tokens, "a"), "--steps")
    other, alone = tmp_path / "other.npy", tmp_path / "elsewhere" / "kept" / "kept.safetensors"
    np.save(other, TOKENS + 1)
    alone.parent.mkdir(parents=True)  # whose grandparent is no run's folder
    alone.write_bytes(checkpoint_of(tmp_path, "a", 6).read_bytes())
    for argv, resume, *texts in (
        (
            flags(tmp_path, tokens, "a", "--lr", "0.5", steps=9), "auto",
            "--lr is 0.5, but the run has 0.003", "--steps is 9, but the run has 6",
        ),
        ([*length, "--tokens", "193"], "auto", "--steps is 7, but the run has 6, where its cosine"),
        (flags(tmp_path, other, "a"), "auto", "not the tokens that the run read before"),
        (length, alone, f"a new run starts from its weights: --init {alone}"),
        *((length, path, str(path)) for path in (tokens, tmp_path / "missing", tmp_path)),
    ):  # fmt: skip
        assert train_pythia.main([*argv, "--resume", str(resume)]) == 1
        error = capsys.readouterr().err
        assert all(text in error for text in texts), error
        assert (tmp_path / "runs" / "a" / "metrics.jsonl").read_text() == before
    assert train_pythia.main([*length, "--tokens", "192", "--resume", "auto"]) == 0
    assert [path.name for path in (tmp_path / "elsewhere").iterdir()] == ["kept"]
    path = checkpoint_of(tmp_path, "a", 6)
    model, optimizer, epoch, loss = Checkpoint(path).restore()
    extra = ("settings", "step", "data", "fingerprint", "schedule")
    kept = {key: Checkpoint(path).state[key] for key in extra}
    for state, said in [
        ({"settings": 3}, "it has no settings"),
        ({"settings": {"model": "tiny"}}, "batch_size is missing, clip is missing"),
        ({"step": "six"}, "it has no step"),
        ({"data": {}}, "no position: epoch is None"),
        ({"data": {"epoch": 0, "batch": 10**8}}, "no position epoch 0, batch 100000000"),
    ]:
        ndl.save_checkpoint(model, optimizer, epoch, loss, path, **kept | state)
        assert train_pythia.main(flags(tmp_path, tokens, "a", "--resume", "auto")) == 1
        error = capsys.readouterr().err
        assert said in error and str(path) in error and error.count("\n") == 1


def test_run_resumes_from_another_folder(tmp_path, tokens, monkeypatch):
    """Its data were named from where it began; the flags of one start are given again."""
    monkeypatch.chdir(tmp_path)
    run_until(monkeypatch, 3, flags(tmp_path, tokens.name, "a"))
    (tmp_path / "else").mkdir()
    monkeypatch.chdir(tmp_path / "else")
    seen, train = [], train_pythia.train
    monkeypatch.setattr(train_pythia, "train", lambda run: seen.append(run.model) or train(run))
    assert train_pythia.main(["--resume", "../runs/a", "--device", "cpu", "--recompute"]) == 0
    assert [model.recompute for model in seen] == [True]


def test_other_words_of_equal_ids_are_refused(tmp_path, capsys):
    """A tokenizer that is trained anew numbers them as those before: the run's own does not."""
    text = tmp_path / "a.txt"
    words = np.array(["alpha", "betq", "gamma"])
    text.write_text(" ".join(np.random.default_rng(0).choice(words, 9000)))
    argv = flags(tmp_path, text, "a", "--vocab-size", 300)
    assert train_pythia.main(argv) == 0
    before = text.read_text()
    text.write_text(before.replace("betq", "betr"))
    assert train_pythia.main([*argv, "--resume", "auto"]) == 1
    assert "not the tokens that the run read before" in capsys.readouterr().err
    text.write_text(before)
    assert train_pythia.main([*argv, "--resume", "auto"]) == 0


# ---- what decides bits ------------------------------------------------------------------------


def test_resuming_with_other_products_is_said(tmp_path, tokens, capsys, monkeypatch):
    """The library and the table that decide how products are computed decide their bits."""
    argv = flags(tmp_path, tokens, "a", "--resume", "auto")
    run_until(monkeypatch, 3, argv)
    products = ndl.cpu().properties()["products"]
    assert products and Checkpoint(checkpoint_of(tmp_path, "a", 2)).state["products"] == products
    capsys.readouterr()
    run_until(monkeypatch, 5, argv)
    out = capsys.readouterr().out
    assert "resuming" in out and "bits may differ" not in out
    monkeypatch.setattr(
        folders, "check_state", lambda checkpoint: checkpoint.state.update(products="abacus")
    )
    assert train_pythia.main(argv) == 0
    said = f"its steps were multiplied by abacus, these by {products}: bits may differ"
    assert said in " ".join(capsys.readouterr().out.split())
    facts = {"products": "cuBLASLt 13.1.0", "name": "NVIDIA H200"}
    gpu = SimpleNamespace(is_host=False, properties=lambda: facts)
    for name in run_parts.GPU_KERNELS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NEEDLE_TF32", "1")
    model = SimpleNamespace(device=gpu, fp8=False)
    assert run_parts.products_of(model) == "cuBLASLt 13.1.0 on NVIDIA H200, NEEDLE_TF32=1"


def test_sparse_attention_is_remembered_and_its_window_a_quarter_of_the_sequence(tmp_path, tokens):
    """Also of a run that is resumed; a run of its own window goes on with that."""
    for name, flag, length, window in (
        ("quarter", "", 300, 75), ("block", "", 200, 64), ("own", "--window 256", 200, 256),
    ):  # fmt: skip
        more = f"--sparse local --seq-len {length} --batch-size 1 {flag}"
        argv = flags(tmp_path, tokens, name, more, steps=1)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            for resume in ([], ["--resume", "auto"]):
                assert train_pythia.main([*argv, *resume]) == 0
                config = ndl.open_run(tmp_path / "runs" / name).config
                assert config.use_sparse_attention and config.sparse_pattern == "local"
                assert config.sparse_window == window
        assert any("attention is dense" in str(w.message) for w in said) == (name == "own")


@pytest.mark.cuda
def test_graph_changes_no_bit_and_may_change_at_a_resume(tmp_path, tokens, monkeypatch):
    more = ["--grad-accum", "2"]
    plain = flags(tmp_path, tokens, "plain", *more, "--no-graph", device="cuda")
    assert train_pythia.main(plain) == 0
    run_until(monkeypatch, 3, flags(tmp_path, tokens, "cut", *more, "--graph", device="cuda"))
    argv = flags(tmp_path, tokens, "cut", *more, "--resume", "auto", device="cuda")
    run_until(monkeypatch, 5, [*argv, "--no-graph"])
    assert train_pythia.main(argv) == 0
    assert numbers_of(tmp_path, "cut") == numbers_of(tmp_path, "plain")
    for step in 4, 6:
        found, wanted = (checkpoint_of(tmp_path, name, step) for name in ("cut", "plain"))
        assert found.read_bytes() == wanted.read_bytes()


def test_defaults_follow_device_and_model():
    cpu = complete(Settings(), on_gpu=False)
    assert (cpu.model, cpu.dtype, cpu.steps, cpu.warmup) == ("tiny", "float32", 600, 60)
    gpu = complete(Settings(), on_gpu=True)
    assert (gpu.model, gpu.dtype, gpu.seq_len) == ("pythia-70m", "bfloat16", 2048)
    assert complete(Settings(model="pythia-410m"), on_gpu=True).lr == 3e-4
    own = {"model": "pythia", "max_seq_len": 64, "dtype": "bfloat16"}
    own = complete(Settings(config=own), on_gpu=False)
    assert (own.model, own.seq_len, own.dtype) == ("pythia", 64, "bfloat16")
    assert (own.batch_size, own.steps, own.lr) == (4, 100, 1e-3)  # not those of tiny
    given = Settings(batch_size=2, seq_len=16, grad_accum=3, warmup=0, tokens=97)
    assert complete(given, on_gpu=False).steps == 2


def test_settings_of_a_file_that_are_unknown_or_missing_are_one_error(tmp_path):
    """Those of the first release are taken, which had a window of all."""
    path = tmp_path / "config.json"
    made = complete(Settings(steps=4, fp8=True, import_="no.py", config={}, keep="log"), False)
    good = json.loads(json.dumps(made.to_json()))
    assert from_json(good, path) == made
    sparse = {name: value for name, value in good.items() if value is not None}
    assert from_json(sparse | {"window": 256}, path).window == 256
    for name in "batch_size", "seed":
        del good[name]
    said = "config.json: .* used: batch_size is missing, colour is unknown, seed is missing$"
    with pytest.raises(CheckpointError, match=said):
        from_json({**good, "colour": "red"}, path)
