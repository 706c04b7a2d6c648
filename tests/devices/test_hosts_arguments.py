"""What `MultiHostDataParallelStrategy` refuses before it looks for anybody."""

import pytest

import tfdp
from tfdp.errors import ConfigurationError

TWO = tfdp.Cluster(rank=0, workers=2, coordinator="127.0.0.1:1")


@pytest.mark.parametrize(
    "options, words",
    [
        ({"cluster": "host:1"}, "found no cluster.*'host:1'"),
        ({"cluster": None}, "found no cluster.*None"),
        ({"shard_group": "rack"}, "shard_group must be.*'rack'"),
        ({"devices_per_host": 0}, "an int of at least 1. Received: 0"),
        ({"devices_per_host": "2"}, "an int of at least 1. Received: '2'"),
        ({"communication": "nccl"}, "a tfdp.Communication. Received: 'nccl'"),
        ({"offload": "optimizer"}, "with shard='none' there are no shards"),
        (
            {"shard": 1, "communication": tfdp.Communication(engine="tensorflow")},
            "carries no shards between hosts",
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
