"""`keras.utils.PyDataset`: each batch once, and epochs begin as on one device."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.support.parity import make_strategy

BATCHES, ROWS = 30, 6


class Numbered(keras.utils.PyDataset):
    """Batch i holds i in all of its numbers."""

    def __init__(self, widths=(2,), **options):
        super().__init__(**options)
        self.widths = widths
        self.begun = self.ended = 0

    def __len__(self):
        return BATCHES

    def on_epoch_begin(self):
        self.begun += 1

    def on_epoch_end(self):
        self.ended += 1

    def __getitem__(self, number):
        width = self.widths[number % len(self.widths)]
        return np.full((ROWS, width), number, "float32"), np.zeros((ROWS, 1), "float32")


class SeenBatches(keras.callbacks.Callback):
    """By epoch the numbers of the batches, from the means of losses so far."""

    def __init__(self):
        super().__init__()
        self.epochs = []

    def on_epoch_begin(self, epoch, logs=None):
        self.epochs.append([])
        self.total = 0.0

    def on_train_batch_end(self, batch, logs=None):
        total = float(logs["loss"]) * (batch + 1)
        self.epochs[-1].append(round(total - self.total))
        self.total = total


def mean_of_rows(widths):
    """A model whose loss (absolute error from 0) is the number of the batch."""
    inputs = keras.Input((None if len(widths) > 1 else widths[0],))
    means = keras.ops.mean(inputs, axis=1, keepdims=True)
    model = keras.Model(inputs, keras.layers.Rescaling(1.0)(means))
    model.compile(keras.optimizers.SGD(0.0), "mae", jit_compile=False)
    return model


@pytest.mark.worth_seconds(5)
@pytest.mark.parametrize("widths", [(2,), (2, 3)], ids=["", "widths differ"])
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("replicas", [1, 3])
def test_each_batch_comes_once_and_in_order(replicas, workers, widths):
    """With threads that make batches, the first of them came twice."""
    options = {"workers": workers, "max_queue_size": 10}
    seen, data = SeenBatches(), Numbered(widths, **options)
    with make_strategy(replicas).scope():
        model = mean_of_rows(widths)
    model.fit(data, epochs=3, shuffle=False, verbose=0, callbacks=[seen])
    assert seen.epochs == [list(range(BATCHES))] * 3
    # As on one device: Keras ends one more than it begins.
    assert (data.begun, data.ended) == (3, 4)
    with make_strategy(replicas).scope():
        model = mean_of_rows(widths)
    loss = model.evaluate(Numbered(widths, **options), verbose=0)
    assert loss == pytest.approx((BATCHES - 1) / 2)
    predicted = model.predict(Numbered(widths, **options), verbose=0)
    np.testing.assert_array_equal(predicted[::ROWS, 0], np.arange(BATCHES))


def test_one_device_begins_as_many_epochs():
    data = Numbered()
    with tf.distribute.get_strategy().scope():
        model = mean_of_rows((2,))
    model.fit(data, epochs=3, shuffle=False, verbose=0)
    assert (data.begun, data.ended) == (3, 4)
