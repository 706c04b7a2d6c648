"""Rows of any number from each host to each other one."""

from __future__ import annotations

import math

import numpy as np

from tfdp.hosts.host_link import HostLink


def rows_to_each(
    link: HostLink, label: str, rows: np.ndarray, numbers: np.ndarray
) -> list[np.ndarray]:
    """Sends rows to each host, as many as `numbers` [hosts, hosts] says.

    Returns the rows that came, by host. Cost: that of an `all_to_all` of the most rows
    for any host.
    """
    hosts = range(link.workers)
    # As bytes: every type of number, and strings of bits, survive.
    width = rows.dtype.itemsize * math.prod(rows.shape[1:])
    data = np.frombuffer(rows.tobytes(), np.uint8).reshape(len(rows), width)
    ends = np.cumsum(numbers[link.rank])
    outgoing = np.zeros((link.workers, max(1, int(numbers.max())), width), np.uint8)
    for host, count in enumerate(numbers[link.rank]):
        outgoing[host, :count] = data[ends[host] - count : ends[host]]
    received = link.all_to_all(outgoing, label)
    counts = numbers[:, link.rank]
    joined = np.concatenate([received[host, : counts[host]] for host in hosts])
    came = np.frombuffer(joined.tobytes(), rows.dtype)
    return [came.reshape(len(joined), *rows.shape[1:])]
