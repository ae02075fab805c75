"""Runs of apps/train_pythia.py with --fp8."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
import train_pythia
from harness import naming
from small_runs import assert_same_run, flags, numbers_of, run_until

import needle as ndl
from needle import ops
from needle.models import pythia
from needle.training.settings import Settings


@pytest.mark.parametrize("parts", ["head", "head and layers"])
def test_a_run_in_fp8_resumes_with_the_same_bits(parts, tmp_path, tokens, monkeypatch, capsys):
    if parts != "head":
        monkeypatch.setattr(pythia, "FP8_LAYERS_FROM", 32)
    more = ("--fp8", "--grad-accum", "2")
    assert train_pythia.main(flags(tmp_path, tokens, "whole", *more)) == 0
    said = capsys.readouterr().out
    products = f"products of {parts} in FP8 (operands e4m3, gradients e5m2)"
    assert f" {products}, all others in float32 " in " ".join(said.split())
    run_until(monkeypatch, 4, flags(tmp_path, tokens, "parts", *more))
    assert train_pythia.main(["--resume", str(tmp_path / "runs" / "parts")]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert f" {products}" in said and "bits may differ" not in said
    assert_same_run(tmp_path, "whole", "parts")
    monkeypatch.setattr(pythia, "FP8_LAYERS_FROM", 16 if parts == "head" else 64)
    assert train_pythia.main(["--resume", str(tmp_path / "runs" / "parts")]) == 0
    assert f"{products}, these by" in " ".join(capsys.readouterr().out.split())
    assert train_pythia.main(flags(tmp_path, tokens, "plain", "--grad-accum", "2")) == 0
    assert "FP8" not in capsys.readouterr().out
    losses = [[line["loss"] for line in numbers_of(tmp_path, run)] for run in ("whole", "plain")]
    assert losses[0] != losses[1]
    np.testing.assert_allclose(*losses, rtol=0.01)
    plain = flags(tmp_path, tokens, "plain", "--fp8", "--resume", "auto")
    assert train_pythia.main(plain) == 1
    assert "--fp8 is True, but the run is without it" in capsys.readouterr().err


def test_fp8_is_refused_where_it_cannot_be(tmp_path, tokens, capsys, monkeypatch):
    for more, text in (
        ("--vocab-size 65", "vocabulary 65 must be a multiple of 16, such as 80"),
        ("--hidden 1056 --no-mlp", "width 1056 is more than 1024, and no layer takes FP8"),
    ):
        with naming(more):
            assert train_pythia.main(flags(tmp_path, tokens, "a", "--fp8", more)) == 1
            assert f"fp8: {text}" in capsys.readouterr().err
    assert not (tmp_path / "runs" / "a").exists()
    config = ndl.PythiaConfig(vocab_size=64, hidden_size=32, num_layers=1, num_heads=2)
    model = ndl.Pythia(config)
    model.embed_out = ndl.nn.Linear(32, 64)
    with pytest.raises(ValueError, match="^fp8: the head .* nn.Linear .*, but is Linear with one$"):
        model.use_fp8()

    class Own(ndl.Pythia):
        def forward(self, *given):
            return super().forward(*given)

    with pytest.raises(ValueError, match="^fp8: Own has its own forward()"):
        Own(config).use_fp8()


def test_the_head_of_a_model_is_in_fp8_for_training_alone():
    config = ndl.PythiaConfig(vocab_size=64, hidden_size=32, num_layers=1, num_heads=2)
    ids = np.arange(32).reshape(2, 16)
    for tied in False, True:
        model = ndl.Pythia(dataclasses.replace(config, tie_word_embeddings=tied))
        plain = model.loss(ids, ids)
        model.use_fp8()
        loss = model.loss(ids, ids)
        assert type(loss.op) is ops.LinearCrossEntropyFP8 and loss.item() != plain.item()
        with ndl.no_grad():
            assert model.loss(ids, ids).item() == plain.item()


def test_layers_of_ranks_that_share_sequences_are_not_said_to_be_in_fp8(monkeypatch):
    monkeypatch.setattr(pythia, "FP8_LAYERS_FROM", 32)
    config = ndl.PythiaConfig(vocab_size=64, hidden_size=32, num_layers=1, num_heads=2)
    for context, parts in (1, "head and layers"), (2, "head"):
        model = ndl.Pythia(config)
        parallel = SimpleNamespace(context=context, group=SimpleNamespace(rank=0, size=2))
        train_pythia.set_up(model, parallel, Settings(fp8=True))
        assert model.fp8 and model.parts_in_fp8 == parts
    monkeypatch.setattr(ops.LinearCrossEntropyFP8, "WIDEST", 16)
    with pytest.raises(ValueError, match="^fp8: width 32 is more than 16, and no layer takes FP8"):
        train_pythia.set_up(ndl.Pythia(config), parallel, Settings(fp8=True))


def test_layers_with_other_modules_inside_are_not_said_to_be_in_fp8(monkeypatch):
    monkeypatch.setattr(pythia, "FP8_LAYERS_FROM", 32)
    config = ndl.PythiaConfig(vocab_size=64, hidden_size=32, num_layers=2, num_heads=2)
    model = ndl.Pythia(config)

    class Own(ndl.nn.Linear):
        def forward(self, x):
            return super().forward(x)

    for layer, parts in zip(model.layers, ("head and 1 of 2 layers", "head")):
        layer.mlp.dense_h_to_4h = Own(32, 128)
        model.use_fp8()
        assert model.parts_in_fp8 == parts
    model = ndl.Pythia(dataclasses.replace(config, use_parallel_residual=False))
    assert model.parts_in_fp8 == "head"


@pytest.mark.parametrize("value", [np.nan, np.inf])  # either makes a scale NaN
def test_a_nan_in_front_of_the_head_names_its_step(value, tmp_path, tokens, capsys, monkeypatch):
    loss, calls = ndl.Pythia.loss, []

    def broken(self, *given):
        calls.append(given)
        if len(calls) == 4:
            self.final_layer_norm.weight.cached_data[0] = value
        return loss(self, *given)

    monkeypatch.setattr(ndl.Pythia, "loss", broken)
    argv = flags(tmp_path, tokens, "a", "--fp8", "--eval-every", "0")
    assert train_pythia.main(argv) == 1
    assert "step 4: the loss is nan" in capsys.readouterr().err
