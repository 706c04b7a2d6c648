"""Embedding tables in parts (`shard="parameters"`): only the rows of a batch travel.

The table of a `keras.layers.Embedding` rests by rows (`RowLayout`). A lookup is

    words of the replica's real rows, each once  ->  the owners of the table's rows
    rows of the table                           <-  their owners
    gradients of rows                            ->  their owners

and the gradient of a table is slices of the replica's part: those of one device's that
are of its rows, in one device's order, summed over the replicas and not yet added up.
So an optimizer that squares each occurrence of a word does here what it does there.
Where the update is the same a word's gradients are added before they travel.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf

from tfdp._private.keras_layers import stored_value
from tfdp._private.keras_models import layers_within
from tfdp._private.names import run_independently
from tfdp.chain.table_rows import looks_up_in_parts, sums_repeated_rows
from tfdp.exchange.ordering import exchanges_of
from tfdp.exchange.send_receive import sum_in_order
from tfdp.exchange.sparse import merge_rows
from tfdp.lint.registry import key_of, register
from tfdp.lint.values import OF_ALL, Term, Value
from tfdp.plan.shards import RowLayout
from tfdp.seams.replace import Override, around
from tfdp.sharding.updates import ShardTrace
from tfdp.sharding.variables import without_gradient
from tfdp.tracing.gradient_exchanges import name_of_gradient
from tfdp.tracing.state_checks import is_given_to_all
from tfdp.tracing.step import Step, current_step

if TYPE_CHECKING:
    from tfdp.step.call import StepCall


def table_overrides(call: StepCall) -> Iterator[Override]:
    """Overrides of the layers whose tables rest in parts; others gather theirs."""
    shards, given = call.strategy.extended.shards, call.strategy.given
    adds_all = given.has("Communication.repeated_rows")
    is_linear = all(map(sums_repeated_rows, call.optimizers)) and call.optimizers
    how = "once" if adds_all else "sums" if is_linear else "each"
    is_model = isinstance(call.model, keras.Model)
    layers = [*(layers_within(call.model) if is_model else ()), *shards.makers]
    for layer in dict.fromkeys(layers):
        if looks_up_in_parts(layer):
            yield Override(layer, "call", around(_look_up, layer, shards, how))


def _look_up(original: Callable, layer: Any, shards: Any, how: str, inputs: Any) -> Any:
    found, graph = current_step(), tf.compat.v1.get_default_graph()
    is_dense = isinstance(inputs, tf.Tensor) and bool(inputs.shape.rank)
    # Replicas cannot exchange in a loop or a function: there the table is gathered.
    in_step = tf.distribute.get_replica_context() is not None
    in_step = in_step and graph is shards.transport.order.run_graph
    if not is_dense or not in_step or found is None:
        return original(inputs)
    words = inputs if inputs.dtype in (tf.int32, tf.int64) else tf.cast(inputs, "int32")
    step, rank = found
    return _Lookup(layer, shards, step, rank, how).of(words)


@dataclasses.dataclass(frozen=True)
class _Request:
    """The words that a replica asks for, and those that it is asked for.

    Args:
      words: those of its real rows, flat, counted within their owners' parts.
      owners: the part of each.
      source: the place of each among the rows that the replica receives.
      sizes: how many of these come from each owner.
      asked: by member, the rows of the replica's part that it asks for.
    """

    words: tf.Tensor
    owners: tf.Tensor
    source: tf.Tensor
    sizes: tf.Tensor
    asked: Sequence[tf.Tensor]


class _Lookup:
    """One call of a layer with a table in parts, in replica context."""

    def __init__(self, layer: Any, shards: Any, step: Step, rank: Any, how: str):
        """`how` the gradients of a word arrive: "each", "sums" of replicas, "once"."""
        self._layer, self._how, self._step, self._rank = layer, how, step, rank
        self._table = stored_value(layer.embeddings)
        self._layout: RowLayout = self._table.update_layout
        transport = shards.transport
        self._members, self._place = transport.parts, transport.part_of(rank)
        self._device, self._transport = transport.devices[rank], transport
        self._is_of_all = False

    def of(self, words: tf.Tensor) -> tf.Tensor:
        """The rows of the table for `words`, in the layer's type."""
        rows = self._step.trace(self._rank).rows
        # A table of positions: replicas' gradients are added place by place.
        self._is_of_all = is_given_to_all(words, self._step, self._rank)
        real = words if self._is_of_all else rows.real_rows(words)
        name, width = name_of_gradient(), self._layout.shape[1:]
        with tf.device(self._device):
            request = self._request(self._checked(tf.reshape(real, [-1])))

            @tf.custom_gradient
            def take(part: tf.Tensor) -> Any:
                def gradient(upstream: tf.Tensor) -> tf.IndexedSlices:
                    with exchanges_of(name), tf.device(self._device):
                        return self._to_owners(upstream, request)

                return self._received(part, request), gradient

            flat = take(self._table.read_shard(self._rank))
            found = tf.reshape(flat, tf.concat([tf.shape(real), width], 0))
            if not self._is_of_all and rows.present is not True:
                missing = tf.shape(words)[0] * (1 - tf.cast(rows.present, tf.int32))
                shape = tf.concat([missing[None], tf.shape(found)[1:]], 0)
                found = tf.concat([found, tf.zeros(shape, found.dtype)], 0)
            found = tf.ensure_shape(found, [*words.shape, *width])
        register(found, OF_ALL if self._is_of_all else words)
        return found

    def _checked(self, words: tf.Tensor) -> tf.Tensor:
        """Words as 32 bits; negative ones count from the end, as in Keras' lookup."""
        size = self._layout.shape[0]
        least, most = tf.reduce_min(words), tf.reduce_max(words)
        what = f"The layer {self._layer.name} has rows for words 0 to {size - 1}."
        are_known = tf.reduce_all((words >= -size) & (words < size))
        given = [what, " Received words from ", least, " to ", most]
        check = tf.debugging.Assert(are_known, given)
        run_independently(check)  # not ordered after other replicas' checks
        with tf.control_dependencies([check]):
            return tf.cast(tf.where(words < 0, words + size, words), tf.int32)

    def _request(self, words: tf.Tensor) -> _Request:
        unique, places = tf.unique(words)
        owners, here = unique // self._layout.rows, unique % self._layout.rows
        numbers = tf.range(tf.size(unique))
        order = tf.concat(tf.dynamic_partition(numbers, owners, self._members), 0)
        outgoing = tf.dynamic_partition(here, owners, self._members)
        sizes = tf.stack([tf.size(each) for each in outgoing])
        if self._is_of_all:
            asked = [outgoing[self._place]] * self._members
        else:
            asked = self._swap(outgoing)
        source = tf.gather(tf.math.invert_permutation(order), places)
        owner_of_each = tf.gather(owners, places)
        return _Request(words % self._layout.rows, owner_of_each, source, sizes, asked)

    def _received(self, part: tf.Tensor, request: _Request) -> tf.Tensor:
        # Cast before it travels, as the gathered table would be after.
        dtype = self._layer.compute_dtype
        found = [tf.cast(tf.gather(part, rows), dtype) for rows in request.asked]
        return tf.gather(tf.concat(self._swap(found), 0), request.source)

    def _to_owners(self, upstream: tf.Tensor, request: _Request) -> tf.IndexedSlices:
        """The gradients of the replica's part of the table."""
        members, dtype = self._members, self._table.dtype
        upstream = tf.reshape(upstream, [-1, *self._layout.shape[1:]])
        if self._is_of_all:
            upstream = self._step.own_gradient(self._rank, upstream)
        if self._how == "each" or self._is_of_all:
            sent = tf.dynamic_partition(upstream, request.owners, members)
            rows = tf.dynamic_partition(request.words, request.owners, members)
        else:
            total = tf.reduce_sum(request.sizes)
            sums = tf.math.unsorted_segment_sum(
                tf.cast(upstream, dtype), request.source, total
            )
            sent = tf.split(sums, request.sizes, num=members)
            rows = None
        pieces = [tf.cast(piece, dtype) for piece in self._swap(sent)]
        if self._is_of_all:
            values, indices = sum_in_order(pieces), rows[self._place]
        else:
            asked = request.asked if rows is None else self._swap(rows)
            values, indices = tf.concat(pieces, 0), tf.concat(asked, 0)
        return self._noted(values, indices)

    def _noted(self, values: tf.Tensor, indices: tf.Tensor) -> tf.IndexedSlices:
        shape = tf.constant(self._layout.shard_shape(self._place))
        own = tf.IndexedSlices(without_gradient(values), indices, shape)
        if self._how == "once":
            own = merge_rows(own)
        register(own, Value(terms=frozenset({Term.SHARD})))
        self._step.trace(self._rank).of(ShardTrace).gradients[key_of(own.values)] = own
        return own

    def _swap(self, outgoing: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        received: list[tf.Tensor] = self._transport.to_each(outgoing, self._rank)
        return received
