"""Differentiable operations of needle.ops as data: each with its forward in float64 NumPy, so that
gradients can be compared with central differences of it."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from cases import (
    cross_entropy_fwd,
    gelu,
    gelu_tanh,
    layernorm_fwd,
    normal,
    rotary,
    softmax_attention,
    visible,
)


@dataclass(frozen=True)
class Gradient:
    label: str
    op: Callable  # (needle.ops, Tensors...) -> Tensor
    f: Callable  # the same in float64 NumPy
    inputs: tuple[Callable, ...]
    twice: bool = True  # elementary: its gradient is differentiable too

    def __str__(self) -> str:
        return self.label


def positive(*shape):
    return lambda rng: rng.random(shape) + 0.5


def away_from_zero(*shape):
    """No element near a kink, where central differences see both sides."""
    return lambda rng: rng.choice([-1.0, 1.0], shape) * (rng.random(shape) + 0.2)


def logsumexp(x, axis):
    top = x.max(axis, keepdims=True)
    return np.log(np.exp(x - top).sum(axis)) + np.squeeze(top, axis if axis is not None else None)


def logsoftmax(x):
    return x - logsumexp(x, -1)[..., None]


def turn(x, half, parts, sign=1.0):
    angle = np.arange(x.shape[1])[:, None] / 100.0 ** (np.arange(half) / half)
    return rotary(np.asarray, x, np.cos(angle), np.sin(angle), parts, sign)["y"]


def tables(t, half):
    angle = np.arange(t)[:, None] / 100.0 ** (np.arange(half) / half)
    return np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)


def attend(q, k, v, causal=True, scale=None, see=None):
    if see is None:
        see = visible(q.shape[1], k.shape[1], causal)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return softmax_attention(np.asarray, q, k, v, scale, see)["o"]


def attend_packed(qkv, half=2):
    turned = turn(qkv, half, 2)
    return attend(turned[..., 0, :], turned[..., 1, :], turned[..., 2, :])


def norm(x, w, b):
    return layernorm_fwd(np.asarray, x, w, b, 1e-5)["y"]


def mean_cross_entropy(logits, targets):
    return cross_entropy_fwd(None, logits, targets)["loss"]


IDS = np.array([[3, 0, 3], [1, 4, 3]])
TARGETS = np.array([2, 0, -100, 4])

GRADIENTS = [
    Gradient("add", lambda ops, a, b: ops.add(a, b), np.add, (normal(3, 4), normal(3, 4))),
    Gradient("add-broadcast", lambda ops, a, b: a + b, np.add, (normal(3, 1, 4), normal(2, 1))),
    Gradient("subtract", lambda ops, a, b: a - b, np.subtract, (normal(3, 4), normal(3, 4))),
    Gradient(
        "multiply", lambda ops, a, b: ops.multiply(a, b), np.multiply, (normal(3, 4), normal(3, 4))
    ),
    Gradient("multiply-broadcast", lambda ops, a, b: a * b, np.multiply, (normal(4), normal(3, 1))),
    Gradient(
        "divide", lambda ops, a, b: ops.divide(a, b), np.divide, (normal(3, 4), positive(3, 4))
    ),
    Gradient("power", lambda ops, a, b: ops.power(a, b), np.power, (positive(3, 4), normal(3, 4))),
    Gradient(
        "add_scalar", lambda ops, a: ops.add_scalar(a, 2.5), lambda a: a + 2.5, (normal(3, 4),)
    ),
    Gradient(
        "multiply_scalar",
        lambda ops, a: ops.multiply_scalar(a, -1.5),
        lambda a: a * -1.5,
        (normal(5),),
    ),
    Gradient(
        "divide_scalar", lambda ops, a: ops.divide_scalar(a, 3), lambda a: a / 3, (normal(5),)
    ),
    Gradient(
        "power_scalar", lambda ops, a: ops.power_scalar(a, 3), lambda a: a**3, (normal(3, 4),)
    ),
    Gradient("scalar-left", lambda ops, a: 2 - a + 3 * a, lambda a: 2 - a + 3 * a, (normal(3, 4),)),
    Gradient("scalar-over", lambda ops, a: 2 / a, lambda a: 2 / a, (positive(3, 4),)),
    Gradient("negate", lambda ops, a: ops.negate(a), np.negative, (normal(3, 4),)),
    Gradient("matmul", lambda ops, a, b: ops.matmul(a, b), np.matmul, (normal(3, 4), normal(4, 2))),
    Gradient(
        "matmul-batched",
        lambda ops, a, b: ops.matmul(a, b),
        np.matmul,
        (normal(2, 3, 4), normal(2, 4, 2)),
    ),
    Gradient("matmul-rank", lambda ops, a, b: a @ b, np.matmul, (normal(2, 2, 3, 4), normal(4, 2))),
    Gradient(
        "matmul-rank-left", lambda ops, a, b: a @ b, np.matmul, (normal(3, 4), normal(2, 2, 4, 2))
    ),
    Gradient(
        "matmul-ones", lambda ops, a, b: a @ b, np.matmul, (normal(2, 1, 3, 2), normal(1, 3, 2, 2))
    ),
    Gradient("summation", lambda ops, a: ops.summation(a), np.sum, (normal(3, 4),)),
    Gradient(
        "summation-axis",
        lambda ops, a: ops.summation(a, axes=1),
        lambda a: a.sum(1),
        (normal(3, 4, 2),),
    ),
    Gradient(
        "summation-last",
        lambda ops, a: ops.summation(a, axes=-1),
        lambda a: a.sum(-1),
        (normal(3, 4, 2),),
    ),
    Gradient(
        "summation-axes",
        lambda ops, a: ops.summation(a, axes=(0, 2)),
        lambda a: a.sum((0, 2)),
        (normal(3, 4, 2),),
    ),
    Gradient(
        "broadcast_to",
        lambda ops, a: ops.broadcast_to(a, (2, 3, 4)),
        lambda a: np.broadcast_to(a, (2, 3, 4)),
        (normal(3, 1),),
    ),
    Gradient(
        "reshape", lambda ops, a: ops.reshape(a, (4, 3)), lambda a: a.reshape(4, 3), (normal(2, 6),)
    ),
    Gradient(
        "transpose",
        lambda ops, a: ops.transpose(a),
        lambda a: a.swapaxes(-1, -2),
        (normal(2, 3, 4),),
    ),
    Gradient(
        "transpose-axes",
        lambda ops, a: ops.transpose(a, axes=(0, 2)),
        lambda a: a.swapaxes(0, 2),
        (normal(2, 3, 4),),
    ),
    Gradient("log", lambda ops, a: ops.log(a), np.log, (positive(3, 4),)),
    Gradient("exp", lambda ops, a: ops.exp(a), np.exp, (normal(3, 4),)),
    Gradient(
        "relu", lambda ops, a: ops.relu(a), lambda a: np.maximum(a, 0), (away_from_zero(3, 4),)
    ),
    Gradient("tanh", lambda ops, a: ops.tanh(a), np.tanh, (normal(3, 4),)),
    Gradient(
        "logsumexp",
        lambda ops, a: ops.logsumexp(a, axes=1),
        lambda a: logsumexp(a, 1),
        (normal(3, 4),),
    ),
    Gradient(
        "logsumexp-axes",
        lambda ops, a: ops.logsumexp(a, axes=(0, 2)),
        lambda a: logsumexp(a, (0, 2)),
        (normal(3, 4, 2),),
    ),
    Gradient(
        "logsumexp-all",
        lambda ops, a: ops.logsumexp(a),
        lambda a: logsumexp(a, None),
        (normal(3, 4),),
    ),
    Gradient("logsoftmax", lambda ops, a: ops.logsoftmax(a), logsoftmax, (normal(3, 4),)),
    Gradient(
        "stack",
        lambda ops, a, b: ops.stack([a, b], 1),
        lambda a, b: np.stack([a, b], 1),
        (normal(3, 4), normal(3, 4)),
    ),
    Gradient(
        "split",
        lambda ops, a: ops.tuple_get_item(ops.split(a, 1), 2),
        lambda a: a[:, 2],
        (normal(3, 4),),
    ),
    Gradient(
        "make_tuple",
        lambda ops, a, b: ops.tuple_get_item(ops.make_tuple(a, b), 1) * a,
        lambda a, b: a * b,
        (normal(3), normal(3)),
    ),
    Gradient(
        "flip", lambda ops, a: ops.flip(a, (0, 2)), lambda a: np.flip(a, (0, 2)), (normal(2, 3, 2),)
    ),
    Gradient(
        "index_select",
        lambda ops, a: ops.index_select(a, 1, np.array([2, 0, 2])),
        lambda a: a[:, [2, 0, 2]],
        (normal(3, 4),),
    ),
    # Fused: one kernel each way, differentiable once.
    Gradient(
        "linear",
        lambda ops, x, w, b: ops.linear(x, w, b),
        lambda x, w, b: x @ w + b,
        (normal(2, 3, 4), normal(4, 5), normal(5)),
        twice=False,
    ),
    Gradient(
        "linear-no-bias",
        lambda ops, x, w: ops.linear(x, w),
        np.matmul,
        (normal(3, 4), normal(4, 5)),
        twice=False,
    ),
    Gradient(
        "linear_transposed",
        lambda ops, x, w: ops.linear_transposed(x, w),
        lambda x, w: x @ w.T,
        (normal(2, 3, 4), normal(5, 4)),
        twice=False,
    ),
    Gradient(
        "layer_norm",
        lambda ops, x, w, b: ops.layer_norm(x, w, b, 1e-5),
        norm,
        (normal(2, 3, 6), normal(6, mean=1), normal(6)),
        twice=False,
    ),
    Gradient("gelu", lambda ops, x: ops.gelu(x), gelu, (normal(3, 4),), twice=False),
    Gradient(
        "gelu-tanh",
        lambda ops, x: ops.gelu(x, approximate="tanh"),
        gelu_tanh,
        (normal(3, 4),),
        twice=False,
    ),
    Gradient(
        "embedding",
        lambda ops, w: ops.embedding(IDS.astype(np.int32), w),
        lambda w: w[IDS],
        (normal(5, 3),),
        twice=False,
    ),
    Gradient(
        "rotary",
        lambda ops, x: ops.rotary(x, *tables(3, 2), 2),
        lambda x: turn(x, 2, 2),
        (normal(1, 3, 2, 3, 6),),
        twice=False,
    ),
    Gradient(
        "attention",
        lambda ops, q, k, v: ops.attention(q, k, v),
        attend,
        (normal(1, 5, 2, 3),) * 3,
        twice=False,
    ),
    Gradient(
        "attention-full",
        lambda ops, q, k, v: ops.attention(q, k, v, causal=False, scale=0.7),
        lambda q, k, v: attend(q, k, v, False, 0.7),
        (normal(1, 3, 2, 3), normal(1, 5, 2, 3), normal(1, 5, 2, 3)),
        twice=False,
    ),
    Gradient(
        "qkv_attention",
        lambda ops, qkv: ops.qkv_attention(qkv, *tables(4, 2)),
        attend_packed,
        (normal(1, 4, 2, 3, 6),),
        twice=False,
    ),
    Gradient(
        "cross_entropy",
        lambda ops, x: ops.cross_entropy(x, TARGETS.astype(np.int32)),
        lambda x: mean_cross_entropy(x, TARGETS),
        (normal(4, 5),),
        twice=False,
    ),
]
