"""Pythia: ways through a layer, sparse masks, ids, presets, initial values. (Its mathematics are
compared in tests/interp/test_hooks.py with NumPy's, in test_parity.py with transformers'.)"""

import dataclasses
import re
import warnings

import numpy as np
import pytest
from harness import assert_same_parameters, live_bytes, naming, python
from harness import small_pythia as small

import needle as ndl
from needle import _C, BlockMask, Tensor, nn
from needle.models import pythia
from needle.models.pythia import Pythia, PythiaConfig

PATTERNS = ("mixed", "local", "strided", "global", "dense")


def tokens(seed: int, *shape, vocabulary=41) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, vocabulary, shape)


# ---- ways through a layer ------------------------------------------------------------------------


SEQUENTIAL = """
import sys
import numpy as np
import needle as ndl
shape = dict(vocab_size=9, hidden_size=16, num_layers=2, num_heads=2, use_parallel_residual=False)
model = ndl.Pythia(ndl.PythiaConfig(**shape))
ndl.nn.flatten_parameters(model)
_, loss = model(np.arange(6).reshape(2, 3), np.arange(6).reshape(2, 3))
print("backward", file=sys.stderr, flush=True)
loss.backward()
"""


def test_backward_of_a_sequential_residual_copies_no_gradient():
    """The kernel of a norm adds the gradient of the residual beside it as it lies."""
    done = python(SEQUENTIAL, NEEDLE_TRACE="1")
    assert done.returncode == 0, done.stderr
    called = re.findall(r"^needle: (\w+)", done.stderr.split("backward\n")[1], re.M)
    before = [a for a, b in zip(called, called[1:]) if b == "layernorm_bwd"]
    assert len(before) == 5 and not {"assign", "add"} & set(before), called


def test_a_class_and_a_head_of_ones_own_are_trained_as_they_are():
    class Own(Pythia):
        def forward(self, input_ids, targets=None):
            logits, loss = super().forward(input_ids, targets)
            return logits, loss if loss is None else loss * 3.0

    model = small()
    ids, found = np.arange(12).reshape(2, 6), []
    once = model.loss(ids, ids).item()
    model.__class__ = Own
    assert model.loss(ids, ids).item() == pytest.approx(3 * once)
    model.__class__ = Pythia
    head = model.embed_out = nn.Linear(model.config.hidden_size, model.config.vocab_size)
    for loss_of in (lambda: model(ids, ids)[1], lambda: model.loss(ids, ids)):
        head.zero_grad()
        loss = loss_of()
        loss.backward()
        found.append([loss.numpy(), head.weight.grad.numpy(), head.bias.grad.numpy()])
    for one, other in zip(*found):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


# ---- rows and time -------------------------------------------------------------------------------


@pytest.mark.parametrize("parallel", [True, False])
def test_a_layer_with_a_mask_of_its_own_is_refused_over_a_cache(parallel):
    """Generation would pass over the mask."""

    class Local(pythia.Layer):
        def forward(self, x, rotary, mask=None, cache=None):
            return super().forward(x, rotary, BlockMask.local(x.shape[1], 2, 2), cache)

    model = small(use_parallel_residual=parallel)
    model.layers[1].__class__ = Local
    assert model(tokens(2, 1, 9))[0].shape == (1, 9, 41)
    with pytest.raises(ValueError, match="Attention: over a cache there is no mask"):
        model.generate(tokens(2, 1, 9), 3)


def test_sparse_window_follows_the_sequence_and_dense_patterns_warn():
    """The window is a quarter of the sequence, and one block at least, where none is given."""
    for length, block, given, window, leaves_out in (
        (128, 64, 0, 64, False), (128, 16, 0, 32, True), (2048, 64, 0, 512, True),
        (64, 16, 0, 16, True), (16, 16, 0, 16, False), (512, 64, 512, 512, False),
        (512, 64, 70, 70, True), (512, 64, 9999, 9999, False),
    ):  # fmt: skip
        with naming(length, block, given), warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            sizes = dict(max_seq_len=length, sparse_window=given, sparse_block=block)
            model = small(use_sparse_attention=True, sparse_pattern="local", **sizes)
            config = model.config
            assert (config.sparse_window, config.sparse_block) == (window, block)
            wanted = BlockMask.local(length, window, block).causal()
            assert model.block_mask(length).causal() == wanted
            seen = wanted.to_dense() & np.tri(length, dtype=bool)
            assert (seen.sum() < np.tri(length).sum()) == leaves_out
            assert len(said) == (not leaves_out)
            assert all("attention is dense" in str(w.message) for w in said)
    for pattern, wanted in (
        ("strided", BlockMask.strided(96, 32, 16)), ("global", BlockMask.global_(96, 16, 16)),
        ("dense", BlockMask.dense(96, 16)),
        ("mixed", BlockMask.mixed(96, window=32, n_global=16, block=16)),
    ):  # fmt: skip
        sizes = dict(sparse_pattern=pattern, sparse_window=32, sparse_block=16)
        model = small(use_sparse_attention=True, **sizes)
        assert model.block_mask(96) == wanted
        model.config = dataclasses.replace(model.config, sparse_pattern="local")
        assert model.block_mask(96) == BlockMask.local(96, 32, 16)
    with pytest.warns(
        UserWarning, match="sparse_window 64 and blocks of 64 leave out no key of 128"
    ):
        ndl.create_pythia_70m(50, 128, use_sparse_attention=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        small(use_sparse_attention=True, sparse_pattern="dense"), small()
        saved = {**small().config.to_dict(), "use_sparse_attention": True, "sparse_window": 8}
        assert PythiaConfig.from_dict(saved | {"sparse_block": 8}).sparse_window == 8


@pytest.mark.parametrize("pattern", PATTERNS)
def test_the_mask_of_some_tokens_is_the_corner_of_the_longest(pattern):
    """And is made without it: the blocks of 2^40 tokens fit in no memory."""
    sizes = dict(sparse_pattern=pattern, sparse_window=7, sparse_block=4)

    def blocks(time, longest):
        config = PythiaConfig(max_seq_len=longest, use_sparse_attention=True, **sizes)
        return pythia.sparse_mask(config, time).blocks[0]

    whole = blocks(37, 37)
    for time in range(1, 38):
        np.testing.assert_array_equal(blocks(time, 37), whole[: -(-time // 4), : -(-time // 4)])
    np.testing.assert_array_equal(blocks(40, 2**40), blocks(40, 40))


# ---- ids -----------------------------------------------------------------------------------------


def test_ids_of_any_kind_and_those_that_are_refused(device):
    model, ids = small(device), tokens(7, 2, 6)
    expected = model(ids)[0].numpy()
    for form in (
        ids.tolist(),
        ids.astype(np.uint16),
        ids.astype(np.float32),
        np.asfortranarray(ids),
        ndl.NDArray(ids),
        Tensor(ids),
        _C.array(ids, dtype="int32", device=device),
        _C.array(ids, dtype="int64"),
    ):
        np.testing.assert_array_equal(model(form)[0].numpy(), expected)
    for wrong, error in [
        (ids[0], ValueError),
        (tokens(0, 1, 97), ValueError),
        (ids + 0.5, TypeError),
        (np.array([["a"]]), TypeError),
    ]:
        with pytest.raises(error):
            model(wrong)
    with pytest.raises(ValueError):
        model(ids, ids[:, :4])
    del form
    before = live_bytes(device)
    for bad in (41, -1, 2**31, 2**40, -(2**31)):  # before they are uploaded
        outside = ids.astype(np.int64)
        outside[1, 3] = bad
        for form in (outside, outside.tolist()):
            with pytest.raises(ValueError, match=rf"{bad}.*\(1, 3\).*41"):
                model(form)
            if bad > 0:
                with pytest.raises(ValueError, match=rf"targets.*{bad}"):
                    model(ids, form)
    assert live_bytes(device) == before
    targets = np.roll(ids, -1, 1)
    targets[:, 3:] = -100  # ignored
    targets[0, 3] = np.iinfo(np.int64).min  # 0 when cut to 32 bits
    got = float(model(ids, targets)[1].numpy())
    assert abs(got - float(model(ids[:, :3], targets[:, :3])[1].numpy())) < 1e-6


# ---- what it is made of --------------------------------------------------------------------------

PARAMETERS = {
    "14m": 14_067_712,
    "31m": 30_494_720,
    "70m": 70_426_624,
    "160m": 162_322_944,
    "410m": 405_334_016,
    "1b": 1_011_781_632,
    "1.4b": 1_414_647_808,
    "2.8b": 2_775_208_960,
    "6.9b": 6_857_302_016,
    "12b": 11_846_072_320,
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_presets(name):
    config = PythiaConfig.preset(f"pythia-{name}")
    assert config.meta_model().num_parameters() == PARAMETERS[name]
    assert config == PythiaConfig.preset(name)
    assert (config.max_seq_len, config.rotary_pct) == (2048, 0.25)
    assert config.use_parallel_residual is True
    assert PythiaConfig.preset(name, hidden_size=64, num_heads=4).intermediate_size == 256


def test_create_pythia_70m():
    model, config = pythia.create_pythia_70m(vocab_size=1000)  # the rest as it is, and drawn faster
    assert config == PythiaConfig.preset("pythia-70m", vocab_size=1000)
    sizes = config.hidden_size, config.num_layers, config.num_heads, config.max_seq_len
    assert sizes == (512, 6, 8, 2048)
    named = dict(model.named_parameters())
    reading = ("embed_in", "embed_out", "layers.3.attention.query_key_value")
    writing = ("layers.3.attention.dense", "layers.3.mlp.dense_4h_to_h")
    stds = dict.fromkeys((*reading, "layers.3.mlp.dense_h_to_4h"), 0.027951)
    for name, wanted in (stds | dict.fromkeys(writing, 0.014731)).items():
        values = named[f"{name}.weight"].numpy()
        assert abs(values.std() / wanted - 1) < 0.01, name
        assert abs(values.mean()) < 5 * wanted / np.sqrt(values.size), name
    for name, parameter in named.items():
        if "layernorm" in name or "layer_norm" in name:
            assert (parameter.numpy() == (1 if name.endswith("weight") else 0)).all()
        elif name.endswith("bias"):
            assert (parameter.numpy() == 0).all()
    assert "embed_out.bias" not in named
    for sparse, window in (("local", 128), ("strided", 192)):
        with ndl.init.meta_device():
            _, config = ndl.create_pythia_70m(max_seq_len=512, sparse=sparse, window=window)
        assert config.use_sparse_attention
        assert (config.sparse_pattern, config.sparse_window) == (sparse, window)
    with pytest.raises(ValueError, match="sparse_pattern"):
        ndl.create_pythia_70m(sparse="round")


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_word_embeddings": True, "num_layers": 1},
        {"use_parallel_residual": False, "intermediate_size": 33},
    ],
)
def test_shapes_without_memory(changes):
    model = small(**changes)
    wanted = [(name, parameter.shape) for name, parameter in model.named_parameters()]
    before = np.random.get_state()[1].tolist()
    meta = model.config.meta_model()
    assert [(name, p.shape) for name, p in meta.named_parameters()] == wanted
    assert all(not any(p.cached_data.strides) for p in meta.parameters())
    empty = Pythia(model.config, initialise=False)
    assert np.random.get_state()[1].tolist() == before  # nothing was drawn
    empty.load_state_dict(model.state_dict())  # elements have their own memory
    assert_same_parameters(model, empty)
    with pytest.raises(ValueError, match="broadcast view"):
        meta.embed_in.weight.cached_data.fill(1)


def test_a_seed_makes_the_same_model(device):
    one, other = small(device, seed=3), small(ndl.cpu(), seed=3)
    assert_same_parameters(one, other)
    low = small(device, seed=3, dtype="bfloat16")
    np.random.seed(3)
    also = Pythia(one.config, device, dtype="bfloat16")  # not the configuration's
    assert also.config == low.config
    for p, *lows in zip(one.parameters(), low.parameters(), also.parameters(), strict=True):
        for q in lows:
            assert q.dtype == "bfloat16"
            np.testing.assert_array_equal(q.numpy(), p.cached_data.astype("bfloat16").numpy())


def test_wrong_configurations():
    for wrong in (
        {"hidden_size": 30, "num_heads": 4}, {"vocab_size": 0}, {"hidden_act": "relu"},
        {"dtype": "float64"}, {"rotary_pct": 1.5}, {"sparse_pattern": "zigzag"},
        {"sparse_block": 32.0}, {"num_layers": 2.5}, {"rotary_base": "10000"},
        {"layer_norm_eps": float("nan")},
    ):  # fmt: skip
        with naming(wrong), pytest.raises(ValueError, match=next(iter(wrong))):
            PythiaConfig(**wrong)
    with pytest.raises(ValueError, match="70m"):
        PythiaConfig.preset("71m")
    with pytest.raises(ValueError, match="3 of 12 dimensions .* hidden_size 64 fits"):
        PythiaConfig(hidden_size=48, num_heads=4)


def test_flops_of_a_token_count_matrices_and_the_keys_it_sees():
    """Forward and backward: 6 an element of a matrix, 12 a dim and key; of itself half."""
    local = {"use_sparse_attention": True, "sparse_pattern": "local", "sparse_block": 16}
    for sparse in {}, local | {"sparse_window": 16}:
        config = PythiaConfig(vocab_size=50, hidden_size=16, num_layers=2, num_heads=2, **sparse)
        model, mask = Pythia(config), pythia.sparse_mask(config, 64)
        see = mask.to_dense() if sparse else np.ones((64, 64))
        seen = (np.tril(see, -1).sum() + np.trace(see) / 2) / 64
        matrices = sum(p.size for _, p in model.named_parameters() if p.ndim == 2)
        matrices -= model.embed_in.weight.size  # its rows are looked up
        assert model.flops_per_token(64) == pytest.approx(6 * matrices + 12 * 2 * 16 * seen)
