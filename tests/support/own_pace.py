"""Hosts that train at their own pace: what each pushed, when owners applied it, and
the weights at the ends.

    python -m tests.support.own_pace FOLDER

Under TFDP_* variables every worker trains each scenario, and writes its numbers into
FOLDER/NAME.RANK.json.
"""

import json
import pathlib
import sys
import time

import keras
import numpy as np
import tensorflow as tf

import tfdp
from tests.support.apart import linear_model, regression_data
from tfdp.hosts.pushes import IndexedRows, PushLink
from tfdp.step.owned_parts import OwnedParts

BATCH, ROWS, EPOCHS = 8, 69, 2
RATE, MOMENTUM = 0.02, 0.5
# Worker 1 waits in its step WAITS until worker 0 has pushed all of its epoch's steps.
WAITS = 2
LONGEST_WAIT_SECONDS = 600
WORDS, WIDTH = 41, 3


class Log:
    """What this worker pushed, by which weights, and what it applied as an owner."""

    def __init__(self, folder):
        self.pushed, self.applied = [], []
        self.before = PushLink.push, OwnedParts.apply
        log = self

        def push(link, rate, gradients):
            if gradients:
                log.pushed.append(dict(link._versions))
            weights = log.before[0](link, rate, gradients)
            (folder / f"pushed.{link._link.rank}").write_text(str(len(log.pushed)))
            return weights

        def apply(owner, push):
            kinds = [type(part) is IndexedRows for part in push.parts.values()]
            sizes = [
                len(part.indices) if type(part) is IndexedRows else len(part)
                for part in push.parts.values()
            ]
            log.applied.append(
                (push.rank, push.version, owner.version, push.rate, kinds, sizes)
            )
            log.before[1](owner, push)

        PushLink.push, OwnedParts.apply = push, apply

    def close(self):
        PushLink.push, OwnedParts.apply = self.before


class Waits(keras.callbacks.Callback):
    """Random delays, and one until the other worker has ended its steps."""

    def __init__(self, folder, rank, others):
        super().__init__()
        self.file, self.rank, self.others = folder / "pushed.0", rank, others
        self.random, self.epoch = np.random.default_rng(rank), 0

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_begin(self, batch, logs=None):
        if self.rank == 1 and batch == WAITS:
            until = time.monotonic() + LONGEST_WAIT_SECONDS
            while time.monotonic() < until:
                text = self.file.read_text() if self.file.exists() else ""
                if text and int(text) >= (self.epoch + 1) * self.others:
                    return
                time.sleep(0.01)
        elif self.random.random() < 0.3:
            time.sleep(self.random.exponential(0.02))


def compiled(strategy, build, inner, loss="mse", **options):
    with strategy.scope():
        model = build()
        sync = tfdp.sync.Asynchronous()
        optimizer = tfdp.DistributedOptimizer(inner(), sync=sync)
        model.compile(optimizer, loss, jit_compile=False, **options)
    return model


def numbers_of(model, log):
    return {
        "weights": [w.tolist() for w in model.get_weights()],
        "pushed": log.pushed,
        "applied": log.applied,
        "staleness": model.optimizer.staleness_counts,
        "iterations": int(model.optimizer.iterations.numpy()),
    }


def replay(strategy, folder):
    """A linear model, SGD with momentum, a rate that differs by epoch."""
    rank, log = strategy.cluster.rank, Log(folder)
    model = compiled(
        strategy, linear_model, lambda: keras.optimizers.SGD(RATE, momentum=MOMENTUM)
    )
    x, y = regression_data(ROWS)
    steps = -(-ROWS // BATCH)
    rates = keras.callbacks.LearningRateScheduler(lambda epoch: RATE / (1 + epoch))
    waits = Waits(folder, rank, others=steps)
    options = {"batch_size": BATCH, "shuffle": False, "verbose": 0, "epochs": EPOCHS}
    history = model.fit(
        x, y, validation_data=(x, y), callbacks=[rates, waits], **options
    ).history
    log.close()
    return numbers_of(model, log) | {"validation": history["val_loss"]}


def embedding_model():
    keras.utils.set_random_seed(3)
    return keras.Sequential(
        [
            keras.Input((2,), dtype="int32"),
            keras.layers.Embedding(WORDS, WIDTH),
            keras.layers.Flatten(),
            keras.layers.Dense(1),
        ]
    )


def words(rows):
    rng = np.random.default_rng(5)
    return rng.integers(0, WORDS, (rows, 2)), rng.normal(size=(rows, 1))


def clipped_adam():
    options = {"epsilon": 1e-3, "global_clipnorm": 0.2, "weight_decay": 0.01}
    inner = keras.optimizers.Adam(0.01, **options)
    inner.exclude_from_weight_decay(var_names=["bias"])
    return inner


def embeddings(strategy, folder):
    """Adam with clipping, and a table whose rows are cut between the owners."""
    log = Log(folder)
    model = compiled(strategy, embedding_model, clipped_adam)
    tokens, targets = words(ROWS)
    options = {"batch_size": BATCH, "shuffle": False, "verbose": 0}
    model.fit(tokens, targets, **options)
    log.close()
    return numbers_of(model, log)


def normalized_model():
    keras.utils.set_random_seed(3)
    return keras.Sequential(
        [
            keras.Input((5,)),
            keras.layers.Dense(6, activation="tanh"),
            keras.layers.Dropout(0.2),
            keras.layers.BatchNormalization(momentum=0.8),
            keras.layers.Dense(1),
        ]
    )


def unequal(strategy, folder):
    """Each worker makes other numbers of steps, by its data and by its argument."""
    rank, log = strategy.cluster.rank, Log(folder)
    model = compiled(
        strategy, normalized_model, lambda: keras.optimizers.Adam(0.01, use_ema=True)
    )
    x, y = regression_data(ROWS)

    def own(context):
        count = 24 if context.input_pipeline_id == 0 else 8
        return tf.data.Dataset.from_tensor_slices((x[:count], y[:count])).batch(4)

    model.fit(strategy.distribute_datasets_from_function(own), epochs=2, verbose=0)
    by_data = int(model.optimizer.iterations.numpy())
    options = {"batch_size": BATCH, "shuffle": False, "verbose": 0, "epochs": 2}
    model.fit(x, y, steps_per_epoch=(7, 2)[rank], **options)
    log.close()
    state = [v.numpy().tolist() for v in model.variables]
    return numbers_of(model, log) | {"by_data": by_data, "state": state}


def adam():
    return keras.optimizers.Adam(0.01)


def looks(strategy, folder):
    """Evaluations and checkpoints within an epoch, and a training that goes on."""
    log = Log(folder)
    model = compiled(strategy, linear_model, adam)
    x, y = regression_data(ROWS)
    seen = []

    def look(batch, logs):
        if batch == 3:
            loss = model.evaluate(x, y, verbose=0)
            own = float(np.mean((model.predict(x, verbose=0)[: len(y)] - y) ** 2))
            seen.append([loss, own, int(model.optimizer.iterations.numpy())])

    callback = keras.callbacks.LambdaCallback(on_train_batch_end=look)
    saves = tfdp.callbacks.Checkpoint(folder / "looks", every_steps=5)
    options = {"batch_size": BATCH, "shuffle": False, "verbose": 0}
    model.fit(x, y, callbacks=[callback, saves], epochs=2, **options)
    log.close()
    again = compiled(strategy, linear_model, adam)
    resumes = tfdp.callbacks.Checkpoint(folder / "looks", every_steps=5)
    again.fit(x, y, callbacks=[resumes], epochs=2, **options)
    restored = [w.tolist() for w in again.get_weights()]
    return numbers_of(model, log) | {"seen": seen, "restored": restored}


def learned(strategy, folder):
    """Digits of two blobs of pixels each: does it learn?"""
    rng = np.random.default_rng(1)
    means = np.random.default_rng(2).normal(size=(10, 32))
    labels = rng.integers(0, 10, 4000)
    x = (means[labels] + rng.normal(size=(4000, 32))).astype("float32")

    def build():
        keras.utils.set_random_seed(3)
        layers = keras.layers
        hidden = layers.Dense(32, activation="relu")
        return keras.Sequential([keras.Input((32,)), hidden, layers.Dense(10)])

    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    sgd = lambda: keras.optimizers.SGD(0.05, momentum=0.5)  # noqa: E731
    model = compiled(strategy, build, sgd, loss, metrics=["acc"])
    log = Log(folder)
    model.fit(x[:3000], labels[:3000], batch_size=64, epochs=3, verbose=0)
    log.close()
    _, accuracy = model.evaluate(x[3000:], labels[3000:], verbose=0)
    return {"accuracy": accuracy, "staleness": model.optimizer.staleness_counts}


def refused(strategy, folder):
    """What cannot work, by what was said; all workers do the same."""
    x, y = regression_data(16)
    sgd = lambda: keras.optimizers.SGD(0.01)  # noqa: E731
    options = {"batch_size": BATCH, "verbose": 0}

    def said(work):
        try:
            work()
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return ""

    def outside_of_fit():
        compiled(strategy, linear_model, sgd).train_on_batch(x, y)

    def assigned_within():
        model = compiled(strategy, linear_model, sgd)
        weights = model.get_weights()
        assign = keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda batch, logs: model.set_weights(weights)
        )
        model.fit(x, y, callbacks=[assign], **options)

    def guarded():
        model = compiled(strategy, linear_model, sgd)
        guard = tfdp.callbacks.NaNGuard("skip")
        model.fit(x, y, callbacks=[guard], **options)

    def constrained():
        def build():
            layer = keras.layers.Dense(1, kernel_constraint="unit_norm")
            return keras.Sequential([keras.Input((5,)), layer])

        compiled(strategy, build, sgd).fit(x, y, **options)

    works = [outside_of_fit, assigned_within, guarded, constrained]
    return {work.__name__: said(work) for work in works}


SCENARIOS = [replay, embeddings, unequal, looks, learned, refused]


def main(folder, names):
    strategy = tfdp.MultiHostDataParallelStrategy()
    folder, rank = pathlib.Path(folder), strategy.cluster.rank
    for scenario in SCENARIOS:
        if not names or scenario.__name__ in names:
            own = folder / scenario.__name__
            own.mkdir(exist_ok=True)
            values = scenario(strategy, own)
            (folder / f"{scenario.__name__}.{rank}.json").write_text(json.dumps(values))
            print(scenario.__name__, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
