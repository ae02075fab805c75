"""One rank of a small training, struck as PLAN says, a list of strikes in JSON: {"rank": r, "step":
s, "what": ...}. "once" may name a file that the strike leaves, and after which it spares; "seconds"
say how long. DEADLINE is that of the ranks, in seconds, MOST the bytes of an MPI message, and
FAKE_NCCL or FAKE_DRIVER a library that pretends to be NCCL, or the driver, of GPUs.

    kill, stop, term          the signal, from itself, when it has computed its first micro-batch
    fault                     a fatal fault of its GPU; on a CPU the exception alone
    data, second data         the first or the second batch of the step cannot be read
    nan                       its loss is none
    meet                      SIGTERM, while it waits for the others at the end of the step
    save                      SIGKILL, before the checkpoint of the step gets its name
    slow                      each of its micro-batches takes so many seconds more
"""

import json
import os
import signal
import sys
import time
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "apps")]


import train_pythia

import needle as ndl
from needle import files
from needle.data import DataError, Prefetch
from needle.distributed import environment, group, nccl, peers
from needle.distributed.control import Control
from needle.models import pythia
from needle.training import run as run_parts
from needle.training import session

pythia.PRESETS["tiny"] = (2, 64, 2, 256)
run_parts.SAMPLE_TOKENS = 4


class Strikes:
    """Functions that stand in the place of the trainer's, which is their first argument."""

    def __init__(self, plan: list[dict], rank: int) -> None:
        self.plan = [strike for strike in plan if strike.get("rank", 0) == rank]
        self.step = self.reads = 0

    def due(self, *kinds: str) -> str | None:
        """The kind of strike that comes now; each comes once."""
        for strike in self.plan:
            if strike["what"] in kinds and strike["step"] == self.step:
                self.plan.remove(strike)
                once = Path(strike.get("once", os.devnull))
                if not once.is_file():
                    once.touch()
                    return strike["what"]
        return None

    def schedule_of(self, function, settings):
        schedule = function(settings)

        def rate(step):
            self.step, self.reads = step, 0
            return schedule(step)

        return rate

    def begin(self, function, one, *args):
        function(one, *args)
        one.gradient = partial(self.gradient, one.gradient)

    def next(self, function, *batches):
        self.reads += 1
        if self.due("data") or (self.reads == 2 and self.due("second data")):
            raise DataError("tokens.npy: a page cannot be read")
        return function(*batches)

    def gradient(self, function, *batch):
        loss = function(*batch)
        time.sleep(sum(strike.get("seconds", 0.0) for strike in self.plan))
        what = self.due("kill", "stop", "term", "fault", "nan")
        if what == "fault":
            fault(loss.device)
        elif what == "nan":
            return loss * float("nan")
        elif what is not None:
            os.kill(os.getpid(), signal.Signals[f"SIG{what.upper()}"])
        return loss

    def gather(self, function, group, name, value):
        told = function(group, name, value)
        if name == "the end of the step" and self.due("meet"):
            os.kill(os.getpid(), signal.SIGTERM)
        return told

    def replace(self, function, old, new):
        if str(new).endswith(".safetensors") and self.due("save"):
            os.kill(os.getpid(), signal.SIGKILL)
        return function(old, new)


def fault(device) -> None:
    if device.is_host:
        raise ndl.CudaFatalError("exp: injected: an illegal memory access")
    from harness import Foreign

    ndl._C.from_dlpack(Foreign(ndl.NDArray([1.0, 2.0], device=device))).exp()


def strike(strikes: Strikes) -> None:
    for owner, name, instead in (
        (train_pythia, "schedule_of", strikes.schedule_of),
        (session.Session, "__init__", strikes.begin),
        (group.Group, "gather", strikes.gather),
        (Prefetch, "next", strikes.next),
        (files.os, "replace", strikes.replace),
    ):
        function = getattr(owner, name)
        struck = lambda *args, function=function, instead=instead, **more: instead(
            function, *args, **more
        )
        setattr(owner, name, struck)


def pretend_gpus(library: str | None, driver: str) -> None:
    """Four GPUs are visible, and all are the CPU; between them moves this library's NCCL, or this
    driver's copies."""
    session.visible_gpus = group.visible_gpus = lambda: 4
    group.choose_device = lambda name: ndl.cpu()
    nccl.find_library = lambda: library
    peers.NAME, peers.SLOT = driver, 1 << 14

    def connect(self, device):
        if self.size > 1 and library:
            self._transport = self._nccl(device)
        elif self.size > 1:
            self._transport = peers.connect(self.rank, self.size, device, self.control.gather)

    group.Group.connect = connect


if __name__ == "__main__":
    train_pythia.__file__ = __file__  # what --gpus starts
    if {"FAKE_NCCL", "FAKE_DRIVER"} & set(os.environ):
        pretend_gpus(os.environ.get("FAKE_NCCL"), os.environ.get("FAKE_DRIVER", ""))
    if "DEADLINE" in os.environ:
        Control.join = partial(Control.join, deadline=float(os.environ["DEADLINE"]))
    if "MOST" in os.environ:
        from needle.distributed import mpi

        mpi.MOST = int(os.environ["MOST"])
    place, plan = environment.find(), json.loads(os.environ.get("PLAN", "[]"))
    strike(Strikes(plan, 0 if place is None else place.rank))
    code = train_pythia.main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(code) if code == os.EX_TEMPFAIL else sys.exit(code)
