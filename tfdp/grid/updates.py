"""Creates the weights that a mesh cuts; `ShardUpdates` reads and updates them."""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdp._private.keras_calls import makers_of_variable
from tfdp._private.keras_models import layers_within
from tfdp._private.optimizer_hooks import ACCUMULATOR_NAME
from tfdp.grid.cancelled import rows_behind
from tfdp.grid.kinds import InParts, layers_in_parts
from tfdp.grid.layouts import layouts_of
from tfdp.grid.moved_rows import RowMover
from tfdp.grid.parts import OpenRegions, PartsInUse, part_overrides
from tfdp.plan.mesh import MeshLayout
from tfdp.plan.shards import ShardLayout
from tfdp.seams.replace import Override
from tfdp.sharding.updates import ShardUpdates
from tfdp.sharding.variables import LocalShardVariable, ShardedVariable
from tfdp.tracing.keras_steps import is_stock_step, name_of_step
from tfdp.tracing.rows import OwnParts
from tfdp.tracing.step import current_step
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


@dataclasses.dataclass
class StepInParts:
    """The layers that compute in parts in a step; `behind`: see `OpenRegions`."""

    found: Sequence[InParts] = ()
    behind: Mapping[int, Any] = dataclasses.field(default_factory=dict)


class GridUpdates(ShardUpdates):
    """The variables of a strategy with a mesh, which may leave some to `shard=`."""

    def __init__(self, strategy: Any, *others: Any):
        super().__init__(strategy, *others)
        self.layouts = layouts_of(strategy.given["layout"], self.transport.topology)
        self._has_warned = False
        #: Layers with weights that a mesh cuts.
        self._layers: weakref.WeakSet[keras.Layer] = weakref.WeakSet()

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
            makers = makers_of_variable()
            self._layers.update(m for m in makers if isinstance(m, keras.Layer))
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

    def begin(self, call: Any) -> None:
        is_model = isinstance(call.model, keras.Model)
        weights = call.model.weights if is_model else ()
        if weights and not self._has_warned:
            self._has_warned = True
            self.layouts.warn_of_idle_rules(weights[0].path)
        if self.transport.among(self.transport.topology.within_hosts).swap is None:
            return  # it cannot send rows to chosen replicas: layers gather weights
        # Keras names no layer while it makes the weights of one that its first call
        # builds; a step of one's own has only those that are named.
        layers = [*(layers_within(call.model) if is_model else ()), *self._layers]
        found = layers_in_parts(dict.fromkeys(layers), layout_of)
        if call.drops_gradients:
            # A replica without rows drops its gradients of whole weights, which would
            # be those of other replicas' rows: projections compute each alone.
            found = [one for one in found if not one.shares_bias]
        plan = call.step.of(StepInParts)
        plan.found, plan.behind = found, self._rows_behind(call, found)

    def overrides(self, call: Any) -> Iterable[Override]:
        plan = call.step.of(StepInParts)
        for trace in call.step.traces:
            trace.of(OpenRegions).behind = dict(plan.behind)
        return part_overrides(plan.found, plan.behind, self.mover_of)

    def _rows_behind(self, call: Any, found: Sequence[InParts]) -> Mapping[int, Any]:
        """The exchanges that cancel in a step of Keras', by a proof for this trace."""
        if not found or not is_stock_step(call.fn):
            return {}
        training = name_of_step(call.fn) == "train_step"
        may_draw = bool(self._strategy.given["draws_per_replica"])
        try:
            inputs = call.model_inputs()
            return rows_behind(call.model, found, inputs, training, may_draw)
        except Exception:
            # A model that runs in replicas only (tfdp.remat, exchanges of its own), or
            # that takes no plain tensors, is not traced here: nothing is proved.
            return {}

    def mover_of(self, along: str) -> RowMover | None:
        """Moves rows of the calling replica; None: where replicas cannot exchange."""
        found, graph = current_step(), tf.compat.v1.get_default_graph()
        if found is None or tf.distribute.get_replica_context() is None:
            return None
        # A layer in a loop or a function reads the whole weight, outside of it.
        if graph is not self.transport.order.run_graph:
            return None
        step, rank = found
        transport = self.transport.among(self.layouts.mesh.groups([along]))
        return RowMover(transport, step.trace(rank))

    def read(self, variable: ShardedVariable, rank: Any) -> tf.Tensor:
        """The whole variable, or its part along an axis while a layer computes so."""
        trace = self._strategy.extended.current_step.trace(rank)
        in_use = trace.of(PartsInUse)
        along, layout = in_use.along.get(id(variable)), variable.update_layout
        if along is not None:
            in_use.read.add(id(variable))
            layout = variable.layout.block_along(along)
        elif id(variable) not in trace.of(OwnParts).of_group:
            return super().read(variable, rank)
        # No dummy row is among the rows of the group.
        return self.read_from(variable, layout, rank, lambda gradient: gradient)


def layout_of(weight: keras.Variable) -> MeshLayout | None:
    """How a weight rests in parts; None: it is whole, or in flat shards."""
    layout = getattr(weight.value, "layout", None)
    return layout if isinstance(layout, MeshLayout) else None
