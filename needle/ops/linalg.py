"""The vector norm of NumPy's and PyTorch's `linalg`; no other linear algebra is here."""

from __future__ import annotations

from typing import Any

from needle.autograd import Tensor
from needle.backend_ndarray import Axes
from needle.ops import reduce
from needle.ops.spellings import with_other_words


def _norm(a: Tensor, ord: Any = None, axes: Axes = None, keepdims: bool = False) -> Tensor:
    """The 2-norm of all elements or along `axes`; with `ord` the vector norm along one axis, as
    ops.norm has it. ValueError for matrix norms but "fro", which is the 2-norm of the elements.

    >>> print(ndl.linalg.norm(ndl.Tensor([[3, 4], [0, 5]]), axis=1))
    [5. 5.]
    """
    count = (a.ndim if axes is None else 1) if not isinstance(axes, (tuple, list)) else len(axes)
    if ord not in (None, "fro") and count != 1:
        raise ValueError(f"linalg.norm: ord {ord!r} of {count} axes is no norm of vectors")
    return reduce.norm(a, 2 if ord is None else ord, axes, keepdims)


norm = with_other_words(_norm, "linalg.norm")
