"""Dilated attention over a sequence that ranks share: float64's numbers, one device's errors."""

import numpy as np
import pytest
from gradients import dilated_weights
from ring import B, D, assert_as_near, attended, distances, operands, shared, tokens_of
from together import together

import needle as ndl
from needle import _C
from needle.distributed.group import Group
from needle.ops import dilated_attention, ring_dilated_attention
from needle.ops.ring_dilated import calls_of, counts_from_its_run
from needle.testing.attention import attention_gradients, weighted

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


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """Fill new memory with NaN, which shows unwritten elements."""
    real = _C.empty

    def empty(shape, dtype, device):
        made = real(shape, dtype, device)
        made.fill(float("nan"))
        return made

    monkeypatch.setattr(_C, "empty", empty)


def reference(arrays, branches, causal):
    """The result, and the gradients of q, k and v, in float64."""
    q, k, v, dout = arrays
    p = dilated_weights(q, k, branches, causal)
    return weighted(p, v), *attention_gradients(p, q, k, v, dout, D**-0.5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("ranks, layout", [(1, "zigzag"), (2, "zigzag"), (4, "zigzag"),
                                           (2, "contiguous"), (4, "contiguous")])  # fmt: skip
@pytest.mark.parametrize("time, heads, segments, dilations", BRANCHES)
def test_it_is_dilated_attention(time, heads, segments, dilations, ranks, layout, causal, dtype):
    """Against float64, with errors no larger than those of one device."""
    arrays, branches = operands(time, heads, dtype), tuple(zip(segments, dilations))
    wanted = reference(arrays, branches, causal)
    alone = attended(
        lambda q, k, v: dilated_attention(q, k, v, segments, dilations, causal), arrays, dtype
    )
    options = {"causal": causal, "layout": layout}
    found = shared(ring_dilated_attention, arrays, ranks, dtype, segments, dilations, **options)
    assert_as_near(found, alone, wanted)


def test_scale_is_that_of_one_device():
    arrays, branches = operands(24, 7, "float32"), ((5, 9, 24), (4, 2, 5))
    wanted = attended(lambda *qkv: dilated_attention(*qkv, *branches, scale=0.2), arrays, "float32")
    found = shared(ring_dilated_attention, arrays, 2, "float32", *branches, scale=0.2)
    assert max(distances(found, wanted)) < 1e-6


@pytest.mark.parametrize("causal", [True, False])
def test_calls_cover_the_tokens_of_branches(causal):
    """Any run of tokens, any branch: counted by the views, each call's own triangle."""
    random = np.random.default_rng(0)
    for _ in range(300):
        time, heads = (int(n) for n in random.integers(1, (30, 9)))
        width, dilation = int(random.integers(1, time + 1)), int(random.integers(1, 10))
        begin, end = sorted(int(n) for n in random.integers(0, time + 1, 2))
        rows = np.arange(time * heads, dtype=np.float32).reshape(1, time, heads, 1)
        own, all_keys = _C.array(rows[:, begin:end]), _C.array(rows)
        seen = np.zeros((time * heads, time * heads), int)
        run = slice(begin, end)
        for queries, keys in calls_of(own.shape, run, time, (width, dilation), causal):
            q, k = (x.numpy()[..., 0].astype(int) for x in (queries(own), keys(all_keys)))
            assert q.shape[1] > 0 and q.shape[::2] == k.shape[::2]
            triangle = np.tri(q.shape[1], k.shape[1], k.shape[1] - q.shape[1], dtype=int)
            for n, h in np.ndindex(*q.shape[::2]):
                seen[np.ix_(q[n, :, h], k[n, :, h])] += triangle if causal else 1
        i, head = np.divmod(np.arange(time * heads), heads)
        held = i % width % dilation == head % dilation
        wanted = (
            held[:, None] & held & (head[:, None] == head) & (i[:, None] // width == i // width)
        )
        wanted &= ((i >= begin) & (i < end))[:, None]
        if causal:
            wanted &= i <= i[:, None]
        np.testing.assert_array_equal(seen, wanted, f"{run} of {time}, {(width, dilation)}")


def test_tokens_are_counted_from_a_run_only_where_that_is_the_same():
    random, met = np.random.default_rng(1), set()
    for _ in range(1000):
        width, dilation, begin, size = (int(n) for n in random.integers(1, (40, 6, 40, 20)))
        t = np.arange(begin, begin + size)
        counts = counts_from_its_run((width, dilation), slice(begin, begin + size))
        met.add(counts)
        if counts:
            from_run = (t - begin) % width % dilation
            np.testing.assert_array_equal(from_run, t % width % dilation)
    assert met == {True, False}


def test_two_runs_give_the_same_bits():
    call = ring_dilated_attention, operands(56, 3, "bfloat16"), 4, "bfloat16", (11, 56), (1, 4)
    first, second = (shared(*call) for _ in range(2))
    for x, y in zip(first, second):
        np.testing.assert_array_equal(x, y)


def test_views_as_operands():
    """Every second head of those from the second on."""
    packed = np.random.RandomState(0).standard_normal((3, B, 24, 5, D)).astype(np.float32)
    wide = np.repeat(packed, 2, axis=3)

    def work(group):
        own = tokens_of(group.rank, group.size, 24)
        x = [ndl.Tensor(part[:, own]) for part in wide]
        views = [y[:, :, 1:9:2, :] for y in x]
        assert not views[0].cached_data.is_compact()
        out = ring_dilated_attention(*views, group, (6, 24), (1, 2))
        out.sum().backward()
        return [y.numpy() for y in (out, *(y.grad for y in x))]

    found = together(2, work)
    x = [ndl.Tensor(part) for part in wide]
    out = dilated_attention(*(y[:, :, 1:9:2, :] for y in x), (6, 24), (1, 2))
    out.sum().backward()
    for i, right in enumerate([out, *(y.grad for y in x)]):
        for rank in range(2):
            wanted = right.numpy()[:, tokens_of(rank, 2, 24)]
            np.testing.assert_allclose(found[rank][i], wanted, atol=2e-6)


def test_unwanted_gradients_are_not_computed():
    q, k, v = (ndl.Tensor(np.ones((1, 4, 1, 4))) for _ in range(3))
    k.requires_grad = False
    ring_dilated_attention(q, k, v, Group(), (2,), (1,)).sum().backward()
    assert k.grad is None and v.grad is not None


def test_one_rank_has_the_bits_of_one_device():
    q, k, v = (ndl.Tensor(x) for x in operands(40, 3, "float32")[:3])
    found = ring_dilated_attention(q, k, v, Group(), (8, 30), (1, 4)).numpy()
    np.testing.assert_array_equal(found, dilated_attention(q, k, v, (8, 30), (1, 4)).numpy())


@pytest.mark.parametrize(
    "shapes, options, words",
    [
        ([(1, 4, 2, 4), (1, 8, 2, 4), (1, 8, 2, 4)], {}, "must have one shape"),
        ([(4, 2, 4)] * 3, {}, "must have one shape"),
        ([(1, 3, 2, 4)] * 3, {}, "6 tokens cannot be shared by 2 ranks"),
        ([(1, 8, 2, 4)] * 3, {"segments": (4, 8)}, "ring_dilated_attention: segments and dil"),
        ([(1, 8, 2, 4)] * 3, {"dilations": 1}, "ring_dilated_attention: dilations must be a seq"),
        ([(1, 8, 2, 4)] * 3, {"layout": "striped"}, "layout must be one of"),
        ([(1, 8, 2, 4)] * 3, {"scale": "x"}, "scale must be a number"),
    ],
)
def test_invalid_arguments_are_refused(shapes, options, words):
    def work(group):
        given = {"segments": (4,), "dilations": (1,)} | options
        ring_dilated_attention(*(ndl.zeros(*shape) for shape in shapes), group, **given)

    with pytest.raises((ValueError, TypeError), match=words):
        together(2, work)
