"""Sums of tensors that are there together, in one call a replica: the same bits.

The reference is the sum bucket by bucket, and NumPy's, both in rank order.
"""

import functools

import numpy as np
import pytest
import tensorflow as tf

from tests.support.parity import make_strategy

pytestmark = pytest.mark.timeout(250)

SHAPES = [(), (7,), (0, 4), (3, 5), (1,), (2, 3, 4), (1000,)]


def own_rank():
    context = tf.distribute.get_replica_context()
    return int(tf.get_static_value(context.replica_id_in_sync_group))


def parts_of(replicas, dtypes=("float32",)):
    """Per replica its own tensors, whose sum depends on the order of its terms."""
    random = np.random.default_rng(1)
    return [
        [
            tf.cast(random.normal(size=shape) * 10.0 ** random.integers(-3, 4), dtype)
            for dtype in dtypes
            for shape in SHAPES
        ]
        for _ in range(replicas)
    ]


def sums(strategy, parts, at_once, wrap=lambda exchange: exchange(), known=True):
    """What every replica gets: `at_once[rank]` is what it asks for."""
    width = len(parts[0])
    shape_of = [
        t.shape if known else tf.TensorShape([None] * len(t.shape)) for t in parts[0]
    ]
    given = [
        [tf.TensorSpec(shape_of[i], t.dtype) for i, t in enumerate(part)]
        for part in parts
    ]
    reducer = strategy.extended.reducer

    @functools.partial(tf.function, input_signature=[given], autograph=False)
    def step(parts):
        def replica():
            rank = own_rank()
            return wrap(
                lambda: reducer.all_reduce(parts[rank], rank, at_once=at_once[rank])
            )

        results = strategy.run(replica)
        return [strategy.experimental_local_results(r) for r in results]

    by_tensor = step(parts)
    assert len(by_tensor) == width
    return list(zip(*by_tensor, strict=True)), step.get_concrete_function().graph


def calls_in(graph):
    return [op for op in graph.get_operations() if op.type in ("If", "StatelessIf")]


def assert_in_rank_order(results, parts):
    assert len(results) == len(parts)
    for result in results:
        for place, tensor in enumerate(result):
            of_all = [part[place].numpy() for part in parts]
            expected = functools.reduce(np.add, of_all)
            assert tensor.dtype == parts[0][place].dtype
            np.testing.assert_array_equal(tensor.numpy(), expected)


@pytest.mark.quick
@pytest.mark.parametrize("replicas", [2, 3, 4])
@pytest.mark.parametrize("known", [True, False])
def test_every_replica_gets_the_sum_in_rank_order(replicas, known):
    parts = parts_of(replicas, ("float32", "float64", "bfloat16", "int32"))
    results, graph = sums(
        make_strategy(replicas), parts, [True] * replicas, known=known
    )
    assert_in_rank_order(results, parts)
    assert len(calls_in(graph)) == replicas
    # All that is left of it in the graph of the step.
    assert not [op for op in graph.get_operations() if op.type in ("Send", "Recv")]


def test_the_first_replica_decides_for_all():
    parts = parts_of(3)
    for wanted in ([True, False, True], [False, True, True]):
        results, graph = sums(make_strategy(3), parts, wanted)
        assert_in_rank_order(results, parts)
        assert len(calls_in(graph)) == 3 * wanted[0]


@pytest.mark.parametrize(
    "options", [{"hierarchy": (2, 2)}, {"engine": "tensorflow"}], ids=str
)
def test_other_ways_sum_bucket_by_bucket(options):
    parts = parts_of(4)
    results, graph = sums(make_strategy(4, **options), parts, [True] * 4)
    assert not calls_in(graph)
    for result in results:
        for place, tensor in enumerate(result):
            # In another order: three roundings, of numbers up to four times as large.
            of_all = [part[place].numpy() for part in parts]
            tolerance = 3 * 2.0**-24 * sum(np.abs(of_all), np.float32(0))
            assert np.all(np.abs(tensor.numpy() - sum(of_all)) <= 2 * tolerance)


def test_branches_sum_bucket_by_bucket():
    parts = parts_of(3)

    def within(exchange):
        return tf.cond(tf.constant(True), exchange, lambda: list(parts[0]))

    wanted, _ = sums(make_strategy(3), parts, [True] * 3, within)
    plain, _ = sums(make_strategy(3), parts, [False] * 3, within)
    for here, there in zip(wanted, plain, strict=True):
        for tensor, other in zip(here, there, strict=True):
            np.testing.assert_array_equal(tensor.numpy(), other.numpy())


def test_as_many_bytes_are_counted():
    parts = parts_of(3)
    counts = []
    for wanted in (True, False):
        strategy = make_strategy(3)
        sums(strategy, parts, [wanted] * 3)
        engine = strategy.extended.reducer.engine
        counts.append([engine.sent_bytes(rank) for rank in range(3)])
    assert counts[0] == counts[1]
    assert sum(counts[0]) > 0


def test_one_graph_runs_again_and_again():
    parts = parts_of(4)
    strategy = make_strategy(4)
    reducer = strategy.extended.reducer

    @tf.function(autograph=False)
    def step(factor):
        def replica():
            rank = own_rank()
            own = [factor * tensor for tensor in parts[rank]]
            return reducer.all_reduce(own, rank, at_once=True)

        return [strategy.experimental_local_results(r) for r in strategy.run(replica)]

    for factor in (1.0, 2.0, -4.0) * 5:
        # A power of two: the same bits but for the exponent.
        results = list(zip(*step(tf.constant(factor)), strict=True))
        assert_in_rank_order(results, [[factor * t for t in part] for part in parts])


def test_a_replica_that_fails_ends_the_step():
    parts = parts_of(3)
    strategy = make_strategy(3)
    reducer = strategy.extended.reducer

    @tf.function(autograph=False)
    def step(limit):
        def replica():
            rank = own_rank()
            with tf.control_dependencies([tf.debugging.assert_less(rank, limit)]):
                own = [tf.identity(tensor) for tensor in parts[rank]]
            return reducer.all_reduce(own, rank, at_once=True)

        return [strategy.experimental_local_results(r) for r in strategy.run(replica)]

    assert_in_rank_order(list(zip(*step(tf.constant(3)), strict=True)), parts)
    # The others wait for what the last one would have sent, and for its sums.
    with pytest.raises(tf.errors.InvalidArgumentError):
        step(tf.constant(2))
    assert_in_rank_order(list(zip(*step(tf.constant(3)), strict=True)), parts)


def test_gpus_sum_bucket_by_bucket():
    # The one call's variants have kernels for CPUs only. Nothing runs here.
    parts = parts_of(3)
    strategy = make_strategy(3)
    reducer = strategy.extended.reducer
    kinds = {}
    for kind in ("CPU", "GPU"):
        reducer.engine.devices = tuple(f"/device:{kind}:{rank}" for rank in range(3))

        @tf.function(autograph=False)
        def step():
            def replica():
                rank = own_rank()
                return reducer.all_reduce(parts[rank], rank, at_once=True)

            return strategy.run(replica)

        kinds[kind] = len(calls_in(step.get_concrete_function().graph))
    assert kinds == {"CPU": 3, "GPU": 0}
