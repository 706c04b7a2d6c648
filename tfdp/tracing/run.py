"""State of one `strategy.run` while its replicas are traced."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from tfdp._private.names import current_rank, in_compiled_function
from tfdp.exchange.engine import current_exchange_name
from tfdp.lint.analysis import Analysis
from tfdp.lint.findings import Findings
from tfdp.lint.registry import is_of_graph, key_of
from tfdp.lint.values import PART_OF_ROWS, ROW_SOURCE, Value
from tfdp.tracing.loss_shares import LossShares
from tfdp.tracing.padded_batch import Padding
from tfdp.tracing.trace_order import EagerOrder


@dataclass
class ReplicaRun:
    """State of one call of `strategy.run`, shared by the threads of its replicas.

    Fields "by trace" have one entry per graph that is built; see `trace_of`.

    Args:
      replicas: number of replicas in this process.
      counts: the samples of each replica: Python integers where shapes are static, else
        scalar int32 tensors; None when no batch was passed in.
      total: their sum over all hosts.
      spans_hosts: whether other hosts have replicas of this run.
      hosts_are_equal: whether every host certainly has the same number of rows.
    """

    replicas: int
    counts: list[Any] | None = None
    total: Any = None
    spans_hosts: bool = False
    hosts_are_equal: bool = False
    #: Whether there is one replica on one host: its values are the global ones.
    is_of_one: bool = False
    #: Traces whose loss was scaled to its share of the global one.
    scaled_losses: set[int] = field(default_factory=set)
    #: By trace: the values of its tensors.
    analyses: dict[int, Analysis] = field(default_factory=dict)
    #: The values of gradients that optimizers got, with the names of these.
    applied: dict[Value, str] = field(default_factory=dict)
    #: Whether the program reads the number of replicas in a replica, to scale by it.
    scales_by_hand: bool = False
    #: By trace: which numbers are shares of the global loss.
    shares: dict[int, LossShares] = field(default_factory=dict)
    #: Traces that added losses of layers (penalties, `add_loss`) to the model's.
    added_losses: set[int] = field(default_factory=set)
    #: The tensors that ragged and sparse parts of the batch consist of.
    sparse_parts: list[tf.Tensor] = field(default_factory=list)
    #: Whether the replicas were given any tensor.
    has_tensors: bool = False
    #: By trace: the tensors of the replica's batch.
    batches: dict[int, list[tf.Tensor]] = field(default_factory=dict)
    #: Gradients that a program gives optimizers: rank, gradients, the optimizer's name.
    given_gradients: list[tuple[Any, list[Any], str]] = field(default_factory=list)
    #: Those of weights stored in shards, with their ranks.
    given_shards: list[tuple[Any, Any]] = field(default_factory=list)
    #: The names of optimizers, and the operations that the first replica's update has.
    updates_built: list[tuple[str, list[Any]]] = field(default_factory=list)
    #: Why a loss may be that of the local batch only, for a warning.
    suspicions: Findings = field(default_factory=Findings)
    #: Why stored state may not be a mean over rows.
    state_suspicions: Findings = field(default_factory=Findings)
    #: By trace: mirrored float variables that the replica assigned independently.
    local_state: dict[int, dict[int, Any]] = field(default_factory=dict)
    #: Those assignments in graphs: rank, variable, value.
    stored: list[tuple[int, Any, tf.Tensor]] = field(default_factory=list)
    #: Assignments in graphs to sums of metrics: rank, variable, value, is it added.
    counted: list[tuple[int, Any, tf.Tensor, bool]] = field(default_factory=list)
    #: Ids of metric variables that are checked elsewhere, or warned about already.
    checked_numbers: set[int] = field(default_factory=set)
    #: Ids of metrics that count a number of all rows by the replica's rows.
    weighted_means: set[int] = field(default_factory=set)
    #: Whether buffers that are still local are synchronized at the end of the step.
    synchronizes_at_end: bool = False
    #: Ids of those buffers, as the first replica found them; None: not computed yet.
    late_buffers: set[int] | None = None
    #: Ids of variables in which replicas accumulate their own sums of gradients.
    own_sums: set[int] = field(default_factory=set)
    #: By trace: the `batch_weight.Denominator` of each mean loss, and how many of them
    #: optimizers have consumed.
    denominators: dict[int, list[Any]] = field(default_factory=dict)
    denominators_used: dict[int, int] = field(default_factory=dict)
    #: By trace: the valid rows of batches padded to a fixed size.
    padding: dict[int, Padding] = field(default_factory=dict)
    #: Whether a replica without rows would get a dummy row, on every host.
    adds_dummy_rows: bool = False
    #: By replica: whether its rows are real; None when no replica has a dummy row.
    owns_rows: list[Any] | None = None
    #: Whether the loss of dummy rows, and with it its gradients, is 0.
    loss_is_own: bool = False
    #: Whether a dummy row may be synthetic: the model may turn it into NaN, and 0 times
    #: NaN is not 0.
    has_synthetic_rows: bool = False
    #: Traces in which layers summed over replicas: there a value of one replica gets
    #: gradients from other replicas' losses.
    mixed: set[int] = field(default_factory=set)
    #: Traces in which an optimizer sums values that exclude dummy rows. By trace:
    #: eager replicas, and those that create variables, take turns.
    sums_own_parts: set[int] = field(default_factory=set)
    #: By trace: the active optimizers, outermost first, and whether they still reduce.
    updates: dict[int, list[bool]] = field(default_factory=dict)
    #: Traces in which an optimizer updates this replica's shard.
    shard_updates: set[int] = field(default_factory=set)
    #: Local training (`tfdp.sync`): the replicas of this process that step together,
    #: by group; None: all replicas step together.
    groups: tuple[tuple[int, ...], ...] | None = None
    #: By trace and name scope: the number of values whose gradient takes an exchange.
    exchanges_due: dict[tuple[int, str], int] = field(
        default_factory=lambda: collections.defaultdict(int)
    )
    #: By trace: gradients of sharded variables, by their keys (`key_of`).
    shard_gradients: dict[int, dict[Any, tf.Tensor]] = field(
        default_factory=lambda: collections.defaultdict(dict)
    )
    #: Checks that eager replicas take part in the same exchanges in the same order.
    eager_order: EagerOrder = field(default_factory=EagerOrder)
    #: Ids of optimizers that sent their momentum instead of gradients.
    sent_momentum: set[int] = field(default_factory=set)
    #: Skips steps that are not finite (`tfdp.chain.finite_guard`), or None.
    guard: Any = None
    #: The stages that callbacks have attached to the steps of the model.
    stages: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.shares = _SharesByTrace(self)

    def analysis(self, rank: Any) -> Analysis:
        """The analysis of the graph in which `rank` is traced."""
        trace = trace_of(rank)
        if trace not in self.analyses:
            batch = self.batches.get(trace, [])
            if self.replicas == 1:
                # Its rows are plain tensors among other arguments.
                batch = [b for b in batch if b.shape[:1] == batch[0].shape[:1]]
            sources = {
                key_of(part): ROW_SOURCE for part in batch if part.shape.rank != 0
            }
            sources |= {key_of(part): PART_OF_ROWS for part in self.sparse_parts}
            rows = batch[0].shape[0] if batch and batch[0].shape.rank else None
            self.analyses[trace] = Analysis(sources, rows)
        return self.analyses[trace]

    @property
    def is_local(self) -> bool:
        """Whether this is local training: steps read and update local weights."""
        return self.groups is not None

    def group_of(self, rank: int) -> tuple[int, ...]:
        if self.groups is None:
            return tuple(range(self.replicas))
        return next(group for group in self.groups if rank in group)

    @property
    def is_even(self) -> bool:
        """Whether every replica certainly has the same number of samples."""
        if self.padding:
            return False
        if self.counts is None:
            return True
        # The shapes of other hosts are not available here.
        return (
            not self.spans_hosts
            and all(isinstance(n, int) for n in self.counts)
            and len(set(self.counts)) == 1
        )

    def count_of(self, rank: Any) -> Any:
        """n_r: the samples of `rank`; 1 for each when no batch was passed in."""
        padding = self.padding_of(rank)
        if padding is not None:
            return padding.count
        if self.counts is None:
            return 1
        if isinstance(rank, int):
            return self.counts[rank]
        return tf.gather(tf.stack(self.counts), rank)

    def total_of(self, rank: Any) -> Any:
        """N: the samples of all replicas; None when no batch was passed in."""
        padding = self.padding_of(rank)
        return self.total if padding is None else padding.total

    def padding_of(self, rank: Any) -> Padding | None:
        """The padding of the replica's batch; None when it was not padded."""
        return self.padding.get(trace_of(rank))

    def share_of(self, rank: Any, dtype: tf.DType = tf.float32) -> tf.Tensor:
        """n_r / N, a scalar."""
        if self.is_even:
            return tf.constant(1.0 / self.replicas, dtype)
        return tf.math.divide_no_nan(
            tf.cast(self.count_of(rank), dtype), tf.cast(self.total_of(rank), dtype)
        )

    def share_in_group(self, rank: Any) -> tf.Tensor:
        """n_r / N_g: the replica's fraction of its group's samples."""
        if self.groups is None:
            return self.share_of(rank)
        if self.is_even:
            return tf.constant(self.even_share)
        return tf.math.divide_no_nan(
            tf.cast(self.count_of(rank), tf.float32), self.total_in_group(rank)
        )

    def share_of_group(self, rank: Any) -> tf.Tensor:
        """N_g / N: the group's fraction of this process's samples."""
        if self.groups is None:
            return tf.constant(1.0)
        return tf.add_n([self.share_of(peer) for peer in self.group_of(rank)])

    def total_in_group(self, rank: Any) -> tf.Tensor:
        """N_g: the samples of the group of `rank`, a float32 scalar."""
        if self.groups is None:
            return tf.cast(self.total_of(rank), tf.float32)
        counts = [self.count_of(peer) for peer in self.group_of(rank)]
        return tf.add_n([tf.cast(count, tf.float32) for count in counts])

    @property
    def even_share(self) -> float:
        return 1.0 / self.group_size

    @property
    def group_size(self) -> int:
        """How many replicas step together."""
        return self.replicas if self.groups is None else len(self.groups[0])

    def has_own_rows(self, rank: Any) -> Any:
        """Whether `rank` computes on real rows; a boolean, or a scalar tensor."""
        return True if self.owns_rows is None else self.owns_rows[rank]

    def own_part(self, rank: Any, value: Any) -> Any:
        """`value`, or 0 (or no slices) where it was computed from a dummy row."""
        own = self.has_own_rows(rank)
        if own is True:
            return value
        if isinstance(value, tf.IndexedSlices):
            count = tf.shape(value.indices)[0] * tf.cast(own, tf.int32)
            return tf.IndexedSlices(
                value.values[:count], value.indices[:count], value.dense_shape
            )
        value = tf.convert_to_tensor(value)
        # Not times 0: a value of a dummy row may be infinite.
        return tf.where(own, value, tf.zeros_like(value))

    def is_own_gradient(self, rank: Any, gradient: Any) -> bool:
        """Whether dummy rows certainly contribute nothing to it; the usual case."""
        if isinstance(gradient, tf.IndexedSlices) or self.has_synthetic_rows:
            return False
        return self.loss_is_own and trace_of(rank) not in self.mixed

    def own_gradient(self, rank: Any, gradient: Any) -> Any:
        """`gradient` without the contribution of dummy rows."""
        own = self.has_own_rows(rank)
        if own is True or self.is_own_gradient(rank, gradient):
            return gradient
        if (
            self.has_synthetic_rows
            and tf.is_tensor(own)
            and isinstance(gradient, tf.Tensor)
        ):
            return kept_if(own, gradient)
        return self.own_part(rank, gradient)

    def parts_to_sum(self, rank: Any, values: Any) -> Any:
        """`values` without dummy rows, for a sum over replicas in a layer or loss."""
        if self.owns_rows is None or trace_of(rank) in self.sums_own_parts:
            return values
        self.mixed.add(trace_of(rank))
        return tf.nest.map_structure(
            lambda value: self.own_part(rank, value), values, expand_composites=False
        )

    @contextlib.contextmanager
    def summing_own_parts(self, rank: Any) -> Iterator[None]:
        """Within this, the values that `rank` sums exclude dummy rows already."""
        trace = trace_of(rank)
        is_outermost = trace not in self.sums_own_parts
        self.sums_own_parts.add(trace)
        try:
            yield
        finally:
            if is_outermost:
                self.sums_own_parts.discard(trace)

    @property
    def is_updating(self) -> bool:
        """Whether an optimizer is active on the calling replica."""
        return bool(self.updates.get(trace_of(current_rank())))

    @property
    def updates_replicated(self) -> bool:
        """Whether the active optimizer makes the same update on all replicas."""
        is_own = self.is_local or trace_of(current_rank()) in self.shard_updates
        return self.is_updating and not is_own

    @property
    def reduces_in_update(self) -> bool:
        """Whether the active optimizer got gradients that are not reduced yet."""
        return any(self.updates.get(trace_of(current_rank()), []))

    @contextlib.contextmanager
    def updating(self, *, reduces: bool = False) -> Iterator[None]:
        """Within this an optimizer updates: its assignments are not local state.
        `reduces`: it still has to reduce its gradients."""
        mine = self.updates.setdefault(trace_of(current_rank()), [])
        mine.append(reduces)
        try:
            yield
        finally:
            mine.pop()

    @contextlib.contextmanager
    def updating_shard(self) -> Iterator[None]:
        trace = trace_of(current_rank())
        self.shard_updates.add(trace)
        try:
            yield
        finally:
            self.shard_updates.discard(trace)

    def note_gradients(self, rank: Any, gradients: Iterable[Any], name: str) -> None:
        """Records gradients that a program gives the optimizer `name`."""
        is_first = trace_of(rank) == min(self.batches, default=0)
        # One replica is enough: all do the same.
        if self.group_size > 1 and is_first and not tf.executing_eagerly():
            self.given_gradients.append((rank, list(gradients), name))

    def note_local_state(self, rank: Any, variable: Any, value: Any = None) -> None:
        """Records that a replica assigned `value` to its own copy, unless in an update,
        which is the same on all replicas."""
        if self.updates.get(trace_of(rank)):
            return
        self.local_state.setdefault(trace_of(rank), {})[id(variable)] = variable
        if isinstance(rank, int) and is_of_graph(value):
            self.stored.append((rank, variable, value))

    def note_counted(
        self, rank: Any, variable: Any, value: Any, is_added: bool
    ) -> None:
        """Records what a replica assigns, or adds, to a sum of a metric."""
        if isinstance(rank, int) and is_of_graph(value):
            self.counted.append((rank, variable, value, is_added))

    def take_local_state(self, rank: Any) -> list[Any]:
        """Removes and returns the variables recorded by `note_local_state`."""
        return list(self.local_state.pop(trace_of(rank), {}).values())

    def return_local_state(self, rank: Any, variables: Iterable[Any]) -> None:
        state = self.local_state.setdefault(trace_of(rank), {})
        state.update((id(variable), variable) for variable in variables)

    def stored_graphs(self, rank: Any) -> dict[int, Any]:
        """By the ids of variables: the graph in which the replica stored them last."""
        return {id(v): value.graph for by, v, value in self.stored if by == rank}


class _SharesByTrace(dict[int, LossShares]):
    def __init__(self, run: ReplicaRun) -> None:
        self._run = run

    def __missing__(self, trace: int) -> LossShares:
        self[trace] = LossShares(lambda tensor: self._run.analysis(trace).value(tensor))
        return self[trace]


def current_run() -> tuple[ReplicaRun, int] | None:
    """The run and this replica's rank; None outside a tfdp strategy's replicas."""
    if tf.distribute.in_cross_replica_context():
        return None
    run = getattr(tf.distribute.get_strategy().extended, "current_run", None)
    return None if run is None else (run, current_rank())


def trace_of(rank: Any) -> int:
    """The index of the graph in which `rank` is traced: one per replica; on TPU, where
    ranks are tensors, one for all."""
    return rank if isinstance(rank, int) else 0


# Below this a branch costs more tracing time (milliseconds) than one read and write of
# the tensor per step. (Hand-built Switch and Merge cost neither, but such steps hang.)
LEAST_BRANCH_BYTES = 1 << 20


def kept_if(condition: Any, value: tf.Tensor) -> tf.Tensor:
    """`value` where the scalar `condition` holds, else zeros; large values by a branch,
    so that they are not copied."""
    if tf.executing_eagerly():
        return value if condition else tf.zeros_like(value)
    size_bytes = (value.shape.num_elements() or 0) * value.dtype.size
    if size_bytes < LEAST_BRANCH_BYTES or in_compiled_function():
        return tf.where(condition, value, tf.zeros_like(value))
    return tf.cond(condition, lambda: value, lambda: tf.zeros_like(value))


def name_of_gradient() -> str:
    """In a forward pass: the name for the exchanges of its gradient, for
    `exchanges_of`; equal on all replicas and hosts, "" outside of a run. Rematerialized
    values get names with the same prefix."""
    found = current_run()
    if found is None:
        return ""
    run, rank = found
    within = current_exchange_name() or ""
    run.exchanges_due[trace_of(rank), within] += 1
    return f"{within}{run.exchanges_due[trace_of(rank), within]}."


def call_before_step(function: Callable[[], None]) -> None:
    """Calls `function` once, eagerly, in the strategy's scope, outside of replicas. In
    a thread: `tf.init_scope` does not leave the replica, and `merge_call` needs all."""
    strategy = tf.distribute.get_strategy()

    def in_scope() -> None:
        with strategy.scope():
            function()

    with ThreadPoolExecutor(1) as outside:
        outside.submit(in_scope).result()
