"""The settings of a run: a flat dictionary of JSON values, complete from its first step.

A value comes from a flag, else from the recipe, else from the defaults below. A resumed run takes
its settings from the checkpoint. Flags may then repeat the settings of RESULTS, which decide the
numbers that the run computes, and change those of OTHERS.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

from needle import hf, models
from needle.distributed.tree import fitting_ranks, own_micro_batches
from needle.files import FileError, reading
from needle.ops import ring_chunks
from needle.ops.fp8 import MULTIPLE
from needle.training import length, recipes

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

# Setting: on a CPU, on a GPU, and of the model `tiny`, which a CPU trains in minutes.
DEFAULTS = {
    "model": ("tiny", "pythia-70m"),
    "batch_size": (4, 16, 16),
    "seq_len": (512, 2048, 256),
    "steps": (100, 300, length.MOST),
    "lr": (1e-3, 1e-3, 3e-3),
    "dtype": ("float32", "bfloat16"),
    "eval_every": (25, 50, 50),
    "save_every": (25, 100, 50),
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
}
OTHERS = ("eval_every", "save_every")
RESULTS = tuple(name for name in (*COMMON, *DEFAULTS, "warmup") if name not in OTHERS)

# Settings that only a run has whose command line gave them, with their types. `config` holds the
# content of the file: `model`, a registered name, and fields of its configuration.
OPTIONAL = {
    **{"import": str, "config": dict, "layers": int, "hidden": int, "heads": int},
    **{"vocab_size": int, "no_mlp": bool, "init_seed": int, "data_seed": int, "keep": str},
    **{"keep_optimizer": bool, "fp8": bool, "window": int, "end_of_text": str},
}
# Flags of the model's shape, by fields of its configuration.
SHAPE = {
    "layers": "num_layers",
    "hidden": "hidden_size",
    "heads": "num_heads",
    "vocab_size": "vocab_size",
    "no_mlp": "attention_only",
}


def complete(named: dict, tokens: int | None, on_gpu: bool, ranks: int = 1) -> dict:
    """Return all settings of a new run from those that flags name.

    tokens: of --tokens; they become steps. ranks: where no flag says how many micro-batches a step
    has, each rank computes one. Raise ValueError for a batch or a warmup that cannot be as named.
    """
    base = {name: values[on_gpu] for name, values in DEFAULTS.items()}
    recipe = named.get("recipe")
    model = named.get("model", base["model"] if recipe is None else "pythia-70m")
    base["lr"] = recipes.PEAK_LR.get(model, base["lr"])
    if model == "tiny":
        base |= {name: values[2] for name, values in DEFAULTS.items() if len(values) == 3}
    if "max_seq_len" in named.get("config", {}):
        base["seq_len"] = min(base["seq_len"], named["config"]["max_seq_len"])
    if recipe is not None:
        base |= recipes.values(recipe, model)
    context = named.get("context_parallel", 1)
    if ranks % context:
        raise ValueError(
            f"--context-parallel {context}: so many ranks share each sequence, and {ranks} cannot "
            f"be cut into such groups: start a multiple of {context}"
        )
    ranks //= context
    settings = {**COMMON, "grad_accum": ranks, **base, "model": model, **named}
    share_step(settings, named, ranks)
    if tokens is not None:
        settings["steps"] = steps_of(tokens, settings)
    if "warmup" not in named:
        steps = settings["steps"]
        settings["warmup"] = steps // 10 if recipe is None else recipes.warmup(steps)
    problem = late_warmup(settings) or odd_micro_batch(settings)
    if problem is not None:
        raise ValueError(problem)
    own_micro_batches(settings["grad_accum"], 0, ranks)  # these raise ValueError too
    ring_chunks(settings["seq_len"], 0, context)
    return settings


def share_step(settings: dict, named: dict, ranks: int) -> None:
    """Make batch_size x grad_accum the sequences a step of --global-batch-size or the recipe.

    Values of flags stay. Raise ValueError where the product cannot be reached.
    """
    wanted = settings.pop("global_batch_size", None)
    source = "--global-batch-size"
    if wanted is None and settings["recipe"] is not None:
        wanted, source = recipes.SEQUENCES, f"the recipe {settings['recipe']}"
    if wanted is None:
        return
    if "batch_size" not in named and "grad_accum" in named:
        settings["batch_size"] = wanted // settings["grad_accum"]
    elif "grad_accum" not in named:
        if "batch_size" not in named:  # the largest divisor, if possible one that suits the ranks
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


def steps_of(tokens: int, settings: dict) -> int:
    return -(-tokens // (settings["batch_size"] * settings["seq_len"] * settings["grad_accum"]))


def odd_micro_batch(settings: dict) -> str | None:
    """Return an error for micro-batches that products in FP8 do not take."""
    batch_size, seq_len = settings["batch_size"], settings["seq_len"]
    context = settings["context_parallel"]
    if "fp8" not in settings or batch_size * seq_len % (context * MULTIPLE) == 0:
        return None
    shared = f" / --context-parallel {context}" if context > 1 else ""
    return (
        f"--fp8: --batch-size {batch_size} x --seq-len {seq_len}{shared}, the tokens of a rank's "
        f"micro-batch, must be a multiple of {MULTIPLE}"
    )


def late_warmup(settings: dict) -> str | None:
    """Return an error for a warmup longer than the run. A constant rate has no end to reach, so
    such a run may stop within its warmup and go on later."""
    warmup, steps = settings["warmup"], settings["steps"]
    if warmup <= steps or settings["schedule"] == "constant":
        return None
    return (
        f"--warmup {warmup}: the run has {steps} steps, and its warmup must be 0 to {steps} of them"
    )


def may_choose_steps(named: dict, tokens: int | None, settings: dict) -> bool:
    """True if no flag gives the length of a run of `tiny`: on a CPU its speed then does."""
    return settings["model"] == "tiny" and tokens is None and not named.keys() & {"steps", "recipe"}


def data_of(settings: dict) -> dict:
    """Return the data of a run in the form of needle/data/runs.py."""
    model = settings["model"]  # with --init it may be none of the presets
    vocabulary = models.preset(model).vocab_size if model in models.preset_names() else 50257
    vocabulary = settings.get("config", {}).get("vocab_size", vocabulary)
    vocabulary = settings.get("vocab_size", vocabulary)
    return {
        "path": settings["data"],
        "tokenizer": settings["tokenizer"],
        "end_of_text": settings.get("end_of_text"),
        "vocab_size": min(vocabulary, 50257),
        "batch_size": settings["batch_size"],
        "micro_batches": settings["grad_accum"],
        "seq_len": settings["seq_len"],
        "seed": settings.get("data_seed", settings["seed"]),
        "samples": settings["steps"] * settings["grad_accum"] * settings["batch_size"],
    }


def read_config(path: str) -> dict:
    """Return {"model": registered name, field: value, ...} of --config: a TOML or JSON file of the
    fields of a configuration (`model`, by default "pythia", chooses it), the config.json of a run,
    or that of a model of transformers. FileError where it cannot be used."""
    if path.endswith(".toml"):
        with reading(Path(path)) as file:
            try:
                fields = tomllib.load(file)
            except ValueError as error:
                raise FileError(f"{path}: no TOML: {error}") from error
    else:
        fields = hf.read_json(Path(path))
    try:
        if "model_type" in fields:
            cls = models.class_of_transformers(fields["model_type"])
            fields = cls.weight_mapping.config_from_hf(fields)
        elif isinstance(fields.get("model"), dict):  # of a run
            name = fields.get("settings", {}).get("model", "pythia")
            family = models.preset(name).family if name in models.preset_names() else name
            cls, fields = models.model_class(family), fields["model"]
        else:
            cls = models.model_class(fields.pop("model", "pythia"))
        cls.config_class.from_dict(fields)
    except (AttributeError, TypeError, ValueError) as error:
        raise FileError(f"{path}: {error}") from error
    return {"model": cls.config_class.family, **fields}


def described_config(path: Path) -> models.Config:
    """Return the configuration of the model that the config.json of a run describes."""
    fields = read_config(str(path))
    return models.model_class(fields.pop("model")).config_class.from_dict(fields)


def _check_flags(settings: dict, family: str | None) -> None:
    """Raise ValueError for a flag whose field the configuration of a model of one's own lacks."""
    kind = models.model_class(family or models.preset(settings["model"]).family).config_class
    fields = [field.name for field in dataclasses.fields(kind)]
    for flag, field in {**SHAPE, "sparse": "use_sparse_attention"}.items():
        if settings.get(flag) is not None and field not in fields:
            raise ValueError(
                f"--{flag.replace('_', '-')}: {kind.__name__} has no field {field}; it has "
                f"{', '.join(fields)}: set them in a file, --config FILE with model = {kind.family}"
            )


def model_config(settings: dict, needed: int | None = None) -> models.Config:
    """Return the configuration of a new model. needed: ids of the tokenizer, if there is one."""
    fields = dict(settings.get("config", {}))
    family = fields.pop("model", None)
    changes = {"max_seq_len": settings["seq_len"], **fields, "dtype": settings["dtype"]}
    changes |= {field: settings[flag] for flag, field in SHAPE.items() if flag in settings}
    if settings["seq_len"] > changes["max_seq_len"]:
        raise ValueError(
            f"--seq-len {settings['seq_len']}: max_seq_len of --config is {changes['max_seq_len']}"
        )
    if settings["sparse"] is not None:
        changes |= {"use_sparse_attention": True, "sparse_pattern": settings["sparse"]}
        changes |= {"sparse_window": settings["window"]} if "window" in settings else {}
    _check_flags(settings, family)
    if family is None:
        config = models.preset(settings["model"], **changes)
    else:
        config = models.model_class(family).config_class.from_dict(changes)
    if needed is not None and needed > config.vocab_size:
        if "vocab_size" in settings:
            raise ValueError(
                f"--vocab-size {config.vocab_size}: the tokenizer has {needed:,} tokens: give that "
                "many or more, or another --tokenizer"
            )
        raised = -(-needed // 128) * 128
        print(f"{needed:,} tokens of the tokenizer: the model's vocabulary becomes {raised:,}")
        config = dataclasses.replace(config, vocab_size=raised)
    return config
