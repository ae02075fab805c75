"""The state of a run in a checkpoint: which run it is of, and whether a run can resume from it."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from needle import models
from needle.backend_ndarray import as_bytes
from needle.checkpoint import Checkpoint, CheckpointError
from needle.data import TokenData
from needle.nn import FlatParameters
from needle.training.folder import read_description
from needle.training.settings import OTHERS, RESULTS, described_config


def id_of(settings: dict, data: TokenData, flat: FlatParameters) -> str:
    """Return the id of a new run. Runs of equal settings, data and first weights write equal
    checkpoints and have equal ids; a checkpoint of another id is of another run."""
    known = json.dumps([settings, data.fingerprint], sort_keys=True).encode()
    found = hashlib.blake2b(known, digest_size=8)
    if settings["init"] is not None:
        found.update(as_bytes(flat.data).numpy())
    return found.hexdigest()


class Begun:
    """A run that has saved nothing, by its config.json, in the place of a Checkpoint of step 0."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "config.json"
        state = read_description(folder)
        data = state["data"] if isinstance(state.get("data"), dict) else {}
        state |= {"run": state.get("id"), "fingerprint": data.get("fingerprint")}
        self.state = state | {"step": 0, "data": {"epoch": 0, "batch": 0}}

    def configuration(self) -> models.Config:
        return described_config(self.path)


def check(checkpoint: Checkpoint | Begun) -> None:
    """Raise CheckpointError for the state of another program, which no run can resume."""
    state = checkpoint.state
    kinds = {"settings": dict, "step": int, "data": dict, "fingerprint": str}
    kinds |= {"optimizer": dict, "run": str}
    missing = [key for key, kind in kinds.items() if not isinstance(state.get(key), kind)]
    if not missing:
        settings, data = state["settings"], state["data"]
        missing = [f"settings of {key}" for key in RESULTS + OTHERS if key not in settings]
        missing += [f"{k} of its data" for k in ("epoch", "batch") if type(data.get(k)) is not int]
    if missing:
        raise CheckpointError(
            f"{checkpoint.path}: not of a run of needle train: it has no {', '.join(missing)}"
        )


# The environment chooses kernels by these, as cuda/backend.cu and cuda/matmul.cu read them.
GPU_KERNELS = {
    "NEEDLE_ARCH": bool,
    "NEEDLE_ALGORITHM": lambda word: True,
    "NEEDLE_TF32": lambda word: word == "1",
}


def products_of(model: Any) -> str:
    """Return the facts that decide the bits of products: the library, its table, the kind of GPU
    by which the table is read, variables of the environment, and the parts in FP8."""
    properties = model.device.properties()
    facts = [properties["products"]]
    if not model.device.is_host:
        facts[0] += f" on {properties['name']}"
        given = [(name, os.environ[name]) for name in GPU_KERNELS if name in os.environ]
        facts += [f"{name}={word}" for name, word in given if GPU_KERNELS[name](word)]
    if model.fp8:
        facts.append(products_in_fp8(model))
    return ", ".join(facts)


def products_in_fp8(model: Any) -> str:
    """Name the parts of a model whose products are in FP8, and the formats of operands."""
    return f"products of {model.parts_in_fp8} in FP8 (operands e4m3, gradients e5m2)"
