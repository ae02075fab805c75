"""A run's folder: the process that works there, the last lines of its logs, its newest whole
checkpoint, and the command that goes on. Nothing in it is changed."""

from __future__ import annotations

import contextlib
import fcntl
import shlex
from pathlib import Path

from needle.checkpoint import CheckpointError, newest_checkpoint
from needle.diagnose.parts import failed, show, trying
from needle.processes import command_line
from needle.training.folder import again, has_saved

PUT_BACK = "put a whole one back from a copy, or begin anew under another --name"


def examine(path: str) -> None:
    folder = Path(path)
    trying(f"reading {folder}")
    if not (folder / "checkpoints").is_dir():
        failed("run", f"{folder} is not the folder of a run", "give runs/NAME")
        return
    holder = lock_holder(folder)
    show("run", f"ok: {holder or 'no process'} works in {folder}")
    for name in "metrics.jsonl", "faults.jsonl":
        if (folder / name).is_file():
            lines = (folder / name).read_text(errors="replace").splitlines()
            for line in [line for line in lines if '"digest"' not in line][-1:]:  # no proof
                show("run", f"ok: the last line of {name}: {line[:300]}")
    damaged = lambda text: failed("run", text, "put it back from a copy, or remove it")
    try:
        newest = newest_checkpoint(folder / "checkpoints", damaged)
    except CheckpointError as error:
        failed("run", str(error), PUT_BACK)
        return
    step = steps = None
    if newest is not None:
        step, steps = newest.state.get("step"), newest.state.get("settings", {}).get("steps")
        text = f"{newest.path.name}, step {step}, loss {newest.state['loss']:.4f}"
        show("run", f"ok: the newest whole checkpoint: {text}")
    elif has_saved(folder):
        failed("run", "none of the checkpoints that it saved is left", PUT_BACK)
        return
    command = shlex.join([*command_line("train"), *again(folder)])
    if holder:
        show("run", "ok: it is at work; SIGTERM lets its step end, saves and stops it")
    elif newest is not None and step == steps:
        show("run", f"ok: all {steps} steps are done")
    else:
        show("run", f"ok: to go on from step {step or 0}: {command}")


def lock_holder(folder: Path) -> str:
    """Return the process that holds the lock, in the words of the file; empty if none does."""
    with contextlib.suppress(FileNotFoundError), open(folder / "lock") as file:
        try:
            # Shared and given up at once: a training that starts meanwhile is refused.
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return file.read(200).strip()
    return ""
