"""What a child of the diagnosis does, by the name of its role. Each role imports only what it
needs, so that what is broken elsewhere does not keep it from starting."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable

from needle import _C
from needle.diagnose import facts
from needle.diagnose.children import Teller
from needle.processes import MessageWriter

FATAL = (
    "a kernel or the GPU itself is broken: look at the Xid and ECC lines, try another GPU, and "
    "NEEDLE_ARCH=80, which takes the kernels for older GPUs"
)


def machine(teller: Teller) -> None:
    """The driver, each GPU that it sees, the kernel's log, and which devices CUDA counts."""
    from needle.diagnose import driver, gpus, xid

    teller.at("asking which CUDA the driver speaks")
    version = facts.driver_version()
    teller.fact("driver", version)
    seen = gpus.examine(teller)
    xid.examine(teller, seen)
    teller.at("counting the GPUs by CUDA")
    cuda = facts.ask_cuda()
    count = sum(d.enabled() and not d.is_host for d in _C.all_devices())
    teller.fact("cuda", cuda | {"count": count})
    uuids = [driver.uuid(index) for index in range(count)]
    teller.fact("uuids", uuids)
    gpus.compare(teller, seen, uuids)


def device(teller: Teller, name: str, index: str) -> None:
    """One device: a product, every op, a training step, and what a GPU makes."""
    from needle.diagnose import driver, rates, step, walk

    chosen = {"cpu": _C.cpu, "cuda": _C.cuda}[name](int(index))
    teller.at("opening the device")
    chosen.synchronize()
    teller.fact("device", facts.describe(chosen))
    if not chosen.is_host:
        teller.fact("uuid", driver.uuid(chosen.index))
        teller.ok("libraries", f"libraries: {', '.join(driver.libraries())}")
    teller.at("a product of two matrices", "matmul")
    good, text = facts.self_test(chosen)
    if not good:
        teller.failed("product", text.partition(": ")[2], walk.REMEDY, "matmul")
        return
    teller.ok("product", text.partition(": ")[2])
    if not chosen.is_host:
        rates.examine(teller, chosen)
    if walk.examine(teller, chosen):
        step.examine(teller, chosen)


def peers(teller: Teller, least: str, *indices: str) -> None:
    from needle.diagnose import peers

    peers.examine(teller, [int(index) for index in indices], float(least))


def ranks(teller: Teller, name: str, index: str, until: str, problem: str) -> None:
    from needle.diagnose import ranks

    chosen = {"cpu": _C.cpu, "cuda": _C.cuda}[name](int(index))
    ranks.examine(teller, chosen, float(until), problem)


def fault(teller: Teller, index: str) -> None:
    from needle.diagnose import recovery

    recovery.fault(teller, _C.cuda(int(index)))


def alive(teller: Teller, index: str) -> None:
    teller.at("a product in a fresh process", "matmul")
    good, text = facts.self_test(_C.cuda(int(index)))
    teller.fact("good", good)
    teller.fact("text", text)


def run(teller: Teller, path: str) -> None:
    from needle.diagnose import folder

    folder.examine(teller, path)


def server(teller: Teller, url: str) -> None:
    from needle.diagnose import server

    server.examine(teller, url)


ROLES: dict[str, Callable[..., None]] = {
    role.__name__: role for role in (machine, device, peers, ranks, fault, alive, run, server)
}


def serve(where: str, until: str, is_full: str, role: str, *arguments: str) -> None:
    """The whole life of a child; the arguments are those that `Child` gives."""
    report = MessageWriter.to_parent()
    teller = Teller(report, where, float(until), is_full == "1")
    try:
        ROLES[role](teller, *arguments)
    except _C.CudaFatalError as error:
        teller.failed(teller.doing, f"{error}".split("\n")[0], FATAL, teller.op)
    except (MemoryError, _C.CudaError) as error:
        remedy = "free memory of the device: the lines of its GPU name who holds it"
        teller.failed(teller.doing, f"{error}", remedy, teller.op)
    except Exception as error:
        teller.detail(traceback.format_exc())
        what = f"{teller.doing}: {type(error).__name__}: {error}"
        teller.failed("examination", what, "this is a defect: report it with --log FILE", teller.op)
    teller.end()
    sys.stdout.flush()
    os._exit(0)  # taking everything down would take time, and could hang
