"""Hosts that train apart: the numbers of the equations, and silence in between."""

import numpy as np
import pytest

from tests.support import apart_training
from tests.support.apart import (
    ByHand,
    linear_model,
    parts_of,
    regression_data,
    vector_of,
)
from tests.support.workers import Workers

# See tests/devices/test_sync.py.
BOUND = 4e-5
LONG = {"overlap-fragments"}


@pytest.mark.worth_seconds(120)
@pytest.mark.parametrize(
    "devices", [1, pytest.param(2, marks=pytest.mark.slow)], ids=["2x1", "2x2"]
)
def test_hosts_meet_once_in_a_round_and_send_nothing_in_between(tmp_path, devices):
    names = [n for n in apart_training.SYNCS if devices == 2 or n not in LONG]
    path = tmp_path / "run"
    variables = {"TFDP_DEVICES_PER_WORKER": str(devices)}
    module = "tests.support.apart_training"
    with Workers(2, module, path, *names, variables=variables) as workers:
        workers.succeed()
    for name in names:
        check(path, name, devices)
    for rank in range(2):
        with np.load(f"{path}.resumed.{rank}.npz") as file:
            np.testing.assert_array_equal(file["straight"], file["resumed"])
    if devices == 1:  # of several replicas of a host the gradients are dense
        for rank in range(2):
            with np.load(f"{path}.slices.{rank}.npz") as file:
                # See tests/devices/test_sync_options.py.
                assert np.max(np.abs(file["plain"] - file["first"])) < 2e-6


def parts_on_hosts(x, y, devices, groups):
    """Batch by batch the rows of each group, of which each host has `groups`: a host
    takes its range of the batch (`tfdp.data.hosts.own_part`), and deals it out."""
    for start in range(0, len(x), apart_training.BATCH):
        rows = min(apart_training.BATCH, len(x) - start)
        parts = []
        for host in range(2):
            mine = slice(start + rows * host // 2, start + rows * (host + 1) // 2)
            (own,) = parts_of(x[mine], y[mine], rows, devices, groups)
            parts += own
        yield parts


def check(path, name, devices):
    sync = apart_training.SYNCS[name]
    groups = 2 * devices if sync.across == "replicas" else 2
    x, y = regression_data(apart_training.ROWS)
    by_hand = ByHand(sync, vector_of(linear_model().get_weights()), groups)
    talks, expected_losses = [], []
    for _ in range(apart_training.EPOCHS):
        for parts in parts_on_hosts(x, y, devices, groups // 2):
            by_hand.update(parts)
            each = sync.every // by_hand.fragments
            since = by_hand.updates - sync.start_step
            talks.append(since <= 0 or not since % each)
        expected_losses.append(by_hand.mean_loss())
    losses = []
    for rank in range(2):
        with np.load(f"{path}.{name}.{rank}.npz") as file:
            got = dict(file)
        assert np.max(np.abs(got["outer"] - by_hand.outer)) < BOUND
        for place, mine in enumerate(got["local"]):
            group = (rank * devices + place) * groups // (2 * devices)
            assert np.max(np.abs(mine - by_hand.local[group])) < BOUND
        check_silence(got["sent"], talks, getattr(sync, "overlap_steps", 0), name)
        losses.append(got["losses"])
        np.testing.assert_allclose(got["losses"], expected_losses, rtol=1e-4)
        predicted = x @ by_hand.outer[:-1, None] + by_hand.outer[-1]
        expected = np.mean((predicted - y) ** 2)
        assert got["evaluation"][0] == pytest.approx(expected, rel=1e-3)
    # What an epoch ends with is of all hosts, so that callbacks decide alike.
    np.testing.assert_array_equal(*losses)


def check_silence(sent, talks, overlap, name):
    """Bytes go in the steps in which hosts talk, or with an overlap up to so many
    later, and in no others.

    What travels meanwhile may go between two epochs, where nothing is counted.
    """
    of_epoch = -(-apart_training.ROWS // apart_training.BATCH)
    for step, talk in enumerate(talks):
        window = sent[step : step + overlap + 1]
        if talk and step // of_epoch == (step + overlap) // of_epoch:
            assert sum(window) > 0, (name, step, sent)
        if not any(talks[max(0, step - overlap) : step + 1]):
            assert sent[step] == 0, (name, step, sent)
