"""Time each op of csrc/ops.def on the cases of needle.testing, beside a floor.

    python benchmarks/kernels.py                           on a GPU, else on the CPU
    python benchmarks/kernels.py --only matmul layernorm   ops whose names contain one of these
    python benchmarks/kernels.py --dtype float32 --size 8192

Elementwise ops and reductions run on square arrays of --size, other ops on their largest case. The
floor is the time of an empty launch, plus the bytes of operands and results at the rate at which
this device copies (an upper bound of the rate: caches serve small arrays faster, and products are
bound by operations instead). Times are medians of --rounds samples, each long enough to hide its
launch.
"""

from __future__ import annotations

import statistics

import bench
import numpy as np

from needle import _C, testing

SAMPLE_MS = 5.0  # a sample repeats the call about so long


def case_of(op: str, size: int) -> testing.Case | None:
    """Return the case of an op that has the most elements; None where the table has no operands."""
    if op in ("assign", "fill"):
        return testing.copy_case(op, (size, size))
    if op in testing.ELEMENTWISE or op in testing.COMPARISONS or op in testing.REDUCTIONS:
        return testing.formula_case(op, (size, size))
    cases = [case for case in testing.CASES if case.op == op]

    def elements(case: testing.Case) -> int:
        return sum(np.size(value) for value in case.inputs(np.random.default_rng(0)).values())

    return max(cases, key=elements, default=None)


def prepared(case: testing.Case, dtype: str, device: _C.Device):
    """Return (a call of the op on operands of its own, the bytes of its operands and results)."""
    op, values = testing.OPS[case.op], testing.prepare(case, dtype)
    arguments = [
        testing.to_ndarray(values[o.name], testing.dtype_of(o, dtype), device)
        if o.is_array and values[o.name] is not None
        else values[o.name]
        for o in op.inputs
    ]
    function = getattr(_C, case.op)
    results = function(*arguments)
    results = results if isinstance(results, tuple) else (results,)
    arrays = [x for x in (*arguments, *results) if isinstance(x, _C.NDArray)]
    written = [a for o, a in zip(op.inputs, arguments) if o.is_written and a is not None]
    return lambda: function(*arguments), sum(a.nbytes for a in (*arrays, *written))


def main() -> None:
    parser = bench.parser(
        __doc__,
        bench.DEVICE,
        bench.DTYPE,
        ("--only", [str], "NAME", "ops whose names contain one of these"),
        ("--size", 4096, "N", "rows and columns of elementwise operands"),
        ("--rounds", 7, "N", "samples of each op"),
    )
    args = parser.parse_args()
    device = bench.device_of(args)
    timer = bench.needle_timer(device)

    def microseconds(call: bench.Call) -> float:
        count = bench.repeats_for(SAMPLE_MS, timer, call)
        return 1000 * statistics.median(timer(call, count) / count for _ in range(args.rounds))

    copy, copied = prepared(testing.copy_case("assign", (8192, 8192)), args.dtype, device)
    launch = microseconds(prepared(testing.copy_case("fill", (1, 1)), args.dtype, device)[0])
    rate = copied * 2 / 3 / microseconds(copy)  # `to` is not read
    print(f"{bench.describe(device)}; {args.dtype}; a launch takes {launch:.1f} us")
    print(f"copies: {rate / 1e6:.2f} TB/s")
    print(f"{'op':30} {'case':>24} {'us':>9} {'floor us':>9} {'of it':>6}")
    for op in testing.OPS:
        case = case_of(op, args.size)
        if case is None or (args.only and not any(name in op for name in args.only)):
            continue
        call, moved = prepared(case, args.dtype, device)
        took, floor = microseconds(call), launch + moved / rate
        print(
            f"{op:30} {case.label[:24]:>24} {took:9.1f} {floor:9.1f} {floor / took:6.2f}",
            flush=True,
        )


if __name__ == "__main__":
    bench.run(main)
