"""The ring all-reduce and the reuse of its buffers: no sockets, no TensorFlow."""

import queue
import threading

import numpy as np
import pytest

from tfdp.hosts import ring
from tfdp.hosts.buffers import (
    ALIGNMENT_BYTES,
    BufferPool,
    unaligned_copy,
    views_of,
)

SHAPES = [(1000,), (3,), (7, 40), (), (0,)]


def on_threads(members, work):
    """Results of `work(rank, send, receive)` on connected threads."""
    links = [queue.Queue() for _ in range(members)]  # into each member
    results = [None] * members

    def run(rank):
        def send(array):
            links[(rank + 1) % members].put(array.copy())

        def receive(array):
            array[...] = links[rank].get(timeout=10)

        results[rank] = work(rank, send, receive)

    threads = [threading.Thread(target=run, args=(r,)) for r in range(members)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    return results


def arrays_of(rank, dtype):
    rng = np.random.default_rng(rank)
    return [(rng.normal(size=shape) * 10).astype(dtype) for shape in SHAPES]


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "int32", "int64"])
@pytest.mark.parametrize("members", [2, 3, 5])
def test_everybody_gets_the_sum(monkeypatch, members, dtype):
    monkeypatch.setattr(ring, "BLOCK_BYTES", 64)

    def work(rank, send, receive):
        inputs = [array.reshape(-1) for array in arrays_of(rank, dtype)]
        before = [array.copy() for array in inputs]
        outputs = [np.full_like(array, 7) for array in inputs]
        ring.ring_sum(inputs, outputs, rank, members, ring.Ends(send, receive))
        for array, unchanged in zip(inputs, before, strict=True):
            np.testing.assert_array_equal(array, unchanged)
        return outputs

    results = on_threads(members, work)
    expected = [
        sum(arrays[place].reshape(-1).astype("float64") for arrays in everybody)
        for everybody in [[arrays_of(r, dtype) for r in range(members)]]
        for place in range(len(SHAPES))
    ]
    # Sums of up to five numbers below 50: each addition rounds by half a unit in the
    # last place of at most 256.
    exact = np.issubdtype(np.dtype(dtype), np.integer)
    bound = 0 if exact else members * 256 * np.finfo(dtype).eps
    for result in results:
        for got, want in zip(result, expected, strict=True):
            np.testing.assert_allclose(got.astype("float64"), want, rtol=0, atol=bound)
        for got, first in zip(result, results[0], strict=True):
            np.testing.assert_array_equal(got, first)


@pytest.mark.parametrize("members", [2, 3, 5])
def test_parts_of_the_sum_are_scattered_and_gathered(monkeypatch, members):
    monkeypatch.setattr(ring, "BLOCK_BYTES", 64)
    sizes = [array.size for array in arrays_of(0, "float32")]
    # Uneven: the last member gets what is left, of short arrays nothing.
    ranges = [
        [
            (array, min(member * step, size), min((member + 1) * step, size))
            for array, size in enumerate(sizes)
            for step in [-(-size // members) + 1]
        ]
        for member in range(members)
    ]

    def work(rank, send, receive):
        # Whole numbers: the order of adding does not matter.
        inputs = [np.rint(array.reshape(-1)) for array in arrays_of(rank, "float32")]
        outputs = [np.full_like(array, 7) for array in inputs]
        ends = ring.Ends(send, receive)
        ring.ring_reduce_scatter(inputs, outputs, ranges, rank, ends)
        wholes = [np.full_like(array, 7) for array in inputs]
        for array, start, stop in ranges[rank]:
            wholes[array][start:stop] = outputs[array][start:stop]
        ring.ring_all_gather(wholes, ranges, rank, ends)
        return inputs, wholes

    results = on_threads(members, work)
    for place in range(len(SHAPES)):
        total = sum(inputs[place] for inputs, _ in results)
        for _, wholes in results:
            np.testing.assert_array_equal(wholes[place], total)


@pytest.mark.parametrize("parts", [1, 2, 3, 7])
def test_blocks_cover_every_element_once(parts):
    sizes = [5, 0, 1, 100, 33]
    blocks = [
        ring.blocks_of(part, element_bytes=4, block_bytes=40)
        for part in ring.split_evenly(sizes, parts)
    ]
    seen = [np.zeros(size, int) for size in sizes]
    for part in blocks:
        for array, start, stop in part:
            assert 0 < stop - start <= 10
            seen[array][start:stop] += 1
    assert all((counts == 1).all() for counts in seen)
    elements = [sum(stop - start for _, start, stop in part) for part in blocks]
    assert max(elements) - min(elements) <= 1


def test_a_buffer_is_reused_only_when_nobody_holds_it():
    pool = BufferPool()
    held = views_of(pool, [np.zeros(300, np.float32), np.zeros((2, 3))])
    assert all(view.ctypes.data % ALIGNMENT_BYTES == 0 for view in held)
    address = held[0].ctypes.data
    other = views_of(pool, [np.zeros(300, np.float32), np.zeros((2, 3))])
    assert other[0].ctypes.data != address
    kept = held[1][0, :1]  # a view of a view still counts
    del held
    assert views_of(pool, [np.zeros(300, np.float32)])[0].ctypes.data != address
    del kept, other
    reused = {
        views_of(pool, [np.zeros(300, np.float32)])[0].ctypes.data for _ in range(3)
    }
    assert len(reused) == 1


def test_sizes_that_grow_leave_no_buffers_behind():
    pool = BufferPool()
    held = pool.take(150_000)
    for size_bytes in range(100_000, 300_000, 1000):
        pool.take(size_bytes)
    sizes = sorted(buffer.size for buffer in pool._buffers)
    # What is held stays, and one for what is far smaller than the last.
    assert sum(sizes) < 300_000 + 150_000 + held.size + 1000
    assert held.base.size in sizes
    small, large = pool.take(1000), pool.take(3_000_000)
    del small, large
    before = [id(buffer) for buffer in pool._buffers]
    for size_bytes in (1000, 299_000, 3_000_000) * 3:
        pool.take(size_bytes)
    assert [id(buffer) for buffer in pool._buffers] == before


@pytest.mark.parametrize("shape", [(), (1,), (3, 5), (64,)])
def test_an_unaligned_copy_is_equal_and_lies_elsewhere(shape):
    array = np.arange(np.prod(shape), dtype=np.float64).reshape(shape)
    copy = unaligned_copy(array)
    np.testing.assert_array_equal(copy, array)
    assert copy.ctypes.data % ALIGNMENT_BYTES == 8
    assert not np.shares_memory(copy, array)
