"""`tfdp.sync`: values that are checked when they are made."""

import dataclasses
import json

import pytest

import tfdp
from tfdp.errors import ConfigurationError
from tfdp.step.distributed_optimizer import checked_sync
from tfdp.sync.rounds import fragments_of, synchronization_of

DILOCO, LOCAL_SGD = tfdp.sync.DiLoCo, tfdp.sync.LocalSGD


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: LOCAL_SGD(0), "LocalSGD.every must be an integer of at least 1"),
        (lambda: LOCAL_SGD(True), "Received: True"),
        (lambda: LOCAL_SGD(2.0), "Received: 2.0"),
        (lambda: LOCAL_SGD(2, start_step=-1), "LocalSGD.start_step"),
        (lambda: LOCAL_SGD(2, across="host"), "must be 'hosts'"),
        (lambda: DILOCO(every=0), "DiLoCo.every"),
        (lambda: DILOCO(start_step=-1), "DiLoCo.start_step"),
        (lambda: DILOCO(across=None), "Received: None"),
        (lambda: DILOCO(outer_learning_rate=-0.1), "of at least 0, and finite"),
        (lambda: DILOCO(outer_learning_rate=float("inf")), "Received: inf"),
        (lambda: DILOCO(outer_learning_rate=float("nan")), "Received: nan"),
        (lambda: DILOCO(outer_momentum=1), "from 0 to below 1"),
        (lambda: DILOCO(outer_momentum="0.9"), "Received: '0.9'"),
        (lambda: DILOCO(fragments=0), "DiLoCo.fragments"),
        (lambda: DILOCO(every=50, fragments=3), "must be a multiple of fragments"),
        (lambda: fragments_of([4, 4], 3), "cannot part 2 variables"),
        (lambda: DILOCO(overlap_steps=-1), "DiLoCo.overlap_steps"),
        (lambda: DILOCO(every=4, overlap_steps=4), "must be below every"),
        (lambda: DILOCO(mixing=1), "DiLoCo.mixing must be a number from 0 to below 1"),
        (lambda: DILOCO(mixing=-0.5), "Received: -0.5"),
        (lambda: DILOCO(compression="int8"), "Received: 'int8'"),
        (lambda: DILOCO(quorum=0), "DiLoCo.quorum must be an integer of at least 1"),
        (lambda: DILOCO(quorum=True), "Received: True"),
        (lambda: DILOCO(quorum=2, grace_seconds=-1), "DiLoCo.grace_seconds"),
        (lambda: DILOCO(grace_seconds=1), "quorum=None waits for all hosts"),
        (lambda: tfdp.sync.BackupWorkers(-1), "BackupWorkers.spare must be an integer"),
        (
            lambda: checked_sync("diloco"),
            "sync must be one of tfdp.sync.Asynchronous",
        ),
        (lambda: checked_sync(DILOCO), "sync must be"),
        (lambda: checked_sync({"method": "Mine"}), "sync must be"),
    ],
)
def test_what_cannot_be_is_refused(make, words):
    with pytest.raises(ConfigurationError, match=words.replace("(", r"\(")):
        make()


@pytest.mark.parametrize(
    "sync",
    [
        LOCAL_SGD(4),
        LOCAL_SGD(1, start_step=10, across="replicas"),
        DILOCO(),
        DILOCO(every=50, outer_learning_rate=1, outer_momentum=0, start_step=7),
        DILOCO(every=4, fragments=2, overlap_steps=3, mixing=0.25),
        DILOCO(every=4, quorum=3, grace_seconds=1.5),
        tfdp.sync.BackupWorkers(spare=2),
    ],
)
def test_a_config_makes_the_same_value(sync):
    assert checked_sync(json.loads(json.dumps(sync.get_config()))) == sync
    assert checked_sync(sync) is sync


def test_values_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        LOCAL_SGD(4).every = 5


def test_the_papers_values_are_the_defaults():
    assert (DILOCO().outer_learning_rate, DILOCO().outer_momentum) == (0.7, 0.9)
    assert (DILOCO().every, DILOCO().start_step, DILOCO().across) == (500, 0, "hosts")


def test_what_is_mixed_in_is_the_papers_half_where_it_comes_late():
    assert DILOCO().local_share == 0.0  # it replaces the local weights
    assert DILOCO(every=4, overlap_steps=1).local_share == 0.5
    assert DILOCO(every=4, overlap_steps=1, mixing=0).local_share == 0.0


def test_fragments_hold_every_variable_once_and_are_even():
    sizes = [7, 300, 20, 100, 100, 90, 3, 3]
    parts = fragments_of(sizes, 3)
    assert sorted(place for part in parts for place in part) == list(range(8))
    filled = [sum(sizes[place] for place in part) for part in parts]
    assert max(filled) == 300  # the largest variable alone
    assert fragments_of(sizes, 1) == (tuple(range(8)),)
    assert all(fragments_of([0, 0, 0], 3))


def test_fragments_meet_in_turn_and_once_in_a_round():
    meetings = [synchronization_of(p, 4, 12) for p in range(4)]
    assert meetings == [3, 6, 9, 0]
    assert [synchronization_of(0, 1, every) for every in (1, 7)] == [0, 0]
