"""Runs a training, and starts it again when a fault ends it.

    python -m needle.supervise [--hang-seconds S] -- COMMAND ...
    python apps/train_pythia.py --supervise ...            the same of itself

The process is the unit of recovery: after a fatal CUDA fault none but a new one gets the device.
COMMAND is started again after exit code 75 (the GPU is lost), after a signal that killed it (or a
rank of the mpirun that it is), and when it finishes no step for S seconds: it then prints its
stacks and is killed with its process group. Every other exit code is passed on. A fresh process
proves the device before each new start. The steps up to the one that died run with NEEDLE_SYNC=1,
so that a fault that comes back carries the name of its op. Three deaths at one step are the end,
with the exit code of the last; a step and its neighbours count as one, since the host is ahead of a
GPU by a step or not, as time falls. Eight deaths in a row are the end too, at whatever steps, where
COMMAND saved no new checkpoint between them. The second of these and each later one is followed by
a pause twice as long as the one before: 0.5 s, then up to 16 s.

Of a COMMAND with a rank on each of several GPUs every one is proved. Those that do not prove
themselves, or that computed wrong, are left out from then on: the largest number of ranks that can
share its steps goes on, on the first of the others (CUDA_VISIBLE_DEVICES), with the same bits.

SIGINT, SIGTERM and SIGHUP are passed on, once: COMMAND saves, ends, and stays ended. It has a
process group of its own, reads nothing, writes where this process does, and dies with it.
Processes that COMMAND itself starts in sessions of their own outlive a SIGKILL of the supervisor.

Each death is a line of faults.jsonl in the run's folder:

    time, step      when, and the first step that was not finished (of a GPU, which the host is
                    ahead of, it may be one later); null before the command told any
    exit, signal    one of them is null
    op, message     the op only where NEEDLE_SYNC was on
    seconds_lost    since the last step that need not be done again, until the device was proved
    action          restart, or why there is none
    left_out        the GPUs that no later life of this supervisor gets, by UUID, and why; only
                    where it leaves some out. Who starts the run anew chooses anew

Where another run has taken the folder, or the folder is gone, nothing is written or started: the
exit code is that of the death.

COMMAND tells all this by needle/heartbeat.py, as needle's trainer does. One that tells nothing is
started again as it was, with NEEDLE_RESTARTS, how often it has been, in its environment, and no
hang of it is seen; three deaths of it are the end.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import datetime
import json
import math
import os
import select
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from needle.files import regular
from needle.heartbeat import PIPE, SYNC_UNTIL
from needle.processes import Child, MessageReader, collecting, program, signal_name

EXIT_GPU_LOST = 75
MPIRUN = ("mpirun", "mpiexec", "orterun", "prterun")
# Signals that are no wish to stop.
KILLERS = tuple(signal.Signals[f"SIG{n}"] for n in ("ILL", "ABRT", "BUS", "FPE", "KILL", "SEGV"))
HANG_SECONDS = 300.0  # a step, a batch of an evaluation, and a save must each fit
DEATHS = 3  # at one step
# Seconds before each new start in a row without a new checkpoint; the death after the last ends it.
PAUSES = (0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
TICK = 0.1  # seconds between two looks at the process
GRACE = 2.0  # seconds for the stacks of a process that hangs
PROBE_SECONDS = 60.0  # of a try: a context takes 0.2 s, and seconds where the driver was unloaded
PROBE_WAITS = (0.0, 1.0, 2.0, 5.0, 10.0, 20.0, 40.0)  # seconds before each try

# Its argument is the device that the command told; without one it tries every GPU.
PROBE = """
import sys
import needle as ndl
from needle.backend_ndarray import choose_device
devices = [choose_device(name) for name in sys.argv[1:]]
for device in devices or [d for d in ndl.all_devices() if d.enabled() and not d.is_host]:
    x = ndl.NDArray([[1.0, 2.0], [3.0, 4.0]], device=device)
    product = (x @ x).numpy().tolist()
    if product != [[7.0, 10.0], [15.0, 22.0]]:
        sys.exit(f"{device}: a wrong product: {product}")
"""


# ---- the device ---------------------------------------------------------------------------------


def never() -> bool:
    return False


def probe(
    device: str | None, seconds: float = PROBE_SECONDS, given_up: Callable[[], bool] = never
) -> str | None:
    """Why a fresh process cannot multiply two matrices on the device, or None."""
    return _Probe(device).problem(seconds, given_up)


def probe_each(
    gpus: Sequence[str], seconds: float = PROBE_SECONDS, given_up: Callable[[], bool] = never
) -> dict[str, str | None]:
    """The same of GPUs by their UUIDs, all at once, each in a process that sees no other."""
    probes = {gpu: _Probe("cuda:0", CUDA_VISIBLE_DEVICES=gpu) for gpu in gpus}
    return {gpu: one.problem(seconds, given_up) for gpu, one in probes.items()}


class _Probe:
    """A fresh process that multiplies two matrices on a device."""

    def __init__(self, device: str | None, **environ: str) -> None:
        root = str(Path(__file__).resolve().parent.parent)
        path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
        command = [sys.executable, "-c", PROBE, *([] if device is None else [device])]
        self._child = Child(command, {**os.environ, "PYTHONPATH": path, **environ}, capture=True)

    def problem(self, seconds: float, given_up: Callable[[], bool]) -> str | None:
        """Why it could not, or None."""
        with self._child as child:
            left = child.started + seconds - time.monotonic()
            if not child.wait(left, given_up):
                gone = child.kill()
                return f"no answer in {seconds:g} s" + ("" if gone else ", and cannot be killed")
            lines = child.printed().strip().splitlines()
        code = child.poll()
        return None if code == 0 else lines[-1] if lines else f"exit code {code}"


# ---- lives and deaths ---------------------------------------------------------------------------


@dataclasses.dataclass
class Life:
    """One process of the command, and what it has told."""

    child: Child
    spawned: float  # by time.monotonic(), as all moments here
    kept: float  # what it did since then would be lost
    synced: float  # up to this step it waits for each op
    watched: bool = False
    first: int | None = None  # steps done when it told first
    step: int | None = None  # steps done
    fault: str = ""
    idle: float = 0.0  # seconds without a word
    hung: bool = False

    @property
    def code(self) -> int | None:
        """The exit code, -n where signal n killed the process, or one that it had started: a
        launcher of ranks says so by 128 + n, as a shell does."""
        code = self.child.poll()
        return 128 - code if code is not None and code - 128 in KILLERS else code

    @property
    def died(self) -> bool:
        """Of what a new process may be spared; a process that cannot be killed has no code."""
        code = self.code
        return self.hung or code == EXIT_GPU_LOST or code < 0

    @property
    def exit_code(self) -> int:
        """As a shell tells it; a hang is no success, whatever the process made of its end."""
        code = self.child.poll()
        if code is None or (self.hung and code == 0):
            return EXIT_GPU_LOST
        return code if code >= 0 else 128 - code

    @property
    def fatal(self) -> int | None:
        """The first step that is not done."""
        return None if self.step is None else self.step + 1

    @property
    def op(self) -> str | None:
        known = self.fault and self.fatal is not None and self.fatal <= self.synced
        return self.fault.partition(":")[0] if known else None

    @property
    def why(self) -> str:
        code = self.code
        if self.hung:
            return f"nothing finished for {self.idle:.0f} s"
        if code < 0:
            return f"killed by {signal_name(-code)}"
        return self.fault.partition("\n")[0] or f"exit code {code}"


class Supervisor:
    """Runs `command` until it ends by itself, or nothing helps: `run()` returns the exit code."""

    def __init__(self, command: Sequence[str], hang_seconds: float = HANG_SECONDS) -> None:
        self.command, self.hang_seconds = list(command), hang_seconds
        self.folder: Path | None = None
        self.id: str | None = None  # of the run there
        self.device: str | None = None
        self.resume: list[str] = []
        self._gpus: list[str] = []  # of its ranks, at first, in their order
        self._words: dict[int, list[str]] = {}  # by the number of ranks: what starts so many
        self._left_out: dict[str, str] = {}  # GPU: why
        self._fewer: tuple[list[str], list[str]] | None = None  # (GPUs to see, words)
        self.lives = self.deaths = 0
        self.lost = 0.0  # seconds: what was done twice, waiting, starting
        self._reached = self._saved = -1  # steps done, and saved, in any life
        self._unsaved = 0  # deaths since a step beyond all before was saved
        self._deaths_at: collections.Counter[int | None] = collections.Counter()  # since that step
        self._synced = 0  # a new life waits for each op up to this step
        self._signals: list[int] = []  # that have come, and were not passed on yet
        self._stopped = 0  # the last that was
        self._records: list[dict[str, Any]] = []  # lines of faults.jsonl, not written yet

    def run(self) -> int:
        began = time.monotonic()
        self._heartbeats = MessageReader()  # its path vanishes with this process
        try:
            with collecting(self._signals, signal.SIGINT, signal.SIGTERM):
                code = None
                while code is None:
                    code = self._live()
        finally:
            self._heartbeats.close()
        if self.deaths:
            took = time.monotonic() - began
            listed = "" if self._records else f" ({self.folder / 'faults.jsonl'})"
            plural = "" if self.deaths == 1 else "s"
            say(f"{self.deaths} death{plural}, {self.lost:.1f} s of {took:.1f} s lost{listed}")
        return code

    # ---- one life -------------------------------------------------------------------------------

    def _live(self) -> int | None:
        """From a start to what follows from its end: the exit code, or None for a new life."""
        try:
            life = self._start()
        except OSError as error:
            say(f"{self.command[0]}: {error.strerror}")
            return 127 if isinstance(error, FileNotFoundError) else 126
        self._watch(life)
        if not life.died or (self._stopped and life.child.poll() == -self._stopped):
            return life.exit_code
        self.deaths += 1
        self._unsaved += 1
        self._deaths_at[life.fatal] += 1
        code, action = self._after(life)
        seconds = time.monotonic() - life.kept
        self.lost += seconds
        at = "before the first step" if life.fatal is None else f"step {life.fatal}"
        op = f" The op is {life.op}." if life.op else ""
        say(f"{at}: {life.why}.{op} {seconds:.1f} s lost: {action}")
        self._record(life, seconds, action)
        return code

    def _start(self) -> Life:
        environment = {
            **os.environ,
            PIPE: self._heartbeats.path,
            "NEEDLE_RESTARTS": str(self.lives),
        }
        environment.setdefault("PYTHONFAULTHANDLER", "1")  # SIGABRT prints the stacks
        gpus, words = self._fewer or ([], [])
        if gpus:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
        synced: float = self._synced
        if os.environ.get("NEEDLE_SYNC", "0") not in ("", "0"):
            synced = math.inf
        elif synced:
            environment |= {"NEEDLE_SYNC": "1", SYNC_UNTIL: str(self._synced)}
        child = Child([*self.command, *self.resume, *words], environment)
        self.lives += 1
        return Life(child, child.started, child.started, synced)

    def _watch(self, life: Life) -> None:
        """Until the process is gone, or hangs."""
        before = time.monotonic()
        while life.child.poll() is None:
            select.select([self._heartbeats], [], [], TICK)
            now = time.monotonic()
            life.idle += min(now - before, 5 * TICK)  # this process may have been stopped
            before = now
            self._hear(life)
            while self._signals:
                self._pass_on(life, self._signals.pop(0))
            if life.watched and life.idle > self.hang_seconds:
                life.hung = True
                for number in (signal.SIGABRT, signal.SIGCONT):  # also where it was stopped
                    life.child.signal(number)
                life.child.wait(GRACE)
                break
        self._hear(life)  # its last words

    def _pass_on(self, life: Life, number: int) -> None:
        if number != signal.SIGTSTP:
            self._stopped = number
            # mpirun kills its ranks half a second after any other.
            by_mpirun = Path(self.command[0]).name in MPIRUN
            life.child.signal(signal.SIGUSR1 if by_mpirun else number)
            return
        life.child.signal(signal.SIGSTOP, group=True)  # Ctrl-Z, until fg or bg
        os.kill(os.getpid(), signal.SIGSTOP)
        life.child.signal(signal.SIGCONT, group=True)

    def _hear(self, life: Life) -> None:
        for facts in self._heartbeats.read():
            self._learn(life, facts)

    def _learn(self, life: Life, facts: dict[str, Any]) -> None:
        """Facts of another kind than needle/heartbeat.py's are passed over."""
        now = time.monotonic()
        life.idle, life.watched = 0.0, facts.get("watched") is not False
        if isinstance(facts.get("run"), str):
            self.folder = Path(facts["run"])
        if isinstance(facts.get("id"), str):
            self.id = facts["id"]
        if isinstance(facts.get("resume"), list):
            self.resume = [str(word) for word in facts["resume"]]
        if isinstance(facts.get("device"), str):
            self.device = facts["device"]
        gpus, words, wrong = (facts.get(word) for word in ("gpus", "ranks", "wrong"))
        if isinstance(gpus, list) and isinstance(words, dict) and not self._gpus:
            self._gpus = [str(gpu) for gpu in gpus]
            fitting = [n for n in words if n.isdecimal() and isinstance(words[n], list)]
            self._words = {int(n): [str(word) for word in words[n]] for n in fitting}
        if isinstance(wrong, list):
            self._left_out |= {gpu: "computed wrong" for gpu in self._gpus if gpu in wrong}
        if isinstance(facts.get("fault"), str):
            life.fault = facts["fault"]
        step = facts.get("step")
        if isinstance(step, int):
            if life.first is None:
                life.first = step
            elif self.lives > 1 and life.step == life.first < step:  # the start is over
                self.lost += now - life.spawned
                life.kept = now
            life.step = step
            if step > self._reached:
                self._reached = step
                self._deaths_at.clear()
        if "saved" in facts:
            life.kept = now
            if isinstance(facts["saved"], int) and facts["saved"] > self._saved:
                self._saved, self._unsaved = facts["saved"], 0

    # ---- after a death --------------------------------------------------------------------------

    def _after(self, life: Life) -> tuple[int | None, str]:
        """(exit code or None for a new life, the words for it)."""
        gone = life.child.kill()  # the rest of its group too
        if not gone:
            return EXIT_GPU_LOST, (
                f"ended: process {life.child.pid} cannot be killed, a driver holds it. Go on "
                f"where the device is another: {self._again()}"
            )
        if self._stopped:
            return life.exit_code, f"ended: stopped by {signal_name(self._stopped)}"
        if self._deaths_about(life.fatal) >= DEATHS:
            return life.exit_code, f"ended: {DEATHS} deaths there, and nothing done beyond"
        if self._unsaved > len(PAUSES):
            return life.exit_code, f"ended: {self._unsaved} deaths without a new checkpoint"
        if life.fatal is not None:  # where the host was ahead, it was the next step
            self._synced = max(self._synced, life.fatal + 1)
        problem, pause = None, PAUSES[self._unsaved - 1]
        if pause:
            say(f"{self._unsaved} deaths without a new checkpoint: waiting {pause:g} s")
            self._pause(pause)
        if self._gpus:
            problem = self._prove_gpus()
        elif self.device != "cpu":
            problem = self._prove()
        if self._ending():
            number = self._ending()[-1]
            return 128 + number, f"ended: stopped by {signal_name(number)}"
        if problem is not None:
            return EXIT_GPU_LOST, f"ended: {problem}. Go on where there is one: {self._again()}"
        lost = self._lost_folder()
        return (None, "restart") if lost is None else (life.exit_code, f"ended: {lost}")

    def _lost_folder(self) -> str | None:
        """Why the folder is not that of the run any more, or None. A config.json that cannot be
        read says nothing, as to a run that is resumed."""
        if self.id is None or self.folder is None:
            return None
        found = self.id
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError, RecursionError):
            with open(self.folder / "config.json", "rb", opener=regular) as file:
                found = json.load(file)["id"]
        if self.folder.is_dir() and found == self.id:
            return None
        why = f"is of run {found!r:.40} now" if self.folder.is_dir() else "is gone"
        return (
            f"{self.folder} {why}, and this run is {self.id!r:.40}: nothing is written there; if "
            "its folder was renamed, --resume with the new path goes on"
        )

    def _ending(self) -> list[int]:
        """The signals that end this, of those that came: Ctrl-Z waits for the new life."""
        return [number for number in self._signals if number != signal.SIGTSTP]

    def _deaths_about(self, step: int | None) -> int:
        """At this step or, since the host of a GPU is ahead by a step or not, one beside it."""
        if step is None:
            return self._deaths_at[None]
        return sum(self._deaths_at[near] for near in (step - 1, step, step + 1))

    def _prove(self) -> str | None:
        """What is wrong with the device after several tries with growing waits, or None."""
        name, problem = self.device or "the GPU", None
        for _ in self._tries():
            problem = probe(self.device, PROBE_SECONDS, lambda: bool(self._ending()))
            if problem is None or self._ending():
                return None
            say(f"{name}: {problem}")
        return f"{name} does not come back in {len(PROBE_WAITS)} tries: {problem}"

    def _tries(self) -> Iterator[None]:
        """Each behind its wait, until a signal ends this."""
        for pause in PROBE_WAITS:
            self._pause(pause)
            if self._ending():
                return
            yield

    def _pause(self, seconds: float) -> None:
        """Waits, until a signal ends this."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and not self._ending():
            time.sleep(TICK / 5)

    def _prove_gpus(self) -> str | None:
        """Leaves those of the ranks' GPUs out that do not prove themselves in several tries, and
        those that computed wrong; why no number of ranks can go on, or None."""
        kept = [gpu for gpu in self._gpus if gpu not in self._left_out]
        unproved: dict[str, str | None] = dict.fromkeys(kept)
        for _ in self._tries():
            found = probe_each([*unproved], PROBE_SECONDS, lambda: bool(self._ending()))
            if self._ending():
                return None
            unproved = {gpu: problem for gpu, problem in found.items() if problem is not None}
            for gpu, problem in unproved.items():
                say(f"{self._name(gpu)}: {problem}")
            if not unproved:
                break
        if self._ending():
            return None
        self._left_out |= {gpu: f"does not prove itself: {why}" for gpu, why in unproved.items()}
        if not self._left_out:
            return None
        kept = [gpu for gpu in kept if gpu not in unproved]
        listed = "; ".join(f"{self._name(gpu)} {why}" for gpu, why in self._left_out.items())
        count = max((n for n in self._words if n <= len(kept)), default=0)
        if count == 0:
            return listed
        fewer = kept[:count], self._words[count]
        if fewer != self._fewer:
            self._fewer = fewer
            say(
                f"{listed}: going on with {count} of {len(self._gpus)} GPUs, the same bits "
                f"({shlex.join(fewer[1])})"
            )
        return None

    def _name(self, gpu: str) -> str:
        return f"GPU {self._gpus.index(gpu)} ({gpu})"

    def _again(self) -> str:
        return shlex.join([*self.command, *self.resume])

    def _record(self, life: Life, seconds: float, action: str) -> None:
        code = life.code
        self._records.append(
            {
                "time": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
                "step": life.fatal,
                "exit": code if code is not None and code >= 0 else None,
                "signal": signal_name(-code) if code is not None and code < 0 else None,
                "op": life.op,
                "message": life.why,
                "seconds_lost": round(seconds, 3),
                "action": action,
                **({"left_out": dict(self._left_out)} if self._left_out else {}),
            }
        )
        if self.folder is None or not self.folder.is_dir() or self._lost_folder() is not None:
            return  # also of a run that has no folder yet: they follow when it has
        path = self.folder / "faults.jsonl"
        try:
            with open(path, "a", encoding="utf-8", opener=regular) as file:
                file.writelines(json.dumps(record) + "\n" for record in self._records)
                file.flush()
                os.fsync(file.fileno())
            self._records.clear()
        except OSError as error:  # a full disk ends no training
            say(f"{path}: {error.strerror}")


def say(text: str) -> None:
    """A line for people; on a terminal it may follow the bar of a training that died."""
    with contextlib.suppress(OSError):  # nobody reads it any more
        bar = "\n" if sys.stderr.isatty() else ""
        print(f"{bar}supervise: {text}", file=sys.stderr, flush=True)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number above 0, not {text!r}")
    return value


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m needle.supervise",
        usage="%(prog)s [--hang-seconds S] -- COMMAND ...",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--hang-seconds",
        type=_seconds,
        default=HANG_SECONDS,
        metavar="S",
        help="without a finished step COMMAND is killed and started again "
        f"(default: {HANG_SECONDS:g})",
    )
    parser.add_argument("command", nargs="+", metavar="COMMAND", help="the training")
    args = parser.parse_args(argv)
    return Supervisor(args.command, args.hang_seconds).run()


if __name__ == "__main__":
    sys.exit(program(main))
