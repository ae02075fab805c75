"""Files that survive: two writers, links, killed writers, and a folder that two want."""

import os
import subprocess
import sys
import threading

import pytest
from harness import run

from needle import files
from needle.files import FileError, Lock, remove_leftovers, replacing


def test_two_writers_never_mix(tmp_path):
    """Two processes write files of one letter each, again and again; a reader sees whole ones."""
    path, torn, done = tmp_path / "a", [], threading.Event()

    def write(letter: bytes) -> None:
        for _ in range(60):
            with replacing(path) as file:
                for _ in range(20):
                    file.write(letter * 5000)

    def read() -> None:
        while not done.is_set():
            if path.exists():
                content = path.read_bytes()
                if len(content) != 100_000 or len(set(content)) != 1:
                    torn.append(content)

    writers = [threading.Thread(target=write, args=(letter,)) for letter in (b"a", b"b")]
    reader = threading.Thread(target=read)
    for thread in (*writers, reader):
        thread.start()
    for thread in writers:
        thread.join()
    done.set()
    reader.join()
    assert not torn and os.listdir(tmp_path) == ["a"]


def test_a_planted_link_is_not_followed(tmp_path, monkeypatch):
    victim = tmp_path / "victim"
    victim.write_text("precious")
    monkeypatch.setattr(files.secrets, "token_hex", lambda n: "00000000")
    link = tmp_path / f".a.{os.getpid()}-00000000.tmp"
    link.symlink_to(victim)
    with pytest.raises(FileError, match="a: cannot be written: File exists"):
        with replacing(tmp_path / "a") as file:
            file.write(b"evil")
    assert victim.read_text() == "precious" and not (tmp_path / "a").exists()


KILLED = """
import os, signal, sys
from needle.files import replacing
with replacing(sys.argv[1]) as file:
    file.write(b"half")
    file.flush()
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_left_overs_of_a_killed_writer_are_removed(tmp_path):
    run(sys.executable, "-c", KILLED, tmp_path / "a")
    assert len(os.listdir(tmp_path)) == 1 and not (tmp_path / "a").exists()
    for name in ("kept.tmp", ".kept"):
        (tmp_path / name).write_text("x")
    (tmp_path / ".folder.tmp").mkdir()
    remove_leftovers(tmp_path)
    assert sorted(os.listdir(tmp_path)) == [".folder.tmp", ".kept", "kept.tmp"]


HOLDER = """
import sys
from needle.files import Lock
lock = Lock(sys.argv[1])
print("held", flush=True)
sys.stdin.read()
"""


def test_lock_is_held_by_one_and_goes_with_the_process(tmp_path):
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as holder:
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(FileError, match=f"process {holder.pid} on .* is working in this fold"):
            Lock(tmp_path)
        holder.kill()
    lock = Lock(tmp_path)
    assert lock.held
    with pytest.raises(FileError, match=f"process {os.getpid()} on"):
        Lock(tmp_path)
    lock.release()
    again = Lock(tmp_path)
    del again
    assert Lock(tmp_path).held


def test_a_lock_is_given_up_though_a_forked_child_has_its_file_open(tmp_path):
    """As each process that is being started has, until it runs its program. The child's own end
    gives up nothing."""
    lock = Lock(tmp_path)
    for ends_first in True, False:
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(writer)
            if not ends_first:
                os.read(reader, 1)
            lock.release()
            os._exit(0)
        os.close(reader)
        if ends_first:
            os.waitpid(child, 0)
            with pytest.raises(FileError, match=f"process {os.getpid()} on"):
                Lock(tmp_path)
        else:
            lock.release()
            assert Lock(tmp_path).held
        os.close(writer)
    os.waitpid(child, 0)


def test_a_locked_folder_that_is_replaced_is_not_written(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    lock = Lock(folder)
    assert lock.folder() == folder
    folder.rename(tmp_path / "moved")
    for _ in range(2):
        with pytest.raises(FileError, match="run: was removed, renamed or replaced while process"):
            lock.folder()
        folder.mkdir(exist_ok=True)
        Lock(folder).release()


def test_a_lock_that_cannot_be_made(tmp_path):
    (tmp_path / "lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(FileError, match="lock: cannot be opened"):
        Lock(tmp_path)
    assert not (tmp_path / "elsewhere").exists()


def test_control_characters_are_printed_as_escapes():
    kept = "tab\t line\n end\r\n é \u20ac \U0001f600"
    assert files.printable(kept) == kept
    for number in [*range(32), *range(127, 160)]:
        if chr(number) not in "\t\n":
            assert files.printable(f"a{chr(number)}b") == f"a\\x{number:02x}b"
    assert files.printable("\x1b]0;title\x07\x9b2J\r") == "\\x1b]0;title\\x07\\x9b2J\\x0d"
    for kind in FileError, files.MissingFileError:
        error = kind("a\x1b[31m.npy: damaged")
        assert str(error) == files.described(error) == "a\\x1b[31m.npy: damaged"
    missing = FileNotFoundError(2, "No such file", "a\x1bb")
    assert files.described(missing) == "a\\x1bb: No such file"


def test_settings_of_a_user_without_a_home_are_refused(monkeypatch):
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # as for an unknown user
    with pytest.raises(FileError, match="ranks.key: this user has no home: set HOME or XDG_CON"):
        files.settings_file("ranks.key")
    monkeypatch.setenv("XDG_CONFIG_HOME", "/settings")
    assert str(files.settings_file("ranks.key")) == "/settings/needle/ranks.key"
