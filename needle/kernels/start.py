"""Start a process of the pool, by path: `start.py ROLE FD` (needle.kernels.worker).

The driver takes a quarter of a second to find its GPU and half as long to make a context there, and
Python as long to import needle: a runner, which sees one GPU, does both at once. The other roles
open none.
"""

import sys

if __name__ == "__main__" and sys.path[0] == __file__.rpartition("/")[0]:
    del sys.path[0]  # this folder, whose modules are none of Python's

import ctypes
import threading


def begin() -> None:
    """Make the device's primary context, which needle uses later."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        if driver.cuInit(0) == 0:
            driver.cuDevicePrimaryCtxRetain(ctypes.byref(ctypes.c_void_p()), 0)
    except OSError:
        pass  # needle reports the error, also of calls that failed


if __name__ == "__main__":
    if sys.argv[1] == "runner":
        threading.Thread(target=begin, daemon=True).start()
    from needle.kernels.worker import main

    main(sys.argv[1:])
