"""The pool without a GPU, shared by the tests of a process (test_isolation.py has one with a
GPU)."""

import pytest
from fake_pool import SECONDS, FakePool


@pytest.fixture(scope="session")
def pool():
    with FakePool(devices=[0], timeout=SECONDS) as made:
        yield made
