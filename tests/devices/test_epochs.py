"""Whatever begins an epoch anew, replicas get the batches that one device gets."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.framework import func_graph

import tfdp
from tests.support import newer_keras
from tests.support.parity import make_strategy, stock_strategy
from tfdp._private import host_input
from tfdp.data.keras_input import has_no_side_effects

BATCH = 8
DEVICES = ("CPU:0", "CPU:1", "CPU:2", "CPU:3")


def rows(count):
    """`count` rows, of which the first number tells them apart."""
    return np.stack([np.arange(count), np.zeros(count)], axis=1).astype("float32")


class Recorder(keras.Model):
    """Notes the rows of each step, replica by replica, and learns nothing."""

    def __init__(self):
        super().__init__()
        self.seen = {"train": [], "test": []}
        self.weight = self.add_weight(shape=(), initializer="zeros")

    def call(self, inputs):
        return inputs * self.weight

    def train_step(self, data):
        return self.note("train", data)

    def test_step(self, data):
        return self.note("test", data)

    def note(self, kind, data):
        x = data[0] if isinstance(data, tuple) else data
        rank = tf.distribute.get_replica_context().replica_id_in_sync_group

        def note(rank, numbers):
            self.seen[kind].append((int(rank), tuple(numbers.astype(int))))

        tf.numpy_function(note, [tf.identity(rank), x[:, 0]], [])
        return {"loss": tf.reduce_mean(x)}

    def steps(self, kind, replicas):
        """The rows of each step, as one device would have got them."""
        seen = self.seen[kind]
        steps = []
        for start in range(0, len(seen), replicas):
            parts = sorted(seen[start : start + replicas])
            assert [rank for rank, _ in parts] == list(range(replicas))
            # A replica without rows computes on a borrowed one: the step's first.
            steps.append(list(dict.fromkeys(n for _, part in parts for n in part)))
        return steps


def recorder(strategy, **options):
    if strategy is None:
        model = Recorder()
        model.compile("sgd", **options)
        return model
    with strategy.scope():
        model = Recorder()
        model.compile("sgd", **options)
    return model


class Breaks(keras.callbacks.Callback):
    """Ends an epoch after its first step: by an error, or as `EarlyStopping` does."""

    def __init__(self, is_error):
        super().__init__()
        self.is_error = is_error

    def on_train_batch_end(self, batch, logs=None):
        if self.is_error:
            raise KeyError("in the middle")
        self.model.stop_training = True


def arrays(model):
    shuffle = not newer_keras.GIVES_ARRAYS_OTHER_ORDERS
    model.fit(rows(21), batch_size=BATCH, epochs=3, verbose=0, shuffle=shuffle)


def arrays_and_validation(model):
    data = rows(19)
    keras_fit = {"batch_size": BATCH, "epochs": 3, "verbose": 0}
    model.fit(data, data, validation_split=0.4, shuffle=False, **keras_fit)


def shuffled(model):
    dataset = tf.data.Dataset.from_tensor_slices(rows(21))
    dataset = dataset.shuffle(21, seed=3, reshuffle_each_iteration=True).batch(BATCH)
    model.fit(dataset, epochs=3, verbose=0)
    model.fit(dataset, epochs=2, verbose=0)  # and a second time


def fit_and_validation_of_one_dataset(model):
    dataset = tf.data.Dataset.from_tensor_slices(rows(13)).batch(BATCH)
    model.fit(dataset, validation_data=dataset, epochs=3, verbose=0)
    model.evaluate(dataset, verbose=0)


def generated(model):
    def batches():
        for start in range(0, 40, BATCH):
            yield rows(40)[start : start + BATCH]

    spec = tf.TensorSpec((None, 2))
    dataset = tf.data.Dataset.from_generator(batches, output_signature=spec)
    model.fit(dataset, epochs=3, verbose=0)


def endless(model):
    dataset = tf.data.Dataset.from_tensor_slices(rows(24)).repeat().batch(BATCH)
    model.fit(dataset, steps_per_epoch=2, epochs=4, verbose=0)
    model.fit(dataset, steps_per_epoch=2, epochs=1, verbose=0)


def of_one_size(model):
    dataset = tf.data.Dataset.from_tensor_slices(rows(21))
    model.fit(dataset.batch(BATCH, drop_remainder=True), epochs=3, verbose=0)


def fewer_steps_than_batches(model):
    dataset = tf.data.Dataset.from_tensor_slices(rows(29)).batch(BATCH)
    model.fit(dataset, steps_per_epoch=2, epochs=2, verbose=0)


def fewer_rows_than_replicas(model):
    dataset = tf.data.Dataset.from_tensor_slices(rows(BATCH + 1)).batch(BATCH)
    model.fit(dataset, epochs=3, verbose=0)


def broken_off(model):
    dataset = tf.data.Dataset.from_tensor_slices(rows(29)).batch(BATCH)
    with pytest.raises(KeyError):
        model.fit(dataset, epochs=3, verbose=0, callbacks=[Breaks(is_error=True)])
    model.fit(dataset, epochs=3, verbose=0, callbacks=[Breaks(is_error=False)])
    model.fit(dataset, epochs=1, verbose=0)


PROGRAMS = [
    arrays,
    arrays_and_validation,
    shuffled,
    fit_and_validation_of_one_dataset,
    generated,
    endless,
    of_one_size,
    fewer_steps_than_batches,
    fewer_rows_than_replicas,
    broken_off,
]


def steps_of(program, strategy, replicas, **options):
    keras.utils.set_random_seed(5)
    model = recorder(strategy, **options)
    program(model)
    return {kind: model.steps(kind, replicas) for kind in model.seen}


@pytest.mark.worth_seconds(9)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
@pytest.mark.parametrize("replicas", [2, 4])
def test_the_batches_of_all_epochs_are_those_of_one_device(program, replicas):
    expected = steps_of(program, None, 1)
    assert expected["train"]
    assert steps_of(program, make_strategy(replicas), replicas) == expected


@pytest.mark.parametrize("program", [arrays, of_one_size, endless])
def test_several_steps_to_an_execution_get_the_same_batches(program):
    expected = steps_of(program, None, 1, steps_per_execution=2)
    found = steps_of(program, make_strategy(4), 4, steps_per_execution=2)
    assert found == expected


def parts_of(strategy, distributed):
    return [
        tuple(part.numpy().tolist() for part in strategy.experimental_local_results(b))
        for b in distributed
    ]


def by_dataset(strategy, count, batch, **options):
    dataset = tf.data.Dataset.from_tensor_slices(np.arange(count)).batch(
        batch, **options
    )
    return strategy.experimental_distribute_dataset(dataset)


def by_function(strategy, count, batch, **options):
    return strategy.distribute_datasets_from_function(
        lambda _: tf.data.Dataset.range(count).batch(batch, **options)
    )


@pytest.mark.parametrize(
    "count, batch, options",
    [(21, 8, {}), (17, 8, {}), (3, 2, {}), (20, 4, {"drop_remainder": True})],
)
@pytest.mark.parametrize("distribute", [by_dataset, by_function])
def test_each_replica_gets_what_a_stock_strategy_gives_it(
    distribute, count, batch, options
):
    devices = DEVICES[:3]
    stock = stock_strategy(3)
    ours = tfdp.DataParallelStrategy(devices)
    expected = parts_of(stock, distribute(stock, count, batch, **options))
    distributed = distribute(ours, count, batch, **options)
    assert expected
    for _ in range(2):
        assert parts_of(ours, distributed) == expected


@pytest.mark.parametrize("drop_remainder", [False, True])
@pytest.mark.parametrize("distribute", [by_dataset, by_function])
def test_a_traced_loop_gets_the_same_parts(distribute, drop_remainder):
    """By `get_next_as_optional`, which every loop over a dataset in a graph asks."""
    options = {"drop_remainder": drop_remainder}

    def totals(strategy):
        distributed = distribute(strategy, 22, 4, **options)

        @tf.function
        def total():
            sums = [tf.zeros([], tf.int64) for _ in range(3)]
            steps = tf.zeros([], tf.int64)
            for batch in distributed:
                parts = strategy.experimental_local_results(batch)
                sums = [
                    s + (steps + 1) * tf.reduce_sum(p)
                    for s, p in zip(sums, parts, strict=True)
                ]
                steps += 1
            return steps, sums

        return tf.nest.map_structure(lambda t: int(t.numpy()), total())

    devices = DEVICES[:3]
    expected = totals(stock_strategy(3))
    assert totals(tfdp.DataParallelStrategy(devices)) == expected


def test_two_iterators_of_one_dataset_go_on_apart():
    strategy = make_strategy(2)
    distributed = by_dataset(strategy, 12, 4)
    first, second = iter(distributed), iter(distributed)
    seen = [
        strategy.experimental_local_results(next(iterator))[0].numpy().tolist()
        for iterator in (first, first, second, first, second)
    ]
    assert seen == [[0, 1], [4, 5], [0, 1], [8, 9], [4, 5]]
    with pytest.raises(StopIteration):
        next(first)
    assert next(second) is not None


def test_a_step_may_be_traced_for_many_batches():
    """TensorFlow takes 33 reads in one trace for a mistake; replicas are one read."""
    strategy = make_strategy(4)
    iterator = iter(by_dataset(strategy, 80, 4))

    @tf.function(autograph=False)
    def read():
        return [strategy.experimental_local_results(next(iterator)) for _ in range(20)]

    assert [int(part[0]) for part in read()[-1]] == [76, 77, 78, 79]


def test_an_iterator_traces_nothing(monkeypatch):
    """A stock strategy traces six functions for each replica and iterator."""
    graphs, trace = [], func_graph.func_graph_from_py_func

    def counted(name, *args, **kwargs):
        graphs.append(name)
        return trace(name, *args, **kwargs)

    def traced_by(strategy):
        distributed = by_dataset(strategy, 24, 4)
        graphs.clear()
        next(iter(distributed))
        return len(graphs)

    monkeypatch.setattr(func_graph, "func_graph_from_py_func", counted)
    assert traced_by(make_strategy(2)) == 0
    assert traced_by(stock_strategy()) == 12


def python_map(numbers):
    return tf.numpy_function(lambda n: n, [numbers], tf.float32)


SLICES = tf.data.Dataset.from_tensor_slices(rows(24))
QUIET = {
    "slices": lambda: SLICES.batch(BATCH),
    "map": lambda: SLICES.map(lambda row: 2 * row).padded_batch(BATCH).prefetch(1),
    "interleave": lambda: tf.data.Dataset.range(3).interleave(tf.data.Dataset.range),
}
NOT_QUIET = {
    "shuffle": lambda: SLICES.shuffle(9).batch(BATCH),
    "inner shuffle": lambda: SLICES.flat_map(
        lambda row: tf.data.Dataset.from_tensors(row).shuffle(2)
    ),
    "python": lambda: SLICES.map(python_map),
    "random": lambda: tf.data.Dataset.random().take(3),
}


@pytest.mark.parametrize("name", [*QUIET, *NOT_QUIET])
def test_where_making_an_iterator_makes_something_happen(name):
    assert has_no_side_effects({**QUIET, **NOT_QUIET}[name]()) == (name in QUIET)


@pytest.mark.parametrize("name, expected", [("slices", 4 + 1), ("shuffle", 4 * 2)])
def test_an_iterator_that_was_not_read_is_the_next_one(name, expected, monkeypatch):
    """Keras makes one when an epoch ends, and one when the next begins."""
    made, make = [], host_input.HostDataset.__iter__

    def noted(dataset):
        made.append(make(dataset))
        return made[-1]

    monkeypatch.setattr(host_input.HostDataset, "__iter__", noted)
    model = recorder(make_strategy(2))
    model.fit({**QUIET, **NOT_QUIET}[name](), epochs=4, verbose=0)
    assert len(made) == expected
    assert len(model.steps("train", 2)) == 4 * 3
