"""The heartbeat of a training: a file in which its supervisor (supervise.py) sees its life.

NEEDLE_HEARTBEAT names the file; without that variable nothing is written. It holds the number of
steps done, and each change of it says that work continues. A hang is seen from the first change on,
and not while the file is missing. Any program may write it: `echo 12 >"$NEEDLE_HEARTBEAT"`. A file
beside it, with the suffix .run, names the folder of the run, which gets faults.jsonl.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from needle.processes import HEARTBEAT


def supervised() -> bool:
    """Return whether this process has a supervisor."""
    return bool(os.environ.get(HEARTBEAT))


def beat(step: int | None = None) -> None:
    """Tell the supervisor, if there is one, that so many steps are done; without a number, that the
    work after the last number continues. In a script of one's own:
    `ndl.fit(model, batches, on_step=lambda step, loss: beat(step))`."""
    if supervised():
        with contextlib.suppress(OSError):  # no number yet; a full disk ends no training
            if step is None:
                os.utime(os.environ[HEARTBEAT])
            else:
                Path(os.environ[HEARTBEAT]).write_text(str(step))


def rest() -> None:
    """Let the work until the next number take any time."""
    if supervised():
        Path(os.environ[HEARTBEAT]).unlink(missing_ok=True)


def note_folder(folder: Path) -> None:
    """Tell the supervisor, if there is one, the folder of the run."""
    if supervised():
        Path(os.environ[HEARTBEAT]).with_suffix(".run").write_bytes(os.fsencode(folder))
