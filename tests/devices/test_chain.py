"""Each stage of a reduction alone, against a transport of NumPy.

Numbers are small integers and powers of two where nothing is said: sums of them are
exact in float32, in any order.
"""

import collections
import dataclasses
import threading
import time
import types

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tests.support.fake_transport import FakeTransport, FakeWire
from tfdp.chain.buffers import Buffers
from tfdp.chain.compression import CompressedExchange, CompressionState
from tfdp.chain.finite_guard import FiniteGuard
from tfdp.chain.groups import AllGroups, Exact, GroupState
from tfdp.chain.missing_rows import MissingRows
from tfdp.chain.momentum import Momentum
from tfdp.chain.norms import NoiseProbe
from tfdp.chain.reduction import Reduction, Stage, reduce, update_through
from tfdp.chain.shards import Shards
from tfdp.chain.step_times import (
    ARRIVING,
    COLUMNS,
    COMPUTE,
    INPUT,
    ROWS,
    SENDING,
    STEP,
    WAITING,
    StepTimes,
)
from tfdp.chain.table_rows import TableRows
from tfdp.compression.method import Exchanged, Method
from tfdp.exchange.compressed import CompressedSums
from tfdp.exchange.elastic_pipeline import ElasticPipeline
from tfdp.hosts.elastic_group import LEFT_OUT, MET
from tfdp.hosts.host_link import Exchange, TransferSeconds
from tfdp.plan.options import HOSTS, Given
from tfdp.plan.shards import ShardLayout
from tfdp.plan.topology import Groups
from tfdp.sharding.variables import ShardedVariable, ShardUpdatedVariable
from tfdp.step.backup_rounds import BackupRounds
from tfdp.tracing.rows import Batch
from tfdp.tracing.rows import Rows as TraceRows
from tfdp.tracing.step import Step

# Each replica has other gradients: of a matrix and of a vector.
GRADIENTS = [
    [np.array([[1.0, -2.0], [4.0, 8.0]], np.float32), np.array([3.0, 0.5], np.float32)],
    [
        np.array([[2.0, 16.0], [-1.0, 4.0]], np.float32),
        np.array([5.0, 2.0], np.float32),
    ],
]
SUMS = [sum(parts) for parts in zip(*GRADIENTS, strict=True)]


def run_of(counts):
    return Step(len(counts), Batch(counts=tuple(counts), total=sum(counts)))


def reduced(make_chain, run=None, optimizer=None, gradients=GRADIENTS, given=None):
    """The reductions of all replicas, by rank, and the transport."""
    transport = given or FakeTransport(len(gradients))
    run = run or run_of([1] * len(gradients))
    optimizer = optimizer or keras.optimizers.SGD()
    variables = [types.SimpleNamespace(path=f"v{n}") for n in range(len(gradients[0]))]

    def replica(rank):
        own = [g if is_rows(g) else tf.constant(g) for g in gradients[rank]]
        reduction = Reduction(own, variables, run, rank, optimizer)
        reduce(reduction, make_chain(rank), transport)
        return reduction

    return transport.on_replicas(replica), transport


def is_rows(gradient):
    return isinstance(gradient, tf.IndexedSlices)


def assert_sums(reductions, expected=SUMS):
    for reduction in reductions:
        for value, total in zip(reduction.gradients, expected, strict=True):
            np.testing.assert_array_equal(value, total)
        assert reduction.riders == []


class Noted(Stage):
    """Notes when it is called, and has a rider."""

    def __init__(self, name, notes, takes=None):
        self.name, self.notes, self.takes = name, notes, takes

    def before(self, reduction):
        self.notes.append(f"before {self.name}")
        reduction.riders.append(tf.constant(len(self.name) + reduction.rank))
        if self.takes is not None:
            self.taken = reduction.take(self.takes)

    def after(self, reduction):
        [total] = reduction.take_riders(1)
        self.notes.append(f"after {self.name}: {int(total)}")
        if self.takes is not None:
            reduction.gradients[self.takes] = self.taken

    def around(self, reduction, update):
        self.notes.append(f"around {self.name}")
        update()


def test_stages_nest_and_get_the_sums_of_their_own_riders():
    notes = [[], []]
    reductions, transport = reduced(
        lambda rank: [Noted("a", notes[rank]), Noted("long", notes[rank])]
    )
    # Ranks 0 and 1 add 2 n + 1 for a name of n letters.
    order = ["before a", "before long", "after long: 9", "after a: 3"]
    assert notes == [order, order]
    assert_sums(reductions)
    assert transport.exchanges == [("sum", 2, 2)]
    around = []
    stages = [Noted("a", around), Noted("b", around)]
    update_through(reductions[0], lambda: around.append("update"), stages)
    assert around == ["around a", "around b", "update"]


def test_without_stages_there_is_one_exchange_and_no_rider():
    reductions, transport = reduced(lambda rank: [])
    assert_sums(reductions)
    assert transport.exchanges == [("sum", 2, 0)]
    assert transport.options == [{"sum_rows": False, "at_once": False}]


def test_what_a_stage_takes_out_is_not_sent():
    reductions, transport = reduced(lambda rank: [Noted("a", [], takes=0)])
    assert transport.exchanges == [("sum", 1, 1)]
    for rank, reduction in enumerate(reductions):
        np.testing.assert_array_equal(reduction.gradients[0], GRADIENTS[rank][0])
        np.testing.assert_array_equal(reduction.gradients[1], SUMS[1])


class FakeBuffer:
    """A moving statistic with a value on each replica."""

    dtype = tf.float32

    def __init__(self, *values):
        self.values = [tf.Variable(tf.constant(value, tf.float32)) for value in values]
        self.distribute_strategy = self.extended = self
        self._thread = threading.local()

    def _get_replica(self, rank):
        self._thread.rank = rank
        return self.values[rank]

    local_copy = _get_replica

    def update_own_copy(self, variable, fn, value):
        fn(variable.values[self._thread.rank], value)

    def read(self):
        return [value.numpy().tolist() for value in self.values]


def test_buffers_become_the_mean_over_rows():
    # 3 rows and 1 row: 3/4 of 8 and 1/4 of 16. Without rows a NaN counts as nothing.
    some, none = FakeBuffer(8.0, 16.0), FakeBuffer(4.0, float("nan"))
    reductions, transport = reduced(lambda rank: [Buffers([some])], run_of([3, 1]))
    assert_sums(reductions)
    assert transport.exchanges == [("sum", 2, 1)]
    assert some.read() == [10.0, 10.0]
    reduced(lambda rank: [Buffers([none])], run_of([2, 0]))
    assert none.read() == [4.0, 4.0]


def test_norms_are_those_of_the_papers_two_batch_sizes():
    matrix = keras.Variable(np.zeros((2, 2)), name="matrix")
    optimizer = keras.optimizers.SGD()
    probe = NoiseProbe(optimizer, [matrix], replicas=2, steps=1)
    reductions, _ = reduced(lambda rank: [probe], run_of([3, 1]), optimizer)
    assert_sums(reductions)
    [norms] = probe.norms([0])
    squares = [sum(float(np.sum(g**2)) for g in own) for own in GRADIENTS]
    # Sums of a few squares below 2^10, with 4 fractional bits: exact. By 3, rounded
    # once, 2^-24 of the number; the division and the product add one each.
    small = 4 / 3 * squares[0] + 4 * squares[1]
    assert norms.small == pytest.approx(small, rel=3 * 2**-24)
    assert norms.big == sum(float(np.sum(total**2)) for total in SUMS)
    assert (norms.parts, norms.rows) == (2.0, 4.0)


@dataclasses.dataclass(frozen=True)
class FirstRow(Method):
    """Sends the first row of a matrix, and keeps the others."""

    def exchange(self, values, slots, peers, step):
        sent = [tf.concat([v[:1], tf.zeros_like(v[1:])], axis=0) for v in values]
        left = [value - part for value, part in zip(values, sent, strict=True)]
        return Exchanged(peers.sum(sent), left, slots)

    def message_bytes(self, shapes):
        return 4 * sum(shape[1] for shape in shapes)


def compressed_by(transport, optimizer, weights):
    method = FirstRow(min_bytes=0)
    communication = tfdp.Communication(compression=method)
    made = CompressedSums(method, FakeWire(transport), None, communication)
    optimizer.build(weights)
    # Replicas of a graph are traced one after the other; threads would make it twice.
    optimizer.compression_state = CompressionState(made)
    optimizer.compression_state.of(weights[0], 0)
    return made


def reduce_compressed(transport, optimizer, weights, compressed, gradients):
    def replica(rank):
        own = list(map(tf.constant, gradients[rank]))
        reduction = Reduction(own, weights, run_of([1, 1]), rank, optimizer)
        reduce(reduction, [CompressedExchange(compressed, [0])], transport)
        return reduction

    return transport.on_replicas(replica)


def test_a_compression_keeps_what_it_has_not_sent_and_one_flag_rides():
    transport, optimizer = FakeTransport(2), keras.optimizers.SGD()
    weights = [keras.Variable(np.zeros((2, 2))), keras.Variable(np.zeros(2))]
    compressed = compressed_by(transport, optimizer, weights)
    given = transport, optimizer, weights, compressed
    kept = optimizer.compression_state.of_variables["variable_0"].residual

    first = np.array([[3.0, 14.0], [0.0, 0.0]], np.float32)
    assert_sums(reduce_compressed(*given, GRADIENTS), [first, SUMS[1]])
    assert transport.exchanges == [("sum", 1, 1)]
    assert transport.options[0]["at_once"]
    left = [[[0, 0], [4, 8]], [[0, 0], [-1, 4]]]
    np.testing.assert_array_equal(kept.rows(), left)

    # What is not finite on one replica is NaN on all, and no residual changes.
    bad = [GRADIENTS[0], [GRADIENTS[1][0], np.array([np.inf, 0.0], np.float32)]]
    nowhere = np.full((2, 2), np.nan, np.float32)
    for reduction in reduce_compressed(*given, bad):
        np.testing.assert_array_equal(reduction.gradients[0], nowhere)
    np.testing.assert_array_equal(kept.rows(), left)
    assert optimizer.compression_state.steps.rows().numpy().tolist() == [2, 2]


class OneMomentum:
    """The part of a 1-bit optimizer that the stage uses."""

    name = "one_momentum"

    def __init__(self, momentum):
        self._value = FakeBuffer(momentum, momentum)

    def momentum_of(self, variable):
        return types.SimpleNamespace(value=self._value)


@pytest.mark.parametrize("is_plain", [True, False])
def test_a_momentum_is_sent_in_parts_and_comes_back_as_a_gradient(is_plain):
    momentum = np.array([[64.0, 0.0], [-8.0, 2.0]], np.float32)
    # 1 - 1/2 is a power of two, so each step of the formula is exact. The stage counts
    # the replicas of the strategy, of which there is one outside of all scopes: then
    # the whole of the momentum is in each part, and counts twice.
    kept = tf.constant(0.0 if is_plain else 0.5)
    sent = []

    class Wire(Stage):
        def before(self, reduction):
            sent.append(reduction.gradients[0].numpy())

    reductions, _ = reduced(
        lambda rank: [Momentum([0], None, kept, tf.constant(is_plain)), Wire()],
        optimizer=OneMomentum(momentum),
    )
    extra = 0.0 if is_plain else momentum
    assert_sums(reductions, [SUMS[0] + extra, SUMS[1]])
    parts = [own[0] if is_plain else (own[0] + momentum) / 2 for own in GRADIENTS]
    assert sorted(map(bytes, sent)) == sorted(map(bytes, parts))


def test_a_guard_skips_the_update_on_all_replicas():
    transport, optimizer = FakeTransport(2), keras.optimizers.SGD()
    weight = keras.Variable(np.zeros(2))
    model = types.SimpleNamespace(trainable_variables=[weight])
    guard = FiniteGuard(model, transport, 2, stops=False)
    guard.arm(10)
    updated = []

    def replica(rank, gradients):
        run = run_of([1, 1])
        run.stages = [guard]
        own = list(map(tf.constant, gradients[rank]))
        reduction = Reduction(own, [weight], run, rank, optimizer)
        update_through(reduction, lambda: updated.append(rank))

    transport.on_replicas(lambda rank: replica(rank, GRADIENTS))
    assert sorted(updated) == [0, 1]
    # Gradients that are reduced later: only one replica sees the infinity.
    bad = [GRADIENTS[0], [np.array([np.inf], np.float32)]]
    transport.on_replicas(lambda rank: replica(rank, bad))
    assert sorted(updated) == [0, 1]
    assert all(bool(notes.is_left_out) for notes in guard.notes)


def test_groups_average_their_state_and_weigh_their_gradients():
    state = FakeBuffer(8.0, 16.0)
    run = run_of([3, 1])
    run.groups = Groups([(0, 1)])
    transport = FakeTransport(2)
    exact = Exact(transport)
    variables = [None, None]

    def replica(chain, transport, rank):
        own = list(map(tf.constant, GRADIENTS[rank]))
        reduction = Reduction(own, variables, run, rank, None)
        reduce(reduction, chain, transport)
        return reduction

    found = transport.on_replicas(lambda r: replica([GroupState([state])], exact, r))
    assert_sums(found)
    assert state.read() == [10.0, 10.0]

    # Two groups of one replica, with weights 6 and 2: 3/4 and 1/4 of their gradients.
    state, run.groups = FakeBuffer(8.0, 16.0), Groups([(0,), (1,)])
    weights = tf.constant([6.0, 2.0])

    def in_all(rank):
        stage = AllGroups([state], weights[rank], transport)
        return replica([stage], transport, rank)

    mean = [(3 * one + other) / 4 for one, other in zip(*GRADIENTS, strict=True)]
    assert_sums(transport.on_replicas(in_all), mean)
    assert state.read() == [10.0, 10.0]
    assert_sums(transport.on_replicas(lambda rank: replica([], exact, rank)))


def test_rows_may_be_added_where_the_update_is_the_same():
    rows = [
        [
            tf.IndexedSlices(
                tf.constant([[1.0]]), tf.constant([rank]), tf.constant([2, 1])
            )
        ]
        for rank in range(2)
    ]
    for optimizer, adds in (
        (keras.optimizers.SGD(), True),
        (keras.optimizers.Adam(), 0),
    ):
        found, transport = reduced(lambda rank: [TableRows()], None, optimizer, rows)
        assert transport.options == [{"sum_rows": adds, "at_once": False}]
        assert_sums(found, [np.ones((2, 1), np.float32)])


def test_a_replica_without_rows_adds_zeros():
    run = run_of([2, 0])
    run.trace(1).rows = TraceRows(present=False)
    found, _ = reduced(lambda rank: [MissingRows()], run)
    assert_sums(found, GRADIENTS[0])


def test_sharded_gradients_are_scattered_or_reduced_already():
    class Scatters:
        def scatter(self, gradients, variables):
            return [tf.reshape(gradient, [-1])[:2] for gradient in gradients]

    updated, stored = (
        object.__new__(kind) for kind in (ShardUpdatedVariable, ShardedVariable)
    )
    stored.layout = ShardLayout((7,), parts=2)
    variables = [updated, stored, None]
    transport = FakeTransport(2)

    def replica(rank):
        own = list(map(tf.constant, (*GRADIENTS[rank], GRADIENTS[rank][1])))
        reduction = Reduction(own, variables, run_of([1, 1]), rank, None)
        reduce(reduction, [Shards(Scatters())], transport)
        return reduction

    for rank, reduction in enumerate(transport.on_replicas(replica)):
        matrix, vector = GRADIENTS[rank]
        np.testing.assert_array_equal(reduction.gradients[0], matrix[0])
        np.testing.assert_array_equal(reduction.gradients[1], vector)
        np.testing.assert_array_equal(reduction.gradients[2], SUMS[1])
    assert transport.exchanges == [("sum", 1, 0)]


class TimedLink:
    """What `StepTimes` reads of a link."""

    def __init__(self, rank, workers):
        self.rank, self.workers, self.moved = (
            rank,
            workers,
            TransferSeconds(0.0, (0.0,)),
        )
        self.exchanges_of_steps = collections.deque()

    def transfer_seconds(self):
        return self.moved


def step_times_of(rank, workers=2):
    link = TimedLink(rank, workers)
    transport = types.SimpleNamespace(seconds_between_hosts=0.0)
    reducer = types.SimpleNamespace(transport=transport)
    extended = types.SimpleNamespace(worker_devices=["CPU:0"], reducer=reducer)
    return StepTimes(types.SimpleNamespace(extended=extended, link=link)), link


def test_step_times_ride_with_the_next_sum_and_all_workers_read_the_same():
    workers = [step_times_of(rank)[0] for rank in range(2)]
    transport = FakeTransport(2)

    class As:  # each worker's only replica is its rank 0
        def __init__(self, worker):
            self.worker = worker

        def sum_gradients(self, gradients, riders, rank, **options):
            return transport.sum_gradients(gradients, riders, self.worker, **options)

    def step(worker, number):
        stage, own = workers[worker], list(map(tf.constant, GRADIENTS[worker]))
        stage.begin_step(10 * number + worker, [])
        reduction = Reduction(own, [None, None], run_of([1, 1]), 0, None)
        reduce(reduction, [stage], As(worker))
        # A second sum of the same step: of another optimizer.
        again = Reduction(list(own), [None, None], run_of([1, 1]), 0, None)
        reduce(again, [stage], As(worker))
        return reduction

    for number in range(70):
        assert_sums(transport.on_replicas(lambda worker, n=number: step(worker, n)))
        # The time of step 0 has no beginning, and step 1's travels in step 2.
        found = [stage.read() for stage in workers]
        if number < 3:
            assert found == [None, None]
            continue
        assert [seen for seen, _ in found] == [number - 2] * 2
        np.testing.assert_array_equal(found[0][1], found[1][1])
        rows = [10 * (number - 2), 10 * (number - 2) + 1]
        np.testing.assert_array_equal(found[0][1][:, ROWS], rows)
        assert np.all(found[0][1][:, STEP] > 0)
    assert set(transport.exchanges) == {("sum", 2, 1), ("sum", 2, 0)}
    assert [seen for seen, _ in workers[0].since(60)] == list(range(61, 68))
    assert [seen for seen, _ in workers[0].since(-1)] == list(range(4, 68))


def test_step_times_split_a_step_into_what_a_worker_did():
    stage, link = step_times_of(rank=0, workers=4)
    now = time.time()
    clock = time.monotonic() - now

    def passes(number, label, begin, end):
        times = now + begin + clock, now + end + clock
        link.exchanges_of_steps.append(Exchange(number, label, *times))

    def table(ready, ended, waited, rows):
        mark, total = np.array([now + ready, now + ended]), np.zeros((4, 7))
        return stage._next_table(now, now + waited, rows, total, mark)

    passes(1, "bucket 1 of 1", 0.5, 0.9)
    assert not table(0.5, 1.0, waited=2.0, rows=8).any()  # of the first sum
    passes(2, "number of samples", 3.0, 3.5)
    passes(3, "bucket 1 of 2", 5.0, 5.75)
    passes(4, "bucket 2 of 2", 6.0, 6.75)
    passes(5, "number of samples", 7.25, 7.5)  # of the next step
    # From 1 to 7: 2 s for the batch, and gradients at 6, after 0.5 s for a sum.
    link.moved = TransferSeconds(0.75, (0.25, 0.5))
    stage._moved = TransferSeconds(0.0, (0.0, 0.0))
    found = table(6.0, 7.0, waited=0.5, rows=4)
    expected = np.zeros((4, len(COLUMNS)))
    expected[0, [STEP, INPUT, COMPUTE]] = 6.0, 2.0, 2.5
    expected[0, [WAITING, SENDING, ROWS]] = 2.0, 0.75, 8
    expected[[3, 2], ARRIVING] = 0.25, 0.5  # 1 and 2 ranks before
    # Two clocks are read one after the other, several times: some microseconds.
    np.testing.assert_allclose(found, expected, atol=1e-2)
    # Batches of an accumulation: no sum, the same table, and their input adds up.
    np.testing.assert_array_equal(table(6.0, 7.0, waited=0.25, rows=4), found)
    later = table(9.0, 9.5, waited=9.9, rows=1)
    assert later[0, INPUT] == 0.75 and later[0, ROWS] == 8


class StandInPipeline(ElasticPipeline):
    """One replica of three hosts; `rounds` are what the others have decided."""

    def __init__(self, rounds, outcome):
        self.rounds, self.outcome, self.brought = rounds, outcome, []
        self.hosts = types.SimpleNamespace(workers=3)
        self.communication = types.SimpleNamespace(min_hosts=1, repeated_rows="auto")
        self.transport = types.SimpleNamespace(replicas=1, is_compiled=False)

    def begin_quorum(self, rules, values):
        self.rules = rules

    def exchange_state(self, values):
        return list(values)

    def meet_quorum(self, update, weight, values, rank):
        self.brought.append((int(update), float(weight), [v.numpy() for v in values]))
        return [tf.constant(r) for r in self.rounds], tf.constant([self.outcome, 0])


@pytest.mark.parametrize("rounds", [1, 2, 0], ids=["in time", "late", "left out"])
def test_a_host_applies_the_means_of_all_rounds_that_it_missed(rounds):
    stacked = [np.arange(4.0 * rounds, dtype=np.float32).reshape(rounds, 2, 2)]
    stacked += [np.arange(2.0 * rounds, dtype=np.float32).reshape(rounds, 2)]
    pipeline = StandInPipeline(stacked, MET if rounds else LEFT_OUT)
    strategy = types.SimpleNamespace(
        extended=types.SimpleNamespace(reducer=pipeline, worker_devices=["CPU:0"]),
        given=Given(HOSTS, 3, {"Communication.min_hosts": 1}),
    )
    count, optimizer, run = FakeBuffer(6.0), keras.optimizers.SGD(), run_of([3])
    sync = tfdp.sync.BackupWorkers(spare=1)
    stage = BackupRounds(sync, strategy, optimizer, [], count)
    stage.keep_layer_state([])
    stage.before_step(run)
    variables = [tf.Variable(gradient) for gradient in GRADIENTS[0]]
    given = Reduction(list(GRADIENTS[0]), variables, run, 0, optimizer)
    own = stage.reduced(given, tf.constant(3.0))
    ((update, weight, brought),) = pipeline.brought
    assert (update, weight, pipeline.rules.quorum) == (7, 3.0, 2)
    for sent, gradient in zip(brought, GRADIENTS[0], strict=True):
        np.testing.assert_array_equal(sent, gradient)
    reduction = Reduction(own, variables, run, 0, optimizer)
    applied = []

    def update_once():
        applied.append([gradient.numpy() for gradient in reduction.gradients])

    update_through(reduction, update_once, [stage])
    assert len(applied) == rounds and count.read() == [6.0 + rounds]
    for number, gradients in enumerate(applied):
        for gradient, means in zip(gradients, stacked, strict=True):
            np.testing.assert_array_equal(gradient, means[number])
