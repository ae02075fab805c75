"""The log of a run: metrics.jsonl, the progress bar or plain lines, TensorBoard, W&B.

A line of metrics.jsonl is an object:

    step                number of the step, from 1
    tokens              trained on so far
    loss                mean over the step's tokens, in nats
    lr, grad_norm       of the step; the norm is that before clipping
    tokens_per_second   of the step, without evaluating and saving
    seconds             of training so far, over all parts of a resumed run
    val_loss, val_bits_per_byte     if the step was followed by an evaluation

Between these lie the lines of proof (proofs.py).

On a GPU the host runs ahead of the device. The copies of a step's loss and norm to the host start
when the step is queued (`queue`) and are awaited when the next one is, or at `wait`.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import resource
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from needle import _C
from needle._C import NDArray
from needle.files import naming, printable, replace_text
from needle.processes import silence, terminal_bar
from needle.training.heartbeat import beat
from needle.training.peaks import peak
from needle.training.replay.proofs import Log, chained
from needle.training.run import Run

PLAIN_LINES = 40  # of a run whose output is no terminal


class NotFinite(ArithmeticError):
    """A loss or a gradient norm that is not finite."""

    def __init__(self, step: int, message: str) -> None:
        super().__init__(f"step {step}: {message}")
        self.step = step


def drop_lines_after(path: Path, step: int) -> tuple[float, float, Any]:
    """Cut metrics.jsonl back to `step`: later steps were not saved and are computed again.

    Return the first loss (nan if there is none), the seconds trained, and the chain of proofs."""
    replace_text(path, "".join(f"{line}\n" for line in Log(path, step).texts))
    kept = Log(path)
    lines = [*kept.steps.values()]
    first, last = (lines[0], lines[-1]) if lines else ({"loss": math.nan}, {})
    return first["loss"], last.get("seconds", 0.0), kept.chain


class RunLog:
    """Log a run into its folder from the steps done on. A further rank, which has no lock of the
    folder, awaits its numbers and writes nothing."""

    def __init__(self, run: Run) -> None:
        settings, self._device = run.settings, run.device
        self._start, self._steps = run.step, run.until
        self._tokens_per_step = settings.sequences * settings.seq_len
        self.first_loss, self.seconds = math.nan, 0.0  # of training, over all parts of the run
        self.loss = math.nan
        self.path = self._bar = None
        self._trackers: list[Tracker] = []
        if run.lock is not None:
            self._trackers = trackers_of(run)
            self.path = run.folder / "metrics.jsonl"
            self.first_loss, self.seconds, self._chain = drop_lines_after(self.path, self._start)
            self._file = open(self.path, "a", encoding="utf-8")
            shape = {"bar_format": "{n_fmt}/{total_fmt} {desc} |{bar}|"}
            self._bar = terminal_bar(total=self._steps, initial=self._start, **shape)
        self._flops_per_token = run.model.flops_per_token(settings.seq_len)
        self._peak = peak(self._device.properties()["name"], settings.dtype)
        self._line: dict | None = None  # of the queued step
        self.proof: Callable[[], dict] | None  # waits for the line of proof behind it
        self._mark = self._started = time.perf_counter()
        self.is_heard = True  # False once the reader of the output is gone

    def queue(
        self, step: int, losses: Sequence[NDArray], norm: NDArray, lr: float, where: str
    ) -> None:
        """Take a step that the device still computes, and write the line of the step before it."""
        line = {"step": step, "tokens": step * self._tokens_per_step, "loss": None, "lr": lr}
        copies = [_C.AsyncCopy(number) for number in (*losses, norm)]
        self.settle()
        self._line, self._copies, self._where, self.proof = line, copies, where, None
        if self._device.is_host:
            self.wait()

    def wait(self) -> None:
        """Wait for the queued step. Raise NotFinite, which names step and batch."""
        line = self._line
        if line["loss"] is not None:
            return
        *values, norm = (float(copy.wait()) for copy in self._copies)
        broken = [i for i, value in enumerate(values) if not math.isfinite(value)]
        if broken and len(values) > 1:
            self._where += f", micro-batch {broken[0]} of the {len(values)} from there"
        loss = values[broken[0]] if broken else math.fsum(values) / len(values)
        line |= {"loss": loss, "grad_norm": norm}
        for what, value in (("loss", loss), ("gradient norm", norm)):
            if not math.isfinite(value):
                raise NotFinite(line["step"], f"the {what} is {value} ({self._where})")
        beat(line["step"])
        now = time.perf_counter()
        duration = now - self._mark
        self._mark = now
        self.seconds += duration
        line["tokens_per_second"] = round(self._tokens_per_step / duration, 1)
        line["seconds"] = round(self.seconds, 3)
        self.loss = loss
        if math.isnan(self.first_loss):
            self.first_loss = loss

    def finish(self, **evaluated: float) -> None:
        """Write the line of the queued step, with the results of an evaluation after it."""
        self.wait()
        line, self._line = {**self._line, **evaluated}, None
        if self.path is None:
            return
        self._add(json.dumps(line))
        if self.proof is not None:
            proof = {**self.proof(), "previous": self._chain.hexdigest()}
            self._add(json.dumps(proof), is_proof=True)
        with naming(self.path):
            self._file.flush()
        for tracker in self._trackers:
            tracker.log(line)
        try:
            self._show(line, evaluated)
        except BrokenPipeError:
            self.is_heard, self._bar = False, None
            silence()

    def _add(self, line: str, is_proof: bool = False) -> None:
        self._file.write(line + "\n")
        self._chain = chained(self._chain, line, is_proof)

    def settle(self) -> None:
        """Write the line of the queued step, if there is one."""
        if self._line is not None:
            self.finish()

    def skip_time(self) -> None:
        """Exclude the time since the last step (evaluating, saving) from the next one."""
        self._mark = time.perf_counter()

    def sync(self) -> None:
        """Make all lines survive a power cut."""
        if self.path is None:
            return
        with naming(self.path):
            self._file.flush()  # a line that was refused before
            os.fsync(self._file.fileno())
        for tracker in self._trackers:
            tracker.flush()

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
        if self.path is not None:
            with contextlib.suppress(OSError):  # a line that was refused, which ended the run
                self._file.close()
        for tracker in self._trackers:
            try:
                tracker.close()
            except Exception as error:  # of many classes; the run has its lines
                print(f"needle train: {printable(str(error))}", file=sys.stderr)
        self._trackers = []

    # ---- the terminal -------------------------------------------------------------------------

    def _memory(self) -> float:
        if self._device.is_host:
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return self._device.memory_stats()["peak_bytes"]

    def _show(self, line: dict, evaluated: dict) -> None:
        step, speed = line["step"], line["tokens_per_second"]
        pace = (time.perf_counter() - self._started) / (step - self._start)
        left = clock(pace * (self._steps - step))
        if self._bar is not None:
            self._bar.set_description_str(
                f"loss {line['loss']:.2f} {short(speed)} tok/s left {left}", refresh=False
            )
            self._bar.update(step - self._bar.n)
        elif step in (self._start + 1, self._steps) or step % -(-self._steps // PLAIN_LINES) == 0:
            used = self._memory() / 2**30
            mfu = [f"MFU {speed * self._flops_per_token / self._peak:.0%}"] if self._peak else []
            facts = [
                f"step {step}/{self._steps}",
                f"loss {line['loss']:.4f}",
                f"lr {line['lr']:.1e}",
                f"norm {line['grad_norm']:.2f}",
                f"{short(speed)} tok/s",
                *mfu,
                f"{used:.{int(used < 10)}f} GiB",
                f"left {left}",
            ]
            print("  ".join(facts), flush=True)
        if evaluated:
            text = f"step {step}/{self._steps}  held-out loss {evaluated['val_loss']:.4f}"
            if "val_bits_per_byte" in evaluated:
                text += f", {evaluated['val_bits_per_byte']:.4f} bits a byte"
            if self._bar is not None:
                self._bar.write(text)
            else:
                print(text, flush=True)


def clock(seconds: float) -> str:
    """Write a duration as 1:42, or 2:01:42."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def short(number: float) -> str:
    """Write a number as 950, 17k, 1.1M."""
    for size, letter in ((1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.{int(number < 10 * size)}f}{letter}"
    return f"{number:.0f}"


# ---- trackers ----------------------------------------------------------------------------------


class Tracker(NamedTuple):
    """TensorBoard or Weights & Biases, which get each line of metrics.jsonl."""

    log: Callable[[dict[str, float]], Any]
    flush: Callable[[], Any]  # before a checkpoint
    close: Callable[[], Any]


def trackers_of(run: Run) -> list[Tracker]:
    """Return the trackers of a run. ValueError for one that cannot be used.

    TensorBoard hides the later steps that a killed run wrote. A run is one of W&B through all
    resumes, by the id in its file wandb_id, and steps that a killed run sent are sent again.
    """
    settings, folder, found = run.settings, run.folder, []
    if settings.tensorboard:
        with _needing("tensorboardX", "--tensorboard"):
            import tensorboardX
        writer = tensorboardX.SummaryWriter(str(folder / "tensorboard"), purge_step=run.step + 1)

        def add(line: dict[str, float]) -> None:
            for name, value in line.items():
                if name != "step":
                    writer.add_scalar(name, value, line["step"])

        found.append(Tracker(add, writer.flush, writer.close))
    if settings.wandb is not None:
        with _needing("wandb", "--wandb"):
            import wandb
        kept = folder / "wandb_id"
        if not kept.exists():
            kept.write_text(uuid.uuid4().hex + "\n")
        place = {"name": folder.name, "dir": str(folder), "id": kept.read_text().strip()}
        try:
            sent = wandb.init(
                project=settings.wandb, **place, resume="allow", config=settings.to_json()
            )
            sent.define_metric("*", step_metric="step")
        except Exception as error:  # of many classes: not logged in, no network, a bad name
            raise ValueError(
                f"--wandb {settings.wandb}: {error} (WANDB_MODE=offline needs no account and no "
                "network)"
            ) from error
        found.append(Tracker(sent.log, lambda: None, sent.finish))
    return found


@contextlib.contextmanager
def _needing(package: str, flag: str) -> Iterator[None]:
    try:
        yield
    except ImportError as error:
        raise ValueError(
            f"{flag} needs the package {package}: {sys.executable} -m pip install {package}"
        ) from error
