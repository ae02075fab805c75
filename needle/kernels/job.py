"""A job of the service: its JSON schema, running it on a Pool, and the answer.

    {"source": "...", "entry": "scale<float>", "language": "cuda",
     "cases": [{"grid": 16, "block": [256, 1, 1], "shared": 0, "args": [...], "expected": ["y"]}],
     "reference": {"source": "...", "entry": "...", "grid": 1, "block": 1, "shared": 0},
     "tolerance": [1e-4, 1e-4], "trials": 5, "time": true,
     "sanitizer": "memcheck", "explain": true, "outputs": true}

One case without `expected` or `reference` is launched once. Otherwise each case is compared with
the arrays that `expected` names, or with the outputs of another kernel for the same arguments. An
argument is a number, true, false, or an `Argument`. Arrays travel as safetensors beside the JSON.
"""

from __future__ import annotations

import base64
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from msgspec import Meta, Struct

from needle.files import FileError
from needle.kernels.pool import Pool, Result
from needle.kernels.sanitizer import TOOLS
from needle.kernels.values import DTYPES, Case, InOut, Out, Random, host_array, readable
from needle.safetensors import pack, unpack

MOST_CASES, MOST_ARGUMENTS, MOST_TRIALS, MOST_AXES = 64, 256, 50, 8
ENTRY_LETTERS = 1000
STRUCT_BYTES = 32764  # of all parameters of a kernel, from CUDA 12.1 on
HEADER_BYTES = 256 << 10  # JSON of the arrays' safetensors header
ENCODED = 3 << 18  # bytes encoded to base64 at a time, so that other threads run in between
ARRAY_DTYPES = tuple(name for name in DTYPES if name != "complex128")  # those of safetensors


class Refused(Exception):
    """A request that is not served: HTTP status, reason, and the limit that it exceeds."""

    def __init__(self, status: int, message: str, limit: int | float | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.limit = status, message, limit


def check_size(what: str, size: int, most: int, hint: str) -> None:
    """Raise Refused if something has more than `most` bytes. hint: a flag, or a remedy."""
    if size > most:
        raise Refused(413, f"{what}: {size:,} bytes; the limit is {most:,} ({hint})", most)


@dataclass(frozen=True)
class RequestLimits:
    """Limits of a request, in bytes and seconds. array_bytes: all arrays of a job together.
    job_seconds: no launch of a job starts later."""

    body_bytes: int = 64 << 20
    source_bytes: int = 256 << 10
    array_bytes: int = 256 << 20
    job_seconds: float = 300.0

    @property
    def json_bytes(self) -> int:
        """Limit of the JSON: two sources and 128 KiB for the rest."""
        return 2 * self.source_bytes + (128 << 10)


# ---- the schema ----------------------------------------------------------------------------------

Source = str
Entry = Annotated[str, Meta(min_length=1, max_length=ENTRY_LETTERS, pattern=r"^[ -~]*$")]
Size = int | Annotated[list[int], Meta(min_length=1, max_length=3)]
Shared = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Whole = Annotated[int, Meta(ge=0)]
Number = int | float
NotNegative = Annotated[int, Meta(ge=0)] | Annotated[float, Meta(ge=0)]
Pair = Annotated[list[NotNegative], Meta(min_length=2, max_length=2)]
# The allowed values, by field: msgspec's message names only the wrong one.
CHOICES = {
    "language": ("cuda (CUDA C++ source; no Python, PTX or cubin)",),
    "sanitizer": TOOLS,
    "dtype": ARRAY_DTYPES,
}


class Argument(Struct, forbid_unknown_fields=True):
    """{"array": "x"}: one of the arrays that came with the job.
    {"shape": [4096], "dtype": "float32", "seed": 1}: drawn for each trial; optional low and high.
    {"shape": [4096], "dtype": "float32", "out": true}: written by the kernel, every element.
    {"bytes": "3f800000"}: a struct in hexadecimal. The first two may have "inout": true."""

    array: str | None = None
    shape: Annotated[list[Whole], Meta(max_length=MOST_AXES)] | None = None
    dtype: Literal[ARRAY_DTYPES] | None = None  # type: ignore[valid-type]
    seed: Whole | None = None
    low: Number | None = None
    high: Number | None = None
    out: bool | None = None
    inout: bool | None = None
    bytes_: str | None = msgspec.field(default=None, name="bytes")

    def __post_init__(self) -> None:
        there = {n for n in self.__struct_fields__ if getattr(self, n) is not None}
        kinds = [kind for kind in ("array", "shape", "bytes_") if kind in there]
        if len(kinds) != 1:
            raise ValueError("must have exactly one of array, shape, bytes")
        kind = "out" if self.out else kinds[0]
        fields = {
            "array": {"array", "inout", "out"},
            "bytes_": {"bytes_"},
            "shape": {"shape", "dtype", "seed", "low", "high", "out", "inout"},
            "out": {"shape", "dtype", "out"},
        }[kind]
        if there - fields:
            raise ValueError(f"{', '.join(sorted(there - fields))} does not go with {kind}")
        for name in {"shape": ("dtype", "seed"), "out": ("shape", "dtype")}.get(kind, ()):
            if name not in there:
                raise ValueError(f"{name} is missing")


class CaseFields(Struct, forbid_unknown_fields=True):
    grid: Size
    block: Size
    args: Annotated[list[bool | int | float | Argument], Meta(max_length=MOST_ARGUMENTS)]
    shared: Shared | None = None
    expected: Annotated[list[str], Meta(max_length=MOST_ARGUMENTS)] | None = None


class Reference(Struct, forbid_unknown_fields=True):
    """A kernel whose outputs are right. Sizes that it omits are those of the case."""

    source: Source
    entry: Entry
    grid: Size | None = None
    block: Size | None = None
    shared: Shared | None = None

    def outputs(self, pool: Pool, case: Case) -> tuple[np.ndarray, ...]:
        """Run it on the arguments of a case."""
        grid, block, shared = (
            getattr(case if getattr(self, name) is None else self, name)
            for name in ("grid", "block", "shared")
        )
        result = pool.run(self.source, self.entry, grid, block, case.args, shared)
        if result.status == "device_lost":
            raise Refused(503, f"no device for the reference: {result.message}")
        if result.status != "ok":
            raise Refused(422, f"reference: it fails: {result.status}: {result.message}")
        return result.outputs


class JobFields(Struct, forbid_unknown_fields=True):
    source: Source
    entry: Entry
    cases: Annotated[list[CaseFields], Meta(min_length=1, max_length=MOST_CASES)]
    language: Literal["cuda"] | None = None
    reference: Reference | None = None
    tolerance: NotNegative | Pair | None = None
    trials: Annotated[int, Meta(ge=1, le=MOST_TRIALS)] | None = None
    time: bool | None = None
    sanitizer: Literal[TOOLS] | None = None  # type: ignore[valid-type]
    explain: bool | None = None
    outputs: bool | None = None

    def __post_init__(self) -> None:
        expected = sum(case.expected is not None for case in self.cases)
        if expected not in (0, len(self.cases)) or (expected and self.reference):
            raise ValueError(
                "give cases with expected each, or cases and one reference, or one case with "
                "neither"
            )
        judged = bool(expected or self.reference)
        if not judged and len(self.cases) > 1:
            raise ValueError("cases: without expected or reference, give one case")
        for name in ("sanitizer", "explain") if judged else ("tolerance", "trials", "time"):
            if getattr(self, name) is not None:
                where = "without" if judged else "with"
                raise ValueError(f"{name}: only {where} expected or reference")


# ---- reading -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    """A validated job. `expected`: the right outputs of each case; empty if unknown."""

    fields: JobFields
    cases: list[Case]
    expected: list[list[Any]] = field(default_factory=list)

    def do(self, pool: Pool, seconds: float) -> Result:
        """Run it, which blocks. Raise Refused, or the errors of a Pool for wrong calls."""
        fields = self.fields
        if not self.expected and fields.reference is None:
            case = self.cases[0]
            return pool.run(
                fields.source,
                fields.entry,
                case.grid,
                case.block,
                case.args,
                case.shared,
                sanitizer=fields.sanitizer,
                explain=bool(fields.explain),
            )
        end = time.monotonic() + seconds
        try:
            return pool.evaluate(
                fields.source,
                fields.entry,
                self.cases,
                [_Right(self, number, pool, end) for number in range(len(self.cases))],
                fields.tolerance,
                trials=5 if fields.trials is None else fields.trials,
                time=fields.time is not False,
            )
        except TimeoutError:
            return Result(
                "timeout",
                f"the job was ended after {seconds:g} s (--job-seconds): fewer cases or trials",
            )


@dataclass(frozen=True)
class _Right:
    """The right outputs of a case of a job. A Pool asks for them before each launch, so this checks
    the deadline."""

    job: Job
    number: int
    pool: Pool
    end: float

    def of_case(self, case: Case) -> Sequence[Any]:
        if time.monotonic() > self.end:
            raise TimeoutError
        if self.job.fields.reference is None:
            return self.job.expected[self.number]
        return self.job.fields.reference.outputs(self.pool, case)


def read_job(text: bytes | bytearray, arrays: bytes | bytearray, limits: RequestLimits) -> Job:
    """Read a job from its JSON and its safetensors (b"": none). Raise Refused."""
    check_size("job, its JSON", len(text), limits.json_bytes, "--max-source-bytes")
    try:
        fields = msgspec.json.decode(text, type=JobFields)
    except msgspec.ValidationError as error:
        raise _invalid(str(error)) from None
    except (msgspec.DecodeError, RecursionError) as error:
        raise Refused(400, f"job: no JSON: {error}") from None
    sources = {"job.source": fields.source}
    if fields.reference is not None:
        sources["job.reference.source"] = fields.reference.source
    for where, source in sources.items():
        check_size(where, len(source.encode()), limits.source_bytes, "--max-source-bytes")
    header = int.from_bytes(arrays[:8], "little")
    if header <= len(arrays) - 8:
        hint = "fewer arrays, shorter names, less __metadata__"
        check_size("arrays: the header of safetensors", header, HEADER_BYTES, hint)
    try:
        given = unpack(arrays, "arrays", HEADER_BYTES) if arrays else {}
    except FileError as error:
        raise Refused(400, str(error)[:1000]) from None
    return _Reader(given, limits).job(fields)


def _invalid(message: str) -> Refused:
    """Turn msgspec's "Expected `int` <= 50 - at `$.trials`" into a Refused with place and limit."""
    said, _, path = message.partition(" - at `$")
    where = "job" + path.rstrip("`")
    name = where.rpartition(".")[2]
    if said.startswith("Invalid enum value"):
        said += f"; allowed: {', '.join(CHOICES[name])}"
    elif said.startswith("Object contains unknown field"):
        said += "; docs/kernels.md lists the fields"
    elif name == "entry" and "regex" in said:
        said = "must be the name of a kernel, in printable ASCII"
    limit = msgspec.json.decode(said.rpartition(" ")[2]) if " <= " in said else None
    return Refused(413 if "length <=" in said else 400, f"{where}: {said}", limit)


class _Reader:
    """Converts the fields of one job to cases, and adds up the bytes of their arrays."""

    def __init__(self, given: Mapping[str, Any], limits: RequestLimits) -> None:
        self.given, self.limits, self.bytes = given, limits, 0

    def job(self, fields: JobFields) -> Job:
        cases, expected = [], []
        for number, case in enumerate(fields.cases):
            where = f"job.cases[{number}]"
            args = [self._argument(arg, f"{where}.args[{n}]") for n, arg in enumerate(case.args)]
            cases.append(Case(case.grid, case.block, args, case.shared or 0))
            if case.expected is not None:
                found = [self._named(name, f"{where}.expected") for name in case.expected]
                expected.append([readable(*host_array(array)) for array in found])
        if fields.outputs:
            what = "job.outputs: the arrays, which are sent back"
            check_size(what, self.bytes, self.limits.body_bytes, "--max-body-bytes")
        return Job(fields, cases, expected)

    def _argument(self, value: Any, where: str) -> Any:
        if not isinstance(value, Argument):
            return value
        if value.bytes_ is not None:
            return _struct(value.bytes_, where)
        if value.array is not None:
            array = self._named(value.array, where)
            return InOut(array) if value.inout else array
        shape, dtype = tuple(value.shape or ()), str(value.dtype)
        item = 2 if dtype == "bfloat16" else np.dtype(dtype).itemsize
        self._count(math.prod(max(n, 1) for n in shape) * item, where)
        if value.out:
            return Out(shape, dtype)
        try:
            array = Random(shape, dtype, value.seed or 0, value.low, value.high)
        except ValueError as error:
            raise Refused(400, f"{where}: {error}") from None
        return InOut(array) if value.inout else array

    def _named(self, name: str, where: str) -> Any:
        """Return an array that came with the job. Each use counts, since each is copied."""
        if name not in self.given:
            known = ", ".join(self.given) or "none"
            raise Refused(400, f"{where}: no array {name[:60]!r} in the safetensors: {known[:200]}")
        self._count(self.given[name].nbytes, where)
        return self.given[name]

    def _count(self, nbytes: int, where: str) -> None:
        self.bytes += nbytes
        most = self.limits.array_bytes
        check_size(f"{where}: the arrays, with it", self.bytes, most, "--max-array-bytes")


def _struct(text: str, where: str) -> bytes:
    try:
        data = bytes.fromhex(text)
    except ValueError:
        raise Refused(400, f"{where}: no hexadecimal digits: {text[:60]!r}") from None
    if not 0 < len(data) <= STRUCT_BYTES:
        said = f"{where}: {len(data):,} bytes; a kernel takes from 1 to {STRUCT_BYTES:,}"
        raise Refused(413, said, STRUCT_BYTES)
    return data


# ---- answering -----------------------------------------------------------------------------------


def to_json(value: Any) -> bytes:
    """Encode dataclasses and NumPy numbers too. Not finite numbers become null."""
    return msgspec.json.encode(value, enc_hook=lambda number: number.item())


def write_result(result: Result, outputs: bool, seconds: Mapping[str, float]) -> bytes:
    """Return the answer to a job: the fields of the Result, `seconds` (queued, ran) and, if asked
    for, `outputs`: the arrays "0", "1", ... as safetensors in base64, bfloat16 as float32."""
    names = "status message printed resources timing explanation device".split()
    text = to_json({name: getattr(result, name) for name in names} | {"seconds": dict(seconds)})
    if not outputs:
        return text
    data = pack({str(number): array for number, array in enumerate(result.outputs)})
    coded = (base64.b64encode(data[i : i + ENCODED]) for i in range(0, len(data), ENCODED))
    return b"".join([text[:-1], b', "outputs": "', *coded, b'"}'])
