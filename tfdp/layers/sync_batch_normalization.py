"""`SyncBatchNormalization`: batch normalization over the samples of all replicas."""

from __future__ import annotations

import contextlib
import numbers
from typing import Any

import keras
import tensorflow as tf

from tfdp.errors import ConfigurationError
from tfdp.layers.moments import (
    Moments,
    at_least_one,
    broadcast_channels,
    channel_sums,
    local_moments,
    merge,
    unpack,
)
from tfdp.layers.replica_group import ReplicaGroup
from tfdp.tracing.gradient_exchanges import exchanges_of_gradient
from tfdp.tracing.step import current_step


def check_group_size(value: Any) -> int | None:
    """`value` as an int; refuses anything but None and integers of at least 1."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < 1:
        raise ConfigurationError(
            "group_size must be an integer of at least 1 that divides the number of "
            f"replicas, or None for all replicas. Received: {value!r}."
        )
    return int(value)


@keras.saving.register_keras_serializable("tfdp")
class SyncBatchNormalization(keras.layers.BatchNormalization):
    """Batch normalization with the mean and variance of the global batch.

    With n_r samples of mean m_r and squared deviations M_r on replica r, in training:

        n = sum n_r,   mean = sum n_r m_r / n
        variance = (sum M_r + sum n_r (m_r - mean)^2) / n
        y = gamma (x - mean) / sqrt(variance + epsilon) + beta

    so N replicas normalize and train as one device does on the whole batch. The moving
    statistics come from the merged moments. Inference and weights (names, shapes,
    order) are those of `keras.layers.BatchNormalization`. Statistics are float32
    (float64 for float64 input).

    Works under `tfdp.DataParallelStrategy`, `tf.distribute.MirroredStrategy` and on one
    device, but not inside a `tf.while_loop`. All replicas must call the layer equally
    often; a replica without samples contributes nothing.

    Args:
      axis: as in `keras.layers.BatchNormalization`.
      momentum: as in `keras.layers.BatchNormalization`.
      epsilon: as in `keras.layers.BatchNormalization`.
      center: as in `keras.layers.BatchNormalization`.
      scale: as in `keras.layers.BatchNormalization`.
      group_size: number of replicas, in groups of consecutive ranks, that share
        statistics; it must divide the number of replicas. None: all. 1: replicas share
        only the moving statistics, which are always the mean over all groups.
      **keras_arguments: the other arguments of `keras.layers.BatchNormalization`,
        `renorm` included, where Keras has it. `synchronized` is always True.

    Call arguments: `inputs`, any shape; `training`; `mask`, of one dimension less,
    True for positions to include in the statistics.

    Raises:
      ConfigurationError: for a bad `group_size` (in training, if it does not divide the
        number of replicas), for `synchronized=False`, and for a mask of another rank.

    Cost, per layer and training step on N replicas with C channels: forward one
    all-reduce of N (2 C + 1) numbers, backward one of 2 C numbers per group, in
    float32.

    ```python
    import keras
    import tfdp

    with tfdp.auto_strategy().scope():
        layers = [keras.layers.Conv2D(4, 3), tfdp.layers.SyncBatchNormalization()]
        model = keras.Sequential([keras.Input((8, 8, 3)), *layers])
    ```

    Source: S. Ioffe, C. Szegedy, "Batch Normalization", 2015, arXiv 1502.03167. Merge:
    T. Chan, G. Golub, R. LeVeque, "Updating formulae and a pairwise algorithm for
    computing sample variances", 1979. Groups: C. Ying et al., "Image Classification at
    Supercomputer Scale", 2018, arXiv 1811.06992.

    Differs from the paper: the moving variance is the mean of the biased variances, as
    in Keras. Differs from Keras: masked statistics are divided by the exact count
    (Keras adds 1e-7), and a batch without samples leaves the moving statistics
    unchanged.
    """

    # Keras 3.12 has no renormalization and does not set this attribute.
    renorm = False

    def __init__(
        self,
        axis: int = -1,
        momentum: float = 0.99,
        epsilon: float = 1e-3,
        center: bool = True,
        scale: bool = True,
        *,
        group_size: int | None = None,
        **keras_arguments: Any,
    ) -> None:
        if not keras_arguments.setdefault("synchronized", True):
            raise ConfigurationError(
                "SyncBatchNormalization is always synchronized. Received: "
                "synchronized=False. For statistics of each replica independently, "
                "write group_size=1."
            )
        self.group_size = check_group_size(group_size)
        super().__init__(axis, momentum, epsilon, center, scale, **keras_arguments)

    def call(self, inputs: Any, training: bool | None = None, mask: Any = None) -> Any:
        check_mask(mask, inputs)
        if not (training and self.trainable):
            return super().call(inputs, training=False, mask=mask)
        # Sums of squares overflow in float16 and lose digits in bfloat16.
        x = tf.cast(inputs, keras.backend.result_type(inputs.dtype, "float32"))
        axis = self.axis % x.shape.rank
        if mask is not None:
            mask = tf.broadcast_to(tf.cast(mask, tf.bool)[..., tf.newaxis], tf.shape(x))

        group = ReplicaGroup(self.group_size)
        channels = self.moving_mean.shape[0]
        own = local_moments(x, axis, channels, mask)
        gathered = unpack(group.gather(own.pack()), channels)
        by_group = merge(gathered, axis=1)
        moments = Moments(*(part[group.own] for part in by_group))

        scale = self._vector(self.gamma, 1.0, x.dtype)
        offset = self._vector(self.beta, 0.0, x.dtype)
        if self.renorm:
            scale, offset = renormalized(self, moments, scale, offset)
        update_moving_statistics(self, mean_over_groups(by_group))
        outputs = normalize(
            x,
            scale,
            offset,
            moments=moments,
            mask=mask,
            axis=axis,
            epsilon=self.epsilon,
            group=group,
        )
        return tf.cast(outputs, self.compute_dtype)

    def _vector(self, weight: Any, default: float, dtype: tf.DType) -> tf.Tensor:
        """`weight` in `dtype`, or the constant that replaces an omitted weight."""
        if weight is None:
            return tf.fill(self.moving_mean.shape, tf.constant(default, dtype))
        return tf.cast(weight, dtype)

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "group_size": self.group_size}


def check_mask(mask: Any, inputs: Any) -> None:
    """Refuses a mask that does not have one dimension less than the inputs."""
    if mask is not None and len(mask.shape) != len(inputs.shape) - 1:
        raise ConfigurationError(
            "The mask of SyncBatchNormalization must have one dimension less than the "
            f"inputs. Received: mask of shape {tuple(mask.shape)}, inputs of shape "
            f"{tuple(inputs.shape)}."
        )


# Moving statistics, which inference uses.


def mean_over_groups(by_group: Moments) -> Moments:
    """The moments that update the moving statistics of all groups.

    With n_g samples in group g and n in all, as one device if the groups are its
    batches:

        mean = sum n_g mean_g / n,   variance = sum n_g variance_g / n
    """
    count = tf.reduce_sum(by_group.count, axis=0)
    weights = by_group.count / at_least_one(count)
    return Moments(
        count,
        tf.reduce_sum(weights * by_group.mean, axis=0),
        tf.reduce_sum(by_group.squared_deviations, axis=0),
    )


def update_moving_statistics(layer: Any, moments: Moments) -> None:
    """Moves the layer's moving mean and variance towards `moments`.

    Without samples they stay unchanged. With batch renormalization the moving deviation
    is averaged, and the moving variance is its square minus epsilon, as in Keras.
    """
    step = current_step()
    # The strategy averages independent assignments of the replicas along with the
    # gradients. These values are identical already.
    with step[0].updating() if step else contextlib.nullcontext():
        _move_all(layer, moments)


def _move_all(layer: Any, moments: Moments) -> None:
    def move(variable: Any, batch: tf.Tensor, momentum: float) -> tf.Tensor:
        one = tf.ones_like(moments.count)
        keep = tf.where(moments.count > 0, momentum * one, one)
        moved = keep * tf.cast(variable, batch.dtype) + (1.0 - keep) * batch
        variable.assign(moved)
        return moved

    move(layer.moving_mean, moments.mean, layer.momentum)
    if not layer.renorm:
        move(layer.moving_variance, moments.variance, layer.momentum)
        return
    deviation = tf.sqrt(moments.variance + layer.epsilon)
    move(layer.renorm_mean, moments.mean, layer.renorm_momentum)
    move(layer.renorm_stddev, deviation, layer.renorm_momentum)
    moved = move(layer.moving_stddev, deviation, layer.momentum)
    layer.moving_variance.assign(tf.nn.relu(tf.square(moved) - layer.epsilon))


def renormalized(
    layer: Any, moments: Moments, scale: tf.Tensor, offset: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
    """Scale and offset for batch renormalization.

        r = clip(deviation / renorm deviation)
        d = clip((mean - renorm mean) / renorm deviation)
        y = scale (r xhat + d) + offset

    r and d are constants for the gradient.

    Source: S. Ioffe, "Batch Renormalization", 2017, arXiv 1702.03275, algorithm 1.
    """
    dtype = moments.mean.dtype
    clipping = layer.renorm_clipping
    # As in Keras: the moving deviation may start at 0.
    reference = tf.maximum(tf.cast(layer.renorm_stddev, dtype), layer.epsilon**0.5)
    r = tf.sqrt(moments.variance + layer.epsilon) / reference
    d = (moments.mean - tf.cast(layer.renorm_mean, dtype)) / reference
    if clipping.get("rmin") is not None:
        r = tf.maximum(r, clipping["rmin"])
    if clipping.get("rmax") is not None:
        r = tf.minimum(r, clipping["rmax"])
    if clipping.get("dmax") is not None:
        d = tf.clip_by_value(d, -clipping["dmax"], clipping["dmax"])
    r, d = tf.stop_gradient(r), tf.stop_gradient(d)
    return scale * r, scale * d + offset


# Normalization with a hand-written gradient of two sums per channel. TensorFlow's
# gradient of the packed exchange would return every replica's moments.


def normalize(
    x: tf.Tensor,
    scale: tf.Tensor,
    offset: tf.Tensor,
    *,
    moments: Moments,
    mask: tf.Tensor | None,
    axis: int,
    epsilon: float,
    group: ReplicaGroup,
) -> tf.Tensor:
    """Scales `x` to zero mean and unit variance, with the moments of its group.

        xhat = (x - mean) / sqrt(variance + epsilon)
        y = scale xhat + offset

    An element of x affects, through the moments, every y of the group. With dy the
    gradient of the sum of all replicas' losses, sums over the group's elements of a
    channel (masked ones included), and n their count:

        dx = scale / sqrt(variance + epsilon) (dy - sum dy / n - xhat sum(dy xhat) / n)
        d scale = sum dy xhat,   d offset = sum dy     (this replica's elements only)

    Masked elements keep only the first term. The optimizer sums the gradients of scale
    and offset over replicas. `moments` must be computed from `x` by differentiable ops,
    for second derivatives. `scale`, `offset`: shape [C].

    Cost: backward one all-reduce of 2 C numbers for each group of replicas.

    Source: S. Ioffe, C. Szegedy, "Batch Normalization", 2015, arXiv 1502.03167,
    algorithm 1 and the equations of section 3 put together.
    """

    def spread(vector: tf.Tensor) -> tf.Tensor:
        return broadcast_channels(vector, x, axis)

    # Outside `apply`, where tapes record it: second derivatives need it.
    inverse = tf.math.rsqrt(moments.variance + epsilon)

    in_order = exchanges_of_gradient()

    @tf.custom_gradient
    def apply(x, scale, offset):
        # Subtract the mean first: the difference of nearly equal numbers is exact,
        # where x / deviation - mean / deviation would lose their common digits.
        y = (x - spread(moments.mean)) * spread(scale * inverse) + spread(offset)

        def gradient(dy):
            # Recomputed from x: stores one tensor less, and second derivatives reach x.
            xhat = (x - spread(moments.mean)) * spread(inverse)
            channels = scale.shape[0]
            sums = [channel_sums(part, axis, channels) for part in (dy, dy * xhat)]
            with in_order():
                totals = group.sum_within(tf.concat(sums, axis=0))
            divisor = at_least_one(moments.count)
            mean_dy, mean_dy_xhat = (s / divisor for s in tf.split(totals, 2))
            through_moments = spread(mean_dy) + xhat * spread(mean_dy_xhat)
            if mask is not None:
                zeros = tf.zeros_like(through_moments)
                through_moments = tf.where(mask, through_moments, zeros)
            dx = spread(scale * inverse) * (dy - through_moments)
            return dx, sums[1], sums[0]

        return y, gradient

    return apply(x, scale, offset)
