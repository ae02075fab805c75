"""Files of tokens and texts, written as their formats are described, not by needle's writers; and
two readers at once."""

import json
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np

RANDOM = np.random.RandomState(5)
IDS = RANDOM.randint(0, 60, 1500)
TEXTS = [f"document {i}: ünïcode\n" + "one two three four " * (i % 7 + 1) for i in range(90)]


def write_megatron(prefix, documents, dtype="<u2"):
    code = {"u1": 1, "i1": 2, "<i2": 3, "<i4": 4, "<i8": 5, "<f8": 6, "<f4": 7, "<u2": 8}[dtype]
    item = np.dtype(dtype).itemsize
    with open(f"{prefix}.bin", "wb") as file:
        for document in documents:
            file.write(np.array(document, dtype).tobytes())
    sizes = [len(document) for document in documents]
    starts = [item * sum(sizes[:i]) for i in range(len(sizes))]
    with open(f"{prefix}.idx", "wb") as file:
        file.write(b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, code, len(sizes), len(sizes) + 1))
        file.write(struct.pack(f"<{len(sizes)}i", *sizes))
        file.write(struct.pack(f"<{len(sizes)}q", *starts))
        file.write(struct.pack(f"<{len(sizes) + 1}q", *range(len(sizes) + 1)))


def write_shard(path, ids, magic=20240520, version=1, count=None):
    header = np.zeros(256, "<i4")
    header[:3] = magic, version, len(ids) if count is None else count
    path.write_bytes(header.tobytes() + np.array(ids, "<u2").tobytes())


def documents_of(sizes):
    ends = np.cumsum(sizes)
    return [RANDOM.randint(0, 60, size) for size in sizes], ends


def json_lines(texts):
    return "".join(json.dumps({"meta": 1, "text": text}) + "\n" for text in texts).encode()


def of_two(call, monkeypatch, module, name):
    """What two threads get of a call, the second of which begins while the first is within the
    function `name` of a module."""
    real, inside = getattr(module, name), threading.Event()

    def slow(*args):
        inside.set()
        time.sleep(0.3)
        return real(*args)

    monkeypatch.setattr(module, name, slow)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(call)
        assert inside.wait(10)
        second = pool.submit(call)
        return first.result(), second.result()
