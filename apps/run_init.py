"""A run that starts from weights (--init) instead of random numbers: of a folder of transformers, a
checkpoint, or the folder of a run. Optimizer, schedule and data are fresh; the tokenizer that comes
with the weights is the run's, unless --tokenizer says otherwise."""

from __future__ import annotations

import train_flags

from needle import models
from needle.backend_ndarray import Device
from needle.data.readers import open_tokens
from needle.evaluate import load_model
from needle.models import Config


class InitError(ValueError):
    """Weights that do not fit what the command line says."""


def start(
    named: dict, tokens: int | None, device: Device
) -> tuple[models.LanguageModel, dict[str, object]]:
    """(the model, `named` with what its weights decide: model, tokenizer, and sequences that are
    not longer than it reads)"""
    path, on_gpu = named["init"], not device.is_host
    dtype = named.get("dtype") or (train_flags.CUDA if on_gpu else train_flags.CPU)["dtype"]
    model, tokenizer = load_model(path, device, dtype)
    model.train()
    config, named = model.config, {"model": preset_of(model.config), **named}
    problems = differences(config, named["model"])
    if tokenizer is not None:
        named.setdefault("tokenizer", str(tokenizer.resolve()))
    settings = train_flags.complete(named, tokens, on_gpu)
    if settings["seq_len"] > config.max_seq_len:
        if "seq_len" in named:
            problems.append(f"--seq-len {named['seq_len']}: it reads {config.max_seq_len} at most")
        named["seq_len"] = config.max_seq_len
    if settings["sparse"] is not None:
        problems.append(f"--sparse {settings['sparse']}: its attention is what it was trained with")
    if "tokenizer" not in named and is_text(named.get("data")):
        problems.append("no tokenizer.json lies with it, and the data is text: give --tokenizer")
    if problems:
        raise InitError(f"--init {path}: {model}: {'; '.join(problems)}")
    return model, named


def is_text(data: str | None) -> bool:
    return data is None or open_tokens(data) is None


def preset_of(config: Config) -> str:
    """The preset of this shape, whose vocabulary a tokenizer may have changed; else the name that
    the model is registered by."""
    for name, fields in type(config).presets().items():
        if all(getattr(config, k) == v for k, v in fields.items() if k != "vocab_size"):
            return name
    return config.family


def differences(config: Config, name: str) -> list[str]:
    """Where a preset, if it is one, has another shape than the weights."""
    if name == config.family:
        return []
    wanted = models.preset(name)
    if wanted.family != config.family:
        return [f"--model {name}: it is a {config.family}"]
    fields = type(config).presets()[name].keys() - {"vocab_size"}
    return [
        f"--model {name}: {field} is {getattr(config, field)}, not {getattr(wanted, field)}"
        for field in sorted(fields)
        if getattr(config, field) != getattr(wanted, field)
    ]


def check_vocabulary(path: str, config: Config, needed: int | None) -> None:
    if needed is not None and needed > config.vocab_size:
        raise InitError(
            f"--init {path}: its vocabulary is {config.vocab_size:,}, but the tokenizer has "
            f"{needed:,} tokens: give the --tokenizer that it was trained with"
        )
