"""The ranks of a run of train_pythia.py: --gpus starts them, each joins the others and takes its
device."""

from __future__ import annotations

import argparse
import hashlib
import os
import shlex
import sys
from pathlib import Path

import needle as ndl
from needle.checkpoint import versions
from needle.distributed.control import Control
from needle.distributed.environment import Place
from needle.distributed.group import Group, visible_gpus
from needle.distributed.tree import fitting_ranks
from needle.heartbeat import PIPE, beat, supervised


def starts_ranks(args: argparse.Namespace, place: Place | None) -> bool:
    """Whether --gpus makes this process the one that starts the ranks. ValueError where that cannot
    be."""
    count = args.gpus
    if count is None or (place is not None and place.launcher == "needle"):
        return False
    if place is not None:
        raise ValueError(
            f"--gpus {count}: {place.launcher} has started this process as rank {place.rank} of "
            f"{place.size}: leave --gpus out, and let {place.launcher} start a rank for each GPU"
        )
    if args.device not in ("auto", "cuda"):
        raise ValueError(
            f"--gpus {count}: with --device {args.device} there is nothing to share: leave one of "
            "them out (CUDA_VISIBLE_DEVICES chooses among GPUs)"
        )
    visible = visible_gpus()
    if count > visible:
        reason = "" if visible else f" ({ndl.cuda().reason()})"
        raise ValueError(
            f"--gpus {count}: {visible} can be used here{reason}: give a smaller number, or look "
            "at nvidia-smi and CUDA_VISIBLE_DEVICES"
        )
    return count > 1


def join(args: argparse.Namespace, argv: list[str], place: Place | None) -> Group:
    """The ranks that somebody started together, once they agree on what to do with what. Rank 0 is
    the one that prints, and that a supervisor hears."""
    if place is None or place.size == 1:
        return Group()
    if args.supervise and place.launcher != "needle":
        raise ValueError(
            "--supervise: each rank would have a supervisor of its own: start all under one, "
            f"python -m needle.supervise -- {place.launcher} ..."
        )
    if place.rank > 0:
        if supervised():
            os.environ[PIPE] = os.devnull
        sys.stdout = open(os.devnull, "w")
    facts = {"flags": shlex.join(argv), "source": source_digest(), **versions()}
    return Group(place, Control.join(place, facts, Path(args.out)))


def source_digest() -> str:
    """Of the program, the package and its core: ranks that differ in them may differ in bits."""
    folders = [Path(__file__).parent, Path(ndl.__file__).parent]
    files = sorted(p for f in folders for p in f.rglob("*") if p.suffix in (".py", ".so"))
    digest = hashlib.blake2b(digest_size=8)
    for path in files:
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


def open_device(name: str, ranks: Group) -> ndl.Device:
    """The supervisor watches while it opens; then data may be read for any time. Of several ranks
    it is told no device, and so proves every GPU before it starts them again, until it knows theirs
    (`tell_gpus`)."""
    beat()
    device = ranks.device(name)
    ranks.connect(device)
    used, visible = ranks.local_size, 0 if device.is_host else visible_gpus()
    if used < visible and ranks.rank == 0:
        more = f": --gpus {visible} uses all" if ranks.launcher in (None, "needle") else ""
        print(f"{visible} GPUs are visible, {used} {'is' if used == 1 else 'are'} used{more}")
    told = "cpu" if device.is_host else f"{device.name}:{device.index}"
    beat(watched=False, **({"device": told} if device.is_host or ranks.size == 1 else {}))
    return device


def tell_gpus(ranks: Group, settings: dict, verifies: bool) -> None:
    """The supervisor may go on with fewer of them. It is told the step's size too: a run that has
    no checkpoint yet begins anew, and must not take another from its number of ranks."""
    if ranks.launcher != "needle" or not ranks.gpus:
        return
    context, words = settings["context_parallel"], {}
    for count in fitting_ranks(settings["grad_accum"]):
        flags = {"gpus": count * context} | {k: settings[k] for k in ("batch_size", "grad_accum")}
        if verifies and count * context == 1:
            flags["verify"] = 0  # nobody else could compute a micro-batch again
        pairs = [(f"--{name.replace('_', '-')}", str(value)) for name, value in flags.items()]
        words[str(count * context)] = [word for pair in pairs for word in pair]
    beat(watched=False, gpus=ranks.gpus, ranks=words)
