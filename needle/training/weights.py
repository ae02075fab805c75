"""Start a run from weights (--init): a checkpoint, the folder of a run, or one of transformers.

Optimizer, schedule and data are fresh. The run takes the tokenizer that lies with the weights,
unless --tokenizer names another.
"""

from __future__ import annotations

import os

from needle import models
from needle.backend_ndarray import Device
from needle.data import load_tokenizer
from needle.data.readers import open_tokens
from needle.data.tokenizer import id_limit
from needle.models import Config
from needle.training.evaluate import load_model
from needle.training.settings import DEFAULTS, SHAPE, complete


class InitError(ValueError):
    """Weights that do not fit the command line."""


def start(
    named: dict, tokens: int | None, device: Device
) -> tuple[models.LanguageModel, dict[str, object]]:
    """Return (model, named). named: the flags plus the settings fixed by the weights (model,
    tokenizer, seq_len). Raise InitError for contradicting flags."""
    path, on_gpu = named["init"], not device.is_host
    dtype = named.get("dtype") or DEFAULTS["dtype"][on_gpu]
    model, tokenizer = load_model(path, device, dtype)
    model.train()
    config, named = model.config, {"model": preset_of(model.config), **named}
    problems = differences(config, named["model"])
    if tokenizer is not None:
        named.setdefault("tokenizer", os.path.realpath(tokenizer.source))
    settings = complete(named, tokens, on_gpu)
    if settings["seq_len"] > config.max_seq_len:
        if "seq_len" in named:
            problems.append(f"--seq-len {named['seq_len']}: it reads {config.max_seq_len} at most")
        named["seq_len"] = config.max_seq_len
    for flag in "config", *SHAPE:
        if flag in named:
            problems.append(f"--{flag.replace('_', '-')}: its shape is what its weights have")
    if settings["sparse"] is not None:
        problems.append(f"--sparse {settings['sparse']}: its attention is what it was trained with")
    if "tokenizer" not in named and is_text(named.get("data")):
        problems.append("no tokenizer.json lies with it, and the data is text: give --tokenizer")
    if problems:
        raise InitError(f"--init {path}: {model}: {'; '.join(problems)}")
    return model, named


def is_text(data: str | None) -> bool:
    return data is None or open_tokens(data) is None


def known_ids(settings: dict) -> int | None:
    """Return how many ids the tokenizer has, as far as that is known before the data are read: one
    that is trained on text has 256 bytes and the end of a text at least. None without one."""
    if settings["tokenizer"] is not None:
        return id_limit(load_tokenizer(settings["tokenizer"]))
    return 257 if is_text(settings["data"]) else None


def preset_of(config: Config) -> str:
    """Return the name of the preset of this shape, of any vocabulary; else the registered name."""
    for name, fields in type(config).presets().items():
        if all(getattr(config, k) == v for k, v in fields.items() if k != "vocab_size"):
            return name
    return config.family


def differences(config: Config, name: str) -> list[str]:
    """Return an error for each field in which the preset `name` differs from the weights."""
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
