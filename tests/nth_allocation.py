"""Injects failures into the allocations of needle's C code (csrc/nth_allocation.c)."""

import ctypes
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness import ROOT, shared_library

from needle import _C

FOREVER = 1 << 40


class Injector:
    """Makes allocations of needle's core fail in one call of this process."""

    def __init__(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            made = Path(folder) / "nth_allocation.so"
            source = ROOT / "tests" / "csrc" / "nth_allocation.c"
            shared_library(source.read_text(), made, "-ldl")
            self.functions = ctypes.PyDLL(str(made))
        self.functions.run.restype = ctypes.py_object
        self.functions.run.argtypes = [ctypes.py_object, ctypes.c_long, ctypes.c_long]
        for name in ("calls_seen", "calls_failed", "blocks_held"):
            getattr(self.functions, name).restype = ctypes.c_long
        handle = ctypes.c_void_p(ctypes.CDLL(_C.__file__)._handle)
        assert self.functions.replace_imports(handle) > 0, "no imported function was replaced"

    def attempt(
        self, call: Callable[[], Any], number: int, count: int
    ) -> tuple[int, tuple[type, str] | None]:
        """(how many allocations failed, the error that was raised), of call() with its allocations
        `number` to `number + count - 1` failing. In a thread of its own, which has no scratch
        memory yet."""
        outcome: list[tuple[type, str] | None] = []

        def body() -> None:
            try:
                self.functions.run(call, number, count)
                outcome.append(None)
            except BaseException as error:  # whatever it is, the caller judges
                outcome.append((type(error), str(error)))

        thread = threading.Thread(target=body)
        thread.start()
        thread.join()
        return self.functions.calls_failed(), outcome[0]
