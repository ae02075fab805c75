"""Gradients that travel during the last leaf's backward: the buckets, their order, and that nobody
sends what is not final or uses what has not come (together.py gives nonsense until then)."""

import threading
from types import SimpleNamespace

import numpy as np
import pytest
from together import together

from needle import nn, optim
from needle.autograd import Tensor
from needle.backend_ndarray import as_bytes, full
from needle.distributed import data_parallel
from needle.distributed.data_parallel import DataParallel, buckets, pieces
from needle.distributed.group import Subgroup
from needle.models import Pythia, PythiaConfig
from needle.nn.flat import ALIGNMENT
from needle.ops import ring_chunks
from needle.optim import NORM_CHUNK

TIME = 16
IDS = np.random.RandomState(0).randint(0, 600, (3, 4, 2, TIME + 1))  # of three steps
DRAWS = threading.Lock()  # NumPy's generator is everybody's


@pytest.fixture
def small(monkeypatch):
    """Buckets of a chunk or two."""
    monkeypatch.setattr(data_parallel, "BUCKET", NORM_CHUNK)


def model_of(recompute=False, **changes):
    sizes = {"vocab_size": 600, "hidden_size": 64, "num_layers": 2, "num_heads": 2}
    with DRAWS:
        np.random.seed(1)
        model = Pythia(PythiaConfig(**sizes, max_seq_len=TIME, **changes))
    model.recompute = recompute
    return model


def train(group, early=True, context=1, steps=3, watch=None, **changes):
    """(norms, weights, the saved state) of some steps; watch(parallel): a function for the backward
    in the place of parallel.on_final's."""
    model = model_of(**changes)
    group.gather("all have drawn", None)  # layers that are computed again set the generator
    flat = nn.flatten_parameters(model)
    parallel = DataParallel(group, flat, optim.AdamW(flat, lr=0.01), 4, context)
    columns = np.arange(TIME)
    if context > 1:
        model.share_sequences(Subgroup(group, context))
        runs = ring_chunks(TIME, group.rank % context, context)
        columns = np.concatenate([columns[run] for run in runs])
    scale = Tensor.from_ndarray(full((), 1 / (4 * context), "float32", model.device))
    norms = []
    for step in range(steps):
        for leaf in parallel.own_leaves:
            parallel.optimizer.reset_grad()
            ids = IDS[step][leaf]
            loss = model.loss(ids[:, :-1][:, columns], ids[:, 1:][:, columns])
            on_final = parallel.on_final(leaf) if early else None
            loss.backward(scale, watch(parallel, on_final) if watch and on_final else on_final)
            parallel.add_leaf()
        norm, factor = parallel.reduce(0.5)
        norms.append((norm.item(), factor.item()))
        parallel.step(factor)
    with parallel.whole_optimizer():
        arrays = parallel.optimizer.state_dict()["arrays"] if group.rank == 0 else {}
        state = {name: array.numpy().tobytes() for name, array in arrays.items()}
    return norms, as_bytes(flat.data).numpy().tobytes(), state


# ---- bits ----------------------------------------------------------------------------------------

CHANGES = {
    "plain": {},
    "bfloat16": {"dtype": "bfloat16"},
    "tied": {"tie_word_embeddings": True},
    "recomputed": {"recompute": True},
}


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("changes", CHANGES.values(), ids=CHANGES)
def test_early_sending_changes_no_bit(small, changes, early):
    (alone,) = together(1, lambda group: train(group, **changes))
    for ranks in 2, 4:
        done = together(ranks, lambda group: train(group, early, **changes))
        assert [theirs[:2] for theirs in done] == [alone[:2]] * ranks
        assert done[0][2] == alone[2]


def test_nor_do_the_sizes_of_buckets(monkeypatch):
    done = []
    for size in NORM_CHUNK, 3 * NORM_CHUNK, data_parallel.BUCKET:
        monkeypatch.setattr(data_parallel, "BUCKET", size)
        done.append(together(2, train)[0])
    assert done[0] == done[1] == done[2]


@pytest.mark.parametrize("ranks, early", [(2, False), (4, True)])
def test_where_sequences_are_shared(small, ranks, early):
    """The attention's exchanges stand between those of the buckets."""
    two = together(2, lambda group: train(group, context=2))
    done = together(ranks, lambda group: train(group, early, context=2))
    assert done[0] == two[0] and done[1][:2] == two[0][:2]


def test_ranks_may_differ_in_when_they_send(small):
    """As where one of them keeps its leaf to be verified."""
    (alone,) = together(1, train)
    done = together(2, lambda group: train(group, early=group.rank == 0))
    assert done[0] == alone and done[1][:2] == alone[:2]


# ---- when ----------------------------------------------------------------------------------------


def started(group, **changes):
    """Of one step: how many leaves were final as each bucket was sent, the numbers of the leaves in
    the order in which they were final, and the DataParallel."""
    log, final, made = [], [], []
    start = group.start

    def logged(name, sends, receives):
        if name == "the sum of gradients":
            log.append(len(final))
        return start(name, sends, receives)

    def watch(parallel, on_final):
        made[:] = [parallel]
        final.clear()
        log.clear()

        def watched(leaf):
            final.append(leaf)
            on_final(leaf)

        return watched

    group.start = logged
    train(group, watch=watch, steps=1, **changes)
    (parallel,) = made
    numbers = {id(p): i for i, p in enumerate(parallel.flat.parameters)}
    return log, [numbers[id(leaf)] for leaf in final], parallel


@pytest.mark.parametrize("changes", CHANGES.values(), ids=CHANGES)
def test_buckets_leave_as_soon_as_they_are_final(small, changes):
    for log, final, parallel in together(2, lambda group: started(group, **changes)):
        count = len(parallel.buckets)
        assert count >= 5 and len(log) == count  # once each
        done = 0
        for bucket, sent in zip(parallel.buckets, log):
            needed = 1 + max(final.index(i) for i in parallel.flat.within(bucket))
            done = max(done, needed)
            assert sent == done  # neither before nor later
        assert len(final) == len(parallel.flat.parameters) == len(set(final))
        if "tie_word_embeddings" not in changes:
            assert log[0] == 1  # the head's, when nothing else is there
        assert all(sent < len(final) - 3 for sent in log[:-2])
        assert parallel.buckets[-1].start == 0 and log[-1] == len(final)


def test_a_bucket_with_a_parameter_that_nothing_uses_waits_for_the_end(small):
    class Part(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = [nn.Linear(128, 128, bias=False) for _ in range(4)]

    def work(group, early=True):
        np_state = np.random.RandomState(0).standard_normal((4, 128, 128))
        model = Part()
        for layer, values in zip(model.layers, np_state):
            layer.weight.data = Tensor(values)
        flat = nn.flatten_parameters(model)
        parallel = DataParallel(group, flat, optim.AdamW(flat), 2)
        sent = []
        for _ in range(2):  # the second finds what the first has left
            for leaf in parallel.own_leaves:
                parallel.optimizer.reset_grad()
                x = Tensor(np.ones((2, 128), np.float32) * (leaf + 1), requires_grad=False)
                for layer in (model.layers[0], model.layers[1], model.layers[3]):
                    x = layer(x)
                x.sum().backward(on_final=parallel.on_final(leaf) if early else None)
                sent.append(len(parallel._sent))
                parallel.add_leaf()
            norm, scale = parallel.reduce()
            parallel.step(scale)
        return norm.item(), flat.data.numpy().tobytes(), sent

    (alone,) = together(1, work)
    for theirs in together(2, work):
        assert theirs[:2] == alone[:2] and theirs[2] == [1, 1]  # the last layer's alone


def test_an_error_in_the_backward_is_raised(small):
    def watch(parallel, on_final):
        def failing(leaf):
            on_final(leaf)
            if len(parallel._sent) >= 2:
                raise MemoryError("no more")

        return failing

    with pytest.raises(MemoryError, match="no more"):
        together(2, lambda group: train(group, watch=watch))


@pytest.mark.parametrize("wrong", ["sent", "received"])
def test_what_is_not_waited_for_is_seen(small, monkeypatch, wrong):
    """The tests above would fail."""
    right = DataParallel._send_bucket

    def send(self):
        right(self)
        if wrong == "sent":
            self.flat._grad[self.buckets[len(self._sent) - 1]].fill(0)
        else:
            self._sent[-1] = lambda: None

    monkeypatch.setattr(DataParallel, "_send_bucket", send)
    if wrong == "sent":
        with pytest.raises(AssertionError, match="written before it was sent"):
            together(2, train)
    else:
        assert not np.isfinite(together(2, train)[0][0][0][0])


def test_the_new_weights_of_a_bucket_leave_before_the_next_is_stepped(small):
    def work(group):
        log, start = [], group.start

        def logged(name, sends, receives):
            changed = [i for i, part in enumerate(parallel.own) if bytes_of(part) != before[i]]
            log.append((name, changed))
            return start(name, sends, receives)

        def bytes_of(part):
            return flat.data[part].numpy().tobytes()

        flat = nn.flatten_parameters(model_of())
        parallel = DataParallel(group, flat, optim.AdamW(flat, lr=0.01), 2)
        before = [bytes_of(part) for part in parallel.own]
        flat.grad.fill(1)
        _, scale = parallel.reduce()
        group.start = logged
        parallel.step(scale)
        filled = [i for i, part in enumerate(parallel.own) if part.start < part.stop]
        assert [name for name, _ in log] == ["the weights"] * len(parallel.own)
        for number, (_, changed) in enumerate(log):
            assert changed == [i for i in filled if i <= number]

    together(2, work)


# ---- where they begin ----------------------------------------------------------------------------


def layout(decayed, rest):
    """What `buckets` reads of a flat object, from the sizes of its parameters."""
    ends = np.cumsum([-(-size // ALIGNMENT) * ALIGNMENT for size in (*decayed, *rest)])
    decay_size = int(ends[len(decayed) - 1]) if decayed else 0
    return SimpleNamespace(
        offsets=[0, *map(int, ends[:-1])], size=int(ends[-1]), decay_size=decay_size
    )


SMALL = [
    ([70], []),
    ([], [70]),
    ([70], [70]),
    ([20000], [70]),
    ([300, 300], [40000]),
    ([16384 * 3 + 64] * 5, [64] * 9),
    ([100_000, 64, 64, 100_000, 64], [16384]),
    ([1_000_000, *[3000] * 50, 1_000_000], [64] * 50),
]


@pytest.mark.parametrize("least", [1, NORM_CHUNK, 5 * NORM_CHUNK, 1 << 22])
@pytest.mark.parametrize("sizes", SMALL, ids=range(len(SMALL)))
def test_buckets_are_the_whole_in_whole_chunks(monkeypatch, sizes, least):
    monkeypatch.setattr(data_parallel, "BUCKET", least)
    flat = layout(*sizes)
    found = buckets(flat)
    in_place = sorted(found, key=lambda part: part.start)
    assert in_place[0].start == 0 and in_place[-1].stop == flat.size
    for part, following in zip(in_place, in_place[1:]):
        assert part.start < part.stop == following.start and part.stop % NORM_CHUNK == 0
    for ranks in 1, 2, 3, 8:
        owned = [piece for part in found for piece in pieces(part, ranks)]
        numbers = [n for piece in owned for n in data_parallel.chunks_of(piece)]
        assert sorted(numbers) == [*range(-(-flat.size // NORM_CHUNK))]


def test_the_buckets_of_pythia_70m():
    width, vocab = 512, 50304
    layer = [3 * width**2, width**2, 4 * width**2, 4 * width**2]
    flat = layout(
        [vocab * width, *layer * 6, vocab * width],
        [*[width] * 4 + [3 * width, width, 4 * width, width]] * 6 + [width] * 2,
    )
    found = buckets(flat)
    assert len(found) == 7  # as docs/many_gpus.md and docs/eight_gpus.md say
    head, *layers, vectors, embedding = [part.stop - part.start for part in found]
    assert abs(head - vocab * width) <= NORM_CHUNK == 16384
    assert abs(embedding - vocab * width) <= NORM_CHUNK
    assert vectors <= 6 * 13 * width + 2 * width + NORM_CHUNK
    assert 3 <= len(layers) <= 5 and min(layers[:-1]) >= data_parallel.BUCKET - NORM_CHUNK
    assert [part.start for part in found[:-2]] == sorted(
        [part.start for part in found[:-2]], reverse=True
    )
    for ranks in 2, 8:  # each has its share of each
        for part in found:
            sizes = [piece.stop - piece.start for piece in pieces(part, ranks)]
            assert max(sizes) - min(sizes) <= NORM_CHUNK


# ---- the optimizer's parts -----------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_parts_are_stepped_as_the_whole_is(dtype):
    def stepped(parts):
        flat = nn.flatten_parameters(model_of(dtype=dtype))
        optimizer = optim.AdamW(flat, lr=0.01)
        kept, told = {}, []
        for step in range(3):
            if step == 1 and parts is not None:
                parts = [part for part in parts if part.start < flat.size]
                optimizer.keep(parts)  # with what one step has left
            random = np.random.RandomState(step)
            flat.grad[...] = random.standard_normal(flat.size).astype(np.float32)
            optimizer.step(None, told.append)
        weights = as_bytes(flat.data).numpy().reshape(flat.size, -1)
        for slot, array in optimizer.kept().items():
            kept[slot] = array.numpy()
        return weights, kept, told

    chunks = [slice(n * NORM_CHUNK, (n + 1) * NORM_CHUNK) for n in (5, 0, 2)]
    parts = [*chunks[:2], slice(NORM_CHUNK, NORM_CHUNK), chunks[2]]
    weights, kept, told = stepped(None)
    mine, theirs, in_parts = stepped(parts)
    assert told == [0] * 3 and in_parts == [0, *range(4), *range(4)]
    for part in parts:
        np.testing.assert_array_equal(mine[part], weights[part])
    assert set(theirs) == set(kept) and ("master" in kept) == (dtype == "bfloat16")
    for slot, array in theirs.items():
        np.testing.assert_array_equal(array, np.concatenate([kept[slot][p] for p in parts]))
