"""The surroundings of a training: of its loop, Session, and of the whole program, Ending."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from needle._C import CudaError, CudaFatalError, NDArray
from needle.distributed.control import RankError, RankFailed
from needle.distributed.group import Group
from needle.files import described, printable
from needle.training import trackers
from needle.training.graphed import GraphedStep, worth_recording
from needle.training.heartbeat import beat
from needle.training.log import NotFinite, RunLog
from needle.training.peaks import peak
from needle.training.ranks import Failed, agree, agreed
from needle.training.run import (
    Run,
    finish,
    is_kept,
    keeps_weights,
    report,
    report_divergence,
    report_stop,
    write_checkpoint,
    write_weights,
)


class Due(NamedTuple):
    """Actions due after a step."""

    evaluation: bool
    weights: bool
    checkpoint: bool
    end: bool


class Stop:
    """Let SIGINT, SIGTERM, SIGHUP and SIGUSR1 end the run after the step.

    `reason` names the signal. mpirun forwards SIGUSR1. A second SIGINT interrupts at once. An
    ignored SIGHUP (nohup) stays ignored.
    """

    def __init__(self) -> None:
        self.reason: str | None = None
        numbers = [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            numbers.append(signal.SIGHUP)
        self._before = {number: signal.signal(number, self._on_signal) for number in numbers}

    def _on_signal(self, number: int, frame: Any) -> None:
        self.reason = signal.Signals(number).name
        signal.signal(signal.SIGINT, signal.default_int_handler)

    def restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


class Session:
    """Run the loop of a run inside `with`; `conclude` then gives the exit code. A Session owns the
    log, the handlers of stop signals and graph replay, and ends on all ranks after the same step.

    compute(ids, targets): makes the gradient of a micro-batch and returns its loss. `gradient` is
    the same, replayed as a graph if the run asks for it or if it is faster. An error that a step
    meets in reading or writing ends the loop on all ranks, after saving the steps done.
    """

    def __init__(self, run: Run, compute: Callable[[Any, Any], NDArray]) -> None:
        self.run, parallel = run, run.parallel
        self.ranks, self.gradient = parallel.group, compute
        self.ranks.same("the weights", parallel.digest())
        shape = run.settings.batch_size, run.settings.seq_len // parallel.context
        recorded = run.settings.graph
        if recorded is None:
            recorded = parallel.context == 1 and worth_recording(run.device, math.prod(shape))
        if recorded:
            self.gradient = GraphedStep(compute, shape, run.device)
        self._reason: str | None = None  # to stop before the last step
        self._failure: Exception | None = None
        self._where, self._waited = "", 0.0

    def __enter__(self) -> Session:
        with self.ranks.rank_0_first("the log"):
            self.log = open_log(self.run)
        self._stop = Stop()
        beat(self.run.step)
        return self

    def begin(self) -> None:
        """Save what is kept of step 0."""
        if self.run.step == 0 and is_kept(self.run.settings, 0):
            self.save()
        if self.run.step == 0 and keeps_weights(self.run.settings, 0):
            self.save_weights()

    @contextlib.contextmanager
    def reading(self, step: int) -> Iterator[None]:
        """Compute the micro-batches of a step; data that break off raise Failed on all ranks."""
        batches = self.run.batches
        self._where = f"epoch {batches.epoch}, batch {batches.batch}"
        self._waited, self.ranks.control.step = batches.waited, step
        with agreed(self.ranks, "the gradients"):
            yield

    def end_step(self, step: int, losses: list[NDArray], norm: NDArray) -> Due:
        """Count and log a step, and agree on the actions after it.

        A signal that arrives during the agreement counts for the next step.
        """
        run, log, failure = self.run, self.log, None
        run.step, run.position = step, run.batches.position
        waited = 1e3 * (run.batches.waited - self._waited)
        losses = run.parallel.losses(losses)
        try:
            log.queue(step, losses, norm, run.optimizer.lr, self._where, waited)
        except OSError as error:  # of the line before: this step is done
            failure = error
        if not log.is_heard:
            self._stop.reason = self._stop.reason or "a closed pipe"
        self._reason, self._failure = agree(
            self.ranks, "the end of the step", failure, self._stop.reason
        )
        is_last, settings = step == run.settings.steps, run.settings
        ends = is_last or self._reason is not None or self._failure is not None
        evaluates = is_last or _is_due(step, settings.eval_every)
        saves = ends or _is_due(step, settings.save_every) or is_kept(settings, step)
        return Due(evaluates, keeps_weights(settings, step), saves, ends)

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """Evaluate after a step, once its loss is known; the time does not count for the next."""
        with agreed(self.ranks, "the evaluation's end"):
            self.log.wait()
            yield
        self.log.skip_time()

    def save(self) -> None:
        """Write a checkpoint on rank 0, with the optimizer's state of all ranks; the time does not
        count for the next step."""
        run = self.run
        with run.parallel.whole_optimizer():
            self.ranks.first("the checkpoint", lambda: write_checkpoint(run, self.log))
        run.saved = run.step
        self.log.skip_time()

    def save_weights(self) -> None:
        """Write the weights of a step of --keep on rank 0; the time does not count for the next
        step."""
        self.ranks.first("the weights", lambda: write_weights(self.run, self.log))
        self.log.skip_time()

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool:
        try:
            if isinstance(error, NotFinite):
                self._failure = error
                self.log.close()
                if self.ranks.rank == 0:
                    report_divergence(self.run, error, error.step - 1)
                return True
            # The ranks do not know an OSError of one of them, and end by its report.
            if isinstance(error, Failed) or (isinstance(error, OSError) and self.ranks.size == 1):
                self._failure = error
                if self.run.step > self.run.saved:
                    self.log.settle()
                    self.save()
                return True
            return False
        finally:
            self.log.close()
            self.run.batches.close()
            self._stop.restore()
            if self.run.parallel.context > 1:
                self.run.model.share_sequences(None)

    def conclude(self) -> int:
        """Report how the run stopped, or finish it after its last step; return the exit code."""
        run, log = self.run, self.log
        if isinstance(self._failure, NotFinite):
            return 1
        if run.step < run.settings.steps or self._failure is not None:
            if self.ranks.rank == 0:
                report_stop(run, self._reason, self._failure)
            return 0 if self._failure is None else 1
        report(
            f"loss {log.first_loss:.4f} at the first step, {log.loss:.4f} at the last; "
            f"{log.seconds:.0f} s of training"
        )
        with self.ranks.rank_0_first("the plot and the sample"):
            if self.ranks.rank == 0:
                finish(run)
        return 0


def open_log(run: Run) -> RunLog:
    settings, opened = run.settings, []
    if run.lock is not None:
        opened = trackers.start(settings, run.lock.folder(), run.step)
    return RunLog(
        run.lock,
        run.device,
        run.step,
        settings.steps,
        settings.sequences * settings.seq_len,
        run.model.flops_per_token(settings.seq_len),
        peak(run.device.properties()["name"], settings.dtype),
        opened,
    )


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


# ---- the end of the program --------------------------------------------------------------------


def outcome(error: BaseException | None) -> tuple[str, int] | None:
    """Return (message, exit code) of an error that users meet, None of any other."""
    if isinstance(error, CudaFatalError):
        return f"the GPU is lost: {error}\nstart again with --resume auto", os.EX_TEMPFAIL
    if isinstance(error, (CudaError, MemoryError)):
        remedy = "--recompute, or a smaller --batch-size, with --grad-accum to keep the step's size"
        return f"{str(error) or 'out of memory'}\n(where memory ran out: {remedy})", 1
    if isinstance(error, (RankError, RankFailed)):
        return str(error), error.code
    if isinstance(error, BrokenPipeError):
        return None
    if isinstance(error, (ValueError, OSError)):
        return described(error), 1
    if isinstance(error, KeyboardInterrupt):  # before the first step, or for the second time
        return "interrupted", 130
    return None


class Ending:
    """End a program: report its error, release the run's folder, and leave the other ranks.

    with Ending() as ending:
        ...
        ending.code = 0
    return ending.code
    """

    def __init__(self) -> None:
        self.ranks, self.run, self.code = Group(), None, 1
        self.run: Run | None

    def __enter__(self) -> Ending:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool:
        ranks, known, reason = self.ranks, outcome(error), None
        if known is not None:
            reason, self.code = known
        elif error is not None:
            reason, self.code = f"{type(error).__name__}: {error}", 1
        reports = known is not None and not isinstance(error, RankFailed)  # which another reports
        if reports and ranks.rank == 0:
            print(printable(f"needle train: {reason}"), file=sys.stderr)
        if self.run is not None and self.run.lock is not None:
            self.run.lock.release()
        ranks.close(reason, self.code)
        if reports and ranks.rank > 0:
            who = "" if reason.startswith(f"rank {ranks.rank}, ") else f"rank {ranks.rank}: "
            print(printable(f"needle train: {who}{reason}"), file=sys.stderr)
        return known is not None
