"""Is a device still right? A leaf of a step computed again on another, and compared bit for bit.

A device that computes wrong without saying so (silent data corruption) ruins a run. Where bits do
not depend on who computes them, two devices can be held against each other: every `every` steps one
leaf, another each time, is computed by its rank and by the next one. Where a bit differs all ranks
compute it, twice, to find out whose result it is that no other has.

    for leaf in parallel.own_leaves:
        ...                                 the leaf's backward
        verification.keep(step, leaf, ids, targets)
        parallel.add_leaf()
    norm, scale = parallel.reduce(max_norm)
    verification.check(step)                before the weights change

It costs the time of one leaf, and the way of one gradient between two ranks, every `every` steps;
in memory a second gradient, a third on the rank that compares.
"""

from __future__ import annotations

import hashlib
import platform
from collections import Counter
from collections.abc import Callable, Container
from typing import Any

import numpy as np

from needle import _C
from needle._C import NDArray
from needle.backend_ndarray import as_bytes
from needle.distributed.data_parallel import DataParallel


class WrongDevice(RuntimeError):
    """Two devices gave different bits for one leaf; the message names the one that is wrong, or
    both where it cannot be told, and `ranks` are theirs."""

    def __init__(self, text: str, ranks: list[int]) -> None:
        super().__init__(text)
        self.ranks = ranks


class Verification:
    """compute(ids, targets) makes the gradient of that leaf parallel.flat's.

    every: 0: never. ids and targets are int32 or int64 (B, T), all of `shape`. ValueError with one
    rank alone: there is no other device to ask."""

    def __init__(
        self,
        parallel: DataParallel,
        every: int,
        shape: tuple[int, int],
        compute: Callable[[Any, Any], None],
    ) -> None:
        if every and parallel.group.size == 1:
            raise ValueError("--verify: another rank computes it again, and there is only this one")
        if every and parallel.context > 1:
            raise ValueError("--verify: no rank can compute a micro-batch again that several share")
        self._parallel, self._every, self._compute = parallel, every, compute
        self._leaves = len(parallel.own_leaves) * parallel.group.size
        self._batch = [_C.empty(shape, "int32", parallel.flat.grad.device) for _ in range(2)]
        self._grad: NDArray | None = None

    def _leaf(self, step: int) -> int | None:
        """Which is verified in this step."""
        if not self._every or step % self._every:
            return None
        return step // self._every % self._leaves

    def keep(self, step: int, leaf: int, ids: Any, targets: Any) -> None:
        """flat.grad is the gradient of this leaf of the step."""
        if leaf == self._leaf(step):
            for place, array in zip(self._batch, (ids, targets)):
                if isinstance(array, np.ndarray):
                    array = _C.array(array, "int32", place.device)
                _C.assign(place, array)
            self._grad = self._parallel.flat.grad.copy()

    def check(self, step: int) -> None:
        """WrongDevice, on all ranks. To be called where flat.grad holds this rank's piece of the
        sum, which stays."""
        leaf, group = self._leaf(step), self._parallel.group
        if leaf is None:
            return
        owner = leaf // len(self._parallel.own_leaves)
        witness = (owner + 1) % group.size
        flat = self._parallel.flat
        own = flat.grad[self._parallel.pieces[group.rank]].copy()
        if group.rank != owner:
            size = flat.size if group.rank == witness else 0
            self._grad = _C.empty((size,), "float32", own.device)
        for array in self._batch:
            self._send("the micro-batch to verify", array, owner, range(group.size))
        self._send("the gradient to verify", self._grad, owner, [witness])
        differing = 0
        if group.rank == witness:
            again = self._again()
            differing = int(_C.not_equal(_words(again), _words(self._grad)).astype("int32").sum())
        differing = group.gather("the verification", differing)[witness]
        if differing:
            self._find_wrong(step, leaf, owner, witness, differing)
        _C.assign(flat.grad[self._parallel.pieces[group.rank]], own)
        self._grad = None

    def _again(self) -> NDArray:
        self._compute(*self._batch)
        return self._parallel.flat.grad

    def _send(self, name: str, array: NDArray, owner: int, to: Container[int]) -> None:
        group, nothing = self._parallel.group, [None] * self._parallel.group.size
        sends, receives = list(nothing), list(nothing)
        if group.rank == owner:
            sends = [array if r in to and r != owner else None for r in range(group.size)]
        elif group.rank in to:
            receives[owner] = array
        group.exchange(name, sends, receives)

    def _find_wrong(self, step: int, leaf: int, owner: int, witness: int, differing: int) -> None:
        group, flat = self._parallel.group, self._parallel.flat
        first = [_digest(self._grad)] if group.rank == owner else []
        results = [*first, *(_digest(self._again()) for _ in range(2))]
        where = f"{platform.node()}, {flat.grad.device}"
        told = group.gather("the results in dispute", [where, results])
        # Each rank that agrees with itself has a vote.
        votes = Counter(theirs[-1] for _, theirs in told if theirs[-2] == theirs[-1])
        (right, most), *others = votes.most_common() or [(None, 0)]
        if others and others[0][1] == most:
            suspects, right = [owner, witness], None
        else:
            differing_ranks = [r for r, (_, theirs) in enumerate(told) if set(theirs) != {right}]
            suspects = differing_ranks or [witness]  # who was wrong that once
        names = [f"rank {r} ({told[r][0]})" for r in suspects]
        said = (" or " if right is None else ", ").join(names)
        raise WrongDevice(
            f"step {step}: the gradient of micro-batch {leaf} differs in {differing:,} of "
            f"{flat.size:,} numbers between rank {owner} and rank {witness}: {said} computes "
            "wrong. Nothing of this step is saved. Go on without that device; what was saved "
            f"since step {step - self._every}, where nothing was found, it may have spoiled",
            suspects,
        )


def _words(array: NDArray) -> NDArray:
    """A flat float32 array as int32, so that equal means equal bits."""
    return NDArray.make(array.shape, handle=array._handle, dtype="int32")


def _digest(array: NDArray) -> str:
    return hashlib.blake2b(as_bytes(array).numpy().tobytes(), digest_size=16).hexdigest()
