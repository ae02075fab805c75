#!/usr/bin/env python3
"""Train a Pythia language model: `needle train`, `--help` for the flags.

The file reads downwards: `train` is the loop, `make_run` makes its data, model and optimizer or
reads them from a checkpoint, `main` is the command line. needle/training/ has the rest. A run is a
folder runs/NAME/: config.json, manifest.json, metrics.jsonl (a line a step), loss.png,
tokenizer.json, sample.txt, lock and checkpoints/step_N.safetensors. Its settings determine every
number: a run that was stopped and resumed writes the same losses, bit for bit, as one that was not.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

if (Path(__file__).resolve().parent.parent / "checkout.py").exists():
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    import checkout

    checkout.choose()

import numpy as np

from needle import models, nn, optim
from needle.autograd import Tensor
from needle.backend_ndarray import Device, NDArray, full
from needle.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from needle.command import wrapped
from needle.data import Prefetch, run_data
from needle.distributed import environment, spawn
from needle.distributed.data_parallel import DataParallel
from needle.distributed.group import Group, Subgroup
from needle.files import Lock, printable
from needle.processes import program
from needle.training import folder, supervise
from needle.training import run as runs
from needle.training.evaluate import load_model
from needle.training.heartbeat import supervised
from needle.training.replay.replays import read_replay
from needle.training.run import Run
from needle.training.session import Ending, Session, evaluate, join, open_device, starts_ranks
from needle.training.settings import (
    Settings,
    check_new,
    complete,
    data_of,
    decay_steps,
    located,
    parse,
    resumed,
)

__all__ = ["load_checkpoint", "main", "save_checkpoint", "train"]


# ---- the loop ----------------------------------------------------------------------------------


def train(run: Run) -> int:
    """Train from run.step to the last step; return the exit code.

    A step is `grad_accum` micro-batches, of which each rank computes its own. The host queues a
    step before it reads the loss of the one before, so that the device never waits.
    """
    settings, optimizer, parallel = run.settings, run.optimizer, run.parallel
    loss, schedule = run.model.loss, schedule_of(settings)
    if run.replay is not None:
        loss, schedule = run.replay.loss(loss), run.replay.rates(schedule)
    share = full((), 1 / (settings.grad_accum * parallel.context), "float32", run.device)
    gradient = partial(forward_backward, loss, parallel, Tensor.from_ndarray(share))
    with Session(run, gradient) as session:
        session.begin()
        for step in range(run.step + 1, run.until + 1):
            optimizer.lr, losses = schedule(step), []
            for ids, targets in session.micro_batches(step):
                losses.append(session.gradient(ids, targets))
                parallel.add_micro_batch()
            norm, scale = parallel.reduce(settings.clip)
            parallel.step(scale)

            due = session.end_step(step, losses, norm, scale)
            if due.evaluation or due.weights or due.checkpoint:
                with session.evaluating():
                    session.log.finish(**evaluate(run) if due.evaluation else {})
            if due.weights:
                session.save_weights()
            if due.checkpoint:
                session.save()
            if due.end:
                break
    return session.conclude()


def forward_backward(
    loss: Callable, parallel: DataParallel, loss_scale: Tensor, ids: Any, targets: Any
) -> NDArray:
    """Leave the gradient of loss_scale times the loss in the buffers; return the loss, which stays
    on the device. All activations are free then."""
    parallel.optimizer.reset_grad()  # flat.grad is of this micro-batch; add_micro_batch() sums
    value = loss(ids, targets)
    parallel.send_early()
    value.backward(loss_scale)
    return value.cached_data


def schedule_of(settings: Settings) -> optim.Schedule:
    """Return the learning rates: a linear warmup, then constant, or down to a tenth of the peak."""
    peak, warmup = settings.lr, settings.warmup
    if settings.schedule == "constant":
        return optim.Constant(peak, warmup)
    if settings.schedule == "wsd":
        return optim.WSD(peak, settings.steps, warmup, 0.1 * peak, decay_steps(settings))
    kinds = {"cosine": optim.Cosine, "linear": optim.Linear, "pythia": optim.PythiaCosine}
    return kinds[settings.schedule](peak, settings.steps, warmup, floor=peak / 10)


# ---- data, model, optimizer --------------------------------------------------------------------


def make_run(given: Settings, ending: Ending) -> Run:
    """Make a new run, or go on with that of --resume: from its checkpoint, or from the beginning by
    its config.json where it never saved. Flags may then repeat its settings. `ending` has the ranks
    and gets the lock of the run's folder."""
    given, group = located(given), ending.ranks
    path, ending.lock, saved = find_run(given, group)
    device, out = open_device(given.device, group), Path(given.out)
    model = fingerprint = None
    if saved is None:
        check_new(given)
        if given.name is not None:
            group.first("the name of the run", lambda: folder.check_free(out / given.name))
        if given.init is not None:
            model, given = runs.from_weights(given, device)
        settings = complete(given, not device.is_host, group.size)
        config = runs.model_config(settings) if model is None else model.config
    else:
        folder.check_state(saved)
        settings, config = resumed(given, saved, path), saved.configuration()
        fingerprint = saved.state["fingerprint"]
    check(settings, config, device)
    with group.rank_0_first("the data"):  # which hashes and tokenises them for all of a machine
        data = run_data(data_of(settings), path, fingerprint)
    group.same("the data", data.fingerprint)
    if saved is None and model is None:
        config = runs.model_config(settings, data.vocab_size)
    elif saved is None:
        runs.check_vocabulary(settings.init, config, data.vocab_size)
    batches = Prefetch(runs.own_batches(group, settings, data, config.vocab_size), device)
    if isinstance(saved, Checkpoint):
        batches.seek(saved.state["data"])
        model, optimizer, _, _ = saved.restore(device)
        saved.restore_random_state()
    else:
        np.random.seed(settings.seed if settings.init_seed is None else settings.init_seed)
        if model is None and settings.init is not None:
            model, _ = load_model(settings.init, device, settings.dtype)
        model = (model or config.model_class(config, device=device)).train()
        optimizer = optim.AdamW(
            nn.flatten_parameters(model),
            lr=settings.lr,
            beta1=0.9,
            beta2=0.95,
            eps=1e-8,
            weight_decay=settings.weight_decay,
        )
    parallel = DataParallel(
        group, optimizer.flat, optimizer, settings.grad_accum, settings.context_parallel
    )
    set_up(model, parallel, settings)

    def take_folder() -> str:
        taken, ending.lock = folder.begin(out, given.name, settings.model)
        return str(taken)

    if path is None:
        path = Path(group.first("the folder of the run", take_folder))
    step = 0 if saved is None else saved.state["step"]
    replay = read_replay(path, step)
    run = Run(settings, path, ending.lock, data, model, optimizer, batches, parallel, step, replay)
    if replay is not None:
        replay.begin(data, batches.batches, settings.grad_accum)
    if group.rank == 0 and step == 0:
        runs.write_description(run)
    if isinstance(saved, Checkpoint):
        print(printable(f"resuming {saved.path} after step {step}"))
        before, now = saved.state.get("products"), runs.products_of(model)
        if before not in (None, now):
            text = f"its steps were multiplied by {before}, these by {now}: bits may differ"
            print(wrapped(text))
    return run


def find_run(given: Settings, group: Group) -> tuple[Path | None, Lock | None, Any]:
    """Return the folder, the lock and the Checkpoint (or folder.Begun) of the run to resume, None
    for a new one. Rank 0 looks for it and holds its lock."""
    found = None  # of rank 0

    def find() -> list[str] | None:
        nonlocal found
        found = folder.resume(given.resume, Path(given.out), given.name)
        return found and [str(found[0]), str(found[2].path)]

    paths = group.first("the run to resume", find) if given.resume else None
    if paths is None or found is not None:
        return found or (None, None, None)
    path, file = map(Path, paths)
    return path, None, folder.Begun(path) if file.name == "config.json" else Checkpoint(file)


def check(settings: Settings, config: models.Config, device: Device) -> None:
    """Raise ValueError for what the model or the device cannot do."""
    model = config.meta_model(device)
    if settings.recompute and model.recompute is None:
        raise ValueError(f"--recompute: a {type(model).__name__} cannot compute layers again")
    if settings.context_parallel > 1 and not model.shares:
        name = type(model).__name__
        raise ValueError(f"--context-parallel: sequences of a {name} cannot be shared among ranks")
    if settings.graph and settings.context_parallel > 1:
        raise ValueError("--graph: not together with --context-parallel: leave it out")
    if settings.graph and not device.records_graphs:
        raise ValueError(f"--graph: {device} records no graphs: leave it out")
    if settings.context_parallel > 1 and (mask := model.block_mask(settings.seq_len)) is not None:
        fits = 2 * settings.context_parallel * mask.block
        if settings.seq_len % fits:
            raise ValueError(
                f"--seq-len {settings.seq_len}: with blocks of {mask.block} tokens and "
                f"--context-parallel {settings.context_parallel} it must be a multiple of {fits}"
            )
    if settings.fp8:
        model.use_fp8()


def set_up(model: Any, parallel: DataParallel, settings: Settings) -> None:
    """Let ranks share sequences, products be in FP8, and layers be computed again, where the
    settings ask for it."""
    if parallel.context > 1:
        model.share_sequences(Subgroup(parallel.group, parallel.context))
    if settings.fp8:
        model.use_fp8()
    if settings.recompute:
        model.recompute = True


# ---- the command line --------------------------------------------------------------------------


def main(argv: list[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    given, words = parse(argv), sys.argv[1:] if argv is None else argv
    command = [sys.executable, str(Path(__file__).resolve()), *words]
    with Ending() as ending:
        place = environment.find()
        if given.supervise and not supervised() and (place is None or place.size == 1):
            return supervise.Supervisor(command, given.hang_seconds, folder.again).run()
        if starts_ranks(given, place):
            return spawn.run(command, given.gpus)
        ending.ranks = join(given, words, place, Path(__file__))
        run = make_run(given, ending)
        print(wrapped(str(run.model)))
        if run.model.fp8:
            products = f"{runs.products_in_fp8(run.model)}, all others in {run.settings.dtype}"
            print(wrapped(products))
        if run.data.tokenizer is not None:
            print(wrapped(str(run.data.tokenizer)))
        print(wrapped(f"{run.data.source}\nrun: {run.folder}"), flush=True)
        if run.step < run.until:
            ending.code = train(run)
        else:
            done = f"nothing to do: all {run.until} steps are done. {runs.advice_to_go_on(run)}"
            print(wrapped(done))
            ending.code = 0
    return ending.code


if __name__ == "__main__":
    code = program(main)
    # Work that waits on a GPU for a lost rank would hold up the interpreter's end.
    os._exit(code) if code else sys.exit(code)
