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
    counts: tuple[int, int] = (1, 1)  # calls of a sample
    times: tuple[list[float], list[float]] = dataclasses.field(default_factory=lambda: ([], []))

    def rate(self, way: int, operations: float) -> float:
        """TFLOP/s at the median, `operations` a pair."""
        return operations * self.pairs / statistics.median(self.times[way]) / 1e9


# ---- needle --------------------------------------------------------------------------------------


def needle_calls(
    packed: np.ndarray, dout: np.ndarray, dtype: str, mask: BlockMask | None
) -> tuple[Call, Call]:
    device = ndl.cuda()
    B, T, H, _, D = packed.shape
    strides = (T * H * 3 * D, H * 3 * D, 3 * D, 1)

    def views(array: _C.NDArray) -> list[_C.NDArray]:
        flat = array.reshape((array.size,))
        return [flat[i * D : array.size].as_strided((B, T, H, D), strides) for i in range(3)]

    q, k, v = views(_C.array(packed, dtype=dtype, device=device))
    do = _C.array(dout, dtype=dtype, device=device)
    gradients = views(_C.empty(packed.shape, dtype, device))
    scale = D**-0.5
    lists = mask.lists(device) if mask is not None else ()

    o = _C.empty(q.shape, dtype, device)

    def forward() -> _C.NDArray:
        if mask is None:
            return _C.attention_fwd(q, k, v, scale, 1, o)
        return _C.block_sparse_attention_fwd(q, k, v, *lists[:3], mask.block, scale, 1, o)

    lse = forward()

    def backward() -> None:
        if mask is None:
            _C.attention_bwd(do, q, k, v, o, lse, scale, 1, None, None, *gradients, None, None)
        else:
            last = scale, 1, None, None, *gradients, None, None
            _C.block_sparse_attention_bwd(do, q, k, v, o, lse, *lists, mask.block, *last)

    return forward, backward


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


def kept_pairs(mask: BlockMask) -> float:
    """Count the pairs that causal queries see, for a mask of all heads."""
    return causal_pairs(mask.T) / mask.ideal_speedup


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


def shape_of_all(args: argparse.Namespace, T: int, B: int) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(0)
    shape = (B, T, args.heads, 3, args.head_dim)
    packed = generator.standard_normal(shape, dtype=np.float32)
    return packed, generator.standard_normal(shape[:3] + shape[4:], dtype=np.float32)


def compare(T: int, B: int, args: argparse.Namespace) -> None:
    packed, dout = shape_of_all(args, T, B)
    pairs = causal_pairs(T) * B * args.heads
    calls = needle_calls(packed, dout, args.dtype, None)
    sides = [Side("needle", calls, bench.needle_timer(ndl.cuda()), pairs)]
    if not args.alone and bench.has("torch"):
        operands = torch_operands(packed, dout, args.dtype)
        sides += torch_sides(operands, pairs)
    run(sides, args.rounds)
    for side in sides:
        show(side, T, B, args.head_dim)
    by_name = {side.name: side for side in sides}
    for baseline in ("torch cuDNN", "torch flash, deterministic"):
        if baseline in by_name:
            ratios = speeds(by_name["needle"], by_name[baseline])
            print(f"needle to {baseline}: forward {ratios[0]:.3f}, backward {ratios[1]:.3f}")
    gpu = ndl.cuda().properties()["name"]
    for line in check(by_name.get("torch cuDNN"), T, B, args, gpu):
        print(line)


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


def over_densities(T: int, B: int, args: argparse.Namespace) -> None:
    packed, dout = shape_of_all(args, T, B)
    timer, each = bench.needle_timer(ndl.cuda()), B * args.heads
    pairs = causal_pairs(T) * each
    sides = [Side("dense", needle_calls(packed, dout, args.dtype, None), timer, pairs)]
    for density in args.densities:
        mask = random_mask(T, args.block, density)
        calls = needle_calls(packed, dout, args.dtype, mask)
        n = mask.blocks.shape[1]
        name = f"density {density:g}, in fact {mask.blocks.sum() / causal_pairs(n):.3f}"
        sides.append(Side(name, calls, timer, kept_pairs(mask) * each))
    run(sides, args.rounds)
    for side in sides:
        show(side, T, B, args.head_dim)
        share, gains = side.pairs / pairs, speeds(side, sides[0])
        print(
            f"    of the dense rate, by kept pairs: forward {gains[0] * share:.3f}, "
            f"backward {gains[1] * share:.3f}"
        )


def dilated_calls(
    packed: np.ndarray, dout: np.ndarray, dtype: str, branches: list[tuple[int, int]]
) -> tuple[Call, Call]:
    device, D = ndl.cuda(), packed.shape[-1]
    inputs = [
        ndl.Tensor(packed[:, :, :, i], device=device, dtype=dtype, requires_grad=True)
        for i in range(3)
    ]
    op, do = DilatedAttention(branches, D**-0.5, True), _C.array(dout, dtype=dtype, device=device)
    arrays, node = [x.cached_data for x in inputs], types.SimpleNamespace(inputs=inputs)
    op.compute(*arrays)
    return lambda: op.compute(*arrays), lambda: op.backward(do, node, ())


def over_branches(T: int, B: int, args: argparse.Namespace) -> None:
    packed, dout = shape_of_all(args, T, B)
    branches, timer = [(min(w, T), r) for w, r in args.dilated], bench.needle_timer(ndl.cuda())
    held = sum(
        causal_pairs(-(-(length - h % r) // r)) * segments
        for w, r in branches
        for length, segments in ((w, T // w), (T % w, 1))
        for h in range(args.heads)
        if h % r < length
    )
    pairs = causal_pairs(T) * B * args.heads
    sides = [
        Side("dense", needle_calls(packed, dout, args.dtype, None), timer, pairs),
        Side("dilated", dilated_calls(packed, dout, args.dtype, branches), timer, held * B),
    ]
    run(sides, args.rounds)
    for side in sides:
        show(side, T, B, args.head_dim)
    dense, dilated = sides
    costs = [dense.rate(way, 1.0) / dilated.rate(way, 1.0) for way in (0, 1)]
    print(
        f"    of the time that its pairs take at the dense rate: forward {costs[0]:.2f}, "
        f"backward {costs[1]:.2f}"
    )


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
        if args.dilated:
            over_branches(T, B, args)
        elif args.densities:
            over_densities(T, B, args)
        else:
            compare(T, B, args)


if __name__ == "__main__":
    bench.run(main)
