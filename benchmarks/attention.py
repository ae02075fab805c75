"""Attention forward and backward, needle against PyTorch's fused kernels, interleaved in one run.

TFLOP/s count 4 D operations a pair of query and key forward and 10 D backward; causal: half of all
pairs; sparse: the pairs of the kept blocks, diagonal blocks as a half. needle reads q, k, v out of
a packed (B, T, H, 3, D) array, as in the model; PyTorch reads contiguous (B, H, T, D) tensors.

    python benchmarks/attention.py                   64 Ki tokens at T = 2048, 8192, 16384, 65536
    python benchmarks/attention.py --shapes 2048x16 --head-dim 128 --dtype float16

Without torch, or with --alone, only needle is timed.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import checkout

checkout.choose()
import needle as ndl
from needle import _C
from needle.block_mask import BlockMask

PEERS = {"torch flash": "FLASH_ATTENTION", "torch cuDNN": "CUDNN_ATTENTION"}
Timed = tuple[Callable[[], None], Callable[[], None]]  # forward, backward


def needle_side(packed: np.ndarray, dout: np.ndarray, dtype: str, mask: BlockMask | None) -> Timed:
    device = ndl.cuda()
    B, T, H, _, D = packed.shape
    strides = (T * H * 3 * D, H * 3 * D, 3 * D, 1)

    def views(array: _C.NDArray) -> list[_C.NDArray]:
        flat = array.reshape((array.size,))
        return [flat[i * D : array.size].as_strided((B, T, H, D), strides) for i in range(3)]

    qkv = _C.array(packed, dtype=dtype, device=device)
    q, k, v = views(qkv)
    do = _C.array(dout, dtype=dtype, device=device)
    dqkv = _C.empty(packed.shape, dtype, device)
    gradients = views(dqkv)
    scale = D**-0.5
    lists = mask.lists(device) if mask is not None else ()

    def forward() -> tuple[_C.NDArray, _C.NDArray]:
        if mask is None:
            return _C.attention_fwd(q, k, v, scale, 1)
        return _C.block_sparse_attention_fwd(q, k, v, *lists[:2], mask.block, scale, 1)

    o, lse = forward()

    def backward() -> None:
        if mask is None:
            _C.attention_bwd(do, q, k, v, o, lse, scale, 1, *gradients)
        else:
            _C.block_sparse_attention_bwd(
                do, q, k, v, o, lse, *lists, mask.block, scale, 1, *gradients
            )

    return forward, backward


def torch_side(packed: np.ndarray, dout: np.ndarray, dtype: str, backend: str) -> Timed:
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    kind = getattr(torch, dtype)
    q, k, v = (
        torch.from_numpy(packed[:, :, :, i])
        .to("cuda", kind)
        .transpose(1, 2)
        .contiguous()
        .requires_grad_()
        for i in range(3)
    )
    do = torch.from_numpy(dout).to("cuda", kind).transpose(1, 2).contiguous()
    which = getattr(SDPBackend, backend)

    def attend() -> torch.Tensor:
        with sdpa_kernel(which):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    o = attend()

    def forward() -> None:
        with torch.no_grad():
            attend()

    def backward() -> None:
        torch.autograd.grad(o, (q, k, v), do, retain_graph=True)

    return forward, backward


def needle_timer() -> Callable[[Callable[[], None]], float]:
    device = ndl.cuda()
    start, end = _C.Event(device), _C.Event(device)

    def milliseconds(call: Callable[[], None]) -> float:
        start.record()
        call()
        end.record()
        device.synchronize()
        return start.elapsed(end)

    return milliseconds


def torch_timer() -> Callable[[Callable[[], None]], float]:
    import torch

    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def milliseconds(call: Callable[[], None]) -> float:
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end)

    return milliseconds


def window_mask(T: int) -> BlockMask:
    """Blocks of 128: a window of 256 tokens and the first block."""
    return (BlockMask.local(T, 256, 128) | BlockMask.global_(T, 1, 128)).causal()


def kept_pairs(mask: BlockMask) -> float:
    rows, columns = np.nonzero(mask.blocks[0])
    return float(((columns < rows) + 0.5 * (columns == rows)).sum() * mask.block**2)


def measure(T: int, B: int, args: argparse.Namespace, tokens: np.ndarray, dout: np.ndarray) -> None:
    H, D = args.heads, args.head_dim
    packed = tokens[: B * T].reshape(B, T, H, 3, D)
    do = dout[: B * T].reshape(B, T, H, D)
    mask = window_mask(T)
    sides = {
        "needle": needle_side(packed, do, args.dtype, None),
        "needle, window 256 + first": needle_side(packed, do, args.dtype, mask),
    }
    timers = dict.fromkeys(sides, needle_timer())
    pairs = dict.fromkeys(sides, T * T / 2)
    pairs["needle, window 256 + first"] = kept_pairs(mask)
    if not args.alone and importlib.util.find_spec("torch"):
        for name, backend in PEERS.items():
            try:
                sides[name] = torch_side(packed, do, args.dtype, backend)
            except RuntimeError as error:
                print(f"{name}: left out: {str(error).splitlines()[0]}")
                continue
            timers[name], pairs[name] = torch_timer(), T * T / 2

    times: dict[tuple[str, int], list[float]] = {(n, w): [] for n in sides for w in (0, 1)}
    for repeat in range(args.warmup + args.repeats):
        for name, calls in sides.items():
            for which, call in enumerate(calls):
                took = timers[name](call)
                if repeat >= args.warmup:
                    times[name, which].append(took)
    for name in sides:
        row = f"{T:6d} {B:4d} {D:4d}  {name:28}"
        for which, operations in enumerate((4, 10)):
            median = statistics.median(times[name, which])
            rate = operations * D * pairs[name] * B * H / median / 1e9
            row += f"{median:10.3f} {rate:8.1f}"
        print(row, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--shapes",
        nargs="+",
        default=["2048x32", "8192x8", "16384x4", "65536x1"],
        help="TxB, causal, S = T (default: %(default)s)",
    )
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--warmup", type=int, default=5, help="rounds before the clock counts")
    parser.add_argument("--repeats", type=int, default=20, help="timed rounds; medians are shown")
    parser.add_argument("--alone", action="store_true", help="time needle only")
    args = parser.parse_args()
    if not ndl.cuda().enabled():
        raise SystemExit(
            "attention.py needs a CUDA device: python -m needle.diagnose says why there is none"
        )
    shapes = [tuple(int(n) for n in shape.split("x")) for shape in args.shapes]
    properties = ndl.cuda().properties()
    print(
        f"{properties['name']}, {properties['detail']}; {args.dtype}, H {args.heads}, "
        f"{args.repeats} rounds, interleaved"
    )
    print(
        f"{'T':>6} {'B':>4} {'D':>4}  {'':28}{'fwd ms':>10} {'TFLOP/s':>8}{'bwd ms':>10} "
        f"{'TFLOP/s':>8}"
    )
    most = max(T * B for T, B in shapes)
    generator = np.random.default_rng(0)
    tokens = generator.standard_normal((most, args.heads, 3, args.head_dim), dtype=np.float32)
    dout = generator.standard_normal((most, args.heads, args.head_dim), dtype=np.float32)
    for T, B in shapes:
        measure(T, B, args, tokens, dout)


if __name__ == "__main__":
    main()
