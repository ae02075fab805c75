"""A kernel service (`needle serve`) by its own report: GET /health, with the token of
NEEDLE_KERNELS_TOKEN or of the file NEEDLE_KERNELS_TOKEN_FILE. No proxy is asked and no redirection
followed: the token goes to the given address alone."""

from __future__ import annotations

import http.client
import json
import os
from pathlib import Path
from urllib.parse import urlsplit

from needle.diagnose.report import failed, show, trying

SECONDS = 5.0
KINDS = {"http": http.client.HTTPConnection, "https": http.client.HTTPSConnection}
START = "start it: needle serve; or give its address, http://127.0.0.1:18188"
TOKEN = "set NEEDLE_KERNELS_TOKEN, or NEEDLE_KERNELS_TOKEN_FILE, to the service's own token"


def examine(url: str) -> None:
    address = f"{url.rstrip('/')}/health"
    trying(f"GET {address}")
    try:
        token = os.environ.get("NEEDLE_KERNELS_TOKEN", "")
        if not token and (path := os.environ.get("NEEDLE_KERNELS_TOKEN_FILE")):
            token = Path(path).read_text().strip()
    except OSError as error:
        failed("server", f"the token's file: {error}", TOKEN)
        return
    try:
        status, body = get(address, token)
    except (OSError, ValueError, http.client.HTTPException) as error:
        failed("server", f"{address} does not answer: {error}", START)
        return
    text = f"{address} answers HTTP {status}: {body[:2000].decode(errors='replace').strip()}"
    try:
        is_healthy = status == 200 and json.loads(body)["status"] == "ok"
    except (ValueError, LookupError, TypeError, RecursionError):
        is_healthy = False
    if is_healthy:
        show("server", f"ok: {text}")
    else:
        failed("server", text, TOKEN if status in (401, 403) else START)


def get(address: str, token: str) -> tuple[int, bytes]:
    """Return (status, body). OSError, ValueError or HTTPException without an answer."""
    parts = urlsplit(address)
    if parts.scheme not in KINDS or not parts.hostname:
        raise ValueError("it must begin with http:// or https:// and a host")
    connection = KINDS[parts.scheme](parts.hostname, parts.port, timeout=SECONDS)
    try:
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        connection.request("GET", parts.path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()
