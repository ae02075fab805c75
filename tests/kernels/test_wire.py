"""needle/kernels/wire.py: jobs as they are read, every one that is refused, and answers."""

import base64
import copy
import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

from needle import _C
from needle.kernels import wire
from needle.kernels.isolate import Result
from needle.kernels.measure import Timing
from needle.kernels.sanitizer import Finding
from needle.kernels.values import InOut, Out, Random, draw
from needle.kernels.wire import Limits, Refused, read_job, to_json, write_result

LIMITS = Limits(body_bytes=1 << 20, source_bytes=1000, array_bytes=1 << 16)
X = np.arange(6, dtype=np.float32).reshape(2, 3)
OUT = {"shape": [2, 3], "dtype": "float32", "out": True}
CASE = {"grid": 1, "block": [32, 1, 1], "args": [{"array": "x"}, OUT, 2.5, 6]}
JOB = {"source": "the source", "entry": "scale<float>", "cases": [CASE]}
REFERENCE = {"source": "the reference", "entry": "right"}


def sent(**arrays) -> bytes:
    return safetensors.numpy.save(arrays)


def read(job, arrays=b"", limits=LIMITS):
    return read_job(json.dumps(job).encode(), arrays or sent(x=X), limits)


def changed(*path, to):
    """JOB with one place changed; `to` None removes it."""
    job = copy.deepcopy(JOB)
    inner = job
    for step in path[:-1]:
        inner = inner[step]
    inner[path[-1]] = to
    return job


def refused(job, status=400, arrays=b"", limits=LIMITS) -> Refused:
    with pytest.raises(Refused) as caught:
        read(job, arrays, limits)
    assert caught.value.status == status, caught.value.message
    return caught.value


# ---- what is understood --------------------------------------------------------------------------


def test_a_job():
    job = read(JOB | {"language": "cuda", "outputs": True, "sanitizer": "racecheck"})
    assert (job.source, job.entry, job.outputs, job.sanitizer) == (
        "the source",
        "scale<float>",
        True,
        "racecheck",
    )
    (case,) = job.cases
    assert (case.grid, case.block, case.shared) == (1, [32, 1, 1], 0)
    x, y, a, n = case.args
    assert (x == X).all() and y == Out((2, 3)) and (a, n) == (2.5, 6) and type(n) is int
    assert (job.trials, job.time, job.tolerance, job.explain) == (5, True, None, False)


def test_null_is_as_if_a_field_were_not_there():
    job = read(JOB | {"language": None, "reference": None, "trials": None, "tolerance": None})
    assert (job.reference, job.trials, job.tolerance) == (None, 5, None)


@pytest.mark.parametrize(
    "sent_as, meant",
    [
        (True, True),
        (-(2**63), -(2**63)),
        (2**64 - 1, 2**64 - 1),
        (1e-300, 1e-300),
        ({"bytes": "00ff 3f"}, b"\0\xff\x3f"),
        ({"shape": [], "dtype": "bool", "out": True}, Out((), "bool")),
        ({"shape": [0, 7], "dtype": "int8", "out": True}, Out((0, 7), "int8")),
        ({"shape": [4], "dtype": "bfloat16", "seed": 3}, Random((4,), "bfloat16", 3)),
        (
            {"shape": [4], "dtype": "int32", "seed": 0, "low": -5, "high": 5},
            Random((4,), "int32", 0, -5, 5),
        ),
        (
            {"shape": [4], "dtype": "float64", "seed": 1, "inout": True},
            InOut(Random((4,), "float64", 1)),
        ),
    ],
)
def test_arguments(sent_as, meant):
    assert read(changed("cases", 0, "args", to=[sent_as])).cases[0].args == [meant]


def test_an_array_that_is_changed():
    arg = read(changed("cases", 0, "args", 0, to={"array": "x", "inout": True})).cases[0].args[0]
    assert isinstance(arg, InOut) and (arg.array == X).all()


@pytest.mark.parametrize(
    "dtype",
    "float32 float16 float64 int8 int16 int32 int64 uint8 uint16 uint32 uint64 bool".split(),
)
def test_arrays_of_every_dtype(dtype):
    value = np.array([[0, 1, 1], [1, 0, 1]], dtype)
    got = read(JOB, sent(x=value, unused=X)).cases[0].args[0]
    assert got.dtype == value.dtype and (got == value).all()


def bfloat16(name: str, values) -> bytes:
    """Unaligned, as no writer does it and every file may have it."""
    bits = (np.asarray(values, np.float32).view(np.uint32) >> 16).astype(np.uint16)
    header = {name: {"dtype": "BF16", "shape": list(bits.shape), "data_offsets": [0, bits.nbytes]}}
    text = json.dumps(header).encode()
    text += b" " * (1 - len(text) % 2)
    assert len(text) % 2 == 1
    return len(text).to_bytes(8, "little") + text + bits.tobytes()


def test_bfloat16():
    got = read(JOB, bfloat16("x", [1.5, -2.0])).cases[0].args[0]
    assert isinstance(got, _C.NDArray) and got.dtype == "bfloat16"
    assert got.numpy().tolist() == [1.5, -2.0]
    job = changed("cases", 0, "expected", to=["y"])
    job["cases"][0]["args"] = [OUT]
    (expected,) = read(job, bfloat16("y", [0.5])).expected[0]
    assert expected.dtype == np.float32 and expected.tolist() == [0.5]


def test_unaligned_arrays():
    text = json.dumps({"x": {"dtype": "F32", "shape": [3], "data_offsets": [0, 12]}}).encode()
    text += b" " * (1 - len(text) % 2)
    data = np.float32([1, 2, 3]).tobytes()
    got = read(JOB, len(text).to_bytes(8, "little") + text + data).cases[0].args[0]
    assert got.tolist() == [1, 2, 3]


# ---- what is done with it ------------------------------------------------------------------------


class Recorder:
    """A pool that writes down what it is asked and computes twice what it gets."""

    def __init__(self, status="ok"):
        self.runs, self.evaluations, self.status = [], [], status

    def run(self, source, entry, grid, block, args, shared=0, **more):
        self.runs.append((source, entry, grid, block, args, shared, more))
        value = next((getattr(a, "array", a) for a in args if hasattr(a, "__array__")), X)
        return Result(self.status, "as asked", (2 * np.asarray(value),))

    def evaluate(self, source, entry, cases, reference, tolerance, **more):
        self.evaluations.append((source, entry, cases, tolerance, more))
        for case, right in zip(cases, reference):
            args = [getattr(a, "array", a) for a in draw(case, 0).args if not isinstance(a, Out)]
            inputs = [a.numpy() if isinstance(a, _C.NDArray) else a for a in args]
            self.answers = right(*inputs)
        return Result("ok")


def test_one_case_without_an_answer_is_run():
    pool = Recorder()
    read(JOB | {"explain": True}).do(pool, 10.0)
    ((source, entry, grid, block, args, shared, more),) = pool.runs
    assert (source, entry, grid, block, shared) == ("the source", "scale<float>", 1, [32, 1, 1], 0)
    assert more == {"sanitizer": None, "explain": True} and args[2:] == [2.5, 6]


def test_expected_arrays_are_compared():
    job = changed("cases", 0, "expected", to=["y"]) | {"trials": 3, "time": False, "tolerance": 0.5}
    pool = Recorder()
    assert read(job, sent(x=X, y=3 * X)).do(pool, 10.0).status == "ok"
    ((_, _, cases, tolerance, more),) = pool.evaluations
    assert (tolerance, more) == ((0.5, 0.5), {"trials": 3, "time": False})
    assert (pool.answers[0] == 3 * X).all() and len(cases) == 1 and pool.runs == []


@pytest.mark.parametrize("own", [{}, {"grid": 7, "block": [8], "shared": 9}])
def test_a_reference_gets_the_same_arguments(own):
    job = changed("cases", 0, "args", 2, to={"bytes": "01"}) | {"reference": REFERENCE | own}
    job["cases"][0]["args"] += [{"shape": [2], "dtype": "bfloat16", "seed": 4, "inout": True}]
    job["cases"][0]["shared"] = 64
    pool = Recorder()
    read(job).do(pool, 10.0)
    ((source, entry, grid, block, args, shared, _),) = pool.runs
    assert (source, entry) == ("the reference", "right")
    assert (grid, block, shared) == ((7, [8], 9) if own else (1, [32, 1, 1], 64))
    x, y, struct, n, drawn = args
    assert (x == X).all() and y == Out((2, 3)) and (struct, n) == (b"\1", 6)
    assert isinstance(drawn, InOut) and drawn.array.dtype == "bfloat16"
    assert (drawn.array.numpy() == Random((2,), "bfloat16", 4).array(0, 4).numpy()).all()
    assert (pool.answers[0] == 2 * X).all()


@pytest.mark.parametrize(
    "failed, status, said",
    [("timeout", 422, "reference: it fails: timeout"), ("device_lost", 503, "no device for the")],
)
def test_a_reference_that_fails_is_said(failed, status, said):
    """Its own fault, or the service's."""
    with pytest.raises(Refused, match=f"{said}.*: as asked") as caught:
        read(JOB | {"reference": REFERENCE}).do(Recorder(failed), 10.0)
    assert caught.value.status == status


def test_a_job_that_takes_too_long_ends_between_launches(monkeypatch):
    clock = SimpleNamespace(now=100.0, monotonic=lambda: clock.now)
    monkeypatch.setattr(wire, "time", clock)
    pool = Recorder()

    def slow(*args, **more):
        clock.now += 6
        return Recorder.run(pool, *args, **more)

    pool.run = slow
    result = read(JOB | {"cases": [CASE] * 5, "reference": REFERENCE}).do(pool, 10.0)
    assert result.status == "timeout" and "after 10 s (--job-seconds)" in result.message
    assert len(pool.runs) == 2


# ---- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize("text", [b"", b"{", b"\xff\xfe", b"nul", b'{"a": NaN}', b"[" * 100_000])
def test_what_is_no_json(text):
    with pytest.raises(Refused, match="^job: ") as caught:
        read_job(text, b"", Limits())
    assert caught.value.status == 400


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1" * 5000])
def test_numbers_that_are_none(number):
    with pytest.raises(Refused, match="no JSON"):
        read_job(b'{"source": %s}' % number.encode(), b"", Limits())


def test_json_that_is_too_long():
    error = refused(JOB | {"entry": "x" * LIMITS.job_bytes}, 413)
    assert error.limit == LIMITS.job_bytes and "--max-source-bytes" in error.message


def test_a_header_of_arrays_that_is_too_long():
    arrays = safetensors.numpy.save({"x": X}, {"about": "x" * wire.HEADER_BYTES})
    with pytest.raises(Refused, match="arrays: .* bytes of JSON, the header") as caught:
        read_job(json.dumps(JOB).encode(), arrays, LIMITS)
    assert (caught.value.status, caught.value.limit) == (413, wire.HEADER_BYTES)
    with pytest.raises(Refused, match="truncated") as caught:
        read_job(json.dumps(JOB).encode(), arrays[: wire.HEADER_BYTES], LIMITS)
    assert caught.value.status == 400


@pytest.mark.parametrize("value", [None, [], 3, "text", True])
def test_a_job_is_an_object(value):
    assert "must be an object" in refused(value).message


@pytest.mark.parametrize("language", ["python", "ptx", "cubin", "CUDA", "", 3, ["cuda"]])
def test_cuda_alone(language):
    assert "Python, PTX or cubin" in refused(JOB | {"language": language}).message


WRONG = [
    (("source",), 5, "job.source: must be text"),
    (("source",), None, "job: source is missing"),
    (("source",), "a\0b", "character of value 0"),
    (("source",), "\ud800", "surrogate"),
    (("entry",), "", "no name"),
    (("entry",), "a\nb", "no name"),
    (("entry",), "a\0b", "no name"),
    (("entry",), "é", "no name"),
    (("entry",), ["k"], "must be text"),
    (("cases",), {}, "must be a list"),
    (("cases",), [], "give cases"),
    (("cases",), [CASE, CASE], "give one case"),
    (("cases",), [3], r"job.cases[0]: must be an object"),
    (("unknown",), 1, 'no field "unknown"; there are language, source'),
    (("outputs",), 1, "must be true or false"),
    (("sanitizer",), "memcheck --kill", "must be one of memcheck"),
    (("sanitizer",), ["memcheck"], "must be one of memcheck"),
    (("trials",), 5, "only with expected or reference"),
    (("time",), True, "only with expected or reference"),
    (("tolerance",), 0, "only with expected or reference"),
    (("reference",), 3, "must be an object"),
    (("reference",), {"source": "x"}, "entry is missing"),
    (("cases", 0, "grid"), None, "grid is missing"),
    (("cases", 0, "grid"), "1", "whole number"),
    (("cases", 0, "grid"), True, "whole number"),
    (("cases", 0, "grid"), 1.0, "whole number"),
    (("cases", 0, "grid"), [], "1 to 3"),
    (("cases", 0, "block"), [1, 1, 1, 1], "1 to 3"),
    (("cases", 0, "block"), [1, "1"], "whole number"),
    (("cases", 0, "block"), 10**30, "whole number"),
    (("cases", 0, "shared"), -1, "whole number"),
    (("cases", 0, "args"), 3, "must be a list"),
    (("cases", 0, "python"), "exec", "no field"),
    (("cases", 0, "expected"), ["y"], 'no array "y"'),
    (("cases", 0, "expected"), "x", "must be a list"),
    (("cases", 0, "args", 0), "x", "must be an object"),
    (("cases", 0, "args", 0), None, "must be an object"),
    (("cases", 0, "args", 0), [1], "must be an object"),
    (("cases", 0, "args", 0), 2**64, "whole number"),
    (("cases", 0, "args", 0), {}, "one of array, shape, bytes"),
    (("cases", 0, "args", 0), {"array": "x", "bytes": "00"}, "one of array, shape, bytes"),
    (("cases", 0, "args", 0), {"array": "z"}, 'no array "z"'),
    (("cases", 0, "args", 0), {"array": ["x"]}, "must be text"),
    (("cases", 0, "args", 0), {"array": "x", "seed": 1}, "seed does not go with array"),
    (("cases", 0, "args", 0), {"array": "x", "inout": 1}, "must be true or false"),
    (("cases", 0, "args", 0), {"bytes": "xy"}, "hexadecimal"),
    (("cases", 0, "args", 0), {"bytes": 5}, "must be text"),
    (("cases", 0, "args", 0), {"shape": [2], "seed": 1}, "dtype is missing"),
    (("cases", 0, "args", 0), {"shape": [2], "dtype": "float32"}, "seed is missing"),
    (("cases", 0, "args", 0), OUT | {"seed": 1}, "has no seed"),
    (("cases", 0, "args", 0), OUT | {"inout": True}, "has no seed"),
    (("cases", 0, "args", 0), OUT | {"low": 1}, "has no seed"),
    (("cases", 0, "args", 0), OUT | {"dtype": "complex128"}, "must be one of"),
    (("cases", 0, "args", 0), OUT | {"dtype": "object"}, "must be one of"),
    (("cases", 0, "args", 0), OUT | {"dtype": {}}, "must be one of"),
    (("cases", 0, "args", 0), OUT | {"shape": [-1]}, "whole number"),
    (("cases", 0, "args", 0), OUT | {"shape": 5}, "must be a list"),
    (("cases", 0, "args", 0), OUT | {"shape": [1.5]}, "whole number"),
    (("cases", 0, "args", 0), OUT | {"out": 1}, "must be true or false"),
    (
        ("cases", 0, "args", 0),
        {"shape": [2], "dtype": "float32", "seed": -1},
        "whole number from 0",
    ),
    (
        ("cases", 0, "args", 0),
        {"shape": [2], "dtype": "float32", "seed": 1, "low": "0"},
        "finite number",
    ),
    (
        ("cases", 0, "args", 0),
        {"shape": [2], "dtype": "float16", "seed": 1, "low": 0, "high": 70000},
        "job.cases[0].args[0]: Random: low and high are 0 and 70000; float16 takes numbers from",
    ),
]


@pytest.mark.parametrize("path, to, said", WRONG, ids=lambda value: str(value)[:40])
def test_wrong_fields(path, to, said):
    assert said in refused(changed(*path, to=to)).message


@pytest.mark.parametrize("number", ["1e999", "-1e999"])
def test_numbers_that_no_double_holds(number):
    text = json.dumps(changed("cases", 0, "args", 2, to="here")).replace('"here"', number)
    with pytest.raises(Refused, match="finite number"):
        read_job(text.encode(), sent(x=X), LIMITS)


JUDGED = JOB | {"reference": REFERENCE}


@pytest.mark.parametrize(
    "job, said",
    [
        (JUDGED | {"trials": 0}, "from 1 to 50"),
        (JUDGED | {"trials": 51}, "from 1 to 50"),
        (JUDGED | {"trials": True}, "whole number"),
        (JUDGED | {"tolerance": -1}, "[absolute, relative]"),
        (JUDGED | {"tolerance": [1]}, "[absolute, relative]"),
        (JUDGED | {"tolerance": "1"}, "finite number"),
        (JUDGED | {"tolerance": [0, "1"]}, "finite number"),
        (JUDGED | {"sanitizer": "memcheck"}, "only without expected or reference"),
        (JUDGED | {"explain": True}, "only without expected or reference"),
        (JUDGED | {"cases": [CASE | {"expected": ["x"]}]}, "give cases with"),
        (JOB | {"cases": [CASE | {"expected": ["x"]}, CASE]}, "give cases with"),
        (JUDGED | {"reference": REFERENCE | {"args": []}}, "no field"),
    ],
)
def test_wrong_comparisons(job, said):
    assert said in refused(job).message


@pytest.mark.parametrize(
    "job, limit",
    [
        (JOB | {"source": "é" * 501}, 1000),
        (JUDGED | {"reference": REFERENCE | {"source": "x" * 1001}}, 1000),
        (JOB | {"entry": "k" * 1001}, 1000),
        (JUDGED | {"cases": [CASE] * 65}, 64),
        (changed("cases", 0, "args", to=[1] * 257), 256),
        (changed("cases", 0, "args", 1, to=OUT | {"shape": [1] * 9}), 8),
        (changed("cases", 0, "args", 1, to=OUT | {"shape": [1 << 14]}), 1 << 16),
        (changed("cases", 0, "args", 1, to=OUT | {"shape": [1 << 15, 0], "dtype": "int64"}), 65536),
        (changed("cases", 0, "args", to=[{"array": "x"}] * 100), 1000),
        (changed("cases", 0, "args", 0, to={"bytes": "00" * 40000}), wire.STRUCT_BYTES),
        (changed("cases", 0, "args", 0, to={"bytes": ""}), wire.STRUCT_BYTES),
    ],
    ids=range(11),
)
def test_limits(job, limit):
    limits = LIMITS if limit != wire.STRUCT_BYTES else Limits()
    if limit == 1000 and "args" in str(job["cases"]) and len(job["cases"][0]["args"]) == 100:
        limits = Limits(source_bytes=1000, array_bytes=1000)  # the same array counts each time
    assert refused(job, 413, limits=limits).limit == limit


def test_outputs_that_are_too_large_to_send():
    limits = Limits(body_bytes=40, array_bytes=1 << 16)
    assert refused(JOB | {"outputs": True}, 413, limits=limits).limit == 40
    assert not read(JOB, limits=limits).outputs


@pytest.mark.parametrize(
    "data",
    [
        b"x",
        b"\x80\x04pickle.",
        b"PK\3\4zip archive",
        (1 << 40).to_bytes(8, "little") + b"{}",
        sent(x=X)[:-1],
        sent(x=X) + b"x",
        sent(x=X).replace(b'"F32"', b'"F99"'),
        sent(x=X).replace(b"[2,3]", b"[2,4]"),
        sent(x=X).replace(b"[2,3]", b"[9,3]"),
    ],
    ids=range(9),
)
def test_arrays_that_are_none(data):
    assert refused(JOB, arrays=data).message.startswith("arrays")


@pytest.mark.parametrize("shape", [str([1] * 65), f"[0,{2**70}]", f"[0,{2**62},2]"])
def test_arrays_of_shapes_that_are_none(shape):
    text = b'{"x":{"dtype":"F32","shape":%s,"data_offsets":[0,0]}}' % shape.encode()
    refused(JOB, arrays=len(text).to_bytes(8, "little") + text)


def test_a_product_without_end_is_not_begun():
    """Two million axes of 3 fit into a file; their product takes a minute."""
    text = b'{"x":{"dtype":"F32","shape":[%s],"data_offsets":[0,0]}}' % b",".join([b"3"] * 100_000)
    assert "100000 axes" in refused(JOB, arrays=len(text).to_bytes(8, "little") + text).message


# ---- anything ------------------------------------------------------------------------------------

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
    """A good job of which some places hold anything, and some fields are more."""
    job = copy.deepcopy(full)
    for _ in range(draw_from(st.integers(1, 3))):
        path = draw_from(st.sampled_from([path for path in places(job) if path]))
        inner = job
        for step in path[:-1]:
            inner = inner[step]
        inner[path[-1]] = draw_from(VALUES)
    return job


def dumps(value) -> bytes:
    """Also half surrogate pairs, NaN and Infinity, as a client may write them."""
    return json.dumps(value).encode()


@settings(max_examples=80, deadline=None)
@given(jobs())
def test_any_job_is_read_or_refused(job):
    try:
        read_job(dumps(job), sent(x=X), LIMITS)
    except Refused as error:
        assert 400 <= error.status < 500 and error.message
        to_json({"message": error.message})


@settings(max_examples=50, deadline=None)
@given(st.binary(max_size=200), st.binary(max_size=200))
def test_any_bytes_are_refused(text, arrays):
    for given_arrays in (arrays, len(arrays).to_bytes(8, "little") + arrays):
        try:
            read_job(text, given_arrays, LIMITS)
        except Refused as error:
            assert 400 <= error.status < 500


# ---- answers -------------------------------------------------------------------------------------


def test_an_answer():
    timing = Timing(1.0, 0.5, math.inf, 3, math.nan, 2.0, False, "too fast", ("launch-bound",))
    result = Result(
        "wrong_result",
        "the message \ud800",
        (X, np.float64([1, 2]), np.array(True)),
        "printed\n",
        {"registers": np.int64(5)},
        (timing,),
        (Finding("Invalid write", "k", 3, (0, 0, 1), (2, 0, 0)),),
        1,
    )
    answer = json.loads(write_result(result, True, {"queued": 0.0, "ran": 1.5}))
    outputs = safetensors.numpy.load(base64.b64decode(answer.pop("outputs"), validate=True))
    assert outputs.keys() == {"0", "1", "2"} and outputs["1"].dtype == np.float64
    assert (outputs["0"] == X).all() and outputs["2"].shape == () and outputs["2"]
    assert answer.pop("timing")[0] == {
        "median": 1.0,
        "lower": 0.5,
        "upper": None,
        "calls": 3,
        "rate": None,
        "device_rate": 2.0,
        "valid": False,
        "reason": "too fast",
        "hints": ["launch-bound"],
    }
    assert answer.pop("explanation")[0]["thread"] == [0, 0, 1]
    assert answer == {
        "status": "wrong_result",
        "message": "the message \ud800",
        "printed": "printed\n",
        "resources": {"registers": 5},
        "device": 1,
        "seconds": {"queued": 0.0, "ran": 1.5},
    }
    assert "outputs" not in json.loads(write_result(result, False, {}))


@pytest.mark.parametrize("size", [0, 1, wire.ENCODED - 1, wire.ENCODED, 2 * wire.ENCODED + 1])
def test_outputs_in_pieces(size):
    value = np.random.default_rng(0).integers(0, 256, size, np.uint8)
    answer = json.loads(write_result(Result("ok", outputs=(value,)), True, {}))
    got = safetensors.numpy.load(base64.b64decode(answer["outputs"], validate=True))["0"]
    assert got.shape == (size,) and (got == value).all()
