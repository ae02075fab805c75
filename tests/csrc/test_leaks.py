"""Device bytes, objects and references return to where they were."""

import gc
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


def grown(before: Counter, after: Counter, slack: int) -> dict:
    return {kind: n - before[kind] for kind, n in after.items() if n - before[kind] > slack}


def counts(operands: dict) -> dict:
    """References to each array; numbers and None are everybody's."""
    return {name: sys.getrefcount(x) for name, x in operands.items() if hasattr(x, "shape")}


def train(model, optimizer, steps: int) -> None:
    ids = np.random.default_rng(0).integers(0, CONFIG.vocab_size, (2, 9))
    for _ in range(steps):
        optimizer.reset_grad()
        _, loss = model(ids[:, :-1], ids[:, 1:])
        loss.backward()
        optim.clip_grad_norm(optimizer.flat or optimizer.params, 1.0)
        optimizer.step()
    optimizer.reset_grad()


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_hundred_training_steps(dtype, flat, device):
    outside = live_bytes(device)
    np.random.seed(0)
    model = Pythia(CONFIG, device=device, dtype=dtype)
    parameters = nn.flatten_parameters(model) if flat else model.parameters()
    optimizer = optim.AdamW(parameters, lr=1e-3)
    train(model, optimizer, 3), kinds(), train(model, optimizer, 1)
    before, objects = live_bytes(device), kinds()
    train(model, optimizer, 100)
    assert live_bytes(device) == before
    assert not grown(objects, kinds(), 20)
    del model, optimizer, parameters
    assert live_bytes(device) == outside


def test_a_training_step_needs_no_collector(device):
    """Flattened, a step's memory goes back by reference counting alone."""
    model = Pythia(CONFIG, device=device)
    optimizer = optim.AdamW(nn.flatten_parameters(model), lr=1e-3)
    train(model, optimizer, 1)
    before = live_bytes(device)
    gc.disable()
    try:
        train(model, optimizer, 5)
        assert device.memory_stats()["live_bytes"] == before
    finally:
        gc.enable()


def test_every_op(device):
    gc.collect()
    for op, case in FIRST.items():
        values = prepare(case, "float32")
        call(case, values, "float32", device)
        before = device.memory_stats()["live_bytes"]
        references = counts(values)
        for _ in range(20):
            call(case, values, "float32", device)
        assert device.memory_stats()["live_bytes"] == before, op
        assert references == counts(values), op


def test_every_op_after_an_exception(device):
    """Ops refuse a wrong last operand after they have inspected and copied the others."""
    gc.collect()
    for op, case in FIRST.items():
        arrays = [o.name for o in OPS[op].inputs if o.is_array]
        if len(arrays) < 2:
            continue
        values = prepare(case, "float32")
        made = {}
        for operand in OPS[op].inputs:
            value = values[operand.name]
            if operand.is_array and value is not None:
                value = to_ndarray(value, dtype_of(operand, "float32"), device, "transposed")
            made[operand.name] = value
        last = [name for name in arrays if made[name] is not None][-1]
        made[last] = made[last].astype("uint16")  # which no operand of the table asks for
        before = device.memory_stats()["live_bytes"]
        references = counts(made)
        for _ in range(20):
            with pytest.raises(TypeError):
                getattr(_C, op)(**made)
        assert device.memory_stats()["live_bytes"] == before, op
        assert references == counts(made), op


def test_every_differentiable_op(device):
    def run(case):
        tensors = [Tensor(make(np.random.default_rng(0)), device=device) for make in case.inputs]
        case.op(ndl.ops, *tensors).backward()

    def once() -> None:
        for case in GRADIENTS:
            run(case)

    once(), kinds(), once()  # caches fill, Python's own too
    before, objects = live_bytes(device), kinds()
    for _ in range(3):
        once()
    assert live_bytes(device) == before
    assert not grown(objects, kinds(), 20)


def use_views(array, times: int) -> None:
    for _ in range(times):
        view = array[1:, ::-1].permute((1, 0)).broadcast_to((3, 7, 5))
        view.numpy()
        array[0] = array[5]
        array.flat[3] += 1
        array.reshape((-1,)).sum()
        for wrong in (
            lambda a: a[9],
            lambda a: a.reshape((5,)),
            lambda a: a + "text",
            lambda a: a.permute((0,)),
            lambda a: a.reshape([6, "7"]),
        ):
            with pytest.raises((IndexError, ValueError, TypeError)):
                wrong(array)
        repr(array)


def test_views_and_indexing(device):
    use_views(_C.array(np.ones((6, 7)), device=device), 1)  # fills Python's own caches
    before, objects = live_bytes(device), kinds()
    array = _C.array(np.ones((6, 7)), device=device)
    references = sys.getrefcount(array)
    use_views(array, 50)
    assert sys.getrefcount(array) == references
    del array
    assert live_bytes(device) == before
    assert not grown(objects, kinds(), 4)


def test_exchange_gives_back():
    host = np.arange(12.0, dtype=np.float32).reshape(3, 4)
    before, references = live_bytes(ndl.cpu()), sys.getrefcount(host)
    for _ in range(50):
        array = _C.array(host)
        there = np.from_dlpack(array)
        window = memoryview(array)
        assert there.sum() == np.asarray(window).sum()
        back = _C.from_dlpack(host)
        back = back[1:]
    del array, there, window, back
    assert live_bytes(ndl.cpu()) == before
    assert sys.getrefcount(host) == references
    for version in (None, (1, 0)):
        capsule = _C.array(host).__dlpack__(max_version=version)  # no library takes it
        del capsule
        assert live_bytes(ndl.cpu()) == before


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


def test_a_subclass_and_its_cycle(device):
    """An instance in a reference cycle is found by the collector."""

    class Sub(ndl.NDArray):
        pass

    before = live_bytes(device)
    for _ in range(10):
        array = Sub(np.ones(1000), device=device)
        array.myself = array
    del array
    assert live_bytes(device) == before
