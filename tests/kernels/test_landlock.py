"""needle/kernels/landlock.py, and what a confined process, above all the compiler, can still do."""

import json
import re
import struct
import sys
from pathlib import Path

import pytest
from fake_pool import FakePool
from harness import ROOT, naming, nvrtc_missing, run

from needle.kernels import landlock, worker
from needle.kernels.pool import Pool
from needle.kernels.toolkit import find_toolkit
from needle.kernels.workers import Ended, Worker

pytestmark = pytest.mark.slow


def missing() -> str | None:
    try:
        landlock.version()
    except landlock.LandlockError as error:
        return str(error)
    return None


needs_landlock = pytest.mark.skipif(missing() is not None, reason=str(missing()))
needs_nvrtc = pytest.mark.skipif(nvrtc_missing() is not None, reason=str(nvrtc_missing()))


def test_each_version_restricts_its_rights():
    """linux/landlock.h: landlock_ruleset_attr, and the versions of its documentation."""
    for version, size, fields in (
        (1, 8, (0x1FFF,)),
        (2, 8, (0x3FFF,)),
        (3, 8, (0x7FFF,)),
        (4, 16, (0x7FFF, 3)),
        (5, 16, (0xFFFF, 3)),
        (6, 24, (0xFFFF, 3, 3)),
        (99, 24, (0xFFFF, 3, 3)),
    ):
        attr = landlock.ruleset(version)
        assert struct.unpack(f"={size // 8}Q", attr) == fields, version


def test_a_system_without_landlock_is_named(monkeypatch):
    monkeypatch.setattr(landlock, "CREATE_RULESET", 9999)  # no system call
    with pytest.raises(landlock.LandlockError, match="has no Landlock.*Linux 5.13"):
        landlock.confine(["/"])
    with pytest.raises(landlock.LandlockError, match="does not keep"):
        landlock._check()  # nothing is restricted here


CONFINED = """
import os, socket, sys
from needle.kernels import landlock, worker

allowed, secret, target = sys.argv[1:]
import threading
second = threading.Event()
thread = threading.Thread(target=second.wait)
thread.start()
try:
    landlock.confine([allowed])
except landlock.LandlockError as error:
    assert "has 2 threads" in str(error)
else:
    raise SystemExit("two threads are confined")
second.set()
thread.join()
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
def test_a_confined_process_reads_the_allowed_folder_alone(tmp_path):
    allowed, outside = tmp_path / "include", tmp_path / "outside"
    allowed.mkdir()
    outside.mkdir()
    (allowed / "header.h").write_text("text")
    (outside / "secret").write_text("secret")
    (allowed / "link").symlink_to(outside / "secret")
    command = (sys.executable, "-c", CONFINED, allowed, outside / "secret", outside)
    done = run(*command, OPENBLAS_NUM_THREADS="1", OMP_NUM_THREADS="1")
    assert (done.stdout, done.returncode) == ("confined\n", 0), done.stderr


# ---- the compiler --------------------------------------------------------------------------------


ENVIRONMENT = Pool._environment(None, None)


@pytest.fixture(scope="session")
def compiler():
    """The service's compiler, with NVRTC."""
    with Worker([*Pool.worker, "confined"], ENVIRONMENT) as made:
        made.greet(120.0)
        yield made


def compiled(compiler, source: str, entry: str = "k") -> dict:
    job = {"entry": entry, "arch": "90a", "debug": False}
    return compiler.ask(job, 120.0, source.encode())[0]


@needs_landlock
@needs_nvrtc
def test_a_source_includes_no_file_of_the_machine(compiler):
    for path in ("/etc/passwd", "/proc/self/environ", "/proc/self/maps", f"{ROOT}/README.md"):
        answer = compiled(compiler, f'#include "{path}"\n__global__ void k(float *x) {{}}')
        assert answer["status"] == "compile_error"
        assert f'cannot open source file "{path}"\n' in answer["message"]
        assert "root:" not in answer["message"]


LINES = (
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
)


@needs_landlock
@needs_nvrtc
def test_a_source_cannot_tell_whether_a_file_exists(compiler, tmp_path):
    """Neither by its path, nor by a path through it to a header that may be read."""
    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("file")
    (include, *_) = find_toolkit().include
    up = "/.." * len((tmp_path / "folder").parts[1:])
    for line in LINES:
        for tail in ("", "/x", f"{up}{include}/cuda_bf16.h", f"{up}/include/cuda_bf16.h"):
            answers = set()
            for name in ("file", "folder", "link", "none"):
                path = f"{tmp_path}/{name}{tail}"
                source = line.replace("PATH", path) + "\n__global__ void k(float *x) {}"
                said = json.dumps(compiled(compiler, source)).replace(path, "PATH")
                answers.add(re.sub(r" *\^", "^", said))
            assert len(answers) == 1, (line, tail, answers)


@needs_landlock
@needs_nvrtc
def test_a_confined_compiler_compiles_and_is_limited(compiler):
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
    text = Path(f"/proc/{compiler.pid}/limits").read_text()
    for column in (0, 1):  # NVRTC may lift soft limits
        limits = {line[:26].strip(): line[26:].split()[column] for line in text.splitlines()}
        assert limits["Max file size"] == limits["Max processes"] == "0"
        assert int(limits["Max address space"]) <= 16 << 30
    assert limits["Max cpu time"] == str(worker.COMPILER_SECONDS)
    assert "NoNewPrivs:\t1" in Path(f"/proc/{compiler.pid}/status").read_text()


def test_a_compiler_that_cannot_be_confined_does_not_start():
    code = """
import sys
from needle.kernels import landlock, worker
def version():
    raise landlock.LandlockError("there is none")
landlock.version = version
class Needle(worker.Needle):
    def confine(self):
        landlock.confine([])
worker.main(sys.argv[1:], Needle())
"""
    with Worker([sys.executable, "-c", code, "compiler"], ENVIRONMENT) as made:
        made.greet(60.0)
    with Worker([sys.executable, "-c", code, "confined"], ENVIRONMENT) as made:
        with pytest.raises(Ended, match="there is none"):
            made.greet(60.0)


def test_a_compiler_ends_when_its_processor_time_is_used():
    """Time may run out after an answer, or during a source that compiles for ever."""
    code = """
import sys, time
from needle.kernels import worker
class Needle(worker.Needle):
    def build(self, source, entry, arch, debug):
        end = time.process_time() + float(source)
        while time.process_time() < end:
            pass
        raise ValueError("worked")
worker.COMPILER_SECONDS = int(time.process_time()) + 3
worker.main(sys.argv[1:], Needle())
"""
    for seconds, how in (("2", "exit code 0"), ("9", "SIGKILL")):
        command = [sys.executable, "-c", code, "compiler"]
        with naming(seconds), Worker(command, ENVIRONMENT) as made:
            made.greet(60.0)
            for source in ("0", seconds):
                try:
                    assert compiled(made, source)["message"] == "worked"
                except Ended:
                    assert how == "SIGKILL"
            assert how in made.end()


def test_a_pool_has_a_confined_compiler_or_does_not_start(monkeypatch):
    roles = []

    class Recording(FakePool):
        def _starter(self, role, device=None):
            roles.append(role)
            return super()._starter("compiler" if role == "confined" else role, device)

    monkeypatch.setattr(landlock, "version", lambda: 1)
    for confined, role in ((True, "confined"), (False, "compiler")):
        with Recording(devices=[0], spares=0, confined=confined):
            assert roles[-2:] == ["runner", role]
    monkeypatch.undo()
    monkeypatch.setattr(landlock, "CREATE_RULESET", 9999)
    with pytest.raises(RuntimeError, match="has no Landlock"):
        FakePool(devices=[0], spares=0, confined=True)
