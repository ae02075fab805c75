"""A run's folder: its lock, config.json, metrics.jsonl, checkpoints, the faults that a supervisor
wrote into faults.jsonl, free space, and the command that goes on. Nothing in it is changed.

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
from pathlib import Path
from typing import Any

from needle.checkpoint import Checkpoint, CheckpointError, list_checkpoints, step_of
from needle.diagnose.examination import Reporter
from needle.diagnose.facts import gigabytes
from needle.files import FileError, reading, regular
from needle.processes import command_line, json_objects
from needle.training.folder import again

TAIL = 1 << 16  # bytes of the end of a file that are read
SHOWN = 3  # faults
CHECKED = {False: 2 << 30, True: 64 << 30}  # bytes of checkpoints that are read; with --full
SPARE = 64 << 20  # bytes beside the next checkpoint
UNREADABLE = "see to its permissions, or move it away"
STATES = {"T": "stopped (kill -CONT goes on)", "D": "waiting inside the system", "Z": "dead"}


def examine(reporter: Reporter, path: str) -> None:
    """Findings about a run's folder."""
    folder = Path(path)
    reporter.at(f"reading {folder}")
    try:
        names = os.listdir(folder)
    except OSError as error:
        remedy = "give the folder of a run, runs/NAME; see to its permissions"
        reporter.failed("folder", f"{folder} cannot be listed: {error.strerror}", remedy)
        return
    if not {"config.json", "checkpoints", "metrics.jsonl"} & set(names):
        remedy = "give the folder that holds config.json and checkpoints/: runs/NAME"
        reporter.failed("folder", f"{folder} is not the folder of a run", remedy)
        return
    is_held = lock(reporter, folder)
    config = description(reporter, folder)
    last = metrics(reporter, folder, is_held)
    newest, can_resume = None, False
    try:
        paths = list_checkpoints(folder / "checkpoints")
        if paths:
            newest, can_resume = checkpoints(reporter, paths)
        else:
            can_resume = unsaved(reporter, config, last, is_held)
        space(reporter, folder, paths)
    except CheckpointError as error:
        reporter.failed("checkpoints", str(error), "see to the permissions of checkpoints/")
    faults(reporter, folder)
    go_on(reporter, folder, is_held, newest, config, can_resume)


# ---- the lock -----------------------------------------------------------------------------------


def lock(reporter: Reporter, folder: Path) -> bool:
    """Return whether a process holds the folder."""
    path = folder / "lock"
    try:
        file = regular(path, os.O_RDONLY)
    except FileNotFoundError:
        reporter.ok("lock", "no process has worked in it yet")
        return False
    except OSError as error:
        reporter.failed("lock", f"{path} cannot be read: {error.strerror}", UNREADABLE)
        return False
    try:
        holder = os.read(file, 200).decode(errors="replace").strip() or "a process without a name"
        # Shared and given up at once: a training that starts meanwhile is refused.
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        fcntl.flock(file, fcntl.LOCK_UN)
    except BlockingIOError:
        held(reporter, path, holder)
        return True
    except OSError:
        reporter.note("lock", f"this file system knows no locks; the last was {holder}")
        return False
    finally:
        os.close(file)
    if process_of(holder):
        reporter.ok("lock", f"no process works in it; {holder} did last")
    else:
        reporter.ok("lock", f"no process works in it; {holder}, named in its lock, has ended")
    return False


def process_of(holder: str) -> Path | None:
    """/proc/123 of "process 123 on host"; None if it is gone or was on another host."""
    found = re.fullmatch(r"process (\d+) on (.*)", holder)
    path = Path(f"/proc/{found[1]}") if found and found[2] == platform.node() else None
    return path if path and path.exists() else None


def held(reporter: Reporter, path: Path, holder: str) -> None:
    """The finding about a lock that a process holds."""
    process = process_of(holder)
    if process or not holder.endswith(f" on {platform.node()}"):
        state = ""
        if process:
            letter = (process / "stat").read_text().rpartition(")")[2].split()[0]
            state = f", but is {STATES[letter]}" if letter in STATES else ""
        reporter.ok("lock", f"{holder} works in it{state}")
        return
    pids = []
    for entry in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):
            if entry.samefile(path) and int(entry.parts[2]) != os.getpid():
                pids.append(entry.parts[2])
    named = " and ".join(f"process {pid}" for pid in pids) or "one that is not visible from here"
    text = f"{holder} is gone, and its lock is still held: by {named}"
    remedy = f"end it (kill {' '.join(pids) or 'PID'}): it inherited the lock"
    reporter.failed("lock", text, remedy)


# ---- files --------------------------------------------------------------------------------------


def description(reporter: Reporter, folder: Path) -> dict[str, Any]:
    """config.json; empty if it is missing or damaged."""
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
    reporter.failed("config", problem, remedy)
    return {}


def last_lines(reporter: Reporter, path: Path, what: str) -> list[dict[str, Any]] | None:
    """The objects among the last lines of a file of JSON lines; None without a readable file."""
    try:
        with open(path, "rb", opener=regular) as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL))
            return json_objects(file.read().splitlines())
    except FileNotFoundError:
        return None
    except OSError as error:
        reporter.failed(what, f"{path}: {error.strerror}", UNREADABLE)
        return None


def metrics(reporter: Reporter, folder: Path, is_held: bool) -> dict[str, Any]:
    """The last line of metrics.jsonl; empty without one."""
    path = folder / "metrics.jsonl"
    reporter.at(f"reading {path}")
    lines = last_lines(reporter, path, "metrics")
    if not lines:
        if not path.exists():
            reporter.note("metrics", "there is no metrics.jsonl yet")
        elif lines is not None:
            reporter.note("metrics", "metrics.jsonl has no whole line")
        return {}
    last, age = lines[-1], time.time() - path.stat().st_mtime
    shown = [f"{key} {last[key]}" for key in ("step", "loss", "tokens_per_second") if key in last]
    reporter.fact("metrics", last)
    reporter.ok("metrics", f"last line of metrics.jsonl: {', '.join(shown)}; {ago(age)}")
    if is_held and len(lines) > 1 and "tokens_per_second" in last:
        spans = [b.get("seconds", 0) - a.get("seconds", 0) for a, b in zip(lines, lines[1:])]
        if age > max(60, 20 * max(spans)):
            text = "the run is held, and has written no step for 20 times its longest"
            reporter.note("metrics", f"{text}: it hangs, evaluates or saves")
    return last


def ago(seconds: float) -> str:
    for size, unit in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit} ago"
    return f"{max(0, seconds):.0f} s ago"


def unsaved(
    reporter: Reporter, config: dict[str, Any], last: dict[str, Any], is_held: bool
) -> bool:
    """The finding about a run without a checkpoint. Return whether --resume auto begins anew: it
    does unless there has been one, by config.json or else by the steps."""
    step, has_saved = last.get("step", 0), bool(config.get("saved", last))
    if has_saved:
        text = f"no checkpoint is left of this run, which came to step {step}"
        remedy = "put one back, or begin anew under another --name, or remove the folder"
        reporter.failed("checkpoints", text, remedy)
    elif last and not is_held:
        text = f"there is no checkpoint: the run ended at step {step} before its first"
        remedy = "--resume auto begins anew; a smaller --save-every loses less"
        reporter.failed("checkpoints", text, remedy)
    else:
        reporter.note("checkpoints", "there is no checkpoint yet")
    return not has_saved


def checkpoints(reporter: Reporter, paths: list[Path]) -> tuple[Checkpoint | None, bool]:
    """(the newest whole one, whether --resume auto goes on). With --full older ones are read
    too."""
    newest, damaged, unread, room = None, [], [], CHECKED[reporter.is_full]
    can_resume = True
    for path in paths:
        if newest is not None and not reporter.is_full:
            break
        with contextlib.suppress(OSError):
            room -= path.stat().st_size
        if room < 0 or reporter.left() < 0:
            unread.append(path.name)
            continue
        reporter.at(f"reading {path}")
        try:
            found = Checkpoint(path)
            newest = newest or found
        except CheckpointError as error:
            damaged.append(path)
            older = "an older one" if path is not paths[-1] else "a copy"
            remedy = f"restore it from a copy; --resume auto goes on from {older}"
            if isinstance(error.__cause__, OSError):  # --resume auto does not pass over it
                remedy = "make it readable, or move it away to go on from an older one"
                can_resume = newest is not None and can_resume
            reporter.failed("checkpoint", str(error), remedy)
    if unread:
        text = f"not read, for they are large: {', '.join(unread)}"
        reporter.note("checkpoints", text + ("" if reporter.is_full else "; --full reads more"))
    if newest is not None:
        step = newest.state.get("step", step_of(newest.path))
        size, loss = gigabytes(newest.path.stat().st_size), newest.state["loss"]
        text = f"newest whole checkpoint: {newest.path.name}, step {step}, loss {loss:.4f}, {size}"
        reporter.ok("checkpoint", text)
        reporter.fact("checkpoint", {"path": str(newest.path), "step": step})
    elif len(damaged) == len(paths):
        can_resume = False
        remedy = "restore one from a copy, or begin under another --name"
        reporter.failed("checkpoints", "none of the checkpoints is whole", remedy)
    reporter.fact("damaged", [str(path) for path in damaged])
    return newest, can_resume


def faults(reporter: Reporter, folder: Path) -> None:
    """The last faults that a supervisor recorded."""
    lines = last_lines(reporter, folder / "faults.jsonl", "faults")
    if lines is None:
        return
    reporter.fact("faults", lines)
    for line in lines[-SHOWN:]:
        kinds = ("time", "step", "exit", "signal", "op", "message", "action")
        shown = [f"{key} {line[key]}" for key in kinds if line.get(key) is not None]
        if isinstance(line.get("left_out"), dict):
            shown += [f"without {gpu}, which {why}" for gpu, why in line["left_out"].items()]
        reporter.note("fault", f"a fault: {', '.join(shown)}"[:600])
    if len(lines) > SHOWN:
        reporter.note("faults", f"and {len(lines) - SHOWN} faults before")


def space(reporter: Reporter, folder: Path, paths: list[Path]) -> None:
    """The finding about room for the next checkpoint, which is written beside the older ones."""
    reporter.at("asking for the space that is left")
    disk = os.statvfs(folder)
    free = disk.f_bavail * disk.f_frsize
    needed = SPARE + max((path.stat().st_size for path in paths if path.exists()), default=0)
    reporter.fact("free", free)
    if disk.f_flag & os.ST_RDONLY or not os.access(folder, os.W_OK):
        text = f"{folder} cannot be written to"
        reporter.failed("space", text, "see to its permissions and to how it is mounted")
    elif free < needed:
        text = f"{gigabytes(free)} are free, and the next checkpoint needs {gigabytes(needed)}"
        reporter.failed("space", text, "free space on that disk, or move the folder")
    elif disk.f_files and not disk.f_favail:
        text = "the file system can hold no more files (inodes)"
        reporter.failed("space", text, "remove files from that disk")
    else:
        reporter.ok("space", f"{gigabytes(free)} are free")


def go_on(
    reporter: Reporter,
    folder: Path,
    is_held: bool,
    newest: Checkpoint | None,
    config: dict[str, Any],
    can_resume: bool,
) -> None:
    """The command that goes on; none after a failure that is in its way."""
    words = [*command_line("train", "apps/train_pythia.py"), *again(folder)]
    step = None if newest is None else newest.state.get("step")
    if is_held:
        reporter.ok("go on", "it is at work; SIGTERM lets its step end, saves and stops it")
    elif step is not None and step == config.get("settings", {}).get("steps"):
        reporter.ok("go on", f"all {step} steps are done")
    elif can_resume:
        where = "" if step is None else f" from step {step}"
        reporter.ok("go on", f"to go on{where}: {shlex.join(words)}")
