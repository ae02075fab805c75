"""The configuration of a model in a file: of --config, and the config.json of a run."""

from __future__ import annotations

import sys
from pathlib import Path

from needle import models
from needle.files import FileError, read_json, reading
from needle.models import Config

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


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
        fields = read_json(Path(path))
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


def described_config(path: Path) -> Config:
    """Return the configuration of the model that the config.json of a run describes."""
    fields = read_config(str(path))
    return models.model_class(fields.pop("model")).config_class.from_dict(fields)
