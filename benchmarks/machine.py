"""What the GPU is doing while a benchmark runs."""

import subprocess


def machine_now() -> subprocess.Popen:
    """Asks nvidia-smi, beside the load, for clock, power and temperature."""
    query = "--query-gpu=clocks.sm,power.draw,temperature.gpu"
    return subprocess.Popen(
        ["nvidia-smi", query, "--format=csv,noheader"], stdout=subprocess.PIPE, text=True
    )
