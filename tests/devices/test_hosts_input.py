"""Hosts whose parts differ in length: two workers on threads of this process."""

import concurrent.futures
import itertools
import time

import pytest
import tensorflow as tf

from tests.support.workers import free_port
from tfdp.data import hosts
from tfdp.hosts.socket_link import SocketLink

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def parts(monkeypatch):
    """Two links, and a dataset of one element and one of four, each padded."""
    address = f"127.0.0.1:{free_port()}"
    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        links = list(
            threads.map(
                lambda rank: SocketLink(rank, 2, address, timeout_seconds=10), range(2)
            )
        )
        datasets = []
        for link, count in zip(links, [1, 4], strict=True):
            # As in two processes: the first dataset of each.
            monkeypatch.setattr(hosts, "_dataset_numbers", itertools.count())
            elements = tf.data.Dataset.from_tensors([link.rank]).repeat(count)
            datasets.append(hosts.until_all_end(elements, link))
        yield threads, datasets
        list(threads.map(lambda link: link.close(), links))


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
