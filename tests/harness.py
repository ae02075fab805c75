"""Shared by the tests: devices, exact bits, memory, numerical gradients. Ops as data are in
needle.testing."""

import contextlib
import ctypes
import gc
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pytest

import needle as ndl
from needle import _C
from needle.models.pythia import Pythia, PythiaConfig
from needle.testing import Case, check

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = Path(_C.__file__).resolve().parent  # of the needle that is tested
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]
SANITIZED = hasattr(ctypes.CDLL(None), "__asan_init")  # below make asan
WITHOUT_PLOTS = f"{ROOT / 'tests/without_plots'}{os.pathsep}"  # before the rest of a PYTHONPATH
# For mpirun. Ranks that wait leave their processor to other tests.
OPEN_MPI = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_mpi_yield_when_idle": "1",
}


def device_of(name: str):
    return {"cpu": ndl.cpu, "cuda": ndl.cuda}[name]()


@contextlib.contextmanager
def naming(*case) -> Iterator[None]:
    """Name the case of a loop in the error of a test that fails at it."""
    try:
        yield
    except Exception as error:
        raise AssertionError(f"{' '.join(map(str, case))}: {error}") from error


def run(*command, cwd: Path = ROOT, **environment: str | None) -> subprocess.CompletedProcess:
    """Run a command and keep its output as text. A variable that is None is removed."""
    variables = os.environ | {name: str(value) for name, value in environment.items()}
    for name in (name for name, value in environment.items() if value is None):
        del variables[name]
    return subprocess.run(
        [*map(str, command)], cwd=cwd, env=variables, capture_output=True, text=True, timeout=300
    )


def python(code: str, **environment: str | None) -> subprocess.CompletedProcess:
    """Run `code` in a process of its own, with the needle that is tested here."""
    tests = Path(__file__).parent
    paths = {"PYTHONPATH": os.pathsep.join(map(str, (PACKAGE.parent, tests)))}
    return run(sys.executable, "-c", code, cwd=tests, **paths | environment)


def wait_for(condition: Callable[[], object], seconds: float = 60, pause: float = 0.01) -> None:
    """Wait until a condition holds."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(pause)


def state_of(pid: int) -> str | None:
    """Return the state of a process by /proc: R, S, T, Z; None where it is gone."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0]
    return None


def wait_until_gone(pid: int) -> None:
    wait_for(lambda: state_of(pid) in (None, "Z"))  # a zombie has no parent here that reaps it


def overwrite(path: Path, offset: int, content: bytes) -> None:
    """Write in place, and set the time of modification back."""
    status = path.stat()
    with open(path, "r+b") as file:
        file.seek(offset)
        file.write(content)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (status.st_size, status.st_mtime_ns)


def flip_bit(path: Path, place: int | None = None) -> None:
    """Change a bit of a byte of a file, by default of that in the middle."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2 if place is None else place] ^= 1
    path.write_bytes(data)


def copy_needle(folder: Path) -> None:
    """Copy the needle that is tested into a folder, without its CUDA backend."""
    shutil.copytree(
        PACKAGE, folder / "needle", ignore=shutil.ignore_patterns("_cuda*", "__pycache__")
    )


def core_objects() -> Path:
    """Return the folder of the core's objects; skip the test where `make lib` has made none."""
    folder = ROOT / "build" / f"temp.{sysconfig.get_platform()}-{sys.implementation.cache_tag}"
    if not (folder / "csrc").exists():
        pytest.skip("needle: no objects of the core here (make lib)")
    return folder


def shared_library(source: str, out: Path, *more: str | Path) -> None:
    """Compile a text in C, which may include the core's headers. more: words for the compiler."""
    command = ["cc", "-w", "-std=gnu17", "-O1", "-shared", "-fPIC", f"-I{ROOT / 'csrc'}"]
    command += ["-x", "c", "-", "-x", "none", "-o", out, *more]
    subprocess.run(command, input=source, text=True, check=True)


def blas_of_core() -> list[str]:
    """Return the words that link the BLAS of the core, which this process has loaded."""
    maps = Path("/proc/self/maps").read_text()
    found = sorted(set(re.findall(r"(/\S*lib(?:scipy_)?openblas\S*\.so\S*)", maps)))
    return [word for path in found for word in (path, f"-Wl,-rpath,{Path(path).parent}")]


def fake_gpus(folder: Path) -> None:
    """Copy the needle that is tested into a folder, with a CUDA backend that computes on the CPU
    (fake_cuda.c)."""
    built = core_objects()  # the CPU backend and the core beneath it, as `make lib` left them
    sources = [*ROOT.glob("csrc/cpu/*.c"), *ROOT.glob("csrc/*.c")]
    linked = [built / source.relative_to(ROOT).with_suffix(".o") for source in sources]
    linked += [*blas_of_core(), "-fvisibility=hidden", "-fopenmp", "-lm", "-Wl,-z,defs"]
    copy_needle(folder)
    source = f'#include "{ROOT / "tests/fake_cuda.c"}"'
    shared_library(source, folder / "needle" / "_cuda.so", *linked)


def in_thread(function: Callable, *arguments) -> Future:
    """Call a function in a thread of its own. `result(60)` waits for what it returns or raises."""
    future: Future = Future()

    def work() -> None:
        try:
            future.set_result(function(*arguments))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    return future


def nvrtc_missing() -> str | None:
    """Return the reason why no kernel can be compiled here, or None."""
    from needle.kernels.compile import find_toolkit

    try:
        find_toolkit()
    except RuntimeError as error:
        return f"needle: no NVRTC: {error}"
    return None


def attended(op: Callable, q: _C.NDArray, *rest) -> tuple[_C.NDArray, _C.NDArray]:
    """(o, lse) of attention_fwd or block_sparse_attention_fwd, o a new array."""
    o = _C.empty(q.shape, q.dtype, q.device)
    return o, op(q, *rest, o)


def attended_both_ways(
    q, k, v, dout, scale: float, causal: int = 1, lists=(), into=None, checked=True
):
    """(o, lse, [dq, dk, dv]) of attention, or with `lists` and the block of a mask at their end of
    block_sparse_attention. into: where o, dq, dk and dv shall lie. checked: the largest magnitude
    that it gives is compared with NumPy's, which takes long for many elements."""
    o, *gradients = into or [_C.empty(x.shape, x.dtype, x.device) for x in (q, q, k, v)]
    largest = _C.array(np.nan, "float32", q.device)
    last = scale, causal, None, None, *gradients, None, largest
    if not lists:
        lse = _C.attention_fwd(q, k, v, scale, causal, o)
        _C.attention_bwd(dout, q, k, v, o, lse, *last)
    else:
        lse = _C.block_sparse_attention_fwd(q, k, v, *lists[:3], lists[-1], scale, causal, o)
        _C.block_sparse_attention_bwd(dout, q, k, v, o, lse, *lists, *last)
    if checked:
        found = [np.abs(x.numpy().astype(np.float32)).max(initial=0) for x in gradients]
        np.testing.assert_equal(largest.item(), np.max(found), "the largest magnitude")
    return o, lse, gradients


def draw(seed: int, *shape) -> np.ndarray:
    """Normal numbers in float64 that float32 holds."""
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32).astype(np.float64)


def bits(array) -> np.ndarray:
    """The exact bits of an NDArray, so that NaN and the sign of zero count."""
    names = {"bfloat16": "uint16", "float16": "uint16", "float32": "int32"}
    if array.dtype in names:
        array = array.compact().view(names[array.dtype])
    return array.numpy()


def small_pythia(device=None, seed: int = 0, **changes) -> Pythia:
    """A Pythia of random numbers, small unless `changes` of its configuration say otherwise."""
    np.random.seed(seed)
    fields = dict(vocab_size=41, hidden_size=32, num_layers=2, num_heads=2, max_seq_len=96)
    return Pythia(PythiaConfig(**fields | changes), device=device)


def log_probabilities(model, ids: np.ndarray) -> np.ndarray:
    """Log-softmax (T, V) in float64 after each of some ids (T,)."""
    logits = model(ids[None].astype(np.int64))[0].numpy()[0].astype(np.float64)
    logits -= logits.max(1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(1, keepdims=True))


class Foreign:
    """An array whose DLPack export has an address without an owner, at which a kernel faults."""

    def __init__(self, array) -> None:
        self._array = array

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._array.__dlpack_device__()

    def __dlpack__(self, **options):
        capsule = self._array.__dlpack__()
        get = ctypes.pythonapi.PyCapsule_GetPointer
        get.restype, get.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
        ctypes.c_void_p.from_address(get(capsule, b"dltensor")).value = 0x10  # its data
        return capsule


def assert_same_parameters(one, other) -> None:
    left, right = (dict(model.named_parameters()) for model in (one, other))
    assert left.keys() == right.keys()
    for name, parameter in left.items():
        np.testing.assert_array_equal(parameter.numpy(), right[name].numpy(), err_msg=name)


def assert_same_bits(one, other, what: str = "") -> None:
    assert one.shape == other.shape and one.dtype == other.dtype, what
    np.testing.assert_array_equal(bits(one), bits(other), err_msg=what)


def assert_same_arrays(left: dict, right: dict) -> None:
    """Compare NumPy arrays by name."""
    assert left.keys() == right.keys()
    for name in left:
        np.testing.assert_array_equal(left[name], right[name], err_msg=name)


def close(got, expected, tolerance: float = 3e-6) -> None:
    """Compare within `tolerance` times the largest expected magnitude, at least 1."""
    got, expected = np.asarray(got, np.float64), np.asarray(expected, np.float64)
    assert got.shape == expected.shape
    scale = max(1.0, np.abs(expected).max(initial=0))
    np.testing.assert_allclose(got, expected, rtol=0, atol=tolerance * scale)


LIBC, M_PERTURB = ctypes.CDLL(None), -6  # of malloc.h


def poison(device, size: int = 1 << 12) -> None:
    """Fill memory that the next allocations will get with NaN, so that an output element that a
    kernel forgets to write is seen. The CPU's small blocks come from malloc, which need not give
    these again: glibc is told to fill all that it gives (bytes of 0xfe, the float -1.7e38)."""
    if hasattr(LIBC, "mallopt"):
        LIBC.mallopt(M_PERTURB, 0x01)
    sizes = [1, 33, size, 4 * size]
    if not device.is_host:  # small blocks that are released serve arrays of their size alone
        device.empty_cache()
        sizes.append(4 << 20)
    held = [_C.empty((n,), "float32", device) for n in sizes for _ in range(4)]
    for array in held:
        array.fill(float("nan"))


def check_numbers(case: Case, values: dict, written: dict, dtype: str) -> None:
    """`needle.testing.check`; below the sanitizers, whose matter is memory, in float32 alone."""
    if dtype == "float32" or not SANITIZED:
        check(case, values, written, dtype)


def live_bytes(device) -> int:
    """Bytes in arrays right now. Gradients that can be differentiated again hold their graph, which
    holds them: such cycles go when the collector runs."""
    gc.collect()
    return device.memory_stats()["live_bytes"]


# ---- a copy of the checkout ----------------------------------------------------------------------

LEFT_OUT = {".git", "runs", ".pytest_cache", ".hypothesis", ".ruff_cache"}
LEFT_OUT |= {"asan", "arm64", "check", "ci"}  # of build/, where others may write now


@contextlib.contextmanager
def copy_of_the_tree() -> Iterator[Path]:
    """Copy the checkout with its builds, without history, runs and virtual environments."""

    def left_out(folder: str, names: list[str]) -> list[str]:
        venvs = {name for name in names if Path(folder, name, "pyvenv.cfg").exists()}
        return [name for name in names if name in LEFT_OUT | venvs]

    with tempfile.TemporaryDirectory(prefix="needle-copy-") as folder:
        tree = Path(folder, "needle")
        shutil.copytree(ROOT, tree, ignore=left_out, symlinks=True)
        yield tree


def run_in_copy(tree: Path, *command) -> subprocess.CompletedProcess:
    """Run Python in a copy, with the needle that is there."""
    paths = os.pathsep.join(filter(None, [str(tree), os.environ.get("PYTHONPATH")]))
    more = {"PYTHONPATH": paths, "NEEDLE_CUDA": "0", "NEEDLE_TEST_SEED": "off"}
    return run(sys.executable, *command, cwd=tree, **more)


def build_copy(tree: Path) -> subprocess.CompletedProcess:
    """Compile a copy, all of it."""
    return run_in_copy(tree, "-W", "ignore", "setup.py", "-q", "build_ext", "--inplace")


# ---- numerical gradients -------------------------------------------------------------------------


def central_differences(
    f: Callable[..., float], arrays: list[np.ndarray], h: float = 1e-6
) -> Iterator:
    """d f / d array for each array, by central differences in float64."""
    arrays = [np.array(a, np.float64) for a in arrays]
    for array in arrays:
        gradient = np.zeros_like(array)
        for index in np.ndindex(array.shape):
            kept = array[index]
            array[index] = kept + h
            above = f(*arrays)
            array[index] = kept - h
            below = f(*arrays)
            array[index] = kept
            gradient[index] = (above - below) / (2 * h)
        yield gradient
