"""Rows of tables between hosts: sums, equal bits, the threshold, what is refused."""

import numpy as np
import pytest

from tests.pure.test_socket_link import on_workers
from tfdp.errors import CollectiveError
from tfdp.hosts.buffers import BufferPool
from tfdp.hosts.row_sums import HEADER, RowExchange, add_rows, most_rows

TABLE, WIDTH = 300, 8
ROUND_OFF = {None: 2.0**-24, "bfloat16": 2.0**-8, "float16": 2.0**-11}


def rows_of(rank, count):
    """Other rows on each host, row 7 on all that have some."""
    rng = np.random.default_rng(rank)
    indices = rng.choice(TABLE, count, replace=False).astype(np.int32)
    if count and 7 not in indices:
        indices[-1] = 7
    return rng.normal(size=(count, WIDTH)).astype(np.float32), indices


def table_of(values, indices):
    table = np.zeros((TABLE, WIDTH))
    np.add.at(table, indices, values.astype(float))
    return table


def exchanged(counts, wire_dtype=None, summed=True):
    """Of each host: values, indices, and the bytes that it sent."""

    def work(link):
        exchange = RowExchange((TABLE, WIDTH), "table 1 of 1", wire_dtype, summed)
        before = link.sent_bytes()
        results = exchange(link, *rows_of(link.rank, counts[link.rank]))
        return *results, link.sent_bytes() - before

    return on_workers(len(counts), work)


@pytest.mark.parametrize("wire_dtype", [None, "bfloat16", "float16"])
@pytest.mark.parametrize("counts", [(30, 9), (0, 5, 60), (0, 0), (290, 3)], ids=str)
def test_rows_and_whole_tables_give_the_sum_with_the_same_bits(counts, wire_dtype):
    results = exchanged(counts, wire_dtype)
    parts = [table_of(*rows_of(rank, count)) for rank, count in enumerate(counts)]
    hosts = len(counts)
    # A number is rounded once when it is sent; where the whole table goes round a ring,
    # once on each of its hops. Float32 adds a rounding for each host.
    factor = (1 + ROUND_OFF[wire_dtype]) ** hosts * (1 + 2.0**-24) ** hosts - 1
    bound = factor * sum(map(np.abs, parts))
    for values, indices, _ in results:
        assert len(set(indices.tolist())) == len(indices)
        assert values.dtype == np.float32 and indices.dtype == np.int32
        assert (np.abs(table_of(values, indices) - sum(parts)) <= bound).all()
        np.testing.assert_array_equal(values, results[0][0])
        np.testing.assert_array_equal(indices, results[0][1])


def test_who_has_many_rows_makes_all_hosts_send_the_table():
    assert most_rows(TABLE, WIDTH * 4, 4, hosts=2) == 266
    few = exchanged((266, 3))
    many = exchanged((267, 3))
    row_bytes = WIDTH * 4 + 4
    # Beside headers of exchanges: of some 24 bytes.
    assert 0 <= few[0][2] - 266 * row_bytes < 100
    assert 0 <= few[1][2] - 3 * row_bytes < 100
    for rank, rows in enumerate((0, 3)):
        table_bytes = TABLE * WIDTH * 4  # 2 n (H - 1) / H on two hosts
        assert 0 <= many[rank][2] - table_bytes - rows * row_bytes < 200
    for values, indices, _ in many:
        assert values.shape == (TABLE, WIDTH)
        np.testing.assert_array_equal(indices, np.arange(TABLE))


def test_rows_that_are_not_added_come_host_by_host():
    # However many there are: another gradient than the sum, for who squares each.
    counts = (290, 0, 4)
    mine = [rows_of(rank, count) for rank, count in enumerate(counts)]
    for values, indices, _ in exchanged(counts, summed=False):
        np.testing.assert_array_equal(values, np.concatenate([v for v, _ in mine]))
        np.testing.assert_array_equal(indices, np.concatenate([i for _, i in mine]))


def test_sixteen_bits_are_added_in_thirty_two():
    ones = np.arange(3), np.full((3, 2), 1, np.float16)
    small = np.arange(3), np.full((3, 2), 2.0**-11, np.float16)
    values, _ = add_rows([ones, small, small], np.dtype(np.float16), BufferPool())
    # In float16 1 + 2^-11 is 1.
    np.testing.assert_array_equal(values, np.float16(1 + 2.0**-10))


@pytest.mark.parametrize(
    "blob, words",
    [
        (HEADER.pack(2, True) + bytes(35), "51 bytes for 2 rows"),
        (HEADER.pack(-1, True), "16 bytes for -1 rows"),
        (HEADER.pack(2**62, True), "16 bytes for"),
    ],
)
def test_what_is_not_as_long_as_it_says_is_refused(blob, words):
    class Link:
        workers = 2

        def gather_memory(self, mine, label):
            return [mine.data, memoryview(blob)]

    exchange = RowExchange((TABLE, WIDTH), "table", None, summed=True)
    with pytest.raises(CollectiveError, match=f"Worker 1 sent {words}"):
        exchange(Link(), *rows_of(0, 3))


def test_other_rows_on_another_worker_are_refused():
    def work(link):
        values, indices = rows_of(link.rank, 3)
        exchange = RowExchange((TABLE, WIDTH), "table", None, summed=True)
        return exchange(link, values[:, : WIDTH - link.rank], indices)

    for error in on_workers(2, work):
        assert isinstance(error, CollectiveError)
    assert "rows [7]" in str(error) and "rows [8]" in str(error)


def test_a_row_outside_of_the_table_is_refused():
    class Link:
        workers = 2

        def gather_memory(self, mine, label):
            return [mine.data, memoryview(HEADER.pack(299, False))]

    exchange = RowExchange((TABLE, WIDTH), "table", None, summed=True)
    values, indices = rows_of(0, 3)
    for outside in (-1, TABLE):
        with pytest.raises(CollectiveError, match="outside of its table of 300"):
            exchange(Link(), values, np.array([1, outside, 2], np.int32))
