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

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import checkout

checkout.choose()

import recipes  # noqa: E402
import run_folder  # noqa: E402
import run_init  # noqa: E402
import run_length  # noqa: E402
import trackers  # noqa: E402
import train_flags  # noqa: E402
from run_log import NotFinite, RunLog, plot  # noqa: E402

import needle as ndl  # noqa: E402
from needle import models, nn, optim, supervise  # noqa: E402
from needle.autograd import Tensor, no_grad  # noqa: E402
from needle.backend_ndarray import NDArray, choose_device, full  # noqa: E402
from needle.checkpoint import (  # noqa: E402
    Checkpoint,
    CheckpointError,
    checkpoint_path,
    load_checkpoint,
    prune_checkpoints,
    save_checkpoint,
    versions,
)
from needle.data import (  # noqa: E402
    Batches,
    DataError,
    Prefetch,
    TokenData,
    run_batches,
    run_data,
    token_bytes,
)
from needle.files import Lock, described, replacing  # noqa: E402
from needle.heartbeat import beat, supervised  # noqa: E402
from needle.peaks import peak  # noqa: E402

__all__ = ["load_checkpoint", "main", "save_checkpoint", "train"]

# One evaluation reads so many tokens at most, in so many batches at most.
EVAL_TOKENS = {"cpu": 1 << 15, "cuda": 1 << 19}
EVAL_BATCHES = 32
SAMPLE_TOKENS = 120
EXIT_GPU_LOST = 75  # a supervisor (--supervise) starts again with --resume auto


@dataclasses.dataclass
class Run:
    """Everything the loop works on."""

    folder: Path
    lock: Lock
    settings: dict
    device: ndl.Device
    data: TokenData
    model: models.LanguageModel
    flat: nn.FlatParameters
    optimizer: optim.AdamW
    batches: Prefetch
    position: dict[str, int]  # in the data, behind the steps done
    step: int = 0  # steps done
    saved: int = 0  # of them, up to the last checkpoint
    seconds: float = 0.0
    tensorboard: bool = False
    wandb: str | None = None  # the project
    device_name: str = "auto"  # as the command line says it
    hang_seconds: float = supervise.HANG_SECONDS


# ---- the loop ---------------------------------------------------------------------------------


def train(run: Run) -> int:
    """Trains from run.step to settings["steps"]; returns the exit code."""
    settings, model, flat, optimizer, batches = (
        run.settings,
        run.model,
        run.flat,
        run.optimizer,
        run.batches,
    )
    schedule = schedule_of(settings)
    steps, micro_batches = settings["steps"], settings["grad_accum"]
    tokens_per_step = settings["batch_size"] * settings["seq_len"] * micro_batches
    log = RunLog(
        run.folder,
        run.device,
        run.step,
        steps,
        tokens_per_step,
        model.flops_per_token(settings["seq_len"]),
        peak(run.device.properties()["name"], settings["dtype"]),
        run.seconds,
        trackers.start(run.folder, run.step, settings, run.tensorboard, run.wandb),
    )
    loss_scale = Tensor.from_ndarray(full((), 1 / micro_batches, "float32", run.device))
    stop, failure = Stop(), None
    beat(step=run.step)
    try:
        if run.step == 0 and settings["recipe"]:
            save(run, log)
            log.skip_time()
        for step in range(run.step + 1, steps + 1):
            where, waited = f"epoch {batches.epoch}, batch {batches.batch}", batches.waited
            optimizer.lr = schedule(step)
            optimizer.reset_grad()
            losses = [
                forward_backward(model, *batches.next(), loss_scale) for _ in range(micro_batches)
            ]
            norm, scale = optim.grad_norm(flat, settings["clip"])
            optimizer.step(scale)
            run.step, run.position = step, batches.position
            waited = 1e3 * (batches.waited - waited)
            try:
                log.queue(step, losses, norm, optimizer.lr, where, waited)
            except OSError as error:  # of the line before: this step is done, and the last one
                failure = error

            if not log.is_heard:
                stop.reason = stop.reason or "a closed pipe"
            ends = step == steps or stop.reason is not None or failure is not None
            evaluates = step == steps or _due(step, settings["eval_every"])
            saves = ends or _due(step, settings["save_every"]) or stays(settings, step)
            if evaluates or saves:
                log.wait()
                log.finish(**(evaluate(run) if evaluates else {}))
                if saves:
                    save(run, log)
                log.skip_time()
            if ends:
                break
    except NotFinite as error:
        log.close()
        return report_not_finite(run, error)
    except (DataError, OSError) as error:  # drops the part of a step, and not those that are done
        failure = error
        if run.step > run.saved:
            log.settle()
            save(run, log)
    finally:
        log.close()
        batches.close()
        stop.restore()
    if failure is not None:
        print(f"train_pythia.py: {described(failure)}", file=sys.stderr)
    if run.step < steps or failure is not None:
        reason = stop.reason or "this error"
        print(
            f"stopped by {reason} after step {run.step} of {steps}, and saved. Go on with\n"
            f"    {resume_command(run)}",
            file=sys.stdout if failure is None else sys.stderr,
        )
        return 0 if failure is None else 1
    print(
        f"loss {log.first_loss:.4f} at the first step, {log.loss:.4f} at the last; "
        f"{log.seconds:.0f} s of training"
    )
    finish(run)
    return 0


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


def evaluate(run: Run) -> dict[str, float]:
    """val_loss in nats a token, and val_bits_per_byte where the tokenizer is known."""
    settings, tokens = run.settings, run.data.held_out
    length = settings["seq_len"]
    rows = min(settings["batch_size"], max(len(tokens) - 1, 0) // length)
    if rows == 0:
        return {}
    held_out = Batches(tokens, rows, length, vocab_size=run.model.config.vocab_size)
    most = EVAL_TOKENS["cpu" if run.device.is_host else "cuda"]
    limit = min(max(most // (rows * length), 1), EVAL_BATCHES)
    sizes = None if run.data.tokenizer is None else token_bytes(run.data.tokenizer)
    nats, count, text_bytes = [], 0, 0
    run.model.eval()
    with no_grad():
        for ids, targets in held_out.in_order(limit):
            loss = run.model.loss(ids, targets)
            nats.append(float(loss.numpy()) * targets.size)
            beat()
            count += targets.size
            text_bytes += 0 if sizes is None else int(sizes[targets].sum())
    run.model.train()
    result = {"val_loss": math.fsum(nats) / count}
    if text_bytes:
        result["val_bits_per_byte"] = math.fsum(nats) / math.log(2) / text_bytes
    return result


# ---- stopping and saving ----------------------------------------------------------------------


class Stop:
    """SIGINT, SIGTERM and SIGHUP let the step end; a second SIGINT interrupts at once. A SIGHUP
    that whoever started the process has it ignore (nohup) stays ignored."""

    def __init__(self) -> None:
        self.reason: str | None = None
        numbers = [signal.SIGINT, signal.SIGTERM]
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
    """The checkpoint of run.step; the last two stay, and those that a recipe keeps."""
    log.sync()
    folder = run.folder / "checkpoints"
    schedule = {name: run.settings[name] for name in ("schedule", "lr", "warmup", "steps")}
    save_checkpoint(
        run.model,
        run.optimizer,
        run.position["epoch"],
        log.loss,
        checkpoint_path(folder, run.step),
        step=run.step,
        data=run.position,
        fingerprint=run.data.fingerprint,
        schedule=schedule,
        settings=run.settings,
        seconds=log.seconds,
        products=run.device.properties()["products"],
    )
    run_folder.note_saved(run.folder)
    run.saved = run.step
    beat(saved=run.step)
    prune_checkpoints(folder, run.step, forever=lambda step: stays(run.settings, step))


def resume_command(run: Run) -> str:
    """With the flags that a checkpoint does not hold."""
    words = [sys.executable, sys.argv[0], *run_folder.again(run.folder)]
    words += ["--device", run.device_name] if run.device_name != "auto" else []
    words += ["--supervise"] * supervised() + ["--tensorboard"] * run.tensorboard
    if supervised() and run.hang_seconds != supervise.HANG_SECONDS:
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


def report_not_finite(run: Run, error: NotFinite) -> int:
    print(f"{error}. Stopped.", file=sys.stderr)
    saved = checkpoint_path(run.folder / "checkpoints", run.saved)
    print(
        f"the last good checkpoint is {saved}"
        if saved.exists()
        else "no checkpoint was written before it",
        file=sys.stderr,
    )
    print("a lower --lr, a longer --warmup or a smaller --clip may help", file=sys.stderr)
    return 1


def finish(run: Run) -> None:
    """The plot, a sample, and where everything lies."""
    beat(watched=False)  # fonts may be looked for
    print(plot(run.folder))
    beat()
    print(f"checkpoint: {checkpoint_path(run.folder / 'checkpoints', run.step)}")
    text = sample_text(run)
    with replacing(run.folder / "sample.txt") as file:
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


def open_device(name: str) -> ndl.Device:
    """The supervisor watches while it opens; then data may be read for any time."""
    beat()
    device = choose_device(name)
    told = "cpu" if device.is_host else f"{device.name}:{device.index}"
    beat(device=told, watched=False)
    return device


def new_run(args) -> Run:
    device, named, model = open_device(args.device), train_flags.given(args), None
    if "init" in named:
        model, named = run_init.start(named, args.tokens, device)
    settings = train_flags.complete(named, args.tokens, on_gpu=not device.is_host)
    # Names are checked before the text is tokenised, which may take long.
    folder = run_folder.free_folder(
        Path(args.out), args.name, settings["model"], restart=bool(args.resume)
    )
    described = train_flags.data_of(settings)
    data = run_data(described)
    if model is None:
        config = model_config(settings, data.vocab_size)
    else:
        config = model.config
        run_init.check_vocabulary(settings["init"], config, data.vocab_size)
    if device.is_host and train_flags.may_choose_steps(named, args.tokens, settings):
        run_batches(data, described)  # too little text is said before anything is measured
        named["steps"] = run_length.choose_steps(config, settings, device)
        settings = train_flags.complete(named, None, on_gpu=False)
        described = train_flags.data_of(settings)
    np.random.seed(settings["seed"])
    if model is None:
        model = config.model_class(config, device=device)
    batches = Prefetch(run_batches(data, described, model.config.vocab_size), device)
    flat = nn.flatten_parameters(model)
    optimizer = optim.AdamW(
        flat,
        lr=settings["lr"],
        beta1=0.9,
        beta2=0.95,
        eps=1e-8,
        weight_decay=settings["weight_decay"],
    )
    lock = run_folder.take(folder)
    run = Run(
        folder, lock, settings, device, data, model, flat, optimizer, batches, batches.position
    )
    write_description(run)
    return run


def check_state(checkpoint: Checkpoint) -> None:
    """CheckpointError for the file of another program, and for values that no run could have."""
    state = checkpoint.state
    kinds = {"settings": dict, "step": int, "data": dict, "fingerprint": str}
    kinds |= {"seconds": (int, float), "optimizer": dict}
    missing = [key for key, kind in kinds.items() if not isinstance(state.get(key), kind)]
    if not missing:
        known = {**train_flags.COMMON, **state["settings"]}
        flags = train_flags.RESULT_FLAGS + train_flags.OTHER_FLAGS
        missing = [f"settings of {key}" for key in flags if key not in known]
        missing += [
            f"{key} of its data"
            for key in ("epoch", "batch")
            if type(state["data"].get(key)) is not int
        ]
    if missing:
        raise CheckpointError(
            f"{checkpoint.path}: not the checkpoint of a run of train_pythia.py: "
            f"it has no {', '.join(missing)}"
        )
    wrong = train_flags.misfits(known)
    if not wrong:
        steps, epoch = known["steps"], state["data"]["epoch"]
        if not 0 <= state["step"] <= steps:
            wrong.append(f"step is {state['step']}: the run has {steps}")
        if not 0 <= epoch <= steps * known["grad_accum"]:
            wrong.append(f"epoch of its data is {epoch}: the run draws fewer batches")
    if not 0 <= state["seconds"] < math.inf:
        wrong.append(f"seconds is {state['seconds']!r:.40}: must be a number of 0 or more")
    if state["optimizer"].get("class") != "AdamW":
        wrong.append(f"optimizer is {state['optimizer'].get('class')!r:.40}: runs have AdamW")
    if wrong:
        raise CheckpointError(f"{checkpoint.path}: its settings cannot be used: {', '.join(wrong)}")


def resumed_run(args, folder: Path, lock: Lock, checkpoint: Checkpoint) -> Run:
    device, state = open_device(args.device), checkpoint.state
    check_state(checkpoint)
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
    data = run_data(described, folder, state["fingerprint"])
    batches = Prefetch(run_batches(data, described, checkpoint.configuration().vocab_size), device)
    batches.seek(state["data"])
    model, optimizer, _, _ = checkpoint.restore(device)
    if optimizer.flat is None:
        raise CheckpointError(f"{checkpoint.path}: its optimizer has a part of the parameters only")
    checkpoint.restore_random_state()
    print(f"resuming {checkpoint.path} after step {state['step']}")
    before, now = state.get("products"), device.properties()["products"]
    if before not in (None, now):
        print(f"its steps were multiplied by {before}, these by {now}: bits may differ")
    return Run(
        folder,
        lock,
        settings,
        device,
        data,
        model,
        optimizer.flat,
        optimizer,
        batches,
        state["data"],
        state["step"],
        state["step"],
        state["seconds"],
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
        "settings": run.settings,
        "recipe": None
        if recipe is None
        else {"name": recipe, "changed": recipes.changes(run.settings)},
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
    run_folder.write_description(run.folder, description)
    if run.data.tokenizer is not None:
        with replacing(run.folder / "tokenizer.json") as file:
            file.write(run.data.tokenizer.to_str().encode())


def main(argv: list[str] | None = None) -> int:
    args = train_flags.parse(argv)
    if args.supervise and not supervised():
        words = sys.argv[1:] if argv is None else argv
        command = [sys.executable, str(Path(__file__).resolve()), *words]
        return supervise.Supervisor(command, args.hang_seconds).run()
    run = None
    try:
        trackers.check(args.tensorboard, args.wandb)
        found = run_folder.resume(args.resume, Path(args.out), args.name) if args.resume else None
        run = new_run(args) if found is None else resumed_run(args, *found)
        run.tensorboard, run.wandb = args.tensorboard, args.wandb
        run.device_name, run.hang_seconds = args.device, args.hang_seconds
        if args.recompute:
            recompute_layers(run.model)
        print(f"{run.model}\n{run.data.source}\nrun: {run.folder}", flush=True)
        if run.step >= run.settings["steps"]:
            if not is_finished(run):
                finish(run)
            print(f"nothing to do: all {run.settings['steps']} steps are done. {longer(run)}")
            return 0
        return train(run)
    except ndl.CudaFatalError as error:
        beat(fault=str(error))
        print(
            f"train_pythia.py: the GPU is lost: {error}\nstart again with --resume auto",
            file=sys.stderr,
        )
        return EXIT_GPU_LOST
    except (ndl.CudaError, MemoryError) as error:
        print(
            f"train_pythia.py: {error or 'out of memory'}\n(where memory ran out: --recompute, or "
            "a smaller --batch-size, with --grad-accum to keep the step's size)",
            file=sys.stderr,
        )
        return 1
    except (ValueError, OSError) as error:
        print(f"train_pythia.py: {described(error)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:  # before the first step, or a second one within a step
        print("train_pythia.py: interrupted", file=sys.stderr)
        return 130
    finally:
        if run is not None:
            run.lock.release()


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code) if code == EXIT_GPU_LOST else sys.exit(code)
