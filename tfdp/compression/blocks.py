"""Methods that encode blocks of fixed size, each with few bits per number and a scale.

A variable is padded to whole blocks, so that no block mixes numbers of two variables,
which may differ by orders of magnitude.
"""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdp._private.functions import compiled_by_xla
from tfdp.checks import is_whole
from tfdp.compression.method import (
    Exchanged,
    Method,
    Peers,
    Slots,
    Tensors,
    all_reduce_bytes,
)

# Without its sign bit a float32 has the order of its bits, read as an integer.
ALL_BUT_SIGN = 0x7FFFFFFF

# Up to this many peers send each other their whole messages. Among more, each peer adds
# up one part for all and sends the sum, rounded again.
MOST_THAT_GATHER = 2
#: Values of at least this many numbers are encoded in a separate call.
LEAST_ALONE = 1 << 17


def is_block(size: object, least: int) -> bool:
    """Whether `size` is a block size: a multiple of `least`, the numbers of a word."""
    return is_whole(size, least=least) and size % least == 0


@dataclasses.dataclass(frozen=True)
class Blockwise(Method):
    """Blocks of `elements_of_block` numbers, as rows of words: the scale, the codes."""

    @property
    @abc.abstractmethod
    def elements_of_block(self) -> int:
        """The number of elements in a block."""

    @abc.abstractmethod
    def encode_rows(self, rows: tf.Tensor) -> tf.Tensor:
        """float32 [blocks, elements] as int32 [blocks, words]."""

    @abc.abstractmethod
    def decode_rows(self, words: tf.Tensor) -> tf.Tensor:
        """int32 [..., blocks, words] as float32 [..., blocks, elements]."""

    def exchange(
        self, values: Tensors, slots: Sequence[Slots], peers: Peers, step: tf.Tensor
    ) -> Exchanged:
        """See `Method.exchange`.

        Among more than two peers each one adds up one part of all values and sends the
        sum to all, rounded a second time; it keeps the error of that rounding.

        Cost: two peers: the message, one launch. p peers: 2 (p - 1) / p times the
        message, two launches, as an all-reduce; over sockets, where hosts forward what
        is not for the next one, (p - 1) (1 / 2 + 1 / p) times.
        """
        if peers.size <= MOST_THAT_GATHER:
            return self._exchange_whole(values, slots, peers)
        rows = self.rows_of(values)
        totals, telling, left, message = self._exchange_parts(rows, peers)
        return Exchanged(
            self.values_of(totals, values),
            self.values_of(left, values),
            list(slots),
            # The residual of a number that was sent as finite is at most as large.
            telling=[totals if telling is None else telling],
            begun=message,
        )

    def sent_bytes(self, shapes: Sequence[Sequence[int]], peers: int) -> float:
        message = self.message_bytes(shapes)
        if peers <= MOST_THAT_GATHER:
            return message * (peers - 1)
        return all_reduce_bytes(message, peers)

    def message_bytes(self, shapes: Sequence[Sequence[int]]) -> int:
        size = self.elements_of_block
        words = self.encode_rows(tf.zeros([1, size])).shape[-1]
        return sum(-(-math.prod(shape) // size) * words * 4 for shape in shapes)

    def _exchange_whole(
        self, values: Tensors, slots: Sequence[Slots], peers: Peers
    ) -> Exchanged:
        """All peers send each other their whole messages.

        Large values are encoded and decoded separately: packing them with others would
        add a copy each time, of four times the message.
        """
        runs = _runs_of(values)
        encoded = [
            _compiled(self, "encode_with_left")(self.rows_of(run)) for run in runs
        ]
        words = [message for message, _ in encoded]
        message = words[0] if len(words) == 1 else tf.concat(words, 0)
        counts = [part.shape[0] for part in words]
        received, begun = peers.gather_ahead(message)
        messages = tf.split(received, counts, axis=1)
        summed = [_compiled(self, "sum_rows")(part) for part in messages]
        rows_left = [left for _, left in encoded]
        sums, lefts = [], []
        for run, (total, _), left in zip(runs, summed, rows_left, strict=True):
            sums += self.values_of(total, run)
            lefts += self.values_of(left, run)
        telling = [total if most is None else most for total, most in summed]
        return Exchanged(sums, lefts, list(slots), telling=telling, begun=begun)

    def _exchange_parts(
        self, rows: tf.Tensor, peers: Peers
    ) -> tuple[tf.Tensor, tf.Tensor | None, tf.Tensor, tf.Tensor]:
        """The sums of `rows`, `largest_in` them, this peer's residual and message."""
        blocks = rows.shape[0]
        padded = tf.pad(rows, [[0, -blocks % peers.size], [0, 0]])
        message, left = _compiled(self, "encode_with_left")(padded)
        by_peer = tf.reshape(message, [peers.size, -1, message.shape[-1]])
        own_sum, _ = _compiled(self, "sum_rows")(peers.all_to_all(by_peer))
        again, lost = _compiled(self, "encode_with_left")(own_sum)
        parts = peers.gather(again)
        totals = tf.reshape(_compiled(self, "decode_rows")(parts), padded.shape)
        left = tf.reshape(left, [peers.size, -1])
        # The second rounding was of a sum: one peer keeps its error, for all.
        lost = tf.reshape(lost, [1, -1])
        mine = tf.one_hot([peers.place], peers.size, axis=0)
        left = tf.reshape(left + mine * lost, padded.shape)
        telling = self.largest_in(parts)
        return totals[:blocks], telling, left[:blocks], message

    def largest_in(self, words: tf.Tensor) -> tf.Tensor | None:
        """An upper bound of the numbers of each block, of int32 [..., blocks, words].

        Not finite where a sent number was not. None: check the numbers themselves.
        """
        return None

    def rows_of(self, values: Tensors) -> tf.Tensor:
        """The values in blocks, [blocks, elements]."""
        size = self.elements_of_block
        parts = []
        for value in values:
            flat = tf.reshape(value, [-1])
            missing = -flat.shape[0] % size
            if missing:
                # With numbers of its own last block, not with zeros, so that a mean
                # over the block is that of its numbers.
                elements = flat.shape[0]
                first = elements // size * size
                again = [first + n % (elements - first) for n in range(missing)]
                flat = tf.concat([flat, tf.gather(flat, again)], 0)
            parts.append(flat)
        flat = parts[0] if len(parts) == 1 else tf.concat(parts, 0)
        return tf.reshape(flat, [-1, size])

    def values_of(self, rows: tf.Tensor, like: Tensors) -> list[tf.Tensor]:
        size = self.elements_of_block
        counts = [value.shape.num_elements() for value in like]
        blocks = [-(-count // size) for count in counts]
        parts = tf.split(rows, blocks) if len(blocks) > 1 else [rows]
        return [
            tf.reshape(tf.reshape(part, [-1])[:count], value.shape)
            for part, count, value in zip(parts, counts, like, strict=True)
        ]

    def encode_with_left(self, rows: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """The rows as words, and their rounding errors."""
        words = self.encode_rows(rows)
        return words, rows - self.decode_rows(words)

    def sum_rows(self, messages: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor | None]:
        """int32 [peers, blocks, words] as the float32 sum of the rows in peer order,
        and the sum of `largest_in`, which is finite only where all sums are."""
        total, most = self.decode_rows(messages[0]), self.largest_in(messages[0])
        for place in range(1, messages.shape[0]):
            total += self.decode_rows(messages[place])
            if most is not None:
                most += self.largest_in(messages[place])
        return total, most


def _runs_of(values: Tensors) -> list[list[tf.Tensor]]:
    """The values in their order: large ones alone, adjacent small ones together."""
    runs: list[list[tf.Tensor]] = []
    was_small = False
    for value in values:
        is_small = value.shape.num_elements() < LEAST_ALONE
        if is_small and was_small:
            runs[-1].append(value)
        else:
            runs.append([value])
        was_small = is_small
    return runs


_functions: dict[tuple[Blockwise, str], Any] = {}


def _compiled(method: Blockwise, name: str) -> Any:
    """A method's kernel, compiled by XLA: one pass over memory where ops need six."""
    key = (method, name)
    if key not in _functions:
        _functions[key] = compiled_by_xla(getattr(method, name))
    return _functions[key]
