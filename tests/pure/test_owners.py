"""Owners of matrices: every host finds the same, and no replica has far more to do."""

import itertools
import random

from tfdp.plan.owners import assign_owners, newton_schulz_cost
from tfdp.plan.shards import OwnedLayout, ShardLayout, overlap


def test_the_largest_load_is_within_grahams_bound_of_the_best():
    rng = random.Random(7)
    for parts, count in itertools.product((2, 3), (1, 2, 5, 7)):
        costs = [rng.randint(1, 20) for _ in range(count)]
        loads = [0] * parts
        owners = assign_owners(costs, loads)
        per_part = [
            sum(c for c, o in zip(costs, owners, strict=True) if o == part)
            for part in range(parts)
        ]
        assert loads == per_part
        best = min(
            max(
                sum(c for c, o in zip(costs, way, strict=True) if o == part)
                for part in range(parts)
            )
            for way in itertools.product(range(parts), repeat=count)
        )
        assert max(loads) <= (4 / 3 - 1 / (3 * parts)) * best


def test_ties_go_by_place_and_later_optimizers_see_what_is_owned():
    loads = [0, 0, 0, 0]
    assert assign_owners([5, 5], loads) == [0, 1]  # two parts own nothing
    assert assign_owners([1, 1, 1], loads) == [2, 3, 2]
    assert newton_schulz_cost((3, 40)) == newton_schulz_cost((40, 3)) == 360


def test_an_owned_layout_is_whole_at_its_owner_and_empty_elsewhere():
    for parts in range(1, 7):
        for owner in range(parts):
            layout = OwnedLayout((5, 3), parts, owner)
            bounds = [layout.bounds(part) for part in range(parts)]
            starts, stops = zip(*bounds, strict=True)
            assert (0, *stops) == (*starts, layout.elements)
            lengths = [layout.length(part) for part in range(parts)]
            assert lengths == [15 * (part == owner) for part in range(parts)]
            assert layout.shard_shape(owner) == (5, 3)
    of_hosts = OwnedLayout((5, 3), 6, 3).of_hosts(2)
    assert [of_hosts.length(host) for host in range(3)] == [0, 15, 0]


def test_two_layouts_divide_each_other():
    flat, owned = ShardLayout((5, 3), 4), OwnedLayout((5, 3), 4, 2)
    pieces = [overlap(flat.bounds(part), owned.bounds(2)) for part in range(4)]
    assert pieces == [flat.bounds(part) for part in range(4)]
    low, high = overlap(flat.bounds(3), owned.bounds(1))
    assert low >= high
