"""The surroundings of a training: its ranks, its loop (Session), and the whole program (Ending).

A single process uses the same code with world size 1.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import math
import os
import shlex
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from needle import _C, nn
from needle._C import CudaError, CudaFatalError, Device, NDArray, cuda
from needle.autograd import no_grad
from needle.checkpoint import versions
from needle.data import Batches, DataError, token_bytes
from needle.distributed.control import Control, RankError, RankFailed
from needle.distributed.environment import Place
from needle.distributed.group import Group, visible_gpus
from needle.files import Lock, described, printable
from needle.processes import HEARTBEAT, collecting
from needle.training.heartbeat import beat, rest
from needle.training.log import NotFinite, RunLog
from needle.training.loop import GraphedStep, worth_recording
from needle.training.replay.proofs import batch_hash, digests
from needle.training.run import (
    Run,
    is_kept,
    keeps_weights,
    own_columns,
    report,
    report_divergence,
    report_stop,
    write_checkpoint,
    write_results,
    write_weights,
)
from needle.training.settings import Settings

# The most tokens, and the most batches, of an evaluation.
EVAL_TOKENS = {"cpu": 1 << 15, "cuda": 1 << 19}
EVAL_BATCHES = 32

# ---- ranks -------------------------------------------------------------------------------------


def starts_ranks(settings: Settings, place: Place | None) -> bool:
    """True if --gpus makes this process the one that starts the ranks. Raise ValueError if so many
    cannot be started here."""
    count = settings.gpus
    if count is None or (place is not None and place.launcher == "needle"):
        return False
    if place is not None:
        raise ValueError(
            f"--gpus {count}: {place.launcher} has started this process as rank {place.rank} of "
            f"{place.size}: leave --gpus out, and let {place.launcher} start a rank for each GPU"
        )
    if settings.device not in ("auto", "cuda"):
        raise ValueError(
            f"--gpus {count}: with --device {settings.device} there is nothing to share: leave one "
            "of them out (CUDA_VISIBLE_DEVICES chooses among GPUs)"
        )
    visible = visible_gpus()
    if count > visible:
        reason = "" if visible else f" ({cuda().reason()})"
        raise ValueError(
            f"--gpus {count}: {visible} can be used here{reason}: give a smaller number, or look "
            "at nvidia-smi and CUDA_VISIBLE_DEVICES"
        )
    return count > 1


def join(settings: Settings, argv: list[str], place: Place | None, program: Path) -> Group:
    """Join the ranks that were started together, once their flags, sources and versions agree.

    Rank 0 alone prints, and alone tells the supervisor. program: the file that runs.
    """
    if place is None or place.size == 1:
        return Group()
    if settings.supervise and place.launcher != "needle":
        raise ValueError(
            "--supervise: each rank would have a supervisor of its own: start all under one, "
            f"needle supervise -- {place.launcher} ..."
        )
    if place.rank > 0:
        os.environ.pop(HEARTBEAT, None)
        sys.stdout = open(os.devnull, "w")
    facts = {"flags": shlex.join(argv), "source": source_digest(program), **versions()}
    return Group(place, Control.join(place, facts))


def source_digest(program: Path) -> str:
    """Hash the program, the package and its core: ranks of other sources may compute other bits."""
    package = Path(__file__).resolve().parent.parent
    files = sorted(path for path in package.rglob("*") if path.suffix in (".py", ".so"))
    digest = hashlib.blake2b(digest_size=8)
    for path in [program, *files]:
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


def open_device(name: str, ranks: Group) -> Device:
    """Open the device of --device, or this rank's own if there are several, and connect the ranks.

    The supervisor's limit for hangs applies until this returns, then not again until the loop
    begins, since reading data may take long.
    """
    beat(0)
    device = ranks.device(name)
    ranks.connect(device)
    used, visible = ranks.place.local_size, 0 if device.is_host else visible_gpus()
    if used < visible and ranks.rank == 0:
        more = f": --gpus {visible} uses all" if ranks.place.launcher in ("", "needle") else ""
        print(f"{visible} GPUs are visible, {used} {'is' if used == 1 else 'are'} used{more}")
    rest()
    return device


class Failed(Exception):
    """An error for which all ranks have agreed to stop, after the same step."""


@contextlib.contextmanager
def agreed(ranks: Group, name: str) -> Iterator[None]:
    """Run the block on all ranks; if it fails to read on one, raise Failed on all."""
    failure = None
    try:
        yield
    except (DataError, OSError) as error:
        failure = error
    told = ranks.gather(name, failure and described(failure))
    for rank, theirs in enumerate(told):
        if theirs is not None:
            raise Failed(f"rank {rank}: {theirs}" if ranks.size > 1 else theirs) from failure


# ---- the loop ----------------------------------------------------------------------------------


class Due(NamedTuple):
    """Actions due after a step."""

    evaluation: bool
    weights: bool
    checkpoint: bool
    end: bool


class Stop(list):
    """The signals that end the run after the step, in order. mpirun forwards SIGUSR1. A SIGINT
    after any of them interrupts at once."""

    def append(self, number: int) -> None:
        super().append(number)
        signal.signal(signal.SIGINT, signal.default_int_handler)


STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


class Session:
    """Run the loop of a run inside `with`; `conclude` then gives the exit code. A Session owns the
    log, the handlers of stop signals and graph replay, and ends on all ranks after the same step.

    compute(ids, targets): makes the gradient of a micro-batch and returns its loss. `gradient` is
    the same, replayed as a graph if the run asks for it or if it is faster. Data that a rank cannot
    read end the loop on all ranks, after saving the steps done.
    """

    def __init__(self, run: Run, compute: Callable[[Any, Any], NDArray]) -> None:
        self.run, parallel = run, run.parallel
        self.ranks, self.gradient = parallel.group, compute
        self.ranks.same("the weights", parallel.digest())
        shape = run.settings.batch_size, run.settings.seq_len // parallel.context
        recorded = run.settings.graph
        if recorded is None:
            recorded = parallel.context == 1 and worth_recording(run.device, math.prod(shape))
        parallel.sends_early = not recorded
        if recorded:
            self.gradient = GraphedStep(compute, shape, run.device)
        if any(isinstance(part, nn.Dropout) for part in run.model.modules()):
            self.gradient = self._seeded(self.gradient)
        self._reason: str | None = None  # to stop before the last step
        self._failure: Exception | None = None
        self._where = ""
        self._stop, self._ends = Stop(), contextlib.ExitStack()

    def __enter__(self) -> Session:
        with self.ranks.rank_0_first("the log"):
            self.log = RunLog(self.run)
        self._ends.enter_context(collecting(self._stop, *STOPS))
        beat(self.run.step)
        return self

    def _seeded(self, compute: Callable[[Any, Any], NDArray]) -> Callable[[Any, Any], NDArray]:
        """compute, with NumPy's generator seeded by the run's seed, the step, the micro-batch and
        the part of its sequences: dropout is the same on any number of ranks."""

        def gradient(ids: Any, targets: Any) -> NDArray:
            before, parallel = np.random.get_state(), self.run.parallel
            part = parallel.group.rank % parallel.context
            np.random.seed([self.run.settings.seed, *next(self._numbers), part])
            try:
                return compute(ids, targets)
            finally:
                np.random.set_state(before)

        return gradient

    def begin(self) -> None:
        """Save what is kept of step 0."""
        if self.run.step == 0 and is_kept(self.run.settings, 0):
            self.save()
        if self.run.step == 0 and keeps_weights(self.run.settings, 0):
            self.save_weights()

    def micro_batches(self, step: int) -> Iterator[tuple]:
        """Yield this rank's batches of a step, after a replay's edit of weights or moments before
        it. Data that break off raise Failed on all ranks, before the last one, whose backward sends
        gradients."""
        batches, replay = self.run.batches, self.run.replay
        if replay is not None and step == replay.start + 1:
            replay.change(self.run.parallel)
        self._numbers = itertools.product([step], self.run.parallel.own_micro_batches)
        self._where = "epoch {epoch}, batch {batch}".format_map(batches.position)
        self.ranks.control.step = step
        with agreed(self.ranks, "the data"):
            for _ in self.run.parallel.own_micro_batches[1:]:
                yield batches.next()
            last = batches.next()
        yield last

    def end_step(self, step: int, losses: list[NDArray], norm: NDArray, scale: NDArray) -> Due:
        """Count, log and prove a step, and agree on the actions after it. norm, scale: of the
        gradient.

        A signal that arrives during the agreement counts for the next step.
        """
        run, log, before = self.run, self.log, self.run.position
        run.step, run.position = step, run.batches.position
        losses = run.parallel.losses(losses)
        log.queue(step, losses, norm, run.optimizer.lr, self._where)
        own = signal.Signals(self._stop[-1]).name if self._stop else None
        own = own or (None if log.is_heard else "a closed pipe")
        reasons = self.ranks.gather("the end of the step", own)
        self._reason = next(filter(None, reasons), None)
        is_last, settings = step == run.until, run.settings
        ends = is_last or self._reason is not None
        evaluates = is_last or _is_due(step, settings.eval_every)
        saves = ends or _is_due(step, settings.save_every) or is_kept(settings, step)
        if saves or _is_due(step, settings.prove):
            log.proof = self._proof(before, scale)
        return Due(evaluates, keeps_weights(settings, step), saves, ends)

    def _proof(self, before: dict[str, int], scale: NDArray) -> Callable[[], dict]:
        """Begin the proof of a step that began at this position of the data."""
        run, wait, scale = self.run, digests(self.run.parallel), _C.AsyncCopy(scale)
        known = {"step": run.step, "position": run.position}
        if run.lock is not None:
            every = run.settings.grad_accum
            known["batch"] = batch_hash(run.batches.batches, before, every)
        known["lr"] = run.optimizer.lr.hex()
        return lambda: {**known, "scale": float(scale.wait()).hex(), "digest": wait()}

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """Evaluate after a step, once its loss is known; the time does not count for the next."""
        self.log.wait()
        yield
        self.log.skip_time()

    def save(self) -> None:
        """Write a checkpoint on rank 0, with the optimizer's state of all ranks."""
        with self.run.parallel.whole_optimizer():
            self._write("the checkpoint", write_checkpoint)
        self.run.saved = self.run.step

    def save_weights(self) -> None:
        """Write the weights of a step of --keep on rank 0."""
        self._write("the weights", write_weights)

    def _write(self, what: str, write: Callable[[Run, float], None]) -> None:
        """Write a file of the last step on rank 0, after the lines of the log; the time does not
        count for the next step."""

        def write_first() -> None:
            self.log.sync()
            write(self.run, self.log.loss)

        self.ranks.first(what, write_first)
        self.log.skip_time()

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool:
        try:
            if isinstance(error, NotFinite):
                self._failure = error
                self.log.close()
                if self.ranks.rank == 0:
                    report_divergence(self.run, error, error.step - 1)
                return True
            if isinstance(error, Failed):
                self._failure = error
                if self.run.step > self.run.saved:
                    self.log.settle()
                    self.save()
                return True
            return False
        finally:
            self.log.close()
            self.run.batches.close()
            self._ends.close()
            if self.run.parallel.context > 1:
                self.run.model.share_sequences(None)

    def conclude(self) -> int:
        """Report how the run stopped, or finish it after its last step; return the exit code."""
        run, log = self.run, self.log
        if isinstance(self._failure, NotFinite):
            return 1
        if run.step < run.until or self._failure is not None:
            if self.ranks.rank == 0:
                report_stop(run, self._reason, self._failure)
            return 0 if self._failure is None else 1
        report(
            f"loss {log.first_loss:.4f} at the first step, {log.loss:.4f} at the last; "
            f"{log.seconds:.0f} s of training"
        )
        with self.ranks.rank_0_first("the plot and the sample"):
            if self.ranks.rank == 0:
                write_results(run)
        return 0


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


# ---- held-out data -----------------------------------------------------------------------------


def evaluate(run: Run) -> dict[str, float]:
    """Return val_loss in nats a token, and val_bits_per_byte if the tokenizer is known; of
    held-out data in batches that the ranks share.

    The result is empty if the held-out data are shorter than a sequence. Data that break off raise
    Failed on all ranks.
    """
    model, data, settings, parallel = run.model, run.data, run.settings, run.parallel
    tokens, length = data.held_out, settings.seq_len
    rows = min(settings.batch_size, max(len(tokens) - 1, 0) // length)
    if rows == 0:
        return {}
    ranks, context = parallel.group, parallel.context
    held_out = Batches(tokens, rows, length, vocab_size=model.config.vocab_size)
    held_out.share(range(1), 1, own_columns(length, ranks, context))
    most = EVAL_TOKENS["cpu" if model.device.is_host else "cuda"]
    limit = min(max(most // (rows * length), 1), EVAL_BATCHES)
    sizes = None if data.tokenizer is None else token_bytes(data.tokenizer)
    totals = []  # of each batch: nats, tokens, bytes of text
    model.eval()
    with agreed(ranks, "the held-out data"):
        drawn, shares = list(held_out.in_order(limit)), ranks.size // context
        for number in range(ranks.rank // context, -(-len(drawn) // shares) * shares, shares):
            if number >= len(drawn) and context == 1:
                break
            ids, targets = drawn[min(number, len(drawn) - 1)]
            with no_grad():
                loss = float(model.loss(ids, targets).numpy())
            beat()
            if number < len(drawn):  # else for ranks that share sequences, which all run the layers
                text_bytes = 0 if sizes is None else int(sizes[targets].sum())
                totals.append([loss * targets.size, targets.size, text_bytes])
    model.train()
    told = itertools.chain(*ranks.gather("the evaluation", totals))
    nats, count, text_bytes = map(math.fsum, zip(*told))
    result = {"val_loss": nats / count}
    if text_bytes:
        result["val_bits_per_byte"] = nats / math.log(2) / text_bytes
    return result


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
        self.ranks, self.code = Group(), 1
        self.lock: Lock | None = None  # of the run's folder

    def __enter__(self) -> Ending:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool:
        ranks, known, reason = self.ranks, outcome(error), None
        if known is not None:
            reason, self.code = known
        elif error is not None:
            reason = f"{type(error).__name__}: {error}"
            self.code = error.code if isinstance(error, SystemExit) else 1
        reports = known is not None and not isinstance(error, RankFailed)  # which another reports
        if reports and ranks.rank == 0:
            print(printable(f"needle train: {reason}"), file=sys.stderr)
        if self.lock is not None:
            self.lock.release()
        ranks.close(reason, self.code)
        if reports and ranks.rank > 0:
            who = "" if reason.startswith(f"rank {ranks.rank}, ") else f"rank {ranks.rank}: "
            print(printable(f"needle train: {who}{reason}"), file=sys.stderr)
        return known is not None
