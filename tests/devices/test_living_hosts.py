"""What does not go with `Communication(min_hosts=...)` is refused, with the reason."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tests.support.apart import linear_model
from tests.support.stand_in_living import StandInLivingHosts
from tfdp.errors import ConfigurationError
from tfdp.strategies import multi_host


@pytest.fixture
def strategy(monkeypatch):
    monkeypatch.setattr(multi_host, "join_living_hosts", StandInLivingHosts)
    monkeypatch.setattr(multi_host.atexit, "register", lambda function: None)
    monkeypatch.setattr(multi_host, "use_virtual_devices", lambda count: None)
    return tfdp.MultiHostDataParallelStrategy(
        tfdp.Cluster(workers=2, rank=1, coordinator="127.0.0.1:1"),
        devices_per_host=2,
        communication=tfdp.Communication(min_hosts=1),
    )


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
    ],
)
def test_a_sync_that_owes_something_to_hosts_is_refused(strategy, sync, words):
    with pytest.raises(ConfigurationError, match=f"{words}.*min_hosts"):
        fit(
            strategy,
            lambda: tfdp.DistributedOptimizer(keras.optimizers.SGD(), sync=sync),
        )


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
