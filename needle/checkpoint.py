"""Checkpoints: one safetensors file that holds all a run needs to go on as if it had never stopped.

Its metadata: format, checksum, state (JSON text, see below).

Tensors: each parameter and buffer under its own name; each array of the optimizer (moments, and
the float32 master weights of a bfloat16 model) under `optimizer.<name>`. The package `safetensors`
opens it.

state: model (the name it is registered by) and config, both null for a module of no registered
class, frozen (names of parameters that require no gradient), optimizer (class, numbers, and its
form: the names of its parameters in their order, how many of them decay where they are flat, else
null, and whether gradients accumulate in buffers), epoch, loss, random_state (NumPy's
global generator), versions, and what the caller adds: step, position in the data, schedule.

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
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from needle import _C, models, nn, optim
from needle.backend_ndarray import Device, NDArray, commit, default_device, given_device
from needle.files import FileError, named, reading, replacing
from needle.safetensors import FROM_FILE, TO_FILE, Entry, chunks, read_header

FORMAT = "needle checkpoint"
DIGITS = 32  # of the checksum, in hexadecimal
CHUNK = 1 << 24  # bytes read at a time
# What each state has, whatever a caller adds.
MAYBE = (dict, type(None))  # of a module that is not registered, and of no optimizer
STATE = {"config": MAYBE, "frozen": list, "optimizer": MAYBE, "epoch": int, "loss": (int, float)}
OPTIMIZERS = {kind.__name__: kind for kind in (optim.Adam, optim.AdamW, optim.SGD)}
CheckpointError = FileError  # a checkpoint, or a folder of transformers, that cannot be used


# ---- saving -----------------------------------------------------------------------------------


def save_checkpoint(
    model: nn.Module,
    optimizer: optim.Optimizer | None,
    epoch: int,
    loss: float,
    filepath: str | os.PathLike,
    **extra: Any,
) -> Path:
    """Writes model and optimizer to `filepath`, atomically. `extra` (JSON values) is kept and given
    back by `Checkpoint.state`. Raises CheckpointError where the file cannot be written: what was
    there before is then still there."""
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


def save(
    module: nn.Module, optimizer: optim.Optimizer | None, path: str | os.PathLike, **extra: Any
) -> Path:
    """Writes any module, its parameters and buffers, with its optimizer to `path`, atomically.
    `extra` (JSON values) is kept, see `Checkpoint.state`. CheckpointError where the file cannot be
    written.

    >>> model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))
    >>> optimizer = optim.Adam(model.parameters())
    >>> path = ndl.save(model, optimizer, folder / "model.safetensors")
    >>> _ = ndl.load(path, model, optimizer)
    """
    path, config = named(path), _registered_config(module)
    if config is not None and config.misfits(module):
        config = None  # load fills such a module, and makes none
    tensors = module.state_dict()
    reserved = [name for name in tensors if name.startswith("optimizer.")]
    if reserved:
        raise ValueError(f"save: {reserved[0]}: in a file that name is the optimizer's; rename it")
    saved_optimizer = None
    if optimizer is not None:
        names = _names_in(module, optimizer, "save")
        numbers = _renamed(optimizer.state_dict(), names)
        arrays = numbers.pop("arrays")
        flat, saved_optimizer = optimizer.flat, {"class": type(optimizer).__name__, **numbers}
        saved_optimizer["names"] = list(names.values())
        saved_optimizer["decayed"] = None if flat is None else flat.decayed
        accumulating = [n for n, p in module.named_parameters() if p.has_grad_buffer]
        saved_optimizer["accumulating"] = accumulating
        tensors.update({f"optimizer.{name}": value for name, value in arrays.items()})
    kind, keys, position, has_gauss, gauss = np.random.get_state()
    state = {
        "model": None if config is None else config.family,
        "config": None if config is None else config.to_dict(),
        "frozen": [name for name, p in module.named_parameters() if not p.requires_grad],
        "optimizer": saved_optimizer,
        "epoch": 0,
        "loss": math.nan,
        "random_state": [kind, keys.tolist(), int(position), int(has_gauss), float(gauss)],
        "versions": versions(),
        **extra,
    }
    with replacing(path) as file:
        _write(file, tensors, state)
    _whole.add(_stamp(path))
    return path


def _registered_config(module: nn.Module) -> models.Config | None:
    """From which load makes a module of this class again; None for one that is not registered."""
    config = getattr(module, "config", None)
    known = isinstance(config, models.Config) and isinstance(module, config.model_class)
    return config if known else None


def _names_in(module: nn.Module, optimizer: optim.Optimizer, op: str) -> dict[str, str]:
    """The optimizer's names of its parameters, and those that they have in the module. An optimizer
    of other parameters is refused before a run relies on it."""
    own = {id(p): name for name, p in module.named_parameters()}
    for name, parameter in zip(optimizer.names, optimizer.params):
        if id(parameter) not in own:
            raise ValueError(
                f"{op}: the optimizer's parameter {name!r} is not the model's; make the "
                "optimizer from model.parameters(), model.named_parameters() or "
                "nn.flatten_parameters(model)"
            )
    return {name: own[id(p)] for name, p in zip(optimizer.names, optimizer.params)}


def _renamed(state: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    """The state of an optimizer with its parameters under other names, where there are such."""

    def key(text: str) -> str:
        slot, _, name = text.partition(".")
        return f"{slot}.{names.get(name, name)}"

    changed = {**state, "arrays": {key(name): array for name, array in state["arrays"].items()}}
    if isinstance(state.get("groups"), dict):
        changed["groups"] = {names.get(n, n): own for n, own in state["groups"].items()}
    return changed


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
    names = sorted(tensors, key=lambda n: (-TO_FILE[tensors[n].dtype][1].itemsize, n))
    metadata = {"format": FORMAT, "checksum": "0" * DIGITS, "state": json.dumps(state)}
    rest = chunks({name: tensors[name] for name in names}, metadata)
    head = next(rest)
    digest = hashlib.blake2b(digest_size=DIGITS // 2)
    for chunk in itertools.chain([head], rest):
        digest.update(chunk)
        file.write(chunk)
    file.seek(_checksum_offset(head))
    file.write(digest.hexdigest().encode())


def _checksum_offset(head: bytes) -> int:
    """Find the checksum's digits; it is the second entry of the metadata, so the first match
    is the right one."""
    found = re.search(rb'"checksum":\s?"([0-9a-f]{%d})"' % DIGITS, head[:256])
    return -1 if found is None else found.start(1)


# ---- loading ----------------------------------------------------------------------------------


class Checkpoint:
    """A checkpoint file that has been read to its last byte and found whole.

    `state` is the dictionary described at the top. Raises CheckpointError for anything else.
    """

    def __init__(self, filepath: str | os.PathLike) -> None:
        self.path = named(filepath)
        with reading(self.path) as file:
            self._entries, self.state = self._read(file)
            _whole.add(_stamp(file.fileno()))

    def __repr__(self) -> str:
        step = "" if "step" not in self.state else f", step {self.state['step']}"
        saved = self.state["optimizer"]
        return (
            f"Checkpoint({self.path}{step}, loss {self.state['loss']:.4f}, "
            f"{'no optimizer' if saved is None else saved['class']})"
        )

    @property
    def tokenizer(self) -> Path | None:
        """The tokenizer.json of the run, or the one beside the file; None where there is none."""
        where = self.path.resolve().parent
        beside = (folder / "tokenizer.json" for folder in (where.parent, where))
        return next((path for path in beside if path.exists()), None)

    def _error(self, problem: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {problem}")

    @contextlib.contextmanager
    def _naming(self, problem: str) -> Iterator[None]:
        """Turn the exceptions that the state's values cause into an error that names the file."""
        try:
            yield
        except (TypeError, ValueError, LookupError, OverflowError) as error:
            raise self._error(f"{problem}: {error}") from error

    def _read(self, file: BinaryIO) -> tuple[dict[str, Entry], dict]:
        metadata, entries = read_header(file)
        if metadata.get("format") != FORMAT:
            raise self._error("a safetensors file, but not one of needle's checkpoints")
        self._verify(file, metadata.get("checksum"))
        for entry in entries:
            if entry.dtype not in FROM_FILE:
                raise self._error(f"tensor {entry.name}: unknown dtype {entry.dtype}")
        try:
            state = json.loads(metadata["state"])
            for key, kind in STATE.items():
                if not isinstance(state[key], kind):
                    raise TypeError(f"{key} is {state[key]!r:.60}")
            if state["optimizer"] is not None and "class" not in state["optimizer"]:
                raise TypeError("its optimizer has no class")
            state["loss"] = float(state["loss"])
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            raise self._error(f"the metadata cannot be used: {error}") from error
        return {entry.name: entry for entry in entries}, state

    def _verify(self, file: BinaryIO, checksum: Any) -> None:
        file.seek(0)
        head = file.read(CHUNK)
        where = _checksum_offset(head)
        if where < 0 or head[where : where + DIGITS].decode() != checksum:
            raise self._error("the header is damaged: no checksum where it should be")
        digest = hashlib.blake2b(
            head[:where] + b"0" * DIGITS + head[where + DIGITS :], digest_size=DIGITS // 2
        )
        while chunk := file.read(CHUNK):
            digest.update(chunk)
        if digest.hexdigest() != checksum:
            raise self._error(
                f"altered: its checksum is {digest.hexdigest()}, but was {checksum} "
                "when it was written"
            )

    def restore(
        self, device: Device | None = None
    ) -> tuple[Any, optim.Optimizer | None, int, float]:
        """(model, optimizer, epoch, loss) on `device`; the optimizer is None where none was saved.
        Draws no random number."""
        device = given_device(device)
        model = self.restore_model(device)
        own = dict(model.named_parameters())
        with self._naming("its frozen parameters cannot be used"):
            for name in self.state["frozen"]:
                own[name].requires_grad = False
        return (
            model,
            self._restore_optimizer(model, self._optimizer_arrays(device)),
            self.state["epoch"],
            self.state["loss"],
        )

    def configuration(self, dtype: str | None = None) -> models.Config:
        """The model's, in `dtype` where one is given."""
        if self.state["config"] is None:
            raise self._error(
                "holds a module of no registered class: make one, and ndl.load(path, module)"
            )
        with self._naming("its configuration cannot be used"):
            return models.model_class(self.state.get("model", "pythia")).config_class.from_dict(
                self.state["config"] | ({} if dtype is None else {"dtype": dtype})
            )

    def restore_model(self, device: Device | None = None, dtype: str | None = None) -> Any:
        """The model alone, in `dtype` where one is given. What the optimizer keeps, some twice the
        model's size or more, is not brought into memory."""
        device = given_device(device)
        config = self.configuration(dtype)
        with self._naming("its configuration cannot be used"):
            model = config.meta_model(device, self._entries.values())
        tensors = dict([*model.named_parameters(), *model.named_buffers()])
        self._compare({name: tensor.shape for name, tensor in tensors.items()})
        for name, tensor in tensors.items():
            tensor.cached_data = self._entries[name].read(device).astype(tensor.dtype)
        model.tokenizer = self.tokenizer
        return model

    def restore_into(self, module: nn.Module, optimizer: optim.Optimizer | None = None) -> None:
        """The parameters and buffers of `module` take the values in the file, and `optimizer` its
        state, where they lie and in their dtypes. Nothing is changed where something does not
        fit."""
        own = module.state_dict()
        self._compare({name: array.shape for name, array in own.items()}, "the module")
        values = {name: self._entries[name].read(array.device) for name, array in own.items()}
        changes: list[tuple[Any, Any, Any]] = [*module.load_changes(values)]
        if optimizer is not None:
            saved = self.state["optimizer"] or {}
            if saved.get("class") != type(optimizer).__name__:
                raise self._error(
                    f"holds the state of {saved.get('class', 'no optimizer')}, not of "
                    f"{type(optimizer).__name__}"
                )
            names = {new: old for old, new in _names_in(module, optimizer, "load").items()}
            with self._naming("the optimizer's state cannot be used"):
                arrays = self._optimizer_arrays(default_device())
                changes += optimizer.load_changes(_renamed({**saved, "arrays": arrays}, names))
        commit(changes)

    def _optimizer_arrays(self, device: Device) -> dict[str, NDArray]:
        return {
            name.removeprefix("optimizer."): entry.read(device)
            for name, entry in self._entries.items()
            if name.startswith("optimizer.")
        }

    def _compare(
        self, shapes: dict[str, tuple[int, ...]], what: str = "its own configuration"
    ) -> None:
        """Everything that does not fit, in one error, before anything is made or loaded."""
        problems = [f"{name} is missing" for name in shapes if name not in self._entries]
        for name, entry in self._entries.items():
            if name in shapes:
                shape, wanted = list(entry.shape), list(shapes[name])
                if shape != wanted:
                    problems.append(f"{name} has shape {shape}, not {wanted}")
            elif not name.startswith("optimizer."):
                problems.append(f"{name} is unknown")
        if problems:
            raise self._error(f"does not fit {what}: " + "; ".join(problems))

    def _restore_optimizer(
        self, model: nn.Module, arrays: dict[str, NDArray]
    ) -> optim.Optimizer | None:
        saved = self.state["optimizer"]
        if saved is None:
            return None
        with self._naming("the optimizer's state cannot be used"):
            numbers = dict(saved)
            name = numbers.pop("class", None)
            if not isinstance(name, str) or name not in OPTIMIZERS:
                raise ValueError(f"its class is {name!r:.40}; there are {', '.join(OPTIMIZERS)}")
            kind = OPTIMIZERS[name]
            names, decayed = numbers.pop("names"), numbers.pop("decayed")
            accumulating, own = numbers.pop("accumulating"), dict(model.named_parameters())
            parameters = [own[name] for name in names]
            if decayed is not None:
                if type(decayed) is not int or not 0 <= decayed <= len(names):
                    raise ValueError(f"decayed is {decayed!r:.40}, of {len(names)} parameters")
                optimizer = kind(nn.flat_again(names, parameters, decayed))
            else:
                if accumulating:
                    nn.flatten_parameters(model, only=accumulating)
                optimizer = kind(list(zip(names, parameters)))
            optimizer.load_state_dict({**numbers, "arrays": arrays})
        return optimizer

    def restore_random_state(self) -> None:
        """NumPy's global generator goes on where it was."""
        with self._naming("the random state cannot be used"):
            kind, keys, position, has_gauss, gauss = self.state["random_state"]
            np.random.set_state((kind, np.array(keys, np.uint32), position, has_gauss, gauss))


def load_checkpoint(
    filepath: str | os.PathLike, device: Device | None = None
) -> tuple[Any, optim.Optimizer | None, int, float]:
    """(model, optimizer, epoch, loss) from a file of save_checkpoint, on any device. Raises
    CheckpointError that names the file and the problem; nothing is half loaded.

    >>> from needle.models import Pythia, PythiaConfig
    >>> config = PythiaConfig(vocab_size=16, hidden_size=8, num_layers=1, num_heads=1)
    >>> model = Pythia(config)
    >>> optimizer = optim.AdamW(model.parameters())
    >>> path = ndl.save_checkpoint(model, optimizer, 3, 2.5, folder / "model.safetensors")
    >>> model, optimizer, epoch, loss = ndl.load_checkpoint(path)
    >>> epoch, loss
    (3, 2.5)
    """
    return Checkpoint(filepath).restore(device)


def load(
    path: str | os.PathLike,
    module: nn.Module | None = None,
    optimizer: optim.Optimizer | None = None,
    device: Device | None = None,
) -> tuple[Any, optim.Optimizer | None]:
    """(module, optimizer) from a file of `save` or `save_checkpoint`.

    Values go into the module that is given, and into its optimizer where one is. Without a module
    both are made, on `device`, from what the file says, where the module's class is registered.
    Raises CheckpointError that names the file and lists what does not fit; nothing is half loaded.

    >>> model = nn.Linear(3, 4)
    >>> path = ndl.save(model, None, folder / "model.safetensors")
    >>> again, _ = ndl.load(path, nn.Linear(3, 4))
    >>> bool((again.weight == model.weight).numpy().all())
    True
    """
    checkpoint = Checkpoint(path)
    if module is None:
        if optimizer is not None:
            raise TypeError("load: an optimizer is restored beside its module: give both")
        return checkpoint.restore(device)[:2]
    if device is not None:
        raise TypeError("load: device is for a module that is made: the given one has its own")
    checkpoint.restore_into(module, optimizer)
    return module, optimizer


# ---- the folder of a run ----------------------------------------------------------------------


def checkpoint_path(folder: str | os.PathLike, step: int) -> Path:
    return Path(folder) / f"step_{step}.safetensors"


def step_of(path: Path) -> int:
    """The step of a checkpoint by its name, as checkpoint_path gave it."""
    return int(path.stem.removeprefix("step_"))


def list_checkpoints(folder: str | os.PathLike) -> list[Path]:
    """The checkpoints of a folder, newest step first; not opened. CheckpointError where the folder
    is there and cannot be listed."""
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot be listed: {error.strerror or error}") from error
    found = [Path(folder) / name for name in names if re.fullmatch(r"step_\d+\.safetensors", name)]
    return sorted(found, key=step_of, reverse=True)


def newest_checkpoint(
    folder: str | os.PathLike, report: Callable[[str], None] = print
) -> Checkpoint | None:
    """The newest whole checkpoint of a folder, None where there is no file of one. Damaged ones are
    reported and passed over. CheckpointError where all are damaged, and where the system refuses to
    read one: a new run, or one from an older checkpoint, would overwrite what may be whole.
    """
    paths = list_checkpoints(folder)
    for path in paths:
        try:
            return Checkpoint(path)
        except CheckpointError as error:
            cause = error.__cause__
            if isinstance(cause, OSError) and not isinstance(cause, FileNotFoundError):
                raise CheckpointError(
                    f"{error}; make it readable, or move it away to go on from an older one"
                ) from error
            report(f"skipped: {error}")
    if paths:
        raise CheckpointError(f"{folder}: none of its checkpoints is whole; nothing is overwritten")
    return None


def find_checkpoint(path: str | os.PathLike, report: Callable[[str], None] = print) -> Checkpoint:
    """The checkpoint in a file, or the newest whole one of a run's folder. CheckpointError."""
    path = named(path)
    if not path.is_dir():
        return Checkpoint(path)
    found = newest_checkpoint(path / "checkpoints", report)
    if found is None:
        raise CheckpointError(f"{path}: no good checkpoint in its folder checkpoints/")
    return found


# Files that this process has written or read to their last byte, as long as they are the same.
_whole: set[tuple[int, ...]] = set()


def _stamp(file: Path | int) -> tuple[int, ...]:
    stat = os.stat(file)
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns


def _is_whole(path: Path) -> bool:
    try:
        return _stamp(path) in _whole or Checkpoint(path) is not None
    except (CheckpointError, OSError):
        return False


def proven_checkpoint(folder: str | os.PathLike, finite: int, following: int) -> Path | None:
    """The newest whole checkpoint after which `following` steps or more had finite losses, where
    the steps up to `finite` had. The loss of a checkpoint's own step does not show it: weights that
    have diverged are seen in the steps after."""
    paths = (p for p in list_checkpoints(folder) if step_of(p) + following <= finite)
    return next((path for path in paths if _is_whole(path)), None)


def prune_checkpoints(
    folder: str | os.PathLike,
    written: int,
    keep: int = 2,
    forever: Callable[[int], bool] = lambda step: False,
    following: int = 1,
) -> None:
    """Deletes, of the steps up to `written`, which has just been saved, all that are older than the
    `keep` newest whole ones, except: those that are to stay `forever`, the proven one (see
    proven_checkpoint), and that which is proven next. Later steps stay: they are damaged, or of a
    training that went back to an older step."""
    steps = {path: step_of(path) for path in list_checkpoints(folder)}
    found = [path for path, step in steps.items() if step <= written and not forever(step)]
    whole = [path for path in found if steps[path] == written or _is_whole(path)]
    proven = [path for path in whole if steps[path] + following <= written]
    unproven = len(whole) - len(proven)
    stay = {*whole[:keep], *whole[max(unproven - 1, 0) : unproven + 1]}
    if len(whole) >= keep:
        for path in found[found.index(whole[keep - 1]) :]:
            if path not in stay:
                path.unlink(missing_ok=True)
