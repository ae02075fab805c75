"""Datasets in memory and their batches, as in the course. `needle.data` re-exports them beside the
token datasets."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from needle._C import Device, NDArray
from needle.autograd import Tensor


class Dataset:
    """Samples by index. Subclasses write `__getitem__(index)`, which returns a tuple of arrays (or
    one array), and `__len__`."""


class NDArrayDataset(Dataset):
    """Arrays of one length, cut along the first axis: sample i is (a[i], b[i], ...)."""

    def __init__(self, *arrays: Any) -> None:
        if not arrays:
            raise ValueError("NDArrayDataset: needs one array or more")
        self.arrays = [_host(a) for a in arrays]
        for i, a in enumerate(self.arrays):
            if len(a) != len(self.arrays[0]):
                raise ValueError(
                    f"NDArrayDataset: array {i} has {len(a)} samples, "
                    f"but the first has {len(self.arrays[0])}"
                )

    def __repr__(self) -> str:
        shapes = ", ".join(str(a.shape[1:]) for a in self.arrays)
        return f"NDArrayDataset({len(self)} samples of {shapes})"

    def __len__(self) -> int:
        return len(self.arrays[0])

    def __getitem__(self, index: Any) -> tuple:
        return tuple(a[index] for a in self.arrays)


class DataLoader:
    """Batches of a dataset, each a tuple of Tensors (float32 by default) with the batch first.

    shuffle: a new order for each iteration, by one np.random.shuffle of the indices. The last batch
    is shorter when the length is no multiple of batch_size. An iteration is independent of others.

    >>> pairs = ndl.data.NDArrayDataset(np.zeros((5, 2)), np.arange(5))
    >>> pairs, ndl.data.DataLoader(pairs, batch_size=3)
    (NDArrayDataset(5 samples of (2,), ()), DataLoader(5 samples, batch_size=3, shuffle=False))
    >>> [(x.shape, y.numpy().tolist()) for x, y in ndl.data.DataLoader(pairs, batch_size=3)]
    [((3, 2), [0.0, 1.0, 2.0]), ((2, 2), [3.0, 4.0])]
    """

    def __init__(
        self,
        dataset: Dataset,
        batch_size: int | None = 1,
        shuffle: bool = False,
        device: Device | None = None,
        dtype: str = "float32",
    ) -> None:
        if batch_size is not None and batch_size < 1:
            raise ValueError(f"DataLoader: batch_size must be 1 or more, not {batch_size}")
        self.dataset = dataset
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.device = device
        self.dtype = dtype

    def __repr__(self) -> str:
        return (
            f"DataLoader({len(self.dataset)} samples, batch_size={self.batch_size}, "
            f"shuffle={self.shuffle})"
        )

    def __len__(self) -> int:
        """The number of batches."""
        return -(-len(self.dataset) // (self.batch_size or max(len(self.dataset), 1)))

    def __iter__(self) -> Iterator[tuple]:
        order = np.arange(len(self.dataset))
        if self.shuffle:
            np.random.shuffle(order)
        return self._batches(order)

    def _batches(self, order: np.ndarray) -> Iterator[tuple]:
        size = self.batch_size or max(len(order), 1)
        for start in range(0, len(order), size):
            indices = order[start : start + size]
            if type(self.dataset).__getitem__ is NDArrayDataset.__getitem__:
                columns: Sequence[Any] = self.dataset[indices]
            else:
                samples = [self.dataset[int(i)] for i in indices]
                if not isinstance(samples[0], (tuple, list)):
                    samples = [(sample,) for sample in samples]
                if isinstance(samples[0][0], dict):
                    raise TypeError(
                        f"DataLoader: {type(self.dataset).__name__}[{indices[0]}] must be a tuple "
                        "of arrays, or one array, not a dict"
                    )
                parts = zip(*samples, strict=True)
                columns = [np.stack([_host(x) for x in part]) for part in parts]
            yield tuple(
                Tensor(x, device=self.device, dtype=self.dtype, requires_grad=False)
                for x in columns
            )


def _host(x: Any) -> np.ndarray:
    return x.numpy() if isinstance(x, (NDArray, Tensor)) else np.asarray(x)
