"""Mistakes with scopes: one typed error that says what to move where."""

import keras
import pytest
import tensorflow as tf

from tests.support.parity import classification_data, dense_model, make_strategy
from tfdp.errors import ScopeError

X, Y = classification_data(samples=24)


def compile_model(model, optimizer="sgd"):
    model.compile(
        optimizer,
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        jit_compile=False,
    )
    return model


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_model_made_outside(optimizer):
    model = dense_model()
    with make_strategy(2).scope():
        compile_model(model, optimizer)
    with pytest.raises(ScopeError, match=r"outside the scope[\s\S]*model = build\(\)"):
        model.fit(X, Y, verbose=0)


def test_compiled_outside():
    with make_strategy(2).scope():
        model = dense_model()
    compile_model(model)
    with pytest.raises(ScopeError, match="compile was called outside the scope"):
        model.fit(X, Y, verbose=0)


def test_optimizer_made_outside():
    optimizer = keras.optimizers.SGD(0.1)
    with make_strategy(2).scope():
        model = compile_model(dense_model(), optimizer)
    with pytest.raises(ScopeError, match="made under no strategy"):
        model.fit(X, Y, verbose=0)


def test_compiled_under_another_strategy():
    with make_strategy(2).scope():
        model = dense_model()
    with make_strategy(2).scope():
        compile_model(model)
    with pytest.raises(ScopeError, match="but the model trains under"):
        model.fit(X, Y, verbose=0)


def test_fit_within_another_scope():
    with make_strategy(2).scope():
        model = compile_model(dense_model())
    other = make_strategy(2)
    with other.scope(), pytest.raises(ScopeError, match="leave the other scope first"):
        model.fit(X, Y, verbose=0)


def test_a_dataset_distributed_twice():
    strategy = make_strategy(2)
    dataset = tf.data.Dataset.from_tensor_slices((X, Y)).batch(8)
    distributed = strategy.experimental_distribute_dataset(dataset)
    with pytest.raises(ScopeError, match="distributed already"):
        strategy.experimental_distribute_dataset(distributed)


def test_a_dataset_of_another_strategy():
    strategy = make_strategy(2)
    with strategy.scope():
        model = compile_model(dense_model())
    dataset = tf.data.Dataset.from_tensor_slices((X, Y)).batch(8)
    distributed = make_strategy(4).experimental_distribute_dataset(dataset)
    with pytest.raises(ScopeError, match="parts for 4 replicas, the strategy has 2"):
        model.fit(distributed, verbose=0)


def test_what_is_allowed_still_works():
    strategy = make_strategy(2)
    with strategy.scope():
        model = compile_model(dense_model())
        model.fit(X, Y, verbose=0)
    dataset = tf.data.Dataset.from_tensor_slices((X, Y)).batch(8)
    model.fit(strategy.experimental_distribute_dataset(dataset), verbose=0)
