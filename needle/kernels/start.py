"""How a process of the pool begins, run by its path: `start.py ROLE FD` (needle.kernels.worker).

The driver takes a quarter of a second to find its GPUs, and Python as long to import needle: a
runner does both at once. The other roles open no GPU.
"""

import sys

if __name__ == "__main__":
    del sys.path[0]  # this folder, whose modules are none of Python's

import ctypes
import threading


def begin() -> None:
    try:
        ctypes.CDLL("libcuda.so.1").cuInit(0)
    except OSError:
        pass  # needle says what is wrong


if __name__ == "__main__":
    if sys.argv[1] == "runner":
        threading.Thread(target=begin, daemon=True).start()
    from needle.kernels.worker import main

    main(sys.argv[1:])
