"""The model that a run starts with: by flags of its shape, by --config, or from weights (--init).

With --init the optimizer, the schedule and the data are fresh. The run takes the tokenizer that
lies with the weights, unless --tokenizer names another.
"""

from __future__ import annotations

import dataclasses
import os

from needle import models
from needle.backend_ndarray import Device
from needle.data import load_tokenizer
from needle.data.readers import open_tokens
from needle.data.tokenizer import id_limit
from needle.models import Config
from needle.training.config import read_config
from needle.training.evaluate import load_model
from needle.training.settings import FIELDS, SHAPE, Settings, complete, option


class InitError(ValueError):
    """Weights that do not fit the command line."""


# ---- a new model -------------------------------------------------------------------------------


def located(given: Settings) -> Settings:
    """Return the flags with what lies in the file of --config, and with paths that stay when the
    run is resumed from another folder."""
    paths = {name: getattr(given, name) for name in ("init", "data", "tokenizer")}
    changes = {name: os.path.abspath(path) for name, path in paths.items() if path is not None}
    if given.config is not None:
        changes["config"] = read_config(given.config)
    return dataclasses.replace(given, **changes)


def model_config(settings: Settings, needed: int | None = None) -> Config:
    """Return the configuration of a new model. needed: ids of the tokenizer, if there is one."""
    fields = dict(settings.config or {})
    family = fields.pop("model", None)
    changes = {"max_seq_len": settings.seq_len, **fields, "dtype": settings.dtype}
    shape = {field: getattr(settings, name) for name, field in SHAPE.items()}
    changes |= {field: value for field, value in shape.items() if value}
    if settings.seq_len > changes["max_seq_len"]:
        raise ValueError(
            f"--seq-len {settings.seq_len}: max_seq_len of --config is {changes['max_seq_len']}"
        )
    if settings.sparse is not None:
        changes |= {"use_sparse_attention": True, "sparse_pattern": settings.sparse}
        changes |= {"sparse_window": settings.window} if settings.window is not None else {}
    if family is None:
        config = models.preset(settings.model, **changes)
    else:
        config = models.model_class(family).config_class.from_dict(changes)
    if needed is not None and needed > config.vocab_size:
        if settings.vocab_size is not None:
            raise ValueError(
                f"--vocab-size {config.vocab_size}: the tokenizer has {needed:,} tokens: give that "
                "many or more, or another --tokenizer"
            )
        raised = -(-needed // 128) * 128
        print(f"{needed:,} tokens of the tokenizer: the model's vocabulary becomes {raised:,}")
        config = dataclasses.replace(config, vocab_size=raised)
    return config


def known_ids(settings: Settings) -> int | None:
    """Return how many ids the tokenizer has, as far as that is known before the data are read: one
    that is trained on text has 256 bytes and the end of a text at least. None without one."""
    if settings.tokenizer is not None:
        return id_limit(load_tokenizer(settings.tokenizer))
    return 257 if is_text(settings.data) else None


def is_text(data: str | None) -> bool:
    return data is None or open_tokens(data) is None


# ---- from weights ------------------------------------------------------------------------------


def from_weights(given: Settings, device: Device) -> tuple[models.LanguageModel, Settings]:
    """Return the model of --init, and the flags with the settings that its weights fix (model,
    tokenizer, seq_len). Raise InitError for contradicting flags."""
    dtype = given.dtype or FIELDS["dtype"].metadata["default"][not device.is_host]
    model, tokenizer = load_model(given.init, device, dtype)
    model.train()
    config, name, problems = model.config, preset_of(model.config), []
    own = tokenizer and os.path.realpath(tokenizer.source)
    fixed = dataclasses.replace(given, model=name, tokenizer=given.tokenizer or own)
    if given.model not in (None, name):
        problems.append(f"--model {given.model}: its weights are of a {name}")
    ranks = given.context_parallel or 1  # the length does not depend on how many
    if complete(fixed, not device.is_host, ranks).seq_len > config.max_seq_len:
        if given.seq_len is not None:
            problems.append(f"--seq-len {given.seq_len}: it reads {config.max_seq_len} at most")
        fixed.seq_len = config.max_seq_len
    for flag in "config", *SHAPE:
        if getattr(given, flag):
            problems.append(f"{option(flag)}: its shape is what its weights have")
    if given.sparse is not None:
        problems.append(f"--sparse {given.sparse}: its attention is what it was trained with")
    if fixed.tokenizer is None and is_text(given.data):
        problems.append("no tokenizer.json lies with it, and the data is text: give --tokenizer")
    if problems:
        raise InitError(f"--init {given.init}: {model}: {'; '.join(problems)}")
    return model, fixed


def preset_of(config: Config) -> str:
    """Return the name of the preset of this shape, of any vocabulary; else the registered name."""
    for name, fields in type(config).presets().items():
        if all(getattr(config, k) == v for k, v in fields.items() if k != "vocab_size"):
            return name
    return config.family


def check_vocabulary(path: str, config: Config, needed: int | None) -> None:
    if needed is not None and needed > config.vocab_size:
        raise InitError(
            f"--init {path}: its vocabulary is {config.vocab_size:,}, but the tokenizer has "
            f"{needed:,} tokens: give the --tokenizer that it was trained with"
        )
