"""needle/kernels/landlock.py: the order of its calls and their structures against a kernel that is
made up, and, where this one has Landlock, what a process can still do."""

import ctypes
import errno
import json
import os
import re
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from fake_pool import FakePool
from harness import ROOT

from needle.kernels import landlock, worker
from needle.kernels.compile import find_toolkit
from needle.kernels.crew import Ended, Worker
from needle.kernels.frames import COMPILED, READY
from needle.kernels.isolate import Pool

pytestmark = pytest.mark.slow


def missing() -> str | None:
    try:
        landlock.version()
    except landlock.LandlockError as error:
        return str(error)
    return None


def no_nvrtc() -> str | None:
    try:
        find_toolkit()
    except RuntimeError as error:
        return str(error)
    return None


needs_landlock = pytest.mark.skipif(missing() is not None, reason=str(missing()))
needs_nvrtc = pytest.mark.skipif(no_nvrtc() is not None, reason=str(no_nvrtc()))


class Kernel:
    """The system calls of a kernel with Landlock of some version; `fails` is (call, errno)."""

    def __init__(self, monkeypatch, version=7, fails=(), keeps=True):
        self.calls, self.known, self.fails = [], version, dict(fails)
        monkeypatch.setattr(landlock, "_syscall", self.syscall)
        monkeypatch.setattr(landlock.ctypes, "CDLL", lambda *a, **k: self)
        monkeypatch.setattr(landlock, "_prove", lambda: self.calls.append(("prove",)))
        monkeypatch.setattr(landlock.os, "listdir", lambda path: ["1"])

    def prctl(self, *arguments):
        self.calls.append(("prctl", *arguments))
        return 0

    def syscall(self, number, *arguments):
        values = tuple(getattr(a, "value", a) for a in arguments)
        name = {444: "create", 445: "add", 446: "restrict"}[number]
        if name == "create" and values[0] is None:
            assert values == (None, 0, 1)
            name = "version"
        if name in self.fails:
            raise OSError(self.fails[name], os.strerror(self.fails[name]))
        self.calls.append((name, *values))
        if name == "version":
            return self.known
        return os.open("/dev/null", os.O_RDONLY) if name == "create" else 0


@pytest.mark.parametrize(
    "version, size, files, net, scopes",
    [
        (1, 8, 0x1FFF, None, None),
        (2, 8, 0x3FFF, None, None),
        (3, 8, 0x7FFF, None, None),
        (4, 16, 0x7FFF, 3, None),
        (5, 16, 0xFFFF, 3, None),
        (6, 24, 0xFFFF, 3, 3),
        (7, 24, 0xFFFF, 3, 3),
        (99, 24, 0xFFFF, 3, 3),
    ],
)
def test_what_each_version_takes_away(version, size, files, net, scopes):
    """linux/landlock.h: landlock_ruleset_attr, and the versions of its documentation."""
    attr = landlock.ruleset(version)
    assert len(attr) == size
    fields = struct.unpack(f"={size // 8}Q", attr)
    assert fields == tuple(n for n in (files, net, scopes) if n is not None)


def test_the_order_of_calls(monkeypatch, tmp_path):
    kernel = Kernel(monkeypatch, 7)
    one = tmp_path / "one.h"
    one.write_text("")
    landlock.confine([tmp_path, one])
    names = [call[0] for call in kernel.calls]
    assert names == ["version", "create", "add", "add", "prctl", "restrict", "prove"]
    _, attr, size, flags = kernel.calls[1]
    assert (attr, size, flags) == (landlock.ruleset(7), 24, 0)
    for call, rights in zip(kernel.calls[2:4], (0b1100, 0b0100)):  # a folder, and a file
        _, _, kind, rule, flags = call
        allowed, place = struct.unpack("=Qi", rule)
        assert (kind, allowed, flags, len(rule)) == (1, rights, 0, 12) and place > 2
    assert kernel.calls[4] == ("prctl", 38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS
    assert kernel.calls[5][2] == 0


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM])
def test_a_kernel_without_it(monkeypatch, code):
    kernel = Kernel(monkeypatch, fails={"version": code})
    with pytest.raises(landlock.LandlockError, match="has no Landlock.*Linux 5.13"):
        landlock.confine(["/"])
    assert kernel.calls == []


@pytest.mark.parametrize("call", ["create", "add", "restrict"])
def test_a_call_that_fails(monkeypatch, call):
    before = len(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as patch:
        Kernel(patch, fails={call: errno.EINVAL})
        with pytest.raises(landlock.LandlockError, match=r"version 7\).*Invalid argument"):
            landlock.confine(["/"])
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_folder_that_is_not_there(monkeypatch, tmp_path):
    Kernel(monkeypatch)
    with pytest.raises(landlock.LandlockError, match="nowhere"):
        landlock.confine([tmp_path / "nowhere"])


def test_a_second_thread_is_refused(monkeypatch):
    kernel = Kernel(monkeypatch)
    monkeypatch.setattr(landlock.os, "listdir", lambda path: ["1", "2"])
    with pytest.raises(landlock.LandlockError, match="2 threads"):
        landlock.confine(["/"])
    assert [call[0] for call in kernel.calls] == ["version"]


def test_a_promise_that_is_not_kept_is_found():
    """Here nothing is restricted, as in a container that answers these calls by itself."""
    with pytest.raises(landlock.LandlockError, match="does not keep"):
        landlock._prove()


def test_errors_of_system_calls():
    with pytest.raises(OSError) as caught:
        landlock._syscall(landlock.RESTRICT_SELF, ctypes.c_int(-1), ctypes.c_uint32(0))
    assert caught.value.errno  # ENOSYS, EOPNOTSUPP, EPERM or EBADF


# ---- a process that is confined ------------------------------------------------------------------


CONFINED = """
import os, socket, sys
from needle.kernels import landlock, worker

allowed, secret, target = sys.argv[1:]
opened = open(secret)
sock = socket.socket()
landlock.confine([allowed])

def refused(what, call):
    try:
        call()
    except PermissionError:
        return
    raise SystemExit(f"{what} is possible")

assert open(f"{allowed}/header.h").read() == "text" and os.listdir(allowed)
assert opened.read() == "secret"  # what was open stays open
refused("reading", lambda: open(secret))
refused("reading /etc/passwd", lambda: open("/etc/passwd"))
refused("listing", lambda: os.listdir(os.path.dirname(secret)))
refused("the environment", lambda: open("/proc/self/environ"))
refused("another process' memory", lambda: open(f"/proc/{os.getppid()}/mem"))
refused("a link out", lambda: open(f"{allowed}/link"))
refused("writing", lambda: open(f"{allowed}/header.h", "w"))
refused("making", lambda: open(f"{target}/new", "w"))
refused("a folder", lambda: os.mkdir(f"{target}/new"))
refused("removing", lambda: os.unlink(f"{allowed}/header.h"))
refused("a program", lambda: os.execv("/bin/true", ["true"]))
if landlock.version() >= 3:
    refused("truncating", lambda: os.truncate(f"{allowed}/header.h", 0))
if landlock.version() >= 4:
    refused("a port", lambda: sock.bind(("127.0.0.1", 0)))
    refused("a connection", lambda: sock.connect(("127.0.0.1", 9)))
if landlock.version() >= 6:
    refused("a signal", lambda: os.kill(os.getppid(), 0))
pid = os.fork()
if pid == 0:
    refused("reading in a child", lambda: open(secret))
    os._exit(0)
assert os.waitpid(pid, 0)[1] == 0
print("confined")
"""


@needs_landlock
def test_what_a_confined_process_can_do(tmp_path):
    allowed, outside = tmp_path / "include", tmp_path / "outside"
    allowed.mkdir()
    outside.mkdir()
    (allowed / "header.h").write_text("text")
    (outside / "secret").write_text("secret")
    (allowed / "link").symlink_to(outside / "secret")
    done = subprocess.run(
        [sys.executable, "-c", CONFINED, allowed, outside / "secret", outside],
        cwd=ROOT,
        env=os.environ | {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert (done.stdout, done.returncode) == ("confined\n", 0), done.stderr


# ---- the compiler --------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def compiler():
    """The service's: needle.kernels.worker's own, with NVRTC."""
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "OPENBLAS_NUM_THREADS": "1",
        "OMP_NUM_THREADS": "1",
    }
    made = Worker([*Pool.worker, "confined"], environment)
    made.greet(120.0, READY)
    yield made
    made.kill()
    made.end()
    made.close()


def compiled(compiler, source: str, entry: str = "k") -> dict:
    return compiler.ask({"entry": entry, "arch": "90a"}, source.encode(), (), 120.0, COMPILED)[0]


@needs_landlock
@needs_nvrtc
@pytest.mark.parametrize(
    "path", ["/etc/passwd", "/proc/self/environ", "/proc/self/maps", f"{ROOT}/README.md"]
)
def test_a_source_includes_no_file_of_the_machine(compiler, path):
    answer = compiled(compiler, f'#include "{path}"\n__global__ void k(float *x) {{}}')
    assert answer["status"] == "compile_error"
    assert f'cannot open source file "{path}"\n' in answer["message"]
    assert "root:" not in answer["message"]


@needs_landlock
@needs_nvrtc
@pytest.mark.parametrize(
    "line",
    [
        '#include "PATH"',
        "#include <PATH>",
        "#define P <PATH>\n#include P",
        '#include_next "PATH"',
        '#if __has_include("PATH")\n#error there\n#endif',
        '#if __has_include_next("PATH")\n#error there\n#endif',
        '#embed "PATH"',
        '#line 1 "PATH"\n#error here',
        '#pragma GCC dependency "PATH"',
        '__global__ void f() { asm(".include \\"PATH\\""); }',
    ],
)
def test_a_source_cannot_tell_whether_a_file_is_there(compiler, tmp_path, line):
    """Not by the path itself, nor by one through it to a header that may be read."""
    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("file")
    (include, *_) = find_toolkit().include
    up = "/.." * len((tmp_path / "folder").parts[1:])
    answers = {}
    for tail in ("", "/x", f"{up}{include}/cuda_bf16.h", f"{up}/include/cuda_bf16.h"):
        for name in ("file", "folder", "link", "none"):
            path = f"{tmp_path}/{name}{tail}"
            source = line.replace("PATH", path) + "\n__global__ void k(float *x) {}"
            said = json.dumps(compiled(compiler, source)).replace(path, "PATH")
            answers.setdefault(tail, set()).add(re.sub(r" *\^", "^", said))
    assert {tail: len(found) for tail, found in answers.items()} == dict.fromkeys(answers, 1)


@needs_landlock
@needs_nvrtc
def test_a_confined_compiler_compiles(compiler):
    """Templates and the toolkit's headers, which it reads when they are asked for."""
    source = """
    #include <cuda_bf16.h>
    template <class T> __global__ void k(const T *x, T *y, int n) {
        for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x)
            y[i] = x[i] * T(2.0f);
        assert(n > 0);
        if (n == 7) printf("%d\\n", n);
    }"""
    answer = compiled(compiler, source, "k<__nv_bfloat16>")
    assert (answer["status"], answer.get("message")) == ("ok", None)
    assert [p["type"] for p in answer["parameters"]][2] == "int"


@needs_landlock
@needs_nvrtc
def test_the_limits_of_a_confined_compiler(compiler):
    text = Path(f"/proc/{compiler.pid}/limits").read_text()
    limits = {line[:26].strip(): line[26:].split()[0] for line in text.splitlines()}
    assert limits["Max file size"] == limits["Max processes"] == "0"
    assert int(limits["Max address space"]) <= 16 << 30
    compiled(compiler, "__global__ void k() {}")  # NVRTC may lift what it can lift
    text = Path(f"/proc/{compiler.pid}/limits").read_text()
    limits = {line[:26].strip(): line[26:].split()[1] for line in text.splitlines()}
    assert limits["Max cpu time"] == str(worker.COMPILER_SECONDS)
    assert limits["Max file size"] == limits["Max processes"] == "0"
    assert "NoNewPrivs:\t1" in Path(f"/proc/{compiler.pid}/status").read_text()


@pytest.mark.parametrize("role, ready", [("confined", False), ("compiler", True)])
def test_a_compiler_that_cannot_be_confined_does_not_start(tmp_path, role, ready):
    script = tmp_path / "worker.py"
    script.write_text(
        "import sys\n"
        "from needle.kernels import landlock, worker\n"
        "def version():\n    raise landlock.LandlockError('there is none')\n"
        "landlock.version = version\n"
        "class Needle(worker.Needle):\n    def confine(self):\n        landlock.confine([])\n"
        "worker.main(sys.argv[1:], Needle())\n"
    )
    made = Worker([sys.executable, str(script), role], os.environ | {"PYTHONPATH": str(ROOT)})
    try:
        if ready:
            made.greet(60.0, READY)
        else:
            with pytest.raises(Ended, match="there is none"):
                made.greet(60.0, READY)
    finally:
        made.kill()
        made.end()
        made.close()


def test_a_compiler_ends_when_its_time_is_used(tmp_path):
    """After an answer, or in the midst of a source that takes for ever."""
    script = tmp_path / "worker.py"
    script.write_text(
        "import sys, time\n"
        "from needle.kernels import worker\n"
        "class Needle(worker.Needle):\n    def build(self, source, entry, arch, debug):\n"
        "        end = time.process_time() + float(source)\n"
        "        while time.process_time() < end: pass\n"
        "        raise ValueError('worked')\n"
        "worker.COMPILER_SECONDS = int(time.process_time()) + 3\n"
        "worker.main(sys.argv[1:], Needle())\n"
    )
    for seconds, how in (("2", "exit code 0"), ("9", "SIGKILL")):
        made = Worker(
            [sys.executable, str(script), "compiler"], os.environ | {"PYTHONPATH": str(ROOT)}
        )
        made.greet(60.0, READY)
        for source in ("0", seconds):
            try:
                answer, _ = made.ask(
                    {"entry": "k", "arch": "90a"}, source.encode(), (), 60.0, COMPILED
                )
                assert answer["message"] == "worked"
            except Ended:
                assert how == "SIGKILL"
        assert how in made.end()
        made.close()


# ---- a pool that asks for it ---------------------------------------------------------------------


def test_a_pool_has_a_confined_compiler_or_is_none(monkeypatch):
    roles = []

    class Recording(FakePool):
        def _starter(self, role, device=None):
            roles.append(role)
            return super()._starter("compiler" if role == "confined" else role, device)

    monkeypatch.setattr(landlock, "version", lambda: 1)
    for confined, role in ((True, "confined"), (False, "compiler")):
        with Recording(devices=[0], spares=0, confined=confined):
            assert roles[-2:] == ["runner", role]

    def version():
        raise landlock.LandlockError("there is none")

    monkeypatch.setattr(landlock, "version", version)
    with pytest.raises(RuntimeError, match="there is none"):
        FakePool(devices=[0], spares=0, confined=True)
