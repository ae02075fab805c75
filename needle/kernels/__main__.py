"""python -m needle.kernels: serve (a Pool behind HTTP, for programs that write kernels)."""

from __future__ import annotations

import argparse
import asyncio
import logging
import logging.handlers
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from needle.data.text import DataError, named
from needle.kernels import access, landlock
from needle.kernels.access import AccessError, listen, names_of, read_token, token_path
from needle.kernels.isolate import Pool
from needle.kernels.serve import Lines, Service, Stderr, load_aiohttp, log, serve
from needle.kernels.values import Out
from needle.kernels.wire import Limits
from needle.processes import program

WARNING = (
    "Compiling and running CUDA is running arbitrary code: whoever has the token can do here what "
    "this user can."
)
LOG_BYTES, LOGS_KEPT = 16 << 20, 4
# What the service runs before it says that it is ready.
PROOF = "__global__ void one(float *x) { *x = 1.0f; }"


def number(kind: type, low: float, high: float) -> Any:
    def parse(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = None
        if value is None or not low <= value <= high:
            raise argparse.ArgumentTypeError(
                f"must be {'a whole number' if kind is int else 'a number'} from {low} to {high}, "
                f"not {text!r}"
            )
        return value

    return parse


def path(text: str) -> Path:
    try:
        return named(text)
    except DataError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def devices(text: str) -> list[int]:
    return [number(int, 0, 1023)(part) for part in text.split(",")]


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="python -m needle.kernels", description=__doc__)
    commands = top.add_subparsers(dest="command", required=True)
    own = commands.add_parser(
        "serve", help="evaluate kernels for HTTP clients", description=WARNING
    )
    limits = Limits()
    size = number(int, 1, 1 << 40)

    own.add_argument("--host", default="127.0.0.1", help="of loopback (default: 127.0.0.1)")
    own.add_argument(
        "--port", type=number(int, 0, 65535), default=18188, help="0: any (default: 18188)"
    )
    own.add_argument(
        "--allow-host",
        action="append",
        default=[],
        metavar="NAME",
        help="a further name that clients call this service by; may be repeated",
    )
    own.add_argument(
        "--token-file",
        type=path,
        default=token_path(),
        metavar="FILE",
        help="of mode 0600; made when it is not there (default: %(default)s)",
    )
    own.add_argument(
        "--log",
        type=path,
        metavar="FILE",
        help=f"too, beside standard error; of {LOG_BYTES >> 20} MiB, and {LOGS_KEPT} older ones",
    )
    own.add_argument("--devices", type=devices, metavar="N,N", help="(default: all)")
    own.add_argument(
        "--timeout",
        type=number(float, 0.01, 3600),
        default=10.0,
        metavar="SECONDS",
        help="that a launch may take (default: %(default)s)",
    )
    own.add_argument(
        "--job-seconds",
        type=number(float, 0.01, 86400),
        default=limits.job_seconds,
        metavar="SECONDS",
        help="after which no further launch of a job begins (default: %(default)s)",
    )
    own.add_argument(
        "--memory", type=size, metavar="BYTES", help="of device memory that a job may take"
    )
    own.add_argument(
        "--fresh",
        choices=("fault", "job"),
        default="fault",
        help="a new process after each (default: %(default)s)",
    )
    own.add_argument(
        "--queue",
        type=number(int, 0, 10000),
        default=16,
        metavar="N",
        help="jobs that may wait (default: %(default)s)",
    )
    own.add_argument(
        "--max-body-bytes",
        type=size,
        default=limits.body_bytes,
        metavar="N",
        help="of a request, and of arrays that are sent back (default: %(default)s)",
    )
    own.add_argument(
        "--max-source-bytes",
        type=size,
        default=limits.source_bytes,
        metavar="N",
        help="(default: %(default)s)",
    )
    own.add_argument(
        "--max-array-bytes",
        type=size,
        default=limits.array_bytes,
        metavar="N",
        help="of all arrays of a job (default: %(default)s)",
    )
    own.add_argument(
        "--drain-seconds",
        type=number(float, 0, 3600),
        default=15.0,
        metavar="SECONDS",
        help="that running jobs have after SIGTERM (default: %(default)s)",
    )
    return top


def prove(pool: Pool) -> None:
    """One kernel, compiled where sources will be and run. RuntimeError."""
    result = pool.run(PROOF, "one", 1, 1, [Out((1,))])
    if result.status != "ok" or result.outputs[0][0] != 1:
        raise RuntimeError(f"a first kernel does not run: {result.status}: {result.message}")


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    try:
        load_aiohttp()
        landlock.version()
        sock = listen(args.host, args.port)
    except (RuntimeError, AccessError) as error:
        print(f"needle: error: {error}", file=sys.stderr)
        return 1
    with sock:
        try:
            return start(args, sock)
        except (RuntimeError, ValueError) as error:
            print(f"needle: error: {error}", file=sys.stderr)
            return 1
        except KeyboardInterrupt:  # before it is ready
            return 130


def start(args: argparse.Namespace, sock: Any) -> int:
    limits = Limits(
        args.max_body_bytes, args.max_source_bytes, args.max_array_bytes, args.job_seconds
    )
    lines = [Lines(Stderr())]
    if args.log is not None:
        try:
            file = logging.handlers.RotatingFileHandler(args.log, "a", LOG_BYTES, LOGS_KEPT)
        except OSError as error:
            raise RuntimeError(f"--log {args.log}: {error.strerror}") from None
        lines.append(Lines(file))
    token = read_token(args.token_file)
    log.setLevel(logging.INFO)
    for logger in (log, logging.getLogger("asyncio")):
        logger.handlers += lines
    access.raise_limit()
    print(WARNING)
    with Pool(args.devices, args.timeout, args.memory, fresh=args.fresh, confined=True) as pool:
        prove(pool)
        connections = access.room(len(pool.state()))
        host, port = sock.getsockname()[:2]
        where = f"[{host}]" if ":" in host else host

        def ready() -> None:
            print(f"listening on http://{where}:{port}, token in {args.token_file}", flush=True)

        async def run() -> None:
            service = Service(
                pool,
                token,
                names_of(args.host, args.allow_host),
                limits,
                args.queue,
                len(pool.state()),
                connections,
            )
            await serve(service, sock, args.drain_seconds, ready)

        asyncio.run(run())
    for one in lines:
        one.flush_within(1.0)
    return 0


if __name__ == "__main__":
    sys.exit(program(main))
