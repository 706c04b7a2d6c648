"""A training that saves by `tfdp.callbacks.Checkpoint`, to be stopped and gone on with.

    python -m tests.support.resumed_training FOLDER RESULT [--option value ...]

Writes the final weights and optimizer to RESULT.<rank>.npz, and the numbers of the
samples of each batch that this process trained on to RESULT.<rank>.<start>.samples, a
line for each step as it is trained: `<epoch> <batch> <numbers>`.
"""

import argparse
import json
import os
import signal
import sys
import time

import keras
import numpy as np
import tensorflow as tf

import tfdp

SAMPLES, FEATURES, CLASSES = 96, 8, 3


class Fault(keras.callbacks.Callback):
    """Does what is asked at the end of a step, once over all starts.

    Args:
      kind: "kill", "raise", "stop" (for a while) or "term".
      step: after so many steps of this process.
      seconds: of "stop".
    """

    def __init__(self, kind, step, seconds=3.0):
        super().__init__()
        self.kind, self.step, self.seconds, self.done = kind, step, seconds, 0

    def on_train_batch_end(self, batch, logs=None):
        self.done += 1
        if self.done == self.step:
            strike(self.kind, self.seconds)


def strike(kind, seconds=3.0):
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif kind == "term":
        os.kill(os.getpid(), signal.SIGTERM)
    elif kind == "raise":
        raise RuntimeError("a planned fault")
    elif kind == "stop":
        child = os.fork()
        if not child:
            time.sleep(seconds)
            os.kill(os.getppid(), signal.SIGCONT)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGSTOP)


class Seen(keras.callbacks.Callback):
    """Writes which samples each step has trained on: the model counts them."""

    def __init__(self, path):
        super().__init__()
        self.path = path
        self.before = None

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_begin(self, batch, logs=None):
        self.before = self.model.counts()

    def on_train_batch_end(self, batch, logs=None):
        trained = np.flatnonzero(self.model.counts() - self.before)
        with open(self.path, "a") as file:
            line = {"epoch": self.epoch, "batch": batch, "samples": trained.tolist()}
            file.write(json.dumps(line) + "\n")


class Counting(keras.Model):
    """A small network; its input's last feature is the number of the sample."""

    def __init__(self, dropout):
        super().__init__()
        self.hidden = keras.layers.Dense(16, activation="relu")
        self.norm = keras.layers.BatchNormalization()
        self.dropout = keras.layers.Dropout(dropout) if dropout else None
        self.out = keras.layers.Dense(CLASSES)
        self.seen = self.add_weight(
            shape=(SAMPLES,), initializer="zeros", trainable=False, aggregation="sum"
        )

    def call(self, inputs, training=False):
        if training:
            numbers = tf.cast(inputs[:, -1], tf.int32)
            self.seen.assign_add(tf.reduce_sum(tf.one_hot(numbers, SAMPLES), axis=0))
        x = self.norm(self.hidden(inputs[:, :-1]), training=training)
        if self.dropout is not None:
            x = self.dropout(x, training=training)
        return self.out(x)

    def counts(self):
        return np.rint(np.asarray(self.seen)).astype(int)


def data(kind):
    generator = np.random.default_rng(0)
    x = generator.normal(size=(SAMPLES, FEATURES + 1)).astype("float32")
    x[:, -1] = np.arange(SAMPLES)
    y = generator.integers(0, CLASSES, SAMPLES)
    if kind == "arrays":
        return {"x": x, "y": y, "batch_size": 12}
    dataset = tf.data.Dataset.from_tensor_slices((x, y))
    return {"x": dataset.shuffle(SAMPLES, seed=3).batch(12)}


def model_of(options):
    keras.utils.set_random_seed(1)
    communication = tfdp.Communication(
        wire_dtype=options.wire_dtype, timeout_seconds=120
    )
    strategy = tfdp.auto_strategy(
        **({"shard": options.shard, "shard_min_bytes": 0} if options.shard else {}),
        **({"communication": communication} if options.wire_dtype else {}),
    )
    with strategy.scope():
        model = Counting(options.dropout)
        if options.optimizer == "lars":
            inner = tfdp.optimizers.LARS(0.05, use_ema=True)
        else:
            inner = keras.optimizers.Adam(0.01)
        optimizer = inner
        if options.accumulate > 1:
            optimizer = tfdp.DistributedOptimizer(
                inner, accumulate_steps=options.accumulate
            )
        model.compile(
            optimizer,
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
        model.build((None, FEATURES + 1))
    return model


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("result")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--every-steps", type=int, default=3)
    parser.add_argument("--data", default="dataset")
    parser.add_argument("--optimizer", default="adam")
    parser.add_argument("--shard", default="")
    parser.add_argument("--wire-dtype")
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--dropout", type=float, default=0.3)
    parser.add_argument("--fault", default="", help="kind:rank:step, on the first start")
    options = parser.parse_args()
    rank = int(os.environ.get("TFDP_RANK", os.environ.get("TFDP_WORKER", "0")))
    starts = len([n for n in os.listdir(os.path.dirname(options.result) or ".") if n.startswith(f"{os.path.basename(options.result)}.{rank}.") and n.endswith(".samples")])
    callbacks = [
        Seen(f"{options.result}.{rank}.{starts}.samples"),
        tfdp.callbacks.Checkpoint(options.folder, every_steps=options.every_steps),
    ]
    open(callbacks[0].path, "w").close()
    model = model_of(options)
    strategy = model.distribute_strategy
    cluster = getattr(strategy, "cluster", None)
    own = cluster.rank if cluster else 0
    if options.fault and not starts:
        kind, who, step = options.fault.split(":")
        if int(who) == own:
            callbacks.append(Fault(kind, int(step)))
    history = model.fit(
        **data(options.data), epochs=options.epochs, verbose=0, callbacks=callbacks
    )
    arrays = {f"w{i}": np.asarray(w) for i, w in enumerate(model.get_weights())}
    arrays |= {
        f"o{i}": np.asarray(v.numpy()) for i, v in enumerate(model.optimizer.variables)
    }
    arrays["loss"] = np.array(history.history["loss"])
    np.savez(f"{options.result}.{own}.npz", **arrays)
    print("done", own, model.counts().tolist()[:4], flush=True)


if __name__ == "__main__":
    sys.exit(main())
