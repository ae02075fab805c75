"""Dropout, and where random numbers on a device come from: the state of csrc/philox.h, a key that
NumPy draws and a counter that the device advances."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import numpy as np

from needle import _C
from needle._C import Device, NDArray
from needle.autograd.tensor import FLOATS, Tensor, TensorOp
from needle.ops.broadcast import astype

DRAWN_BY_NUMPY = 65536  # elements of a dropout, at most


def new_state(device: Device, random: Any = np.random) -> NDArray:
    """Return a state, int64 (3,), whose key is one number of `random`, a generator of NumPy."""
    key = random.randint(-(2**63), 2**63, dtype=np.int64)
    return _C.array(np.array([key, 0, 0]), "int64", device)


class Source:
    """One state for all that a block draws; by default made by the first draw."""

    def __init__(self, state: NDArray | None = None) -> None:
        self.state = state

    def copy(self) -> Source:
        return Source(None if self.state is None else self.state.copy())


drawing: ContextVar[Source | None] = ContextVar("drawing", default=None)


@contextlib.contextmanager
def drawing_from(source: Source | None) -> Iterator[None]:
    """Let dropout of any size draw from the source, in the thread and the block, as a recorded
    graph must: each replay goes on from the state. None: as without the block."""
    token = drawing.set(source)
    try:
        yield
    finally:
        drawing.reset(token)


class Dropped(TensorOp):
    """x under the mask of a state, over 1 - p. The gradient draws the mask again."""

    reads_inputs = reads_result = False

    def __init__(self, p: float, drawn: NDArray | None = None) -> None:
        self.p, self.drawn = p, drawn  # drawn: the state before; None: the forward draws

    def compute(self, x: NDArray) -> NDArray:
        flat = x.reshape((x.size,))
        if self.drawn is None:
            source = drawing.get() or Source()
            if source.state is None:
                source.state = new_state(x.device)
            y, self.drawn = _C.dropout_fwd(source.state, flat, self.p)
        else:
            y = _C.dropout_bwd(self.drawn, flat, self.p)
        return y.reshape(x.shape)

    def gradient(self, out_grad: Tensor, node: Tensor) -> Tensor:
        return Dropped(self.p, self.drawn)(out_grad)


def dropout(x: Tensor, p: float = 0.5, training: bool = True) -> Tensor:
    """x with each element zeroed with probability p, and the others divided by 1 - p; x itself if
    not `training` or for p = 0.

    The elements of up to 65,536 are drawn from NumPy's global generator. Of more, one number of it
    is the key of Philox on the device of x, with the same bits on each device.

    >>> np.random.seed(0)
    >>> print(ndl.ops.dropout(ndl.ones(6)))
    [0. 0. 0. 0. 2. 0.]
    """
    if isinstance(p, str) or not 0 <= p < 1:
        raise ValueError(f"dropout: p must be in [0, 1), but is {p}")
    if not training or p == 0:
        return x
    if x.size > DRAWN_BY_NUMPY or drawing.get() is not None:
        return Dropped(p)(x if x.dtype in FLOATS else astype(x, "float32"))
    mask = _C.array(np.random.rand(*x.shape) <= 1 - p, "bool", x.device)
    return x * Tensor.from_ndarray(mask) / (1 - p)
