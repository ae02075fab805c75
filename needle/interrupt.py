"""Ctrl-C while the command `needle` still imports: exit code 130 instead of a traceback."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

EXIT_INTERRUPTED = 130  # of a shell, for a program that SIGINT ends


def _leave(*_: Any) -> None:
    os._exit(EXIT_INTERRUPTED)


def leave_while_importing() -> None:
    """Exit at SIGINT, up to `raise_again`, in a process that runs the command `needle`."""
    words = sys.orig_argv[1:3]
    is_command = words == ["-m", "needle"] or os.path.basename("".join(words[:1])) == "needle"
    if is_command and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _leave)


def raise_again() -> None:
    """Raise KeyboardInterrupt at SIGINT, as Python does, where this process exited."""
    if signal.getsignal(signal.SIGINT) is _leave:
        signal.signal(signal.SIGINT, signal.default_int_handler)
