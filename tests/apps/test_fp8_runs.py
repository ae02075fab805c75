"""Runs of apps/train_pythia.py with --fp8."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
import train_pythia
from small_runs import flags, numbers_of

import needle as ndl
from needle.models import pythia
from needle.training.settings import Settings


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
