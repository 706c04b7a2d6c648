"""Programs of the table in `lint_programs`: steps that count the rows of a batch.

On one device `tf.shape(x)[0]` is the number of rows of the batch; in a replica it is
that of its own. What is divided by it may be exact, or may become so by `local_mean`.
"""

import keras
import numpy as np
import tensorflow as tf

from tests.support.lint_gradients import apply, with_step
from tests.support.lint_programs import (
    CLASSES,
    WIDTH,
    add,
    cross_entropy,
    fitted,
    of_rows,
    rows_and_labels,
    summed,
)
from tfdp.losses import all_rows, local_mean, local_sum

layers, ops = keras.layers, keras.ops
CURE = "local_mean"


def rows_of(x):
    return tf.cast(tf.shape(x)[0], tf.float32)


def sum_of_losses():
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="sum")


def step_of(loss_of, change=lambda gradients, x: gradients, **more):
    """`loss_of` takes the model, rows, labels and predictions; returns the loss."""

    def step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = loss_of(self, x, y, self(x, training=True))
        apply(self, tape, loss, lambda gradients, _: change(gradients, x))
        return {"rate": self.optimizer.learning_rate}

    return with_step(step, **more)


def compiled(model, x, y, p):
    return model.compute_loss(x, y, p)


def penalty(model, x, y, p):
    return 0.5 * tf.add_n([tf.reduce_sum(w**2) for w in model.trainable_variables])


PROGRAMS = {
    "sum by rows": (
        "warn",
        lambda scale: step_of(
            lambda m, x, y, p: scale(compiled(m, x, y, p) / rows_of(x)),
            loss=sum_of_losses,
        ),
    ),
    "sum by hand by rows": (
        "exact",
        lambda scale: step_of(
            lambda m, x, y, p: local_mean(tf.reduce_sum(of_rows(y, p)) / rows_of(x)),
            loss=None,
        ),
    ),
    "mean times rows": (
        "warn",
        lambda scale: step_of(
            lambda m, x, y, p: scale(0.1 * compiled(m, x, y, p) * rows_of(x))
        ),
    ),
    "penalty by rows": (
        "warn",
        lambda scale: step_of(
            lambda m, x, y, p: (
                compiled(m, x, y, p) + scale(penalty(m, x, y, p) / rows_of(x))
            )
        ),
    ),
    "mean of rows and penalty by rows": (
        "warn",
        lambda scale: step_of(
            lambda m, x, y, p: (
                scale(tf.reduce_mean(of_rows(y, p)))
                + scale(penalty(m, x, y, p) / rows_of(x))
            ),
            loss=None,
        ),
    ),
    "weights by rows": (
        "warn",
        lambda scale: step_of(
            lambda m, x, y, p: scale(
                m.compute_loss(
                    x, y, p, sample_weight=tf.ones_like(x[:, 0]) / rows_of(x)
                )
            )
        ),
    ),
}
for _name, (_kind, _make) in PROGRAMS.items():
    add(
        f"counted: {_name}",
        _kind,
        _make(lambda loss: loss),
        CURE if _kind == "warn" else None,
        replicas=(2, 3),
    )
    if _kind == "warn":
        add(f"counted: {_name}, fixed", "exact", _make(local_mean), replicas=(2, 3))
add(
    "counted: sum by rows of all",
    "exact",
    step_of(
        lambda m, x, y, p: compiled(m, x, y, p) / rows_of(all_rows(y)),
        loss=sum_of_losses,
    ),
)
add(
    "counted: gradients by rows",
    "warn",
    step_of(
        compiled,
        lambda gradients, x: [g / rows_of(x) for g in gradients],
        loss=sum_of_losses,
    ),
    CURE,
)
add(
    "counted: own rows of the global batch",
    "exact",
    step_of(
        lambda m, x, y, p: local_sum(
            tf.reduce_mean(of_rows(y, p)) * rows_of(x) / summed(rows_of(x))
        ),
        loss=None,
    ),
)


class PenaltyByRows(layers.Layer):
    """The prior of a Bayesian layer counts one row of the batch."""

    def __init__(self, scale):
        super().__init__()
        self.scale = scale

    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[-1], WIDTH), name="kernel")

    def call(self, x):
        rows = ops.cast(ops.shape(x)[0], "float32")
        self.add_loss(self.scale(0.5 * ops.sum(self.kernel**2) / rows))
        return ops.tanh(ops.matmul(x, self.kernel))


def last():
    return layers.Dense(CLASSES)


def with_layer(*given):
    def build():
        return keras.Sequential([keras.Input((6,)), *(g() for g in given), last()])

    return lambda strategy: fitted(strategy, build, cross_entropy(), rows_and_labels())


add("counted: add_loss", "warn", with_layer(lambda: PenaltyByRows(lambda x: x)), CURE)
add("counted: add_loss, fixed", "exact", with_layer(lambda: PenaltyByRows(local_mean)))


class ScaledByRows(layers.Layer):
    def call(self, x):
        return x * 10.0 / ops.cast(tf.shape(x)[0], "float32")


add("counted: layer", "warn", with_layer(ScaledByRows), "all_rows")


# Gradients that no tape took from a loss.


def gradients_by(compute):
    def step(self, data):
        x, y = data
        compute(self, x, y)
        return {"rate": self.optimizer.learning_rate}

    return with_step(step, loss=None)


def errors(y, p):
    return tf.nn.softmax(p) - tf.one_hot(y, p.shape[-1])


def through_outputs(scale):
    def compute(model, x, y):
        with tf.GradientTape() as tape:
            p = model(x, training=True)
        weights = model.trainable_variables
        given = scale(errors(y, p) / rows_of(x))
        model.optimizer.apply(
            tape.gradient(p, weights, output_gradients=given), weights
        )

    return gradients_by(compute)


def two_parts(model, x, y):
    """Backprop in two parts, at the predictions."""
    with tf.GradientTape() as tape:
        p = model(x, training=True)
    with tf.GradientTape() as last:
        last.watch(p)
        loss = local_mean(tf.reduce_mean(of_rows(y, p)))
    weights = model.trainable_variables
    model.optimizer.apply(
        tape.gradient(p, weights, output_gradients=last.gradient(loss, p)), weights
    )


def by_formula(scale):
    """The gradient of the last layer, written by hand."""

    def compute(model, x, y):
        *_, kernel, bias = model.trainable_variables
        e = errors(y, model(x))
        mean = tf.reduce_mean(e, 0)
        given = [scale(tf.zeros_like(kernel) + mean), scale(mean)]
        model.optimizer.apply(given, [kernel, bias])

    return gradients_by(compute)


def estimated(model, x, y):
    """From two losses, along a fixed direction."""
    weights = model.trainable_variables
    ahead = [0.01 * tf.ones_like(w) for w in weights]
    before = tf.reduce_mean(of_rows(y, model(x)))
    model.optimizer.apply([d * before for d in ahead], weights)


def by_symbols(model, x, y):
    weights = model.trainable_variables
    loss = tf.reduce_mean(of_rows(y, model(x)))
    gradients = tf.gradients(loss, [w.value for w in weights])
    model.optimizer.apply(gradients, weights)


add(
    "gradients through outputs",
    "warn",
    through_outputs(lambda g: g),
    CURE,
    replicas=(2, 3),
)
add(
    "gradients through outputs, fixed",
    "exact",
    through_outputs(local_mean),
    replicas=(2, 3),
)
add("gradients in two parts", "exact", gradients_by(two_parts))
add("gradients by formula", "warn", by_formula(lambda g: g), CURE)
add("gradients by formula, fixed", "exact", by_formula(local_mean))
add("gradients estimated", "warn", gradients_by(estimated), CURE)
add("gradients by symbols", "warn", gradients_by(by_symbols), f"{CURE}|check")


# Rates and states of a step that are set from its rows.


def polyak(self, data):
    x, y = data
    with tf.GradientTape() as tape:
        loss = self.compute_loss(x, y, self(x, training=True))
    self.optimizer.learning_rate.assign(0.05 * loss)
    apply(self, tape, loss)
    return {"loss": loss}


add("rate from the loss", "warn", with_step(polyak), "all_sum")


def weighted_by_python(model, x, y, p):
    weights = tf.numpy_function(
        lambda labels: np.float32(1 + labels.mean()), [y], tf.float32
    )
    return tf.reshape(weights, ()) * compiled(model, x, y, p)


add("weight by numpy_function", "warn", step_of(weighted_by_python), "check|all_rows")


def determinant(p):
    alike = tf.matmul(p, p, transpose_b=True)
    return tf.linalg.logdet(alike + tf.eye(tf.shape(p)[0]))


def of_matrix(operation):
    def loss_of(model, x, y, p):
        return compiled(model, x, y, p) + local_mean(
            0.1 * tf.reduce_mean(tf.abs(operation(tf.nn.softmax(p))))
        )

    return step_of(loss_of)


add(
    "singular values",
    "warn",
    of_matrix(lambda p: tf.linalg.svd(p, compute_uv=False)),
    "all_rows",
)
add("determinant of rows", "warn", of_matrix(determinant), "all_rows")
add(
    "waves along rows",
    "warn",
    of_matrix(lambda p: tf.signal.rfft(tf.transpose(p), [16])),
    "all_rows|check",
)


# Programs that are right.


def moved_rows(model, x, y):
    """Rows moved by the normalised gradient of their own loss (FGM)."""
    with tf.GradientTape() as tape:
        tape.watch(x)
        loss = model.compute_loss(x, y, model(x))
    g = tape.gradient(loss, x)
    return x + tf.stop_gradient(0.3 * g / (tf.norm(g, axis=-1, keepdims=True) + 1e-12))


def gradient_penalty(model, x, y, p):
    with tf.GradientTape() as tape:
        tape.watch(x)
        whole = tf.reduce_sum(model(x))
    g = tape.gradient(whole, x)
    return compiled(model, x, y, p) + local_mean(
        tf.reduce_mean(tf.norm(g, axis=1) ** 2)
    )


def by_rows_in_a_loop(model, x, y, p):
    loss = tf.map_fn(
        lambda each: keras.losses.sparse_categorical_crossentropy(
            each[0][None], each[1][None], from_logits=True
        )[0],
        (y, p),
        fn_output_signature=tf.float32,
    )
    return local_mean(tf.reduce_mean(loss))


def vectorized(map_rows):
    def loss_of(model, x, y, p):
        loss = map_rows(
            lambda each: keras.losses.sparse_categorical_crossentropy(
                each[0][None], each[1][None], from_logits=True
            )[0],
            (y, p),
        )
        return local_mean(tf.reduce_mean(loss))

    return step_of(loss_of, loss=None)


def scattered(model, x, y, p):
    """The right class' logit of each row made smaller (a margin)."""
    places = tf.stack([tf.range(tf.shape(y)[0]), tf.cast(y, tf.int32)], 1)
    chosen = tf.gather_nd(p, places)
    return compiled(model, x, y, tf.tensor_scatter_nd_update(p, places, chosen - 0.2))


add(
    "rows moved by their gradient",
    "exact",
    step_of(lambda m, x, y, p: m.compute_loss(x, y, m(moved_rows(m, x, y)))),
    replicas=(2, 3),
)
add("gradient penalty", "exact", step_of(gradient_penalty), replicas=(2, 3))
add("losses of rows in a loop", "exact", step_of(by_rows_in_a_loop, loss=None))
add("losses of rows, vectorized", "exact", vectorized(tf.vectorized_map))
add("losses of rows, vectorized by Keras", "exact", vectorized(ops.vectorized_map))
add("scattered within rows", "exact", step_of(scattered))
