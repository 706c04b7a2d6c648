"""Hosts whose parts differ in length: two workers on threads of this process."""

import concurrent.futures
import itertools
import re
import time

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras.src.trainers import data_adapters

import tfdp
from tests.support.workers import free_port
from tfdp.data import hosts, same_batches
from tfdp.hosts.socket_link import SocketLink

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def two_links():
    """Threads, and the two ends of a link on them."""
    address = f"127.0.0.1:{free_port()}"
    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        links = list(
            threads.map(
                lambda rank: SocketLink(rank, 2, address, timeout_seconds=10), range(2)
            )
        )
        yield threads, links
        list(threads.map(lambda link: link.close(), links))


@pytest.fixture
def of_both(two_links, monkeypatch):
    """From what to make of a link, what both make: as in two processes, the first."""

    def make(function, *arguments):
        results = []
        for link, *own in zip(two_links[1], *arguments, strict=True):
            monkeypatch.setattr(same_batches, "_dataset_numbers", itertools.count())
            results.append(function(link, *own))
        return results

    return make


@pytest.fixture
def parts(two_links, of_both):
    """A dataset of one element and one of four, each padded."""

    def padded(link, count):
        elements = tf.data.Dataset.from_tensors([link.rank]).repeat(count)
        return hosts.until_all_end(elements, link)

    return two_links[0], of_both(padded, [1, 4])


def rows(dataset):
    return [element.numpy().tolist() for element in dataset]


def test_the_shorter_part_goes_on_without_rows(parts):
    threads, datasets = parts
    for _ in range(2):
        short, long = threads.map(rows, datasets)
        assert short == [[0], [], [], []]
        assert long == [[1]] * 4


def test_a_dropped_iterator_lets_nobody_wait(parts):
    # Keras looks at the first batch and drops the iterator, which may have read ahead.
    threads, (short, long) = parts

    def look(dataset, seconds):
        iterator = iter(dataset)
        first = next(iterator).numpy().tolist()
        time.sleep(seconds)
        return first

    # The short part's second element waits for the long one's, which never comes.
    looks = threads.submit(look, short.prefetch(2), 0.5), threads.submit(look, long, 1)
    assert [future.result(5) for future in looks] == [[0], [1]]
    assert [*map(len, threads.map(rows, (short, long)))] == [4, 4]


def batches(count, length_is_known=True):
    """`count` batches of four rows, each batch with numbers of its own."""
    numbers = tf.data.Dataset.range(4 * count) if count else tf.data.Dataset.range(0)
    if not length_is_known:
        numbers = numbers.filter(lambda number: True)
    return numbers.batch(4, drop_remainder=length_is_known)


def read_with_sums(link, dataset):
    """As in training: an exchange for every batch. The rows, or the error."""
    taken = []
    try:
        for batch in dataset:
            taken.append(batch.numpy().tolist())
            link.sum([np.ones(1)], "number of samples")
    except Exception as error:
        return str(error)
    return taken


@pytest.mark.parametrize(
    "count, known",
    [(0, (False, False)), (3, (True, True)), (3, (True, False)), (3, (False, False))],
)
def test_as_many_batches_everywhere(two_links, of_both, known, count):
    threads, links = two_links
    of_hosts = of_both(
        lambda link, is_known: hosts.own_part(batches(count, is_known), link), known
    )
    assert [int(d.cardinality()) for d in of_hosts] == [
        count if k else -2 for k in known
    ]
    assert of_hosts[0].element_spec.shape[0] == (2 if known[0] else None)
    for _ in range(2):
        first, second = threads.map(read_with_sums, links, of_hosts)
        assert first == [[4 * i, 4 * i + 1] for i in range(count)]
        assert second == [[4 * i + 2, 4 * i + 3] for i in range(count)]


@pytest.mark.parametrize(
    "counts, known, ahead, words",
    [
        ((3, 4), (True, True), 3, "3 on worker 0 and 4 on worker 1"),
        ((4, 3), (True, False), 3, "4 on worker 0 and 3 on worker 1"),
        ((3, 4), (False, False), 0, "3 on worker 0 and (at least )?4 on worker 1"),
        ((4, 3), (False, False), 3, "(at least )?4 on worker 0 and 3 on worker 1"),
        ((0, 2), (True, True), 0, "0 on worker 0 and 2 on worker 1"),
        ((2, 0), (False, False), 0, "some on worker 0 and 0 on worker 1"),
    ],
)
def test_another_number_of_batches_ends_both(
    two_links, of_both, counts, known, ahead, words
):
    threads, links = two_links
    of_hosts = of_both(
        lambda link, *own: hosts.own_part(batches(*own), link).prefetch(ahead),
        counts,
        known,
    )

    def read(link, dataset):
        error = read_with_sums(link, dataset)
        if isinstance(error, str):
            return error
        # Whoever has read all goes on: to the metrics of the epoch, say.
        try:
            link.sum([np.ones(1)], "metrics", "host")
        except tfdp.errors.WorkerLostError as error:
            return str(error)
        return "went on"

    start = time.monotonic()
    errors = list(threads.map(read, links, of_hosts))
    for error in errors:
        assert re.search(words, error, re.IGNORECASE | re.DOTALL), errors
    # The links' own deadline, in vain.
    assert time.monotonic() - start < 10


def test_a_dropped_iterator_ends_nobody(two_links, of_both):
    threads, links = two_links
    of_hosts = of_both(lambda link: hosts.own_part(batches(5, False), link))

    def read_two(link, dataset):
        for batch in dataset.take(2):
            link.sum([batch.numpy()], "step")

    list(threads.map(read_two, links, of_hosts))
    assert [*map(len, threads.map(read_with_sums, links, of_hosts))] == [5, 5]


def test_another_dtype_policy_is_refused(two_links, of_both):
    threads, links = two_links
    of_hosts = of_both(
        lambda link, policy: hosts.own_part(batches(3), link, policy),
        ["float32", "mixed_float16"],
    )
    for error in threads.map(read_with_sums, links, of_hosts):
        assert "computes in mixed_float16 on worker 1 and in float32 on" in error


def test_any_structure_passes(two_links, of_both):
    threads, links = two_links
    x = np.arange(12, dtype="float32").reshape(6, 2)
    sparse = tf.sparse.from_dense(x)
    ragged = tf.RaggedTensor.from_row_lengths(tf.range(12), [1, 2, 3, 0, 4, 2])
    texts = tf.constant([f"row {i}" for i in range(6)])
    # Of the last batch the second host has nothing: an empty part of each kind.
    wide = tf.RaggedTensor.from_row_lengths(tf.ones([12, 3]), [1, 2, 3, 0, 4, 2])
    deep = tf.RaggedTensor.from_row_lengths(ragged, [1, 0, 2, 1, 1, 1])
    elements = ({"x": x, "ragged": ragged, "wide": wide, "deep": deep}, sparse, texts)
    dataset = tf.data.Dataset.from_tensor_slices(elements).batch(3)
    plain = dataset.map(lambda *parts: (parts, None))

    def rows(part):
        if part is None:
            return []
        dense = tf.sparse.to_dense(part) if isinstance(part, tf.SparseTensor) else part
        return dense.to_list() if hasattr(dense, "to_list") else dense.numpy().tolist()

    def read(link, dataset):
        return [[*map(rows, tf.nest.flatten(element))] for element in dataset]

    for length_is_known in (True, False):
        given = plain if length_is_known else plain.filter(lambda *_: True)
        first, second = threads.map(
            read, links, of_both(lambda link, given=given: hosts.own_part(given, link))
        )
        joined = [
            [a + b for a, b in zip(*parts, strict=True)]
            for parts in zip(first, second, strict=True)
        ]
        assert joined == read(None, plain)


def unlike_last(dtype, order):
    """Batches of two parts, of which the first, a mask of ones, is always the same."""
    x = np.arange(8)[list(order)]
    parts = {
        "dense": lambda: tf.constant(x, tf.float32),
        "bool": lambda: tf.constant(x % 3 == 0),
        "text": lambda: tf.strings.as_string(x),
        "sparse": lambda: tf.sparse.from_dense(x[:, None] % 3),
        "ragged": lambda: tf.RaggedTensor.from_row_lengths(tf.range(28), x),
    }
    elements = {"attention_mask": tf.ones([8, 2]), "input_ids": parts[dtype]()}
    return tf.data.Dataset.from_tensor_slices(elements).batch(4)


@pytest.mark.parametrize("dtype", ["dense", "bool", "text", "sparse", "ragged"])
@pytest.mark.parametrize("length_is_known", [True, False])
def test_another_first_batch_is_seen_in_whichever_part(
    two_links, of_both, dtype, length_is_known
):
    threads, links = two_links

    def read(link, dataset):
        try:
            return len([*dataset])
        except tf.errors.OpError as error:
            return error.message

    def own(link, dataset):
        return hosts.own_part(dataset, link)

    def both(orders):
        datasets = [unlike_last(dtype, order) for order in orders]
        if not length_is_known:
            datasets = [d.filter(lambda _: True) for d in datasets]
        return list(threads.map(read, links, of_both(own, datasets)))

    assert both([range(8), range(8)]) == [2, 2]
    for error in both([range(8), range(7, -1, -1)]):
        assert "Worker 1 reads another first batch than worker 0" in error


@pytest.mark.parametrize(
    "data, words",
    [
        ("generator", r"np\.random\.default_rng\(1\)"),
        ("pydataset", "shuffle=False"),
        ("dataset", r"shuffle\(n, seed=1\)"),
        ("array", "The arrays themselves differ"),
    ],
)
def test_the_error_about_unlike_batches_names_the_cure_of_each_input(
    two_links, of_both, data, words
):
    threads, links = two_links

    class Batches(keras.utils.PyDataset):
        def __len__(self):
            return 2

        def __getitem__(self, index):
            return np.ones((2, 1)), np.ones((2, 1))

    inputs = {
        "generator": ((np.ones((2, 1)), np.ones((2, 1))) for _ in range(2)),
        "pydataset": Batches(),
        "dataset": tf.data.Dataset.from_tensors((np.ones((2, 1)), np.ones((2, 1)))),
        "array": np.ones((2, 1)),
    }
    adapter = type(data_adapters.get_data_adapter(inputs[data])).__name__

    def own(link, dataset):
        return hosts.own_part(dataset, link, adapter=adapter)

    def read(link, dataset):
        try:
            return len([*dataset])
        except tf.errors.OpError as error:
            return error.message

    orders = range(8), range(7, -1, -1)
    datasets = of_both(own, [unlike_last("dense", order) for order in orders])
    for error in threads.map(read, links, datasets):
        assert re.search(f"another first batch than worker 0.*{words}", error), error
