"""Steps shared by ranks have the bits of one rank's: sums, norm, weights, the optimizer's state."""

import copy
import pickle
import time
from functools import lru_cache, partial
from types import SimpleNamespace

import numpy as np
import pytest
from together import together

import needle as ndl
from needle import _C, autograd, nn, optim
from needle.backend_ndarray import as_bytes
from needle.distributed.control import RankFailed
from needle.distributed.data_parallel import DataParallel
from needle.distributed.environment import Place
from needle.distributed.group import Group
from needle.training.replay import proofs
from needle.training.replay.replays import Replay

SHAPES = [(300, 200), (7, 9), (130, 500), (40,)]  # 8 chunks, the last one cut


@lru_cache(3)  # the steps of a test, which each rank takes
def gradients(micro_batches, seed):
    random = np.random.RandomState(seed)
    return [
        [random.standard_normal(shape).astype(np.float32) for shape in SHAPES]
        for _ in range(micro_batches)
    ]


class Model(nn.Module):
    def __init__(self, dtype):
        super().__init__()
        random = np.random.RandomState(0)
        self.parts = [nn.Parameter(random.standard_normal(shape), dtype=dtype) for shape in SHAPES]


def train(group, micro_batches, dtype, steps=3, max_norm=1.0, edit=None):
    flat = nn.flatten_parameters(Model(dtype))
    optimizer = optim.AdamW(flat, lr=0.01)
    parallel = DataParallel(group, flat, optimizer, micro_batches)
    norms, sums = [], []
    for step in range(steps):
        given = gradients(micro_batches, step)
        for micro_batch in parallel.own_micro_batches:
            optimizer.reset_grad()
            for parameter, grad in zip(flat.parameters, given[micro_batch]):
                parameter.grad_buffer[...] = grad
            parallel.add_micro_batch()
        norm, scale = parallel.reduce(max_norm)
        norms.append((norm.item(), scale.item()))
        sums += [flat.grad[part].numpy() for part in parallel.shards[group.rank]]
        parallel.step(scale)
    if edit is not None:
        edit(parallel)
    losses = [
        _C.array(np.float32(micro_batch), "float32", _C.cpu())
        for micro_batch in parallel.own_micro_batches
    ]
    losses = [loss.item() for loss in parallel.losses(losses)]
    held = {slot: array.size for slot, array in optimizer.kept().items()}
    told = proofs.digests(parallel)()
    with parallel.whole_optimizer():
        arrays = optimizer.state_dict()["arrays"] if group.rank == 0 else {}
        state = {name: array.numpy().tobytes() for name, array in arrays.items()}
        if group.rank == 0:
            whole = {"weights": flat.data, **optimizer.kept()}
            assert told == {name: proofs.digest(array) for name, array in whole.items()}
    assert {slot: array.size for slot, array in optimizer.kept().items()} == held
    weights = as_bytes(flat.data).numpy().tobytes()
    return norms, np.concatenate(sums), losses, weights, state, held, told


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("micro_batches, counts", [(8, (2, 4, 8)), (12, (3, 6, 12)), (1, ())])
def test_ranks_change_no_bit(micro_batches, counts, dtype):
    ((norms, _, losses, weights, state, _, told),) = together(
        1, lambda group: train(group, micro_batches, dtype)
    )
    assert losses == list(range(micro_batches))
    for ranks in counts:
        done = together(ranks, lambda group: train(group, micro_batches, dtype))
        for theirs in done:
            assert theirs[0] == norms
            assert theirs[2] == losses
            assert theirs[3] == weights
            assert theirs[6] == told  # lines of proof
        assert done[0][4] == state  # of a saved optimizer
        slots = 2 if dtype == "float32" else 3
        total = sum(size for theirs in done for size in theirs[5].values())
        assert total == slots * nn.flatten_parameters(Model(dtype)).size  # each kept once


def test_the_sum_and_its_norm():
    """Against NumPy: the sum by the tree's own order in float32, the norm in float64."""
    ((norms, sums, *_),) = together(1, lambda group: train(group, 4, "float32", 1, 0.5))
    a, b, c, d = gradients(4, 0)
    flat = nn.flatten_parameters(Model("float32"))
    square = 0.0
    for i in range(len(SHAPES)):
        wanted = (a[i] + b[i]) + (c[i] + d[i])
        start = flat.offsets[i]
        np.testing.assert_array_equal(sums[start : start + wanted.size], wanted.ravel())
        square += (wanted.astype(np.float64) ** 2).sum()
    assert norms[0][0] == pytest.approx(square**0.5, rel=1e-6)
    assert norms[0][1] == pytest.approx(0.5 / (square**0.5 + 1e-6), rel=1e-6)


class Product(autograd.TensorOp):
    """x @ w, which has a gradient for w in some backwards only."""

    def __init__(self, has_gradient):
        self.has_gradient = has_gradient

    def compute(self, x, w):
        return x @ w

    def gradient(self, out_grad, node):
        x, w = node.inputs
        return out_grad @ w.transpose(), x.transpose() @ out_grad if self.has_gradient else None


class Layer(nn.Module):
    def __init__(self, draw):
        super().__init__()
        self.w = nn.Parameter(draw((400, 100)) / 20)

    def forward(self, x, product):
        return product(x @ self.w.detach().transpose(), self.w)


class Layers(nn.Module):
    def __init__(self, kind):
        super().__init__()
        draw = np.random.RandomState(0).standard_normal
        self.kind, self.unused = kind, nn.Parameter(draw((500, 100)))
        self.layers = [Layer(draw) for _ in range(4)]
        self.scale = nn.Parameter(draw(100))

    def forward(self, x, random):
        if self.kind == "two losses":
            (x * self.scale).sum().backward()
        dropped = random.randint(4)
        for i, layer in enumerate(self.layers):
            if self.kind == "skipped" and i == dropped:  # as by stochastic depth
                continue
            has_gradient = self.kind != "no gradient" or i % 2 == random.randint(2)
            product = lambda x, w, has=has_gradient: Product(has)(x, w)
            again = self.kind == "recomputed"
            x = nn.recompute(layer, x, product) if again else layer(x, product)
        return (x * self.scale).sum()


def sent_early(group, kind, is_early=True, sent=None):
    """The norms and weights of steps, whose gradients are sent early; `sent` gets the beginnings of
    the regions that rank 0 has sent when a backward ends."""
    model = Layers(kind)
    flat = nn.flatten_parameters(model)
    optimizer = optim.AdamW(flat, lr=0.01)
    parallel = DataParallel(group, flat, optimizer, 4)
    found = []
    for step in range(3):
        for micro_batch in parallel.own_micro_batches:
            optimizer.reset_grad()
            random = np.random.RandomState(10 * step + micro_batch)
            loss = model(ndl.Tensor(random.standard_normal((3, 100))), random)
            if is_early:
                parallel.send_early()
            loss.backward()
            if group.rank == 0 and sent is not None:
                sent.append([x.part.start for x in parallel._order[: parallel._begun]])
            parallel.add_micro_batch()
        norm, scale = parallel.reduce(1.0)
        parallel.step(scale)
        model(ndl.Tensor(np.ones((3, 100))), np.random).backward()  # of no step
        found += [norm.item(), flat.data.numpy().tobytes()]
    return found


@pytest.mark.parametrize("kind", ["plain", "recomputed", "skipped", "no gradient", "two losses"])
def test_gradients_that_are_sent_early_change_no_bit(kind):
    (wanted,) = together(1, lambda group: sent_early(group, kind))
    for ranks in 2, 4:
        assert together(ranks, lambda group: sent_early(group, kind)) == [wanted] * ranks


def test_gradients_are_sent_beside_the_backward():
    """Those of the last layers first, a region when its last gradient is there; without send_early
    none, and in a micro-batch that is not the last none."""
    parts = [180224, 131072, 65536]  # in which the layers lie; the first one has `unused`
    for ranks, is_early, expected in (
        (2, True, [[], parts] * 3),
        (4, True, [parts] * 3),
        (2, False, [[]] * 6),
    ):
        sent = []
        together(ranks, partial(sent_early, kind="plain", is_early=is_early, sent=sent))
        assert sent == expected


def test_a_hook_of_early_sends_is_of_one_backward_alone():
    """No other walk calls it, and no copy has it."""
    flat = nn.flatten_parameters(nn.Linear(3, 2))
    called, weight = [], flat.parameters[0]
    weight.post_accumulate_grad_hook = called.append
    loss = (weight * 2).sum()
    autograd.grad(loss, weight)
    assert called == []
    loss.backward()
    assert called == [weight]
    for copied in copy.deepcopy(weight), pickle.loads(pickle.dumps(weight, 2)):
        assert copied.post_accumulate_grad_hook is None


def test_a_part_of_the_state_has_no_parts():
    flat = nn.flatten_parameters(Model("float32"))
    optimizer = optim.AdamW(flat)
    optimizer.keep([slice(0, 16384), slice(32768, 49152)])
    optimizer.keep([slice(0, 16384), slice(32768, 49152)])
    with pytest.raises(ValueError, match="keep: .* of a state that is kept in parts already"):
        optimizer.keep([slice(0, 16384)])


def test_edits_of_moments_change_those_of_all_ranks():
    zero = [{"do": "moments", "to": "zero", "parts": f"parts.{i}"} for i in (0, 3)]

    def work(group):
        edit = Replay("", None, 0, 0, 2, zero).change
        state = train(group, 8, "float32", edit=edit)[4]
        return {name: state[name] for name in state if name[:2] in ("m.", "v.")}

    (wanted,) = together(1, work)
    assert {name[2:] for name, x in wanted.items() if not any(x)} == {"parts.0", "parts.3"}
    for ranks in 2, 4, 8:
        assert together(ranks, work)[0] == wanted


def test_digest_by_which_ranks_begin_is_of_all_weights():
    def work(group):
        flat = nn.flatten_parameters(Model("float32"))
        parallel = DataParallel(group, flat, optim.AdamW(flat), 2)
        told = [parallel.digest()]
        for at in (0, flat.size // 2, flat.size - 1):
            flat.data[at : at + 1] = 9.0
            told.append(parallel.digest())
        return told

    one, other = together(2, work)
    assert one == other and len({*one}) == 4


def test_a_part_of_the_state_is_not_saved_as_all_of_it():
    def work(group):
        flat = nn.flatten_parameters(Model("float32"))
        optimizer = optim.AdamW(flat)
        DataParallel(group, flat, optimizer, 2)
        with pytest.raises(RuntimeError, match="save within DataParallel.whole_optimizer"):
            optimizer.state_dict()

    together(2, work)


def test_optimizers_that_no_ranks_share_are_named():
    flat = nn.flatten_parameters(Model("float32"))
    groups = [{"params": flat.parameters[:2]}, {"params": flat.parameters[2:], "lr": 0.1}]
    for optimizer in optim.SGD(flat), optim.AdamW(groups):
        name = type(optimizer).__name__
        with pytest.raises(TypeError, match=rf"an AdamW that was made of `flat` .* is {name}\(4"):
            DataParallel(Group(), flat, optimizer, 2)


def test_rank_0_goes_first_and_its_error_is_everybodys():
    order = []

    def work(group):
        with group.rank_0_first("a cache"):
            order.append(group.rank)
        assert group.first("a number", lambda: 5 + group.rank) == 5

        def fail(error):
            raise error

        met = []
        for error, said in (
            (ValueError("no such file"), "no such file"),
            (KeyboardInterrupt(), "^$|^rank 0: KeyboardInterrupt$"),  # which says nothing
        ):
            with pytest.raises((type(error), RankFailed), match=said) as caught:
                group.first("a file", lambda error=error: fail(error))
            met.append(type(caught.value))
        return met

    others = [RankFailed, RankFailed]
    assert together(3, work) == [[ValueError, KeyboardInterrupt], others, others]
    assert order[0] == 0 and sorted(order) == [0, 1, 2]


def test_what_rank_0_makes_may_take_longer_than_the_deadline(monkeypatch):
    monkeypatch.setattr("together.SECONDS", 1)
    slow = lambda: time.sleep(1.5) or 5
    assert together(2, lambda group: group.first("the data", slow)) == [5, 5]


def device(kind="cpu", **facts):
    facts = {"name": "H200", "products": "library", "uuid": ""} | facts
    return SimpleNamespace(is_host=kind == "cpu", name=kind, properties=lambda: facts)


@pytest.mark.parametrize(
    "meet, words",
    [
        (lambda g: g.same("the data", "a" if g.rank < 2 else "b"), r"rank 2: the data .*\(b, and"),
        (lambda g: g.connect(device(products=f"{g.rank}")), "rank 1: the libraries of products"),
        (lambda g: g.connect(device("cuda" if g.rank else "cpu")), "rank 1: the kinds of devices"),
        (lambda g: g.connect(device("cuda", name=f"{g.rank}")), r"rank 1: the GPUs .*\(1, and 0"),
        (lambda g: g.connect(device("cuda", products=f"{g.rank}")), "rank 1: the libraries of"),
        (lambda g: g.connect(device("cuda", uuid="GPU-7")), r"two ranks have .* GPU \(\[\['GPU-7"),
    ],
)
def test_ranks_that_cannot_go_together_are_refused(monkeypatch, meet, words):
    """Rank 0 reports, the others end."""
    monkeypatch.setattr("needle.distributed.group._mpi", lambda place: None)
    with pytest.raises((ValueError, RankFailed), match=words):
        together(3, meet)


@pytest.mark.parametrize(
    "name, local_rank, gpus, chosen",
    [
        ("auto", 1, 2, "cuda:1"),
        ("cuda", 1, 4, "cuda:1"),
        ("auto", 1, 1, "cuda:0"),  # the launcher lets each see its own
        ("auto", 1, 0, "auto"),
        ("cpu", 1, 2, "cpu"),
        ("cuda:1", 1, 2, "takes a GPU of its own: leave it out"),
        ("auto", 2, 2, "torchrun started 3 ranks on .*, where 2 GPUs are visible: start at most 2"),
    ],
)
def test_the_device_of_a_rank(monkeypatch, name, local_rank, gpus, chosen):
    monkeypatch.setattr("needle.distributed.group.visible_gpus", lambda: gpus)
    monkeypatch.setattr("needle.distributed.group.choose_device", lambda name: name)
    group = Group(Place(local_rank, 3, local_rank, 3, "torchrun"))
    if " " not in chosen:
        assert group.device(name) == chosen
        return
    with pytest.raises(ValueError, match=chosen):
        group.device(name)
    with pytest.raises(ValueError, match="torchrun started 3 ranks .* start them with mpirun"):
        group.connect(device())
