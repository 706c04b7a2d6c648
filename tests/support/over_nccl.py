"""Engines that behave as over NCCL, on CPUs: what they build runs on TensorFlow's ring.

NCCL is not on CPUs, so only what an engine asks TensorFlow for shows there: types,
groups, keys and the order of launches.
"""

import contextlib

import tensorflow as tf

from tests.support.stand_in_link import StandInLink
from tfdp.cluster import Cluster
from tfdp.exchange.collectives import Collectives
from tfdp.exchange.in_process import InProcess
from tfdp.exchange.over_collectives import LevelsOverCollectives
from tfdp.exchange.over_link import OverLink
from tfdp.plan.communication import Communication
from tfdp.plan.topology import Topology


class LinkOfOne(StandInLink):
    """Of a worker that has no others."""

    def leave_note(self, key, text):
        pass

    def wait_for_notes(self, *arguments, **options):
        return {}


def engine_over_nccl(replicas, hierarchy=None, devices=None):
    """A `Collectives` that asks for the ring and does all else as over NCCL."""
    devices = devices or [f"CPU:{rank}" for rank in range(replicas)]
    topology = Topology(*(hierarchy or (1, replicas)))
    engine = Collectives(devices, topology, hint="nccl")
    engine.hint = "ring"
    engine._has_reduce_scatter = False  # there is none for CPUs
    return engine


@contextlib.contextmanager
def engine_of_hosts_over_nccl(replicas):
    """The engine of several hosts, of one host, so that it runs in one process."""
    link = LinkOfOne(Cluster(1, 0, None), Communication())
    devices = [f"CPU:{rank}" for rank in range(replicas)]
    engine = LevelsOverCollectives(
        InProcess(devices, Topology(1, replicas)), OverLink(devices[0], link), "nccl"
    )
    engine.large.hint = "ring"
    try:
        yield engine
    finally:
        engine.close()


def step_of(engine, replica):
    """A function in which every replica calls `replica(engine, rank)`."""

    @tf.function(autograph=False)
    def step(*arguments):
        ranks = range(len(engine.devices))
        with engine.run():
            return [replica(engine, rank, *arguments) for rank in ranks]

    return step


def collectives_of(step, *arguments):
    """The collective ops in the graph of a step."""
    graph = step.get_concrete_function(*arguments).graph
    ops = graph.get_operations()
    return [op for op in ops if op.type.startswith("Collective")]
