"""Updates by the gradients of earlier steps, on hosts that run at their own pace."""

import numpy as np
import pytest

from tests.support.apart import (
    MOMENTUM,
    RATE,
    gradient_of,
    linear_model,
    regression_data,
    vector_of,
)
from tests.support.late_training import (
    AHEAD,
    BATCH,
    EPOCHS,
    ROWS,
    STALE_STEPS,
    STALENESS,
    WAITS,
)
from tests.support.workers import Workers

# See tests/devices/test_sync.py: nine updates by sums of at most 24 terms.
BOUND = 4e-5


@pytest.mark.worth_seconds(90)
@pytest.mark.parametrize(
    "devices", [1, pytest.param(2, marks=pytest.mark.slow)], ids=["2x1", "2x2"]
)
def test_hosts_make_the_same_late_updates(tmp_path, devices):
    variables = {"TFDP_DEVICES_PER_WORKER": str(devices)}
    module = "tests.support.late_training"
    with Workers(2, module, tmp_path, variables=variables) as workers:
        workers.succeed()

    def both(name):
        return [dict(np.load(tmp_path / f"{name}.{rank}.npz")) for rank in range(2)]

    check_delayed(*both("delayed"))
    for plain, zero in zip(both("plain"), both("zero"), strict=True):
        np.testing.assert_array_equal(plain["weights"], zero["weights"])
    for each in both("resumed"):
        np.testing.assert_array_equal(each["straight"], each["again"])
    check_stale(*both("stale"))


def check_delayed(first, second):
    """w_(t+1) = w_t - opt(g_(t-1)), and what is left at the end of each epoch."""
    x, y = regression_data(ROWS)
    weights = vector_of(linear_model().get_weights())
    velocity, losses = np.zeros_like(weights), []
    for _ in range(EPOCHS):
        in_flight = []
        for start in range(0, ROWS, BATCH):
            rows = slice(start, start + BATCH)
            in_flight.append(gradient_of(weights, x[rows], y[rows]))
            late = in_flight[:-1] if start + BATCH < ROWS else in_flight
            for gradient in late:
                velocity = MOMENTUM * velocity - RATE * gradient
                weights = weights + velocity
            del in_flight[: len(late)]
        errors = x @ weights[:-1, None] + weights[-1] - y
        losses.append(np.mean(errors**2))
    assert np.max(np.abs(first["weights"] - weights)) < BOUND
    # Losses near 1 of weights within BOUND, and of errors below 20.
    np.testing.assert_allclose(first["validation"], losses, rtol=2e-3)
    for name, value in first.items():
        np.testing.assert_array_equal(value, second[name])


def check_stale(first, second):
    np.testing.assert_array_equal(first["weights"], second["weights"])
    for mine, theirs in ((first, second), (second, first)):
        assert len(mine["begun"]) == len(mine["ended"]) == STALE_STEPS
        made = np.cumsum(mine["updates"])
        for step, (ended, updates) in enumerate(zip(mine["ended"], made, strict=True)):
            # The weights of the next step have all updates up to this one's, less s,
            assert step + 1 - STALENESS <= updates <= step + 1
            # which all hosts had begun: nobody is more than s steps ahead.
            assert updates == 0 or theirs["begun"][updates - 1] < ended
    # Worker 1 waited for worker 0, which was two steps ahead.
    assert first["begun"][AHEAD] < second["begun"][WAITS]
    assert AHEAD - WAITS == STALENESS
    # And no further: it ended that step after worker 1 had begun its own.
    assert second["begun"][WAITS] < first["ended"][AHEAD]
