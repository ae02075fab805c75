"""Baseline of train_step.py: GPT-NeoX in plain PyTorch, as a good user would write it, in the mode
that is fastest here.

Scaled-dot-product attention, one projection for q, k and v, biases, parallel residual, the tanh
GELU and AdamW with decay on matrices only: the work of needle.models.Pythia, line for line. A mode
is how the model runs, and in what its weights are:

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
import math
import os
from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from needle.models.pythia import PythiaConfig

COMPILED = {"compile": "default", "graphs": "reduce-overhead"}


class Layer(nn.Module):
    def __init__(self, width: int, heads: int, rotary: int) -> None:
        super().__init__()
        self.heads, self.rotary = heads, rotary
        self.norm_attention = nn.LayerNorm(width)
        self.norm_mlp = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.dense = nn.Linear(width, width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        rotated, rest = x[..., : self.rotary], x[..., self.rotary :]
        first, second = rotated.chunk(2, dim=-1)
        rotated = rotated * cos + torch.cat((-second, first), dim=-1) * sin
        return torch.cat((rotated, rest), dim=-1)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        batch, time, width = x.shape
        qkv = self.qkv(self.norm_attention(x)).view(batch, time, self.heads, -1).transpose(1, 2)
        q, k, v = qkv.chunk(3, dim=-1)
        q, k = self.rotate(q, cos, sin), self.rotate(k, cos, sin)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        attended = attended.transpose(1, 2).reshape(batch, time, width)
        hidden = F.gelu(self.up(self.norm_mlp(x)), approximate="tanh")
        return x + self.dense(attended) + self.down(hidden)


class TorchPythia(nn.Module):
    """(B, T) ids and targets -> mean cross-entropy."""

    def __init__(self, vocabulary: int, width: int, layers: int, heads: int, time: int) -> None:
        super().__init__()
        rotary = width // heads // 4
        self.embed = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Layer(width, heads, rotary) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        for parameter in self.parameters():
            if parameter.ndim >= 2:
                nn.init.normal_(parameter, std=math.sqrt(2 / (5 * width)))
        frequency = 10000.0 ** (-torch.arange(0, rotary, 2).float() / rotary)
        angle = torch.outer(torch.arange(time).float(), frequency)
        angle = torch.cat((angle, angle), dim=-1)
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x, self.cos.to(x.dtype), self.sin.to(x.dtype))
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    def optimizer(self, lr: float) -> torch.optim.AdamW:
        matrices = [p for p in self.parameters() if p.ndim >= 2]
        vectors = [p for p in self.parameters() if p.ndim < 2]
        groups = [
            {"params": matrices, "weight_decay": 0.1},
            {"params": vectors, "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), eps=1e-8, fused=True)


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
