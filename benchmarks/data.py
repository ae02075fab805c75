"""Does the device ever wait for data? Training steps on batches that needle reads, against the same
steps on one batch that already lies on the device.

A sample is a block of steps as apps/train_pythia.py makes them: a batch from needle.data.Prefetch,
forward, backward, clipping, AdamW, the loss on its way to the host while the next step is queued.
Blocks of all sides alternate. The files are random tokens, written to a temporary folder and then
read through the page cache: the speed of a disk is left out.

    python benchmarks/data.py           on a GPU pythia-70m in bfloat16, 16 x 2048 tokens a step

`waits` is how long a step stood still for the reader, in the mean and at the worst; `reads` what
one batch costs the reading thread.
"""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path
from typing import Any

import bench
import numpy as np
from train_step import NeedleSide, block

from needle.data import Batches, Prefetch, megatron, open_data
from needle.models.pythia import PythiaConfig

TOKENS = 40_000_000
DOCUMENT = 700  # mean length: about the Pile's in bytes / 4, and every batch has some hundred


def write_files(folder: Path, vocabulary: int, row: int, count: int) -> dict[str, Path]:
    """One file of each way to lie on a disk, of `count` tokens or a little less."""
    draw = np.random.default_rng(0)
    tokens = draw.integers(0, min(vocabulary, 1 << 16), count).astype("<u2")
    tokens.tofile(folder / "flat.bin")
    np.save(folder / "array.npy", tokens.astype(np.int32))
    with open(folder / "shard.bin", "wb") as file:  # llm.c: 256 int32, magic, version, count
        np.array([20240520, 1, count] + [0] * 253, "<i4").tofile(file)
        tokens.tofile(file)
    sizes = draw.geometric(1 / DOCUMENT, count // DOCUMENT).astype(np.int64)
    rows = np.full(count // row, row, np.int64)
    for name, lengths in (("documents", sizes), ("preshuffled", rows)):
        lengths = lengths[np.cumsum(lengths) <= count]
        tokens[: lengths.sum()].tofile(folder / f"{name}.bin")
        with open(folder / f"{name}.idx", "wb") as file:
            megatron.write_index(file, np.dtype("<u2"), lengths)
    kinds = {
        "flat uint16": "flat.bin",
        ".npy int32": "array.npy",
        "llm.c shard": "shard.bin",
        "Megatron documents": "documents",
    }
    if row == megatron.ROW_LENGTH:
        kinds["preshuffled rows"] = "preshuffled"
    return {kind: folder / name for kind, name in kinds.items()}


class InPlace:
    """One batch, given again and again."""

    waited = 0.0

    def __init__(self, batch: tuple) -> None:
        self.next = lambda: batch


class Watched:
    """Batches, and the seconds that each step waited for its own."""

    def __init__(self, batches: Prefetch | InPlace) -> None:
        self._batches, self.waits = batches, []

    def next(self) -> Any:
        before = self._batches.waited
        batch = self._batches.next()
        self.waits.append(self._batches.waited - before)
        return batch


def main() -> None:
    parser = bench.parser(
        __doc__,
        ("--model", str, "NAME", "default: pythia-70m, on a CPU tiny"),
        ("--batch-size", int, "B", "default: 16, on a CPU 4"),
        ("--seq-len", int, "T", "default: 2048, on a CPU 128"),
        ("--steps", 20, "N", "of a block"),
        ("--blocks", 7, "N", "of a side; the first is not timed"),
        bench.DEVICE,
        bench.DTYPE,
    )
    args = parser.parse_args()

    device = bench.device_of(args)
    on_gpu = not device.is_host
    args.model = args.model or ("pythia-70m" if on_gpu else "tiny")
    shape = args.batch_size or (16 if on_gpu else 4), args.seq_len or (2048 if on_gpu else 128)
    config = PythiaConfig.preset(args.model, max_seq_len=shape[1], dtype=args.dtype)
    tokens = np.zeros(shape[0] * shape[1] + 1, np.uint16)  # each side brings its own
    side = NeedleSide(config, device, tokens, shape, graph=False)
    print(bench.machine(device))
    print(
        f"{args.model}, {shape[0]} x {shape[1]}, {args.dtype}, {args.blocks - 1} blocks of "
        f"{args.steps} steps a side, alternating"
    )

    with tempfile.TemporaryDirectory() as name:
        files = write_files(Path(name), config.vocab_size, shape[1] + 1, TOKENS)
        readers: dict[str, Prefetch] = {}
        reads: dict[str, float] = {}
        for kind, path in files.items():
            batches = Batches(open_data(path).train, *shape, seed=1, vocab_size=config.vocab_size)
            batches.next_rows()
            ten = lambda batches=batches: [batches.next_rows() for _ in range(10)]
            reads[kind] = bench.seconds(ten) / 10
            readers[kind] = Prefetch(batches, device)
        fixed = InPlace(next(iter(readers.values())).next())
        sides = {"one batch, in place": fixed, **readers}
        waits: dict[str, list[float]] = {kind: [] for kind in sides}

        def sample(kind: str) -> float:
            """Milliseconds a step."""
            side.batches = Watched(sides[kind])
            taken, _, _ = block(side, args.steps)
            waits[kind] += side.batches.waits
            return taken

        samples = {kind: lambda kind=kind: sample(kind) for kind in sides}
        bench.in_turns(samples, 1)
        for waited in waits.values():
            waited.clear()
        taken = bench.in_turns(samples, args.blocks - 1)
        for reader in readers.values():
            reader.close()

    reference = statistics.median(taken["one batch, in place"])
    print(
        f"{'':22}{'ms a step':>10}{'min':>8}{'max':>8}{'x in place':>12}"
        f"{'waits ms':>10}{'worst':>8}{'reads ms':>10}"
    )
    for kind, times in taken.items():
        median = statistics.median(times)
        print(
            f"{kind:22}{median:10.2f}{min(times):8.2f}{max(times):8.2f}"
            f"{median / reference:12.3f}{statistics.mean(waits[kind]) * 1e3:10.3f}"
            f"{max(waits[kind]) * 1e3:8.2f}{reads.get(kind, 0) * 1e3:10.2f}"
        )


if __name__ == "__main__":
    bench.run(main)
