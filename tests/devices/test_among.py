"""`Transport.among`: every exchange keeps to the groups, as NumPy computes it there."""

import concurrent.futures
import functools
import threading

import numpy as np
import pytest
import tensorflow as tf

from tests.support.over_nccl import collectives_of, engine_of_hosts_over_nccl, step_of
from tests.support.workers import free_port
from tfdp.errors import CollectiveError
from tfdp.exchange.collectives import Collectives
from tfdp.exchange.in_process import InProcess
from tfdp.exchange.levels import Levels
from tfdp.exchange.over_collectives import LevelsOverCollectives
from tfdp.exchange.over_link import OverLink
from tfdp.exchange.reducer import Reducer
from tfdp.exchange.shards import ShardReducer
from tfdp.exchange.sparse import RowSum, sum_slices
from tfdp.exchange.tpu import CrossReplica
from tfdp.hosts.socket_link import SocketLink
from tfdp.plan.mesh import Mesh
from tfdp.plan.shards import OwnedLayout, ShardLayout
from tfdp.plan.topology import Groups, Topology

pytestmark = pytest.mark.timeout(250)

RANKS = 4
DEVICES = [f"/job:localhost/replica:0/task:0/device:CPU:{n}" for n in range(RANKS)]
GROUPS = {
    "within": Groups([(0, 1), (2, 3)]),
    "across": Groups([(0, 2), (1, 3)]),
    "turned": Groups([(3, 0), (2, 1)]),
    "three_and_one": Groups([(0, 2, 3), (1,)]),
    "one_and_three": Groups([(0,), (3, 2, 1)]),
    "alone": Groups([(0,), (1,), (2,), (3,)]),
    "all_turned": Groups([(3, 1, 0, 2)]),
}
# Whole numbers: no order of addition rounds.
DRAWN = np.random.default_rng(5)
MATRICES = DRAWN.integers(-9, 9, (RANKS, 5, 3)).astype("float32")
ROWS = [DRAWN.integers(-9, 9, (rank, 3)).astype("float32") for rank in range(RANKS)]
WORDS = DRAWN.integers(-9, 9, (RANKS, RANKS, 2)).astype("int32")


def transport_of(name, hosts=1):
    topology = Topology(hosts, RANKS // hosts)
    if name == "in_process":
        return InProcess(DEVICES, topology)
    return Collectives(DEVICES, topology, hint="ring")


def layouts_of(size):
    return [ShardLayout((5, 3), size), OwnedLayout((5, 3), size, size - 1)]


def exchanges(part, rank, size, first=0):
    """The results of every exchange of a replica in a group of that size; `first`: the
    rank of this process's first replica."""
    number = first + rank
    own = tf.constant(MATRICES[number])
    layouts = layouts_of(size)
    in_shards = ShardReducer(Reducer(part))
    shards = in_shards.reduce_scatter([own, own], layouts, rank)
    slices = tf.IndexedSlices(
        own[:2], tf.constant([number, 1]), tf.constant([RANKS, 3])
    )
    rows = sum_slices(part, slices, rank, RowSum("table", True))
    return {
        "sum": part.all_reduce([own, own], rank, "bucket"),
        "shards": shards,
        "wholes": in_shards.all_gather(shards, layouts, rank),
        "rows": part.gather(tf.constant(ROWS[number]), rank),
        "first": part.broadcast([own, tf.constant(number % 2 == 0)], rank),
        "started": part.start(tf.constant(WORDS[number]), rank, "words")[0],
        "swapped": part.all_to_all(tf.constant(WORDS[number][:size]), rank, "words"),
        "table": tf.math.unsorted_segment_sum(rows.values, rows.indices, RANKS),
        "part": tf.constant(part.part_of(rank)),
    }


def expected(group, rank):
    """What NumPy computes for them."""
    place = group.index(rank)
    total = sum(MATRICES[peer] for peer in group)
    shards = []
    for layout in layouts_of(len(group)):
        shard = np.zeros(np.prod(layout.shard_shape(place)), "float32")
        start, stop = layout.bounds(place)
        shard[: stop - start] = total.reshape(-1)[start:stop]
        shards.append(shard.reshape(layout.shard_shape(place)))
    table = np.zeros([RANKS, 3], "float32")
    for peer in group:
        np.add.at(table, [peer, 1], MATRICES[peer][:2])
    return {
        "sum": [total, total],
        "shards": shards,
        "wholes": [total, total],
        "rows": np.concatenate([ROWS[peer] for peer in group]),
        "first": [MATRICES[group[0]], group[0] % 2 == 0],
        "started": WORDS[list(group)],
        "swapped": np.stack([WORDS[peer][place] for peer in group]),
        "table": table,
        "part": place,
    }


def assert_as_numpy(found, groups):
    for rank, results in enumerate(found):
        wanted = expected(groups.of(rank), rank)
        for name, value in wanted.items():
            tf.nest.map_structure(np.testing.assert_array_equal, results[name], value)


@pytest.mark.quick
@pytest.mark.parametrize("hosts", [1, 2])
@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("name", ["in_process", "tensorflow"])
def test_exchanges_are_those_of_the_group(name, groups, hosts):
    transport, groups = transport_of(name, hosts), GROUPS[groups]

    def replica(transport, rank):
        return exchanges(transport.among(groups), rank, len(groups.of(rank)))

    assert_as_numpy(step_of(transport, replica)(), groups)


@pytest.mark.parametrize("hosts", [1, 2])
@pytest.mark.parametrize("name", ["in_process", "tensorflow"])
def test_two_partitions_and_the_whole_take_turns(name, hosts):
    transport = transport_of(name, hosts)
    everyone = transport.topology.everyone
    assert transport.among(everyone) is transport
    names = "within", "three_and_one", "all_turned", "within"
    found = [everyone, *(GROUPS[name] for name in names)]

    def replica(transport, rank):
        return [
            exchanges(transport.among(groups), rank, len(groups.of(rank)))
            for groups in found
        ]

    step = step_of(transport, replica)
    for _ in range(2):
        for groups, results in zip(found, zip(*step(), strict=True), strict=True):
            assert_as_numpy(results, groups)


@pytest.mark.parametrize("name", ["in_process", "tensorflow"])
def test_groups_may_exchange_unlike_tensors(name):
    def replica(transport, rank):
        part, sums = transport.among(GROUPS["across"]), []
        for number in range(1 + rank % 2):
            own = tf.fill([3 + rank % 2, number + 1], float(rank))
            sums += part.all_reduce([own], rank, "sum")
        return sums

    found = step_of(transport_of(name), replica)()
    for rank, sums in enumerate(found):
        for number, total in enumerate(sums):
            shape = [3 + rank % 2, number + 1]
            np.testing.assert_array_equal(total, np.full(shape, 2.0 + 2 * (rank % 2)))


@pytest.mark.parametrize("name", ["in_process", "tensorflow"])
def test_unlike_tensors_within_a_group_are_refused(name):
    def replica(transport, rank):
        own = tf.zeros([3 + rank])
        return transport.among(GROUPS["across"]).all_reduce([own], rank, "sum")

    with pytest.raises(CollectiveError, match="Replicas 0 and 2 would exchange"):
        step_of(transport_of(name), replica)()


def levels_of(host, link, devices=2, over=Levels, wire_dtype=None, **options):
    first = host * devices % RANKS
    inner = InProcess(DEVICES[first : first + devices], Topology(1, devices))
    outer = OverLink(inner.devices[0], link, wire_dtype)
    return over(inner, outer, **options)


def on_hosts(work, make=None):
    """`work(levels, host)` on two hosts of replicas: threads, linked by sockets."""
    make = make or functools.partial(levels_of, shards_over_hosts=True)
    address, met = f"127.0.0.1:{free_port()}", threading.Barrier(2, timeout=60)

    def host(rank):
        link = SocketLink(rank, 2, address, timeout_seconds=60)
        levels = make(rank, link)
        try:
            met.wait()
            return work(levels, rank)
        finally:
            levels.close()
            met.wait()
            link.close()

    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        return [one for found in threads.map(host, range(2)) for one in found]


# Within hosts in the other order, too: the places are those of the groups.
@pytest.mark.parametrize("groups", [((0, 1), (2, 3)), ((1, 0), (2,), (3,))])
def test_groups_within_hosts_of_several(groups):
    groups = Groups(groups)

    def work(levels, host):
        def replica(levels, rank):
            size = len(groups.of(2 * host + rank))
            return exchanges(levels.among(groups), rank, size, 2 * host)

        return step_of(levels, replica)()

    assert_as_numpy(on_hosts(work), groups)


@pytest.mark.parametrize("owner", range(RANKS))
def test_shards_over_hosts_of_any_owner(owner):
    layouts = [OwnedLayout((5, 3), RANKS, owner), ShardLayout((5,), RANKS)]

    def work(levels, host):
        def replica(levels, rank):
            own = tf.constant(MATRICES[2 * host + rank])
            of_both = [own, own[:, 0]]
            in_shards = ShardReducer(Reducer(levels))
            shards = in_shards.reduce_scatter(of_both, layouts, rank)
            return shards, in_shards.all_gather(shards, layouts, rank)

        return step_of(levels, replica)()

    total = MATRICES.sum(axis=0)
    for rank, (shards, wholes) in enumerate(on_hosts(work)):
        np.testing.assert_array_equal(shards[0], total if rank == owner else [])
        start, stop = layouts[1].bounds(rank)
        np.testing.assert_array_equal(shards[1][: stop - start], total[start:stop, 0])
        np.testing.assert_array_equal(wholes[0], total)
        np.testing.assert_array_equal(wholes[1], total[:, 0])


def test_first_replicas_exchange_across_hosts():
    def work(levels, host):
        assert levels.between_hosts.part_of(0) == host

        def replica(levels, rank):
            if rank:
                return []
            part, own = levels.between_hosts, tf.constant(MATRICES[2 * host])
            layouts = layouts_of(2)
            ranges = part.reduce_scatter([own, own], layouts, 0, "bucket")
            return [
                *part.all_reduce([own], 0, "sum"),
                *part.all_gather(ranges, layouts, 0, "bucket"),
                part.gather(own, 0),
                *part.broadcast([own], 0),
            ]

        return step_of(levels, replica)()

    total = MATRICES[0] + MATRICES[2]
    both = np.concatenate([MATRICES[0], MATRICES[2]])
    for found in on_hosts(work)[::2]:
        for result, wanted in zip(
            found, [total, total, total, both, MATRICES[0]], strict=True
        ):
            np.testing.assert_array_equal(result, wanted)


# By the devices of a host: groups that cross hosts, alike on each.
CROSSING = {
    2: [[(0, 2), (1, 3)], [(1, 3), (2, 0)]],
    4: [
        [(0, 4), (1, 5), (2, 6), (3, 7)],
        [(0, 2, 4, 6), (1, 3, 5, 7)],
        [(5, 4, 1, 0), (2, 3, 6, 7)],
        [(0, 1, 3, 4, 5, 7), (2, 6)],
    ],
}


@pytest.mark.parametrize("over", [True, False, "ring", "nccl"])
@pytest.mark.parametrize(
    "devices, groups", [(n, each) for n in CROSSING for each in CROSSING[n]]
)
def test_sums_over_groups_that_cross_hosts(devices, groups, over):
    groups = Groups(groups)

    def make(host, link):
        if isinstance(over, str):
            engine = functools.partial(LevelsOverCollectives, hint=over)
            return levels_of(host, link, devices, engine)
        return levels_of(host, link, devices, shards_over_hosts=over)

    def work(levels, host):
        sent = levels.bytes_between_hosts

        def replica(levels, rank):
            number, part = host * devices + rank, levels.among(groups)
            assert part.part_of(rank) == groups.place_of(number)
            own = tf.fill([30, 5], float(number)) + tf.range(5.0)
            sums = part.all_reduce([own, own[0] * 2], rank, "parts")
            # Others may come before and after it.
            [total] = levels.all_reduce([own[0]], rank, "all")
            return [*sums, total, *part.all_reduce([own[1]], rank, "more")]

        found = step_of(levels, replica)()
        if sent is not None:
            found = [[*one, levels.bytes_between_hosts - sent] for one in found]
        return found

    for rank, found in enumerate(on_hosts(work, make)):
        group = groups.of(rank)
        row = sum(group) + len(group) * np.arange(5.0)
        everyone = sum(range(2 * devices)) + 2 * devices * np.arange(5.0)
        wanted = [np.tile(row, [30, 1]), 2 * row, everyone, row]
        for result, want in zip(found, wanted, strict=False):
            np.testing.assert_array_equal(result, want)
        # With two hosts each sends its sums once.
        if len(found) > len(wanted):
            numbers = len(groups) * (30 * 5 + 5 + 5) + 5
            assert 4 * numbers <= found[-1] < 4 * numbers + 1000


@pytest.mark.parametrize("shape", [(2, 2), (4, 1)])
@pytest.mark.parametrize("over_hosts", [True, False])
def test_parts_of_a_mesh_over_hosts(shape, over_hosts):
    """The sum of each part over its copies, and with a wire type in half the bytes."""
    mesh = Mesh(shape, ("data", "model"), "data")
    layout = mesh.layout((40, 6), (None, "model"))
    whole = np.tile(MATRICES.reshape(RANKS, 15)[:, :6], [1, 40]).reshape(RANKS, 40, 6)

    def work_in(wire_dtype, levels, host):
        def replica(levels, rank):
            reducer, own = ShardReducer(Reducer(levels)), whole[2 * host + rank]
            if layout is None:  # no axis cuts it
                return levels.all_reduce([tf.constant(own)], rank, "sum", wire_dtype)
            parts = reducer.of(layout)
            assert parts.part_of(rank) == rank
            shards = parts.reduce_scatter([tf.constant(own)], [layout], rank)
            return [*parts.all_gather(shards, [layout], rank), *shards]

        sent = levels.bytes_between_hosts
        found = step_of(levels, replica)()
        return [[*one, levels.bytes_between_hosts - sent] for one in found]

    sent = []
    for wire_dtype in (None, "bfloat16"):
        make = functools.partial(
            levels_of, shards_over_hosts=over_hosts, wire_dtype=wire_dtype
        )
        for rank, found in enumerate(
            on_hosts(functools.partial(work_in, wire_dtype), make)
        ):
            total = whole.sum(axis=0)  # small whole numbers, in any type
            np.testing.assert_array_equal(found[0], total)
            if layout is not None:
                begin = 3 * (rank % 2)
                np.testing.assert_array_equal(found[1], total[:, begin : begin + 3])
        sent.append(found[-1])
    assert 900 < sent[0] < 2000 and sent[1] < sent[0] - 400, sent


def test_what_groups_that_cross_hosts_cannot_is_refused():
    def work(levels, host):
        part = levels.among(levels.topology.across_hosts)
        own = tf.zeros([4])
        for call in (
            lambda: part.gather(own, 0),
            lambda: part.broadcast([own], 0),
            lambda: part.reduce_scatter([own], [ShardLayout((4,), 2)], 0, ""),
            lambda: part.all_gather([own], [ShardLayout((8,), 2)], 0, ""),
            lambda: part.all_to_all(own, 0, ""),
            lambda: levels.among(Groups([(0, 3), (1, 2)])),
        ):
            with pytest.raises(CollectiveError, match="no exchanges|no all-to-all"):
                call()
        return []

    on_hosts(work)


def test_what_a_transport_cannot_is_refused():
    with engine_of_hosts_over_nccl(2) as engine:
        within = engine.among(engine.topology.within_hosts)
        assert isinstance(within, InProcess)
        step = step_of(engine, lambda engine, rank: within.part_of(rank))
        assert not collectives_of(step)
        with pytest.raises(CollectiveError, match="no exchanges among"):
            engine.among(Groups([(0, 1, 2, 3)]))
    with pytest.raises(CollectiveError, match="no exchanges among"):
        CrossReplica(4).among(GROUPS["within"])
    with pytest.raises(CollectiveError, match="no exchanges among"):
        transport_of("in_process").among(Groups([(0, 1)]))
