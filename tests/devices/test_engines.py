"""Both engines, one and two levels, every number type: sums equal NumPy's."""

import contextlib
import pathlib

import numpy as np
import pytest
import tensorflow as tf

from tests.support.parity import UNIT_ROUND_OFF, make_strategy
from tfdp.errors import CollectiveError
from tfdp.exchange.reducer import Reducer

SETTINGS = [
    pytest.param(2, {"engine": "in_process"}, id="in_process-2"),
    pytest.param(3, {"engine": "in_process"}, id="in_process-3"),
    pytest.param(4, {"engine": "in_process", "hierarchy": (2, 2)}, id="in_process-2x2"),
    pytest.param(2, {"engine": "tensorflow"}, id="tensorflow-2"),
    pytest.param(3, {"engine": "tensorflow"}, id="tensorflow-3"),
    pytest.param(4, {"engine": "tensorflow", "hierarchy": (2, 2)}, id="tensorflow-2x2"),
    pytest.param(4, {"engine": "tensorflow", "hierarchy": (4, 1)}, id="tensorflow-4x1"),
]


def replicate(strategy, parts):
    return strategy.experimental_distribute_values_from_function(
        lambda context: parts[context.replica_id_in_sync_group]
    )


def reduce_lists(strategy, per_rank, op="SUM", wrap=lambda f: f()):
    """`ctx.all_reduce` of a list per replica; the results of every replica."""
    width = len(per_rank[0])
    arguments = [
        replicate(strategy, [values[i] for values in per_rank]) for i in range(width)
    ]

    @tf.function
    def step(arguments):
        def replica_fn(*values):
            context = tf.distribute.get_replica_context()
            return wrap(lambda: context.all_reduce(op, list(values)))

        results = strategy.run(replica_fn, args=tuple(arguments))
        return [strategy.experimental_local_results(r) for r in results]

    by_tensor = step(arguments)
    return list(zip(*by_tensor, strict=True))


@pytest.mark.parametrize("replicas, options", SETTINGS)
@pytest.mark.parametrize(
    "dtype",
    "float32 float64 float16 bfloat16 int32 int64 int8 uint8 int16 uint16 uint32 "
    "uint64 complex64 complex128".split(),
)
def test_sums_of_every_number_type_are_exact(replicas, options, dtype):
    # Small integers: every partial sum is exact in each of the types, so the order
    # of summation cannot matter and equality is exact.
    rng = np.random.default_rng(0)
    numbers = rng.integers(0, 7, size=(replicas, 5, 3))
    strategy = make_strategy(replicas, **options)
    per_rank = [[tf.cast(tf.constant(part), dtype)] for part in numbers]
    results = reduce_lists(strategy, per_rank)
    for (result,) in results:
        assert result.dtype == tf.as_dtype(dtype)
        np.testing.assert_array_equal(
            tf.cast(result, tf.complex128).numpy().real, numbers.sum(axis=0)
        )


@pytest.mark.quick
@pytest.mark.parametrize("replicas, options", SETTINGS)
def test_lists_with_empty_odd_and_scalar_tensors(replicas, options):
    rng = np.random.default_rng(1)
    shapes = [(), (7,), (0, 4), (3, 5), (1,), (2, 3, 4), (17,)]
    per_rank = [
        [tf.constant(rng.integers(-9, 9, size=s), tf.float32) for s in shapes]
        for _ in range(replicas)
    ]
    results = reduce_lists(
        make_strategy(replicas, bucket_bytes=64, first_bucket_bytes=16, **options),
        per_rank,
    )
    for result in results:
        for i, tensor in enumerate(result):
            expected = sum(values[i].numpy() for values in per_rank)
            np.testing.assert_array_equal(tensor.numpy(), expected)
            assert tensor.shape == shapes[i]


@pytest.mark.quick
@pytest.mark.parametrize("replicas, options", SETTINGS)
def test_mean_divides_by_the_replicas(replicas, options):
    per_rank = [[tf.constant([1.0, 2.0]) * 2.0**rank] for rank in range(replicas)]
    expected = sum(values[0].numpy() for values in per_rank) / replicas
    for (result,) in reduce_lists(make_strategy(replicas, **options), per_rank, "MEAN"):
        # TensorFlow may multiply by the rounded 1 / N: two roundings, 2 u, not one.
        np.testing.assert_allclose(result.numpy(), expected, rtol=2 * UNIT_ROUND_OFF)


@pytest.mark.parametrize("replicas, options", SETTINGS)
def test_unknown_shapes(replicas, options):
    strategy = make_strategy(replicas, **options)
    spec = tf.TensorSpec([None, 3], tf.float32)

    @tf.function(input_signature=[spec])
    def step(x):
        def replica_fn():
            context = tf.distribute.get_replica_context()
            rank = tf.cast(context.replica_id_in_sync_group, tf.float32)
            values = [x * (rank + 1), tf.reduce_sum(x, axis=1) * (rank + 1)]
            return context.all_reduce("SUM", values)

        return [
            strategy.experimental_local_results(r) for r in strategy.run(replica_fn)
        ]

    factor = sum(range(1, replicas + 1))
    for rows in (5, 2, 0):
        x = np.arange(rows * 3, dtype="float32").reshape(rows, 3)
        for full, sums in zip(*step(x), strict=True):
            np.testing.assert_array_equal(full, x * factor)
            np.testing.assert_array_equal(sums, x.sum(axis=1) * factor)


@pytest.mark.parametrize("replicas, options", SETTINGS)
def test_slices_of_unequal_number_are_joined_in_rank_order(replicas, options):
    strategy = make_strategy(replicas, **options)
    rng = np.random.default_rng(2)
    rows = [rank * 2 for rank in range(replicas)]  # replica 0 brings none
    values = [rng.normal(size=(n, 3)).astype("float32") for n in rows]
    indices = [rng.integers(0, 6, n) for n in rows]
    per_values, per_indices = replicate(strategy, values), replicate(strategy, indices)

    @tf.function
    def step(per_values, per_indices):
        def replica_fn(value, index):
            slices = tf.IndexedSlices(value, index, tf.constant([6, 3]))
            context = tf.distribute.get_replica_context()
            return tf.convert_to_tensor(context.all_reduce("SUM", [slices])[0])

        return strategy.experimental_local_results(
            strategy.run(replica_fn, args=(per_values, per_indices))
        )

    expected = np.zeros((6, 3), "float32")
    for value, index in zip(values, indices, strict=True):
        np.add.at(expected, index, value)
    for result in step(per_values, per_indices):
        # At most 6 * replicas terms of size about 1 meet in one row.
        np.testing.assert_allclose(result, expected, atol=2e-6)


@pytest.mark.parametrize("replicas, options", SETTINGS)
def test_inside_a_conditional(replicas, options):
    flag = tf.constant(True)
    per_rank = [[tf.constant([1.0 + rank])] for rank in range(replicas)]

    def wrap(exchange):
        return tf.cond(flag, exchange, lambda: [tf.constant([0.0])])

    results = reduce_lists(make_strategy(replicas, **options), per_rank, wrap=wrap)
    total = sum(range(1, replicas + 1))
    assert [float(result[0][0]) for result in results] == [total] * replicas


@pytest.mark.parametrize("engine", ["in_process", "tensorflow"])
def test_a_loop_inside_the_replica_function_is_refused(engine):
    strategy = make_strategy(2, engine=engine)

    @tf.function
    def step():
        def replica_fn():
            context = tf.distribute.get_replica_context()
            return tf.while_loop(
                lambda i, x: i < 3,
                lambda i, x: (i + 1, context.all_reduce("SUM", x)),
                (0, tf.constant(1.0)),
            )[1]

        return strategy.run(replica_fn)

    with pytest.raises(CollectiveError, match=r"around strategy\.run"):
        step()


@pytest.mark.parametrize("engine", ["in_process", "tensorflow"])
def test_a_failed_trace_leaves_the_strategy_usable(engine):
    strategy = make_strategy(3, engine=engine)
    fail = [True]

    @tf.function
    def step():
        def replica_fn():
            context = tf.distribute.get_replica_context()
            total = context.all_reduce("SUM", tf.constant(1.0))
            if fail[0] and context._replica_id == 1:
                raise RuntimeError("the user's mistake")
            return context.all_reduce("SUM", total)

        return strategy.experimental_local_results(strategy.run(replica_fn))

    with pytest.raises(RuntimeError, match="the user's mistake"):
        step()
    fail[0] = False
    assert [float(x) for x in step()] == [9.0] * 3


@pytest.mark.parametrize("engine", ["in_process", "tensorflow"])
@pytest.mark.parametrize("value", [tf.constant(True), tf.constant("text")])
def test_types_without_a_sum_are_refused(engine, value):
    strategy = make_strategy(2, engine=engine)
    with pytest.raises(CollectiveError, match="Cannot add tensors of type"):
        reduce_lists(strategy, [[value], [value]])


def test_in_process_sums_repeat_bit_for_bit():
    rng = np.random.default_rng(3)
    per_rank = [[tf.constant(rng.normal(size=4096), tf.float32)] for _ in range(4)]
    strategy = make_strategy(4, engine="in_process")
    first = reduce_lists(strategy, per_rank)
    in_rank_order = per_rank[0][0]
    for rank in range(1, 4):
        in_rank_order = in_rank_order + per_rank[rank][0]
    for result in first:
        np.testing.assert_array_equal(result[0], in_rank_order)
    for _ in range(5):
        again = reduce_lists(strategy, per_rank)
        np.testing.assert_array_equal(again[0][0], first[0][0])


@pytest.mark.parametrize("engine", ["in_process", "tensorflow"])
def test_gradient_flows_through_all_reduce(engine):
    """d/dx_r of sum_q w_q S with S = sum_r x_r is sum_q w_q: an all-reduce again."""
    strategy = make_strategy(2, engine=engine)

    @tf.function
    def step():
        def replica_fn():
            context = tf.distribute.get_replica_context()
            weight = tf.cast(context.replica_id_in_sync_group, tf.float32) * 4.0 + 1.0
            x = tf.constant(2.0)
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = weight * context.all_reduce("SUM", x)
            return tape.gradient(y, x)

        return strategy.experimental_local_results(strategy.run(replica_fn))

    assert [float(g) for g in step()] == [6.0, 6.0]


def collective_threads():
    names_of_threads = []
    for task in pathlib.Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):
            names_of_threads.append((task / "comm").read_text())
    return sum("collective" in name for name in names_of_threads)


@pytest.mark.skipif(not pathlib.Path("/proc/self/task").exists(), reason="needs Linux")
def test_launches_leave_no_threads_behind():
    """A deadline on the op would: one thread per launch, asleep until it has passed."""
    strategy = make_strategy(2, engine="tensorflow")

    @tf.function
    def step():
        def replica_fn():
            context = tf.distribute.get_replica_context()
            return context.all_reduce("SUM", tf.ones([5]))

        return strategy.run(replica_fn)

    step()
    before = collective_threads()
    for _ in range(50):
        step()
    assert collective_threads() < before + 10


def test_a_tensor_that_no_bucket_holds_is_an_error(monkeypatch):
    plan = Reducer.plan
    monkeypatch.setattr(Reducer, "plan", lambda *given: plan(*given)[:-1])
    values = [[tf.ones([2]), tf.ones([0])]] * 2
    with pytest.raises(KeyError):
        reduce_lists(make_strategy(2, engine="in_process"), values)
