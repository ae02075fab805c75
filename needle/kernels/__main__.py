"""needle serve (a Pool behind HTTP, for programs that write kernels)."""

from __future__ import annotations

import argparse
import asyncio
import logging
import logging.handlers
import sys
from collections.abc import Sequence

from needle.arguments import Parser, number, path, whole
from needle.files import read_secret, settings_file
from needle.kernels import access, landlock
from needle.kernels.access import AccessError
from needle.kernels.pool import Pool
from needle.kernels.values import Out
from needle.processes import program

WARNING = (
    "Compiling and running CUDA is running arbitrary code: a client with the token can do here "
    "what this user can."
)
LOG_BYTES, LOGS_KEPT = 16 << 20, 4
FIRST_KERNEL = "__global__ void one(float *x) { *x = 1.0f; }"


def devices(text: str) -> list[int]:
    return [whole(0, 1023)(part) for part in text.split(",")]


# Flags with a value: name, type, default, metavar, help.
SIZE = whole(1, 1 << 40)
FLAGS = (
    ("host", str, "127.0.0.1", "NAME", "address, of loopback"),
    ("port", whole(0, 65535), 18188, "N", "0: any"),
    ("token-file", path, settings_file("token"), "FILE", "of mode 0600; made if it is not there"),
    (
        "log",
        path,
        None,
        "FILE",
        f"besides standard error; {LOG_BYTES >> 20} MiB, and {LOGS_KEPT} older files",
    ),
    ("devices", devices, None, "N,N", "GPUs; without it all"),
    ("timeout", number(0.01, 3600), 10.0, "SECONDS", "that a launch may take"),
    (
        "job-seconds",
        number(0.01, 86400),
        300.0,
        "SECONDS",
        "after which no further launch of a job starts",
    ),
    ("memory", SIZE, None, "BYTES", "of device memory that a job may take"),
    ("queue", whole(0, 10000), 16, "N", "jobs that may wait"),
    ("max-body-bytes", SIZE, 64 << 20, "N", "of a request, and of arrays that are sent back"),
    ("max-source-bytes", SIZE, 256 << 10, "N", "of a source"),
    ("max-array-bytes", SIZE, 256 << 20, "N", "of all arrays of a job"),
    ("drain-seconds", number(0, 3600), 15.0, "SECONDS", "that running jobs have after SIGTERM"),
)


def parser() -> argparse.ArgumentParser:
    top = Parser(prog="needle", description=__doc__)
    commands = top.add_subparsers(dest="command", required=True)
    own = commands.add_parser(
        "serve", help="evaluate kernels for HTTP clients", description=WARNING
    )
    for name, kind, default, metavar, text in FLAGS:
        text += "" if default is None else " (default: %(default)s)"
        own.add_argument(f"--{name}", type=kind, default=default, metavar=metavar, help=text)
    own.add_argument(
        "--allow-host",
        action="append",
        default=[],
        metavar="NAME",
        help="a further name by which clients call this service; may be repeated",
    )
    own.add_argument(
        "--fresh",
        choices=("fault", "job"),
        default="fault",
        help="a new process after each (default: %(default)s)",
    )
    return top


def check(pool: Pool) -> None:
    """Compile and run one kernel. RuntimeError."""
    result = pool.run(FIRST_KERNEL, "one", 1, 1, [Out((1,))])
    if result.status != "ok" or result.outputs[0][0] != 1:
        raise RuntimeError(f"a first kernel does not run: {result.status}: {result.message}")


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    try:
        return start(args)
    except (RuntimeError, ValueError) as error:  # AccessError and FileError too
        print(f"needle: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:  # before it is ready
        return 130


def start(args: argparse.Namespace) -> int:
    try:
        from needle.kernels.serve import Lines, RequestLimits, Service, log, serve
    except ImportError as error:
        raise RuntimeError(
            f"the service needs aiohttp and msgspec ({error}): pip install aiohttp msgspec"
        ) from None
    landlock.version()
    with access.listen(args.host, args.port) as sock:
        lines = [Lines(logging.StreamHandler())]
        if args.log is not None:
            try:
                file = logging.handlers.RotatingFileHandler(args.log, "a", LOG_BYTES, LOGS_KEPT)
            except OSError as error:
                raise AccessError(f"--log {args.log}: {error.strerror}") from None
            lines.append(Lines(file))
        token = read_secret(args.token_file, "token")
        log.setLevel(logging.INFO)
        for logger in (log, logging.getLogger("asyncio")):
            logger.handlers += lines
        access.raise_limit()
        print(WARNING)
        with Pool(args.devices, args.timeout, args.memory, fresh=args.fresh, confined=True) as pool:
            check(pool)
            count = len(pool.state())
            host, port = sock.getsockname()[:2]
            where = f"[{host}]" if ":" in host else host

            def ready() -> None:
                print(f"listening on http://{where}:{port}, token in {args.token_file}", flush=True)

            async def run() -> None:
                service = Service(
                    pool,
                    token,
                    access.names_of(args.host, args.allow_host),
                    RequestLimits(
                        args.max_body_bytes,
                        args.max_source_bytes,
                        args.max_array_bytes,
                        args.job_seconds,
                    ),
                    args.queue,
                    count,
                    access.room(count),
                )
                await serve(service, sock, args.drain_seconds, ready)

            asyncio.run(run())
        for one in lines:
            one.flush_within(1.0)
    return 0


if __name__ == "__main__":
    sys.exit(program(main))
