"""pytest learns here which tests can run on this machine, and in which order they do.

NEEDLE_TEST_SEED=n      repeats the order of a run that printed it; "off" keeps the written order
NEEDLE_REQUIRE_CUDA=1   no GPU is a failure, not a reason to skip
"""

import collections
import gc
import importlib.util
import os
import random
import signal
import sys
from pathlib import Path

import numpy as np
import pytest

# For `building`; an installed needle comes first.
sys.path.append(str(Path(__file__).resolve().parent.parent))
from harness import DEVICES, WITHOUT_PLOTS, device_of  # noqa: E402

import needle as ndl  # noqa: E402
from needle import _C  # noqa: E402


@pytest.fixture(params=DEVICES)
def device(request):
    """Each kind of device in turn. A test that names its devices itself gets those."""
    return device_of(request.param)


@pytest.fixture
def texts(tmp_path, monkeypatch):
    """A folder of 24 texts and of a file that is none; results are cached beside it."""
    monkeypatch.setenv("NEEDLE_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "texts"
    folder.mkdir()
    words = "def class import return self value for in range len print".split()
    random = np.random.RandomState(1)
    for number in range(24):
        lines = [" ".join(random.choice(words, 6)) for _ in range(12)]
        (folder / f"{number:02}.txt").write_text("\n".join(lines) + f"\nünïcode {number}\n")
    (folder / "picture.bin").write_bytes(bytes(range(256)))
    return folder


@pytest.fixture
def heeds_signals():
    """Below nohup SIGHUP is ignored, in a shell's background SIGINT, by a test's children too."""
    hangup = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    interrupt = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGHUP, hangup)
    signal.signal(signal.SIGINT, interrupt)


def order_seed() -> int | None:
    text = os.environ.get("NEEDLE_TEST_SEED", "").strip()
    if text == "off":
        return None
    if text and not text.isdigit():
        raise pytest.UsageError(f'NEEDLE_TEST_SEED={text!r} is neither a number nor "off"')
    return int(text) if text else random.SystemRandom().randrange(1_000_000)


SEED = order_seed()
# Workers of pytest-xdist, which inherit it, must all take the same order.
os.environ["NEEDLE_TEST_SEED"] = "off" if SEED is None else str(SEED)


def pytest_runtest_teardown(item: pytest.Item) -> None:
    """Wait for the GPU: a fault that is still pending is this test's, not the next one's."""
    if item.get_closest_marker("cuda") and ndl.cuda().enabled():
        ndl.cuda().synchronize()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo):
    """End the run after a fatal CUDA fault: the process is lost with its device."""
    report = yield
    if call.excinfo is not None and isinstance(call.excinfo.value, ndl.CudaFatalError):
        item.session.shouldstop = f"{item.nodeid} met a fatal CUDA fault, which loses the device"
    return report


def parity_missing() -> str | None:
    lacking = [name for name in ("torch", "transformers") if not importlib.util.find_spec(name)]
    return f"{' and '.join(lacking)} not installed (pip install .[parity])" if lacking else None


def pytest_sessionstart(session: pytest.Session) -> None:
    no_cuda = os.environ.get("NEEDLE_REQUIRE_CUDA", "0") == "1" and _C.cuda().reason()
    if no_cuda:
        raise pytest.UsageError(f"NEEDLE_REQUIRE_CUDA=1, but {no_cuda}")
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None:  # also with -q, which leaves pytest's own header out
        order = f"random, NEEDLE_TEST_SEED={SEED} repeats it" if SEED is not None else "as written"
        reporter.write_line(f"order of tests: {order}")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    no_cuda, no_parity = _C.cuda().reason(), parity_missing()
    for item in items:
        if no_cuda and item.get_closest_marker("cuda"):
            item.add_marker(pytest.mark.skip(reason=f"no GPU: {no_cuda}"))
        if no_parity and item.get_closest_marker("parity"):
            item.add_marker(pytest.mark.skip(reason=no_parity))
    if SEED is not None:
        random.Random(SEED).shuffle(items)


def pytest_collection_finish() -> None:
    """Exempt what is imported and collected from the collections of garbage that tests ask for.
    Processes that tests start have one thread, unless a test says more: bits are the same, and
    threads that spin would take the processors of other tests. They draw no plots."""
    gc.collect()
    gc.freeze()
    paths = WITHOUT_PLOTS + os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = paths.rstrip(os.pathsep)  # an empty place is the current folder
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # this process has read it


def pytest_terminal_summary(terminalreporter) -> None:
    """Print a line for each reason why tests were skipped."""
    skipped = terminalreporter.stats.get("skipped", [])
    reasons = collections.Counter(
        report.longrepr[2].removeprefix("Skipped: ")
        for report in skipped
        if isinstance(report.longrepr, tuple)
    )
    for reason, count in reasons.most_common():
        terminalreporter.write_line(f"{count} skipped: {reason}")
