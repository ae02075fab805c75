"""needle/distributed/nccl.py against a library that has NCCL's functions and no GPU."""

import ctypes.util
from pathlib import Path

import numpy as np
import pytest
from harness import run
from struck_runs import GPURuns

from needle import _C
from needle.distributed.control import RankError
from needle.distributed.nccl import Library, NCCLTransport

pytestmark = pytest.mark.slow


@pytest.fixture(scope="session")
def library(tmp_path_factory):
    made = tmp_path_factory.mktemp("fake") / "libnccl.so.2"
    source = Path(__file__).with_name("fake_nccl.c")
    assert run("cc", "-shared", "-fPIC", "-o", made, source).returncode == 0
    return made


@pytest.fixture(autouse=True)
def pipes(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path_factory.mktemp("pipes")))


# ---- the library ---------------------------------------------------------------------------------


def test_a_missing_library_names_its_package(tmp_path, library, monkeypatch):
    words = r"GPUs that do not .* need NCCL.*pip install nvidia-nccl-cu13"
    with pytest.raises(ValueError, match=words):
        Library(str(tmp_path / "libnccl.so.2"))
    other = ctypes.util.find_library("m")
    with pytest.raises(ValueError, match="ncclGetVersion.*pip install"):
        Library(other)
    monkeypatch.setenv("FAKE_NCCL_VERSION", "21705")
    with pytest.raises(ValueError, match=r"is NCCL 2\.17\.5, and needle needs 2\.18 or newer"):
        Library(str(library))


@pytest.mark.parametrize("call", ["ncclGetUniqueId", "ncclCommInitRank", "ncclSend", "ncclRecv"])
def test_an_error_has_the_words_of_nccl(library, monkeypatch, call):
    monkeypatch.setenv("FAKE_NCCL_FAILS", call)
    words = rf"NCCL: {call}: unhandled system error \(the cable is out\): NCCL_DEBUG=INFO"
    with pytest.raises(RankError, match=words) as caught:
        made = Library(str(library))
        transport = NCCLTransport(made, 0, 2, made.unique_id(), _C.cpu())
        array = _C.array(np.zeros(3))
        transport.exchange([(1, array)], [(1, array.copy())])
    assert caught.value.code == 75


# ---- an exchange ---------------------------------------------------------------------------------


@pytest.fixture
def transport(library):
    """That of one process alone."""
    made = Library(str(library))
    return NCCLTransport(made, 0, 1, made.unique_id(), _C.cpu())


def test_arrays_that_cannot_be_sent(transport):
    array = _C.array(np.zeros((4, 4)))
    with pytest.raises(ValueError, match="rank 0 must be compact, on c"):
        transport.exchange([(0, array.permute((1, 0)))], [])
    transport._device = _C.cuda()
    with pytest.raises(ValueError, match="rank 0 must be compact, on c"):
        transport.exchange([(0, array)], [])


def test_exchange_keeps_its_arrays_until_it_is_waited_for(library):
    made, device = Library(str(library)), _C.cpu()
    transport = NCCLTransport(made, 0, 2, made.unique_id(), device)
    live = lambda: device.memory_stats()["live_bytes"]
    before = live()
    sends = [(1, _C.array(np.zeros(1000)))]
    work = transport.exchange(sends, [])
    del sends[:]
    assert live() >= before + 4000
    work.wait()
    assert live() == before


def test_an_error_after_the_call_is_found_by_polling(transport, monkeypatch):
    transport.look()
    monkeypatch.setenv("FAKE_NCCL_FAILS", "ncclCommGetAsyncError")
    with pytest.raises(RankError, match="NCCL: an exchange: unhandled system error"):
        transport.look()


# ---- trainings -----------------------------------------------------------------------------------


def test_gpus_change_no_byte(tmp_path, tokens, library):
    runs = GPURuns(tmp_path, tokens, FAKE_NCCL=str(library))
    for name, gpus in ("one", 1), ("two", 2):
        runs.run(name, gpus)
    assert runs.written("two") == runs.written("one")
