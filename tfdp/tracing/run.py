"""What one `strategy.run` knows of itself while its replicas are traced."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import tensorflow as tf

from tfdp._private.names import current_rank, in_compiled_function
from tfdp.exchange.engine import name_of_exchanges
from tfdp.tracing.loss_shares import LossShares
from tfdp.tracing.padded_batch import Padding
from tfdp.tracing.trace_order import EagerOrder


@dataclasses.dataclass
class ReplicaRun:
    """State of one call of `strategy.run`, shared by the threads of its replicas.

    Args:
      replicas: how many there are.
      counts: the samples of each replica, as Python integers where the shapes say
        so, else scalar int32 tensors; None when no batch was passed in.
      total: their sum, over all hosts.
      spans_hosts: whether other hosts have replicas of this run, too.
      hosts_are_alike: whether it is known that each of them has the same rows.
    """

    replicas: int
    counts: list[Any] | None = None
    total: Any = None
    spans_hosts: bool = False
    hosts_are_alike: bool = False
    #: Whether one replica makes the whole step: what it has is what all have.
    is_of_one: bool = False
    #: Traces (see `trace_of`) whose loss was brought to its share of the global one.
    scaled_losses: set[int] = dataclasses.field(default_factory=set)
    #: Names of optimizers with gradients of a loss that was not.
    local_optimizers: set[str] = dataclasses.field(default_factory=set)
    #: Traces whose loss is a mean over rows that the program took itself.
    mean_losses: set[int] = dataclasses.field(default_factory=set)
    #: Traces whose loss is of own rows, no share, and not seen to be a sum over them.
    local_losses: set[int] = dataclasses.field(default_factory=set)
    #: By trace: which numbers are shares of the global loss already.
    shares: dict[int, LossShares] = dataclasses.field(
        default_factory=lambda: collections.defaultdict(LossShares)
    )
    #: Traces that added losses of layers (penalties, `add_loss`) to the model's.
    added_losses: set[int] = dataclasses.field(default_factory=set)
    #: Whether the replicas were given any tensor.
    has_tensors: bool = False
    #: By trace: the tensors of the batch that the replica was given.
    batches: dict[int, list[tf.Tensor]] = dataclasses.field(default_factory=dict)
    #: Clauses for a warning: why a loss may be a mean over the local batch only.
    suspicions: set[str] = dataclasses.field(default_factory=set)
    #: The same of what layers store: why it may be no mean over rows.
    state_suspicions: set[str] = dataclasses.field(default_factory=set)
    #: By trace: mirrored float variables that the replica assigned to on its own.
    local_state: dict[int, dict[int, Any]] = dataclasses.field(default_factory=dict)
    #: What was assigned to them in graphs: the rank, the variable, the value.
    stored: list[tuple[int, Any, tf.Tensor]] = dataclasses.field(default_factory=list)
    #: What was assigned in graphs to the sums of metrics: the rank, the variable, the
    #: value, and whether it is added to what the variable holds.
    counted: list[tuple[int, Any, tf.Tensor, bool]] = dataclasses.field(
        default_factory=list
    )
    #: The ids of variables of metrics of whose numbers a warning tells already.
    numbers_told: set[int] = dataclasses.field(default_factory=set)
    #: Whether what is left of it is brought together at the end of the step.
    ends_with_late_state: bool = False
    #: The ids of variables that are brought together at the end of the step, as the
    #: first replica has found; None: none was asked.
    late_buffers: set[int] | None = None
    #: The ids of variables in which replicas hold their own sums of gradients.
    own_sums: set[int] = dataclasses.field(default_factory=set)
    #: By trace: what the means of losses over the global batch were divided by
    #: (`batch_weight.Denominator`), and how many of these an optimizer has asked for.
    denominators: dict[int, list[Any]] = dataclasses.field(default_factory=dict)
    denominators_used: dict[int, int] = dataclasses.field(default_factory=dict)
    #: By trace: which rows are real, of batches filled up to a fixed size.
    padding: dict[int, Padding] = dataclasses.field(default_factory=dict)
    #: Whether a replica without rows would borrow one, on every host.
    lends_rows: bool = False
    #: By replica: whether it has rows of its own, or a borrowed one (see
    #: `borrowed_rows`); None when nobody borrows.
    owns_rows: list[Any] | None = None
    #: Whether the loss is 0 where rows are borrowed, and with it its gradients.
    loss_is_own: bool = False
    #: Whether such a row may be one that was made up: 0 times what the model makes of
    #: it may be no number.
    makes_rows_up: bool = False
    #: Traces in which layers summed over replicas, so that what one replica computes
    #: gets gradients from the others' losses.
    mixed: set[int] = dataclasses.field(default_factory=set)
    #: Traces in which an optimizer sums what has nothing of borrowed rows in it. By
    #: trace, because eager replicas, and those that make variables, take turns.
    sums_own_parts: set[int] = dataclasses.field(default_factory=set)
    #: By trace: the optimizers at work, outermost first, and whether they still reduce.
    updates: dict[int, list[bool]] = dataclasses.field(default_factory=dict)
    #: Traces in which an optimizer updates this replica's shard of something.
    shard_updates: set[int] = dataclasses.field(default_factory=set)
    #: The replicas of this process that step together while others train apart
    #: (`tfdp.sync`); None: all replicas do.
    groups: tuple[tuple[int, ...], ...] | None = None
    #: By trace, and within what: how much there is whose gradient takes an exchange.
    exchanges_due: dict[tuple[int, str], int] = dataclasses.field(
        default_factory=lambda: collections.defaultdict(int)
    )
    #: By trace: gradients of what is stored in shards, by their keys (`key_of`).
    shard_gradients: dict[int, dict[Any, tf.Tensor]] = dataclasses.field(
        default_factory=lambda: collections.defaultdict(dict)
    )
    #: What eager replicas have met for so far.
    eager_order: EagerOrder = dataclasses.field(default_factory=EagerOrder)
    #: The ids of optimizers whose momentum was sent in the place of gradients.
    sent_momentum: set[int] = dataclasses.field(default_factory=set)
    #: Leaves the step out where it is not finite (`tfdp.step.finite_guard`), or None.
    guard: Any = None
    #: Note the norms of its gradients (`tfdp.step.observers`).
    probes: list[Any] = dataclasses.field(default_factory=list)

    @property
    def is_local(self) -> bool:
        """Whether replicas train apart: steps read and update local weights."""
        return self.groups is not None

    def group_of(self, rank: int) -> tuple[int, ...]:
        """The replicas of this process that `rank` steps together with."""
        if self.groups is None:
            return tuple(range(self.replicas))
        return next(group for group in self.groups if rank in group)

    @property
    def is_even(self) -> bool:
        """Whether every replica surely has the same number of samples."""
        if self.padding:
            return False
        if self.counts is None:
            return True
        # Another host's shapes are not known here.
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
        """What fills up the part of `rank`; None for a batch as it came."""
        return self.padding.get(trace_of(rank))

    def share_of(self, rank: Any, dtype: tf.DType = tf.float32) -> tf.Tensor:
        """n_r / N: this replica's part of all samples, a scalar."""
        if self.is_even:
            return tf.constant(1.0 / self.replicas, dtype)
        return tf.math.divide_no_nan(
            tf.cast(self.count_of(rank), dtype), tf.cast(self.total_of(rank), dtype)
        )

    def share_in_group(self, rank: Any) -> tf.Tensor:
        """n_r / N_g: this replica's part of the samples of its group.

        The group of a plain step are all replicas.
        """
        if self.groups is None:
            return self.share_of(rank)
        if self.is_even:
            return tf.constant(self.even_share)
        return tf.math.divide_no_nan(
            tf.cast(self.count_of(rank), tf.float32), self.total_in_group(rank)
        )

    def share_of_group(self, rank: Any) -> tf.Tensor:
        """N_g / N: the group's part of this process's samples; 1 in a plain step."""
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
        """1 / R, of the R replicas that step together."""
        return 1.0 / self.group_size

    @property
    def group_size(self) -> int:
        """How many replicas step together."""
        return self.replicas if self.groups is None else len(self.groups[0])

    def has_own_rows(self, rank: Any) -> Any:
        """Whether `rank` computes on rows of its own; a boolean, or a scalar tensor."""
        return True if self.owns_rows is None else self.owns_rows[rank]

    def own_part(self, rank: Any, value: Any) -> Any:
        """`value`, or 0 (or no slices) where it was computed from a borrowed row."""
        own = self.has_own_rows(rank)
        if own is True:
            return value
        if isinstance(value, tf.IndexedSlices):
            count = tf.shape(value.indices)[0] * tf.cast(own, tf.int32)
            return tf.IndexedSlices(
                value.values[:count], value.indices[:count], value.dense_shape
            )
        value = tf.convert_to_tensor(value)
        # Not times 0: what a borrowed row gives may be infinite.
        return tf.where(own, value, tf.zeros_like(value))

    def is_own_gradient(self, rank: Any, gradient: Any) -> bool:
        """Whether it is known to be of own rows alone; mostly it is."""
        if isinstance(gradient, tf.IndexedSlices) or self.makes_rows_up:
            return False
        return self.loss_is_own and trace_of(rank) not in self.mixed

    def own_gradient(self, rank: Any, gradient: Any) -> Any:
        """The part of `gradient` that own rows have; mostly it is just that."""
        own = self.has_own_rows(rank)
        if own is True or self.is_own_gradient(rank, gradient):
            return gradient
        if self.makes_rows_up and tf.is_tensor(own) and isinstance(gradient, tf.Tensor):
            return kept_if(own, gradient)
        return self.own_part(rank, gradient)

    def parts_to_sum(self, rank: Any, values: Any) -> Any:
        """`values` that a layer or a loss is about to sum over the replicas."""
        if self.owns_rows is None or trace_of(rank) in self.sums_own_parts:
            return values
        self.mixed.add(trace_of(rank))
        return tf.nest.map_structure(
            lambda value: self.own_part(rank, value), values, expand_composites=False
        )

    @contextlib.contextmanager
    def summing_own_parts(self, rank: Any) -> Iterator[None]:
        """While this lasts, what `rank` sums has nothing of borrowed rows in it."""
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
        """Whether an optimizer is at work on the calling replica."""
        return bool(self.updates.get(trace_of(current_rank())))

    @property
    def updates_replicated(self) -> bool:
        """Whether an optimizer is at work that does the same on all replicas."""
        is_own = self.is_local or trace_of(current_rank()) in self.shard_updates
        return self.is_updating and not is_own

    @property
    def reduces_in_update(self) -> bool:
        """Whether the optimizer at work got gradients that are not reduced yet."""
        return any(self.updates.get(trace_of(current_rank()), []))

    @contextlib.contextmanager
    def updating(self, *, reduces: bool = False) -> Iterator[None]:
        """While this lasts an optimizer updates: what it assigns is not local state.

        Args:
          reduces: whether it is yet to reduce its gradients.
        """
        mine = self.updates.setdefault(trace_of(current_rank()), [])
        mine.append(reduces)
        try:
            yield
        finally:
            mine.pop()

    @contextlib.contextmanager
    def updating_shard(self) -> Iterator[None]:
        """While this lasts an optimizer updates the replica's shard of something."""
        trace = trace_of(current_rank())
        self.shard_updates.add(trace)
        try:
            yield
        finally:
            self.shard_updates.discard(trace)

    def note_local_state(self, rank: Any, variable: Any, value: Any = None) -> None:
        """Remembers that a replica changed its own copy of `variable` to `value`.

        But while an optimizer updates: then all replicas do alike.
        """
        if self.updates.get(trace_of(rank)):
            return
        self.local_state.setdefault(trace_of(rank), {})[id(variable)] = variable
        if isinstance(rank, int) and _is_of_graph(value):
            self.stored.append((rank, variable, value))

    def note_counted(
        self, rank: Any, variable: Any, value: Any, is_added: bool
    ) -> None:
        """Remembers what a replica assigns, or adds, to a sum of a metric."""
        if isinstance(rank, int) and _is_of_graph(value):
            self.counted.append((rank, variable, value, is_added))

    def next_exchange_due(self, rank: Any, within: str) -> int:
        """See `current_run.name_of_gradient`; counts by the name that is begun with."""
        self.exchanges_due[trace_of(rank), within] += 1
        return self.exchanges_due[trace_of(rank), within]

    def take_local_state(self, rank: Any) -> list[Any]:
        """What the replica changed on its own since it was last asked."""
        return list(self.local_state.pop(trace_of(rank), {}).values())

    def leave_local_state(self, rank: Any, variables: Iterable[Any]) -> None:
        """Gives back what was taken; whoever asks next takes it."""
        state = self.local_state.setdefault(trace_of(rank), {})
        state.update((id(variable), variable) for variable in variables)

    def stored_graphs(self, rank: Any) -> dict[int, Any]:
        """By the ids of variables: the graph in which the replica stored them last."""
        return {id(v): value.graph for by, v, value in self.stored if by == rank}


def _is_of_graph(value: Any) -> bool:
    # A variable may be assigned, too, and an eager tensor within a graph.
    is_eager = isinstance(value, tf.__internal__.EagerTensor)
    return isinstance(value, tf.Tensor) and not is_eager


def trace_of(rank: Any) -> int:
    """Which of the graphs that are built for a run is that of `rank`.

    Each replica has its own, but for TPU: there one graph serves all, and the rank is
    a tensor.
    """
    return rank if isinstance(rank, int) else 0


# A tensor, or zeros in its place: a large one is not copied where it is kept.


# A branch takes milliseconds while a step is traced; what it saves of each step is to
# read and write the tensor. (TensorFlow's Switch and Merge, built by hand, would take
# neither, and a step with them never ends.)
LEAST_BRANCH_BYTES = 1 << 20


def kept_if(condition: Any, value: tf.Tensor) -> tf.Tensor:
    """`value` where `condition` holds; else zeros, whatever `value` is made of.

    Args:
      condition: a scalar boolean tensor.
      value: of any shape and number type.
    """
    if tf.executing_eagerly():
        return value if condition else tf.zeros_like(value)
    size_bytes = (value.shape.num_elements() or 0) * value.dtype.size
    if size_bytes < LEAST_BRANCH_BYTES or in_compiled_function():
        return tf.where(condition, value, tf.zeros_like(value))
    return tf.cond(condition, lambda: value, lambda: tf.zeros_like(value))


# The `ReplicaRun` that the calling code is part of, if any.


def current_run() -> tuple[ReplicaRun, int] | None:
    """The run and this replica's rank; None outside a tfdp strategy's replicas."""
    if tf.distribute.in_cross_replica_context():
        return None
    run = getattr(tf.distribute.get_strategy().extended, "current_run", None)
    return None if run is None else (run, current_rank())


def name_of_gradient() -> str:
    """Asked in a forward pass: the name of the exchanges that its gradient will take.

    For `exchanges_of`, in the backward pass. What is computed again in a backward pass
    has names that begin with that of what is.

    Returns:
      A name that all replicas and hosts find alike; "" where nobody meets under one.
    """
    found = current_run()
    if found is None:
        return ""
    run, rank = found
    within = name_of_exchanges() or ""
    return f"{within}{run.next_exchange_due(rank, within)}."


# What is done once for all replicas, while one of them is being traced.


def do_before_the_step(function: Callable[[], None]) -> None:
    """Calls it now, eagerly and in the scope of the strategy, outside of replicas.

    `tf.init_scope` leaves the graph, not the replica, and `merge_call` needs all
    replicas, and no function or conditional around it. Another thread is in neither.
    """
    strategy = tf.distribute.get_strategy()

    def in_scope() -> None:
        with strategy.scope():
            function()

    with ThreadPoolExecutor(1) as outside:
        outside.submit(in_scope).result()
