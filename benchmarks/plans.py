"""Which of cuBLASLt's answers is the fastest for each product of a training step in bfloat16.

    python benchmarks/plans.py                        Pythia-70m, B 4, 16, 32, 64 of T 2048
    python benchmarks/plans.py --model pythia-410m --batch-size 8

cuBLASLt answers a product with up to eight algorithms, the one that it thinks fastest first. Each
is timed in blocks of launches that follow each other, in two rounds of opposite order; what is
beaten by two in a hundred in both rounds becomes a line of cuda/plans.def, printed at the end.
Nothing is timed in training: a run takes what the table says, and the first answer for what it does
not list.
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import checkout

checkout.choose()

import needle as ndl
from needle import _C, models, ops
from needle.processes import program

ANSWERS, LEAST_GAIN, BLOCK_MS = 8, 1.02, 8.0

Line = tuple[int, int, int, int, int, str, int, int, int]  # of PLAN, without GPU, version, answer


def random(shape: tuple[int, ...], device: ndl.Device, dtype: str = "bfloat16") -> _C.NDArray:
    """Random numbers, which repeat every million: zeros run faster than a training's operands."""
    out = _C.empty(shape, dtype, device)
    flat, part = out.reshape((out.size,)), min(out.size, 1 << 20)
    some = _C.array(np.random.default_rng(0).standard_normal(part) * 0.1, dtype, device)
    for start in range(0, out.size, part):
        _C.assign(flat[start : start + part], some[: min(part, out.size - start)])
    return out


def products(
    config: models.Config, rows: int, device: ndl.Device
) -> Iterator[tuple[Line, Callable[[], object]]]:
    """The products of a step over so many rows, with their line in the table."""
    width, inner = config.hidden_size, config.intermediate_size
    scale = _C.array(0.5, "float32", device)
    pairs = [(width, 3 * width), (width, inner), (width, width), (inner, width)]
    pairs.append((width + inner, width))  # the last two side by side: ops.attention_mlp
    runs = rows > ops.LinearCrossEntropy.ROWS  # of rows, whose gradients the forward gives
    for k, m in [*pairs, (width, config.vocab_size)]:
        head = m == config.vocab_size
        n = min(rows, ops.LinearCrossEntropy.ROWS) if head else rows
        x, dy = random((n, k), device), random((n, m), device)
        w, b = random((k, m), device), random((m,), device)
        dw = random((1, k, m), device, "float32")
        x_t, w_t = x.permute((1, 0)).reshape((1, k, n)), w.permute((1, 0))
        dy3 = dy.reshape((1, n, m))
        factor = scale if head and not runs else None
        scaled = int(factor is not None)
        bias, residual = None if head else b, dy if m == width else None
        yield (
            (n, m, k, 0, 0, "BF16", int(not head), int(residual is not None), 0),
            functools.partial(_C.linear_fwd, x, w, bias, residual),
        )
        if head and runs:
            dx = random((1, n, k), device, "float32")
            yield (
                (n, k, m, 0, 1, "F32", 0, 0, 0),
                functools.partial(_C.matmul_acc, dy3, w_t.reshape((1, m, k)), None, 0, dx),
            )
        else:
            yield (
                (n, k, m, 0, 1, "BF16", 0, 0, scaled),
                functools.partial(_C.matmul, dy, w_t, factor),
            )
        for add in (0, 1):
            yield (
                (k, m, n, 1, 0, "F32", 0, add, scaled),
                functools.partial(_C.matmul_acc, x_t, dy3, factor, add, dw),
            )


def milliseconds(call: Callable[[], object], device: ndl.Device) -> float:
    """The median of five blocks, launches queued behind each other."""
    start, end = _C.Event(device), _C.Event(device)

    def block(launches: int) -> float:
        start.record()
        for _ in range(launches):
            call()
        end.record()
        return start.elapsed(end) / launches

    block(2)
    launches = max(round(BLOCK_MS / block(3)), 3)
    return statistics.median(block(launches) for _ in range(5))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=models.preset_names(), default="pythia-70m")
    parser.add_argument("--batch-size", type=int, nargs="+", default=[4, 16, 32, 64], metavar="B")
    parser.add_argument("--seq-len", type=int, default=2048, metavar="T")
    args = parser.parse_args()
    if not ndl.cuda().enabled():
        raise SystemExit(f"plans.py: no CUDA device: {ndl.cuda().reason()}")
    config = models.preset(args.model)
    lines = []
    for batch_size in args.batch_size:
        taken: dict[Line, list[list[float]]] = {}
        for order in (range(ANSWERS), reversed(range(ANSWERS))):
            for answer in order:
                os.environ["NEEDLE_PLAN"] = str(answer)
                ndl.cuda_reset()  # forgets the plans
                device = ndl.cuda()
                for line, call in products(config, batch_size * args.seq_len, device):
                    times = taken.setdefault(line, [[] for _ in range(ANSWERS)])
                    times[answer].append(milliseconds(call, device))
        facts = ndl.cuda().properties()
        version = facts["products"].split()[1].rstrip(",").split(".")
        number = int(version[0]) * 10000 + int(version[1]) * 100 + int(version[2])
        print(f"{facts['name']}, {facts['products']}: {args.model}, B {batch_size}; us by answer")
        for line, times in taken.items():
            print(f"{line!s:60}", *(f"{1e3 * statistics.mean(each):8.1f}" for each in times))
            best = min(range(ANSWERS), key=lambda i: statistics.mean(times[i]))
            if all(a > LEAST_GAIN * b for a, b in zip(times[0], times[best])):
                shown = ", ".join(map(str, line))
                lines.append(f'PLAN("{facts["name"]}", {number}, {shown}, {best})')
    print(*lines, sep="\n")


if __name__ == "__main__":
    sys.exit(program(main))
