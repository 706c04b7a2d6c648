"""The order of shuffled arrays in `fit`: of each epoch, seed, fit and restart."""

import itertools

import keras
import pytest
import tensorflow as tf

import tfdp
from tests.support import newer_keras
from tests.support.array_orders import ROWS, made, orders_of
from tests.support.parity import make_strategy

OF_ITS_OWN = pytest.mark.skipif(
    not newer_keras.GIVES_ARRAYS_OTHER_ORDERS,
    reason="this Keras draws the order of each pass itself",
)


def seeded(seed=1, replicas=2, **options):
    keras.utils.set_random_seed(seed)
    return orders_of(made(make_strategy(replicas)), **options)


def are_all_different(orders):
    return all(one != other for one, other in itertools.combinations(orders, 2))


def has_each_row_once(order):
    return sorted(row for batch in order for row in batch) == list(range(ROWS))


def test_without_a_seed_each_epoch_has_an_order_of_its_own():
    tf.random.set_seed(None)
    orders = orders_of(made(make_strategy(2)))
    assert are_all_different(orders) and all(map(has_each_row_once, orders))


def test_with_a_seed_epochs_have_the_orders_that_the_faq_tells_of():
    orders = seeded()
    assert all(map(has_each_row_once, orders))
    assert orders == seeded() and orders[0] != seeded(2)[0]
    if newer_keras.GIVES_ARRAYS_OTHER_ORDERS:
        assert are_all_different(orders)
    else:
        assert orders[0] == orders[1] == orders[2]


@pytest.mark.parametrize("replicas", [1, 3])
def test_the_order_does_not_depend_on_the_replicas(replicas):
    assert seeded(replicas=replicas) == seeded(replicas=2)


@OF_ITS_OWN
def test_a_second_fit_has_other_orders():
    keras.utils.set_random_seed(1)
    model = made(make_strategy(2))
    orders = [*orders_of(model), *orders_of(model), *orders_of(model, epochs=1)]
    assert are_all_different(orders)


@OF_ITS_OWN
def test_a_pass_that_several_epochs_share_has_an_order_of_its_own():
    """Four batches to a pass, two to an epoch."""
    halves = seeded(epochs=6, steps_per_epoch=2)
    passes = [halves[i] + halves[i + 1] for i in (0, 2, 4)]
    assert are_all_different(passes) and all(map(has_each_row_once, passes))


@OF_ITS_OWN
def test_an_epoch_has_its_order_wherever_fit_begins():
    assert seeded(epochs=4, initial_epoch=2) == seeded(epochs=4)[2:]


@OF_ITS_OWN
def test_each_batch_has_an_order_of_its_own():
    """`shuffle="batch"` leaves the rows of a batch in it."""
    orders = seeded(shuffle="batch")
    assert orders[0][0] == [0, 1, 2, 3] and all(map(has_each_row_once, orders))


class Break(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if self.model.optimizer.iterations == 7:
            raise KeyError("in the middle of an epoch or a pass")


@pytest.mark.parametrize("steps_per_epoch", [None, 2])
def test_a_training_that_goes_on_keeps_its_orders(tmp_path, steps_per_epoch):
    options = {"epochs": 6, "steps_per_epoch": steps_per_epoch}
    expected = seeded(**options)
    for breaks in ([Break()], []):
        keras.utils.set_random_seed(1)
        model = made(make_strategy(2))
        checkpoint = tfdp.callbacks.Checkpoint(tmp_path, every_steps=3)
        if breaks:
            with pytest.raises(KeyError):
                orders_of(model, checkpoint, *breaks, **options)
        else:
            found = orders_of(model, checkpoint, **options)
    # Six steps are saved: the rest follows, the first epoch of it from its middle on.
    batches = list(itertools.chain(*found))
    assert batches == list(itertools.chain(*expected))[-len(batches) :]
    assert len(batches) == len(list(itertools.chain(*expected))) - 6


@pytest.mark.parametrize("replicas, calls", [(2, 6), (3, 8)])
def test_a_step_is_traced_once_for_all_numbers_of_rows(replicas, calls):
    """Building calls the model twice, and fit and validation once for each replica."""

    class Counting(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense, self.calls = keras.layers.Dense(1), []

        def call(self, x, training=False):
            if not isinstance(x, keras.KerasTensor):
                self.calls.append(x.shape[0])
            return self.dense(x)

    with make_strategy(replicas).scope():
        model = Counting()
        model.compile("sgd", "mse")
    data = tf.ones((26, 4)), tf.ones((26, 1))
    model.fit(*data, 8, epochs=3, verbose=0, validation_data=data)
    assert model.calls == [None] * calls
