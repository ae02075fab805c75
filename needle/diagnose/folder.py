"""What is in a run's folder, and how to go on: who works there, whether config.json is whole,
the last line of metrics.jsonl, which checkpoint is the newest that is whole, what the supervisor
wrote into faults.jsonl, and the space that is left. Nothing in it is changed.

A line of faults.jsonl is an object with time, step, exit, signal, op, message, action and left_out.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import platform
import re
import shlex
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from needle.checkpoint import Checkpoint, CheckpointError, list_checkpoints, step_of
from needle.diagnose.children import Teller
from needle.diagnose.facts import gigabytes
from needle.files import FileError, reading, regular

TAIL = 1 << 16  # bytes of the end of a file that are looked at
SHOWN = 3  # faults
CHECKED = {False: 2 << 30, True: 64 << 30}  # bytes of checkpoints that are read; with --full
SPARE = 64 << 20  # bytes beside the next checkpoint


def examine(teller: Teller, path: str) -> None:
    """Findings about a run's folder."""
    folder = Path(path)
    teller.at(f"looking into {folder}")
    try:
        names = os.listdir(folder)
    except OSError as error:
        remedy = "give the folder of a run, runs/NAME; see to its permissions"
        teller.failed("folder", f"{folder} cannot be listed: {error.strerror}", remedy)
        return
    if not {"config.json", "checkpoints", "metrics.jsonl"} & set(names):
        remedy = "give the folder that holds config.json and checkpoints/: runs/NAME"
        teller.failed("folder", f"{folder} is not the folder of a run", remedy)
        return
    is_held = lock(teller, folder)
    config = description(teller, folder)
    last = metrics(teller, folder, is_held)
    paths = listed(teller, folder)
    if paths:
        newest, is_open = checkpoints(teller, paths)
    else:
        newest, is_open = None, paths is not None and unsaved(teller, config, last, is_held)
    faults(teller, folder)
    space(teller, folder)
    go_on(teller, folder, is_held, newest, config, is_open)


# ---- who works there --------------------------------------------------------------------------


def lock(teller: Teller, folder: Path) -> bool:
    """Whether somebody holds the folder."""
    teller.at("looking at the lock")
    path = folder / "lock"
    try:
        file = regular(path, os.O_RDONLY)
    except FileNotFoundError:
        teller.ok("lock", "nobody has worked in it yet")
        return False
    except OSError as error:
        teller.failed(
            "lock",
            f"{path} cannot be read: {error.strerror}",
            "see to its permissions, or move it away",
        )
        return False
    try:
        named = os.read(file, 200).decode(errors="replace").strip() or "a process without a name"
        try:
            # Shared, and given up at once: a training that starts meanwhile is refused, so this is
            # as short as can be.
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            fcntl.flock(file, fcntl.LOCK_UN)
        except BlockingIOError:
            held(teller, path, named)
            return True
        except OSError:
            teller.note("lock", f"this file system knows no locks; the last was {named}")
            return False
    finally:
        os.close(file)
    if is_alive(named):
        teller.ok("lock", f"nobody works in it; {named} did last")
    else:
        teller.ok(
            "lock", f"nobody works in it: its lock is a stale name, of {named}, and in no way"
        )
    return False


def held(teller: Teller, path: Path, named: str) -> None:
    openers = [pid for pid in processes_with(path) if pid != os.getpid()]
    if is_alive(named) is not False:
        state = state_of(named)
        teller.ok("lock", f"{named} works in it{state}")
        return
    who = " and ".join(f"process {pid}" for pid in openers) or "one that is not visible from here"
    teller.failed(
        "lock",
        f"{named} is gone, and its lock is still held: by {who}",
        f"end it (kill {' '.join(map(str, openers)) or 'PID'}): it inherited the lock",
    )


def pid_of(named: str) -> int | None:
    """Of "process 123 on host", where that is this host."""
    found = re.fullmatch(r"process (\d+) on (.*)", named)
    return int(found[1]) if found and found[2] == platform.node() else None


def is_alive(named: str) -> bool | None:
    """None where it cannot be known: on another host."""
    pid = pid_of(named)
    return None if pid is None else Path(f"/proc/{pid}").exists()


def state_of(named: str) -> str:
    """ ", but is stopped" and the like."""
    pid = pid_of(named)
    with contextlib.suppress(OSError, IndexError):
        letter = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        words = {"T": "stopped (kill -CONT goes on)", "D": "waiting inside the system", "Z": "dead"}
        return f", but is {words[letter]}" if letter in words else ""
    return ""


def processes_with(path: Path) -> Iterator[int]:
    """Processes that have the file open, of those that may be looked at."""
    wanted = os.stat(path)
    for entry in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):
            found = os.stat(entry)
            if (found.st_dev, found.st_ino) == (wanted.st_dev, wanted.st_ino):
                yield int(entry.parts[2])


# ---- what is in it ----------------------------------------------------------------------------


def description(teller: Teller, folder: Path) -> dict[str, Any]:
    """config.json; empty where there is none that could be used."""
    path = folder / "config.json"
    if not os.path.lexists(path):
        return {}
    try:
        with reading(path) as file:
            found = json.loads(file.read())
        if isinstance(found, dict) and isinstance(found.get("settings"), dict):
            return found
        problem = f"{path}: it does not hold the settings of a run"
    except FileError as error:
        problem = str(error)
    except (ValueError, RecursionError) as error:
        problem = f"{path}: it is no JSON: {error}"
    remedy = "move it away: the checkpoints hold the settings too, and training goes on without it"
    teller.failed("config", problem, remedy)
    return {}


def listed(teller: Teller, folder: Path) -> list[Path] | None:
    """The checkpoints, the newest first; None where the system does not tell."""
    try:
        return list_checkpoints(folder / "checkpoints")
    except CheckpointError as error:
        teller.failed("checkpoints", str(error), "see to the permissions of checkpoints/")
        return None


def unsaved(teller: Teller, config: dict[str, Any], last: dict[str, Any], is_held: bool) -> bool:
    """What it means that there is no checkpoint; whether --resume auto begins anew. It does not
    where there has been one: where config.json does not say that, where there are steps."""
    step, has_saved = last.get("step", 0), bool(config.get("saved", last))
    if has_saved:
        text = f"no checkpoint is left of this run, which came to step {step}"
        remedy = "put one back, or begin anew under another --name, or remove the folder"
        teller.failed("checkpoints", text, remedy)
    elif last and not is_held:
        text = f"there is no checkpoint: the run ended at step {step} before its first"
        remedy = "--resume auto begins anew; a smaller --save-every loses less"
        teller.failed("checkpoints", text, remedy)
    else:
        teller.note("checkpoints", "there is no checkpoint yet")
    return not has_saved


def checkpoints(teller: Teller, paths: list[Path]) -> tuple[Checkpoint | None, bool]:
    """(the newest that is whole, whether --resume auto goes on from it or from one that was not
    read here); with --full the older ones are read too."""
    newest, damaged, unread, room = None, [], [], CHECKED[teller.is_full]
    is_open = True
    for path in paths:
        if newest is not None and not teller.is_full:
            break
        with contextlib.suppress(OSError):
            room -= path.stat().st_size
        if room < 0 or teller.left() < 0:
            unread.append(path.name)
            continue
        teller.at(f"reading {path}")
        try:
            found = Checkpoint(path)
            newest = newest or found
        except CheckpointError as error:
            damaged.append(path)
            older = "an older one" if path is not paths[-1] else "a copy"
            remedy = f"restore it from a copy; --resume auto goes on from {older}"
            if isinstance(error.__cause__, OSError):
                remedy = "make it readable, or move it away to go on from an older one"
                is_open = newest is not None and is_open
            teller.failed("checkpoint", str(error), remedy)
    if unread:
        text = f"not read, for they are large: {', '.join(unread)}"
        teller.note("checkpoints", text + ("" if teller.is_full else "; --full reads more"))
    if newest is not None:
        step = newest.state.get("step", step_of(newest.path))
        size = gigabytes(newest.path.stat().st_size)
        text = f"newest whole checkpoint: {newest.path.name}, step {step}, loss "
        teller.ok("checkpoint", f"{text}{newest.state['loss']:.4f}, {size}")
        teller.fact("checkpoint", {"path": str(newest.path), "step": step})
    elif len(damaged) == len(paths):
        is_open = False
        remedy = "restore one from a copy, or begin under another --name"
        teller.failed("checkpoints", "none of the checkpoints is whole", remedy)
    teller.fact("damaged", [str(path) for path in damaged])
    return newest, is_open


def last_lines(path: Path) -> list[dict[str, Any]]:
    """The objects among the last lines of a file of JSON lines; what is cut off is left out."""
    with open(path, "rb", opener=regular) as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL))
        data = file.read()
    found = []
    for text in data.splitlines():
        try:
            line = json.loads(text)
        except (ValueError, RecursionError):
            continue
        if isinstance(line, dict):
            found.append(line)
    return found


def metrics(teller: Teller, folder: Path, is_held: bool) -> dict[str, Any]:
    """The last line; empty where there is none."""
    teller.at("reading metrics.jsonl")
    path = folder / "metrics.jsonl"
    try:
        lines, age = last_lines(path), time.time() - path.stat().st_mtime
    except FileNotFoundError:
        teller.note("metrics", "there is no metrics.jsonl yet")
        return {}
    except OSError as error:
        teller.failed(
            "metrics", f"{path}: {error.strerror}", "see to its permissions, or move it away"
        )
        return {}
    if not lines:
        teller.note("metrics", "metrics.jsonl has no whole line")
        return {}
    last = lines[-1]
    words = ", ".join(
        f"{key} {last[key]}" for key in ("step", "loss", "tokens_per_second") if key in last
    )
    teller.fact("metrics", last)
    teller.ok("metrics", f"last line of metrics.jsonl: {words}; {ago(age)}")
    if len(lines) > 1 and is_held and isinstance(last.get("tokens_per_second"), (int, float)):
        spans = [b.get("seconds", 0) - a.get("seconds", 0) for a, b in zip(lines, lines[1:])]
        if age > max(60, 20 * max(spans)):
            text = "the run is held, and has written no step for 20 times its longest"
            teller.note("metrics", f"{text}: it hangs, evaluates or saves")
    return last


def ago(seconds: float) -> str:
    for size, unit in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit} ago"
    return f"{max(0, seconds):.0f} s ago"


def faults(teller: Teller, folder: Path) -> None:
    """The last faults that a supervisor saw."""
    path = folder / "faults.jsonl"
    try:
        lines = last_lines(path)
    except FileNotFoundError:
        return
    except OSError as error:
        teller.failed(
            "faults", f"{path}: {error.strerror}", "see to its permissions, or move it away"
        )
        return
    teller.fact("faults", lines)
    for line in lines[-SHOWN:]:
        kinds = ("time", "step", "exit", "signal", "op", "message", "action")
        words = [f"{key} {line[key]}" for key in kinds if line.get(key) is not None]
        if isinstance(line.get("left_out"), dict):
            words += [f"without {gpu}, which {why}" for gpu, why in line["left_out"].items()]
        teller.note("fault", f"a fault: {', '.join(words)}"[:600])
    if len(lines) > SHOWN:
        teller.note("faults", f"and {len(lines) - SHOWN} faults before")


def space(teller: Teller, folder: Path) -> None:
    """Whether the next checkpoint has room: it is written beside the older ones."""
    teller.at("asking for the space that is left")
    disk = os.statvfs(folder)
    free = disk.f_bavail * disk.f_frsize
    with contextlib.suppress(CheckpointError, OSError):
        sizes = [path.stat().st_size for path in list_checkpoints(folder / "checkpoints")]
        needed = max(sizes, default=0) + SPARE
        teller.fact("free", free)
        if disk.f_flag & os.ST_RDONLY or not os.access(folder, os.W_OK):
            text = f"{folder} cannot be written to"
            teller.failed("space", text, "see to its permissions and to how it is mounted")
        elif free < needed:
            text = f"{gigabytes(free)} are free, and the next checkpoint needs {gigabytes(needed)}"
            teller.failed("space", text, "free space on that disk, or move the folder")
        elif disk.f_files and not disk.f_favail:
            text = "the file system can hold no more files (inodes)"
            teller.failed("space", text, "remove files from that disk")
        else:
            teller.ok("space", f"{gigabytes(free)} are free")


# ---- how to go on -----------------------------------------------------------------------------


def go_on(
    teller: Teller,
    folder: Path,
    is_held: bool,
    newest: Checkpoint | None,
    config: dict[str, Any],
    is_open: bool,
) -> None:
    """Nothing, where a failure above is to be mended first."""
    folder = folder.resolve()
    words = ["python", "apps/train_pythia.py", "--resume", "auto"]
    words += [f"--name={folder.name}"] if folder.name.startswith("-") else ["--name", folder.name]
    if folder.parent != Path("runs").resolve():
        words += ["--out", str(folder.parent)]
    if folder.name.startswith("."):  # --name takes none such
        words[3:] = [str(folder)]
    step = None if newest is None else newest.state.get("step")
    if is_held:
        teller.ok("go on", "it is at work; SIGTERM lets its step end, saves and stops it")
    elif step is not None and step == config.get("settings", {}).get("steps"):
        teller.ok("go on", f"all {step} steps are done")
    elif is_open:
        where = "" if step is None else f" from step {step}"
        teller.ok("go on", f"to go on{where}: {shlex.join(words)}")
