"""The ranks of a run: starting (--gpus) and joining them, devices, shares of a batch, agreement.

A single process uses the same code with world size 1.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from needle._C import Device, cuda
from needle.checkpoint import versions
from needle.data import Batches, DataError, TokenData, run_batches
from needle.distributed.control import Control
from needle.distributed.environment import Place
from needle.distributed.group import Group, Ranks, visible_gpus
from needle.distributed.tree import own_micro_batches
from needle.files import described
from needle.ops import ring_chunks
from needle.processes import HEARTBEAT
from needle.training.heartbeat import beat, rest
from needle.training.settings import Settings, data_of


def starts_ranks(settings: Settings, place: Place | None) -> bool:
    """True if --gpus makes this process the one that starts the ranks. Raise ValueError if so many
    cannot be started here."""
    count = settings.gpus
    if count is None or (place is not None and place.launcher == "needle"):
        return False
    if place is not None:
        raise ValueError(
            f"--gpus {count}: {place.launcher} has started this process as rank {place.rank} of "
            f"{place.size}: leave --gpus out, and let {place.launcher} start a rank for each GPU"
        )
    if settings.device not in ("auto", "cuda"):
        raise ValueError(
            f"--gpus {count}: with --device {settings.device} there is nothing to share: leave one "
            "of them out (CUDA_VISIBLE_DEVICES chooses among GPUs)"
        )
    visible = visible_gpus()
    if count > visible:
        reason = "" if visible else f" ({cuda().reason()})"
        raise ValueError(
            f"--gpus {count}: {visible} can be used here{reason}: give a smaller number, or look "
            "at nvidia-smi and CUDA_VISIBLE_DEVICES"
        )
    return count > 1


def join(settings: Settings, argv: list[str], place: Place | None, program: Path) -> Group:
    """Join the ranks that were started together, once their flags, sources and versions agree.

    Rank 0 alone prints, and alone tells the supervisor. program: the file that runs.
    """
    if place is None or place.size == 1:
        return Group()
    if settings.supervise and place.launcher != "needle":
        raise ValueError(
            "--supervise: each rank would have a supervisor of its own: start all under one, "
            f"needle supervise -- {place.launcher} ..."
        )
    if place.rank > 0:
        os.environ.pop(HEARTBEAT, None)
        sys.stdout = open(os.devnull, "w")
    facts = {"flags": shlex.join(argv), "source": source_digest(program), **versions()}
    return Group(place, Control.join(place, facts))


def source_digest(program: Path) -> str:
    """Hash the program, the package and its core: ranks of other sources may compute other bits."""
    package = Path(__file__).resolve().parent.parent
    files = sorted(path for path in package.rglob("*") if path.suffix in (".py", ".so"))
    digest = hashlib.blake2b(digest_size=8)
    for path in [program, *files]:
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


def open_device(name: str, ranks: Group) -> Device:
    """Open the device of --device, or this rank's own if there are several, and connect the ranks.

    The supervisor's limit for hangs applies until this returns, then not again until the loop
    begins, since reading data may take long.
    """
    beat(0)
    device = ranks.device(name)
    ranks.connect(device)
    used, visible = ranks.place.local_size, 0 if device.is_host else visible_gpus()
    if used < visible and ranks.rank == 0:
        more = f": --gpus {visible} uses all" if ranks.place.launcher in ("", "needle") else ""
        print(f"{visible} GPUs are visible, {used} {'is' if used == 1 else 'are'} used{more}")
    rest()
    return device


def own_batches(ranks: Group, settings: Settings, data: TokenData, vocab_size: int) -> Batches:
    """Return this rank's share of each step's micro-batches."""
    context, every = settings.context_parallel, settings.grad_accum
    batches = run_batches(data, data_of(settings), vocab_size)
    own = own_micro_batches(every, ranks.rank // context, ranks.size // context)
    batches.share(own, every, own_columns(batches.seq_len, ranks, context))
    return batches


def own_columns(length: int, ranks: Ranks, context: int) -> np.ndarray | None:
    """Return the columns of this rank in a sequence that `context` ranks share; None: all."""
    if context == 1:
        return None
    runs = ring_chunks(length, ranks.rank % context, context)
    return np.concatenate([np.arange(run.start, run.stop) for run in runs])


# ---- agreement -----------------------------------------------------------------------------------


class Failed(Exception):
    """An error for which all ranks have agreed to stop, after the same step."""


def agree(
    ranks: Group, name: str, failure: Exception | None, reason: str | None = None
) -> tuple[str | None, Failed | None]:
    """Return the reason to stop and the failure of the first rank that has one, on all ranks."""
    told = ranks.gather(name, [reason, failure and described(failure)])
    reasons = [theirs for theirs, _ in told if theirs is not None]
    whose = [f"rank {rank}: " if ranks.size > 1 else "" for rank in range(ranks.size)]
    failures = [who + theirs for who, (_, theirs) in zip(whose, told) if theirs is not None]
    return reasons[0] if reasons else None, Failed(failures[0]) if failures else None


@contextlib.contextmanager
def agreed(ranks: Group, name: str) -> Iterator[None]:
    """Run the block on all ranks; if it fails to read or write on one, raise Failed on all."""
    failure = None
    try:
        yield
    except (DataError, OSError) as error:
        failure = error
    _, failed = agree(ranks, name, failure)
    if failed is not None:
        raise failed from failure
