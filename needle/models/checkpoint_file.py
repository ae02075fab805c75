"""A checkpoint file, read: found whole, compared with its configuration, made a model again.

needle/checkpoint.py has the format, and writes it. The folder checkpoints/ of a run has them by
step. This stands below the models, so that Pythia.from_pretrained reads runs.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from needle import nn, optim
from needle.autograd import Tensor
from needle.backend_ndarray import Device, NDArray, commit, default_device, given_device
from needle.data.tokenizer import Tokenizer, files_in
from needle.files import FileError, MissingFileError, named, reading
from needle.models import registry
from needle.safetensors import FROM_FILE, Entry, misfits, read_header

FORMAT = "needle checkpoint"
DIGITS = 32  # of the checksum, in hexadecimal
CHUNK = 1 << 20  # bytes read at a time
OPTIMIZERS = {kind.__name__: kind for kind in (optim.Adam, optim.AdamW, optim.SGD)}
CheckpointError = FileError  # a checkpoint, or a folder of transformers, that cannot be used


def names_in(module: nn.Module, optimizer: optim.Optimizer, op: str) -> dict[str, str]:
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


def checksum_offset(head: bytes) -> int:
    """Find the checksum's digits; it is the second entry of the metadata, so the first match
    is the right one."""
    found = re.search(rb'"checksum":\s?"([0-9a-f]{%d})"' % DIGITS, head[:256])
    return -1 if found is None else found.start(1)


class Checkpoint:
    """A checkpoint file that has been read to its last byte and found whole.

    `state` is the dictionary described at the top. Raises CheckpointError for anything else.
    """

    def __init__(self, filepath: str | os.PathLike) -> None:
        self.path = named(filepath)
        with reading(self.path) as file:
            metadata, entries = read_header(file)
            if metadata.get("format") != FORMAT:
                raise self._error("a safetensors file, but not one of needle's checkpoints")
            self._verify(file, metadata.get("checksum"))
            self._entries = {entry.name: entry for entry in entries}
            self.state: dict[str, Any] = json.loads(metadata["state"])

    def __repr__(self) -> str:
        step = "" if "step" not in self.state else f", step {self.state['step']}"
        saved = self.state["optimizer"]
        return (
            f"Checkpoint({self.path}{step}, loss {self.state['loss']:.4f}, "
            f"{'no optimizer' if saved is None else saved['class']})"
        )

    @property
    def text_files(self) -> Tokenizer:
        """The tokenizer and special tokens of its model: those in it, else those in the folder of
        the run, else those beside the file."""
        if "text_files" in self.state:
            return Tokenizer(self.state["text_files"], str(self.path))
        where = self.path.resolve().parent
        for path in (folder / "tokenizer.json" for folder in (where.parent, where)):
            if path.exists():
                return Tokenizer(files_in(path.parent), str(path))
        return Tokenizer({})

    @property
    def tensors(self) -> dict[str, Entry]:
        """The tensors of the file, of the model first, by their names; none is read."""
        names = sorted(self._entries, key=lambda name: (name.startswith("optimizer."), name))
        return {name: self._entries[name] for name in names}

    def _error(self, problem: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {problem}")

    @contextlib.contextmanager
    def _naming(self, problem: str) -> Iterator[None]:
        """Turn the exceptions that the state's values cause into an error that names the file."""
        try:
            yield
        except (TypeError, ValueError, LookupError, OverflowError) as error:
            raise self._error(f"{problem}: {error}") from error

    def _verify(self, file: BinaryIO, checksum: Any) -> None:
        file.seek(0)
        head = file.read(CHUNK)
        where = checksum_offset(head)
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
        for name in self.state["frozen"]:
            own[name].requires_grad = False
        optimizer = self._restore_optimizer(model, device)
        return model, optimizer, self.state["epoch"], self.state["loss"]

    def configuration(self, dtype: str | None = None) -> registry.Config:
        """The model's, in `dtype` where one is given."""
        if self.state["config"] is None:
            raise self._error(
                "holds a module of no registered class: make one, and ndl.load(path, module)"
            )
        with self._naming("its configuration cannot be used"):
            return registry.model_class(self.state.get("model", "pythia")).config_class.from_dict(
                self.state["config"] | ({} if dtype is None else {"dtype": dtype})
            )

    def restore_model(
        self, device: Device | None = None, dtype: str | None = None, cls: Any = None
    ) -> Any:
        """The model alone, in `dtype` where one is given, and of the class `cls`: the registered
        one, a base of it, or a subclass of the same configuration. The optimizer's state, some
        twice the model's size or more, is not brought into memory."""
        device = given_device(device)
        config = self.configuration(dtype)
        own = config.model_class
        if cls is None or issubclass(own, cls):
            cls = own
        elif not issubclass(cls, own) or cls.config_class is not own.config_class:
            raise self._error(f"holds a {own.__name__}, not a {cls.__name__}")
        with self._naming("its configuration cannot be used"):
            model = config.meta_model(device, cls)
        tensors = model.saved()
        self._compare({name: tensor.shape for name, tensor in tensors.items()})
        for name, tensor in tensors.items():
            tensor.cached_data = self._entries[name].read(device).astype(tensor.dtype)
        nn.place_neighbours(model)
        model.text_files = self.text_files
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
            names = {new: old for old, new in names_in(module, optimizer, "load").items()}
            with self._naming("the optimizer's state cannot be used"):
                arrays = self._optimizer_arrays(default_device())
                changes += optimizer.load_changes(optim.renamed({**saved, "arrays": arrays}, names))
        commit(changes)

    def content(self, device: Device | None = None) -> Any:
        """What `save` was given in the place of a module; see _packed in needle/checkpoint.py."""
        place = given_device(device)

        def array_of(value: dict) -> Any:
            if [*value] not in (["needle.Tensor"], ["needle.NDArray"]):
                return value
            ((kind, name),) = value.items()
            array = self._entries[name].read(place)
            return Tensor.from_ndarray(array) if kind == "needle.Tensor" else array

        return json.loads(json.dumps(self.state["content"]), object_hook=array_of)

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
        own = {n: e for n, e in self._entries.items() if not n.startswith("optimizer.")}
        if problems := misfits(own, shapes, FROM_FILE):
            raise self._error(f"does not fit {what}: " + "; ".join(problems))

    def _restore_optimizer(self, model: nn.Module, device: Device) -> optim.Optimizer | None:
        saved, arrays = self.state["optimizer"], self._optimizer_arrays(device)
        if saved is None:
            return None
        with self._naming("the optimizer's state cannot be used"):
            kind = OPTIMIZERS.get(saved["class"])
            if kind is None:
                raise ValueError(
                    f"its class is {saved['class']}; there are {', '.join(OPTIMIZERS)}"
                )
            names, own = saved["names"], dict(model.named_parameters())
            parameters = [own[name] for name in names]
            if saved["decayed"] is not None:
                optimizer = kind(nn.FlatParameters(names, parameters, saved["decayed"]))
            else:
                if saved["accumulating"]:
                    nn.flatten_parameters(model, only=saved["accumulating"])
                optimizer = kind(list(zip(names, parameters)))
            optimizer.load_state_dict({**saved, "arrays": arrays})
        return optimizer

    def restore_random_state(self) -> None:
        """NumPy's global generator goes on where it was."""
        kind, keys, position, has_gauss, gauss = self.state["random_state"]
        np.random.set_state((kind, np.array(keys, np.uint32), position, has_gauss, gauss))


# ---- the folder of a run ----------------------------------------------------------------------


def checkpoint_path(folder: str | os.PathLike, step: int) -> Path:
    return Path(folder) / f"step_{step}.safetensors"


def weights_path(folder: str | os.PathLike, step: int) -> Path:
    """The weights of a step without the optimizer, from which no run resumes."""
    return Path(folder) / f"weights_{step}.safetensors"


def step_of(path: Path) -> int:
    """The step of a checkpoint by its name, as checkpoint_path gave it."""
    return int(path.stem.rpartition("_")[2])


def list_checkpoints(folder: str | os.PathLike, kind: str = "step") -> list[Path]:
    """The checkpoints of a folder, newest step first; not opened. kind: "step", "weights", or
    "step|weights". CheckpointError where the folder
    is there and cannot be listed."""
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot be listed: {error.strerror or error}") from error
    found = [
        Path(folder) / name for name in names if re.fullmatch(rf"({kind})_\d+\.safetensors", name)
    ]
    return sorted(found, key=step_of, reverse=True)


def newest_checkpoint(
    folder: str | os.PathLike, report: Callable[[str], None] = print
) -> Checkpoint | None:
    """The newest whole checkpoint of a folder, None where there is no file of one. Damaged ones are
    reported and passed over. A run that went back to an older one has cut its log there: the later
    ones are not of its steps, and count only where there are no others. CheckpointError where all
    are damaged, and where the system refuses to read one: a new run, or one from an older
    checkpoint, would overwrite what may be whole.
    """
    paths, last = list_checkpoints(folder), _last_step(Path(folder).parent / "metrics.jsonl")
    paths = [path for path in paths if step_of(path) <= last] or paths
    for path in paths:
        try:
            return Checkpoint(path)
        except CheckpointError as error:
            # Asked without a name, which would keep this error, its frames and a run's lock alive.
            refused = isinstance(error.__cause__, OSError)
            if refused and not isinstance(error.__cause__, FileNotFoundError):
                raise CheckpointError(
                    f"{error}; make it readable, or move it away to go on from an older one"
                ) from error
            report(f"skipped: {error}")
    if paths:
        raise CheckpointError(f"{folder}: none of its checkpoints is whole; nothing is overwritten")
    return None


def _last_step(log: Path) -> float:
    """Return the step of the last whole line of a run's log; infinity where there is none."""
    with contextlib.suppress(OSError):
        for line in reversed(log.read_bytes().splitlines()):
            if found := re.match(rb'\{.*?"step": ?(\d+)[,}].*\}$', line):
                return int(found[1])
    return math.inf


def find_checkpoint(path: str | os.PathLike, report: Callable[[str], None] = print) -> Checkpoint:
    """The checkpoint in a file, or the newest whole one of a run's folder. CheckpointError."""
    path = named(path)
    if not path.is_dir():
        return Checkpoint(path)
    found = newest_checkpoint(path / "checkpoints", report)
    if found is None:
        raise MissingFileError(
            f"{path}: no good checkpoint in its folder checkpoints/ (step_N.safetensors)"
        )
    return found
