"""The generic tests over needle/testing/: every op of ops.def on every device, dtype and layout."""

import itertools
from functools import partial

import numpy as np
import pytest
from harness import SANITIZED, assert_same_bits, check_numbers, device_of, naming, poison, python

from needle import _C
from needle.testing import (
    CASES,
    COMPARISONS,
    ELEMENTWISE,
    FLOATS,
    INTEGERS,
    LAYOUTS,
    OPS,
    REDUCTIONS,
    call,
    check,
    formula_case,
    laid_out_values,
    prepare,
    rng_of,
    rounder,
    to_ndarray,
)
from needle.testing.elementwise import LIMITS, REDUCED_SHAPES, SPECIAL

STRUCTURED = {
    op: [case for case in CASES if case.op == op] for op in dict.fromkeys(c.op for c in CASES)
}
FIRST = {op: cases[0] for op, cases in STRUCTURED.items()}
PLACED = {op: [o.name for o in OPS[op].inputs if o.mode == "IO_ROWS"] for op in OPS}
OF_FLOATS = [op for op in ELEMENTWISE if OPS[op].inputs[0].dtype != "W"]
SHAPES = [(1,), (31,), (257,), (31, 257), (3, 1, 5, 7), (0,), (4, 0, 3), ()]
UNREPEATED = "kept offsets columns order offsets_t rows order_t lse".split()


def check_elementwise(op: str, got, values, dtype: str) -> None:
    check(formula_case(op, ()), dict(zip("xy", values)), {"out": got}, dtype)


# ---- against the reference -----------------------------------------------------------------------


@pytest.mark.parametrize("op", STRUCTURED)
def test_structured(op, device):
    for case, dtype in itertools.product(STRUCTURED[op], FLOATS):
        with naming(case, dtype):
            values = prepare(case, dtype)
            poison(device)
            check_numbers(case, values, call(case, values, dtype, device), dtype)


@pytest.mark.parametrize("op", STRUCTURED)
def test_structured_views(op, device):
    """Every operand as a view gives the bits that its contiguous copy gives, each operand in turn
    and all together. A matrix product may take another path for a transposed operand: there the
    reference's bound holds."""
    for case, layout in itertools.product(STRUCTURED[op], LAYOUTS):
        if layout != "contiguous" and case.label not in ("1", "one", "1x1", "1x1x1x1"):
            with naming(case, layout):
                check_views(case, layout, device)


def check_views(case, layout: str, device) -> None:
    arrays = [o for o in OPS[case.op].inputs if o.is_array]
    free = [o for o in arrays if not (o.is_written and layout == "broadcast")]
    first = FIRST[case.op] is case or case.label in ("31x257", "odd", "ragged", "qkv")
    choices = [{o.name: layout for o in free}]
    choices += [{o.name: layout} for o in free] if first and case.op not in ("adamw",) else []
    is_product = any(o.mode == "IN_MATRIX" for o in arrays)
    for dtype in FLOATS if is_product else ["float32"]:
        values = plain = None
        for layouts in choices:
            if layout == "broadcast":  # what must stay a list of blocks or a table keeps its values
                layouts = {n: v for n, v in layouts.items() if n not in UNREPEATED}
            if values is None or layout == "broadcast":  # which changes what is computed with
                values = prepare(case, dtype, layouts)
                plain = None if is_product else call(case, values, dtype, device)
            viewed = call(case, values, dtype, device, layouts)
            if is_product:
                check_numbers(case, values, viewed, dtype)
                continue
            for name, array in viewed.items():
                assert_same_bits(array.compact(), plain[name].compact(), f"{case} {layouts} {name}")


@pytest.mark.parametrize("op", [op for op in STRUCTURED if PLACED[op]])
def test_places_whose_rows_run_backwards(op, device):
    """A result that lies where the caller says may lie there in any order of its rows."""
    layouts = dict.fromkeys(PLACED[op], "backwards")
    for case, dtype in itertools.product(STRUCTURED[op], FLOATS):
        with naming(case, dtype):
            values = prepare(case, dtype, layouts)
            check_numbers(case, values, call(case, values, dtype, device, layouts), dtype)


def pair_of_norms(x, *of):
    parts = [_C.layernorm_fwd(x, w, b, 1e-5) for w, b in (of[:2], of[2:])]
    return _C.layernorm_pair_fwd(x, *of, 1e-5), (parts[0][0], parts[1][0], *parts[1][1:])


def first_products(x, *of, tanh: int):
    *norms, w_qkv, b_qkv, w1, b1 = of
    g, wanted = (_C.empty((x.shape[0], b1.size), x.dtype, x.device) for _ in range(2))
    packed = _C.decode_projections(x, *norms, 1e-5, w_qkv, b_qkv, w1, b1, tanh, g)
    y1, y2, _, _ = _C.layernorm_pair_fwd(x, *norms, 1e-5)
    _C.linear_gelu_fwd(y2, w1, b1, tanh, wanted)
    return (g, packed), (wanted, _C.linear_fwd(y1, w_qkv, b_qkv, None))


def turning_product(x, w, b, cos, sin, bias: bool):
    cos, sin = cos.astype("float32"), sin.astype("float32")
    got = _C.linear_rotary_fwd(x, w, b if bias else None, cos, sin, 2)
    rows, matrix, vector = x.reshape((-1, x.shape[2])), w.reshape((w.shape[0], -1)), b.flat[:]
    wanted = _C.linear_fwd(rows, matrix, vector if bias else None, None).reshape(got.shape)
    _C.rotary(wanted, cos, sin, 2, 1.0)
    return (got,), (wanted,)


NORMS = [((n, c), *[(c,)] * 4) for n, c in [(1, 1), (31, 257), (6, 512), (7, 1032), (3, 4100)]]
PRODUCTS = [
    ((n, c), *[(c,)] * 4, (c, p), (p,), (c, m), (m,))
    for n, c, p, m in [(1, 512, 1536, 2048), (3, 776, 40, 24), (4, 1024, 8, 304)]
]
TURNING = [
    ((b, t, k), (k, h, p, d), (h, p, d), (t, r), (t, r))
    for b, t, k, h, p, d, r in [
        (1, 1, 8, 1, 3, 2, 1),
        (2, 31, 65, 3, 3, 16, 5),
        (3, 70, 96, 2, 3, 64, 8),
    ]
]
FUSED = {  # the results of a fused op and of its parts; shapes of its operands
    "layernorm_pair_fwd": (pair_of_norms, NORMS),
    "decode_projections, erf": (partial(first_products, tanh=0), PRODUCTS),
    "decode_projections, tanh": (partial(first_products, tanh=1), PRODUCTS),
    "linear_rotary_fwd, bias": (partial(turning_product, bias=True), TURNING),
    "linear_rotary_fwd": (partial(turning_product, bias=False), TURNING),
}


@pytest.mark.parametrize("name", FUSED)
def test_fused_op_has_the_bits_of_its_parts(name, device):
    """Hooks, which need the parts, change no bit. A GPU may sum a product that turns otherwise."""
    of, sizes = FUSED[name]
    device = _C.cpu() if sizes is TURNING else device
    for shapes, dtype in itertools.product(sizes, FLOATS):
        with naming(shapes, dtype):
            rng = rng_of(name, shapes)
            made = (to_ndarray(rng.standard_normal(shape), dtype, device) for shape in shapes)
            for got, wanted in zip(*of(*made), strict=True):
                assert_same_bits(got, wanted)


@pytest.mark.parametrize("capacity", [100, 1300])
def test_decode_attention_past_the_positions_reads_nothing(device, capacity):
    qkv, keys, values = (
        to_ndarray(rng_of("decode", shape).standard_normal(shape), "bfloat16", device)
        for shape in [(2, 3, 3, 64), *[(2, 3, capacity, 64)] * 2]
    )
    cos, sin = (_C.array(np.ones((capacity, 4)), "float32", device) for _ in range(2))
    positions = _C.array([capacity - 40, 2], "int32", device)
    o, again = (_C.empty((2, 3, 64), "bfloat16", device) for _ in range(2))
    _C.decode_attention(qkv, cos, sin, positions, 0.125, keys, values, o)
    for array in keys, values:
        array[0, :, capacity - 39 :].fill(np.nan)
        array[1, :, 3:].fill(np.nan)
    _C.decode_attention(qkv, cos, sin, positions, 0.125, keys, values, again)
    assert_same_bits(again, o)


@pytest.mark.cuda
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 7, 16, 31])
def test_recorded_step_of_a_layer_has_the_bits_of_one_that_is_not(rows):
    """A recorded one reads its weights ahead, as does the next step: what is between them waits."""
    gpu = device_of("cuda")
    shapes = [(rows, 512), *[(512,)] * 4, (512, 1536), (1536,), (512, 2048), (2048,)]
    shapes += [(2560, 512), (512,), (512, 34_000)]
    rng = rng_of("recorded", shapes)
    made = [to_ndarray(rng.standard_normal(s) * s[0] ** -0.5, "bfloat16", gpu) for s in shapes]
    x, *norms, w_qkv, b_qkv, w1, b1, w, b, head = made
    both, first = _C.empty((rows, 2560), x.dtype, gpu), x + 0.0
    logits = _C.empty((rows, 34_000), x.dtype, gpu)

    def step():
        for _ in range(5):
            of = w_qkv, b_qkv, w1, b1
            packed = _C.decode_projections(x, *norms, 1e-5, *of, 1, both[:, 512:])
            both[:, :512] = packed[:, :512]
            x[:] = _C.decode_output(both, w, b, x)
            logits[:] = _C.decode_output(x, head, None, None)
            x[:] = x + logits[:, :512]

    step()
    wanted = x + 0.0, logits + 0.0
    x[:] = first
    graph = _C.Graph(gpu, step)
    for _ in range(3):
        x[:] = first
        graph.replay()
        for got, bits in zip((x, logits), wanted, strict=True):
            assert_same_bits(got, bits)


@pytest.mark.cuda
def test_recorded_step_waits_for_the_copies_of_its_operands():
    """Operands without the layout that a kernel needs are copied in each replay, not read ahead."""
    gpu = device_of("cuda")
    rng = rng_of("copies", (34_000, 512))
    shapes = [(1, 512), (34_000, 512), (34_000,), (1, 8, 3, 64), *[(1, 8, 1400, 64)] * 2]
    made = (to_ndarray(rng.standard_normal(shape), "bfloat16", gpu) for shape in shapes)
    x, turned, b, qkv, *caches = made
    cos, sin = (_C.array(np.ones((1300, 4)), "float32", gpu) for _ in range(2))
    positions = _C.array([1200], "int32", gpu)
    y, o = (_C.empty(shape, "bfloat16", gpu) for shape in [(1, 34_000), (1, 8, 64)])

    def step():
        y[:] = _C.decode_output(x, turned.permute((1, 0)), b, None)
        cached = (cache[:, :, :1300] for cache in caches)
        _C.decode_attention(qkv, cos, sin, positions, 0.125, *cached, o)

    graph = _C.Graph(gpu, step)
    for _ in range(4):
        for changed in turned, *caches:
            changed[:] = changed * -1.0
        graph.replay()
        got = y + 0.0, o + 0.0
        step()
        for of_graph, wanted in zip(got, (y, o), strict=True):
            assert_same_bits(of_graph, wanted)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("depth, packed_width", [(512, 1536), (776, 40)])
def test_decode_projections_row_has_the_same_bits_beside_others(depth, packed_width, dtype):
    """However many rows there are, and wherever among them it is."""
    gpu = device_of("cuda")
    shapes = [(32, depth), *[(depth,)] * 4, (depth, packed_width), (packed_width,)]
    shapes += [(depth, 304), (304,)]
    rng = rng_of("rows", shapes)
    x, *others = (
        to_ndarray(rng.standard_normal(shape) * shape[0] ** -0.5, dtype, gpu) for shape in shapes
    )

    def products(rows):
        g = _C.empty((rows.shape[0], 304), dtype, gpu)
        return _C.decode_projections(rows, *others[:4], 1e-5, *others[4:], 1, g), g

    whole = products(x)
    for count in range(1, 32):
        for first in 0, 32 - count:
            with naming((count, first), dtype):
                rows = slice(first, first + count)
                for got, wanted in zip(products(x[rows]), whole, strict=True):
                    assert_same_bits(got, wanted[rows])


@pytest.mark.parametrize("tanh", [0, 1])
def test_gelu_after_a_product_has_the_bits_of_gelu(tanh):
    """Runs on the CPU, over every bfloat16, infinities and NaN among them."""
    bits = np.arange(2**16, dtype=np.uint32) << 16
    one, w = _C.array([[1.0]], "float32"), _C.array(bits.view(np.float32)[None], "float32")
    y, nothing = _C.empty(w.shape, "float32", _C.cpu()), _C.array(np.zeros(2**16), "float32")
    dgelu = _C.linear_gelu_fwd(one, w, nothing, tanh, y)
    gelu, grad = (_C.gelu_tanh, _C.gelu_tanh_bwd) if tanh else (_C.gelu, _C.gelu_bwd)
    np.testing.assert_array_equal(y.numpy(), gelu(w).numpy())
    np.testing.assert_array_equal(dgelu.numpy(), grad(w, one).numpy())
    values = bits.view(np.float32)
    if tanh:  # float64's, too; from 20 on the normal distribution is 0 or 1
        x = values[abs(values) < 20].astype(np.float64)
        u, du = np.sqrt(2 / np.pi) * np.array([x + 0.044715 * x**3, 1 + 0.134145 * x**2])
        s, rest = 1 / (1 + np.exp(-2 * u)), 1 / (1 + np.exp(2 * u))
        for of, wanted in (y, x * s), (dgelu, s + 2 * x * du * s * rest):
            got = of.numpy()[0][abs(values) < 20]
            np.testing.assert_allclose(got, wanted, rtol=2e-5, atol=1e-33)
    far = abs(values) >= 20
    np.testing.assert_allclose(dgelu.numpy()[0][far], values[far] > 0, atol=1e-33)


@pytest.mark.parametrize("op", ELEMENTWISE)
def test_elementwise(op, device):
    for dtype, shape in itertools.product(FLOATS, SHAPES):
        with naming(dtype, shape):
            case = formula_case(op, shape)
            values = prepare(case, dtype)
            poison(device)
            check_numbers(case, values, call(case, values, dtype, device), dtype)


@pytest.mark.parametrize("op", OF_FLOATS)
def test_elementwise_views(op, device):
    operands = len(OPS[op].inputs)
    for shape in [(31, 33), (3, 5, 7), (2, 3, 4, 5)]:
        case = formula_case(op, shape)
        for layouts in itertools.product(LAYOUTS, repeat=operands):
            with naming(shape, layouts):
                named = dict(zip("xy", layouts))
                values = prepare(case, "float32", named)
                check(case, values, call(case, values, "float32", device, named), "float32")


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("op", ["negate", "gelu", "subtract", "maximum"])
def test_large_views_in_every_dtype(op, dtype, device):
    """Sizes that a backend divides: longer than a run of one axis, more than one thread's share."""
    for shape, i in itertools.product([(2, 170, 101), (3, 5, 1500)], range(len(LAYOUTS))):
        case, layouts = formula_case(op, shape), {"x": LAYOUTS[i], "y": LAYOUTS[i - 2]}
        values = prepare(case, dtype, layouts)
        check(case, values, call(case, values, dtype, device, layouts), dtype)
        if len(values) == 2:  # a number on either side
            x, y = (to_ndarray(values[n], dtype, device, layouts[n]) for n in "xy")
            seen = [laid_out_values(values[n], layouts[n]) for n in "xy"]
            check_elementwise(op, getattr(_C, op)(x, 3), [seen[0], 3.0], dtype)
            check_elementwise(op, getattr(_C, op)(3, y), [3.0, seen[1]], dtype)
    firsts = [x[..., :1] for x in values.values()]  # rows that repeat one number, in all operands
    rows = [to_ndarray(x, dtype, device).broadcast_to(shape) for x in firsts]
    seen = [np.broadcast_to(x, shape) for x in firsts]
    check_elementwise(op, getattr(_C, op)(*rows), seen, dtype)


@pytest.mark.parametrize("op", [op for op in OF_FLOATS if len(OPS[op].inputs) == 2])
def test_elementwise_broadcast(op, device):
    for one, other in [
        ((31, 1), (1, 33)),
        ((5,), (3, 1, 5)),
        ((), (4, 3)),
        ((2, 1, 3), (7, 1)),
        ((0, 1), (1, 4)),
        ((3, 1), (3, 1500)),  # rows of more than a run
        ((3, 1500), (3, 1)),
        ((2, 300, 1), (300, 200)),
    ]:
        drawn = (prepare(formula_case(op, shape), "float32") for shape in (one, other))
        values = [of[name] for of, name in zip(drawn, "xy")]
        got = getattr(_C, op)(*(to_ndarray(v, "float32", device) for v in values))
        check_elementwise(op, got, np.broadcast_arrays(*values), "float32")


@pytest.mark.parametrize("op, operands, expected", SPECIAL, ids=[case[0] for case in SPECIAL])
def test_special_values(op, operands, expected, device):
    for repeat in (1, 40):  # the scalar tail and the vector body of a kernel
        arrays = [to_ndarray(np.repeat(x, repeat), "float32", device) for x in operands]
        got = getattr(_C, op)(*arrays).numpy()
        np.testing.assert_array_equal(got, np.repeat(np.float32(expected), repeat))


@pytest.mark.parametrize("op", [op for op in (*OF_FLOATS, *COMPARISONS) if op[-4:] != "_bwd"])
@pytest.mark.parametrize("dtype", FLOATS)
def test_elementwise_at_limits(op, dtype, device):
    """Of two operands all pairs; in the scalar tail of a kernel and in its vector body."""
    with np.errstate(over="ignore"):
        points = rounder(dtype)(np.float32(LIMITS))
    values = [x.ravel() for x in np.meshgrid(*[points] * len(OPS[op].inputs))]
    arrays, apply = [to_ndarray(x, dtype, device) for x in values], getattr(_C, op)
    whole = apply(*arrays)
    tails = [apply(*(x[at : at + 7] for x in arrays)).numpy() for at in range(0, values[0].size, 7)]
    with np.errstate(all="ignore"):
        for got in (whole, _C.array(np.concatenate(tails), whole.dtype, device)):
            check_elementwise(op, got, values, dtype)


@pytest.mark.parametrize("op", [op for op, case in ELEMENTWISE.items() if case.integers])
def test_elementwise_integers(op, device):
    for dtype in ("int32", "int64", "uint8", "uint16"):
        if op in ("negate", "subtract") and dtype.startswith("u"):
            low, high = 0, 1  # nothing below zero to represent
        elif op == "power" and dtype.startswith("u"):
            low, high = 0, 4  # nothing above 255
        else:
            low, high = (0 if dtype.startswith("u") else -9), 10
        rng = rng_of(op, dtype)
        for layout in ("contiguous", "stepped", "reversed"):
            with naming(dtype, layout):
                values = [rng.integers(low, high, (5, 31)) for _ in OPS[op].inputs]
                got = getattr(_C, op)(*(to_ndarray(v, dtype, device, layout) for v in values))
                assert got.dtype == dtype
                np.testing.assert_array_equal(got.numpy(), ELEMENTWISE[op].f(*values))


@pytest.mark.parametrize("dtype", FLOATS + INTEGERS)
@pytest.mark.parametrize("op", COMPARISONS)
def test_comparisons(op, dtype, device):
    for shape, layout in itertools.product([(257,), (31, 5), (0,), ()], LAYOUTS[:5]):
        case, layouts = formula_case(op, shape), dict.fromkeys("xy", layout)
        values = prepare(case, dtype, layouts)
        with naming(shape, layout):
            check(case, values, call(case, values, dtype, device, layouts), dtype)


@pytest.mark.parametrize("op, dtype", [(op, d) for op in REDUCTIONS for d in REDUCTIONS[op][1]])
def test_reductions(op, dtype, device):
    for shape, axes in REDUCED_SHAPES:
        if op not in ("sum", "sumsq") and 0 in shape[len(shape) - axes :]:
            continue  # refused: test_bad_inputs.py
        case, rng = formula_case(op, shape, axes), rng_of(op, dtype, shape)
        for layout in LAYOUTS if max(shape) < 1000 else LAYOUTS[:1]:
            if dtype in FLOATS:  # away from a sum of zero, which has no relative precision
                drawn = rounder(dtype)((rng.standard_normal(shape) + 0.5) / 4)
            else:
                drawn = rng.integers(0, 2 if dtype == "bool" else 100, shape)
            values, layouts = {"x": laid_out_values(drawn, layout), "axes": axes}, {"x": layout}
            poison(device)
            with naming(shape, axes, layout):
                check(case, values, call(case, values, dtype, device, layouts), dtype)


def test_reductions_of_nan_and_infinity(device):
    for at, size in ((0, 257), (5, 257), (63, 257), (256, 257), (150_000, 200_001)):
        values = np.random.default_rng(at).standard_normal(size)
        values[at] = values[-1] = np.nan  # the first counts
        array = to_ndarray(values, "float32", device)
        assert np.isnan(_C.max(array, 1).numpy()) and np.isnan(_C.min(array, 1).numpy())
        assert _C.argmax(array, 1).numpy() == at and _C.argmin(array, 1).numpy() == at
        assert np.isnan(_C.sum(array, 1).numpy())
        wide = to_ndarray(np.tile(values[:, None], 40), "float32", device).permute((1, 0))
        for columns in (wide, wide[1:]):  # 16-byte loads, and not
            assert np.isnan(_C.max(columns, 1).numpy()).all()
            assert (_C.argmax(columns, 1).numpy() == at).all()
            assert (_C.argmin(columns, 1).numpy() == at).all()
    lowest = to_ndarray(np.full((3, 31), -np.inf), "float32", device)
    np.testing.assert_array_equal(_C.max(lowest, 1).numpy(), np.full(3, -np.inf))
    np.testing.assert_array_equal(_C.min(_C.negate(lowest), 1).numpy(), np.full(3, np.inf))
    np.testing.assert_array_equal(_C.argmax(lowest, 1).numpy(), [0, 0, 0])


@pytest.mark.parametrize("to", FLOATS + INTEGERS)
@pytest.mark.parametrize("source", FLOATS + INTEGERS)
def test_assign_converts(to, source, device):
    values = np.array([0, 1, 2, 3, 100, 127]) if source != "bool" else np.array([0, 1, 1, 0, 1, 0])
    if source in FLOATS:
        values = values + 0.75  # truncated by integers
    if source in ("int32", "int64") and not to.startswith("u"):
        values = -values
    held = _C.array(values, dtype=source, device=device).numpy()
    expected = held.astype(bool) if to == "bool" else held.astype("float64" if to in FLOATS else to)
    expected = rounder(to)(expected) if to in FLOATS else expected
    for layout, target in itertools.product(LAYOUTS[:5], repeat=2):
        array = to_ndarray(np.zeros(6), to, device, target)
        _C.assign(array, to_ndarray(values, source, device, layout))
        np.testing.assert_array_equal(array.numpy(), expected)
    array = to_ndarray(np.zeros((5, 6)), to, device)
    _C.assign(array, to_ndarray(values, source, device))  # broadcast
    np.testing.assert_array_equal(array.numpy(), np.broadcast_to(expected, (5, 6)))
    values, expected = np.resize(values, (3, 5, 1202)), np.resize(expected, (3, 5, 1202))
    for layout, target in zip(LAYOUTS[:5], LAYOUTS[2::-1] + LAYOUTS[3:5]):  # in several runs
        array = to_ndarray(np.zeros(values.shape), to, device, target)
        _C.assign(array, to_ndarray(values, source, device, layout))
        np.testing.assert_array_equal(array.numpy(), expected)


@pytest.mark.parametrize("dtype", ["uint8", "bfloat16", "float32", "int64"])
def test_assign_turns_matrices_into_any_strides(dtype, device):
    """A source that is contiguous along another axis moves in squares, but for what is not."""
    values = (np.arange(3 * 70 * 100) % 251).reshape(3, 70, 100)
    source = _C.array(values, dtype=dtype, device=device).permute((0, 2, 1))
    wanted = values.transpose(0, 2, 1)
    whole = (slice(None), slice(None))
    for there in (slice(0, 70), slice(0, 140, 2), slice(139, 69, -1)):
        for turned in (slice(None), slice(None, None, -1)):
            array = _C.array(np.zeros((3, 100, 140)), dtype=dtype, device=device)
            host = np.zeros((3, 100, 140), np.int64)
            host[(*whole, there)] = wanted[:, turned]
            array[(*whole, there)] = source[:, turned]
            np.testing.assert_array_equal(array.numpy().astype(np.int64), host)


def test_assign_copies_overlapping_operands(device):
    for to, source in [
        (slice(1, None), slice(None, -1)),
        (slice(None, -1), slice(1, None)),
        (slice(None), slice(None, None, -1)),
        (slice(0, 128), slice(0, None, 2)),
        (slice(4, 9, 2), slice(0, 5, 2)),  # in one element
        (slice(0, 100), slice(120, 20, -1)),  # a flipped one begins at its end
        (slice(120, 20, -1), slice(0, 100)),
    ]:
        values = np.arange(257.0)
        array = _C.array(values, device=device)
        _C.assign(array[to], array[source][: len(values[to])])
        values[to] = values[source][: len(values[to])].copy()
        np.testing.assert_array_equal(array.numpy(), values)


@pytest.mark.parametrize("dtype", ["uint8", "bfloat16", "float32"])
def test_views_that_begin_anywhere(dtype, device):
    """Wide loads fit some of them, whole rows long as they are."""
    values = (np.arange(40 * 303) % 7).reshape(40, 303)
    array = _C.array(values, dtype=dtype, device=device)
    ids = _C.array([5, 0, 31], dtype="int32", device=device)
    for begin in range(17):
        flat, wide = array.reshape((-1,))[begin : begin + 512], array[:, begin : begin + 64]
        host = values.reshape(-1)[begin : begin + 512]
        np.testing.assert_allclose(_C.sum(flat, 1).item(), host.sum(), rtol=2**-8)
        for to in ("float32", "bfloat16", "int32"):
            np.testing.assert_array_equal(flat.astype(to).numpy(), host)
        np.testing.assert_array_equal((flat + flat).numpy(), 2 * host)
        host = values[:, begin : begin + 64]
        np.testing.assert_array_equal(wide.numpy(), host)
        np.testing.assert_array_equal((wide + wide).numpy(), 2 * host)
        np.testing.assert_array_equal(_C.max(wide, 1).numpy(), host.max(1))
        np.testing.assert_array_equal(_C.max(wide.permute((1, 0)), 1).numpy(), host.max(0))
        if dtype in FLOATS:
            np.testing.assert_array_equal(_C.embedding_fwd(ids, wide).numpy(), host[[5, 0, 31]])


@pytest.mark.parametrize("dtype", FLOATS + INTEGERS)
def test_fill(dtype, device):
    value = 1 if dtype == "bool" else 3
    for shape in SHAPES:
        for layout in LAYOUTS[:5] if shape else LAYOUTS[:1]:
            array = to_ndarray(np.zeros(shape), dtype, device, layout)
            _C.fill(array, value)
            np.testing.assert_array_equal(array.numpy(), np.full(shape, value))
    around = _C.array(np.zeros((5, 7)), dtype=dtype, device=device)
    _C.fill(around[1:4:2, ::-3], value)
    expected = np.zeros((5, 7))
    expected[1:4:2, ::-3] = value
    np.testing.assert_array_equal(around.numpy(), expected)

    for value in (0.5, -0.25, -3, 256, 1e-30, np.inf, 0.0, -0.0) if dtype == "bool" else ():
        array = _C.array(np.full(5, value == 0), dtype="bool", device=device)
        _C.fill(array[1:4], value)
        expected = [value == 0, *[value != 0] * 3, value == 0]
        np.testing.assert_array_equal(array.numpy(), expected, err_msg=str(value))


# ---- optimizer edge ------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [1.0, 0.0])
@pytest.mark.parametrize("broken", [np.nan, np.inf, -np.inf])
def test_a_broken_gradient_changes_nothing(broken, limit, device):
    values = {n: np.random.default_rng(3).random(31).astype(np.float32) for n in "pgmv"}
    values["g"][7] = broken
    arrays = {n: _C.array(a, device=device) for n, a in values.items()}
    low = _C.array(values["p"], dtype="bfloat16", device=device)
    before = low.numpy()
    _, scale = _C.grad_norm(arrays["g"], limit)
    _C.adamw(*arrays.values(), low, scale, 1e-2, 0.9, 0.95, 1e-8, 0.1, 1)
    for name, array in arrays.items():
        np.testing.assert_array_equal(array.numpy(), values[name], err_msg=name)
    np.testing.assert_array_equal(low.numpy(), before)


def test_each_gradient_counts_once_in_the_norm(device):
    """Tries places around each border of chunks of a sum of squares."""
    size = 3 * 65536 + 5
    for at in (0, 1023, 1024, 16383, 16384, 65535, 65536, 131071, 131072, 3 * 65536, size - 1):
        g = np.zeros(size, np.float32)
        g[at] = 3
        norm, scale = _C.grad_norm(_C.array(g, device=device), 1.5)
        assert (norm.item(), scale.item()) == (3, np.float32(1.5) / np.float32(3 + 1e-6)), at


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("size", [1, 31, 2500, 34_008])
def test_greedy_decoding_marks_rows_without_a_largest(size, dtype, device):
    """-inf masks a token: a row is marked where it masks all of them."""
    logits = np.tile(np.arange(size) % 7 - 9.0, (6, 1))
    logits[1:4, size // 2] = [np.inf, np.nan, -np.inf]
    logits[4], logits[5, : size - 1] = -np.inf, -np.inf
    made = _C.array(logits, dtype=dtype, device=device)
    tokens, positions = (_C.array(range(6), "int32", device) for _ in range(2))
    _C.decode_greedy(made, tokens, positions)
    masked = min(size - 1, 6) if size > 1 else -1
    wanted = [min(size - 1, 6), -1, -1, masked, -1, size - 1]
    np.testing.assert_array_equal(tokens.numpy(), wanted)
    np.testing.assert_array_equal(positions.numpy(), np.arange(1, 7))
    x = _C.array(np.eye(1, 8), dtype=dtype, device=device)
    w = _C.array(np.zeros((8, size)), dtype=dtype, device=device)
    for row in range(6):  # each alone: 0 inf is NaN
        w[:1] = made[row : row + 1]
        _C.decode_output_greedy(x, w, tokens[row : row + 1], positions[row : row + 1])
        np.testing.assert_array_equal(tokens.numpy()[row], wanted[row])
    np.testing.assert_array_equal(positions.numpy(), np.arange(2, 8))


# ---- same bits -----------------------------------------------------------------------------------


@pytest.mark.cuda
@pytest.mark.parametrize("op", STRUCTURED)
def test_two_runs_give_the_same_bits(op):
    """On the CPU the next test compares runs of any number of threads."""
    device = device_of("cuda")
    for case in STRUCTURED[op]:
        values = prepare(case, "float32")
        one = call(case, values, "float32", device)
        poison(device)
        other = call(case, values, "float32", device)
        for name in one:
            assert_same_bits(one[name], other[name], f"{case} {name}")


# Computes all with each number of threads, in one process: the operands are drawn once.
THREADS = """
import ctypes
import numpy as np
from harness import assert_same_bits, attended_both_ways, device_of
from needle import _C
from needle.testing import CASES, call, prepare, to_ndarray
device = device_of("cpu")
def compare(what, results):
    first = None
    for n in numbers:
        ctypes.CDLL(_C.__file__).omp_set_num_threads(n)
        found = results()
        for one, other in zip(first or found, found, strict=True):
            assert_same_bits(one, other, f"{what}, {n} threads")
        first = first or found
for dtype in ("float32", "bfloat16"):
    for case in CASES:
        values = prepare(case, dtype)
        compare(f"{case} {dtype}", lambda: [*call(case, values, dtype, device).values()])
rng = np.random.default_rng(0)
for shape in [(1_000_003,), (3, 400_001), (1000, 1003)]:
    x = to_ndarray(rng.standard_normal(shape), "float32", device)
    for op in (_C.sum, _C.sumsq):
        for axes in range(1, len(shape) + 1):
            compare(f"{op} {shape} {axes}", lambda: [op(x, axes)])
a, b = (to_ndarray(rng.standard_normal((1, 700, 700)), "float32", device) for _ in "ab")
compare("matmul", lambda: [_C.matmul(a, b, None)])
for b, t, h, d in (3, 130, 7, 32), (1, 70, 21, 24), (2, 257, 2, 64):  # heads for 2 threads, not 8
    for dtype in ("float32", "bfloat16"):
        made = (rng.standard_normal((b, t, h, d)) for _ in range(4))
        operands = [to_ndarray(values, dtype, device) for values in made]
        def attention():
            o, lse, grads = attended_both_ways(*operands, 0.2)
            return [o, lse, *grads]
        compare(f"attention {b, t, h, d} {dtype}", attention)
"""


def test_the_number_of_threads_changes_no_bit():
    # The sanitizers look at memory alone, most of which many threads take: no second run.
    numbers = [8] if SANITIZED else [1, 2, 8]
    done = python(f"numbers = {numbers}{THREADS}")
    assert done.returncode == 0, done.stderr
