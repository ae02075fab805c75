"""A Pythia whose sequences ranks share: its loss, its gradients, and what it does alone again."""

import threading
from functools import partial

import numpy as np
import pytest
from ring import tokens_of
from together import together

import needle as ndl
from needle import nn, optim
from needle.autograd import Tensor
from needle.backend_ndarray import full
from needle.distributed.data_parallel import DataParallel
from needle.distributed.group import Subgroup
from needle.models import Pythia, PythiaConfig

TIME = 48
IDS = np.random.RandomState(0).randint(0, 50, (4, 2, TIME + 1))  # four micro-batches


DRAWS = threading.Lock()  # NumPy's generator is everybody's


def model_of(**changes):
    sizes = {"vocab_size": 50, "hidden_size": 32, "num_layers": 2, "num_heads": 2}
    with DRAWS:
        np.random.seed(1)
        return Pythia(PythiaConfig(**sizes, max_seq_len=TIME, **changes))


def gradient(group, context, recompute=False, **changes):
    """(losses, the norm of the gradient, this rank's shard of it) of one step."""
    model = model_of(**changes)
    model.recompute = recompute
    flat = nn.flatten_parameters(model)
    parallel = DataParallel(group, flat, optim.AdamW(flat), len(IDS), context)
    columns = np.arange(TIME)
    if context > 1:
        model.share_sequences(Subgroup(group, context))
        columns = tokens_of(group.rank % context, context, TIME)
    scale = Tensor.from_ndarray(full((), 1 / (len(IDS) * context), "float32", model.device))
    losses = []
    for micro_batch in parallel.own_micro_batches:
        parallel.optimizer.reset_grad()
        loss = model.loss(IDS[micro_batch][:, :-1][:, columns], IDS[micro_batch][:, 1:][:, columns])
        loss.backward(scale)
        losses.append(loss.cached_data)
        parallel.add_micro_batch()
    norm, _ = parallel.reduce()
    losses = [loss.item() for loss in parallel.losses(losses)]
    shards = [flat.grad[part].numpy() for part in parallel.shards[group.rank]]
    return losses, norm.item(), np.concatenate(shards)


LOCAL = {"sparse_pattern": "local", "sparse_window": 10, "sparse_block": 2}
CHANGES = {
    "dense": {},
    "sparse": {"use_sparse_attention": True, **LOCAL},
    "sequential": {"use_parallel_residual": False},
    "tied": {"tie_word_embeddings": True},
}


@pytest.mark.parametrize("changes", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("ranks, context", [(2, 2), (4, 2), (4, 4), (3, 3)])
def test_the_gradient_is_that_of_one(ranks, context, changes):
    ((wanted_losses, wanted_norm, wanted),) = together(1, lambda g: gradient(g, 1, **changes))
    done = together(ranks, lambda group: gradient(group, context, **changes))
    found = np.concatenate([shard for _, _, shard in done])
    assert np.linalg.norm(found - wanted) < 2e-6 * np.linalg.norm(wanted)
    for losses, norm, _ in done:
        assert losses == pytest.approx(wanted_losses, rel=1e-6)
        assert norm == pytest.approx(wanted_norm, rel=1e-6)


def test_layers_that_are_computed_again_change_no_bit():
    kept, again = (together(2, partial(gradient, context=2, recompute=x)) for x in (False, True))
    for (losses, _, shard), (others, _, other) in zip(kept, again):
        assert losses == others
        np.testing.assert_array_equal(shard, other)


def test_it_ends_and_generation_does_not_share():
    def work(group):
        model = model_of().eval()
        wanted = model(IDS[0][:, :-1])[0].numpy()
        text = model.generate(IDS[0][0, :8], 5, temperature=0)
        model.share_sequences(Subgroup(group, 2))
        np.testing.assert_array_equal(model.generate(IDS[0][0, :8], 5, temperature=0), text)
        model.share_sequences(None)
        np.testing.assert_array_equal(model(IDS[0][:, :-1])[0].numpy(), wanted)

    together(2, work)


def test_hooks_on_whole_sequences_are_refused():
    def work(group):
        model = model_of()
        model.share_sequences(Subgroup(group, 2))
        with pytest.raises(ValueError, match=f"share sequences of {2 * TIME} tokens, but max_seq"):
            model(IDS[0][:, :-1])
        half = IDS[0][:, : TIME // 2]
        _, cache = model.run_with_cache(half, names_filter="blocks.0.attn.hook_rot_q")
        assert list(cache) == ["blocks.0.attn.hook_rot_q"]
        with pytest.raises(ValueError, match="hook_pattern are of whole sequences"):
            model.run_with_cache(half, names_filter="blocks.0.attn.hook_pattern")

    together(2, work)


def test_a_model_that_cannot(monkeypatch):
    monkeypatch.setattr(ndl.Pythia, "shares", False)
    with pytest.raises(TypeError, match="Pythia: its sequences cannot be shared"):
        model_of().share_sequences(None)
