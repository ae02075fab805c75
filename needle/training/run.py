"""A run: the parts that its loop works on, its checkpoints and descriptions, and its end."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shlex
import sys
from pathlib import Path
from typing import Any

import numpy as np

from needle import models, optim
from needle.arguments import wrapped
from needle.backend_ndarray import as_bytes
from needle.checkpoint import (
    Checkpoint,
    CheckpointError,
    checkpoint_path,
    prune_checkpoints,
    save_checkpoint,
    versions,
    weights_path,
)
from needle.data import Prefetch, TokenData
from needle.distributed.data_parallel import DataParallel
from needle.files import Lock, described, printable, replacing
from needle.nn import FlatParameters
from needle.processes import command_line, silence
from needle.training import folder as folders
from needle.training import recipes
from needle.training.config import described_config
from needle.training.heartbeat import beat, rest, supervised
from needle.training.log import RunLog
from needle.training.plot import plot
from needle.training.settings import Settings, data_of

SAMPLE_TOKENS = 120


@dataclasses.dataclass
class Run:
    """The parts of a run."""

    settings: Settings
    folder: Path
    lock: Lock | None  # rank 0 holds it
    id: str  # of config.json and of each checkpoint
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
    settings = run.settings.to_json()
    schedule = {name: settings[name] for name in ("schedule", "lr", "warmup", "steps")}
    at = run.lock.folder()
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
        settings=settings,
        products=products_of(run.model),
    )
    if run.step > 0:  # a run of no finished step leaves its name to another
        folders.note_saved(at)
    beat()
    forever = lambda step: is_kept(run.settings, step)
    prune_checkpoints(folder, run.step, forever=forever, following=prove_after(run))


def is_kept(settings: Settings, step: int) -> bool:
    """True if the whole checkpoint of this step is kept for good."""
    if settings.keep_optimizer and recipes.keeps(settings.keep)(step):
        return True
    return settings.recipe is not None and recipes.keeps(recipes.PUBLISHED)(step)


def keeps_weights(settings: Settings, step: int) -> bool:
    """True if the weights of this step are kept for good, in a file without the optimizer."""
    is_named = settings.keep is not None and recipes.keeps(settings.keep)(step)
    return is_named and not is_kept(settings, step)


def write_weights(run: Run, log: RunLog) -> None:
    """Write the weights of run.step."""
    log.sync()
    path, epoch = weights_path(run.lock.folder() / "checkpoints", run.step), run.position["epoch"]
    save_checkpoint(run.model, None, epoch, log.loss, path, run=run.id, step=run.step)
    beat()


def prove_after(run: Run) -> int:
    """Return how many finite steps prove the checkpoint before them: those up to the next save."""
    return max(run.settings.save_every, 1)


def write_description(run: Run) -> None:
    """Write config.json, and the tokenizer's files."""
    recipe, optimizer = run.settings.recipe, run.optimizer
    files = {} if run.data.tokenizer is None else {**run.data.tokenizer.files}
    special_ids = json.loads(files.pop("config.json", "{}"))
    description = {
        "id": run.id,
        "settings": run.settings.to_json(),
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
    at = run.lock.folder()
    folders.write_description(at, description)
    for name, text in files.items():
        with replacing(at / name) as file:
            file.write(text.encode())


# ---- going on ----------------------------------------------------------------------------------


def id_of(settings: Settings, data: TokenData, flat: FlatParameters) -> str:
    """Return the id of a new run. Runs of equal settings, data and first weights write equal
    checkpoints and have equal ids; a checkpoint of another id is of another run."""
    known = json.dumps([settings.to_json(), data.fingerprint], sort_keys=True).encode()
    found = hashlib.blake2b(known, digest_size=8)
    if settings.init is not None:
        found.update(as_bytes(flat.data).numpy())
    return found.hexdigest()


class Begun:
    """A run that has saved nothing, by its config.json, in the place of a Checkpoint of step 0."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "config.json"
        state = folders.read_description(folder)
        data = state["data"] if isinstance(state.get("data"), dict) else {}
        state |= {"run": state.get("id"), "fingerprint": data.get("fingerprint")}
        self.state = state | {"step": 0, "data": {"epoch": 0, "batch": 0}}

    def configuration(self) -> models.Config:
        return described_config(self.path)


def check_state(checkpoint: Checkpoint | Begun) -> None:
    """Raise CheckpointError for the state of another program, which no run can resume."""
    state = checkpoint.state
    kinds = {"settings": dict, "step": int, "data": dict, "fingerprint": str}
    kinds |= {"optimizer": dict, "run": str}
    missing = [key for key, kind in kinds.items() if not isinstance(state.get(key), kind)]
    if "data" not in missing:
        data = state["data"]
        missing += [f"{k} of its data" for k in ("epoch", "batch") if type(data.get(k)) is not int]
    if missing:
        raise CheckpointError(
            f"{checkpoint.path}: not of a run of needle train: it has no {', '.join(missing)}"
        )


# The environment chooses kernels by these, as cuda/backend.cu and cuda/matmul.cu read them.
GPU_KERNELS = {
    "NEEDLE_ARCH": bool,
    "NEEDLE_ALGORITHM": lambda word: True,
    "NEEDLE_TF32": lambda word: word == "1",
}


def products_of(model: Any) -> str:
    """Return the facts that decide the bits of products: the library, its table, the kind of GPU
    by which the table is read, variables of the environment, and the parts in FP8."""
    properties = model.device.properties()
    facts = [properties["products"]]
    if not model.device.is_host:
        facts[0] += f" on {properties['name']}"
        given = [(name, os.environ[name]) for name in GPU_KERNELS if name in os.environ]
        facts += [f"{name}={word}" for name, word in given if GPU_KERNELS[name](word)]
    if model.fp8:
        facts.append(products_in_fp8(model))
    return ", ".join(facts)


def products_in_fp8(model: Any) -> str:
    """Name the parts of a model whose products are in FP8, and the formats of operands."""
    return f"products of {model.parts_in_fp8} in FP8 (operands e4m3, gradients e5m2)"


def resume_command(run: Run) -> str:
    """Return the command that resumes the run, with the flags that a checkpoint does not hold."""
    words, settings, place = [], run.settings, run.parallel.group.place
    if place.launcher not in ("", "needle"):
        words += [*command_line("supervise", "-m", "needle", "supervise"), "--"] * supervised()
        words += [place.launcher] + ["-n", str(place.size)] * (place.launcher == "mpirun")
    words += [*command_line("train", sys.argv[0]), *folders.again(run.folder)]
    words += ["--gpus", str(place.size)] if place.launcher == "needle" else []
    words += settings.words("device", "tensorboard", "graph", "recompute", "import_")
    if supervised() and place.launcher in ("", "needle"):
        words += ["--supervise", *settings.words("hang_seconds")]
    return shlex.join([*words, *settings.words("wandb")])


def longer(run: Run) -> str:
    """Return how to train the model of a finished run further."""
    if run.settings.schedule == "constant":
        return f"More --steps go on: {resume_command(run)} --steps N"
    return (
        f"The {run.settings.schedule} schedule ends there; a new run goes on from its weights: "
        f"{shlex.join(folders.flag('--init', run.folder))}"
    )


def report_stop(run: Run, reason: str | None, failure: Exception | None) -> None:
    if failure is not None:
        print(f"needle train: {described(failure)}", file=sys.stderr)
    text = (
        f"stopped by {reason or 'this error'} after step {run.step} of {run.settings.steps}, "
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
    report(plot(run.lock.folder()))
    report(f"checkpoint: {checkpoint_path(run.folder / 'checkpoints', run.step)}")
    try:
        text = sample_text(run)
        with replacing(run.lock.folder() / "sample.txt") as file:
            file.write(text.encode())
        report(f"sample ({run.folder / 'sample.txt'}):\n{text}")
    except Exception as error:  # all steps are saved
        report(f"no sample.txt: {described(error)}")


def finish_again(run: Run) -> None:
    """Finish a run that was killed after its last step, before its end, and say how to go on."""
    if run.lock is not None and not is_finished(run):
        finish(run)
    text = f"nothing to do: all {run.settings.steps} steps are done. {longer(run)}"
    report(wrapped(text))


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
        prompt, SAMPLE_TOKENS, temperature=0.8, top_k=50, seed=run.settings.seed
    )
    if run.data.tokenizer is None:
        return wrapped(" ".join(map(str, tokens))) + "\n"
    return run.data.tokenizer.decode(tokens.tolist()) + "\n"
