"""The number of steps of `make train` on a CPU: about three minutes on two cores of any speed."""

from __future__ import annotations

import time
from statistics import median

import numpy as np

from needle import models, nn, optim
from needle.backend_ndarray import Device

SECONDS = 150  # of training; building, tokenising and evaluating take the rest of three minutes
LEAST, MOST = 300, 600  # steps: fewer show too little, more are not needed
UNIT = 50  # steps between evaluations, and between checkpoints
MEASURED = 2.0  # seconds of the measurement


def fitting_steps(seconds: float) -> int:
    """Return how many steps of `seconds` each fit into SECONDS."""
    return min(max(int(SECONDS / seconds) // UNIT * UNIT, LEAST), MOST)


def seconds_of_step(config: models.Config, settings: dict, device: Device) -> float:
    """Measure a step with a model of the same shape, which is thrown away."""
    model = config.model_class(config, device=device)
    optimizer = optim.AdamW(nn.flatten_parameters(model))
    shape = settings["batch_size"], settings["seq_len"]
    ids = np.arange(shape[0] * shape[1], dtype=np.int32).reshape(shape) % config.vocab_size
    times, begun = [], time.perf_counter()
    while len(times) < 2 or time.perf_counter() - begun < MEASURED:
        start = time.perf_counter()
        for _ in range(settings["grad_accum"]):
            model(ids, ids)[1].backward()
        optimizer.step()
        optimizer.reset_grad()
        times.append(time.perf_counter() - start)
    return median(times[1:])  # the first finds no memory yet


def choose_steps(config: models.Config, settings: dict, device: Device) -> int:
    """Measure a step, print a line about it, and return the number of steps."""
    seconds = seconds_of_step(config, settings, device)
    steps = fitting_steps(seconds)
    print(
        f"{steps} steps of {seconds:.2f} s here: about {seconds * steps / 60:.1f} minutes of "
        "training (--steps overrules)",
        flush=True,
    )
    return steps
