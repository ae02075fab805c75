"""One device: the rates of a GPU beside its data sheet, and every op of csrc/ops.def against its
float64 reference. Cases, references and bounds are those of needle.testing."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import numpy as np

from needle import _C, testing
from needle.diagnose import gpus
from needle.diagnose.facts import describe, in_words
from needle.diagnose.parts import failed, show, tell, trying
from needle.testing import FLOATS, OPS, Case
from needle.training.peaks import peak

LAYOUTS = testing.LAYOUTS[1:5]  # `broadcast` would repeat indices that must differ
SHAPES = [(31, 33), (1,), (5, 130, 67)]  # of ops of one formula
SMALL, MEDIUM, LARGE = 200, 30_000, 300_000  # elements of the operands of a case
ENOUGH = 5  # wrong ops, after which no more are tried
STEADY = "make clean lib; NEEDLE_ARCH=80 takes the kernels for older GPUs; try another GPU"
FLAKY = "look at the memory errors of the GPU, and run this on another"
# A rate below this part of the data sheet's is a failure. On an H200 cuBLASLt reaches 0.7 of the
# products and a copy 0.87 of the memory.
FAR_BELOW = {"bfloat16": 0.4, "memory": 0.5}
SLOW = "see to its temperature, power and clocks (nvidia-smi -q -d PERFORMANCE), then reboot"
SIDE, BYTES = 2048, 1 << 28  # of the matrices and of the copy
LONG_ENOUGH = 50e-3  # seconds of calls, before which clocks rise


def examine(index: str, is_full: str) -> None:
    """index: of the GPU, whose UUID is told; empty: the CPU."""
    device = _C.cuda(int(index)) if index else _C.cpu()
    trying("opening the device")
    device.synchronize()
    if not device.is_host:
        found = describe(device)
        show(str(device), in_words(found))
        tell(found["uuid"])
        examine_rates(device)
    examine_ops(device, is_full == "1")


# ---- ops ----------------------------------------------------------------------------------------


def examine_ops(device: _C.Device, is_full: bool) -> None:
    wrong: set[str] = set()
    count = 0
    for case, dtype, layout in points(is_full):
        if case.op in wrong or len(wrong) == ENOUGH:
            continue
        at = f"{case} {dtype} {layout}"
        trying(at)
        problem, remedy = compare(device, case, dtype, layout)
        count += 1
        if problem:
            wrong.add(case.op)
            failed(str(device), f"{at}: {problem}", remedy)
    if not wrong:
        text = f"ok: {len(OPS)} ops agree with float64 references at {count} points"
        show(str(device), text)


def points(is_full: bool) -> Iterator[tuple[Case, str, str]]:
    """Each case of each op in its dtypes, then in float32 as views; without is_full one case of
    medium size in two dtypes and as two views."""
    most = None if is_full else 2
    for op in OPS:
        for case in cases(op, is_full):
            yield from ((case, dtype, "contiguous") for dtype in dtypes(op)[:most])
            yield from ((case, "float32", layout) for layout in LAYOUTS[:most])


def cases(op: str, is_full: bool) -> list[Case]:
    if op in ("assign", "fill"):
        found = [testing.copy_case(op, shape) for shape in SHAPES]
    elif OPS[op].kind != "OP":
        found = [testing.formula_case(op, shape) for shape in SHAPES]
    else:
        found = [case for case in testing.CASES if case.op == op]
    if is_full:
        return [case for case in found if size(case) <= LARGE]
    return [next(case for case in found if SMALL <= size(case) <= MEDIUM)]


def size(case: Case) -> int:
    """The elements of its operands."""
    return sum(np.size(value) for value in case.inputs(testing.rng_of(case)).values())


def dtypes(op: str) -> tuple[str, ...]:
    """The dtypes in which an op computes."""
    classes = {operand.dtype for operand in OPS[op].operands}
    if not classes & {"F", "ANY", "T"}:
        return FLOATS[:1]
    return (*FLOATS, "int32", "int64") if classes & {"ANY", "T"} else FLOATS


def compare(device: _C.Device, case: Case, dtype: str, layout: str) -> tuple[str, str]:
    """Return the first wrong element and the remedy; ("", "") if none is wrong, or if the op needs
    another GPU. A wrong kernel is wrong in the same way a second time, broken memory is not."""
    layouts = {operand.name: layout for operand in OPS[case.op].inputs}
    values = testing.prepare(case, dtype, layouts)
    try:
        written = testing.call(case, values, dtype, device, layouts)
        testing.check(case, values, written, dtype)
    except (ValueError, _C.CudaError) as error:
        if "compute capability" not in str(error):
            raise
    except AssertionError as error:
        again = testing.call(case, values, dtype, device, layouts)
        if all(np.array_equal(again[n].numpy(), written[n].numpy(), True) for n in written):
            return f"{error} (the same each time)", STEADY
        return f"{error} (another result each time)", FLAKY
    return "", ""


# ---- rates --------------------------------------------------------------------------------------


def examine_rates(device: _C.Device) -> None:
    """Products in bfloat16, and copies within the memory."""
    a, b = (_C.empty((SIDE, SIDE), "bfloat16", device) for _ in "ab")
    _C.assign(a, _C.array(np.random.default_rng(0).random(SIDE), "bfloat16", device))
    _C.assign(b, a)
    source, target = (_C.empty((BYTES // 4,), "float32", device) for _ in "ab")
    source.fill(1.0)
    trying("measuring products")
    judge_rate(device, "bfloat16", 2 * SIDE**3, lambda: _C.matmul(a, b, None), "TFLOP/s", 1e12)
    trying("measuring memory")
    judge_rate(device, "memory", 2 * BYTES, lambda: _C.assign(target, source), "GB/s", 1e9)


def judge_rate(
    device: _C.Device, what: str, amount: float, work: Callable, unit: str, scale: float
) -> None:
    """Measure and show a rate, beside the data sheet if it has one. amount: of a call of `work`."""
    name, rate = device.properties()["name"], amount / seconds_of(device, work)
    best = None if "MIG" in name else peak(name, what)  # a part of a GPU has no data sheet
    text = f"{what}: {rate / scale:,.3g} {unit}"
    if best is not None:
        text += f", the data sheet has {best / scale:,.4g}"
    if best is None or rate >= FAR_BELOW[what] * best:
        show(str(device), f"ok: {text}")
    elif len(gpus.holders(device.properties()["uuid"])) > 1:
        show(str(device), f"note: {text}, and another process is on this GPU")
    else:
        failed(str(device), text, SLOW)


def seconds_of(device: _C.Device, work: Callable[[], object]) -> float:
    """Seconds of a call, by as many as take long enough."""
    work()
    count, seconds = 1, 0.0
    while seconds < LONG_ENOUGH:
        count *= 2
        device.synchronize()
        start = time.perf_counter()
        for _ in range(count):
            work()
        device.synchronize()
        seconds = time.perf_counter() - start
    return seconds / count
