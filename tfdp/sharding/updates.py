"""Creates sharded variables; reads and updates them in a replica."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdp._private import names
from tfdp._private.keras_calls import (
    is_made_for_autocast,
    makers_of_variable,
    variable_of_caller,
)
from tfdp._private.keras_layers import autocast_dtype
from tfdp._private.optimizer_hooks import ACCUMULATOR_NAME
from tfdp.errors import ConfigurationError
from tfdp.exchange.ordering import exchanges_of
from tfdp.exchange.reducer import Reducer
from tfdp.exchange.shards import ShardReducer, copied_shard, elements_of, shard_of
from tfdp.lint.registry import key_of, register
from tfdp.lint.values import Term, Value
from tfdp.plan.shards import OwnedLayout, RowLayout, Sharding, ShardLayout
from tfdp.seams.replace import Override
from tfdp.sharding.owners import place_when_built
from tfdp.sharding.variables import (
    LocalShardVariable,
    ShardedVariable,
    ShardUpdatedVariable,
    check_whole_gradient,
    shard_update,
    without_gradient,
)
from tfdp.tracing.gradient_exchanges import name_of_gradient
from tfdp.variables.in_shards import InShards, distributed_of

# Arguments for creating a whole variable that do not apply to its shards.
NOT_OF_A_SHARD = frozenset(
    ("aggregation", "colocate_with", "initial_value", "shape", "synchronization")
)


@dataclasses.dataclass
class ShardTrace:
    """The shards that one replica reads and updates while its step is traced.

    Args:
      gradients: those of sharded variables, by their keys (`key_of`).
      views: by the id of a variable: the shard of it that an optimizer updates.
    """

    gradients: dict[Any, tf.Tensor] = dataclasses.field(default_factory=dict)
    views: dict[int, Any] = dataclasses.field(default_factory=dict)


class ShardUpdates:
    """Creates, reads and updates the sharded variables of one strategy."""

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        devices: Sequence[str],
        reducer: Reducer,
        sharding: Sharding,
    ):
        self.stage = sharding.stage
        self.transport, self.reducer = reducer.transport, ShardReducer(reducer)
        self._strategy = strategy
        self._devices = devices
        self._min_bytes = sharding.min_bytes
        self._is_offloading = sharding.offloads
        self._updates_on_host = sharding.offloads
        #: What the replica of each part has to update of whole matrices.
        self.loads = [0] * self.transport.parts
        #: Layers whose tables rest by rows, as far as Keras named them.
        self.makers: weakref.WeakSet[Any] = weakref.WeakSet()
        # The layout of state that is created anew.
        self._layout_to_make: ShardLayout | None = None

    def class_of(self, kwargs: dict[str, Any], value: tf.Tensor) -> type | None:
        """The class of a variable about to be created; None: it is not sharded."""
        if self._layout_to_make is not None:
            return ShardedVariable
        reference = kwargs.get("colocate_with")
        if isinstance(reference, InShards):
            if not (value.dtype.is_floating and value.shape == reference.shape):
                return None
            if ACCUMULATOR_NAME not in (kwargs.get("name") or ""):
                return ShardedVariable
            return LocalShardVariable if self.stage > 1 else None
        is_weight = reference is None and kwargs.get("trainable") is not False
        on_read = tf.VariableSynchronization.ON_READ
        read_as_sum = kwargs.get("synchronization") == on_read
        if not is_weight or read_as_sum or not value.dtype.is_floating:
            return None
        elements = value.shape.num_elements()
        # Keras marks scalars that an optimizer keeps for itself as weights.
        is_small = not elements or elements * value.dtype.size < self._min_bytes
        if value.shape.rank == 0 or is_small:
            return None
        return ShardedVariable if self.stage == 3 else ShardUpdatedVariable

    def note_optimizer(self, optimizer: keras.optimizers.Optimizer) -> None:
        """Notes an optimizer that is made under the strategy."""
        place_when_built(optimizer)

    def begin(self, call: Any) -> None:
        """Looks at a step before its replicas are traced."""

    def overrides(self, call: Any) -> Iterable[Override]:
        """The methods of layers that are replaced while replicas are traced."""
        return ()

    def layout_of_new(self, kwargs: dict[str, Any], value: Any) -> ShardLayout:
        """The layout of a variable about to be created."""
        reference = kwargs.get("colocate_with")
        layout = getattr(reference, "update_layout", None)
        if layout is None and self._is_table(value):
            self.makers.update(m for m in makers_of_variable()[-1:] if m is not None)
            return RowLayout(tuple(value.shape.as_list()), self.transport.parts)
        return layout or self.layout_of(value)

    def _is_table(self, value: Any) -> bool:
        """Whether the weight about to be created is a table that rests by rows."""
        # Keras names no layer while it makes the weights of one that a call builds.
        name = getattr(variable_of_caller(), "name", None)
        is_table = name == "embeddings" and value.shape.rank == 2 and self.stage == 3
        sends_rows = self.transport.to_each is not None  # else layers gather it
        return is_table and sends_rows and value.shape[0] >= self.transport.parts

    def layout_of(self, value: Any) -> ShardLayout:
        return ShardLayout(tuple(value.shape.as_list()), self.transport.parts)

    def part_of(self, rank: int, layout: ShardLayout) -> int:
        """The shard that a replica of this process holds."""
        return self.reducer.of(layout).part_of(rank)

    def own_shape(self, variable: Any, rank: int) -> tuple[int, ...]:
        """The shape of the gradient's shard that a replica of this process gets."""
        layout = distributed_of(variable).update_layout
        return layout.shard_shape(self.part_of(rank, layout))

    def counts(self, variable: Any, rank: int) -> bool:
        """Whether a sum over all parts takes a replica's: of copies the first's."""
        copies = distributed_of(variable).layout.copies
        first_rank = self._strategy.extended.first_rank
        return copies is None or copies.place_of(first_rank + rank) == 0

    def whole(
        self, shards: Sequence[tf.Tensor], layout: ShardLayout, name: str
    ) -> tf.Tensor:
        """A whole variable, from all shards; every host must call it."""
        label = f"the whole of {name!r}, of which every host reads and holds a part"
        return self.reducer.of(layout).join(shards, layout, label)

    def own_range(self, variable: Any) -> tf.Tensor:
        """The elements that this process's replicas hold, or update: flat."""
        ranks, layout = range(len(self._devices)), variable.layout
        parts = [self.part_of(rank, layout) for rank in ranks]
        if isinstance(variable, ShardUpdatedVariable):
            start, _ = layout.bounds(parts[0])
            _, stop = layout.bounds(parts[-1])
            return tf.reshape(variable.values[0].read_value(), [-1])[start:stop]
        shards = [tf.convert_to_tensor(variable.shard(rank)) for rank in ranks]
        if layout.groups is not None:  # a host holds all parts of each
            return tf.reshape(self.whole(shards, layout, variable.name), [-1])
        pieces = [
            elements_of(shard, layout, part)
            for shard, part in zip(shards, parts, strict=True)
        ]
        return tf.concat(pieces, axis=0)

    def make(
        self,
        variable_class: type[ShardedVariable],
        next_creator: Callable[..., tf.Variable],
        kwargs: dict[str, Any],
        value: tf.Tensor,
    ) -> ShardedVariable:
        """A sharded variable that starts as `value`, one shard on each device."""
        reference = kwargs.get("colocate_with")
        layout = self._layout_to_make
        if layout is None:
            layout = self.layout_of_new(kwargs, value)
        common = {k: v for k, v in kwargs.items() if k not in NOT_OF_A_SHARD}
        shards: list[tf.Variable] = []
        is_state = reference is not None or self._layout_to_make is not None
        is_gradient = issubclass(variable_class, LocalShardVariable)
        is_offloaded = self._is_offloading and is_state and not is_gradient
        for rank, device in enumerate(self._devices):
            part = self.part_of(rank, layout)
            if is_offloaded:
                device = host_of(device)
            if rank:
                first = shards[0].name.split(":")[0]
                # The slash makes the name absolute, outside all name scopes.
                common["name"] = f"{first}/replica_{rank}/"
            with names.stop_recording():
                with tf.device(variable_class.cutting_device or device):
                    own = copied_shard(value, layout, part)
                with tf.device(device):
                    shards.append(next_creator(**common, initial_value=own))
        none = tf.VariableAggregation.NONE
        variable = variable_class(self._strategy, shards, none, layout)
        variable.autocasts = is_made_for_autocast()
        return variable

    @contextlib.contextmanager
    def making(self, layout: ShardLayout) -> Iterator[None]:
        """Makes a variable created within the context optimizer state, by `layout`."""
        self._layout_to_make = layout
        try:
            yield
        finally:
            self._layout_to_make = None

    def read(self, variable: ShardedVariable, rank: Any) -> tf.Tensor:
        """The whole variable, in a replica; its gradient is the replica's shard."""
        own_gradient = self._strategy.extended.current_step.own_gradient
        layout = variable.update_layout
        return self.read_from(
            variable, layout, rank, functools.partial(own_gradient, rank)
        )

    def read_from(
        self,
        variable: ShardedVariable,
        layout: ShardLayout,
        rank: Any,
        own_gradient: Callable[[tf.Tensor], tf.Tensor],
        reducer: Any = None,
        device: str = "",
    ) -> tf.Tensor:
        """The tensor of which the replica's shard is a part by `layout`.

        `own_gradient`: leaves out of its gradient what comes from dummy rows. By
        default the whole is on the shard's `device`, and `reducer` that of the layout.
        """
        own, reducer = variable.shard(rank), reducer or self.reducer.of(layout)
        # Cast before the gather what the layer would cast after it: half the bytes, the
        # same numbers. Gradients are summed in the variable's own type.
        dtype = autocast_dtype() if variable.autocasts else None
        if dtype is None or dtype.size > variable.dtype.size:
            dtype = variable.dtype
        stored = variable.layout if layout == variable.update_layout else layout

        # The order in which gradients are computed may differ between replicas, and
        # with the static shapes of a host, so the number of the read matches them.
        name = name_of_gradient()
        label = f"of the gradient of read {name.rstrip('.')}"

        @tf.custom_gradient
        def gather(shard: tf.Tensor) -> tuple[tf.Tensor, Callable]:
            shards = [tf.cast(shard, dtype)]
            [whole] = reducer.all_gather(shards, [stored], rank)
            return tf.cast(whole, dtype), scatter

        def scatter(upstream: Any) -> tf.Tensor:
            upstream = tf.cast(tf.convert_to_tensor(upstream), variable.dtype)
            check_whole_gradient(variable, upstream, layout)
            upstream = own_gradient(upstream)
            with exchanges_of(name):
                [own] = reducer.reduce_scatter([upstream], [layout], rank, label=label)
            own = without_gradient(own)
            step = self._strategy.extended.current_step
            step.trace(rank).of(ShardTrace).gradients[key_of(own)] = own
            register(own, Value(terms=frozenset({Term.SHARD})))
            return own

        with self._outside_loops(), tf.device(device or own.device):
            return gather(variable.read_shard(rank))

    def _outside_loops(self) -> contextlib.AbstractContextManager:
        """The replica function's graph, while a loop or branch in it is built.

        Replicas cannot exchange inside a loop, and need not: the weights of a recurrent
        layer do not change between iterations. In a conditional of a layer each replica
        may take another branch. Conditionals around an update take the same branch on
        all replicas, and what they read is newer than what was read before them.
        """
        run_graph = self.transport.order.run_graph
        if run_graph is None:
            return contextlib.nullcontext()
        inner = names.graphs_inside(run_graph)
        is_updating = self._strategy.extended.current_step.is_updating
        if any(map(names.is_loop_graph, inner)) or (
            any(map(names.is_branch_graph, inner)) and not is_updating
        ):
            return run_graph.as_default()
        return contextlib.nullcontext()

    def scatter(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """This replica's shards of the summed `gradients`, in replica context."""
        rank = names.current_rank()
        layouts = [distributed_of(variable).update_layout for variable in variables]
        return self.reducer.reduce_scatter(
            gradients, layouts, rank, in_turn=self.stage >= 2
        )

    def update(
        self, variable: names.DistributedVariable, fn: Callable, args: Any, kwargs: Any
    ) -> Any:
        """Calls `fn` in a replica on its shard of `variable`."""
        rank = names.current_rank()
        self.transport.order.note_branches(rank)
        target = self._target(variable, rank)
        if isinstance(target, ShardView) and isinstance(target.layout, OwnedLayout):
            target.is_assigned = True  # by its owner, and all replicas take part
        if not self._holds_part(target, variable, rank):
            return None
        device = self._device_of_update(variable, target.device)
        with tf.device(device), shard_update(rank):
            return fn(target, *args, **(kwargs or {}))

    def _holds_part(self, target: Any, variable: Any, rank: Any) -> bool:
        """Whether a replica updates any of `variable`: all do but for an owner's."""
        layout = getattr(target, "layout", variable.layout)
        if not isinstance(layout, OwnedLayout):
            return True
        return layout.owner == self.part_of(rank, layout)

    @contextlib.contextmanager
    def updating_on_devices(self) -> Iterator[None]:
        """Keeps updates that touch no state on the devices within the context."""
        self._updates_on_host = False
        try:
            yield
        finally:
            self._updates_on_host = self._is_offloading

    def _device_of_update(self, variable: Any, device: str) -> str:
        """The device that computes an update: the one that holds the state."""
        is_gradient = isinstance(variable, LocalShardVariable)
        return host_of(device) if self._updates_on_host and not is_gradient else device

    def _target(self, variable: names.DistributedVariable, rank: Any) -> Any:
        graph = tf.compat.v1.get_default_graph()
        views = self._strategy.extended.current_step.trace(rank).of(ShardTrace).views
        view = views.get(id(variable))
        if isinstance(variable, ShardedVariable):
            return variable.shard(rank) if view is None else view
        if view is None or (view.graph is not graph and not view.is_assigned):
            part = self.part_of(rank, variable.update_layout)
            view = ShardView(variable, part, names.own_copy(variable, rank))
            views[id(variable)] = view
        return view

    def bring_to_owners(self, variables: Sequence[Any]) -> None:
        """Brings weights that are stored in shards to their owners, for an update.

        `gather_updated` takes them back.
        """
        rank = names.current_rank()
        owned = [
            variable
            for variable in map(distributed_of, variables)
            if isinstance(variable, ShardedVariable) and variable.owner is not None
        ]
        wholes = self.reducer.reshard(
            [variable.read_shard(rank) for variable in owned],
            [variable.layout for variable in owned],
            [variable.update_layout for variable in owned],
            rank,
        )
        views = self._strategy.extended.current_step.trace(rank).of(ShardTrace).views
        for variable, whole in zip(owned, wholes, strict=True):
            stored = variable.shard(rank)
            part = self.part_of(rank, variable.update_layout)
            views[id(variable)] = ShardView(variable, part, stored, value=whole)

    def gather_updated(self) -> None:
        """Copies the shards that the replicas assigned into all copies."""
        rank = names.current_rank()
        own = self._strategy.extended.current_step.trace(rank).of(ShardTrace)
        views = [view for view in own.views.values() if view.is_assigned]
        own.views = {}
        stored = [v for v in views if isinstance(v.variable, ShardedVariable)]
        copied = [v for v in views if not isinstance(v.variable, ShardedVariable)]
        if copied:
            wholes = self.reducer.all_gather(
                [view.value() for view in copied],
                [view.layout for view in copied],
                rank,
            )
            for view, whole in zip(copied, wholes, strict=True):
                self._strategy.extended.update_own_copy(view.variable, _assign, whole)
        if stored:
            shards = self.reducer.reshard(
                [view.value() for view in stored],
                [view.layout for view in stored],
                [view.variable.layout for view in stored],
                rank,
            )
            for view, shard in zip(stored, shards, strict=True):
                with tf.device(view.device):
                    _assign(view.copy, shard)

    def update_across(
        self, variable: names.DistributedVariable, fn: Callable, args: Any, kwargs: Any
    ) -> None:
        """Updates like `update`, for all replicas at once, in cross-replica context."""
        targets = []
        for rank in range(len(self._devices)):
            if isinstance(variable, ShardedVariable):
                target = variable.shard(rank)
            else:
                part = self.part_of(rank, variable.update_layout)
                copy = variable.values[rank]
                target = ShardView(variable, part, copy)
            targets.append(target)
            if not self._holds_part(target, variable, rank):
                continue
            device = self._device_of_update(variable, target.device)
            with tf.device(device), names.UpdateContext(rank), shard_update(rank):
                own_args, own_kwargs = names.select_replica(rank, (args, kwargs or {}))
                _check_no_whole_variables(variable, own_args)
                fn(target, *own_args, **own_kwargs)
        if isinstance(variable, ShardUpdatedVariable):
            updated = [target.value() for target in targets]
            whole = self.whole(updated, variable.layout, variable.name)
            for target in targets:
                with tf.device(target.device):
                    target.copy.assign(whole)


def _check_no_whole_variables(variable: Any, arguments: Any) -> None:
    """Refuses gradients of whole variables, from an optimizer without overrides."""
    layout = variable.layout
    whole, shard = tf.TensorShape(layout.shape), tf.TensorShape(layout.shard_shape(0))
    has_owner = isinstance(layout, OwnedLayout)
    for value in tf.nest.flatten(arguments):
        # Variables are skipped: sharded ones read as a shard within an update.
        is_value = isinstance(value, (tf.Tensor, tf.IndexedSlices))
        is_whole = is_value and value.shape.rank and whole == value.shape
        if is_whole and (has_owner or whole != shard):
            raise ConfigurationError(
                f"Variable {variable.name!r} is updated by shards, but its optimizer "
                "was called outside of the strategy's replicas with the whole "
                "gradient. Take the step in a function that strategy.run runs, with "
                "the optimizer in tfdp.DistributedOptimizer; or leave out shard=."
            )


def host_of(device: str) -> str:
    """The CPU of the process that drives `device`."""
    spec = tf.DeviceSpec.from_string(device)
    return spec.replace(device_type="CPU", device_index=0).to_string()


def _assign(own: Any, value: tf.Tensor) -> None:
    own.assign(value, read_value=False)


class ShardView:
    """Shard `part` of one replica's copy of a mirrored weight, while it is updated.

    Acts as a variable for an optimizer. An assigned value stays here, as a tensor on
    the replica's device, until the shards of all replicas are gathered into the copies.
    With `value`, the shard to update of a weight that is stored in other shards: `copy`
    is then the stored one.
    """

    def __init__(self, variable: Any, part: Any, copy_: Any, value: Any = None):
        self.variable = variable
        self.copy = copy_
        self.layout = variable.update_layout
        self.graph = tf.compat.v1.get_default_graph()
        self.is_assigned = False
        with tf.device(copy_.device):
            if value is None:
                value = shard_of(copy_.read_value(), self.layout, part)
            self._value = value

    def _distributed_container(self) -> Any:
        # Keras uses this to find the optimizer slots of the variable.
        return self.variable

    @property
    def dtype(self) -> tf.DType:
        return self._value.dtype

    @property
    def shape(self) -> tf.TensorShape:
        return self._value.shape

    @property
    def device(self) -> str:
        return self.copy.device

    @property
    def name(self) -> str:
        return self.variable.name

    def value(self) -> tf.Tensor:
        return self._value

    read_value = value

    def __tf_tensor__(self, dtype: Any = None, name: Any = None) -> tf.Tensor:
        return tf.convert_to_tensor(self._value, dtype=dtype, name=name)

    def assign(self, value: Any, **kwargs: Any) -> ShardView:
        if tf.compat.v1.get_default_graph() is not self.graph:
            raise ConfigurationError(
                f"An optimizer updates {self.name!r} inside a conditional of its own, "
                "which does not work with shard=...: use shard='none', or an optimizer "
                "of Keras or tfdp."
            )
        with tf.device(self.device):
            value = tf.cast(value, self.dtype)
            if self.shape.rank == 1:
                value = tf.reshape(value, [-1])
            self._value = tf.ensure_shape(value, self.shape)
        self.is_assigned = True
        return self

    def assign_add(self, value: Any, **kwargs: Any) -> ShardView:
        with tf.device(self.device):
            return self.assign(self._value + tf.cast(value, self.dtype))

    def assign_sub(self, value: Any, **kwargs: Any) -> ShardView:
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
