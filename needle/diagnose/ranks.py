"""Collectives of all ranks of a launch, each compared with NumPy: an all_gather, an all_reduce as
training makes it, and a step of ring attention. The ranks agree on which of them is wrong.

`examine` runs in a process of each rank; `findings` reads in its parent how it ended.
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
from needle.diagnose.examination import Examination, Reporter
from needle.diagnose.finding import Finding
from needle.distributed import environment
from needle.distributed.control import Control, RankError
from needle.distributed.group import MPI_LAUNCHERS, Group
from needle.distributed.rendezvous import name_ranks
from needle.distributed.tree import tree_sum
from needle.testing.attention import attention_gradients, pair_products, softmax_attention, visible

DEADLINE = 10.0  # seconds of a collective
SHARD = 1024  # float32 elements of a rank's shard, at least
RUN, HEADS, DIM = 8, 2, 16  # of ring attention: tokens of a rank's run; it has two
# The largest error by the largest number: that of a wrong kernel or of wrong bytes is larger.
TOLERANCE = {"float32": 2e-4, "bfloat16": 2**-4}
REMEDY = (
    "run `needle diagnose` on its machine alone; see to its GPU, its links and its "
    "network (docs/many_gpus.md, `When a rank is missing`), or leave it out"
)
# For each rank the ranks that it finds wrong, by stage: an error in a stage spoils the next.
Stages = list[list[int]]


def examine(reporter: Reporter, kind: str, index: int, until: float, problem: str) -> None:
    """Make the collectives with the other ranks. until: the moment at which all must have come.
    problem: why this rank's device cannot take part."""
    device = getattr(_C, kind)(index)
    reporter.at("meeting the other ranks")
    place = environment.find()
    if device.is_host and not problem and place.launcher not in MPI_LAUNCHERS:
        text = f"ranks on the CPU need mpirun or srun, and {place.launcher} started these"
        reporter.note("ranks", f"no collective was tried: {text}")
        return
    group, seconds = Group(), max(0.0, until - time.monotonic())
    try:
        group = Group(place, Control.join(place, versions(), None, seconds, DEADLINE))
        if problem:
            group.close(problem)
            return
        uuid = [] if device.is_host else [device.properties()["uuid"]]
        member = ", ".join([platform.node(), str(device), *uuid])
        reporter.fact("members", group.gather("the devices", member))
        group.connect(device)
        for check, (run, stages) in CHECKS.items():
            reporter.at(check)
            told = group.gather(check, run(group, device))
            for stage, wrong in zip(stages, zip(*told)):
                if any(wrong):
                    reporter.failed("ranks", f"{check}: {in_words(stage, wrong)}", REMEDY)
                    group.close()
                    return
        reporter.at("the end of the ranks")
        group.close()
        reporter.ok("ranks", f"{', '.join(CHECKS)} of {place.size} ranks agree with NumPy")
    except (RankError, OSError, ValueError) as error:
        reporter.failed("ranks", str(error), REMEDY)
        group.close(str(error))


def findings(examination: Examination) -> list[Finding]:
    """The findings of an examination that has ended, and the device of each rank in them."""
    found, members = examination.findings, examination.facts.get("members", [])
    if examination.ended == "crashed":
        words = re.search(r"^needle: (rank \d+, .*)", examination.printed(), re.MULTILINE)
        crash = examination.crash()
        if words and examination.poll() == os.EX_TEMPFAIL:  # the control channel ended it
            crash = Finding("failed", examination.subject, "ranks", words[1], REMEDY)
        found = [*found, crash]
    named = []
    for finding in found:
        ranks = sorted({int(n) for n in re.findall(r"\brank (\d+)", finding.text)})
        told = [f"rank {r} is {members[r]}" for r in ranks if r < len(members)]
        text = "; ".join([finding.text, *told]) if finding.has_failed else finding.text
        named.append(Finding(**finding.to_json() | {"text": text}))
    return named


def blamed(wrong: Sequence[list[int]]) -> list[int]:
    """The ranks that most pairs name, of one pair alone the sender. wrong[r]: the ranks that rank r
    finds wrong."""
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
    """The numbers of a rank, which every rank can compute."""
    base = np.random.default_rng(size).standard_normal(size, np.float32)
    return base * np.float32(1 + rank / 7)


def cut(lengths: Sequence[int]) -> list[slice]:
    ends = [0, *itertools.accumulate(lengths)]
    return [slice(begin, end) for begin, end in zip(ends, ends[1:])]


def all_gather(group: Group, device: Any) -> Stages:
    slices = cut([SHARD + rank for rank in range(group.size)])
    parts = [contribution(rank, SHARD + rank) for rank in range(group.size)]
    flat = filled(slices[-1].stop, device)
    _C.assign(flat[slices[group.rank]], _C.array(parts[group.rank], "float32", device))
    group.all_gather("all_gather", flat, slices)
    found = flat.numpy()
    return [[r for r in range(group.size) if differs(found[slices[r]], parts[r])]]


def all_reduce(group: Group, device: Any) -> Stages:
    """Exchange the shards of all ranks, add them, gather the sums."""
    slices, total = cut([SHARD + rank % 3 for rank in range(group.size)]), 0.0
    size, own = slices[-1].stop, slices[group.rank]
    mine = _C.array(contribution(group.rank, size), "float32", device)
    sends = [None if r == group.rank else mine[shard] for r, shard in enumerate(slices)]
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
        [r for r, shard in enumerate(slices) if not (~off & np.isfinite(found))[shard].all()],
    ]


def ring_attention(group: Group, device: Any) -> Stages:
    """Forward and backward; in 16 bits on a GPU, as in training. A rank computes its own rows of
    the result and of dq; dk and dv are sums over ranks."""
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
    stages: Stages = []
    for found, wanted in zip((out, *(x.grad for x in qkv)), attention(*whole)):
        wanted = np.concatenate([wanted[:, run] for run in runs], 1)
        error = np.abs(found.numpy().astype(np.float64) - wanted).max()
        is_right = error <= TOLERANCE[dtype] * np.abs(wanted).max()
        stages.append([] if is_right else [group.rank])
    return stages


def attention(q: Any, k: Any, v: Any, dout: Any) -> list[np.ndarray]:
    """Causal attention of (1, T, H, D) in float64: the result, and the gradients of q, k and v."""
    scale, see = q.shape[-1] ** -0.5, visible(q.shape[1], k.shape[1], True)
    found = softmax_attention(lambda x: x, q, k, v, scale, see)
    scores = np.where(see, scale * pair_products(q, k), -np.inf)
    p = np.exp(scores - found["lse"][..., None])
    return [found["o"], *attention_gradients(p, q, k, v, dout, scale)]


def filled(size: int, device: Any) -> Any:
    """An array of numbers that no rank sends."""
    array = _C.empty((size,), "float32", device)
    array.fill(1e30)
    return array


def differs(one: np.ndarray, other: np.ndarray) -> bool:
    return one.tobytes() != other.tobytes()


# The stages of each.
CHECKS: dict[str, tuple[Callable[[Group, Any], Stages], list[str]]] = {
    "all_gather": (all_gather, ["sent"]),
    "all_reduce": (all_reduce, ["sent", "added", "sent"]),
    "ring attention": (ring_attention, ["attended", "computed dq", "summed dk", "summed dv"]),
}
