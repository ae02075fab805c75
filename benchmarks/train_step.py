"""Tokens a second of a full training step, needle against PyTorch, in one process and interleaved.

A step is: ids and targets from the host, forward, loss, backward, gradient clipping, AdamW and the
loss read back. Both sides do the same work on the same random tokens; neither reads data from disk.

    python benchmarks/train_step.py                              the CPU default of train_pythia.py
    python benchmarks/train_step.py --model pythia-70m --device cuda --dtype bfloat16 \
        --batch-size 16 --seq-len 2048 --compile

The PyTorch side keeps float32 weights and runs under autocast when the dtype is bfloat16.
Without torch only needle is timed.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import checkout

checkout.choose()
import needle as ndl
from needle import _C, nn, optim
from needle.models.pythia import Pythia, PythiaConfig


def batches(
    vocabulary: int, batch: int, length: int
) -> Callable[[], tuple[np.ndarray, np.ndarray]]:
    generator = np.random.default_rng(0)

    def draw() -> tuple[np.ndarray, np.ndarray]:
        rows = generator.integers(0, vocabulary, (batch, length + 1), dtype=np.int32)
        return rows[:, :-1], rows[:, 1:]

    return draw


def needle_step(config: PythiaConfig, args: argparse.Namespace) -> Callable[[], float]:
    device = ndl.cuda() if args.device == "cuda" else ndl.cpu()
    model = Pythia(config, device=device, dtype=args.dtype)
    flat = nn.flatten_parameters(model)
    optimizer = optim.AdamW(flat, lr=1e-3, weight_decay=0.1, beta1=0.9, beta2=0.95)
    draw = batches(config.vocab_size, args.batch_size, args.seq_len)

    def step() -> float:
        ids, targets = draw()
        optimizer.reset_grad()
        _, loss = model(ids, targets)
        loss.backward()
        _, scale = _C.grad_norm(flat.grad, 1.0)
        optimizer.step(scale)
        return float(loss.numpy())

    return step


def torch_step(config: PythiaConfig, args: argparse.Namespace) -> Callable[[], float]:
    import torch
    from torch_pythia import TorchPythia

    torch.manual_seed(0)
    torch.set_num_threads(args.threads)
    model = TorchPythia(
        config.vocab_size,
        config.hidden_size,
        config.num_hidden_layers,
        config.num_attention_heads,
        args.seq_len,
    ).to(args.device)
    optimizer = model.optimizer(1e-3)
    forward = torch.compile(model) if args.compile else model
    draw = batches(config.vocab_size, args.batch_size, args.seq_len)

    def step() -> float:
        ids, targets = (torch.from_numpy(a.astype(np.int64)).to(args.device) for a in draw())
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(args.device, torch.bfloat16, enabled=args.dtype == "bfloat16"):
            loss = forward(ids, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    return step


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--warmup", type=int, default=3, help="steps before the clock starts")
    parser.add_argument("--steps", type=int, default=10, help="timed steps of each side")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of PyTorch on the CPU")
    parser.add_argument("--compile", action="store_true", help="torch.compile the peer")
    parser.add_argument("--alone", action="store_true", help="time needle only")
    args = parser.parse_args()

    config = PythiaConfig.preset(args.model)
    sides = {"needle": needle_step(config, args)}
    if not args.alone and importlib.util.find_spec("torch"):
        sides["torch compiled" if args.compile else "torch eager"] = torch_step(config, args)
    for step in sides.values():
        for _ in range(args.warmup):
            step()
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(args.steps):
        for name, step in sides.items():
            start = time.perf_counter()
            step()
            seconds[name].append(time.perf_counter() - start)

    device = ndl.cuda() if args.device == "cuda" else ndl.cpu()
    tokens = args.batch_size * args.seq_len
    print(f"{platform.machine()}, {os.cpu_count()} cores, {device.properties()['name']}")
    print(
        f"{args.model}, B {args.batch_size}, T {args.seq_len}, V {config.vocab_size}, "
        f"{args.dtype}, {args.steps} steps a side, interleaved"
    )
    print(f"{'':16}{'ms median':>10}{'min':>9}{'max':>9}{'tok/s':>12}{'x needle':>10}")
    reference = statistics.median(seconds["needle"])
    for name, times in seconds.items():
        median = statistics.median(times)
        print(
            f"{name:16}{median * 1e3:10.2f}{min(times) * 1e3:9.2f}{max(times) * 1e3:9.2f}"
            f"{tokens / median:12,.0f}{reference / median:10.2f}"
        )


if __name__ == "__main__":
    main()
