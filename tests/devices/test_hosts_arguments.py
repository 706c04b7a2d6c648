"""What `MultiHostDataParallelStrategy` refuses before it looks for anybody."""

import json
import os

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tests.pure.test_socket_link import on_workers
from tests.support.parity import make_strategy
from tests.support.stand_in_link import StandInLink
from tfdp.errors import CollectiveError, ConfigurationError
from tfdp.exchange.host_group import HostGroup
from tfdp.strategies import connect_hosts, multi_host

TWO = tfdp.Cluster(rank=0, workers=2, coordinator="127.0.0.1:1")


@pytest.mark.parametrize(
    "options, words",
    [
        ({"cluster": "host:1"}, "found no cluster.*'host:1'"),
        ({"cluster": None}, "found no cluster.*None"),
        ({"shard_group": "rack"}, "shard_group must be.*'rack'"),
        ({"devices_per_host": 0}, "an integer of at least 1. Received: 0"),
        ({"devices_per_host": "2"}, "an integer of at least 1. Received: '2'"),
        ({"communication": "nccl"}, "a tfdp.Communication. Received: 'nccl'"),
        ({"offload": "optimizer"}, "with shard='none': .*there are no shards"),
        (
            {"shard": 1, "communication": tfdp.Communication(engine="tensorflow")},
            "carry no shards between hosts",
        ),
    ],
)
def test_nonsense_is_refused(options, words):
    with pytest.raises(ConfigurationError, match=words):
        tfdp.MultiHostDataParallelStrategy(**{"cluster": TWO, **options})


@pytest.mark.parametrize(
    "make", [tfdp.DataParallelStrategy, tfdp.HierarchicalAllReduce]
)
def test_communication_is_checked_elsewhere_too(make):
    with pytest.raises(ConfigurationError, match="a tfdp.Communication. Received: 25"):
        make(communication=25)


@pytest.mark.parametrize(
    "others", [np.array([3, 4], "int32"), np.array([[1.0], [2.0]], "float32")]
)
def test_an_array_of_another_kind_than_the_chiefs_is_refused(others):
    """Equal bytes: they were taken for numbers of the own type and shape."""
    chiefs = np.array([1, 2], "float32")

    def work(link):
        value = others if link.rank else chiefs
        return HostGroup(link).from_chief(value, "weights")

    for error in on_workers(2, work):
        assert isinstance(error, CollectiveError)
        assert "gather of at most 8 bytes each (weights: float32 [2])" in str(error)


@pytest.fixture
def nobody_else(monkeypatch):
    monkeypatch.setattr(connect_hosts, "make_link", StandInLink)
    monkeypatch.setattr(multi_host.atexit, "register", lambda function: None)


def test_a_child_that_ends_does_not_close_what_its_parent_has(nobody_else, monkeypatch):
    """`os.fork` and then `sys.exit`: the child has the parent's `atexit`, too."""
    strategy = tfdp.MultiHostDataParallelStrategy(cluster=TWO)
    closed = []
    monkeypatch.setattr(strategy.link, "close", lambda: closed.append(os.getpid()))
    with monkeypatch.context() as child:
        child.setattr(multi_host.os, "getpid", lambda: -1)
        strategy.close()
    assert closed == []
    strategy.close()
    assert closed == [os.getpid()]


# As TensorFlow's tutorials for several workers have it.
def is_chief(resolver):
    task_type, task_id = resolver.task_type, resolver.task_id
    has_chief = "chief" in resolver.cluster_spec().as_dict()
    return task_type == "chief" or (
        task_type == "worker" and task_id == 0 and not has_chief
    )


@pytest.mark.parametrize("rank", [0, 1])
def test_the_resolver_tells_the_place(nobody_else, rank):
    cluster = tfdp.Cluster(workers=2, rank=rank, coordinator="node1:2345")
    strategy = tfdp.MultiHostDataParallelStrategy(cluster)
    resolver = strategy.cluster_resolver
    assert (resolver.task_type, resolver.task_id) == ("worker", rank)
    assert resolver.cluster_spec().as_dict() == {"worker": ["node1:2345", "host1"]}
    assert resolver.num_accelerators() == {"GPU": 0}
    assert is_chief(resolver) == strategy.is_chief


@pytest.mark.parametrize(
    "jobs, task, rank",
    [
        ({"worker": ["a:1", "b:1"]}, {"type": "worker", "index": 1}, 1),
        ({"chief": ["c:1"], "worker": ["a:1"]}, {"type": "chief", "index": 0}, 0),
        ({"chief": ["c:1"], "worker": ["a:1"]}, {"type": "worker", "index": 0}, 1),
    ],
)
def test_the_resolver_tells_what_tf_config_says(
    nobody_else, monkeypatch, jobs, task, rank
):
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": jobs, "task": task}))
    strategy = tfdp.MultiHostDataParallelStrategy()
    resolver = strategy.cluster_resolver
    assert strategy.cluster.rank == rank
    assert (resolver.task_type, resolver.task_id) == (task["type"], task["index"])
    assert resolver.cluster_spec().as_dict() == jobs
    assert is_chief(resolver) == strategy.is_chief


def test_replicas_draw_apart_from_those_of_all_other_hosts(nobody_else, monkeypatch):
    """By their ranks among all: the first one of every host drew alike."""
    monkeypatch.setattr(multi_host, "use_virtual_devices", lambda count: None)
    seen = []
    for rank in (0, 1):
        strategy = tfdp.MultiHostDataParallelStrategy(
            tfdp.Cluster(workers=2, rank=rank, coordinator="node1:2345"),
            devices_per_host=2,
        )
        with strategy.scope():
            state = keras.random.SeedGenerator(7).state.value
        # Worker 0's, which a stand-in cannot ask for.
        for copy in state.values:
            copy.assign([7, 0])
        read = tf.function(lambda s=state: tf.identity(s))
        seen += strategy.experimental_local_results(strategy.run(read))
    one_host = make_strategy(4)
    with one_host.scope():
        state = keras.random.SeedGenerator(7).state.value
    result = one_host.run(tf.function(lambda: tf.identity(state)))
    expected = one_host.experimental_local_results(result)
    for mine, theirs in zip(seen, expected, strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_the_resolver_of_a_lone_worker():
    cluster = tfdp.Cluster(workers=1, rank=0, coordinator=None)
    resolver = tfdp.MultiHostDataParallelStrategy(cluster).cluster_resolver
    assert (resolver.task_type, resolver.task_id) == ("worker", 0)
