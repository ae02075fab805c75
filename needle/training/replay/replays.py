"""Replays: runs that go on from a step of another one, their parent, with edits (docs/replay.md).

The folder of a replay is that of a run to resume: it begins with the parent's checkpoint and lines
of metrics.jsonl, and `needle train --resume` does the rest. replay.json, written once, makes the
difference.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fnmatch
import functools
import hashlib
import json
import operator
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from needle import _C
from needle._C import NDArray, cpu
from needle.autograd import Tensor
from needle.checkpoint import (
    Checkpoint,
    checkpoint_path,
    find_checkpoint,
    list_checkpoints,
    step_of,
)
from needle.command import argument_type, find
from needle.data import Batches, DataError, TokenData
from needle.data.edited import Edits
from needle.data.edits import TRAINING
from needle.data.runs import open_run_data
from needle.data.tokenizer import TEXT_FILES
from needle.distributed.data_parallel import DataParallel
from needle.files import MissingFileError, beside, read_json, replace_text, replacing
from needle.optim import Linear
from needle.processes import die_with
from needle.training.folder import (
    again,
    begin,
    check_free,
    described_config,
    read_description,
    read_settings,
)
from needle.training.replay.proofs import Log, differing, to_text
from needle.training.settings import Settings, parse, refuse_flag

CONTROL = 20  # steps that are repeated without edits before a replay
# By slot of the optimizer, or `weights`, before the names of parameters in a checkpoint.
MOMENTS = {"m": ["optimizer.m."], "v": ["optimizer.v."]}
WEIGHTS = {"weights": [""], "master": ["optimizer.master.", ""]}


@dataclasses.dataclass
class Replay:
    """What replay.json holds, and what it does to the training."""

    parent: str  # folder of the parent
    manifest: str | None  # SHA-256 of the parent's manifest.json, None where it has none
    base: int  # step of the checkpoint that it begins with; 0: of the first model
    start: int  # the last step without edits
    until: int  # its last step
    edits: list[dict[str, Any]]  # as needle/data/edits.py checks them, with numbers of documents
    stop: int | None = None  # a step at which it ends before, with the same edits

    def begin(self, data: TokenData, batches: Batches, micro_batches: int) -> Edits:
        """Have batches draw the edited data, and return the edits. micro_batches: of a step."""
        edits = Edits(self.edits, data, batches, micro_batches, self.start + 1, self.until)
        batches.edits = edits or None
        return edits

    def rates(self, schedule: Callable[[int], float]) -> Callable[[int], float]:
        """Return a schedule with the edits of the rate."""
        for edit in self.edits:
            if edit["do"] == "rate":
                schedule = functools.partial(_edited_rate, edit, schedule)
        return schedule

    def loss(self, loss: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """Return a loss in which tokens without one count as 0: the weight of the others stays."""
        if all(edit["do"] in TRAINING for edit in self.edits):
            return loss

        def counted(ids: Any, targets: Any) -> Tensor:
            if isinstance(targets, NDArray):
                share = Tensor.from_ndarray((targets >= 0).astype("float32").mean())
            else:
                share = float(np.float32((np.asarray(targets) >= 0).mean()))
            return loss(ids, targets) * share

        return counted

    def change(self, parallel: DataParallel) -> None:
        """Make the edits of moments and weights, before the first step with edits."""
        flat, rank = parallel.flat, parallel.group.rank
        buffers = {
            slot: [(x[region.own], region.shards[rank].start) for region in parallel.regions]
            for slot, x in parallel.optimizer.kept().items()
        }
        buffers["weights"] = [(flat.data, 0)]
        sizes = {name: p.size for name, p in zip(flat.names, flat.parameters)}
        for edit in self.edits:
            for (slot, name), value in values_of(edit, sizes).items():
                for part in buffers.get(slot, ()):
                    _write(*part, flat.offsets[flat.names.index(name)], value)


def _edited_rate(edit: dict[str, Any], schedule: Callable[[int], float], step: int) -> float:
    first, last = edit["steps"]
    if not first <= step <= last:
        return schedule(step)
    if "value" in edit:
        return float(edit["value"])
    if "factor" in edit:
        return schedule(step) * edit["factor"]
    before = schedule(max(first - 1, 1))
    return Linear(before, last - first + 1, floor=edit["to"] * before)(step - first + 1)


def values_of(edit: dict[str, Any], sizes: dict[str, int]) -> dict[tuple[str, str], np.ndarray]:
    """Return what an edit of moments or weights writes, by slot of the optimizer, or `weights`, and
    name of the parameter; nothing for another edit. sizes: of the parameters. DataError for a
    pattern that names no parameter, and for a source without one of them."""
    if edit["do"] not in ("moments", "weights"):
        return {}
    chosen = fnmatch.filter(sizes, edit.get("parts", "*"))
    if not chosen:
        said = f"{edit['do']}, parts: {edit['parts']!r} names no parameter"
        raise DataError(f"{said}; there are {', '.join(sizes)}")
    if edit.get("to") == "zero":
        return {(slot, name): np.zeros(sizes[name]) for slot in ("m", "v") for name in chosen}
    tensors, found = find_checkpoint(edit["from"]).tensors, {}
    for slot, prefixes in (WEIGHTS if edit["do"] == "weights" else MOMENTS).items():
        for name in chosen:
            there = [prefix + name for prefix in prefixes if prefix + name in tensors]
            value = tensors[there[0]].read(cpu()).numpy() if there else np.empty(0)
            if value.size != sizes[name]:
                raise DataError(f"from: {edit['from']} has no such {edit['do']} of {name}")
            found[slot, name] = value.reshape(-1)
    return found


def _write(buffer: NDArray, start: int, at: int, value: np.ndarray) -> None:
    """Write numbers to place `at` of a flat array, of which `buffer` is the part from `start`."""
    low, high = max(at, start), min(at + value.size, start + buffer.size)
    if low < high:
        part = _C.array(value[low - at : high - at], "float32", buffer.device)
        _C.assign(buffer[low - start : high - start], part)


# ---- the folder of a replay --------------------------------------------------------------------


def read_replay(folder: Path, step: int | None = None) -> Replay | None:
    """Return what makes the run in a folder a replay; None of any other run. step: steps done, from
    where it is to go on. DataError where it cannot, as in a folder that was not made whole."""
    file = folder / "replay.json"
    try:
        replay = Replay(**read_json(file))
    except MissingFileError:
        return None
    except TypeError as error:
        raise DataError(f"{file}: not of a replay: {error}") from error
    if step is not None and step < replay.base:
        raise DataError(
            f"{folder}: a replay that lacks its first checkpoint: remove it, begin again"
        )
    return replay


def whole_steps(folder: Path) -> list[int]:
    """Return the steps from which the run in a folder can be repeated, ascending: 0, and those of
    its whole checkpoints."""
    return [0, *(step_of(file) for file in reversed(list_checkpoints(folder / "checkpoints")))]


def planned(parent: Path, start: int, steps: int | None, edits: list[dict]) -> Replay:
    """Return the replay of the run in a folder from a step on; steps: that follow, by default to
    its end. DataError for a step that it does not have."""
    settings = read_settings(parent)
    last, ends = settings["steps"], settings["schedule"] != "constant"
    if not ends:  # a run may have gone on behind its --steps
        last = max([last, *Log(parent / "metrics.jsonl").steps])
    until = last if steps is None else start + operator.index(steps)
    most = last - (ends or steps is None)
    if not 0 <= start <= most:
        said = f"has the steps 0 to {last}: take one of 0 to {most}"
        raise DataError(f"--from {start}: {parent} {said}")
    if until <= start:
        raise DataError(f"--steps {steps}: must be 1 or more")
    if until > last and ends:
        raise DataError(
            f"--steps {steps}: the {settings['schedule']} schedule of {parent} ends at step "
            f"{last}: give {last - start} or less"
        )
    if (of := read_replay(parent)) is not None and of.edits:
        raise DataError(f"{parent}: a replay with edits: replay {of.parent}, with all edits")
    base = max(step for step in whole_steps(parent) if step <= start)
    manifest = None
    with contextlib.suppress(FileNotFoundError):
        manifest = hashlib.sha256((parent / "manifest.json").read_bytes()).hexdigest()
    return Replay(str(parent.resolve()), manifest, base, start, until, edits)


def make_folder(replay: Replay, out: Path, name: str | None) -> Path:
    """Make the folder in which a replay begins. replay.json comes first and the checkpoint last, so
    that a folder which is not whole is no other run."""
    parent = Path(replay.parent)
    folder, lock = begin(out, name, f"{parent.name}-replay")
    try:
        told, log = dataclasses.asdict(replay), Log(parent / "metrics.jsonl", replay.base)
        described = read_description(parent) | {"saved": replay.base > 0}
        files = {
            "replay.json": json.dumps(told, indent=2) + "\n",
            "config.json": json.dumps(described, indent=2) + "\n",
            "metrics.jsonl": "".join(f"{line}\n" for line in log.texts),
        }
        beside_weights = [parent / name for name in TEXT_FILES if (parent / name).exists()]
        files |= {path.name: path.read_bytes().decode() for path in beside_weights}
        if replay.base:
            known = read_json(parent / "manifest.json") if replay.manifest else {}
            files["manifest.json"] = to_text({**known, "replay": told}) + "\n"
        for file, text in files.items():
            replace_text(folder / file, text)
        if replay.base:
            theirs, own = (
                checkpoint_path(f / "checkpoints", replay.base) for f in (parent, folder)
            )
            try:
                os.link(theirs, own)
            except OSError:  # on another disk
                with open(theirs, "rb") as source, replacing(own) as file:
                    shutil.copyfileobj(source, file)
    finally:
        lock.release()
    return folder


# ---- the training of a replay -------------------------------------------------------------------


def passed_on(flags: Sequence[str]) -> Settings:
    """Parse flags of needle train with which a run is trained again. One that names another folder
    ends the program with exit code 2."""
    given = parse(flags)
    for name in ("resume", "out", "name"):
        if getattr(given, name) != getattr(Settings, name):
            refuse_flag(name, "the steps are trained in a folder of their own")
    return given


@argument_type
def launcher(text: str) -> str:
    """The type of --launch."""
    shlex.split(text)  # a ValueError for a quotation that does not close
    return text


def training(folder: Path, launch: str, flags: Sequence[str]) -> list[str]:
    """Return the command that trains the run in a folder to its end, as `needle train --resume
    auto`. launch: the words before it, as "mpirun -n 2"."""
    program = [*shlex.split(launch), sys.executable, str(find("apps/train_pythia.py"))]
    return [*program, *flags, *again(folder)]


def train(folder: Path, launch: str, flags: Sequence[str], quiet: bool) -> int:
    """Train the run in a folder in a child that dies with this process; return the exit code."""
    parent, output = os.getpid(), subprocess.DEVNULL if quiet else None
    command = training(folder, launch, flags)
    return subprocess.run(command, stdout=output, preexec_fn=lambda: die_with(parent)).returncode


def finish(
    folder: Path, last: int, launch: str = "", flags: Sequence[str] = (), quiet: bool = True
) -> None:
    """Train the run in a folder to its last step. RuntimeError where it ends before, as after a
    signal or an error, whose message is on standard error."""
    code = train(folder, launch, flags, quiet)
    if code or not checkpoint_path(folder / "checkpoints", last).exists():
        raise RuntimeError(f"{folder}: ended before step {last}, with exit code {code}")


def become_training(folder: Path, launch: str, flags: Sequence[str]) -> NoReturn:
    """Train the run in a folder in the place of this process, which signals then reach."""
    sys.stdout.flush()
    command = training(folder, launch, flags)
    os.execvp(command[0], command)


@contextlib.contextmanager
def trained(
    replay: Replay, launch: str, flags: Sequence[str], out: Path | None = None
) -> Iterator[tuple[Path, dict]]:
    """Train a replay in a folder beside its parent's, or in `out`, which the block reads, and
    compare the lines of both (`differing`). RuntimeError where the training ends before its last
    step."""
    parent = Path(replay.parent)
    with beside((out or parent.parent) / parent.name) as made:
        folder = make_folder(replay, made, "again")
        finish(folder, replay.stop or replay.until, launch, flags)
        yield folder, differing(parent, folder)


def refuse(parent: str, found: dict[int, dict[str, tuple[Any, Any]]]) -> None:
    """Raise DataError where a replay without edits differs from its parent. found: by
    `differing`."""
    for step, facts in found.items():
        text = "; ".join(f"step {step}: {key} is {a}, not {b}" for key, (a, b) in facts.items())
        more = "`needle verify` says what else differs, as the library of products"
        raise DataError(f"without edits, a replay differs from {parent}: {text}; {more}")


def check(replay: Replay, data_path: str | None = None) -> tuple[Replay, list[str]]:
    """Find the places of the edits. Return the replay that names them, and the plan in lines.
    data_path: where the data of the parent lie now.
    DataError for an edit that names nothing. A run that an edit names becomes its newest checkpoint
    now: the run may go on."""
    parent = Path(replay.parent)
    data, batches, settings = open_run_data(parent, data_path)
    if replay.base:  # its position knows the order of the data
        file = checkpoint_path(parent / "checkpoints", replay.base)
        batches.seek(Checkpoint(file).state["data"])
    edits = replay.begin(data, batches, settings["micro_batches"])
    model = described_config(parent / "config.json").meta_model(cpu())
    sizes = {name: p.size for name, p in model.named_parameters()}
    lines = edits.describe()
    file = lambda edit: {"from": str(find_checkpoint(edit["from"]).path)} if "from" in edit else {}
    checked = [edit | file(edit) for edit in edits.checked]
    for edit in checked:
        values = values_of(edit, sizes)
        if edit["do"] in TRAINING:
            says, count = [f"{key} {edit[key]}" for key in edit if key != "do"], len(values) // 2
            says += [f"{count} parameters, before step {replay.start + 1}"] if count else []
            lines.append(f"{edit['do']}: {', '.join(says)}")
    return dataclasses.replace(replay, edits=checked), lines


def begun(
    replay: Replay,
    out: Path,
    name: str | None,
    launch: str = "",
    flags: Sequence[str] = (),
    controls: bool = True,
) -> tuple[Path, str]:
    """Make the folder of a replay, after the control (its first steps without edits), or find that
    in which it was begun before; return it, and what is to be told of it. DataError where another
    run has it, and where the control differs from the parent."""
    if name is not None:
        if read_replay(out / name, max(whole_steps(out / name))) == replay:
            return out / name, f"{out / name}: this replay was begun before, and goes on"
        check_free(out / name)
    told = ""
    if replay.edits and controls:
        last = max(Log(Path(replay.parent) / "metrics.jsonl").steps, default=0)
        until = min(replay.start + CONTROL, replay.until, last)
        told = f"no control: {replay.parent} tells of no step after {replay.start}"
    if told and until > replay.start:
        out.mkdir(parents=True, exist_ok=True)
        control = dataclasses.replace(replay, until=until, edits=[])
        with trained(control, launch, flags, out) as again:
            refuse(replay.parent, again[1])
        told = f"control: {until - replay.start} steps without edits have equal bits"
    return make_folder(replay, out, name), told
