"""Files that survive: two writers, killed writers, and a folder that two want."""

import errno
import os
import stat
import subprocess
import sys

import pytest
from harness import in_thread, naming, run

from needle import files
from needle.files import FileError, Lock, remove_leftovers, replacing
from needle.training.folder import take


def test_two_writers_never_mix(tmp_path):
    """They write files of one letter each, again and again; a reader sees whole ones."""
    path = tmp_path / "a"

    def write(letter: bytes) -> None:
        for _ in range(60):
            with replacing(path) as file:
                for _ in range(20):
                    file.write(letter * 5000)

    writers = [in_thread(write, letter) for letter in (b"a", b"b")]
    while not all(writer.done() for writer in writers) or not path.exists():
        content = path.read_bytes() if path.exists() else b"a" * 100_000
        assert len(content) == 100_000 and len(set(content)) == 1
    assert [writer.result() for writer in writers] == [None] * 2 and os.listdir(tmp_path) == ["a"]


def test_file_is_whole_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    path, synchronised = tmp_path / "a", []

    def fsync(number: int) -> None:
        is_folder = stat.S_ISDIR(os.fstat(number).st_mode)
        size = None if is_folder else os.fstat(number).st_size
        synchronised.append((size, path.exists()))

    monkeypatch.setattr(os, "fsync", fsync)
    with replacing(path) as file:
        file.write(b"whole")
    assert synchronised == [(5, False), (None, True)]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_writer_that_fails_leaves_what_was_there(tmp_path, error):
    (tmp_path / "a").write_text("old")
    with pytest.raises(error), replacing(tmp_path / "a") as file:
        file.write(b"half")
        raise error
    assert os.listdir(tmp_path) == ["a"] and (tmp_path / "a").read_text() == "old"


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
    own = ["kept.tmp", ".kept", "notes.a.tmp", ".a.tmpl"]
    for name in own:
        (tmp_path / name).write_text("x")
    (tmp_path / ".folder.tmp").mkdir()
    (tmp_path / ".of two\nlines.tmp").touch()
    (tmp_path / ".link.tmp").symlink_to(tmp_path / ".folder.tmp")
    remove_leftovers(tmp_path)
    assert {*os.listdir(tmp_path)} == {".folder.tmp", *own}


HOLDER = """
import sys
from needle.files import Lock
lock = Lock(sys.argv[1])
print("held", flush=True)
sys.stdin.read()
"""


def test_lock_is_held_by_one_and_goes_with_the_process(tmp_path):
    (tmp_path / "lock").write_text("process 12345678 on the machine with a longer name\n" * 3)
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as holder:
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(FileError, match=rf": process {holder.pid} on \S+ is working in"):
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


def test_folder_on_a_disk_without_locks_is_used_and_keeps_the_files_of_others(
    tmp_path, monkeypatch
):
    def refuse(*given):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(files.fcntl, "flock", refuse)
    (tmp_path / ".a.tmp").touch()  # of a writer that may be at work
    assert take(tmp_path).held is False is Lock(tmp_path).held
    assert (tmp_path / ".a.tmp").exists()


FULL = """
import resource, sys
from needle.files import Lock, described
resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
try:
    Lock(sys.argv[1])
except OSError as error:
    print(described(error))
"""


def test_lock_without_room_names_its_file(tmp_path):
    assert run(sys.executable, "-c", FULL, tmp_path).stdout == f"{tmp_path}/lock: File too large\n"
    assert Lock(tmp_path).held


def test_control_characters_are_printed_as_escapes():
    kept = "tab\t line\n end\r\n é \u20ac \U0001f600"
    assert files.printable(kept) == kept
    for number in [*range(9), *range(11, 32), *range(127, 160)]:
        assert files.printable(f"a{chr(number)}b") == f"a\\x{number:02x}b"
    for kind in FileError, files.MissingFileError:
        error = kind("a\x1b[31m.npy: damaged")
        assert str(error) == files.described(error) == "a\\x1b[31m.npy: damaged"
    missing = FileNotFoundError(2, "No such file", "a\x1bb")
    assert files.described(missing) == "a\\x1bb: No such file"
    refused = PermissionError(13, "Permission denied", "a")
    assert files.described(refused) == "a: Permission denied; see to its permissions"


def test_error_of_writing_gets_the_name_of_its_file_unless_it_has_one():
    for given, name, number in (
        (OSError(28, "No space"), "a", 28),
        (OSError(28, "No space", "b"), "b", 28),
        (OSError("No space"), "a", errno.EIO),  # as libraries raise it
    ):
        with pytest.raises(OSError, match="No space") as raised, files.naming("a"):
            raise given
        assert (raised.value.filename, raised.value.errno) == (name, number)


def test_file_that_holds_no_json_or_toml_is_named(tmp_path):
    path = tmp_path / "a"
    for read, content, said in (
        (files.read_json, b"[" * 100_000, "no JSON: "),
        (files.read_json, b"\xff", "no JSON: "),
        (files.read_json, b"[1]", "must hold a JSON object, not list"),
        (files.read_toml, b"a = '\xff'", "no TOML: "),
    ):
        path.write_bytes(content)
        with naming(said), pytest.raises(FileError, match=f"^{path}: {said}"):
            read(path)


def test_settings_of_a_user_without_a_home_are_refused(monkeypatch):
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # as for an unknown user
    with pytest.raises(FileError, match="ranks.key: this user has no home: set HOME or XDG_CON"):
        files.settings_file("ranks.key")
    monkeypatch.setenv("XDG_CONFIG_HOME", "/settings")
    assert str(files.settings_file("ranks.key")) == "/settings/needle/ranks.key"
    monkeypatch.undo()
    monkeypatch.setenv("HOME", "/home")
    monkeypatch.setenv("XDG_CONFIG_HOME", "")  # as if it were unset
    assert str(files.settings_file("ranks.key")) == "/home/.config/needle/ranks.key"


def test_secret_is_made_once_and_is_its_users_alone(tmp_path):
    path = tmp_path / "folder" / "token"
    made = [in_thread(files.read_secret, path, "token") for _ in range(8)]
    (token,) = {one.result(60) for one in made}  # one of them wrote it
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and len(token) >= 40
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert files.read_secret(tmp_path / "other", "token") != token
    assert os.listdir(path.parent) == ["token"]
    for mode in (0o640, 0o604, 0o777):
        path.chmod(mode)
        with pytest.raises(FileError, match=f"mode is {mode:04o}.*chmod 600"):
            files.read_secret(path, "token")
    path.chmod(0o600)
    path.write_text("x" * 20)
    assert files.read_secret(path, "token") == "x" * 20
    for text in ("", "x" * 19, "with a blank in the middle", "ü" * 30):
        path.write_text(text)
        with pytest.raises(FileError, match="holds no token"):
            files.read_secret(path, "token")
    with pytest.raises(FileError, match="the token cannot be read or made: File exists"):
        files.read_secret(path / "below", "token")
