"""needle/kernels/access.py: the token's file, the names of the service, where it may listen."""

import os
import socket
import stat

import pytest

from needle.kernels import access
from needle.kernels.access import AccessError, listen, names_of, read_token, right_host, right_token

# ---- the token -----------------------------------------------------------------------------------


def test_a_token_is_made_once(tmp_path):
    path = tmp_path / "folder" / "token"
    old = os.umask(0)
    try:
        token = read_token(path)
    finally:
        os.umask(old)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and len(token) >= 40
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert read_token(path) == token and os.listdir(path.parent) == ["token"]
    assert read_token(tmp_path / "other") != token


def test_where_another_service_was_faster_its_token_stays(tmp_path, monkeypatch):
    path = tmp_path / "token"
    path.write_text("f" * 40)
    path.chmod(0o600)
    monkeypatch.setattr(access.os.path, "lexists", lambda path: False)
    assert read_token(path) == "f" * 40 and os.listdir(tmp_path) == ["token"]


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o644, 0o620, 0o602, 0o610, 0o660, 0o777])
def test_a_token_that_others_can_read_is_refused(tmp_path, mode):
    path = tmp_path / "token"
    read_token(path)
    path.chmod(mode)
    with pytest.raises(AccessError, match=f"mode is {mode:04o}.*chmod 600"):
        read_token(path)
    path.chmod(0o400)
    read_token(path)


def test_a_token_of_another_user_is_refused(tmp_path, monkeypatch):
    read_token(tmp_path / "token")
    monkeypatch.setattr(access.os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(AccessError, match="belongs to user"):
        read_token(tmp_path / "token")


@pytest.mark.parametrize(
    "text", ["", "short", "x" * 19, "x" * 513, "with a blank in the middle", "ü" * 30, "a" * 8000]
)
def test_what_is_no_token_is_refused(tmp_path, text):
    path = tmp_path / "token"
    path.write_text(text)
    path.chmod(0o600)
    with pytest.raises(AccessError, match="holds no token"):
        read_token(path)


def test_a_link_a_folder_and_a_pipe_are_refused(tmp_path):
    read_token(tmp_path / "token")
    (tmp_path / "link").symlink_to(tmp_path / "token")
    (tmp_path / "nowhere").symlink_to(tmp_path / "not there")
    (tmp_path / "folder").mkdir(mode=0o700)
    os.mkfifo(tmp_path / "pipe", 0o600)
    for name in ("link", "nowhere", "folder", "pipe"):
        with pytest.raises(AccessError, match=name):
            read_token(tmp_path / name)
    assert not (tmp_path / "not there").exists()


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(AccessError, match="cannot be read"):
        read_token(tmp_path / "file" / "token")


TOKEN = "t" * 43


@pytest.mark.parametrize(
    "headers, right",
    [
        ([f"Bearer {TOKEN}"], True),
        ([f"bearer  {TOKEN} "], True),
        ([], False),
        ([""], False),
        (["Bearer"], False),
        (["Bearer "], False),
        ([TOKEN], False),
        ([f"Basic {TOKEN}"], False),
        ([f"Bearer {TOKEN}x"], False),
        ([f"Bearer {TOKEN[:-1]}"], False),
        ([f"Bearer {TOKEN}", f"Bearer {TOKEN}"], False),
        ([f"Bearer {TOKEN}, Bearer {TOKEN}"], False),
        (["Bearer \udcff\u20ac"], False),
    ],
)
def test_the_header(headers, right):
    assert right_token(headers, TOKEN) is right


# ---- names ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "headers, right",
    [
        (["localhost"], True),
        (["LOCALHOST:18188"], True),
        (["localhost.:1"], True),
        (["127.0.0.1:80"], True),
        (["[::1]:18188"], True),
        (["[0:0:0:0:0:0:0:1]"], True),
        (["gpu.lab:18188"], True),
        ([], False),
        ([""], False),
        (["evil.example"], False),
        (["localhost.evil.example"], False),
        (["127.0.0.1.evil.example"], False),
        (["127.0.0.2"], False),
        (["evil.example@localhost"], False),
        (["localhost/evil"], False),
        (["localhost:18188:18188"], False),
        (["localhost:port"], False),
        (["[localhost]"], False),
        (["[::1"], False),
        (["::1"], False),
        (["localhost", "localhost"], False),
        (["localhost, evil.example"], False),
        (["localhost\n"], False),
    ],
)
def test_names(headers, right):
    assert right_host(headers, names_of("127.0.0.1", ["GPU.lab"])) is right


def test_a_service_answers_to_its_own_address():
    assert right_host(["127.1.2.3:1"], names_of("127.1.2.3", []))
    assert right_host(["[::2]:1"], names_of("0:0::2", []))


# ---- addresses -----------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "localhost"])
def test_loopback_asks_for_nothing(host):
    with listen(host, 0) as sock:
        assert sock.getsockname()[0].startswith("127.") or sock.getsockname()[0] == "::1"


@pytest.mark.parametrize("host", ["0.0.0.0", "", "192.0.2.1", "::", "::ffff:192.0.2.1"])
def test_elsewhere_never(host):
    with pytest.raises(AccessError, match="lets in other machines.*ssh -L.*proxy"):
        listen(host, 0)


def test_addresses_that_cannot_be_had():
    with pytest.raises(AccessError, match="--host no such host"):
        listen("no such host", 0)
    with pytest.raises(AccessError, match="--host aaa"):
        listen("a" * 70 + ".example", 0)
    with listen("127.0.0.1", 0) as first:
        with pytest.raises(AccessError, match="in use"):
            listen("127.0.0.1", first.getsockname()[1])


def test_ipv6_loopback():
    if not socket.has_ipv6:
        pytest.skip("no IPv6 here")
    try:
        sock = listen("::1", 0)
    except AccessError as error:
        pytest.skip(str(error))
    sock.close()
