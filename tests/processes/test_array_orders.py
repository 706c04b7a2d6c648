"""Hosts read shuffled arrays in one order, that of one host."""

import itertools

import pytest

from tests.processes.test_seeds import found_in
from tests.support import newer_keras
from tests.support.fresh_python import run_program
from tests.support.workers import Workers

# The last batch, of one row, is left out: a worker without rows computes on another's.
ONE_HOST = """
import json, keras, tfdp
from tests.support.array_orders import made, orders_of
keras.utils.set_random_seed(1)
orders = orders_of(made(tfdp.DataParallelStrategy(["CPU:0"])))
print("ORDERS", json.dumps([epoch[:-1] for epoch in orders]))
"""


@pytest.mark.parametrize("seed", [[], [1]], ids=["none", "one"])
def test_two_hosts_read_in_one_order(seed):
    with Workers(2, "tests.support.array_orders", *seed) as workers:
        first, second = map(found_in, workers.succeed())
    together = [
        [sorted(mine + others) for mine, others in zip(*epochs, strict=True)]
        for epochs in zip(first, second, strict=True)
    ]
    for batches in together:
        rows = list(itertools.chain(*batches))
        assert len(rows) == len(set(rows)) == 12  # none twice
    if newer_keras.GIVES_ARRAYS_OTHER_ORDERS:
        assert together[0] != together[1] != together[2] != together[0]
    else:
        assert together[0] == together[1] == together[2]
    if seed:
        assert together == found_in(run_program(ONE_HOST).stdout)
