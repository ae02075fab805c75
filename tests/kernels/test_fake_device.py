"""csrc/python/kernel.c, graph.c and needle/kernels/kernel.py without a GPU: fake_cuda.c stands in.
Its memory is the host's, its one kernel fills an array, and it logs its calls."""

import subprocess
import sys

import pytest
from harness import fake_gpus, run
from kernel_sources import needs_nvrtc

BEGIN = """
import gc, os, sys
import numpy as np
import needle as ndl
from needle import _C, kernels
from needle.kernels.compile import Compiled
from needle.kernels.limits import Entry
from needle.kernels.signature import Signature

def log():
    gc.collect()
    with open(os.environ["FAKE_LOG"], "a+") as file:
        file.seek(0)
        lines = file.read().splitlines()
        file.truncate(0)
    return lines

signature = Signature.of_symbol("_Z4fillPffi", [(0, 8), (8, 4), (12, 4)])
facts = {"registers": 32, "shared_bytes": 1000, "arch": "90a", "signature": signature}
entry = Entry(name="fill", symbol="fill", **facts)
compiled = Compiled("90a", b"code", "", {"fill": entry, "gone": entry})
device = ndl.cuda()
assert device.runs_kernels and not device.is_host
module = kernels.load(compiled, device)
fill = module["fill"]
x = _C.empty((4,), "float32", device)
def raised(error, call):
    # The message of the error that a call raises.
    try:
        call()
    except error as found:
        return str(found)
    raise SystemExit("nothing was raised")

WAY = "fill grid {} block {} shared {} cluster {} cooperative {}".format
log()
"""


@pytest.fixture(scope="session")
def fake(tmp_path_factory):
    """A function that runs a script with needle beside the stand-in, and shows what failed."""
    folder = tmp_path_factory.mktemp("fake")
    fake_gpus(folder)

    def beside(script: str, **environment) -> subprocess.CompletedProcess:
        facts = {"PYTHONPATH": str(folder), "FAKE_LOG": str(folder / "log"), "OMP_NUM_THREADS": "1"}
        (folder / "log").unlink(missing_ok=True)
        words = (sys.executable, "-X", "dev", "-c", BEGIN + script)
        done = run(*words, cwd=folder, **facts | environment)
        assert done.returncode == 0, done.stderr
        return done

    return beside


def test_launch_arrives_as_it_was_asked_for(fake):
    """No more is done, and nothing is printed."""
    done = fake("""
fill(3, (4, 5), x, 2.5, 4)
fill((3, 2, 1), 32, x, 2.5, 4, shared=1 << 17, cluster=(3, 1), cooperative=True)
fill(np.int64(3), [4], x, 2.5, 4, shared=np.int32(5), cooperative=1)
assert [line for line in log() if line != "limits"] == [
    WAY("3 1 1", "4 5 1", 0, "0 0 0 0", 0),
    WAY("3 2 1", "32 1 1", 131072, "1 3 1 1", 1),
    WAY("3 1 1", "4 1 1", 5, "0 0 0 0", 1),
]
assert x.numpy().tolist() == [2.5] * 4
y = _C.empty((3, 4), "float32", device)
fill(1, 32, ndl.Tensor.from_ndarray(y[1:2]), 1.5, 4)
assert y.numpy()[1].tolist() == [1.5] * 4
""")
    assert "needle:" not in done.stderr


@needs_nvrtc
def test_declared_kernel_is_compiled_once(fake):
    fake("""
declared = module.kernel("fill", "float *x, const float value, int")
declared(1, 32, x, 1.5, 4)
assert x.numpy().tolist() == [1.5] * 4
Compiled.declared = None
assert module.kernel("fill", "float *x, const float value, int") is declared is not fill
""")


def test_way_to_launch_is_checked_once(fake):
    """A refused one is checked again. The driver has the occupancy."""
    fake("""
for _ in range(2):
    said = raised(kernels.LaunchError, lambda: fill(1, 2048, x, 1, 4))
    assert "2,048" in said and "1,024" in said
    assert log() == ["limits"]
for keywords in ({"shared": 8}, {"cluster": 1}, {"cooperative": True}):
    fill(1, 32, x, 1, 4, **keywords)
    assert log().count("limits") == 1
    fill(1, 32, x, 1, 4, **keywords)
    assert log().count("limits") == 0
report = fill.check(7, 250, shared=3000)
assert (report.blocks_per_sm, report.resident, report.occupancy) == (3, 396, 3 * 256 / 2048)
assert fill.check(132, 1024, cooperative=True).resident == 132
assert "holds 132 at once" in raised(
    kernels.LaunchError, lambda: fill(133, 1024, x, 1, 4, cooperative=True))
fill(132, 1024, x, 1, 4, cooperative=True)
""")


def test_local_memory_that_the_context_holds_stays_free_for_later_launches(fake):
    """The device has 3,971 bytes more for each thread that it can hold."""
    fake("""
import dataclasses
def launch(local):
    kernel = kernels.Kernel(module, dataclasses.replace(entry, local_bytes=local))
    kernel(1, 32, x, 1, 4)
assert "bytes of local memory" in raised(kernels.LaunchError, lambda: launch(5000))
for local in 4000, 16, 7900:
    launch(local)
assert "bytes of local memory" in raised(kernels.LaunchError, lambda: launch(12000))
""")


def test_launches_that_are_done_count_as_writes(fake):
    fake("""
before = x.written
for error, call in (
    (TypeError, lambda: fill(1, 32)),
    (TypeError, lambda: fill()),
    (TypeError, lambda: fill(1, 32, x, 1, 4, stream=0)),
    (TypeError, lambda: fill(1, 32, x, 1, 4.0)),
    (TypeError, lambda: fill(1, 32, _C.array([1.0]), 1, 4)),
    (TypeError, lambda: fill(None, 32, x, 1, 4)),
    (OverflowError, lambda: fill(1, 32, x, 1, 2**31)),
    (kernels.LaunchError, lambda: fill(10**40, 32, x, 1, 4)),
    (ValueError, lambda: fill(1, 32, x, 1, 4, shared=-1)),
):
    assert "fill" in raised(error, call)
assert x.written == before and [line for line in log() if line != "limits"] == []
fill(1, 32, x, 1, 4)
assert x.written == _C.writes() > before
said = raised(ndl.CudaError, lambda: fill(1, 32, x, 1, -1))
assert said == "fill: kernel launch: it refuses"
for symbol, counts in (("_Z4fillPffi", 1), ("_Z4fillPKffi", 0), ("fill", 1)):
    its = Signature.of_symbol(symbol, [(0, 8), (8, 4), (12, 4)])
    kernel = kernels.Kernel(module, Entry(name="fill", symbol="fill", arch="90a", signature=its))
    before = x.written
    kernel(1, 32, x, np.float32(1), np.int32(4))
    assert (x.written > before) == counts, symbol
""")


def test_code_lives_as_long_as_its_kernels_and_graphs(fake):
    fake("""
assert module["fill"] is fill and module.kernel("fill") is fill
del module
assert log() == []
fill(1, 32, x, 1, 4)
log()
del fill
assert log() == ["synchronize", "unload 0"]

def record():
    fill = kernels.load(compiled, device)["fill"]
    steps = [lambda: fill(1, 32, x, 3, 4)]
    return _C.Graph(device, lambda: steps and steps.pop()()), fill

graph, fill = record()
del fill
log()
graph.replay()
assert log() == []
del graph
assert log() == ["graph freed", "synchronize", "unload 1"]

def failing():
    kernels.load(compiled, device)["fill"](1, 32, x, 3, 4)
    raise ArithmeticError

raised(ArithmeticError, lambda: _C.Graph(device, failing))
assert log()[-3:] == ["graph freed", "synchronize", "unload 2"]
kernels.load(compiled, device)["fill"](1, 32, x, 3, 4)
assert log()[-1] == "unload 3"  # no graph holds it

def make():  # a cycle, of which the graph goes before the code that it launches
    fill = kernels.load(compiled, device)["fill"]
    held = {}
    def step():
        held.get("kernel", fill)(1, 32, x, 3, 4)
    held["kernel"], held["graph"] = fill, _C.Graph(device, step)

make()
assert log()[-3:] == ["graph freed", "synchronize", "unload 4"]
""")


def test_graph_replay_while_ops_are_synchronised_calls_the_step(fake):
    """A fault in a step that is replayed has to carry the name of its op."""
    fake("""
calls = []
def step():
    calls.append(1)
    fill(1, 32, x, 3, 4)

graph, counts = _C.Graph(device, step), []
for sync in False, True, False:
    _C.sync_each_op(sync)
    graph.replay()
    counts.append(len(calls))
assert counts == [1, 2, 2]
""")


def test_modules_and_kernels_that_cannot_be_had_or_are_stale(fake):
    fake("""
import dataclasses
bad = dataclasses.replace(compiled, cubin=b"bad code")
gone = dataclasses.replace(compiled, entries={"f": dataclasses.replace(entry, symbol="g")})
for made, said in ((lambda: kernels.load(bad, device), "Module: module: not machine code"),
                   (lambda: kernels.load(gone, device)["f"], "Kernel: no such symbol")):
    assert said.endswith(raised(ndl.CudaError, made))
before = device.generation, ndl.cpu().generation
ndl.cuda_reset()
assert (device.generation, ndl.cpu().generation) == (before[0] + 1, before[1])
y = _C.empty((4,), "float32", device)
for use in (lambda: fill(1, 32, y, 1, 4), lambda: kernels.Kernel(module, entry)):
    assert "was made before cuda_reset(); make it anew" in raised(RuntimeError, use)
log()
del module, fill
assert log() == []
kernels.load(compiled, device)["fill"](1, 32, y, 1, 4)
""")


def test_launch_waits_and_tells_where_that_is_asked_for(fake):
    fake("fill(1, 32, x, 1, 4)\nassert log()[-1] == 'synchronize'\n", NEEDLE_SYNC="1")
    done = fake("fill(1, 32, x, 1, 4)\n", NEEDLE_TRACE="1")
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("needle: fill ")]
    assert "cuda()" in line and "us  float*:float32(4)" in line
