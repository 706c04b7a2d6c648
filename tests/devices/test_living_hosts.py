"""What does not go with `Communication(min_hosts=...)` is refused, with the reason."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tests.support.apart import linear_model
from tests.support.stand_in_living import StandInLivingHosts
from tfdp.errors import ConfigurationError
from tfdp.step.elastic_rounds import ElasticRounds
from tfdp.strategies import multi_host


def make_living(monkeypatch, rank, devices):
    monkeypatch.setattr(multi_host, "join_elastic_hosts", StandInLivingHosts)
    monkeypatch.setattr(multi_host.atexit, "register", lambda function: None)
    monkeypatch.setattr(multi_host, "use_virtual_devices", lambda count: None)
    return tfdp.MultiHostDataParallelStrategy(
        tfdp.Cluster(workers=2, rank=rank, coordinator="127.0.0.1:1"),
        devices_per_host=devices,
        communication=tfdp.Communication(min_hosts=1),
    )


@pytest.fixture
def strategy(monkeypatch):
    return make_living(monkeypatch, 1, 2)


def fit(strategy, optimizer, **options):
    with strategy.scope():
        model = linear_model()
        model.compile(optimizer(), "mse", jit_compile=False)
    rows = np.ones((8, 5), "float32")
    model.fit(rows, rows[:, :1], verbose=0, **options)


@pytest.mark.parametrize(
    "sync, words",
    [
        (tfdp.sync.DiLoCo(fragments=2), "fragments=2"),
        (tfdp.sync.DiLoCo(overlap_steps=2), "overlap_steps=2"),
        (tfdp.sync.DiLoCo(mixing=0.5), "mixing=0.5"),
        (tfdp.sync.DiLoCo(start_step=3), "start_step=3"),
        (tfdp.sync.LocalSGD(4, start_step=3), "start_step=3"),
        (tfdp.sync.DiLoCo(across="replicas"), "across='replicas'"),
        (tfdp.sync.DiLoCo(compression=tfdp.compression.Int8()), "compression="),
        (tfdp.sync.DiLoCo(quorum=3), "quorum=3"),
    ],
)
def test_a_sync_that_owes_something_to_hosts_is_refused(strategy, sync, words):
    with pytest.raises(ConfigurationError, match=f"(?s){words}.*min_hosts"):
        fit(
            strategy,
            lambda: tfdp.DistributedOptimizer(keras.optimizers.SGD(), sync=sync),
        )


def test_a_quorum_of_all_hosts_is_the_training_without_one(strategy):
    with strategy.scope():
        for quorum, kind in ((None, ElasticRounds), (2, ElasticRounds)):
            sync = tfdp.sync.DiLoCo(quorum=quorum)
            optimizer = tfdp.DistributedOptimizer(keras.optimizers.SGD(), sync=sync)
            optimizer.build(linear_model().trainable_variables)
            assert type(optimizer.rounds._elastic) is kind


@pytest.mark.parametrize("quorum, seconds", [(2, 1.0), (1, 600.0), (1, 1e9)])
def test_a_grace_that_cannot_act_is_refused(strategy, quorum, seconds):
    """No host is late for a quorum of all; after 600 seconds a late one is lost."""
    sync = tfdp.sync.DiLoCo(quorum=quorum, grace_seconds=seconds)
    words = r"below Communication\(timeout_seconds=600\).*quorum is all 2 hosts"
    with pytest.raises(ConfigurationError, match=words):
        fit(
            strategy,
            lambda: tfdp.DistributedOptimizer(keras.optimizers.SGD(), sync=sync),
        )


def test_a_model_has_one_optimizer(strategy):
    """Rounds of two would have the same number."""

    def optimizer():
        sync = tfdp.sync.DiLoCo(every=2)
        return tfdp.DistributedOptimizer(keras.optimizers.SGD(), sync=sync)

    with strategy.scope():
        model = linear_model()
        model.other = optimizer()
        model.compile(optimizer(), "mse", jit_compile=False)
    with pytest.raises(ConfigurationError, match="several optimizers.*one round"):
        model.fit(np.ones((8, 5)), np.ones((8, 1)), verbose=0)


def test_a_quorum_needs_hosts_that_may_come_back():
    strategy = tfdp.DataParallelStrategy(
        ["CPU:0", "CPU:1"], communication=tfdp.Communication(hierarchy=(2, 1))
    )
    sync = tfdp.sync.DiLoCo(quorum=1)
    with pytest.raises(ConfigurationError, match="quorum=1.*min_hosts"):
        fit(
            strategy,
            lambda: tfdp.DistributedOptimizer(keras.optimizers.SGD(), sync=sync),
        )


def spare(count=1):
    return tfdp.DistributedOptimizer(
        keras.optimizers.SGD(), sync=tfdp.sync.BackupWorkers(spare=count)
    )


def test_spare_hosts_must_leave_those_that_are_needed(strategy):
    with pytest.raises(
        ConfigurationError, match=r"spare=2.*\(min_hosts=1\).*must be left"
    ):
        fit(strategy, lambda: spare(2))
    with pytest.raises(ConfigurationError, match="spare=1.*min_hosts"):
        fit(tfdp.DataParallelStrategy(["CPU:0", "CPU:1"]), spare)


def test_what_counts_all_hosts_is_refused_beside_spare_ones(strategy):
    with pytest.raises(ConfigurationError, match="NaNGuard"):
        fit(strategy, spare, callbacks=[tfdp.callbacks.NaNGuard()])
    with strategy.scope():
        model = linear_model()
        loss = keras.losses.MeanSquaredError(reduction="sum")
        model.compile(spare(), loss, jit_compile=False)
    with pytest.raises(ConfigurationError, match="sums over rows"):
        model.fit(np.ones((8, 5)), np.ones((8, 1)), verbose=0)


class StoresLate(keras.Sequential):
    """Normalizes once more after its update."""

    def train_step(self, data):
        logs = super().train_step(data)
        self(data[0], training=True)
        return logs


@pytest.mark.parametrize(
    "kind, steps, words",
    [
        (keras.Sequential, 2, "accumulate_steps .* moves in between"),
        (StoresLate, 1, "stores .*moving_mean.* after its update"),
    ],
)
def test_state_that_spare_hosts_would_not_send_is_refused(strategy, kind, steps, words):
    with strategy.scope():
        model = kind([keras.Input((5,)), keras.layers.BatchNormalization()])
        optimizer = tfdp.DistributedOptimizer(
            keras.optimizers.SGD(),
            sync=tfdp.sync.BackupWorkers(spare=1),
            accumulate_steps=steps,
        )
        model.compile(optimizer, "mse", jit_compile=False)
    with pytest.raises(ConfigurationError, match=words):
        model.fit(np.ones((8, 5)), np.ones((8, 5)), verbose=0)


def test_no_spare_host_is_plain_training_bit_for_bit():
    x = np.random.default_rng(3).normal(size=(24, 5)).astype("float32")
    found = []
    for sync in (None, tfdp.sync.BackupWorkers(spare=0)):
        with tfdp.DataParallelStrategy(["CPU:0", "CPU:1"]).scope():
            model = linear_model()
            adam = keras.optimizers.Adam(0.01)
            optimizer = tfdp.DistributedOptimizer(adam, sync=sync)
            model.compile(optimizer, "mse", jit_compile=False)
        model.fit(x, x[:, :1], batch_size=7, shuffle=False, verbose=0)
        found.append(np.concatenate([w.ravel() for w in model.get_weights()]))
    np.testing.assert_array_equal(*found)


@pytest.mark.parametrize(
    "optimizer",
    [
        keras.optimizers.Adam,
        lambda: tfdp.DistributedOptimizer(keras.optimizers.SGD(), accumulate_steps=2),
    ],
)
def test_gradients_over_all_hosts_are_refused(strategy, optimizer):
    with pytest.raises(ConfigurationError, match="adds up its gradients.*sync="):
        fit(strategy, optimizer)


@pytest.mark.parametrize(
    "ask",
    [
        lambda s: s.barrier(),
        lambda s: s.gather_bytes(b"", "words"),
        lambda s: s.from_chief(np.ones(1)),
    ],
)
def test_what_needs_all_hosts_at_once_is_refused(strategy, ask):
    with pytest.raises(ConfigurationError, match="min_hosts"):
        ask(strategy)


def test_checkpoints_of_all_hosts_are_refused(strategy, tmp_path):
    with pytest.raises(ConfigurationError, match="min_hosts"):
        fit(
            strategy,
            lambda: tfdp.DistributedOptimizer(
                keras.optimizers.SGD(), sync=tfdp.sync.DiLoCo(every=2)
            ),
            callbacks=[tfdp.callbacks.Checkpoint(tmp_path)],
        )


def test_random_layers_draw_apart_from_those_of_other_hosts(strategy):
    draws = []
    for each in (strategy, tfdp.DataParallelStrategy(["CPU:0", "CPU:1"])):
        with each.scope():
            seeds = keras.random.SeedGenerator(7)
        result = each.run(tf.function(lambda s=seeds: keras.random.uniform([], seed=s)))
        draws += [float(part) for part in each.experimental_local_results(result)]
    assert len(set(draws)) == 4, draws


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "1"])
def test_a_number_of_hosts_is_a_whole_one(value):
    with pytest.raises(ConfigurationError, match="min_hosts"):
        tfdp.Communication(min_hosts=value)


def test_a_host_of_one_replica_that_has_no_rows_makes_one_up(monkeypatch):
    """The last batch has a row, which is the other host's."""
    seen = []

    class Seen(keras.layers.Layer):
        def call(self, inputs):
            seen.append(inputs.shape[0])
            return inputs

    strategy = make_living(monkeypatch, 0, 1)
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((5,)),
                keras.layers.BatchNormalization(momentum=0.5),
                Seen(),
                keras.layers.Dense(1),
            ]
        )
        optimizer = tfdp.DistributedOptimizer(
            keras.optimizers.Adam(0.1), sync=tfdp.sync.LocalSGD(every=100)
        )
        model.compile(optimizer, "mse", jit_compile=False)
    x = np.random.default_rng(1).normal(size=(9, 5)).astype("float32")
    model.fit(x, x[:, :1], batch_size=8, shuffle=False, verbose=0)
    local = [
        np.asarray(v.value.local_copy(0) if v.value.has_local else v)
        for v in model.weights
    ]
    assert all(np.isfinite(weight).all() for weight in local)
    own = x[:4].astype("float64")
    np.testing.assert_allclose(local[2], own.mean(0) / 2, rtol=0, atol=1e-6)
