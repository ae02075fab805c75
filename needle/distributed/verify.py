"""Detect silent data corruption: compute a micro-batch on a second device and compare all bits.

Bits do not depend on the device, so two devices can check each other. Every `every` steps one
micro-batch, another each time, is computed by its rank and by the next one. If a bit
differs, all ranks compute it twice, which shows whose result is wrong.

    for index in parallel.own_micro_batches:
        ...                                 its backward
        verification.keep(step, index, ids, targets)
        parallel.add_micro_batch()
    norm, scale = parallel.reduce(max_norm)
    verification.check(step)                before the weights change

Cost, every `every` steps: the time of one micro-batch and the transfer of one gradient between two
ranks; memory of a second gradient, a third on the rank that compares.
"""

from __future__ import annotations

import hashlib
import os
import platform
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np

from needle import _C
from needle._C import NDArray
from needle.backend_ndarray import as_bytes
from needle.distributed.data_parallel import DataParallel


class WrongDevice(RuntimeError):
    """Two devices gave different bits for one micro-batch. The message names the wrong one, or both
    if that is unknown; `ranks` are theirs. `code`: the exit code."""

    code = os.EX_TEMPFAIL

    def __init__(self, text: str, ranks: list[int]) -> None:
        super().__init__(text)
        self.ranks = ranks


class Verification:
    """Verify a micro-batch every `every` steps (0: never).

    compute(ids, targets) leaves the gradient of that micro-batch in parallel.flat.grad; ids and
    targets are int32 or int64 of `shape` (B, T). ValueError for a single rank, which has no second
    device, and with context parallelism."""

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
        self._count = len(parallel.own_micro_batches) * parallel.group.size
        self._batch = [_C.empty(shape, "int32", parallel.flat.grad.device) for _ in range(2)]
        self._grad: NDArray | None = None

    def _verified(self, step: int) -> int | None:
        """Return the micro-batch to verify in this step, or None."""
        if not self._every or step % self._every:
            return None
        return step // self._every % self._count

    def keep(self, step: int, index: int, ids: Any, targets: Any) -> None:
        """Keep flat.grad, the gradient of this micro-batch, if it is to be verified."""
        if index == self._verified(step):
            for place, array in zip(self._batch, (ids, targets)):
                if isinstance(array, np.ndarray):
                    array = _C.array(array, "int32", place.device)
                _C.assign(place, array)
            self._grad = self._parallel.flat.grad.copy()

    def check(self, step: int) -> None:
        """Raise WrongDevice on all ranks if a device is wrong. Call it while flat.grad holds this
        rank's shard of the sum, which stays."""
        index, group = self._verified(step), self._parallel.group
        if index is None:
            return
        owner = index // len(self._parallel.own_micro_batches)
        witness = (owner + 1) % group.size
        flat = self._parallel.flat
        own = flat.grad[self._parallel.shards[group.rank]].copy()
        if group.rank != owner:
            size = flat.size if group.rank == witness else 0
            self._grad = _C.empty((size,), "float32", own.device)
        for array in self._batch:
            group.send("the micro-batch to verify", array, owner, range(group.size))
        group.send("the gradient to verify", self._grad, owner, [witness])
        differing = 0
        if group.rank == witness:
            again = self._again()
            differing = int(_C.not_equal(_words(again), _words(self._grad)).astype("int32").sum())
        differing = group.gather("the verification", differing)[witness]
        if differing:
            self._find_wrong(step, index, owner, witness, differing)
        _C.assign(flat.grad[self._parallel.shards[group.rank]], own)
        self._grad = None

    def _again(self) -> NDArray:
        self._compute(*self._batch)
        return self._parallel.flat.grad

    def _find_wrong(self, step: int, index: int, owner: int, witness: int, differing: int) -> None:
        group, flat = self._parallel.group, self._parallel.flat
        first = [_digest(self._grad)] if group.rank == owner else []
        results = [*first, *(_digest(self._again()) for _ in range(2))]
        where = f"{platform.node()}, {flat.grad.device}"
        told = group.gather("the results in dispute", [where, results])
        # Each rank whose two results are equal has a vote.
        votes = Counter(theirs[-1] for _, theirs in told if theirs[-2] == theirs[-1])
        (right, most), *others = votes.most_common() or [(None, 0)]
        if others and others[0][1] == most:
            suspects, right = [owner, witness], None
        else:
            differing_ranks = [r for r, (_, theirs) in enumerate(told) if set(theirs) != {right}]
            suspects = differing_ranks or [witness]  # it was wrong only once
        names = [f"rank {r} ({told[r][0]})" for r in suspects]
        said = (" or " if right is None else ", ").join(names)
        raise WrongDevice(
            f"step {step}: the gradient of micro-batch {index} differs in {differing:,} of "
            f"{flat.size:,} numbers between rank {owner} and rank {witness}: {said} computes "
            "wrong. Nothing of this step is saved. Go on without that device; what was saved "
            f"since step {step - self._every}, where nothing was found, it may have spoiled",
            suspects,
        )


def _words(array: NDArray) -> NDArray:
    """View a flat float32 array as int32: equal means equal bits."""
    return NDArray.make(array.shape, handle=array._handle, dtype="int32")


def _digest(array: NDArray) -> str:
    return hashlib.blake2b(as_bytes(array).numpy().tobytes(), digest_size=16).hexdigest()
