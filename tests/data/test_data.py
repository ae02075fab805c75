"""DataLoader and NDArrayDataset of the course."""

import numpy as np
import pytest

import needle as ndl
from needle import _C, data


def test_batches_in_order():
    x, y = np.arange(20.0).reshape(10, 2), np.arange(10)
    dataset = data.NDArrayDataset(x, y)
    assert len(dataset) == 10
    got_x, got_y = dataset[3]
    np.testing.assert_array_equal(got_x, x[3])
    assert got_y == 3
    for _ in range(2):  # it can be walked again
        batches = list(data.DataLoader(dataset, batch_size=4))
        assert [len(b[1].numpy()) for b in batches] == [4, 4, 2]
        np.testing.assert_array_equal(np.concatenate([b[0].numpy() for b in batches]), x)
        np.testing.assert_array_equal(np.concatenate([b[1].numpy() for b in batches]), y)
    for made in _C.array(x, "float32"), ndl.Tensor(x):
        ((batch,),) = data.DataLoader(data.NDArrayDataset(made), batch_size=None)
        np.testing.assert_array_equal(batch.numpy(), x)
        assert not batch.requires_grad
    for more, dtype in ({}, "float32"), ({"dtype": "bfloat16"}, "bfloat16"):
        loader = data.DataLoader(dataset, batch_size=4, **more)
        assert {part.dtype for batch in loader for part in batch} == {dtype}


def test_dataset_of_ones_own_may_give_one_array_and_without_a_size_one_batch():
    class Squares(data.Dataset):
        def __len__(self):
            return 3

        def __getitem__(self, index):
            return np.full(2, index**2)

    loader = data.DataLoader(Squares(), batch_size=None)
    ((batch,),) = loader
    assert len(loader) == 1 and batch.numpy().tolist() == [[0, 0], [1, 1], [4, 4]]
    Squares.__getitem__ = lambda self, index: [index, index**2]
    for batch in data.DataLoader(Squares(), batch_size=None):
        assert [part.numpy().tolist() for part in batch] == [[0, 1, 2], [0, 1, 4]]
    Squares.__getitem__ = lambda self, index: [index] * (3 - index)
    with pytest.raises(ValueError, match="argument 2 is shorter"):  # not cut to the shortest
        next(iter(data.DataLoader(Squares(), batch_size=2)))
    empty = data.DataLoader(data.NDArrayDataset(np.zeros((0, 2))), batch_size=None)
    assert len(empty) == 0 and [*empty] == []


def test_shuffle_is_one_numpy_shuffle():
    dataset = data.NDArrayDataset(np.arange(10.0))
    loader = data.DataLoader(dataset, batch_size=3, shuffle=True)
    np.random.seed(4)
    got = [np.concatenate([b[0].numpy() for b in loader]) for _ in range(2)]
    np.random.seed(4)
    for values in got:
        order = np.arange(10)
        np.random.shuffle(order)
        np.testing.assert_array_equal(values, order)
    assert not np.array_equal(*got)


def test_sizes_that_cannot_be():
    with pytest.raises(ValueError):
        data.DataLoader(data.NDArrayDataset(np.ones(3)), batch_size=0)
    for count in 2, 4:
        with pytest.raises(ValueError, match=f"array 1 has {count} samples, but the first has 3"):
            data.NDArrayDataset(np.ones((3, 2)), np.ones(count))
    with pytest.raises(ValueError, match="needs one array or more"):
        data.NDArrayDataset()


def test_a_subclass_of_ndarraydataset_gives_its_own_samples():
    class Turned(data.NDArrayDataset):
        def __getitem__(self, index):
            x, y = super().__getitem__(index)
            return (x[::-1], y) if index % 2 else (x, y)

    x, y = np.arange(8.0).reshape(4, 2), np.arange(4)
    batches = list(data.DataLoader(Turned(x, y), batch_size=3))
    np.testing.assert_array_equal(batches[0][0].numpy(), [[0, 1], [3, 2], [4, 5]])
    np.testing.assert_array_equal(batches[1][0].numpy(), [[7, 6]])
    assert [batch.numpy().tolist() for _, batch in batches] == [[0, 1, 2], [3]]


def test_samples_that_are_dicts_are_named():
    class Named(data.Dataset):
        def __len__(self):
            return 3

        def __getitem__(self, index):
            return {"x": np.ones(2), "y": index}

    with pytest.raises(TypeError, match=r"DataLoader: Named\[0\] must be a tuple of arrays"):
        next(iter(data.DataLoader(Named(), batch_size=2)))
