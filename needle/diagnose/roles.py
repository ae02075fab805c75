"""The examinations by name, each of which runs in a process of its own."""

from __future__ import annotations

import json
import os
import re
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

from needle import _C
from needle.diagnose import (
    facts,
    folder,
    machine,
    peers,
    ranks,
    rates,
    recovery,
    server,
    step,
    sweep,
)
from needle.diagnose.examination import Reporter
from needle.processes import MessageWriter

FATAL = (
    "a kernel or the GPU itself is broken: look at the Xid and ECC lines, try another GPU, and "
    "NEEDLE_ARCH=80, which takes the kernels for older GPUs"
)
LIBRARY = re.compile(r"/\S*/lib(?:cuda|cudart|cublas|cublasLt|nvrtc|nccl|nvidia-ml)\.so\S*")


def examine_device(reporter: Reporter, kind: str, index: int) -> None:
    """One device: a product, the rates of a GPU, every op, a training step."""
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


ROLES: dict[str, Callable[..., None]] = {
    "machine": machine.examine,
    "device": examine_device,
    "peers": peers.examine,
    "ranks": ranks.examine,
    "fault": recovery.fault,
    "alive": recovery.alive,
    "run": folder.examine,
    "server": server.examine,
}


def serve(subject: str, until: str, is_full: str, role: str, arguments: str) -> None:
    """Run an examination and end the process; the arguments are those that `Examination` gives."""
    reporter = Reporter(MessageWriter.to_parent(), subject, float(until), is_full == "1")
    try:
        ROLES[role](reporter, *json.loads(arguments))
    except _C.CudaFatalError as error:
        reporter.failed(reporter.current_check, f"{error}".split("\n")[0], FATAL, reporter.op)
    except (MemoryError, _C.CudaError) as error:
        remedy = "free memory of the device: the lines of its GPU name the processes that hold it"
        reporter.failed(reporter.current_check, f"{error}", remedy, reporter.op)
    except Exception as error:
        reporter.detail(traceback.format_exc())
        text = f"{reporter.current_check}: {type(error).__name__}: {error}"
        remedy = "this is a defect: report it with --log FILE"
        reporter.failed("examination", text, remedy, reporter.op)
    reporter.end()
    sys.stdout.flush()
    os._exit(0)  # destructors take time, and may hang
