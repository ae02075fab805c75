"""The service: a Pool behind HTTP, for programs that write kernels.

    POST /evaluate          a job (`Job`, or a Problem of KernelBench's form); 200 also if it fails
    GET  /health            devices with their memory, temperature and load
    GET  /statistics        jobs by status, refusals, queue, median durations, faults
    POST /cleanup           returns the bytes of device memory that were freed
    POST /reset_gpu/{id}    new processes on that device, which run a kernel with a known answer

Compiling and running CUDA is running arbitrary code: a client with the token can do what this user
can. It listens on loopback; other machines come by ssh, or through a proxy that has TLS.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import statistics
import time
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import fields
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from aiohttp import web
from msgspec import Meta, Struct

from needle.kernels.cases import Case, InOut, Out, Random, Reference, host_array, readable
from needle.kernels.kernelbench import Problem
from needle.kernels.pool import TOOLS, Pool, ReferenceFails, Result
from needle.kernels.toolkit import nvidia_smi
from needle.safetensors import pack, unpack

HEADER_BYTES = 256 << 10  # JSON of the arrays' safetensors header
REMEMBERED = 1000  # jobs, for the medians
SMI_SECONDS = 2.0
FIELDS = "uuid name memory.total memory.free memory.used temperature.gpu utilization.gpu".split()
NO_FIGURES = dict.fromkeys(("name", "memory", "temperature", "load"))
HEADERS = ("Allow", "Retry-After", "WWW-Authenticate")
log = logging.getLogger("needle.kernels")

Size = int | Annotated[list[int], Meta(min_length=1, max_length=3)]
Whole = Annotated[int, Meta(ge=0)]


class Argument(Struct, forbid_unknown_fields=True, omit_defaults=True):
    """{"array": "x"}: one of the arrays that came with the job.
    {"shape": [4096], "dtype": "float32", "seed": 1}: drawn for each trial; optional low and high.
    {"shape": [4096], "dtype": "float32", "out": true}: written by the kernel, every element.
    {"bytes": "3f800000"}: a struct in hexadecimal. The first two may have "inout": true."""

    array: str | None = None
    shape: Annotated[list[Whole], Meta(max_length=8)] | None = None
    dtype: str = "float32"
    seed: Whole = 0
    low: float | None = None
    high: float | None = None
    out: bool = False
    inout: bool = False
    bytes_: str | None = msgspec.field(default=None, name="bytes")

    def __post_init__(self) -> None:
        if sum(one is not None for one in (self.array, self.shape, self.bytes_)) != 1:
            raise ValueError("must have exactly one of array, shape, bytes")

    def value(self, arrays: Mapping[str, Any]) -> Any:
        if self.bytes_ is not None:
            return bytes.fromhex(self.bytes_)
        if self.out and self.shape is not None:
            return Out(tuple(self.shape), self.dtype)
        if self.array is not None:
            value = named(arrays, self.array)
        else:
            value = Random(tuple(self.shape or ()), self.dtype, self.seed, self.low, self.high)
        return InOut(value) if self.inout else value


class Launch(Struct, forbid_unknown_fields=True):
    grid: Size
    block: Size
    args: Annotated[list[bool | int | float | Argument], Meta(max_length=256)]
    shared: Whole | None = None
    expected: list[str] | None = None
    operations: Annotated[float, Meta(ge=0)] = 0

    def case(self, arrays: Mapping[str, Any]) -> Case:
        args = [a.value(arrays) if isinstance(a, Argument) else a for a in self.args]
        return Case(self.grid, self.block, args, self.shared or 0, self.operations)

    def right(self, arrays: Mapping[str, Any]) -> list[np.ndarray]:
        return [readable(*host_array(named(arrays, name))) for name in self.expected or ()]


class Job(Struct, forbid_unknown_fields=True):
    """CUDA with its cases. One case without `expected` or `reference` is launched once. Otherwise
    each case is compared with the arrays that `expected` names, or with the outputs of another
    kernel for the same arguments."""

    source: str
    entry: Annotated[str, Meta(min_length=1, max_length=1000)]
    cases: Annotated[list[Launch], Meta(min_length=1, max_length=64)]
    language: Literal["cuda"] = "cuda"
    reference: Reference | None = None
    tolerance: float | Annotated[list[float], Meta(min_length=2, max_length=2)] | None = None
    trials: Annotated[int, Meta(ge=1, le=50)] = 5
    time: bool = True
    sanitizer: Literal[TOOLS] | None = None  # type: ignore[valid-type]
    explain: bool = False
    outputs: bool = False

    def do(self, pool: Pool, arrays: Mapping[str, Any]) -> Result:
        cases = [case.case(arrays) for case in self.cases]
        expected = [case.expected is not None for case in self.cases]
        if self.reference is None and not any(expected):
            if len(cases) > 1:
                raise ValueError("cases: without expected or reference, give one case")
            case = cases[0]
            way = case.grid, case.block, case.args, case.shared
            return pool.run(self.source, self.entry, *way, self.sanitizer, self.explain)
        if self.reference is None and not all(expected):
            raise ValueError("cases: give expected in each, or in none and a reference")
        right = self.reference or [case.right(arrays) for case in self.cases]
        options = self.tolerance, self.trials, self.time
        return pool.evaluate(self.source, self.entry, cases, right, *options)


def named(arrays: Mapping[str, Any], name: str) -> Any:
    if name not in arrays:
        raise ValueError(f"no array {name!r} in the safetensors: {', '.join(arrays) or 'none'}")
    return arrays[name]


async def read_request(request: web.Request) -> tuple[Job | Problem, dict[str, Any]]:
    """Return the job of a request, and the arrays that came with it. ValueError with the place of
    what is wrong."""
    size, most = request.content_length or 0, request.client_max_size
    if size > most:  # before aiohttp opens a file for it, which it leaves open then
        raise web.HTTPRequestEntityTooLarge(most, size)
    if request.content_type == "application/json":
        return read_job(await request.read()), {}
    if request.content_type != "multipart/form-data":
        said = "a job is application/json, or multipart/form-data with the parts job and arrays"
        raise web.HTTPUnsupportedMediaType(text=said)
    form = await request.post()
    parts = {}
    for name, part in form.items():
        parts[name] = part
        if isinstance(part, web.FileField):
            with part.file:
                parts[name] = part.file.read()
    if "job" not in parts or parts.keys() - {"job", "arrays"}:
        raise ValueError(f"the parts are job and arrays, not {', '.join(parts) or 'none'}")
    arrays = unpack(parts["arrays"], "arrays", HEADER_BYTES) if parts.get("arrays") else {}
    return read_job(parts["job"]), arrays


def read_job(text: bytes) -> Job | Problem:
    given = msgspec.json.decode(text)
    if not isinstance(given, dict) or "original_model_src" not in given:
        return msgspec.json.decode(text, type=Job)
    unknown = given.keys() - {one.name for one in fields(Problem)}
    if unknown:
        raise ValueError(f"a problem has no field {', '.join(sorted(unknown))}")
    return msgspec.convert(given, Problem)


def do(job: Job | Problem, pool: Pool, arrays: Mapping[str, Any]) -> Any:
    return pool.evaluate(job) if isinstance(job, Problem) else job.do(pool, arrays)


# ---- figures of the GPUs -------------------------------------------------------------------------


def figures() -> tuple[dict[str, dict[str, Any]], str]:
    """Return of each GPU by its UUID name, memory (bytes), temperature (degrees Celsius) and load
    (percent), and why others have none."""
    try:
        rows = nvidia_smi("gpu", FIELDS, SMI_SECONDS)
    except (RuntimeError, OSError) as error:
        return {}, str(error)
    found = {}
    for row in rows:
        number = {name: int(text) if text.isdigit() else None for name, text in row.items()}
        mib = {name: number.get(f"memory.{name}") for name in ("total", "free", "used")}
        found[row["uuid"]] = {
            "name": row.get("name"),
            "memory": {name: value and value << 20 for name, value in mib.items()},
            "temperature": number.get("temperature.gpu"),
            "load": number.get("utilization.gpu"),
            "why": None,
        }
    return found, "nvidia-smi does not list this GPU"


# ---- the service ---------------------------------------------------------------------------------


class Service:
    """The answers. body_bytes: of a request; queue: jobs that may wait, beyond one a device."""

    def __init__(self, pool: Pool, token: str, body_bytes: int = 64 << 20, queue: int = 16) -> None:
        self.pool, self.token, self.queue = pool, token, queue
        self.devices = asyncio.Semaphore(len(pool.devices))
        self.waiting = self.running = 0
        self.started = time.monotonic()
        self.statuses: Counter[str] = Counter()
        self.refused: Counter[int] = Counter()
        self.queued: deque[float] = deque(maxlen=REMEMBERED)
        self.ran: deque[float] = deque(maxlen=REMEMBERED)
        middleware = web.middleware(lambda request, handler: self.answer(request, handler))
        self.app = web.Application(middlewares=[middleware], client_max_size=body_bytes)
        self.app.router.add_post("/evaluate", self.evaluate)
        self.app.router.add_get("/health", self.health)
        self.app.router.add_get("/statistics", self.statistics)
        self.app.router.add_post("/cleanup", self.cleanup)
        self.app.router.add_post("/reset_gpu/{id:[0-9]{1,5}}", self.reset)
        self.app.on_shutdown.append(lambda app: asyncio.to_thread(pool.close))

    async def answer(self, request: web.Request, handler: Any) -> web.Response:
        """Check the token, and answer errors as JSON."""
        began, headers, said = time.monotonic(), {}, ""
        try:
            given = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
            if not secrets.compare_digest(given, f"Bearer {self.token}".encode()):
                raise web.HTTPUnauthorized(
                    text="Authorization: Bearer TOKEN is missing or wrong (--token-file)",
                    headers={"WWW-Authenticate": "Bearer"},
                )
            status, value = await handler(request)
        except web.HTTPException as error:
            status, said = error.status, error.text or error.reason
            headers = {name: error.headers[name] for name in HEADERS if name in error.headers}
        except ReferenceFails as error:
            status, said = 422, str(error)
        except (ValueError, TypeError, OverflowError, RecursionError) as error:  # msgspec's too
            status, said = 400, str(error)
        except Exception as error:
            status, said = 503, str(error)
            if not self.pool.closed and not isinstance(error, (MemoryError, OSError)):
                log.exception("%s %s", request.method, ascii(request.path)[:200])
                status, said = 500, "an error of the service itself: see its log"
        if said:
            self.refused[status] += 1
            value = {"error": {"status": status, "message": said[:4000]}}
        took = time.monotonic() - began
        log.info("%s %s %d, %.3f s", request.method, ascii(request.path)[:200], status, took)
        body = msgspec.json.encode(value, enc_hook=lambda number: number.item())
        json = {"content_type": "application/json", "headers": headers}
        return web.Response(status=status, body=body, **json)

    async def evaluate(self, request: web.Request) -> tuple[int, Any]:
        if self.waiting >= self.queue and self.devices.locked():
            said = f"{self.waiting} jobs wait, and {self.queue} may (--queue)"
            raise web.HTTPTooManyRequests(text=said, headers={"Retry-After": "1"})
        came = time.monotonic()
        self.waiting += 1
        try:
            job, arrays = await read_request(request)
            await self.devices.acquire()
        finally:
            self.waiting -= 1
        self.running, began = self.running + 1, time.monotonic()
        try:
            result: Any = await asyncio.to_thread(do, job, self.pool, arrays)
        finally:
            self.running -= 1
            self.devices.release()
        if self.pool.closed:
            raise web.HTTPServiceUnavailable(text="the service ends")
        seconds = {"queued": began - came, "ran": time.monotonic() - began}
        self.statuses[result.status] += 1
        self.queued.append(seconds["queued"])
        self.ran.append(seconds["ran"])
        found = {one.name: getattr(result, one.name) for one in fields(result)}
        outputs = found.pop("outputs", ())
        if isinstance(job, Job) and job.outputs:  # msgspec writes bytes in base64
            found["outputs"] = pack({str(number): array for number, array in enumerate(outputs)})
        return 200, found | {"seconds": seconds}

    async def health(self, request: web.Request) -> tuple[int, Any]:
        """Return 503 if no job can run."""
        state = self.pool.state()
        told, why = await asyncio.to_thread(figures)
        lost = all(one["set_aside"] is not None for one in state)
        devices = [
            {name: one[name] for name in ("device", "set_aside")}
            | {"ready": len(one["ready"])}
            | told.get(one["facts"].get("uuid"), {**NO_FIGURES, "why": why})
            for one in state
        ]
        return 503 if lost else 200, {
            "status": "device_lost" if lost else "ok",
            "running": self.running,
            "waiting": self.waiting,
            "devices": devices,
            "uptime_seconds": time.monotonic() - self.started,
        }

    async def statistics(self, request: web.Request) -> tuple[int, Any]:
        medians = {"queued": self.queued, "ran": self.ran}
        state = self.pool.state()
        return 200, {
            "uptime_seconds": time.monotonic() - self.started,
            "jobs": self.statuses,
            "refused": self.refused,
            "queue": {
                "running": self.running,
                "waiting": self.waiting,
                "most_running": len(state),
                "most_waiting": self.queue,
            },
            "median_seconds": {
                name: statistics.median(kept) if kept else None for name, kept in medians.items()
            },
            "devices": [
                {name: one[name] for name in ("device", "faults", "set_aside")}
                | {"name": one["facts"].get("name"), "restarts": one["started"]}
                for one in state
            ],
        }

    async def cleanup(self, request: web.Request) -> tuple[int, Any]:
        return 200, {"freed_bytes": await asyncio.to_thread(self.pool.cleanup)}

    async def reset(self, request: web.Request) -> tuple[int, Any]:
        device = int(request.match_info["id"])
        if device not in self.pool.devices:
            raise web.HTTPNotFound(text=f"no device {device}; there are {[*self.pool.devices]}")
        try:
            await asyncio.to_thread(self.pool.reset, device)
        except RuntimeError as error:
            raise web.HTTPServiceUnavailable(text=str(error)) from None
        return 200, {"status": "ok", "device": device}
