"""What a checkpoint must hold for a run of train_pythia.py to go on from it."""

from __future__ import annotations

import hashlib
import json
import os

import train_flags

import needle as ndl
from needle.backend_ndarray import as_bytes
from needle.checkpoint import Checkpoint, CheckpointError
from needle.data import TokenData
from needle.nn import FlatParameters


def id_of(settings: dict, data: TokenData, flat: FlatParameters) -> str:
    """The id of a new run: equal for runs of equal settings, data and first weights. These write
    equal checkpoints; a checkpoint of another id is of another run."""
    known = json.dumps([settings, data.fingerprint], sort_keys=True).encode()
    found = hashlib.blake2b(known, digest_size=8)
    if settings["init"] is not None:
        found.update(as_bytes(flat.data).numpy())
    return found.hexdigest()


def check(checkpoint: Checkpoint) -> None:
    """CheckpointError for the file of another program, and for values that no run could have."""
    state = checkpoint.state
    kinds = {"settings": dict, "step": int, "data": dict, "fingerprint": str}
    kinds |= {"optimizer": dict, "run": str}
    missing = [key for key, kind in kinds.items() if not isinstance(state.get(key), kind)]
    if not missing:
        known = {**train_flags.COMMON, **state["settings"]}
        flags = train_flags.RESULT_FLAGS + train_flags.OTHER_FLAGS
        missing = [f"settings of {key}" for key in flags if key not in known]
        missing += [
            f"{key} of its data"
            for key in ("epoch", "batch")
            if type(state["data"].get(key)) is not int
        ]
    if missing:
        raise CheckpointError(
            f"{checkpoint.path}: not the checkpoint of a run of train_pythia.py: "
            f"it has no {', '.join(missing)}"
        )
    wrong = train_flags.misfits(known)
    if not wrong:
        steps, epoch = known["steps"], state["data"]["epoch"]
        if not 0 <= state["step"] <= steps:
            wrong.append(f"step is {state['step']}: the run has {steps}")
        if not 0 <= epoch <= steps * known["grad_accum"]:
            wrong.append(f"epoch of its data is {epoch}: the run draws fewer batches")
    if state["optimizer"].get("class") != "AdamW":
        wrong.append(f"optimizer is {state['optimizer'].get('class')!r:.40}: runs have AdamW")
    if wrong:
        raise CheckpointError(f"{checkpoint.path}: its settings cannot be used: {', '.join(wrong)}")


GPU_KERNELS = "NEEDLE_ARCH", "NEEDLE_PLAN", "NEEDLE_TF32"  # by these the environment chooses them


def products_of(device: ndl.Device) -> str:
    """What decides their bits: library, table, and the kind of GPU, by which the table is read,
    with what the environment says otherwise."""
    properties = device.properties()
    if device.is_host:
        return properties["products"]
    given = [(name, os.environ[name]) for name in GPU_KERNELS if name in os.environ]
    # As cuda/backend.cu and cuda/matmul.cu read them.
    heeded = {"NEEDLE_ARCH": bool, "NEEDLE_PLAN": lambda word: True, "NEEDLE_TF32": "1".__eq__}
    asked = (f", {name}={word}" for name, word in given if heeded[name](word))
    return f"{properties['products']} on {properties['name']}{''.join(asked)}"
