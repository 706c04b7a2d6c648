"""Programs of the table in `lint_programs`: gradients changed, numbers returned."""

import numpy as np
import tensorflow as tf

from tests.support.lint_programs import (
    CLASSES,
    FEATURES,
    WIDTH,
    Wrapped,
    add,
    cross_entropy,
    fitted,
    rows_and_labels,
    summed,
)
from tfdp.losses import local_mean


def with_step(step, loss=cross_entropy, data=rows_and_labels, **methods):
    """A model with this `train_step`, which returns what is reported."""

    def build():
        return type("Model", (Wrapped,), {"train_step": step, **methods})()

    return lambda strategy: fitted(strategy, build, loss and loss(), data())


def apply(model, tape, loss, change=lambda gradients, weights: gradients):
    weights = model.trainable_variables
    gradients = tape.gradient(loss, weights)
    model.optimizer.apply(change(gradients, weights), weights)


# Gradients that are changed before `apply`.


def changed(change, returned=lambda loss, gradients: {"total": loss}):
    def step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        weights = self.trainable_variables
        gradients = tape.gradient(loss, weights)
        self.optimizer.apply(change(gradients, weights), weights)
        return returned(loss, gradients)

    return with_step(step)


def clipped(gradients, weights):
    return tf.clip_by_global_norm(gradients, 0.1)[0]


def clipped_each(gradients, weights):
    return [tf.clip_by_norm(g, 0.05) for g in gradients]


def decayed(gradients, weights):
    return [g + 0.1 * w for g, w in zip(gradients, weights, strict=True)]


def adaptively_clipped(gradients, weights):
    """Brock et al., 2021: a gradient is at most 0.02 of its weight's norm."""
    found = []
    for g, w in zip(gradients, weights, strict=True):
        largest = 0.02 * tf.maximum(tf.norm(w), 1e-3)
        norm = tf.maximum(tf.norm(g), 1e-6)
        found.append(tf.where(norm > largest, g * (largest / norm), g))
    return found


def noisy(gradients, weights):
    """The same noise on each replica, so that it can be compared with one device's."""
    return [
        g + 0.1 * tf.random.stateless_normal(g.shape, (7, place))
        for place, g in enumerate(gradients)
    ]


def centralised(gradients, weights):
    """Yong et al., 2020: the mean over the inputs of a kernel is taken away."""
    return [
        g - tf.reduce_mean(g, axis=0, keepdims=True) if len(g.shape) > 1 else g
        for g in gradients
    ]


def slower_below(gradients, weights):
    """Layers' learning rates, and a mask of weights that stay."""
    rates = (0.1, 0.1, 1.0, 1.0)
    mask = tf.constant(np.eye(FEATURES, WIDTH, dtype="float32"))
    found = [rate * g for rate, g in zip(rates, gradients, strict=True)]
    return [found[0] * mask, *found[1:]]


GRADIENTS = {
    "global norm": clipped,
    "norms": clipped_each,
    "values": lambda gradients, _: [
        tf.clip_by_value(g, -0.01, 0.01) for g in gradients
    ],
    "decay": decayed,
    "adaptive clip": adaptively_clipped,
    "noise": noisy,
    "sign": lambda gradients, _: [0.1 * tf.sign(g) for g in gradients],
    "unit norm": lambda gradients, _: [g / (tf.norm(g) + 1e-6) for g in gradients],
    "large entries dropped": lambda gradients, _: [
        tf.where(tf.abs(g) > 0.02, tf.zeros_like(g), g) for g in gradients
    ],
}


def clipped_by_all(gradients, weights):
    """The fix: the norm is that of the sums over the replicas."""
    factor = tf.minimum(1.0, 0.1 / tf.linalg.global_norm(summed(gradients)))
    return [factor * g for g in gradients]


def clipped_each_by_all(gradients, weights):
    norms = [tf.norm(g) for g in summed(gradients)]
    return [
        g * tf.minimum(1.0, 0.05 / n) for g, n in zip(gradients, norms, strict=True)
    ]


def decayed_once(gradients, weights):
    replicas = tf.distribute.get_strategy().num_replicas_in_sync
    return [g + 0.1 / replicas * w for g, w in zip(gradients, weights, strict=True)]


def sign_of_all(gradients, weights):
    """Each replica applies its part of the sign, which is the same on all."""
    replicas = tf.distribute.get_strategy().num_replicas_in_sync
    return [0.1 * tf.sign(g) / replicas for g in summed(gradients)]


for _name, _change in GRADIENTS.items():
    _fix = "num_replicas" if _name in ("decay", "noise") else "all_sum"
    add(f"gradients: {_name}", "warn", changed(_change), _fix)
add(
    # The optimizer adds up what is a sum over the replicas already.
    "gradients: sums, clipped",
    "told",
    changed(lambda gradients, weights: clipped(summed(gradients), weights)),
    "all_sum",
)
for _name, _change in {
    "global norm, fixed": clipped_by_all,
    "norms, fixed": clipped_each_by_all,
    "sign, fixed": sign_of_all,
}.items():
    add(f"gradients: {_name}", "exact", changed(_change))
add("gradients: decay, fixed", "exact", changed(decayed_once), replicas=(2, 3))
for _name, _change in {
    "centralised": centralised,
    "rates and mask": slower_below,
    "scaled": lambda gradients, _: [4.0 * g / 2.0 for g in gradients],
}.items():
    add(f"gradients: {_name}", "exact", changed(_change))


def two_tasks(self, data):
    """PCGrad: where two gradients disagree, the part against the other is removed."""
    x, y = data
    weights = self.trainable_variables
    with tf.GradientTape(persistent=True) as tape:
        p = self(x, training=True)
        first = self.compute_loss(x, y, p)
        second = self.compute_loss(x, (y + 1) % CLASSES, p)
    found = []
    for w in weights:
        a, b = tape.gradient(first, w), tape.gradient(second, w)
        both = tf.reduce_sum(a * b)
        found.append(a + b - tf.minimum(both, 0.0) / tf.reduce_sum(b * b) * b)
    self.optimizer.apply(found, weights)
    return {"total": first + second}


add("gradients: of two tasks", "warn", with_step(two_tasks), "all_sum")


# What a step returns.


def by_forward_mode(self, data):
    """The loss has a directional derivative of the outputs."""
    x, y = data
    with tf.autodiff.ForwardAccumulator(x, tf.ones_like(x)) as forward:
        along = forward.jvp(self(x))
    with tf.GradientTape() as tape:
        p = self(x, training=True) + 0.1 * tf.stop_gradient(along)
        loss = self.compute_loss(x, y, p)
    apply(self, tape, loss)
    return {"rate": self.optimizer.learning_rate}


# TensorFlow makes tensors for it that are gradients with respect to themselves.
add("gradients: forward mode", "told", with_step(by_forward_mode), "could not follow")


def of_each_row(scaled):
    """Gradients of each row's loss in a loop, as private training clips them; then
    their mean."""

    def step(self, data):
        weights = self.trainable_variables

        def of_one(row):
            with tf.GradientTape() as tape:
                logits = self(row[0][None])
                loss = tf.nn.sparse_softmax_cross_entropy_with_logits(
                    row[1][None], logits
                )[0]
            return tape.gradient(loss, weights)

        shapes = [tf.TensorSpec(weight.shape) for weight in weights]
        found = tf.map_fn(of_one, tuple(data), fn_output_signature=shapes)
        means = [scaled(tf.reduce_mean(one, axis=0)) for one in found]
        self.optimizer.apply(means, weights)
        return {"rate": self.optimizer.learning_rate}

    return with_step(step)


add("gradients: of each row", "warn", of_each_row(lambda one: one), "local_mean")
add("gradients: of each row, fixed", "exact", of_each_row(local_mean), replicas=(2, 3))


def with_norm(total):
    def returned(loss, gradients):
        return {"total": loss, "norm": tf.linalg.global_norm(total(gradients))}

    return changed(lambda gradients, _: gradients, returned)


def with_reports(of_model):
    """Returns numbers of the model beside the loss."""

    def step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            p = self(x, training=True)
            loss = self.compute_loss(x, y, p)
        apply(self, tape, loss)
        return {"total": loss, "more": of_model(self, loss, p)}

    return step


def counted(self, data):
    x, y = data
    with tf.GradientTape() as tape:
        loss = self.compute_loss(x, y, self(x, training=True))
    apply(self, tape, loss)
    self.steps.assign_add(1.0)
    return {"total": loss, "steps": self.steps}


def build_with_counter(self, shape):
    self.steps = self.add_weight(name="steps", initializer="zeros", trainable=False)


RETURNED = {
    "norm": (
        "warn",
        with_norm(lambda gradients: gradients),
        "^(?!.*returned a loss).*all_sum",  # it is none
    ),
    "norm, fixed": ("exact", with_norm(summed), None),
    "iterations": (
        "exact",
        with_step(with_reports(lambda model, *_: model.optimizer.iterations)),
        None,
    ),
    "learning rate": (
        "exact",
        with_step(with_reports(lambda model, *_: model.optimizer.learning_rate)),
        None,
    ),
    "counter": ("exact", with_step(counted, build=build_with_counter), None),
    "perplexity": (
        "told",
        with_step(with_reports(lambda model, loss, p: tf.exp(loss))),
        "all_sum",
    ),
    "perplexity, fixed": (
        "exact",
        with_step(with_reports(lambda model, loss, p: tf.exp(summed(loss)))),
        None,
    ),
    "largest": (
        "warn",
        with_step(with_reports(lambda model, loss, p: tf.reduce_max(p))),
        "all_rows|all_sum",
    ),
    "mean of predictions": (
        "exact",
        with_step(with_reports(lambda model, loss, p: tf.reduce_mean(p))),
        None,
    ),
    "norm of weights": (
        "exact",
        with_step(
            with_reports(
                lambda model, *_: tf.linalg.global_norm(
                    [w.value for w in model.trainable_variables]
                )
            )
        ),
        None,
    ),
}
for _name, (_kind, _run, _fix) in RETURNED.items():
    add(f"returned: {_name}", _kind, _run, _fix)
