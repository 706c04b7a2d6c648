"""Optimizers of a program's own that look at all gradients before Keras does."""

import keras
import pytest
import tensorflow as tf

import tfdp
from tests.support.parity import (
    classification_data,
    dense_model,
    largest_difference,
    loss_and_gradients,
    make_strategy,
)
from tfdp.errors import ConfigurationError


def clipped(gradients):
    return [g / keras.ops.maximum(10 * keras.ops.norm(g), 1.0) for g in gradients]


class InApply(keras.optimizers.SGD):
    def apply(self, grads, trainable_variables=None):
        return super().apply(clipped(grads), trainable_variables)


class InApplyGradients(keras.optimizers.SGD):
    def apply_gradients(self, grads_and_vars):
        gradients, variables = zip(*grads_and_vars, strict=True)
        pairs = zip(clipped(gradients), variables, strict=True)
        return super().apply_gradients(pairs)


class InClipping(keras.optimizers.SGD):
    def _clip_gradients(self, grads):
        return clipped(grads)


class InUpdateStep(keras.optimizers.SGD):
    def _backend_update_step(self, grads, trainable_variables, learning_rate):
        grads = clipped(grads)
        super()._backend_update_step(grads, trainable_variables, learning_rate)


class InReduction(keras.optimizers.SGD):
    def _all_reduce_sum_gradients(self, grads_and_vars):
        pairs = super()._all_reduce_sum_gradients(grads_and_vars)
        return [(g / 2, v) for g, v in pairs]


class OwnTest(keras.optimizers.LossScaleOptimizer):
    def check_finite(self, grads):
        return keras.ops.all([keras.ops.norm(g) < 1e9 for g in grads])


class Halving(keras.optimizers.SGD):
    """Of an element it looks at that element only."""

    is_elementwise = True

    def apply(self, grads, trainable_variables=None):
        return super().apply([g / 2 for g in grads], trainable_variables)


class Wrapping(keras.optimizers.LossScaleOptimizer):
    def apply(self, grads, trainable_variables=None):
        return super().apply(clipped(grads), trainable_variables)


class Stepping(keras.Sequential):
    """Reports variables besides, as many programs do."""

    def train_step(self, data):
        loss, gradients = loss_and_gradients(self, data)
        variables = self.trainable_variables
        done = self.optimizer.apply_gradients(zip(gradients, variables, strict=True))
        rate = self.optimizer.learning_rate
        return {"loss": loss, "done": tf.cast(done, "float32"), "rate": rate}


LOOKING = (InApply, InApplyGradients, InUpdateStep)


def fitted(strategy, optimizer):
    with strategy.scope():
        model = Stepping(dense_model().layers)
        model.compile(
            optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        )
    data = classification_data(28)
    model.fit(*data, batch_size=8, epochs=2, verbose=0, shuffle=False)
    return model


@pytest.mark.worth_seconds(6)
@pytest.mark.parametrize("kind", [*LOOKING, InClipping, Halving])
def test_they_look_at_the_gradients_of_the_whole_batch(kind):
    one = fitted(tf.distribute.get_strategy(), kind(0.5, momentum=0.9))
    several = fitted(make_strategy(3), kind(0.5, momentum=0.9))
    # 8 updates of length 0.05 (Halving: 0.5) and momentum; sums of 33 terms.
    assert largest_difference(one, several) < 1e-5
    assert int(several.optimizer.iterations.numpy()) == 8


@pytest.mark.parametrize("kind", LOOKING)
def test_parts_of_a_sum_are_not_shown_to_them(kind):
    """Keras accumulates each replica's own part, and reduces behind their look."""
    with pytest.raises(ConfigurationError, match=f"{kind.__name__} has .* of its own"):
        fitted(make_strategy(2), kind(0.1, gradient_accumulation_steps=2))
    fitted(make_strategy(1), kind(0.1, gradient_accumulation_steps=2))


def test_a_sum_in_the_place_of_ours_is_refused():
    with pytest.raises(ConfigurationError, match="which would not be called"):
        fitted(make_strategy(2), InReduction(0.1))
    fitted(make_strategy(1), InReduction(0.1))


@pytest.mark.parametrize("accumulation", [None, 2])
def test_an_own_test_for_infinities_sees_the_sum_or_is_refused(accumulation):
    def optimizer():
        inner = keras.optimizers.SGD(0.1, gradient_accumulation_steps=accumulation)
        return OwnTest(inner, initial_scale=8.0)

    if accumulation is not None:
        with pytest.raises(ConfigurationError, match="check_finite of its own"):
            fitted(make_strategy(3), optimizer())
        return
    one = fitted(tf.distribute.get_strategy(), optimizer())
    assert largest_difference(one, fitted(make_strategy(3), optimizer())) < 1e-5


@pytest.mark.parametrize("options", [{}, {"shard": "optimizer"}])
def test_a_wrapper_sees_the_sum_or_is_refused(options):
    def optimizer(accumulation=None):
        inner = keras.optimizers.SGD(0.5, gradient_accumulation_steps=accumulation)
        return Wrapping(inner, initial_scale=8.0)

    if options:
        with pytest.raises(ConfigurationError, match="its own apply may need whole"):
            fitted(make_strategy(3, **options), optimizer())
        return
    one = fitted(tf.distribute.get_strategy(), optimizer())
    assert largest_difference(one, fitted(make_strategy(3), optimizer())) < 1e-5
    with pytest.raises(ConfigurationError, match="Wrapping has apply of its own"):
        fitted(make_strategy(3), optimizer(2))


def test_what_looks_at_single_elements_accumulates():
    def optimizer():
        return Halving(0.5, gradient_accumulation_steps=2)

    one = fitted(tf.distribute.get_strategy(), optimizer())
    several = fitted(make_strategy(4), optimizer())
    assert largest_difference(one, several) < 1e-5


def test_accumulation_around_them_shows_them_the_sum():
    def optimizer():
        return tfdp.DistributedOptimizer(InApply(0.5), accumulate_steps=2)

    several = fitted(make_strategy(3), optimizer())
    alone = fitted(make_strategy(1), optimizer())
    assert largest_difference(alone, several) < 1e-5
