"""Models with a `train_step` of their own, by name; "keras" leaves Keras' own."""

import keras
import tensorflow as tf

import tfdp


class Keras(keras.Model):
    """Keras' own step."""


def unpack(data):
    return keras.utils.unpack_x_y_sample_weight(data)


class ComputeLoss(keras.Model):
    """The step of Keras' guide: a tape around `compute_loss`, metrics by Keras."""

    def train_step(self, data):
        x, y, sample_weight = unpack(data)
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.compute_loss(
                x=x, y=y, y_pred=y_pred, sample_weight=sample_weight
            )
            loss = self.optimizer.scale_loss(loss)
        gradients = tape.gradient(loss, self.trainable_weights)
        self.optimizer.apply(gradients, self.trainable_weights)
        return self.compute_metrics(x, y, y_pred, sample_weight)


class ApplyGradients(keras.Model):
    """The older spelling, with pairs; the optimizer is asked within `train_step`."""

    def train_step(self, data):
        x, y, sample_weight = unpack(data)
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.compute_loss(x, y, y_pred, sample_weight)
        variables = self.trainable_variables
        gradients = tape.gradient(loss, variables)
        self.optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return self.compute_metrics(x, y, y_pred, sample_weight)


class LoggedLoss(ComputeLoss):
    """Hands the loss of `compute_loss` to a metric of its own."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.mean_loss = keras.metrics.Mean(name="mean_loss")

    def train_step(self, data):
        x, y, sample_weight = unpack(data)
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.compute_loss(
                x=x, y=y, y_pred=y_pred, sample_weight=sample_weight
            )
        gradients = tape.gradient(loss, self.trainable_weights)
        self.optimizer.apply(gradients, self.trainable_weights)
        self.mean_loss.update_state(loss)
        return {"mean_loss": self.mean_loss.result()}


class LocalMean(keras.Model):
    """A loss written by hand, and said to be a mean. One output, squared error."""

    def train_step(self, data):
        x, y, _ = unpack(data)
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = keras.ops.mean(
                keras.ops.square(y_pred - keras.ops.cast(y, y_pred.dtype))
            )
            share = tfdp.losses.local_mean(loss)
            share = self.optimizer.scale_loss(share)
        gradients = tape.gradient(share, self.trainable_weights)
        self.optimizer.apply(gradients, self.trainable_weights)
        return self.compute_metrics(x, y, y_pred)


class TwoOptimizers(keras.Model):
    """The first variables go with the compiled optimizer, the others with another."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.second_optimizer = keras.optimizers.Adam(0.01, epsilon=1e-3)

    def train_step(self, data):
        x, y, sample_weight = unpack(data)
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.compute_loss(
                x=x, y=y, y_pred=y_pred, sample_weight=sample_weight
            )
        first, second = self.halves()
        gradients = tape.gradient(loss, first + second)
        self.optimizer.apply(gradients[: len(first)], first)
        self.second_optimizer.apply(gradients[len(first) :], second)
        return self.compute_metrics(x, y, y_pred, sample_weight)

    def halves(self):
        variables = self.trainable_variables
        middle = len(variables) // 2
        return variables[:middle], variables[middle:]


class TwoTapes(keras.Model):
    """Two updates in one step, as in a GAN: the second sees what the first did."""

    def train_step(self, data):
        x, y, sample_weight = unpack(data)
        for _ in range(2):
            with tf.GradientTape() as tape:
                y_pred = self(x, training=True)
                loss = self.compute_loss(
                    x=x, y=y, y_pred=y_pred, sample_weight=sample_weight
                )
            gradients = tape.gradient(loss, self.trainable_weights)
            self.optimizer.apply(gradients, self.trainable_weights)
        return self.compute_metrics(x, y, y_pred, sample_weight)


TRAIN_STEPS = {
    "keras": Keras,
    "compute_loss": ComputeLoss,
    "apply_gradients": ApplyGradients,
    "logged_loss": LoggedLoss,
    "local_mean": LocalMean,
    "two_optimizers": TwoOptimizers,
    "two_tapes": TwoTapes,
}
