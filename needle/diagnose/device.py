"""One device: a product, the rates of a GPU, every op, a training step."""

from __future__ import annotations

import re
from pathlib import Path

from needle import _C
from needle.diagnose import facts, rates, step, sweep
from needle.diagnose.examination import Reporter

LIBRARY = re.compile(r"/\S*/lib(?:cuda|cudart|cublas|cublasLt|nvrtc|nccl|nvidia-ml)\.so\S*")


def examine(reporter: Reporter, kind: str, index: int) -> None:
    """Report findings about a device, `cpu` or `cuda` and its number, and its facts, named
    `device`."""
    device = getattr(_C, kind)(index)
    reporter.at("opening the device")
    device.synchronize()
    reporter.fact("device", facts.describe(device))
    reporter.at("a product of two matrices", "matmul")
    good, text = facts.self_test(device)
    if not good:
        reporter.failed("product", text.partition(": ")[2], sweep.REMEDY, "matmul")
        return
    reporter.ok("product", text.partition(": ")[2])
    if not device.is_host:
        rates.examine(reporter, device)
        loaded = sorted(set(LIBRARY.findall(Path("/proc/self/maps").read_text())))
        reporter.ok("libraries", f"libraries: {', '.join(loaded)}")
    if sweep.examine(reporter, device):
        step.examine(reporter, device)
