"""Draws that repeat after a few rows, so that N replicas draw as one device.

Each replica draws for its own rows, by design from numbers of its own. While a model is
compared, `keras.random` draws the rows of a period and repeats them: the noise of a
VAE, the times of a diffusion. If each replica's rows are whole periods, row i gets the
same numbers on a replica and on one device. The rows of a period differ, since a batch
normalization of equal rows is nothing but rounding. A wrong step still shows.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from tfdp.seams.replace import class_attribute
from tfdp.seams.table import KERAS_RANDOM, TENSORFLOW_RANDOM

# The generators of replicas have states of their own: their draws do not use these.
SEED = 1903
OF_SHAPE = ("normal", "uniform", "truncated_normal", "randint")
# The parameters of TensorFlow's functions between `shape` and `seed`.
OF_TENSORFLOW = {
    "normal": ("mean", "stddev", "dtype"),
    "uniform": ("minval", "maxval", "dtype"),
    "truncated_normal": ("mean", "stddev", "dtype"),
}


@dataclasses.dataclass
class Draws:
    """Draws of one training.

    Args:
      period: rows after which draws repeat, at least 1.
      has_drawn: whether rows of a batch may have got numbers of their own.
    """

    period: int
    has_drawn: bool = False

    def repeated(self, shape: tf.Tensor, draw: Callable[[Any], Any]) -> Any:
        """Values of `shape`, of rank 1 or more; `draw` makes those of a shape."""
        self.has_drawn = True
        drawn = draw(tf.concat([[self.period], shape[1:]], 0))
        times = tf.concat([[shape[0] // self.period + 1], tf.ones_like(shape[1:])], 0)
        # The broadcast keeps a static shape.
        return tf.broadcast_to(tf.tile(drawn, times)[: shape[0]], shape)


@contextlib.contextmanager
def alike_draws(period: int) -> Iterator[Draws]:
    """Makes `keras.random`, and the common functions of `tf.random`, draw the same
    numbers again after `period` rows, within the context."""
    draws = Draws(period)
    with contextlib.ExitStack() as stack:
        for name in OF_SHAPE:
            made = functools.partial(_of_shape, draws)
            stack.enter_context(class_attribute(KERAS_RANDOM, name, made))
        for name in OF_TENSORFLOW:
            made = functools.partial(_of_tensorflow, draws, name)
            stack.enter_context(class_attribute(TENSORFLOW_RANDOM, name, made))
        stack.enter_context(class_attribute(KERAS_RANDOM, "dropout", _dropout))
        stack.enter_context(class_attribute(KERAS_RANDOM, "categorical", _categorical))
        yield draws


def _of_shape(draws: Draws, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def draw(shape: Any, *args: Any, seed: Any = None, **kwargs: Any) -> Any:
        whole = tf.convert_to_tensor(shape, tf.int32)
        if not whole.shape[0]:  # a number
            return original(shape, *args, seed=SEED, **kwargs)
        return draws.repeated(
            whole, lambda part: original(part, *args, seed=SEED, **kwargs)
        )

    return draw


def _of_tensorflow(
    draws: Draws, name: str, original: Callable[..., Any]
) -> Callable[..., Any]:
    stateless = getattr(tf.random, f"stateless_{name}")

    @functools.wraps(original)
    def draw(shape: Any, *args: Any, seed: Any = None, **kwargs: Any) -> Any:
        given = dict(zip(OF_TENSORFLOW[name], args, strict=False)) | kwargs
        whole = tf.convert_to_tensor(shape, tf.int32)
        if not whole.shape[0]:
            return stateless(shape, [SEED, 0], **given)
        return draws.repeated(whole, lambda part: stateless(part, [SEED, 0], **given))

    return draw


def _dropout(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def drop(inputs: Any, rate: Any, noise_shape: Any = None, seed: Any = None) -> Any:
        rank = len(inputs.shape)
        noise = list(noise_shape or [None] * rank)
        return original(inputs, rate, noise_shape=[1, *noise[1:]], seed=SEED)

    return drop


def _categorical(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def draw(
        logits: Any, num_samples: Any, dtype: Any = "int64", seed: Any = None
    ) -> Any:
        # The largest of logits with Gumbel noise: E. J. Gumbel, 1954.
        classes = tf.shape(logits)[-1]
        drawn = tf.random.stateless_uniform(
            [1, num_samples, classes], [SEED, 0], minval=1e-7, dtype=logits.dtype
        )
        noise = -tf.math.log(-tf.math.log(drawn))
        return tf.argmax(logits[:, None, :] + noise, axis=-1, output_type=dtype)

    return draw
