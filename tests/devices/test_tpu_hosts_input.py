"""Input of a TPU of several hosts: two pipelines, each for two of four replicas.

Over the stand-in, which is told that its replicas have two hosts.
"""

import dataclasses

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.support.parity import (
    classification_data,
    largest_difference,
    rounding_bound,
    train,
)
from tests.support.tpu_stand_in import StandInStrategy, device_name
from tfdp import data

SAMPLES, BATCH_SIZE, HOSTS = 96, 24, 2


@pytest.fixture
def strategy():
    made = StandInStrategy(4)
    made.extended._device_input_worker_devices = {
        device_name(0): [device_name(0), device_name(1)],
        device_name(1): [device_name(2), device_name(3)],
    }
    return made


def test_every_host_takes_its_part_of_each_batch(strategy):
    samples = classification_data(samples=53)
    one, _ = train(None, data=samples)
    several, _ = train(strategy, data=samples)
    # As in test_tpu_strategy.py: ten gradients below 3, in six updates.
    bound = rounding_bound(one, 6, BATCH_SIZE, gradient_bound=3, learning_rate=0.5)
    assert largest_difference(one, several) <= bound < 1e-3


def test_every_host_reads_its_own_files(strategy):
    url = "ram://hosts/train"
    x, y = classification_data(samples=SAMPLES)
    data.write_tfrecords({"x": x, "y": y}, url, num_shards=4)
    index = data.verify_tfrecords(url)
    files_read = {}

    def read(context):
        host, hosts = context.input_pipeline_id, context.num_input_pipelines
        own = dataclasses.replace(index, files=index.files[host::hosts])
        files_read[host] = [file.name for file in own.files]
        return data.read_tfrecords(
            own,
            context.get_per_replica_batch_size(BATCH_SIZE),
            as_supervised=("x", "y"),
            drop_remainder=True,
            repeat=True,
            shuffle=False,
        )

    def fit(dataset, scope):
        with scope:
            keras.utils.set_random_seed(3)
            model = keras.Sequential([keras.Input((12,)), keras.layers.Dense(5)])
            model.compile(
                keras.optimizers.SGD(0.05, momentum=0.9),
                keras.losses.SparseCategoricalCrossentropy(from_logits=True),
                jit_compile=False,
            )
        steps = SAMPLES // BATCH_SIZE
        model.fit(dataset, epochs=2, steps_per_epoch=steps, verbose=0)
        return model

    several = fit(strategy.distribute_datasets_from_function(read), strategy.scope())
    assert sorted(files_read[0] + files_read[1]) == [f.name for f in index.files]
    assert len(files_read) == HOSTS and not set(files_read[0]) & set(files_read[1])

    # One device, on the same global batches: of host 0 the parts of replicas 0 and 1,
    # then those of host 1.
    contexts = [tf.distribute.InputContext(HOSTS, host, 4) for host in range(HOSTS)]
    parts = [iter(read(context)) for context in contexts]
    batches = []
    for _ in range(SAMPLES // BATCH_SIZE):
        pieces = [next(part) for part in parts for _ in range(2)]
        batches.append([np.concatenate(column) for column in zip(*pieces, strict=True)])
    rows = np.concatenate([batch[0] for batch in batches])
    # Every record once in an epoch.
    assert sorted(map(tuple, rows.tolist())) == sorted(map(tuple, x.tolist()))
    columns = tuple(np.concatenate(column) for column in zip(*batches, strict=True))
    whole = tf.data.Dataset.from_tensor_slices(columns).batch(BATCH_SIZE).repeat()
    one = fit(whole, tf.distribute.get_strategy().scope())
    bound = rounding_bound(one, 8, BATCH_SIZE, gradient_bound=3, learning_rate=0.5)
    assert largest_difference(one, several) <= bound < 1e-3
