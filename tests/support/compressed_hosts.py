"""A worker that sums compressed gradients over hosts: path, engine, devices, methods.

Writes `PATH.METHOD.RANK.npz`: the weights after some steps of rate 1 from zero, what is
left with this host, and how many bytes its link sent.
"""

import sys

import keras
import numpy as np
import tensorflow as tf

import tfdp
from tests.support.compression_table import METHODS

SHAPES = [(64, 40), (3, 3, 4, 16)]
STEPS = 3
OPTIMIZERS = {
    "one-bit-adam": lambda: tfdp.optimizers.OneBitAdam(
        1.0,
        warmup_steps=1,
        beta_1=0.0,
        epsilon=1.0,
        compression=METHODS["sign"],
    ),
    # From zero the ratio of the warm-up is 1, and the factor may not move.
    "one-bit-lamb": lambda: tfdp.optimizers.OneBitLAMB(
        1.0,
        warmup_steps=1,
        beta_1=0.0,
        epsilon=1.0,
        least_factor=1.0,
        most_factor=1.0,
        compression=METHODS["sign"],
    ),
}


def draw(replicas):
    rng = np.random.default_rng(0)
    return [
        [[rng.standard_normal(s).astype("float32") for s in SHAPES] for _ in range(n)]
        for n in [replicas] * STEPS
    ]


def train(name, engine, devices, path):
    method = METHODS.get(name)
    strategy = tfdp.MultiHostDataParallelStrategy(
        devices_per_host=devices,
        communication=tfdp.Communication(
            engine=engine, compression=method, timeout_seconds=120
        ),
    )
    with strategy.scope():
        weights = [keras.Variable(tf.zeros(shape), name="w") for shape in SHAPES]
        optimizer = OPTIMIZERS.get(name, lambda: keras.optimizers.SGD(1.0))()
        optimizer.build(weights)

    @tf.function
    def run(inputs):
        strategy.run(lambda parts: optimizer.apply(list(parts), weights), (inputs,))

    link = strategy._group.link
    before = None
    for of_step in draw(strategy.num_replicas_in_sync):
        inputs = strategy.experimental_distribute_values_from_function(
            lambda context, now=of_step: [
                tf.constant(g) for g in now[context.replica_id_in_sync_group]
            ]
        )
        run(inputs)
        # Not the first step, in which hosts agree on more.
        before = link.sent_bytes() if before is None else before
    sent = (link.sent_bytes() - before) / (STEPS - 1)
    kept = getattr(optimizer, "compression_state", None)
    left = (
        [k.residual.copies[0].numpy() for k in kept.of_variables.values()]
        if kept
        else []
    )
    np.savez(
        f"{path}.{name}.{strategy.cluster.rank}.npz",
        *[weight.numpy() for weight in weights],
        *left,
        sent=sent,
    )
    strategy.close()


if __name__ == "__main__":
    path, engine, devices, *names = sys.argv[1:]
    for name in names:
        train(name, engine, int(devices), path)
