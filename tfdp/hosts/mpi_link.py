"""`MpiLink`: a `HostLink` whose tensors use the site's MPI, all else sockets.

MPI cannot name missing workers and waits by spinning, so workers synchronize on the
socket ring first, with a deadline and without load, and only then call MPI. MPI calls
cannot be interrupted, nor can MPI's finalization at process exit. So a worker in a call
that will not end, or one that exits after a failed exchange, logs why and aborts.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from absl import logging

from tfdp.cluster.addresses import LOOPBACK, free_port
from tfdp.cluster.description import join_address
from tfdp.cluster.worker_names import name_workers
from tfdp.errors import CollectiveError, ConfigurationError, MissingDependencyError
from tfdp.hosts.buffers import put_own, views_of, wholes_of
from tfdp.hosts.connect import SESSION_BYTES, session_secret
from tfdp.hosts.host_link import Arrays, Packed, Ranges
from tfdp.hosts.ring import part_edges, round_to, wire_type
from tfdp.hosts.server_guard import source_address
from tfdp.hosts.socket_link import SocketLink

# Types that MPI can add; float16 and bfloat16 use the sockets.
MPI_TYPES = frozenset("fdilq") | frozenset("bBhHILQ")
EXIT_CODE = 70
ABORT_SECONDS = 5.0
# Open MPI polls for messages. With this variable, set before it starts, it yields to
# other threads in between: backprop continues while a bucket travels.
YIELDS = "OMPI_MCA_mpi_yield_when_idle"
# Open MPI allocates half an array per call, and the C library returns blocks above
# 128 KiB to the system: then each 4 KB costs a page fault again. Within a machine small
# pieces also stay in the cache; over a network calls cost round trips.
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
    """A `HostLink` whose exchanges use MPI, array by array, without a flat buffer.

    Without a `coordinator`, worker 0 sends its address through MPI. A worker in a call
    that cannot end (a worker has died, left or given up, or `timeout_seconds` have
    passed) logs that and aborts the job with exit code 70; so does one with an error.

    Raises:
      MissingDependencyError: mpi4py or an MPI library is missing.
      ConfigurationError: MPI's rank or number of workers differs.
    """

    name = "mpi"
    step_channels = ("step",)  # other channels use sockets

    def __init__(
        self,
        rank: int,
        workers: int,
        coordinator: str | None,
        timeout_seconds: float,
        silence_seconds: float = 15.0,
        secret: bytes = b"",
    ):
        os.environ.setdefault(YIELDS, "1")
        try:
            from mpi4py import MPI
            from mpi4py.run import set_abort_status
        except ImportError as error:
            raise MissingDependencyError(
                "Communication(engine='mpi') needs mpi4py and an MPI library: pip "
                "install 'tfdp[mpi]', and start with `mpiexec -n 2 python script.py` "
                "or `tfdp launch --mpi`."
            ) from error
        self._world: Any = MPI.COMM_WORLD
        self._sum_operation, self._in_place = MPI.SUM, MPI.IN_PLACE
        self._mpi_error, self._set_abort_status = MPI.Exception, set_abort_status
        if (self._world.rank, self._world.size) != (rank, workers):
            raise ConfigurationError(
                f"The cluster says worker {rank} of {workers}, MPI says "
                f"{self._world.rank} of {self._world.size}. Start the workers with "
                "mpiexec (or `tfdp launch --mpi`)."
            )
        neighbours = self._world.Split_type(MPI.COMM_TYPE_SHARED)
        self._is_one_machine = neighbours.size == workers
        neighbours.Free()
        self._piece_bytes = (
            ONE_MACHINE_PIECE_BYTES if self._is_one_machine else NETWORK_PIECE_BYTES
        )
        # Number and label of the exchange in MPI; when MPI last returned.
        self._mpi_exchange: tuple[int, str] | None = None
        self._mpi_answered = 0.0
        self._cannot_enter: str | None = None
        self._mpi_state = threading.Condition()
        self._mpi_sent_bytes = 0
        coordinator = coordinator or self._share_address()
        # A key of this run, in addition to the job's.
        session = bytes_of_first(self._world, secrets.token_bytes(SESSION_BYTES))
        secret = session_secret(secret, session)
        super().__init__(
            rank, workers, coordinator, timeout_seconds, silence_seconds, secret
        )

    def sum(
        self,
        arrays: Arrays,
        label: str,
        channel: str = "step",
        wire_dtype: str | None = None,
        packed: Packed = (),
    ) -> list[np.ndarray]:
        if channel != "step" or arrays[0].dtype.char not in MPI_TYPES:
            return super().sum(arrays, label, channel, wire_dtype, packed)
        arrays = [np.asarray(array, order="C") for array in arrays]
        outputs = views_of(self._pool, arrays)
        with self._in_mpi("mpi sum", arrays, label, wire_dtype, packed):
            if wire_dtype is None:
                for array, output in zip(arrays, outputs, strict=True):
                    self._sum_in_pieces(array.reshape(-1), output.reshape(-1))
            else:
                self._sum_rounded(arrays, outputs, wire_type(wire_dtype))
        return outputs

    def reduce_scatter(
        self, arrays: Arrays, ranges: Ranges, label: str, wire_dtype: str | None = None
    ) -> list[np.ndarray]:
        """Does `HostLink.reduce_scatter` by MPI; 16-bit types use the sockets."""
        if arrays[0].dtype.char not in MPI_TYPES or wire_dtype is not None:
            return super().reduce_scatter(arrays, ranges, label, wire_dtype)
        arrays = [np.asarray(array, order="C") for array in arrays]
        own = [
            array[slice(*of_array[self.rank])]
            for array, of_array in zip(arrays, ranges, strict=True)
        ]
        outputs = views_of(self._pool, own)
        with self._in_mpi("mpi scatter", arrays, label, None, ranges):
            for array, output, of_array in zip(arrays, outputs, ranges, strict=True):
                counts = [stop - start for start, stop in of_array]
                self._world.Reduce_scatter(array, output, counts, self._sum_operation)
                self._note_answer(array.nbytes)
        return outputs

    def all_gather(
        self, pieces: Arrays, ranges: Ranges, label: str, channel: str = "step"
    ) -> list[np.ndarray]:
        if channel != "step" or pieces[0].dtype.char not in MPI_TYPES:
            return super().all_gather(pieces, ranges, label, channel)
        wholes = wholes_of(self._pool, pieces, ranges)
        put_own(wholes, pieces, ranges, self.rank)
        with self._in_mpi("mpi shards", wholes, label, None, ranges):
            for whole, of_array in zip(wholes, ranges, strict=True):
                counts = [stop - start for start, stop in of_array]
                self._world.Allgatherv(self._in_place, [whole, counts])
                self._note_answer(whole.nbytes)
        return wholes

    def all_to_all(self, rows: np.ndarray, label: str) -> np.ndarray:
        if rows.dtype.char not in MPI_TYPES:
            return super().all_to_all(rows, label)
        rows = np.asarray(rows, order="C")
        (output,) = views_of(self._pool, [rows])
        with self._in_mpi("mpi all to all", [rows], label, None):
            self._world.Alltoall(rows, output)
            self._note_answer(rows.nbytes)
        return output

    @contextlib.contextmanager
    def _in_mpi(
        self,
        kind: str,
        arrays: Arrays,
        label: str,
        wire_dtype: str | None,
        parts: Packed | Ranges = (),
    ) -> Iterator[None]:
        exchange = self._exchange(kind, arrays, label, "step", wire_dtype, parts)
        with exchange as ring:
            self._enter_mpi(ring.count, label)
            try:
                yield
            except self._mpi_error as error:
                raise CollectiveError(
                    f"MPI failed in {ring.description} on worker {self.rank}: {error}. "
                    "See the output of the other workers and of the MPI library."
                ) from error
            finally:
                with self._mpi_state:
                    self._mpi_exchange = None
                    self._mpi_state.notify_all()

    def _enter_mpi(self, number: int, label: str) -> None:
        # Atomic with the check that all can still come: a loss reported earlier keeps
        # this worker out, a later one finds it in `_mpi_exchange`.
        with self._mpi_state:
            gone = self._membership.left_before(number, "step")
            if self._cannot_enter is not None or gone:
                raise ConnectionAbortedError(self._cannot_enter or f"{gone} left")
            self._note_answer()
            self._mpi_exchange = (number, label)

    def _note_answer(self, round_bytes: int = 0) -> None:
        """Records that an MPI call returned, which moved so many bytes per worker."""
        self._mpi_answered = time.monotonic()
        # MPI does not report its traffic; a ring's is the minimum.
        self._mpi_sent_bytes += round_bytes * (self.workers - 1) // self.workers

    def sent_bytes(self, channel: str | None = None) -> int:
        of_mpi = self._mpi_sent_bytes if channel in (None, "step") else 0
        return super().sent_bytes(channel) + of_mpi

    def _sum_rounded(self, arrays: Arrays, outputs: Arrays, wire: np.dtype) -> None:
        """MPI cannot add 16-bit floats: it moves bits, and each worker adds a part."""
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
            [bits, (counts, edges[:-1])], [all_bits, ([own] * self.workers, places)]
        )
        total = parts[0].astype(dtype)
        with np.errstate(invalid="ignore"):  # loss scaling looks for infinities
            for part in parts[1:]:
                total += part.astype(dtype)
        mine = round_to(piece.dtype, total).view(np.uint16)
        self._world.Allgatherv(mine, [bits, (counts, edges[:-1])])
        self._note_answer(2 * piece.nbytes)

    def _sum_in_pieces(self, array: np.ndarray, output: np.ndarray) -> None:
        elements = self._piece_bytes // array.itemsize
        for start in range(0, array.size, elements):
            piece = slice(start, start + elements)
            self._world.Allreduce(array[piece], output[piece], self._sum_operation)
            self._note_answer(2 * array[piece].nbytes)

    def _share_address(self) -> str:
        """Worker 0's address, sent through MPI; ConfigurationError on all without."""
        names = texts_at_first(self._world, socket.gethostname())
        address = ""
        if names is not None:
            host = LOOPBACK if self._is_one_machine else own_address(names[1:])
            address = join_address(host, free_port("")) if host else ""
        address = text_of_first(self._world, address)
        if not address:
            raise ConfigurationError(
                "Worker 0 finds no address by which the other machines reach it: their "
                "names cannot be looked up, and it has no route but loopback. Set "
                "TFDP_COORDINATOR to 'host:port' of worker 0 for all workers."
            )
        return address

    def look_around(self, missed_seconds: float) -> None:
        """Aborts if this worker's MPI call will not end, or is too late."""
        super().look_around(missed_seconds)
        with self._mpi_state:
            if self._mpi_exchange is None:
                return
            self._mpi_answered += missed_seconds  # time while suspended does not count
            waited = time.monotonic() - self._mpi_answered
            gone = self._membership.left_before(self._mpi_exchange[0], "step")
        if gone:
            self._abort(f"{name_workers(gone)} had come to the end of the script")
        elif waited > self.timeout_seconds:
            self._abort(f"{self.timeout_seconds:g} seconds had passed in one call")

    def _finish_exchange(self) -> None:
        """Lets a running MPI call end, in which others take part; starts no other."""
        with self._mpi_state:
            self._cannot_enter = "closed here"
            self._mpi_state.wait_for(
                lambda: self._mpi_exchange is None, self.timeout_seconds
            )

    def _note_failure(self) -> None:
        """Makes MPI abort at exit, after the error is printed, instead of waiting."""
        self._set_abort_status(EXIT_CODE)

    def close_channels(self) -> None:
        super().close_channels()
        with self._mpi_state:
            self._cannot_enter = self._cannot_enter or "the exchanges have ended"
            is_in_mpi = self._mpi_exchange is not None
        if is_in_mpi:
            self._abort(self._membership.failure or "its strategy was closed")

    def _abort(self, reason: str) -> None:
        """Ends this process, which is in an MPI call, and the job."""
        number, label = self._mpi_exchange or (0, "none")
        logging.error(
            f"tfdp: Worker {self.rank} was in an MPI call of exchange {number} "
            f"({label}) when {reason}. This process ends, and the job with it."
        )
        sys.stdout.flush()
        sys.stderr.flush()
        # In a thread: MPI may not return while another call is running.
        abort = threading.Thread(
            target=self._world.Abort, args=(EXIT_CODE,), daemon=True
        )
        abort.start()
        abort.join(ABORT_SECONDS)
        os._exit(EXIT_CODE)


# Short texts over MPI in buffers of fixed size: mpi4py's object interface would
# unpickle received data and allocate announced sizes.

# Host names and addresses: DNS allows 255 bytes.
LONGEST_TEXT_BYTES = 512


def texts_at_first(world: Any, text: str) -> list[str] | None:
    """All workers' `text` (cut to LONGEST_TEXT_BYTES) on worker 0; None elsewhere."""
    rows = np.zeros((world.size, LONGEST_TEXT_BYTES), np.uint8)
    own = np.frombuffer(_padded(text), np.uint8)
    world.Gather(own, rows if world.rank == 0 else None)
    return [_text_in(row.tobytes()) for row in rows] if world.rank == 0 else None


def text_of_first(world: Any, text: str) -> str:
    """Worker 0's `text`, on every worker."""
    return _text_in(bytes_of_first(world, _padded(text)))


def bytes_of_first(world: Any, own: bytes) -> bytes:
    """Worker 0's bytes on every worker; all pass the same number."""
    buffer = np.frombuffer(bytearray(own), np.uint8)
    world.Bcast(buffer)
    return buffer.tobytes()


def _padded(text: str) -> bytes:
    return text.encode()[:LONGEST_TEXT_BYTES].ljust(LONGEST_TEXT_BYTES, b"\0")


def _text_in(data: bytes) -> str:
    return data.rstrip(b"\0").decode(errors="replace")


# RFC 5737: belongs to no machine, so it takes the default route.
ELSEWHERE = "192.0.2.1"
ANY_PORT = 9


def own_address(others: Sequence[str]) -> str | None:
    """The IPv4 address where the route to machines named `others` starts, or None."""
    own_name = socket.gethostname()
    for name in dict.fromkeys(others):
        if name != own_name:
            for target in _addresses_of(name):
                source = _start_of_route(target)
                if source is not None and _is_reachable(source):
                    return source
    # The own name last: Debian's /etc/hosts maps it to 127.0.1.1.
    candidates = [*_addresses_of(own_name), _start_of_route(ELSEWHERE)]
    return next((c for c in candidates if c is not None and _is_reachable(c)), None)


def _addresses_of(name: str) -> list[str]:
    try:
        found = socket.getaddrinfo(name, None, socket.AF_INET, socket.SOCK_STREAM)
    except OSError:
        return []
    return [str(address[0]) for *_, address in found]


def _start_of_route(target: str) -> str | None:
    with contextlib.suppress(OSError):
        return source_address(target, ANY_PORT)
    return None


def _is_reachable(address: str) -> bool:
    parsed = ipaddress.ip_address(address)
    return not (parsed.is_loopback or parsed.is_unspecified or parsed.is_link_local)
