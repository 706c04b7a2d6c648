"""The exchanges of a host that trains independently; other hosts may die and return.

Within the host everything is as on one host. Other hosts take part only in elastic
outer steps and in sending state to a host that joins.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import tensorflow as tf

from tfdp.errors import ConfigurationError
from tfdp.exchange.link_calls import LinkCalls
from tfdp.exchange.packing import Tensors
from tfdp.exchange.reducer import Reducer
from tfdp.exchange.transport import Transport
from tfdp.hosts.elastic_group import ElasticHosts
from tfdp.lint.registry import register_exchanged
from tfdp.plan.communication import Communication

if TYPE_CHECKING:
    from tfdp.hosts.quorum_values import QuorumRules


class ElasticPipeline(Reducer):
    """A `Reducer` of one host's replicas, with elastic outer steps."""

    def __init__(
        self, transport: Transport, communication: Communication, hosts: ElasticHosts
    ):
        super().__init__(transport, communication)
        self.hosts = hosts
        self._calls = LinkCalls()

    def sum_gradients(self, *arguments: Any, **options: Any) -> NoReturn:
        """Always raises: gradients of all hosts need all of them in every step."""
        raise ConfigurationError(
            "Communication(min_hosts=...) lets hosts die and come back, and an "
            "optimizer adds up its gradients over all of them in every step. Train "
            "with model.fit and tfdp.DistributedOptimizer(optimizer, "
            "sync=tfdp.sync.DiLoCo(...)), all optimizers of the model, or leave "
            "min_hosts out."
        )

    def meet(
        self, update: tf.Tensor, values: Tensors, rank: int
    ) -> tuple[list[tf.Tensor], tf.Tensor]:
        """The means over the hosts that are present, and the outcome, an int32.

        In replica context. The replicas of this host pass equal values: the first one
        exchanges them. See `ElasticHosts.meet`.
        """

        def meet(update: np.ndarray, *arrays: np.ndarray) -> list[np.ndarray]:
            means, outcome = self.hosts.meet(int(update), arrays)
            return [*means, np.array(outcome, np.int32)]

        specs = [tf.TensorSpec(value.shape, value.dtype) for value in values]
        specs.append(tf.TensorSpec([], tf.int32))
        *means, outcome = self._on_first(meet, [update, *values], specs, rank)
        return means, outcome

    def begin_quorum(self, rules: QuorumRules, values: Tensors) -> None:
        """Sets, while a graph is built, what `meet_quorum` will exchange, and how."""
        like = [np.zeros(v.shape, v.dtype.as_numpy_dtype) for v in values]
        self.hosts.begin_quorum(rules, like)

    def meet_quorum(
        self, update: tf.Tensor, weight: tf.Tensor, values: Tensors, rank: int
    ) -> tuple[list[tf.Tensor], tf.Tensor]:
        """Averages over a quorum in a step; see `ElasticHosts.meet_quorum`, whose two
        numbers are one int32 tensor."""

        def meet(
            update: np.ndarray, weight: np.ndarray, *arrays: np.ndarray
        ) -> list[np.ndarray]:
            found = self.hosts.meet_quorum(int(update), float(weight), arrays)
            means, *numbers = found
            return [*means, np.array(numbers, np.int32)]

        specs = [tf.TensorSpec([None, *v.shape], v.dtype) for v in values]
        specs.append(tf.TensorSpec([2], tf.int32))
        *means, state = self._on_first(meet, [update, weight, *values], specs, rank)
        return means, state

    def _on_first(
        self,
        function: Callable[..., list[np.ndarray]],
        values: Tensors,
        specs: Sequence[tf.TensorSpec],
        rank: int,
    ) -> list[tf.Tensor]:
        """Calls `function` on the first replica; all replicas return its results."""
        results: list[Any] = list(specs)
        if rank == 0:
            results = self._calls.call(function, values, specs)
        if self.transport.replicas == 1:
            return results
        return [register_exchanged(r) for r in self.transport.broadcast(results, rank)]

    def exchange_state(self, values: Tensors) -> list[tf.Tensor]:
        """See `ElasticHosts.exchange_state`; in cross-replica context."""

        def exchange(*arrays: np.ndarray) -> list[np.ndarray]:
            return self.hosts.exchange_state(arrays)

        specs = [tf.TensorSpec(value.shape, value.dtype) for value in values]
        return self._calls.call(exchange, values, specs)
