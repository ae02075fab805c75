"""Recipes of the published Pythias as settings of a run (Biderman et al. 2023, table 6, and the
configurations in EleutherAI/pythia).

A flag overrides each value; `changes` lists the overridden ones for config.json. Every run has the
rest of the recipe: AdamW with betas 0.9 and 0.95 and eps 1e-8, no decay of biases and norms,
Pythia's initialisation, the tanh GELU. The recipe's float16 with loss scaling is not followed.
"""

from __future__ import annotations

SEQUENCES = 1024  # a step

# Peak learning rates; other models have that of the 70m.
PEAK_LR = {
    "pythia-160m": 6e-4,
    "pythia-410m": 3e-4,
    "pythia-1b": 3e-4,
    "pythia-1.4b": 2e-4,
    "pythia-2.8b": 1.6e-4,
    "pythia-6.9b": 1.2e-4,
    "pythia-12b": 1.2e-4,
}

_VALUES = {
    "seq_len": 2048,
    "steps": 143_000,
    "warmup": 1_430,
    "weight_decay": 0.1,
    "clip": 1.0,
    "seed": 1234,
}
# `pythia` follows the schedule that GPT-NeoX computed, `pythia-fixed` the one that it announced.
SCHEDULES = {"pythia": "pythia", "pythia-fixed": "cosine"}
NAMES = tuple(SCHEDULES)


def values(recipe: str, model: str) -> dict:
    """Return the settings of a recipe for a model."""
    return {**_VALUES, "schedule": SCHEDULES[recipe], "lr": PEAK_LR.get(model, 1e-3)}


def warmup(steps: int) -> int:
    """Return the number of steps in which the rate rises: a hundredth of all."""
    return steps // 100


def changes(settings: dict) -> dict[str, dict]:
    """Return where a run differs from its recipe: {setting: {"recipe": value, "run": value}}."""
    wanted = {
        **values(settings["recipe"], settings["model"]),
        "sparse": None,
        "sequences_per_step": SEQUENCES,
    }
    actual = {**settings, "sequences_per_step": settings["batch_size"] * settings["grad_accum"]}
    return {
        name: {"recipe": value, "run": actual[name]}
        for name, value in wanted.items()
        if actual[name] != value
    }


def published(step: int) -> bool:
    """True if the suite has a checkpoint of this step: 0 (before the first), the powers of two up
    to 512, and each thousandth."""
    return step % 1000 == 0 or (0 < step <= 512 and step & (step - 1) == 0)
