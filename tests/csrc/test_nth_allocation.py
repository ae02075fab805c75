"""The n-th allocation of needle's C code fails, alone and with all after it, as on a full machine.

After each failure MemoryError or CudaError was raised, or the result is the right one all the same;
nothing is left in memory, open, or on the disk; parameters and the optimizer's state are those
before or those after a whole step; and the operation, undisturbed, gives the bits of before.
"""

import ctypes
import gc
import os
import random
import tempfile
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness import bits, shared_library
from test_leaks import exchange

import needle as ndl
from needle import _C, nn, optim
from needle.models.pythia import Pythia, PythiaConfig

pytestmark = pytest.mark.slow

PLACES = 60  # of an operation's allocations that fail in one run of a test
TRIES = 5  # until what is kept for later, in caches, is there
# The logits are beyond 64 KiB, from which on the CPU keeps blocks.
CONFIG = PythiaConfig(vocab_size=600, hidden_size=16, num_layers=1, num_heads=2, max_seq_len=64)
KEPT = b"what was there"
FOREVER = 1 << 40


class Injector:
    """Makes allocations of needle's core fail in one call of this process."""

    def __init__(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            made = Path(folder) / "nth_allocation.so"
            source = Path(__file__).with_name("nth_allocation.c").read_text()
            shared_library(source, made, "-ldl")
            self.functions = ctypes.PyDLL(str(made))
        self.functions.run.restype = ctypes.py_object
        self.functions.run.argtypes = [ctypes.py_object, ctypes.c_long, ctypes.c_long]
        for name in ("calls_seen", "calls_failed", "blocks_held"):
            getattr(self.functions, name).restype = ctypes.c_long
        handle = ctypes.c_void_p(ctypes.CDLL(_C.__file__)._handle)
        assert self.functions.replace_imports(handle) > 0, "no imported function was replaced"

    def attempt(
        self, call: Callable[[], Any], number: int, count: int
    ) -> tuple[int, tuple[type, str] | None]:
        """(how many allocations failed, the error that was raised), of call() with its allocations
        `number` to `number + count - 1` failing. In a thread of its own, which has no scratch
        memory yet."""
        outcome: list[tuple[type, str] | None] = []

        def body() -> None:
            try:
                self.functions.run(call, number, count)
                outcome.append(None)
            except BaseException as error:  # whatever it is, the caller judges
                outcome.append((type(error), str(error)))

        thread = threading.Thread(target=body)
        thread.start()
        thread.join()
        return self.functions.calls_failed(), outcome[0]


def state_of(model, optimizer) -> bytes:
    """Every bit of the parameters and of what the optimizer keeps, and its steps."""
    kept = optimizer.state_dict()
    arrays = {**model.state_dict(), **kept["arrays"]}
    return b"".join(bits(a).tobytes() for _, a in sorted(arrays.items())) + b"%d" % kept["step"]


class Bench:
    """A model, its optimizer, a batch and a file, which can be brought back to where they began."""

    def __init__(self, device, folder, make=optim.AdamW, flat=True) -> None:
        self.device, self.path = device, folder / "saved.safetensors"
        np.random.seed(0)
        self.model = Pythia(CONFIG, device=device)
        parameters = nn.flatten_parameters(self.model) if flat else self.model.parameters()
        self.optimizer = make(parameters, lr=0.01)
        ids = np.random.default_rng(0).integers(0, CONFIG.vocab_size, (2, 33))
        self.batch = ids[:, :-1].astype(np.int32), ids[:, 1:].astype(np.int32)
        self.fit()  # moments that are not zero
        state = self.optimizer.state_dict()
        self._model = {name: a.copy() for name, a in self.model.state_dict().items()}
        self._optimizer = state | {"arrays": {n: a.copy() for n, a in state["arrays"].items()}}
        self.fit()
        self.save()
        self.saved = self.path.read_bytes()
        self.restore()

    def restore(self) -> None:
        self.model.load_state_dict(self._model)
        self.optimizer.load_state_dict(self._optimizer)
        self.optimizer.reset_grad()
        np.random.seed(0)

    def state(self) -> bytes:
        return state_of(self.model, self.optimizer)

    def fit(self, steps: int = 1):
        batches = [self.batch] * steps
        more = {"steps": steps, "max_norm": 1.0, "progress": False}
        ndl.fit(self.model, batches, self.optimizer, **more)
        return self.state

    def save(self):
        ndl.save(self.model, self.optimizer, self.path)
        return self.path.read_bytes

    def load(self):
        ndl.load(self.path, self.model, self.optimizer)
        return self.state

    def load_anew(self):
        return partial(state_of, *ndl.load_checkpoint(self.path, self.device)[:2])

    def generate(self):
        """With a cache (recorded on CUDA), and drawn."""
        prompts = [[1, 2, 3, 4], [5, 6]]
        greedy = self.model.generate(prompts, 6, temperature=0.0)
        drawn = self.model.generate(prompts[0], 3, temperature=0.8, top_k=20, seed=1)
        return lambda: [row.tolist() for row in (*greedy, drawn)]

    def from_nothing(self):
        """A model is made, trained and asked."""
        model = Pythia(CONFIG, device=self.device)
        optimizer = optim.AdamW(nn.flatten_parameters(model), lr=0.01)
        ndl.fit(model, [self.batch], optimizer, progress=False)
        tokens = model.generate([1, 2, 3], 6, temperature=0.0)
        return lambda: (state_of(model, optimizer), tokens.tolist())

    def exchange(self):
        found = exchange(np.arange(42, dtype=np.float32).reshape(6, 7), self.device)
        return lambda: found


OPTIMIZERS = {  # each with flat parameters and with a list of them
    "AdamW": optim.AdamW,
    "Adam": optim.Adam,
    "SGD": lambda parameters, lr: optim.SGD(parameters, lr=lr, momentum=0.9),
}
OTHERS = ["save", "load", "load_anew", "generate", "from_nothing", "exchange"]


@pytest.fixture(scope="session")
def injector():
    return Injector()


def usage(injector: Injector, device, folder) -> dict[str, int]:
    gc.collect()
    device.synchronize()
    device.empty_cache()
    on_device, on_host = device.memory_stats(), ndl.cpu().memory_stats()
    return {
        "bytes on the CPU": on_host["live_bytes"],
        "bytes on the device": on_device["live_bytes"],
        "bytes of the pool": on_device["reserved_bytes"],
        "blocks of the core": injector.functions.blocks_held(),
        "objects": len(gc.get_objects()),
        "open files": len(os.listdir("/proc/self/fd")),
        "files": len(os.listdir(folder)),
    }


def sweep(injector: Injector, bench: Bench, run) -> int:
    """Count the failures of allocations 1, 1 + n, ... of run(), which returns the function that
    reads its result. n is such that PLACES of them fail."""
    folder = bench.path.parent

    def prepare() -> None:
        bench.restore()
        bench.path.write_bytes(KEPT if run == bench.save else bench.saved)

    def undisturbed():
        prepare()
        return run()()

    def attempt(number: int, count: int) -> int:
        prepare()
        results = []
        failed, error = injector.attempt(lambda: results.append(run()), number, count)
        if error is None:
            assert results[0]() == expected, "no error was raised, and the result is wrong"
        else:
            assert issubclass(error[0], (MemoryError, ndl.CudaError)), error
            assert not issubclass(error[0], ndl.CudaFatalError), error
            if run != bench.from_nothing:
                assert bench.state() in states, "a step or a load was left half done"
            assert bench.path.read_bytes() in (KEPT, bench.saved, expected), "half a file"
        assert not failed or undisturbed() == expected, "undisturbed, the next result is another"
        return failed

    gc.collect()
    gc.freeze()  # else some hundred collections look through what all tests before have left
    expected, states = undisturbed(), set()
    for steps in (0, 1, 2):
        bench.restore()
        bench.fit(steps)
        states.add(bench.state())
    prepare()
    assert injector.attempt(run, FOREVER, 1) == (0, None)
    every = max(1, injector.functions.calls_seen() // PLACES)
    first, tried = random.randint(1, every), 0
    for count in (1, FOREVER):
        number, failed = first, 1
        while failed:
            for _ in range(TRIES):  # what grows each time is lost; else it is kept for later
                before = usage(injector, bench.device, folder)
                failed = attempt(number, count)
                after = usage(injector, bench.device, folder)
                grown = [what for what in before if after[what] > before[what]]
                if not grown:
                    break
            place = f"allocation {number}, {count} from it on"
            assert not grown, f"{place}: more {grown}: {before} -> {after}"
            tried += failed > 0
            number += every
    return tried


@pytest.mark.parametrize("flat", [True, False], ids=["flat", "list"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_step_without_memory_is_whole_or_undone(injector, optimizer, flat, device, tmp_path):
    """Forward, backward, clipping and the optimizer's step, twice."""
    bench = Bench(device, tmp_path, OPTIMIZERS[optimizer], flat)
    assert sweep(injector, bench, partial(bench.fit, 2)) > PLACES


@pytest.mark.parametrize("operation", OTHERS)
def test_operation_without_memory_raises_and_leaves_nothing(injector, operation, device, tmp_path):
    bench = Bench(device, tmp_path)
    tried = sweep(injector, bench, getattr(bench, operation))
    # To be saved contiguous arrays are copied by NumPy's memory alone.
    assert tried > 0 or operation == "save"
