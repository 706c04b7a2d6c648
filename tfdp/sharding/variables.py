"""Variables of which every replica holds, or updates, a shard only.

`ShardedVariable` has the whole shape outside and one flat shard per replica inside:
optimizer slots, and with ZeRO stage 3 the weights. `ShardUpdatedVariable` is a mirrored
weight whose update each replica computes for its shard only (stages 1 and 2).

What a read gives depends on where it stands:

    within `shard_update`     the replica's own shard: an elementwise optimizer works on
                              1 / N of the state without knowing it
    in a replica              the whole tensor: an all-gather, whose gradient is a
                              reduce-scatter (ShardedVariable), or the own copy
    anywhere else             the whole tensor
"""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdp._private.names import (
    DistributedVariable,
    UninitializedVariable,
    current_rank,
    in_save_context,
    variable_accessed,
)
from tfdp.errors import ConfigurationError
from tfdp.exchange.packing import own_piece, piece_of
from tfdp.plan.shards import ShardLayout
from tfdp.variables.mirrored import ReplicaMirroredVariable, before_storing

_local = threading.local()


@contextlib.contextmanager
def shard_update(rank: Any) -> Iterator[None]:
    """While this lasts, sharded variables read and assign the shard of replica `rank`
    of this process.

    Where one graph serves all replicas it is a tensor.
    """
    before = updating_rank()
    _local.rank = rank
    try:
        yield
    finally:
        _local.rank = before


def updating_rank() -> Any:
    """The replica whose shard is read and assigned; None outside of `shard_update`."""
    return getattr(_local, "rank", None)


@contextlib.contextmanager
def read_instead(read: Callable[[Any], tf.Tensor]) -> Iterator[None]:
    """While this lasts, `read(variable)` is what is read of sharded variables outside
    of replicas: a file can then be written of something else than the whole."""
    _local.read = read
    try:
        yield
    finally:
        _local.read = None


def _other_read() -> Callable[[Any], tf.Tensor] | None:
    return getattr(_local, "read", None)


@contextlib.contextmanager
def noted_assignments() -> Iterator[dict[int, np.ndarray]]:
    """Notes the whole values that sharded variables are given, by the variable's id."""
    assigned: dict[int, np.ndarray] = {}
    _local.assigned = assigned
    try:
        yield assigned
    finally:
        _local.assigned = None


def _checked(value: Any, dtype: tf.DType, layout: ShardLayout) -> tf.Tensor:
    if isinstance(value, tf.IndexedSlices):
        value = tf.convert_to_tensor(value)
    tensor = tf.cast(value, dtype)
    if not tensor.shape.is_compatible_with(layout.shape):
        raise ValueError(
            f"Cannot assign a value of shape {tensor.shape} to a variable of shape "
            f"{layout.shape}."
        )
    return tensor


def refuse_gradient_of_shard(variable: ShardedVariable, gradient: tf.Tensor) -> None:
    """Refuses for the gradient of what a replica read what is that of its shard.

    Raises:
      ConfigurationError: it has not the shape of the whole variable.
    """
    if gradient.shape.is_compatible_with(variable.shape):
        return
    raise ConfigurationError(
        f"The gradient of {variable.name!r}, of shape {variable.shape}, came as one of "
        f"shape {gradient.shape}. The variable is stored in shards, and tf."
        "recompute_grad, or a tf.custom_gradient that is given `variables`, takes the "
        "gradient of the replica's shard for that of the whole. To compute again "
        "instead of keeping activations use tfdp.remat(layer), which gathers the "
        'weights again; or leave shard="parameters" out (shard="gradients" can stay).'
    )


class ShardedVariable(DistributedVariable):
    """A variable of which each replica stores one flat shard.

    Args:
      strategy: the strategy it belongs to.
      values: one shard per replica, variables of `layout.shard_elements` elements.
      aggregation: as of every distributed variable.
      layout: how the whole is cut.
    """

    #: Where whole tensors are cut; None: on the device of each shard.
    cutting_device: str | None = None
    #: Whether layers see it in the type that they compute in.
    autocasts = False
    #: What functions read of it that are traced for a SavedModel.
    saved_model_stand_in: Any = None

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        values: Sequence[tf.Variable],
        aggregation: tf.VariableAggregation,
        layout: ShardLayout,
    ):
        self.layout = layout
        super().__init__(strategy, values, aggregation)

    @property
    def shape(self) -> tf.TensorShape:
        """Of the whole variable."""
        return tf.TensorShape(self.layout.shape)

    def get_shape(self) -> tf.TensorShape:
        """Of the whole variable."""
        return self.shape

    @property
    def handle(self) -> tf.Tensor:
        """The shard's, in a replica; tapes ask for it, to know what a gradient is of.

        Raises:
          ConfigurationError: outside of replicas, where TensorFlow would take the first
            shard for the whole.
        """
        if updating_rank() is None and not self._is_in_replica():
            raise ConfigurationError(
                f"Variable {self.name!r} is stored in shards: each replica has a part "
                "of it. A gradient with respect to it can be taken in a function that "
                'strategy.run runs, and not outside; without shard="parameters" it can '
                "be taken anywhere."
            )
        return super().handle

    def shard(self, rank: Any) -> Any:
        """What a replica of this process stores, flat and padded."""
        return self._values[rank]

    def read_shard(self, rank: Any) -> tf.Tensor:
        """The value of a replica's shard, flat and padded."""
        return self.shard(rank).read_value()

    def _get(self) -> Any:
        rank = updating_rank()
        if rank is not None:
            return self._values[rank]
        if self._is_in_replica():
            return self._read_in_replica()
        read = _other_read()
        if read is not None:
            return read(self)
        if is_tracing_saved_model():
            return read_stand_in(self)
        shards = read_shards(self._values)
        return self._shards.whole(shards, self.layout, self.name)

    def _read_in_replica(self) -> tf.Tensor:
        return self.distribute_strategy.extended.read_sharded(self, current_rank())

    def value(self) -> tf.Tensor:
        """The shard or the whole; see the top of this file."""
        return tf.convert_to_tensor(self._get())

    read_value = value

    def numpy(self) -> Any:
        """The whole variable as an array."""
        return self.value().numpy()

    def _dense_var_to_tensor(
        self, dtype: Any = None, name: Any = None, as_ref: bool = False
    ) -> tf.Tensor:
        return tf.convert_to_tensor(self._get(), dtype=dtype, name=name)

    def _update(self, update_fn: Callable, value: Any, **kwargs: Any) -> Any:
        rank = updating_rank()
        if rank is not None:
            return update_fn(self._values[rank], value, **kwargs)
        whole = _checked(value, self.dtype, self.layout)
        assigned = getattr(_local, "assigned", None)
        if assigned is not None:
            assigned[id(self)] = whole.numpy()
        if self._is_in_replica():
            before_storing(self, self._values[current_rank()])
        for rank in self._ranks_here():
            device = self._values[rank].device
            with tf.device(self.cutting_device or device):
                own = own_piece(whole, self.layout, self._shards.part_of(rank))
            with tf.device(device):
                update_fn(self._values[rank], own, **kwargs)
        return self

    def _is_in_replica(self) -> bool:
        # Outside all scopes TensorFlow has a replica context, too: another strategy's.
        context = tf.distribute.get_replica_context()
        return context is not None and context.strategy is self.distribute_strategy

    @property
    def _shards(self) -> Any:
        return self.distribute_strategy.extended.shards

    def _ranks_here(self) -> Sequence[int]:
        return [current_rank()] if self._is_in_replica() else range(len(self._values))

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedVariable:
        shards = []
        for value in self._values:
            with tf.device(value.device):
                shards.append(copy.deepcopy(value, memo))
        copied = type(self)(
            self.distribute_strategy, shards, self.aggregation, self.layout
        )
        copied.autocasts = self.autocasts
        memo[id(self)] = copied
        return copied

    def __len__(self) -> int:
        return int(self.shape[0])

    def _export_to_saved_model_graph(
        self, object_map: Any, tensor_map: Any, options: Any, **kwargs: Any
    ) -> list[Any]:
        return export_stand_in(self, object_map, tensor_map)

    # Files hold the whole variable, so any number of replicas, and none, can read them.
    def _serialize_to_tensors(self) -> dict[str, tf.Tensor]:
        return {"VARIABLE_VALUE": self.value()}

    def _restore_from_tensors(self, restored_tensors: dict[str, tf.Tensor]) -> Any:
        return self.assign(restored_tensors["VARIABLE_VALUE"])


class LocalShardVariable(ShardedVariable):
    """A sharded variable that a replica always sees as its own shard.

    Gradient accumulators: what is added to them, and made of them, are shards.
    """

    def _read_in_replica(self) -> tf.Tensor:
        return tf.convert_to_tensor(self._values[current_rank()])

    def _update(self, update_fn: Callable, value: Any, **kwargs: Any) -> Any:
        tensor = tf.cast(value, self.dtype)
        if (
            not self._is_in_replica()
            # Keras sets accumulators back to zeros of the whole shape.
            or tensor.shape != (self.layout.shard_elements,)
        ):
            return super()._update(update_fn, tensor, **kwargs)
        return update_fn(self._values[current_rank()], tensor, **kwargs)


class ShardUpdatedVariable(ReplicaMirroredVariable):
    """A mirrored variable of which each replica updates its shard; see the top."""

    @property
    def layout(self) -> ShardLayout:
        """How its updates are cut."""
        return self.distribute_strategy.extended.shards.layout_of(self)

    def _get(self) -> Any:
        rank, read = updating_rank(), _other_read()
        if rank is None:
            return super()._get() if read is None else read(self)
        part = self.distribute_strategy.extended.shards.part_of(rank)
        # An update on the host asks for the piece, not for the whole.
        with tf.device(self._values[rank].device):
            return piece_of(self._values[rank].read_value(), self.layout, part)

    def value(self) -> tf.Tensor:
        """The shard or the whole; see the top of this file."""
        if self._is_read_as_stored():
            return super().value()
        return self._get()

    def numpy(self) -> Any:
        """The whole variable as an array."""
        return self.value().numpy()

    def _is_read_as_stored(self) -> bool:
        return updating_rank() is None and _other_read() is None

    def _dense_var_to_tensor(
        self, dtype: Any = None, name: Any = None, as_ref: bool = False
    ) -> tf.Tensor:
        if self._is_read_as_stored():
            return super()._dense_var_to_tensor(dtype, name, as_ref)
        return tf.convert_to_tensor(self._get(), dtype=dtype, name=name)

    def _update_cross_replica(
        self, update_fn: Callable, value: Any, **kwargs: Any
    ) -> Any:
        extended = self.distribute_strategy.extended
        return extended.update_whole(self, update_fn, value, kwargs)


def shard_kind(variable: Any) -> type | None:
    """How `variable` is sharded, as a class; None: replicas update the whole."""
    value = variable.value if isinstance(variable, keras.Variable) else variable
    for kind in (ShardedVariable, ShardUpdatedVariable):
        if isinstance(value, kind):
            return kind
    return None


# What a SavedModel holds of a sharded variable: one whole variable.
#
# TensorFlow traces the functions of a SavedModel once more while it writes the file.
# What they read of a sharded variable then is its stand-in: a variable of the whole
# shape that never gets a value, and so takes no memory. The file's value is the whole
# of the shards.


def read_shards(shards: Sequence[tf.Variable]) -> list[tf.Tensor]:
    """The values of shards, without a note in the graph of a function.

    Keras puts every variable that a graph has noted into a SavedModel.
    """
    if tf.executing_eagerly():
        return [tf.convert_to_tensor(shard) for shard in shards]
    values = []
    for shard in shards:
        if shard.trainable:
            variable_accessed(shard)
        read = tf.raw_ops.ReadVariableOp(resource=shard.handle, dtype=shard.dtype)
        values.append(read)
    return values


def is_tracing_saved_model() -> bool:
    """Whether the graph being built is one that a SavedModel will hold."""
    return in_save_context() and not tf.executing_eagerly()


def read_stand_in(variable: Any) -> tf.Tensor:
    """The value of `variable` in a function that is traced for a SavedModel."""
    if variable.saved_model_stand_in is None:
        variable.saved_model_stand_in = _without_value(variable)
    return variable.saved_model_stand_in.read_value()


def export_stand_in(variable: Any, object_map: Any, tensor_map: Any) -> list[Any]:
    """Puts a whole variable for `variable` into the graph of a SavedModel.

    Args:
      variable: the sharded one.
      object_map: from objects to those in the graph of the file.
      tensor_map: from resources to those in the graph of the file.

    Returns:
      The resources by which functions may have captured it.
    """
    exported = _without_value(variable)
    object_map[variable] = exported
    stand_in = variable.saved_model_stand_in
    if stand_in is None:  # no function of this file, nor of one before, reads it
        return []
    tensor_map[stand_in.handle] = exported.handle
    return [stand_in.handle]


def _without_value(variable: Any) -> Any:
    return UninitializedVariable(
        trainable=variable.trainable,
        shape=variable.shape,
        dtype=variable.dtype,
        name=variable.name.split(":")[0],
    )
