"""Two workers that differ in one thing, injected on worker 1; each prints its error.

    tfdp launch --workers 2 -m tests.support.drifting_hosts [CASE ...]

Without cases, all of them. A line for each: "CASE: no error", or the error. `--off`
turns the comparison off, `--shard` shards the optimizer's state within each host.
"""

import sys

import keras
import numpy as np
import tensorflow as tf

import tfdp

ROWS, BATCH, EPOCHS = 48, 8, 3
BATCHES = ROWS // BATCH
# From this one on batches differ, where they do; the first one is compared anyway.
LATE = 3


class At(keras.callbacks.Callback):
    """Calls `change(model)` once, when `event` of epoch or batch `number` comes."""

    def __init__(self, event, number, change):
        super().__init__()
        self.number, self.change, self.is_done = number, change, False
        setattr(self, event, self.come)

    def come(self, number, logs=None):
        if number == self.number and not self.is_done:
            self.is_done = True
            self.change(self.model)


def make_model(strategy, optimizer):
    keras.utils.set_random_seed(3)
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((5,)),
                keras.layers.Dense(4, activation="relu"),
                keras.layers.BatchNormalization(),
                keras.layers.Dropout(0.2),
                keras.layers.Dense(1),
            ]
        )
        model.compile(optimizer(), "mse", jit_compile=False)
    return model


def arrays():
    x = np.random.default_rng(0).normal(size=(ROWS, 5)).astype("float32")
    return x, x[:, :1].copy()


def batches(order=None, x=None, y=None):
    own_x, own_y = arrays()
    x, y = own_x if x is None else x, own_y if y is None else y
    order = np.arange(ROWS) if order is None else order
    return tf.data.Dataset.from_tensor_slices((x[order], y[order])).batch(BATCH)


def late_order(differs, start=LATE * BATCH, seed=5):
    order = np.arange(ROWS)
    if differs:
        np.random.default_rng(seed).shuffle(order[start:])
    return order


def late_generator(differs):
    """Without an end; shuffled from its second pass on, without a seed on worker 1."""
    x, y = arrays()

    def rows():
        order, draws = np.arange(ROWS), np.random.default_rng(int(differs))
        while True:
            yield from zip(x[order], y[order], strict=True)
            draws.shuffle(order)

    specs = (tf.TensorSpec([5], tf.float32), tf.TensorSpec([1], tf.float32))
    data = tf.data.Dataset.from_generator(rows, output_signature=specs)
    return data.batch(BATCH, drop_remainder=True)


def shuffled_late(differs):
    data = batches()
    return data.take(1).concatenate(
        data.skip(1).unbatch().shuffle(ROWS, seed=7 + differs).batch(BATCH)
    )


def own_batches(strategy):
    """Each worker's own, and a different number of them."""

    def make(context):
        x, y = arrays()
        own = tf.data.Dataset.from_tensor_slices((x, y))
        own = own.shard(context.num_input_pipelines, context.input_pipeline_id)
        return own.batch(4).take(4 + context.input_pipeline_id)

    return strategy.distribute_datasets_from_function(make)


def add_to(variable, number):
    def change(model):
        found = variable(model)
        found.assign(found + tf.cast(number, found.dtype))

    return change


def one_bit(model):
    kernel = model.layers[0].kernel
    value = np.array(kernel)
    value[0, 0] = np.nextafter(value[0, 0], np.float32(9))
    kernel.assign(value)


def rate_of(model):
    return model.optimizer.learning_rate


def slot_of(model):
    return next(v for v in model.optimizer.variables if "momentum" in v.path)


def sgd():
    return keras.optimizers.SGD(0.01, momentum=0.9)


def scaled():
    return keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.01))


def local():
    return tfdp.DistributedOptimizer(
        keras.optimizers.SGD(0.01), sync=tfdp.sync.LocalSGD(2)
    )


def decay(differs):
    return lambda: keras.optimizers.SGD(
        keras.optimizers.schedules.ExponentialDecay(0.01, 100 - 10 * differs, 0.9)
    )


class Case:
    """One training, with a difference on worker 1.

    Args:
      optimizer: makes it; given whether this worker differs.
      at, change: when worker 1 changes what; None: before `fit`.
      data: what `fit` reads; given the strategy and whether this worker differs.
      differs: whether there is a difference.
      options: more of `fit`.
    """

    def __init__(
        self,
        optimizer=None,
        at=None,
        change=None,
        data=lambda strategy, differs: batches(),
        evaluated=None,
        differs=True,
        **options,
    ):
        self.optimizer = optimizer or (lambda differs: sgd)
        self.at, self.change, self.data = at, change, data
        self.evaluated, self.differs, self.options = evaluated, differs, options

    def run(self, strategy):
        differs = self.differs and not strategy.is_chief
        model = make_model(strategy, self.optimizer(differs))
        callbacks = []
        if differs and self.change and self.at:
            callbacks = [At(*self.at, self.change)]
        elif differs and self.change:
            self.change(model)
        options = {"epochs": EPOCHS, "verbose": 0, "callbacks": callbacks}
        options |= {
            name: value(differs) if callable(value) else value
            for name, value in self.options.items()
        }
        model.fit(**{"x": self.data(strategy, differs)} | options)
        if self.evaluated:
            model.evaluate(self.evaluated(differs), verbose=0)


def of(make):
    return lambda strategy, differs: make(differs)


def of_labels(differs):
    x, y = arrays()
    y[LATE * BATCH + 1] += differs
    return batches(y=y)


FIRST, SECOND = ("on_epoch_begin", 0), ("on_epoch_end", 0)
LAST = ("on_train_batch_end", 2)
ENDLESS = {"steps_per_epoch": BATCHES}
kernel = lambda model: model.layers[0].kernel  # noqa: E731
#: By name, with what the error must tell.
DIFFERENT = {
    "weights before fit": (Case(change=add_to(kernel, 0.1)), "dense"),
    "weights in the first epoch": (
        Case(change=add_to(kernel, 0.1), at=FIRST),
        "start of epoch 1 .*kernel",
    ),
    "weights between epochs": (
        Case(change=add_to(kernel, 0.1), at=SECOND),
        "start of epoch 2 .*kernel",
    ),
    "one bit of a weight": (Case(change=one_bit, at=SECOND), "kernel"),
    "moving statistics": (
        Case(change=add_to(lambda m: m.layers[1].moving_mean, 0.1), at=SECOND),
        "moving_mean",
    ),
    "outer weights of LocalSGD": (
        Case(lambda differs: local, change=add_to(kernel, 0.1)),
        "kernel",
    ),
    "weights with own batches": (
        Case(change=add_to(kernel, 0.1), data=lambda s, differs: own_batches(s)),
        "kernel",
    ),
    "weights after a batch": (
        Case(change=add_to(kernel, 0.1), at=("on_train_batch_end", 2)),
        "start of epoch 2 .*kernel",
    ),
    "learning rate before fit": (
        Case(change=add_to(rate_of, 0.01)),
        r"start of epoch 1 .*learning rate of \w+ \(0.0",
    ),
    "learning rate of an epoch": (
        Case(change=add_to(rate_of, 0.01), at=("on_epoch_begin", 1)),
        r"start of epoch 2 .*learning rate of \w+ \(0.0",
    ),
    "learning rate in the last epoch": (
        Case(change=add_to(rate_of, 0.01), at=LAST, epochs=1),
        "end of epoch 1 .*learning rate",
    ),
    "learning rate of a schedule": (
        Case(decay, change=None),
        "start of epoch 2 .*learning rate",
    ),
    "optimizer state": (
        Case(change=add_to(slot_of, 0.1), at=SECOND),
        "start of epoch 2 .*momentum",
    ),
    "count of iterations": (
        Case(change=add_to(lambda m: m.optimizer.iterations, 1), at=SECOND),
        "iteration",
    ),
    "loss scale": (
        Case(
            lambda differs: scaled,
            change=add_to(lambda m: m.optimizer.dynamic_scale, 1024),
            at=SECOND,
        ),
        "scale",
    ),
    "order of rows": (
        Case(data=of(lambda differs: batches(late_order(differs)))),
        f"epoch 1 of fit .*from batch {LATE + 1} of pass 1 ",
    ),
    "order of rows in the last batch": (
        Case(data=of(lambda d: batches(late_order(d, ROWS - BATCH))), epochs=1),
        f"epoch 1 of fit .*from batch {BATCHES} of pass 1 ",
    ),
    "order of rows without an end": (
        Case(data=of(lambda d: batches(late_order(d)).repeat()), **ENDLESS),
        "epoch 1 of fit .*from batch 4 of pass 1 ",
    ),
    "labels": (Case(data=of(of_labels)), f"from batch {LATE + 1} of pass 1 "),
    "rows without a length": (
        Case(data=of(lambda d: batches(late_order(d)).filter(lambda *_: True))),
        f"from batch {LATE + 1} of pass 1 ",
    ),
    "seed of a shuffle": (Case(data=of(shuffled_late)), "from batch 2 of pass 1 "),
    "seed of a generator between passes": (
        Case(data=of(late_generator), **ENDLESS),
        f"epoch 2 of fit .*from batch {BATCHES + 1} of pass 1 ",
    ),
    "batches of the validation": (
        Case(validation_data=lambda differs: batches(late_order(differs))),
        f"in evaluate .*from batch {LATE + 1} of pass 1 ",
    ),
    "batches of evaluate": (
        Case(evaluated=lambda differs: batches(late_order(differs))),
        f"in evaluate .*from batch {LATE + 1} of pass 1 ",
    ),
}
#: Where all workers do the same: no error.
ALIKE = {
    "alike: arrays": Case(
        data=lambda s, differs: None,
        differs=False,
        x=lambda differs: arrays()[0],
        y=lambda differs: arrays()[1],
        validation_split=0.25,
    ),
    "alike: own batches": Case(data=lambda s, differs: own_batches(s), differs=False),
    "alike: read ahead, never trained on": Case(
        data=of(lambda differs: late_generator(differs).prefetch(4)),
        epochs=1,
        **ENDLESS,
    ),
    "alike: without a length": Case(
        data=of(lambda d: batches().filter(lambda *_: True)), differs=False
    ),
    "alike: loss scale": Case(lambda differs: scaled, differs=False),
    "alike: LocalSGD": Case(lambda differs: local, differs=False),
}


def main():
    names = [argument for argument in sys.argv[1:] if not argument.startswith("--")]
    sharding = {"shard": "optimizer", "shard_group": "host"}
    strategy = tfdp.MultiHostDataParallelStrategy(
        communication=tfdp.Communication(compare_hosts="--off" not in sys.argv),
        **(sharding if "--shard" in sys.argv else {}),
    )
    cases = {name: case for name, (case, _) in DIFFERENT.items()} | ALIKE
    for name in names or cases:
        try:
            cases[name].run(strategy)
            print(f"{name}: no error", flush=True)
        except tfdp.errors.TfdpError as error:
            words = " ".join(str(error).split())
            print(f"{name}: {type(error).__name__} {words}", flush=True)


if __name__ == "__main__":
    main()
