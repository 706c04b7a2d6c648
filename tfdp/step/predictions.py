"""What a prediction returns on each replica, as one device would return it.

Keras joins the replicas' outputs along their first axis, which is right for what has a
value for each row. What has none, such as a temperature, is returned once where all
replicas have the same; else no number of one device can be made of it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdp._private.names import PerReplica
from tfdp.errors import ConfigurationError
from tfdp.tracing.run import ReplicaRun, trace_of

NO_ROWS = (
    "tfdp: {name} of the prediction is not one value for each row, and replicas have "
    "different ones, so that they cannot be joined as one device would return them. "
    "Return a tensor whose first axis is that of the rows, or a value that does not "
    "depend on the rows. Shapes on the replicas of this host:"
)
WIDTHS = (
    "tfdp: {name} of the prediction has rows of another size on each replica, so that "
    "they cannot be joined. Give all rows one size in the model, for example ragged "
    "rows by to_tensor(shape=(None, width)). Shapes on the replicas of this host:"
)
FOUND = re.compile(r"\[(tfdp: [^\]]*)\]([^\n]*)")
# Of a hash: those of unlike values are alike in one of so many cases.
BUCKETS = 2**62

Parts = tuple[Any, ...]


def joined_outputs(
    outputs: Any,
    run: ReplicaRun,
    strategy: tf.distribute.Strategy,
    of_all_hosts: Callable[[tf.Tensor], tf.Tensor],
    own_rows_of: Callable[[list[Any]], list[Any]],
    rows_of_all_hosts: Callable[[list[Any]], list[Any]],
) -> Any:
    """`outputs`, so that Keras joins them to what one device returns.

    Args:
      outputs: nested per-replica tensors, in cross-replica context.
      run: that they are of.
      strategy: whose replicas they are.
      of_all_hosts: joins vectors.
      own_rows_of: leaves out what was computed of filling and of borrowed rows.
      rows_of_all_hosts: joins rows.

    Raises:
      ConfigurationError: in eager mode: they cannot be joined. In graphs it is the
        message of an error that `why_not_joined` finds.
    """
    parts_of = strategy.experimental_local_results
    leaves = tf.nest.flatten(outputs)
    names = _names_of(outputs)

    def checked(
        place: int, values: Sequence[Any], marked: Any, parts: Parts, why: str
    ) -> Any:
        marks = of_all_hosts(tf.stack([_mark(one) for one in marked]))
        is_same = tf.reduce_all(tf.equal(marks, marks[0]))
        return _checked(values, is_same, why.format(name=names[place]), parts)

    with_rows = []
    for place, leaf in enumerate(leaves):
        parts = parts_of(leaf)
        if not _are_dense(parts) or _has_rows(run, parts[0]):
            with_rows.append(place)
        else:
            (leaves[place],) = checked(place, parts[:1], parts, parts, NO_ROWS)
    rows = own_rows_of([leaves[place] for place in with_rows])
    for number, place in enumerate(with_rows):
        parts = parts_of(rows[number])
        if _are_dense(parts) and not _are_of_one_size(parts):
            sizes = [tf.shape(part)[1:] for part in parts]
            parts = checked(place, parts, sizes, parts, WIDTHS)
            is_one = not isinstance(rows[number], PerReplica)
            rows[number] = parts[0] if is_one else PerReplica(parts)
    for place, joined in zip(with_rows, rows_of_all_hosts(rows), strict=True):
        leaves[place] = joined
    return tf.nest.pack_sequence_as(outputs, leaves)


def why_not_joined(error: BaseException) -> ConfigurationError | None:
    """The error of tfdp that a failed check stands for; None: it is another one."""
    found = FOUND.search(str(error))
    if found is None:
        return None
    text = "".join(found.groups()).removeprefix("tfdp: ")
    return ConfigurationError(text.replace("\\'", "'"))  # TensorFlow escapes them


def _are_dense(parts: Parts) -> bool:
    return all(isinstance(part, tf.Tensor) for part in parts)


def _are_of_one_size(parts: Parts) -> bool:
    known = {tuple(part.shape[1:]) for part in parts}
    return len(known) == 1 and None not in next(iter(known))


def _mark(value: tf.Tensor) -> tf.Tensor:
    """A number that is another one for another value, type or shape."""
    with tf.device("CPU:0"):
        return tf.strings.to_hash_bucket_fast(tf.io.serialize_tensor(value), BUCKETS)


def _has_rows(run: ReplicaRun, output: tf.Tensor) -> bool:
    """Whether the first axis of what the first replica returned may be its rows'."""
    if not output.shape.rank:
        return False
    batch = run.batches.get(trace_of(0), [])
    rows, length = batch[0].shape[0] if batch else None, output.shape[0]
    if length is None:
        return True
    if rows is None and tf.executing_eagerly():
        rows = run.count_of(0)
    return rows is not None and (rows == 0 or length % int(rows) == 0)


def _checked(
    values: Sequence[Any], is_same: tf.Tensor, words: str, parts: Parts
) -> list[tf.Tensor]:
    shapes = tf.strings.join(
        [tf.strings.format("{}", tf.shape(part)) for part in parts], separator=", "
    )
    if tf.executing_eagerly():
        if not is_same:
            text = f"{words} {shapes.numpy().decode()}"
            raise ConfigurationError(text.removeprefix("tfdp: "))
        return list(values)
    with tf.device("CPU:0"):
        check = tf.debugging.Assert(is_same, [words, shapes])
    checked = []
    for value in values:
        with tf.control_dependencies([check]), tf.device(value.device):
            checked.append(tf.identity(value))
    return checked


def _names_of(outputs: Any) -> list[str]:
    """What to call each output in a message."""
    paths = [path for path, _ in keras.tree.flatten_with_path(outputs)]
    return [
        "the output " + ".".join(map(str, path)) if path else "the output"
        for path in paths
    ]


# What `strategy.reduce` is given, in shapes that can be added.


def parts_of_one_shape(value: Any, replicas: int) -> Any:
    """`value` with a zero where a Keras loss had no rows to take the mean of.

    Keras gives back the losses of no rows as they are, of shape (0,), in the place of
    their mean, a scalar.

    Args:
      value: a structure of per-replica values, to be reduced over the replicas only.
      replicas: how many there are, on all hosts.

    Raises:
      ConfigurationError: when parts surely have shapes that cannot be added.
    """

    def with_zeros(whole: Any) -> Any:
        is_dense = isinstance(whole, PerReplica) and all(
            isinstance(part, tf.Tensor) for part in whole.values
        )
        if not is_dense:
            return whole
        shapes = {tuple(part.shape) if part.shape.rank else () for part in whole.values}
        others_may_be_scalars = len(whole.values) < replicas
        if shapes == {(), (0,)} or (shapes == {(0,)} and others_may_be_scalars):
            return PerReplica(tuple(map(_or_zero, whole.values)))
        first, *others = [part.shape for part in whole.values]
        if not all(first.is_compatible_with(other) for other in others):
            raise ConfigurationError(
                "strategy.reduce adds the replicas' values, and these have the shapes "
                f"{', '.join(str(part.shape) for part in whole.values)}. For values "
                "by row pass axis=0; to join them use strategy.gather."
            )
        return whole

    return tf.nest.map_structure(with_zeros, value)


def _or_zero(part: tf.Tensor) -> tf.Tensor:
    return tf.zeros([], part.dtype) if part.shape.rank else part
