"""Attention of ranks that share a sequence, and of one device, on the same operands."""

import numpy as np
from together import together

import needle as ndl
from needle import _C
from needle.ops import ring_chunks

B, D = 2, 8


def operands(time, heads, dtype, seed=0):
    """q, k, v and the gradient of the result, as the dtype holds them, in float64."""
    random = np.random.RandomState(seed)
    arrays = [random.standard_normal((B, time, heads, D)) for _ in range(4)]
    return [_C.array(x, dtype, _C.cpu()).numpy().astype(np.float64) for x in arrays]


def attended(compute, arrays, dtype):
    """The result of `compute` and its three gradients, in float64."""
    leaves = [ndl.Tensor(x, dtype=dtype) for x in arrays[:3]]
    out = compute(*leaves)
    out.backward(ndl.Tensor(arrays[3], dtype=dtype, requires_grad=False))
    return [x.numpy().astype(np.float64) for x in (out, *(leaf.grad for leaf in leaves))]


def tokens_of(rank, ranks, time, layout="zigzag"):
    return np.concatenate([np.arange(time)[run] for run in ring_chunks(time, rank, ranks, layout)])


def shared(op, arrays, ranks, dtype, *more, layout="zigzag", **options):
    """The same of all ranks, put together. op: takes q, k, v, the group, and the rest."""
    own = [tokens_of(rank, ranks, arrays[0].shape[1], layout) for rank in range(ranks)]

    def work(group):
        attend = lambda *qkv: op(*qkv, group, *more, layout=layout, **options)
        return attended(attend, [x[:, own[group.rank]] for x in arrays], dtype)

    whole = [np.empty(arrays[0].shape) for _ in range(4)]
    for tokens, parts in zip(own, together(ranks, work)):
        for x, part in zip(whole, parts):
            x[:, tokens] = part
    return whole


def distances(found, wanted):
    return [np.linalg.norm(x - y) / np.linalg.norm(y) for x, y in zip(found, wanted)]


def assert_as_near(found, alone, wanted):
    """The errors of the ranks are no larger than those of one device."""
    for mine, theirs in zip(distances(found, wanted), distances(alone, wanted)):
        assert mine <= 1.1 * theirs + 1e-7
