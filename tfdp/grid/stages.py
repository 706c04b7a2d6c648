"""Weights of a pipeline rest whole, each at the replica that owns its stage.

Any replica computes a stage on its owner's device, with its own rows. The owner lends
it the weights there, which is no copy, and gets their gradients back there.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdp._private.keras_models import recreate_variable
from tfdp._private.optimizer_hooks import ACCUMULATOR_NAME
from tfdp.exchange.transport import Transport
from tfdp.grid.updates import HOST
from tfdp.lint.registry import register_exchanged
from tfdp.plan.mesh import Mesh
from tfdp.plan.shards import ShardLayout, StageLayout, sharding_in
from tfdp.sharding.optimizers import ShardedUpdates
from tfdp.sharding.updates import ShardUpdates
from tfdp.sharding.variables import LocalShardVariable, ShardedVariable
from tfdp.tracing.keras_steps import is_stock_step
from tfdp.tracing.step import Trace


class StageVariable(ShardedVariable):
    """A weight that one replica of each group stores."""

    stored_by = "tfdp.pipeline"
    cutting_device = HOST


class StageSums(LocalShardVariable):
    """An accumulator of gradients of a `StageVariable`: sums already."""

    cutting_device = HOST


@dataclasses.dataclass
class StageOfReplica:
    """The place where one replica computes, while its step is traced.

    Args:
      at: the member of its group on whose device; None: its own.
      reads: the weights that it was lent for several reads, by their ids.
      gradients: of weights that it was lent, since they were last taken.
      exchanges: how many weights it was lent so far, and gradients given back.
      calls: how often it has called a model in stages.
    """

    at: int | None = None
    reads: Mapping[int, tf.Tensor] = dataclasses.field(default_factory=dict)
    gradients: list[tf.Tensor] = dataclasses.field(default_factory=list)
    exchanges: int = 0
    calls: int = 0

    @contextlib.contextmanager
    def computing(
        self, at: int, reads: Mapping[int, tf.Tensor] | None = None
    ) -> Iterator[None]:
        """The replica computes on the device of the member `at` within the context."""
        before = self.at, self.reads
        self.at, self.reads = at, reads or {}
        try:
            yield
        finally:
            self.at, self.reads = before


class Backward(dict[Any, Sequence[tf.Tensor]]):
    """Gradients that end backward passes of earlier replicas, by stage and rows."""

    #: Whether the step is Keras' own: no replica waits in it for a later one's forward.
    is_of_keras = False

    def note(self, key: Any, gradients: Sequence[tf.Tensor]) -> None:
        """Lets forward passes of later replicas wait for this one."""
        if self.is_of_keras:
            self[key] = gradients


class _Lender:
    """The exchanges of one read of a weight, and of its gradient."""

    def __init__(self, shards: StageUpdates, layout: StageLayout, trace: Trace):
        self._layout, self._state = layout, trace.of(StageOfReplica)
        self._at = self._state.at
        among = shards.transport.among
        self._transport: Transport = among(layout.groups)
        self._copies = among(layout.copies) if len(layout.copies[0]) > 1 else None
        #: Where the replica computes with it.
        self.device = self._transport.devices[trace.rank]
        if self._at is not None:
            self.device = self._transport.devices[
                layout.groups.of(trace.rank)[self._at]
            ]

    def all_gather(self, shards: Sequence[Any], layouts: Any, rank: int) -> Any:
        """The whole weight, where the replica computes."""
        [own], owner = shards, self._layout.owner
        if self._transport.part_of(rank) != owner:
            own = tf.TensorSpec(self._layout.shape, own.dtype)
        self._state.exchanges += 1
        return [register_exchanged(self._transport.lend(own, owner, self._at, rank))]

    def reduce_scatter(
        self, gradients: Sequence[tf.Tensor], layouts: Any, rank: int, label: str
    ) -> Any:
        """The sum over all replicas, at owners; elsewhere nothing of it."""
        [gradient], owner = gradients, self._layout.owner
        gradient = tf.ensure_shape(gradient, self._layout.shape)
        self._state.exchanges += 1
        self._state.gradients.append(gradient)
        total = self._transport.give_back(gradient, owner, self._at, rank)
        if total is None:
            with tf.device(self._transport.devices[rank]):
                return [tf.zeros([0], gradient.dtype)]
        if self._copies is not None:
            self._state.exchanges += 1
            wire = self._copies.wire_dtype
            [total] = self._copies.all_reduce([total], rank, label, wire)
        return [register_exchanged(total)]


class StageUpdates(ShardUpdates):
    """The variables of a strategy with pipelines, which may leave some to `shard=`."""

    def class_of(self, kwargs: dict[str, Any], value: tf.Tensor) -> type | None:
        if isinstance(self._layout_to_make, StageLayout):
            return StageVariable
        if isinstance(kwargs.get("colocate_with"), StageVariable):
            if not (
                value.dtype.is_floating and value.shape == kwargs["colocate_with"].shape
            ):
                return None
            is_sum = ACCUMULATOR_NAME in (kwargs.get("name") or "")
            return StageSums if is_sum else StageVariable
        return super().class_of(kwargs, value) if self.stage else None

    def whole(
        self, shards: Sequence[tf.Tensor], layout: ShardLayout, name: str
    ) -> tf.Tensor:
        if isinstance(layout, StageLayout):
            return tf.convert_to_tensor(shards[layout.members[0][layout.owner]])
        return super().whole(shards, layout, name)

    def begin(self, call: Any) -> None:
        call.step.of(Backward).is_of_keras = is_stock_step(call.fn)

    def read(self, variable: ShardedVariable, rank: Any) -> tf.Tensor:
        if not isinstance(variable.layout, StageLayout):
            return super().read(variable, rank)
        step = self._strategy.extended.current_step
        lent = step.trace(rank).of(StageOfReplica).reads.get(id(variable))
        if lent is not None:
            return lent
        lender = _Lender(self, variable.layout, step.trace(rank))
        own_gradient = functools.partial(step.own_gradient, rank)
        # Not behind what this replica waits for: others need the weight to go first.
        with tf.control_dependencies(None):
            return self.read_from(
                variable, variable.layout, rank, own_gradient, lender, lender.device
            )

    def move(self, weights: Sequence[keras.Variable], mesh: Mesh, owner: int) -> None:
        """Moves weights to a member of each group, one after the other."""
        groups, copies = mesh.groups([mesh.names[1]]), mesh.groups([mesh.names[0]])
        for weight in weights:
            with tf.init_scope(), self._strategy.scope():
                value, shape = weight.numpy(), tuple(weight.shape)
                layout = StageLayout(shape, mesh.sizes[1], owner, groups, copies)
                with self.making(layout):
                    recreate_variable(weight, value)


def stage_updates_of(strategy: tf.distribute.Strategy) -> StageUpdates:
    """The `StageUpdates` of a strategy, which it gets at its first pipeline."""
    extended = strategy.extended
    if not isinstance(extended.shards, StageUpdates):
        given = strategy, extended.worker_devices, extended.reducer
        extended.shards = StageUpdates(*given, sharding_in(strategy.given))
        extended.updates = ShardedUpdates(extended.shards)
    return extended.shards
