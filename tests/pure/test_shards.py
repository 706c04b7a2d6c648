"""How tensors are cut: every element in one shard, evenly, and aligned where cheap."""

import math
import random
import re

import pytest

from tfdp.errors import ConfigurationError
from tfdp.plan.options import SHARD_STAGES
from tfdp.plan.shards import (
    ALIGNED_ELEMENTS,
    MOST_PADDING,
    Sharding,
    ShardLayout,
    shard_stage,
    sharding_of,
)


def some_layouts():
    """Sizes around the borders (of parts, of alignment) and at random; parts 1 to 9."""
    rng = random.Random(5)
    borders = [0, 1, 2, 3, 7, 8, 9, 63, 64, 65, 127, 128, 129, 4095, 4096, 4097, 8191]
    sizes = [*borders, *(rng.randrange(1, 10 ** rng.randint(1, 9)) for _ in range(300))]
    return [ShardLayout((size,), parts) for size in sizes for parts in range(1, 10)]


LAYOUTS = some_layouts()


@pytest.mark.parametrize("stage, word", [*enumerate(SHARD_STAGES)])
def test_a_stage_goes_by_its_word_and_its_number(stage, word):
    assert shard_stage(word) == shard_stage(stage) == stage


@pytest.mark.parametrize("bad", [True, False, None, -1, 4, 1.0, "3", "weights", ""])
def test_another_stage_is_refused_and_shown(bad):
    with pytest.raises(ConfigurationError) as raised:
        shard_stage(bad)
    assert re.search(
        r"'none', 'optimizer', 'gradients', 'parameters'.*0 to 3", str(raised.value)
    )
    assert f"Received: {bad!r}." in str(raised.value)


def test_every_element_is_in_exactly_one_shard():
    for layout in LAYOUTS:
        bounds = [layout.bounds(part) for part in range(layout.parts)]
        # Each begins where the one before ends; the first at 0, the last at the end.
        starts, stops = zip(*bounds, strict=True)
        assert (0, *stops) == (*starts, layout.elements), layout
        assert all(start <= stop for start, stop in bounds), layout


def test_a_shard_is_long_enough_and_only_the_last_ones_are_short():
    for layout in LAYOUTS:
        lengths = [
            stop - start for start, stop in map(layout.bounds, range(layout.parts))
        ]
        full = layout.shard_elements
        assert max(lengths) <= full, layout
        short = [length for length in lengths if length < full]
        # At most one is partly filled; those behind it are empty.
        assert lengths == [full] * (layout.parts - len(short)) + short, layout
        assert not any(short[1:]), layout


def test_padding_is_bounded():
    for layout in LAYOUTS:
        padding = layout.parts * layout.shard_elements - layout.elements
        # Rounding up to whole shards adds fewer elements than there are parts.
        assert 0 <= padding < layout.parts + layout.elements * MOST_PADDING, layout


def test_shards_are_aligned_where_that_costs_little():
    for layout in LAYOUTS:
        is_aligned = layout.shard_elements % ALIGNED_ELEMENTS == 0
        # Rounding up to 64 elements adds at most 63 for each part.
        if layout.elements * MOST_PADDING >= layout.parts * (ALIGNED_ELEMENTS - 1):
            assert is_aligned, layout
        if not is_aligned:
            assert layout.shard_elements == math.ceil(layout.elements / layout.parts)


@pytest.mark.parametrize(
    "shape, parts, shard_elements",
    [
        ((), 2, 1),  # a scalar: the second shard is empty
        ((3, 0, 5), 4, 0),
        ((5, 3), 4, 4),
        ((64, 64), 2, 2048),
        # 65 x 64 = 4160 over 4: 1040, which 1088 = 17 x 64 would lengthen by 192
        # elements, more than 4160 / 64 = 65.
        ((65, 64), 4, 1040),
        # 100,000 over 3: 33,334, and 33,344 = 521 x 64 adds 30, less than 1562.
        ((1000, 100), 3, 33_344),
    ],
)
def test_by_hand(shape, parts, shard_elements):
    layout = ShardLayout(shape, parts)
    assert layout.elements == math.prod(shape)
    assert layout.shard_elements == shard_elements


def test_a_sharding_is_what_words_and_numbers_beside_each_other_say():
    said = sharding_of("gradients", min_bytes=5, offload="optimizer")
    assert said == Sharding(2, min_bytes=5, offload="optimizer")
    assert (said.what, said.stage, said.offloads) == ("gradients", 2, True)
    assert sharding_of(said, min_bytes=32 * 1024, offload="none") is said


@pytest.mark.parametrize(
    "beside", [{"min_bytes": 0}, {"offload": "optimizer"}, {"group": "host"}]
)
def test_what_a_sharding_says_is_not_said_beside_it(beside):
    with pytest.raises(ConfigurationError, match="Give it once"):
        sharding_of(Sharding("optimizer"), **beside)


@pytest.mark.parametrize(
    "options, words",
    [
        ({"what": "weights"}, "shard must be one of"),
        ({"group": "rack"}, "'all' or 'host'. Received: 'rack'"),
        ({"min_bytes": -1}, "at least 0. Received: -1"),
        ({"min_bytes": True}, "Received: True"),
        ({"offload": True}, "'none' or 'optimizer'. Received: True"),
        ({"offload": "optimizer"}, "there are no shards"),
    ],
)
def test_a_sharding_is_checked_when_it_is_made(options, words):
    with pytest.raises(ConfigurationError, match=words):
        Sharding(**options)


@pytest.mark.parametrize(
    "sharding, parts, needed",
    [
        (Sharding(), 4, False),
        (Sharding("optimizer"), 1, False),
        (Sharding("optimizer"), 2, True),
        (Sharding("optimizer", offload="optimizer"), 1, True),
    ],
)
def test_where_there_is_nothing_to_share_nothing_is_sharded(sharding, parts, needed):
    assert sharding.is_needed(parts) is needed
