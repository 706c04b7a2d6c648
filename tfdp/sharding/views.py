"""A shard of a mirrored weight, while an optimizer updates it."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdp.errors import ConfigurationError
from tfdp.exchange.shard_pieces import piece_of
from tfdp.sharding.variables import ShardUpdatedVariable

__all__ = ["ShardView"]


class ShardView:
    """Shard `part` of one replica's copy of a mirrored weight, while it is updated.

    Looks like a variable to an optimizer. What is assigned stays here, as a tensor on
    the replica's device, until the shards of all replicas are gathered into the copies.
    """

    def __init__(self, variable: ShardUpdatedVariable, part: Any, copy_: Any):
        self.variable = variable
        self.copy = copy_
        self.layout = variable.layout
        self.graph = tf.compat.v1.get_default_graph()
        self.is_assigned = False
        with tf.device(copy_.device):
            self._value = piece_of(copy_.read_value(), variable.layout, part)

    def _distributed_container(self) -> ShardUpdatedVariable:
        # By this Keras finds the slots that belong to the variable.
        return self.variable

    @property
    def dtype(self) -> tf.DType:
        """The variable's."""
        return self._value.dtype

    @property
    def shape(self) -> tf.TensorShape:
        """The shard's: flat."""
        return self._value.shape

    @property
    def device(self) -> str:
        """The replica's."""
        return self.copy.device

    @property
    def name(self) -> str:
        """The variable's."""
        return self.variable.name

    def value(self) -> tf.Tensor:
        """The shard as it is by now."""
        return self._value

    read_value = value

    def __tf_tensor__(self, dtype: Any = None, name: Any = None) -> tf.Tensor:
        return tf.convert_to_tensor(self._value, dtype=dtype, name=name)

    def assign(self, value: Any, **kwargs: Any) -> ShardView:
        """Sets the shard."""
        if tf.compat.v1.get_default_graph() is not self.graph:
            raise ConfigurationError(
                f"An optimizer updates {self.name!r} inside a conditional of its own, "
                "which does not work with shard=...: use shard='none', or an optimizer "
                "of Keras or tfdp."
            )
        with tf.device(self.device):
            value = tf.cast(value, self.dtype)
            self._value = tf.ensure_shape(tf.reshape(value, [-1]), self.shape)
        self.is_assigned = True
        return self

    def assign_add(self, value: Any, **kwargs: Any) -> ShardView:
        """Adds to the shard."""
        with tf.device(self.device):
            return self.assign(self._value + tf.cast(value, self.dtype))

    def assign_sub(self, value: Any, **kwargs: Any) -> ShardView:
        """Subtracts from the shard."""
        with tf.device(self.device):
            return self.assign(self._value - tf.cast(value, self.dtype))

    def __add__(self, other: Any) -> tf.Tensor:
        return self._value + other

    def __radd__(self, other: Any) -> tf.Tensor:
        return other + self._value

    def __sub__(self, other: Any) -> tf.Tensor:
        return self._value - other

    def __rsub__(self, other: Any) -> tf.Tensor:
        return other - self._value

    def __mul__(self, other: Any) -> tf.Tensor:
        return self._value * other

    def __rmul__(self, other: Any) -> tf.Tensor:
        return other * self._value

    def __truediv__(self, other: Any) -> tf.Tensor:
        return self._value / other

    def __neg__(self) -> tf.Tensor:
        return -self._value
