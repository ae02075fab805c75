"""What a training tells its supervisor (needle/supervise.py).

A JSON object a line, into the pipe that NEEDLE_HEARTBEAT names; without that variable nothing
happens. Any program may write one. Hangs are watched for from the first line on, and each line says
that work went on. Words of an object, each of which may be left out:

    run       the folder of the run, which gets faults.jsonl
    id        of the run, as the folder's config.json has it: where another run has taken the folder
              nothing is written there, nor is the command started again
    resume    words that go on with it, put behind the command when it is started again
    device    cpu, cuda:0
    gpus      of its ranks, where each has one and it starts them itself, by UUID
    ranks     {"2": words}: by how many ranks can share its steps, what is put behind `resume` to
              start so many, where not all of `gpus` prove themselves
    wrong     those of `gpus` that have computed wrong, or may have
    watched   false: what comes now may take any time, until the next line
    step      steps finished so far
    saved     of these, steps that need not be done again: a larger number than ever before is the
              progress that lets a supervisor go on after many deaths
    fault     the message of a fatal fault
"""

from __future__ import annotations

import contextlib
import json
import os
from typing import Any

from needle import _C

PIPE = "NEEDLE_HEARTBEAT"
SYNC_UNTIL = "NEEDLE_SYNC_UNTIL"  # the step behind which NEEDLE_SYNC=1 ends
MOST_TEXT = 1000  # characters of a fault: a line that fits into PIPE_BUF is written whole


def supervised() -> bool:
    """Whether this process has a supervisor."""
    return bool(os.environ.get(PIPE))


def beat(**facts: Any) -> None:
    """Tells the supervisor, where there is one, that work went on, and these facts. Never waits: a
    supervisor that is stopped for long misses some. In a script of one's own:
    `ndl.fit(model, batches, on_step=lambda step, loss: beat(step=step))`."""
    if not supervised():
        return
    if facts.get("step", -1) >= int(os.environ.get(SYNC_UNTIL, "0")) > 0:
        del os.environ[SYNC_UNTIL]
        _C.sync_each_op(False)
    if "fault" in facts:
        facts["fault"] = facts["fault"][:MOST_TEXT]
    with contextlib.suppress(OSError):  # nobody reads, or nobody has for thousands of lines
        pipe = os.open(os.environ[PIPE], os.O_WRONLY | os.O_NONBLOCK)
        try:
            os.write(pipe, json.dumps(facts).encode() + b"\n")
        finally:
            os.close(pipe)
