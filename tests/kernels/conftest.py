"""The pool without a GPU that the tests of this folder share: what they do to it costs it a process
at the most. (test_isolation.py has one with a GPU.)"""

import pytest
from fake_pool import SECONDS, SHORT, FakePool


@pytest.fixture(scope="session")
def pool():
    with FakePool(devices=[0], timeout=SECONDS, spares=0) as made:
        yield made


@pytest.fixture
def short(pool, monkeypatch):
    monkeypatch.setattr(pool, "timeout", SHORT)
