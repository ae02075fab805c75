"""Proofs of a run: manifest.json, and the lines of proof of metrics.jsonl (docs/replay.md).

A digest is the BLAKE2s-256 of a tree. The leaves of a flat buffer, 1,024 bytes each, are hashed on
the device where they lie, by the rank that owns them; so are the leaves of these hashes, until 64
KiB or less are left, which the host hashes. It does not depend on the number of ranks.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from needle import _C
from needle._C import NDArray, cpu
from needle.backend_ndarray import as_bytes
from needle.checkpoint import Checkpoint, CheckpointError
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
    group, flat, copies = parallel.group, parallel.flat.data, {}
    for name, x in [("weights", flat), *sorted(parallel.optimizer.kept().items())]:
        data = as_bytes(x)
        width = flat.nbytes // flat.size if x is flat else 4
        leaf = LEAF // width  # numbers
        rows = [
            [slice(part.start // leaf, -(-part.stop // leaf)) for part in parts]
            for parts in parallel.shards
        ]
        hashes = _C.empty((-(-flat.size // leaf), WORDS), "int32", data.device)
        for region, own in zip(parallel.regions, rows[group.rank]):
            part = region.shards[group.rank] if x is flat else region.own
            if part.start < part.stop:
                _C.leaf_hashes(data[part.start * width : part.stop * width], hashes[own])
        group.all_gather("the digests", hashes, rows)
        copies[name] = _C.AsyncCopy(_upper(hashes))

    def wait() -> dict[str, str]:
        return {name: _top(copy.wait().numpy()) for name, copy in copies.items()}

    return wait


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


def chained(chain: Any, text: str, is_proof: bool) -> Any:
    """Return the hash of the lines since the last line of proof, itself included, with one more.
    Its hexdigest() is `previous` of the next line of proof."""
    chain = hashlib.sha256() if is_proof else chain
    chain.update(text.encode() + b"\n")
    return chain


class Log:
    """The lines of a file metrics.jsonl, up to a step, but for those that a kill or a full disk has
    damaged.

    texts   of the lines of steps and of proof
    steps   step -> the line that tells of it
    proofs  step -> its line of proof
    broken  the lines of proof that do not say what stands before them, each by the step of the line
            of proof before (0: there is none) and its own
    chain   of all lines that are JSON, as `chained` makes it
    strange (step, what is wrong) of the lines after a step that no run writes: of no step, of one
            that was told before, and no JSON, but for the last line
    """

    def __init__(self, path: Path, until: float = math.inf) -> None:
        self.texts: list[str] = []
        self.steps: dict[int, dict[str, Any]] = {}
        self.proofs: dict[int, dict[str, Any]] = {}
        self.broken: list[tuple[int, int]] = []
        self.strange: list[tuple[int, str]] = []
        self.chain, contents, unread = hashlib.sha256(), [], False
        with contextlib.suppress(MissingFileError), reading(path) as file:
            contents = file.read().splitlines()
        for content in contents:
            before = next(reversed(self.steps), 0)
            if unread:
                self.strange.append((before, "is no JSON"))
            try:
                text, line, unread = content.decode(), json.loads(content), False
            except (ValueError, RecursionError):
                unread = True
                continue
            lines = self._lines_like(line)
            is_proof = lines is self.proofs
            if lines is None:
                self.strange.append((before, "is of no step"))
            elif line["step"] > until:
                continue
            else:
                if line["step"] in lines:
                    self.strange.append((before, "tells of a step again"))
                elif is_proof and line["previous"] != self.chain.hexdigest():
                    self.broken.append((max(self.proofs, default=0), line["step"]))
                self.texts.append(text)
                lines.pop(line["step"], None)  # the last line of a step counts, and is the last
                lines[line["step"]] = line
            self.chain = chained(self.chain, text, is_proof)

    def _lines_like(self, line: Any) -> dict[int, dict[str, Any]] | None:
        """Return `proofs` or `steps`, where such a line belongs; None for one of neither."""
        if not isinstance(line, dict):
            return None
        kinds = {"step": int, "position": dict, "digest": dict, "previous": str}
        if all(type(line.get(key)) is kind for key, kind in kinds.items()):
            return self.proofs if {"weights", "m", "v"} <= line["digest"].keys() else None
        whole = {"step", "tokens"} <= {key for key, x in line.items() if type(x) is int}
        numbers = all(type(x) is float or type(x) is int and abs(x) < 2**63 for x in line.values())
        return self.steps if whole and numbers and "loss" in line else None

    def told(self, step: int) -> dict[str, Any]:
        """Return what the lines tell of a step, but for its times."""
        line, proof = self.steps.get(step, {}), self.proofs.get(step, {})
        facts = {name: line[name] for name in OF_STEP if name in line}
        facts |= {name: proof[name] for name in ("position", "batch", "scale") if name in proof}
        facts |= {"rate of the proof": proof.get("lr")} if proof else {}
        digests = proof.get("digest", {}).items()
        return facts | {f"digest of {name}": value for name, value in digests}


def differing(one: Path, other: Path) -> dict[int, dict[str, tuple[Any, Any]]]:
    """Return, of each step that the logs of two runs tell differently, in order, by name the two
    values that differ; what only one of them tells is no difference."""
    logs = [Log(run / "metrics.jsonl") for run in (one, other)]
    found: dict[int, dict[str, tuple[Any, Any]]] = {}
    for step in sorted(logs[1].steps.keys() | logs[1].proofs.keys()):
        a, b = (log.told(step) for log in logs)
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
    keys = ("recipe", "settings", "model", "optimizer", "data", "versions", "replay")
    facts = {key: description[key] for key in keys if key in description}
    facts |= {"products": products, "device": description["device"]["name"], "weights": digest}
    facts["tokenizer"] = tokenizer and hashlib.sha256(tokenizer.encode()).hexdigest()
    return to_text(facts | {"commit": commit()}) + "\n"


def git(*words: str) -> str:
    """Return what git says of the checkout; nothing of an installed package."""
    root = Path(__file__).resolve().parents[3]
    if (root / ".git").exists():
        with contextlib.suppress(OSError):
            command = ["git", "-C", str(root), *words]
            return subprocess.run(command, capture_output=True, text=True).stdout.strip()
    return ""


def commit() -> str:
    """Return the commit of the checkout, or that of which an installed package was built, with a +
    where files were changed since; "unknown" of a package that was built without git."""
    words = "describe", "--always", "--exclude=*", "--abbrev=40", "--dirty=+"
    return git(*words) or _C.build_info()["commit"]


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """Return what manifest.json of a run holds; None of a run without one."""
    try:
        return read_json(folder / "manifest.json")
    except MissingFileError:
        return None
    except FileError as error:
        raise FileError(f"{error}: its run can be verified without it: remove it") from error
