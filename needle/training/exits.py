"""The end of a training program: errors become messages and exit codes, on all ranks."""

from __future__ import annotations

import os
import sys
from typing import Any

from needle._C import CudaError, CudaFatalError
from needle.distributed.control import RankError, RankFailed
from needle.distributed.group import Group
from needle.files import described, printable
from needle.training.run import Run


def outcome(error: BaseException | None) -> tuple[str, int] | None:
    """Return (message, exit code) of an error that users meet, None of any other."""
    if isinstance(error, CudaFatalError):
        return f"the GPU is lost: {error}\nstart again with --resume auto", os.EX_TEMPFAIL
    if isinstance(error, (CudaError, MemoryError)):
        remedy = "--recompute, or a smaller --batch-size, with --grad-accum to keep the step's size"
        return f"{str(error) or 'out of memory'}\n(where memory ran out: {remedy})", 1
    if isinstance(error, (RankError, RankFailed)):
        return str(error), error.code
    if isinstance(error, BrokenPipeError):
        return None
    if isinstance(error, (ValueError, OSError)):
        return described(error), 1
    if isinstance(error, KeyboardInterrupt):  # before the first step, or for the second time
        return "interrupted", 130
    return None


class Ending:
    """End a program: report its error, release the run's folder, and leave the other ranks.

    with Ending() as ending:
        ...
        ending.code = 0
    return ending.code
    """

    def __init__(self) -> None:
        self.ranks, self.run, self.code = Group(), None, 1
        self.run: Run | None

    def __enter__(self) -> Ending:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool:
        ranks, known, reason = self.ranks, outcome(error), None
        if known is not None:
            reason, self.code = known
        elif error is not None:
            reason, self.code = f"{type(error).__name__}: {error}", 1
        reports = known is not None and not isinstance(error, RankFailed)  # which another reports
        if reports and ranks.rank == 0:
            print(printable(f"needle train: {reason}"), file=sys.stderr)
        if self.run is not None and self.run.lock is not None:
            self.run.lock.release()
        ranks.close(reason, self.code)
        if reports and ranks.rank > 0:
            who = "" if reason.startswith(f"rank {ranks.rank}, ") else f"rank {ranks.rank}: "
            print(printable(f"needle train: {who}{reason}"), file=sys.stderr)
        return known is not None
