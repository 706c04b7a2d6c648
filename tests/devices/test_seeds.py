"""Which global seed hosts agree on, and which orders it leaves alone."""

import numpy as np
import pytest
import tensorflow as tf

from tests.support.seed_order import order_of
from tfdp import data
from tfdp._private import names
from tfdp.data import hosts


@pytest.fixture(autouse=True)
def _no_seed(monkeypatch):
    before = names.global_seed()
    names.put_global_seed(None)
    monkeypatch.setattr(hosts, "_agreed", None)
    yield
    names.put_global_seed(before)


@pytest.mark.parametrize("seed", [0, 1, 2**31 - 1])
def test_the_seed_of_the_first_hosts_program_is_everybodys(seed):
    tf.random.set_seed(seed)
    shared = hosts.seed_to_share()
    names.put_global_seed(None)
    hosts.agree_on_seed(shared)
    assert names.global_seed() == hosts.program_seed() == seed


def test_a_program_keeps_its_own_seed():
    tf.random.set_seed(0)
    hosts.agree_on_seed(np.array([1, 5]))
    assert names.global_seed() == 0


def test_a_drawn_seed_is_nobodys():
    shared = hosts.seed_to_share()
    hosts.agree_on_seed(shared)
    assert names.global_seed() == shared[1] and hosts.program_seed() is None
    # A second strategy in the process: the same, and the draws go on.
    first = tf.random.uniform([]).numpy()
    np.testing.assert_array_equal(hosts.seed_to_share(), shared)
    hosts.agree_on_seed(shared)
    assert tf.random.uniform([]).numpy() != first
    # Set later, it is the program's.
    tf.random.set_seed(3)
    assert hosts.program_seed() == 3


@pytest.mark.parametrize("seed", [0, 7])
def test_records_come_in_the_order_of_their_seed(tmp_path, seed):
    data.write_tfrecords({"x": np.arange(40)}, tmp_path, num_shards=2)
    alone = order_of(tmp_path, seed)
    assert order_of(tmp_path, seed) == alone
    for job in (0, 12345, 2**31 - 1):
        names.put_global_seed(None)
        hosts._agreed = None
        hosts.agree_on_seed(np.array([0, job]))
        assert order_of(tmp_path, seed) == alone
        assert names.global_seed() == job
    # What the program sets has a say, as on one host.
    tf.random.set_seed(5)
    assert order_of(tmp_path, seed) != alone
