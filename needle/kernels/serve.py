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
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any, Literal

import msgspec
from aiohttp import web
from msgspec import Meta, Struct

from needle.kernels.cases import Case, InOut, Out, Random, Reference, host_array, readable
from needle.kernels.kernelbench import Problem
from needle.kernels.pool import Pool, ReferenceFails, Result
from needle.kernels.toolkit import nvidia_smi
from needle.safetensors import pack, unpack

HEADER_BYTES = 256 << 10  # JSON of the arrays' safetensors header
MOST_ARGUMENTS = 256
REMEMBERED = 1000  # jobs, for the medians
SMI_SECONDS = 2.0
MEMORY = "total", "free", "used"
FIELDS = ["uuid", "name", *(f"memory.{kind}" for kind in MEMORY)]
FIELDS += ["temperature.gpu", "utilization.gpu"]
log = logging.getLogger("needle.kernels")


def named(arrays: Mapping[str, Any], name: Any) -> Any:
    if name not in arrays:
        raise ValueError(f"no array {name!r} in the safetensors: {', '.join(arrays) or 'none'}")
    return arrays[name]


def argument(given: Any, arrays: Mapping[str, Any]) -> Any:
    """Return an argument of a kernel from its JSON: a number, or

    {"array": "x"}: one of the arrays that came with the job.
    {"shape": [4096], "dtype": "float32", "seed": 1}: Random, with optional low and high.
    {"shape": [4096], "dtype": "float32", "out": true}: Out.
    {"bytes": "3f800000"}: a struct in hexadecimal. The first two may have "inout": true."""
    match given:
        case {"inout": inout, **rest}:
            return InOut(argument(rest, arrays)) if inout else argument(rest, arrays)
        case {"out": out, **rest}:
            return Out(**rest) if out else argument(rest, arrays)
        case {"array": name, **rest} if not rest:
            return named(arrays, name)
        case {"bytes": str(text), **rest} if not rest:
            return bytes.fromhex(text)
        case {"shape": _}:
            return Random(**given)
        case bool() | int() | float():
            return given
    raise ValueError("an argument is a number, or has exactly one of array, shape, bytes")


class JobCase(Struct, forbid_unknown_fields=True):
    """The fields of a Case, and the names of the arrays that are its right outputs."""

    grid: Any
    block: Any
    args: Annotated[list[Any], Meta(max_length=MOST_ARGUMENTS)]
    shared: int = 0
    operations: float = 0
    expected: list[str] | None = None

    def launch(self, arrays: Mapping[str, Any]) -> Case:
        args = [argument(given, arrays) for given in self.args]
        return Case(self.grid, self.block, args, self.shared, self.operations)


class Job(Struct, forbid_unknown_fields=True):
    """CUDA with its cases. One case without `expected` or `reference` is launched once. Otherwise
    each case is compared with the arrays that `expected` names, or with the outputs of another
    kernel for the same arguments."""

    source: str
    entry: Annotated[str, Meta(min_length=1, max_length=1000)]
    cases: Annotated[list[JobCase], Meta(min_length=1, max_length=64)]
    language: Literal["cuda"] = "cuda"
    reference: Reference | None = None
    tolerance: float | Annotated[list[float], Meta(min_length=2, max_length=2)] | None = None
    trials: Annotated[int, Meta(ge=1, le=50)] = 5
    time: bool = True
    sanitizer: str | None = None
    explain: bool = False
    outputs: bool = False

    def do(self, pool: Pool, arrays: Mapping[str, Any]) -> Result:
        expected = [case.expected for case in self.cases]
        cases = [case.launch(arrays) for case in self.cases]
        if self.reference is None and expected == [None]:
            (case,) = cases
            way = case.grid, case.block, case.args, case.shared
            return pool.run(self.source, self.entry, *way, self.sanitizer, self.explain)
        if self.reference is None and None in expected:
            raise ValueError("cases: give expected in each, or a reference, or one case alone")
        right = self.reference or [
            [readable(*host_array(named(arrays, name))) for name in names] for names in expected
        ]
        options = self.tolerance, self.trials, self.time
        return pool.evaluate(self.source, self.entry, cases, right, *options)


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
    if isinstance(parts.get("arrays"), str):
        raise ValueError("arrays: must come as a file, as by curl -F arrays=@arrays.safetensors")
    arrays = unpack(parts["arrays"], "arrays", HEADER_BYTES) if parts.get("arrays") else {}
    return read_job(parts["job"]), arrays


def read_job(text: bytes) -> Job | Problem:
    given = msgspec.json.decode(text)
    if isinstance(given, dict) and "original_model_src" in given:
        msgspec.convert(given, Problem)  # names a field of another type
        return Problem(**given)
    return msgspec.convert(given, Job)


# ---- figures of the GPUs -------------------------------------------------------------------------


def figures(uuid: str | None, rows: Sequence[Mapping[str, str]], why: str) -> dict[str, Any]:
    """Return name, memory (bytes), temperature (degrees Celsius) and load (percent) of a GPU from
    the rows of nvidia-smi, and why there are none."""
    row = next((row for row in rows if row["uuid"] == uuid), {})
    numbers = {field: int(text) for field, text in row.items() if text.isdigit()}
    mib = {kind: numbers.get(f"memory.{kind}") for kind in MEMORY}
    return {
        "name": row.get("name"),
        "memory": {kind: n and n << 20 for kind, n in mib.items()} if row else None,
        "temperature": numbers.get("temperature.gpu"),
        "load": numbers.get("utilization.gpu"),
        "why": None if row else why,
    }


# ---- the service ---------------------------------------------------------------------------------


class Service:
    """The answers. body_bytes: of a request; queue: jobs that may wait, beyond one a device."""

    def __init__(self, pool: Pool, token: str, body_bytes: int = 64 << 20, queue: int = 16) -> None:
        self.pool, self.token, self.queue = pool, token, queue
        self.workers = ThreadPoolExecutor(len(pool.devices))  # one a device: others wait for it
        self.jobs = 0
        self.started = time.monotonic()
        self.statuses: Counter[str] = Counter()
        self.refused: Counter[int] = Counter()
        self.seconds = {name: deque[float](maxlen=REMEMBERED) for name in ("queued", "ran")}
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
            headers = {n: text for n, text in error.headers.items() if n != "Content-Type"}
        except ReferenceFails as error:
            status, said = 422, str(error)
        except (ValueError, TypeError, OverflowError, RecursionError) as error:  # msgspec's too
            status, said = 400, str(error)
        except web.RequestPayloadError as error:
            status, said = 400, f"the body cannot be read: {error}"
        except Exception as error:
            status, said = 503, str(error) or type(error).__name__
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

    def counts(self) -> dict[str, int]:
        running = min(self.jobs, len(self.pool.devices))
        return {"running": running, "waiting": self.jobs - running}

    async def evaluate(self, request: web.Request) -> tuple[int, Any]:
        waiting = self.jobs - len(self.pool.devices)
        if waiting >= self.queue:
            said = f"{waiting} jobs wait, and {self.queue} may (--queue)"
            raise web.HTTPTooManyRequests(text=said, headers={"Retry-After": "1"})
        came = time.monotonic()
        self.jobs += 1
        try:
            job, arrays = await read_request(request)
            do = job.do if isinstance(job, Job) else lambda pool, arrays: pool.evaluate(job)
            work = lambda: (time.monotonic(), do(self.pool, arrays))
            loop = asyncio.get_running_loop()
            began, result = await loop.run_in_executor(self.workers, work)
        finally:
            self.jobs -= 1
            if self.pool.closed:  # which looks like a reference that fails
                raise web.HTTPServiceUnavailable(text="the service ends")
        seconds = {"queued": began - came, "ran": time.monotonic() - began}
        self.statuses[result.status] += 1
        for name, took in seconds.items():
            self.seconds[name].append(took)
        found = {**vars(result), "seconds": seconds}
        outputs = found.pop("outputs", ())
        if isinstance(job, Job) and job.outputs:  # msgspec writes bytes in base64
            found["outputs"] = pack({str(number): array for number, array in enumerate(outputs)})
        return 200, found

    async def health(self, request: web.Request) -> tuple[int, Any]:
        """Return 503 if no job can run."""
        state, rows, why = self.pool.state(), [], "nvidia-smi lists no such GPU"
        try:
            rows = await asyncio.to_thread(nvidia_smi, "gpu", FIELDS, SMI_SECONDS)
        except (RuntimeError, OSError) as error:
            why = str(error)
        lost = all(one["set_aside"] is not None for one in state)
        devices = [
            {"device": one["device"], "set_aside": one["set_aside"], "ready": len(one["ready"])}
            | figures(one["facts"].get("uuid"), rows, why)
            for one in state
        ]
        return 503 if lost else 200, {
            "status": "device_lost" if lost else "ok",
            **self.counts(),
            "devices": devices,
            "uptime_seconds": time.monotonic() - self.started,
        }

    async def statistics(self, request: web.Request) -> tuple[int, Any]:
        return 200, {
            "uptime_seconds": time.monotonic() - self.started,
            "jobs": self.statuses,
            "refused": self.refused,
            "queue": {
                **self.counts(),
                "most_running": len(self.pool.devices),
                "most_waiting": self.queue,
            },
            "median_seconds": {
                name: statistics.median(took) if took else None
                for name, took in self.seconds.items()
            },
            "devices": [
                {name: one[name] for name in ("device", "faults", "set_aside")}
                | {"name": one["facts"].get("name"), "restarts": one["started"]}
                for one in self.pool.state()
            ],
        }

    async def cleanup(self, request: web.Request) -> tuple[int, Any]:
        return 200, {"freed_bytes": await asyncio.to_thread(self.pool.cleanup)}

    async def reset(self, request: web.Request) -> tuple[int, Any]:
        device = int(request.match_info["id"])
        if device not in self.pool.devices:
            known = [number for number in self.pool.devices if number >= 0]
            raise web.HTTPNotFound(text=f"no device {device}; there are {known or 'none'}")
        try:
            await asyncio.to_thread(self.pool.reset, device)
        except RuntimeError as error:
            raise web.HTTPServiceUnavailable(text=str(error)) from None
        return 200, {"status": "ok", "device": device}
