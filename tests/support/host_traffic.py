"""What a host sends in a training step, by the counters of its sockets.

python -m tests.support.host_traffic SHARD

Prints the bytes of one step, then those of the weights.
"""

import sys

import keras
import numpy as np

import tfdp

WIDTH = 64


class NoteSentBytes(keras.callbacks.Callback):
    """Counts after each step."""

    def __init__(self, link):
        super().__init__()
        self.link = link
        self.counts = []

    def on_train_batch_end(self, batch, logs=None):
        self.counts.append(self.link.sent_bytes("step"))


def main(shard):
    stage, _, group = shard.partition("/")
    strategy = tfdp.MultiHostDataParallelStrategy(
        shard=stage, shard_group=group or "all", shard_min_bytes=0
    )
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((WIDTH,)),
                *(keras.layers.Dense(WIDTH, use_bias=False) for _ in range(3)),
            ]
        )
        if stage == "parameters":
            tfdp.remat(model)
        model.compile(keras.optimizers.Adam(1e-4), "mse", jit_compile=False)
    x = np.random.default_rng(0).normal(size=(32, WIDTH)).astype("float32")
    sent = NoteSentBytes(strategy._group.link)
    model.fit(x, x, batch_size=8, verbose=0, callbacks=[sent])
    print("sent", *np.diff(sent.counts)[-2:], 3 * WIDTH * WIDTH * 4, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
