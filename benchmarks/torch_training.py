"""Baseline of train_step.py: the training step of torch_pythia.py, in the mode that is fastest
here.

A mode is how the model runs, and in what its weights are:

    eager       as it stands
    compile     torch.compile
    graphs      the same as compile, recorded as CUDA graphs (mode="reduce-overhead")
    ...-bf16    weights, gradients and AdamW's moments in bfloat16, nothing in float32: less work
                than needle's step, which keeps float32 beside the weights; else the weights are
                float32, and a step in bfloat16 runs under autocast
"""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Callable

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch_pythia import TorchPythia

from needle.models.pythia import PythiaConfig

COMPILED = {"compile": "default", "graphs": "reduce-overhead"}


def modes(dtype: str, graphs: bool) -> list[str]:
    """Modes that may be the fastest. graphs: try recorded steps, as needle records its own."""
    names = ["compile", "graphs"] if graphs else ["compile"]
    return names + [f"{name}-bf16" for name in names if dtype == "bfloat16"]


class TorchSide:
    """Steps of the baseline in one mode, as those of train_step.NeedleSide."""

    def __init__(
        self,
        config: PythiaConfig,
        device: str,
        dtype: str,
        tokens: np.ndarray,
        shape: tuple[int, int],
        mode: str,
    ) -> None:
        how, _, low = mode.partition("-")
        self.name = f"torch {torch.__version__.partition('+')[0]}, {mode}"
        self.on_gpu, self.device = device == "cuda", torch.device(device)
        self.graphs = how == "graphs"
        self.autocast = dtype == "bfloat16" and not low
        self.cudnn = self.on_gpu and dtype == "bfloat16"
        if not self.on_gpu:
            threads = os.environ.get("OMP_NUM_THREADS") or len(os.sched_getaffinity(0))
            torch.set_num_threads(int(threads))
        torch.manual_seed(0)
        sizes = config.vocab_size, config.hidden_size, config.num_layers, config.num_heads
        self.model = TorchPythia(*sizes, shape[1])
        self.model.to(self.device, torch.bfloat16 if low else torch.float32)
        self.optimizer = self.model.optimizer(1e-3)
        self.forward = self.model
        if how in COMPILED:
            self.forward = torch.compile(self.model, mode=COMPILED[how], dynamic=False)
        # (batches, ids and targets, B, T): a batch is one copy out of pinned memory.
        pairs = [part.reshape(-1, *shape) for part in (tokens[:-1], tokens[1:])]
        self.batches = torch.from_numpy(np.stack(pairs, axis=1).astype(np.int64))
        if self.on_gpu:
            self.batches = self.batches.pin_memory()
            self.losses = [torch.empty((), pin_memory=True) for _ in range(2)]
            self.read = [torch.cuda.Event() for _ in range(2)]
        self.steps = 0

    def queue(self) -> Callable[[], float]:
        ids, targets = self.batches[self.steps % len(self.batches)].to(
            self.device, non_blocking=True
        )
        self.steps += 1
        if self.graphs:
            torch.compiler.cudagraph_mark_step_begin()
        self.optimizer.zero_grad(set_to_none=True)
        attention = (
            sdpa_kernel(SDPBackend.CUDNN_ATTENTION) if self.cudnn else contextlib.nullcontext()
        )
        with attention, torch.autocast(self.device.type, torch.bfloat16, enabled=self.autocast):
            loss = self.forward(ids, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        if not self.on_gpu:
            return loss.item
        place, read = self.losses[self.steps % 2], self.read[self.steps % 2]
        place.copy_(loss.detach(), non_blocking=True)
        read.record()

        def wait() -> float:
            read.synchronize()
            return place.item()

        return wait

    def synchronize(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize()

    def reset_peak(self) -> None:
        if self.on_gpu:
            torch.cuda.empty_cache()  # of modes tried before
            torch.cuda.reset_peak_memory_stats()

    def peak(self) -> tuple[int, int] | None:
        if not self.on_gpu:
            return None
        return torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()

    def close(self) -> None:
        del self.model, self.optimizer, self.forward, self.batches
        gc.collect()
        if self.on_gpu:
            torch.cuda.empty_cache()


def fastest(
    names: list[str], make: Callable[[str], TorchSide], step_ms: Callable[[TorchSide], float]
) -> TorchSide | None:
    """The fastest of the modes that work here. What was compiled for another batch size goes, so
    that nothing is taken for a shape that changes, and the limit on compiled variants stays far."""
    torch._dynamo.reset()
    best, least = None, float("inf")
    for name in names:
        side = None
        try:
            side = make(name)
            taken = step_ms(side)
        except Exception as error:  # of a compiler, of a backend that has no kernel, of memory
            print(f"torch, {name}: left out: {(str(error).splitlines() or [repr(error)])[0]}")
            taken = float("inf")
        else:
            print(f"{side.name}: {taken:.2f} ms a step at first")
        loser = side
        if taken < least:
            best, least, loser = side, taken, best
        if loser is not None:
            loser.close()
    return best
