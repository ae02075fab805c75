"""Models in and out of the folders that Hugging Face's `transformers` reads and writes.

    needle export RUN_OR_CHECKPOINT FOLDER     a run's newest checkpoint, or a file
    needle import FOLDER CHECKPOINT

A folder holds config.json, generation_config.json, the weights (model.safetensors, or shards
model-00001-of-0000N.safetensors with model.safetensors.index.json), and, where the tokenizer is
known, tokenizer.json, tokenizer_config.json and special_tokens_map.json. Special tokens, and the
files that hold them (needle/data/tokenizer.py), stay with the model from reading to writing.
Neither torch nor transformers is needed, and no pickle is opened.

A model class has an attribute `weight_mapping` (see WeightMapping): the names that transformers
gives its fields and tensors. Weights of nn.Linear are (in, out) here and (out, in) there. Reading
checks the configuration and the name, shape, dtype and place of every tensor before the first one
is loaded. Writing makes temporary files of all; then config.json, without which nothing opens the
folder, is removed, the others take their names, and the new config.json comes last. A folder whose
writer was killed holds the earlier model or none.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from needle import nn
from needle.backend_ndarray import FLOAT_DTYPES, Device, NDArray, given_device
from needle.data.tokenizer import (
    NAMES,
    TEXT_FILES,
    Tokenizer,
    files_in,
    id_limit,
    json_text,
    load_tokenizer,
)
from needle.files import FileError, named, read_json, reading, remove_leftovers, replacing
from needle.safetensors import DTYPE_NAMES, Entry, chunks, misfits, read_header

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
SHARD_SIZE = 5_000_000_000  # bytes of tensors in one file


class WeightMapping(Protocol):
    """Describe a model family as transformers writes it; models/gpt_neox.py is one, and says what
    the functions return. ValueError for what they cannot read, or transformers not compute."""

    MODEL_TYPE: str  # of config.json
    TIED_HEAD: str  # our name of the head, which a tied model's file may hold as well

    def config_from_hf(self, fields: dict[str, Any]) -> dict[str, Any]: ...
    def config_to_hf(self, config: Any) -> dict[str, Any]: ...
    def hf_name(self, name: str) -> str: ...
    def our_name(self, name: str) -> str: ...
    def is_buffer(self, name: str) -> bool: ...


# ---- reading ------------------------------------------------------------------------------------


def read_config(
    model_class: Any, fields: dict[str, Any], dtype: str = "float32", source: str = "config.json"
) -> Any:
    """The configuration that the dictionary of a config.json describes. FileError lists all that is
    missing or that needle cannot do."""
    mapping, kind = model_class.weight_mapping, fields.get("model_type")
    if kind != mapping.MODEL_TYPE:
        raise FileError(
            f"{source}: model_type is {kind!r}; needle reads {mapping.MODEL_TYPE!r} only"
        )
    try:
        return model_class.config_class(**mapping.config_from_hf(fields), dtype=dtype)
    except (TypeError, ValueError) as error:
        raise FileError(f"{source}: {error}") from error


def load(
    model_class: Any,
    folder: str | os.PathLike,
    device: Device | None = None,
    dtype: str = "float32",
) -> Any:
    """The model of a folder, in `dtype` on `device`. Draws no random number. FileError names what
    cannot be read and lists every tensor that is unknown, missing or of the wrong shape."""
    folder, device = named(folder), given_device(device)
    mapping, path = model_class.weight_mapping, folder / "config.json"
    config = read_config(model_class, read_json(path), dtype, str(path))
    problems: list[str] = []
    entries = _entries(folder, mapping, problems)
    model = config.meta_model(device, model_class)
    transposed = _transposed(model)
    shapes = {
        name: parameter.shape[::-1] if name in transposed else parameter.shape
        for name, parameter in model.named_parameters()
    }
    if mapping.TIED_HEAD not in shapes:
        entries.pop(mapping.TIED_HEAD, None)  # of a tied model, whose head is the embedding
    theirs = [{mapping.hf_name(n): x for n, x in of.items()} for of in (entries, shapes)]
    problems += misfits(*theirs, [DTYPE_NAMES[dtype] for dtype in FLOAT_DTYPES])
    if problems:
        raise FileError(f"{folder}: does not fit its configuration: {'; '.join(problems)}")
    for name, parameter in model.named_parameters():
        value = entries[name].read(device)
        if name in transposed:
            value = value.permute((1, 0))
        parameter.cached_data = value.astype(dtype)
    nn.place_neighbours(model)
    model.text_files = Tokenizer(files_in(folder), str(folder.absolute() / "tokenizer.json"))
    return model


def _transposed(model: nn.Module) -> set[str]:
    """The names of the parameters that lie the other way round there."""
    return {
        f"{name}.weight" for name, module in model.named_modules() if isinstance(module, nn.Linear)
    }


def _entries(folder: Path, mapping: WeightMapping, problems: list[str]) -> dict[str, Entry]:
    """Our name -> tensor, of all weight files of the folder; buffers are left out."""
    files: list[str] = [WEIGHTS]
    if not (folder / WEIGHTS).exists():
        if (folder / INDEX).exists():
            files = sorted({*read_json(folder / INDEX).get("weight_map", {}).values()})
        elif any(folder.glob("pytorch_model*.bin")):
            raise FileError(
                f"{folder}: its weights are pytorch_model.bin, a pickle, which needle never opens: "
                "let transformers read and save the model, as safetensors"
            )
        else:
            raise FileError(f"{folder}: no {WEIGHTS} and no {INDEX} in it")
    found: dict[str, Entry] = {}
    for name in files:
        if Path(name).name != name or not (folder / name).exists():
            problems.append(f"{INDEX} names the file {name!r}, which is not in the folder")
            continue
        with reading(folder / name) as file:
            found |= {mapping.our_name(entry.name): entry for entry in read_header(file)[1]}
    return {name: entry for name, entry in found.items() if not mapping.is_buffer(name)}


# ---- writing ------------------------------------------------------------------------------------


def refuse_run(folder: Path) -> None:
    """FileError for the folder of a run, and for one in it: their files are the trainer's."""
    for place in (folder, folder.resolve().parent):
        if (place / "checkpoints").is_dir():
            raise FileError(f"{folder}: is the folder of a run, or in one: choose another")


def mapping_of(model: Any) -> Any:
    """Return the weight_mapping of a model. ValueError for one that transformers cannot open."""
    kind, config = type(model), model.config
    mapping = getattr(kind, "weight_mapping", None)
    if mapping is None:
        raise ValueError(
            f"save_pretrained: a {kind.__name__} has no weight_mapping, the names that "
            "transformers gives its fields and tensors; save it with save_checkpoint"
        )
    described, wrong = mapping.config_to_hf(config), []
    owner = next(cls for cls in kind.__mro__ if "weight_mapping" in vars(cls))
    base = getattr(getattr(owner, "config_class", None), "model_class", config.model_class)
    if base is not config.model_class:  # a registered class, from which this one has the mapping
        wrong = read_config(base, described, config.dtype).misfits(model)
    own_mask = owner is not kind or "block_mask" in vars(model)
    if own_mask and model.block_mask(config.max_seq_len) is not None:
        wrong.append("its block_mask() leaves keys out")
    if wrong:
        raise ValueError(
            f"save_pretrained: a {kind.__name__} has the weight_mapping of {owner.__name__}, but "
            f"is another model: {'; '.join(wrong)}. Save it with save_checkpoint, or write a "
            "weight_mapping of its own"
        )
    return mapping


def save(
    model: Any, folder: str | os.PathLike, tokenizer: Any = None, shard_size: int = SHARD_SIZE
) -> list[Path]:
    """Writes `model` to `folder` in its own dtype; returns the files. `tokenizer`: as
    load_tokenizer takes it; None: the model's, and its special tokens. A file of weights holds at
    most `shard_size` bytes, unless a single tensor is larger.

    ValueError for a model that transformers cannot compute, before anything is written;
    FileError where a file cannot be, and for the folder of a run.
    """
    folder, config = named(folder), model.config
    mapping = mapping_of(model)
    refuse_run(folder)
    if wrong := config.misfits(model):
        raise ValueError(
            "save_pretrained: the model is not what its configuration makes, and transformers "
            f"would fill it with random weights: {'; '.join(wrong)}"
        )
    try:
        came = model.text_files if tokenizer is None else load_tokenizer(tokenizer)
        files = _text_files(came, mapping, config)
    except ValueError as error:
        if tokenizer is not None:
            raise
        raise type(error)(
            f"{error} (this tokenizer came with the model: model.tokenizer = None leaves it out)"
        ) from error

    transposed = _transposed(model)
    tensors = {
        mapping.hf_name(n): p.cached_data.permute((1, 0)) if n in transposed else p.cached_data
        for n, p in model.named_parameters()
    }
    shards = _split(tensors, shard_size)
    if len(shards) > 1:
        places = {key: name for name, shard in shards.items() for key in shard}
        total = {
            "total_parameters": sum(value.size for value in tensors.values()),
            "total_size": sum(value.nbytes for value in tensors.values()),
        }
        files[INDEX] = json_text({"metadata": total, "weight_map": dict(sorted(places.items()))})
    written = {*shards, *files}
    shard_name = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")
    with replacing(folder / "config.json") as last:
        last.write(files.pop("config.json").encode())
        with contextlib.ExitStack() as stack:
            for name, text in files.items():
                stack.enter_context(replacing(folder / name)).write(text.encode())
            for name, shard in shards.items():
                file = stack.enter_context(replacing(folder / name))
                file.writelines(chunks(shard, {"format": "pt"}))
            (folder / "config.json").unlink(missing_ok=True)
        for path in folder.iterdir():  # of an earlier save
            shadows = path.name in (WEIGHTS, INDEX, *TEXT_FILES) or shard_name.fullmatch(path.name)
            if shadows and path.name not in written:
                path.unlink()
    remove_leftovers(folder)
    return [folder / name for name in sorted(written)]


def _split(tensors: dict[str, NDArray], limit: int) -> dict[str, dict[str, NDArray]]:
    """The tensors of each file, in order."""
    shards: list[dict[str, NDArray]] = [{}]
    size = 0
    for name, value in tensors.items():
        if shards[-1] and size + value.nbytes > limit:
            shards.append({})
            size = 0
        shards[-1][name] = value
        size += value.nbytes
    count = len(shards)
    if count == 1:
        return {WEIGHTS: tensors}
    return {f"model-{i:05}-of-{count:05}.safetensors": part for i, part in enumerate(shards, 1)}


def _text_files(came: Tokenizer, mapping: WeightMapping, config: Any) -> dict[str, str]:
    """name -> text of all files but the weights: those that came, and those that they lack."""
    files, fields = dict(came.files), dict.fromkeys(f"{role}_token_id" for role in NAMES)
    if "tokenizer.json" in files:
        highest = id_limit(came) - 1
        if highest >= config.vocab_size:
            raise ValueError(
                f"save_pretrained: {came.source} has token {highest}, but the model's vocabulary "
                f"is {config.vocab_size}: they do not belong together"
            )
        fields = {name: getattr(came, name) for name in fields}
        if "tokenizer_config.json" not in files:
            special = {
                name.removesuffix("_id"): came.id_to_token(index)
                for name, index in fields.items()
                if index is not None
            }
            settings = {
                **special,
                "clean_up_tokenization_spaces": False,
                "model_input_names": ["input_ids", "attention_mask"],  # no token_type_ids
                "model_max_length": config.max_seq_len,
                "tokenizer_class": "PreTrainedTokenizerFast",
            }
            files.setdefault("special_tokens_map.json", json_text(special))
            files["tokenizer_config.json"] = json_text(settings)
    fields |= json.loads(files.get("config.json", "{}"))
    known = {name: value for name, value in fields.items() if value is not None}
    described = {**mapping.config_to_hf(config), **fields}
    files["config.json"] = json_text(dict(sorted(described.items())))
    return {"generation_config.json": json_text(known), **files}
