"""Proofs of a run: manifest.json, and the lines of proof of metrics.jsonl (docs/replay.md).

A digest is the BLAKE2s-256 of a tree. The leaves of a flat buffer, 1,024 bytes each, are hashed on
the device where they lie, by the rank that owns them; so are the leaves of these hashes, until 64
KiB or less are left, which the host hashes. It does not depend on the number of ranks.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from needle import _C
from needle._C import NDArray, cpu
from needle.backend_ndarray import as_bytes
from needle.checkpoint import Checkpoint, CheckpointError, versions
from needle.data import Batches
from needle.distributed.data_parallel import DataParallel
from needle.files import FileError, MissingFileError, read_json, reading

LEAF = 1024  # bytes, as csrc/blake2s.h has it
WORDS = 8  # of a hash
TOP = 1 << 16  # bytes of hashes that the host hashes
# What the line of a step tells beside its times.
OF_STEP = ("loss", "lr", "grad_norm", "val_loss", "val_bits_per_byte")


# ---- digests -----------------------------------------------------------------------------------


def _leaves(data: NDArray) -> NDArray:
    """Return the hashes (L, 8) of the leaves of bytes (N,), int32."""
    hashes = _C.empty((-(-data.size // LEAF), WORDS), "int32", data.device)
    _C.leaf_hashes(data, hashes)
    return hashes


def _part(array: NDArray, part: slice) -> NDArray:
    """Return a part of a flat array as bytes; in whole leaves, except at the end."""
    width = array.nbytes // max(array.size, 1)
    return as_bytes(array)[part.start * width : part.stop * width]


def digest(array: NDArray) -> str:
    """Return the digest of a flat array."""
    return _top(_upper(_leaves(as_bytes(array))).numpy())


def _upper(hashes: NDArray) -> NDArray:
    while hashes.nbytes > TOP:
        hashes = _leaves(as_bytes(hashes))
    return hashes


def digests_of(checkpoint: Checkpoint) -> dict[str, str]:
    """Return what a line of proof says of the arrays in a checkpoint. CheckpointError for one of no
    run."""
    optimizer: Any = checkpoint.restore(cpu())[1]
    if optimizer is None or optimizer.flat is None:
        raise CheckpointError(f"{checkpoint.path}: no checkpoint from which a run goes on")
    arrays = {"weights": optimizer.flat.data, **optimizer.kept()}
    return {name: digest(array) for name, array in arrays.items()}


def digests(parallel: DataParallel) -> Callable[[], dict[str, str]]:
    """Begin the digests of weights and moments, on all ranks, behind what is queued on the device;
    the function that is returned waits for them."""
    own = parallel.shards[parallel.group.rank]
    flat, state = parallel.flat.data, parallel.optimizer.kept()
    parts = {"weights": _part(flat, own)} | {name: as_bytes(state[name]) for name in sorted(state)}
    copies = {}
    for name, data in parts.items():
        hashes = _leaves(data)
        if parallel.group.size > 1:
            width = flat.nbytes // flat.size if name == "weights" else 4
            hashes = _of_all_ranks(parallel, hashes, width)
        copies[name] = _C.AsyncCopy(_upper(hashes))

    def wait() -> dict[str, str]:
        return {name: _top(copy.wait().numpy()) for name, copy in copies.items()}

    return wait


def _of_all_ranks(parallel: DataParallel, own: NDArray, width: int) -> NDArray:
    """Return the hashes of all leaves of an array of so many bytes an element, of which each rank
    has those of its shard."""
    leaf = LEAF // width
    rows = [slice(part.start // leaf, -(-part.stop // leaf)) for part in parallel.shards]
    hashes = _C.empty((rows[-1].stop * WORDS,), "int32", own.device)
    places = [slice(part.start * WORDS, part.stop * WORDS) for part in rows]
    _C.assign(hashes[places[parallel.group.rank]], own.reshape((own.size,)))
    parallel.group.all_gather("the digests", hashes, places)
    return hashes.reshape((rows[-1].stop, WORDS))


def _top(hashes: np.ndarray) -> str:
    return hashlib.blake2s(hashes.astype("<i4").tobytes()).hexdigest()


# ---- lines of proof ----------------------------------------------------------------------------


def batch_hash(batches: Batches, position: dict[str, int], micro_batches: int) -> str:
    """Return the hash of the step that begins at a position of the data."""
    whole, found = batches.copy(position), hashlib.sha256()
    for _ in range(micro_batches):
        for ids in whole.next():
            found.update(ids.astype("<i4").tobytes())
    return found.hexdigest()


class Chain:
    """The hash of the lines since the last line of proof, itself included."""

    def __init__(self, lines: list[str]) -> None:
        self._since = hashlib.sha256()
        for line in lines:
            self.add(line)

    def add(self, line: str) -> None:
        """Take in a line of the file, without its end."""
        if is_proof(json.loads(line)):
            self._since = hashlib.sha256()
        self._since.update(line.encode() + b"\n")

    @property
    def previous(self) -> str:
        """What the next line of proof says of the lines before it."""
        return self._since.hexdigest()


def is_proof(line: Any) -> bool:
    """True for the value of a line of proof."""
    kinds = {"step": int, "position": dict, "digest": dict, "previous": str}
    if not isinstance(line, dict) or any(type(line.get(key)) is not kinds[key] for key in kinds):
        return False
    return {"weights", "m", "v"} <= line["digest"].keys()


def parsed(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield text and value of the lines of metrics.jsonl, but for those that a kill or a full disk
    has damaged."""
    try:
        with reading(path) as file:
            texts = file.read().splitlines()
    except MissingFileError:
        return
    for text in texts:
        with contextlib.suppress(ValueError, RecursionError):
            yield text.decode(), json.loads(text)


def broken_links(path: Path) -> list[tuple[int, int]]:
    """Return the lines of proof of metrics.jsonl that do not say what stands before them, each by
    the step of the line of proof before (0: there is none) and its own."""
    chain, last, found = Chain([]), 0, []
    for text, line in parsed(path):
        if is_proof(line):
            if line["previous"] != chain.previous:
                found.append((last, line["step"]))
            last = line["step"]
        chain.add(text)
    return found


def told(path: Path) -> dict[int, dict[str, Any]]:
    """Return what metrics.jsonl tells of each step, but for its times."""
    steps: dict[int, dict[str, Any]] = {}
    for _, line in parsed(path):
        if isinstance(line, dict) and type(line.get("step")) is int:
            names = ("position", "batch", "scale") if is_proof(line) else OF_STEP
            facts = {name: line[name] for name in names if name in line}
            if is_proof(line):
                facts |= {"rate of the proof": line.get("lr")}
                facts |= {f"digest of {name}": value for name, value in line["digest"].items()}
            steps.setdefault(line["step"], {}).update(facts)
    return steps


def differing(one: Path, other: Path, steps: range) -> dict[int, dict[str, tuple[Any, Any]]]:
    """Return, of each step that the logs of two runs tell differently, by name the two values that
    differ; what only one of them tells is no difference."""
    mine, theirs = (told(run / "metrics.jsonl") for run in (one, other))
    found: dict[int, dict[str, tuple[Any, Any]]] = {}
    for step in steps:
        a, b = mine.get(step, {}), theirs.get(step, {})
        wrong = {key: (a[key], b[key]) for key in a if key in b and a[key] != b[key]}
        found |= {step: wrong} if wrong else {}
    return found


# ---- the manifest ------------------------------------------------------------------------------


def canonical(value: Any) -> Any:
    """Return JSON values without binary floats: these as float.hex. Objects are sorted by
    `to_text`."""
    if isinstance(value, float):
        return value.hex()
    if isinstance(value, dict):
        return {str(key): canonical(item) for key, item in value.items()}
    return [canonical(item) for item in value] if isinstance(value, (list, tuple)) else value


def to_text(value: Any) -> str:
    """Return the canonical JSON of a value: equal values have equal bytes."""
    return json.dumps(canonical(value), sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def manifest(description: dict[str, Any], products: str, tokenizer: str | None, digest: str) -> str:
    """Return the text of manifest.json, from what config.json says of the run.

    products: the library and the table of algorithms, and on a GPU its kind. tokenizer: the text of
    tokenizer.json. digest: of the weights before the first step."""
    facts = {
        "recipe": description["recipe"],
        "settings": description["settings"],
        "model": description["model"],
        "optimizer": description["optimizer"],
        "data": description["data"],
        "tokenizer": tokenizer and hashlib.sha256(tokenizer.encode()).hexdigest(),
        "commit": commit(),
        "versions": versions(),
        "products": products,
        "device": description["device"]["name"],
        "weights": digest,
    }
    facts |= {"replay": description["replay"]} if "replay" in description else {}
    return to_text(facts) + "\n"


def git(*words: str) -> str:
    """Return what git says of the checkout; nothing of an installed package."""
    root = Path(__file__).resolve().parents[3]
    if (root / ".git").exists():
        with contextlib.suppress(OSError):
            command = ["git", "-C", str(root), *words]
            return subprocess.run(command, capture_output=True, text=True).stdout.strip()
    return ""


def commit() -> str | None:
    """Return the commit of the checkout, with a + where files were changed since; None of an
    installed package."""
    head = git("rev-parse", "HEAD")
    return head + "+" * bool(git("status", "--porcelain", "-uno")) if head else None


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """Return what manifest.json of a run holds; None of a run without one."""
    try:
        return read_json(folder / "manifest.json")
    except MissingFileError:
        return None
    except FileError as error:
        raise FileError(f"{error}: its run can be verified without it: remove it") from error
