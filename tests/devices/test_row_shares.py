"""`balance="speed"` on one of several hosts: its rows of a batch, and what is refused.

How hosts train with it: `tests/processes/test_multi_host.py`.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tests.support.parity import classification_data, dense_model
from tests.support.stand_in_link import StandInLink
from tfdp.errors import ConfigurationError, DataError
from tfdp.strategies import connect_hosts, multi_host, multi_host_loops


class AgreeingLink(StandInLink):
    """Whose other workers read the same batches."""

    def share_note(self, key, note, has_deadline=True):
        return dict.fromkeys(range(self.workers), note)

    def leave_note(self, key, note):
        pass

    def on_note(self, key, listener):
        pass


@pytest.fixture(autouse=True)
def nobody_else(monkeypatch):
    """Workers of their own: the others are this one, as far as the link tells."""
    monkeypatch.setattr(connect_hosts, "make_link", AgreeingLink)
    monkeypatch.setattr(multi_host, "use_virtual_devices", lambda count: None)
    monkeypatch.setattr(multi_host.atexit, "register", lambda function: None)


def balanced(rank=0, workers=3):
    cluster = tfdp.Cluster(workers=workers, rank=rank, coordinator="127.0.0.1:1")
    return tfdp.MultiHostDataParallelStrategy(
        cluster, devices_per_host=2, balance="speed"
    )


def one_of_each_kind(rows):
    numbers = tf.range(rows)
    lengths = numbers % 3
    ragged = tf.RaggedTensor.from_row_lengths(tf.repeat(numbers, lengths), lengths)
    sparse = tf.sparse.from_dense(tf.one_hot(numbers, max(rows, 1), dtype=tf.int32))
    return {"dense": tf.stack([numbers, numbers], axis=1), "ragged": ragged}, sparse


@pytest.mark.parametrize("shares", [(1, 1, 1), (5, 2, 1), (1, 62, 1)])
def test_each_row_of_a_batch_is_of_one_replica_in_the_order_of_ranks(shares):
    hosts = [balanced(rank) for rank in range(3)]
    for strategy in hosts:
        strategy._row_shares._ends.assign(np.cumsum([0, *shares]))
    for rows in (0, 1, 5, 64):
        batch, parts = one_of_each_kind(rows), []
        for strategy in hosts:
            own = strategy.split_batch(batch)
            assert len(own[0][0]["dense"]) - len(own[1][0]["dense"]) in (0, 1)
            parts += own
        dense, ragged = (
            tf.concat([part[0][kind] for part in parts], axis=0)
            for kind in ("dense", "ragged")
        )
        sparse = tf.sparse.concat(0, [part[1] for part in parts])
        np.testing.assert_array_equal(dense, batch[0]["dense"])
        assert ragged.to_list() == batch[0]["ragged"].to_list()
        np.testing.assert_array_equal(sparse.indices, batch[1].indices)


def test_a_step_takes_its_rows_when_it_takes_the_batch():
    """What was read ahead before shares changed is split by the new ones."""
    strategy = balanced(rank=1)
    parts, sparse = one_of_each_kind(48)
    dense, ragged = map(tf.data.Dataset.from_tensor_slices, parts.values())
    batches = tf.data.Dataset.zip(
        dense.batch(24, drop_remainder=True),
        ragged.ragged_batch(24, drop_remainder=True),
        tf.data.Dataset.from_tensor_slices(sparse).batch(24, drop_remainder=True),
    )
    iterator = iter(strategy.experimental_distribute_dataset(batches))
    take = tf.function(lambda iterator: iterator.get_next_as_optional().get_value())
    # No number of rows stands in the type.
    same = tf.function(lambda batch: batch, input_signature=[iterator.element_spec])
    results = strategy.experimental_local_results

    def numbers():
        dense, ragged, sparse = map(results, same(take(iterator)))
        for part, other, third in zip(dense, ragged, sparse, strict=True):
            own = np.asarray(part)[:, 0].tolist()
            assert other.to_list() == [[n] * (n % 3) for n in own]
            assert third.indices.numpy()[:, 1].tolist() == own
            yield own

    assert list(numbers()) == [list(range(8, 12)), list(range(12, 16))]
    strategy._row_shares._ends.assign([0, 1, 11, 12])
    assert list(numbers()) == [list(range(26, 36)), list(range(36, 46))]
    assert take.experimental_get_tracing_count() == 1
    with pytest.raises(tf.errors.InvalidArgumentError, match="does not have a value"):
        take(iterator)


def test_a_dataset_that_a_function_takes_is_split_too():
    strategy = balanced(rank=2)
    batches = tf.data.Dataset.range(24).batch(12)
    distributed = strategy.experimental_distribute_dataset(batches)

    @tf.function
    def rows(dataset):
        total = tf.constant(0)
        for batch in dataset:
            own = strategy.experimental_local_results(batch)
            total += tf.add_n([tf.shape(part)[0] for part in own])
        return total

    assert rows(distributed) == 8


def fitted(optimizer="sgd", **options):
    strategy = balanced(workers=2)
    with strategy.scope():
        model = dense_model()
        model.compile(
            optimizer,
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            **options,
        )
    x, y = classification_data(24)
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(24)
    model.fit(dataset, verbose=0)


class WithOwnOptimizer(keras.Sequential):
    """Trains with an optimizer that it holds, and returns a loss of its own."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(y=y, y_pred=self(x, training=True))
        weights = self.trainable_variables
        self.own.apply(tape.gradient(loss, weights), weights)
        return {"own": loss}


def with_own_optimizer(devices):
    cluster = tfdp.Cluster(workers=2, rank=0, coordinator="127.0.0.1:1")
    strategy = tfdp.MultiHostDataParallelStrategy(cluster, devices_per_host=devices)
    with strategy.scope():
        model = WithOwnOptimizer([keras.Input((12,)), keras.layers.Dense(5)])
        sync = tfdp.sync.Delayed(1)
        model.own = tfdp.DistributedOptimizer(keras.optimizers.SGD(), sync=sync)
        model.own.build(model.trainable_variables)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("sgd", loss, jit_compile=False)
    return model


@pytest.mark.parametrize(
    "callback", [tfdp.callbacks.Stragglers, tfdp.callbacks.GradientNoiseScale]
)
def test_callbacks_find_a_sync_of_any_optimizer(callback):
    model = with_own_optimizer(2)
    with pytest.raises(ConfigurationError, match="sync=..."):
        model.fit(*classification_data(24), verbose=0, callbacks=[callback()])


@pytest.mark.parametrize("devices", [1, 2])
def test_numbers_of_one_host_are_warned_of(devices):
    """Plain steps add them up; a step with late sums does not wait for others."""
    model = with_own_optimizer(devices)
    with pytest.warns(tfdp.errors.LocalMeanWarning, match="hosts do not add it up"):
        model.fit(*classification_data(24), batch_size=24, verbose=0)


def test_what_cannot_be_balanced_is_refused(monkeypatch):
    with pytest.raises(ConfigurationError, match="compile the step again"):
        fitted(jit_compile=True)
    with pytest.raises(ConfigurationError, match="sum of all hosts to decide by"):
        local = tfdp.sync.LocalSGD(4, across="replicas")
        fitted(optimizer=tfdp.DistributedOptimizer(keras.optimizers.SGD(), sync=local))
    strategy = balanced()
    with pytest.raises(ConfigurationError, match="each host reads batches of its own"):
        strategy.distribute_datasets_from_function(lambda _: None)
    batches = tf.data.Dataset.range(24).batch(12, drop_remainder=True)
    with pytest.raises(ConfigurationError, match="InputOptions"):
        strategy.experimental_distribute_dataset(
            batches, tf.distribute.InputOptions(experimental_fetch_to_device=False)
        )
    unlike = tf.data.Dataset.zip(
        (batches, tf.data.Dataset.range(48).batch(24, drop_remainder=True))
    )
    with pytest.raises(DataError, match="have 12 and 24 rows"):
        strategy.experimental_distribute_dataset(unlike)
    monkeypatch.setattr(multi_host_loops, "has_own_shard", lambda adapter, link: True)
    with pytest.raises(ConfigurationError, match="reads a shard on each host"):
        fitted()
