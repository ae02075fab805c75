"""Attention on a GPU, forward and backward, needle against PyTorch's fused kernels in one run.

TFLOP/s count 4 D operations a pair of query and key forward and 10 D backward; causal: the pairs
that are seen, T (T + 1) / 2; sparse: those of them in kept blocks. needle reads q, k, v out of a
packed (B, T, H, 3, D) array, as in the model; PyTorch reads contiguous (B, H, T, D) tensors.

    python benchmarks/attention.py                   64 Ki tokens at T = 2048, 8192, 16384, 65536
    python benchmarks/attention.py --shapes 2048x16 --head-dim 128 --dtype float16
    python benchmarks/attention.py --densities 0.1 0.25 0.5 0.75 1 --block 128
    python benchmarks/attention.py --dilated 2048:1 8192:4 32768:16 --shapes 32768x2

A sample is as many calls, one after the other between two events, as take some 20 ms: launching
overlaps with the calls before. Ten seconds of load come first; the sides take turns; medians and
quartiles of the samples are shown, with clock and power in the last round. With --densities
it times needle's block-sparse kernels, by random blocks, beside its dense ones, and with --dilated
ops.dilated_attention of branches segment:dilation, the join included. Baselines: cuDNN and
FlashAttention-2 as PyTorch has them, the latter also with deterministic algorithms on (needle's
backward always is). On an H200 cuDNN must come within 5 % of what it is known for, or the run says
that it does not count.

Without torch, or with --alone, only needle is timed.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import types
from collections.abc import Callable

import bench
import numpy as np
from bench import Call, Timer

import needle as ndl
from needle import _C
from needle.block_mask import BlockMask
from needle.ops.attention import Kernel, qkv_parts
from needle.ops.dilated import DilatedAttention

SAMPLE_MS = 20.0
LOAD_SECONDS = 10.0
WAYS = ("forward", "backward")
# cuDNN 9.19 on an H200 through PyTorch 2.11: TFLOP/s by T, 64 Ki tokens, 8 heads of 64, bfloat16.
CUDNN = {2048: (384, 328), 8192: (436, 408), 16384: (445, 431), 65536: (455, 431)}


@dataclasses.dataclass
class Side:
    """One row: what it runs, how its stream is timed, how many pairs it counts."""

    name: str
    calls: tuple[Call, Call]  # forward, backward
    timer: Timer
    pairs: float
    counts: tuple[int, ...] = ()  # calls of a sample, and milliseconds of a call: see run()
    times: tuple[list[float], ...] = ()

    def rate(self, way: int, operations: float) -> float:
        """TFLOP/s at the median, `operations` a pair."""
        return operations * self.pairs / statistics.median(self.times[way]) / 1e9


# ---- needle --------------------------------------------------------------------------------------


def needle_calls(
    packed: np.ndarray, dout: np.ndarray, dtype: str, mask: BlockMask | None
) -> tuple[Call, Call]:
    device, kernel = ndl.cuda(), Kernel("attention", None, True, mask)
    qkv = qkv_parts(_C.array(packed, dtype=dtype, device=device))
    do = _C.array(dout, dtype=dtype, device=device)
    grads, out = qkv_parts(_C.empty(packed.shape, dtype, device)), kernel.forward(*qkv)
    return lambda: kernel.forward(*qkv, out), lambda: kernel.backward(do, qkv, grads)


# ---- PyTorch -------------------------------------------------------------------------------------


def torch_operands(packed: np.ndarray, dout: np.ndarray, dtype: str) -> list:
    import torch

    kind = getattr(torch, dtype)
    parts = [*(packed[:, :, :, i] for i in range(3)), dout]
    tensors = [torch.from_numpy(x).to("cuda", kind).transpose(1, 2).contiguous() for x in parts]
    return [x.requires_grad_(i < 3) for i, x in enumerate(tensors)]


def torch_calls(operands: list, attend: Callable, deterministic: bool = False) -> tuple[Call, Call]:
    import torch

    *qkv, do = operands
    o = attend(*qkv)

    def forward() -> None:
        with torch.no_grad():
            attend(*qkv)

    def backward() -> None:
        torch.use_deterministic_algorithms(deterministic)
        torch.autograd.grad(o, qkv, do, retain_graph=True)
        torch.use_deterministic_algorithms(False)

    forward(), backward()
    return forward, backward


def torch_sides(operands: list, pairs: float) -> list[Side]:
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def fused(backend: SDPBackend) -> Callable:
        def attend(q, k, v):
            with sdpa_kernel(backend):
                return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

        return attend

    flash, cudnn = SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION
    asked = [
        ("torch cuDNN", cudnn, False),
        ("torch flash", flash, False),
        ("torch flash, deterministic", flash, True),
    ]
    sides = []
    for name, backend, deterministic in asked:
        try:
            calls = torch_calls(operands, fused(backend), deterministic)
            sides.append(Side(name, calls, bench.torch_timer(), pairs))
        except Exception as error:  # of a backend that has no kernel, memory
            print(f"{name}: left out: {str(error).splitlines()[0]}")
    return sides


# ---- measuring -----------------------------------------------------------------------------------


def random_mask(T: int, block: int, density: float) -> BlockMask:
    """The diagonal, and of the blocks below it so many as the density asks for, drawn by a seed."""
    n = -(-T // block)
    below = np.tri(n, k=-1, dtype=bool)
    wanted = max(int(round(density * n * (n + 1) / 2)) - n, 0)
    places = np.flatnonzero(below)
    kept = np.eye(n, dtype=bool)
    kept.reshape(-1)[np.random.default_rng(0).permutation(places)[:wanted]] = True
    return BlockMask(kept, block, T)


def causal_pairs(T: int) -> float:
    return T * (T + 1) / 2


def speeds(ours: Side, baseline: Side) -> list[float]:
    """The baseline's time over ours, forward and backward: medians of the rounds' ratios."""
    return [
        statistics.median(b / a for a, b in zip(ours.times[way], baseline.times[way], strict=True))
        for way in (0, 1)
    ]


def run(sides: list[Side], rounds: int) -> None:
    """Fills in `counts` and `times` of each side."""
    for side in sides:
        side.counts = tuple(bench.repeats_for(SAMPLE_MS, side.timer, call) for call in side.calls)
    samplers = {
        (side.name, way): lambda side=side, way=way: (
            side.timer(side.calls[way], side.counts[way]) / side.counts[way]
        )
        for side in sides
        for way in (0, 1)
    }
    bench.load(lambda: bench.in_turns(samplers, 1), LOAD_SECONDS)
    taken = bench.in_turns(samplers, rounds - 1)
    state = bench.GpuState()
    last = bench.in_turns(samplers, 1)
    for side in sides:
        side.times = tuple(taken[side.name, way] + last[side.name, way] for way in (0, 1))
    print(f"clock, power, temperature in the last round: {state.text()}")


def show(side: Side, T: int, B: int, D: int) -> None:
    row = f"{T:6d} {B:4d} {D:4d}  {side.name:31}"
    for way, operations in enumerate((4, 10)):
        low, middle, high = statistics.quantiles(side.times[way], n=4)
        row += f"{middle:9.3f} ({low:.3f} to {high:.3f}) {side.rate(way, operations * D):7.1f}"
    print(row, flush=True)


def compare(T: int, B: int, args: argparse.Namespace) -> None:
    """Time a shape, and print a row for each side and how they stand to one another."""
    random, heads = np.random.default_rng(0), (B, T, args.heads)
    packed = random.standard_normal((*heads, 3, args.head_dim), dtype=np.float32)
    dout = random.standard_normal((*heads, args.head_dim), dtype=np.float32)
    timer, whole = bench.needle_timer(ndl.cuda()), causal_pairs(T) * B * args.heads
    variants = args.densities or args.dilated  # of needle, without a baseline
    calls = needle_calls(packed, dout, args.dtype, None)
    own = Side("dense" if variants else "needle", calls, timer, whole)
    sides = [own]
    for density in args.densities or ():
        mask = random_mask(T, args.block, density)
        calls = needle_calls(packed, dout, args.dtype, mask)
        share = mask.blocks.sum() / causal_pairs(mask.blocks.shape[1])
        name = f"density {density:g}, in fact {share:.3f}"
        sides.append(Side(name, calls, timer, whole / mask.ideal_speedup))
    if args.dilated:
        branches = [(min(w, T), r) for w, r in args.dilated]
        calls, pairs = dilated_calls(packed, dout, args.dtype, branches), held(T, branches, args)
        sides.append(Side("dilated", calls, timer, pairs * B))
    if not variants and not args.alone and bench.has("torch"):
        sides += torch_sides(torch_operands(packed, dout, args.dtype), whole)
    run(sides, args.rounds)
    for side in sides:
        show(side, T, B, args.head_dim)
        if args.densities:
            f, b = (gain * side.pairs / whole for gain in speeds(side, own))
            print(f"    of the dense rate, by kept pairs: forward {f:.3f}, backward {b:.3f}")
    if args.dilated:
        f, b = (own.rate(way, 1.0) / sides[1].rate(way, 1.0) for way in (0, 1))
        print(
            "    of the time that its pairs take at the dense rate: "
            f"forward {f:.2f}, backward {b:.2f}"
        )
    if variants:
        return
    by_name = {side.name: side for side in sides}
    for baseline in ("torch cuDNN", "torch flash, deterministic"):
        if baseline in by_name:
            f, b = speeds(own, by_name[baseline])
            print(f"needle to {baseline}: forward {f:.3f}, backward {b:.3f}")
    gpu = ndl.cuda().properties()["name"]
    for line in check(by_name.get("torch cuDNN"), T, B, args, gpu):
        print(line)


def held(T: int, branches: list[tuple[int, int]], args: argparse.Namespace) -> float:
    """Count the pairs that the branches of dilated attention hold, of all heads."""
    return sum(
        causal_pairs(-(-(length - h % r) // r)) * segments
        for w, r in branches
        for length, segments in ((w, T // w), (T % w, 1))
        for h in range(args.heads)
        if h % r < length
    )


def check(cudnn: Side | None, T: int, B: int, args: argparse.Namespace, gpu: str) -> list[str]:
    """List why the ratio to cuDNN is not valid, a line each."""
    nothing = "this run says nothing about how needle stands to cuDNN"
    usual = (args.heads, args.head_dim, args.dtype, B * T) == (8, 64, "bfloat16", 65536)
    if cudnn is None:
        return [f"cuDNN was left out: {nothing} at T {T}"]
    if not usual or T not in CUDNN or "H200" not in gpu:
        shape = f"T {T}, B {B}, H {args.heads}, D {args.head_dim}, {args.dtype} on {gpu}"
        return [f"cuDNN is known for nothing at {shape}: {nothing} there"]
    lines = []
    for way, operations in enumerate((4, 10)):
        rate = cudnn.rate(way, operations * args.head_dim)
        if rate < 0.95 * CUDNN[T][way]:
            lines.append(
                f"THIS RUN DOES NOT COUNT: cuDNN's {WAYS[way]} reached {rate:.0f} of its "
                f"{CUDNN[T][way]} TFLOP/s at T {T}"
            )
    return lines


def dilated_calls(
    packed: np.ndarray, dout: np.ndarray, dtype: str, branches: list[tuple[int, int]]
) -> tuple[Call, Call]:
    device, op = ndl.cuda(), DilatedAttention(branches, packed.shape[-1] ** -0.5, True)
    arrays = [_C.array(packed[:, :, :, i], dtype=dtype, device=device) for i in range(3)]
    node = types.SimpleNamespace(inputs=[ndl.Tensor.from_ndarray(x) for x in arrays])
    do = _C.array(dout, dtype=dtype, device=device)
    op.compute(*arrays)
    return lambda: op.compute(*arrays), lambda: op.backward(do, node, ())


def shape(text: str) -> tuple[int, int]:
    T, B = (int(number) for number in text.split("x"))
    return T, B


def branch(text: str) -> tuple[int, int]:
    segment, dilation = (int(number) for number in text.split(":"))
    return segment, dilation


def read_arguments() -> argparse.Namespace:
    parser = bench.parser(
        __doc__,
        ("--heads", 8, "H", ""),
        ("--head-dim", 64, "D", ""),
        ("--rounds", 20, "N", "samples of each side, two at least"),
        ("--alone", bool, None, "time needle only (default: beside PyTorch, if found)"),
        ("--block", 128, "N", "of --densities"),
        ("--dtype", "bfloat16", None, "", "bfloat16", "float16", "float32"),
        ("--shapes", [shape], "TxB", "causal, S = T (default: 64 Ki tokens at several T)"),
        ("--densities", [float], "SHARE", "time random blocks of these shares, and no baseline"),
        ("--dilated", [branch], "SEGMENT:DILATION", "time dilated attention, and no baseline"),
    )
    args = parser.parse_args()
    if args.rounds < 2:
        parser.error(f"--rounds: quartiles need 2 samples at least, not {args.rounds}")
    if args.densities and args.dilated:
        parser.error("--densities and --dilated are two runs: give one of them")
    return args


def main() -> None:
    args = read_arguments()
    device = bench.need_gpu()
    usual = (4096, 16384, 65536) if args.densities else tuple(CUDNN)
    shapes = args.shapes or [(T, 65536 // T) for T in usual]
    print(
        f"{bench.describe(device)}; {args.dtype}, H {args.heads}, "
        f"{args.rounds} samples a side, taking turns"
    )
    columns = "".join(f"{way + ' ms (middle half)':>27} {'TFLOP/s':>7}" for way in WAYS)
    print(f"{'T':>6} {'B':>4} {'D':>4}  {'':31}{columns}")
    for T, B in shapes:
        compare(T, B, args)


if __name__ == "__main__":
    bench.run(main)
