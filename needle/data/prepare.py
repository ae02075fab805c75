"""Text to Megatron's .bin/.idx, in parallel, resumable.

    inputs --> units (a stretch of a JSON file, a packed file, some text files)
           --> OUT.parts/N.bin, N.sizes   each written under another name, synced, and renamed
           --> OUT.bin, OUT.idx           the parts in order, then the parts are removed

The cut into units depends on the inputs alone. So the result is the same for any number of
processes, and a killed run continues with the missing units. OUT.idx appears last: where it exists,
all is whole. Processes are spawned: OpenMP's threads do not survive a fork.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import multiprocessing
import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from needle.data import megatron
from needle.data.identity import check_unchanged, content_hash, whole
from needle.data.text import (
    Chunk,
    chunks,
    documents,
    encode,
    files_at,
    is_json_lines,
    is_packed,
    json_lines,
    warn,
)
from needle.data.tokenizer import Tokenizer, id_limit, load_tokenizer
from needle.data.tokens import DataError
from needle.files import Lock, named, replacing
from needle.processes import die_with

UNIT = 1 << 24  # bytes of input
LONGEST = 2**31 - 1  # tokens of a document: sizes are int32
Progress = Callable[[Iterable, int, int], Iterable]  # (units as they are done, done before, of)


@dataclass
class Unit:
    """Files, or the lines that begin at bytes [start, stop) of one."""

    files: list[str]
    field: str  # of JSON lines
    start: int = 0
    stop: int | None = None

    def chunks(self) -> Iterator[Chunk]:
        if self.stop is None:
            yield from documents([Path(name) for name in self.files], warn, self.field)
            return
        for text in json_lines(Path(self.files[0]), self.field, self.start, self.stop):
            yield from chunks([text])


def input_files(inputs: Sequence[str]) -> list[Path]:
    """The files that the command line names: files, folders, patterns; in that order."""
    files = []
    for name in inputs:
        found = files_at(named(name))
        if not found:
            raise DataError(f"{name}: no such file, and no file matches it")
        files += [file.resolve() for file in found]
    return files


def cut(files: Sequence[Path], size: int, field: str = "text") -> list[Unit]:
    """Units of about `size` bytes."""
    units: list[Unit] = []
    group, held = [], 0
    for file in files:
        length = file.stat().st_size
        splits = is_json_lines(file) and not is_packed(file)
        if not splits:
            group.append(str(file))
            held += length
        if group and (splits or held >= size):
            units.append(Unit(group, field))
            group, held = [], 0
        if splits:
            units += [
                Unit([str(file)], field, start, min(start + size, length))
                for start in range(0, length, size)
            ]
    return units + ([Unit(group, field)] if group else [])


def prepare(
    inputs: Sequence[str],
    tokenizer: Any,
    out: str,
    processes: int | None = None,
    progress: Progress = lambda units, done, of: units,
    field: str = "text",
) -> dict[str, int]:
    """Writes OUT.bin and OUT.idx; returns their numbers of documents and tokens.

    tokenizer: as load_tokenizer takes it; its end of text ends each document. field: of JSON lines,
    which holds a document's text. progress(units, done, of): gives `units` on as they are done,
    `done` of them before. Raises DataError, also where OUT is there and whole; what was done stays
    for the next try."""
    prefix = named(out[:-4] if out.endswith((".bin", ".idx")) else out)
    model = load_tokenizer(tokenizer)
    files = input_files(inputs)
    if field != "text" and not any(map(is_json_lines, files)):
        raise DataError(f"--field {field}: none of the inputs is a file of JSON lines (.jsonl)")
    units = cut(files, UNIT, field)
    dtype = megatron.best_dtype(id_limit(model))
    read = [whole(file) for file in files]
    facts = [UNIT, [astuple(unit) for unit in units], [text.end for text in read]]
    facts += [content_hash(read), model.to_str(), model.eos_token_id]
    digest = hashlib.sha256(json.dumps(facts).encode())
    parts, plan = Path(f"{prefix}.parts"), digest.hexdigest()
    for made in (Path(f"{prefix}.idx"), Path(f"{prefix}.bin")):
        if made.exists() and not _is_plan(parts, plan):
            raise DataError(f"{made}: exists already; remove it, or choose another --out")
    lock = _begin(parts, plan)
    try:
        missing = [i for i in range(len(units)) if not (parts / f"{i}.sizes").is_file()]
        encoded = _encode_all(units, missing, model, dtype, parts, processes)
        for _ in progress(encoded, len(units) - len(missing), len(units)):
            pass
        try:
            check_unchanged(read)
        except DataError:
            shutil.rmtree(parts)  # some may be of older inputs
            raise
        return _merge(parts, len(units), dtype, prefix)
    finally:
        lock.release()


def _is_plan(parts: Path, plan: str) -> bool:
    """True if the folder holds parts of the same inputs."""
    note = parts / "plan"
    return note.is_file() and note.read_text() == plan


def _begin(parts: Path, plan: str) -> Lock:
    """Lock the folder of the parts, and empty it where it belongs to other inputs."""
    try:
        parts.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"{parts}: cannot be made: {error.strerror}") from error
    lock = Lock(parts)
    if not _is_plan(parts, plan):
        for path in [*parts.glob("*.sizes"), *parts.glob("*.bin")]:
            path.unlink()
        with replacing(parts / "plan") as file:
            file.write(plan.encode())
    return lock


def _encode_all(
    units: list[Unit],
    missing: list[int],
    tokenizer: Tokenizer,
    dtype: np.dtype,
    parts: Path,
    processes: int | None,
) -> Iterator[int]:
    workers = min(processes or os.cpu_count() or 1, len(missing))
    if workers <= 1:
        for number in missing:
            yield _encode_unit(tokenizer, units[number], number, dtype, parts)
        return
    spawn, start = multiprocessing.get_context("spawn"), (tokenizer, os.getpid())
    with _block_sigint():  # a semaphore made halfway would never be removed
        pool = ProcessPoolExecutor(workers, spawn, _worker_start, start)
    try:
        with _block_sigint():
            futures = [
                pool.submit(_worker_unit, units[i], i, dtype.str, str(parts)) for i in missing
            ]
        for future in as_completed(futures):
            yield future.result()
    except KeyboardInterrupt:  # unfinished units are done again the next time
        for worker in multiprocessing.active_children():
            worker.terminate()
        raise
    except BrokenProcessPool as error:
        raise DataError(
            "a process was killed (out of memory?); start again, what is done stays: fewer "
            "--processes need less memory"
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


@contextlib.contextmanager
def _block_sigint() -> Iterator[None]:
    """Processes that start in the block never get the Ctrl-C of their terminal. This one gets it
    after the block, since it must not interrupt a start halfway. The first semaphore of all starts
    a process of multiprocessing's own and unblocks the signal: make it in a block before."""
    if threading.current_thread() is not threading.main_thread():
        yield  # Python interrupts the main thread alone
        return
    pending: list[int] = []
    handler = signal.signal(signal.SIGINT, lambda number, frame: pending.append(number))
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal.signal(signal.SIGINT, handler)
    if pending:
        raise KeyboardInterrupt


_worker_tokenizer: Tokenizer  # of this process, where it is a worker


def _worker_start(tokenizer: Tokenizer, parent: int) -> None:
    global _worker_tokenizer
    die_with(parent)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    _worker_tokenizer = tokenizer


def _worker_unit(unit: Unit, number: int, dtype: str, parts: str) -> int:
    return _encode_unit(_worker_tokenizer, unit, number, np.dtype(dtype), Path(parts))


def _encode_unit(
    tokenizer: Tokenizer, unit: Unit, number: int, dtype: np.dtype, parts: Path
) -> int:
    """N.bin, then N.sizes: where the second is, the first is whole."""
    sizes, size = [], 0
    with replacing(parts / f"{number}.bin") as file:
        for ids, last in encode(tokenizer, unit.chunks(), dtype):
            file.write(ids)
            size += len(ids)
            if size > LONGEST:
                raise DataError(
                    f"{', '.join(unit.files)}: a document of more than {LONGEST:,} "
                    "tokens, more than an .idx can hold: split it"
                )
            if last and size:  # of a text that has no ids there is nothing to say
                sizes.append(size)
            size = 0 if last else size
    with replacing(parts / f"{number}.sizes") as file:
        file.write(np.array(sizes, "<i4").tobytes())
    return number


def _merge(parts: Path, count: int, dtype: np.dtype, prefix: Path) -> dict[str, int]:
    sizes = [np.fromfile(parts / f"{i}.sizes", "<i4") for i in range(count)]
    every = np.concatenate(sizes) if sizes else np.empty(0, "<i4")
    if len(every) == 0:
        shutil.rmtree(parts)
        raise DataError("no text in the inputs: each file is empty, not UTF-8, or holds zero bytes")
    index = Path(f"{prefix}.idx")
    index.unlink(missing_ok=True)  # of an earlier .bin, which goes now
    with replacing(Path(f"{prefix}.bin")) as file:
        for number, lengths in enumerate(sizes):
            path = parts / f"{number}.bin"
            if path.stat().st_size != int(lengths.sum(dtype=np.int64)) * dtype.itemsize:
                raise DataError(f"{path}: damaged; delete {parts} and start again")
            with open(path, "rb") as part:
                shutil.copyfileobj(part, file, 1 << 24)
    with replacing(index) as file:
        megatron.write_index(file, dtype, every)
    shutil.rmtree(parts)
    return {"documents": len(every), "tokens": int(every.sum(dtype=np.int64))}
