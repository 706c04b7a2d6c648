"""What the steps of a `fit` have sent, read when somebody asks."""

from __future__ import annotations

import dataclasses

import keras

from tfdp.errors import ConfigurationError
from tfdp.exchange.engine import Engine
from tfdp.exchange.pipeline import GradientPipeline
from tfdp.exchange.traffic_meter import TrafficMeter

__all__ = ["Reading", "TrafficReader", "engine_of"]


@dataclasses.dataclass(frozen=True)
class Reading:
    """What had been counted at one moment.

    Args:
      steps: that had run.
      within, between: bytes; None where nobody counts them.
    """

    steps: int = 0
    within: int | None = 0
    between: int | None = 0

    def plus(self, other: Reading, sign: int = 1) -> Reading:
        """Both together; with `sign=-1` what came since `other`."""

        def joined(mine: int | None, theirs: int | None) -> int | None:
            return None if mine is None or theirs is None else mine + sign * theirs

        return Reading(
            self.steps + sign * other.steps,
            joined(self.within, other.within),
            joined(self.between, other.between),
        )


class TrafficReader:
    """Counts what the replicas of this process send, in graphs that are built from now.

    Args:
      engine: what exchanges; None: there is one replica alone, which sends nothing.
    """

    def __init__(self, engine: Engine | None):
        self._engine = engine
        self._meter = TrafficMeter()
        if engine is not None:
            engine.traffic.meters.add(self._meter)

    def read(self) -> Reading:
        """What was sent so far."""
        if self._engine is None:
            return Reading()
        return Reading(self._meter.steps, *self.sent())

    def sent(self) -> tuple[int | None, int | None]:
        """The bytes within and between hosts; the steps are not asked for."""
        if self._engine is None:
            return 0, 0
        return self._meter.sent_bytes, self._engine.sent_between_hosts()

    def close(self) -> None:
        """Graphs that are built from now on do not count for it."""
        if self._engine is not None:
            self._engine.traffic.meters.discard(self._meter)


def engine_of(model: keras.Model, who: str) -> Engine | None:
    """What exchanges in the steps of `model`; None where there is one replica alone.

    Raises:
      ConfigurationError: nobody can count there; naming `who` asked.
    """
    strategy = model.distribute_strategy
    reducer = getattr(strategy.extended, "reducer", None)
    if not isinstance(reducer, GradientPipeline):
        if strategy.num_replicas_in_sync == 1:
            return None
        raise ConfigurationError(
            f"{who} counts what tfdp sends between CPUs or GPUs, and the model was "
            f"compiled under {type(strategy).__name__}. Make it under "
            "tfdp.DataParallelStrategy or tfdp.MultiHostDataParallelStrategy, or leave "
            "the callback out."
        )
    if model.run_eagerly and reducer.engine.replicas > 1:
        raise ConfigurationError(
            f"{who} counts in graphs, and the model was compiled with "
            "run_eagerly=True, where TensorFlow exchanges in its own way. Compile with "
            "run_eagerly=False, or leave the callback out."
        )
    return reducer.engine
