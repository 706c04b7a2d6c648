"""A training with `callbacks.Traffic` on several hosts, beside the kernel's counts.

    python -m tests.support.traffic_workers WIDTH ENGINE

Prints, in one line of JSON, what the callback said of each epoch in whole bytes, and by
how much the kernel's own counts grew in it: of the sockets of the rings (what was
handed to TCP) and of the network cards (all that was sent, with headers). A card of
another process would count, too: that is for network namespaces.
"""

import json
import pathlib
import sys
import time

import keras
import numpy as np

import tfdp
from tests.support.tcp_counts import handed_to_tcp
from tfdp.hosts import shared_memory

# What lies in shared memory, the kernel does not count.
shared_memory.CAN_SHARE = False

BATCHES, EPOCHS = 4, 3


def sent_by_cards():
    """What the network cards of this namespace have sent, headers included."""
    lines = pathlib.Path("/proc/net/dev").read_text("utf-8").splitlines()[2:]
    return sum(int(line.partition(":")[2].split()[8]) for line in lines)


def sent_to_the_end():
    """The same when what was handed over has left: the last of it may lie in a queue.

    Heartbeats go on: some bytes in each of three looks are silence.
    """
    sent, silent = sent_by_cards(), 0
    for _ in range(200):
        time.sleep(0.05)
        before, sent = sent, sent_by_cards()
        silent = silent + 1 if sent - before < 1000 else 0
        if silent == 3:
            break
    return sent


class KernelCounts(keras.callbacks.Callback):
    """Notes the kernel's counts where `Traffic` takes its own."""

    def __init__(self, link):
        super().__init__()
        self.link = link
        self.at_begin, self.grown = None, []

    def read(self):
        sockets = handed_to_tcp(self.link)
        return np.array([sockets, sent_to_the_end()])

    def on_epoch_begin(self, epoch, logs=None):
        self.at_begin = self.read()

    def on_train_batch_end(self, batch, logs=None):
        self.at_end = self.read()

    def on_epoch_end(self, epoch, logs=None):
        self.grown.append((self.at_end - self.at_begin).tolist())


def main(width, engine):
    strategy = tfdp.MultiHostDataParallelStrategy(
        communication=tfdp.Communication(engine=engine)
    )
    with strategy.scope():
        layers = [keras.layers.Dense(width, use_bias=False) for _ in range(2)]
        model = keras.Sequential([keras.Input((width,)), *layers])
        model.compile("sgd", "mse", jit_compile=False)
    x = np.random.default_rng(0).normal(size=(8 * BATCHES, width)).astype("float32")
    link = strategy._group.link if strategy._group else None
    kernel = KernelCounts(link)
    history = model.fit(
        x,
        x,
        batch_size=8,
        epochs=EPOCHS,
        validation_data=(x, x),
        verbose=0,
        callbacks=[tfdp.callbacks.Traffic(), kernel],
    ).history
    counts = {
        "within": [n * BATCHES for n in history["bytes_within_hosts"]],
        "between": [n * BATCHES for n in history["bytes_between_hosts"]],
        "sockets": [grown[0] for grown in kernel.grown],
        "cards": [grown[1] for grown in kernel.grown],
        "gradients": BATCHES * sum(w.nbytes for w in model.get_weights()),
    }
    print("counts", json.dumps(counts), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
