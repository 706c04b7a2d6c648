"""One of two workers whose gradients go as over NCCL, by TensorFlow's ring.

`python -m tests.support.nccl_hosts [WIRE_DTYPE]`
"""

import sys

import keras
import numpy as np

import tfdp
from tfdp.exchange import over_collectives
from tfdp.strategies import multi_host

ROWS, FEATURES, UNITS = 20, 6, 16


class AsOverNccl(over_collectives.LevelsOverCollectives):
    """All replicas of all hosts are one group, and launch in one order."""

    def __init__(self, inner, outer, hint):
        super().__init__(inner, outer, "nccl")
        self.large.hint = "ring"


def build():
    layers = [keras.layers.Dense(UNITS, activation="tanh") for _ in range(5)]
    model = keras.Sequential([keras.Input((FEATURES,)), *layers, keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse")
    return model


def trained(build):
    random = np.random.default_rng(3)
    x = random.normal(size=(ROWS, FEATURES)).astype("float32")
    y = random.normal(size=(ROWS, 1)).astype("float32")
    keras.utils.set_random_seed(6)
    model = build()
    # The last batch is short, on both hosts and in both replicas of each.
    model.fit(x, y, batch_size=12, epochs=10, shuffle=False, verbose=0)
    return model.get_weights()


def main(wire_dtype=None):
    over_collectives.SMALLEST_BYTES = 0
    multi_host.LevelsOverCollectives = AsOverNccl
    strategy = tfdp.MultiHostDataParallelStrategy(
        communication=tfdp.Communication(
            engine="tensorflow",
            wire_dtype=wire_dtype,
            bucket_bytes=1100,
            first_bucket_bytes=300,
            timeout_seconds=120,
        )
    )

    def build_within():
        with strategy.scope():
            return build()

    own = trained(build_within)
    print("launches", len(strategy.extended.reducer.transport.large._keys._keys))
    strategy.close()
    expected = trained(build)
    print(
        "off by", max(np.abs(a - b).max() for a, b in zip(own, expected, strict=True))
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
