"""Run a training, and restart it after a failure.

    needle supervise [--hang-seconds S] -- COMMAND ...
    needle train --supervise ...                      the same for the trainer

COMMAND is restarted when it
    exits with os.EX_TEMPFAIL (75: the GPU is lost; after a fatal CUDA fault
    only a new process gets the device),
    is killed by a signal, or is an mpirun and one of its ranks is,
    finishes no step for S seconds: it prints its stacks and is killed with its
    process group.
Any other exit code is passed on.

Before each restart a fresh process health-checks the device. Up to the step
that failed COMMAND runs with NEEDLE_SYNC=1, so that a fault that recurs names
its op. Three failures at one step, or its neighbours, end the run (the host is
a step ahead of a GPU or not), and so do eight in a row without a new
checkpoint. The exit code is that of the last failure. The second and later ones
of a row are followed by a pause of 0.5 s, which doubles up to 16 s.

If COMMAND has a rank on each of several GPUs, each GPU is health-checked. One
that fails, or that computed wrong, is left out from then on: the run goes on
with the largest number of ranks that can share its steps, on the first of the
other GPUs (CUDA_VISIBLE_DEVICES), with the same bits.

SIGINT, SIGTERM and SIGHUP are passed on once: COMMAND saves and ends, and is
not restarted. It has its own process group, reads nothing, writes where this
process does, and ends with it. Processes that COMMAND starts in sessions of
their own survive a SIGKILL of the supervisor.

Each failure is a line of faults.jsonl in the run's folder:

    time, step      when, and the first unfinished step (of a GPU possibly one
                    later); null before the first report
    exit, signal    one of them is null
    op, message     the op only where NEEDLE_SYNC was on
    seconds_lost    from the last step that is not repeated to the end of the
                    health check
    action          restart, or why there is none
    left_out        the GPUs left out until this supervisor ends, by UUID, and
                    why; absent if none

If another run has taken the folder, or the folder is gone, nothing is written
and COMMAND is not restarted: the exit code is that of the failure.

COMMAND reports by needle/heartbeat.py, as needle's trainer does. If it reports
nothing, its hangs are not seen and three failures end it; NEEDLE_RESTARTS in
its environment counts its restarts.
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

from needle.arguments import Parser, number
from needle.files import printable, regular
from needle.heartbeat import PIPE, SYNC_UNTIL
from needle.processes import Child, MessageReader, collecting, program, signal_name

MPIRUN = ("mpirun", "mpiexec", "orterun", "prterun")
# A launcher that exits with 128 + n reports that one of these killed a rank.
KILLERS = tuple(signal.Signals[f"SIG{n}"] for n in ("ILL", "ABRT", "BUS", "FPE", "KILL", "SEGV"))
HANG_SECONDS = 300.0  # a step, a batch of an evaluation, and a save must each fit
MOST_FAILURES = 3  # at one step
# Seconds before each restart of a row without a new checkpoint; one more failure ends the run.
PAUSES = (0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
TICK = 0.1  # seconds between two looks at the process
STACK_SECONDS = 2.0  # for a hanging process to print its stacks
CHECK_SECONDS = 60.0  # of a try; a context takes 0.2 s, and seconds if the driver was unloaded
CHECK_PAUSES = (0.0, 1.0, 2.0, 5.0, 10.0, 20.0, 40.0)  # seconds before each try

# Its argument is a device; without one it checks every GPU.
CHECK = """
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


# ---- health checks ------------------------------------------------------------------------------


def check_device(device: str | None, given_up: Callable[[], bool] = lambda: False) -> str | None:
    """Return why a fresh process cannot multiply two matrices on the device (None: on each GPU), or
    None if it can."""
    return _result(_start_check([] if device is None else [device]), given_up)


def check_gpus(
    gpus: Sequence[str], given_up: Callable[[], bool] = lambda: False
) -> dict[str, str | None]:
    """Check GPUs by UUID, all at once, each in a process that sees no other."""
    checks = {gpu: _start_check(["cuda:0"], CUDA_VISIBLE_DEVICES=gpu) for gpu in gpus}
    return {gpu: _result(check, given_up) for gpu, check in checks.items()}


def _start_check(devices: list[str], **environ: str) -> Child:
    root = str(Path(__file__).resolve().parent.parent)
    path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    env = os.environ | {"PYTHONPATH": path} | environ
    return Child([sys.executable, "-c", CHECK, *devices], env, capture=True)


def _result(check: Child, given_up: Callable[[], bool]) -> str | None:
    with check:
        if not check.wait(check.started + CHECK_SECONDS - time.monotonic(), given_up):
            killed = "" if check.kill() else ", and cannot be killed"
            return f"no answer in {CHECK_SECONDS:g} s{killed}"
        lines = check.printed().strip().splitlines()
    code = check.poll()
    return None if code == 0 else lines[-1] if lines else f"exit code {code}"


# ---- attempts -----------------------------------------------------------------------------------


@dataclasses.dataclass
class Attempt:
    """One process of the command and its reports."""

    child: Child
    synced: float  # the last step up to which it waits for each op
    kept: float  # time.monotonic() since which its work would be lost
    watched: bool = False
    first: int | None = None  # steps done at its first report
    step: int | None = None  # steps done
    fault: str = ""
    idle: float = 0.0  # seconds since its last report
    hung: bool = False

    @property
    def code(self) -> int | None:
        """The exit code, -n if signal n killed the process or, by a launcher's 128 + n, a rank."""
        code = self.child.poll()
        return 128 - code if code is not None and code - 128 in KILLERS else code

    @property
    def has_failed(self) -> bool:
        """True if a restart may help. A process that cannot be killed has no exit code."""
        return self.hung or self.code == os.EX_TEMPFAIL or self.code < 0

    @property
    def exit_code(self) -> int:
        """Exit code as a shell reports it; a hang is never a success."""
        code = self.child.poll()
        if code is None or (self.hung and code == 0):
            return os.EX_TEMPFAIL
        return code if code >= 0 else 128 - code

    @property
    def failed_step(self) -> int | None:
        """The first unfinished step."""
        return None if self.step is None else self.step + 1

    @property
    def op(self) -> str | None:
        """The op of the fault, known if the process waited for each op."""
        known = self.fault and self.failed_step is not None and self.failed_step <= self.synced
        return self.fault.partition(":")[0] if known else None

    @property
    def reason(self) -> str:
        if self.hung:
            return f"nothing finished for {self.idle:.0f} s"
        if self.code < 0:
            return f"killed by {signal_name(-self.code)}"
        return self.fault.partition("\n")[0] or f"exit code {self.code}"


class Supervisor:
    """Run `command` until it ends by itself or restarts do not help. `run()` returns the exit code.

    Attributes: folder and id of the run, device, resume (flags that continue it), attempts,
    failures, seconds_lost (repeated work, pauses, starts)."""

    def __init__(self, command: Sequence[str], hang_seconds: float = HANG_SECONDS) -> None:
        self.command, self.hang_seconds = list(command), hang_seconds
        self.folder: Path | None = None
        self.id: str | None = None
        self.device: str | None = None
        self.resume: list[str] = []
        self.attempts = self.failures = 0
        self.seconds_lost = 0.0
        self._gpus: list[str] = []  # of the ranks of the first attempt, in their order
        self._flags: dict[int, list[str]] = {}  # number of ranks: flags that start so many
        self._left_out: dict[str, str] = {}  # GPU: why
        self._fewer: tuple[list[str], list[str]] = [], []  # GPUs to use, and flags
        self._reached = self._saved = -1  # most steps done, and saved, by any attempt
        self._failures_at: collections.Counter[int | None] = collections.Counter()  # since then
        self._unsaved = 0  # failures since a new checkpoint
        self._synced = 0  # up to this step a restart waits for each op
        self._signals: list[int] = []  # received and not passed on yet
        self._stopped = 0  # the last one passed on
        self._records: list[dict[str, Any]] = []  # lines of faults.jsonl, not written yet

    def run(self) -> int:
        began = time.monotonic()
        self._reports = MessageReader()
        try:
            with collecting(self._signals, signal.SIGINT, signal.SIGTERM):
                code = None
                while code is None:
                    code = self._attempt()
        finally:
            self._reports.close()
        if self.failures:
            took = time.monotonic() - began
            file = "" if self._records else f" ({self.folder / 'faults.jsonl'})"
            plural = "" if self.failures == 1 else "s"
            lost = f"{self.seconds_lost:.1f} s of {took:.1f} s lost"
            say(f"{self.failures} failure{plural}, {lost}{file}")
        return code

    # ---- one attempt ----------------------------------------------------------------------------

    def _attempt(self) -> int | None:
        """Start the command and follow it to its end. Return the exit code, None for a restart."""
        try:
            attempt = self._start()
        except OSError as error:
            say(f"{self.command[0]}: {error.strerror}")
            return 127 if isinstance(error, FileNotFoundError) else 126
        self._watch(attempt)
        if not attempt.has_failed or (self._stopped and attempt.child.poll() == -self._stopped):
            return attempt.exit_code
        self.failures += 1
        self._unsaved += 1
        self._failures_at[attempt.failed_step] += 1
        code, action = self._after(attempt)
        seconds = time.monotonic() - attempt.kept
        self.seconds_lost += seconds
        step = attempt.failed_step
        where = "before the first step" if step is None else f"step {step}"
        op = f" The op is {attempt.op}." if attempt.op else ""
        say(f"{where}: {attempt.reason}.{op} {seconds:.1f} s lost: {action}")
        self._record(attempt, seconds, action)
        return code

    def _start(self) -> Attempt:
        environ = os.environ | {PIPE: self._reports.path, "NEEDLE_RESTARTS": str(self.attempts)}
        environ.setdefault("PYTHONFAULTHANDLER", "1")  # SIGABRT prints the stacks
        gpus, flags = self._fewer
        if gpus:
            environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
        synced: float = self._synced
        if os.environ.get("NEEDLE_SYNC", "0") not in ("", "0"):
            synced = math.inf
        elif synced:
            environ |= {"NEEDLE_SYNC": "1", SYNC_UNTIL: str(self._synced)}
        child = Child([*self.command, *self.resume, *flags], environ)
        self.attempts += 1
        return Attempt(child, synced, kept=child.started)

    def _watch(self, attempt: Attempt) -> None:
        """Follow the process until it ends or hangs."""
        before = time.monotonic()
        while attempt.child.poll() is None:
            select.select([self._reports], [], [], TICK)
            now = time.monotonic()
            attempt.idle += min(now - before, 5 * TICK)  # this process may have been stopped
            before = now
            self._read_reports(attempt)
            while self._signals:
                self._pass_on(attempt, self._signals.pop(0))
            if attempt.watched and attempt.idle > self.hang_seconds:
                attempt.hung = True
                for number in (signal.SIGABRT, signal.SIGCONT):  # it may be stopped
                    attempt.child.signal(number)
                attempt.child.wait(STACK_SECONDS)
                break
        self._read_reports(attempt)

    def _pass_on(self, attempt: Attempt, number: int) -> None:
        if number == signal.SIGTSTP:  # Ctrl-Z, until fg or bg
            attempt.child.signal(signal.SIGSTOP, group=True)
            os.kill(os.getpid(), signal.SIGSTOP)
            attempt.child.signal(signal.SIGCONT, group=True)
            return
        self._stopped = number
        # mpirun kills its ranks half a second after any signal but SIGUSR1.
        by_mpirun = Path(self.command[0]).name in MPIRUN
        attempt.child.signal(signal.SIGUSR1 if by_mpirun else number)

    def _read_reports(self, attempt: Attempt) -> None:
        for facts in self._reports.read():
            try:
                self._learn(attempt, facts)
            except (TypeError, ValueError, AttributeError) as error:
                say(f"a report of the command cannot be used (needle/heartbeat.py): {error}")

    def _learn(self, attempt: Attempt, facts: dict[str, Any]) -> None:
        """Use the facts that needle/heartbeat.py lists, and ignore others."""
        now = time.monotonic()
        attempt.idle, attempt.watched = 0.0, facts.get("watched") is not False
        if isinstance(facts.get("run"), str):
            self.folder = Path(facts["run"])
        if isinstance(facts.get("id"), str):
            self.id = facts["id"]
        if isinstance(facts.get("resume"), list):
            self.resume = _words(facts["resume"])
        if isinstance(facts.get("device"), str):
            self.device = facts["device"]
        gpus, flags, wrong = (facts.get(name) for name in ("gpus", "ranks", "wrong"))
        if isinstance(gpus, list) and isinstance(flags, dict) and not self._gpus:
            self._flags = {int(count): _words(flags[count]) for count in flags}
            self._gpus = _words(gpus)
        if isinstance(wrong, list):
            self._left_out |= {gpu: "computed wrong" for gpu in self._gpus if gpu in wrong}
        if isinstance(facts.get("fault"), str):
            attempt.fault = facts["fault"]
        step = facts.get("step")
        if isinstance(step, int):
            if attempt.first is None:
                attempt.first = step
            elif self.attempts > 1 and attempt.step == attempt.first < step:  # it has started
                self.seconds_lost += now - attempt.child.started
                attempt.kept = now
            attempt.step = step
            if step > self._reached:
                self._reached = step
                self._failures_at.clear()
        if "saved" in facts:
            attempt.kept = now
            if isinstance(facts["saved"], int) and facts["saved"] > self._saved:
                self._saved, self._unsaved = facts["saved"], 0

    # ---- after a failure ------------------------------------------------------------------------

    def _after(self, attempt: Attempt) -> tuple[int | None, str]:
        """Return (exit code or None for a restart, the action in words)."""
        if not attempt.child.kill():  # the rest of its group too
            return os.EX_TEMPFAIL, (
                f"ended: process {attempt.child.pid} cannot be killed, a driver holds it. "
                f"Continue on another device: {self._continue()}"
            )
        if self._stopped:
            return attempt.exit_code, f"ended: stopped by {signal_name(self._stopped)}"
        step = attempt.failed_step
        near = [None] if step is None else [step - 1, step, step + 1]
        if sum(self._failures_at[one] for one in near) >= MOST_FAILURES:
            return attempt.exit_code, f"ended: {MOST_FAILURES} failures at this step"
        if self._unsaved > len(PAUSES):
            return attempt.exit_code, f"ended: {self._unsaved} failures without a new checkpoint"
        if step is not None:  # if the host was ahead, it was the next step
            self._synced = max(self._synced, step + 1)
        pause = PAUSES[self._unsaved - 1]
        if pause:
            say(f"{self._unsaved} failures without a new checkpoint: waiting {pause:g} s")
            self._pause(pause)
        problem = self._check_gpus() if self._gpus else self._check_device()
        if self._ending():
            number = self._ending()[-1]
            return 128 + number, f"ended: stopped by {signal_name(number)}"
        if problem is not None:
            return os.EX_TEMPFAIL, f"ended: {problem}. Continue elsewhere: {self._continue()}"
        lost = self._lost_folder()
        return (None, "restart") if lost is None else (attempt.exit_code, f"ended: {lost}")

    def _lost_folder(self) -> str | None:
        """Return why the folder is no longer that of the run, or None. A config.json that cannot be
        read proves nothing."""
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
            "its folder was renamed, --resume with the new path continues it"
        )

    def _ending(self) -> list[int]:
        """The received signals that end this process; Ctrl-Z waits for the next attempt."""
        return [number for number in self._signals if number != signal.SIGTSTP]

    def _pause(self, seconds: float) -> None:
        """Sleep, until a signal ends this process."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and not self._ending():
            time.sleep(TICK / 5)

    def _tries(self) -> Iterator[None]:
        """Pause before each try, until a signal ends this process."""
        for pause in CHECK_PAUSES:
            self._pause(pause)
            if self._ending():
                return
            yield

    def _check_device(self) -> str | None:
        """Return what is wrong with the device after several tries, or None."""
        if self.device == "cpu":
            return None
        name, problem = self.device or "the GPU", None
        for _ in self._tries():
            problem = check_device(self.device, lambda: bool(self._ending()))
            if problem is None or self._ending():
                return None
            say(f"{name}: {problem}")
        return f"{name} does not come back in {len(CHECK_PAUSES)} tries: {problem}"

    def _check_gpus(self) -> str | None:
        """Leave out the GPUs that fail each of several tries, and choose the number of ranks for
        the others. Return why none can continue, or None."""
        kept = [gpu for gpu in self._gpus if gpu not in self._left_out]
        failing: dict[str, str | None] = dict.fromkeys(kept)
        for _ in self._tries():
            found = check_gpus([*failing], lambda: bool(self._ending()))
            failing = {gpu: problem for gpu, problem in found.items() if problem is not None}
            if self._ending() or not failing:
                break
            for gpu, problem in failing.items():
                say(f"{self._name(gpu)}: {problem}")
        if self._ending():
            return None
        self._left_out |= {gpu: f"failed its health check: {why}" for gpu, why in failing.items()}
        if not self._left_out:
            return None
        kept = [gpu for gpu in kept if gpu not in failing]
        listed = "; ".join(f"{self._name(gpu)} {why}" for gpu, why in self._left_out.items())
        count = max((n for n in self._flags if n <= len(kept)), default=0)
        if count == 0:
            return listed
        fewer = kept[:count], self._flags[count]
        if fewer != self._fewer:
            self._fewer = fewer
            say(
                f"{listed}: continuing with {count} of {len(self._gpus)} GPUs, the same bits "
                f"({shlex.join(fewer[1])})"
            )
        return None

    def _name(self, gpu: str) -> str:
        return f"GPU {self._gpus.index(gpu)} ({gpu})"

    def _continue(self) -> str:
        return shlex.join([*self.command, *self.resume])

    def _record(self, attempt: Attempt, seconds: float, action: str) -> None:
        """Append to faults.jsonl; records wait for a run that has no folder yet."""
        code = attempt.code
        self._records.append(
            {
                "time": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
                "step": attempt.failed_step,
                "exit": code if code is not None and code >= 0 else None,
                "signal": signal_name(-code) if code is not None and code < 0 else None,
                "op": attempt.op,
                "message": attempt.reason,
                "seconds_lost": round(seconds, 3),
                "action": action,
                **({"left_out": dict(self._left_out)} if self._left_out else {}),
            }
        )
        if self.folder is None or not self.folder.is_dir() or self._lost_folder() is not None:
            return
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
    """Print a line for people, on a terminal below the progress bar of the training."""
    with contextlib.suppress(OSError):  # the reader is gone
        bar = "\n" if sys.stderr.isatty() else ""
        print(printable(f"{bar}supervise: {text}"), file=sys.stderr, flush=True)


def _words(given: list[Any]) -> list[str]:
    """Return words for a command line or the environment. TypeError, ValueError."""
    words = [str(word) for word in given]
    if b"\0" in os.fsencode("".join(words)):
        raise ValueError(f"a character of value 0 in {given}")
    return words


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(
        prog="needle supervise",
        usage="%(prog)s [--hang-seconds S] -- COMMAND ...",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--hang-seconds",
        type=number(0, above=True),
        default=HANG_SECONDS,
        metavar="S",
        help="restart COMMAND if it finishes no step for so long (default: %(default)g)",
    )
    parser.add_argument("command", nargs="+", metavar="COMMAND", help="the training")
    args = parser.parse_args(argv)
    return Supervisor(args.command, args.hang_seconds).run()


if __name__ == "__main__":
    sys.exit(program(main))
