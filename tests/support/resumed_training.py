"""A training that saves by `tfdp.callbacks.Checkpoint`, to be stopped and gone on with.

    python -m tests.support.resumed_training OPTIONS_AS_JSON

It writes the final numbers to RESULT.<rank>.npz, and for each step the numbers of the
samples that this process has trained on to RESULT.<rank>.<start>.samples.
"""

import dataclasses
import json
import os
import pathlib
import shutil
import signal
import sys
import threading
import time
import warnings

import keras
import numpy as np
import tensorflow as tf

import tfdp
from tests.support import planned_shares
from tfdp.checkpoint import checkpoint, writer

SAMPLES, ROWS, FEATURES, CLASSES = 96, 12, 8, 3
#: Only there to end a hang.
LONGEST_WAIT_SECONDS = 300
DISK_ERRORS = {
    "full": (28, "No space left on device"),
    "stale": (116, "Stale file handle"),
}
#: Where a disk fails in a save, and how; behind the parts it is that of worker 0 only.
DISK_POINTS = {
    "before the part": ["full", "stale", "not shared"],
    "after the part": ["full", "stale"],
    "manifest": ["full", "stale"],
    "rename": ["full", "stale"],
    "commit": ["full", "stale"],
    "delete": ["stale"],
}


@dataclasses.dataclass
class Options:
    """What is trained, and what goes wrong.

    Args:
      folder: of the checkpoints.
      result: the beginning of the names of what is written.
      start: which start of the training it is, from 0.
      width: of the hidden layer.
      fault: {"where", "how", "rank", "number", "seconds"}; None: none. How "wait" makes
        the file "path", and goes on when there is one with ".go" behind its name. How
        "stop", and "stop and kill", stop it for "stop_seconds", or else "seconds".
      disk: {"point", "how", "rank", "number", "times"}: in the `number`-th save, and as
        many as "times" in all, the disk of that worker fails at that point of the save;
        see DISK_POINTS. None: it does not.
    """

    folder: str
    result: str
    start: int = 0
    epochs: int = 3
    every_steps: int = 3
    data: str = "dataset"
    optimizer: str = "adam"
    shard: str = "none"
    wire_dtype: str | None = None
    accumulate: int = 1
    balance: str | None = None
    dropout: float = 0.3
    dtype: str = "float32"
    devices: int = 1
    timeout_seconds: float = 600
    silence_seconds: float = 15
    width: int = 16
    fault: dict | None = None
    disk: dict | None = None


class Counting(keras.Model):
    """A small network, with normalization if with dropout.

    It counts its samples: the last feature is their number.
    """

    def __init__(self, dropout, width):
        super().__init__()
        self.width = width
        self.hidden = keras.layers.Dense(width, activation="relu")
        # Without dropout it is to be one device's: plain normalization is not.
        self.norm = keras.layers.BatchNormalization() if dropout else None
        self.dropout = keras.layers.Dropout(dropout) if dropout else None
        self.out = keras.layers.Dense(CLASSES)
        self.seen = self.add_weight(
            shape=(SAMPLES,), initializer="zeros", trainable=False, aggregation="sum"
        )

    def build(self, shape):
        self.hidden.build((None, FEATURES))
        if self.norm is not None:
            self.norm.build((None, self.width))
        self.out.build((None, self.width))
        super().build(shape)

    def call(self, inputs, training=False):
        if training:
            numbers = tf.cast(inputs[:, -1], tf.int32)
            counts = tf.reduce_sum(tf.one_hot(numbers, SAMPLES), axis=0)
            self.seen.assign_add(tf.cast(counts, self.seen.dtype))
        x = self.hidden(inputs[:, :-1])
        for layer in (self.norm, self.dropout):
            if layer is not None:
                x = layer(x, training=training)
        return self.out(x)

    def counts(self):
        return np.rint(np.asarray(self.seen)).astype(int)


class Seen(keras.callbacks.Callback):
    """Writes on which samples each step has trained."""

    def __init__(self, path):
        super().__init__()
        self.path = path
        open(path, "w").close()

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_begin(self, batch, logs=None):
        self.before = self.model.counts()

    def on_train_batch_end(self, batch, logs=None):
        trained = np.flatnonzero(self.model.counts() - self.before)
        line = {"epoch": self.epoch, "batch": batch, "samples": trained.tolist()}
        with open(self.path, "a") as file:
            file.write(json.dumps(line) + "\n")


def strike(fault):
    how = fault["how"]
    print(f"fault: {fault}", flush=True)
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "term":
        os.kill(os.getpid(), signal.SIGTERM)
    elif how == "raise":
        raise RuntimeError("a planned fault")
    elif how in DISK_ERRORS:
        raise OSError(*DISK_ERRORS[how])
    elif how == "wait":
        path = pathlib.Path(fault["path"])
        path.touch()
        deadline = time.monotonic() + LONGEST_WAIT_SECONDS
        while not path.with_name(f"{path.name}.go").exists():
            if time.monotonic() > deadline:
                raise TimeoutError(f"nobody has answered {path}")
            time.sleep(0.02)
    elif how in ("stop", "stop and kill"):
        child = os.fork()
        if not child:
            # It must not keep the connections of a process that is killed.
            os.closerange(3, os.sysconf("SC_OPEN_MAX"))
            time.sleep(fault.get("stop_seconds", fault["seconds"]))
            os.kill(os.getppid(), signal.SIGCONT if how == "stop" else signal.SIGKILL)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGSTOP)
        os.waitpid(child, 0)


class InSteps(keras.callbacks.Callback):
    """Strikes in the `number`-th step of this process, or after it."""

    def __init__(self, fault):
        super().__init__()
        self.fault, self.begun = fault, 0

    def on_train_batch_begin(self, batch, logs=None):
        self.begun += 1
        if self.begun == self.fault["number"] and self.fault["where"] == "within":
            later = threading.Timer(self.fault["seconds"], strike, [self.fault])
            later.daemon = True
            later.start()

    def on_train_batch_end(self, batch, logs=None):
        if self.begun == self.fault["number"] and self.fault["where"] == "after":
            strike(self.fault)


def around(function, fault):
    """`function`, with the fault before, or after, its `number`-th call."""
    calls = []

    def faulty(*arguments, **keywords):
        calls.append(1)
        hits = len(calls) == fault["number"]
        if hits and fault["seconds"] < 0.5:
            strike(fault)
        result = function(*arguments, **keywords)
        if hits and fault["seconds"] >= 0.5:
            strike(fault)
        return result

    return faulty


def prepare_disk(disk, private):
    """Lets the disk of this process fail for a while.

    Args:
      disk: see `Options`.
      private: the directory that it sees where it is not shared.
    """
    saves, first = [], disk["number"]

    def is_on(point):
        is_now = first <= len(saves) < first + disk["times"]
        return is_now and point == disk["point"]

    def at(point, module, name, *, before=True, of=""):
        function = getattr(module, name)

        def faulty(*arguments, **keywords):
            is_meant = is_on(point) and of in str(arguments)
            if before and is_meant:
                strike(disk)
            result = function(*arguments, **keywords)
            if not before and is_meant:
                strike(disk)
            return result

        setattr(module, name, faulty)

    def start(self, *arguments):
        saves.append(1)
        shared = self._directory
        if disk["how"] == "not shared" and is_on(disk["point"]):
            print(f"fault: {disk}", flush=True)
            self._directory = private
        begin(self, *arguments)
        self._directory = shared

    begin, writer.Writer.start = writer.Writer.start, start
    if disk["how"] == "not shared":
        return
    at("before the part", writer, "write_arrays")
    at("after the part", writer, "write_arrays", before=False)
    at("manifest", writer, "write_manifest")
    at("rename", os, "replace", of="manifest.json'")
    at("commit", writer, "write_manifest", before=False)
    at("delete", shutil, "rmtree", of="/step-")


def prepare(fault, callbacks):
    """Lets the fault happen in this process."""
    places = {
        "saving": (writer, "write_arrays"),
        "committing": (writer, "write_manifest"),
        "restoring": (checkpoint, "give_back"),
    }
    if fault["where"] in places:
        module, name = places[fault["where"]]
        setattr(module, name, around(getattr(module, name), fault))
    else:
        callbacks.append(InSteps(fault))


def input_of(options):
    generator = np.random.default_rng(0)
    x = generator.normal(size=(SAMPLES, FEATURES + 1)).astype(options.dtype)
    x[:, -1] = np.arange(SAMPLES)
    y = generator.integers(0, CLASSES, SAMPLES)
    if options.data == "arrays":
        return {"x": x, "y": y, "batch_size": ROWS}
    if options.data.startswith("grain"):
        return {"x": grain_input(x, y, options.data)}
    # As files are read: they are shuffled, and then their samples.
    files = tf.data.Dataset.from_tensor_slices(
        (np.split(x, SAMPLES // ROWS), np.split(y, SAMPLES // ROWS))
    ).shuffle(SAMPLES // ROWS, seed=3)
    samples = files.interleave(file_of, cycle_length=2).shuffle(SAMPLES // 2, seed=4)
    samples = samples.apply(tf.data.experimental.assert_cardinality(SAMPLES))
    return {"x": samples.batch(ROWS)}


def file_of(x, y):
    return tf.data.Dataset.from_tensor_slices((x, y)).shuffle(ROWS, seed=5)


def grain_input(x, y, kind):
    """Everything on each host; a shard on each; the shards of two, joined; others'."""
    import grain

    workers = int(os.environ.get("TFDP_WORKERS", "1"))
    rank = int(os.environ.get("TFDP_RANK", "0"))

    class Fetch(grain.transforms.Map):
        def map(self, number):
            return x[number], y[number]

    def loader(shard, shards):
        options = grain.sharding.ShardOptions(shard, shards, drop_remainder=True)
        return grain.DataLoader(
            data_source=grain.sources.RangeDataSource(0, SAMPLES, 1),
            sampler=grain.samplers.IndexSampler(
                SAMPLES, options, shuffle=True, seed=3, num_epochs=1
            ),
            operations=[Fetch(), grain.transforms.Batch(ROWS // shards)],
            shard_options=options,
        )

    if kind == "grain-joined":
        parts = [list(loader(shard, 2)) for shard in range(2)]
        batches = [
            tuple(np.concatenate(pair) for pair in zip(*both, strict=True))
            for both in zip(*parts, strict=True)
        ]
        return tf.data.Dataset.from_tensor_slices(
            tuple(np.stack(part) for part in zip(*batches, strict=True))
        )
    if kind == "grain-shards":
        return loader(rank, workers)
    return loader(0, 2) if kind == "grain-wrong" else loader(0, 1)


def model_of(options):
    keras.config.set_floatx(options.dtype)
    keras.config.set_dtype_policy(options.dtype)
    keras.utils.set_random_seed(1)
    several = int(os.environ.get("TFDP_WORKERS", "1")) > 1
    communication = tfdp.Communication(
        wire_dtype=options.wire_dtype if several else None,
        timeout_seconds=options.timeout_seconds,
        silence_seconds=options.silence_seconds,
    )
    strategy = tfdp.auto_strategy(
        communication=communication,
        shard=options.shard,
        shard_min_bytes=0,
        balance=options.balance,
    )
    with strategy.scope():
        model = Counting(options.dropout, options.width)
        inner = {
            "adam": lambda: keras.optimizers.Adam(0.01),
            "sgd": lambda: keras.optimizers.SGD(0.05, momentum=0.9),
            "lars": lambda: tfdp.optimizers.LARS(0.05, use_ema=True),
        }[options.optimizer]()
        if options.accumulate > 1:
            inner = tfdp.DistributedOptimizer(
                inner, accumulate_steps=options.accumulate
            )
        model.compile(
            inner,
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
        model.build((None, FEATURES + 1))
    return model


def main(text):
    options = Options(**json.loads(text))
    # The same warning of several saves is to be seen each time.
    warnings.simplefilter("always", tfdp.errors.CheckpointWarning)
    rank = int(os.environ.get("TFDP_RANK", "0"))
    tfdp.use_virtual_devices(options.devices)
    if options.balance:
        planned_shares.take()
    seen = Seen(f"{options.result}.{rank}.{options.start}.samples")
    callbacks = [
        seen,
        tfdp.callbacks.Checkpoint(options.folder, every_steps=options.every_steps),
    ]
    if options.fault is not None and options.fault["rank"] == rank:
        prepare(options.fault, callbacks)
    if options.disk is not None and options.disk["rank"] == rank:
        prepare_disk(options.disk, pathlib.Path(f"{options.folder}.of-{rank}"))
    model = model_of(options)
    history = model.fit(
        **input_of(options), epochs=options.epochs, verbose=0, callbacks=callbacks
    )
    numbers = {f"weight {i}": np.asarray(w) for i, w in enumerate(model.get_weights())}
    numbers |= {
        f"optimizer {i}": np.asarray(v.numpy())
        for i, v in enumerate(model.optimizer.variables)
    }
    numbers["loss"] = np.array(history.history["loss"])
    np.savez(f"{options.result}.{rank}.npz", **numbers)
    print("trained to the end", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
