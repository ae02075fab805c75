"""examples/own_model.py does all that it promises, on both devices: it is registered, trained by
the application's loop, saved, resumed bit for bit, generates with the cache, and is hooked."""

import dataclasses
import json
import pickle
import re
import sys

import harness
import numpy as np
import own_model
import pytest
from harness import ROOT, assert_same_parameters

import needle as ndl
from needle import hooks, models, nn
from needle.checkpoint import Checkpoint, CheckpointError, checkpoint_path

SMALL = own_model.OwnConfig(
    vocab_size=50, hidden_size=32, num_layers=2, num_heads=2, max_seq_len=48
)
IDS = np.arange(18).reshape(2, 9)


def small(device=None) -> own_model.OwnModel:
    np.random.seed(0)
    return own_model.OwnModel(SMALL, device)


def test_it_trains_saves_and_goes_on(device, tmp_path):
    """Three processes, as the example says; a GPU run also in bfloat16."""
    np.save(tmp_path / "tokens.npy", np.random.RandomState(3).randint(0, 60, 430).astype(np.uint16))

    def run(name: str, *flags: str) -> str:
        command = [sys.executable, ROOT / "examples" / "own_model.py", "--name", name]
        settings = {"--model": "own", "--data": tmp_path / "tokens.npy", "--batch-size": 2,
                    "--seq-len": 16, "--steps": 6, "--save-every": 2, "--grad-accum": 2,
                    "--out": tmp_path, "--device": device.name}  # fmt: skip
        words = [x for pair in settings.items() for x in pair]
        done = harness.run(*command, *words, *flags, NEEDLE_CACHE=tmp_path / "cache")
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    for dtype in ("float32", *(["bfloat16"] if device.name == "cuda" else [])):
        whole, stopped = (tmp_path / f"{name}-{dtype}" / "checkpoints" for name in ("whole", "cut"))
        assert "OwnModel(" in run(whole.parent.name, "--dtype", dtype)
        run(stopped.parent.name, "--dtype", dtype)
        checkpoint_path(stopped, 6).unlink()
        assert "after step 4" in run(stopped.parent.name, "--dtype", dtype, "--resume", "auto")
        ends = [Checkpoint(checkpoint_path(folder, 6)) for folder in (whole, stopped)]
        assert ends[0].state["model"] == "own"
        assert ends[0].state["loss"] == ends[1].state["loss"] < 9
        for ours, theirs in zip(*(end.restore()[1].state_dict()["arrays"].items() for end in ends)):
            assert ours[0] == theirs[0]
            np.testing.assert_array_equal(ours[1].numpy(), theirs[1].numpy())
        assert_same_parameters(*(end.restore_model() for end in ends))


def test_a_mask_that_block_mask_does_not_return_is_refused_over_a_cache(device):
    """The step would attend to all keys; with block_mask the whole context is computed again."""

    class Masked(own_model.OwnModel):
        def hidden(self, ids, cache=None):
            x, mask = self.embedding(ids), ndl.BlockMask.local(ids.shape[1], window=2, block=2)
            for i, layer in enumerate(self.layers):
                keys = cache and cache.layer(i)
                x = x + layer.attention(layer.norm1(x), self._rotary, mask, keys)
            return self.norm(x)

    np.random.seed(0)
    model = Masked(SMALL, device)
    with pytest.raises(ValueError, match="returns it from block_mask"):
        model.generate([1, 2, 3], 4)
    model.block_mask = lambda time: ndl.BlockMask.local(time, window=2, block=2)
    row = model.generate([1, 2, 3, 4, 5], 6, temperature=0.0)
    for end in range(5, 11):
        assert row[end] == model([row[:end]])[0].numpy()[0, -1].argmax()


def test_models_generate_the_argmax_of_their_logits(device):
    """Also the class of docs/extending.md, with learned positions; prompts of several lengths."""
    page = (ROOT / "docs" / "extending.md").read_text()
    (code,) = re.findall(r"```python\n(class Learned.*?)```", page, re.DOTALL)
    names = vars(own_model) | {"__name__": "learned"}
    exec(compile(code, "extending.md", "exec"), names)
    np.random.seed(1)
    rows = [np.arange(5), np.arange(11) + 20, np.array([7])]
    for kind in own_model.OwnModel, names["Learned"]:
        model = kind(SMALL, device)
        for layer in model.layers:  # far from the start, where the last token decides alone
            layer.attention.dense.weight.data = layer.attention.dense.weight.data * 40.0
        found = model.generate(rows, 12, temperature=0.0)
        for row, got in zip(rows, found):
            wanted = list(row)
            for _ in range(12):
                wanted.append(int(model([wanted])[0].numpy()[0, -1].argmax()))
            assert got.tolist() == wanted
        assert len({tuple(got[-12:]) for got in found}) == 3
    _, loss = model(IDS, IDS)
    loss.backward()
    used = np.abs(model.places.weight.grad.numpy()).max(1) > 0
    assert used[:9].all() and not used[9:].any()


def test_hooks_see_and_replace(device):
    model = small(device)
    weight = np.linspace(0.5, 2, 32).astype(np.float32)
    model.layers[0].norm1.weight.data = ndl.Tensor(weight, device=model.device)
    plain = model(IDS)[0].numpy()
    names = hooks.hook_names(SMALL)
    assert names[:5] == [
        "hook_embed", "blocks.0.hook_resid_pre", "blocks.0.ln1.hook_normalized",
        "blocks.0.ln1.hook_out", "blocks.0.attn.hook_q",
    ]  # fmt: skip
    logits, cache = model.run_with_cache(IDS)
    assert list(cache) == names and cache["blocks.1.attn.hook_pattern"].shape == (2, 2, 9, 9)
    np.testing.assert_allclose(logits.numpy(), plain, rtol=0, atol=2e-6 * np.abs(plain).max())
    inside = set(nn.attention.PROJECTIONS) | set(nn.attention.PATTERNS) | {nn.attention.RESULT}
    fused = [name for name in names if name.rpartition(".")[2] not in inside]
    logits, cache = model.run_with_cache(IDS, fused)
    np.testing.assert_array_equal(logits.numpy(), plain)  # names alone change no bit
    normalized, out = (cache[f"blocks.0.ln1.hook_{n}"].numpy() for n in ("normalized", "out"))
    np.testing.assert_array_equal(normalized * weight, out)  # before the weight, and after it
    np.testing.assert_allclose((normalized**2).mean(-1), 1, rtol=1e-2)
    with model.hooks({"blocks.0.mlp.hook_post": lambda x: x * 0.0}):
        assert np.abs(model(IDS)[0].numpy() - plain).max() > 1e-4


def test_the_registry_refuses_taken_names():
    assert models.model_class("own") is own_model.OwnModel
    assert models.preset("own-wide").hidden_size == 384 and "own" in models.preset_names()
    with pytest.raises(ValueError, match="'own' is OwnModel already"):
        models.register("own")(models.Pythia)
    with pytest.raises(ValueError, match="PythiaConfig belongs to 'pythia' already"):
        models.register("other")(models.Pythia)
    config = type("Twin", (own_model.OwnConfig,), {})
    with pytest.raises(ValueError, match="'own' has a preset 'own' already"):
        models.register("twin")(type("Twin", (own_model.OwnModel,), {"config_class": config}))
    with pytest.raises(ValueError, match="OwnConfig: unknown fields use_sparse_attention"):
        models.preset("own", use_sparse_attention=True)
    for wrong in "none", ["none"]:  # from a file it may be anything
        with pytest.raises(ValueError, match="no model .*none.* is registered; there are pythia"):
            models.model_class(wrong)


def test_a_tuple_in_a_configuration_is_one_again_from_a_file():
    @dataclasses.dataclass(frozen=True)
    class Widths(models.Config):
        of_layers: tuple[int, ...] = (4, 8)
        names: list[str] = dataclasses.field(default_factory=list)

    config = Widths((2, 3, 5), ["a"])
    assert Widths.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_a_model_of_an_imported_file_is_pickled(monkeypatch):
    monkeypatch.setattr(models.registry, "_families", {})
    models.import_file(ROOT / "examples" / "own_model.py")
    cls = models.model_class("own")
    assert cls is not own_model.OwnModel
    model = cls(cls.config_class(**dataclasses.asdict(SMALL)))
    again = pickle.loads(pickle.dumps(model))
    assert type(again) is cls and again.config == model.config
    assert_same_parameters(again, model)


def test_a_checkpoint_of_an_unregistered_model(tmp_path):
    path = ndl.save_checkpoint(small(), None, 0, 1.0, tmp_path / "a.safetensors")
    code = f"import needle as ndl; ndl.load_checkpoint({str(path)!r})"
    done = harness.run(sys.executable, "-c", code)
    assert done.returncode == 1
    assert "no model 'own' is registered" in done.stderr and "Import the module" in done.stderr
    with pytest.raises(CheckpointError, match="cannot be used: no model 'unknown'"):
        checkpoint = Checkpoint(path)
        checkpoint.state["model"] = "unknown"
        checkpoint.restore()
