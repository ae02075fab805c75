"""fit against a plain reference loop, update by update."""

import dataclasses
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from harness import DEVICES, device_of, naming

import needle as ndl
from needle import _C, Tensor, nn, optim, training
from needle.models import Pythia, PythiaConfig, pythia

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
    """The losses, and the parameters after each update: gradients are summed batch by batch and
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


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("kind", [optim.SGD, optim.Adam, optim.AdamW])
@pytest.mark.parametrize("accumulate, max_norm", [(1, None), (1, 0.05), (3, None), (3, 0.05)])
def test_fit_updates_as_a_reference_loop(kind, flat, accumulate, max_norm):
    def schedule(step):
        return 0.1 / step

    model, seen = Classifier(), []
    params = nn.flatten_parameters(model) if flat else model.parameters()
    if not flat:  # one that no loss reads is left alone
        params = [*params, nn.Parameter(np.ones((2, 2)))]
    before = [p.cached_data._handle.ptr() for p in model.parameters()]
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
    if kind is optim.AdamW:
        assert [p.cached_data._handle.ptr() for p in model.parameters()] == before
    assert flat or (params[-1].numpy() == 1).all()
    expected, updates = reference(kind, accumulate, max_norm, schedule)
    assert [step for step, _, _ in seen] == list(range(1, len(expected) + 1))
    assert [loss for _, loss, _ in seen] == losses
    np.testing.assert_allclose(losses, expected, rtol=2e-5)
    for (_, _, got), update in zip(seen, updates):
        np.testing.assert_allclose(got, update, rtol=2e-4, atol=2e-5)


def test_fit_asks_a_language_model_for_its_loss_and_accumulates_as_one_batch(monkeypatch):
    """It keeps no logits, and gives the same number."""
    config = PythiaConfig(vocab_size=16, hidden_size=8, num_layers=1, num_heads=1, max_seq_len=8)
    ids = np.random.default_rng(0).integers(0, 16, (6, 8))
    asked, loss, found = [], Pythia.loss, []
    monkeypatch.setattr(Pythia, "loss", lambda self, *of: asked.append(of) or loss(self, *of))
    for cuts in [], [2, 4], [3]:
        np.random.seed(0)
        model = Pythia(dataclasses.replace(config, tie_word_embeddings=True)).eval()
        optimizer = optim.SGD(nn.flatten_parameters(model), lr=1.0)
        batches = [*zip(np.split(ids, cuts), np.split(ids, cuts))]
        wanted = model(ids, ids)[1].item()
        losses = ndl.fit(model, batches, optimizer, accumulate=len(batches), progress=False)
        assert model.training and losses[0] == pytest.approx(wanted, rel=1e-6)
        found.append(weights(model))
    for values in found[1:]:
        np.testing.assert_allclose(values, found[0], rtol=1e-5, atol=1e-6)
    assert len(asked) == 1 + 3 + 2


def test_fit_that_ctrl_c_ends_returns_the_losses_of_its_steps(recwarn):
    wanted = ndl.fit(Classifier(), BATCHES, progress=False)

    def interrupted(at):
        for number, batch in enumerate(BATCHES):
            if number == at:
                raise KeyboardInterrupt
            yield batch

    def on_step(step, loss):
        if step == 3:
            raise KeyboardInterrupt

    assert ndl.fit(Classifier(), BATCHES, on_step=on_step, progress=False) == wanted[:3]
    assert ndl.fit(Classifier(), interrupted(5), steps=7, progress=False) == wanted[:5]
    accumulated = ndl.fit(Classifier(), interrupted(5), accumulate=2, progress=False)
    assert len(accumulated) == 2 and not recwarn
    with pytest.raises(KeyboardInterrupt):
        ndl.fit(Classifier(), interrupted(0), progress=False)


def test_fit_takes_a_number_of_steps():
    model, again = Classifier(), Classifier()
    losses = ndl.fit(model, BATCHES, steps=2, loss=nn.SoftmaxLoss(), progress=False)
    assert losses == ndl.fit(again, BATCHES, steps=2, progress=False)
    with pytest.warns(UserWarning, match="ended after 2 of 5 steps"):
        assert len(ndl.fit(model, BATCHES[:3], steps=5, accumulate=2, progress=False)) == 2


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_fit_makes_tensors_of_numpy_arrays(dtype):
    """Tensors get the model's dtype; ids stay as they are."""

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


def test_fit_names_what_it_cannot_use_and_changes_nothing():
    softmax, linear = nn.SoftmaxLoss(), nn.Sequential(nn.Linear(3, 2))
    pair = [(X[0], Y[0])]
    for model, batches, loss, error, said, *steps in (
        (linear, pair, None, TypeError, "fit: Sequential takes no targets.*loss=nn.SoftmaxLoss"),
        (nn.Linear(3, 1), pair, None, TypeError, "takes no targets.*loss=nn.SoftmaxLoss"),
        (linear, X, softmax, TypeError, r"must be a pair .ids, targets., .*of shape \(4, 3\)"),
        (linear, pair[0], softmax, TypeError, r"a single batch is \[\(ids, targets\)\]"),
        (linear, pair, lambda y, t: y, ValueError, r"must be one number, .*shape is \(4, 2\)"),
        (linear, [(X[0].astype(int), 0)], softmax, TypeError, r"ndarray \(ndl.Tensor\(array\)"),
        (linear, iter([]), softmax, ValueError, "fit: no batches"),
        (linear, [], softmax, ValueError, "fit: no batches", None),
        (linear, [(X[0] * np.nan, Y[0])], softmax, FloatingPointError, "loss of step 1 is nan"),
    ):
        before = weights(model)
        with naming(said), pytest.raises(error, match=said):
            ndl.fit(model, batches, steps=steps[0] if steps else 3, loss=loss, progress=False)
        np.testing.assert_array_equal(weights(model), before)
    with pytest.raises(ValueError, match="fit: accumulate must be 1 or more, not 0"):
        ndl.fit(linear, pair, loss=softmax, accumulate=0)


def test_fit_draws_tqdms_bar_if_that_is_installed(capsys, monkeypatch):
    pytest.importorskip("tqdm")
    losses = ndl.fit(Classifier(), BATCHES, accumulate=2)
    drawn = capsys.readouterr().err
    assert "4/4" in drawn and f"loss {losses[-1]:.4f}" in drawn
    for name in [name for name in sys.modules if name.partition(".")[0] == "tqdm"]:
        monkeypatch.setitem(sys.modules, name, None)
    assert ndl.fit(Classifier(), BATCHES, accumulate=2) == losses
    assert capsys.readouterr().err == ""


class Replayed:
    """A _C.Graph that does the step each time, for a device that records none."""

    made = 0

    def __init__(self, device, step):
        Replayed.made += 1
        self.replay = step
        step()


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("device", DEVICES)
def test_recorded_micro_batch_changes_no_bit(monkeypatch, device, fp8):
    device = device_of(device)
    if not device.records_graphs:
        monkeypatch.setattr(_C, "Graph", Replayed)
    monkeypatch.setattr(pythia, "FP8_LAYERS_FROM", 32)
    config = PythiaConfig(vocab_size=64, hidden_size=32, num_layers=2, num_heads=2, max_seq_len=16)

    def losses(recorded):
        np.random.seed(1)
        model = Pythia(config, device=device)
        if fp8:
            model.use_fp8()
        optimizer = optim.AdamW(nn.flatten_parameters(model), lr=1e-2)

        def gradient(ids, targets):
            optimizer.reset_grad()
            loss = model.loss(ids, targets)
            loss.backward()
            return loss.cached_data

        compute = gradient
        if recorded:
            compute = training.GraphedStep(gradient, (2, 16), device)
        found = []
        for _ in range(6):
            ids = np.random.randint(0, 64, (2, 17)).astype(np.int32)
            inputs = [_C.array(x, "int32", device) for x in (ids[:, :-1], ids[:, 1:])]
            found.append(compute(*inputs))
            optimizer.step()
        return [loss.item() for loss in found], optimizer.flat.data.numpy().tobytes()

    assert losses(True) == losses(False)


def test_graphs_are_for_devices_that_record_them_and_small_micro_batches():
    loss, gpu = _C.array(1.0, "float32", ndl.cpu()), SimpleNamespace(records_graphs=True)
    recorded = training.GraphedStep(lambda ids, targets: loss, (1, 2), ndl.cpu())
    assert recorded([[1, 2]], [[2, 3]]).item() == 1
    with pytest.raises(ValueError, match="the CPU backend records no graphs"):
        recorded([[1, 2]], [[2, 3]])
    for device, tokens, worth in (gpu, 16_384, True), (gpu, 16_385, False), (ndl.cpu(), 1, False):
        assert training.worth_recording(device, tokens) == worth
