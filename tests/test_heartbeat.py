"""needle/heartbeat.py, by which commands tell their supervisor how far they are."""

import json
import os

from needle import _C, heartbeat


def test_sync_ends_after_its_step(monkeypatch, tmp_path):
    monkeypatch.setenv("NEEDLE_HEARTBEAT", str(tmp_path / "none"))
    monkeypatch.setenv("NEEDLE_SYNC_UNTIL", "7")
    before = _C.sync_each_op(True)
    try:
        for step in (0, 6):
            heartbeat.beat(step=step)
            assert _C.sync_each_op(True) is True
        heartbeat.beat(step=7)
        assert _C.sync_each_op(True) is False
        heartbeat.beat(step=8)
        assert _C.sync_each_op(True) is True
    finally:
        _C.sync_each_op(before)


def test_a_beat_without_a_supervisor_does_nothing(monkeypatch, tmp_path):
    monkeypatch.delenv("NEEDLE_HEARTBEAT", raising=False)
    heartbeat.beat(step=1)
    monkeypatch.setenv("NEEDLE_HEARTBEAT", str(tmp_path / "none"))
    heartbeat.beat(step=1)
    os.mkfifo(tmp_path / "none")  # without a reader
    heartbeat.beat(step=1)


def test_a_beat_never_waits(monkeypatch, tmp_path):
    """More is told than a pipe holds before it is read; each line is whole."""
    os.mkfifo(tmp_path / "pipe")
    monkeypatch.setenv("NEEDLE_HEARTBEAT", str(tmp_path / "pipe"))
    reader = os.open(tmp_path / "pipe", os.O_RDWR | os.O_NONBLOCK)
    try:
        for step in range(200):
            heartbeat.beat(step=step, fault="x" * 5000)
        lines = os.read(reader, 1 << 20).splitlines()
    finally:
        os.close(reader)
    facts = [json.loads(line) for line in lines]
    assert [fact["step"] for fact in facts] == list(range(len(facts))) and 10 < len(facts) < 200
    assert {fact["fault"] for fact in facts} == {"x" * heartbeat.MOST_TEXT}
