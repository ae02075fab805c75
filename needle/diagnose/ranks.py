"""Collectives of all ranks of a start, each compared with NumPy: an all_gather, an all_reduce as
training makes it, and a step of ring attention. The ranks agree on which of them is wrong.

`examine` runs in a child of each rank; `findings` reads in its parent how that child ended.
"""

from __future__ import annotations

import itertools
import os
import platform
import re
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from needle import _C, ops
from needle.autograd import Tensor
from needle.checkpoint import versions
from needle.diagnose.children import Child, Teller
from needle.diagnose.finding import Finding
from needle.diagnose.walk import TOLERANCE
from needle.distributed import environment
from needle.distributed.control import Control, RankError
from needle.distributed.group import MPI_LAUNCHERS, Group
from needle.distributed.rendezvous import name_ranks
from needle.distributed.tree import tree_sum

DEADLINE = 10.0  # seconds of a collective
PIECE = 1024  # float32 elements of a rank, and some more
RUN, HEADS, DIM = 8, 2, 16  # of ring attention: tokens of a rank's run; it has two
ROWS = 256  # queries that the reference computes at a time
REMEDY = (
    "run `python -m needle.diagnose` on its machine alone; see to its GPU, its links and its "
    "network (docs/many_gpus.md, `When a rank is missing`), or leave it out"
)
# Of each rank the ranks that it finds wrong, by stage: what goes wrong in a stage spoils the next.
Stages = list[list[int]]


def examine(teller: Teller, device: Any, until: float, problem: str) -> None:
    """Meets the other ranks `until` then. `problem`: why this rank's device cannot take part."""
    teller.at("meeting the other ranks")
    place = environment.find()
    if device.is_host and not problem and place.launcher not in MPI_LAUNCHERS:
        teller.note("ranks", f"no collective was tried: ranks on the CPU need mpirun or srun, and "
                    f"{place.launcher} started these")  # fmt: skip
        return
    group, seconds = Group(), max(0.0, until - time.monotonic())
    try:
        group = Group(place, Control.join(place, versions(), None, seconds, DEADLINE))
        if problem:
            group.close(problem)
            return
        told = group.gather("the devices", [platform.node(), str(device)])
        group.connect(device)
        uuids = group.gpus or [""] * place.size
        teller.fact("members", [", ".join(filter(None, [*a, b])) for a, b in zip(told, uuids)])
        for check, (run, stages) in CHECKS.items():
            teller.at(check)
            told = group.gather(check, run(group, device))
            for stage, wrong in zip(stages, zip(*told)):
                if any(wrong):
                    teller.failed("ranks", f"{check}: {in_words(stage, wrong)}", REMEDY)
                    group.close()
                    return
        teller.at("the end of the ranks")
        group.close()
        teller.ok("ranks", f"{', '.join(CHECKS)} of {place.size} ranks agree with NumPy")
    except (RankError, OSError, ValueError) as error:
        teller.failed("ranks", str(error), REMEDY)
        group.close(str(error))


def findings(child: Child) -> list[Finding]:
    """What a child of `examine` found, the devices of the ranks that it names added."""
    found, members = child.findings, child.facts.get("members", [])
    if child.ended == "died":
        words = re.search(r"^needle: (rank \d+, .*)", child.printed(), re.MULTILINE)
        died = child.died()
        if words and child.exit == os.EX_TEMPFAIL:  # the control channel ended it
            died = Finding("failed", child.where, "ranks", words[1], REMEDY)
        found = [*found, died]
    named = []
    for finding in found:
        ranks = sorted({int(n) for n in re.findall(r"\brank (\d+)", finding.text)})
        told = [f"rank {r} is {members[r]}" for r in ranks if r < len(members)]
        text = "; ".join([finding.text, *told]) if finding.has_failed else finding.text
        named.append(Finding(**finding.to_json() | {"text": text}))
    return named


def blamed(wrong: Sequence[list[int]]) -> list[int]:
    """The ranks that most pairs name; wrong[r] are those that rank r finds wrong. Of a pair alone
    the sender."""
    pairs = [(r, other) for r, others in enumerate(wrong) for other in others]
    votes = [
        (sum(rank in pair for pair in pairs), sum(rank == other for _, other in pairs))
        for rank in range(len(wrong))
    ]
    return [rank for rank, count in enumerate(votes) if count == max(votes)]


def in_words(stage: str, wrong: Sequence[list[int]]) -> str:
    said = []
    for rank in blamed(wrong):
        receivers = [r for r, others in enumerate(wrong) if rank in others]
        if stage != "sent":
            said.append(f"rank {rank} {stage} wrong")
        elif receivers:
            said.append(f"what rank {rank} sent is other bytes at {name_ranks(receivers)}")
        else:
            said.append(f"rank {rank} has other bytes than {name_ranks(wrong[rank])} sent")
    return "; ".join(said)


# ---- the checks ----------------------------------------------------------------------------------


def contribution(rank: int, size: int) -> np.ndarray:
    """Of a rank; every rank knows those of all."""
    base = np.random.default_rng(size).standard_normal(size, np.float32)
    return base * np.float32(1 + rank / 7)


def cut(lengths: Sequence[int]) -> list[slice]:
    ends = [0, *itertools.accumulate(lengths)]
    return [slice(begin, end) for begin, end in zip(ends, ends[1:])]


def all_gather(group: Group, device: Any) -> Stages:
    slices = cut([PIECE + rank for rank in range(group.size)])
    parts = [contribution(rank, PIECE + rank) for rank in range(group.size)]
    flat = filled(slices[-1].stop, device)
    _C.assign(flat[slices[group.rank]], _C.array(parts[group.rank], "float32", device))
    group.all_gather("all_gather", flat, slices)
    found = flat.numpy()
    return [[r for r in range(group.size) if differs(found[slices[r]], parts[r])]]


def all_reduce(group: Group, device: Any) -> Stages:
    """Pieces of all ranks are exchanged and added, and the sums are gathered."""
    slices, total = cut([PIECE + rank % 3 for rank in range(group.size)]), 0.0
    size, own = slices[-1].stop, slices[group.rank]
    mine = _C.array(contribution(group.rank, size), "float32", device)
    sends = [None if r == group.rank else mine[piece] for r, piece in enumerate(slices)]
    parts = [filled(own.stop - own.start, device) for _ in range(group.size)]
    receives = [None if r == group.rank else part for r, part in enumerate(parts)]
    group.exchange("all_reduce", sends, receives)
    _C.assign(parts[group.rank], mine[own])
    received = [part.numpy() for part in parts]
    _C.assign(mine[own], tree_sum(parts))
    group.all_gather("all_reduce", mine, slices)
    for rank in range(group.size):
        total = total + contribution(rank, size).astype(np.float64)
    found = mine.numpy()
    off = np.abs(found - total) > TOLERANCE["float32"] * np.abs(total).max()
    return [
        [r for r, x in enumerate(received) if differs(x, contribution(r, size)[own])],
        [group.rank] if off[own].any() or np.isnan(found[own]).any() else [],
        [r for r, piece in enumerate(slices) if not (~off & np.isfinite(found))[piece].all()],
    ]


def ring_attention(group: Group, device: Any) -> Stages:
    """Forward and backward; in 16 bits on a GPU, as in training."""
    dtype = "float32" if device.is_host else "bfloat16"
    length = 2 * RUN * group.size
    random = np.random.default_rng(length)
    drawn = [random.standard_normal((1, length, HEADS, DIM)) for _ in range(4)]
    whole = [_C.array(x, dtype, _C.cpu()).numpy().astype(np.float64) for x in drawn]
    runs = ops.ring_chunks(length, group.rank, group.size)
    own = [np.concatenate([x[:, run] for run in runs], 1) for x in whole]
    *qkv, dout = (Tensor(x, device=device, dtype=dtype) for x in own)
    out = ops.ring_attention(*qkv, group)
    out.backward(dout)
    for found, wanted in zip((out, *(x.grad for x in qkv)), attention(*whole)):
        wanted = np.concatenate([wanted[:, run] for run in runs], 1)
        error = np.abs(found.numpy().astype(np.float64) - wanted).max()
        if not error <= TOLERANCE[dtype] * np.abs(wanted).max():
            return [[group.rank]]
    return [[]]


def attention(q: Any, k: Any, v: Any, dout: Any) -> list[np.ndarray]:
    """Causal attention of (1, T, H, D) in float64: the result, and the gradients of q, k and v."""
    made = [np.zeros_like(q) for _ in range(4)]
    scale, count = q.shape[-1] ** -0.5, q.shape[1]
    for head, begin in itertools.product(range(q.shape[2]), range(0, count, ROWS)):
        rows = slice(begin, begin + ROWS)
        queries, grads = (x[0, rows, head] for x in (q, dout))
        keys, values = (x[0, :, head] for x in (k, v))
        out, dq, dk, dv = (x[0, :, head] for x in made)
        seen = np.arange(count) <= np.arange(count)[rows, None]
        scores = np.where(seen, queries @ keys.T * scale, -np.inf)
        p = np.exp(scores - scores.max(-1, keepdims=True))
        p /= p.sum(-1, keepdims=True)
        dp = grads @ values.T
        ds = p * (dp - (dp * p).sum(-1, keepdims=True)) * scale
        out[rows], dq[rows] = p @ values, ds @ keys
        dk += ds.T @ queries
        dv += p.T @ grads
    return made


def filled(size: int, device: Any) -> Any:
    """Elements that no rank sends."""
    array = _C.empty((size,), "float32", device)
    array.fill(1e30)
    return array


def differs(one: np.ndarray, other: np.ndarray) -> bool:
    return one.tobytes() != other.tobytes()


# The stages of each.
CHECKS: dict[str, tuple[Callable[[Group, Any], Stages], list[str]]] = {
    "all_gather": (all_gather, ["sent"]),
    "all_reduce": (all_reduce, ["sent", "added", "sent"]),
    "ring attention": (ring_attention, ["attended"]),
}
