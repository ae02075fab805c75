"""A kernel service (`needle serve`) by its own report: GET /health and
/statistics, with the token of NEEDLE_KERNELS_TOKEN or of the file NEEDLE_KERNELS_TOKEN_FILE. No
proxy is asked and no redirection followed: the token goes to the given address alone."""

from __future__ import annotations

import http.client
import json
import os
import time
from pathlib import Path
from urllib.parse import urlsplit

from needle.diagnose.examination import Reporter

PATHS = ("health", "statistics")
LIMIT = 1 << 20  # bytes of an answer
SECONDS = 2.0
SLOW = 0.1  # seconds
START = "start it: needle serve; or see to the address"
TOKEN = "set NEEDLE_KERNELS_TOKEN, or NEEDLE_KERNELS_TOKEN_FILE, to the service's own token"


def token() -> str | None:
    """OSError where its file cannot be read."""
    given = os.environ.get("NEEDLE_KERNELS_TOKEN")
    path = os.environ.get("NEEDLE_KERNELS_TOKEN_FILE")
    return given or (Path(path).read_text().strip() if path else None)


def get(url: str, secret: str | None) -> tuple[int, bytes]:
    """(status, body). OSError, ValueError or HTTPException without an answer."""
    parts = urlsplit(url)
    kinds = {"http": http.client.HTTPConnection, "https": http.client.HTTPSConnection}
    if parts.scheme not in kinds or not parts.hostname:
        raise ValueError("it must begin with http:// or https:// and a host")
    connection = kinds[parts.scheme](parts.hostname, parts.port, timeout=SECONDS)
    try:
        headers = {"Authorization": f"Bearer {secret}"} if secret else {}
        connection.request("GET", parts.path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read(LIMIT)
    finally:
        connection.close()


def examine(reporter: Reporter, url: str) -> None:
    """Findings about both answers, reported as the facts `health` and `statistics`."""
    try:
        secret = token()
    except OSError as error:
        reporter.failed("server", f"the token's file: {error}", TOKEN)
        return
    for name in PATHS:
        address = f"{url.rstrip('/')}/{name}"
        reporter.at(f"GET {address}")
        start = time.monotonic()
        try:
            status, body = get(address, secret)
        except (OSError, ValueError, http.client.HTTPException) as error:
            reporter.failed("server", f"{address} does not answer: {error}", START)
            return
        took = time.monotonic() - start
        if status in (401, 403):
            reporter.failed("server", f"{address} refuses the token (HTTP {status})", TOKEN)
            return
        try:
            answer = json.loads(body)
        except (ValueError, RecursionError):
            answer = None
        if status != 200 or not isinstance(answer, dict):
            said = body[:200].decode(errors="replace").strip()
            reporter.failed("server", f"{address} answers HTTP {status}: {said}", START)
            return
        reporter.fact(name, answer)
        words = ", ".join(f"{key} {json.dumps(value)}" for key, value in answer.items())
        reporter.ok(name, f"/{name}: {words[:2000]}")
        if name == "health" and took > SLOW:
            text = f"/health took {took * 1e3:.0f} ms: its machine is busy, or its loop is blocked"
            reporter.note("server", text)
