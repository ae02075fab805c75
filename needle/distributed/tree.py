"""The order in which a step's gradients are added: a property of the run, not of its ranks.

The micro-batches of a step are the leaves of one binary tree of float32 sums. Leaf i is followed by
as many sums of two neighbours as a binary counter carries from i to i + 1, and the last one by the
remaining sums:

    leaves    1 2 3 4          ((1 + 2) + (3 + 4))
              1 2 3 4 5 6      (((1 + 2) + (3 + 4)) + (5 + 6))

A run of 2^k leaves that begins at a multiple of 2^k is a subtree. So `ranks` ranks of 2^k leaves
each sum their own, and the sums are the leaves of a tree by the same rule: the bits are those of
one rank that computes all leaves, which may be any number.
"""

from __future__ import annotations

from collections.abc import Sequence

from needle._C import NDArray


def merges(i: int, micro_batches: int) -> int:
    """Return how many sums follow micro-batch i of a step, each of the last two partial sums.

    >>> from needle.distributed.tree import merges
    >>> [merges(i, 6) for i in range(6)]
    [0, 1, 0, 2, 0, 2]
    """
    carried = (~i & (i + 1)).bit_length() - 1  # the ones at the end of i
    return carried + (micro_batches.bit_count() - 1 if i == micro_batches - 1 else 0)


def tree_sum(parts: Sequence[NDArray], into: NDArray | None = None) -> NDArray:
    """Sum float32 arrays of one shape by the rule above, in place. Return the sum: `into`, if that
    is one of the parts, else parts[0]. The others then hold partial sums."""
    sums: list[NDArray] = []
    for i, part in enumerate(parts):
        sums.append(part)
        for _ in range(merges(i, len(parts))):
            right = sums.pop()
            if right is into:  # the bits of a sum do not depend on which operand it replaces
                right, sums[-1] = sums[-1], right
            sums[-1] += right
    return sums[0]


def own_micro_batches(micro_batches: int, rank: int, ranks: int, context: int = 1) -> range:
    """Return the micro-batches of a step that a rank computes; `context` consecutive ranks compute
    the same ones. ValueError if `ranks` cannot share so many."""
    rank, groups = rank // context, ranks // context
    fitting = fitting_ranks(micro_batches)
    if ranks % context or groups not in fitting:
        counts = ", ".join(str(fit * context) for fit in fitting)
        raise ValueError(
            f"{ranks} ranks cannot share a step of {micro_batches} micro-batches with the bits of "
            f"one: each needs 1, 2, 4, ... of them. {counts} ranks can: change their number, or, "
            "of a new run, --grad-accum"
        )
    share = micro_batches // groups
    return range(rank * share, (rank + 1) * share)


def fitting_ranks(micro_batches: int) -> list[int]:
    """Return the numbers of ranks that can share so many micro-batches, 2^k for each rank.

    >>> from needle.distributed.tree import fitting_ranks
    >>> fitting_ranks(12)
    [1, 3, 6, 12]
    """
    shares = (1 << k for k in range(micro_batches.bit_length()))
    return sorted({1} | {micro_batches // share for share in shares if micro_batches % share == 0})
