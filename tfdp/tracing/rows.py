"""Which rows of a replica's batch are real, and where others come from and go to.

Dummy rows: programs fail on zero rows. oneDNN's convolutions refuse them, Keras treats
a first axis of 0 as no axis, and a mean over them is NaN. So a replica without rows
gets a copy of replica 0's first row. `Batch.counts` still says 0.

Padding: XLA needs fixed shapes. A short batch is padded with copies of its own rows,
and carries one number per row, +n for a real row of a global batch of n rows, -n for a
padding row: so each replica has the global count without an exchange.

What a replica computes from such rows is 0 in every sum over replicas (`Rows.part`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tfdp._private.host_input import share_memory
from tfdp._private.names import PerReplica, in_compiled_function
from tfdp.errors import ScopeError

# Below this a branch costs more tracing time (milliseconds) than one read and write of
# the tensor per step. (Hand-built Switch and Merge cost neither, but such steps hang.)
LEAST_BRANCH_BYTES = 1 << 20


@dataclasses.dataclass(frozen=True)
class Batch:
    """The numbers of samples of a step.

    Args:
      counts: the samples of each replica of this process: Python integers where shapes
        are static, else scalar int32 tensors; None when no batch was passed in.
      total: their sum over all hosts.
      spans_hosts: whether other hosts have replicas of this step.
      hosts_are_equal: whether every host certainly has the same number of rows.
      has_tensors: whether the replicas were given any tensor.
      sparse_parts: the tensors that ragged and sparse parts of the batch consist of.
    """

    counts: tuple[Any, ...] | None = None
    total: Any = None
    spans_hosts: bool = False
    hosts_are_equal: bool = False
    has_tensors: bool = False
    sparse_parts: tuple[tf.Tensor, ...] = ()

    @classmethod
    def of(cls, arguments: Any, replicas: int) -> Batch:
        """Counts the rows of each replica: the first axis of the first tensor in the
        nested `arguments` that differs between replicas."""
        leaves = tf.nest.flatten(arguments)
        has_tensors = any(map(tf.is_tensor, leaves))
        sparse_parts = tuple(
            part
            for leaf in leaves
            for value in (leaf.values if isinstance(leaf, PerReplica) else (leaf,))
            if isinstance(value, (tf.RaggedTensor, tf.SparseTensor))
            for part in tf.nest.flatten(value, expand_composites=True)
        )
        batch, _ = parts_of_batch(arguments, replicas)
        counts = tuple(map(_rows_of, batch[0])) if batch else None
        if counts is not None and len(counts) != replicas:
            raise ScopeError(
                f"This batch has parts for {len(counts)} replicas, the strategy has "
                f"{replicas}: it was distributed by another strategy. Pass the plain "
                "tf.data.Dataset to model.fit, or distribute it with this strategy."
            )
        total = None if counts is None else sum_of(counts)
        return cls(counts, total, has_tensors=has_tensors, sparse_parts=sparse_parts)

    @property
    def may_have_empty_replicas(self) -> bool:
        """Whether the static shapes leave a replica of this process without rows."""
        return any(isinstance(n, int) and n == 0 for n in self.counts or ())


def _rows_of(part: Any) -> Any:
    if isinstance(part, tf.RaggedTensor):
        return tf.cast(part.nrows(), tf.int32)
    if isinstance(part, tf.SparseTensor):
        return tf.cast(part.dense_shape[0], tf.int32)
    return part.shape[0] if part.shape[0] is not None else tf.shape(part)[0]


def sum_of(counts: Sequence[Any]) -> Any:
    """The sum of row counts: an integer, if all are, or a scalar tensor."""
    if len(counts) == 1:
        return counts[0]
    if all(isinstance(n, int) for n in counts):
        return sum(counts)
    return tf.add_n([tf.cast(n, tf.int32) for n in counts])


@dataclasses.dataclass(frozen=True)
class Rows:
    """The rows that one replica computes on.

    Args:
      present: whether the replica has rows of its own, and no dummy row: a boolean, or
        a scalar boolean tensor.
      may_be_synthetic: whether a dummy row may be no copy of a real one: the model may
        turn it into NaN, and 0 times NaN is not 0.
      real: which rows of a padded batch are real, a boolean for each; None: the batch
        was not padded.
      count: n_r, the number of real rows of a padded batch, as float32.
      total: n, their number on all replicas.
    """

    present: Any = True
    may_be_synthetic: bool = False
    real: tf.Tensor | None = None
    count: Any = None
    total: Any = None

    @classmethod
    def of_padded(cls, signed: tf.Tensor) -> Rows:
        """Makes rows from the numbers of a `PaddedBatch`, in replica context."""
        real = signed > 0
        return cls(
            real=real,
            count=tf.reduce_sum(tf.cast(real, tf.float32)),
            total=tf.cast(tf.abs(signed[0]), tf.float32),
        )

    @property
    def is_padded(self) -> bool:
        return self.real is not None

    @property
    def size(self) -> int:
        """The number of rows of a padded batch, padding included."""
        return int(self.real.shape[0])  # type: ignore[union-attr]

    def weights(self, rank: int, dtype: Any = tf.float32) -> tf.Tensor:
        """1 for real rows, 0 for padding, of shape [rows, 1, ..., 1] of that rank."""
        return tf.reshape(tf.cast(self.real, dtype), [self.size] + [1] * (rank - 1))

    def real_rows(self, value: tf.Tensor) -> tf.Tensor:
        """`value` without a dummy row."""
        if self.present is True:
            return value
        return value[: tf.shape(value)[0] * tf.cast(self.present, tf.int32)]

    def part(self, value: Any) -> Any:
        """`value`, or 0 (or no slices) where it was computed from a dummy row."""
        if self.present is True:
            return value
        if isinstance(value, tf.IndexedSlices):
            count = tf.shape(value.indices)[0] * tf.cast(self.present, tf.int32)
            return tf.IndexedSlices(
                value.values[:count], value.indices[:count], value.dense_shape
            )
        value = tf.convert_to_tensor(value)
        # Not times 0: a value of a dummy row may be infinite.
        return tf.where(self.present, value, tf.zeros_like(value))

    def part_of_gradient(self, gradient: Any) -> Any:
        """`part` of a gradient; large ones by a branch, so that they are not copied."""
        present = self.present
        is_small = (
            not (self.may_be_synthetic and tf.is_tensor(present))
            or not isinstance(gradient, tf.Tensor)
            or _size_bytes(gradient) < LEAST_BRANCH_BYTES
        )
        if is_small or in_compiled_function():
            return self.part(gradient)
        return tf.cond(present, lambda: gradient, lambda: tf.zeros_like(gradient))


def _size_bytes(tensor: tf.Tensor) -> int:
    return (tensor.shape.num_elements() or 0) * int(tensor.dtype.size)


@dataclasses.dataclass
class DummyRows:
    """How a step deals with the dummy rows of replicas without rows.

    Args:
      loss_is_own: whether the loss of dummy rows, and with it its gradients, is 0.
    """

    loss_is_own: bool = False


@dataclasses.dataclass
class PaddedLoss:
    """The loss that a replica computed of a padded batch.

    Args:
      loss_is_weighted: whether one was computed that excludes the padding.
      has_user_weights: whether it also has sample weights of the program's.
    """

    loss_is_weighted: bool = False
    has_user_weights: bool = False


@dataclasses.dataclass
class OwnParts:
    """Whether the sums of one replica exclude its dummy rows.

    Args:
      are_mixed: whether layers summed over replicas: then a value of this replica gets
        gradients from other replicas' losses.
      are_summed: whether what the replica sums excludes dummy rows already, so that
        nothing else takes them out. Replicas that create variables take turns.
      of_group: the ids of stored weights that the replica uses for rows of its group:
        dummy rows are not among these, and its gradients are for rows of others too.
    """

    are_mixed: bool = False
    are_summed: bool = False
    of_group: set[int] = dataclasses.field(default_factory=set)


@dataclasses.dataclass
class RowsInSight:
    """Whether one replica computes on the rows of all replicas now, and whether its
    metrics count them (`Trace.seeing_all_rows`); what these have `written`, for checks:
    variables and values."""

    are_of_all: bool = False
    are_counted: bool = False
    written: list[tuple[Any, Any]] = dataclasses.field(default_factory=list)


def parts_of_batch(
    values: Any, replicas: int
) -> tuple[list[list[Any]], Callable[[Sequence[Sequence[Any]]], Any]]:
    """Parts of each per-replica tensor with rows among nested `values`; and a function
    that returns `values` with other parts."""
    leaves = tf.nest.flatten(values, expand_composites=False)
    found: dict[int, list[Any]] = {}
    for place, leaf in enumerate(leaves):
        is_split = isinstance(leaf, PerReplica)
        if not is_split and replicas > 1:
            continue
        # TensorFlow does not wrap the part of a single replica.
        parts = list(leaf.values) if is_split else [leaf]
        if all(tf.is_tensor(part) and part.shape.rank for part in parts):
            found[place] = parts

    def with_parts(changed: Sequence[Sequence[Any]]) -> Any:
        for place, parts in zip(found, changed, strict=True):
            is_split = isinstance(leaves[place], PerReplica)
            leaves[place] = PerReplica(parts) if is_split else parts[0]
        return tf.nest.pack_sequence_as(values, leaves, expand_composites=False)

    return list(found.values()), with_parts


def add_dummy_rows(
    arguments: Any, counts: Sequence[Any] | None, devices: Sequence[str], hosts: int
) -> tuple[Any, list[Rows]]:
    """`arguments` with at least one row for every replica, in cross-replica context.

    Args:
      arguments: nested per-replica values; plain values for a single replica.
      counts: the rows of each replica; None: there is no batch.
      hosts: number of hosts. A single replica on a single host always has rows.

    Returns:
      The arguments, and the rows of each replica.

    Cost: with dynamic shapes, replica 0 sends each other replica its first row.
    """
    present = [] if counts is None else [n > 0 for n in counts]
    is_alone = len(present) == hosts == 1
    if is_alone or all(one is True for one in present):
        return arguments, [Rows() for _ in devices]
    batch, with_parts = parts_of_batch(arguments, len(present))
    is_dense = all(isinstance(part, tf.Tensor) for parts in batch for part in parts)
    if is_dense and share_memory(devices):
        filled = _filled_on_host(batch, present, devices[0])
    else:
        filled = [_filled(parts, present, devices) for parts in batch]
    may_be_synthetic = hosts > 1 and present[0] is not True
    return with_parts(filled), [Rows(one, may_be_synthetic) for one in present]


def _filled(
    parts: Sequence[Any], present: Sequence[Any], devices: Sequence[str]
) -> list[Any]:
    first = parts[0]
    with tf.device(devices[0]):
        row = _either(
            present[0], lambda: rows_between(first, 0, 1), lambda: row_like(first)
        )
    return [
        _part_or(row, own, part, device)
        for own, part, device in zip(present, parts, devices, strict=True)
    ]


def _part_or(row: Any, own: Any, part: Any, device: str) -> Any:
    with tf.device(device):
        filled = _either(own, lambda: part, lambda: row)
    if isinstance(part, tf.SparseTensor):
        # Layers are built from the static row length, which `tf.cond` forgets.
        filled.set_shape([None, *part.shape[1:]])
    return filled


def _filled_on_host(
    batch: Sequence[Sequence[tf.Tensor]], present: Sequence[Any], device: str
) -> list[list[tf.Tensor]]:
    """Fills with one conditional for the whole batch, on the host, where the parts come
    from."""

    def filled() -> list[list[tf.Tensor]]:
        missing = [1 - tf.cast(own, tf.int32) for own in present]
        results = []
        for parts in batch:
            row = tf.concat([parts[0], row_like(parts[0])], axis=0)[:1]
            pairs = zip(parts, missing, strict=True)
            results.append([tf.concat([part, row[:n]], axis=0) for part, n in pairs])
        return results

    with tf.device(device):
        return tf.cond(tf.reduce_all(tf.stack(present)), lambda: batch, filled)


def without_dummy_rows(outputs: Any, rows: Sequence[Rows]) -> Any:
    """The replicas' `outputs` without dummy rows, in cross-replica context."""
    if all(one.present is True for one in rows):
        return outputs
    batch, with_parts = parts_of_batch(outputs, len(rows))
    return with_parts(
        [
            [_kept(part, own.present) for part, own in zip(parts, rows, strict=True)]
            for parts in batch
        ]
    )


def _kept(part: Any, present: Any) -> Any:
    return _either(present, lambda: part, lambda: rows_between(part, 0, 0))


def _either(condition: Any, yes: Callable[[], Any], no: Callable[[], Any]) -> Any:
    """`yes()` or `no()`; decided while tracing if `condition` is static."""
    if isinstance(condition, bool):
        return yes() if condition else no()
    return tf.cond(condition, yes, no)


def rows_between(part: Any, start: tf.Tensor | int, stop: tf.Tensor | int) -> Any:
    """The rows of a dense, ragged or sparse tensor from `start` to `stop`."""
    if not isinstance(part, tf.SparseTensor):
        return part[start:stop]
    first = tf.concat([[start], tf.zeros_like(part.dense_shape[1:])], axis=0)
    size = tf.concat([[stop - start], part.dense_shape[1:]], axis=0)
    rows = tf.sparse.slice(part, first, size)
    # Layers are built from the static length of rows, which a slice loses.
    rows.set_shape([None, *part.shape[1:]])
    return rows


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


def with_unified_shapes(arguments: Any, batch: Batch) -> Any:
    """`arguments` with equal static shapes on all replicas, in cross-replica context.

    With static shapes replicas may have different numbers of rows (five on three are 2,
    2 and 1), and so Keras and TensorFlow may build different ops (one row is broadcast)
    and gradients in a different order. Exchanges that belong to gradients (sharded
    weights, synchronized batch normalization, `all_reduce` in a layer) are paired by
    their order: they would add unrelated tensors, silently if shapes are equal. So
    replicas with different rows are traced with dynamic shapes; `Batch.counts` has the
    numbers.

    The rows of other hosts are not available while tracing, so with several hosts all
    rows are dynamic, as in most of Keras' batches.
    """
    counts = batch.counts or ()
    hosts_may_differ = batch.spans_hosts and not batch.hosts_are_equal
    if len(counts) <= 1 and not hosts_may_differ:
        return arguments
    # Replicas without rows have a dummy row.
    known = [max(n, 1) if isinstance(n, int) else None for n in counts]
    forgotten = known if hosts_may_differ else []
    found, with_parts = parts_of_batch(arguments, len(counts))
    return with_parts([_unified(parts, forgotten) for parts in found])


def _unified(parts: Sequence[Any], forgotten: Sequence[int | None]) -> Sequence[Any]:
    """`parts` with one static shape."""
    if not all(isinstance(part, tf.Tensor) for part in parts):
        return parts
    if len({part.shape.rank for part in parts}) != 1:
        return parts
    axes = zip(*(part.shape for part in parts), strict=True)
    shape = [sizes[0] if len({*sizes}) == 1 else None for sizes in axes]
    if [part.shape[0] for part in parts] == [*forgotten]:
        shape[0] = None
    if all(shape == list(part.shape) for part in parts):
        return parts
    return [_of_shape(part, shape) for part in parts]


def _of_shape(part: tf.Tensor, shape: list[int | None]) -> tf.Tensor:
    with tf.device(part.device):
        # The only op that forgets a static shape.
        return tf.raw_ops.PlaceholderWithDefault(input=part, shape=shape)


class PaddedBatch(NamedTuple):
    """A batch padded to a fixed size; `rows`: +n for each real row, -n for each added
    one, n real rows in all (int32); () if all are real.

    `sized` is `{"<rows of one replica's part>": batch}`: TensorFlow forgets static
    sizes in loops and after retracing, but keeps the key, a part of the structure.
    """

    sized: dict[str, Any]
    rows: Any

    @classmethod
    def of(cls, batch: Any, rows: Any, size: int) -> PaddedBatch:
        """Makes a batch whose replicas' parts have `size` rows each."""
        return cls({str(size): batch}, rows)

    @property
    def batch(self) -> Any:
        (batch,) = self.sized.values()
        return batch

    def set_shapes(self) -> None:
        """Sets the static number of rows of every tensor, in cross-replica context."""
        (size,) = map(int, self.sized)
        for value in tf.nest.flatten(self):
            parts = value.values if isinstance(value, PerReplica) else (value,)
            for part in parts:
                part.set_shape([size, *part.shape[1:]])


def find_padded(arguments: Any) -> PaddedBatch | None:
    """The padded batch among nested `arguments`, or None."""
    if isinstance(arguments, PaddedBatch):
        return arguments
    if isinstance(arguments, dict):
        arguments = list(arguments.values())
    if isinstance(arguments, (tuple, list)):
        found = (find_padded(part) for part in arguments)
        return next((part for part in found if part is not None), None)
    return None


def without_padding(arguments: Any) -> Any:
    """`arguments` with plain batches instead of padded ones."""
    if isinstance(arguments, PaddedBatch):
        return arguments.batch
    if isinstance(arguments, dict):
        return {name: without_padding(part) for name, part in arguments.items()}
    if type(arguments) in (tuple, list):
        return type(arguments)(without_padding(part) for part in arguments)
    return arguments


def real_counts(signed: Any) -> list[tf.Tensor]:
    """The number of real rows of each replica, from the rows of a `PaddedBatch`."""
    parts = signed.values if isinstance(signed, PerReplica) else [signed]
    return [tf.reduce_sum(tf.cast(part > 0, tf.int32)) for part in parts]


def of_real_rows(arguments: Any) -> Any:
    """The arguments of a step, with the real rows of a padded batch only."""
    padded, plain = find_padded(arguments), without_padding(arguments)
    if padded is None or not tf.nest.flatten(padded.rows):
        return plain
    return trim_rows(plain, padded.rows)


def trim_rows(outputs: Any, signed: Any) -> Any:
    """The replicas' `outputs` without padding rows, in cross-replica context; `signed`:
    the rows of the `PaddedBatch` that they were computed from."""
    # On the host, because the length is dynamic.
    with tf.device("CPU:0"):
        counts = real_counts(signed)
        batch, with_parts = parts_of_batch(outputs, len(counts))
        return with_parts(
            [
                [part[:count] for part, count in zip(parts, counts, strict=True)]
                for parts in batch
            ]
        )
