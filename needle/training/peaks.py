"""Peak rates of GPUs, from NVIDIA's data sheets: dense, without sparsity."""

from __future__ import annotations

# A part of the GPU's name: FLOP/s by dtype, and bytes/s of its memory. The first that fits counts.
PEAKS = {
    "H100 PCIe": {"bfloat16": 756e12, "float32": 51e12, "memory": 2.0e12},
    "H100": {"bfloat16": 989e12, "float32": 67e12, "memory": 3.35e12},
    "H200": {"bfloat16": 989e12, "float32": 67e12, "memory": 4.8e12},
    "A100": {"bfloat16": 312e12, "float32": 19.5e12, "memory": 1.55e12},
    "B200": {"bfloat16": 2250e12, "float32": 75e12, "memory": 7.7e12},
    "L40S": {"bfloat16": 362e12, "float32": 91.6e12, "memory": 0.86e12},
    "RTX 4090": {"bfloat16": 165e12, "float32": 82.6e12, "memory": 1.0e12},
    "RTX 3090": {"bfloat16": 71e12, "float32": 35.6e12, "memory": 0.93e12},
}


def peak(device_name: str, what: str) -> float | None:
    """FLOP/s in a dtype, or bytes/s of "memory", that the device could do at best; None where that
    is not known.

    >>> from needle.training.peaks import peak
    >>> peak("NVIDIA H200", "bfloat16")
    989000000000000.0
    """
    for part, peaks in PEAKS.items():
        if part in device_name:
            return peaks.get(what)
    return None
