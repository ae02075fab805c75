"""Run a training, and start it again after a failure.

    needle supervise [--hang-seconds S] -- COMMAND ...
    needle train --supervise ...                      the same for the trainer

COMMAND is started again, after 1 s and then 2 s, when it exits with 75
(os.EX_TEMPFAIL: the GPU or a rank is lost), when a signal kills it or a rank of
its mpirun, and when it hangs: it has written its heartbeat, the number of steps
done, into the file that NEEDLE_HEARTBEAT names, and then nothing for S seconds.
It prints its stacks then, and is killed with its process group. Any other exit
code is passed on. COMMAND resumes by itself, as --resume auto --name NAME does.

Three failures without a further step end the run, with the exit code of the
last; the third try has NEEDLE_SYNC=1, so that a fault names its op. Each
failure after COMMAND has named the folder of its run is a line of faults.jsonl
there: time, step (steps done; null before the heartbeat), exit (the code),
message, action. While another process works in that folder nothing is written
or started.

SIGINT, SIGTERM and SIGHUP are passed on: COMMAND saves and ends, and is not
started again. It has its own process group, reads nothing, writes where this
process does, and ends with it.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from needle.command import Parser, number
from needle.files import BusyError, FileError, Lock, described, printable
from needle.processes import HEARTBEAT, collecting, ends_within, kill, pass_on, signal_name, start

MPIRUN = ("mpirun", "mpiexec", "orterun", "prterun")
# A launcher that exits with 128 + n reports that one of these killed a rank.
KILLERS = tuple(signal.Signals[f"SIG{n}"] for n in ("ILL", "ABRT", "BUS", "FPE", "KILL", "SEGV"))
HANG_SECONDS = 300.0  # a step, a batch of an evaluation, and a save must each fit
MOST_FAILURES = 3  # without a further step
PAUSE = 1.0  # seconds before the first restart; it doubles
TICK = 0.1  # seconds between two looks at the process
STACK_SECONDS = 2.0  # for a hanging process to print its stacks
REAP_SECONDS = 30.0  # for a killed process to be gone


class Supervisor:
    """Run `command` until it ends by itself or restarts do not help. `run()` returns the exit code.

    again: makes the words that go on with the run from its folder; a restart appends them."""

    def __init__(
        self,
        command: Sequence[str],
        hang_seconds: float = HANG_SECONDS,
        again: Callable[[Path], list[str]] = lambda folder: [],
    ) -> None:
        self.command, self.hang_seconds, self.again = list(command), hang_seconds, again
        self._signals: list[int] = []  # received
        self._stopped = 0  # the last one that was passed on
        self._step: int | None = None  # steps done of this attempt

    def run(self) -> int:
        failures, reached, words = 0, -1, self.command
        with (
            tempfile.TemporaryDirectory(prefix="needle-") as place,
            collecting(self._signals, signal.SIGINT, signal.SIGTERM),
        ):
            self._heartbeat = Path(place) / "steps"
            while True:
                try:
                    code, why = self._attempt(words, is_last=failures == MOST_FAILURES - 1)
                except OSError as error:
                    say(f"{words[0]}: {error.strerror}")
                    return 127 if isinstance(error, FileNotFoundError) else 126
                if why is None or self._stopped:
                    return code
                step = -1 if self._step is None else self._step
                failures = failures + 1 if step <= reached else 1
                reached = max(reached, step)
                ended = f"ended: {failures} failures without a further step"
                action = "restart" if failures < MOST_FAILURES else ended
                say(f"after step {max(step, 0)}: {why}: {action}")
                folder = self._folder()
                fault = {"step": self._step, "exit": code, "message": why, "action": action}
                if folder is not None and not self._record(folder, fault) or action == ended:
                    return code
                self._pause(PAUSE * 2 ** (failures - 1))
                if self._stopped:
                    return 128 + self._stopped
                words = self.command + ([] if folder is None else self.again(folder))

    # ---- one attempt ----------------------------------------------------------------------------

    def _attempt(self, words: list[str], is_last: bool) -> tuple[int, str | None]:
        """Start the command and follow it to its end. Return (exit code as a shell has it, why a
        restart may help, or None)."""
        self._heartbeat.unlink(missing_ok=True)
        self._step = None
        environ = os.environ | {HEARTBEAT: str(self._heartbeat)}
        environ.setdefault("PYTHONFAULTHANDLER", "1")  # SIGABRT prints the stacks
        if is_last:
            environ["NEEDLE_SYNC"] = "1"
        child = start(words, env=environ)
        why = self._follow(child)
        code = os.EX_TEMPFAIL if child.returncode is None else child.returncode
        killer = -code if code < 0 else code - 128 if code - 128 in KILLERS else 0
        if killer:
            code, why = 128 + killer, why or f"killed by {signal_name(killer)}"
        elif code == os.EX_TEMPFAIL:
            why = why or "the GPU or a rank is lost"
        if why is not None:
            kill(child, 0.0)
            code = code or os.EX_TEMPFAIL  # a hang is no success
        return code, why

    def _follow(self, child: subprocess.Popen) -> str | None:
        """Wait for the end of a process. Kill one that hangs, and return that it did."""
        changed, since = None, time.monotonic()
        # mpirun kills its ranks half a second after any signal but SIGUSR1.
        instead = signal.SIGUSR1 if Path(self.command[0]).name in MPIRUN else None
        while not ends_within(child, TICK):
            last, changed = changed, self._look()
            if changed is None or changed != last:
                since = time.monotonic()
            self._stopped = pass_on(self._signals, [child], instead) or self._stopped
            idle = time.monotonic() - since
            if idle > self.hang_seconds:
                for one in (signal.SIGABRT, signal.SIGCONT):  # it may be stopped
                    child.send_signal(one)
                ends_within(child, STACK_SECONDS)
                kill(child, REAP_SECONDS)
                return f"nothing finished for {idle:.0f} s"
        self._look()
        return None

    def _look(self) -> int | None:
        """Read the heartbeat. Return the time of its last change, None while there is none."""
        try:
            changed = self._heartbeat.stat().st_mtime_ns
            text = self._heartbeat.read_bytes()
        except FileNotFoundError:
            return None
        with contextlib.suppress(ValueError):  # half written, or no number
            self._step = int(text)
        return changed

    # ---- after a failure ------------------------------------------------------------------------

    def _pause(self, seconds: float) -> None:
        """Sleep, until a signal ends this process."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and not self._stopped:
            time.sleep(TICK / 5)
            self._stopped = pass_on(self._signals, [])

    def _folder(self) -> Path | None:
        """Return the folder of the run, None as long as it is unknown."""
        try:
            return Path(os.fsdecode(self._heartbeat.with_suffix(".run").read_bytes()))
        except FileNotFoundError:
            return None

    def _record(self, folder: Path, fault: dict) -> bool:
        """Append to faults.jsonl. Return False, and say why, where that cannot be done: a process
        still works in the folder, or it is gone."""
        end = time.monotonic() + REAP_SECONDS
        now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
        while True:
            try:
                lock = Lock(folder)
                with open(folder / "faults.jsonl", "a", encoding="utf-8") as file:
                    file.write(json.dumps({"time": now, **fault}) + "\n")
                lock.release()
                return True
            except (FileError, OSError) as error:
                is_busy = isinstance(error, BusyError) and time.monotonic() < end
                if not is_busy or self._stopped:
                    say(described(error))
                    return False
                self._pause(TICK)


def say(text: str) -> None:
    """Print a line for people, on a terminal below the progress bar of the training."""
    with contextlib.suppress(OSError):  # the reader is gone
        bar = "\n" if sys.stderr.isatty() else ""
        print(printable(f"{bar}supervise: {text}"), file=sys.stderr, flush=True)


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
