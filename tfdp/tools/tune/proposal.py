"""Simulated speed of each setting, from one trial of the defaults.

The compute time is the trial's step less its simulated sums. The result only orders the
trials where there is no time for all; measurements decide.
"""

from __future__ import annotations

import dataclasses

from tfdp.errors import ConfigurationError
from tfdp.tools.simulator.lossy import KNOWN_WAYS
from tfdp.tools.simulator.machine import Link, Machine
from tfdp.tools.simulator.model import Compute, ModelProfile
from tfdp.tools.simulator.step import Training, simulate_exchange
from tfdp.tools.tune.space import DEFAULTS, Setting, Space, TrialLayout

# Load of the cores while a sum crosses a link of this machine; see `tfdp measure`. It
# hardly affects the order of settings.
COMPUTE_SHARE = 0.5

# Assumed, not measured: two cores of a PC.
WITHIN = Link(latency_seconds=3e-5, bytes_per_second=4e9, compute_share=1.0)
BETWEEN = Link(latency_seconds=1e-4, bytes_per_second=5e8, compute_share=0.5)
ALGORITHMS = {"tensorflow": "ring", "mpi": "two_level"}
# Recomputing the forward pass, a third of a step.
REMAT_FACTOR = 4 / 3
FITTING_ROUNDS = 8
LEAST_SHARE = 0.05


@dataclasses.dataclass(frozen=True)
class TrialFacts:
    """Results of the first trial; `between`: the measured link between processes."""

    model: ModelProfile
    step_seconds: float
    between: Link | None = None


def predicted_speed(
    setting: Setting, facts: TrialFacts, place: TrialLayout, tried: Setting = DEFAULTS
) -> float:
    """Samples per second of all replicas, from a trial of the setting `tried`."""
    compute = facts.step_seconds
    for _ in range(FITTING_ROUNDS):
        sums = _seconds(tried, facts, place, compute) - compute * _factor(tried)
        left = (facts.step_seconds - sums) / _factor(tried)
        compute = max(left, LEAST_SHARE * facts.step_seconds)
    return place.rows / _seconds(setting, facts, place, compute)


def in_order(
    space: Space, facts: TrialFacts, tried: Setting
) -> list[tuple[Setting, float]]:
    """Settings with predicted speeds, fastest first; on a tie, fewest changes first."""
    found = [
        (setting, predicted_speed(setting, facts, space.place, tried))
        for setting in space.settings
    ]
    return sorted(found, key=lambda each: (-round(each[1], 9), len(each[0].changes)))


def _factor(setting: Setting) -> float:
    return REMAT_FACTOR if setting.remat else 1.0


def _seconds(
    setting: Setting, facts: TrialFacts, place: TrialLayout, compute_seconds: float
) -> float:
    """Predicts the seconds of a step of the whole batch by its compute time."""
    steps = setting.accumulation_steps
    compute = _factor(setting) * compute_seconds / steps
    rows = max(1, place.rows // place.all_replicas // steps)
    between = facts.between or BETWEEN
    engine = place.engine_of(setting)
    training = Training(
        facts.model,
        Compute.from_seconds(compute, rows),
        Machine("here", place.replicas, WITHIN, between, launch_seconds=1e-6),
        algorithm=ALGORITHMS.get(engine, engine),
        bucket_bytes=setting.bucket_bytes,
        first_bucket_bytes=setting.first_bucket_bytes,
        gather_parts=setting.shard == "parameters",
        lossy=None if setting.lossy is None else KNOWN_WAYS[setting.lossy],
    )
    if place.all_replicas == 1:
        return compute * steps
    try:
        last = simulate_exchange(training, place.topology)
    except ConfigurationError:
        return compute * steps
    # With accumulation only the last step exchanges, except for sharded gradients.
    return last if steps == 1 else (steps - 1) * compute + last
