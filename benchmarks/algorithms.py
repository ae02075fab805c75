"""Find the fastest of cuBLASLt's answers for each product of a training step in bfloat16.

    python benchmarks/algorithms.py                      Pythia-70m, B 4, 16, 32, 64 of T 2048
    python benchmarks/algorithms.py --model pythia-410m --batch-size 8 --write

cuBLASLt answers a product with up to eight algorithms, the one that it thinks fastest first. Each
is timed in blocks of launches, in two rounds of opposite order. An answer that beats the first by
2 % in both rounds becomes a row of the table of algorithms, cuda/algorithms.def: printed, or with
--write put in place of the rows that this GPU had of these products and of other versions of
cuBLASLt. Nothing is timed in training: it takes the table's answer, else the first.
"""

from __future__ import annotations

import functools
import os
import re
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path

import bench

import needle as ndl
from needle import _C, models, ops

ANSWERS, LEAST_GAIN, BLOCK_MS = 8, 1.02, 8.0
TABLE = Path(__file__).resolve().parent.parent / "cuda" / "algorithms.def"

# m, n, k, transpose_a, transpose_b, out, bias, add, scaled: of ALGORITHM
Product = tuple[int, int, int, int, int, str, int, int, int]


def products(
    config: models.Config, rows: int, device: ndl.Device
) -> Iterator[tuple[Product, Callable[[], object]]]:
    """The products of a step over so many rows, with their columns of the table."""
    width, inner = config.hidden_size, config.intermediate_size
    scale = _C.array(0.5, "float32", device)
    pairs = [(width, 3 * width), (width, inner), (width, width), (inner, width)]
    pairs.append((width + inner, width))  # the last two side by side: ops.attention_mlp
    runs = rows > ops.LinearCrossEntropy.ROWS  # of rows, whose gradients the forward gives
    for k, m in [*pairs, (width, config.vocab_size)]:
        head = m == config.vocab_size
        n = min(rows, ops.LinearCrossEntropy.ROWS) if head else rows
        x, dy = bench.normal(device, (n, k)), bench.normal(device, (n, m))
        w, b = bench.normal(device, (k, m)), bench.normal(device, (m,))
        dw = bench.normal(device, (1, k, m), "float32")
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
            dx = bench.normal(device, (1, n, k), "float32")
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


def fastest(times: list[list[float]]) -> int:
    """The best answer by the times of its rounds; 0 unless it gains enough in each round."""
    best = min(range(len(times)), key=lambda i: statistics.mean(times[i]))
    gains = all(first > LEAST_GAIN * other for first, other in zip(times[0], times[best]))
    return best if gains else 0


def row(gpu: str, version: int, product: Product, answer: int) -> str:
    return f'ALGORITHM("{gpu}", {version}, {", ".join(map(str, product))}, {answer})'


def renewed(table: str, gpu: str, version: int, answers: dict[Product, int]) -> str:
    """The text of cuda/algorithms.def with these answers of a GPU and a version of cuBLASLt.
    Rows of other GPUs stay; those of this GPU and another version go."""
    measured = {", ".join(map(str, product)) for product in answers}
    lines = []
    for line in table.splitlines():
        found = re.fullmatch(r'ALGORITHM\("(.*)", (\d+), (.*), \d+\)', line)
        own = found is not None and found[1] == gpu
        if not own or int(found[2]) == version and found[3] not in measured:
            lines.append(line)
    new = [row(gpu, version, product, answer) for product, answer in answers.items() if answer]
    end = lines.index("#undef ALGORITHM")
    return "\n".join([*lines[:end], *new, *lines[end:], ""])


def measure(config: models.Config, rows: int) -> dict[Product, int]:
    """The answer for each product; prints the times."""
    taken: dict[Product, list[list[float]]] = {}
    for order in (range(ANSWERS), reversed(range(ANSWERS))):
        for answer in order:
            os.environ["NEEDLE_ALGORITHM"] = str(answer)
            ndl.cuda_reset()  # drops the plans
            device = ndl.cuda()
            timer = bench.needle_timer(device)
            for product, call in products(config, rows, device):
                times = taken.setdefault(product, [[] for _ in range(ANSWERS)])
                launches = max(bench.repeats_for(BLOCK_MS, timer, call), 3)
                blocks = [timer(call, launches) / launches for _ in range(5)]
                times[answer].append(statistics.median(blocks))
    for product, times in taken.items():
        print(f"{product!s:60}", *(f"{1e3 * statistics.mean(each):8.1f}" for each in times))
    return {product: fastest(times) for product, times in taken.items()}


def main() -> None:
    args = bench.parser(
        __doc__,
        bench.MODEL,
        ("--batch-size", [4, 16, 32, 64], "B", ""),
        ("--seq-len", 2048, "T", ""),
        ("--write", bool, None, "change cuda/algorithms.def"),
    ).parse_args()
    facts = bench.need_gpu().properties()
    major, minor, patch = map(int, re.search(r"(\d+)\.(\d+)\.(\d+)", facts["products"]).groups())
    version = major * 10000 + minor * 100 + patch
    answers: dict[Product, int] = {}
    for batch_size in args.batch_size:
        print(f"{facts['name']}, {facts['products']}: {args.model}, B {batch_size}; us by answer")
        answers |= measure(models.preset(args.model), batch_size * args.seq_len)
    if args.write:
        TABLE.write_text(renewed(TABLE.read_text(), facts["name"], version, answers))
        print(f"written: {TABLE}; it counts after the next build (make lib)")
    else:
        chosen = {product: answer for product, answer in answers.items() if answer}
        print(*(row(facts["name"], version, *item) for item in chosen.items()), sep="\n")


if __name__ == "__main__":
    bench.run(main)
