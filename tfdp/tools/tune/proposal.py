"""How fast the simulator thinks that each setting is, from one trial of the defaults.

What the replicas compute is what the defaults' step leaves beside its sums. All that is
wanted is an order: which settings are tried first, where not all can be. Nothing is
decided by it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from tfdp.errors import ConfigurationError
from tfdp.tools.simulator.lossy import KNOWN_WAYS, Lossy
from tfdp.tools.simulator.machine import Link, Machine
from tfdp.tools.simulator.model import Compute, ModelProfile
from tfdp.tools.simulator.step import Training, play_exchange
from tfdp.tools.tune.space import DEFAULTS, Place, Setting, Space

# Taken, not measured: what two cores of a PC hand to each other.
WITHIN = Link(latency_seconds=3e-5, bytes_per_second=4e9, compute_share=1.0)
BETWEEN = Link(latency_seconds=1e-4, bytes_per_second=5e8, compute_share=0.5)
ALGORITHMS = {"tensorflow": "ring", "mpi": "two_level"}
# By what recomputing the forward pass, a third of a step, makes it longer.
REMAT_FACTOR = 4 / 3
FITTING_TURNS = 8
LEAST_SHARE = 0.05


@dataclasses.dataclass(frozen=True)
class TrialFacts:
    """What the first trial found out.

    Args:
      model: its gradients.
      step_seconds: of a step of the whole batch.
      between: the link between processes; None: there is one process, or it was not
        measured.
    """

    model: ModelProfile
    step_seconds: float
    between: Link | None = None


def predicted_speed(
    setting: Setting, facts: TrialFacts, place: Place, tried: Setting = DEFAULTS
) -> float:
    """Samples per second, of all replicas.

    Args:
      setting: to predict.
      facts: of a trial.
      place: where.
      tried: the setting of that trial.
    """
    compute = facts.step_seconds
    for _ in range(FITTING_TURNS):
        sums = _seconds(tried, facts, place, compute) - compute * _factor(tried)
        left = (facts.step_seconds - sums) / _factor(tried)
        compute = max(left, LEAST_SHARE * facts.step_seconds)
    return place.rows / _seconds(setting, facts, place, compute)


def in_order(
    space: Space, facts: TrialFacts, tried: Setting, without: Iterable[Setting] = ()
) -> list[tuple[Setting, float]]:
    """The settings with their predicted speeds, the fastest first.

    Of those that are as fast as others the one with the fewest changes comes first.
    """
    left = [setting for setting in space.settings if setting not in set(without)]
    speeds = {
        setting: predicted_speed(setting, facts, space.place, tried) for setting in left
    }
    left.sort(key=lambda each: (-round(speeds[each], 9), len(each.changes)))
    return [(setting, speeds[setting]) for setting in left]


def _factor(setting: Setting) -> float:
    return REMAT_FACTOR if setting.remat else 1.0


def _seconds(
    setting: Setting, facts: TrialFacts, place: Place, compute_seconds: float
) -> float:
    """Of a step of the whole batch, in which the replicas compute so long."""
    steps = setting.accumulation_steps
    compute = _factor(setting) * compute_seconds / steps
    rows = max(1, place.rows // place.all_replicas // steps)
    training = Training(
        facts.model,
        Compute.from_seconds(compute, rows),
        Machine(
            "here",
            place.replicas,
            WITHIN,
            facts.between or BETWEEN,
            launch_seconds=1e-6,
        ),
        algorithm=_algorithm(setting, place),
        bucket_bytes=setting.bucket_bytes,
        first_bucket_bytes=setting.first_bucket_bytes,
        gather_parts=setting.shard == "parameters",
        lossy=_lossy(setting),
    )
    if place.all_replicas == 1:
        return compute * steps
    try:
        last = play_exchange(training, place.topology).end_seconds
    except ConfigurationError:
        return compute * steps
    # Of a batch in several steps one sends, but for shards of gradients.
    return last if steps == 1 else (steps - 1) * compute + last


def _algorithm(setting: Setting, place: Place) -> str:
    is_automatic = setting.engine == "auto"
    engine = place.automatic_engine if is_automatic else setting.engine
    return ALGORITHMS.get(engine, engine)


def _lossy(setting: Setting) -> Lossy | None:
    return None if setting.lossy is None else KNOWN_WAYS[setting.lossy]
