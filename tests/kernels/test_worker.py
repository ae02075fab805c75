"""needle/kernels/worker.py: what an error means, and what a compiler answers."""

import pytest

from needle._C import CudaError, CudaFatalError
from needle.kernels.compile import find_toolkit
from needle.kernels.frames import COMPILED, READY, STATUSES
from needle.kernels.isolate import Pool
from needle.kernels.limits import LaunchError
from needle.kernels.worker import STATUS, failure, status_of

pytestmark = pytest.mark.slow

FATAL = "scale: cudaStreamSynchronize: ... (%s): the CUDA context is lost and this process must end"


@pytest.mark.parametrize(
    "error, status",
    [
        (CudaFatalError(FATAL % "cudaErrorIllegalAddress"), "illegal_address"),
        (CudaFatalError(FATAL % "cudaErrorMisalignedAddress"), "misaligned_address"),
        (CudaFatalError(FATAL % "cudaErrorAssert"), "assertion"),
        (CudaFatalError(FATAL % "cudaErrorLaunchFailure"), "launch_failure"),
        (
            CudaFatalError(
                FATAL % "cudaErrorLaunchFailure): parameter 1: element 8 is outside of 8"
            ),
            "assertion",
        ),
        (CudaFatalError(FATAL % "cudaErrorIllegalInstruction"), "launch_failure"),
        (CudaFatalError(FATAL % "cudaErrorHardwareStackError"), "launch_failure"),
        (CudaFatalError(FATAL % "cudaErrorTensorMemoryLeak"), "launch_failure"),
        (CudaFatalError(FATAL % "CUDA_ERROR_ILLEGAL_ADDRESS"), "illegal_address"),
        (CudaFatalError(FATAL % "cudaErrorLaunchTimeout"), "timeout"),
        (CudaFatalError(FATAL % "cudaErrorECCUncorrectable"), "device_lost"),
        (
            CudaError("k: cuLaunchKernel: ... (CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES)"),
            "invalid_launch",
        ),
        (CudaError("allocate: out of memory on cuda(0): 9.0 MiB asked for"), "out_of_memory"),
        (CudaError("k: ... (cudaErrorMemoryAllocation)"), "out_of_memory"),
        (LaunchError("k: block (2048, 1, 1) has 2,048 threads"), "invalid_launch"),
        (TypeError("k: args[0]: must be an array"), "invalid_launch"),
        (ValueError("k: parameter 1"), "invalid_launch"),
        (KeyError("no kernel"), "invalid_launch"),
        (MemoryError(), "out_of_memory"),
    ],
)
def test_each_error_has_its_status(error, status):
    assert status_of(error) == status
    assert set(STATUS.values()) < set(STATUSES)


def test_a_failure_has_a_text():
    assert failure("out_of_memory", MemoryError())["message"] == "MemoryError"
    assert failure("invalid_launch", KeyError("no kernel 'x'"))["message"] == "no kernel 'x'"
    assert len(failure("crashed", ValueError("x" * 10**6))["message"]) == 64 << 10


def has_nvrtc() -> bool:
    try:
        find_toolkit()
    except RuntimeError:
        return False
    return True


TEMPLATE = """
#include <cuda_bf16.h>
template <class T> __global__ void k(const T* x, T* y, int n) { y[n] = x[n]; }
"""
LEAKS = 'extern "C" __global__ void leaks(float** p) { *p = new float[100]; }'


@pytest.mark.skipif(not has_nvrtc(), reason="no NVRTC here")
def test_the_compiler_says_what_the_pool_needs():
    """The very process, without a GPU: machine code, parameters, and whether it allocates."""
    pool = Pool.__new__(Pool)
    worker = pool._starter("compiler")()
    try:
        worker.greet(60, READY)
        ask = {"entry": "k<__nv_bfloat16>", "arch": "90a"}
        answer, code = worker.ask(ask, TEMPLATE.encode(), (), 60, COMPILED)
        assert answer["status"] == "ok" and not answer["allocates"] and len(code) > 1000
        assert answer["resources"]["registers"] > 0 and answer["resources"]["max_threads"] == 1024
        assert answer["parameters"] == [
            {"type": "__nv_bfloat16 const*", "const": True},
            {"type": "__nv_bfloat16*", "const": False},
            {"type": "int", "const": True},
        ]
        answer, _ = worker.ask({"entry": "leaks", "arch": "90a"}, LEAKS.encode(), (), 60, COMPILED)
        assert answer["allocates"] and answer["parameters"] == [{"type": "", "const": None}]
        answer, _ = worker.ask({"entry": "k", "arch": "90a"}, b"int 5;", (), 60, COMPILED)
        assert answer["status"] == "compile_error" and "expected" in answer["message"]
    finally:
        worker.kill()
        worker.end()
        worker.close()
