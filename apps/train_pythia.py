#!/usr/bin/env python3
"""Trains a Pythia language model: `python apps/train_pythia.py`, `--help` for the flags.

The file reads downwards: `train` is the loop, then the parts it calls, then `main`. A run lives in
runs/NAME/: config.json, metrics.jsonl (a line a step), loss.png, tokenizer.json, sample.txt, lock
and checkpoints/step_N.safetensors. `--recipe` (recipes.py) trains as the published Pythias
were. Every number of a run follows from its settings: a run that was stopped anywhere and resumed
writes the same losses, bit for bit, as one that was not.
"""

from __future__ import annotations

import dataclasses
import math
import os
import shlex
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import checkout

checkout.choose()

import recipes  # noqa: E402
import run_folder  # noqa: E402
import run_init  # noqa: E402
import run_length  # noqa: E402
import run_ranks  # noqa: E402
import run_state  # noqa: E402
import trackers  # noqa: E402
import train_flags  # noqa: E402
from run_evaluation import evaluate, own_columns  # noqa: E402
from run_log import NotFinite, RunLog, plot  # noqa: E402

import needle as ndl  # noqa: E402
from needle import models, nn, optim, supervise  # noqa: E402
from needle.autograd import Tensor  # noqa: E402
from needle.backend_ndarray import NDArray, full  # noqa: E402
from needle.checkpoint import (  # noqa: E402
    Checkpoint,
    CheckpointError,
    checkpoint_path,
    load_checkpoint,
    prune_checkpoints,
    save_checkpoint,
    versions,
)
from needle.data import Batches, DataError, Prefetch, TokenData, run_batches, run_data  # noqa: E402
from needle.distributed import environment, spawn  # noqa: E402
from needle.distributed.control import RankError  # noqa: E402
from needle.distributed.data_parallel import DataParallel  # noqa: E402
from needle.distributed.group import Group, RankFailed, Subgroup  # noqa: E402
from needle.distributed.tree import own_leaves  # noqa: E402
from needle.distributed.verify import Verification, WrongDevice  # noqa: E402
from needle.files import Lock, described, replacing  # noqa: E402
from needle.heartbeat import beat, supervised  # noqa: E402
from needle.peaks import peak  # noqa: E402
from needle.processes import program  # noqa: E402
from needle.training import Recorded, worth_recording  # noqa: E402

__all__ = ["load_checkpoint", "main", "save_checkpoint", "train"]

SAMPLE_TOKENS = 120
EXIT_GPU_LOST = 75  # a supervisor (--supervise) starts again with --resume auto


@dataclasses.dataclass
class Run:
    """Everything the loop works on."""

    folder: Path
    lock: Lock | None  # rank 0 holds it
    id: str  # of config.json and of each checkpoint
    settings: dict
    device: ndl.Device
    data: TokenData
    model: models.LanguageModel
    flat: nn.FlatParameters
    optimizer: optim.AdamW
    batches: Prefetch
    parallel: DataParallel  # what this rank does of a step; alone, all of it
    position: dict[str, int]  # in the data, behind the steps done
    step: int = 0  # steps done
    saved: int = 0  # of them, up to the last checkpoint
    tensorboard: bool = False
    wandb: str | None = None  # the project
    device_name: str = "auto"  # as the command line says it
    hang_seconds: float = supervise.HANG_SECONDS
    verify_every: int = 0
    graph: bool | None = None  # None: where it is faster


# ---- the loop ---------------------------------------------------------------------------------


def train(run: Run) -> int:
    """Trains from run.step to settings["steps"]; returns the exit code."""
    settings, model, optimizer, batches = run.settings, run.model, run.optimizer, run.batches
    parallel, ranks = run.parallel, run.parallel.group
    if parallel.context > 1:
        model.share_sequences(Subgroup(ranks, parallel.context))
    schedule, steps = schedule_of(settings), settings["steps"]
    parts = settings["grad_accum"] * parallel.context
    share = full((), 1 / parts, "float32", run.device)
    loss_scale = Tensor.from_ndarray(share)

    def gradient(ids: Any, targets: Any) -> NDArray:
        optimizer.reset_grad()
        return forward_backward(model, ids, targets, loss_scale)

    ranks.same("the weights", parallel.digest())
    shape = settings["batch_size"], settings["seq_len"] // parallel.context
    recorded = run.graph
    if recorded is None:
        recorded = parallel.context == 1 and worth_recording(run.device, math.prod(shape))
    if recorded:
        gradient = Recorded(gradient, shape, run.device)
    verification = Verification(parallel, run.verify_every, shape, gradient)
    with ranks.rank_0_first("the log"):
        log = open_log(run)
    stop, reason, failure = Stop(), None, None
    beat(step=run.step)
    try:
        if run.step == 0 and settings["recipe"]:
            save(run, log)
            log.skip_time()
        for step in range(run.step + 1, steps + 1):
            where, waited = f"epoch {batches.epoch}, batch {batches.batch}", batches.waited
            ranks.step, optimizer.lr, losses = step, schedule(step), []
            try:
                for leaf in parallel.own_leaves:
                    ids, targets = batches.next()
                    losses.append(gradient(ids, targets))
                    verification.keep(step, leaf, ids, targets)
                    parallel.add_leaf()
            except (DataError, OSError) as error:
                failure = error
            agree_to_go_on(ranks, "the gradients", failure)
            norm, scale = parallel.reduce(settings["clip"])
            verification.check(step)
            parallel.step(scale)
            run.step, run.position = step, batches.position
            waited = 1e3 * (batches.waited - waited)
            try:
                log.queue(step, parallel.losses(losses), norm, optimizer.lr, where, waited)
            except OSError as error:  # of the line before: this step is done, and the last one
                failure = error

            if not log.is_heard:
                stop.reason = stop.reason or "a closed pipe"
            # A signal that comes meanwhile is told at the end of the next step.
            reason, failure = agree(ranks, "the end of the step", failure, stop.reason)
            ends = step == steps or reason is not None or failure is not None
            evaluates = step == steps or _due(step, settings["eval_every"])
            saves = ends or _due(step, settings["save_every"]) or stays(settings, step)
            if evaluates or saves:
                log.wait()
                broken = None
                try:
                    found = evaluate(model, run.data, settings, parallel) if evaluates else {}
                    log.finish(**found)
                except (DataError, OSError) as error:
                    broken = error
                agree_to_go_on(ranks, "the evaluation's end", broken)
                if saves:
                    save(run, log)
                log.skip_time()
            if ends:
                break
    except NotFinite as error:
        log.close()
        if ranks.rank == 0:
            words = run_folder.proven(run.folder, error.step - 1, run.saved, prove_after(run))
            print(f"{error}. Stopped.\n{words}", file=sys.stderr)
        return 1
    except (Failed, OSError) as error:  # drops the part of a step, and not those that are done
        if ranks.size > 1 and not isinstance(error, Failed):
            raise  # the others do not know
        failure = error
        if run.step > run.saved:
            log.settle()
            save(run, log)
    finally:
        log.close()
        batches.close()
        stop.restore()
        if parallel.context > 1:
            model.share_sequences(None)
    if run.step < steps or failure is not None:
        if ranks.rank == 0:
            report_stop(run, reason, failure)
        return 0 if failure is None else 1
    print(
        f"loss {log.first_loss:.4f} at the first step, {log.loss:.4f} at the last; "
        f"{log.seconds:.0f} s of training"
    )
    with ranks.rank_0_first("the plot and the sample"):
        if ranks.rank == 0:
            finish(run)
    return 0


def open_log(run: Run) -> RunLog:
    settings, opened = run.settings, []
    if run.lock is not None:
        with run.lock.writing() as at:
            words = run.tensorboard, run.wandb
            opened = trackers.start(run.folder, at, run.step, settings, *words)
    return RunLog(
        run.lock,
        run.device,
        run.step,
        settings["steps"],
        settings["batch_size"] * settings["seq_len"] * settings["grad_accum"],
        run.model.flops_per_token(settings["seq_len"]),
        peak(run.device.properties()["name"], settings["dtype"]),
        opened,
    )


class Failed(Exception):
    """An error that all ranks have agreed to stop for, behind the same step."""


def agree(
    ranks: Group, name: str, failure: Exception | None, reason: str | None = None
) -> tuple[str | None, Failed | None]:
    """The first rank's reason to stop, and the first rank's failure."""
    told = ranks.gather(name, [reason, failure and described(failure)])
    reasons = [theirs for theirs, _ in told if theirs is not None]
    whose = [f"rank {rank}: " if ranks.size > 1 else "" for rank in range(ranks.size)]
    failures = [who + theirs for who, (_, theirs) in zip(whose, told) if theirs is not None]
    return reasons[0] if reasons else None, Failed(failures[0]) if failures else None


def agree_to_go_on(ranks: Group, name: str, failure: Exception | None) -> None:
    """Failed, on all ranks, where one of them has a failure."""
    _, failed = agree(ranks, name, failure)
    if failed is not None:
        raise failed from failure


def forward_backward(
    model: models.LanguageModel, ids: np.ndarray, targets: np.ndarray, loss_scale: Tensor
) -> NDArray:
    """Adds the gradient of loss_scale times the loss to the buffers; the loss stays on the device.
    All activations are free when this returns."""
    loss = model.loss(ids, targets)
    loss.backward(loss_scale)
    return loss.cached_data


def recompute_layers(model: models.LanguageModel) -> None:
    if model.recompute is None:
        raise ValueError(f"--recompute: a {type(model).__name__} cannot compute layers again")
    model.recompute = True


def schedule_of(settings: dict) -> optim.Schedule:
    """Up a line over the warmup, then constant, or down to a tenth of the peak."""
    peak, warmup, steps = settings["lr"], settings["warmup"], settings["steps"]
    if settings["schedule"] == "constant":
        return optim.Constant(peak, warmup)
    kind = {"cosine": optim.Cosine, "linear": optim.Linear, "pythia": optim.PythiaCosine}[
        settings["schedule"]
    ]
    return kind(peak, steps, warmup, floor=peak / 10)


def stays(settings: dict, step: int) -> bool:
    """Whether the checkpoint of this step is kept for good."""
    return settings["recipe"] is not None and recipes.published(step)


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


# ---- stopping and saving ----------------------------------------------------------------------


class Stop:
    """SIGINT, SIGTERM, SIGHUP, and SIGUSR1, which mpirun passes on as it is, let the step end; a
    second SIGINT interrupts at once. A SIGHUP that whoever started the process has it ignore
    (nohup) stays ignored."""

    def __init__(self) -> None:
        self.reason: str | None = None
        numbers = [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            numbers.append(signal.SIGHUP)
        self._before = {number: signal.signal(number, self._on_signal) for number in numbers}

    def _on_signal(self, number: int, frame) -> None:
        self.reason = signal.Signals(number).name
        signal.signal(signal.SIGINT, signal.default_int_handler)

    def restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


def save(run: Run, log: RunLog) -> None:
    """The checkpoint of run.step, which rank 0 writes, of all ranks."""
    with run.parallel.whole_optimizer():
        run.parallel.group.first("the checkpoint", lambda: write_checkpoint(run, log))
    run.saved = run.step


def write_checkpoint(run: Run, log: RunLog) -> None:
    """The last two stay, the last proven one, and those that a recipe keeps."""
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
            trusted=run.data.trusted,
            schedule=schedule,
            settings=run.settings,
            products=run_state.products_of(run.device),
        )
        run_folder.note_saved(at)
        beat(saved=run.step)
        prune_checkpoints(
            folder,
            run.step,
            forever=lambda step: stays(run.settings, step),
            following=prove_after(run),
        )


def prove_after(run: Run) -> int:
    """The number of finite steps that proves the checkpoint before them: up to the next one that
    --save-every writes."""
    return max(run.settings["save_every"], 1)


def resume_command(run: Run) -> str:
    """With the flags that a checkpoint does not hold."""
    words, ranks = [], run.parallel.group
    is_own = ranks.launcher in (None, "needle")  # and not somebody else's launcher
    if not is_own:
        words += [sys.executable, "-m", "needle.supervise", "--"] * supervised()
        words += [ranks.launcher] + ["-n", str(ranks.size)] * (ranks.launcher == "mpirun")
    words += [sys.executable, sys.argv[0], *run_folder.again(run.folder)]
    words += ["--gpus", str(ranks.size)] if ranks.launcher == "needle" else []
    words += ["--device", run.device_name] if run.device_name != "auto" else []
    words += ["--tensorboard"] * run.tensorboard
    words += [] if run.graph is None else ["--graph" if run.graph else "--no-graph"]
    words += ["--recompute"] * bool(run.model.recompute)
    words += ["--trust-data"] * run.data.trusted
    words += ["--verify", str(run.verify_every)] if run.verify_every else []
    if supervised() and is_own:
        words += ["--supervise"]
        if run.hang_seconds != supervise.HANG_SECONDS:
            words += ["--hang-seconds", f"{run.hang_seconds:g}"]
    words += run_folder.flag("--wandb", run.wandb) if run.wandb is not None else []
    return shlex.join(words)


def longer(run: Run) -> str:
    """How to train the model of a finished run further."""
    if run.settings["schedule"] == "constant":
        return f"More --steps go on: {resume_command(run)} --steps N"
    return (
        f"The {run.settings['schedule']} schedule ends there; a new run goes on from its weights: "
        f"{shlex.join(run_folder.flag('--init', run.folder))}"
    )


def report_stop(run: Run, reason: str | None, failure: Exception | None) -> None:
    if failure is not None:
        print(f"train_pythia.py: {described(failure)}", file=sys.stderr)
    print(
        f"stopped by {reason or 'this error'} after step {run.step} of {run.settings['steps']}, "
        f"and saved. Go on with\n    {resume_command(run)}",
        file=sys.stdout if failure is None else sys.stderr,
    )


def finish(run: Run) -> None:
    """The plot, a sample, and where everything lies."""
    beat(watched=False)  # fonts may be looked for
    with run.lock.writing() as at:
        print(plot(at).replace(str(at), str(run.folder)))
    beat()
    print(f"checkpoint: {checkpoint_path(run.folder / 'checkpoints', run.step)}")
    text = sample_text(run)
    with run.lock.writing() as at, replacing(at / "sample.txt") as file:
        file.write(text.encode())
    print(f"sample ({run.folder / 'sample.txt'}):\n{text}")


def is_finished(run: Run) -> bool:
    """Whether finish() came to its end after the last step: a kill may fall in between."""
    sample, numbers = run.folder / "sample.txt", run.folder / "metrics.jsonl"
    return sample.exists() and sample.stat().st_mtime_ns >= numbers.stat().st_mtime_ns


def sample_text(run: Run) -> str:
    """The text that the model writes after the beginning of a held-out one."""
    prompt = np.asarray(run.data.held_out[:16], np.int64)
    if len(prompt) == 0:
        prompt = np.asarray(run.data.train[:16], np.int64)
    run.model.eval()
    tokens = run.model.generate(
        prompt, SAMPLE_TOKENS, temperature=0.8, top_k=50, seed=run.settings["seed"]
    )
    if run.data.tokenizer is None:
        return " ".join(map(str, tokens)) + "\n"
    return run.data.tokenizer.decode(tokens.tolist()) + "\n"


# ---- making a run -----------------------------------------------------------------------------


def new_run(args, ranks: Group) -> Run:
    device = run_ranks.open_device(args.device, ranks)
    named, model = train_flags.given(args), None
    if "init" in named:
        model, named = run_init.start(named, args.tokens, device)
    settings = train_flags.complete(named, args.tokens, not device.is_host, ranks.size)

    def free_folder() -> str:
        out = Path(args.out)
        return str(run_folder.free_folder(out, args.name, settings["model"], bool(args.resume)))

    # Names are checked before the text is tokenised, which may take long.
    free = Path(ranks.first("the name of the run", free_folder))
    described = train_flags.data_of(settings)
    with ranks.rank_0_first("the data"):
        data = run_data(described, trust=args.trust_data)
        fingerprint = data.fingerprint  # hashed once a machine, if not in earlier starts
    ranks.same("the data", fingerprint)
    if model is None:
        config = model_config(settings, data.vocab_size)
    else:
        config = model.config
        run_init.check_vocabulary(settings["init"], config, data.vocab_size)
    if device.is_host and train_flags.may_choose_steps(named, args.tokens, settings):
        run_batches(data, described)  # too little text is said before anything is measured
        named["steps"] = ranks.first(
            "the number of steps", lambda: run_length.choose_steps(config, settings, device)
        )
        settings = train_flags.complete(named, None, False, ranks.size)
        described = train_flags.data_of(settings)
    np.random.seed(settings["seed"])
    if model is None:
        model = config.model_class(config, device=device)
    context = settings["context_parallel"]
    batches = open_batches(ranks, context, data, described, model.config.vocab_size)
    batches = Prefetch(batches, device)
    flat = nn.flatten_parameters(model)
    optimizer = optim.AdamW(
        flat,
        lr=settings["lr"],
        beta1=0.9,
        beta2=0.95,
        eps=1e-8,
        weight_decay=settings["weight_decay"],
    )
    parallel = DataParallel(ranks, flat, optimizer, settings["grad_accum"], context)
    lock = None

    def take() -> str:
        nonlocal lock
        words = args.name, settings["model"], bool(args.resume)
        folder, lock = run_folder.take_new(free, Path(args.out), *words)
        return str(folder)

    folder = Path(ranks.first("the folder of the run", take))
    run = Run(
        folder,
        lock,
        run_state.id_of(settings, data, flat),
        settings,
        device,
        data,
        model,
        flat,
        optimizer,
        batches,
        parallel,
        batches.position,
    )
    if ranks.rank == 0:
        write_description(run)
    return run


def open_batches(
    ranks: Group, context: int, data: TokenData, described: dict, vocab_size: int
) -> Batches:
    """Of each step's micro-batches those that this rank computes."""
    batches, every = run_batches(data, described, vocab_size), described["micro_batches"]
    own = own_leaves(every, ranks.rank // context, ranks.size // context)
    batches.share(own, every, own_columns(batches.seq_len, ranks, context))
    return batches


def resumed_run(args, ranks: Group, folder: Path, lock: Lock | None, checkpoint: Checkpoint) -> Run:
    device, state = run_ranks.open_device(args.device, ranks), checkpoint.state
    run_state.check(checkpoint)
    beat(id=state["run"], watched=False)
    settings, differences = train_flags.resumed(
        train_flags.given(args), args.tokens, state["settings"]
    )
    if differences:
        raise CheckpointError(
            f"{checkpoint.path}: this run cannot go on with other settings: "
            f"{'; '.join(differences)}. Leave these flags out, or start anew, from its weights by "
            f"{shlex.join(run_folder.flag('--init', folder))}"
        )
    described = train_flags.data_of(settings)
    with ranks.rank_0_first("the data"):
        data = run_data(described, folder, state["fingerprint"], args.trust_data)
    ranks.same("the data", data.fingerprint)
    vocab_size = checkpoint.configuration().vocab_size
    context = settings["context_parallel"]
    batches = Prefetch(open_batches(ranks, context, data, described, vocab_size), device)
    try:
        batches.seek(state["data"])
    except DataError as error:
        raise CheckpointError(f"{checkpoint.path}: {error}") from error
    model, optimizer, _, _ = checkpoint.restore(device)
    if optimizer.flat is None:
        raise CheckpointError(f"{checkpoint.path}: its optimizer has a part of the parameters only")
    checkpoint.restore_random_state()
    parallel = DataParallel(ranks, optimizer.flat, optimizer, settings["grad_accum"], context)
    print(f"resuming {checkpoint.path} after step {state['step']}")
    before, now = state.get("products"), run_state.products_of(device)
    if before not in (None, now):
        print(f"its steps were multiplied by {before}, these by {now}: bits may differ")
    return Run(
        *(folder, lock, state["run"], settings, device, data),
        *(model, optimizer.flat, optimizer, batches, parallel, state["data"]),
        *(state["step"], state["step"]),
    )


def model_config(settings: dict, needed: int | None = None) -> models.Config:
    """`needed`: the size of the tokenizer's vocabulary, where there is one."""
    changes = {"max_seq_len": settings["seq_len"], "dtype": settings["dtype"]}
    if settings["sparse"] is not None:
        changes |= {
            "use_sparse_attention": True,
            "sparse_pattern": settings["sparse"],
            "sparse_window": settings["window"],
        }
    config = models.preset(settings["model"], **changes)
    if needed is not None and needed > config.vocab_size:
        raised = -(-needed // 128) * 128
        print(f"the tokenizer has {needed:,} tokens: the model's vocabulary becomes {raised:,}")
        config = dataclasses.replace(config, vocab_size=raised)
    return config


def write_description(run: Run) -> None:
    recipe, optimizer = run.settings["recipe"], run.optimizer
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
            **train_flags.data_of(run.settings),
            "id_limit": run.model.config.vocab_size,
            "source": run.data.source,
            "fingerprint": run.data.fingerprint,
        },
        "device": {"name": run.device.properties()["name"], "device": str(run.device)},
        "versions": versions(),
        "saved": False,
    }
    with run.lock.writing() as at:
        run_folder.write_description(at, description)
        if run.data.tokenizer is not None:
            with replacing(at / "tokenizer.json") as file:
                file.write(run.data.tokenizer.to_str().encode())
    beat(id=run.id, watched=False)


def make_run(args, ranks: Group) -> Run:
    """New, or the one that --resume finds; rank 0 looks for it, and holds its lock."""
    found = None

    def find() -> list[str] | None:
        nonlocal found
        found = run_folder.resume(args.resume, Path(args.out), args.name)
        return found and [str(found[0]), str(found[2].path)]

    told = ranks.first("the run to resume", find) if args.resume else None
    if told is None:
        return new_run(args, ranks)
    folder, lock, checkpoint = found or (Path(told[0]), None, Checkpoint(told[1]))
    return resumed_run(args, ranks, folder, lock, checkpoint)


def main(argv: list[str] | None = None) -> int:
    args, words = train_flags.parse(argv), sys.argv[1:] if argv is None else argv
    run, ranks, problem, code, said = None, Group(), None, 1, ""
    program = [sys.executable, str(Path(__file__).resolve())]

    def report(text: str, exit_code: int) -> int:
        """Rank 0 says it now, another where it turns out that rank 0 does not say the same."""
        nonlocal problem, code, said
        problem, code, said = text, exit_code, text
        if ranks.rank == 0:
            print(f"train_pythia.py: {text}", file=sys.stderr)
        return code

    try:
        place = environment.find()
        if args.supervise and not supervised() and (place is None or place.size == 1):
            return supervise.Supervisor([*program, *words], args.hang_seconds).run()
        if run_ranks.starts_ranks(args, place):
            return spawn.run([*program, *words], args.gpus)
        trackers.check(args.tensorboard, args.wandb)
        ranks = run_ranks.join(args, words, place)
        run = make_run(args, ranks)
        run.tensorboard, run.wandb = args.tensorboard, args.wandb
        run.device_name, run.hang_seconds = args.device, args.hang_seconds
        run.verify_every, run.graph = args.verify, args.graph
        if args.recompute:
            recompute_layers(run.model)
        if args.graph and not run.device.records_graphs:
            raise ValueError(f"--graph: {run.device} records no graphs, as GPUs do: leave it out")
        if args.graph and run.parallel.context > 1:
            raise ValueError("--graph: not together with --context-parallel: leave it out")
        run_ranks.tell_gpus(ranks, run.settings, args.verify > 0)
        print(f"{run.model}\n{run.data.source}\nrun: {run.folder}", flush=True)
        if run.step >= run.settings["steps"]:
            if ranks.rank == 0 and not is_finished(run):
                finish(run)
            print(f"nothing to do: all {run.settings['steps']} steps are done. {longer(run)}")
            return 0
        return train(run)
    except ndl.CudaFatalError as error:
        beat(fault=str(error))
        return report(f"the GPU is lost: {error}\nstart again with --resume auto", EXIT_GPU_LOST)
    except (ndl.CudaError, MemoryError) as error:
        return report(
            f"{str(error) or 'out of memory'}\n(where memory ran out: --recompute, or a smaller "
            "--batch-size, with --grad-accum to keep the step's size)",
            1,
        )
    except WrongDevice as error:
        wrong = [ranks.gpus[rank] for rank in error.ranks] if ranks.gpus else []
        beat(fault=str(error), wrong=wrong)
        problem, code = str(error), EXIT_GPU_LOST
        if ranks.rank == 0:
            report(problem, code)
        return code
    except RankFailed as error:  # that rank has said it
        problem = str(error)
        return 1
    except RankError as error:
        beat(fault=str(error))
        if error.is_rank_0s:
            return error.code
        return report(str(error), error.code)
    except BrokenPipeError:
        raise
    except (ValueError, OSError) as error:
        return report(described(error), 1)
    except KeyboardInterrupt:  # before the first step, or a second one within a step
        return report("interrupted", 130)
    finally:
        if run is not None and run.lock is not None:
            run.lock.release()
        error = sys.exc_info()[1]
        is_told = ranks.close(problem or (error and f"{type(error).__name__}: {error}"), code)
        if said and ranks.rank > 0 and not is_told:
            who = "" if said.startswith(f"rank {ranks.rank}, ") else f"rank {ranks.rank}: "
            print(f"train_pythia.py: {who}{said}", file=sys.stderr)


if __name__ == "__main__":
    code = program(main)
    # What waits on a GPU for a rank that is gone would hold up the interpreter's end.
    os._exit(code) if code else sys.exit(code)
