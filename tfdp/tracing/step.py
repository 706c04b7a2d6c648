"""Facts about one `strategy.run`, while tfdp traces the replicas.

A `Step` has the frozen `Batch`, one `Trace` per graph that is built, and how the
replicas work together (`Mode`).
"""

from __future__ import annotations

import contextlib
import enum
import functools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import tensorflow as tf

from tfdp._private.names import current_rank
from tfdp.errors import ConfigurationError
from tfdp.lint.findings import Findings
from tfdp.lint.registry import is_of_graph, key_of
from tfdp.lint.values import PART_OF_ROWS, ROW_SOURCE, Term
from tfdp.plan.topology import Groups
from tfdp.seams.replace import instance_attributes
from tfdp.tracing.loss_shares import LossShares
from tfdp.tracing.rows import (
    Batch,
    DummyRows,
    OwnParts,
    Rows,
    RowsInSight,
    parts_of_batch,
)

if TYPE_CHECKING:
    from tfdp.lint.analysis import Analysis

State = TypeVar("State")


class Mode(enum.Enum):
    """How the replicas of a step work together.

    PLAIN: all replicas sum their gradients. LOCAL: groups of replicas read and update
    weights of their own (`tfdp.sync`). PADDED: all replicas sum their gradients, and a
    short batch is padded to a fixed size.
    """

    PLAIN = "plain"
    LOCAL = "local"
    PADDED = "padded"


class Trace:
    """Notes of what one replica does while its graph is built; on TPU, where one graph
    serves all replicas, of what each of them does."""

    def __init__(self, step: Step, rank: int) -> None:
        self._step, self.rank = step, rank
        #: The tensors of the replica's batch.
        self.batch: list[tf.Tensor] = []
        #: Which of its rows are real.
        self.rows = Rows()
        #: The active optimizers, outermost first: whether they still reduce.
        self.updates: list[bool] = []
        #: Whether an optimizer updates this replica's shard.
        self.updates_shard = self.updates_alone = False
        self._states: dict[type, Any] = {}

    def of(self, kind: type[State]) -> State:
        """The state of a feature on this replica; see `Step.of`."""
        return _state_of(kind, self._states)

    @functools.cached_property
    def analysis(self) -> Analysis:
        """The values of the tensors of this graph."""
        from tfdp.lint.analysis import Analysis  # long rules, needed where it is asked

        batch, step = self.batch, self._step
        if step.replicas == 1:
            # Its rows are plain tensors among other arguments.
            batch = [b for b in batch if b.shape[:1] == batch[0].shape[:1]]
        sources = {key_of(part): ROW_SOURCE for part in batch if part.shape.rank != 0}
        sources |= {key_of(part): PART_OF_ROWS for part in step.batch.sparse_parts}
        rows = batch[0].shape[0] if batch and batch[0].shape.rank else None
        return Analysis(sources, rows, step.replicas)

    @property
    def sees_all_rows(self) -> bool:
        """Whether it computes on the rows of all replicas now, as one device does."""
        return self.of(RowsInSight).are_of_all

    @property
    def counts(self) -> Any:
        """Whether what metrics count now is counted: a boolean, or a tensor."""
        own = self.of(RowsInSight)
        return own.are_counted if own.are_of_all else self.rows.present

    @property
    def place_of_all(self) -> int:
        """The rank of the replica, whose thread calls, among those of all hosts; for
        what sees the rows of all."""
        context = tf.distribute.get_replica_context()
        place = tf.get_static_value(context.replica_id_in_sync_group)
        if place is None:
            raise ConfigurationError(
                "tfdp.layers.AllRows and tfdp.losses.on_all_rows cannot act where one "
                "program serves all replicas, as on TPUs. Gather the rows by "
                "tfdp.losses.all_rows(x) and take tfdp.losses.own_rows(values, x)."
            )
        return int(place)

    def may_have_rows(self, tensor: Any) -> bool:
        """Whether `tensor` may have a row for each of the replica's; else it is the
        same on all replicas, such as a weight. A constant as long as the batch has
        rows, too, such as targets of ones."""
        if not is_of_graph(tensor) or not isinstance(current_rank(), int):
            return True
        reducer = tf.distribute.get_strategy().extended.reducer
        if tensor.graph is not reducer.transport.order.run_graph:
            return True  # what enters a function is not known there
        value = self.analysis.value(tensor)
        if value.local or value.of_share or Term.UNKNOWN in value.terms:
            return True
        count, shape = self._step.count_of(self.rank), tensor.shape
        if not isinstance(count, int) or not shape.rank or shape[0] != count:
            return False
        return count != 1 and value.terms <= {Term.CONSTANT}

    def refuse_own(self, number: Any, what: str, *, counts: bool = True) -> None:
        """Refuses a number of all rows that depends on the replica's own rows as well,
        or, with `counts`, on what metrics have counted."""
        if not is_of_graph(number):
            return
        # A loss that the number of own rows scales is warned of, as any other.
        value = self.analysis.value(number)
        if value.is_of_replica:
            raise ConfigurationError(
                f"{what} depends on rows that it cannot get of all replicas: it reads "
                "those of one replica from elsewhere than its arguments, such as an "
                "attribute that call() has set, or self.losses. Return such tensors "
                "from call(), as outputs with a row for each row of the batch; leave "
                "what layers give add_loss to super().compute_loss."
            )
        if counts and "metric" in value.local:
            raise ConfigurationError(
                f"{what} depends on the state of a metric, which one replica counts "
                "for all. Keep such a number in a weight, "
                "add_weight(trainable=False), and assign it there."
            )

    @contextlib.contextmanager
    def seeing_all_rows(self) -> Iterator[None]:
        """Makes the replica, whose thread calls, compute as one device does within the
        context, in which it has the rows of all replicas.

        All replicas compute the same there. So nothing is scaled to a share or
        exchanged, seeds draw what one device draws, and metrics count on the first
        replica only.
        """
        own, context = self.of(RowsInSight), tf.distribute.get_replica_context()
        before, is_first = (own.are_of_all, own.are_counted), self.place_of_all == 0
        own.are_of_all, own.are_counted = True, is_first
        # What a program exchanges by itself is of all rows already.
        alone = {"all_reduce": _sum_of_one, "all_gather": _rows_of_one}
        try:
            with instance_attributes(context, alone):
                yield
        finally:
            own.are_of_all, own.are_counted = before

    @functools.cached_property
    def shares(self) -> LossShares:
        """Which numbers are shares of the global loss."""
        return LossShares(lambda tensor: self.analysis.value(tensor))


@dataclass
class Step:
    """State of one call of `strategy.run`, shared by the threads of its replicas.

    Args:
      replicas: number of replicas, on all hosts once these have been counted.
      traces: one for each replica of this process.
    """

    replicas: int
    batch: Batch = field(default_factory=Batch)
    traces: Sequence[Trace] = field(init=False)
    mode: Mode = Mode.PLAIN
    #: Local training: the replicas of this process that step together, by group.
    groups: Groups | None = None
    #: Whether there is one replica on one host: its values are the global ones.
    is_of_one: bool = False
    #: What tfdp adds to it, in order (`tfdp.step.features`).
    features: Sequence[Any] = ()
    #: The stages that callbacks have attached to the steps of the model.
    stages: list[Any] = field(default_factory=list)
    #: Whether an optimizer has been active on a replica.
    has_updated: bool = False
    #: Why a loss may be that of the local batch only, for a warning.
    suspicions: Findings = field(default_factory=Findings)
    #: Why stored state may not be a mean over rows.
    state_suspicions: Findings = field(default_factory=Findings)
    _states: dict[type, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.traces = tuple(Trace(self, rank) for rank in range(self.replicas))

    def of(self, kind: type[State]) -> State:
        """The state of a feature in this step, made when it is first asked for; `kind`
        is its class, which stands in a file of the feature."""
        return _state_of(kind, self._states)

    @property
    def guard(self) -> Any:
        """Skips steps that are not finite (`tfdp.chain.finite_guard`), or None."""
        return next((stage for stage in self.stages if stage.is_guard), None)

    def trace(self, rank: Any) -> Trace:
        """The trace of `rank`; on TPU, where ranks are tensors, the only one."""
        return self.traces[rank if isinstance(rank, int) else 0]

    def note_batch(self, arguments: Any) -> None:
        """Stores the tensors of each replica's batch, of nested per-replica values."""
        batch, _ = parts_of_batch(arguments, len(self.traces))
        for trace in self.traces:
            # The inner values of ragged and sparse tensors have other rows.
            own = [parts[trace.rank] for parts in batch]
            trace.batch = [part for part in own if isinstance(part, tf.Tensor)]

    @property
    def here(self) -> Trace:
        """The trace of the calling replica."""
        return self.trace(current_rank())

    def analysis(self, rank: Any) -> Analysis:
        """The analysis of the graph in which `rank` is traced."""
        return self.trace(rank).analysis

    @property
    def is_local(self) -> bool:
        """Whether this is local training: steps read and update local weights."""
        return self.mode is Mode.LOCAL

    def train_in(self, groups: Groups) -> None:
        """Makes this local training, in which the replicas of a group step together."""
        self.mode, self.groups = Mode.LOCAL, groups

    def group_of(self, rank: int) -> tuple[int, ...]:
        if self.groups is None:
            return tuple(range(self.replicas))
        return self.groups.of(rank)

    @property
    def is_even(self) -> bool:
        """Whether every replica certainly has the same number of samples."""
        counts = self.batch.counts
        if self.mode is Mode.PADDED:
            return False
        if counts is None:
            return True
        # The shapes of other hosts are not available here.
        is_static = all(isinstance(n, int) for n in counts)
        return not self.batch.spans_hosts and is_static and len(set(counts)) == 1

    def count_of(self, rank: Any) -> Any:
        """n_r: the samples of `rank`; 1 for each when no batch was passed in."""
        rows, counts = self.trace(rank).rows, self.batch.counts
        if rows.is_padded:
            return rows.count
        if counts is None:
            return 1
        if isinstance(rank, int):
            return counts[rank]
        return tf.gather(tf.stack(counts), rank)

    def total_of(self, rank: Any) -> Any:
        """n: the samples of all replicas; None when no batch was passed in."""
        rows = self.trace(rank).rows
        return rows.total if rows.is_padded else self.batch.total

    def share_of(self, rank: Any, dtype: tf.DType = tf.float32) -> tf.Tensor:
        """n_r / n, over all replicas, a scalar; see `share_together`."""
        if self.is_even:
            return tf.constant(1.0 / self.replicas, dtype)
        return tf.math.divide_no_nan(
            tf.cast(self.count_of(rank), dtype), tf.cast(self.total_of(rank), dtype)
        )

    def share_together(self, rank: Any) -> tf.Tensor:
        """The replica's fraction of the samples of those that step together: n_r / n;
        in local training, where each group steps alone, n_r / n_g."""
        if self.groups is None:
            return self.share_of(rank)
        if self.is_even:
            return tf.constant(1.0 / self.group_size)
        return tf.math.divide_no_nan(
            tf.cast(self.count_of(rank), tf.float32), self.total_together(rank)
        )

    def share_of_group(self, rank: Any) -> tf.Tensor:
        """n_g / n: the group's fraction of this process's samples."""
        if self.groups is None:
            return tf.constant(1.0)
        return tf.add_n([self.share_of(peer) for peer in self.group_of(rank)])

    def total_together(self, rank: Any) -> tf.Tensor:
        """The samples of those that step together, n or n_g, a float32 scalar."""
        if self.groups is None:
            return tf.cast(self.total_of(rank), tf.float32)
        counts = [self.count_of(peer) for peer in self.group_of(rank)]
        return tf.add_n([tf.cast(count, tf.float32) for count in counts])

    @property
    def group_size(self) -> int:
        """How many replicas step together."""
        return self.replicas if self.groups is None else len(self.groups[0])

    @property
    def has_dummy_rows(self) -> bool:
        """Whether a replica of this process may compute on a dummy row."""
        return any(trace.rows.present is not True for trace in self.traces)

    def own_part(self, rank: Any, value: Any) -> Any:
        """`value`, or 0 (or no slices) where it was computed from a dummy row."""
        return self.trace(rank).rows.part(value)

    def is_own_gradient(self, rank: Any, gradient: Any) -> bool:
        """Whether dummy rows certainly contribute nothing to it; the usual case."""
        trace = self.trace(rank)
        if isinstance(gradient, tf.IndexedSlices) or trace.rows.may_be_synthetic:
            return False
        return self.of(DummyRows).loss_is_own and not trace.of(OwnParts).are_mixed

    def own_gradient(self, rank: Any, gradient: Any) -> Any:
        """`gradient` without the contribution of dummy rows."""
        if self.is_own_gradient(rank, gradient):
            return gradient
        return self.trace(rank).rows.part_of_gradient(gradient)

    def parts_to_sum(self, rank: Any, values: Any) -> Any:
        """`values` without dummy rows, for a sum over replicas in a layer or loss."""
        trace = self.trace(rank)
        own = trace.of(OwnParts)
        if not self.has_dummy_rows or own.are_summed:
            return values
        own.are_mixed = True
        return tf.nest.map_structure(trace.rows.part, values, expand_composites=False)

    @contextlib.contextmanager
    def summing_own_parts(self, rank: Any) -> Iterator[None]:
        """Marks values that `rank` sums within the context as free of dummy rows."""
        own = self.trace(rank).of(OwnParts)
        before, own.are_summed = own.are_summed, True
        try:
            yield
        finally:
            own.are_summed = before

    @property
    def is_updating(self) -> bool:
        """Whether an optimizer is active on the calling replica."""
        return bool(self.here.updates)

    @property
    def updates_replicated(self) -> bool:
        """Whether the active optimizer makes the same update on all replicas."""
        is_own = self.is_local or self.here.updates_shard
        return self.is_updating and not is_own

    @property
    def reduces_in_update(self) -> bool:
        """Whether the active optimizer got gradients that are not reduced yet."""
        return any(self.here.updates)

    @contextlib.contextmanager
    def updating(self, *, reduces: bool = False) -> Iterator[None]:
        """Marks an optimizer's update: assignments within the context are not local
        state. `reduces`: it still has to reduce its gradients."""
        self.has_updated, updates = True, self.here.updates
        updates.append(reduces)
        try:
            yield
        finally:
            updates.pop()

    @contextlib.contextmanager
    def updating_shard(self, *, alone: bool = False) -> Iterator[None]:
        """`alone`: no other replica makes this update."""
        trace = self.here
        trace.updates_shard, trace.updates_alone = True, alone
        try:
            yield
        finally:
            trace.updates_shard = trace.updates_alone = False

    def refuse_if_alone(self, name: str) -> None:
        """Refuses state of an optimizer that one replica would change by itself."""
        if self.here.updates_alone:
            raise ConfigurationError(
                f"An optimizer updates whole weights, each on one replica, and changes "
                f"{name!r}, of which every replica has a copy. Keep state in a list "
                "with a variable for each weight (add_variable_from_reference), or use "
                "shard='none'."
            )


def _sum_of_one(reduce_op: Any, value: Any, options: Any = None) -> Any:
    return value


def _rows_of_one(value: Any, axis: int, options: Any = None) -> Any:
    return value


def _state_of(kind: type[State], states: dict[type, Any]) -> State:
    if kind not in states:
        states[kind] = kind()
    return states[kind]  # type: ignore[no-any-return]


def current_step() -> tuple[Step, int] | None:
    """The step and this replica's rank; None outside a tfdp strategy's replicas."""
    if tf.distribute.in_cross_replica_context():
        return None
    step = getattr(tf.distribute.get_strategy().extended, "current_step", None)
    return None if step is None else (step, current_rank())


def call_before_step(function: Callable[[], None]) -> None:
    """Calls `function` once, eagerly, in the strategy's scope, outside of replicas. In
    a thread: `tf.init_scope` does not leave the replica, and `merge_call` needs all."""
    strategy = tf.distribute.get_strategy()

    def in_scope() -> None:
        with strategy.scope():
            function()

    with ThreadPoolExecutor(1) as outside:
        outside.submit(in_scope).result()
