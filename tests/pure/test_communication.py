import dataclasses

import numpy as np
import pytest

from tfdp.errors import ConfigurationError
from tfdp.plan.communication import Communication
from tfdp.plan.topology import Topology


@pytest.mark.parametrize(
    "arguments",
    [
        {"bucket_bytes": 0},
        {"bucket_bytes": 1.5},
        {"bucket_bytes": True},
        {"first_bucket_bytes": -1},
        {"engine": "mpi4"},
        {"hierarchy": "three-level"},
        {"hierarchy": (2,)},
        {"hierarchy": (0, 4)},
        {"hierarchy": ("2", "2")},
        {"wire_dtype": "int8"},
        {"wire_dtype": "float32"},
        {"timeout_seconds": 0},
        {"timeout_seconds": float("inf")},
        {"timeout_seconds": "10"},
        {"checksum": 1},
    ],
)
def test_nonsense_is_refused_when_made(arguments):
    with pytest.raises(ConfigurationError, match="Received"):
        Communication(**arguments)


def test_is_frozen_and_hashable():
    communication = Communication(hierarchy=[2, 2])
    assert hash(communication) == hash(Communication(hierarchy=(2, 2)))
    with pytest.raises(dataclasses.FrozenInstanceError):
        communication.bucket_bytes = 1


@pytest.mark.parametrize(
    "hierarchy, expected",
    [("auto", (2, 2)), ("flat", (1, 4)), ((4, 1), (4, 1)), ((2, 2), (2, 2))],
)
def test_hierarchy_resolves_to_a_topology(hierarchy, expected):
    topology = Communication(hierarchy=hierarchy).resolve_topology(Topology(2, 2))
    assert (topology.hosts, topology.devices_per_host) == expected


def test_a_hierarchy_of_other_size_is_refused_with_both_numbers():
    with pytest.raises(ConfigurationError, match="makes 6 replicas, but there are 4"):
        Communication(hierarchy=(2, 3)).resolve_topology(Topology(1, 4))


def test_seconds_may_be_numpys_and_are_plain_numbers_then():
    """Workers compare their settings as JSON."""
    given = Communication(timeout_seconds=np.float32(60), silence_seconds=np.int64(30))
    assert type(given.timeout_seconds) is type(given.silence_seconds) is float
    assert given == Communication(timeout_seconds=60, silence_seconds=30)
