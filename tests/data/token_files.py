"""Files of tokens and texts, written as their formats are described, not by needle's writers."""

import json
import struct

import numpy as np

RANDOM = np.random.RandomState(5)
IDS = RANDOM.randint(0, 60, 1500)
TEXTS = [f"document {i}: ünïcode\n" + "one two three four " * (i % 7 + 1) for i in range(90)]


def write_megatron(prefix, documents, dtype="<u2"):
    code = {"u1": 1, "i1": 2, "<i2": 3, "<i4": 4, "<i8": 5, "<u2": 8}[dtype]
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


def documents_of(sizes):
    return [RANDOM.randint(0, 60, size) for size in sizes]


def json_lines(texts):
    return "".join(json.dumps({"meta": 1, "text": text}) + "\n" for text in texts).encode()
