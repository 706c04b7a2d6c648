"""Models with a `train_step` of their own, by name; "keras" leaves Keras' own.

The steps are functions, of which each program makes a class of its own: Keras changes
the bases of a class when a functional model is made of it.
"""

import keras
import tensorflow as tf

import tfdp


def unpack(data):
    return keras.utils.unpack_x_y_sample_weight(data)


def compute_loss(self, data):
    """The step of Keras' guide: a tape around `compute_loss`, metrics by Keras."""
    x, y, sample_weight = unpack(data)
    with tf.GradientTape() as tape:
        y_pred = self(x, training=True)
        loss = self.compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=sample_weight)
        loss = self.optimizer.scale_loss(loss)
    gradients = tape.gradient(loss, self.trainable_weights)
    self.optimizer.apply(gradients, self.trainable_weights)
    return self.compute_metrics(x, y, y_pred, sample_weight)


def apply_gradients(self, data):
    """The older spelling, with pairs."""
    x, y, sample_weight = unpack(data)
    with tf.GradientTape() as tape:
        y_pred = self(x, training=True)
        loss = self.compute_loss(x, y, y_pred, sample_weight)
        loss = self.optimizer.scale_loss(loss)
    variables = self.trainable_variables
    gradients = tape.gradient(loss, variables)
    self.optimizer.apply_gradients(zip(gradients, variables, strict=True))
    return self.compute_metrics(x, y, y_pred, sample_weight)


def logged_loss(self, data):
    """Hands the loss of `compute_loss` to a metric of its own."""
    x, y, sample_weight = unpack(data)
    with tf.GradientTape() as tape:
        y_pred = self(x, training=True)
        loss = self.compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=sample_weight)
        scaled = self.optimizer.scale_loss(loss)
    gradients = tape.gradient(scaled, self.trainable_weights)
    self.optimizer.apply(gradients, self.trainable_weights)
    self.mean_loss.update_state(loss)
    return {"mean_loss": self.mean_loss.result()}


def local_mean(self, data):
    """A loss written by hand, and said to be a mean. One output, squared error."""
    x, y, _ = unpack(data)
    with tf.GradientTape() as tape:
        y_pred = self(x, training=True)
        error = y_pred - keras.ops.cast(y, y_pred.dtype)
        loss = keras.ops.mean(keras.ops.square(error))
        share = tfdp.losses.local_mean(loss)
        share = self.optimizer.scale_loss(share)
    gradients = tape.gradient(share, self.trainable_weights)
    self.optimizer.apply(gradients, self.trainable_weights)
    return self.compute_metrics(x, y, y_pred)


def two_optimizers(self, data):
    """The first variables go with the compiled optimizer, the others with another."""
    x, y, sample_weight = unpack(data)
    with tf.GradientTape(persistent=True) as tape:
        y_pred = self(x, training=True)
        loss = self.compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=sample_weight)
        scaled = self.optimizer.scale_loss(loss)
    first, second = halves(self)
    self.optimizer.apply(tape.gradient(scaled, first), first)
    self.second_optimizer.apply(tape.gradient(loss, second), second)
    return self.compute_metrics(x, y, y_pred, sample_weight)


def halves(model):
    """The variables of the compiled optimizer, and of the second one."""
    variables = model.trainable_variables
    if not hasattr(model, "second_optimizer"):
        return [variables]
    middle = len(variables) // 2
    return [variables[:middle], variables[middle:]]


def two_tapes(self, data):
    """Two updates in one step, as in a GAN: the second sees what the first did."""
    x, y, sample_weight = unpack(data)
    for _ in range(2):
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.compute_loss(
                x=x, y=y, y_pred=y_pred, sample_weight=sample_weight
            )
            loss = self.optimizer.scale_loss(loss)
        gradients = tape.gradient(loss, self.trainable_weights)
        self.optimizer.apply(gradients, self.trainable_weights)
    return self.compute_metrics(x, y, y_pred, sample_weight)


TRAIN_STEPS = {
    "keras": None,
    "compute_loss": compute_loss,
    "apply_gradients": apply_gradients,
    "logged_loss": logged_loss,
    "local_mean": local_mean,
    "two_optimizers": two_optimizers,
    "two_tapes": two_tapes,
}


def call_inner(self, inputs, training=None):
    """The `call` of the form "subclass"."""
    return self.inner(inputs, training=training)


def make_model(program, inputs, results):
    """The model of a program's form, with its step and what the step needs."""
    members = {}
    if TRAIN_STEPS[program.train_step] is not None:
        members["train_step"] = TRAIN_STEPS[program.train_step]
    if program.form == "functional":
        model = type("Own", (keras.Model,), members)(inputs, results)
    else:
        model = type("Own", (keras.Model,), members | {"call": call_inner})()
        model.inner = keras.Model(inputs, results)
    if program.train_step == "logged_loss":
        model.mean_loss = keras.metrics.Mean(name="mean_loss")
    if program.train_step == "two_optimizers":
        model.second_optimizer = keras.optimizers.Adam(0.01, epsilon=1e-3)
    return model
