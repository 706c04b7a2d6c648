"""Hosts that read their own share: together every record once, in every epoch."""

import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tfdp.errors import ConfigurationError

EXAMPLES = 103


@pytest.fixture(scope="module")
def sets(tmp_path_factory):
    """By number of files, the same examples, numbered."""
    numbers = np.arange(EXAMPLES)
    return {
        files: tfdp.data.write_tfrecords(
            {"number": numbers}, tmp_path_factory.mktemp("set"), num_shards=files
        )
        for files in (1, 3, 8)
    }


def numbers_of(dataset):
    return [int(n) for batch in dataset for n in batch["number"].numpy()]


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("files, hosts", [(8, 1), (8, 3), (3, 3), (3, 5), (1, 2)])
def test_every_record_is_read_once(sets, files, hosts, shuffle, capfd):
    shares = []
    for host in range(hosts):
        context = tf.distribute.InputContext(hosts, host, 2 * hosts)
        dataset = tfdp.data.read_tfrecords(
            sets[files], 4 * hosts, shuffle=shuffle, input_context=context
        )
        assert all(len(batch["number"]) <= 2 for batch in dataset)
        shares.append(dataset)
    said = capfd.readouterr().err
    assert f"host {hosts - 1} of {hosts} reads" in said
    assert ("of 3 files" in said) == (files == 3 and hosts <= 3)
    assert (f"one record in {hosts}" in said) == (files < hosts)
    orders = []
    for _ in range(2):
        epoch = [numbers_of(dataset) for dataset in shares]
        assert sorted(sum(epoch, [])) == list(range(EXAMPLES))
        # No host has much more to do than another.
        lengths = [len(numbers) for numbers in epoch]
        most = -(-EXAMPLES // files) if files >= hosts else 1
        assert max(lengths) - min(lengths) <= most + files
        orders.append(epoch)
    assert (orders[0] != orders[1]) == shuffle


@pytest.mark.parametrize("drop_remainder", [False, True])
def test_hosts_without_a_batch_have_an_empty_share(sets, tmp_path, drop_remainder):
    """Three records on four hosts: the last one takes part without rows."""
    index = tfdp.data.write_tfrecords({"number": np.arange(3)}, tmp_path, num_shards=1)
    shares = [
        tfdp.data.read_tfrecords(
            index,
            4,
            drop_remainder=drop_remainder,
            input_context=tf.distribute.InputContext(4, host, 4),
        )
        for host in range(4)
    ]
    assert [len(share) for share in shares] == [1, 1, 1, 0]
    assert sorted(sum(map(numbers_of, shares), [])) == [0, 1, 2]


def test_shares_of_which_none_has_a_batch_are_refused(tmp_path):
    index = tfdp.data.write_tfrecords({"number": np.arange(3)}, tmp_path, num_shards=3)
    context = tf.distribute.InputContext(3, 0, 3)
    with pytest.raises(ConfigurationError, match="a batch has 2 rows and there are 1"):
        tfdp.data.read_tfrecords(index, 6, drop_remainder=True, input_context=context)


def test_a_batch_that_replicas_do_not_divide_is_refused(sets):
    context = tf.distribute.InputContext(2, 0, 4)
    with pytest.raises(ConfigurationError, match="such as 12"):
        tfdp.data.read_tfrecords(sets[3], 10, input_context=context)


def test_records_are_shared_in_one_order_only(sets):
    context = tf.distribute.InputContext(2, 1, 2)
    with pytest.raises(ConfigurationError, match="deterministic=False"):
        tfdp.data.read_tfrecords(sets[1], 4, input_context=context, deterministic=False)


def test_only_the_own_files_have_to_be_there(sets, tmp_path):
    index = tfdp.data.write_tfrecords({"number": np.arange(12)}, tmp_path, num_shards=2)
    index.file_path(index.files[1]).unlink()
    context = tf.distribute.InputContext(2, 0, 2)
    own = tfdp.data.read_tfrecords(index, 4, shuffle=False, input_context=context)
    assert numbers_of(own) == list(range(0, 12, 2))
