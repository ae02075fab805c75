"""Weak scaling of a training step over the GPUs of this machine, needle beside PyTorch's DDP.

    python benchmarks/data_parallel.py       all GPUs; B 16 of T 2048 a GPU and micro-batch
    python benchmarks/data_parallel.py --gpus 2 --micro-batches 1 --alone

- The step is that of the app: random tokens from the host, forward and backward of each of a rank's
  micro-batches, the sum over ranks in the order of the tree, clipping by the norm, AdamW of a
  rank's shard, the all-gather of the new weights, and the two small agreements of each step.
- The baseline is the model of train_step.py in PyTorch, compiled, float32 weights under autocast to
  bfloat16, fused AdamW, in DistributedDataParallel, with one micro-batch a rank.
- Each side runs as a process a GPU, as ranks of one group and each alone, at the same time: GPUs of
  one kind differ by up to 3 %, and a group is as fast as its slowest. After some seconds of load,
  blocks of steps alternate between the sides, so that all run on the machine in the same state.
  Printed are the median of the blocks, the least and the most, of a side's slowest GPU. Efficiency
  is the tokens a second of the group, divided by the number of GPUs times those of the slowest
  alone.
- The parts of needle's exchange are then timed by device events: the sum (send the shards, add them
  by own kernels, the norm), and the all-gather of weights.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from typing import Any

import bench
import numpy as np
from bench import spread
from groups import WORKER, Workers, gpus_of, join, own_gpu, serve, torch_group
from train_step import BATCHES, NeedleSide, block

import needle as ndl
from needle import _C, models
from needle.distributed.data_parallel import DataParallel
from needle.distributed.group import Group

TIMES = 20  # that a part of the exchange is timed


class ParallelSide(NeedleSide):
    """A rank's part of the step of apps/train_pythia.py; share() may change the number of
    micro-batches between blocks."""

    def __init__(self, config: models.Config, group: Group, tokens: np.ndarray, shape) -> None:
        super().__init__(config, own_gpu(group), tokens, shape)
        self.group, self.parallels = group, {}

    def share(self, micro_batches: int) -> None:
        """Set the micro-batches of a rank."""
        if micro_batches not in self.parallels:
            self.parallels[micro_batches] = DataParallel(
                self.group, self.flat, self.optimizer, micro_batches * self.group.size
            )
        self.parallel = self.parallels[micro_batches]

    def queue(self) -> Callable[[], float]:
        losses = []
        self.group.gather("the data", None)
        for _ in self.parallel.own_micro_batches:
            self.parallel.send_early()
            losses.append(self._gradient(*self.batches.next()))
            self.parallel.add_micro_batch()
        _, scale = self.parallel.reduce(1.0)
        self.parallel.step(scale)
        loss = _C.AsyncCopy(self.parallel.losses(losses)[0])
        self.group.gather("the end of the step", None)
        return lambda: float(loss.wait())

    def parts(self) -> dict[str, float]:
        """Milliseconds of each part of the exchange."""
        self.share(1)
        parallel, data = self.parallel, self.flat.data

        def total() -> None:
            parallel.add_micro_batch()
            parallel.reduce(1.0)

        return {
            "sum": self._time(total),
            "weights": self._time(lambda: self.group.all_gather("weights", data, parallel.shards)),
        }

    def _time(self, call: Callable[[], Any]) -> float:
        call()
        self.synchronize()
        self.group.gather("ready", None)
        return bench.needle_timer(self.device)(call, TIMES) / TIMES


# ---- the processes of a group --------------------------------------------------------------------


def work(args: argparse.Namespace) -> None:
    config = models.preset(args.model, max_seq_len=args.seq_len, dtype="bfloat16")
    shape = args.batch_size, args.seq_len
    if args.worker == "needle":
        group = join()
        tokens = tokens_of(group.rank, config, shape)
        side = ParallelSide(config, group, tokens, shape)
    else:
        import torch
        from torch_training import TorchSide

        rank, count = torch_group()
        tokens = tokens_of(rank, config, shape)
        side = TorchSide(config, "cuda", "bfloat16", tokens, shape, "compile")
        if count > 1:
            shared = torch.nn.parallel.DistributedDataParallel(
                side.model, device_ids=[rank], gradient_as_bucket_view=True
            )
            side.forward = torch.compile(shared, dynamic=False)

    def answer(what: str, micro_batches: int = 1, steps: int = 1) -> Any:
        if what == "parts":
            return side.parts()
        if args.worker == "needle":
            side.share(micro_batches)
        return block(side, steps)

    serve(answer)
    if args.worker == "needle":
        side.synchronize()
        group.close()
    elif count > 1:
        torch.distributed.destroy_process_group()


def tokens_of(rank: int, config: models.Config, shape: tuple[int, int]) -> np.ndarray:
    draw = np.random.default_rng(rank).integers
    return draw(0, config.vocab_size, BATCHES * shape[0] * shape[1] + 1, np.uint16)


# ---- the driver ----------------------------------------------------------------------------------


def measure(
    sides: dict[str, Workers], micro_batches: int, args: argparse.Namespace
) -> dict[str, float]:
    """Tokens a second and GPU of each side's slowest GPU, at the median."""
    steps = max(args.steps // micro_batches, 2)
    question = {"what": "block", "micro_batches": micro_batches, "steps": steps}
    bench.load(lambda: [side.ask(**question) for side in sides.values()], args.load)

    def sampler(side: Workers) -> Callable[[], list[float]]:
        return lambda: [ms for ms, _, _ in side.ask(**question)]

    blocks = bench.in_turns({name: sampler(side) for name, side in sides.items()}, args.blocks)
    last = next(reversed(sides.values()))
    state = bench.GpuState().during(lambda: last.ask(**question))
    print(f"\n{micro_batches} x {args.batch_size} x {args.seq_len} a GPU and step: ", end="")
    print(f"{args.blocks} blocks of {steps} steps a side, in turns; clock, power, temperature:")
    print("  " + "\n  ".join(state.splitlines()))
    rates = {}
    tokens = 1e3 * micro_batches * args.batch_size * args.seq_len
    for name, side in sides.items():
        slowest = [max(of_gpus) for of_gpus in blocks[name]]
        rates[name] = tokens / statistics.median(slowest)
        rate = [side.count * tokens / ms for ms in slowest]
        print(f"  {name:22} {spread(slowest, '.2f')} ms, {spread(rate, ',.0f')} tokens/s")
    return rates


def main() -> None:
    parser = bench.parser(
        __doc__,
        ("--gpus", int, "N", "default: all that are visible"),
        ("--batch-size", 16, "B", ""),
        ("--seq-len", 2048, "T", ""),
        ("--micro-batches", [1, 4], "N", "a rank"),
        ("--blocks", 5, "N", "a side"),
        ("--steps", 20, "N", "a block"),
        ("--load", 5.0, "SECONDS", "before the blocks"),
        ("--alone", bool, None, "without PyTorch"),
        bench.MODEL,
        WORKER,
    )
    args = parser.parse_args()
    if args.worker:
        return work(args)
    gpus = gpus_of(parser, args.gpus)
    many = f"{gpus} GPUs"
    print(f"{gpus} x {bench.describe(ndl.cuda())}; {args.model}, bfloat16")
    flags = ["--model", args.model, "--batch-size", args.batch_size, "--seq-len", args.seq_len]

    kinds = {"needle, each alone": "needle", f"needle, {many}": "needle"}
    if not args.alone and bench.has("torch"):
        kinds |= {"torch, each alone": "torch", f"DDP, {many}": "torch"}
    command = [__file__, *map(str, flags), "--worker"]
    sides = {
        name: Workers(name, gpus, [*command, kind], apart=name.endswith("alone"))
        for name, kind in kinds.items()
    }
    for side in sides.values():  # all compile, load and connect at once
        side.tell(what="block", steps=3)
    for side in sides.values():
        side.answers()
    for micro_batches in args.micro_batches:
        shown = {n: s for n, s in sides.items() if micro_batches == 1 or n.startswith("needle")}
        rates = measure(shown, micro_batches, args)
        for name, one in (("needle", "needle"), ("DDP", "torch")):
            if f"{name}, {many}" in rates:
                share = rates[f"{name}, {many}"] / rates[f"{one}, each alone"]
                print(f"  {name}: {share:.1%} of {gpus} times the slowest GPU alone")
    found = sides[f"needle, {many}"].ask(what="parts")
    own = {name: max(rank[name] for rank in found) for name in found[0]}  # of the slowest rank
    print(f"\nthe exchange, ms:\n  the sum {own['sum']:.3f}, the weights {own['weights']:.3f}")
    for side in sides.values():
        side.close()


if __name__ == "__main__":
    bench.run(main)
