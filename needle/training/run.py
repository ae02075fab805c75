"""A run: its first model, its checkpoints and its description, how to go on with it, its end."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import shlex
import sys
from pathlib import Path
from typing import Any

import numpy as np

from needle import models, optim
from needle.backend_ndarray import Device
from needle.checkpoint import (
    checkpoint_path,
    find_checkpoint,
    last_good_checkpoint,
    prune_checkpoints,
    save_checkpoint,
    step_of,
    versions,
    weights_path,
)
from needle.command import flag_words, wrapped
from needle.data import Batches, Prefetch, TokenData, run_batches
from needle.data.readers import open_tokens
from needle.distributed.data_parallel import DataParallel
from needle.distributed.group import Ranks
from needle.distributed.tree import own_micro_batches
from needle.files import Lock, described, printable, reading, replace_text
from needle.models import Config
from needle.ops import ring_chunks
from needle.processes import command_line, silence
from needle.safetensors import read_header
from needle.training import settings as flags
from needle.training.evaluate import load_model
from needle.training.folder import again
from needle.training.heartbeat import beat, rest, supervised
from needle.training.keep import keeps
from needle.training.plot import plot
from needle.training.replay.proofs import digest, manifest
from needle.training.replay.replays import Replay
from needle.training.settings import FIELDS, SHAPE, Settings, complete, data_of, option

SAMPLE_TOKENS = 120


@dataclasses.dataclass
class Run:
    """The parts of a run."""

    settings: Settings
    folder: Path
    lock: Lock | None  # rank 0 holds it
    data: TokenData
    model: models.LanguageModel
    optimizer: optim.AdamW
    batches: Prefetch
    parallel: DataParallel  # this rank's share of a step
    step: int = 0  # steps done
    replay: Replay | None = None  # of another run

    def __post_init__(self) -> None:
        replay, self.until = self.replay, self.settings.steps
        if replay is not None:
            self.until = replay.stop or replay.until
        self.device = self.model.device
        if self.data.tokenizer is not None:
            self.model.tokenizer = self.data.tokenizer
        self.saved = self.step  # steps up to the last checkpoint
        self.position = self.batches.position  # in the data, after the steps done


# ---- the model of a new run --------------------------------------------------------------------


def model_config(settings: Settings, needed: int | None = None) -> Config:
    """Return the configuration of a new model. needed: ids of the tokenizer, if there is one."""
    fields = dict(settings.config or {})
    family = fields.pop("model", None)
    changes = {"max_seq_len": settings.seq_len, **fields, "dtype": settings.dtype}
    shape = {field: getattr(settings, name) for name, field in SHAPE.items()}
    changes |= {field: value for field, value in shape.items() if value}
    if settings.sparse is not None:
        changes |= {"use_sparse_attention": True, "sparse_pattern": settings.sparse}
        changes |= {"sparse_window": settings.window} if settings.window is not None else {}
    if family is None:
        config = models.preset(settings.model, **changes)
    else:
        config = models.model_class(family).config_class.from_dict(changes)
    if settings.seq_len > config.max_seq_len:
        said = f"the model of --config reads {config.max_seq_len} at most"
        raise ValueError(f"--seq-len {settings.seq_len}: {said}")
    if needed is not None and needed > config.vocab_size:
        if settings.vocab_size is not None:
            raise ValueError(
                f"--vocab-size {config.vocab_size}: the tokenizer has {needed:,} tokens: give that "
                "many or more, or another --tokenizer"
            )
        raised = -(-needed // 128) * 128
        print(f"{needed:,} tokens of the tokenizer: the model's vocabulary becomes {raised:,}")
        config = dataclasses.replace(config, vocab_size=raised)
    return config


def from_weights(given: Settings, device: Device) -> tuple[models.LanguageModel, Settings]:
    """Return the model of --init, and the flags with the settings that its weights fix: model,
    seq_len, the checkpoint of a run, and the tokenizer that lies with them, unless a flag names
    another. Optimizer, schedule and data are fresh. Raise ValueError for contradicting flags."""
    dtype, init = given.dtype or FIELDS["dtype"].metadata["default"][not device.is_host], given.init
    if Path(init, "checkpoints").is_dir():  # a run, which may go on
        init = str(find_checkpoint(init).path)
    model, tokenizer = load_model(init, device, dtype)
    config, name = model.config, preset_of(model.config)
    own = tokenizer and os.path.realpath(tokenizer.source)
    fixed = dataclasses.replace(given, model=name, init=init, tokenizer=given.tokenizer or own)
    wrong = [option(flag) for flag in ("config", "sparse", *SHAPE) if getattr(given, flag)]
    wrong += [f"--model {given.model}"] * (given.model not in (None, name))
    if wrong:
        raise ValueError(
            f"--init {given.init}: {model}: its weights say what {', '.join(wrong)} would change"
        )
    ranks = given.context_parallel or 1  # the length does not depend on how many
    seq_len = complete(fixed, not device.is_host, ranks).seq_len
    if given.seq_len is None:
        fixed.seq_len = min(seq_len, config.max_seq_len)
    elif seq_len > config.max_seq_len:
        raise ValueError(f"--seq-len {seq_len}: {given.init} reads {config.max_seq_len} at most")
    if fixed.tokenizer is None and (given.data is None or open_tokens(given.data) is None):
        raise ValueError(
            f"--init {given.init}: no tokenizer.json lies with it, and the data is text: give "
            "--tokenizer"
        )
    return model, fixed


def preset_of(config: Config) -> str:
    """Return the name of the preset of this shape, of any vocabulary; else the registered name."""
    for name, fields in type(config).presets().items():
        if all(getattr(config, k) == v for k, v in fields.items() if k != "vocab_size"):
            return name
    return config.family


def check_vocabulary(path: str, config: Config, needed: int | None) -> None:
    if needed is not None and needed > config.vocab_size:
        raise ValueError(
            f"--init {path}: its vocabulary is {config.vocab_size:,}, but the tokenizer has "
            f"{needed:,} tokens: give the --tokenizer that it was trained with"
        )


# ---- data --------------------------------------------------------------------------------------


def own_batches(ranks: Ranks, settings: Settings, data: TokenData, vocab_size: int) -> Batches:
    """Return this rank's share of each step's micro-batches."""
    context, every = settings.context_parallel, settings.grad_accum
    batches = run_batches(data, data_of(settings), vocab_size)
    own = own_micro_batches(every, ranks.rank, ranks.size, context)
    batches.share(own, every, own_columns(batches.seq_len, ranks, context))
    return batches


def own_columns(length: int, ranks: Ranks, context: int) -> np.ndarray | None:
    """Return the columns of this rank in a sequence that `context` ranks share; None: all."""
    if context == 1:
        return None
    runs = ring_chunks(length, ranks.rank % context, context)
    return np.concatenate([np.arange(run.start, run.stop) for run in runs])


# ---- checkpoints -------------------------------------------------------------------------------


def write_checkpoint(run: Run, loss: float) -> None:
    """Write the checkpoint of run.step; keep the last two, the last one followed by `--save-every`
    finite steps, and those of a recipe."""
    folder = run.folder / "checkpoints"
    save_checkpoint(
        run.model,
        run.optimizer,
        run.position["epoch"],
        loss,
        checkpoint_path(folder, run.step),
        step=run.step,
        data=run.position,
        fingerprint=run.data.fingerprint,
        settings=run.settings.to_json(),
        products=products_of(run.model),
    )
    if run.step > 0 and run.saved == 0:  # a run of no finished step leaves its name to another
        write_description(run)
    beat()
    forever = lambda step: is_kept(run.settings, step) or was_kept(checkpoint_path(folder, step))
    prune_checkpoints(folder, run.step, forever=forever, following=finite_steps_after(run))


def is_kept(settings: Settings, step: int) -> bool:
    """True if the whole checkpoint of this step is kept for good."""
    if settings.keep_optimizer and keeps(settings.keep)(step):
        return True
    return settings.recipe is not None and keeps(flags.PUBLISHED)(step)


@functools.cache
def was_kept(path: Path) -> bool:
    """True if the settings in a checkpoint keep it for good. Those of the run may be others."""
    try:
        with reading(path) as file:
            settings = json.loads(read_header(file)[0]["state"])["settings"]
        return is_kept(flags.from_json(settings, path), step_of(path))
    except (ValueError, KeyError):  # damaged, or not of a run
        return False


def keeps_weights(settings: Settings, step: int) -> bool:
    """True if the weights of this step are kept for good, in a file without the optimizer."""
    is_named = settings.keep is not None and keeps(settings.keep)(step)
    return is_named and not is_kept(settings, step)


def write_weights(run: Run, loss: float) -> None:
    """Write the weights of run.step."""
    path, epoch = weights_path(run.folder / "checkpoints", run.step), run.position["epoch"]
    save_checkpoint(run.model, None, epoch, loss, path, step=run.step)
    beat()


def finite_steps_after(run: Run) -> int:
    """Return how many finite steps must follow a good checkpoint: those up to the next save."""
    return max(run.settings.save_every, 1)


def write_description(run: Run) -> None:
    """Write config.json, the tokenizer's files, and of a run at its beginning manifest.json."""
    recipe, optimizer = run.settings.recipe, run.optimizer
    files = {} if run.data.tokenizer is None else {**run.data.tokenizer.files}
    special_ids = json.loads(files.pop("config.json", "{}"))
    description = {
        "settings": run.settings.to_json(),
        "recipe": recipe and {"name": recipe, "changed": flags.changes(run.settings)},
        "optimizer": {
            "class": type(optimizer).__name__,
            **optimizer.settings(),
            "lr": run.settings.lr,
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
        "saved": run.step > 0,
        **special_ids,
    }
    files["config.json"] = json.dumps(description, indent=2) + "\n"
    if run.step == 0:
        tokenizer, products = files.get("tokenizer.json"), products_of(run.model)
        weights = digest(run.parallel.flat.data)
        more = {} if run.replay is None else {"replay": dataclasses.asdict(run.replay)}
        files["manifest.json"] = manifest(description | more, products, tokenizer, weights)
    for name, text in files.items():
        replace_text(run.folder / name, text)


# ---- going on ----------------------------------------------------------------------------------

# The environment chooses a GPU's kernels by these.
GPU_KERNELS = ("NEEDLE_ARCH", "NEEDLE_ALGORITHM", "NEEDLE_TF32")


def products_of(model: Any) -> str:
    """Return the facts that decide the bits of products: the library, its table, the kind of GPU
    by which the table is read, variables of the environment, and the parts in FP8."""
    properties = model.device.properties()
    facts = [properties["products"]]
    if not model.device.is_host:
        facts[0] += f" on {properties['name']}"
        facts += [f"{name}={os.environ[name]}" for name in GPU_KERNELS if os.environ.get(name)]
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
        words += [*command_line("supervise"), "--"] * supervised()
        words += [place.launcher] + ["-n", str(place.size)] * (place.launcher == "mpirun")
    words += [*command_line("train"), *again(run.folder)]
    words += ["--gpus", str(place.size)] if place.launcher == "needle" else []
    words += settings.words("device", "tensorboard", "graph", "recompute", "import_")
    if supervised() and place.launcher in ("", "needle"):
        words += ["--supervise", *settings.words("hang_seconds")]
    return shlex.join([*words, *settings.words("wandb")])


def advice_to_go_on(run: Run) -> str:
    """Return how to train the model of a finished run further."""
    if run.replay is None and run.settings.schedule == "constant":
        return f"More --steps go on: {resume_command(run)} --steps N"
    what = "replay" if run.replay is not None else f"{run.settings.schedule} schedule"
    return (
        f"The {what} ends there; a new run goes on from its weights: "
        f"{shlex.join(flag_words('--init', run.folder))}"
    )


def report_stop(run: Run, reason: str | None, failure: Exception | None) -> None:
    if failure is not None:
        print(f"needle train: {described(failure)}", file=sys.stderr)
    text = f"stopped by {reason or 'this error'} before the first step"
    if run.step > 0:
        text = (
            f"stopped by {reason or 'this error'} after step {run.step} of {run.until}, "
            f"and saved. Go on with\n    {resume_command(run)}"
        )
    print(printable(text), file=sys.stdout if failure is None else sys.stderr)


def report_divergence(run: Run, error: Exception, finite: int) -> None:
    """Report a loss that is not finite, and which checkpoint is good. finite: the step before."""
    lines = [f"{error}. Stopped."]
    advice = "a lower --lr, a longer --warmup or a smaller --clip may help"
    good = last_good_checkpoint(run.folder / "checkpoints", finite, finite_steps_after(run))
    if good is not None:
        followed = finite - step_of(good)
        lines.append(f"the last good checkpoint is {good}: {followed} finite steps followed")
        advice += f", in a new run from its weights: {shlex.join(flag_words('--init', good))}"
    print(printable("\n".join([*lines, advice])), file=sys.stderr)


# ---- the end -----------------------------------------------------------------------------------


def write_results(run: Run) -> None:
    """Write the plot and a sample, and print where they lie."""
    rest()  # matplotlib may look for fonts
    report(plot(run.folder))
    report(f"checkpoint: {checkpoint_path(run.folder / 'checkpoints', run.step)}")
    try:
        text = sample_text(run)
        replace_text(run.folder / "sample.txt", text)
        report(f"sample ({run.folder / 'sample.txt'}):\n{text}")
    except Exception as error:  # all steps are saved
        report(f"no sample.txt: {described(error)}")


def report(text: str) -> None:
    """Print what a run says after its last step; a closed pipe or a full disk changes nothing."""
    try:
        print(printable(text), flush=True)
    except OSError:
        silence()


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
