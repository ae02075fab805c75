"""needle/processes.py: children that report, print, hang, or lose their parent."""

import gc
import os
import select
import signal
import subprocess
import sys
import time

import pytest
from harness import ROOT, wait_until_gone

from needle import processes
from needle.processes import Child, MessageReader, MessageWriter

pytestmark = pytest.mark.slow

WRITER = f"""
import os, signal, subprocess, sys, time
sys.path.insert(0, {str(ROOT)!r})
from needle.processes import MESSAGES, MessageWriter
writer = MessageWriter.to_parent()
"""


def python(code: str, **options) -> Child:
    begin = WRITER if options.get("messages") else "import os, signal, sys, time\n"
    return Child([sys.executable, "-c", begin + code], **options)


def all_of(child: Child) -> list[dict]:
    found = []
    while not child.at_end:
        select.select([child], [], [])
        found += child.messages()
    return found


def test_messages_arrive_whole_and_in_order():
    code = "for i in range(3): writer.write(i=i, text='y' * 100_000)\nprint('{\"i\": 9}')"
    with python(code, messages=True, capture=True) as child:
        found = all_of(child)
        assert [message["i"] for message in found] == [0, 1, 2]
        assert {len(message["text"]) for message in found} == {100_000}
        assert child.wait(10) and child.poll() == 0 and child.printed() == '{"i": 9}\n'
        assert child.messages() == []


def test_lines_that_are_no_object_are_skipped():
    reader = MessageReader()
    for line in (b"", b"{", b"[]", b"3", b"\xff", b"[" * 9999, b'{"a": 1}', b'{"b":'):
        os.write(reader.writer, line + b"\n" * (line != b'{"b":'))
    assert reader.read() == [{"a": 1}] and reader.read() == [] and not reader.at_end
    os.write(reader.writer, b" 2}\n")
    assert reader.read() == [{"b": 2}]
    reader.close()


def test_other_processes_write_by_the_path():
    reader = MessageReader()
    code = f"with open({reader.path!r}, 'w') as pipe: pipe.write('{{\"a\": 1}}\\n')"
    subprocess.run([sys.executable, "-S", "-c", code], check=True)
    assert reader.read() == [{"a": 1}] and not reader.at_end
    reader.close()
    assert not os.path.exists(reader.path)


def test_a_grandchild_gets_neither_the_pipe_nor_its_name():
    code = "held = subprocess.Popen(['sleep', '60'])\nwriter.write(env=MESSAGES in os.environ)"
    with python(code, messages=True) as child:
        assert all_of(child) == [{"env": False}]  # the pipe ends with the child
        child.kill()


def test_a_child_has_its_own_session_no_input_and_its_environment():
    code = "print(os.getsid(0) == os.getpid(), sys.stdin.read() == '', os.environ['A'])"
    with python(code, env={**os.environ, "A": "7"}, capture=True) as child:
        assert child.wait(30) and child.printed() == "True True 7\n"


def test_descriptors_are_passed():
    read, write = os.pipe()
    with python(
        f"os.write({write}, b'x'); writer.write(a=1)", messages=True, pass_fds=(write,)
    ) as it:
        assert all_of(it) == [{"a": 1}] and os.read(read, 9) == b"x"
    os.close(read)
    os.close(write)


@pytest.mark.parametrize("messages", [False, True])
def test_a_child_ends_with_its_parent(messages):
    code = "signal.pause()"
    begin = WRITER + "writer.write()\n" if messages else "import signal\n"
    parent = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import select, sys, time; from needle.processes import Child\n"
            f"child = Child([sys.executable, '-c', {begin + code!r}], messages={messages})\n"
            f"if {messages}: select.select([child], [], [])\n"
            "print(child.pid, flush=True); time.sleep(600)",
        ],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    )
    with parent:
        pid = int(parent.stdout.readline())
        assert os.path.exists(f"/proc/{pid}")
        parent.kill()
    wait_until_gone(pid)


def test_a_child_whose_parent_is_gone_does_nothing():
    env = os.environ | {processes.MESSAGES: "1:1"}
    done = subprocess.run([sys.executable, "-c", WRITER + "print(1)"], env=env, capture_output=True)
    assert (done.returncode, done.stdout) == (1, b"")


def test_closing_kills_the_group_and_leaves_no_descriptor():
    gc.collect()  # mapped files that other tests left in cycles would close below
    before = set(os.listdir("/proc/self/fd"))
    code = (
        "print(subprocess.Popen(['sleep', '60']).pid, flush=True); writer.write(); time.sleep(60)"
    )
    with python(code, messages=True, capture=True) as child:
        select.select([child], [], [])
        grandchild = int(child.printed())
    assert child.poll() == -signal.SIGKILL
    wait_until_gone(grandchild)
    assert set(os.listdir("/proc/self/fd")) == before
    with pytest.raises(FileNotFoundError):
        Child(["/no/such/program"], messages=True, capture=True)
    assert set(os.listdir("/proc/self/fd")) == before


def test_time_spent_waiting_for_a_processor_does_not_count(monkeypatch):
    with python("time.sleep(60)", deadline=time.monotonic()) as child:
        monkeypatch.setattr(processes, "starved", lambda pid: 20.0)
        assert not child.is_late()
        child.deadline -= 20
        assert child.is_late()
    with python("time.sleep(60)") as child:
        assert not child.is_late()


def test_starved_is_the_time_in_the_run_queue():
    assert 0 <= processes.starved() < time.monotonic()
    assert processes.starved(2**22 + 1) == 0


def test_waiting_ends_with_the_child_the_time_or_on_request():
    with python("time.sleep(60)") as child:
        began = time.monotonic()
        assert not child.wait(0.1) and not child.wait(60, lambda: time.monotonic() > began + 0.2)
        assert 0.2 < time.monotonic() - began < 30
        child.signal(signal.SIGTERM)
        assert child.wait(30) and child.poll() == -signal.SIGTERM
        child.signal(signal.SIGTERM)
        child.signal(signal.SIGTERM, group=True)


def test_a_writer_that_may_not_wait_raises():
    reader = MessageReader()
    os.set_blocking(reader.writer, False)
    writer = MessageWriter(reader.writer)
    with pytest.raises(BlockingIOError):
        for _ in range(1000):
            writer.write(text="x" * 1000)
    assert len(reader.read()) > 10
    reader.close()
