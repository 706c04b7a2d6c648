"""What the comparison of hosts costs of an epoch of 100 ResNet-50 steps.

    tfdp launch --workers 2 -m tests.support.comparison_cost [STEPS BATCH]

Each worker times STEPS steps (3) of global batches of BATCH images (32) of 224 x 224,
and apart from them what the comparison adds: checksums of weights and optimizer state,
two words to the others, and the checksum of each batch. That one is made in the thread
that reads the input: it takes processor time, and time of a step where input is short.
"""

import sys
import time

import keras
import numpy as np
import tensorflow as tf

import tfdp
from tfdp.data.same_batches import BatchRecord, new_dataset_name, same_batches
from tfdp.strategies.multi_host_loops import state_of_host

STEPS_OF_EPOCH = 100
REPEATS = 5
READ = 50


def seconds(work, repeats=REPEATS):
    """The median of so many times, after one that is not counted."""
    taken = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        work()
        taken.append(time.perf_counter() - start)
    return float(np.median(taken[1:]))


def seconds_of_a_checksum(link, images, labels):
    def read(record):
        data = tf.data.Dataset.from_tensors((images, labels)).repeat(READ)
        name = new_dataset_name()
        return list(iter(same_batches(data, link, "", name, record)))

    compared = seconds(lambda: read(BatchRecord()))
    return (compared - seconds(lambda: read(None))) / READ


def main():
    steps, batch = map(int, sys.argv[1:] or (3, 32))
    strategy = tfdp.MultiHostDataParallelStrategy()
    with strategy.scope():
        model = keras.applications.ResNet50(weights=None)
        optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
        model.compile(optimizer, "sparse_categorical_crossentropy", jit_compile=False)
    images = (
        np.random.default_rng(0).normal(size=(batch, 224, 224, 3)).astype("float32")
    )
    labels = np.arange(batch)
    data = tf.data.Dataset.from_tensors((images, labels)).repeat()
    model.fit(data, steps_per_epoch=1, verbose=0)
    start = time.perf_counter()
    model.fit(data, steps_per_epoch=steps, verbose=0)
    step = (time.perf_counter() - start) / steps
    state = seconds(lambda: state_of_host(model))
    words = iter(range(10_000))
    link = strategy.link
    word = seconds(lambda: link.share_note(f"word {next(words)}", "x" * 300), 50)
    checksum = seconds_of_a_checksum(link, images, labels)
    epoch = STEPS_OF_EPOCH * step
    cost = state + 2 * word + STEPS_OF_EPOCH * checksum
    print(
        f"a step {step:.2f} s; checksums of the state {state * 1e3:.0f} ms, a word "
        f"{word * 1e3:.1f} ms, of a batch {checksum * 1e3:.2f} ms: {cost:.2f} s of "
        f"{epoch:.0f} s, {cost / epoch:.3%} of an epoch of {STEPS_OF_EPOCH} steps"
    )


if __name__ == "__main__":
    main()
