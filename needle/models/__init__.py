"""Models: Pythia, the suite of GPT-NeoX language models by EleutherAI, and a user's own."""

from needle.models.language import LanguageModel
from needle.models.pretrained import from_pretrained
from needle.models.pythia import PRESETS, Pythia, PythiaConfig, create_pythia_70m
from needle.models.registry import (
    Config,
    class_of_transformers,
    import_file,
    model_class,
    preset,
    preset_names,
    register,
)

__all__ = [
    "PRESETS",
    "Config",
    "LanguageModel",
    "Pythia",
    "PythiaConfig",
    "class_of_transformers",
    "create_pythia_70m",
    "from_pretrained",
    "import_file",
    "model_class",
    "preset",
    "preset_names",
    "register",
]
