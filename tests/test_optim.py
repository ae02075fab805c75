"""Optimizers against their recurrences in float64, flattened and not."""

import itertools

import numpy as np
import pytest
from harness import assert_same_bits

import needle as ndl
from needle import Tensor, nn, optim
from needle.testing import rounder

SHAPES = {"matrix": (5, 7), "bias": (7,)}


class Two(nn.Module):
    """A matrix and a vector, whose gradients are given."""

    def __init__(self, device, dtype="float32"):
        super().__init__()
        rng = np.random.default_rng(0)
        for name, shape in SHAPES.items():
            setattr(
                self, name, nn.Parameter(rng.standard_normal(shape), device=device, dtype=dtype)
            )


def values_of(module) -> dict[str, np.ndarray]:
    return {name: p.numpy().astype(np.float64) for name, p in module.named_parameters()}


def gradients(step: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(100 + step)
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in SHAPES.items()}


def give(module, made: dict[str, np.ndarray]) -> None:
    for name, p in module.named_parameters():
        if p.grad_buffer is not None:
            ndl._C.assign(p.grad_buffer, ndl._C.array(made[name], device=p.device))
        else:
            p.grad = Tensor(made[name], device=p.device, requires_grad=False)


def sgd(p, g, state, lr=0.1, momentum=0.9, weight_decay=0.01, **_):
    state["u"] = momentum * state.get("u", 0) + (1 - momentum) * (g + weight_decay * p)
    return p - lr * state["u"]


def adam(p, g, state, lr=0.01, beta1=0.8, beta2=0.9, eps=1e-6, weight_decay=0.02, decoupled=False):
    state["t"] = state.get("t", 0) + 1
    if not decoupled:
        g = g + weight_decay * p
    state["m"] = beta1 * state.get("m", 0) + (1 - beta1) * g
    state["v"] = beta2 * state.get("v", 0) + (1 - beta2) * g * g
    m, v = state["m"] / (1 - beta1 ** state["t"]), state["v"] / (1 - beta2 ** state["t"])
    update = m / (np.sqrt(v) + eps)
    return p - lr * (update + (weight_decay * p if decoupled else 0))


def follow(recurrence, start, steps=6, scale=1.0, **options) -> dict[str, np.ndarray]:
    """The parameters after `steps` of the recurrence in float64."""
    states = {name: {} for name in start}
    for step in range(steps):
        made = gradients(step)
        start = {
            name: recurrence(p, scale * made[name], states[name], **options)
            for name, p in start.items()
        }
    return start


def run(module, optimizer, steps=6, start=0) -> dict[str, np.ndarray]:
    for step in range(start, start + steps):
        give(module, gradients(step))
        optimizer.step()
    return values_of(module)


def close(got: dict, expected: dict, tolerance=2e-6) -> None:
    for name in expected:
        np.testing.assert_allclose(got[name], expected[name], rtol=0, atol=tolerance, err_msg=name)


def adamw(parameters, **options):
    return optim.AdamW(
        parameters, lr=0.01, beta1=0.8, beta2=0.9, eps=1e-6, weight_decay=0.02, **options
    )


RECURRENCES = {
    "SGD": (sgd, {}, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
    "Adam": (adam, {}, {"lr": 0.01, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.02}),
    "AdamW": (
        adam,
        {"decoupled": True},
        {"lr": 0.01, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.02},
    ),
}


@pytest.mark.parametrize("own", [{}, {"weight_decay": 0.0, "lr": 0.05}, {"lr": 0.0}])
@pytest.mark.parametrize("kind", RECURRENCES)
def test_steps_follow_the_recurrence_also_of_groups(kind, own, device):
    """Also where the state is loaded into an optimizer without groups."""
    recurrence, form, options = RECURRENCES[kind]
    module = Two(device)
    start = values_of(module)
    groups = [{"params": [module.matrix]}, {"params": [module.bias], **own}]
    made = getattr(optim, kind)(groups, **options)
    run(module, made, 3)
    again = getattr(optim, kind)(module.parameters(), **options)
    again.load_state_dict(made.state_dict())
    got = run(module, again, 3, start=3)
    close({"matrix": got["matrix"]}, {"matrix": follow(recurrence, start, **form)["matrix"]})
    expected = follow(recurrence, start, **form, **own)
    close({"bias": got["bias"]}, {"bias": expected["bias"]})
    groups[0]["lr"] = 9.0  # of its own, which the state replaces
    other = getattr(optim, kind)(groups, **options)
    other.load_state_dict(again.state_dict())
    assert [g["lr"] for g in other.param_groups] == [g["lr"] for g in made.param_groups]


@pytest.mark.parametrize("kind", ["SGD", "Adam", "AdamW"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_parameter_of_any_strides_takes_the_same_steps(kind, dtype, device):
    """The transpose of another's weight is one."""
    one, other = Two(device, dtype), Two(device, dtype)
    other.matrix.data = Tensor.from_ndarray(
        other.matrix.cached_data.permute((1, 0)).copy().permute((1, 0))
    )
    assert not other.matrix.is_contiguous()
    for module in (one, other):
        named = [(name, getattr(module, name)) for name in SHAPES]
        run(module, getattr(optim, kind)(named, lr=0.1, weight_decay=0.01), steps=3)
    for name in SHAPES:
        p, q = (getattr(module, name).cached_data.compact() for module in (one, other))
        assert_same_bits(p, q)


@pytest.mark.parametrize("kind", ["SGD", "Adam", "AdamW"])
def test_steps_are_seen_by_all_that_shares_a_parameters_memory(kind, device):
    module = Two(device)
    module.tied = nn.Parameter(module.matrix.data)
    views = module.matrix.data[1:], module.matrix.detach().T, module.tied
    give(module, {**gradients(0), "tied": np.zeros(SHAPES["matrix"])})
    before = module.matrix.numpy()
    getattr(optim, kind)([module.matrix, module.bias], lr=0.1).step()
    after = module.matrix.numpy()
    assert (after != before).all()
    for view, wanted in zip(views, (after[1:], after.T, after)):
        np.testing.assert_array_equal(view.numpy(), wanted)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_master_weights(dtype, device):
    """Updates far below half an ulp of the parameter add up in the float32 master weights."""
    module = Two(device, dtype)
    start = values_of(module)
    optimizer = optim.AdamW(
        module.parameters(), lr=1e-4, beta1=0.8, beta2=0.9, eps=1e-6, weight_decay=0.0
    )
    got = run(module, optimizer, steps=40)
    expected = follow(adam, start, steps=40, decoupled=True, lr=1e-4, weight_decay=0.0)
    for name in expected:
        spacing = (
            np.abs(rounder(dtype)(expected[name]) * (2**-7 if dtype == "bfloat16" else 2**-10))
            + 1e-4
        )
        assert (np.abs(got[name] - expected[name]) <= spacing).all()
        assert (got[name] != start[name]).any()
    assert all(p.dtype == dtype for p in module.parameters())


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("kind", ["SGD", "Adam", "AdamW"])
def test_optimizers_never_write_grad(kind, flat, device):
    module = Two(device)
    parameters = nn.flatten_parameters(module) if flat and kind == "AdamW" else module.parameters()
    optimizer = getattr(optim, kind)(parameters, lr=0.1, weight_decay=0.1)
    give(module, gradients(0))
    held = [p.grad for p in module.parameters()]
    optimizer.step()
    for p, grad, name in zip(module.parameters(), held, SHAPES, strict=True):
        if not (flat and kind == "AdamW"):
            assert p.grad is grad
        np.testing.assert_array_equal(p.grad.numpy(), gradients(0)[name])
    optimizer.reset_grad()
    assert all(p.grad is None or np.abs(p.grad.numpy()).sum() == 0 for p in module.parameters())


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_decay_of_narrow_parameters_is_computed_in_float32(dtype):
    for kind, slot, options in ("SGD", "u", {}), ("Adam", "m", {"beta1": 0.0}):
        w = nn.Parameter([1.0078125], dtype=dtype)
        w.grad = Tensor([0.0])
        optimizer = getattr(optim, kind)([w], lr=0.0, weight_decay=0.3, **options)
        optimizer.step()
        (got,) = (a for n, a in optimizer.state_dict()["arrays"].items() if n.startswith(slot))
        assert got.numpy()[0] == np.float32(0.3) * np.float32(1.0078125)


def test_given_names_come_before_those_of_the_module():
    module = Two(ndl.cpu())
    module.parameters()  # names them
    named = [(f"own.{name}", getattr(module, name)) for name in SHAPES]
    for parameters in (named, [{"params": named[:1]}, {"params": named[1:], "lr": 0.5}]):
        optimizer = adamw(parameters)
        assert optimizer.names == ["own.matrix", "own.bias"]
        wanted = {f"{slot}.own.{name}": shape for slot in "mv" for name, shape in SHAPES.items()}
        state = optimizer.state_dict()
        assert {name: array.shape for name, array in state["arrays"].items()} == wanted
    assert state["groups"] == {"own.bias": {"lr": 0.5}}


def test_state_dict_of_another_optimizer_is_refused():
    module = Two(ndl.cpu())
    optimizer = adamw(module.parameters())
    run(module, optimizer, 1)
    state = optimizer.state_dict()
    arrays = dict(state["arrays"])
    arrays.pop(next(iter(arrays)))
    with pytest.raises((KeyError, ValueError)):
        adamw(Two(ndl.cpu()).parameters()).load_state_dict(state | {"arrays": arrays})
    for name in ("arrays", "step", "lr"):
        rest = {key: value for key, value in state.items() if key != name}
        with pytest.raises(ValueError, match=f"load_state_dict: {name} is missing"):
            adamw(Two(ndl.cpu()).parameters()).load_state_dict(rest)
    taken = adamw(Two(ndl.cpu()).parameters())
    taken.load_state_dict(state | {"step": np.int64(3)})  # as NumPy's files give it back
    assert taken.t == 3


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("broken", [None, np.nan, np.inf])
@pytest.mark.parametrize("size", [0.0, 1e-30, 1e-20, 1.0, 1e19, 1e20, 1e38])
def test_clip_grad_norm(size, broken, flat, device):
    """The square of a norm may be beyond float32, and so may the norm. NaN in one gradient is in
    all; inf makes the others 0, since the norm is inf. PyTorch's name gives an array."""
    modules, limit = (Two(device), Two(device)), 0.5
    made = {n: np.float32(size * np.clip(g, -3, 3)) for n, g in gradients(0).items()}
    if broken is not None:
        made["bias"][1] = broken
    exact = np.sqrt(sum((g.astype(np.float64) ** 2).sum() for g in made.values()))
    norms = []
    for module, clip in zip(modules, (optim.clip_grad_norm, nn.utils.clip_grad_norm_)):
        parameters = nn.flatten_parameters(module) if flat else module.parameters()
        give(module, made)
        own = clip is nn.utils.clip_grad_norm_
        with np.errstate(over="ignore"):  # of a float32 array of a norm beyond it
            norms.append(clip((p for p in module.parameters()) if own else parameters, limit))
    assert isinstance(norms[0], float)
    np.testing.assert_allclose(norms[0], exact, rtol=1e-5, atol=1e-18)
    with np.errstate(invalid="ignore", over="ignore"):
        np.testing.assert_allclose(norms[1].item(), np.float32(norms[0]), rtol=1e-6)
        scale = np.minimum(1.0, limit / (exact + 1e-6))
        for module, name in itertools.product(modules, made):
            got = getattr(module, name).grad.numpy()
            np.testing.assert_allclose(got, made[name] * scale, rtol=2e-5)


def test_clip_grad_value_at_its_limits():
    w = nn.Parameter(np.zeros(7))
    given = [np.nan, np.inf, -np.inf, 0.5, -0.5, 0.0, 1e38]
    for limit in (0.5, 0.0, 1e30):
        w.grad = Tensor(given, requires_grad=False)
        nn.utils.clip_grad_value_(w, limit)
        np.testing.assert_array_equal(w.grad.numpy(), np.clip(np.float32(given), -limit, limit))


@pytest.mark.parametrize("kind", ["SGD", "Adam", "AdamW"])
def test_wrong_hyperparameters(kind):
    parameters = Two(ndl.cpu()).parameters()
    made = getattr(optim, kind)
    for wrong in ({"lr": -1.0}, {"lr": 0.1, "weight_decay": -1.0}, {"lr": np.nan}, {"lr": np.inf}):
        with pytest.raises(ValueError, match=f"{kind}: [a-z_]+ must be finite and not negative"):
            made(parameters, **wrong)
    fraction = "momentum" if kind == "SGD" else "beta1"
    with pytest.raises(ValueError, match=fraction):
        made(parameters, lr=0.1, **{fraction: 1.0})
    with pytest.raises(ValueError):
        made([], lr=0.1)
    if kind == "AdamW":
        with pytest.raises(ValueError, match="weight_decay"):
            made([{"params": parameters, "weight_decay": -0.1}], lr=0.1)


@pytest.mark.parametrize("kind", RECURRENCES)
def test_param_groups_set_the_rates(kind):
    """Those of a flat AdamW are two: the bias does not decay."""
    one, other = Two(None), Two(None)
    parameters = nn.flatten_parameters(one) if kind == "AdamW" else one.parameters()
    optimizer = getattr(optim, kind)(parameters, lr=0.1, weight_decay=0.02)
    first, *more = optimizer.param_groups
    assert [p for g in optimizer.param_groups for p in g["params"]] == one.parameters()
    assert [g["weight_decay"] for g in more] == [0.0] * (kind == "AdamW")
    first["lr"] *= 0.5
    assert optimizer.lr == first["lr"] == optimizer.param_groups[0]["lr"] == 0.05
    groups = [{"params": [other.matrix]}, {"params": [other.bias]}]
    if more:
        more[0]["lr"] = 0.01
        assert (optimizer.lr, [g["lr"] for g in optimizer.param_groups]) == (0.05, [0.05, 0.01])
        more[0]["beta1"] = 0.7
        assert optimizer.beta1 == 0.7
        groups[1] |= {"weight_decay": 0.0, "lr": 0.01}
    options = {"beta1": 0.7} if more else {}
    same = getattr(optim, kind)(groups, lr=0.05, weight_decay=0.02, **options)
    close(run(one, optimizer), run(other, same), 0)
    norm = optim.AdamW(nn.flatten_parameters(nn.LayerNorm1d(2)))
    norm.param_groups[0]["lr"] = 0.0  # of both parameters, which are one group
    assert [g["lr"] for g in norm.param_groups] == [0.0]
    for name, value, error in (
        ("lr", -1, ValueError),
        ("params", [], KeyError),
        ("betas", (0.9, 0.99), KeyError),
    ):
        with pytest.raises(error, match="param_groups: "):
            first[name] = value


@pytest.mark.parametrize("kind", RECURRENCES)
@pytest.mark.parametrize("own", [{}, {"weight_decay": 0.5}])
@pytest.mark.parametrize("first", [0, 1])
def test_a_param_group_sets_its_own_rate_alone(kind, own, first):
    module = Two(None)
    start = values_of(module)
    groups = [{"params": [module.matrix]}, {"params": [module.bias], **own}]
    optimizer = getattr(optim, kind)(groups, lr=0.1)
    rates = lambda: [group["lr"] for group in optimizer.param_groups]
    optimizer.param_groups[first]["lr"] = 0.0
    assert rates() == [0.1 * (i != first) for i in range(2)]
    got = run(module, optimizer, 1)
    moved = [not np.array_equal(got[name], start[name]) for name in ("matrix", "bias")]
    assert moved == [i != first for i in range(2)]
    for group, rate in zip(optimizer.param_groups, (0.3, 0.4)):
        group["lr"] = rate
    assert rates() == [0.3, 0.4]
    again = getattr(optim, kind)(groups, lr=0.1)
    again.load_state_dict(optimizer.state_dict())
    assert [group["lr"] for group in again.param_groups] == [0.3, 0.4]


def test_a_group_of_one_parameter_is_that_parameter():
    """Not its rows; and what was computed from parameters is refused: no step would train it."""
    w = nn.Parameter([1.0, 2.0])
    assert optim.SGD([{"params": w}]).params == [w]
    with pytest.raises(TypeError, match="SGD: params must be a list, not a Tensor"):
        optim.SGD(Tensor([1.0, 2.0]))
    for params in ([w * 2], [{"params": w * 2}], [w, ("w", w[0])]):
        with pytest.raises(ValueError, match="params must hold Parameters, not the result of"):
            optim.SGD(params)


@pytest.mark.parametrize("kind, flat", [*((kind, False) for kind in RECURRENCES), ("AdamW", True)])
def test_bias_correction_counts_the_steps_of_each_parameter(kind, flat, device):
    """One is trained from the third step on; the state is loaded in between."""
    recurrence, form, options = RECURRENCES[kind]
    module = Two(device)
    start = values_of(module)
    groups = [{"params": [module.matrix]}, {"params": [module.bias], "weight_decay": 0.0}]
    parameters = nn.flatten_parameters(module) if flat else groups
    made = getattr(optim, kind)(parameters, **options)
    module.bias.requires_grad = not flat
    for step in range(5):
        if step == 2:
            module.bias.requires_grad = True
        give(module, gradients(step))
        if step < 2 and not flat:
            module.bias.grad = None
        made.step()
        again = getattr(optim, kind)(parameters, **options)
        again.load_state_dict(made.state_dict())
        made = again
    got, state = values_of(module), {}
    expected = {"bias": start["bias"], "matrix": follow(recurrence, start, 5, **form)["matrix"]}
    for step in range(2, 5):
        given = gradients(step)["bias"]
        expected["bias"] = recurrence(expected["bias"], given, state, **form | {"weight_decay": 0})
    close(got, expected)


@pytest.mark.parametrize("kind", RECURRENCES)
@pytest.mark.parametrize("listed", [0, 1])
def test_a_list_has_the_same_state_whenever_its_module_is_asked_for_names(kind, listed):
    """Asked before the optimizer was made in one of two runs, as by load_state_dict or print."""
    runs = []
    for i in range(2):
        module = Two(None)
        if i == listed:
            module.parameters()
        groups = [{"params": [module.bias], "lr": 0.05}, {"params": [module.matrix]}]
        runs.append((module, getattr(optim, kind)(groups, lr=0.1)))
    (first, made), (second, again) = runs
    run(first, made, 3)
    made.param_groups[0]["lr"] = 0.02
    second.load_state_dict(first.state_dict())
    again.load_state_dict(made.state_dict())
    close(run(second, again, 2, start=3), run(first, made, 2, start=3), 0)
    flat = optim.AdamW(nn.flatten_parameters(Two(None)))
    if kind == "AdamW" and listed:
        with pytest.raises(ValueError, match="m.0 is unexpected"):
            flat.load_state_dict(made.state_dict())


def test_schedules():
    cosine = optim.Cosine(1.0, total=110, warmup=10, floor=0.1)
    assert [cosine(step) for step in (0, 5, 10, 60, 110, 1000)] == pytest.approx(
        [0, 0.5, 1, 0.55, 0.1, 0.1]
    )
    linear = optim.Linear(2.0, total=100)
    assert [linear(step) for step in (0, 50, 100, 101)] == pytest.approx([2, 1, 0, 0])
    constant = optim.Constant(3.0, warmup=4)
    assert [constant(step) for step in (1, 2, 4, 10**6)] == pytest.approx([0.75, 1.5, 3, 3])
    wsd = optim.WSD(2.0, total=100, warmup=10, floor=0.5, decay=30)
    line = [2 - 1.5 * (step - 70) / 30 for step in range(71, 101)]
    assert [wsd(step) for step in (5, 10, 11, 70)] == [1, 2, 2, 2]
    assert [wsd(step) for step in range(71, 101)] == pytest.approx(line)
    assert wsd(1000) == wsd(100) == 0.5
    pythia = optim.PythiaCosine(1.0, total=100, warmup=10, floor=0.1)
    assert [pythia(step) for step in (0, 6, 11, 36, 61, 101, 1000)] == pytest.approx(
        [0, 0.5, 1, (0.5**0.5 + 1) / 2, 0.5, 0.1, 0.1]
    )
    for kind in (optim.Cosine, optim.PythiaCosine):  # of no steps: at its end after the first
        empty = kind(1.0, total=0, floor=0.1)
        assert [empty(step) for step in (2, 3, 100)] == pytest.approx([0.1] * 3)
    for wrong in (
        lambda: optim.Cosine(1.0, total=10, warmup=11),
        lambda: optim.Linear(1.0, total=-1),
        lambda: optim.WSD(1.0, total=10, warmup=3, decay=8),
    ):
        with pytest.raises(ValueError):
            wrong()
