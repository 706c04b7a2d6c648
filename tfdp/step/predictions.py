"""Joins the replicas' predictions as one device would return them.

Keras joins outputs along their first axis, right for one value per row. Other outputs,
such as a temperature, are returned once if all replicas have the same value.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdp._private.names import PerReplica
from tfdp.errors import ConfigurationError
from tfdp.lint.registry import is_of_graph
from tfdp.lint.values import SELECTED, Term
from tfdp.tracing.step import Step

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
# The range of hashes that are compared instead of values.
BUCKETS = 2**62


def joined_outputs(
    outputs: Any,
    step: Step,
    strategy: tf.distribute.Strategy,
    of_all_hosts: Callable[[tf.Tensor], tf.Tensor],
    real_rows_of: Callable[[list[Any]], list[Any]],
    rows_of_all_hosts: Callable[[list[Any]], list[Any]],
) -> Any:
    """`outputs` such that Keras joins them to what one device returns.

    Args:
      outputs: nested per-replica tensors, in cross-replica context.
      of_all_hosts, rows_of_all_hosts: join vectors, and rows.
      real_rows_of: removes padding and dummy rows.

    Raises:
      InvalidArgumentError: at run time, if they cannot be joined; `why_not_joined`
        converts it.
    """
    parts_of = strategy.experimental_local_results
    leaves = tf.nest.flatten(outputs)
    paths = [path for path, _ in keras.tree.flatten_with_path(outputs)]
    names = [f"the output {'.'.join(map(str, path))}".strip() for path in paths]

    def checked(place: int, values: Any, marked: Any, parts: Any, why: str) -> Any:
        marks = of_all_hosts(tf.stack([_mark(one) for one in marked]))
        is_same = tf.reduce_all(tf.equal(marks, marks[0]))
        return _checked(values, is_same, why.format(name=names[place]), parts)

    with_rows = []
    for place, leaf in enumerate(leaves):
        parts = parts_of(leaf)
        if not _are_dense(parts) or _has_rows(step, parts[0]):
            with_rows.append(place)
        else:
            (leaves[place],) = checked(place, parts[:1], parts, parts, NO_ROWS)
    rows = real_rows_of([leaves[place] for place in with_rows])
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
    """The error for a failed check; None: it is another error."""
    found = FOUND.search(str(error))
    if found is None:
        return None
    text = "".join(found.groups()).removeprefix("tfdp: ")
    return ConfigurationError(text.replace("\\'", "'"))  # TensorFlow escapes them


def _are_dense(parts: Sequence[Any]) -> bool:
    return all(isinstance(part, tf.Tensor) for part in parts)


def _are_of_one_size(parts: Sequence[Any]) -> bool:
    known = {tuple(part.shape[1:]) for part in parts}
    return len(known) == 1 and None not in next(iter(known))


def _mark(value: tf.Tensor) -> tf.Tensor:
    with tf.device("CPU:0"):
        return tf.strings.to_hash_bucket_fast(tf.io.serialize_tensor(value), BUCKETS)


def _has_rows(step: Step, output: tf.Tensor) -> bool:
    """Whether the first axis of the first replica's output is that of its rows; where
    that is unknown, whether it may be."""
    if not output.shape.rank:
        return False
    if is_of_graph(output):
        value = step.analysis(0).value(output)
        if value.axes:
            return value.axes == (0,) and value.each != SELECTED
        if Term.REPLICATED in value.terms and not value.local:
            return False  # of variables, or of all replicas
    batch = step.traces[0].batch
    rows, length = batch[0].shape[0] if batch else None, output.shape[0]
    if length is None:
        return True
    return rows is not None and (rows == 0 or length % int(rows) == 0)


def _checked(
    values: Sequence[Any], is_same: tf.Tensor, words: str, parts: Sequence[Any]
) -> list[tf.Tensor]:
    texts = [tf.strings.format("{}", tf.shape(part)) for part in parts]
    shapes = tf.strings.join(texts, separator=", ")
    with tf.device("CPU:0"):
        check = tf.debugging.Assert(is_same, [words, shapes])
    checked = []
    for value in values:
        with tf.control_dependencies([check]), tf.device(value.device):
            checked.append(tf.identity(value))
    return checked


def parts_of_one_shape(value: Any, replicas: int) -> Any:
    """`value` with zeros instead of losses of no rows, for `strategy.reduce`.

    Keras returns losses of no rows unreduced, with shape (0,), instead of their mean, a
    scalar. `replicas` is their number on all hosts.

    Raises:
      ConfigurationError: when parts certainly have shapes that cannot be added.
    """

    def with_zeros(whole: Any) -> Any:
        if not isinstance(whole, PerReplica) or not _are_dense(whole.values):
            return whole
        parts = whole.values
        shapes = {tuple(part.shape) if part.shape.rank else () for part in parts}
        others_may_be_scalars = len(parts) < replicas
        if shapes == {(), (0,)} or (shapes == {(0,)} and others_may_be_scalars):
            zeros = (tf.zeros([], p.dtype) if p.shape.rank else p for p in parts)
            return PerReplica(tuple(zeros))
        if not all(parts[0].shape.is_compatible_with(part.shape) for part in parts):
            raise ConfigurationError(
                "strategy.reduce adds the replicas' values, and these have the shapes "
                f"{', '.join(str(part.shape) for part in parts)}. For values by row "
                "pass axis=0; to join them use strategy.gather."
            )
        return whole

    return tf.nest.map_structure(with_zeros, value)
