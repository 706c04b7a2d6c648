"""Creates the weights that a mesh cuts; `ShardUpdates` reads and updates them."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdp._private.optimizer_hooks import ACCUMULATOR_NAME
from tfdp.exchange.reducer import Reducer
from tfdp.grid.layouts import layouts_of
from tfdp.plan.mesh import MeshLayout
from tfdp.plan.shards import Sharding, ShardLayout
from tfdp.sharding.updates import ShardUpdates
from tfdp.sharding.variables import LocalShardVariable, ShardedVariable
from tfdp.variables.in_shards import InShards

#: The whole of a weight is in the memory of the host, and only its blocks on devices.
HOST = "CPU:0"


class MeshVariable(ShardedVariable):
    """A weight of which the replicas of a group store a block each."""

    stored_by = "layout="
    cutting_device = HOST


class BlockSums(LocalShardVariable):
    """An accumulator of gradients of a `MeshVariable`: sums already."""

    cutting_device = HOST


class GridUpdates(ShardUpdates):
    """The variables of a strategy with a mesh, which may leave some to `shard=`."""

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        devices: Sequence[str],
        reducer: Reducer,
        sharding: Sharding,
    ):
        super().__init__(strategy, devices, reducer, sharding)
        layout = strategy.given["layout"]
        self.layouts = layouts_of(layout, reducer.transport.topology)

    def class_of(self, kwargs: dict[str, Any], value: tf.Tensor) -> type | None:
        reference = kwargs.get("colocate_with")
        if isinstance(reference, InShards):
            found = super().class_of(kwargs, value)
            if not isinstance(reference.layout, MeshLayout):
                return found
            if ACCUMULATOR_NAME in (kwargs.get("name") or ""):
                return BlockSums
            return MeshVariable if found is ShardedVariable else found
        if self.layouts.layout_of_new(kwargs) is not None:
            return MeshVariable
        return super().class_of(kwargs, value) if self.stage else None

    def layout_of_new(self, kwargs: dict[str, Any], value: Any) -> ShardLayout:
        layout = self.layouts.layout_of_new(kwargs)
        return super().layout_of_new(kwargs, value) if layout is None else layout

    def whole(
        self, shards: Sequence[tf.Tensor], layout: ShardLayout, name: str
    ) -> tf.Tensor:
        is_of_mesh = isinstance(layout, MeshLayout)
        with tf.device(HOST) if is_of_mesh else contextlib.nullcontext():
            return super().whole(shards, layout, name)
