import pytest

from tfdp.errors import ConfigurationError
from tfdp.plan.topology import Topology


def test_groups_are_host_major():
    topology = Topology(hosts=3, devices_per_host=2)
    assert topology.within_host_groups == ((0, 1), (2, 3), (4, 5))
    assert topology.across_host_groups == ((0, 2, 4), (1, 3, 5))
    assert topology.host_of(3) == 1
    assert topology.local_rank_of(3) == 1


def test_every_rank_is_in_one_group_of_each_level():
    topology = Topology(hosts=4, devices_per_host=3)
    for groups in (topology.within_host_groups, topology.across_host_groups):
        assert sorted(r for group in groups for r in group) == list(range(12))
    for rank in topology.all_ranks:
        assert rank in topology.within_host_group_of(rank)


@pytest.mark.parametrize(
    "hosts, devices, two_level", [(1, 8, False), (8, 1, False), (2, 2, True)]
)
def test_two_levels_need_both(hosts, devices, two_level):
    assert Topology(hosts, devices).is_two_level is two_level


@pytest.mark.parametrize("value", [0, -1, 1.5, "2", True, None])
def test_nonsense_is_refused_with_the_value(value):
    with pytest.raises(ConfigurationError, match="Received"):
        Topology(hosts=value)
