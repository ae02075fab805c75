"""Attention on the CPU, float32: dense and causal beside PyTorch on the same cores, block-sparse
beside what its kept pairs would take at the dense rate.

    python benchmarks/attention_cpu.py [--threads N] [--seq-len T] [--heads H] [--head-dim D]

needle and PyTorch, dense and block-sparse, take turns. Printed are the medians and quartiles of all
turns, and the median of the ratios of each turn. needle reads q, k, v as (B, T, H, D), PyTorch
contiguous (B, H, T, D). Without torch needle is timed alone.
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
import sys

import bench
import numpy as np
from bench import Call

import needle as ndl
from needle import _C


def timed(calls: dict[str, Call], turns: int = 11) -> dict[str, list[float]]:
    """name -> milliseconds of each turn; the quartiles are printed."""
    for call in calls.values():
        call()
    timed = {name: lambda call=call: 1e3 * bench.seconds(call) for name, call in calls.items()}
    samples = bench.in_turns(timed, turns)
    for name, times in samples.items():
        low, middle, high = statistics.quantiles(times, n=4)
        print(f"{name:<34} {middle:8.2f} ms  ({low:.2f} to {high:.2f})")
    return samples


def ratio(times: list[float], others: list[float]) -> float:
    """Return the median of the ratios of the turns."""
    return statistics.median(a / b for a, b in zip(times, others, strict=True))


def torch_calls(arrays: list[np.ndarray]) -> dict[str, Call]:
    import torch

    q, k, v, dout = (torch.from_numpy(x).transpose(1, 2).contiguous() for x in arrays)
    for x in (q, k, v):
        x.requires_grad_()
    attend = torch.nn.functional.scaled_dot_product_attention
    o = attend(q, k, v, is_causal=True)

    def forward() -> None:
        with torch.no_grad():
            attend(q, k, v, is_causal=True)

    def backward() -> None:
        torch.autograd.grad(o, (q, k, v), dout, retain_graph=True)

    return {"forward": forward, "backward": backward}


def read_arguments(words: list[str] | None = None) -> argparse.Namespace:
    cores = len(os.sched_getaffinity(0))
    top = bench.parser(
        __doc__,
        ("--threads", cores, "N", "one a core"),
        ("--batch-size", 1, "B", "sequences"),
        ("--seq-len", 2048, "T", "queries and keys of each"),
        ("--heads", 8, "H", ""),
        ("--head-dim", 64, "D", ""),
    )
    args = top.parse_args(words)
    for name, value in vars(args).items():
        if value < 1:
            top.error(f"--{name.replace('_', '-')} must be 1 at least, but is {value}")
    if args.head_dim > 256:
        top.error(f"--head-dim is {args.head_dim}, but at most 256 is supported")
    return args


def main() -> None:
    args = read_arguments()
    if os.environ.get("OMP_NUM_THREADS") != str(args.threads):
        os.environ["OMP_NUM_THREADS"] = str(args.threads)  # read once, when libgomp is loaded
        os.execv(sys.executable, [sys.executable, *sys.argv])
    B, T, H, D = args.batch_size, args.seq_len, args.heads, args.head_dim
    generator, device = np.random.default_rng(0), ndl.cpu()
    arrays = [generator.standard_normal((B, T, H, D)).astype(np.float32) for _ in range(4)]
    q, k, v, dout = (_C.array(x, "float32", device) for x in arrays)
    o, *gradients = (_C.empty(q.shape, "float32", device) for _ in range(4))
    lse = _C.attention_fwd(q, k, v, D**-0.5, 1, o)
    ways = ("forward", "backward")
    last = D**-0.5, 1, None, None, *gradients, None, None
    dense: dict[str, Call] = {
        "needle forward": lambda: _C.attention_fwd(q, k, v, D**-0.5, 1, o),
        "needle backward": lambda: _C.attention_bwd(dout, q, k, v, o, lse, *last),
    }
    calls = dict(dense)
    if bench.has("torch"):
        import torch

        torch.set_num_threads(args.threads)
        calls |= {f"torch {name}": call for name, call in torch_calls(arrays).items()}
    properties = device.properties()
    print(f"{properties['name']}, {args.threads} threads; B {B}, T {T}, H {H}, D {D}, float32")
    took = timed(calls)
    for way in ways:
        if f"torch {way}" in took:
            speed = ratio(took[f"torch {way}"], took[f"needle {way}"])
            print(f"{way}: {speed:.2f} of PyTorch's speed")

    pairs = T * (T + 1) // 2
    for block, window in ((64, 256), (128, 256), (128, 512)):
        mask = ndl.BlockMask.local(T=T, window=window, block=block).causal()
        lists = mask.lists(device)
        kept = int((np.tri(T, dtype=bool) & mask.to_dense()).sum())
        so = _C.empty(q.shape, "float32", device)
        sparse = (q, k, v, *lists[:3], block, D**-0.5, 1, so)
        slse = _C.block_sparse_attention_fwd(*sparse)
        tail = (so, slse, *lists, block, *last)
        what = f"window {window}, blocks of {block}"
        forward = functools.partial(_C.block_sparse_attention_fwd, *sparse)
        backward = functools.partial(_C.block_sparse_attention_bwd, dout, q, k, v, *tail)
        took = timed(dense | {f"{what}, forward": forward, f"{what}, backward": backward})
        ratios = (ratio(took[f"{what}, {way}"], took[f"needle {way}"]) for way in ways)
        costs = [each * pairs / kept for each in ratios]
        print(f"times ideal: forward {costs[0]:.2f}, backward {costs[1]:.2f}")


if __name__ == "__main__":
    bench.run(main)
