"""The ranks of a run: they exchange small values and bytes of arrays.

`Group()` is a single process, and uses the same code with world size 1. `Group(place, control)` is
all processes of a start (environment.py). Their control channel (control.py) carries small values
and names missing ranks. `connect` chooses the transport of arrays: peers.py between GPUs that map
each other's memory, nccl.py between others, mpi.py between processes of the CPU.

All ranks call each method, in the same order, unless it says otherwise.
"""

from __future__ import annotations

import abc
import contextlib
import platform
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn, Protocol

from needle._C import Device, NDArray, all_devices
from needle.backend_ndarray import choose_device
from needle.distributed import peers
from needle.distributed.control import DEADLINE, Control, RankFailed, Work
from needle.distributed.enqueued import Parts
from needle.distributed.environment import Place
from needle.distributed.nccl import Library, NCCLTransport

MPI_LAUNCHERS = "mpirun", "srun"
Wait = Callable[[], None]
ALONE = Place(0, 1, 0, 1, "")  # a process that no launcher started as a rank


class Transport(Protocol):
    def exchange(self, sends: Parts, receives: Parts) -> Work | None:
        """Return the work that a device still does; None if all is done."""

    def close(self) -> None: ...


class Ranks(abc.ABC):
    """Ranks that exchange arrays. rank: number of this process; size: number of ranks."""

    rank: int
    size: int

    @property
    def others(self) -> list[int]:
        """The numbers of the other ranks."""
        return [rank for rank in range(self.size) if rank != self.rank]

    @abc.abstractmethod
    def begin(self, name: str, sends: Parts, receives: Parts) -> Wait:
        """Send each array of `sends` to the rank before it, and fill those of `receives` from
        there: those between two ranks in their order, each of the size and the dtype of the sent
        one. Arrays are compact.

        A device works on beside the exchange, up to the call of the returned function: before it
        nothing may read what is received, nor write what is sent."""

    def exchange(self, name: str, sends: Parts, receives: Parts) -> None:
        """`begin`, and the device waits at once."""
        self.begin(name, sends, receives)()

    def all_gather(self, name: str, array: NDArray, shards: Sequence[Sequence[slice]]) -> None:
        """Fill an array, of which each rank has some slices (of its rows), with those of the
        others."""
        sends = [(rank, array[part]) for rank in self.others for part in shards[self.rank]]
        receives = [(rank, array[part]) for rank in self.others for part in shards[rank]]
        self.exchange(name, sends, receives)


class Group(Ranks):
    """The ranks of a run. place: of this one; control: the channel of small values."""

    def __init__(self, place: Place = ALONE, control: Control | None = None) -> None:
        self.rank, self.size, self.place = place.rank, place.size, place
        self.control = control or Control(ALONE, {}, DEADLINE)
        self._transport: Transport | None = None

    def device(self, name: str) -> Device:
        """Return the device that a command line names (`choose_device`); of one of several ranks
        the GPU of its local number, or the only visible one. ValueError if it has none."""
        place = self.place
        if place is ALONE or name == "cpu" or (name == "auto" and not visible_gpus()):
            return choose_device(name)
        if name not in ("auto", "cuda"):
            raise ValueError(
                f"--device {name}: each of {place.size} ranks takes a GPU of its own: leave it "
                "out, and choose by CUDA_VISIBLE_DEVICES"
            )
        count = visible_gpus()
        if 1 < count <= place.local_rank:
            raise ValueError(
                f"{place.launcher} started {place.local_size} ranks on {platform.node()}, where "
                f"{count} GPUs are visible: start at most {count} there"
            )
        return choose_device(f"cuda:{place.local_rank if count > 1 else 0}")

    def connect(self, device: Device) -> None:
        """Choose the transport of this device's arrays. ValueError if there is none, if two ranks
        have the same GPU, or if the ranks' products are not computed by the same library for the
        same processor."""
        if self.place is ALONE:
            return
        facts = device.properties()
        self.same("the kinds of devices", device.name)
        if device.is_host:
            self._transport = _mpi(self.place)
        else:
            self.same("the GPUs", facts["name"])
        self.same("the libraries of products", facts["products"])
        if device.is_host:
            return
        told = self.control.gather("the GPUs' numbers", [facts["uuid"], platform.node()])
        if any(told.count(one) > 1 for one in told):
            self._refuse(
                f"two ranks have the same GPU ({told}): start no more ranks on a machine than it "
                "has GPUs, and let each see all of them, or its own alone (CUDA_VISIBLE_DEVICES)"
            )
        if len({node for _, node in told}) == 1:
            self._transport = peers.connect(self.rank, self.size, device, self.control.gather)
        self._transport = self._transport or self._nccl(device)

    def _nccl(self, device: Device) -> Transport:
        library, control = Library(), self.control
        self.same("the versions of NCCL", library.version_text)
        unique = library.unique_id().hex() if self.rank == 0 else None
        unique = control.broadcast("the meeting point of NCCL", unique)
        with control.watched("the connection of the GPUs"):
            return NCCLTransport(library, self.rank, self.size, bytes.fromhex(unique), device)

    # ---- small values ---------------------------------------------------------------------------

    def gather(self, name: str, value: Any) -> list:
        """Return the JSON values of all ranks, in their order."""
        return self.control.gather(name, value)

    def same(self, what: str, value: str) -> None:
        """Raise ValueError on rank 0, and RankFailed on the others, if one has another value than
        rank 0. A rank may come later than the deadline."""
        values = self.control.gather(what, value, patient=True)
        for rank, theirs in enumerate(values):
            if theirs != values[0]:
                self._refuse(
                    f"rank {rank}: {what} differ from rank 0's ({theirs:.60}, and "
                    f"{values[0]:.60}), and the results would; all ranks need the same"
                )

    def _refuse(self, text: str) -> NoReturn:
        """Raise an error that all ranks meet, and that rank 0 reports."""
        raise ValueError(text) if self.rank == 0 else RankFailed(text)

    def first(self, name: str, make: Callable[[], Any]) -> Any:
        """Return to all what make() returns on rank 0; it may take any time. Its error is
        RankFailed on the others."""
        made = None
        with self.rank_0_first(name):
            if self.rank == 0:
                made = make()
        return self.control.broadcast(name, made)

    @contextlib.contextmanager
    def rank_0_first(self, name: str) -> Iterator[None]:
        """Run the block on rank 0, then on the others, which find what it has cached. Its error on
        rank 0 is RankFailed on the others."""
        problem = None
        if self.rank == 0:
            try:
                yield
            except BaseException as error:
                problem = str(error) or type(error).__name__
                raise
            finally:
                self.control.broadcast(name, problem)
            return
        problem = self.control.broadcast(name, patient=True)
        if problem is not None:
            raise RankFailed(f"rank 0: {problem}")
        yield

    # ---- arrays ---------------------------------------------------------------------------------

    def begin(self, name: str, sends: Parts, receives: Parts) -> Wait:
        if self._transport is None:
            return lambda: None
        with self.control.watched(name) as collective:
            work = self._transport.exchange(sends, receives)
            if work is None:
                return lambda: None
            collective.goes_on(work)
            return work.wait

    def close(self, reason: str | None = None, code: int = 1) -> None:
        """End the group. Without a reason all ranks call it, within the deadline. With a reason one
        rank calls it at any time, and the others end with this exit code (`Control.leave`)."""
        if reason is not None:
            self.control.leave(reason, code)
            return
        if self._transport is not None:
            with self.control.watched("the end"):
                self._transport.close()
        self.control.close()


class Subgroup(Ranks):
    """The run of `size` consecutive ranks of a group that this rank is in. All ranks of the group
    call its methods."""

    def __init__(self, group: Group, size: int) -> None:
        self._group, self._begin = group, group.rank // size * size
        self.rank, self.size = group.rank - self._begin, size

    def begin(self, name: str, sends: Parts, receives: Parts) -> Wait:
        there = [[(self._begin + r, x) for r, x in parts] for parts in (sends, receives)]
        return self._group.begin(name, *there)


def visible_gpus() -> int:
    """Return the number of usable GPUs, without creating a context."""
    return sum(device.name == "cuda" and device.enabled() for device in all_devices())


def _mpi(place: Place) -> Transport:
    if place.launcher not in MPI_LAUNCHERS:
        raise ValueError(
            f"{place.launcher} started {place.size} ranks on the CPU, where MPI connects them: "
            "start them with mpirun"
        )
    try:
        from needle.distributed.mpi import MPITransport
    except ImportError as error:
        raise ValueError(
            f"{place.size} ranks on the CPU need the package mpi4py ({error}): "
            "pip install mpi4py, into the environment of each"
        ) from error
    return MPITransport(place.rank, place.size)
