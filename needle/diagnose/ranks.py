"""Collectives of all ranks of a launch, over the transport of a run, each compared with NumPy."""

from __future__ import annotations

import platform

import numpy as np

from needle import _C
from needle._C import Device
from needle.checkpoint import versions
from needle.diagnose.parts import failed, show, trying
from needle.distributed import environment
from needle.distributed.control import Control
from needle.distributed.data_parallel import shards
from needle.distributed.group import Group
from needle.distributed.tree import tree_sum

DEADLINE = 20.0  # seconds of a collective
PART = 24_581  # elements for each rank, whose shards have different lengths
REMEDY = (
    "run `needle diagnose` on the machine of each; see to its GPU, links and network "
    "(docs/many_gpus.md, `When a rank is missing`)"
)


def examine() -> None:
    place, group = environment.find(), Group()
    trying("meeting the other ranks")
    try:
        group = Group(place, Control.join(place, versions(), deadline=DEADLINE))
        device = group.device("auto")
        member = [platform.node(), str(device), device.properties()["uuid"]]
        for rank, words in enumerate(group.gather("the devices", member)):
            if group.rank == 0:
                show(f"rank {rank}", ", ".join(filter(None, words)))
        group.connect(device)
        cuts = shards(PART * group.size, group.size)
        for check in (all_gather, reduce_scatter):
            name = check.__name__
            trying(name)
            problems = list(filter(None, group.gather(name, check(group, device, cuts))))
            for problem in problems:
                failed("ranks", f"{name}: {problem}", REMEDY)
            if not problems:
                show("ranks", f"ok: {name} of {group.size} ranks agrees with NumPy")
        group.close()
    except Exception as error:
        group.close(str(error))  # the others print it too
        raise


# ---- the checks: what is wrong at this rank, empty for nothing ----------------------------------


def numbers(rank: int, size: int) -> np.ndarray:
    """The numbers of a rank, which every rank can compute."""
    return np.random.default_rng([rank, size]).standard_normal(size, np.float32)


def all_gather(group: Group, device: Device, cuts: list[slice]) -> str:
    size, own = cuts[-1].stop, cuts[group.rank]
    flat = _C.empty((size,), "float32", device)
    flat.fill(1e30)
    _C.assign(flat[own], _C.array(numbers(group.rank, size)[own], "float32", device))
    group.all_gather("all_gather", flat, [[cut] for cut in cuts])
    found = flat.numpy()
    for rank, cut in enumerate(cuts):
        if found[cut].tobytes() != numbers(rank, size)[cut].tobytes():
            return f"rank {group.rank} has other numbers than rank {rank} sent"
    return ""


def reduce_scatter(group: Group, device: Device, cuts: list[slice]) -> str:
    """As training adds gradients: each rank gets its shard of the array of each, and adds them."""
    size, own = cuts[-1].stop, cuts[group.rank]
    mine = _C.array(numbers(group.rank, size), "float32", device)
    parts = [mine[own].copy() for _ in cuts]
    sends = [(rank, mine[cuts[rank]]) for rank in group.others]
    group.exchange("reduce_scatter", sends, [(rank, parts[rank]) for rank in group.others])
    wanted = sum(numbers(rank, size)[own].astype(np.float64) for rank in range(group.size))
    off = np.abs(tree_sum(parts).numpy() - wanted).max()
    return "" if off <= 1e-5 * np.abs(wanted).max() else f"the sum of rank {group.rank} is wrong"
