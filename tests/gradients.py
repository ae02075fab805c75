"""Differentiable operations of needle.ops as data: each with its forward in float64 NumPy, so that
gradients can be compared with central differences of it."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from needle import _C, BlockMask
from needle.distributed.group import Group
from needle.ops.random import Source, drawing_from
from needle.testing import normal
from needle.testing.attention import pair_products, rotary, softmax_attention, visible, weighted
from needle.testing.elementwise import ELEMENTWISE, gelu, gelu_tanh
from needle.testing.layers import cross_entropy_fwd, layernorm_fwd
from needle.testing.random import philox


@dataclass(frozen=True)
class Gradient:
    label: str
    op: Callable  # (needle.ops, Tensors...) -> Tensor
    f: Callable  # the same in float64 NumPy
    inputs: tuple[Callable, ...]
    twice: bool = True  # elementary: its gradient is differentiable too

    def __str__(self) -> str:
        return self.label


def by_name(label: str, f: Callable, *inputs: Callable, **more) -> Gradient:
    """A call of the function that the label begins with: ops.summation for "summation-axis"."""
    name = label.partition("-")[0]
    return Gradient(label, lambda ops, *a: getattr(ops, name)(*a, **more), f, inputs)


def positive(*shape):
    return lambda rng: rng.random(shape) + 0.5


def away_from_zero(*shape):
    """Move elements away from a kink, where central differences see both sides."""
    return lambda rng: rng.choice([-1.0, 1.0], shape) * (rng.random(shape) + 0.2)


STATE = np.array([7, 8, 9])


def dropout_of_a_state(ops, a):
    with drawing_from(Source(_C.array(STATE, "int64", a.device))):
        return ops.dropout(a, 0.3)


def dropped(a):
    return a * (philox(STATE, a.size).reshape(a.shape) >= round(0.3 * 2**32)) / 0.7


def logsumexp(x, axis):
    top = x.max(axis, keepdims=True)
    return np.log(np.exp(x - top).sum(axis)) + np.squeeze(top, axis if axis is not None else None)


def logsoftmax(x, axis=-1):
    return x - np.expand_dims(logsumexp(x, axis), axis)


def turn(x, half, parts, sign=1.0):
    angle = np.arange(x.shape[1])[:, None] / 100.0 ** (np.arange(half) / half)
    return rotary(np.asarray, x, np.cos(angle), np.sin(angle), parts, sign)["x"]


def tables(t, half):
    angle = np.arange(t)[:, None] / 100.0 ** (np.arange(half) / half)
    return np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)


def attend(q, k, v, causal=True, scale=None, see=None):
    if see is None:
        see = visible(q.shape[1], k.shape[1], causal)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return softmax_attention(np.asarray, q, k, v, scale, see)["o"]


def times_seen(t: int, heads: int, branches, causal: bool = True) -> np.ndarray:
    """(H, T, T): how many branches of dilated attention let a query of a head see a key."""
    i, head = np.arange(t), np.arange(heads)[:, None]
    count = np.zeros((heads, t, t))
    for width, dilation in branches:
        inside = i % width % dilation == head % dilation  # (H, T)
        same = i[:, None] // width == i[None, :] // width
        count += inside[:, :, None] & inside[:, None, :] & same
    return count * visible(t, t, causal)


def dilated_weights(q, k, branches, causal: bool = True) -> np.ndarray:
    """(B, H, T, T); zeros for a query of no branch."""
    count = times_seen(q.shape[1], q.shape[2], branches, causal)
    scores = pair_products(q, k) * q.shape[-1] ** -0.5
    top = np.where(count > 0, scores, -1e300).max(-1, keepdims=True)
    terms = count * np.exp(np.where(count > 0, scores - top, 0))
    total = terms.sum(-1, keepdims=True)
    return terms / np.where(total == 0, 1, total)


def attend_dilated(q, k, v, branches, causal: bool = True):
    return weighted(dilated_weights(q, k, branches, causal), v)


def attend_packed(qkv, half=2, *options, see=None):
    turned = turn(qkv, half, 2)
    return attend(*(turned[..., i, :] for i in range(3)), *options, see=see)


NUMPYS = {"causal": np.bool_(False), "scale": np.float32(0.7)}  # options
LAYER = (  # B T C; C each; C x 3 H D, 3 H D; H D x C, C; C x M, M, M x C, C
    *(normal(2, 5, 6), normal(6, mean=1), normal(6), normal(6, mean=1), normal(6)),
    *(normal(6, 36, std=0.4), normal(36), normal(12, 6), normal(6)),
    *(normal(6, 8), normal(8), normal(8, 6), normal(6)),
)


def layer(ops, *operands, **options):
    return ops.layer(*operands, 3, *tables(5, 2), **options)


def layer_of(
    form, x, norm_w1, norm_b1, norm_w2, norm_b2, w_qkv, b_qkv, w_o, b_o, *of_mlp, see=None
):
    n1, n2 = norm(x, norm_w1, norm_b1), norm(x, norm_w2, norm_b2)
    qkv = (n1 @ w_qkv + b_qkv).reshape(*x.shape[:2], 3, 3, -1)
    seen = attend_packed(qkv, see=see)
    return x + seen.reshape(*seen.shape[:2], -1) @ w_o + b_o + mlp(form, n2, *of_mlp)


def norm(x, w, b):
    return layernorm_fwd(np.asarray, x, w, b, 1e-5)["y"]


def mlp(gelu, x, w1, b1, w2, b2):
    return gelu(x @ w1 + b1) @ w2 + b2


def mean_cross_entropy(logits, targets):
    return cross_entropy_fwd(None, logits, targets)["loss"]


def assigned(a, index, value):
    """`a` after a[index] = value, of NumPy or needle."""
    a[index] = value
    return a


def scattered(a, b):
    out = a.copy()
    np.add.at(out, (np.arange(3)[:, None], PLACES), b[:, :5])
    return out


def share(*shape):
    return lambda rng: rng.random(shape) * 0.8 + 0.1


PLACES = np.array([[0, 3, -1, 1, 0], [2, 2, -2, 0, 1], [1, 0, 3, -4, 2]])
IDS = np.array([[3, 0, 3], [1, 4, 3]])
TARGETS = np.array([2, 0, -100, 4])
BLOCKS = BlockMask(np.array([[1, 0, 0], [1, 1, 0], [1, 0, 1]], bool), 2, 5)
SEEN = BLOCKS.to_dense() & visible(5, 5, True)
BY_HEAD = np.array([[[1, 0, 0], [1, 1, 0], [1, 0, 1]], np.eye(3), np.tri(3)], bool)
BLOCKS_BY_HEAD = BlockMask(BY_HEAD, 2, 5)
SEEN_BY_HEAD = BLOCKS_BY_HEAD.to_dense() & visible(5, 5, True)
MATRIX, FAR = normal(3, 4), away_from_zero(3, 4)
MIDDLE = normal(2, 4, 3)  # reduced along axis 1, which is not the last
BROADCAST = (positive(4), positive(2, 3, 1)), (positive(2, 3, 1), positive(4))
MLP = (normal(2, 3, 4), normal(4, 5), normal(5), normal(5, 3), normal(3))
ONE_OPERAND = [  # where they have no kink and are finite
    (MATRIX, "negate exp tanh sigmoid sin cos tan erf expm1 silu softplus square nan_to_num"),
    (positive(3, 4), "log sqrt log1p rsqrt reciprocal log2 log10"),
    (FAR, "relu absolute sign floor ceil round trunc"),
]


def formula(op: str) -> Callable:
    return ELEMENTWISE[op].f if op in ELEMENTWISE else getattr(np, op)


GRADIENTS = [
    by_name("add", np.add, MATRIX, MATRIX),
    Gradient("add-broadcast", lambda ops, a, b: a + b, np.add, (normal(3, 1, 4), normal(2, 1))),
    by_name("subtract", np.subtract, MATRIX, MATRIX),
    Gradient("subtract-operator", lambda ops, a, b: a - b, np.subtract, (MATRIX, MATRIX)),
    by_name("multiply", np.multiply, MATRIX, MATRIX),
    Gradient("multiply-broadcast", lambda ops, a, b: a * b, np.multiply, (normal(4), normal(3, 1))),
    by_name("divide", np.divide, MATRIX, positive(3, 4)),
    *(by_name("divide-broadcast", np.divide, *two) for two in BROADCAST),
    by_name("power", np.power, positive(3, 4), MATRIX),
    *(by_name("power-broadcast", np.power, *two) for two in BROADCAST),
    by_name("add_scalar", lambda a: a + 2.5, MATRIX, scalar=2.5),
    by_name("subtract_scalar", lambda a: a - 2.5, MATRIX, scalar=2.5),
    by_name("multiply_scalar", lambda a: a * -1.5, normal(5), scalar=-1.5),
    by_name("divide_scalar", lambda a: a / 3, normal(5), scalar=3),
    by_name("power_scalar", lambda a: a**3, MATRIX, scalar=3),
    Gradient("scalar_divide", lambda ops, a: ops.scalar_divide(2, a), lambda a: 2 / a, (FAR,)),
    Gradient("scalar_power", lambda ops, a: ops.scalar_power(2, a), lambda a: 2**a, (MATRIX,)),
    Gradient("scalar-left", lambda ops, a: 2 - a + 3 * a, lambda a: 2 - a + 3 * a, (MATRIX,)),
    Gradient("scalar-over", lambda ops, a: 2 / a, lambda a: 2 / a, (positive(3, 4),)),
    by_name("astype", np.array, MATRIX, dtype="float32"),
    *(by_name(op, formula(op), x) for x, ops in ONE_OPERAND for op in ops.split()),
    by_name("leaky_relu", lambda a: np.where(a > 0, a, a / 4), FAR, negative_slope=0.25),
    by_name("elu", lambda a: np.where(a > 0, a, 2 * np.expm1(a)), FAR, alpha=2),
    by_name("lerp", lambda a, b, w: a + w * (b - a), MATRIX, MATRIX, normal(4)),
    by_name("moveaxis", lambda a: np.moveaxis(a, 0, -1), MATRIX, source=0, destination=-1),
    *(
        Gradient(
            name,
            lambda ops, a, b, name=name: getattr(ops, name)([a, b]),
            lambda a, b, name=name: getattr(np, name)([a, b]),
            (MATRIX, MATRIX),
        )
        for name in ("hstack", "vstack")
    ),
    by_name(
        "cross_entropy-none",
        lambda a: -logsoftmax(a)[[0, 1, 2], [0, 3, 1]],
        MATRIX,
        targets=[0, 3, 1],
        reduction="none",
    ),
    by_name("maximum", np.maximum, MATRIX, normal(4)),
    by_name("minimum", np.minimum, normal(3, 1), MATRIX),
    by_name("clip", lambda a: np.clip(a, -0.5, 0.7), MATRIX, min=-0.5, max=0.7),
    by_name("remainder", np.remainder, normal(3, 4, std=5), positive(4)),
    by_name("amin", lambda a: a.min(1), MIDDLE, axes=1),
    Gradient("max-dim", lambda ops, a: ops.max(a, dim=1)[0], lambda a: a.max(1), (MIDDLE,)),
    Gradient("median", lambda ops, a: ops.median(a, 0), lambda a: np.median(a, 0), (MATRIX,)),
    by_name("prod", lambda a: a.prod(1), MIDDLE, axes=1),
    by_name("prod-all", np.prod, normal(3, 2)),
    Gradient("prod-none", lambda ops, a: ops.prod(a[:0], 0), lambda a: a[:0].prod(0), (MATRIX,)),
    by_name("var", lambda a: a.var(1, ddof=1), MIDDLE, axes=1, correction=1),
    by_name("std", lambda a: a.std(0, keepdims=True), MATRIX, axes=0, keepdims=True),
    *(
        by_name(f"norm-{ord}", lambda a, ord=ord: np.linalg.norm(a, ord, 0), FAR, ord=ord, axes=0)
        for ord in (1, 2, 3, np.inf)
    ),
    by_name("outer", np.outer, normal(3), normal(4)),
    by_name("dot", np.dot, normal(5), normal(5)),
    *(
        Gradient(
            f"einsum-{text}",
            lambda ops, *a, text=text: ops.einsum(text, *a),
            lambda *a, text=text: np.einsum(text, *a),
            shapes,
        )
        for text, shapes in [
            ("bij,bkj->bik", (normal(2, 3, 4), normal(2, 5, 4))),
            ("...ij,jk", (normal(2, 3, 4), normal(4, 2))),
            ("iij->j", (normal(3, 3, 2),)),
            ("ij,jk,kl->il", (MATRIX, normal(4, 2), normal(2, 3))),
        ]
    ),
    by_name("tensordot", lambda a, b: np.tensordot(a, b, 1), MATRIX, normal(4, 2), axes=1),
    by_name("matmul-vectors", np.matmul, normal(4), normal(4)),
    by_name("matmul-row", np.matmul, normal(4), normal(2, 4, 3)),
    by_name("matmul-column", np.matmul, normal(2, 3, 4), normal(4)),
    by_name("squeeze", lambda a: a[:, 0], normal(3, 1, 2), axes=1),
    by_name("unsqueeze", lambda a: a[..., None], MATRIX, axis=-1),
    by_name("flatten", lambda a: a.reshape(2, 12), normal(2, 3, 4), start=1),
    by_name("tile", lambda a: np.tile(a, (2, 1, 3)), MATRIX, reps=(2, 1, 3)),
    by_name("repeat", lambda a: np.repeat(a, [2, 0, 3], 0), MATRIX, repeats=[2, 0, 3], axis=0),
    Gradient("chunk", lambda ops, a: ops.chunk(a, 3, 1)[1], lambda a: a[:, 2:4], (normal(2, 5),)),
    by_name("roll", lambda a: np.roll(a, (1, -2), (0, 1)), MATRIX, shifts=(1, -2), axes=(0, 1)),
    by_name(
        "pad",
        lambda a: np.pad(a, ((1, 0), (2, 1)), constant_values=3),
        MATRIX,
        widths=((1, 0), (2, 1)),
        value=3,
    ),
    by_name("diag", lambda a: np.diag(a, -1), normal(3), k=-1),
    by_name("diagonal", lambda a: np.diagonal(a, 1), normal(3, 4, 2), k=1),
    by_name("trace", np.trace, normal(3, 3, 2)),
    by_name("tril", lambda a: np.tril(a, 1), normal(2, 3, 4), k=1),
    by_name("triu", lambda a: np.triu(a, -1), normal(2, 3, 4), k=-1),
    by_name("gather", lambda a: np.take_along_axis(a, PLACES, 1), MATRIX, axis=1, index=PLACES),
    by_name(
        "take_along_axis",
        lambda a: np.take_along_axis(a, PLACES[:1, :4] % 3, 0),
        MATRIX,
        indices=PLACES[:1, :4] % 3,
        axis=0,
    ),
    by_name("sort", lambda a: np.sort(a, 0), MATRIX, axis=0),
    Gradient("topk", lambda ops, a: ops.topk(a, 2)[0], lambda a: np.sort(a)[:, :-3:-1], (MATRIX,)),
    by_name("cumprod", lambda a: np.cumprod(a, 1), MIDDLE, axis=1),
    by_name("cumsum", lambda a: np.cumsum(a, 0), MATRIX, axis=0),
    Gradient(
        "scatter_add",
        lambda ops, a, b: ops.scatter_add(a, 1, PLACES, b),
        scattered,
        (MATRIX, normal(3, 6)),
    ),
    Gradient(
        "scatter",
        lambda ops, a, b: ops.scatter(a, 1, [[0, 3], [2, 1], [1, 0]], b),
        lambda a, b: assigned(a * 1, ([[0], [1], [2]], [[0, 3], [2, 1], [1, 0]]), b[:, :2]),
        (MATRIX, MATRIX),
    ),
    Gradient(
        "index_add",
        lambda ops, a, b: ops.index_add(a, 1, [-1, 3], b),
        lambda a, b: a + [[0], [0], [0], [1]] * b.sum(1, keepdims=True),
        (MIDDLE, normal(2, 2, 3)),
    ),
    *(
        Gradient(
            f"set_item-{label}",
            lambda ops, a, b, index=index: assigned(a * 1, index, b),
            lambda a, b, index=index: assigned(a * 1, index, b),
            (MATRIX, value),
        )
        for label, index, value in [
            ("slice", (slice(1, 3), slice(None, None, 2)), normal(2)),
            ("integer", 1, normal(4)),
            ("mask", np.arange(12).reshape(3, 4) % 3 == 0, normal(4)),
            ("arrays", ([0, 2], [1, 3]), normal(1)),
        ]
    ),
    by_name("mse_loss", lambda a, b: ((a - b) ** 2).mean(), MATRIX, MATRIX),
    by_name("l1_loss", lambda a, b: np.abs(a - b).sum(), MATRIX, FAR, reduction="sum"),
    by_name(
        "binary_cross_entropy",
        lambda p, t: -(t * np.log(p) + (1 - t) * np.log(1 - p)).mean(),
        share(3, 4),
        share(3, 4),
    ),
    by_name(
        "binary_cross_entropy_with_logits",
        lambda x, t: (np.log1p(np.exp(x)) - x * t).mean(),
        MATRIX,
        share(3, 4),
    ),
    by_name("kl_div", lambda x, t: (t * (np.log(t) - x)).mean(), MATRIX, share(3, 4)),
    by_name(
        "kl_div-log",
        lambda x, t: (np.exp(t) * (t - x)).sum() / 3,
        MATRIX,
        MATRIX,
        reduction="batchmean",
        log_target=True,
    ),
    by_name("dropout", lambda a: a * 1, MATRIX, p=0.3, training=False),
    Gradient("dropout-drawn", dropout_of_a_state, dropped, (normal(3, 40),)),
    by_name("matmul", np.matmul, MATRIX, normal(4, 2)),
    by_name("matmul-batched", np.matmul, normal(2, 3, 4), normal(2, 4, 2)),
    Gradient("matmul-rank", lambda ops, a, b: a @ b, np.matmul, (normal(2, 2, 3, 4), normal(4, 2))),
    by_name("matmul-rank-left", np.matmul, MATRIX, normal(2, 2, 4, 2)),
    by_name("matmul-rank-batched", np.matmul, normal(2, 3, 2, 4), normal(3, 4, 2)),
    by_name("matmul-ones", np.matmul, normal(2, 1, 3, 2), normal(1, 3, 2, 2)),
    by_name("summation", np.sum, MATRIX),
    by_name("summation-axis", lambda a: a.sum(1), normal(3, 4, 2), axes=1),
    by_name("summation-last", lambda a: a.sum(-1), normal(3, 4, 2), axes=-1),
    by_name("summation-axes", lambda a: a.sum((0, 2)), normal(3, 4, 2), axes=(0, 2)),
    by_name("summation-kept", lambda a: a.sum(1, keepdims=True), MATRIX, axes=1, keepdims=True),
    by_name("mean", lambda a: a.mean(0), MATRIX, axes=0),
    by_name("mean-kept", lambda a: a.mean(0, keepdims=True), MATRIX, axes=0, keepdims=True),
    by_name("max", lambda a: a.max(1), MIDDLE, axes=1),
    by_name("amax-kept", lambda a: a.max(1, keepdims=True), MIDDLE, axes=1, keepdims=True),
    by_name("logsumexp", lambda a: logsumexp(a, 1), MIDDLE, axes=1),
    by_name("logsumexp-axes", lambda a: logsumexp(a, (0, 2)), normal(3, 4, 2), axes=(0, 2)),
    by_name("logsumexp-all", lambda a: logsumexp(a, None), MATRIX),
    by_name("softmax", lambda a: np.exp(logsoftmax(a)), MATRIX),
    by_name("logsoftmax", logsoftmax, MATRIX),
    by_name("softmax-axis", lambda a: np.exp(logsoftmax(a, 1)), MIDDLE, axes=1),
    by_name("logsoftmax-axis", lambda a: logsoftmax(a, 1), MIDDLE, axes=1),
    by_name("broadcast_to", lambda a: np.broadcast_to(a, (2, 3, 4)), normal(3, 1), shape=(2, 3, 4)),
    by_name("broadcast_to-ones", lambda a: a + np.zeros((1, 2, 3)), normal(1, 3), shape=(1, 2, 3)),
    by_name("reshape", lambda a: a.reshape(4, 3), normal(2, 6), shape=(4, 3)),
    by_name("transpose", lambda a: a.swapaxes(-1, -2), normal(2, 3, 4)),
    by_name("transpose-axes", lambda a: a.swapaxes(0, 2), normal(2, 3, 4), axes=(0, 2)),
    by_name("permute", lambda a: a.transpose(1, 2, 0), normal(2, 3, 4), axes=(1, 2, 0)),
    by_name("permute-negative", lambda a: a.transpose(2, 0, 1), normal(2, 3, 4), axes=(-1, 0, 1)),
    by_name("flip", lambda a: np.flip(a, (0, 2)), normal(2, 3, 2), axes=(0, 2)),
    Gradient(
        "stack",
        lambda ops, a, b: ops.stack([a, b], 1),
        lambda a, b: np.stack([a, b], 1),
        (MATRIX, MATRIX),
    ),
    Gradient(
        "split",
        lambda ops, a: ops.tuple_get_item(ops.split(a, -2), 2),
        lambda a: a[:, 2],
        (MIDDLE,),
    ),
    Gradient(
        "make_tuple",
        lambda ops, a, b: ops.tuple_get_item(ops.make_tuple(a, b), 1) * a,
        lambda a, b: a * b,
        (normal(3), normal(3)),
    ),
    by_name("index_select", lambda a: a[:, [2, 0, 2]], MATRIX, axis=1, indices=np.array([2, 0, 2])),
    *(
        by_name(f"get_item-{label}", lambda a, index=index: a[index], shape, index=index)
        for label, shape, index in [
            ("integer", MATRIX, 1),
            ("slices", normal(5, 3, 4), (slice(None, None, -2), ..., None, slice(1, 3))),
            ("list", MATRIX, ([2, 0, 2],)),
            ("lists", normal(3, 4, 2), ([2, 0, 2], slice(None), [1, 0, 1])),
            ("bool", MATRIX, np.arange(12).reshape(3, 4) % 3 == 0),
        ]
    ),
    Gradient(
        "concatenate",
        lambda ops, a, b: ops.concatenate([a, b, a], -1),
        lambda a, b: np.concatenate([a, b, a], -1),
        (MATRIX, normal(3, 2)),
    ),
    Gradient(
        "where",
        lambda ops, a, b: ops.where(np.arange(12).reshape(3, 4) % 3 == 0, a, b),
        lambda a, b: np.where(np.arange(12).reshape(3, 4) % 3 == 0, a, b),
        (MATRIX, normal(4)),
    ),
    Gradient(
        "contiguous",
        lambda ops, a: ops.contiguous(ops.transpose(a)) * 2,
        lambda a: a.T * 2,
        (MATRIX,),
    ),
    Gradient("to_device", lambda ops, a: ops.to_device(a, a.device), np.array, (MATRIX,)),
    Gradient(
        "rotary",
        lambda ops, x: ops.rotary(x, *tables(3, 2), 2),
        lambda x: turn(x, 2, 2),
        (normal(1, 3, 2, 3, 6),),
    ),
    # Fused: one kernel each way, differentiable once.
    *(
        replace(case, twice=False)
        for case in [
            by_name("linear", lambda x, w, b: x @ w + b, normal(2, 3, 4), normal(4, 5), normal(5)),
            by_name("linear-no-bias", np.matmul, MATRIX, normal(4, 5)),
            by_name("linear_transposed", lambda x, w: x @ w.T, normal(2, 3, 4), normal(5, 4)),
            by_name("gelu_mlp", partial(mlp, gelu), *MLP),
            by_name("gelu_mlp-tanh", partial(mlp, gelu_tanh), *MLP, approximate="tanh"),
            *[
                Gradient(
                    f"layer-{name}",
                    partial(layer, approximate=approximate, **options),
                    partial(layer_of, form, see=see),
                    LAYER,
                )
                for name, approximate, form, see, options in [
                    ("dense", "none", gelu, None, {}),
                    ("recomputed", "tanh", gelu_tanh, None, {"recompute": True}),
                    ("tanh-blocks", "tanh", gelu_tanh, SEEN, {"mask": BLOCKS}),
                    ("blocks-of-heads", "none", gelu, SEEN_BY_HEAD, {"mask": BLOCKS_BY_HEAD}),
                ]
            ],
            Gradient(
                "linear-residual",
                lambda ops, x, w, b, r: ops.linear(x, w, b, residual=r),
                lambda x, w, b, r: r + x @ w + b,
                (normal(2, 3, 4), normal(4, 5), normal(5), normal(2, 3, 5)),
            ),
            Gradient(
                "linear-residual-no-bias",
                lambda ops, x, w, r: ops.linear(x, w, residual=r),
                lambda x, w, r: r + x @ w,
                (MATRIX, normal(4, 5), normal(3, 5)),
            ),
            Gradient(
                "gelu_mlp-residual",
                lambda ops, r, *operands: ops.gelu_mlp(*operands, residual=r),
                lambda r, *operands: r + mlp(gelu, *operands),
                (normal(2, 3, 3), *MLP),
            ),
            by_name("layer_norm", norm, normal(2, 3, 6), normal(6, mean=1), normal(6)),
            Gradient(
                "layer_norm-residual",
                lambda ops, x, w, b: ops.layer_norm(x, w, b) * x,
                lambda x, w, b: norm(x, w, b) * x,
                (normal(2, 3, 6), normal(6, mean=1), normal(6)),
            ),
            by_name("gelu", gelu, MATRIX),
            by_name("gelu-tanh", gelu_tanh, MATRIX, approximate="tanh"),
            Gradient(
                "embedding",
                lambda ops, w: ops.embedding(IDS.astype(np.int32), w),
                lambda w: w[IDS],
                (normal(5, 3),),
            ),
            by_name("attention", attend, *[normal(1, 5, 2, 3)] * 3),
            by_name(
                "attention-full",
                lambda q, k, v: attend(q, k, v, False, 0.7),
                *(normal(1, t, 2, 3) for t in (3, 5, 5)),
                **NUMPYS,
            ),
            by_name(
                "block_sparse_attention-full",
                lambda q, k, v: attend(q, k, v, scale=0.7, see=BLOCKS.to_dense()),
                *[normal(1, 5, 2, 3)] * 3,
                mask=BLOCKS,
                **NUMPYS,
            ),
            Gradient(
                "qkv_attention-full",
                lambda ops, qkv: ops.qkv_attention(qkv, *tables(4, 2), **NUMPYS),
                lambda qkv: attend_packed(qkv, 2, False, 0.7),
                (normal(1, 4, 2, 3, 6),),
            ),
            by_name(
                "block_sparse_attention",
                lambda q, k, v: attend(q, k, v, see=SEEN),
                *[normal(1, 5, 2, 3)] * 3,
                mask=BLOCKS,
            ),
            by_name(
                "ring_attention",
                lambda q, k, v: attend(q, k, v, see=SEEN),
                *[normal(1, 5, 2, 3)] * 3,
                group=Group(),
                mask=BLOCKS,
            ),
            by_name(
                "dilated_attention",
                lambda q, k, v: attend_dilated(q / 2, k, v, ((3, 1), (7, 2))),
                *[normal(2, 7, 3, 3)] * 3,
                segments=(3, 10),
                dilations=(1, 2),
                scale=0.5 * 3**-0.5,
            ),
            by_name(
                "ring_dilated_attention",
                lambda q, k, v: attend_dilated(q, k, v, ((3, 1), (7, 2))),
                *[normal(2, 7, 3, 3)] * 3,
                group=Group(),
                segments=(3, 10),
                dilations=(1, 2),
            ),
            Gradient(
                "qkv_attention",
                lambda ops, qkv: ops.qkv_attention(qkv, *tables(4, 2)),
                attend_packed,
                (normal(1, 4, 2, 3, 6),),
            ),
            by_name(
                "cross_entropy",
                lambda x: mean_cross_entropy(x, TARGETS),
                normal(4, 5),
                targets=TARGETS.astype(np.int32),
            ),
            by_name(
                "linear_cross_entropy",
                lambda x, w: mean_cross_entropy(x @ w, TARGETS),
                normal(4, 3),
                normal(3, 5),
                targets=TARGETS.astype(np.int32),
            ),
            Gradient(
                "linear_cross_entropy-transposed",
                lambda ops, x, w: ops.linear_cross_entropy(x, w, TARGETS, transposed=True),
                lambda x, w: mean_cross_entropy((x @ w.T).reshape(-1, 5), TARGETS),
                (normal(2, 2, 3), normal(5, 3)),
            ),
        ]
    ),
]


def inputs_of(case) -> list[np.ndarray]:
    rng = np.random.default_rng(len(case.label))
    return [make(rng).astype(np.float32).astype(np.float64) for make in case.inputs]
