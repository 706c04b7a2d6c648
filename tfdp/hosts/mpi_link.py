"""`MpiLink`: tensors by the site's MPI, everything else over sockets.

MPI moves arrays through shared memory within a machine and over the fabric that it was
built for between machines. It cannot tell who is missing, and waits by spinning; so the
workers first come together on the socket ring, where waiting costs nothing and has a
deadline, and only then call MPI.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from absl import logging

from tfdp.cluster.description import join_address
from tfdp.errors import ConfigurationError, MissingDependencyError
from tfdp.hosts.buffers import views_of
from tfdp.hosts.handshake import session_secret
from tfdp.hosts.host_link import Ranges
from tfdp.hosts.rounded_wire import part_edges, round_to, wire_type
from tfdp.hosts.socket_link import SocketLink
from tfdp.hosts.wire import free_port

__all__ = ["MpiLink", "mpi_is_available"]

# Types that MPI adds up by itself; float16 and bfloat16 go over the sockets.
MPI_TYPES = frozenset("fdilq") | frozenset("bBhHILQ")
EXIT_CODE = 70
LOOPBACK = "127.0.0.1"
SESSION_BYTES = 32
# Open MPI asks for the next message again and again. Told this before it starts, it
# gives way to other threads in between: backprop runs on while a bucket travels.
GIVES_WAY = "OMPI_MCA_mpi_yield_when_idle"
# Open MPI takes scratch memory of half an array for every call, and the C library gives
# what is above 128 KiB back to the system each time: then every 4 KB cost a page fault
# again. Within one machine small pieces also stay in the cache from the addition to the
# next reader; over a network each call costs round trips, so that pieces are larger.
ONE_MACHINE_PIECE_BYTES = 192 * 2**10
NETWORK_PIECE_BYTES = 4 * 2**20


def mpi_is_available() -> bool:
    """Whether mpi4py is installed and this process was started by an MPI launcher."""
    launched = {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_RANK"} & os.environ.keys()
    if not launched:
        return False
    try:
        import mpi4py  # noqa: F401
    except ImportError:
        return False
    return True


class MpiLink(SocketLink):
    """A `HostLink` whose exchanges are MPI's, array by array, without a flat buffer.

    Args:
      rank, workers: as MPI has them.
      coordinator: "host:port" of worker 0; None: MPI tells it to the others.
      silence_seconds, secret: see `SocketLink`; MPI brings a key of its own besides.
      timeout_seconds: see `HostLink`; it holds for coming together. A worker that
        dies within an MPI call ends all others with exit code 70, because MPI's calls
        cannot be ended otherwise.

    Raises:
      MissingDependencyError: when mpi4py or an MPI library is not there.
      ConfigurationError: when MPI knows another rank or number of workers.
    """

    name = "mpi"

    def __init__(
        self,
        rank: int,
        workers: int,
        coordinator: str | None,
        timeout_seconds: float,
        silence_seconds: float = 15.0,
        secret: bytes = b"",
    ):
        os.environ.setdefault(GIVES_WAY, "1")
        try:
            from mpi4py import MPI
        except ImportError as error:
            raise MissingDependencyError(
                "Communication(engine='mpi') needs mpi4py and an MPI library: pip "
                "install 'tfdp[mpi]', and start with `mpiexec -n 2 python script.py` "
                "or `tfdp launch --mpi`."
            ) from error
        self._world: Any = MPI.COMM_WORLD
        self._sum_operation = MPI.SUM
        self._in_place = MPI.IN_PLACE
        if (self._world.rank, self._world.size) != (rank, workers):
            raise ConfigurationError(
                f"The cluster says worker {rank} of {workers}, MPI says "
                f"{self._world.rank} of {self._world.size}. Start the workers with "
                "mpiexec (or `tfdp launch --mpi`)."
            )
        neighbours = self._world.Split_type(MPI.COMM_TYPE_SHARED)
        self._shares_machine = neighbours.size == workers
        self._piece_bytes = (
            ONE_MACHINE_PIECE_BYTES if self._shares_machine else NETWORK_PIECE_BYTES
        )
        neighbours.Free()
        self._is_in_mpi = False
        super().__init__(
            rank,
            workers,
            coordinator or self._share_address(),
            timeout_seconds,
            silence_seconds,
            session_secret(secret, self._share_session()),
        )

    def sum(
        self,
        arrays: Sequence[np.ndarray],
        label: str,
        channel: str = "step",
        wire_dtype: str | None = None,
    ) -> list[np.ndarray]:
        """See `HostLink.sum`."""
        if channel != "step" or arrays[0].dtype.char not in MPI_TYPES:
            return super().sum(arrays, label, channel, wire_dtype)
        arrays = [np.asarray(array, order="C") for array in arrays]
        outputs = views_of(self._pool, arrays)
        with self._in_mpi("mpi sum", arrays, label):
            if wire_dtype is None:
                for array, output in zip(arrays, outputs, strict=True):
                    self._sum_in_pieces(array.reshape(-1), output.reshape(-1))
            else:
                self._sum_rounded(arrays, outputs, wire_type(wire_dtype))
        return outputs

    def reduce_scatter(
        self,
        arrays: Sequence[np.ndarray],
        ranges: Ranges,
        label: str,
        wire_dtype: str | None = None,
    ) -> list[np.ndarray]:
        """See `HostLink.reduce_scatter`; 16 bits travel over the sockets."""
        if arrays[0].dtype.char not in MPI_TYPES or wire_dtype is not None:
            return super().reduce_scatter(arrays, ranges, label, wire_dtype)
        arrays = [np.asarray(array, order="C") for array in arrays]
        own = [
            array[slice(*of_array[self.rank])]
            for array, of_array in zip(arrays, ranges, strict=True)
        ]
        outputs = views_of(self._pool, own)
        with self._in_mpi("mpi scat", arrays, label):
            for array, output, of_array in zip(arrays, outputs, ranges, strict=True):
                counts = [stop - start for start, stop in of_array]
                self._world.Reduce_scatter(array, output, counts, self._sum_operation)
        return outputs

    def all_gather(
        self,
        pieces: Sequence[np.ndarray],
        ranges: Ranges,
        label: str,
        channel: str = "step",
    ) -> list[np.ndarray]:
        """See `HostLink.all_gather`."""
        if channel != "step" or pieces[0].dtype.char not in MPI_TYPES:
            return super().all_gather(pieces, ranges, label, channel)
        wholes = self._wholes_with_own(pieces, ranges)
        with self._in_mpi("mpi shar", wholes, label):
            for whole, of_array in zip(wholes, ranges, strict=True):
                counts = [stop - start for start, stop in of_array]
                self._world.Allgatherv(self._in_place, [whole, counts])
        return wholes

    @contextlib.contextmanager
    def _in_mpi(
        self, kind: str, arrays: Sequence[np.ndarray], label: str
    ) -> Iterator[None]:
        with self._exchange(label, "step") as ring:
            self._agree(ring, kind, sum(a.nbytes for a in arrays), label)
            self._is_in_mpi = True
            try:
                yield
            finally:
                self._is_in_mpi = False

    def _sum_rounded(
        self,
        arrays: Sequence[np.ndarray],
        outputs: Sequence[np.ndarray],
        wire: np.dtype,
    ) -> None:
        """The sums of numbers that were rounded to 16 bits before they travelled.

        MPI has no 16-bit floats to add: it carries the bits, and each worker adds a
        part of every piece, in the order of the ranks. All arrays go in one.
        """
        flat = np.concatenate([round_to(wire, array.reshape(-1)) for array in arrays])
        elements = NETWORK_PIECE_BYTES // wire.itemsize
        for start in range(0, flat.size, elements):
            self._sum_piece(flat[start : start + elements], arrays[0].dtype)
        start = 0
        for output in outputs:
            output[...] = flat[start : start + output.size].reshape(output.shape)
            start += output.size

    def _sum_piece(self, piece: np.ndarray, dtype: np.dtype) -> None:
        edges = part_edges(piece.size, self.workers)
        counts = np.diff(edges)
        own = int(counts[self.rank])
        parts = np.empty((self.workers, own), piece.dtype)
        places = [own * rank for rank in range(self.workers)]
        bits, all_bits = piece.view(np.uint16), parts.view(np.uint16)
        self._world.Alltoallv(
            [bits, (counts, edges[:-1])],
            [all_bits, ([own] * self.workers, places)],
        )
        total = parts[0].astype(dtype)
        with np.errstate(invalid="ignore"):  # infinities are for loss scaling to find
            for part in parts[1:]:
                total += part.astype(dtype)
        mine = round_to(piece.dtype, total).view(np.uint16)
        self._world.Allgatherv(mine, [bits, (counts, edges[:-1])])

    def _sum_in_pieces(self, array: np.ndarray, output: np.ndarray) -> None:
        elements = self._piece_bytes // array.itemsize
        for start in range(0, array.size, elements):
            piece = slice(start, start + elements)
            self._world.Allreduce(array[piece], output[piece], self._sum_operation)

    def _share_address(self) -> str:
        address = None
        if self._world.rank == 0:
            host = LOOPBACK if self._shares_machine else _own_address()
            address = join_address(host, free_port())
        return str(self._world.bcast(address))

    def _share_session(self) -> bytes:
        """A secret of this run that MPI has brought to every worker."""
        own = secrets.token_bytes(SESSION_BYTES) if self._world.rank == 0 else None
        return bytes(self._world.bcast(own))

    def close_channels(self) -> None:
        """See `SocketLink.close_channels`."""
        super().close_channels()
        if self._is_in_mpi:
            logging.error(
                "tfdp: Worker %d was in an MPI call when %s. This process ends.",
                self.rank,
                self._membership.failure,
            )
            sys.stderr.flush()
            os._exit(EXIT_CODE)


def _own_address() -> str:
    """This machine's address as others see it; loopback where it has no other."""
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return "127.0.0.1"
