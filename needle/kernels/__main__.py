"""needle serve (a Pool behind HTTP, for programs that write kernels)."""

from __future__ import annotations

import argparse
import ipaddress
import logging
import socket
import sys
from collections.abc import Sequence

from needle.command import Parser, number, path, reporting, whole
from needle.files import read_secret, settings_file
from needle.kernels.pool import Pool
from needle.processes import program

WARNING = (
    "Compiling and running CUDA is running arbitrary code: a client with the token can do here "
    "what this user can."
)


def devices(text: str) -> list[int]:
    return [] if text == "cpu" else [whole(0, 1023)(part) for part in text.split(",")]


# Flags: name, type, default, metavar, help.
SIZE = whole(1, 1 << 40)
FLAGS = (
    ("host", str, "127.0.0.1", "NAME", "address, of loopback"),
    ("port", whole(0, 65535), 18188, "N", "0: any"),
    ("token-file", path, None, "FILE", "of mode 0600; made once (default: ~/.config/needle/token)"),
    ("devices", devices, None, "N,N", "GPUs, by default all; or cpu: none, for KernelBench's form"),
    ("timeout", number(0.01, 3600), 10.0, "SECONDS", "that a launch may take"),
    ("spares", whole(0, 64), 1, "N", "processes that wait on each GPU, beyond the one that works"),
    ("memory", SIZE, None, "BYTES", "of device memory that a job's arrays may take"),
    ("queue", whole(0, 10000), 16, "N", "jobs that may wait"),
    ("max-body-bytes", SIZE, 64 << 20, "N", "of a request"),
)


def parser() -> argparse.ArgumentParser:
    top = Parser(prog="needle serve", description=WARNING)
    for name, kind, default, metavar, text in FLAGS:
        text += "" if default is None else " (default: %(default)s)"
        top.add_argument(f"--{name}", type=kind, default=default, metavar=metavar, help=text)
    return top


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket. ValueError if other machines could connect."""
    address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    if not ipaddress.ip_address(str(address[4][0]).partition("%")[0]).is_loopback:
        raise ValueError(
            f"--host {host} ({address[4][0]}) lets in other machines, and each client with the "
            f"token runs code here: leave the service on loopback, and reach it by ssh -L {port}:"
            f"127.0.0.1:{port} THIS-MACHINE, or through a proxy that has TLS"
        )
    return socket.create_server(address[4], family=address[0])


@reporting("needle: error")
def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    try:
        from aiohttp import web

        from needle.kernels.serve import Service
    except ImportError as error:
        raise RuntimeError(
            f"the service needs aiohttp and msgspec ({error}): pip install aiohttp msgspec"
        ) from None
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    token_file = args.token_file or settings_file("token")
    token = read_secret(token_file, "token")
    print(WARNING)
    with (
        listen(args.host, args.port) as sock,
        Pool(args.devices, args.timeout, args.memory, args.spares) as pool,
    ):
        for device in pool.devices:
            pool.reset(device)  # RuntimeError if no process gets ready
        host, port = sock.getsockname()[:2]
        where = f"[{host}]" if ":" in host else host
        print(f"listening on http://{where}:{port}, token in {token_file}", flush=True)
        service = Service(pool, token, args.max_body_bytes, args.queue)
        web.run_app(service.app, sock=sock, print=None, access_log=None)
    return 0


if __name__ == "__main__":
    sys.exit(program(main))
