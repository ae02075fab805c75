"""Text to Megatron's .bin/.idx, in parallel, resumable.

    inputs --> units (a stretch of a JSON file, a packed file, some text files)
           --> OUT.parts/N.bin, N.sizes   each written under another name, synced, and renamed
           --> OUT.bin, OUT.idx           the parts in order, then the parts are removed

The cut into units depends on the inputs alone, so the result is the same for any number of
processes, and a run that was killed goes on with the units that are missing. OUT.idx appears last:
where it is, all is whole. Processes are spawned: OpenMP's threads do not survive a fork.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import multiprocessing
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import astuple, dataclass
from multiprocessing.connection import wait
from pathlib import Path

import numpy as np

from needle.data import megatron
from needle.data.identity import check_unchanged, content_hash, whole
from needle.data.text import (
    Piece,
    documents,
    encode,
    files_at,
    id_limit,
    is_json_lines,
    is_packed,
    json_lines,
    load_tokenizer,
    named,
    pieces,
    warn,
)
from needle.data.tokens import DataError
from needle.files import replacing

UNIT = 1 << 24  # bytes of input
LONGEST = 2**31 - 1  # tokens of a document: sizes are int32
Progress = Callable[[int, int], None]  # (done, of)


@dataclass
class Unit:
    """Files, or the lines that begin at bytes [start, stop) of one."""

    files: list[str]
    field: str  # of JSON lines
    start: int = 0
    stop: int | None = None

    def pieces(self) -> Iterator[Piece]:
        if self.stop is None:
            yield from documents([Path(name) for name in self.files], warn, self.field)
            return
        for text in json_lines(Path(self.files[0]), self.field, self.start, self.stop):
            yield from pieces([text])


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
    units, group, held = [], [], 0
    for file in files:
        length = file.stat().st_size
        if is_json_lines(file) and not is_packed(file):
            if group:
                units.append(Unit(group, field))
                group, held = [], 0
            units += [
                Unit([str(file)], field, start, min(start + size, length))
                for start in range(0, length, size)
            ]
            continue
        group.append(str(file))
        held += length
        if held >= size:
            units.append(Unit(group, field))
            group, held = [], 0
    return units + ([Unit(group, field)] if group else [])


def prepare(
    inputs: Sequence[str],
    tokenizer: str,
    out: str,
    processes: int | None = None,
    progress: Progress | None = None,
    field: str = "text",
) -> dict[str, int]:
    """Writes OUT.bin and OUT.idx; returns their numbers of documents and tokens.

    field: of JSON lines, which holds a document's text.
    progress(done, of): called after each unit. Raises DataError, also where OUT is there and whole;
    what was done stays for the next try."""
    prefix = named(out[:-4] if out.endswith((".bin", ".idx")) else out)
    model = load_tokenizer(tokenizer)
    files = input_files(inputs)
    if field != "text" and not any(map(is_json_lines, files)):
        raise DataError(f"--field {field}: none of the inputs is a file of JSON lines (.jsonl)")
    units = cut(files, UNIT, field)
    dtype = megatron.best_dtype(id_limit(model))
    read = [whole(file) for file in files]
    facts = [UNIT, [astuple(unit) for unit in units], [text.end for text in read]]
    digest = hashlib.sha256(json.dumps([*facts, content_hash(read), model.to_str()]).encode())
    parts, plan = Path(f"{prefix}.parts"), digest.hexdigest()
    for made in (Path(f"{prefix}.idx"), Path(f"{prefix}.bin")):
        if made.exists() and not _is_plan(parts, plan):
            raise DataError(f"{made}: exists already; remove it, or choose another --out")
    lock = _begin(parts, plan)
    try:
        _encode_missing(parts, units, tokenizer, dtype, processes, progress)
        try:
            check_unchanged(read)
        except DataError:
            shutil.rmtree(parts)  # some may be of what the inputs were
            raise
        return _merge(parts, len(units), dtype, prefix)
    finally:
        os.close(lock)


def _encode_missing(
    parts: Path,
    units: list[Unit],
    tokenizer: str,
    dtype: np.dtype,
    processes: int | None,
    progress: Progress | None,
) -> None:
    missing = [i for i in range(len(units)) if not (parts / f"{i}.sizes").is_file()]
    report = progress or (lambda done, of: None)
    done = len(units) - len(missing)
    report(done, len(units))
    encoded = _encode_all(units, missing, str(tokenizer), dtype, parts, processes)
    for now_done, _ in enumerate(encoded, done + 1):
        report(now_done, len(units))


def _is_plan(parts: Path, plan: str) -> bool:
    """Whether the folder holds parts of the same inputs."""
    note = parts / "plan"
    return note.is_file() and note.read_text() == plan


def _begin(parts: Path, plan: str) -> int:
    """The folder of the parts, emptied where it belongs to other inputs, and locked: the descriptor
    that holds the lock, which ends with the process."""
    try:
        parts.mkdir(parents=True, exist_ok=True)
        lock = os.open(parts, os.O_RDONLY)
    except OSError as error:
        raise DataError(f"{parts}: cannot be made: {error.strerror}") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not _is_plan(parts, plan):
            for path in parts.iterdir():
                path.unlink()
            with replacing(parts / "plan") as file:
                file.write(plan.encode())
        return lock
    except OSError as error:
        os.close(lock)
        problem = (
            "another process works on it"
            if isinstance(error, BlockingIOError)
            else f"cannot be written: {error.strerror}"
        )
        raise DataError(f"{parts}: {problem}") from error


def _encode_all(
    units: list[Unit],
    missing: list[int],
    tokenizer: str,
    dtype: np.dtype,
    parts: Path,
    processes: int | None,
) -> Iterator[int]:
    workers = min(processes or os.cpu_count() or 1, len(missing))
    if workers <= 1:
        model = load_tokenizer(tokenizer)
        for number in missing:
            yield _encode_unit(model, units[number], number, dtype, parts)
        return
    others = set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(
        workers, multiprocessing.get_context("spawn"), _worker_start, (tokenizer,)
    )
    try:
        with _deaf_to_ctrl_c():
            futures = [
                pool.submit(_worker_unit, units[i], i, dtype.str, str(parts)) for i in missing
            ]
        for future in as_completed(futures):
            yield future.result()
    except KeyboardInterrupt:  # what they have begun is done again; nobody waits for it now
        for worker in set(multiprocessing.active_children()) - others:
            worker.terminate()
        raise
    except BrokenProcessPool as error:
        raise DataError(
            "a process ended without a word (out of memory?); start again, what is "
            "done stays: fewer --processes need less memory"
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


@contextlib.contextmanager
def _deaf_to_ctrl_c() -> Iterator[None]:
    """Ctrl-C reaches all processes of a terminal: workers that start in here inherit the mask and
    are deaf to it for good; this process hears it behind, as a KeyboardInterrupt. The mask is this
    thread's alone: where another takes the signal, the handler keeps it from cutting a start in
    two, which the worker would answer with a traceback."""
    is_main, heard = threading.current_thread() is threading.main_thread(), []
    if is_main:
        handler = signal.signal(signal.SIGINT, lambda number, frame: heard.append(number))
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if is_main:
            signal.signal(signal.SIGINT, handler)
    if heard:
        raise KeyboardInterrupt


_worker_tokenizer = None  # of this process, where it is a worker


def _worker_start(tokenizer: str) -> None:
    global _worker_tokenizer
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    _worker_tokenizer = load_tokenizer(tokenizer)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """A killed parent cannot tell its workers to end."""
    wait([multiprocessing.parent_process().sentinel])
    os._exit(1)


def _worker_unit(unit: Unit, number: int, dtype: str, parts: str) -> int:
    return _encode_unit(_worker_tokenizer, unit, number, np.dtype(dtype), Path(parts))


def _encode_unit(tokenizer, unit: Unit, number: int, dtype: np.dtype, parts: Path) -> int:
    """N.bin, then N.sizes: where the second is, the first is whole."""
    sizes, size = [], 0
    with replacing(parts / f"{number}.bin") as file:
        for ids, last in encode(tokenizer, unit.pieces(), dtype):
            file.write(ids)
            size += len(ids)
            if size > LONGEST:
                raise DataError(
                    f"{', '.join(unit.files)}: a document of more than {LONGEST:,} "
                    "tokens, which .idx cannot say: split it"
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


def progress_bar() -> tuple[Progress, Callable[[], None]]:
    """(progress for `prepare`, a function that ends it): tqdm on a terminal, else plain lines."""
    try:
        from tqdm import tqdm
    except ImportError:
        tqdm = None
    if tqdm is None or not sys.stderr.isatty():
        return lambda done, of: print(f"{done} of {of} parts", flush=True), lambda: None
    bar = tqdm(unit="part", desc="tokenising", dynamic_ncols=True)

    def show(done: int, of: int) -> None:
        if bar.total is None:
            bar.reset(of)
            bar.initial = done
        bar.update(done - bar.n)

    return show, bar.close
