"""The service: a Pool behind HTTP, for programs that write kernels and want to know what they do.

    POST /evaluate          a job (needle.kernels.wire); answered 200, whatever became of the kernel
    GET  /health            at once, whatever runs
    GET  /statistics
    POST /cleanup           the bytes of device memory that were given back
    POST /reset_gpu/{id}    a new process on that device, which proves it

Compiling and running CUDA is running arbitrary code. So every request says the token and a name of
this service (needle.kernels.access), has limits, and is refused in JSON with the limit it passed. A
connection without the token is closed after its first answer, and makes room for one that has it.
The event loop only moves bytes: reading JSON, the pool and the log have threads of their own.
"""

from __future__ import annotations

import asyncio
import functools
import io
import logging
import logging.handlers
import math
import os
import queue
import signal
import socket
import statistics
import threading
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import ModuleType
from typing import TYPE_CHECKING, Any

from needle.kernels.access import BACKLOG, MOST_CONNECTIONS, right_host, right_token
from needle.kernels.isolate import Pool
from needle.kernels.wire import Limits, Refused, read_job, to_json, write_result
from needle.nvml import Nvml, NvmlError

if TYPE_CHECKING:
    from aiohttp import web

BODY_SECONDS = 60.0  # for a body to arrive
ANSWER_SECONDS = 600.0  # for an answer to be taken
IDLE_SECONDS = 20.0  # for a connection without a request
END_SECONDS = 5.0  # for the answers that are on their way when the service ends
LINGER_SECONDS = 2.0  # for the rest of a body that was refused
STATE_SECONDS = 0.05  # that health waits for the pool's state before it tells the last one
REMEMBERED = 1000  # jobs, for the medians
PIECE = 1 << 18
GONE = 499  # as other servers log a client that did not wait
LOG_LINES = 1000  # that wait to be written; more are dropped

log = logging.getLogger("needle.kernels")
http_log = logging.getLogger("needle.kernels.http")  # aiohttp's


def load_aiohttp() -> ModuleType:
    """aiohttp, which only the service uses. RuntimeError says how to get it."""
    try:
        import aiohttp.web
    except ImportError as error:
        raise RuntimeError(f"the service needs aiohttp ({error}): pip install aiohttp") from None
    return aiohttp


@dataclass(frozen=True)
class Answer:
    """`note`: what the log says of it."""

    status: int
    body: bytes
    headers: dict[str, str] = field(default_factory=dict)
    note: str = ""


def refusal(refused: Refused, headers: dict[str, str] | None = None) -> Answer:
    error = {"status": refused.status, "message": refused.message}
    if refused.limit is not None:
        error["limit"] = refused.limit
    return Answer(refused.status, to_json({"error": error}), headers or {}, refused.message)


class Latest:
    """The latest value of a call that may block. Each call has a daemon thread, so that a driver
    that hangs holds up neither an answer nor the end. Refused where the latest call failed."""

    def __init__(self, what: str, call: Callable[[], Any], value: Any) -> None:
        self.what, self.call, self.value = what, call, value
        self.refused: Refused | None = None
        self.asked: Future[tuple[Any, Refused | None]] = Future()
        self.asked.set_result((value, None))

    async def get(self) -> Any:
        """A new value, or the last one where that takes longer than `STATE_SECONDS`."""
        if self.asked.done():
            asked: Future[tuple[Any, Refused | None]] = Future()
            threading.Thread(target=self._ask, args=(asked,), daemon=True).start()
            self.asked = asked
        await asyncio.wait({asyncio.wrap_future(self.asked)}, timeout=STATE_SECONDS)
        if self.asked.done():
            self.value, self.refused = self.asked.result()
        if self.refused is not None:
            raise self.refused
        return self.value

    def _ask(self, asked: Future[tuple[Any, Refused | None]]) -> None:
        """The error is a result: asyncio logs an exception of a future that no request awaits."""
        try:
            asked.set_result((self.call(), None))
        except Exception as error:
            log.exception("%s cannot be read", self.what)
            told = f"{self.what} cannot be read: {type(error).__name__}: {error}"
            asked.set_result((self.value, Refused(503, told)))


@functools.cache
def open_nvml() -> Nvml:
    return Nvml()


def gpu_figures(uuid: str | None) -> dict[str, Any]:
    """Of a GPU: name, memory in bytes, temperature in degrees Celsius and load in percent. None
    where NVML does not tell, and `why`."""
    known: dict[str, Any] = {}
    why = None if uuid else "no process of this device has been ready"
    try:
        if uuid:
            known = open_nvml().describe(open_nvml().handle_of(uuid))
    except (OSError, NvmlError) as error:
        why = f"NVML: {error}"
    figures = {name: known.get(name) for name in ("name", "memory", "temperature")}
    figures["load"] = known.get("utilization")
    missing = [name for name, value in figures.items() if value is None]
    if missing and why is None:
        why = f"NVML does not tell {', '.join(missing)} of this GPU"
    return figures | {"why": why}


class Turns:
    """So many jobs at a time, the others in the order in which they came."""

    def __init__(self, parallel: int) -> None:
        self.parallel, self.running = parallel, 0
        self.waiting: deque[asyncio.Future[None]] = deque()

    async def take(self) -> None:
        if self.running < self.parallel:
            self.running += 1
            return
        turn = asyncio.get_running_loop().create_future()
        self.waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.give_back()
            raise

    def give_back(self) -> None:
        while self.waiting:
            turn = self.waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        self.running -= 1

    def send_away(self, why: Refused) -> None:
        """All that wait."""
        for turn in self.waiting:
            if not turn.done():
                turn.set_exception(why)
        self.waiting.clear()


class Service:
    """The answers, on one event loop. `queue`: jobs that may wait; `parallel`: that may run, one a
    device; `connections`: that may be open."""

    def __init__(
        self,
        pool: Pool,
        token: str,
        names: frozenset[str],
        limits: Limits | None = None,
        queue: int = 16,
        parallel: int = 1,
        connections: int = MOST_CONNECTIONS,
    ) -> None:
        self.web = web = load_aiohttp().web
        self.pool, self.token, self.names = pool, token, names
        self.limits, self.queue = limits or Limits(), queue
        self.turns = Turns(parallel)
        self.runners = ThreadPoolExecutor(parallel, "needle job")
        self.reader = ThreadPoolExecutor(1, "needle reader")
        self.keeper = ThreadPoolExecutor(1, "needle keeper")
        self.connections = connections
        self.known: set[Any] = set()  # of them, those that have shown the token
        self.busy: set[Any] = set()  # of these, those with a request that is being answered
        self.held = 0  # jobs that are here, their bodies perhaps still on the way
        self.keeping = False
        self.draining = False
        self.started = time.monotonic()
        self.statuses: Counter[str] = Counter()
        self.refused: Counter[int] = Counter()
        self.queued: deque[float] = deque(maxlen=REMEMBERED)
        self.ran: deque[float] = deque(maxlen=REMEMBERED)
        self.state = Latest("the state of the pool", pool.state, [])
        self.uuids: dict[int, str] = {}
        self.figures = Latest("the figures of the GPUs", self._figures, {})
        self.app = web.Application(middlewares=[web.middleware(functools.partial(self.handle))])
        self.app.on_response_prepare.append(self._close_unknown)
        for method, path, handler in (
            ("POST", "/evaluate", self.evaluate),
            ("GET", "/health", self.health),
            ("GET", "/statistics", self.statistics),
            ("POST", "/cleanup", self.cleanup),
            ("POST", "/reset_gpu/{id:[0-9]{1,5}}", self.reset_gpu),
        ):
            # `_body` says 100 Continue, once the request is known to be welcome.
            self.app.router.add_route(method, path, handler, expect_handler=_say_nothing)

    # ---- connections -----------------------------------------------------------------------------

    def connection(self, server: web.Server) -> asyncio.BaseProtocol:
        """Make a protocol for a new connection. At the limit the oldest one without a request under
        way is closed for it, those first that never showed the token."""
        there = [
            one
            for one in server.connections
            if one.transport is not None and not one.transport.is_closing()
        ]
        self.known.intersection_update(there)
        idle = sorted((one for one in there if one not in self.busy), key=self.known.__contains__)
        for one in idle[: max(0, len(there) + 1 - self.connections)]:
            one.transport.abort()
        return server()

    async def _close_unknown(self, request: web.Request, response: web.StreamResponse) -> None:
        """Close the connection after any answer to a request without the token: one answer fits
        into the socket's buffer, so that closing waits for no reader."""
        if request.protocol not in self.busy:
            response.force_close()
            response.headers["Connection"] = "close"

    # ---- requests --------------------------------------------------------------------------------

    async def handle(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[Answer]]
    ) -> web.StreamResponse:
        """Middleware: every request that is HTTP, also to no route. The answer is sent before it
        returns, so that its connection counts as busy."""
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
        path = request.raw_path.partition("?")[0]  # what follows is nobody's, and not logged
        try:
            self._admit(request)
            answer = await handler(request)
        except Refused as refused:
            answer = refusal(refused, _headers(refused, self._retry_after()))
        except self.web.HTTPException as error:  # of the router: no such path, or method
            allowed = error.headers.get("Allow")
            answer = refusal(
                Refused(error.status, self._no_route(ascii(path)[:80], allowed)),
                {"Allow": allowed} if allowed else {},
            )
        except ConnectionError:
            answer = Answer(GONE, b"")  # nobody reads it
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
        return self.web.Response(
            status=answer.status,
            # Of a file aiohttp sends piece by piece, of bytes all at once.
            body=answer.body if len(answer.body) <= PIECE else io.BytesIO(answer.body),
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
        self.known.add(request.protocol)
        self.busy.add(request.protocol)

    def _no_route(self, path: str, allowed: str | None) -> str:
        if allowed:
            return f"{path} is asked by {allowed}"
        there = (resource.canonical for resource in self.app.router.resources())
        return f"no {path}; there are {', '.join(there)}"

    async def _in(
        self, threads: ThreadPoolExecutor, call: Callable[..., Any], *arguments: Any
    ) -> Any:
        return await asyncio.get_running_loop().run_in_executor(threads, call, *arguments)

    # ---- jobs ------------------------------------------------------------------------------------

    async def evaluate(self, request: web.Request) -> Answer:
        if self.draining:
            raise ending()
        most = self.queue + self.turns.parallel
        if self.held >= most:
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
            job = await self._in(self.reader, read_job, text, arrays, self.limits)
            del text, arrays
            came = time.monotonic()
            await self.turns.take()
            try:
                if request.transport is None or request.transport.is_closing():
                    raise ConnectionResetError("the client is gone")
                began = time.monotonic()
                result = await self._in(self.runners, self._do, job)
                ended = time.monotonic()
            finally:
                self.turns.give_back()
            self.statuses[result.status] += 1
            self.queued.append(began - came)
            self.ran.append(ended - began)
            seconds = {"queued": began - came, "ran": ended - began}
            body = await self._in(self.reader, write_result, result, job.outputs, seconds)
            note = f"job {job.entry}: {result.status} on device {result.device}, queued "
            note += f"{seconds['queued']:.3f} s, ran {seconds['ran']:.3f} s"
            return Answer(200, body, note=note)
        finally:
            self.held -= 1

    def _do(self, job: Any) -> Any:
        """In a thread."""
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
        """(JSON, safetensors) of a job."""
        limits = self.limits
        if request.headers.get("Content-Encoding", "identity").lower() != "identity":
            raise Refused(415, "a body is taken as it is, without Content-Encoding")
        kind = request.content_type
        most = limits.job_bytes if kind == "application/json" else limits.body_bytes
        if (request.content_length or 0) > most:
            raise too_large("the body", most, kind)
        if request.headers.get("Expect", "").lower() == "100-continue":
            await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        try:
            if kind == "application/json":
                return await _read(lambda: request.content.read(PIECE), most, kind), bytearray()
            if kind == "multipart/form-data":
                return await self._parts(request)
        except (Refused, ConnectionError, asyncio.CancelledError):
            raise
        except Exception as error:  # aiohttp has no one name for a body that cannot be read
            raise Refused(400, f"the body cannot be read: {error}"[:1000]) from None
        raise Refused(
            415,
            f"a job is application/json, or multipart/form-data with the parts job and arrays, not "
            f"{ascii(kind)[:80]}",
        )

    async def _parts(self, request: web.Request) -> tuple[bytearray, bytearray]:
        found: dict[str, bytearray] = {}
        most = {"job": self.limits.job_bytes, "arrays": self.limits.body_bytes}
        reader = await request.multipart()
        while True:
            part = await reader.next()
            if part is None:
                break
            name = getattr(part, "name", None)
            if name not in most or name in found:
                raise Refused(
                    400, f"the parts are job and arrays, each once, not {ascii(name)[:80]}"
                )
            read = part.read_chunk
            found[name] = await _read(lambda read=read: read(PIECE), most[name], name)
        if "job" not in found:
            raise Refused(400, "there is no part job")
        return found["job"], found.get("arrays", bytearray())

    def _retry_after(self) -> int:
        """Seconds until a job that waits now may have its turn."""
        each = statistics.median(self.ran) if self.ran else 1.0
        return max(1, math.ceil(each * (len(self.turns.waiting) + 1) / self.turns.parallel))

    # ---- looking after it ------------------------------------------------------------------------

    def _figures(self) -> dict[int, dict[str, Any]]:
        """Of each device, also while its processes are started anew; in a thread."""
        for one in self.state.value:
            if "uuid" in one["facts"]:
                self.uuids[one["device"]] = one["facts"]["uuid"]
        devices = [one["device"] for one in self.state.value]
        return {device: gpu_figures(self.uuids.get(device)) for device in devices}

    async def health(self, request: web.Request) -> Answer:
        """503 where no job can run: every device is set aside, nothing compiles, or the service
        ends; and where the state of the pool cannot be read, which `why` tells."""
        unknown = dict.fromkeys(("name", "memory", "temperature", "load"))
        unknown["why"] = "NVML has not answered yet"
        state, why, figures = [], None, {}
        try:
            state = await self.state.get()
        except Refused as refused:
            why = refused.message
        try:
            figures = await self.figures.get()
        except Refused as refused:
            unknown["why"] = refused.message
        compilers = state[0]["compilers"] if state else {"lost": None, "ready": []}
        status = "ok"
        if state and all(one["lost"] is not None for one in state):
            status = "device_lost"
        if compilers["lost"] is not None:
            status = "compilers_lost"
        if why is not None:
            status = "state_unknown"
        if self.draining:
            status = "ending"
        return Answer(
            200 if status == "ok" else 503,
            to_json(
                {
                    "status": status,
                    "why": why,
                    "running": self.turns.running,
                    "waiting": len(self.turns.waiting),
                    "devices": [
                        {
                            "device": one["device"],
                            "lost": one["lost"],
                            "ready": len(one["ready"]),
                            **figures.get(one["device"], unknown),
                        }
                        for one in state
                    ],
                    "compilers": {"lost": compilers["lost"], "ready": len(compilers["ready"])},
                    "uptime_seconds": time.monotonic() - self.started,
                }
            ),
        )

    async def statistics(self, request: web.Request) -> Answer:
        def median(values: deque[float]) -> float | None:
            return statistics.median(values) if values else None

        state = await self.state.get()
        return Answer(
            200,
            to_json(
                {
                    "uptime_seconds": time.monotonic() - self.started,
                    "jobs": dict(self.statuses),
                    "refused": dict(self.refused),
                    "queue": {
                        "running": self.turns.running,
                        "waiting": len(self.turns.waiting),
                        "most_running": self.turns.parallel,
                        "most_waiting": self.queue,
                    },
                    "median_seconds": {"queued": median(self.queued), "ran": median(self.ran)},
                    "devices": [
                        {
                            "device": one["device"],
                            "name": one["facts"].get("name"),
                            "faults": one["faults"],
                            "restarts": one["started"] - len(one["ready"]) - len(one["used"]),
                            "lost": one["lost"],
                        }
                        for one in state
                    ],
                }
            ),
        )

    async def _keep(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """One such call at a time: each may wait for a kernel."""
        if self.draining:
            raise ending()
        if self.keeping:
            raise Refused(429, "another cleanup or reset is at work", 1)
        self.keeping = True
        try:
            return await self._in(self.keeper, call, *arguments)
        except RuntimeError as error:
            raise ending() if self.draining else Refused(503, str(error)) from None
        finally:
            self.keeping = False

    async def cleanup(self, request: web.Request) -> Answer:
        return Answer(200, to_json({"freed_bytes": await self._keep(self.pool.cleanup)}))

    async def reset_gpu(self, request: web.Request) -> Answer:
        device = int(request.match_info["id"])
        known = [one["device"] for one in await self.state.get()]
        if device not in known:
            raise Refused(404, f"there is no device {device}; there are {known}")
        await self._keep(self.pool.reset, device)
        return Answer(200, to_json({"status": "ok", "device": device}))

    # ---- the end ---------------------------------------------------------------------------------

    def drain(self) -> None:
        """No further job begins; those that wait are told."""
        self.draining = True
        self.turns.send_away(ending())

    async def close(self, seconds: float, hurry: asyncio.Event) -> None:
        """Waits for what runs, so long or until `hurry`, then ends the pool's processes."""
        self.drain()
        end = time.monotonic() + seconds
        while self.held and time.monotonic() < end and not hurry.is_set():
            await asyncio.sleep(0.02)
        await asyncio.to_thread(self.pool.close)
        for threads in (self.runners, self.reader, self.keeper):
            threads.shutdown(wait=False, cancel_futures=True)


async def _say_nothing(request: web.Request) -> None:
    pass


def ending() -> Refused:
    return Refused(503, "the service ends")


def _headers(refused: Refused, retry_after: int) -> dict[str, str]:
    if refused.status in (429, 503):
        return {"Retry-After": str(retry_after)}
    return {"WWW-Authenticate": "Bearer"} if refused.status == 401 else {}


def too_large(what: str, most: int, kind: str) -> Refused:
    flag = "--max-source-bytes" if kind in ("application/json", "job") else "--max-body-bytes"
    return Refused(413, f"{what} is too large; the limit is {most:,} bytes ({flag})", most)


async def _read(read: Callable[[], Awaitable[bytes]], most: int, what: str) -> bytearray:
    data = bytearray()
    while piece := await read():
        data += piece
        if len(data) > most:
            raise too_large("the body" if "/" in what else f"the part {what}", most, what)
    return data


# ---- running it ----------------------------------------------------------------------------------


def without_text(record: logging.LogRecord) -> bool:
    """aiohttp tells what was no HTTP in full: with a token, if there is one in it."""
    error = record.exc_info[1] if record.exc_info else None
    if error is not None and type(error).__module__.startswith("aiohttp."):
        record.msg, record.args = "no HTTP (%s)", (type(error).__name__,)
        record.exc_info = None
    return True


class Stderr(logging.Handler):
    """Standard error, without a buffer."""

    def emit(self, record: logging.LogRecord) -> None:
        line = f"{self.format(record)}\n".encode(errors="replace")
        try:
            while line:
                line = line[os.write(2, line) :]
        except OSError:
            pass  # the reader of stderr is gone


class Lines(logging.handlers.QueueHandler):
    """A log that may stand still: a thread hands records to `handler`, and those that do not fit
    are dropped."""

    def __init__(self, handler: logging.Handler) -> None:
        super().__init__(queue.Queue(LOG_LINES))
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        self.dropped = 0
        self.listener = logging.handlers.QueueListener(self.queue, handler)
        self.listener.start()

    def enqueue(self, record: logging.LogRecord) -> None:
        try:
            self.queue.put_nowait(record)
        except queue.Full:
            self.dropped += 1

    def flush_within(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while self.queue.unfinished_tasks and time.monotonic() < end:
            time.sleep(0.005)


@asynccontextmanager
async def listening(
    service: Service, sock: socket.socket, drain_seconds: float, hurry: asyncio.Event
) -> AsyncIterator[None]:
    """Requests are answered within. At the end what runs has `drain_seconds`, or until `hurry`."""
    http_log.addFilter(without_text)
    runner = service.web.AppRunner(
        service.app,
        logger=http_log,
        access_log=None,  # `handle` logs, without what stands behind a question mark
        keepalive_timeout=IDLE_SECONDS,
        lingering_time=LINGER_SECONDS,
        auto_decompress=False,
        shutdown_timeout=END_SECONDS,
    )
    await runner.setup()
    # `backlog` is also how many connections asyncio takes at a time: with one, each is heard before
    # many newer ones are there. The system may hold more.
    accepting = await asyncio.get_running_loop().create_server(
        functools.partial(service.connection, runner.server), sock=sock, backlog=1
    )
    sock.listen(BACKLOG)
    try:
        yield
    finally:
        accepting.close()
        await service.close(drain_seconds, hurry)
        await runner.cleanup()


async def serve(
    service: Service, sock: socket.socket, drain_seconds: float, ready: Callable[[], None]
) -> None:
    """Until SIGTERM or SIGINT. A second one ends what still runs."""
    stop, hurry = asyncio.Event(), asyncio.Event()

    def signalled() -> None:
        (hurry if stop.is_set() else stop).set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, signalled)
    async with listening(service, sock, drain_seconds, hurry):
        ready()
        await stop.wait()
