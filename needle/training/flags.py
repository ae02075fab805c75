"""The flags of apps/train_pythia.py, a table in the words of --help.

A row is a flag, its value and its help (needle.arguments.rows). `{...}` stands for values that
settings.py and recipes.py hold.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
from collections.abc import Sequence
from pathlib import Path

from needle import models, supervise
from needle.arguments import Parser, number, path, rows, told, whole
from needle.backend_ndarray import check_device_name
from needle.checkpoint import Checkpoint, CheckpointError
from needle.models.pythia import SPARSE_PATTERNS
from needle.models.registry import imported
from needle.training import length, recipes
from needle.training.folder import flag as flag_words
from needle.training.folder import is_free
from needle.training.settings import (
    COMMON,
    DEFAULTS,
    OPTIONAL,
    OTHERS,
    RESULTS,
    SHAPE,
    late_warmup,
    read_config,
    steps_of,
)
from needle.training.state import Begun

SCHEDULES = ("cosine", "linear", "constant", "pythia")
LONGEST_NAME = 255  # bytes of a file's name

# ---- values ------------------------------------------------------------------------------------


count, count_or_zero = whole(1), whole(0)
seed = whole(0, 2**32 - 1)  # as NumPy takes them
positive, not_negative = number(0, above=True), number(0)
share = number(0, 1, above=True)
device_name = told(check_device_name)


def path_name(text: str) -> str:
    """Return a path that can be printed, and written into config.json, as it is written."""
    path(text)
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


def model_name(text: str) -> str:
    names = ("auto", *models.preset_names())
    if text not in names:
        raise argparse.ArgumentTypeError(
            f"no model {text!r}; there are {', '.join(names)}. --import FILE registers models of "
            "one's own, by the names in presets() of their configuration"
        )
    return text


@told
def kept_steps(text: str) -> str:
    recipes.keeps(text)
    return text


# ---- the table ---------------------------------------------------------------------------------

DESCRIPTION = """
Trains a Pythia (GPT-NeoX) language model. Without flags: on the sources of the Python standard
library, with sizes that suit the device.
"""
EPILOG = """
Defaults are written cpu | gpu where they differ. Exit codes: 0 done, or stopped by SIGINT,
SIGTERM, SIGHUP or a closed pipe after saving; 1 an error, or a loss that is not finite; 2 a bad
flag; 75 (os.EX_TEMPFAIL) the GPU is lost: start again with --resume auto, as --supervise does by
itself; 130 Ctrl-C before the first step, or for the second time.
"""
RECIPE = """
The way in which the published Pythias were trained: 143,000 steps of 1,024 sequences of 2,048
tokens, the paper's learning rate for the model, warmup over 1,430 steps, decay 0.1, clipping at 1.
Every flag below still changes its value, and the run's config.json lists what was changed. With
other --steps the schedule is the recipe's, shrunk or stretched: the warmup is a hundredth of the
steps (--warmup changes it), and the decay's period is all of them.
"""
FAULTS = """
A supervisor restarts the run with --resume auto, and with the same losses bit for bit, after exit
code 75, after a signal that killed it, and after a hang. Three failures without a further step end
the run; the third try waits for each op, so that the fault names its op. Each is a line of
faults.jsonl in the run's folder. Of any command: needle supervise -- COMMAND.
"""

# What --help prints: the common flags.
SCREEN = """
usage: {prog} [FLAG ...]

Trains a Pythia (GPT-NeoX) language model, by default on the sources of the
Python standard library.

model
  --model NAME       tiny, pythia-14m, -31m, -70m ... -12b
  --layers --hidden --heads --vocab-size N        of a model of another shape
  --no-mlp           layers of attention alone
  --config FILE      the model by a TOML file, or by transformers' config.json
  --init PATH        start from the weights of a run, a file or a folder
  --import FILE      register a model of one's own first
data
  --data PATH        text, JSON lines, or files of tokens
  --tokenizer PATH   a tokenizer.json; by default trained on the text
  --batch-size N     sequences a micro-batch
  --seq-len N        tokens a sequence
training
  --steps N          optimizer steps; or --tokens N
  --lr X             peak learning rate; --warmup N, --schedule NAME
  --grad-accum N     micro-batches a step
  --seed N           of everything; --init-seed, --data-seed
  --device NAME      auto, cpu, cuda or cuda:INDEX; --gpus N
  --fp8              products in FP8: faster on a Hopper GPU
output
  --name NAME        the run is runs/NAME; --out FOLDER
  --resume WHAT      go on: auto, the folder of a run, or a checkpoint
  --eval-every N     steps between evaluations
  --save-every N     steps between checkpoints
  --keep STEPS       weights kept for good, as 1,2,4,...,512,1000,... or log

--help all: every flag with its default, --recipe, --sparse, --supervise ...
"""


class Help(argparse.Action):
    """Print the common flags, or with `all` every flag, and exit."""

    def __call__(self, parser: argparse.ArgumentParser, *given: object) -> None:
        text = SCREEN.lstrip().format(prog=parser.prog)
        print(parser.format_help() if given[1] == "all" else text, end="")
        parser.exit()


# Group: its flags.
TABLE = {
    "recipe": """
--recipe  pythia: the learning rate of GPT-NeoX's code, 0 at the first step, then a cosine to 0
    that stops at a tenth of the peak after 80 %% of the steps; pythia-fixed: as intended, a cosine
    that reaches a tenth of the peak at the last step. Checkpoints of steps 0, 1, 2, 4 ... 512
    and every 1,000 are never deleted (154 files; of the 70m each is 1 GB with the optimizer's
    state). Without --model it trains pythia-70m (default: none)
""",
    "model": """
--model NAME  auto, {models} (default: auto: tiny | pythia-70m)
--import FILE  run this Python file first, which registers a model of one's own (models.register):
    its presets are names for --model; a resumed run needs it again
--init PATH  start from the weights of a checkpoint, the folder of a run, or a folder that
    transformers saved, with its tokenizer, and a fresh optimizer (default: random weights)
--layers N  of the model, instead of the preset's; so with the next four (default: of the preset)
--hidden N  size of the residual stream, a multiple of --heads
--heads N  of attention
--vocab-size N  of the model, and of the tokenizer that is trained on text
--no-mlp  layers of attention alone, which no model of transformers has: it cannot be exported
--config FILE  instead of --model: a TOML or JSON file of the fields of a configuration, or the
    config.json of a run or of a model of transformers; flags change its fields
--sparse PATTERN  block-sparse attention; PATTERN is one of {patterns} (default: off; without
    PATTERN: mixed, a local window and the first block)
--window N  of --sparse: how many tokens a query sees back; of the pattern strided the stride
    (default: a quarter of the sequence, 64 at least)
--dtype  of weights and activations; bfloat16 keeps float32 master weights in the optimizer
    (default: float32 | bfloat16)
--fp8  compute the products of the head up to a width of 1024, and those of layers from 512 on, in
    FP8 while training: e4m3 forward, e5m2 for gradients; weights, checkpoints and evaluations are
    in --dtype. The parts in FP8 are printed at the start and kept in checkpoints. The width, the
    vocabulary and the tokens of a micro-batch must be multiples of 16; a GPU must have compute
    capability 9.0 (Hopper)
""",
    "data": """
--data PATH  text or JSON lines (.gz and .zst too), a folder or quoted pattern of them, or tokens:
    Megatron's .bin/.idx, Pythia's preshuffled rows, nanoGPT's train.bin, .npy; the kind is found
    out and named (default: the sources of the Python standard library)
--tokenizer PATH  a tokenizer.json (default: a byte-level BPE trained once on the text and cached:
    4096 tokens for tiny, 50257 for the others)
--end-of-text TOKEN  of --tokenizer, after each document (default: as the files beside the
    tokenizer.json name it; the run prints it)
--batch-size N  sequences a micro-batch (default: {batch_size})
--seq-len N  tokens a sequence (default: {seq_len})
""",
    "training": """
--grad-accum N  micro-batches a step, shared by all ranks (default: one a rank, or what
    --global-batch-size or the recipe needs)
--context-parallel N  so many neighbouring ranks share each sequence, for those longer than one
    holds: each has --seq-len / N tokens, which must be a multiple of 2 N (default: 1)
--global-batch-size N  sequences a step: --batch-size times --grad-accum; what of the two is not
    given follows from it (default: of a recipe 1024, else what the two give)
--steps N  optimizer steps (default: tiny as many as three minutes allow, {least} to {steps})
--tokens N  tokens to train on, instead of --steps; rounded up to whole steps
--lr X  peak learning rate (default: tiny {lr:g}, others as in the Pythia paper, 1e-3 for the 70m)
--schedule  of the learning rate after the warmup: down to a tenth along a cosine or a line, or
    constant; pythia: as in the recipe of this name (default: cosine)
--warmup N  steps in which the rate rises from 0 (default: a tenth of all; of a recipe a hundredth)
--weight-decay X  of matrices and embeddings; biases and norms have none (default: 0.1)
--clip X  largest gradient norm; 0: never clipped (default: 1)
--device NAME  auto, cpu, cuda or cuda:INDEX (default: auto: the first GPU that can be used, else
    the CPU)
--gpus N  train on the first N GPUs, a rank on each, with the bits of one; without it on one, or on
    what a launcher (torchrun, srun, mpirun) starts (default: 1)
--recompute  keep of each layer only what it reads, and compute it again in the backward: the same
    bits with less memory, for the time of a second forward; a resumed run needs it again
--graph  record a micro-batch once and replay it as one CUDA graph: faster where batches are so
    small that the host cannot keep up; the same bits, with memory of its own beside that of
    evaluations; a resumed run may change it (default: on a GPU for micro-batches of up to 16,384
    tokens)
--seed N  of weights, order of the data and sample (default: 1234)
--init-seed N  of the weights alone (default: --seed)
--data-seed N  of the order of the data alone (default: --seed)
""",
    "output": """
--eval-every N  steps between evaluations on the held-out part; 0: only at the end (default:
    {eval_every})
--save-every N  steps between checkpoints; 0: only at the end. Three kinds are kept: the last two,
    the last one followed by N finite steps (one of the two, unless stops saved more), and those of
    a recipe (default: {save_every})
--keep STEPS  keep the weights of these steps for good, as checkpoints/weights_N.safetensors:
    numbers, and "..." for those that follow, as in 1,2,4,...,512,1000,..., or log: 0 and the powers
    of two (default: none)
--keep-optimizer  of the steps of --keep keep whole checkpoints, from which a run can resume
--out FOLDER  where runs are written (default: runs)
--name NAME  of the run's folder in there (default: the model's name, with a number where it is
    taken)
--tensorboard  write what metrics.jsonl gets for TensorBoard too, to the run's folder tensorboard/
    (needs the package tensorboard or tensorboardX)
--wandb PROJECT  send it to this project of Weights & Biases (needs the package wandb;
    WANDB_MODE=offline keeps it on this machine)
--resume WHAT  a checkpoint, the folder of a run, or auto: the newest good checkpoint of the run
    --name, without it of all runs in --out; where none was ever saved, auto starts from the
    beginning, with the settings of the config.json that is there
""",
    "faults": """
--supervise  run under a supervisor (default: off)
--hang-seconds S  of --supervise: a step, a batch of an evaluation or a save that takes longer is a
    hang (default: {hang_seconds:g})
""",
}

KINDS = {
    "FILE": path_name,
    "N": count,
    "X": positive,
    "S": positive,
    "PATH": path_name,
    "FOLDER": path_name,
}
OPTIONS: dict[str, dict] = {
    "recipe": {"choices": recipes.NAMES},
    "import": {"type": imported},
    "model": {"type": model_name},
    "init-seed": {"type": seed},
    "data-seed": {"type": seed},
    "sparse": {"nargs": "?", "const": "mixed", "choices": SPARSE_PATTERNS},
    "dtype": {"choices": ("float32", "bfloat16")},
    "schedule": {"choices": SCHEDULES},
    "warmup": {"type": count_or_zero},
    "weight-decay": {"type": not_negative},
    "clip": {"type": not_negative},
    "device": {"type": device_name, "default": "auto"},
    "graph": {"action": argparse.BooleanOptionalAction},
    "seed": {"type": seed},
    "eval-every": {"type": count_or_zero},
    "save-every": {"type": count_or_zero},
    "keep": {"type": kept_steps},
    "out": {"default": "runs"},
    "name": {"type": run_name},
    "resume": {"type": path_name},
}


def words_of_defaults() -> dict[str, object]:
    """Return the texts that stand for {...} in the table."""
    words: dict[str, object] = {
        name: "tiny {2}, others {0} | {1}".format(*values)
        for name, values in DEFAULTS.items()
        if len(values) == 3
    }
    cpu, gpu, tiny = DEFAULTS["steps"]
    return words | {
        "models": ", ".join(models.preset_names()),
        "patterns": ", ".join(SPARSE_PATTERNS),
        "least": length.LEAST,
        "steps": f"{length.MOST} | {tiny}, others {cpu} | {gpu}",
        "lr": DEFAULTS["lr"][2],
        "hang_seconds": supervise.HANG_SECONDS,
    }


def parser() -> argparse.ArgumentParser:
    top = Parser(
        prog="needle train",
        usage="%(prog)s [FLAG ...]; --help: common flags, --help all: every flag",
        description=DESCRIPTION,
        epilog=EPILOG,
        add_help=False,
    )
    top.add_argument(
        *("-h", "--help"), action=Help, nargs="?", choices=("all",), help="all: every flag"
    )
    words, described = words_of_defaults(), {"recipe": RECIPE, "faults": FAULTS}
    for title, table in TABLE.items():
        group = top.add_argument_group(title, described.get(title))
        lengths = None  # --steps or --tokens, not both
        for name, text, more in rows(table, KINDS, OPTIONS):
            into = group
            if name in ("steps", "tokens"):
                into = lengths = lengths or group.add_mutually_exclusive_group()
            into.add_argument(f"--{name}", help=text.format(**words), **more)
    return top


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line; a bad one ends the program with exit code 2."""
    early = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    early.add_argument("--import", type=imported)
    with contextlib.suppress(argparse.ArgumentError):  # which the whole parser reports
        early.parse_known_args(argv)  # the presets that it registers are choices of --model
    top = parser()
    args = top.parse_args(argv)
    if args.hang_seconds is None:
        args.hang_seconds = supervise.HANG_SECONDS
    elif not args.supervise:
        top.error("argument --hang-seconds: needs --supervise")
    return args


# ---- from flags to settings --------------------------------------------------------------------


def given(args: argparse.Namespace) -> dict:
    """Return the settings that the command line names. --tokens becomes steps in `complete`."""
    names = (*RESULTS, *OTHERS, *OPTIONAL)
    flags = ((name, getattr(args, name)) for name in names)
    named = {name: value for name, value in flags if value is not None and value is not False}
    if named.get("model") == "auto":
        del named["model"]
    if args.global_batch_size is not None:
        named["global_batch_size"] = args.global_batch_size
    if "config" in named:
        named["config"] = read_config(named["config"])
    for flag in ("init", "data", "tokenizer"):
        if flag in named:  # the run may be resumed from another folder
            named[flag] = os.path.abspath(named[flag])
    return named


def given_anew(args: argparse.Namespace) -> dict:
    """Return `given` for a new run; --window without --sparse ends the program."""
    named = given(args)
    if "window" in named and "sparse" not in named:
        parser().error("argument --window: needs --sparse")
    if "keep_optimizer" in named and "keep" not in named:
        parser().error("argument --keep-optimizer: needs --keep")
    if "config" in named:
        if "model" in named:
            parser().error("argument --config: not allowed with argument --model")
        named["model"] = named["config"]["model"]
        if "dtype" in named["config"]:
            named.setdefault("dtype", named["config"]["dtype"])
    return named


def misfits(settings: dict, step: int, epoch: int) -> list[str]:
    """Return the settings, the step and the epoch of a checkpoint that no flags lead to."""
    top, found = parser(), []
    top.exit_on_error = False
    defaults = {**COMMON, **{name: values[0] for name, values in DEFAULTS.items()}, "warmup": 0}
    for name in (*RESULTS, *OTHERS, *(name for name in OPTIONAL if name in settings)):
        value, default = settings[name], defaults.get(name)
        kinds = (int, float) if isinstance(default, float) else (type(default), type(default or ""))
        kinds = OPTIONAL.get(name, kinds)
        if (isinstance(value, bool) and kinds is not bool) or not isinstance(value, kinds):
            found.append(f"{name} is {value!r:.40}")
        elif value is not None and name not in ("model", "import", "config") and kinds is not bool:
            # A model may be no preset, and no checkpoint chooses code.
            try:
                top.parse_args([f"--{name.replace('_', '-')}={value}"])
            except argparse.ArgumentError as error:
                found.append(f"{name} is {value!r:.40}: {error.message}")
    if found:
        return found
    if not 0 <= step <= settings["steps"]:
        found.append(f"step is {step}: the run has {settings['steps']}")
    if not 0 <= epoch <= settings["steps"] * settings["grad_accum"]:
        found.append(f"epoch of its data is {epoch}: the run draws fewer batches")
    late = late_warmup(settings)
    return found if late is None else [*found, late]


def resumed(args: argparse.Namespace, checkpoint: Checkpoint | Begun, folder: Path) -> dict:
    """Return the settings of a resumed run. Raise CheckpointError for settings that no run could
    have, and for a flag that changes one of RESULTS; under a constant rate --steps may, since it
    only says where to end."""
    named, state, differences = given(args), checkpoint.state, []
    saved = state["settings"]
    wrong = misfits(saved, state["step"], state["data"]["epoch"])
    if wrong:
        raise CheckpointError(f"{checkpoint.path}: its settings cannot be used: {', '.join(wrong)}")
    if "import" in saved and "import" not in named:
        raise CheckpointError(
            f"{checkpoint.path}: the model of this run was registered by {saved['import']!r:.200}, "
            "and no checkpoint chooses code: give it again, "
            f"{shlex.join(flag_words('--import', saved['import']))}"
        )
    if args.tokens is not None:
        named["steps"] = steps_of(args.tokens, saved)
    implied = {"global_batch_size": saved["batch_size"] * saved["grad_accum"]}
    implied |= {"init_seed": saved["seed"], "data_seed": saved["seed"], "config": None}
    config = checkpoint.configuration()
    implied |= {flag: getattr(config, field, None) for flag, field in SHAPE.items()}
    # Data are compared by their tokens, once they are open.
    free = {*OTHERS, "data", "tokenizer", "import", "keep", "keep_optimizer"}
    if saved["schedule"] == "constant":
        free.add("steps")
    for flag, value in named.items():
        before = {**implied, **saved}.get(flag)
        if flag not in free and before != value:
            has = "is without it" if before is None else f"has {before}"
            differences.append(f"--{flag.replace('_', '-')} is {value}, but the run {has}")
            if flag == "steps":
                differences[-1] += f", where its {saved['schedule']} schedule ends"
    if differences:
        anew = f", from its weights by {shlex.join(flag_words('--init', folder))}"
        if isinstance(checkpoint, Begun):
            anew = " without --resume" if is_free(folder) else " under another --name"
        raise CheckpointError(
            f"{checkpoint.path}: this run cannot go on with other settings: "
            f"{'; '.join(differences)}. Leave these flags out, or start anew{anew}"
        )
    return {**saved, **{flag: named[flag] for flag in named.keys() & free}}
