"""apps/train_pythia.py and apps/generate.py as a person meets them: runs, and how they go on."""

import dataclasses
import hashlib
import io
import json
from types import SimpleNamespace

import generate
import numpy as np
import pytest
import train_pythia
from small_runs import checkpoint_of, flags, lines_of, numbers_of, proofs_of, run_until

import needle as ndl
from needle.checkpoint import Checkpoint, list_checkpoints
from needle.data import megatron
from needle.data.__main__ import main as data
from needle.files import printable
from needle.models import pythia
from needle.training import evaluate
from needle.training import plot as plots
from needle.training import run as run_parts
from needle.training.export import main as hf
from needle.training.settings import Settings, complete, data_of, parse

# ---- a whole run ------------------------------------------------------------------------------


def test_run_writes_its_files_and_is_continued_by_generate(tmp_path, texts, capsys, monkeypatch):
    monkeypatch.setattr(run_parts, "plot", plots.plot)
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
    manifest = json.loads((folder / "manifest.json").read_text())
    digest = hashlib.sha256((folder / "tokenizer.json").read_bytes()).hexdigest()
    assert manifest["tokenizer"] == digest
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
    size = ndl.data.token_bytes(model.tokenizer)[targets].sum() / targets.size  # of a token
    bits = lines[-1]["val_loss"] / np.log(2) / size
    assert lines[-1]["val_bits_per_byte"] == pytest.approx(bits, rel=1e-9)

    def continuation(*words):
        fixed = "--seed 1 --max-new-tokens 9 --device cpu".split()
        assert generate.main([*map(str, words), *fixed]) == 0
        return capsys.readouterr().out

    seeded = continuation(folder, "--prompt", "def ")
    monkeypatch.setattr("sys.stdin", io.StringIO("def "))
    assert continuation(folder, "--prompt", "-") == seeded
    there = tmp_path / "there"
    model.save_pretrained(there)
    (there / "tokenizer.json").unlink()
    beside = "--tokenizer", folder / "tokenizer.json"
    assert continuation(there, "--prompt", "def ", *beside) == seeded


def test_run_on_preshuffled_rows_has_no_held_out_loss_and_a_sample(
    tmp_path, documents, monkeypatch
):
    monkeypatch.setattr(megatron, "ROW_LENGTH", 17)
    data, rows = documents("rows", [17] * 12)
    assert train_pythia.main(flags(tmp_path, data, "a")) == 0
    assert not any("val_loss" in line for line in lines_of(tmp_path, "a"))
    sample = (tmp_path / "runs" / "a" / "sample.txt").read_text().split()
    assert [*map(int, sample[:16])] == rows[0][:16].tolist()


def test_run_goes_on_with_other_evaluations_saves_and_proofs(tmp_path, run, tokens, monkeypatch):
    """Checkpoints stay that an earlier --keep names."""
    run_until(monkeypatch, 3, flags(tmp_path, tokens, "a", "--keep 1 --keep-optimizer"))
    more = "--eval-every 4 --save-every 3 --prove 3 --keep 3 --keep-optimizer"
    assert run("a", "--resume auto", more) == 0
    assert [x["step"] for x in lines_of(tmp_path, "a") if "val_loss" in x] == [4, 6]
    assert [*proofs_of(tmp_path, "a")] == [1, 2, 3, 6]
    assert ndl.open_run(tmp_path / "runs" / "a").steps == [1, 2, 3, 6]
    assert checkpoint_of(tmp_path, "a", 3).exists()


def test_finished_run_says_how_to_go_on(tmp_path, run, capsys):
    """A constant one by more steps (test_replay.py), another from its weights."""
    for schedule, ends in ("cosine", f"--init {tmp_path}/runs/cosine"), ("constant", "--steps N"):
        words = schedule, f"--warmup 0 --schedule {schedule} --steps 3"
        assert run(*words) == 0 and run(*words) == 1
        assert "there is a run of this name already" in capsys.readouterr().err
        assert run(*words, "--resume auto") == 0
        said = " ".join(capsys.readouterr().out.split())
        assert "nothing to do: all 3 steps are done" in said and said.endswith(ends)


EVIL = "\x1b]0;title\x07"


@pytest.mark.filterwarnings("error:Glyph")  # which has the character
def test_escape_sequences_from_outside_are_not_printed_raw(tmp_path, texts, monkeypatch, capsys):
    """In names of runs and files, and what a model writes, which its file keeps."""
    texts = texts.rename(tmp_path / f"texts{EVIL}")
    (texts / f"{EVIL}.dat").write_bytes(b"\xff\xfe")
    monkeypatch.setattr(run_parts, "sample_text", lambda run: f"sample{EVIL}")
    monkeypatch.setattr(generate, "stream_text", lambda *args, **more: iter(["one ", EVIL]))
    folder, argv = tmp_path / "runs" / f"a{EVIL}", flags(tmp_path, texts, f"a{EVIL}")
    for main, code, *words in (
        (train_pythia.main, 0, *argv),
        (train_pythia.main, 1, *argv),
        (generate.main, 0, folder, "--prompt", f"x{EVIL}"),
        (evaluate.main, 0, folder, "--data", texts, "--limit", "50"),
        (plots.main, 0, folder, "--out", tmp_path / f"a{EVIL}.svg"),
        (data, 0, "view", folder, "--step", "1"),
        (hf, 0, "export", folder, tmp_path / f"out{EVIL}"),
    ):
        assert main([*map(str, words)]) == code
        shown = "".join(capsys.readouterr())
        assert "\x1b" not in shown and "\x07" not in shown and "\\x1b]0;title\\x07" in shown, shown
    assert (folder / "sample.txt").read_text() == f"sample{EVIL}"


# ---- after the last step ----------------------------------------------------------------------


def test_plot_and_sample_that_fail_are_reported(tmp_path, tokens, monkeypatch, capsys):
    def failing(*args):
        raise RuntimeError("it fails here")

    argv, folder = flags(tmp_path, tokens, "a", steps=2), tmp_path / "runs" / "a"
    with monkeypatch.context() as patch:
        patch.setattr(run_parts, "plot", plots.plot)
        patch.setattr(plots, "draw", failing)
        patch.setattr(run_parts, "sample_text", failing)
        assert train_pythia.main(argv) == 0
    said = capsys.readouterr().out
    assert f"checkpoint: {folder}" in said
    for file in "loss.png", "sample.txt":
        assert f"no {file}: it fails here\n" in said


# ---- what decides bits ------------------------------------------------------------------------


def test_library_gpu_and_variables_decide_the_bits_of_products(monkeypatch):
    """A run that goes on with other products says so, as below of FP8."""
    facts = {"products": "cuBLASLt 13.1.0", "name": "NVIDIA H200"}
    gpu = SimpleNamespace(is_host=False, properties=lambda: facts)
    for name, value in ("NEEDLE_ARCH", ""), ("NEEDLE_ALGORITHM", ""), ("NEEDLE_TF32", "1"):
        monkeypatch.setenv(name, value)
    found = run_parts.products_of(SimpleNamespace(device=gpu, fp8=False))
    assert found == "cuBLASLt 13.1.0 on NVIDIA H200, NEEDLE_TF32=1"


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
    auto = complete(parse(["--model", "auto"]), on_gpu=False)
    assert (auto.model, auto.steps) == ("tiny", 600)
    given = Settings(batch_size=2, seq_len=16, grad_accum=3, warmup=0, tokens=97)
    assert complete(given, on_gpu=False).steps == 2
    words = "--fp8 --context-parallel 2 --batch-size 1 --seq-len 32".split()
    assert complete(parse(words), on_gpu=False, ranks=2).fp8  # each has 16 tokens of a sequence


def test_vocabulary_is_that_of_the_preset_the_flag_or_the_tokenizer():
    for words, of_tokenizer, of_model in (
        ("--model pythia-70m", 50_257, 50_304),
        ("--vocab-size 300", 300, 300),
        ("", 64, 64),
    ):
        settings = complete(parse(words.split()), on_gpu=False)
        assert data_of(settings)["vocab_size"] == of_tokenizer
        assert run_parts.model_config(settings, of_tokenizer).vocab_size == of_model
    of_file = complete(Settings(config={"model": "pythia", "vocab_size": 99}), on_gpu=False)
    assert data_of(of_file)["vocab_size"] == 99
    raised = [run_parts.model_config(settings, needed).vocab_size for needed in (65, 128, 129)]
    assert raised == [128, 128, 256]
    longer = complete(Settings(config={"model": "pythia", "max_seq_len": 64}, seq_len=16), False)
    assert run_parts.model_config(longer).max_seq_len == 64
    sparse = run_parts.model_config(complete(parse(["--sparse", "local", "--window", "8"]), False))
    assert (sparse.sparse_pattern, sparse.sparse_window) == ("local", 8)


# ---- FP8 -----------------------------------------------------------------------------------------


def test_run_names_its_products_in_fp8_and_resumes_with_others(
    tmp_path, tokens, monkeypatch, capsys
):
    more, losses = ["--grad-accum", "2", "--schedule", "constant"], []
    for parts, least in ("head", 64), ("head and layers", 32):
        monkeypatch.setattr(pythia, "FP8_LAYERS_FROM", least)
        assert train_pythia.main(flags(tmp_path, tokens, parts.split()[-1], "--fp8", *more)) == 0
        products = f"products of {parts} in FP8 (operands e4m3, gradients e5m2)"
        said = " ".join(capsys.readouterr().out.split())
        assert f" {products}, all others in float32 " in said
    again = ["--resume", str(tmp_path / "runs" / "head"), "--device", "cpu", "--steps", "7"]
    assert train_pythia.main(again) == 0
    said = " ".join(capsys.readouterr().out.split())
    library = ndl.cpu().properties()["products"]
    before = f"{library}, products of head in FP8 (operands e4m3, gradients e5m2)"
    now = f"these by {library}, {products}: bits may differ"
    assert f"its steps were multiplied by {before}, {now}" in said
    assert train_pythia.main(flags(tmp_path, tokens, "plain", *more)) == 0
    assert "FP8" not in capsys.readouterr().out
    for run in "head", "layers", "plain":
        losses.append([line["loss"] for line in numbers_of(tmp_path, run)][:6])
    assert losses[0] != losses[1] != losses[2]
    np.testing.assert_allclose(losses[:2], [losses[2]] * 2, rtol=0.01)


def test_parts_that_cannot_be_in_fp8_are_not_said_to_be(monkeypatch):
    monkeypatch.setattr(pythia, "FP8_LAYERS_FROM", 32)
    config = ndl.PythiaConfig(vocab_size=64, hidden_size=32, num_layers=1, num_heads=2)
    plain = dataclasses.replace(config, use_parallel_residual=False)
    for context, one, parts in (
        (1, config, "head and layers"),
        (2, config, "head"),
        (1, plain, "head"),
    ):
        model = ndl.Pythia(one)
        parallel = SimpleNamespace(context=context, group=SimpleNamespace(rank=0, size=2))
        train_pythia.set_up(model, parallel, Settings(fp8=True, recompute=True))
        assert model.fp8 and model.parts_in_fp8 == parts and model.recompute
    model.embed_out = ndl.nn.Linear(32, 64)
    with pytest.raises(ValueError, match="^fp8: a .* a head without a bias: nn.Linear or"):
        model.use_fp8()
