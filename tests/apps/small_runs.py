"""Small runs of apps/needle train: begun, ended without warning, and read back.

The preset `tiny` is made smaller still, at 2 x 16 tokens a micro-batch.
"""

import hashlib
import json

import numpy as np
import pytest
import train_pythia

from needle.checkpoint import checkpoint_path
from needle.training import log as logs

SMALL = (2, 32, 2, 64)  # layers, hidden size, heads, vocabulary
# 25 windows of 16: an epoch is 12 micro-batches of 2.
TOKENS = np.random.RandomState(3).randint(0, 60, 430).astype(np.uint16)


def arguments(*parts) -> list[str]:
    """Cut text into words, as a shell does; paths stay whole."""
    return [word for part in parts for word in (part.split() if type(part) is str else [str(part)])]


CPU = ["--device", "cpu"]
EVERY = "--keep 0,2,4,... --keep-optimizer --prove 1"


def flags(tmp_path, data, name, *more, device="cpu", dtype="float32", steps=6):
    return arguments(
        f"--device {device} --dtype {dtype} --model tiny --batch-size 2 --seq-len 16",
        f"--steps {steps} --save-every 2 --eval-every 3 --name {name}",
        *("--data", data, "--out", tmp_path / "runs"),
        *more,
    )


def without(argv, flag):
    """The words but for a flag and its value."""
    at = argv.index(flag)
    return argv[:at] + argv[at + 2 :]


def micro_batches(seed, count):
    """The first `count` of all epochs: windows of 17 that share one token, shuffled. The last
    twentieth of the tokens is held out."""
    tokens = TOKENS[: len(TOKENS) * 95 // 100]
    windows = (len(tokens) - 1) // 16
    for number in range(count):
        epoch, batch = divmod(number, windows // 2)
        order = np.random.Generator(np.random.PCG64([seed, epoch])).permutation(windows)
        starts = 16 * order[2 * batch : 2 * (batch + 1)]
        rows = np.array([tokens[i : i + 17] for i in starts], np.int64)
        yield rows[:, :-1], rows[:, 1:]


def all_lines_of(tmp_path, name):
    path = tmp_path / "runs" / name / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


def lines_of(tmp_path, name):
    """Return the lines of steps."""
    return [line for line in all_lines_of(tmp_path, name) if "loss" in line]


def proofs_of(tmp_path, name):
    """Return what the lines of proof say, by their steps, but for what depends on times."""
    proofs = [line for line in all_lines_of(tmp_path, name) if "digest" in line]
    return {proof["step"]: {**proof, "previous": None} for proof in proofs}


def numbers_of(tmp_path, name):
    """Return the numbers of the log that are equal however often a run was interrupted."""
    timing = ("tokens_per_second", "data_wait_ms", "seconds")
    return [{k: v for k, v in line.items() if k not in timing} for line in lines_of(tmp_path, name)]


def checkpoint_of(tmp_path, name, step):
    return checkpoint_path(tmp_path / "runs" / name / "checkpoints", step)


def contents(folder):
    """path -> bytes of the files in a folder."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def tensors_of(path):
    """The bytes of all tensors of a checkpoint."""
    content = path.read_bytes()
    return content[8 + int.from_bytes(content[:8], "little") :]


def read_tensors(path):
    """(state, name -> words as they lie in the file) of a checkpoint."""
    content = path.read_bytes()
    base = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:base])
    state = json.loads(header.pop("__metadata__")["state"])
    words = {}
    for name, entry in header.items():
        start, stop = (base + at for at in entry["data_offsets"])
        kind = {"F32": "<u4", "BF16": "<u2"}[entry["dtype"]]
        words[name] = np.frombuffer(content[start:stop], kind).reshape(entry["shape"])
    return state, words


def rewrite(path, state=(), words=()):
    """Change the state and tensors (name -> index, words) of a checkpoint, and stamp it anew, as
    somebody does who wants it to be believed."""
    content = path.read_bytes()
    base = 8 + int.from_bytes(content[:8], "little")
    header, data = json.loads(content[8:base]), bytearray(content[base:])
    metadata = header["__metadata__"]
    metadata["state"] = json.dumps(json.loads(metadata["state"]) | dict(state))
    metadata["checksum"] = "0" * 32
    for name, (index, value) in dict(words).items():
        start, stop = header[name]["data_offsets"]
        array = np.array(read_tensors(path)[1][name])
        array[tuple(index)] = value
        data[start:stop] = array.tobytes()
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    content = len(text).to_bytes(8, "little") + text + bytes(data)
    digest = hashlib.blake2b(content, digest_size=16).hexdigest()
    at = content.index(b'"checksum": "') + len('"checksum": "')
    path.unlink()  # another file may be linked to it
    path.write_bytes(content[:at] + digest.encode() + content[at + 32 :])


def chain(folder, change=lambda lines: lines):
    """Change the lines of metrics.jsonl, parsed, and chain the proofs anew."""
    path, text, since = folder / "metrics.jsonl", "", hashlib.sha256()
    for line in change([json.loads(line) for line in path.read_text().splitlines()]):
        if "digest" in line:
            line["previous"] = since.hexdigest()
            since = hashlib.sha256()
        since.update(f"{json.dumps(line)}\n".encode())
        text += f"{json.dumps(line)}\n"
    path.write_text(text)


def retell(folder, step, is_proof=False, **values):
    """Change a line of metrics.jsonl, in a new chain."""
    is_it = lambda line: line["step"] == step and ("digest" in line) == is_proof
    chain(folder, lambda lines: [{**x, **values} if is_it(x) else x for x in lines])


def assert_same_run(tmp_path, name, other, step=6):
    """Two runs have the same numbers, and the same tensors in the checkpoint of a step."""
    assert numbers_of(tmp_path, name) == numbers_of(tmp_path, other)
    ends = {tensors_of(checkpoint_of(tmp_path, one, step)) for one in (name, other)}
    assert len(ends) == 1


class Killed(BaseException):
    """Raised in place of SIGKILL: nothing catches it."""


def run_until(monkeypatch, step, argv):
    """The run, ended without warning while `step` is being logged."""
    queue = logs.RunLog.queue

    def dying(self, number, *rest):
        queue(self, number, *rest)
        if number == step:
            raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(logs.RunLog, "queue", dying)
        with pytest.raises(Killed):
            train_pythia.main(argv)
