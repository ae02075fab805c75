"""A plugin of pytest: a fatal CUDA fault fails the test that made it, and no other.

The process is lost with its device. Under pytest-xdist a worker therefore ends after such a test
(exit code 75, as needle's programs), and xdist starts another for the rest: to it that is a crash,
and its own report of one is left out where the test's has come. In one process every later test of
the GPU fails, with the message of the first fault.
"""

import os

import pytest

import needle as ndl

EXIT_GPU_LOST = 75


def is_fatal(error: BaseException | None) -> bool:
    """True for a fault and for an error that follows from one."""
    return error is not None and (
        isinstance(error, ndl.CudaFatalError)
        or is_fatal(error.__cause__)
        or is_fatal(error.__context__)
    )


class LostDevice:
    def __init__(self, config: pytest.Config) -> None:
        self.in_worker = hasattr(config, "workerinput")
        self.tests: set[str] = set()  # that lost a device

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_teardown(self, item):
        """Waits for the GPU: a fault that is still pending is this test's, not the next one's."""
        try:
            return (yield)
        finally:
            if item.get_closest_marker("cuda") and not self.tests and ndl.cuda().enabled():
                ndl.cuda().synchronize()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item, call):
        report = yield
        if call.excinfo is not None and is_fatal(call.excinfo.value):
            report.lost_device = True  # a worker sends it along
        return report

    def pytest_runtest_logreport(self, report):
        if getattr(report, "lost_device", False):
            self.tests.add(report.nodeid)

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logfinish(self, nodeid):
        """End the worker: all reports of the test are sent."""
        if self.in_worker and self.tests:
            os._exit(EXIT_GPU_LOST)

    @pytest.hookimpl(optionalhook=True)
    def pytest_handlecrashitem(self, crashitem, report):
        if crashitem in self.tests:
            report.when, report.outcome, report.longrepr = "teardown", "passed", None
