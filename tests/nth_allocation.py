"""The n-th allocation fails, for each n in turn: in forward, backward, step, save, load, generate.

    python tests/nth_allocation.py DEVICE [OPERATION...] [--every N] [--first N]

Each operation runs again and again on a small model, with its first allocation in needle's C code
failing, its second, ... until none is left to fail; then with that and all after it failing, which
is what a full machine does. `--every N` takes each N-th.

After each failure: MemoryError or CudaError was raised, or the result is the right one all the same
(CPU and CUDA ask again when they have given back what they keep); nothing is left in memory, open,
or on the disk; parameters and the optimizer's state are those before or those after a whole step;
and the operation, not disturbed, gives the bits that it always gave. Of an operation that makes
few allocations N is less: two of them fail at least, each alone and with all after it.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import pickle
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path += [str(ROOT), str(ROOT / "tests")]

import programs  # noqa: E402

programs.need_pytest()

import numpy as np  # noqa: E402
from harness import bits, device_of  # noqa: E402

import needle as ndl  # noqa: E402
from needle import _C, nn, optim  # noqa: E402
from needle.models.pythia import Pythia, PythiaConfig  # noqa: E402

FOREVER = 1 << 40
TRIES = 5  # until what is kept for later, in caches, is there
# The logits are beyond 64 KiB, from which on the CPU keeps blocks.
CONFIG = PythiaConfig(vocab_size=600, hidden_size=16, num_layers=1, num_heads=2, max_seq_len=64)


class Wrong(AssertionError):
    """A failed allocation did more than raise."""


# ---- failing ------------------------------------------------------------------------------------


class Injector:
    """csrc/nth_allocation.c, compiled and at work in this process."""

    def __init__(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            made = Path(folder) / "nth_allocation.so"
            source = ROOT / "tests" / "csrc" / "nth_allocation.c"
            command = [*os.environ.get("CC", "cc").split(), "-std=gnu17", "-O1", "-fPIC", "-Wall"]
            command += ["-Wextra", "-Werror", "-shared", str(source), "-ldl"]
            subprocess.run([*command, "-o", str(made)], check=True)
            self.functions = ctypes.PyDLL(str(made))
        self.functions.run.restype = ctypes.py_object
        self.functions.run.argtypes = [ctypes.py_object, ctypes.c_long, ctypes.c_long]
        self.functions.calls_seen.restype = self.functions.calls_failed.restype = ctypes.c_long
        handle = ctypes.c_void_p(ctypes.CDLL(_C.__file__)._handle)
        if self.functions.replace_imports(handle) <= 0:
            raise Wrong(f"{_C.__file__}: none of its imported functions could be replaced")

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


# ---- what is done -------------------------------------------------------------------------------


class Bench:
    """A model, its optimizer and a batch, which can be brought back to where they began."""

    def __init__(self, device: ndl.Device, make: Callable[[nn.Module], Any]) -> None:
        self.device = device
        np.random.seed(0)
        self.model = Pythia(CONFIG, device=device)
        self.optimizer = make(self.model)
        ids = np.random.default_rng(0).integers(0, CONFIG.vocab_size, (2, 33))
        self.batch = ids[:, :-1].astype(np.int32), ids[:, 1:].astype(np.int32)
        self.fit(1)  # moments that are not zero
        state = self.optimizer.state_dict()
        self._model = {name: a.copy() for name, a in self.model.state_dict().items()}
        self._optimizer = state | {"arrays": {n: a.copy() for n, a in state["arrays"].items()}}

    def restore(self) -> None:
        self.model.load_state_dict(self._model)
        self.optimizer.load_state_dict(self._optimizer)
        self.optimizer.reset_grad()
        self.device.empty_cache()
        ndl.cpu().empty_cache()
        np.random.seed(0)

    def fit(self, steps: int) -> list[float]:
        batches = [self.batch] * steps
        return ndl.fit(self.model, batches, self.optimizer, max_norm=1.0, progress=False)

    def state(self) -> bytes:
        return state_of(self.model, self.optimizer)


def state_of(model: nn.Module, optimizer: optim.Optimizer) -> bytes:
    """Every bit of the parameters and of what the optimizer keeps, and its steps."""
    kept = optimizer.state_dict()
    arrays = {**model.state_dict(), **kept["arrays"]}
    return b"".join(bits(a).tobytes() for _, a in sorted(arrays.items())) + b"%d" % kept["step"]


class Operation:
    """Something that is done on a bench. `prepare` brings everything to the beginning, `run` is
    what fails, `result` tells what a run gave, `release` drops it."""

    flat, kind = True, optim.AdamW

    def __init__(self, device: str, folder: Path) -> None:
        self.device, self.folder = device_of(device), folder
        self.bench = Bench(self.device, lambda model: self.kind(self._params(model), lr=0.01))
        self.states = {self.bench.state()}  # that a failure may leave
        self.prepare()
        self.run()
        self.expected = self.result()
        self.release()

    def _params(self, model: nn.Module) -> Any:
        return nn.flatten_parameters(model) if self.flat else model.parameters()

    def prepare(self) -> None:
        self.bench.restore()

    def run(self) -> None:
        raise NotImplementedError

    def result(self) -> Any:
        return self.bench.state()

    def check(self) -> None:
        """Check the state after a failure."""
        if self.bench.state() not in self.states:
            raise Wrong("parameters or the optimizer's state were left half changed")

    def release(self) -> None:
        pass


class Forward(Operation):
    def run(self) -> None:
        logits, loss = self.bench.model(*self.bench.batch)
        self.got = bits(logits.cached_data).tobytes(), float(loss.item())

    def result(self) -> Any:
        return self.got


class Backward(Operation):
    def prepare(self) -> None:
        super().prepare()
        self.loss = self.bench.model(*self.bench.batch)[1]

    def run(self) -> None:
        self.loss.backward()

    def result(self) -> Any:
        return b"".join(bits(p.grad.cached_data).tobytes() for p in self.bench.model.parameters())

    def release(self) -> None:
        del self.loss
        self.bench.optimizer.reset_grad()


class BackwardOfAList(Backward):
    flat = False


class Step(Backward):
    """Clipping and the optimizer's step."""

    def __init__(self, device: str, folder: Path) -> None:
        super().__init__(device, folder)
        self.states.add(self.expected)

    def prepare(self) -> None:
        super().prepare()
        self.loss.backward()

    def run(self) -> None:
        _, scale = optim.grad_norm(self.bench.optimizer.flat, 1.0)
        self.bench.optimizer.step(scale)

    def result(self) -> Any:
        return self.bench.state()


class StepOfAList(Step):
    flat = False

    def run(self) -> None:
        optim.clip_grad_norm(self.bench.optimizer.params, 1.0)
        self.bench.optimizer.step()


class StepOfAdam(StepOfAList):
    kind = optim.Adam


class StepOfSGD(StepOfAList):
    @staticmethod
    def kind(params: Any, lr: float) -> optim.Optimizer:
        return optim.SGD(params, lr=lr, momentum=0.9)


class Fit(Operation):
    """Two steps; a failure leaves none, one or both of them."""

    def __init__(self, device: str, folder: Path) -> None:
        super().__init__(device, folder)
        self.states.add(self.expected)
        self.prepare()
        self.bench.fit(1)
        self.states.add(self.bench.state())

    def run(self) -> None:
        self.bench.fit(2)


class Save(Operation):
    """Over a file that is there: it stays, or is replaced whole."""

    def __init__(self, device: str, folder: Path) -> None:
        self.path = folder / "saved.safetensors"
        super().__init__(device, folder)

    def prepare(self) -> None:
        super().prepare()
        self.path.write_bytes(b"what was there")

    def run(self) -> None:
        ndl.save(self.bench.model, self.bench.optimizer, self.path)

    def result(self) -> Any:
        return self.path.read_bytes()

    def check(self) -> None:
        super().check()
        if self.result() not in (b"what was there", self.expected):
            raise Wrong("the file is neither the old one nor the new one")


class Load(Operation):
    """Into a module and an optimizer that are there: as they were, or whole."""

    def __init__(self, device: str, folder: Path) -> None:
        self.path = folder / "loaded.safetensors"
        super().__init__(device, folder)
        self.states.add(self.expected)

    def prepare(self) -> None:
        if not self.path.exists():
            self.bench.fit(1)
            ndl.save(self.bench.model, self.bench.optimizer, self.path)
        super().prepare()

    def run(self) -> None:
        ndl.load(self.path, self.bench.model, self.bench.optimizer)


class LoadAnew(Load):
    """A model and an optimizer that the file describes."""

    def run(self) -> None:
        self.made = ndl.load_checkpoint(self.path, self.bench.device)[:2]

    def result(self) -> Any:
        return state_of(*self.made)

    def release(self) -> None:
        self.made = None


class Generate(Operation):
    """Generation with a cache (recorded on CUDA), drawn, and with hooks and no cache."""

    def run(self) -> None:
        generate, prompts = self.bench.model.generate, [[1, 2, 3, 4], [5, 6]]
        self.got = [
            *generate(prompts, 6, temperature=0.0),
            *generate(prompts[0], 3, temperature=0.8, top_k=20, seed=1)[None],
        ]

    def result(self) -> Any:
        return [row.tolist() for row in self.got]


class Calls(Operation):
    """Calls outside of a training step: arrays in and out, views, pickles, buffers, events. Sizes
    grow from run to run, so that nothing which is kept for a next call of the size is there."""

    size = 5000

    def run(self) -> None:
        device, size = self.bench.device, self.size
        Calls.size += 1024
        x = _C.array(np.arange(12.0).reshape(3, 4), device=device)
        numbers = [
            x[1:, ::2].permute((1, 0)).numpy(),
            x.reshape((2, 6)).flat[3:5].numpy(),
            np.array(x),
            np.array((x.astype("bfloat16") @ x.permute((1, 0)).astype("bfloat16")).tolist()),
            pickle.loads(pickle.dumps(x)).numpy(),
            _C.from_dlpack(x).numpy(),
            x.pad(((1, 0), (0, 2))).mean(axis=1).numpy(),
            (x > np.float64(3)).numpy(),
            np.array(x.item() if x.size == 1 else x.max().item()),
        ]
        x[0] = [4, 3, 2, 1]
        x[1:, 1] = np.arange(2.0)
        x.flat[2] = 7
        x += 1
        numbers.append(x.numpy())
        if device.is_host:
            numbers.append(np.asarray(memoryview(x)) + 0)
            q, _, scale = _C.fp8_quantize(x, 0, None, 0, None, None, None, 0.0, None)
            c = _C.empty((3, 3), "bfloat16", device)
            _C.fp8_matmul(q, 0, scale, q, 0, scale, None, None, 0, c)
            numbers.append(c.numpy())
            q = _C.array(np.zeros((16, 16)), "uint8", device)
            b = _C.array(np.zeros(16), "float32", device)
            *some, dgelu = _C.fp8_linear_gelu_fwd(q, scale, q, scale, b, scale, 0)
            some += _C.fp8_linear_gelu_bwd(q, scale, q, scale, dgelu, 1.0, b)
            numbers += [part.numpy() for part in some]
        buffer = _C.PinnedBuffer(4 * size, device)
        np.frombuffer(buffer, np.float32)[:] = 2
        sent = buffer.send((size,), "float32")
        buffer.wait()
        began, ended = _C.Event(device), _C.Event(device)
        began.record()
        total = _C.AsyncCopy(sent.broadcast_to((3, size)).sum())
        copied = _C.AsyncCopy(sent)
        ended.record()
        assert began.elapsed(ended) >= 0
        numbers += [np.array(float(total.wait()) / size), copied.wait().numpy().sum() / size]
        assert "NDArray" in repr(x) and str(device)
        self.got = [a.tolist() for a in numbers]

    def result(self) -> Any:
        return self.got


class FromNothing(Operation):
    """A model is made, trained and asked. On CUDA each time on a context in which nothing has been
    used before."""

    def __init__(self, device: str, folder: Path) -> None:
        self.device, self.folder = device_of(device), folder
        self.prepare()
        self.run()
        self.expected = self.result()
        self.release()

    def prepare(self) -> None:
        if not self.device.is_host:
            ndl.cuda_reset()
        np.random.seed(0)

    def run(self) -> None:
        model = Pythia(CONFIG, device=self.device)
        optimizer = optim.AdamW(nn.flatten_parameters(model), lr=0.01)
        ids = np.arange(66, dtype=np.int32).reshape(2, 33)
        losses = ndl.fit(model, [(ids[:, :-1], ids[:, 1:])], optimizer, progress=False)
        self.got = losses, model.generate([1, 2, 3], 6, temperature=0.0).tolist()

    def result(self) -> Any:
        return self.got

    def check(self) -> None:
        pass


OPERATIONS = {
    kind.__name__: kind
    for kind in (
        *(Forward, Backward, BackwardOfAList, Step, StepOfAList, StepOfAdam, StepOfSGD),
        *(Fit, Save, Load, LoadAnew, Generate, Calls, FromNothing),
    )
}


# ---- each n -------------------------------------------------------------------------------------


def usage(folder: Path, device) -> dict[str, Any]:
    gc.collect()
    return {
        "bytes on the CPU": ndl.cpu().memory_stats()["live_bytes"],
        "bytes on the device": device.memory_stats()["live_bytes"],
        "objects": len(gc.get_objects()),
        "open files": len(os.listdir("/proc/self/fd")),
        "files": len(os.listdir(folder)),
    }


def one(operation: Operation, injector: Injector, number: int, count: int) -> int:
    """Count the allocations that failed; Wrong if one did more than fail."""
    operation.prepare()
    failed, error = injector.attempt(operation.run, number, count)
    if error is not None:
        is_allowed = issubclass(error[0], (MemoryError, ndl.CudaError))
        if not is_allowed or issubclass(error[0], ndl.CudaFatalError):
            raise Wrong(f"it raised {error[0].__name__}: {error[1]}")
        operation.check()
    elif operation.result() != operation.expected:
        raise Wrong("no error was raised, and the result is wrong")
    operation.release()
    if failed:
        operation.prepare()
        operation.run()
        if operation.result() != operation.expected:
            raise Wrong("the next time, undisturbed, gave another result")
        operation.release()
    return failed


def sweep(
    operation: Operation, injector: Injector, first: int = 1, every: int = 1
) -> tuple[int, int]:
    """(the last call that failed, how often one did)."""
    device, folder = operation.device, operation.folder
    tried = last = 0
    for count in (1, FOREVER):
        number, failed = first, 1
        while failed:
            try:
                for _ in range(TRIES):  # what grows each time is lost; else it is kept for later
                    before = usage(folder, device)
                    failed = one(operation, injector, number, count)
                    after = usage(folder, device)
                    grown = [what for what in before if after[what] > before[what]]
                    if not grown:
                        break
                else:
                    raise Wrong(f"it leaks {', '.join(grown)}: {before} -> {after}")
            except Wrong as error:
                which = "alone" if count == 1 else "and all after it"
                raise Wrong(
                    f"{type(operation).__name__} on {device}: allocation {number}, {which}, "
                    f"fails: {error}"
                ) from None
            if failed:
                tried, last = tried + 1, number
            number += every
    return last, tried


def undisturbed(operation: Operation, injector: Injector) -> int:
    """Count the allocations of the operation if none fails."""
    operation.prepare()
    _, error = injector.attempt(operation.run, FOREVER, 1)
    if error is not None:
        raise Wrong(f"{type(operation).__name__}: undisturbed it raised {error}")
    operation.release()
    return injector.functions.calls_seen()


def sweeps(device: str, names: list[str], first: int, every: int) -> None:
    """Sweep the named operations, print a line each."""
    injector = Injector()
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        for name in names:
            operation = OPERATIONS[name](device, folder)
            gc.collect()
            gc.freeze()
            kept = reserved(operation.device)
            step = min(every, max(undisturbed(operation, injector) // 2, 1))
            start = (first - 1) % step + 1
            last, tried = sweep(operation, injector, start, step)
            calls = undisturbed(operation, injector)  # caches are filled by now
            due = 2 * len(range(start, calls + 1, step))
            if tried != due or not calls - step < last <= calls:
                raise Wrong(f"{name}: of {calls} calls {last} failed last, and {tried}, not {due}")
            if reserved(operation.device) > kept:
                raise Wrong(f"{name} on {device}: the pool holds more than before")
            print(f"{name:16} {device}: {calls} calls, {tried} failures", flush=True)
            del operation
            gc.unfreeze()


def reserved(device) -> int:
    """Bytes in the pool when it has given back unused memory."""
    device.synchronize()
    device.empty_cache()
    return device.memory_stats()["reserved_bytes"]


def main() -> int:
    top = argparse.ArgumentParser(description=programs.first_paragraph(__doc__))
    top.add_argument("device", choices=["cpu", "cuda"])
    top.add_argument("operations", nargs="*", metavar="OPERATION", help=", ".join(OPERATIONS))
    top.add_argument("--every", type=int, default=1, metavar="N")
    top.add_argument("--first", type=int, default=1, metavar="N")
    args = top.parse_args()
    try:
        sweeps(args.device, args.operations or list(OPERATIONS), args.first, args.every)
    except Wrong as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
