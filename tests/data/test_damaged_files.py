"""Files that are not whole or not of their kind: an error that names file and offset."""

import contextlib
import io
import json
import os
import re
import shutil
import struct
import tempfile
from pathlib import Path

import numpy as np
import pytest
from harness import naming
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from token_files import IDS, TEXTS, json_lines, write_megatron

from needle.checkpoint import Checkpoint, CheckpointError, save_checkpoint
from needle.data import Batches, DataError, __main__, open_data, text
from needle.data.kinds import text_files
from needle.models import Pythia, PythiaConfig

pytestmark = pytest.mark.slow


def test_ids_outside_the_vocabulary_are_named_with_file_and_offset(tmp_path):
    wrong = np.tile(IDS, 3)[:4098]
    wrong[777], wrong[3000] = 60, 5
    np.save(tmp_path / "npy.npy", wrong[:1500].astype(np.int32))
    write_megatron(tmp_path / "rows", np.split(wrong, [2049]))
    write_megatron(tmp_path / "documents", np.split(wrong[:1500], range(25, 1500, 25)))
    for name, start, item, length in (
        *(("npy.npy", 128, 4, 16), ("documents", 0, 2, 16)),
        ("rows", 0, 2, 2048),
    ):
        batches = Batches(open_data(tmp_path / name).train, 1, length, vocab_size=60)
        with naming(name), pytest.raises(DataError, match="the vocabulary of 60") as caught:
            for _ in range(len(batches)):
                batches.next()
        assert f"offset {start + 777 * item:,}: id 60" in str(caught.value)
    negative = Batches(np.array([1, 2, 3, -1, 5], np.int32), 1, 2, vocab_size=60)
    with pytest.raises(DataError, match="token [23]: id -1"):
        for _ in range(2):
            negative.next()


# ---- random damage -------------------------------------------------------------------------------


def good_files():
    """name: content of a folder, of every kind of file."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_megatron(folder / "m", [IDS[:200], IDS[200:300], IDS[300:777]])
        (folder / "j.jsonl").write_bytes(json_lines(TEXTS[:3]))
        config = PythiaConfig(vocab_size=8, hidden_size=8, num_layers=1, num_heads=1, max_seq_len=4)
        save_checkpoint(Pythia(config), None, 0, 1.0, folder / "c.safetensors", step=3)
        return {path.name: path.read_bytes() for path in folder.iterdir()}


GOOD = good_files()
# Where numbers stand: (offset, bytes)
FIELDS = {
    "m.idx": [(0, 8), (8, 1), (9, 8), (17, 1), (18, 8), (26, 8)]
    + [(34 + 4 * i, 4) for i in range(3)]
    + [(46 + 8 * i, 8) for i in range(7)],
    "c.safetensors": [(0, 8)],
}
WORDS = [b"\n", b'""', b"{", b"\xff", b"60", b"-1", b"1e99", b"null", b'{"text": ""}\n']


def damage(draw, name, content):
    content = bytearray(content)
    for _ in range(draw(st.integers(1, 3))):
        kind = draw(st.sampled_from(["field", "field", "flip", "cut", "word", "end"]))
        # Mostly where the numbers of a format are.
        place = draw(st.integers(0, min(len(content), 80)) | st.integers(0, len(content)))
        if kind == "field":
            at, width = draw(st.sampled_from(FIELDS.get(name, [(0, 4), (4, 4)])))
            old = int.from_bytes(content[at : at + width], "little")
            steps = [old + step for step in (-3, -2, -1, 1, 2, 3, 4)]
            value = draw(st.sampled_from([*steps, 0, 1, 60, 2**31 - 1, 2**31, 2**63, 2**64 - 1]))
            content[at : at + width] = (value % 2 ** (8 * width)).to_bytes(width, "little")
        elif kind == "flip" and place < len(content):
            content[place] ^= 1 << draw(st.integers(0, 7))
        elif kind == "cut":
            del content[place:]
        elif kind == "word":
            word = draw(st.sampled_from(WORDS))
            content[place : place + len(word)] = word
        elif kind == "end":
            content += draw(st.binary(min_size=1, max_size=5))
    return bytes(content)


def megatron_says(idx, data):
    """The ids that an index and its .bin hold by the format's description, or None: refused."""
    if len(idx) < 34 or idx[:9] != b"MMIDIDX\0\0":
        return None
    version, code, count, entries = struct.unpack("<QBQQ", idx[9:34])
    dtype = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}.get(code)
    if version != 1 or dtype is None or count < 1 or len(idx) != 34 + 12 * count + 8 * entries:
        return None
    sizes = struct.unpack(f"<{count}i", idx[34 : 34 + 4 * count])
    starts = struct.unpack(f"<{count}q", idx[34 + 4 * count : 34 + 12 * count])
    item = np.dtype(dtype).itemsize
    if min(sizes) < 1 or [item * sum(sizes[:i]) for i in range(count)] != list(starts):
        return None
    return np.frombuffer(data, dtype) if len(data) == item * sum(sizes) else None


def lines_say(content):
    """The documents that are not empty, or None."""
    try:
        values = [json.loads(line) for line in content.split(b"\n") if line.strip()]
        texts = [None if value is None else value["text"] for value in values]
        return [text for text in texts if text is not None and text.encode()]
    except Exception:
        return None


@pytest.mark.parametrize("name", ["m.bin", "m.idx", "j.jsonl", "c.safetensors"])
@given(data=st.data())
@settings(
    max_examples=int(os.environ.get("NEEDLE_TEST_EXAMPLES", 100)),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_damaged_files_are_read_as_they_are_or_refused(tmp_path, name, data):
    """Against readers of their own, strict and slow: what these refuse gives a DataError that names
    the file, else the same ids come, and no id outside the vocabulary comes in a batch. Of a
    checkpoint any damage is refused."""
    shutil.rmtree(tmp_path)
    tmp_path.mkdir()
    files = {**GOOD, name: damage(data.draw, name, GOOD[name])}
    for other in [name, *[n for n in GOOD if n[:2] == name[:2]]]:
        (tmp_path / other).write_bytes(files[other])
    if name == "c.safetensors":
        if files[name] != GOOD[name]:
            with pytest.raises(CheckpointError, match=f"^{tmp_path / name}: "):
                Checkpoint(tmp_path / name)
        return
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        shown = __main__.main(["inspect", str(tmp_path / name)])
    if "jsonl" in name:
        check_lines(tmp_path / name, lines_say(files[name]))
        return
    expected = megatron_says(files["m.idx"], files["m.bin"])
    if expected is None:
        with pytest.raises(DataError) as caught:
            open_data(tmp_path / name)
        assert str(tmp_path / name[:1]) in str(caught.value)
        assert re.search("offset|bytes|empty file|one axis", str(caught.value))
        assert shown == 1 and str(tmp_path) in said.getvalue()
        return
    found = open_data(tmp_path / name)
    np.testing.assert_array_equal(np.concatenate([found.train, found.held_out]), expected)
    if len(found.train) < 9:
        with pytest.raises(DataError, match=f"{tmp_path / name[:1]}.*fewer than one batch"):
            Batches(found.train, 1, 8, samples=200)
        return
    batches = Batches(found.train, 1, 8, samples=200, vocab_size=60)
    drawn = expected[: len(found.train)]
    good = contextlib.nullcontext()
    if not ((drawn >= 0) & (drawn < 60)).all():
        good = pytest.raises(DataError, match=f"{tmp_path / name[:1]}.*: offset ")
    with good:
        for _ in range(len(batches)):
            ids, targets = batches.next()
            assert 0 <= min(ids.min(), targets.min()) and max(ids.max(), targets.max()) < 60


def check_lines(path, expected):
    def read():
        return "".join(chunk + "|" * last for chunk, last in text.documents(text_files(path)))

    if not expected:
        with pytest.raises(DataError, match="offset|a table|not text|no document") as caught:
            read()
        assert str(path) in str(caught.value)
    else:
        assert read() == "".join(document + "|" for document in expected)
