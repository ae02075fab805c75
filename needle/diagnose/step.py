"""A training step of a tiny Pythia on a device: the same bits twice, the numbers of the CPU. The
first gradient that differs and the first hook point of the forward are named."""

from __future__ import annotations

from typing import Any

import numpy as np

from needle import _C, nn, optim
from needle.diagnose.examination import Reporter
from needle.diagnose.sweep import REMEDY
from needle.models.pythia import Pythia, PythiaConfig

SHAPE: dict[str, Any] = dict(
    vocab_size=257, hidden_size=64, num_layers=2, num_heads=2, max_seq_len=32
)
HOOK = 2e-3  # tolerance, relative to the largest element of the hook point
GRADIENT = 5e-3  # tolerance, relative to the largest gradient element of the parameter, ...
SMALL = 1e-3  # ... or to this fraction of the largest of all gradients, if that is more


def fresh(device: Any, dtype: str) -> tuple[Pythia, np.ndarray]:
    """The same model and the same ids each time; NumPy's generator is left as it was."""
    before = np.random.get_state()
    try:
        np.random.seed(0)
        model = Pythia(PythiaConfig(dtype=dtype, **SHAPE), device=device)
        return model, np.random.randint(0, SHAPE["vocab_size"], (2, 32))
    finally:
        np.random.set_state(before)


def one_step(device: Any, dtype: str) -> dict[str, np.ndarray]:
    """loss, `gradient of NAME` and, after the optimizer, `NAME`, from the loss on down."""
    model, ids = fresh(device, dtype)
    flat = nn.flatten_parameters(model)
    optimizer = optim.AdamW(flat, lr=1e-3, weight_decay=0.1)
    _, loss = model(ids[:, :-1], ids[:, 1:])
    assert loss is not None  # with targets there is one
    loss.backward()
    _, scale = optim.grad_norm(flat, 1.0)
    optimizer.step(scale)
    found = {"loss": loss.numpy()}
    backwards = list(reversed(model.named_parameters()))
    found |= {f"gradient of {n}": p.grad.numpy() for n, p in backwards if p.grad is not None}
    return found | {name: p.numpy() for name, p in model.named_parameters()}


def first_other_bits(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> str | None:
    return next((name for name in one if one[name].tobytes() != other[name].tobytes()), None)


def first_off(got: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> str | None:
    """The loss or the first gradient that is off. Parameters after AdamW follow the sign of a
    gradient however small, and are not compared."""
    if not abs(got["loss"] - wanted["loss"]) <= 1e-3 * abs(wanted["loss"]):
        return f"the loss is {got['loss']:.6g}, should be {wanted['loss']:.6g}"
    gradients = {name: value for name, value in wanted.items() if name.startswith("gradient")}
    largest = max(np.abs(value).max() for value in gradients.values())
    for name, want in gradients.items():
        scale = max(SMALL * largest, np.abs(want).max())
        error = np.abs(got[name] - want).max()
        if not error <= GRADIENT * scale:
            return f"{name} is {error:.3g} off, its largest should be {np.abs(want).max():.3g}"
    return None


def first_hook_off(device: Any) -> str | None:
    """The first hook point of the forward that differs from the CPU's."""
    caches = []
    for place in (device, _C.cpu()):
        model, ids = fresh(place, "float32")
        caches.append(model.run_with_cache(ids[:, :-1])[1])
    for name, wanted in caches[1].items():
        got, want = caches[0][name].numpy(), wanted.numpy()
        seen = np.isfinite(want)  # -inf are the scores of keys that are not seen
        scale = np.abs(want[seen]).max(initial=1e-3)
        if not np.array_equal(seen, np.isfinite(got)):
            return name
        if not np.abs(got[seen] - want[seen]).max(initial=0) <= HOOK * scale:
            return name
    return None


def examine(reporter: Reporter, device: Any) -> None:
    """Findings about the step in float32 and bfloat16."""
    for dtype in ("float32", "bfloat16"):
        reporter.at(f"a training step of a tiny Pythia in {dtype}")
        one, other = (one_step(device, dtype) for _ in range(2))
        name = first_other_bits(one, other)
        if name is not None:
            text = f"a {dtype} training step gives other bits the second time, first in {name}"
            reporter.failed("same bits", text, REMEDY)
            return
        if dtype == "float32" and not device.is_host:
            off = first_off(one, one_step(_C.cpu(), dtype))
            if off is not None:
                reporter.at("looking for the first point of the model that is off")
                point = first_hook_off(device)
                where = f"; the first point that is off is {point}" if point else ""
                reporter.failed("step", f"a training step differs from cpu(): {off}{where}", REMEDY)
                return
    agrees = "" if device.is_host else "as on cpu(), and "
    text = f"a training step of a tiny Pythia: {agrees}the same bits twice; loss {one['loss']:.4f}"
    reporter.ok("step", text)
