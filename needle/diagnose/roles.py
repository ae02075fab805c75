"""The examinations by name, each of which runs in a process of its own. Each imports only what it
needs, so that a broken part does not keep the others from starting."""

from __future__ import annotations

import os
import re
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from needle import _C
from needle.diagnose import facts
from needle.diagnose.examination import Reporter
from needle.processes import MessageWriter

FATAL = (
    "a kernel or the GPU itself is broken: look at the Xid and ECC lines, try another GPU, and "
    "NEEDLE_ARCH=80, which takes the kernels for older GPUs"
)
LIBRARY = re.compile(r"/\S*/lib(?:cuda|cudart|cublas|cublasLt|nvrtc|nccl|nvidia-ml)\.so\S*")


def machine(reporter: Reporter) -> None:
    """The driver, each GPU that it sees, the kernel's log, and the devices that CUDA counts."""
    from needle.diagnose import machine

    reporter.at("asking which CUDA the driver speaks")
    reporter.fact("driver", facts.driver_version())
    gpus = machine.examine(reporter)
    machine.examine_log(reporter, gpus)
    reporter.at("counting the GPUs by CUDA")
    cuda = facts.ask_cuda()
    devices = [device for device in _C.all_devices() if device.enabled() and not device.is_host]
    reporter.fact("cuda", cuda | {"count": len(devices)})
    uuids = [device.properties()["uuid"] for device in devices]
    reporter.fact("uuids", uuids)
    machine.compare(reporter, gpus, uuids)


def device(reporter: Reporter, name: str, index: str) -> None:
    """One device: a product, the rates of a GPU, every op, a training step."""
    from needle.diagnose import rates, step, sweep

    chosen = device_of(name, index)
    reporter.at("opening the device")
    chosen.synchronize()
    reporter.fact("device", facts.describe(chosen))
    reporter.at("a product of two matrices", "matmul")
    good, text = facts.self_test(chosen)
    if not good:
        reporter.failed("product", text.partition(": ")[2], sweep.REMEDY, "matmul")
        return
    reporter.ok("product", text.partition(": ")[2])
    if not chosen.is_host:
        rates.examine(reporter, chosen)
        loaded = sorted(set(LIBRARY.findall(Path("/proc/self/maps").read_text())))
        reporter.ok("libraries", f"libraries: {', '.join(loaded)}")
    if sweep.examine(reporter, chosen):
        step.examine(reporter, chosen)


def peers(reporter: Reporter, least: str, *indices: str) -> None:
    from needle.diagnose import peers

    peers.examine(reporter, [int(index) for index in indices], float(least))


def ranks(reporter: Reporter, name: str, index: str, until: str, problem: str) -> None:
    from needle.diagnose import ranks

    ranks.examine(reporter, device_of(name, index), float(until), problem)


def fault(reporter: Reporter, index: str) -> None:
    from needle.diagnose import recovery

    recovery.fault(reporter, _C.cuda(int(index)))


def alive(reporter: Reporter, index: str) -> None:
    reporter.at("a product in a fresh process", "matmul")
    good, text = facts.self_test(_C.cuda(int(index)))
    reporter.fact("good", good)
    reporter.fact("text", text)


def run(reporter: Reporter, path: str) -> None:
    from needle.diagnose import folder

    folder.examine(reporter, path)


def server(reporter: Reporter, url: str) -> None:
    from needle.diagnose import server

    server.examine(reporter, url)


ROLES: dict[str, Callable[..., None]] = {
    role.__name__: role for role in (machine, device, peers, ranks, fault, alive, run, server)
}


def device_of(name: str, index: str) -> Any:
    return {"cpu": _C.cpu, "cuda": _C.cuda}[name](int(index))


def serve(where: str, until: str, is_full: str, role: str, *arguments: str) -> None:
    """Run an examination and end the process; the arguments are those that `Examination` gives."""
    reporter = Reporter(MessageWriter.to_parent(), where, float(until), is_full == "1")
    try:
        ROLES[role](reporter, *arguments)
    except _C.CudaFatalError as error:
        reporter.failed(reporter.doing, f"{error}".split("\n")[0], FATAL, reporter.op)
    except (MemoryError, _C.CudaError) as error:
        remedy = "free memory of the device: the lines of its GPU name who holds it"
        reporter.failed(reporter.doing, f"{error}", remedy, reporter.op)
    except Exception as error:
        reporter.detail(traceback.format_exc())
        text = f"{reporter.doing}: {type(error).__name__}: {error}"
        remedy = "this is a defect: report it with --log FILE"
        reporter.failed("examination", text, remedy, reporter.op)
    reporter.end()
    sys.stdout.flush()
    os._exit(0)  # destructors take time, and may hang
