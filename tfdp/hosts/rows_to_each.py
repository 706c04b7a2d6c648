"""Rows of any number from each host to each other one."""

from __future__ import annotations

import math

import numpy as np

from tfdp.hosts.host_link import HostLink


def rows_to_each(
    link: HostLink, label: str, rows: np.ndarray, numbers: np.ndarray
) -> list[np.ndarray]:
    """Sends rows to each host, as many as its entries of `numbers` [hosts, ...] say.

    Returns the rows that came, by host, and the numbers from each. Cost: those of an
    `all_gather` of the numbers and an `all_to_all` of the most rows for any host.
    """
    hosts, size = range(link.workers), numbers.size
    ranges = [(host * size, (host + 1) * size) for host in hosts]
    (of_all,) = link.all_gather([numbers.reshape(-1)], [ranges], f"numbers of {label}")
    of_all = of_all.reshape(link.workers, *numbers.shape)
    totals = of_all.reshape(link.workers, link.workers, -1).sum(-1)
    # As bytes: every type of number, and strings of bits, survive.
    width = rows.dtype.itemsize * math.prod(rows.shape[1:])
    data = np.frombuffer(rows.tobytes(), np.uint8).reshape(len(rows), width)
    ends = np.cumsum(totals[link.rank])
    outgoing = np.zeros((link.workers, max(1, int(totals.max())), width), np.uint8)
    for host, count in enumerate(totals[link.rank]):
        outgoing[host, :count] = data[ends[host] - count : ends[host]]
    received = link.all_to_all(outgoing, label)
    counts = totals[:, link.rank]
    joined = np.concatenate([received[host, : counts[host]] for host in hosts])
    came = np.frombuffer(joined.tobytes(), rows.dtype)
    return [came.reshape(len(joined), *rows.shape[1:]), of_all[:, link.rank].copy()]
