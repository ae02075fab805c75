"""GPT-NeoX in and out of the folders that Hugging Face's `transformers` reads and writes.

    python -m needle.hf export RUN_OR_CHECKPOINT FOLDER     a run's newest checkpoint, or a file
    python -m needle.hf import FOLDER CHECKPOINT

A folder holds config.json, generation_config.json, the weights (model.safetensors, or shards
model-00001-of-0000N.safetensors with model.safetensors.index.json), and, where the tokenizer is
known, tokenizer.json, tokenizer_config.json and special_tokens_map.json. Neither torch nor
transformers is needed, and no pickle is opened.

Names: ours are theirs without `gpt_neox.`; their head is `embed_out` or `lm_head`. Weights of
linear layers are (in, out) here and (out, in) there. Reading checks the configuration and the name,
shape, dtype and place of every tensor before the first one is loaded. Writing goes file by file
through a temporary one; weights of an earlier save that would shadow the new ones are removed last.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from needle import _C
from needle.backend_ndarray import Device, NDArray, cpu, default_device
from needle.checkpoint import CheckpointError, find_checkpoint, save_checkpoint
from needle.data import END_OF_TEXT
from needle.files import reading, replacing
from needle.models.pythia import DTYPES, Pythia, PythiaConfig, parameter_shapes
from needle.safetensors import FROM_FILE, Entry, pieces, read_header

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
SHARD_SIZE = 5_000_000_000  # bytes of tensors in one file
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
PADDING = "<|padding|>"  # of the GPT-NeoX tokenizer

# Hugging Face's hidden_act to ours. Those of one form differ in the order of roundings alone.
READ_ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_new",
    "gelu_fast": "gelu_fast",
    "gelu_accurate": "gelu_new",
    "gelu_pytorch_tanh": "gelu_pytorch_tanh",
    "gelu_python_tanh": "gelu_pytorch_tanh",
}
WRITE_ACTIVATIONS = {"gelu_tanh": "gelu_pytorch_tanh"}  # the one name that they do not know

# What older versions saved beside the parameters, and what follows from the configuration.
BUFFERS = re.compile(
    r"(layers\.\d+\.attention\.(bias|masked_bias|rotary_emb\.\w+)"
    r"|rotary_emb\.\w+)"
)


# ---- the configuration --------------------------------------------------------------------------


def config_from_hf(
    fields: dict[str, Any], dtype: str = "float32", source: str = "config.json"
) -> PythiaConfig:
    """The configuration that the dictionary of a GPTNeoXConfig describes, in any version's
    spelling. CheckpointError lists all that is missing or that needle cannot do."""
    problems = []
    kind = fields.get("model_type")
    if kind != "gpt_neox":
        raise CheckpointError(f"{source}: model_type is {kind!r}; needle reads 'gpt_neox' only")
    names = {
        "vocab_size": "vocab_size",
        "hidden_size": "hidden_size",
        "num_hidden_layers": "num_layers",
        "num_attention_heads": "num_heads",
        "intermediate_size": "intermediate_size",
    }
    read: dict[str, Any] = {}
    for theirs, name in names.items():
        if fields.get(theirs) is None:
            problems.append(f"{theirs} is missing")
        read[name] = fields.get(theirs)
    act = fields.get("hidden_act", "gelu")
    if not isinstance(act, str) or act not in READ_ACTIVATIONS:
        problems.append(f"hidden_act is {act!r}, but must be one of {', '.join(READ_ACTIVATIONS)}")
    if fields.get("attention_bias", True) is not True:
        problems.append("attention_bias is false; needle's attention has biases")
    for name, default in (("use_parallel_residual", True), ("tie_word_embeddings", False)):
        read[name] = fields.get(name, default)
        if not isinstance(read[name], bool):  # "false" would be true
            problems.append(f"{name} is {read[name]!r}, but must be true or false")
    read["rotary_pct"], read["rotary_base"] = _rotary(fields, problems)
    if problems:
        raise CheckpointError(f"{source}: {'; '.join(problems)}")
    try:
        return PythiaConfig(
            **read,
            max_seq_len=fields.get("max_position_embeddings", 2048),
            layer_norm_eps=fields.get("layer_norm_eps", 1e-5),
            hidden_act=READ_ACTIVATIONS[act],
            dtype=dtype,
        )
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{source}: {error}") from error


def _rotary(fields: dict[str, Any], problems: list[str]) -> tuple[float, float]:
    """(share of the head that turns, base). In the order in which transformers believes them:
    rope_parameters, then GPT-NeoX's own names. The names of other models beside them, which it
    writes but does not read, must not be the only ones to say something."""
    nested = {}
    for name in ("rope_parameters", "rope_scaling"):
        value = fields.get(name) or {}
        if not isinstance(value, dict):
            problems.append(f"{name} is {value!r}, but must be a dictionary or null")
            continue
        kind = value.get("rope_type", value.get("type", "default"))
        if kind != "default":
            problems.append(f"{name} asks for {kind!r} positions; needle knows 'default' only")
        nested = nested or value
    found = []
    for default, new, old in (
        (0.25, "partial_rotary_factor", "rotary_pct"),
        (10000.0, "rope_theta", "rotary_emb_base"),
    ):
        value, name = next(
            (
                (place[name], name)
                for place, name in ((nested, new), (fields, old))
                if place.get(name) is not None
            ),
            (default, ""),
        )
        if not name and fields.get(new) not in (None, default):
            problems.append(
                f"{new} is {fields[new]!r}, which GPT-NeoX in transformers does not "
                f"read: it computes with {default}; {old} says what it is"
            )
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            problems.append(f"{name} is {value!r}, but must be a number")
            value = default
        found.append(float(value))
    return found[0], found[1]


def config_to_hf(
    config: PythiaConfig, eos_token_id: int | None = None, pad_token_id: int | None = None
) -> dict[str, Any]:
    """What config.json says of a model. Rotary is spelled as transformers 4 and as 5 reads it.

    >>> fields = ndl.hf.config_to_hf(ndl.PythiaConfig.preset("70m"))
    >>> fields["hidden_act"], fields["rotary_pct"], fields["num_hidden_layers"]
    ('gelu_new', 0.25, 6)
    >>> ndl.hf.config_from_hf(fields) == ndl.PythiaConfig.preset("70m")
    True
    """
    return {
        "architectures": ["GPTNeoXForCausalLM"],
        "attention_bias": True,
        "attention_dropout": 0.0,
        "bos_token_id": eos_token_id,
        "classifier_dropout": 0.1,
        "dtype": config.dtype,
        "eos_token_id": eos_token_id,
        "hidden_act": WRITE_ACTIVATIONS.get(config.hidden_act, config.hidden_act),
        "hidden_dropout": 0.0,
        "hidden_size": config.hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": config.intermediate_size,
        "layer_norm_eps": config.layer_norm_eps,
        "max_position_embeddings": config.max_seq_len,
        "model_type": "gpt_neox",
        "num_attention_heads": config.num_heads,
        "num_hidden_layers": config.num_layers,
        "pad_token_id": pad_token_id,
        "rope_parameters": {
            "partial_rotary_factor": config.rotary_pct,
            "rope_theta": config.rotary_base,
            "rope_type": "default",
        },
        "rotary_emb_base": config.rotary_base,
        "rotary_pct": config.rotary_pct,
        "tie_word_embeddings": config.tie_word_embeddings,
        "torch_dtype": config.dtype,
        "use_cache": True,
        "use_parallel_residual": config.use_parallel_residual,
        "vocab_size": config.vocab_size,
    }


# ---- names and orientation ----------------------------------------------------------------------


def hf_name(name: str) -> str:
    """Their name of our parameter."""
    return name if name.startswith("embed_out.") else f"gpt_neox.{name}"


def our_name(name: str) -> str:
    """Our name of their tensor; of one that we do not have, whatever it is."""
    name = name.removeprefix("gpt_neox.")
    return "embed_out." + name.removeprefix("lm_head.") if name.startswith("lm_head.") else name


def is_transposed(name: str, shape: tuple[int, ...]) -> bool:
    """Whether our parameter lies the other way round there: the weights of linear layers."""
    return len(shape) == 2 and name != "embed_in.weight"


def _their_shape(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape there of our parameter of this shape."""
    return tuple(shape[::-1]) if is_transposed(name, shape) else tuple(shape)


# ---- reading ------------------------------------------------------------------------------------


def load(folder: str | os.PathLike, device: Device | None = None, dtype: str = "float32") -> Pythia:
    """The model of a folder, in `dtype` on `device`. Draws no random number. CheckpointError names
    what cannot be read and lists every tensor that is unknown, missing or of the wrong shape."""
    folder = Path(folder)
    if dtype not in DTYPES:
        raise ValueError(
            f"from_pretrained: dtype must be one of {', '.join(DTYPES)}, not {dtype!r}"
        )
    if not folder.is_dir():
        raise CheckpointError(
            f"{folder}: no such folder; needle reads models from the disk, and downloads none"
        )
    device = default_device() if device is None else device
    fields = _json(folder / "config.json")
    config = config_from_hf(fields, dtype, str(folder / "config.json"))
    problems: list[str] = []
    entries = _entries(folder, problems)
    shapes = {name: _their_shape(name, shape) for name, shape in parameter_shapes(config).items()}
    head = None
    if config.tie_word_embeddings:
        head = entries.pop("embed_out.weight", None)
    _compare(entries, shapes, problems)
    if head is not None and not problems:
        _compare_head(head, entries["embed_in.weight"], problems)
    if problems:
        raise CheckpointError(f"{folder}: does not fit its configuration: {'; '.join(problems)}")
    model = Pythia(config, device=device, initialise=False)
    for name, parameter in model.named_parameters():
        value = entries[name].read(device)
        if is_transposed(name, parameter.shape):
            value = value.permute((1, 0))
        _C.assign(parameter.cached_data, value)
    if (folder / "tokenizer.json").is_file():
        model.tokenizer = folder.absolute()
    return model


def _compare(
    entries: dict[str, Entry], shapes: dict[str, tuple[int, ...]], problems: list[str]
) -> None:
    problems += [f"{hf_name(name)} is missing" for name in shapes if name not in entries]
    allowed = [theirs for theirs, (ours, _) in FROM_FILE.items() if ours in DTYPES]
    for name, entry in entries.items():
        if name not in shapes:
            problems.append(f"{entry.name} is unknown")
            continue
        if entry.shape != shapes[name]:
            problems.append(f"{entry.name} has shape {list(entry.shape)}, not {list(shapes[name])}")
        if entry.dtype not in allowed:
            problems.append(f"{entry.name} is {entry.dtype}, not {' or '.join(allowed)}")


def _compare_head(head: Entry, embedding: Entry, problems: list[str]) -> None:
    """A tied model's file may hold the head as well; it must then be the embedding."""
    same = (head.dtype, head.shape) == (embedding.dtype, embedding.shape)
    if not same or not np.array_equal(*(_words(e) for e in (head, embedding))):
        problems.append(f"{head.name} is not {embedding.name}, but tie_word_embeddings is true")


def _words(entry: Entry) -> np.ndarray:
    _, bits = FROM_FILE[entry.dtype]
    return np.memmap(entry.path, f"<u{bits.itemsize}", "r", entry.offset, entry.shape)


def _json(path: Path) -> dict[str, Any]:
    with reading(path) as file:
        text = file.read()
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: no JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: must hold a JSON object, not {type(value).__name__}")
    return value


def _entries(folder: Path, problems: list[str]) -> dict[str, Entry]:
    """Our name -> tensor, of all weight files of the folder; buffers are left out."""
    whole, index = folder / WEIGHTS, folder / INDEX
    if whole.is_file():
        found = _header(whole)
    elif index.is_file():
        found = _shards(folder, _json(index), problems)
    else:
        raise CheckpointError(_no_weights(folder))
    entries: dict[str, Entry] = {}
    for entry in found:
        name = our_name(entry.name)
        if BUFFERS.fullmatch(name):
            continue
        if name in entries:
            first = entries[name]
            problems.append(
                f"{entry.name} in {entry.path.name} is {first.name} in "
                f"{first.path.name} a second time"
            )
        entries[name] = entry
    return entries


def _no_weights(folder: Path) -> str:
    if not any(folder.glob("pytorch_model*.bin")):
        return f"{folder}: no {WEIGHTS} and no {INDEX} in it"
    parts, whole = str(folder / "pytorch_model*.bin"), str(folder / WEIGHTS)
    line = (
        "import glob, torch; from safetensors.torch import save_file; save_file({k: "
        f"v.clone().contiguous() for f in sorted(glob.glob({parts!r})) for k, v in "
        f"torch.load(f, map_location='cpu', weights_only=True).items()}}, {whole!r}, "
        "{'format': 'pt'})"
    )
    escaped = re.sub(r'([\\"$`])', r"\\\1", line)
    return (
        f"{folder}: its weights are pytorch_model.bin, a pickle, which needle never opens. "
        f'This line converts it: python -c "{escaped}"'
    )


def _shards(folder: Path, index: dict[str, Any], problems: list[str]) -> list[Entry]:
    where = index.get("weight_map")
    if not isinstance(where, dict) or not all(isinstance(file, str) for file in where.values()):
        raise CheckpointError(f"{folder / INDEX}: has no weight_map from tensors to files")
    found: list[Entry] = []
    for file in sorted(set(where.values())):
        if Path(file).name != file or not (folder / file).is_file():
            problems.append(f"{INDEX} names the file {file!r}, which is not in the folder")
            continue
        shard = _header(folder / file)
        names = {entry.name for entry in shard}
        problems += [
            f"{INDEX} says that {name} is in {file}, but it is not"
            for name, place in where.items()
            if place == file and name not in names
        ]
        found += shard
    return found


def _header(path: Path) -> list[Entry]:
    with reading(path) as file:
        return read_header(file)[1]


# ---- writing ------------------------------------------------------------------------------------


def save(
    model: Pythia, folder: str | os.PathLike, tokenizer: Any = None, shard_size: int = SHARD_SIZE
) -> list[Path]:
    """Writes `model` to `folder` in its own dtype; returns the files. `tokenizer`: a
    tokenizer.json, a folder that holds one, a `tokenizers.Tokenizer` or a tokenizer of
    transformers; None: what the model came with. A file of weights holds `shard_size` bytes at
    most, unless a single tensor is larger.

    ValueError for a model that transformers cannot compute, before anything is written;
    CheckpointError where a file cannot be.
    """
    folder, config = Path(folder), model.config
    if config.use_sparse_attention:
        raise ValueError(
            "save_pretrained: this model's attention is block-sparse, which GPT-NeoX "
            "in transformers is not: it would compute something else. Save it with "
            "save_checkpoint"
        )
    try:
        files, ids = _tokenizer_files(model.tokenizer if tokenizer is None else tokenizer, config)
    except ValueError as error:
        if tokenizer is not None:
            raise
        raise type(error)(
            f"{error} (this tokenizer came with the model: model.tokenizer = None leaves it out)"
        ) from error
    end, padding = ids
    files["config.json"] = _text(config_to_hf(config, end, padding))
    generation = {"bos_token_id": end, "eos_token_id": end, "pad_token_id": padding}
    files["generation_config.json"] = _text({k: v for k, v in generation.items() if v is not None})

    parameters = {name: p.cached_data for name, p in model.named_parameters()}
    shards = _split(parameters, shard_size)
    names = (
        [WEIGHTS]
        if len(shards) == 1
        else [f"model-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)]
    )
    for name, shard in zip(names, shards):
        tensors = {hf_name(key): _turned(key, parameters[key]) for key in shard}
        with replacing(folder / name) as file:
            file.writelines(pieces(tensors, {"format": "pt"}))
    if len(shards) > 1:
        places = {hf_name(key): name for name, shard in zip(names, shards) for key in shard}
        total = {
            "total_parameters": sum(value.size for value in parameters.values()),
            "total_size": sum(value.nbytes for value in parameters.values()),
        }
        files[INDEX] = _text({"metadata": total, "weight_map": dict(sorted(places.items()))})
    for name, content in files.items():
        with replacing(folder / name) as file:
            file.write(content)
    written = {*names, *files}
    shard_name = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")
    for path in folder.iterdir():
        shadows = path.name in (WEIGHTS, INDEX) or shard_name.fullmatch(path.name)
        if shadows and path.name not in written:
            path.unlink()
    return [folder / name for name in sorted(written)]


def _text(value: dict[str, Any]) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()


def _split(parameters: dict[str, NDArray], limit: int) -> list[list[str]]:
    """Names of parameters by file, in order."""
    shards: list[list[str]] = [[]]
    size = 0
    for name, value in parameters.items():
        if shards[-1] and size + value.nbytes > limit:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += value.nbytes
    return shards


def _turned(name: str, value: NDArray) -> NDArray:
    """A view of our parameter as it lies there."""
    return value.permute((1, 0)) if is_transposed(name, value.shape) else value


def _tokenizer_files(
    tokenizer: Any, config: PythiaConfig
) -> tuple[dict[str, bytes], tuple[int | None, int | None]]:
    """(name -> content, (id of the end of a text, id of padding)); the ids None where unknown."""
    if tokenizer is None:
        return {}, (None, None)
    if hasattr(tokenizer, "save_pretrained"):  # of transformers: its own files
        with tempfile.TemporaryDirectory() as folder:
            tokenizer.save_pretrained(folder)
            return _tokenizer_files(folder, config)
    files: dict[str, bytes] = {}
    if hasattr(tokenizer, "to_str"):
        source, text = "the tokenizer", tokenizer.to_str().encode()
    else:
        path = Path(tokenizer)
        folder = path if path.is_dir() else None
        path = path / "tokenizer.json" if folder else path
        source = str(path)
        try:
            text = path.read_bytes()
            if folder and (folder / "tokenizer_config.json").is_file():  # one of theirs: as it is
                files = {
                    name: (folder / name).read_bytes()
                    for name in TOKENIZER_FILES
                    if (folder / name).is_file()
                }
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error
    ids = _token_ids(source, text)
    highest = max(ids.values(), default=-1)
    if highest >= config.vocab_size:
        raise ValueError(
            f"save_pretrained: {source} has token {highest}, but the model's "
            f"vocabulary is {config.vocab_size}: they do not belong together"
        )
    special = {
        "bos_token": END_OF_TEXT,
        "eos_token": END_OF_TEXT,
        "unk_token": END_OF_TEXT,
        "pad_token": PADDING,
    }
    special = {role: token for role, token in special.items() if token in ids}
    if not files:
        files = {
            "tokenizer.json": text,
            "tokenizer_config.json": _text(
                {
                    **special,
                    "clean_up_tokenization_spaces": False,
                    "model_input_names": ["input_ids", "attention_mask"],  # no token_type_ids
                    "model_max_length": config.max_seq_len,
                    "tokenizer_class": "PreTrainedTokenizerFast",
                }
            ),
            "special_tokens_map.json": _text(special),
        }
    return files, (ids.get(END_OF_TEXT), ids.get(PADDING))


def _token_ids(source: str, text: bytes) -> dict[str, int]:
    """Token -> id of a tokenizer.json, of the model's vocabulary and of the added tokens."""
    try:
        content = json.loads(text)
        vocabulary = content["model"]["vocab"]
        if isinstance(vocabulary, list):  # Unigram: pairs of token and score
            vocabulary = {token: i for i, (token, _) in enumerate(vocabulary)}
        added = content.get("added_tokens") or []
        ids = {**vocabulary, **{token["content"]: token["id"] for token in added}}
        wrong = [i for i in ids.values() if type(i) is not int or i < 0]
        if wrong:
            raise ValueError(f"{wrong[0]!r} is no id of a token")
        return ids
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{source}: no tokenizer.json of the package `tokenizers`: {error!r}"
        ) from error


# ---- the shell ----------------------------------------------------------------------------------


def export_checkpoint(
    source: str | os.PathLike, folder: str | os.PathLike, tokenizer: str | os.PathLike | None = None
) -> list[Path]:
    """Writes a checkpoint, or the newest one of a run's folder, to `folder`; returns the files. The
    tokenizer.json of the run, or the one beside the checkpoint, comes along where it is."""
    checkpoint = find_checkpoint(source, lambda text: print(text, file=sys.stderr))
    return save(checkpoint.restore_model(cpu()), folder, tokenizer)


def import_folder(
    folder: str | os.PathLike, checkpoint: str | os.PathLike, dtype: str = "float32"
) -> list[Path]:
    """Writes the model of `folder` as a checkpoint without an optimizer, and its tokenizer.json
    beside it, where apps/generate.py looks; returns the files. The loss it records is NaN."""
    source, target = Path(folder) / "tokenizer.json", Path(checkpoint)
    content = source.read_bytes() if source.is_file() else None
    beside = target.parent / "tokenizer.json"
    if content is not None and beside.is_file() and beside.read_bytes() != content:
        raise CheckpointError(
            f"{beside}: another model's tokenizer lies there already; write the "
            "checkpoint to a folder of its own"
        )
    written = [save_checkpoint(load(folder, cpu(), dtype), None, 0, math.nan, target)]
    if content is not None:
        with replacing(beside) as file:
            file.write(content)
        written.append(beside)
    return written


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="python -m needle.hf",
        description="Models in and out of the folders of Hugging Face's transformers.",
    )
    commands = top.add_subparsers(dest="command", required=True)
    out = commands.add_parser("export", help="from a run or a checkpoint to a folder")
    out.add_argument(
        "source",
        metavar="RUN_OR_CHECKPOINT",
        help="a checkpoint, or the folder of a run: its newest one",
    )
    out.add_argument("folder", metavar="FOLDER", help="what transformers will open")
    out.add_argument(
        "--tokenizer",
        metavar="PATH",
        help="a tokenizer.json, where none lies in the folder of the run",
    )
    into = commands.add_parser("import", help="from a folder to a checkpoint")
    into.add_argument("folder", metavar="FOLDER", help="what save_pretrained of transformers wrote")
    into.add_argument("checkpoint", metavar="CHECKPOINT", help="the file to write")
    into.add_argument(
        "--dtype",
        choices=DTYPES,
        default="float32",
        help="of the parameters (default: float32, which holds all others)",
    )
    return top


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    try:
        if args.command == "export":
            written = export_checkpoint(args.source, args.folder, args.tokenizer)
        else:
            written = import_folder(args.folder, args.checkpoint, args.dtype)
    except (ValueError, OSError, RuntimeError) as error:
        print(f"needle.hf: {error}", file=sys.stderr)
        return 1
    for path in written:
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
