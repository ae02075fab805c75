"""Fixtures: the pool without a GPU, where a test costs a process at most (test_isolation.py has one
with a GPU), and services."""

import pytest
import safetensors.numpy
from fake_pool import SECONDS, SHORT, FakePool
from serving import JOB, Client, MadeUpPool, X, running


@pytest.fixture(scope="session")
def pool():
    with FakePool(devices=[0], timeout=SECONDS, spares=0) as made:
        yield made


@pytest.fixture
def short(pool, monkeypatch):
    monkeypatch.setattr(pool, "timeout", SHORT)


@pytest.fixture
def made_up():
    return MadeUpPool()


@pytest.fixture
def client(made_up):
    """A service whose pool is made up."""
    with running(made_up) as found:
        yield found


@pytest.fixture(scope="session")
def served_pool():
    with FakePool(devices=[0], timeout=SECONDS, spares=0) as made, running(made) as found:
        yield found


@pytest.fixture
def fake(served_pool) -> Client:
    """A service whose pool is real, and whose kernels are Python functions. It is left as it was
    found: other tests count processes."""
    yield served_pool
    answer = served_pool.evaluate(JOB, safetensors.numpy.save({"x": X}))
    assert answer[1].get("status") == "ok", answer
    assert served_pool.service.held == served_pool.service.refused[500] == 0
