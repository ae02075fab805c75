"""A kernel service (`python -m needle.kernels serve`) as it tells of itself: GET /health and
/statistics. The token comes from NEEDLE_KERNELS_TOKEN, or from the file that
NEEDLE_KERNELS_TOKEN_FILE names. No proxy is asked and no redirection followed: the token goes to
the address that was given alone."""

from __future__ import annotations

import json
import os
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from needle.diagnose.children import Teller

PATHS = ("health", "statistics")
LIMIT = 1 << 20  # bytes of an answer
SECONDS = 2.0
SLOW = 0.1  # seconds; a service that a kernel holds up answers later
START = "start it: python -m needle.kernels serve; or see to the address"
TOKEN = "set NEEDLE_KERNELS_TOKEN, or NEEDLE_KERNELS_TOKEN_FILE, to the service's own token"


class Stay(urllib.request.HTTPRedirectHandler):
    """Follows no redirection."""

    def redirect_request(self, *request: Any) -> None:
        return None


def token() -> str | None:
    """OSError where its file cannot be read."""
    given = os.environ.get("NEEDLE_KERNELS_TOKEN")
    path = os.environ.get("NEEDLE_KERNELS_TOKEN_FILE")
    return given or (Path(path).read_text().strip() if path else None)


def get(url: str, secret: str | None) -> tuple[int, bytes]:
    """(HTTP status, body). OSError or ValueError where there is no answer."""
    request = urllib.request.Request(url)
    if secret:
        request.add_unredirected_header("Authorization", f"Bearer {secret}")
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), Stay)
    try:
        with opener.open(request, timeout=SECONDS) as answer:
            return answer.status, answer.read(LIMIT)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read(LIMIT)


def examine(teller: Teller, url: str) -> None:
    """Findings about both answers, which are told as the facts `health` and `statistics`."""
    try:
        secret = token()
    except OSError as error:
        teller.failed("server", f"the token's file: {error}", TOKEN)
        return
    for name in PATHS:
        address = f"{url.rstrip('/')}/{name}"
        teller.at(f"GET {address}")
        start = time.monotonic()
        try:
            status, body = get(address, secret)
        except (OSError, ValueError) as error:
            reason = getattr(error, "reason", error)
            teller.failed("server", f"{address} does not answer: {reason}", START)
            return
        took = time.monotonic() - start
        if status in (401, 403):
            teller.failed("server", f"{address} refuses the token (HTTP {status})", TOKEN)
            return
        try:
            answer = json.loads(body)
        except (ValueError, RecursionError):
            answer = None
        if status != 200 or not isinstance(answer, dict):
            said = body[:200].decode(errors="replace").strip()
            teller.failed("server", f"{address} answers HTTP {status}: {said}", START)
            return
        teller.fact(name, answer)
        words = ", ".join(f"{key} {json.dumps(value)}" for key, value in answer.items())
        teller.ok(name, f"/{name}: {words[:2000]}")
        if name == "health" and took > SLOW:
            text = f"/health took {took * 1e3:.0f} ms: its machine is busy, or its loop is held up"
            teller.note("server", text)
