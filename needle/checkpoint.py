"""Checkpoints: one safetensors file that holds all a run needs to go on as if it had never stopped.

Its metadata: format, checksum, state (JSON text, see below).

Tensors: each parameter and buffer under its own name; each array of the optimizer (moments, and
the float32 master weights of a bfloat16 model) under `optimizer.<name>`. The package `safetensors`
opens it.

state: model (the name it is registered by) and config, both null for a module of no registered
class, frozen (names of parameters that require no gradient), optimizer (class, numbers, and its
form: the names of its parameters in their order, how many of them decay where they are flat, else
null, and whether gradients accumulate in buffers), epoch, loss, random_state (NumPy's
global generator), versions, text_files (of the model's tokenizer, where it has one: name -> text),
and what the caller adds: step, position in the data, schedule. In a file without a module: content
(Checkpoint.content).

checksum: BLAKE2b over the whole file with the checksum's own digits as zeros, so that one changed
bit anywhere is found. Written as temporary file, fsync, rename, fsync of the folder: a name always
leads to a whole file. No pickle is ever loaded, whatever the file is called.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import math
import os
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from needle import _C, models, nn, optim
from needle.autograd import Tensor
from needle.backend_ndarray import DTYPES, Device, NDArray
from needle.data.tokenizer import Tokenizer
from needle.files import named, replacing
from needle.models.checkpoint_file import (
    DIGITS,
    FORMAT,
    OPTIMIZERS,
    Checkpoint,
    CheckpointError,
    checkpoint_path,
    checksum_offset,
    find_checkpoint,
    list_checkpoints,
    names_in,
    newest_checkpoint,
    step_of,
    weights_path,
)
from needle.safetensors import BITS, DTYPE_NAMES, chunks

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "checkpoint_path",
    "find_checkpoint",
    "list_checkpoints",
    "load",
    "load_checkpoint",
    "newest_checkpoint",
    "last_good_checkpoint",
    "prune_checkpoints",
    "save",
    "save_checkpoint",
    "step_of",
    "versions",
    "weights_path",
]

# ---- saving -----------------------------------------------------------------------------------


def save_checkpoint(
    model: nn.Module,
    optimizer: optim.Optimizer | None,
    epoch: int,
    loss: float,
    filepath: str | os.PathLike,
    **extra: Any,
) -> Path:
    """Writes model, with its tokenizer, and optimizer to `filepath`, atomically. `extra` (JSON
    values) is kept and given back by `Checkpoint.state`. Raises CheckpointError where the file
    cannot be written: what was there before is then still there."""
    config = _registered_config(model)
    if config is None:
        raise TypeError(
            "save_checkpoint: model must be of a class that models.register knows, as Pythia is, "
            f"not {type(model).__name__}; needle.save takes any module"
        )
    if wrong := config.misfits(model):
        raise ValueError(
            "save_checkpoint: the model is not what its configuration makes, so that "
            f"load_checkpoint could not make it again: {'; '.join(wrong)}; "
            "needle.save takes any module"
        )
    kind = type(optimizer).__name__
    if optimizer is not None and OPTIMIZERS.get(kind) is not type(optimizer):
        raise TypeError(
            f"save_checkpoint: {kind} is not of needle.optim, so that load_checkpoint "
            "could not make it; save without it (None), and its state_dict() elsewhere"
        )
    return save(model, optimizer, filepath, epoch=int(epoch), loss=float(loss), **extra)


def save(module: Any, optimizer: Any = None, path: Any = None, **extra: Any) -> Path:
    """Writes any module, its parameters and buffers, with its optimizer to `path`, atomically.
    `extra` (JSON values) is kept, see `Checkpoint.state`. CheckpointError where the file cannot be
    written.

    In the place of a module, then before the path alone: a Tensor, an array, or dicts and lists of
    them and of JSON values, `{"model": model.state_dict(), "step": 3}`, which `load(path)` gives
    back.

    >>> model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))
    >>> optimizer = optim.Adam(model.parameters())
    >>> path = ndl.save(model, optimizer, folder / "model.safetensors")
    >>> _ = ndl.load(path, model, optimizer)
    >>> path = ndl.save(model.state_dict(), folder / "state.safetensors")
    >>> model.load_state_dict(ndl.load(path))
    """
    if path is None:
        optimizer, path = None, optimizer
    is_module = isinstance(module, nn.Module)
    if not (isinstance(path, (str, os.PathLike)) and (is_module or optimizer is None)):
        raise TypeError("save: takes a module, perhaps its optimizer, or arrays, and then a path")
    path = named(path)
    tensors: dict[str, NDArray] = {}
    about = {"model": None, "config": None, "frozen": [], "optimizer": None}
    taken = {*about, "random_state", "versions", "text_files", "content"} & {*extra}
    if taken:
        raise ValueError(f"save: {min(taken)}: in a file that entry is needle's; rename it")
    if is_module:
        about = _state_of(module, optimizer, tensors)
    else:
        extra["content"] = _packed(module, "", tensors)
    kind, keys, position, has_gauss, gauss = np.random.get_state()
    state = {
        **about,
        "epoch": 0,
        "loss": math.nan,
        "random_state": [kind, keys.tolist(), int(position), int(has_gauss), float(gauss)],
        "versions": versions(),
        **extra,
    }
    if files := getattr(module, "text_files", Tokenizer({})).files:
        state["text_files"] = files
    with replacing(path) as file:
        _write(file, tensors, state)
    return path


def _state_of(
    module: nn.Module, optimizer: optim.Optimizer | None, tensors: dict[str, NDArray]
) -> dict[str, Any]:
    """Return what a file says of a module and its optimizer; add their arrays to `tensors`."""
    config = _registered_config(module)
    if config is not None and config.misfits(module):
        config = None  # load fills such a module, and makes none
    tensors |= module.state_dict()
    reserved = [name for name in tensors if name.startswith("optimizer.")]
    if reserved:
        raise ValueError(f"save: {reserved[0]}: in a file that name is the optimizer's; rename it")
    saved = None
    if optimizer is not None:
        names = names_in(module, optimizer, "save")
        saved = {
            "class": type(optimizer).__name__,
            **optim.renamed(optimizer.state_dict(), names),
            "names": [*names.values()],
            "decayed": None if optimizer.flat is None else optimizer.flat.decayed,
            "accumulating": [n for n, p in module.named_parameters() if p.has_grad_buffer],
        }
        tensors |= {f"optimizer.{name}": array for name, array in saved.pop("arrays").items()}
    return {
        "model": None if config is None else config.family,
        "config": None if config is None else config.to_dict(),
        "frozen": [name for name, p in module.named_parameters() if not p.requires_grad],
        "optimizer": saved,
    }


def _packed(value: Any, name: str, tensors: dict[str, NDArray]) -> Any:
    """Return `value` with {"needle.Tensor": its name}, or needle.NDArray, for an array, which is
    added to `tensors`."""
    if isinstance(value, np.ndarray) and value.dtype.name in DTYPES:
        value = _C.array(value, value.dtype.name)
    if isinstance(value, (NDArray, Tensor)):
        while name in ("", "__metadata__") or name in tensors:
            name += "_"
        tensors[name] = value.cached_data if isinstance(value, Tensor) else value
        return {"needle.Tensor" if isinstance(value, Tensor) else "needle.NDArray": name}
    below = f"{name}." if name else ""
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str):
                raise TypeError(f"save: {name or 'it'} has the key {key!r}: keys must be texts")
        return {key: _packed(item, f"{below}{key}", tensors) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_packed(item, f"{below}{i}", tensors) for i, item in enumerate(value)]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(
        f"save: {name or 'it'} is a {type(value).__name__}: save numbers, texts, Tensors, arrays "
        "of needle's dtypes, or what its state_dict() gives"
    )


def _registered_config(module: nn.Module) -> models.Config | None:
    """Return the config by which load makes such a module again; None if it is not registered."""
    config = getattr(module, "config", None)
    known = isinstance(config, models.Config) and isinstance(module, config.model_class)
    return config if known else None


def versions() -> dict[str, str]:
    """The versions that a run was made with."""
    return {
        "needle": _C.build_info()["version"],
        "numpy": np.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
    }


def _write(file: BinaryIO, tensors: dict[str, NDArray], state: dict) -> None:
    # Wide types first, so that each tensor is aligned to its own size.
    names = sorted(tensors, key=lambda n: (-BITS[DTYPE_NAMES[tensors[n].dtype]].itemsize, n))
    metadata = {"format": FORMAT, "checksum": "0" * DIGITS, "state": json.dumps(state)}
    rest = chunks({name: tensors[name] for name in names}, metadata)
    head = next(rest)
    digest = hashlib.blake2b(digest_size=DIGITS // 2)
    for chunk in itertools.chain([head], rest):
        digest.update(chunk)
        file.write(chunk)
    file.seek(checksum_offset(head))
    file.write(digest.hexdigest().encode())


# ---- loading ----------------------------------------------------------------------------------


def load_checkpoint(
    filepath: str | os.PathLike, device: Device | None = None
) -> tuple[Any, optim.Optimizer | None, int, float]:
    """(model, optimizer, epoch, loss) from a file of save_checkpoint, or the newest whole one of a
    run's folder, on any device; `model.tokenizer` is as it was saved. Raises CheckpointError that
    names the file and the problem, a FileNotFoundError where there is none; nothing is half loaded.

    >>> from needle.models import Pythia, PythiaConfig
    >>> config = PythiaConfig(vocab_size=16, hidden_size=8, num_layers=1, num_heads=1)
    >>> model = Pythia(config)
    >>> optimizer = optim.AdamW(model.parameters())
    >>> path = ndl.save_checkpoint(model, optimizer, 3, 2.5, folder / "model.safetensors")
    >>> model, optimizer, epoch, loss = ndl.load_checkpoint(path)
    >>> epoch, loss
    (3, 2.5)
    """
    return find_checkpoint(filepath).restore(device)


def load(
    path: str | os.PathLike,
    module: nn.Module | None = None,
    optimizer: optim.Optimizer | None = None,
    device: Device | None = None,
) -> Any:
    """(module, optimizer) from a file of `save` or `save_checkpoint`, or the newest whole
    checkpoint of a run's folder; of a dict of arrays, or other content of `save`, the same again.

    Values go into the module that is given, and into its optimizer where one is. Without a module
    both are made, on `device`, from what the file says, where the module's class is registered.
    Raises CheckpointError that names the file and lists what does not fit; nothing is half loaded.

    >>> model = nn.Linear(3, 4)
    >>> path = ndl.save(model, None, folder / "model.safetensors")
    >>> again, _ = ndl.load(path, nn.Linear(3, 4))
    >>> bool((again.weight == model.weight).numpy().all())
    True
    """
    checkpoint = find_checkpoint(path)
    if module is None and "content" in checkpoint.state:
        return checkpoint.content(device)
    if module is None:
        if optimizer is not None:
            raise TypeError("load: an optimizer is restored beside its module: give both")
        return checkpoint.restore(device)[:2]
    if device is not None:
        raise TypeError("load: device is for a module that is made: the given one has its own")
    checkpoint.restore_into(module, optimizer)
    return module, optimizer


# ---- the folder of a run ----------------------------------------------------------------------


def last_good_checkpoint(folder: str | os.PathLike, finite: int, following: int) -> Path | None:
    """The newest whole checkpoint after which `following` steps or more had finite losses, where
    the steps up to `finite` had. The loss of a checkpoint's own step does not show it: weights that
    have diverged are seen in the steps after."""
    for path in list_checkpoints(folder):
        if step_of(path) + following <= finite:
            with contextlib.suppress(CheckpointError):
                Checkpoint(path)
                return path
    return None


def prune_checkpoints(
    folder: str | os.PathLike,
    written: int,
    keep: int = 2,
    forever: Callable[[int], bool] = lambda step: False,
    following: int = 1,
) -> None:
    """Delete, of the steps up to `written`, which has just been saved, all that are older than the
    `keep` newest, except: those that are to stay `forever`, the newest after which `following`
    finite steps came (see last_good_checkpoint), and the one that comes to it next. Later steps
    stay: they are of a training that went back to an older step. No file is read."""
    steps = {path: step_of(path) for path in list_checkpoints(folder)}
    found = [path for path, step in steps.items() if step <= written and not forever(step)]
    unsure = sum(steps[path] + following > written for path in found)
    stay = {*found[:keep], *found[max(unsure - 1, 0) : unsure + 1]}
    for path in found:
        if path not in stay:
            path.unlink(missing_ok=True)
