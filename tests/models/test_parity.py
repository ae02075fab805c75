"""Against the real library: transformers' GPTNeoXForCausalLM, on random models of many shapes.

The truth is transformers in float64. Beside it stand needle and transformers in float32 with the
same weights, both through a folder that save_pretrained wrote. For the logits, the loss and each
gradient x, with |.| the Frobenius norm and e(x) = |x - truth| / |truth|:

    e(needle) <= 3 e(transformers) + 4 eps          eps = 2^-24, half a unit in the last place
    |needle - transformers| / |truth| <= 1e-5       here |.| is the largest element as well

The first line bounds needle by what float32 costs the peer on the same numbers: 3 for sums in
another order, 4 eps for results that the peer has almost exact. The second is the promise, and what
remains when both are near the truth. Where there is a GPU, the sizes up to 1.4b run there.
"""

import functools
import gc
import json
import shutil

import numpy as np
import pytest
from harness import assert_same_parameters

import needle as ndl
from needle import hf, nn
from needle.models import gpt_neox
from needle.models.pythia import Pythia, PythiaConfig
from needle.testing.bounds import EPS32

pytestmark = pytest.mark.parity

# hidden size, heads, layers, vocabulary, batch, time, further fields. Head dims 32, 64, 80, 128 and
# 256; vocabularies that no tile divides; lengths that leave remainders of 16, 32, 64 and 128.
SHAPES = {
    "one token": (64, 2, 1, 50, 1, 1, {}),
    "head 32": (96, 3, 3, 509, 3, 67, {}),
    "head 32 sequential": (96, 3, 3, 509, 2, 131, {"use_parallel_residual": False}),
    "head 64": (128, 2, 2, 1001, 2, 129, {"hidden_act": "gelu_new"}),
    "head 64 tied": (128, 2, 2, 1001, 2, 63, {"tie_word_embeddings": True}),
    "head 80": (160, 2, 2, 777, 2, 97, {"rotary_base": 500.0, "hidden_act": "gelu_fast"}),
    "head 128": (256, 2, 2, 331, 1, 201, {"rotary_pct": 0.5}),
    "head 256": (512, 2, 2, 263, 1, 70, {"hidden_act": "gelu_pytorch_tanh"}),
    "all turns": (64, 2, 2, 97, 2, 33, {"rotary_pct": 1.0, "intermediate_size": 100}),
    "nothing turns": (64, 2, 2, 97, 2, 33, {"rotary_pct": 0.0}),
}
FULL = {"pythia-14m": (2, 67), "pythia-31m": (1, 131)}
FULL_CUDA = {"pythia-70m": (2, 517), "pythia-160m": (2, 257), "pythia-410m": (1, 261),
             "pythia-1b": (1, 131), "pythia-1.4b": (1, 259)}  # fmt: skip


def config_of(shape: str, **fields) -> PythiaConfig:
    names = ("hidden_size", "num_heads", "num_layers", "vocab_size")
    return PythiaConfig(**dict(zip(names, SHAPES[shape])), **fields)


@functools.cache
def torch():
    import torch

    return torch


def peer_device() -> str:
    """Device of transformers."""
    return "cuda" if torch().cuda.is_available() else "cpu"


def is_transposed(name: str, values) -> bool:
    return len(values.shape) == 2 and name != "embed_in.weight"


def random_peer(config: PythiaConfig, seed: int = 0, gain: float = 1.0):
    """transformers' model in float32. Nothing is at its default; the scales keep every part of the
    model at work: inputs of about 1, and attention that is neither flat nor a single key. `gain`
    above 1 lets the layers drown the embedding."""
    import transformers

    fields = gpt_neox.config_to_hf(config)
    fields.pop("architectures")
    there = transformers.GPTNeoXConfig(**fields, attn_implementation="sdpa")
    with torch().device(peer_device()):
        peer = transformers.GPTNeoXForCausalLM(there)
    generator = torch().Generator(peer_device()).manual_seed(seed)
    with torch().no_grad():
        for name, parameter in peer.named_parameters():
            if "norm" in name:
                parameter.normal_(0, 0.1, generator=generator).add_(name.endswith("weight"))
            elif name.endswith("bias"):
                parameter.normal_(0, 0.1, generator=generator)
            else:
                std = 0.5 if "embed_in" in name else gain * parameter.shape[1] ** -0.5
                parameter.normal_(0, std, generator=generator)
    return peer.eval()


def run_peer(peer, ids: np.ndarray, targets: np.ndarray) -> dict:
    """Logits, loss and gradients by our names, tensors of the peer's dtype and device."""
    ids, targets = (torch().tensor(x, device=peer.device) for x in (ids, targets))
    peer.zero_grad()
    logits = peer(input_ids=ids).logits
    loss = torch().nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    loss.backward()
    found = {"logits": logits, "loss": loss}
    found |= {gpt_neox.our_name(name): p.grad for name, p in peer.named_parameters()}
    found = {name: value.detach() for name, value in found.items()}
    peer.zero_grad()
    return found


def run_needle(model: Pythia, ids: np.ndarray, targets: np.ndarray, flat: bool) -> dict:
    """The same of needle, in transformers' orientation."""
    kept = nn.flatten_parameters(model) if flat else None
    logits, loss = model(ids, targets)
    loss.backward()
    found = {"logits": logits.numpy(), "loss": loss.numpy()}
    for name, parameter in model.named_parameters():
        gradient = parameter.grad.numpy()
        found[name] = gradient.T if is_transposed(name, gradient) else gradient
    del kept
    place = {"device": peer_device()}
    return {name: torch().tensor(np.ascontiguousarray(v), **place) for name, v in found.items()}


def assert_parity(ours: dict, theirs: dict, truth: dict) -> None:
    assert ours.keys() == theirs.keys() == truth.keys()
    wrong = []
    for name, exact in truth.items():
        mine, peers, size = ours[name].double(), theirs[name].double(), float(exact.norm())
        error = float((mine - exact).norm()) / size
        peer_error = float((peers - exact).norm()) / size
        apart = float((mine - peers).norm()) / size
        highest = float((mine - peers).abs().max() / exact.abs().max())
        if not (error <= 3 * peer_error + 4 * EPS32 and apart <= 1e-5 and highest <= 1e-5):
            wrong.append(
                f"{name}: error {error:.1e}, transformers' {peer_error:.1e}, "
                f"apart {apart:.1e}, in one element {highest:.1e}"
            )
    assert not wrong, "\n".join(wrong)


def assert_same_weights(peer, folder) -> None:
    """transformers finds in needle's folder what needle had read; the folder is removed."""
    import transformers

    there = transformers.AutoModelForCausalLM.from_pretrained(folder)
    shutil.rmtree(folder)
    for (name, left), (_, right) in zip(peer.named_parameters(), there.named_parameters()):
        assert torch().equal(left.cpu(), right), name


def compare(config: PythiaConfig, batch: int, time: int, device, folder, flat: bool) -> None:
    peer = random_peer(config)
    peer.save_pretrained(folder)
    rng = np.random.default_rng(1)
    ids, targets = rng.integers(0, config.vocab_size, (2, batch, time))
    model = Pythia.from_pretrained(folder, device)
    shutil.rmtree(folder)  # pytest would keep gigabytes
    assert model.config == config
    ours = run_needle(model, ids, targets, flat)
    model.save_pretrained(folder)
    del model
    assert (folder / hf.INDEX).is_file() is (4 * peer.num_parameters() > hf.SHARD_SIZE)
    assert_same_weights(peer, folder)
    theirs = run_peer(peer, ids, targets)
    truth = run_peer(peer.double(), ids, targets)
    assert_parity(ours, theirs, truth)
    del peer
    gc.collect()
    if torch().cuda.is_available():
        torch().cuda.empty_cache()


# ---- logits, loss and gradients ------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
def test_shapes(tmp_path, shape, device):
    *_, batch, time, fields = SHAPES[shape]
    config = config_of(shape, max_seq_len=max(time, 8), **{"hidden_act": "gelu", **fields})
    compare(config, batch, time, device, tmp_path / "a", flat=config.num_layers % 2 == 0)


@pytest.mark.parametrize("name", FULL)
def test_small_sizes(tmp_path, name, device):
    batch, time = FULL[name]
    config = PythiaConfig.preset(name, hidden_act="gelu")
    compare(config, batch, time, device, tmp_path / "a", flat=True)


@pytest.mark.cuda
@pytest.mark.slow
@pytest.mark.parametrize("name", FULL_CUDA)
def test_full_sizes(tmp_path, name):
    batch, time = FULL_CUDA[name]
    config = PythiaConfig.preset(name, hidden_act="gelu")
    compare(config, batch, time, ndl.cuda(), tmp_path / "a", flat=True)


# ---- generation ----------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", ["head 32", "head 32 sequential", "head 64 tied", "head 80"])
def test_greedy_generation_is_equal_token_for_token(tmp_path, shape, device):
    config = config_of(shape, max_seq_len=300, **SHAPES[shape][-1])
    peer = random_peer(config, seed=2, gain=3.0)
    peer.save_pretrained(tmp_path)
    prompts = np.random.default_rng(3).integers(0, config.vocab_size, (2, 11))
    ids = torch().tensor(prompts, device=peer.device)
    options = dict(do_sample=False, eos_token_id=None, pad_token_id=0)
    options |= dict(max_new_tokens=256, attention_mask=torch().ones_like(ids))
    expected = peer.generate(ids, **options).cpu().numpy()
    assert expected.shape == (2, 267)
    got = Pythia.from_pretrained(tmp_path, device).generate(prompts, 256, temperature=0)
    np.testing.assert_array_equal(got, expected)
    assert len(np.unique(got[:, 11:])) > 20  # more than a loop of a few tokens


# ---- from here to there --------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_folders_open_there_with_no_flag(tmp_path, dtype):
    import tokenizers
    import transformers

    tokenizer = ndl.data.train_tokenizer(iter(["the cat sat on the mat\n  and the dog"] * 9), 290)
    assert isinstance(tokenizer, tokenizers.Tokenizer)
    np.random.seed(6)
    model = Pythia(PythiaConfig(vocab_size=320, hidden_size=64, num_layers=2, num_heads=2,
                                max_seq_len=64, dtype=dtype))  # fmt: skip
    hf.save(model, tmp_path, tokenizer, shard_size=60_000)
    assert (tmp_path / hf.INDEX).is_file()
    there, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, output_loading_info=True
    )
    assert there.dtype == getattr(torch(), dtype)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    named = dict(there.named_parameters())
    for name, parameter in model.named_parameters():
        values = parameter.numpy().astype(np.float32)
        values = values.T if is_transposed(name, values) else values
        other = named.pop({"embed_out.weight": "lm_head.weight"}.get(name, gpt_neox.hf_name(name)))
        np.testing.assert_array_equal(values, other.detach().float().numpy())
    assert not named
    opened = transformers.AutoTokenizer.from_pretrained(tmp_path)
    text = "the cat\n\tsat on  the log <|endoftext|>"
    assert opened(text)["input_ids"] == tokenizer.encode(text).ids
    assert opened.decode(opened("the cat sat ,")["input_ids"]) == "the cat sat ,"
    assert opened.eos_token == opened.bos_token == "<|endoftext|>"
    end = tokenizer.token_to_id("<|endoftext|>")
    assert opened.eos_token_id == end == there.generation_config.eos_token_id
    assert opened.model_max_length == 64
    # And once around: what transformers saves of it is what came.
    there.save_pretrained(tmp_path / "again")
    opened.save_pretrained(tmp_path / "again")
    back = Pythia.from_pretrained(tmp_path / "again", dtype=dtype)
    assert back.config == model.config
    assert_same_parameters(model, back)
    for name, given in (("third", tmp_path / "again"), ("fourth", opened), ("fifth", None)):
        back.save_pretrained(tmp_path / name, given)
        third = transformers.AutoTokenizer.from_pretrained(tmp_path / name)
        assert third(text)["input_ids"] == opened(text)["input_ids"]
        fields = json.loads((tmp_path / name / "config.json").read_text())
        assert third.eos_token_id == end == fields["eos_token_id"]
