"""Checkpoints: one safetensors file that holds all a run needs to go on as if it had never stopped.

    8 bytes   little-endian length of the header
    header    JSON, padded with blanks to a multiple of 8: tensor -> dtype, shape, data_offsets, and
              __metadata__: format, checksum, state (JSON text, see below)
    data      the tensors, C-contiguous little-endian, without gaps

Tensors: each parameter under its own name; each array of the optimizer (moments, and the float32
master weights of a bfloat16 model) under `optimizer.<name>`. The package `safetensors` opens it.

state: config, optimizer (class and numbers), epoch, loss, random_state (NumPy's global generator),
versions, and what the caller adds: step, position in the data, schedule.

checksum: BLAKE2b over the whole file with the checksum's own digits as zeros, so that one changed
bit anywhere is found. Written as temporary file, fsync, rename, fsync of the folder: a name always
leads to a whole file. No pickle is ever loaded, whatever the file is called.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import platform
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

import needle
from needle import nn, optim
from needle.backend_ndarray import Device, NDArray, array, default_device
from needle.models.pythia import Pythia, PythiaConfig, parameter_shapes

FORMAT = "needle checkpoint"
DIGITS = 32  # of the checksum, in hexadecimal
CHUNK = 1 << 24  # bytes read at a time
# safetensors' name, ours, the NumPy type that carries the bits
DTYPES = (
    ("F32", "float32", "<f4"),
    ("BF16", "bfloat16", "<u2"),
    ("F16", "float16", "<f2"),
    ("I64", "int64", "<i8"),
    ("I32", "int32", "<i4"),
    ("U16", "uint16", "<u2"),
    ("U8", "uint8", "|u1"),
    ("BOOL", "bool", "|b1"),
)
TO_FILE = {ours: (theirs, np.dtype(bits)) for theirs, ours, bits in DTYPES}
FROM_FILE = {theirs: (ours, np.dtype(bits)) for theirs, ours, bits in DTYPES}


class CheckpointError(ValueError):
    """A checkpoint that cannot be read or written; the message names the file and the problem."""


# ---- saving -----------------------------------------------------------------------------------


def save_checkpoint(
    model: Pythia,
    optimizer: optim.Optimizer | None,
    epoch: int,
    loss: float,
    filepath: str | os.PathLike,
    **extra: Any,
) -> Path:
    """Writes model and optimizer to `filepath`, atomically. `extra` (JSON values) is kept and given
    back by `Checkpoint.state`. Raises CheckpointError where the file cannot be written: what was
    there before is then still there."""
    path = Path(filepath)
    if not isinstance(getattr(model, "config", None), PythiaConfig):
        raise TypeError(f"save_checkpoint: model must be a Pythia, not {type(model).__name__}")
    tensors = {name: parameter.cached_data for name, parameter in _parameters(model)}
    saved_optimizer = None
    if optimizer is not None:
        numbers = optimizer.state_dict()
        arrays = numbers.pop("arrays")
        _check_optimizer(model, optimizer)
        saved_optimizer = {"class": type(optimizer).__name__, **numbers}
        tensors.update({f"optimizer.{name}": value for name, value in arrays.items()})
    kind, keys, position, has_gauss, gauss = np.random.get_state()
    state = {
        "config": model.config.to_dict(),
        "optimizer": saved_optimizer,
        "epoch": int(epoch),
        "loss": float(loss),
        "random_state": [kind, keys.tolist(), int(position), int(has_gauss), float(gauss)],
        "versions": versions(),
        **extra,
    }
    with replacing(path) as file:
        _write(file, tensors, state)
    return path


def _check_optimizer(model: Pythia, optimizer: optim.Optimizer) -> None:
    """An optimizer that load_checkpoint could not build again is refused before a run relies on
    it."""
    kind = type(optimizer).__name__
    if getattr(optim, kind, None) is not type(optimizer):
        raise TypeError(
            f"save_checkpoint: {kind} is not of needle.optim, so that load_checkpoint "
            "could not make it; save without it (None), and its state_dict() elsewhere"
        )
    named = dict(_parameters(model))
    for name, parameter in zip(optimizer.names, optimizer.params):
        if named.get(name) is not parameter:
            raise ValueError(
                f"save_checkpoint: the optimizer's parameter {name!r} is not the "
                f"model's of that name; make the optimizer from model.parameters(), "
                "model.named_parameters() or nn.flatten_parameters(model)"
            )


def versions() -> dict[str, str]:
    """What a run was made with."""
    return {
        "needle": needle.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
    }


def _parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    return iter(model.named_parameters())


def _write(file: BinaryIO, tensors: dict[str, NDArray], state: dict) -> None:
    # Wide types first, so that each tensor is aligned to its own size.
    names = sorted(tensors, key=lambda n: (-TO_FILE[tensors[n].dtype][1].itemsize, n))
    checksum = "0" * DIGITS
    metadata = {"format": FORMAT, "checksum": checksum, "state": json.dumps(state)}
    entries: dict[str, dict] = {"__metadata__": metadata}
    end = 0
    for name in names:
        kind, bits = TO_FILE[tensors[name].dtype]
        start, end = end, end + math.prod(tensors[name].shape) * bits.itemsize
        entries[name] = {
            "dtype": kind,
            "shape": list(tensors[name].shape),
            "data_offsets": [start, end],
        }
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    head = len(header).to_bytes(8, "little") + header
    digest = hashlib.blake2b(head, digest_size=DIGITS // 2)
    file.write(head)
    for name in names:
        content = _bits(tensors[name])
        digest.update(content)
        file.write(content)
    file.seek(_checksum_offset(head))
    file.write(digest.hexdigest().encode())


def _bits(value: NDArray) -> memoryview:
    if value.dtype == "bfloat16":
        value = value.compact().view("uint16")
    host = np.ascontiguousarray(value.numpy())
    return memoryview(host.reshape(-1).view(np.uint8))


def _checksum_offset(head: bytes) -> int:
    """Where the checksum's digits begin; it is the second entry of the metadata, so the first match
    is the right one."""
    found = re.search(rb'"checksum":\s?"([0-9a-f]{%d})"' % DIGITS, head[:256])
    return -1 if found is None else found.start(1)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A binary file that becomes `path` when the block ends well and vanishes when it does not."""
    path = Path(path)
    work = path.with_name(f".{path.name}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(work, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(work, path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        raise CheckpointError(
            f"{path}: cannot be written: {error.strerror or error}; files "
            "written earlier are as they were"
        ) from error
    finally:
        with contextlib.suppress(OSError):
            work.unlink(missing_ok=True)


# ---- loading ----------------------------------------------------------------------------------


class Checkpoint:
    """A checkpoint file that has been read to its last byte and found whole.

    `state` is the dictionary described at the top. Raises CheckpointError for anything else.
    """

    def __init__(self, filepath: str | os.PathLike) -> None:
        self.path = Path(filepath)
        try:
            with open(self.path, "rb") as file:
                self._entries, self._data, self.state = self._read(file)
        except OSError as error:
            raise self._error(f"cannot be read: {error.strerror or error}") from error

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
        return next((path for path in beside if path.is_file()), None)

    def _error(self, problem: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {problem}")

    def _read(self, file: BinaryIO) -> tuple[dict, int, dict]:
        size = os.fstat(file.fileno()).st_size
        start = file.read(8)
        self._refuse_foreign(start, size)
        length = int.from_bytes(start, "little")
        if length > size - 8:
            raise self._error(
                f"the header should be {length} bytes long, but the file has {size}: "
                "it is truncated, or no checkpoint"
            )
        header = file.read(length)
        try:
            entries = json.loads(header)
            metadata = entries.pop("__metadata__")
            form, checksum = metadata["format"], metadata["checksum"]
            if not isinstance(checksum, str):
                raise ValueError("no checksum")
            ends = [entry["data_offsets"][1] for entry in entries.values()]
            end = 8 + length + max(ends, default=0)
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise self._error(
                "the header is damaged, or this safetensors file is not one of needle's checkpoints"
            ) from error
        if form != FORMAT:
            raise self._error("a safetensors file, but not one of needle's checkpoints")
        if not isinstance(end, int) or end != size:
            raise self._error(f"{size} bytes long, but should be {end}: truncated or altered")
        self._verify(file, start + header, checksum)
        self._check_entries(entries, end - 8 - length)
        try:
            state = json.loads(metadata["state"])
            state["config"], state["epoch"], state["loss"]
        except (ValueError, KeyError, TypeError) as error:
            raise self._error(f"the metadata cannot be used: {error}") from error
        return entries, 8 + length, state

    def _refuse_foreign(self, start: bytes, size: int) -> None:
        if start[:1] == b"\x80" and start[1:2] in (b"\2", b"\3", b"\4", b"\5"):
            raise self._error(
                "a pickle; needle never loads one, because a pickle runs code. Save "
                "it anew with save_checkpoint"
            )
        if start[:4] == b"PK\3\4":
            raise self._error(
                "a zip archive, such as torch.save writes; it holds pickles and is not loaded"
            )
        if size < 8:
            raise self._error(f"only {size} bytes long: truncated, or no checkpoint")

    def _verify(self, file: BinaryIO, head: bytes, checksum: str) -> None:
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

    def _check_entries(self, entries: dict, size: int) -> None:
        position = 0
        for name, entry in sorted(entries.items(), key=lambda item: item[1]["data_offsets"]):
            start, end = entry["data_offsets"]
            if entry["dtype"] not in FROM_FILE:
                raise self._error(f"tensor {name}: unknown dtype {entry['dtype']}")
            _, bits = FROM_FILE[entry["dtype"]]
            if start != position or end - start != math.prod(entry["shape"]) * bits.itemsize:
                raise self._error(f"tensor {name}: its offsets and its shape contradict each other")
            position = end
        if position != size:
            raise self._error("there are bytes that belong to no tensor")

    def restore(
        self, device: Device | None = None
    ) -> tuple[Pythia, optim.Optimizer | None, int, float]:
        """(model, optimizer, epoch, loss) on `device`; the optimizer is None where none was saved.
        Draws no random number."""
        model = self.restore_model(device)
        with open(self.path, "rb") as file:
            arrays = {
                name.removeprefix("optimizer."): self._tensor(file, name, model.device)
                for name in self._entries
                if name.startswith("optimizer.")
            }
        return (
            model,
            self._restore_optimizer(model, arrays),
            self.state["epoch"],
            self.state["loss"],
        )

    def restore_model(self, device: Device | None = None, dtype: str | None = None) -> Pythia:
        """The model alone, in `dtype` where one is given. What the optimizer keeps, some twice the
        model's size or more, is not brought into memory."""
        device = default_device() if device is None else device
        try:
            config = PythiaConfig.from_dict(self.state["config"])
        except (TypeError, ValueError) as error:
            raise self._error(f"its configuration cannot be used: {error}") from error
        self._compare(parameter_shapes(config))
        model = Pythia(config, device=device, dtype=dtype, initialise=False)
        parameters = dict(_parameters(model))
        with open(self.path, "rb") as file:
            for name, parameter in parameters.items():
                target = parameter.cached_data
                target[(slice(None),) * target.ndim] = self._tensor(file, name, device)
        model.tokenizer = self.tokenizer
        return model

    def _compare(self, shapes: dict[str, tuple[int, ...]]) -> None:
        """Everything that does not fit, in one error, before anything is made or loaded."""
        problems = [f"{name} is missing" for name in shapes if name not in self._entries]
        for name, entry in self._entries.items():
            if name in shapes:
                wanted = list(shapes[name])
                if entry["shape"] != wanted:
                    problems.append(f"{name} has shape {entry['shape']}, not {wanted}")
            elif not name.startswith("optimizer."):
                problems.append(f"{name} is unknown")
        if problems:
            raise self._error("does not fit its own configuration: " + "; ".join(problems))

    def _tensor(self, file: BinaryIO, name: str, device: Device) -> NDArray:
        entry = self._entries[name]
        dtype, bits = FROM_FILE[entry["dtype"]]
        count = math.prod(entry["shape"])
        file.seek(self._data + entry["data_offsets"][0])
        host = np.fromfile(file, bits, count)
        if len(host) != count:
            raise self._error(f"tensor {name}: the file has been cut while it was read")
        host = host.reshape(entry["shape"])
        if dtype == "bfloat16":
            return array(host, "uint16", device).view("bfloat16")
        return array(host, dtype, device)

    def _restore_optimizer(
        self, model: Pythia, arrays: dict[str, NDArray]
    ) -> optim.Optimizer | None:
        saved = self.state["optimizer"]
        if saved is None:
            return None
        try:
            numbers = dict(saved)
            kind = getattr(optim, numbers.pop("class"))
            held = {name.partition(".")[2] for name in arrays}
            named = list(_parameters(model))
            some = [(name, parameter) for name, parameter in named if name in held]
            whole = len(some) in (0, len(named))  # else it trained a part of the model
            optimizer = kind(nn.flatten_parameters(model) if whole else some)
            optimizer.load_state_dict({**numbers, "arrays": arrays})
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise self._error(f"the optimizer's state cannot be used: {error}") from error
        return optimizer

    def restore_random_state(self) -> None:
        """NumPy's global generator goes on where it was."""
        kind, keys, position, has_gauss, gauss = self.state["random_state"]
        np.random.set_state((kind, np.array(keys, np.uint32), position, has_gauss, gauss))


def load_checkpoint(
    filepath: str | os.PathLike, device: Device | None = None
) -> tuple[Pythia, optim.Optimizer | None, int, float]:
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


# ---- the folder of a run ----------------------------------------------------------------------


def checkpoint_path(folder: str | os.PathLike, step: int) -> Path:
    return Path(folder) / f"step_{step}.safetensors"


def list_checkpoints(folder: str | os.PathLike) -> list[Path]:
    """The checkpoints of a folder, newest step first; not opened."""
    found = []
    for path in Path(folder).glob("step_*.safetensors"):
        step = path.name.removeprefix("step_").removesuffix(".safetensors")
        if step.isdecimal():
            found.append((int(step), path))
    return [path for _, path in sorted(found, reverse=True)]


def newest_checkpoint(
    folder: str | os.PathLike, report: Callable[[str], None] = print
) -> Checkpoint | None:
    """The newest whole checkpoint of a folder; damaged ones are reported and passed over."""
    for path in list_checkpoints(folder):
        try:
            return Checkpoint(path)
        except CheckpointError as error:
            report(f"skipped: {error}")
    return None


def find_checkpoint(path: str | os.PathLike, report: Callable[[str], None] = print) -> Checkpoint:
    """The checkpoint in a file, or the newest whole one of a run's folder. CheckpointError."""
    path = Path(path)
    if not path.is_dir():
        return Checkpoint(path)
    found = newest_checkpoint(path / "checkpoints", report)
    if found is None:
        raise CheckpointError(f"{path}: no good checkpoint in its folder checkpoints/")
    return found


def prune_checkpoints(
    folder: str | os.PathLike, keep: int = 2, forever: Callable[[int], bool] = lambda step: False
) -> None:
    """Deletes all but the `keep` newest of those whose step is not to stay `forever`."""
    passing = [
        path
        for path in list_checkpoints(folder)
        if not forever(int(path.stem.removeprefix("step_")))
    ]
    for path in passing[keep:]:
        path.unlink(missing_ok=True)
