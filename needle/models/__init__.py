"""Models: Pythia, the suite of GPT-NeoX language models by EleutherAI."""

from needle.models.pythia import PRESETS, Pythia, PythiaConfig, create_pythia_70m

__all__ = ["PRESETS", "Pythia", "PythiaConfig", "create_pythia_70m"]
