"""Hosts that push gradients at their own pace to the owners of the weights."""

import json
import re

import numpy as np
import pytest

from tests.support.apart import gradient_of, linear_model, regression_data, vector_of
from tests.support.own_pace import (
    BATCH,
    EPOCHS,
    MOMENTUM,
    RATE,
    ROWS,
    WORDS,
    embedding_model,
    words,
)
from tests.support.workers import Workers

HOSTS = 2
# 36 updates by means of at most 4 rows, of products below 20: in float32 (u = 6e-8) at
# most 9 * 20 * u of a gradient, times a rate of 0.02 / (1 - 0.5), 36 times: 1.6e-5.
BOUND = 4e-5
# Adam with an epsilon of 1e-3 moves a weight by at most 0.01 in each of 18 updates. A
# gradient below 0.2 that is wrong by 9 * 0.2 * u changes its quotient by at most 1e-4:
# 18 * 0.01 * 1e-4 = 2e-5. An update with another version is 1e-3 off.
ADAM_BOUND = 5e-5


REFUSED = {
    "outside_of_fit": "ConfigurationError: .*this step is outside of it",
    "assigned_within": "Weights were assigned, or restored, within an epoch",
    "guarded": "ConfigurationError: .*NaNGuard",
    "constrained": "ConfigurationError: .* has a constraint",
}


@pytest.mark.worth_seconds(120)
@pytest.mark.parametrize(
    "devices", [1, pytest.param(2, marks=pytest.mark.slow)], ids=["2x1", "2x2"]
)
def test_hosts_train_at_their_own_pace(tmp_path, devices):
    variables = {"TFDP_DEVICES_PER_WORKER": str(devices)}
    module = "tests.support.own_pace"
    with Workers(HOSTS, module, tmp_path, variables=variables) as workers:
        workers.succeed()

    def both(name):
        files = [tmp_path / f"{name}.{rank}.json" for rank in range(HOSTS)]
        return [json.loads(file.read_text()) for file in files]

    check_replay(both("replay"))
    check_embeddings(both("embeddings"))
    check_unequal(both("unequal"), devices)
    check_looks(both("looks"))
    for each in both("refused"):
        for name, said in REFUSED.items():
            assert re.search(said, each[name]), each[name]
    for each in both("learned"):
        # Guessing is 10%; the classes hardly overlap.
        assert each["accuracy"] > 0.98


def part(vector, shapes, owner):
    """The owner's part of each weight in `vector`: the first half is rounded up."""
    mine, start = [], 0
    for shape in shapes:
        size = int(np.prod(shape))
        half = -(-size // HOSTS)
        mine.append(
            np.arange(start + half * owner, start + min(size, half * (owner + 1)))
        )
        start += size
    return np.concatenate(mine)


def replayed(both, start, shapes, gradient, begin, update, staleness_aware=True):
    """The weights after all pushes, by the logs of the pushes and of their owners.

    Args:
      gradient: by the host, the number of its push and the weights.
      begin: the state of an owner of so many elements.
      update: changes state; returns the change of weights by version, gradient, rate.
    """
    own = [part(start, shapes, owner) for owner in range(HOSTS)]
    states = [begin(own[owner]) for owner in range(HOSTS)]
    versions = [[start[own[owner]]] for owner in range(HOSTS)]
    counts = np.zeros((HOSTS, HOSTS), int)
    gradients, left = {}, [list(one["applied"]) for one in both]
    while any(left):
        has_moved = False
        for owner in range(HOSTS):
            if not left[owner]:
                continue
            rank, version, at, rate, *_ = left[owner][0]
            number = counts[owner, rank]
            pulled = both[rank]["pushed"][number]
            if any(pulled[str(o)] >= len(versions[o]) for o in range(HOSTS)):
                continue
            assert version == pulled[str(owner)] <= at == len(versions[owner]) - 1
            if (rank, number) not in gradients:
                weights = np.zeros_like(start)
                for o in range(HOSTS):
                    weights[own[o]] = versions[o][pulled[str(o)]]
                gradients[rank, number] = gradient(rank, number, weights)
            if staleness_aware:
                rate /= max(1, at - version)
            ours, now = gradients[rank, number][own[owner]], versions[owner][-1]
            versions[owner].append(now + update(states[owner], now, at, ours, rate))
            counts[owner, rank] += 1
            left[owner].pop(0)
            has_moved = True
        assert has_moved, "the logs contradict each other"
    result = np.zeros_like(start)
    for owner in range(HOSTS):
        result[own[owner]] = versions[owner][-1]
    return result


def rows_of(rank, number):
    """A host's rows of the global batch of its step `number`."""
    start = number % -(-ROWS // BATCH) * BATCH
    count = min(BATCH, ROWS - start)
    return slice(start + count * rank // HOSTS, start + count * (rank + 1) // HOSTS)


def check_staleness(both):
    """Counted as the logs say, on all hosts."""
    counted = {}
    for rank, version, at, *_ in (*both[0]["applied"], *both[1]["applied"]):
        assert rank in range(HOSTS)
        counted[str(at - version)] = counted.get(str(at - version), 0) + 1
    for one in both:
        assert one["staleness"] == counted
        assert one["iterations"] == len(one["applied"])


def check_replay(both):
    x, y = regression_data(ROWS)
    start = vector_of(linear_model().get_weights())
    shapes = [(5, 1), (1,)]

    def gradient(rank, number, weights):
        rows = rows_of(rank, number)
        return gradient_of(weights, x[rows], y[rows])

    def update(velocity, weights, at, gradient, rate):
        velocity *= MOMENTUM
        velocity -= rate * gradient
        return velocity

    def final(**options):
        begin = lambda own: np.zeros(len(own))  # noqa: E731
        return replayed(both, start, shapes, gradient, begin, update, **options)

    weights = [np.concatenate([np.ravel(w) for w in one["weights"]]) for one in both]
    np.testing.assert_array_equal(*weights)
    assert both[0]["validation"] == both[1]["validation"]
    assert np.max(np.abs(weights[0] - final())) < BOUND
    # And the division by the staleness matters.
    assert np.max(np.abs(weights[0] - final(staleness_aware=False))) > 10 * BOUND
    check_staleness(both)
    # The rate of the second epoch, and a push that waited for all of the other host's.
    rates = [rate for *_, rate, _, _ in both[0]["applied"]]
    np.testing.assert_allclose([rates[0], rates[-1]], [RATE, RATE / EPOCHS], rtol=1e-6)
    assert max(map(int, both[0]["staleness"])) >= -(-ROWS // BATCH) - 2


def check_embeddings(both):
    """Adam with clipping and decay; the table travels as rows, each word once."""
    tokens, targets = words(ROWS)
    model = embedding_model()
    shapes = [w.shape for w in model.get_weights()]
    start = np.concatenate([np.ravel(w) for w in model.get_weights()]).astype("float64")
    edges = np.cumsum([int(np.prod(shape)) for shape in shapes])[:-1]

    def gradient(rank, number, weights):
        rows = rows_of(rank, number)
        parts = np.split(weights, edges)
        model.set_weights([p.reshape(s) for p, s in zip(parts, shapes, strict=True)])
        table, kernel, bias = (w.astype("float64") for w in model.get_weights())
        looked = table[tokens[rows]].reshape(len(tokens[rows]), -1)
        errors = 2 * (looked @ kernel + bias - targets[rows]) / len(looked)
        of_table = np.zeros_like(table)
        of_words = (errors @ kernel.T).reshape(-1, table.shape[1])
        np.add.at(of_table, tokens[rows].reshape(-1), of_words)
        whole = [of_table, looked.T @ errors, errors.sum(axis=0)]
        flat = np.concatenate([np.ravel(g) for g in whole])
        return flat * min(1.0, 0.2 / np.linalg.norm(flat))

    def begin(own):
        return {
            "m": np.zeros(len(own)),
            "v": np.zeros(len(own)),
            "decays": own < edges[1],
        }

    def update(state, weights, at, gradient, rate):
        before = weights * state["decays"] * 0.01 * rate
        state["m"] = 0.9 * state["m"] + 0.1 * gradient
        state["v"] = 0.999 * state["v"] + 0.001 * gradient**2
        alpha = rate * np.sqrt(1 - 0.999 ** (at + 1)) / (1 - 0.9 ** (at + 1))
        return -before - alpha * state["m"] / (np.sqrt(state["v"]) + 1e-3)

    final = replayed(both, start, shapes, gradient, begin, update)
    for one in both:
        weights = np.concatenate([np.ravel(w) for w in one["weights"]])
        assert np.max(np.abs(weights - final)) < ADAM_BOUND
    check_staleness(both)
    # Owner 0 has 62 of 123 elements: row 20 is cut between the two.
    for owner, (first, end) in enumerate([(0, 21), (20, WORDS)]):
        numbers = [0] * HOSTS
        for rank, *_, kinds, sizes in both[owner]["applied"]:
            looked = np.unique(tokens[rows_of(rank, numbers[rank])])
            numbers[rank] += 1
            assert kinds[0] and sizes[0] == np.sum((looked >= first) & (looked < end))


def check_unequal(both, devices=1):
    first, second = both
    assert first["state"] == second["state"]
    # Two epochs of 6 and 2 batches, one per replica; then 7 and 2 steps, and 2 of each
    # of those left.
    assert first["by_data"] == 2 * (6 + 2) // devices
    assert first["iterations"] == first["by_data"] + (7 + 2) + (2 + 2)
    check_staleness(both)
    assert [len(one["pushed"]) for one in both] == [
        2 * 6 // devices + 9,
        2 * 2 // devices + 4,
    ]


def check_looks(both):
    for one in both:
        # All pushes of four steps of both hosts, in the first and in the second epoch.
        assert [updates for *_, updates in one["seen"]] == [8, 18 + 8]
        for loss, own, _ in one["seen"]:
            np.testing.assert_allclose(loss, own, rtol=1e-5)
        assert one["restored"] == one["weights"]
    for name in ("seen", "weights", "restored"):
        assert both[0][name] == both[1][name]
    check_staleness(both)
