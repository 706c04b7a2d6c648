"""Workers that seem to have GPUs, with `engine="auto"`: who carries their gradients?

    python -m tests.support.auto_engine CASE

Logical CPUs stand in for the GPUs, and TensorFlow's ring for NCCL.
"""

import os
import sys
import types

import keras
import numpy as np
import tensorflow as tf

import tfdp
from tfdp.cluster import nvidia
from tfdp.exchange import over_collectives
from tfdp.strategies import connect_hosts

ROWS, FEATURES, RATE = 12, 5, 0.1


def data():
    rng = np.random.default_rng(4)
    x = rng.normal(size=(ROWS, FEATURES)).astype("float32")
    return x, rng.normal(size=(ROWS, 1)).astype("float32")


def expected():
    """One step of SGD from zeros on the whole batch: w = rate * 2/n * x^T y."""
    x, y = data()
    return RATE * 2 / ROWS * x.T.astype("float64") @ y.astype("float64")


def prepare(case, rank):
    has_gpu = case != "one without" or rank == 0
    gpu = types.SimpleNamespace(name="/physical_device:GPU:0")
    connect_hosts.local_gpus = lambda: [gpu] if has_gpu else []
    nvidia.query_gpus = lambda what: ["GPU-a", "GPU-b"]
    os.environ[nvidia.VISIBLE] = "GPU-a" if case == "one GPU" else str(rank)
    tf.config.get_logical_device_configuration = lambda gpu: None
    over_collectives.SMALLEST_BYTES = 0
    if case == "in use" and rank == 1:
        tfdp.use_virtual_devices(2)
        tf.constant(1.0)
    if case == "no library":
        really_try = connect_hosts.try_collectives
        connect_hosts.try_collectives = lambda *arguments: (
            "NotFoundError: libnccl.so.2"
            if rank == 1
            else really_try(*arguments, trial_seconds=3.0)
        )
    if case == "no server" and rank == 1:
        start = connect_hosts.rendezvous_by_collectives

        def fail(link):
            start(link)
            raise tf.errors.UnknownError(None, None, "Could not start gRPC server")

        connect_hosts.rendezvous_by_collectives = fail


def main(case):
    rank = int(os.environ["TFDP_RANK"])
    prepare(case, rank)
    strategy = tfdp.auto_strategy(
        shard="optimizer" if case == "shards" else "none", shard_min_bytes=0
    )
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((FEATURES,)),
                keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros"),
            ]
        )
        model.compile(keras.optimizers.SGD(RATE), "mse")
    x, y = data()
    model.fit(x, y, batch_size=ROWS, verbose=0, shuffle=False)
    np.testing.assert_allclose(model.get_weights()[0], expected(), rtol=0, atol=1e-6)
    print(f"engine {strategy.engine_name}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
