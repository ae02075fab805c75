"""Wrong calls: each raises the right exception and says which operand is wrong and how."""

import itertools

import numpy as np
import pytest
from bad_calls import BAD, BAD_VALUES, long_ids
from harness import device_of, naming
from test_ops import FIRST

from needle import _C
from needle.testing import CASES, ELEMENTWISE, OPS, REDUCTIONS, dtype_of, prepare, to_ndarray

STRUCTURED = [name for name, op in OPS.items() if op.kind == "OP" and name in FIRST]
SOLID = {  # a case of each op without zero sizes, None operands or axes of one element
    case.op: case
    for case in reversed(CASES)
    if case.label in ("31x257", "1x31x257x31", "31x257x31", "odd", "qkv")
} | {
    op: case
    for op in STRUCTURED
    for case in CASES
    if case.op == op and case.label in ("31-scaled", "per-head", "rotated")
}
SOLID = {op: SOLID.get(op, FIRST[op]) for op in STRUCTURED}


def arguments_of(op: str, device, changes=None) -> dict:
    case = SOLID[op]
    values = prepare(case, "float32") | (changes or {})
    made = {}
    for operand in OPS[op].inputs:
        value = values[operand.name]
        if operand.is_array and value is not None:
            value = to_ndarray(np.asarray(value), dtype_of(operand, "float32"), device)
        made[operand.name] = value
    return made


def refuse(op: str, arguments, exception, pattern: str) -> None:
    with pytest.raises(exception, match=pattern):
        getattr(_C, op)(*(arguments.values() if isinstance(arguments, dict) else arguments))


@pytest.mark.parametrize("op", STRUCTURED)
def test_sizes_dtypes_and_kinds(op, device):
    """Every array operand of a structured op in turn: one axis too long, one axis too few, another
    dtype, None, a number, a string."""
    good = arguments_of(op, device)
    sizes: dict[str, int] = {}
    for operand in OPS[op].inputs:
        if not operand.is_array or good[operand.name] is None:
            continue
        name, array = operand.name, good[operand.name]
        host = array.numpy()
        for axis, letter in enumerate(operand.axes):
            if letter in sizes:
                longer = np.concatenate([host, host], axis)
                bad = good | {name: to_ndarray(longer, array.dtype, device)}
                refuse(op, bad, ValueError, rf"{op}: {name}: axis {letter} is {longer.shape[axis]}")
            sizes.setdefault(letter, array.shape[axis])
        bad = good | {name: to_ndarray(host[None], array.dtype, device)}
        refuse(op, bad, ValueError, rf"{op}: {name}")
        for other in ("int64", "float16" if operand.dtype != "F" else "uint8"):
            if other == array.dtype or operand.dtype in ("ANY", "T"):
                continue
            bad = good | {name: to_ndarray(np.nan_to_num(host, posinf=0, neginf=0), other, device)}
            refuse(op, bad, TypeError, rf"{op}: {name}: .*{other}")
        for wrong in ("text", 3.5, object()):
            refuse(op, good | {name: wrong}, TypeError, rf"{op}: {name}")
        if "OPT" not in operand.mode:
            refuse(op, good | {name: None}, TypeError, rf"{op}: {name}")
    floats = [o.name for o in OPS[op].inputs if o.dtype in ("F", "T") and good[o.name] is not None]
    if len(floats) > 1:
        bad = good | {floats[-1]: good[floats[-1]].astype("bfloat16")}
        refuse(op, bad, TypeError, rf"{op}: {floats[-1]}: .*bfloat16")


@pytest.mark.parametrize("op", STRUCTURED)
def test_letters_of_the_table_stand_for_sizes_that_differ(op):
    """The refusals above are made from the table, and do not see a wrong letter in it: where two
    letters are the same size in every case, one of them may be meant for the other."""
    seen = []
    for case in CASES:
        values = case.inputs(np.random.default_rng(0)) if case.op == op else {}
        shapes = {o: np.shape(values[o.name]) for o in OPS[op].inputs if o.name in values}
        seen += [{a: n for o, shape in shapes.items() for a, n in zip(o.axes, shape)}]
    for a, b in itertools.combinations(sorted(set().union(*seen)), 2):
        sizes = {(sizes[a], sizes[b]) for sizes in seen if a in sizes and b in sizes}
        same = bool(sizes) and all(one == other for one, other in sizes)
        assert not same, (
            f"csrc/ops.def: {op}: {a} and {b} differ in no case: give one in needle/testing/"
        )


@pytest.mark.parametrize("op", STRUCTURED)
def test_arguments(op):
    good = list(arguments_of(op, device_of("cpu")).values())
    refuse(op, good[:-1], TypeError, op)
    refuse(op, [*good, 1], TypeError, op)
    refuse(op, [], TypeError, op)
    with pytest.raises(TypeError, match=op):
        getattr(_C, op)(*good, colour="red")
    for operand in OPS[op].inputs:
        if not operand.is_array:
            bad = arguments_of(op, device_of("cpu"), {operand.name: "many"})
            refuse(op, bad, TypeError, rf"{op}: {operand.name}")


def test_arguments_by_keyword():
    made = arguments_of("layernorm_fwd", device_of("cpu"))
    for one, other in zip(_C.layernorm_fwd(**made), _C.layernorm_fwd(*made.values()), strict=True):
        np.testing.assert_array_equal(one.numpy(), other.numpy())
    with pytest.raises(TypeError, match="got 'x' twice"):
        _C.layernorm_fwd(*made.values(), x=made["x"])


@pytest.mark.parametrize("op, changes, words", BAD)
def test_refused(op, changes, words, device):
    refuse(op, arguments_of(op, device, changes), ValueError, f"{op}: {words}")


@pytest.mark.parametrize("op, changes, words", BAD_VALUES)
def test_refused_values(op, changes, words):
    refuse(op, arguments_of(op, _C.cpu(), changes), ValueError, f"{op}: {words}")


@pytest.mark.cuda
def test_values_that_cuda_cannot_look_at():
    """An id or a target outside the vocabulary: NaN forward, skipped backward, the rest right."""
    device = device_of("cuda")
    changes = {"ids": long_ids(31, 257)}
    made = arguments_of("embedding_fwd", device, changes)
    y, w = _C.embedding_fwd(**made).numpy(), made["w"].numpy()
    bad = 31 // 2
    assert np.isnan(y[bad]).all()
    np.testing.assert_array_equal(np.delete(y, bad, 0), np.repeat(w[:1], 30, 0))
    made = arguments_of("embedding_bwd", device, changes)
    before, dy = made["dw"].numpy(), made["dy"].numpy()
    _C.embedding_bwd(**made)
    np.testing.assert_allclose(
        made["dw"].numpy()[0], before[0] + np.delete(dy, bad, 0).sum(0), rtol=1e-5, atol=1e-5
    )
    np.testing.assert_array_equal(made["dw"].numpy()[1:], before[1:])
    made = arguments_of("embedding_bwd", device, {"ids": long_ids(31, -1)})
    _C.embedding_bwd(**made)
    np.testing.assert_array_equal(made["dw"].numpy()[1:], before[1:])
    made = arguments_of("decode_attention", device, {"positions": np.array([1, 37, 2])})
    before = made["keys"].numpy()[1]
    _C.decode_attention(**made)
    o = made["o"].numpy()
    assert np.isnan(o[1]).all() and np.isfinite(o[[0, 2]]).all()
    np.testing.assert_array_equal(made["keys"].numpy()[1], before)
    made = arguments_of("cross_entropy_fwd", device, {"targets": changes["ids"]})
    losses, loss = _C.cross_entropy_fwd(**made)
    assert np.isnan(loss.numpy()) and np.isnan(losses.numpy()[bad])
    assert np.isfinite(np.delete(losses.numpy(), bad)).all()


def wrong_operands():
    """(op, operands, error, its words) of the ops of one formula."""
    x, wide = _C.array(np.ones((3, 4))), _C.array(np.ones((3, 5)))
    for op in ELEMENTWISE:
        if len(OPS[op].inputs) == 2:
            dtype = dtype_of(OPS[op].inputs[0], "float32")
            one, other = x.astype(dtype), wide.astype(dtype)
            yield op, [one, other], ValueError, rf"{op}: .*(4|5)"
            for wrong in ([1.0, 2.0], [one, "text"], [one, None], [one]):
                yield op, wrong, TypeError, op
    for op in REDUCTIONS:
        yield op, [x, 3], ValueError, rf"{op}: axes"
        yield op, [x, -1], ValueError, rf"{op}: axes"
        yield op, ["text", 1], TypeError, op
        if op not in ("sum", "sumsq"):  # of nothing there is no largest
            yield op, [_C.array(np.ones((3, 0))), 1], ValueError, rf"{op}: "
    yield "assign", [x, wide], ValueError, "assign: "
    yield "assign", [x, _C.array(np.ones((2, 3, 4)))], ValueError, "assign: "
    yield "assign", [x, None], TypeError, "assign: source"
    yield "fill", [x, "text"], TypeError, "fill: value"


def test_ops_of_one_formula_refuse():
    for op, operands, error, words in wrong_operands():
        with naming(op, *map(type, operands)):
            refuse(op, operands, error, words)


@pytest.mark.cuda
@pytest.mark.parametrize(
    "op", [op for op in STRUCTURED if sum(o.is_array for o in OPS[op].inputs) > 1]
)
def test_operands_on_two_devices(op):
    made = arguments_of(op, device_of("cuda"))
    last = [o.name for o in OPS[op].inputs if o.is_array and made[o.name] is not None][-1]
    refuse(
        op, made | {last: made[last].to(device_of("cpu"))}, TypeError, rf"{op}: {last}: .*cpu\(\)"
    )
