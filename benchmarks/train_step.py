"""A full training step, needle beside PyTorch, in one process and in turns.

    python benchmarks/train_step.py                        with a GPU: B 4, 16, 32, 64 of T 2048
    python benchmarks/train_step.py --device cpu --dtype bfloat16
    python benchmarks/train_step.py --device cpu --model tiny --batch-size 16 --seq-len 256

- The step: random tokens from the host, forward, loss, backward, clipping by the norm, AdamW; both
  sides read the loss when the next step is queued. After ten seconds of load, blocks of steps
  alternate between the sides; each block starts and ends with an idle device. Printed are the
  median, the least and the most of the blocks. On the CPU a block takes needle about two seconds.
- The baseline: PyTorch with cuDNN's attention (bfloat16 on a GPU), torch.compile and fused AdamW.
  A short trial chooses the fastest of float32 weights under autocast and bfloat16 weights, also
  with CUDA graphs where needle records its step (up to 16,384 tokens on a GPU);
  --baseline names one instead (torch_training.py). On the CPU both use OMP_NUM_THREADS threads, by
  default one a processor. Without torch, or with --alone, only needle is timed.
- A run is invalid, and THIS RUN DOES NOT COUNT is printed, if it is too short, or if on an H200 the
  baseline is more than 5 % below its known speed. A target is met when two separate runs reach it.

TFLOP/s count the products forward and backward and causal attention at half of all pairs, nothing
computed twice: the FLOP a token that are printed. Memory is the most that lay in arrays, and the
most (PyTorch) or what (needle) the allocator held of the device. Host is the time in which the host
queues a step. Its time by operation: NEEDLE_TRACE=1, or `ncu`.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable
from typing import Any

import bench
import numpy as np
from bench import GpuState, spread

import needle as ndl
from needle import _C, models, nn, optim
from needle.backend_ndarray import NDArray
from needle.data.batches import Batches
from needle.data.prefetch import Prefetch
from needle.training import GraphedStep, worth_recording

Side = Any  # NeedleSide, or TorchSide of torch_training.py
LOAD_SECONDS, LEAST_BLOCKS = 10.0, 5
BATCHES = 32  # that come round again
# The baseline's best figures so far on an H200, T 2048 in bfloat16: million tokens a second.
BASELINE = {
    ("pythia-70m", 4): 1.023,
    ("pythia-70m", 16): 1.197,
    ("pythia-70m", 32): 1.235,
    ("pythia-70m", 64): 1.264,
    ("pythia-160m", 16): 0.479,
    ("pythia-410m", 8): 0.186,
}


class NeedleSide:
    """The step of apps/train_pythia.py, recorded where that records it, or as `graph` says. A side
    takes steps: queue() begins one and returns a function that waits for its loss, peak() gives the
    bytes in arrays at most and those that the allocator held."""

    name = "needle"

    def __init__(
        self,
        config: models.Config,
        device: ndl.Device,
        tokens: np.ndarray,
        shape: tuple[int, int],
        graph: bool | None = None,
        fp8: bool = False,
    ) -> None:
        np.random.seed(0)
        self.device = device
        self.model = config.model_class(config, device=device)
        if fp8:
            self.model.use_fp8()
        self.flat = nn.flatten_parameters(self.model)
        self.optimizer = optim.AdamW(self.flat, lr=1e-3, weight_decay=0.1, beta1=0.9, beta2=0.95)
        batches = Batches(tokens, *shape, vocab_size=config.vocab_size)
        self.batches = Prefetch(batches, device)
        self._gradient = self._compute
        if worth_recording(device, shape[0] * shape[1]) if graph is None else graph:
            self._gradient = GraphedStep(self._compute, shape, device)

    def queue(self) -> Callable[[], float]:
        loss = _C.AsyncCopy(self._gradient(*self.batches.next()))
        _, scale = optim.grad_norm(self.flat, 1.0)
        self.optimizer.step(scale)
        return lambda: float(loss.wait())

    def _compute(self, ids, targets) -> NDArray:
        """Compute loss and gradients. All activations are free when this returns."""
        self.optimizer.reset_grad()
        loss = self.model.loss(ids, targets)
        loss.backward()
        return loss.cached_data

    def synchronize(self) -> None:
        self.device.synchronize()

    def reset_peak(self) -> None:
        self.device.reset_peak()

    def peak(self) -> tuple[int, int] | None:
        if self.device.is_host:
            return None
        stats = self.device.memory_stats()
        return stats["peak_bytes"], stats["reserved_bytes"]

    def close(self) -> None:
        self.batches.close()
        del self.model, self.flat, self.optimizer, self._gradient
        gc.collect()
        self.device.empty_cache()


# ---- measuring -----------------------------------------------------------------------------------


def block(side: Side, steps: int) -> tuple[float, float, float]:
    """Milliseconds a step, those of the host, and the last loss."""
    host, before = 0.0, None
    side.synchronize()
    start = time.perf_counter()
    for _ in range(steps):
        queued = time.perf_counter()
        loss = side.queue()
        host += time.perf_counter() - queued
        if before is not None:
            before()
        before = loss
    last = loss()
    side.synchronize()
    return 1e3 * (time.perf_counter() - start) / steps, 1e3 * host / steps, last


def steps_of_a_block(side: Side, asked: int | None, on_gpu: bool) -> int:
    """Return the steps asked for, 20 on a GPU, and on the CPU those of some two seconds."""
    if asked is not None or on_gpu:
        return asked or 20
    block(side, 1)
    return min(max(round(2000 / block(side, 1)[0]), 1), 20)


def reasons_not_to_count(
    args: argparse.Namespace, device_name: str, batch_size: int, baseline_rate: float | None
) -> list[str]:
    """List why a run is not valid. baseline_rate: tokens/s, None without a baseline."""
    found = []
    if args.blocks < LEAST_BLOCKS:
        found.append(f"{args.blocks} blocks a side, and not {LEAST_BLOCKS}")
    if args.load < LOAD_SECONDS:
        found.append(f"{args.load:g} s of load, and not {LOAD_SECONDS:g}")
    usual = (args.seq_len, args.dtype) == (2048, "bfloat16") and "H200" in device_name
    if usual and (args.model, batch_size) in BASELINE:
        known = BASELINE[args.model, batch_size] * 1e6
        if baseline_rate is None:
            found.append("the baseline was not timed")
        elif baseline_rate < 0.95 * known:
            found.append(
                f"the baseline reached {baseline_rate:,.0f} of its {known:,.0f} tokens/s at "
                f"B {batch_size}"
            )
    return found


def compare(
    side: NeedleSide, baseline: Side | None, batch_size: int, args: argparse.Namespace
) -> None:
    sides: list[Side] = [side] if baseline is None else [side, baseline]
    on_gpu = not side.device.is_host
    steps = steps_of_a_block(side, args.steps, on_gpu)
    for each in sides:
        block(each, steps)
        each.reset_peak()
    samplers = {each.name: lambda each=each: block(each, steps) for each in sides}
    round_of_all = lambda: bench.in_turns(samplers, 1)
    state = lambda: GpuState().during(round_of_all)
    bench.load(round_of_all, args.load)
    if on_gpu:
        print(f"clock, power, temperature before: {state()}")
    blocks = bench.in_turns(samplers, args.blocks)
    if on_gpu:
        print(f"clock, power, temperature after: {state()}")
    tokens, flops = batch_size * args.seq_len, side.model.flops_per_token(args.seq_len)
    print(f"B {batch_size}: {args.blocks} blocks of {steps} steps a side, in turns")
    for each in sides:
        ms, host, losses = zip(*blocks[each.name])
        rate = [1e3 * tokens / taken for taken in ms]
        line = f"  {each.name:26} {spread(ms, '.2f')} ms, {spread(rate, ',.0f')} tokens/s, "
        line += f"{statistics.median(rate) * flops / 1e12:.4g} TFLOP/s"
        if on_gpu:
            peak, held = (bytes / 2**30 for bytes in each.peak())
            line += f", host {statistics.median(host):.2f} ms, {peak:.1f} GiB ({held:.1f} held)"
        print(f"{line}, loss {losses[-1]:.3f}")
    rate = None
    if baseline is not None:
        ours, theirs = ([taken for taken, _, _ in blocks[each.name]] for each in sides)
        ratios = [b / a for a, b in zip(ours, theirs)]
        print(f"  needle's speed over the baseline's: {spread(ratios, '.3f')}")
        rate = 1e3 * tokens / statistics.median(theirs)
    name = side.device.properties()["name"]
    for reason in reasons_not_to_count(args, name, batch_size, rate):
        print(f"  THIS RUN DOES NOT COUNT: {reason}")


def torch_baseline(
    config: models.Config,
    device: ndl.Device,
    tokens: np.ndarray,
    shape: tuple[int, int],
    args: argparse.Namespace,
):
    """The TorchSide that --baseline names, or the fastest; None where there is none."""
    if args.alone or not bench.has("torch"):
        return None
    import torch_training

    def step_ms(side: Side) -> float:
        block(side, 3)  # compiles
        steps = steps_of_a_block(side, args.steps, args.device == "cuda")
        return min(block(side, steps)[0] for _ in range(2))

    make = lambda mode: torch_training.TorchSide(
        config, args.device, args.dtype, tokens, shape, mode
    )
    graphs = args.graph or worth_recording(device, shape[0] * shape[1])
    names = [args.baseline] if args.baseline else torch_training.modes(args.dtype, graphs)
    return torch_training.fastest(names, make, step_ms)


def main() -> None:
    hows = ("eager", "compile", "graphs")
    ways = [how + low for how in hows for low in ("", "-bf16")]
    sizes = "one after the other (default: 4 16 32 64 on a GPU, 4 on the CPU)"
    parser = bench.parser(
        __doc__,
        ("--seq-len", int, "T", "default: 2048 on a GPU, 512 on the CPU"),
        ("--blocks", LEAST_BLOCKS, "N", "of each side"),
        ("--steps", int, "N", "of a block (default: 20 on a GPU, what takes 2 s on the CPU)"),
        ("--load", LOAD_SECONDS, "SECONDS", "before the first block"),
        ("--alone", bool, None, "time needle only"),
        ("--fp8", bool, None, "needle's products in FP8, as use_fp8() takes them"),
        bench.MODEL,
        bench.DEVICE,
        bench.DTYPE,
        ("--batch-size", [int], "B", sizes),
        ("--baseline", str, None, "default: the fastest that is found", *ways),
    )
    parser.add_argument(
        "--graph",
        action=argparse.BooleanOptionalAction,
        help="needle's micro-batch as a CUDA graph (default: as the trainer, where it is faster)",
    )
    args = parser.parse_args()
    device = bench.device_of(args)
    on_gpu = not device.is_host
    if args.seq_len is None:
        args.seq_len = 2048 if on_gpu else 512
    sizes = args.batch_size or ([4, 16, 32, 64] if on_gpu else [4])
    if min(args.blocks, args.seq_len, *sizes, 1 if args.steps is None else args.steps) < 1:
        parser.error("--blocks, --steps, --batch-size and --seq-len must be 1 or more")
    if args.graph and not device.records_graphs:
        parser.error(f"--graph: {device} records no graphs, as GPUs do: leave it out")
    if args.baseline and args.baseline.endswith("-bf16") and args.dtype != "bfloat16":
        parser.error(f"--baseline {args.baseline} is for --dtype bfloat16, not {args.dtype}")
    config = models.preset(args.model, max_seq_len=args.seq_len, dtype=args.dtype)
    print(bench.describe(device))
    for number, batch_size in enumerate(sizes):
        shape = (batch_size, args.seq_len)
        draw = np.random.default_rng(0).integers
        tokens = draw(0, config.vocab_size, BATCHES * batch_size * args.seq_len + 1, np.uint16)
        side = NeedleSide(config, device, tokens, shape, args.graph, args.fp8)
        if number == 0:
            print(
                f"{args.model}, T {args.seq_len}, {args.dtype}{', FP8' * args.fp8}; "
                f"{side.model.flops_per_token(args.seq_len) / 1e6:.1f} MFLOP a token"
            )
        baseline = torch_baseline(config, device, tokens, shape, args)
        compare(side, baseline, batch_size, args)
        if baseline is not None:
            baseline.close()
        side.close()


if __name__ == "__main__":
    bench.run(main)
