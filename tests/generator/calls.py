"""What a program calls, by name, and the callbacks of its `fit`."""

import keras
import numpy as np
import tensorflow as tf

from tests.generator.build import Batches, as_dataset


def _tuple(arrays):
    return tuple(array for array in arrays if array is not None)


def callbacks(program):
    return [CALLBACKS[name]() for name in program.callbacks]


CALLBACKS = {
    "early-stopping": lambda: keras.callbacks.EarlyStopping(
        "loss", min_delta=0.1, patience=0
    ),
    "restore-best": lambda: keras.callbacks.EarlyStopping(
        "loss", min_delta=0.3, patience=1, restore_best_weights=True
    ),
    "plateau": lambda: keras.callbacks.ReduceLROnPlateau(
        "loss", factor=0.5, min_delta=0.3, patience=1
    ),
    "scheduler": lambda: keras.callbacks.LearningRateScheduler(
        lambda epoch, rate: rate * 0.5 if epoch else rate
    ),
    "swap-ema": lambda: keras.callbacks.SwapEMAWeights(),
    "terminate-on-nan": keras.callbacks.TerminateOnNaN,
}


def class_weight(program):
    if program.data.weighting != "class_weight":
        return None
    return {0: 0.5, 1: 2.0, 2: 1.0}


class Caller:
    """Makes the calls of a program on a model and notes what they gave.

    Args:
      program: the `Program`.
      model: compiled.
      rows, validation: `Rows` to train on and to validate with.
      tells_length: whether datasets say how many batches they have.
    """

    def __init__(self, program, model, rows, validation, tells_length=False):
        self.program, self.model = program, model
        self.rows, self.validation = rows, validation
        self.tells_length = tells_length
        self.found = {}

    def call_all(self):
        """Call by call: names of what came out, and arrays."""
        for place, name in enumerate(self.program.calls):
            for key, value in CALLS[name](self).items():
                self.found[f"{place}-{name}: {key}"] = np.asarray(value, "float64")
        return self.found

    def batches(self):
        sizes = self.program.data.sizes
        ends = np.cumsum(sizes)
        return [
            self.rows.arrays(end - rows, end)
            for end, rows in zip(ends, sizes, strict=True)
        ]

    def source(self, with_targets=True):
        """The positional and keyword arguments that say what the data are."""
        data = self.program.data
        if data.source == "arrays":
            x, y, weights = self.rows.arrays()
            arguments = {"batch_size": data.batches[0]}
            if not with_targets:
                return (x,), arguments
            return (x, y), arguments | {"sample_weight": weights}
        batches = self.batches()
        if not with_targets:
            batches = [(x, y, None) for x, y, _ in batches]
        if data.source == "generator":
            return (Batches(batches),), {}
        dataset, length = as_dataset(batches), len(batches)
        if self.tells_length:
            dataset = dataset.apply(tf.data.experimental.assert_cardinality(length))
        return (dataset,), {}


def fit(caller, validate=False):
    program = caller.program
    positional, arguments = caller.source()
    if validate:
        arguments["validation_data"] = _tuple(caller.validation.arrays())
        arguments["validation_batch_size"] = program.data.validation_rows
    history = caller.model.fit(
        *positional,
        epochs=program.epochs,
        shuffle=False,
        verbose=0,
        callbacks=callbacks(program),
        class_weight=class_weight(program),
        **arguments,
    )
    return history.history


def evaluate(caller):
    positional, arguments = caller.source()
    return caller.model.evaluate(*positional, verbose=0, return_dict=True, **arguments)


def predict(caller):
    positional, arguments = caller.source(with_targets=False)
    predictions = caller.model.predict(*positional, verbose=0, **arguments)
    if not isinstance(predictions, (list, tuple)):
        predictions = [predictions]
    return {f"output {i}": values for i, values in enumerate(predictions)}


def train_on_batch(caller):
    logs = {}
    for place, (x, y, weights) in enumerate(caller.batches()):
        found = caller.model.train_on_batch(
            x, y, weights, class_weight=class_weight(caller.program), return_dict=True
        )
        logs.update({f"{name} {place}": value for name, value in found.items()})
    return logs


def test_on_batch(caller):
    x, y, weights = caller.batches()[-1]
    return caller.model.test_on_batch(x, y, weights, return_dict=True)


def predict_on_batch(caller):
    x, _, _ = caller.batches()[-1]
    found = caller.model.predict_on_batch(x)
    found = found if isinstance(found, (list, tuple)) else [found]
    return {f"output {i}": values for i, values in enumerate(found)}


CALLS = {
    "fit": fit,
    "fit-validate": lambda caller: fit(caller, validate=True),
    "evaluate": evaluate,
    "predict": predict,
    "train_on_batch": train_on_batch,
    "test_on_batch": test_on_batch,
    "predict_on_batch": predict_on_batch,
}
