"""fit against a plain reference loop, update by update."""

import sys
from types import SimpleNamespace

import numpy as np
import pytest
from harness import DEVICES, device_of

import needle as ndl
from needle import _C, Tensor, nn, optim, training
from needle.models import Pythia, PythiaConfig

X = np.random.default_rng(0).standard_normal((7, 4, 3)).astype(np.float32)
Y = np.random.default_rng(1).integers(0, 2, (7, 4))
BATCHES = list(zip(X, Y))


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        np.random.seed(0)
        self.layers = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2))

    def forward(self, x, targets=None):
        logits = self.layers(Tensor(x, requires_grad=False))
        return logits if targets is None else (logits, nn.SoftmaxLoss()(logits, targets))


def weights(model):
    return np.concatenate([p.numpy().ravel() for p in model.parameters()])


def reference(kind, accumulate, max_norm, schedule):
    """The losses, and the parameters behind each update: gradients are summed batch by batch and
    clipped in float64, then one step of the optimizer is taken on them."""
    model = Classifier()
    optimizer = kind(model.parameters(), weight_decay=0.0)
    losses, seen = [], []
    for step, begin in enumerate(range(0, len(BATCHES), accumulate), 1):
        group = BATCHES[begin : begin + accumulate]
        sums, total = [0.0] * len(optimizer.params), 0.0
        for x, y in group:
            optimizer.reset_grad()
            loss = model(x, y)[1]
            loss.backward()
            total += loss.item() / len(group)
            grads = [p.grad.numpy().astype(np.float64) for p in optimizer.params]
            sums = [s + g / len(group) for s, g in zip(sums, grads)]
        norm = np.sqrt(sum((s**2).sum() for s in sums))
        factor = 1.0 if max_norm is None else min(1.0, max_norm / (norm + 1e-6))
        for p, s in zip(optimizer.params, sums):
            p.grad = Tensor(s * factor, requires_grad=False)
        optimizer.lr = schedule(step)
        optimizer.step()
        losses.append(total)
        seen.append(weights(model))
    return losses, seen


@pytest.mark.parametrize("accumulate", [1, 2])
def test_fit_parameters_of_a_list_stay_and_unused_ones_are_left_alone(accumulate):
    model = Classifier()
    model.unused = nn.Parameter(np.ones((2, 2)))
    optimizer = optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    before = [p.cached_data._handle.ptr() for p in model.parameters()]
    ndl.fit(model, BATCHES, optimizer, accumulate=accumulate, progress=False)
    assert [p.cached_data._handle.ptr() for p in model.parameters()] == before
    np.testing.assert_array_equal(model.unused.numpy(), np.ones((2, 2)))


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("kind", [optim.SGD, optim.Adam, optim.AdamW])
@pytest.mark.parametrize("accumulate, max_norm", [(1, None), (1, 0.05), (3, None), (3, 0.05)])
def test_every_update_is_the_reference_loops(kind, flat, accumulate, max_norm):
    def schedule(step):
        return 0.1 / step

    model, seen = Classifier(), []
    params = nn.flatten_parameters(model) if flat else model.parameters()
    losses = ndl.fit(
        model,
        iter(BATCHES),
        kind(params, lr=7.0, weight_decay=0.0),
        schedule=schedule,
        max_norm=max_norm,
        accumulate=accumulate,
        on_step=lambda step, loss: seen.append((step, loss, weights(model))),
        progress=False,
    )
    expected, updates = reference(kind, accumulate, max_norm, schedule)
    assert [step for step, _, _ in seen] == list(range(1, len(expected) + 1))
    assert [loss for _, loss, _ in seen] == losses
    np.testing.assert_allclose(losses, expected, rtol=2e-5)
    for (_, _, got), update in zip(seen, updates):
        np.testing.assert_allclose(got, update, rtol=2e-4, atol=2e-5)


def test_a_loss_of_ones_own_and_a_number_of_steps():
    model = Classifier()
    losses = ndl.fit(model, BATCHES, steps=2, loss=nn.SoftmaxLoss(), progress=False)
    again = Classifier()
    assert losses == ndl.fit(again, BATCHES, steps=2, progress=False)
    np.testing.assert_array_equal(weights(model), weights(again))
    assert len(ndl.fit(again, BATCHES, steps=20, progress=False)) == len(BATCHES)
    assert ndl.fit(again, [], progress=False) == []


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_arrays_of_numpy_become_tensors(dtype):
    """In the model's dtype, whatever theirs; ids stay what they are."""

    def losses(inputs):
        np.random.seed(0)
        model = nn.Sequential(nn.Linear(3, 8, dtype=dtype), nn.ReLU(), nn.Linear(8, 2, dtype=dtype))
        batches = [(x, y) for x, y in zip(inputs, Y)]
        return ndl.fit(model, batches, loss=nn.SoftmaxLoss(), progress=False)

    expected = losses([Tensor(x, dtype=dtype) for x in X])
    assert losses(X) == losses(X.astype(np.float64)) == expected
    table = nn.Sequential(nn.Embedding(5, 2), nn.Flatten())
    ids = (np.array([[3]]), np.array([1]))
    assert ndl.fit(table, [ids], loss=nn.SoftmaxLoss(), progress=False)


@pytest.mark.parametrize(
    "batches, loss, error, said",
    [
        ([(X[0], Y[0])], None, TypeError, "fit: Sequential takes no targets.*loss=nn.SoftmaxLoss"),
        (X, nn.SoftmaxLoss(), TypeError, r"must be a pair .ids, targets., .*of shape \(4, 3\)"),
        ((X[0], Y[0]), nn.SoftmaxLoss(), TypeError, r"a single batch is \[\(ids, targets\)\]"),
        ([5], nn.SoftmaxLoss(), TypeError, "must be a pair .ids, targets., but one is a int"),
        ([(X[0], 0)], lambda y, t: y, ValueError, r"loss must be one number, .*shape is \(4, 2\)"),
        ([(X[0].astype(int), 0)], nn.SoftmaxLoss(), TypeError, r"ndarray \(ndl.Tensor\(array\)"),
    ],
)
def test_what_fit_wants_is_said(batches, loss, error, said):
    model = nn.Sequential(nn.Linear(3, 2))
    with pytest.raises(error, match=said):
        ndl.fit(model, batches, loss=loss, progress=False)


def test_fit_without_a_loss_demands_one_of_every_layer():
    """A second positional parameter of forward is no declaration of targets."""

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(3, 1)

        def forward(self, x, y):
            return self.inner(x) + y, self.inner(x).sum()

    x, y = np.ones((4, 3)), np.ones((4, 1))
    for model in nn.Linear(3, 1), nn.Sequential(nn.Linear(3, 1)), nn.LayerNorm1d(3), Two():
        before = [p.numpy().copy() for p in model.parameters()]
        with pytest.raises(TypeError, match="takes no targets.*loss=nn.SoftmaxLoss"):
            ndl.fit(model, [(x, y)] * 3, progress=False)
        for p, old in zip(model.parameters(), before):
            np.testing.assert_array_equal(p.numpy(), old)
    with pytest.raises(TypeError, match="positional"):
        nn.Linear(3, 1)(Tensor(x), Tensor(y))


@pytest.mark.parametrize("second", [None, "missing", "row"])
def test_fit_with_targets_but_without_a_loss_is_refused(second):
    """A forward that declares targets must give a pair with the loss: row 1 is none."""

    class Model(nn.Linear):
        def forward(self, x, targets=None):
            y = super().forward(x)
            return {None: (y, None), "missing": (y,), "row": y}[second]

    model = Model(3, 1)
    before = model.weight.numpy().copy()
    with pytest.raises(TypeError, match="Model must give .anything, loss. for targets"):
        ndl.fit(model, [(np.ones((2, 3)), np.ones((2, 1)))] * 3, progress=False)
    np.testing.assert_array_equal(model.weight.numpy(), before)


def test_a_language_model():
    np.random.seed(0)
    config = PythiaConfig(vocab_size=16, hidden_size=8, num_layers=1, num_heads=1, max_seq_len=8)
    model = Pythia(config).eval()
    ids = np.arange(9)[None] % 4
    losses = ndl.fit(model, [(ids[:, :-1], ids[:, 1:])] * 100, max_norm=1.0, progress=False)
    assert losses[-1] < losses[0] - 0.1 and model.training


def test_a_language_model_is_asked_for_its_loss(monkeypatch):
    """Which keeps no logits, and is the same number."""
    config = PythiaConfig(vocab_size=16, hidden_size=8, num_layers=1, num_heads=1, max_seq_len=8)
    model = Pythia(config)
    ids = np.random.RandomState(0).randint(0, 16, (2, 5))
    batch, asked = (ids, np.roll(ids, -1, 1)), []
    loss = type(model).loss

    def watched(self, *arrays):
        asked.append(arrays)
        return loss(self, *arrays)

    monkeypatch.setattr(type(model), "loss", watched)
    wanted = model(*batch)[1].item()
    (found,) = ndl.fit(model, [batch], progress=False)
    assert len(asked) == 1 and found == pytest.approx(wanted, rel=1e-6)


def test_a_loss_that_is_not_finite_changes_nothing():
    model = Classifier()
    before = weights(model)
    with pytest.raises(FloatingPointError, match="fit: the loss of step 1 is nan"):
        ndl.fit(model, [(X[0] * np.nan, Y[0])], progress=False)
    np.testing.assert_array_equal(weights(model), before)
    with pytest.raises(ValueError, match="accumulate must be 1 or more"):
        ndl.fit(model, BATCHES, accumulate=0)


def test_the_bar_is_tqdms_where_that_is_installed(capsys, monkeypatch):
    pytest.importorskip("tqdm")
    losses = ndl.fit(Classifier(), BATCHES, accumulate=2)
    drawn = capsys.readouterr().err
    assert "4/4" in drawn and f"loss {losses[-1]:.4f}" in drawn
    for name in [name for name in sys.modules if name.partition(".")[0] == "tqdm"]:
        monkeypatch.setitem(sys.modules, name, None)
    assert ndl.fit(Classifier(), BATCHES, accumulate=2) == losses
    assert capsys.readouterr().err == ""


class Replayed:
    """_C.Graph of a device that records none: it does the step each time."""

    made = 0

    def __init__(self, device, step):
        Replayed.made += 1
        self.replay = step
        step()


@pytest.mark.parametrize("device", DEVICES)
def test_a_recorded_micro_batch_changes_no_bit(monkeypatch, device):
    device = device_of(device)
    if not device.records_graphs:
        monkeypatch.setattr(_C, "Graph", Replayed)
    config = PythiaConfig(vocab_size=64, hidden_size=32, num_layers=2, num_heads=2, max_seq_len=16)

    def losses(recorded):
        np.random.seed(1)
        model = Pythia(config, device=device)
        optimizer = optim.AdamW(nn.flatten_parameters(model), lr=1e-2)

        def gradient(ids, targets):
            optimizer.reset_grad()
            loss = model.loss(ids, targets)
            loss.backward()
            return loss.cached_data

        compute = gradient
        if recorded:
            compute = training.Recorded(gradient, (2, 16), device)
        found = []
        for _ in range(6):
            ids = np.random.randint(0, 64, (2, 17)).astype(np.int32)
            inputs = [_C.array(x, "int32", device) for x in (ids[:, :-1], ids[:, 1:])]
            found.append(compute(*inputs))
            optimizer.step()
        return [loss.item() for loss in found], optimizer.flat.data.numpy().tobytes()

    assert losses(True) == losses(False)


def test_a_device_that_records_nothing():
    loss = _C.array(1.0, "float32", ndl.cpu())
    recorded = training.Recorded(lambda ids, targets: loss, (1, 2), ndl.cpu())
    assert recorded([[1, 2]], [[2, 3]]).item() == 1
    with pytest.raises(ValueError, match="the CPU backend records no graphs"):
        recorded([[1, 2]], [[2, 3]])


def test_small_micro_batches_are_worth_recording():
    gpu = SimpleNamespace(records_graphs=True)
    assert training.worth_recording(gpu, 8 * 2048)
    assert not training.worth_recording(gpu, 8 * 2048 + 1)
    assert not training.worth_recording(ndl.cpu(), 1)
