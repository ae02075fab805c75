"""Services for the tests of needle.kernels.serve."""

import pytest
from fake_pool import FakePool
from serving import MadeUpPool, running


@pytest.fixture
def made_up():
    return MadeUpPool()


@pytest.fixture
def client(made_up):
    with running(made_up) as found:
        yield found


@pytest.fixture(scope="session")
def fake():
    """A real Pool, whose kernels are Python functions."""
    with FakePool(devices=[0], timeout=20.0, spares=0) as pool, running(pool) as found:
        yield found
