"""Attention over a sequence that GPUs share, forward and backward, beside one GPU and PyTorch.

    python benchmarks/ring_attention.py                    T = 16384, 65536, 131072; all GPUs
    python benchmarks/ring_attention.py --lengths 65536 --head-dims 64 --alone
    torchrun --nproc-per-node 8 benchmarks/ring_attention.py

One sequence, 8 heads, bfloat16, causal. TFLOP/s a GPU count 4 D operations a pair of query and key
forward and 10 D backward, half of all pairs, over the GPUs. The ideal is needle's attention of the
whole sequence on one GPU; a share is the rate of all GPUs over that of one times their number.
needle's ring_attention gathers keys and values, in the zigzag layout. Baselines: PyTorch's context
parallel with cuDNN's attention, which gathers them too, and cuDNN's on one GPU.

Each side is a group of processes; under torchrun, mpirun or srun needle's is the ranks that it
started, on several machines too, and PyTorch is left out. A sample is as many steps as take some
100 ms, between two events of the device; the sides take turns, and the median of the samples is
shown, of the slowest rank.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import sys
from collections.abc import Callable, Iterator
from typing import Any

import bench
from groups import WORKER, Workers, gpus_of, join, own_gpu, serve, torch_group

import needle as ndl
from needle import ops
from needle.distributed import environment
from needle.distributed.control import Control
from needle.distributed.group import Group, visible_gpus

HEADS, SAMPLES, SAMPLE_MS = 8, 5, 100.0
POSSIBLE = 1.1  # share of one GPU's rate, beyond which work has been left out
Step = Callable[[], Any]


# ---- the processes of a group --------------------------------------------------------------------


def timed_by(group: Group, device: ndl.Device) -> Callable[..., float]:
    """A function that returns the milliseconds of a step of needle's."""

    timer = bench.needle_timer(device)

    def random(time: int, dim: int, seed: int) -> ndl.Tensor:
        made = ndl.Tensor.from_ndarray(bench.normal(device, (1, time, HEADS, dim), seed=seed))
        made.requires_grad = seed < 3
        return made

    def answer(time: int, dim: int, steps: int) -> float:
        q, k, v, dout = (random(time // group.size, dim, seed) for seed in range(4))

        def step() -> None:
            for x in (q, k, v):
                x.grad = None
            if group.size == 1:
                ops.attention(q, k, v).backward(dout)
            else:
                ops.ring_attention(q, k, v, group).backward(dout)

        step()
        device.synchronize()
        group.gather("ready", None)
        return timer(step, steps) / steps

    return answer


def needle_worker() -> None:
    group = join()
    serve(timed_by(group, own_gpu(group)))
    group.close()


class Given:
    """The first `count` ranks of a launcher, in place of Workers. All its ranks ask."""

    def __init__(self, group: Group, answer: Callable[..., float], count: int) -> None:
        self.count, self._group, self._answer = count, group, answer

    def ask(self, **question: Any) -> list[float]:
        own = self._answer(**question) if self._group.rank < self.count else None
        return self._group.gather("a sample", own)[: self.count]


def torch_worker() -> None:
    import torch
    from torch.nn import functional
    from torch.nn.attention import SDPBackend, sdpa_kernel

    rank, count = torch_group()
    mesh = torch.distributed.init_device_mesh("cuda", (count,)) if count > 1 else None

    @contextlib.contextmanager
    def shared(operands: list[torch.Tensor]) -> Iterator[None]:
        """Cut the operands to the tokens of this rank for the block."""
        if mesh is None:
            yield
            return
        from torch.distributed.tensor.experimental import context_parallel

        with context_parallel(
            mesh,
            buffers=operands,
            buffer_seq_dims=[2] * len(operands),
            no_restore_buffers=set(operands),
        ):
            yield

    def answer(time: int, dim: int, steps: int) -> float:
        torch.manual_seed(0)
        make = lambda: torch.randn(1, HEADS, time, dim, device="cuda", dtype=torch.bfloat16)
        operands = [make() for _ in range(4)]
        *qkv, dout = operands

        def step() -> None:
            for x in qkv:
                x.grad = None
            # By its module's name, under which context_parallel replaces it.
            functional.scaled_dot_product_attention(*qkv, is_causal=True).backward(dout)

        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION), shared(operands):
            for x in qkv:
                x.requires_grad = True
            step()
            torch.cuda.synchronize()
            if count > 1:
                torch.distributed.barrier()
            return bench.torch_timer()(step, steps) / steps

    serve(answer)
    if count > 1:
        torch.distributed.destroy_process_group()


# ---- the driver ----------------------------------------------------------------------------------


def measure(sides: dict[str, Workers | Given], time: int, dim: int) -> None:
    operations, steps = 14 * dim * HEADS * time * time / 2, {}
    for name, side in [*sides.items()]:
        try:
            steps[name] = steps_of(side, time, dim)
        except SystemExit as error:
            if name.startswith("needle"):
                raise
            print(f"left out: {error}")
            del sides[name]
    samplers = {
        name: lambda side=side, n=steps[name]: max(side.ask(time=time, dim=dim, steps=n))
        for name, side in sides.items()
    }
    times = bench.in_turns(samplers, SAMPLES)
    print(f"\nT {time:,}, head dim {dim}")
    rates: dict[str, float] = {}
    for name, side in sides.items():
        ms = statistics.median(times[name])
        rates[name] = operations / ms / 1e9 / side.count
        own, needle = (rates.get(f"{of}, 1 GPU") for of in (name.split(",")[0], "needle"))
        share = rates[name] / (own or needle)
        print(
            f"  {name:16} {ms:9.2f} ms ({min(times[name]):.2f} to {max(times[name]):.2f}), "
            f"{rates[name]:5.0f} TFLOP/s a GPU, {share:6.1%} of its one GPU, "
            f"{rates[name] / needle:6.1%} of needle's"
        )
        if share > POSSIBLE:
            print(f"  {name}: THIS DOES NOT COUNT: too fast to have computed the whole attention")


def steps_of(side: Workers | Given, time: int, dim: int) -> int:
    side.ask(time=time, dim=dim, steps=1)
    ms = max(side.ask(time=time, dim=dim, steps=1))
    return min(max(round(SAMPLE_MS / ms), 1), 30)


def main() -> None:
    parser = bench.parser(
        __doc__,
        ("--gpus", int, "N", "default: all that are visible"),
        ("--lengths", [16384, 65536, 131072], "T", ""),
        ("--head-dims", [64, 128], "D", ""),
        ("--alone", bool, None, "without PyTorch"),
        WORKER,
    )
    args = parser.parse_args()
    if args.worker:
        return {"needle": needle_worker, "torch": torch_worker}[args.worker]()
    place = environment.find()
    count = (args.gpus or visible_gpus()) if place is None else place.size
    if any(length % (2 * max(count, 1)) for length in args.lengths):
        parser.error(f"--lengths: {count} ranks share multiples of {2 * count} tokens")
    if place is None:
        return drive(args, *workers(parser, args))
    if args.gpus or place.size == 1:
        parser.error(f"{place.launcher} chooses the ranks, and this needs 2 or more of them")
    group = Group(place, Control.join(place, {"flags": " ".join(sys.argv[1:])}))
    device = group.device("auto")
    group.connect(device)
    sides = {
        named("needle", 1): Given(group, timed_by(Group(), device), 1),
        named("needle", place.size): Given(group, timed_by(group, device), place.size),
    }
    with open(os.devnull, "w") as nowhere:
        with contextlib.redirect_stdout(nowhere if group.rank else sys.stdout):
            drive(args, sides, place.size, device)
    group.close()


def workers(
    parser: argparse.ArgumentParser, args: argparse.Namespace
) -> tuple[dict[str, Workers], int, ndl.Device]:
    """The sides, as processes of this machine; how many GPUs, and one of them."""
    gpus = gpus_of(parser, args.gpus)
    kinds = ["needle"] if args.alone or not bench.has("torch") else ["needle", "torch"]
    sides = {
        named(kind, count): Workers(named(kind, count), count, [__file__, "--worker", kind])
        for kind in kinds
        for count in (1, gpus)
    }
    return sides, gpus, ndl.cuda()


def named(kind: str, count: int) -> str:
    return f"{kind}, {count} GPU{'s' * (count > 1)}"


def drive(args: argparse.Namespace, sides: dict[str, Any], count: int, device: ndl.Device) -> None:
    print(f"{count} x {bench.describe(device)}; bfloat16, {HEADS} heads, causal")
    for dim in args.head_dims:
        for time in args.lengths:
            measure(sides, time, dim)
    if not device.is_host:
        state = bench.GpuState().text()
        print(f"\nclock, power, temperature: {state}".replace("\n", "\n  "))
    for side in sides.values():
        if isinstance(side, Workers):
            side.close()


if __name__ == "__main__":
    bench.run(main)
