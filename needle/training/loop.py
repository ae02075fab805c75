"""fit, the training loop of a notebook, and GraphedStep, a micro-batch replayed as one CUDA graph.

Long runs, which save, resume and read ahead, have the loop of apps/train_pythia.py.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import itertools
import math
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from needle import _C
from needle._C import Device, NDArray
from needle.autograd import Tensor
from needle.models.language import LanguageModel
from needle.nn import Module, flatten_parameters
from needle.ops.random import Source, drawing_from, new_state
from needle.optim import AdamW, Optimizer, Schedule, clip_grad_norm


def fit(
    model: Module,
    batches: Iterable[tuple[Any, Any]],
    optimizer: Optimizer | None = None,
    *,
    steps: int | None = None,
    loss: Callable[[Any, Any], Tensor] | None = None,
    schedule: Schedule | Callable[[int], float] | None = None,
    max_norm: float | None = None,
    accumulate: int = 1,
    on_step: Callable[[int, float], Any] | None = None,
    progress: bool = True,
) -> list[float]:
    """Train `model` on `batches`, pairs (ids, targets), and return the loss of each step. NumPy
    arrays of floats in the place of ids become Tensors on the model's device, in its dtype.

    optimizer: by default AdamW with its defaults. steps: by default as many as the batches give;
    fewer batches end it with a warning.
    loss: a function of the model's output and the targets; by default the model's own:
    `model.loss(ids, targets)` of a language model, else `model(ids, targets=targets)`, which must
    give (anything, loss); a forward without `targets` is a TypeError. schedule: the learning rate
    of step 1, 2, ... max_norm: gradients are clipped to it.
    accumulate: the number of batches a step, whose loss is the mean of theirs, as of one batch of
    all where each has as many targets.
    on_step(step, loss): called after each step, to print, evaluate or save. progress: a bar, if
    tqdm is installed.

    Ctrl-C ends it, and the losses of the steps done are returned. Raise KeyboardInterrupt if there
    are none, ValueError where there is no batch, and FloatingPointError for a loss that is not
    finite, before it changes the model.

    >>> np.random.seed(0)
    >>> x = np.random.randn(8, 2)
    >>> batches = [(ndl.Tensor(x), x.argmax(axis=1))] * 200
    >>> model = nn.Linear(2, 2)
    >>> losses = ndl.fit(model, batches, optim.Adam(model.parameters(), lr=0.1),
    ...                  loss=nn.SoftmaxLoss(), progress=False)
    >>> len(losses), losses[-1] < 0.1
    (200, True)
    """
    if accumulate < 1:
        raise ValueError(f"fit: accumulate must be 1 or more, not {accumulate}")
    if optimizer is None:
        optimizer = AdamW(flatten_parameters(model))
    if steps is None and hasattr(batches, "__len__"):
        steps = max(math.ceil(len(batches) / accumulate), 1)  # of none the first step says so
    model.train()
    losses: list[float] = []
    source = iter(batches)
    with _bar(steps) if progress else contextlib.nullcontext() as bar:
        try:
            for step in itertools.count(1) if steps is None else range(1, steps + 1):
                group = list(itertools.islice(source, accumulate))
                if not group and step == 1:
                    raise ValueError("fit: no batches, or an iterator that was at its end already")
                if not group:
                    break
                if schedule is not None:
                    optimizer.lr = schedule(step)
                value = _gradients(model, optimizer, group, loss)
                if not math.isfinite(value):
                    raise FloatingPointError(f"fit: the loss of step {step} is {value}")
                if max_norm is not None:
                    clip_grad_norm(optimizer.flat or optimizer.params, max_norm)
                optimizer.step()
                losses.append(value)
                if bar is not None:
                    bar.set_postfix_str(f"loss {value:.4f}", refresh=False)
                    bar.update()
                if on_step is not None:
                    on_step(step, value)
        except KeyboardInterrupt:
            if not losses:
                raise
            return losses
    if steps is not None and len(losses) < steps:
        warnings.warn(f"fit: the batches ended after {len(losses)} of {steps} steps", stacklevel=2)
    return losses


def _gradients(model: Module, optimizer: Optimizer, group: list, loss: Any) -> float:
    """Compute the gradient of the mean loss of some batches; return the loss."""
    optimizer.reset_grad()
    parts, parameter = [], optimizer.params[0]
    for ids, targets in map(_pair, group):
        if isinstance(ids, np.ndarray) and ids.dtype.kind == "f":
            ids = Tensor(ids, parameter.device, parameter.dtype, requires_grad=False)
        part = _loss(model, ids, targets, loss)
        share = _C.array(1 / len(group), part.dtype, part.device)
        part.backward(Tensor.from_ndarray(share.reshape(part.shape)))
        parts.append(part.detach())  # the activations are free
        del part
    return math.fsum(part.item() for part in parts) / len(parts)


def _pair(batch: Any) -> tuple[Any, Any]:
    """Return (ids, targets) of a batch; raise TypeError for an array, whose rows are no pair."""
    shape = f" of shape {batch.shape}" if hasattr(batch, "shape") else ""
    if not shape:
        with contextlib.suppress(TypeError, ValueError):
            ids, targets = batch
            return ids, targets
    raise TypeError(
        "fit: each of batches must be a pair (ids, targets), but one is a "
        f"{type(batch).__name__}{shape}; a single batch is [(ids, targets)]"
    )


def _loss(model: Module, ids: Any, targets: Any, loss: Callable[[Any, Any], Tensor] | None) -> Any:
    """Return the loss of a batch, a Tensor of one number."""
    if loss is not None:
        part = loss(model(ids), targets)
    elif isinstance(model, LanguageModel):
        part = model.loss(ids, targets)
    elif "targets" in inspect.signature(model.forward).parameters:
        _, part = model(ids, targets=targets)
    else:
        raise TypeError(
            f"fit: {type(model).__name__} takes no targets, and so gives no loss: give one, as "
            "loss=nn.SoftmaxLoss()"
        )
    if part.size != 1:
        raise ValueError(f"fit: the loss must be one number, but its shape is {part.shape}")
    return part


def _bar(steps: int | None) -> Any:
    """Return tqdm's bar, which a notebook draws, or no bar if tqdm is not installed."""
    try:
        return importlib.import_module("tqdm.auto").tqdm(total=steps, unit="step")
    except ModuleNotFoundError:
        return contextlib.nullcontext()


# ---- recorded micro-batches --------------------------------------------------------------------


def worth_recording(device: Device, tokens: int) -> bool:
    """True if a micro-batch of so many tokens is faster as a graph: a GPU finishes fewer tokens
    before the host has queued the next micro-batch.

    >>> ndl.training.worth_recording(ndl.cpu(), 8192)
    False
    """
    return device.records_graphs and tokens <= 1 << 14


class GraphedStep:
    """Replay compute(ids, targets) as one graph, so that the host does not hold up small batches.
    The bits are the same, but of dropout: all masks of a call have one key, a number of NumPy.

    compute: takes int32 NDArrays of `shape`, leaves gradients in buffers that stay where they are,
    and returns the loss, a scalar; each call does the same (`_C.Graph`). ids and targets may be any
    arrays of integers of that shape. The first call computes, the second records, and from then on
    calls replay. The graph owns the memory of one micro-batch. The second call raises ValueError on
    a device that records no graphs.
    """

    def __init__(
        self, compute: Callable[[NDArray, NDArray], NDArray], shape: tuple[int, int], device: Device
    ) -> None:
        self._compute, self._device = compute, device
        self._inputs = [_C.empty(shape, "int32", device) for _ in range(2)]
        self._loss = _C.empty((), "float32", device)
        self._has_computed, self._graph = False, None
        self._source = Source()  # of dropout

    def __call__(self, ids: Any, targets: Any) -> NDArray:
        """Return the loss, float32, on the device."""
        for place, array in zip(self._inputs, (ids, targets)):
            if not isinstance(array, NDArray):
                array = _C.array(array, "int32", self._device)
            _C.assign(place, array)
        if self._source.state is not None:
            _C.assign(self._source.state, new_state(self._device))
        if not self._has_computed:
            self._step()
            self._has_computed = True
        else:
            self._graph = self._graph or _C.Graph(self._device, self._step)
            self._graph.replay()
        return self._loss.copy()

    def _step(self) -> None:
        with drawing_from(self._source):
            _C.assign(self._loss, self._compute(*self._inputs))
