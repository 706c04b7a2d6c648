"""Means over the tokens that a mask keeps, taken by hand: what is told, and the line
that the warning names."""

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tests.support.parity import largest_difference, make_strategy
from tfdp.errors import LocalMeanWarning, LocalStateWarning

VOCABULARY = 11


def tokens():
    x = np.random.default_rng(0).integers(1, VOCABULARY, (24, 5))
    x[1::3, 2:] = 0  # replicas keep different numbers of tokens
    return x


def counted(mask, how):
    count = tf.reduce_sum(mask)
    return {"plain": count, "constant": count + 1e-6, "maximum": tf.maximum(count, 1)}[
        how
    ]


class Language(keras.Model):
    """A language model with a `train_step` of its own."""

    def __init__(self, loss_of):
        super().__init__()
        self.inside = keras.Sequential(
            [keras.layers.Embedding(VOCABULARY, 6), keras.layers.Dense(VOCABULARY)]
        )
        self.loss_of = loss_of

    def call(self, x):
        return self.inside(x)

    def train_step(self, data):
        x, y = data
        mask = tf.cast(y != 0, tf.float32)
        with tf.GradientTape() as tape:
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(y, self(x))
            loss, reported = self.loss_of(losses, mask)
        variables = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        return {"perplexity": tf.exp(reported)}


def trained(strategy, loss_of):
    keras.utils.set_random_seed(3)
    with (strategy or tf.distribute.get_strategy()).scope():
        model = Language(loss_of)
        model.build((None, 5))
        model.compile(keras.optimizers.SGD(0.5), jit_compile=False)
    history = model.fit(tokens(), tokens(), batch_size=8, shuffle=False, verbose=0)
    return model, history.history["perplexity"]


@pytest.mark.parametrize("how", ["plain", "constant", "maximum"])
def test_a_masked_mean_is_told_once_in_two_sentences_with_its_line(how):
    def of_own(losses, mask):
        loss = tf.reduce_sum(losses * mask) / counted(mask, how)
        return loss, loss

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        trained(make_strategy(2), of_own)
    ours = [one for one in told if issubclass(one.category, UserWarning)]
    (message,) = [str(one.message) for one in ours if "model" in str(one.message)]
    assert "tokens that a mask keeps" in message
    assert "/ tfdp.losses.all_sum(tf.reduce_sum(mask))" in message
    assert message.count(". ") == 1


def test_the_line_that_the_warning_names_is_exact_with_its_perplexity():
    def of_all(losses, mask):
        loss = tfdp.losses.local_sum(
            tf.reduce_sum(losses * mask) / tfdp.losses.all_sum(tf.reduce_sum(mask))
        )
        return loss, tfdp.losses.all_sum(loss)

    one, perplexity = trained(None, of_all)
    with warnings.catch_warnings():
        warnings.simplefilter("error", LocalMeanWarning)
        warnings.simplefilter("error", LocalStateWarning)
        several, of_several = trained(make_strategy(2), of_all)
    # 3 updates with a rate of 0.5 on gradients below 1.
    assert largest_difference(one, several) < 1e-6
    np.testing.assert_allclose(of_several, perplexity, rtol=1e-5)


def test_a_mean_names_the_number_to_report():
    """The scaled loss is half of it on two replicas: its exponential is the root."""

    def of_own(losses, mask):
        loss = tf.reduce_mean(losses)
        return loss, loss

    with pytest.warns(LocalMeanWarning, match="keep the unscaled loss for metrics"):
        trained(make_strategy(2), of_own)
