"""Sums of sparse gradients: hosts exchange table rows instead of whole tables.

Each host sends its rows to all others in one gather. A host with more rows than its
share of the whole table's cost sends their number alone; then all hosts see that, and
sum the whole table. So the choice is the same on all hosts and needs no extra exchange.
"""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Sequence

import numpy as np

from tfdp.errors import CollectiveError
from tfdp.hosts.buffers import BufferPool, views_of
from tfdp.hosts.host_link import HostLink
from tfdp.hosts.messages import read_as
from tfdp.hosts.ring import round_to, wire_type
from tfdp.hosts.wire import as_bytes

# How many rows; whether they follow.
HEADER = struct.Struct("<q?7x")


@dataclasses.dataclass(frozen=True)
class RowExchange:
    """How the rows of one table are exchanged; the same on all hosts."""

    table: tuple[int, ...] | None  # its shape; None if it must not be summed whole
    label: str  # names the exchange in errors
    wire_dtype: str | None  # a smaller float type for the network; None for the own
    summed: bool  # whether to add rows with the same index
    pool: BufferPool = dataclasses.field(default_factory=BufferPool, compare=False)

    def __call__(
        self, link: HostLink, values: np.ndarray, indices: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """All hosts' values and indices; the same bits on all hosts.

        In the order of hosts, or if `summed` by unique index. Raises CollectiveError if
        a host sent invalid rows.

        Args:
          values: [rows, ...], of one type and row shape on all hosts.
          indices: [rows], integers of one type on all hosts; unique if `summed`.

        Cost: one gather of H - 1 times the host's rows, at most what the whole table
        costs; else a gather of little, and the sum of the whole table.
        """
        own_type = values.dtype
        sent = own_type if self.wire_dtype is None else wire_type(self.wire_dtype)
        label = (
            f"{self.label}: rows {list(values.shape[1:])} of {values.dtype.name} as "
            f"{sent.name}, indices of {indices.dtype.name}"
        )
        most = self._most_rows(link.workers, values, indices, sent)
        is_sent = most is None or len(indices) <= most
        parts: list[bytes | memoryview] = [HEADER.pack(len(indices), is_sent)]
        if is_sent:
            on_wire = values if sent == values.dtype else round_to(sent, values)
            parts += map(as_bytes, map(np.ascontiguousarray, [indices, on_wire]))
        blobs = link.gather_memory(self._in_one(parts), label)
        heads = [
            read_as(HEADER.unpack_from, blob, host, "number of rows")
            for host, blob in enumerate(blobs)
        ]
        if not all(has_rows for _, has_rows in heads):
            return self._whole_table(link, values, indices)
        received = [
            _rows_of(blob, host, count, sent, values, indices)
            for host, (blob, (count, _)) in enumerate(zip(blobs, heads, strict=True))
        ]
        if self.summed:
            return add_rows(received, values.dtype, self.pool)
        return (
            np.concatenate([rows.astype(values.dtype) for _, rows in received]),
            np.concatenate([where for where, _ in received]),
        )

    def _in_one(self, parts: Sequence[bytes | memoryview]) -> np.ndarray:
        memory = self.pool.take(sum(map(len, parts)))
        begin = 0
        for part in parts:
            memory.data[begin : begin + len(part)] = part
            begin += len(part)
        return memory

    def _most_rows(
        self, hosts: int, values: np.ndarray, indices: np.ndarray, sent: np.dtype
    ) -> int | None:
        if self.table is None or not self.summed:
            return None
        row_bytes = int(np.prod(values.shape[1:], dtype=int)) * sent.itemsize
        return most_rows(self.table[0], row_bytes, indices.itemsize, hosts)

    def _whole_table(
        self, link: HostLink, values: np.ndarray, indices: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        if self.table is None:
            raise CollectiveError(
                f"Another worker sends the number of its rows without rows in "
                f"{self.label}, where all send rows. The workers' programs differ."
            )
        if len(indices) and not 0 <= indices.min() <= indices.max() < self.table[0]:
            raise CollectiveError(
                f"{self.label} has a row outside of its table of {self.table[0]} rows."
            )
        whole = np.zeros(self.table, values.dtype)
        whole[indices] = values
        (total,) = link.sum([whole], self.label, "step", wire_dtype=self.wire_dtype)
        return total, np.arange(self.table[0], dtype=indices.dtype)


def most_rows(table_rows: int, row_bytes: int, index_bytes: int, hosts: int) -> int:
    """How many rows each host may send for at most the cost of summing the whole table.

    For n bytes on H hosts a host sends 2 n (H - 1) / H for the sum, and for a gather of
    r rows by each host (H - 1) r times the bytes of a row and its index.

    >>> most_rows(1000, 256, 4, hosts=2), most_rows(1000, 256, 4, hosts=16)
    (984, 123)
    """
    return 2 * table_rows * row_bytes // (hosts * max(row_bytes + index_bytes, 1))


def add_rows(
    parts: Sequence[tuple[np.ndarray, np.ndarray]], dtype: np.dtype, pool: BufferPool
) -> tuple[np.ndarray, np.ndarray]:
    """Adds parts, each with unique indices; 16-bit floats are added in 32 bits."""
    where = [indices for indices, _ in parts]
    indices, places = np.unique(np.concatenate(where), return_inverse=True)
    added_as = np.dtype(np.float32) if dtype.itemsize == 2 else dtype
    shape = (len(indices), *parts[0][1].shape[1:])
    (sums,) = views_of(pool, [np.broadcast_to(np.zeros((), added_as), shape)])
    sums[...] = 0
    first = 0
    with np.errstate(over="ignore", invalid="ignore"):
        for mine, values in parts:
            to = places[first : first + len(mine)]
            sums[to] += values.astype(added_as, copy=False)
            first += len(mine)
        return sums.astype(dtype, copy=False), indices


def _rows_of(
    blob: memoryview,
    host: int,
    count: int,
    sent: np.dtype,
    values: np.ndarray,
    indices: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Parses the indices and values that `host` sent; their types are those given."""
    width = int(np.prod(values.shape[1:], dtype=int))
    row_bytes = indices.itemsize + width * sent.itemsize
    if count < 0 or len(blob) != HEADER.size + count * row_bytes:
        raise CollectiveError(
            f"Worker {host} sent {len(blob)} bytes for {count} rows of {row_bytes}. "
            "The workers' programs differ."
        )
    where = np.frombuffer(blob, indices.dtype, count, HEADER.size)
    rows = np.frombuffer(
        blob, sent, count * width, HEADER.size + count * indices.itemsize
    )
    return where, rows.reshape(count, *values.shape[1:])
