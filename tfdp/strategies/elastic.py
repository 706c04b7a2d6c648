"""`MultiHostDataParallelStrategy` with `Communication(min_hosts=...)`: elastic hosts.

To TensorFlow and Keras each host trains its own replicas only; see
`tfdp.hosts.elastic_group` for the exchanges between hosts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from tfdp._private import frames, keras_calls
from tfdp._private.keras_loops import watch_loop
from tfdp._private.keras_models import initial_epoch, set_initial_epoch
from tfdp.cluster import Cluster
from tfdp.data.grain import own_rows
from tfdp.data.hosts import agree_on_seed, seed_to_share
from tfdp.errors import ConfigurationError
from tfdp.hosts.choose_link import warn_without_key
from tfdp.hosts.connect import job_secret
from tfdp.hosts.elastic_group import ElasticHosts
from tfdp.plan.communication import Communication


def join_elastic_hosts(
    cluster: Cluster, communication: Communication, settings: Mapping[str, Any]
) -> ElasticHosts:
    """Connects to the other hosts, or joins those that train already."""
    if cluster.coordinator is None or communication.min_hosts is None:
        raise ConfigurationError(
            f"{cluster.source} gives ranks but no address of worker 0, and elastic "
            "hosts connect by sockets. Set TFDP_COORDINATOR to its 'host:port' for all "
            "workers."
        )
    warn_without_key(cluster)
    hosts = ElasticHosts(
        cluster.rank,
        cluster.workers,
        cluster.coordinator,
        timeout_seconds=communication.timeout_seconds,
        silence_seconds=communication.silence_seconds,
        min_hosts=communication.min_hosts,
        secret=job_secret(cluster),
        settings=settings,
        seed=[int(part) for part in seed_to_share()],
    )
    agree_on_seed(np.array(hosts.seed))
    return hosts


def refuse_exchange(label: str) -> None:
    """Refuses an exchange that needs all hosts at one moment."""
    raise ConfigurationError(
        f"This exchange ({label}) needs all hosts at one moment, and with "
        "Communication(min_hosts=...) they may be at different steps, or dead. Leave "
        "out what needs it (a checkpoint, a comparison, a barrier), or min_hosts."
    )


def own_share(dataset: Any, cluster: Cluster, hosts: ElasticHosts) -> Any:
    """This host's rows of every batch of `fit`; all rows for evaluate or predict."""
    fit = frames.training_input_of_caller()
    if fit is None or not isinstance(dataset, tf.data.Dataset):
        return dataset
    _FitAmongHosts(fit, hosts)
    adapter = keras_calls.adapter_of_caller()
    return own_rows(dataset, adapter, cluster.rank, cluster.workers)


class _FitAmongHosts:
    """Announces the position of this `fit` to the group, and ends it with theirs."""

    def __init__(self, fit: frames.KerasLoop, hosts: ElasticHosts):
        self._hosts, self._model = hosts, fit["self"]
        self._epochs = int(fit["epochs"])
        self._loop = keras_calls.loop_of_caller()
        self._epoch_of_program = initial_epoch(self._model)
        #: Batches by which the group is ahead of this fit's own count.
        self._ahead = 0
        self._announced: tuple[int, int] | None = None
        first = self._epoch_of_program or int(fit["initial_epoch"] or 0)
        if hosts.comes_back:
            place = hosts.place_of_group()
            if place is not None and first < place[0] < self._epochs:
                first = place[0]
                set_initial_epoch(self._model, first)
        hosts.comes_back = False
        hosts.begin_fit()
        watch_loop(self._loop, first, self._goes_on)

    def _goes_on(self, epoch: int, batch: int) -> bool:
        """Whether a further step follows; asked before each step."""
        # `fit` has read the initial epoch; Keras would keep it for every later call.
        set_initial_epoch(self._model, self._epoch_of_program)
        if self._hosts.is_over:
            self._model.stop_training = True
            return False
        batches = self._loop.num_batches
        if not batches:
            return True  # unknown in the first pass over some pipelines
        if self._announced is not None and self._hosts.place != self._announced:
            # This host has joined meanwhile, at its peer's position.
            self._ahead += _number(self._hosts.place, batches)
            self._ahead -= _number(self._announced, batches)
        self._ahead += self._skipped_batches()
        mine = epoch * batches + batch + self._ahead
        self._announced = self._hosts.place = divmod(mine, batches)
        left = self._epochs * batches - mine
        # Keras checks after the steps; before the next one it has begun an epoch.
        is_last = left <= self._model.steps_per_execution and self._ahead
        if is_last or left <= 0:
            self._model.stop_training = True
        return left > 0

    def _skipped_batches(self) -> int:
        updates, self._hosts.skipped_updates = self._hosts.skipped_updates, 0
        return updates * getattr(self._model.optimizer, "accumulate_steps", 1)


def _number(place: tuple[int, int], batches: int) -> int:
    return place[0] * batches + place[1]
