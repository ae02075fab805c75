"""Folders of transformers in and out, without transformers: hand-made ones that hold every form
it has used, and what must be refused, all of it in one error (test_parity.py has the real one)."""

import contextlib
import dataclasses
import itertools
import json
import os
from pathlib import Path

import numpy as np
import pytest
from harness import assert_same_parameters as assert_equal
from harness import naming
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from needle import _C, BlockMask, Tensor, hf, nn, optim, safetensors
from needle.checkpoint import CheckpointError, load_checkpoint, save_checkpoint
from needle.models import from_pretrained, registry
from needle.models.pythia import Pythia, PythiaConfig
from needle.training import export as shell

# No two axes are equal, so that none can be confused.
CONFIG = PythiaConfig(
    vocab_size=37,
    hidden_size=32,
    num_layers=2,
    num_heads=2,
    intermediate_size=56,
    max_seq_len=24,
    hidden_act="gelu",
)
BASE = {
    "model_type": "gpt_neox",
    "vocab_size": 37,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 56,
    "max_position_embeddings": 24,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-5,
    "use_parallel_residual": True,
    "tie_word_embeddings": False,
    "rotary_pct": 0.25,
    "rotary_emb_base": 10000,
}


WITHOUT_TOKENIZER = ["config.json", "generation_config.json", "model.safetensors"]


def assert_same_files(left: Path, right: Path) -> None:
    for path in left.iterdir():
        assert path.read_bytes() == (right / path.name).read_bytes(), path.name


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def model_of(device=None, seed=0, **changes) -> Pythia:
    """A model in which nothing is at its default: biases and norms are random too."""
    np.random.seed(seed)
    model = Pythia(dataclasses.replace(CONFIG, **changes), device=device)
    for name, parameter in model.named_parameters():
        values = np.random.randn(*parameter.shape) * 0.2 + ("norm" in name)
        parameter.data = Tensor(values, device=model.device, dtype=model.config.dtype)
    return model


def theirs(model: Pythia) -> dict[str, np.ndarray]:
    """The weights under the names and in the orientation of transformers, written out by hand."""
    named = {}
    for name, parameter in model.named_parameters():
        values = parameter.numpy()
        if values.ndim == 2 and name != "embed_in.weight":
            values = values.T
        full = name if name == "embed_out.weight" else "gpt_neox." + name
        named[full] = np.ascontiguousarray(values, np.float32)
    return named


def write(folder: Path, weights: dict, **fields) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(BASE | fields))
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def assert_says(error, *texts: str) -> None:
    for text in texts:
        assert text in str(error.value)


# ---- reading -------------------------------------------------------------------------------------


def test_rotary_in_every_form():
    silent = {k: v for k, v in BASE.items() if not k.startswith("rot")}
    for fields in [
        {"rotary_pct": 0.5, "rotary_emb_base": 500},
        {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5,
                             "rope_theta": 500}},
        {"rope_parameters": {"type": "default", "rope_theta": 500}, "rotary_pct": 0.5},
        {"rope_scaling": {"partial_rotary_factor": 0.5}, "rotary_emb_base": 500},
        {"rope_scaling": None, "rope_parameters": None, "rotary_pct": 0.5, "rotary_emb_base": 500},
        {"rope_parameters": {"partial_rotary_factor": 0.5, "rope_theta": 500}, "rotary_pct": 1.0,
         "rotary_emb_base": 7, "partial_rotary_factor": 1.0, "rope_theta": 8},
        {"rotary_pct": 0.5, "rotary_emb_base": 500, "partial_rotary_factor": 1.0, "rope_theta": 8},
        {"rope_scaling": {"type": "default", "rope_theta": 500}, "rotary_pct": 0.5,
         "rope_parameters": {"partial_rotary_factor": 1.0, "rope_theta": 7}},
    ]:  # fmt: skip
        config = hf.read_config(Pythia, silent | fields)
        assert (config.rotary_pct, config.rotary_base) == (0.5, 500.0), fields
    for fields in ({"rotary_pct": 0.0}, {"rope_parameters": {"partial_rotary_factor": 0}}):
        assert hf.read_config(Pythia, BASE | fields).rotary_pct == 0


def test_configurations_with_and_without_optional_fields():
    """The one beside the published weights of Pythia-70M, saved by transformers 4.24; and sizes
    alone. Each name of an activation means its form."""
    fields = {
        "architectures": ["GPTNeoXForCausalLM"], "bos_token_id": 0, "eos_token_id": 0,
        "hidden_act": "gelu", "hidden_size": 512, "initializer_range": 0.02,
        "intermediate_size": 2048, "layer_norm_eps": 1e-05, "max_position_embeddings": 2048,
        "model_type": "gpt_neox", "num_attention_heads": 8, "num_hidden_layers": 6,
        "rotary_emb_base": 10000, "rotary_pct": 0.25, "tie_word_embeddings": False,
        "torch_dtype": "float16", "transformers_version": "4.24.0", "use_cache": True,
        "use_parallel_residual": True, "vocab_size": 50304,
    }  # fmt: skip
    assert hf.read_config(Pythia, fields) == PythiaConfig.preset("70m", hidden_act="gelu")
    sizes = "vocab_size hidden_size num_hidden_layers num_attention_heads intermediate_size".split()
    silent = hf.read_config(Pythia, {k: BASE[k] for k in ("model_type", *sizes)})
    assert silent == dataclasses.replace(CONFIG, max_seq_len=2048)
    forms = {"gelu": "none", "gelu_python": "none", "gelu_new": "tanh", "gelu_fast": "tanh"}
    for name, form in {**forms, "gelu_pytorch_tanh": "tanh"}.items():
        read = Pythia(hf.read_config(Pythia, BASE | {"hidden_act": name}), initialise=False)
        assert read.layers[0].mlp.approximate == form


def test_any_dtype_into_any(tmp_path, device):
    """Values read are the source's, rounded once."""
    names = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
    for source in names:
        model = model_of(dtype=source)
        model.save_pretrained(tmp_path / source)
        with safe_open(tmp_path / source / "model.safetensors", "np") as file:
            assert {file.get_slice(key).get_dtype() for key in file.keys()} == {names[source]}
        expected = dict(model.named_parameters())
        for dtype in names:
            read = Pythia.from_pretrained(tmp_path / source, device, dtype)
            assert read.config.dtype == dtype
            for name, parameter in read.named_parameters():
                assert parameter.dtype == dtype
                wanted = expected[name].cached_data.astype(dtype).numpy()
                where = f"{source} to {dtype}: {name}"
                np.testing.assert_array_equal(parameter.numpy(), wanted, err_msg=where)
        assert Pythia.from_pretrained(tmp_path / source).config.dtype == "float32"
    with pytest.raises(ValueError, match="dtype must be one of float32, bfloat16, float16"):
        Pythia.from_pretrained(tmp_path / "float32", dtype="int8")


def test_a_folder_with_buffers_and_other_names_is_read(tmp_path, device):
    """Published Pythia files hold the causal mask and the frequencies; the head has two names. No
    random number is drawn."""
    model = model_of()
    weights = theirs(model)
    weights["lm_head.weight"] = weights.pop("embed_out.weight")
    for i in range(2):
        where = f"gpt_neox.layers.{i}.attention."
        weights[where + "bias"] = np.ones((1, 1, 24, 24), bool)
        weights[where + "masked_bias"] = np.float32([-1e9])
        weights[where + "rotary_emb.inv_freq"] = np.ones(2, np.float32)
    before = np.random.get_state()[1].copy()
    read = Pythia.from_pretrained(write(tmp_path / "a", weights), device)
    np.testing.assert_array_equal(np.random.get_state()[1], before)
    assert read.config == CONFIG and read.device == device
    assert_equal(read, model)


def test_shards(tmp_path):
    model = model_of()
    written = hf.save(model, tmp_path / "a", shard_size=20_000)
    shards = [path for path in written if path.suffix == ".safetensors"]
    names = [f"model-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)]
    assert len(shards) == 4 and [path.name for path in shards] == names  # of 73,920 bytes
    index = json.loads((tmp_path / "a" / "model.safetensors.index.json").read_text())
    everything = theirs(model)
    assert index["weight_map"].keys() == everything.keys()
    assert index["metadata"]["total_size"] == sum(v.nbytes for v in everything.values())
    for path in shards:
        content = load_file(path)
        assert sum(v.nbytes for v in content.values()) <= 20_000
        for name, values in content.items():
            assert index["weight_map"][name] == path.name
            np.testing.assert_array_equal(values, everything.pop(name))
    assert not everything
    assert_equal(Pythia.from_pretrained(tmp_path / "a"), model)
    assert len([p for p in hf.save(model, tmp_path / "a") if p.suffix == ".safetensors"]) == 1
    assert names_in(tmp_path / "a") == WITHOUT_TOKENIZER  # no shard is left
    hf.save(model_of(seed=1), tmp_path / "a", shard_size=20_000)
    assert_equal(Pythia.from_pretrained(tmp_path / "a"), model_of(seed=1))
    assert hf.SHARD_SIZE == 5e9 == hf.save.__defaults__[-1]


# ---- tied embeddings -----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tied_embeddings(tmp_path, dtype, device):
    """One matrix, read and written once, whose gradient is the sum of both uses."""
    tied = model_of(device, tie_word_embeddings=True, dtype=dtype)
    assert "embed_out.weight" not in dict(tied.named_parameters())
    tied.save_pretrained(tmp_path / "a")
    read = Pythia.from_pretrained(tmp_path / "a", device, dtype)
    assert read.config.tie_word_embeddings
    assert_equal(read, tied)
    untied = model_of(device, dtype=dtype)
    for name, parameter in tied.named_parameters():
        _C.assign(dict(untied.named_parameters())[name].cached_data, parameter.cached_data)
    _C.assign(untied.embed_out.weight.cached_data, tied.embed_in.weight.cached_data.permute((1, 0)))
    ids, targets = np.arange(20)[None], np.arange(1, 21)[None]
    nn.flatten_parameters(untied)
    flat = nn.flatten_parameters(read)
    for model in (untied, tied, read):
        model(ids, targets)[1].backward()
    bound = 2e-6 if dtype == "float32" else 1e-2  # the matrix lies otherwise: other sums
    logits = untied(ids)[0].numpy().astype(np.float32)
    np.testing.assert_allclose(
        tied(ids)[0].numpy().astype(np.float32), logits, rtol=0, atol=bound * np.abs(logits).max()
    )
    expected = untied.embed_in.weight.grad.numpy() + untied.embed_out.weight.grad.numpy().T
    for model in (tied, read):
        got = model.embed_in.weight.grad.numpy()
        np.testing.assert_allclose(got, expected, rtol=0, atol=bound * np.abs(expected).max())
    before = float(read(ids, targets)[1].numpy())
    optim.AdamW(flat, lr=1e-2).step()
    assert float(read(ids, targets)[1].numpy()) < before


def test_head_in_the_file_of_a_tied_model_is_left_out(tmp_path):
    model = model_of(tie_word_embeddings=True)
    weights = theirs(model)
    weights["embed_out.weight"] = weights["gpt_neox.embed_in.weight"].copy()
    folder = write(tmp_path / "a", weights, tie_word_embeddings=True)
    assert_equal(Pythia.from_pretrained(folder), model)


# ---- what is refused -----------------------------------------------------------------------------


def test_all_that_is_wrong_is_in_one_error(tmp_path, monkeypatch):
    weights = theirs(model_of())
    del weights["gpt_neox.layers.0.mlp.dense_h_to_4h.bias"]
    del weights["embed_out.weight"]
    weights["gpt_neox.layers.2.mlp.dense_h_to_4h.bias"] = np.zeros(56, np.float32)
    weights["gpt_neox.final_layer_norm.bias"] = np.zeros(31, np.float32)
    matrix = "gpt_neox.layers.1.attention.dense.weight"
    weights[matrix] = weights[matrix].astype(np.float64)
    monkeypatch.setattr(safetensors.Entry, "read", None)  # nothing is loaded
    with pytest.raises(CheckpointError) as error:
        Pythia.from_pretrained(write(tmp_path / "a", weights))
    assert_says(
        error,
        "layers.0.mlp.dense_h_to_4h.bias is missing",
        "embed_out.weight is missing",
        "layers.2.mlp.dense_h_to_4h.bias is unknown",
        "final_layer_norm.bias has shape [31], not [32]",
        f"{matrix} is F64, not F32 or BF16 or F16",
    )
    giant = write(tmp_path / "b", weights, hidden_size=1 << 20, intermediate_size=1 << 30)
    with pytest.raises(CheckpointError, match=r"not \[1073741824, 1048576\]"):
        Pythia.from_pretrained(giant)  # compared, and never made


def test_unusable_configurations(tmp_path):
    fields = BASE | {"hidden_act": "relu", "attention_bias": False,
                     "rope_scaling": {"type": "linear", "factor": 2.0}}  # fmt: skip
    del fields["vocab_size"]
    with pytest.raises(CheckpointError) as error:
        hf.read_config(Pythia, fields)
    assert_says(error, "vocab_size is missing", "hidden_act is 'relu'", "attention_bias is false")
    assert_says(error, "'linear' positions")
    # The names of other models, which transformers passes over here.
    alone = {k: v for k, v in BASE.items() if not k.startswith("rot")}
    read = hf.read_config(Pythia, alone | {"rope_theta": 500, "partial_rotary_factor": 0.5})
    assert (read.rotary_base, read.rotary_pct) == (10000, 0.25)
    for name, value, said in (
        ("model_type", "llama", "model_type is 'llama'"),
        ("use_parallel_residual", "false", "use_parallel_residual must be True or False"),
        ("rotary_pct", float("nan"), "rotary_pct must be a finite"),
        ("rotary_pct", "x", "rotary_pct must be a finite"),
        ("num_attention_heads", 3, "not a multiple"),
    ):
        with naming(name, value), pytest.raises(CheckpointError, match=said):
            hf.read_config(Pythia, BASE | {name: value})
    for content, said in ((None, "no config.json"), ("[1]", "must hold a JSON object")):
        if content is not None:
            (tmp_path / "config.json").write_text(content)
        with pytest.raises(CheckpointError, match=said):
            Pythia.from_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="no such file or folder"):
        Pythia.from_pretrained(tmp_path / "none")
    for changes, said in (
        ({"use_sparse_attention": True, "sparse_window": 2, "sparse_block": 2}, "block-sparse"),
        ({"attention_only": True}, "no MLPs .attention_only."),
    ):
        model = model_of(**changes)
        with naming(said), pytest.raises(ValueError, match=said):
            model.save_pretrained(tmp_path / "a")
        assert not (tmp_path / "a").exists()
        read = load_checkpoint(save_checkpoint(model, None, 0, 1.0, tmp_path / "b"))[0]
        assert read.config == model.config
        assert_equal(read, model)


def test_weights_that_are_no_safetensors_of_the_folder_are_refused(tmp_path):
    folder = write(tmp_path / "a", {})
    (folder / "model.safetensors").unlink()
    index = json.dumps({"weight_map": {"x": "../y"}}).encode()
    for file, content, said in (
        ("README.md", b"", "no model.safetensors and no"),
        ("pytorch_model.bin", b"\x80\x02.", "a pickle, which needle never opens"),
        (hf.INDEX, index, "'../y', which is not in the folder"),
    ):
        (folder / file).write_bytes(content)
        with naming(file), pytest.raises(CheckpointError, match=said):
            Pythia.from_pretrained(folder)


# ---- writing -------------------------------------------------------------------------------------


def test_configuration_is_written_in_the_names_of_both_versions():
    for changes, act in (
        ({"hidden_act": "gelu_tanh", "rotary_pct": 0.5, "rotary_base": 500.0}, "gelu_pytorch_tanh"),
        ({"use_parallel_residual": False, "tie_word_embeddings": True, "dtype": "float16"}, "gelu"),
    ):
        config = dataclasses.replace(CONFIG, layer_norm_eps=1e-6, **changes)
        fields = Pythia.weight_mapping.config_to_hf(config)
        assert fields["architectures"] == ["GPTNeoXForCausalLM"]
        assert fields["dtype"] == fields["torch_dtype"] == config.dtype  # of transformers 5 and 4
        assert (fields["rotary_pct"], fields["rotary_emb_base"]) == (
            config.rotary_pct,
            config.rotary_base,
        )
        read = hf.read_config(Pythia, fields, config.dtype)
        assert read == dataclasses.replace(config, hidden_act=act)


def test_a_subclass_gives_models_of_its_own(tmp_path, monkeypatch):
    """Of a folder and of a checkpoint; not where it has another configuration."""
    monkeypatch.setattr(registry, "_families", dict(registry._families))

    class Lens(Pythia):
        pass

    @dataclasses.dataclass(frozen=True)
    class OtherConfig(PythiaConfig):
        presets = classmethod(lambda cls: {})

    @registry.register("other")
    class Other(Pythia):
        config_class = OtherConfig

    model = model_of()
    model.save_pretrained(tmp_path / "a")
    path = save_checkpoint(model, None, 0, 1.0, tmp_path / "a.safetensors")
    for place in tmp_path / "a", path:
        for cls in Lens, Pythia:
            read = cls.from_pretrained(place)
            assert type(read) is cls and not any(part.training for part in read.modules())
            assert_equal(read, model)
    with pytest.raises(CheckpointError, match="holds a Pythia, not a Other"):
        Other.from_pretrained(path)


def test_a_registered_subclass_leaves_the_folders_of_its_base_to_it(tmp_path, monkeypatch):
    """One of other parts or with a mask is no GPT-NeoX; one of the same parts is, as a Pythia."""
    monkeypatch.setattr(registry, "_families", dict(registry._families))

    @dataclasses.dataclass(frozen=True)
    class GatedConfig(PythiaConfig):
        gates: bool = False
        masks: bool = False
        presets = classmethod(lambda cls: {})

    @registry.register("gated")
    class Gated(Pythia):
        config_class = GatedConfig

        def _make(self):
            super()._make()
            if self.config.gates:
                for layer in self.layers:
                    layer.mlp = nn.SwiGLU(self.config.hidden_size, 8)

        def block_mask(self, time):
            return BlockMask.local(time, 2, 2) if self.config.masks else None

    model_of().save_pretrained(tmp_path / "a")
    assert type(from_pretrained(tmp_path / "a")) is Pythia
    fields = dataclasses.asdict(CONFIG)
    for field, said in (
        ("gates", "layers.0.mlp.gate is unknown"),
        ("masks", r"block_mask\(\) leaves"),
    ):
        with pytest.raises(ValueError, match=f"a Gated has .* of Pythia.*{said}"):
            Gated(GatedConfig(**fields, **{field: True})).save_pretrained(tmp_path / "b")
    masked = model_of()
    masked.block_mask = lambda time: BlockMask.local(time, 2, 2)
    with pytest.raises(ValueError, match=r"block_mask\(\) leaves"):
        masked.save_pretrained(tmp_path / "b")
    assert not (tmp_path / "b").exists()
    same = Gated(GatedConfig(**fields))
    same.save_pretrained(tmp_path / "b")
    assert_equal(from_pretrained(tmp_path / "b"), same)
    Gated.weight_mapping = Pythia.weight_mapping  # which says that it is one
    assert type(from_pretrained(tmp_path / "b")) is Gated


def bpe(special=("<|endoftext|>", "<|padding|>"), vocab_size=280):
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(special),
        show_progress=False,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(["the cat sat on the mat, the dog on the log"] * 3, trainer)
    return tokenizer


class Killed(BaseException):
    """Raised in place of SIGKILL."""


def dying(real, left):
    """The function, until the counter `left` is at 0."""

    def change(*given, **options):
        if next(left) <= 0:
            raise Killed
        return real(*given, **options)

    return change


@pytest.mark.parametrize("before, after", [*itertools.product((20_000, 10**9), repeat=2)])
def test_folder_of_a_killed_writer_holds_the_earlier_model_or_none(
    tmp_path, monkeypatch, before, after
):
    """Killed before each name that it gives or takes away: between two shards too."""
    old, new, seen = model_of(), model_of(seed=1, rotary_pct=0.5), []
    while seen[-1:] != ["new"]:
        folder = tmp_path / str(len(seen))
        hf.save(old, folder, shard_size=before)
        left = itertools.count(len(seen), -1)
        with monkeypatch.context() as patch, contextlib.suppress(Killed):
            patch.setattr(os, "replace", dying(os.replace, left))
            patch.setattr(Path, "unlink", dying(Path.unlink, left))
            hf.save(new, folder, shard_size=after)
        try:
            read = Pythia.from_pretrained(folder)
        except CheckpointError as error:
            assert "no config.json" in str(error)
            seen.append("none")
        else:
            wanted = new if read.config == new.config else old
            assert_equal(read, wanted)
            seen.append("new" if wanted is new else "old")
        hf.save(new, folder, shard_size=after)  # and it can be written again
        assert_equal(Pythia.from_pretrained(folder), new)
    assert seen[0] == "old" and seen.count("none") > 3
    assert seen == sorted(seen, key=["old", "none", "new"].index)


def test_a_save_over_another_model_leaves_none_of_its_files(tmp_path):
    """Neither the tokenizer and the ends of texts, nor what a killed writer left."""
    stale = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
    for name in (*stale, "generation_config.json"):
        (tmp_path / name).write_text('{"eos_token_id": 7, "eos_token": "x"}')
    (tmp_path / ".model-00001-of-00002.safetensors.77.tmp").write_bytes(b"x")
    (tmp_path / "README.md").write_text("mine")
    written = hf.save(model_of(), tmp_path)
    assert {*tmp_path.iterdir()} == {*written, tmp_path / "README.md"}
    assert "eos_token_id" not in (tmp_path / "generation_config.json").read_text()


# ---- the shell -----------------------------------------------------------------------------------


def test_export_and_import(tmp_path, capsys):
    model, run = model_of(vocab_size=300), tmp_path / "run"
    for step in (1, 2):
        older = model_of(vocab_size=300, seed=2 - step)
        save_checkpoint(older, None, 0, 1.0, run / f"checkpoints/step_{step}.safetensors")
    (run / "tokenizer.json").write_text(bpe().to_str())
    folder, again = tmp_path / "folder", tmp_path / "again" / "model.safetensors"
    assert shell.main(["export", str(run), str(folder)]) == 0
    assert str(folder / "model.safetensors") in capsys.readouterr().out
    assert (folder / "tokenizer_config.json").is_file()
    assert_equal(Pythia.from_pretrained(folder), model)
    assert shell.main(["import", str(folder), str(again)]) == 0
    assert names_in(again.parent) == ["model.safetensors"]
    read, optimizer, epoch, loss = load_checkpoint(again)
    assert_equal(read, model)
    assert read.tokenizer.to_str() == bpe().to_str()
    assert optimizer is None and epoch == 0 and np.isnan(loss)
    (tmp_path / "back").mkdir()
    assert shell.main(["export", str(again), str(tmp_path / "back")]) == 0
    assert_same_files(folder, tmp_path / "back")
    (tmp_path / "other.json").write_text(bpe().to_str().replace("<|endoftext|>", "<end>"))
    words = ["--tokenizer", str(tmp_path / "other.json"), "--overwrite"]
    assert shell.main(["export", str(again), str(tmp_path / "back"), *words]) == 0
    assert "<end>" in (tmp_path / "back" / "tokenizer.json").read_text()
    words = ["--dtype", "bfloat16", "--overwrite"]
    assert shell.main(["import", str(folder), str(again), *words]) == 0
    assert load_checkpoint(again)[0].config.dtype == "bfloat16"
