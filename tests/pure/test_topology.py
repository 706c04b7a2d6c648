import pytest

from tfdp.errors import ConfigurationError
from tfdp.plan.topology import Groups, Topology


def test_groups_are_host_major():
    topology = Topology(hosts=3, devices_per_host=2)
    assert topology.everyone == ((0, 1, 2, 3, 4, 5),)
    assert topology.within_hosts == ((0, 1), (2, 3), (4, 5))
    assert topology.across_hosts == ((0, 2, 4), (1, 3, 5))
    assert topology.across_hosts.place_of(3) == 1  # its host
    assert topology.within_hosts.place_of(3) == 1  # its number there


def test_every_rank_is_in_one_group_of_each_level():
    topology = Topology(hosts=4, devices_per_host=3)
    for groups in (topology.within_hosts, topology.across_hosts):
        assert sorted(r for group in groups for r in group) == list(range(12))
        for rank in range(12):
            assert groups.of(rank)[groups.place_of(rank)] == rank


def test_groups_of_one_host_count_from_its_first_rank():
    groups = Groups([(0, 2), (1, 3), (4, 5, 7), (6,)])
    assert groups.inside(range(4, 8)) == ((0, 1, 3), (2,))
    assert groups.inside([0, 1, 2, 3]) == ((0, 2), (1, 3))
    assert groups.inside([2, 3]) is None


@pytest.mark.parametrize(
    "groups", [[(0, 1), (1, 2)], [(0, 2)], [(1, 2)], [(0, 1), ()], [(0, 0, 1)]]
)
def test_a_rank_is_in_one_group(groups):
    with pytest.raises(ConfigurationError, match="one group"):
        Groups(groups)


@pytest.mark.parametrize(
    "hosts, devices, two_level", [(1, 8, False), (8, 1, False), (2, 2, True)]
)
def test_two_levels_need_both(hosts, devices, two_level):
    assert Topology(hosts, devices).is_two_level is two_level


@pytest.mark.parametrize("value", [0, -1, 1.5, "2", True, None])
def test_nonsense_is_refused_with_the_value(value):
    with pytest.raises(ConfigurationError, match="Received"):
        Topology(hosts=value)
