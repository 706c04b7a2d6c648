"""ZeRO's memory in docs/notes/planned-memory.md: the paper's table and formula."""

import pytest

from tests.support.package_source import REPOSITORY
from tfdp.plan.options import SHARD_STAGES

PAGE = REPOSITORY.joinpath("docs", "notes", "planned-memory.md").read_text("utf-8")
# Bytes for each weight: weight, gradient, optimizer state. The paper's Adam keeps a
# float32 copy of its 16-bit weights; Keras' weights are float32 under every policy.
MIXED_ADAM = (2, 2, 12)
KERAS_ADAM = (4, 4, 8)
# Table 1 of the paper, GB: by replicas, for each number of weights its three stages.
TABLE_1 = {
    1: ((120, 120, 120), (2048, 2048, 2048), (16000, 16000, 16000)),
    4: ((52.5, 41.3, 30), (896, 704, 512), (7000, 5500, 4000)),
    16: ((35.6, 21.6, 7.5), (608, 368, 128), (4750, 2875, 1000)),
    64: ((31.4, 16.6, 1.88), (536, 284, 32), (4187, 2218, 250)),
    256: ((30.4, 15.4, 0.47), (518, 263, 8), (4046, 2054, 62.5)),
    1024: ((30.1, 15.1, 0.12), (513, 257, 2), (4011, 2013, 15.6)),
}
PUBLISHED = {
    (weights, stage, replicas): gigabytes
    for replicas, of_models in TABLE_1.items()
    for weights, of_stages in zip((7.5e9, 128e9, 1e12), of_models, strict=True)
    for stage, gigabytes in enumerate(of_stages, start=1)
} | {(7.5e9, 0, 64): 120.0}


def gigabytes_of(weights, stage, replicas, adam):
    weight, gradient, state = adam
    sharded = ((state, 1), (gradient, 2), (weight, 3))  # from which stage on
    sizes = [size / (replicas if stage >= first else 1) for size, first in sharded]
    return weights * sum(sizes) / 1e9


@pytest.mark.parametrize("point", PUBLISHED, ids=str)
def test_a_figure_of_the_paper(point):
    # The paper prints three digits, some of them truncated and not rounded.
    assert gigabytes_of(*point, MIXED_ADAM) == pytest.approx(PUBLISHED[point], rel=0.03)


@pytest.mark.parametrize("stage", range(4))
def test_the_page_has_figure_1(stage):
    sizes = [gigabytes_of(7.5e9, stage, 64, adam) for adam in (MIXED_ADAM, KERAS_ADAM)]
    published = PUBLISHED[7.5e9, stage, 64]
    row = f"| {SHARD_STAGES[stage]} | {published:g} | {sizes[0]:.1f} | {sizes[1]:.1f} |"
    assert row in PAGE
