"""needle/kernels/access.py: the token's file, the names of the service, where it may listen, and
how many connections it takes."""

import os
import resource
import stat

import pytest
from harness import naming, python

from needle.files import FileError, read_secret
from needle.kernels import access
from needle.kernels.access import AccessError, listen, names_of, right_host, right_token

TOKEN = "t" * 43


def test_a_token_is_made_once(tmp_path):
    path = tmp_path / "folder" / "token"
    old = os.umask(0)
    try:
        token = read_secret(path, "token")
    finally:
        os.umask(old)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and len(token) >= 40
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert read_secret(path, "token") == token and os.listdir(path.parent) == ["token"]
    assert read_secret(tmp_path / "other", "token") != token


def test_a_token_that_others_can_read_is_refused(tmp_path, monkeypatch):
    path = tmp_path / "token"
    read_secret(path, "token")
    for mode in (0o640, 0o604, 0o620, 0o602, 0o610, 0o777):
        path.chmod(mode)
        with pytest.raises(FileError, match=f"mode is {mode:04o}.*chmod 600"):
            read_secret(path, "token")
    path.chmod(0o400)
    read_secret(path, "token")
    monkeypatch.setattr(access.os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(FileError, match="belongs to user"):
        read_secret(path, "token")


def test_files_that_hold_no_token_are_refused(tmp_path):
    read_secret(tmp_path / "token", "token")
    for text in ("", "x" * 19, "x" * 513, "with a blank in the middle", "ü" * 30, "a" * 8000):
        path = tmp_path / "other"
        path.write_text(text)
        path.chmod(0o600)
        with pytest.raises(FileError, match="holds no token"):
            read_secret(path, "token")
    (tmp_path / "link").symlink_to(tmp_path / "token")
    (tmp_path / "nowhere").symlink_to(tmp_path / "not there")
    (tmp_path / "folder").mkdir(mode=0o700)
    os.mkfifo(tmp_path / "pipe", 0o600)
    for name in ("link", "nowhere", "folder", "pipe"):
        with pytest.raises(FileError, match=name):
            read_secret(tmp_path / name, "token")
    assert not (tmp_path / "not there").exists()
    with pytest.raises(FileError, match="cannot be read"):
        read_secret(tmp_path / "token" / "token", "token")


def test_the_token_of_a_request():
    right = f"Bearer {TOKEN}"
    for headers in ([right], [f"bearer  {TOKEN} "]):
        assert right_token(headers, TOKEN)
    wrong = ["", "Bearer ", TOKEN, f"Basic {TOKEN}", f"{right}x", right[:-1], f"{right}, {right}"]
    alone = [[header] for header in (*wrong, "Bearer \udcff\u20ac")]
    for headers in ([], [right, right], *alone):
        with naming(headers):
            assert not right_token(headers, TOKEN)


def test_the_host_of_a_request():
    names = names_of("127.1.2.3", ["GPU.lab"])
    right = "localhost LOCALHOST:18188 localhost.:1 127.0.0.1:80 [::1]:18188 [0:0:0:0:0:0:0:1]"
    for host in (*right.split(), "gpu.lab:18188", "127.1.2.3:1"):
        with naming(host):
            assert right_host([host], names)
    wrong = "evil.example localhost.evil.example 127.0.0.2 evil.example@localhost localhost/evil"
    wrong += " localhost:18188:18188 localhost:port [localhost] [::1"
    alone = [[host] for host in (*wrong.split(), "", "localhost, evil.example", "localhost\n")]
    for hosts in ([], ["localhost", "localhost"], *alone):
        with naming(hosts):
            assert not right_host(hosts, names)


def test_the_service_listens_on_loopback_alone():
    for host in ("127.0.0.1", "127.1.2.3", "localhost"):
        with listen(host, 0) as sock:
            assert sock.getsockname()[0].startswith("127.") or sock.getsockname()[0] == "::1"
    for host in ("0.0.0.0", "", "192.0.2.1", "10.0.0.1", "::", "::ffff:192.0.2.1"):
        with naming(host), pytest.raises(AccessError, match="lets in other machines.*ssh -L.*pro"):
            listen(host, 0)
    for host in ("no such host", "a" * 70 + ".example"):
        with pytest.raises(AccessError, match=f"--host {host[:3]}"):
            listen(host, 0)
    with listen("127.0.0.1", 0) as first, pytest.raises(AccessError, match="in use"):
        listen("127.0.0.1", first.getsockname()[1])


def limited(soft: int, hard: int, devices: int) -> str:
    """Return what a process with these limits on open files prints."""
    code = f"""
import resource
from needle.kernels import access
resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard}))
access.raise_limit()
print(resource.getrlimit(resource.RLIMIT_NOFILE)[0], end=" ")
try:
    print(access.room({devices}))
except RuntimeError as error:
    print(error)
"""
    return python(code).stdout.strip()


def test_connections_leave_open_files_for_processes():
    if resource.getrlimit(resource.RLIMIT_NOFILE)[1] < 2048:
        pytest.skip("fewer than 2,048 files may be open here")
    assert limited(64, 2048, 1) == f"2048 {access.MOST_CONNECTIONS}"
    limit, room = map(int, limited(64, 128, 1).split())
    assert limit == 128 and access.LEAST_CONNECTIONS <= room <= 128 - 64
    said = limited(64, 128, 8)
    assert said.startswith("128 this process may open 128 files") and "ulimit -n" in said
