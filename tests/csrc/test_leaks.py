"""Device bytes, objects and references return to where they were."""

import gc
import pickle
import sys
from collections import Counter

import numpy as np
import pytest
from gradients import GRADIENTS
from harness import live_bytes
from test_ops import FIRST

import needle as ndl
from needle import _C, Tensor, nn, optim
from needle.models.pythia import Pythia, PythiaConfig
from needle.testing import OPS, call, dtype_of, prepare, to_ndarray

pytestmark = pytest.mark.slow

CONFIG = PythiaConfig(vocab_size=19, hidden_size=16, num_layers=2, num_heads=2, max_seq_len=16)


def kinds() -> Counter:
    """Count the objects of each type that the collector and needle know."""
    gc.collect()
    count = Counter()  # filled by hand: Counter(iterable) asks abstract classes, which remember it
    for o in gc.get_objects():
        count[type(o).__qualname__] += 1
    return count


def leaves_nothing(device, once, times: int, slack: int = 20) -> None:
    """The bytes of the device and the objects are as many after so many calls of once()."""
    once(), kinds(), once()  # caches fill, Python's own too
    before, objects = live_bytes(device), kinds()
    for _ in range(times):
        once()
    assert live_bytes(device) == before
    grown = {kind: n - objects[kind] for kind, n in kinds().items() if n - objects[kind] > slack}
    assert not grown


def counts(operands: dict) -> dict:
    """References to each array; numbers and None are everybody's."""
    return {name: sys.getrefcount(x) for name, x in operands.items() if hasattr(x, "shape")}


def train(dtype: str, flat: bool, device) -> None:
    model = Pythia(CONFIG, device=device, dtype=dtype)
    parameters = nn.flatten_parameters(model) if flat else model.parameters()
    optimizer = optim.AdamW(parameters, lr=1e-3)
    ids = np.random.default_rng(0).integers(0, CONFIG.vocab_size, (2, 9))

    def step() -> None:
        _, loss = model(ids[:, :-1], ids[:, 1:])
        loss.backward()
        optim.clip_grad_norm(optimizer.flat or optimizer.params, 1.0)
        optimizer.step()
        optimizer.reset_grad()

    leaves_nothing(device, step, 100)
    if flat:
        before = live_bytes(device)
        gc.disable()
        try:
            for _ in range(5):
                step()
            assert device.memory_stats()["live_bytes"] == before
        finally:
            gc.enable()


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_hundred_training_steps(dtype, flat, device):
    """Flattened, a step's memory goes back by reference counting alone."""
    outside = live_bytes(device)
    train(dtype, flat, device)
    assert live_bytes(device) == outside


def test_every_op_and_after_an_exception(device):
    """Ops refuse a wrong last operand after they have inspected and copied the others."""
    gc.collect()
    for op, case in FIRST.items():
        values = prepare(case, "float32")
        made = dict(values)
        arrays = [o for o in OPS[op].inputs if o.is_array and values[o.name] is not None]
        for o in arrays:
            made[o.name] = to_ndarray(values[o.name], dtype_of(o, "float32"), device, "transposed")
        last = arrays[-1].name
        made[last] = made[last].astype("uint16")  # which no operand of the table asks for

        def refused(op=op, made=made) -> None:
            with pytest.raises(TypeError):
                getattr(_C, op)(**made)

        def called(case=case, values=values) -> None:
            call(case, values, "float32", device)

        for once, operands in ((called, values), (refused, made if len(arrays) > 1 else None)):
            if operands is not None:
                once()
                before, references = device.memory_stats()["live_bytes"], counts(operands)
                for _ in range(20):
                    once()
                assert device.memory_stats()["live_bytes"] == before, op
                assert references == counts(operands), op


def test_every_differentiable_op(device):
    def once() -> None:
        for case in GRADIENTS:
            tensors = [
                Tensor(make(np.random.default_rng(0)), device=device) for make in case.inputs
            ]
            case.op(ndl.ops, *tensors).backward()

    leaves_nothing(device, once, 3)


class Sub(ndl.NDArray):
    pass


def exchange(host: np.ndarray, device) -> list:
    """Calls outside of a training step, and what they give: arrays in and out, views, wrong calls,
    pickles, buffers, events, capsules that no library takes, a cycle that the collector finds."""
    array = _C.array(host, device=device)
    found = [
        array[1:, ::-1].permute((1, 0)).broadcast_to((3, 7, 5)).numpy(),
        array.reshape((-1,)).flat[3:5].numpy(),
        array.pad(((1, 0), (0, 2))).mean(axis=1).numpy(),
        (array.astype("bfloat16") @ array.permute((1, 0)).astype("bfloat16")).numpy(),
        pickle.loads(pickle.dumps(array)).numpy(),
        _C.from_dlpack(array).numpy(),
        _C.from_dlpack(host)[1:].numpy(),
        (array > np.float64(3)).numpy(),
        _C.AsyncCopy(array.broadcast_to((3, *host.shape)).sum()).wait().numpy(),
    ]
    array[0] = array[5]
    array[1:3, 1] = np.arange(2.0)
    _C.assign(array[1:], array[:-1])  # which overlap
    array.flat[3] += 1
    found += [array.numpy(), *([np.asarray(memoryview(array)) * 2] if device.is_host else [])]
    for wrong in (
        lambda a: a[9],
        lambda a: a.reshape((5,)),
        lambda a: a + "text",
        lambda a: a.permute((0,)),
        lambda a: a.reshape([6, "7"]),
    ):
        with pytest.raises((IndexError, ValueError, TypeError)):
            wrong(array)
    buffer = _C.PinnedBuffer(4 * host.size, device)
    np.frombuffer(buffer, np.float32)[:] = 2
    began, ended = _C.Event(device), _C.Event(device)
    began.record()
    found.append(buffer.send((host.size,), "float32").numpy())
    ended.record()
    _C.AsyncCopy(array)  # dropped on the way
    assert began.elapsed(ended) >= 0 and "NDArray" in repr(array) and str(device)
    for words in ({}, {"max_version": (1, 0)}, {"copy": True}):
        array.__dlpack__(**words)
    array = Sub(np.ones(1000), device=device)
    array.myself = array
    return [x.tolist() for x in found]


def test_views_indexing_and_exchange(device):
    host = np.arange(42, dtype=np.float32).reshape(6, 7)
    references, on_host = sys.getrefcount(host), live_bytes(ndl.cpu())
    leaves_nothing(device, lambda: exchange(host, device), 50, slack=4)
    assert live_bytes(ndl.cpu()) == on_host and sys.getrefcount(host) == references


def test_an_object_lets_go_of_its_type():
    for make in (
        _C.Event,
        lambda: _C.PinnedBuffer(8),
        lambda: _C.AsyncCopy(_C.array(1.0)),
        lambda: _C.array(1.0),
        lambda: _C.array(1.0)._handle,
    ):
        kind = type(make())
        references = sys.getrefcount(kind)
        for _ in range(20):
            make()
        assert sys.getrefcount(kind) == references, kind
