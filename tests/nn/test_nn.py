"""Modules, initialisation and the course's layers, against NumPy written here."""

import copy
import pickle
import sys

import numpy as np
import pytest
from gradients import logsoftmax
from harness import close, draw

import needle as ndl
from needle import Tensor, init, nn, optim
from needle import backend_ndarray as nd
from needle.models import Pythia, PythiaConfig

# ---- init ----------------------------------------------------------------------------------------


def test_init_draws_numpys_numbers(device):
    np.random.seed(5)
    made = [
        init.rand(3, 4, low=-1, high=2, device=device),
        init.randn(2, 5, mean=1, std=3, device=device),
        init.randb(4, 4, p=0.3, device=device),
        init.kaiming_uniform(6, 7, device=device),
        init.kaiming_normal(6, 7, device=device),
        init.xavier_uniform(6, 7, gain=1.5, device=device),
        init.xavier_normal(6, 7, gain=1.5, device=device),
        # the course's: a convolution's weights (k, k, in, out) with the fan of k k in
        init.kaiming_uniform(36, 72, (3, 3, 4, 8), device=device),
    ]
    np.random.seed(5)
    expected = [
        np.random.rand(3, 4) * 3 - 1,
        np.random.randn(2, 5) * 3 + 1,
        np.random.rand(4, 4) <= 0.3,
        (np.random.rand(6, 7) * 2 - 1) * np.sqrt(2) * np.sqrt(3 / 6),
        np.random.randn(6, 7) * np.sqrt(2) / np.sqrt(6),
        (np.random.rand(6, 7) * 2 - 1) * 1.5 * np.sqrt(6 / 13),
        np.random.randn(6, 7) * 1.5 * np.sqrt(2 / 13),
        (np.random.rand(3, 3, 4, 8) * 2 - 1) * np.sqrt(2) * np.sqrt(3 / 36),
    ]
    for got, values in zip(made, expected):
        assert got.device == device
        close(got.numpy(), values, 2e-7)
    close(init.one_hot(4, Tensor([1, 3])).numpy(), np.eye(4)[[1, 3]])
    assert init.one_hot(2_000_000, [5]).sum().item() == 1  # no identity of n x n is made
    close(init.constant(2, 3, c=4).numpy(), np.full((2, 3), 4))


def test_initialisers_fill_in_place():
    """PyTorch's, of the weights (in, out) of a Linear that is flattened."""
    layer, fill, rand, randn = nn.Linear(4, 6), nn.init, np.random.rand, np.random.randn
    flat, gain, top = nn.flatten_parameters(layer), np.sqrt(2 / (1 + 0.5**2)), np.sqrt(0.6)
    for call, drawn, scale, shift in [
        (lambda w: fill.uniform_(w, -2, 1), rand, 3, -2),
        (lambda w: fill.normal_(w, 1.0, 0.5), randn, 0.5, 1),
        (lambda w: fill.xavier_uniform_(w, 2), rand, 4 * top, -2 * top),
        (lambda w: fill.xavier_normal_(w, 2), randn, 2 * np.sqrt(0.2), 0),
        (lambda w: fill.kaiming_uniform_(w, 0.5), rand, gain * 3**0.5, -gain * 0.75**0.5),
        (lambda w: fill.kaiming_normal_(w, 0.5, "fan_out"), randn, gain / 6**0.5, 0),
        (lambda w: fill.kaiming_normal_(w, nonlinearity="relu"), randn, np.sqrt(0.5), 0),
        (fill.zeros_, rand, 0, 0),
        (fill.ones_, rand, 0, 1),
    ]:
        np.random.seed(1)
        assert call(layer.weight) is layer.weight
        np.random.seed(1)
        close(flat.view(flat.data, 0).numpy(), drawn(4, 6) * scale + shift)
    assert (fill.constant_(ndl.zeros(2, dtype="bfloat16"), 0.5).numpy() == 0.5).all()
    with pytest.raises(ValueError, match=r"needs a matrix .fan_in, fan_out., but the shape is .3,"):
        fill.xavier_normal_(ndl.zeros(3))


# ---- modules -------------------------------------------------------------------------------------


class Nested(nn.Module):
    def __init__(self):
        super().__init__()
        self.list = [nn.Linear(2, 3), {"inner": nn.Linear(3, 2)}]
        self.pair = (nn.Dropout(0.5), nn.Parameter(np.ones(4)))
        self.shared = self.list[0].weight


def test_modules_find_parameters_and_children():
    module = Nested()
    linear, inner, dropout = module.list[0], module.list[1]["inner"], module.pair[0]
    assert len(module.parameters()) == 5  # each once, though the first weight is found twice
    assert module.children() == [linear, inner, dropout]
    seen = []
    assert module.apply(seen.append) is module
    assert {*map(id, seen)} == {*map(id, [linear, inner, dropout, module])} and seen[-1] is module
    module.eval()
    assert not module.training and not dropout.training
    module.train()
    assert dropout.training
    module.shared.grad = ndl.ones(2, 3)
    module.zero_grad()
    assert all(p.grad is None for p in module.parameters())


def test_what_is_shared_is_found_once_under_its_first_name():
    """As in PyTorch; repr shows each place, as a tree."""
    linear, net = nn.Linear(2, 3), nn.Module()
    net.a, net.b, net.c, net.again = linear, [linear], nn.Sequential(linear), linear.weight
    net.mask = net.other = ndl.zeros(3)
    for walk, wanted in (
        ("modules", ["", "a", "c"]),
        ("children", ["a", "c"]),
        ("parameters", ["a.weight", "a.bias"]),
        ("buffers", ["mask"]),
    ):
        assert [name for name, _ in getattr(net, f"named_{walk}")()] == wanted
        assert len(getattr(net, walk)()) == len(wanted)
    assert [*net.state_dict()] == ["a.weight", "a.bias", "mask"]
    assert repr(net).startswith("Module(again (2, 3), mask (3,), other (3,)): 9 parameters\n")
    assert [line.split(":")[0] for line in repr(net).split("\n")[1:]] == [
        "  a ... b.0",
        "  c",
        "    0",
    ]


def test_state_dict_round_trip():
    one, other = (nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.BatchNorm1d(4)) for _ in range(2))
    one(Tensor(draw(0, 5, 3)))  # moves the running statistics
    other.load_state_dict(one.state_dict())
    one.eval(), other.eval()
    x = Tensor(draw(1, 5, 3))
    np.testing.assert_array_equal(one(x).numpy(), other(x).numpy())
    state = one.state_dict()
    name = next(iter(state))
    with pytest.raises((KeyError, ValueError), match=name.replace(".", r"\.")):
        other.load_state_dict({k: v for k, v in state.items() if k != name})
    with pytest.raises((KeyError, ValueError)):
        other.load_state_dict(state | {"stranger": state[name]})
    for shape in [(1,), (1, 4), (4, 3), ()]:  # some of them would broadcast
        wrong = state | {name: np.zeros(shape, np.float32)}
        with pytest.raises(ValueError, match=rf"{name} must have shape \(3, 4\)"):
            other.load_state_dict(wrong, strict=False)
    other.load_state_dict({}, strict=False)  # where nothing is missing
    np.testing.assert_array_equal(one(x).numpy(), other(x).numpy())  # nothing was loaded


def test_linear(device):
    np.random.seed(3)
    layer = nn.Linear(5, 7, device=device)
    np.random.seed(3)
    bound = np.sqrt(2) * np.sqrt(3 / 5)
    weight = np.random.rand(5, 7) * 2 * bound - bound  # the weight is drawn first
    bias = np.random.rand(7, 1) * 2 * np.sqrt(2) * np.sqrt(3 / 7) - np.sqrt(2) * np.sqrt(3 / 7)
    close(layer.weight.numpy(), weight, 3e-7)
    assert layer.bias.shape == (1, 7)
    close(layer.bias.numpy(), bias.T, 3e-7)
    assert len(nn.Linear(2, 2, bias=False).parameters()) == 1
    assert not any(p.numpy().any() for p in nn.Linear(2, 2, std=0.0).parameters())


def test_dropout(device):
    layer = nn.Dropout(0.25)
    x = Tensor(np.ones((40, 50)), device=device)
    np.random.seed(9)
    got = layer(x).numpy()
    np.random.seed(9)
    kept = np.random.rand(40, 50) <= 0.75
    close(got, kept / 0.75)
    layer.eval()
    np.random.seed(9)
    before = np.random.get_state()[2]
    np.testing.assert_array_equal(layer(x).numpy(), np.ones((40, 50)))
    assert np.random.get_state()[2] == before  # draws only in training


def test_batch_norm_follows_the_running_statistics(device):
    x = draw(4, 9, 6) * 3 + 2
    t = Tensor(x, device=device)
    batch = nn.BatchNorm1d(6, momentum=0.2, device=device)
    held = (*batch.buffers(), *batch.state_dict().values())  # they follow the training
    normed = (x - x.mean(0)) / np.sqrt(x.var(0) + 1e-5)
    close(batch(t).numpy(), normed)
    close(batch.running_mean.numpy(), 0.2 * x.mean(0))
    close(batch.running_var.numpy(), 0.8 + 0.2 * x.var(0))
    for one in (held[0], held[-2]):
        close(one.numpy(), 0.2 * x.mean(0))
    for one in (held[1], held[-1]):
        close(one.numpy(), 0.8 + 0.2 * x.var(0))
    batch.eval()
    close(batch(t).numpy(), (x - 0.2 * x.mean(0)) / np.sqrt(0.8 + 0.2 * x.var(0) + 1e-5))
    assert len(batch.parameters()) == 2


# ---- transformers --------------------------------------------------------------------------------


def norm(x):
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)


def heads(x, count):
    return x.reshape(*x.shape[:2], count, -1).transpose(0, 2, 1, 3)


def plain_attention(q, k, v, causal):
    scores = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
    if causal:
        see = np.tril(np.ones(scores.shape[-2:], bool), scores.shape[-1] - scores.shape[-2])
        scores = np.where(see, scores, -np.inf)
    p = np.exp(logsoftmax(scores))
    return p @ v, p


@pytest.mark.parametrize("keys", [5, 7])
@pytest.mark.parametrize("causal", [True, False])
def test_multi_head_attention(causal, keys, device):
    q, k, v = (draw(i, 2, 3, time, 8) for i, time in enumerate((5, keys, keys)))
    layer = nn.MultiHeadAttention(dropout=0.0, causal=causal, device=device)
    result, probabilities = layer(*(Tensor(a, device=device) for a in (q, k, v)))
    expected, p = plain_attention(q, k, v, causal)
    close(result.numpy(), expected)
    close(np.asarray(probabilities), p)


def attention_layer(layer, x, causal):
    """The float64 reference of one AttentionLayer on itself, with the layer's own weights."""
    w = {
        n: getattr(layer, n).weight.numpy().astype(float)
        for n in ("q_projection", "k_projection", "v_projection", "out_projection")
    }
    q, k, v = (heads(norm(x) @ w[n + "_projection"], layer.num_head) for n in "qkv")
    result, _ = plain_attention(q, k, v, causal)
    return result.transpose(0, 2, 1, 3).reshape(*x.shape[:2], -1) @ w["out_projection"]


@pytest.mark.parametrize("causal", [True, False])
def test_attention_layer(causal, device):
    np.random.seed(2)
    layer = nn.AttentionLayer(12, 3, 4, dropout=0.0, causal=causal, device=device)
    np.random.seed(2)
    for name in ("q", "k", "v", "out"):
        projection = getattr(layer, f"{name}_projection")
        bound = np.sqrt(2) * np.sqrt(3 / 12)
        assert projection.bias is None
        close(projection.weight.numpy(), np.random.rand(12, 12) * 2 * bound - bound, 3e-7)
    x = draw(3, 2, 5, 12)
    close(layer(Tensor(x, device=device)).numpy(), attention_layer(layer, x, causal))
    sizes = dict(k_features=10, v_features=7, out_features=5, dropout=0.0, causal=False)
    crossed = nn.AttentionLayer(6, 2, 4, **sizes, device=device)
    q, k, v = (Tensor(draw(9, 2, t, c), device=device) for t, c in ((3, 6), (4, 10), (4, 7)))
    assert crossed(q, k, v).shape == (2, 3, 5)
    assert nn.AttentionLayer(6, 2, 4, k_features=10, device=device).prenorm_v.dim == 6
    q, k, v = (Tensor(draw(10 + i, 2, 5, 12), device=device) for i in range(3))
    for given, meant in [((q,), (q, q, q)), ((q, k), (q, k, q)), ((q, None, v), (q, q, v))]:
        np.testing.assert_array_equal(layer(*given).numpy(), layer(*meant).numpy())


@pytest.mark.parametrize("causal", [True, False])
def test_transformer_layer(causal, device):
    np.random.seed(4)
    layer = nn.TransformerLayer(8, 2, 4, 10, dropout=0.0, causal=causal, device=device)
    attention = next(m for m in layer.modules() if isinstance(m, nn.AttentionLayer))
    weights = {p.shape: p.numpy().astype(float) for p in layer.parameters()}
    x = draw(5, 2, 5, 8)
    y = x + attention_layer(attention, x, causal)
    hidden = np.maximum(norm(y) @ weights[8, 10] + weights[1, 10], 0)
    y = y + hidden @ weights[10, 8] + weights[1, 8]
    close(layer(Tensor(x, device=device)).numpy(), y, 5e-6)


@pytest.mark.parametrize("batch_first", [True, False])
def test_transformer(batch_first, device):
    np.random.seed(6)
    options = dict(num_head=2, dim_head=4, dropout=0.0, causal=True, sequence_len=12)
    model = nn.Transformer(8, 16, 2, **options, batch_first=batch_first, device=device)
    np.random.seed(6)
    positions = np.random.randn(12, 8)  # drawn first
    assert any(
        p.shape == (12, 8) and np.allclose(p, positions, 0, 1e-6) for p in model.parameters()
    )
    turned = (lambda x: x) if batch_first else (lambda x: x.transpose(1, 0, 2))
    x = draw(7, 3, 5, 8)
    out, state = model(Tensor(turned(x), device=device))
    assert out.shape == turned(x).shape and state is not None
    changed = x.copy()
    changed[:, -1] += 1  # causal: nothing before the last position may move
    other, _ = model(Tensor(turned(changed), device=device))
    one, two = (turned(o.numpy()) for o in (out, other))
    np.testing.assert_array_equal(one[:, :-1], two[:, :-1])
    assert not np.allclose(one[:, -1], two[:, -1])
    out.backward()
    assert all(np.isfinite(p.grad.numpy()).all() for p in model.parameters())
    model = nn.Transformer(8, 16, 2, **options | {"dropout": 0.25}, device=device)
    assert [m.p for m in model.modules() if isinstance(m, nn.Dropout)] == [0.25] * 8


# ---- copies --------------------------------------------------------------------------------------


def pickled(value):
    return pickle.loads(pickle.dumps(value))


COPIES = pytest.mark.parametrize("copied", [copy.deepcopy, pickled], ids=["deepcopy", "pickle"])


@COPIES
def test_a_copy_of_what_was_computed_is_a_leaf(copied):
    leaf, constant = Tensor([[1.0, 2.0]]), ndl.ones(2, 2)
    (leaf * leaf).sum().backward()
    for x in (
        leaf, leaf * 2, leaf.T, leaf[0], (leaf * 2).unbind(1)[0], leaf.grad,
        constant[0], constant.reshape(4), constant.T, ndl.tensor([1, 2])[1:],
    ):  # fmt: skip
        twin = copied(x)
        assert twin.is_leaf() and twin.requires_grad == x.requires_grad and twin.dtype == x.dtype
        np.testing.assert_array_equal(twin.numpy(), x.numpy())
        with ndl.no_grad():
            twin += 1
        assert (twin.numpy() == x.numpy() + 1).all()
    assert copied(leaf).grad.tolist() == [[2, 4]]


INPUT = np.random.default_rng(1).standard_normal((3, 4))


def trained(model, optimizer, steps: int) -> list[float]:
    """The losses of so many steps; the gradient of the last one stays."""
    losses = []
    parameter = model.parameters()[0]
    x = Tensor(INPUT, device=parameter.device, dtype=parameter.dtype)
    for _ in range(steps):
        optimizer.reset_grad()
        loss = (model(x) * model(x)).sum()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.numpy()))
    return losses


@COPIES
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_flat_module_and_its_optimizer_are_copied_together(copied, dtype, device):
    """The copies go on as the originals do, bit for bit, and neither sees the other."""
    np.random.seed(2)
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 2))
    for p in model.parameters():
        p.cached_data = p.cached_data.astype(dtype).to(device)
    optimizer = optim.AdamW(nn.flatten_parameters(model), lr=0.1, weight_decay=0.1)
    trained(model, optimizer, 3)
    for pair in copied((model, optimizer)), copied((optimizer, model))[::-1]:
        twin, other = pair
        assert {id(p) for p in twin.parameters()} == {id(p) for p in other.params}
        assert other.flat is nn.flatten_parameters(twin) and other.flat is not optimizer.flat
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            np.testing.assert_array_equal(p.numpy(), q.numpy())
            np.testing.assert_array_equal(p.grad.numpy(), q.grad.numpy())
        before = [p.numpy().copy() for p in model.parameters()]
        ahead = trained(twin, other, 4)
        for p, values in zip(model.parameters(), before, strict=True):
            np.testing.assert_array_equal(p.numpy(), values)
    assert trained(model, optimizer, 4) == ahead


def test_flattening_with_another_choice_of_decay_is_obeyed():
    """Includes a choice that leaves the order of the parameters as it was."""
    model = nn.Sequential(nn.Linear(3, 2, bias=False), nn.Linear(2, 2, bias=False))
    flat = nn.flatten_parameters(model)
    assert flat.decay_size == flat.size and nn.flatten_parameters(model) is flat
    for first, decays in (("0", 1), ("none", 0), ("", 2)):
        flat = nn.flatten_parameters(model, lambda name, p, first=first: name.startswith(first))
        assert flat.decayed == decays and flat.decay_size == 64 * decays
        before = [p.numpy() for p in model.parameters()]
        optim.AdamW(flat, lr=0.5, weight_decay=0.5).step()  # of gradients of zero: decay alone
        for i, (p, values) in enumerate(zip(model.parameters(), before)):
            np.testing.assert_array_equal(p.numpy(), values * (0.75 if i < decays else 1))
    flat = nn.flatten_parameters(nn.Linear(3, 2))  # a bias is a row (1, out), no matrix
    assert flat.decay_size == flat.offsets[1] and flat.names == ["weight", "bias"]
    mixed = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 3, dtype="bfloat16"))
    with pytest.raises(ValueError, match="1.weight is bfloat16 on .*, but .*0.weight is float32"):
        nn.flatten_parameters(mixed)
    with pytest.raises(ValueError, match="no parameter that requires gradients"):
        nn.flatten_parameters(nn.ReLU())


def test_flattening_a_part_takes_it_out_of_the_whole():
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    model(ndl.ones(1, 3)).sum().backward()
    whole = nn.flatten_parameters(model)
    assert not whole.grad.numpy().any()  # a gradient from before is not kept
    part = nn.flatten_parameters(model.modules[1])
    again = nn.flatten_parameters(model)
    assert again is not whole and again.names == whole.names
    again.data.fill(3)
    for p in model.parameters():
        np.testing.assert_array_equal(p.numpy(), np.full(p.shape, 3))
    assert not (part.data.numpy() == 3).any() and not (whole.data.numpy() == 3).any()
    model[0].weight.requires_grad = False  # frozen later
    model(ndl.ones(1, 3)).sum().backward()
    assert not model[0].weight.grad_buffer.numpy().any() and model[0].bias.grad.numpy().any()


def test_neighbours_in_a_flat_buffer_stay_there():
    class Pair(nn.Sequential):
        neighbours = (("0.weight", "1.weight"),)

    for i in range(2):
        model = Pair(nn.Linear(8, 8), nn.Linear(8, 8))
        flat = nn.flatten_parameters(model, only=[f"{i}.weight"])
        nn.place_neighbours(model)
        flat.data.fill(7)
        np.testing.assert_array_equal(model[i].weight.numpy(), np.full((8, 8), 7))


def test_data_assigned_to_a_flattened_parameter_go_into_the_buffer():
    model = nn.Linear(3, 2)
    flat = nn.flatten_parameters(model)
    for number, make in enumerate((Tensor, nd.array, lambda x: Tensor(x.T).T)):
        values = draw(number, 3, 2)
        model.weight.data = make(values)
        np.testing.assert_array_equal(flat.view(flat.data, 0).numpy(), model.weight.numpy())
        close(model.weight.numpy(), values)
    with pytest.raises(ValueError, match=r"flattened parameter has shape \(3, 2\)"):
        model.weight.data = ndl.ones(2, 3)
    with pytest.raises(TypeError, match="dtype is float32, but the new data is bfloat16"):
        model.weight.data = ndl.ones(3, 2, dtype="bfloat16")


def test_attention_without_rotary_is_softmax_attention(device):
    np.random.seed(3)
    layer, x = nn.Attention(12, 3, device=device), draw(5, 2, 7, 12)
    qkv, dense = layer.query_key_value, layer.dense
    packed = x.astype(np.float64) @ qkv.weight.numpy() + qkv.bias.numpy()
    q, k, v = packed.reshape(2, 7, 3, 3, 4).transpose(3, 0, 2, 1, 4)
    seen, _ = plain_attention(q, k, v, True)
    expected = seen.transpose(0, 2, 1, 3).reshape(2, 7, 12) @ dense.weight.numpy()
    expected += dense.bias.numpy()
    x = Tensor(x, device=device)
    everything = ndl.BlockMask.dense(7, 2)
    for got in (layer(x, None), layer(x), layer(x, None, everything)):
        close(got.numpy(), expected)
    layer._hooks = {"hook_pattern": [lambda pattern: pattern]}
    close(layer(x, None).numpy(), expected)


@pytest.mark.parametrize(
    "made, error, said",
    [
        (lambda: nn.Linear(0, 3), ValueError, "Linear: sizes must be above 0, not 0, 3"),
        (lambda: nn.Dropout(1.5), ValueError, r"Dropout: p must be in \[0, 1\), but is 1.5"),
        (lambda: init.kaiming_uniform(3, 3, None, "tanh"), ValueError, "nonlinearity must be"),
        (lambda: init.rand(2, -1), ValueError, "negative"),
        (lambda: init.one_hot(3, [-1]), ValueError, r"indices must be whole numbers in \[0, 3\)"),
    ],
)
def test_wrong_sizes_are_named(made, error, said):
    with pytest.raises(error, match=said):
        made()
    with pytest.raises(error, match=said), init.meta_device():
        made()


def test_blocks_of_the_meta_device_nest():
    with init.meta_device():
        with init.meta_device():
            pass
        assert init.ones(3, 4).cached_data.strides == (0, 0)
    assert init.ones(3, 4).cached_data.strides == (4, 1)


def test_step_of_a_layer_takes_few_python_calls():
    """At most 150 in each step and 22 more a layer: the host must keep up with a GPU."""

    def calls(layers):
        config = PythiaConfig(
            vocab_size=512, hidden_size=64, num_layers=layers, num_heads=4, max_seq_len=64
        )
        model = Pythia(config)
        optimizer = optim.AdamW(nn.flatten_parameters(model))
        ids = np.random.randint(0, 512, (2, 65))
        entered = []
        for seen in (None, None, lambda frame, event, argument: entered.append(event)):
            sys.setprofile(seen)
            optimizer.reset_grad()
            model.loss(ids[:, :-1], ids[:, 1:]).backward()
            optimizer.step()
            sys.setprofile(None)
        return entered.count("call")

    one, three = calls(1), calls(3)
    layer = (three - one) / 2
    assert layer <= 22 and one - layer <= 150


def test_class_of_an_activation_may_be_derived_with_other_bases():
    class Tagged:
        def __init_subclass__(cls, tag=None, **more):
            super().__init_subclass__(**more)
            cls.tag = tag

    class Steep(nn.LeakyReLU, Tagged, tag=3):
        pass

    x = Tensor([-2.0, 3.0])
    np.testing.assert_array_equal(Steep(0.5)(x).numpy(), [-1, 3])
    assert Steep.tag == 3
    with pytest.raises(TypeError, match="keyword"):
        type("Wrong", (nn.ReLU,), {}, slope=1)
