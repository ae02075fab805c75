"""A kernel service (`needle serve`) by its own report: GET /health, with the token of
NEEDLE_KERNELS_TOKEN or of the file NEEDLE_KERNELS_TOKEN_FILE. No proxy is asked and no redirection
followed: the token goes to the given address alone."""

from __future__ import annotations

import http.client
import json
import os
from contextlib import closing
from pathlib import Path
from urllib.parse import urlsplit

from needle.diagnose.parts import failed, show, trying

SECONDS = 5.0
KINDS = {"http": http.client.HTTPConnection, "https": http.client.HTTPSConnection}
MEND = (
    "start `needle serve` there, and set NEEDLE_KERNELS_TOKEN_FILE here to its --token-file, by "
    "default ~/.config/needle/token; its log says why it refuses or is not well"
)


def examine(url: str) -> None:
    """OSError, ValueError or HTTPException without an answer."""
    parts = urlsplit(f"{url.rstrip('/')}/health")
    trying(f"GET {parts.geturl()}")
    if parts.scheme not in KINDS or not parts.hostname:
        raise ValueError("it must begin with http:// or https:// and a host")
    token = os.environ.get("NEEDLE_KERNELS_TOKEN", "")
    if not token and (path := os.environ.get("NEEDLE_KERNELS_TOKEN_FILE")):
        token = Path(path).read_text().strip()
    connection = KINDS[parts.scheme](parts.hostname, parts.port, timeout=SECONDS)
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    with closing(connection):
        connection.request("GET", parts.path, headers=headers)
        answer = connection.getresponse()
        body = answer.read(1 << 20)
    text = f"{parts.geturl()} answers HTTP {answer.status}: {body.decode(errors='replace').strip()}"
    if answer.status == 200 and json.loads(body)["status"] == "ok":
        show("server", f"ok: {text}")
    else:
        failed("server", text, MEND)
