"""A replica without rows computes on a borrowed one, which counts for nothing.

A short batch leaves replicas without rows. Zero rows are what programs are not made
for: kernels refuse them (oneDNN's convolutions), Keras takes a first axis of 0 for no
axis, and a mean over them is not a number. So while a step of a Keras model runs, such
a replica gets the first row of replica 0: a value that the model can take. It stays
without rows in all that counts (`ReplicaRun.counts`), and what it computes is left out:

    loss                its gradients are 0
    sums over replicas  it adds 0: denominators, synchronised statistics
    metrics             its sums stay as they are
    state of layers     has a weight of 0 in the mean that comes with the gradients
    predictions         the row is cut off again

The alternative, rows of weight 0 (`padded_batch`), has each loss, metric and layer
weigh rows in every batch, and must refuse losses that layers add. Here one boolean per
replica tells; where the shapes tell already, nothing is added to the graph.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from tfdp._private.functions import library_code
from tfdp._private.host_input import share_memory
from tfdp._private.instance_attributes import instance_attributes
from tfdp._private.names import PerReplica, current_rank
from tfdp._private.optimizer_hooks import variables_built_with
from tfdp.data.split import rows_between
from tfdp.errors import ConfigurationError
from tfdp.sharding.variables import ShardedVariable, shard_kind
from tfdp.tracing.assigned_terms import as_tensors, handles_of, passed_on
from tfdp.tracing.dependencies import are_of_sums_alone, batch_keys
from tfdp.tracing.keras_steps import is_stock_step, name_of_step
from tfdp.tracing.replica_invariance import GATHERED_ROWS
from tfdp.tracing.run import ReplicaRun, trace_of
from tfdp.tracing.sample_counts import parts_by_replica


def add_dummy_rows(
    arguments: Any, run: ReplicaRun, devices: Sequence[str], hosts: int = 1
) -> Any:
    """`arguments` with at least one row for every replica, in cross-replica context.

    Args:
      arguments: nested per-replica values, of `run.counts` rows each; the values of a
        single replica are plain ones.
      run: to note in who has rows of its own, and what the replicas get.
      devices: of the replicas.
      hosts: how many there are. A single replica has rows where it is the only one.

    Cost: where the shapes leave open who has rows, replica 0 sends each other replica
    its first row.
    """
    run.lends_rows = True
    counts = run.counts
    if counts is None or (len(counts) == 1 and hosts == 1):
        return arguments
    owns = [n > 0 for n in counts]
    if all(own is True for own in owns):
        return arguments
    run.owns_rows = owns
    run.makes_rows_up = hosts > 1 and owns[0] is not True

    def fill(value: Any) -> Any:
        parts = _parts_of(value, len(owns))
        if not _have_rows(parts):
            return value
        first = parts[0]
        with tf.device(devices[0]):
            row = _either(
                owns[0], lambda: rows_between(first, 0, 1), lambda: row_like(first)
            )
        filled = [
            _part_or(row, own, part, device)
            for own, part, device in zip(owns, parts, devices, strict=True)
        ]
        return _joined(value, filled)

    if share_memory(devices):
        filled = _filled_on_host(arguments, owns, devices[0])
    else:
        filled = None
    if filled is None:
        filled = tf.nest.map_structure(fill, arguments, expand_composites=False)
    run.batches = parts_by_replica(filled, len(counts))
    return filled


def drop_dummy_rows(outputs: Any, run: ReplicaRun) -> Any:
    """The replicas' `outputs` without borrowed rows, in cross-replica context."""
    if run.owns_rows is None:
        return outputs
    owns = run.owns_rows

    def cut(value: Any) -> Any:
        parts = _parts_of(value, len(owns))
        if not _have_rows(parts):
            return value
        cut_parts = [
            _part_or_nothing(own, part) for own, part in zip(owns, parts, strict=True)
        ]
        return _joined(value, cut_parts)

    return tf.nest.map_structure(cut, outputs, expand_composites=False)


@contextlib.contextmanager
def ignores_dummy_rows(
    step: Any, optimizers: Sequence[Any], run: ReplicaRun
) -> Iterator[None]:
    """While this lasts, borrowed rows count for nothing in what a model learns.

    Keras' own `train_step` takes the gradient of what `compute_loss` returns, so it is
    enough that this is 0. What another one takes the gradient of is not known; there
    the gradients are made 0 when the optimizer gets them.

    Args:
      step: of a model, or a prediction.
      optimizers: whichever the step may call.
      run: the strategy's current run.
    """
    if run.owns_rows is None or not name_of_step(step):
        yield
        return
    model = step.__self__
    leads: list[tuple[Any, str, Callable]] = [
        (optimizer, "apply", functools.partial(_apply, optimizer, optimizer.apply, run))
        for optimizer in optimizers
    ]
    run.loss_is_own = is_stock_step(step)
    if run.loss_is_own:
        compute = functools.partial(_own_loss, model.compute_loss, run)
        leads.append((model, "compute_loss", compute))
    with contextlib.ExitStack() as stack:
        for target, name, led in leads:
            stack.enter_context(instance_attributes(target, {name: led}))
        yield


def _own_loss(compute: Callable, run: ReplicaRun, *args: Any, **kwargs: Any) -> Any:
    loss = compute(*args, **kwargs)
    return loss if loss is None else run.own_part(current_rank(), loss)


def _apply(
    optimizer: Any,
    apply: Callable,
    run: ReplicaRun,
    gradients: Sequence[Any],
    trainable_variables: Any = None,
) -> Any:
    if run.is_updating:  # another optimizer calls it, with what all replicas share
        return apply(gradients, trainable_variables)
    rank = current_rank()
    stored = handles_of(run.local_state.get(trace_of(rank), {}).values(), rank)
    own = as_tensors(gradients)
    keys = batch_keys(run.batches, trace_of(rank))
    built_with = trainable_variables or variables_built_with(optimizer)
    variables = list(built_with or [None] * len(own))
    places = []
    for place, (gradient, variable) in enumerate(zip(own, variables, strict=True)):
        # What is stored in shards has been summed already, of own parts.
        is_sum = variable is not None and shard_kind(variable) is ShardedVariable
        if gradient is None or is_sum or run.is_own_gradient(rank, gradient):
            continue
        # What a step has accumulated itself is of rows that it had before.
        if not passed_on([gradient], stored):
            places.append(place)
    # What a step has added up over replicas is of the rows of all.
    are_whole = are_of_sums_alone([own[place] for place in places], keys)
    for place, is_whole in zip(places, are_whole, strict=True):
        if not is_whole:
            own[place] = run.own_gradient(rank, own[place])
    with run.summing_own_parts(rank):
        return apply(own, trainable_variables)


def _either(condition: Any, yes: Callable[[], Any], no: Callable[[], Any]) -> Any:
    """`yes()` or `no()`; decided now where `condition` is known now."""
    if isinstance(condition, bool):
        return yes() if condition else no()
    return tf.cond(condition, yes, no)


def _part_or(row: Any, own: Any, part: Any, device: str) -> Any:
    with tf.device(device):
        filled = _either(own, lambda: part, lambda: row)
    if isinstance(part, tf.SparseTensor):
        # Layers are built from the length of rows, which a conditional forgets.
        filled.set_shape([None, *part.shape[1:]])
    return filled


def _part_or_nothing(own: Any, part: Any) -> Any:
    return _either(own, lambda: part, lambda: rows_between(part, 0, 0))


def _filled_on_host(arguments: Any, owns: Sequence[Any], device: str) -> Any:
    """`arguments` with rows for every replica; None where a part is not dense.

    One question for the whole batch, and on the host, where the parts come from. (With
    memories of their own, all devices would have to send their parts there.)
    """
    leaves = tf.nest.flatten(arguments, expand_composites=False)
    places = [
        place
        for place, value in enumerate(leaves)
        if _have_rows(_parts_of(value, len(owns)))
    ]
    batch = [_parts_of(leaves[place], len(owns)) for place in places]
    if not all(isinstance(part, tf.Tensor) for parts in batch for part in parts):
        return None

    def filled() -> list[list[tf.Tensor]]:
        missing = [1 - tf.cast(own, tf.int32) for own in owns]
        results = []
        for parts in batch:
            row = tf.concat([parts[0], row_like(parts[0])], axis=0)[:1]
            results.append(
                [
                    tf.concat([part, row[:count]], axis=0)
                    for part, count in zip(parts, missing, strict=True)
                ]
            )
        return results

    with tf.device(device):
        results = tf.cond(tf.reduce_all(tf.stack(owns)), lambda: batch, filled)
    for place, parts in zip(places, results, strict=True):
        leaves[place] = _joined(leaves[place], parts)
    return tf.nest.pack_sequence_as(arguments, leaves, expand_composites=False)


def _parts_of(value: Any, replicas: int) -> list[Any]:
    """One for each replica; none where `value` is no part of a batch."""
    if isinstance(value, PerReplica):
        return list(value.values)
    return [value] if replicas == 1 else []


def _joined(value: Any, parts: Sequence[Any]) -> Any:
    """Parts in the place of those of `value`."""
    return PerReplica(parts) if isinstance(value, PerReplica) else parts[0]


def _have_rows(parts: Sequence[Any]) -> bool:
    return bool(parts) and all(tf.is_tensor(part) and part.shape.rank for part in parts)


def row_like(part: Any) -> Any:
    """One row like those of `part`, on a host where no replica has any."""
    if isinstance(part, tf.SparseTensor):
        shape = tf.concat([[1], tf.maximum(part.dense_shape[1:], 1)], axis=0)
        none = tf.zeros([0, part.shape.rank], tf.int64)
        return tf.SparseTensor(
            none, tf.zeros([0], part.dtype), tf.cast(shape, tf.int64)
        )
    if isinstance(part, tf.RaggedTensor):
        # Of one element, for the same reason as below.
        splits = tf.constant([0, 1], part.row_splits.dtype)
        one = row_like(part.values)
        return tf.RaggedTensor.from_row_splits(one, splits, validate=False)
    shape = tf.concat([[1], tf.maximum(tf.shape(part)[1:], 1)], axis=0)
    if part.dtype == tf.string:
        row = tf.fill(shape, "1")  # a word that is not masked, and a number
    elif not part.dtype.is_floating:
        # One 1 and zeros behind it: a label, or words of which one is not masked
        # (`mask_zero`), for a mean over none is not a number.
        places = tf.reshape(tf.range(tf.reduce_prod(shape)), shape)
        row = tf.cast(tf.equal(places, 0), part.dtype)
    else:
        # Between 0 and 1 and no two alike: logarithms, roots and deviations exist.
        places = tf.cast(tf.range(1, tf.reduce_prod(shape) + 1), tf.float32)
        spread = places / tf.cast(tf.reduce_prod(shape) + 1, tf.float32)
        row = tf.cast(tf.reshape(spread, shape), part.dtype)
    # A length of 0 became 1, where it is that of the longest of no words.
    known = [None if length == 0 else length for length in part.shape[1:]]
    return tf.ensure_shape(row, [1, *known])


# What a replica without rows brings to a gather: nothing.
#
# It computes on a row that another one has, which is in the gather already. Rows that
# fill a batch up would be in the gather as well: refused.


def with_own_gathers(step: Callable, run: ReplicaRun) -> Callable:
    """`step`, whose `all_gather` along the first axis leaves borrowed rows out.

    Args:
      step: what every replica runs.
      run: in which it is traced.
    """
    if tf.executing_eagerly():
        return step

    @library_code
    @functools.wraps(step)
    def step_with_own_gathers(*args: Any, **kwargs: Any) -> Any:
        context = tf.distribute.get_replica_context()
        led = {"all_gather": functools.partial(_gather, context, run)}
        with instance_attributes(context, led):
            return step(*args, **kwargs)

    return step_with_own_gathers


def _gather(
    context: Any, run: ReplicaRun, value: Any, axis: int, options: Any = None
) -> Any:
    original = type(context).all_gather.__get__(context)
    if axis == 0:
        _refuse_filling(run, value)
        value = tf.nest.map_structure(lambda part: _own_rows(run, part), value)
    return tf.nest.map_structure(
        lambda rows: tf.identity(rows, name=GATHERED_ROWS),
        original(value, axis, options),
    )


def _refuse_filling(run: ReplicaRun, value: Any) -> None:
    padding = run.padding_of(current_rank())
    if padding is None:
        return
    for part in tf.nest.flatten(value):
        if tf.TensorShape(part.shape)[:1] == [padding.rows]:
            raise ConfigurationError(
                "all_gather was asked for what has a row for each row of a batch that "
                "was filled up to a fixed size (pad_batches): the filling would be in "
                "it. Leave out pad_batches, or give batches of one size "
                "(drop_remainder=True), which are not filled up."
            )


def _own_rows(run: ReplicaRun, value: Any) -> Any:
    """`value` without borrowed rows, where its length is one of rows.

    That is not known while the graph is built, where replicas borrow; a number that
    each replica has is of a known length.
    """
    if not isinstance(value, tf.Tensor) or value.shape.rank == 0:
        return value
    if value.shape[0] is not None or run.owns_rows is None:
        return value
    own = tf.cast(run.has_own_rows(current_rank()), tf.int32)
    return value[: tf.shape(value)[0] * own]


# One static shape for the parts of a batch, whatever rows each replica has.
#
# Where shapes are known while a step is traced, replicas may have other numbers of
# rows: five on three replicas are 2, 2 and 1. What Keras and TensorFlow build of a part
# may then differ in its operations (one row is broadcast), and with them the order in
# which the gradients of branches come. Exchanges that belong to gradients - shards of
# weights, synchronized batch normalization, a layer's own `all_reduce` - meet by their
# order: they would add what does not belong together, silently where shapes are equal.
# So replicas that differ in their rows are traced as if nobody knew them. How many
# there are stays known to what weighs losses (`ReplicaRun.counts`).
#
# A host does not know the rows of others while it traces, and what is known of shapes
# also decides what has to be asked of all hosts. So with several hosts no rows are
# known, as in most of Keras' batches. What else might move the sums of shards is an
# error: between hosts each is named by the read of the weight that it belongs to.


def with_unified_shapes(arguments: Any, run: ReplicaRun) -> Any:
    """`arguments`, in cross-replica context, with the same static shapes on all.

    Args:
      arguments: nested per-replica values.
      run: to note in what the replicas get.
    """
    if tf.executing_eagerly() or run.counts is None:
        return arguments
    may_differ = run.spans_hosts and not run.hosts_are_alike
    if len(run.counts) == 1 and not may_differ:
        return arguments
    # Who has no row has borrowed one.
    known = [max(n, 1) if isinstance(n, int) else None for n in run.counts]
    forgotten = known if may_differ else []

    def alike(value: Any) -> Any:
        parts = value.values if isinstance(value, PerReplica) else [value]
        if len(parts) != len(known):
            return value
        shape = _shape_of_all(parts, forgotten)
        if shape is None:
            return value
        relaxed = [_of_shape(part, shape) for part in parts]
        return PerReplica(relaxed) if isinstance(value, PerReplica) else relaxed[0]

    relaxed = tf.nest.map_structure(alike, arguments, expand_composites=False)
    run.batches = parts_by_replica(relaxed, len(run.counts))
    return relaxed


def _shape_of_all(
    parts: Sequence[Any], forgotten: Sequence[int | None]
) -> list[int | None] | None:
    """The static shape that all parts are to have; None: that which they have."""
    if not all(isinstance(part, tf.Tensor) and part.shape.rank for part in parts):
        return None
    if len({part.shape.rank for part in parts}) != 1:
        return None
    axes = zip(*(part.shape for part in parts), strict=True)
    shape = [sizes[0] if len({*sizes}) == 1 else None for sizes in axes]
    if [part.shape[0] for part in parts] == [*forgotten]:
        shape[0] = None
    return None if all(shape == list(part.shape) for part in parts) else shape


def _of_shape(part: tf.Tensor, shape: list[int | None]) -> tf.Tensor:
    with tf.device(part.device):
        # The one operation that forgets a shape.
        return tf.raw_ops.PlaceholderWithDefault(input=part, shape=shape)
