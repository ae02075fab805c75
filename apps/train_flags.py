"""The flags of train_pythia.py: their help, their checks, and the defaults that depend on model and
device.

A run's settings are a flat dictionary of JSON values. Values that no flag gives come from the
recipe, or from the defaults below; a resumed run takes its settings from the checkpoint, and
flags may then only repeat them (RESULT_FLAGS) or change what does not touch the numbers (the
others).
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable, Sequence

import recipes
import run_length

from needle import models, supervise
from needle.backend_ndarray import check_device_name
from needle.data import DataError
from needle.data.text import named
from needle.distributed.tree import fitting_ranks
from needle.models.pythia import SPARSE_PATTERNS

SCHEDULES = ("cosine", "linear", "constant", "pythia")
# Where a flag is not given: by kind of device, and for `tiny`, which a CPU trains in minutes.
CUDA = {
    "model": "pythia-70m",
    "batch_size": 16,
    "seq_len": 2048,
    "steps": 300,
    "lr": 1e-3,
    "dtype": "bfloat16",
    "eval_every": 50,
    "save_every": 100,
}
CPU = {
    "model": "tiny",
    "batch_size": 4,
    "seq_len": 512,
    "steps": 100,
    "lr": 1e-3,
    "dtype": "float32",
    "eval_every": 25,
    "save_every": 25,
}
TINY = {
    "batch_size": 16,
    "seq_len": 256,
    "steps": run_length.MOST,
    "lr": 3e-3,
    "eval_every": 50,
    "save_every": 50,
}
COMMON = {
    "recipe": None,
    "init": None,
    "data": None,
    "tokenizer": None,
    "grad_accum": 1,
    "context_parallel": 1,
    "schedule": "cosine",
    "weight_decay": 0.1,
    "clip": 1.0,
    "seed": 1234,
    "sparse": None,
    "window": 256,
}

# These decide the numbers that a run computes.
RESULT_FLAGS = (
    "recipe",
    "init",
    "model",
    "data",
    "tokenizer",
    "batch_size",
    "seq_len",
    "grad_accum",
    "context_parallel",
    "steps",
    "lr",
    "schedule",
    "warmup",
    "weight_decay",
    "clip",
    "dtype",
    "seed",
    "sparse",
    "window",
)
OTHER_FLAGS = ("eval_every", "save_every")
LONGEST_NAME = 255


def _number(
    kind: type, low: float, low_allowed: bool, words: str, most: float = math.inf
) -> Callable[[str], float]:
    def parse(text: str):
        try:
            value = kind(text.replace("_", "")) if kind is int else kind(text)
        except ValueError:
            value = math.nan
        if not (value > low or (low_allowed and value == low)) or value == math.inf:
            raise argparse.ArgumentTypeError(f"must be {words}, not {text!r}")
        if value > most:
            raise argparse.ArgumentTypeError(f"must be at most {most}, not {text!r}")
        return value

    return parse


count = _number(int, 1, True, "a whole number of 1 or more", 2**63 - 1)
count_or_zero = _number(int, 0, True, "a whole number of 0 or more", 2**63 - 1)
seed = _number(int, 0, True, "a whole number of 0 or more", 2**32 - 1)  # as NumPy takes them
positive = _number(float, 0, False, "a number above 0")
not_negative = _number(float, 0, True, "a number of 0 or more")


def share(text: str) -> float:
    words = "a number above 0 and at most 1"
    value = _number(float, 0, False, words)(text)
    if value > 1:
        raise argparse.ArgumentTypeError(f"must be {words}, not {text!r}")
    return value


def device_name(text: str) -> str:
    try:
        return check_device_name(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def path_name(text: str) -> str:
    """A path that can be printed, and written into config.json."""
    try:
        named(text)
    except DataError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def run_name(text: str) -> str:
    path_name(text)
    if not text or "/" in text or text.startswith("."):
        raise argparse.ArgumentTypeError(
            f"must be a name for a folder, without '/' and not beginning with '.', not {text!r}"
        )
    if len(os.fsencode(text)) > LONGEST_NAME:
        raise argparse.ArgumentTypeError(
            f"must have at most {LONGEST_NAME} bytes, as file systems want it, not "
            f"{len(os.fsencode(text))}"
        )
    return text


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="train_pythia.py",
        description="Trains a Pythia (GPT-NeoX) language model. Without flags: on the sources of "
        "the Python standard library, with sizes that suit the device.",
        epilog="Defaults are written cpu | gpu where they differ. Exit codes: 0 done, or stopped "
        "by SIGINT, SIGTERM, SIGHUP or a closed pipe after saving; 1 an error, or a loss that is "
        "not finite; 2 a bad flag; 75 the GPU is lost: start again with --resume auto, as "
        "--supervise does by itself; 130 Ctrl-C before the first step, or for the second time.",
    )

    recipe = top.add_argument_group(
        "recipe",
        "The way in which the published Pythias were trained: 143,000 steps of 1,024 "
        "sequences of 2,048 tokens, the paper's learning rate for the model, warmup over 1,430 "
        "steps, decay 0.1, clipping at 1. Every flag below still changes its value, and the "
        "run's config.json lists what was changed. With other --steps the schedule is the "
        "recipe's, shrunk or stretched: the warmup is a hundredth of the steps (--warmup "
        "changes it), and the decay's period is all of them.",
    )
    recipe.add_argument(
        "--recipe",
        choices=recipes.NAMES,
        help="pythia: with the rate that GPT-NeoX really used: the first step at "
        "0, and a cosine to 0 that is cut off at a tenth of the peak after 80 "
        "%% of the steps; pythia-fixed: as it was meant, a cosine that "
        "reaches this tenth at the last step. Checkpoints of steps 0, 1, 2, "
        "4 ... 512 and every 1,000 are kept for good (154 files; of the "
        "70m each is 1 GB with the optimizer's state). The model is "
        "pythia-70m where --model does not say (default: none)",
    )

    model = top.add_argument_group("model")
    names = models.preset_names()
    model.add_argument(
        "--model",
        metavar="NAME",
        choices=("auto", *names),
        help=f"auto, {', '.join(names)} (default: auto: tiny | pythia-70m)",
    )
    model.add_argument(
        "--init",
        type=path_name,
        metavar="PATH",
        help="start from the weights of a checkpoint, the folder of a run, or a folder that "
        "transformers saved, with its tokenizer, and a fresh optimizer (default: random weights)",
    )
    model.add_argument(
        "--sparse",
        nargs="?",
        const="mixed",
        choices=SPARSE_PATTERNS,
        metavar="PATTERN",
        help="block-sparse attention; PATTERN is one of "
        f"{', '.join(SPARSE_PATTERNS)} (default: off; without PATTERN: mixed, "
        "a local window and the first block)",
    )
    model.add_argument(
        "--window",
        type=count,
        metavar="N",
        help="of --sparse: how many tokens a query sees back; of the pattern "
        "strided the stride (default: 256)",
    )
    model.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        help="of weights and activations; bfloat16 keeps float32 master weights in "
        "the optimizer (default: float32 | bfloat16)",
    )

    data = top.add_argument_group("data")
    data.add_argument(
        "--data",
        type=path_name,
        metavar="PATH",
        help="text or JSON lines (.gz and .zst too), a folder or quoted pattern "
        "of them, or tokens: Megatron's .bin/.idx, Pythia's preshuffled rows, "
        "llm.c's shards, nanoGPT's train.bin, .npy; the kind is found out and "
        "named (default: the sources of the Python standard library)",
    )
    data.add_argument(
        "--tokenizer",
        type=path_name,
        metavar="PATH",
        help="a tokenizer.json (default: a byte-level BPE trained once on the text "
        "and cached: 4096 tokens for tiny, 50257 for the others)",
    )
    data.add_argument(
        "--trust-data",
        action="store_true",
        help="hash no data, where they are too large for it: a resumed run and other ranks compare "
        "their type and numbers alone; the run says so, and a resumed one needs it again "
        "(default: all data are hashed, once)",
    )
    data.add_argument(
        "--batch-size",
        type=count,
        metavar="N",
        help="sequences a micro-batch (default: tiny 16, others 4 | 16)",
    )
    data.add_argument(
        "--seq-len",
        type=count,
        metavar="N",
        help="tokens a sequence (default: tiny 256, others 512 | 2048)",
    )

    training = top.add_argument_group("training")
    training.add_argument(
        "--grad-accum",
        type=count,
        metavar="N",
        help="micro-batches a step, shared by all ranks (default: one a rank, or what "
        "--global-batch-size or the recipe needs)",
    )
    training.add_argument(
        "--context-parallel",
        type=count,
        metavar="N",
        help="so many neighbouring ranks share each sequence, for those longer than one holds: "
        "each has --seq-len / N tokens, which must be a multiple of 2 N (default: 1)",
    )
    training.add_argument(
        "--global-batch-size",
        type=count,
        metavar="N",
        help="sequences a step: --batch-size times --grad-accum; what of the two "
        "is not given follows from it (default: of a recipe 1024, else "
        "what the two give)",
    )
    length = training.add_mutually_exclusive_group()
    length.add_argument(
        "--steps",
        type=count,
        metavar="N",
        help="optimizer steps (default: tiny as many as three minutes allow, "
        f"{run_length.LEAST} to {run_length.MOST} | {TINY['steps']}, others "
        f"{CPU['steps']} | {CUDA['steps']})",
    )
    length.add_argument(
        "--tokens",
        type=count,
        metavar="N",
        help="tokens to train on, instead of --steps; rounded up to whole steps",
    )
    training.add_argument(
        "--lr",
        type=positive,
        metavar="X",
        help=f"peak learning rate (default: tiny {TINY['lr']:g}, others as in "
        "the Pythia paper, 1e-3 for the 70m)",
    )
    training.add_argument(
        "--schedule",
        choices=SCHEDULES,
        help="of the learning rate after the warmup: down to a tenth along a "
        "cosine or a line, or constant; pythia: as in the recipe of this "
        "name (default: cosine)",
    )
    training.add_argument(
        "--warmup",
        type=count_or_zero,
        metavar="N",
        help="steps in which the rate rises from 0 (default: a tenth of all; of "
        "a recipe a hundredth)",
    )
    training.add_argument(
        "--weight-decay",
        type=not_negative,
        metavar="X",
        help="of matrices and embeddings; biases and norms have none (default: 0.1)",
    )
    training.add_argument(
        "--clip",
        type=not_negative,
        metavar="X",
        help="largest gradient norm; 0: never clipped (default: 1)",
    )
    training.add_argument(
        "--device",
        type=device_name,
        default="auto",
        metavar="NAME",
        help="auto, cpu, cuda or cuda:INDEX (default: auto: the first GPU that "
        "can be used, else the CPU)",
    )
    training.add_argument(
        "--gpus",
        type=count,
        metavar="N",
        help="train on the first N GPUs, a rank on each, with the bits of one; without it on one, "
        "or on what a launcher (torchrun, srun, mpirun) starts (default: 1)",
    )
    training.add_argument(
        "--recompute",
        action="store_true",
        help="keep of each layer only what it reads, and compute it again in the backward: the "
        "same bits with less memory, for the time of a second forward; a resumed run needs it "
        "again",
    )
    training.add_argument(
        "--graph",
        action=argparse.BooleanOptionalAction,
        help="record a micro-batch once and replay it as one CUDA graph: faster where batches are "
        "so small that the host cannot keep up; the same bits, with memory of its own beside that "
        "of evaluations; a resumed run may change it (default: on a GPU for micro-batches of up "
        "to 16,384 tokens)",
    )
    training.add_argument(
        "--seed",
        type=seed,
        metavar="N",
        help="of weights, order of the data and sample (default: 1234)",
    )

    output = top.add_argument_group("output")
    output.add_argument(
        "--eval-every",
        type=count_or_zero,
        metavar="N",
        help="steps between evaluations on the held-out part; 0: only at the end "
        f"(default: tiny {TINY['eval_every']}, others {CPU['eval_every']} | "
        f"{CUDA['eval_every']})",
    )
    output.add_argument(
        "--save-every",
        type=count_or_zero,
        metavar="N",
        help="steps between checkpoints; kept are the last two, the last one that as many finite "
        "steps followed (one of the two, unless stops saved more), and those that a recipe keeps; "
        "0: only at the end "
        f"(default: tiny {TINY['save_every']}, others {CPU['save_every']} | "
        f"{CUDA['save_every']})",
    )
    output.add_argument(
        "--out",
        type=path_name,
        default="runs",
        metavar="FOLDER",
        help="where runs are written (default: runs)",
    )
    output.add_argument(
        "--name",
        type=run_name,
        metavar="NAME",
        help="of the run's folder in there (default: the model's name, with a "
        "number where it is taken)",
    )
    output.add_argument(
        "--tensorboard",
        action="store_true",
        help="write what metrics.jsonl gets for TensorBoard too, to the run's "
        "folder tensorboard/ (needs the package tensorboard or tensorboardX)",
    )
    output.add_argument(
        "--wandb",
        metavar="PROJECT",
        help="send it to this project of Weights & Biases (needs the package "
        "wandb; WANDB_MODE=offline keeps it on this machine)",
    )
    output.add_argument(
        "--resume",
        type=path_name,
        metavar="WHAT",
        help="a checkpoint, the folder of a run, or auto: the newest good "
        "checkpoint of the run --name, without it of all runs in --out; where "
        "none was ever saved, auto starts from the beginning",
    )

    faults = top.add_argument_group(
        "faults",
        "A supervisor starts the run again with --resume auto, and with the same losses bit for "
        "bit, after exit code 75, after a signal that killed it, and where it hangs. It proves "
        "the GPU first (of --gpus each, and goes on without those that do not prove themselves or "
        "that --verify named, with the same bits), waits for each op up to the step that died, so "
        "that the fault gets a name, and gives up after three deaths at one step. Each is a line "
        "of faults.jsonl in the run's folder. Of any command: python -m needle.supervise -- "
        "COMMAND.",
    )
    faults.add_argument(
        "--supervise", action="store_true", help="run under a supervisor (default: off)"
    )
    faults.add_argument(
        "--hang-seconds",
        type=positive,
        metavar="S",
        help="of --supervise: a step, a batch of an evaluation or a save that takes longer is a "
        f"hang (default: {supervise.HANG_SECONDS:g})",
    )
    faults.add_argument(
        "--verify",
        type=count_or_zero,
        default=0,
        metavar="N",
        help="of several ranks: every N steps one micro-batch is computed again by another rank "
        "and compared bit for bit; a difference names the device, saves nothing of the step, and "
        "ends the run with 75; --supervise goes on without the device, where others are left "
        "(default: 0, never)",
    )
    return top


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line; a bad one ends the program with exit code 2."""
    top = parser()
    args = top.parse_args(argv)
    if args.hang_seconds is None:
        args.hang_seconds = supervise.HANG_SECONDS
    elif not args.supervise:
        top.error("argument --hang-seconds: needs --supervise")
    return args


def given(args: argparse.Namespace) -> dict:
    """The settings that the command line names. --tokens becomes steps where the batch is known."""
    named = {
        flag: getattr(args, flag)
        for flag in RESULT_FLAGS + OTHER_FLAGS
        if getattr(args, flag) is not None
    }
    if named.get("model") == "auto":
        del named["model"]
    if args.global_batch_size is not None:
        named["global_batch_size"] = args.global_batch_size
    for flag in ("init", "data", "tokenizer"):
        if flag in named:  # the run may be resumed from another folder
            named[flag] = os.path.abspath(named[flag])
    return named


def steps_of(tokens: int, settings: dict) -> int:
    return -(-tokens // (settings["batch_size"] * settings["seq_len"] * settings["grad_accum"]))


def complete(named: dict, tokens: int | None, on_gpu: bool, ranks: int = 1) -> dict:
    """All settings of a new run. Where nothing says how many micro-batches a step has, each of so
    many ranks has one. A --window without --sparse ends the program as argparse does;
    ValueError where the batch or the warmup cannot be as named."""
    base = dict(CUDA if on_gpu else CPU)
    recipe = named.get("recipe")
    model = named.get("model", base["model"] if recipe is None else "pythia-70m")
    base["lr"] = recipes.PEAK_LR.get(model, base["lr"])
    if model == "tiny":
        base.update(TINY)
    if recipe is not None:
        base.update(recipes.values(recipe, model))
    context = named.get("context_parallel", 1)
    if ranks % context:
        raise ValueError(
            f"--context-parallel {context}: so many ranks share each sequence, and {ranks} cannot "
            f"be cut into such groups: start a multiple of {context}"
        )
    ranks //= context
    settings = {**COMMON, "grad_accum": ranks, **base, "model": model, **named}
    if "window" in named and settings["sparse"] is None:
        parser().error("argument --window: needs --sparse")
    share_step(settings, named, ranks)
    if tokens is not None:
        settings["steps"] = steps_of(tokens, settings)
    if "warmup" not in named:
        steps = settings["steps"]
        settings["warmup"] = steps // 10 if recipe is None else recipes.warmup(steps)
    problem = late_warmup(settings)
    if problem is not None:
        raise ValueError(problem)
    return settings


def late_warmup(settings: dict) -> str | None:
    """What is wrong with a warmup that ends behind the run. A constant rate has no end to reach: a
    run of it may stop within the warmup and go on later."""
    warmup, steps = settings["warmup"], settings["steps"]
    if warmup <= steps or settings["schedule"] == "constant":
        return None
    return (
        f"--warmup {warmup}: the run has {steps} steps, and its warmup must be 0 to {steps} of them"
    )


def may_choose_steps(named: dict, tokens: int | None, settings: dict) -> bool:
    """Whether nothing says how long a run of `tiny` is: on a CPU the machine's speed then does."""
    return settings["model"] == "tiny" and tokens is None and not named.keys() & {"steps", "recipe"}


def data_of(settings: dict) -> dict:
    """The data of a run as needle/data/runs.py describes them."""
    model = settings["model"]  # with --init it may be none of the presets
    vocabulary = models.preset(model).vocab_size if model in models.preset_names() else 50257
    return {
        "path": settings["data"],
        "tokenizer": settings["tokenizer"],
        "vocab_size": min(vocabulary, 50257),
        "batch_size": settings["batch_size"],
        "micro_batches": settings["grad_accum"],
        "seq_len": settings["seq_len"],
        "seed": settings["seed"],
        "samples": settings["steps"] * settings["grad_accum"] * settings["batch_size"],
    }


def share_step(settings: dict, named: dict, ranks: int) -> None:
    """Makes batch_size x grad_accum the sequences of a step that the command line or the recipe
    wants. Flags that were given stay; ValueError where that cannot be."""
    wanted = settings.pop("global_batch_size", None)
    source = "--global-batch-size"
    if wanted is None and settings["recipe"] is not None:
        wanted, source = recipes.SEQUENCES, f"the recipe {settings['recipe']}"
    if wanted is None:
        return
    if "batch_size" not in named and "grad_accum" in named:
        settings["batch_size"] = wanted // settings["grad_accum"]
    elif "grad_accum" not in named:
        if "batch_size" not in named:  # as large as usual, or less where that does not divide
            sizes = [n for n in range(settings["batch_size"], 0, -1) if wanted % n == 0]
            shared = (n for n in sizes if ranks in fitting_ranks(wanted // n))
            settings["batch_size"] = next(shared, sizes[0])
        settings["grad_accum"] = wanted // settings["batch_size"]
    if settings["batch_size"] * settings["grad_accum"] != wanted:
        words = " and ".join(
            f"--{flag.replace('_', '-')} {named[flag]}"
            for flag in ("batch_size", "grad_accum")
            if flag in named
        )
        raise ValueError(
            f"{words} cannot make the {wanted:,} sequences a step of {source}: the "
            "micro-batch times the accumulation must be exactly that many. Choose "
            "other divisors, or another number with --global-batch-size"
        )


def misfits(settings: dict) -> list[str]:
    """What no flag could have set, in the settings of a checkpoint."""
    top, found = parser(), []
    top.exit_on_error = False
    for flag in RESULT_FLAGS + OTHER_FLAGS:
        value, default = settings[flag], {**COMMON, **CPU, "warmup": 0}[flag]
        kinds = (int, float) if isinstance(default, float) else type(default)
        if default is None:
            kinds = (str, type(None))
        if isinstance(value, bool) or not isinstance(value, kinds):
            found.append(f"{flag} is {value!r:.40}")
        elif value is not None and flag != "model":  # with --init it may be none of the presets
            try:
                top.parse_args([f"--{flag.replace('_', '-')}={value}"])
            except argparse.ArgumentError as error:
                found.append(f"{flag} is {value!r:.40}: {error.message}")
    late = None if found else late_warmup(settings)
    return found if late is None else [late]


def resumed(named: dict, tokens: int | None, saved: dict) -> tuple[dict, list[str]]:
    """(settings of a resumed run, differences that forbid it)."""
    if tokens is not None:
        named = {**named, "steps": steps_of(tokens, saved)}
    differences = []
    settings = {**COMMON, **saved}
    saved = {**settings, "global_batch_size": settings["batch_size"] * settings["grad_accum"]}
    for flag, value in named.items():
        # Under a constant rate the number of steps only says where to end. Data is compared by its
        # tokens, when it is open.
        free = flag in OTHER_FLAGS + ("data", "tokenizer")
        free |= flag == "steps" and saved["schedule"] == "constant"
        if free:
            settings[flag] = value
        elif saved[flag] != value:
            option = "--" + flag.replace("_", "-")
            differences.append(f"{option} is {value}, but the run has {saved[flag]}")
            if flag == "steps":
                differences[-1] += f", where its {saved['schedule']} schedule ends"
    return settings, differences
