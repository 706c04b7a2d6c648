"""Gives a replica without rows a dummy row, which contributes nothing.

A short batch leaves replicas without rows, and programs fail on zero rows: oneDNN's
convolutions refuse them, Keras treats a first axis of 0 as no axis, a mean over them is
NaN. So while a step of a Keras model runs, such a replica gets a copy of the first row
of replica 0. `Batch.counts` still counts 0 rows, and its results are excluded:

    loss                its gradients are 0
    sums over replicas  it adds 0: denominators, synchronized statistics
    metrics             its sums stay as they are
    state of layers     has weight 0 in the mean that is summed with the gradients
    predictions         the row is cut off again

Unlike padding (`padded_batch`), this supports `add_loss`. Static shapes need no extra
ops.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from tfdp._private.functions import library_code
from tfdp._private.host_input import share_memory
from tfdp._private.names import PerReplica, current_rank
from tfdp._private.optimizer_hooks import variables_built_with
from tfdp.data.split import rows_between
from tfdp.errors import ConfigurationError
from tfdp.lint.registry import register_exchanged
from tfdp.seams.replace import Override, around, instance_attributes
from tfdp.sharding.variables import ShardedVariable, shard_kind
from tfdp.tracing.keras_steps import as_tensors, is_stock_step, name_of_step
from tfdp.tracing.run import Step
from tfdp.tracing.sample_counts import parts_by_replica
from tfdp.tracing.state_checks import handles_of, is_of_all_replicas, linear_sources


def add_dummy_rows(
    arguments: Any, run: Step, devices: Sequence[str], hosts: int = 1
) -> Any:
    """`arguments` with at least one row for every replica, in cross-replica context.

    Args:
      arguments: nested per-replica values; plain values for a single replica.
      run: records which replicas have own rows, and their batches.
      hosts: number of hosts. A single replica on a single host always has rows.

    Cost: with dynamic shapes, replica 0 sends each other replica its first row.
    """
    run.adds_dummy_rows = True
    counts = run.batch.counts
    if counts is None or (len(counts) == 1 and hosts == 1):
        return arguments
    owns = [n > 0 for n in counts]
    if all(own is True for own in owns):
        return arguments
    run.owns_rows = owns
    run.has_synthetic_rows = hosts > 1 and owns[0] is not True

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

    in_one_memory = share_memory(devices)
    filled = _filled_on_host(arguments, owns, devices[0]) if in_one_memory else None
    if filled is None:
        filled = tf.nest.map_structure(fill, arguments, expand_composites=False)
    run.take_parts(parts_by_replica(filled, len(counts)))
    return filled


def drop_dummy_rows(outputs: Any, run: Step) -> Any:
    """The replicas' `outputs` without dummy rows, in cross-replica context."""
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


def dummy_row_overrides(
    step: Any, optimizers: Sequence[Any], run: Step
) -> Iterator[Override]:
    """With these, a model learns nothing from dummy rows: Keras' own `train_step`
    differentiates the result of `compute_loss`, which is set to 0; for other steps the
    gradients are set to 0 when the optimizer gets them."""
    if run.owns_rows is None or not name_of_step(step):
        return
    for optimizer in optimizers:
        yield Override(optimizer, "apply", around(_apply, optimizer, run))
    run.loss_is_own = is_stock_step(step)
    if run.loss_is_own:
        yield Override(step.__self__, "compute_loss", around(_own_loss, run))


def _own_loss(compute: Callable, run: Step, *args: Any, **kwargs: Any) -> Any:
    loss = compute(*args, **kwargs)
    return loss if loss is None else run.own_part(current_rank(), loss)


def _apply(
    apply: Callable,
    optimizer: Any,
    run: Step,
    gradients: Sequence[Any],
    trainable_variables: Any = None,
) -> Any:
    if run.is_updating:  # called by another optimizer, with reduced gradients
        return apply(gradients, trainable_variables)
    rank = current_rank()
    stored = handles_of(run.trace(rank).local_state.values(), rank)
    own = as_tensors(gradients)
    built_with = trainable_variables or variables_built_with(optimizer)
    variables = list(built_with or [None] * len(own))
    places = []
    for place, (gradient, variable) in enumerate(zip(own, variables, strict=True)):
        # Gradients of sharded variables were reduced already, without dummy rows.
        is_sum = variable is not None and shard_kind(variable) is ShardedVariable
        if gradient is None or is_sum or run.is_own_gradient(rank, gradient):
            continue
        # Accumulators of the step hold gradients of earlier, real rows.
        if not linear_sources(run, rank, [gradient], stored):
            places.append(place)
    for place in places:
        # What a step has summed over replicas itself depends on the rows of all.
        if not is_of_all_replicas(run, rank, own[place]):
            own[place] = run.own_gradient(rank, own[place])
    with run.summing_own_parts(rank):
        return apply(own, trainable_variables)


def _either(condition: Any, yes: Callable[[], Any], no: Callable[[], Any]) -> Any:
    """`yes()` or `no()`; decided while tracing if `condition` is static."""
    if isinstance(condition, bool):
        return yes() if condition else no()
    return tf.cond(condition, yes, no)


def _part_or(row: Any, own: Any, part: Any, device: str) -> Any:
    with tf.device(device):
        filled = _either(own, lambda: part, lambda: row)
    if isinstance(part, tf.SparseTensor):
        # Layers are built from the static row length, which `tf.cond` forgets.
        filled.set_shape([None, *part.shape[1:]])
    return filled


def _part_or_nothing(own: Any, part: Any) -> Any:
    return _either(own, lambda: part, lambda: rows_between(part, 0, 0))


def _filled_on_host(arguments: Any, owns: Sequence[Any], device: str) -> Any:
    """Fills with one conditional for the whole batch, on the host, where the parts come
    from; None where a part is not dense."""
    leaves = tf.nest.flatten(arguments, expand_composites=False)
    parts_of = [_parts_of(leaf, len(owns)) for leaf in leaves]
    places = [place for place, parts in enumerate(parts_of) if _have_rows(parts)]
    batch = [parts_of[place] for place in places]
    if not all(isinstance(part, tf.Tensor) for parts in batch for part in parts):
        return None

    def filled() -> list[list[tf.Tensor]]:
        missing = [1 - tf.cast(own, tf.int32) for own in owns]
        results = []
        for parts in batch:
            row = tf.concat([parts[0], row_like(parts[0])], axis=0)[:1]
            pairs = zip(parts, missing, strict=True)
            results.append([tf.concat([part, row[:n]], axis=0) for part, n in pairs])
        return results

    with tf.device(device):
        results = tf.cond(tf.reduce_all(tf.stack(owns)), lambda: batch, filled)
    for place, parts in zip(places, results, strict=True):
        leaves[place] = _joined(leaves[place], parts)
    return tf.nest.pack_sequence_as(arguments, leaves, expand_composites=False)


def _parts_of(value: Any, replicas: int) -> list[Any]:
    """One part for each replica; none where `value` is no part of a batch."""
    if isinstance(value, PerReplica):
        return list(value.values)
    return [value] if replicas == 1 else []


def _joined(value: Any, parts: Sequence[Any]) -> Any:
    return PerReplica(parts) if isinstance(value, PerReplica) else parts[0]


def _have_rows(parts: Sequence[Any]) -> bool:
    return bool(parts) and all(tf.is_tensor(part) and part.shape.rank for part in parts)


def row_like(part: Any) -> Any:
    """A synthetic row like those of `part`, for a host where no replica has rows."""
    if isinstance(part, tf.SparseTensor):
        shape = tf.concat([[1], tf.maximum(part.dense_shape[1:], 1)], axis=0)
        none, shape = tf.zeros([0, part.shape.rank], tf.int64), tf.cast(shape, tf.int64)
        return tf.SparseTensor(none, tf.zeros([0], part.dtype), shape)
    if isinstance(part, tf.RaggedTensor):
        # With one element, so that means exist; see below.
        splits = tf.constant([0, 1], part.row_splits.dtype)
        one = row_like(part.values)
        return tf.RaggedTensor.from_row_splits(one, splits, validate=False)
    shape = tf.concat([[1], tf.maximum(tf.shape(part)[1:], 1)], axis=0)
    if part.dtype == tf.string:
        row = tf.fill(shape, "1")  # not masked, and can be parsed as a number
    elif not part.dtype.is_floating:
        # A 1 and then zeros: a valid label, or words of which one is not masked
        # (`mask_zero`), because a mean over none is NaN.
        places = tf.reshape(tf.range(tf.reduce_prod(shape)), shape)
        row = tf.cast(tf.equal(places, 0), part.dtype)
    else:
        # Distinct values between 0 and 1: logarithms, roots and deviations exist.
        places = tf.cast(tf.range(1, tf.reduce_prod(shape) + 1), tf.float32)
        spread = places / tf.cast(tf.reduce_prod(shape) + 1, tf.float32)
        row = tf.cast(tf.reshape(spread, shape), part.dtype)
    # A length of 0 became 1, the length of the longest of no words.
    known = [None if length == 0 else length for length in part.shape[1:]]
    return tf.ensure_shape(row, [1, *known])


def with_real_gathers(step: Callable, run: Step) -> Callable:
    """Wraps `step`: its `all_gather` along the first axis leaves dummy rows out."""
    if tf.executing_eagerly():
        return step

    @library_code
    @functools.wraps(step)
    def step_with_real_gathers(*args: Any, **kwargs: Any) -> Any:
        context = tf.distribute.get_replica_context()
        gather = {"all_gather": functools.partial(_gather, context, run)}
        with instance_attributes(context, gather):
            return step(*args, **kwargs)

    return step_with_real_gathers


def _gather(context: Any, run: Step, value: Any, axis: int, options: Any = None) -> Any:
    original = type(context).all_gather.__get__(context)
    if axis == 0:
        _refuse_padding(run, value)
        value = tf.nest.map_structure(lambda part: _own_rows(run, part), value)
    gathered = original(value, axis, options)
    return register_exchanged(tf.nest.map_structure(tf.identity, gathered))


def _refuse_padding(run: Step, value: Any) -> None:
    padding = run.padding_of(current_rank())
    if padding is None:
        return
    for part in tf.nest.flatten(value):
        if tf.TensorShape(part.shape)[:1] == [padding.rows]:
            raise ConfigurationError(
                "all_gather was called on a tensor with a row for each row of a batch "
                "that was padded to a fixed size (pad_batches): the padding would be "
                "in it. Leave out pad_batches, or give batches of one size "
                "(drop_remainder=True), which are not padded."
            )


def _own_rows(run: Step, value: Any) -> Any:
    """`value` without dummy rows, if its length is dynamic, as that of rows is then."""
    has_axis = isinstance(value, tf.Tensor) and value.shape.rank != 0
    if not has_axis or value.shape[0] is not None or run.owns_rows is None:
        return value
    own = tf.cast(run.has_own_rows(current_rank()), tf.int32)
    return value[: tf.shape(value)[0] * own]


def with_unified_shapes(arguments: Any, run: Step) -> Any:
    """`arguments` with equal static shapes on all replicas, in cross-replica context.

    With static shapes replicas may have different numbers of rows (five on three are 2,
    2 and 1), and so Keras and TensorFlow may build different ops (one row is broadcast)
    and gradients in a different order. Exchanges that belong to gradients (sharded
    weights, synchronized batch normalization, `all_reduce` in a layer) are paired by
    their order: they would add unrelated tensors, silently if shapes are equal. So
    replicas with different rows are traced with dynamic shapes; `Step.counts`
    keeps the numbers.

    The rows of other hosts are not available while tracing, so with several hosts all
    rows are dynamic, as in most of Keras' batches.
    """
    counts = run.batch.counts
    if tf.executing_eagerly() or counts is None:
        return arguments
    may_differ = run.batch.spans_hosts and not run.batch.hosts_are_equal
    if len(counts) == 1 and not may_differ:
        return arguments
    # Replicas without rows have a dummy row.
    known = [max(n, 1) if isinstance(n, int) else None for n in counts]
    forgotten = known if may_differ else []

    def unified(value: Any) -> Any:
        parts = value.values if isinstance(value, PerReplica) else [value]
        if len(parts) != len(known):
            return value
        shape = _shape_of_all(parts, forgotten)
        if shape is None:
            return value
        relaxed = [_of_shape(part, shape) for part in parts]
        return PerReplica(relaxed) if isinstance(value, PerReplica) else relaxed[0]

    relaxed = tf.nest.map_structure(unified, arguments, expand_composites=False)
    run.take_parts(parts_by_replica(relaxed, len(counts)))
    return relaxed


def _shape_of_all(
    parts: Sequence[Any], forgotten: Sequence[int | None]
) -> list[int | None] | None:
    """The static shape that all parts should get; None: the one that they have."""
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
        # The only op that forgets a static shape.
        return tf.raw_ops.PlaceholderWithDefault(input=part, shape=shape)
