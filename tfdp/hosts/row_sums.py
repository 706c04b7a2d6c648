"""Rows of tables between hosts: sums of gradients that have few rows of many.

Every host sends its rows to every other one in one exchange. A host with more rows than
its share of what the whole table would cost sends their number alone; then all hosts
have seen that number, and add up the whole table, with the others' rows a second time.
So the choice hangs on what is exchanged anyway, and is the same everywhere.
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

# How many rows, and whether they follow.
HEADER = struct.Struct("<q?7x")


@dataclasses.dataclass(frozen=True)
class RowExchange:
    """How the rows of one table travel; the same on all hosts.

    Args:
      table: the shape of the table; None where it is not known, or must not travel.
      label: names the exchange in errors.
      wire_dtype: the smaller float type in which values travel; None for their own.
      summed: whether rows with the same index are added, each host's own before.
      pool: where the memory is from for what is sent, and for sums.
    """

    table: tuple[int, ...] | None
    label: str
    wire_dtype: str | None
    summed: bool
    pool: BufferPool = dataclasses.field(default_factory=BufferPool, compare=False)

    def __call__(
        self, link: HostLink, values: np.ndarray, indices: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """The rows of all hosts, on each of them the same bits.

        Args:
          link: to the other hosts.
          values: [rows, ...], of one type and row shape on all hosts.
          indices: [rows], whole numbers of one type on all hosts; with `summed` no two
            alike.

        Returns:
          Values and indices: host by host, or with `summed` by index, each one once.

        Raises:
          CollectiveError: when a host sends what are no such rows.
          As `HostLink.gather`.

        Cost: one gather of H - 1 times the host's rows, at most what the whole table
        costs; else the gather of a few bytes and (where others have few) rows, and the
        sum of the whole table.
        """
        sent = self._wire_type(values.dtype)
        told = (
            f"{self.label}: rows {list(values.shape[1:])} of {values.dtype.name} as "
            f"{sent.name}, indices of {indices.dtype.name}"
        )
        most = self._most_rows(link.workers, values, indices, sent)
        is_sent = most is None or len(indices) <= most
        parts: list[bytes | memoryview] = [HEADER.pack(len(indices), is_sent)]
        if is_sent:
            on_wire = values if sent == values.dtype else round_to(sent, values)
            parts += map(as_bytes, map(np.ascontiguousarray, [indices, on_wire]))
        blobs = link.gather_memory(self._in_one(parts), told)
        heads = [
            read_as(HEADER.unpack_from, blob, host, "number of rows")
            for host, blob in enumerate(blobs)
        ]
        if not all(has_rows for _, has_rows in heads):
            return self._whole_table(link, values, indices)
        came = [
            _rows_of(blob, host, count, sent, values, indices)
            for host, (blob, (count, _)) in enumerate(zip(blobs, heads, strict=True))
        ]
        if self.summed:
            return add_rows(came, values.dtype, self.pool)
        return (
            np.concatenate([rows.astype(values.dtype) for _, rows in came]),
            np.concatenate([where for where, _ in came]),
        )

    def _in_one(self, parts: Sequence[bytes | memoryview]) -> np.ndarray:
        memory = self.pool.take(sum(map(len, parts)))
        begin = 0
        for part in parts:
            memory.data[begin : begin + len(part)] = part
            begin += len(part)
        return memory

    def _wire_type(self, own: np.dtype) -> np.dtype:
        return own if self.wire_dtype is None else wire_type(self.wire_dtype)

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
                f"{self.label}, where all send rows. The workers run other programs."
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
    """A host's share of the rows that cost no more than the sum of the whole table.

    Of n bytes on H hosts a host sends 2 n (H - 1) / H for the sum, and for a gather of
    r rows by each host (H - 1) r times the bytes of a row and its index.

    >>> most_rows(1000, 256, 4, hosts=2), most_rows(1000, 256, 4, hosts=16)
    (984, 123)
    """
    return 2 * table_rows * row_bytes // (hosts * max(row_bytes + index_bytes, 1))


def add_rows(
    parts: Sequence[tuple[np.ndarray, np.ndarray]], dtype: np.dtype, pool: BufferPool
) -> tuple[np.ndarray, np.ndarray]:
    """The sums of rows with the same index, in the order of the parts, and the indices.

    Args:
      parts: indices, no two alike in one part, and values.
      dtype: of the sums; 16-bit floats are added in 32 bits.
      pool: where their memory is from.

    >>> one = np.array([4, 1]), np.array([[1.0], [2.0]])
    >>> values, indices = add_rows([one, one], np.dtype(float), BufferPool())
    >>> indices.tolist(), values.tolist()
    ([1, 4], [[4.0], [2.0]])
    """
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
    """The indices and values in what `host` has sent, like those of this host."""
    width = int(np.prod(values.shape[1:], dtype=int))
    row_bytes = indices.itemsize + width * sent.itemsize
    if count < 0 or len(blob) != HEADER.size + count * row_bytes:
        raise CollectiveError(
            f"Worker {host} sent {len(blob)} bytes for {count} rows of {row_bytes}. "
            "The workers run other programs."
        )
    where = np.frombuffer(blob, indices.dtype, count, HEADER.size)
    rows = np.frombuffer(
        blob, sent, count * width, HEADER.size + count * indices.itemsize
    )
    return where, rows.reshape(count, *values.shape[1:])
