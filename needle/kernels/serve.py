"""The service: a Pool behind HTTP, for programs that write kernels.

    POST /evaluate          a job (needle.kernels.job); status 200, also if the kernel fails
    GET  /health            answers at once, also while a kernel runs
    GET  /statistics
    POST /cleanup           returns the bytes of device memory that were freed
    POST /reset_gpu/{id}    new processes on that device, with a health check

Compiling and running CUDA is running arbitrary code. Each request needs the token and a `Host` of
this service (needle.kernels.access). A refusal is JSON with the limit that was exceeded.
Connections without the token are closed after their first answer, and before others when there are
too many. The event loop only moves bytes: JSON, the pool and the log have threads.
"""

from __future__ import annotations

import asyncio
import functools
import io
import logging
import logging.handlers
import math
import queue
import signal
import socket
import statistics
import threading
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from needle.kernels.access import BACKLOG, MOST_CONNECTIONS, right_host, right_token
from needle.kernels.job import (
    Job,
    Refused,
    RequestLimits,
    check_size,
    read_job,
    to_json,
    write_result,
)
from needle.kernels.pool import Pool, Result
from needle.nvml import Nvml, NvmlError

BODY_SECONDS = 60.0  # for a body to arrive
ANSWER_SECONDS = 600.0  # for an answer to be read
IDLE_SECONDS = 20.0  # for a connection without a request
END_SECONDS = 5.0  # for answers under way when the service ends
LINGER_SECONDS = 2.0  # for the rest of a body that was refused
NVML_SECONDS = 0.05  # that /health waits for NVML before it reports the previous figures
REMEMBERED = 1000  # jobs, for the medians
CHUNK = 1 << 18
CLIENT_GONE = 499  # in the log, as other servers have it
LOG_LINES = 1000  # that wait to be written; more are dropped
GPU_FIGURES = ("name", "memory", "temperature", "load")

log = logging.getLogger("needle.kernels")
http_log = logging.getLogger("needle.kernels.http")  # aiohttp's


@dataclass(frozen=True)
class Answer:
    """status, body (JSON), headers, and a note for the log."""

    status: int
    body: bytes
    headers: dict[str, str] = field(default_factory=dict)
    note: str = ""


def refusal(refused: Refused, headers: dict[str, str] | None = None) -> Answer:
    error = {"status": refused.status, "message": refused.message}
    if refused.limit is not None:
        error["limit"] = refused.limit
    return Answer(refused.status, to_json({"error": error}), headers or {}, refused.message)


def ending() -> Refused:
    return Refused(503, "the service ends")


# ---- figures of the GPUs -------------------------------------------------------------------------


@functools.cache
def open_nvml() -> Nvml:
    return Nvml()


def gpu_figures(uuid: str | None) -> dict[str, Any]:
    """Return name, memory (bytes), temperature (degrees Celsius) and load (percent) of a GPU. None
    where NVML does not tell, and `why`."""
    known: dict[str, Any] = {}
    why = None if uuid else "no process of this device has been ready"
    try:
        if uuid:
            known = open_nvml().describe(open_nvml().handle_of(uuid))
    except (OSError, NvmlError) as error:
        why = f"NVML: {error}"
    except Exception as error:
        log.exception("the figures of the GPUs cannot be read")
        why = f"the figures of the GPUs cannot be read: {error!r}"
    figures = {name: known.get(name) for name in ("name", "memory", "temperature")}
    figures["load"] = known.get("utilization")
    missing = [name for name, value in figures.items() if value is None]
    if missing and why is None:
        why = f"NVML does not tell {', '.join(missing)} of this GPU"
    return figures | {"why": why}


class Figures:
    """The latest figures of the GPUs. Each reading has a daemon thread, so a driver that hangs
    delays neither an answer nor the end."""

    def __init__(self) -> None:
        self.latest: dict[int, dict[str, Any]] = {}
        self.reading: Future[dict[int, dict[str, Any]]] | None = None

    async def of(self, state: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
        """Return {device: figures}, new ones or, after NVML_SECONDS, the previous ones."""
        uuids = {one["device"]: one["facts"].get("uuid") for one in state}
        if self.reading is None:
            self.reading = Future()
            threading.Thread(target=self._read, args=(uuids, self.reading), daemon=True).start()
        reading = self.reading
        with suppress(asyncio.TimeoutError):
            wrapped = asyncio.shield(asyncio.wrap_future(reading))
            self.latest = await asyncio.wait_for(wrapped, NVML_SECONDS)
        if reading.done():
            self.reading = None
        waiting = dict.fromkeys(GPU_FIGURES) | {"why": "NVML has not answered yet"}
        return {device: self.latest.get(device, waiting) for device in uuids}

    @staticmethod
    def _read(uuids: dict[int, str | None], reading: Future[dict[int, dict[str, Any]]]) -> None:
        reading.set_result({device: gpu_figures(uuid) for device, uuid in uuids.items()})


# ---- the service ---------------------------------------------------------------------------------


class Service:
    """The answers, on one event loop. queue: jobs that may wait; parallel: jobs that may run, one a
    device; connections: that may be open."""

    def __init__(
        self,
        pool: Pool,
        token: str,
        names: frozenset[str],
        limits: RequestLimits | None = None,
        queue: int = 16,
        parallel: int = 1,
        connections: int = MOST_CONNECTIONS,
    ) -> None:
        self.pool, self.token, self.names = pool, token, names
        self.limits, self.queue, self.parallel = limits or RequestLimits(), queue, parallel
        self.slots = asyncio.Semaphore(parallel)  # in the order in which jobs came
        self.runners = ThreadPoolExecutor(parallel, "needle job")
        self.connections = connections
        self.trusted: set[Any] = set()  # connections that have shown the token
        self.busy: set[Any] = set()  # of these, those with a request under way
        self.held = 0  # jobs that are here, also those whose body is on its way
        self.waiting = self.running = 0
        self.maintaining = False
        self.draining = False
        self.started = time.monotonic()
        self.statuses: Counter[str] = Counter()
        self.refused: Counter[int] = Counter()
        self.queued: deque[float] = deque(maxlen=REMEMBERED)
        self.ran: deque[float] = deque(maxlen=REMEMBERED)
        self.figures = Figures()
        self.app = web.Application(middlewares=[web.middleware(functools.partial(self.handle))])
        self.app.on_response_prepare.append(self._close_untrusted)
        for method, path, handler in (
            ("POST", "/evaluate", self.evaluate),
            ("GET", "/health", self.health),
            ("GET", "/statistics", self.statistics),
            ("POST", "/cleanup", self.cleanup),
            ("POST", "/reset_gpu/{id:[0-9]{1,5}}", self.reset_gpu),
        ):
            self.app.router.add_route(method, path, handler)

    # ---- connections -----------------------------------------------------------------------------

    def connection(self, server: web.Server) -> asyncio.BaseProtocol:
        """Make a protocol for a new connection. At the limit close the oldest one without a request
        under way, first those that never showed the token."""
        there = [
            one
            for one in server.connections
            if one.transport is not None and not one.transport.is_closing()
        ]
        self.trusted.intersection_update(there)
        idle = sorted((one for one in there if one not in self.busy), key=self.trusted.__contains__)
        for one in idle[: max(0, len(there) + 1 - self.connections)]:
            one.transport.abort()
        return server()

    async def _close_untrusted(self, request: web.Request, response: web.StreamResponse) -> None:
        """Close the connection after any answer to a request without the token: one answer fits
        into the socket's buffer, so closing waits for no reader."""
        if request.protocol not in self.busy:
            response.force_close()
            response.headers["Connection"] = "close"

    # ---- requests --------------------------------------------------------------------------------

    async def handle(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[Answer]]
    ) -> web.StreamResponse:
        """Middleware of all requests. It sends the answer itself, so that the connection counts as
        busy until then."""
        try:
            response = await self._handle(request, handler)
            if request.protocol in self.busy:
                await response.prepare(request)
                await asyncio.wait_for(response.write_eof(), ANSWER_SECONDS)
        except (asyncio.TimeoutError, ConnectionError):
            if request.transport is not None:
                request.transport.abort()
        finally:
            self.busy.discard(request.protocol)
        return response

    async def _handle(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[Answer]]
    ) -> web.Response:
        begin = time.monotonic()
        path = request.raw_path.partition("?")[0]  # a query may hold a secret, and is not logged
        try:
            self._admit(request)
            answer = await handler(request)
        except Refused as refused:
            answer = refusal(refused, self._headers(refused))
        except web.HTTPException as error:  # of the router: no such path, or method
            allowed = error.headers.get("Allow")
            there = ", ".join(resource.canonical for resource in self.app.router.resources())
            said = f"takes {allowed}" if allowed else f"does not exist; there are {there}"
            answer = refusal(
                Refused(error.status, f"{ascii(path)[:80]} {said}"),
                {"Allow": allowed} if allowed else {},
            )
        except ConnectionError:
            answer = Answer(CLIENT_GONE, b"")
        except Exception:
            log.exception("%s %s", request.method, ascii(path)[:200])
            answer = refusal(Refused(500, "an error of the service itself; its log has it"))
        if answer.status >= 400:
            self.refused[answer.status] += 1
        log.info(
            "%s %s %s %d, %d bytes, %.3f s%s",
            request.remote,
            request.method,
            ascii(path)[:200],
            answer.status,
            len(answer.body),
            time.monotonic() - begin,
            answer.note and f": {ascii(answer.note)[1:-1][:400]}",
        )
        return web.Response(
            status=answer.status,
            # aiohttp sends a file in chunks, bytes all at once.
            body=answer.body if len(answer.body) <= CHUNK else io.BytesIO(answer.body),
            content_type="application/json",
            headers=answer.headers,
        )

    def _admit(self, request: web.Request) -> None:
        if not right_host(request.headers.getall("Host", ()), self.names):
            raise Refused(
                421, f"this service answers to {', '.join(sorted(self.names))} (--allow-host)"
            )
        if not right_token(request.headers.getall("Authorization", ()), self.token):
            raise Refused(401, "Authorization: Bearer TOKEN is missing or wrong (--token-file)")
        if len(self.busy) >= self.connections:
            raise Refused(429, f"{len(self.busy)} requests are being answered", self.connections)
        self.trusted.add(request.protocol)
        self.busy.add(request.protocol)

    def _headers(self, refused: Refused) -> dict[str, str]:
        if refused.status in (429, 503):
            each = statistics.median(self.ran) if self.ran else 1.0
            seconds = max(1, math.ceil(each * (self.waiting + 1) / self.parallel))
            return {"Retry-After": str(seconds)}
        return {"WWW-Authenticate": "Bearer"} if refused.status == 401 else {}

    # ---- jobs ------------------------------------------------------------------------------------

    async def evaluate(self, request: web.Request) -> Answer:
        if self.draining:
            raise ending()
        if self.held >= self.queue + self.parallel:
            raise Refused(
                429, f"{self.held} jobs are here; {self.queue} may wait (--queue)", self.queue
            )
        self.held += 1
        try:
            try:
                text, arrays = await asyncio.wait_for(self._body(request), BODY_SECONDS)
            except asyncio.TimeoutError:
                raise Refused(
                    408, f"the body did not arrive in {BODY_SECONDS:.0f} s", BODY_SECONDS
                ) from None
            job = await asyncio.to_thread(read_job, text, arrays, self.limits)
            del text, arrays
            result, seconds = await self._turn(request, job)
            self.statuses[result.status] += 1
            self.queued.append(seconds["queued"])
            self.ran.append(seconds["ran"])
            body = await asyncio.to_thread(write_result, result, bool(job.fields.outputs), seconds)
            note = f"job {job.fields.entry}: {result.status} on device {result.device}, queued "
            note += f"{seconds['queued']:.3f} s, ran {seconds['ran']:.3f} s"
            return Answer(200, body, note=note)
        finally:
            self.held -= 1

    async def _turn(self, request: web.Request, job: Job) -> tuple[Result, dict[str, float]]:
        """Run a job when its turn comes. Return seconds too: queued, ran."""
        came = time.monotonic()
        self.waiting += 1
        try:
            await self.slots.acquire()
        finally:
            self.waiting -= 1
        self.running += 1
        try:
            if self.draining:
                raise ending()
            if request.transport is None or request.transport.is_closing():
                raise ConnectionResetError("the client is gone")
            began = time.monotonic()
            loop = asyncio.get_running_loop()
            result = await loop.run_in_executor(self.runners, self._do, job)
            return result, {"queued": began - came, "ran": time.monotonic() - began}
        finally:
            self.running -= 1
            self.slots.release()

    def _do(self, job: Job) -> Result:
        """Run a job in a thread."""
        try:
            result = job.do(self.pool, self.limits.job_seconds)
        except (MemoryError, OSError) as error:
            raise Refused(503, f"the service has no room for the job now: {error}") from None
        except (TypeError, ValueError, OverflowError) as error:
            raise Refused(400, f"job: {error}"[:4000]) from None
        except RuntimeError:
            if self.draining:
                raise ending() from None
            raise
        if self.draining and self.pool.closed:
            raise ending()
        return result

    async def _body(self, request: web.Request) -> tuple[bytearray, bytearray]:
        """Return (JSON, safetensors) of a job."""
        if request.headers.get("Content-Encoding", "identity").lower() != "identity":
            raise Refused(415, "a body is taken as it is, without Content-Encoding")
        kind = request.content_type
        job = (self.limits.json_bytes, "--max-source-bytes")
        arrays = (self.limits.body_bytes, "--max-body-bytes")
        limits = {"application/json": job, "multipart/form-data": arrays}
        parts = {"job": job, "arrays": arrays}
        if kind not in limits:
            raise Refused(
                415,
                "a job is application/json, or multipart/form-data with the parts job and arrays, "
                f"not {ascii(kind)[:80]}",
            )
        check_size("the body", request.content_length or 0, *limits[kind])
        try:
            if kind == "application/json":
                read = functools.partial(request.content.read, CHUNK)
                return await _read(read, "the body", *limits[kind]), bytearray()
            found: dict[str, bytearray] = {}
            reader = await request.multipart()
            while (part := await reader.next()) is not None:
                name = getattr(part, "name", None)
                if name not in parts or name in found:
                    raise Refused(
                        400, f"the parts are job and arrays, each once, not {ascii(name)[:80]}"
                    )
                read = functools.partial(part.read_chunk, CHUNK)
                found[name] = await _read(read, f"the part {name}", *parts[name])
        except (Refused, ConnectionError, asyncio.CancelledError):
            raise
        except Exception as error:  # aiohttp has no one name for a body that cannot be read
            raise Refused(400, f"the body cannot be read: {error}"[:1000]) from None
        if "job" not in found:
            raise Refused(400, "there is no part job")
        return found["job"], found.get("arrays", bytearray())

    # ---- health, cleanup, reset ------------------------------------------------------------------

    async def health(self, request: web.Request) -> Answer:
        """Return 503 if no job can run: every device is set aside, nothing compiles, or the service
        ends."""
        state = self.pool.state()
        figures = await self.figures.of(state)
        compilers = state[0]["compilers"]
        status = "ok"
        if all(one["set_aside"] is not None for one in state):
            status = "device_lost"
        if compilers["set_aside"] is not None:
            status = "compilers_lost"
        if self.draining:
            status = "ending"
        answer = {
            "status": status,
            "running": self.running,
            "waiting": self.waiting,
            "devices": [
                {
                    "device": one["device"],
                    "set_aside": one["set_aside"],
                    "ready": len(one["ready"]),
                    **figures[one["device"]],
                }
                for one in state
            ],
            "compilers": {"set_aside": compilers["set_aside"], "ready": len(compilers["ready"])},
            "uptime_seconds": time.monotonic() - self.started,
        }
        return Answer(200 if status == "ok" else 503, to_json(answer))

    async def statistics(self, request: web.Request) -> Answer:
        def median(values: deque[float]) -> float | None:
            return statistics.median(values) if values else None

        answer = {
            "uptime_seconds": time.monotonic() - self.started,
            "jobs": dict(self.statuses),
            "refused": dict(self.refused),
            "queue": {
                "running": self.running,
                "waiting": self.waiting,
                "most_running": self.parallel,
                "most_waiting": self.queue,
            },
            "median_seconds": {"queued": median(self.queued), "ran": median(self.ran)},
            "devices": [
                {
                    "device": one["device"],
                    "name": one["facts"].get("name"),
                    "faults": one["faults"],
                    "restarts": one["started"] - len(one["ready"]) - len(one["used"]),
                    "set_aside": one["set_aside"],
                }
                for one in self.pool.state()
            ],
        }
        return Answer(200, to_json(answer))

    async def _maintain(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """Run one cleanup or reset at a time: each may wait for a kernel."""
        if self.draining:
            raise ending()
        if self.maintaining:
            raise Refused(429, "another cleanup or reset is at work", 1)
        self.maintaining = True
        try:
            return await asyncio.to_thread(call, *arguments)
        except RuntimeError as error:
            raise ending() if self.draining else Refused(503, str(error)) from None
        finally:
            self.maintaining = False

    async def cleanup(self, request: web.Request) -> Answer:
        return Answer(200, to_json({"freed_bytes": await self._maintain(self.pool.cleanup)}))

    async def reset_gpu(self, request: web.Request) -> Answer:
        device = int(request.match_info["id"])
        known = [one["device"] for one in self.pool.state()]
        if device not in known:
            raise Refused(404, f"there is no device {device}; there are {known}")
        await self._maintain(self.pool.reset, device)
        return Answer(200, to_json({"status": "ok", "device": device}))

    # ---- the end ---------------------------------------------------------------------------------

    def drain(self) -> None:
        """Start no more jobs, and refuse those that wait."""
        self.draining = True
        for _ in range(self.waiting):
            self.slots.release()

    async def close(self, seconds: float, hurry: asyncio.Event) -> None:
        """Wait for running jobs, so long or until `hurry`, then end the pool's processes."""
        self.drain()
        end = time.monotonic() + seconds
        while self.held and time.monotonic() < end and not hurry.is_set():
            await asyncio.sleep(0.02)
        await asyncio.to_thread(self.pool.close)
        self.runners.shutdown(wait=False, cancel_futures=True)


async def _read(read: Callable[[], Awaitable[bytes]], what: str, most: int, flag: str) -> bytearray:
    data = bytearray()
    while chunk := await read():
        data += chunk
        check_size(what, len(data), most, flag)
    return data


# ---- the log -------------------------------------------------------------------------------------


def without_text(record: logging.LogRecord) -> bool:
    """Leave out the text of requests that are no HTTP, which may have a token in it."""
    error = record.exc_info[1] if record.exc_info else None
    if error is not None and type(error).__module__.startswith("aiohttp."):
        record.msg, record.args = "no HTTP (%s)", (type(error).__name__,)
        record.exc_info = None
    return True


class Lines(logging.handlers.QueueHandler):
    """A log whose writer may block: a thread writes, and lines that do not fit are dropped."""

    def __init__(self, handler: logging.Handler) -> None:
        super().__init__(queue.Queue(LOG_LINES))
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        logging.handlers.QueueListener(self.queue, handler).start()

    def handleError(self, record: logging.LogRecord) -> None:
        pass

    def flush_within(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while self.queue.unfinished_tasks and time.monotonic() < end:
            time.sleep(0.005)


# ---- running it ----------------------------------------------------------------------------------


@asynccontextmanager
async def listening(
    service: Service, sock: socket.socket, drain_seconds: float, hurry: asyncio.Event
) -> AsyncIterator[None]:
    """Answer requests within. At the end running jobs have `drain_seconds`, or until `hurry`."""
    http_log.addFilter(without_text)
    runner = web.AppRunner(
        service.app,
        logger=http_log,
        access_log=None,  # `handle` logs, without queries
        keepalive_timeout=IDLE_SECONDS,
        lingering_time=LINGER_SECONDS,
        auto_decompress=False,
        shutdown_timeout=END_SECONDS,
    )
    await runner.setup()
    # `backlog` is also how many connections asyncio accepts at a time: with one, each is heard
    # before many newer ones are there. The system may hold more.
    server = await asyncio.get_running_loop().create_server(
        functools.partial(service.connection, runner.server), sock=sock, backlog=1
    )
    sock.listen(BACKLOG)
    try:
        yield
    finally:
        server.close()
        await service.close(drain_seconds, hurry)
        await runner.cleanup()


async def serve(
    service: Service, sock: socket.socket, drain_seconds: float, ready: Callable[[], None]
) -> None:
    """Serve until SIGTERM or SIGINT. A second one ends running jobs."""
    stop, hurry = asyncio.Event(), asyncio.Event()

    def signalled() -> None:
        (hurry if stop.is_set() else stop).set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, signalled)
    async with listening(service, sock, drain_seconds, hurry):
        ready()
        await stop.wait()
