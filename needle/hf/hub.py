"""Models of the Hugging Face hub by name, through the optional package `huggingface_hub`, with its
cache (HF_HOME) and its offline mode (HF_HUB_OFFLINE=1)."""

from __future__ import annotations

import re
from pathlib import Path

from needle.files import FileError, MissingFileError, similar

NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
INSTALL = "pip install 'needle-lm[hf]'"


def snapshot(name: str, revision: str | None = None) -> Path:
    """Return the folder in the hub's cache that holds the configuration, weights and tokenizer of
    OWNER/MODEL, downloaded if they are not there.

    revision: a branch, a tag or a commit; None: main. MissingFileError for a name that is neither
    a path nor on the hub; FileError where the hub refuses, and for weights that are a pickle only.
    """
    missing = (
        f"{name}: no such file or folder here (it may be a checkpoint, a run, or a model of "
        f"transformers){similar(Path(name))}"
    )
    if Path(name).exists():
        missing = f"{name}: a folder here has no revision"
    if not NAME.fullmatch(name):
        raise MissingFileError(f"{missing}; and no name OWNER/MODEL of the Hugging Face hub")
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise MissingFileError(
            f"{missing}; as a name on the Hugging Face hub it needs the package huggingface_hub: "
            f"{INSTALL}"
        ) from None
    where = f"on the Hugging Face hub, revision {revision or 'main'}"
    patterns = ["*.json", "*.safetensors"]
    try:
        folder = Path(snapshot_download(name, revision=revision, allow_patterns=patterns))
    except (OSError, ValueError) as error:  # of the network, the cache and the hub's answers
        text = str(error).strip().replace("\n", " ")
        kind = FileError if isinstance(error, PermissionError) else MissingFileError
        raise kind(f"{missing}; {where}: {text}") from error
    if not any(folder.glob("*.safetensors")):
        raise FileError(
            f"{name}: {where}: no *.safetensors among its files; needle never opens a pickle "
            "(pytorch_model.bin)"
        )
    return folder
