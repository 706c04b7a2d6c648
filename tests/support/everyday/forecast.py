"""A time series: an LSTM on windows, with a metric of its own that keeps state."""

import keras
import numpy as np
from keras import layers, ops

STEPS, AHEAD = 24, 4


class MeanDirection(keras.metrics.Metric):
    """The share of forecasts that go up or down as the series does."""

    def __init__(self, name="direction", **kwargs):
        super().__init__(name=name, **kwargs)
        self.right = self.add_weight(shape=(), initializer="zeros", name="right")
        self.count = self.add_weight(shape=(), initializer="zeros", name="count")

    def update_state(self, y_true, y_pred, sample_weight=None):
        same = ops.sign(y_true[:, -1]) == ops.sign(y_pred[:, -1])
        self.right.assign_add(ops.sum(ops.cast(same, "float32")))
        self.count.assign_add(ops.cast(ops.shape(y_true)[0], "float32"))

    def result(self):
        return self.right / ops.maximum(self.count, 1.0)


rng = np.random.default_rng(0)
hours = np.arange(600)
series = np.sin(hours / 24 * 2 * np.pi) + 0.3 * np.sin(hours / 168 * 2 * np.pi)
series = (series + rng.normal(0, 0.1, 600)).astype("float32")[:, None]

normalization = layers.Normalization(axis=-1)
normalization.adapt(series[:400])
train = keras.utils.timeseries_dataset_from_array(
    data=series[:400],
    targets=np.stack(
        [series[STEPS + i : 400 - AHEAD + i, 0] for i in range(AHEAD)], axis=1
    ),
    sequence_length=STEPS,
    batch_size=32,
)

model = keras.Sequential(
    [
        keras.Input((STEPS, 1)),
        normalization,
        layers.Conv1D(8, 3, padding="causal", activation="relu"),
        layers.LSTM(16, return_sequences=True, recurrent_dropout=0.1),
        layers.LSTM(16),
        layers.Dense(AHEAD),
    ]
)
schedule = keras.optimizers.schedules.CosineDecay(
    0.0, 100, warmup_target=1e-2, warmup_steps=5
)
model.compile(
    optimizer=keras.optimizers.AdamW(schedule, weight_decay=1e-3),
    loss=keras.losses.Huber(),
    metrics=["mae", MeanDirection()],
)
model.fit(train, epochs=3, callbacks=[keras.callbacks.TerminateOnNaN()])
