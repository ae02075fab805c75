"""The model under its historic name: `from pythia_model import create_pythia_70m`."""

from needle.models.pythia import PRESETS, Pythia, PythiaConfig, create_pythia_70m

__all__ = ["PRESETS", "Pythia", "PythiaConfig", "create_pythia_70m"]
