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
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

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
from tfdp.tracing.keras_steps import is_stock_step, name_of_step
from tfdp.tracing.state_checks import is_given_to_all
from tfdp.tracing.step import Step, current_step

if TYPE_CHECKING:
    from tfdp.step.call import StepCall


def table_overrides(call: StepCall) -> Iterator[Override]:
    """Overrides of the layers whose tables rest in parts; others gather theirs.

    So does a step that trains by itself: it may read the words of a gradient, which are
    counted within a part here, or change values of occurrences, which are sums here.
    """
    is_evaluation = call.is_prediction or name_of_step(call.fn) == "test_step"
    if not is_stock_step(call.fn) and not is_evaluation:
        return
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


class _ByOwner(NamedTuple):
    """The order of rows by the members that own them.

    Args:
      order: the place of each, among rows in another order.
      sizes: how many each member owns.
    """

    order: tf.Tensor
    sizes: tf.Tensor

    @classmethod
    def of(cls, owners: tf.Tensor, members: int) -> _ByOwner:
        """The order of rows with these owners, stable."""
        is_of = tf.equal(owners[:, None], tf.range(members))
        sizes = tf.reduce_sum(tf.cast(is_of, tf.int32), 0)
        return cls(tf.argsort(owners, stable=True), sizes)


@dataclasses.dataclass(frozen=True)
class _Request:
    """The words that a replica asks for, and those that it is asked for.

    Args:
      words: those of its real rows, flat, counted within their owners' parts.
      owners: the part of each.
      by_owner: their order by these.
      source: the place of each among the rows that the replica receives.
      asked: the rows of the replica's part that others ask for, by member.
      numbers: [members, members], how many rows each asks of each.
      numbers_of_words: the same with each occurrence of a word.
    """

    words: tf.Tensor
    owners: tf.Tensor
    by_owner: _ByOwner
    source: tf.Tensor
    asked: tf.Tensor
    numbers: tf.Tensor
    numbers_of_words: tf.Tensor


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
        self._is_of_all, self._label = False, ""

    def of(self, words: tf.Tensor) -> tf.Tensor:
        """The rows of the table for `words`, in the layer's type."""
        rows = self._step.trace(self._rank).rows
        # A table of positions: replicas' gradients are added place by place.
        self._is_of_all = is_given_to_all(words, self._step, self._rank)
        real = words if self._is_of_all else rows.real_rows(words)
        name = name_of_gradient()
        self._label = f"rows of lookup {name.rstrip('.')}"
        with tf.device(self._device):
            request = self._request(self._checked(tf.reshape(real, [-1])))

            # All in one: tapes of hosts with and without rows go in the same order.
            @tf.custom_gradient
            def take(part: tf.Tensor) -> Any:
                def gradient(upstream: tf.Tensor) -> tf.IndexedSlices:
                    upstream = tf.convert_to_tensor(upstream)  # of some rows: slices
                    with exchanges_of(name), tf.device(self._device):
                        own = upstream if self._is_of_all else rows.real_rows(upstream)
                        return self._to_owners(own, request)

                return self._shaped(self._received(part, request), words), gradient

            found = take(self._table.read_shard(self._rank))
        register(found, OF_ALL if self._is_of_all else words)
        return found

    def _shaped(self, found: tf.Tensor, words: tf.Tensor) -> tf.Tensor:
        """Rows in the shape of words, with zeros for a dummy row."""
        shape = tf.concat([tf.shape(words), self._layout.shape[1:]], 0)
        if (
            not self._is_of_all
            and self._step.trace(self._rank).rows.present is not True
        ):
            missing = tf.reduce_prod(shape[:-1]) - tf.shape(found)[0]
            found = tf.pad(found, [[0, missing], [0, 0]])
        found = tf.reshape(found, shape)
        return tf.ensure_shape(found, [*words.shape, *self._layout.shape[1:]])

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
        owner_of_each = tf.gather(owners, places)
        by_owner = _ByOwner.of(owners, self._members)
        of_words = _ByOwner.of(owner_of_each, self._members)
        sizes = tf.concat([by_owner.sizes, of_words.sizes], 0)
        if self._is_of_all:
            own = tf.boolean_mask(here, tf.equal(owners, self._place))
            asked = tf.tile(own, [self._members])
            of_all = tf.tile(sizes[None], [self._members, 1])
            numbers = tf.split(of_all, 2, axis=1)
        else:
            layout = RowLayout((self._members, 2 * self._members), self._members)
            # Once for all exchanges of a lookup.
            [of_all] = self._transport.all_gather(
                [sizes], [layout], self._rank, f"numbers of {self._label}"
            )
            numbers = tf.split(of_all, 2, axis=1)
            asked = self._to_each(tf.gather(here, by_owner.order), numbers[0])
        source = tf.gather(tf.math.invert_permutation(by_owner.order), places)
        words %= self._layout.rows
        return _Request(words, owner_of_each, of_words, source, asked, *numbers)

    def _received(self, part: tf.Tensor, request: _Request) -> tf.Tensor:
        # Cast before it travels, as the gathered table would be after.
        found = tf.cast(tf.gather(part, request.asked), self._layer.compute_dtype)
        rows = self._to_each(found, tf.transpose(request.numbers))
        return tf.gather(rows, request.source)

    def _to_owners(self, upstream: tf.Tensor, request: _Request) -> tf.IndexedSlices:
        """The gradients of the replica's part of the table."""
        dtype = self._table.dtype
        upstream = tf.reshape(upstream, [-1, *self._layout.shape[1:]])
        if self._how != "each" and not self._is_of_all:
            total = tf.reduce_sum(request.numbers[self._place])
            values = tf.cast(upstream, dtype)
            sums = tf.math.unsorted_segment_sum(values, request.source, total)
            return self._noted(self._to_each(sums, request.numbers), request.asked)
        order, numbers = request.by_owner.order, request.numbers_of_words
        if self._is_of_all:
            upstream = self._step.own_gradient(self._rank, upstream)
        values = self._to_each(tf.gather(upstream, order), numbers)
        values = tf.cast(values, dtype)
        if self._is_of_all:  # the same words from each
            words = tf.equal(request.owners, self._place)
            indices = tf.boolean_mask(request.words, words)
            return self._noted(sum_in_order(tf.split(values, self._members)), indices)
        indices = self._to_each(tf.gather(request.words, order), numbers)
        return self._noted(values, indices)

    def _to_each(self, rows: tf.Tensor, numbers: tf.Tensor) -> tf.Tensor:
        """Sends as many rows to each as `numbers` says; those that came."""
        found: tf.Tensor = self._transport.to_each(
            rows, numbers, self._rank, self._label
        )
        return found

    def _noted(self, values: tf.Tensor, indices: tf.Tensor) -> tf.IndexedSlices:
        shape = tf.constant(self._layout.shard_shape(self._place))
        own = tf.IndexedSlices(without_gradient(values), indices, shape)
        if self._how == "once":
            own = merge_rows(own)
        register(own, Value(terms=frozenset({Term.SHARD})))
        self._step.trace(self._rank).of(ShardTrace).gradients[key_of(own.values)] = own
        return own
