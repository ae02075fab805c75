"""FP8: numbers of a byte, the head's loss and gradients beside float64, and layers beside those
without it."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from harness import assert_same_bits, naming

from needle import _C, BlockMask, Tensor, no_grad, ops
from needle.models import Pythia, PythiaConfig, pythia
from needle.nn import Module, Parameter, flatten_parameters, rotary_tables
from needle.testing import call, check, prepare
from needle.testing.fp8 import FORMS, LARGE, ODD, decoded, encoded

# Rounding to e4m3 has an error of 2.6 % in the mean square, to e5m2 of 5.2 %; logits of x and w
# have errors of both, so that a softmax is off by some percent too.
CLOSE = 0.05


def test_each_bfloat16_becomes_the_nearest_number(device):
    bits = np.arange(2**16, dtype=np.uint32) << 16
    x = bits.view(np.float32)
    x = x[np.abs(x) <= 448].reshape(1, -1)  # NaN is not; 448 makes the scale 1
    x = _C.array(x, "float32", device)
    q, q_t, scale = _C.fp8_quantize(x, 0, None, 0, None, None, None, 0.0, None)
    assert scale.item() == 1
    np.testing.assert_array_equal(q.numpy(), encoded(x.numpy(), "e4m3"))
    np.testing.assert_array_equal(q_t.numpy(), q.numpy().T)


def test_sizes_that_a_cpu_alone_takes():
    for case in ODD:
        with naming(case):
            values = prepare(case, "float32")
            check(case, values, call(case, values, "float32", _C.cpu()), "float32")


@pytest.mark.cuda
def test_more_tiles_than_multiprocessors():
    for case in LARGE:
        with naming(case):
            values = prepare(case, "float32")
            check(case, values, call(case, values, "float32", _C.cuda()), "float32")


def test_bad_operands_are_named(device):
    x = _C.array(np.ones((130, 16)), "float32", device)
    one = _C.array(1.0, "float32", device)
    sums, two = (_C.empty((n, 16), "float32", device) for n in (1, 2))
    for given, text in (
        ((3, None, 0, None, None, None, 0.0, None), "gelu is 3, but must be 0, 1 .erf. or 2"),
        ((0, None, 0, None, None, one, 1.0, None), "scale_a and scale_b: give both or none"),
        ((0, x, 1, None, None, None, 0.0, sums), "sums: .1, C., but it must be .2, C."),
        ((1, x, 1, None, None, None, 0.0, two), "sums: they are of a gradient alone: give dgelu"),
    ):
        with pytest.raises(ValueError, match=f"^fp8_quantize: {text}"):
            _C.fp8_quantize(x, *given)
    a = _C.array(np.zeros((16, 16)), "uint8", device)
    scale, c = _C.array(1.0, "float32", device), _C.empty((16, 16), "float32", device)
    with pytest.raises(ValueError, match="^fp8_matmul: b_e5m2: a and b are both e5m2"):
        _C.fp8_matmul(a, 1, scale, a, 1, scale, None, None, 0, c)
    targets = _C.array(np.r_[np.zeros(15), 16], "int32", device)
    text, depth = "targets: token id 16 at pos", 16
    if not device.is_host:
        text, depth = r"x \(16, 1040\), w \(16, 1040\): .*, the depth 16 to 1,024", 1040
    a = _C.array(np.zeros((16, depth)), "uint8", device)
    with pytest.raises(ValueError, match=f"^fp8_cross_entropy: {text}"):
        _C.fp8_cross_entropy(a, a, scale, targets)


def operands(device, dtype, transposed, rows=96, c=64, v=272, size=1.0):
    rng = np.random.default_rng(rows)
    x, w = rng.standard_normal((rows, c)) * size, rng.standard_normal((c, v)) * c**-0.5 / size
    targets = rng.integers(0, v, rows)
    targets[[0, 17]] = -1
    x, w = Tensor(x, device, dtype), Tensor(w.T if transposed else w, device, dtype)
    return x, w, targets, [t.numpy().astype(np.float64) for t in (x, w)]


def reference(x, w, targets):
    logits, valid, at = x @ w, targets >= 0, (np.arange(len(x)), np.maximum(targets, 0))
    softmax = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    loss = -np.log(softmax[at])[valid].mean()
    softmax[at] -= 1
    softmax *= valid[:, None] / valid.sum()
    return loss, softmax @ w.T, x.T @ softmax


def gradients(x, w, targets, transposed, factor=1.0):
    x.grad = w.grad = None
    loss = ops.linear_cross_entropy(x, w, targets, transposed, fp8=True)
    loss.backward(Tensor(factor, x.device))
    return loss.cached_data, x.grad.cached_data, w.grad.cached_data


def test_gradients_of_the_head(device, monkeypatch):
    """Of all rows at once and in runs, and the same bits each time."""
    cases = ("float32", "bfloat16"), (False, True), (1 << 15, 48), (1.0, 1e-3, 1e4)
    for dtype, transposed, rows, size in itertools.product(*cases):
        monkeypatch.setattr(ops.LinearCrossEntropy, "ROWS", rows)
        x, w, targets, (x64, w64) = operands(device, dtype, transposed, size=size)
        exact = reference(x64, w64.T if transposed else w64, targets)
        with naming(dtype, transposed, rows, size):
            found = gradients(x, w, targets, transposed, -2.0)
            again = gradients(x, w, targets, transposed, -2.0)
            loss, dx, dw = (array.numpy().astype(np.float64) for array in found)
            assert abs(loss - exact[0]) < 0.01 * exact[0]
            for got, wanted in (dx, exact[1]), (dw.T if transposed else dw, exact[2]):
                off = np.linalg.norm(got + 2 * wanted) / np.linalg.norm(2 * wanted)
                assert 0.001 < off < CLOSE
            assert found[1].dtype == dtype
            for one, other in zip(found, again):
                assert_same_bits(one, other, "a second call")


def test_micro_batches_add_into_the_flat_gradient(device):
    x, w, targets, _ = operands(device, "float32", False)
    _, _, dw = gradients(x, w, targets, False)
    head = Module()
    head.weight = Parameter(w)
    flat = flatten_parameters(head)
    for times in 1, 2:
        ops.linear_cross_entropy(x.detach(), head.weight, targets, fp8=True).backward()
        got = flat.view(flat.grad, 0).numpy()
        np.testing.assert_allclose(got, times * dw.numpy(), rtol=1e-6, atol=1e-8)


def test_calls_that_take_no_fp8_have_the_bits_of_without_it(device):
    x, w, targets, _ = operands(device, "float32", False)
    of = ops.linear_cross_entropy
    with no_grad():
        assert of(x, w, targets, fp8=True).item() == of(x, w, targets).item()
    assert of(x, w, targets, fp8=True).item() != of(x, w, targets).item()
    for rows, c, v in (95, 64, 272), (96, 63, 272), (96, 64, 271):
        x, w, targets, _ = operands(device, "float32", False, rows, c, v)
        assert of(x, w, targets, fp8=True).item() == of(x, w, targets).item()
    for rows, c in (0, 64), (96, 0):
        x, w = Tensor(np.ones((rows, c)), device), Tensor(np.ones((c, 32)), device)
        loss = of(x, w, np.zeros(rows, int), fp8=True)
        loss.backward()
        assert type(loss.op) is ops.LinearCrossEntropy


def test_a_nan_is_seen_in_loss_and_gradients(device):
    for bad in np.nan, np.inf:
        x, w, targets, (x64, _) = operands(device, "float32", False)
        x64[40, 3] = bad
        found = gradients(Tensor(x64, device, "float32"), w, targets, False)
        assert all(np.isnan(array.numpy()).any() for array in found)


# ---- layers --------------------------------------------------------------------------------------
NAMES = "x norm_w1 norm_b1 norm_w2 norm_b2 w_qkv b_qkv w_o b_o w1 b1 w2 b2".split()


EPS = 2.0  # of norms, which another one would change much


def layer(device, dtype="float32", time=24, frozen=(), c=64, m=144, kind=Tensor):
    """(operands of ops.layer by name, cos and sin)."""
    rng = np.random.default_rng(time)
    shapes = {"w_qkv": (c, 3 * c), "b_qkv": (3 * c,), "w_o": (c, c), "b_o": (c,)}
    shapes |= {"w1": (c, m), "b1": (m,), "w2": (m, c), "b2": (c,)}
    shapes |= {"x": (2, time, c)}
    operands = {}
    for name in NAMES:
        values = rng.standard_normal(shapes.get(name, (c,))) * (
            1.2 / c**0.5 if name[0] == "w" else 1
        )
        operands[name] = kind(values, device, dtype, requires_grad=name not in frozen)
    return operands, [_C.array(t, "float32", device) for t in rotary_tables(time, 8)]


def run_layer(operands, tables, approximate="none", fp8=True, mask=None, recompute=False):
    """y and the gradients by name, of y times fixed numbers."""
    for x in operands.values():
        x.grad = None
    options = {"approximate": approximate, "mask": mask, "recompute": recompute}
    heads = operands["x"].shape[2] // 16
    y = ops.layer(*operands.values(), heads, *tables, EPS, fp8=fp8, **options)
    weights = np.random.default_rng(9).standard_normal(y.shape)
    y.backward(Tensor(weights * 1e-4, y.device, y.dtype))
    grads = {name: x.grad for name, x in operands.items()}
    return {"y": y.cached_data} | {n: g if g is None else g.cached_data for n, g in grads.items()}


def test_gradients_of_a_layer(device):
    """Beside the layer without FP8, whose gradients tests/gradients.py holds to float64; in c 1040
    products and GELU are apart, as they are in float16. Computed again they have the same bits."""
    cases = [
        (d, f, t, 64) for d in ("float32", "bfloat16") for f in ("none", "tanh") for t in (24, 136)
    ]
    cases += [
        ("float16", "tanh", 24, 64),
        ("bfloat16", "tanh", 8, 1040),
        ("float32", "none", 8, 1040),
    ]
    for dtype, form, time, c in cases:
        operands, tables = layer(device, dtype, time, c=c)
        mask = BlockMask.local(T=time, window=16, block=8) if time == 24 else None
        plain = run_layer(operands, tables, form, False, mask)
        found = run_layer(operands, tables, form, True, mask)
        again = run_layer(operands, tables, form, True, mask, recompute=True)
        for name, exact in plain.items():
            with naming(dtype, form, time, c, name):
                exact, got = (a.numpy().astype(np.float64) for a in (exact, found[name]))
                off = np.linalg.norm(got - exact) / np.linalg.norm(exact)
                own = name in ("b_o", "b2")  # sums of dy, as without FP8
                assert off == 0 if own else 0.003 < off < 0.16
                assert_same_bits(found[name], again[name], "computed again")


def test_a_partly_frozen_layer_has_the_gradients_of_a_whole_one(device):
    parts = [["x"], NAMES[:3], ["x", *NAMES[3:]], NAMES[:5], NAMES[1:5], ["w_o", "w2", "b1"]]
    parts += [[*NAMES[:3], "w_qkv", "b_qkv"], [*NAMES[:5], "w1", "b1"], ["b_qkv", "w1"]]
    whole = run_layer(*layer(device))
    for frozen in parts:
        with naming(frozen):
            found = run_layer(*layer(device, frozen=frozen))
            for name, gradient in found.items():
                assert (gradient is None) == (name in frozen)
                if gradient is not None:
                    assert_same_bits(gradient, whole[name], name)


@pytest.mark.parametrize("name", ["norm_b1", "norm_w2", "b1", "w_qkv"])
def test_one_that_is_trained_alone_has_its_gradient(name, device):
    every, tables = layer(device)
    wanted = run_layer(every, tables)[name]
    frozen = [other for other in NAMES if other != name]
    alone, _ = layer(device, frozen=frozen)
    assert_same_bits(run_layer(alone, tables)[name], wanted, name)


def test_the_gradient_of_the_residual_is_added_to_that_of_the_norms(device):
    """It is all of x's where the last products are of zeros."""
    operands, tables = layer(device)
    for name in "w_o", "w2":
        operands[name] = Tensor(np.zeros(operands[name].shape), device, requires_grad=True)
    found = run_layer(operands, tables)["x"]
    given = np.random.default_rng(9).standard_normal(found.shape) * 1e-4
    np.testing.assert_array_equal(found.numpy(), given.astype(np.float32))


def test_sizes_that_take_no_fp8_have_the_bits_of_without_it(device):
    for changes in {"time": 20}, {"m": 136}:
        operands, tables = layer(device, **changes)
        with_it, without = (run_layer(operands, tables, fp8=fp8) for fp8 in (True, False))
        for name, array in without.items():
            assert_same_bits(with_it[name], array, name)


def test_layers_of_a_model(device, monkeypatch):
    """In FP8 for training alone, also where computed again in the backward; without for hooks, or a
    layer of one's own."""
    monkeypatch.setattr(pythia, "FP8_LAYERS_FROM", 32)
    config = PythiaConfig(vocab_size=48, hidden_size=32, num_layers=2, num_heads=2)
    ids = np.arange(48).reshape(2, 24)

    class Own(pythia.Layer):
        def forward(self, x, rotary, mask=None, cache=None):
            return super().forward(x, rotary, mask, cache)

    class OwnModel(Pythia):
        def hidden(self, ids, cache=None):
            return super().hidden(ids, cache)

    def step(fp8=True, recompute=False, hooks=None, own=(), kind=Pythia):
        np.random.seed(0)
        model = kind(config, device)
        for i in own:
            model.layers[i].__class__ = Own
        flat = flatten_parameters(model)
        model.recompute = recompute
        if fp8:
            model.use_fp8()
        with model.hooks(hooks or {}):
            loss = model.loss(ids, ids)
        loss.backward()
        with no_grad():
            evaluated = model.loss(ids, ids)
        return model.parts_in_fp8, loss.cached_data, evaluated.cached_data, flat.grad

    parts, loss, evaluated, grad = step()
    assert parts == "head and layers" and loss.item() != evaluated.item()
    shared = Pythia(config, device)
    shared.share_sequences(object())
    assert shared.parts_in_fp8 == "head"
    again = step(recompute=True)
    assert_same_bits(loss, again[1], "recompute")
    assert_same_bits(grad, again[3], "recompute")
    parts, of_own, *_ = step(kind=OwnModel)  # calls hidden() as extending.md has it
    assert parts == "head" and of_own.item() not in (loss.item(), evaluated.item())
    model = Pythia(config, device)
    before = model(ids)[0].cached_data
    model.use_fp8()
    assert_same_bits(before, model(ids)[0].cached_data, "forward()")
    _, plain, _, plain_grad = step(fp8=False)
    assert_same_bits(plain, evaluated, "evaluation")
    off = np.linalg.norm(grad.numpy() - plain_grad.numpy()) / np.linalg.norm(plain_grad.numpy())
    assert 0.003 < off < 0.15
    monkeypatch.setattr(ops.LinearCrossEntropyFP8, "WIDEST", 16)
    hooked = step(hooks={f"blocks.{i}.mlp.hook_post": lambda x: None for i in range(2)})
    assert abs(hooked[1].item() - plain.item()) < 1e-5 < abs(step()[1].item() - plain.item())
    assert step()[0] == "layers"
    with pytest.raises(ValueError, match="^fp8: width 32 .* no layer takes FP8$"):
        step(own=(0, 1))
    one = step(own=(1,))
    assert one[0] == "1 of 2 layers" and one[1].item() != plain.item()
    monkeypatch.undo()
    assert step()[0] == "head"


def test_a_gradient_beyond_float16_stays_so(device):
    operands, tables = layer(device, "float16", frozen=["b1"])
    y = ops.layer(*operands.values(), 4, *tables, EPS, fp8=True)
    y.backward(Tensor(np.full(y.shape, 3e4), device, "float16"))
    assert not np.isfinite(operands["w1"].grad.numpy()).all()


def test_no_argument_of_gelu_passes_its_bound(device):
    """Rows of a norm along columns of w1, in numbers that e4m3 rounds up as far as it can."""
    c, n, names = 64, 16, "norm_w norm_b w_qkv w_o w1 b1 w2".split()
    rng = np.random.default_rng(0)
    signs = np.array([rng.permutation(np.repeat([1.0, -1.0], c // 2)) for _ in range(n)])
    one_column, last = np.where(np.arange(n) == 5, 1e4, 1e-4), np.arange(n) == n - 1
    # By case: the norm's weight and bias, w1 and b1.
    cases = {
        "along": (1, 0, signs.T, 0),
        "one column": (1, 0, signs.T * one_column, 0),
        "a norm's bias": (0.01, 50 * signs[3], signs.T * 1e-3, 0),
        "a bias": (1, 0, signs.T * 1e-3, -1e3 * last),
        "tiny": (1, 0, signs.T * 1e-30, 0),
        "zeros": (1, 0, signs.T * 0, 0),
    }
    for (dtype, up), case in itertools.product(
        {"float32": 1.0626, "bfloat16": 137 / 128}.items(), cases
    ):
        norm_w, norm_b, w1, b1 = cases[case]
        w, zeros = np.ones((c, c)), np.zeros(n)
        given = (np.full(c, norm_w * up), np.zeros(c) + norm_b, w, w, w1 * up, zeros + b1, w1.T)
        of = {name: _C.array(x, dtype, device) for name, x in zip(names, given)}
        x, norm = _C.array(signs, dtype, device), (of["norm_w"], of["norm_b"])
        q, _, x_scale, *_ = _C.layernorm_pair_fp8(x, *norm, *norm, 1e-12)
        *_, w1_t, w1_scale, _, _, _, bound = _C.fp8_layer_weights(*of.values())
        h = _C.empty((n, n), dtype, device)
        _C.fp8_matmul(q, 0, x_scale, w1_t, 0, w1_scale, of["b1"], None, 0, h)
        largest = np.abs(h.numpy().astype(np.float64)).max()
        with naming(case, dtype):
            assert largest <= bound.item() <= 1.7 * largest + 1e-13


def test_layers_far_from_usual_are_close_to_those_without_fp8(device):
    column = np.where(np.arange(144) == 7, 300.0, 1.0)
    changes = [("w1", column), ("w1", 1e-12), ("w1", 0.0), ("norm_b2", 40.0), ("norm_w2", 30.0)]
    changes += [("norm_w2", 0.0), ("b1", 50.0), ("w2", 0.0), ("w_o", 1e4)]
    for (name, factor), dtype in itertools.product(changes, ("float32", "bfloat16")):
        operands, tables = layer(device, dtype)
        operands[name] = Tensor(operands[name].numpy().astype(float) * factor, device, dtype)
        with naming(name, np.max(factor), dtype), no_grad():
            given = (*operands.values(), 4, *tables, EPS)
            exact, got = (
                ops.layer(*given, fp8=fp8).numpy().astype(np.float64) for fp8 in (False, True)
            )
            assert np.linalg.norm(got - exact) < 0.1 * np.linalg.norm(exact)


def test_weights_of_norm_and_w1_far_from_each_other(device):
    """What GELU gives alone: w_o is 0. Rows of w2 make up for the columns of w1."""
    operands, tables = layer(device, "bfloat16")
    rng = np.random.default_rng(3)
    norm, columns = np.exp(rng.standard_normal(64)), np.exp(rng.standard_normal(144))
    for name, factor in ("norm_w2", norm), ("w1", columns), ("w2", 1 / columns[:, None]):
        values = operands[name].numpy().astype(float) if name != "norm_w2" else 1.0
        operands[name] = Tensor(values * factor, device, "bfloat16")
    for name in "w_o", "b_o", "b2":
        operands[name] = Tensor(np.zeros(operands[name].shape), device, "bfloat16")
    given, x = (*operands.values(), 4, *tables, EPS), operands["x"].numpy()
    with no_grad():
        exact, got = (
            ops.layer(*given, fp8=fp8).numpy().astype(np.float64) - x for fp8 in (False, True)
        )
    assert np.linalg.norm(got - exact) < 0.07 * np.linalg.norm(exact)


def test_forms_of_gelu(device):
    """Where sums are exact: rows of x with one 1."""
    k, m = 48, 80
    x = _C.array(encoded(np.eye(k), "e4m3"), "uint8", device)
    values = np.random.default_rng(0).standard_normal((m, k)) * 2
    w = encoded(values, "e4m3")
    one, b = _C.array(1.0, "float32", device), _C.array(np.zeros(m), "float32", device)
    largest, pre = _C.array(16.0, "float32", device), decoded(w, "e4m3").T
    for tanh in 0, 1:
        operands = (x, one, _C.array(w, "uint8", device), one, b, largest, tanh)
        y, _, scale, dgelu = _C.fp8_linear_gelu_fwd(*operands)
        own, other = (
            np.linalg.norm(dgelu.numpy() - FORMS[form][1](pre)) for form in (1 + tanh, 2 - tanh)
        )
        assert own < 0.05 * other
        exact = FORMS[1 + tanh][0](pre) / scale.item()
        assert np.linalg.norm(decoded(y.numpy(), "e4m3") - exact) < 0.05 * np.linalg.norm(exact)


def test_an_argument_of_gelu_beyond_float16_stays_so(device):
    for dtype, finite in ("float16", False), ("bfloat16", True):
        operands, tables = layer(device, dtype)
        for name, factor in ("w1", 3e3), ("w2", 1e-4):
            values = operands[name].numpy().astype(float)
            operands[name] = Tensor(values * factor, device, dtype)
        operands["b1"] = Tensor(np.full(144, 6e4), device, dtype)
        y = ops.layer(*operands.values(), 4, *tables, EPS, fp8=True)
        assert np.isfinite(y.numpy().astype(float)).all() == finite


def test_a_nan_is_seen_behind_a_layer(device):
    for name, bad in itertools.product(NAMES, (np.nan, np.inf)):
        operands, tables = layer(device)
        values = operands[name].numpy()
        values.reshape(-1)[5] = bad
        operands[name] = Tensor(values, device, requires_grad=True)
        with naming(name, bad):
            assert not np.isfinite(run_layer(operands, tables)["y"].numpy()).all()
