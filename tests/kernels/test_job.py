"""needle/kernels/job.py: jobs that are read or refused, how they run, and answers."""

import base64
import copy
import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
import safetensors.numpy
from harness import naming
from hypothesis import given, settings
from hypothesis import strategies as st

from needle import _C
from needle.kernels import InOut, Out, Random, Result, Timing, job
from needle.kernels.job import Refused, RequestLimits, read_job, to_json, write_result
from needle.kernels.sanitizer import Finding

LIMITS = RequestLimits(body_bytes=1 << 20, source_bytes=1000, array_bytes=1 << 16)
X = np.arange(6, dtype=np.float32).reshape(2, 3)
OUT = {"shape": [2, 3], "dtype": "float32", "out": True}
CASE = {"grid": 1, "block": [32, 1, 1], "args": [{"array": "x"}, OUT, 2.5, 6]}
JOB = {"source": "the source", "entry": "scale<float>", "cases": [CASE]}
REFERENCE = {"source": "the reference", "entry": "right"}
JUDGED = JOB | {"reference": REFERENCE}
ARG = ("cases", 0, "args", 0)
DRAWN = {"shape": [2], "dtype": "float16", "seed": 1, "low": 0, "high": 1}


def sent(**arrays) -> bytes:
    return safetensors.numpy.save(arrays)


def read(value, arrays=b"", limits=LIMITS):
    return read_job(json.dumps(value).encode(), arrays or sent(x=X), limits)


def changed(*path, to):
    """Return JOB with one place changed."""
    value = copy.deepcopy(JOB)
    inner = value
    for step in path[:-1]:
        inner = inner[step]
    inner[path[-1]] = to
    return value


def refused(value, status=400, arrays=b"", limits=LIMITS) -> Refused:
    with pytest.raises(Refused) as caught:
        read(value, arrays, limits)
    assert caught.value.status == status, caught.value.message
    return caught.value


# ---- reading -------------------------------------------------------------------------------------


def test_a_job_is_read():
    found = read(JOB | {"language": "cuda", "outputs": True, "sanitizer": "racecheck"})
    assert found.fields.outputs and found.fields.sanitizer == "racecheck"
    (case,) = found.cases
    assert (case.grid, case.block, case.shared) == (1, [32, 1, 1], 0)
    x, y, a, n = case.args
    assert (x == X).all() and y == Out((2, 3)) and (a, n) == (2.5, 6) and type(n) is int
    null = read(JOB | {"language": None, "reference": None, "trials": None, "tolerance": None})
    assert null.cases[0].args[1:] == case.args[1:]


def test_arguments_are_read():
    for sent_as, meant in (
        (True, True),
        (-(2**63), -(2**63)),
        (2**64 - 1, 2**64 - 1),
        (1e-300, 1e-300),
        ({"bytes": "00ff 3f"}, b"\0\xff\x3f"),
        ({"shape": [], "dtype": "bool", "out": True}, Out((), "bool")),
        ({"shape": [0, 7], "dtype": "int8", "out": True}, Out((0, 7), "int8")),
        ({"shape": [4], "dtype": "bfloat16", "seed": 3}, Random((4,), "bfloat16", 3)),
        (DRAWN, Random((2,), "float16", 1, 0, 1)),
        (DRAWN | {"inout": True}, InOut(Random((2,), "float16", 1, 0, 1))),
    ):
        with naming(sent_as):
            assert read(changed("cases", 0, "args", to=[sent_as])).cases[0].args == [meant]
    arg = read(changed(*ARG, to={"array": "x", "inout": True})).cases[0].args[0]
    assert isinstance(arg, InOut) and (arg.array == X).all()


def bfloat16(name: str, values) -> bytes:
    """Return safetensors whose data are not aligned."""
    bits = (np.asarray(values, np.float32).view(np.uint32) >> 16).astype(np.uint16)
    header = {name: {"dtype": "BF16", "shape": list(bits.shape), "data_offsets": [0, bits.nbytes]}}
    text = json.dumps(header).encode()
    text += b" " * (1 - len(text) % 2)
    return len(text).to_bytes(8, "little") + text + bits.tobytes()


def test_arrays_are_read():
    for dtype in "float32 float16 float64 int8 int16 int32 int64 uint8 uint64 bool".split():
        with naming(dtype):
            value = np.array([[0, 1, 1], [1, 0, 1]], dtype)
            got = read(JOB, sent(x=value, unused=X)).cases[0].args[0]
            assert got.dtype == value.dtype and (got == value).all()
    got = read(JOB, bfloat16("x", [1.5, -2.0])).cases[0].args[0]
    assert isinstance(got, _C.NDArray) and got.dtype == "bfloat16"
    assert got.numpy().tolist() == [1.5, -2.0]
    asked = changed("cases", 0, "expected", to=["y"])
    asked["cases"][0]["args"] = [OUT]
    (expected,) = read(asked, bfloat16("y", [0.5])).expected[0]
    assert expected.dtype == np.float32 and expected.tolist() == [0.5]


# ---- running -------------------------------------------------------------------------------------


class Recorder:
    """A pool that records its calls and computes twice its first array."""

    def __init__(self, status="ok"):
        self.runs, self.evaluations, self.status = [], [], status

    def run(self, source, entry, grid, block, args, shared=0, **more):
        self.runs.append((source, entry, grid, block, args, shared, more))
        value = next((getattr(a, "array", a) for a in args if hasattr(a, "__array__")), X)
        return Result(self.status, "as asked", (2 * np.asarray(value),))

    def evaluate(self, source, entry, cases, reference, tolerance, **more):
        self.evaluations.append((source, entry, cases, tolerance, more))
        for case, right in zip(cases, reference):
            self.answers = right.of_case(case.drawn(0))
        return Result("ok")


def test_one_case_without_an_answer_is_run():
    pool = Recorder()
    read(JOB | {"explain": True}).do(pool, 10.0)
    ((source, entry, grid, block, args, shared, more),) = pool.runs
    assert (source, entry, grid, block, shared) == ("the source", "scale<float>", 1, [32, 1, 1], 0)
    assert more == {"sanitizer": None, "explain": True} and args[2:] == [2.5, 6]


def test_expected_arrays_are_compared():
    asked = changed("cases", 0, "expected", to=["y"])
    asked |= {"trials": 3, "time": False, "tolerance": 0.5}
    pool = Recorder()
    assert read(asked, sent(x=X, y=3 * X)).do(pool, 10.0).status == "ok"
    ((_, _, cases, tolerance, more),) = pool.evaluations
    assert (tolerance, more) == (0.5, {"trials": 3, "time": False})
    assert (pool.answers[0] == 3 * X).all() and len(cases) == 1 and pool.runs == []
    read(JUDGED | {"tolerance": [0, 1]}).do(pool, 10.0)
    _, _, _, tolerance, more = pool.evaluations[-1]
    assert (list(tolerance), more) == ([0, 1], {"trials": 5, "time": True})


def test_a_reference_gets_the_same_arguments():
    for own in ({}, {"grid": 7, "block": [8], "shared": 9}):
        asked = changed("cases", 0, "args", 2, to={"bytes": "01"}) | {"reference": REFERENCE | own}
        asked["cases"][0]["args"] += [{"shape": [2], "dtype": "bfloat16", "seed": 4, "inout": True}]
        asked["cases"][0]["shared"] = 64
        pool = Recorder()
        read(asked).do(pool, 10.0)
        ((source, entry, grid, block, args, shared, _),) = pool.runs
        assert (source, entry) == ("the reference", "right")
        assert (grid, block, shared) == ((7, [8], 9) if own else (1, [32, 1, 1], 64))
        x, y, struct, n, drawn = args
        assert (x == X).all() and y == Out((2, 3)) and (struct, n) == (b"\1", 6)
        assert isinstance(drawn, InOut) and drawn.array.dtype == "bfloat16"
        assert (drawn.array.numpy() == Random((2,), "bfloat16", 4).array(0, 4).numpy()).all()
        assert (pool.answers[0] == 2 * X).all()


def test_a_reference_that_fails_is_refused():
    for failed, status, said in (
        ("timeout", 422, "reference: it fails: timeout"),
        ("device_lost", 503, "no device for the"),
    ):
        with pytest.raises(Refused, match=f"{said}.*: as asked") as caught:
            read(JUDGED).do(Recorder(failed), 10.0)
        assert caught.value.status == status


def test_a_job_that_takes_too_long_ends_between_launches(monkeypatch):
    clock = SimpleNamespace(now=100.0, monotonic=lambda: clock.now)
    monkeypatch.setattr(job, "time", clock)
    pool = Recorder()

    def slow(*args, **more):
        clock.now += 6
        return Recorder.run(pool, *args, **more)

    pool.run = slow
    result = read(JUDGED | {"cases": [CASE] * 5}).do(pool, 10.0)
    assert result.status == "timeout" and "after 10 s (--job-seconds)" in result.message
    assert len(pool.runs) == 2


# ---- refusing ------------------------------------------------------------------------------------


def test_text_that_is_no_json_is_refused():
    texts = [b"", b"{", b"\xff\xfe", b"nul", b'{"source": NaN}', b"[" * 100_000]
    texts += [b'{"source": "\\ud800"}', b'{"source": %s}' % (b"1" * 5000)]
    texts += [json.dumps(changed("cases", 0, "args", 2, to=7)).replace("7", "1e999").encode()]
    for text in texts:
        with naming(text[:40]):
            with pytest.raises(Refused, match="^job") as caught:
                read_job(text, b"", RequestLimits())
            assert caught.value.status == 400


def test_wrong_fields_are_refused_with_their_place():
    for path, to, said in (
        (("source",), 5, "job.source: Expected `str`, got `int`"),
        (("entry",), "", "job.entry: Expected `str` of length >= 1"),
        (("entry",), "a\nb", "job.entry: must be the name of a kernel"),
        (("language",), "ptx", "job.language: Invalid enum value 'ptx'; allowed: cuda (CUDA C++"),
        (("cases",), [], "job.cases: Expected `array` of length >= 1"),
        (("cases",), [CASE, CASE], "job: cases: without expected or reference, give one case"),
        (("cases",), [3], "job.cases[0]: Expected `object`, got `int`"),
        (("unknown",), 1, "job: Object contains unknown field `unknown`; docs/kernels.md"),
        (("outputs",), 1, "job.outputs: Expected `bool | null`, got `int`"),
        (("sanitizer",), "memcheck --kill", "allowed: memcheck, racecheck"),
        (("trials",), 5, "job: trials: only with expected or reference"),
        (("time",), True, "job: time: only with expected or reference"),
        (("tolerance",), 0, "job: tolerance: only with expected or reference"),
        (("reference",), {"source": "x"}, "job.reference: Object missing required field `entry`"),
        (("cases", 0, "grid"), 1.0, "job.cases[0].grid: Expected `int | array`, got `float`"),
        (("cases", 0, "grid"), [], "job.cases[0].grid: Expected `array` of length >= 1"),
        (("cases", 0, "block"), [1, "1"], "job.cases[0].block[1]: Expected `int`, got `str`"),
        (("cases", 0, "shared"), -1, "job.cases[0].shared: Expected `int` >= 0"),
        (("cases", 0, "python"), "exec", "job.cases[0]: Object contains unknown field `python`"),
        (("cases", 0, "expected"), ["y"], "job.cases[0].expected: no array 'y'"),
        (ARG, "x", "job.cases[0].args[0]: Expected `bool | int | float | object`, got `str`"),
        (ARG, {}, "job.cases[0].args[0]: must have exactly one of array, shape, bytes"),
        (ARG, {"array": "x", "bytes": "00"}, "must have exactly one of array, shape, bytes"),
        (ARG, {"array": "z"}, "no array 'z' in the safetensors: x"),
        (ARG, {"array": "x", "seed": 1}, "seed does not go with array"),
        (ARG, {"array": "x", "out": True}, "array does not go with out"),
        (ARG, {"array": "x", "inout": 1}, "args[0].inout: Expected `bool | null`"),
        (ARG, {"bytes": "xy"}, "no hexadecimal digits: 'xy'"),
        (ARG, {"shape": [2], "seed": 1}, "dtype is missing"),
        (ARG, {"shape": [2], "dtype": "float32"}, "seed is missing"),
        (ARG, OUT | {"seed": 1}, "seed does not go with out"),
        (ARG, OUT | {"inout": True}, "inout does not go with out"),
        (ARG, OUT | {"low": 1}, "low does not go with out"),
        (ARG, OUT | {"dtype": "complex128"}, "args[0].dtype: Invalid enum value 'complex128'; all"),
        (ARG, OUT | {"shape": [-1]}, "args[0].shape[0]: Expected `int` >= 0"),
        (ARG, OUT | {"shape": 5}, "args[0].shape: Expected `array | null`"),
        (ARG, {"shape": [2], "dtype": "float32", "seed": -1}, "args[0].seed: Expected `int` >= 0"),
        (ARG, DRAWN | {"high": 70000}, "Random: low and high are 0 and 70000; float16 takes numbe"),
    ):
        with naming(path, to):
            message = refused(changed(*path, to=to)).message
            assert said in message, message
    for value in (None, [], 3, "text", True):
        assert refused(value).message.startswith("job: Expected `object`, got")


def test_wrong_comparisons_are_refused():
    for value, said in (
        (JUDGED | {"trials": 0}, "job.trials: Expected `int` >= 1"),
        (JUDGED | {"tolerance": -1}, "job.tolerance: Expected"),
        (JUDGED | {"tolerance": [1]}, "job.tolerance: Expected `array` of length >= 2"),
        (JUDGED | {"tolerance": [0, -1]}, "job.tolerance[1]: Expected"),
        (JUDGED | {"sanitizer": "memcheck"}, "sanitizer: only without expected or reference"),
        (JUDGED | {"explain": True}, "explain: only without expected or reference"),
        (JUDGED | {"cases": [CASE | {"expected": ["x"]}]}, "give cases with expected each"),
        (JOB | {"cases": [CASE | {"expected": ["x"]}, CASE]}, "give cases with expected each"),
        (JUDGED | {"reference": REFERENCE | {"args": []}}, "unknown field `args`"),
    ):
        with naming(value):
            message = refused(value).message
            assert said in message, message
    assert refused(JUDGED | {"trials": 51}).limit == 50


def test_limits_are_in_the_refusal():
    count = RequestLimits(source_bytes=1000, array_bytes=1000)
    for value, limit, limits in (
        (JOB | {"source": "é" * 501}, 1000, LIMITS),
        (JUDGED | {"reference": REFERENCE | {"source": "x" * 1001}}, 1000, LIMITS),
        (JOB | {"entry": "k" * 1001}, 1000, LIMITS),
        (JOB | {"entry": "x" * LIMITS.json_bytes}, LIMITS.json_bytes, LIMITS),
        (JUDGED | {"cases": [CASE] * 65}, 64, RequestLimits()),
        (changed("cases", 0, "block", to=[1] * 4), 3, LIMITS),
        (changed("cases", 0, "args", to=[1] * 257), 256, LIMITS),
        (changed("cases", 0, "args", 1, to=OUT | {"shape": [1] * 9}), 8, LIMITS),
        (changed("cases", 0, "args", 1, to=OUT | {"shape": [1 << 14]}), 1 << 16, LIMITS),
        (changed("cases", 0, "args", 1, to=OUT | {"shape": [1 << 15, 0]}), 1 << 16, LIMITS),
        (changed("cases", 0, "args", to=[{"array": "x"}] * 100), 1000, count),
        (changed(*ARG, to={"bytes": "00" * 40000}), job.STRUCT_BYTES, RequestLimits()),
        (changed(*ARG, to={"bytes": ""}), job.STRUCT_BYTES, LIMITS),
        (JOB | {"outputs": True}, 40, RequestLimits(body_bytes=40, array_bytes=1 << 16)),
    ):
        with naming(limit, str(value)[:100]):
            assert refused(value, 413, limits=limits).limit == limit
    assert not read(JOB, limits=RequestLimits(body_bytes=40)).fields.outputs
    assert read(changed("cases", 0, "args", 1, to=OUT | {"shape": [(1 << 14) - 6]})).cases
    assert read(JOB | {"source": "x" * 1000}).cases


def test_arrays_that_are_no_safetensors_are_refused():
    def header(shape: str) -> bytes:
        text = b'{"x":{"dtype":"F32","shape":[%s],"data_offsets":[0,0]}}' % shape.encode()
        return len(text).to_bytes(8, "little") + text

    for data in (
        b"x",
        b"\x80\x04pickle.",
        (1 << 40).to_bytes(8, "little") + b"{}",
        sent(x=X)[:-1],
        sent(x=X) + b"x",
        sent(x=X).replace(b'"F32"', b'"F99"'),
        sent(x=X).replace(b"[2,3]", b"[9,3]"),
        header(",".join(["1"] * 65)),
        header(f"0,{2**70}"),
        header(",".join(["3"] * 100_000)),  # a product that takes a minute
    ):
        with naming(data[:60]):
            assert refused(JOB, arrays=data).message.startswith("arrays")
    arrays = safetensors.numpy.save({"x": X}, {"about": "x" * job.HEADER_BYTES})
    error = refused(JOB, 413, arrays)
    assert error.limit == job.HEADER_BYTES and "the header of safetensors" in error.message
    assert "truncated" in refused(JOB, arrays=arrays[: job.HEADER_BYTES]).message


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["cuda", "x", "float32", 2**63, -(2**70), [], {}, "memcheck"]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from("array shape dtype seed out inout bytes low high grid args".split())
            | st.text(max_size=5),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)
FULL = JUDGED | {"tolerance": [0, 1], "trials": 2, "time": False, "outputs": True}


def places(value, path=()):
    yield path
    if isinstance(value, (dict, list)):
        for name, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from places(inner, (*path, name))


@st.composite
def jobs(draw_from, full=FULL):
    """Draw a good job of which some places hold any value."""
    value = copy.deepcopy(full)
    for _ in range(draw_from(st.integers(1, 3))):
        path = draw_from(st.sampled_from([path for path in places(value) if path]))
        inner = value
        for step in path[:-1]:
            inner = inner[step]
        inner[path[-1]] = draw_from(VALUES)
    return value


@settings(max_examples=80, deadline=None)
@given(jobs(), st.binary(max_size=200))
def test_any_job_is_read_or_refused(value, arrays):
    for given_arrays in (sent(x=X), arrays, len(arrays).to_bytes(8, "little") + arrays):
        try:
            read_job(json.dumps(value).encode(), given_arrays, LIMITS)
        except Refused as error:
            assert 400 <= error.status < 500 and error.message
            to_json({"message": error.message})


# ---- answers -------------------------------------------------------------------------------------


def test_an_answer_has_all_fields_of_a_result():
    timing = Timing(1.0, 0.5, math.inf, 3, math.nan, 2.0, False, "too fast", ("launch-bound",))
    outputs = (X, np.float64([1, 2]), np.array(True))
    found = (Finding("Invalid write", "k", 3, (0, 0, 1), (2, 0, 0)),)
    texts, resources = ("wrong_result", "the message"), {"registers": np.int64(5)}
    result = Result(*texts, outputs, "printed\n\0\x1b", resources, (timing,), found, 1)
    answer = json.loads(write_result(result, True, {"queued": 0.0, "ran": 1.5}))
    outputs = safetensors.numpy.load(base64.b64decode(answer.pop("outputs"), validate=True))
    assert outputs.keys() == {"0", "1", "2"} and outputs["1"].dtype == np.float64
    assert (outputs["0"] == X).all() and outputs["2"].shape == () and outputs["2"]
    figures = {"median": 1.0, "lower": 0.5, "upper": None, "rate": None, "device_rate": 2.0}
    more = {"calls": 3, "valid": False, "reason": "too fast", "hints": ["launch-bound"]}
    assert answer.pop("timing")[0] == figures | more
    assert answer.pop("explanation")[0]["thread"] == [0, 0, 1]
    assert answer.pop("seconds") == {"queued": 0.0, "ran": 1.5}
    texts = {"status": "wrong_result", "message": "the message", "printed": "printed\n\0\x1b"}
    assert answer == texts | {"resources": {"registers": 5}, "device": 1}
    assert "outputs" not in json.loads(write_result(result, False, {}))


def test_outputs_of_any_size_are_encoded():
    for size in (0, 1, job.ENCODED - 1, job.ENCODED, 2 * job.ENCODED + 1):
        value = np.random.default_rng(0).integers(0, 256, size, np.uint8)
        answer = json.loads(write_result(Result("ok", outputs=(value,)), True, {}))
        got = safetensors.numpy.load(base64.b64decode(answer["outputs"], validate=True))["0"]
        assert got.shape == (size,) and (got == value).all()
