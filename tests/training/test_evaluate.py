"""Perplexity: scores against a float64 softmax of the model's own logits, windows against a loop
that walks the text token by token, and the command on files."""

import json
import math

import numpy as np
import pytest
from harness import log_probabilities, naming, small_pythia

import needle as ndl
from needle.data import DataError, megatron
from needle.models.pythia import Pythia
from needle.training import evaluate

VOCABULARY = 300


def small(device=None, **changes) -> Pythia:
    model = small_pythia(device, 3, **{"vocab_size": VOCABULARY, "max_seq_len": 24} | changes)
    head = model.embed_out.weight
    head.cached_data[:, :] = np.random.standard_normal(head.shape)
    return model


def tokens(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, VOCABULARY, count).astype(np.uint16)


def test_score(device, monkeypatch):
    """The logits of a batch are computed in parts."""
    monkeypatch.setattr(evaluate, "LOGITS", 5 * VOCABULARY)
    model = small(device)
    random = np.random.default_rng(1)
    rows = []
    for length in (3, 24, 1, 7, 7, 24, 12):
        count = int(random.integers(1, length + 1))
        text = tokens(length + 1, seed=length)
        rows.append((text[:-1].tolist(), text[1:][-count:].tolist()))
    rows.append((text, [int(log_probabilities(model, text)[-1].argmax())]))
    got = {index: (logprobs, hits) for index, logprobs, hits in evaluate.score(model, rows, 3)}
    assert sorted(got) == list(range(len(rows)))
    for index, (inputs, targets) in enumerate(rows):
        logprobs, hits = got[index]
        assert logprobs.dtype == np.float32 and hits.dtype == bool
        for i, target in enumerate(targets):
            end = len(inputs) - len(targets) + i + 1
            wanted = log_probabilities(model, np.array(inputs[:end]))[-1]
            assert abs(logprobs[i] - wanted[target]) < 1e-5
            assert hits[i] == (wanted.argmax() == target)
    assert hits[0]


def test_perplexity():
    """The first window is as long as it may be, each other one ends `stride` tokens further."""
    model, text = small(), tokens(53)
    for seq_len, stride, row_length in (24, 24, 53), (10, 4, 53), (10, 1, 53), (6, 3, 10):
        told, sizes = [], dict(batch_size=3, row_length=row_length, per_token=True)
        scores = evaluate.perplexity(model, text, seq_len, stride, **sizes, progress=told.append)
        wanted = np.full(len(text), np.nan)
        for begin in range(0, len(text), row_length):  # rows stand alone; the last is shorter
            row = text[begin : begin + row_length]
            for at in range(1, len(row)):
                end = min(seq_len + -(-max(at - seq_len, 0) // stride) * stride, len(row) - 1)
                logprobs = log_probabilities(model, row[max(end - seq_len, 0) : at])[-1]
                wanted[begin + at] = -logprobs[row[at]]
        with naming(seq_len, stride, row_length):
            np.testing.assert_allclose(scores.per_token, wanted, rtol=0, atol=2e-5)
            assert scores.tokens == np.isfinite(wanted).sum() == 53 - -(-53 // row_length)
            assert sum(told) == scores.tokens
            assert scores.text_bytes is scores.bits_per_byte is None
            assert math.isclose(scores.nats, np.nansum(wanted), rel_tol=1e-6)
            assert math.isclose(scores.perplexity, math.exp(np.nanmean(wanted)), rel_tol=1e-5)
    assert evaluate.perplexity(model, text).per_token is None
    far = evaluate.Scores(1, 800.0, 0, None)  # of a special token, which has no text
    assert far.perplexity == math.inf and far.bits_per_byte is None


def test_foreign_tokens_are_named_by_place(tmp_path):
    ids = tokens(60)
    ids[37] = VOCABULARY + 5
    with pytest.raises(DataError, match=r"token 37: id 305 is outside the vocabulary of 300"):
        evaluate.perplexity(small(), ids)
    ids.tofile(tmp_path / "ids.bin")
    opened = ndl.data.open_data(tmp_path / "ids.bin")
    with pytest.raises(DataError, match=r"ids\.bin: offset 74: id 305"):
        evaluate.perplexity(small(), opened.train)


def test_rows_and_sizes_that_cannot_be_are_refused():
    for inputs, targets, message in (
        ([], [], "1 <= targets"),
        ([1, 2], [1, 2, 3], "1 <= targets"),
        ([1] * 25, [1], "max_seq_len"),
        ([1, VOCABULARY], [1], "outside the vocabulary"),
        ([1, 2], [-1], "outside the vocabulary"),
        ([1, 2], [VOCABULARY], "target 300 is outside the vocabulary"),
    ):
        with naming(inputs, targets), pytest.raises(ValueError, match=message):
            list(evaluate.score(small(), [(inputs, targets)]))
    for changes, message in (
        ({"seq_len": 25}, "max_seq_len"),
        ({"seq_len": 8, "stride": 9}, "stride"),
        ({"seq_len": 8, "stride": 0}, "stride"),
        ({"batch_size": 0}, "batch_size must be 1 or more, not 0"),
        ({"tokens": tokens(1)}, "two or more"),
    ):
        with naming(changes), pytest.raises(ValueError, match=message):
            evaluate.perplexity(small(), **{"tokens": tokens(40)} | changes)


# ---- the command --------------------------------------------------------------------------------

TEXT = "The cat sat on the mat, and the café by the sea was never quite as quiet again.\n" * 20


@pytest.fixture
def run(tmp_path, monkeypatch):
    """The folder of a run: a checkpoint and its tokenizer, a byte-level one."""
    monkeypatch.setenv("NEEDLE_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "run"
    ndl.save_checkpoint(small(), None, 0, 1.0, folder / "checkpoints" / "step_3.safetensors")
    ndl.data.train_tokenizer(iter([TEXT]), VOCABULARY).save(str(folder / "tokenizer.json"))
    (tmp_path / "text.txt").write_text(TEXT)
    return folder


def command(capsys, *words) -> tuple[int, str, str]:
    """Run words, each of which may be several, on the CPU: (exit code, stdout, stderr)."""
    flat = [part for word in words for part in (word.split() if type(word) is str else [word])]
    code = evaluate.main([*map(str, flat), *([] if "--device" in flat else ["--device", "cpu"])])
    out, err = capsys.readouterr()
    return code, out, err


def test_perplexity_bytes_of_a_vocabulary_larger_than_the_tokenizers(run):
    tokenizer, ids = ndl.data.load_tokenizer(run), _encode(run)[:40]
    model = small(vocab_size=VOCABULARY + 40)
    text = np.array([*ids[:30], VOCABULARY + 3, *ids[30:]])
    lengths = ndl.data.token_bytes(tokenizer)
    scores = evaluate.perplexity(model, text, tokenizer=tokenizer)
    assert scores.text_bytes == lengths[ids[1:]].sum() > 40


def test_command(run, tmp_path, capsys):
    text, scores = tmp_path / "text.txt", tmp_path / "scores.f4"
    sizes = "--json --seq-len 16 --stride 8"
    code, out, err = command(capsys, run, "--data", text, sizes, "--per-token", scores)
    assert code == 0, err
    said = json.loads(out)
    per_token = np.load(scores)
    ids = _encode(run)
    assert len(per_token) == len(ids)
    assert said["tokens"] == np.isfinite(per_token).sum()
    assert math.isclose(said["loss"], np.nanmean(per_token, dtype=np.float64), rel_tol=1e-6)
    assert math.isclose(said["perplexity"], math.exp(said["loss"]), rel_tol=1e-9)
    # Two texts, train and held out, whose first tokens are not scored.
    kept = len(ids) - len(ids) // 20
    tokenizer = ndl.data.load_tokenizer(run)
    first = [len(tokenizer.decode([i]).encode()) for i in (ids[0], ids[kept])]
    assert said["bytes"] == len(TEXT.encode()) - sum(first)
    command(capsys, run, "--data", text, "--limit", kept + 1, sizes, "--per-token", scores)
    assert len(np.load(scores)) == kept + 1  # the last of them begins the second text
    nats = said["loss"] * said["tokens"]
    assert math.isclose(said["bits_per_byte"], nats / math.log(2) / said["bytes"], rel_tol=1e-9)
    one = run / "checkpoints" / "step_3.safetensors"
    code, out, _ = command(capsys, one, "--data", text, "--limit 50")
    assert code == 0 and "tokens          49\n" in out and "bits per byte" in out
    evaluate.load_model(run)[0].save_pretrained(tmp_path / "exported", run / "tokenizer.json")
    code, out, err = command(capsys, tmp_path / "exported", "--data", text, sizes)
    assert code == 0 and json.loads(out) == said, err
    ndl.data.train_tokenizer(iter([TEXT]), 270).save(str(tmp_path / "other.json"))
    other = ndl.data.load_tokenizer(tmp_path / "other.json").encode(TEXT).ids
    code, out, err = command(
        capsys, run, "--data", text, sizes, "--tokenizer", tmp_path / "other.json"
    )
    assert code == 0 and json.loads(out)["tokens"] == len(other) - 1 > said["tokens"], err


def _encode(run) -> list[int]:
    tokenizer = ndl.data.load_tokenizer(run)
    return tokenizer.encode(TEXT).ids + [tokenizer.token_to_id("<|endoftext|>")]


def test_tokens_without_a_tokenizer(run, tmp_path, capsys):
    (run / "tokenizer.json").unlink()
    np.save(tmp_path / "ids.npy", tokens(100))
    ids = tmp_path / "ids.npy"
    for split, count in ("train", 94), ("held-out", 4):
        code, out, err = command(capsys, run, "--data", ids, f"--split {split} --dtype bfloat16")
        assert code == 0, err
        assert f"tokens          {count}\n" in out and "bits per byte" not in out
        assert "bfloat16" in err
    code, out, err = command(capsys, run, "--data", ids, "--end-of-text e")
    assert code == 1 and out == "" and "--end-of-text: no tokenizer.json lies with" in err
    # Tokens that a tokenizer made for the occasion gives would mean nothing to the model.
    code, out, err = command(capsys, run, "--data", tmp_path / "text.txt")
    assert code == 1 and out == "" and "is text, and no tokenizer.json lies with" in err


def test_rows_that_are_preshuffled_are_scored_apart(run, tmp_path, monkeypatch, capsys):
    """The one that --limit cuts too."""
    monkeypatch.setattr(megatron, "ROW_LENGTH", 20)
    tokens(60).tofile(tmp_path / "rows.bin")
    with open(tmp_path / "rows.idx", "wb") as index:
        megatron.write_index(index, np.dtype("<u2"), [20] * 3)
    for limit, count in ("", 57), ("--limit 50", 47), ("--limit 10", 9):
        code, out, err = command(capsys, run, "--data", tmp_path / "rows", limit)
        assert code == 0 and f"tokens          {count}\n" in out, err
    # Documents that training keeps for a test are scored with all.
    tokens(3000).tofile(tmp_path / "x.bin")
    with open(tmp_path / "x.idx", "wb") as index:
        megatron.write_index(index, np.dtype("<u2"), [3] * 1000)
    for split, counts in ("all", (2907, 90, 3)), ("train", (2907,)), ("held-out", (90,)):
        code, out, err = command(capsys, run, "--data", tmp_path / "x", f"--json --split {split}")
        assert code == 0 and json.loads(out)["tokens"] == sum(counts) - len(counts), err


def test_errors_are_named(run, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for words, message in (
        ("nothing --data x", "no such file or folder"),
        ("run --data nowhere", "nowhere"),
        ("run --data text.txt --seq-len 99", "max_seq_len"),
        ("run --data text.txt --limit 1", "fewer than two tokens"),
        ("run --data text.txt --end-of-text no", "--end-of-text no: "),
        ("run --data text.txt --per-token no/x.npy", "no/x.npy: there is no such folder"),
    ):
        code, out, err = command(capsys, words)
        assert code == 1 and out == "" and message in err and "Traceback" not in err, words
    with pytest.raises(SystemExit, match="2"):
        command(capsys, run)
    assert "the following arguments are required: --data" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="0"):
        command(capsys, "--help")
    said = capsys.readouterr().out
    assert "(default: " in said
    assert "(default: None)" not in said and "(default: False)" not in said


def test_a_checkpoint_in_another_dtype_keeps_its_tokenizer(run):
    model = evaluate.load_model(run)[0]
    assert not model.training
    loaded, beside = evaluate.load_model(run, dtype="bfloat16")
    assert loaded.config.dtype == loaded.embed_in.weight.dtype == "bfloat16"
    assert loaded.tokenizer is beside and beside.to_str() == model.tokenizer.to_str()
    expected = model.embed_in.weight.cached_data.astype("bfloat16").numpy()
    np.testing.assert_array_equal(loaded.embed_in.weight.numpy(), expected)
