"""A run: the parts that its loop works on, its checkpoints and descriptions, and its end."""

from __future__ import annotations

import argparse
import dataclasses
import json
import shlex
import sys
from pathlib import Path

import numpy as np

from needle import models, optim, supervise
from needle.arguments import wrapped
from needle.checkpoint import (
    checkpoint_path,
    prune_checkpoints,
    save_checkpoint,
    versions,
    weights_path,
)
from needle.data import Prefetch, TokenData
from needle.distributed.data_parallel import DataParallel
from needle.files import Lock, described, printable, replacing
from needle.heartbeat import beat, rest, supervised
from needle.processes import command_line, silence
from needle.training import folder as folders
from needle.training import recipes, state
from needle.training.log import RunLog
from needle.training.plot import plot
from needle.training.settings import data_of

SAMPLE_TOKENS = 120


@dataclasses.dataclass
class Run:
    """The parts of a run. Those of `args` alone may change at a resume."""

    args: argparse.Namespace  # the command line
    folder: Path
    lock: Lock | None  # rank 0 holds it
    id: str  # of config.json and of each checkpoint
    settings: dict
    data: TokenData
    model: models.LanguageModel
    optimizer: optim.AdamW
    batches: Prefetch
    parallel: DataParallel  # this rank's share of a step
    step: int = 0  # steps done

    def __post_init__(self) -> None:
        self.device = self.model.device
        if self.data.tokenizer is not None:
            self.model.tokenizer = self.data.tokenizer
        self.saved = self.step  # steps up to the last checkpoint
        self.position = self.batches.position  # in the data, after the steps done


# ---- checkpoints -------------------------------------------------------------------------------


def write_checkpoint(run: Run, log: RunLog) -> None:
    """Write the checkpoint of run.step; keep the last two, the last one followed by `--save-every`
    finite steps, and those of a recipe."""
    log.sync()
    schedule = {name: run.settings[name] for name in ("schedule", "lr", "warmup", "steps")}
    with run.lock.writing() as at:
        folder = at / "checkpoints"
        save_checkpoint(
            run.model,
            run.optimizer,
            run.position["epoch"],
            log.loss,
            checkpoint_path(folder, run.step),
            run=run.id,
            step=run.step,
            data=run.position,
            fingerprint=run.data.fingerprint,
            schedule=schedule,
            settings=run.settings,
            products=state.products_of(run.model),
        )
        if run.step > 0:  # a run of no finished step leaves its name to another
            folders.note_saved(at)
        beat()
        prune_checkpoints(
            folder,
            run.step,
            forever=lambda step: is_kept(run.settings, step),
            following=prove_after(run),
        )


def is_kept(settings: dict, step: int) -> bool:
    """True if the whole checkpoint of this step is kept for good."""
    if "keep_optimizer" in settings and recipes.keeps(settings["keep"])(step):
        return True
    return settings["recipe"] is not None and recipes.keeps(recipes.PUBLISHED)(step)


def keeps_weights(settings: dict, step: int) -> bool:
    """True if the weights of this step are kept for good, in a file without the optimizer."""
    is_named = "keep" in settings and recipes.keeps(settings["keep"])(step)
    return is_named and not is_kept(settings, step)


def write_weights(run: Run, log: RunLog) -> None:
    """Write the weights of run.step."""
    log.sync()
    with run.lock.writing() as at:
        path = weights_path(at / "checkpoints", run.step)
        epoch = run.position["epoch"]
        save_checkpoint(run.model, None, epoch, log.loss, path, run=run.id, step=run.step)
    beat()


def prove_after(run: Run) -> int:
    """Return how many finite steps prove the checkpoint before them: those up to the next save."""
    return max(run.settings["save_every"], 1)


def write_description(run: Run) -> None:
    """Write config.json, and the tokenizer's files."""
    recipe, optimizer = run.settings["recipe"], run.optimizer
    files = {} if run.data.tokenizer is None else {**run.data.tokenizer.files}
    special_ids = json.loads(files.pop("config.json", "{}"))
    description = {
        "id": run.id,
        "settings": run.settings,
        "recipe": recipe and {"name": recipe, "changed": recipes.changes(run.settings)},
        "optimizer": {
            "class": type(optimizer).__name__,
            **{name: getattr(optimizer, name) for name in optimizer.hyperparameters},
        },
        "model": run.model.config.to_dict(),
        "parameters": run.model.num_parameters(),
        "data": {
            **data_of(run.settings),
            "id_limit": run.model.config.vocab_size,
            "source": run.data.source,
            "fingerprint": run.data.fingerprint,
        },
        "device": {"name": run.device.properties()["name"], "device": str(run.device)},
        "versions": versions(),
        "saved": False,
        **special_ids,
    }
    with run.lock.writing() as at:
        folders.write_description(at, description)
        for name, text in files.items():
            with replacing(at / name) as file:
                file.write(text.encode())


# ---- going on ----------------------------------------------------------------------------------


def resume_command(run: Run) -> str:
    """Return the command that resumes the run, with the flags that a checkpoint does not hold."""
    words, args, place = [], run.args, run.parallel.group.place
    if place.launcher not in ("", "needle"):
        words += [*command_line("supervise", "-m", "needle.supervise"), "--"] * supervised()
        words += [place.launcher] + ["-n", str(place.size)] * (place.launcher == "mpirun")
    words += [*command_line("train", sys.argv[0]), *folders.again(run.folder)]
    words += ["--gpus", str(place.size)] if place.launcher == "needle" else []
    words += ["--device", args.device] if args.device != "auto" else []
    words += ["--tensorboard"] * args.tensorboard
    words += [] if args.graph is None else ["--graph" if args.graph else "--no-graph"]
    words += ["--recompute"] * args.recompute
    words += folders.flag("--import", run.settings["import"]) if "import" in run.settings else []
    if supervised() and place.launcher in ("", "needle"):
        words += ["--supervise"]
        if args.hang_seconds != supervise.HANG_SECONDS:
            words += ["--hang-seconds", f"{args.hang_seconds:g}"]
    words += folders.flag("--wandb", args.wandb) if args.wandb is not None else []
    return shlex.join(words)


def longer(run: Run) -> str:
    """Return how to train the model of a finished run further."""
    if run.settings["schedule"] == "constant":
        return f"More --steps go on: {resume_command(run)} --steps N"
    return (
        f"The {run.settings['schedule']} schedule ends there; a new run goes on from its weights: "
        f"{shlex.join(folders.flag('--init', run.folder))}"
    )


def report_stop(run: Run, reason: str | None, failure: Exception | None) -> None:
    if failure is not None:
        print(f"needle train: {described(failure)}", file=sys.stderr)
    text = (
        f"stopped by {reason or 'this error'} after step {run.step} of {run.settings['steps']}, "
        f"and saved. Go on with\n    {resume_command(run)}"
    )
    print(printable(text), file=sys.stdout if failure is None else sys.stderr)


def report_divergence(run: Run, error: Exception, finite: int) -> None:
    """Report a loss that is not finite, and which checkpoint is good. finite: the step before."""
    advice = folders.advice_after_divergence(run.folder, finite, run.saved, prove_after(run))
    print(printable(f"{error}. Stopped.\n{advice}"), file=sys.stderr)


# ---- the end -----------------------------------------------------------------------------------


def finish(run: Run) -> None:
    """Write the plot and a sample, and print where they lie."""
    rest()  # matplotlib may look for fonts
    with run.lock.writing() as at:
        report(plot(at).replace(str(at), str(run.folder)))
    report(f"checkpoint: {checkpoint_path(run.folder / 'checkpoints', run.step)}")
    try:
        text = sample_text(run)
        with run.lock.writing() as at, replacing(at / "sample.txt") as file:
            file.write(text.encode())
        report(f"sample ({run.folder / 'sample.txt'}):\n{text}")
    except Exception as error:  # all steps are saved
        report(f"no sample.txt: {described(error)}")


def report(text: str) -> None:
    """Print what a run says after its last step; a closed pipe or a full disk changes nothing."""
    try:
        print(printable(text), flush=True)
    except OSError:
        silence()


def is_finished(run: Run) -> bool:
    """True if `finish` ran after the last step; a kill may fall in between."""
    sample, numbers = run.folder / "sample.txt", run.folder / "metrics.jsonl"
    return sample.exists() and sample.stat().st_mtime_ns >= numbers.stat().st_mtime_ns


def sample_text(run: Run) -> str:
    """Return the text that the model writes after the beginning of a held-out one."""
    prompt = np.asarray(run.data.held_out[:16], np.int64)
    if len(prompt) == 0:
        prompt = np.asarray(run.data.train[:16], np.int64)
    run.model.eval()
    tokens = run.model.generate(
        prompt, SAMPLE_TOKENS, temperature=0.8, top_k=50, seed=run.settings["seed"]
    )
    if run.data.tokenizer is None:
        return wrapped(" ".join(map(str, tokens))) + "\n"
    return run.data.tokenizer.decode(tokens.tolist()) + "\n"
