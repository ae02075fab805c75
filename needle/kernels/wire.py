"""What a client of the service asks, and what it is answered: JSON, and arrays as safetensors.

A job:

    {"source": "...", "entry": "scale<float>", "language": "cuda",
     "cases": [{"grid": 16, "block": [256, 1, 1], "shared": 0, "args": [...], "expected": ["y"]}],
     "reference": {"source": "...", "entry": "...", "grid": 1, "block": 1, "shared": 0},
     "tolerance": [1e-4, 1e-4], "trials": 5, "time": true,
     "sanitizer": "memcheck", "explain": true, "outputs": true}

One case without `expected` or `reference` is launched once; else every case is evaluated, against
the arrays named in `expected` or against another kernel, which gets the same arguments (its grid,
block and shared are the case's unless it says them). An argument is a number, true, false, or

    {"array": "x"}                                     one of the arrays that came with the job
    {"shape": [4096], "dtype": "float32", "seed": 1}   drawn, anew in each trial; maybe low, high
    {"shape": [4096], "dtype": "float32", "out": true} written by the kernel, every element
    {"bytes": "3f800000"}                              a struct, in hexadecimal

and the first two may say "inout": true. Nothing is believed: a wrong type, an unknown field, a
number out of range and too much of anything is Refused, with the limit that it passed.
"""

from __future__ import annotations

import base64
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

import numpy as np

from needle import _C
from needle.files import FileError
from needle.kernels.isolate import Result
from needle.kernels.sanitizer import TOOLS
from needle.kernels.values import DTYPES, Case, InOut, Out, Random, Tolerance, host_array, readable
from needle.safetensors import pack, unpack

MOST_CASES, MOST_ARGUMENTS, MOST_TRIALS, MOST_AXES = 64, 256, 50, 8
ENTRY_LETTERS = 1000
STRUCT_BYTES = 32764  # of all parameters of a kernel, from CUDA 12.1 on
HEADER_BYTES = 256 << 10  # of the arrays' own JSON
ENCODED = 3 << 18  # bytes that are turned to base64 at a time: other threads want to run
SHOWN = 60  # letters of what is refused
SENT_DTYPES = tuple(name for name in DTYPES if name != "complex128")  # that safetensors has


class Refused(Exception):
    """A request that is not served: the HTTP status, what is wrong, and the limit it passed."""

    def __init__(self, status: int, message: str, limit: int | float | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.limit = status, message, limit


@dataclass(frozen=True)
class Limits:
    """What a request may ask for. `array_bytes`: of all arrays of a job together. `job_seconds`:
    after so long no further launch of a job begins."""

    body_bytes: int = 64 << 20
    source_bytes: int = 256 << 10
    array_bytes: int = 256 << 20
    job_seconds: float = 300.0

    @property
    def job_bytes(self) -> int:
        """Of the JSON: two sources and the rest. Python reads it without letting other threads run,
        in a tenth of a second at the worst."""
        return 2 * self.source_bytes + (128 << 10)


class Runs(Protocol):
    """What a job needs of a Pool."""

    def run(self, *args: Any, **more: Any) -> Result: ...
    def evaluate(self, *args: Any, **more: Any) -> Result: ...


class OutOfTime(Exception):
    """A job has taken `job_seconds`."""


# ---- the job -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Reference:
    """A kernel whose outputs are right. What is None is the case's."""

    source: str
    entry: str
    grid: Any = None
    block: Any = None
    shared: int | None = None

    def outputs(self, pool: Runs, case: Case, inputs: Sequence[Any]) -> tuple[np.ndarray, ...]:
        """`inputs`: the arguments of the case but Out; bfloat16 as float32, which holds it."""
        given = iter(inputs)
        args: list[Any] = []
        for asked in case.args:
            if isinstance(asked, Out):
                args.append(asked)
                continue
            value = next(given)
            if _dtype_of(asked) == "bfloat16":
                value = _C.array(value, "bfloat16", _C.cpu())
            args.append(InOut(value) if isinstance(asked, InOut) else value)
        grid, block, shared = (
            own if own is not None else of_case
            for own, of_case in (
                (self.grid, case.grid),
                (self.block, case.block),
                (self.shared, case.shared),
            )
        )
        result = pool.run(self.source, self.entry, grid, block, args, shared)
        if result.status == "device_lost":
            raise Refused(503, f"no device for the reference: {result.message}")
        if result.status != "ok":
            raise Refused(422, f"reference: it fails: {result.status}: {result.message}")
        return result.outputs


@dataclass(frozen=True)
class Job:
    """A job whose every field was checked."""

    source: str
    entry: str
    cases: list[Case]
    expected: list[list[Any]] = field(default_factory=list)  # of each case; empty: none is known
    reference: Reference | None = None
    tolerance: Tolerance = None
    trials: int = 5
    time: bool = True
    sanitizer: str | None = None
    explain: bool = False
    outputs: bool = False

    def do(self, pool: Runs, seconds: float) -> Result:
        """Blocks. Refused, or what a Pool raises for calls that are wrong in themselves."""
        if not self.expected and self.reference is None:
            case = self.cases[0]
            return pool.run(
                self.source,
                self.entry,
                case.grid,
                case.block,
                case.args,
                case.shared,
                sanitizer=self.sanitizer,
                explain=self.explain,
            )
        end = time.monotonic() + seconds
        try:
            return pool.evaluate(
                self.source,
                self.entry,
                self.cases,
                [self._right(pool, number, end) for number in range(len(self.cases))],
                self.tolerance,
                trials=self.trials,
                time=self.time,
            )
        except OutOfTime:
            return Result(
                "timeout",
                f"the job was ended after {seconds:g} s (--job-seconds): fewer cases or trials",
            )

    def _right(self, pool: Runs, number: int, end: float) -> Callable[..., Sequence[Any]]:
        """What the outputs of a case should be, as a function of its inputs. It is called before
        each launch, and so the place to look at the clock."""

        def outputs(*inputs: Any) -> Sequence[Any]:
            if time.monotonic() > end:
                raise OutOfTime
            if self.reference is None:
                return self.expected[number]
            return self.reference.outputs(pool, self.cases[number], inputs)

        return outputs


def _dtype_of(value: Any) -> str | None:
    """Of an argument; None for a number."""
    value = value.array if isinstance(value, InOut) else value
    if isinstance(value, Random):
        return value.dtype
    return host_array(value)[0] if isinstance(value, (np.ndarray, _C.NDArray)) else None


# ---- reading -------------------------------------------------------------------------------------


def read_job(text: bytes | bytearray, arrays: bytes | bytearray, limits: Limits) -> Job:
    """From the JSON of a job and the safetensors that came with it (b"": none)."""
    if len(text) > limits.job_bytes:
        raise Refused(
            413,
            f"job: {len(text):,} bytes of JSON; the limit is {limits.job_bytes:,} "
            "(--max-source-bytes)",
            limits.job_bytes,
        )
    try:
        value = json.loads(text, parse_constant=_no_number)
    except RecursionError:
        raise Refused(400, "job: JSON that is nested too deeply") from None
    except ValueError as error:  # UnicodeDecodeError and a number of thousands of digits, too
        raise Refused(400, f"job: no JSON: {error}") from None
    header = int.from_bytes(arrays[:8], "little")  # so a file of safetensors begins
    if HEADER_BYTES < header <= len(arrays) - 8:
        raise Refused(
            413,
            f"arrays: {header:,} bytes of JSON, the header of safetensors; the limit is "
            f"{HEADER_BYTES:,}: fewer arrays, shorter names, less __metadata__",
            HEADER_BYTES,
        )
    try:
        given = unpack(arrays, "arrays", HEADER_BYTES) if arrays else {}
    except FileError as error:
        raise Refused(400, str(error)[:1000]) from None
    return _Reader(given, limits).job(value)


def _no_number(name: str) -> Any:
    raise ValueError(f"{name} is no number of JSON")


def _shown(value: Any) -> str:
    try:
        text = json.dumps(value)
    except RecursionError:
        return "what is nested too deeply"
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


class _Fields:
    """An object of the JSON, whose fields are taken one by one."""

    def __init__(self, value: Any, where: str, known: str) -> None:
        if not isinstance(value, dict):
            raise Refused(400, f"{where}: must be an object, not {_shown(value)}")
        for name in value:
            if name not in known.split():
                raise Refused(
                    400,
                    f"{where}: there is no field {_shown(name)}; there are "
                    f"{', '.join(known.split())}",
                )
        self.value, self.where = value, where

    def __contains__(self, name: str) -> bool:
        return self.value.get(name) is not None

    def get(self, name: str, kind: Callable[[Any, str], Any], default: Any = ...) -> Any:
        """null is as if the field were not there."""
        if name in self:
            return kind(self.value[name], f"{self.where}.{name}")
        if default is ...:
            raise Refused(400, f"{self.where}: {name} is missing")
        return default


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise Refused(400, f"{where}: must be text, not {_shown(value)}")
    return value


def _yes_or_no(value: Any, where: str) -> bool:
    if not isinstance(value, bool):
        raise Refused(400, f"{where}: must be true or false, not {_shown(value)}")
    return value


def _whole(low: int, high: int) -> Callable[[Any, str], int]:
    def kind(value: Any, where: str) -> int:
        if type(value) is not int or not low <= value <= high:
            raise Refused(
                400,
                f"{where}: must be a whole number from {low} to {high}, not {_shown(value)}",
                high,
            )
        return value

    return kind


def _number(value: Any, where: str) -> int | float:
    if type(value) not in (int, float) or not abs(value) <= 1.7e308:
        raise Refused(400, f"{where}: must be a finite number, not {_shown(value)}")
    return value


def _list(value: Any, where: str, most: int) -> list[Any]:
    if not isinstance(value, list):
        raise Refused(400, f"{where}: must be a list, not {_shown(value)}")
    if len(value) > most:
        raise Refused(413, f"{where}: {len(value):,} entries; the limit is {most}", most)
    return value


def _one_of(*known: str) -> Callable[[Any, str], str]:
    def kind(value: Any, where: str) -> str:
        if value not in known:
            raise Refused(400, f"{where}: must be one of {', '.join(known)}, not {_shown(value)}")
        return value

    return kind


def _sizes(value: Any, where: str) -> int | list[int]:
    """Of a grid or a block. What CUDA makes of them is the pool's to say."""
    size = _whole(-(2**63), 2**63 - 1)
    if not isinstance(value, list):
        return size(value, where)
    if not 1 <= len(value) <= 3:
        raise Refused(400, f"{where}: must be a number or 1 to 3 of them, not {_shown(value)}")
    return [size(n, where) for n in value]


def _language(value: Any, where: str) -> str:
    if value != "cuda":
        raise Refused(
            400,
            f'{where}: {_shown(value)} is not taken, only "cuda": the source of CUDA C++, no '
            "Python, PTX or cubin (PTX within it, by asm, is part of CUDA)",
        )
    return "cuda"


def _tolerance(value: Any, where: str) -> Tolerance:
    pair = _list(value, where, 2) if isinstance(value, list) else [value, value]
    if len(pair) != 2 or not all(_number(n, where) >= 0 for n in pair):
        raise Refused(
            400, f"{where}: must be a number of 0 or more, or [absolute, relative]: {_shown(value)}"
        )
    return float(pair[0]), float(pair[1])


class _Reader:
    """Reads one job, and adds up the bytes of its arrays."""

    def __init__(self, given: Mapping[str, Any], limits: Limits) -> None:
        self.given, self.limits, self.bytes = given, limits, 0

    def job(self, value: Any) -> Job:
        fields = _Fields(
            value,
            "job",
            "language source entry cases reference tolerance trials time sanitizer explain outputs",
        )
        fields.get("language", _language, "cuda")
        source, entry = fields.get("source", self._source), fields.get("entry", self._entry)
        cases, expected = [], []
        asked = fields.get("cases", lambda v, where: _list(v, where, MOST_CASES))
        for number, one in enumerate(asked):
            case, right = self._case(one, f"job.cases[{number}]")
            cases.append(case)
            expected += [right] if right is not None else []
        reference = fields.get("reference", self._reference, None)
        judged = bool(expected) or reference is not None
        if not cases or len(expected) not in (0, len(cases)) or (expected and reference):
            raise Refused(
                400,
                "job: give cases with expected each, or cases and one reference, or one case with "
                "neither",
            )
        if not judged and len(cases) > 1:
            raise Refused(400, "job.cases: what is not compared is launched once: give one case")
        for name in ("sanitizer", "explain") if judged else ("tolerance", "trials", "time"):
            if name in fields:
                where = "without" if judged else "with"
                raise Refused(400, f"job.{name}: only {where} expected or reference")
        outputs = fields.get("outputs", _yes_or_no, False)
        if outputs and self.bytes > self.limits.body_bytes:
            raise Refused(
                413,
                f"job.outputs: {self.bytes:,} bytes of arrays; up to {self.limits.body_bytes:,} "
                "(--max-body-bytes) are sent back",
                self.limits.body_bytes,
            )
        return Job(
            source,
            entry,
            cases,
            expected,
            reference,
            fields.get("tolerance", _tolerance, None),
            fields.get("trials", _whole(1, MOST_TRIALS), 5),
            fields.get("time", _yes_or_no, True),
            fields.get("sanitizer", _one_of(*TOOLS), None),
            fields.get("explain", _yes_or_no, False),
            outputs,
        )

    def _source(self, value: Any, where: str) -> str:
        try:
            size = len(_text(value, where).encode())
        except UnicodeEncodeError:
            raise Refused(400, f"{where}: half a surrogate pair is no text") from None
        if size > self.limits.source_bytes:
            raise Refused(
                413,
                f"{where}: {size:,} bytes; the limit is {self.limits.source_bytes:,} "
                "(--max-source-bytes)",
                self.limits.source_bytes,
            )
        if "\0" in value:
            raise Refused(400, f"{where}: has a character of value 0: no CUDA source")
        return value

    def _entry(self, value: Any, where: str) -> str:
        if len(_text(value, where)) > ENTRY_LETTERS:
            raise Refused(
                413, f"{where}: {len(value):,} letters; the limit is {ENTRY_LETTERS}", ENTRY_LETTERS
            )
        if not value or not value.isascii() or not value.isprintable():
            raise Refused(400, f"{where}: no name of a kernel: {_shown(value)}")
        return value

    def _reference(self, value: Any, where: str) -> Reference:
        fields = _Fields(value, where, "source entry grid block shared")
        return Reference(
            fields.get("source", self._source),
            fields.get("entry", self._entry),
            fields.get("grid", _sizes, None),
            fields.get("block", _sizes, None),
            fields.get("shared", _whole(0, 2**31 - 1), None),
        )

    def _case(self, value: Any, where: str) -> tuple[Case, list[Any] | None]:
        """The case and its expected outputs."""
        fields = _Fields(value, where, "grid block shared args expected")
        args = fields.get("args", lambda v, place: _list(v, place, MOST_ARGUMENTS))
        case = Case(
            fields.get("grid", _sizes),
            fields.get("block", _sizes),
            [self._argument(arg, f"{where}.args[{n}]") for n, arg in enumerate(args)],
            fields.get("shared", _whole(0, 2**31 - 1), 0),
        )
        if "expected" not in fields:
            return case, None
        names = fields.get("expected", lambda v, place: _list(v, place, MOST_ARGUMENTS))
        found = [self._named(name, f"{where}.expected") for name in names]
        return case, [readable(*host_array(array)) for array in found]

    def _argument(self, value: Any, where: str) -> Any:
        if isinstance(value, bool):
            return value
        if type(value) is int:
            return _whole(-(2**63), 2**64 - 1)(value, where)
        if isinstance(value, float):
            return _number(value, where)
        fields = _Fields(value, where, "array shape dtype seed low high out inout bytes")
        kinds = [name for name in ("array", "shape", "bytes") if name in fields]
        if len(kinds) != 1:
            raise Refused(400, f"{where}: must have one of array, shape, bytes: {_shown(value)}")
        fitting = {
            "array": ("array", "inout"),
            "bytes": ("bytes",),
            "shape": ("shape", "dtype", "seed", "low", "high", "out", "inout"),
        }
        for name in fields.value:
            if name not in fitting[kinds[0]]:
                raise Refused(400, f"{where}: {name} does not go with {kinds[0]}")
        if kinds == ["bytes"]:
            return fields.get("bytes", _struct)
        if kinds == ["array"]:
            array = fields.get("array", self._named)
        else:
            array = self._described(fields, where)
            if isinstance(array, Out):
                return array
        return InOut(array) if fields.get("inout", _yes_or_no, False) else array

    def _named(self, name: Any, where: str) -> Any:
        """One of the arrays that came with the job. Each use counts: each is a place of its own."""
        if _text(name, where) not in self.given:
            known = ", ".join(self.given) or "none"
            raise Refused(400, f"{where}: no array {_shown(name)} came along: {known[:200]}")
        array = self.given[name]
        self._count(array.nbytes, where)
        return array

    def _described(self, fields: _Fields, where: str) -> Out | Random:
        axes = fields.get("shape", lambda v, place: _list(v, place, MOST_AXES))
        size = _whole(0, self.limits.array_bytes)
        shape = tuple(size(n, f"{where}.shape") for n in axes)
        dtype = fields.get("dtype", _one_of(*SENT_DTYPES))
        item = 2 if dtype == "bfloat16" else np.dtype(dtype).itemsize
        self._count(math.prod(max(n, 1) for n in shape) * item, where)
        drawn = {name: fields.get(name, _number) for name in ("low", "high") if name in fields}
        if fields.get("out", _yes_or_no, False):
            if drawn or "seed" in fields or "inout" in fields:
                raise Refused(400, f"{where}: what is out has no seed, low, high, inout")
            return Out(shape, dtype)
        seed = fields.get("seed", _whole(0, 2**63 - 1))
        try:
            return Random(shape, dtype, seed, **drawn)
        except ValueError as error:
            raise Refused(400, f"{where}: {error}") from None

    def _count(self, nbytes: int, where: str) -> None:
        self.bytes += nbytes
        if self.bytes > self.limits.array_bytes:
            raise Refused(
                413,
                f"{where}: with it the arrays have {self.bytes:,} bytes; the limit is "
                f"{self.limits.array_bytes:,} (--max-array-bytes)",
                self.limits.array_bytes,
            )


def _struct(value: Any, where: str) -> bytes:
    try:
        data = bytes.fromhex(_text(value, where))
    except ValueError:
        raise Refused(400, f"{where}: no hexadecimal digits: {_shown(value)}") from None
    if not 0 < len(data) <= STRUCT_BYTES:
        raise Refused(
            413,
            f"{where}: {len(data):,} bytes; from 1 to {STRUCT_BYTES:,} go to a kernel",
            STRUCT_BYTES,
        )
    return data


# ---- answering -----------------------------------------------------------------------------------


def plain(value: Any) -> Any:
    """As JSON has it: what is no finite number is null."""
    if isinstance(value, dict):
        return {str(name): plain(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(one) for one in value]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def to_json(value: Any) -> bytes:
    return json.dumps(plain(value), allow_nan=False).encode()


def write_result(result: Result, outputs: bool, seconds: Mapping[str, float]) -> bytes:
    """The answer to a job: the fields of the Result, `seconds` (queued, ran), and, where they are
    asked for, `outputs`: the arrays "0", "1", ... as safetensors, in base64 (bfloat16 as float32).
    """
    answer = {
        "status": result.status,
        "message": result.message,
        "printed": result.printed,
        "resources": result.resources,
        "timing": [asdict(timing) for timing in result.timing],
        "explanation": [asdict(finding) for finding in result.explanation],
        "device": result.device,
        "seconds": dict(seconds),
    }
    text = to_json(answer)
    if not outputs:
        return text
    data = pack({str(number): array for number, array in enumerate(result.outputs)})
    # Piece by piece, since neither base64 nor json lets other threads run meanwhile.
    coded = (base64.b64encode(data[i : i + ENCODED]) for i in range(0, len(data), ENCODED))
    return b"".join([text[:-1], b', "outputs": "', *coded, b'"}'])
