"""The settings of a run: the flags of `needle train`, their help and defaults, and config.json.

A field of Settings is a flag. The command line fills in the fields that it names and leaves None
in the others, `complete` makes the settings of a new run of them, and config.json and each
checkpoint hold the kept ones as JSON. A resumed run takes those from its checkpoint. Flags may then
repeat them, and change the ones of FREE.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
import shlex
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NoReturn, get_args, get_type_hints

from needle import models
from needle.backend_ndarray import check_device_name
from needle.checkpoint import CheckpointError
from needle.command import Parser, argument_type, flag_words, number, path_name, whole
from needle.distributed.tree import fitting_ranks, own_micro_batches
from needle.files import FileError, read_json, read_toml
from needle.models.pythia import SPARSE_PATTERNS
from needle.models.registry import imported
from needle.ops import ring_chunks
from needle.ops.fp8 import MULTIPLE
from needle.training.keep import keeps
from needle.training.supervise import HANG_SECONDS

# ---- recipes -----------------------------------------------------------------------------------

# The published Pythias (Biderman et al. 2023, table 6, and the configurations in
# EleutherAI/pythia). Every run has the rest of the recipe: AdamW with betas 0.9 and 0.95 and eps
# 1e-8, no decay of biases and norms, Pythia's initialisation. Their float16 is not followed.
RECIPE = {
    "seq_len": 2048,
    "steps": 143_000,
    "warmup": 1_430,
    "weight_decay": 0.1,
    "clip": 1.0,
    "seed": 1234,
}
# `pythia` follows the schedule that GPT-NeoX computed, `pythia-fixed` the one that it announced.
SCHEDULES = {"pythia": "pythia", "pythia-fixed": "cosine"}
SEQUENCES = 1024  # a step
DECAY_SHARE = 0.2  # of the steps, after which WSD is as good as a cosine (arXiv 2405.18392)
# Peak learning rates; other models have that of the 70m.
PEAK_LR = {
    "pythia-160m": 6e-4,
    "pythia-410m": 3e-4,
    "pythia-1b": 3e-4,
    "pythia-1.4b": 2e-4,
    "pythia-2.8b": 1.6e-4,
    "pythia-6.9b": 1.2e-4,
    "pythia-12b": 1.2e-4,
}
PUBLISHED = "0,1,2,4,...,512,1000,..."  # checkpoints of the suite; step 0 is before the first


def recipe(name: str, model: str) -> dict[str, Any]:
    """Return the settings of a recipe for a model."""
    return {**RECIPE, "schedule": SCHEDULES[name], "lr": PEAK_LR.get(model, 1e-3)}


def changes(settings: Settings) -> dict[str, dict]:
    """Return where a run differs from its recipe: {setting: {"recipe": value, "run": value}}."""
    wanted = {**recipe(settings.recipe, settings.model), "sparse": None}
    wanted["sequences_per_step"] = SEQUENCES
    actual = {**vars(settings), "sequences_per_step": settings.sequences}
    return {
        name: {"recipe": value, "run": actual[name]}
        for name, value in wanted.items()
        if actual[name] != value
    }


# ---- values ------------------------------------------------------------------------------------


def run_name(text: str) -> str:
    path_name(text)
    if "/" in text or text.startswith("."):
        raise argparse.ArgumentTypeError(
            f"must be a name for a folder, without '/' and not beginning with '.', not {text!r}"
        )
    return text


@argument_type
def kept_steps(text: str) -> str:
    keeps(text)
    return text


class Kind:
    """The kind of a flag's values, by the keywords of add_argument."""

    def __init__(self, metavar: str | None = None, type: Any = None, **more: Any) -> None:
        value = {} if type is None else {"metavar": metavar, "type": type}
        self.keywords: dict[str, Any] = value | more


Switch = Annotated[bool, Kind(action="store_true")]
OnOff = Annotated[bool, Kind(action=argparse.BooleanOptionalAction)]
Count = Annotated[int, Kind("N", whole(1))]
CountOrZero = Annotated[int, Kind("N", whole(0))]
Seed = Annotated[int, Kind("N", whole(0, 2**32 - 1))]  # as NumPy takes them
Positive = Annotated[float, Kind("X", number(0, above=True))]
NotNegative = Annotated[float, Kind("X", number(0))]
Share = Annotated[float, Kind("X", number(0, 1, above=True))]
Text = Annotated[str, Kind("NAME", str)]
PathName = Annotated[str, Kind("PATH", path_name)]
File = Annotated[str, Kind("FILE", path_name)]
Import = Annotated[str, Kind("FILE", imported)]
RunName = Annotated[str, Kind("NAME", run_name)]
Keep = Annotated[str, Kind("STEPS", kept_steps)]
DeviceName = Annotated[str, Kind("NAME", argument_type(check_device_name))]
Recipe = Annotated[str, Kind(choices=tuple(SCHEDULES))]
Dtype = Annotated[str, Kind(choices=("float32", "bfloat16"))]
Schedule = Annotated[str, Kind(choices=("cosine", "linear", "constant", "wsd", "pythia"))]
Pattern = Annotated[str, Kind("PATTERN", str, nargs="?", const="mixed", choices=SPARSE_PATTERNS)]


def flag(group: str, help: str, default: Any = None, own: Any = None) -> Any:
    """Return the field of a flag of a group.

    default: of a new run; two are those on a CPU and on a GPU, a third is that of the model `tiny`.
    own: the default of a flag that no file keeps.
    """
    shown = own if default is None else default
    if isinstance(shown, tuple):
        form = "tiny {2}, others {0} | {1}" if len(shown) == 3 else "{0} | {1}"
        shown = form.format(*shown)
    if shown is not None and "(default" not in help:
        help = f"{help.rstrip()} (default: {shown})"
    metadata = {"group": group, "help": help, "default": default}
    return dataclasses.field(default=own, metadata=metadata)


of_model, of_data = partial(flag, "model"), partial(flag, "data")
of_training, of_output = partial(flag, "training"), partial(flag, "output")

# ---- the flags ---------------------------------------------------------------------------------


@dataclasses.dataclass
class Settings:
    """The settings of a run, by the names of their flags; `import_` is --import.

    Of a run, fields whose type is not `... | None` have a value. `config` holds the name of a file
    from the command line, and of a run the file's content: `model`, a registered name, and fields
    of its configuration.
    """

    recipe: Recipe | None = of_model("""
        as the published Pythias were trained (docs/training.md); other flags change its values;
        pythia has the learning rate of GPT-NeoX's code, pythia-fixed the one that was announced
    """)
    model: Text = of_model("tiny, pythia-14m, -31m, -70m ... -12b, or auto", ("tiny", "pythia-70m"))
    import_: Import | None = of_model("""
        register a model of one's own; by this Python file (models.register), which is run first;
        its presets are names for --model, and a resumed run needs it again
    """)
    init: PathName | None = of_model("""
        start from the weights of a run, a file or a folder (default: random weights); a folder of
        transformers too; with its tokenizer and a fresh optimizer
    """)
    layers: Count | None = of_model("of the model; this and the next four change the preset")
    hidden: Count | None = of_model("size of the residual stream, a multiple of --heads")
    heads: Count | None = of_model("of attention")
    vocab_size: Count | None = of_model("of the model; and of a tokenizer that is trained on text")
    no_mlp: Switch | None = of_model("layers of attention alone; such a model cannot be exported")
    config: File | dict | None = of_model("""
        the model by a TOML or JSON file; instead of --model: the fields of a configuration, or the
        config.json of a run or of a model of transformers
    """)
    sparse: Pattern | None = of_model(f"""
        block-sparse attention: {", ".join(SPARSE_PATTERNS)}; without PATTERN mixed, a local window
        and the first block (default: off)
    """)
    window: Count | None = of_model("""
        of --sparse: how many tokens a query sees back; of the pattern strided the stride (default:
        a quarter of the sequence, 64 at least)
    """)
    dtype: Dtype = of_model("of weights and activations", ("float32", "bfloat16"))
    fp8: Switch | None = of_model("""
        products in FP8, faster on a Hopper GPU; the width, the vocabulary and the tokens of a
        micro-batch must be multiples of 16
    """)

    data: PathName | None = of_data("""
        text, JSON lines, or files of tokens; .gz and .zst too, a folder or quoted pattern of them;
        tokens are Megatron's .bin/.idx, Pythia's preshuffled rows, nanoGPT's train.bin, .npy
        (default: the sources of the Python standard library)
    """)
    tokenizer: PathName | None = of_data("""
        a tokenizer.json (default: a byte-level BPE trained once on the text and cached: 4096 tokens
        for tiny, 50257 for the others)
    """)
    end_of_text: Text | None = of_data("""
        the token of --tokenizer after each document (default: as the files beside the
        tokenizer.json name it)
    """)
    batch_size: Count = of_data("sequences a micro-batch", (4, 16, 16))
    seq_len: Count = of_data("tokens a sequence", (512, 2048, 256))

    grad_accum: Count = of_training("micro-batches a step; shared by all ranks", 1)
    context_parallel: Count = of_training(
        "so many neighbouring ranks share each sequence, in parts of a multiple of 2 N tokens", 1
    )
    global_batch_size: Count | None = of_training("""
        sequences a step: --batch-size times --grad-accum; what of the two is not given follows
        (default: of a recipe 1024, else what the two give)
    """)
    steps: Count = of_training("optimizer steps", (100, 300, 600))
    tokens: Count | None = of_training("instead of --steps; rounded up to whole steps")
    lr: Positive = of_training(
        "peak learning rate (default: tiny 0.003, others as in the Pythia paper, 1e-3 for the 70m)",
        (1e-3, 1e-3, 3e-3),
    )
    schedule: Schedule = of_training(
        "of the learning rate after the warmup, to a tenth of it unless constant", "cosine"
    )
    decay_share: Share | None = of_training("""
        of --schedule wsd: the rate is constant after the warmup, and falls in a line over this
        share of the steps (default: 0.2)
    """)
    warmup: CountOrZero = of_training("""
        steps in which the rate rises from 0 (default: a tenth of all; of a recipe a hundredth)
    """)
    weight_decay: NotNegative = of_training("of matrices and embeddings", 0.1)
    clip: NotNegative = of_training("largest gradient norm; 0: never clipped", 1.0)
    device: DeviceName = of_training(
        "auto, cpu, cuda or cuda:INDEX; auto is the first GPU that can be used", own="auto"
    )
    gpus: Count | None = of_training("train on the first N GPUs; a rank on each (default: 1)")
    recompute: Switch | None = of_training("""
        keep of each layer only what it reads, and compute it again in the backward: the same bits
        with less memory, for the time of a second forward; a resumed run needs it again
    """)
    graph: OnOff | None = of_training("""
        replay micro-batches as one CUDA graph: the same bits, faster where the host cannot keep up
        with small ones (default: on a GPU for up to 16,384 tokens)
    """)
    seed: Seed = of_training("of weights, order of the data and sample", 1234)
    init_seed: Seed | None = of_training("of the weights alone (default: --seed)")
    data_seed: Seed | None = of_training("of the order of the data alone (default: --seed)")

    eval_every: CountOrZero = of_output(
        "steps between evaluations; 0: only at the end", (25, 50, 50)
    )
    save_every: CountOrZero = of_output(
        "steps between checkpoints; 0: only at the end", (25, 100, 50)
    )
    prove: CountOrZero = of_output(
        """
        steps between lines of proof in metrics.jsonl, by which needle verify repeats the run; 0: at
        checkpoints alone
    """,
        100,
    )
    keep: Keep | None = of_output("""
        weights kept for good, as 1,2,4,...,512 or log; "..." stands for the numbers that follow, as
        in 1,2,4,...,512,1000,..., and log for 0 and the powers of two
    """)
    keep_optimizer: Switch | None = of_output("keep whole checkpoints of the steps of --keep")
    out: PathName = of_output("where runs are written", own="runs")
    name: RunName | None = of_output("""
        of the run's folder in there (default: the model's name, with a number where it is taken)
    """)
    tensorboard: Switch | None = of_output("write metrics.jsonl's numbers for TensorBoard too")
    wandb: Text | None = of_output("send them to this project of Weights & Biases")
    resume: PathName | None = of_output("""
        go on: auto, the folder of a run, or a checkpoint; auto: the newest good checkpoint of the
        run --name, without it of all runs in --out, and a new run where none was ever saved
    """)
    supervise: Switch | None = of_output("restart the run after faults and hangs")
    hang_seconds: Positive = of_output(
        "of --supervise: a step, a batch of an evaluation or a save that takes longer is a hang",
        own=HANG_SECONDS,
    )

    def named(self) -> dict[str, Any]:
        """Return the kept settings that the command line names."""
        values = ((name, getattr(self, name)) for name in KEPT)
        return {name: value for name, value in values if value is not None and value is not False}

    def to_json(self) -> dict[str, Any]:
        """Return what config.json and checkpoints hold."""
        return {word(name): getattr(self, name) for name in KEPT}

    def words(self, *names: str) -> list[str]:
        """Return these flags in the words of a command line, as far as they are given."""
        found = []
        for name in names:
            value = getattr(self, name)
            if value is False:
                found.append(f"--no-{name}")
            elif value is True:
                found.append(option(name))
            elif value != FIELDS[name].default:
                found += flag_words(option(name), value)
        return found

    @property
    def sequences(self) -> int:
        """Of a step."""
        return self.batch_size * self.grad_accum


FIELDS = {field.name: field for field in dataclasses.fields(Settings)}
TYPES = get_type_hints(Settings, include_extras=True)
# Flags of one start, which no file keeps.
PASSING = {"global_batch_size", "tokens", "device", "gpus", "recompute", "graph", "out", "name"}
PASSING |= {"tensorboard", "wandb", "resume", "supervise", "hang_seconds"}
KEPT = [name for name in FIELDS if name not in PASSING]
# Kept settings that a resumed run may have otherwise. Data are compared by their tokens.
FREE = {"eval_every", "save_every", "prove", "keep", "keep_optimizer"}
FREE |= {"data", "tokenizer", "import_"}
# Flags of the model's shape, by fields of its configuration.
SHAPE = {
    "layers": "num_layers",
    "hidden": "hidden_size",
    "heads": "num_heads",
    "vocab_size": "vocab_size",
    "no_mlp": "attention_only",
}


def word(name: str) -> str:
    """Return the name of a field in config.json: Python has the word `import` for itself."""
    return name.rstrip("_")


def option(name: str) -> str:
    return f"--{word(name).replace('_', '-')}"


# ---- the command line --------------------------------------------------------------------------

DESCRIPTION = """
Trains a Pythia (GPT-NeoX) language model. Without flags: on the sources of the Python standard
library, with sizes that suit the device.
"""
EPILOG = """
Defaults are written cpu | gpu where they differ. Exit codes: 0 done or stopped, all steps saved; 1
an error, or a loss that is not finite; 2 a bad flag; 75 a GPU or a rank is lost; 130 Ctrl-C twice,
or before the first step.
"""


class Help(argparse.Action):
    """Print the common flags, or with `all` every flag, and exit."""

    def __call__(self, parser: argparse.ArgumentParser, *given: object) -> None:
        print(_parser(rare=given[1] == "all").format_help(), end="")
        parser.exit()


# What --help leaves out. Of the others it has the first part of their help.
RARE = {"recipe", "sparse", "window", "dtype", "end_of_text", "context_parallel", "schedule"}
RARE |= {"global_batch_size", "weight_decay", "clip", "recompute", "graph", "keep_optimizer"}
RARE |= {"tensorboard", "wandb", "hang_seconds", "decay_share"}


def _parser(rare: bool = True) -> Parser:
    top = Parser(
        prog="needle train",
        usage="%(prog)s [FLAG ...]; --help: common flags, --help all: every flag",
        description=DESCRIPTION,
        epilog=EPILOG if rare else "--help all: every flag with its default",
        add_help=False,
        argument_default=argparse.SUPPRESS,
    )
    top.add_argument(
        "-h", "--help", action=Help, nargs="?", choices=("all",), help=argparse.SUPPRESS
    )
    groups = {}
    for name, field in FIELDS.items():
        group, text = field.metadata["group"], field.metadata["help"]
        if group not in groups:
            groups[group] = top.add_argument_group(group)
        if not rare:
            text = argparse.SUPPRESS if name in RARE else re.split("; | [(]", text)[0]
        groups[group].add_argument(option(name), dest=name, help=text, **_keywords(name))
    return top


def _keywords(name: str) -> dict[str, Any]:
    """Return the keywords of add_argument, which stand in the type of the field."""
    kinds = (TYPES[name], *get_args(TYPES[name]))
    annotated = next(kind for kind in kinds if hasattr(kind, "__metadata__"))
    return annotated.__metadata__[0].keywords


def parse(argv: Sequence[str] | None) -> Settings:
    """Parse the command line; a bad one ends the program with exit code 2."""
    top = _parser()
    given = vars(top.parse_args(argv))
    if given.get("model") == "auto":
        del given["model"]
    model, names = given.get("model"), models.preset_names()
    if model is not None and model not in names:
        top.error(
            f"argument --model: no model {model!r}; there are auto, {', '.join(names)}. --import "
            "FILE registers models of one's own, by the names in presets() of their configuration"
        )
    if {"steps", "tokens"} <= given.keys():
        top.error("argument --tokens: not allowed with argument --steps")
    return Settings(**given)


class _PassedOn(argparse.Action):
    """Keep a flag and its value as they stand."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
        value = values if isinstance(values, list) else [] if values is None else [values]
        namespace.passed_on = [*namespace.passed_on, option_string, *value]


def parse_beside(
    top: argparse.ArgumentParser, argv: Sequence[str] | None
) -> tuple[argparse.Namespace, list[str]]:
    """Parse the command line of a program that passes on flags of needle train. Return what is its
    own, and the words of the others, wherever they stand."""
    for action in _parser()._actions:
        names = [name for name in action.option_strings if name not in top._option_string_actions]
        if names:
            hidden = {"nargs": action.nargs, "help": argparse.SUPPRESS, "default": []}
            top.add_argument(*names, action=_PassedOn, dest="passed_on", **hidden)
    args, unknown = top.parse_known_args(argv)
    return args, [*args.passed_on, *unknown]


def located(given: Settings) -> Settings:
    """Return the flags with what lies in the file of --config, and with paths that stay when the
    run is resumed from another folder."""
    paths = {name: getattr(given, name) for name in ("init", "data", "tokenizer")}
    changes = {name: os.path.abspath(path) for name, path in paths.items() if path is not None}
    if given.config is not None:
        changes["config"] = read_config(given.config)
    return dataclasses.replace(given, **changes)


def check_new(given: Settings) -> None:
    """End the program with exit code 2 for flags that no new run has together."""
    _need(given, "window", "sparse")
    _need(given, "keep_optimizer", "keep")
    if given.init is None:  # with which a tokenizer may lie
        _need(given, "end_of_text", "tokenizer")
    if given.decay_share is not None and given.schedule != "wsd":
        refuse_flag("decay_share", "needs --schedule wsd")
    if given.graph and (given.context_parallel or 1) > 1:
        refuse_flag("graph", "not allowed with argument --context-parallel")
    if given.config and given.model:
        refuse_flag("config", "not allowed with argument --model")


def _need(settings: Settings, name: str, needed: str) -> None:
    if getattr(settings, name) and not getattr(settings, needed):
        refuse_flag(name, f"needs {option(needed)}")


def refuse_flag(name: str, reason: str) -> NoReturn:
    """End the program with exit code 2, for the flag of a setting."""
    _parser().error(f"argument {option(name)}: {reason}")


# ---- a new run ---------------------------------------------------------------------------------


def read_config(path: str) -> dict:
    """Return {"model": registered name, field: value, ...} of --config: a TOML or JSON file of the
    fields of a configuration (`model`, by default "pythia", chooses it), the config.json of a run,
    or that of a model of transformers. FileError where it cannot be used."""
    if path.endswith(".toml"):
        fields = read_toml(Path(path))
    else:
        fields = read_json(Path(path))
    try:
        if "model_type" in fields:
            cls = models.class_of_transformers(fields["model_type"])
            fields = cls.weight_mapping.config_from_hf(fields)
        elif isinstance(fields.get("model"), dict):  # of a run
            name = fields.get("settings", {}).get("model", "pythia")
            family = models.preset(name).family if name in models.preset_names() else name
            cls, fields = models.model_class(family), fields["model"]
            if fields.get("use_sparse_attention") is False:
                fields.pop("sparse_window", None)  # of --sparse: as by default
        else:
            cls = models.model_class(fields.pop("model", "pythia"))
        cls.config_class.from_dict(fields)
    except (AttributeError, TypeError, ValueError) as error:
        raise FileError(f"{path}: {error}") from error
    return {"model": cls.config_class.family, **fields}


def complete(given: Settings, on_gpu: bool, ranks: int = 1) -> Settings:
    """Return the settings of a new run from those that flags name.

    ranks: where no flag says how many micro-batches a step has, each rank computes one. Raise
    ValueError for a batch or a warmup that cannot be as named.
    """
    named, config = given.named(), given.config or {}
    usual = "pythia-70m" if on_gpu or given.recipe else "tiny"
    model = given.model or config.get("model", usual)
    values = {name: _default(name, on_gpu, model == "tiny") for name in KEPT}
    values["lr"] = PEAK_LR.get(model, values["lr"])
    values["dtype"] = config.get("dtype", values["dtype"])
    values["seq_len"] = min(values["seq_len"], config.get("max_seq_len", values["seq_len"]))
    if given.recipe is not None:
        values |= recipe(given.recipe, model)
    context = given.context_parallel or 1
    if ranks % context:
        raise ValueError(
            f"--context-parallel {context}: so many ranks share each sequence, and {ranks} cannot "
            f"be cut into such groups: start a multiple of {context}"
        )
    ranks //= context
    values |= {"grad_accum": ranks, "model": model, **named}
    settings = dataclasses.replace(given, **values)
    _share_step(settings, given, ranks)
    if given.tokens is not None:
        settings.steps = steps_of(given.tokens, settings)
    if given.warmup is None:
        settings.warmup = settings.steps // (10 if given.recipe is None else 100)
    if settings.schedule == "wsd" and given.decay_share is None:
        settings.decay_share = DECAY_SHARE
    _check(settings)
    own_micro_batches(settings.grad_accum, 0, ranks * context, context)  # ValueError, as below
    ring_chunks(settings.seq_len, 0, context)
    return settings


def _default(name: str, on_gpu: bool, tiny: bool) -> Any:
    default = FIELDS[name].metadata["default"]
    if not isinstance(default, tuple):
        return default
    return default[2] if tiny and len(default) == 3 else default[on_gpu]


def _share_step(settings: Settings, given: Settings, ranks: int) -> None:
    """Make batch_size x grad_accum the sequences a step of --global-batch-size or the recipe.

    Values of flags stay. Raise ValueError where the product cannot be reached.
    """
    wanted, source = given.global_batch_size, "--global-batch-size"
    if wanted is None and given.recipe is not None:
        wanted, source = SEQUENCES, f"the recipe {given.recipe}"
    if wanted is None:
        return
    if given.batch_size is None and given.grad_accum is not None:
        settings.batch_size = wanted // given.grad_accum
    elif given.grad_accum is None:
        if given.batch_size is None:  # the largest divisor, if possible one that suits the ranks
            sizes = [n for n in range(settings.batch_size, 0, -1) if wanted % n == 0]
            shared = (n for n in sizes if ranks in fitting_ranks(wanted // n))
            settings.batch_size = next(shared, sizes[0])
        settings.grad_accum = wanted // settings.batch_size
    if settings.sequences != wanted:
        flags = (name for name in ("batch_size", "grad_accum") if getattr(given, name) is not None)
        words = " and ".join(f"{option(name)} {getattr(given, name)}" for name in flags)
        raise ValueError(
            f"{words} cannot make the {wanted:,} sequences a step of {source}: the "
            "micro-batch times the accumulation must be exactly that many. Choose "
            "other divisors, or another number with --global-batch-size"
        )


def steps_of(tokens: int, settings: Settings) -> int:
    return -(-tokens // (settings.sequences * settings.seq_len))


def decay_steps(settings: Settings) -> int:
    """Return the steps of --decay-share, rounded, one at least."""
    return max(round(settings.decay_share * settings.steps), 1)


def _check(settings: Settings) -> None:
    """Raise ValueError for a warmup longer than the run, and for micro-batches that products in FP8
    do not take. A constant rate has no end to reach, so such a run may stop within its warmup."""
    warmup, steps, context = settings.warmup, settings.steps, settings.context_parallel
    if settings.schedule == "wsd" and warmup + decay_steps(settings) > steps:
        raise ValueError(
            f"--warmup {warmup}: with {decay_steps(settings)} steps of decay "
            f"(--decay-share {settings.decay_share:g}) that is more than the run's {steps}"
        )
    if warmup > steps and settings.schedule != "constant":
        raise ValueError(
            f"--warmup {warmup}: the run has {steps} steps, and its warmup must be 0 to {steps} "
            "of them"
        )
    if settings.fp8 and settings.batch_size * settings.seq_len % (context * MULTIPLE):
        shared = f" / --context-parallel {context}" if context > 1 else ""
        raise ValueError(
            f"--fp8: --batch-size {settings.batch_size} x --seq-len {settings.seq_len}{shared}, "
            f"the tokens of a rank's micro-batch, must be a multiple of {MULTIPLE}"
        )


def data_of(settings: Settings) -> dict:
    """Return the data of a run in the form of needle/data/runs.py."""
    model = settings.model  # with --init it may be none of the presets
    vocabulary = models.preset(model).vocab_size if model in models.preset_names() else 50257
    vocabulary = (settings.config or {}).get("vocab_size", vocabulary)
    vocabulary = settings.vocab_size or vocabulary
    return {
        "path": settings.data,
        "tokenizer": settings.tokenizer,
        "end_of_text": settings.end_of_text,
        "vocab_size": min(vocabulary, 50257),
        "batch_size": settings.batch_size,
        "micro_batches": settings.grad_accum,
        "seq_len": settings.seq_len,
        "seed": settings.seed if settings.data_seed is None else settings.data_seed,
        "samples": settings.steps * settings.sequences,
    }


# ---- a run that goes on ------------------------------------------------------------------------


def from_json(values: dict[str, Any], path: Path) -> Settings:
    """Return the settings that the file at `path` holds. CheckpointError names all that are unknown
    or missing."""
    names = {word(name): name for name in KEPT}
    values = {"prove": FIELDS["prove"].metadata["default"], **values}  # older runs have none
    wrong = [f"{name} is unknown" for name in values.keys() - names.keys()]
    for key, name in names.items():
        if values.get(key) is None and type(None) not in get_args(TYPES[name]):
            wrong.append(f"{key} is missing")
    if wrong:
        raise CheckpointError(f"{path}: its settings cannot be used: {', '.join(sorted(wrong))}")
    return Settings(**{names[key]: value for key, value in values.items()})


def resumed(given: Settings, checkpoint: Any, folder: Path) -> Settings:
    """Return the settings of a resumed run from its Checkpoint, or from its config.json (Begun).
    Raise CheckpointError for a flag that changes one that is not FREE; under a constant rate
    --steps may, since it only says where to end."""
    named, differences, path = given.named(), [], checkpoint.path
    saved = from_json(checkpoint.state["settings"], path)
    if saved.import_ and not given.import_:
        raise CheckpointError(
            f"{path}: the model of this run was registered by {saved.import_!r:.200}, and no "
            "checkpoint chooses code: give it again, "
            f"{shlex.join(flag_words('--import', saved.import_))}"
        )
    if given.tokens is not None:
        named["steps"] = steps_of(given.tokens, saved)
    if given.global_batch_size is not None:
        named["global_batch_size"] = given.global_batch_size
    config = checkpoint.configuration()
    before = {"global_batch_size": saved.sequences, "init_seed": saved.seed}
    before |= {"data_seed": saved.seed}
    before |= {name: getattr(config, field, None) for name, field in SHAPE.items()}
    before |= saved.named()
    if saved.init and named.get("init") == str(Path(saved.init).parent.parent):
        named["init"] = saved.init  # a checkpoint of that run
    free = FREE | ({"steps"} if saved.schedule == "constant" else set())
    for name, value in named.items():
        if name not in free and before.get(name) != value:
            has = f"has {before[name]}" if before.get(name) is not None else "is without it"
            end = f", where its {saved.schedule} schedule ends" if name == "steps" else ""
            differences.append(f"{option(name)} is {value}, but the run {has}{end}")
    if differences:
        anew = f", from its weights by {shlex.join(flag_words('--init', folder))}"
        if checkpoint.state["step"] == 0:
            anew = " under another --name"
        raise CheckpointError(
            f"{path}: this run cannot go on with other settings: {'; '.join(differences)}. "
            f"Leave these flags out, or start anew{anew}"
        )
    values = {name: getattr(saved, name) for name in KEPT}
    values |= {name: named[name] for name in named.keys() & free}
    settings = dataclasses.replace(given, **values)
    _need(settings, "keep_optimizer", "keep")
    return settings
