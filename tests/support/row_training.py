"""Trains tables of words on several hosts, and what a host sends for their rows.

    python -m tests.support.row_training FILE REPEATED_ROWS

Under TFDP_* variables every worker trains each of `TRAININGS` and writes its weights to
FILE.name.rank.npz, with the bytes that it sent in steps.
"""

import dataclasses
import os
import sys

import keras
import numpy as np

import tfdp

ROWS, LENGTH, WIDTH = 24, 64, 6
# A table that is no small one (`tfdp.exchange.sparse`), of which the first host of two
# has more words in the first batch than its share, and the second has few.
WORDS = 700


def sgd():
    return keras.optimizers.SGD(0.5, momentum=0.9)


def adam():
    return keras.optimizers.Adam(0.01, epsilon=1e-3)


def few_words():
    rng = np.random.default_rng(5)
    return np.minimum(rng.zipf(1.5, (ROWS, LENGTH)), WORDS) - 1


def many_words_on_the_first_host():
    """In the first batch; in the second, of fewer rows, both have few."""
    words = few_words() % 5
    words[:12] = np.arange(12 * LENGTH).reshape(12, LENGTH) % WORDS
    return np.concatenate([words, few_words()[:5]])


@dataclasses.dataclass(frozen=True)
class Training:
    """What is trained."""

    optimizer: object = sgd
    words: object = few_words


TRAININGS = {
    "sgd": Training(),
    "adam": Training(adam),
    "whole-table": Training(words=many_words_on_the_first_host),
}


def trained(training, strategy, optimizer=None):
    """The weights; `optimizer` in the place of the training's own."""
    words = training.words()
    y = np.random.default_rng(1).normal(size=(len(words), 2)).astype("float32")
    with strategy.scope():
        keras.utils.set_random_seed(3)
        model = keras.Sequential(
            [
                keras.Input((LENGTH,), dtype="int32"),
                keras.layers.Embedding(WORDS, WIDTH),
                keras.layers.GlobalAveragePooling1D(),
                keras.layers.Dense(2),
            ]
        )
        model.compile((optimizer or training.optimizer)(), "mse", jit_compile=False)
    model.fit(words, y, batch_size=ROWS, shuffle=False, epochs=2, verbose=0)
    return model.get_weights()


def main(path, repeated_rows):
    strategy = tfdp.MultiHostDataParallelStrategy(
        communication=tfdp.Communication(
            repeated_rows=repeated_rows, timeout_seconds=60
        )
    )
    print("engine", strategy.engine_name, flush=True)
    link = strategy.link
    for name, training in TRAININGS.items():
        before = link.sent_bytes("step")
        weights = trained(training, strategy)
        sent = link.sent_bytes("step") - before
        np.savez(f"{path}.{name}.{strategy.cluster.rank}.npz", *weights, sent=sent)


if __name__ == "__main__":
    os.environ.setdefault("TFDP_DEVICES_PER_WORKER", "2")
    main(*sys.argv[1:])
