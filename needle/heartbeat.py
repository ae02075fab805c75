"""Reports of a training to its supervisor (needle/supervise.py).

A report is a JSON object on a line, written into the pipe that NEEDLE_HEARTBEAT names; without that
variable nothing is written. Any program may report. Each report says that work continued; hangs are
detected from the first one on. Its fields, all optional:

    run       folder of the run, which gets faults.jsonl
    id        of the run, as in the folder's config.json: if another run has taken the folder,
              nothing is written there and the command is not restarted
    resume    flags that continue the run, appended to the command at a restart
    device    cpu, cuda:0
    gpus      UUIDs of the GPUs, if the command starts a rank on each
    ranks     {"2": flags}: by numbers of ranks that can share the steps, the flags appended after
              `resume` to start that many, if some of `gpus` fail their health check
    wrong     those of `gpus` that have computed wrong, or may have
    watched   false: the work until the next report may take any time
    step      steps finished so far
    saved     of these, steps that need not be repeated: a larger number than ever before is the
              progress that permits more restarts
    fault     message of a fatal fault
"""

from __future__ import annotations

import contextlib
import os
from typing import Any

from needle import _C
from needle.processes import MessageWriter

PIPE = "NEEDLE_HEARTBEAT"
SYNC_UNTIL = "NEEDLE_SYNC_UNTIL"  # the step after which NEEDLE_SYNC=1 ends
MOST_TEXT = 1000  # characters of a fault: a line that fits into PIPE_BUF is written whole


def supervised() -> bool:
    """Return whether this process has a supervisor."""
    return bool(os.environ.get(PIPE))


def beat(**facts: Any) -> None:
    """Report to the supervisor, if there is one, that work continued, and these facts. Never wait:
    a supervisor that is stopped for long misses reports. In a script of one's own:
    `ndl.fit(model, batches, on_step=lambda step, loss: beat(step=step))`."""
    if not supervised():
        return
    if facts.get("step", -1) >= int(os.environ.get(SYNC_UNTIL, "0")) > 0:
        del os.environ[SYNC_UNTIL]
        _C.sync_each_op(False)
    if "fault" in facts:
        facts["fault"] = facts["fault"][:MOST_TEXT]
    with contextlib.suppress(OSError):  # no reader, or a full pipe
        pipe = os.open(os.environ[PIPE], os.O_WRONLY | os.O_NONBLOCK)
        try:
            MessageWriter(pipe).write(**facts)
        finally:
            os.close(pipe)
