"""A training with `callbacks.GradientNoiseScale`, on one host or several.

    python -m tests.support.noise_workers [WIRE_DTYPE]

Prints, in one line of JSON, what each step gave and the estimate.
"""

import dataclasses
import json
import sys

import keras

import tfdp
from tests.support.parity import classification_data, dense_model


class NotesNorms(tfdp.callbacks.GradientNoiseScale):
    """Keeps what each step gave."""

    def __init__(self):
        super().__init__(decay=1.0)
        self.norms = []

    def add_step(self, norms):
        self.norms.append(norms)
        super().add_step(norms)


def main(wire_dtype=None):
    strategy = tfdp.MultiHostDataParallelStrategy(
        communication=tfdp.Communication(wire_dtype=wire_dtype)
    )
    with strategy.scope():
        model = dense_model()
        model.compile(
            keras.optimizers.SGD(0.05),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            jit_compile=False,
        )
    callback = NotesNorms()
    # 24, 24 and 16 rows: parts of 6 and of 4.
    x, y = classification_data(64)
    model.fit(
        x, y, batch_size=24, epochs=2, shuffle=False, verbose=0, callbacks=[callback]
    )
    found = {
        "replicas": strategy.num_replicas_in_sync,
        "norms": callback.norms,
        "estimate": dataclasses.astuple(callback.estimate),
    }
    print("noise", json.dumps(found), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
