"""Models of any small shape by flags or by a file, and seeds apart."""

import json
import re

import numpy as np
import pytest
import train_pythia
from harness import naming
from small_runs import flags, numbers_of, tensors_of, without

import needle as ndl
from needle.data import train_tokenizer
from needle.models import gpt_neox
from needle.training.settings import Settings, complete, read_config


def newest(tmp_path, name):
    return ndl.checkpoint.list_checkpoints(tmp_path / "runs" / name / "checkpoints")[0]


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
            whole, numbers = tensors_of(newest(tmp_path, name)), numbers_of(tmp_path, name)
            newest(tmp_path, name).unlink()
            again = ["--resume", str(run.folder), "--device", "cpu", *more.split()]
            assert train_pythia.main(again) == 0
            assert numbers_of(tmp_path, name) == numbers
            assert tensors_of(newest(tmp_path, name)) == whole
        made = tmp_path / "runs" / name / "config.json"
        wanted = {"model": "pythia", **json.loads(made.read_text())["model"]}
        assert read_config(str(made)) == wanted
    shown = [line for line in capsys.readouterr().out.split("\n") if "Pythia(" in line]
    assert shown and max(map(len, shown)) <= 80
    folder = str(tmp_path / "runs" / "preset")
    for more in ("--layers 2", "--hidden 16", "--no-mlp", f"--config {toml}", "--init-seed 3"):
        with naming(more):
            assert train_pythia.main(["--resume", folder, *more.split()]) == 1
            assert f"{more.split()[0]} is " in capsys.readouterr().err
    toml.write_text("hidden_size = 16\nnum_layer = 3\n")
    listed = tmp_path / "listed.json"
    listed.write_text('{"model": {"hidden_size": 8}, "settings": {"model": "3"}}')
    for more, text in (
        (
            f"--config {toml}",
            f"{toml}: PythiaConfig: unknown fields num_layer; there are vocab_size, ",
        ),
        ("--hidden 33", "hidden_size 33 is not a multiple of num_heads 2"),
        (f"--init {folder} --layers 2", "--layers: its shape is what its weights have"),
        (f"--config {ours} --seq-len 17", "max_seq_len of --config is 16"),
        (f"--config {listed}", f"{listed}: no model '3' is registered"),
    ):
        argv = without(flags(tmp_path, tokens, "wrong", more), "--model")
        with naming(more):
            assert train_pythia.main(argv) == 1
            assert text in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        train_pythia.main(flags(tmp_path, tokens, "wrong", f"--config {ours}"))


def test_sizes_that_cannot_be_are_refused_before_the_data_are_read(
    tmp_path, texts, tokens, monkeypatch, capsys
):
    small, config = tmp_path / "small.json", tmp_path / "c.json"
    train_tokenizer(iter(["return " * 9]), 262).save(str(small))
    config.write_text('{"max_seq_len": 8}')
    assert train_pythia.main(flags(tmp_path, tokens, "init", steps=1)) == 0
    capsys.readouterr()
    monkeypatch.setattr(train_pythia, "run_data", None)
    init = tmp_path / "runs" / "init"
    for data, more, said in (
        (texts, "--heads 3", "hidden_size 32 is not a multiple of num_heads 3"),
        (texts, "--hidden 608 --heads 2", "--heads: 304 dimensions a head, but .* 256"),
        (texts, "--hidden 24 --heads 2", "rotates 3 of 12 dimensions"),
        (texts, f"--config {config}", "max_seq_len of --config is 8"),
        (texts, "--vocab-size 256", "--vocab-size 256: the tokenizer has 257 tokens"),
        (texts, f"--vocab-size 261 --tokenizer {small}", "the tokenizer has 262 tokens"),
        (tokens, f"--vocab-size 261 --tokenizer {small}", "the tokenizer has 262 tokens"),
        (texts, f"--init {init} --tokenizer {small}", "vocabulary is 64, but .* has 262 tokens"),
        (texts, f"--init {init} --seq-len 17", "--seq-len 17: it reads 16 at most"),
        (tokens, "--fp8 --vocab-size 63", "vocabulary 63 must be a multiple of 16"),
        (tokens, "--fp8 --hidden 24 --heads 3", "width 24 must be a multiple of 16"),
        (tokens, "--graph", "records no graphs"),
        (tokens, "--context-parallel 2", "1 cannot be cut into such groups"),
    ):
        argv = flags(tmp_path, data, "a", more)
        argv = without(argv, "--model") if {"--config", "--init"} & {*argv} else argv
        with naming(more):
            assert train_pythia.main(argv) == 1
            out, error = capsys.readouterr()
            assert re.search(said, error) and out == ""
    assert not (tmp_path / "runs" / "a").exists()
    for ranks, settings, said in (
        (3, {"grad_accum": 4}, "3 ranks cannot share a step of 4 micro-batches"),
        (2, {"context_parallel": 2, "seq_len": 18}, "18 tokens cannot be shared by 2 ranks"),
    ):
        with pytest.raises(ValueError, match=said):
            complete(Settings(**settings), False, ranks)


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


def test_attention_only_is_the_model_whose_mlps_write_nothing(tmp_path):
    shape = {"vocab_size": 50, "hidden_size": 32, "num_layers": 3, "num_heads": 4}
    bare = ndl.Pythia(ndl.PythiaConfig(**shape, attention_only=True))
    for parallel in True, False:
        whole = ndl.Pythia(ndl.PythiaConfig(**shape, use_parallel_residual=parallel))
        own = dict(bare.named_parameters())
        for name, parameter in whole.named_parameters():
            if name in own:
                parameter.cached_data = own[name].cached_data
            elif "dense_4h_to_h" in name:
                parameter.cached_data.fill(0.0)
        ids = np.random.RandomState(0).randint(0, 50, (2, 11))
        names = [name for name in ndl.hooks.hook_names(bare) if "rot_" not in name]
        logits, cache = bare.run_with_cache(ids, names)
        wanted, other = whole.run_with_cache(ids, names)
        np.testing.assert_allclose(logits.numpy(), wanted.numpy(), atol=2e-5)
        for name in names:
            assert not {"mlp", "ln2"} & set(name.replace("_", ".").split(".")), name
            np.testing.assert_allclose(cache[name].numpy(), other[name].numpy(), atol=2e-5)
    np.testing.assert_allclose(bare(ids)[0].numpy(), logits.numpy(), atol=2e-5)  # no hooks
    every = bare.run_with_cache(ids)[1]
    labels = every.decompose_resid(return_labels=True)[1]
    assert labels == ["embed", "0_attn_out", "1_attn_out", "2_attn_out"]
    total = every.decompose_resid().numpy().sum(0)
    np.testing.assert_allclose(total, every["resid_post", 2].numpy(), atol=2e-5)

    path = ndl.save_checkpoint(bare, None, 0, 1.0, tmp_path / "a.safetensors")
    again = ndl.load_checkpoint(path)[0]
    assert (again(ids)[0].numpy() == bare(ids)[0].numpy()).all() and again.config.attention_only
    prompt = ids[0, :4]
    tokens = bare.generate(prompt, 6, temperature=0.0)
    for length in range(4, 10):  # with the cache, as without it
        assert tokens[length] == bare(tokens[None, :length])[0].numpy()[0, -1].argmax()
    with pytest.raises(ValueError, match="no MLPs .attention_only."):
        bare.save_pretrained(tmp_path / "hf")
    assert not (tmp_path / "hf").exists()


def test_create_pythia_70m_takes_pattern_and_window():
    for sparse, window in (("local", 128), ("strided", 192)):
        with ndl.init.meta_device():
            _, config = ndl.create_pythia_70m(max_seq_len=512, sparse=sparse, window=window)
        assert config.use_sparse_attention
        assert (config.sparse_pattern, config.sparse_window) == (sparse, window)
    with ndl.init.meta_device():
        assert not ndl.create_pythia_70m()[1].use_sparse_attention
    with pytest.raises(ValueError, match="sparse_pattern"):
        ndl.create_pythia_70m(sparse="round")


def test_preset_of_another_width_has_mlps_of_four_times_that_width():
    config = ndl.PythiaConfig.preset("70m", hidden_size=64, num_heads=4)
    assert config.intermediate_size == 256
