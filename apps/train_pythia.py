#!/usr/bin/env python3
"""Train a Pythia language model: `needle train`, `--help` for the flags.

The file reads downwards: `train` is the loop, `new_run` makes its data, model and optimizer,
`resumed_run` reads them from a checkpoint, `main` is the command line. needle/training/ has the
rest. A run is a folder runs/NAME/: config.json, metrics.jsonl (a line a step), loss.png,
tokenizer.json, sample.txt, lock and checkpoints/step_N.safetensors. Its settings determine every
number: a run that was stopped and resumed writes the same losses, bit for bit, as one that was not.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

if (Path(__file__).resolve().parent.parent / "checkout.py").exists():
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    import checkout

    checkout.choose()

import numpy as np

from needle import models, nn, optim, supervise
from needle.arguments import wrapped
from needle.autograd import Tensor
from needle.backend_ndarray import Device, NDArray, full
from needle.checkpoint import Checkpoint, CheckpointError, load_checkpoint, save_checkpoint
from needle.data import DataError, Prefetch, run_batches, run_data
from needle.distributed import environment, spawn
from needle.distributed.data_parallel import DataParallel
from needle.distributed.group import Group, Subgroup
from needle.files import Lock, printable
from needle.heartbeat import supervised
from needle.processes import program
from needle.training import flags, folder, length, ranks, state, trackers, weights
from needle.training.evaluation import evaluate
from needle.training.exits import Ending
from needle.training.run import (
    Run,
    finish,
    is_finished,
    is_kept,
    keeps_weights,
    longer,
    report,
    write_description,
)
from needle.training.session import Session
from needle.training.settings import complete, data_of, may_choose_steps, model_config

__all__ = ["load_checkpoint", "main", "save_checkpoint", "train"]


# ---- the loop ----------------------------------------------------------------------------------


def train(run: Run) -> int:
    """Train from run.step to the last step; return the exit code.

    A step is `grad_accum` micro-batches, of which each rank computes its own. The host queues a
    step before it reads the loss of the one before, so that the device never waits.
    """
    settings, model, optimizer = run.settings, run.model, run.optimizer
    batches, parallel, steps = run.batches, run.parallel, run.settings["steps"]
    schedule = schedule_of(settings)
    share = full((), 1 / (settings["grad_accum"] * parallel.context), "float32", run.device)
    loss_scale = Tensor.from_ndarray(share)

    def gradient(ids: Any, targets: Any) -> NDArray:
        optimizer.reset_grad()
        return forward_backward(model, ids, targets, loss_scale)

    with Session(run, gradient) as session:
        if run.step == 0 and is_kept(settings, 0):
            session.save()
        if run.step == 0 and keeps_weights(settings, 0):
            session.save_weights()
        for step in range(run.step + 1, steps + 1):
            optimizer.lr, losses = schedule(step), []
            with session.reading(step):
                for _ in parallel.own_micro_batches:
                    losses.append(session.gradient(*batches.next()))
                    parallel.add_micro_batch()
            norm, scale = parallel.reduce(settings["clip"])
            parallel.step(scale)

            due = session.end_step(step, losses, norm)
            if due.evaluation or due.weights or due.checkpoint:
                with session.evaluating():
                    found = {}
                    if due.evaluation:
                        found = evaluate(model, run.data, settings, parallel)
                    session.log.finish(**found)
            if due.weights:
                session.save_weights()
            if due.checkpoint:
                session.save()
            if due.end:
                break
    return session.conclude()


def forward_backward(
    model: models.LanguageModel, ids: Any, targets: Any, loss_scale: Tensor
) -> NDArray:
    """Add the gradient of loss_scale times the loss to the buffers; return the loss, which stays on
    the device. All activations are free then."""
    loss = model.loss(ids, targets)
    loss.backward(loss_scale)
    return loss.cached_data


def schedule_of(settings: dict) -> optim.Schedule:
    """Return the learning rates: a linear warmup, then constant, or down to a tenth of the peak."""
    peak, warmup, steps = settings["lr"], settings["warmup"], settings["steps"]
    if settings["schedule"] == "constant":
        return optim.Constant(peak, warmup)
    kinds = {"cosine": optim.Cosine, "linear": optim.Linear, "pythia": optim.PythiaCosine}
    return kinds[settings["schedule"]](peak, steps, warmup, floor=peak / 10)


# ---- data, model, optimizer --------------------------------------------------------------------


def new_run(
    args: argparse.Namespace, group: Group, path: Path | None = None, lock: Lock | None = None
) -> Run:
    """Make a run from the command line; of a `path`, the run that has begun there and not saved."""
    device = ranks.open_device(args.device, group)
    out, tokens, fingerprint, model = Path(args.out), args.tokens, None, None
    if path is None:
        given = flags.given_anew(args)
    else:
        begun, tokens = state.Begun(path), None
        state.check(begun)
        given, fingerprint = flags.resumed(args, begun, path), begun.state["fingerprint"]
        given["global_batch_size"] = given["batch_size"] * given["grad_accum"]
    if given.get("init") is not None:
        model, given = weights.start(given, tokens, device)
    settings = complete(given, tokens, not device.is_host, group.size)

    # Check the name and the sizes before text is tokenised, which may take long.
    if path is None and args.name is not None:
        group.first("the name of the run", lambda: folder.check_free(out / args.name))
    known = None
    if path is None and (model is not None or "vocab_size" in settings):
        known = group.first("the tokenizer", lambda: weights.known_ids(settings))
    if model is None:
        config = model_config(settings, known)
    else:
        config = model.config
        weights.check_vocabulary(settings["init"], config, known)
    check(args, settings, config, device)
    described = data_of(settings)
    with group.rank_0_first("the data"):
        data = run_data(described, path, fingerprint)
        fingerprint = data.fingerprint
    group.same("the data", fingerprint)
    if model is None:
        config = model_config(settings, data.vocab_size)
    if device.is_host and may_choose_steps(given, tokens, settings):
        run_batches(data, described)  # reports too little text before a step is measured
        given["steps"] = group.first(
            "the number of steps", lambda: length.choose_steps(config, settings, device)
        )
        settings = complete(given, None, False, group.size)

    np.random.seed(settings.get("init_seed", settings["seed"]))
    if model is None:
        model = config.model_class(config, device=device)
    batches = Prefetch(ranks.own_batches(group, settings, data, model.config.vocab_size), device)
    optimizer = optim.AdamW(
        nn.flatten_parameters(model),
        lr=settings["lr"],
        beta1=0.9,
        beta2=0.95,
        eps=1e-8,
        weight_decay=settings["weight_decay"],
    )
    micro_batches, context = settings["grad_accum"], settings["context_parallel"]
    parallel = DataParallel(group, optimizer.flat, optimizer, micro_batches, context)
    set_up(model, parallel, settings)

    def take_folder() -> str:
        nonlocal lock
        taken, lock = folder.begin(out, args.name, settings["model"])
        return str(taken)

    if path is None:
        path = Path(group.first("the folder of the run", take_folder))
    run_id = state.id_of(settings, data, optimizer.flat)
    run = Run(args, path, lock, run_id, settings, data, model, optimizer, batches, parallel)
    if group.rank == 0:
        write_description(run)
    return run


def check(args: argparse.Namespace, settings: dict, config: models.Config, device: Device) -> None:
    """Raise ValueError for what the model or the device cannot do."""
    model = config.meta_model(device)
    if args.recompute and model.recompute is None:
        raise ValueError(f"--recompute: a {type(model).__name__} cannot compute layers again")
    if args.graph and not device.records_graphs:
        raise ValueError(f"--graph: {device} records no graphs, as GPUs do: leave it out")
    if args.graph and settings["context_parallel"] > 1:
        raise ValueError("--graph: not together with --context-parallel: leave it out")
    if "fp8" in settings:
        model.use_fp8()
    for _, part in model.named_modules():
        if isinstance(part, nn.Attention) and part.head_dim > 256:  # of its kernels
            raise ValueError(f"--heads: {part.head_dim} dimensions a head, but attention takes 256")


def set_up(model: Any, parallel: DataParallel, settings: dict) -> None:
    """Let ranks share sequences and products be in FP8 where the settings ask for it."""
    if parallel.context > 1:
        model.share_sequences(Subgroup(parallel.group, parallel.context))
    if "fp8" in settings:
        model.use_fp8()


def resumed_run(
    args: argparse.Namespace, group: Group, path: Path, lock: Lock | None, checkpoint: Checkpoint
) -> Run:
    """Make a run from its checkpoint; flags may repeat its settings."""
    device, saved = ranks.open_device(args.device, group), checkpoint.state
    state.check(checkpoint)
    settings, config = flags.resumed(args, checkpoint, path), checkpoint.configuration()
    check(args, settings, config, device)
    with group.rank_0_first("the data"):
        data = run_data(data_of(settings), path, saved["fingerprint"])
    group.same("the data", data.fingerprint)
    batches = Prefetch(ranks.own_batches(group, settings, data, config.vocab_size), device)
    try:
        batches.seek(saved["data"])
    except DataError as error:
        raise CheckpointError(f"{checkpoint.path}: {error}") from error
    model, optimizer, _, _ = checkpoint.restore(device)
    if optimizer.flat is None:
        raise CheckpointError(f"{checkpoint.path}: its optimizer has a part of the parameters only")
    checkpoint.restore_random_state()
    micro_batches, context = settings["grad_accum"], settings["context_parallel"]
    parallel = DataParallel(group, optimizer.flat, optimizer, micro_batches, context)
    set_up(model, parallel, settings)
    step = saved["step"]
    print(printable(f"resuming {checkpoint.path} after step {step}"))
    before, now = saved.get("products"), state.products_of(model)
    if before not in (None, now):
        print(wrapped(f"its steps were multiplied by {before}, these by {now}: bits may differ"))
    run_id = saved["run"]
    return Run(args, path, lock, run_id, settings, data, model, optimizer, batches, parallel, step)


# ---- the command line --------------------------------------------------------------------------


def make_run(args: argparse.Namespace, group: Group) -> Run:
    """Make a new run, or the one that --resume finds. Rank 0 looks for it and holds its lock."""
    found = None  # rank 0 keeps the open lock in `found`; others open by path

    def find() -> list[str | None] | None:
        nonlocal found
        found = folder.resume(args.resume, Path(args.out), args.name)
        return found and [str(found[0]), found[2] and str(found[2].path)]

    paths = group.first("the run to resume", find) if args.resume else None
    if paths is None:
        run = new_run(args, group)
    else:
        path, lock, checkpoint = found or (Path(paths[0]), None, paths[1] and Checkpoint(paths[1]))
        if checkpoint is None:
            run = new_run(args, group, path, lock)
        else:
            run = resumed_run(args, group, path, lock, checkpoint)
    if args.recompute:
        run.model.recompute = True
    return run


def main(argv: list[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    args, words = flags.parse(argv), sys.argv[1:] if argv is None else argv
    command = [sys.executable, str(Path(__file__).resolve()), *words]
    with Ending() as ending:
        place = environment.find()
        if args.supervise and not supervised() and (place is None or place.size == 1):
            return supervise.Supervisor(command, args.hang_seconds, folder.again).run()
        if ranks.starts_ranks(args, place):
            return spawn.run(command, args.gpus)
        trackers.check(args)
        ending.ranks = group = ranks.join(args, words, place, Path(__file__))
        ending.run = run = make_run(args, group)
        print(wrapped(str(run.model)))
        if run.model.fp8:
            products = f"{state.products_in_fp8(run.model)}, all others in {run.settings['dtype']}"
            print(wrapped(products))
        if run.data.tokenizer is not None:
            print(wrapped(str(run.data.tokenizer)))
        print(wrapped(f"{run.data.source}\nrun: {run.folder}"), flush=True)
        if run.step < run.settings["steps"]:
            ending.code = train(run)
        else:
            if group.rank == 0 and not is_finished(run):
                finish(run)
            text = f"nothing to do: all {run.settings['steps']} steps are done. {longer(run)}"
            report(wrapped(text))
            ending.code = 0
    return ending.code


if __name__ == "__main__":
    code = program(main)
    # Work that waits on a GPU for a lost rank would hold up the interpreter's end.
    os._exit(code) if code else sys.exit(code)
