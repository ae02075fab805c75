"""Attention over a sequence that ranks share, plain, of blocks and dilated: float64's numbers, one
device's errors, all ranks."""

import threading

import numpy as np
import pytest
from gradients import dilated_weights
from harness import poison
from ring import B, D, assert_as_near, attended, distances, operands, shared
from together import together

import needle as ndl
from needle import _C, BlockMask
from needle.distributed.group import Group
from needle.ops import (
    attention,
    dilated_attention,
    ring_attention,
    ring_chunks,
    ring_dilated_attention,
)
from needle.ops.attention import Kernel
from needle.testing.attention import (
    attention_gradients,
    softmax_attention,
    softmax_attention_bwd,
    visible,
    weighted,
)

H = 2
BOTH = [
    (ring_attention, attention, ()),
    (ring_dilated_attention, dilated_attention, ((6, 24), (1, 2))),
]


@pytest.fixture(autouse=True)
def poisoned():
    """What no kernel writes is seen."""
    poison(ndl.cpu())


# ---- plain --------------------------------------------------------------------------------------


def reference(arrays, see, scale=D**-0.5):
    """The result, and the gradients of q, k and v, in float64."""
    q, k, v, dout = arrays
    made = softmax_attention(np.asarray, q, k, v, scale, see)
    back = softmax_attention_bwd(np.asarray, dout, q, k, v, made["o"], made["lse"], scale, see)
    return made["o"], *back.values()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("ranks, time", [(1, 31), (2, 124), (3, 186), (4, 8)])
def test_ring_attention_is_attention(ranks, time, causal, layout, dtype):
    """Against float64, with errors no larger than those of one device."""
    arrays = operands(time, H, dtype)
    wanted = reference(arrays, visible(time, time, causal))
    alone = attended(lambda q, k, v: attention(q, k, v, causal), arrays, dtype)
    found = shared(ring_attention, arrays, ranks, dtype, causal=causal, layout=layout)
    assert_as_near(found, alone, wanted)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    "mask",
    [
        BlockMask.local(96, 20, 8),
        BlockMask.random(96, 3, 8, seed=1),
        BlockMask(np.random.RandomState(2).rand(H, 12, 12) < 0.5, 8, 96),  # one a head; empty rows
    ],
    ids=["local", "random", "heads"],
)
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_ring_attention_of_blocks_is_attention(ranks, mask, causal):
    arrays = operands(96, H, "float32")
    see = mask.to_dense() & visible(96, 96, causal)
    wanted = reference(arrays, np.broadcast_to(see, (B, H, 96, 96)), 0.2)
    options = {"causal": causal, "scale": 0.2, "mask": mask}
    found = shared(ring_attention, arrays, ranks, "float32", **options)
    assert max(distances(found, wanted)) < 1e-6


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_gradients_of_keys_are_summed_by_ranks_and_their_runs(ranks, layout, causal):
    """Bit for bit those that one device's kernel gives for each run."""
    time = 48
    wanted = [_C.array(np.zeros((B, time, H, D)), "float32", _C.cpu()) for _ in range(2)]
    arrays = [_C.array(x, "float32", _C.cpu()) for x in operands(time, H, "float32")]
    for rank in range(ranks):
        for run in ring_chunks(time, rank, ranks, layout):
            end = run.stop if causal else time
            q, k, v, dout = (x[:, t] for x, t in zip(arrays, (run, slice(end), slice(end), run)))
            kernel = Kernel("attention", None, causal, None)
            kernel.forward(q, k, v)
            grads = [_C.empty(x.shape, "float32", _C.cpu()) for x in (q, k, v)]
            kernel.backward(dout, (q, k, v), grads)
            for total, part in zip(wanted, grads[1:]):
                total[:, :end] += part
    options = {"causal": causal, "layout": layout}
    found = shared(ring_attention, operands(time, H, "float32"), ranks, "float32", **options)[2:]
    for x, y in zip(found, wanted):
        np.testing.assert_array_equal(x, y.numpy())


def test_second_runs_travel_beside_the_kernel_of_the_first(monkeypatch):
    def noting(cls, name, what):
        """Note what is called, in the list of its thread, around a method."""
        method = getattr(cls, name)

        def noted(*arguments):
            if hasattr(here, "calls"):
                here.calls.append(what)
            done = method(*arguments)
            return (lambda: (here.calls.append("wait"), done())) if what == "begin" else done

        monkeypatch.setattr(cls, name, noted)

    def work(group):
        here.calls = []
        q, k, v = (ndl.Tensor(x) for x in operands(8, H, "float32")[:3])
        ring_attention(q, k, v, group).sum().backward()
        return here.calls

    here = threading.local()
    for cls, name, what in (
        (Group, "begin", "begin"),
        (Kernel, "forward", "kernel"),
        (Kernel, "backward", "gradients"),
    ):
        noting(cls, name, what)
    for calls in together(2, work):
        assert " ".join(calls) == (
            "begin begin wait kernel wait kernel "
            "begin begin wait gradients wait gradients begin wait"
        )


def test_chunks_cover_a_sequence():
    assert ring_chunks(24, 0, 3) == [slice(0, 4), slice(20, 24)]
    assert ring_chunks(24, 1, 3, "contiguous") == [slice(8, 16)]
    assert ring_chunks(7, 0, 1) == [slice(0, 7)]
    with pytest.raises(ValueError, match="7 tokens cannot be shared by 2 ranks: a multiple of 4"):
        ring_chunks(7, 0, 2)
    with pytest.raises(ValueError, match="layout must be one of"):
        ring_chunks(8, 0, 2, "striped")
    with pytest.raises(ValueError, match="rank 2 is none of 2 ranks"):
        ring_chunks(8, 2, 2)


# ---- dilated ------------------------------------------------------------------------------------

# T, heads, segments, dilations; runs of T / 2, T / 4 and T / 8 tokens: they hold whole segments;
# lie in one, at multiples of the dilation and not; are cut by segments, at the same and at others;
# the last segment is shorter; segments longer than T; more dilation than heads, and fewer; tokens
# of no branch.
BRANCHES = [
    (64, 3, (8,), (1,)),
    (64, 4, (4, 16, 64), (1, 2, 4)),
    (64, 8, (16, 64), (1, 8)),
    (48, 3, (12, 48), (1, 4)),
    (40, 3, (8, 24, 100), (1, 3, 7)),
    (56, 5, (11, 30), (2, 3)),
    (24, 7, (5, 9, 24), (4, 2, 5)),
    (72, 3, (50,), (1,)),
]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("ranks, layout", [(1, "zigzag"), (2, "zigzag"), (4, "zigzag"),
                                           (2, "contiguous"), (4, "contiguous")])  # fmt: skip
@pytest.mark.parametrize("time, heads, segments, dilations", BRANCHES)
def test_ring_dilated_is_dilated_attention(
    time, heads, segments, dilations, ranks, layout, causal, dtype
):
    """Against float64, with errors no larger than those of one device."""
    arrays, branches = operands(time, heads, dtype), tuple(zip(segments, dilations))
    q, k, v, dout = arrays
    p = dilated_weights(q, k, branches, causal)
    wanted = weighted(p, v), *attention_gradients(p, q, k, v, dout, D**-0.5)
    alone = attended(
        lambda q, k, v: dilated_attention(q, k, v, segments, dilations, causal), arrays, dtype
    )
    options = {"causal": causal, "layout": layout}
    found = shared(ring_dilated_attention, arrays, ranks, dtype, segments, dilations, **options)
    assert_as_near(found, alone, wanted)


def test_ring_dilated_scale_is_that_of_one_device():
    arrays, branches = operands(24, 7, "float32"), ((5, 9, 24), (4, 2, 5))
    wanted = attended(lambda *qkv: dilated_attention(*qkv, *branches, scale=0.2), arrays, "float32")
    found = shared(ring_dilated_attention, arrays, 2, "float32", *branches, scale=0.2)
    assert max(distances(found, wanted)) < 1e-6


# ---- both ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("op, _, more", BOTH)
def test_two_runs_give_the_same_bits(op, _, more):
    first, second = (shared(op, operands(64, 3, "bfloat16"), 4, "bfloat16", *more) for _ in "12")
    for x, y in zip(first, second):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("op, alone, more", BOTH)
def test_one_rank_has_the_bits_of_one_device(op, alone, more):
    q, k, v = (ndl.Tensor(x) for x in operands(40, 3, "float32")[:3])
    np.testing.assert_array_equal(
        op(q, k, v, Group(), *more).numpy(), alone(q, k, v, *more).numpy()
    )


EIGHT = [(1, 8, 2, 4)] * 3
UNLIKE = [(1, 4, 2, 4), (1, 8, 2, 4), (1, 8, 2, 4)]


@pytest.mark.parametrize(
    "op, shapes, options, words",
    [
        (ring_attention, UNLIKE, {}, "alike"),
        (ring_attention, [(1, 3, 2, 4)] * 3, {}, "6 tokens cannot be shared by 2 ranks"),
        (ring_attention, EIGHT, {"mask": BlockMask.dense(8, 4)}, "but there are 16 tokens in all"),
        (ring_attention, EIGHT, {"mask": BlockMask.dense(16, 8)}, "cut by blocks of 8"),
        (ring_dilated_attention, UNLIKE, {}, "must have one shape"),
        (ring_dilated_attention, EIGHT, {"segments": (4, 8)}, "ring_dilated_attention: segments"),
        (ring_dilated_attention, EIGHT, {"layout": "striped"}, "layout must be one of"),
    ],
)
def test_invalid_arguments_are_refused(op, shapes, options, words):
    def work(group):
        branches = {} if op is ring_attention else {"segments": (4,), "dilations": (1,)}
        op(*(ndl.zeros(*shape) for shape in shapes), group, **branches | options)

    with pytest.raises((ValueError, TypeError), match=words):
        together(2, work)
