"""`SyncBatchNormalization`: batch normalisation over the samples of all replicas."""

from __future__ import annotations

import numbers
from typing import Any

import keras
import tensorflow as tf

from tfdp.errors import ConfigurationError
from tfdp.layers.moments import Moments, local_moments, merge, unpack
from tfdp.layers.moving_statistics import (
    mean_over_groups,
    renormalized,
    update_moving_statistics,
)
from tfdp.layers.normalize import normalize
from tfdp.layers.replica_group import ReplicaGroup

__all__ = ["SyncBatchNormalization", "check_group_size"]


def check_group_size(value: Any) -> int | None:
    """`value`, refused unless it is None or an integer of at least 1."""
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
    """Batch normalisation whose mean and variance are those of the global batch.

    With n_r samples of mean m_r and squared deviations M_r on replica r, in training:

        n = sum n_r,   mean = sum n_r m_r / n
        variance = (sum M_r + sum n_r (m_r - mean)^2) / n
        y = gamma (x - mean) / sqrt(variance + epsilon) + beta

    so N replicas normalise, and learn, as one device does on the whole batch. The
    moving statistics come from the merged ones: they are the same on every replica,
    and in the file that is saved. Inference is that of
    `keras.layers.BatchNormalization`, and so are the weights: their names, shapes and
    order. Statistics are in float32 (float64 for float64 input).

    Works under `tfdp.DataParallelStrategy`, `tf.distribute.MirroredStrategy` and on
    one device. All replicas must call the layer equally often; one without samples
    counts for nothing and gets its exact share of nothing. Not inside a
    `tf.while_loop`, where replicas cannot exchange.

    Args:
      axis: as in `keras.layers.BatchNormalization`.
      momentum: as in `keras.layers.BatchNormalization`.
      epsilon: as in `keras.layers.BatchNormalization`.
      center: as in `keras.layers.BatchNormalization`.
      scale: as in `keras.layers.BatchNormalization`.
      group_size: over how many replicas statistics are taken, in groups of
        consecutive ranks; an integer that divides the number of replicas. None: all.
        1: each replica normalises for itself, and only the moving statistics are
        shared. Moving statistics are always the mean over all groups.
      **keras_arguments: the other arguments of `keras.layers.BatchNormalization`;
        `renorm` works as there, where Keras has it. `synchronized` is always True.

    Call arguments: `inputs`, any shape; `training`; `mask`, of one dimension less,
    True for the positions that statistics are taken of.

    Raises:
      ConfigurationError: when `group_size` is not as above (in training, when it does
        not divide the number of replicas), for `synchronized=False`, and for a mask
        of another rank.

    Cost, per layer and training step on N replicas with C channels: forward one
    all-reduce of N (2 C + 1) numbers, backward one of 2 C numbers per group; float32
    numbers of 4 bytes each. On one replica nothing is exchanged.

    ```python
    import keras
    import tfdp

    with tfdp.auto_strategy().scope():
        model = keras.Sequential(
            [
                keras.Input((8, 8, 3)),
                keras.layers.Conv2D(4, 3, use_bias=False),
                tfdp.layers.SyncBatchNormalization(),
                keras.layers.ReLU(),
            ]
        )
    ```

    Source: S. Ioffe, C. Szegedy, "Batch Normalization: Accelerating Deep Network
    Training by Reducing Internal Covariate Shift", 2015, arXiv 1502.03167. Merge: T.
    Chan, G. Golub, R. LeVeque, "Updating formulae and a pairwise algorithm for
    computing sample variances", 1979. Groups: C. Ying, S. Kumar, D. Chen,
    T. Wang, Y. Cheng, "Image Classification at Supercomputer Scale", 2018,
    arXiv 1811.06992.

    Differs from the paper: the moving variance is the mean of the biased variances
    (divided by n, not n - 1), as in Keras. Differs from Keras: masked statistics are
    divided by the exact count (Keras adds 1e-7), and a batch without samples leaves
    the moving statistics as they are.
    """

    # Keras 3.12 has no renormalization: its layers have no word of it.
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
                "synchronized=False. For statistics of each replica alone, "
                "write group_size=1."
            )
        self.group_size = check_group_size(group_size)
        super().__init__(axis, momentum, epsilon, center, scale, **keras_arguments)

    def call(self, inputs: Any, training: bool | None = None, mask: Any = None) -> Any:
        """Normalises `inputs`; see the class."""
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
        everyones = unpack(group.gather(own.pack()), channels)
        by_group = merge(everyones, axis=1)
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
        """`weight` in `dtype`, or the constant that stands for a left-out weight."""
        if weight is None:
            return tf.fill(self.moving_mean.shape, tf.constant(default, dtype))
        return tf.cast(weight, dtype)

    def get_config(self) -> dict[str, Any]:
        """The arguments, as plain data."""
        return {**super().get_config(), "group_size": self.group_size}


def check_mask(mask: Any, inputs: Any) -> None:
    """Refuses a mask that is not of one dimension less than the inputs."""
    if mask is not None and len(mask.shape) != len(inputs.shape) - 1:
        raise ConfigurationError(
            "The mask of SyncBatchNormalization must have one dimension less than the "
            f"inputs. Received: mask of shape {tuple(mask.shape)}, inputs of shape "
            f"{tuple(inputs.shape)}."
        )
