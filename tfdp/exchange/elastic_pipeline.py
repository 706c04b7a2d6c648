"""The exchanges of a host that trains apart from others, which may die and come back.

Within the host everything is as on one host. What goes to the others is not a part of
a step: only meetings, and the state for a host that comes in.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdp.errors import ConfigurationError
from tfdp.exchange.engine import Engine
from tfdp.exchange.host_calls import LinkCalls
from tfdp.exchange.pipeline import GradientPipeline
from tfdp.hosts.elastic_group import ElasticHosts
from tfdp.plan.communication import Communication


class ElasticPipeline(GradientPipeline):
    """A `GradientPipeline` of one host's replicas, with meetings.

    Args:
      engine: of this host's replicas.
      communication: as the strategy was given it.
      hosts: this host among the others.
    """

    def __init__(
        self, engine: Engine, communication: Communication, hosts: ElasticHosts
    ):
        super().__init__(engine, communication)
        self.living = hosts
        self._calls = LinkCalls()

    @property
    def host_groups(self) -> tuple[tuple[int, ...], ...] | None:
        """The replicas of this process, which step together."""
        return (tuple(range(self.engine.replicas)),)

    def sum_within(self, value: tf.Tensor, rank: int) -> tf.Tensor:
        """The sum over this host's replicas."""
        (total,) = self.all_reduce([tf.convert_to_tensor(value)], rank)
        return tf.convert_to_tensor(total)

    def sum_gradients(
        self,
        gradients: Sequence[Any],
        state: Sequence[tf.Tensor],
        rank: int,
        *,
        sum_rows: bool = False,
        at_once: bool = False,
    ) -> tuple[list[Any], list[tf.Tensor]]:
        """Refused: a gradient of all hosts needs all of them, in every step.

        Raises:
          ConfigurationError: always.
        """
        raise ConfigurationError(
            "Communication(min_hosts=...) lets hosts die and come back, and an "
            "optimizer adds up its gradients over all of them in every step. Train "
            "with model.fit and tfdp.DistributedOptimizer(optimizer, "
            "sync=tfdp.sync.DiLoCo(...)), all optimizers of the model, or leave "
            "min_hosts out."
        )

    def meet(
        self, update: tf.Tensor, values: Sequence[tf.Tensor], rank: int
    ) -> tuple[list[tf.Tensor], tf.Tensor]:
        """The means over the hosts that are present; see `ElasticHosts.meet`.

        In replica context. The replicas of this host bring the same: the first speaks
        for them.

        Returns:
          The means, and how the meeting ended: an int32.
        """

        def meet(update: np.ndarray, *arrays: np.ndarray) -> list[np.ndarray]:
            means, outcome = self.living.meet(int(update), arrays)
            return [*means, np.array(outcome, np.int32)]

        specs = [tf.TensorSpec(value.shape, value.dtype) for value in values]
        specs.append(tf.TensorSpec([], tf.int32))
        if rank == 0:
            results = self._calls.call(meet, [update, *values], specs)
        else:
            results = [tf.zeros(spec.shape, spec.dtype) for spec in specs]
        *means, outcome = (self.broadcast(result, rank) for result in results)
        return means, outcome

    def exchange_state(self, values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """See `ElasticHosts.exchange_state`; outside of replicas."""

        def exchange(*arrays: np.ndarray) -> list[np.ndarray]:
            return self.living.exchange_state(arrays)

        specs = [tf.TensorSpec(value.shape, value.dtype) for value in values]
        return self._calls.call(exchange, values, specs)
