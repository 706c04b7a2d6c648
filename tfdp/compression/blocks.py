"""Values in blocks of fixed size, each in a few bits and a scale of its own.

A variable is filled up to whole blocks, so that none holds numbers of two variables,
which may differ in size by orders of magnitude.
"""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdp.checks import is_whole
from tfdp.compression.method import (
    Exchanged,
    Method,
    Peers,
    Slots,
    all_reduce_bytes,
)

# Up to so many peers everybody's message goes to everybody. Among more, each adds up a
# part for all and sends the sum, rounded again.
MOST_THAT_GATHER = 2
#: Numbers of a value that is worth a call of its own.
LEAST_ALONE = 1 << 17


def is_block(size: object, least: int) -> bool:
    """Whether it is a size of blocks: a multiple of `least`, the numbers of a word."""
    return is_whole(size, least=least) and size % least == 0


@dataclasses.dataclass(frozen=True)
class Blockwise(Method):
    """Blocks of `block_size` numbers, as rows of words: the scale, then the codes."""

    @property
    @abc.abstractmethod
    def elements_of_block(self) -> int:
        """The numbers in a block."""

    @abc.abstractmethod
    def encode_rows(self, rows: tf.Tensor) -> tf.Tensor:
        """float32 [blocks, elements] as int32 [blocks, words]."""

    @abc.abstractmethod
    def decode_rows(self, words: tf.Tensor) -> tf.Tensor:
        """int32 [..., blocks, words] as float32 [..., blocks, elements]."""

    def exchange(
        self,
        values: Sequence[tf.Tensor],
        slots: Sequence[Slots],
        peers: Peers,
        step: tf.Tensor,
    ) -> Exchanged:
        """See `Method.exchange`.

        Among more than two peers each one gets one part of all values, adds it up and
        sends the sum to all, rounded a second time; what that loses is left with the
        one that rounded.

        Cost: two peers: the message, one launch. p peers: 2 (p - 1) / p times the
        message, two launches, as an all-reduce; over sockets, where what is not for
        the next host is passed on, (p - 1) (1 / 2 + 1 / p) times.
        """
        if peers.size <= MOST_THAT_GATHER:
            return self._exchange_whole(values, slots, peers)
        rows = self.rows_of(values)
        totals, telling, left, message = self._exchange_parts(rows, peers)
        return Exchanged(
            self.values_of(totals, values),
            self.values_of(left, values),
            list(slots),
            # What is left of a number that was sent as one is no larger than the two.
            telling=[totals if telling is None else telling],
            begun=message,
        )

    def sent_bytes(self, shapes: Sequence[Sequence[int]], peers: int) -> float:
        """See `Method.sent_bytes`."""
        message = self.message_bytes(shapes)
        if peers <= MOST_THAT_GATHER:
            return message * (peers - 1)
        return all_reduce_bytes(message, peers)

    def message_bytes(self, shapes: Sequence[Sequence[int]]) -> int:
        """See `Method.message_bytes`."""
        size = self.elements_of_block
        words = self.encode_rows(tf.zeros([1, size])).shape[-1]
        return sum(-(-math.prod(shape) // size) * words * 4 for shape in shapes)

    def _exchange_whole(
        self, values: Sequence[tf.Tensor], slots: Sequence[Slots], peers: Peers
    ) -> Exchanged:
        """Everybody's message goes to everybody.

        Large values are encoded and decoded by themselves: of what lies in one tensor
        with others there is one copy more each time, of four times the message.
        """
        runs = _runs_of(values)
        encoded = [
            _compiled(self, "encode_with_left")(self.rows_of(run)) for run in runs
        ]
        words = [message for message, _ in encoded]
        message = words[0] if len(words) == 1 else tf.concat(words, 0)
        counts = [part.shape[0] for part in words]
        everybody, begun = peers.gather_ahead(message)
        messages = tf.split(everybody, counts, axis=1)
        summed = [self._summed(part) for part in messages]
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
        """The sums of `rows`, what tells of infinities in them, what of this peer's is
        not in them, and the message."""
        blocks = rows.shape[0]
        padded = tf.pad(rows, [[0, -blocks % peers.size], [0, 0]])
        message, left = _compiled(self, "encode_with_left")(padded)
        by_peer = tf.reshape(message, [peers.size, -1, message.shape[-1]])
        own_sum, _ = self._summed(peers.all_to_all(by_peer))
        again, lost = _compiled(self, "encode_with_left")(own_sum)
        parts = peers.gather(again)
        totals = tf.reshape(self._decoded(parts), padded.shape)
        left = tf.reshape(left, [peers.size, -1])
        # The second rounding was of a sum, so it is lost to all but kept by one.
        lost = tf.reshape(lost, [1, -1])
        mine = tf.one_hot([peers.place], peers.size, axis=0)
        left = tf.reshape(left + mine * lost, padded.shape)
        telling = self.largest_in(parts)
        return totals[:blocks], telling, left[:blocks], message

    def largest_in(self, words: tf.Tensor) -> tf.Tensor | None:
        """What no number of a block exceeds, of int32 [..., blocks, words].

        Not finite where a number that was sent was not. None: the numbers themselves
        have to be looked at.
        """
        return None

    def rows_of(self, values: Sequence[tf.Tensor]) -> tf.Tensor:
        """The values in blocks, [blocks, elements]."""
        size = self.elements_of_block
        parts = []
        for value in values:
            flat = tf.reshape(value, [-1])
            missing = -flat.shape[0] % size
            if missing:
                # With numbers of its own last block, not with zeros: a mean over the
                # block is that of its numbers then.
                elements = flat.shape[0]
                first = elements // size * size
                again = [first + n % (elements - first) for n in range(missing)]
                flat = tf.concat([flat, tf.gather(flat, again)], 0)
            parts.append(flat)
        flat = parts[0] if len(parts) == 1 else tf.concat(parts, 0)
        return tf.reshape(flat, [-1, size])

    def values_of(self, rows: tf.Tensor, like: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """The inverse of `rows_of`."""
        size = self.elements_of_block
        counts = [value.shape.num_elements() for value in like]
        blocks = [-(-count // size) for count in counts]
        parts = tf.split(rows, blocks) if len(blocks) > 1 else [rows]
        return [
            tf.reshape(tf.reshape(part, [-1])[:count], value.shape)
            for part, count, value in zip(parts, counts, like, strict=True)
        ]

    def _decoded(self, words: tf.Tensor) -> tf.Tensor:
        return _compiled(self, "decode_rows")(words)

    def _summed(self, messages: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor | None]:
        """See `sum_rows`."""
        return _compiled(self, "sum_rows")(messages)

    def encode_with_left(self, rows: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """The rows as words, and what of them the words do not have."""
        words = self.encode_rows(rows)
        return words, rows - self.decode_rows(words)

    def sum_rows(self, messages: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor | None]:
        """int32 [peers, blocks, words] as the float32 sum of the rows, in the order of
        the peers; and that of `largest_in`, which is finite only where all sums are."""
        total, most = self.decode_rows(messages[0]), self.largest_in(messages[0])
        for place in range(1, messages.shape[0]):
            total += self.decode_rows(messages[place])
            if most is not None:
                most += self.largest_in(messages[place])
        return total, most


def _runs_of(values: Sequence[tf.Tensor]) -> list[list[tf.Tensor]]:
    """The values in their order: large ones alone, small ones that follow together."""
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
    """A method's kernel, compiled by XLA: one pass over memory where ops take six."""
    key = (method, name)
    if key not in _functions:
        _functions[key] = tf.function(getattr(method, name), jit_compile=True)
    return _functions[key]
