"""One rank of a small training, struck as PLAN says: {"rank": r, "step": s, "what": ...} in JSON,
where "mark" may name a file that the fault leaves, "deadline" be that of the ranks, in seconds,
"most" the bytes of a message, and "once" spares who was started again by a supervisor. FAKE_NCCL
names a library that pretends to be NCCL between GPUs, BROKEN_GPUS those, by UUID, that do not prove
themselves to a supervisor.

    kill, stop, term    the signal, from itself, when it has computed its first micro-batch then
    meet                SIGTERM, while it waits for the others at the end of the step
    data                its data cannot be read there
    nan                 its loss is none
    full                the checkpoint of step s meets a full disk
    end                 it is stopped (SIGSTOP) after the last step, when its log is closed
    slow                each of its micro-batches takes 0.1 s more, or as many as "seconds" says
    late                its data take half as long again as the deadline
"""

import errno
import json
import os
import signal
import sys
import time
from functools import partial
from pathlib import Path


ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "apps")]


import train_pythia

from needle import cpu, supervise
from needle.data import DataError
from needle.distributed import environment, group, nccl
from needle.distributed.control import Control
from needle.models import pythia
from needle.training import ranks, session
from needle.training import run as run_parts
from needle.training.log import RunLog

sys.modules["matplotlib"] = None  # whose import takes as long as the training
pythia.PRESETS["tiny"] = (2, 64, 2, 256)
run_parts.SAMPLE_TOKENS = 4


def strike(what: str, at: int, mark: str | None, deadline: float, seconds: float) -> None:
    compute, schedule_of, write = (
        train_pythia.forward_backward,
        train_pythia.schedule_of,
        run_parts.save_checkpoint,
    )
    struck, step = False, 0
    run_data, close = train_pythia.run_data, RunLog.close
    agree = session.agree

    def late_data(*args, **more):
        time.sleep(1.5 * deadline)
        return run_data(*args, **more)

    def strikes() -> bool:
        nonlocal struck
        now = step == at and not struck
        if now and mark is not None:
            Path(mark).touch()
        struck |= now
        return now

    def counting(settings):
        schedule = schedule_of(settings)

        def rate(number):
            nonlocal step
            step = number
            return schedule(number)

        return rate

    replays = False

    def struck_compute(model, ids, targets, loss_scale):
        loss = compute(model, ids, targets, loss_scale)
        return loss if replays else computed(loss)

    class StruckGraphedStep(session.GraphedStep):
        def __init__(self, *args):
            nonlocal replays
            replays = True
            super().__init__(*args)

        def __call__(self, *batch):
            return computed(super().__call__(*batch))

    def computed(loss):
        if what == "slow":
            time.sleep(seconds)
        if what in ("full", "meet") or not strikes():
            return loss
        if what in ("kill", "stop", "term"):
            os.kill(os.getpid(), getattr(signal, f"SIG{what.upper()}"))
        elif what == "data":
            raise DataError("tokens.npy: a page cannot be read")
        elif what == "nan":
            return loss * float("nan")
        return loss

    def struck_write(*args, **more):
        if what == "full" and strikes():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "step.safetensors")
        return write(*args, **more)

    def struck_close(self):
        close(self)
        os.kill(os.getpid(), signal.SIGSTOP)

    def struck_agree(ranks, name, *more):
        agreed = agree(ranks, name, *more)
        if name == "the end of the step" and strikes():
            os.kill(os.getpid(), signal.SIGTERM)
        return agreed

    if what == "meet":
        session.agree = struck_agree
    if what == "end":
        RunLog.close = struck_close
    if what == "late":
        train_pythia.run_data = late_data
    train_pythia.schedule_of = counting
    train_pythia.forward_backward = struck_compute
    session.GraphedStep = StruckGraphedStep
    run_parts.save_checkpoint = struck_write


def pretend_gpus(library: str) -> None:
    """Four GPUs are visible, or those that CUDA_VISIBLE_DEVICES names, and all are the CPU; between
    them moves this library's NCCL."""
    names = os.environ.get("CUDA_VISIBLE_DEVICES", "GPU-a,GPU-b,GPU-c,GPU-d").split(",")
    ranks.visible_gpus = group.visible_gpus = lambda: len(names)
    group.choose_device = lambda name: cpu()
    nccl.find_library = lambda: library
    supervise.CHECK = ""

    def connect(self, device):
        if self.size > 1:
            self._learn_gpus(names[self.place.local_rank])
            self._transport = self._nccl(device)

    group.Group.connect = connect


# Stands before the health check of a device.
BROKEN = """
import os, sys
if os.environ["CUDA_VISIBLE_DEVICES"] in os.environ["BROKEN_GPUS"].split(","):
    sys.exit("it has fallen off the bus")
"""


if __name__ == "__main__":
    train_pythia.__file__ = __file__  # what --gpus starts
    if "FAKE_NCCL" in os.environ:
        pretend_gpus(os.environ["FAKE_NCCL"])
    if "BROKEN_GPUS" in os.environ:
        supervise.CHECK, supervise.CHECK_PAUSES = BROKEN + supervise.CHECK, (0.0, 0.1)
    plan, place = json.loads(os.environ.get("PLAN", "null")), environment.find()
    if plan is not None and plan.get("once") and os.environ.get("NEEDLE_RESTARTS", "0") != "0":
        plan = None
    if plan is not None and plan["rank"] == (0 if place is None else place.rank):
        more = plan.get("mark"), plan.get("deadline", 60.0), plan.get("seconds", 0.1)
        strike(plan["what"], plan["step"], *more)
    if plan is not None and "most" in plan:
        from needle.distributed import mpi

        mpi.MOST = plan["most"]
    if plan is not None and "deadline" in plan:
        Control.join = partial(Control.join, deadline=plan["deadline"])
    code = train_pythia.main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(code) if code == os.EX_TEMPFAIL else sys.exit(code)
