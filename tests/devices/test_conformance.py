"""The conformance table: N replicas give one device's answer, row by row.

{optimizers} x {options} x {layouts} x {kinds of batches}; see
`tests/support/conformance_table.py` for the rows and `conformance_reference.py` for the
bound. The rows without the mark `slow` cover every optimizer, every option, every
layout and every kind; the tier `all` runs every one.
"""

import itertools

import numpy as np
import pytest

from tests.support.conformance import replicas_of
from tests.support.conformance_reference import reference, worst_ratio
from tests.support.conformance_table import (
    KINDS,
    LAYOUTS,
    OPTIMIZERS,
    OPTIONS,
    UNSHARDABLE,
    WITH_OWNERS,
)
from tests.support.parity import unequal_copies
from tests.support.slow_rows import made
from tfdp.exchange import sparse

WITH_ALL_OPTIONS = ("SGD", "Adam")
# Every option on one layout, and on one with shards; every optimizer on one of either.
COVERING_LAYOUTS = ("2x2", "3-parameters")
COVERING_SHARDS = ("2-gradients", "4-optimizer", "2x2-tensorflow-parameters")
COVERED_WITH_ALL_OPTIONS = "Adam"


def is_covering(optimizer, option, layout):
    if optimizer == COVERED_WITH_ALL_OPTIONS and layout in COVERING_LAYOUTS:
        return True
    if option != "plain":
        return False
    if optimizer == COVERED_WITH_ALL_OPTIONS:
        return layout in (
            *COVERING_SHARDS,
            *("2", "4", "2-sum", "2x2-tensorflow", "tpu-2", "tpu-4-optimizer"),
        )
    if optimizer in WITH_OWNERS:
        return layout in ("2-optimizer", "3-parameters", "4-parameters")
    if optimizer in ("LAMB", "SGD"):
        return layout in ("2x2", "3-gradients", "tpu-2")
    return layout == "2x2"


def is_in_table(optimizer, option, layout):
    is_sharded = LAYOUTS[layout].shard != "none"
    if is_sharded and optimizer in UNSHARDABLE:
        return False
    if is_sharded and LAYOUTS[layout].engine == "tpu" and optimizer in WITH_OWNERS:
        return False
    # Collectives over two levels differ from those in process by their transport only.
    return layout != "2x2-tensorflow" or optimizer in WITH_ALL_OPTIONS


# Kinds last: they share the compiled step.
ROWS = made(
    pytest.param(
        *row,
        kind,
        id="-".join((*row, kind)),
        marks=() if is_covering(*row) else pytest.mark.slow,
    )
    for row in itertools.product(OPTIMIZERS, OPTIONS, LAYOUTS)
    if is_in_table(*row)
    for kind in KINDS
)


@pytest.fixture(autouse=True)
def _clean_session():
    """In the place of the folder's, which would throw the compiled steps away."""


@pytest.fixture(autouse=True)
def _small_tables_travel_by_rows(monkeypatch):
    """The table of six words has 72 bytes: it would go into a bucket."""
    monkeypatch.setattr(sparse, "SMALL_TABLE_BYTES", 0)


def is_in_parts(layout, optimizer, model):
    # Adafactor updates the table whole, at an owner.
    transport = model.distribute_strategy.extended.reducer.transport
    is_exchanged = layout.shard == "parameters" and transport.to_each is not None
    return is_exchanged and "Adafactor" not in optimizer


@pytest.mark.quick
@pytest.mark.worth_seconds(22)
@pytest.mark.parametrize("optimizer, option, layout, kind", ROWS)
def test_equals_one_device(optimizer, option, layout, kind, record_property):
    # In half precision the rounding of activations is far above that of the exchange:
    # one device then takes the batch in the replicas' parts.
    parts = layout if OPTIONS[option].is_half else None
    chosen, replicas = LAYOUTS[layout], replicas_of(optimizer, option, layout)
    # A table in parts has the gradients of each occurrence, as on one device.
    has_rows = chosen.shard == "none" or is_in_parts(chosen, optimizer, replicas.model)
    is_dense = not has_rows or chosen.repeated_rows == "sum"
    answer, movement, bounds = reference(optimizer, option, kind, parts, is_dense)
    got = replicas.run(kind)

    assert got.exact == answer.exact
    assert unequal_copies(replicas.variables) == []
    worst = worst_ratio(got.state, answer.state, bounds)
    record_property("worst_ratio_to_bound", worst)
    assert worst <= 1.0
    # A mean over all rows: one rounding each, and those of the outputs.
    np.testing.assert_allclose(got.loss, answer.loss, rtol=1e-5)

    # What the bound must not hide: nine in ten moved weights moved ten times as far.
    weights = len(replicas.model.weights)
    moved = np.concatenate([m.ravel() for m in movement[:weights]])
    bound = np.concatenate([b.ravel() for b in bounds[:weights]])
    assert np.mean(10 * bound[moved > 0] < moved[moved > 0]) > 0.9
