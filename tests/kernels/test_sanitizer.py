"""needle/kernels/sanitizer.py: reports as compute-sanitizer writes them."""

from needle.kernels.sanitizer import Finding, read_report, status_of

MEMCHECK = """\
========= COMPUTE-SANITIZER
========= Invalid __global__ write of size 4 bytes
=========     at store(float *, int)+0x90 in kernel.cu:5
=========     by thread (31,0,0) in block (2,1,0)
=========     Address 0x7f1ea0000080 is out of bounds
=========     and is 1 bytes after the nearest allocation at 0x7f1ea0000000 of size 128 bytes
=========     Saved host backtrace up to driver entry point at kernel launch time
=========         Host Frame: cuLaunchKernel [0x1234] in libcuda.so.1
=========
========= Invalid __global__ write of size 4 bytes
=========     at store(float *, int)+0x90 in kernel.cu:5
=========     by thread (30,0,0) in block (2,1,0)
=========     Address 0x7f1ea0000084 is out of bounds
=========
========= Invalid __shared__ read of size 8 bytes
=========     at void tile<float>(T1 *)+0x1f0
=========     by thread (0,0,0) in block (0,0,0)
=========     Address 0x4 is misaligned
=========
========= Program hit cudaErrorLaunchFailure (error 719) due to "unspecified launch failure"
=========     Saved host backtrace up to driver entry point at error
=========
========= Target application returned an error
========= ERROR SUMMARY: 4 errors
"""
RACECHECK = """\
========= COMPUTE-SANITIZER
========= Error: Race reported between Write access at sum(int *, int *)+0x80 in kernel.cu:14
=========     and Read access at sum(int *, int *)+0x250 in kernel.cu:20 [508 hazards]
=========
========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)
"""
SYNCCHECK = """\
========= COMPUTE-SANITIZER
========= Barrier error detected. Divergent thread(s) in block
=========     at half(int *)+0x90 in kernel.cu:3
=========     by thread (32,0,0) in block (0,0,0)
=========
========= ERROR SUMMARY: 1 error
"""
INITCHECK = """\
========= COMPUTE-SANITIZER
========= Uninitialized __global__ memory read of size 4 bytes
=========     at add(float *)+0x70 in kernel.cu:6
=========     by thread (65,0,0) in block (0,0,0)
=========     Address 0x7f0000000104
=========
========= ERROR SUMMARY: 1 error
"""


def test_memcheck():
    first, second = read_report(MEMCHECK)
    assert first == Finding(
        "Invalid __global__ write of size 4 bytes",
        "store(float *, int)",
        5,
        (31, 0, 0),
        (2, 1, 0),
        "Address 0x7f1ea0000080 is out of bounds; and is 1 bytes after the nearest allocation at "
        "0x7f1ea0000000 of size 128 bytes",
    )
    assert (second.where, second.line) == ("void tile<float>(T1 *)", 0)
    assert str(first).startswith(
        "Invalid __global__ write of size 4 bytes in store(float *, int), line 5, thread (31, 0, 0)"
        " of block (2, 1, 0): Address"
    )
    assert status_of([first]) == "out_of_bounds"
    assert status_of([second]) == "misaligned_address"


def test_the_other_tools():
    (race,) = read_report(RACECHECK)
    assert (race.what, race.line) == ("Race reported between Write access", 14)
    assert "Read access at sum(int *, int *)+0x250 in kernel.cu:20 [508 hazards]" in race.detail
    assert status_of([race]) == "wrong_result"
    (barrier,) = read_report(SYNCCHECK)
    assert (barrier.line, barrier.thread) == (3, (32, 0, 0))
    assert status_of([barrier]) == "launch_failure"
    (unset,) = read_report(INITCHECK)
    assert (unset.line, unset.thread, unset.where) == (6, (65, 0, 0), "add(float *)")
    assert status_of([unset]) == "wrong_result"


def test_nothing_found():
    text = "========= COMPUTE-SANITIZER\n========= ERROR SUMMARY: 0 errors\n"
    assert read_report(text) == [] and status_of([]) is None
    assert read_report("what a kernel printed\n") == []
