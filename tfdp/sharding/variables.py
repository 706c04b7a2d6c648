"""Variables of which every replica holds, or updates, only a shard.

`ShardedVariable` has the whole shape for its users and stores one flat shard per
replica: optimizer slots, and with ZeRO stage 3 the weights. `ShardUpdatedVariable` is a
mirrored weight of which each replica updates only its shard (stages 1 and 2).

What a read returns:

    within `shard_update`     the replica's shard, so that an elementwise optimizer
                              works on 1 / N of the state
    in a replica              the whole tensor: an all-gather (its gradient: a
                              reduce-scatter; ShardedVariable), or the replica's copy
    anywhere else             the whole tensor
"""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdp._private.names import (
    DistributedVariable,
    UninitializedVariable,
    current_rank,
    in_save_context,
    variable_accessed,
)
from tfdp.errors import CollectiveError, ConfigurationError
from tfdp.exchange.shards import copied_shard, shard_of
from tfdp.plan.shards import OwnedLayout, ShardLayout
from tfdp.variables.in_shards import InShards
from tfdp.variables.local_view import in_replica_of
from tfdp.variables.mirrored import ReplicaMirroredVariable, before_storing

_local = threading.local()


@contextlib.contextmanager
def shard_update(rank: Any) -> Iterator[None]:
    """Makes sharded variables read and assign `rank`'s shard within the context."""
    before = updating_rank()
    _local.rank = rank
    try:
        yield
    finally:
        _local.rank = before


def updating_rank() -> Any:
    """The `rank` of the current `shard_update`, or None."""
    return getattr(_local, "rank", None)


@contextlib.contextmanager
def noted_assignments() -> Iterator[dict[int, np.ndarray]]:
    """Records whole values assigned to sharded variables, by the variable's id."""
    assigned: dict[int, np.ndarray] = {}
    _local.assigned = assigned
    try:
        yield assigned
    finally:
        _local.assigned = None


def _checked(value: Any, dtype: tf.DType, layout: ShardLayout) -> tf.Tensor:
    tensor = tf.cast(tf.convert_to_tensor(value), dtype)
    if not tensor.shape.is_compatible_with(layout.shape):
        raise ValueError(
            f"Cannot assign a value of shape {tensor.shape} to a variable of shape "
            f"{layout.shape}."
        )
    return tensor


def check_whole_gradient(
    variable: ShardedVariable, gradient: tf.Tensor, layout: ShardLayout
) -> None:
    """Refuses a gradient that has the shape of a shard, not of what was read."""
    if gradient.shape.is_compatible_with(layout.shape):
        return
    raise ConfigurationError(
        f"The gradient of {variable.name!r}, of shape {layout.shape}, has shape "
        f"{gradient.shape}. The variable is stored in shards, and tf.recompute_grad or "
        "a tf.custom_gradient with `variables` confuses the gradient of the replica's "
        "shard with that of the whole. Use tfdp.remat(layer), which gathers the "
        f'weights again, or leave out {variable.stored_by} (shard="gradients" works).'
    )


@tf.custom_gradient
def without_gradient(shard: tf.Tensor) -> tuple[tf.Tensor, Callable]:
    """The shard of a gradient: refuses a gradient of its own, which would lack what
    comes from other replicas."""

    def refuse(_: Any) -> None:
        raise CollectiveError(
            "A loss depends on the gradient of a weight that is stored in shards "
            '(shard="parameters", layout=): a replica has a part of the sum over all '
            "replicas, which has no gradient. A penalty on gradients with respect to "
            "inputs works. One with respect to weights needs whole weights "
            '(shard="gradients"), and tfdp.losses.all_sum of each gradient.'
        )

    return tf.identity(shard), refuse


class ShardedVariable(InShards, DistributedVariable):
    """A variable of which each replica stores one shard."""

    is_stored_in_shards = True
    #: The option of a strategy that asks for it.
    stored_by = 'shard="parameters"'
    #: The device that cuts whole tensors; None: the device of each shard.
    cutting_device: str | None = None
    #: Whether layers read it in their compute type.
    autocasts = False
    #: What functions traced for a SavedModel read instead.
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
        return tf.TensorShape(self.layout.shape)

    def get_shape(self) -> tf.TensorShape:
        return self.shape

    @property
    def handle(self) -> tf.Tensor:
        """The shard's, in a replica: gradient tapes identify the variable by it."""
        if updating_rank() is None and not self._is_in_replica():
            raise ConfigurationError(
                f"Variable {self.name!r} is stored in shards: each replica has a part "
                "of it. A gradient with respect to it can only be taken in a graph of "
                "all replicas (a function that strategy.run runs, and "
                f"run_eagerly=False), or without {self.stored_by}."
            )
        return super().handle

    def shard(self, rank: Any) -> Any:
        """A replica's stored variable (rank in this process)."""
        return self._values[rank]

    def read_shard(self, rank: Any) -> tf.Tensor:
        return self.shard(rank).read_value()

    def _get(self) -> Any:
        rank = updating_rank()
        if rank is not None:
            return self._values[rank]
        if self._is_in_replica():
            return self._read_in_replica()
        if in_save_context() and not tf.executing_eagerly():
            return _read_stand_in(self)
        shards = _read_shards(self._values)
        return self._shards.whole(shards, self.layout, self.name)

    def _read_in_replica(self) -> tf.Tensor:
        return self.distribute_strategy.extended.read_sharded(self, current_rank())

    def value(self) -> tf.Tensor:
        return tf.convert_to_tensor(self._get())

    read_value = value

    def numpy(self) -> Any:
        return self.value().numpy()

    def _dense_var_to_tensor(
        self, dtype: Any = None, name: Any = None, as_ref: bool = False
    ) -> tf.Tensor:
        return tf.convert_to_tensor(self._get(), dtype=dtype, name=name)

    def _update(self, update_fn: Callable, value: Any, **kwargs: Any) -> Any:
        rank = updating_rank()
        if rank is not None:
            return update_fn(self._values[rank], value, **kwargs)
        # A replica's value is on its device already.
        cuts_on = None if self._is_in_replica() else self.cutting_device
        with tf.device(cuts_on) if cuts_on else contextlib.nullcontext():
            whole = _checked(value, self.dtype, self.layout)
        assigned = getattr(_local, "assigned", None)
        if assigned is not None:
            assigned[id(self)] = whole.numpy()
        if self._is_in_replica():
            before_storing(self, self._values[current_rank()])
        for rank in self._ranks_here():
            device = self._values[rank].device
            with tf.device(cuts_on or device):
                part = self._shards.part_of(rank, self.layout)
                own = copied_shard(whole, self.layout, part)
            with tf.device(device):
                update_fn(self._values[rank], own, **kwargs)
        return self

    def scatter_add(self, sparse_delta: Any, *args: Any, **kwargs: Any) -> Any:
        """Adds slices of the replica's part to it, in an update."""
        return self._values[updating_rank()].scatter_add(sparse_delta, *args, **kwargs)

    def scatter_sub(self, sparse_delta: Any, *args: Any, **kwargs: Any) -> Any:
        return self._values[updating_rank()].scatter_sub(sparse_delta, *args, **kwargs)

    def _is_in_replica(self) -> bool:
        return in_replica_of(self.distribute_strategy)

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
        copied.autocasts, copied.owner = self.autocasts, self.owner
        memo[id(self)] = copied
        return copied

    def __len__(self) -> int:
        return int(self.shape[0])

    def _export_to_saved_model_graph(
        self, object_map: Any, tensor_map: Any, options: Any, **kwargs: Any
    ) -> list[Any]:
        return _export_stand_in(self, object_map, tensor_map)

    # Files hold the whole variable, so that any number of replicas can read them.
    def _serialize_to_tensors(self) -> dict[str, tf.Tensor]:
        return {"VARIABLE_VALUE": self.value()}

    def _restore_from_tensors(self, restored_tensors: dict[str, tf.Tensor]) -> Any:
        return self.assign(restored_tensors["VARIABLE_VALUE"])


class LocalShardVariable(ShardedVariable):
    """A sharded variable that a replica always reads as its shard: an accumulator."""

    def _read_in_replica(self) -> tf.Tensor:
        return tf.convert_to_tensor(self._values[current_rank()])

    def _update(self, update_fn: Callable, value: Any, **kwargs: Any) -> Any:
        tensor = tf.cast(value, self.dtype)
        if not self._is_in_replica():
            return super()._update(update_fn, tensor, **kwargs)
        rank = current_rank()
        # Keras resets accumulators to zeros of the whole shape.
        part = self._shards.part_of(rank, self.layout)
        if tensor.shape != self.layout.shard_shape(part):
            return super()._update(update_fn, tensor, **kwargs)
        return update_fn(self._values[rank], tensor, **kwargs)


class ShardUpdatedVariable(InShards, ReplicaMirroredVariable):
    """A mirrored variable of which each replica updates only its shard."""

    @property
    def layout(self) -> ShardLayout:
        flat = self.distribute_strategy.extended.shards.layout_of(self)
        if self.owner is None:
            return flat
        return OwnedLayout(flat.shape, flat.parts, self.owner)

    def _get(self) -> Any:
        rank = updating_rank()
        if rank is None:
            return super()._get()
        part = self.distribute_strategy.extended.shards.part_of(rank, self.layout)
        # An update on the host copies the piece, not the whole.
        with tf.device(self._values[rank].device):
            return shard_of(self._values[rank].read_value(), self.layout, part)

    def value(self) -> tf.Tensor:
        if updating_rank() is None:
            return super().value()
        return self._get()

    def numpy(self) -> Any:
        return self.value().numpy()

    def _dense_var_to_tensor(
        self, dtype: Any = None, name: Any = None, as_ref: bool = False
    ) -> tf.Tensor:
        if updating_rank() is None:
            return super()._dense_var_to_tensor(dtype, name, as_ref)
        return tf.convert_to_tensor(self._get(), dtype=dtype, name=name)

    def _update_cross_replica(
        self, update_fn: Callable, value: Any, **kwargs: Any
    ) -> Any:
        extended = self.distribute_strategy.extended
        return extended.update_whole(self, update_fn, value, kwargs)


# A SavedModel holds one whole variable for a sharded one. While TensorFlow writes the
# file it traces the functions again; these read a stand-in of the whole shape, which
# never gets a value and takes no memory.


def _read_shards(shards: Sequence[tf.Variable]) -> list[tf.Tensor]:
    """The shards' values, without capturing the variables in a function's graph.

    Keras puts every variable that a graph captured into a SavedModel.
    """
    values = []
    for shard in shards:
        if shard.trainable:
            variable_accessed(shard)
        read = tf.raw_ops.ReadVariableOp(resource=shard.handle, dtype=shard.dtype)
        values.append(read)
    return values


def _read_stand_in(variable: Any) -> tf.Tensor:
    if variable.saved_model_stand_in is None:
        variable.saved_model_stand_in = _without_value(variable)
    return variable.saved_model_stand_in.read_value()


def _export_stand_in(variable: Any, object_map: Any, tensor_map: Any) -> list[Any]:
    """Puts a whole variable for the sharded `variable` into a SavedModel's graph.

    Returns the resources that functions may have captured for `variable`.
    """
    exported = _without_value(variable)
    object_map[variable] = exported
    stand_in = variable.saved_model_stand_in
    if stand_in is None:  # no traced function reads it
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
