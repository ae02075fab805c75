"""needle/kernels/worker.py: what an error means."""

import pytest

from needle._C import CudaError, CudaFatalError
from needle.kernels.isolate import STATUSES
from needle.kernels.limits import LaunchError
from needle.kernels.worker import STATUS, failure, status_of

FATAL = "scale: cudaStreamSynchronize: ... (%s): the CUDA context is lost and this process must end"


@pytest.mark.parametrize(
    "error, status",
    [
        (CudaFatalError(FATAL % "cudaErrorIllegalAddress"), "illegal_address"),
        (CudaFatalError(FATAL % "cudaErrorMisalignedAddress"), "misaligned_address"),
        (CudaFatalError(FATAL % "cudaErrorAssert"), "assertion"),
        (CudaFatalError(FATAL % "cudaErrorLaunchFailure"), "launch_failure"),
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
