"""States whether a custom loss is a mean or a sum over the replica's samples.

Keras losses state it themselves. A custom `train_step`, or a loss function that returns
a scalar, does not; `local_mean` and `local_sum` do. A loss with interacting rows is
neither: `on_all_rows` lets a model compute it on the whole batch; or compute it from
`all_rows`, or from sums by `all_sum`.
"""

from __future__ import annotations

import weakref
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdp._private.keras_models import given_losses, metrics_as_compiled
from tfdp._private.names import in_compiled_function, replicas_of
from tfdp.errors import ConfigurationError
from tfdp.lint.registry import register
from tfdp.lint.values import ROW_SOURCE
from tfdp.tracing.local_losses import local_mean, local_sum
from tfdp.tracing.step import current_step

__all__ = [
    "all_rows",
    "all_sum",
    "local_mean",
    "local_sum",
    "on_all_rows",
    "own_rows",
]


def __dir__() -> list[str]:
    return [*__all__]


# Models that `on_all_rows` has marked, and the bytes of one row that their last traced
# step has gathered.
ON_ALL_ROWS: weakref.WeakKeyDictionary[keras.Model, int] = weakref.WeakKeyDictionary()
DENSE = (keras.Variable, np.ndarray, tf.Tensor, tf.Variable)


def on_all_rows(model: keras.Model) -> keras.Model:
    """Computes the losses and metrics of a model on the rows of all replicas.

        L(x_0, x_1, ... x_(R-1))    x_r: the model's outputs for the rows of replica r

    One line after `compile` for losses and metrics in which rows see each other
    (contrastive losses, hard mining, batch Dice, F1 of a batch, top-k of all
    candidates): `compute_loss` and `compute_metrics` of the model get the outputs (with
    their masks), targets and weights of the whole batch, as on one device, and so
    numbers and gradients are one device's, also for weights that the loss itself reads
    (a temperature, prototypes). Both are called as they are, compiled losses or own
    code; what `tfdp.losses` has changes nothing there, and `num_replicas_in_sync` is 1.
    Layers whose rows see each other: `tfdp.layers.AllRows`.

    Args:
      model: the model that `fit` is called on, compiled or not. Its outputs, targets
        and weights are dense tensors with one entry along the first axis for each row
        of the batch, or the same on all replicas. Call it again for a model that was
        loaded or cloned.

    Returns:
      The model.

    Raises:
      ConfigurationError: for anything but a Keras model; for one whose only losses are
        those of its layers (`add_loss`). In `fit`: with `jit_compile=True`, on TPUs,
        with `sync=...`, or for padded batches, where replicas cannot exchange rows; for
        a step that calls neither `compute_loss` nor `compute_metrics`, or calls it in a
        `tf.function`, a branch or a loop; for a loss with values for rows, or one that
        reads rows of a replica from elsewhere than its arguments, such as an attribute
        that `call` has set.

    Cost: each replica receives and holds the other replicas' outputs, targets and
    weights (and inputs, if the model overrides the method), and computes the loss of
    the whole batch: N times a replica's. The gradient travels nowhere. Not for
    language models, whose outputs are large and whose rows do not see each other.
    `tfdp plan` counts the bytes.

    ```python
    import keras
    import tfdp

    def in_batch(y, p):
        queries, candidates = keras.ops.split(p, 2, axis=1)
        scores = keras.ops.matmul(queries, keras.ops.transpose(candidates))
        labels = keras.ops.arange(keras.ops.shape(scores)[0])
        return keras.losses.sparse_categorical_crossentropy(
            labels, scores, from_logits=True
        )

    with tfdp.DataParallelStrategy().scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8)])
        model.compile("sgd", in_batch)
    tfdp.losses.on_all_rows(model)
    ```

    Source: A. Radford et al., 2021 (CLIP), whose loss is of the whole batch.
    """
    if not isinstance(model, keras.Model):
        raise ConfigurationError(
            "tfdp.losses.on_all_rows takes the Keras model that fit is called on. "
            f"Received: {model!r}."
        )
    names = ("compute_loss", "compute_metrics")
    acts = [getattr(type(model), name) != getattr(keras.Model, name) for name in names]
    acts += [*given_losses(model), metrics_as_compiled(model)]
    acts += [name in vars(model) for name in names]
    if model.compiled and not any(acts):
        raise ConfigurationError(
            "tfdp.losses.on_all_rows acts on the losses and metrics given to compile, "
            f"and on compute_loss and compute_metrics of a model: {model.name!r} has "
            "none. Put a layer that gives add_loss a loss of several rows, or has such "
            "a regularizer, into tfdp.layers.AllRows(layer), and leave on_all_rows out."
        )
    ON_ALL_ROWS.setdefault(model, 0)
    return model


def all_rows(x: Any) -> Any:
    """The rows of all replicas, joined in the order of the global batch.

        x_0, x_1, ... x_(R-1)        x_r: (n_r, ...) on replica r; the result: (N, ...)

    For losses and metrics with interacting rows (Dice, contrastive losses, a root of a
    mean): computed from all rows they equal those of one device on the whole batch, and
    so do their gradients. Each replica computes the same: return a loss as a scalar (a
    mean) in `local_mean`, as below, a metric as a scalar, and values per row by
    `own_rows`.

    Args:
      x: a tensor with a row for each sample of this replica, or a structure of them;
        replicas may have different numbers of rows.

    Returns:
      The same structure on every replica. Outside replicas, on one replica and under
      the default strategy: `x` itself.

    Raises:
      ConfigurationError: for anything but dense tensors with rows; where XLA compiles
        a replica (`jit_compile=True`, except on TPUs), which cannot exchange then; or
        in a `tf.function`, a branch or a loop of the step.

    Cost: each replica receives the other replicas' rows, (R - 1) / R of the result's
    bytes, and its gradient sends as many back.

    ```python
    import keras
    import tfdp

    def dice(y, p):
        both = 2 * keras.ops.sum(y * p)
        return 1 - both / (keras.ops.sum(y * y) + keras.ops.sum(p * p))

    def whole_dice(y, p):
        loss = dice(tfdp.losses.all_rows(y), tfdp.losses.all_rows(p))
        return tfdp.losses.local_mean(loss)

    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1, "sigmoid")])
    model.compile("sgd", whole_dice)
    ```

    Source: T. Chen et al., 2020 (SimCLR), section 2.2.
    """
    _refuse_without_rows("all_rows", x, "for a number use tfdp.losses.all_sum")
    context = replicas_in_sync("all_rows")
    if context is None:
        return x
    return gathered("all_rows", x)


def all_sum(values: Any) -> Any:
    """The sums of numbers over all replicas, the same on each.

        x_0 + x_1 + ... + x_(R-1)        x_r: the value on replica r, of one shape

    For numbers that depend on all rows of the batch and are sums of its parts: counts,
    sums over rows, losses and gradients of `local_mean`. It has a gradient.

    Args:
      values: a number or a tensor, of the same shape on all replicas, or a structure
        of them. Gradients may be None, and `tf.IndexedSlices`: tfdp's strategies give
        one device's rows, so that a norm is that of `global_clipnorm`. It counts rows
        of one word apart; of their sum, it needs `tf.convert_to_tensor(gradient)`.

    Returns:
      The same structure. Outside replicas, as while Keras infers a layer's shapes, on
      one replica and under the default strategy: `values` itself.

    Raises:
      ConfigurationError: where XLA compiles a replica, as `all_rows`.
      CollectiveError: in a loop of the step, or in `tf.vectorized_map`; or in a branch
        that each replica takes or not by its own rows.

    Cost: one all-reduce of the values' bytes, and one in the gradient.

    Example, a layer that subtracts the mean over the rows of the whole batch:

    ```python
    import keras
    import tfdp

    class Center(keras.layers.Layer):
        def call(self, x):
            rows = keras.ops.cast(keras.ops.shape(x)[0], x.dtype)
            total, count = tfdp.losses.all_sum([keras.ops.sum(x, axis=0), rows])
            return x - total / count

    model = keras.Sequential([keras.Input((4,)), Center(), keras.layers.Dense(1)])
    model.compile("sgd", "mse", jit_compile=False)
    ```

    Source: the SUM all-reduce of MPI (MPI_Allreduce).
    """
    context = replicas_in_sync("all_sum")
    if context is None:
        return values
    parts = tf.nest.flatten(values)
    given = [part for part in parts if part is not None]
    sums = iter(context.all_reduce(tf.distribute.ReduceOp.SUM, given))
    results = [part if part is None else next(sums) for part in parts]
    return tf.nest.pack_sequence_as(values, results)


def own_rows(values: Any, like: Any) -> Any:
    """This replica's part of values computed for each row of all replicas.

        v_0, v_1, ... v_(R-1)        v_r: (n_r, ...) on replica r; `values`: (N, ...)

    The inverse of `all_rows`, for losses and metrics that give a value for each row
    (contrastive losses, ranks among all answers): each replica counts its own rows, so
    that means, sums, sample weights and all `keras.metrics` equal those of one device.

    Args:
      values: a tensor with a row for each row of all replicas, in the order of
        `all_rows`, or a structure of them.
      like: a tensor with this replica's rows, as it was given to `all_rows`.

    Returns:
      The same structure, with as many rows as `like` has. Outside replicas, on one
      replica and under the default strategy: `values` itself.

    Raises:
      ConfigurationError: for anything but dense tensors with the right number of rows;
        or as `all_rows`.
      tf.errors.InvalidArgumentError: the numbers of rows differ, in a step.

    Cost: 4 bytes from each replica, in one exchange.

    Example, CLIP's loss (each text belongs to one image):

    ```python
    import keras
    import tfdp

    def clip(texts, images):
        images = keras.ops.transpose(tfdp.losses.all_rows(images))
        likeness = keras.ops.matmul(tfdp.losses.all_rows(texts), images)
        labels = keras.ops.arange(keras.ops.shape(likeness)[0])
        of_each = keras.losses.sparse_categorical_crossentropy(
            labels, likeness, from_logits=True
        )
        return tfdp.losses.own_rows(of_each, texts)

    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8)])
    model.compile("sgd", clip)
    ```

    Source: A. Radford et al., 2021 (CLIP), figure 3, one of its two directions.
    """
    _refuse_without_rows("own_rows", [values, like], "a number needs no part")
    context = replicas_in_sync("own_rows")
    if context is None:
        _refuse_other_lengths(values, like)
        return values
    rank = context.replica_id_in_sync_group
    if in_compiled_function():
        # On TPUs all replicas have the same, static number of rows.
        size = like.shape[0]
        if size is None:
            raise ConfigurationError(
                "own_rows needs a static number of rows per replica where XLA "
                "compiles: batch with drop_remainder=True."
            )
        return tf.nest.map_structure(
            lambda value: _static_rows(value, rank * size, size), values
        )
    own = _has_rows()
    rows = tf.shape(like)[0]
    # A dummy row of this replica is not among those of all.
    own_count = rows * tf.cast(own, rows.dtype)
    counts = gathered("own_rows", own_count[None])
    before = tf.reduce_sum(counts[:rank]) * tf.cast(own, rows.dtype)
    # The rows after this replica's; the split fails unless all rows are accounted for.
    behind = tf.reduce_sum(counts) - before - rows
    length = tf.TensorShape(like.shape)[:1]

    def part_of(value: Any) -> tf.Tensor:
        sizes = [before, rows, behind]
        part = tf.split(value, sizes, axis=0)[1]
        part = tf.ensure_shape(part, length.concatenate(part.shape[1:]))
        register(part, ROW_SOURCE)
        return part

    return tf.nest.map_structure(part_of, values)


def _has_rows() -> Any:
    """Whether this replica has rows of its own, and no dummy row; maybe a tensor."""
    found = current_step()
    return True if found is None else found[0].here.rows.present


def _static_rows(value: Any, begin: Any, size: int) -> tf.Tensor:
    """`size` rows of `value`, with static sizes, for XLA."""
    rest = value.shape[1:]
    begins = tf.stack([begin, *[0] * rest.rank])
    part = tf.slice(value, begins, [size, *rest])
    register(part, ROW_SOURCE)
    return part


def _refuse_without_rows(name: str, values: Any, instead: str) -> None:
    for part in tf.nest.flatten(values):
        if not isinstance(part, DENSE) or not tf.TensorShape(part.shape).rank:
            raise ConfigurationError(
                f"{name} needs dense tensors with a row for each sample; {instead}. "
                f"Received: {str(part)[:300]}."
            )


def _refuse_other_lengths(values: Any, like: Any) -> None:
    rows = tf.TensorShape(like.shape)[:1]
    for part in tf.nest.flatten(values):
        if not rows.is_compatible_with(part.shape[:1]):
            raise ConfigurationError(
                "own_rows needs a value for each row of all replicas, on one replica "
                f"as many as `like` has: {rows[0]}. Received: {part.shape[0]}."
            )


def replicas_in_sync(name: str) -> Any:
    """The context of this replica; None if it is the only one."""
    context = tf.distribute.get_replica_context()
    if context is None or replicas_of(context.strategy) == 1:
        return None
    found = current_step()
    if found is not None and found[0].here.sees_all_rows:
        return None
    if in_compiled_function() and not getattr(context.strategy, "compiles_steps", True):
        raise ConfigurationError(
            f"{name} exchanges between replicas, which XLA cannot compile: compile the "
            "model with jit_compile=False."
        )
    return context


def gathered(name: str, x: Any) -> Any:
    """The rows of all replicas of each tensor of `x`, for the caller `name`."""
    context = tf.distribute.get_replica_context()
    try:
        return tf.nest.map_structure(
            lambda part: context.all_gather(tf.convert_to_tensor(part), axis=0), x
        )
    except RuntimeError as error:
        if "merge_call" not in str(error):
            raise
        raise ConfigurationError(
            f"{name} was called within a tf.function, a branch or a loop of a step, "
            "where replicas cannot exchange. Call it before, in the step itself."
        ) from error
