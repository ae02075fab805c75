"""needle/kernels/worker.py: the status of each error, and the answers of the compiler."""

import pytest
from harness import naming, nvrtc_missing

from needle._C import CudaError, CudaFatalError
from needle.kernels import LaunchError
from needle.kernels.launch import Code
from needle.kernels.pool import Pool
from needle.kernels.worker import failure, status_of

pytestmark = pytest.mark.slow

FATAL = "scale: cudaStreamSynchronize: ... (%s): the CUDA context is lost and this process must end"
OUTSIDE = "cudaErrorLaunchFailure): parameter 1: element 8 is outside of 8"


def test_each_error_has_its_status():
    for name, status in (
        ("cudaErrorIllegalAddress", "illegal_address"),
        ("cudaErrorMisalignedAddress", "misaligned_address"),
        ("cudaErrorAssert", "assertion"),
        ("cudaErrorLaunchFailure", "launch_failure"),
        (OUTSIDE, "assertion"),
        ("cudaErrorIllegalInstruction", "launch_failure"),
        ("CUDA_ERROR_ILLEGAL_ADDRESS", "illegal_address"),
        ("cudaErrorLaunchTimeout", "timeout"),
        ("cudaErrorECCUncorrectable", "device_lost"),
    ):
        with naming(name):
            assert status_of(CudaFatalError(FATAL % name)) == status
    for error, status in (
        (
            CudaError("k: cuLaunchKernel: ... (CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES)"),
            "invalid_launch",
        ),
        (CudaError("allocate: out of memory on cuda(0): 9.0 MiB asked for"), "out_of_memory"),
        (CudaError("k: ... (cudaErrorMemoryAllocation)"), "out_of_memory"),
        (LaunchError("k: block (2048, 1, 1) has 2,048 threads"), "invalid_launch"),
        (TypeError("k: args[0]: must be an array"), "invalid_launch"),
        (KeyError("no kernel"), "invalid_launch"),
        (MemoryError(), "out_of_memory"),
    ):
        with naming(error):
            assert status_of(error) == status
    assert failure("out_of_memory", MemoryError())["message"] == "MemoryError"
    assert failure("invalid_launch", KeyError("no kernel 'x'"))["message"] == "no kernel 'x'"
    assert len(failure("crashed", ValueError("x" * 10**6))["message"]) == 64 << 10


TEMPLATE = """
#include <cuda_bf16.h>
template <class T> __global__ void k(const T* x, T* y, int n) { y[n] = x[n]; }
"""
LEAKS = 'extern "C" __global__ void leaks(float** p) { *p = new float[100]; }'


@pytest.mark.skipif(nvrtc_missing() is not None, reason=str(nvrtc_missing()))
def test_the_compiler_returns_code_and_parameters():
    job = {"arch": "90a", "debug": False}
    with Pool.__new__(Pool)._starter("compiler")() as worker:
        worker.greet(60)
        name = "k<__nv_bfloat16>"
        answer, block = worker.ask(job | {"entry": name}, 60, TEMPLATE.encode())
        code = Code.unpack(name, block)
        assert answer == {"status": "ok"} and not code.allocates
        assert code.resources["registers"] > 0 and code.resources["max_threads"] == 1024
        signature = "k<__nv_bfloat16>(__nv_bfloat16 const*, __nv_bfloat16*, int)"
        assert str(code.entry.signature) == signature
        _, block = worker.ask(job | {"entry": "leaks"}, 60, LEAKS.encode())
        assert Code.unpack("leaks", block).allocates
        answer, _ = worker.ask(job | {"entry": "k"}, 60, b"int 5;")
        assert answer["status"] == "compile_error" and "expected" in answer["message"]
